"""Barriers in shared memory that count arrivals and bytes, and what waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from centella.simulator.bulk import Boxes, active_threads, operand_values
from centella.simulator.clocks import Clocks
from centella.simulator.group_ops import WARP
from centella.simulator.launch import Words
from centella.simulator.machine import Capability, Machine, over
from centella.simulator.race_check import Ids

Box = tuple[int, Ids, Words]  # shared array, its words, their bits


class Barrier:
    """A memory barrier (PTX ISA, "mbarrier").

    Args:
        unit: that counts its phases; units: all that there are.
    """

    def __init__(self, unit: int, units: int) -> None:
        self.unit: int = unit
        self.known: Ids = np.zeros(units, np.int64)  # published to the phase that was over last
        self._published: Ids = np.zeros(units, np.int64)  # to the present one
        self.needed: int = 0  # arrivals of a phase; 0: not initialised
        self.arrived: int = 0
        self.announced: int = 0  # bytes
        self.copied: int = 0
        self.over: int = 0  # phases
        self.epoch: int = 0  # the latest that a thread arrived in
        self.boxes: list[Box] = []
        self.ready: list[Box] = []

    def init(self, arrivals: int) -> str:
        """Make it ready; what is wrong with that, or ""."""
        self.needed = arrivals
        return "" if arrivals > 0 else "a barrier of no arrivals"

    def arrive(self, count: int, epoch: int, known: Ids, nbytes: int = 0) -> str:
        """Arrivals of a warp, and what it knows; what is wrong with them, or ""."""
        if not self.needed:
            return "a barrier that was not initialised"
        self.epoch = max(self.epoch, epoch)
        self.announced += nbytes
        while count:
            np.maximum(self._published, known, out=self._published)
            now = min(count, self.needed - self.arrived)
            if not now:
                return "more arrivals than the barrier waits for"
            self.arrived += now
            count -= now
            self._settle()
        return ""

    def copy(self, box: Box, known: Ids) -> str:
        """A box whose bytes count here, what is known of before; what is wrong with it, or ""."""
        if not self.needed:
            return "a box for a barrier that was not initialised"
        self.boxes.append(box)
        self.copied += 4 * box[1].size
        np.maximum(self._published, known, out=self._published)
        self._settle()
        return ""

    def _settle(self) -> None:
        """The phase is over when all have arrived and all bytes are there."""
        if self.arrived == self.needed and self.announced == self.copied:
            self.over += 1
            self.arrived = self.announced = self.copied = 0
            self.ready += self.boxes
            self.boxes = []
            self._published[self.unit] = self.over
            self.known, self._published = self._published, np.zeros_like(self.known)

    def is_over(self, parity: int) -> bool:
        """Whether the phase of a parity is: the one before the first, of parity 1, is."""
        return self.over & 1 != parity

    def landed(self) -> list[Box]:
        """Boxes that whoever has waited finds."""
        boxes, self.ready = self.ready, []
        return boxes


class Barriers:
    """The barriers of a group."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks: Clocks = clocks
        self._of: dict[tuple[int, int], Barrier] = {}  # by array and place in it

    def capability(self) -> Capability:
        """The statements of barriers."""
        return Capability({
            "mbar_init": self._init, "mbar_fence": lambda machine, index: None,
            "mbar_arrive": self._arrive, "mbar_expect": self._arrive,
        }, {"mbar_wait": self._wait}, self._end)  # fmt: skip

    def at(self, array: int, number: int) -> Barrier:
        """A barrier of a shared array."""
        if (array, number) not in self._of:
            unit = self.clocks.columns.start + self.clocks.units.barrier(array, number)
            self._of[array, number] = Barrier(unit, self.clocks.every.shape[1])
        return self._of[array, number]

    def _init(self, machine: Machine, index: int) -> None:
        array, arrivals = machine.ir.body[index][3]
        for number in barriers_of(machine, index, 0, array):
            check(machine, index, self.at(array, number).init(arrivals))

    def _arrive(self, machine: Machine, index: int) -> None:
        op, _, _, array = machine.ir.body[index]
        numbers = barriers_of(machine, index, 0, array)
        active = machine.here
        epoch = int(over(machine.epoch, machine.shape)[active].max())
        known = self.clocks.release(active)
        warps = [thread // WARP for thread in active_threads(machine)]
        if op == "mbar_expect":
            nbytes = operand_values(machine, index, 1)
            for number, warp, n in zip(numbers, warps, nbytes, strict=True):
                check(machine, index, self.at(array, number).arrive(1, epoch, known[warp], n))
            return
        for (number, warp), count in Counter(zip(numbers, warps, strict=True)).items():
            check(machine, index, self.at(array, number).arrive(count, epoch, known[warp]))

    def _wait(self, machine: Machine, index: int) -> Iterator[None]:
        _, _, _, array = machine.ir.body[index]
        active = machine.active
        parities = operand_values(machine, index, 1)
        which = list(zip(barriers_of(machine, index, 0, array), parities, strict=True))
        phases = sorted(set(which))
        for number, parity in phases:
            barrier = self.at(array, number)
            if not barrier.needed:
                raise machine.fault_here(index, "a barrier that was not initialised")
            while not barrier.is_over(parity):
                machine.waits_at = index
                yield
                machine.narrow(active)
            machine.passed += 1
            here = over(active, machine.shape).copy()
            if len(phases) > 1:
                here[here] = [phase == (number, parity) for phase in which]
            self.clocks.learn(self.clocks.warps_in(here), barrier.known)
            # What arrivals come after is seen by who has waited: a later epoch.
            later = np.maximum(machine.epoch, barrier.epoch + 1)
            machine.epoch = np.where(machine.active, later, machine.epoch)
            for position, words, bits in barrier.landed():
                region = machine.memory["shared"][position]
                region.words[words] = bits
                if isinstance(region.race_check, Boxes):
                    region.race_check.came(words)

    def _end(self, machine: Machine) -> None:
        if any(barrier.boxes or barrier.ready for barrier in self._of.values()):
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
