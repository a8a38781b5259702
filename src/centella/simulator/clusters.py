"""Clusters: where their groups meet, and what one does to the memory of another.

Each group has a machine of its own, and they share what lies in global memory. Epochs of a cluster
go on together where its groups meet, so that what lies before a cluster barrier is told from what
lies behind. Of words that another group reads it is enough to know when that was last: writes since
the same cluster barrier are a race.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from centella.lang.arithmetic import NUMPY
from centella.simulator.barriers import Barriers, barriers_of, check
from centella.simulator.bulk import (
    Boxes,
    active_threads,
    check_fault,
    check_inside,
    ids_of,
    operand_values,
)
from centella.simulator.group_ops import WARP, meet
from centella.simulator.launch import Region
from centella.simulator.machine import Capability, Machine, over
from centella.simulator.race_check import Ids
from centella.simulator.tma import Target, copy_boxes, send


class Member:
    """A group of a cluster, as the others reach it."""

    def __init__(self, shared: list[Region], barriers: Barriers, peers: list[Member]) -> None:
        self.shared = shared
        self.barriers = barriers
        self.peers = peers  # by rank, itself too
        self.arrived: int = 0  # cluster barriers
        self.arrived_in: int = 0  # the epoch
        self.relaxed: bool = False  # the last arrival: it publishes nothing
        self.waited: int = 0
        self.cluster_epochs: list[int] = []  # of rank 0: the epoch that each cluster barrier begins
        self.published: list[Ids] = []  # of rank 0: what arrivals at each cluster barrier publish
        self.over: bool = False
        peers.append(self)

    def capability(self) -> Capability:
        """The statements of clusters."""
        return Capability({
            "cluster_arrive": self._arrive, "cluster_load": self._load,
            "cluster_store": self._store, "mbar_arrive_at": self._arrive_at,
            "tma_multicast": self._multicast,
        }, {"cluster_wait": self._wait}, self._end)  # fmt: skip

    def _end(self, machine: Machine) -> None:
        """The group is over: nobody may reach it any more."""
        if self.arrived != self.waited:
            text = "a group ends between cluster_arrive and _wait"
            raise machine.fault_here(len(machine.ir.body) - 1, text)
        self.over = True

    # -- cluster barriers -------------------------------------------------------------------------

    def _arrive(self, machine: Machine, index: int) -> None:
        meet(machine, index)
        if self.arrived != self.waited:
            text = "cluster_arrive twice, with no cluster_wait between"
            raise machine.fault_here(index, text)
        self.arrived += 1
        self.relaxed = bool(machine.ir.body[index][3])
        published, known = self.peers[0].published, self.barriers.clocks.arrive()
        if self.relaxed:
            known = np.zeros_like(known)
        if len(published) < self.arrived:
            published.append(known)
        else:
            np.maximum(published[-1], known, out=published[-1])
        self.arrived_in = int(machine.epoch.max())

    def _wait(self, machine: Machine, index: int) -> Iterator[None]:
        meet(machine, index)
        if self.arrived == self.waited:
            raise machine.fault_here(index, "cluster_wait without cluster_arrive before")
        active = machine.active
        while any(peer.arrived < self.arrived for peer in self.peers):
            machine.waits_at = index
            yield
            machine.narrow(active)
        machine.passed += 1
        self.waited = self.arrived
        self.barriers.clocks.learn(slice(None), self.peers[0].published[self.waited - 1])
        cluster_epochs = self.peers[0].cluster_epochs
        if len(cluster_epochs) < self.arrived:  # the first group to go on
            before = cluster_epochs[-1] if cluster_epochs else 0
            after = 1 + max(peer.arrived_in for peer in self.peers)
            cluster_epochs.append(before if self.relaxed else after)
        if self.relaxed:
            return
        for region in self.shared:
            if isinstance(region.race_check, Boxes):
                region.race_check.met = cluster_epochs[-1]
        epoch = max(cluster_epochs[-1], int(machine.epoch.max()) + 1)
        machine.epoch = np.full_like(machine.epoch, epoch)

    # -- what reaches other groups ----------------------------------------------------------------

    def _named(self, machine: Machine, index: int, operand: int) -> list[Member]:
        """The group of the rank that each active thread names."""
        members = []
        for rank in operand_values(machine, index, operand):
            if rank >= len(self.peers):
                text = f"a cluster of {len(self.peers)} has no rank {rank}"
                raise machine.fault_here(index, text)
            members.append(self._reach(machine, index, rank))
        return members

    def _reach(self, machine: Machine, index: int, rank: int) -> Member:
        peer = self.peers[rank]
        if peer.over:
            text = f"the group of rank {rank} has ended: who is reached stays"
            raise machine.fault_here(index, text)
        return peer

    def _arrive_at(self, machine: Machine, index: int) -> None:
        array = machine.ir.body[index][3]
        numbers, peers = barriers_of(machine, index, 0, array), self._named(machine, index, 1)
        threads = active_threads(machine)
        known = self.barriers.clocks.release(machine.here)
        for number, peer, thread in zip(numbers, peers, threads, strict=True):
            barrier = peer.barriers.at(array, number)
            # Epochs of this group say nothing there.
            text = barrier.arrive(1, barrier.epoch, known[thread // WARP])
            check(machine, index, text)

    def _store(self, machine: Machine, index: int) -> None:
        _, _, operands, (array, barriers) = machine.ir.body[index]
        starts, numbers = (
            operand_values(machine, index, 0),
            barriers_of(machine, index, 1, barriers),
        )
        peers, active = self._named(machine, index, 2), active_threads(machine)
        values = [over(machine.values[v], machine.shape)[0] for v in operands[3:]]
        if any(first % len(values) for first in starts):
            raise machine.fault_here(index, f"{len(values)} words off their boundary")
        # What a warp sends to one barrier goes together; of words sent twice, one by one.
        boxes, times = defaultdict[Any, list[tuple[int, int]]](list), Counter[Any]()
        for thread, first, number, peer in zip(active, starts, numbers, peers, strict=True):
            boxes[peer, number, thread // WARP, times[peer, first]].append((thread, first))
            times[peer, first] += 1
        bits_of = np.stack(values, 1).view(np.uint32)
        for (peer, number, warp, _), sent in boxes.items():
            threads, firsts = np.array(sent).T
            words = (firsts[:, None] + np.arange(len(values))).reshape(-1)
            check_inside(machine, index, array, words)
            target = Target(peer.shared, peer.barriers)
            box = array, words, bits_of[threads].reshape(-1)
            known = self.barriers.clocks.known[warp]
            send(machine, index, target, number, box, barriers, known, engine=False)

    def _multicast(self, machine: Machine, index: int) -> None:
        targets: list[list[Target]] = []
        for mask in operand_values(machine, index, 2):
            if not 0 < mask < 1 << len(self.peers):
                text = f"a mask of {mask:#b} in a cluster of {len(self.peers)}"
                raise machine.fault_here(index, text)
            ranks = [rank for rank in range(len(self.peers)) if mask >> rank & 1]
            members = [self._reach(machine, index, rank) for rank in ranks]
            targets.append([Target(member.shared, member.barriers) for member in members])
        copy_boxes(machine, index, 3, targets, self.barriers.clocks)

    def _load(self, machine: Machine, index: int) -> None:
        _, type_, _, position = machine.ir.body[index]
        met = self.peers[0].cluster_epochs[self.waited - 1] if self.waited else 0
        peers = self._named(machine, index, 1)
        words = np.array(operand_values(machine, index, 0))
        check_inside(machine, index, position, words)
        bits = np.zeros(machine.shape, np.uint32)
        for n, (thread, peer) in enumerate(zip(active_threads(machine), peers, strict=True)):
            word, region = words[n : n + 1], peer.shared[position]
            if isinstance(region.race_check, Boxes):
                if peer is self:
                    fault = region.race_check.read(word, *ids_of(machine, word, thread))
                else:
                    fault = region.race_check.read_afar(word, met)
                check_fault(machine, index, position, word, fault)
            bits[0, thread] = region.words[word[0]]
        machine.values[index] = bits.view(NUMPY[type_])
