"""What every backend offers: allocate, compile, submit; and what is submitted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from centella.backends.buffer import Array as Array
from centella.backends.buffer import Buffer as Buffer
from centella.backends.optional import Interop, Process, Streams
from centella.emit.program import HostProgram, Program
from centella.specs import Caps, Spec

Times = Sequence[tuple[int, int]]
Window = tuple[int, int]
About = dict[str, str | int | None]  # what a device says of itself


class Launch(Struct, frozen=True, eq=False):
    """One planned launch: a program on operands.

    Attributes:
        slots: its operands' buffers, by their index in the submission.
        views: how each operand is seen, and the element of the buffer that it begins at.
        inputs: how many operands its node reads; they come first.
        parameters: 32-bit words as they lie in memory: the number of groups, then the kernel's.
        patches: (word, operand) of each parameter that is an operand's offset.
        node: index of the node that it belongs to.
        reason: of a copy that the node's kernels need: what of, and why.
        pipeline: the driver's form of the program, once compiled.
        windows: of each operand the first byte and the number of bytes that are bound; None for
            all of a buffer. Views and offsets count from there. Empty where no buffer is larger
            than a binding.
    """

    program: Program | HostProgram
    slots: tuple[int, ...]
    views: tuple[tuple[Spec, int], ...]
    inputs: int
    parameters: bytes
    groups: int
    patches: tuple[tuple[int, int], ...] = ()
    node: int = 0
    reason: str = ""
    pipeline: Any = None
    windows: tuple[Window | None, ...] = ()

    def shifted(self, elements: Sequence[int]) -> Launch:
        """The launch with each operand beginning so many elements later."""
        if not any(elements):
            return self
        words = np.frombuffer(self.parameters, np.uint32).tolist()
        for word, operand in self.patches:
            words[word] += elements[operand]
        pairs = zip(self.views, elements, strict=True)
        views = tuple([(spec, offset + n) for (spec, offset), n in pairs])
        return replace(self, views=views, parameters=np.array(words, np.uint32).tobytes())


class Read(Struct, eq=False):
    """A read-back: bytes of a slot from `start`, `nbytes` of them; multiples of `Backend.unit`."""

    slot: int
    start: int
    nbytes: int


class Load(Struct, frozen=True):
    """What work asks of a device: arithmetic operations, and bytes that it reads and writes."""

    flops: float = 0
    nbytes: float = 0


class Copy(Struct, frozen=True):
    """Bytes from one slot to another: `nbytes` of them, all numbers multiples of 4."""

    source: int
    first: int
    target: int
    start: int
    nbytes: int


class Submission(Struct, eq=False):
    """Everything a device does at once: one write, launches in order, read-backs.

    Attributes:
        slots: the buffers that launches refer to by index.
        uploads: (slot, flat host bytes) of whole buffers; the bytes change no more.
        launches: in order, each of one group or more; each sees what the ones before wrote.
        reads: results that come back, in one copy.
        copies: done before the launches.
        prepared: what `Backend.prepare` made of the launches, if they are run again.
        timed: put time stamps around each launch, where the device can.
        begun: when a timed one was handed to the backend, in ns.
        again: where a backend keeps what it finds for these launches until they come again.
        loads, total: what each launch asks of the device, and all of them.
        whole: it is a batch, which the device gets at once.
        reports: a program of its launches counts the loops that the driver stopped.
    """

    slots: list[Buffer]
    uploads: list[tuple[int, Array]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    prepared: Any = None
    timed: bool = False
    begun: int = 0
    again: dict[Any, Any] = field(default_factory=dict)
    loads: Sequence[Load] = ()
    total: Load = Load()
    whole: bool = False
    reports: bool = False


def packed(sizes: Iterable[int]) -> tuple[list[Window], int]:
    """First byte and number of bytes of pieces of such sizes, side by side; bytes in all."""
    places: list[Window] = []
    end = 0
    for nbytes in sizes:
        places.append((end, nbytes))
        end += -(-nbytes // 16) * 16
    return places, end


class Clock(Struct, frozen=True):
    """How a backend times launches.

    Attributes:
        host: by `perf_counter` of the host; else by a clock of the device, with a zero of its own.
        missing: why it cannot, or "".
    """

    host: bool = False
    missing: str = ""


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

    def times(self) -> Times | None:
        """Begin and end of each launch in ns; waits. None where they were not timed."""
        ...


class DoneTicket:
    """A submission that had finished when it was made."""

    def __init__(self, results: tuple[Array, ...] = (), times: Times | None = None) -> None:
        self._results = results
        self._times = times

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""

    def data(self, index: int) -> Array:
        """Bytes of read-back `index`."""
        return self._results[index]

    def times(self) -> Times | None:
        """Begin and end of each launch."""
        return self._times


class Backend(Interop, Process, Streams, Protocol):
    """One open device: a class that derives from this one, with a row in `opening.BACKENDS`.

    What has no body here is to be written. All calls but a ticket's come under the device's lock,
    from any thread.

    Attributes:
        name: "kind" or "kind:which"; caps: facts that plans and kernels are chosen by.
        unit: read-backs start and end on a multiple of so many bytes.
        least_parts: more bytes of a file are read by `write_parts`, which is faster then.
        clock: how launches are timed.
    """

    caps: Caps
    unit: int = 4
    least_parts: int = 16 << 20
    clock: Clock = Clock()

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """Device memory of at most `caps.max_buffer` bytes; raises OutOfMemoryError."""
        ...

    @abstractmethod
    def free(self, native: Any) -> None:
        """Give memory back to the driver."""
        ...

    @abstractmethod
    def write(self, buffer: Buffer, data: Array) -> None:
        """Copy flat host bytes to the start of a buffer, in order with submissions.

        The bytes may change afterwards.
        """
        ...

    def write_parts(self, buffer: Buffer, nbytes: int, step: int) -> Iterator[Array]:
        """Copy host bytes to the start of a buffer, part after part, in order with submissions.

        Gives host memory for each part in order, of `step` bytes but for the last. The caller fills
        it, and then asks for the next one, which sends it; other calls may come between. What is
        not asked to the end leaves the buffer's content undefined.

        Args:
            step: a multiple of 16: of so many bytes a backend should hold few at a time.
        """
        data = np.empty(nbytes, np.uint8)
        for start in range(0, nbytes, step):
            yield data[start : start + step]
        self.write(buffer, data)

    @abstractmethod
    def compile(self, program: Program | HostProgram) -> Any:
        """The driver's form of a program; raises CompileError."""
        ...

    def admit(self, launch: Launch) -> None:
        """Refuse a compiled launch that the device cannot begin; raises LimitError."""
        return

    @abstractmethod
    def submit(self, work: Submission) -> Ticket:
        """Start a submission.

        Raises:
            OutOfMemoryError, LimitError: nothing was submitted, it may be tried again.
            SimulationError: a kernel's own fault; the device is as good as before.
            CentellaError: anything else means that the device is lost.
        """
        ...

    @abstractmethod
    def describe(self) -> About:
        """Name, adapter, driver, limits: what `centella info` prints."""
        ...

    def memory(self) -> tuple[int, int] | None:
        """Bytes that are free and bytes that there are, as the driver says; None: it says none."""
        return None

    def prepare(self, work: Submission) -> Any:
        """The launches of a submission in a form that can be run again, on the same slots.

        `Submission.prepared` has it when they are; None where they are run as they are.
        """
        return None

    def warm(self, work: Submission) -> None:
        """Have done what the driver leaves to the first launch of a program; waits for it.

        Called before a timed submission; notes the time as that of compiling. Raises as `submit`.
        """
        return

    def close(self) -> None:
        """Release the device."""
        return
