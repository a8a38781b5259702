"""How groups with rings share the keys of few queries."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from centella.op.op import Form
from centella.ops.attention.parts import Parts
from centella.ops.attention.problem import AttentionAttrs, keys_seen
from centella.ops.attention.ring_warp import RingTile
from centella.ops.attention.split_warp import MOST_DIM
from centella.ops.attention.warp_sums import KEYS, SplitTile
from centella.ops.hopper import AT_ONCE, SHARED, SPARE
from centella.specs import Caps

WARPS = 4  # of a group
STEP = WARPS * KEYS  # keys of a tile
TOGETHER = (1, 2, 3)  # groups of a multiprocessor
ROUNDS = 2  # the same where not all groups run at once
LEAST = 2  # tiles of a ring: of one nothing is copied while its keys are looked at
ENOUGH = AT_ONCE[8]  # groups
RING = (128 << 10) + 1024  # bytes of a ring at most, and of its barriers: larger ones were slower
MOST_KEYS = 768  # of a part, where there are fewer groups than multiprocessors


class RingParts(Struct, frozen=True):
    """Groups and parts, and the ring of each group."""

    parts: Parts
    ring: RingTile

    @property
    def split(self) -> SplitTile:
        """How a group works."""
        return self.ring.split


def clustered(form: Form[AttentionAttrs], tokens: int, caps: Caps) -> RingParts | None:
    """Groups and parts as clusters; None where a head has no whole factors, or no room.

    All groups are to run at once. The fewer of them a multiprocessor has, the larger their rings
    are; so it has as few as make `ENOUGH` groups in all.

    Args:
        tokens: whose keys are brought by a step.
    """
    every, best = _one_part(form), None
    if every is None:
        return None
    tiles = _tiles(form)
    for together in TOGETHER:
        for splits, most in AT_ONCE.items():
            parts = replace(every, splits=splits)
            if parts.groups > most * together or splits > max(tiles, 1):
                continue
            found = _with_ring(parts, -(-tiles // splits), tokens, together, caps)
            if found and (best is None or parts.groups > best.parts.groups):
                best = found
        if best is not None and best.parts.groups >= ENOUGH:
            break
    return best or _with_ring(every, tiles, tokens, ROUNDS, caps)


def apart(form: Form[AttentionAttrs], tokens: int, caps: Caps) -> RingParts | None:
    """Groups and parts whose results a second launch adds up, one to a multiprocessor; or None."""
    every = _one_part(form)
    if every is None:
        return None
    tiles = max(_tiles(form), 1)
    splits = min(max(AT_ONCE[1] // max(every.groups, 1), 1), tiles)
    parts = replace(every, splits=splits)
    return _with_ring(parts, -(-tiles // splits), tokens, TOGETHER[0], caps)


def fills(form: Form[AttentionAttrs], tile: RingParts) -> bool:
    """Whether parts are as many as keep a large GPU busy, or short."""
    parts, keys = tile.parts, STEP * _tiles(form)
    return parts.groups >= ENOUGH or keys <= MOST_KEYS * parts.splits


def _one_part(form: Form[AttentionAttrs]) -> Parts | None:
    """All keys as one part, where a group has all queries of them, and heads are whole factors."""
    dim = form.inputs[0].shape[3]
    parts = Parts.of(form, STEP, 1)
    return parts if dim % KEYS == 0 and 0 < dim <= MOST_DIM and parts.blocks == 1 else None


def _tiles(form: Form[AttentionAttrs]) -> int:
    """Tiles of keys that queries see at most."""
    return -(-keys_seen(form, form.inputs[0].shape[2]) // STEP)


def _with_ring(
    parts: Parts, tiles: int, tokens: int, together: int, caps: Caps
) -> RingParts | None:
    """Groups with rings of as many tiles as there is room for, of those that a part has."""
    rows, dim, split = parts.rows, parts.width, SplitTile(WARPS, together)
    sums = 4 * WARPS * rows * (dim + 4) + 4 * rows * (dim + 2 * parts.splits + 4)
    brought = 2 * (rows + 2 * tokens) * (dim + 8) if tokens else 0
    room = min(SHARED // together, caps.max_shared) - sums - brought - SPARE
    tiles = max(tiles, 1)
    stages = min(min(room, RING) // (RingTile(split, 1).stage_bytes(dim) + 16), tiles)
    return RingParts(parts, RingTile(split, stages)) if stages >= min(tiles, LEAST) else None
