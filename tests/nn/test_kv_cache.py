"""KVCache: what a decoder sees step by step is causal attention over everything at once."""

from __future__ import annotations

import copy
import math
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import nn
from centella.check.cases.case import FLOATS
from centella.check.cases.compare import TOLERANCE
from centella.dtypes import dtype_of, narrow, widen
from centella.nn.block_cache import BlockCache
from tests.support.devices import own

Array = np.ndarray[Any, Any]
BATCH, HEADS, SHARED = 2, 4, 2  # query heads, and those of keys and values


def numbers(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    """Normal values as `dtype` stores them."""
    kind = dtype_of(dtype)
    return widen(narrow(rng.standard_normal(shape).astype(np.float32), kind), kind)


@dataclass
class Past:
    """The same as a KVCache in float64 on the host: keys and values of one layer, a sequence each.

    Attributes:
        pairs: for each sequence [2, heads, tokens, head_dim].
        starts: where the current step began.
    """

    batch: int
    dim: int
    heads: int = SHARED
    pairs: list[Array] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.truncate([0] * self.batch)

    def append(self, k: Array, v: Array) -> None:
        self.starts = [p.shape[2] for p in self.pairs]
        self.pairs = [
            np.concatenate([p, np.stack([k[b], v[b]])], axis=2) for b, p in enumerate(self.pairs)
        ]

    def write(self, position: int, k: Array, v: Array) -> None:
        for b, pair in enumerate(self.pairs):
            pair[:, :, position : position + k.shape[2]] = np.stack([k[b], v[b]])

    def truncate(self, lengths: list[int]) -> None:
        none = np.zeros((2, self.heads, 0, self.dim))
        pairs = self.pairs or [none] * self.batch
        self.pairs = [p[:, :, :n].copy() for p, n in zip(pairs, lengths, strict=True)]

    def attend(self, q: Array) -> Array:
        """softmax(q k^T / sqrt(d)) v, each query over the keys up to its own."""
        outputs = []
        for b, (k, v) in enumerate(self.pairs):
            share, tokens = q.shape[1] // k.shape[0], q.shape[2]
            k, v = np.repeat(k, share, 0), np.repeat(v, share, 0)
            scores = q[b].astype(np.float64) @ k.swapaxes(-1, -2) / math.sqrt(self.dim)
            later = np.arange(k.shape[1]) > self.starts[b] + np.arange(tokens)[:, None]
            scores[:, later] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v)
        return np.stack(outputs)


def near(got: Array, wanted: Array, dtype: str) -> None:
    error = np.square(got.astype(np.float64) - wanted).sum() / np.square(wanted).sum()
    few = wanted.size < 64 and dtype != "f32"  # too few to average the rounding of their stores
    limit = max(TOLERANCE[dtype][1], few * 1.1 * dtype_of(dtype).epsilon ** 2)
    assert error <= limit, f"{error:.1e} > {limit:.0e}"


@dataclass
class Decoder:
    """A cache and its counterpart on the host, given the same steps."""

    device: ct.Device
    cache: ct.KVCache
    past: list[Past]
    rng: np.random.Generator
    seen: list[tuple[ct.Tensor, Array]] = field(default_factory=list)

    def tensor(self, value: Array) -> ct.Tensor:
        return ct.asarray(value, self.cache.dtype, self.device)

    def draw(self, heads: int, tokens: int) -> Array:
        batch, _, _, dim = self.cache.shape
        return numbers(self.rng, self.cache.dtype.name, batch, heads, tokens, dim)

    def step(self, tokens: int = 1) -> None:
        """New tokens through every layer."""
        for layer, past in enumerate(self.past):
            k, v = self.draw(past.heads, tokens), self.draw(past.heads, tokens)
            q = self.draw(HEADS, tokens)
            self.cache.append(self.tensor(k), self.tensor(v), layer)
            past.append(k, v)
            self.seen.append((self.cache.attend(self.tensor(q), layer), past.attend(q)))

    def truncate(self, *lengths: int) -> None:
        whole = len(lengths) == 1
        self.cache.truncate(lengths[0] if whole else lengths)
        for past in self.past:
            past.truncate(list(lengths) * (past.batch if whole else 1))

    def write(self, position: int, tokens: int, layer: int) -> None:
        k, v = self.draw(SHARED, tokens), self.draw(SHARED, tokens)
        self.cache.write(position, self.tensor(k), self.tensor(v), layer)
        self.past[layer].write(position, k, v)

    def check(self) -> None:
        """Every answer, in one read."""
        lengths = tuple(pair.shape[2] for pair in self.past[0].pairs)
        assert self.cache.lengths == lengths
        assert self.cache.length == max(lengths)
        for value, (_, wanted) in zip(
            ct.fetch(*(t for t, _ in self.seen)).result(), self.seen, strict=True
        ):
            near(value, wanted, self.cache.dtype.name)
        self.seen.clear()


def decoder(
    device: ct.Device, *, dtype: str = "f32", batch: int = BATCH, dim: int = 5, capacity: int = 9,
    layers: int = 1, seed: int = 0,
) -> Decoder:  # fmt: skip
    cache = ct.KVCache(batch, SHARED, dim, capacity, num_layers=layers, dtype=dtype, device=device)
    past = [Past(batch, dim) for _ in range(layers)]
    return Decoder(device, cache, past, np.random.default_rng(seed))


# -- the same as all at once ----------------------------------------------------------------------


SIZES: tuple[dict[str, Any], ...] = (
    *({"dtype": t, **n} for t in FLOATS for n in ({}, {"capacity": 70, "dim": 8}, {"layers": 3})),
    {"dtype": "bf16", "dim": 1}, {"dtype": "f16", "capacity": 67, "dim": 3},
)  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill_and_decode_equal_full_attention(device: ct.Device, sizes: dict[str, Any]) -> None:
    """Past capacity 64 the keys of few queries are split; 4 tokens are few."""
    d = decoder(device, **sizes)
    for tokens in (3, 1, 1, 4):
        d.step(tokens)
    d.check()


def test_a_long_prefill_and_one_token_more(device: ct.Device) -> None:
    d = decoder(device, capacity=77, dim=16)
    for tokens in (66, 1, 10):
        d.step(tokens)
    d.check()


