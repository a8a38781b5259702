"""The `device` fixture: one test body, every backend.

    def test_add(device): ...                                  # runs on every device below
    @pytest.mark.devices("cpu", "webgpu") ...                  # on these
    @pytest.mark.devices(*WINDOWED) ...                        # where few KB are above a binding

Devices are opened once (`tests/devices.py`). A missing adapter skips; `CENTELLA_REQUIRE=webgpu` (or
`webgpu,cuda`) makes it a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import centella as ct
from tests.devices import DEVICES, GPU, WINDOWED, open_device

# Tests look at devices at length and leave the user's folders alone; test_self_check.py has it on.
os.environ["CENTELLA_SELF_CHECK"] = "0"


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
