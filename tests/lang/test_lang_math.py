"""The float32 formulas of `centella.lang.math`, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from centella.lang import math as lang_math

F32 = np.float32
NAMES = ("exp", "exp2", "log", "log2", "tanh", "erf", "sin", "cos", "sigmoid")
FMAS = ("fused", "unfused", "odd", "even", "rewritten")


class Lazy(np.ndarray[Any, Any]):
    """A float32 array that knows itself as a sum, and takes the liberties of compilers.

    A product added to something is rounded once with it, ``a * b + a * c`` is ``a * (b + c)``, and
    constants are added last (Mesa's). ``(a * b) * b`` is ``a * (b * b)`` (NVIDIA's for Vulkan).
    """

    terms: tuple[tuple[Any, Any], ...] = ()
    rest: Any = None
    constant: Any = F32(-0.0)  # adding -0 changes nothing

    def __mul__(self, other: Any) -> Any:
        squared = [x for x, y in self.terms if len(self.terms) == 1 and y is other]
        if squared and np.ndim(self.rest) == 0:
            return squared[0].view(Lazy) * np.multiply(other, other)
        product: Lazy = np.multiply(self, other).view(Lazy)
        product.terms, product.rest = ((self, other),), F32(-0.0)
        return product

    def __add__(self, other: Any) -> Any:
        a, b = _parts(self), _parts(other)
        merged: list[tuple[Any, Any]] = []
        for x, y in b.terms + a.terms:
            same = [i for i, (z, _) in enumerate(merged) if np.may_share_memory(x, z)]
            if same:
                merged[same[0]] = (x, merged[same[0]][1] + y)
            else:
                merged.append((x, y))
        rest, constant = a.rest + b.rest, a.constant + b.constant
        value = rest
        for x, y in merged:
            value = _fused(x, y, value)
        total = np.array(value + constant).view(Lazy)
        total.terms, total.rest, total.constant = tuple(merged), rest, constant
        return total

    def __sub__(self, other: Any) -> Any:
        return self + -other


def _parts(value: Any) -> Lazy:
    """The value as terms, rest and constant."""
    if isinstance(value, Lazy) and value.rest is not None:
        return value
    parts = np.zeros(()).view(Lazy)
    is_constant = np.ndim(value) == 0
    parts.rest = F32(-0.0) if is_constant else np.asarray(value, F32)
    parts.constant = F32(value) if is_constant else F32(-0.0)
    return parts


class NumpyF32:
    """Operands on float32 arrays; ``fma`` rounds once, twice, alternates, or is left to `Lazy`."""

    def __init__(self, fma: str) -> None:
        self.kind = fma
        self.calls = 0

    floor, where = staticmethod(np.floor), staticmethod(np.where)
    abs, sqrt = staticmethod(np.abs), staticmethod(np.sqrt)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        self.calls += 1
        if self.kind == "rewritten":
            return a.view(Lazy) * b + c
        fused = self.kind == "fused" or self.kind == ("even", "odd")[self.calls % 2]
        return _fused(a, b, c) if fused else a * b + c

    def bits(self, x: Any) -> Any:
        assert x.dtype in (F32, np.int32)
        return np.asarray(x).view(np.uint32)

    def from_bits(self, u: Any) -> Any:
        assert u.dtype == np.uint32
        return u.view(F32)

    def to_f32(self, i: Any) -> Any:
        return i.astype(F32)

    def as_i32(self, u: Any) -> Any:
        assert u.dtype == np.uint32
        return u.view(np.int32)


def _fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c: the product is exact in float64, so all but a few sums round as one fma does."""
    exact = [np.asarray(np.asarray(v, F32), np.float64) for v in (a, b, c)]
    return (exact[0] * exact[1] + exact[2]).astype(F32)


def _sigmoid(x: Any) -> Any:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


