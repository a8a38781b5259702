"""Traced values: what arithmetic inside a kernel function acts on.

An `Expr` is one value of one thread. Operators record statements and return new values. Python
numbers adapt to the type of the other operand; nothing else is converted silently.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np
from msgspec import Struct

from centella import dtypes
from centella.errors import TraceError
from centella.lang.ir import COMPARE, INTEGERS, Number
from centella.lang.ufuncs import answer

# Operators that do not take every number: the types that they take, and how an error names them.
_TAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "/": (("f32",), "f32, got {}; use // for integers"),
    **dict.fromkeys(("//", "%", "<<", ">>"), (INTEGERS, "integers, got {}")),
    **dict.fromkeys("&|^", ((*INTEGERS, "bool"), "integers and bools, got {}")),
}

Method = Callable[..., "Expr"]
Refusal = Callable[..., Any]
Update = Callable[..., "Var"]


class Recorder(Protocol):
    """What values ask of the tracer that they belong to."""

    def constant(self, value: Number, type_: str, /) -> Expr:
        """Record a number of an IR type, or give the one that is recorded."""
        ...

    def pure(self, op: str, type_: str, args: tuple[Expr, ...], /) -> Expr:
        """A pure operation."""
        ...

    def read_var(self, var: Var, /) -> Expr:
        """The value of a register now."""
        ...

    def set_var(self, var: Var, value: Value, /) -> None:
        """Assign a register."""
        ...


def _operator(op: str, symbol: str = "", swap: bool = False) -> Method:
    """The method that records `self op other`, with `swap` `other op self`."""
    types, named = _TAKES.get(symbol, ((), ""))

    def method(self: Operand, other: Value) -> Expr:
        value = binary(op, other, self) if swap else binary(op, self, other)
        if types and value.type not in types:
            raise TraceError(f"{symbol} is for {named.format(value.type)}")
        return value

    return method


def _refused(written: str, instead: str) -> Refusal:
    """A method of Python's that a traced value cannot have, since it records no statement."""

    def refuse(self: Operand, *_: Any) -> Any:
        raise TraceError(f"{written} is not for traced values: write {instead}")

    return refuse


def _update(combine: Callable[[Any, Any], Any]) -> Update:
    """The method of an assignment such as `v += x`."""

    def update(self: Var, other: Value) -> Var:
        self.set(combine(self, other))
        return self

    return update


