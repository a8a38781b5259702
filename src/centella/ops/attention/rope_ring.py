"""A decoder's rotation, cache and attention in one launch, keys in a ring (sm_90a).

As `rope_cluster`, but cached keys and values come by the copy engine (`ring_warp`): where many
sequences are decoded at once, or each has many keys, memory is what a step waits for. The step's
own keys are put into the tile that has their places. Each group writes those to the cache that lie
among its keys, of which it alone copies tiles.
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
from centella.ops.attention.ring_warp import RingTile, RingWarp, Tiles
from centella.ops.attention.rope_cluster import StepRows, masks_of
from centella.ops.attention.weights import LOG2E
from centella.ops.rope import Turn


class RopeRing(Struct, frozen=True):
    """How a group works; `early` as in `RopeTile`."""

    ring: RingTile
    early: bool


def _rope_ring(
    *, tile: RopeRing, splits: int, dim: int, rows: int, tokens: int, scoring: Scoring,
    layout: tuple[tuple[str, bool], ...], x: Argument, cos: Argument, sin: Argument,
    starts: Argument, y: Argument, keys: Argument, values: Argument, norms: Argument | None = None,
    blocks: bool,
) -> None:  # fmt: skip
    split = tile.ring.split
    if splits > 1:
        lang.ptx.cluster(splits)
    lang.ptx.resident(split.together)
    sums = Sums(splits, rows, dim)
    table, masks = masks_of(starts, blocks)
    work = Work(masks, scoring, rows)
    start = lang.workgroup_uniform(lang.bitcast(masks["starts"][work.b], u32))
    past = lang.minimum(work.end, start)  # where what the cache has so far ends
    tiles = Tiles(tile.ring, work, dim, keys, values, blocks)
    step = StepRows(work, dim, rows, tokens, Turn(cos, sin, **dict(layout)), norms, table)
    if tile.early:
        lang.ptx.launch_dependents()
        lang.ptx.await_launches()
    step.fill(x, keys, values, lambda position: (position >= work.begin) & (position < work.end))
    lang.barrier()
    warp, scale = RingWarp(work, dim, keys.dtype, tiles), product_scale(scoring, LOG2E)
    warp.load_queries(step.word)
    fresh = (step.keys(start), step.values(start))
    for first in lang.range(work.begin, work.end, split.step):
        tiles.wait(first)
        tiles.mend(first, past, fresh, start, work.all_end)
        warp.score()
        warp.soften(first, scale)
        warp.mix()
        tiles.leave()
    sums.gather(warp, split)
    sums.write(work, masks, split, y)


kernel: Kernel = Kernel(_rope_ring, workgroup=128, name="rope_ring")
