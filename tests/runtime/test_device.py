"""Devices: opening, the default, options, memory, threads, forks, the end of the process."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.backends import opening
from centella.backends.base import Backend, Buffer
from centella.plan.placement import size_class
from centella.runtime.memory import Memory, Pool
from tests.support.devices import own
from tests.support.threads import elsewhere

Array = np.ndarray[Any, Any]
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2
MODULE = sys.modules["centella.runtime.device"]  # `centella.device` is the function


def python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own; a hang is a failure."""
    return subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", code],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def ends(code: str, printed: str, *options: str, status: int = 0) -> None:
    """A script says nothing but this, and ends with this status."""
    run = python(code, *options)
    assert (run.returncode, run.stdout, run.stderr) == (status, printed, "")


def needs(name: str) -> None:
    try:
        ct.device(name)
    except (ct.CentellaError, ImportError) as error:
        pytest.skip(str(error))


# -- opening --------------------------------------------------------------------------------------


def test_a_name_opens_one_device() -> None:
    cpu = ct.device("cpu")
    assert ct.device("cpu") is cpu
    assert ct.device(cpu) is cpu
    assert ct.device("cpu", pool="reuse") is not cpu
    assert repr(cpu) == "<centella.Device cpu>"
    assert cpu.native is None
    assert cpu.describe()["device"] == "cpu"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tpu", "unknown device 'tpu'; expected cpu, webgpu, webgpu:<index or word>, cuda"),
        ("cpu:1", "unknown device 'cpu:1'"),
        ("simulator:x", "unknown device 'simulator:x'"),
        ("", "unknown device ''"),
        ("cpu:", "unknown device 'cpu:'; expected cpu, .*; write cpu$"),
        ("webgpu:", "unknown device 'webgpu:'; expected .*; write webgpu$"),
        ("cuda:", "unknown device 'cuda:'; expected .*; write cuda$"),
        (3, "expected a name or a Device, got 3"),
    ],
)
def test_names_that_are_none(name: Any, text: str) -> None:
    with pytest.raises(ct.DeviceError, match=text):
        ct.device(name)


def test_options_that_are_none() -> None:
    with pytest.raises(ct.DeviceError, match="cpu: unknown option among minimum"):
        ct.device("cpu", minimum=True)
    with pytest.raises(
        ct.DeviceError, match="pool: expected one of reuse, exact, clear, poison, got 'x'"
    ):
        ct.device("cpu", pool="x")
    with pytest.raises(ct.DeviceError, match="name the device that pool is meant for"):
        ct.device(pool="exact")


@pytest.mark.devices("webgpu")
def test_adapters_by_index_and_word(device: ct.Device) -> None:
    from centella.backends.webgpu.adapter import adapters

    word = str(device.describe()["name"]).split()[0].strip("()")
    assert ct.device(f"webgpu:{word.lower()}").describe()["name"] == device.describe()["name"]
    with pytest.raises(ct.DeviceError, match=r"one of webgpu:0 \(.+\).*, got webgpu:nonesuch$"):
        ct.device("webgpu:nonesuch")
    for number in (*range(len(adapters()), 33), 99):  # digits of a version are no number either
        with pytest.raises(ct.DeviceError, match=rf"got webgpu:{number}$"):
            ct.device(f"webgpu:{number}")


def test_the_environment_names_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CENTELLA_DEVICE", "simulator")
    assert ct.device().name == "simulator"
    assert ct.asarray([1.0]).device is ct.device("simulator")
    monkeypatch.setenv("CENTELLA_DEVICE", "nonesuch")
    with pytest.raises(ct.DeviceError, match="CENTELLA_DEVICE=nonesuch: unknown device 'nonesuch'"):
        ct.device()


def test_the_default_is_chosen_once_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CENTELLA_DEVICE", raising=False)
    monkeypatch.setattr(MODULE, "_default", None)
    with caplog.at_level(logging.INFO, "centella"):
        first = ct.device()
        assert ct.device() is first
    lines = [r.message for r in caplog.records if "default device" in r.message]
    assert len(lines) == 1
    assert lines[0].startswith(f"default device {first.name}: ")


