"""The simulator as a device: portable kernels, run by NumPy, with every check.

Storage is laid out as on a GPU (padded rows) and filled with NaN, so that tests of ops find pads
that reach a result. Which words of it were written is known from one launch to the next: reading
another is a fault, but for the pads of what a launch has computed.
"""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np

from centella.backends.base import (
    About,
    Array,
    Backend,
    Buffer,
    Clock,
    DoneTicket,
    Launch,
    Submission,
)
from centella.emit.program import HostProgram, Program
from centella.errors import DeviceError
from centella.lang.ir import KernelIR
from centella.ledger.counts import count
from centella.simulator.launch import Order
from centella.simulator.race_check import Mask
from centella.simulator.run import simulate, unwritten
from centella.specs import Caps, Spec, pads


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


def operands(bound: Launch, buffers: list[Array]) -> list[Array]:
    """The words that a launch may touch of the buffers of its operands."""
    for operand, window in enumerate(bound.windows):
        if window is not None:
            start, nbytes = window
            buffers[operand] = buffers[operand][start // 4 : (start + nbytes) // 4]
    views = zip(buffers, bound.views, strict=True)
    return [words[: last_word(spec, offset)] for words, (spec, offset) in views]


def pad_words(spec: Spec, offset: int, size: int) -> Mask:
    """Which of `size` words belong to no element of a tensor, nor to anything else."""
    mask = np.zeros(size, np.bool_)
    for begin, nbytes, pitch, rows in pads(spec, offset):
        first, end = -(-begin // 4), (begin + nbytes) // 4
        rest = mask[first : end + (rows - 1) * pitch // 4]
        index = np.arange(rows)[:, None] * (pitch // 4) + np.arange(end - first)
        rest[index.reshape(-1)] = True
    return mask


def tail_words(spec: Spec, offset: int, size: int) -> Mask:
    """Of a part of a larger tensor: the words from the end of each row to the next chunk."""
    mask = np.zeros(size, np.bool_)
    if not spec.size or 1 not in spec.strides:
        return mask
    along = spec.strides.index(1)
    ends: Array = np.array(offset + spec.shape[along])
    for axis, (n, stride) in enumerate(zip(spec.shape, spec.strides, strict=True)):
        if axis != along:
            ends = np.add.outer(ends, np.arange(n) * stride)
    tails = -(-ends.reshape(-1, 1) * spec.dtype.itemsize // 4)
    words = tails + np.arange(4)
    mask[words[(words < -(-tails // 4) * 4) & (words < size)]] = True
    return mask


class SimulatorBackend(Backend):
    """Kernels in NumPy; `checked` reports every fault, else it only computes."""

    name: str = "simulator"
    clock: Clock = Clock(host=True)

    def __init__(self, checked: bool = True, order: Order = "forward", subgroup: int = 32) -> None:
        self.caps: Caps = Caps(
            target="ir", max_storage_buffers=8, max_shared=16 << 10, max_workgroup=256,
            max_binding=1 << 40, max_buffer=1 << 40, family="simulator",
        )  # fmt: skip
        self.checked: bool = checked
        self.order: Order = order
        self.subgroup: int = subgroup
        self._written: dict[int, Mask] = {}  # by the id of what `allocate` gave

    def allocate(self, nbytes: int) -> Array:
        """Words that hold NaN."""
        words = np.full(nbytes // 4, 0xFFFFFFFF, np.uint32)
        self._written[id(words)] = np.zeros(words.size, np.bool_)
        return words

    def free(self, native: Array) -> None:
        """Forget what was written."""
        del self._written[id(native)]

    def adopt(self, native: object) -> tuple[Array, int]:
        """An array of the application's, in place, and its bytes."""
        if not isinstance(native, np.ndarray) or not native.flags.c_contiguous:
            raise DeviceError("simulator: expected a C-contiguous NumPy array to import")
        if native.dtype.hasobject or native.nbytes % 4 or native.ctypes.data % 4:
            raise DeviceError("simulator: expected an array of whole, aligned 32-bit words")
        return native.reshape(-1).view(np.uint32), native.nbytes

    def write(self, buffer: Buffer, data: Array) -> None:
        """Copy host bytes into a buffer."""
        buffer.native.view(np.uint8)[: data.size] = data
        self._known(buffer.native[: -(-data.size // 4)])[:] = True

    def compile(self, program: Program | HostProgram) -> KernelIR:
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
            source = work.slots[copy.source].native[copy.first // 4 :][: copy.nbytes // 4]
            target = work.slots[copy.target].native[copy.start // 4 :][: copy.nbytes // 4]
            target[:] = source
            self._known(target)[:] = self._known(source)
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

    def _launch(self, work: Submission, bound: Launch, words: Array) -> None:
        ir, moves = bound.pipeline, isinstance(bound.program, Program) and bound.program.moves
        natives = operands(bound, [work.slots[slot].native for slot in bound.slots])
        known = [self._known(native) for native in natives] if self.checked else []
        report = simulate(
            ir, natives, words, bound.groups, check=self.checked, order=self.order,
            subgroup=self.subgroup, initialised=[
                None if arg.mode == "out" or moves or mask.all() else mask
                for arg, mask in zip(ir.args, known, strict=self.checked)
            ],
        )  # fmt: skip
        if not self.checked:
            return
        wanted: list[Mask | None] = []
        for arg, view, mask, seen in zip(ir.args, bound.views, known, report.written, strict=True):
            wanted.append(logical_words(*view, len(mask)) if arg.mode == "out" else None)
            if arg.writable:
                mask |= seen | pad_words(*view, len(mask))
                if bound.windows:
                    mask |= tail_words(*view, len(mask))
        unwritten(ir, report.written, wanted)

    def _known(self, native: Array) -> Mask:
        """Which words of a part of memory were written; of imported memory all, for all we know."""
        whole = native if native.base is None else native.base
        mask = self._written.get(id(whole))
        if mask is None:
            return np.ones(native.size, np.bool_)
        first = (native.ctypes.data - whole.ctypes.data) // 4
        return mask[first : first + native.size]

    def describe(self) -> About:
        """Name and properties."""
        return {"device": "simulator", "name": "kernel simulator (NumPy)", "checked": self.checked}


def _parameters(bound: Launch) -> Array:
    count(parameter_bytes=len(bound.parameters))
    return np.frombuffer(bound.parameters, np.uint32)[1:]
