"""A gate in the product's launch beside one of its own; what windows save; both in whole models.

Kernels are first right on odd shapes against float64: rows off every boundary, tails of k, rows
with outliers, every activation. Then products of ModernBERT's and Qwen3-4B's gates, over operands
in turn that are more than four times the L2 cache: joined, in two launches, and the product of both
halves alone. Attention with a window of 128 and without. Last ModernBERT's forward, f16, 64 x 512
tokens, and the prefill of 512 tokens by Qwen3-4B, bf16, with the gate joined and apart.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from checkpoints import values_of
from gemv import REPLAYS, ROTATED, round_of
from generate import PROMPT, model_of
from measure import Call, Row, alternate, error_of, print_kernels, summary
from random_weights import fill

import centella as ct
from centella.dtypes import DType, bf16, dtype_of, f16, narrow, widen
from centella.models.bert import BertModel
from centella.models.bert_config import BertConfig
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.operands import NUMPY
from centella.tasks.generate.session import Session
from centella.tensors import functional as F  # noqa: N812  # as users of PyTorch spell it
from centella.tensors.functional import products

Array = np.ndarray[Any, Any]
# Rows, columns of the result, depth: ModernBERT 64 x 512, Qwen3-4B's prompt of 512.
SHAPES = ((32768, 1152, 768, "gelu", f16), (512, 9728, 2560, "silu", bf16))
SMALL = ((70, 33, 40, "gelu", f16),)
ODD = ((33, 1, 8), (129, 200, 96), (777, 1152, 768), (4097, 328, 31 * 8))
WINDOWS = ((64, 12, 512, 64), (1, 12, 8192, 64))  # batch, heads, tokens, head
WINDOW = 65  # keys on a side, of ModernBERT's 128, and a token's own
REPLAYED = 1e12  # operations of a replay
ENDS = 64  # rows at either end that are compared
FROBENIUS = {"f16": 4e-4, "bf16": 3e-3}  # joined
APART = {"f16": 1e-3, "bf16": 8e-3}  # the sums are rounded on the way


def apart() -> AbstractContextManager[Any]:
    """Gates in launches of their own."""
    return mock.patch.object(products, "_joined", lambda *operands: None)


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "joined": nullcontext, "apart": apart,
}  # fmt: skip


def operands(m: int, n: int, k: int, dtype: DType) -> list[Array]:
    """Random x and W, so that sums are some units wide; some rows have outliers."""
    rng = np.random.default_rng(m + n + k)
    x, w = rng.standard_normal((m, k)), rng.standard_normal((2 * n, k)) * 2 / math.sqrt(k)
    x[::7] *= 12
    return [np.asarray(widen(narrow(v.astype(np.float32), dtype), dtype)) for v in (x, w)]


def wanted(gate: str, x: Array, w: Array) -> Array:
    """In float64."""
    sums = x.astype(np.float64) @ w.astype(np.float64).T
    n = len(w) // 2
    return np.asarray(ACTIVATIONS[gate](NUMPY, sums[:, :n]) * sums[:, n:])


def check(device: ct.Device, dtype: DType, small: bool) -> None:
    """Every kernel and shape; all activations of the first kernel in f16, two of others.

    Raises:
        AssertionError: for one past its bound.
    """
    for variant in ("wgmma", "mma"):
        worst = 0.0
        for m, n, k in (SMALL[0][:3],) if small else ODD:
            values = operands(m, n, k, dtype)
            given = [ct.asarray(v, dtype, device) for v in values]
            for gate in ACTIVATIONS if (variant, dtype) == ("wgmma", f16) else ("gelu", "silu"):
                got = F.normed_linear(*given, gate=gate, variant=variant).astype("f32").numpy()
                worst = max(worst, error_of(got, wanted(gate, *values)))
        assert worst < FROBENIUS[dtype.name], (variant, dtype.name, worst)
        print(f"gate by {variant}, {dtype.name}: relative error at most {worst:.1e}")


def gates(args: argparse.Namespace) -> Iterator[Row]:
    """Checks, products, attention, models."""
    for name in args.devices:
        device = ct.device(name)
        if device.caps.tensor_cores:
            for kind in (args.dtypes or "f16,bf16").split(","):
                check(device, dtype_of(kind), args.small)
        for shape in SMALL if args.small else SHAPES:
            yield from product(device, *shape, args)
        for extents in ((2, 2, 40, 16),) if args.small else WINDOWS:
            yield from window(device, extents, args)
        yield from encoder(device, name, args)
        yield from prefill(name, args)


def product(
    device: ct.Device, m: int, n: int, k: int, gate: str, dtype: DType, args: argparse.Namespace
) -> Iterator[Row]:
    """One shape, joined and apart."""
    values, work = operands(m, n, k, dtype), 4.0 * m * n * k
    sets = 1 if args.small else max(2, math.ceil(ROTATED / (2 * k * (m + 2 * n))))
    tensors = [[ct.asarray(np.roll(v, s, 0) if i == 0 else v, dtype, device)
                for i, v in enumerate(values)] for s in range(sets)]  # fmt: skip
    count = 2 if args.small else max(sets, round(REPLAYED / work))
    ways: dict[str, Callable[[ct.Tensor, ct.Tensor], ct.Tensor]] = {
        "joined": partial(F.normed_linear, gate=gate),
        "apart": partial(F.normed_linear, gate=gate, variant="apart"),
        "both halves alone": F.linear,
    }
    contestants: dict[str, Call] = {}
    for who, op in ways.items():
        replay = device.compile(lambda op=op: [op(*tensors[i % sets]) for i in range(count)])
        got = replay()[-1]
        if who != "both halves alone":
            x = np.roll(values[0], (count - 1) % sets, 0)
            bound = (FROBENIUS if who == "joined" else APART)[dtype.name]
            for rows in (slice(0, ENDS), slice(-ENDS, None)):
                part = got[rows].astype("f32").numpy()
                error = error_of(part, wanted(gate, x[rows], values[1]))
                assert error < bound, (who, error)
        contestants[who] = round_of(replay, device.synchronize)
    for who, times in alternate(contestants, min(args.rounds, 10)).items():
        row = summary(times, work * count * REPLAYS / 1e12)
        print(f"  {who}: {row['seconds'] / count / REPLAYS * 1e6:.1f} us each")
        yield {"bench": f"{gate} gate {dtype.name}", "shape": [m, 2 * n, k], "who": who,
               "unit": "TFLOP/s", **row}  # fmt: skip


def window(
    device: ct.Device, extents: tuple[int, int, int, int], args: argparse.Namespace
) -> Iterator[Row]:
    """Attention with a window and without, over qkv as a product leaves it."""
    batch, heads, tokens, dim = extents
    random = np.random.default_rng(3)
    qkv = ct.asarray(random.standard_normal((batch, tokens, 3 * heads, dim)), "f16", device)
    q, k, v = (qkv.permute(0, 2, 1, 3)[:, i * heads : (i + 1) * heads] for i in range(3))
    lengths = ct.asarray(np.full(batch, tokens, np.int32), device=device)
    contestants: dict[str, Call] = {}
    for who, keys in (("window of 128", WINDOW), ("all keys", None)):
        op = partial(F.attention, q, k, v, lengths=lengths, window=keys)
        replay = device.compile(lambda op=op: [op() for _ in range(10)])
        got = replay()[-1][:1, :1, -ENDS:].astype("f32").numpy()[0, 0]
        want = exactly(keys, *(t[0, 0].astype("f32").numpy() for t in (q, k, v)))
        error = error_of(got, want[-ENDS:])
        assert error < 1e-3, (who, error)
        contestants[who] = round_of(replay, device.synchronize)
    for who, times in alternate(contestants, min(args.rounds, 10)).items():
        row = summary(times, 1e-6)
        yield {"bench": "attention f16", "shape": extents, "who": who, "unit": "us", **row,
               "rate": row["seconds"] / (10 * REPLAYS) * 1e6,
               "worst_decile": row["seconds"] / (10 * REPLAYS) * 1e6}  # fmt: skip


def exactly(keys: int | None, q: Array, k: Array, v: Array) -> Array:
    """Of one head, the last queries of it, in float64."""
    q = q[-ENDS:]
    scores = q.astype(np.float64) @ k.T / math.sqrt(q.shape[-1])
    if keys is not None:
        at = np.arange(len(k))
        scores[np.abs(at[-len(q) :, None] - at) >= keys] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def encoder(device: ct.Device, name: str, args: argparse.Namespace) -> Iterator[Row]:
    """ModernBERT: ids on the device to pooled vectors there, captured, both ways in turn."""
    texts, tokens = (2, 40) if args.small else (64, 512)
    values = {k: v for k, v in values_of("modernbert", args.small).items()
              if k != "reference_compile"}  # fmt: skip
    config = BertConfig.from_dict(values)
    model = BertModel(config, f16)
    fill(model, device, f16)
    rng = np.random.default_rng(1)
    ids = rng.integers(10, config.vocab_size - 300, (texts, tokens), dtype=np.int32)
    given = [ct.asarray(a, device=device) for a in (ids, np.full(texts, tokens, np.int32))]

    def embed(ids: ct.Tensor, lengths: ct.Tensor) -> ct.Tensor:
        return F.l2_normalize(F.mean_pool(model(ids, lengths), lengths).astype("f32"))

    contestants: dict[str, Call] = {}
    vectors: list[Array] = []
    for who, way in WAYS.items():
        with way():
            replay = device.compile(embed, *given)
        vectors.append(replay(*given).numpy())
        print_kernels(who, partial(replay, *given))
        contestants[who] = round_of(partial(replay, *given), device.synchronize)
    cosine = float(np.min(np.sum(vectors[0] * vectors[1], -1)))
    assert cosine > 0.999, cosine
    for who, times in alternate(contestants, min(args.rounds, 10)).items():
        yield {"bench": "ModernBERT f16, forward", "shape": [texts, tokens], "who": f"{name} {who}",
               "unit": "texts/s", "cosine": cosine, **summary(times, texts * REPLAYS)}  # fmt: skip


def prefill(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """Qwen3-4B: a prompt of 512 tokens, both ways in turn."""
    size, prompt = ("mini", 40) if args.small else ("4b", PROMPT)
    model = model_of(size, ct.device(name), "bf16")
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, (1, prompt)).tolist()
    contestants: dict[str, Call] = {}
    for who, way in WAYS.items():
        session = Session(model, 1, prompt + 16)

        def start(session: Session = session) -> None:
            session.rows = [[]]  # nothing is kept
            session.start([[*row, 1] for row in ids])

        with way():
            start()
            print_kernels(f"prefill, {who}", start)
        contestants[who] = partial(timed_once, start, model.device.synchronize)
    for who, times in alternate(contestants, min(args.rounds, 20)).items():
        row = summary(times, 1.0)
        yield {"bench": f"prefill {prompt} bf16", "shape": [size], "who": f"{name} {who}",
               "unit": "ms", **row, "rate": 1e3 * row["seconds"],
               "worst_decile": 1e3 / row["worst_decile"]}  # fmt: skip


def timed_once(call: Call, wait: Call) -> None:
    """A call and the wait for the device."""
    call()
    wait()
