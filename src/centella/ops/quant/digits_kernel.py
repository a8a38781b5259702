"""The product of one row with a quantised weight, of integers on tensor cores (sm_90a).

    y[n] = f(alpha (h . W[n, :]) + bias[n]) + residual[n]
    y[n] = act(alpha (h . W[n, :]) + bias[n]) (alpha (h . W[half + n, :]) + bias[half + n])
    h = x, or x normalised as in `matmul/streamed_kernel.py`

How weights come is in `stream.py`. Stored numbers are multiplied as the bytes they are; it is h
that is made of integers, once for a group. Of 256 neighbours, the largest of which is below 2^e,
each is cut to an integer of 31 bits times 2^(e - 30), and that is four digits of 8 bits, from -128
to 127: columns of the second factor of `mma`. The first has 8 rows of 32 bytes, and below them the
32 bytes after those; the second has the digits of both. Sums of 32 products are exact. Where a
format's factors are integers times one of 256 numbers, sums are multiplied by them as integers and
added up, exactly (below 2^30); else as f32. They are multiplied by that factor and 2^(e - 30), and
added to one sum for each digit in f32; 256 to the power of the digit comes last. What a format adds
to its numbers times a factor is multiplied by the sum of h. (Digits of a factor on integer tensor
cores: Ootomo, Ozaki and Yokota 2023, arXiv 2306.11975, there of f64.)

A warp has eight rows, and so has its team of one warp of each crew: crews take the stages in turn,
and a stage is always one crew's, so that none can take what another has not had yet for its own.

The error is that of h, below 2^-29 of the largest of 256 (of 2^-97, where that is more), and of
additions in f32. 256 neighbours with an infinity or NaN give NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from centella import lang
from centella.dtypes import f32, i8, i32, u8, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.ops.matmul.epilogue import Epilogue, ask_for_vectors
from centella.ops.matmul.one_row import EIGHT, SUMS, Normed
from centella.ops.matmul.several_rows import PAD, Sums
from centella.ops.matmul.streamed_kernel import meet
from centella.ops.quant.beside import Beside, Row
from centella.ops.quant.format import GROUP, RUN, SYMBOLS, Levels
from centella.ops.quant.numbers import field
from centella.ops.quant.stream import BlockStream, Factor, Weights
from centella.ops.quant.table import FORMATS
from centella.ops.ring import Ring
from centella.ops.rows import QUAD, WARP, fold, over_lanes

RUNS = 2  # of a span, whose numbers of h have one scale
SPAN = RUNS * RUN  # its columns
MOST_WARPS = 20  # that multiply
DIGITS = 4
OFFSET = 0x00808080  # which makes digits of 0 to 255 those of -128 to 127
BITS = 30  # of a number's amount
INFINITY, SMALLEST = 0x7F800000, 30  # the bits of f32; the smallest exponent that has a scale
SECOND = DIGITS * QUAD + 1  # the chunk where the second of two groups begins
PITCH = WARP + 4  # chunks of the digits of a run, some unused for banks of their own
LEVELS = 4 * QUAD  # words of the sums and scales of a span
SIGNED, SIGNED_VALUE = 0x4B400000, 12582912.0  # 1.5 2^23: plus a sum below 2^22 it is f32's bits


def pitch_of(tile: BlockStream) -> int:
    """Words of the sums of a block."""
    return tile.halves * tile.height + PAD


def words_of_row(capacity: int) -> tuple[int, int]:
    """Words of the digits of so many numbers, and of their sums and scales."""
    return capacity // RUN * PITCH * 4, capacity // SPAN * LEVELS


class Digits:
    """A row of h in shared memory as digits, and of each span a scale, and sums of its groups.

    Two groups are a second factor of `mma`: digit c of the first is column c, of the other column
    4 + c. A lane's words of two such factors, a run's, are a chunk. Sums are of h divided by the
    scale.

    Args:
        capacity: numbers there is room for; kind: of the norm; threads: of the group, that fill it.
        alternate: whether a chunk of sums has those of groups 0, 2, 4 and 6, the next one those of
            1, 3, 5 and 7; else chunk t has those of groups t and 4 + t.
    """

    def __init__(self, capacity: int, kind: str, threads: int, alternate: bool) -> None:
        self.alternate: bool = alternate
        self.normed: Normed = Normed(capacity, kind, threads)
        digits, levels = words_of_row(capacity)
        self._words = lang.shared(u32, digits)
        self._levels = lang.shared(f32, levels)

    def fill(
        self, me: Any, x: Any, k: Any, vectors: list[list[list[Any]]], meet: Callable[[], None]
    ) -> None:  # fmt: skip
        """Write this thread's chunks; four neighbouring threads have a group, a warp a span."""
        chunks = self.normed.chunks(me)
        for chunk, eight in zip(chunks, self.normed.values(me, x, k, vectors, meet), strict=True):
            inside = chunk * EIGHT < k
            values = [lang.select(inside, v, 0.0) for v in eight]
            bits = [lang.bitcast(v, u32) & 0x7FFFFFFF for v in values]
            largest = lang.subgroup_max(fold(bits, lang.maximum))
            exponent = lang.maximum(largest >> 23, SMALLEST)
            up = lang.bitcast((BITS + 253 - exponent) << 23, f32)
            down = lang.bitcast((exponent + 1 - BITS) << 23, f32)
            down = lang.select(largest < INFINITY, down, float("nan"))
            values = [v * up for v in values]
            total = over_lanes(fold(values, operator.add), GROUP // EIGHT)
            words = [_digits(v) for v in values]
            with lang.if_(chunk < self.normed.capacity // EIGHT):
                start = chunk // 16 * (4 * PITCH) + chunk // 4 % 2 * (4 * SECOND)
                start = start + chunk % 2 * 8 + (chunk // 8 % 2 * 2 + chunk // 2 % 2)
                for quad in range(2):
                    for digit, word in enumerate(_turned(words[4 * quad : 4 * quad + 4])):
                        self._words[start + (quad * 4 + digit * 16)] = word
                with lang.if_(chunk % 4 == 0):
                    group, at = chunk // 4 % 8, chunk // 32 * LEVELS
                    if self.alternate:
                        at = at + group % 2 * 4 + group // 2
                    else:
                        at = at + group % 4 * 4 + group // 4
                    self._levels[at] = total
                    self._levels[at + (2 * QUAD if self.alternate else 2)] = down

    def load(self, run: Any, lane: Any) -> list[list[Any]]:
        """This lane's words of the second factors of a run."""
        words = self._words.load_chunk(run * PITCH + (lane + lane // (DIGITS * QUAD)))
        return [words[:2], words[2:]]

    def sums(self, span: Any, chunk: Any) -> tuple[list[Any], Any]:
        """The sums that a chunk of a span has, as `alternate` says, and the scale."""
        sums = self._levels.load_chunk(span * QUAD + chunk)
        if self.alternate:
            return sums, self._levels[span * LEVELS + 2 * QUAD]
        return sums[:2], sums[2]


def _digits(value: Any) -> Any:
    """The digits of a number below 2^30 by amount, the lowest first."""
    return (lang.bitcast(lang.cast(value, i32), u32) + OFFSET) ^ OFFSET


def _turned(words: list[Any]) -> list[Any]:
    """Four words of bytes: of the first bytes of all four, of the second ones, and so on."""
    order = lang.ptx.permute_bytes
    low, high = (
        [order(a, b, near) for a, b in (words[:2], words[2:])]
        for near in ((0, 4, 1, 5), (2, 6, 3, 7))
    )
    return [order(a, b, near) for a, b in (low, high) for near in ((0, 1, 4, 5), (2, 3, 6, 7))]


def _streamed_digits(
    *, tile: BlockStream, format: str, depth: int, beside: Beside, kind: str,
    activation: str, x: Argument, w: Argument, y: Argument, **operands: Argument,
) -> None:  # fmt: skip
    stored = FORMATS[format]
    lang.ptx.resident(1)
    planes = [operands.pop(symbol) for symbol in SYMBOLS[1 : len(stored.planes)]]
    shared = Weights(tile, stored, depth, beside, x.dtype, w, planes)
    alternate = shared.cores.levels is None
    digits = Digits(shared.steps * tile.columns, kind, tile.threads, alternate)
    sums = Sums(tile.crews, 2, pitch_of(tile))  # of two blocks in turn
    if tile.spare:
        lang.shared(u32, tile.spare)
    with lang.ptx.role(0, tile.threads):
        _consume(shared, digits, sums, activation, x, y, operands)
    with lang.ptx.role(tile.threads, WARP), lang.if_(lang.local_id() == tile.threads):
        shared.bring()


class _Consumer:
    """A warp: its eight rows, and where it is in both rings."""

    def __init__(self, shared: Weights, digits: Digits) -> None:
        self.shared, self.digits, tile = shared, digits, shared.tile
        me = lang.local_id()
        self.lane, warp = me % WARP, me // WARP
        team, self.crew = warp % tile.teams, warp // tile.teams
        eights = tile.height // EIGHT  # of a half
        self.half: Any = team // eights if tile.halves == 2 else 0
        self.first: Any = team % eights * EIGHT
        self.ring, self.beside = Ring(tile.stages), Ring(tile.slots)
        self.ring.move(self.crew)
        row = lang.minimum(self.first + self.lane % EIGHT, tile.rows - 1)
        self.start: Any = shared.start(row, 0, self.lane, self.half)
        self.stored = shared.fragment()
        high = shared.high
        self.high = high.start(row, 0, self.lane, self.half) if high else None
        dtype = shared.ring.dtype
        self.height = lang.ptx.Fragment(dtype, (16, 16))
        self.width = lang.ptx.Fragment(dtype, (16, 8))
        self.products = lang.ptx.Fragment(i32, (16, 8))
        self.second = self.lane % QUAD >= 2  # of two groups, this lane has the second's sums
        self.kept = lang.vars(f32, 2, init=0.0)  # of two digits
        self.below = lang.var(0.0, f32)  # what is added to numbers, times h

    def block(self, block: Any, sums: Sums, turn: Any) -> None:
        """The sums of a block."""
        shared, crews = self.shared, self.shared.tile.crews
        for register in (*self.kept, self.below):
            register.set(0.0)
        slot = self.beside.stage.get()
        shared.told.wait(slot, self.beside.parity)
        first = shared.row(block, 0)
        if shared.halves == 2:
            first = first + self.half * shared.p["half"]
        rows = shared.rows(slot, self.half, first, self.first + self.lane // QUAD)
        for turns in lang.range(lang.const(shared.rounds, u32)):
            stage = self.ring.stage.get()
            shared.full.wait(stage, self.ring.parity)
            self._multiply(rows, turns * crews + self.crew, stage)
            with lang.if_(self.lane == 0):
                shared.empty.arrive(stage)
            self.ring.skip(crews)
        with lang.if_(self.lane == 0):
            shared.read.arrive(slot)
        self.beside.advance()
        self._leave(sums, turn)

    def _multiply(self, rows: list[Row], step: Any, stage: Any) -> None:
        """A stage's columns, of which so many come before; past the last ones h is 0."""
        cores, spans = self.shared.cores, self.shared.tile.runs // RUNS
        for part in range(spans):
            span = step * spans + part
            runs = [self.shared.run(span * RUNS + i, rows) for i in range(RUNS)]
            products = self._products(span, stage, part * RUNS)
            if cores.levels:
                self._add_integers(cores.levels(runs[0]), span, products)
            else:
                self._add_floats([f for run in runs for f in cores.factors(run)], span, products)

    def _products(self, span: Any, stage: Any, first: int) -> Iterator[list[list[Any]]]:
        """Of each two groups of a span the sums of two digits times numbers, exactly.

        Of the first group for lanes 0 and 1 of four, of the second for the others. Where sixteen
        numbers share a factor there are two such lists, with the others zeros in the meantime.

        Args:
            first: the first of their runs in the stage.
        """
        sixteens = GROUP // self.shared.cores.shared
        own = self.start, self.stored, self.high
        for run in range(RUNS):
            digits = self.digits.load(span * RUNS + run, self.lane)
            groups = list(self.shared.groups(stage, *own, first + run))
            for pair, factor in enumerate(digits):
                words = list(zip(*(g[0] for g in groups[2 * pair : 2 * pair + 2]), strict=True))
                yield [self._product(words, factor, part) for part in range(sixteens)]

    def _product(self, words: list[tuple[Any, ...]], digits: list[Any], part: int) -> list[Any]:
        """One of the lists of `_products`: eight rows of numbers of either group are a factor."""
        cores, zero = self.shared.cores, lang.const(0, u32)
        for half, both in enumerate(words):
            other = cores.shared < GROUP and half != part
            for group, word in enumerate(both):
                self.height[2 * half + group] = zero if other else word
        self.width[0], self.width[1] = digits
        self.products.fill(0 if cores.levels else SIGNED)
        lang.ptx.mma_bytes(
            self.products, self.height, self.width, u8 if cores.zero is not None else i8
        )
        return [lang.select(self.second, self.products[2 + d], self.products[d]) for d in range(2)]

    def _add_integers(self, levels: Levels, span: Any, each: Iterator[list[list[Any]]]) -> None:
        """Products times the integers that are factors, added up as such."""
        shared, totals = self.shared.cores.shared, [lang.const(0, i32)] * 2
        words = [
            word >> lang.select(self.second, 8 * GROUP // shared, 0) for word in levels.factors
        ]
        for pair, parts in enumerate(each):
            for part, products in enumerate(parts):
                number = pair * (2 * GROUP // shared) + part
                factor = _byte(words[number // 4], number % 4, levels.signed)
                totals = [t + p * factor for t, p in zip(totals, products, strict=True)]
        lane = self.lane % QUAD
        sums, scale = self.digits.sums(span, lane)
        for kept, total in zip(self.kept, totals, strict=True):
            kept.set(lang.fma(lang.cast(total, f32) * levels.scale, scale, kept))
        if levels.lows is not None:
            lows = [field(word >> 8 * lane, 0, 255, 0) for word in levels.lows]
            low = lang.fma(lows[0], sums[0], lows[1] * sums[1])
            self.below.set(lang.fma(low * -levels.least, scale, self.below))

    def _add_floats(
        self, factors: list[Factor], span: Any, each: Iterator[list[list[Any]]]
    ) -> None:
        """Products times the factors of groups, added up in f32."""
        zero, lows, totals = self.shared.cores.zero, list[Any](), [lang.const(0.0, f32)] * 2
        sums, scale = self.digits.sums(span, lang.select(self.second, 1, 0))
        for pair, (products,) in enumerate(each):
            (factor, low), (later, low_later) = factors[2 * pair : 2 * pair + 2]
            factor = lang.select(self.second, later, factor)
            for digit, product in enumerate(products):
                exact = lang.bitcast(product, f32) - SIGNED_VALUE
                totals[digit] = lang.fma(exact, factor, totals[digit])
            if low is not None and low_later is not None:
                lows.append(lang.select(self.second, low_later, low))
            elif zero:
                lows.append(factor * -zero)
        for kept, total in zip(self.kept, totals, strict=True):
            kept.set(lang.fma(total, scale, kept))
        if lows:
            below = fold([low * total for low, total in zip(lows, sums, strict=True)], operator.add)
            self.below.set(lang.fma(below, scale, self.below))

    def _leave(self, sums: Sums, turn: Any) -> None:
        """Add up digits, of which neighbouring lanes have two each, of every other group."""
        tile, (low, high), first = self.shared.tile, self.kept, self.lane % 2 == 0
        below = self.below.get()
        if not self.shared.cores.levels:  # which two neighbours have
            below = lang.select(first, below, 0.0)
        digits = lang.fma(high, 256.0, low) * lang.select(first, 1.0, 65536.0)
        total = over_lanes(digits + below, QUAD)
        output = self.half * tile.height + self.first + self.lane // QUAD
        with lang.if_(self.lane % QUAD == 0):
            sums.put(self.crew, turn, output, total)


def _byte(word: Any, number: int, signed: bool) -> Any:
    """A byte of a word as a number."""
    above = number + 8 if signed else 4
    return lang.bitcast(lang.ptx.permute_bytes(word, 0, (number, above, above, above)), i32)


def _consume(
    shared: Weights, digits: Digits, sums: Sums, activation: str, x: Any, y: Any,
    extra: dict[str, Any],
) -> None:  # fmt: skip
    me, turn = lang.local_id(), lang.var(0, u32)
    normed, k = digits.normed, shared.p["k"]
    vectors = [normed.vectors(me, extra[v], k) for v in ("norm", "shift") if v in extra]
    ask_for_vectors(extra, shared.tile.rows, shared.p["n"], shared.halves == 2, me)
    lang.ptx.await_launches()
    meeting = partial(meet, shared.met, turn)
    digits.fill(me, x, k, vectors, meeting)
    meeting()
    warp = _Consumer(shared, digits)
    for block in shared.blocks():
        of_two = turn.get() % 2
        warp.block(block, sums, of_two)
        meeting()
        _store(shared, sums, of_two, block, me, normed, activation, y, extra)


def _store(
    shared: Weights, sums: Sums, turn: Any, block: Any, me: Any, normed: Normed, activation: str,
    y: Any, extra: dict[str, Any],
) -> None:  # fmt: skip
    """Add up what the warps have left, and store a word of outputs a thread."""
    tile, p, per = shared.tile, shared.p, y.dtype.per_word
    first, offset = block * tile.rows, me * per
    with lang.if_((offset < tile.rows) & (first + offset < p["n"])):
        totals = [
            sums.total(turn, offset + j + half * tile.height)
            for half in range(tile.halves) for j in range(per)
        ]  # fmt: skip
        if normed.kind == SUMS:
            factor = normed.factor(p["k"])
            totals = [total * factor for total in totals]
        finish = Epilogue(activation, extra, first + offset, per, p["n"], gated=tile.halves == 2)
        y.store(first + offset, finish(totals, lang.const(0, u32)))


kernel: Kernel = Kernel(_streamed_digits, workgroup=(MOST_WARPS + 1) * WARP, name="streamed_digits")
