"""Barriers in shared memory that count arrivals and bytes, and what waits for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from centella.simulator.bulk import Boxes, operand_values
from centella.simulator.launch import Words
from centella.simulator.machine import Capability, Machine
from centella.simulator.race_check import Ids

Counts = NDArray[np.int64]
Box = tuple[int, Ids, Words]  # shared array, its words, their bits


class Phases:
    """The memory barriers of one shared array (PTX ISA, "mbarrier")."""

    def __init__(self, count: int) -> None:
        self.needed: Counts = np.zeros(count, np.int64)  # arrivals of a phase; 0: not initialised
        self.arrived: Counts = np.zeros(count, np.int64)
        self.announced: Counts = np.zeros(count, np.int64)
        self.copied: Counts = np.zeros(count, np.int64)
        self.over: Counts = np.zeros(count, np.int64)  # phases
        self.epochs: Counts = np.zeros(count, np.int64)  # the latest that a thread arrived in
        self.boxes: list[list[Box]] = [[] for _ in range(count)]
        self.ready: list[list[Box]] = [[] for _ in range(count)]

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

    def copy(self, which: int, box: Box) -> str:
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

    def landed(self, which: int) -> list[Box]:
        """Boxes that whoever has waited finds."""
        boxes, self.ready[which] = self.ready[which], []
        return boxes


class Barriers:
    """The barriers of a group."""

    def __init__(self) -> None:
        self._phases: dict[int, Phases] = {}

    def capability(self) -> Capability:
        """The statements of barriers."""
        return Capability({
            "mbar_init": self._init, "mbar_fence": lambda machine, index: None,
            "mbar_arrive": self._arrive, "mbar_expect": self._arrive,
        }, {"mbar_wait": self._wait}, self._end)  # fmt: skip

    def phases_of(self, machine: Machine, array: int) -> Phases:
        """The barriers of a shared array."""
        if array not in self._phases:
            self._phases[array] = Phases(machine.ir.shared[array].words // 2)
        return self._phases[array]

    def _init(self, machine: Machine, index: int) -> None:
        array, arrivals = machine.ir.body[index][3]
        for which in barriers_of(machine, index, 0, array):
            check(machine, index, self.phases_of(machine, array).init(which, arrivals))

    def _arrive(self, machine: Machine, index: int) -> None:
        op, _, _, array = machine.ir.body[index]
        which = barriers_of(machine, index, 0, array)
        nbytes = operand_values(machine, index, 1) if op == "mbar_expect" else [0] * len(which)
        active = np.broadcast_to(machine.active, machine.shape)
        epochs = np.broadcast_to(machine.epoch, machine.shape)[active]
        for barrier, n, epoch in zip(which, nbytes, epochs, strict=True):
            check(machine, index, self.phases_of(machine, array).arrive(barrier, n, int(epoch)))

    def _wait(self, machine: Machine, index: int) -> Iterator[None]:
        _, _, _, array = machine.ir.body[index]
        active = machine.active
        phases = self.phases_of(machine, array)
        parity = operand_values(machine, index, 1)[0]
        for barrier in sorted(set(barriers_of(machine, index, 0, array))):
            if not phases.needed[barrier]:
                raise machine.fault_here(index, "a barrier that was not initialised")
            while not phases.is_over(barrier, parity):
                machine.waits_at = index
                yield
                machine.narrow(active)
            machine.passed += 1
            # What arrivals come after is seen by who has waited: a later epoch.
            later = np.maximum(machine.epoch, phases.epochs[barrier] + 1)
            machine.epoch = np.where(machine.active, later, machine.epoch)
            for position, words, bits in phases.landed(barrier):
                region = machine.memory["shared"][position]
                region.words[words] = bits
                if isinstance(region.shadow, Boxes):
                    region.shadow.came(words)

    def _end(self, machine: Machine) -> None:
        if any(box for p in self._phases.values() for box in (*p.boxes, *p.ready)):
            text = "a group ends while a box is on its way to its memory"
            raise machine.fault_here(len(machine.ir.body) - 1, text)


def barriers_of(machine: Machine, index: int, operand: int, array: int) -> list[int]:
    """The barriers of an array that an operand names in the active threads."""
    which, most = operand_values(machine, index, operand), machine.ir.shared[array].words // 2
    if max(which) >= most:
        text = f"shared array {array} has {most} barriers, got {max(which)}"
        raise machine.fault_here(index, text)
    return which


def check(machine: Machine, index: int, text: str) -> None:
    """Raise what is wrong with the use of a barrier, if anything is."""
    if text:
        raise machine.fault_here(index, text)
