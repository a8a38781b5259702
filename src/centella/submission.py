"""What every backend offers: allocate, compile, submit; and what is submitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from centella.program import HostProgram, Program
from centella.specs import Caps, Spec

Array = np.ndarray[Any, Any]


class Buffer:
    """Device memory that a value owns; returned to the pool when nothing refers to it.

    The finalizer only appends to a queue: it may run on any thread, at any time. `owner` is what
    keeps imported memory alive; imported memory is never freed.
    """

    __slots__ = ("__weakref__", "native", "nbytes", "owner", "release")

    def __init__(
        self,
        native: Any,
        nbytes: int,
        release: Callable[[Any, int], None] | None,
        owner: Any = None,
    ) -> None:
        self.native = native
        self.nbytes = nbytes
        self.release = release
        self.owner = owner

    def __del__(self) -> None:
        if self.release is not None:
            self.release(self.native, self.nbytes)


@dataclass(slots=True)
class Bound:
    """One launch with its operands: slots of the submission, and how each is seen.

    A plan keeps the launches that it bound; a backend changes nothing in them.
    """

    program: Program | HostProgram
    pipeline: Any
    slots: tuple[int, ...]
    views: tuple[tuple[Spec, int], ...]
    inputs: int
    words: list[int]
    groups: int


@dataclass(slots=True)
class Read:
    """A read-back: bytes of a slot from `start`, `nbytes` of them.

    Both are multiples of 4, except on the CPU.
    """

    slot: int
    start: int
    nbytes: int


@dataclass(slots=True)
class Submission:
    """Everything a device does at once: one write, launches in order, read-backs.

    Attributes:
        slots: the buffers that launches refer to by index.
        uploads: (slot, byte offset, host bytes).
        launches: in order; each sees what the ones before wrote.
        reads: results that come back, in one copy.
    """

    slots: list[Buffer]
    uploads: list[tuple[int, int, Array]] = field(default_factory=list)
    launches: list[Bound] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)


class Ticket(Protocol):
    """A submission under way."""

    def done(self) -> bool:
        """True once the device has finished it; never blocks."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished; raises what it failed with, or TimeoutError."""
        ...

    def data(self, index: int) -> Array:
        """Bytes of read-back `index`, after `wait`; a copy that the caller owns."""
        ...


class DoneTicket:
    """A submission that had finished when it was made."""

    def __init__(self, results: tuple[Array, ...] = ()) -> None:
        self._results = results

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""

    def data(self, index: int) -> Array:
        """Bytes of read-back `index`."""
        return self._results[index]


class Backend(Protocol):
    """One open device. All calls but a ticket's come under the device's lock, from any thread."""

    name: str
    caps: Caps
    native: Any

    def allocate(self, nbytes: int) -> Any:
        """Device memory; raises OutOfMemoryError or LimitError."""
        ...

    def free(self, native: Any) -> None:
        """Give memory back to the driver."""
        ...

    def adopt(self, native: Any) -> tuple[Any, int]:
        """Memory of the application's, to be read in place: what launches bind, and its bytes.

        Raises:
            DeviceError: for what is no memory of this device, or cannot be bound and read.
        """

    def disown(self, native: Any) -> None:
        """Forget what `adopt` gave: no value refers to it any more."""
        ...

    def write(self, native: Any, offset: int, data: Array) -> None:
        """Copy host bytes into device memory, in order with submissions.

        The host bytes may change as soon as this returns.
        """

    def compile(self, program: Program | HostProgram) -> Any:
        """The driver's form of a program; raises CompileError."""
        ...

    def submit(self, work: Submission) -> Ticket:
        """Start a submission.

        Raises:
            OutOfMemoryError, LimitError: nothing was submitted, it may be tried again.
            SimulationError: a kernel's own fault; the device is as good as before.
            CentellaError: anything else means that the device is lost.
        """

    def describe(self) -> dict[str, Any]:
        """Name, adapter, driver, limits: what `centella info` prints."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...
