"""How attention becomes launches: what the op imports with its first plan."""

from __future__ import annotations

from centella.op.form import Form
from centella.op.op import Lowered
from centella.ops.attention.choice import (
    choose,
    fits_mma,
    mma_tile_of,
    split_tile_of,
    wgmma_tile_of,
)
from centella.ops.attention.mma import lower_mma
from centella.ops.attention.problem import AttentionAttrs
from centella.ops.attention.split import lower_split
from centella.ops.attention.split_mma import lower_split_mma
from centella.ops.attention.stream import lower_stream
from centella.ops.attention.tiled import lower_tiled
from centella.ops.attention.wgmma import lower_wgmma
from centella.specs import Caps

LOWER = {"tiled": lower_tiled, "stream": lower_stream, "split": lower_split}


def attention(form: Form[AttentionAttrs], caps: Caps) -> Lowered:
    """One launch, or two where the keys are split."""
    variant = form.attrs.variant or choose(form, caps)
    if variant == "mma":
        fits = fits_mma(form.inputs, caps)
        tile = mma_tile_of(form.inputs[0], form.attrs.masks, caps) if fits else None
        return lower_mma(form, tile)
    if variant == "wgmma":
        return lower_wgmma(form, wgmma_tile_of(form, caps))
    if variant == "split_mma":
        return lower_split_mma(form, split_tile_of(form.inputs, caps), caps)
    return LOWER[variant](form, caps)
