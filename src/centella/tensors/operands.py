"""What ops read: tensors and numbers. Here an op is recorded on them, and anything else refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec.structs import astuple

from centella import lang
from centella.dtypes import DType, narrow, promote, widen
from centella.errors import DTypeError
from centella.lang.values import Operand
from centella.op.op import Op, get
from centella.op.variant import APART
from centella.record.recording import Recording
from centella.record.values import Value
from centella.runtime.device import Device
from centella.specs import Described, Spec

Scalar = int | float | bool


class Viewed(Described):
    """What ops read, a Tensor: a value, seen as a Spec from one of its elements on."""

    __slots__ = ()
    _value: Value
    _offset: int

    if TYPE_CHECKING:

        def __init__(self, value: Value, spec: Spec, offset: int = 0) -> None: ...


T = TypeVar("T", bound=Viewed)
# Value, spec and offset at once: each alone takes as long, as a Tensor has a `__getattr__`.
_fields: Callable[[Any], Any] = astuple


def apply(name: str, *tensors: T, **attrs: Any) -> T:
    """Record an op of one output."""
    op = get(name)
    operands = _operands(op, tensors)
    (value,) = operands[0][0].device.recorder.record(op, operands, attrs)
    return type(tensors[0])(value, value.spec)


def apply_all(
    op: Op[Any], tensors: Sequence[T], attrs: dict[str, Any], target: Recording | None = None
) -> tuple[T, ...]:
    """Record an op on one tensor or more."""
    operands = _operands(op, tensors)
    values = operands[0][0].device.recorder.record(op, operands, attrs, target)
    return tuple([type(tensors[0])(value, value.spec) for value in values])


def apply_preferred(
    op: Op[Any], tensors: Sequence[T], attrs: dict[str, Any]
) -> tuple[T, ...] | None:
    """Record an op that stands for several, where it is preferred to them; named, where it fits.

    Returns:
        None: they are to be recorded in its place.
    """
    if attrs.get("variant") == APART:
        return None
    operands = _operands(op, tensors)
    device: Device = operands[0][0].device
    recorder = device.recorder
    form = recorder.preferred(op, tuple([spec for _, spec, _ in operands]), attrs)
    if form is None:
        return None
    values = recorder.record(op, operands, attrs, form=form)
    return tuple([type(tensors[0])(value, value.spec) for value in values])


def _operands(op: Op[Any], tensors: Sequence[Viewed]) -> list[Any]:
    operands: list[Any] = []
    for tensor in tensors:
        if not isinstance(tensor, Viewed):
            raise not_a_tensor(op.name, tensor)
        operands.append(_fields(tensor))
    return operands


def apply_with(
    name: str, tensors: Sequence[T], listed: str, optional: Mapping[str, T | None],
    attrs: dict[str, Any],
) -> T:  # fmt: skip
    """Record an op of one output with those optional operands that are given.

    Args:
        listed: the attribute that names them, in order.
    """
    present = {n: t for n, t in optional.items() if t is not None}
    return apply_all(get(name), (*tensors, *present.values()), {**attrs, listed: tuple(present)})[0]


def binary(name: str, a: T | Scalar, b: T | Scalar, *before: T) -> T:
    """An element-wise op of two operands, of which one may be a Python number, after others."""
    if isinstance(a, Viewed) and isinstance(b, Viewed):
        if a.spec.dtype is not b.spec.dtype:
            common = promote(name, a.dtype, b.dtype)
            a, b = _cast(a, common), _cast(b, common)
        return apply(name, *before, a, b)
    if isinstance(a, Viewed):
        return apply(name, *before, a, second=number_of(name, b, a.dtype))
    if isinstance(b, Viewed):
        return apply(name, *before, b, first=number_of(name, a, b.dtype))
    got = f"{type(a).__name__} and {type(b).__name__}"
    raise DTypeError(f"{name}: expected two Tensors, or one and a number, got {got}")


def _cast(x: T, dtype: DType) -> T:
    return x if x.spec.dtype is dtype else apply("cast", x, dtype=dtype.name)


def power(x: T, exponent: Any) -> T:
    """x to the power of a Tensor or a number.

    A whole number up to 64 takes products, which round each, and 0.5 the square root; below 0 it
    is 1 / x^-n. Any other number, and a Tensor, is for floats.

    Raises:
        DTypeError: another exponent.
    """
    n = exponent.item() if isinstance(exponent, np.generic) else exponent
    if isinstance(n, float) and n == 0.5:
        return apply("sqrt", x)
    if isinstance(n, float) and n.is_integer():
        n = int(n)
    large = type(n) is int and abs(n) > 64
    if isinstance(n, Viewed) or (x.dtype.is_float and (type(n) is float or large)):
        powers: Any = binary("pow", x, n)
        return powers  # type: ignore[no-any-return]  # as x is
    if type(n) is not int or large or (n < 0 and not x.dtype.is_float):
        raise DTypeError(
            f"pow: expected an exponent of 0.5 or a whole number to 64, of integers 0 or more, got "
            f"{exponent!r}; floats take any number and a Tensor"
        )
    if n == 0:
        ones = {"shape": x.shape, "dtype": x.dtype.name, "value": 1}
        (value,) = x._value.device.recorder.record(get("fill"), [], ones)
        return type(x)(value, value.spec)
    product, square, rest = None, x, abs(n)
    while rest:
        if rest & 1:
            product = square if product is None else apply("mul", product, square)
        rest >>= 1
        square = apply("square", square) if rest else square
    assert product is not None, "an exponent that is not 0 has a bit"
    return product if n > 0 else binary("div", 1.0, product)


def compared(name: str, a: T | Scalar, b: T | Scalar) -> T:
    """A comparison of two operands; a number is rounded to the dtype of the tensor it meets."""
    if isinstance(a, Viewed) and isinstance(b, (float, np.floating)):
        b = rounded(float(b), a.dtype)
    elif isinstance(b, Viewed) and isinstance(a, (float, np.floating)):
        a = rounded(float(a), b.dtype)
    return binary(name, a, b)


# Python's operators: the op, and whether a number is rounded to the dtype of the tensor first.
BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "logical_and", "or": "logical_or",
}  # fmt: skip
COMPARED = ("lt", "le", "gt", "ge")
UNARY = {"neg": "neg", "abs": "abs", "invert": "logical_not"}


def operators() -> dict[str, Callable[..., Any]]:
    """The methods of a Tensor that are operators, by name; `__pow__` is its own."""
    methods: dict[str, Callable[..., Any]] = {}
    for symbol, op in BINARY.items():
        methods[f"__{symbol}__"] = lambda x, other, op=op: binary(op, x, other)
        if not op.startswith("logical"):
            methods[f"__r{symbol}__"] = lambda x, other, op=op: binary(op, other, x)
    for op in COMPARED:
        methods[f"__{op}__"] = lambda x, other, op=op: compared(op, x, other)
    for symbol, op in UNARY.items():
        methods[f"__{symbol}__"] = lambda x, op=op: apply(op, x)
    del methods["__pow__"]
    return methods


def not_a_tensor(op: str, got: Any) -> DTypeError:
    """The error of an op that is given something else."""
    _ = getattr(got, "spec", None)  # a Parameter without data says so itself
    hint = "ct.asarray makes one"
    if isinstance(got, (list, tuple)) and any(isinstance(x, Described) for x in got):
        hint = "ct.stack and ct.concat join several"
    elif isinstance(getattr(got, "value", None), Described):  # a State
        hint = "its .value is one"
    elif isinstance(got, Operand):  # inside a kernel
        hint = f"lang.{op} takes a traced value" if hasattr(lang, op) else "see centella.lang"
    return DTypeError(f"{op}: expected a Tensor, got {type(got).__name__}; {hint}")


def no_equality(symbol: str, function: str, identity: str) -> TypeError:
    """The error of `==` and `!=`."""
    return TypeError(
        f"{symbol} between tensors is not defined, as containers would call it: use "
        f"ct.{function}(x, y), or `{identity}` for the objects"
    )


def no_item_assignment(tensor: Any, key: Any, value: Any) -> None:
    """Refuse `x[key] = value`."""
    raise TypeError(
        "a Tensor has no item assignment: ct.where and ct.scatter make another, a ct.State changes"
    )


def rounded(value: float, dtype: DType) -> float:
    """A number as a float dtype stores it; one beyond its range stays beyond its numbers."""
    if not dtype.is_float:
        return value
    with np.errstate(over="ignore"):
        near = float(widen(narrow(np.array([value], np.float32), dtype), dtype)[0])
    return value if math.isinf(near) else near


def number_of(name: str, value: Any, dtype: DType) -> Scalar:
    """The number that stands for one operand of an op on a tensor of this dtype.

    Raises:
        DTypeError: for anything else, and a number that does not fit.
    """
    if type(value) is float and dtype.is_float:
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int)) or (isinstance(value, float) and dtype.is_float):
        return value
    if isinstance(value, np.ndarray):
        raise DTypeError(f"{name}: expected a Tensor, got a NumPy array; ct.asarray makes one")
    if not isinstance(value, (float, str)):
        raise not_a_tensor(name, value)
    raise DTypeError(
        f"{name}: expected a Tensor or a Python number that fits {dtype.name}, got {value!r}"
    )
