"""Moving elements: `cast` to another dtype, `reshape` where no view is possible.

cast: y = x in another storage type; floats to integers truncate and saturate, NaN gives 0.
reshape: y[k] = x[k], k the row-major index of an element in either shape.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, DType, dtype_of, to_integers, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr
from centella.op.axes import LETTERS, Axes, Part, axes
from centella.op.op import Form, Lowered, Op, Out, broadcasting
from centella.ops.elements import element_call, element_kernel, index_of, numbered, offset_of
from centella.ops.layout import flat
from centella.ops.rows import place_of
from centella.specs import Caps, Shape, Spec, dense_strides

WORKGROUP = 256
OTHERS = LETTERS.lower()  # dimensions of the operand


class CastAttrs(Struct, frozen=True):
    """The dtype of the result."""

    dtype: str


def cast_rule(specs: tuple[Spec, ...], attrs: CastAttrs) -> tuple[Out, ...]:
    """Any dtype to any other."""
    return ((specs[0].shape, dtype_of(attrs.dtype)),)


def cast_reference(x: Array, dtype: str) -> Any:
    """The NumPy formula: saturating, NaN to 0."""
    target = dtype_of(dtype)
    if target.kind == "bool":
        return x != 0
    if target.is_float:
        return x.astype(np.float32) if x.dtype.kind != "f" else x
    return to_integers(x, target) if x.dtype.kind == "f" else x.astype(target.numpy)


def _cast_value(values: list[Any], attrs: CastAttrs) -> Any:
    target: DType = dtype_of(attrs.dtype)
    x = values[0]
    if target.kind == "bool" and x.dtype.is_float:
        return lang.bitcast(x, u32) << 1 != 0
    if target.itemsize == 1 and target.kind != "bool" and x.dtype.is_float:
        info = np.iinfo(target.numpy)
        inside = lang.fmin(lang.fmax(x, float(info.min)), float(info.max))
        x = lang.select(lang.isnan(x), 0.0, inside)
    return lang.cast(x, target)


cast_kernel: Kernel = element_kernel(
    "cast", lambda values, numbers, attrs: _cast_value(values, attrs)
)


def cast_lower(form: Form[CastAttrs], caps: Caps) -> Lowered:
    """One element kernel; a change of item size goes word by word."""
    call = element_call(cast_kernel, form.inputs, form.outputs[0], attrs=form.attrs)
    return Lowered((call,))


def _reshape(*, rank_in: int, rank_out: int, parts: bool, x: Argument, y: Argument) -> None:
    """A thread a word of the output.

    `parts`: x and y are parts of what is reshaped; elements that are not in x stay as they are.
    """
    width = y.dtype.per_word
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        columns = lang.parameter("columns", u32)
        index = index_of(row, "n", rank_out - 1)
        first = row * columns
        if parts:
            first = lang.parameter("origin", u32) + offset_of(index, "w")
        start = offset_of(index, "s")
        values = []
        for lane in range(width):
            at = lang.minimum(column + lane, columns - 1)
            source = index_of(first + at, "m", rank_in)
            if not parts:
                values.append(x[offset_of(source, "t")])
                continue
            moved, inside = _within(source)
            values.append(lang.select(inside, x[offset_of(moved, "t")], y[start + at]))
        y.store(start + column, values)


def _within(index: list[Expr]) -> tuple[list[Expr], Expr]:
    """An index counted from where a part begins, and whether the part has it; else its first."""
    moved = [i - lang.parameter(f"f{axis}", u32) for axis, i in enumerate(index)]
    inside = lang.const(0, u32) == 0
    for axis, i in enumerate(moved):
        inside = inside & (i < lang.parameter(f"c{axis}", u32))
    return [lang.select(inside, i, 0) for i in moved], inside


reshape_kernel: Kernel = Kernel(_reshape, workgroup=WORKGROUP, name="reshape", moves=True)


class ReshapeAttrs(Struct, frozen=True):
    """The shape of the result."""

    shape: Shape


def reshape_rule(specs: tuple[Spec, ...], attrs: ReshapeAttrs) -> tuple[Out, ...]:
    """The same number of elements; checked by the caller."""
    return ((tuple(attrs.shape), specs[0].dtype),)


def reshape_lower(form: Form[ReshapeAttrs], caps: Caps) -> Lowered:
    """One launch; none where this part of x has nothing of this part of y."""
    x, y = form.inputs[0], form.outputs[0]
    columns = y.shape[-1] if y.shape else 1
    items = -(-columns // y.dtype.per_word)
    threads = items * math.prod(y.shape[:-1])
    values = {"items": items, "threads": threads, "columns": columns}
    values.update(numbered({"n": y.shape, "s": y.strides, "m": x.shape, "t": x.strides}))
    parts = bool(form.parts)
    if parts:
        source, target = (
            [form.part(c, n) for c, n in zip(letters, spec.shape, strict=False)]
            for letters, spec in ((OTHERS, x), (LETTERS, y))
        )
        (low, high), (origin, end) = _reach(source), _reach(target)
        if high <= origin or end <= low:
            return Lowered(())
        values["origin"] = origin
        values.update(numbered({"m": [p.whole for p in source], "f": [p.first for p in source]}))
        values.update(numbered({"c": [p.extent for p in source]}))
        values.update(numbered({"w": dense_strides(tuple(p.whole for p in target))}))
    call = Call(
        reshape_kernel,
        (Ref(0, flat(x)), Ref(1, y)),
        tuple(values.items()),
        (("parts", parts), ("rank_in", len(x.shape)), ("rank_out", max(len(y.shape), 1))),
        -(-threads // WORKGROUP),
        signature=signature({"x": 1}, {}, {"y": 1}) if parts else signature({"x": 1}, {"y": 1}),
    )
    return Lowered((call,))


def _reach(parts: list[Part]) -> tuple[int, int]:
    """The row-major places, in the whole, from a part's first element to one past its last."""
    steps = dense_strides(tuple(p.whole for p in parts))
    first = sum(p.first * s for p, s in zip(parts, steps, strict=True))
    return first, 1 + sum((p.first + p.extent - 1) * s for p, s in zip(parts, steps, strict=True))


def reshape_axes(form: Form[ReshapeAttrs]) -> Axes:
    """Every axis: what a part of y needs may be in any part of x."""
    x, y = OTHERS[: len(form.inputs[0].shape)], LETTERS[: len(form.outputs[0].shape)]
    return axes([x], [y], told=y, chosen=x)


CAST = Op("cast", cast_rule, cast_reference, cast_lower, attrs=CastAttrs, element=_cast_value,
          axes=broadcasting, doc="x in another dtype")  # fmt: skip
RESHAPE = Op("reshape", reshape_rule, lambda x, shape: x.reshape(shape), reshape_lower,
             attrs=ReshapeAttrs, axes=reshape_axes, doc="x in another shape, moved")  # fmt: skip