class Operand:
    """Something that stands for a value: an `Expr`, or a `Var` read where it is used."""

    __slots__ = ()
    type: str
    _expr: Callable[[], Expr]  # the value here and now

    def __hash__(self) -> int:
        return id(self)  # `==` records

    @property
    def dtype(self) -> dtypes.DType:
        """The value's type inside the kernel: f32, i32, u32 or bool."""
        return dtypes.ALL[self.type]

    def __bool__(self) -> bool:
        raise TraceError(
            "a traced value has no truth value while the kernel is recorded: use lang.if_(...) for "
            "control flow, lang.select(cond, a, b) for a choice, lang.maximum(a, b) and "
            "lang.minimum(a, b) instead of max() and min(), & | ~ instead of and / or / not"
        )

    def __index__(self) -> int:
        raise TraceError(
            "a traced value is not a Python integer: use lang.range(n) for a loop on the device; "
            "a Python list of variables cannot be indexed at run time (use lang.shared)"
        )

    __int__ = __index__

    def __float__(self) -> float:
        raise TraceError(
            "a traced value is not a Python float: keep it inside lang arithmetic; use lang.exp, "
            "lang.sqrt and the others in place of math's"
        )

    def __iter__(self) -> Any:
        raise TraceError("a traced value cannot be iterated: use lang.range(n)")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return answer(ufunc, method, inputs, options)

    __pow__: Refusal = _refused(
        "x ** n", "x * x for a square, lang.sqrt(x), lang.exp2(p * lang.log2(x)) where x > 0"
    )
    __rpow__: Refusal = _refused(
        "n ** x", "lang.exp2(x) for 2 ** x, lang.exp2(x * math.log2(n)) where n > 0"
    )
    __abs__: Refusal = _refused("abs(x)", "lang.abs(x)")
    __round__: Refusal = _refused("round(x)", "lang.floor(x + 0.5)")
    __floor__: Refusal = _refused("math.floor(x)", "lang.floor(x)")
    __ceil__: Refusal = _refused("math.ceil(x)", "lang.ceil(x)")
    __trunc__: Refusal = _refused("math.trunc(x)", "lang.trunc(x)")
    __divmod__: Refusal = _refused("divmod(a, b)", "a // b and a % b")
    __rdivmod__: Refusal = __divmod__
    __matmul__: Refusal = _refused("a @ b", "a loop over lang.range(n) that adds products")
    __rmatmul__: Refusal = __matmul__
    __getitem__: Refusal = _refused(
        "x[i] of a value", "x[i] of a tensor argument or of lang.shared"
    )
    __complex__: Refusal = _refused("complex(x)", "two values, the real part and the imaginary one")

    __add__: Method = _operator("add")
    __radd__: Method = _operator("add", swap=True)
    __sub__: Method = _operator("sub")
    __rsub__: Method = _operator("sub", swap=True)
    __mul__: Method = _operator("mul")
    __rmul__: Method = _operator("mul", swap=True)
    __truediv__: Method = _operator("div", "/")
    __rtruediv__: Method = _operator("div", "/", swap=True)
    __floordiv__: Method = _operator("div", "//")
    __rfloordiv__: Method = _operator("div", "//", swap=True)
    __mod__: Method = _operator("rem", "%")
    __rmod__: Method = _operator("rem", "%", swap=True)
    __and__: Method = _operator("and", "&")
    __rand__: Method = _operator("and", "&", swap=True)
    __or__: Method = _operator("or", "|")
    __ror__: Method = _operator("or", "|", swap=True)
    __xor__: Method = _operator("xor", "^")
    __rxor__: Method = _operator("xor", "^", swap=True)
    __lshift__: Method = _operator("shl", "<<")
    __rlshift__: Method = _operator("shl", "<<", swap=True)
    __rshift__: Method = _operator("shr", ">>")
    __rrshift__: Method = _operator("shr", ">>", swap=True)
    __lt__: Method = _operator("lt")
    __le__: Method = _operator("le")
    __gt__: Method = _operator("gt")
    __ge__: Method = _operator("ge")
    __eq__: Method = _operator("eq")  # type: ignore[assignment]  # records, as NumPy does
    __ne__: Method = _operator("ne")  # type: ignore[assignment]  # records, as NumPy does

    def __pos__(self) -> Expr:
        return self._expr()

    def __neg__(self) -> Expr:
        value = self._expr()
        if value.type == "bool":
            raise TraceError("-x is for numbers; use ~x on a bool")
        return value.tracer.pure("neg", value.type, (value,))

    def __invert__(self) -> Expr:
        value = self._expr()
        if value.type == "f32":
            raise TraceError("~x is for integers and bools, got f32")
        return value.tracer.pure("not", value.type, (value,))


class Expr(Operand, Struct, eq=False):
    """One value of one thread, the result of statement `id`."""

    tracer: Recorder
    id: int
    type: str
    uniform: bool
    block: int
    const: Number | None

    def _expr(self) -> Expr:
        return self

    def __repr__(self) -> str:
        return f"<{self.type} %{self.id}{' uniform' if self.uniform else ''}>"


class Var(Operand, Struct, eq=False):
    """A mutable register of one type: `v.set(x)`, `v += x`; reads give its value at that point.

    A Var is uniform only when declared so (`lang.var(x, uniform=True)`); then `set` accepts only
    uniform values under uniform control flow.
    """

    tracer: Recorder
    id: int
    type: str
    uniform: bool
    block: int

    def _expr(self) -> Expr:
        return self.tracer.read_var(self)

    def get(self) -> Expr:
        """The value now, as an immutable Expr."""
        return self._expr()

    def set(self, value: Value) -> None:
        """Assign: `value` must have the Var's type (Python numbers adapt)."""
        self.tracer.set_var(self, value)

    __iadd__: ClassVar[Update] = _update(operator.add)
    __isub__: ClassVar[Update] = _update(operator.sub)
    __imul__: ClassVar[Update] = _update(operator.mul)
    __ior__: ClassVar[Update] = _update(operator.or_)
    __iand__: ClassVar[Update] = _update(operator.and_)
    __ixor__: ClassVar[Update] = _update(operator.xor)


