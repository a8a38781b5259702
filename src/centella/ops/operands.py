"""The operand sets that element-wise formulas are written over: NumPy arrays and traced values.

NumPy uses its own functions; erf, which it lacks, is exact in float64 and our polynomial in
float32. Traced values use the polynomials of `centella.lang.math`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import f32, u32
from centella.lang import math as formulas

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]
_erf64 = np.frompyfunc(math.erf, 1, 1)


class _Float32Bits:
    """What `centella.lang.math` needs, over float32 arrays."""

    @staticmethod
    def floor(x: Array) -> Any:
        return np.floor(x)

    @staticmethod
    def abs(x: Array) -> Any:
        return np.abs(x)

    @staticmethod
    def sqrt(x: Array) -> Any:
        return np.sqrt(x)

    @staticmethod
    def where(cond: Any, a: Any, b: Any) -> Any:
        return np.where(cond, a, b)

    @staticmethod
    def fma(a: Any, b: Any, c: Any) -> Any:
        return a * b + c

    @staticmethod
    def bits(x: Array) -> Array:
        return np.asarray(x).view(np.uint32)

    @staticmethod
    def from_bits(u: Array) -> Array:
        return np.asarray(u).view(np.float32)

    @staticmethod
    def to_f32(i: Array) -> Array:
        return np.asarray(i).astype(np.float32)

    @staticmethod
    def as_i32(u: Array) -> Array:
        return np.asarray(u).view(np.int32)


class NumpyOperands:
    """Element-wise functions on float32 or float64 arrays (and integers where they fit)."""

    where: Function = staticmethod(np.where)
    maximum: Function = staticmethod(np.maximum)
    minimum: Function = staticmethod(np.minimum)
    sqrt: Function = staticmethod(np.sqrt)
    abs: Function = staticmethod(np.abs)
    exp: Function = staticmethod(np.exp)
    expm1: Function = staticmethod(np.expm1)
    log: Function = staticmethod(np.log)
    tanh: Function = staticmethod(np.tanh)
    sin: Function = staticmethod(np.sin)
    cos: Function = staticmethod(np.cos)
    equal: Function = staticmethod(np.equal)
    less: Function = staticmethod(np.less)
    less_equal: Function = staticmethod(np.less_equal)

    @staticmethod
    def erf(x: Any) -> Any:
        """The error function: exact in float64, our polynomial in float32."""
        array = np.asarray(x)
        if array.dtype == np.float64:
            return np.asarray(_erf64(array), np.float64)
        return formulas.erf(_Float32Bits(), array)

    @staticmethod
    def sigmoid(x: Any) -> Any:
        """1 / (1 + exp(-x)), without overflow at either end."""
        e = np.exp(-np.abs(x))
        return np.where(x >= 0, 1 / (1 + e), e / (1 + e))

    @staticmethod
    def floor_divide(a: Any, b: Any) -> Any:
        """a / b of integers, rounded down; a where b is 0."""
        wide, by = np.asarray(a, np.int64), np.asarray(b, np.int64)
        return np.where(by == 0, wide, wide // np.where(by == 0, 1, by))

    @staticmethod
    def remainder(a: Any, b: Any) -> Any:
        """a - b floor(a / b) of integers, with the sign of b; 0 where b is 0."""
        wide, by = np.asarray(a, np.int64), np.asarray(b, np.int64)
        return np.where(by == 0, 0, wide % np.where(by == 0, 1, by))


class KernelOperands:
    """Element-wise functions on traced values."""

    where: Function = staticmethod(lang.select)
    maximum: Function = staticmethod(lang.maximum)
    minimum: Function = staticmethod(lang.minimum)
    sqrt: Function = staticmethod(lang.sqrt)
    exp: Function = staticmethod(lang.exp)
    log: Function = staticmethod(lang.log)
    tanh: Function = staticmethod(lang.tanh)
    erf: Function = staticmethod(lang.erf)
    sigmoid: Function = staticmethod(lang.sigmoid)
    sin: Function = staticmethod(lang.sin)
    cos: Function = staticmethod(lang.cos)

    @staticmethod
    def abs(x: Any) -> Any:
        """|x|; unsigned values as they are."""
        return x if x.dtype is u32 else lang.abs(x)

    @staticmethod
    def expm1(x: Any) -> Any:
        """e^x - 1 for x <= 0, as 2 t / (1 - t) with t = tanh(x / 2): no cancellation near 0."""
        t = lang.tanh(x * 0.5)
        return t * 2.0 / (1.0 - t)

    @staticmethod
    def equal(a: Any, b: Any) -> Any:
        """a == b, false with NaN: targets differ there, so its bits are tested."""
        return _ordered(a, b, a == b)

    @staticmethod
    def less(a: Any, b: Any) -> Any:
        """a < b, false with NaN."""
        return _ordered(a, b, a < b)

    @staticmethod
    def less_equal(a: Any, b: Any) -> Any:
        """a <= b, false with NaN."""
        return _ordered(a, b, a <= b)

    @staticmethod
    def floor_divide(a: Any, b: Any) -> Any:
        """a / b of integers, rounded down; a where b is 0."""
        return a // b if a.dtype is u32 else lang.select(_crosses(a, b), a // b - 1, a // b)

    @staticmethod
    def remainder(a: Any, b: Any) -> Any:
        """a - b floor(a / b) of integers, with the sign of b; 0 where b is 0."""
        return a % b if a.dtype is u32 else lang.select(_crosses(a, b), a % b + b, a % b)


def _ordered(a: Any, b: Any, holds: Any) -> Any:
    return holds & ~(lang.isnan(a) | lang.isnan(b)) if a.dtype is f32 else holds


def _crosses(a: Any, b: Any) -> Any:
    """Whether the language's division of i32, towards 0, rounds up."""
    return (a % b != 0) & ((a ^ b) < 0)


NUMPY: NumpyOperands = NumpyOperands()
KERNEL: KernelOperands = KernelOperands()
