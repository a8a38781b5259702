"""A WebGPU submission under way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from centella.backends.webgpu.stamps import Stamps
from centella.errors import DeviceLostError
from centella.submission import Array, Times


class WebGpuTicket:
    """A submission under way; `staging` holds its read-backs, or 4 bytes that mark its end.

    Args:
        places: first byte and number of bytes of each read-back, then of the time stamps.
        queue_lock: guards the device's queue.
        give_back: takes a staging buffer that is not mapped for the next read-back.
    """

    def __init__(
        self, staging: Any, places: list[tuple[int, int]], queue_lock: threading.RLock,
        give_back: Callable[[Any], None], stamps: Stamps | None = None,
    ) -> None:  # fmt: skip
        self._staging = staging
        self._places = places
        self._queue_lock = queue_lock
        self._give_back = give_back
        self._stamps = stamps
        self._promise: Any = None
        self._lock = threading.Lock()
        self._results: list[Array] | None = None
        if places:
            self._map()

    def __del__(self) -> None:
        if self._promise is None:  # nobody asked: what is copied there later comes later
            self._give_back(self._staging)

    def _map(self) -> Any:
        if self._promise is None:
            # A promise made under a running event loop would resolve itself there as well.
            hooks = sys.get_asyncgen_hooks()
            sys.set_asyncgen_hooks(None, None)
            try:
                with self._queue_lock:
                    self._promise = self._staging.map_async("READ_NOSYNC")
            finally:
                sys.set_asyncgen_hooks(*hooks)
        return self._promise

    def done(self) -> bool:
        """True once the device has finished it."""
        if self._results is not None:
            return True
        with self._lock:
            promise = self._map()
        return bool(promise._thread_event.is_set())

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished."""
        with self._lock:
            if self._results is not None:
                return
            promise = self._map()
        # Outside the lock: others may ask `done`, or wait less long.
        if not promise._thread_event.wait(timeout):
            raise TimeoutError(f"not done after {timeout} s")
        with self._lock:
            if self._results is not None:
                return
            try:
                promise.sync_wait()
                mapped = self._staging.read_mapped(copy=False)
            except Exception as error:
                raise DeviceLostError(f"the device was lost while running: {error}") from error
            whole = np.frombuffer(mapped, np.uint8)
            self._results = [whole[s : s + n].copy() for s, n in self._places]
            del whole, mapped
            self._staging.unmap()
            self._give_back(self._staging)

    def data(self, index: int) -> Array:
        """Bytes of one read-back; a copy that the caller owns."""
        self.wait()
        assert self._results is not None
        return self._results[index]

    def times(self) -> Times | None:
        """Begin and end of each launch in ns of the device's clock."""
        return None if self._stamps is None else self._stamps.times(self.data(-1))
