"""A decoder's rotation, cache and attention in one launch (sm_90 on): the kernel of `rope_attend`.

The groups work as those of `cluster_mma`. While the first keys of the cache are on their way, each
group normalises and turns its queries and the keys of this step, and leaves them in its shared
memory beside the values. The last group of a cluster writes keys and values to the cache, and takes
them from shared memory as one more step: nothing that a launch writes is read in it.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.ops.attention.cluster_mma import Sums
from centella.ops.attention.masks import Scoring, product_scale
from centella.ops.attention.parts import Work
from centella.ops.attention.split_warp import CHUNK, CachedRows, Read, SplitTile, Warp
from centella.ops.attention.weights import LOG2E
from centella.ops.cache import place_in
from centella.ops.elements import offset_of
from centella.ops.rope import Turn
from centella.ops.rows import power_above

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


class Scaled(Struct, frozen=True, eq=False):
    """A head of a token times the factor of its norm and a weight a column."""

    x: Any
    start: Any
    factor: Any
    norms: Any
    which: Any

    def load(self, column: Any) -> list[Any]:
        """A chunk of it from a column on."""
        values = self.x.load(self.start + column)
        if self.norms is None:
            return values  # type: ignore[no-any-return]  # traced
        weights = [self.norms[self.which, column + e] for e in range(len(values))]
        return [v * self.factor * w for v, w in zip(values, weights, strict=True)]


class StepRows:
    """What a step brings, in a group's shared memory: rows of queries, of keys, then of values.

    Args:
        rows: of queries; tokens: of the step.
    """

    def __init__(self, work: Work, dim: int, rows: int, tokens: int) -> None:
        self._work, self._dim, self._rows, self._tokens = work, dim, rows, tokens
        self._pitch = dim // 2 + PAD
        self._memory = lang.shared(u32, (rows + 2 * tokens) * self._pitch)

    def fill(
        self, x: Any, norms: Any, turn: Turn, keys: Any, values: Any, starts: Any, writes: Any
    ) -> None:
        """Compute the rows, a thread a chunk; write keys and values to the cache where it `writes`.

        The group's threads see them after a barrier.
        """
        me, lanes = lang.local_id(), power_above(self._dim // CHUNK)
        together = lang.workgroup_size() // lanes
        last = self._rows + 2 * self._tokens - 1
        for base in range(0, last + 1, together):
            number = me // lanes + base
            column = me % lanes * CHUNK
            inside = (column < self._dim) & (number <= last)
            self._row(
                lang.minimum(number, last), lang.minimum(column, self._dim - CHUNK), inside, lanes,
                x, norms, turn, keys, values, starts, writes,
            )  # fmt: skip

    def _row(
        self, row: Any, column: Any, inside: Any, lanes: int, x: Any, norms: Any, turn: Turn,
        keys: Any, values: Any, starts: Any, writes: Any,
    ) -> None:  # fmt: skip
        work = self._work
        heads, height = lang.parameter("heads", u32), lang.parameter("height", u32)
        kv_heads = lang.parameter("kv_heads", u32)
        asks, own = row < self._rows, row >= self._rows + self._tokens  # a query; a value
        head, token = work.head_and_query(lang.minimum(row, self._rows - 1))
        brought = row - self._rows - lang.select(own, self._tokens, 0)
        token = lang.select(asks, token, brought)
        other = heads + work.kv_head + lang.select(own, kv_heads, 0)
        start = offset_of([work.b, lang.select(asks, head, other), token], "x")
        stored = x.load(start + column)
        factor: Any = None
        if norms is not None:
            total = lang.const(0.0, f32)
            for value in stored:
                total = lang.fma(value, value, total)
            total = lang.select(inside, total, 0.0)
            mask = 1
            while mask < lanes:
                total = total + lang.shuffle_xor(total, mask)
                mask *= 2
            mean = total / lang.cast(lang.parameter("dim", u32), f32)
            factor = 1.0 / lang.sqrt(mean + lang.parameter("eps", f32))
        which = lang.select(asks, 0, lang.const(1, u32))
        source = Scaled(x, start, factor, norms, which)
        position = lang.bitcast(starts[work.b, 0] if starts.rank == 2 else starts[work.b], u32)
        position = position + token
        columns = [column + e for e in range(CHUNK)]
        mine, at = source.load(column), lang.minimum(position, height - 1)
        turned = turn.turned(source, lang.const(0, u32), mine, at, columns)
        turned = turn.passed(turned, mine, columns, position < height)
        packed = [lang.select(own, s, t) for s, t in zip(stored, turned, strict=True)]
        with lang.if_(inside):
            self._memory.store(row * self._pitch + column // 2, x.pack(packed))
            with lang.if_(writes & (row >= self._rows)):
                with lang.if_(own):
                    to, fits = place_in(starts, work.b, work.kv_head, token, "vc")
                    with lang.if_(fits):
                        values.store(to + column, packed)
                with lang.else_():
                    to, fits = place_in(starts, work.b, work.kv_head, token, "kc")
                    with lang.if_(fits):
                        keys.store(to + column, packed)

    def query(self, row: Any, element: Any) -> list[Any]:
        """The words of eight elements of a query."""
        at = lang.minimum(row, self._rows - 1) * self._pitch + element // 2
        return self._memory.load(at)

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
    work: Work, masks: dict[str, Any], last: Any, writes: Any, *, tile: SplitTile, dim: int,
    rows: int, tokens: int, scoring: Scoring, turn: Turn, x: Any, norms: Any, keys: Any,
    values: Any, table: Any,
) -> Warp:  # fmt: skip
    """What a warp has of its group's part: of the cache, and where it is the `last` of the step.

    Args:
        writes: whether the group writes the step's keys and values.
    """
    scale = product_scale(scoring, LOG2E)
    start = lang.workgroup_uniform(lang.bitcast(masks["starts"][work.b], u32))
    work.end = lang.minimum(work.end, start)  # what the cache has so far
    warp, cached = Warp(work, dim, keys.dtype), CachedRows(work, keys, values)
    with lang.if_(work.begin < work.end):
        warp.load_keys(work.begin, cached)
        warp.load_values(work.begin, cached)
    step = StepRows(work, dim, rows, tokens)
    step.fill(x, norms, turn, keys, values, table, writes)
    lang.barrier()
    warp.load_queries(step.query)
    with lang.if_(work.begin < work.end):
        warp.walk(work.begin, work.end, tile.step, scale, cached)
    with lang.if_(last):
        warp.load_keys(start, step)
        warp.load_values(start, step)
        warp.score()
        warp.mix(warp.soften(start, scale, work.all_end))
    return warp


def _rope_attend(
    *, tile: SplitTile, splits: int, dim: int, rows: int, tokens: int, scoring: Scoring,
    layout: tuple[tuple[str, bool], ...], x: Argument, cos: Argument, sin: Argument,
    starts: Argument, y: Argument, keys: Argument, values: Argument, norms: Argument | None = None,
    blocks: bool, early: bool,
) -> None:  # fmt: skip
    if splits > 1:
        lang.ptx.cluster(splits)
    lang.ptx.resident(tile.together)
    if early:
        lang.ptx.launch_dependents()
    table, masks = masks_of(starts, blocks)
    work = Work(masks, scoring, rows)
    last = work.split == splits - 1
    warp = walked(
        work, masks, last, last, tile=tile, dim=dim, rows=rows, tokens=tokens, scoring=scoring,
        turn=Turn(cos, sin, **dict(layout)), x=x, norms=norms, keys=keys, values=values,
        table=table,
    )  # fmt: skip
    sums = Sums(splits, rows, dim)
    sums.gather(warp, tile)
    sums.write(work, masks, tile, y)


kernel: Kernel = Kernel(_rope_attend, workgroup=128, name="rope_attend")
