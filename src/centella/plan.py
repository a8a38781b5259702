"""From recorded nodes to an immutable plan, in small passes.

    drop    nodes that nobody reads
    lower   each node to launches (its op chooses kernels) or to its NumPy formula on the CPU
    place   buffers: one for each value that stays, temporaries reused by lifetime

A plan holds no tensors: buffers are given when it runs. Its key is the structure and the shapes of
what was recorded, so a plan serves every recording of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from centella.op import Op
from centella.pool import size_class
from centella.program import HostProgram, Program, parameter_words
from centella.recording import Node
from centella.specs import Caps, Spec

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Source:
    """Where an operand comes from: external `index`, or output (node, `index`)."""

    node: int
    index: int
    spec: Spec
    offset: int


@dataclass(frozen=True, slots=True)
class PlanNode:
    """A node without its values: what a plan is made of."""

    op: Op
    inputs: tuple[Source, ...]
    attrs: tuple[tuple[str, Any], ...]
    outputs: tuple[Spec, ...]
    wanted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: slots of its operands, raw parameter words, where buffer offsets are added."""

    program: Program | HostProgram
    slots: tuple[int, ...]
    views: tuple[tuple[Spec, int], ...]
    inputs: int
    words: tuple[int, ...]
    patches: tuple[tuple[int, int], ...]
    groups: int
    node: int


@dataclass(frozen=True, slots=True)
class Plan:
    """An immutable run list.

    Attributes:
        externals: how many buffers come from outside; they are slots 0 .. externals - 1.
        buffers: bytes of each further slot.
        results: (node, output) of each value that stays, and its slot.
        steps: launches in order.
        nodes: what was planned, for `explain`.
    """

    externals: int
    buffers: tuple[int, ...]
    results: tuple[tuple[Place, int], ...]
    steps: tuple[Step, ...]
    nodes: tuple[PlanNode, ...]
    dropped: int

    @property
    def temporary_bytes(self) -> int:
        """Bytes of buffers that do not outlive the plan."""
        kept = {slot for _, slot in self.results}
        first = self.externals
        return sum(n for i, n in enumerate(self.buffers) if first + i not in kept)

    def explain(self) -> str:
        """Nodes, launches, bytes: a table to read."""
        lines = [
            f"{len(self.nodes)} nodes ({self.dropped} dropped), {len(self.steps)} launches, "
            f"{sum(self.buffers):,} bytes in {len(self.buffers)} buffers "
            f"({self.temporary_bytes:,} temporary)"
        ]
        for step in self.steps:
            node = self.nodes[step.node]
            shapes = " ".join(f"{list(s.spec.shape)}" for s in node.inputs)
            outs = " ".join(f"{list(s.shape)}:{s.dtype.name}" for s in node.outputs)
            name = step.program.name
            lines.append(f"  {node.op.name:<14} {name:<24} {shapes} -> {outs}  groups {step.groups}")
        return "\n".join(lines)


def key_of(nodes: Sequence[Node], externals: dict[int, int], wanted: Sequence[tuple[bool, ...]]
           ) -> tuple[Any, ...]:
    """The structure of a recording: equal keys, equal plans."""
    return tuple(
        (
            node.op.name,
            node.attrs,
            tuple(
                (p.place, p.spec, p.offset)
                if p.value is None
                else (externals[id(p.value)], p.spec, p.offset)
                for p in node.inputs
            ),
            kept,
        )
        for node, kept in zip(nodes, wanted, strict=True)
    )


def build(
    nodes: Sequence[Node],
    externals: dict[int, int],
    wanted: Sequence[tuple[bool, ...]],
    caps: Caps,
) -> Plan:
    """Plan recorded nodes.

    Args:
        nodes: in recorded order.
        externals: id of each outside value to its slot.
        wanted: for each node, which outputs must outlive the plan.
    """
    plain = [_plain(n, externals, w) for n, w in zip(nodes, wanted, strict=True)]
    alive = _alive(plain)
    placer = _Placer(plain, alive, len(externals))
    steps: list[Step] = []
    for index, node in enumerate(plain):
        if not alive[index]:
            continue
        slots = [
            s.index if s.node < 0 else placer.slot((s.node, s.index)) for s in node.inputs
        ]
        outs = [placer.allocate((index, i), spec) for i, spec in enumerate(node.outputs)]
        attrs = dict(node.attrs)
        if caps.target == "numpy":
            steps.append(_host_step(index, node, slots, outs, attrs))
        elif any(s.size for s in node.outputs):
            steps += _device_steps(index, node, slots, outs, attrs, caps, placer)
        placer.release_after(index)
    return Plan(
        len(externals),
        tuple(placer.sizes),
        tuple(placer.results()),
        tuple(steps),
        tuple(plain),
        sum(not a for a in alive),
    )


