"""What the passes work on: nodes without values, and the plan that they end in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from centella.backends.base import Launch
from centella.op.form import Form
from centella.op.op import Op
from centella.plan.placement import Lifetime
from centella.record.values import Origin


class Source(Struct, frozen=True):
    """Where an operand comes from: external `index`, or output (node, `index`)."""

    node: int
    index: int
    offset: int


class PlanNode(Struct, frozen=True):
    """A node without its values: what a plan is made of."""

    form: Form[Any]
    inputs: tuple[Source, ...]
    wanted: tuple[bool, ...]

    @property
    def op(self) -> Op[Any]:
        """The operation."""
        return self.form.op


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
    values: tuple[Lifetime, ...] = ()

    @property
    def temporary_bytes(self) -> int:
        """Bytes of buffers that do not outlive the plan."""
        kept = set(self.results.values())
        first = self.externals
        return sum(n for i, n in enumerate(self.buffers) if first + i not in kept)

    def launches_of(self, node: int) -> int:
        """How many launches compute a node."""
        return sum(launch.node == node for launch in self.launches)

    def changers(self, slot: int) -> list[int]:
        """The nodes that change what lies in an external slot, in place."""
        owners = owners_of(self.nodes)
        return [node for (node, _), owner in owners.items() if owner == (-1, slot)]

    def label(self, node: int) -> str:
        """The op of a node; for a chain that became one launch, those that it is made of."""
        form = self.nodes[node].form
        steps = form.attrs.steps if form.op.name == "fused" else ()
        return " + ".join(step.name for step in steps) or form.op.name

    def explain(self) -> str:
        """Nodes, fusions, copies, launches, bytes, peak memory: a table to read."""
        from centella.plan.explain import explain

        return explain(self)


def owners_of(nodes: Sequence[PlanNode]) -> dict[Origin, Origin]:
    """Each version of a State, and the value whose memory it is: (-1, slot) for an outside one."""
    owners: dict[Origin, Origin] = {}
    for index, node in enumerate(nodes):
        for output, operand in enumerate(node.op.mutates):
            source = node.inputs[operand]
            before = (source.node, source.index)
            owners[index, output] = owners.get(before, before)
    return owners


EMPTY = Plan(0, (), (), {}, (), (), 0)
