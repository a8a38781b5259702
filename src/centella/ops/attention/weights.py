"""The weights of a running softmax: powers of numbers that are never above 0."""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.lang.values import Expr, Operand

HIDDEN = -3.2e38  # the score of a hidden key: below every maximum, whose least is `masks.LOWEST`
LOG2E = 1.4426950408889634
_EXP2 = (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0)  # on [-1/2, 1/2]
_CUBIC = (0.05517166, 0.24261113, 0.69326097, 0.99992806)  # within 7.5e-5, on [-1/2, 1/2]
_ROUNDED = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to a whole number
MORE = 2.0**-20  # of a weight, by which its second part is too large
_LEAST, _INFINITE = 0xC2FE0000, 0xFF800000  # the bits of -127 and of -inf


def power(x: Operand, native: bool = False) -> Expr:
    """2^x for x <= 0, within 4 ulp; 0 below -126.5, NaN of NaN (see `lang.math` for the ways).

    Args:
        native: the target has it (`Caps.native_exp2`).
    """
    if native:
        return lang.exp2_native(x)
    bits = lang.bitcast(x, u32)
    clip = bits - _LEAST <= _INFINITE - _LEAST  # false for NaN
    x = lang.bitcast(lang.select(clip, _LEAST, bits), f32)
    whole = lang.floor(x + 0.5)
    part, p = x - whole, lang.const(_EXP2[0], f32)
    for coefficient in _EXP2[1:]:
        p = lang.fma(part, p, coefficient)
    return p * whole_power(whole)


def cubic_power(x: Operand) -> Expr:
    """2^x for x below 2^7, within 7.5e-5 of it, less than 2^-125 below -126; by products alone.

    As FlashAttention-4 does (Zadouri et al. 2026, arXiv 2603.05451): the whole part goes to the
    exponent, a cubic has the rest. Eight instructions, none of which is one of the sixteen powers a
    clock. A NaN becomes infinite where it is rounded to 16 bits.
    """
    x = lang.maximum(x, -126.0)
    shifted = x + _ROUNDED
    part, p = x - (shifted - _ROUNDED), lang.const(_CUBIC[0], f32)
    for coefficient in _CUBIC[1:]:
        p = lang.fma(part, p, coefficient)
    return lang.bitcast(lang.bitcast(p, u32) + (lang.bitcast(shifted, u32) << 23), f32)


def whole_power(x: Operand) -> Expr:
    """2^x for whole x from -126 on; 0 for -127."""
    return lang.bitcast(lang.bitcast(x + 12583039.0, u32) << 23, f32)  # 1.5 * 2^23 + 127


def put(parts: list[Any], register: int, pair: list[Any]) -> None:
    """Write two weights to a register of a fragment, or of two bf16 ones that add up to them.

    Of two the first is cut off, not rounded, and the second a millionth of the weight above the
    rest, so that neither is below 0 nor, of a weight that is not, 0: what is infinite times both
    has one sign and is no NaN.
    """
    if len(parts) == 1:
        parts[0][register] = tuple(pair)
        return
    low, high = (lang.bitcast(w, u32) for w in pair)
    parts[0][register] = (low >> 16) | (high & 0xFFFF0000)
    kept = parts[0][register]
    rest = [lang.fma(w, MORE, w - k) for w, k in zip(pair, kept, strict=True)]
    parts[1][register] = tuple(rest)
