"""Element-wise operations: each is one expression over an operand set, written once.

The same expression is the NumPy formula, the float64 oracle and the kernel. Shapes broadcast by
NumPy's rule; one operand of a binary op may be a number, which rides with the launch. Statistics
aside, arithmetic is f32 whatever the storage; each op rounds once, when it stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import DType, bool_
from centella.emit.program import Kernel
from centella.errors import DTypeError
from centella.op.axes import broadcasting
from centella.op.form import Form
from centella.op.op import Lower, Lowered, Op, Out
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
        conditions: how many of the operands, the first ones, are bool.
        compares: True when the result is bool.
    """

    name: str
    operands: tuple[str, ...]
    fn: Callable[..., Any]
    kinds: tuple[str, ...]
    doc: str
    conditions: int = 0
    compares: bool = False


FLOATS, NUMERIC = ("float",), ("float", "int", "uint")
EVERY = (*NUMERIC, "bool")
WHOLE, BOOLS = ("int", "uint"), ("bool",)
PAIR = ("first", "second")
TABLE = (
    Expression("add", PAIR, lambda o, a, b: a + b, NUMERIC, "a + b"),
    Expression("sub", PAIR, lambda o, a, b: a - b, NUMERIC, "a - b"),
    Expression("mul", PAIR, lambda o, a, b: a * b, NUMERIC, "a * b"),
    Expression("div", PAIR, lambda o, a, b: a / b, FLOATS, "a / b"),
    Expression("maximum", PAIR, lambda o, a, b: o.maximum(a, b), NUMERIC, "max"),
    Expression("minimum", PAIR, lambda o, a, b: o.minimum(a, b), NUMERIC, "min"),
    Expression("neg", ("x",), lambda o, x: -x, NUMERIC, "-x"),
    Expression("abs", ("x",), lambda o, x: o.abs(x), NUMERIC, "|x|"),
    Expression("sqrt", ("x",), lambda o, x: o.sqrt(x), FLOATS, "square root"),
    Expression("exp", ("x",), lambda o, x: o.exp(x), FLOATS, "e^x"),
    Expression("log", ("x",), lambda o, x: o.log(x), FLOATS, "natural logarithm"),
    Expression("tanh", ("x",), lambda o, x: o.tanh(x), FLOATS, "hyperbolic tangent"),
    Expression("sigmoid", ("x",), lambda o, x: o.sigmoid(x), FLOATS, "1 / (1 + e^-x)"),
    Expression("relu", ("x",), relu, NUMERIC, "max(x, 0)"),
    Expression("swish", ("x",), silu, FLOATS, "x sigmoid(x)"),
    Expression("gelu", ("x",), gelu, FLOATS, "x Phi(x)"),
    Expression("elu", ("x",), elu, FLOATS, "x above 0, alpha (e^x - 1) below"),
    Expression("scale", ("x",), lambda o, x, factor: x * factor, FLOATS, "x * factor"),
    Expression(
        "clip", ("x",), lambda o, x, low, high: o.minimum(o.maximum(x, low), high), NUMERIC,
        "min(max(x, low), high)",
    ),
    Expression(
        "leaky_relu", ("x",), lambda o, x, slope: o.maximum(x, 0) + o.minimum(x, 0) * slope,
        FLOATS, "x above 0, slope x below",
    ),
    Expression(
        "where", ("condition", "first", "second"), lambda o, c, a, b: o.where(c, a, b), EVERY,
        "first where the condition holds, else second", conditions=1,
    ),
    Expression("copy", ("x",), lambda o, x: x, EVERY, "x, moved"),
    Expression("silu_gate", ("gate", "up"), silu_gate, FLOATS, "silu(gate) up"),
    Expression("sin", ("x",), lambda o, x: o.sin(x), FLOATS, "sine"),
    Expression("cos", ("x",), lambda o, x: o.cos(x), FLOATS, "cosine"),
    Expression("rsqrt", ("x",), lambda o, x: 1.0 / o.sqrt(x), FLOATS, "1 / square root"),
    Expression("square", ("x",), lambda o, x: x * x, NUMERIC, "x * x"),
    Expression("floor_divide", PAIR, lambda o, a, b: o.floor_divide(a, b), WHOLE, "a / b, down"),
    Expression("remainder", PAIR, lambda o, a, b: o.remainder(a, b), WHOLE, "a - b floor(a / b)"),
    Expression("eq", PAIR, lambda o, a, b: o.equal(a, b), EVERY, "a == b", compares=True),
    Expression("ne", PAIR, lambda o, a, b: ~o.equal(a, b), EVERY, "a != b", compares=True),
    Expression("lt", PAIR, lambda o, a, b: o.less(a, b), NUMERIC, "a < b", compares=True),
    Expression("le", PAIR, lambda o, a, b: o.less_equal(a, b), NUMERIC, "a <= b", compares=True),
    Expression("gt", PAIR, lambda o, a, b: o.less(b, a), NUMERIC, "a > b", compares=True),
    Expression("ge", PAIR, lambda o, a, b: o.less_equal(b, a), NUMERIC, "a >= b", compares=True),
    Expression("logical_and", PAIR, lambda o, a, b: a & b, BOOLS, "a and b"),
    Expression("logical_or", PAIR, lambda o, a, b: a | b, BOOLS, "a or b"),
    Expression("logical_not", ("x",), lambda o, x: ~x, BOOLS, "not x"),
)  # fmt: skip


