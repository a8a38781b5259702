"""The simulator: runs a KernelIR over NumPy words and reports what a GPU would not.

`docs/kernel-language.md` lists the faults. `mutations` makes kernels with one mistake each, to see
that they are caught.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella.errors import SimulationError
from centella.host.interrupts import GRACE, checkpoint
from centella.lang.ir import INDICES, KernelIR, Statement
from centella.simulator.groups import run_groups
from centella.simulator.launch import Launch, Order, Words, regions_of
from centella.simulator.race_check import Mask

THREADS_AT_ONCE = 1 << 15  # arrays of 128 KiB stay in the cache
REGISTERS_AT_ONCE = 1 << 25  # 128 MiB of values
MEETS = frozenset(  # what a kernel waits or meets by, and what makes stores visible
    "barrier cp_async_wait warpgroup_barrier async_fence mbar_wait wgmma_wait "
    "tma_store_wait cluster_wait".split()
)
ORDERS: tuple[str, ...] = get_args(Order)
MOST_LANES = 128  # of a subgroup, on any adapter


class Report(Struct, frozen=True):
    """What a checked simulation saw: for each argument, which words the launch wrote."""

    written: tuple[Mask, ...]


def simulate(
    ir: KernelIR,
    buffers: Sequence[Words],
    params: Words,
    groups: int,
    *,
    check: bool = True,
    order: Order = "forward",
    subgroup: int = 32,
    initialised: Sequence[Mask | None] | None = None,
    fused: bool = True,
    resident: int = 0,
) -> Report:
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
            of them, so that they take turns.

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
        if text := tensor_map.refused(words, ir.args[tensor_map.argument].dtype.itemsize):
            raise SimulationError(f"kernel {ir.name!r}: {text}")
    together = groups
    if ir.resident:
        some = resident or -(-groups // 2)
        together = min(groups, -(-some // ir.cluster) * ir.cluster)
    regions = regions_of(ir, buffers, initialised, check)
    with np.errstate(all="ignore"):
        launch = Launch(
            ir, regions, words, groups, resident=together, check=check, order=order,
            subgroup=subgroup, fused=fused,
        )  # fmt: skip
        step = ir.cluster if launch.group_by_group else _groups_at_once(ir)
        for first in range(0, together, step):
            checkpoint(GRACE)
            run_groups(launch, first, min(step, together - first))
    if not check:
        return Report(())
    return Report(tuple(
        r.shadow.written if r.shadow else np.zeros(r.size, np.bool_) for r in regions
    ))  # fmt: skip


def _groups_at_once(ir: KernelIR) -> int:
    """As many groups as keep arrays small, and all values of all threads in memory."""
    registers = len(ir.body) + sum(s.words for s in ir.shared) // ir.workgroup + 1
    return max(1, min(THREADS_AT_ONCE, REGISTERS_AT_ONCE // registers) // ir.workgroup)


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


class Mutation(Struct, frozen=True):
    """One mistake in a kernel: what it is and where, and the statement that it concerns."""

    label: str
    at: int

    def of(self, ir: KernelIR) -> KernelIR:
        """The kernel with the mistake."""
        op, type_, args, attr = ir.body[self.at]
        if op in MEETS:
            gone: Statement = ("const", "u32", (), 0)
            return replace(ir, body=(*ir.body[: self.at], gone, *ir.body[self.at + 1 :]))
        later = (("const", "u32", (), 1), ("add", "u32", (args[0], self.at), None))
        return _insert(ir, self.at, later, (op, type_, (self.at + 1, *args[1:]), attr))


def mistakes(ir: KernelIR) -> Iterator[Mutation]:
    """Each mistake to try: a barrier or wait less, an access one word (chunk) further."""
    for i, (op, *_) in enumerate(ir.body):
        if op in MEETS:
            yield Mutation(f"no {op} at {ir.line_of(i)}", i)
        elif op in INDICES:
            yield Mutation(f"{op} moved at {ir.line_of(i)}", i)


def mutations(ir: KernelIR) -> Iterator[tuple[str, KernelIR]]:
    """Kernels with one mistake each, and what it is."""
    return ((mistake.label, mistake.of(ir)) for mistake in mistakes(ir))


def _insert(ir: KernelIR, at: int, new: Sequence[Statement], changed: Statement) -> KernelIR:
    """`new` before statement `at`, which becomes `changed`; later ids move up."""

    def move(index: int) -> int:
        return index + len(new) if index >= at else index

    rest = [(op, t, tuple(map(move, args)), attr) for op, t, args, attr in ir.body[at + 1 :]]
    lines = {move(i): line for i, line in ir.lines.items()}
    starts = {move(i): (move(element), n) for i, (element, n) in ir.starts.items()}
    return replace(ir, body=(*ir.body[:at], *new, changed, *rest), lines=lines, starts=starts)
