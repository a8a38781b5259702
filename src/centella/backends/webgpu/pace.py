"""How long work is expected to last on an adapter, and where a submission is cut.

Desktop systems reset a GPU that is silent for two seconds. So work is submitted in parts of a
quarter of a second as expected here: operations and bytes at a rate that is guessed low by the kind
of adapter, then corrected by what submissions were seen to take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from centella.backends.base import Load, Submission
from centella.host.interrupts import uninterrupted

log: logging.Logger = logging.getLogger("centella.webgpu")

CUT, WARN = 0.25, 1.5  # seconds
LEAST = 0.002  # seconds: below, what is seen is mostly the driver
SLOWEST, FASTEST = 4.0, 1e-3  # times the guess
GUESS: dict[str, tuple[float, float]] = {  # operations and bytes a second
    "DiscreteGPU": (2e12, 1e11),
    "IntegratedGPU": (2e11, 2e10),
}


class Pace:
    """What an adapter does in a second.

    Attributes:
        factor: the time that work takes, in times of what the guess says.
        known: it was seen.
        watched: `with watched:` somebody asks all the time what is over.
    """

    def __init__(self, kind: str) -> None:
        self._flops, self._bytes = GUESS.get(kind, GUESS["IntegratedGPU"])
        self.factor: float = 1.0
        self.known: bool = False
        self.watched: Watched = Watched()
        self._begun: int = 0
        self._over: int = 0  # the last that is known to be, and with it all before

    def seconds(self, load: Load) -> float:
        """The time that work is expected to take."""
        return self.factor * (load.flops / self._flops + load.nbytes / self._bytes)

    def cuts(self, work: Submission) -> Sequence[int]:
        """The launches before which a submission is cut; none in a batch, which is one for good."""
        expected = self.seconds(work.total)
        if expected <= CUT:
            return ()
        if work.whole:
            if self.known and expected > WARN:
                log.warning(
                    "a batch is one submission, expected to take %.1f s here; a desktop "
                    "resets a GPU that is silent for 2 s: execute it in parts", expected,
                )  # fmt: skip
            return ()
        cuts: list[int] = []
        since = 0.0
        for index, load in enumerate(work.loads):
            each = self.seconds(load)
            if since and since + each > CUT:
                cuts.append(index)
                since = 0.0
            since += each
        return cuts

    def begin(self, load: Load) -> Course:
        """A submission begins."""
        by_itself = self._over == self._begun  # one that nobody waits for may be under way
        self._begun += 1
        return Course(self, load, self._begun, by_itself)

    def end(self, number: int) -> None:
        """A submission is over, and with it all before."""
        self._over = max(self._over, number)

    def seen(self, load: Load, seconds: float) -> None:
        """Learn from what a submission took that had the adapter to itself."""
        guessed = self.seconds(load) / self.factor
        if seconds >= LEAST and guessed > 0:
            ratio = min(max(seconds / guessed, FASTEST), SLOWEST)
            self.factor = 0.5 * (self.factor + ratio) if self.known else ratio
            self.known = True


class Watched:
    """How many ask all the time whether something is over."""

    def __init__(self) -> None:
        self._threads: list[None] = []

    @uninterrupted
    def __enter__(self) -> None:
        self._threads.append(None)

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        self._threads.pop()

    def __bool__(self) -> bool:
        return bool(self._threads)


class Course:
    """One submission under way, and what it says of the pace when it is over.

    Args:
        number: its place among the adapter's submissions.
        by_itself: all before were known to be over when it began.

    Attributes:
        watched: as the pace has it.
    """

    def __init__(self, pace: Pace, load: Load, number: int, by_itself: bool) -> None:
        self._pace = pace
        self.watched: Watched = pace.watched
        self._load = load
        self._number = number
        self._by_itself = by_itself
        self._begun = time.perf_counter()
        self._ended = False

    def near(self) -> bool:
        """Whether it should be over about now: within a 32nd of the time that it is to take."""
        if not (self._by_itself and self._pace.known):
            return False
        expected = self._pace.seconds(self._load)
        return abs(time.perf_counter() - self._begun - expected) < expected / 32

    def end(self) -> None:
        """It is over: just now, if somebody was looking all the time."""
        if not self._ended:
            self._ended = True
            self._pace.end(self._number)
            if self.watched and self._by_itself:
                self._pace.seen(self._load, time.perf_counter() - self._begun)
