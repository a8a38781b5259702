"""What kernel functions call: arithmetic, conversions, and the formulas of `lang.math`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from centella.dtypes import DType, f32
from centella.errors import TraceError
from centella.lang import math as formulas
from centella.lang import packing
from centella.lang.control import const
from centella.lang.tracer import current
from centella.lang.values import Expr, Operand, Value, common_type, expr_of, traced

Function = Callable[..., Expr]


def select(condition: Value, if_true: Value, if_false: Value) -> Expr:
    """`if_true` where the condition holds, else `if_false`; both are computed."""
    tracer = current()
    cond = expr_of(tracer, condition, "bool")
    type_ = common_type(if_true, if_false)
    a, b = expr_of(tracer, if_true, type_), expr_of(tracer, if_false, type_)
    if cond.const is not None:
        return a if cond.const else b
    return tracer.pure("select", type_, (cond, a, b))


def fma(a: Value, b: Value, c: Value) -> Expr:
    """`a * b + c` in f32, with one rounding or two: no kernel may depend on which."""
    tracer = current()
    args = tuple(expr_of(tracer, v, "f32") for v in (a, b, c))
    return tracer.pure("fma", "f32", args)


def exp2_native(x: Value) -> Expr:
    """2 to the power x by the target's own function: one instruction where `exp2` has a dozen.

    Within 4 ulp; of -inf 0, of inf inf, of NaN NaN; subnormal operands and results may be 0. PTX
    has ex2.approx.ftz.f32 (PTX ISA, "Floating Point Instructions: ex2"), WGSL `exp2`, which WGSL
    lets be less exact: a device has it where a probe agrees (`Caps.native_exp2`).

    Raises:
        LimitError: when it is planned, on a device that has not.
    """
    t = current()
    return t.pure("ex2", "f32", (expr_of(t, x, "f32"),))


_PAIRS = {"maximum": "maxn", "minimum": "minn", "fmax": "max", "fmin": "min"}


def _pair(name: str, a: Value, b: Value) -> Expr:
    tracer = current()
    type_ = common_type(a, b)
    if type_ == "bool":
        raise TraceError(f"lang.{name} is for numbers, got bool")
    op = _PAIRS[name] if type_ == "f32" else _PAIRS[name][:3]  # only an f32 may be NaN
    return tracer.pure(op, type_, (expr_of(tracer, a, type_), expr_of(tracer, b, type_)))


def maximum(a: Value, b: Value) -> Expr:
    """The larger value; NaN when either is NaN."""
    return _pair("maximum", a, b)


def minimum(a: Value, b: Value) -> Expr:
    """The smaller value; NaN when either is NaN."""
    return _pair("minimum", a, b)


def fmax(a: Value, b: Value) -> Expr:
    """The larger value; for NaN operands either operand may come back (cheapest form)."""
    return _pair("fmax", a, b)


def fmin(a: Value, b: Value) -> Expr:
    """The smaller value; for NaN operands either operand may come back (cheapest form)."""
    return _pair("fmin", a, b)


def _unary(op: str, x: Value) -> Expr:
    tracer = current()
    return tracer.pure(op, "f32", (expr_of(tracer, x, "f32"),))


def abs(x: Value) -> Expr:
    """Absolute value of an f32 or i32."""
    if isinstance(x, Operand) and x.type == "i32":
        value = x._expr()
        return select(value < 0, -value, value)
    return _unary("abs", x)


def floor(x: Value) -> Expr:
    """Largest integer not above x, as f32."""
    return _unary("floor", x)


def ceil(x: Value) -> Expr:
    """Smallest integer not below x, as f32."""
    return _unary("ceil", x)


def trunc(x: Value) -> Expr:
    """x without its fraction, as f32."""
    return _unary("trunc", x)


def sqrt(x: Value) -> Expr:
    """Square root; NaN below zero."""
    return _unary("sqrt", x)


def rsqrt(x: Value) -> Expr:
    """`1 / sqrt(x)`."""
    return 1.0 / sqrt(x)


def isnan(x: Value) -> Expr:
    """True for an f32 that is NaN, by its bits (drivers may assume that NaN does not occur)."""
    return (bitcast(expr_of(current(), x, "f32"), "u32") & 0x7FFFFFFF) > 0x7F800000


def cast(x: Value, dtype: DType) -> Expr:
    """Value conversion: floats truncate and saturate, NaN gives 0; bools give 0 or 1."""
    if not isinstance(x, Operand):
        return const(x, dtype)
    value = x._expr()
    if value.type == dtype.value:
        return value
    if dtype.value == "bool":
        return value != 0
    tracer = current()
    if {value.type, dtype.value} == {"i32", "u32"}:
        return tracer.pure("bitcast", dtype.value, (value,))
    return tracer.pure("cast", dtype.value, (value,))


def stored(x: Value, dtype: DType) -> Expr:
    """x as it would be loaded after a store to `dtype`: rounded, or its low bits."""
    tracer = current()
    return packing.stored(tracer, expr_of(tracer, x, dtype.value), dtype)


def bitcast(x: Value, dtype: DType | str) -> Expr:
    """The same 32 bits as another value type."""
    tracer = current()
    type_ = dtype if isinstance(dtype, str) else dtype.value
    value = traced(x, "lang.bitcast")
    if "bool" in (type_, value.type):
        raise TraceError("bitcast is for f32, i32 and u32")
    return value if value.type == type_ else tracer.pure("bitcast", type_, (value,))


class _TracedOperands:
    """The operand set of traced values: what `centella.lang.math` computes on."""

    floor: Function = staticmethod(floor)
    where: Function = staticmethod(select)
    fma: Function = staticmethod(fma)
    abs: Function = staticmethod(abs)
    sqrt: Function = staticmethod(sqrt)
    bits: Function = staticmethod(partial(bitcast, dtype="u32"))
    from_bits: Function = staticmethod(partial(bitcast, dtype="f32"))
    as_i32: Function = staticmethod(partial(bitcast, dtype="i32"))
    to_f32: Function = staticmethod(partial(cast, dtype=f32))


_OPERANDS = _TracedOperands()


def _formula(name: str) -> Callable[[Value], Expr]:
    function: Callable[[formulas.Operands, Value], Expr] = getattr(formulas, name)

    def apply(x: Value) -> Expr:
        return function(_OPERANDS, expr_of(current(), x, "f32"))

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = function.__doc__
    return apply


exp: Callable[[Value], Expr] = _formula("exp")
exp2: Callable[[Value], Expr] = _formula("exp2")
log: Callable[[Value], Expr] = _formula("log")
log2: Callable[[Value], Expr] = _formula("log2")
tanh: Callable[[Value], Expr] = _formula("tanh")
erf: Callable[[Value], Expr] = _formula("erf")
sin: Callable[[Value], Expr] = _formula("sin")
cos: Callable[[Value], Expr] = _formula("cos")
sigmoid: Callable[[Value], Expr] = _formula("sigmoid")
