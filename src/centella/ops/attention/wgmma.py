"""Attention by warpgroups, for f16 and bf16 on Hopper (sm_90a alone): when, and how it is launched.

After FlashAttention-3 (Shah et al. 2024); the kernel is in `wgmma_kernel.py`, its softmax in
`rows.py`. Of bf16 weights are the sum of two (`parts`), or values are made f16 before
(`scaled.py`), which pays where there are many keys. Hidden keys are looked for in the last tile,
and under a causal mask in the tiles that some query does not see whole. What lies past the last key
that counts is set to zero where it was copied to: a weight of 0 would not hide a NaN.
"""

from __future__ import annotations

from centella.dtypes import bf16
from centella.emit.program import Ref
from centella.op.op import Form, Lowered
from centella.ops.attention.mma import FEWER_QUERIES, FOLDED
from centella.ops.attention.problem import (
    AttentionAttrs,
    AttentionVariant,
    extents,
    keys_seen,
    launch_by_head,
    queries_of,
    rows_of_16_bits,
    steps_of,
    texts_of,
)
from centella.ops.attention.scaled import SLAB, values_first
from centella.ops.attention.wgmma_kernel import kernel
from centella.ops.attention.wgmma_tile import WgmmaTile
from centella.ops.attention.wgmma_work import heads_together
from centella.ops.hopper import MULTIPROCESSORS
from centella.specs import Caps, Spec

MOST_DIM = 128

# By the largest head of each row; then of bf16 (which are scaled where the first takes them), and
# the least head that is worth its padding.
WGMMA_TILES: tuple[tuple[int, WgmmaTile, WgmmaTile, int], ...] = (
    (64, WgmmaTile(128, stages=4, late=True), WgmmaTile(128, stages=4, parts=2), 49),
    (128, WgmmaTile(128, kept=True), WgmmaTile(128, parts=2), 97),
)
# Of weights of f16: 192 queries at a time, which take 1 / SOONER of the time that as many take by
# 128, since a third consumer works where two wait.
TALL: dict[int, WgmmaTile] = {64: WgmmaTile(128, consumers=3, stages=4, kept=True)}
SOONER = 1.13
CACHED = 40 << 20  # bytes of keys and values that stay in the L2 cache
SCALED = 1024, 20  # from so many keys on bf16 values become f16, of so many heads a round at most
FEWEST = 16  # queries that are too few even where keys are `LONG`
LONG = 1 << 16  # elements of a head's keys, from which on fewer than `FEWER_QUERIES` are enough


def tile_of(form: Form[AttentionAttrs], caps: Caps) -> WgmmaTile | None:
    """The tile for a head, where copies reach the operands and the softmax folds the scale."""
    q, attrs = form.inputs[0], form.attrs
    dim = q.shape[3]
    most, tiles = next(((most, x) for most, *x, _ in WGMMA_TILES if dim <= most), (0, None))
    folds = attrs.softcap is not None or FOLDED[0] <= attrs.scale <= FOLDED[1]
    folds = folds and {"lengths", "starts", "sinks", "offsets"}.issuperset(attrs.masks)
    reached = rows_of_16_bits(form) and all(map(_apart, form.inputs[:3]))
    if tiles is None or not (caps.warpgroups and folds and reached):
        return None
    tile = tiles[q.dtype is bf16 and not _scaled(form, tiles[0])]
    tall = TALL.get(most) if tile.parts == 1 and texts_of(form) is None else None
    if tall is not None and _in_turn(q, tall) < SOONER * _in_turn(q, tile):
        tile = tall
    fits = tile.shared_bytes(dim) <= caps.max_shared and tile.threads <= caps.max_workgroup
    return tile if fits else None


