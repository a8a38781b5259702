"""The pass that joins products to what is beside them, where one kernel does both.

A norm joins the product that it reads when nothing else reads that and nobody keeps it. Other than
in a chain, the sums are not rounded between the two: the result is theirs within rounding.

A product joins the attention of a step that it reads, likewise: it adds up its row out of what
attention leaves. It takes the place of attention, which changes States; what it reads beside has to
be there by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from centella.op.op import Form, get
from centella.ops.matmul.linear_norm import LINEAR_NORM, LinearNormAttrs
from centella.ops.matmul.op import LINEAR
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.norm import NORM, NormAttrs
from centella.plan.fuse import Fused, changed_by, readers_of
from centella.plan.graph import PlanNode, Source
from centella.record.values import Origin
from centella.specs import Caps, Spec

Whole = Form[LinearNormAttrs]


def joined(
    nodes: Sequence[PlanNode], alive: Sequence[bool], caps: Caps, known: Fused
) -> tuple[list[PlanNode], list[bool]]:
    """Nodes with products joined to norms and to attention, and which are still alive.

    Args:
        nodes: in order; alive: those that must run.
        known: the forms that were asked about before on this device.
    """
    return _attended(*_norms(nodes, alive, caps, known), caps, known)


def _norms(
    nodes: Sequence[PlanNode], alive: Sequence[bool], caps: Caps, known: Fused
) -> tuple[list[PlanNode], list[bool]]:
    """Nodes with products joined to norms, each in place of the norm, and which are still alive."""
    after, left = list(nodes), list(alive)
    norms = [i for i, n in enumerate(nodes) if n.op is NORM and alive[i] and n.inputs[0].node >= 0]
    if not norms or not caps.warpgroups:
        return after, left
    readers, changed = readers_of(nodes, alive), changed_by(nodes)
    for index in norms:
        node = nodes[index]
        source = node.inputs[0]
        product = nodes[source.node]
        alone = readers[source.node, source.index] == {index} and not product.wanted[0]
        moves = any((s.node, s.index) in changed for s in product.inputs)
        if product.op is not LINEAR or not alone or moves or source in node.inputs[1:]:
            continue
        if source.offset or node.form.inputs[0] != product.form.outputs[0]:
            continue
        form = _form_of(product.form, node.form, caps, known)
        if form is not None:
            after[index] = replace(node, form=form, inputs=product.inputs + node.inputs[1:])
            left[source.node] = False
    return after, left


def _form_of(
    product: Form[LinearAttrs], norm: Form[NormAttrs], caps: Caps, known: Fused
) -> Whole | None:
    """A product and its norm as one form; None where they are better apart."""
    pair = product, norm
    if pair not in known.pairs:
        inputs = product.inputs + norm.inputs[1:]
        attrs = LinearNormAttrs(product.attrs, norm.attrs)
        form = Form(LINEAR_NORM, inputs, norm.outputs, attrs, norm.nbytes)
        prefers = LINEAR_NORM.preferred
        assert prefers is not None, "it stands for two others"
        known.pairs[pair] = form if product.attrs.variant is None and prefers(form, caps) else None
    return known.pairs[pair]


def _attended(
    nodes: list[PlanNode], alive: list[bool], caps: Caps, known: Fused
) -> tuple[list[PlanNode], list[bool]]:
    """Nodes with products joined to the attention of a step, each in its place.

    Where a launch begins before the one before is over, three take little longer than two.
    """
    if caps.launches_are_free or caps.early_launch:
        return nodes, alive
    steps = [i for i, n in enumerate(nodes) if n.op.name == "rope_attend" and alive[i]]
    if not steps:
        return nodes, alive
    readers, moved = readers_of(nodes, alive), dict[Origin, Origin]()
    for index in steps:
        node, origin = nodes[index], (index, 2)
        reading = readers.get(origin, set())
        if node.wanted[2] or len(reading) != 1:
            continue
        (reader,) = reading
        product = nodes[reader]
        first, *others = product.inputs
        if product.op is not LINEAR or product.wanted[0] or first != Source(*origin, 0):
            continue
        if any(s.node >= index for s in others):
            continue
        form = _attending(node.form, product.form, caps, known)
        if form is not None:
            inputs = (*node.inputs, *others)
            nodes[index] = replace(node, form=form, inputs=inputs)
            alive[reader] = False
            moved[reader, 0] = origin
    return [_reading(node, moved) for node in nodes] if moved else nodes, alive


def _attending(
    attend: Form[Any], product: Form[LinearAttrs], caps: Caps, known: Fused
) -> Form[Any] | None:
    """Attention and a product as one form; None where they are better apart."""
    pair = attend, product
    if pair not in known.pairs:
        known.pairs[pair] = None
        if _in_a_row(product.inputs[0], attend.outputs[2]):
            op = get("attend_linear")
            inputs = attend.inputs + product.inputs[1:]
            outputs = (*attend.outputs[:2], product.outputs[0])
            form = Form(op, inputs, outputs, op.attrs(attend.attrs, product.attrs), attend.nbytes)
            if op.preferred is not None and op.preferred(form, caps):
                known.pairs[pair] = form
    return known.pairs[pair]


def _in_a_row(x: Spec, y: Spec) -> bool:
    """Whether x [b, t, h d] is y [b, t, h, d], heads beside each other."""
    b, t, h, d = y.shape
    return x.shape == (b, t, h * d) and x.unit_rows and y.strides[2:] == (d, 1)


def _reading(node: PlanNode, moved: Mapping[Origin, Origin]) -> PlanNode:
    """A node that reads what has moved from where it is."""
    origins = [(s.node, s.index) for s in node.inputs]
    if moved.keys().isdisjoint(origins):
        return node
    inputs = zip(origins, node.inputs, strict=True)
    return replace(node, inputs=tuple(Source(*moved.get(o, o), s.offset) for o, s in inputs))
