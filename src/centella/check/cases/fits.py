"""Which devices can run the kernel that a case forces."""

from __future__ import annotations

from centella.check.cases.case import Case
from centella.dtypes import bf16, dtype_of, f16
from centella.ops import sample_slices
from centella.ops.matmul import skinny
from centella.ops.matmul.mma import mma_tile_of
from centella.ops.matmul.one_row import CONSUMERS
from centella.ops.matmul.streamed_kernel import WARPGROUP
from centella.ops.matmul.table import TILES
from centella.ops.matmul.tiled import tile_of
from centella.ops.matmul.wgmma_tiles import WGMMA_TILES
from centella.ops.matmul.whole_rows import WIDEST, RowsTile
from centella.ops.quant import digits_kernel
from centella.specs import Caps

# Bytes of workgroup memory: more than attention of few queries on tensor cores takes.
ROOM = 32 << 10


def variant_fits(case: Case, dtype: str, caps: Caps) -> bool:
    """Whether a device can run the variant that a case forces."""
    variant = case.attrs.get("variant")
    dtypes = [dtype_of(i.dtype or dtype) for i in case.inputs[:2]]
    if variant == "skinny_mma":
        return skinny.takes((dtypes[0], dtypes[1])) and mma_tile_of((f16, f16), caps) is not None
    if variant in ("grouped", "dequantized"):  # tensors of what is quantised are of x's dtype
        return mma_tile_of((dtypes[0], dtypes[variant == "grouped"]), caps) is not None
    if variant in ("ring", "ring_split"):
        return caps.warpgroups and caps.max_shared >= 2 * ROOM and dtypes[0] in (bf16, f16)
    if variant == "cluster":
        return caps.clusters and caps.max_shared >= ROOM
    if variant == "cluster_rows":
        return caps.clusters and caps.max_shared >= 3 * ROOM
    if variant == "slices":
        return sample_slices.fits(len(case.inputs), caps)
    if variant in ("streamed", "streamed_rows", "streamed_many"):
        room = caps.max_workgroup >= CONSUMERS + WARPGROUP
        if variant == "streamed_many":
            room = caps.max_workgroup >= 2 * WARPGROUP and caps.max_shared >= 2 * ROOM
        return caps.warpgroups and room and dtypes[0] is dtypes[1] and dtypes[0] in (bf16, f16)
    if variant == "streamed_digits":
        room = caps.max_workgroup >= digits_kernel.kernel.workgroup and caps.max_shared >= ROOM
        return caps.warpgroups and room and dtypes[0] in (bf16, f16)
    if variant in ("mma", "wgmma", "split_mma", "cluster_mma", "whole_rows"):
        had = mma_tile_of((dtypes[0], dtypes[1]), caps) is not None
        room = any(tile.shared_bytes <= caps.max_shared for tile in WGMMA_TILES)
        if variant == "split_mma":
            return had and caps.max_shared >= ROOM
        if variant == "cluster_mma":
            return had and caps.clusters and caps.max_shared >= ROOM
        if variant == "whole_rows":
            room = RowsTile(WIDEST).shared_bytes <= caps.max_shared
        return had and (variant not in ("wgmma", "whole_rows") or (room and caps.warpgroups))
    least = min((d.itemsize for d in dtypes), default=0)
    return variant not in TILES or tile_of(variant, least, caps) is not None
