"""What comes before what, where threads meet by barriers in shared memory.

One epoch a thread is too little there: whoever waits for one barrier would come behind threads that
only arrived at another. So each warp has a vector clock: how far it knows every unit of its
cluster. Units are the warps, whose clock goes on with each arrival; the products of each warpgroup,
whose clock goes on where it has waited for some; and the barriers, whose clock counts phases.

- An arrival publishes the clock of its warp to the present phase of its barrier; a copy that counts
  there publishes the clock of the warp that asked for it, and what it writes is of that phase.
- Who has waited for a phase knows what was published to that phase, and no more.
- Threads that meet (group, warpgroup, cluster) know what all of them knew before.

Of each word of shared memory the last write is kept, and of each warp its last read. An access that
does not know them all is a race. Threads of one warp go together: one of them arrives, or waits,
for all, and their own accesses are told apart by epochs, as everywhere.
"""

from __future__ import annotations

import numpy as np

from centella.simulator.bulk import Asked, Boxes
from centella.simulator.group_ops import GROUP_OPS, WARP, WARPGROUP, warpgroups
from centella.simulator.launch import SimulatedLaunch
from centella.simulator.machine import Capability, Machine, Rule
from centella.simulator.race_check import Fault, Ids, Mask

GROUP_BARRIERS = "barrier", "grid_barrier", "workgroup_uniform"
UNORDERED = " with no barrier between"


