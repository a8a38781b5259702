"""Elementary functions in float32, built from primitive operations only.

One formula serves every target: NumPy arrays, traced kernel values (WGSL, PTX) and the fuser each
bring a set of `Operands`. So ``exp`` is the same polynomial everywhere, and no driver's own.

What all of them keep to:

- NaN in, NaN out. It passes through arithmetic, or through a choice made on the bits; never through
  ``x != x``, nor through a clamp that a driver may turn into a ``min``, which drops NaN.
- No infinity or NaN is written as a constant (WGSL forbids it): they arise at run time.
- The bounds hold whether each ``fma`` rounds once or twice. Arguments are reduced by constants of
  few bits, so that their products are exact anyway (Cody & Waite, Software Manual for the
  Elementary Functions, 1980).
- The bounds hold where a compiler reassociates: Mesa makes ``a (b + c)`` of ``a b + a c``, and
  ``(a + b) + 1`` of ``(a + 1) + b``, NVIDIA's for Vulkan ``a (b b)`` of ``(a b) b``. Terms and
  factors that must stay apart have an integer operation between.
- Bounds are in ulp of the true value, for division rounded correctly; a target that divides within
  d ulp adds d to tanh and sigmoid. A target may flush subnormal values to zero.

The coefficients are our own fits, printed by ``benchmarks/fit_math.py``.
"""

from __future__ import annotations

from typing import Any, Protocol

_SIGN = 0x80000000
_REST = 0x7FFFFFFF
_INFINITY = 0x7F800000


class Operands(Protocol):
    """The primitive operations on float32 (f32), i32, u32 and bool values.

    Values support the arithmetic operators, comparisons with Python numbers and, for integers,
    ``& | ^ << >>``. u32 wraps around, ``>>`` of an i32 keeps the sign, and a Python number takes
    the type of the other operand.
    """

    def floor(self, x: Any, /) -> Any:
        """Return the largest whole f32 that is at most x."""
        ...

    def where(self, cond: Any, a: Any, b: Any, /) -> Any:
        """Return a where cond holds, else b; one of the two may be a Python number."""
        ...

    def fma(self, a: Any, b: Any, c: Any, /) -> Any:
        """Return a * b + c, rounded once or twice."""
        ...

    def abs(self, x: Any, /) -> Any:
        """Return x without its sign; a NaN stays a NaN."""
        ...

    def sqrt(self, x: Any, /) -> Any:
        """Return the square root."""
        ...

    def bits(self, x: Any, /) -> Any:
        """Return the bits of an f32 or i32 as u32."""
        ...

    def from_bits(self, u: Any, /) -> Any:
        """Return the f32 that has the bits of a u32."""
        ...

    def to_f32(self, i: Any, /) -> Any:
        """Return an i32 or u32 as the nearest f32."""
        ...

    def as_i32(self, u: Any, /) -> Any:
        """Return the bits of a u32 as i32."""
        ...


def exp(o: Operands, x: Any) -> Any:
    """Return e^x.

    Formula: x = 2 m ln 2 + r with |r| < 0.6933, so e^x = e^r 2^m 2^m.
    Bound: 2 ulp for every x; inf above 88.72284; gradual underflow, 0 below -103.98.
    Method: Cody & Waite reduction, polynomial of degree 7. An even power of two costs two degrees
    and saves splitting the exponent, as 2^m is a normal number wherever e^x is a number.
    """
    return _exp_of_clipped(o, _with_sign(o, _clip(o, o.abs(x), 0x42D20000), x))  # 105.0


def exp2(o: Operands, x: Any) -> Any:
    """Return 2^x.

    Formula: x = 2 m + f with -1 <= f < 1, exactly, so 2^x = 2^f 2^m 2^m.
    Bound: 2 ulp for every x, exact for whole x; inf from 128; gradual underflow, 0 below -150.
    Method: polynomial of degree 7.
    """
    x = _with_sign(o, _clip(o, o.abs(x), 0x43180000), x)  # 152.0
    m = o.floor(o.fma(x, 0.5, 0.5))
    f = o.fma(m, -2.0, x)
    p = _horner(o, f, *_EXP2, 1.0)
    return _times_power_of_four(o, p, m)


def log(o: Operands, x: Any) -> Any:
    """Return the natural logarithm of x.

    Formula: x = 2^e (1 + f/2) with 1 + f/2 in [sqrt(1/2), sqrt(2)); so log x is
    e ln 2 + log(1 + f/2).
    Bound: 2 ulp for every x > 0, subnormals too; log 1 = 0, log 0 = -inf, log of x < 0 is NaN.
    Method: polynomial of degree 10. One float holds e ln 2 well enough, as |log x| is large then.
    """
    e, f = _split(o, o.bits(x))
    return _log_ends(o, o.bits(x), o.fma(e, 0.693147182, f * _horner(o, f, *_LOG)))  # ln 2


