"""Which kernel computes attention: a pure function of its sizes and the device.

split    few queries of many keys, which are split among groups    `split.py`
tiled    many queries, where the table has a tile that fits        `tiled.py`
stream   the rest                                                  `stream.py`
"""

from __future__ import annotations

from centella.ops.attention.split import MOST_DIM
from centella.ops.attention.table import CONSERVATIVE, LEAST, row_of
from centella.ops.attention.tiles import Tile
from centella.specs import Caps, Spec

FEW_QUERIES = 8
ENOUGH_KEYS = 64


def choose(q: Spec, k: Spec, caps: Caps) -> str:
    """The variant for a problem."""
    queries, dim = q.shape[2:]
    if queries <= FEW_QUERIES:
        return "split" if k.shape[2] >= ENOUGH_KEYS and 0 < dim <= MOST_DIM else "stream"
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
