"""Time stamps around launches: pairs of CUDA events on the stream.

An event's time is told against another event only, as a float32 of milliseconds, so each submission
is placed by its distance from the timed one before it: short distances are exact.
"""

from __future__ import annotations

from collections.abc import Callable
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
        self._start: int | None = None if before is not None else 0
        self._events: list[Any] = []
        flags = driver.CUevent_flags.CU_EVENT_DEFAULT.value
        for _ in range(2 * launches):
            self._events.append(check(driver.cuEventCreate(flags)))

    def record(self, index: int, stream: Any) -> None:
        """Put event `index` on the stream: 2k before launch k, 2k + 1 after it."""
        check(driver.cuEventRecord(self._events[index], stream))

    def _since(self, before: Stamps) -> int:
        return _elapsed(before._events[0], self._events[0])

    def start(self) -> int:
        """When the first launch began, in ns since the first timed one of the stream.

        All events up to here have happened.
        """
        chain: list[Stamps] = [self]
        while chain[-1]._start is None:
            assert chain[-1]._before is not None
            chain.append(chain[-1]._before)
        while len(chain) > 1:
            known, later = chain.pop(), chain[-1]
            assert known._start is not None
            later._start = known._start + later._since(known)
            later._before = None
        assert self._start is not None
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
