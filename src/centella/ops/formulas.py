"""Formulas that only operations use, on traced values; `lang.math` has those of kernels.

They keep to its rules: NaN is tested for by its bits, and an integer operation stands between terms
that a compiler must not join.
"""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import f32, i32, u32

_SIGN, _REST, _INFINITY = 0x80000000, 0x7FFFFFFF, 0x7F800000


def _bits(x: Any) -> Any:
    return lang.bitcast(x, u32)


def _with_sign(a: Any, x: Any) -> Any:
    return lang.bitcast((_bits(a) & _REST) | (_bits(x) & _SIGN), f32)


def _apart(x: Any) -> Any:
    """x >= 0 as a value that a compiler cannot know to be x."""
    return lang.bitcast(_bits(x) & _REST, f32)


def sign(x: Any) -> Any:
    """-1, 0 or 1; 0 for -0, NaN for NaN."""
    if x.dtype is u32:
        return lang.select(x == 0, x, 1)
    if x.dtype is not f32:
        return lang.select(x > 0, 1, lang.select(x < 0, -1, x))
    one = lang.bitcast((_bits(x) & _SIGN) | 0x3F800000, f32)
    return lang.select(lang.isnan(x), x, lang.select(_bits(x) << 1 == 0, 0.0, one))


def nearest(x: Any) -> Any:
    """The nearest whole number, halves to the even one, with the sign of x."""
    below = lang.floor(x)
    rest = x - below
    odd = below - lang.floor(below * 0.5) * 2.0 > 0.5
    return _with_sign(lang.select((rest > 0.5) | ((rest == 0.5) & odd), below + 1.0, below), x)


def log1p(x: Any) -> Any:
    """log(1 + x), within 4 ulp: log u, and what u = 1 + x lost in rounding, over u."""
    u = x + 1.0
    lost = x - (_apart(u) - 1.0)
    finite = _bits(u) - 1 < _INFINITY - 1
    return _with_sign(lang.log(u) + lang.select(finite, lost / u, 0.0), x)


def power(x: Any, y: Any) -> Any:
    """x^y by C's rules for 0, 1, infinities and x < 0, within 4 + |y| ulp.

    With |x| = 2^e m the logarithm is y e + y log2 m; the first 12 bits of y times e are exact.
    """
    a = lang.abs(x)
    tiny = _bits(a) < 0x00800000  # the bits of a subnormal, as a number, are 2^149 times as large
    w = lang.select(tiny, _bits(lang.cast(_bits(a), f32)) - (149 << 23), _bits(a)) - 0x3F3504F3
    e = lang.cast(lang.bitcast(w, i32) >> 23, f32)
    fraction = lang.log2(lang.bitcast((w & 0x007FFFFF) + 0x3F3504F3, f32))
    high = lang.bitcast(_bits(y) & 0xFFFFF000, f32)
    coarse, fine = high * e, y * fraction + (y - high) * e
    logarithm = coarse + fine
    inside = (_bits(logarithm) & _REST < 0x43180000) & (_bits(a) - 1 < _INFINITY - 1)  # 152
    half = lang.floor(lang.select(inside, logarithm, 0.0) * 0.5 + 0.5)
    scale = lang.exp2(half)
    rest = lang.exp2(lang.select(inside, (coarse - half * 2.0) + fine, 0.0))
    finite = _apart(rest * scale) * scale
    return _of_negative(x, y, lang.select(inside, finite, lang.exp2(y * lang.log2(a))))


def _of_negative(x: Any, y: Any, result: Any) -> Any:
    """|x|^y as x^y: NaN for a fraction y of x < 0, the sign of x for an odd y, 1 of 1 and by 0."""
    below = lang.floor(y)
    infinite = _bits(y) << 1 == 0xFF000000
    whole = (_bits(below - y) << 1 == 0) | infinite
    small = _bits(y) & _REST < 0x4B800000  # 2^24: every float from there on is even
    odd = whole & small & (below - lang.floor(below * 0.5) * 2.0 > 0.5)
    negative = _bits(x) - (_SIGN + 1) < _INFINITY - 1  # and finite
    bits = _bits(result) | lang.select(odd, _bits(x) & _SIGN, 0)
    bits = lang.select(negative & ~whole, 0x7FC00000, bits)
    unit = (_bits(x) & _REST == 0x3F800000) & ((_bits(x) < _SIGN) | infinite)
    bits = lang.select((_bits(y) << 1 == 0) | unit, 0x3F800000, bits)
    return lang.bitcast(bits, f32)