def _plain(node: Node, externals: dict[int, int], wanted: tuple[bool, ...]) -> PlanNode:
    sources = tuple(
        Source(p.place[0], p.place[1], p.spec, p.offset)
        if p.value is None
        else Source(-1, externals[id(p.value)], p.spec, p.offset)
        for p in node.inputs
    )
    return PlanNode(node.op, sources, node.attrs, node.outputs, wanted)


def _alive(nodes: Sequence[PlanNode]) -> list[bool]:
    """Nodes whose outputs are wanted, or read by a node that is alive."""
    alive = [any(n.wanted) for n in nodes]
    for index in range(len(nodes) - 1, -1, -1):
        if alive[index]:
            for source in nodes[index].inputs:
                if source.node >= 0:
                    alive[source.node] = True
    return alive


class _Placer:
    """Gives each value a slot; a temporary's slot is free again after its last reader."""

    def __init__(self, nodes: Sequence[PlanNode], alive: list[bool], externals: int) -> None:
        self._first = externals
        self._nodes = nodes
        self.sizes: list[int] = []
        self._slots: dict[Place, int] = {}
        self._free: dict[int, list[int]] = {}
        self._last: dict[Place, int] = {}
        for index, node in enumerate(nodes):
            if alive[index]:
                for source in node.inputs:
                    if source.node >= 0:
                        self._last[(source.node, source.index)] = index
        self._ends: dict[int, list[Place]] = {}
        for place, index in self._last.items():
            if not nodes[place[0]].wanted[place[1]]:
                self._ends.setdefault(index, []).append(place)

    def slot(self, place: Place) -> int:
        return self._slots[place]

    def _new(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        return self._first + len(self.sizes) - 1

    def allocate(self, place: Place, spec: Spec) -> int:
        nbytes = spec.storage_bytes
        if self._nodes[place[0]].wanted[place[1]]:
            slot = self._new(nbytes)
        else:
            slot = self.temporary(nbytes)
            if place not in self._last:
                self._ends.setdefault(place[0], []).append(place)
        self._slots[place] = slot
        return slot

    def temporary(self, nbytes: int) -> int:
        """A slot for as long as the caller says; return it with `free`."""
        free = self._free.get(size_class(nbytes))
        if free:
            slot = free.pop()
            self.sizes[slot - self._first] = max(self.sizes[slot - self._first], nbytes)
            return slot
        return self._new(nbytes)

    def free(self, slot: int) -> None:
        self._free.setdefault(size_class(self.sizes[slot - self._first]), []).append(slot)

    def release_after(self, index: int) -> None:
        for place in self._ends.pop(index, ()):
            self.free(self._slots[place])

    def results(self) -> list[tuple[Place, int]]:
        return [(p, s) for p, s in self._slots.items() if self._nodes[p[0]].wanted[p[1]]]


def _host_step(
    index: int, node: PlanNode, slots: list[int], outs: list[int], attrs: dict[str, Any]
) -> Step:
    specs = tuple(s.spec for s in node.inputs)
    views = tuple((s.spec, s.offset) for s in node.inputs)
    views += tuple((spec, 0) for spec in node.outputs)
    program = node.op.host_program(specs, node.outputs, attrs)
    patches = tuple((i, s) for i, s in enumerate(slots))
    return Step(program, (*slots, *outs), views, len(slots), (), patches, 1, index)


def _device_steps(
    index: int,
    node: PlanNode,
    slots: list[int],
    outs: list[int],
    attrs: dict[str, Any],
    caps: Caps,
    placer: _Placer,
) -> list[Step]:
    lowered = node.op.lower(tuple(s.spec for s in node.inputs), node.outputs, attrs, caps)
    scratch = [placer.temporary(s.storage_bytes) for s in lowered.temporaries]
    where = [*slots, *outs, *scratch]
    offsets = [s.offset for s in node.inputs] + [0] * (len(outs) + len(scratch))
    steps: list[Step] = []
    for call in lowered.calls:
        dtypes = tuple(r.spec.dtype for r in call.tensors)
        unit = tuple(r.spec.unit_rows for r in call.tensors)
        program = call.kernel.program(
            caps, dtypes, unit, call.constants, call.workgroup, call.face
        )
        words, patched = parameter_words(call, program.ir)
        for position, operand in patched:
            words[position] += offsets[call.tensors[operand].index]
        patches = tuple((position, where[call.tensors[o].index]) for position, o in patched)
        steps.append(
            Step(
                program,
                tuple(where[r.index] for r in call.tensors),
                tuple((r.spec, r.offset) for r in call.tensors),
                len(slots),
                tuple(words),
                patches,
                call.groups,
                index,
            )
        )
    for slot in scratch:
        placer.free(slot)
    return steps


PlanBuilder = Callable[..., Plan]
