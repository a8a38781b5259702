"""The simulator as a device: portable kernels, run by NumPy, with every check.

Storage is laid out as on a GPU (padded rows) and filled with NaN, so that tests of ops find reads
of pads and elements that no thread wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.errors import DeviceError
from centella.lang.machine import Order
from centella.lang.shadow import Mask
from centella.lang.simulate import simulate, unwritten
from centella.ledger import count
from centella.program import HostProgram, Program
from centella.specs import Caps, Spec
from centella.submission import Array, Bound, DoneTicket, Submission


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

    name = "simulator"

    def __init__(self, checked: bool = True, order: Order = "forward", subgroup: int = 32) -> None:
        self.caps = Caps(
            target="ir", max_storage_buffers=8, max_shared=16 << 10, max_workgroup=256,
            max_binding=1 << 40, max_buffer=1 << 40, family="software",
        )  # fmt: skip
        self.native = None
        self.checked = checked
        self.order = order
        self.subgroup = subgroup

    def allocate(self, nbytes: int) -> Array:
        """Words that hold NaN."""
        return np.full(nbytes // 4, 0xFFFFFFFF, np.uint32)

    def free(self, native: Any) -> None:
        """Nothing to do."""
        return None

    def adopt(self, native: Any) -> tuple[Any, int]:
        """An array of the application's, in place, and its bytes."""
        if not isinstance(native, np.ndarray) or not native.flags.c_contiguous:
            raise DeviceError("simulator: expected a C-contiguous NumPy array to import")
        if native.dtype.hasobject or native.nbytes % 4 or native.ctypes.data % 4:
            raise DeviceError("simulator: expected an array of whole, aligned 32-bit words")
        return native.reshape(-1).view(np.uint32), native.nbytes

    def disown(self, native: Any) -> None:
        """Nothing to do."""
        return None

    def write(self, native: Array, offset: int, data: Array) -> None:
        """Copy host bytes into a buffer."""
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        native.view(np.uint8)[offset : offset + raw.size] = raw

    def compile(self, program: Program | HostProgram) -> Any:
        """The traced kernel."""
        assert isinstance(program, Program)
        return program.ir

    def submit(self, work: Submission) -> DoneTicket:
        """Run a submission."""
        for slot, offset, data in work.uploads:
            self.write(work.slots[slot].native, offset, data)
        for bound in work.launches:
            if bound.groups > 0:
                self._launch(work, bound)
        back: list[Array] = []
        for read in work.reads:
            raw = work.slots[read.slot].native.view(np.uint8)
            back.append(raw[read.start : read.start + read.nbytes].copy())
        return DoneTicket(tuple(back))

    def _launch(self, work: Submission, bound: Bound) -> None:
        ir = bound.pipeline
        natives = [
            work.slots[slot].native[: last_word(spec, offset)]
            for slot, (spec, offset) in zip(bound.slots, bound.views, strict=True)
        ]
        count(parameter_bytes=4 * (1 + len(bound.words)))
        report = simulate(
            ir,
            natives,
            np.array(bound.words, np.uint32),
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

    def close(self) -> None:
        """Nothing to do."""
        return None
