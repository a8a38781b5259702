"""A launch in the simulator: the kernel, its buffers and parameters, how conflicts are ordered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from centella.lang.arithmetic import FUSED, NUMPY, PLAIN, UNFUSED
from centella.lang.ir import BARRIERS, HOPPER, KernelIR
from centella.simulator.race_check import Buffer, Ids, Known, Mask

Words = NDArray[np.uint32]
Order = Literal["forward", "reverse", "shuffled"]

LEAVES = frozenset(
    "const param thread group groups lane subgroup_size grid warpgroup cluster_rank".split()
)
REGISTERS: dict[str, Callable[..., Any]] = dict.fromkeys(("var", "get"), lambda x: x)


class Region(Struct, frozen=True):
    """Words that threads address: a buffer, or a shared array of every group, end to end."""

    name: str
    words: Words
    size: int
    start: Ids | None  # of each group's words; None where that is 0 for all
    race_check: Known | None


class SimulatedLaunch:
    """What all groups of a launch have in common."""

    def __init__(
        self, ir: KernelIR, buffers: list[Region], params: Words, groups: int, *, resident: int,
        check: bool, order: Order, subgroup: int, fused: bool,
    ) -> None:  # fmt: skip
        self.ir: KernelIR = ir
        self.buffers: list[Region] = buffers
        self.params: Words = params
        self.resident: int = resident  # groups that run at a time
        self.check: bool = check
        self.order: Order = order
        self.subgroup: int = subgroup
        # As warpgroups that work by themselves, and groups of clusters, are run.
        self.group_by_group: bool = bool(ir.first(HOPPER | BARRIERS | {"role"})) or ir.cluster > 1
        self.ops: frozenset[str] = ir.ops
        self.ends: dict[int, int] = ir.ends
        arrays = {attr[0] for op, _, _, attr in ir.body if op == "mbar_init"}
        # Of each shared array that has barriers, how many.
        self.barriers: dict[int, int] = {n: ir.shared[n].words // 2 for n in sorted(arrays)}
        self.plain: dict[str, Callable[..., Any]] = PLAIN | (FUSED if fused else UNFUSED)
        self.plain |= REGISTERS
        # A generator for each group of a cluster.
        self.random: list[np.random.Generator] = [
            np.random.default_rng(0) for _ in range(ir.cluster)
        ]
        shuffled = [random.permutation(ir.workgroup) for random in self.random]
        self.half: Mask = shuffled[0][None] < (ir.workgroup + 1) // 2
        self._by_group: list[int] = []  # where its ids are
        self._leaves = self._constants(groups)

    def _constants(self, groups: int) -> list[Any]:
        """What is the same in every group; None for all other values."""
        ir = self.ir
        bits = [p.view(NUMPY[d.type]) for p, d in zip(self.params, ir.params, strict=True)]
        threads = np.arange(ir.workgroup, dtype=np.uint32)[None]
        same = {
            "thread": threads, "lane": threads % self.subgroup, "warpgroup": threads // 128,
            "groups": np.uint32(groups), "subgroup_size": np.uint32(self.subgroup),
            "grid": np.uint32(self.resident),
        }  # fmt: skip
        leaves: list[Any] = [None] * len(ir.body)
        for i, (op, type_, _, attr) in enumerate(ir.body):
            if op not in LEAVES:
                continue
            if op == "const":
                leaves[i] = NUMPY[type_](attr)
            elif op == "param":
                leaves[i] = bits[attr]
            elif op in same:
                leaves[i] = same[op]
            else:
                self._by_group.append(i)
        return leaves

    def values(self, first: int, count: int) -> list[Any]:
        """The values of `count` groups from `first` on, before their first statement."""
        groups = np.arange(first, first + count, dtype=np.uint32)[:, None]
        ids = {"group": groups, "cluster_rank": groups % np.uint32(self.ir.cluster)}
        values = self._leaves.copy()
        for i in self._by_group:
            values[i] = ids[self.ir.body[i][0]]
        return values


def regions_of(
    ir: KernelIR, buffers: Sequence[Words], initialised: Sequence[Mask | None] | None, check: bool
) -> list[Region]:
    """The buffers of a launch, with what is known of their words."""
    regions = []
    masks = initialised or [None] * len(buffers)
    for arg, words, mask in zip(ir.args, buffers, masks, strict=True):
        race_check: Known | None = None
        if check and arg.writable:
            known = np.full(words.size, arg.mode == "inout") if mask is None else mask
            race_check = Buffer(words.size, ir.workgroup, known)
        elif check and mask is not None:
            race_check = Known(mask)
        regions.append(Region(repr(arg.name), words, words.size, None, race_check))
    return regions
