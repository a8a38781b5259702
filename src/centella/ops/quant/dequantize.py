"""Dequantised weights: number x factor (+ low), in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from centella.dtypes import Array, dtype_of
from centella.op.axes import Axes, axes
from centella.op.op import Form, Op, Out
from centella.ops.layout import takes_rows
from centella.ops.quant.table import FORMATS
from centella.specs import Spec

if TYPE_CHECKING:
    from centella.ops.quant.format import Format


class DequantizeAttrs(Struct, frozen=True):
    """The dtype of the dequantised weight, and the format of the planes."""

    dtype: str
    format: str


def rule(specs: tuple[Spec, ...], attrs: DequantizeAttrs) -> tuple[Out, ...]:
    """The planes to [n, k]."""
    return ((FORMATS[attrs.format].check("dequantize", specs), dtype_of(attrs.dtype)),)


def reference(*planes: Array, format: str, **attrs: Any) -> Array:
    """The NumPy formula."""
    return FORMATS[format].decode(*planes)


def plane_axes(format: Format, letter: str) -> list[str]:
    """The letters of planes whose rows have one."""
    return [f"{letter}." if plane.length else letter for plane in format.planes]


def axes_of(form: Form[DequantizeAttrs]) -> Axes:
    """Rows."""
    return axes(plane_axes(FORMATS[form.attrs.format], "n"), ["n."])


DEQUANTIZE = Op("dequantize", rule, reference, "centella.ops.quant.kernels:dequantize", takes_rows,
                attrs=DequantizeAttrs, axes=axes_of, doc=__doc__ or "")  # fmt: skip
