"""Weights in blocks of 32 as pairs of arrays: numbers and factors, and their products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.dtypes import dtype_of

Array = np.ndarray[Any, Any]
KINDS = (8, 4)
BLOCK = 32


def weight_of(n: int, k: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-3, 3, (n, k // BLOCK, 1))
    weight = (rng.standard_normal((n, k // BLOCK, BLOCK)) * sizes).astype(np.float32)
    weight[0, 0] = 0
    weight[-1, -1] = 5
    return weight.reshape(n, k)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("bits", KINDS)
def test_products_of_few_rows_and_of_many(device: ct.Device, bits: int, dtype: str) -> None:
    k, n = 96, 21
    stored, scale = ct.quantize_blocks(weight_of(n, k), bits)
    parts = ct.asarray(stored, device=device), ct.asarray(scale, device=device)
    whole = ct.dequantize(*parts).numpy()
    bias = ct.asarray(np.linspace(-1, 1, n), "f32", device)
    for m in (1, 3, 17) if dtype == "f32" else (1, 17):
        x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
        given = ct.asarray(x, dtype, device)
        got = ct.linear(given, parts[0], bias, scale=parts[1], activation="relu").numpy()
        wide = ct.asarray(x, dtype, device).astype("f32").numpy().astype(np.float64)
        wanted = np.maximum(wide @ whole.T.astype(np.float64) + np.linspace(-1, 1, n), 0)
        near = np.abs(wide) @ np.abs(whole).T.astype(np.float64)
        epsilon = 4e-7 if dtype == "f32" else 2 * dtype_of(dtype).epsilon
        values = got.astype(np.float64) if got.dtype != np.uint16 else np.asarray(got)
        assert (np.abs(values - wanted) <= epsilon * (near + 1)).all(), m


def test_a_product_of_few_rows_reads_the_planes_in_one_launch(device: ct.Device) -> None:
    stored, scale = ct.quantize_blocks(weight_of(8, 64), 4)
    parts = ct.asarray(stored, device=device), ct.asarray(scale, device=device)
    many = 1 if device.caps.target == "numpy" else 2
    for m, launches in ((1, 1), (16, 1), (17, many)):
        x = ct.ones((m, 64), device=device)
        with ct.ledger() as led:
            ct.linear(x, parts[0], scale=parts[1]).numpy()
        assert led.launches == launches


@pytest.mark.parametrize("bits", KINDS)
def test_numbers_are_near_what_they_stand_for(bits: int) -> None:
    weight = weight_of(5, 320, seed=3)
    stored, scale = ct.quantize_blocks(weight, bits)
    assert stored.shape == (5, 320 * bits // 8) and scale.shape == (5, 10)
    near = ct.dequantize(ct.asarray(stored, device="cpu"), ct.asarray(scale, device="cpu")).numpy()
    largest = np.abs(weight.reshape(5, 10, BLOCK)).max(-1).repeat(BLOCK, 1)
    step = largest / (127 if bits == 8 else 8)
    assert (np.abs(near - weight) <= 1.02 * step + 1e-3 * largest + 1e-7).all()


@pytest.mark.parametrize(
    ("weight", "bits", "kind", "text"),
    [
        (np.zeros(32), 8, ct.ShapeError, r"quantize_blocks: expected \[out, in\]"),
        (np.zeros((2, 33)), 8, ct.ShapeError, "a multiple of 32"),
        (np.zeros((2, 32), np.int32), 8, ct.DTypeError, "expected floats, got int32"),
        (np.zeros((2, 32)), 5, ct.DTypeError, "expected 4 or 8 bits, got 5"),
        (np.full((2, 32), np.nan), 4, ct.DTypeError, "finite"),
        (np.full((2, 32), 1e30), 8, ct.DTypeError, "finite in float16"),
    ],
)
def test_weights_that_are_none(weight: Array, bits: int, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        ct.quantize_blocks(weight, bits)


@pytest.mark.parametrize("bits", KINDS)
def test_a_factor_without_a_finite_inverse_is_0(bits: int) -> None:
    weight = np.full((1, 64), 1e-39, np.float32)
    weight[0, 32:] = 1
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        stored, scale = ct.quantize_blocks(weight, bits)
    near = ct.dequantize(ct.asarray(stored, device="cpu"), ct.asarray(scale, device="cpu"))
    np.testing.assert_allclose(near.numpy(), np.repeat([[0.0, 1.0]], 32, 1), atol=1e-3)


@pytest.mark.parametrize(
    ("stored", "scale", "x", "kind", "text"),
    [
        ((3, 64), (3, 3), (1, 64), ct.ShapeError, r"linear: expected numbers i8 \[n, k\]"),
        ((3, 48), (3, 1), (1, 48), ct.ShapeError, r"linear: expected numbers i8 \[n, k\]"),
        ((3, 64), (3, 2), (1, 32), ct.ShapeError, r"linear: expected x \[\.\.\., 64\]"),
        ((3, 64), (3, 2), (20, 32), ct.ShapeError, r"linear: expected x \[\.\.\., 64\]"),
    ],
)
def test_planes_that_do_not_belong_together(
    device: ct.Device, stored: Any, scale: Any, x: Any, kind: type[Exception], text: str
) -> None:
    numbers, factors = ct.zeros(stored, "i8", device), ct.zeros(scale, device=device)
    with pytest.raises(kind, match=text):
        ct.linear(ct.zeros(x, device=device), numbers, scale=factors)
    with pytest.raises(ct.DTypeError, match="expected i8 or u8 numbers"):
        ct.dequantize(factors, factors)
    with pytest.raises(ct.DTypeError, match="with a u8 weight"):
        ct.linear(ct.zeros(x, device=device), ct.zeros(stored, "u8", device))
    with pytest.raises(ct.DTypeError, match="expected a float dtype, got i32"):
        ct.dequantize(numbers, factors, "i32")
    with pytest.raises(ct.ShapeError, match=r"dequantize: expected numbers .*, got \[\]"):
        ct.dequantize(ct.zeros((), "i8", device), factors)
    with pytest.raises(ct.DTypeError, match="linear: expected a Tensor, got list"):
        ct.linear(ct.zeros(x, device=device), numbers, scale=[[1.0]])  # type: ignore[arg-type]
    assert (factors + 1).numpy().ravel()[0] == 1
