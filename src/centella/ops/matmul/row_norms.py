"""The norm of whole rows of sums by warpgroups: statistics in registers, results to shared memory.

A consumer's 64 rows are two fragments beside each other, so that four lanes have a row. The
residual of the rows, where there is one, lies where the results will.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella import lang
from centella.dtypes import f32
from centella.lang.values import Expr
from centella.ops.matmul.results import K
from centella.ops.rows import QUAD, chunk_of, over_lanes


class NormedRows:
    """The rows of a consumer's tile: of each 16 columns a thread has two pairs in two rows."""

    def __init__(self, rows: Any, sums: list[Any], mine: Any, extra: dict[str, Any]) -> None:
        self.rows: Any = rows
        self.sums: list[Any] = sums
        self.extra: dict[str, Any] = extra
        thread = lang.local_id()
        self.first: Any = chunk_of(rows, mine)
        self.across: Expr = thread % 4 * 2
        self.leads: Expr = thread % 4 == 0  # has the first element of its rows

    def normalise(self, kind: str) -> None:
        """From sums to results in shared memory; statistics as `ops.norm` has them."""
        blocks = range(self.rows.columns // K)
        means = self._centred(blocks) if kind == "layer" else self._completed(blocks)
        totals = Totals()
        for block in blocks:
            values = self._pairs(block)
            if means:
                values = [[v - means[r % 2] for v in pair] for r, pair in enumerate(values)]
                self._put(block, values)
            totals.add(values, lambda total, v: lang.fma(v, v, total))
        eps = lang.parameter("eps", f32)
        factors = [1.0 / lang.sqrt(square + eps) for square in totals.means(len(blocks) * K)]
        for block in blocks:
            self._store(block, factors)

    def _completed(self, blocks: range) -> list[Expr]:
        """Put values in place of the sums; no means."""
        for block in blocks:
            self._put(block, self._values(block))
        return []

    def _centred(self, blocks: range) -> list[Expr]:
        """Put values less the first of their row in place of the sums; the means of those."""
        totals, firsts = Totals(), list[Any]()
        for block in blocks:
            values = self._values(block)
            if not firsts:
                own = [lang.select(self.leads, values[r][0], 0.0) for r in range(2)]
                firsts = [over_lanes(v, QUAD) for v in own]
            values = [[v - firsts[r % 2] for v in pair] for r, pair in enumerate(values)]
            self._put(block, values)
            totals.add(values, lambda total, v: total + v)
        return totals.means(len(blocks) * K)

    def _values(self, block: int) -> list[list[Any]]:
        """The sums of 16 columns with bias and residual."""
        pairs = self._pairs(block)
        if "bias" in self.extra:
            bias = self._vector("bias", block)
            pairs = [[v + w for v, w in zip(pair, bias[r // 2], strict=True)]
                     for r, pair in enumerate(pairs)]  # fmt: skip
        if "residual" in self.extra:
            rows = self.rows
            lines = lang.ptx.Fragment(rows.dtype, (16, K))
            lang.ptx.ldmatrix(rows, rows.right(self.first, 2 * block), lines)
            pairs = [[v + w for v, w in zip(pair, lines[r], strict=True)]
                     for r, pair in enumerate(pairs)]  # fmt: skip
        return pairs

    def _store(self, block: int, factors: list[Expr]) -> None:
        """Write 16 columns of the results over those of the residual."""
        rows = self.rows
        pairs = [[v * factors[r % 2] for v in pair] for r, pair in enumerate(self._pairs(block))]
        steps: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
            ("weight", lambda v, w: v * w), ("shift", lambda v, w: v + w),
        )  # fmt: skip
        for name, combine in steps:
            if name in self.extra:
                vector = self._vector(name, block)
                pairs = [[combine(v, w) for v, w in zip(pair, vector[r // 2], strict=True)]
                         for r, pair in enumerate(pairs)]  # fmt: skip
        out = lang.ptx.Fragment(rows.dtype, (16, K))
        for r, pair in enumerate(pairs):
            out[r] = (pair[0], pair[1])
        lang.ptx.stmatrix(rows, rows.right(self.first, 2 * block), out)

    def _at(self, block: int) -> tuple[Any, int]:
        """The fragment that has 16 columns, and the first of the eight registers."""
        whole, part = divmod(block * K, self.sums[0].shape[1])
        return self.sums[whole], part // 2

    def _pairs(self, block: int) -> list[list[Any]]:
        """Two neighbours in the upper row, in the lower, and eight columns further on."""
        fragment, start = self._at(block)
        return [[fragment[start + 2 * r + e] for e in range(2)] for r in range(4)]

    def _put(self, block: int, values: list[list[Any]]) -> None:
        """Write them back: registers of a fragment live on in the next tile's products."""
        fragment, start = self._at(block)
        for r, pair in enumerate(values):
            for e, v in enumerate(pair):
                fragment[start + 2 * r + e] = v

    def _vector(self, name: str, block: int) -> list[list[Expr]]:
        """What two of this thread's columns have, and those eight further on."""
        operand = self.extra[name]
        return [operand.load_word(self.across + (block * K + right)) for right in (0, 8)]


class Totals:
    """What adds up over a thread's two rows: of either a total of even columns, and of odd ones."""

    def __init__(self) -> None:
        self._rows: list[list[Any]] = [[lang.const(0.0, f32)] * 2 for _ in range(2)]

    def add(self, pairs: list[list[Any]], more: Callable[[Any, Any], Any]) -> None:
        """Those of 16 columns."""
        for r, pair in enumerate(pairs):
            self._rows[r % 2] = [more(t, v) for t, v in zip(self._rows[r % 2], pair, strict=True)]

    def means(self, length: int) -> list[Expr]:
        """Over whole rows, of so many columns."""
        return [over_lanes(even + odd, QUAD) / float(length) for even, odd in self._rows]
