"""Elements by their index along an axis: `take_along_axis` reads them, `scatter_reduce` combines.

take_along_axis  y[a.., j, b..] = x[a.., indices[a.., j, b..], b..]; outside NaN, 0 or False
scatter_reduce   y[a.., i, b..] = x[a.., i, b..], combined with each values[a.., j, b..] whose index
                 is i, in the order of j: replaced, added, multiplied, the larger or the smaller

A negative index counts from the end; one outside is dropped. scatter_reduce sorts the indices, so
that equal ones are neighbours in the order of j. A thread has a word of the result, finds the first
index by a binary search, and combines in f32 (integers: modulo 2^32), rounding once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
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
from centella.op.axes import LETTERS, WHOLE, Axes, axes
from centella.op.op import Form, Lowered, NoAttrs, Op, Out
from centella.ops.elements import (
    Number,
    element_call,
    element_kernel,
    index_of,
    numbered,
    offset_of,
)
from centella.ops.elementwise import plain_call
from centella.ops.gather import GatherAttrs, check_indices, pick_call
from centella.ops.layout import broadcast, broadcast_strides, flat
from centella.ops.rows import place_of
from centella.ops.sort import ARGSORT, SortAttrs
from centella.specs import Caps, Shape, Spec, make_spec

WORKGROUP = 256
COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "mul": operator.mul, "max": lang.maximum, "min": lang.minimum,
}  # fmt: skip
UFUNCS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
REDUCTIONS = ("set", *COMBINE)


# -- take_along_axis -------------------------------------------------------------------------------


def take_rule(specs: tuple[Spec, ...], attrs: GatherAttrs) -> tuple[Out, ...]:
    """x [a.., n, b..], indices [a.., k, b..] to [a.., k, b..]; a and b broadcast."""
    x, indices = specs
    axis = attrs.axis
    check_indices("take_along_axis", indices)
    if len(x.shape) != len(indices.shape) or not 0 <= axis < len(x.shape):
        raise ShapeError(
            f"take_along_axis: expected indices of the rank of x and an axis of both, got "
            f"{list(indices.shape)}, {list(x.shape)} and axis {axis}"
        )
    if not x.shape[axis] and indices.size:
        raise ShapeError(f"take_along_axis: expected elements along axis {axis}, got "
                         f"{list(x.shape)}")  # fmt: skip
    ones = (_at(s.shape, axis, 1) for s in specs)
    return ((_at(broadcast("take_along_axis", *ones), axis, indices.shape[axis]), x.dtype),)


def take_reference(x: Array, indices: Array, axis: int) -> Array:
    """The NumPy formula."""
    rows = x.shape[axis]
    wrapped = np.where(indices < 0, indices + rows, indices)
    inside = (wrapped >= 0) & (wrapped < rows)
    y = np.take_along_axis(x, np.where(inside, wrapped, 0), axis)
    return np.where(inside, y, x.dtype.type(np.nan if x.dtype.kind == "f" else 0))


def take_lower(form: Form[GatherAttrs], caps: Caps) -> Lowered:
    """One launch."""
    (x, indices), y, axis = form.inputs, form.outputs[0], form.attrs.axis
    row = replace(x, shape=_at(x.shape, axis, 1))
    strides = (broadcast_strides(row, y.shape), broadcast_strides(indices, y.shape), y.strides)
    part = form.part("r", x.shape[axis])
    rows = (x.shape[axis], x.strides[axis], part.first, part.whole)
    return Lowered((pick_call((Ref(0, x), Ref(1, indices), Ref(2, y)), y.shape, strides, rows),))


def take_axes(form: Form[GatherAttrs]) -> Axes:
    """All but the elements of x, among which the indices choose."""
    (x, indices), y, axis = form.inputs, form.outputs[0], form.attrs.axis
    letters = LETTERS[: len(y.shape)]
    return axes([_spread(x, _at(letters, axis, "r"), axis), _spread(indices, letters, axis)],
                [letters], chosen="r")  # fmt: skip


def _at(sequence: Any, axis: int, value: Any) -> Any:
    """A shape or letters with another value at an axis."""
    if isinstance(sequence, str):
        return f"{sequence[:axis]}{value}{sequence[axis + 1 :]}"
    return (*sequence[:axis], value, *sequence[axis + 1 :])


def _spread(spec: Spec, letters: str, axis: int) -> str:
    """The letters of an operand that broadcasts along all axes but one."""
    pairs = enumerate(zip(spec.shape, letters, strict=True))
    return "".join(WHOLE if n == 1 and a != axis else c for a, (n, c) in pairs)


# -- scatter_reduce --------------------------------------------------------------------------------


class ScatterAttrs(Struct, frozen=True):
    """The axis that indices choose along, and how values are combined."""

    axis: int
    reduce: str


def scatter_rule(specs: tuple[Spec, ...], attrs: ScatterAttrs) -> tuple[Out, ...]:
    """x [a.., n, b..], indices [k] or [a.., k, b..], values [a.., k, b..] to [a.., n, b..]."""
    x, indices, values = specs
    axis = attrs.axis
    check_indices("scatter", indices)
    if attrs.reduce not in REDUCTIONS:
        raise ShapeError(f"scatter: expected reduce from {', '.join(REDUCTIONS)}, got "
                         f"{attrs.reduce!r}")  # fmt: skip
    if not 0 <= axis < len(x.shape):
        raise ShapeError(f"scatter: expected an axis of {list(x.shape)}, got {axis}")
    own = len(values.shape) == len(x.shape) and values.shape == _at(
        x.shape, axis, values.shape[axis]
    )
    if not own or indices.shape not in (values.shape, values.shape[axis : axis + 1]):
        raise ShapeError(
            f"scatter: expected values of {list(x.shape)} with any extent along axis {axis}, and "
            f"indices along it or of the shape of values, got {list(values.shape)} and "
            f"{list(indices.shape)}"
        )
    if values.dtype is not x.dtype:
        raise DTypeError(f"scatter: expected one dtype, got {x.dtype.name} and {values.dtype.name}")
    if x.dtype.kind == "bool" and attrs.reduce != "set":
        raise DTypeError(f"scatter: expected a numeric dtype to {attrs.reduce}, got bool")
    return ((x.shape, x.dtype),)


def scatter_reference(x: Array, indices: Array, values: Array, axis: int, reduce: str) -> Array:
    """The NumPy formula."""
    y = x.copy()
    if indices.shape != values.shape:
        wide = (1,) * axis + indices.shape + (1,) * (values.ndim - 1 - axis)
        indices = np.broadcast_to(indices.reshape(wide), values.shape)
    wrapped = np.where(indices < 0, indices + x.shape[axis], indices)
    inside = (wrapped >= 0) & (wrapped < x.shape[axis])
    at: Array = np.indices(values.shape)
    places = (*at[:axis], wrapped, *at[axis + 1 :])
    order = np.argsort(places[axis][inside], kind="stable")  # of any one element: that of j
    chosen = tuple(p[inside][order] for p in places)
    if reduce == "set":
        y[chosen] = values[inside][order]
    else:
        UFUNCS[reduce].at(y, chosen, values[inside][order])
    return y


def _wrap(values: list[Expr], numbers: dict[str, Expr], attrs: NoAttrs) -> Expr:
    index = values[0]
    return lang.select(index < 0, index + numbers["rows"], index)


def _scatter(
    *, rank: int, axis: int, reduce: str, values: Argument, keys: Argument, order: Argument,
    y: Argument, **base: Argument,
) -> None:  # fmt: skip
    """A thread a word of the result, which changes in place where there is no base."""
    width = y.dtype.per_word
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        last, count = lang.parameter("columns", u32) - 1, lang.parameter("count", u32)
        leading = index_of(row, "n", rank - 1)
        results = []
        for lane in range(width):
            index = [*leading, lang.minimum(column + lane, last)]
            number = lang.bitcast(index[axis] + lang.parameter("first", u32), i32)
            first = offset_of(index, "k")
            own = (base["x"] if base else y)[offset_of(index, "x" if base else "y")]
            start = _first(keys, order, first, number)
            origin = offset_of(index, "v")
            total = lang.var(own) if reduce != "set" else lang.var(0, u32)
            hit = lang.var(0, u32)
            for j in lang.range(count):
                at = start + j
                there = lang.bitcast(order[first + lang.minimum(at, count - 1)], u32)
                lang.break_if((at >= count) | (keys[first + there] != number))
                at = origin + there * lang.parameter("pitch", u32)
                if reduce == "set":
                    total.set(at)
                    hit.set(1)
                else:
                    total.set(COMBINE[reduce](total.get(), values[at]))
            done = total.get()
            results.append(
                lang.select(hit.get() == 1, values[done], own) if reduce == "set" else done
            )
        y.store(offset_of([*leading, column], "y"), results)


def _first(keys: Any, order: Any, first: Operand, number: Operand) -> Expr:
    """Of the sorted keys that begin at a place, how many are below a number."""
    low, high = lang.var(0, u32), lang.var(lang.parameter("count", u32))
    for _ in lang.range(lang.parameter("halvings", u32)):
        with lang.if_(low.get() < high.get()):
            middle = (low.get() + high.get()) // 2
            below = keys[first + lang.bitcast(order[first + middle], u32)] < number
            low.set(lang.select(below, middle + 1, low.get()))
            high.set(lang.select(below, high.get(), middle))
    return low.get()


wrap_kernel: Kernel = element_kernel("wrap", _wrap)
scatter_kernel: Kernel = Kernel(_scatter, workgroup=WORKGROUP, name="scatter_reduce")


def scatter_lower(form: Form[ScatterAttrs], caps: Caps) -> Lowered:
    """Indices counted from 0, the launches that sort them, and one that combines."""
    x, indices, _ = form.inputs
    y, axis = form.outputs[0], form.attrs.axis
    if not indices.size:
        call = plain_call("copy", (x,), y, caps)
        return Lowered((replace(call, tensors=(call.tensors[0], Ref(3, y))),))
    part = form.part("r", x.shape[axis])
    last = axis if len(indices.shape) > 1 else 0
    turned = [*(a for a in range(len(indices.shape)) if a != last), last]
    moved = Spec(tuple(indices.shape[a] for a in turned), i32,
                 tuple(indices.strides[a] for a in turned), indices.aligned)  # fmt: skip
    dense = (math.prod(moved.shape[:-1]), moved.shape[-1])
    keys = make_spec(dense, i32, 4)
    line = Spec(moved.shape, i32, _dense(moved.shape), keys.aligned)
    wrap = element_call(wrap_kernel, (moved,), line, (Number("rows", "i32", part.whole),))
    sort = Form(ARGSORT, (keys,), (keys,), SortAttrs()).lower(caps)
    calls = [replace(wrap, tensors=(Ref(1, wrap.tensors[0].spec), Ref(4, wrap.tensors[1].spec)))]
    calls += [
        replace(c, tensors=tuple(Ref(r.index + 4, r.spec) for r in c.tensors)) for c in sort.calls
    ]
    steps = [0] * len(y.shape)
    if len(indices.shape) > 1:
        for a, stride in zip(turned[:-1], line.strides, strict=False):
            steps[a] = stride
    calls.append(_combined(form, tuple(steps), keys, part.first))
    return Lowered(tuple(calls), (keys, keys, *sort.temporaries))


def _dense(shape: Shape) -> Shape:
    return tuple(math.prod(shape[a + 1 :]) for a in range(len(shape)))


def _combined(form: Form[ScatterAttrs], steps: Shape, keys: Spec, first: int) -> Call:
    """The last launch; the indices of an element of y begin `steps` apart."""
    x, _, values = form.inputs
    y, (axis, reduce) = form.outputs[0], (form.attrs.axis, form.attrs.reduce)
    columns, count = y.shape[-1], values.shape[axis]
    items = -(-columns // y.dtype.per_word)
    threads = items * math.prod(y.shape[:-1])
    scalars = {
        "items": items, "threads": threads, "columns": columns, "count": count, "first": first,
        "pitch": values.strides[axis], "halvings": count.bit_length(),
        **numbered({"n": y.shape[:-1], "x": x.strides, "y": (*y.strides[:-1], 1), "k": steps,
                    "v": _at(values.strides, axis, 0)}),
    }  # fmt: skip
    constants = (("axis", axis), ("rank", len(y.shape)), ("reduce", reduce))
    base = form.part("j", count).first == 0
    names = ("values", "keys", "order", *(("x",) if base else ()))
    reads: dict[str, int] = dict.fromkeys(names, 1)
    operands = ((2, values), (4, keys), (5, keys), *(((0, x),) if base else ()))
    refs = (Ref(index, flat(spec)) for index, spec in operands)
    return Call(
        scatter_kernel, (*refs, Ref(3, y)), tuple(scalars.items()), constants,
        -(-threads // WORKGROUP),
        signature=signature(reads, *(({"y": 1},) if base else ({}, {"y": 1}))),
    )  # fmt: skip


def scatter_axes(form: Form[ScatterAttrs]) -> Axes:
    """Elements of x; values along the axis too, whose parts are combined in their order."""
    letters, axis = LETTERS[: len(form.outputs[0].shape)], form.attrs.axis
    own, every = _at(letters, axis, "r"), _at(letters, axis, "j")
    keys = every if len(form.inputs[1].shape) > 1 else "j"
    return axes([own, keys, every], [own], told="r", chosen="j")


TAKE_ALONG_AXIS: Op[GatherAttrs] = Op(
    "take_along_axis", take_rule, take_reference, take_lower, attrs=GatherAttrs, axes=take_axes,
    doc="elements by their index along an axis",
)  # fmt: skip
SCATTER_REDUCE: Op[ScatterAttrs] = Op(
    "scatter_reduce", scatter_rule, scatter_reference, scatter_lower, attrs=ScatterAttrs,
    axes=scatter_axes, doc="elements combined by their index",
)  # fmt: skip
