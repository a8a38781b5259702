"""Element by element: arithmetic, comparisons, logic, activations, conversion.

Operands have one dtype (or are f32 and a narrower float) and shapes that broadcast; one of two may
be a number that fits the dtype. Anything else is a ShapeError or DTypeError that names the
function and what came. A function without attributes is one line here: its row in
`ops/elementwise.py` has its formula and its docstring.
"""

from __future__ import annotations

import builtins
import math
from typing import Any, Protocol, TypeVar

import numpy as np

from centella.dtypes import promote
from centella.errors import DTypeError
from centella.ops.elementwise import EXPRESSIONS
from centella.tensors.arguments import check_tensors, number, one_of, real
from centella.tensors.operands import power
from centella.tensors.tensor import Tensor, apply, binary, compared

__all__ = [
    "abs", "add", "cast", "clip", "cos", "div", "elu", "eq", "exp", "floor", "floor_divide", "ge",
    "gelu", "gt", "le", "leaky_relu", "log", "log1p", "logical_and", "logical_not", "logical_or",
    "lt", "maximum", "minimum", "mul", "ne", "neg", "pow", "relu", "remainder", "round", "rsqrt",
    "scale", "sigmoid", "sign", "silu_gate", "sin", "softplus", "sqrt", "square", "sub", "swish",
    "tanh", "where",
]  # fmt: skip

Number = int | float
F = TypeVar("F", "Unary", "Binary")


class Unary(Protocol):
    """A function of one tensor."""

    __name__: str
    __qualname__: str

    def __call__(self, x: Tensor) -> Tensor:
        """Record the operation."""
        ...


class Binary(Protocol):
    """A function of two tensors, of which one may be a number."""

    __name__: str
    __qualname__: str

    def __call__(self, a: Tensor | Number, b: Tensor | Number) -> Tensor:
        """Record the operation."""
        ...


def _unary(name: str) -> Unary:
    def function(x: Tensor) -> Tensor:
        return apply(name, x)

    return _documented(function, name)


def _binary(name: str) -> Binary:
    record = compared if EXPRESSIONS[name].compares else binary

    def function(a: Tensor | Number, b: Tensor | Number) -> Tensor:
        return record(name, a, b)

    return _documented(function, name)


def _documented(function: F, name: str) -> F:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = EXPRESSIONS[name].doc
    return function


add: Binary = _binary("add")
sub: Binary = _binary("sub")
mul: Binary = _binary("mul")
div: Binary = _binary("div")
floor_divide: Binary = _binary("floor_divide")
remainder: Binary = _binary("remainder")
maximum: Binary = _binary("maximum")
minimum: Binary = _binary("minimum")
eq: Binary = _binary("eq")
ne: Binary = _binary("ne")
lt: Binary = _binary("lt")
le: Binary = _binary("le")
gt: Binary = _binary("gt")
ge: Binary = _binary("ge")
logical_and: Binary = _binary("logical_and")
logical_or: Binary = _binary("logical_or")

neg: Unary = _unary("neg")
abs: Unary = _unary("abs")
sign: Unary = _unary("sign")
square: Unary = _unary("square")
sqrt: Unary = _unary("sqrt")
rsqrt: Unary = _unary("rsqrt")
floor: Unary = _unary("floor")
round: Unary = _unary("round")
exp: Unary = _unary("exp")
log: Unary = _unary("log")
log1p: Unary = _unary("log1p")
sin: Unary = _unary("sin")
cos: Unary = _unary("cos")
relu: Unary = _unary("relu")
sigmoid: Unary = _unary("sigmoid")
tanh: Unary = _unary("tanh")
swish: Unary = _unary("swish")
softplus: Unary = _unary("softplus")
logical_not: Unary = _unary("logical_not")


def pow(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """x^y, broadcasting, as `x ** y` records it.

    A number y that is whole and at most 64 takes products, which round each, and 0.5 the square
    root. Any other y, and a tensor, is for floats: NaN for a fraction y of x < 0, and what C says
    of 0, 1 and infinities; on a GPU within 4 + |y| ulp.

    Raises:
        ShapeError, DTypeError: for operands that do not fit; for integers and such a y.
    """
    return power(x, y) if isinstance(x, Tensor) else binary("pow", x, y)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x above 0, `negative_slope * x` below."""
    return apply("leaky_relu", x, slope=real("leaky_relu", "negative_slope", negative_slope))


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x above 0, `alpha * (exp(x) - 1)` below (Clevert et al. 2016)."""
    return apply("elu", x, alpha=real("elu", "alpha", alpha))


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
