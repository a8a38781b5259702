"""A decoder's rotation and cache in the launch that attends to the parts of its keys, in f32.

A group has a part of a head's keys, and some of the queries that share them. It takes its keys in
tiles, of which most parts have one; each is loaded at once, values too, the first before the
queries are known. Products of a team's threads are added up in workgroup memory, a thread for each
query and key.

Before, each group normalises and turns its queries, and the step's key. The groups whose part ends
with the step's own position take key and value from workgroup memory; those of them that have the
first queries write both to the cache. So nothing that a launch writes is read in it.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.ops.attention.masks import LOWEST, Scoring, product_scale
from centella.ops.attention.parts import Known, Work
from centella.ops.attention.rope_cluster import masks_of
from centella.ops.attention.rope_split_rows import CachedRows, StepRows
from centella.ops.attention.rope_split_tile import THREADS, WIDTH, Tile, slot_of, team_of
from centella.ops.attention.weights import LOG2E, power
from centella.ops.cache import place_in
from centella.ops.rope import Turn
from centella.ops.rows import fold


class _Part:
    """A thread's running softmax: sums of a chunk of the head for each query, of its rows.

    Args:
        once: whether a part has one tile, so that nothing shrinks.
        native: as of `power`.
    """

    def __init__(
        self, tile: Tile, work: Work, step: StepRows, columns: list[Any], once: bool, native: bool
    ) -> None:  # fmt: skip
        self._tile, self._work, self._step, self._columns = tile, work, step, columns
        self._once, self._native = once, native
        self._scratch = lang.shared(f32, tile.scratch)
        self._scores = lang.shared(f32, tile.rows * tile.keys)
        self._weights = lang.shared(f32, tile.rows * tile.keys)
        self._tops, self._shrinks = (lang.shared(f32, tile.rows) for _ in range(2))
        self._sums: Any = lang.vars(f32, tile.rows, WIDTH, init=0.0)
        self._totals: Any = lang.vars(f32, tile.rows, init=0.0)
        me = lang.local_id()
        self._has_key = me < tile.slots * tile.lanes
        self.slot, self.lane = slot_of(tile), me % tile.lanes
        self._has_value = me < tile.teams * tile.chunks
        self.team, self.column = team_of(tile), me % tile.chunks * WIDTH
        if not once:
            with lang.if_(me < tile.rows):
                self._tops[me] = LOWEST

    def products(self, cached: CachedRows) -> None:
        """Leave a thread's products of each query with the tile's keys."""
        tile = self._tile
        with lang.if_(self._has_key):
            for row in range(tile.rows):
                query = self._step.row(row, self._columns)
                for n, kept in enumerate(cached.kept):
                    at = (self.slot + (n * tile.slots + row * tile.keys)) * tile.lanes + self.lane
                    self._scratch[at] = _dot(query, [v.get() for v in kept])

    def own_products(self) -> None:
        """Leave those with the step's key, behind the tile's."""
        tile = self._tile
        with lang.if_(lang.local_id() < tile.lanes):
            key = self._step.row(tile.rows, self._columns)
            for row in range(tile.rows):
                at = (tile.rows * tile.keys + row) * tile.lanes + self.lane
                self._scratch[at] = _dot(self._step.row(row, self._columns), key)

    def weigh(self, base: Any, position: Any) -> None:
        """Scores and weights of a tile; what shrinks the sums so far."""
        tile, work = self._tile, self._work
        count = tile.rows * tile.keys
        pairs = [lang.local_id() + n for n in range(0, count, tile.threads)]
        for pair in pairs:
            safe = lang.minimum(pair, count - 1)
            row, key = safe // tile.keys, base + safe % tile.keys
            at = lang.select(key == position, count + row, safe) * tile.lanes
            score, seen = work.seen(row, key, work.counts(key), self._added(at))
            with lang.if_(pair < count):
                self._scores[pair] = lang.select(seen, score, LOWEST)
        lang.barrier()
        for pair in pairs:
            safe = lang.minimum(pair, count - 1)
            row = safe // tile.keys
            chunks = [self._scores.load(row * tile.keys + n) for n in range(0, tile.keys, 4)]
            score = self._scores[safe]
            before = lang.const(LOWEST, f32) if self._once else self._tops[row]
            top = reduce(lang.fmax, (v for chunk in chunks for v in chunk), before)
            weight = lang.select(score > LOWEST, power(score - top, self._native), 0.0)
            with lang.if_(pair < count):
                self._weights[pair] = lang.select(lang.isnan(score), score, weight)
                with lang.if_(pair % tile.keys == 0):
                    self._shrinks[row] = top
        lang.barrier()

    def _added(self, at: Any) -> Any:
        """What the threads of a team have of a score."""
        lanes = self._tile.lanes
        if lanes % 4:
            return fold([self._scratch[at + n] for n in range(lanes)], operator.add)
        chunks = [self._scratch.load(at + n) for n in range(0, lanes, 4)]
        return fold([v for chunk in chunks for v in chunk], operator.add)

    def add(self, base: Any, cached: CachedRows, position: Any, past: Any) -> None:
        """Add up the tile's weighed values, the step's own among them."""
        tile = self._tile
        owns = (base <= position) & (position < self._work.end) & (position - base < tile.keys)
        keys, exact = cached.keys(base), tile.teams * len(cached.kept) == tile.keys
        counts = [self._work.counts(key, past) for key in keys]
        if not exact:
            pairs = zip(counts, keys, strict=True)
            counts = [counted & (key - base < tile.keys) for counted, key in pairs]
        values = [[lang.select(c, v.get(), 0.0) for v in kept]
                  for c, kept in zip(counts, cached.kept, strict=True)]  # fmt: skip
        for row in range(tile.rows):
            total, sums = self._totals[row], self._sums[row]
            if not self._once:
                shrink = power(self._tops[row] - self._shrinks[row], self._native)
                total, sums = total * shrink, [s * shrink for s in sums]
            for n, value in enumerate(values):
                at = self.team + n * tile.teams
                safe = at if exact else lang.minimum(at, tile.keys - 1)
                weight = self._weights[safe + row * tile.keys]
                weight = weight if exact else lang.select(at < tile.keys, weight, 0.0)
                total = total + weight
                sums = [lang.fma(weight, v, s) for v, s in zip(value, sums, strict=True)]
            self._totals[row].set(total)
            for into, v in zip(self._sums[row], sums, strict=True):
                into.set(v)
        with lang.if_(owns & (self.team == 0)):
            value = self._step.row(tile.rows + 1, [self.column])
            for row in range(tile.rows):
                weight = self._weights[position - base + row * tile.keys]
                for into, v in zip(self._sums[row], value, strict=True):
                    into.set(lang.fma(weight, v, into))

    def keep_tops(self) -> None:
        """The maxima so far, once all threads have had those before."""
        me = lang.local_id()
        lang.barrier()
        with lang.if_(me < self._tile.rows):
            self._tops[me] = self._shrinks[me]

    def walk(self, keys: CachedRows, values: CachedRows, position: Any, past: Any) -> None:
        """Take all keys of the part; the first tile of them is loaded."""
        work, step = self._work, self._tile.keys
        if self._once:
            self._take(work.begin, keys, values, position, past)
            return
        for base in lang.range(work.begin, work.end, step):
            self._take(base, keys, values, position, past)
            values.load(base + step, past)
            self.keep_tops()

    def _take(
        self, base: Any, keys: CachedRows, values: CachedRows, position: Any, past: Any
    ) -> None:
        self.products(keys)
        if not self._once:
            keys.load(base + self._tile.keys, past)
        lang.barrier()
        self.weigh(base, position)
        self.add(base, values, position, past)

    def finish(self, partial: Any) -> None:
        """Leave the part's results."""
        tile, work, me = self._tile, self._work, lang.local_id()
        totals = lang.shared(f32, tile.teams * tile.rows)
        with lang.if_(self._has_value):
            for row in range(tile.rows):
                at = self.team * tile.rows + row
                self._scratch.store(at * tile.dim + self.column, [v.get() for v in self._sums[row]])
                with lang.if_(self.column == 0):
                    totals[at] = self._totals[row]
        lang.barrier()
        with lang.if_((me < tile.rows) & work.has(me)):
            stats = work.results(me).stats
            each = [totals[n * tile.rows + me] for n in range(tile.teams)]
            partial[stats] = self._shrinks[me]
            partial[stats + 1] = fold(each, operator.add)
        for base in range(0, tile.rows * tile.chunks, tile.threads):
            item = me + base
            query, column = item // tile.chunks, item % tile.chunks * WIDTH
            with lang.if_((item < tile.rows * tile.chunks) & work.has(query)):
                parts = [self._scratch.load((n * tile.rows + query) * tile.dim + column)
                         for n in range(tile.teams)]  # fmt: skip
                added = [fold(list(same), operator.add) for same in zip(*parts, strict=True)]
                partial.store(work.results(query).sums + column, added)


