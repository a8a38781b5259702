"""WGSL's own rounding to f16: what a probe accepts, and where kernels use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.backends.webgpu import rounding
from centella.dtypes import f16, f32
from centella.lang import In, Out
from centella.lang.trace import trace
from centella.lang.wgsl import emit_wgsl


def packed(values: Any) -> Any:
    """Words of two alike."""
    words = values.view(np.uint16).astype(np.uint32)
    return words | words << 16


def test_a_probe_accepts_nearest_even_alone() -> None:
    x = rounding.probes().view(np.float32)
    with np.errstate(all="ignore"):
        exact = x.astype(np.float16)
    assert rounding.right(packed(exact))
    truncated = exact.copy()
    beyond = np.isfinite(x) & (np.abs(exact.astype(np.float32)) > np.abs(x))
    truncated[beyond] = np.nextafter(exact[beyond], np.float16(0))
    flushed = np.where(np.abs(exact) < np.float16(6.1035e-05), np.float16(0), exact)
    capped = np.where(np.isinf(exact), np.float16(65504), exact)
    for wrong in (truncated, flushed, capped):
        assert not rounding.right(packed(wrong))
    assert not rounding.right(packed(exact) & 0xFFFF)


def test_a_device_rounds_as_its_probe_says(device: ct.Device) -> None:
    x = rounding.probes().view(np.float32)
    with np.errstate(all="ignore"):
        wanted = x.astype(np.float16)
    got = ct.asarray(x, device=device).astype("f16").numpy()
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("native", [False, True])
def test_rounding_in_a_register_is_never_the_drivers(native: bool) -> None:
    """A driver takes the conversion to f16 and back for nothing, and fused plans would differ."""

    def kernel(x: In[f32], y: Out[f16]) -> None:
        i = lang.global_id() * 2
        y.store(i, [lang.stored(x[i], f16) + 1.0, x[i + 1]])

    ir = trace(kernel, lang.face_of(kernel), workgroup=64, dtypes={"x": f32, "y": f16})
    source = emit_wgsl(ir, native_f16=native)
    assert source.count("= pack_f16(") + source.count("(pack_f16(") >= 1
    assert ("return pack2x16float" in source) == native
