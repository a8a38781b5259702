"""`conv1d` as an op: rule and NumPy formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array
from centella.errors import DTypeError, ShapeError
from centella.op.axes import Axes, axes
from centella.op.op import Form, Op, Out
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.layout import repeats
from centella.ops.matmul.problem import ALONG_K
from centella.ops.operands import NUMPY
from centella.specs import Spec


class Conv1dAttrs(Struct, frozen=True):
    """Places of x between results, zeros on either side, what follows the product."""

    stride: int
    padding: int
    activation: str
    variant: str | None = None


def rule(specs: tuple[Spec, ...], attrs: Conv1dAttrs) -> tuple[Out, ...]:
    """x [b, in, l], weight [out, in, kernel], bias [out] to [b, l_out, out]."""
    x, weight, *more = specs
    if len(x.shape) != 3 or len(weight.shape) != 3 or x.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"conv1d: expected x [batch, in, length] and weight [out, in, kernel], got "
            f"{list(x.shape)} and {list(weight.shape)}"
        )
    taps, whole = weight.shape[2], x.shape[2] + 2 * attrs.padding
    if not 1 <= taps <= whole:
        raise ShapeError(f"conv1d: expected a kernel of 1 to {whole} (padded length), got {taps}")
    for spec in more:
        if spec.shape != weight.shape[:1]:
            raise ShapeError(
                f"conv1d: expected bias {list(weight.shape[:1])}, got {list(spec.shape)}"
            )
    if any(not s.dtype.is_float for s in specs):
        raise DTypeError(f"conv1d: expected float dtypes, got {[s.dtype.name for s in specs]}")
    return (((x.shape[0], (whole - taps) // attrs.stride + 1, weight.shape[0]), x.dtype),)


def reference(
    x: Array, weight: Array, *bias: Array, stride: int, padding: int, activation: str
) -> Any:
    """The NumPy formula: the product of overlapping rows with the weights."""
    batch, channels, length = x.shape
    out, _, taps = weight.shape
    padded = np.zeros((batch, length + 2 * padding, channels), x.dtype)
    padded[:, padding : padding + length] = x.swapaxes(1, 2)
    count = (length + 2 * padding - taps) // stride + 1
    row, item = padded.strides[0], padded.itemsize
    rows = np.lib.stride_tricks.as_strided(
        padded, (batch, count, taps * channels), (row, stride * channels * item, item)
    )
    rows = np.ascontiguousarray(rows)  # BLAS takes no rows that overlap
    y = np.matmul(rows, weight.transpose(2, 1, 0).reshape(taps * channels, out))
    for vector in bias:
        y += vector
    return ACTIVATIONS[activation](NUMPY, y) if activation else y


def takes(index: int, spec: Spec) -> bool:
    """x and weights as they lie, if nothing repeats; a bias of neighbouring elements."""
    return not repeats(spec) if index < 2 else spec.unit_rows


def axes_of(form: Form[Conv1dAttrs]) -> Axes:
    """Sequences and output channels."""
    return axes(["b..", "o..", *("o" for _ in form.inputs[2:])], ["b.o"])


def flops_of(form: Form[Conv1dAttrs]) -> int:
    """A multiplication and an addition for each element of a filter."""
    return 2 * form.outputs[0].size * math.prod(form.inputs[1].shape[1:])


CONV1D = Op("conv1d", rule, reference, "centella.ops.conv1d.lower:conv1d", takes, ALONG_K,
            attrs=Conv1dAttrs, axes=axes_of, flops=flops_of,
            doc="a product of overlapping rows")  # fmt: skip