def _dot(a: list[Any], b: list[Any]) -> Any:
    """In four chains."""
    chains = [x * y for x, y in zip(a[:4], b[:4], strict=True)]
    for n in range(4, len(a)):
        chains[n % 4] = lang.fma(a[n], b[n], chains[n % 4])
    return fold(chains, operator.add)


def _rope_split(
    *, dim: int, rows: int, scoring: Scoring, layout: tuple[tuple[str, bool], ...], blocks: bool,
    known: Known, native: bool, threads: int, whole: bool, x: Argument, cos: Argument,
    sin: Argument, starts: Argument, keys: Argument, values: Argument, partial: Argument,
    norms: Argument | None = None,
) -> None:  # fmt: skip
    """A group has a part of the keys of a head.

    Args:
        known: what the program is written for.
        native: as of `power`.
        whole: whether a part without keys is written: sums of nothing.
    """
    table, masks = masks_of(starts, blocks)
    tile, me = Tile(dim, rows, threads), lang.local_id()
    # Not uniform, so that loads need not wait for the group to meet.
    ahead = Work(masks, scoring, rows, same=lambda value: value, known=known)
    position = lang.bitcast(masks["starts"][ahead.b], u32)
    past = lang.minimum(ahead.end, position)  # where what the cache has so far ends
    step = StepRows(tile, product_scale(scoring, LOG2E))
    items = step.ask(ahead, Turn(cos, sin, **dict(layout)), x, norms, position)
    columns = [(me % tile.lanes + n * tile.lanes) * WIDTH for n in range(tile.chunks // tile.lanes)]
    pitches = [lang.parameter(name, u32) for name in ("kl", "vl")]
    cached_keys = CachedRows(
        keys, tile.keys // tile.slots, slot_of(tile), tile.slots, columns,
        lambda key: ahead.lines.places(key)[0] + key * pitches[0],
    )  # fmt: skip
    cached_values = CachedRows(
        values, -(-tile.keys // tile.teams), team_of(tile), tile.teams,
        [me % tile.chunks * WIDTH], lambda key: ahead.lines.places(key)[1] + key * pitches[1],
    )  # fmt: skip
    cached_keys.load(ahead.begin, past)
    cached_values.load(ahead.begin, past)
    work = Work(masks, scoring, rows, known=known)
    with lang.if_(work.begin < work.end):
        owns = (work.begin <= position) & (position < work.end) & (work.block == 0)

        def store(is_value: Any, column: Any, chunk: list[Any]) -> None:
            for source, name, wanted in ((keys, "kc", ~is_value), (values, "vc", is_value)):
                to, fits = place_in(table, work.b, work.kv_head, lang.const(0, u32), name)
                with lang.if_(owns & wanted & fits):
                    source.store(to + column, chunk)

        step.fill(items, norms, store)
        part = _Part(tile, work, step, columns, known.step == tile.keys, native)
        lang.barrier()
        part.own_products()
        part.walk(cached_keys, cached_values, position, past)
        part.finish(partial)
    if whole:
        with lang.if_(work.begin >= work.end):
            _leave_nothing(tile, work, partial)


def _leave_nothing(tile: Tile, work: Work, partial: Any) -> None:
    """The results of a part without keys."""
    me = lang.local_id()
    with lang.if_((me < tile.rows) & work.has(me)):
        stats = work.results(me).stats
        partial[stats] = LOWEST
        partial[stats + 1] = 0.0
    for base in range(0, tile.rows * tile.chunks, tile.threads):
        query = (me + base) // tile.chunks
        with lang.if_((query < tile.rows) & work.has(query)):
            column = (me + base) % tile.chunks * WIDTH
            partial.store(work.results(query).sums + column, [0.0] * WIDTH)


kernel: Kernel = Kernel(_rope_split, workgroup=THREADS, name="rope_split", rewritable=True)
