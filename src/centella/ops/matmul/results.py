"""How results of the product by warpgroups leave: from registers, or through shared memory.

Sums are fragments of 64 rows; each has an epilogue of its own columns, which acts in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import u32
from centella.lang.values import Expr, Operand
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.tiled import store_words
from centella.ops.operands import NATIVE
from centella.ops.rows import chunk_of

M, K = 64, 16  # of one product


class Finish(Struct, frozen=True, eq=False):
    """The epilogue of a tile's columns: of eight a thread has two neighbours in two rows.

    `gated`: half of the sums are gates, of the columns that the other half multiplies.
    `ready`: by column, epilogues whose vectors are loaded.
    `added`: by column, fragment and how far down, residuals that are loaded.
    """

    batch: Any
    row: Any
    column: Any
    sums: list[Any]
    columns: range
    p: dict[str, Any]
    activation: str
    extra: dict[str, Any]
    words: tuple[str, ...]
    gated: bool = False
    ready: dict[int, Epilogue] = {}
    added: dict[tuple[int, int, int], list[Any]] = {}

    def ask(self) -> None:
        """Load the residual: behind the sums its memory is a microsecond away."""
        for j in self.columns:
            finish = self.ready[j] = self._column(j)
            for i, below, row, _ in self._places(j):
                self.added[j, i, below] = finish.residual(row)

    def begin(self) -> None:
        """Load what columns have: while products are under way, that takes no time."""
        for j in self.columns:
            self.ready[j] = self._column(j)

    def stage(self, ring: Any, slot: Any, brought: bool) -> None:
        """Write all to shared memory, four matrices of a fragment, sixteen columns, at a time.

        Args:
            brought: the residual lies where they go.
        """
        first = chunk_of(ring, slot)
        rounded = [lang.ptx.Fragment(ring.dtype, (M, K)) for _ in self.sums]
        for j in self.columns[::2]:
            if brought:
                self._read(ring, ring.right(first, (j - self.columns.start) // 8), j)
            for right in range(2):
                for i, below, out in self._pairs(j + 8 * right, self._column(j + 8 * right)):
                    rounded[i][below % M // 8 + 2 * right] = tuple(out)
            chunk = ring.right(first, (j - self.columns.start) // 8)
            for i, fragment in enumerate(rounded):
                lang.ptx.stmatrix(ring, chunk + ring.down(i * M), fragment)

    def _read(self, ring: Any, chunk: Any, j: int) -> None:
        """The residual of sixteen columns from j on, as the sums lie in registers."""
        for i in range(len(self.sums)):
            lines = lang.ptx.Fragment(ring.dtype, (16, K))
            lang.ptx.ldmatrix(ring, chunk + ring.down(i * M), lines)
            for n in range(4):
                self.added[j + n // 2 * 8, i, i * M + n % 2 * 8] = list(lines[n])

    def _column(self, j: int) -> Epilogue:
        """The epilogue of this thread's two columns of eight; past the edge the last one's."""
        if j in self.ready:
            return self.ready[j]
        p, across = self.p, self.sums[0].place(j // 2)[1]
        last = lang.maximum(p["n"], 2) - 2 if self.words else p["n"] - 1
        column = lang.minimum(self.column + across, last)
        return self.epilogue(column, self.words)

    def epilogue(self, column: Any, words: tuple[str, ...] = ()) -> Epilogue:
        """That of a column and the next."""
        n = self.p["n"]
        return Epilogue(self.activation, self.extra, column, 2, n, words, self.gated, NATIVE)

    def sums_of(self, fragment: Any, pair: int) -> list[Expr]:
        """Those of a pair of outputs: two of its registers, with a gate two in each half."""
        firsts = (pair, pair + fragment.registers // 2) if self.gated else (pair,)
        return [fragment[first + e] for first in firsts for e in range(2)]

    def _places(self, j: int) -> Iterator[tuple[int, int, Any, int]]:
        """Of eight columns from j on: fragment, how far down, the row there, and which sums."""
        line = self.sums[0].place(0)[0]
        for i in range(len(self.sums)):
            for pair in (j // 2, j // 2 + 2):
                below = i * M + pair // 2 % 2 * 8
                yield i, below, lang.minimum(self.row + line + below, self.p["m"] - 1), pair

    def _pairs(self, j: int, finish: Epilogue) -> Iterator[tuple[int, int, list[Expr]]]:
        """Of eight columns from j on: fragment, how far down, and the two results there."""
        for i, below, row, pair in self._places(j):
            sums = self.sums_of(self.sums[i], pair)
            yield i, below, finish(sums, row, self.added.get((j, i, below)))


class Stored(Struct, frozen=True, eq=False):
    """Results that leave from the registers, word by word: what is inside of C."""

    y: Any
    p: dict[str, Any]

    def bring(self, row: Any, column: Any, across: int, mine: Any, leader: Any) -> None:
        """Nothing: a residual is loaded."""

    def begin(self, parts: list[Finish]) -> None:
        """Nothing: a thread past the edge has no columns."""

    def take(self, part: int, whole: Finish, mine: Any, leader: Any) -> None:
        """Write a part's columns."""
        p = self.p
        for j in whole.columns:
            column = whole.column + whole.sums[0].place(j // 2)[1]
            with lang.if_(column < p["n"]):
                finish = whole.epilogue(column)
                for i, line in enumerate(whole.sums):
                    for pair in (j // 2, j // 2 + 2):
                        row = whole.row + (i * M + line.place(pair)[0])
                        with lang.if_(row < p["m"]):
                            out = finish(whole.sums_of(line, pair), row)
                            start = whole.batch * p["sy"] + row * p["ldy"] + column
                            store_words(self.y, start, out, column, p["n"])

    def close(self, leader: Any) -> None:
        """Nothing is under way."""


class Staged:
    """Results on their way through shared memory: each consumer has places of its own there.

    Args:
        shape: places of all consumers, rows, columns of one; places: of each consumer.
        residual: what is brought there before, while products are under way; None: nothing.
        come: barriers that it counts at, one a consumer.
    """

    def __init__(
        self, y: Any, shape: tuple[int, int, int], places: int, p: dict[str, Expr], residual: Any,
        come: Any,
    ) -> None:  # fmt: skip
        self.ring: lang.ptx.SharedTile = lang.ptx.SharedTile(y.dtype, shape)
        self.places: int = places
        extents = (p["n"], p["m"], lang.parameter("batches", u32))
        self.map: Any = lang.ptx.TensorMap(y, self.ring, extents, (p["ldy"], p["sy"]))
        self.residual: Any = None
        if residual is not None:
            pitch = lang.parameter("ldr", u32)
            self.residual = lang.ptx.TensorMap(residual, self.ring, (p["n"], p["m"]), (pitch,))
            self.come: Any = come
            self.turn: Any = lang.var(0, u32)

    def bring(self, row: Any, column: Any, across: int, mine: Any, leader: Any) -> None:
        """Have a tile's residual copied to its places, once the last results have left."""
        if self.residual is None:
            return
        ring = self.ring
        with lang.if_(leader):
            lang.ptx.tma_store_wait(0)
            self.come.expect(mine, 2 * ring.rows * across)
            for part in range(across // ring.columns):
                at = (column + part * ring.columns, row)
                lang.ptx.tma_load(self.residual, at, mine * self.places + part, self.come, mine)

    def begin(self, parts: list[Finish]) -> None:
        """Load what the first ones have, the last products under way: of all the widest spill."""
        if not parts[0].ready:
            parts[0].begin()

    def close(self, leader: Operand) -> None:
        """The last ones leave before the group ends."""
        with lang.if_(leader):
            lang.ptx.tma_store_wait(0)

    def take(self, part: int, whole: Finish, mine: Any, leader: Any) -> None:
        """Write a part's columns to their place, once it is free, and have them copied."""
        brought = self.residual is not None
        if not brought:
            with lang.if_(leader):
                lang.ptx.tma_store_wait(0)
            lang.ptx.warpgroup_barrier()
        elif not part:
            self.come.wait(mine, self.turn)
            self.turn.set(self.turn ^ 1)
        slot = mine if self.places == 1 else mine * self.places + part
        whole.stage(self.ring, slot, brought)
        lang.ptx.async_fence()
        lang.ptx.warpgroup_barrier()
        with lang.if_(leader):
            at = (whole.column + whole.columns.start, whole.row, whole.batch)
            lang.ptx.tma_store(self.map, at, slot)
            lang.ptx.tma_store_commit()
