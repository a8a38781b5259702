"""The softmax of fragments of scores: a thread has parts of two rows, 8 apart, as three others do.

A maximum is replaced only where it grew by more than 2^8: until then weights are up to 2^8, which
16 bits hold as precisely, and sums need no rescaling (as in FlashAttention-4). `grow` and
`store_row` serve `mma.py` too; `Rows` has a warpgroup's 64 queries, in the registers that scores
come in. Summed are the weights before they are rounded to 16 bits: reading them back is one
instruction of six. So weights as they are used add up to 1 within 2^-11, but for those below 2^-25,
which f16 does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from centella import lang
from centella.dtypes import f32, i32, u32
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.ops.attention.masks import LOWEST, Scoring, Sight, bounded, product_scale, share_of
from centella.ops.attention.weights import LOG2E, put
from centella.ops.rows import QUAD, chunk_of, over_lanes

M, K = 64, 16  # of one product: queries, keys
ScaleOf = Callable[[int], Any]
UNSEEN = -(2.0**120)  # below every score, and above hidden ones times the scales that are folded
SLACK = 8.0  # powers of two by which a maximum may be passed


def grow(
    scores_of: Callable[[int], Iterable[Any]], base: list[Any], scale: Operand, fold: bool = True
) -> tuple[list[Expr], list[Expr]]:
    """Look for new maxima: of both rows, whether one grew too much, and what sums shrink by.

    Args:
        base: what weights are relative to, which is replaced where a maximum grew too much.
        scale: of scores, as the exponent to base 2; `fold`: maxima are multiplied by it.
    """
    grown, shrinks = [], []
    for h in range(2):
        scores = iter(scores_of(h))
        highs = [next(scores), next(scores)]
        for n, score in enumerate(scores):
            highs[n % 2] = lang.fmax(highs[n % 2], score)
        high = over_lanes(lang.fmax(highs[0], highs[1]), QUAD, "fmax")
        high = high * scale if fold else high
        grown.append(high - base[h] > (SLACK if fold else SLACK * math.log(2)))
        new = lang.select(grown[h], high, base[h])
        shrink = base[h] - new
        shrinks.append(lang.exp2_native(shrink if fold else shrink * scale))
        base[h].set(new)
    return grown, shrinks


def store_row(
    y: Argument, row: Operand, column: Operand, dim: int, pairs: Iterable[list[Expr]]
) -> None:
    """Store a thread's pairs of a row from its column on, 8 apart, those within the head."""
    for j, pair in enumerate(pairs):
        if (j + 1) * 8 <= dim:
            y.store(row + j * 8, pair)
        else:
            with lang.if_(column + j * 8 < dim):
                y.store(row + j * 8, pair)