def test_a_software_adapter_is_taken_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    webgpu = pytest.importorskip("centella.backends.webgpu")
    monkeypatch.delenv("CENTELLA_DEVICE", raising=False)

    def no_cuda(kind: str) -> Any:
        if kind == "cuda":
            raise ct.DeviceError("no driver")
        return original(kind)

    original = opening.class_of
    monkeypatch.setattr(opening, "class_of", no_cuda)
    monkeypatch.setattr(MODULE, "_opened", {})
    monkeypatch.setattr(webgpu, "is_software", lambda adapter: True)
    chosen, why = opening.choose(ct.device)
    assert (chosen.name, why) == ("cpu", "cuda: no driver; no hardware WebGPU adapter")
    if webgpu.adapters():
        monkeypatch.setattr(webgpu, "is_software", lambda adapter: False)
        assert opening.choose(ct.device)[0].name.startswith("webgpu:")


def test_describe(device: ct.Device) -> None:
    about = device.describe()
    assert about["device"] == device.name.partition(":")[0]
    assert about["name"]


def test_the_names_of_devices_open_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ct.devices()
    assert names[-1] == "cpu"
    for name in names:
        assert str(ct.device(name).describe()["device"]) == name.partition(":")[0]

    def listed(kind: str) -> list[dict[str, Any]]:
        if kind == "cuda":
            raise ct.MissingExtraError("cuda-core", "cuda12")
        return [{"open_with": "webgpu:0"}, {"open_with": "webgpu:1"}]

    monkeypatch.setattr(MODULE, "listed", listed)
    assert ct.devices() == ["webgpu:0", "webgpu:1", "cpu"]


# -- memory ---------------------------------------------------------------------------------------


