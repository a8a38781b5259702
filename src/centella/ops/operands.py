"""The operand sets that formulas are written over: arrays, symbols, traced values.

NumPy uses its own functions; erf, which it lacks, is exact in float64 and a
polynomial in float32. Traced values use the polynomials of `centella.lang.math`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import f32, u32
from centella.host.call_list import Symbol, choose, larger, row_first, row_max, row_sum, smaller
from centella.lang import math as formulas
from centella.ops.formulas import log1p, nearest, power, sign

Function = Callable[..., Any]
# erf x = 1 - q(x)^8 for 0 <= x < 4.25, printed by benchmarks/fit_math.py; highest degree first.
# Beyond, up to 5.88, q falls on to less than 0.001.
_ERF = (
    *(-5.09207212e-06, 9.14335396e-05, -0.00052169431, 0.000201913484, 0.0065749581),
    *(-0.00208216021, -0.0696318895, -0.141047284, 1.0),
)
_ERF_OF_HALF = tuple(c * 2.0 ** (k / 2) for k, c in zip(range(8, -1, -1), _ERF, strict=True))
# Phi(-a) = 2^p(a) for a >= 0, printed by benchmarks/fit_math.py; highest degree first. It falls on.
_LOG2_PHI = (-0.000520445581, 0.00739743887, -0.052561108, -0.459254771, -1.15109134, -1.0)
_HALF_END = 5.88 / math.sqrt(2)
_erf64 = np.frompyfunc(math.erf, 1, 1)


# NumPy's function for each name that an expression may call; a list of calls has some
# of its own.
_NUMPY: dict[str, Function] = {
    **{name: getattr(np, name) for name in (
        "where maximum minimum sqrt abs exp expm1 log log1p tanh sin cos floor sign copysign equal "
        "less less_equal").split()},
    "round": np.rint, "pow": np.power,
}  # fmt: skip
_SYMBOL_CALLS: dict[str, Function] = {
    **_NUMPY, "where": choose, "maximum": larger, "minimum": smaller,
    "row_first": row_first, "row_sum": row_sum, "row_max": row_max,
}  # fmt: skip
# The language has other names for some of what a kernel calls.
_LANGUAGE: dict[str, Function] = {
    "where": lang.select, "round": nearest, "log1p": log1p, "pow": power, "sign": sign,
}  # fmt: skip


class NumpyOperands:
    """Element-wise functions on float32 or float64 arrays (and integers where they fit)."""

    def __getattr__(self, name: str) -> Function:
        return _NUMPY[name]

    @staticmethod
    def erf(x: Any) -> Any:
        """The error function: exact in float64, our polynomial in float32."""
        array = np.asarray(x)
        if array.dtype == np.float64:
            return np.asarray(_erf64(array), np.float64)
        return formulas.erf(_FLOAT32, array)

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


class _Float32Bits(NumpyOperands):
    """What `centella.lang.math` needs, over float32 arrays."""

    fma: Function = staticmethod(lambda a, b, c: a * b + c)
    bits: Function = staticmethod(lambda x: np.asarray(x).view(np.uint32))
    from_bits: Function = staticmethod(lambda u: np.asarray(u).view(np.float32))
    to_f32: Function = staticmethod(lambda i: np.asarray(i).astype(np.float32))
    as_i32: Function = staticmethod(lambda u: np.asarray(u).view(np.int32))


class SymbolOperands(NumpyOperands):
    """The same functions on symbols: they are listed, to be called with memory to write to."""

    columns: Function = staticmethod(lambda x: x.columns)

    def __getattribute__(self, name: str) -> Function:
        call = _SYMBOL_CALLS.get(name)
        return super().__getattribute__(name) if call is None else partial(_note, call)


def _note(call: Function, *args: Any) -> Symbol:
    return next(a.calls for a in args if isinstance(a, Symbol)).note(call, *args)


class KernelOperands:
    """Element-wise functions on traced values: the language's, but for those that stand here."""

    def __getattr__(self, name: str) -> Function:
        return _LANGUAGE.get(name) or getattr(lang, name)

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


class NativeOperands(KernelOperands):
    """The same for targets with a power of 2 of their own (`lang.exp2_native`)."""

    @staticmethod
    def gelu(x: Any) -> Any:
        """x Phi(x) = max(x, 0) - |x| Phi(-|x|), within 6e-7 |x|, by eight instructions for 19.

        Of an infinity it is NaN.
        """
        a = lang.abs(x)
        p = lang.fma(a, _LOG2_PHI[0], _LOG2_PHI[1])
        for coefficient in _LOG2_PHI[2:]:
            p = lang.fma(p, a, coefficient)
        return lang.fma(-a, lang.exp2_native(p), lang.maximum(x, 0.0))


NUMPY: NumpyOperands = NumpyOperands()
_FLOAT32: Any = _Float32Bits()
SYMBOLS: SymbolOperands = SymbolOperands()
KERNEL: KernelOperands = KernelOperands()
NATIVE: NativeOperands = NativeOperands()
