"""The pass that has a value computed where a State lies, in place of copying it there.

`state.assign(x)` is a launch of its own, which copies x. Where x is computed for that, its launches
write to the memory of the State, if nothing can tell: x is not kept, lies as the State does, and
nobody reads or changes the State between the first launch of x and the assignment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from centella.ops.assign import ASSIGN
from centella.plan.graph import PlanNode, owners_of
from centella.record.values import Origin
from centella.specs import Spec

Owners = dict[Origin, Origin]


def stored(nodes: Sequence[PlanNode], alive: Sequence[bool]) -> tuple[list[bool], Owners]:
    """Which nodes still run, and the values that lie in the memory of another (see `owners_of`).

    Args:
        nodes: in order; alive: those that run.
    """
    left, owners = list(alive), owners_of(nodes)
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
        between = any(source.node <= use < index for use in uses[state])
        later = min((each for each in changes[state] if each > index), default=len(nodes))
        if not between and max(uses[value]) < later:
            left[index], owners[value] = False, state
            uses[state] += uses[value]
    return left, owners


def _alike(nodes: Sequence[PlanNode], node: PlanNode) -> bool:
    """Whether what is assigned is all of a value that is not kept, and lies as the State does."""
    source, state = node.inputs[1], node.form.outputs[0]
    made, seen = nodes[source.node].form.outputs[source.index], node.form.inputs[1]
    kept = nodes[source.node].wanted[source.index]
    fits = made.size == state.size > 0 and made.storage_bytes <= state.storage_bytes
    return fits and not kept and _lie(seen) == _lie(state)


def _lie(spec: Spec) -> list[tuple[int, int]]:
    """Extents and strides of more than one element."""
    return [(n, s) for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1]