class Rows:
    """Scores of a tile's keys, weights, sums of what they weigh; `place` says where each stands.

    Args:
        parts: 16-bit numbers that a weight is the sum of.
    """

    def __init__(self, dtype: Any, keys: int, width: int, parts: int, scoring: Scoring) -> None:
        self._scoring = scoring
        self.scores: Any = lang.ptx.Fragment(f32, (M, keys))
        self.out: Any = lang.ptx.Fragment(f32, (M, width))
        self.out.fill(0.0)
        self.weights: list[list[Any]] = [
            [lang.ptx.Fragment(dtype, (M, K)) for _ in range(parts)] for _ in range(keys // K)
        ]
        self._row, self._column = self.scores.place(0)
        self._base = lang.vars(f32, 2, init=0.0)  # what weights are relative to
        self._total = lang.vars(f32, 2, init=0.0)
        self._factor = lang.const(1.0, f32) if scoring.capped else product_scale(scoring, LOG2E)

    def start(self, maximum: Any, total: Any) -> None:
        """Other queries: what maxima and sums begin with; `out` is filled with zeros apart."""
        for base, sums in zip(self._base, self._total, strict=True):
            base.set(maximum)
            sums.set(lang.select(self._column == 0, total, 0.0))  # of the four threads of a row

    def see(self, sight: Sight, first: Any) -> None:
        """What queries from the first one on see, for `hide`."""
        self._sight, self._queries = sight, self._rows(first)

    def _rows(self, first: Any) -> list[Any]:
        """The two queries of a thread."""
        return [first + self._row + 8 * h for h in range(2)]

    def bound(self) -> None:
        """Cap the scores, where they are: then they are logarithms to base 2."""
        if self._scoring.capped:
            scale = product_scale(self._scoring)
            for r in range(self.scores.registers):
                self.scores[r] = bounded(self.scores[r] * scale, self._scoring, LOG2E)

    def hide(self, key0: Operand) -> None:
        """Lower the scores of keys that do not count for a query."""
        for h in range(2):
            column = lang.bitcast(key0 + self._column, i32)
            most = lang.bitcast(self._sight.until(self._queries[h] + 1), i32) - column
            least = None
            if self._scoring.windowed:
                least = lang.bitcast(self._sight.since(self._queries[h]), i32) - column
            for register in self._of(h):
                ahead = register // 4 * 8 + register % 2
                shown = most > ahead
                if least is not None:
                    shown = shown & (least <= ahead)
                self.scores[register] = lang.select(shown, self.scores[register], LOWEST)

    def _of(self, h: int) -> list[int]:
        """Registers of scores of one of the two rows."""
        return [r for r in range(self.scores.registers) if r // 2 % 2 == h]

    def soften(self) -> tuple[Expr, list[Expr]]:
        """Scores become weights, and are summed.

        Returns:
            Whether a maximum was replaced, and what sums and products of each row shrink by.
        """
        grown, shrinks = grow(
            lambda h: (self.scores[r] for r in self._of(h)), self._base, self._factor
        )
        for h in range(2):
            base = self._base[h].get()
            for r in self._of(h):
                exponent = lang.fma(self.scores[r], self._factor, -base)
                self.scores[r] = lang.exp2_native(exponent)
            sums = [self._total[h] * shrinks[h], lang.const(0.0, f32)]
            for i, r in enumerate(self._of(h)):
                sums[i % 2] = sums[i % 2] + self.scores[r]
            self._total[h].set(sums[0] + sums[1])
        return grown[0] | grown[1], shrinks

    def round(self) -> None:
        """Weights as the first factor of products, in as many parts as they have."""
        for i, parts in enumerate(self.weights):
            for n in range(4):
                put(parts, n, [self.scores[8 * i + 2 * n + e] for e in range(2)])

    def nothing(self) -> Expr:
        """0, u32, which is known when all weights are: no sum of powers is below 0."""
        return lang.cast(self._total[0] + self._total[1] < 0.0, u32)

    def shrink(self, grown: Operand, shrinks: list[Expr]) -> None:
        """Rescale what was summed, where a maximum was replaced."""
        with lang.if_(grown):
            for register in range(self.out.registers):
                self.out[register] = self.out[register] * shrinks[register // 2 % 2]

    def totals(self) -> list[Expr]:
        """The sums of all weights of both rows."""
        return [over_lanes(own.get(), QUAD) for own in self._total]

    def finish(
        self, y: Any, start: Operand, pitch: Operand, first: Any, lq: Operand, dim: int,
        totals: list[Any], scale_of: ScaleOf | None = None,
    ) -> None:  # fmt: skip
        """Divide and store, from query `first` on.

        Args:
            totals: of `totals()`; scale_of: what columns from one on are multiplied by.
        """
        for h, query in enumerate(self._rows(first)):
            factor = share_of(totals[h])
            with lang.if_(query < lq):
                row = start + query * pitch + self._column
                columns = range(0, dim, 8)
                pairs = (self._pair(j, h, factor, scale_of) for j in columns)
                store_row(y, row, self._column, dim, pairs)

    def stage(
        self, tile: Any, slot: Any, dim: int, totals: list[Any], scale_of: ScaleOf | None = None
    ) -> None:
        """Divide and write to a stage of a tile in shared memory, sixteen columns at a time."""
        first = chunk_of(tile, slot)
        rounded = lang.ptx.Fragment(tile.dtype, (M, K))
        factors = [share_of(total) for total in totals]
        for j in range(0, self.out.shape[1], K):  # also those past the head, which are zeros
            own = scale_of if j < dim else None
            for n in range(4):
                h, right = n % 2, n // 2
                rounded[n] = tuple(self._pair(j + 8 * right, h, factors[h], own))
            lang.ptx.stmatrix(tile, tile.right(first, j // 8), rounded)

    def _pair(self, j: int, h: int, factor: Operand, scale_of: ScaleOf | None) -> list[Any]:
        """A thread's two results of eight columns from j on."""
        values = [self.out[j // 2 + 2 * h + e] * factor for e in range(2)]
        return values if scale_of is None else [value * scale_of(j) for value in values]
