"""The simulator's shared memory where the copy engine and warpgroups reach it, and its barriers.

What is asynchronous happens as late as it may: a box lands when a thread has waited for its
barrier, and until then its words are in flight; what a product or a store reads is being read until
its thread has waited. Whoever touches such words meanwhile is reported.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from centella.simulator.race_check import NOBODY, Fault, Ids, Mask
from centella.simulator.warps import Flights

Words = NDArray[np.uint32]
Counts = NDArray[np.int64]
APART = " with no cluster barrier between"


class Boxes(Flights):
    """What is remembered of shared memory that boxes land in and asynchronous readers read."""

    def __init__(self, words: int, workgroup: int, known: Mask) -> None:
        super().__init__(words, workgroup, known)
        self._coming = np.zeros(words, np.bool_)
        self._read = np.zeros(words, np.int64)  # by so many products and stores under way
        self._unfenced = np.zeros(words, np.bool_)
        # Of clusters: the epoch since their groups met; what it was when another group read a word.
        self.met: int = 0
        self._afar = np.full(words, NOBODY, np.int64)

    def read(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread reads its word; the position and text of a fault, if any."""
        return self._on_its_way(words, "read") or super().read(words, threads, epochs)

    def write(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread writes its word; the position and text of a fault, if any."""
        fault = self._on_its_way(words, "written") or self._being_read(words)
        fault = fault or self._was_read_afar(words)
        self._unfenced[words] = True
        return fault or super().write(words, threads, epochs)

    def change(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread changes its word atomically; the fault, if any."""
        return self._was_read_afar(words) or super().change(words, threads, epochs)

    def fence(self, active: Mask) -> None:
        """What these threads stored is there for asynchronous readers."""
        mine = np.flatnonzero(self._unfenced)
        self._unfenced[mine[active[self._writer[mine] % self.workgroup]]] = False

    def come(self, words: Ids) -> Fault | None:
        """A box is on its way to these words; the position and text of a fault, if any."""
        fault = self._on_its_way(words, "written") or self._being_read(words)
        fault = fault or self._was_read_afar(words)
        self._coming[words] = True
        return fault

    def came(self, words: Ids) -> None:
        """A box is there for everybody."""
        self._coming[words] = False
        self._unfenced[words] = False
        self.known[words] = True
        self._writer[words] = self._reader[words] = NOBODY

    def start_reading(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """A thread has them read from now on; the position and text of a fault, if any."""
        fault = self._on_its_way(words, "read")
        fault = fault or self._written_by_another(words, threads, epochs, "read")
        if fault is None and not self.known[words].all():
            fault = int((~self.known[words]).argmax()), "read, but nobody wrote it"
        if fault is None and self._unfenced[words].any():
            at = int(self._unfenced[words].argmax())
            fault = at, "read by a copy or wgmma, stored without ptx.async_fence() behind"
        np.add.at(self._read, words, 1)
        return fault

    def stop_reading(self, words: Ids, threads: Ids, epochs: Ids) -> None:
        """A thread has waited until they have been read."""
        np.subtract.at(self._read, words, 1)
        self._reader[words], self._read_epoch[words] = threads, epochs

    def read_afar(self, words: Ids, met: int) -> Fault | None:
        """Another group, which met the cluster at the epoch `met`, reads them."""
        fault = self._on_its_way(words, "read")
        if fault is None and not self.known[words].all():
            fault = int((~self.known[words]).argmax()), "read, but nobody wrote it"
        late = (self._write_epoch[words] >= met) & (self._writer[words] != NOBODY)
        if fault is None and late.any():
            who = self._name(int(self._writer[words[late.argmax()]]))
            fault = int(late.argmax()), f"race: read here, written by {who}{APART}"
        if fault is None and self._changes is not None:
            late = (self._changes.epoch[words] >= met) & (self._changes.thread[words] != NOBODY)
            if late.any():
                fault = int(late.argmax()), f"race: read here, changed atomically{APART}"
        self._afar[words] = met
        return fault

    def _was_read_afar(self, words: Ids) -> Fault | None:
        afar = self._afar[words] >= self.met
        if not afar.any():
            return None
        return int(afar.argmax()), f"race: written here, read by another group{APART}"

    def _on_its_way(self, words: Ids, what: str) -> Fault | None:
        coming = self._coming[words]
        if not coming.any():
            return None
        return int(coming.argmax()), f"{what} before a thread has waited for its box"

    def _being_read(self, words: Ids) -> Fault | None:
        busy = self._read[words] > 0
        if not busy.any():
            return None
        return int(busy.argmax()), "written while a wgmma or a store reads it"


class Phases:
    """The memory barriers of one shared array (PTX ISA, "mbarrier")."""

    def __init__(self, count: int) -> None:
        self.needed: Counts = np.zeros(count, np.int64)  # arrivals of a phase; 0: not initialised
        self.arrived: Counts = np.zeros(count, np.int64)
        self.announced: Counts = np.zeros(count, np.int64)
        self.copied: Counts = np.zeros(count, np.int64)
        self.over: Counts = np.zeros(count, np.int64)  # phases
        self.epochs: Counts = np.zeros(count, np.int64)  # the latest that a thread arrived in
        self.boxes: list[list[tuple[int, Ids, Words]]] = [[] for _ in range(count)]
        self.ready: list[list[tuple[int, Ids, Words]]] = [[] for _ in range(count)]

    def init(self, which: int, arrivals: int) -> str:
        """Make one ready; what is wrong with that, or ""."""
        self.needed[which] = arrivals
        return "" if arrivals > 0 else "a barrier of no arrivals"

    def arrive(self, which: int, nbytes: int, epoch: int) -> str:
        """One arrival; what is wrong with it, or ""."""
        if not self.needed[which]:
            return "a barrier that was not initialised"
        self.epochs[which] = max(self.epochs[which], epoch)
        self.arrived[which] += 1
        self.announced[which] += nbytes
        if self.arrived[which] > self.needed[which]:
            return "more arrivals than the barrier waits for"
        self._settle(which)
        return ""

    def copy(self, which: int, box: tuple[int, Ids, Words]) -> str:
        """A box whose bytes count here; what is wrong with that, or ""."""
        if not self.needed[which]:
            return "a box for a barrier that was not initialised"
        self.boxes[which].append(box)
        self.copied[which] += 4 * box[1].size
        self._settle(which)
        return ""

    def _settle(self, which: int) -> None:
        """The phase is over when all have arrived and all bytes are there."""
        missing = self.needed[which] - self.arrived[which]
        if not missing and self.announced[which] == self.copied[which]:
            self.over[which] += 1
            self.arrived[which] = self.announced[which] = self.copied[which] = 0
            self.ready[which] += self.boxes[which]
            self.boxes[which] = []

    def is_over(self, which: int, parity: int) -> bool:
        """Whether the phase of a parity is: the one before the first, of parity 1, is."""
        return bool((self.over[which] & 1) != parity)

    def landed(self, which: int) -> list[tuple[int, Ids, Words]]:
        """Boxes that whoever has waited finds."""
        boxes, self.ready[which] = self.ready[which], []
        return boxes