REFERENCE: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "sin": np.sin,
    "cos": np.cos,
    "sigmoid": _sigmoid,
}
# ulp, absolute error granted besides, largest |x|, and where random points are densest
BOUNDS: dict[str, tuple[float, float, float, tuple[float, ...]]] = {
    "exp": (2.0, 0.0, np.inf, (1.0, 105.0)),
    "exp2": (2.0, 0.0, np.inf, (1.0, 152.0)),
    "log": (2.0, 0.0, np.inf, (3.0,)),
    "log2": (2.0, 0.0, np.inf, (3.0,)),
    "tanh": (3.0, 0.0, np.inf, (0.2, 11.0)),
    "erf": (3.0, 0.0, np.inf, (1.2, 4.5)),
    "sin": (2.0, 1e-8, 2.0**16, (4.0, 100.0, 2.0**16)),
    "cos": (2.0, 1e-8, 2.0**16, (4.0, 100.0, 2.0**16)),
    "sigmoid": (5.0, 0.0, np.inf, (5.0, 105.0)),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def call(name: str, x: Any, fma: str = "fused") -> Any:
    result = getattr(lang_math, name)(NumpyF32(fma), np.asarray(x, F32))
    assert result.dtype == F32
    return np.asarray(result)


def sweep(name: str) -> Any:
    """Every 64 007th of all float32 (NaN and subnormals among them), and parts densely."""
    _, _, largest, dense = BOUNDS[name]
    rng = np.random.default_rng(7)
    patterns = np.arange(0, 2**32, 64_007, dtype=np.uint64).astype(np.uint32).view(F32)
    tiny = rng.integers(0, 2**23, 2_000, dtype=np.uint32).view(F32)
    ends = np.array([0, 1e-45, 2.0**-126, 2.0**-126 - 2.0**-149, 3.4028235e38, np.inf, 1], F32)
    parts = [patterns, tiny, -tiny, ends, -ends, np.array([np.nan, -np.nan], F32)]
    parts += [rng.uniform(-limit, limit, 60_000).astype(F32) for limit in dense]
    parts += [F32(1) + rng.uniform(-1e-2, 1e-2, 20_000).astype(F32)]
    x = np.concatenate(parts)
    return x[~(np.abs(x) > largest) | np.isnan(x)]


def ulps(result: Any, exact: Any, granted: float) -> Any:
    """Error in ulp of the exact value beyond what is granted; 0 for equals, NaN among them."""
    size = np.maximum(np.abs(exact), 2.0**-126)
    unit = 2.0 ** (np.floor(np.log2(size)) - 23)
    error = np.maximum(np.abs(result.astype(np.float64) - exact) - granted, 0) / unit
    same = (np.isnan(result) & np.isnan(exact)) | (result == exact.astype(F32))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


@pytest.mark.parametrize("name", NAMES)
def test_error_is_within_the_stated_bound(name: str) -> None:
    bound, granted, _, _ = BOUNDS[name]
    x = sweep(name)
    exact = REFERENCE[name](x.astype(np.float64))
    for fma in FMAS:
        error = ulps(call(name, x, fma), exact, granted)
        worst = int(np.argmax(error))
        assert error[worst] <= bound, f"{fma}: {error[worst]:.3f} ulp at {x[worst]!r}"


@pytest.mark.parametrize("name", ["exp", "tanh", "sin", "cos"])
def test_terms_are_kept_apart_for_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lang_math, "_apart", lambda _o, m, _mask=0: m)
    bound, granted, _, _ = BOUNDS[name]
    x = sweep(name)
    exact = REFERENCE[name](x.astype(np.float64))
    assert ulps(call(name, x, "fused"), exact, granted).max() <= bound
    assert ulps(call(name, x, "rewritten"), exact, granted).max() > bound


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_stands_in_the_docstring(name: str) -> None:
    bound, granted, _, _ = BOUNDS[name]
    text = f"Bound: {bound:.0f} ulp" + (f" + {granted:.0e}".replace("e-0", "e-") if granted else "")
    assert f"{text} for " in (getattr(lang_math, name).__doc__ or "")


INF, NAN = math.inf, math.nan
SPECIAL: dict[str, dict[float, float]] = {
    "exp": {0: 1, INF: INF, -INF: 0, 88.73: INF, 3e38: INF, -104: 0, -3e38: 0},
    "exp2": {0: 1, INF: INF, -INF: 0, 128: INF, 3e38: INF, -151: 0, -3e38: 0},
    "log": {1: 0, INF: INF, -INF: NAN, -1: NAN, -1e-45: NAN, -3e38: NAN},
    "log2": {1: 0, INF: INF, -INF: NAN, -1: NAN, -1e-45: NAN, -3e38: NAN},
    "tanh": {10: 1, -10: -1, INF: 1, -INF: -1, 3e38: 1, 1e-45: 1e-45},
    "erf": {4: 1, -4: -1, INF: 1, -INF: -1, 3e38: 1, 1e-45: 1e-45},
    "sin": {INF: NAN, -INF: NAN, 3e38: NAN, 1e-45: 1e-45},
    "cos": {INF: NAN, -INF: NAN, 3e38: NAN, 1e-45: 1},
    "sigmoid": {0: 0.5, INF: 1, -INF: 0, 3e38: 1, -3e38: 0},
}
AT_ZERO = {"exp": (1, 1), "exp2": (1, 1), "log": (-INF, -INF), "log2": (-INF, -INF)}
AT_ZERO |= {"cos": (1, 1), "sigmoid": (0.5, 0.5)}


