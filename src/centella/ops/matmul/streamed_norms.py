"""Norms of several rows of x whose columns come stage by stage, beside those of the weights.

    rms    y = factor (x norm . W)                                        factor = 1 / rms(x)
    layer  y = factor (d norm . W - mean(d) (norm . W)) + shift . W       d = x - middle(x)

A warp multiplies its columns of x by the norm's weights in registers, and splits each f32 product
into two 16-bit numbers of second factors of `mma.sync`. It adds up squares, of a layer norm d as
well: what has to be known of a whole row is known when its sums are added up.

norm . W and shift . W are sums of two further rows of x, the last of its eights. The copy engine
fills rows past x with zeros, and less a middle of -1 each is one: times the weights it is the norm,
times a shift in place of weights the shift. So they cost nothing where eight rows have room for
them, and another eight elsewhere.

The middle is the second largest of three elements of a row. So two or more elements are at least as
far from the mean, and |mean(d)| <= sqrt(k / 2) deviations, however far from zero x is. That and no
more is what the subtraction takes from the 24 bits of f32 sums, and the variance, mean(d^2) less
mean(d)^2, twice as many bits, where two of the three lie apart from the rest of the row: with
`LONGEST` columns an error of 2^-12, half of what rounding to f16 may be.

f16 ends at 65504, and below 2^-14 has fewer digits. Weights are multiplied by the power of two that
has the largest in [1/4, 1/2), so a product p = d weight, |d| < 2^17, is at most 65504. Its upper
part is p as f16, its lower part 2^11 times the rest, at most 2^15; their sums are apart. So
|p - upper - 2^-11 lower| <= max(2^-22 |p|, 2^-36). With the largest weight, d of 2^-23 is still as
exact as an f16; the smallest d is 2^-24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella import lang
from centella.dtypes import DType, f16, f32, u32
from centella.ops.matmul.one_row import CONSUMERS, DEPTH, EIGHT, HIGH, LAYER, RMS
from centella.ops.matmul.streamed_kernel import WARPS, Stream
from centella.ops.rows import QUAD, WARP, over_lanes

FRAGMENTS = 10  # of sums, that a thread has registers for
LONGEST = 2048  # columns of a layer norm
REST = 2048.0  # what lower parts of f16 are multiplied by
UNIT = 4.0  # what sums are multiplied by, and weights divided by, beside a power of two of theirs


class RowNorm:
    """The RMS norm of rows of x: the weights of its columns, and the squares of each row.

    Args:
        tile: how a group works; columns: of all its stages.
        moments: sums of each row. vectors: lines of weights.
    """

    apart: bool = False  # whether sums of lower parts are apart

    def __init__(self, tile: Stream, columns: int, moments: int = 1, vectors: int = 1) -> None:
        self._columns, self._rows = columns, EIGHT * tile.eights
        self._weights = lang.shared(f32, vectors * columns)  # of sixteen those of a thread in a row
        self._moments = lang.shared(f32, moments * WARPS * self._rows)
        self._mine = [lang.vars(f32, tile.eights, init=0.0) for _ in range(moments)]

    def load(self, me: Any, extra: dict[str, Any], k: Any, meet: Callable[[], None]) -> None:
        """Write the weights, which no launch before this one writes; 0 past the last."""
        for at, weight, mine in self._vector(me, extra["norm"], k):
            with lang.if_(mine):
                self._weights[at] = weight

    def _vector(self, me: Any, vector: Any, k: Any) -> list[tuple[Any, Any, Any]]:
        """This thread's elements of a vector: where they go, what they are, whether they are."""
        elements = []
        for base in range(0, self._columns, CONSUMERS):
            column = me + base
            weight = lang.select(column < k, vector[lang.minimum(column, k - 1)], 0.0)
            near = column % DEPTH
            at = column - near + near % EIGHT // 2 * QUAD + near % 2 + near // EIGHT * 2
            elements.append((at, weight, column < self._columns))
        return elements

    def start(self, x: Any, lane: Any) -> None:
        """Read what is needed of rows of x before their columns come."""

    def begin(self) -> None:
        """Nothing has been added up."""
        for totals in self._mine:
            for total in totals:
                total.set(0.0)

    def take(self, widths: list[Any], rests: list[Any], column: Any, lane: Any) -> None:
        """Multiply sixteen columns of x, as second factors have them, by their weights.

        The products are f32: `widths` then have their upper halves, `rests` what is left.
        """
        weights = self._weights.load(column + lane % QUAD * QUAD)
        for width, rest, total in zip(widths, rests, self._mine[0], strict=True):
            for register in range(2):
                values = width[register]
                for value in values:
                    total.set(lang.fma(value, value, total))
                pair = weights[2 * register : 2 * register + 2]
                low, high = (lang.bitcast(v * w, u32) for v, w in zip(values, pair, strict=True))
                width[register] = (low >> 16) | (high & HIGH)
                rest[register] = tuple(
                    lang.bitcast(v, f32) - lang.bitcast(v & HIGH, f32) for v in (low, high)
                )

    def leave(self, warp: Any, lane: Any) -> None:
        """Write what a warp has added up of each row."""
        for moment, totals in enumerate(self._mine):
            for eight, total in enumerate(totals):
                whole = over_lanes(total.get(), QUAD)
                at = warp * self._rows + (lane // QUAD + moment * WARPS * self._rows)
                with lang.if_(lane % QUAD == 0):
                    self._moments[at + eight * EIGHT] = whole

    def _mean(self, moment: int, row: Any) -> Any:
        """Of a row, over all its columns."""
        at = row + moment * WARPS * self._rows
        total = self._moments[at]
        for warp in range(1, WARPS):
            total = total + self._moments[at + warp * self._rows]
        return total * lang.ptx.reciprocal(lang.cast(lang.parameter("k", u32), f32))

    def totals(self, sums: Any, row: Any, outputs: list[Any]) -> list[Any]:
        """The product with the row's norm, of outputs."""
        times = lang.ptx.rsqrt(self._mean(0, row) + lang.parameter("eps", f32))
        return [sums.total(row, output) * times for output in outputs]


class RowLayer(RowNorm):
    """The layer norm of rows of x: weights and shift of its columns, d and its square of each row.

    Args:
        dtype: of x; depth: columns of x; shifted: whether there is a shift.
    """

    def __init__(self, tile: Stream, columns: int, dtype: DType, depth: int, shifted: bool) -> None:
        super().__init__(tile, columns, 2, 2 if shifted else 1)
        self.apart: bool = dtype is f16
        self._names = ("norm", "shift") if shifted else ("norm",)
        self._ragged = depth % tile.columns != 0
        self._of_norm = self._rows - len(self._names)  # the row whose sums are those of the norm
        self._most = lang.shared(f32, len(self._names) * WARPS)
        self._middle: list[Any] = []

    def load(self, me: Any, extra: dict[str, Any], k: Any, meet: Callable[[], None]) -> None:
        """As of `RowNorm`; what vectors are multiplied by comes of their largest elements."""
        lines = [self._vector(me, extra[name], k) for name in self._names]
        for i, elements in enumerate(lines):
            most = lang.const(0.0, f32)
            for _, weight, _ in elements:
                most = lang.maximum(most, lang.abs(weight))
            most = over_lanes(most, WARP, "max")
            with lang.if_(me % WARP == 0):
                self._most[me // WARP + i * WARPS] = most
        meet()
        for i, elements in enumerate(lines):
            times = lang.bitcast(lang.maximum((254 - self._exponent(i)) << 23, 1 << 22), f32)
            for at, weight, mine in elements:
                with lang.if_(mine):
                    self._weights[at + i * self._columns] = weight * times * (1 / UNIT)

    def _exponent(self, vector: int) -> Any:
        """The exponent, as f32 has it, of a vector's largest element."""
        most = self._most[vector * WARPS]
        for warp in range(1, WARPS):
            most = lang.maximum(most, self._most[vector * WARPS + warp])
        return lang.minimum(lang.maximum(lang.bitcast(most, u32) >> 23, 1), 254)

    def start(self, x: Any, lane: Any) -> None:
        """Read the middle of each row; -1 of rows past the last."""
        m, k, pitch = (lang.parameter(n, u32) for n in ("m", "k", "ldx"))
        for eight in range(0, self._rows, EIGHT):
            row = lane // QUAD + eight
            at = lang.minimum(row, m - 1) * pitch
            a, b, c = x[at], x[at + k // 2], x[at + (k - 1)]
            middle = lang.maximum(lang.minimum(a, b), lang.minimum(lang.maximum(a, b), c))
            self._middle.append(lang.select(row < m, middle, -1.0))

    def take(self, widths: list[Any], rests: list[Any], column: Any, lane: Any) -> None:
        """As of `RowNorm`, of d."""
        at, k = column + lane % QUAD * QUAD, lang.parameter("k", u32)
        every = [self._weights.load(at)] * len(widths)
        if len(self._names) > 1:  # the last row of the last eight has the shift for weights
            last = lang.select(lane // QUAD == EIGHT - 1, self._columns, 0)
            every[-1] = self._weights.load(at + last)
        operands = zip(widths, rests, every, self._middle, *self._mine, strict=True)
        for width, rest, weights, middle, total, squares in operands:
            for register in range(2):
                values = [v - middle for v in width[register]]
                if self._ragged:
                    start = column + lane % QUAD * 2 + EIGHT * register
                    values = [lang.select(start + j < k, v, 0.0) for j, v in enumerate(values)]
                for v in values:
                    total.set(total + v)
                    squares.set(lang.fma(v, v, squares))
                pair = weights[2 * register : 2 * register + 2]
                products = [v * w for v, w in zip(values, pair, strict=True)]
                width[register] = tuple(products)
                left = [v - upper for v, upper in zip(products, width[register], strict=True)]
                rest[register] = tuple(v * REST if self.apart else v for v in left)

    def totals(self, sums: Any, row: Any, outputs: list[Any]) -> list[Any]:
        """As of `RowNorm`."""
        mean = self._mean(0, row)
        variance = lang.maximum(lang.fma(-mean, mean, self._mean(1, row)), 0.0)
        times = UNIT * lang.ptx.rsqrt(variance + lang.parameter("eps", f32))
        of_norm, of_shift = (self._of_norm + i for i in range(2))
        back = [lang.bitcast(self._exponent(i) << 23, f32) for i in range(len(self._names))]
        out = []
        for output in outputs:
            less = lang.fma(-mean, sums.total(of_norm, output), sums.total(row, output))
            value = less * times * back[0]
            if len(back) > 1:
                value = lang.fma(sums.total(of_shift, output) * UNIT, back[1], value)
            out.append(value)
        return out


def norm_of(
    kind: str, tile: Stream, steps: int, depth: int, dtype: DType, shifted: bool
) -> RowNorm | None:
    """The norm of a kind, "" for none, of so many stages."""
    if kind == LAYER:
        return RowLayer(tile, steps * tile.columns, dtype, depth, shifted)
    return RowNorm(tile, steps * tile.columns) if kind == RMS else None


def spare_rows(kind: str, shifted: bool) -> int:
    """Rows of the second factor that a norm takes after those of x."""
    return (2 if shifted else 1) if kind == LAYER else 0


def kept_bytes(kind: str, columns: int, eights: int, shifted: bool) -> int:
    """Bytes of shared memory of a norm."""
    if not kind:
        return 0
    vectors, moments = max(spare_rows(kind, shifted), 1), 2 if kind == LAYER else 1
    return 4 * (vectors * columns + moments * WARPS * EIGHT * eights + vectors * WARPS)


def fragments_of(kind: str, eights: int, dtype: DType) -> int:
    """First factors' sums of so many rows that a thread has registers for, two groups together."""
    if kind != LAYER:
        return FRAGMENTS
    return (FRAGMENTS - 2 * (eights - 1)) // (2 if dtype is f16 else 1)
