"""Reductions over the last dimension, and `dot`.

sum  y = sum_j x_j      mean  y = sum_j x_j / n      max, min  NaN when any element is NaN
dot  y = sum_j a_j b_j

Accumulation is f32 (integers: modulo 2^32); sums of i8 and u8 are i32 and u32. A long row is split
among groups; their partial results are reduced by a second launch in a fixed order, so equal inputs
give equal bits. Another axis is moved to the end first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella import lang
from centella.dtypes import Array, DType, dtype_of, f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr
from centella.op.axes import LETTERS, Axes, Fold, axes
from centella.op.op import Form, Lowered, NoAttrs, Op, Out
from centella.ops.elements import load_elements
from centella.ops.layout import flat, rows_of, takes_rows
from centella.ops.rows import WALKERS, Item, Row, Team, Values, chunked, load, team_of
from centella.ops.steps import Chain, Elements, row_space, single, starts_of, traced_numbers
from centella.ops.tables import chosen
from centella.specs import Caps, Spec, make_spec

SPLIT = 16384
TREE = {"sum": "add", "max": "max", "min": "min"}
LIMITS: dict[str, tuple[float | int, float | int]] = {
    "f32": (-float("inf"), float("inf")),
    "i32": (-(2**31), 2**31 - 1),
    "u32": (0, 2**32 - 1),
}


def _neutral(op: str, type_: str) -> float | int:
    if op == "sum":
        return 0.0 if type_ == "f32" else 0
    return LIMITS[type_][0 if op == "max" else 1]


def _reduce(
    *, op: str, chunk: bool, team: Team, steps: Any, at: int, source: str, modes: Any, rank: int,
    types: Any, y: Argument, partial: Argument | None = None, **inputs: Any,
) -> None:  # fmt: skip
    """Each team reduces one part of as many rows as fill a word of the output.

    What is reduced is a value of a chain, or where there are several parts to a row, by a second
    launch, their partial results; the result goes on through the rest of the chain.
    """
    columns, part = lang.parameter("columns", u32), lang.parameter("part", u32)
    parts = lang.parameter("parts", u32)
    across, pitch = lang.parameter("across", u32), lang.parameter("pitch", u32)
    dtype = dtype_of(source)
    factor = lang.parameter("factor", f32) if dtype.is_float else None
    width = dtype.per_chunk if chunk else 1
    numbers, count = traced_numbers(types), len(modes)
    words = y.dtype.per_word
    part_of = Row(
        team, width, lambda n: lang.minimum(columns - n % parts * part, part),
        lang.parameter("blocks", u32),
    )  # fmt: skip
    block, piece = part_of.number // parts, part_of.number % parts
    items = (across + (words - 1)) // words
    outer, inner = block // items, block % items * words
    first = piece * part
    neutral = lang.const(_neutral(op, dtype.value), dtype)
    rows, results = [], []
    for lane in range(words):
        row = outer * across + lang.minimum(inner + lane, across - 1)
        starts, here = chosen(steps, inputs, starts_of(row, rank, count), numbers)
        rows.append((starts, here))

        def terms(item: Item, row: Any = row, starts: Any = starts, here: Any = here) -> Values:
            column = first + item.column
            if partial is not None:
                return load(partial, row, column, columns, width, chunk)
            read = _reader(inputs, modes, starts, column, width)
            have = Elements(steps, here, count, read)
            loaded = [have[k] for k in steps[at].operands]
            if len(loaded) == 2:
                return [a * b for a, b in zip(*loaded, strict=True)]
            return loaded[0]

        value = part_of.total(terms, neutral, TREE[op])
        results.append(value * factor if factor is not None and op == "sum" else value)
    with lang.if_(part_of.first()):
        if at < len(steps) - 1:
            for lane, (starts, here) in enumerate(rows):
                have = Elements(steps, here, count, _reader(inputs, modes, starts))
                have.put(at, [results[lane]])
                results[lane] = have[count + len(steps) - 1][0]
        y.store(outer * pitch + inner * parts + piece, results)


def _reader(
    inputs: dict[str, Argument], modes: Any, starts: list[Expr], column: Any = None, width: int = 1
) -> Callable[[int], Values]:
    """How a chain reads its operands: elements of a row from a column, or one element a row."""

    def read(k: int) -> Values:
        if column is None:
            return [inputs[f"x{k}"][starts[k]]]
        return load_elements(inputs[f"x{k}"], modes[k], starts[k], column, width, k)

    return read


reduce_kernel: Kernel = Kernel(_reduce, workgroup=WALKERS, name="reduce")


def lower_chain(chain: Chain, out: Spec, caps: Caps) -> Lowered:
    """A reduction with the steps before and after it: the launches of the reduction alone.

    One launch, or two for rows longer than SPLIT elements.
    """
    step, sources = chain.steps[chain.at], [rows_of(s) for s in chain.sources]
    op, factor = getattr(step.attrs, "op", "sum"), 1.0
    rows, columns = sources[0].shape
    if op == "mean":
        op, factor = "sum", 1.0 / columns if columns else float("nan")
    count, last = len(chain.inputs), len(chain.specs) - 1
    before = chain.reads(*step.operands)
    after = chain.reads(last, stop=count + chain.at)
    parts = max(1, -(-columns // SPLIT))
    if parts == 1:
        refs = {f"x{k}": Ref(k, flat(chain.inputs[k])) for k in sorted(before | after)}
        return Lowered((_call(op, chain, sources, refs, Ref(count, out), factor, 1, caps),))
    partial = make_spec((rows, parts), dtype_of(chain.row_result.dtype.value), 4)
    there = Ref(count + 1, partial)
    end = chain.at + 1
    head = replace(chain, steps=chain.steps[:end], specs=chain.specs[: count + end])
    refs = {f"x{k}": Ref(k, flat(chain.inputs[k])) for k in sorted(before)}
    rest = {f"x{k}": Ref(k, flat(chain.inputs[k])) for k in sorted(after)}
    return Lowered(
        (
            _call(op, head, sources, refs, there, 1.0, parts, caps),
            _call(
                op, chain, [partial], {**rest, "partial": there}, Ref(count, out), factor, 1, caps
            ),
        ),
        (partial,),
    )


def _call(
    op: str, chain: Chain, rows_in: list[Spec], refs: dict[str, Ref], out: Ref, factor: float,
    parts: int, caps: Caps,
) -> Call:  # fmt: skip
    x, at = chain.sources[0], chain.at
    rows, columns = rows_in[0].shape
    chunk = chunked(*rows_in)
    part = -(-columns // parts)
    part = -(-part // 16) * 16 if parts > 1 else columns
    y = out.spec
    across, pitch = rows, rows
    if parts == 1 and len(y.shape) >= 2:
        across, pitch = y.shape[-1], y.strides[-2]
    source = rows_in[0].dtype
    width = source.per_chunk if chunk else 1
    team = team_of(part, width, caps, columns - (parts - 1) * part)
    blocks = -(-across // y.dtype.per_word) * (rows // across if across else 0) * parts
    scalars = (
        ("columns", columns), ("part", part), ("parts", parts), ("across", max(across, 1)),
        ("pitch", pitch), ("factor", factor), ("blocks", blocks),
    )  # fmt: skip
    along = chain.reads(*chain.steps[at].operands)
    inputs = chain.inputs
    space = row_space(x.shape, chain.seen, [k in along for k in range(len(inputs))], width, None)
    return Call(
        reduce_kernel,
        (*refs.values(), out),
        (*scalars, *space.scalars, *chain.scalars),
        (
            ("at", at), ("chunk", chunk), ("modes", space.modes), ("op", op), ("rank", space.rank),
            ("source", source.name), ("steps", chain.steps), ("team", team),
            ("types", chain.types),
        ),
        team.groups(blocks),
        workgroup=team.threads,
        signature=signature({n: 2 if n == "partial" else 1 for n in refs}, {"y": 1}),
    )  # fmt: skip


def elements_at_once(sources: tuple[Spec, ...], out: Spec, caps: Caps) -> int:
    """Elements that a thread's program computes at a time."""
    chunk = chunked(*(rows_of(s) for s in sources))
    width = sources[0].dtype.per_chunk if chunk else 1
    team = team_of(min(sources[0].shape[-1], SPLIT), width, caps)
    return max(team.items, 1) * width * out.dtype.per_word


