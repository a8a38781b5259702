"""The product of one row with a quantised weight, of integers on tensor cores (sm_90a).

    y[n] = f(alpha (h . W[n, :]) + bias[n]) + residual[n]
    y[n] = act(alpha (h . W[n, :]) + bias[n]) (alpha (h . W[half + n, :]) + bias[half + n])
    h = x, or x normalised as in `matmul/streamed_kernel.py`

How weights come is in `stream.py`. Stored numbers are multiplied as the bytes they are; it is h
that is made of integers, once for a group. Of 32 neighbours, the largest of which is below 2^e,
each is cut to an integer of 31 bits times 2^(e - 30), and that is four digits of 8 bits, from -128
to 127: columns of the second factor of `mma`, whose first has 16 rows of 32 bytes. Sums of 32
products are exact. They are made f32, multiplied by their factor and 2^(e - 30), and added to one
sum for each digit; 256 to the power of the digit comes last. What a format adds to its numbers
times a factor is multiplied by the sum of h. (Digits of a factor on integer tensor cores: Ootomo,
Ozaki and Yokota 2023, arXiv 2306.11975, there of f64.)

The error is that of h, below 2^-29 of the largest of 32 (of 2^-97, where that is more), and of
additions in f32. 32 neighbours with an infinity or NaN give NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from centella import lang
from centella.dtypes import f32, i8, i32, u8, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.streamed_kernel import EIGHT, SUMS, Normed, meet
from centella.ops.matmul.streamed_rows import PAD, Sums
from centella.ops.quant.format import CHUNK, GROUP, RUN, SYMBOLS
from centella.ops.quant.stream import (
    ACROSS,
    COLUMNS,
    TEAMS,
    WARPS,
    Beside,
    BlockStream,
    Factor,
    Row,
    Weights,
    per_byte,
)
from centella.ops.quant.table import FORMATS
from centella.ops.ring import Ring
from centella.ops.rows import QUAD, WARP, fold, over_lanes

CREWS = 2
CONSUMERS = CREWS * WARPS * WARP
PARTS = CREWS * ACROSS  # of the columns
DIGITS = 4
OFFSET = 0x00808080  # which makes digits of 0 to 255 those of -128 to 127
EXPONENT, LEAST = 0x7F800000, 30  # of f32; the smallest that has a scale
PAIR = 2 * GROUP + 4  # words of the digits of two groups, and some for banks of their own
MAGIC, MAGIC_VALUE = 0x4B400000, 12582912.0  # 1.5 2^23: plus a sum below 2^22 it is an f32's bits


def pitch_of(tile: BlockStream) -> int:
    """Words of the sums of a block: of the rows of all warps, which may be more than it has."""
    return tile.halves * tile.height + TEAMS * EIGHT + PAD


class Digits:
    """A row of h in shared memory as digits, and of each 32 numbers a scale and their sum.

    Of two groups the four words of a lane, two for each group, are a chunk: digit c of the numbers
    4 t to 4 t + 3, then 16 further, is lane 4 c + t's.
    """

    def __init__(self, capacity: int, kind: str) -> None:
        self.normed: Normed = Normed(capacity, kind, CONSUMERS)
        pairs = capacity // (2 * GROUP)
        self._words = lang.shared(u32, pairs * PAIR)
        self._levels = lang.shared(f32, 4 * pairs)

    def fill(
        self, me: Any, x: Any, k: Any, vectors: list[list[list[Any]]], meet: Callable[[], None]
    ) -> None:  # fmt: skip
        """Write this thread's chunks; four neighbouring threads have a group."""
        chunks = self.normed.chunks(me)
        for chunk, eight in zip(chunks, self.normed.values(me, x, k, vectors, meet), strict=True):
            inside = chunk * EIGHT < k
            values = [lang.select(inside, v, 0.0) for v in eight]
            bits = [lang.bitcast(v, u32) & 0x7FFFFFFF for v in values]
            largest = over_lanes(fold(bits, lang.maximum), GROUP // EIGHT, "max")
            total = over_lanes(fold(values, lambda a, b: a + b), GROUP // EIGHT)
            exponent = lang.maximum(largest >> 23, LEAST)
            up = lang.bitcast((283 - exponent) << 23, f32)
            down = lang.bitcast((exponent - 29) << 23, f32)
            down = lang.select(largest < EXPONENT, down, float("nan"))
            words = [_digits(v * up) for v in values]
            with lang.if_(chunk < self.normed.capacity // EIGHT):
                pair, group = chunk // 8, chunk // 4 % 2
                start = pair * PAIR + chunk % 2 * 8 + (group * 2 + chunk // 2 % 2)
                for quad in range(2):
                    for digit, word in enumerate(_turned(words[4 * quad : 4 * quad + 4])):
                        self._words[start + (quad * 4 + digit * 16)] = word
                with lang.if_(chunk % 4 == 0):
                    self._levels[pair * 4 + group * 2] = down
                    self._levels[pair * 4 + group * 2 + 1] = total

    def load(self, pair: Any, lane: Any) -> list[Any]:
        """This lane's words of two groups; columns past those of the digits have them again."""
        return self._words.load(pair * PAIR + lane % (DIGITS * QUAD) * 4)

    def levels(self, pair: Any) -> list[Any]:
        """Scale and sum of two groups."""
        return self._levels.load(pair * 4)


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
    shared = Weights(tile, stored, depth, beside, x.dtype, w, planes, CREWS)
    digits = Digits(shared.steps * COLUMNS, kind)
    sums = Sums(PARTS, 2, pitch_of(tile))  # of two blocks in turn
    with lang.ptx.role(0, CONSUMERS):
        _consume(shared, digits, sums, activation, x, y, operands)
    with lang.ptx.role(CONSUMERS, WARP), lang.if_(lang.local_id() == CONSUMERS):
        shared.bring()


class _Consumer:
    """A warp: its share of a stage's columns and rows, and where it is in both rings.

    Attributes:
        next: the first stage of a block that its crew takes; crews take them in turn.
    """

    def __init__(self, shared: Weights, digits: Digits) -> None:
        self.shared, self.digits, tile = shared, digits, shared.tile
        me = lang.local_id()
        self.lane, warp = me % WARP, me // WARP
        self.part, team, self.crew = warp % ACROSS, warp // ACROSS % TEAMS, warp // WARPS
        self.next = lang.var(self.crew, u32)
        both = tile.halves == 2  # each team has the rows of one
        self.half: Any = team if both else 0
        self.first: Any = 0 if both else team * tile.lines
        self.eights = tile.lines // EIGHT
        self.ring, self.beside = Ring(tile.stages), Ring(tile.slots)
        self.ring.move(self.crew)
        dtype = shared.ring.dtype
        row = lang.minimum(self.first + self.lane % tile.lines, tile.rows - 1)
        column = self.part * (RUN // per_byte(shared.kind) // CHUNK)
        self.start: Any = shared.ring.chunk(row, column + self.lane // tile.lines % 2, self.half)
        self.stored = lang.ptx.Fragment(dtype, (16, 16) if self.eights == 2 else (16, 8))
        high = shared.high
        self.high = high.start(row, self.part, self.lane, self.half) if high else None
        self.height = lang.ptx.Fragment(dtype, (16, 16))
        self.width = lang.ptx.Fragment(dtype, (16, 8))
        self.products = lang.ptx.Fragment(i32, (16, 8))
        self.kept = lang.vars(f32, self.eights, 2, init=0.0)  # of two digits
        self.below = lang.vars(f32, self.eights, init=0.0)  # what is added to numbers, times h

    def block(self, block: Any, sums: Sums, turn: Any) -> None:
        """The sums of a block."""
        shared = self.shared
        for register in (r for line in (*self.kept, self.below) for r in line):
            register.set(0.0)
        slot = self.beside.stage.get()
        shared.told.wait(slot, self.beside.parity)
        first = shared.row(block, 0)
        if shared.halves == 2:
            first = first + self.half * shared.p["half"]
        rows = [
            shared.rows(slot, self.half, first, self.first + (self.lane // QUAD + e * EIGHT))
            for e in range(self.eights)
        ]
        for step in lang.range(
            lang.ptx.warpgroup_uniform(self.next.get()), lang.const(shared.steps, u32), CREWS
        ):
            stage = self.ring.stage.get()
            shared.full.wait(stage, self.ring.parity)
            self._run(rows, step * ACROSS + self.part, stage)
            with lang.if_(self.lane == 0):
                shared.empty.arrive(stage)
            self.ring.skip(CREWS)
        self.next.set((self.next + shared.steps) % CREWS)
        with lang.if_(self.lane == 0):
            shared.read.arrive(slot)
        self.beside.advance()
        self._leave(sums, turn)

    def _run(self, rows: list[list[Row]], number: Any, stage: Any) -> None:
        """RUN columns, of which so many come before; past the last ones h is 0."""
        digits, levels = list[Any](), list[Any]()
        own = self.start, self.stored, self.high
        for group, words, factors in self.shared.groups(rows, number, stage, *own):
            if group % 2 == 0:
                pair = number * (RUN // (2 * GROUP)) + group // 2
                digits, levels = self.digits.load(pair, self.lane), self.digits.levels(pair)
            at = group % 2 * 2
            self._multiply(words, digits[at : at + 2], levels[at : at + 2], factors)

    def _multiply(
        self, words: list[tuple[Any, Any]], digits: list[Any], levels: list[Any],
        factors: list[list[Factor]],
    ) -> None:  # fmt: skip
        """A group: exact sums of products, times their factors and scale.

        Where sixteen numbers share a factor, the others are zeros in the meantime.
        """
        scale, total = levels
        self.width[0], self.width[1] = digits
        for part in range(len(factors[0])):
            for e in range(2):
                first, last = words[e % self.eights]
                both = len(factors[0]) == 1
                self.height[e] = first if both or part == 0 else lang.const(0, u32)
                self.height[e + 2] = last if both or part == 1 else lang.const(0, u32)
            self.products.fill(MAGIC)
            dtype = i8 if self.shared.cores.zero is None else u8
            lang.ptx.mma_bytes(self.products, self.height, self.width, dtype)
            for e, line in enumerate(factors):
                factor, low = line[part]
                scaled = factor * scale
                for digit, kept in enumerate(self.kept[e]):
                    exact = lang.bitcast(self.products[2 * e + digit], f32) - MAGIC_VALUE
                    kept.set(lang.fma(exact, scaled, kept))
                level = self._level(factor, low)
                if level is not None:
                    self.below[e].set(lang.fma(level, total, self.below[e]))

    def _level(self, factor: Any, low: Any | None) -> Any | None:
        """What a format adds to its numbers, as they are stored, times the factor."""
        zero = self.shared.cores.zero
        if not zero:
            return low
        return -zero * factor if low is None else lang.fma(-zero, factor, low)

    def _leave(self, sums: Sums, turn: Any) -> None:
        """Add up digits, of which neighbouring lanes have two each."""
        power = lang.select(self.lane % 2 == 0, 1.0, 65536.0)
        for e, (low, high) in enumerate(self.kept):
            total = over_lanes(lang.fma(high, 256.0, low) * power, 2) + self.below[e]
            output = self.half * self.shared.tile.height + self.first
            with lang.if_(self.lane % QUAD == 0):
                part, row = self.crew * ACROSS + self.part, self.lane // QUAD + e * EIGHT
                sums.put(part, turn, output + row, total)


def _consume(
    shared: Weights, digits: Digits, sums: Sums, activation: str, x: Any, y: Any,
    extra: dict[str, Any],
) -> None:  # fmt: skip
    me, turn = lang.local_id(), lang.var(0, u32)
    normed, k = digits.normed, shared.p["k"]
    vectors = [normed.vectors(me, extra[v], k) for v in ("norm", "shift") if v in extra]
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


kernel: Kernel = Kernel(_streamed_digits, workgroup=CONSUMERS + WARP, name="streamed_digits")
