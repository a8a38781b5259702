"""How results are compared with float64: what counts as different, and where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from centella.check.cases.compare import TOLERANCE, difference
from centella.dtypes import dtype_of, narrow, widen

F32, F16, BF16 = (dtype_of(name) for name in ("f32", "f16", "bf16"))
LIMIT = TOLERANCE["f32"][0]
Array = np.ndarray[Any, Any]


def stored(values: Array, dtype: str) -> Array:
    kind = dtype_of(dtype)
    return widen(narrow(values, kind), kind)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_values_rounded_once_are_equal(dtype: str) -> None:
    wanted = np.random.default_rng(0).standard_normal((7, 33))
    wanted[0, :4] = np.nan, np.inf, -np.inf, 0
    limit = TOLERANCE[dtype][0]
    assert difference(stored(wanted, dtype), wanted, dtype_of(dtype), limit) is None
    assert difference(stored(wanted, dtype), wanted, dtype_of(dtype), 0.0) is None


def test_the_largest_difference_is_reported() -> None:
    wanted = np.arange(1.0, 13.0).reshape(3, 4)
    value = wanted.astype(np.float32)
    value[2, 1] += 0.5
    value[1, 1] -= 0.25
    worst = difference(value, wanted, F32, LIMIT)
    assert worst is not None and worst.index == (2, 1)  # the furthest off
    assert (worst.expected, worst.got) == (10, 10.5)
    assert worst.error == pytest.approx(0.3125 / np.square(wanted).sum())
    assert str(worst) == (
        "at [2, 1]: expected 10, got 10.5 (squared error 0.00048 of the squares, at most 1e-12)"
    )
    exact = difference(value, wanted, F32, 0.0)
    assert exact is not None and str(exact) == "at [1, 1]: expected 6, got 5.75"  # the first


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (1.0, np.nan),
        (1.0, np.inf),
        (np.nan, 1.0),
        (np.inf, 1.0),
        (np.inf, -np.inf),
        (np.inf, np.nan),
    ],
)
def test_infinities_and_nan_are_equal_or_wrong(expected: float, got: float) -> None:
    wanted = np.array([1.0, expected, 3.0])
    value = np.array([1.0, got, 3.0], np.float32)
    for limit in (LIMIT, 0.0):
        worst = difference(value, wanted, F32, limit)
        assert worst is not None and worst.index == (1,)
        np.testing.assert_equal((worst.expected, worst.got), (expected, got))


def test_whole_numbers_are_equal_or_wrong() -> None:
    wanted = np.array([1, 2, 3], np.int32)
    assert difference(wanted, wanted, dtype_of("i32"), LIMIT) is None
    value = np.array([1, 2, 4], np.int32)
    worst = difference(value, wanted, dtype_of("i32"), 1.0)
    assert worst is not None and (worst.index, worst.expected, worst.got) == ((2,), 3, 4)


def test_a_few_half_floats_may_each_be_half_a_step_off() -> None:
    wanted = np.array([1.0 + 0.5 * 2**-10])
    for value in (1.0, 1.0 + 2**-10):
        assert difference(np.array([value], np.float32), wanted, F16, TOLERANCE["f16"][0]) is None
    far = np.array([1.0 + 2 * 2**-10], np.float32)
    assert difference(far, wanted, F16, TOLERANCE["f16"][0]) is not None
    assert difference(np.ones(1, np.float32), np.array([1 + 2**-8]), BF16, 5e-6) is None


def test_empty_arrays_and_zeros() -> None:
    assert difference(np.empty((0, 3), np.float32), np.empty((0, 3)), F32, LIMIT) is None
    assert difference(np.zeros(3, np.float32), np.zeros(3), F32, LIMIT) is None
    assert difference(np.full(3, 1e-30, np.float32), np.zeros(3), F32, LIMIT) is not None
