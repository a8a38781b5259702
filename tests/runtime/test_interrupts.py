"""Ctrl-C: between the library's steps, once, with everything usable afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from centella.host import interrupts
from centella.host.interrupts import called_back, interruptible, uninterrupted
from centella.runtime import process_end
from centella.runtime.pipelines import PipelineCache
from tests.runtime.test_device import needs, python

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "number"), [("cpu", 200), ("webgpu", 100), ("simulator", 12)])
def test_interrupts_at_random_times(name: str, number: int) -> None:
    needs(name)
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.interrupts", name, str(number)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"{number} interrupts on {name}")


# -- when it is raised ----------------------------------------------------------------------------


@pytest.fixture
def guarded() -> Any:
    """Our handler, in the place of pytest's own process's."""
    before = interrupts.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, interrupts.DEFAULT)
    interrupts.guard()
    yield
    signal.signal(signal.SIGINT, before)


def steps(done: list[str], seconds: float = 0.02, number: int = signal.SIGINT) -> None:
    done.append("begun")
    signal.raise_signal(number)
    time.sleep(seconds)
    done.append("ended")


def long_steps(done: list[str]) -> None:
    steps(done, 20)


@uninterrupted
def section(done: list[str], inside: Any = steps) -> None:
    inside(done)


@interruptible
def callback(done: list[str]) -> None:
    steps(done)


@called_back
def of_a_driver(done: list[str], inside: Any = section) -> None:
    """What it raises is lost."""
    try:
        inside(done)
    except KeyboardInterrupt:
        done.append("lost")


class Watched:
    pass


def after(call: Any, *args: Any) -> None:
    """A call, and what comes soon after it."""
    with pytest.raises(KeyboardInterrupt):  # it comes a millisecond late
        call(*args)
        time.sleep(5)


@pytest.mark.usefixtures("guarded")
def test_a_section_is_not_interrupted_and_what_it_calls_back_is() -> None:
    for call, inside, wanted in (
        (steps, (), ["begun"]),
        (section, (), ["begun", "ended"]),
        (section, (callback,), ["begun"]),
    ):
        done: list[str] = []
        after(call, done, *inside)
        assert done == wanted, call
        time.sleep(0.01)  # and no second one comes


@pytest.mark.parametrize("longest", [10, 0.005])
@pytest.mark.usefixtures("guarded")
def test_a_finalizer_is_not_interrupted(monkeypatch: pytest.MonkeyPatch, longest: float) -> None:
    monkeypatch.setattr(interrupts, "LONGEST", longest)
    done: list[str] = []

    class Freed:
        def __del__(self) -> None:
            steps(done)

    after(Freed)
    assert done == ["begun", "ended"]
    done.clear()
    watched = [Watched()]
    weakref.finalize(watched[0], steps, done)
    after(watched.clear)
    assert done == ["begun", "ended"]


@pytest.mark.parametrize("longest", [10, 0.005])
@pytest.mark.parametrize("inside", [section, callback, steps])
@pytest.mark.usefixtures("guarded")
def test_a_callback_of_a_driver_is_not_interrupted(
    monkeypatch: pytest.MonkeyPatch, inside: Any, longest: float
) -> None:
    monkeypatch.setattr(interrupts, "LONGEST", longest)
    done: list[str] = []
    after(of_a_driver, done, inside)
    assert done == ["begun", "ended"]
    time.sleep(0.01)  # and no second one comes


@pytest.mark.usefixtures("guarded")
def test_a_signal_whose_handler_raises_waits_for_a_callback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "LONGEST", 0.005)
    before = signal.getsignal(signal.SIGTERM)

    def leave(number: int, frame: Any) -> None:
        if not interrupts.raise_later(number, frame):
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    done: list[str] = []
    try:
        after(of_a_driver, done, partial(steps, number=signal.SIGTERM))
        assert done == ["begun", "ended"]
        done.clear()
        after(section, done, partial(steps, seconds=20, number=signal.SIGTERM))
        assert done == ["begun"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("guarded")
def test_a_section_that_lasts_too_long_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "LONGEST", 0.01)
    done: list[str] = []
    after(section, done, long_steps)
    assert done == ["begun"]


@pytest.mark.usefixtures("guarded")
def test_an_overdue_interrupt_that_another_handler_takes_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "LONGEST", 0.01)
    ours, taken = interrupts.getsignal(signal.SIGINT), []

    @uninterrupted
    def outlasted() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda number, _: taken.append(number))
        time.sleep(0.1)
        signal.signal(signal.SIGINT, ours)

    outlasted()
    assert taken == [signal.SIGINT]
    monkeypatch.undo()
    done: list[str] = []
    after(section, done)
    assert done == ["begun", "ended"]


@pytest.mark.usefixtures("guarded")
def test_long_work_in_a_section_asks_at_its_checkpoints() -> None:
    done: list[str] = []

    @uninterrupted
    def long() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("one")
        interrupts.checkpoint()
        done.append("two")

    after(long)
    assert done == ["one"]


@pytest.mark.usefixtures("guarded")
def test_an_interrupt_that_waits_has_no_further_program_compiled() -> None:
    cache = PipelineCache()
    done: list[str] = []

    @uninterrupted
    def compile_all() -> None:
        for name in ("one", "two"):
            cache.get(0, name, name, lambda name=name: done.append(name))
            signal.raise_signal(signal.SIGINT)

    after(compile_all)
    assert done == ["one"] and cache.names() == ["one"]


@pytest.mark.usefixtures("guarded")
def test_a_second_interrupt_at_the_end_of_the_process_ends_the_wait_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Busy:
        lock = threading.Lock()

    left: list[Any] = []

    def executors() -> list[Any]:
        signal.raise_signal(signal.SIGINT)
        return [Busy, Busy]

    def leave(busy: list[Any]) -> None:
        signal.raise_signal(signal.SIGINT)
        left.extend(busy)

    monkeypatch.setattr(process_end, "_leave_as_it_is", leave)
    begin = time.monotonic()
    with Busy.lock, pytest.raises(KeyboardInterrupt):
        process_end._end(executors)
        time.sleep(5)  # nothing else is here: an interrupt behind a failure would end pytest
    assert left == [Busy, Busy] and time.monotonic() - begin < 1


@pytest.mark.usefixtures("guarded")
def test_a_signal_that_ends_no_wait_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes just before the main thread waits in a system call does not end the wait."""
    lock = threading.Lock()
    sent: list[int] = []
    send = signal.pthread_kill

    def lose_the_first(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            send(thread, number)

    @interruptible
    def wait() -> None:
        lock.acquire(timeout=10)

    @uninterrupted
    def section() -> None:
        signal.raise_signal(signal.SIGINT)
        wait()

    monkeypatch.setattr(signal, "pthread_kill", lose_the_first)
    begin = time.monotonic()
    with lock, pytest.raises(KeyboardInterrupt):
        section()
    assert len(sent) >= 2 and time.monotonic() - begin < 5


def test_a_handler_of_the_application_stays() -> None:
    code = """
import signal, numpy as np, centella as ct
def mine(*_): print("mine")
signal.signal(signal.SIGINT, mine)
(ct.asarray(np.ones(4, np.float32), device="cpu") + 1.0).numpy()
signal.raise_signal(signal.SIGINT)
assert signal.getsignal(signal.SIGINT) is mine
"""
    run = python(code)
    assert (run.returncode, run.stdout, run.stderr) == (0, "mine\n", "")


def test_who_puts_the_default_handler_back_has_it_replaced_again() -> None:
    """As a notebook does before each cell."""
    code = """
import signal
default = signal.default_int_handler
import numpy as np, centella as ct
x = ct.asarray(np.ones(4, np.float32), device="cpu")
assert signal.getsignal(signal.SIGINT) is not default
signal.signal(signal.SIGINT, default)
y = x + 1.0
assert signal.getsignal(signal.SIGINT) is not default
"""
    run = python(code)
    assert (run.returncode, run.stderr) == (0, "")


def test_asyncio_cancels_its_task_as_ever() -> None:
    code = """
import asyncio, os, signal, numpy as np, centella as ct
x = ct.asarray(np.ones(4, np.float32), device="cpu")
async def task():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(20)
    except asyncio.CancelledError:
        print("cancelled", (await ct.fetch(x + 1.0))[0].tolist())
        raise
try:
    asyncio.run(task())
except KeyboardInterrupt:
    print("interrupted", (x + 2.0).numpy().tolist())
"""
    run = python(code)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "cancelled [2.0, 2.0, 2.0, 2.0]\ninterrupted [3.0, 3.0, 3.0, 3.0]\n"


LOOP = """
import os, signal, threading, time, numpy as np, centella as ct
device = ct.device({name!r})
x = ct.asarray(np.ones((384, 384), np.float32), device=device)
(x @ x).numpy()
results, sent = [], []
def once():
    {once}
begin = time.perf_counter()
for _ in range(5):
    once()
rounds = int(20 / (time.perf_counter() - begin)) * 5  # for 20 s
def send():
    time.sleep(0.1)
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=send).start()
try:
    for _ in range(rounds):
        once()
    print("none came")
except KeyboardInterrupt:
    took = time.perf_counter() - sent[0]
    assert took < 1, took
    assert (x @ x).numpy()[0, 0] == 384
    print("on")
"""
SUBMITTED = {
    "a batch": """
    with device.batch():
        results.append(x @ x)
""",
    "a batch that is executed": """
    batch = device.batch()
    y = batch.matmul(x, x)
    batch.execute()
""",
    "a read": "ct.fetch(x @ x)",
    "an upload": "ct.asarray(np.ones((3000, 3000), np.float32), device=device)",
}


@pytest.mark.parametrize("once", SUBMITTED)
def test_a_loop_that_only_submits_is_interrupted(once: str) -> None:
    """It hardly ever is outside a section."""
    needs("webgpu")
    run = python(LOOP.format(name="webgpu", once=SUBMITTED[once]))
    assert (run.returncode, run.stdout, run.stderr) == (0, "on\n", "")


# -- work of the CPU ------------------------------------------------------------------------------

QUEUED = """
import os, signal, sys, threading, time, numpy as np, centella as ct
device = ct.device("cpu")
x = ct.asarray(np.ones((1500, 1500), np.float32), device=device)
small = ct.asarray(np.ones(4, np.float32), device=device)
(x @ x).numpy()
begin = time.perf_counter()
(x @ x).numpy()
one = time.perf_counter() - begin
state = ct.State(np.ones((4,), np.float32), device=device)
products = []
for _ in range(200):
    with device.batch():
        products.append(x @ x)
y = small + 1.0
state.assign(y)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    y.numpy()
except KeyboardInterrupt:
    begin = time.perf_counter()
    assert (small * 2.0).numpy().tolist() == [2, 2, 2, 2]
    took = time.perf_counter() - begin
assert took < 1 + 4 * one, (took, one)
for lost in (products[-1], y, state):
    try:
        lost.numpy()
    except ct.DeviceError as error:
        assert "dropped, by Ctrl-C" in str(error), error
    else:
        raise AssertionError
state.assign(small)
assert state.numpy().tolist() == [1, 1, 1, 1]
assert products[0].numpy()[0, 0] == 1500
"""


def test_what_is_queued_on_the_cpu_is_dropped() -> None:
    run = python(QUEUED)
    assert (run.returncode, run.stderr) == (0, "")


SHORT = """
import os, signal, time, numpy as np, centella as ct
x = ct.asarray(np.ones((64, 64), np.float32), device="cpu")
state = ct.State(np.zeros((64, 64), np.float32), device="cpu")
try:
    with ct.device("cpu").batch():
        y = x @ x
        state.assign(y)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    assert y.numpy()[0, 0] == 64 and state.numpy()[0, 0] == 64
"""


def test_what_is_soon_done_on_the_cpu_is_done() -> None:
    run = python(SHORT)
    assert (run.returncode, run.stderr) == (0, "")


ENDLESS = """
import os, signal, threading, numpy as np, centella as ct
x = ct.asarray(np.ones((4,), np.float32), device={name!r})
x.numpy()
@ct.kernel(workgroup=4)
def forever(x: ct.In[ct.f32], y: ct.Out[ct.f32]):
    i = ct.lang.global_id()
    with ct.lang.loop():
        y[i] = x[i]
        ct.lang.break_if(x[i] < 0.0)
y = ct.empty((4,), device={name!r})
forever(x, y, threads=4)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    y.numpy()
except KeyboardInterrupt:
    assert (x + 1.0).numpy().tolist() == [2, 2, 2, 2]
    print("on")
"""


@pytest.mark.parametrize("name", ["cpu", "simulator"])
def test_an_endless_kernel_is_interrupted(name: str) -> None:
    run = python(ENDLESS.format(name=name))
    assert (run.returncode, run.stdout, run.stderr) == (0, "on\n", "")
