"""Device time per kernel, the table, and the trace file."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import DeviceLostError
from centella.ledger import timeline as trace
from centella.ledger.counts import began
from tests.support.devices import own

X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2
W = np.arange(20, dtype=np.float32).reshape(4, 5) / 10


def layer(x: ct.Tensor, w: ct.Tensor) -> ct.Tensor:
    """Three launches: the product, softmax, the chain of the sum and relu."""
    return ct.relu(ct.softmax(x @ w) + 1.0)


def timed(device: ct.Device) -> bool:
    return not device.backend.clock.missing


# -- the table ------------------------------------------------------------------------------------


def test_every_launch_has_its_time(device: ct.Device) -> None:
    w = ct.asarray(W, device=device)
    untimed = layer(ct.asarray(X, device=device), w).numpy()
    with ct.ledger(timing=True) as led:
        start = time.perf_counter()
        for _ in range(3):
            y = layer(ct.asarray(X, device=device), w).numpy()
            np.testing.assert_array_equal(y, untimed)
        wall = 1e3 * (time.perf_counter() - start)
        rows = led.kernels()
    assert [row.launches for row in rows] == [3, 3, 3]
    assert {row.device for row in rows} == {device.name}
    led.expect(launches=9, submissions=3, uploads=3, downloads=3)
    if not timed(device):
        assert all(row.milliseconds is None and row.share is None for row in rows)
        assert all("timestamp-query" in row.missing for row in rows)
        assert "no times on webgpu" in str(led)
        assert led.counts.timing_bytes == 0
        return
    times = [row.milliseconds for row in rows if row.milliseconds is not None]
    assert len(times) == 3
    assert times == sorted(times, reverse=True)
    assert 0 < sum(times) <= wall
    assert sum(row.share or 0.0 for row in rows) == pytest.approx(1.0)
    stamped = 16 * 9 if device.name.startswith("webgpu") else 0
    assert led.counts.timing_bytes == stamped
    assert led.kernels() == rows  # also after the scope's end


def test_the_table_is_printed(device: ct.Device, tmp_path: Path) -> None:
    with ct.ledger(timing=True) as led:
        layer(ct.asarray(X, device=device), ct.asarray(W, device=device)).numpy()
    counts, head, *rows = str(led).splitlines()
    assert counts.startswith("uploads 1")
    assert head.split() == ["kernel", "launches", "ms", "share", "device"]
    assert len(rows) == 3 + (not timed(device))
    assert rows[0].split()[1] == "1"
    with ct.ledger(timing=True) as led:
        pass
    assert str(led).splitlines()[0] == "nothing"
    assert led.kernels() == []
    check_format(traced(led, tmp_path))


def test_launches_of_a_replay_are_timed(device: ct.Device) -> None:
    w = ct.asarray(W, device=device)
    fn = device.compile(lambda x: layer(x, w), X)
    untimed = fn(X).numpy()
    with ct.ledger(timing=True) as led, ct.forbid("compile", "allocation"):
        for _ in range(4):
            np.testing.assert_array_equal(fn(X).numpy(), untimed)
    assert sum(row.launches for row in led.kernels()) == 4 * fn.launches
    assert all((row.milliseconds is not None) is timed(device) for row in led.kernels())
    led.expect(submissions=4, launches=12, compiles=0, uploads=4)
    np.testing.assert_array_equal(fn(X).numpy(), untimed)


@pytest.mark.devices("webgpu")
def test_more_launches_than_a_query_set_holds(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("centella.backends.webgpu.stamps.MOST", 16)
    if not timed(device):
        pytest.skip(device.backend.clock.missing)
    x = ct.asarray(X, device=device)
    with ct.ledger(timing=True) as led:
        with device.batch() as batch:
            kept = list(itertools.accumulate(range(40), lambda a, _: ct.relu(a), initial=x))
        batch.read(kept[-1])
    (row,) = led.kernels()
    assert row.launches == 40
    assert led.counts.timing_bytes == 640
    assert row.milliseconds is not None
    assert row.milliseconds > 0


def test_scopes_nest_and_only_timed_ones_have_times() -> None:
    device = ct.device("cpu")
    with ct.ledger() as plain, ct.ledger(timing=True) as outer:
        layer(ct.asarray(X, device=device), ct.asarray(W, device=device)).numpy()
        with ct.ledger(timing=True) as inner:
            layer(ct.asarray(X, device=device), ct.asarray(W, device=device)).numpy()
    assert sum(row.launches for row in outer.kernels()) == 6
    assert sum(row.launches for row in inner.kernels()) == 3
    with pytest.raises(ct.ContractError, match=r"kernels: .* open it as ledger\(timing=True\)"):
        plain.kernels()
    with pytest.raises(ct.ContractError, match=r"trace: .* open it as ledger\(timing=True\)"):
        plain.trace("nowhere.json")


def test_another_thread_joins_by_bind() -> None:
    device = ct.device("cpu")

    def work() -> None:
        layer(ct.asarray(X, device=device), ct.asarray(W, device=device)).numpy()

    with ct.ledger(timing=True) as led:
        for target in (led.bind(work), work):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert sum(row.launches for row in led.kernels()) == 3


def test_without_timing_nothing_is_noted(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was noted")

    for name in ("add", "add_work"):
        monkeypatch.setattr(trace.Timeline, name, never)
    submitted: list[bool] = []
    submit = device.backend.submit

    def seen(work: Any) -> Any:
        submitted.append(work.timed)
        return submit(work)

    monkeypatch.setattr(device.backend, "submit", seen)
    with ct.ledger():
        assert began() == 0
        layer(ct.asarray(X, device=device), ct.asarray(W, device=device)).numpy()
    assert submitted
    assert not any(submitted)


def test_work_that_fails_has_no_times() -> None:
    class Lost:
        def done(self) -> bool:
            return True

        def times(self) -> None:
            raise DeviceLostError("gone")

    timeline = trace.Timeline()
    launch = trace.TimedLaunch("k", "op", "file.py:1")
    timeline.add_work(trace.Work("gpu", 0, (launch,), Lost()))
    (row,) = timeline.kernels()
    assert (row.launches, row.milliseconds, row.missing) == (1, None, "gone")


def test_cuda_events_become_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver tells distances of events alone; the driver here is a list of their times."""
    stamps = pytest.importorskip("centella.backends.cuda.stamps")
    clock = itertools.count(7.0, 0.25)  # ms
    happened: dict[int, float] = {}
    numbers = itertools.count()
    fake = SimpleNamespace(
        CUevent_flags=SimpleNamespace(CU_EVENT_DEFAULT=SimpleNamespace(value=0)),
        cuEventCreate=lambda flags: (0, next(numbers)),
        cuEventRecord=lambda event, stream: (0, happened.update({event: next(clock)})),
        cuEventElapsedTime=lambda a, b: (0, happened[b] - happened[a]),
    )
    monkeypatch.setattr(stamps, "driver", fake)
    monkeypatch.setattr(stamps, "check", lambda result: result[1])
    given_up: list[list[int]] = []
    submissions: list[Any] = []
    for launches in (2, 1, 2):
        one = stamps.Stamps(launches, submissions[-1] if submissions else None, given_up.append)
        for index in range(2 * launches):
            one.record(index, "stream")
        submissions.append(one)
    ms = 1_000_000
    first, second, third = 0, int(1.0 * ms), int(1.5 * ms)
    assert submissions[2].times() == [
        (third, third + ms // 4),
        (third + ms // 2, third + 3 * ms // 4),
    ]
    assert submissions[1].times() == [(second, second + ms // 4)]
    assert submissions[0].times()[0] == (first, ms // 4)
    del one
    submissions.clear()
    assert sorted(len(events) for events in given_up) == [2, 4, 4]


# -- the trace ------------------------------------------------------------------------------------


def traced(led: ct.Ledger, folder: Path) -> list[dict[str, Any]]:
    led.trace(folder / "run.json")
    document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert document["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def check_format(events: list[dict[str, Any]]) -> None:
    """What the Trace Event Format asks of each event, and what Perfetto asks of a track."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= set(event)
        assert event["ph"] in "MXbe"
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            span = (event["ts"], event["ts"] + event["dur"])
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    begun = [e["id"] for e in events if e["ph"] == "b"]
    assert sorted(begun) == sorted(e["id"] for e in events if e["ph"] == "e")
    for spans in tracks.values():  # one after the other or one within the other
        open_ends: list[float] = []
        for begin, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= begin + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)


def test_a_trace_has_a_host_and_a_device(device: ct.Device, tmp_path: Path) -> None:
    where = own(device)
    large = np.ones((1 << 15,), np.float32)
    with ct.ledger(timing=True) as led:
        w = ct.asarray(W, device=where)
        y = layer(ct.asarray(X, device=where), w)
        y.numpy()
        _ = ct.asarray(large, device=where) + 1.0
        fn = where.compile(lambda x: layer(x, w), X)
        fn(X).numpy()
        where.synchronize()
    events = traced(led, tmp_path)
    check_format(events)
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(names) == {"host", where.name}
    host = {e["name"] for e in events if e["pid"] == names["host"] and e["ph"] == "X"}
    assert {"plan", "submit", "wait"} <= host | {"wait"}
    assert ("compile" in host) is (where.name != "cpu")
    assert sum(e["name"] == "record" and e["ph"] == "b" for e in events) >= 2
    moved = {n: sum(e["args"]["bytes"] for e in events if e["name"] == n and e["ph"] == "X")
             for n in ("upload", "download")}  # fmt: skip
    assert moved["upload"] == led.counts.upload_bytes
    assert moved["download"] == led.counts.download_bytes
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert len(kernels) == (led.counts.launches if timed(where) else 0)
    if timed(where):
        assert {"matmul", "softmax"} < {e["args"]["op"] for e in kernels}
        assert any("+" in e["args"]["op"] or "relu" in e["args"]["op"] for e in kernels)
        assert all(Path(__file__).name in e["args"]["line"] for e in kernels)
        submits = sorted(e["ts"] for e in events if e["name"] == "submit")
        assert min(e["ts"] for e in kernels) >= submits[0] - 1e-3


def test_device_clocks_are_shifted_to_the_host() -> None:
    launch = trace.TimedLaunch("k", "op", "f:1")

    def work(begin: int, *stamps: tuple[int, int]) -> trace.Work:
        return trace.Work("gpu", begin, (launch,) * len(stamps), None, stamps=stamps)

    works = [work(1000, (50_000, 50_010), (50_020, 50_030)), work(2000, (50_900, 51_000))]
    assert trace._shift(works) == 2000 - 50_900
    assert trace._shift([trace.Work("cpu", 5, (launch,), None, "", True, [(9, 10)])]) == 0
    assert trace._shift([]) == 0


def test_launches_that_overlap_are_drawn_one_after_the_other(tmp_path: Path) -> None:
    timeline = trace.Timeline()
    launches = tuple(trace.TimedLaunch(name, "op", "f:1") for name in "abc")
    stamps = [(100, 300), (250, 400), (260, 350)]
    begin = timeline.begin + 1000
    timeline.add_work(trace.Work("gpu", begin, launches, None, stamps=stamps))
    timeline.write(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["traceEvents"]
    check_format(events)
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert [round(1e3 * e["dur"]) for e in kernels] == [200, 100, 0]
    assert [row.milliseconds for row in timeline.kernels()] == [200e-6, 150e-6, 90e-6]


def test_a_trace_of_several_threads_and_devices(tmp_path: Path) -> None:
    devices = [ct.device("cpu"), ct.device("simulator")]

    def work() -> None:
        for device in devices:
            w = ct.asarray(W, device=device)
            for _ in range(3):
                layer(ct.asarray(X, device=device), w).numpy()

    with ct.ledger(timing=True) as led:
        threads = [threading.Thread(target=led.bind(work), name=f"worker {i}") for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = traced(led, tmp_path)
    check_format(events)
    named = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert sorted(named) == ["worker 0", "worker 1", "worker 2"]
    assert {row.device for row in led.kernels()} == {"cpu", "simulator"}
    assert sum(row.launches for row in led.kernels()) == 3 * 3 * 3 * 2


# -- compiling is not running ---------------------------------------------------------------------

COLD = """
import json
import numpy as np
import centella as ct

device = ct.device("webgpu")
x = np.ones((8, 64), np.float32)


def timed(run):
    with ct.ledger(timing=True) as led:
        run()
    return {
        "kernels": {row.kernel: row.milliseconds for row in led.kernels()}, **led.spans(),
        "counts": led.as_dict(),
    }


def lazily():
    a = ct.asarray(x, device=device)
    ct.softmax(a @ a.T).numpy()


fn = device.compile(lambda a: ct.layer_norm(a), x)
print(json.dumps([timed(lazily), timed(lazily), timed(lambda: fn(x).numpy()),
                  timed(lambda: fn(x).numpy())]))
"""


@pytest.mark.devices("webgpu")
def test_a_kernel_that_is_compiled_at_its_first_use_is_not_slow(device: ct.Device) -> None:
    """lavapipe without its cache compiles at the first dispatch."""
    if not timed(device):
        pytest.skip(device.backend.clock.missing)
    without_cache = {**os.environ, "MESA_SHADER_CACHE_DISABLE": "1", "CENTELLA_SELF_CHECK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COLD], env=without_cache, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    scopes = json.loads(done.stdout)
    for cold, warm in zip(scopes[::2], scopes[1::2], strict=True):
        spent = sum(cold["kernels"].values())
        assert cold["kernels"].keys() == warm["kernels"].keys()
        assert cold["compile"] > 4 * spent
        assert cold["submit"] < cold["compile"]
        assert "compile" not in warm
        for name in ("submissions", "launches", "uploads", "downloads"):
            assert cold["counts"][name] == warm["counts"][name]
