"""From recorded nodes to an immutable plan, in small passes.

    drop    nodes that nobody reads
    lower   each node to launches (its op chooses kernels) or to its NumPy formula on the CPU
    place   buffers: one for each value that stays, temporaries reused by lifetime

A plan holds no tensors: buffers are given when it runs. Its key is the structure and the shapes of
what was recorded, so a plan serves every recording of the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from centella.errors import CentellaError
from centella.op import Op
from centella.pool import size_class
from centella.program import Call, HostProgram, Program, parameter_words
from centella.recording import Form, Node, Place, blame
from centella.specs import Caps, Spec

Wanted = Sequence[tuple[bool, ...]]


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

    form: Form
    inputs: tuple[Source, ...]
    wanted: tuple[bool, ...]

    @property
    def op(self) -> Op:
        """The operation."""
        return self.form.op


@dataclass(frozen=True, slots=True)
class Step:
    """One launch.

    Attributes:
        slots, views: its operands' buffers, and how each is seen; the first `inputs` are read.
        words: raw parameters, with the static part of every offset.
        patches: (word, slot) where an external buffer's own offset is added when the plan runs.
        node: index of the node that it belongs to.
    """

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
        buffers: bytes of each further slot, and in `makers` the node that it was made for.
        results: (node, output) of each value that stays, and its slot.
        steps: launches in order.
        nodes: what was planned, for `explain`.
        dropped: how many of them nobody reads.
    """

    externals: int
    buffers: tuple[int, ...]
    makers: tuple[int, ...]
    results: Mapping[Place, int]
    steps: tuple[Step, ...]
    nodes: tuple[PlanNode, ...]
    dropped: int

    @property
    def temporary_bytes(self) -> int:
        """Bytes of buffers that do not outlive the plan."""
        kept = set(self.results.values())
        first = self.externals
        return sum(n for i, n in enumerate(self.buffers) if first + i not in kept)

    def explain(self) -> str:
        """Nodes, copies, launches, bytes, peak memory: a table to read."""
        copies = sum(self.nodes[s.node].form.op.name in ("copy", "reshape") for s in self.steps)
        lines = [
            f"{len(self.nodes)} nodes ({self.dropped} dropped), {len(self.steps)} launches "
            f"({copies} copies), peak {sum(self.buffers):,} bytes in {len(self.buffers)} buffers "
            f"({self.temporary_bytes:,} temporary)"
        ]
        for step in self.steps:
            form = self.nodes[step.node].form
            shapes = " ".join(f"{list(s.shape)}" for s in form.inputs)
            outs = " ".join(f"{list(s.shape)}:{s.dtype.name}" for s in form.outputs)
            name = step.program.name
            lines.append(
                f"  {form.op.name:<14} {name:<24} {shapes} -> {outs}  groups {step.groups}"
            )
        return "\n".join(lines)


EMPTY = Plan(0, (), (), {}, (), (), 0)


def key_of(nodes: Sequence[Node], externals: Mapping[int, int], wanted: Wanted) -> tuple[Any, ...]:
    """The structure of a recording: equal keys, equal plans.

    Args:
        externals: id of each outside value to its slot; how many there are is part of the key, as
            it numbers the slots that follow.
    """
    key: list[Any] = [len(externals)]
    for node, kept in zip(nodes, wanted, strict=True):
        key.append(node.form)
        for value, place, offset, _ in node.inputs:
            key.append(place if value is None else externals[id(value)])
            key.append(offset)
        key.append(kept)
    return tuple(key)


def build(nodes: Sequence[Node], externals: Mapping[int, int], wanted: Wanted, caps: Caps) -> Plan:
    """Plan recorded nodes.

    Args:
        nodes: in recorded order.
        externals: id of each outside value to its slot.
        wanted: for each node, which outputs must outlive the plan.

    Raises:
        CentellaError: from an op's choice of kernels; names the op and the line.
    """
    plain = [_plain(n, externals, w) for n, w in zip(nodes, wanted, strict=True)]
    alive = _alive(plain)
    placer = _Placer(plain, alive, len(externals))
    steps: list[Step] = []
    for index, node in enumerate(plain):
        if not alive[index]:
            continue
        slots = [s.index if s.node < 0 else placer.slots[s.node, s.index] for s in node.inputs]
        outs = [placer.allocate((index, i), spec) for i, spec in enumerate(node.form.outputs)]
        if any(spec.size for spec in node.form.outputs):
            try:
                steps += _steps(index, node, slots, outs, caps, placer)
            except CentellaError as error:
                blame(error, node.op.name, nodes[index].site)
                raise
        placer.release_after(index)
    return Plan(
        len(externals),
        tuple(placer.sizes),
        tuple(placer.makers),
        {p: s for p, s in placer.slots.items() if plain[p[0]].wanted[p[1]]},
        tuple(steps),
        tuple(plain),
        sum(not a for a in alive),
    )


