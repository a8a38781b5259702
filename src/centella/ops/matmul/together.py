"""How groups that stay take tiles in turn: alone, or as clusters that copy for each other."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella import lang
from centella.lang.values import Expr


class Together(Struct, frozen=True):
    """Groups of a cluster, which have neighbouring tiles of one number; 1: no clusters."""

    groups: int

    def begin(self) -> None:
        """Have the kernel's groups be clusters: in front of what needs it."""
        if self.groups > 1:
            lang.ptx.cluster(self.groups)

    def meet(self) -> None:
        """All groups that reach each other's shared memory meet, or the threads of this one."""
        if self.groups == 1:
            lang.barrier()
            return
        lang.ptx.cluster_arrive()
        lang.ptx.cluster_wait()

    def end(self) -> None:
        """Nobody leaves while another group still copies to it or tells it something."""
        if self.groups > 1:
            self.meet()

    @property
    def first(self) -> Expr:
        """The number of the first tiles, that of all groups of a cluster."""
        return lang.group_id() // self.groups

    @property
    def last(self) -> Expr:
        """How many numbers there are."""
        return lang.num_groups() // self.groups

    @property
    def every(self) -> Expr:
        """From a number to the next."""
        return lang.ptx.grid() // self.groups

    def rank(self) -> Any:
        """Which group of its cluster this one is."""
        return lang.ptx.cluster_rank() if self.groups > 1 else 0

    def copies(self, turn: Any) -> Any:
        """Whether it is this group's turn to copy for all."""
        return lang.ptx.cluster_rank() == turn % self.groups

    @property
    def mask(self) -> int:
        """All groups, as `tma_load` takes them."""
        return (1 << self.groups) - 1

    def release(self, empty: Any, stage: Any) -> None:
        """This thread's consumer has read a stage: whoever fills it, in any group, may."""
        empty.arrive(stage)
        for further in range(1, self.groups):
            empty.arrive(stage, (lang.ptx.cluster_rank() + further) % self.groups)