@pytest.mark.parametrize("fma", FMAS)
@pytest.mark.parametrize("name", NAMES)
def test_special_values_are_exact(name: str, fma: str) -> None:
    cases = list(SPECIAL[name].items())
    cases += zip((0.0, -0.0), AT_ZERO.get(name, (0.0, -0.0)), strict=True)
    x, expected = (np.array(column, F32) for column in zip(*cases, strict=True))
    result = call(name, x, fma)
    np.testing.assert_array_equal(result, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result[number]), np.signbit(expected[number]))


@pytest.mark.parametrize("name", NAMES)
def test_every_nan_gives_nan(name: str) -> None:
    significands = np.random.default_rng(1).integers(1, 2**23, 1_000, dtype=np.uint32)
    bits = np.concatenate([significands, [1, 2**22, 2**23 - 1]]).astype(np.uint32) | 0x7F800000
    for sign in (0, 0x80000000):
        assert np.isnan(call(name, (bits | np.uint32(sign)).view(F32))).all()


@pytest.mark.parametrize("fma", FMAS)
def test_powers_of_two_are_exact(fma: str) -> None:
    whole = np.arange(-149, 128).astype(F32)
    powers = np.ldexp(F32(1), whole.astype(np.int32))
    np.testing.assert_array_equal(call("exp2", whole, fma), powers)
    np.testing.assert_array_equal(call("log2", powers, fma), whole)


@pytest.mark.parametrize("fma", FMAS)
@pytest.mark.parametrize("name", ["tanh", "erf", "sin", "cos", "sigmoid"])
def test_results_keep_their_range_and_symmetry(name: str, fma: str) -> None:
    x = np.random.default_rng(3).uniform(-12, 12, 100_000).astype(F32)
    result = call(name, x, fma)
    assert (np.abs(result) <= 1).all()
    if name in ("tanh", "erf"):
        np.testing.assert_array_equal(call(name, -x, fma), -result)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_far_angles_are_accurate_or_nan(name: str) -> None:
    edge = 2.0**15 * math.pi
    x = np.geomspace(6e4, 3e38, 100_000).astype(F32)
    for fma in FMAS:
        result = call(name, x, fma)
        inside = x < edge - 2
        error = np.abs(result[inside] - REFERENCE[name](x[inside].astype(np.float64)))
        assert error.max() <= 1.4e-7
        assert np.isnan(result[x > edge + 2]).all()


@pytest.mark.parametrize("name", NAMES)
def test_flushing_subnormals_changes_tiny_results_only(name: str) -> None:
    class Flushing(NumpyF32):
        """Subnormal f32 values become 0 as they enter an fma, and as they leave it."""

        def fma(self, a: Any, b: Any, c: Any) -> Any:
            return flush(super().fma(*(flush(np.asarray(v, F32)) for v in (a, b, c))))

    def flush(v: Any) -> Any:
        return np.where(np.abs(v) < F32(2.0**-126), np.copysign(F32(0), v), v)

    x = sweep(name)
    result = getattr(lang_math, name)(Flushing("fused"), x)
    np.testing.assert_allclose(result, call(name, x), rtol=0, atol=2.0**-125)


class Counted:
    """A value that counts the operations on it and has no truth value."""

    count = 0

    def __bool__(self) -> bool:
        raise TypeError("a formula may not branch on data")

    def operation(self, *others: Any) -> Counted:
        Counted.count += 1
        return Counted()

    def free(self) -> Counted:
        return Counted()

    __neg__ = free
    __add__ = __radd__ = __sub__ = __mul__ = __truediv__ = operation
    __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = operation
    __lt__ = __le__ = __gt__ = __ge__ = operation
    __eq__ = operation  # type: ignore[assignment]  # records, as traced values do
    __hash__ = None  # type: ignore[assignment]  # nor can it be a key


class CountingOperands:
    """Operands that count: bit casts are free, all else is one operation."""

    def __getattr__(self, name: str) -> Callable[..., Counted]:
        free = name in ("bits", "from_bits", "as_i32")
        return lambda *_: Counted().free() if free else Counted().operation()


def test_formulas_stay_short() -> None:
    """Kernels hold these inline; a longer formula is a choice, made here."""
    counts = {}
    operands: Any = CountingOperands()
    for name in NAMES:
        Counted.count = 0
        getattr(lang_math, name)(operands, Counted())
        counts[name] = Counted.count
    assert counts == {
        **{"exp": 23, "exp2": 21, "log": 29, "log2": 28, "tanh": 28},
        **{"erf": 24, "sin": 25, "cos": 25, "sigmoid": 25},
    }
