"""The operand sets that formulas are written over: NumPy arrays, a tape's symbols, traced values.

NumPy uses its own functions; erf, which it lacks, is exact in float64 and a
polynomial in float32. Traced values use the polynomials of `centella.lang.math`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import f32, u32
from centella.host.tape import Symbol, choose, larger, row_first, row_max, row_sum, smaller
from centella.lang import math as formulas

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]
# erf x = 1 - q(x)^8 for 0 <= x < 4.25, printed by benchmarks/fit_math.py; highest degree first.
# Beyond, up to 5.88, q falls on to less than 0.001.
_ERF = (
    *(-5.09207212e-06, 9.14335396e-05, -0.00052169431, 0.000201913484, 0.0065749581),
    *(-0.00208216021, -0.0696318895, -0.141047284, 1.0),
)
_ERF_OF_HALF = tuple(c * 2.0 ** (k / 2) for k, c in zip(range(8, -1, -1), _ERF, strict=True))
_HALF_END = 5.88 / math.sqrt(2)
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
    copysign: Function = staticmethod(np.copysign)
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

    def gelu(self, x: Any) -> Any:
        """x Phi(x): exact in float64, within 2.5e-7 |x| in float32, in few passes.

        With h = x / 2 it is h + |h| erf(|x| / sqrt(2)): no sign to carry over, and where x is far
        below zero h + |h| is exactly 0.
        """
        if x.dtype == np.float64:
            return x * 0.5 * (self.erf(x * math.sqrt(0.5)) + 1.0)
        h = x * 0.5
        a = self.abs(h)
        c = self.minimum(a, _HALF_END)
        q = c * _ERF_OF_HALF[0] + _ERF_OF_HALF[1]
        for coefficient in _ERF_OF_HALF[2:]:
            q = q * c + coefficient
        for _ in range(3):
            q = q * q
        return (h + a) - q * c

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + exp(-x)), without overflow at either end."""
        e = self.exp(-self.abs(x))
        return self.where(x >= 0, 1.0, e) / (e + 1.0)

    columns: Function = staticmethod(lambda x: x.shape[-1])
    row_first: Function = staticmethod(lambda x: x[..., :1])
    row_sum: Function = staticmethod(lambda x: x.sum(-1, keepdims=True))
    row_max: Function = staticmethod(lambda x: x.max(-1, keepdims=True))

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


def _noted(call: Any) -> Function:
    def function(self: TapeOperands, *args: Any) -> Any:
        return next(a.tape for a in args if isinstance(a, Symbol)).note(call, *args)

    return function


class TapeOperands(NumpyOperands):
    """The same functions on symbols of a tape, which will call them with memory to write to."""

    where: Function = _noted(choose)
    maximum: Function = _noted(larger)
    minimum: Function = _noted(smaller)
    sqrt: Function = _noted(np.sqrt)
    abs: Function = _noted(np.abs)
    exp: Function = _noted(np.exp)
    expm1: Function = _noted(np.expm1)
    log: Function = _noted(np.log)
    tanh: Function = _noted(np.tanh)
    sin: Function = _noted(np.sin)
    cos: Function = _noted(np.cos)
    copysign: Function = _noted(np.copysign)
    equal: Function = _noted(np.equal)
    less: Function = _noted(np.less)
    less_equal: Function = _noted(np.less_equal)
    row_first: Function = _noted(row_first)
    row_sum: Function = _noted(row_sum)
    row_max: Function = _noted(row_max)
    columns: Function = staticmethod(lambda x: x.columns)


class KernelOperands:
    """Element-wise functions on traced values."""

    where: Function = staticmethod(lang.select)
    maximum: Function = staticmethod(lang.maximum)
    minimum: Function = staticmethod(lang.minimum)
    sqrt: Function = staticmethod(lang.sqrt)
    exp: Function = staticmethod(lang.exp)
    log: Function = staticmethod(lang.log)
    tanh: Function = staticmethod(lang.tanh)
    sigmoid: Function = staticmethod(lang.sigmoid)
    sin: Function = staticmethod(lang.sin)
    cos: Function = staticmethod(lang.cos)

    @staticmethod
    def abs(x: Any) -> Any:
        """|x|; unsigned values as they are."""
        return x if x.dtype is u32 else lang.abs(x)

    @staticmethod
    def gelu(x: Any) -> Any:
        """x Phi(x) for a number, by half the instructions of `erf`."""
        half, u = x * 0.5, x * math.sqrt(0.5)
        a = lang.abs(u)
        q = lang.fma(a, _ERF[0], _ERF[1])
        for coefficient in _ERF[2:]:
            q = lang.fma(q, a, coefficient)
        for _ in range(3):
            q = q * q
        q = lang.select(a < 4.25, q, 0.0)  # or it would grow with x, which it is multiplied by
        return half * lang.select(u < 0.0, q, 2.0 - q)

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
TAPE: TapeOperands = TapeOperands()
KERNEL: KernelOperands = KernelOperands()
