"""What a warp of the decoding kernels has of the softmax of its queries (PTX alone).

The scores of sixteen keys become weights, relative to the largest so far, and the weighted values
are added up; the warps of a group add up what they have. How keys and values come to the registers
of a product is left to `split_warp` (straight from memory) and `ring_warp` (by the copy engine).

- Scores are Q K^T. Query g has its scores in threads `4 g` to `4 g + 3`.
- Sums are V^T P^T. The scores of query g are where its weights are wanted.
- The sum of weights is one more row of that product, a row of ones. What shrinks query g's sums
  where its maximum grew is spread from its threads to those that have the sums by a product of
  ones too: maxima are whole, so that the factor, a power of two, is exact in bf16.

Of bf16 weights are the sum of two numbers, as in `mma`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce
from itertools import chain
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import bf16, f32
from centella.lang.ptx import Fragment
from centella.lang.values import Expr, Operand
from centella.ops.attention.masks import LOWEST
from centella.ops.attention.parts import Work
from centella.ops.attention.table import MOST_ROWS
from centella.ops.attention.weights import put
from centella.ops.rows import QUAD, over_lanes

WARP = 32
KEYS = 16  # of a warp, at a time
CHAINS = 2  # of products that wait for each other: what scores are the sums of


class SplitTile(Struct, frozen=True):
    """Warps of a group, groups that a multiprocessor has registers for, groups of a launch."""

    warps: int = 4
    together: int = 2
    groups: int = 264

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return self.warps * WARP

    @property
    def step(self) -> int:
        """Keys that a group takes at a time."""
        return self.warps * KEYS


class WarpSums(ABC):
    """Scores and weights of a warp's sixteen keys, and its sums over all keys so far.

    Args:
        dim: elements of a head; dtype: of q, k and v.
        parts, width: sums lie in so many parts of the head, of so many elements.

    Attributes:
        g, c: which of eight queries, and which pair of each eight keys, a thread has scores of.
        number: of the warp in its group.
        base: what weights of query g are relative to; a whole number.
    """

    def __init__(self, work: Work, dim: int, dtype: Any, parts: int, width: int) -> None:
        lane = lang.local_id() % WARP
        self.g: Any = lane // 4
        self.c: Any = lane % 4
        self.number: Any = lang.local_id() // WARP
        self.work: Work = work
        self.dim: int = dim
        self.parts: int = parts
        self.width: int = width
        self.queries: list[Fragment] = []
        self.scores: list[list[Fragment]] = [
            [Fragment(f32, (16, 8)) for _ in range(CHAINS)] for _ in range(2)
        ]
        self.out: list[list[Fragment]] = [
            [Fragment(f32, (16, 8)) for _ in range(width // KEYS)] for _ in range(parts)
        ]
        self.total: Fragment = Fragment(f32, (16, 8))
        self.spread: Fragment = Fragment(f32, (16, 8))
        self.shrink: Fragment = Fragment(bf16, (16, 8))
        self.exact: Fragment = _ones(bf16)
        self.ones: Fragment = self.exact if dtype is bf16 else _ones(dtype)
        self.weights: list[Fragment] = [
            Fragment(dtype, (16, 8)) for _ in range(2 if dtype is bf16 else 1)
        ]
        self.values_of: Fragment = Fragment(dtype, (16, 16))
        self.keys_of: Fragment = Fragment(dtype, (16, 8))
        self.dtype: Any = dtype
        self.shrink.fill(0)
        self.base: Any = lang.var(LOWEST)
        self.begin()

    def begin(self) -> None:
        """Nothing has been summed."""
        for sums in self._sums:
            sums.fill(0.0)

    @property
    def _sums(self) -> list[Any]:
        return [*chain.from_iterable(self.out), self.total]

    def key(self, first: Operand, n: int, e: int) -> Any:
        """Of the keys from one on: what register e of scores n belongs to."""
        return first + (self.number * KEYS + n * 8 + e) + self.c * 2

    def clear_scores(self) -> None:
        """Nothing has been multiplied."""
        for scores in chain.from_iterable(self.scores):
            scores.fill(0.0)

    def product(self, n: int, e: int, scale: Operand) -> Any:
        """Register e of scores n, times the factor of scores."""
        first, second = self.scores[n]
        return (first[e] + second[e]) * scale

    def weigh(self, n: int, both: list[Expr]) -> None:
        """Keep the weights of two keys."""
        put(self.weights, n, both)

    def soften(self, first: Any, scale: Any) -> list[list[Any]]:
        """Weights of the keys; where a maximum grew, less of what was summed before.

        Returns:
            Which keys count.
        """
        counted = [[self.work.counts(self.key(first, n, e)) for e in range(2)] for n in range(2)]
        seen = [
            [
                self.work.seen(
                    self.g, self.key(first, n, e), counted[n][e], self.product(n, e, scale)
                )
                for e in range(2)
            ]
            for n in range(2)
        ]
        high = lang.const(LOWEST, f32)
        for score, shown in chain.from_iterable(seen):
            high = lang.fmax(high, lang.select(shown, score, LOWEST))
        base = lang.fmax(self.base, lang.ceil(over_lanes(high, QUAD, "fmax")))
        with lang.if_(first > self.work.begin):
            self._lessen(lang.exp2_native(self.base - base))
        self.base.set(base)
        for n, pairs in enumerate(seen):
            both = [
                lang.select(shown, lang.exp2_native(score - base), 0.0) for score, shown in pairs
            ]
            self.weigh(n, both)
        return counted

    def _lessen(self, factor: Any) -> None:
        """Multiply the sums of query g."""
        self.shrink[0] = (lang.select(self.c == 0, factor, 0.0), lang.const(0.0, f32))
        self.spread.fill(0.0)
        lang.ptx.mma_sync(self.spread, self.exact, self.shrink)
        factors = [self.spread[e] for e in range(2)]
        for sums in self._sums:
            for register in range(4):
                sums[register] = sums[register] * factors[register % 2]

    @abstractmethod
    def leave(self, memory: Any, line: Any, size: int, e: int) -> None:
        """Write the sums of query 2 c + e: of a part from `line` on, each part `size` further."""

    def add_up(
        self, tile: SplitTile, rows: int, put_stats: Callable[[Any, Any, Any, Any], None],
        put_sums: Callable[[Any, Any, list[Any]], None], copies: int = 1,
    ) -> None:  # fmt: skip
        """What the warps of a group have, together: relative to one maximum, in order.

        Rows past the queries are the last one's again.

        Args:
            put_stats: takes a query, its maximum, the sum of its weights, and which copy it is, of
                so many.
            put_sums: takes a query, an element of the head and its sums from there on, four.
        """
        me = lang.local_id()
        tops, totals = (lang.shared(f32, tile.warps * MOST_ROWS) for _ in range(2))
        pitch, size = self.width + 4, tile.warps * rows * (self.width + 4)
        memory = lang.shared(f32, self.parts * size)
        with lang.if_(self.c == 0):
            tops[self.number * MOST_ROWS + self.g] = self.base
        for e in range(2):
            query = self.c * 2 + e  # whose sums this thread has
            with lang.if_(self.g == 0):
                totals[self.number * MOST_ROWS + query] = self.total[e]
            with lang.if_(query < rows):
                self.leave(memory, (self.number * rows + query) * pitch, size, e)
        lang.barrier()

        def weights_of(query: Operand) -> tuple[Expr, list[Expr]]:
            """The maximum of a query, and what each warp's sums are to be multiplied with."""
            each = [tops[n * MOST_ROWS + query] for n in range(tile.warps)]
            high = reduce(lang.fmax, each)
            return high, [lang.exp2_native(top - high) for top in each]

        with lang.if_(me < rows * copies):
            query = me % rows
            high, factors = weights_of(query)
            whole = lang.const(0.0, f32)
            for n, factor in enumerate(factors):
                whole = lang.fma(factor, totals[n * MOST_ROWS + query], whole)
            put_stats(query, high, whole, me // rows)
        across = self.dim // 4
        for base in range(0, rows * across, tile.threads):
            item = me + base
            row, element = item // across, item % across * 4
            which, column = element // self.width, element % self.width
            with lang.if_(item < rows * across):
                _, factors = weights_of(row)
                added = [lang.const(0.0, f32)] * 4
                for n, factor in enumerate(factors):
                    theirs = memory.load(which * size + (n * rows + row) * pitch + column)
                    added = [lang.fma(factor, x, a) for a, x in zip(added, theirs, strict=True)]
                put_sums(row, element, added)


def _ones(dtype: Any) -> Any:
    ones = Fragment(dtype, (16, 16))
    for register in range(4):
        ones[register] = (lang.const(1.0, f32), lang.const(1.0, f32))
    return ones
