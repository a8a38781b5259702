"""Weights in blocks as pairs of arrays: what `ct.quantize_blocks` gives and `scale=` takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from tests.ops.test_quant import BLOCK, Array, weight_of

KINDS = (8, 4)


@pytest.mark.parametrize("bits", KINDS)
def test_a_pair_of_arrays_is_a_qtensor(device: ct.Device, bits: int) -> None:
    weight = ct.quantize(weight_of(21, 96), f"q{bits}_0", device=device)
    pair = [ct.asarray(p, device=device) for p in ct.quantize_blocks(weight_of(21, 96), bits)]
    whole = ct.dequantize(*pair).numpy()
    np.testing.assert_array_equal(whole, weight.dequantize().numpy())
    for m in (3, 17):
        x = ct.ones((m, 96), device=device)
        given = ct.linear(x, pair[0], scale=pair[1]).numpy()
        np.testing.assert_array_equal(given, ct.linear(x, weight).numpy())


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