class Units:
    """The units of a group, in order: warps, products of warpgroups, barriers."""

    def __init__(self, launch: SimulatedLaunch) -> None:
        workgroup = launch.ir.workgroup
        self.warps: int = -(-workgroup // WARP)
        self.readers: int = self.warps + -(-workgroup // WARPGROUP)
        self.count: int = self.readers
        self._first: dict[int, int] = {}  # of each array of barriers
        for array, barriers in launch.barriers.items():
            self._first[array] = self.count
            self.count += barriers

    def barrier(self, array: int, number: int) -> int:
        """The unit of a barrier; one that nobody initialises has none, and is reported."""
        return self._first[array] + number if array in self._first else 0


class Clocks:
    """What the warps of a group know.

    Args:
        every: what the warps of all groups of the cluster know of all its units.
        rank: of the group.
    """

    def __init__(self, units: Units, every: Ids, rank: int) -> None:
        self.units: Units = units
        self.every: Ids = every
        self.rank: int = rank
        rows = slice(rank * units.warps, (rank + 1) * units.warps)
        self.columns: slice = slice(rank * units.count, (rank + 1) * units.count)
        self.known: Ids = every[rows]  # of all units, by warp
        self.own: Ids = self.known[:, self.columns]  # of those of this group
        self.now: Ids = self.own.diagonal()  # its own clock, by warp
        self._own_unit = np.arange(units.warps) + self.columns.start
        self._first_lanes = np.arange(units.warps) * WARP
        self._begins = np.arange(rows.start, rows.stop) * every.shape[1] + self.columns.start
        self._go_on(np.arange(units.warps))

    def _go_on(self, warps: Ids) -> None:
        self.known[warps, self._own_unit[warps]] += 1

    def warps_in(self, threads: Mask) -> Ids:
        """The warps that have threads in a mask of the group."""
        return np.flatnonzero(np.logical_or.reduceat(threads.reshape(-1), self._first_lanes))

    def release(self, threads: Mask) -> dict[int, Ids]:
        """What the warps of these threads publish, by warp; what they do next comes behind it."""
        warps = self.warps_in(threads)
        published = dict(zip(warps.tolist(), self.known[warps], strict=True))
        self._go_on(warps)
        return published

    def knows(self, warps: Ids, units: Ids) -> Ids:
        """How far warps know units of this group, one by one."""
        return np.asarray(self.every.take(self._begins.take(warps) + units))

    def learn(self, warps: Ids | slice, published: Ids) -> None:
        """These warps know what was published."""
        self.known[warps] = np.maximum(self.known[warps], published)

    def join(self, warps: Ids) -> None:
        """These warps meet."""
        self.known[warps] = self.known[warps].max(axis=0)
        self._go_on(warps)

    def arrive(self) -> Ids:
        """What all warps publish."""
        published = self.known.max(axis=0)
        self._go_on(np.arange(self.units.warps))
        return np.asarray(published)

    def end_products(self, warpgroup: int) -> tuple[int, int]:
        """A warpgroup has waited for products: their unit and its clock."""
        unit, first = self.units.warps + warpgroup, warpgroup * (WARPGROUP // WARP)
        clock = int(self.own[first, unit]) + 1
        self.own[first : first + WARPGROUP // WARP, unit] = clock
        return unit, clock

    def capability(self) -> Capability:
        """Where threads of the group meet."""
        rules = {op: self._behind(GROUP_OPS.rules[op]) for op in GROUP_BARRIERS}
        return Capability(rules | {"warpgroup_barrier": self._meet_warpgroups})

    def _behind(self, rule: Rule) -> Rule:
        """What all threads of the group do, and then have met."""

        def run(machine: Machine, index: int) -> None:
            rule(machine, index)
            machine.epoch = np.full_like(machine.epoch, machine.epoch.max())
            self.join(np.arange(self.units.warps))

        return run

    def _meet_warpgroups(self, machine: Machine, index: int) -> None:
        epoch = np.array(np.broadcast_to(machine.epoch, machine.shape))
        for group in warpgroups(machine, index):
            threads = slice(group * WARPGROUP, (group + 1) * WARPGROUP)
            epoch[:, threads] = epoch[:, threads].max() + 1
            self.join(np.arange(threads.start, threads.stop, WARP) // WARP)
        machine.epoch = epoch


class Ordered(Boxes):
    """What is remembered of shared memory whose accesses barriers in shared memory order."""

    def __init__(self, clocks: Clocks, words: int, workgroup: int, known: Mask) -> None:
        super().__init__(words, workgroup, known)
        self._clocks = clocks
        self._write_unit = np.zeros(words, np.int64)
        self._write_clock = np.zeros(words, np.int64)  # 0: nobody
        self._readers: int = clocks.units.readers
        self._reads = np.zeros(words * self._readers, np.int32)  # clocks: of each word its units
        self._threads: Ids = np.zeros(0, np.int64)  # of the present access
        self._their_warps: Ids = self._threads

    def read(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread reads its word; the position and text of a fault, if any."""
        fault = super().read(words, threads, epochs)
        warps = self._warps(threads)
        self._reads[words * self._readers + warps] = self._clocks.now.take(warps)
        return fault

    def write(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread writes its word; the position and text of a fault, if any."""
        fault = super().write(words, threads, epochs)
        warps = self._warps(threads)
        self._write_unit[words], self._write_clock[words] = warps, self._clocks.now.take(warps)
        return fault

    def come(self, words: Ids, asked: Asked) -> Fault | None:
        """A box is on its way to these words; the position and text of a fault, if any."""
        fault = super().come(words, asked)
        known = asked.known[self._clocks.columns]
        fault = fault or self._unread(words, known[None], "a box comes here")
        late = self._write_clock[words] > known[self._write_unit[words]]
        fault = fault or self._unordered_write(words, late, "a box comes here")
        self._write_unit[words], self._write_clock[words] = asked.unit, asked.phase
        return fault

    def stop_reading(
        self, words: Ids, threads: Ids, epochs: Ids, products: int | None = None
    ) -> None:
        """A thread, or a warpgroup for its products, has waited until they have been read."""
        super().stop_reading(words, threads, epochs)
        if products is None:
            unit = int(self._warps(threads[:1])[0])
            clock = self._clocks.now[unit]
        else:
            unit, clock = self._clocks.end_products(products)
        self._reads[words * self._readers + unit] = clock

    def _warps(self, threads: Ids) -> Ids:
        if threads is not self._threads:
            self._threads, self._their_warps = threads, threads % self.workgroup // WARP
        return self._their_warps

    def _written_by_another(self, words: Ids, threads: Ids, epochs: Ids, what: str) -> Fault | None:
        fault = super()._written_by_another(words, threads, epochs, what)
        known = self._clocks.knows(self._warps(threads), self._write_unit.take(words))
        late = self._write_clock.take(words) > known
        return fault or self._unordered_write(words, late, f"{what} here")

    def _read_by_another(self, words: Ids, threads: Ids, epochs: Ids, what: str) -> Fault | None:
        fault = super()._read_by_another(words, threads, epochs, what)
        return fault or self._unread(words, self._clocks.own[self._warps(threads)], f"{what} here")

    def _unordered_write(self, words: Ids, late: Mask, what: str) -> Fault | None:
        """The first of these accesses that does not know of the last write."""
        if not np.count_nonzero(late):
            return None
        at = int(late.argmax())
        if self._write_unit[words[at]] >= self._clocks.units.warps:
            return at, f"race: {what}, where a box came that this thread has not waited for"
        return at, f"race: {what}, written by {self._name(int(self._writer[words[at]]))}{UNORDERED}"

    def _unread(self, words: Ids, known: Ids, what: str) -> Fault | None:
        """The first of these accesses that does not know of all reads."""
        late = self._reads.reshape(-1, self._readers).take(words, 0) > known[:, : self._readers]
        if not np.count_nonzero(late):
            return None
        at, unit = divmod(int(late.argmax()), late.shape[1])
        return at, f"race: {what}, read by {self._reader_name(words[at], unit)}{UNORDERED}"

    def _reader_name(self, word: int, unit: int) -> str:
        if unit >= self._clocks.units.warps:
            return f"wgmma of warpgroup {unit - self._clocks.units.warps}"
        reader = int(self._reader[word])
        known = reader >= 0 and reader % self.workgroup // WARP == unit
        return self._name(reader) if known else f"a thread of warp {unit}"


def clocks_of(launch: SimulatedLaunch) -> list[Clocks]:
    """The clocks of the groups of a cluster, by rank."""
    units, groups = Units(launch), launch.ir.cluster
    every = np.zeros((groups * units.warps, groups * units.count), np.int64)
    return [Clocks(units, every, rank) for rank in range(groups)]
