"""Keys and values as plain 16-bit rows, from rows of i8 or from blocks: what precedes many queries.

The kernels of many queries copy tiles of keys and values as they lie (`wgmma`, `mma`). Rows of i8
are widened for them once, each number times its scale rounded to the dtype of q, and blocks are put
in order. That is a launch more, and 16 bits for each element of the keys so far: little beside the
products of a prompt, and nothing that a decode step does.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from centella import lang
from centella.emit.program import Call, Kernel, Ref
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.ops.attention.lines import Lines, load_piece
from centella.ops.attention.masks import Scoring, Sight
from centella.ops.attention.problem import (
    AttentionAttrs,
    AttentionVariant,
    extents,
    launch,
    operands,
    parameters,
    steps_of,
)
from centella.ops.layout import flat
from centella.specs import Caps, Spec, make_spec

THREADS = 256
PIECE = 8  # elements that a thread writes: 16 bytes
REPLACED = ("blocks", "scales")  # masks that plain rows have no use for
MANY = 256  # queries for which blocks of 16 bits are put in order, where `wgmma` takes rows


def _order_rows(
    *, k: Argument, v: Argument, keys: Argument, values: Argument, **masks: Argument
) -> None:
    """A thread has eight elements of a key, and the same of its value."""
    p = parameters("kv_heads lq lk pieces blocks kl vl rb rh rl")
    group = lang.group_id()
    block, group = group % p["blocks"], group // p["blocks"]
    head, b = group % p["kv_heads"], group // p["kv_heads"]
    thread = block * THREADS + lang.local_id()
    key, element = thread // p["pieces"], thread % p["pieces"] * PIECE
    with lang.if_(key < Sight(masks, Scoring(), b, p["lq"], p["lk"]).end):
        lines = Lines(masks, b, head)
        to = b * p["rb"] + head * p["rh"] + key * p["rl"] + element
        sources = ((k, p["kl"], keys), (v, p["vl"], values))
        ways = zip(sources, lines.places(key), lines.scales(key), strict=True)
        for (source, pitch, target), start, scale_of in ways:
            at = start + key * pitch + element
            target.store(to, load_piece(source, at, PIECE, scale_of(key)))


kernel: Kernel = Kernel(
    _order_rows, workgroup=THREADS, name="attention_plain_rows", rewritable=True
)


def plain_form(form: Form[AttentionAttrs]) -> Form[AttentionAttrs] | None:
    """The same attention over plain rows; None where they are plain, or not on 16 bytes."""
    q, k, v, *_ = form.inputs
    masks = form.attrs.masks
    if not {*REPLACED} & {*masks} or not (k.aligned and v.aligned and k.size):
        return None
    kv_heads, lk = extents(form)
    rows = make_spec((q.shape[0], kv_heads, lk, q.shape[3]), q.dtype, 16)
    kept = [i for i, name in enumerate(masks) if name not in REPLACED]
    inputs = (q, rows, rows, *(form.inputs[3 + i] for i in kept))
    attrs = replace(form.attrs, masks=tuple(masks[i] for i in kept))
    return replace(form, inputs=inputs, attrs=attrs)


def _ordering(form: Form[AttentionAttrs], rows: Spec) -> Call:
    """The launch that writes the rows; those that no query sees stay as they are."""
    batch, kv_heads, lk, dim = rows.shape
    pieces, first = -(-dim // PIECE), len(form.inputs) + 1
    blocks = -(-lk * pieces // THREADS)
    kept = {name: Ref(first + n, flat(rows)) for n, name in enumerate(("keys", "values"))}
    reads = operands(form, "k", "v", "lengths", "starts", *REPLACED)
    return launch(
        kernel, form, batch * kv_heads * blocks, (), reads, {}, changes=kept,
        scalars={**steps_of("r", rows), "pieces": pieces, "blocks": blocks},
    )  # fmt: skip


def _behind(form: Form[AttentionAttrs], inner: Form[AttentionAttrs], lowered: Lowered) -> Lowered:
    """The launches of the attention over plain rows, behind the one that writes them."""
    count, rows = len(form.inputs), inner.inputs[1]
    masks = form.attrs.masks
    kept = [3 + i for i, name in enumerate(masks) if name not in REPLACED]
    # q; keys and values, which are temporaries; masks; the result; temporaries of its own
    operands = (0, count + 1, count + 2, *kept, count)
    return Lowered((_ordering(form, rows),), (rows, rows)) + lowered.within(operands, count + 3)


def with_plain_rows(variant: AttentionVariant[Any]) -> AttentionVariant[Any]:
    """A kernel as it is, and behind the launch of plain rows where it needs them."""

    def tile(form: Form[AttentionAttrs], caps: Caps) -> Any:
        own, inner = variant.tile(form, caps), plain_form(form)
        return variant.tile(inner, caps) if own is None and inner is not None else own

    def launches(form: Form[AttentionAttrs], tile: Any, caps: Caps) -> Lowered:
        inner = plain_form(form)
        if inner is None or variant.tile(form, caps) is not None:
            return variant.launches(form, tile, caps)
        return _behind(form, inner, variant.launches(inner, tile, caps))

    def preferred(form: Form[AttentionAttrs], caps: Caps) -> bool:
        needed = "scales" in form.attrs.masks or "blocks" not in form.attrs.masks
        enough = needed or form.inputs[0].shape[2] >= MANY
        return variant.preferred(form, caps) and (enough or variant.tile(form, caps) is not None)

    return replace(variant, tile=tile, launches=launches, preferred=preferred)
