"""Device memory as free lists by size.

Freed memory is reused at once: everything on a device runs in submission order, so whoever gets
the memory next runs after whoever had it last. That holds for writes too, because what is recorded
and not yet submitted keeps the buffers that it reads. Buffers come back through a queue that
finalizers only append to.

On the CPU each result is an array of NumPy's, so nothing is kept for reuse; the pool counts there
what it counts elsewhere.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

import numpy as np

from centella.errors import DeviceError, LimitError, OutOfMemoryError
from centella.ledger import count, permit
from centella.submission import Backend, Buffer

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

    Attributes:
        held: bytes that the driver has given; live: bytes of them in use.
        budget: most bytes that it may hold, or None.
    """

    def __init__(self, backend: Backend, mode: str = "reuse", budget: int | None = None) -> None:
        if mode not in MODES:
            raise DeviceError(f"pool: expected one of {', '.join(MODES)}, got {mode!r}")
        self._backend = backend
        self._host = backend.caps.target == "numpy"
        self._free: dict[int, list[Any]] = defaultdict(list)
        # All memory that is held. In use, it may become garbage together with the Buffer that
        # gives it back: this reference keeps a driver object's own finalizer from running then.
        self._all: dict[int, Any] = {}
        self._returned: deque[tuple[Any, int, bool]] = deque()
        self._lock = threading.Lock()
        self.mode = mode
        self.budget = budget
        self.held = 0
        self.live = 0

    def release(self, native: Any, nbytes: int) -> None:
        """Take memory back; safe in a finalizer."""
        self._returned.append((None if self._host else native, nbytes, False))

    def _release_adopted(self, native: Any, nbytes: int) -> None:
        self._returned.append((native, nbytes, True))

    def drain(self) -> None:
        """Take in what finalizers have returned, so that nothing of it is referred to here."""
        if self._returned:
            with self._lock:
                self._drain()

    def _drain(self) -> None:
        while self._returned:
            native, nbytes, adopted = self._returned.popleft()
            if adopted:
                self._backend.disown(native)
                continue
            self.live -= nbytes
            if self.mode == "exact":
                self._give_back(native, nbytes)
            else:
                self._free[nbytes].append(native)

    def allocate(self, nbytes: int) -> Buffer:
        """Memory for `nbytes`, rounded up to a size class.

        Raises:
            LimitError: for more than one buffer may have.
            OutOfMemoryError: when the driver or the budget has no room.
            TransferForbidden: new memory is needed inside `forbid("allocation")`.
        """
        most = self._backend.caps.max_buffer
        if nbytes > most:
            raise LimitError(f"a buffer of {nbytes:,} bytes; this device allows {most:,}")
        exact = max(16, -(-nbytes // 16) * 16)
        size = exact if self.mode == "exact" else min(size_class(nbytes), most - most % 16)
        with self._lock:
            self._drain()
            free = self._free.get(size)
            native = free.pop() if free else self._grow(size)
            self.live += size
            count(peak_bytes=self.live)
        if self.mode == "poison" and not self._host:
            self._backend.write(native, 0, np.full(size, 0xFF, np.uint8))
        return Buffer(native, size, self.release)

    def _grow(self, size: int) -> Any:
        permit(f"{size:,} bytes of device memory", "allocations")
        if self.budget is not None and self.held + size > self.budget:
            self._trim()
            if self.held + size > self.budget:
                raise OutOfMemoryError(
                    f"{size:,} bytes on top of {self.held:,} in use is above this device's "
                    f"budget of {self.budget:,}"
                )
        try:
            native = self._backend.allocate(size)
        except OutOfMemoryError:
            if not any(self._free.values()):
                raise
            self._trim()
            native = self._backend.allocate(size)
        self._all[id(native)] = native
        self.held += size
        count(allocations=1)
        return native

    def _give_back(self, native: Any, size: int) -> None:
        self._all.pop(id(native), None)
        self._backend.free(native)
        self.held -= size

    def adopt(self, native: Any, owner: Any) -> Buffer:
        """Memory of the application's: neither copied nor freed, `owner` kept while it is used."""
        if not hasattr(self._backend, "adopt"):
            raise DeviceError(f"{self._backend.name}: memory cannot be imported on this backend")
        with self._lock:
            self._drain()
            taken, nbytes = self._backend.adopt(native)
        return Buffer(taken, nbytes, self._release_adopted, owner)

    def _trim(self) -> None:
        for size, free in self._free.items():
            while free:
                self._give_back(free.pop(), size)

    def trim(self) -> None:
        """Give all free memory back to the driver."""
        with self._lock:
            self._drain()
            self._trim()
