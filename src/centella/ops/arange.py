"""arange: y_i = start + i step, made on the device: nothing is uploaded."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import DType, bool_, dtype_of, f32, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.ops.elements import as_f32
from centella.ops.elementwise import check_numbers
from centella.specs import Caps, Spec

WORKGROUP = 256


def _arange(*, y: Argument) -> None:
    """A thread a chunk of the output; the last one's pad continues the row."""
    width = y.dtype.per_chunk
    kind = dtype_of(y.dtype.value)
    start, step = lang.parameter("start", kind), lang.parameter("step", kind)
    origin = lang.parameter("origin", u32)
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        first = lang.global_id() * width
        places = [lang.cast(origin + (first + j), kind) for j in range(width)]
        y.store(first, [start + place * step for place in places])


kernel: Kernel = Kernel(
    _arange, workgroup=WORKGROUP, name="arange", signature=signature({}, {"y": 1})
)


class ArangeAttrs(Struct, frozen=True):
    """Start and step as they were given, how many elements, and their dtype."""

    start: int | float
    step: int | float
    size: int
    dtype: str


def rule(specs: tuple[Spec, ...], attrs: ArangeAttrs) -> tuple[Out, ...]:
    """No inputs; attributes `start`, `step`, `size` and `dtype`."""
    dtype, size = dtype_of(attrs.dtype), attrs.size
    if dtype is bool_:
        raise DTypeError("arange: expected a numeric dtype, got bool")
    start, step = attrs.start, attrs.step
    check_numbers("arange", (start, *([start + (size - 1) * step] if size else [])), dtype)
    return (((size,), dtype),)


def reference(start: Any, step: Any, size: int, dtype: str) -> Any:
    """The NumPy formula; floats as f32, which the device counts in."""
    kind = dtype_of(dtype)
    if kind.is_float:
        first, by = np.float32(as_f32(start)), np.float32(as_f32(step))
        return first + np.arange(size, dtype=np.float32) * by
    return (start + np.arange(size, dtype=np.int64) * step).astype(kind.numpy)


def lower(form: Form[ArangeAttrs], caps: Caps) -> Lowered:
    """One launch."""
    y = form.outputs[0]
    threads = -(-y.shape[0] // y.dtype.per_chunk)
    start, step = (_number(n, y.dtype) for n in (form.attrs.start, form.attrs.step))
    first = form.part("i", y.shape[0]).first
    scalars = (("threads", threads), ("start", start), ("step", step), ("origin", first))
    return Lowered((Call(kernel, (Ref(0, y),), scalars, (), -(-threads // WORKGROUP)),))


def _number(value: int | float, dtype: DType) -> int | float:
    """As the kernel adds it: a negative step of an unsigned dtype wraps."""
    if dtype_of(dtype.value) is f32:
        return as_f32(value)
    whole = int(value) & 0xFFFFFFFF
    return whole - (1 << 32) if dtype_of(dtype.value) is i32 and whole >= 1 << 31 else whole


def axes_of(form: Form[ArangeAttrs]) -> Axes:
    """Elements, which count from where a part begins."""
    return axes([], ["i"], told="i")


ARANGE = Op("arange", rule, reference, lower, attrs=ArangeAttrs, axes=axes_of, doc=__doc__ or "")
