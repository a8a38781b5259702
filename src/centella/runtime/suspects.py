"""Values that a kernel may have left wrong, because the driver stopped one of its loops.

A read-back reports stopped loops (`backends.webgpu.loops`). It raises once; here the values are
noted that such a kernel wrote, or that were computed from those, so that each later use of them
raises as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from centella.backends.base import Buffer, Submission
from centella.emit.program import Program
from centella.errors import LimitError
from centella.record.values import Value


class Suspects:
    """The values of one device that no read-back has vouched for yet.

    Args:
        lock: the device's.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._serials: WeakKeyDictionary[Value, int] = WeakKeyDictionary()

    def note(self, work: Submission, serial: int, values: Iterable[Value | None]) -> None:
        """Note which values a submission leaves suspect; under the device's lock.

        Args:
            serial: of the submission.
            values: what it computes.
        """
        if work.reports or self._serials:
            buffers = self._buffers(work)
            for value in values:
                if value is not None and value.buffer in buffers:
                    self._serials[value] = serial

    def _buffers(self, work: Submission) -> set[Buffer]:
        """The buffers that hold suspect data once `work` has run."""
        suspect = {value.buffer for value in self._serials if value.buffer is not None}
        slots = work.slots
        for copy in work.copies:
            if slots[copy.source] in suspect:
                suspect.add(slots[copy.target])
        for launch in work.launches:
            program = launch.program
            if not isinstance(program, Program):
                continue
            pairs = zip(launch.slots, program.ir.args, strict=True)
            operands = [(slots[slot], arg.writable) for slot, arg in pairs]
            if program.reports or any(
                buffer in suspect
                for i, (buffer, writable) in enumerate(operands)
                if i < launch.inputs or not writable
            ):
                suspect.update(buffer for buffer, writable in operands if writable)
        return suspect

    def passed(self, serial: int) -> None:
        """The read-back of the submission `serial` found that no loop had been stopped."""
        if self._serials:
            with self._lock:
                for value in [v for v, of in self._serials.items() if of <= serial]:
                    del self._serials[value]

    def refuse(self, error: LimitError) -> None:
        """A read-back found a stopped loop: whoever uses a suspect value gets its error."""
        with self._lock:
            values = list(self._serials)
            self._serials.clear()
            for value in values:
                value.refuse(error)
