"""The weights of a running softmax: powers of numbers that are never above 0."""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import f32, u32

HIDDEN = -3.2e38  # the score of a hidden key: below every maximum, whose least is `masks.LOWEST`
LOG2E = 1.4426950408889634
_EXP2 = (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0)  # on [-1/2, 1/2]
MORE = 2.0**-20  # of a weight, by which its second part is too large
_LEAST, _INFINITE = 0xC2FE0000, 0xFF800000  # the bits of -127 and of -inf


def power(x: Any) -> Any:
    """2^x for x <= 0, within 4 ulp; 0 below -126.5, NaN of NaN (see `lang.math` for the ways)."""
    bits = lang.bitcast(x, u32)
    clip = bits - _LEAST <= _INFINITE - _LEAST  # false for NaN
    x = lang.bitcast(lang.select(clip, _LEAST, bits), f32)
    whole = lang.floor(x + 0.5)
    part, p = x - whole, lang.const(_EXP2[0], f32)
    for coefficient in _EXP2[1:]:
        p = lang.fma(part, p, coefficient)
    return p * lang.bitcast(lang.bitcast(whole + 12583039.0, u32) << 23, f32)  # 1.5 * 2^23 + 127


def parts_of(weights: list[Any], parts: int) -> list[list[Any]]:
    """The 16-bit numbers that weights are the sum of: themselves, or two of bf16.

    Of two the first is cut off, not rounded, and the second a millionth of the weight above the
    rest, so that neither is below 0 nor, of a weight that is not, 0: what is infinite times both
    has one sign and is no NaN.
    """
    if parts == 1:
        return [weights]
    cut = [lang.bitcast(lang.bitcast(w, u32) & 0xFFFF0000, f32) for w in weights]
    return [cut, [lang.fma(w, MORE, w - c) for w, c in zip(weights, cut, strict=True)]]
