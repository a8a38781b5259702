"""WGSL's own functions: what a probe accepts, and where kernels use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.backends.webgpu import functions
from centella.dtypes import f16, f32
from centella.emit.wgsl import emit_wgsl
from centella.lang import In, Out
from centella.lang.trace import trace


def packed(values: Any) -> Any:
    """Words of two alike."""
    words = values.view(np.uint16).astype(np.uint32)
    return words | words << 16


def test_a_probe_accepts_nearest_even_alone() -> None:
    x = functions.probes().view(np.float32)
    with np.errstate(all="ignore"):
        exact = x.astype(np.float16)
    assert functions.rounds(packed(exact))
    truncated = exact.copy()
    beyond = np.isfinite(x) & (np.abs(exact.astype(np.float32)) > np.abs(x))
    truncated[beyond] = np.nextafter(exact[beyond], np.float16(0))
    flushed = np.where(np.abs(exact) < np.float16(6.1035e-05), np.float16(0), exact)
    capped = np.where(np.isinf(exact), np.float16(65504), exact)
    for wrong in (truncated, flushed, capped):
        assert not functions.rounds(packed(wrong))
    assert not functions.rounds(packed(exact) & 0xFFFF)


def test_a_probe_accepts_exact_powers_alone() -> None:
    x = functions.exponents()
    with np.errstate(all="ignore"):
        exact = np.exp2(x.astype(np.float64)).astype(np.float32)
    assert functions.powers(exact)
    assert functions.powers(np.where(exact < np.float32(2.0**-126), np.float32(0), exact))
    off = exact.copy()
    off[1000] *= np.float32(1 + 2.0**-20)
    for wrong in (
        off,
        np.maximum(exact, np.float32(2.0**-126)),
        np.where(np.isnan(exact), np.float32(0), exact),
        np.where(np.isinf(exact), np.float32(3e38), exact),
        np.where(x == -np.inf, np.float32(np.nan), exact),
        np.where(x == -1000, np.float32(1), exact),
        np.where(x >= 127, np.float32(np.inf), exact),
        np.where((x > 127.1) & (x < 127.9), np.float32(np.inf), exact),
        np.where((x > -126) & (x < -125.1), np.float32(0), exact),
        np.where((x > -151) & (x < -150.1), np.float32(2.0**-126), exact),
    ):
        assert not functions.powers(wrong)


class Overflowing:
    """A device whose own 2^x is infinite from 127 on: as good as a driver's with such a fault."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def create_shader_module(self, *, code: str) -> Any:
        assert "exp2(x)" in code
        wrong = "select(exp2(x), bitcast<f32>(0x7f800000u | y[id.x] & 0u), x >= 127.0)"
        return self.native.create_shader_module(code=code.replace("exp2(x)", wrong))


@pytest.mark.devices("webgpu", "webgpu-hardware")
def test_a_native_power_that_ends_too_early_is_refused(device: ct.Device) -> None:
    native = device.backend.native
    rounds, _ = functions.agrees(native)
    assert functions.agrees(Overflowing(native)) == (rounds, False)


@ct.kernel(workgroup=64)
def powers_of(x: In[f32], y: Out[f32]) -> None:
    i = lang.global_id()
    with lang.if_(i < x.shape(0)):
        y[i] = lang.exp2(x[i])


def assert_near(got: Any, exact: Any, ulps: float) -> None:
    """Within so many ulp; where the exact value is subnormal, 0 will do."""
    exact = np.where(exact >= 2.0**128, np.inf, exact)
    np.testing.assert_array_equal(np.isinf(got), np.isinf(exact))
    number = np.isfinite(exact)
    unit = 2.0 ** (np.floor(np.log2(np.maximum(exact[number], 2.0**-126))) - 23)
    off = np.abs(got[number].astype(np.float64) - exact[number]) / unit
    assert off[exact[number] >= 2.0**-126].max() <= ulps
    assert (got[number][exact[number] < 2.0**-126] <= np.float32(2.0**-126)).all()


def test_exponentials_are_right_to_their_last_finite_value(device: ct.Device) -> None:
    """From 88.03, and 127, on a driver that multiplies two scales first would have infinity."""
    x = np.concatenate([np.linspace(-104, 89, 4097), np.linspace(88, 88.7228, 999)])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64))
    assert_near(ct.exp(ct.asarray(x, device=device)).numpy(), exact, 3)
    z = np.concatenate([np.linspace(-151, 129, 4097), np.linspace(126, 127.9999, 999)])
    z = z.astype(np.float32)
    y = ct.zeros(z.shape, device=device)
    powers_of(ct.asarray(z, device=device), y, threads=z.size)
    assert_near(y.numpy(), np.exp2(z.astype(np.float64)), 3)


def test_a_device_rounds_as_its_probe_says(device: ct.Device) -> None:
    x = functions.probes().view(np.float32)
    with np.errstate(all="ignore"):
        wanted = x.astype(np.float16)
    got = ct.asarray(x, device=device).astype("f16").numpy()
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("native", [False, True])
def test_no_driver_sees_through_rounding_in_a_register(native: bool) -> None:
    """It takes its own conversion to f16 and back for nothing, and fused plans would differ."""

    def kernel(x: In[f32], y: Out[f16]) -> None:
        i = lang.global_id() * 2
        y.store(i, [lang.stored(x[i], f16) + 1.0, x[i + 1]])

    ir = trace(kernel, lang.signature_of(kernel), workgroup=64, dtypes={"x": f32, "y": f16})
    source = emit_wgsl(ir, native_f16=native)
    packed = "pack_f16_native" if native else "pack_f16"
    assert source.count(f"{packed}(") - source.count(f"fn {packed}(") == 2
    assert source.count(" | wid.z)") == native
