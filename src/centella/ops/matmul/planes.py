"""Weights in blocks of 32 along k: a plane of small integers, and a plane with a factor a block.

    y[m, n] = f(alpha sum over b (s[n, b] sum over k of block b (q[n, k] x[m, k])) + bias[n])
              + residual[m, n]

As GGUF's Q8_0 and Q4_0 have them, their two parts in tensors of their own: `stored` is i8 [n, k],
or u8 [n, k / 2] with two numbers a byte: of a block the first 16 in the low halves, the others in
the high ones, each 8 more than it stands for. `scale` is [n, k / 32].

`linear_blocks` is the product of few rows: the thin product's teams, but each step of a thread ends
with its block's factor, so that a weight is read once, as it is stored. Of more rows the weight is
made whole by `dequantize` and multiplied as any other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from centella import lang
from centella.axes import LETTERS, Axes, axes
from centella.dtypes import dtype_of, f32, i8, u8, u32
from centella.errors import DTypeError, ShapeError
from centella.op import Lowered, Op, Out
from centella.ops.face import face
from centella.ops.layout import flat, rows_of, takes_rows
from centella.ops.matmul.choice import THIN, Problem, aligned, thin_of
from centella.ops.matmul.op import check_extras, epilogue, flops_of, result_dtype
from centella.ops.matmul.thin import (
    SUBGROUP,
    Rows,
    Thin,
    bytes_of,
    field,
    finish,
    reserve,
    together_of,
)
from centella.ops.operands import NUMPY
from centella.program import Call, Kernel, Ref
from centella.specs import Caps, Spec

BLOCK = 32  # elements that share a factor
CHUNK = 16  # bytes: of 8-bit numbers half a block, of 4-bit ones a whole one
WORKGROUP = 256


def depth_of(stored: Spec) -> int:
    """Elements of a row of the weight."""
    return stored.shape[-1] * (2 if stored.dtype is u8 else 1)


def check_planes(op: str, stored: Spec, scale: Spec) -> None:
    """Refuse planes that do not belong together.

    Raises:
        ShapeError, DTypeError: says what was expected.
    """
    if stored.dtype not in (i8, u8) or not scale.dtype.is_float:
        raise DTypeError(
            f"{op}: expected i8 or u8 numbers and float factors, got {stored.dtype.name} and "
            f"{scale.dtype.name}"
        )
    n, k = (stored.shape[0], depth_of(stored)) if len(stored.shape) == 2 else (0, 1)
    if k % BLOCK or scale.shape != (n, k // BLOCK):
        raise ShapeError(
            f"{op}: expected numbers i8 [n, k] or u8 [n, k / 2] and factors [n, k / {BLOCK}], got "
            f"{list(stored.shape)} and {list(scale.shape)}"
        )


def numbers(words: list[Any], four: bool) -> list[Any]:
    """What 16 stored bytes stand for, as f32."""
    if not four:
        return bytes_of(words)
    return [field(w, 8 * j + half, 15, 8) for half in (0, 4) for w in words for j in range(4)]


# -- the product ----------------------------------------------------------------------------------


def _blocks(
    *, tile: Thin, activation: str, four: bool, shuffle: bool, together: int, vector_x: bool,
    x: Any, w: Any, s: Any, y: Any, **extra: Any,
) -> None:  # fmt: skip
    reserve(together)
    p = {n: lang.parameter(n, u32) for n in ("m", "n", "k", "rowx", "ldw", "lds", "ldy", "sy")}
    first = lang.group_id() * tile.outputs
    lane, team = lang.local_id() // tile.teams, lang.local_id() % tile.teams
    rows = [lang.minimum(first + team * tile.outs + r, p["n"] - 1) for r in range(tile.outs)]
    starts = [lang.minimum(lang.const(i, u32), p["m"] - 1) * p["rowx"] for i in range(tile.m)]
    inputs = Rows(x, starts, vector_x, None, p["k"])
    sums = lang.vars(f32, tile.outs, tile.m, init=0.0)
    width = 2 * CHUNK if four else CHUNK

    def load(step: Any) -> tuple[list[Any], list[Any], list[Any]]:
        column = step * width
        ws = [numbers(w.load_bits(row * p["ldw"] + step * CHUNK), four) for row in rows]
        factors = [s[row * p["lds"] + column // BLOCK] for row in rows]
        return ws, factors, [inputs.read(i, column, width, False) for i in range(tile.m)]

    def add(ws: list[Any], factors: list[Any], xs: list[Any]) -> None:
        for r, (values, factor) in enumerate(zip(ws, factors, strict=True)):
            for i, others in enumerate(xs):
                total = values[0] * others[0]
                for a, b in zip(values[1:], others[1:], strict=True):
                    total = lang.fma(a, b, total)
                sums[r][i].set(lang.fma(total, factor, sums[r][i]))

    if tile.rolled:
        _walk_words(sums, tile, rows, lane, inputs, four, p, w, s)
        finish(sums, tile, shuffle, lang.const(0, u32), first, p, y, activation, extra)
        return
    steps, at_once = p["k"] // width, tile.lanes * tile.unroll
    blocks = steps // at_once
    for index in lang.range(blocks):
        at = index * at_once + lane
        for loaded in [load(at + u * tile.lanes) for u in range(tile.unroll)]:
            add(*loaded)
    for step in lang.range(blocks * at_once + lane, steps, tile.lanes):
        add(*load(step))
    finish(sums, tile, shuffle, lang.const(0, u32), first, p, y, activation, extra)


def _walk_words(
    sums: Any, tile: Thin, rows: list[Any], lane: Any, inputs: Rows, four: bool, p: dict[str, Any],
    w: Any, s: Any,
) -> None:  # fmt: skip
    """The walk along k in a loop of few words: a chunk of x at a time."""
    span = inputs.source.dtype.per_chunk  # elements of x, bytes of weights
    for at in lang.range(lane * span, p["k"] // (2 if four else 1), tile.lanes * span):
        column = at // CHUNK * BLOCK + at % CHUNK if four else at
        stored = [[w.load_word(row * p["ldw"] + (at + j)) for j in range(0, span, 4)]
                  for row in rows]  # fmt: skip
        factors = [s[row * p["lds"] + column // BLOCK] for row in rows]
        for half in range(2 if four else 1):
            xs = [inputs.read(i, column + half * CHUNK, span, False) for i in range(tile.m)]
            for r, words in enumerate(stored):
                found = [v for word in words for v in word]
                if four:
                    found = [(v >> 4 if half else v & 15) for v in found]
                values = [lang.cast(v, f32) - (8.0 if four else 0.0) for v in found]
                for i, others in enumerate(xs):
                    total = values[0] * others[0]
                    for a, b in zip(values[1:], others[1:], strict=True):
                        total = lang.fma(a, b, total)
                    sums[r][i].set(lang.fma(total, factors[r], sums[r][i]))


blocks_kernel: Kernel = Kernel(_blocks, workgroup=128, name="linear_blocks")


def linear_rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """x [..., k] of at most 16 rows, the planes, bias [n], residual [..., n] to [..., n]."""
    x, stored, scale, *more = specs
    check_planes("linear", stored, scale)
    if any(not s.dtype.is_float for s in (x, *more)):
        raise DTypeError(f"linear: expected float dtypes, got {[s.dtype.name for s in specs]}")
    k = depth_of(stored)
    if not x.shape or x.shape[-1] != k or math.prod(x.shape[:-1]) > THIN:
        raise ShapeError(f"linear: expected x [..., {k}], got {list(x.shape)}")
    shape = (*x.shape[:-1], stored.shape[0])
    check_extras(shape, attrs["extras"], more)
    return ((shape, result_dtype(x.dtype, attrs)),)


def linear_reference(
    x: Any, stored: Any, scale: Any, *more: Any, extras: tuple[str, ...], **attrs: Any
) -> Any:
    """The NumPy formula."""
    weight = reference(stored, scale).astype(x.dtype)
    rows = math.prod(x.shape[:-1])
    y = np.matmul(x.reshape(rows, x.shape[-1]), weight.T)
    y = y.reshape(*x.shape[:-1], len(weight))
    return epilogue(NUMPY, y, dict(zip(extras, more, strict=True)), attrs)


def takes(index: int, spec: Spec) -> bool:
    """Rows one pitch apart; those of the numbers start on 16 bytes."""
    if index != 1:
        return takes_rows(index, spec)
    pitch = spec.strides[0] if len(spec.shape) == 2 else 1
    return takes_rows(index, spec) and aligned(spec, pitch, 0)


def linear_lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch."""
    x, stored, scale, *more = inputs
    y = rows_of(outputs[0])
    four, k = stored.dtype is u8, depth_of(stored)
    left = rows_of(x)
    row = left.strides[0] * (y.shape[0] > 1)
    problem = Problem(
        batch=1, m=y.shape[0], n=y.shape[1], k=stored.shape[1], lda=row, ldb=stored.strides[0],
        ldy=y.strides[0], sa=0, sb=0, sy=0, a_along_k=True, b_along_k=True,
    )  # fmt: skip
    tile = thin_of(problem, (stored.dtype, stored.dtype), caps)
    extras = dict(zip(attrs["extras"], more, strict=True))
    pitch = rows_of(extras["residual"]).strides[0] if "residual" in extras else 0
    scalars = (
        ("m", problem.m), ("n", problem.n), ("k", k), ("rowx", row), ("ldw", problem.ldb),
        ("lds", scale.strides[0]), ("ldy", problem.ldy), ("sy", 0),
        ("alpha", attrs.get("alpha", 1.0)), ("ldr", pitch),
    )  # fmt: skip
    warps = caps.subgroups and caps.target == "ptx" and tile.threads % SUBGROUP == 0
    constants = (
        ("activation", attrs["activation"]), ("four", four),
        ("shuffle", warps and tile.m <= 2), ("tile", tile),
        ("together", together_of(tile, x.dtype, stored.dtype) if caps.sm >= 80 else 0),
        ("vector_x", aligned(left, row, 0)),
    )  # fmt: skip
    groups = -(-problem.n // tile.outputs) if problem.m else 0
    refs = (*(Ref(i, flat(s)) for i, s in enumerate(inputs)), Ref(len(inputs), outputs[0]))
    form = face(dict.fromkeys(("x", "w", "s", *extras), 1), {"y": 1})
    call = Call(blocks_kernel, refs, scalars, constants, groups, workgroup=tile.threads, face=form)
    return Lowered((call,))


def linear_axes(inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any]) -> Axes:
    """Rows of x, outputs of the weight."""
    lead = LETTERS[: len(outputs[0].shape) - 1]
    more = [f"{lead}n" if name == "residual" else "n" for name in attrs["extras"]]
    return axes([f"{lead}.", "n.", "n.", *more], [f"{lead}n"])


