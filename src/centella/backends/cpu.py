"""The CPU: host programs, run in order on one worker thread.

A buffer's `native` is the flat host array that holds its data: its own memory, where programs
write their results, or an array that was uploaded, in place. The worker alone sets and reads it, so
writes and submissions keep their order. A program that fails leaves `Failed` there: whoever reads
it raises, and everything else goes on.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, TypeVar
from weakref import ref

import numpy as np

from centella.backends.base import (
    About,
    Array,
    Backend,
    Buffer,
    Clock,
    Copy,
    Launch,
    Submission,
    Times,
)
from centella.emit.program import HostProgram, Program
from centella.errors import CentellaError, DeviceError, OutOfMemoryError, SimulationError
from centella.host.interrupts import GRACE, checkpoint, uninterrupted
from centella.host.workers import Dropped, Job, Worker
from centella.ledger.counts import count
from centella.specs import Caps, Spec

T = TypeVar("T")
LINE = 64  # bytes
DROPPED = "it was dropped, by Ctrl-C or as the process ended: compute it again"
SOON = 1.0  # seconds that a value which is printed is waited for


class Failed:
    """Stands where a result would be: what its formula failed with."""

    def __init__(self, name: str, error: Exception) -> None:
        self._name = name
        self._error = error

    def error(self) -> CentellaError:
        """A new exception to raise: several threads may ask."""
        error = self._error
        if isinstance(error, Dropped):
            return DeviceError(f"{self._name}: {DROPPED}")
        text = f"{self._name} failed on the CPU: {str(error) or type(error).__name__}"
        if isinstance(error, SimulationError):
            return SimulationError(text)
        mapped = OutOfMemoryError(text) if isinstance(error, MemoryError) else DeviceError(text)
        mapped.__cause__ = error
        return mapped


def flat(buffer: Buffer) -> Array:
    """The host array of a buffer.

    Raises:
        CentellaError: what the program that should have made it failed with.
    """
    if isinstance(buffer.native, Failed):
        raise buffer.native.error()
    array: Array = buffer.native
    return array


def view(buffer: Buffer, spec: Spec, offset: int, writeable: bool = False) -> Array:
    """The array that a Spec describes inside flat storage."""
    item = spec.dtype.itemsize
    if spec.size == 0:
        return np.empty(spec.shape, spec.dtype.numpy)
    strides = tuple(s * item for s in spec.strides)
    array: Array = np.ndarray(
        spec.shape, spec.dtype.numpy, flat(buffer).data, offset * item, strides
    )
    if not (writeable or buffer.mutable):
        array.flags.writeable = False
    return array


def _start_anew(buffer: Buffer) -> None:
    """Forget that what was last to be put into a buffer failed: it is written again."""
    if isinstance(buffer.native, Failed):
        buffer.native = buffer.memory


def _write(buffer: Buffer, data: Array) -> None:
    """Put bytes in a buffer."""
    _start_anew(buffer)
    flat(buffer).view(np.uint8)[: data.nbytes] = data.view(np.uint8)


def copied(work: Submission, copy: Copy) -> None:
    """Copy bytes between the host arrays of two slots."""
    _start_anew(work.slots[copy.target])
    source = flat(work.slots[copy.source]).view(np.uint8)
    target = flat(work.slots[copy.target]).view(np.uint8)
    data = source[copy.first : copy.first + copy.nbytes]
    target[copy.start : copy.start + data.size] = data


def _done(call: Callable[..., T], *args: object) -> Job[T]:
    """What a call has given or raised."""
    job = Job(call, args)
    job.run()
    return job


class Shown:
    """The bytes of a buffer for NumPy, which keeps the buffer while anybody has the array."""

    def __init__(self, buffer: Buffer, array: Array) -> None:
        self._buffer = buffer
        self.__array_interface__: dict[str, Any] = array.__array_interface__


class CpuTicket:
    """A submission on the worker thread.

    Args:
        stamps: what the worker fills, where launches are timed.
    """

    def __init__(self, job: Job[list[Array]], stamps: list[tuple[int, int]] | None) -> None:
        self._job = job
        self._stamps = stamps

    def done(self) -> bool:
        """True once the device has finished it."""
        return self._job.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished; raises what a formula failed with."""
        if not self._job.wait(timeout):
            raise TimeoutError(f"not done after {timeout} s")
        self._job.result()

    def data(self, index: int) -> Array:
        """Bytes of one read-back; a copy that the caller owns."""
        return self._job.result()[index]

    def times(self) -> Times | None:
        """When each formula began and ended."""
        self._job.wait()
        return self._stamps


