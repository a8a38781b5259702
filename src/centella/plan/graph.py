"""What the passes work on: nodes without values."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from msgspec import Struct

from centella.backends.base import Launch
from centella.op.op import Form, Op
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


class Lowering(Struct, frozen=True):
    """What a form becomes.

    Attributes:
        launches: their slots count the form's inputs, outputs, then the temporaries.
        scratch: bytes of each temporary.
    """

    launches: tuple[Launch, ...]
    scratch: tuple[int, ...]


Lowerings = MutableMapping[Form[Any], Lowering]


def owners_of(nodes: Sequence[PlanNode]) -> dict[Origin, Origin]:
    """Each version of a State, and the value whose memory it is: (-1, slot) for an outside one."""
    owners: dict[Origin, Origin] = {}
    for index, node in enumerate(nodes):
        for output, operand in enumerate(node.op.mutates):
            source = node.inputs[operand]
            before = (source.node, source.index)
            owners[index, output] = owners.get(before, before)
    return owners
