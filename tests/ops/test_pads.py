"""The bytes that no element owns, which kernels may read whoever wrote them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.dtypes import DType, f16, f32
from centella.runtime.device import Device
from centella.specs import Spec, make_spec, pads, strided
from tests.support.fake_cuda import FakeCuda
from tests.support.pads import define_pads


@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (4,), (1, 1), (2, 3), (5, 4), (2, 3, 5), (3, 1, 7), (0, 3), (2, 0)]
)
@pytest.mark.parametrize("dtype", [f32, f16])
@pytest.mark.parametrize("turned", [False, True])
def test_pads_and_elements_share_no_byte_and_leave_none(
    shape: tuple[int, ...], dtype: DType, turned: bool
) -> None:
    spec = make_spec(shape, dtype, 16)
    if turned:
        spec = Spec(shape[::-1], dtype, spec.strides[::-1], False)
    memory = np.zeros(spec.storage_bytes, np.uint8)
    if spec.size:
        strided(memory, spec).view(f"i{dtype.itemsize}")[...] = -1
    for begin, nbytes, pitch, rows in pads(spec):
        for row in range(rows):
            part = memory[row * pitch + begin : row * pitch + begin + nbytes]
            assert len(part) == nbytes
            assert not part.any()
            part[:] = 1
    assert memory.all() or not spec.size


def split(where: Device) -> ct.Tensor:
    """A product whose parts a second launch adds."""
    x, w = (ct.asarray(np.ones(s, np.float32), device=where) for s in ((3, 600), (600, 33)))
    return x @ w


def parted(where: Device) -> ct.Tensor:
    """Attention whose keys are split among groups."""
    q = ct.asarray(np.ones((1, 2, 3, 5), np.float32), device=where)
    k = ct.asarray(np.ones((1, 2, 70, 5), np.float32), device=where)
    return ct.attention(q, k, k, variant="split")


@pytest.mark.parametrize("compute", [split, parted])
def test_initcheck_is_told_of_the_pads_of_every_launch(
    monkeypatch: pytest.MonkeyPatch, compute: Any
) -> None:
    """Nothing runs on this driver, so what is not -1 in a result has been defined."""
    fake = FakeCuda(pytest.importorskip("cuda.bindings.driver")).install(monkeypatch)
    raw = fake.alloc

    def alloc(nbytes: int, context: int) -> int:
        address = raw(nbytes, context)
        ctypes.memset(address, 0xFF, nbytes)
        return address

    monkeypatch.setattr(fake, "alloc", alloc)
    where = ct.device("cuda", pool="exact")
    define_pads(where.backend)
    y = compute(where)
    address, spec = y.native[0], y.spec
    memory = np.array((ctypes.c_uint8 * spec.storage_bytes).from_address(int(address)))
    assert (strided(memory, spec).view(np.int32) == -1).all()
    strided(memory, spec).view(np.int32)[...] = 0
    assert spec.storage_bytes > spec.nbytes
    assert not memory.any()
    where.close()
