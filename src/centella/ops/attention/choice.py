"""Which kernel computes attention: a pure function of its sizes, layouts, dtypes and the device.

split_mma  few queries of many keys in f16 and bf16, on tensor cores   `split_mma.py`
split      few queries of many keys, which are split among groups      `split.py`
wgmma      f16 and bf16, more than 64 queries, on Hopper               `wgmma.py`
mma        f16 and bf16, more than 16 queries, on tensor cores         `mma.py`
tiled      many queries, where the table has a tile that fits          `tiled.py`
stream     the rest                                                    `stream.py`
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from centella.dtypes import bf16, f16
from centella.op.form import Form
from centella.ops.attention.mma import MmaTile
from centella.ops.attention.problem import AttentionAttrs
from centella.ops.attention.scaled import SLAB
from centella.ops.attention.split import MOST_DIM
from centella.ops.attention.split_mma import MOST_DIM as MOST_SPLIT_DIM
from centella.ops.attention.split_mma import SplitTile
from centella.ops.attention.table import CONSERVATIVE, LEAST, row_of
from centella.ops.attention.tiles import Tile
from centella.ops.attention.wgmma import WgmmaTile, takes
from centella.specs import Caps, Spec

FEW_QUERIES = 8
ENOUGH_KEYS = 64
MANY_QUERIES = 16  # more than these fill a fragment
HEADS = (16, 256)  # sizes of a head that are worth its padding
FEWER_QUERIES = 64  # take the smaller tile, and so do masks of single keys, which need registers
# By the largest head of each row; then the tile of little memory.
MMA_TILES: tuple[tuple[int, MmaTile, MmaTile], ...] = (
    (32, MmaTile(128, 64, 4, 2, together=3), MmaTile(64, 32, 4, 2)),
    (64, MmaTile(128, 64, 4, 2), MmaTile(64, 32, 4, 2)),
    (128, MmaTile(128, 32, 4, 2, held=False), MmaTile(64, 32, 4, 2, held=False)),
    (256, MmaTile(64, 32, 4, 2, held=False), MmaTile(64, 32, 4, 2, held=False)),
)
LEAST_TILE = MmaTile(32, 16, 2, 2)
MANY = 1 << 15, 1024  # queries of all heads, keys: from here on values of bf16 are scaled to f16
# By the largest head of each row; then of bf16 (which are scaled where the first takes them), and
# the least head that is worth its padding.
WGMMA_TILES: tuple[tuple[int, WgmmaTile, WgmmaTile, int], ...] = (
    (64, WgmmaTile(128, late=True), WgmmaTile(128, parts=2), 49),
    (128, WgmmaTile(128), WgmmaTile(128, parts=2), 97),
)
SPLIT_TILE = SplitTile()


def split_tile_of(inputs: tuple[Spec, ...], caps: Caps) -> SplitTile | None:
    """The tile of a decoding step on tensor cores: 16-bit rows in whole chunks on 16 bytes."""
    q, k, v, *_ = inputs
    dim = q.shape[3]
    fits = (
        q.dtype in (f16, bf16)
        and 0 < dim <= MOST_SPLIT_DIM
        and dim % q.dtype.per_chunk == 0
        and all(s.aligned and s.size > 0 for s in (q, k, v))
    )
    return SPLIT_TILE if fits and caps.tensor_cores else None


def mma_tile_of(q: Spec, masks: tuple[str, ...], caps: Caps) -> MmaTile | None:
    """The tile of an attention on tensor cores: the first that fits."""
    if not caps.tensor_cores:
        return None
    lq, dim = q.shape[2:]
    smaller = lq <= FEWER_QUERIES or "mask" in masks or "key_mask" in masks
    tiles = next((tiles for most, *tiles in MMA_TILES if dim <= most), None)
    for tile in (tiles[smaller], LEAST_TILE) if tiles else ():
        if tile.shared_bytes(dim) <= caps.max_shared and tile.threads <= caps.max_workgroup:
            return replace(tile, parts=2) if q.dtype is bf16 else tile
    return None


def fits_mma(inputs: tuple[Spec, ...], caps: Caps) -> bool:
    """Whether tensor cores can compute it: 16-bit rows on 16 bytes, and something to read."""
    q, k, v, *_ = inputs
    return (
        q.dtype in (f16, bf16)
        and all(s.aligned and s.size > 0 for s in (q, k, v))
        and mma_tile_of(q, (), caps) is not None
    )


def wgmma_tile_of(form: Form[AttentionAttrs], caps: Caps) -> WgmmaTile | None:
    """The tile of an attention by warpgroups, where they can; the simulator has them too."""
    q = form.inputs[0]
    if not caps.warpgroups or q.dtype not in (f16, bf16):
        return None
    dim = q.shape[3]
    tiles = next((tiles for most, *tiles, _ in WGMMA_TILES if dim <= most), None)
    if not tiles or not takes(form):
        return None
    many = math.prod(q.shape[:3]) >= MANY[0] and form.inputs[1].shape[2] >= MANY[1]
    tile = tiles[q.dtype is bf16 and not (many and dim % SLAB == 0)]
    fits = tile.shared_bytes(dim) <= caps.max_shared and tile.threads <= caps.max_workgroup
    return tile if fits else None


def choose(form: Form[AttentionAttrs], caps: Caps) -> str:
    """The variant for a problem."""
    q, k, *_ = form.inputs
    queries, dim = q.shape[2:]
    if queries <= FEW_QUERIES:
        if k.shape[2] < ENOUGH_KEYS or not 0 < dim <= MOST_DIM:
            return "stream"
        return (
            "split_mma" if caps.fast_tensor_cores and split_tile_of(form.inputs, caps) else "split"
        )
    whole = any(least <= dim <= most for most, _, _, least in WGMMA_TILES)
    by_warpgroups = queries > FEWER_QUERIES and whole and caps.fast_tensor_cores
    if by_warpgroups and wgmma_tile_of(form, caps) is not None:
        return "wgmma"
    large = queries > MANY_QUERIES and HEADS[0] <= dim <= HEADS[1]
    if large and caps.fast_tensor_cores and fits_mma(form.inputs, caps):
        return "mma"
    return "tiled" if _of_row(row_of(caps).tiles, queries, dim, caps) else "stream"


def tile_of(queries: int, dim: int, caps: Caps) -> Tile | None:
    """The tile for a head of `dim` elements: the table's, or any that fits when asked by name."""
    return (
        _of_row(row_of(caps).tiles, queries, dim, caps)
        or _of_row(CONSERVATIVE.tiles, queries, dim, caps)
        or _fitting((LEAST,) if 0 < dim <= 32 else (), dim, caps)
    )


def _of_row(row: dict[int, tuple[Tile, ...]], queries: int, dim: int, caps: Caps) -> Tile | None:
    """The first that fits the device; few queries take the smallest."""
    tiles = next((tiles for most, tiles in row.items() if 0 < dim <= most), ())
    return _fitting(tiles if queries > LEAST.bq else tiles[-1:], dim, caps)


def _fitting(tiles: tuple[Tile, ...], dim: int, caps: Caps) -> Tile | None:
    return next((t for t in (tile.of(dim) for tile in tiles) if t.fits(caps)), None)
