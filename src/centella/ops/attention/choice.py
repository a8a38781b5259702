"""Which kernel computes attention: a pure function of its sizes, layouts, dtypes and the device."""

from __future__ import annotations

from typing import Any

from centella.errors import LimitError
from centella.op.op import Form, Lowered
from centella.op.variant import choose
from centella.ops.attention.cluster_mma import CLUSTER_MMA
from centella.ops.attention.mma import MMA
from centella.ops.attention.plain_rows import with_plain_rows
from centella.ops.attention.problem import AttentionAttrs, AttentionVariant
from centella.ops.attention.ring import RING
from centella.ops.attention.split import SPLIT
from centella.ops.attention.split_mma import SPLIT_MMA
from centella.ops.attention.stream import STREAM
from centella.ops.attention.tiled import TILED
from centella.ops.attention.wgmma import WGMMA
from centella.specs import Caps

ORDER: tuple[AttentionVariant[Any], ...] = (
    RING,  # few queries of many keys in f16 and bf16, on Hopper, in one launch
    CLUSTER_MMA,  # few queries of many keys in f16 and bf16, on tensor cores, in one launch
    SPLIT_MMA,  # the same in two, where clusters are too few or there are none
    SPLIT,  # few queries of many keys, which are split among groups
    with_plain_rows(WGMMA),  # f16 and bf16, more than 64 queries or 16 of many keys, on Hopper
    with_plain_rows(MMA),  # f16 and bf16, on tensor cores
    TILED,  # many queries, where the table has a tile that fits
    STREAM,  # the rest
)


def attention(form: Form[AttentionAttrs], caps: Caps) -> Lowered:
    """The launches of the variant that is forced or chosen: one, or two where keys are split.

    Raises:
        LimitError: the forced one does not compute such a form.
    """
    forced = next((v for v in ORDER if v.name == form.attrs.variant), None)
    if forced and not forced.fits(form, caps):
        q, k, v = (f"{s.dtype.name} {list(s.shape)}" for s in form.inputs[:3])
        needs = forced.needs.format(
            dim=form.inputs[0].shape[3], shared=caps.max_shared, threads=caps.max_workgroup
        )
        raise LimitError(
            f"attention: variant {forced.name!r} {needs}; got {q}, {k}, {v}, scale "
            f"{form.attrs.scale:.3g}, masks {list(form.attrs.masks)}"
        )
    return choose(ORDER, form, caps, form.attrs.variant, "attention").lower(form, caps)
