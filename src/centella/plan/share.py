"""The pass that leaves out launches whose results an earlier node has already.

Nodes that read the same values may begin alike: both products of a mixture of experts put the same
pairs in order. A launch that only writes memory of its own node, as an earlier launch did from the
same values, is left out, and its node reads the memory of the earlier one. That memory is kept
until then, so it is to be small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from centella.backends.base import Launch
from centella.emit.program import Program
from centella.plan.graph import Lowering, Lowerings, PlanNode
from centella.record.values import Origin

MOST = 8 << 20  # bytes that are kept for a later node


class Shared(Struct, frozen=True):
    """What nodes have in common.

    Attributes:
        memory: of a node, and that of an earlier one that it reads instead.
        last: of memory that later nodes read, the last of them.
        left_out: launches, by node and number.
    """

    memory: dict[Origin, Origin] = field(default_factory=dict)
    last: dict[Origin, int] = field(default_factory=dict)
    left_out: set[tuple[int, int]] = field(default_factory=set)


def shared(nodes: Sequence[PlanNode], alive: Sequence[bool], launches: Lowerings) -> Shared:
    """Find what nodes have in common.

    Args:
        nodes: in order; alive: those that run; launches: of each form.
    """
    common, known = Shared(), dict[Any, list[Origin]]()
    for index, node in enumerate(nodes):
        lowering = launches.get(node.form) if alive[index] else None
        if lowering is None or not lowering.scratch:
            continue
        origins = _origins(index, node, len(lowering.scratch))
        alone = _written_once(lowering, len(origins))
        for number, launch in enumerate(lowering.launches):
            results = _results(launch)
            if not results or not alone.issuperset(results):
                continue
            key = _key(launch, [common.memory.get(o, o) for o in origins], node)
            before = known.setdefault(key, [origins[slot] for slot in results])
            if before[0][0] == index:
                continue
            common.left_out.add((index, number))
            for slot, origin in zip(results, before, strict=True):
                common.memory[origins[slot]] = origin
                common.last[origin] = index
    return common


def _written_once(lowering: Lowering, operands: int) -> set[int]:
    """Small memory of a node that one launch writes, and none changes."""
    writes = Counter(
        slot for each in lowering.launches for slot in (*_of(each, "out"), *_of(each, "inout"))
    )
    first = operands - len(lowering.scratch)
    sizes = {first + number: nbytes for number, nbytes in enumerate(lowering.scratch)}
    return {slot for slot, nbytes in sizes.items() if writes[slot] == 1 and nbytes <= MOST}


def _results(launch: Launch) -> list[int]:
    """What a launch writes; nothing where it changes what is there."""
    return [] if _of(launch, "inout") else _of(launch, "out")


def _of(launch: Launch, mode: str) -> list[int]:
    """The operands of a kernel of a mode."""
    if not isinstance(launch.program, Program):
        return []
    pairs = zip(launch.slots, launch.program.ir.args, strict=True)
    return [slot for slot, argument in pairs if argument.mode == mode]


def _origins(index: int, node: PlanNode, scratch: int) -> list[Origin]:
    """Of a node's operands: inputs, outputs, memory of its own."""
    inputs = [(source.node, source.index) for source in node.inputs]
    outputs = [(index, number) for number in range(len(node.form.outputs))]
    return [*inputs, *outputs, *((index, -1 - number) for number in range(scratch))]


def _key(launch: Launch, origins: Sequence[Origin], node: PlanNode) -> tuple[Any, ...]:
    """Equal for launches that compute the same from the same values."""
    inputs, reads = len(node.inputs), _of(launch, "in")
    offsets = tuple(node.inputs[slot].offset if slot < inputs else 0 for slot in reads)
    read = tuple(origins[slot] for slot in reads)
    return id(launch.program), read, offsets, launch.views, launch.parameters, launch.groups