class ReduceAttrs(Struct, frozen=True):
    """sum, mean, max or min."""

    op: str


def rule(specs: tuple[Spec, ...], attrs: ReduceAttrs) -> tuple[Out, ...]:
    """[..., n] to [...]; max and min need n > 0."""
    x = specs[0]
    if not x.shape:
        raise ShapeError(f"{attrs.op}: expected rank 1 or more, got a scalar")
    if attrs.op in ("max", "min") and x.shape[-1] == 0:
        raise ShapeError(f"{attrs.op}: expected at least one element, got {list(x.shape)}")
    kinds = "float" if attrs.op == "mean" else "numeric"
    if x.dtype.kind == "bool" or (kinds == "float" and not x.dtype.is_float):
        raise DTypeError(f"{attrs.op}: expected a {kinds} dtype, got {x.dtype.name}")
    return ((x.shape[:-1], sum_dtype(x.dtype) if attrs.op == "sum" else x.dtype),)


def sum_dtype(dtype: DType) -> DType:
    """What a sum is stored as: floats as they are, integers in 32 bits."""
    return dtype if dtype.is_float else dtype_of(dtype.value)


def _wide(x: Array) -> Any:
    return x.dtype if x.dtype.kind == "f" else np.dtype(f"{x.dtype.kind}4")


