"""Rows that a group of `rope_split.py` loads: cached ones in registers, the step's in memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.lang.memory import Argument
from centella.lang.values import Operand
from centella.ops.attention.parts import Work
from centella.ops.attention.rope_split_tile import WIDTH, Tile
from centella.ops.elements import offset_of
from centella.ops.rope import Turn
from centella.ops.rows import fold


class CachedRows:
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


class StepRows:
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
