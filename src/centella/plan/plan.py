"""The plan that the passes end in, and what it does as a table to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from centella.backends.base import Launch
from centella.emit.program import Program
from centella.op.op import get
from centella.ops.fused import along_rows
from centella.plan.graph import PlanNode, owners_of
from centella.plan.placement import Lifetime, largest_live
from centella.record.values import Origin
from centella.specs import Spec

MOVES = ("copy", "reshape")
LISTED = 8


class Plan(Struct, frozen=True):
    """An immutable run list.

    Attributes:
        externals: how many buffers come from outside; they are slots 0 .. externals - 1.
        buffers: bytes of each further slot, and in `makers` the node that uses it first.
        results: (node, output) of each value that stays, and its slot.
        launches: in order; each for external buffers that begin at their first element, all of
            which is bound, and without its pipeline.
        nodes: what was planned, for `explain`.
        dropped: how many of them nobody reads.
        fused: how many became part of another.
        stored: of assignments to States, the node that computes what is assigned in its memory.
        values: what needs those buffers, and how long.
    """

    externals: int
    buffers: tuple[int, ...]
    makers: tuple[int, ...]
    results: Mapping[Origin, int]
    launches: tuple[Launch, ...]
    nodes: tuple[PlanNode, ...]
    dropped: int
    fused: int = 0
    stored: Mapping[int, int] = {}
    values: tuple[Lifetime, ...] = ()

    @property
    def temporary_bytes(self) -> int:
        """Bytes of buffers that do not outlive the plan."""
        kept = set(self.results.values())
        first = self.externals
        return sum(n for i, n in enumerate(self.buffers) if first + i not in kept)

    def launches_of(self, node: int) -> int:
        """How many launches compute a node."""
        node = self.stored.get(node, node)
        return sum(launch.node == node for launch in self.launches)

    def changers(self, slot: int) -> list[int]:
        """The nodes that change what lies in an external slot, in place."""
        owners = owners_of(self.nodes)
        return [node for (node, _), owner in owners.items() if owner == (-1, slot)]

    def label(self, node: int) -> str:
        """The op of a node; for a chain that became one launch, those that it is made of."""
        form = self.nodes[self.stored.get(node, node)].form
        steps = form.attrs.steps if form.op.name == "fused" else ()
        return " + ".join(step.name for step in steps) or form.op.name

    def explain(self) -> str:
        """Nodes, fusions, copies, launches, bytes, peak memory: a table to read."""
        copies = sum(bool(s.reason) or self.nodes[s.node].op.name in MOVES for s in self.launches)
        live, alive = largest_live(self.values)
        lines = [
            f"{len(self.nodes)} nodes ({self.dropped} dropped, {self.fused} fused, "
            f"{len(self.stored)} stored), "
            f"{len(self.launches)} launches ({copies} copies), peak {sum(self.buffers):,} bytes in "
            f"{len(self.buffers)} buffers ({self.temporary_bytes:,} temporary)"
        ]
        if alive:
            largest = sorted(alive, key=lambda v: (-v.nbytes, v.node))
            parts = [f"{_maker_of(self.nodes, v)} {v.nbytes:,}" for v in largest[:LISTED]]
            more = [f"{len(largest) - LISTED} more"] if len(largest) > LISTED else []
            lines.append(f"  largest live set {live:,} bytes: {', '.join(parts + more)}")
        return "\n".join([*lines, *_launches(self.nodes, self.launches)])


EMPTY = Plan(0, (), (), {}, (), (), 0)


def _maker_of(nodes: Sequence[PlanNode], value: Lifetime) -> str:
    name = label(nodes[value.node])
    return name if value.output >= 0 else f"scratch of {name}"


def _launches(nodes: Sequence[PlanNode], launches: Sequence[Launch]) -> Iterator[str]:
    readers: dict[int, list[tuple[PlanNode, int]]] = {}
    for index in dict.fromkeys(launch.node for launch in launches):
        for operand, source in enumerate(nodes[index].inputs):
            readers.setdefault(source.node, []).append((nodes[index], operand))
    counts = Counter(launch.node for launch in launches)
    for launch in launches:
        node = nodes[launch.node]
        ins, results = node.form.inputs, node.form.outputs
        if launch.reason:  # a copy of one operand, whose memory it sees as one row
            ins = results = (launch.views[-1][0],)
        shapes = " ".join(str(list(s.shape)) for s in ins)
        outs = " ".join(f"{list(s.shape)}:{s.dtype.name}" for s in results)
        what = launch.reason or _reason(node, readers.get(launch.node, [])) or label(node)
        moved = _moved(launch, node if counts[launch.node] == 1 else None)
        yield (
            f"  {what:<14} {launch.program.name:<20} {shapes} -> {outs}  groups {launch.groups}, "
            f"reads {moved[0]:,}, writes {moved[1]:,} bytes"
        )


def _moved(launch: Launch, node: PlanNode | None) -> tuple[int, int]:
    """Bytes read and written: of the op's own operands where the launch is all of the op."""
    specs: Sequence[Spec] = [spec for spec, _ in launch.views]
    written = [i >= launch.inputs for i in range(len(specs))]
    if node is not None:  # a launch may see rows of memory where the op sees a view
        specs = (*node.form.inputs, *node.form.outputs)
        written = [i >= len(node.form.inputs) for i in range(len(specs))]
    elif isinstance(launch.program, Program):
        written = [arg.writable for arg in launch.program.ir.args]
    sizes = [min(spec.nbytes, spec.storage_bytes) for spec in specs]
    out = sum(n for n, w in zip(sizes, written, strict=True) if w)
    return sum(sizes) - out, out


