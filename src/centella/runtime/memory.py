"""Device memory as free lists by size.

Freed memory is reused at once: everything on a device runs in submission order, so whoever gets
the memory next runs after whoever had it last. That holds for writes too, because what is recorded
and not yet submitted keeps the buffers that it reads. Buffers come back through a queue that
finalizers only append to.

On the CPU each result is an array of NumPy's, which its Buffer holds and the pool never sees; the
pool counts there what it counts elsewhere.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

import numpy as np
from msgspec import Struct

from centella.backends.base import Backend, Buffer
from centella.errors import DeviceError, LimitError, OutOfMemoryError
from centella.host.interrupts import uninterrupted
from centella.ledger.counts import count, permit
from centella.plan.placement import size_class

MODES = ("reuse", "exact", "clear", "poison")
FILL = {"clear": 0, "poison": 0xFF}  # each byte of what is handed out


class Memory(Struct, frozen=True):
    """What `Device.memory` gives: bytes of a device's memory, as they were then.

    Attributes:
        live: in use; held: with what is kept for reuse.
        peak: most in use since the device was opened, or since `device.reset_peak()`.
        budget: most that may be held, if the device was opened with `memory_limit`.
        free, total: what the driver says of the whole device; None where it says nothing.
    """

    live: int
    held: int
    peak: int
    budget: int | None
    free: int | None
    total: int | None

    def __str__(self) -> str:
        known = {"budget": self.budget, "free": self.free, "total": self.total}
        parts = [f"live {self.live:,}", f"held {self.held:,}", f"peak {self.peak:,}"]
        parts += [f"{name} {'unknown' if n is None else f'{n:,}'}" for name, n in known.items()
                  if name != "budget" or n is not None]  # fmt: skip
        return "  ".join(parts) + " bytes"


class Pool:
    """Allocations of one device.

    Modes: "reuse" (default); "exact" (sizes as asked, nothing reused: for memory checkers);
    "clear" (every allocation is filled with zeros, so that it shows nothing that was freed) and
    "poison" (with NaN: for tests), by writes that no ledger counts.

    Attributes:
        held: bytes that the driver has given; live: bytes of them in use; peak: most in use.
        budget: most bytes that it may hold, or None.
    """

    def __init__(self, backend: Backend, mode: str = "reuse", budget: int | None = None) -> None:
        if mode not in MODES:
            raise DeviceError(f"pool: expected one of {', '.join(MODES)}, got {mode!r}")
        self._backend = backend
        self._free: dict[int, list[Any]] = defaultdict(list)
        # All memory that is held. In use, it may become garbage together with the Buffer that
        # gives it back: this reference keeps a driver object's own finalizer from running then.
        self._all: dict[int, Any] = {}
        self._returned: deque[tuple[Any, int, bool]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self.mode = mode
        self._fill = FILL.get(mode)
        self.budget = budget
        self.held: int = 0
        self.live: int = 0
        self.peak: int = 0

    @uninterrupted
    def release(self, memory: Any, nbytes: int) -> None:
        """Take memory back; safe in a finalizer."""
        self._returned.append((memory, nbytes, False))

    @uninterrupted
    def _release_adopted(self, memory: Any, nbytes: int) -> None:
        self._returned.append((memory, nbytes, True))

    @uninterrupted
    def drain(self) -> None:
        """Take in what finalizers have returned, so that nothing of it is referred to here."""
        if self._returned:
            with self._lock:
                self._drain()

    def _drain(self) -> None:
        if self._closed:  # the driver has it all back
            self._returned.clear()
        while self._returned:
            memory, nbytes, adopted = self._returned.popleft()
            if adopted:
                self._backend.disown(memory)
                continue
            self.live -= nbytes
            if self.mode == "exact":
                self._give_back(memory, nbytes)
            else:
                self._free[nbytes].append(memory)

    def size_of(self, nbytes: int) -> int:
        """Bytes that an allocation of `nbytes` takes."""
        most = self._backend.caps.max_buffer
        exact = max(16, -(-nbytes // 16) * 16)
        return exact if self.mode == "exact" else min(size_class(nbytes), most - most % 16)

    @uninterrupted
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
        size = self.size_of(nbytes)
        with self._lock:
            self._drain()
            free = self._free.get(size)
            memory = free.pop() if free else self._grow(size)
            self.live += size
            self.peak = max(self.peak, self.live)
            count(peak_bytes=self.live)
        buffer = Buffer(memory, size, self.release)
        if self._fill is not None:
            self._backend.write(buffer, np.full(size, self._fill, np.uint8))
        return buffer

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
            memory = self._backend.allocate(size)
        except OutOfMemoryError:
            if not any(self._free.values()):
                raise
            self._trim()
            memory = self._backend.allocate(size)
        self._all[id(memory)] = memory
        self.held += size
        count(allocations=1)
        return memory

    def _give_back(self, memory: Any, size: int) -> None:
        self._all.pop(id(memory), None)
        self._backend.free(memory)
        self.held -= size

    @uninterrupted
    def reset_peak(self) -> None:
        """Count the most in use from now on."""
        with self._lock:
            self._drain()
            self.peak = self.live

    @uninterrupted
    def adopt(self, native: Any) -> Buffer:
        """Memory of the application's: neither copied nor freed, kept alive while it is used."""
        with self._lock:
            self._drain()
            taken, nbytes = self._backend.adopt(native)
        return Buffer(taken, nbytes, self._release_adopted, native)

    def _trim(self) -> None:
        for size, free in self._free.items():
            while free:
                self._give_back(free.pop(), size)

    @uninterrupted
    def trim(self) -> None:
        """Give all free memory back to the driver."""
        with self._lock:
            self._drain()
            self._trim()

    @uninterrupted
    def close(self) -> None:
        """Give all memory back to the driver, also what is in use: its device is closed."""
        with self._lock:
            for memory in self._all.values():
                self._backend.free(memory)
            self._all.clear()
            self._free.clear()
            self._returned.clear()
            self._closed = True
            self.held = self.live = 0