class Counting:
    """A backend that only counts memory."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.caps = ct.device("simulator").caps
        self.room = room
        self.given = 0

    def allocate(self, nbytes: int) -> Any:
        if self.given + nbytes > self.room:
            raise ct.OutOfMemoryError(f"no room for {nbytes}")
        self.given += nbytes
        return np.zeros(nbytes, np.uint8)

    def free(self, native: Array) -> None:
        self.given -= native.nbytes

    def write(self, buffer: Buffer, data: Array) -> None:
        buffer.native[: data.nbytes] = data


def pool_of(backend: Counting, mode: str = "reuse", budget: int | None = None) -> Pool:
    whole: Backend = backend  # type: ignore[assignment]  # the part of one that a pool needs
    return Pool(whole, mode, budget)


def test_size_classes() -> None:
    for nbytes in (0, 1, 255, 256, 257, 4096, 4097, 5000, 1 << 20, (1 << 20) + 1, 10**9):
        size = size_class(nbytes)
        assert size >= max(nbytes, 256)
        assert size % 256 == 0
        assert size <= max(256, nbytes + 255, nbytes * 1.25)
        assert size_class(size) == size


def test_a_pool_reuses_by_class() -> None:
    backend = Counting()
    pool = pool_of(backend)
    a, b = pool.allocate(1000), pool.allocate(1000)
    first, second = a.native, b.native
    assert (pool.live, pool.held, backend.given) == (2048, 2048, 2048)
    del a
    c = pool.allocate(900)
    assert c.native is first
    assert pool.allocate(2000).native is not second
    del b, c
    pool.trim()
    assert (pool.live, pool.held, backend.given) == (0, 0, 0)


def test_an_exact_pool_keeps_nothing() -> None:
    backend = Counting()
    pool = pool_of(backend, "exact")
    a = pool.allocate(1001)
    assert (a.nbytes, backend.given) == (1008, 1008)
    del a
    b = pool.allocate(0)
    assert backend.given == b.nbytes == 16


def test_a_poisoned_pool() -> None:
    pool = pool_of(Counting(), "poison")
    a = pool.allocate(100)
    assert (a.native == 0xFF).all()
    a.native[:] = 1
    first = a.native
    del a
    b = pool.allocate(100)
    assert b.native is first
    assert np.isnan(b.native.view(np.float32)).all()


def test_a_full_pool_gives_back_what_is_free_first() -> None:
    for budget, room in ((3000, 1 << 40), (None, 3000)):
        pool = pool_of(Counting(room), "reuse", budget)
        a = pool.allocate(1024)
        b = pool.allocate(1024)
        with pytest.raises(ct.OutOfMemoryError):
            pool.allocate(2048)
        del b
        c = pool.allocate(1500)  # the free 1024 bytes go back to the driver
        assert (pool.held, pool.live) == (1024 + 1536, 1024 + 1536)
        with pytest.raises(ct.OutOfMemoryError):
            pool.allocate(2048)
        del a, c


def test_a_pool_serves_many_threads() -> None:
    pool = pool_of(Counting())

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        mine = []
        for _ in range(300):
            mine.append(pool.allocate(int(rng.integers(1, 5000))))
            mine[-1].native[:] = seed
            if len(mine) > 5:
                kept = mine.pop(int(rng.integers(len(mine))))
                assert (kept.native == seed).all()

    with ThreadPoolExecutor(8) as workers:
        list(workers.map(work, range(8)))
    pool.drain()
    assert pool.live == 0


@pytest.mark.parametrize("mode", ["exact", "poison", "reuse"])
@pytest.mark.devices("cpu", "simulator", "webgpu")
def test_pool_modes(device: ct.Device, mode: str) -> None:
    where = own(device, pool=mode)
    for _ in range(2):
        x = ct.asarray(X, device=where)
        np.testing.assert_array_equal((ct.relu(x).T @ x).numpy(), np.maximum(X, 0).T @ X)
        if mode == "poison":
            assert np.isnan(ct.empty((3, 5), device=where).numpy()).all()
            half = ct.asarray(np.ones((3, 5), np.float16), device=where)
            assert half.native[1] % 256 == 0
            np.testing.assert_array_equal((half + half).numpy(), np.full((3, 5), 2))


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("1GB", 10**9), ("1.5 gb", 1_500_000_000), ("512 MiB", 512 << 20), ("2KiB", 2048),
        ("3 T", 3 * 10**12), ("4096", 4096), ("4096 B", 4096), (1 << 20, 1 << 20), (None, None),
    ],
)  # fmt: skip
def test_a_memory_limit_may_be_a_text(said: Any, count: int | None) -> None:
    assert ct.device("simulator", pool="reuse", memory_limit=said).memory.budget == count


def test_options_are_checked_before_a_device_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    module = sys.modules["centella.runtime.device"]  # `ct.device` is the function
    monkeypatch.setattr(module, "open_backend", lambda name, *_: opened.append(name))
    for wrong in ("1 XB", "GB", "-1", -1, 0, "0", True, 1.5, [1], "1e9 GB"):
        with pytest.raises(ct.DeviceError, match=r"memory_limit= in bytes, .* such as '1\.5 GB'"):
            ct.device("simulator", memory_limit=wrong)
    with pytest.raises(ct.DeviceError, match="expected a PipelineCache as cache=, got 'x'"):
        ct.device("simulator", cache="x")
    assert not opened


def test_memory_of_a_device() -> None:
    device = ct.device("simulator", pool="reuse", memory_limit=1 << 20)
    assert device.memory == Memory(0, 0, 0, 1 << 20, None, None)
    x = ct.zeros(1000, device=device) + 1.0
    x.numpy()
    y = x * 2.0
    y.numpy()
    assert device.memory.live == 2 * 4096


# -- threads --------------------------------------------------------------------------------------


@pytest.mark.devices("cpu", "simulator", "webgpu")
def test_nothing_is_in_use_on_a_closed_device(device: ct.Device) -> None:
    own = ct.device(device.name.partition(":")[0], pool="reuse")
    x = ct.asarray(X, device=own) + 1.0
    x.numpy()
    assert own.memory.live
    own.close()
    del x
    own.executor.let_go()
    assert (own.memory.live, own.memory.held) == (0, 0)


def test_a_device_of_one_thread_is_used_in_another(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    np.testing.assert_array_equal(elsewhere(lambda: ct.relu(x).numpy()), np.maximum(X, 0))


def test_a_value_outlives_the_thread_that_recorded_it(device: ct.Device) -> None:
    y = elsewhere(lambda: ct.asarray(X, device=device) + 1.0)
    np.testing.assert_array_equal(y.numpy(), X + 1)


# -- pending results ------------------------------------------------------------------------------


def test_pending(device: ct.Device) -> None:
    y = ct.asarray(X, device=device) + 1.0
    pending = ct.fetch(y)
    np.testing.assert_array_equal(pending.result(timeout=30)[0], X + 1)
    assert pending.done()
    assert repr(pending) == "<Pending, done>"
    assert pending.result() is pending.result(0)


class Gate:
    """Holds the CPU's worker until it is opened."""

    def __init__(self, device: ct.Device) -> None:
        self._event = threading.Event()
        device.backend._worker.submit(self._event.wait, 20)  # type: ignore[attr-defined]

    def open(self) -> None:
        self._event.set()


