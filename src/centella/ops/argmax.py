"""argmax: y = the first index j of the largest x_j, over the last dimension, as i32.

A NaN is larger than every number, as in NumPy and PyTorch; 0 and -0 are equal. A team finds the
largest number first, then those of its threads that have it find where. Few long rows are split
among groups; a second launch chooses among their candidates.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, DType, bf16, f16, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import Signature, signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import LETTERS, WHOLE, Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.ops.layout import rows_of, takes_rows
from centella.ops.reduce import SPLIT
from centella.ops.rows import (
    THREADS,
    WALKERS,
    Item,
    Row,
    Team,
    Values,
    chunked,
    fold,
    load,
    long_team,
    team_of,
    top_pair,
)
from centella.specs import Caps, Spec, make_spec

NONE = 0xFFFFFFFF
NAN: dict[DType, int] = {f16: 0x8000 - 0x7C01, bf16: 0x8000 - 0x7F81}  # from the first to the sign
MANY = 512  # rows that fill a GPU without being split


def order(x: Operand) -> Any:
    """A u32 that grows with x: NaN above all, 0 and -0 alike."""
    if x.dtype is u32:
        return x
    if x.dtype is i32:
        return lang.bitcast(x, u32) ^ 0x80000000
    bits = lang.bitcast(x, u32)
    negative = (bits >> 31) == 1
    key = lang.select(negative, bits ^ NONE, bits | 0x80000000)
    key = lang.select((bits << 1) == 0, 0x80000000, key)
    return lang.select((bits & 0x7FFFFFFF) > 0x7F800000, NONE, key)


def _nan(words: Values, dtype: DType) -> Any:
    """Whether any 16-bit value of words is NaN."""
    past = NAN[dtype] * 0x00010001  # added to a NaN without its sign, it reaches the sign's bit
    seen = fold([(w & 0x7FFF7FFF) + past for w in words], operator.or_)
    return (seen & 0x80008000) != 0


def _candidate(
    x: Any, row: Row, at: Any, first: Any, last: Any, chunk: bool, pairs: bool
) -> tuple[Any, Any]:
    """The largest key from column `first` to `last` of row `at`, and the first that has it."""
    width = x.dtype.per_chunk if chunk else 1

    def loaded(item: Item) -> Values:
        """An item's values; for those past the end its first."""
        values = load(x, at, first + item.column, last, width, chunk)
        return values[:1] + item.masked(values, values[0])[1:]

    halves = chunk and x.dtype in NAN

    def top_of(item: Item) -> Any:
        if not halves or item.inside is not None:
            top = fold(loaded(item), lang.maximum)
            return order(top) if halves and not pairs else top
        words = x.load_bits(at, first + item.column)
        if pairs:
            return fold(x.unpack([top_pair(words, x.dtype)]), lang.maximum)
        key = order(fold(x.unpack(words), lang.fmax))
        return lang.select(_nan(words, x.dtype), NONE, key)

    tops = row.kept(top_of)
    if row.unrolled:
        mine = order(row.own(tops, 0, "max"))
    else:
        mine = row.own(lambda item: order(tops(item)), 0, "max")
    top = row.across(mine, "max")
    least = lang.var(NONE, u32)
    with lang.if_(mine == top):  # few threads: which item has it, and which element of that
        start = lang.var(NONE, u32)
        for item in row.items():
            hit = lang.select(order(tops(item)) == top, item.column, NONE)
            start.set(lang.minimum(start, hit))
        item_start = start.get()
        with lang.if_(item_start != NONE):  # who has no item has the least key, too
            for j, value in enumerate(load(x, at, first + item_start, last, width, chunk)):
                here = (order(value) == top) & (first + item_start + j < last)
                least.set(lang.minimum(least, lang.select(here, first + item_start + j, NONE)))
    return top, row.across(least.get(), "min")