def _in_turn(q: Spec, tile: WgmmaTile) -> int:
    """Queries that the busiest multiprocessor has, one tile after the other."""
    batch, heads, lq, _ = q.shape
    tiles = -(-lq // tile.queries) * batch * heads
    return -(-tiles // MULTIPROCESSORS) * tile.queries


def _likely_keys(form: Form[AttentionAttrs], queries: int) -> int:
    """How many keys so many queries may be expected to see: a cache is half full before them."""
    (_, lk), lq = extents(form), form.inputs[0].shape[2]
    likely = (lk + min(lq, lk)) // 2 if "starts" in form.attrs.masks else lk
    return min(likely, keys_seen(form, queries))


def _scaled(form: Form[AttentionAttrs], tile: WgmmaTile) -> bool:
    """Whether bf16 values should become f16: rounds gain by it, all values of all heads cost."""
    (batch, kv_heads, lk, dim), seen = form.inputs[1].shape, _likely_keys(form, tile.queries)
    fits = texts_of(form) is None and dim % SLAB == 0 and seen >= SCALED[0]
    cost = batch * kv_heads * lk * tile.queries
    return fits and cost <= SCALED[1] * _in_turn(form.inputs[0], tile) * seen


def _apart(spec: Spec) -> bool:
    """Whether no dimension repeats: a tensor map has strides."""
    return all(s > 0 for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1)


def _launches(form: Form[AttentionAttrs], tile: WgmmaTile, caps: Caps) -> Lowered:
    """One launch, behind that of `scaled.py` for weights of bf16 in one part.

    A group has the queries of a tile, of one head, and then of further ones. Boxes of results may
    not reach into the text behind theirs.
    """
    (batch, heads), y = form.inputs[0].shape[:2], form.outputs[0]
    instead, scaled = dict[str, Ref](), Lowered(())
    scalars = {"pairs": batch * heads, "together": _together(form, tile)}
    staged = texts_of(form) is None and y.aligned and form.inputs[0].shape[3] % 8 == 0
    if form.inputs[0].dtype is bf16 and tile.parts == 1:
        scaled = values_first(form)
        instead.update(zip(("v", "scales"), scaled.calls[0].tensors[-2:], strict=True))
        scalars |= steps_of("v", scaled.temporaries[0])
    whole = launch_by_head(
        kernel, form, tile.queries, (("staged", staged), ("tile", tile)), tile.threads,
        instead=instead, scalars=scalars,
    )  # fmt: skip
    return Lowered((*scaled.calls, whole), scaled.temporaries)


def _together(form: Form[AttentionAttrs], tile: WgmmaTile) -> int:
    """Heads that groups take at a time where tiles of queries differ by the keys that they see."""
    (batch, heads, lq, dim), (_, kv_heads, lk, _) = (s.shape for s in form.inputs[:2])
    cached = max(1, CACHED // max(4 * lk * dim, 1)) * (heads // kv_heads)
    most, starts = min(cached, batch * heads), "starts" in form.attrs.masks
    if texts_of(form) is not None or not (form.attrs.causal or starts):
        return most
    part = form.part("q", lq)
    past = part.first + max(lk - part.whole, 0) // (2 if starts else 1)
    return heads_together(
        batch * heads, -(-lq // tile.queries), most, past=past // tile.queries,
        reach=keys_seen(form, tile.queries) / tile.queries,
    )  # fmt: skip


def _preferred(form: Form[AttentionAttrs], caps: Caps) -> bool:
    """Many queries, or some of many keys, of heads that are worth their padding."""
    lq, dim = queries_of(form), form.inputs[0].shape[3]
    whole = any(least <= dim <= most for most, _, _, least in WGMMA_TILES)
    long = texts_of(form) is None and _likely_keys(form, lq) * dim >= LONG
    return lq > (FEWEST if long else FEWER_QUERIES) and whole and caps.fast_tensor_cores


WGMMA = AttentionVariant(
    "wgmma", tile_of, _launches, _preferred,
    needs=f"takes f16 or bf16 with rows on 16 bytes, heads of at most {MOST_DIM}, scales of "
          f"{FOLDED[0]} to {FOLDED[1]:.2f}, lengths, starts and offsets, on sm_90a",
)  # fmt: skip
