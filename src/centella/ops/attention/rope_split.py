"""A decoder's rotation and cache in the launch that attends to the parts of its keys, in f32.

The groups work as those of `split`, over the keys that the cache has. Before, each normalises and
turns its queries. The groups whose part ends with the step's own position do so with its key, too,
and take it from workgroup memory as the last one; those of them that have the first queries write
key and value to the cache. So nothing that a launch writes is read in it.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import DType, f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument, Shared
from centella.lang.values import Expr, Operand
from centella.ops.attention.masks import Scoring, product_scale
from centella.ops.attention.parts import Work
from centella.ops.attention.rope_cluster import masks_of
from centella.ops.attention.split import THREADS, Layout, Thread
from centella.ops.attention.weights import LOG2E
from centella.ops.cache import place_in
from centella.ops.elements import offset_of
from centella.ops.rope import Turn

WIDTH = f32.per_chunk


def words_of(lay: Layout) -> int:
    """Words of workgroup memory."""
    own = lay.teams * (lay.scores + lay.rows)
    return lay.scratch + own + lay.dim + (lay.rows + 1) * lay.dim // WIDTH


class _Rows(Struct, frozen=True, eq=False):
    """Rows in workgroup memory, as a thread loads those of a tensor."""

    memory: Shared
    dtype: DType = f32

    def load(self, start: Operand) -> list[Expr]:
        """Four elements."""
        return self.memory.load(start)


class _Scaled(Struct, frozen=True, eq=False):
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


class _Step:
    """The queries of a group and the step's key, in workgroup memory.

    Queries lie where partial products will be: they are in registers before.

    Args:
        owns: whether the group has the step's key among its own.
    """

    def __init__(
        self, work: Work, my: Thread, x: Argument, norms: Argument | None, owns: Operand
    ) -> None:  # fmt: skip
        self._work, self._my, self._x, self._norms, self._owns = work, my, x, norms, owns
        self._chunks = my.lay.dim // WIDTH
        self._key = lang.shared(f32, my.lay.dim)
        self._squares = lang.shared(f32, (my.lay.rows + 1) * self._chunks)

    def _items(self) -> list[tuple[Operand, Operand, Operand, Operand]]:
        """A thread's chunks of the rows: number, row, column, and whether there is such a one."""
        last = (self._my.lay.rows + 1) * self._chunks - 1
        numbers = [self._my.me + base for base in range(0, last + 1, THREADS)]
        safe = [lang.minimum(n, last) for n in numbers]
        return [(n, n // self._chunks, n % self._chunks * WIDTH, at <= last)
                for at, n in zip(numbers, safe, strict=True)]  # fmt: skip

    def _start(self, row: Operand) -> Any:
        """Where a row begins in x: a query's, or after them the key's."""
        rows = self._my.lay.rows
        head, _ = self._work.head_and_query(lang.minimum(row, rows - 1))
        key = lang.parameter("heads", u32) + self._work.kv_head
        return offset_of([self._work.b, lang.select(row < rows, head, key), 0], "x")

    def _factor(self, row: Operand) -> Operand:
        """What a row is multiplied by before the weights of its norm."""
        total, first = lang.const(0.0, f32), row * self._chunks
        whole = self._chunks % 4 == 0
        for n in range(0, self._chunks, 4 if whole else 1):
            squares = self._squares.load(first + n) if whole else [self._squares[first + n]]
            for value in squares:
                total = total + value
        mean = total / lang.cast(lang.parameter("dim", u32), f32)
        return 1.0 / lang.sqrt(mean + lang.parameter("eps", f32))

    def fill(
        self, turn: Turn, keys: Argument, values: Argument, starts: Any, position: Operand
    ) -> None:  # fmt: skip
        """Compute the rows; the group's threads see them, and key and value are in the cache."""
        if self._norms is not None:
            for number, row, column, inside in self._items():
                total = lang.const(0.0, f32)
                for value in self._x.load(self._start(row) + column):
                    total = lang.fma(value, value, total)
                with lang.if_(inside):
                    self._squares[number] = total
            lang.barrier()
        work, rows, height = self._work, self._my.lay.rows, lang.parameter("height", u32)
        at, writes = lang.minimum(position, height - 1), self._owns & (work.block == 0)
        zero = lang.const(0, u32)
        for _, row, column, inside in self._items():
            asks = row < rows
            factor = None if self._norms is None else self._factor(row)
            which = lang.select(asks, zero, lang.const(1, u32))
            source = _Scaled(self._x, self._start(row), factor, self._norms, which)
            own, columns = source.load(column), [column + e for e in range(WIDTH)]
            turned = turn.turned(source, zero, own, turn.entries(at, columns), columns)
            turned = turn.passed(turned, own, columns, position < height)
            with lang.if_(inside & asks):
                self._my.scratch.store(row * self._my.lay.dim + column, turned)
            with lang.if_(inside & (row == rows) & self._owns):
                self._key.store(column, turned)
                to, fits = place_in(starts, work.b, work.kv_head, zero, "kc")
                with lang.if_(writes & fits):
                    keys.store(to + column, turned)
        for base in range(0, self._chunks, THREADS):
            column = (self._my.me + base) * WIDTH
            with lang.if_(writes & (column < self._my.lay.dim)):
                to, fits = place_in(starts, work.b, work.kv_head, zero, "vc")
                with lang.if_(fits):
                    values.store(to + column, self._x.load(self._value() + column))
        lang.barrier()

    def _value(self) -> Any:
        kv_heads = lang.parameter("kv_heads", u32)
        head = lang.parameter("heads", u32) + kv_heads + self._work.kv_head
        return offset_of([self._work.b, head, 0], "x")

    def queries(self, scale: Any) -> list[list[Any]]:
        """A thread's elements of each query, times the factor of scores."""
        lay, memory = self._my.lay, _Rows(self._my.scratch)
        places = (lang.const(row * lay.dim, u32) for row in range(lay.rows))
        queries = [[x * scale for x in self._my.load(memory, at, True, None)] for at in places]
        lang.barrier()
        return queries

    def take(self, query: list[list[Any]], position: Operand) -> None:
        """Take the step's key: the first of the first team."""
        my, zero = self._my, lang.const(0, u32)
        key = my.load(_Rows(self._key), zero, True, None)
        value = my.load(self._x, self._value(), False, None)
        ahead = [position + j * my.lay.teams for j in range(my.lay.keys)]
        both = ([row] * my.lay.keys for row in (key, value))
        my.take(self._work, ahead, query, *both, end=position + 1)


def _rope_split(
    *, dim: int, rows: int, scoring: Scoring, layout: tuple[tuple[str, bool], ...], blocks: bool,
    x: Argument, cos: Argument, sin: Argument, starts: Argument, keys: Argument, values: Argument,
    partial: Argument, norms: Argument | None = None,
) -> None:  # fmt: skip
    table, masks = masks_of(starts, blocks)
    work, my = Work(masks, scoring, rows), Thread(Layout(dim, rows, WIDTH))
    with lang.if_(work.begin < work.end):
        position = lang.workgroup_uniform(lang.bitcast(masks["starts"][work.b], u32))
        owns = (work.begin <= position) & (position < work.end)
        work.end = lang.minimum(work.end, position)  # what the cache has so far
        step = _Step(work, my, x, norms, owns)
        step.fill(Turn(cos, sin, **dict(layout)), keys, values, table, position)
        query = step.queries(product_scale(scoring, LOG2E))
        with lang.if_(work.begin < work.end):
            my.read(work, query, keys, values)
        with lang.if_(owns):
            step.take(query, position)
        my.finish(work, partial)


kernel: Kernel = Kernel(_rope_split, workgroup=THREADS, name="rope_split", rewritable=True)
