"""The product of one row by tiles of weights that the copy engine brings (sm_90a): `streamed`.

    y[n] = f(alpha (h . W[n, :]) + bias[n]) + residual[n]
    y[n] = act(h . W[n, :]) * (h . W[half + n, :])                 with a gate

    h = x, x / rms(x) * norm, or (x - mean(x)) / deviation(x) * norm + shift

A group stays on its multiprocessor and takes blocks of outputs in turn, so many that all groups
have as much to read. One thread has tiles of the weight copied into a ring in shared memory. It
begins before the launches before this one are over, since they do not write weights, and lets the
next launch in once its last copy is on its way: so memory is busy while results go from one launch
to the next. The other two warpgroups multiply what has arrived: rows of W are the rows of the first
factor of `mma.sync`, x is a column of the second. Where x has been normalised it is f32: the pair
of 16-bit numbers that add up to it are two columns. A factor of an RMS norm multiplies sums where
x is bf16, whose range is that of f32; else each group divides x before it is rounded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import bf16, f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.ops.matmul.epilogue import Epilogue, ask_for_vectors
from centella.ops.ring import Ring
from centella.ops.rows import QUAD, WARP, over_lanes

EIGHT, DEPTH = 8, 16
WARPGROUP = 128
CONSUMERS = 256  # threads that multiply
WARPS = CONSUMERS // WARP
HIGH = 0xFFFF0000
MOST = 65504.0  # of f16
PAD = 4  # words between the two columns of x, for banks of their own
SUMS, RMS, LAYER = "sums", "rms", "layer"  # norms: a factor of sums; x is divided first


class Stream(Struct, frozen=True):
    """How a group works: outputs of a block, columns of a stage, stages of the ring.

    `eights`: of several rows of x, which are in the ring too, how many eights there is room for.
    `flight`: stages on their way at most, of a ring that each has once; 0: all of them.
    """

    rows: int
    columns: int
    stages: int
    eights: int = 0
    flight: int = 0

    @property
    def height(self) -> int:
        """Rows of a tile in shared memory: whole patterns."""
        return -(-self.rows // EIGHT) * EIGHT

    def stage_bytes(self, halves: int) -> int:
        """Bytes of shared memory of a stage."""
        return 2 * (halves * self.height + EIGHT * self.eights) * self.columns

    def sixteens(self, halves: int) -> int:
        """First factors of `mma.sync` that have all rows of a stage."""
        return -(-halves * self.height // DEPTH)


class Shares:
    """What both roles see: the ring of weights, its barriers, sizes."""

    def __init__(self, tile: Stream, w: Any, halves: int, depth: int) -> None:
        self.tile: Stream = tile
        self.halves: int = halves
        names = ("n", "k", "ldw", "half", "rows", "blocks")
        self.p: dict[str, Any] = {n: lang.parameter(n, u32) for n in names}
        shape = (tile.stages * halves, tile.height, tile.columns)
        self.ring: Any = lang.ptx.SharedTile(w.dtype, shape)
        extents = (self.p["k"], self.p["rows"])
        self.map: Any = lang.ptx.TensorMap(w, self.ring, extents, (self.p["ldw"],), tile.rows)
        self.steps: int = -(-depth // tile.columns)
        self.full: Any = lang.ptx.Barriers(tile.stages)
        self.empty: Any = lang.ptx.Barriers(tile.stages)
        self.met: Any = lang.ptx.Barriers(1)  # of the consumers
        with lang.if_(lang.local_id() == 0):
            for stage in range(tile.stages):
                self.full.init(stage, 1)
                self.empty.init(stage, WARPS)
            self.met.init(0, CONSUMERS)
            lang.ptx.init_fence()
        lang.barrier()

    def blocks(self) -> Any:
        """The blocks of this group."""
        return lang.range(lang.group_id(), self.p["blocks"], lang.num_groups())


def _produce(shared: Shares) -> None:
    """Have all tiles copied, one after the other, as stages become free."""
    tile, ring = shared.tile, Ring(shared.tile.stages)
    nbytes = 2 * shared.halves * tile.rows * tile.columns
    for block in shared.blocks():
        for step in lang.range(lang.const(shared.steps, u32)):
            stage = ring.stage.get()
            shared.empty.wait(stage, ring.parity ^ 1)
            if tile.flight:
                with lang.if_(stage >= tile.flight):
                    shared.full.wait(stage - tile.flight, 0)
            shared.full.expect(stage, lang.const(nbytes, u32))
            for half in range(shared.halves):
                row = block * tile.rows + (shared.p["half"] if half else 0)
                at = (step * tile.columns, row)
                slot = stage * shared.halves + half
                lang.ptx.tma_load(shared.map, at, slot, shared.full, stage)
            ring.advance()
    lang.ptx.launch_dependents()


def bring_both(
    stages: int, empty: Any, count: Any, weights: Callable[[Any, Any], None],
    rows: Callable[[Any, Any], None],
) -> None:  # fmt: skip
    """Have tiles of weights, and of x beside them, copied as stages become free.

    Those of weights that there is room for come before the launches before this one are over.

    Args:
        empty: the barriers of the stages; count: tiles.
        weights, rows: have the tile of a number copied to a stage; `weights` announces the bytes.
    """
    ring, ahead = Ring(stages), lang.minimum(count, stages)
    for number in lang.range(ahead):
        weights(number, number)
    lang.ptx.await_launches()
    for number in lang.range(ahead):
        rows(number, number)
    ring.move(ahead)
    for number in lang.range(ahead, count):
        stage = ring.stage.get()
        empty.wait(stage, ring.parity ^ 1)
        weights(number, stage)
        rows(number, stage)
        ring.advance()
    lang.ptx.launch_dependents()


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


class _Row:
    """x in shared memory, a word of two elements after the other, for each of its columns."""

    def __init__(self, capacity: int, kind: str) -> None:
        self.normed = Normed(capacity, kind)
        self.kind, self.capacity, self.columns = kind, capacity, 2 if kind else 1
        self.pitch = -(-capacity // 2 // WARP) * WARP + PAD
        self._memory = lang.shared(u32, self.columns * self.pitch)

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
                    for j, word in enumerate(words):
                        at = chunk * (EIGHT // 2) + (c * self.pitch + j)
                        self._memory[at] = lang.select(counts, word, 0)

    def start(self, lane: Any) -> Any:
        """Where this thread's words of the second factor begin."""
        return lane % QUAD + lane // QUAD % self.columns * self.pitch

    def load(self, at: Any) -> tuple[Any, Any]:
        """The registers of a factor from a word on."""
        return self._memory[at], self._memory[at + QUAD]


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