def test_a_result_that_is_late() -> None:
    device = ct.device("cpu", pool="reuse")
    y = ct.asarray(X, device=device) + 1.0
    gate = Gate(device)
    pending = ct.fetch(y)  # does not block
    assert not pending.done()
    assert repr(pending) == "<Pending, under way>"
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match=f"not done after {timeout}"):
            pending.result(timeout)
    gate.open()
    np.testing.assert_array_equal(pending.result(20)[0], X + 1)


@pytest.mark.parametrize("side", [3, 1024], ids=["small", "shared"])
def test_the_cpu_computes_while_the_process_ends(side: int) -> None:
    """In `atexit`, and in a thread that goes on after the main one."""
    code = f"""
import atexit, threading, numpy as np, centella as ct
x = ct.asarray(np.ones(({side}, {side}), np.float32), device="cpu")
def total(): print(int(((x + 1) * 2).numpy().sum()))
def late(): threading.main_thread().join(); total()
total()
threading.Thread(target=late).start()
atexit.register(total)
"""
    ends(code, f"{4 * side * side}\n" * 3)


def test_the_cpu_is_opened_while_the_process_ends() -> None:
    code = """
import atexit, numpy as np, centella as ct
def total():
    x = ct.asarray(np.ones((1024, 1024), np.float32), device="cpu")
    print(int(((x + 1) * 2).numpy().sum()))
atexit.register(total)
"""
    ends(code, "4194304\n")


def test_execute_does_not_block_on_the_cpu() -> None:
    device = ct.device("cpu", pool="reuse")
    gate = Gate(device)
    batch = device.batch()
    y = batch.relu(batch.upload(X))
    pending = batch.execute()
    assert not pending.done()
    gate.open()
    assert pending.result(20) is None
    np.testing.assert_array_equal(y.numpy(), np.maximum(X, 0))


def test_results_of_several_devices_are_late() -> None:
    devices = [ct.device("cpu", pool="reuse") for _ in range(3)]
    tensors = [ct.asarray(X, device=d) + 1.0 for d in devices]
    gates = [Gate(d) for d in devices]
    pending = ct.fetch(*tensors)
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        pending.result(0.01)
    for gate in gates:
        gate.open()
    np.testing.assert_array_equal(pending.result(20), [X + 1] * 3)


