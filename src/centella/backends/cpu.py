"""The CPU: NumPy formulas, run in order on one worker thread.

A buffer's `native` is a flat host array. It is set when the program that writes it has run, which
is why submissions of one device run in order. A formula that fails leaves `Failed` there: whoever
reads it raises, and everything else goes on.
"""

from __future__ import annotations

import os
import platform
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any
from weakref import WeakSet

import numpy as np

from centella.errors import CentellaError, DeviceError, OutOfMemoryError, SimulationError
from centella.program import HostProgram, Program
from centella.specs import Caps, Spec
from centella.submission import Array, Bound, Buffer, Submission


class Failed:
    """Stands where a result would be: what its formula failed with."""

    def __init__(self, name: str, error: Exception) -> None:
        self._name = name
        self._error = error

    def error(self) -> CentellaError:
        """A new exception to raise: several threads may ask."""
        error = self._error
        text = f"{self._name} failed on the CPU: {str(error) or type(error).__name__}"
        if isinstance(error, SimulationError):
            return SimulationError(text)
        made = OutOfMemoryError(text) if isinstance(error, MemoryError) else DeviceError(text)
        made.__cause__ = error
        return made


def flat(buffer: Buffer) -> Array:
    """The host array of a buffer.

    Raises:
        CentellaError: what the formula that should have made it failed with.
    """
    if isinstance(buffer.native, Failed):
        raise buffer.native.error()
    return buffer.native  # type: ignore[no-any-return]  # the backend puts nothing else there


def view(buffer: Buffer, spec: Spec, offset: int) -> Array:
    """The array that a Spec describes inside flat storage."""
    item = spec.dtype.itemsize
    if spec.size == 0:
        return np.empty(spec.shape, spec.dtype.numpy)
    strides = tuple(s * item for s in spec.strides)
    array: Array = np.ndarray(
        spec.shape, spec.dtype.numpy, flat(buffer).data, offset * item, strides
    )
    array.flags.writeable = False
    return array


def _must_part(buffer: Buffer, result: Array) -> bool:
    """Whether a result may not stay part of an input: imported memory, or a larger array."""
    return buffer.owner is not None or result.nbytes < flat(buffer).nbytes


class CpuTicket:
    """A submission on the worker thread."""

    def __init__(self, future: Future[list[Array]]) -> None:
        self._future = future

    def done(self) -> bool:
        """True once the device has finished it."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished; raises what a formula failed with."""
        try:
            self._future.result(timeout)
        except FutureTimeout as error:
            raise TimeoutError(f"not done after {timeout} s") from error

    def data(self, index: int) -> Array:
        """Bytes of one read-back; a copy that the caller owns."""
        return self._future.result()[index]


class CpuBackend:
    """NumPy on the host."""

    name = "cpu"

    def __init__(self) -> None:
        self.caps = Caps(
            target="numpy",
            row_alignment=1,
            max_storage_buffers=64,
            max_binding=1 << 62,
            max_buffer=1 << 62,
            family="cpu",
        )
        self.native = None
        self._gate = threading.Lock()
        self._start()
        _open.add(self)

    def _start(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="centella-cpu")

    def allocate(self, nbytes: int) -> Any:
        """Nothing: results are arrays of NumPy's."""
        return None

    def free(self, native: Any) -> None:
        """Nothing to do."""
        return None

    def adopt(self, native: Any) -> tuple[Any, int]:
        """An array of the application's, in place, and its bytes."""
        if not isinstance(native, np.ndarray) or not native.flags.c_contiguous:
            raise DeviceError("cpu: expected a C-contiguous NumPy array to import")
        if native.dtype.hasobject:
            raise DeviceError("cpu: an array of Python objects cannot be imported")
        return native.reshape(-1).view(np.uint8), native.nbytes

    def disown(self, native: Any) -> None:
        """Nothing to do."""
        return None

    def write(self, native: Any, offset: int, data: Array) -> None:
        """Never called: a host buffer is set by the program that computes it."""
        raise NotImplementedError("host buffers are set, not written")

    def storage(self, buffer: Buffer) -> Array:
        """The host array of a buffer that has been computed, read-only."""
        shown = flat(buffer).view()
        shown.flags.writeable = False
        return shown

    def compile(self, program: Program | HostProgram) -> Any:
        """The program itself."""
        return program

    def submit(self, work: Submission) -> CpuTicket:
        """Hand a submission to the worker."""
        with self._gate:
            return CpuTicket(self._worker.submit(self._run, work))

    def _run(self, work: Submission) -> list[Array]:
        failed: CentellaError | None = None
        for bound in work.launches:
            if bound.groups > 0:
                error = self._launch(work, bound)
                failed = failed or error
        back: list[Array] = []
        for read in work.reads:
            raw = flat(work.slots[read.slot]).view(np.uint8)
            back.append(raw[read.start : read.start + read.nbytes].copy())
        if failed is not None and not work.reads:
            raise failed
        return back

    def _launch(self, work: Submission, bound: Bound) -> CentellaError | None:
        assert isinstance(bound.program, HostProgram)
        ins, outs = bound.slots[: bound.inputs], bound.slots[bound.inputs :]
        try:
            arrays = [
                view(work.slots[slot], spec, offset)
                for slot, (spec, offset) in zip(ins, bound.views[: bound.inputs], strict=True)
            ]
            results = bound.program.call(arrays)
            for slot, result in zip(outs, results, strict=True):
                alone = not any(
                    np.may_share_memory(result, a) and _must_part(work.slots[s], result)
                    for a, s in zip(arrays, ins, strict=True)
                )
                work.slots[slot].native = (result if alone else result.copy()).reshape(-1)
        except Exception as error:
            inputs = (work.slots[slot].native for slot in ins)
            cause = next((n for n in inputs if isinstance(n, Failed)), None)
            failure = cause or Failed(bound.program.name, error)
            for slot in outs:
                work.slots[slot].native = failure
            return failure.error()
        return None

    def describe(self) -> dict[str, Any]:
        """Name and properties."""
        return {
            "device": "cpu",
            "name": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "numpy": np.__version__,
        }

    def close(self) -> None:
        """Let the worker finish and end it."""
        _open.discard(self)
        self._worker.shutdown(wait=True)

    def before_fork(self) -> None:
        """Let the worker finish, so that the child finds every result."""
        self._gate.acquire()
        self._worker.submit(int).result()

    def after_fork(self, *, child: bool) -> None:
        """Go on; a child has no threads but its own and starts a new worker."""
        if child:
            self._start()
        self._gate.release()


_open: WeakSet[CpuBackend] = WeakSet()


def _fork(step: str) -> None:
    for backend in list(_open):
        if step == "before":
            backend.before_fork()
        else:
            backend.after_fork(child=step == "child")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _fork("before"),
        after_in_parent=lambda: _fork("parent"),
        after_in_child=lambda: _fork("child"),
    )
