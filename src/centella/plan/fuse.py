"""The fusion pass: element-wise nodes become one node, with at most one norm or reduction.

A node joins those that read it when nothing else does and nobody keeps its result, so what Python
names are alive decides what is fused and never what is computed. What comes before a norm or a
reduction is computed where its rows are loaded, what comes after it where they are stored.
Rows that ids choose from a table are operands of what computes with them. Groups end at 64 nodes
and where the device can bind no more operands or parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from centella.op.op import Form
from centella.ops import norm, reduce, tables
from centella.ops.fused import ALONG_ROWS, FUSED
from centella.ops.steps import ChainStep, FusedAttrs, numbers_of, weight
from centella.plan.divide import divisible
from centella.plan.graph import PlanNode, Source
from centella.record.values import Origin
from centella.specs import Caps, Shape, Spec

LONGEST = 64
PARAMETERS = 56  # launch parameters that leave room for the number of groups
STATEMENTS = 4000  # of a kernel, estimated: two thirds of what it may have
FORMS = 4096  # of a device, with their weights, before they are forgotten
LOOKUP = 4  # statements for an element of a table: its place, and whether it is there

BEFORE, AFTER = 0, 1


class Operand(NamedTuple):
    """Where an operand comes from, and how it is seen.

    Attributes:
        lookup: the node, if it reads rows of a table: it shares its operands with no other.
    """

    source: Source
    spec: Spec
    lookup: int = -1


class FormStep(NamedTuple):
    """A form as a step of a chain.

    Attributes:
        numbers: how many ride with the launch.
        statements: of an element-wise one, for one element; 0 on the host.
    """

    numbers: int
    statements: int


class Fused(Struct, eq=False):
    """What is known of chains on a device: each form as a step, and the forms of chains by key.

    Attributes:
        pairs: of two forms: that of both, None where they stay two (`join`).
    """

    steps: dict[Form[Any], FormStep] = field(default_factory=dict)
    chains: dict[Hashable, Form[Any]] = field(default_factory=dict)
    pairs: dict[tuple[Form[Any], Form[Any]], Form[Any] | None] = field(default_factory=dict)


def fuse(
    nodes: Sequence[PlanNode], alive: list[bool], caps: Caps, known: Fused
) -> tuple[list[PlanNode], list[bool]]:
    """Nodes with chains fused, and which of them are still alive.

    Args:
        nodes: in order; alive: those that must run.
        known: of the chains before on this device.
    """
    if len(known.steps) + len(known.chains) + len(known.pairs) >= FORMS:
        known.pairs.clear()
        known.steps.clear()
        known.chains.clear()
    graph = _Graph(nodes, readers_of(nodes, alive), changed_by(nodes), caps, known)
    fused, left = list(nodes), list(alive)
    for last in range(len(nodes) - 1, -1, -1):
        if last in graph.taken or not left[last] or not _computes(nodes[last]):
            continue
        group = _Group(graph, last)
        if len(group.sides) < 2:
            continue
        chain = _chain(sorted(group.sides), graph)
        if not divisible(chain.form, caps):
            continue  # rows of a reduction that one by one are divided, and chains are not
        fused[last] = chain
        for index in group.sides:
            left[index] = index == last
        graph.taken |= group.sides.keys()
    return fused, left


def _computes(node: PlanNode) -> bool:
    """Whether a chain may end with a node."""
    op = node.op
    return (op.element is not None or op.name in ALONG_ROWS) and node.form.outputs[0].size > 0


def _holds(node: PlanNode) -> bool:
    """Whether a node is a norm or a reduction, of which a chain has one."""
    return node.op.name in ALONG_ROWS


def readers_of(nodes: Sequence[PlanNode], alive: Sequence[bool]) -> dict[Origin, set[int]]:
    """Of each value, the nodes alive that read it."""
    readers: dict[Origin, set[int]] = {}
    for index, node in enumerate(nodes):
        if alive[index]:
            for source in node.inputs:
                readers.setdefault((source.node, source.index), set()).add(index)
    return readers


def changed_by(nodes: Sequence[PlanNode]) -> dict[Origin, int]:
    """Values that are changed in place, and the node that does: their readers stay before it."""
    return {
        (node.inputs[i].node, node.inputs[i].index): index
        for index, node in enumerate(nodes)
        for i in node.op.mutates
    }


class _Graph(Struct, eq=False):
    """What is fused: the nodes, who reads each, values that change, nodes that have a group."""

    nodes: Sequence[PlanNode]
    readers: Mapping[Origin, set[int]]
    changed: Mapping[Origin, int]
    caps: Caps
    known: Fused
    taken: set[int] = field(default_factory=set)

    def looks_up(self, index: int) -> bool:
        """Whether a chain may read what a node gives where that lies in a table.

        An operand of a chain is read in one way, so a tensor is not the table of its own elements.
        """
        node, form = self.nodes[index], self.nodes[index].form
        return (
            form.outputs[0].size > 0
            and tables.takes(form, self.caps)
            and (node.inputs[0] != node.inputs[1] or form.inputs[0] != form.inputs[1])
        )

    def movable(self, index: int, last: int) -> bool:
        """Whether a node can run where its only readers run, in place of node `last`."""
        node = self.nodes[index]
        return (
            index not in self.taken
            and (_computes(node) or self.looks_up(index))
            and not node.wanted[0]
            and all(self.changed.get((s.node, s.index), last) >= last for s in node.inputs)
        )

    def operands(self, index: int) -> Iterable[Operand]:
        """Where each operand of a node comes from, and how it is seen."""
        node = self.nodes[index]
        own = index if self.looks_up(index) else -1
        for source, spec in zip(node.inputs, node.form.inputs, strict=True):
            yield Operand(source, spec, own)

    def outside(self, members: Iterable[int]) -> dict[Operand, int]:
        """The operands of a group that no node of it makes, numbered in order of first use."""
        operands: dict[Operand, int] = {}
        inside = set(members)
        for index in sorted(inside):
            for operand in self.operands(index):
                if operand.source.node not in inside:
                    operands.setdefault(operand, len(operands))
        return operands

    def step(self, form: Form[Any]) -> FormStep:
        """A form as a step of a chain, worked out once."""
        known = self.known.steps.get(form)
        if known is None:
            numbers, attrs = numbers_of(0, form.op.name, form.attrs, form.inputs)
            statements = LOOKUP if form.op.name in tables.LOOKUPS else 0
            if form.op.element is not None and not self.caps.on_host:
                step = ChainStep(form.op.name, (), attrs, form.outputs[0].dtype.name)
                types = tuple((n.name, n.type) for n in numbers)
                statements = weight(step, types, tuple(spec.dtype for spec in form.inputs))
            known = FormStep(len(numbers), statements)
            self.known.steps[form] = known
        return known


class _Size(NamedTuple):
    """What a kernel of a group has to hold.

    Attributes:
        reads: operands of the nodes BEFORE (and of the norm or reduction) and AFTER.
        numbers: that ride with the launch.
        statements: for one element, in all passes.
        lanes: elements that a thread takes at a time, at most.
    """

    reads: tuple[frozenset[Operand], frozenset[Operand]]
    numbers: int
    statements: int
    lanes: int


class _Group:
    """The nodes that become one with the last of them.

    Attributes:
        sides: of each member, whether it comes BEFORE the norm or reduction, or is it or comes
            AFTER it.
        anchor: the norm or reduction.
    """

    def __init__(self, graph: _Graph, last: int) -> None:
        self._graph, self._nodes = graph, graph.nodes
        self.sides: dict[int, int] = {last: AFTER}
        self.anchor: int | None = None
        self._out: Spec = self._nodes[last].form.outputs[0]
        self._shapes: list[Shape] = [self._out.shape, self._out.shape]
        if _holds(self._nodes[last]):
            self._hold(last)
        self._size = self._with(last, AFTER, _Size((frozenset(), frozenset()), 0, 0, 1))
        self._grow(last)

    def _hold(self, index: int) -> None:
        self.anchor = index
        self._shapes[BEFORE] = self._nodes[index].form.inputs[0].shape

    def _grow(self, last: int) -> None:
        waiting = _sources(self._nodes[last])
        while waiting and len(self.sides) < LONGEST:
            index = max(waiting)
            waiting.discard(index)
            if self._graph.movable(index, last):
                side = self._side(index)
                if side is None or not self._take(index, side) or self._graph.looks_up(index):
                    continue
                waiting |= _sources(self._nodes[index])

    def _side(self, index: int) -> int | None:
        """Where a node would stand; None where it cannot."""
        readers = self._graph.readers[index, 0]
        if not readers <= self.sides.keys():
            return None
        result = self._nodes[index].form.outputs[0]
        sides: set[int] = set()
        for reader in readers:
            is_anchor = reader == self.anchor
            sides.add(BEFORE if is_anchor else self.sides[reader])
            for position, (source, spec, lookup) in enumerate(self._graph.operands(reader)):
                other = source.offset or spec != result or (is_anchor and position) or lookup >= 0
                if source.node == index and other:  # a view, a norm's weight, a table or ids
                    return None
        alike = self._shapes[BEFORE] == self._shapes[AFTER]
        side = min(sides)
        return side if (len(sides) == 1 or alike) and result.shape == self._shapes[side] else None

    def _take(self, index: int, side: int) -> bool:
        """Take a node in, unless the group would become more than a kernel can be."""
        holds = _holds(self._nodes[index])
        if holds and (self.anchor is not None or side == BEFORE):
            return False
        size = self._with(index, side, self._size)
        anchor = index if holds else self.anchor
        if not self._fits(size, anchor):
            return False
        self.sides[index] = side
        self._size = size
        if holds:
            self._hold(index)
        return True

    def _with(self, index: int, side: int, size: _Size) -> _Size:
        """The size with one more node, all of whose readers are members."""
        node = self._nodes[index]
        form = node.form
        reads = [frozenset([r for r in each if r.source.node != index]) for each in size.reads]
        holds = _holds(node)
        own = holds or form.outputs[0] is self._out  # what it stores, or holds, sets the width
        lanes = form.outputs[0].dtype.per_chunk if own else 1
        if holds:
            lanes = max(lanes, self._registers(form)[0])
        reads[BEFORE if holds else side] |= frozenset(self._graph.operands(index))
        step = self._graph.step(form)
        statements = step.statements
        if statements and side == BEFORE and self.anchor is not None:
            statements *= self._registers(self._nodes[self.anchor].form)[1]
        return _Size(
            (reads[BEFORE], reads[AFTER]),
            size.numbers + step.numbers,
            size.statements + statements,
            max(size.lanes, lanes),
        )

    def _registers(self, form: Form[Any]) -> tuple[int, int]:
        """Elements that a thread of a norm or reduction has at a time, and how often it does."""
        caps = self._graph.caps
        if caps.on_host:
            return 1, 1
        if form.op.name == "norm":
            return norm.elements_at_once(form.inputs, form.outputs[0], caps)
        return reduce.elements_at_once(form.inputs, self._out, caps), 1

    def _fits(self, size: _Size, anchor: int | None) -> bool:
        caps = self._graph.caps
        operands = len(size.reads[BEFORE] | size.reads[AFTER])
        shape = self._shapes[BEFORE]
        if anchor is not None:
            shape = self._nodes[anchor].form.inputs[0].shape
        own = 3 if anchor is None else 8
        parameters = own + len(shape) + (len(shape) + 1) * (operands + 1) + size.numbers
        return (
            operands < min(caps.max_storage_buffers, 16)
            and parameters <= PARAMETERS
            and size.statements * size.lanes <= STATEMENTS
            and (anchor is None or self._suits(self._nodes[anchor], size))
        )

    def _suits(self, node: PlanNode, size: _Size) -> bool:
        """Whether a norm or a reduction can have what the group has before and after it."""
        before, after = size.reads
        if node.op.name == "reduce":
            return not before & after  # one operand is read in one way
        if self._graph.caps.on_host:
            return True
        if any(not operand.spec.unit_rows for operand in before | after):
            return False  # each pass would walk across memory
        return norm.stores(node.form.inputs, node.form.outputs[0], self._out)


def _sources(node: PlanNode) -> set[int]:
    return {source.node for source in node.inputs if source.node >= 0}


def _chain(group: list[int], graph: _Graph) -> PlanNode:
    """The fused node of a group, in place of its last."""
    nodes, forms = graph.nodes, graph.known.chains
    outside = graph.outside(group)
    places: dict[int, int] = {}
    steps: list[tuple[Form[Any], tuple[int, ...]]] = []
    for count, index in enumerate(group):
        node = nodes[index]
        operands = tuple(
            places[operand.source.node] if operand.source.node in places else outside[operand]
            for operand in graph.operands(index)
        )
        steps.append((node.form, operands))
        places[index] = len(outside) + count
    last = nodes[group[-1]]
    inputs = tuple(operand.spec for operand in outside)
    key = (inputs, tuple(steps))
    form = forms.get(key)
    if form is None:
        chain = (ChainStep(f.op.name, k, f.attrs, f.outputs[0].dtype.name) for f, k in steps)
        attrs = FusedAttrs(tuple(chain))
        form = forms[key] = Form(FUSED, inputs, last.form.outputs, attrs, last.form.nbytes)
    return replace(last, form=form, inputs=tuple(operand.source for operand in outside))
