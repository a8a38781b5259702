"""The race check of shared memory that the copy engine and warpgroups reach.

What is asynchronous happens as late as it may: a box lands when a thread has waited for its
barrier, and until then its words are in flight; what a product or a store reads is being read until
its thread has waited. Whoever touches such words meanwhile is reported. All of this runs group by
group: the machine has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from centella.simulator.copies import CopiesInFlight
from centella.simulator.machine import Machine, over
from centella.simulator.race_check import NOBODY, Fault, Ids, Mask, fault_at

APART = " with no cluster barrier between"
CHUNK = 16  # bytes
Reads = list[list[tuple[int, Ids]]]  # by group of reads, the last one open: shared array, words


class Asked(NamedTuple):
    """A copy to shared memory, as it is asked for."""

    unit: int  # of the barrier where it counts
    phase: int  # of that barrier, from 1 on
    known: Ids  # to whoever asks
    engine: bool = True  # who copies: stores of threads before are to be fenced


class Boxes(CopiesInFlight):
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
        fault = self._busy(words)
        self._unfenced[words] = True
        return fault or super().write(words, threads, epochs)

    def change(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread changes its word atomically; the fault, if any."""
        return self._was_read_afar(words) or super().change(words, threads, epochs)

    def fence(self, active: Mask) -> None:
        """What these threads stored is there for asynchronous readers."""
        mine = np.flatnonzero(self._unfenced)
        self._unfenced[mine[active[self._writer[mine] % self.workgroup]]] = False

    def come(self, words: Ids, asked: Asked) -> Fault | None:
        """A box is on its way to these words; the position and text of a fault, if any."""
        text = "a box comes here, stored without ptx.async_fence() behind"
        fault = self._busy(words) or fault_at(self._unfenced[words] & asked.engine, text)
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
        fault = fault or self.unknown(words)
        text = "read by a copy or wgmma, stored without ptx.async_fence() behind"
        fault = fault or fault_at(self._unfenced[words], text)
        np.add.at(self._read, words, 1)
        return fault

    def stop_reading(
        self, words: Ids, threads: Ids, epochs: Ids, products: int | None = None
    ) -> None:
        """A thread, or a warpgroup for its products, has waited until they have been read."""
        np.subtract.at(self._read, words, 1)
        self._reader[words], self._read_epoch[words] = threads, epochs

    def read_afar(self, words: Ids, met: int) -> Fault | None:
        """Another group, which met the cluster at the epoch `met`, reads them."""
        fault = self._on_its_way(words, "read") or self.unknown(words)
        late = (self._write_epoch[words] >= met) & (self._writer[words] != NOBODY)
        if fault is None and late.any():
            who = self._name(int(self._writer[words[late.argmax()]]))
            fault = int(late.argmax()), f"race: read here, written by {who}{APART}"
        if fault is None and self._changes is not None:
            late = (self._changes.epoch[words] >= met) & (self._changes.thread[words] != NOBODY)
            fault = fault_at(late, f"race: read here, changed atomically{APART}")
        self._afar[words] = met
        return fault

    def _was_read_afar(self, words: Ids) -> Fault | None:
        afar = self._afar[words] >= self.met
        return fault_at(afar, f"race: written here, read by another group{APART}")

    def _on_its_way(self, words: Ids, what: str) -> Fault | None:
        return fault_at(self._coming[words], f"{what} before a thread has waited for its box")

    def _busy(self, words: Ids) -> Fault | None:
        """The fault of a write to words that somebody else is at."""
        text = "written while a wgmma or a store reads it"
        fault = self._on_its_way(words, "written") or fault_at(self._read[words] > 0, text)
        return fault or self._was_read_afar(words)


def active_threads(machine: Machine) -> list[int]:
    """The active threads of the group."""
    return list(machine.here[0].nonzero()[0].tolist())


def operand_values(machine: Machine, index: int, operand: int) -> list[int]:
    """The values of an operand in the active threads."""
    value = machine.values[machine.ir.body[index][2][operand]]
    return list(over(value, machine.shape)[machine.here].tolist())


def swizzled(chunks: Ids, swizzle: int) -> Ids:
    """Where a pattern of `swizzle` bytes has these chunks."""
    pattern: Ids = chunks ^ ((chunks >> 3) & (swizzle // CHUNK - 1))
    return pattern


def check_inside(machine: Machine, index: int, array: int, words: Ids) -> None:
    """Raise where a box or a factor reaches past its array."""
    most = machine.ir.shared[array].words
    if words.max() >= most:
        text = f"shared array {array} word {words.max()} is out of bounds, it has {most} words"
        raise machine.fault_here(index, text)


def check_fault(machine: Machine, index: int, array: int, words: Ids, fault: Fault | None) -> None:
    """Raise the fault of an access to these words of an array, if there is one."""
    if fault is not None:
        text = f"shared array {array} word {words[fault[0]]}: {fault[1]}"
        raise machine.fault_here(index, text)


def ids_of(machine: Machine, words: Ids, thread: int) -> tuple[Ids, Ids]:
    """A thread, numbered over the launch, and its epoch, for each word."""
    epoch = machine.epoch[0, thread % machine.epoch.shape[1]]
    number = machine.first * machine.ir.workgroup + thread
    return np.full(words.size, number, np.int64), np.full(words.size, epoch, np.int64)


def start_reading(machine: Machine, index: int, array: int, words: Ids, thread: int) -> None:
    """A thread has words of an array read from now on.

    Raises:
        SimulationError: they are outside of it, or may not be read.
    """
    check_inside(machine, index, array, words)
    race_check = machine.memory["shared"][array].race_check
    if isinstance(race_check, Boxes):
        fault = race_check.start_reading(words, *ids_of(machine, words, thread))
        check_fault(machine, index, array, words, fault)


def retire(
    machine: Machine, groups: Reads, pending: int, thread: int, products: int | None = None
) -> None:
    """What all groups but the latest ones read, they have read, as this thread knows.

    Args:
        products: the warpgroup whose they are.
    """
    done = max(len(groups) - 1 - pending, 0)
    for array, words in (read for group in groups[:done] for read in group):
        race_check = machine.memory["shared"][array].race_check
        if isinstance(race_check, Boxes):
            race_check.stop_reading(words, *ids_of(machine, words, thread), products)
    del groups[:done]


def check_reads_over(machine: Machine, reads: Mapping[int, Reads]) -> None:
    """Raise where a group ends before what it has read is read."""
    if any(any(groups) for groups in reads.values()):
        text = "a group ends while a store or a wgmma reads its memory"
        raise machine.fault_here(len(machine.ir.body) - 1, text)
