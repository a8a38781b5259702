"""Moving elements: `cast` to another dtype, `reshape` where no view is possible.

cast: y = x in another storage type; floats to integers truncate and saturate, NaN gives 0.
reshape: y[k] = x[k], k the row-major index of an element in either shape.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import ALL, DType, dtype_of, u32
from centella.lang.face import Face, TensorParam
from centella.op import Lowered, Op, Out
from centella.ops.elements import element_call, element_kernel
from centella.ops.layout import flat
from centella.program import Call, Kernel, Ref
from centella.specs import Caps, Spec

WORKGROUP = 256
_RANGE = {d.name: np.iinfo(d.numpy) for d in ALL.values() if d.kind in ("int", "uint")}


def cast_rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """Any dtype to any other."""
    return ((specs[0].shape, dtype_of(attrs["dtype"])),)


def cast_reference(x: Any, dtype: str) -> Any:
    """The NumPy formula: saturating, NaN to 0."""
    target = dtype_of(dtype)
    if target.kind == "bool":
        return x != 0
    if target.is_float:
        return x.astype(np.float32) if x.dtype.kind != "f" else x
    info = _RANGE[target.name]
    if x.dtype.kind == "f":
        wide = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
        return np.clip(wide, info.min, info.max).astype(target.numpy)
    return x.astype(target.numpy)


def _cast_value(values: list[Any], scalars: dict[str, Any], attrs: dict[str, Any]) -> Any:
    target: DType = dtype_of(attrs["dtype"])
    x = values[0]
    if target.kind == "bool" and x.dtype.is_float:
        return lang.bitcast(x, u32) << 1 != 0
    if target.itemsize == 1 and target.kind != "bool" and x.dtype.is_float:
        info = _RANGE[target.name]
        inside = lang.fmin(lang.fmax(x, float(info.min)), float(info.max))
        x = lang.select(lang.isnan(x), 0.0, inside)
    return lang.cast(x, target)


cast_kernel = element_kernel("cast", _cast_value)


def cast_lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One element kernel; a change of item size goes word by word."""
    rest = (("dtype", attrs["dtype"]),)
    return Lowered((element_call(cast_kernel, inputs, outputs[0], attrs=rest),))


def _reshape(*, rank_in: int, rank_out: int, x: Any, y: Any) -> None:
    width = y.dtype.per_word
    items = lang.parameter("items", u32)
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row = lang.global_id() // items
        column = (lang.global_id() - row * items) * width
        last = lang.parameter("columns", u32)
        out_row, rest = lang.const(0, u32), row
        for axis in range(rank_out - 2, -1, -1):
            extent = lang.parameter(f"n{axis}", u32)
            index, rest = rest % extent, rest // extent
            out_row = out_row + index * lang.parameter(f"s{axis}", u32)
        values = []
        for lane in range(width):
            linear = row * last + lang.minimum(column + lane, last - 1)
            place = lang.const(0, u32)
            for axis in range(rank_in - 1, -1, -1):
                extent = lang.parameter(f"m{axis}", u32)
                index = linear if axis == 0 else linear % extent
                linear = linear // extent
                place = place + index * lang.parameter(f"t{axis}", u32)
            values.append(x[place])
        y.store(out_row + column, values)


_FACE = Face((("x", TensorParam("in", None, 1)), ("y", TensorParam("out", None, 1))), (), ())
reshape_kernel = Kernel(_reshape, workgroup=WORKGROUP, name="reshape", face=_FACE)


def reshape_rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """The same number of elements; checked by the caller."""
    return ((tuple(attrs["shape"]), specs[0].dtype),)


def reshape_lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """A thread a word of the output."""
    x, y = inputs[0], outputs[0]
    columns = y.shape[-1] if y.shape else 1
    items = -(-columns // y.dtype.per_word)
    threads = items * math.prod(y.shape[:-1])
    values = {"items": items, "threads": threads, "columns": columns}
    values.update({f"n{i}": n for i, n in enumerate(y.shape)})
    values.update({f"s{i}": s for i, s in enumerate(y.strides)})
    values.update({f"m{i}": n for i, n in enumerate(x.shape)})
    values.update({f"t{i}": s for i, s in enumerate(x.strides)})
    call = Call(
        reshape_kernel,
        (Ref(0, flat(x)), Ref(1, y)),
        tuple(values.items()),
        (("rank_in", len(x.shape)), ("rank_out", max(len(y.shape), 1))),
        -(-threads // WORKGROUP),
    )
    return Lowered((call,))


CAST = Op("cast", cast_rule, cast_reference, cast_lower, doc="x in another dtype")
RESHAPE = Op(
    "reshape",
    reshape_rule,
    lambda x, shape: x.reshape(shape),
    reshape_lower,
    doc="x in another shape, moved",
)
