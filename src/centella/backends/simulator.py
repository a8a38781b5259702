"""The simulator as a device: portable kernels, run by NumPy, with every check.

Storage is laid out as on a GPU (padded rows) and filled with NaN, so that tests of ops find reads
of pads and elements that no thread wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.errors import SimulationError
from centella.lang.simulate import simulate
from centella.program import HostProgram, Program
from centella.specs import Caps, Spec
from centella.submission import Array, Bound, Submission


class DoneTicket:
    """A submission that ran when it was made."""

    def __init__(self, data: list[Array]) -> None:
        self._data = data

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None

    def data(self, index: int) -> Array:
        return self._data[index]


def logical_words(spec: Spec, offset: int) -> Array:
    """Indices of the words that hold the elements of a tensor."""
    index = np.full((), offset, np.int64)
    for extent, stride in zip(spec.shape, spec.strides, strict=True):
        index = index[..., None] + np.arange(extent, dtype=np.int64) * stride
    return np.unique(index.reshape(-1) * spec.dtype.itemsize // 4)


class SimulatorBackend:
    """Kernels in NumPy; `checked` reports every fault, else it only computes."""

    name = "simulator"

    def __init__(self, checked: bool = True, order: str = "forward") -> None:
        self.caps = Caps(
            target="ir", max_storage_buffers=8, max_shared=16 << 10, max_workgroup=256,
            max_binding=1 << 40, max_buffer=1 << 40, family="software",
        )  # fmt: skip
        self.native = None
        self.checked = checked
        self.order = order

    def allocate(self, nbytes: int) -> Array:
        return np.full(nbytes // 4, 0xFFFFFFFF, np.uint32)

    def free(self, native: Any) -> None:
        return None

    def write(self, native: Array, offset: int, data: Array) -> None:
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        native.view(np.uint8)[offset : offset + raw.size] = raw

    def compile(self, program: Program | HostProgram) -> Any:
        assert isinstance(program, Program)
        return program.ir

    def submit(self, work: Submission) -> DoneTicket:
        for slot, offset, data in work.uploads:
            self.write(work.slots[slot].native, offset, data)
        for bound in work.launches:
            self._launch(work, bound)
        back: list[Array] = []
        for read in work.reads:
            raw = work.slots[read.slot].native.view(np.uint8)
            back.append(raw[read.start : read.start + read.nbytes].copy())
        return DoneTicket(back)

    def _launch(self, work: Submission, bound: Bound) -> None:
        ir = bound.pipeline
        natives = [work.slots[s].native for s in bound.slots]
        report = simulate(
            ir,
            natives,
            np.array(bound.words, np.uint32),
            bound.groups,
            check=self.checked,
            order=self.order,
        )
        if not self.checked:
            return
        for position, (arg, (spec, offset)) in enumerate(zip(ir.args, bound.views, strict=True)):
            if arg.mode != "out" or spec.size == 0:
                continue
            words = logical_words(spec, offset)
            missing = words[~report.written[position][words]]
            if missing.size:
                raise SimulationError(
                    f"kernel {ir.name!r}: output {arg.name!r} has {missing.size} words that no "
                    f"thread wrote, the first at word {int(missing[0])}"
                )

    def describe(self) -> dict[str, Any]:
        return {"device": "simulator", "name": "kernel simulator (NumPy)", "checked": self.checked}

    def close(self) -> None:
        return None
