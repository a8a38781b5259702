"""The first use of an adapter class: right, wrong or lost; what is remembered, and where."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import centella as ct
from centella.backends import opening
from centella.host import caches
from centella.runtime import self_check
from tests.support.fake_gpu import FakeGpu

MODULE = sys.modules["centella.runtime.device"]
Open = Callable[..., ct.Device]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that verdicts go to; nothing is known yet, no device is open or chosen."""
    monkeypatch.setenv("CENTELLA_SELF_CHECK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CENTELLA_DEVICE", raising=False)
    again(monkeypatch)
    return tmp_path / "centella"


@pytest.fixture
def machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeGpu], FakeGpu]:
    """Makes a backend the machine's one GPU."""
    original = opening.class_of

    def use(fake: FakeGpu) -> FakeGpu:
        def class_of(kind: str) -> Any:
            if kind == "webgpu":
                raise ct.DeviceError("no adapter")
            return (lambda **_: fake) if kind == "cuda" else original(kind)

        monkeypatch.setattr(opening, "class_of", class_of)
        monkeypatch.setattr("centella.backends.webgpu.adapters", list, raising=False)
        return fake

    return use


Machine = Callable[[FakeGpu], FakeGpu]


def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process: what is known is what the folder holds."""
    monkeypatch.setattr(self_check, "_faults", {})
    monkeypatch.setattr(MODULE, "_opened", {})
    monkeypatch.setattr(MODULE, "_default", None)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING]


def stored(cache: Path) -> list[dict[str, str]]:
    return [json.loads(f.read_text()) for f in sorted(cache.iterdir())] if cache.is_dir() else []


# -- verdicts -------------------------------------------------------------------------------------


@pytest.mark.devices("webgpu", "cuda", "webgpu-hardware")
def test_a_device_that_computes_right(device: ct.Device, cache: Path) -> None:
    name = device.name.replace("cuda:0", "cuda").partition(":")[0]
    assert ct.device(name, pool="reuse").fault == ""
    (verdict,) = stored(cache)
    assert verdict["fault"] == ""
    about = json.loads(verdict["key"])
    assert about["centella"] == ct.__version__
    assert about["device"] == name and about["driver"]


def test_the_check_runs_once(
    machine: Machine, cache: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    fake = machine(FakeGpu())
    assert ct.device().name == ct.device("cuda:0", pool="exact").name == "cuda:0"
    done = fake.submissions
    assert 0 < done <= 4
    again(monkeypatch)
    assert ct.device("cuda").fault == ""
    assert fake.submissions == done  # remembered
    monkeypatch.setenv("CENTELLA_SELF_CHECK", "always")
    again(monkeypatch)
    ct.device("cuda")
    assert fake.submissions == 2 * done
    fake.driver += 1
    monkeypatch.setenv("CENTELLA_SELF_CHECK", "1")
    again(monkeypatch)
    ct.device("cuda")
    assert fake.submissions == 3 * done  # another driver is another class
    assert len(stored(cache)) == 2
    assert not warnings(caplog)


@pytest.mark.parametrize("wrong", ["softmax_rows", "gemm", "reduce", "cast"])
def test_wrong_numbers_where_no_device_was_named(
    machine: Machine, cache: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, wrong: str,
) -> None:  # fmt: skip
    fake = machine(FakeGpu(wrong))
    assert ct.device().name == "cpu"
    assert ct.device() is ct.device("cpu")
    (text,) = warnings(caplog)
    op = {"gemm": "matmul", "softmax_rows": "softmax"}.get(wrong, wrong)
    assert text.startswith(f"cuda:0 failed its self-check: {op} f32 [[")
    assert ": expected " in text and f", got {0 if wrong == 'cast' else 1.5}" in text
    (verdict,) = stored(cache)
    assert verdict["fault"] in text
    done = fake.submissions
    pytest.importorskip("typer")
    from centella.cli.info import gather

    assert "cuda:0 failed its self-check: " in gather()["chosen"]["why"]
    again(monkeypatch)
    caplog.clear()
    assert ct.device().name == "cpu"
    assert fake.submissions == done  # remembered, and said once in each process
    assert len(warnings(caplog)) == 1


def test_wrong_numbers_on_a_device_that_was_named(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(FakeGpu("softmax_rows"))
    named = ct.device("cuda")
    assert named.name == "cuda:0" and named.fault.startswith("softmax f32 [[5, 260]] at [0, 0]: ")
    assert ct.asarray([2.0], device=named).numpy() == 2
    monkeypatch.setenv("CENTELLA_DEVICE", "cuda")
    assert ct.device() is named
    assert len(warnings(caplog)) == 1


def test_a_device_that_is_lost(
    machine: Machine, cache: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fake = machine(FakeGpu(lost=True))
    assert ct.device().name == "cpu"
    (text,) = warnings(caplog)
    assert "cuda:0 failed its self-check: DeviceLostError: " in text and "off the bus" in text
    assert not stored(cache)  # a loss may have had another cause
    again(monkeypatch)
    named = ct.device("cuda")
    assert named.lost
    with pytest.raises(ct.DeviceLostError, match="off the bus"):
        ct.asarray([1.0], device=named).numpy()
    fake.lost = False
    again(monkeypatch)
    assert ct.device().name == "cuda:0"


def test_a_fault_of_another_kind(
    machine: Machine, cache: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fake = machine(FakeGpu())

    def refuse(program: Any) -> Any:
        raise ct.CompileError("softmax", "some source", "no such instruction")

    monkeypatch.setattr(fake, "compile", refuse)
    assert ct.device().name == "cpu"
    (text,) = warnings(caplog)
    assert "kernel 'softmax' did not compile. It is not" in text
    assert not stored(cache)


# -- what it leaves alone -------------------------------------------------------------------------


def test_scopes_of_the_caller_are_not_touched(machine: Machine) -> None:
    fake = machine(FakeGpu())
    with ct.ledger() as led, ct.forbid("transfer", "compile", "allocation"):
        device = ct.device("cuda")
    led.expect(uploads=0, submissions=0, downloads=0, compiles=0, allocations=0, peak_bytes=0)
    assert device.fault == ""
    assert (device.memory.live, device.memory.held, device.memory.peak) == (0, 0, 0)
    assert len(device.cache) == 0
    assert fake.submissions and fake.allocated_bytes == 0


def test_the_check_can_be_left_out(
    machine: Machine, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = machine(FakeGpu("softmax_rows"))
    monkeypatch.setenv("CENTELLA_SELF_CHECK", "0")
    assert ct.device().name == "cuda:0"
    assert fake.submissions == 0 and not stored(cache)
    monkeypatch.setenv("CENTELLA_SELF_CHECK", "yes")
    with pytest.raises(ct.DeviceError, match="SELF_CHECK: expected 0, 1, always, got 'yes'"):
        ct.device("cuda", pool="exact")


def test_numpy_devices_need_no_check(cache: Path) -> None:
    for name in ("cpu", "simulator"):
        assert ct.device(name, pool="exact").fault == ""
    assert not self_check._faults and not stored(cache)


# -- where it is remembered -----------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', '{"key": "K", "fault": 3}'])
def test_a_file_that_we_did_not_write(machine: Machine, cache: Path, content: str) -> None:
    fake = machine(FakeGpu())
    key = self_check.key_of(fake)
    file = cache / self_check.file_of(key)
    file.parent.mkdir()
    file.write_text(content.replace('"K"', json.dumps(key)))
    assert self_check.remembered(key) is None
    assert ct.device("cuda").fault == ""
    assert self_check.remembered(key) == ""
    assert self_check.remembered(key + "x") is None
    assert [f.name for f in file.parent.iterdir()] == [file.name]


def test_a_folder_that_cannot_be_written(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    fake = machine(FakeGpu())
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert ct.device("cuda").fault == ""
    assert fake.submissions and not warnings(caplog)


def test_a_file_that_cannot_be_replaced_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches.keep("name", b"old")

    def replace(*_: str) -> None:
        raise PermissionError("another process reads it")

    monkeypatch.setattr(os, "replace", replace)
    caches.keep("name", b"new")
    assert caches.kept("name") == b"old" and [f.name for f in cache.iterdir()] == ["name"]
    assert caches.kept("other") is None


@pytest.mark.skipif(sys.platform == "win32", reason="has no pipes in folders")
def test_a_pipe_in_the_folder_is_no_file(cache: Path) -> None:
    cache.mkdir()
    os.mkfifo(cache / "name", 0o600)
    assert caches.kept("name") is None  # at once: nobody ever writes into it
    caches.keep("name", b"content")
    assert caches.kept("name") == b"content"


@pytest.mark.skipif(sys.platform == "win32", reason="has no such rights")
def test_the_folder_is_the_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    before = os.umask(0)
    try:
        caches.keep("name", b"content")
    finally:
        os.umask(before)
    folders = [tmp_path / "home", tmp_path / "home/cache", tmp_path / "home/cache/centella"]
    assert [f.stat().st_mode & 0o777 for f in folders] == [0o700] * 3
    assert caches.kept("name") == b"content"


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    for platform, parts in (
        ("linux", (".cache", "centella")),
        ("darwin", ("Library", "Caches", "centella")),
        ("win32", ("local", "centella", "Cache")),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        assert Path(caches.cache_folder()) == tmp_path.joinpath(*parts)
        assert os.path.isabs(caches.cache_folder())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "named"))
    assert caches.cache_folder() == str(tmp_path / "named" / "centella")
