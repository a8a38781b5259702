"""Ops that move rows: bytes read and written in a second, as a share of a copy of as many bytes.

A round is eight replays of a captured plan (of a CUDA graph for PyTorch), over operands in turn
that are together more than four times the L2 cache. The limit is PyTorch's copy on the device, or
where it is not here an element-wise op of the library, in the same rounds. Each result is first
compared with float64 of the rounded operands; the peer is PyTorch's eager op, compared alike.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gemv import REPLAYS, ROTATED, graphed, on_torch, round_of
from measure import Call, Row, alternate, launched, resources, summary, torch_or_none

import centella as ct
from centella.dtypes import DType, dtype_of, narrow, widen
from centella.tensors import functional as F  # noqa: N812  # as users of PyTorch spell it

Array = np.ndarray[Any, Any]
MOVED = 4e9  # bytes that a replay moves, at least: a submission takes the device some 30 us
BLOCK = 251  # random rows, which repeat
BOUND = 2e-6  # relative Frobenius error; of 16-bit results, their rounding
SUBNORMAL = 2.0**-14  # numbers of f16 below are rounded to steps of 2^-24
ENDS = 16  # rows at either end that are compared


@dataclass(frozen=True)
class Case:
    """An op at one size.

    Attributes:
        name, shape: of its row in the table.
        operands: their shapes: the first in the case's dtype and in turn, others shared; "i32" is
            a vector of row numbers.
        moved: elements read and written, and bytes of other operands.
        ours, peer: take tensors; the peer takes `torch` first.
        wanted: takes float64 operands, those with rows cut to the rows that are compared.
        dtypes: it is measured in.
    """

    name: str
    shape: tuple[int, ...]
    operands: tuple[tuple[Any, ...], ...]
    moved: tuple[int, int]
    ours: Callable[..., Any]
    peer: Callable[..., Any]
    wanted: Callable[..., Array]
    dtypes: str = "f32,f16,bf16"


def layer_norm(x: Array, w: Array, b: Array) -> Array:
    """In float64."""
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w + b)


def softmax(x: Array) -> Array:
    """In float64."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rope in float64."""
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def eager_rope(torch: Any, x: Any, cos: Any, sin: Any) -> Any:
    """As transformers writes it."""
    a, b = x.chunk(2, -1)
    whole = [torch.cat((t, t), -1).to(x.dtype) for t in (cos, sin)]
    return x * whole[0] + torch.cat((-b, a), -1) * whole[1]


def normed(rows: int, columns: int) -> Iterator[Case]:
    """The norms of one size, and one with a residual added before."""
    size, shape = rows * columns, (rows, columns)
    vectors = ((columns,), (columns,))
    yield Case(
        "layer_norm", shape, (shape, *vectors), (2 * size, 0),
        lambda x, w, b: F.layer_norm(x, w, b),
        lambda t, x, w, b: t.nn.functional.layer_norm(x, x.shape[-1:], w, b), layer_norm,
    )  # fmt: skip
    yield Case(
        "residual + layer_norm", shape, (shape, shape, *vectors), (3 * size, 0),
        lambda x, r, w, b: F.layer_norm(x + r, w, b),
        lambda t, x, r, w, b: t.nn.functional.layer_norm(x + r, x.shape[-1:], w, b),
        lambda x, r, w, b: layer_norm(x + r, w, b),
    )  # fmt: skip
    yield Case(
        "rms_norm", shape, (shape, vectors[0]), (2 * size, 0),
        lambda x, w: F.rms_norm(x, w),
        lambda t, x, w: t.nn.functional.rms_norm(x, x.shape[-1:], w, 1e-6),
        lambda x, w: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w,
    )  # fmt: skip


def along(rows: int, columns: int) -> Iterator[Case]:
    """softmax, argmax and sum of one size."""
    size, shape = rows * columns, (rows, columns)
    yield Case("softmax", shape, (shape,), (2 * size, 0), F.softmax,
               lambda t, x: t.softmax(x, -1), softmax)  # fmt: skip
    yield Case("argmax", shape, (shape,), (size, 4 * rows), lambda x: F.argmax(x, -1),
               lambda t, x: t.argmax(x, -1), lambda x: np.argmax(x, -1))  # fmt: skip
    yield Case("sum", shape, (shape,), (size, 0), lambda x: F.sum(x, -1),
               lambda t, x: t.sum(x, -1), lambda x: x.sum(-1))  # fmt: skip


