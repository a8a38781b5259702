"""A simulator that says it is a GPU: it may compute wrong numbers, or get lost."""

from __future__ import annotations

from typing import Any

from centella.backends.base import DoneTicket, Launch, Submission
from centella.backends.simulator import SimulatorBackend
from centella.errors import DeviceLostError


class FakeGpu(SimulatorBackend):
    """One device.

    Attributes:
        wrong: name of a kernel whose first word is always wrong; lost: whether it is gone.
        submissions: how many it was asked for; allocated_bytes: what nobody gave back.
    """

    def __init__(self, wrong: str = "", lost: bool = False) -> None:
        super().__init__(checked=False)
        self.name = "cuda:0"
        self.wrong, self.lost = wrong, lost
        self.driver = 13000
        self.submissions = 0
        self.allocated_bytes = 0

    def describe(self) -> dict[str, Any]:
        return {"device": "cuda", "name": "fake", "driver": self.driver, "memory_free": id(self)}

    def allocate(self, nbytes: int) -> Any:
        self.allocated_bytes += nbytes
        return super().allocate(nbytes)

    def free(self, native: Any) -> None:
        self.allocated_bytes -= native.nbytes

    def submit(self, work: Submission) -> DoneTicket:
        self.submissions += 1
        if self.lost:
            raise DeviceLostError("fell off the bus")
        return super().submit(work)

    def _launch(self, work: Submission, bound: Launch, words: Any) -> None:
        super()._launch(work, bound, words)
        if bound.program.name == self.wrong:
            work.slots[bound.slots[-1]].native[0] = 0x3FC00000  # 1.5, or 0 and 1.9375
