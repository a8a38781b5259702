"""The race check: who wrote and who read each word, so that races and unwritten reads are seen.

Threads are numbered over the whole launch. An epoch counts the barriers that a group has passed;
two accesses of one group in one epoch have no order. Two groups never have one. What barriers in
shared memory order is in `clocks.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]
Fault = tuple[int, str]

NOBODY, SEVERAL = -1, -2


class Known:
    """Which words of memory hold something: all that there is to know of what nobody writes."""

    def __init__(self, known: Mask) -> None:
        self.known: Mask = known.copy()
        self.written: Mask = np.zeros(known.size, np.bool_)

    def read(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread reads its word; the position and text of a fault, if any."""
        return self.unknown(words)

    def unknown(self, words: Ids) -> Fault | None:
        """The fault of a read of these words where one of them holds nothing."""
        known = self.known[words]
        if np.count_nonzero(known) == known.size:  # several times as fast as `all` where few are
            return None
        return int(known.argmin()), "read, but nobody wrote it"


class Changes:
    """Of each word the threads that changed it atomically in the current epoch, and the groups."""

    def __init__(self, words: int) -> None:
        self.thread: Ids = np.full(words, NOBODY, np.int64)
        self.group: Ids = np.full(words, NOBODY, np.int64)
        self.epoch: Ids = np.zeros(words, np.int64)

    def note(self, words: Ids, threads: Ids, groups: Ids, epochs: Ids) -> None:
        """Note that each thread changes its word."""
        now = self.epoch[words] == epochs
        _join(self.thread, words, threads, np.where(now, self.thread[words], NOBODY))
        _join(self.group, words, groups, self.group[words])
        self.epoch[words] = epochs