def _argmax(
    *, chunk: bool, split: bool, team: Team, x: Argument, marked: bool = False, **out: Argument
) -> None:
    """A team has one part of a row: writes its candidate, or the result."""
    columns, part = lang.parameter("columns", u32), lang.parameter("part", u32)
    parts, rows = lang.parameter("parts", u32), lang.parameter("rows", u32)
    width = x.dtype.per_chunk if chunk else 1
    row = Row(team, width, lambda n: lang.minimum(columns - n % parts * part, part), rows)
    at, first = (row.number // parts, row.number % parts * part) if split else (row.number, 0)
    key, column = _candidate(x, row, at, first, columns, chunk, team.shuffle)
    with lang.if_(row.first()):
        if split:
            out["keys"][row.number] = key
            out["places"][row.number] = column
        else:
            out["y"][_index_of_row(row.number)] = _index(column, key, marked)


def _choose(
    *, team: Team, keys: Argument, places: Argument, y: Argument, marked: bool = False
) -> None:
    """A team has one row: the first of the best candidates."""
    parts, rows = lang.parameter("parts", u32), lang.parameter("rows", u32)
    row = Row(team, 1, parts, rows)
    first = row.number * parts
    key, place = _candidate(keys, row, 0, first, first + parts, False, team.shuffle)
    with lang.if_(row.first()):
        y[_index_of_row(row.number)] = _index(places[0, place], key, marked)


def _index(column: Operand, key: Operand, marked: bool) -> Expr:
    """A column as it is stored; -1 where a NaN is `marked`."""
    return lang.bitcast(lang.select(key == NONE, NONE, column) if marked else column, i32)


def _index_of_row(row: Operand) -> Expr:
    across = lang.parameter("across", u32)
    return row // across * lang.parameter("pitch", u32) + row % across


argmax_kernel: Kernel = Kernel(_argmax, workgroup=WALKERS, name="argmax")
choose_kernel: Kernel = Kernel(
    _choose,
    workgroup=THREADS,
    name="argmax_choose",
    signature=signature({"keys": 2, "places": 2}, {"y": 1}),
)


class ArgmaxAttrs(Struct, frozen=True):
    """Whether a row with a NaN gives -1 in place of where that is."""

    marked: bool = False


def rule(specs: tuple[Spec, ...], attrs: ArgmaxAttrs) -> tuple[Out, ...]:
    """[..., n] to [...] of i32, n > 0."""
    x = specs[0]
    if not x.shape:
        raise ShapeError("argmax: expected rank 1 or more, got a scalar")
    if x.dtype.kind == "bool":
        raise DTypeError("argmax: expected a numeric dtype, got bool")
    if attrs.marked and not x.dtype.is_float:
        raise DTypeError(f"argmax: expected floats to mark NaN among, got {x.dtype.name}")
    if x.shape[-1] == 0:
        raise ShapeError(f"argmax: expected at least one element, got {list(x.shape)}")
    return ((x.shape[:-1], i32),)


def reference(x: Array, marked: bool = False) -> Array:
    """The NumPy formula."""
    at = np.argmax(x, -1)
    return np.where(np.isnan(x).any(-1), -1, at) if marked else at


def lower(form: Form[ArgmaxAttrs], caps: Caps) -> Lowered:
    """One launch, or two for few rows longer than SPLIT elements."""
    x, y = rows_of(form.inputs[0]), form.outputs[0]
    rows, columns = x.shape
    parts = 1 if rows >= MANY else -(-columns // SPLIT)
    part = columns if parts == 1 else -(-columns // (16 * parts)) * 16
    across = y.shape[-1] if y.shape else 1
    pitch = y.strides[-2] if len(y.shape) > 1 else across
    scalars = (("columns", columns), ("part", part), ("parts", parts), ("across", across),
               ("pitch", pitch))  # fmt: skip
    chunk = chunked(x)
    width, shortest = x.dtype.per_chunk if chunk else 1, columns - (parts - 1) * part
    team = long_team(team_of(part, width, caps, shortest), part, width, caps, shortest)
    marked: tuple[tuple[str, bool], ...] = (("marked", True),) if form.attrs.marked else ()
    own = () if parts > 1 else marked
    constants = (("chunk", chunk), ("split", parts > 1), ("team", team), *own)

    def call(result: tuple[Ref, ...], params: Signature) -> Call:
        bound = (*scalars, ("rows", rows * parts))
        return Call(argmax_kernel, (Ref(0, x), *result), bound, constants,
                    team.groups(rows * parts), team.threads, params)  # fmt: skip

    if parts == 1:
        return Lowered((call((Ref(1, y),), signature({"x": 2}, {"y": 1})),))
    scratch = make_spec((rows * parts,), u32, 4)
    line = Spec((1, rows * parts), u32, (rows * parts, 1))
    first = call((Ref(2, scratch), Ref(3, scratch)), signature({"x": 2}, {"keys": 1, "places": 1}))
    few = team_of(parts, 1, caps)
    second = Call(choose_kernel, (Ref(2, line), Ref(3, line), Ref(1, y)),
                  (*scalars, ("rows", rows)), (("team", few), *marked), few.groups(rows),
                  few.threads)  # fmt: skip
    return Lowered((first, second), (scratch, scratch))


def axes_of(form: Form[ArgmaxAttrs]) -> Axes:
    """Rows."""
    rows = LETTERS[: len(form.outputs[0].shape)]
    return axes([rows + WHOLE], [rows])


ARGMAX = Op("argmax", rule, reference, lower, takes_rows, attrs=ArgmaxAttrs, axes=axes_of,
            doc=__doc__ or "")  # fmt: skip
