"""A WebGPU submission under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from centella.backends.base import Array, Times
from centella.backends.webgpu import raw
from centella.backends.webgpu.pace import Course
from centella.backends.webgpu.stamps import Stamps
from centella.errors import DeviceLostError
from centella.host.interrupts import uninterrupted

SPIN = 0.001  # seconds of waiting in which it is asked again and again, as near its end
PART, LONGEST = 1 / 256, 0.002  # later it sleeps for this part of the wait, and so much at most


class WebGpuTicket:
    """A submission under way; `staging` holds its read-backs, where it has any.

    Whoever waits asks the device again and again: a call that waits would keep other threads from
    submitting.

    Args:
        device: the wgpu device; it is the last that its queue has been given.
        nbytes: of the staging buffer that are used.
        places: first byte and number of bytes of each read-back, then of the time stamps.
        give_back: takes a staging buffer that is not mapped for the next read-back.
        course: is told when it is over.
        meanwhile: what whoever waits does first, if it is not done.
        check: raises where what came back is wrong.
    """

    def __init__(
        self, device: Any, staging: Any, nbytes: int, places: list[tuple[int, int]],
        give_back: Callable[[Any], None], stamps: Stamps | None = None,
        course: Course | None = None, meanwhile: Callable[[], None] = lambda: None,
        check: Callable[[Sequence[Array]], None] | None = None,
    ) -> None:  # fmt: skip
        self._device = device
        self._staging = staging
        self._places = places
        self._give_back = give_back
        self._stamps = stamps
        self._course = course
        self._meanwhile = meanwhile
        self._check = check
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._asked = False
        self._landed: str | None = None  # what went wrong, or ""
        self._results: list[Array] | None = None
        if staging is None:
            self._asked = True
            raw.on_done(device.queue, self._land)

    def __del__(self) -> None:
        if not self._asked:  # what is copied there later comes later
            self._give_back(self._staging)

    def _land(self, failure: str) -> None:
        self._landed = failure
        if self._course is not None:
            self._course.end()

    @uninterrupted
    def done(self) -> bool:
        """True once the device has finished it."""
        if not self._asked:
            with self._lock:
                if not self._asked:
                    self._asked = True
                    raw.map_read(self._staging, self._nbytes, self._land)
        if self._landed is None:
            raw.poll(self._device)
        return self._landed is not None

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished."""
        if not self.done():
            begin = time.perf_counter()
            self._meanwhile()
            if not self.done():
                with nullcontext() if self._course is None else self._course.watched:
                    self._watch(begin, timeout)
        self._take()

    @uninterrupted
    def _take(self) -> None:
        """Copy what came back, once."""
        with self._lock:
            if self._results is not None:
                return
            if self._landed:
                raise DeviceLostError(f"the device was lost while running: {self._landed}")
            if self._staging is None:
                self._results = []
                return
            whole = np.frombuffer(raw.mapped(self._staging, self._nbytes), np.uint8)
            self._results = [whole[s : s + n].copy() for s, n in self._places]
            raw.unmap(self._staging)
            self._give_back(self._staging)

    def _watch(self, begin: float, timeout: float | None) -> None:
        """Ask until it has finished."""
        while not self.done():
            waited = time.perf_counter() - begin
            if timeout is not None and waited >= timeout:
                raise TimeoutError(f"not done after {timeout} s")
            if waited > SPIN and not (self._course is not None and self._course.near()):
                time.sleep(min(waited * PART, LONGEST))

    def data(self, index: int) -> Array:
        """Bytes of one read-back; a copy that the caller owns.

        Raises:
            LimitError: the driver has stopped a loop before.
        """
        self.wait()
        assert self._results is not None
        if self._check is not None:
            self._check(self._results)
        return self._results[index]

    def times(self) -> Times | None:
        """Begin and end of each launch in ns of the device's clock."""
        if self._stamps is None:
            return None
        self.wait()
        assert self._results is not None
        return self._stamps.times(self._results[-1])


def finished(device: Any, patience: float) -> bool:
    """Wait until a device has done everything, and keep other threads from being called back.

    Returns:
        False where that took longer than `patience` seconds.
    """
    end = time.monotonic() + patience
    if not raw.gate.lock.acquire(timeout=patience):
        return False
    raw.gate.ending = True
    try:
        WebGpuTicket(device, None, 0, [], lambda _: None).wait(max(0.0, end - time.monotonic()))
    except TimeoutError:
        return False
    except DeviceLostError:
        pass
    finally:
        raw.gate.lock.release()
    return True
