"""Fit the polynomial coefficients of ``centella.lang.math`` and print them.

Each function there evaluates polynomials, in float32, on a short interval. Here they are fitted in
float64 by Lawson's iteration: weighted least squares on Chebyshev nodes, each round multiplying the
weights by the error it left, so that the largest error shrinks towards the smallest possible one.
The coefficients are rounded to float32 one after another, lowest degree first, and what is left is
fitted again after each rounding, so later coefficients absorb the rounding of earlier ones.

Run ``python benchmarks/fit_math.py`` (a few seconds). Coefficients print highest degree first,
as Horner's rule wants them; the error is that of the rounded polynomial in exact arithmetic, in
units of 2**-24 of the function's value (0.5 to 1 ulp).

Source: C. L. Lawson, Contributions to the Theory of Linear Least Maximum Approximation, 1961.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LN2 = math.log(2.0)
NODES = 500
ROUNDS = 300
erf = np.vectorize(math.erf, otypes=[np.float64])
erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(frozen=True)
class Fit:
    """One polynomial p of ``degree`` in ``variable(x)``, near ``target(x)`` on [low, high].

    ``weight(x)`` turns an error of p into a relative error of the function that uses p.
    """

    name: str
    target: Callable[[Array], Array]
    weight: Callable[[Array], Array]
    low: float
    high: float
    degree: int
    variable: Callable[[Array], Array] = lambda x: x


def lawson(columns: Array, wanted: Array) -> Array:
    """Return c such that max |columns @ c - wanted| is nearly as small as it can be."""
    scale = np.abs(columns).max(axis=0)
    weight = np.full(len(wanted), 1.0 / len(wanted))
    best, best_error = np.zeros(columns.shape[1]), np.inf
    for _ in range(ROUNDS):
        root = np.sqrt(weight)
        solution = np.linalg.lstsq(columns / scale * root[:, None], wanted * root, rcond=None)[0]
        error = np.abs(columns @ (solution / scale) - wanted)
        if error.max() < best_error:
            best, best_error = solution / scale, float(error.max())
        weight = weight * error
        weight /= weight.sum()
    return best


def solve(fit: Fit) -> tuple[list[np.float32], float]:
    """Return the coefficients rounded to float32, lowest degree first, and the largest error."""
    angles = np.pi * (np.arange(NODES) + 0.5) / NODES
    x = (fit.low + fit.high) / 2 + (fit.high - fit.low) / 2 * np.cos(angles)
    weight = fit.weight(x)
    columns = fit.variable(x)[:, None] ** np.arange(fit.degree + 1) * weight[:, None]
    rest = fit.target(x) * weight
    rounded: list[np.float32] = []
    for k in range(fit.degree + 1):
        rounded.append(np.float32(lawson(columns[:, k:], rest)[0]))
        rest = rest - columns[:, k] * float(rounded[k])
    return rounded, float(np.abs(rest).max()) * 2.0**24


def split(value: float, *bits: int) -> list[float]:
    """Split ``value`` into parts of so many leading bits each, and a last part in float32."""
    parts: list[float] = []
    for count in bits:
        step = 2.0 ** (math.frexp(value)[1] - count)
        parts.append(math.floor(value / step) * step)
        value -= parts[-1]
    return [*parts, float(np.float32(value))]


FITS = (
    # exp(r) = 1 + r + r^2 p(r); the interval is a little longer than +-ln 2, for a rounded quotient
    Fit(
        "exp",
        lambda r: (np.expm1(r) - r) / r**2,
        lambda r: r**2 / np.exp(r),
        -LN2,
        LN2 + 2e-4,
        5,
    ),
    # 2^f = 1 + f p(f)
    Fit("exp2", lambda f: np.expm1(LN2 * f) / f, lambda f: f / np.exp2(f), -1.0, 1.0, 6),
    # log(1 + f / 2) = f (1 / 2 + f p(f))
    Fit(
        "log",
        lambda f: (np.log1p(f / 2.0) / f - 0.5) / f,
        lambda f: f**2 / np.log1p(f / 2.0),
        math.sqrt(2.0) - 2.0,
        math.sqrt(8.0) - 2.0,
        8,
    ),
    # log2(1 + f / 2) = f p(f)
    Fit(
        "log2",
        lambda f: np.log1p(f / 2.0) / LN2 / f,
        lambda f: f * LN2 / np.log1p(f / 2.0),
        math.sqrt(2.0) - 2.0,
        math.sqrt(8.0) - 2.0,
        9,
    ),
    # (exp(2 r) - 1) / 2 = r + r^2 p(r)
    Fit(
        "tanh",
        lambda r: (np.expm1(2.0 * r) / 2.0 - r) / r**2,
        lambda r: 2.0 * r**2 / np.expm1(2.0 * r),
        -LN2 / 4 - 1e-5,
        LN2 / 4 + 1e-5,
        4,
    ),
    # erf(x) = x + x p(x^2)
    Fit(
        "erf, near",
        lambda x: erf(x) / x - 1.0,
        lambda x: x / erf(x),
        1e-3,
        0.95,
        5,
        lambda x: x * x,
    ),
    # erf(x) = 1 - p(x)^4; closer in the tail, for p(4)^4 must vanish beside 1
    Fit(
        "erf, far",
        lambda x: erfc(x) ** 0.25,
        lambda x: np.where(x < 3.5, 4.0, 12.0) * erfc(x) ** 0.75 / erf(x),
        0.95,
        4.0,
        7,
    ),
    # erf(x) = 1 - (1 + x p(x))^8 of NumPy's operands, for x Phi(x): its absolute error counts
    Fit(
        "erf, in few passes",
        lambda x: (erfc(x) ** 0.125 - 1.0) / x,
        lambda x: 8.0 * x * erfc(x) ** 0.875 * np.where(x < 3.5, 0.5 * x + 0.3, 1.5 * x + 0.9),
        1e-4,
        4.25,
        7,
    ),
    # Phi(-a) = 2^(a p(a) - 1) of kernels' operands, for x Phi(x): its absolute error counts
    Fit(
        "Phi, by a power of two",
        lambda a: np.log2(erfc(a / math.sqrt(2.0))) / a,
        lambda a: a * erfc(a / math.sqrt(2.0)) * LN2 / 2.0,
        1e-4,
        5.5,
        4,
    ),
    # sin(r) = r (1 + r^2 p(r^2)); the interval is a little longer than pi / 4, as for exp
    Fit(
        "sin",
        lambda r: (np.sin(r) / r - 1.0) / r**2,
        lambda r: r**3 / np.sin(r),
        1e-3,
        math.pi / 4 + 0.01,
        2,
        lambda r: r * r,
    ),
    # cos(r) = 1 + r^2 p(r^2)
    Fit(
        "cos",
        lambda r: (np.cos(r) - 1.0) / r**2,
        lambda r: r**2 / np.cos(r),
        1e-3,
        math.pi / 4 + 0.01,
        2,
        lambda r: r * r,
    ),
)


def main() -> None:
    """Print each polynomial and its error, then the split constants of the reductions."""
    for fit in FITS:
        coefficients, error = solve(fit)
        print(f"{fit.name}: error {error:.3f} * 2**-24")
        for k in reversed(range(fit.degree + 1)):
            print(f"    {float(coefficients[k]):.9g},  # degree {k}")
    for name, parts in (
        ("2 ln 2 (exp)", split(2 * LN2, 17)),
        ("ln 2 / 2 (tanh)", split(LN2 / 2, 17)),
        ("pi / 2 (sin, cos)", split(math.pi / 2, 8, 8)),
    ):
        print(f"{name}: {', '.join(f'{part!r} = {part.hex()}' for part in parts)}")
    for name, value in (
        ("ln 2", LN2),
        ("1/(2 ln 2)", 0.5 / LN2),
        ("2/ln 2", 2 / LN2),
        ("2/pi", 2 / math.pi),
    ):
        print(f"{name}: {float(np.float32(value)):.9g}")


if __name__ == "__main__":
    main()