def test_one_timeout_for_all_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: each of three takes 60 ms, in all there are 100."""
    now, given = [0.0], []
    monkeypatch.setattr("centella.runtime.pending.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Takes60Ms:
        def done(self) -> bool:
            return False

        def wait(self, timeout: float) -> None:
            given.append(timeout)
            now[0] += min(timeout, 0.06)
            if timeout < 0.06:
                raise TimeoutError

    tickets: list[Any] = [Takes60Ms() for _ in range(3)]
    pending = ct.Pending(tickets, lambda: "the result")
    with pytest.raises(TimeoutError, match=r"not done after 0\.1 s"):
        pending.result(0.1)
    assert given == pytest.approx([0.1, 0.04])
    assert pending.result(1.0) == "the result"


def test_waiting_threads_do_not_hold_each_other_up(device: ct.Device) -> None:
    pending = ct.fetch(ct.asarray(X, device=device) + 1.0)
    with ThreadPoolExecutor(4) as workers:
        results = [f.result() for f in [workers.submit(pending.result) for _ in range(8)]]
    assert all(r is results[0] for r in results)


def test_await_lets_the_loop_run() -> None:
    device = ct.device("cpu", pool="reuse")

    async def main() -> tuple[Array, bool]:
        y = ct.asarray(X, device=device) + 1.0
        gate = Gate(device)
        pending = ct.fetch(y)

        async def heart() -> None:
            for _ in range(10):
                await asyncio.sleep(0.002)
            gate.open()  # were the loop blocked, the result would come when the gate gives up

        beating = asyncio.create_task(heart())
        (result,) = await pending
        return result, beating.done()

    result, ten_beats = asyncio.run(main())
    np.testing.assert_array_equal(result, X + 1)
    assert ten_beats is True


def test_await_on_every_device(device: ct.Device) -> None:
    async def main() -> tuple[list[Array], None]:
        batch = device.batch()
        y = batch.relu(batch.upload(X))
        nothing = await batch.execute()
        return await ct.fetch(y, y.T), nothing

    for _ in range(2):
        (a, b), nothing = asyncio.run(main())
        assert nothing is None
        np.testing.assert_array_equal(a.T, b)


@pytest.mark.devices("cpu", "webgpu")
def test_a_cancelled_await_leaves_the_device_usable(device: ct.Device) -> None:
    where = own(device)
    y = ct.asarray(np.ones((256, 256), np.float32), device=where)

    async def main() -> None:
        z = y
        for _ in range(20):
            z = z @ y * (1 / 256)
        gate = Gate(where) if where.name == "cpu" else None
        waiting = asyncio.ensure_future(_wait(ct.fetch(z)))
        await asyncio.sleep(0)  # it has begun to wait
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        if gate is not None:
            gate.open()
        (again,) = await ct.fetch(y + 1.0)
        np.testing.assert_array_equal(again, 2)

    asyncio.run(main())
    np.testing.assert_array_equal((y * 3.0).numpy(), 3)


async def _wait(pending: ct.Pending[list[Array]]) -> list[Array]:
    return await pending


@pytest.mark.alone
@pytest.mark.devices("webgpu")
def test_done_does_not_wait_for_a_waiting_thread(device: ct.Device) -> None:
    """A call that waited would take all the time that there is, in each of the tries.

    Other processes may hold one up now and then.
    """
    y = ct.asarray(np.ones((256, 256), np.float32), device=device)
    longest: list[float] = []  # call of each try, over the whole time
    while len(longest) < 20 and min(longest, default=1.0) >= 0.5:
        z = y
        for _ in range(40):
            z = z @ y * (1 / 256)
        pending = ct.fetch(z)
        thread = threading.Thread(target=pending.result)
        thread.start()
        begin = before = time.perf_counter()
        took: list[float] = []
        while not pending.done():
            now = time.perf_counter()
            took.append(now - before)
            time.sleep(0.001)
            before = time.perf_counter()
        thread.join()
        if len(took) > 3:
            longest.append(max(took) / (time.perf_counter() - begin))
        else:
            longest.append(1.0)
    assert min(longest) < 0.5, longest


# -- the end --------------------------------------------------------------------------------------

USE = """
import numpy as np, centella as ct
device = ct.device({name!r})
x = ct.asarray(np.ones((64, 64), np.float32), device=device)
y = x
for _ in range(20):
    y = y @ x * (1 / 64)
