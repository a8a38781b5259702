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

from centella.runtime.executor import Engine

PATIENCE = 10.0  # seconds, of all devices together


def watch_end(devices: Callable[[], Iterable[Engine]]) -> None:
    """Do so for the devices that are open then."""
    atexit.register(_end, devices)


def _end(devices: Callable[[], Iterable[Engine]]) -> None:
    end = time.monotonic() + PATIENCE
    busy = list(devices())
    try:
        busy = [one for one in busy if not _finished(one, end)]
    finally:  # also where Ctrl-C ends the wait
        if busy:
            _leave_as_it_is(busy)


def _finished(engine: Engine, end: float) -> bool:
    """Whether a device has finished; its lock is not given back: it is the main thread's alone."""
    if not engine.lock.acquire(timeout=max(0.0, end - time.monotonic())):
        return False
    return engine.lost or engine.backend.finish(max(0.0, end - time.monotonic()))


def _leave_as_it_is(busy: Iterable[Engine]) -> None:
    """Release no device that is busy, and end the process without what `exit` destroys."""
    for engine in busy:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine.backend))
    if os.name == "posix":
        process = ctypes.CDLL(None)
        process.fflush(None)
        if hasattr(process, "on_exit"):  # glibc's: what it is given last is called first
            process.on_exit(process._exit, None)  # with the process's own exit code


__all__ = ["watch_end"]
