"""Kernels of weights in blocks, see `planes`, and how they are launched."""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import f32, u8, u32
from centella.emit.program import Call, Kernel, Ref
from centella.op.form import Form
from centella.op.op import Lowered
from centella.ops.kernel_params import face
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.planes import BLOCK, CHUNK, DequantizeAttrs, depth_of
from centella.ops.matmul.problem import LinearAttrs, Problem, aligned
from centella.ops.matmul.sums import SUBGROUP, finish
from centella.ops.matmul.thin import Rows, Thin, bytes_of, field, reserve, thin_of, together_of
from centella.specs import Caps

WORKGROUP = 256


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


blocks_kernel: Kernel = Kernel(_blocks, workgroup=128, name="linear_blocks", rewritable=True)


def linear(form: Form[LinearAttrs], caps: Caps) -> Lowered:
    """One launch."""
    x, stored, scale, *more = form.inputs
    y = rows_of(form.outputs[0])
    four, k = stored.dtype is u8, depth_of(stored)
    left = rows_of(x)
    row = left.strides[0] * (y.shape[0] > 1)
    problem = Problem(
        batch=1, m=y.shape[0], n=y.shape[1], k=stored.shape[1], lda=row, ldb=stored.strides[0],
        ldy=y.strides[0], sa=0, sb=0, sy=0, a_along_k=True, b_along_k=True,
    )  # fmt: skip
    tile = thin_of(problem, (stored.dtype, stored.dtype), caps)
    extras = dict(zip(form.attrs.extras, more, strict=True))
    pitch = rows_of(extras["residual"]).strides[0] if "residual" in extras else 0
    scalars = (
        ("m", problem.m), ("n", problem.n), ("k", k), ("rowx", row), ("ldw", problem.ldb),
        ("lds", scale.strides[0]), ("ldy", problem.ldy), ("sy", 0),
        ("alpha", form.attrs.alpha), ("ldr", pitch),
    )  # fmt: skip
    shuffle = caps.shuffles and tile.threads % SUBGROUP == 0 and tile.m <= 2
    constants = (
        ("activation", form.attrs.activation), ("four", four),
        ("shuffle", shuffle), ("tile", tile),
        ("together", together_of(tile, x.dtype, stored.dtype) if caps.sm >= 80 else 0),
        ("vector_x", aligned(left, row, 0)),
    )  # fmt: skip
    groups = -(-problem.n // tile.outputs) if problem.m else 0
    refs = (
        *(Ref(i, flat(s)) for i, s in enumerate(form.inputs)),
        Ref(len(form.inputs), form.outputs[0]),
    )
    params = face(dict.fromkeys(("x", "w", "s", *extras), 1), {"y": 1})
    call = Call(
        blocks_kernel, refs, scalars, constants, groups, workgroup=tile.threads, face=params
    )
    return Lowered((call,))


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


def dequantize(form: Form[DequantizeAttrs], caps: Caps) -> Lowered:
    """One launch."""
    stored, scale = form.inputs
    chunks = stored.shape[1] // CHUNK
    threads = stored.shape[0] * chunks
    call = Call(
        dequantize_kernel,
        (Ref(0, flat(stored)), Ref(1, flat(scale)), Ref(2, form.outputs[0])),
        (
            ("threads", threads), ("chunks", chunks), ("ldw", stored.strides[0]),
            ("lds", scale.strides[0]), ("ldy", form.outputs[0].strides[0]),
        ),
        (("four", stored.dtype is u8),),
        -(-threads // WORKGROUP),
    )  # fmt: skip
    return Lowered((call,))
