"""Device memory as free lists by size.

Freed memory is reused at once: everything on a device runs in submission order, so whoever gets
the memory next runs after whoever had it last. Buffers come back through a queue that finalizers
only append to.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

import numpy as np

from centella.ledger import count
from centella.submission import Backend, Buffer
from centella.errors import LimitError, OutOfMemoryError

MODES = ("reuse", "exact", "poison")


def size_class(nbytes: int) -> int:
    """Bytes actually allocated: multiples of 256 up to 4 KB, then quarters of powers of two."""
    if nbytes <= 4096:
        return max(256, -(-nbytes // 256) * 256)
    unit = 1 << (nbytes.bit_length() - 3)
    return -(-nbytes // unit) * unit


class Pool:
    """Allocations of one device.

    Modes: "reuse" (default); "exact" (sizes as asked, nothing reused: for memory checkers);
    "poison" (every allocation is filled with NaN: for tests).
    """

    def __init__(self, backend: Backend, mode: str = "reuse", budget: int | None = None) -> None:
        if mode not in MODES:
            raise ValueError(f"pool: expected one of {', '.join(MODES)}, got {mode!r}")
        self._backend = backend
        self._mode = mode
        self._budget = budget
        self._free: dict[int, list[Any]] = defaultdict(list)
        self._returned: deque[tuple[Any, int]] = deque()
        self._lock = threading.Lock()
        self.held = 0
        self.live = 0

    def release(self, native: Any, nbytes: int) -> None:
        """Take memory back; safe in a finalizer."""
        self._returned.append((native, nbytes))

    def _drain(self) -> None:
        while self._returned:
            try:
                native, nbytes = self._returned.popleft()
            except IndexError:
                return
            self.live -= nbytes
            if self._mode == "exact":
                self._backend.free(native)
                self.held -= nbytes
            else:
                self._free[nbytes].append(native)

    def allocate(self, nbytes: int) -> Buffer:
        """Memory for `nbytes`, rounded up to a size class.

        Raises:
            LimitError: for more than one buffer may have.
            OutOfMemoryError: when the driver or the budget has no room.
        """
        size = -(-nbytes // 16) * 16 if self._mode == "exact" else size_class(nbytes)
        most = self._backend.caps.max_buffer
        if nbytes > most:
            raise LimitError(f"a buffer of {nbytes:,} bytes; this device allows {most:,}")
        size = min(size, most - most % 16)
        with self._lock:
            self._drain()
            free = self._free.get(size)
            if free:
                native = free.pop()
            else:
                if self._budget is not None and self.held + size > self._budget:
                    self._trim()
                    if self.held + size > self._budget:
                        raise OutOfMemoryError(
                            f"{size:,} bytes on top of {self.held:,} held is above this device's "
                            f"budget of {self._budget:,}"
                        )
                native = self._backend.allocate(size)
                self.held += size
                count(allocations=1)
            self.live += size
            count(peak_bytes=self.live)
        if self._mode == "poison":
            self._backend.write(native, 0, np.full(size, 0xFF, np.uint8))
        return Buffer(native, size, self.release)

    def _trim(self) -> None:
        for size, free in self._free.items():
            while free:
                self._backend.free(free.pop())
                self.held -= size

    def trim(self) -> None:
        """Give all free memory back to the driver."""
        with self._lock:
            self._drain()
            self._trim()
