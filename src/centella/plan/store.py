"""The pass that has a value computed where a State lies, in place of copying it there.

`state.assign(x)` is a launch of its own, which copies x. Where x is computed for that, its launches
write to the memory of the State, if nothing can tell: x is not kept, lies as the State does and is
written whole, and nobody reads or changes the State between the first launch of x and the
assignment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct, field

from centella.ops.assign import ASSIGN
from centella.plan.graph import PlanNode, owners_of
from centella.record.values import Origin
from centella.specs import Spec


class Stored(Struct, frozen=True):
    """What is computed where a State lies.

    Attributes:
        owners: the values that lie in the memory of another, as of `owners_of`.
        makers: of an assignment that needs no launch, the node that computes what is assigned.
    """

    owners: dict[Origin, Origin]
    makers: dict[int, int] = field(default_factory=dict)


def stored(nodes: Sequence[PlanNode], alive: Sequence[bool]) -> Stored:
    """Find the assignments whose values can be computed where the State lies.

    Args:
        nodes: in order; alive: those that run.
    """
    owners, makers = owners_of(nodes), dict[int, int]()
    if not any(node.op is ASSIGN for node in nodes):
        return Stored(owners)
    uses, changes = defaultdict[Origin, list[int]](list), defaultdict[Origin, list[int]](list)
    for index, node in enumerate(nodes):
        if alive[index]:
            origins = [(source.node, source.index) for source in node.inputs]
            memory = [owners.get(origin, origin) for origin in origins]
            for each in memory:
                uses[each].append(index)
            for operand in node.op.mutates:
                changes[memory[operand]].append(index)
    for index, node in enumerate(nodes):
        if node.op is not ASSIGN or not alive[index]:
            continue
        source, state = node.inputs[1], owners[index, 0]
        value = source.node, source.index
        if source.node < 0 or source.offset or value in owners or not _alike(nodes, node):
            continue
        used, changed = uses[state], changes[state]
        between = used[bisect_left(used, source.node)] < index  # the assignment is a use itself
        after = bisect_right(changed, index)
        later = changed[after] if after < len(changed) else len(nodes)
        if not between and max(uses[value]) < later:
            owners[value], makers[index] = state, source.node
            for use in uses[value]:
                insort(used, use)
    return Stored(owners, makers)


def _alike(nodes: Sequence[PlanNode], node: PlanNode) -> bool:
    """Whether what is assigned is all of a value that is not kept, and lies as the State does."""
    source, state, seen = node.inputs[1], node.form.outputs[0], node.form.inputs[1]
    maker = nodes[source.node]
    result = maker.form.outputs[source.index]
    fits = result.size == state.size > 0 and result.storage_bytes <= state.storage_bytes
    whole = maker.op.fills and not maker.wanted[source.index]
    return fits and whole and _lie(seen) == _lie(state)


def _lie(spec: Spec) -> list[tuple[int, int]]:
    """Extents and strides of more than one element."""
    return [(n, s) for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1]
