"""What the table of ops does not show: positions, equal indices, views, compiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import centella as ct
from centella.check.cases.case import rng_of
from centella.tensors import functional


def test_rope_tables() -> None:
    cos, sin = ct.rope_tables(64, 2050, 1e6, rotary_dim=48)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == sin.shape == (2050, 24)
    angle = 2049 * 1e6 ** (-2 * 5 / 48)
    assert (cos[2049, 5], sin[2049, 5]) == (
        np.float32(math.cos(angle)),
        np.float32(math.sin(angle)),
    )
    for wrong in (63, 66, 0):
        with pytest.raises(ct.ShapeError, match="rope_tables: expected an even rotary_dim of 2 to"):
            ct.rope_tables(64, 9, rotary_dim=wrong)


def test_rope_depends_on_the_distance_alone(device: ct.Device) -> None:
    rng = rng_of("distance")
    q, k = (ct.asarray(rng.standard_normal((2, 1, 1, 8)), "f32", device) for _ in range(2))
    cos, sin = (ct.asarray(t, device=device) for t in ct.rope_tables(8, 100))
    products = []
    for shift in (0, 40, 90):
        at = [ct.asarray(np.array(p, np.int32) + shift, device=device) for p in ([7, 3], [2, 9])]
        turned = [ct.rope(x, cos, sin, p) for x, p in zip((q, k), at, strict=True)]
        products.append(functional.sum(turned[0] * turned[1], -1))
    first, *rest = ct.fetch(*products).result()
    for other in rest:
        np.testing.assert_allclose(other, first, rtol=2e-5, atol=2e-5)


def test_lengths_and_positions_compile_nothing(device: ct.Device) -> None:
    cos, sin = (ct.asarray(t, device=device) for t in ct.rope_tables(8, 64))
    table = ct.asarray(np.arange(80, dtype=np.float32).reshape(10, 8), device=device)

    def run(n: int) -> list[ct.Tensor]:
        x = ct.zeros((2, 2, n, 8), device=device)
        at = functional.arange(n, device=device)
        return [
            ct.rope(x, cos, sin, at[:2]),
            functional.gather(table, at),
            functional.scatter(table, at, functional.gather(table, at)),
        ]

    ct.fetch(*run(5)).result()
    with ct.ledger() as led:
        ct.fetch(*run(6)).result()
        ct.fetch(*run(9)).result()
    led.expect(compiles=0)


def test_convolutions_of_other_lengths_compile_nothing(device: ct.Device) -> None:
    weight = ct.asarray(np.ones((10, 8, 1), np.float32), device=device)

    def run(length: int) -> None:
        ct.conv1d(ct.zeros((1, 8, length), device=device), weight, padding=1).numpy()

    for length in (1, 5, 9, 20):  # results of up to 4, 8 and 16 rows, and of tiles
        run(length)
    with ct.ledger() as led:
        for length in (2, 3, 4, 6, 7, 10, 14, 15, 31, 90):
            run(length)
    led.expect(compiles=0)


def test_the_last_of_equal_indices_counts(device: ct.Device) -> None:
    at = np.array([4, 4, 1, -1, -6, 9, 1], np.int32)
    values = np.arange(21, dtype=np.float16).reshape(7, 3)
    wanted = np.zeros((5, 3))
    wanted[4], wanted[1] = values[3], values[6]
    x = ct.zeros((5, 3), "f16", device)
    y = ct.scatter(x, ct.asarray(at, device=device), ct.asarray(values, device=device))
    again = ct.scatter(x, ct.asarray(at, device=device), ct.asarray(values, device=device))
    assert np.array_equal(y.numpy(), wanted)
    assert np.array_equal(again.numpy(), wanted)
    assert not x.numpy().any()


@pytest.mark.parametrize("dtype", ["f32", "f16", "i32", "u8", "bool"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_negative_indices_count_from_the_end(device: ct.Device, dtype: str, axis: int) -> None:
    shape = (5, 3, 4)
    data = ct.asarray(np.arange(60).reshape(shape) % 7 - 2 * (dtype[0] != "u"), dtype, device)
    x, n = data.numpy(), shape[axis]
    at = np.array([[-1, 0, -n], [n - 1, -2, 1]], np.int32)
    got = ct.gather(data, ct.asarray(at, device=device), axis)
    np.testing.assert_array_equal(got.numpy(), np.take(x, at, axis))
    outside = ct.asarray(np.array([-n - 1, n, -(2**31), 2**31 - 1], np.int32), device=device)
    nothing = ct.gather(data, outside, axis).numpy()
    assert np.isnan(nothing).all() if dtype in ("f32", "f16") else not nothing.any()


def test_scattered_rows_count_from_the_end(device: ct.Device) -> None:
    x, values = np.zeros((5, 3), np.float32), np.arange(1, 19, dtype=np.float32).reshape(6, 3)
    at = np.array([-1, -5, 2, -6, 5, -(2**31)], np.int32)
    wanted = x.copy()
    wanted[at[:3]] = values[:3]
    data, indices, rows = (ct.asarray(a, device=device) for a in (x, at, values))
    np.testing.assert_array_equal(ct.scatter(data, indices, rows).numpy(), wanted)


def test_heads_and_parts_are_views(device: ct.Device) -> None:
    x = ct.asarray(np.arange(70, dtype=np.float32).reshape(1, 5, 14), device=device)
    x.numpy()
    with ct.ledger() as led:
        heads = ct.interleaved_to_head_first(x, 7, 2)
        parts = [*ct.split(x, (3, 11), -1), *ct.chunk(x, 2, 1)]
    led.expect(launches=0, submissions=0)
    assert heads.shape == (1, 7, 5, 2)
    assert [p.shape for p in parts] == [(1, 5, 3), (1, 5, 11), (1, 3, 14), (1, 2, 14)]


# -- random shapes --------------------------------------------------------------------------------

BOUNDED = settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
WHOLE = st.integers(1, 9)


def whole(*shape: int) -> Any:
    """Small whole numbers: sums of their products are exact in f32 and f16."""
    return (np.arange(math.prod(shape)).reshape(shape) * 7 % 5 - 2).astype(np.float32)


@pytest.mark.devices("cpu", "webgpu")
@BOUNDED
@given(WHOLE, WHOLE, st.integers(1, 30), WHOLE, WHOLE, WHOLE, st.integers(0, 4), st.booleans())
def test_convolutions(
    device: ct.Device, batch: int, channels: int, length: int, out: int, taps: int, stride: int,
    padding: int, last: bool,
) -> None:  # fmt: skip
    taps = min(taps, length + 2 * padding)
    x, weight = whole(batch, channels, length), whole(out, channels, taps)
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps, -1)[:, :, ::stride]
    tensors = [ct.asarray(a.swapaxes(1, 2) if last else a, "f16", device) for a in (x, weight)]
    views = [t.permute(0, 2, 1) if last else t for t in tensors]
    got = ct.conv1d(views[0], views[1], stride=stride, padding=padding)
    assert np.array_equal(got.numpy(), np.einsum("bctk,ock->bot", windows, weight))


@pytest.mark.devices("cpu", "webgpu")
@BOUNDED
@given(
    st.lists(WHOLE, min_size=1, max_size=4), st.lists(st.integers(0, 9), max_size=2),
    st.integers(0, 3), st.sampled_from(("f32", "f16", "u8")), st.integers(0, 99),
)  # fmt: skip
def test_gathers(
    device: ct.Device, shape: list[int], picks: list[int], axis: int, dtype: str, seed: int
) -> None:
    axis %= len(shape)
    x = np.arange(math.prod(shape)).reshape(shape) % 61
    indices = np.random.default_rng(seed).integers(0, shape[axis], picks)
    t, at = ct.asarray(x, dtype, device), ct.asarray(indices, "i32", device)
    got = ct.gather(t, at, axis)
    assert np.array_equal(got.numpy(), np.take(x, indices, axis))
    if len(picks) == 1:
        y, values = x.copy(), np.take(x, indices, 0, mode="clip") + 1
        for j, index in enumerate(indices):
            if index < len(y):
                y[index] = values[j]
        put = ct.scatter(t, at, ct.asarray(values, dtype, device))
        assert np.array_equal(put.numpy(), y)
