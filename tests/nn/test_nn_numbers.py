"""`nn.SelfAttention`, `nn.CrossAttention`, `nn.RMSNorm`, `nn.Conv1d` against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import nn
from centella.check.cases.case import rng_of
from centella.op import op

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

WIDTH, TOKENS = 20, 7


def random_weights(
    module: nn.Module, shapes: dict[str, tuple[int, ...]], device: ct.Device
) -> Weights:
    """Load random parameters into a module; returns them as float64."""
    rng = rng_of(type(module).__name__, sorted(shapes))
    arrays = {n: rng.standard_normal(s).astype(np.float32) / 3 for n, s in shapes.items()}
    module.load_parameters(arrays, device=device)
    return {n: a.astype(np.float64) for n, a in arrays.items()}


def projected(x: Array, weights: Weights, name: str, heads: int) -> Array:
    """A product with a bias where there is one, [batch, heads, tokens, head_dim]."""
    y = x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)
    return y.reshape(*y.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def attended(q: Array, k: Array, v: Array, **given: Any) -> Array:
    """The formula of attention, heads side by side."""
    masks = tuple(n for n in ("lengths", "mask") if given.get(n) is not None)
    more = [given[n] for n in masks]
    y = op.get("attention").reference(
        q, k, v, *more, masks=masks, causal=given.get("causal", False), scale=q.shape[-1] ** -0.5
    )
    return np.asarray(y).reshape(*y.shape[:2], -1)


def near(got: Array, wanted: Array) -> None:
    assert got.shape == wanted.shape
    assert np.square(got - wanted).sum() <= 1e-11 * np.square(wanted).sum()


def attention_of(
    heads: int, kv_heads: int | None, dim: int | None, bias: bool, device: ct.Device
) -> tuple[nn.SelfAttention, Weights]:
    module = nn.SelfAttention(WIDTH, heads, num_kv_heads=kv_heads, head_dim=dim, bias=bias)
    each = {"q_proj": module.num_heads, "k_proj": module.num_kv_heads}
    each["v_proj"] = each["k_proj"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, count in each.items():
        shapes[f"{name}.weight"] = (count * module.head_dim, WIDTH)
        shapes[f"{name}.bias"] = (count * module.head_dim,)
    shapes["out_proj.weight"] = (WIDTH, heads * module.head_dim)
    shapes["out_proj.bias"] = (WIDTH,)
    kept = {n: s for n, s in shapes.items() if bias or n.endswith("weight")}
    return module, random_weights(module, kept, device)


SIZES = [(4, None, None, True), (4, 2, None, False), (4, 1, 8, True), (5, None, 3, False)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "bias"), SIZES)
def test_self_attention(
    device: ct.Device, heads: int, kv_heads: int | None, dim: int | None, bias: bool
) -> None:
    module, weights = attention_of(heads, kv_heads, dim, bias, device)
    rng = rng_of("self", heads)
    x = rng.standard_normal((2, TOKENS, WIDTH)).astype(np.float32)
    mask = rng.standard_normal((1, 1, TOKENS, TOKENS)).astype(np.float32)
    lengths = np.array([TOKENS, 3], np.int32)
    q = projected(x, weights, "q_proj", heads)
    k, v = (projected(x, weights, n, module.num_kv_heads) for n in ("k_proj", "v_proj"))
    tensors = [ct.asarray(a, device=device) for a in (x, mask, lengths)]
    for given in ({}, {"causal": True}, {"mask": mask}, {"lengths": lengths, "causal": True}):
        named = dict(zip(("x", "mask", "lengths"), tensors, strict=True))
        ours = {n: named.get(n, value) for n, value in given.items()}
        y = module(tensors[0], residual=tensors[0], **ours)
        wanted = attended(q, k, v, **given) @ weights["out_proj.weight"].T
        near(y.numpy(), wanted + weights.get("out_proj.bias", 0.0) + x)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "bias"), SIZES)
def test_self_attention_over_a_cache(
    device: ct.Device, heads: int, kv_heads: int | None, dim: int | None, bias: bool
) -> None:
    """Token by token, after a prompt: what it gives for the whole sequence, causally."""
    module, _ = attention_of(heads, kv_heads, dim, bias, device)
    x = ct.asarray(rng_of("cache", heads).standard_normal((2, TOKENS, WIDTH)), "f32", device)
    cache = ct.KVCache(2, module.num_kv_heads, module.head_dim, TOKENS, device=device)
    steps = [x[:, :3], *(x[:, i : i + 1] for i in range(3, TOKENS))]
    parts = [module(step, cache=cache) for step in steps]
    whole, *got = ct.fetch(module(x, causal=True), *parts).result()
    near(np.concatenate(got, 1), whole.astype(np.float64))


@pytest.mark.parametrize(("heads", "memory_width", "bias"), [(4, None, True), (5, 13, False)])
def test_cross_attention(
    device: ct.Device, heads: int, memory_width: int | None, bias: bool
) -> None:
    module = nn.CrossAttention(WIDTH, heads, memory_width=memory_width, bias=bias)
    wide = memory_width or WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        f"{n}_proj.weight": (WIDTH, wide if n in "kv" else WIDTH) for n in ("q", "k", "v", "out")
    }
    if bias:
        shapes |= {f"{n}_proj.bias": (WIDTH,) for n in ("q", "k", "v", "out")}
    weights = random_weights(module, shapes, device)
    rng = rng_of("cross", heads)
    x, memory = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, WIDTH), (2, 9, wide)))
    lengths = np.array([9, 4], np.int32)
    q = projected(x, weights, "q_proj", heads)
    k, v = (projected(memory, weights, n, heads) for n in ("k_proj", "v_proj"))
    tensors = [ct.asarray(a, device=device) for a in (x, memory, lengths)]
    y = module(tensors[0], *module.keys_values(tensors[1]), lengths=tensors[2])
    wanted = attended(q, k, v, lengths=lengths) @ weights["out_proj.weight"].T
    near(y.numpy(), wanted + weights.get("out_proj.bias", 0.0))


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 1, 33)])
def test_rms_norm(device: ct.Device, shape: tuple[int, ...]) -> None:
    module = nn.RMSNorm(shape[-1], eps=1e-3)
    weight = random_weights(module, {"weight": shape[-1:]}, device)["weight"]
    x = rng_of("rms", shape).standard_normal(shape).astype(np.float32)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * weight
    near(module(ct.asarray(x, device=device)).numpy(), wanted)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "bias"), [(1, 1, 0, True), (3, 2, 1, False), (4, 3, 5, True)]
)
def test_conv1d(device: ct.Device, kernel: int, stride: int, padding: int, bias: bool) -> None:
    module = nn.Conv1d(5, 6, kernel, stride=stride, padding=padding, bias=bias)
    shapes: dict[str, tuple[int, ...]] = {"weight": (6, 5, kernel)}
    weights = random_weights(module, {**shapes, "bias": (6,)} if bias else shapes, device)
    x = rng_of("conv", kernel).standard_normal((2, 5, 11)).astype(np.float32)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (padding, padding)))
    starts = range(0, padded.shape[2] - kernel + 1, stride)
    wanted = np.stack(
        [np.einsum("bck,ock->bo", padded[..., t : t + kernel], weights["weight"]) for t in starts],
        -1,
    )
    if bias:
        wanted += weights["bias"][:, None]
    near(module(ct.asarray(x, device=device), "relu").numpy(), wanted.clip(0))
