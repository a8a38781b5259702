"""A decoder's rotation, cache and attention in one launch, keys in a ring (sm_90a).

As `rope_cluster`, but cached keys and values come by the copy engine (`ring_warp`): where many
sequences are decoded at once, or each has many keys, memory is what a step waits for. The step's
own keys are put into the tile that has their places. Each group writes those to the cache that lie
among its keys, of which it alone copies tiles.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from centella import lang
from centella.dtypes import u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.op.op import Form
from centella.ops.attention.cluster_mma import ClusterTile, Sums
from centella.ops.attention.masks import Scoring, product_scale
from centella.ops.attention.parts import Parts, Work
from centella.ops.attention.problem import AttentionAttrs, keys_seen
from centella.ops.attention.ring_warp import RingTile, RingWarp, Tiles
from centella.ops.attention.rope_cluster import StepRows, masks_of
from centella.ops.attention.warp_sums import KEYS, SplitTile
from centella.ops.attention.weights import LOG2E
from centella.ops.hopper import AT_ONCE, SHARED
from centella.ops.rope import Turn
from centella.specs import Caps

WARPS = 4  # of a group
STEP = WARPS * KEYS  # keys of a tile
TOGETHER = (1, 2)  # groups of a multiprocessor
ENOUGH = 104  # groups
SPARE = 2048  # bytes of barriers, statistics, and what lies between arrays


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


class RingCluster(Struct, frozen=True):
    """Groups and parts, and the ring of each group."""

    cluster: ClusterTile
    ring: RingTile


def ring_of(form: Form[AttentionAttrs], tokens: int, caps: Caps) -> RingCluster | None:
    """Groups, parts and rings of a step; None where a head has no whole factors, or no room.

    Groups are to run all at once, at least `ENOUGH`, with as few to a multiprocessor as that takes:
    the fewer, the larger are their rings.
    """
    dim = form.inputs[0].shape[3]
    every = Parts.of(form, STEP, 1)  # one part
    if dim % KEYS or every.blocks > 1:
        return None
    tiles, best = -(-keys_seen(form, form.inputs[0].shape[2]) // STEP), None
    for together in TOGETHER:
        for splits, most in AT_ONCE.items():
            parts = replace(every, splits=splits)
            one = together == TOGETHER[-1] and best is None and splits == 1
            if not one and (splits > tiles or parts.groups > most * together):
                continue
            stages = min(_stages(parts, tokens, together, caps), -(-tiles // splits))
            if stages > 0 and (best is None or parts.groups > best.cluster.parts.groups):
                split = SplitTile(WARPS, together)
                best = RingCluster(ClusterTile(split, parts), RingTile(split, stages))
        if best is not None and best.cluster.parts.groups >= ENOUGH:
            break
    return best


def _stages(parts: Parts, tokens: int, together: int, caps: Caps) -> int:
    """How many tiles a group has room for, beside its sums and what the step brings."""
    rows, dim = parts.rows, parts.width
    sums = 4 * WARPS * rows * (dim + 4) + 4 * rows * (dim + 2 * parts.splits + 4)
    brought = 2 * (rows + 2 * tokens) * (dim + 8)
    room = min(SHARED // together, caps.max_shared) - sums - brought - SPARE
    return room // (RingTile(SplitTile(WARPS), 1).stage_bytes(dim) + 16)
