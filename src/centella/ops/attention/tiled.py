"""The register-tiled kernel: many queries, both products as register tiles through shared memory.

A group has `bq` queries of one head and goes over the keys in steps of `bk`. The scores of a step
are a product of slabs of queries and keys, which lie in shared memory with the head's elements
outermost; the maximum of a query is taken over the threads that have its scores; its weights go to
shared memory, keys outermost, and are multiplied with slabs of values. Sums, and each thread's
share of the weights' total, stay in registers.

A slab is multiplied while the next is on its way from global memory. What would write 16-byte
chunks across the banks is laid out so that a warp's go to all of them: keys that a thread has next
to each other are `across` rows apart among the weights.
"""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.ops.attention.group_queries import GroupQueries, in_turn
from centella.ops.attention.lines import Lines
from centella.ops.attention.masks import Scoring, Sight, bounded, product_scale, share_of, sink_of
from centella.ops.attention.problem import (
    BY_HEAD,
    AttentionAttrs,
    AttentionVariant,
    launch_by_head,
    parameters,
    queries_of,
)
from centella.ops.attention.slabs import Rows, steps
from centella.ops.attention.table import FEW_QUERIES, tile_of
from centella.ops.attention.tiles import Tile
from centella.ops.attention.weights import HIDDEN, LOG2E, power
from centella.ops.matmul.tiled import store_words
from centella.ops.rows import fold
from centella.specs import Caps


