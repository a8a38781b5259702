"""The end of the process, with work under way and threads that go on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.runtime.test_device import ends, needs

COLD = """
import os
os.environ["MESA_SHADER_CACHE_DISABLE"] = "1"
import numpy as np, centella as ct
{before}
w = [ct.asarray(np.ones((64, 64), np.float32), device="webgpu") for _ in range(60)]
@ct.jit
def chain(x):
    for each in w:
        x = ct.linear(x, each)
    return x
y = chain(ct.asarray(np.ones((4, 64), np.float32), device="webgpu"))
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3)])
def test_what_a_driver_still_compiles_is_waited_for(end: str, code: int) -> None:
    needs("webgpu")
    ends(COLD.format(before="", end=end), "", status=code)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's `exit` runs beside other threads")
@pytest.mark.parametrize(("end", "code"), [("print('end')", 0), ("raise SystemExit(3)", 3)])
def test_what_takes_too_long_is_left_and_the_exit_code_stays(end: str, code: int) -> None:
    needs("webgpu")
    before = "from centella.runtime import process_end; process_end.PATIENCE = 0.0"
    ends(COLD.format(before=before, end=end), "" if code else "end\n", status=code)


DAEMONS = """
import threading, time, numpy as np, centella as ct
embedder = ct.load({folder!r}, device={name!r})
embedder.encode(["one"])
@ct.jit
def step(x):
    return ct.relu(x) * 2.0
turns = [0, 0, 0]
def encode(index):
    while True:
        embedder.encode(["one text", "another"])
        turns[index] += 1
def compute():
    while True:
        step(ct.asarray(np.ones((8, 8), np.float32), device={name!r})).numpy()
        turns[2] += 1
for target, args in ((encode, (0,)), (encode, (1,)), (compute, ())):
    threading.Thread(target=target, args=args, daemon=True).start()
while not all(turns):
    time.sleep(0.01)
raise SystemExit(5)
"""


@pytest.mark.parametrize("name", ["cpu", "webgpu"])
def test_daemon_threads_do_not_disturb_the_end(name: str) -> None:
    """Three times: each is a race."""
    needs(name)
    folder = str(Path(__file__).parents[1] / "data" / "tiny-bert")
    for _ in range(3):
        ends(DAEMONS.format(name=name, folder=folder), "", status=5)


ENDLESS = """
import numpy as np, centella as ct
from centella.runtime import process_end
process_end.PATIENCE = 0.2
@ct.kernel(workgroup=4)
def forever(x: ct.InOut[ct.f32]):
    i = ct.lang.global_id()
    with ct.lang.loop():
        x[i] = x[i] + 1.0
        ct.lang.break_if(x[i] < 0.0)
state = ct.State(np.zeros((4,), np.float32), device="cpu")
forever(state, threads=4)
ct.device("cpu").batch().execute()
pending = ct.fetch(state.value)
print("end")
"""


def test_an_endless_kernel_on_the_cpu_does_not_keep_the_process() -> None:
    ends(ENDLESS, "end\n")


JOINED = """
import atexit, threading, time, numpy as np
stop, running = threading.Event(), threading.Event()
def work():
    import centella as ct
    x = ct.asarray(np.ones(4, np.float32), device={name!r})
    while not stop.is_set():
        (x + 1.0).numpy()
        running.set()
thread = threading.Thread(target=work, daemon=True)
def leave():
    stop.set()
    thread.join()
    print("joined")
atexit.register(leave)  # before the first device is opened: it runs after our own
thread.start()
running.wait()
"""


@pytest.mark.parametrize("name", ["cpu", "webgpu"])
def test_a_thread_that_is_joined_as_the_process_ends(name: str) -> None:
    needs(name)
    for _ in range(3):
        ends(JOINED.format(name=name), "joined\n")
