"""The dtype of a product's result: sums are f32, rounded once to what was asked for."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.dtypes import dtype_of, narrow, widen


def operands(dtype: str) -> tuple[Any, Any, Any, Any]:
    """x [40, 300] and weights [24, 300] as they are stored, and in float64."""
    rng = np.random.default_rng(7)
    kind = dtype_of(dtype)
    x, w = (narrow(rng.standard_normal(s, np.float32), kind) for s in ((40, 300), (24, 300)))
    return x, w, widen(x, kind).astype(np.float64), widen(w, kind).astype(np.float64)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sums_of_16_bit_operands_are_f32(device: ct.Device, dtype: str, rows: int) -> None:
    x, w, wide_x, wide_w = operands(dtype)
    given, weight = (ct.asarray(v, dtype, device) for v in (x[:rows], w))
    wanted = wide_x[:rows] @ wide_w.T
    for y in (ct.linear(given, weight, dtype="f32"), ct.matmul(given, weight.T, dtype="f32")):
        assert y.dtype is ct.f32
        error = np.linalg.norm(y.numpy() - wanted) / np.linalg.norm(wanted)
        assert error <= 2e-6
    rounded = ct.linear(given, weight)
    assert rounded.dtype is dtype_of(dtype)
    again = ct.linear(given, weight, dtype="f32").astype(dtype)
    assert np.array_equal(rounded.numpy(), again.numpy())


def test_blocks_give_the_dtype_that_was_asked_for(device: ct.Device) -> None:
    rng = np.random.default_rng(8)
    stored, scale = ct.quantize_blocks(rng.standard_normal((6, 64), np.float32))
    planes = [ct.asarray(v, device=device) for v in (stored, scale)]
    for rows in (2, 20):
        x = ct.asarray(
            rng.standard_normal((rows, 64), np.float32).astype(np.float16), device=device
        )
        y = ct.linear(x, planes[0], scale=planes[1], dtype="f32")
        assert y.dtype is ct.f32 and y.shape == (rows, 6)
        near = ct.linear(x, planes[0], scale=planes[1]).numpy().astype(np.float32)
        assert np.allclose(y.numpy(), near, rtol=2e-3, atol=2e-2)


@pytest.mark.devices("cpu")
def test_a_result_is_a_float(device: ct.Device) -> None:
    x = ct.zeros((2, 3), "f32", device)
    for call in (partial(ct.matmul, x, x.T, dtype="i32"), partial(ct.linear, x, x, dtype="i8")):
        with pytest.raises(ct.DTypeError, match=r"dtype: expected a float one, got i"):
            call()
