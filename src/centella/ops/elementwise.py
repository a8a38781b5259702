"""Element-wise operations: each is one expression over an operand set, written once.

The same expression is the NumPy formula, the float64 oracle and the kernel. Shapes broadcast by
NumPy's rule; one operand of a binary op may be a number, which rides with the launch. Statistics
aside, arithmetic is f32 whatever the storage; each op rounds once, when it stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import Struct, defstruct
from msgspec.structs import astuple, replace

from centella.dtypes import DType, bool_
from centella.emit.program import Call
from centella.errors import DTypeError
from centella.op.op import Form, Lowered, NoAttrs, Op, Out, broadcasting, named
from centella.ops.elements import NUMBERS, element_call, element_kernel, split_numbers
from centella.ops.host import on_blocks
from centella.ops.layout import broadcast
from centella.ops.operands import KERNEL, NUMPY
from centella.specs import Caps, Spec


def gelu(o: Any, x: Any, kind: str = "none") -> Any:
    """GELU: "none" x Phi(x) by erf; "tanh" its tanh form; "quick" x sigmoid(1.702 x)."""
    if kind == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (o.tanh(inner) + 1.0)
    if kind == "quick":
        return x * o.sigmoid(x * 1.702)
    return o.gelu(x)


def relu(o: Any, x: Any) -> Any:
    """max(x, 0), NaN kept."""
    return o.maximum(x, 0)


def silu(o: Any, x: Any) -> Any:
    """x sigmoid(x), also called swish."""
    return x * o.sigmoid(x)


def silu_gate(o: Any, gate: Any, up: Any) -> Any:
    """silu(gate) up: the SwiGLU gate (Shazeer 2020)."""
    return silu(o, gate) * up


def elu(o: Any, x: Any, alpha: float) -> Any:
    """x above 0, alpha (e^x - 1) below."""
    return o.maximum(x, 0) + o.expm1(o.minimum(x, 0)) * alpha


ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": lambda o, x: gelu(o, x, "tanh"),
    "gelu_quick": lambda o, x: gelu(o, x, "quick"),
    "silu": silu,
    "sigmoid": lambda o, x: o.sigmoid(x),
    "tanh": lambda o, x: o.tanh(x),
}


class Expression(Struct, frozen=True):
    """An element-wise op: `fn(operands, *values, **attrs)`.

    Attributes:
        operands: their names; one given as a number is an attribute of that name.
        kinds: kinds of dtype it takes.
        doc: what it computes, and what it makes of NaN, infinities and -0: the docstring of the
            public function, where it has no attributes.
        attrs: the Struct of its attributes; left out it has none, or is an `Either` of a pair.
        example: attributes of a usual call, which cases and samples make.
        domain: values that cases take: "normal", or "positive" for the first operand.
        exact: the same on float64 arrays, by another formula; None: PyTorch's values are stored.
        conditions: how many of the operands, the first ones, are bool.
        compares: True when the result is bool.
    """

    name: str
    operands: tuple[str, ...]
    fn: Callable[..., Any]
    kinds: tuple[str, ...]
    doc: str
    attrs: type[Struct] | None = None
    example: Mapping[str, Any] = MappingProxyType({})
    domain: str = "normal"
    exact: Callable[..., Any] | None = None
    conditions: int = 0
    compares: bool = False


class Either(Struct, frozen=True):
    """A number in place of one operand."""

    first: int | float | None = None
    second: int | float | None = None


def _fields(**types: type) -> type[Struct]:
    """The Struct of attributes of these names and types."""
    return defstruct("Attrs", list(types.items()), frozen=True)


FLOATS, NUMERIC = ("float",), ("float", "int", "uint")
EVERY = (*NUMERIC, "bool")
WHOLE, BOOLS = ("int", "uint"), ("bool",)
X, PAIR = ("x",), ("first", "second")
TABLE: tuple[Expression, ...] = (
    Expression("add", PAIR, lambda o, a, b: a + b, NUMERIC, "a + b, broadcasting."),
    Expression("sub", PAIR, lambda o, a, b: a - b, NUMERIC, "a - b, broadcasting."),
    Expression("mul", PAIR, lambda o, a, b: a * b, NUMERIC, "a * b, broadcasting."),
    Expression("div", PAIR, lambda o, a, b: a / b, FLOATS, "a / b for floats, broadcasting."),
    Expression("maximum", PAIR, lambda o, a, b: o.maximum(a, b), NUMERIC,
               "The larger of each pair; NaN where either is NaN."),
    Expression("minimum", PAIR, lambda o, a, b: o.minimum(a, b), NUMERIC,
               "The smaller of each pair; NaN where either is NaN."),
    Expression("pow", PAIR, lambda o, a, b: o.pow(a, b), FLOATS,
               "a^b by C's rules: NaN for a fraction b of a < 0.", domain="positive",
               exact=np.float_power),
    Expression("neg", X, lambda o, x: -x, NUMERIC, "-x."),
    Expression("abs", X, lambda o, x: o.abs(x), NUMERIC, "|x|."),
    Expression("sign", X, lambda o, x: o.sign(x), NUMERIC,
               "-1, 0 or 1, the sign of x; 0 for -0, NaN for NaN.", exact=np.sign),
    Expression("square", X, lambda o, x: x * x, NUMERIC, "x * x."),
    Expression("sqrt", X, lambda o, x: o.sqrt(x), FLOATS, "Square root; NaN below zero.",
               domain="positive"),
    Expression("rsqrt", X, lambda o, x: 1.0 / o.sqrt(x), FLOATS, "1 / sqrt(x); NaN below zero.",
               domain="positive"),
    Expression("floor", X, lambda o, x: o.floor(x), FLOATS,
               "The largest whole number up to x; NaN, infinities and -0 stay.", exact=np.floor),
    Expression("round", X, lambda o, x: o.round(x), FLOATS,
               "The nearest whole number, of two the even one, with the sign of x: -0.5 gives -0. "
               "NaN and infinities stay.", exact=np.rint),
    Expression("exp", X, lambda o, x: o.exp(x), FLOATS, "e^x."),
    Expression("log", X, lambda o, x: o.log(x), FLOATS, "Natural logarithm.", domain="positive"),
    Expression("log1p", X, lambda o, x: o.log1p(x), FLOATS,
               "log(1 + x), exact near 0: -0 stays; -inf at -1, NaN below.", exact=np.log1p),
    Expression("sin", X, lambda o, x: o.sin(x), FLOATS,
               "Sine of radians; on a GPU within 2 ulp + 1e-8 to 2^16, and NaN from 2^15 pi on."),
    Expression("cos", X, lambda o, x: o.cos(x), FLOATS,
               "Cosine of radians; on a GPU within 2 ulp + 1e-8 to 2^16, and NaN from 2^15 pi on."),
    Expression("relu", X, relu, NUMERIC, "max(x, 0); NaN stays NaN."),
    Expression("sigmoid", X, lambda o, x: o.sigmoid(x), FLOATS, "1 / (1 + exp(-x))."),
    Expression("tanh", X, lambda o, x: o.tanh(x), FLOATS, "Hyperbolic tangent."),
    Expression("swish", X, silu, FLOATS, "x sigmoid(x), also called SiLU."),
    Expression("softplus", X, lambda o, x: o.maximum(x, 0) + o.log1p(o.exp(-o.abs(x))), FLOATS,
               "log(1 + e^x), without overflow: 0 at -inf, inf at inf; NaN stays.",
               exact=lambda x: np.logaddexp(0, x)),
    Expression("gelu", X, gelu, FLOATS, "x Phi(x)", _fields(kind=str), {"kind": "none"}),
    Expression("elu", X, elu, FLOATS, "x above 0, alpha (e^x - 1) below", _fields(alpha=float),
               {"alpha": 0.7}),
    Expression("scale", X, lambda o, x, factor: x * factor, FLOATS, "x * factor",
               _fields(factor=float), {"factor": -1.5}),
    Expression("clip", X, lambda o, x, low, high: o.minimum(o.maximum(x, low), high), NUMERIC,
               "min(max(x, low), high)", _fields(low=float, high=float), {"low": 2, "high": 100}),
    Expression("leaky_relu", X, lambda o, x, slope: o.maximum(x, 0) + o.minimum(x, 0) * slope,
               FLOATS, "x above 0, slope x below", _fields(slope=float), {"slope": 0.01}),
    Expression("silu_gate", ("gate", "up"), silu_gate, FLOATS, "silu(gate) up"),
    Expression("where", ("condition", *PAIR), lambda o, c, a, b: o.where(c, a, b), EVERY,
               "first where the condition holds, else second", conditions=1),
    Expression("copy", X, lambda o, x: x, EVERY, "x, moved"),
    Expression("floor_divide", PAIR, lambda o, a, b: o.floor_divide(a, b), WHOLE,
               "a / b of integers, rounded down as `//` does in Python; a where b is 0."),
    Expression("remainder", PAIR, lambda o, a, b: o.remainder(a, b), WHOLE,
               "a - b floor(a / b) of integers: the sign of b, as `%` in Python; 0 where b is 0."),
    *(Expression(name, PAIR, fn, kinds, f"a {sign} b as bool, broadcasting; {rest}", compares=True)
      for name, sign, fn, kinds, rest in (
        ("eq", "==", lambda o, a, b: o.equal(a, b), EVERY,
         "false with NaN. A number is first rounded to the dtype.\n\n"
         "`==` itself raises: containers call it to find the objects that they hold."),
        ("ne", "!=", lambda o, a, b: ~o.equal(a, b), EVERY, "true with NaN."),
        ("lt", "<", lambda o, a, b: o.less(a, b), NUMERIC, "false with NaN."),
        ("le", "<=", lambda o, a, b: o.less_equal(a, b), NUMERIC, "false with NaN."),
        ("gt", ">", lambda o, a, b: o.less(b, a), NUMERIC, "false with NaN."),
        ("ge", ">=", lambda o, a, b: o.less_equal(b, a), NUMERIC, "false with NaN."))),
    Expression("logical_and", PAIR, lambda o, a, b: a & b, BOOLS,
               "a and b, of bools, broadcasting."),
    Expression("logical_or", PAIR, lambda o, a, b: a | b, BOOLS, "a or b, of bools, broadcasting."),
    Expression("logical_not", X, lambda o, x: ~x, BOOLS, "Not x, of bools."),
)  # fmt: skip


def _rule(expression: Expression) -> Callable[[tuple[Spec, ...], Struct], tuple[Out, ...]]:
    name, split = expression.name, expression.conditions

    def rule(specs: tuple[Spec, ...], attrs: Struct) -> tuple[Out, ...]:
        for spec in specs[:split]:
            if spec.dtype is not bool_:
                raise DTypeError(f"{name}: expected a bool condition, got {spec.dtype.name}")
        for spec in specs[split:]:
            if spec.dtype.kind not in expression.kinds:
                floats = ": .astype('f32') makes one" if expression.kinds == FLOATS else ""
                whole = ", and // divides integers" if name == "div" else ""
                raise DTypeError(
                    f"{name}: expected a dtype of kind {' or '.join(expression.kinds)}, got "
                    f"{spec.dtype.name}{floats}{whole}"
                )
        first = specs[split].dtype
        if any(s.dtype is not first for s in specs[split:]):
            got = ", ".join(s.dtype.name for s in specs[split:])
            raise DTypeError(f"{name}: expected operands of one dtype, got {got}")
        check_numbers(name, astuple(attrs), first)
        dtype = bool_ if expression.compares else first
        return ((broadcast(name, *(s.shape for s in specs)), dtype),)

    return rule


def check_numbers(op: str, attrs: Iterable[object], dtype: DType) -> None:
    """Numbers among the attributes must be values of the dtype.

    Raises:
        DTypeError: for a fraction, or a number out of range, where the dtype is an integer; for an
            integer that no float holds.
    """
    for value in attrs:
        if isinstance(value, NUMBERS) and not _fits(value, dtype):
            bits = value.bit_length() if isinstance(value, int) else 0
            got = f"one of {bits} bits" if bits > 64 else value
            raise DTypeError(f"{op}: expected a number that fits {dtype.name}, got {got}")


def _fits(value: int | float, dtype: DType) -> bool:
    if dtype.is_float:
        return isinstance(value, float) or abs(value) < 1 << 1023
    info = np.iinfo(dtype.numpy) if dtype is not bool_ else None
    low, high = (info.min, info.max) if info is not None else (0, 1)
    return isinstance(value, int) and low <= value <= high


def _declare(expression: Expression) -> Op[Struct]:
    kind = expression.attrs or (Either if "first" in expression.operands else NoAttrs)

    def formula(o: Any, values: list[Any], attrs: Struct) -> Any:
        """The expression of its operands in order, numbers filled in, and its attributes."""
        left, numbers = iter(values), named(attrs)
        ordered = [numbers.pop(n) if n in numbers else next(left) for n in expression.operands]
        return expression.fn(o, *ordered, **numbers)

    def lower(form: Form[Struct], caps: Caps) -> Lowered:
        numbers, rest = split_numbers(form.attrs, form.inputs[-1].dtype)
        return Lowered((element_call(kernel, form.inputs, form.outputs[0], numbers, rest),))

    element = partial(formula, KERNEL)
    kernel = element_kernel(
        expression.name, lambda values, numbers, attrs: element(values, replace(attrs, **numbers))
    )
    return Op(
        expression.name,
        _rule(expression),
        lambda *arrays, **attrs: formula(NUMPY, list(arrays), kind(**attrs)),
        lower,
        attrs=kind,
        element=element,
        formula=formula,
        host=on_blocks(expression.name, formula),
        axes=broadcasting,
        doc=expression.doc,
    )


EXPRESSIONS: dict[str, Expression] = {e.name: e for e in TABLE}
OPS: dict[str, Op[Struct]] = {e.name: _declare(e) for e in TABLE}


def plain_call(name: str, inputs: tuple[Spec, ...], out: Spec, caps: Caps) -> Call:
    """The launch of an op that is given no attributes."""
    op = OPS[name]
    return Form(op, inputs, (out,), op.attrs()).lower(caps).calls[0]
