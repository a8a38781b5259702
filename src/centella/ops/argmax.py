"""argmax: y = the first index j of the largest x_j, over the last dimension, as i32.

A NaN is larger than every number, as in NumPy and PyTorch; 0 and -0 are equal. A long row is split
among groups; a second launch chooses among their candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.axes import LETTERS, WHOLE, Axes, axes
from centella.dtypes import i32, u32
from centella.errors import DTypeError, ShapeError
from centella.op import Lowered, Op, Out
from centella.ops.face import face
from centella.ops.layout import rows_of, takes_rows
from centella.ops.reduce import SPLIT, WORKGROUP
from centella.ops.rows import chunked, load, walk
from centella.program import Call, Kernel, Ref
from centella.specs import Caps, Spec, make_spec

NONE = 0xFFFFFFFF


def order(x: Any) -> Any:
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


def _candidate(x: Any, row: Any, first: Any, last: Any, chunk: bool) -> tuple[Any, Any]:
    """The largest key of a part of a row in this group, and the first column that has it."""
    key, column = lang.var(0, u32), lang.var(NONE, u32)
    width = x.dtype.per_chunk if chunk else 1
    for offset in walk(last - first, width):
        at = first + offset
        for j, value in enumerate(load(x, row, at, last, width, chunk)):
            found = order(value)
            better = (at + j < last) & ((found > key) | (column == NONE))
            key.set(lang.select(better, found, key))
            column.set(lang.select(better, at + j, column))
    top = lang.workgroup_reduce(key, "max")
    mine = lang.select(key.get() == top, column, NONE)
    return top, lang.workgroup_reduce(mine, "min")


def _argmax(*, chunk: bool, split: bool, x: Any, **out: Any) -> None:
    """A group has one part of a row: writes its candidate, or the result."""
    columns, part = lang.parameter("columns", u32), lang.parameter("part", u32)
    parts, group = lang.parameter("parts", u32), lang.group_id()
    row, first = group // parts, group % parts * part
    key, column = _candidate(x, row, first, lang.minimum(first + part, columns), chunk)
    with lang.if_(lang.local_id() == 0):
        if split:
            out["keys"][group] = key
            out["places"][group] = column
        else:
            out["y"][_place(row)] = lang.bitcast(column, i32)


def _choose(*, keys: Any, places: Any, y: Any) -> None:
    """A group has one row: the first of the best candidates."""
    parts, row = lang.parameter("parts", u32), lang.group_id()
    _, place = _candidate(keys, 0, row * parts, row * parts + parts, False)
    with lang.if_(lang.local_id() == 0):
        y[_place(row)] = lang.bitcast(places[0, place], i32)


def _place(row: Any) -> Any:
    """Where a row's result is in y."""
    across = lang.parameter("across", u32)
    return row // across * lang.parameter("pitch", u32) + row % across


argmax_kernel: Kernel = Kernel(_argmax, workgroup=WORKGROUP, name="argmax")
choose_kernel: Kernel = Kernel(
    _choose, workgroup=64, name="argmax_choose", face=face({"keys": 2, "places": 2}, {"y": 1})
)


def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """[..., n] to [...] of i32, n > 0."""
    x = specs[0]
    if not x.shape:
        raise ShapeError("argmax: expected rank 1 or more, got a scalar")
    if x.dtype.kind == "bool":
        raise DTypeError("argmax: expected a numeric dtype, got bool")
    if x.shape[-1] == 0:
        raise ShapeError(f"argmax: expected at least one element, got {list(x.shape)}")
    return ((x.shape[:-1], i32),)


def reference(x: Any) -> Any:
    """The NumPy formula."""
    return np.argmax(x, -1)


def lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch, or two for rows longer than SPLIT elements."""
    x, y = rows_of(inputs[0]), outputs[0]
    rows, columns = x.shape
    parts = -(-columns // SPLIT)
    part = columns if parts == 1 else -(-columns // (16 * parts)) * 16
    across = y.shape[-1] if y.shape else 1
    pitch = y.strides[-2] if len(y.shape) > 1 else across
    scalars = (("columns", columns), ("part", part), ("parts", parts), ("across", across),
               ("pitch", pitch))  # fmt: skip
    constants = (("chunk", chunked(x)), ("split", parts > 1))
    if parts == 1:
        only = Call(argmax_kernel, (Ref(0, x), Ref(1, y)), scalars, constants, rows,
                    face=face({"x": 2}, {"y": 1}))  # fmt: skip
        return Lowered((only,))
    found = make_spec((rows * parts,), u32, 4)
    line = Spec((1, rows * parts), u32, (rows * parts, 1))
    first = Call(argmax_kernel, (Ref(0, x), Ref(2, found), Ref(3, found)), scalars, constants,
                 rows * parts, face=face({"x": 2}, {"keys": 1, "places": 1}))  # fmt: skip
    second = Call(choose_kernel, (Ref(2, line), Ref(3, line), Ref(1, y)), scalars, (), rows)
    return Lowered((first, second), (found, found))


def axes_of(inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any]) -> Axes:
    """Rows."""
    rows = LETTERS[: len(outputs[0].shape)]
    return axes([rows + WHOLE], [rows])


ARGMAX = Op("argmax", rule, reference, lower, takes_rows, axes=axes_of, doc=__doc__ or "")
