"""Time stamps around launches: pairs of CUDA events on the stream.

An event's time is told against another event only, as a float32 of milliseconds, so each submission
is placed by its distance from the timed one before it: short distances are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from centella.backends.base import Times
from centella.backends.cuda.driver import check, driver


class Stamps:
    """The events of one submission.

    Args:
        before: the stamps of the timed submission before it on this stream, if there was one.
        give_up: takes the events when nothing refers to them any more; safe in a finalizer.
    """

    def __init__(
        self, launches: int, before: Stamps | None, give_up: Callable[[list[Any]], None]
    ) -> None:
        self._give_up = give_up
        self._before = before
        self._start = 0  # of the first timed one; of others known where nothing is before
        self._events: list[Any] = []
        flags = driver.CUevent_flags.CU_EVENT_DEFAULT.value
        for _ in range(2 * launches):
            self._events.append(check(driver.cuEventCreate(flags)))

    def record(self, index: int, stream: Any) -> None:
        """Put event `index` on the stream: 2k before launch k, 2k + 1 after it."""
        check(driver.cuEventRecord(self._events[index], stream))

    def start(self) -> int:
        """When the first launch began, in ns since the first timed one of the stream.

        All events up to here have happened.
        """
        chain: list[Stamps] = [self]
        while (before := chain[-1]._before) is not None:
            chain.append(before)
        for known, later in pairwise(reversed(chain)):
            later._start = known._start + _elapsed(known._events[0], later._events[0])
            later._before = None
        return self._start

    def times(self) -> Times:
        """Begin and end of each launch in ns; the context is current and all have happened."""
        start, first = self.start(), self._events[0]
        pairs = zip(self._events[::2], self._events[1::2], strict=True)
        return [
            (begun := start + _elapsed(first, begin), begun + _elapsed(begin, end))
            for begin, end in pairs
        ]

    def __del__(self) -> None:
        self._give_up(self._events)


def _elapsed(begin: Any, end: Any) -> int:
    return round(float(check(driver.cuEventElapsedTime(begin, end))) * 1e6)