def log2(o: Operands, x: Any) -> Any:
    """Return the logarithm of x to base 2.

    Formula: x = 2^e (1 + f/2) with 1 + f/2 in [sqrt(1/2), sqrt(2)); so log2 x is
    e + log2(1 + f/2).
    Bound: 2 ulp for every x > 0, subnormals too, exact for powers of two; log2 0 = -inf, and for
    x < 0 it is NaN.
    Method: polynomial of degree 10.
    """
    e, f = _split(o, o.bits(x))
    return _log_ends(o, o.bits(x), o.fma(f, _horner(o, f, *_LOG2), e))


def tanh(o: Operands, x: Any) -> Any:
    """Return the hyperbolic tangent of x.

    Formula: h = (e^2a - 1) / 2 = 2^k (e^2r - 1) / 2 + (2^k - 1) / 2 for a = |x| = k ln 2 / 2 + r,
    without cancellation; tanh a = h / (h + 1), or 1 - 1 / (h + 1) for h > 1.
    Bound: 3 ulp for every x; odd; never beyond +-1, and +-1 from |x| = 10 at the latest.
    Method: Cody & Waite reduction, polynomial of degree 6, one division.
    """
    a = _clip(o, o.abs(x), 0x41200000)  # 10.0
    k = o.floor(o.fma(a, 2.88539004, 0.5))  # 2 / ln 2
    r = o.fma(k, -0.3465728759765625, a)
    r = o.fma(_apart(o, k), -7.14303383e-07, r)
    power = _power_of_two(o, k)
    h = o.fma(r * r, _horner(o, r, *_TANH), r)
    h = o.fma(power, h, _apart(o, o.fma(power, 0.5, -0.5)))  # inexact for k > 16, unseen by then
    far = h > 1.0
    t = o.where(far, -1.0, h) / (h + 1.0)
    return _with_sign(o, o.where(far, t + 1.0, t), x)


def erf(o: Operands, x: Any) -> Any:
    """Return the error function of x.

    Formula: x + x p(x^2) for |x| < 0.95; else 1 - q(|x|)^4 with the sign of x.
    Bound: 3 ulp for every x; odd; never beyond +-1, and +-1 from |x| = 4 at the latest.
    Method: polynomials of degree 5 and 7. The fourth root of 1 - erf is nearly straight where it
    matters, so q is short and its rounding errors shrink with q^3.
    """
    a = _clip(o, o.abs(x), 0x40800000)  # 4.0
    near = o.fma(x, _horner(o, x * x, *_ERF_NEAR), x)
    q = _horner(o, a, *_ERF_FAR)
    q = q * q
    far = o.fma(-q, q, 1.0)
    return o.where(a < 0.95, near, _with_sign(o, far, x))


def sin(o: Operands, x: Any) -> Any:
    """Return the sine of x, in radians.

    Formula: x = k pi / 2 + r with |r| <= pi / 4; sin x is sin r, cos r, -sin r, -cos r by k mod 4.
    Bound: 2 ulp + 1e-8 for |x| <= 2^16; NaN from |x| = 2^15 pi (about 102944) on.
    Method: pi / 2 in three parts (Cody & Waite), polynomials of degree 7 and 6.
    """
    return _sin_of_quadrant(o, x, 12582912.0)  # 1.5 * 2^23


def cos(o: Operands, x: Any) -> Any:
    """Return the cosine of x, in radians.

    Formula: cos x = sin(x + pi / 2), the quarter turn added to k, exactly.
    Bound: 2 ulp + 1e-8 for |x| <= 2^16; NaN from |x| = 2^15 pi (about 102944) on.
    Method: as `sin`.
    """
    return _sin_of_quadrant(o, x, 12582913.0)  # 1.5 * 2^23 + 1


def sigmoid(o: Operands, x: Any) -> Any:
    """Return 1 / (1 + e^-x).

    Formula: with e = e^-|x|: 1 / (1 + e) for x >= 0, e / (1 + e) for x < 0. Nothing overflows.
    Bound: 5 ulp for every x; gradual underflow to 0 on the left, 1 on the right.
    Method: as `exp`, one division.
    """
    e = _exp_of_clipped(o, -_clip(o, o.abs(x), 0x42D20000))  # 105.0
    return o.where(x < 0.0, e, 1.0) / (e + 1.0)


# The polynomials, highest degree first.
_EXP = (0.000196308014, 0.00141047675, 0.0083359303, 0.041661229, 0.16666618, 0.500000358)
_EXP2 = (
    *(1.491696e-05, 0.000156452923, 0.00133417198, 0.00961684436),
    *(0.055503659, 0.240226686, 0.693147242),
)
_LOG = (
    *(-7.48056482e-05, 0.000252540893, -0.000517185661, 0.00110760902, -0.00259513617),
    *(0.00625068974, -0.0156260021, 0.041666653, -0.12499997, 0.5),
)
_LOG2 = (
    *(-7.80828268e-05, 0.000319504878, -0.000755089626, 0.00163156085, -0.00374669582),
    *(0.0090095643, -0.0225426648, 0.0601129681, -0.180336878, 0.721347511),
)
_TANH = (0.0443838201, 0.133860052, 0.333339542, 0.666661859, 0.99999994)
_ERF_NEAR = (-0.000581123226, 0.00495583285, -0.0267394762, 0.112810135, -0.376124114, 0.128379136)
_ERF_FAR = (
    *(-0.000152756547, 0.00285972422, -0.0200300496, 0.0592433773),
    *(-0.0378184319, -0.0770581514, -0.300825834, 1.0035516),
)
_SIN = (-0.000195074463, 0.00833210442, -0.166666538)
_COS = (-0.00135837577, 0.0416551679, -0.499998748)