LINEAR_BLOCKS = Op(
    "linear_blocks", linear_rule, linear_reference, linear_lower, takes, axes=linear_axes,
    flops=flops_of, doc=__doc__ or "",
)  # fmt: skip


# -- the weight made whole ------------------------------------------------------------------------


def _dequantize(*, four: bool, stored: Any, scale: Any, y: Any) -> None:
    """A thread has 16 stored bytes."""
    i, chunks = lang.global_id(), lang.parameter("chunks", u32)
    with lang.if_(i < lang.parameter("threads", u32)):
        row, chunk = i // chunks, i % chunks
        column = chunk * (2 * CHUNK if four else CHUNK)
        loaded = stored.load_bits(row * lang.parameter("ldw", u32) + chunk * CHUNK)
        factor = scale[row * lang.parameter("lds", u32) + column // BLOCK]
        values = [v * factor for v in numbers(loaded, four)]
        per = y.dtype.per_chunk
        place = row * lang.parameter("ldy", u32) + column
        for j in range(0, len(values), per):
            y.store(place + j, values[j : j + per])


dequantize_kernel: Kernel = Kernel(
    _dequantize, workgroup=WORKGROUP, name="dequantize",
    face=face({"stored": 1, "scale": 1}, {"y": 1}),
)  # fmt: skip


def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """Numbers i8 [n, k] or u8 [n, k / 2] and factors [n, k / 32] to [n, k]."""
    stored, scale = specs
    check_planes("dequantize", stored, scale)
    return (((stored.shape[0], depth_of(stored)), dtype_of(attrs["dtype"])),)


def reference(stored: Any, scale: Any, **attrs: Any) -> Any:
    """The NumPy formula."""
    n = len(stored)
    signed = stored
    if stored.dtype == np.uint8:
        bytes_ = stored.reshape(n, scale.shape[1], CHUNK)
        halves = np.concatenate([bytes_ & 15, bytes_ >> 4], -1)
        signed = halves.astype(np.int8) - np.int8(8)
    blocks = signed.reshape(n, scale.shape[1], BLOCK).astype(scale.dtype) * scale[..., None]
    return blocks.reshape(n, scale.shape[1] * BLOCK)


def takes_planes(index: int, spec: Spec) -> bool:
    """Rows one pitch apart; those of the numbers start on 16 bytes."""
    return takes(1 - index, spec)


def lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch."""
    stored, scale = inputs
    chunks = stored.shape[1] // CHUNK
    threads = stored.shape[0] * chunks
    call = Call(
        dequantize_kernel,
        (Ref(0, flat(stored)), Ref(1, flat(scale)), Ref(2, outputs[0])),
        (
            ("threads", threads), ("chunks", chunks), ("ldw", stored.strides[0]),
            ("lds", scale.strides[0]), ("ldy", outputs[0].strides[0]),
        ),
        (("four", stored.dtype is u8),),
        -(-threads // WORKGROUP),
    )  # fmt: skip
    return Lowered((call,))


def axes_of(inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any]) -> Axes:
    """Rows."""
    return axes(["n.", "n."], ["n."])


DEQUANTIZE = Op("dequantize", rule, reference, lower, takes_planes, axes=axes_of, doc=__doc__ or "")