def moving(rows: int, columns: int, heads: int) -> Iterator[Case]:
    """rope, gather, embedding, and an element-wise op."""
    shape, batch, length, dim = (rows, columns), 16, rows // 32, 128
    heads_of = (batch, heads, length, dim)
    yield Case("rope", heads_of, (heads_of, (length, dim // 2), (length, dim // 2)),
               (2 * math.prod(heads_of), 0), F.rope, eager_rope, rotated)  # fmt: skip
    yield Case("gather", shape, (shape, ("i32", rows)), (2 * rows * columns, 4 * rows),
               F.gather, lambda t, x, i: t.index_select(x, 0, i), lambda x, i: x[i])  # fmt: skip
    yield Case("embedding", shape, (shape, ("i32", rows)), (2 * rows * columns, 4 * rows),
               lambda x, i: F.embedding(i, x), lambda t, x, i: t.nn.functional.embedding(i, x),
               lambda x, i: x[i])  # fmt: skip
    yield Case("negation", shape, (shape,), (2 * rows * columns, 0), F.neg,
               lambda t, x: -x, lambda x: -x)  # fmt: skip


def cases(small: bool) -> Iterator[Case]:
    """All sizes."""
    if small:
        yield from (*normed(67, 384), *along(33, 1000), *moving(64, 64, 2))
        return
    yield from normed(65536, 384)
    yield from normed(16384, 4096)
    yield from along(16384, 4096)
    yield from along(4096, 32000)
    yield from (replace(c, dtypes="f16") for c in along(4096, 50257) if c.name != "sum")
    yield from moving(65536, 1024, 32)


def operands_of(case: Case, dtype: DType) -> list[tuple[Array, DType]]:
    """Random operands, as they are stored."""
    rng, operands = np.random.default_rng(1), []
    for k, shape in enumerate(case.operands):
        if shape[0] == "i32":
            operands.append((rng.integers(0, case.shape[0], shape[1], dtype=np.int32), ct.i32))
            continue
        kind = ct.f32 if case.name == "rope" and k else dtype
        size = math.prod(shape)
        block = narrow(rng.standard_normal(min(size, BLOCK * shape[-1]), np.float32), kind)
        operands.append((np.resize(block, size).reshape(shape), kind))
    return operands


def error_of(case: Case, operands: list[tuple[Array, DType]], ends: list[Array]) -> float:
    """Relative Frobenius error of the first and last rows against float64; all of an integer."""
    worst, rows = 0.0, case.shape[0]
    least = SUBNORMAL if operands[0][1] is ct.f16 else 0.0
    chosen = operands[-1][1] is ct.i32  # among all rows of the first
    count = 1 if len(case.shape) > 2 else min(ENDS, rows)
    for got, first in zip(ends, (0, rows - count), strict=True):
        wide = []
        for value, kind in operands:
            if kind is ct.i32 or (value.ndim > 1 and len(value) == rows and not chosen):
                value = value[first : first + count]
            wide.append(value if kind is ct.i32 else widen(value, kind).astype(np.float64))
        wanted = case.wanted(*wide)
        spared = np.where(np.abs(wanted) < least, 2.0**-25, 0.0)
        off = np.maximum(np.abs(got - wanted) - spared, 0)
        worst = float(np.maximum(worst, np.linalg.norm(off) / np.linalg.norm(wanted)))
    return worst


def ends_of(case: Case, y: Any) -> tuple[Any, Any]:
    """The first and last rows of a result."""
    count = 1 if len(case.shape) > 2 else min(ENDS, case.shape[0])
    return y[:count], y[-count:]


@dataclass(frozen=True)
class Timed:
    """What alternates; `kept` is what a graph reads."""

    call: Call
    error: float
    kernel: Row
    kept: Any = None


def ours(
    device: ct.Device, case: Case, operands: list[tuple[Array, DType]], sets: int, count: int
) -> Timed:  # fmt: skip
    """A captured plan of `count` launches over the sets, checked."""
    shared = [ct.asarray(v, kind, device) for v, kind in operands[1:]]
    turns = [ct.asarray(*operands[0], device) for _ in range(sets)]
    with launched() as programs:
        replay = device.compile(lambda: [case.ours(turns[i % sets], *shared) for i in range(count)])
    last = replay()[-1]
    ends = [e.astype("f32").numpy() if e.dtype.is_float else e.numpy() for e in ends_of(case, last)]
    error = error_of(case, operands, [np.asarray(e, np.float64) for e in ends])
    kernel = resources(device, programs[0]) if programs else {}
    return Timed(round_of(replay, device.synchronize), error, kernel)


def eager(
    torch: Any, case: Case, operands: list[tuple[Array, DType]], sets: int, count: int
) -> Timed:  # fmt: skip
    """A CUDA graph of PyTorch's op, checked."""
    shared = [on_torch(torch, v, kind) for v, kind in operands[1:]]
    turns = [on_torch(torch, operands[0][0], operands[0][1]) for _ in range(sets)]
    call, results = graphed(
        torch, lambda: [case.peer(torch, turns[i % sets], *shared) for i in range(count)]
    )
    call()
    ends = [e.double().cpu().numpy() for e in ends_of(case, results[-1])]
    return Timed(call, error_of(case, operands, ends), {}, (turns, shared, results))


def copied(torch: Any, devices: Sequence[str], nbytes: int, sets: int, count: int) -> Timed:
    """The limit: copies that read and write so many bytes in all, each."""
    words = max(nbytes // 8, 1)
    if torch is not None:
        pairs = [[torch.randn(words, device="cuda") for _ in range(2)] for _ in range(sets)]
        call, _ = graphed(torch, lambda: [pairs[i % sets][0].copy_(pairs[i % sets][1])
                                          for i in range(count)])  # fmt: skip
        return Timed(call, 0.0, {}, pairs)
    device = ct.device(devices[0])
    turns = [ct.asarray(np.ones(words, np.float32), device=device) for _ in range(sets)]
    replay = device.compile(lambda: [F.neg(turns[i % sets]) for i in range(count)])
    return Timed(round_of(replay, device.synchronize), 0.0, {})


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Each op on each device, PyTorch and the copy beside."""
    torch = torch_or_none()
    asked = [s for s in args.shapes.split(",") if s]
    for case in cases(args.small):
        if asked and case.name not in asked:
            continue
        for kind in (args.dtypes or case.dtypes).split(","):
            yield from _timed(case, dtype_of(kind), torch, args)


def _timed(case: Case, dtype: DType, torch: Any, args: argparse.Namespace) -> Iterator[Row]:
    operands = operands_of(case, dtype)
    nbytes = case.moved[0] * dtype.itemsize + case.moved[1]
    sets = 1 if args.small else max(1, math.ceil(ROTATED / operands[0][0].nbytes))
    count = 1 if args.small else max(sets, math.ceil(MOVED / nbytes))
    contestants: dict[str, Timed] = {}
    for name in args.devices:
        if name == "webgpu" and dtype is ct.bf16:
            continue
        contestants[name] = ours(ct.device(name), case, operands, sets, count)
    if torch is not None:
        contestants["torch"] = eager(torch, case, operands, sets, count)
    contestants["copy"] = copied(torch, args.devices, nbytes, sets, count)
    bound = max(BOUND, dtype.epsilon)
    for who, one in contestants.items():
        if who == "torch" and case.name == "argmax":  # of equal elements it takes some one
            continue
        # PyTorch's rope rounds each product to 16 bits
        assert one.error < bound * (4 if who == "torch" else 1), (case.name, who, one.error)
    seconds = alternate({who: one.call for who, one in contestants.items()}, args.rounds)
    amount = nbytes * count * REPLAYS / 1e12
    by_who = {who: summary(times, amount) for who, times in seconds.items()}
    for who, row in by_who.items():
        one = contestants[who]
        yield {"bench": f"{case.name} {dtype.name}", "shape": list(case.shape), "who": who,
               "unit": "TB/s", "error": one.error, **one.kernel, **row,
               "share": row["rate"] / by_who["copy"]["rate"], "of": "a copy"}  # fmt: skip