@pytest.mark.parametrize("window", [None, 3, 7])
def test_every_step_is_the_causal_attention_of_the_whole(
    device: ct.Device, window: int | None
) -> None:
    """Against the same op over all tokens at once, and its float64 formula on the CPU."""
    rng, n = np.random.default_rng(2), 7
    sinks = None if window is None else ct.asarray([0.5, -1.0] * (HEADS // 2), device=device)
    options: dict[str, Any] = {"window": window, "sinks": sinks, "softcap": window}
    q, k, v = (numbers(rng, "f32", BATCH, h, n, 5) for h in (HEADS, SHARED, SHARED))
    cache = ct.KVCache(BATCH, SHARED, 5, n, device=device)
    parts = []
    for at in (slice(0, 3), *(slice(i, i + 1) for i in range(3, n))):
        one, two, three = (ct.asarray(x[:, :, at], device=device) for x in (q, k, v))
        cache.append(two, three)
        parts.append(cache.attend(one, **options))
    tensors = (ct.asarray(x, device=device) for x in (q, k, v))
    whole = ct.attention(*tensors, causal=True, **options)
    once, *steps = ct.fetch(whole, *parts).result()
    np.testing.assert_allclose(np.concatenate(steps, axis=2), once, rtol=1e-5, atol=1e-6)


def test_scale_and_mask(device: ct.Device) -> None:
    d = decoder(device, capacity=4)
    d.step(2)
    q = d.draw(HEADS, 2)
    hidden = np.zeros((1, 1, 2, 4), np.float32)
    hidden[..., 0] = -np.inf
    y = d.cache.attend(d.tensor(q), scale=0.0, mask=ct.asarray(hidden, device=device)).numpy()
    _, v = d.past[0].pairs[0]
    assert not y[0, :, 0].any()  # its only key is hidden
    np.testing.assert_allclose(y[0, :, 1], np.repeat(v[:, 1], 2, 0), rtol=1e-6)
    flat = d.cache.attend(d.tensor(q), scale=0.0).numpy()
    np.testing.assert_allclose(flat[0, :, 1], np.repeat(v.mean(1), 2, 0), rtol=1e-5)


@pytest.mark.usefixtures("costly_launches")
@pytest.mark.parametrize(("dim", "heads"), [(16, 3), (6, 3), (16, 6)])
def test_append_and_attend_at_once(device: ct.Device, dim: int, heads: int) -> None:
    """Two layers, sequences of two lengths; one launch for one token of as many heads."""
    rng = np.random.default_rng(3)
    caches = [
        ct.KVCache(BATCH, 3, dim, 20, num_layers=2, dtype="f32", device=device) for _ in range(2)
    ]
    for tokens in (4, 1, 1):
        for layer in range(2):
            q = ct.asarray(numbers(rng, "f32", BATCH, heads, tokens, dim), device=device)
            k, v = (
                ct.asarray(numbers(rng, "f32", BATCH, 3, tokens, dim), device=device) for _ in "kv"
            )
            caches[0].append(k, v, layer)
            wanted = caches[0].attend(q, layer).numpy()
            with ct.ledger() as led:
                got = caches[1].append_attend(q, k, v, layer)
                device.synchronize()
            at_once = tokens == 1 and dim == 16 and heads == 3
            if device.caps.target != "numpy" and layer:
                assert (led.launches == 1) == at_once
            np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)
            for one, other in zip(*(c.states(layer) for c in caches), strict=True):
                both = (x.numpy()[:, :, : min(caches[0].lengths)] for x in (one, other))
                np.testing.assert_array_equal(*both)
        for cache in caches:
            cache.truncate([cache.lengths[0], cache.lengths[1] - (tokens == 4)])
    seen = ct.asarray(np.arange(20) % 2 == 0, device=device)
    for cache in caches:
        cache.reset()
    caches[0].append(k, v)
    wanted = caches[0].attend(q, mask=seen).numpy()
    got = caches[1].append_attend(q, k, v, mask=seen)
    np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (8,), (1, 2, 1, 0), (1, 3, 1, 8), (1, 2, 2, 8)])
def test_queries_that_do_not_fit_begin_no_step(device: ct.Device, shape: tuple[int, ...]) -> None:
    cache = ct.KVCache(1, 2, 8, 20, device=device)
    row = ct.ones((1, 2, 1, 8), device=device)
    with pytest.raises(ct.ShapeError, match=r"expected q \[1, a multiple of 2, 1, 8\]"):
        cache.append_attend(ct.ones(shape, device=device), row, row)
    assert cache.lengths == (0,)
    np.testing.assert_allclose(cache.append_attend(row, row, row).numpy(), 1, atol=1e-6)
    assert cache.lengths == (1,)


@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("begun", [False, True])
def test_what_cannot_be_attended_is_not_appended(
    device: ct.Device, begun: bool, value_dim: int
) -> None:
    cache = ct.KVCache(1, 2, 8, 20, num_layers=2, device=device, value_dim=value_dim)
    k, v = ct.ones((1, 2, 1, 8), device=device), ct.ones((1, 2, 1, value_dim), device=device)
    one, two = device.batch(), device.batch()
    mistakes: list[tuple[type[Exception], ct.Tensor, ct.Tensor | None]] = [
        (ct.ShapeError, k, ct.zeros((1, 19), device=device)),
        (ct.ShapeError, k, ct.zeros((1, 1, 1, 1, 20), device=device)),
        (ct.DTypeError, k, ct.zeros((1, 20), "i32", device)),
        (ct.DTypeError, k, np.zeros((1, 20))),  # type: ignore[list-item]
        (ct.DeviceError, k, ct.zeros((1, 20), device=ANOTHER)),
        (ct.DTypeError, k.astype("f16"), None),
        (ct.DeviceError, ct.ones(k.shape, device=ANOTHER), None),
        (ct.ContractError, one.relu(k), two.relu(ct.zeros((1, 20), device=device))),
    ]
    if begun:
        cache.append(k, v)
    for kind, q, mask in mistakes:
        with pytest.raises(kind):
            cache.append_attend(q, k, v, int(begun), mask=mask)
        assert cache.lengths == (int(begun),)
        with pytest.raises(ct.ContractError, match="no keys and values of this step"):
            cache.attend(k, int(begun))
    for layer in range(int(begun), 2):
        y = cache.append_attend(k, k, v, layer)
        np.testing.assert_allclose(y.numpy(), 1, atol=1e-6)
    assert cache.lengths == (1,)


def test_a_module_appends_nothing_where_its_mask_does_not_fit(device: ct.Device) -> None:
    module, cache = nn.SelfAttention(16, 2, bias=False), ct.KVCache(1, 2, 8, 20, device=device)
    eye = np.eye(16, dtype=np.float32)
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    module.load_parameters({f"{name}.weight": eye for name in names}, device=device)
    x = ct.ones((1, 3, 16), device=device)
    with pytest.raises(ct.ShapeError, match="expected mask"):
        module(x, cache=cache, mask=ct.zeros((2, 20), device=device))
    assert cache.lengths == (0,)
    assert module(x, cache=cache, mask=ct.zeros((3, 20), device=device)).shape == x.shape
    assert cache.lengths == (3,)


def test_views_are_appended_as_they_lie(device: ct.Device) -> None:
    """[batch, tokens, heads, dim], as a projection gives it, permuted; a slice off a boundary."""
    d = decoder(device, dtype="f16", capacity=5, dim=5)
    k, v, q = d.draw(SHARED, 3), d.draw(SHARED, 3), d.draw(HEADS, 3)
    turned = d.tensor(np.ascontiguousarray(k.transpose(0, 2, 1, 3))).permute(0, 2, 1, 3)
    wide = d.tensor(np.concatenate([np.full_like(v[..., :1], np.nan), v], axis=-1))[..., 1:]
    d.cache.append(turned, wide)
    d.past[0].append(k, v)
    near(d.cache.attend(d.tensor(q)).numpy(), d.past[0].attend(q), "f16")


# -- in i8 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("dim", [6, 16])
def test_steps_in_i8_are_near_those_in_floats(device: ct.Device, dim: int, dtype: str) -> None:
    """Prefill, steps, a rollback and what is overwritten; `test_rows_i8.py` derives the bound."""
    rng = np.random.default_rng(dim)
    caches = [ct.KVCache(BATCH, SHARED, dim, 77, dtype=t, device=device) for t in ("i8", dtype)]
    assert caches[0].dtype is ct.i8
    assert caches[0].nbytes == BATCH * SHARED * 77 * 2 * (dim + 4)

    def drawn(heads: int, tokens: int) -> ct.Tensor:
        return ct.asarray(numbers(rng, dtype, BATCH, heads, tokens, dim), dtype, device)

    for tokens in (70, 1, 3, 1):
        k, v, q = drawn(SHARED, tokens), drawn(SHARED, tokens), drawn(HEADS, tokens)
        for cache in caches:
            cache.append(k, v)
        got, wanted = (cache.attend(q).astype("f32").numpy() for cache in caches)
        assert np.square(got - wanted).sum() < 2e-4 * np.square(wanted).sum()
        if tokens == 3:
            for cache in caches:
                cache.truncate([72, 70])
                cache.write(4, k, v)
    kept = (cache._layers[0].rows(lambda x: x[:, :, :71]) for cache in caches)
    for got, wanted in zip(*kept, strict=True):
        off = got.numpy() - wanted.astype("f32").numpy()
        assert np.abs(off).max() < np.abs(wanted.numpy()).max() / 127 * 0.51


