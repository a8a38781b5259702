"""Tensor maps of launches: what the driver is asked for, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from centella.backends.base import Launch
from centella.emit.program import program_of
from tests.ops.test_mma import CAPS
from tests.ops.test_wgmma import lowered
from tests.support.launched import parameters

pytest.importorskip("cuda.bindings.driver")


def test_a_map_follows_from_address_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded once per operand and address; extents and strides are those of the launch."""
    from centella.backends.cuda import maps
    from centella.backends.cuda.driver import driver

    asked: list[tuple[Any, ...]] = []

    def encode(*args: Any) -> tuple[Any, Any]:
        asked.append(args)
        return driver.CUresult.CUDA_SUCCESS, driver.CUtensorMap()

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    launch, ir = lowered(300, 200, 136)
    words = np.concatenate([[launch.call.groups], parameters(launch.call, ir)]).astype(np.uint32)
    offset = 1 + ir.maps[0].offset
    words[offset] = 64
    program = program_of(ir, CAPS)
    bound = Launch(program, (2, 0, 1), (), 2, words.tobytes(), launch.call.groups)
    tensor_maps = maps.TensorMaps()
    addresses = [0x2000, 0x3000, 0x1000]
    assert len(tensor_maps.of(bound, addresses.__getitem__)) == 3 * 128
    kind, rank, start, extents, strides, box, *_ = asked[0]
    assert (kind.name[-7:], rank, start) == ("FLOAT16", 3, 0x1000 + 2 * 64)
    assert [int(n) for n in extents] == [136, 300, 1]
    assert [int(n) for n in strides] == [272, 16]  # of one batch there is no next
    assert [int(n) for n in box] == [64, 128, 1]
    assert [args[2] for args in asked[1:]] == [0x2000, 0x3000]
    tensor_maps.of(bound, addresses.__getitem__)
    assert len(asked) == 3
    addresses[0] = 0x8000  # another weight
    tensor_maps.of(bound, addresses.__getitem__)
    assert len(asked) == 4 and asked[3][2] == 0x8000
