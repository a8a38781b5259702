"""The pass that joins products and norms: one launch where a kernel normalises its own rows.

A norm joins the product that it reads when nothing else reads that and nobody keeps it. Other than
in a chain, the sums are not rounded between the two: the result is theirs within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from centella.op.op import Form
from centella.ops.matmul.linear_norm import LINEAR_NORM, LinearNormAttrs
from centella.ops.matmul.op import LINEAR
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.norm import NORM, NormAttrs
from centella.plan.fuse import Fused, changed_by, readers_of
from centella.plan.graph import PlanNode
from centella.specs import Caps

Whole = Form[LinearNormAttrs]


def joined(
    nodes: Sequence[PlanNode], alive: Sequence[bool], caps: Caps, known: Fused
) -> tuple[list[PlanNode], list[bool]]:
    """Nodes with products joined to norms, each in place of the norm, and which are still alive.

    Args:
        nodes: in order; alive: those that must run.
        known: the forms that were asked about before on this device.
    """
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
