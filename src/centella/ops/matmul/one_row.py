"""One row of x in a group's registers and shared memory: normalised, and as a factor of `mma.sync`.

Each thread has some chunks of x. What a norm needs of all of them the warps add up in shared
memory. The products of `streamed_kernel.py` read x there by `ldmatrix`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from centella import lang
from centella.dtypes import bf16, f32, u32
from centella.ops.rows import WARP, over_lanes

EIGHT, DEPTH = 8, 16  # rows of a matrix of `ldmatrix`; columns of a first factor
CONSUMERS = 256  # threads that multiply
HIGH = 0xFFFF0000
MOST = 65504.0  # of f16
SUMS, RMS, LAYER = "sums", "rms", "layer"  # norms: a factor of sums; x is divided first


class Normed:
    """One row of x in the registers of a group's consumers, normalised.

    Each warp leaves what it adds up of x: squares; of a layer norm first x, then squares.
    """

    def __init__(self, capacity: int, kind: str, threads: int = CONSUMERS) -> None:
        self.kind: str = kind
        self.capacity: int = capacity
        self.threads: int = threads
        self._warps = threads // WARP
        self._totals = lang.shared(f32, 2 * self._warps)

    def chunks(self, me: Any) -> list[Any]:
        """The chunks of this thread."""
        return [me + base for base in range(0, self.capacity // EIGHT, self.threads)]

    def vectors(self, me: Any, vector: Any, k: Any) -> list[list[Any]]:
        """This thread's values of the norm's weight, or of its shift."""
        per, values = vector.dtype.per_chunk, []
        for chunk in self.chunks(me):
            at = lang.minimum(chunk * EIGHT, k - EIGHT)
            values.append([v for j in range(0, EIGHT, per) for v in vector.load(at + j)])
        return values

    def bits(self, me: Any, x: Any, k: Any) -> list[list[Any]]:
        """This thread's words of x; past the end the last ones again."""
        return [x.load_bits(lang.minimum(c * EIGHT, k - EIGHT)) for c in self.chunks(me)]

    def values(
        self, me: Any, x: Any, k: Any, vectors: list[list[list[Any]]], meet: Callable[[], None]
    ) -> list[list[Any]]:  # fmt: skip
        """This thread's values of x, normalised by what all of a group add up."""
        inside = [c * EIGHT < k for c in self.chunks(me)]
        values = [x.unpack(bits) for bits in self.bits(me, x, k)]
        if self.kind == SUMS:
            self._add(me, values, inside, 0, squared=True)
        elif self.kind:
            values = self._divided(me, values, inside, x[0], k, meet)
        for vector, combine in zip(vectors, (operator.mul, operator.add), strict=False):
            values = [list(map(combine, *pair)) for pair in zip(values, vector, strict=True)]
        return values

    def _divided(
        self, me: Any, values: list[list[Any]], inside: list[Any], first: Any, k: Any,
        meet: Callable[[], None],
    ) -> list[list[Any]]:  # fmt: skip
        """Values times the factor of the norm; of a layer norm less their mean.

        What is added up for the mean is their distance to the first: of equal digits nothing is
        left to be rounded.
        """
        if self.kind == LAYER:
            values = [[v - first for v in eight] for eight in values]
            self._add(me, values, inside, self._warps, squared=False)
            meet()
            mean = self._added(self._warps) / lang.cast(k, f32)
            values = [[v - mean for v in eight] for eight in values]
        self._add(me, values, inside, 0, squared=True)
        meet()
        factor = self.factor(k)
        return [[v * factor for v in eight] for eight in values]

    def _add(
        self, me: Any, values: list[list[Any]], inside: list[Any], at: int, squared: bool
    ) -> None:
        """Leave what a warp adds up."""
        total = lang.const(0.0, f32)
        for eight, counts in zip(values, inside, strict=True):
            for value in eight:
                other = lang.select(counts, value if squared else 1.0, 0.0)
                total = lang.fma(value, other, total)
        total = over_lanes(total, WARP, falling=True)
        with lang.if_(me % WARP == 0):
            self._totals[me // WARP + at] = total

    def _added(self, at: int) -> Any:
        """What all warps have left."""
        total = self._totals[at]
        for i in range(1, self._warps):
            total = total + self._totals[i + at]
        return total

    def factor(self, k: Any) -> Any:
        """1 / sqrt(mean of squares + eps)."""
        mean = self._added(0) * lang.ptx.reciprocal(lang.cast(k, f32))
        return lang.ptx.rsqrt(mean + lang.parameter("eps", f32))


class Row:
    """x in shared memory: a line of chunks for each column of the second factor.

    Where x is normalised it is f32, and two columns: 16 bits of each number, and what is left.
    """

    def __init__(self, x: Any, capacity: int, kind: str) -> None:
        self.normed: Normed = Normed(capacity, kind)
        self.kind: str = kind
        self.capacity: int = capacity
        self.columns: int = 2 if kind else 1
        self.pitch: int = capacity // EIGHT + 1  # for banks of their own
        chunks = -(-self.columns * self.pitch // EIGHT) * EIGHT
        self._tile = lang.ptx.SharedTile(x.dtype, (chunks, EIGHT))

    def fill(
        self, me: Any, x: Any, k: Any, vectors: list[list[list[Any]]], meet: Callable[[], None]
    ) -> None:  # fmt: skip
        """Write this thread's chunks of x."""
        chunks = self.normed.chunks(me)
        if self.kind:
            lines = [_two(eight, x) for eight in self.normed.values(me, x, k, vectors, meet)]
        else:
            lines = [[bits] for bits in self.normed.bits(me, x, k)]
        for chunk, columns in zip(chunks, lines, strict=True):
            counts = chunk * EIGHT < k
            with lang.if_(chunk < self.capacity // EIGHT):
                for c, words in enumerate(columns):
                    words = [lang.select(counts, word, 0) for word in words]
                    self._tile.memory.store_chunk(chunk + c * self.pitch, words)

    def start(self, lane: Any, share: int) -> Any:
        """This lane's address for `ldmatrix`, as a chunk: a warp's first 16 or 32 columns of W.

        Column 0 of a second factor is x, column 1 its lower halves if x is normalised. If a warp
        has 32 columns, the next ones of the first factor are x 16 columns further, for the lower
        rows of a narrow first factor (`streamed_kernel.Line`).

        Args:
            share: columns that a warp has of a stage.
        """
        eight, column = lane // EIGHT, lane % EIGHT
        start = eight + column % self.columns * self.pitch
        if share > DEPTH:
            start = start + lang.select(eight < 2, column // self.columns % 2 * 2, 0)
        return start

    def load(self, chunk: Any, widths: list[Any]) -> None:
        """Load one or two second factors, of 16 columns of W each."""
        lang.ptx.ldmatrix(self._tile, chunk, *widths)


def _two(values: list[Any], x: Any) -> list[list[Any]]:
    """f32 numbers as two lists of words: 16 bits of each, and what is left, rounded.

    Of f16 the first is at most the largest that there is: twice that is still right.
    """
    if x.dtype is bf16:
        cut = [lang.bitcast(lang.bitcast(v, u32) & HIGH, f32) for v in values]
    else:
        cut = x.unpack(x.pack([lang.minimum(lang.maximum(v, -MOST), MOST) for v in values]))
    left = [lang.select(v == c, 0.0, v - c) for v, c in zip(values, cut, strict=True)]
    return [x.pack(cut), x.pack(left)]
