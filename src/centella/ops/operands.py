"""The operand sets that element-wise formulas are written over: NumPy arrays and traced values.

NumPy uses its own functions; erf, which it lacks, is exact in float64 and our polynomial in
float32. Traced values use the polynomials of `centella.lang.math`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import u32
from centella.lang import math as formulas
from centella.lang.trace import TracedOperands

Array = np.ndarray[Any, Any]
_erf64 = np.frompyfunc(math.erf, 1, 1)


class _Float32Bits:
    """What `centella.lang.math` needs, over float32 arrays."""

    floor = staticmethod(np.floor)
    abs = staticmethod(np.abs)
    sqrt = staticmethod(np.sqrt)

    @staticmethod
    def where(cond: Any, a: Any, b: Any) -> Any:
        return np.where(cond, np.float32(a), np.float32(b))

    @staticmethod
    def fma(a: Any, b: Any, c: Any) -> Any:
        return a * np.float32(b) + np.float32(c)

    @staticmethod
    def bits(x: Array) -> Array:
        return np.asarray(x, np.float32).view(np.uint32)

    @staticmethod
    def from_bits(x: Array) -> Array:
        return np.asarray(x, np.uint32).view(np.float32)

    @staticmethod
    def to_i32(x: Array) -> Array:
        whole: Array = np.clip(np.nan_to_num(x), -(2.0**31), 2.0**31 - 128).astype(np.int32)
        return whole

    @staticmethod
    def to_f32(x: Array) -> Array:
        return np.asarray(x).astype(np.float32)

    @staticmethod
    def as_u32(x: Array) -> Array:
        return np.asarray(x).view(np.uint32)

    @staticmethod
    def as_i32(x: Array) -> Array:
        return np.asarray(x).view(np.int32)


class NumpyOperands:
    """Element-wise functions on float32 or float64 arrays (and integers where they fit)."""

    where = staticmethod(np.where)
    maximum = staticmethod(np.maximum)
    minimum = staticmethod(np.minimum)
    sqrt = staticmethod(np.sqrt)
    abs = staticmethod(np.abs)
    floor = staticmethod(np.floor)
    exp = staticmethod(np.exp)
    expm1 = staticmethod(np.expm1)
    log = staticmethod(np.log)
    tanh = staticmethod(np.tanh)
    sin = staticmethod(np.sin)
    cos = staticmethod(np.cos)
    isnan = staticmethod(np.isnan)

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


class KernelOperands(TracedOperands):
    """Element-wise functions on traced values."""

    @staticmethod
    def abs(x: Any) -> Any:
        """|x|; unsigned values as they are."""
        return x if x.dtype is u32 else lang.abs(x)

    @staticmethod
    def expm1(x: Any) -> Any:
        """e^x - 1 for x <= 0, as 2 t / (1 - t) with t = tanh(x / 2): no cancellation near 0."""
        t = lang.tanh(x * 0.5)
        return t * 2.0 / (1.0 - t)

    exp = staticmethod(lang.exp)
    log = staticmethod(lang.log)
    tanh = staticmethod(lang.tanh)
    erf = staticmethod(lang.erf)
    sin = staticmethod(lang.sin)
    cos = staticmethod(lang.cos)
    sigmoid = staticmethod(lang.sigmoid)


NUMPY = NumpyOperands()
KERNEL = KernelOperands()