def _rule(expression: Expression) -> Callable[[tuple[Spec, ...], dict[str, Any]], tuple[Out, ...]]:
    name, split = expression.name, expression.conditions

    def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
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
        check_numbers(name, attrs, first)
        dtype = bool_ if expression.compares else first
        return ((broadcast(name, *(s.shape for s in specs)), dtype),)

    return rule


def check_numbers(op: str, attrs: dict[str, Any], dtype: DType) -> None:
    """Numbers among the attributes must be values of the dtype.

    Raises:
        DTypeError: for a fraction, or a number out of range, where the dtype is an integer; for an
            integer that no float holds.
    """
    for value in attrs.values():
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


def _arguments(
    expression: Expression, values: list[Any], attrs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Operands in order, numbers filled in, and the remaining attributes."""
    rest = dict(attrs)
    ordered: list[Any] = []
    left = list(values)
    for name in expression.operands:
        ordered.append(rest.pop(name) if name in rest else left.pop(0))
    return ordered, rest


def _formula(expression: Expression) -> Callable[[Any, list[Any], dict[str, Any]], Any]:
    def formula(o: Any, values: list[Any], attrs: dict[str, Any]) -> Any:
        ordered, rest = _arguments(expression, values, attrs)
        return expression.fn(o, *ordered, **rest)

    return formula


def _lower(kernel: Kernel) -> Lower[dict[str, Any]]:
    def lower(form: Form[dict[str, Any]], caps: Caps) -> Lowered:
        numbers, rest = split_numbers(form.attrs, form.inputs[-1].dtype)
        return Lowered((element_call(kernel, form.inputs, form.outputs[0], numbers, rest),))

    return lower


def _declare(expression: Expression) -> Op[dict[str, Any]]:
    def compute(values: list[Any], scalars: dict[str, Any], attrs: dict[str, Any]) -> Any:
        ordered, rest = _arguments(expression, values, {**scalars, **attrs})
        return expression.fn(KERNEL, *ordered, **rest)

    kernel = element_kernel(expression.name, compute)
    formula = _formula(expression)
    return Op(
        expression.name,
        _rule(expression),
        lambda *arrays, **attrs: formula(NUMPY, list(arrays), attrs),
        _lower(kernel),
        attrs=dict,
        element=compute,
        formula=formula,
        host=on_blocks(expression.name, formula),
        axes=broadcasting,
        doc=expression.doc,
    )


OPS = {e.name: _declare(e) for e in TABLE}