class RaceCheck(Known):
    """What the simulator remembers about each word of a shared array, which one group has.

    The first fault ends the simulation, so one writer a word is enough. Of the readers in the
    current epoch it is enough to know one, or that there are several.
    """

    def __init__(self, words: int, workgroup: int, known: Mask) -> None:
        super().__init__(known)
        self.workgroup: int = workgroup
        self._writer = np.full(words, NOBODY, np.int64)
        self._write_epoch = np.zeros(words, np.int64)
        self._reader = np.full(words, NOBODY, np.int64)
        self._read_epoch = np.zeros(words, np.int64)
        self._changes: Changes | None = None  # since the first atomic

    def read(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread reads its word; the position and text of a fault, if any."""
        fault = super().read(words, threads, epochs)
        fault = fault or self._written_by_another(words, threads, epochs, "read")
        fault = fault or self._changed_by_another(words, threads, epochs, "read")
        if fault is None:
            before = self._reader[words]
            before[self._read_epoch[words] != epochs] = NOBODY
            _join(self._reader, words, threads, before)
            self._read_epoch[words] = epochs
        return fault

    def write(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread writes its word; the position and text of a fault, if any."""
        fault = self._written_by_another(words, threads, epochs, "written")
        fault = fault or self._changed_by_another(words, threads, epochs, "written")
        fault = fault or self._read_by_another(words, threads, epochs, "written")
        if fault is not None:
            return fault
        self._writer[words] = threads
        self._write_epoch[words] = epochs
        self.known[words] = True
        self.written[words] = True
        twice = self._writer[words] != threads
        if np.count_nonzero(twice):
            at = int(twice.argmax())
            other = int(self._writer[words[at]])
            return at, f"race: written here by {self._name(other)} too"
        return None

    def change(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread changes its word atomically, which races with no other change."""
        fault = super().read(words, threads, epochs)
        fault = fault or self._written_by_another(words, threads, epochs, "changed atomically")
        fault = fault or self._read_by_another(words, threads, epochs, "changed atomically")
        if fault is None:
            if self._changes is None:
                self._changes = Changes(self.known.size)
            self._changes.note(words, threads, threads // self.workgroup, epochs)
            self.written[words] = True
        return fault

    def _changed_by_another(self, words: Ids, threads: Ids, epochs: Ids, what: str) -> Fault | None:
        if self._changes is None:
            return None
        who, group = self._changes.thread[words], self._changes.group[words]
        apart = (group != threads // self.workgroup) & (group != NOBODY)
        others = (who != threads) & (who != NOBODY) & (self._changes.epoch[words] == epochs)
        others |= apart
        return self._race(others, apart, who, f"{what} here, changed atomically")

    def _written_by_another(self, words: Ids, threads: Ids, epochs: Ids, what: str) -> Fault | None:
        writer = self._writer[words]
        others = writer != threads
        others &= writer != NOBODY
        if not np.count_nonzero(others):  # as most accesses: no word of what another has written
            return None
        apart = self._apart(writer, threads)
        others &= apart | (self._write_epoch[words] == epochs)
        return self._race(others, apart, writer, f"{what} here, written")

    def _apart(self, who: Ids, threads: Ids) -> Mask:
        """Whether these are threads of another group: none is."""
        return np.zeros(who.shape, np.bool_)

    def _read_by_another(self, words: Ids, threads: Ids, epochs: Ids, what: str) -> Fault | None:
        reader = self._reader[words]
        others = (reader != threads) & (reader != NOBODY) & (self._read_epoch[words] == epochs)
        nobody = np.zeros(others.shape, np.bool_)
        return self._race(others, nobody, reader, f"{what} here, read")

    def _race(self, race: Mask, apart: Mask, who: Ids, what: str) -> Fault | None:
        """The first of these accesses, and what it collides with."""
        if not np.count_nonzero(race):
            return None
        at = int(race.argmax())
        return at, f"race: {what} by {self._name(int(who[at]))}{_why(apart[at])}"

    def _name(self, thread: int) -> str:
        if thread == SEVERAL:
            return "several threads"
        return f"thread {thread % self.workgroup} of group {thread // self.workgroup}"


class Buffer(RaceCheck):
    """What is remembered about each word of a buffer, which all groups have.

    Of the groups that have read it, too, it is enough to know one, or that there are several.
    """

    def __init__(self, words: int, workgroup: int, known: Mask) -> None:
        super().__init__(words, workgroup, known)
        self._read_group = np.full(words, NOBODY, np.int64)

    def read(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread reads its word; the position and text of a fault, if any."""
        fault = super().read(words, threads, epochs)
        if fault is None:
            _join(self._read_group, words, threads // self.workgroup, self._read_group[words])
        return fault

    def meet(self) -> None:
        """All groups meet: what was accessed before is ordered before what comes."""
        for table in (self._writer, self._reader, self._read_group):
            table.fill(NOBODY)
        self._changes = None

    def _apart(self, who: Ids, threads: Ids) -> Mask:
        """Whether these are threads of another group."""
        apart: Mask = who // self.workgroup != threads // self.workgroup
        return apart

    def _read_by_another(self, words: Ids, threads: Ids, epochs: Ids, what: str) -> Fault | None:
        group = self._read_group[words]
        apart = (group != threads // self.workgroup) & (group != NOBODY)
        fault = self._race(apart, apart, self._reader[words], f"{what} here, read")
        return fault or super()._read_by_another(words, threads, epochs, what)


def fault_at(bad: Mask, text: str) -> Fault | None:
    """The fault at the first of these accesses that is bad."""
    return (int(bad.argmax()), text) if np.count_nonzero(bad) else None


def _join(table: Ids, words: Ids, who: Ids, before: Ids) -> None:
    """Make `table[words]` the one in `who`, or SEVERAL where `before` or `who` has another."""
    several = before != who
    several &= before != NOBODY
    table[words] = who
    several |= table[words] != who
    if np.count_nonzero(several):
        table[words[several]] = SEVERAL


def _why(apart: np.bool_) -> str:
    return "; groups do not meet in between" if apart else " with no barrier between"
