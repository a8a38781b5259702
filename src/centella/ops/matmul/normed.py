"""normed_linear: a decoder's product with the norm before it and what follows it, in one launch.

    h = x / sqrt(mean(x^2) + eps) * norm                    where there is a norm
    h = (x - mean) / sqrt(var + eps) * norm + shift         of the kind "layer"
    y = act(alpha (h W^T) + bias) + residual
    y = act(alpha (h W[:n]^T) + bias[:n]) * (alpha (h W[n:]^T) + bias[n:])      with a gate

Source: Zhang and Sennrich 2019 (RMS norm), Ba et al. 2016 (layer norm), Shazeer 2020 (gates).

A weight in planes has a kernel of one row on Hopper (`quant/digits.py`).

`normed_kernel.py` has the kernel for few rows of x, `streamed.py` that of one on Hopper, `gated.py`
has those for several rows on tensor cores: of a gate, and of bf16 rows with their RMS norm.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import dtype_of
from centella.errors import DTypeError, ShapeError
from centella.op.axes import LETTERS, Axes, axes
from centella.op.op import Form, Op, Out, loaded
from centella.op.variant import APART
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.layout import takes_rows
from centella.ops.matmul.op import parted
from centella.ops.matmul.problem import DIGITS, THIN
from centella.ops.operands import NUMPY
from centella.ops.quant.dequantize import plane_axes
from centella.ops.quant.table import FORMATS
from centella.specs import Caps, Spec

JOINED_ROWS = 2  # rows up to which a thin product gains from its surroundings
FEW = 32  # rows up to which a product on tensor cores has tiles of its own
FEW_ROWS = ("streamed", "joined")  # kernels of few rows
VARIANTS = (*FEW_ROWS, "streamed_rows", "streamed_many", "wgmma", "mma", DIGITS, APART)


class NormedAttrs(Struct, frozen=True):
    """Operands after the weight, activations, and numbers.

    `format`: of a weight in planes, of which there are as many operands; "": it is one tensor.

    Attributes:
        extras: of "norm", "shift", "bias", "residual", those that are given, in this order.
        gate, activation: of the gate, and of what has none; "" for none.
        kind: of the norm, "rms" or "layer".
        variant: one of `VARIANTS`, where it is forced.
    """

    extras: tuple[str, ...]
    gate: str
    eps: float
    alpha: float
    dtype: str = ""
    activation: str = ""
    kind: str = "rms"
    format: str = ""
    variant: str | None = None


def rule(specs: tuple[Spec, ...], attrs: NormedAttrs) -> tuple[Out, ...]:
    """x [..., k], weight [n or 2 n, k], norm and shift [k], bias a row of W each, residual y's."""
    x, planes, more = parted(specs, attrs.format)
    floats = (x, *more) if attrs.format else (x, *planes, *more)
    if any(not s.dtype.is_float for s in floats):
        raise DTypeError(
            f"normed_linear: expected float dtypes, got {[s.dtype.name for s in floats]}"
        )
    of_planes = FORMATS[attrs.format].check("normed_linear", planes) if attrs.format else ()
    weight = of_planes or planes[0].shape
    if len(weight) != 2 or not x.shape or x.shape[-1] != weight[1]:
        raise ShapeError(
            f"normed_linear: expected x [..., k] and weight [n, k], got {list(x.shape)} and "
            f"{list(weight)}"
        )
    if not math.prod(x.shape):
        raise ShapeError(f"normed_linear: expected 1 row or more, got {list(x.shape)}")
    if attrs.gate and (weight[0] % 2 or "residual" in attrs.extras or attrs.activation):
        raise ShapeError(
            f"normed_linear: expected a weight [2 n, k] and nothing after a gate, got "
            f"{list(weight)} and {list(attrs.extras)}"
        )
    if ("shift" in attrs.extras or attrs.kind == "layer") and not (
        attrs.kind == "layer" and "norm" in attrs.extras
    ):
        raise ShapeError(
            f"normed_linear: expected norm= with a layer norm, got {list(attrs.extras)}"
        )
    shape = (*x.shape[:-1], weight[0] // (2 if attrs.gate else 1))
    for name, spec in zip(attrs.extras, more, strict=True):
        wanted = {"residual": shape, "bias": weight[:1]}.get(name, x.shape[-1:])
        if spec.shape != wanted:
            raise ShapeError(
                f"normed_linear: expected {name} {list(wanted)}, got {list(spec.shape)}"
            )
    return ((shape, dtype_of(attrs.dtype) if attrs.dtype else x.dtype),)


def reference(*operands: Any, **named: Any) -> Any:
    """The NumPy formula."""
    attrs = NormedAttrs(**named)
    x, planes, more = parted(operands, attrs.format)
    weight = FORMATS[attrs.format].decode(*planes) if attrs.format else planes[0]
    vectors = dict(zip(attrs.extras, more, strict=True))
    if "norm" in vectors:
        x = x - np.mean(x, axis=-1, keepdims=True) if attrs.kind == "layer" else x
        mean = np.mean(x * x, axis=-1, keepdims=True)
        x = x / np.sqrt(mean + x.dtype.type(attrs.eps)) * vectors["norm"] + vectors.get("shift", 0)
    y = np.matmul(x, weight.astype(x.dtype, copy=False).T) * x.dtype.type(attrs.alpha)
    y = y + vectors["bias"] if "bias" in vectors else y
    if attrs.gate:
        n = len(weight) // 2
        return ACTIVATIONS[attrs.gate](NUMPY, y[..., :n]) * y[..., n:]
    y = ACTIVATIONS[attrs.activation](NUMPY, y) if attrs.activation else y
    return y + vectors["residual"] if "residual" in vectors else y


def axes_of(form: Form[NormedAttrs]) -> Axes:
    """Rows of x; outputs of the weight where there is no gate, whose two come from two halves."""
    lead, n = LETTERS[: len(form.outputs[0].shape) - 1], "." if form.attrs.gate else "n"
    letters = {"residual": f"{lead}{n}", "bias": n}  # of a gate the bias is whole, too
    more = [letters.get(name, ".") for name in form.attrs.extras]
    if not form.attrs.format:
        return axes([f"{lead}.", f"{n}.", *more], [f"{lead}{n}"])
    planes = plane_axes(FORMATS[form.attrs.format], n)
    return axes([f"{lead}.", *planes, *more], [f"{lead}{n}"])


def preferred(form: Form[NormedAttrs], caps: Caps) -> bool:
    """Where launches cost something, of few rows with a norm or a gate; of several see `gated`."""
    rows, attrs = math.prod(form.inputs[0].shape[:-1]), form.attrs
    if not (form.within_binding(caps) and (attrs.gate or "norm" in attrs.extras)):
        return False
    if attrs.format:
        one = rows == 1 and caps.warpgroups  # else the kernel is not even imported
        return one and bool(loaded("centella.ops.quant.digits:preferred")(form, caps))
    gains = rows <= JOINED_ROWS and not caps.launches_are_free
    if takes_few(form) and (attrs.variant in FEW_ROWS or (attrs.variant is None and gains)):
        return True
    if not caps.tensor_cores or attrs.variant in FEW_ROWS:
        return False
    return bool(loaded("centella.ops.matmul.gated:preferred")(form, caps))


def takes_few(form: Form[NormedAttrs]) -> bool:
    """Whether a kernel for few rows takes a form: those, and with a gate no bias."""
    few = math.prod(form.inputs[0].shape[:-1]) <= THIN
    return few and not (form.attrs.gate and "bias" in form.attrs.extras)


def flops_of(form: Form[NormedAttrs]) -> int:
    """A multiplication and an addition for each weight and row."""
    return 2 * form.outputs[0].size * form.inputs[0].shape[-1] * (2 if form.attrs.gate else 1)


NORMED: Op[NormedAttrs] = Op(
    "normed_linear", rule, reference, "centella.ops.matmul.gated:lower", takes_rows,
    VARIANTS, attrs=NormedAttrs, axes=axes_of, preferred=preferred, narrower=True,
    flops=flops_of, doc=__doc__ or "",
)  # fmt: skip
