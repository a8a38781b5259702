"""Weights in blocks of 32 along k: a plane of small integers, and a plane with a factor a block.

    y[m, n] = f(alpha sum over b (s[n, b] sum over k of block b (q[n, k] x[m, k])) + bias[n])
              + residual[m, n]

As GGUF's Q8_0 and Q4_0 have them, their two parts in tensors of their own: `stored` is i8 [n, k],
or u8 [n, k / 2] with two numbers a byte: of a block the first 16 in the low halves, the others in
the high ones, each 8 more than it stands for. `scale` is [n, k / 32].

`linear_blocks` is the product of few rows: the thin product's teams, but each step of a thread ends
with its block's factor, so that a weight is read once, as it is stored. Of more rows the weight is
made whole by `dequantize` and multiplied as any other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import dtype_of, i8, u8
from centella.errors import DTypeError, ShapeError
from centella.op.axes import LETTERS, Axes, axes
from centella.op.form import Form
from centella.op.op import Op, Out
from centella.ops.layout import takes_rows
from centella.ops.matmul.op import check_extras, epilogue, flops_of, result_dtype
from centella.ops.matmul.problem import THIN, LinearAttrs, aligned
from centella.ops.operands import NUMPY
from centella.specs import Spec

BLOCK = 32  # elements that share a factor
CHUNK = 16  # bytes: of 8-bit numbers half a block, of 4-bit ones a whole one


def depth_of(stored: Spec) -> int:
    """Elements of a row of the weight."""
    return stored.shape[-1] * (2 if stored.dtype is u8 else 1)


def check_planes(op: str, stored: Spec, scale: Spec) -> None:
    """Refuse planes that do not belong together.

    Raises:
        ShapeError, DTypeError: says what was expected.
    """
    if stored.dtype not in (i8, u8) or not scale.dtype.is_float:
        raise DTypeError(
            f"{op}: expected i8 or u8 numbers and float factors, got {stored.dtype.name} and "
            f"{scale.dtype.name}"
        )
    n, k = (stored.shape[0], depth_of(stored)) if len(stored.shape) == 2 else (0, 1)
    if k % BLOCK or scale.shape != (n, k // BLOCK):
        raise ShapeError(
            f"{op}: expected numbers i8 [n, k] or u8 [n, k / 2] and factors [n, k / {BLOCK}], got "
            f"{list(stored.shape)} and {list(scale.shape)}"
        )


# -- the product ----------------------------------------------------------------------------------


def linear_rule(specs: tuple[Spec, ...], attrs: LinearAttrs) -> tuple[Out, ...]:
    """x [..., k] of at most 16 rows, the planes, bias [n], residual [..., n] to [..., n]."""
    x, stored, scale, *more = specs
    check_planes("linear", stored, scale)
    if any(not s.dtype.is_float for s in (x, *more)):
        raise DTypeError(f"linear: expected float dtypes, got {[s.dtype.name for s in specs]}")
    k = depth_of(stored)
    if not x.shape or x.shape[-1] != k or math.prod(x.shape[:-1]) > THIN:
        raise ShapeError(f"linear: expected x [..., {k}], got {list(x.shape)}")
    shape = (*x.shape[:-1], stored.shape[0])
    check_extras(shape, attrs.extras, more)
    return ((shape, result_dtype(x.dtype, attrs)),)


def linear_reference(
    x: Any, stored: Any, scale: Any, *more: Any, extras: tuple[str, ...], **attrs: Any
) -> Any:
    """The NumPy formula."""
    weight = reference(stored, scale).astype(x.dtype)
    rows = math.prod(x.shape[:-1])
    y = np.matmul(x.reshape(rows, x.shape[-1]), weight.T)
    y = y.reshape(*x.shape[:-1], len(weight))
    return epilogue(NUMPY, y, dict(zip(extras, more, strict=True)), LinearAttrs(extras, **attrs))


def takes(index: int, spec: Spec) -> bool:
    """Rows one pitch apart; those of the numbers start on 16 bytes."""
    if index != 1:
        return takes_rows(index, spec)
    pitch = spec.strides[0] if len(spec.shape) == 2 else 1
    return takes_rows(index, spec) and aligned(spec, pitch, 0)


def linear_axes(form: Form[LinearAttrs]) -> Axes:
    """Rows of x, outputs of the weight."""
    lead = LETTERS[: len(form.outputs[0].shape) - 1]
    more = [f"{lead}n" if name == "residual" else "n" for name in form.attrs.extras]
    return axes([f"{lead}.", "n.", "n.", *more], [f"{lead}n"])


LINEAR_BLOCKS = Op(
    "linear_blocks", linear_rule, linear_reference, "centella.ops.matmul.plane_kernels:linear",
    takes, attrs=LinearAttrs, axes=linear_axes, flops=flops_of, doc=__doc__ or "",
)  # fmt: skip


# -- the weight made whole ------------------------------------------------------------------------


class DequantizeAttrs(Struct, frozen=True):
    """The dtype of the whole weight."""

    dtype: str


def rule(specs: tuple[Spec, ...], attrs: DequantizeAttrs) -> tuple[Out, ...]:
    """Numbers i8 [n, k] or u8 [n, k / 2] and factors [n, k / 32] to [n, k]."""
    stored, scale = specs
    check_planes("dequantize", stored, scale)
    return (((stored.shape[0], depth_of(stored)), dtype_of(attrs.dtype)),)


def reference(stored: Any, scale: Any, **attrs: Any) -> Any:
    """The NumPy formula."""
    n = len(stored)
    signed = stored
    if stored.dtype == np.uint8:
        bytes_ = stored.reshape(n, scale.shape[1], CHUNK)
        halves = np.concatenate([bytes_ & 15, bytes_ >> 4], -1)
        signed = halves.astype(np.int8) - np.int8(8)
    blocks = signed.reshape(n, scale.shape[1], BLOCK).astype(scale.dtype) * scale[..., None]
    return blocks.reshape(n, scale.shape[1] * BLOCK)


def takes_planes(index: int, spec: Spec) -> bool:
    """Rows one pitch apart; those of the numbers start on 16 bytes."""
    return takes(1 - index, spec)


def axes_of(form: Form[DequantizeAttrs]) -> Axes:
    """Rows."""
    return axes(["n.", "n."], ["n."])


DEQUANTIZE = Op("dequantize", rule, reference, "centella.ops.matmul.plane_kernels:dequantize",
                takes_planes, attrs=DequantizeAttrs, axes=axes_of, doc=__doc__ or "")  # fmt: skip