def _horner(o: Operands, t: Any, first: float, *rest: float) -> Any:
    """Evaluate a polynomial in t, its coefficients highest degree first."""
    p: Any = first
    for coefficient in rest:
        p = o.fma(t, p, coefficient)
    return p


def _clip(o: Operands, a: Any, limit: int) -> Any:
    """Replace each a >= 0 from the float of bits ``limit`` to infinity by that float, keep NaN."""
    beyond = o.bits(a) - limit <= _INFINITY - limit  # false for smaller a (it wraps) and for NaN
    return o.from_bits(o.where(beyond, limit, o.bits(a)))


def _with_sign(o: Operands, a: Any, x: Any) -> Any:
    """Return a >= 0 with the sign of x."""
    return o.from_bits(o.bits(a) | (o.bits(x) & _SIGN))


def _power_of_two(o: Operands, m: Any) -> Any:
    """Return 2^m for whole m in [-126, 127].

    The sum has m + 127 in the low bits of its significand; shifted, they are the exponent.
    """
    return o.from_bits(o.bits(m + 12583039.0) << 23)  # 1.5 * 2^23 + 127


def _times_power_of_four(o: Operands, p: Any, m: Any) -> Any:
    """Return p 2^m 2^m for p > 0 and whole m in [-126, 127].

    No power of 4 is formed, which may be infinite or 0 where the product is neither: clearing a
    sign that is clear anyway keeps the two factors apart.
    """
    scale = _power_of_two(o, m)
    return o.from_bits(o.bits(p * scale) & _REST) * scale


def _apart(o: Operands, m: Any, mask: int = 0xFFFFFF00) -> Any:
    """Return whole m, |m| < 2^16, as a value that a compiler cannot know to be m.

    The mask clears bits that are 0 anyway. Without it, two products with m would become one.
    """
    return o.from_bits(o.bits(m) & mask)


def _exp_of_clipped(o: Operands, x: Any) -> Any:
    """Return e^x for |x| <= 105: 17 operations."""
    m = o.floor(o.fma(x, 0.721347511, 0.4999))  # 1 / (2 ln 2); not 0.5, so that p is never < 0.5
    r = o.fma(m, -1.38629150390625, x)
    r = o.fma(_apart(o, m), -2.85721353e-06, r)
    p = _horner(o, r, *_EXP, 1.0, 1.0)
    return _times_power_of_four(o, p, m)


def _split(o: Operands, u: Any) -> tuple[Any, Any]:
    """Return whole e, and f with 2^e (1 + f/2) the f32 of bits u, 1 + f/2 in [sqrt(1/2), sqrt(2)).

    A subnormal is its bits, read as an integer, times 2^-149: right even where it would be flushed.
    f is doubled because Mesa takes 1 + (m - 1) q for an interpolation, 1 (1 - q) + m q.
    """
    w = o.where(u < 0x00800000, o.bits(o.to_f32(u)) - (149 << 23), u)
    w = w - 0x3F3504F3  # the bits of sqrt(1/2)
    e = o.to_f32(o.as_i32(w) >> 23)
    return e, o.from_bits((w & 0x007FFFFF) + 0x3FB504F3) - 2.0  # and of sqrt(2)


def _log_ends(o: Operands, u: Any, result: Any) -> Any:
    """Return result where bits u are a positive number, else the logarithm's limit or NaN."""
    spread = o.bits(o.as_i32(u) >> 31)  # all ones, a NaN, for x < 0; inf and NaN stay
    limit = o.from_bits(o.where(u << 1 == 0, 0xFF800000, u | spread))
    return o.where(u - 1 < _INFINITY - 1, result, limit)


def _sin_of_quadrant(o: Operands, x: Any, shift: float) -> Any:
    """Return sin x, or cos x if ``shift`` is odd; NaN where k times a part of pi / 2 is inexact."""
    k = o.floor(o.fma(x, 0.636619747, 0.5))  # 2 / pi
    r = o.fma(k, -1.5703125, x)
    r = o.fma(_apart(o, k), -0.0004825592041015625, r)
    r = o.fma(_apart(o, k, 0xFFFFFF80), -1.26759085e-06, r)
    z = r * r
    s = r * _horner(o, z, *_SIN, 1.0)
    c = _horner(o, z, *_COS, 1.0)
    turn = o.bits(k + shift)  # its two lowest bits are the quadrant
    value = o.bits(o.where((turn & 1) == 0, s, c)) ^ ((turn & 2) << 30)
    inside = o.bits(o.abs(k)) < 0x47800000  # 2^16
    return o.from_bits(o.where(inside, value, 0x7FC00000))
