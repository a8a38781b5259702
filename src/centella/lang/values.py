"""Traced values: what arithmetic inside a kernel function acts on.

An `Expr` is one value of one thread. Operators record statements and return new values. Python
numbers adapt to the type of the other operand; nothing else is converted silently.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from centella import dtypes
from centella.errors import TraceError
from centella.lang.ir import COMPARE, Number
from centella.lang.ufuncs import answer

if TYPE_CHECKING:
    from centella.lang.tracer import Tracer

DTYPE_OF_TYPE: dict[str, dtypes.DType] = {
    "f32": dtypes.f32,
    "i32": dtypes.i32,
    "u32": dtypes.u32,
    "bool": dtypes.bool_,
}


Refusal = Callable[..., Any]


def _refused(written: str, instead: str) -> Callable[..., Any]:
    """A method of Python's that a traced value cannot have, since it records no statement."""

    def refuse(self: Operand, *_: Any) -> Any:
        raise TraceError(f"{written} is not for traced values: write {instead}")

    return refuse


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
        return DTYPE_OF_TYPE[self.type]

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
        raise TraceError("a traced value is not a Python float: keep it inside lang arithmetic")

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

    def __add__(self, other: Any) -> Expr:
        return binary("add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return binary("add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return binary("sub", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return binary("sub", other, self)

    def __mul__(self, other: Any) -> Expr:
        return binary("mul", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return binary("mul", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return _float_only("/", binary("div", self, other))

    def __rtruediv__(self, other: Any) -> Expr:
        return _float_only("/", binary("div", other, self))

    def __floordiv__(self, other: Any) -> Expr:
        return _int_only("//", binary("div", self, other))

    def __rfloordiv__(self, other: Any) -> Expr:
        return _int_only("//", binary("div", other, self))

    def __mod__(self, other: Any) -> Expr:
        return _int_only("%", binary("rem", self, other))

    def __rmod__(self, other: Any) -> Expr:
        return _int_only("%", binary("rem", other, self))

    def __and__(self, other: Any) -> Expr:
        return _int_only("&", binary("and", self, other), boolean=True)

    def __rand__(self, other: Any) -> Expr:
        return _int_only("&", binary("and", other, self), boolean=True)

    def __or__(self, other: Any) -> Expr:
        return _int_only("|", binary("or", self, other), boolean=True)

    def __ror__(self, other: Any) -> Expr:
        return _int_only("|", binary("or", other, self), boolean=True)

    def __xor__(self, other: Any) -> Expr:
        return _int_only("^", binary("xor", self, other), boolean=True)

    def __rxor__(self, other: Any) -> Expr:
        return _int_only("^", binary("xor", other, self), boolean=True)

    def __lshift__(self, other: Any) -> Expr:
        return _int_only("<<", binary("shl", self, other))

    def __rlshift__(self, other: Any) -> Expr:
        return _int_only("<<", binary("shl", other, self))

    def __rshift__(self, other: Any) -> Expr:
        return _int_only(">>", binary("shr", self, other))

    def __rrshift__(self, other: Any) -> Expr:
        return _int_only(">>", binary("shr", other, self))

    def __lt__(self, other: Any) -> Expr:
        return binary("lt", self, other)

    def __le__(self, other: Any) -> Expr:
        return binary("le", self, other)

    def __gt__(self, other: Any) -> Expr:
        return binary("gt", self, other)

    def __ge__(self, other: Any) -> Expr:
        return binary("ge", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]  # records, as NumPy does
        return binary("eq", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]  # records, as NumPy does
        return binary("ne", self, other)

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


class Expr(Operand):
    """One value of one thread, the result of statement `id`."""

    __slots__ = ("block", "const", "id", "tracer", "type", "uniform")
    tracer: Tracer
    id: int
    type: str
    uniform: bool
    block: int
    const: Number | None

    def __init__(
        self, tracer: Tracer, id_: int, type_: str, uniform: bool, block: int, const: Number | None
    ) -> None:
        self.tracer = tracer
        self.id = id_
        self.type = type_
        self.uniform = uniform
        self.block = block
        self.const = const

    def _expr(self) -> Expr:
        return self

    def __repr__(self) -> str:
        return f"<{self.type} %{self.id}{' uniform' if self.uniform else ''}>"


class Var(Operand):
    """A mutable register of one type: `v.set(x)`, `v += x`; reads give its value at that point.

    A Var is uniform only when declared so (`lang.var(x, uniform=True)`); then `set` accepts only
    uniform values under uniform control flow.
    """

    __slots__ = ("block", "id", "tracer", "type", "uniform")
    tracer: Tracer
    id: int
    type: str
    uniform: bool
    block: int

    def __init__(self, tracer: Tracer, id_: int, type_: str, uniform: bool, block: int) -> None:
        self.tracer = tracer
        self.id = id_
        self.type = type_
        self.uniform = uniform
        self.block = block

    def _expr(self) -> Expr:
        return self.tracer.read_var(self)

    def get(self) -> Expr:
        """The value now, as an immutable Expr."""
        return self._expr()

    def set(self, value: Any) -> None:
        """Assign: `value` must have the Var's type (Python numbers adapt)."""
        self.tracer.set_var(self, value)

    def __iadd__(self, other: Any) -> Var:  # type: ignore[override]  # assigns
        self.set(self + other)
        return self

    def __isub__(self, other: Any) -> Var:  # type: ignore[override]  # assigns
        self.set(self - other)
        return self

    def __imul__(self, other: Any) -> Var:  # type: ignore[override]  # assigns
        self.set(self * other)
        return self

    def __ior__(self, other: Any) -> Var:  # type: ignore[override]  # assigns
        self.set(self | other)
        return self

    def __iand__(self, other: Any) -> Var:  # type: ignore[override]  # assigns
        self.set(self & other)
        return self

    def __ixor__(self, other: Any) -> Var:  # type: ignore[override]  # assigns
        self.set(self ^ other)
        return self


def _float_only(symbol: str, value: Expr) -> Expr:
    if value.type != "f32":
        raise TraceError(f"{symbol} is for f32, got {value.type}; use // for integers")
    return value


def _int_only(symbol: str, value: Expr, boolean: bool = False) -> Expr:
    if value.type == "f32" or (value.type == "bool" and not boolean):
        kinds = "integers and bools" if boolean else "integers"
        raise TraceError(f"{symbol} is for {kinds}, got {value.type}")
    return value


def traced(value: Any, what: str) -> Expr:
    """The Expr of a traced value, or a TraceError: `what` cannot guess the type of a number."""
    if isinstance(value, Operand):
        return value._expr()
    raise TraceError(f"{what} takes a traced value, got {value!r}; say lang.const(value, dtype)")


def adapt(tracer: Tracer, value: Any, type_: str) -> Expr:
    """A traced value as it is, or a Python number as a constant of `type_`."""
    if isinstance(value, Operand):
        return value._expr()
    return tracer.constant(check_number(value, type_), type_)


def expr_of(tracer: Tracer, value: Any, type_: str) -> Expr:
    """`value` as an Expr of `type_`, or a TraceError naming both types."""
    expr = adapt(tracer, value, type_)
    if expr.type != type_:
        raise TraceError(f"expected a {type_} value, got {expr.type}")
    return expr


def common_type(*values: Any) -> str:
    """The type of the first traced value; of Python numbers u32 or bool where all are, else f32."""
    for value in values:
        if isinstance(value, Operand):
            return value.type
    kinds = {type(v) for v in values}
    return "bool" if kinds == {bool} else "u32" if kinds == {int} else "f32"


def check_number(value: Any, type_: str) -> Number:
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


def binary(op: str, a: Any, b: Any) -> Expr:
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
