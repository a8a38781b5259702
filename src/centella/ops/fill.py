"""fill: y = value everywhere, with nothing uploaded."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, dtype_of
from centella.emit.program import Kernel
from centella.errors import ShapeError
from centella.op.op import Form, Lowered, Op, Out, broadcasting
from centella.ops.elements import element_call, element_kernel, split_numbers
from centella.ops.elementwise import check_numbers
from centella.specs import Caps, Shape, Spec


class FillAttrs(Struct, frozen=True):
    """Shape, dtype and the value of every element."""

    shape: Shape
    dtype: str
    value: int | float | bool


def rule(specs: tuple[Spec, ...], attrs: FillAttrs) -> tuple[Out, ...]:
    """No inputs; attributes `shape`, `dtype` and `value`."""
    dtype = dtype_of(attrs.dtype)
    if any(n < 0 for n in attrs.shape):
        raise ShapeError(f"fill: expected extents of 0 or more, got {list(attrs.shape)}")
    check_numbers("fill", (attrs.value,), dtype)
    return ((attrs.shape, dtype),)


def reference(shape: tuple[int, ...], dtype: str, value: Array) -> Array:
    """The NumPy formula."""
    kind = dtype_of(dtype)
    return np.full(shape, value, np.float32 if kind.is_float else kind.numpy)


kernel: Kernel = element_kernel("fill", lambda values, numbers, attrs: numbers["value"])


def lower(form: Form[FillAttrs], caps: Caps) -> Lowered:
    """One launch."""
    numbers, _ = split_numbers(form.attrs, form.outputs[0].dtype)
    return Lowered((element_call(kernel, (), form.outputs[0], numbers),))


FILL = Op("fill", rule, reference, lower, attrs=FillAttrs, axes=broadcasting, doc=__doc__ or "")