class CpuBackend(Backend):
    """NumPy on the host."""

    name: str = "cpu"
    unit: int = 1
    clock: Clock = Clock(host=True)
    dlpack: tuple[int, int] | None = (1, 0)

    def __init__(self) -> None:
        self.caps: Caps = Caps(
            target="numpy",
            row_alignment=1,
            max_storage_buffers=64,
            max_binding=1 << 62,
            max_buffer=1 << 62,
            family="cpu",
        )
        self._gate = threading.Lock()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._last: Callable[[], Job[Any] | None] = lambda: None
        self._worker: Worker | None = Worker("centella-cpu")

    def allocate(self, nbytes: int) -> Array:
        """Bytes that begin on a line of the cache; the system gives pages as they are touched."""
        try:
            memory = np.empty(nbytes + LINE, np.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(f"cpu: no memory for {nbytes:,} bytes") from error
        start = -memory.ctypes.data % LINE
        return memory[start : start + nbytes]

    def free(self, native: Array) -> None:
        """Nothing to do."""

    def adopt(self, native: object) -> tuple[Array, int]:
        """An array of the application's, in place, and its bytes."""
        if not isinstance(native, np.ndarray) or not native.flags.c_contiguous:
            raise DeviceError("cpu: expected a C-contiguous NumPy array to import")
        if native.dtype.hasobject:
            raise DeviceError("cpu: an array of Python objects cannot be imported")
        return native.reshape(-1).view(np.uint8), native.nbytes

    def write(self, buffer: Buffer, data: Array) -> None:
        """Give a buffer a copy of host bytes, after what was submitted before."""
        self._put(_write, buffer, data.copy())

    def shown(self, buffer: Buffer) -> Array:
        """The host array of a buffer, read-only; waits until it is computed."""
        computed = self._put(flat, buffer)
        count(syncs=1)
        array = np.asarray(Shown(buffer, computed.result())).view()
        array.flags.writeable = False
        return array

    def glance(self, buffer: Buffer, spec: Spec, offset: int) -> Array | None:
        """The array that a Spec describes; None where it failed, or is not there soon."""
        try:
            job = self._put(view, buffer, spec, offset)
            return job.result() if job.wait(SOON) else None
        except (CentellaError, Dropped, RuntimeError):  # the last: the device is closed
            return None

    def lend(self, buffer: Buffer, stream: object) -> tuple[int, Array]:
        """The address of the host array, computed, and the array itself."""
        if stream not in (None, -1):
            raise BufferError(f"DLPack: expected no stream on the CPU, got {stream!r}")
        array = self.shown(buffer)
        return array.ctypes.data, array

    def compile(self, program: Program | HostProgram) -> Program | HostProgram:
        """The program itself."""
        return program

    def submit(self, work: Submission) -> CpuTicket:
        """Hand a submission to the worker."""
        stamps: list[tuple[int, int]] | None = [] if work.timed else None
        return CpuTicket(self._put(self._run, work, stamps), stamps)

    @uninterrupted
    def _put(self, call: Callable[..., T], *args: object) -> Job[T]:
        """Work for the worker, in order; what it raises is raised by who asks for the result.

        At the end of the process there is no worker any more: what is asked for then, by
        `atexit` or by a thread that goes on, is done by who asks.
        """
        with self._gate:
            if self._worker is None:
                late = self._last()
                if late is not None and not late.done():
                    raise DeviceError(f"{self.name}: the process ends while it still computes")
                return _done(call, *args)
            try:
                put = self._worker.submit(call, *args)
            except RuntimeError:
                if self._closed:
                    raise
                self._worker.shutdown()  # after what it has been given
                put = _done(call, *args)
            self._last = ref(put)  # which would keep what was read back
        return put

    def _run(self, work: Submission, stamps: list[tuple[int, int]] | None) -> list[Array]:
        for slot, data in work.uploads:
            work.slots[slot].native = data
        for copy in work.copies:
            try:
                copied(work, copy)
            except Exception as wrong:  # what reads it fails in its turn
                work.slots[copy.target].native = Failed("copy", wrong)
        failed: CentellaError | None = None
        for bound in work.launches:
            begin = 0 if stamps is None else perf_counter_ns()
            error = self._launch(work, bound)
            if stamps is not None:
                stamps.append((begin, perf_counter_ns()))
            failed = failed or error
        back: list[Array] = []
        for read in work.reads:
            raw = flat(work.slots[read.slot]).view(np.uint8)
            back.append(raw[read.start : read.start + read.nbytes].copy())
        if failed is not None and not work.reads:
            raise failed
        return back

    def _launch(self, work: Submission, bound: Launch) -> CentellaError | None:
        assert isinstance(bound.program, HostProgram)
        ins, outs = bound.slots[: bound.inputs], bound.slots[bound.inputs :]
        for index in bound.program.overwrites:
            _start_anew(work.slots[ins[index]])
        try:
            checkpoint(GRACE)
            arrays = [
                view(work.slots[slot], spec, offset)
                for slot, (spec, offset) in zip(ins, bound.views[: bound.inputs], strict=True)
            ]
            results = []
            for slot, (spec, _) in zip(outs, bound.views[bound.inputs :], strict=True):
                buffer = work.slots[slot]
                if slot not in ins:  # else it is changed in place
                    buffer.native = buffer.memory[: max(1, spec.nbytes)]
                results.append(view(buffer, spec, 0, writeable=True))
            bound.program.call(arrays, results)
        except Exception as error:
            inputs = (work.slots[slot].native for slot in ins)
            cause = next((n for n in inputs if isinstance(n, Failed)), None)
            failure = cause or Failed(bound.program.name, error)
            for slot in outs:
                work.slots[slot].native = failure
            return failure.error()
        return None

    def describe(self) -> About:
        """Name and properties."""
        return {
            "device": "cpu",
            "name": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "numpy": np.__version__,
        }

    def close(self) -> None:
        """Let the worker finish and end it."""
        self._closed = True
        if self._worker is not None:
            self._worker.shutdown()

    def finish(self, patience: float) -> bool:
        """Let the worker finish, then drop what is left; from now on who asks does the work."""
        with self._gate:
            worker, self._worker = self._worker, None
        return worker is None or worker.shutdown(patience)

    def before_fork(self) -> None:
        """Let the worker finish, so that the child finds every result."""
        self._gate.acquire()
        last = self._last()
        if last is not None:  # it has not been forgotten, as what is done soon is
            last.wait()

    def after_fork(self, *, child: bool) -> bool:
        """Go on; a child has no threads but its own and starts a new worker."""
        if child:
            self._start()
        self._gate.release()
        return True