Value = Operand | Number | np.generic  # what kernels compute with: traced, or a number
Index = Value | tuple[Value, ...]  # one for each dimension


def traced(value: Value, what: str) -> Expr:
    """The Expr of a traced value, or a TraceError: `what` cannot guess the type of a number."""
    if isinstance(value, Operand):
        return value._expr()
    raise TraceError(f"{what} takes a traced value, got {value!r}; say lang.const(value, dtype)")


def adapt(tracer: Recorder, value: Value, type_: str) -> Expr:
    """A traced value as it is, or a Python number as a constant of `type_`."""
    if isinstance(value, Operand):
        return value._expr()
    return tracer.constant(check_number(value, type_), type_)


def expr_of(tracer: Recorder, value: Value, type_: str) -> Expr:
    """`value` as an Expr of `type_`, or a TraceError naming both types."""
    expr = adapt(tracer, value, type_)
    if expr.type != type_:
        hint = f"; lang.cast(x, ct.{type_}) converts it" if type_ != "bool" else ""
        raise TraceError(f"expected a {type_} value, got {expr.type}{hint}")
    return expr


def common_type(*values: Value) -> str:
    """The type of the first traced value; of Python numbers u32 or bool where all are, else f32."""
    for value in values:
        if isinstance(value, Operand):
            return value.type
    kinds = {type(v) for v in values}
    return "bool" if kinds == {bool} else "u32" if kinds == {int} else "f32"


def check_number(value: Value, type_: str) -> Number:
    """A Python or NumPy number as a constant of a value type, or a TraceError."""
    if isinstance(value, np.generic):
        value = value.item()
    if type_ == "bool" and isinstance(value, bool):
        return value
    if type_ == "f32" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _as_f32(value)
    if type_ in ("i32", "u32") and isinstance(value, int) and not isinstance(value, bool):
        low, high = (0, 2**32) if type_ == "u32" else (-(2**31), 2**31)
        if low <= value < high:
            return value
        raise TraceError(f"{value} does not fit {type_}")
    raise TraceError(
        f"mixed types: a {type_} value with the Python value {value!r}; convert with lang.cast"
    )


def _as_f32(value: float) -> float:
    if value != value:
        return math.nan  # one NaN, of known bits
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        raise TraceError(f"{value} does not fit f32") from None


def binary(op: str, a: Value, b: Value) -> Expr:
    """Record `a op b`; both sides must have one type."""
    first = a._expr() if isinstance(a, Operand) else None
    second = b._expr() if isinstance(b, Operand) else None
    anchor = first if first is not None else second
    assert anchor is not None
    tracer = anchor.tracer
    shift = op in ("shl", "shr")
    if first is None:
        first = adapt(tracer, a, anchor.type)
    if second is None:
        second = adapt(tracer, b, "u32" if shift else anchor.type)
    if shift and second.type == "i32":
        second = tracer.pure("bitcast", "u32", (second,))
    if first.type != second.type and not (shift and second.type == "u32"):
        raise TraceError(
            f"mixed types: {first.type} {op} {second.type}; convert one side with lang.cast(x, "
            f"lang.{first.type}) or lang.bitcast"
        )
    if op in COMPARE:
        if first.type == "bool" and op not in ("eq", "ne"):
            raise TraceError("bools have no order; use & | ~")
        return tracer.pure(op, "bool", (first, second))
    if first.type == "bool" and op not in ("and", "or", "xor"):
        raise TraceError(f"{op} is for numbers, got bool; use lang.select or lang.cast")
    return tracer.pure(op, first.type, (first, second))