@pytest.mark.parametrize("dtype", ["f32", "i8"])
def test_another_cache_is_taken_over(device: ct.Device, dtype: str) -> None:
    first, second = (ct.KVCache(b, 2, 8, 9, dtype=dtype, device=device) for b in (2, 3))
    k = np.random.default_rng(0).standard_normal((2, 2, 5, 8)).astype(np.float32)
    first.append(ct.asarray(k, device=device), ct.asarray(-k, device=device))
    second.take(first, ct.asarray(np.array([1, 0, 1], np.int32), device=device))
    assert second.lengths == (5, 5, 5)
    pairs = zip(second.states(), first.states(), strict=True)
    for mine, theirs in ((x[:, :, :5].numpy() for x in pair) for pair in pairs):
        np.testing.assert_allclose(mine, theirs[[1, 0, 1]], rtol=1e-6)


def test_what_cannot_be_taken_over_leaves_a_cache_as_it_was(device: ct.Device) -> None:
    def filled(heads: int = 2, dim: int = 8, tokens: int = 3, **options: Any) -> ct.KVCache:
        named = {"capacity": 9, "num_layers": 2, "device": device, **options}
        cache = ct.KVCache(2, heads, dim, **named)
        k = ct.ones((2, heads, tokens, dim), cache.dtype, cache.device)
        for layer in range(cache.num_layers):
            cache.append(k, k[..., : options.get("value_dim", dim)], layer)
        return cache

    unfinished = filled()
    unfinished.begin()
    at = ct.asarray(np.array([1, 0], np.int32), device=device)
    sizes = "num_layers={}, num_kv_heads={}, head_dim={}, value_dim={}"
    wanted = "take: expected a cache of " + sizes.format(2, 2, 8, 8)
    mistakes: list[tuple[type[Exception], str, ct.KVCache, Any]] = [
        (ct.ShapeError, f"{wanted}, got {sizes.format(1, 2, 8, 8)}", filled(num_layers=1), at),
        (ct.ShapeError, f"{wanted}, got {sizes.format(2, 1, 8, 8)}", filled(heads=1), at),
        (ct.ShapeError, f"{wanted}, got {sizes.format(2, 2, 4, 4)}", filled(dim=4), at),
        (ct.ShapeError, f"{wanted}, got {sizes.format(2, 2, 8, 6)}", filled(value_dim=6), at),
        (ct.DTypeError, "take: expected rows of f32, got f16", filled(dtype="f16"), at),
        (ct.ShapeError, "take: expected at [2] i32, got [1] i32", filled(), at[:1]),
        (ct.ShapeError, "take: expected at [2] i32, got [2] f32", filled(), at.astype("f32")),
        (ct.DTypeError, "take: expected a Tensor, got list", filled(), [1, 0]),
        (ct.DeviceError, f"take: expected {device.name}, got cpu", filled(device=ANOTHER), at),
        (ct.DeviceError, "gather: operands on", filled(), at.to(ANOTHER)),
        (ct.ContractError, "the last step is unfinished: layers [0, 1]", unfinished, at),
        (ct.KVCacheFullError, "10 tokens at once; the capacity is 9",
         filled(capacity=10, tokens=10), at),
    ]  # fmt: skip
    cache = filled()
    for kind, text, other, which in mistakes:
        with pytest.raises(kind, match=re.escape(text)):
            cache.take(other, which)
        assert cache.lengths == (3, 3) and cache.positions.numpy().tolist() == [0, 0]
    for layer in range(2):
        assert all(x[:, :, :3].numpy().all() for x in cache.states(layer))


@pytest.mark.parametrize("dtype", ["f32", "i8"])
def test_an_empty_cache_is_taken_over(device: ct.Device, dtype: str) -> None:
    empty, cache = (ct.KVCache(2, 2, 8, 9, dtype=dtype, device=device) for _ in range(2))
    k = ct.ones((2, 2, 3, 8), device=device)
    cache.append(k, k)
    cache.take(empty, ct.asarray(np.array([1, 0], np.int32), device=device))
    assert cache.lengths == (0, 0) and not cache.positions.numpy().any()
    cache.append(k, k)
    assert cache.lengths == (3, 3)


@pytest.mark.devices("cpu")
def test_a_cache_that_cannot_be_taken_whole_leaves_an_empty_one(device: ct.Device) -> None:
    """The first layer can be read, the second has no content: a change of it failed half way."""
    k, at = (
        ct.ones((2, 2, 3, 8), device=device),
        ct.asarray(np.array([1, 0], np.int32), None, device),
    )
    mine, other = (ct.KVCache(2, 2, 8, 9, num_layers=2, device=device) for _ in range(2))
    for layer in range(2):
        mine.append(k, k, layer)
        other.append(k, k, layer)
    device.synchronize()
    other._layers[1].keys._current.lose("a test")
    with pytest.raises(ct.ContractError, match="keys of layer 1 has no content"):
        mine.take(other, at)
    assert mine.lengths == (0, 0) and not mine.positions.numpy().any()
    for layer in range(2):
        mine.append(k, k, layer)
    assert mine.lengths == (3, 3)


