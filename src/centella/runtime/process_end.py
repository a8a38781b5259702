"""The end of the process: what devices still do is waited for, and no other thread enters them.

After `atexit` Python ends each thread that asks for its lock, by unwinding its stack, where the
frames of a driver that calls back abort. Later `exit` destroys what a driver's own threads use as
long as they compile or compute: LLVM's tables, under a software adapter.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from collections.abc import Callable, Iterable

from centella.host.interrupts import interruptible, uninterrupted
from centella.runtime.executor import Executor

PATIENCE = 10.0  # seconds, of all devices together


def watch_end(executors: Callable[[], Iterable[Executor]]) -> None:
    """Do so for the devices that are open then, by their executors."""
    atexit.register(_end, executors)


@uninterrupted
def _end(executors: Callable[[], Iterable[Executor]]) -> None:
    end = time.monotonic() + PATIENCE
    busy = list(executors())
    try:
        busy = [one for one in busy if not _finished(one, end)]
    except KeyboardInterrupt:  # it ends the wait
        pass
    finally:
        if busy:
            _leave_as_it_is(busy)


@interruptible
def _finished(executor: Executor, end: float) -> bool:
    """Whether a device has finished; other threads that use it from now on end there."""
    if not executor.lock.acquire(timeout=max(0.0, end - time.monotonic())):
        return False
    try:
        executor.end()
        return executor.lost or executor.backend.finish(max(0.0, end - time.monotonic()))
    finally:
        executor.lock.release()


def _leave_as_it_is(busy: Iterable[Executor]) -> None:
    """Release no device that is busy, and end the process without what `exit` destroys."""
    for executor in busy:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(executor.backend))
    if os.name == "posix":
        process = ctypes.CDLL(None)
        process.fflush(None)
        if hasattr(process, "on_exit"):  # glibc's: what it is given last is called first
            process.on_exit(process._exit, None)  # with the process's own exit code
