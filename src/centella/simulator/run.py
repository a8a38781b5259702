"""The simulator: runs a KernelIR over NumPy words and reports what a GPU would not.

`docs/kernel-language.md` lists the faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

import numpy as np
from msgspec import Struct

from centella.errors import SimulationError
from centella.host.interrupts import GRACE, checkpoint
from centella.lang.ir import KernelIR
from centella.simulator.atomics import ATOMICS
from centella.simulator.barriers import Barriers
from centella.simulator.bulk import Boxes
from centella.simulator.clocks import Clocks, Ordered, clocks_of
from centella.simulator.clusters import Member
from centella.simulator.copies import Copies, CopiesInFlight
from centella.simulator.fragments import FRAGMENTS
from centella.simulator.group_ops import GROUP_OPS
from centella.simulator.launch import Order, SimulatedLaunch, Words, regions_of
from centella.simulator.machine import DONE, Capability, Machine, NewCheck
from centella.simulator.memory import MEMORY
from centella.simulator.products import Products
from centella.simulator.race_check import Mask, RaceCheck
from centella.simulator.roles import ROLES
from centella.simulator.tma import Tma

THREADS_AT_ONCE = 1 << 15  # arrays of 128 KiB stay in the cache
REGISTERS_AT_ONCE = 1 << 25  # 128 MiB of values
ORDERS: tuple[str, ...] = get_args(Order)
MOST_LANES = 128  # of a subgroup, on any adapter
# Statements that tell the hardware something, and compute nothing.
HINTS = ("resident", "fetch_lines", "cluster", "launch_dependents", "await_launches")
STATELESS = (
    MEMORY, GROUP_OPS, ATOMICS, FRAGMENTS,
    Capability(dict.fromkeys(HINTS, lambda machine, index: None)),
)  # fmt: skip


class Report(Struct, frozen=True):
    """What a checked simulation saw: for each argument, which words the launch wrote."""

    written: tuple[Mask, ...]


def simulate(
    ir: KernelIR, buffers: Sequence[Words], params: Words, groups: int, *, check: bool = True,
    order: Order = "forward", subgroup: int = 32, initialised: Sequence[Mask | None] | None = None,
    fused: bool = True, resident: int = 0,
) -> Report:  # fmt: skip
    """Run a kernel over NumPy words; stores change `buffers` in place.

    Args:
        ir: the kernel.
        buffers: the words of each argument, one-dimensional and contiguous.
        params: the bits of each launch parameter.
        groups: workgroups of the launch.
        check: False keeps no record of accesses: faster, only bounds are watched.
        order: in which order conflicting stores of a statement land; "shuffled" also lets half of
            the threads of a group run ahead between barriers.
        subgroup: lanes of a subgroup.
        initialised: for each argument, the words that hold something before the launch, or None:
            none of an Out, all of any other.
        fused: whether `fma` rounds once (nearly: through float64) or twice.
        resident: groups that run at a time, of a kernel that asks for it (`ptx.grid()`); 0: half
            of them, so that they take turns. Groups that meet run all at once.

    Returns:
        Which words were written; nothing for `check=False`.

    Raises:
        SimulationError: naming the fault, the word, the thread and the source line; or for an
            order or a subgroup that there is not.
    """
    if order not in ORDERS or not 0 < subgroup <= MOST_LANES:
        raise SimulationError(
            f"simulate: expected order of {', '.join(ORDERS)} and 1 to {MOST_LANES} lanes, got "
            f"{order!r} and {subgroup!r}"
        )
    if text := ir.refused(groups):
        raise SimulationError(f"kernel {ir.name!r}: {text}")
    words = np.asarray(params, np.uint32)
    for tensor_map in ir.maps:
        if text := tensor_map.refused(words):
            raise SimulationError(f"kernel {ir.name!r}: {text}")
    together = groups
    if ir.resident and not ir.meets:
        some = resident or -(-groups // 2)
        together = min(groups, -(-some // ir.cluster) * ir.cluster)
    regions = regions_of(ir, buffers, initialised, check)
    with np.errstate(all="ignore"):
        launch = SimulatedLaunch(
            ir, regions, words, groups, resident=together, check=check, order=order,
            subgroup=subgroup, fused=fused,
        )  # fmt: skip
        step = ir.cluster if launch.group_by_group else _groups_at_once(ir)
        step = together if ir.meets else step
        for first in range(0, together, step):
            checkpoint(GRACE)
            _run_groups(launch, first, min(step, together - first))
    if not check:
        return Report(())
    return Report(tuple(
        r.race_check.written if r.race_check else np.zeros(r.size, np.bool_) for r in regions
    ))  # fmt: skip


def _groups_at_once(ir: KernelIR) -> int:
    """As many groups as keep arrays small, and all values of all threads in memory."""
    registers = len(ir.body) + sum(s.words for s in ir.shared) // ir.workgroup + 1
    return max(1, min(THREADS_AT_ONCE, REGISTERS_AT_ONCE // registers) // ir.workgroup)


def _run_groups(launch: SimulatedLaunch, first: int, count: int) -> None:
    """Run `count` groups from `first` on, as many as run together.

    Raises:
        SimulationError: a fault, or none of the groups gets further.
    """
    machines = _machines(launch, first, count)
    live = [(machine, machine.steps()) for machine in machines]
    while live:
        before = sum(machine.passed for machine in machines)
        waiting = [(machine, rest) for machine, rest in live if next(rest, DONE) is not DONE]
        if len(waiting) == len(live) and before == sum(machine.passed for machine in machines):
            raise live[0][0].stuck()
        live = waiting


def _machines(launch: SimulatedLaunch, first: int, count: int) -> list[Machine]:
    """The machines of these groups, with the capabilities that the kernel needs."""
    kind: NewCheck
    if not launch.group_by_group:
        kind = CopiesInFlight if "cp_async" in launch.ops else RaceCheck
        machine = Machine(launch, first, count, kind)
        machine.use(*STATELESS, Copies().capability())
        return [machine]
    machines: list[Machine] = []
    peers: list[Member] = []
    clocks: list[Clocks] = []
    for group in range(first, first + count):
        clocks = clocks or clocks_of(launch)
        mine = clocks.pop(0)
        kind = partial(Ordered, mine) if launch.barriers else Boxes
        machine, barriers = Machine(launch, group, 1, kind), Barriers(mine)
        member = Member(machine.memory["shared"], barriers, peers)
        stateful = (Copies(), Products(), Tma(barriers), barriers, member)
        machine.use(*STATELESS, ROLES, *(part.capability() for part in stateful))
        if launch.barriers:
            machine.use(mine.capability())
        machines.append(machine)
    return machines


def unwritten(ir: KernelIR, written: Sequence[Mask], logical: Sequence[Mask | None]) -> None:
    """Raise unless every word that holds an element of an output was written.

    Args:
        ir: the kernel; written: `Report.written`.
        logical: for each argument, the words that hold elements; None asks nothing of it.

    Raises:
        SimulationError: naming the output and its first such word.
    """
    for arg, seen, wanted in zip(ir.args, written, logical, strict=True):
        if wanted is None or not (missing := wanted & ~seen).any():
            continue
        raise SimulationError(
            f"kernel {ir.name!r}: {arg.name!r} word {int(missing.argmax())} was never written "
            f"({int(missing.sum())} of {int(wanted.sum())} words)"
        )
