"""normed_linear: a decoder's product with the norm before it and the gate after it, in one launch.

    h = x / sqrt(mean(x^2) + eps) * norm          where there is a norm (Zhang and Sennrich 2019)
    y = alpha (h W^T) + residual
    y = act(h W[:n]^T) * (h W[n:]^T)              where there is a gate (Shazeer 2020)

For few rows of x; `normed_kernel.py` has the kernel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import dtype_of
from centella.errors import DTypeError, ShapeError
from centella.op.axes import LETTERS, Axes, axes
from centella.op.form import Form
from centella.op.op import Op, Out
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.layout import takes_rows
from centella.ops.matmul.problem import THIN
from centella.ops.operands import NUMPY
from centella.specs import Spec


class NormedAttrs(Struct, frozen=True):
    """Operands after the weight ("norm", "residual"), the gate's activation, and numbers."""

    extras: tuple[str, ...]
    gate: str
    eps: float
    alpha: float
    dtype: str


def rule(specs: tuple[Spec, ...], attrs: NormedAttrs) -> tuple[Out, ...]:
    """x [..., k] of at most 16 rows, weight [n or 2 n, k], norm [k], residual [..., n]."""
    x, weight, *more = specs
    if any(not s.dtype.is_float for s in specs):
        raise DTypeError(
            f"normed_linear: expected float dtypes, got {[s.dtype.name for s in specs]}"
        )
    if len(weight.shape) != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"normed_linear: expected x [..., k] and weight [n, k], got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    if not 0 < math.prod(x.shape[:-1]) <= THIN or not x.shape[-1]:
        raise ShapeError(f"normed_linear: expected 1 to {THIN} rows, got {list(x.shape)}")
    if attrs.gate and (weight.shape[0] % 2 or "residual" in attrs.extras):
        raise ShapeError(
            f"normed_linear: expected a weight [2 n, k] and no residual with a gate, got "
            f"{list(weight.shape)} and {list(attrs.extras)}"
        )
    shape = (*x.shape[:-1], weight.shape[0] // (2 if attrs.gate else 1))
    for name, spec in zip(attrs.extras, more, strict=True):
        wanted = shape if name == "residual" else x.shape[-1:]
        if spec.shape != wanted:
            raise ShapeError(
                f"normed_linear: expected {name} {list(wanted)}, got {list(spec.shape)}"
            )
    return ((shape, dtype_of(attrs.dtype) if attrs.dtype else x.dtype),)


def reference(
    x: Any, weight: Any, *more: Any, extras: tuple[str, ...], gate: str, eps: float, alpha: float,
    dtype: str,
) -> Any:  # fmt: skip
    """The NumPy formula."""
    named = dict(zip(extras, more, strict=True))
    if "norm" in named:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        x = x / np.sqrt(mean + x.dtype.type(eps)) * named["norm"]
    y = np.matmul(x, weight.astype(x.dtype, copy=False).T) * x.dtype.type(alpha)
    if gate:
        n = len(weight) // 2
        return ACTIVATIONS[gate](NUMPY, y[..., :n]) * y[..., n:]
    return y + named["residual"] if "residual" in named else y


def axes_of(form: Form[NormedAttrs]) -> Axes:
    """Rows of x; outputs of the weight where there is no gate, whose two come from two halves."""
    lead, n = LETTERS[: len(form.outputs[0].shape) - 1], "." if form.attrs.gate else "n"
    more = [f"{lead}{n}" if name == "residual" else "." for name in form.attrs.extras]
    return axes([f"{lead}.", f"{n}.", *more], [f"{lead}{n}"])


NORMED: Op[NormedAttrs] = Op(
    "normed_linear", rule, reference, "centella.ops.matmul.normed_kernel:lower", takes_rows,
    attrs=NormedAttrs, axes=axes_of, doc=__doc__ or "",
)  # fmt: skip
