"""Submissions under way: what they hold until they are done, and what is lost when they fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count as counter

from centella.backends.base import Array, Buffer, DoneTicket, Ticket, Times
from centella.errors import DeviceError, DeviceLostError, LimitError
from centella.runtime.suspects import Suspects


class Border:
    """Around calls of a backend: `with border:` notes when one finds that the device is lost.

    Args:
        lose: called with the reason.
    """

    def __init__(self, lose: Callable[[str], None]) -> None:
        self._lose = lose

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Let an error pass."""
        if isinstance(error, DeviceLostError):
            self._lose(str(error))


def imported_of(slots: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """The buffers that are the application's memory."""
    return tuple([buffer for buffer in slots if buffer.owner is not None])


class InFlight:
    """The submissions of one device that are not known to be done, in the order that they end in.

    Args:
        lose: called with the reason when the device turns out to be lost.
        landed: called without the device's lock when somebody has waited for one.
        suspects: is told what read-backs say of stopped loops.

    Attributes:
        finished: the last that is known to be done, by number.
    """

    def __init__(
        self, lose: Callable[[str], None], landed: Callable[[], None], suspects: Suspects
    ) -> None:
        self.lose: Callable[[str], None] = lose
        self.landed: Callable[[], None] = landed
        self.suspects: Suspects = suspects
        self.finished: int = 0
        self._serials = counter(1)
        self._holding: deque[Watched] = deque()

    def watch(
        self, ticket: Ticket, meant: Sequence[tuple[int, int]], imported: tuple[Buffer, ...]
    ) -> Watched:
        """A submission's ticket, watched; what was imported lives until it is done.

        Args:
            meant: which of the bytes that come back were asked for: first and number.
            imported: memory of the application's that it uses.
        """
        # A write alone says nothing of the work before it.
        serial = 0 if isinstance(ticket, DoneTicket) else next(self._serials)
        watched = Watched(self, ticket, serial, meant, imported)
        self.sweep()
        if imported:
            self._holding.append(watched)
        return watched

    def sweep(self) -> None:
        """Let go of imported memory whose submissions are done."""
        waiting = self._holding
        while waiting and (not waiting[0].imported or waiting[0].done()):
            waiting.popleft().imported = ()

    def clear(self) -> None:
        """Let go of everything: the device is closed."""
        self._holding.clear()


class Watched:
    """A ticket that trims read-backs, keeps imported memory alive and reports a lost device.

    Attributes:
        imported: memory of the application, until the submission is done.
        serial: its place in the order of submissions, in which they finish.
    """

    def __init__(
        self, submissions: InFlight, ticket: Ticket, serial: int, meant: Sequence[tuple[int, int]],
        imported: tuple[Buffer, ...],
    ) -> None:  # fmt: skip
        self._submissions = submissions
        self._ticket = ticket
        self._meant = meant
        self.imported: tuple[Buffer, ...] = imported
        self.serial: int = serial

    def done(self) -> bool:
        """True once the device has finished it, or was lost: `wait` says which."""
        try:
            done = self.serial <= self._submissions.finished or self._ticket.done()
        except DeviceError as error:
            self._submissions.lose(str(error))
            return True
        if done:
            self._submissions.finished = max(self._submissions.finished, self.serial)
        return done

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished; raises what it failed with, or TimeoutError."""
        try:
            self._ticket.wait(timeout)
        except DeviceLostError as error:
            self._submissions.lose(str(error))
            raise
        self.imported = ()
        self._submissions.finished = max(self._submissions.finished, self.serial)
        self._submissions.landed()

    def data(self, index: int) -> Array:
        """The bytes asked for as read-back `index`; a copy that the caller owns.

        Raises:
            LimitError: the driver has stopped a loop before; what it may have left wrong is refused
                from then on.
        """
        first, nbytes = self._meant[index]
        suspects = self._submissions.suspects
        try:
            whole = self._ticket.data(index)
        except LimitError as error:
            suspects.refuse(error, self.serial)
            raise
        suspects.passed(self.serial)
        return whole[first : first + nbytes]

    def times(self) -> Times | None:
        """Begin and end of each launch in ns; waits."""
        self.wait()
        return self._ticket.times()
