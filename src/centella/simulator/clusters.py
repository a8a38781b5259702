"""The simulator's machines of a cluster: its groups run by turns, each until it has to wait.

Each group has a machine of its own, and they share what lies in global memory. Epochs of a cluster
go on together where its groups meet, so that what lies before a cluster barrier is told from what
lies behind. Of words that another group reads it is enough to know when that was last: writes since
the same cluster barrier are a race.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from centella.lang.arithmetic import NUMPY
from centella.lang.ir import KernelIR
from centella.simulator.bulk import Boxes, Words
from centella.simulator.hopper import DONE, HopperMachine
from centella.simulator.machine import Order
from centella.simulator.race_check import Ids, Mask


class ClusterMachine(HopperMachine):
    """A group of a cluster; that of rank 0 runs all of them."""

    def __init__(
        self, ir: KernelIR, groups: int, check: bool, order: Order, subgroup: int, fused: bool,
        rank: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(ir, groups, check, order, subgroup, fused)
        self.peers: list[ClusterMachine] = [self]
        for other in range(1, ir.cluster if rank == 0 else 1):
            peer = ClusterMachine(ir, groups, check, order, subgroup, fused, other)
            self.peers.append(peer)
        self.waits["cluster_wait"] = self._cluster_wait
        self.effects.update({
            "cluster_arrive": self._cluster_arrive, "cluster_load": self._cluster_load,
            "mbar_arrive_at": self._arrive_at, "tma_multicast": self._multicast,
        })  # fmt: skip

    def bind(
        self, buffers: Sequence[Words], params: Words, initialised: Sequence[Mask | None] | None
    ) -> None:
        """Take the launch's buffers and parameters, for all groups of the cluster."""
        super().bind(buffers, params, initialised)
        for peer in self.peers[1:]:
            peer.peers, peer.params, peer.leaves = self.peers, self.params, self.leaves
            peer.resident, peer.memory = self.resident, {"global": self.memory["global"]}

    def begin(self, first: int, count: int) -> None:
        """Take one group."""
        self.arrived: int = 0  # cluster barriers
        self.arrived_in: int = 0  # the epoch
        self.waited: int = 0
        self.meetings: list[int] = []  # of rank 0: the epoch that each cluster barrier begins
        self.over: bool = False
        super().begin(first, count)

    def run(self, first: int, count: int) -> None:
        """Run the cluster that begins with group `first`."""
        for rank, peer in enumerate(self.peers):
            peer.begin(first + rank, 1)
        live = [(peer, peer.steps()) for peer in self.peers]
        while live:
            before = sum(peer.passed for peer in self.peers)
            waiting = [(peer, rest) for peer, rest in live if next(rest, DONE) is not DONE]
            if len(waiting) == len(live) and before == sum(peer.passed for peer in self.peers):
                raise live[0][0].stuck()
            live = waiting

    def end(self) -> None:
        """The group is over: nobody may reach it any more."""
        super().end()
        if self.arrived != self.waited:
            raise self._bad(len(self.ir.body) - 1, "a group ends between cluster_arrive and _wait")
        self.over = True

    # -- cluster barriers -------------------------------------------------------------------------

    def _cluster_arrive(self, index: int) -> None:
        self._meet(index)
        if self.arrived != self.waited:
            raise self._bad(index, "cluster_arrive twice, with no cluster_wait between")
        self.arrived += 1
        self.arrived_in = int(self.epoch.max())

    def _cluster_wait(self, index: int) -> Iterator[None]:
        self._meet(index)
        if self.arrived == self.waited:
            raise self._bad(index, "cluster_wait without cluster_arrive before")
        active = self.active
        while any(peer.arrived < self.arrived for peer in self.peers):
            self.waits_at = index
            yield
            self._narrow(active)
        self.passed: int = self.passed + 1
        self.waited = self.arrived
        meetings = self.peers[0].meetings
        if len(meetings) < self.arrived:  # the first group to go on
            meetings.append(1 + max(peer.arrived_in for peer in self.peers))
        for region in self.memory["shared"]:
            if isinstance(region.shadow, Boxes):
                region.shadow.met = meetings[-1]
        self.epoch: Ids = np.full_like(self.epoch, max(meetings[-1], int(self.epoch.max()) + 1))

    # -- what reaches other groups ----------------------------------------------------------------

    def _others(self, index: int, operand: int) -> list[ClusterMachine]:
        """The group of the rank that each active thread names."""
        found = []
        for rank in self._mine(index, operand):
            if rank >= len(self.peers):
                raise self._bad(index, f"a cluster of {len(self.peers)} has no rank {rank}")
            found.append(self._reach(index, rank))
        return found

    def _reach(self, index: int, rank: int) -> ClusterMachine:
        peer = self.peers[rank]
        if peer.over:
            raise self._bad(index, f"the group of rank {rank} has ended: who is reached stays")
        return peer

    def _arrive_at(self, index: int) -> None:
        array = self.ir.body[index][3]
        which, peers = self._barriers(index, 0, array), self._others(index, 1)
        for barrier, peer in zip(which, peers, strict=True):
            # Epochs of this group say nothing there: such an arrival orders no writes.
            epoch = int(peer.phases_of(array).epochs[barrier])
            self._say(index, peer.phases_of(array).arrive(barrier, 0, epoch))

    def _multicast(self, index: int) -> None:
        every: list[list[HopperMachine]] = []
        for mask in self._mine(index, 2):
            if not 0 < mask < 1 << len(self.peers):
                raise self._bad(index, f"a mask of {mask:#b} in a cluster of {len(self.peers)}")
            ranks = [rank for rank in range(len(self.peers)) if mask >> rank & 1]
            every.append([self._reach(index, rank) for rank in ranks])
        self._boxes(index, 3, every)

    def _cluster_load(self, index: int) -> None:
        _, type_, _, position = self.ir.body[index]
        met = self.peers[0].meetings[self.waited - 1] if self.waited else 0
        threads = np.flatnonzero(np.broadcast_to(self.active, self.shape)[0])
        peers, words = self._others(index, 1), np.array(self._mine(index, 0))
        self._inside(index, position, words)
        got = np.zeros(self.shape, np.uint32)
        for thread, peer, n in zip(threads, peers, range(len(words)), strict=True):
            at, region = words[n : n + 1], peer.memory["shared"][position]
            if isinstance(region.shadow, Boxes):
                if peer is self:
                    fault = region.shadow.read(at, *self._who(at, int(thread)))
                else:
                    fault = region.shadow.read_afar(at, met)
                self._tell(index, position, at, fault)
            got[0, thread] = region.words[at[0]]
        self.values[index] = got.view(NUMPY[type_])
