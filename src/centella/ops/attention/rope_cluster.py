"""A decoder's rotation, cache and attention in one launch (sm_90 on): the kernel of `rope_attend`.

The groups work as those of `cluster_mma`. All that does not depend on the launch before is asked
for before that is over: the first keys and values of the cache, tables, weights of norms. Then each
group normalises and turns its queries and the keys of this step, and leaves them in its shared
memory beside the values. From there they replace, in registers, what the cache has in their places.
The last group of a cluster writes them to the cache: nothing that a launch writes is read in it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, i32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.ops.attention.cluster_mma import Sums
from centella.ops.attention.masks import Scoring, product_scale
from centella.ops.attention.parts import Work
from centella.ops.attention.split_warp import CHUNK, CachedRows, Read, Warp
from centella.ops.attention.warp_sums import SplitTile
from centella.ops.attention.weights import LOG2E
from centella.ops.cache import place_in
from centella.ops.elements import offset_of
from centella.ops.rope import Turn
from centella.ops.rows import fold, over_lanes, power_above

PAD = 4  # words after a row in shared memory, off the banks of the row before


class BlockTable(Struct, frozen=True, eq=False):
    """A table of blocks in one row of memory, as `place_in` reads it: a start, then the blocks."""

    memory: Any
    rank: int = 2

    def __getitem__(self, key: tuple[Any, Any]) -> Any:
        b, entry = key
        return self.memory[b * lang.parameter("tb", u32) + entry]


class _Starts(Struct, frozen=True, eq=False):
    """The starts of a table, as masks have them."""

    table: BlockTable

    def __getitem__(self, b: Any) -> Any:
        return self.table[b, 0]


class _Blocks(Struct, frozen=True, eq=False):
    """The blocks of a table, as masks have them: all rows beside each other."""

    table: BlockTable

    def __getitem__(self, at: Any) -> Any:
        return self.table.memory[at + 1]


def masks_of(starts: Any, blocks: bool) -> tuple[Any, dict[str, Any]]:
    """What `place_in` reads, and the masks of attention: of starts, or of a table in a row."""
    if not blocks:
        return starts, {"starts": starts}
    table = BlockTable(starts)
    return table, {"starts": _Starts(table), "blocks": _Blocks(table)}


class _Chunk(Struct, frozen=True, eq=False):
    """What a thread knows of its chunk of a row before there is x.

    Attributes:
        row, column: of the step's rows; inside: whether there is such a one.
        fresh: of a key or value, not of a query; value: of a value.
        start: of its row in x; turns: whether the tables have its position.
        entries: of the tables; weights: bits of its norm's, and of the chunk that it turns with.
        to, fits: where keys and values are written, and whether there is a place.
        position: of its token in the sequence.
    """

    row: Any
    column: Any
    inside: Any
    fresh: Any
    value: Any
    start: Any
    turns: Any
    entries: Any
    weights: list[Any]
    to: Any
    fits: Any
    position: Any


class StepRows:
    """What a step brings, in a group's shared memory: rows of queries, of keys, then of values.

    A thread has a chunk of a row. What it needs beside x is asked for at once (`StepRows(...)`).

    Args:
        rows: of queries; tokens: of the step.
    """

    def __init__(
        self, work: Work, dim: int, rows: int, tokens: int, turn: Turn, norms: Any, starts: Any
    ) -> None:
        self._work, self._dim, self._rows, self._tokens = work, dim, rows, tokens
        self._turn, self._norms, self._starts = turn, norms, starts
        self._pitch = dim // 2 + PAD
        self._memory = lang.shared(u32, (rows + 2 * tokens) * self._pitch)
        self._lanes = power_above(dim // CHUNK)
        self._first = self._chunk(0)

    def _chunk(self, base: int) -> _Chunk:
        """Of the rows from one on."""
        work, turn, lanes = self._work, self._turn, self._lanes
        me, last = lang.local_id(), self._rows + 2 * self._tokens - 1
        number, column = me // lanes + base, me % lanes * CHUNK
        inside = (column < self._dim) & (number <= last)
        row, column = lang.minimum(number, last), lang.minimum(column, self._dim - CHUNK)
        fresh, value = row >= self._rows, row >= self._rows + self._tokens
        head, token = work.head_and_query(lang.minimum(row, self._rows - 1))
        brought = row - self._rows - lang.select(value, self._tokens, 0)
        token = lang.select(fresh, brought, token)
        other = lang.parameter("heads", u32) + work.kv_head
        other = other + lang.select(value, lang.parameter("kv_heads", u32), 0)
        start = offset_of([work.b, lang.select(fresh, other, head), token], "x")
        starts, height = self._starts, lang.parameter("height", u32)
        position = lang.bitcast(starts[work.b, 0] if starts.rank == 2 else starts[work.b], u32)
        position = position + token
        columns = [column + e for e in range(CHUNK)]
        entries = turn.entries(lang.minimum(position, height - 1), columns)
        weights: list[Any] = []
        if self._norms is not None:
            each = [column] if turn.interleaved else [column, turn.partner(column)]
            weights = [self._weights(lang.select(fresh, lang.const(1, u32), 0), c) for c in each]
        place = [place_in(starts, work.b, work.kv_head, token, name) for name in ("kc", "vc")]
        to, fits = (lang.select(value, v, k) for k, v in zip(*place, strict=True))
        return _Chunk(row, column, inside, fresh, value, start, position < height, entries,
                      weights, to + column, fits, position)  # fmt: skip

    def _weights(self, which: Any, column: Any) -> list[Any]:
        """A chunk of a norm's weights, as it is stored."""
        norms, per = self._norms, self._norms.dtype.per_chunk
        return [norms.load_bits(which, column + e) for e in range(0, CHUNK, per)]

    def _columns(self, chunk: _Chunk) -> list[Any]:
        return [chunk.column + e for e in range(CHUNK)]

    def _factors_of(self, chunk: _Chunk) -> tuple[list[Any], list[Any]]:
        """What a chunk and its partner are multiplied by."""
        weights = [[w for bits in each for w in self._norms.unpack(bits)] for each in chunk.weights]
        if weights and self._turn.interleaved:
            weights.append(self._turn.partners(weights[0], [], self._columns(chunk)))
        return self._turn.factors(chunk.entries, self._columns(chunk), chunk.turns, weights)

    def fill(
        self, x: Any, keys: Any, values: Any, writes: Callable[[Any], Any], early: bool
    ) -> None:
        """Compute the rows; write keys and values to the cache.

        The group's threads see them after a barrier.

        Args:
            writes: whether those of a position are this group's to write.
            early: the launches before are waited for behind what does not need them, and the next
                one is let in at once.
        """
        if early:
            lang.ptx.launch_dependents()
        factors = self._factors_of(self._first)
        if early:
            lang.ptx.await_launches()
        together = lang.workgroup_size() // self._lanes
        self._row(self._first, factors, x, keys, values, writes)
        for base in range(together, self._rows + 2 * self._tokens, together):
            chunk = self._chunk(base)
            self._row(chunk, self._factors_of(chunk), x, keys, values, writes)

    def _row(
        self, chunk: _Chunk, factors: tuple[list[Any], list[Any]], x: Any, keys: Any, values: Any,
        writes: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        turn, column = self._turn, chunk.column
        each = [column] if turn.interleaved else [column, turn.partner(column)]
        stored = [x.load_bits(chunk.start + c) for c in each]
        own, theirs = (x.unpack(words) for words in (stored[0], stored[-1]))
        partners = turn.partners(own, theirs, self._columns(chunk))
        pairs = zip(own, partners, *factors, strict=True)
        turned = [lang.fma(o, b, v * a) for v, o, a, b in pairs]
        if self._norms is not None:
            total = fold([v * v for v in own], operator.add)
            total = over_lanes(lang.select(chunk.inside, total, 0.0), self._lanes)
            mean = total * (1.0 / self._dim)
            factor = lang.ptx.rsqrt(mean + lang.parameter("eps", f32))
            turned = [v * factor for v in turned]
        words = [
            lang.select(chunk.value, s, t) for s, t in zip(stored[0], x.pack(turned), strict=True)
        ]
        with lang.if_(chunk.inside):
            self._memory.store(chunk.row * self._pitch + column // 2, words)
            with lang.if_(writes(chunk.position) & chunk.fresh & chunk.fits):
                packed = x.unpack(words)
                with lang.if_(chunk.value):
                    values.store(chunk.to, packed)
                with lang.else_():
                    keys.store(chunk.to, packed)

    def query(self, row: Any, element: Any) -> list[Any]:
        """The words of eight elements of a query."""
        at = lang.minimum(row, self._rows - 1) * self._pitch + element // 2
        return self._memory.load(at)

    def word(self, row: Any, element: Any) -> Any:
        """The word of two elements of a query."""
        return self._memory[lang.minimum(row, self._rows - 1) * self._pitch + element // 2]

    def keys(self, first: Any) -> Read:
        """As of `RowSource`; `first` is the first key of the step."""
        return self._reader(first, self._rows)

    def values(self, first: Any) -> Read:
        """As of `RowSource`."""
        return self._reader(first, self._rows + self._tokens)

    def _reader(self, first: Any, row: int) -> Read:
        def read(key: Any, element: Any) -> list[Any]:
            token = lang.minimum(key - first, self._tokens - 1)
            at = (token + row) * self._pitch + element // 2
            return self._memory.load(at)

        return read


def walked(
    work: Work, masks: dict[str, Any], writes: Any, *, tile: RopeTile, dim: int, rows: int,
    tokens: int, scoring: Scoring, turn: Turn, x: Any, norms: Any, keys: Any, values: Any,
    table: Any,
) -> Warp:  # fmt: skip
    """What a warp has of its group's part of the keys, the step's among them.

    The past is asked for before the launch before is over: it has been written by steps before.

    Args:
        writes: whether the group writes the step's keys and values.
    """
    scale = product_scale(scoring, LOG2E)
    start = lang.workgroup_uniform(masks["starts"][work.b])
    past = lang.bitcast(lang.maximum(start, 0), u32)
    past = lang.minimum(work.end, past)  # where what the cache has so far ends
    warp, cached = Warp(work, dim, keys.dtype), CachedRows(work, keys, values, past)
    with lang.if_(work.begin < past):
        warp.load_keys(work.begin, cached)
        warp.load_values(work.begin, cached)
    step = StepRows(work, dim, rows, tokens, turn, norms, table)
    step.fill(x, keys, values, lambda _: writes, tile.early)
    lang.barrier()
    warp.begin()
    for first in lang.range(work.begin, work.end, tile.split.step):
        after = first + tile.split.step
        fresh = lang.bitcast(after, i32) > start
        with lang.if_(fresh):
            warp.load_keys(first, step, start)
        warp.load_queries(step.query)
        warp.score()
        with lang.if_(after < past):
            warp.load_keys(after, cached)
        counted = warp.soften(first, scale)
        with lang.if_(fresh):
            warp.load_values(first, step, start)
        warp.mix(counted)
        with lang.if_(after < past):
            warp.load_values(after, cached)
    return warp


class RopeTile(Struct, frozen=True):
    """How a group works, and how its launch meets those beside it.

    Attributes:
        early: the past is asked for before the launches before are over, and the next launch may
            begin at once.
    """

    split: SplitTile
    early: bool


def _rope_attend(
    *, tile: RopeTile, splits: int, dim: int, rows: int, tokens: int, scoring: Scoring,
    layout: tuple[tuple[str, bool], ...], x: Argument, cos: Argument, sin: Argument,
    starts: Argument, y: Argument, keys: Argument, values: Argument, norms: Argument | None = None,
    blocks: bool,
) -> None:  # fmt: skip
    if splits > 1:
        lang.ptx.cluster(splits)
    lang.ptx.resident(tile.split.together)
    sums = Sums(splits, rows, dim)
    table, masks = masks_of(starts, blocks)
    work = Work(masks, scoring, rows, tokens == 1)
    warp = walked(
        work, masks, work.split == splits - 1, tile=tile, dim=dim, rows=rows, tokens=tokens,
        scoring=scoring, turn=Turn(cos, sin, **dict(layout)), x=x, norms=norms, keys=keys,
        values=values, table=table,
    )  # fmt: skip
    sums.gather(warp, tile.split)
    sums.write(work, masks, tile.split, y)


kernel: Kernel = Kernel(_rope_attend, workgroup=128, name="rope_attend")
