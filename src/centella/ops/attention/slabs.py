"""How slabs of queries, keys and values come to shared memory, each while another is worked on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella import lang
from centella.dtypes import u32
from centella.lang.memory import Shared
from centella.lang.values import Expr, Operand
from centella.ops.attention.lines import load_piece, piece_of
from centella.ops.attention.tiles import Tile

STAGES = 2  # slabs in shared memory


class Rows:
    """Rows of queries, keys or values on their way from global memory to a slab.

    Args:
        rows: of a slab; across: elements of a row in it.
        turn: whether the slab has the elements outermost (then it is `depth` of them wide).
    """

    def __init__(
        self, source: Any, tile: Tile, rows: int, across: int, turn: bool, vector: bool, pitch: Any,
        dim: int,
    ) -> None:  # fmt: skip
        self._source, self._pitch = source, pitch
        self._tile, self._rows, self._turn, self._dim = tile, rows, turn, dim
        self._width = piece_of(source, vector)
        each = across // self._width
        self._total = rows * each
        count = -(-self._total // tile.threads)
        index = [lang.local_id() + i * tile.threads for i in range(count)]
        self._pieces = [(at, at // each, at % each * self._width) for at in index]

    def fetch(
        self, start: Any, first: Any, last: Any, element: Any, counts: Any = None,
        scale_of: Callable[[Any], Any] = lambda _: None,
    ) -> list[list[Any]]:  # fmt: skip
        """This thread's pieces of the slab of rows from `first` on, none past row `last`.

        Args:
            start: where row 0 begins.
            element: the first one of a turned slab.
            counts: which rows count; the others become zeros.
            scale_of: the scale of a row of i8.
        """
        fetched: list[list[Any]] = []
        end = (self._dim - 1) // self._width * self._width
        for _, row, column in self._pieces:
            at = element + column
            safe = at if self._whole else lang.minimum(at, end)
            inside = lang.minimum(first + row, last)
            where = start + inside * self._pitch + safe
            values = load_piece(self._source, where, self._width, scale_of(inside))
            if self._turn and not self._whole:
                values = [lang.select(at + j < self._dim, v, 0.0) for j, v in enumerate(values)]
            if counts is not None:
                counted = counts(first + row)
                values = [lang.select(counted, v, 0.0) for v in values]
            fetched.append(values)
        return fetched

    @property
    def _whole(self) -> bool:
        """Whether every piece of every slab lies within the head."""
        return self._dim % (self._tile.depth if self._turn else self._tile.columns) == 0

    def put(self, fetched: list[list[Any]], slab: Any, words: Any) -> None:
        """Store the pieces into the slab that begins at `words`."""
        for (index, row, column), values in zip(self._pieces, fetched, strict=True):
            if (len(self._pieces) * self._tile.threads) == self._total:
                self._put(values, slab, words, row, column)
            else:
                with lang.if_(index < self._total):
                    self._put(values, slab, words, row, column)

    def _put(
        self, values: list[Expr], slab: Shared, words: Operand, row: Operand, column: Operand
    ) -> None:
        tile = self._tile
        if not self._turn:
            at = words + row * tile.columns + column
            if self._width == 1:
                slab[at] = values[0]
            for j in range(0, self._width if self._width > 1 else 0, 4):
                slab.store(at + j, values[j : j + 4])
            return
        at = words + column * self._rows + column // 4 * tile.pad + row
        for j, value in enumerate(values):
            slab[at + (j * self._rows + j // 4 * tile.pad)] = value


def steps(
    count: int, fetch: Callable[[Any], Any], put: Callable[[Any, Any], None],
    work: Callable[[Any, Any], None], tile: Tile, before: Callable[[], None] = lambda: None,
    meet: bool = True,
) -> None:  # fmt: skip
    """Work on slabs in turn, each on its way while the one before is worked on.

    Args:
        fetch: of the slab that begins at an element or key.
        work: of slab i in a stage.
        before: done once the first slab is on its way.
        meet: False where a barrier follows before a slab is written again.
    """
    zero = lang.const(0, u32)
    fetched = fetch(zero)
    before()
    put(fetched, zero)
    lang.barrier()
    unroll = tile.unroll if count % tile.unroll == 0 else 1
    for first in lang.range(zero, count, unroll):
        for u in range(unroll):
            i = first + u
            stage = lang.const(u, u32) if unroll == STAGES else i & 1
            if count > 1:
                fetched = fetch(lang.minimum(i + 1, count - 1) * tile.depth)
            work(i, stage)
            if count > 1:
                with lang.if_(i + 1 < count):
                    put(fetched, 1 - stage)
            if meet or count > 1:
                lang.barrier()
