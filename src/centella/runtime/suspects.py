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
        # The submission that computed it, and the earliest whose loops it depends on.
        self._serials: WeakKeyDictionary[Value, tuple[int, int]] = WeakKeyDictionary()

    def note(self, work: Submission, serial: int, values: Iterable[Value | None]) -> None:
        """Note which values a submission leaves suspect; under the device's lock.

        Args:
            serial: of the submission.
            values: what it computes.
        """
        if work.reports or self._serials:
            earliest = self._earliest(work, serial)
            for value in values:
                if value is not None and value.buffer in earliest:
                    self._serials[value] = serial, earliest[value.buffer]

    def _earliest(self, work: Submission, serial: int) -> dict[Buffer, int]:
        """By buffer that holds suspect data once `work` has run: whose loops it depends on."""
        suspect: dict[Buffer, int] = {}

        def depend(buffer: Buffer, on: int) -> None:
            suspect[buffer] = min(on, suspect.get(buffer, on))

        for value, (_, first) in self._serials.items():
            if value.buffer is not None:
                depend(value.buffer, first)
        slots = work.slots
        for copy in work.copies:
            if slots[copy.source] in suspect:
                depend(slots[copy.target], suspect[slots[copy.source]])
        for launch in work.launches:
            program = launch.program
            if not isinstance(program, Program):
                continue
            pairs = zip(launch.slots, program.ir.args, strict=True)
            operands = [(slots[slot], arg.writable) for slot, arg in pairs]
            read = [
                suspect[buffer]
                for i, (buffer, writable) in enumerate(operands)
                if buffer in suspect and (i < launch.inputs or not writable)
            ]
            if first := min([*read, *[serial] * program.reports], default=0):
                for buffer in (buffer for buffer, writable in operands if writable):
                    depend(buffer, first)
        return suspect

    def passed(self, serial: int) -> None:
        """The read-back of the submission `serial` found that no loop had been stopped."""
        if self._serials:
            with self._lock:
                for value in [v for v, (of, _) in self._serials.items() if of <= serial]:
                    del self._serials[value]

    def refuse(self, error: LimitError, serial: int) -> None:
        """The read-back of the submission `serial` found a stopped loop.

        Whoever uses a value that may depend on it gets its error.
        """
        with self._lock:
            for value in [v for v, (_, first) in self._serials.items() if first <= serial]:
                del self._serials[value]
                value.refuse(error)
