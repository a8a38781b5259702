"""A CUDA submission under way."""

from __future__ import annotations

import threading
import time
from typing import Any

from centella.backends.base import Array, Times
from centella.backends.cuda.driver import check, driver
from centella.backends.cuda.memory import NOT_READY, CudaMemory, Pinned
from centella.backends.cuda.stamps import Stamps

PAUSE = 0.0005


class CudaTicket:
    """A submission under way: an event, and pinned memory of its read-backs and small uploads.

    It gives back what it has, whether it was waited for or its submission failed.

    Args:
        event: what marks its end.
        places: first byte and number of bytes of each read-back.

    Attributes:
        pinned: that memory; stamps: of its launches, where they are timed.
    """

    def __init__(self, backend: CudaMemory, event: Any, places: list[tuple[int, int]]) -> None:
        self._backend = backend
        self.event: Any = event
        self.pinned: Pinned | None = None
        self._places = places
        self.stamps: Stamps | None = None
        self._lock = threading.Lock()
        self._results: list[Array] | None = None

    def done(self) -> bool:
        """True once the device has finished it."""
        if self._results is not None:
            return True
        with self._backend.current():
            status = driver.cuEventQuery(self.event)[0]
        if status == NOT_READY:
            return False
        check((status,))
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished."""
        if self._results is not None:
            return
        # Outside the lock: others may wait less long.
        if timeout is not None:
            self._poll(timeout)
        with self._backend.current():
            check(driver.cuEventSynchronize(self.event))
        with self._lock:
            if self._results is not None:
                return
            results: list[Array] = []
            if self.pinned is not None:
                data = self.pinned.data
                results = [data[start : start + size].copy() for start, size in self._places]
                self._backend.return_pinned(self.pinned)
                self.pinned = None
            self._results = results

    def __del__(self) -> None:
        if self.pinned is None:
            self._backend.return_event(self.event)
        else:  # nobody has waited: the device may still use it
            self._backend.return_later(self.pinned, self.event)

    def _poll(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() >= end:
                raise TimeoutError(f"not done after {timeout} s")
            time.sleep(PAUSE)

    def data(self, index: int) -> Array:
        """Bytes of one read-back; a copy that the caller owns."""
        self.wait()
        assert self._results is not None
        return self._results[index]

    def times(self) -> Times | None:
        """Begin and end of each launch in ns since the first timed one."""
        self.wait()
        if self.stamps is None:
            return None
        with self._backend.current():
            return self.stamps.times()
