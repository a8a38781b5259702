"""A decoder's rotation and cache in the launch that attends to the parts of its keys, in f32.

A group has a part of a head's keys, and some of the queries that share them. It takes its keys in
tiles, of which most parts have one; each is loaded at once, values too, the first before the
queries are known. Scores: a team of LANES threads has a key at a time; workgroup memory adds its
products up, a thread for each query and key. Values: a thread has a chunk of the head, and every so
many rows.

Before, each group normalises and turns its queries, and the step's key. The groups whose part ends
with the step's own position take key and value from workgroup memory; those of them that have the
first queries write both to the cache. So nothing that a launch writes is read in it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Operand
from centella.ops.attention.masks import LOWEST, Scoring, product_scale
from centella.ops.attention.parts import Known, Work
from centella.ops.attention.rope_cluster import masks_of
from centella.ops.attention.weights import LOG2E
from centella.ops.cache import place_in
from centella.ops.elements import offset_of
from centella.ops.rope import Turn
from centella.ops.rows import fold
from centella.specs import Caps

THREADS = 256
WIDTH = f32.per_chunk
LANES = 8  # threads that share a key, at most
MOST_KEYS = 64  # of a tile
MOST_CHUNKS = 16  # of keys that a thread loads at once, and of values
MOST_PRODUCTS = 2048  # words of workgroup memory
MOST_DIM = 256


def rows_for(dim: int) -> int:
    """Queries whose sums of two teams fit in workgroup memory, a power of two."""
    return max(1 << (MOST_PRODUCTS // (2 * dim)).bit_length() - 1, 1)


class Tile(Struct, frozen=True):
    """Who has what of heads of `dim` elements, for `rows` queries, among so many threads."""

    dim: int
    rows: int
    threads: int = THREADS

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.dim // WIDTH

    @property
    def lanes(self) -> int:
        """Threads that share a key: a power of two that divides its chunks."""
        return min(LANES, self.chunks & -self.chunks)

    @property
    def slots(self) -> int:
        """Teams of those threads, a power of two; those left over repeat the last one's loads."""
        most = MOST_CHUNKS << (self.teams.bit_length() - 1)  # keys whose values are loaded at once
        return min(self.threads // self.lanes, MOST_KEYS, most)

    @property
    def keys(self) -> int:
        """Keys of a tile, the same number for each team."""
        held = self.slots * MOST_CHUNKS * self.lanes // self.chunks
        most = min(
            MOST_KEYS, held, self.teams * MOST_CHUNKS, MOST_PRODUCTS // (self.rows * self.lanes)
        )
        return max(most // self.slots, 1) * self.slots

    @property
    def teams(self) -> int:
        """Rows of values that the group reads side by side."""
        return min(self.threads // self.chunks, max(MOST_PRODUCTS // (self.rows * self.dim), 1))

    @property
    def scratch(self) -> int:
        """Words for the products of a tile and of the step's key, later for sums of values."""
        return max(self.rows * (self.keys + 1) * self.lanes, self.teams * self.rows * self.dim)

    @property
    def words(self) -> int:
        """Words of workgroup memory."""
        own = (self.rows + 2) * self.dim + (self.rows + 1) * self.chunks
        return self.scratch + 2 * self.rows * self.keys + own + (2 + self.teams) * self.rows + 1

    def fits(self, caps: Caps) -> bool:
        """Whether registers and workgroup memory suffice."""
        of_keys = self.keys // self.slots * (self.chunks // self.lanes)
        of_values = -(-self.keys // self.teams)
        # A chunk of a key counts twice: one of a query, which it meets, is in registers, too.
        few = 2 * of_keys + of_values <= 3 * MOST_CHUNKS
        return few and 4 * self.words <= caps.max_shared


class _Cached:
    """Rows of the cache, of which a thread has the same chunks; `kept` are those loaded last.

    Args:
        first: a thread's row of those that are loaded at once, `apart` from its next one.
        columns: of its chunks.
        place: where a key's row begins.
    """

    def __init__(
        self, source: Argument, count: int, first: Any, apart: int, columns: list[Any],
        place: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self._source, self._first, self._apart = source, first, apart
        self._columns, self._place = columns, place
        self.kept: Any = lang.vars(f32, count, WIDTH * len(columns))

    def keys(self, base: Operand) -> list[Any]:
        """A thread's keys of those from one on."""
        return [self._first + (base + n * self._apart) for n in range(len(self.kept))]

    def load(self, base: Operand, end: Operand) -> None:
        """Load the rows from one on, of those before `end`; past the last one it again.

        One condition for all: with one for each, a driver has a load wait for the one before.
        """
        with lang.if_(base < end):
            for key, kept in zip(self.keys(base), self.kept, strict=True):
                safe = lang.minimum(key, end - 1)
                at = self._place(safe)
                loaded = [v for column in self._columns for v in self._source.load(at + column)]
                for var, value in zip(kept, loaded, strict=True):
                    var.set(value)


class _Item(Struct, frozen=True, eq=False):
    """A thread's chunk of one of the step's rows, and what it is multiplied by.

    Attributes:
        row, column: of the step's rows: queries, key, value; inside: whether there is such a one.
        own, partners: what is stored, and what it turns with; factors: of both.
    """

    row: Any
    column: Any
    inside: Any
    own: list[Any]
    partners: list[Any]
    factors: tuple[list[Any], list[Any]]


class _Step:
    """The step's rows in workgroup memory: queries times `scale`, the key, the value."""

    def __init__(self, tile: Tile, scale: Any) -> None:
        self._tile, self._scale = tile, scale
        self._rows = lang.shared(f32, (tile.rows + 2) * tile.dim)
        self._squares = lang.shared(f32, (tile.rows + 1) * tile.chunks)

    def ask(self, work: Work, turn: Turn, x: Any, norms: Any, position: Any) -> list[_Item]:
        """Load what a thread has of the rows, and of tables and norms."""
        count = (self._tile.rows + 2) * self._tile.chunks
        return [self._item(base, work, turn, x, norms, position)
                for base in range(0, count, self._tile.threads)]  # fmt: skip

    def _item(self, base: int, work: Work, turn: Turn, x: Any, norms: Any, position: Any) -> _Item:
        tile, number = self._tile, lang.local_id() + base
        row = lang.minimum(number // tile.chunks, tile.rows + 1)
        column = number % tile.chunks * WIDTH
        asks, value = row < tile.rows, row > tile.rows
        head, _ = work.head_and_query(lang.minimum(row, tile.rows - 1))
        fresh = lang.parameter("heads", u32) + work.kv_head
        fresh = fresh + lang.select(value, lang.parameter("kv_heads", u32), 0)
        start = offset_of([work.b, lang.select(asks, head, fresh), 0], "x")
        columns = [column + e for e in range(WIDTH)]
        each = [column] if turn.interleaved else [column, turn.partner(column)]
        loaded = [x.load(start + c) for c in each]
        weights: list[Any] = []
        if norms is not None:
            which = lang.select(asks, lang.const(0, u32), 1)
            weights = [norms.load(which, c) for c in each]
            if turn.interleaved:
                weights.append(turn.partners(weights[0], [], columns))
        height = lang.parameter("height", u32)
        entries = turn.entries(lang.minimum(position, height - 1), columns)
        partners = turn.partners(loaded[0], loaded[-1], columns)
        factors = turn.factors(entries, columns, position < height, weights)
        inside = number < (tile.rows + 2) * tile.chunks
        return _Item(row, column, inside, loaded[0], partners, factors)

    def fill(
        self, items: list[_Item], norms: Any, store: Callable[[Any, Any, list[Any]], None]
    ) -> None:
        """Compute the rows; the group's threads see them after a barrier.

        Args:
            store: takes whether it is the value, a column, and the key's or the value's chunk.
        """
        tile = self._tile
        if norms is not None:
            for item in items:
                with lang.if_(item.inside & (item.row <= tile.rows)):
                    at = item.row * tile.chunks + item.column // WIDTH
                    self._squares[at] = fold([v * v for v in item.own], operator.add)
            lang.barrier()
        for item in items:
            factor = lang.select(item.row < tile.rows, self._scale, 1.0)
            if norms is not None:
                mean = self._sum(lang.minimum(item.row, tile.rows)) / float(tile.dim)
                factor = factor / lang.sqrt(mean + lang.parameter("eps", f32))
            pairs = zip(item.own, item.partners, *item.factors, strict=True)
            turned = [lang.fma(o, b, v * a) * factor for v, o, a, b in pairs]
            value = item.row > tile.rows
            turned = [lang.select(value, v, t) for v, t in zip(item.own, turned, strict=True)]
            with lang.if_(item.inside):
                self._rows.store(item.row * tile.dim + item.column, turned)
                with lang.if_(item.row >= tile.rows):
                    store(value, item.column, turned)

    def _sum(self, row: Any) -> Any:
        """The sum of a row's squares."""
        chunks = self._tile.chunks
        if chunks % 4:
            return fold([self._squares[row * chunks + n] for n in range(chunks)], operator.add)
        four = [self._squares.load(row * chunks + n) for n in range(0, chunks, 4)]
        return fold([fold(list(c), operator.add) for c in zip(*four, strict=True)], operator.add)

    def row(self, number: int, columns: list[Any]) -> list[Any]:
        """Chunks of a row."""
        at = number * self._tile.dim
        return [v for column in columns for v in self._rows.load(column + at)]


class _Part:
    """A thread's running softmax: sums of a chunk of the head for each query, of its rows.

    Args:
        once: whether a part has one tile, so that nothing shrinks.
    """

    def __init__(
        self, tile: Tile, work: Work, step: _Step, columns: list[Any], once: bool
    ) -> None:  # fmt: skip
        self._tile, self._work, self._step, self._columns = tile, work, step, columns
        self._once = once
        self._scratch = lang.shared(f32, tile.scratch)
        self._scores = lang.shared(f32, tile.rows * tile.keys)
        self._weights = lang.shared(f32, tile.rows * tile.keys)
        self._tops, self._shrinks = (lang.shared(f32, tile.rows) for _ in range(2))
        self._sums: Any = lang.vars(f32, tile.rows, WIDTH, init=0.0)
        self._totals: Any = lang.vars(f32, tile.rows, init=0.0)
        me = lang.local_id()
        self._scores_keys = me < tile.slots * tile.lanes
        self.slot, self.lane = slot_of(tile), me % tile.lanes
        self._works = me < tile.teams * tile.chunks
        self.team, self.column = team_of(tile), me % tile.chunks * WIDTH
        if not once:
            with lang.if_(me < tile.rows):
                self._tops[me] = LOWEST

    def products(self, cached: _Cached) -> None:
        """Leave a thread's products of each query with the tile's keys."""
        tile = self._tile
        with lang.if_(self._scores_keys):
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
            weight = lang.select(score > LOWEST, lang.exp2(score - top), 0.0)
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

    def add(self, base: Any, cached: _Cached, position: Any, past: Any) -> None:
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
                shrink = lang.exp2(self._tops[row] - self._shrinks[row])
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

    def walk(self, keys: _Cached, values: _Cached, position: Any, past: Any) -> None:
        """Take all keys of the part; the first tile of them is loaded."""
        work, step = self._work, self._tile.keys
        if self._once:
            self._take(work.begin, keys, values, position, past)
            return
        for base in lang.range(work.begin, work.end, step):
            self._take(base, keys, values, position, past)
            values.load(base + step, past)
            self.keep_tops()

    def _take(self, base: Any, keys: _Cached, values: _Cached, position: Any, past: Any) -> None:
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
        with lang.if_(self._works):
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


def slot_of(tile: Tile) -> Any:
    """Which key a thread has of those side by side."""
    return lang.minimum(lang.local_id() // tile.lanes, tile.slots - 1)


def team_of(tile: Tile) -> Any:
    """Which row of values a thread has of those side by side; those left over have the last."""
    return lang.minimum(lang.local_id() // tile.chunks, tile.teams - 1)


def _dot(a: list[Any], b: list[Any]) -> Any:
    """In four chains."""
    chains = [x * y for x, y in zip(a[:4], b[:4], strict=True)]
    for n in range(4, len(a)):
        chains[n % 4] = lang.fma(a[n], b[n], chains[n % 4])
    return fold(chains, operator.add)


def _rope_split(
    *, dim: int, rows: int, scoring: Scoring, layout: tuple[tuple[str, bool], ...], blocks: bool,
    known: Known, threads: int, x: Argument, cos: Argument, sin: Argument, starts: Argument,
    keys: Argument, values: Argument, partial: Argument, norms: Argument | None = None,
) -> None:  # fmt: skip
    """A group has a part of the keys of a head.

    Args:
        known: what the program is written for.
    """
    table, masks = masks_of(starts, blocks)
    tile, me = Tile(dim, rows, threads), lang.local_id()
    # Not uniform, so that loads need not wait for the group to meet.
    ahead = Work(masks, scoring, rows, same=lambda value: value, known=known)
    position = lang.bitcast(masks["starts"][ahead.b], u32)
    past = lang.minimum(ahead.end, position)  # where what the cache has so far ends
    step = _Step(tile, product_scale(scoring, LOG2E))
    items = step.ask(ahead, Turn(cos, sin, **dict(layout)), x, norms, position)
    columns = [(me % tile.lanes + n * tile.lanes) * WIDTH for n in range(tile.chunks // tile.lanes)]
    pitches = [lang.parameter(name, u32) for name in ("kl", "vl")]
    cached_keys = _Cached(
        keys, tile.keys // tile.slots, slot_of(tile), tile.slots, columns,
        lambda key: ahead.lines.places(key)[0] + key * pitches[0],
    )  # fmt: skip
    cached_values = _Cached(
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
        part = _Part(tile, work, step, columns, known.step == tile.keys)
        lang.barrier()
        part.own_products()
        part.walk(cached_keys, cached_values, position, past)
        part.finish(partial)


kernel: Kernel = Kernel(_rope_split, workgroup=THREADS, name="rope_split", rewritable=True)
