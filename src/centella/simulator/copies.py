"""Asynchronous copies to shared memory: each lands when its thread has waited, at its latest."""

from __future__ import annotations

import numpy as np

from centella.simulator.launch import Words
from centella.simulator.machine import UNDEFINED, Capability, Machine
from centella.simulator.memory import addresses, note
from centella.simulator.race_check import NOBODY, Fault, Ids, Mask, RaceCheck


class CopiesInFlight(RaceCheck):
    """What is remembered of shared memory that copies land in."""

    def __init__(self, words: int, workgroup: int, known: Mask) -> None:
        super().__init__(words, workgroup, known)
        self._carrier = np.full(words, NOBODY, np.int64)
        self._flying: bool = False  # since the first copy
        self._group = np.zeros(words, np.int64)
        self._bits = np.zeros(words, np.uint32)

    def read(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread reads its word; the position and text of a fault, if any."""
        return self._in_flight(words, "read") or super().read(words, threads, epochs)

    def write(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread writes its word; the position and text of a fault, if any."""
        return self._in_flight(words, "written") or super().write(words, threads, epochs)

    def depart(
        self, words: Ids, threads: Ids, epochs: Ids, groups: Ids, bits: Words
    ) -> Fault | None:
        """Note that each thread starts a copy to its word, in its `groups`-th group."""
        fault = self.write(words, threads, epochs)
        self._flying = True
        self._carrier[words], self._group[words], self._bits[words] = threads, groups, bits
        return fault

    def landed(self, waited: Ids, first: int) -> tuple[Ids, Ids, Words]:
        """Words of groups below what each thread, from `first` on, has waited for; who, what."""
        words = np.flatnonzero(self._carrier != NOBODY)
        words = words[self._group[words] < waited[self._carrier[words] - first]]
        threads = self._carrier[words]
        self._carrier[words] = NOBODY
        return words, threads, self._bits[words]

    def _in_flight(self, words: Ids, what: str) -> Fault | None:
        if not self._flying:
            return None
        flying = self._carrier[words] != NOBODY
        if not flying.any():
            return None
        at = int(flying.argmax())
        who = self._name(int(self._carrier[words[at]]))
        return at, f"{what} before {who} has waited for its copy"


class Copies:
    """The copies of the threads of the groups that run together."""

    def __init__(self) -> None:
        self._committed: Ids = np.zeros((1, 1), np.int64)  # groups of copies by thread

    def capability(self) -> Capability:
        """The statements of copies."""
        return Capability({
            "cp_async": self._copy, "cp_async_commit": self._commit, "cp_async_wait": self._wait
        })  # fmt: skip

    def _copy(self, machine: Machine, index: int) -> None:
        _, _, (_, _, size), (array, argument) = machine.ir.body[index]
        region, source = machine.memory["shared"][array], machine.memory["global"][argument]
        target = addresses(machine, index, region, 4)
        read = addresses(machine, index, source, 4, 1)
        rest = np.asarray(machine.values[size]).astype(np.int64) - 4 * np.arange(4)[:, None, None]
        nbytes = np.clip(rest, 0, 4)
        if source.race_check:
            note(machine, index, source, read, source.race_check.read, nbytes > 0)
        mask = np.asarray((1 << 8 * nbytes) - 1, np.uint32)
        shape = (4, *machine.shape)
        active = np.broadcast_to(machine.active, shape)
        bits: Words = np.broadcast_to(source.words.take(read) & mask, shape)[active]
        words = np.broadcast_to(target, shape)
        if not isinstance(region.race_check, CopiesInFlight):
            region.words[words[active]] = bits
            return
        groups = np.broadcast_to(self._committed, shape)[active]
        in_flight = region.race_check
        region.words[words[active]] = UNDEFINED

        def depart(words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
            return in_flight.depart(words, threads, epochs, groups, bits)

        note(machine, index, region, words, depart)

    def _commit(self, machine: Machine, index: int) -> None:
        self._committed = self._committed + machine.active

    def _wait(self, machine: Machine, index: int) -> None:
        pending = machine.ir.body[index][3]
        waited = np.where(machine.active, self._committed - pending, 0)
        waited = np.broadcast_to(waited, machine.shape).reshape(-1)
        epochs = np.broadcast_to(machine.epoch, machine.shape).reshape(-1)
        first = machine.first * machine.ir.workgroup
        for region in machine.memory["shared"]:
            if not isinstance(region.race_check, CopiesInFlight):
                continue
            words, threads, bits = region.race_check.landed(waited, first)
            region.words[words] = bits
            fault = region.race_check.write(words, threads, epochs[threads - first])
            assert fault is None, "nobody touches what is in flight"
