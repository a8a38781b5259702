"""The simulator as a device: portable kernels, run by NumPy, with every check.

Storage is laid out as on a GPU (padded rows) and filled with NaN, so that tests of ops find reads
of pads and elements that no thread wrote.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import numpy as np

from centella.errors import DeviceError
from centella.lang.machine import Order
from centella.lang.shadow import Mask
from centella.lang.simulate import simulate, unwritten
from centella.ledger import count
from centella.program import HostProgram, Program
from centella.specs import Caps, Spec
from centella.submission import Array, Bound, Buffer, Clock, DoneTicket, Submission


def last_word(spec: Spec, offset: int) -> int | None:
    """One past the last word that a launch may touch: whole 16-byte chunks of the tensor's rows.

    None: the whole buffer. One chunk may stand for a tensor without elements, which kernels read
    and mask.
    """
    if spec.storage_bytes <= 16:
        return None
    end = offset * spec.dtype.itemsize + spec.storage_bytes
    return -(-end // 16) * 4


def logical_words(spec: Spec, offset: int, size: int) -> Mask:
    """Which of `size` words hold the elements of a tensor."""
    index = np.full((), offset, np.int64)
    for extent, stride in zip(spec.shape, spec.strides, strict=True):
        index = index[..., None] + np.arange(extent, dtype=np.int64) * stride
    mask = np.zeros(size, np.bool_)
    mask[index.reshape(-1) * spec.dtype.itemsize // 4] = True
    return mask


class SimulatorBackend:
    """Kernels in NumPy; `checked` reports every fault, else it only computes."""

    name: str = "simulator"
    native: Any = None
    unit: int = 4
    clock: Clock = Clock(host=True)
    dlpack: tuple[int, int] | None = None

    def __init__(self, checked: bool = True, order: Order = "forward", subgroup: int = 32) -> None:
        self.caps: Caps = Caps(
            target="ir", max_storage_buffers=8, max_shared=16 << 10, max_workgroup=256,
            max_binding=1 << 40, max_buffer=1 << 40, family="software",
        )  # fmt: skip
        self.checked: bool = checked
        self.order: Order = order
        self.subgroup: int = subgroup

    def runs_on(self, native: Any) -> bool:
        """No driver has a device of it."""
        return False

    def allocate(self, nbytes: int) -> Array:
        """Words that hold NaN."""
        return np.full(nbytes // 4, 0xFFFFFFFF, np.uint32)

    def free(self, native: Any) -> None:
        """Nothing to do."""

    def memory(self) -> None:
        """Unknown: NumPy's arrays come from the process."""

    def adopt(self, native: Any) -> tuple[Any, int]:
        """An array of the application's, in place, and its bytes."""
        if not isinstance(native, np.ndarray) or not native.flags.c_contiguous:
            raise DeviceError("simulator: expected a C-contiguous NumPy array to import")
        if native.dtype.hasobject or native.nbytes % 4 or native.ctypes.data % 4:
            raise DeviceError("simulator: expected an array of whole, aligned 32-bit words")
        return native.reshape(-1).view(np.uint32), native.nbytes

    def disown(self, native: Any) -> None:
        """Nothing to do."""

    def write(self, buffer: Buffer, data: Array) -> None:
        """Copy host bytes into a buffer."""
        buffer.native.view(np.uint8)[: data.size] = data

    def shown(self, buffer: Buffer) -> Array:
        """The words of a buffer."""
        words: Array = buffer.native
        return words

    def lend(self, buffer: Buffer, stream: Any) -> tuple[int, Any]:
        """Its memory is laid out as a GPU's: nobody else is to read it."""
        raise BufferError("DLPack: the simulator does not export memory")

    def compile(self, program: Program | HostProgram) -> Any:
        """The traced kernel."""
        assert isinstance(program, Program)
        return program.ir

    def prepare(self, work: Submission) -> list[Array]:
        """The parameters of each launch."""
        return [_parameters(bound) for bound in work.launches]

    def submit(self, work: Submission) -> DoneTicket:
        """Run a submission."""
        for slot, data in work.uploads:
            self.write(work.slots[slot], data)
        for copy in work.copies:
            source = work.slots[copy.source].native.view(np.uint8)
            target = work.slots[copy.target].native.view(np.uint8)
            target[copy.start :][: copy.nbytes] = source[copy.first :][: copy.nbytes]
        prepared = work.prepared or self.prepare(work)
        stamps: list[tuple[int, int]] | None = [] if work.timed else None
        for bound, words in zip(work.launches, prepared, strict=True):
            begin = 0 if stamps is None else perf_counter_ns()
            self._launch(work, bound, words)
            if stamps is not None:
                stamps.append((begin, perf_counter_ns()))
        back: list[Array] = []
        for read in work.reads:
            raw = work.slots[read.slot].native.view(np.uint8)
            back.append(raw[read.start : read.start + read.nbytes].copy())
        return DoneTicket(tuple(back), stamps)

    def _launch(self, work: Submission, bound: Bound, words: Array) -> None:
        ir = bound.pipeline
        whole = [work.slots[slot].native for slot in bound.slots]
        for operand, window in enumerate(bound.windows):
            if window is not None:
                start, nbytes = window
                whole[operand] = whole[operand][start // 4 : (start + nbytes) // 4]
        natives = [
            native[: last_word(spec, offset)]
            for native, (spec, offset) in zip(whole, bound.views, strict=True)
        ]
        report = simulate(
            ir,
            natives,
            words,
            bound.groups,
            check=self.checked,
            order=self.order,
            subgroup=self.subgroup,
        )
        if self.checked:
            logical = [
                logical_words(spec, offset, len(words)) if arg.mode == "out" else None
                for arg, (spec, offset), words in zip(ir.args, bound.views, natives, strict=True)
            ]
            unwritten(ir, report.written, logical)

    def describe(self) -> dict[str, Any]:
        """Name and properties."""
        return {"device": "simulator", "name": "kernel simulator (NumPy)", "checked": self.checked}

    def before_fork(self) -> None:
        """Nothing to do."""

    def after_fork(self, *, child: bool) -> bool:
        """Go on."""
        return True

    def close(self) -> None:
        """Nothing to do."""


def _parameters(bound: Bound) -> Array:
    count(parameter_bytes=len(bound.parameters))
    return np.frombuffer(bound.parameters, np.uint32)[1:]
