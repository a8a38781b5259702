"""The `device` fixture: one test body, every backend.

    def test_add(device): ...                                  # runs on every device below
    @pytest.mark.devices("cpu", "webgpu") ...                  # on these
    @pytest.mark.devices(*WINDOWED) ...                        # where few KB are above a binding

Devices are opened once and poison their memory, so that pads, outputs and reused buffers hold NaN
until a kernel writes them. A missing adapter skips; `CENTELLA_REQUIRE=webgpu` (or `webgpu,cuda`)
makes it a failure.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest

import centella as ct
from tests.windowed import windowed

POOL = os.environ.get("CENTELLA_POOL", "poison")
GPU = ("cuda", "webgpu-hardware")
DEVICES = ("cpu", "simulator", "webgpu", "webgpu-minimum", *GPU)
WINDOWED = ("simulator-windows", "webgpu-windows")  # by name only: see tests/test_windows.py


def _hardware() -> str:
    """The first adapter that is a GPU, by its place in the list."""
    from centella.backends import webgpu

    for index, adapter in enumerate(webgpu.adapters()):
        if not webgpu.is_software(adapter):
            return f"webgpu:{index}"
    raise ct.DeviceError("no hardware WebGPU adapter")


@functools.cache
def open_device(name: str) -> ct.Device | str:
    """The device of a parameter, or the reason why there is none."""
    options: dict[str, Any] = {} if name == "cpu" else {"pool": POOL}
    if name.startswith("simulator"):  # fills what it allocates with NaN, and checks every bound
        options["pool"] = "exact"
    if name == "webgpu-minimum":
        options["minimum"] = True
    try:
        if name in WINDOWED:
            return windowed(name.partition("-")[0], **options)
        spelled = _hardware() if name == "webgpu-hardware" else name.removesuffix("-minimum")
        return ct.device(spelled, **options)
    except (ct.CentellaError, ImportError, OSError) as error:
        return f"{name}: {error}"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[ct.Device]:
    """An open device, one of `DEVICES`; what a failed test left recorded is dropped."""
    found = open_device(request.param)
    if isinstance(found, str):
        kind = request.param.removesuffix("-minimum").removesuffix("-windows")
        if kind in os.environ.get("CENTELLA_REQUIRE", "").split(","):
            pytest.fail(found)
        pytest.skip(found)
    yield found
    found.implicit().fail()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "devices(*names): the devices that `device` stands for")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("devices")
    names = marker.args if marker else DEVICES
    unknown = set(names) - {*DEVICES, *WINDOWED}
    assert not unknown, f"unknown devices {sorted(unknown)}"
    params = [pytest.param(n, marks=pytest.mark.gpu if n in GPU else ()) for n in names]
    metafunc.parametrize("device", params, indirect=True)


def pytest_report_header() -> str | None:
    try:
        from centella.backends import webgpu

        missing = None if webgpu.adapters() else webgpu.NO_ADAPTER.partition(". ")[0]
    except ImportError as error:
        missing = str(error)
    return f"webgpu: skipped, {missing}" if missing else None
