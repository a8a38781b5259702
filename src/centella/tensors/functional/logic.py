"""Comparisons and logic: results are bools; operands and errors as in `elementwise`."""

from __future__ import annotations

from centella.tensors.tensor import Tensor, apply, binary, compared

Number = int | float


def eq(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a == b as bool, broadcasting; false with NaN. A number is first rounded to the dtype.

    `==` itself raises: containers call it to find the objects that they hold.
    """
    return compared("eq", a, b)


def ne(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a != b as bool, broadcasting; true with NaN."""
    return compared("ne", a, b)


def lt(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a < b as bool, broadcasting; false with NaN."""
    return compared("lt", a, b)


def le(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a <= b as bool, broadcasting; false with NaN."""
    return compared("le", a, b)


def gt(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a > b as bool, broadcasting; false with NaN."""
    return compared("gt", a, b)


def ge(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a >= b as bool, broadcasting; false with NaN."""
    return compared("ge", a, b)


def logical_and(a: Tensor | bool, b: Tensor | bool) -> Tensor:
    """a and b, of bools, broadcasting."""
    return binary("logical_and", a, b)


def logical_or(a: Tensor | bool, b: Tensor | bool) -> Tensor:
    """a or b, of bools, broadcasting."""
    return binary("logical_or", a, b)


def logical_not(x: Tensor) -> Tensor:
    """Not x, of bools."""
    return apply("logical_not", x)
