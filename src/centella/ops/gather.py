"""Rows by their index: `gather` reads them, `scatter` replaces them.

gather   y[a.., j.., b..] = x[a.., indices[j..], b..]   along one axis; an index outside gives NaN,
                                                        0 or False
scatter  y[i, ..] = values[j, ..] for the last j with indices[j] = i, else x[i, ..]; an index
                                                        outside is dropped

A negative index counts from the end, as in NumPy: -1 is the last row; one below -n is outside, as
one from n on is. scatter first finds each row's j: a thread a row walks the indices.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella import lang
from centella.dtypes import Array, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import LETTERS, Axes, axes
from centella.op.op import Form, Lowered, NoAttrs, Op, Out
from centella.ops.elements import index_of, numbered, offset_of
from centella.ops.elementwise import plain_call
from centella.ops.layout import flat, merge
from centella.ops.rows import place_of, width_of
from centella.ops.tables import missing
from centella.specs import Caps, Shape, Spec, make_spec

WORKGROUP = 256


def _pick(
    *, rank: int, chunk: bool, along: bool, keep: bool, x: Argument, indices: Argument, y: Argument,
    **base: Argument,
) -> None:  # fmt: skip
    """A thread a chunk (or word) of the output.

    `along`: the last dimension is one of the indices; else a thread has one index. Where it is
    outside, the element is that of `base`, if there is one, or with `keep` stays as it is.
    """
    width = width_of(y, chunk)
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        index = index_of(row, "n", rank - 1)
        at = {name: offset_of(index, name) for name in ("x", "i", "y", *base)}
        last = lang.parameter("columns", u32) - 1
        lanes = [column] + [lang.minimum(column + j, last) for j in range(1, width)]
        targets = [_row(indices, at["i"] + _step("i", c)) for c in (lanes if along else lanes[:1])]
        if not along:
            targets *= width
        places = [at["x"] + place for place, _ in targets]
        values = _elements(x, "x", places, lanes, chunk)
        rest = [missing(y.dtype)] * width
        if keep:
            rest = _elements(y, "y", [at["y"]] * width, lanes, chunk)
        elif base:
            rest = _elements(base["base"], "base", [at["base"]] * width, lanes, chunk)
        pairs = zip(targets, values, rest, strict=True)
        y.store(at["y"] + column, [lang.select(inside, v, r) for (_, inside), v, r in pairs])


def _elements(x: Any, name: str, places: list[Any], lanes: list[Any], chunk: bool) -> list[Any]:
    """The elements of some lanes, their rows beginning at these places."""
    if chunk:
        return x.load(places[0] + lanes[0])  # type: ignore[no-any-return]  # traced values
    return [x[place + _step(name, lane)] for place, lane in zip(places, lanes, strict=True)]


def _step(name: str, lane: Operand) -> Expr:
    return lane * lang.parameter(f"{name}_step", u32)


def _row(indices: Any, at: Any) -> tuple[Expr, Expr]:
    """Where the row of an index begins, and whether there is one."""
    given = indices[at]
    index = lang.bitcast(given, u32) - lang.parameter("first", u32)
    index = lang.select(given < 0, index + lang.parameter("wrap", u32), index)
    inside = index < lang.parameter("height", u32)
    return lang.select(inside, index, 0) * lang.parameter("pitch", u32), inside


def _last_index(*, indices: Argument, last: Argument) -> None:
    """A thread a row: the last position of its number among the indices, or -1."""
    row = lang.global_id()
    number = row + lang.parameter("first", u32)
    from_end = number - lang.parameter("wrap", u32)  # below 0, as the index that counts so
    with lang.if_(row < lang.parameter("rows", u32)):
        position = lang.var(-1, i32)
        for j in lang.range(lang.parameter("count", u32)):
            index = lang.bitcast(indices[j], u32)
            same = (index == number) | (index == from_end)
            position.set(lang.select(same, lang.bitcast(j, i32), position))
        last[row] = position


pick: Kernel = Kernel(_pick, workgroup=WORKGROUP, name="gather", moves=True)
last_index: Kernel = Kernel(
    _last_index,
    workgroup=WORKGROUP,
    name="last_index",
    signature=signature({"indices": 1}, {"last": 1}),
)


def check_indices(op: str, spec: Spec) -> None:
    """Raise a DTypeError where indices are not i32."""
    if spec.dtype is not i32:
        raise DTypeError(f"{op}: expected i32 indices, got {spec.dtype.name}")


class GatherAttrs(Struct, frozen=True):
    """The axis that indices choose along, from 0."""

    axis: int


def gather_rule(specs: tuple[Spec, ...], attrs: GatherAttrs) -> tuple[Out, ...]:
    """x [a.., n, b..], indices [j..] to [a.., j.., b..]."""
    x, indices = specs
    axis = attrs.axis
    check_indices("gather", indices)
    if not 0 <= axis < len(x.shape):
        raise ShapeError(f"gather: expected an axis of {list(x.shape)}, got {axis}")
    if not x.shape[axis] and indices.size:
        raise ShapeError(f"gather: expected rows along axis {axis}, got {list(x.shape)}")
    return (((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype),)


def scatter_rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """x [n, ..], indices [k], values [k, ..] to [n, ..]."""
    x, indices, values = specs
    check_indices("scatter", indices)
    if not x.shape or len(indices.shape) != 1:
        raise ShapeError(
            f"scatter: expected x [n, ...] and indices [k], got {list(x.shape)} and "
            f"{list(indices.shape)}"
        )
    wanted = (*indices.shape, *x.shape[1:])
    if values.shape != wanted:
        raise ShapeError(f"scatter: expected values {list(wanted)}, got {list(values.shape)}")
    if values.dtype is not x.dtype:
        raise DTypeError(f"scatter: expected one dtype, got {x.dtype.name} and {values.dtype.name}")
    return ((x.shape, x.dtype),)


def gather_reference(x: Array, indices: Array, axis: int) -> Array:
    """The NumPy formula."""
    indices = np.where(indices < 0, indices + x.shape[axis], indices)
    inside = (indices >= 0) & (indices < x.shape[axis])
    y = np.take(x, np.where(inside, indices, 0), axis)
    if not inside.all():
        shape = (1,) * axis + indices.shape + (1,) * (x.ndim - 1 - axis)
        y = np.where(inside.reshape(shape), y, x.dtype.type(np.nan if x.dtype.kind == "f" else 0))
    return y


def scatter_reference(x: Array, indices: Array, values: Array) -> Array:
    """The NumPy formula."""
    y, rows = x.copy(), x.shape[0]
    for j, index in enumerate(indices):
        if -rows <= index < rows:
            y[index] = values[j]
    return y


def gather_lower(form: Form[GatherAttrs], caps: Caps) -> Lowered:
    """One launch."""
    (x, indices), y, axis = form.inputs, form.outputs[0], form.attrs.axis
    outer, inner = x.strides[:axis], x.strides[axis + 1 :]
    strides = (
        (*outer, *(0 for _ in indices.shape), *inner),
        (*(0 for _ in outer), *indices.strides, *(0 for _ in inner)),
        y.strides,
    )
    part = form.part("r", x.shape[axis])
    row = (x.shape[axis], x.strides[axis], part.first, part.whole)
    tensors = (Ref(0, x), Ref(1, indices), Ref(2, y))
    return Lowered((pick_call(tensors, y.shape, strides, row),))


def scatter_lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """Two launches: the last index of each row, then the rows; a copy without indices."""
    (x, indices, values), y = form.inputs, form.outputs[0]
    if not indices.size:
        call = plain_call("copy", (x,), y, caps)
        return Lowered((replace(call, tensors=(call.tensors[0], Ref(3, y))),))
    last = make_spec(x.shape[:1], i32, caps.row_alignment)
    part = form.part("r", x.shape[0])
    scalars = (
        ("rows", x.shape[0]), ("count", indices.size), ("first", part.first), ("wrap", part.whole),
    )  # fmt: skip
    first = Call(last_index, (Ref(1, indices), Ref(4, last)), scalars, (),
                 -(-x.shape[0] // WORKGROUP))  # fmt: skip
    inner = x.strides[1:]
    strides = ((0, *values.strides[1:]), (1, *(0 for _ in inner)), y.strides, x.strides)
    tensors = (Ref(2, values), Ref(4, last), Ref(3, y), Ref(0, x))
    first_value = form.part("j", values.shape[0]).first
    row = (values.shape[0], values.strides[0], first_value, 0)  # -1 is none
    return Lowered((first, pick_call(tensors, y.shape, strides, row)), (last,))


def pick_call(
    tensors: tuple[Ref, ...], shape: Shape, strides: tuple[Shape, ...],
    row: tuple[int, int, int, int],
) -> Call:  # fmt: skip
    """The launch of `pick`: tensors x, indices, y and base, with their strides over y's shape.

    Args:
        row: rows of x that an index chooses from, elements between them, the number of the first
            (where that is not 0, what other rows give is there already), and what is added to a
            negative index.
    """
    keep = row[2] > 0
    if keep:
        tensors, strides = tensors[:3], strides[:3]
    sizes, steps = merge(shape, strides)
    y = tensors[2].spec
    if steps[2][-1] > 1:  # rows of one element and a pitch: each element is a row
        sizes, steps = (*sizes, 1), tuple((*s, int(k == 2)) for k, s in enumerate(steps))
    moved = [tensors[0].spec, *(ref.spec for ref in tensors[3:])]
    item = y.dtype.itemsize
    chunk = steps[1][-1] == 0 and row[1] * item % 16 == 0 and all(
        spec.aligned and step[-1] == 1 and not any(s * item % 16 for s in step[:-1])
        for spec, step in zip((*moved, y), (steps[0], *steps[3:], steps[2]), strict=True)
    )  # fmt: skip
    items = -(-sizes[-1] // width_of(y, chunk))
    threads = items * math.prod(sizes[:-1])
    names = ("x", "i", "y", "base")[: len(tensors)]
    scalars = {
        "items": items, "threads": threads, "columns": sizes[-1], "height": row[0],
        "pitch": row[1], "first": row[2], "wrap": row[3],
    }  # fmt: skip
    by_name = dict(zip(names, steps, strict=True))
    scalars.update({f"{name}_step": step[-1] for name, step in by_name.items()})
    scalars.update(numbered({"n": sizes, **{name: s[:-1] for name, s in by_name.items()}}))
    reads: dict[str, int] = dict.fromkeys(("x", "indices", *names[3:]), 1)
    result = {"y": 1}
    form = signature(reads, {}, result) if keep else signature(reads, result)
    x, indices, out, *base = tensors
    ordered = (*(Ref(r.index, flat(r.spec)) for r in (x, indices, *base)), out)
    constants = (
        ("along", steps[1][-1] != 0), ("chunk", chunk), ("keep", keep), ("rank", len(sizes)),
    )  # fmt: skip
    return Call(
        pick, ordered, tuple(scalars.items()), constants, -(-threads // WORKGROUP), signature=form
    )


def gather_axes(form: Form[GatherAttrs]) -> Axes:
    """All but the rows of x, among which the indices choose."""
    letters, axis = LETTERS[: len(form.outputs[0].shape)], form.attrs.axis
    end = axis + len(form.inputs[1].shape)
    return axes([f"{letters[:axis]}r{letters[end:]}", letters[axis:end]], [letters], chosen="r")


def scatter_axes(form: Form[NoAttrs]) -> Axes:
    """Rows of x, which have numbers, and their elements; each may be any row of values."""
    inner = LETTERS[: len(form.outputs[0].shape) - 1]
    return axes(["r" + inner, ".", "j" + inner], ["r" + inner], told="r", chosen="j")


GATHER = Op("gather", gather_rule, gather_reference, gather_lower, attrs=GatherAttrs,
            axes=gather_axes, doc="rows by their index")  # fmt: skip
SCATTER = Op("scatter", scatter_rule, scatter_reference, scatter_lower, axes=scatter_axes,
             flops=lambda form: form.outputs[0].size * form.inputs[1].size,  # all look at all
             doc="rows replaced")  # fmt: skip
