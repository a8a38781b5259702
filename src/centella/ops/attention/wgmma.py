"""Attention by warpgroups, for f16 and bf16 on Hopper (PTX for sm_90a alone).

After FlashAttention-3 (Shah et al. 2024). A group has 64 queries of one head for each of its
consumers. Its first warpgroup is the producer: one thread has Q copied once, K and V tile by tile
into two rings, from the last keys to the first. A consumer starts the scores of a tile, then the
products of the last tile's weights with its values; while those are under way it turns scores into
weights. Weights are the first factor in the registers where they were computed. Consumers start
their products by turns, so that one multiplies while the other computes weights.

The softmax is in `rows.py`. Of bf16 weights are the sum of two (`parts`), or values are made f16
before (`scaled.py`), which pays where there are many queries. Hidden keys are looked for in the
last tile, and under a causal mask in the tiles that some query does not see whole. What lies past
the last key that counts is set to zero where it was copied to: a weight of 0 would not hide a NaN.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import bf16, u32
from centella.emit.program import Kernel, Ref
from centella.lang.memory import Argument
from centella.lang.values import Operand
from centella.op.op import Form, Lowered
from centella.ops.attention.masks import Scoring, Sight, sink_of
from centella.ops.attention.mma import FEWER_QUERIES, FOLDED
from centella.ops.attention.place import Place
from centella.ops.attention.problem import (
    AttentionAttrs,
    AttentionVariant,
    launch_by_head,
    parameters,
    queries_of,
    rows_of_16_bits,
    steps_of,
    texts_of,
)
from centella.ops.attention.rows import UNSEEN, K, M, Rows
from centella.ops.attention.scaled import SLAB, values_first
from centella.ops.attention.weights import LOG2E
from centella.ops.ring import Ring
from centella.specs import Caps, Spec

WARPGROUP = 128  # threads
PANEL = 64  # elements of a row in shared memory that lie together
MOST_DIM = 128
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}  # producer, consumer; by consumers


class WgmmaTile(Struct, frozen=True):
    """Keys of a tile, consumers of 64 queries each, stages of the rings.

    `parts`: 16-bit numbers that a weight is the sum of. `late`: a consumer waits for its turn
    behind the softmax, before it waits for products; the assembler then leaves the powers of two
    where they are, beside the products, and moves them behind the products otherwise.
    """

    keys: int
    consumers: int = 2
    stages: int = 2
    parts: int = 1
    late: bool = False

    @property
    def queries(self) -> int:
        """Queries of a group."""
        return self.consumers * M

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return (1 + self.consumers) * WARPGROUP

    def width(self, dim: int) -> int:
        """Elements of a row in shared memory: whole panels."""
        return -(-dim // PANEL) * PANEL

    def shared_bytes(self, dim: int) -> int:
        """Workgroup memory: queries, keys and values in every stage, barriers."""
        rows = self.queries + 2 * self.stages * self.keys
        return 2 * self.width(dim) * rows + 8 * (4 * self.stages + 4) + 64


# By the largest head of each row; then of bf16 (which are scaled where the first takes them), and
# the least head that is worth its padding.
WGMMA_TILES: tuple[tuple[int, WgmmaTile, WgmmaTile, int], ...] = (
    (64, WgmmaTile(128, late=True), WgmmaTile(128, parts=2), 49),
    (128, WgmmaTile(128), WgmmaTile(128, parts=2), 97),
)
MANY = 1 << 15, 1024  # queries of all heads, keys: from here on values of bf16 are scaled to f16


class _Shared:
    """What both roles see: where a group is, its tiles, their maps and barriers."""

    def __init__(self, tile: WgmmaTile, dim: int, q: Any, k: Any, v: Any, p: Any) -> None:
        self.tile, self.width = tile, tile.width(dim)
        self.asked = lang.ptx.SharedTile(q.dtype, (tile.queries, self.width))
        ring = (tile.stages, tile.keys, self.width)
        self.keys = lang.ptx.SharedTile(k.dtype, ring)
        self.values = lang.ptx.SharedTile(v.dtype, ring)
        self.maps = [
            lang.ptx.TensorMap(source, ring, (p["dim"], p[length], p[heads], p["batch"]),
                          (p[f"{name}l"], p[f"{name}h"], p[f"{name}b"]))
            for name, source, ring, length, heads in (
                ("q", q, self.asked, "lq", "heads"),
                ("k", k, self.keys, "lk", "kv_heads"),
                ("v", v, self.values, "lk", "kv_heads"),
            )
        ]  # fmt: skip
        self.arrived = lang.ptx.Barriers(1)  # the queries
        self.full_k, self.full_v = lang.ptx.Barriers(tile.stages), lang.ptx.Barriers(tile.stages)
        self.empty_k, self.empty_v = lang.ptx.Barriers(tile.stages), lang.ptx.Barriers(tile.stages)
        self.order = lang.ptx.Barriers(tile.consumers)
        self.clean = lang.ptx.Barriers(1)
        with lang.if_(lang.local_id() == 0):
            self.arrived.init(0, 1)
            self.clean.init(0, tile.consumers * WARPGROUP)
            for stage in range(tile.stages):
                for full, empty in ((self.full_k, self.empty_k), (self.full_v, self.empty_v)):
                    full.init(stage, 1)
                    empty.init(stage, tile.consumers)
            for consumer in range(tile.consumers):
                self.order.init(consumer, 1)
            lang.ptx.init_fence()
        lang.barrier()


def _attention_wgmma(
    *, tile: WgmmaTile, dim: int, scoring: Scoring, q: Argument, k: Argument, v: Argument,
    y: Argument, scales: Argument | None = None, **masks: Argument,
) -> None:  # fmt: skip
    p = parameters(
        "batch heads kv_heads share lq lk dim qb qh ql kb kh kl vb vh vl yb yh yl blocks"
    )
    at = Place(masks, lang.group_id(), tile.queries)
    block, head, b = at.block, at.head, at.b
    sight = Sight(masks, scoring, b, at.lq, at.lk)
    if sight.ordered and at.begin is None:
        block = p["blocks"] - 1 - block  # the longest first
    first = block * tile.queries
    seen = sight.until(first + tile.queries)
    end = lang.maximum(seen, 1) - 1
    base = lang.const(0, u32)  # where tiles of keys begin
    if scoring.windowed:
        base = lang.minimum(sight.since(first), end)
    last = (end - base) // tile.keys  # the first that is taken
    shared = _Shared(tile, dim, q, k, v, p)
    fewer, more = REGISTERS[tile.consumers]
    with lang.ptx.role(0, WARPGROUP, registers=fewer), lang.if_(lang.local_id() == 0):
        row = at.row(lang.const(0, u32), 1)  # of a tensor map, where rows begin
        _produce(shared, (row + first, head, b), (row + base, head // p["share"], b), last)
    with lang.ptx.role(WARPGROUP, tile.consumers * WARPGROUP, registers=more):
        begins = sink_of(masks, head, LOG2E, UNSEEN)
        consumer = _Consumer(shared, first, base, sight, scoring, begins)
        dirty = None
        if "lengths" in masks or "starts" in masks:
            dirty = seen < lang.minimum(p["lk"], base + (last + 1) * tile.keys)
        if at.begin is not None:  # behind the text there is another
            dirty = seen < base + (last + 1) * tile.keys
        consumer.attend(last, dirty)
        first_slab = (b * p["kv_heads"] + head // p["share"]) * (dim // SLAB)
        scale_of = None if scales is None else lambda j: scales[first_slab + j // SLAB]
        start = at.row(b * p["yb"] + head * p["yh"], p["yl"])
        consumer.rows.finish(y, start, p["yl"], at.lq, dim, scale_of)


def _produce(
    shared: _Shared, asked: tuple[Any, Any, Any], keys: tuple[Any, Any, Any], last: Any
) -> None:
    """Have queries copied, then keys and values, one tile ahead of its values; last ones first.

    Args:
        asked, keys: the first row of queries, of keys and values, their heads, and the sequence.
    """
    tile, (first, kv_head, b) = shared.tile, keys
    of_q, of_k, of_v = shared.maps
    shared.arrived.expect(0, 2 * tile.queries * shared.width)
    lang.ptx.tma_load(of_q, (0, *asked), 0, shared.arrived, 0)

    def load(source: Any, full: Any, empty: Any, ring: Ring, step: Operand) -> None:
        stage = ring.stage.get()
        empty.wait(stage, ring.parity ^ 1)
        full.expect(stage, 2 * tile.keys * shared.width)
        lang.ptx.tma_load(source, (0, first + step * tile.keys, kv_head, b), stage, full, stage)
        ring.advance()

    ring_k = of_k, shared.full_k, shared.empty_k, Ring(tile.stages)
    ring_v = of_v, shared.full_v, shared.empty_v, Ring(tile.stages)
    load(*ring_k, last)
    for step in lang.range(last):
        load(*ring_k, last - 1 - step)
        load(*ring_v, last - step)
    load(*ring_v, lang.const(0, u32))


class _Consumer:
    """A warpgroup's 64 queries and where it is in the rings; tiles of keys begin at `base`."""

    def __init__(
        self, shared: _Shared, first: Any, base: Any, sight: Sight, scoring: Scoring,
        begins: tuple[Operand, Operand],
    ) -> None:  # fmt: skip
        self.shared, self.sight, tile = shared, sight, shared.tile
        self.base, self.windowed = base, scoring.windowed
        self.mine = lang.ptx.warpgroup() - 1
        self.first = first + self.mine * M
        dtype = shared.values.dtype
        self.rows = Rows(
            dtype, tile.keys, shared.width, tile.parts, self.first, sight, scoring, begins
        )
        self.leader = lang.local_id() % WARPGROUP == 0
        self.ring_k, self.ring_v = Ring(tile.stages), Ring(tile.stages)
        self.turn = lang.var(lang.cast(self.mine == 0, u32))  # the first one's turn is at once

    def attend(self, last: Any, dirty: Any) -> None:
        """All tiles from the last on.

        Args:
            dirty: whether the last has rows past the last key that counts.
        """
        tile, shared = self.shared.tile, self.shared
        shared.arrived.wait(0, 0)
        self._score()
        lang.ptx.wgmma_wait(0)
        self._release(shared.empty_k, self.ring_k)
        self.rows.bound()
        self.rows.hide(self._key(last))
        self.rows.soften()
        self.rows.round()
        if dirty is not None:
            with lang.if_(dirty):
                self._clean(self._key(last))
        self._take_turn()
        whole, cut = last, None  # tiles below it are seen whole by all, down to one of a window
        if self.sight.ordered:
            whole = lang.minimum(last, self._ahead(self.sight.until(self.first + 1)) // tile.keys)
        if self.windowed:
            hidden = self._ahead(self.sight.since(self.first + (M - 1)))
            cut = lang.minimum((hidden + (tile.keys - 1)) // tile.keys, whole)
        if self.sight.ordered:
            for i in lang.range(last - whole):
                self._step(self._key(last - 1 - i))
        for _ in lang.range(whole if cut is None else whole - cut):
            self._step(None)
        if cut is not None:
            for i in lang.range(cut):
                self._step(self._key(cut - 1 - i))
        self._mix()
        self._pass_turn()
        lang.ptx.wgmma_wait(0)

    def _ahead(self, key: Any) -> Any:
        """How many keys of tiles are before one."""
        return lang.maximum(key, self.base) - self.base if self.windowed else key

    def _key(self, tile: Operand) -> Any:
        """The first key of a tile."""
        return self.base + tile * self.shared.tile.keys

    def _take_turn(self) -> None:
        """Wait until the others have started their products."""
        self.shared.order.wait(self.mine, self.turn)
        self.turn.set(self.turn ^ 1)

    def _pass_turn(self) -> None:
        """The next consumer may start its products."""
        with lang.if_(self.leader):
            self.shared.order.arrive((self.mine + 1) % self.shared.tile.consumers)

    def _step(self, key0: Any) -> None:
        """Scores and weights of a tile, and the products of the last one's weights."""
        shared = self.shared
        self._score()
        self._mix()
        self._pass_turn()
        lang.ptx.wgmma_wait(1)
        self._release(shared.empty_k, self.ring_k)
        self.rows.bound()
        if key0 is not None:
            self.rows.hide(key0)
        grown, shrinks = self.rows.soften()
        if shared.tile.late:
            self._take_turn()
        lang.ptx.wgmma_wait(0)
        self._release(shared.empty_v, self.ring_v)
        self.rows.round()
        self.rows.shrink(grown, shrinks)
        if not shared.tile.late:
            self._take_turn()

    def _release(self, empty: Any, ring: Ring) -> None:
        """Give a stage back, on to the next."""
        with lang.if_(self.leader):
            empty.arrive(ring.stage)
        ring.advance()

    def _score(self) -> None:
        """Start the scores of the next keys."""
        shared, stage = self.shared, self.ring_k.stage.get()
        shared.full_k.wait(stage, self.ring_k.parity)
        lang.ptx.wgmma_fence()
        for k in range(0, shared.width, K):
            lang.ptx.wgmma(
                self.rows.scores, shared.asked, shared.asked.start(self.mine * M, k), shared.keys,
                shared.keys.start(0, k, stage), accumulate=k > 0,
            )  # fmt: skip
        lang.ptx.wgmma_commit()

    def _mix(self) -> None:
        """Start the products of the weights with their values."""
        shared, stage = self.shared, self.ring_v.stage.get()
        shared.full_v.wait(stage, self.ring_v.parity)
        lang.ptx.wgmma_fence()
        for i, parts in enumerate(self.rows.weights):
            for part in parts:
                at = shared.values.start(i * K, 0, stage)
                lang.ptx.wgmma_held(self.rows.out, part, shared.values, at, b_along_k=False)
        lang.ptx.wgmma_commit()

    def _clean(self, key0: Operand) -> None:
        """Zeros for the rows of values past the last key that counts, once they are there."""
        shared, tile = self.shared, self.shared.tile
        shared.full_v.wait(0, 0)
        across = shared.width // 8
        threads = tile.consumers * WARPGROUP
        thread = lang.local_id() - WARPGROUP
        for i in lang.range(thread, tile.keys * across, threads):
            row = i // across
            with lang.if_(key0 + row >= self.sight.end):
                shared.values.store(shared.values.chunk(row, i % across), [0.0] * 8)
        lang.ptx.async_fence()
        shared.clean.arrive(0)
        shared.clean.wait(0, 0)


kernel: Kernel = Kernel(_attention_wgmma, workgroup=384, name="attention_wgmma")


def tile_of(form: Form[AttentionAttrs], caps: Caps) -> WgmmaTile | None:
    """The tile for a head, where copies reach the operands and the softmax folds the scale."""
    q, k, attrs = form.inputs[0], form.inputs[1], form.attrs
    dim = q.shape[3]
    tiles = next((tiles for most, *tiles, _ in WGMMA_TILES if dim <= most), None)
    folds = attrs.softcap is not None or FOLDED[0] <= attrs.scale <= FOLDED[1]
    folds = folds and {"lengths", "starts", "sinks", "offsets"}.issuperset(attrs.masks)
    reached = rows_of_16_bits(form) and all(map(_apart, form.inputs[:3]))
    if tiles is None or not (caps.warpgroups and folds and reached):
        return None
    many = texts_of(form) is None and math.prod(q.shape[:3]) >= MANY[0] and k.shape[2] >= MANY[1]
    tile = tiles[q.dtype is bf16 and not (many and dim % SLAB == 0)]
    fits = tile.shared_bytes(dim) <= caps.max_shared and tile.threads <= caps.max_workgroup
    return tile if fits else None


def _apart(spec: Spec) -> bool:
    """Whether no dimension repeats: a tensor map has strides."""
    return all(s > 0 for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1)


def _launches(form: Form[AttentionAttrs], tile: WgmmaTile, caps: Caps) -> Lowered:
    """One launch, behind that of `scaled.py` for weights of bf16 in one part.

    A group has the queries of a tile, of one head.
    """
    instead, scalars, scaled = dict[str, Ref](), dict[str, int](), Lowered(())
    if form.inputs[0].dtype is bf16 and tile.parts == 1:
        scaled = values_first(form)
        instead.update(zip(("v", "scales"), scaled.calls[0].tensors[-2:], strict=True))
        scalars = steps_of("v", scaled.temporaries[0])
    whole = launch_by_head(
        kernel, form, tile.queries, (("tile", tile),), tile.threads, instead=instead,
        scalars=scalars,
    )  # fmt: skip
    return Lowered((*scaled.calls, whole), scaled.temporaries)


def _preferred(form: Form[AttentionAttrs], caps: Caps) -> bool:
    """Many queries, of heads that are worth their padding."""
    lq, dim = queries_of(form), form.inputs[0].shape[3]
    whole = any(least <= dim <= most for most, _, _, least in WGMMA_TILES)
    return lq > FEWER_QUERIES and whole and caps.fast_tensor_cores


WGMMA = AttentionVariant(
    "wgmma", tile_of, _launches, _preferred,
    needs=f"takes f16 or bf16 with rows on 16 bytes, heads of at most {MOST_DIM}, scales of "
          f"{FOLDED[0]} to {FOLDED[1]:.2f}, lengths, starts and offsets, on sm_90a",
)  # fmt: skip
