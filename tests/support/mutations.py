"""Kernels with one mistake each, to see that the simulator, or their results, tell."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import ModuleType

from msgspec import Struct
from msgspec.structs import replace

from centella.lang.ir import INDICES, KernelIR
from centella.lang.structure import Statement

MEETS = frozenset(  # what a kernel waits or meets by, and what makes stores visible
    "barrier cp_async_wait warpgroup_barrier async_fence mbar_wait wgmma_wait "
    "tma_store_wait cluster_wait grid_barrier".split()
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


def changed(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """A module of kernels whose text has other passages, each in the place of one."""
    text = inspect.getsource(module)
    for before, behind in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, behind)
    copy = ModuleType(module.__name__)
    copy.__file__ = file = inspect.getfile(module)
    exec(compile(text, file, "exec"), vars(copy))
    return copy


def _insert(ir: KernelIR, at: int, new: Sequence[Statement], changed: Statement) -> KernelIR:
    """`new` before statement `at`, which becomes `changed`; later ids move up."""

    def move(index: int) -> int:
        return index + len(new) if index >= at else index

    rest = [(op, t, tuple(map(move, args)), attr) for op, t, args, attr in ir.body[at + 1 :]]
    lines = {move(i): line for i, line in ir.lines.items()}
    starts = {move(i): (move(element), n) for i, (element, n) in ir.starts.items()}
    return replace(ir, body=(*ir.body[:at], *new, changed, *rest), lines=lines, starts=starts)