# -- values of another size than keys -------------------------------------------------------------


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dtype", ["f32", "f16", "i8"])
@pytest.mark.parametrize(("dim", "value_dim"), [(24, 16), (5, 8), (192, 128)])
def test_values_of_another_size(device: ct.Device, dim: int, value_dim: int, dtype: str) -> None:
    """Steps, a step in one, a mask, a scale, what is written over and taken: as in float64."""
    rng, n, kind = np.random.default_rng(3), 9, "f32" if dtype == "i8" else dtype
    q, k = (numbers(rng, kind, BATCH, h, n, dim) for h in (HEADS, SHARED))
    v = numbers(rng, kind, BATCH, SHARED, n, value_dim)
    limit = 2e-4 if dtype == "i8" else TOLERANCE[dtype][1]

    def tensors(*arrays: Array) -> list[ct.Tensor]:
        return [ct.asarray(x, kind, device) for x in arrays]

    def check(got: ct.Tensor, at: slice, scale: float = dim**-0.5, hidden: int = -1) -> None:
        wide = [x.astype(np.float64).repeat(HEADS // SHARED, 1)[:, :, : at.stop] for x in (k, v)]
        scores = q[:, :, at].astype(np.float64) @ wide[0].swapaxes(-1, -2) * scale
        later = np.arange(at.stop) > np.arange(at.start, at.stop)[:, None]
        scores[..., later | (np.arange(at.stop) == hidden)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = weights / weights.sum(-1, keepdims=True) @ wide[1]
        assert got.shape == wanted.shape
        error = np.square(got.astype("f32").numpy() - wanted).sum() / np.square(wanted).sum()
        assert error <= limit

    cache = ct.KVCache(BATCH, SHARED, dim, n, dtype=dtype, device=device, value_dim=value_dim)
    for at in (slice(0, 6), slice(6, 7)):
        one, two, three = tensors(q[:, :, at], k[:, :, at], v[:, :, at])
        cache.append(two, three)
        check(cache.attend(one), at)
    mask = np.where(np.arange(n) == 2, -np.inf, 0.0).astype(np.float32)[None]
    check(cache.attend(one, scale=0.3, mask=ct.asarray(mask, device=device)), at, 0.3, 2)
    at = slice(7, 8)
    one, two, three = tensors(q[:, :, at], k[:, :, at], v[:, :, at])
    check(cache.append_attend(one, two, three), at)
    k[:, :, 3:5], v[:, :, 3:5] = k[:, :, 3:5] + 1, v[:, :, 3:5] - 1
    two, three = tensors(k[:, :, 3:5], v[:, :, 3:5])
    cache.write(3, two, three)
    other = ct.KVCache(BATCH, SHARED, dim, n, dtype=dtype, device=device, value_dim=value_dim)
    other.take(cache, ct.asarray(np.arange(BATCH, dtype=np.int32), device=device))
    cache = other
    at = slice(8, 9)
    one, two, three = tensors(q[:, :, at], k[:, :, at], v[:, :, at])
    check(cache.append_attend(one, two, three), at)


@pytest.mark.devices("cpu")
def test_values_of_another_size_are_refused_where_they_do_not_fit(device: ct.Device) -> None:
    cache = ct.KVCache(1, 2, 8, 4, device=device, value_dim=6)
    k, v = (ct.zeros((1, 2, 1, n), device=device) for n in (8, 6))
    with pytest.raises(ct.ShapeError, match=r"expected v \[1, 2, tokens, 6\]"):
        cache.append(k, k)
    with pytest.raises(ct.ShapeError, match=r"expected k \[1, 2, tokens, 8\]"):
        cache.append(v, v)
    table = ct.zeros((4, 4), device=device)
    for step in (cache.append_qkv, cache.attend_qkv):
        with pytest.raises(ct.ShapeError, match="value_dim=6 for 8; append and attend take them"):
            step(ct.zeros((1, 1, 48), device=device), table, table)
    with pytest.raises(ct.ShapeError, match="expected value_dim of 1 or more, got 0"):
        ct.KVCache(1, 2, 8, 4, value_dim=0)
    assert cache.length == 0


# -- positions, and going back --------------------------------------------------------------------


def test_positions(device: ct.Device) -> None:
    cache = ct.KVCache(3, 1, 4, 9, num_layers=2, device=device)
    k = ct.zeros((3, 1, 2, 4), device=device)

    def append() -> None:
        for layer in range(2):
            cache.append(k, k, layer)

    def positions() -> list[int]:
        return [int(n) for n in cache.positions.numpy()]

    assert positions() == [0, 0, 0]
    assert [int(n) for n in cache.begin(2).numpy()] == [0, 0, 0]
    append()
    assert (positions(), cache.lengths) == ([0, 0, 0], (2, 2, 2))
    append()
    assert (positions(), cache.lengths) == ([2, 2, 2], (4, 4, 4))
    cache.truncate([1, 4, 0])
    assert (positions(), cache.lengths, cache.length) == ([1, 4, 0], (1, 4, 0), 4)
    append()
    assert (positions(), cache.lengths) == ([1, 4, 0], (3, 6, 2))
    cache.reset()
    assert (positions(), cache.lengths, cache.length) == ([0, 0, 0], (0, 0, 0), 0)


def test_positions_of_a_step_before_are_stale(device: ct.Device) -> None:
    cache = ct.KVCache(1, 1, 4, 9, device=device)
    old = cache.begin()
    k = ct.zeros((1, 1, 1, 4), device=device)
    cache.append(k, k)
    assert int(old.numpy()[0]) == 0
    cache.append(k, k)
    with pytest.raises(ct.ContractError, match="KVCache positions: a stale version"):
        old.numpy()


def test_truncate_all_and_go_on(device: ct.Device) -> None:
    d = decoder(device, layers=2)
    d.step(5)
    for length in (3, 3, 2):
        d.truncate(length)
        d.step(2)
    d.check()
    d.cache.reset()
    d.past = [Past(BATCH, 5) for _ in d.past]
    d.step(9)
    d.check()


def test_a_deep_copy_goes_on_by_itself(device: ct.Device) -> None:
    cache = ct.KVCache(1, 2, 4, 6, device=device)
    one, two = (ct.full((1, 2, 1, 4), n, device=device) for n in (1, 2))
    cache.append(one, one)
    fork = copy.deepcopy(cache)
    cache.append(one, one)
    for _ in range(3):
        fork.append(two, two)
    assert (cache.lengths, fork.lengths) == ((2,), (4,))
    q = ct.zeros((1, 2, 1, 4), device=device)  # the mean of the past
    np.testing.assert_allclose(cache.attend(q).numpy(), 1, rtol=1e-6)
    np.testing.assert_allclose(fork.attend(q).numpy(), 7 / 4, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sequences_of_different_lengths(device: ct.Device, dtype: str) -> None:
    d = decoder(device, dtype=dtype, layers=2, capacity=70, dim=8)
    d.step(7)
    d.truncate(2, 6)
    d.step(1)
    d.step(3)
    d.truncate(6, 0)
    d.step(2)
    d.check()
    d.truncate(np.int64(1))  # type: ignore[arg-type]  # what numpy.argmax gives
    d.step(1)
    d.check()


def test_write_replaces_what_is_there(device: ct.Device) -> None:
    d = decoder(device, layers=2)
    d.step(5)
    d.write(0, 2, 0)
    d.write(4, 1, 1)
    q = d.draw(HEADS, 5)
    for layer, past in enumerate(d.past):  # the step goes on: its queries see what was written
        near(d.cache.attend(d.tensor(q), layer).numpy(), past.attend(q), "f32")
    d.truncate(3, 5)
    d.write(0, 3, 1)
    d.step(2)
    d.check()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_steps(device: ct.Device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    d = decoder(device, dtype=FLOATS[seed % 3], layers=2, capacity=12, dim=7, seed=seed)
    for _ in range(12):
        lengths, room = d.cache.lengths, 12 - d.cache.length
        match int(rng.integers(5)):
            case 0 if min(lengths):
                tokens = int(rng.integers(1, min(lengths), endpoint=True))
                position = int(rng.integers(min(lengths) - tokens, endpoint=True))
                d.write(position, tokens, int(rng.integers(2)))
            case 1:
                d.truncate(*(int(rng.integers(n, endpoint=True)) for n in lengths))
            case _ if room:
                d.step(int(rng.integers(1, min(room, 4), endpoint=True)))
            case _:
                d.truncate(min(lengths) // 2)
    d.check()


# -- batches --------------------------------------------------------------------------------------


def test_a_step_in_a_batch_is_one_submission(device: ct.Device) -> None:
    d = decoder(device, layers=2)
    d.step(3)
    d.check()
    with ct.ledger() as led:
        with device.batch():
            d.step(1)
            d.step(2)
        led.expect(submissions=1, downloads=0)
    d.check()


@pytest.mark.parametrize("change", ["step", "begin", "truncate", "write", "reset"])
def test_a_failed_batch_leaves_lengths_and_content(device: ct.Device, change: str) -> None:
    d = decoder(device, layers=2)
    d.step(3)
    d.truncate(3, 2)
    d.check()
    spare = Decoder(device, d.cache, [Past(BATCH, 5) for _ in d.past], d.rng)
    pair = d.tensor(d.draw(SHARED, 2)), d.tensor(d.draw(SHARED, 2))
    changes: dict[str, Callable[[], Any]] = {
        "step": lambda: list(map(spare.step, (2, 1))),
        "begin": lambda: d.cache.begin(4),
        "truncate": lambda: d.cache.truncate(1),
        "write": lambda: d.cache.write(0, *pair),
        "reset": d.cache.reset,
    }
    with pytest.raises(ZeroDivisionError), device.batch():
        changes[change]()
        _ = 1 / 0
    assert d.cache.lengths == (3, 2)
    d.step(2)
    d.check()


def test_a_dropped_batch_leaves_lengths_and_content(device: ct.Device) -> None:
    d = decoder(device, layers=2)
    d.step(3)
    for use in (lambda: d.cache.lengths, lambda: d.cache.positions.numpy()):
        batch = device.batch()
        with batch._recording:
            Decoder(device, d.cache, [Past(BATCH, 5) for _ in d.past], d.rng).step(1)
        assert d.cache.lengths == (4, 4)
        del batch
        use()
        assert d.cache.lengths == (3, 3)
    batch = device.batch()
    k = batch.relu(batch.upload(d.draw(SHARED, 1)))
    d.cache.append(k, k)
    del batch
    d.step(2)
    d.check()


def test_a_failed_batch_between_two_layers(device: ct.Device) -> None:
    """The step had begun: the layer that failed is given it again."""
    d = decoder(device, layers=2)
    k, v, q = d.draw(SHARED, 2), d.draw(SHARED, 2), d.draw(HEADS, 2)
    pair = (d.tensor(k), d.tensor(v))
    d.cache.append(*pair)
    with pytest.raises(ZeroDivisionError), device.batch():
        d.cache.append(*pair, 1)
        _ = 1 / 0
    assert d.cache.lengths == (2, 2)
    with pytest.raises(ct.ContractError, match="layer 1 has no keys and values of this step"):
        d.cache.attend(d.tensor(q), 1)
    d.cache.append(*pair, 1)
    d.past[0].append(k, v)
    near(d.cache.attend(d.tensor(q), 1).numpy(), d.past[0].attend(q), "f32")


def test_a_cache_made_in_a_batch_that_failed(device: ct.Device) -> None:
    caches: list[ct.KVCache] = []
    with pytest.raises(ZeroDivisionError), device.batch():
        caches.append(ct.KVCache(1, 1, 4, 3, device=device))
        _ = 1 / 0
    with pytest.raises(ct.ContractError, match="never computed: its batch ended with ZeroDivision"):
        caches[0].begin()


@ct.kernel(workgroup=1)
def outside(x: ct.In[ct.f32], y: ct.Out[ct.f32]) -> None:
    y[0] = x[ct.lang.global_id() + 4096]


@pytest.mark.devices("cpu", "simulator")
def test_a_cache_is_reset_after_a_fault(device: ct.Device) -> None:
    """What failed is what was to be appended, or something beside it."""
    d = decoder(device, layers=2)
    d.step(2)
    d.check()
    bad, shape = ct.empty(1, device=device), (BATCH, SHARED, 1, 5)
    outside(ct.zeros(1, device=device), bad, threads=1)
    k = bad.reshape(1, 1, 1, 1) + ct.zeros(shape, device=device)
    d.cache.append(k, k)
    with pytest.raises(ct.SimulationError):
        ct.fetch(k, d.cache.attend(ct.zeros((BATCH, HEADS, 1, 5), device=device))).result()
    d.cache.reset()
    d.past = [Past(BATCH, 5) for _ in d.past]
    assert d.cache.lengths == (0, 0)
    d.step(3)
    d.step(1)
    d.check()


def test_a_batch_without_with_has_the_whole_step(device: ct.Device) -> None:
    """A step is recorded where its keys wait, and fails or runs with them."""
    d = decoder(device)
    d.step(2)
    d.check()
    k, q = np.abs(d.draw(SHARED, 1)), d.draw(HEADS, 1)
    batch = device.batch()
    positive = batch.relu(batch.upload(k))
    d.cache.append(positive, positive)
    y = d.cache.attend(d.tensor(q))
    assert d.cache.lengths == (3, 3)
    with pytest.raises(ct.ContractError, match=r"call execute\(\) on its batch first"):
        d.cache.positions.numpy()
    batch.execute()
    d.past[0].append(k, k)
    near(batch.read(y), d.past[0].attend(q), "f32")


# -- replay ---------------------------------------------------------------------------------------


def compiled(d: Decoder) -> tuple[Any, Callable[[], tuple[Array, ...]]]:
    """One decode step of every layer, captured; and what draws its arguments."""

    def decode(q: Any, k: Any, v: Any) -> list[ct.Tensor]:
        answers = []
        for layer in range(d.cache.num_layers):
            d.cache.append(k[layer], v[layer], layer)
            answers.append(d.cache.attend(q[layer], layer))
        return answers

    def arguments() -> tuple[Array, ...]:
        kinds = (HEADS, SHARED, SHARED)
        drawn = (np.stack([d.draw(h, 1) for _ in d.past]) for h in kinds)
        return tuple(narrow(x, d.cache.dtype) for x in drawn)

    return d.device.compile(decode, *arguments()), arguments


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("capacity", [4, 66])
def test_one_compiled_step_serves_every_length(
    device: ct.Device, dtype: str, capacity: int
) -> None:
    d = decoder(device, dtype=dtype, layers=2, capacity=capacity)
    fn, arguments = compiled(d)
    assert d.cache.lengths == (0, 0)
    simulated = device.caps.target == "ir"
    if capacity == 66:
        d.step(61 if simulated else 2)
        d.check()
    while d.cache.length < capacity:
        q, k, v = arguments()
        with ct.ledger() as led, ct.forbid("compile", "allocation"):
            got = fn(q, k, v)
            led.expect(
                uploads=1, submissions=1, launches=fn.launches, compiles=0, allocations=0,
                parameter_bytes=0, downloads=0, plans=0, copies=0,
            )  # fmt: skip
        values = ct.fetch(*got).result()
        for layer, past in enumerate(d.past):
            past.append(*(widen(x[layer], d.cache.dtype) for x in (k, v)))
            near(values[layer], past.attend(widen(q[layer], d.cache.dtype)), dtype)
    with ct.ledger() as led:
        with pytest.raises(
            ct.KVCacheFullError,
            match=f"KVCache: {capacity} of {capacity} positions are filled; no room for 1 more",
        ):
            fn(*arguments())
        led.expect(submissions=0, uploads=0)
    assert d.cache.lengths == (capacity,) * BATCH
    d.truncate(capacity - 3, 1)
    d.step(2)  # what is there is as it was
    d.check()


def test_a_compiled_step_equals_the_eager_one(device: ct.Device) -> None:
    a, b = (decoder(device, layers=2, capacity=8) for _ in range(2))
    for d in (a, b):
        d.step(3)
        d.truncate(3, 1)
    fn, arguments = compiled(a)
    for _ in range(3):
        q, k, v = arguments()
        replayed = [x.numpy() for x in fn(q, k, v)]
        for layer in range(2):
            b.cache.append(b.tensor(k[layer]), b.tensor(v[layer]), layer)
            eager = b.cache.attend(b.tensor(q[layer]), layer)
            np.testing.assert_array_equal(replayed[layer], eager.numpy())
        assert a.cache.lengths == b.cache.lengths
    np.testing.assert_array_equal(a.cache.positions.numpy(), b.cache.positions.numpy())
    assert a.cache.lengths == (6, 4)


def test_a_compiled_step_waits_for_an_unfinished_one(device: ct.Device) -> None:
    d = decoder(device, layers=2)
    fn, arguments = compiled(d)
    k = d.tensor(d.draw(SHARED, 1))
    d.cache.append(k, k)
    with pytest.raises(ct.ContractError, match=r"layers \[1\] have no keys and values of it"):
        fn(*arguments())
    assert d.cache.lengths == (1, 1)
    d.cache.append(k, k, 1)
    fn(*arguments())
    assert d.cache.lengths == (2, 2)


def test_going_back_in_a_compiled_function(device: ct.Device) -> None:
    d = decoder(device)
    d.step(4)
    fn = device.compile(lambda: d.cache.truncate(2))
    assert d.cache.lengths == (4, 4)
    fn()
    d.truncate(2)
    d.step(1)
    d.check()
    d.truncate(3, 1)
    with ct.ledger() as led:
        with pytest.raises(ct.ShapeError, match=r"lengths of 0 to \[3, 1\], got \[2, 2\]"):
            fn()
        led.expect(submissions=0)
    d.step(1)
    d.check()


# -- the ledger -----------------------------------------------------------------------------------


def test_appending_and_attending_transfers_nothing(device: ct.Device) -> None:
    d = decoder(device, layers=2, capacity=70)
    given = [d.tensor(d.draw(h, t)) for t in (3, 1, 1) for h in (SHARED, HEADS)]
    ct.fetch(*given).result()
    with ct.ledger() as led, ct.forbid("transfer"):
        cache = ct.KVCache(BATCH, SHARED, 5, 70, num_layers=2, device=device)
        for k, q in zip(given[::2], given[1::2], strict=True):
            for layer in range(2):
                cache.append(k, k, layer)
                cache.attend(q, layer)
        cache.write(1, given[2], given[2])
        cache.truncate(2)
        cache.reset()
        led.expect(uploads=0, downloads=0, copies=0)
    with ct.ledger() as led:
        cache.begin(2)
        cache.truncate([1, 2])  # lengths that differ are an upload
        led.expect(uploads=1, downloads=0)


def test_no_length_compiles_anything(device: ct.Device) -> None:
    """1, 2 and 4 tokens warm up; how many queries a group has at once is rounded up to these."""
    d = decoder(device, layers=2, capacity=70)
    for tokens in (1, 2, 4):
        d.step(tokens)
    d.truncate(2)
    d.truncate(2, 1)
    d.write(0, 1, 0)
    d.check()
    with ct.ledger() as led, ct.forbid("compile"):
        for tokens, back in ((5, 4), (3, 3), (8, 2), (2, 1)):
            d.step(tokens)
            d.write(back - 1, 1, 1)
            d.truncate(back, back - 1)
        d.truncate(0)
        led.expect(compiles=0)
    d.step()
    d.check()


def test_one_plan_for_every_step(device: ct.Device) -> None:
    d = decoder(device, layers=2)
    for i in range(9):
        with ct.ledger() as led:
            d.step()
            d.check()
            if i:
                led.expect(plans=0, compiles=0, submissions=1)


# -- what it says ---------------------------------------------------------------------------------


def test_size_and_repr_of_a_cache() -> None:
    cache = ct.KVCache(2, 3, 5, 7, num_layers=4, dtype="f16", device="cpu")
    assert cache.dtype is ct.f16
    assert (cache.capacity, cache.num_layers, cache.shape) == (7, 4, (2, 3, 7, 5))
    assert cache.nbytes == 2 * 4 * 2 * 3 * 7 * 5 * 2
    k = ct.zeros((2, 3, 2, 5), "f16", "cpu")
    cache.append(k, k)
    assert repr(cache) == "<KVCache [2, 3, 7, 5] f16, 4 layers, 2 of 7 on cpu>"


UNFINISHED = (
    "KVCache: the last step is unfinished: layers [1] have no keys and values of it; append them, "
    "or truncate to take the step back"
)
ANOTHER: ct.Device = ct.device("cpu", cache=ct.PipelineCache())
# Error, its text, and a call on a cache of 2 layers and 3 positions, of which 2 are filled. The
# calls get keys of 1 and 2 tokens, and queries; those of `AFTER` come when layer 0 has the next.
Mistake = Callable[[ct.KVCache, Any, Any, Any], Any]
MISTAKES: list[tuple[type[Exception], str, Mistake]] = [
    (ct.ShapeError, "KVCache: expected batch of 1 or more, got 0",
     lambda c, k, two, q: ct.KVCache(0, 1, 1, 1)),
    (ct.ShapeError, "KVCache: expected num_layers of 1 or more, got 0",
     lambda c, k, two, q: ct.KVCache(1, 1, 1, 1, num_layers=0)),
    (ct.DTypeError, "KVCache: expected a whole number for capacity, got 1.5",
     lambda c, k, two, q: ct.KVCache(1, 1, 1, 1.5)),  # type: ignore[arg-type]
    (ct.DTypeError, "KVCache: expected a float dtype or i8, got i32",
     lambda c, k, two, q: ct.KVCache(1, 1, 1, 1, dtype="i32")),
    (ct.ShapeError, "KVCache: expected a layer below 2, got 2",
     lambda c, k, two, q: c.append(k, k, 2)),
    (ct.ShapeError, "KVCache: expected a layer below 2, got 0.5",
     lambda c, k, two, q: c.append(k, k, 0.5)),  # type: ignore[arg-type]
    (ct.ShapeError, "KVCache: expected a layer below 2, got -1",
     lambda c, k, two, q: c.attend(q, -1)),
    (ct.ShapeError, "KVCache: expected k [2, 2, tokens, 5], got [2, 4, 1, 5]",
     lambda c, k, two, q: c.append(q, q)),
    (ct.ShapeError, "KVCache: expected k [2, 2, tokens, 5], got [2, 1, 5]",
     lambda c, k, two, q: c.append(k[0], k[0])),
    (ct.ShapeError, "KVCache: expected v [2, 2, tokens, 5], got [2, 2, 2, 5]",
     lambda c, k, two, q: c.append(k, two)),
    (ct.ShapeError, "KVCache: expected k [2, 2, tokens, 5], got [2, 2, 0, 5]",
     lambda c, k, two, q: c.append(k[:, :, :0], k[:, :, :0])),
    (ct.DTypeError, "KVCache: expected v of f32, got f16",
     lambda c, k, two, q: c.append(k, k.astype("f16"))),
    (ct.DTypeError, "KVCache: expected a Tensor, got ndarray; ct.asarray makes one",
     lambda c, k, two, q: c.append(k.numpy(), k)),
    (ct.DeviceError, "cache_write: operands on {} and cpu; move one with .to(device)",
     lambda c, k, two, q: c.append(k, ct.zeros(k.shape, device=ANOTHER))),
    (ct.ShapeError, "begin: expected a number of tokens of 1 or more, got 0",
     lambda c, k, two, q: c.begin(0)),
    (ct.KVCacheFullError, "KVCache: 2 of 3 positions are filled; no room for 2 more",
     lambda c, k, two, q: c.append(two, two)),
    (ct.KVCacheFullError, "KVCache: 2 of 3 positions are filled; no room for 1,000 more",
     lambda c, k, two, q: c.begin(1000)),
    (ct.KVCacheFullError, "KVCache: 5 tokens at once; the capacity is 3",
     lambda c, k, two, q: c.append(ct.concat([two, two, k], axis=2), ct.concat([two, two, k], 2))),
    (ct.ShapeError, "truncate: expected lengths of 0 to [2, 2], got [3, 3]",
     lambda c, k, two, q: c.truncate(3)),
    (ct.ShapeError, "truncate: expected lengths of 0 to [2, 2], got [1, 3]",
     lambda c, k, two, q: c.truncate([1, 3])),
    (ct.ShapeError, "truncate: expected lengths of 0 to [2, 2], got [-1, -1]",
     lambda c, k, two, q: c.truncate(-1)),
    (ct.ShapeError, "truncate: expected lengths of 0 to [2, 2], got [1, 1, 1]",
     lambda c, k, two, q: c.truncate([1, 1, 1])),
    (ct.ShapeError, "truncate: expected lengths, got ((0.5, 0.5),)",
     lambda c, k, two, q: c.truncate(0.5)),  # type: ignore[arg-type]
    (ct.ShapeError, "write: expected 2 positions among the 2 that are filled, got a start of 1",
     lambda c, k, two, q: c.write(1, two, two)),
    (ct.ShapeError, "write: expected a position of 0 or more, got -1",
     lambda c, k, two, q: c.write(-1, k, k)),
    (ct.DTypeError, "write: expected a whole number for a position, got 0.5",
     lambda c, k, two, q: c.write(0.5, k, k)),  # type: ignore[arg-type]
]  # fmt: skip
AFTER: list[tuple[type[Exception], str, Mistake]] = [
    (ct.ContractError, "append: this step brings 1 tokens, layer 1 got 2",
     lambda c, k, two, q: c.append(two, two, 1)),
    (ct.ContractError, UNFINISHED, lambda c, k, two, q: c.append(k, k, 0)),
    (ct.ContractError, UNFINISHED, lambda c, k, two, q: c.begin(1)),
    (ct.ContractError,
     "attend: layer 1 has no keys and values of this step; append them first",
     lambda c, k, two, q: c.attend(q, 1)),
    (ct.ShapeError, "attend: expected q [2, a multiple of 2, 1, 5], got [2, 4, 2, 5]",
     lambda c, k, two, q: c.attend(ct.concat([q, q], axis=2))),
    (ct.ShapeError, "attend: expected q [2, a multiple of 2, 1, 5], got [2, 3, 1, 5]",
     lambda c, k, two, q: c.attend(q[:, :3])),
    (ct.DTypeError, "attend: expected a Tensor, got ndarray; ct.asarray makes one",
     lambda c, k, two, q: c.attend(q.numpy())),
]  # fmt: skip


@pytest.mark.parametrize("begun", [False, True])
def test_mistakes_leave_it_as_it_was(device: ct.Device, begun: bool) -> None:
    d = decoder(device, layers=2, capacity=3)
    d.step(2)
    k, two, q = (d.tensor(d.draw(h, n)) for h, n in ((SHARED, 1), (SHARED, 2), (HEADS, 1)))
    for kind, text, mistake in AFTER if begun else MISTAKES:
        if begun:
            d.cache.append(k, k)
        with pytest.raises(kind) as caught:
            mistake(d.cache, k, two, q)
        assert str(caught.value) == text.format(device.name)
        if begun:
            d.cache.truncate(2)
        assert d.cache.lengths == (2, 2)
    d.step(1)
    d.check()


def test_keys_of_two_batches_begin_nothing(device: ct.Device) -> None:
    d = decoder(device, capacity=3)
    d.step(2)
    one, two = device.batch(), device.batch()
    k, v = (b.relu(b.upload(d.draw(SHARED, 1))) for b in (one, two))
    with pytest.raises(ct.ContractError, match="operands wait for two open batches"):
        d.cache.append(k, v)
    assert d.cache.lengths == (2, 2)
    d.step(1)
    d.check()


def test_a_batch_that_has_yet_to_attend_refuses_the_next_step(device: ct.Device) -> None:
    d = decoder(device, capacity=3)
    d.step(1)
    d.check()
    q = d.tensor(d.draw(HEADS, 1))
    batch = device.batch()
    with batch._recording:
        y = d.cache.attend(q)
    with pytest.raises(ct.ContractError, match="KVCache keys of layer 0: a batch that has not"):
        d.step(1)
    assert d.cache.lengths == (1, 1)
    batch.execute()
    near(batch.read(y), d.past[0].attend(q.numpy()), "f32")
    d.step(2)
    d.check()


def plain_append(
    cache: ct.KVCache, qkv: ct.Tensor, cos: ct.Tensor, sin: ct.Tensor, layer: int,
    norms: tuple[ct.Tensor, ...],
) -> ct.Tensor:  # fmt: skip
    """What `append_qkv` does in one launch, by the ops that there are for each step of it."""
    batch, kv, _, dim = cache.shape
    heads = qkv.shape[2] // dim - 2 * kv
    x = qkv.reshape(batch, qkv.shape[1], heads + 2 * kv, dim).permute(0, 2, 1, 3)
    parts = [x[:, :heads], x[:, heads : heads + kv]]
    if norms:
        parts = [ct.rms_norm(p, w, eps=1e-6) for p, w in zip(parts, norms, strict=True)]
    starts = ct.asarray(np.array(cache.lengths, np.int32), device=cache.device)
    if cache._filled.tokens and not cache._has(layer):
        starts = starts - qkv.shape[1]
    q, k = (ct.rope(p, cos, sin, starts) for p in parts)
    cache.append(k, x[:, heads + kv :], layer)
    return q


@pytest.mark.parametrize("norm", [False, True])
def test_q_k_and_v_of_a_product_are_appended(device: ct.Device, norm: bool) -> None:
    """A prompt of several tokens, then single ones, in two layers, as by separate ops."""
    rng, heads, kv, dim = np.random.default_rng(6), 4, 2, 16
    caches = [ct.KVCache(2, kv, dim, 12, num_layers=2, device=device) for _ in range(3)]
    cos, sin = (ct.asarray(t, device=device) for t in ct.rope_tables(dim, 12))
    weights = rng.standard_normal((2, dim)).astype(np.float32)
    norms = tuple(ct.asarray(w, device=device) for w in weights) if norm else ()
    qk_norm = ct.asarray(weights, device=device) if norm else None
    for tokens in (5, 1, 1):
        for layer in range(2):
            qkv = rng.standard_normal((2, tokens, (heads + 2 * kv) * dim)).astype(np.float32)
            x = ct.asarray(qkv, device=device)
            wanted = plain_append(caches[0], x, cos, sin, layer, norms)
            got = caches[1].append_qkv(x, cos, sin, layer, qk_norm=qk_norm)
            assert got.shape == (2, heads, tokens, dim)
            np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=2e-5, atol=2e-6)
            y, z = (c.attend(q, layer) for c, q in zip(caches[:2], (wanted, got), strict=True))
            np.testing.assert_allclose(z.numpy(), y.numpy(), rtol=1e-4, atol=1e-5)
            at_once = caches[2].attend_qkv(x, cos, sin, layer, qk_norm=qk_norm)
            np.testing.assert_allclose(at_once.numpy(), y.numpy(), rtol=1e-4, atol=1e-5)
    assert caches[2].lengths == caches[1].lengths == caches[0].lengths == (7, 7)


@pytest.mark.parametrize("tokens", [1, 9])
def test_attention_that_nobody_reads_is_not_computed(device: ct.Device, tokens: int) -> None:
    """Of a prompt's last layer keys and values are stored, by the launch that does no more."""
    rng = np.random.default_rng(tokens)
    cos, sin = (ct.asarray(t, device=device) for t in ct.rope_tables(16, 12))
    x = ct.asarray(rng.standard_normal((2, tokens, 8 * 16)).astype(np.float32), device=device)
    caches = [ct.KVCache(2, 2, 16, 12, device=device) for _ in "ab"]

    def both() -> ct.Tensor:
        return caches[0].attend_qkv(x, cos, sin)

    def stored() -> None:
        caches[1].attend_qkv(x, cos, sin)

    device.compile(both)()
    alone = device.compile(stored)
    alone()
    table = alone.explain()
    assert "rope_cache_write" in table and "attention" not in table and "attend" not in table
    for one, other in zip(*(c.states() for c in caches), strict=True):
        np.testing.assert_array_equal(one.numpy()[:, :, :tokens], other.numpy()[:, :, :tokens])


@pytest.mark.devices("simulator", "webgpu", "cuda")
@pytest.mark.parametrize("dtype", ["f16", "i8"])
def test_a_layer_appends_in_one_launch(device: ct.Device, dtype: str) -> None:
    """Of a step with two layers: its begin, and one launch a layer; nothing is copied.

    In i8 it is rotated and quantised at once; with 9 operands, where a launch takes 8, in two.
    """
    cache = ct.KVCache(1, 2, 16, 12, num_layers=2, dtype=dtype, device=device)
    cos, sin = (ct.asarray(t, device=device) for t in ct.rope_tables(16, 12))
    norms = ct.ones((2, 16), "f16", device)
    x = ct.zeros((1, 1, 8 * 16), "f16", device)
    for _ in range(2):
        device.synchronize()
        with ct.ledger() as led:
            for layer in range(2):
                cache.append_qkv(x, cos, sin, layer, qk_norm=norms)
            device.synchronize()
        apart = dtype == "i8" and device.caps.max_storage_buffers < 9
        led.expect(launches=1 + (4 if apart else 2))


@pytest.mark.devices("simulator", "cuda")
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_layer_attends_in_one_launch_where_there_are_clusters(
    device: ct.Device, tokens: int
) -> None:
    """The same as in several, of 16 bits; a batch in blocks as well."""
    rng, heads, kv, dim = np.random.default_rng(7), 4, 2, 32
    cos, sin = (ct.asarray(t, device=device) for t in ct.rope_tables(dim, 256))
    norms = ct.asarray(rng.standard_normal((2, dim)).astype(np.float16), device=device)
    pool = BlockCache(kv, dim, 8, dtype="f16", device=device)
    rows = [ct.KVCache(2, kv, dim, 256, dtype="f16", device=device) for _ in range(2)]
    start = 0
    for n in (130, tokens, tokens):
        table = np.array([[start, 3, 1, 4, 7], [start, 2, 8, 5, 6]], np.int32)
        view = pool.view(ct.asarray(table, device=device))
        qkv = rng.standard_normal((2, n, (heads + 2 * kv) * dim)).astype(np.float16)
        x = ct.asarray(qkv, device=device)
        wanted = rows[0].attend(rows[0].append_qkv(x, cos, sin, qk_norm=norms), window=140)
        got = [c.attend_qkv(x, cos, sin, qk_norm=norms, window=140) for c in (rows[1], view)]
        for y in got:
            error = y.astype("f32").numpy() - wanted.astype("f32").numpy()
            assert np.square(error).sum() < 4e-7 * np.square(wanted.astype("f32").numpy()).sum()
        start += n


@pytest.mark.devices("simulator", "webgpu", "webgpu-minimum", "webgpu-hardware", "cuda")
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "options"),
    [(3, 1, 24, {"window": 70}), (8, 2, 128, {"interleaved": True}),
     *(pytest.param(*sizes, marks=pytest.mark.sweep)
       for sizes in ((4, 2, 32, {}), (16, 1, 8, {"softcap": 4.0}), (1, 1, 256, {})))],
)  # fmt: skip
def test_a_step_in_f32_is_rotated_stored_and_attended_in_two_launches(
    device: ct.Device, heads: int, kv: int, dim: int, options: dict[str, Any]
) -> None:
    """As in more, at the borders of parts; queries that keys share, in blocks of them; a table."""
    rng, capacity = np.random.default_rng(9), 256
    pairs = rng.standard_normal((2, 1, capacity, (heads + 2 * kv) * dim)).astype(np.float32)
    cos, sin = (ct.asarray(t, device=device) for t in ct.rope_tables(dim, capacity))
    norms = ct.asarray(rng.standard_normal((2, dim)).astype(np.float32), device=device)
    qk_norm = norms if dim != 32 else None
    turn = {"qk_norm": qk_norm, "interleaved": options.get("interleaved", False)}
    seen = {n: v for n, v in options.items() if n != "interleaved"}
    apart, one = (ct.KVCache(2, kv, dim, capacity, device=device) for _ in "ab")
    pool = BlockCache(kv, dim, 9, device=device)
    blocks = [[3, 1, 4, 7], [2, 8, 5, 6]]
    for start, end in ((0, 1), (1, 63), (63, 64), (64, 65), (65, 200), (200, 201), (201, 255),
                       (255, 256)):  # fmt: skip
        x = ct.asarray(pairs[:, 0, start:end], device=device)
        queries = apart.append_qkv(x, cos, sin, **turn)
        table = np.array([[start, *row] for row in blocks], np.int32)
        view = pool.view(ct.asarray(table, device=device))
        if end - start > 1:
            for cache in (one, view):
                cache.append_qkv(x, cos, sin, **turn).numpy()
            continue
        wanted = apart.attend(queries, **seen).numpy()
        for cache, begin in ((one, 1), (view, 0)):  # a launch with which a step begins
            device.synchronize()
            with ct.ledger() as led:
                got = cache.attend_qkv(x, cos, sin, **turn, **seen).numpy()
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)
            led.expect(launches=begin + 2)
    for mine, theirs in zip(one.states(), apart.states(), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.devices("cpu", "simulator", "webgpu")
@pytest.mark.parametrize("dim", [6, 10, 20])
def test_heads_whose_rows_are_padded(device: ct.Device, dim: int) -> None:
    """Nothing is read that nobody wrote; as append and attend."""
    rng, caches = np.random.default_rng(8), [ct.KVCache(1, 1, dim, 9, device=device) for _ in "ab"]
    cos, sin = (ct.asarray(t, device=device) for t in ct.rope_tables(dim, 9))
    x = ct.asarray(rng.standard_normal((1, 2, 4 * dim)).astype(np.float32), device=device)
    wanted = caches[0].attend(plain_append(caches[0], x, cos, sin, 0, ()))
    got = caches[1].attend_qkv(x, cos, sin)
    np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_what_is_no_product_of_q_k_and_v_is_refused(device: ct.Device) -> None:
    cache = ct.KVCache(1, 2, 8, 4, device=device)
    cos, sin = (ct.asarray(t, device=device) for t in ct.rope_tables(8, 12))
    for shape in ((1, 1, 4 * 8), (1, 1, 7 * 8), (1, 1, 6 * 8 + 1), (2, 1, 48), (1, 48), (1, 0, 48)):
        with pytest.raises(ct.ShapeError, match=r"append_qkv: expected qkv \[1, tokens, \(heads"):
            cache.append_qkv(ct.zeros(shape, device=device), cos, sin)
    x = ct.zeros((1, 1, 48), device=device)
    with pytest.raises(ct.KVCacheFullError, match="5 tokens at once; the capacity is 4"):
        cache.append_qkv(ct.zeros((1, 5, 48), device=device), cos, sin)
    with pytest.raises(ct.DTypeError, match="expected x of f32, a float, got f16"):
        cache.append_qkv(x.astype("f16"), cos, sin)
    with pytest.raises(ct.ShapeError, match=r"expected norms \[2, 8\], got \[8\]"):
        cache.append_qkv(x, cos, sin, qk_norm=ct.ones((8,), device=device))
    with pytest.raises(ct.ShapeError, match=r"expected cos and sin \[positions, 1 to 4\]"):
        cache.append_qkv(x, x[0], x[0])
    with pytest.raises(ct.DTypeError, match="expected f32 tables and float norms"):
        cache.append_qkv(x, cos.astype("f16"), sin.astype("f16"))
    with pytest.raises(ct.ShapeError, match=r"attend_qkv: expected qkv \[1, tokens, \(heads"):
        cache.attend_qkv(x[..., :40], cos, sin)
    with pytest.raises(ct.DTypeError, match="rope_attend: expected x of f32, a float, got f16"):
        cache.attend_qkv(x.astype("f16"), cos, sin)
    with pytest.raises(ct.ShapeError, match="attend_qkv: expected a finite softcap above 0"):
        cache.attend_qkv(x, cos, sin, softcap=-1.0)
    assert cache.lengths == (0,)


@pytest.mark.devices("cpu")
def test_an_interrupt_leaves_a_reset_whole(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More States than a recording holds: recordings run while it is under way."""
    layers = 80
    cache = ct.KVCache(1, 1, 4, 16, num_layers=layers, device=device)
    k = ct.asarray(np.ones((1, 1, 3, 4), np.float32), device=device)
    for layer in range(layers):
        cache.append(k, k, layer)
    assign, called = ct.State.assign, 0

    def interrupted(state: ct.State, data: Any) -> None:
        nonlocal called
        called += 1
        if called == 5:
            signal.raise_signal(signal.SIGINT)
        assign(state, data)

    monkeypatch.setattr(ct.State, "assign", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.reset()
        time.sleep(5)  # it is raised soon after
    monkeypatch.undo()
    assert cache.length == 0
    cache.append(k, k, 0)
    assert cache.length == 3


def test_a_cache_without_room_is_refused_before_memory_is_taken(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = own(device, memory_limit=1 << 20)
    with ct.ledger() as led, pytest.raises(ct.OutOfMemoryError) as caught:
        ct.KVCache(2, 4, 64, 1000, num_layers=3, device=small)
    text = str(caught.value)
    assert re.match(r"KVCache: expected room for 12,\d{3},\d{3} bytes of keys and values on ", text)
    assert text.endswith(
        "got 1,048,576 free; ask for fewer tokens (capacity=1000) or sequences (batch=2)"
    )
    assert led.counts.allocations == 0 and small.memory.live == 0
    for _ in range(3):  # what nobody has any more is free
        ct.KVCache(1, 4, 64, 300, device=small)
    if device.name != "cpu":
        return
    monkeypatch.setattr("centella.nn.room.available", lambda: 20_000_000)
    with pytest.raises(ct.OutOfMemoryError, match=r"bytes of .* on cpu, got 20,000,000 free; ask"):
        ct.KVCache(2, 4, 64, 10_000, device=own(device))
    ct.KVCache(2, 4, 64, 4000, device=own(device))
