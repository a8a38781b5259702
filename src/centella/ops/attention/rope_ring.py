"""A decoder's rotation, cache and attention in one launch, keys in a ring (sm_90a).

As `rope_cluster` and `rope_split_mma`, but cached keys and values come by the copy engine
(`ring_warp`). The step's own keys are put into the tile that has their places. Each group writes
those to the cache that lie among its keys, of which it alone copies tiles.
"""

from __future__ import annotations

from msgspec import Struct

from centella import lang
from centella.dtypes import u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.ops.attention.cluster_mma import Sums
from centella.ops.attention.masks import Scoring, product_scale
from centella.ops.attention.parts import Work
from centella.ops.attention.ring_warp import Fresh, RingTile, RingWarp, Tiles
from centella.ops.attention.rope_cluster import StepRows, masks_of
from centella.ops.attention.split_mma import leave
from centella.ops.attention.warp_sums import SplitTile
from centella.ops.attention.weights import LOG2E
from centella.ops.rope import Turn


class RopeRing(Struct, frozen=True):
    """How a group works; `early` as in `RopeTile`."""

    ring: RingTile
    early: bool

    @property
    def split(self) -> SplitTile:
        """As of `RopeTile`."""
        return self.ring.split


def _rope_ring(
    *, tile: RopeRing, dim: int, rows: int, tokens: int, scoring: Scoring,
    layout: tuple[tuple[str, bool], ...], blocks: bool, x: Argument, cos: Argument, sin: Argument,
    starts: Argument, keys: Argument, values: Argument, norms: Argument | None = None,
    splits: int = 0, y: Argument | None = None, partial: Argument | None = None,
) -> None:  # fmt: skip
    """The groups of a head are a cluster that writes y, or each leaves what it has in `partial`.

    Args:
        splits: groups of the cluster.
    """
    if splits > 1:
        lang.ptx.cluster(splits)
    lang.ptx.resident(tile.split.together)
    # Behind the first tiles the cluster's meeting took longer.
    sums = None if y is None else Sums(splits, rows, dim)
    table, masks = masks_of(starts, blocks)
    work = Work(masks, scoring, rows, tokens == 1)

    def walked() -> RingWarp:
        start = lang.workgroup_uniform(masks["starts"][work.b])
        # Tables and norms are asked for before the tiles, behind which they would come.
        step = StepRows(work, dim, rows, tokens, Turn(cos, sin, **dict(layout)), norms, table)
        tiles = Tiles(tile.ring, work, dim, keys, values, blocks)
        step.fill(x, keys, values, lambda at: (at >= work.begin) & (at < work.end), tile.early)
        lang.barrier()
        warp = RingWarp(work, dim, keys.dtype, tiles)
        warp.load_queries(step.word)
        past = lang.bitcast(lang.maximum(start, 0), u32)
        past = lang.minimum(work.end, past)  # where what the cache has so far ends
        first = lang.bitcast(start, u32)
        fresh = Fresh(step.keys(first), step.values(first))
        warp.walk(past, product_scale(scoring, LOG2E), fresh)
        return warp

    if y is not None and sums is not None:
        sums.gather(walked(), tile.split)
        sums.write(work, masks, tile.split, y)
        return
    with lang.if_(work.begin >= work.end):  # a group without keys
        if tile.early:
            lang.ptx.await_launches()
    with lang.else_():
        assert partial is not None, "groups leave what they have, or add it up"
        leave(walked(), work, tile.split, rows, partial)


kernel: Kernel = Kernel(_rope_ring, workgroup=128, name="rope_ring")
split_kernel: Kernel = Kernel(_rope_ring, workgroup=128, name="rope_ring_split")