def reference(x: Any, op: str) -> Any:
    """The NumPy formula, on rows of neighbouring elements: NumPy adds those pairwise."""
    x = np.ascontiguousarray(x)
    if op == "sum":
        return x.sum(-1, dtype=_wide(x))
    if op == "mean":
        with np.errstate(all="ignore"):
            return x.sum(-1, dtype=x.dtype) / x.dtype.type(x.shape[-1])
    return x.max(-1) if op == "max" else x.min(-1)


def lower(form: Form[ReduceAttrs], caps: Caps) -> Lowered:
    """One launch, or two for rows longer than SPLIT elements."""
    return lower_chain(single(form), form.outputs[0], caps)


def dot_rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """Two vectors of one length to a scalar."""
    a, b = specs
    if len(a.shape) != 1 or a.shape != b.shape:
        raise ShapeError(
            f"dot: expected two vectors of one length, got {list(a.shape)} and {list(b.shape)}"
        )
    if a.dtype is not b.dtype or a.dtype.kind == "bool":
        raise DTypeError(f"dot: expected one numeric dtype, got {a.dtype.name} and {b.dtype.name}")
    return (((), sum_dtype(a.dtype)),)


def dot_reference(a: Array, b: Array) -> Any:
    """The NumPy formula."""
    wide = _wide(a)
    return (a.astype(wide) * b.astype(wide)).sum(dtype=wide)


def dot_lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """As `sum` of products."""
    return lower_chain(single(form), form.outputs[0], caps)


def axes_of(form: Form[ReduceAttrs]) -> Axes:
    """Rows; what parts of a row give is reduced once more."""
    rows, columns = LETTERS[: len(form.outputs[0].shape)], form.inputs[0].shape[-1]
    fold = Fold("k", {"max": "maximum", "min": "minimum"}.get(form.attrs.op, "add"))
    if form.attrs.op == "mean":
        fold = Fold("k", attrs=ReduceAttrs("sum"), factor=1.0 / max(columns, 1))
    return axes([f"{rows}k"], [rows], fold=fold)


REDUCE = Op("reduce", rule, reference, lower, takes_rows, attrs=ReduceAttrs, axes=axes_of,
            doc="sum, mean, max, min over the end")  # fmt: skip
DOT = Op("dot", dot_rule, dot_reference, dot_lower, takes_rows, doc="sum of products",
         axes=lambda form: axes(["k", "k"], [""], fold=Fold("k")))  # fmt: skip
