"""The `device` fixture: one test body, every backend.

    def test_add(device): ...                                  # runs on every device below
    @pytest.mark.devices("cpu", "webgpu") ...                  # on these
    @pytest.mark.devices(*WINDOWED) ...                        # where few KB are above a binding

Devices are opened once (`devices.py`). A missing adapter skips; `CENTELLA_REQUIRE=webgpu` (or
`webgpu,cuda`) makes it a failure. Under `-n 2`, nothing runs beside a test marked `alone`.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import centella as ct
from centella.host.blas import BLAS
from centella.runtime.plans import Plans
from centella.specs import Caps
from tests.support.devices import DEVICES, GPU, WINDOWED, forget_programs, open_device
from tests.support.exclusive import exclusive

FROZEN: set[Path] = set()  # files that collect garbage, and have begun
EXCLUSIVE = exclusive()
SLOW = ("simulator", "webgpu-minimum")
# By folder: devices that have the first of a test's cases alone. A GPU has them all.
FEW = {"tasks": ("webgpu",), "models": SLOW}

# A first example compiles or imports, and other processes have the cores as well.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

if importlib.util.find_spec("triton"):  # its LLVM crashes where it loads after Mesa's
    importlib.import_module("triton")

# Lavapipe compiles a fifth faster without its optimiser; most shaders of the tests run once.
os.environ.setdefault("GALLIVM_PERF", "nopt")
# Tests look at devices at length and leave the user's folders alone; test_self_check.py has it on.
os.environ["CENTELLA_SELF_CHECK"] = "0"
# After a product OpenBLAS's threads ask for more for a tenth of a second, on cores that the other
# processes of `-n 2` are to have.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of processes that tests start
    if BLAS is not None:
        BLAS._write(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[ct.Device]:
    """An open device, one of `DEVICES`; what a failed test left recorded is dropped."""
    opened = open_device(request.param)
    if isinstance(opened, str):
        kind = request.param.removesuffix("-minimum").removesuffix("-windows")
        if kind in os.environ.get("CENTELLA_REQUIRE", "").split(","):
            pytest.fail(opened)
        pytest.skip(opened)
    yield opened
    opened.recorder.implicit().fail()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """References alone decide what lives."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def costly_launches(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen as where launches cost something: on a GPU."""
    monkeypatch.setattr(Caps, "launches_are_free", False)
    monkeypatch.setattr(device.recorder, "_preferred", {})
    monkeypatch.setattr(device.executor, "plans", Plans(device.executor.backend))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "devices(*names): the devices that `device` stands for")
    config.addinivalue_line("markers", "first(name, *devices): these (or all) have its first value")
    config.addinivalue_line("markers", "turns(*names): cases have these by turns, one each")
    config.addinivalue_line("markers", "alone: it measures time; under -n nothing runs beside it")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file stay together, as far as can be: they share what is compiled."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    if EXCLUSIVE is None:
        return (yield)
    with EXCLUSIVE.inside(item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_collection_finish() -> None:
    """What is there by now stays, and what comes is looked at less often: a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A file that collects garbage begins without what others have left, and so is quick."""
    if isinstance(item, pytest.Function) and item.path not in FROZEN:
        FROZEN.add(item.path)
        if vars(item.module).get("gc") is gc:
            gc.collect()
            gc.freeze()


@pytest.hookimpl(trylast=True)  # after the fixtures of the file
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A file leaves nothing in its caches, and not much in those of devices."""
    if isinstance(item, pytest.Function) and (nextitem is None or nextitem.path != item.path):
        for each in vars(item.module).values():
            cached = isinstance(each, functools._lru_cache_wrapper)
            if cached and each.__module__ == item.module.__name__:
                each.cache_clear()
        forget_programs()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("devices")
    names = marker.args if marker else DEVICES
    unknown = set(names) - {*DEVICES, *WINDOWED}
    assert not unknown, f"unknown devices {sorted(unknown)}"
    params = [pytest.param(n, marks=pytest.mark.gpu if n in GPU else ()) for n in names]
    metafunc.parametrize("device", params, indirect=True)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a slow device has of a parameter is its first value; the others run with `-m sweep`.

    So of dtypes under minimum limits: limits choose kernels; what a dtype changes in them is seen
    on the device with all its limits. Other tests say it by `first`. Tasks, which are whole models,
    run with `-m sweep` in the simulator and under minimum limits, where other devices have the
    test, and with other values than the first on a software adapter; so do models in the former.
    Kernels and modules run there by themselves.
    """
    seen = set[tuple[str, ...]]()
    for item in items:
        call = getattr(item, "callspec", None)
        params = dict(call.params) if call else {}
        if params.get("device") in SLOW and item.path.parent.name in ("tasks", "check"):
            devices = item.get_closest_marker("devices")
            if devices is None or set(devices.args) - set(SLOW):
                item.add_marker("sweep")
        few = {("dtype", "webgpu-minimum")}
        few |= {(name, d) for m in item.iter_markers("first") for name, *on in [m.args] for d in on}
        names = [name for name, d in few if d == params.get("device") and name in params]
        names += [m.args[0] for m in item.iter_markers("first") if len(m.args) == 1]
        if params.get("device") in FEW.get(item.path.parent.name, ()):
            names += params.keys() - {"device"}
        if names:
            kept = (str(value) for name, value in params.items() if name not in names)
            case = (item.nodeid.partition("[")[0], *kept)
            if case in seen:
                item.add_marker("sweep")
            seen.add(case)
    take_turns(items)


def take_turns(items: list[pytest.Item]) -> None:
    """Of `turns` a case has one combination of values, the next case the next one."""
    values = defaultdict[str, dict[Any, int]](dict)
    cases = defaultdict[str, dict[Any, int]](dict)
    turns = list[tuple[pytest.Item, int, int, dict[Any, int]]]()
    for item in items:
        marker, call = item.get_closest_marker("turns"), getattr(item, "callspec", None)
        if marker is not None and call is not None:
            test = item.nodeid.partition("[")[0]
            value = tuple(str(call.params[name]) for name in marker.args)
            case = tuple(str(v) for name, v in call.params.items() if name not in marker.args)
            of_value = values[test].setdefault(value, len(values[test]))
            of_case = cases[test].setdefault(case, len(cases[test]))
            turns.append((item, of_value, of_case, values[test]))
    for item, of_value, of_case, every in turns:
        if of_case % len(every) != of_value:
            item.add_marker("sweep")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have to show, whichever process they ran in: `record_property("shown", text)`."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, text in report.user_properties:
            if name == "shown":
                terminalreporter.write_line(f"\n{text}")


def pytest_report_header() -> str | None:
    try:
        from centella.backends import webgpu

        missing = None if webgpu.adapters() else webgpu.NO_ADAPTER.partition(". ")[0]
    except ImportError as error:
        missing = str(error)
    return f"webgpu: skipped, {missing}" if missing else None