def label(node: PlanNode) -> str:
    """A node's op; what is fused reads `norm <- add add -> mul`: what it loads and stores by."""
    if node.op.name != "fused":
        return node.op.name
    steps = node.form.attrs.steps
    op = along_rows(steps)
    if op is None:
        return _names([s.name for s in steps])
    at = next(i for i, s in enumerate(steps) if s.name == op)
    inputs = len(node.form.inputs)
    before, waiting = set[int](), [k - inputs for k in steps[at].operands]
    while waiting:
        index = waiting.pop()
        if index >= 0:
            before.add(index)
            waiting += [k - inputs for k in steps[index].operands]
    sides = [[s.name for i, s in enumerate(steps) if i != at and (i in before) is b] for b in
             (True, False)]  # fmt: skip
    text = f"{op} <- {_names(sides[0])}" if sides[0] else op
    return f"{text} -> {_names(sides[1])}" if sides[1] else text


def _names(names: list[str]) -> str:
    more = [f"and {len(names) - LISTED} more"] if len(names) > LISTED else []
    return " ".join(names[:LISTED] + more)


def _reason(node: PlanNode, readers: list[tuple[PlanNode, int]]) -> str:
    """Why elements are moved; "" for other ops."""
    if node.op.name not in MOVES:
        return ""
    spec: Spec = node.form.inputs[0]
    if node.op.name == "reshape":
        outer = [s for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1]
        padded = spec.unit_rows and outer == sorted(outer, reverse=True)
        return "reshape across padding" if padded else "reshape of dimensions in another order"
    for reader, operand in readers:
        for op, position in _operands_of(reader, operand):
            if not get(op).takes(position, spec):
                what = "apart by no one pitch" if spec.unit_rows else "not contiguous"
                return f"copy for {op} operand {position}: rows are {what}"
    return "copy"


def _operands_of(node: PlanNode, operand: int) -> Iterator[tuple[str, int]]:
    """The ops that read an operand of a node, and which of theirs it is."""
    if node.op.name != "fused":
        yield node.op.name, operand
        return
    for step in node.form.attrs.steps:
        yield from ((step.name, i) for i, k in enumerate(step.operands) if k == operand)
