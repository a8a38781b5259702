"""The bytes that no element owns, which initcheck is told of."""

from __future__ import annotations

import numpy as np
import pytest

from centella.dtypes import DType, f16, f32
from centella.specs import Spec, make_spec, strided
from tests.pads import pads


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
