"""From recorded nodes to an immutable plan, in small passes.

    drop    nodes that nobody reads, and of a node what is computed for such results alone
    join    norms with the product whose result they alone read, where one kernel takes both, and
            products with the attention whose result they alone read
    fuse    element-wise nodes with each other and with the norm or reduction beside them
    store   values that are assigned to a State in its memory
    lower   each node to launches (its op chooses kernels) or to its NumPy formula on the CPU
    share   launches that nodes have in common: the later ones are left out
    place   buffers: one for each value that stays, temporaries reused by lifetime

A plan holds no tensors: buffers are given when it runs. Its key is the structure and the shapes of
what was recorded, so a plan serves every recording of the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from centella.backends.base import Launch
from centella.emit.program import Call, parameter_words
from centella.errors import CentellaError, LimitError
from centella.op.op import Form
from centella.plan import placement
from centella.plan.divide import divided
from centella.plan.fuse import Fused, fuse, readers_of
from centella.plan.graph import Lowering, Lowerings, PlanNode, Source
from centella.plan.join import joined
from centella.plan.plan import Plan
from centella.plan.share import Shared, shared
from centella.plan.store import stored
from centella.record.recording import Node
from centella.record.values import Origin, Value
from centella.specs import MAX_GROUPS, Caps

LOWERED = 8192  # forms of a device, before their launches are forgotten

Wanted = Sequence[tuple[bool, ...]]


class Memo(Struct, eq=False):
    """What the plans of a device share, so that nothing is worked out twice.

    Attributes:
        fused: chains that became one.
        launches: of each form.
    """

    fused: Fused = field(default_factory=Fused)
    launches: Lowerings = field(default_factory=dict)


def key_of(
    nodes: Sequence[Node], externals: Mapping[Value, int], wanted: Wanted
) -> tuple[Any, ...]:
    """The structure of a recording: equal keys, equal plans.

    Args:
        externals: the slot of each outside value; how many there are is part of the key, as
            it numbers the slots that follow.
    """
    key: list[Any] = [len(externals)]
    for node, kept in zip(nodes, wanted, strict=True):
        key.append(node.form)
        for value, (maker, output), offset in node.inputs:
            key.append(maker)
            key.append(output if value is None else externals[value])
            key.append(offset)
        key.append(kept)
    return tuple(key)


def build(
    nodes: Sequence[Node], externals: Mapping[Value, int], wanted: Wanted, caps: Caps,
    memo: Memo,
) -> Plan:  # fmt: skip
    """Plan recorded nodes.

    Args:
        nodes: in recorded order.
        externals: the slot of each outside value.
        wanted: for each node, which outputs must outlive the plan.
        memo: what earlier plans of this device worked out.

    Raises:
        CentellaError: from an op's choice of kernels; names the op and the line.
    """
    plain = [_plain(n, externals, w) for n, w in zip(nodes, wanted, strict=True)]
    alive = _alive(plain)
    needed = alive
    plain = _trimmed(plain, alive)
    plain, alive = joined(plain, alive, caps, memo.fused)
    plain, alive = fuse(plain, alive, caps, memo.fused)
    fused = sum(needed) - sum(alive)
    placed = stored(plain, alive)
    alive, owners = [a and i not in placed.makers for i, a in enumerate(alive)], placed.owners
    if len(memo.launches) >= LOWERED:
        memo.launches.clear()
    for index, node in enumerate(plain):
        if alive[index]:
            try:
                _lower(node.form, caps, memo.launches)
            except CentellaError as error:
                nodes[index].refuse(error)
                raise
    common = shared(plain, alive, memo.launches)
    values = _lifetimes(plain, alive, owners, memo.launches, common)
    slots, sizes, makers = placement.place(values)
    first = len(externals)
    where: dict[Origin, int] = {
        (v.node, v.output): first + s for v, s in zip(values, slots, strict=True)
    }
    for version, owner in owners.items():
        where[version] = owner[1] if owner[0] < 0 else where[owner]
    for own, earlier in common.memory.items():
        where[own] = where[earlier]
    return Plan(
        first,
        sizes,
        makers,
        {(i, o): where[i, o] for i, n in enumerate(plain) for o, w in enumerate(n.wanted) if w},
        tuple(
            each
            for i, n in enumerate(plain)
            if alive[i]
            for number, each in _launches(i, n, where, memo.launches)
            if (i, number) not in common.left_out
        ),
        tuple(plain),
        sum(not a for a in needed),
        fused,
        placed.makers,
        tuple(values),
    )


def _plain(node: Node, externals: Mapping[Value, int], wanted: tuple[bool, ...]) -> PlanNode:
    sources = tuple(
        Source(*origin, offset) if value is None else Source(-1, externals[value], offset)
        for value, origin, offset in node.inputs
    )
    return PlanNode(node.form, sources, wanted)


def _alive(nodes: Sequence[PlanNode]) -> list[bool]:
    """Nodes that change a State, whose outputs are wanted, or that a node alive reads."""
    alive = [any(n.wanted) or bool(n.op.mutates) for n in nodes]
    for index in range(len(nodes) - 1, -1, -1):
        if alive[index]:
            for source in nodes[index].inputs:
                if source.node >= 0:
                    alive[source.node] = True
    return alive


def _trimmed(nodes: list[PlanNode], alive: list[bool]) -> list[PlanNode]:
    """Nodes without what they compute for results that nobody reads."""
    some = [
        (i, n, n.op.unread) for i, n in enumerate(nodes) if alive[i] and n.op.unread is not None
    ]
    readers, trimmed = readers_of(nodes, alive) if some else {}, list(nodes)
    for index, node, unread in some:
        idle = [o for o, kept in enumerate(node.wanted) if not kept and (index, o) not in readers]
        form = unread(node.form, frozenset(idle)) if idle else None
        if form is not None:
            trimmed[index] = replace(node, form=form)
    return trimmed


def _lifetimes(
    nodes: Sequence[PlanNode], alive: list[bool], owners: Mapping[Origin, Origin],
    launches: Lowerings, common: Shared,
) -> list[placement.Lifetime]:  # fmt: skip
    """What needs memory: results, temporaries and what nodes need for themselves."""
    last: dict[Origin, int] = {}
    kept: set[Origin] = set()
    for index, node in enumerate(nodes):
        if alive[index]:
            for source in node.inputs:
                origin = (source.node, source.index)
                last[owners.get(origin, origin)] = index
            for output, wanted in enumerate(node.wanted):
                if wanted:
                    kept.add(owners.get((index, output), (index, output)))
    values: list[placement.Lifetime] = []
    for index, node in enumerate(nodes):
        if not alive[index]:
            continue
        for output, spec in enumerate(node.form.outputs):
            origin = (index, output)
            if origin not in owners:
                end = last.get(origin, index)
                values.append(
                    placement.Lifetime(index, output, spec.storage_bytes, end, origin in kept)
                )
        if node.form in launches:
            for number, nbytes in enumerate(launches[node.form].scratch):
                origin = (index, -1 - number)
                if origin not in common.memory:
                    end = common.last.get(origin, index)
                    values.append(placement.Lifetime(*origin, nbytes, end, False))
    return values


def _launches(
    index: int, node: PlanNode, where: Mapping[Origin, int], lowerings: Lowerings
) -> Iterator[tuple[int, Launch]]:
    """The launches of a node on the slots of the plan, by number."""
    lowered = lowerings.get(node.form)
    if lowered is None:
        return
    inputs = [s.index if s.node < 0 else where[s.node, s.index] for s in node.inputs]
    outputs = [where[index, i] for i in range(len(node.form.outputs))]
    scratch = [where[index, -1 - i] for i in range(len(lowered.scratch))]
    slots = (*inputs, *outputs, *scratch)
    offsets = [s.offset for s in node.inputs] + [0] * (len(outputs) + len(scratch))
    for number, launch in enumerate(lowered.launches):
        shifted = launch.shifted([offsets[i] for i in launch.slots])
        yield number, replace(shifted, slots=tuple([slots[i] for i in launch.slots]), node=index)


def _lower(form: Form[Any], caps: Caps, lowerings: Lowerings) -> None:
    """Find the launches of a form, unless they are known or there is nothing to compute."""
    if form in lowerings or not any(spec.size for spec in form.outputs):
        return
    if caps.on_host:
        program = form.op.host_program(form)
        seen = (*form.inputs, *form.outputs) if program.views is None else program.views
        views = tuple((spec, 0) for spec in seen)
        inputs, groups = len(form.inputs), 1
        launch = Launch(
            program, tuple(range(len(views))), views, inputs, _parameters(groups), groups
        )
        lowerings[form] = Lowering((launch,), ())
        return
    lowered = divided(form, caps)
    lowerings[form] = Lowering(
        tuple(_launch(call, len(form.inputs), caps) for call in lowered.calls if call.groups),
        tuple(spec.storage_bytes for spec in lowered.temporaries),
    )


def _launch(call: Call, inputs: int, caps: Caps) -> Launch:
    if call.groups >= MAX_GROUPS:
        raise LimitError(
            f"kernel {call.kernel.name!r}: expected fewer than {MAX_GROUPS:,} groups, got "
            f"{call.groups:,}"
        )
    dtypes = tuple(r.spec.dtype for r in call.tensors)
    unit = tuple(r.spec.unit_rows for r in call.tensors)
    program = call.kernel.program(
        caps, dtypes, unit, call.constants, call.workgroup, call.signature
    )
    words, patched = parameter_words(call, program.ir)
    if caps.max_loop_rounds:
        program = call.kernel.within_rounds(program, caps, words, call.groups)
    return Launch(
        program,
        tuple(r.index for r in call.tensors),
        tuple((r.spec, r.offset) for r in call.tensors),
        inputs,
        _parameters(call.groups, *words),
        call.groups,
        tuple((1 + position, operand) for position, operand in patched),
        reason=call.reason,
    )


def _parameters(*words: int) -> bytes:
    return np.array(words, np.uint32).tobytes()
