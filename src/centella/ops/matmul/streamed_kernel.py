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
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.ops.hopper import PANEL
from centella.ops.matmul.epilogue import Epilogue, ask_for_vectors
from centella.ops.matmul.one_row import CONSUMERS, DEPTH, EIGHT, SUMS, Row
from centella.ops.ring import Ring
from centella.ops.rows import QUAD, WARP, fold

WARPGROUP = 128
WARPS = CONSUMERS // WARP


class Stream(Struct, frozen=True):
    """How a group works: outputs of a block, columns of a stage, stages of the ring.

    `eights`: of several rows of x, which are in the ring too, how many eights there is room for.
    `flight`: stages in flight at most, where the ring has room for all weights of a group; else 0.
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
        # Of one row, or beside 16 rows of x, a copy a panel was faster (benchmarks/LOG.md).
        whole = tile.eights == 1 and tile.rows == tile.height and depth % PANEL == 0
        self.map: Any = lang.ptx.TensorMap(
            w, self.ring, extents, (self.p["ldw"],), tile.rows, whole
        )
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

    def tiles(self) -> Any:
        """How many tiles of weights they are."""
        groups = lang.num_groups()
        return (self.p["blocks"] - lang.group_id() + (groups - 1)) // groups * self.steps


def produce(shared: Shares) -> None:
    """Have all tiles copied, one after the other, as stages become free."""
    tile, ring = shared.tile, Ring(shared.tile.stages)
    nbytes = 2 * shared.halves * tile.rows * tile.columns
    for block in shared.blocks():
        for step in lang.range(lang.const(shared.steps, u32)):
            stage = ring.stage.get()
            shared.empty.wait(stage, ring.parity ^ 1)
            if 0 < tile.flight < tile.stages:
                with lang.if_(stage >= tile.flight):
                    shared.full.wait(stage - tile.flight, ring.parity)
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
    with lang.if_(count <= stages):  # all of them are on their way
        lang.ptx.launch_dependents()
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


class Line:
    """A warp's sums for sixteen rows of W; for the last eight, if `narrow`.

    The lower half of a narrow first factor is the same eight rows, 16 columns further. The upper
    half counts with x in the second factor, the lower half with x 16 columns further; the other
    two combinations are computed and ignored.
    """

    def __init__(
        self, shared: Shares, number: int, column: Any, lane: Any, narrow: bool, chains: int
    ) -> None:  # fmt: skip
        self.narrow: bool = narrow
        self._ring = shared.ring
        self._sums = [lang.ptx.Fragment(f32, (16, 8)) for _ in range(chains)]
        eight, row = lane // EIGHT, lane % (EIGHT if narrow else DEPTH)
        across = eight % 2 * 2 + eight // 2 if narrow else lane // DEPTH
        self._start = _chunk(shared, column // EIGHT + across, row + number * DEPTH)

    def clear(self) -> None:
        """Begin a block of outputs."""
        for fragment in self._sums:
            fragment.fill(0.0)

    def multiply(self, slot: Any, height: Any, sixteen: int, width: Any) -> None:
        """Add the products of 16 columns of a stage; if narrow, of 32 for every other sixteen.

        Args:
            slot: the stage, in chunks; height: a first factor to load; sixteen: which columns.
            width: the second factor of these columns.
        """
        if self.narrow and sixteen % 2:
            return
        number = sixteen // 2 if self.narrow else sixteen
        start = self._ring.right(self._start + slot, 2 * sixteen)
        lang.ptx.ldmatrix(self._ring, start, height)
        lang.ptx.mma_sync(self._sums[number % len(self._sums)], height, width)

    def totals(self, columns: int) -> list[Any]:
        """The sums of row lane / 4, and of the row eight further if not narrow, where lane % 4 = 0.

        Args:
            columns: of the second factor that x has.
        """
        four = [fold([f[i] for f in self._sums], operator.add) for i in range(4)]
        if not self.narrow:
            return [fold(four[i : i + columns], operator.add) for i in (0, 2)]
        if columns == 1:
            return [four[0] + four[3]]
        first = lang.local_id() % QUAD == 0
        own = lang.select(first, four[0] + four[1], four[2] + four[3])
        return [own + lang.shuffle_xor(own, 1)]


def _streamed(
    *, tile: Stream, depth: int, kind: str, gated: bool, activation: str, x: Argument, w: Argument,
    y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    lang.ptx.resident(2)
    halves = 2 if gated else 1
    shared = Shares(tile, w, halves, depth)
    row = Row(x, shared.steps * tile.columns, kind)
    sixteens = tile.sixteens(halves)
    scratch = lang.shared(f32, 2 * WARPS * sixteens * DEPTH)
    with lang.ptx.role(0, WARPGROUP), lang.if_(lang.local_id() == 0):
        produce(shared)
    with lang.ptx.role(WARPGROUP, CONSUMERS):
        _consume(shared, row, scratch, sixteens, activation, x, y, extra)


def _consume(
    shared: Shares, row: Row, scratch: Any, sixteens: int, activation: str, x: Any, y: Any,
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
    odd = shared.halves * tile.height % DEPTH != 0 and share > DEPTH
    chains = max(1, 4 // sixteens)
    lines = []
    for number in range(sixteens):
        narrow = odd and number == sixteens - 1
        own = min(chains, share // DEPTH // (2 if narrow else 1))
        lines.append(Line(shared, number, warp * share, lane, narrow, own))
    start = row.start(lane, share) + warp * (share // EIGHT)
    height = lang.ptx.Fragment(x.dtype, (16, 16))
    widths = [lang.ptx.Fragment(x.dtype, (16, 8)) for _ in range(min(2, share // DEPTH))]
    if all(line.narrow for line in lines):
        widths.pop()
    ring = Ring(tile.stages)
    outputs = _Outputs(shared, row, me, activation, y, extra)
    for block in shared.blocks():
        outputs.begin(block)
        for line in lines:
            line.clear()
        for step in lang.range(lang.const(shared.steps, u32)):
            stage = ring.stage.get()
            shared.full.wait(stage, ring.parity)
            slot = shared.ring.at_stage(stage * shared.halves)
            at = start + step * (tile.columns // EIGHT)
            for sixteen in range(share // DEPTH):
                if sixteen % 2 == 0:
                    row.load(at + sixteen * 2, widths)
                for line in lines:
                    line.multiply(slot, height, sixteen, widths[sixteen % 2 % len(widths)])
            with lang.if_(lane == 0):
                shared.empty.arrive(stage)
            ring.advance()
        base = turn % 2 * (WARPS * sixteens * DEPTH)
        for number, line in enumerate(lines):
            first = base + warp * (sixteens * DEPTH) + number * DEPTH
            for below, total in enumerate(line.totals(row.columns)):
                with lang.if_(lane % QUAD == 0):
                    scratch[first + lane // QUAD + below * EIGHT] = total
        meeting()
        outputs.store(block, scratch, base, sixteens)


def meet(met: Any, turn: Any) -> None:
    """The consumers meet at a barrier, for the time that a variable counts."""
    met.arrive(0)
    met.wait(0, turn.get() % 2)
    turn.set(turn + 1)


def chunk_of(shared: Shares, column: Any, lane: Any, sixteen: int) -> Any:
    """Where a lane's row of sixteen begins for `ldmatrix`; past the last it is the last."""
    return _chunk(shared, column // EIGHT + lane // DEPTH, lane % DEPTH + sixteen * DEPTH)


def _chunk(shared: Shares, across: Any, at: Any) -> Any:
    """A chunk of a row of the first stage, counted over its halves; past the last of the last."""
    tile, height = shared.tile, shared.tile.height
    half = lang.minimum(at // height, shared.halves - 1)
    line = lang.minimum(at - half * height, tile.rows - 1)
    return shared.ring.chunk(line, across, half)


class _Outputs:
    """This thread's outputs of a block: a word of y, or none."""

    def __init__(
        self, shared: Shares, row: Row, me: Any, activation: str, y: Any, extra: dict[str, Any]
    ) -> None:  # fmt: skip
        self.shared, self.row, self.y = shared, row, y
        self._activation, self._extra = activation, extra
        self._per = y.dtype.per_word
        self._offset = me * self._per
        # Loaded before the sums are known: their memory is half a microsecond away.
        self._residual = lang.vars(f32, self._per, init=0.0) if "residual" in extra else []

    def _some(self, first: Any) -> Any:
        """Whether this thread has outputs of the block that begins there."""
        inside = first + self._offset < self.shared.p["n"]
        return (self._offset < self.shared.tile.rows) & inside

    def _epilogue(self, first: Any, extra: dict[str, Any]) -> Epilogue:
        gated = self.shared.halves > 1
        column = first + self._offset
        return Epilogue(
            self._activation, extra, column, self._per, self.shared.p["n"], gated=gated
        )  # fmt: skip

    def begin(self, block: Any) -> None:
        """Ask for the residual."""
        first = block * self.shared.tile.rows
        if self._residual:
            with lang.if_(self._some(first)):
                only = {"residual": self._extra["residual"]}
                values = self._epilogue(first, only).residual(lang.const(0, u32))
                for kept, value in zip(self._residual, values, strict=True):
                    kept.set(value)

    def store(self, block: Any, scratch: Any, base: Any, sixteens: int) -> None:
        """Add up the warps' sums, and store what they are."""
        tile, row = self.shared.tile, self.row
        first = block * tile.rows

        def total(line: Any) -> Any:
            parts = [scratch[base + line + i * (sixteens * DEPTH)] for i in range(WARPS)]
            whole = fold(parts, operator.add)
            return whole if factor is None else whole * factor

        with lang.if_(self._some(first)):
            factor = row.normed.factor(self.shared.p["k"]) if row.kind == SUMS else None
            sums = [
                total(self._offset + j + half * tile.height)
                for half in range(self.shared.halves) for j in range(self._per)
            ]  # fmt: skip
            finish = self._epilogue(first, self._extra)
            residual = [r.get() for r in self._residual] or None
            self.y.store(first + self._offset, finish(sums, lang.const(0, u32), residual))


kernel: Kernel = Kernel(_streamed, workgroup=WARPGROUP + CONSUMERS, name="streamed")
