"""Memory stays as it is while captures come and go."""

from __future__ import annotations

import sys

import pytest

import centella as ct
from tests.support.devices import name_of
from tests.support.soak import soak_alone


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
def test_captures_that_come_and_go_leave_nothing(device: ct.Device) -> None:
    """The full size is a program: `python -m tests.support.soak`."""
    first, *_, last = soak_alone("chain", name_of(device), 1000)
    assert last.resident - first.resident < 8 << 20
    assert last.objects - first.objects < 4000
    assert last.pool_bytes <= first.pool_bytes + (1 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.sweep  # on a GPU with `-m gpu`
@pytest.mark.devices("webgpu", "webgpu-hardware", "cuda")
def test_texts_of_any_lengths_leave_nothing(device: ct.Device) -> None:
    """More sizes take turns than are kept: 121 KB a call were left once, 25 MB here."""
    calls = 300 if device.caps.family == "software" else 6000  # until all sizes were met
    _, _, first, *_, last = soak_alone("encode", name_of(device), calls)
    assert last.resident - first.resident < 8 << 20