print(float(y.numpy()[0, 0]))
pending = device.batch().execute()
with device.batch() as batch:
    z = ct.relu(y + 1.0)
lazy = z * 2.0
{end}
"""


@pytest.mark.parametrize("name", ["cpu", "simulator", "webgpu"])
@pytest.mark.parametrize("end", ["", "device.close()", "raise SystemExit(3)", "del device, x"])
def test_the_process_ends(name: str, end: str) -> None:
    if name == "webgpu":
        needs(name)
    if name != "cpu" and end not in ("", "device.close()"):
        pytest.skip("once is enough")
    ends(USE.format(name=name, end=end), "1.0\n", status=3 if "Exit" in end else 0)


THREADED = """
import threading, numpy as np, centella as ct
def work():
    x = ct.asarray(np.ones(1000, np.float32), device="cpu")
    for _ in range(100):
        x = x + 1.0
    x.numpy()
    lazy.append(x * 2.0)
lazy = []
threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
print(float(lazy[0].numpy()[0]))
print(threading.active_count())
"""


def test_the_worker_of_the_cpu_ends_with_the_process() -> None:
    ends(THREADED, "202.0\n2\n")


BUSY = """
import os, threading, numpy as np, centella as ct
x = ct.asarray(np.arange(4, dtype=np.float32), device="cpu")
stop = threading.Event()
def work():
    while not stop.is_set():
        assert (x + 1.0).native[0].size
        assert (x + 2.0).numpy()[0] == 2
