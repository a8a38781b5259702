"""How attention becomes launches: what the op imports with its first plan."""

from __future__ import annotations

from typing import Any

from centella.op.op import Lowered
from centella.ops.attention.choice import (
    choose,
    fits_mma,
    mma_tile_of,
    split_tile_of,
    wgmma_tile_of,
)
from centella.ops.attention.mma import lower_mma
from centella.ops.attention.split import lower_split
from centella.ops.attention.split_mma import lower_split_mma
from centella.ops.attention.stream import lower_stream
from centella.ops.attention.tiled import lower_tiled
from centella.ops.attention.wgmma import lower_wgmma
from centella.specs import Caps, Spec

LOWER = {"tiled": lower_tiled, "stream": lower_stream, "split": lower_split}


def attention(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch, or two where the keys are split."""
    variant = attrs.get("variant") or choose(inputs, attrs, caps)
    if variant == "mma":
        fits = fits_mma(inputs, caps)
        tile = mma_tile_of(inputs[0], attrs["masks"], caps) if fits else None
        return lower_mma(inputs, outputs[0], attrs, tile)
    if variant == "wgmma":
        return lower_wgmma(inputs, outputs[0], attrs, wgmma_tile_of(inputs, attrs, caps))
    if variant == "split_mma":
        return lower_split_mma(inputs, outputs[0], attrs, split_tile_of(inputs, caps), caps)
    return LOWER[variant](inputs, outputs[0], attrs, caps)
