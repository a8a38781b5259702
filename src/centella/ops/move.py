"""Moving elements: `cast` to another dtype, `reshape` where no view is possible.

cast: y = x in another storage type; floats to integers truncate and saturate, NaN gives 0.
reshape: y[k] = x[k], k the row-major index of an element in either shape.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import DType, dtype_of, to_integers, u32
from centella.op import Lowered, Op, Out
from centella.ops.elements import element_call, element_kernel, index_of, offset_of
from centella.ops.face import face
from centella.ops.layout import flat
from centella.ops.rows import place_of
from centella.program import Call, Kernel, Ref
from centella.specs import Caps, Spec

WORKGROUP = 256


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
    return to_integers(x, target) if x.dtype.kind == "f" else x.astype(target.numpy)


def _cast_value(values: list[Any], scalars: dict[str, Any], attrs: dict[str, Any]) -> Any:
    target: DType = dtype_of(attrs["dtype"])
    x = values[0]
    if target.kind == "bool" and x.dtype.is_float:
        return lang.bitcast(x, u32) << 1 != 0
    if target.itemsize == 1 and target.kind != "bool" and x.dtype.is_float:
        info = np.iinfo(target.numpy)
        inside = lang.fmin(lang.fmax(x, float(info.min)), float(info.max))
        x = lang.select(lang.isnan(x), 0.0, inside)
    return lang.cast(x, target)


cast_kernel: Kernel = element_kernel("cast", _cast_value)


def cast_lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One element kernel; a change of item size goes word by word."""
    rest = (("dtype", attrs["dtype"]),)
    return Lowered((element_call(cast_kernel, inputs, outputs[0], attrs=rest),))


def _reshape(*, rank_in: int, rank_out: int, x: Any, y: Any) -> None:
    """A thread a word of the output."""
    width = y.dtype.per_word
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        columns = lang.parameter("columns", u32)
        values = []
        for lane in range(width):
            linear = row * columns + lang.minimum(column + lane, columns - 1)
            values.append(x[offset_of(index_of(linear, "m", rank_in), "t")])
        y.store(offset_of(index_of(row, "n", rank_out - 1), "s") + column, values)


reshape_kernel: Kernel = Kernel(
    _reshape, workgroup=WORKGROUP, name="reshape", face=face({"x": 1}, {"y": 1})
)


def reshape_rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """The same number of elements; checked by the caller."""
    return ((tuple(attrs["shape"]), specs[0].dtype),)


def reshape_lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch."""
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


CAST = Op("cast", cast_rule, cast_reference, cast_lower, element=_cast_value,
          doc="x in another dtype")  # fmt: skip
RESHAPE = Op(
    "reshape",
    reshape_rule,
    lambda x, shape: x.reshape(shape),
    reshape_lower,
    doc="x in another shape, moved",
)
