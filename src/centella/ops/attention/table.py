"""Tiles of attention by class of adapter: what `choose` reads.

A row is measured, and says where; a class without a measurement has the conservative row, whose
tiles leave room for many groups on any GPU. `benchmarks/run.py tiles` checks every candidate before
it times it (`results/h200-tiles.json`).
"""

from __future__ import annotations

from msgspec import Struct

from centella.ops.attention.tiles import Tile
from centella.specs import Caps

LEAST = Tile(32, 32, 8, 4, 4)  # for few queries on every class
WIDE = Tile(16, 64, 8, 4, 4)  # for heads past 128
MOST_ROWS = 8  # of queries that share keys, in a group
FEW_QUERIES = 8  # whose keys are split, where there are many

Tiles = dict[int, tuple[Tile, ...]]


class Row(Struct, frozen=True):
    """What suits one class of adapter.

    Attributes:
        measured: on what; "" where nothing was.
        tiles: by the most elements of a head, the best first, of which the first that fits is
            taken; without tiles the streaming kernel is the choice.
        rows: queries that a group has at most where few queries are split.
        short: (keys, queries): where a head of one sequence has at most so many keys, a group has
            so few queries; the groups of the others read the same keys, from the L2 cache.
        stream: of the streaming kernel with heads of up to 32: keys that pass at a time, and
            whose scores a thread has at once.
        joined: words that a thread has registers for where a product adds up its own row of x
            (`combine_linear.py`); 0: that has a launch of its own.
        rolled: for threads that are a CPU's: what is written down is compiled, a load for
            milliseconds, so kernels keep their loops, and take keys and parts one by one.
    """

    measured: str
    tiles: Tiles
    rows: int = MOST_ROWS
    short: tuple[int, int] = (0, MOST_ROWS)
    stream: tuple[int, int] = (16, 4)
    joined: int = 0
    rolled: bool = False


CONSERVATIVE = Row("", {32: (), 64: (LEAST,), 128: (LEAST,), 256: (WIDE,)})
ROWS: dict[str, Row] = {
    "cuda": Row(
        "H200, PTX",
        {
            32: (Tile(128, 32, 16, 8, 4), LEAST),
            64: (Tile(64, 64, 16, 8, 4), LEAST),
            128: (Tile(64, 64, 16, 8, 4), LEAST),
            256: (Tile(32, 64, 8, 4, 4), WIDE),
        },
    ),
    "nvidia": Row(
        "H200, Vulkan",
        {
            32: (),
            64: (Tile(64, 32, 8, 4, 4, 2), LEAST),
            128: (Tile(128, 64, 8, 8, 4, 2), LEAST),
            256: (WIDE,),
        },
        short=(2048, 2),
        stream=(32, 8),
        joined=232,
    ),
    "amd": CONSERVATIVE,
    "intel": CONSERVATIVE,
    "apple": CONSERVATIVE,
    # Its compiler takes seconds for a register tile, its threads are those of a CPU.
    "software": Row("lavapipe, seconds to compile", {}, 2, rolled=True),
    "simulator": Row("", {}),
}


def row_of(caps: Caps) -> Row:
    """The row of a device; the conservative one for a class that has none."""
    return ROWS.get(caps.adapter_class, CONSERVATIVE)


def tile_of(queries: int, dim: int, caps: Caps, measured: bool = False) -> Tile | None:
    """The first tile for a head of `dim` elements that fits the device; of few queries the last.

    Args:
        measured: of the row of its class alone; else any that fits.
    """
    rows: list[Tiles] = [row_of(caps).tiles]
    if not measured:
        rows += [CONSERVATIVE.tiles, {32: (LEAST,)}]
    for row in rows:
        tiles = next((tiles for most, tiles in row.items() if 0 < dim <= most), ())
        for tile in tiles if queries > LEAST.bq else tiles[-1:]:
            if tile.of(dim).fits(caps):
                return tile.of(dim)
    return None