def _plain(node: Node, externals: Mapping[int, int], wanted: tuple[bool, ...]) -> PlanNode:
    sources = tuple(
        Source(p.place[0], p.place[1], p.spec, p.offset)
        if p.value is None
        else Source(-1, externals[id(p.value)], p.spec, p.offset)
        for p in node.inputs
    )
    return PlanNode(node.form, sources, wanted)


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
        self.first = externals
        self._nodes = nodes
        self._free: dict[int, list[int]] = {}
        self._ends: dict[int, list[Place]] = {}
        self._read: set[Place] = set()
        self._now = 0
        self.sizes: list[int] = []
        self.makers: list[int] = []
        self.slots: dict[Place, int] = {}
        last = {
            (source.node, source.index): index
            for index, node in enumerate(nodes)
            if alive[index]
            for source in node.inputs
            if source.node >= 0
        }
        for place, index in last.items():
            self._read.add(place)
            if not nodes[place[0]].wanted[place[1]]:
                self._ends.setdefault(index, []).append(place)

    def _new(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        self.makers.append(self._now)
        return self.first + len(self.sizes) - 1

    def allocate(self, place: Place, spec: Spec) -> int:
        self._now = place[0]
        nbytes = spec.storage_bytes
        if self._nodes[place[0]].wanted[place[1]]:
            slot = self._new(nbytes)
        else:
            slot = self.temporary(nbytes)
            if place not in self._read:
                self._ends.setdefault(place[0], []).append(place)
        self.slots[place] = slot
        return slot

    def temporary(self, nbytes: int) -> int:
        """A slot for as long as the caller says; return it with `free`."""
        free = self._free.get(size_class(nbytes))
        if free:
            slot = free.pop()
            self.sizes[slot - self.first] = max(self.sizes[slot - self.first], nbytes)
            return slot
        return self._new(nbytes)

    def free(self, slot: int) -> None:
        self._free.setdefault(size_class(self.sizes[slot - self.first]), []).append(slot)

    def release_after(self, index: int) -> None:
        for place in self._ends.pop(index, ()):
            self.free(self.slots[place])


def _steps(
    index: int, node: PlanNode, slots: list[int], outs: list[int], caps: Caps, placer: _Placer
) -> list[Step]:
    form = node.form
    if form.lowered is None:
        form.lowered = _lower(form, caps)
    lowered: _Lowering = form.lowered
    scratch = [placer.temporary(nbytes) for nbytes in lowered.scratch]
    where = (*slots, *outs, *scratch)
    offsets = [s.offset for s in node.inputs]
    shift = {i: offset for i, offset in enumerate(offsets) if offset}
    steps = [
        _step(index, each, where, shift, len(slots), placer.first) for each in lowered.launches
    ]
    for slot in scratch:
        placer.free(slot)
    return steps


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch before its buffers are known; `operands` count inputs, outputs, temporaries."""

    program: Program | HostProgram
    operands: tuple[int, ...]
    views: tuple[tuple[Spec, int], ...]
    words: tuple[int, ...]
    patched: tuple[tuple[int, int], ...]
    groups: int


@dataclass(frozen=True, slots=True)
class _Lowering:
    """What a Form becomes: launches, and bytes of the temporaries they share."""

    launches: tuple[_Launch, ...]
    scratch: tuple[int, ...]


def _lower(form: Form, caps: Caps) -> _Lowering:
    attrs = dict(form.attrs)
    if caps.target == "numpy":
        program = form.op.host_program(form.inputs, form.outputs, attrs)
        views = tuple((spec, 0) for spec in (*form.inputs, *form.outputs))
        return _Lowering((_Launch(program, tuple(range(len(views))), views, (), (), 1),), ())
    lowered = form.op.lower(form.inputs, form.outputs, attrs, caps)
    return _Lowering(
        tuple(_launch(call, caps) for call in lowered.calls),
        tuple(spec.storage_bytes for spec in lowered.temporaries),
    )


def _launch(call: Call, caps: Caps) -> _Launch:
    dtypes = tuple(r.spec.dtype for r in call.tensors)
    unit = tuple(r.spec.unit_rows for r in call.tensors)
    program = call.kernel.program(caps, dtypes, unit, call.constants, call.workgroup, call.face)
    words, patched = parameter_words(call, program.ir)
    return _Launch(
        program,
        tuple(r.index for r in call.tensors),
        tuple((r.spec, r.offset) for r in call.tensors),
        tuple(words),
        tuple(patched),
        call.groups,
    )


def _step(
    index: int,
    launch: _Launch,
    where: tuple[int, ...],
    shift: Mapping[int, int],
    inputs: int,
    externals: int,
) -> Step:
    """A launch on its slots; `shift` has the elements that an input begins later by."""
    operands = launch.operands
    slots = tuple([where[i] for i in operands])
    words, views = launch.words, launch.views
    if shift:
        moved = list(words)
        for position, operand in launch.patched:
            moved[position] += shift.get(operands[operand], 0)
        words = tuple(moved)
        pairs = zip(views, operands, strict=True)
        views = tuple([(spec, offset + shift.get(i, 0)) for (spec, offset), i in pairs])
    patches = tuple([(p, slots[o]) for p, o in launch.patched if slots[o] < externals])
    return Step(launch.program, slots, views, inputs, words, patches, launch.groups, index)