def _attention(
    *, tile: Tile, dim: int, scoring: Scoring, native: bool, vector: bool, vector_y: bool,
    q: Argument, k: Argument, v: Argument, y: Argument, **masks: Argument,
) -> None:  # fmt: skip
    p = parameters(BY_HEAD)
    at = GroupQueries(masks, in_turn(lang.group_id()), tile.bq)
    head, b = at.head, at.b
    block = at.block if at.begin is not None else p["blocks"] - 1 - at.block
    first = block * tile.bq  # of causal queries the last have most to do
    sight, unit = Sight(masks, scoring, b, at.lq, at.lk), 1.0 if "mask" in masks else LOG2E
    begin, end = sight.since(first) // tile.bk * tile.bk, sight.until(first + tile.bq)
    last_query, last_key = at.last(at.lq), lang.maximum(end, 1) - 1
    lines = Lines(masks, b, head // p["share"], at)
    queries = Rows(q, tile, tile.bq, tile.depth, True, vector, p["ql"], dim)
    keys = Rows(k, tile, tile.bk, tile.depth, True, vector, p["kl"], dim)
    values = Rows(v, tile, tile.depth, tile.columns, False, vector, p["vl"], dim)
    asked = at.row(b * p["qb"] + head * p["qh"], p["ql"])
    slab = lang.shared(f32, 2 * tile.slab)
    my = _Thread(tile, native, sink_of(masks, head, unit))

    def shown(key: Any) -> Any:
        """Whether a value counts: what lies past the last, or is masked, may hold anything."""
        return sight.counts(key, end)

    def step(key0: Any) -> None:
        """The keys from `key0` on."""
        scores = lang.vars(f32, tile.tq, tile.tk, init=0.0)
        of_k, of_v = lines.places(key0)
        last = lines.last(key0, last_key)
        of_key, of_value = lines.scales(key0)

        def put(fetched: tuple[Any, Any], stage: Any) -> None:
            queries.put(fetched[0], slab, stage * tile.slab)
            keys.put(fetched[1], slab, stage * tile.slab + tile.turned(tile.bq))

        steps(
            -(-dim // tile.depth),
            lambda element: (
                queries.fetch(asked, first, last_query, element),
                keys.fetch(of_k, key0, last, element, scale_of=of_key),
            ),
            put,
            lambda at, stage: my.score(scores, slab, stage),
            tile,
            meet=False,  # the softmax has barriers before values are written
        )  # fmt: skip
        _show(my, scores, tile, key0, end, first, sight, scoring, masks, head, unit)
        steps(
            tile.bk // tile.depth,
            lambda key: values.fetch(of_v, key0 + key, last, 0, shown, of_value),
            lambda fetched, stage: values.put(fetched, slab, stage * tile.slab),
            lambda i, stage: my.accumulate(slab, i, stage),
            tile,
            lambda: my.soften(scores, LOG2E / unit),
        )  # fmt: skip

    for key0 in lang.range(begin, end, tile.bk):
        step(key0)
    begin = at.row(b * p["yb"] + head * p["yh"], p["yl"])
    my.finish(y, begin, first, at.lq, p["yl"], dim, vector_y)


def _show(
    my: _Thread, scores: Any, tile: Tile, key0: Operand, end: Any, first: Operand, sight: Sight,
    scoring: Scoring, masks: dict[str, Any], head: Any, unit: float,
) -> None:  # fmt: skip
    """Scale the scores, to base 2 without an additive mask, and hide those that do not count."""
    scale = product_scale(scoring, unit)
    for row in scores:
        for score in row:
            score.set(bounded(score * scale, scoring, unit))

    def hide() -> None:
        for j in range(tile.tk):
            key = key0 + my.key(j)
            counted = sight.counts(key, end)
            for i in range(tile.tq):
                score = scores[i][j]
                value, seen = sight.seen(score, counted, head, first + my.query(i), key, unit)
                score.set(lang.select(seen, value, HIDDEN))

    if {"mask", "key_mask", "bias"} & set(masks):
        hide()
        return
    some = key0 + tile.bk > sight.until(first + 1)
    if scoring.windowed:
        some = some | (key0 < sight.since(first + (tile.bq - 1)))
    with lang.if_(some):
        hide()


class _Thread:
    """A thread's place and what it keeps: sums [tq][td], its part of each query's total.

    Thread t < bq has the running maximum of query t. Warps are 4 threads down, 8 across.
    """

    def __init__(self, tile: Tile, native: bool, begins: tuple[Expr, Expr]) -> None:
        t, warps = lang.local_id(), tile.across // 8
        self.tile, self.native = tile, native
        self.me = t
        self.down = (t // 8) % 4 + t // (32 * warps) * 4
        self.across = t % 8 + (t // 32) % warps * 8
        self.sums = lang.vars(f32, tile.tq, tile.td, init=0.0)
        top, total = begins
        self.totals = lang.vars(f32, tile.tq, init=lang.select(self.across == 0, total, 0.0))
        self.top = lang.var(top)
        self.weights = lang.shared(f32, tile.bk * tile.pitch)
        self.tops = lang.shared(f32, tile.bq)
        self.shrinks = lang.shared(f32, tile.bq)

    def query(self, i: int) -> Expr:
        """A query of the thread's, within the tile."""
        return self.down * 4 + (i // 4 * self._spacing + i % 4)

    def key(self, j: int) -> Expr:
        """A key of the thread's, within the step."""
        return self.across * 4 + (j // 4 * 4 * self.tile.across + j % 4)

    @property
    def _spacing(self) -> int:
        """Queries from one four of a thread to the next."""
        return self.tile.bq // (self.tile.tq // 4)

    def _of_queries(self, array: Any, chunk: Operand) -> list[Expr]:
        """A word for each query of the thread's, of words for all that begin at a chunk."""
        values: list[Expr] = []
        for g in range(self.tile.tq // 4):
            values += array.load_chunk(chunk + self.down + g * (self._spacing // 4))
        return values

    def _leave(self, row: Operand, values: list[Expr]) -> None:
        """Store a word for each query of the thread's in a row of the weights."""
        at = row * (self.tile.pitch // 4) + self.down
        for g in range(self.tile.tq // 4):
            chunk = at + g * (self._spacing // 4)
            self.weights.store_chunk(chunk, values[4 * g : 4 * g + 4])

    def score(self, scores: Any, slab: Any, stage: Operand) -> None:
        """Add the products of a slab's elements."""
        tile = self.tile
        base = stage * (tile.slab // 4)
        right = base + tile.turned(tile.bq) // 4 + self.across
        for d in range(tile.depth):
            pad = d // 4 * tile.pad
            query = self._of_queries(slab, base + (d * tile.bq + pad) // 4)
            key: list[Expr] = []
            for g in range(tile.tk // 4):
                key += slab.load_chunk(right + ((d * tile.bk + pad) // 4 + g * tile.across))
            for i, a in enumerate(query):
                for j, x in enumerate(key):
                    scores[i][j].set(lang.fma(a, x, scores[i][j]))

    def soften(self, scores: Any, base: float) -> None:
        """A step of the running softmax: weights of the new keys; what is summed shrinks.

        Args:
            base: logarithm to base 2 of the number whose powers the weights are.
        """
        tile = self.tile
        self._leave(self.across, [fold(list(row), lang.fmax) for row in scores])
        lang.barrier()
        with lang.if_(self.me < tile.bq):
            high = fold([self.weights[x * tile.pitch + self.me] for x in range(tile.across)],
                        lang.fmax)  # fmt: skip
            high = lang.fmax(self.top, high)
            self.tops[self.me] = high
            self.shrinks[self.me] = power((self.top - high) * base, self.native)
            self.top.set(high)
        lang.barrier()
        tops, shrinks = (self._of_queries(x, lang.const(0, u32)) for x in (self.tops, self.shrinks))
        for i, row in enumerate(scores):
            for score in row:
                score.set(power((score - tops[i]) * base, self.native))
            total = fold(list(row), lambda a, c: a + c)
            self.totals[i].set(lang.fma(self.totals[i], shrinks[i], total))
            for x in self.sums[i]:
                x.set(x * shrinks[i])
        for j in range(tile.tk):
            self._leave(self.across + j * tile.across, [row[j] for row in scores])

    def accumulate(self, slab: Any, i: Operand, stage: Operand) -> None:
        """Add the values of a slab's keys, each times its weight."""
        tile = self.tile
        each = 4 * tile.across // tile.depth  # slabs of a four of keys of every thread
        row = i // each * (4 * tile.across) + i % each * (tile.depth // 4)
        left, right = row * (tile.pitch // 4), stage * (tile.slab // 4) + self.across
        for n in range(tile.depth):
            weight = self._of_queries(
                self.weights, left + (n % 4 * tile.across + n // 4) * (tile.pitch // 4)
            )
            value: list[Expr] = []
            for g in range(tile.td // 4):
                value += slab.load_chunk(right + (n * tile.columns // 4 + g * tile.across))
            for r, w in enumerate(weight):
                for c, x in enumerate(value):
                    self.sums[r][c].set(lang.fma(w, x, self.sums[r][c]))

    def finish(
        self, y: Argument, start: Operand, first: Operand, lq: Operand, pitch: Operand, dim: int,
        vector: bool,
    ) -> None:  # fmt: skip
        """Divide by the totals and store; zeros for a query without keys."""
        tile = self.tile
        self._leave(self.across, list(self.totals))
        lang.barrier()
        with lang.if_(self.me < tile.bq):
            parts = [self.weights[x * tile.pitch + self.me] for x in range(tile.across)]
            total = fold(parts, lambda a, c: a + c)
            self.tops[self.me] = share_of(total)
        lang.barrier()
        factors = self._of_queries(self.tops, lang.const(0, u32))
        for g in range(tile.td // 4):
            column = self.across * 4 + g * 4 * tile.across
            with lang.if_(column < dim):
                for i in range(tile.tq):
                    row = first + self.query(i)
                    with lang.if_(row < lq):
                        out = [x * factors[i] for x in self.sums[i][4 * g : 4 * g + 4]]
                        at = start + row * pitch + column
                        if vector and y.dtype.per_chunk == 4:
                            y.store(at, out)
                        else:
                            store_words(y, at, out, column, dim)


kernel: Kernel = Kernel(_attention, workgroup=128, name="attention_tiled", rewritable=True)


def _tile_of(form: Form[AttentionAttrs], caps: Caps) -> Tile | None:
    return tile_of(queries_of(form), form.inputs[0].shape[3], caps)


def _launches(form: Form[AttentionAttrs], tile: Tile, caps: Caps) -> Lowered:
    """One launch: a group has a tile of queries of one head."""
    constants = (
        ("native", caps.native_exp2),
        ("tile", tile),
        ("vector", all(s.aligned for s in form.inputs[:3])),
        ("vector_y", form.outputs[0].aligned),
    )
    return Lowered((launch_by_head(kernel, form, tile.bq, constants, tile.threads),))


def _preferred(form: Form[AttentionAttrs], caps: Caps) -> bool:
    """Where the table has a tile for the class of the adapter."""
    lq, dim = queries_of(form), form.inputs[0].shape[3]
    return lq > FEW_QUERIES and tile_of(lq, dim, caps, measured=True) is not None


TILED = AttentionVariant(
    "tiled", _tile_of, _launches, _preferred,
    needs="has no tile for head_dim {dim} in {shared:,} bytes of workgroup memory and {threads} "
          "threads",
)  # fmt: skip
