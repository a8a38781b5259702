"""`Pending`: the one type of a result that is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from centella.backends.base import Ticket
from centella.host.event_loop import in_thread
from centella.host.interrupts import uninterrupted
from centella.ledger.counts import began, count, noted

T = TypeVar("T")


class Pending(Generic[T]):
    """A result under way: `result(timeout=None)`, `done()`, or `await` it."""

    def __init__(self, tickets: Sequence[Ticket], finish: Callable[[], T]) -> None:
        self._tickets = tuple(tickets)
        self._finish: Callable[[], T] | None = finish
        self._lock = threading.Lock()
        self._result: Any = None

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("a Pending is neither copied nor pickled: its .result() is")

    def __repr__(self) -> str:
        return f"<Pending, {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """True once the device has finished; never blocks."""
        return self._finish is None or all([ticket.done() for ticket in self._tickets])

    def result(self, timeout: float | None = None) -> T:
        """Wait for the device and return the result; the same object each time.

        Raises:
            TimeoutError: after `timeout` seconds; it can be asked again.
            CentellaError: what the computation failed with.
        """
        begin = 0
        if not self.done():
            count(syncs=1)
            begin = began()
        end = None if timeout is None else time.monotonic() + timeout
        try:
            for ticket in self._tickets:
                ticket.wait(None if end is None else max(0.0, end - time.monotonic()))
        except TimeoutError as error:
            raise TimeoutError(f"not done after {timeout} s") from error
        finally:
            noted("wait", begin)
        return self._finished()

    @uninterrupted
    def _finished(self) -> T:
        with self._lock:
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
                self._tickets = ()
            return self._result  # type: ignore[no-any-return]  # what `finish` gave

    def __await__(self) -> Generator[Any, None, T]:
        return self._waited().__await__()

    async def _waited(self) -> T:
        if self.done():
            return self.result()
        return await in_thread(self.result)
