"""Attention on tensor cores, for f16 and bf16 on NVIDIA GPUs from sm_80 on (PTX alone).

After FlashAttention-2 (Dao 2023). A group has `queries` queries of one head, a warp 16 or 32 of
them. Tiles of K and V are in rings of `stages` in shared memory, on their way by `cp_async` while
an earlier one is used. Scores are f32 fragments; the softmax is kept up on them, a row being spread
over four lanes; the weights, rounded to 16 bits, are the first factor of the product with V in the
registers where they were computed. Their sum is one more column of that product, so that rounding
does not keep them from adding up to 1. Of bf16 they are the sum of two (`parts`): one would be as
far off as the rounding of the result. One division at the end.

Maxima are replaced late (`rows.py`). Where the scale is small and there is no additive mask, it is
part of the exponent's only multiplication (`fold`).
Hidden scores are `LOWEST`, and a query whose scores are all below `UNSEEN` has seen no key; tiles
that every query of a warp sees whole are not looked through.
Heads are padded with zeros in shared memory, to a power of two; computed are multiples of 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from centella import lang
from centella.dtypes import bf16, f32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.ops.attention.copies import PER_CHUNK, Walk
from centella.ops.attention.group_queries import GroupQueries, in_turn
from centella.ops.attention.lines import Lines
from centella.ops.attention.masks import LOWEST, Scoring, Sight, bounded, share_of, sink_of
from centella.ops.attention.problem import (
    BY_HEAD,
    AttentionAttrs,
    AttentionVariant,
    launch_by_head,
    parameters,
    queries_of,
    rows_of_16_bits,
    texts_of,
)
from centella.ops.attention.rows import UNSEEN, grow, store_row
from centella.ops.attention.weights import LOG2E, put
from centella.specs import Caps

WARP = 32
M, N = 16, 8  # rows and columns of sums; keys and head elements come in sixteens
FOLDED = (2.0**-6, math.log(2))
HEADS = (16, 256)  # sizes of a head that are worth its padding
FEWER_QUERIES = 64  # take the smaller tile; so do masks of single keys and caps: registers


class MmaTile(Struct, frozen=True):
    """Queries of a group, keys of a tile, warps, stages of the rings.

    `keeps_queries`: queries stay in registers; else they are loaded again for every tile of keys.
    `together`: groups that a multiprocessor has registers for. `parts`: 16-bit numbers that a
    weight is the sum of.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    keeps_queries: bool = True
    together: int = 2
    parts: int = 1

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return self.warps * WARP

    @property
    def sixteens(self) -> int:
        """Fragments of queries of a warp."""
        return self.queries // self.warps // M

    def width(self, dim: int) -> int:
        """Elements of a row in shared memory: each thread copies whole chunks of every tile."""
        least = max(dim, self.threads * PER_CHUNK // self.keys, M)
        return 1 << (least - 1).bit_length()

    def shared_bytes(self, dim: int) -> int:
        """Workgroup memory: queries, and keys and values in every stage."""
        return 2 * self.width(dim) * (self.queries + 2 * self.stages * self.keys)


# By the largest head of each row; then the tile of little memory.
MMA_TILES: tuple[tuple[int, MmaTile, MmaTile], ...] = (
    (32, MmaTile(128, 64, 4, 2, together=3), MmaTile(64, 32, 4, 2)),
    (64, MmaTile(128, 64, 4, 2), MmaTile(64, 32, 4, 2)),
    (128, MmaTile(128, 32, 4, 2, keeps_queries=False), MmaTile(64, 32, 4, 2, keeps_queries=False)),
    (256, MmaTile(64, 32, 4, 2, keeps_queries=False), MmaTile(64, 32, 4, 2, keeps_queries=False)),
)
LEAST_TILE = MmaTile(32, 16, 2, 2)


class _Sixteen:
    """Sixteen queries of a warp; of two, 8 rows apart, this thread keeps the running maximum.

    Row `h` of a thread has registers 2 h and 2 h + 1 of each fragment.
    """

    def __init__(
        self, dtype: Any, tile: MmaTile, dim: int, first: Any, begins: tuple[Any, Any]
    ) -> None:
        self.scores = [lang.ptx.Fragment(f32, (M, N)) for _ in range(tile.keys // N)]
        self.out = [lang.ptx.Fragment(f32, (M, N)) for _ in range(-(-dim // M) * 2)]
        self.weights = [lang.ptx.Fragment(dtype, (M, M)) for _ in range(tile.parts)]
        self.base = lang.vars(f32, 2, init=begins[0])  # what weights are relative to
        self.total = lang.ptx.Fragment(f32, (M, N))  # each column of it
        for fragment in self.out:
            fragment.fill(0.0)
        for register in range(4):
            self.total[register] = begins[1]
        lane = lang.local_id() % WARP
        self.queries = [first + lane // 4 + 8 * h for h in range(2)]
        self.column = lane % 4 * 2

    def change(self, key0: Any, new: Callable[[Any, Any, Any], Any]) -> None:
        """Replace every score by `new(score, query, key)`."""
        for j, fragment in enumerate(self.scores):
            for register in range(4):
                key = key0 + (self.column + (j * N + register % 2))
                fragment[register] = new(fragment[register], self.queries[register // 2], key)

    def soften(self, factor: Any, fold: bool) -> None:
        """Look for new maxima; rescale what was summed where one grew too much."""
        grown, shrinks = grow(
            lambda h: (fragment[2 * h + e] for fragment in self.scores for e in range(2)),
            self.base, factor, fold,
        )  # fmt: skip
        with lang.if_(grown[0] | grown[1]):
            for h in range(2):
                for fragment in (*self.out, self.total):
                    for register in (2 * h, 2 * h + 1):
                        fragment[register] = fragment[register] * shrinks[h]

    def _exponent(self, score: Operand, h: int, factor: Operand, fold: bool) -> Any:
        if fold:
            return lang.fma(score, factor, -self.base[h])
        return (score - self.base[h]) * factor

    def weigh(self, sixteen: int, factor: Any, fold: bool) -> None:
        """Weights of 16 keys, as the first factor of a product."""
        for j in range(2):
            fragment = self.scores[2 * sixteen + j]
            for h in range(2):
                low, high = (
                    lang.exp2_native(self._exponent(fragment[2 * h + e], h, factor, fold))
                    for e in range(2)
                )
                put(self.weights, 2 * j + h, [low, high])

    def finish(self, y: Any, start: Operand, pitch: Operand, lq: Operand, dim: int) -> None:
        """Divide and store; of a fragment a thread has two neighbours in two rows."""
        for h in range(2):
            total = self.total[2 * h]
            factor = share_of(total)
            with lang.if_(self.queries[h] < lq):
                row = start + self.queries[h] * pitch + self.column
                pairs = ([fragment[2 * h + e] * factor for e in range(2)] for fragment in self.out)
                store_row(y, row, self.column, dim, pairs)


def _attention_mma(
    *, tile: MmaTile, dim: int, scoring: Scoring, fold: bool, q: Argument, k: Argument, v: Argument,
    y: Argument, **masks: Argument,
) -> None:  # fmt: skip
    lang.ptx.resident(tile.together)
    p = parameters(BY_HEAD)
    at = GroupQueries(masks, in_turn(lang.group_id()), tile.queries)
    block, head, b = at.block, at.head, at.b
    lines = Lines(masks, b, head // p["share"], at)
    sight = Sight(masks, scoring, b, at.lq, at.lk)
    if sight.ordered and at.begin is None:
        block = p["blocks"] - 1 - block  # the longest first
    first = block * tile.queries
    begin, end = sight.since(first) // tile.keys, sight.until(first + tile.queries)
    scale = lang.parameter("scale", f32)
    factor = scale * LOG2E if fold else lang.const(LOG2E, f32)

    width = tile.width(dim)
    asked = lang.ptx.SharedTile(q.dtype, (tile.queries, width))
    keys = lang.ptx.SharedTile(k.dtype, (tile.stages, tile.keys, width))
    values = lang.ptx.SharedTile(v.dtype, (tile.stages, tile.keys, width))
    walk = Walk(keys, tile.threads, dim)

    def fetch(step: Any) -> None:
        stage, (of_k, of_v) = step % tile.stages, lines.places(step * tile.keys)
        sources = ((keys, k, of_k, p["kl"]), (values, v, of_v, p["vl"]))
        walk.fetch(step * tile.keys, at.last(at.lk), stage, sight.counts, *sources)

    source = (asked, q, at.row(b * p["qb"] + head * p["qh"], p["ql"]), p["ql"])
    Walk(asked, tile.threads, dim).fetch(first, at.last(at.lq), 0, None, source)
    ahead = tile.stages - 1
    for stage in range(ahead):
        fetch(begin + stage)
        lang.ptx.cp_async_commit()
    mine = lang.local_id() // WARP * (tile.sixteens * M)
    begins = sink_of(masks, head, LOG2E if fold else 1.0, UNSEEN)
    rows = [
        _Sixteen(q.dtype, tile, dim, first + mine + i * M, begins) for i in range(tile.sixteens)
    ]
    attend = _Attend(tile, dim, asked, keys, values, mine, rows)
    lang.ptx.cp_async_wait(ahead - 1)
    lang.barrier()
    attend.hold()
    by_all = (sight.since(first + mine + (tile.sixteens * M - 1)), sight.until(first + mine + 1))

    def visible(score: Operand, query: Any, key: Any) -> Expr:
        score, shown = sight.seen(score, sight.counts(key), head, query, key)
        return lang.select(shown, score, LOWEST)

    steps = (end + (tile.keys - 1)) // tile.keys
    for step in lang.range(begin, steps):
        lang.ptx.cp_async_wait(ahead - 1)
        lang.barrier()
        with lang.if_(step + ahead < steps):
            fetch(step + ahead)
        lang.ptx.cp_async_commit()
        now, key0 = step % tile.stages, step * tile.keys
        attend.score(now)
        for row in rows:
            if not fold:
                row.change(key0, lambda score, *_: bounded(score * scale, scoring))
            if not {"mask", "key_mask", "bias"}.isdisjoint(masks):
                row.change(key0, visible)
            else:
                hidden = key0 + tile.keys > by_all[1]
                hidden = hidden | (key0 < by_all[0]) if scoring.windowed else hidden
                with lang.if_(hidden):
                    row.change(key0, visible)
            row.soften(factor, fold)
        attend.mix(now, factor, fold)
    for row in rows:
        row.finish(y, at.row(b * p["yb"] + head * p["yh"], p["yl"]), p["yl"], at.lq, dim)


def _at(tile: Any, chunk: Any, down: int, right: int) -> Any:
    """The chunk so many sixteens of rows further down and of columns further right."""
    return tile.right(chunk, 2 * right) + tile.down(down * M)


class _Attend:
    """A warp's products: its queries with the keys of a tile, their weights with its values.

    Lanes 8 j to 8 j + 7 point `ldmatrix` at the rows of matrix j. In the registers of Q the next
    eight rows come before the next eight of the head; of two fragments of K, and of V transposed,
    the next eight of what is summed come first.
    """

    def __init__(
        self, tile: MmaTile, dim: int, asked: Any, keys: Any, values: Any, mine: Any,
        rows: list[_Sixteen],
    ) -> None:  # fmt: skip
        self.keys, self.values, self.asked, self.rows = keys, values, asked, rows
        lane, depth = lang.local_id() % WARP, -(-dim // M)
        low, high = lane // 8 % 2, lane // 16
        self.depth = depth
        self.of_q = asked.chunk(mine + low * 8 + lane % 8, high)
        self.of_k = keys.chunk(high * 8 + lane % 8, low)
        self.of_v = values.chunk(low * 8 + lane % 8, high)
        self.keeps_queries = tile.keeps_queries
        self.queries = [
            [lang.ptx.Fragment(asked.dtype, (M, M)) for _ in rows]
            for _ in range(depth if self.keeps_queries else 1)
        ]
        self.factors = [
            [lang.ptx.Fragment(keys.dtype, (M, N)) for _ in range(2)] for _ in range(tile.keys // M)
        ]
        self.ones = lang.ptx.Fragment(keys.dtype, (M, N))
        for register in range(2):
            self.ones[register] = (1.0, 1.0)
        self.spread = [
            [lang.ptx.Fragment(keys.dtype, (M, N)) for _ in range(2)] for _ in range(depth)
        ]

    def hold(self) -> None:
        if self.keeps_queries:
            for i in range(self.depth):
                self._load_queries(i)

    def _load_queries(self, i: int) -> None:
        for m, fragment in enumerate(self.queries[i if self.keeps_queries else 0]):
            lang.ptx.ldmatrix(self.asked, _at(self.asked, self.of_q, m, i), fragment)

    def score(self, stage: Any) -> None:
        for row in self.rows:
            for fragment in row.scores:
                fragment.fill(0.0)
        first = self.of_k + self.keys.at_stage(stage)
        for i in range(self.depth):
            if not self.keeps_queries:
                self._load_queries(i)
            for n, pair in enumerate(self.factors):
                lang.ptx.ldmatrix(self.keys, _at(self.keys, first, n, i), *pair)
                for row, left in zip(
                    self.rows, self.queries[i if self.keeps_queries else 0], strict=True
                ):
                    for e in range(2):
                        lang.ptx.mma_sync(row.scores[2 * n + e], left, pair[e])

    def mix(self, stage: Any, factor: Any, fold: bool) -> None:
        """Weights of the keys of a stage, and what they make of its values."""
        first = self.of_v + self.values.at_stage(stage)
        for t in range(len(self.factors)):
            for row in self.rows:
                row.weigh(t, factor, fold)
                for part in row.weights:
                    lang.ptx.mma_sync(row.total, part, self.ones)
            for n, pair in enumerate(self.spread):
                lang.ptx.ldmatrix(self.values, _at(self.values, first, t, n), *pair, trans=True)
                for row, e in product(self.rows, range(2)):
                    for part in row.weights:
                        lang.ptx.mma_sync(row.out[2 * n + e], part, pair[e])


kernel: Kernel = Kernel(_attention_mma, workgroup=128, name="attention_mma")


def tile_of(form: Form[AttentionAttrs], caps: Caps) -> MmaTile | None:
    """The first tile that a device has room for."""
    q, masks = form.inputs[0], form.attrs.masks
    lq, dim = queries_of(form), q.shape[3]
    sizes = next((tiles for most, *tiles in MMA_TILES if dim <= most), None)
    if sizes is None or not caps.tensor_cores or not rows_of_16_bits(form):
        return None
    smaller = lq <= FEWER_QUERIES or not {"mask", "key_mask", "bias"}.isdisjoint(masks)
    smaller = smaller or ("offsets" in masks and form.attrs.window is not None)
    smaller = smaller or form.attrs.softcap is not None
    for tile in (sizes[smaller], LEAST_TILE):
        if tile.shared_bytes(dim) <= caps.max_shared and tile.threads <= caps.max_workgroup:
            return replace(tile, parts=2) if q.dtype is bf16 else tile
    return None


def _launches(form: Form[AttentionAttrs], tile: MmaTile, caps: Caps) -> Lowered:
    """One launch: a group has the queries of a tile, of one head."""
    attrs = form.attrs
    plain = {"mask", "bias"}.isdisjoint(attrs.masks) and attrs.softcap is None
    fold = plain and FOLDED[0] <= attrs.scale <= FOLDED[1]
    constants = (("fold", fold), ("tile", tile))
    return Lowered((launch_by_head(kernel, form, tile.queries, constants, tile.threads),))


def _preferred(form: Form[AttentionAttrs], caps: Caps) -> bool:
    """Heads that are worth their padding; of texts end to end, those that fill a fragment."""
    lq, dim = queries_of(form), form.inputs[0].shape[3]
    fills = lq > M or texts_of(form) is None  # of few queries it is the shortest program
    return fills and HEADS[0] <= dim <= HEADS[1] and caps.fast_tensor_cores


MMA = AttentionVariant(
    "mma", tile_of, _launches, _preferred,
    needs="takes f16 or bf16 with rows on 16 bytes, heads of at most 256, and tensor cores",
)  # fmt: skip