def _streamed(
    *, tile: Stream, depth: int, kind: str, gated: bool, activation: str, x: Argument, w: Argument,
    y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    lang.ptx.resident(2)
    halves = 2 if gated else 1
    shared = Shares(tile, w, halves, depth)
    row = _Row(shared.steps * tile.columns, kind)
    sixteens = tile.sixteens(halves)
    scratch = lang.shared(f32, 2 * WARPS * sixteens * DEPTH)
    with lang.ptx.role(0, WARPGROUP), lang.if_(lang.local_id() == 0):
        _produce(shared)
    with lang.ptx.role(WARPGROUP, CONSUMERS):
        _consume(shared, row, scratch, sixteens, activation, x, y, extra)


def _consume(
    shared: Shares, row: _Row, scratch: Any, sixteens: int, activation: str, x: Any, y: Any,
    extra: dict[str, Any],
) -> None:  # fmt: skip
    tile, p = shared.tile, shared.p
    me = lang.local_id() - WARPGROUP
    warp, lane = me // WARP, me % WARP
    vectors = [row.normed.vectors(me, extra[v], p["k"]) for v in ("norm", "shift") if v in extra]
    turn = lang.var(0, u32)
    meeting = partial(meet, shared.met, turn)
    ask_for_vectors(extra, tile.rows, p["n"], shared.halves == 2, me)
    lang.ptx.await_launches()
    row.fill(me, x, p["k"], vectors, meeting)
    meeting()
    share = tile.columns // WARPS  # of a stage's columns, of a warp
    starts = [chunk_of(shared, warp * share, lane, i) for i in range(sixteens)]
    words = row.start(lane) + warp * (share // 2)
    chains = max(1, 4 // sixteens)
    sums = [
        [lang.ptx.Fragment(f32, (16, 8)) for _ in range(min(chains, share // DEPTH))]
        for _ in range(sixteens)
    ]
    height, width = (lang.ptx.Fragment(x.dtype, (16, n)) for n in (16, 8))
    ring = Ring(tile.stages)
    for block in shared.blocks():
        for fragment in (f for line in sums for f in line):
            fragment.fill(0.0)
        for step in lang.range(lang.const(shared.steps, u32)):
            stage = ring.stage.get()
            shared.full.wait(stage, ring.parity)
            slot = shared.ring.at_stage(stage * shared.halves)
            at = words + step * (tile.columns // 2)
            for k in range(share // DEPTH):
                width[0], width[1] = row.load(at + k * EIGHT)
                for line, start in zip(sums, starts, strict=True):
                    lang.ptx.ldmatrix(shared.ring, shared.ring.right(start + slot, 2 * k), height)
                    lang.ptx.mma_sync(line[k % len(line)], height, width)
            with lang.if_(lane == 0):
                shared.empty.arrive(stage)
            ring.advance()
        base = turn % 2 * (WARPS * sixteens * DEPTH)
        _leave(sums, scratch, base + warp * (sixteens * DEPTH), lane, row.columns)
        meeting()
        _store(shared, scratch, base, sixteens, block, me, row, activation, y, extra)


def meet(met: Any, turn: Any) -> None:
    """The consumers meet at a barrier, for the time that a variable counts."""
    met.arrive(0)
    met.wait(0, turn.get() % 2)
    turn.set(turn + 1)


def chunk_of(shared: Shares, column: Any, lane: Any, sixteen: int) -> Any:
    """Where a lane's row of sixteen begins for `ldmatrix`; past the last it is the last."""
    tile, height = shared.tile, shared.tile.height
    at = lane % DEPTH + sixteen * DEPTH
    half = lang.minimum(at // height, shared.halves - 1)
    line = lang.minimum(at - half * height, tile.rows - 1)
    return shared.ring.chunk(line, column // EIGHT + lane // DEPTH, half)


def _leave(sums: Any, scratch: Any, at: Any, lane: Any, columns: int) -> None:
    """Write a warp's sums, of each row of sixteen one."""
    for i, line in enumerate(sums):
        for below in range(2):
            total = line[0][2 * below]
            for fragment in line[1:]:
                total = total + fragment[2 * below]
            if columns == 2:
                for fragment in line:
                    total = total + fragment[2 * below + 1]
            with lang.if_(lane % QUAD == 0):
                scratch[at + lane // QUAD + (i * DEPTH + below * EIGHT)] = total


def _store(
    shared: Shares, scratch: Any, base: Any, sixteens: int, block: Any, me: Any, row: _Row,
    activation: str, y: Any, extra: dict[str, Any],
) -> None:  # fmt: skip
    """Add up the warps' sums, and store a word of outputs a thread."""
    tile, p, per = shared.tile, shared.p, y.dtype.per_word
    first = block * tile.rows

    def total(line: Any) -> Any:
        parts = [scratch[base + line + i * (sixteens * DEPTH)] for i in range(WARPS)]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole + part
        return whole if factor is None else whole * factor

    offset = me * per
    with lang.if_((offset < tile.rows) & (first + offset < p["n"])):
        factor = row.normed.factor(p["k"]) if row.kind == SUMS else None
        sums = [
            total(offset + j + half * tile.height)
            for half in range(shared.halves) for j in range(per)
        ]  # fmt: skip
        gated = shared.halves > 1
        finish = Epilogue(activation, extra, first + offset, per, p["n"], gated=gated)
        y.store(first + offset, finish(sums, lang.const(0, u32)))


kernel: Kernel = Kernel(_streamed, workgroup=WARPGROUP + CONSUMERS, name="streamed")
