"""Element by element: arithmetic, activations, conversion.

Operands have one dtype (or are f32 and a narrower float) and shapes that broadcast; one of two may
be a number that fits the dtype. Anything else is a ShapeError or DTypeError that names the
function and what came.
"""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from centella.dtypes import promote
from centella.errors import DTypeError
from centella.tensors.arguments import check_tensors, number, one_of, real
from centella.tensors.tensor import Tensor, apply, binary

Number = int | float


def add(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a + b, broadcasting."""
    return binary("add", a, b)


def sub(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a - b, broadcasting."""
    return binary("sub", a, b)


def mul(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a * b, broadcasting."""
    return binary("mul", a, b)


def div(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a / b for floats, broadcasting."""
    return binary("div", a, b)


def floor_divide(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a / b of integers, rounded down as `//` does in Python; a where b is 0."""
    return binary("floor_divide", a, b)


def remainder(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a - b floor(a / b) of integers: the sign of b, as `%` in Python; 0 where b is 0."""
    return binary("remainder", a, b)


def maximum(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """The larger of each pair; NaN where either is NaN."""
    return binary("maximum", a, b)


def minimum(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """The smaller of each pair; NaN where either is NaN."""
    return binary("minimum", a, b)


def neg(x: Tensor) -> Tensor:
    """-x."""
    return apply("neg", x)


def abs(x: Tensor) -> Tensor:
    """|x|."""
    return apply("abs", x)


def sqrt(x: Tensor) -> Tensor:
    """Square root; NaN below zero."""
    return apply("sqrt", x)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x); NaN below zero."""
    return apply("rsqrt", x)


def square(x: Tensor) -> Tensor:
    """x * x."""
    return apply("square", x)


def exp(x: Tensor) -> Tensor:
    """e^x."""
    return apply("exp", x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return apply("log", x)


def sin(x: Tensor) -> Tensor:
    """Sine of radians; on a GPU within 2 ulp + 1e-8 to 2^16, and NaN from 2^15 pi on."""
    return apply("sin", x)


def cos(x: Tensor) -> Tensor:
    """Cosine of radians; on a GPU within 2 ulp + 1e-8 to 2^16, and NaN from 2^15 pi on."""
    return apply("cos", x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN."""
    return apply("relu", x)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x above 0, `negative_slope * x` below."""
    return apply("leaky_relu", x, slope=real("leaky_relu", "negative_slope", negative_slope))


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x above 0, `alpha * (exp(x) - 1)` below (Clevert et al. 2016)."""
    return apply("elu", x, alpha=real("elu", "alpha", alpha))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return apply("sigmoid", x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return apply("tanh", x)


def swish(x: Tensor) -> Tensor:
    """x sigmoid(x), also called SiLU."""
    return apply("swish", x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU (Hendrycks and Gimpel 2016).

    Args:
        approximate: "none" x Phi(x) by erf, "tanh" its tanh form, "quick" x sigmoid(1.702 x).

    Raises:
        ShapeError: for another kind.
    """
    kind = one_of("gelu", "approximate", approximate, ("none", "tanh", "quick"))
    return apply("gelu", x, kind=kind)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, the gate of SwiGLU (Shazeer 2020), in one launch.

    Args:
        gate, up: shapes that broadcast, of one float dtype (or f32 and a narrower one). Halves of
            one packed tensor, `x[..., :n]` and `x[..., n:]`, are views and cost nothing.

    Raises:
        ShapeError, DTypeError: for shapes or dtypes that do not meet.
    """
    check_tensors("silu_gate", gate, up)
    common = promote("silu_gate", gate.dtype, up.dtype)
    return apply("silu_gate", gate.astype(common), up.astype(common))


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor."""
    return apply("scale", x, factor=real("scale", "factor", factor))


def clip(x: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    """min(max(x, min), max), either side left out by None; NaN stays NaN."""
    check_tensors("clip", x)
    if x.dtype.is_float:
        low = -math.inf if min is None else real("clip", "min", min)
        high = math.inf if max is None else real("clip", "max", max)
        return apply("clip", x, low=low, high=high)
    if x.dtype.kind == "bool":
        raise DTypeError("clip: expected a numeric dtype, got bool")
    info = np.iinfo(x.dtype.numpy)
    low, high = (
        end if v is None else builtins.min(builtins.max(number("clip", n, v), info.min), info.max)
        for n, v, end in (("min", min, info.min), ("max", max, info.max))
    )
    return apply("clip", x, low=low, high=high)


def where(condition: Tensor, x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """x where the bool condition holds, else y, broadcasting; x or y may be a number.

    Raises:
        DTypeError: for a condition that is not bool, or two numbers.
    """
    return binary("where", x, y, condition)


def cast(x: Tensor, dtype: Any) -> Tensor:
    """x in another dtype; floats to integers truncate and saturate, NaN gives 0."""
    check_tensors("cast", x)
    return x.astype(dtype)
