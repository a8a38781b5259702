"""The CPU: NumPy formulas, run in order on one worker thread.

A buffer is a flat host array of the value's storage type, dense; `native` is set when the program
that writes it has run, which is why submissions of one device run in order.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from centella.dtypes import DType
from centella.ledger import current_context
from centella.program import HostProgram, Program
from centella.specs import Caps, Spec
from centella.submission import Array, Buffer, Submission


def view(native: Array, spec: Spec, offset: int) -> Array:
    """The array that a Spec describes inside flat storage."""
    item = spec.dtype.itemsize
    strides = tuple(s * item for s in spec.strides)
    if spec.size == 0:
        return np.empty(spec.shape, spec.dtype.numpy)
    return np.ndarray(spec.shape, spec.dtype.numpy, native.data, offset * item, strides)


class CpuTicket:
    """A submission on the worker thread."""

    def __init__(self, future: Future[list[Array]]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        try:
            self._future.result(timeout)
        except FutureTimeout as error:
            raise TimeoutError(f"not done after {timeout} s") from error

    def data(self, index: int) -> Array:
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
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="centella-cpu")

    def allocate(self, nbytes: int) -> Any:
        return None

    def free(self, native: Any) -> None:
        return None

    def write(self, native: Any, offset: int, data: Array) -> None:
        raise NotImplementedError("host buffers are set, not written")

    def compile(self, program: Program | HostProgram) -> Any:
        return program

    def submit(self, work: Submission) -> CpuTicket:
        context = current_context()
        return CpuTicket(self._worker.submit(context.run, self._run, work))

    def _run(self, work: Submission) -> list[Array]:
        for slot, _, data in work.uploads:
            work.slots[slot].native = data
        for bound in work.launches:
            assert isinstance(bound.program, HostProgram)
            arrays = [
                view(work.slots[s].native, spec, offset)
                for s, (spec, offset) in zip(
                    bound.slots[: bound.inputs], bound.views[: bound.inputs], strict=True
                )
            ]
            results = bound.program.call(arrays)
            for slot, result in zip(bound.slots[bound.inputs :], results, strict=True):
                work.slots[slot].native = result.reshape(-1)
        back: list[Array] = []
        for read in work.reads:
            flat = work.slots[read.slot].native.view(np.uint8)
            back.append(flat[read.start : read.start + read.nbytes].copy())
        return back

    def describe(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "name": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "numpy": np.__version__,
        }

    def close(self) -> None:
        self._worker.shutdown(wait=True)


def host_buffer(data: Array, dtype: DType) -> Buffer:
    """A buffer around host storage."""
    flat = data.reshape(-1)
    return Buffer(flat, flat.nbytes, None)
