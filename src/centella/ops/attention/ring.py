"""Decoding on tensor cores in one launch, keys and values in a ring (sm_90a).

As `cluster_mma`, but keys and values come by the copy engine (`ring_warp`).
"""

from __future__ import annotations

from centella import lang
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.ops.attention.cluster_mma import Sums, alone
from centella.ops.attention.masks import Scoring, product_scale
from centella.ops.attention.parts import Work
from centella.ops.attention.problem import AttentionAttrs, AttentionVariant
from centella.ops.attention.ring_choice import RingParts, clustered, fills
from centella.ops.attention.ring_warp import RingTile, RingWarp, Tiles
from centella.ops.attention.split import few_queries
from centella.ops.attention.split_warp import MOST_DIM, tile_of
from centella.ops.attention.warp_sums import KEYS
from centella.ops.attention.weights import LOG2E
from centella.specs import Caps


def _ring(
    *, tile: RingTile, splits: int, dim: int, rows: int, single: bool, early: bool,
    scoring: Scoring, q: Argument, k: Argument, v: Argument, y: Argument, **masks: Argument,
) -> None:  # fmt: skip
    if splits > 1:
        lang.ptx.cluster(splits)
    lang.ptx.resident(tile.split.together)
    sums = Sums(splits, rows, dim)
    work, scale = Work(masks, scoring, rows, single), product_scale(scoring, LOG2E)
    tiles = Tiles(tile, work, dim, k, v, "blocks" in masks)
    if early:
        lang.ptx.launch_dependents()
        lang.ptx.await_launches()
    warp = RingWarp(work, dim, q.dtype, tiles)
    warp.load_queries(lambda row, element: tuple(q.load_word(work.query(row) + element)))
    warp.walk(work.end, scale)
    sums.gather(warp, tile.split)
    sums.write(work, masks, tile.split, y)


kernel: Kernel = Kernel(_ring, workgroup=128, name="attention_ring")


def parts_of(form: Form[AttentionAttrs], caps: Caps) -> RingParts | None:
    """Groups, parts and rings, where no key is hidden among others."""
    if not caps.warpgroups or "key_mask" in form.attrs.masks or tile_of(form, caps) is None:
        return None
    return clustered(form, 0, caps)


def _launches(form: Form[AttentionAttrs], tile: RingParts, caps: Caps) -> Lowered:
    block = {"block": form.inputs[1].shape[2]}
    return alone(kernel, form, tile.parts, tile.ring, tile.split.threads, caps, block)


def _preferred(form: Form[AttentionAttrs], caps: Caps) -> bool:
    if not (few_queries(form, caps) and caps.fast_tensor_cores):
        return False
    tile = parts_of(form, caps)
    return tile is not None and fills(form, tile)


RING = AttentionVariant(
    "ring", parts_of, _launches, _preferred,
    needs=f"takes f16 or bf16 with rows on 16 bytes, heads of multiples of {KEYS} up to "
          f"{MOST_DIM}, no key_mask, and sm_90a",
)  # fmt: skip
