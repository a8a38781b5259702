"""Kernels that read the planes of quantised weights, and how they are launched.

`linear_blocks` is the product of few rows: the thin product's teams, but each step of a thread ends
with its block's factor, so that a weight is read once, as it is stored. Of more rows the weight is
dequantised and multiplied as any other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from centella import lang
from centella.dtypes import DType, f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.ops.embedding import EmbeddingAttrs
from centella.ops.embedding import lower as rows_of_table
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.problem import LinearAttrs, Problem, aligned
from centella.ops.matmul.repack import copied_whole
from centella.ops.matmul.sums import SUBGROUP, Thin, finish, when
from centella.ops.matmul.thin import PARTIAL, Rows, reserve, thin_of, together_of
from centella.ops.quant.dequantize import DequantizeAttrs
from centella.ops.quant.format import CHUNK, SYMBOLS, Elements, Format
from centella.ops.quant.table import FORMATS
from centella.ops.rows import fold
from centella.specs import Caps, Spec

WORKGROUP = 256
NAN = float("nan")
Out = tuple[list[Any], Any]  # of a product: the planes of a weight, and a row
SHORT = 32  # elements of a step of 4-bit numbers


# -- the product of few rows ----------------------------------------------------------------------


def _blocks(
    *, tile: Thin, activation: str, format: str, shuffle: bool, together: int, vector_x: bool,
    x: Argument, y: Argument, **operands: Argument,
) -> None:  # fmt: skip
    reserve(together)
    kind = FORMATS[format]
    planes = [operands.pop(symbol) for symbol in SYMBOLS[: len(kind.planes)]]
    names = ("m", "n", "k", "rowx", *(f"ld{symbol}" for symbol in SYMBOLS[: len(kind.planes)]),
             "ldy", "sy")  # fmt: skip
    p = {n: lang.parameter(n, u32) for n in names}
    first = lang.group_id() * tile.outputs
    lane, team = lang.local_id() // tile.teams, lang.local_id() % tile.teams
    rows = [lang.minimum(first + team * tile.outs + r, p["n"] - 1) for r in range(tile.outs)]
    starts = [lang.minimum(lang.const(i, u32), p["m"] - 1) * p["rowx"] for i in range(tile.m)]
    inputs = Rows(x, starts, vector_x, None, p["k"])
    sums = lang.vars(f32, tile.outs, tile.m, init=0.0)
    add_blocks(sums, tile, [(planes, row) for row in rows], lane, inputs, kind, p)
    finish(sums, tile, shuffle, lang.const(0, u32), first, p, y, activation, operands)


def add_blocks(
    sums: Any, tile: Thin, outs: list[Out], lane: Any, inputs: Rows, kind: Format,
    p: dict[str, Expr],
) -> None:  # fmt: skip
    """Add up this thread's share of k, as `add_products` does.

    Args:
        outs: planes and row of each output of a team.
        p: k, and the pitches of the planes.
    """
    walk = _walk_bytes if tile.rolled and kind.few else _walk
    walk(sums, tile, outs, lane, inputs, kind, p)


def _walk(
    sums: Any, tile: Thin, outs: list[Out], lane: Operand, inputs: Rows, kind: Format,
    p: dict[str, Expr],
) -> None:  # fmt: skip
    """Steps: those of a turn are loaded before the first is used."""

    def load(step: Operand) -> tuple[list[Any], list[Any], list[Any]]:
        column = step * kind.step
        places = [Elements(kind, planes, row, column) for planes, row in outs]
        ws = [kind.numbers(at.planes[0].load_bits(at.row * p["ldw"] + step * CHUNK), at)
              for at in places]  # fmt: skip
        factors = [kind.factors(at) for at in places]
        return ws, factors, [inputs.read(i, column, kind.step, False) for i in range(tile.m)]

    steps, at_once = p["k"] // kind.step, tile.lanes * tile.unroll
    blocks = steps // at_once
    for index in lang.range(blocks):
        at = index * at_once + lane
        for loaded in [load(at + u * tile.lanes) for u in range(tile.unroll)]:
            _add(sums, *loaded)
    for step in lang.range(blocks * at_once + lane, steps, tile.lanes):
        _add(sums, *load(step))


def _add(sums: Any, ws: list[Any], factors: list[Any], xs: list[Any]) -> None:
    """The products of one step: factor x sum of number x, and low x sum of x."""
    lows = any(low is not None for _, low in factors)
    levels = [fold(others, operator.add) for others in xs] if lows else []
    for r, (values, (factor, low)) in enumerate(zip(ws, factors, strict=True)):
        for i, others in enumerate(xs):
            total = values[0] * others[0]
            for a, b in zip(values[1:], others[1:], strict=True):
                total = lang.fma(a, b, total)
            sums[r][i].set(lang.fma(total, factor, sums[r][i]))
            if low is not None:
                sums[r][i].set(lang.fma(levels[i], low, sums[r][i]))


def _walk_bytes(
    sums: Any, tile: Thin, outs: list[Out], lane: Any, inputs: Rows, kind: Format,
    p: dict[str, Any],
) -> None:  # fmt: skip
    """Few words in a loop: a chunk of x at a time."""
    span = inputs.source.dtype.per_chunk  # elements of x, bytes of weights
    halves, few = kind.step // CHUNK, kind.few
    assert few is not None
    for at in lang.range(lane * span, p["k"] // halves, tile.lanes * span):
        column = at // CHUNK * kind.step + at % CHUNK if halves > 1 else at
        steps = [Elements(kind, planes, row, column) for planes, row in outs]
        stored = [[planes[0].load_word(row * p["ldw"] + (at + j)) for j in range(0, span, 4)]
                  for planes, row in outs]  # fmt: skip
        factors = [kind.factors(step) for step in steps]
        for half in range(halves):
            xs = [inputs.read(i, column + half * CHUNK, span, False) for i in range(tile.m)]
            for r, words in enumerate(stored):
                values = few([v for word in words for v in word], half, steps[r])
                _add(sums[r : r + 1], [values], [factors[r]], xs)


blocks_kernel: Kernel = Kernel(_blocks, workgroup=128, name="linear_blocks", rewritable=True)


def fitted(kind: Format, tile: Thin) -> Thin:
    """The tile with as many outputs a team as the numbers of a format leave registers for."""
    if not kind.outs or tile.rolled:
        return tile
    outs = kind.outs if tile.m == 1 else max(1, kind.outs * SHORT // kind.step)
    return replace(tile, outs=min(tile.outs, outs))


def together(kind: Format, tile: Thin, x: DType) -> int:
    """`together_of`, with registers for the other planes' values."""
    if not kind.outs:
        return together_of(tile, x, kind.planes[0].dtype or x)
    if tile.m > PARTIAL:
        return 0
    return 6 if tile.m == 1 and kind.step == SHORT else 4  # 80 registers, 128: ptxas spills none