threads = [threading.Thread(target=work) for _ in range(3)]
for t in threads: t.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit(0 if (x * 2.0).numpy().tolist() == [0, 2, 4, 6] else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for t in threads: t.join()
print("parent")
"""


CAPTURING = """
import os, signal, threading, numpy as np, centella as ct
x = ct.asarray(np.arange(4, dtype=np.float32), device="cpu")
busy, go = threading.Event(), threading.Event()
def hold():
    busy.set()
    go.wait()
@ct.jit
def twice(x):
    hold()
    return x * 2.0
@ct.kernel
def triple(x: ct.In[ct.f32], y: ct.Out[ct.f32]) -> None:
    hold()
    i = ct.lang.global_id()
    with ct.lang.if_(i < 4):
        y[i] = x[i] * 3.0
def tripled():
    y = ct.empty((4,), device="cpu")
    triple(x, y, threads=4)
    return y
for use, wanted in ((lambda: twice(x), [0, 2, 4, 6]), (tripled, [0, 3, 6, 9])):
    busy.clear()
    go.clear()
    thread = threading.Thread(target=use)
    thread.start()
    busy.wait()
    child = os.fork()
    go.set()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if use().numpy().tolist() == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0, wanted
    thread.join()
    assert use().numpy().tolist() == wanted
print("parent")
"""


INTERRUPTED = """
import os, signal, threading, centella as ct
devices = [ct.device("cpu"), ct.device("simulator")]
for device in devices:
    (ct.ones((3,), device=device) + 1.0).numpy()
backend, asked = devices[0].backend, []
before = backend.before_fork
def interrupted():
    asked.append(os.kill(os.getpid(), signal.SIGINT))
    for _ in range(100):
        before.__name__
    before()
backend.before_fork = interrupted
parent = os.getpid()
try:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    threading.Event().wait(5)
    raise SystemExit("no interrupt")
except KeyboardInterrupt:
    if os.getpid() != parent:  # the child has it too
        os._exit(0)
def use():
    for device in devices:
        assert (ct.ones((3,), device=device) + 1.0).numpy().tolist() == [2, 2, 2]
    print("parent", len(asked))
thread = threading.Thread(target=use, daemon=True)
thread.start()
thread.join(20)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_interrupt_of_a_fork_comes_after_it() -> None:
    """Python drops what a hook raises: the interrupt would be lost, and locks stay taken."""
    ends(INTERRUPTED, "parent 1\n", "-W", "ignore::DeprecationWarning")


INTERRUPTED_IN_LOGGING = """
import logging, os, signal, threading, centella as ct
ct.ones((3,), device="cpu").numpy()
class Lock:
    def __init__(self, lock):
        self.lock = lock
        self._at_fork_reinit = lock._at_fork_reinit
    def acquire(self):
        self.lock.acquire()
    def release(self):
        self.lock.release()
        if parent == os.getpid():
            os.kill(parent, signal.SIGINT)
            for _ in range(100):
                self.lock.__class__
own, parent = logging._lock, os.getpid()
logging._lock = Lock(own)
try:
    child = os.fork()
    if child == 0:
        os._exit(0)
    logging._lock = own
    os.waitpid(child, 0)
    threading.Event().wait(5)
    print("no interrupt")
except KeyboardInterrupt:
    print("interrupt")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_interrupt_of_the_hooks_of_logging_comes_after_the_fork() -> None:
    """Their exceptions are dropped like those of ours, and they run right before or after ours."""
    ends(INTERRUPTED_IN_LOGGING, "interrupt\n", "-W", "ignore::DeprecationWarning")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("code", [BUSY, CAPTURING], ids=["submit", "capture or trace"])
def test_fork_while_other_threads(code: str) -> None:
    ends(code, "parent\n", "-W", "ignore::DeprecationWarning")  # newer Pythons warn of threads


FORKED = """
import os, sys, numpy as np, centella as ct
name = {name!r}
advice = "GPU drivers do not survive a fork. Start processes by multiprocessing."
device = ct.device(name)
x = ct.asarray(np.arange(4, dtype=np.float32), device=device)
y = x + 1.0
computed = x * 3.0
with device.batch():
    running = ct.relu(computed)
child = os.fork()
if child == 0:
    try:
        if name == "cpu":
            assert y.numpy().tolist() == [1, 2, 3, 4]
            assert running.numpy().tolist() == [0, 3, 6, 9]
            assert (computed + x).numpy().tolist() == [0, 4, 8, 12]
        else:
            for use in (y.numpy, lambda: x + 1.0):
                try:
                    use()
                except ct.DeviceLostError as error:
                    assert "was lost: the process was forked; " + advice in str(error), error
                else:
                    raise AssertionError
            try:
                ct.device(name)
            except ct.DeviceError as error:
                assert f"had a {{name}} device open when it forked; " + advice in str(error), error
            else:
                raise AssertionError
        z = ct.asarray([1.0, 2.0], device="cpu") * 2.0
        assert z.numpy().tolist() == [2, 4]
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    sys.exit(0) if name == "cpu" else os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert y.numpy().tolist() == [1, 2, 3, 4]
assert running.numpy().tolist() == [0, 3, 6, 9]
print("parent")
"""


FOLLOWED = """
import multiprocessing, os, sys, numpy as np, centella as ct
def total(device):
    return float((ct.asarray(np.ones(4, np.float32), device=device) + 1.0).numpy().sum())
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as children:  # before the parent opens it
        print(children.apply(total, ("webgpu",)))
    print(total("webgpu"))
    with multiprocessing.get_context("forkserver").Pool(1) as children:
        print(children.apply(total, ("webgpu",)))
    with multiprocessing.get_context("spawn").Pool(1) as children:
        print(children.apply(total, ("webgpu",)))
    with multiprocessing.get_context("fork").Pool(1) as children:
        print(children.apply(total, ("cpu",)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_what_the_error_after_a_fork_advises_works(tmp_path: Path) -> None:
    needs("webgpu")
    script = tmp_path / "followed.py"
    script.write_text(FOLLOWED)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "8.0\n" * 5, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("name", ["cpu", "webgpu"])
def test_fork(name: str) -> None:
    needs(name)
    ends(FORKED.format(name=name), "parent\n", "-W", "ignore:This process:DeprecationWarning")