def thin_linear(form: Form[LinearAttrs], caps: Caps) -> Lowered:
    """The product of few rows, in one launch."""
    kind = FORMATS[form.attrs.format]
    x, *rest = form.inputs
    planes, more = rest[: len(kind.planes)], rest[len(kind.planes) :]
    stored, y, left = planes[0], rows_of(form.outputs[0]), rows_of(x)
    row = left.strides[0] * (y.shape[0] > 1)
    problem = Problem(
        batch=1, m=y.shape[0], n=y.shape[1], k=stored.shape[1], lda=row, ldb=stored.strides[0],
        ldy=y.strides[0], sa=0, sb=0, sy=0, a_along_k=True, b_along_k=True,
    )  # fmt: skip
    tile = fitted(kind, thin_of(problem, (stored.dtype, stored.dtype), caps))
    extras = dict(zip(form.attrs.extras, more, strict=True))
    pitch = rows_of(extras["residual"]).strides[0] if "residual" in extras else 0
    scalars = (
        ("m", problem.m), ("n", problem.n), ("k", x.shape[-1]), ("rowx", row), *pitches(planes),
        ("ldy", problem.ldy), ("sy", 0), ("alpha", form.attrs.alpha), ("ldr", pitch),
    )  # fmt: skip
    constants = (
        ("activation", form.attrs.activation), ("format", kind.name),
        ("shuffle", caps.shuffles and tile.threads % SUBGROUP == 0 and tile.m <= 2),
        ("tile", tile),
        ("together", together(kind, tile, x.dtype) if caps.reserves_registers else 0),
        ("vector_x", aligned(left, row, 0)),
    )  # fmt: skip
    groups = -(-problem.n // tile.outputs) if problem.m else 0
    names = ("x", *SYMBOLS[: len(planes)], *extras)
    call = Call(
        blocks_kernel, _refs(form), scalars, constants, groups, workgroup=tile.threads,
        signature=signature(dict.fromkeys(names, 1), {"y": 1}),
    )  # fmt: skip
    return Lowered((call,))


def pitches(planes: Sequence[Spec]) -> tuple[tuple[str, int], ...]:
    """Elements from one row of each plane to the next."""
    return tuple((f"ld{c}", s.strides[0]) for c, s in zip(SYMBOLS, planes, strict=False))


def _refs(form: Form[Any]) -> tuple[Ref, ...]:
    """The operands as rows of elements, and the result."""
    refs = (Ref(i, flat(s)) for i, s in enumerate(form.inputs))
    return (*refs, Ref(len(form.inputs), form.outputs[0]))


# -- the dequantised weight, or rows of it --------------------------------------------------------


def _decoded(
    kind: Format, planes: Sequence[Any], row: Operand, chunk: Any, vector: bool
) -> tuple[Expr, list[Expr]]:
    """The column of a row's step, and its elements; `vector`: rows start on 16 bytes."""
    column = chunk * kind.step
    at = Elements(kind, planes, row, column)
    start = row * lang.parameter("ldw", u32)
    if vector:
        loaded = planes[0].load_bits(start + chunk * CHUNK)
        factor, low = kind.factors(at)
        values = kind.numbers(loaded, at)
    else:
        last, few = lang.parameter("columns", u32) - 1, kind.few
        assert few is not None, "others are copied first"
        factor, low = kind.factors(at)
        each = [planes[0][start + lang.minimum(column + j, last)] for j in range(CHUNK)]
        values = few(each, 0, at)
    if low is None:
        return column, [v * factor for v in values]
    return column, [lang.fma(v, factor, low) for v in values]


def _store(y: Argument, row: Operand, column: Operand, values: list[Expr], ragged: bool) -> None:
    """A step of a row of the result, in chunks; `ragged`: in words, the row may end within it."""
    per = y.dtype.per_word if ragged else y.dtype.per_chunk
    start = row * lang.parameter("ldy", u32) + column
    for j in range(0, len(values), per):
        with when(column + j < lang.parameter("columns", u32) if ragged else None, ragged):
            y.store(start + j, values[j : j + per])


def _dequantize(*, format: str, vector: bool, y: Argument, **planes: Argument) -> None:
    """A thread has a step."""
    kind = FORMATS[format]
    i, chunks = lang.global_id(), lang.parameter("chunks", u32)
    with lang.if_(i < lang.parameter("threads", u32)):
        row, chunk = i // chunks, i % chunks
        column, values = _decoded(kind, [*planes.values()], row, chunk, vector)
        _store(y, row, column, values, kind.by_row)


def _embedding(
    *, format: str, vector: bool, keep: bool, ids: Argument, y: Argument, **planes: Argument
) -> None:
    """A thread has a step; see `ops.embedding`, also for `keep`."""
    kind = FORMATS[format]
    i, chunks = lang.global_id(), lang.parameter("chunks", u32)
    with lang.if_(i < lang.parameter("threads", u32)):
        row, chunk = i // chunks, i % chunks
        outer, per_row = row // lang.parameter("per_row", u32), lang.parameter("per_row", u32)
        index = lang.bitcast(ids[outer, row - outer * per_row], u32) - lang.parameter("first", u32)
        inside = index < lang.parameter("height", u32)
        at = lang.select(inside, index, 0)
        column, values = _decoded(kind, [*planes.values()], at, chunk, vector)
        with when(inside, keep):
            kept = values if keep else [lang.select(inside, v, NAN) for v in values]
            _store(y, row, column, kept, kind.by_row)


dequantize_kernel: Kernel = Kernel(_dequantize, workgroup=WORKGROUP, name="dequantize")
embedding_kernel: Kernel = Kernel(_embedding, workgroup=WORKGROUP, name="embedding_blocks")


def _steps(rows: int, planes: Sequence[Spec], y: Spec) -> tuple[tuple[tuple[str, int], ...], int]:
    """Scalars of a kernel whose threads have a step each, and its groups."""
    chunks = -(-planes[0].shape[1] // CHUNK)
    scalars = (
        ("threads", rows * chunks), ("chunks", chunks), ("columns", y.shape[-1]),
        *pitches(planes), ("ldy", rows_of(y).strides[0]),
    )  # fmt: skip
    return scalars, -(-rows * chunks // WORKGROUP)


def dequantize(form: Form[DequantizeAttrs], caps: Caps) -> Lowered:
    """One launch; before it a copy of numbers whose rows do not start on 16 bytes."""
    kind, y = FORMATS[form.attrs.format], form.outputs[0]

    def launch(form: Form[DequantizeAttrs]) -> Lowered:
        scalars, groups = _steps(y.shape[0], form.inputs, y)
        operands = signature(dict.fromkeys((p.name for p in kind.planes), 1), {"y": 1})
        constants = (("format", kind.name), ("vector", vector(kind, form.inputs[0])))
        return Lowered((
            Call(dequantize_kernel, _refs(form), scalars, constants, groups, signature=operands),
        ))  # fmt: skip

    return launch(form) if kind.by_row else on_chunks(form, 0, caps, launch)


def embedding(form: Form[EmbeddingAttrs], caps: Caps) -> Lowered:
    """The same, of the rows that ids choose; of a table that is one tensor its own launch."""
    if not form.attrs.format:
        return rows_of_table(form, caps)
    kind, y = FORMATS[form.attrs.format], form.outputs[0]

    def launch(form: Form[EmbeddingAttrs]) -> Lowered:
        ids, planes = rows_of(form.inputs[0]), form.inputs[1:]
        height = planes[0].shape[0]
        first = form.part("r", height).first
        scalars, groups = _steps(math.prod(y.shape[:-1]), planes, y)
        reads = {"ids": 2, **dict.fromkeys((p.name for p in kind.planes), 1)}
        params = signature(reads, {}, {"y": 1}) if first else signature(reads, {"y": 1})
        more = (("height", height), ("per_row", ids.shape[1]), ("first", first))
        constants = (
            ("format", kind.name),
            ("keep", first > 0),
            ("vector", vector(kind, planes[0])),
        )
        refs = (Ref(0, ids), *_refs(form)[1:])
        return Lowered((
            Call(embedding_kernel, refs, (*scalars, *more), constants, groups, signature=params),
        ))  # fmt: skip

    return launch(form) if kind.by_row else on_chunks(form, 1, caps, launch)


def vector(kind: Format, stored: Spec) -> bool:
    """Whether a kernel reads chunks: always of blocks, whose rows are copied to 16 bytes first."""
    return not kind.by_row or aligned(stored, stored.strides[0], 0)


def on_chunks(
    form: Form[Any], index: int, caps: Caps, launch: Callable[[Form[Any]], Lowered]
) -> Lowered:
    """The launches of a form, after the copy of an operand whose rows do not start on 16 bytes."""
    spec = form.inputs[index]
    if not spec.size or aligned(spec, spec.strides[0], 0):
        return launch(form)
    return after_copy(form, index, "rows do not start on 16 bytes", caps, launch)


def after_copy(
    form: Form[Any], index: int, why: str, caps: Caps, launch: Callable[[Form[Any]], Lowered]
) -> Lowered:
    """The copy of an operand to whole rows, then the launches of the form that reads the copy."""
    count = len(form.inputs)
    copy, whole = copied_whole(form.op.name, index, form.inputs[index], count + 1, caps, why)
    inputs = (*form.inputs[:index], whole, *form.inputs[index + 1 :])
    places = [count + 1 if i == index else i for i in range(count + 1)]
    inner = Form(form.op, inputs, form.outputs, form.attrs, parts=form.parts)
    return Lowered((copy,), (whole,)) + launch(inner).within(places, count + 2)
