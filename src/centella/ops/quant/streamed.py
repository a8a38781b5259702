"""The product of up to 16 rows with a quantised weight that the copy engine brings (sm_90a).

    y[m, n] = f(alpha (x[m, :] . W[n, :]) + bias[n]) + residual[m, n]

As `matmul/streamed_rows.py`; how weights come is in `stream.py`. One thread has rows of x copied
into a ring of their own once the launches before this one are over. Consumers turn bytes into the
dtype of x, exactly, which is the first factor of `mma.sync`; rows of x are columns of the second. A
sum of 32 products is multiplied by its factor and added in f32. What a format adds to its numbers
times a factor is multiplied by the sum of x, which is the product with ones.

Of four neighbouring bytes, which a thread has of a row, the first two are neighbours in a factor
and the last two; x is read in the same order.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from centella import lang
from centella.dtypes import bf16, f16, f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.op.op import Form
from centella.op.variant import Variant
from centella.ops.layout import rows_of
from centella.ops.matmul.one_row import EIGHT
from centella.ops.matmul.problem import THIN, LinearAttrs, aligned
from centella.ops.matmul.several_rows import PAD, Rows, Sums, store
from centella.ops.matmul.streamed import LEAST, SHARED, blocks_of, outputs_of
from centella.ops.matmul.streamed_kernel import WARPGROUP, meet
from centella.ops.quant.beside import Beside, Row, words_of
from centella.ops.quant.format import GROUP, RUN, SYMBOLS
from centella.ops.quant.product import Product, launched, of_linear
from centella.ops.quant.stream import (
    MOST_ROWS,
    REST,
    BlockStream,
    Factor,
    Weights,
    bytes_of,
    comes_in_blocks,
    parts_of,
)
from centella.ops.quant.table import FORMATS
from centella.ops.ring import Ring
from centella.ops.rows import QUAD, WARP
from centella.specs import Caps

CONSUMERS = 256  # threads that multiply
FEWEST = 2  # rows of x
ONES = {bf16: 0x3F803F80, f16: 0x3C003C00}  # two


def _streamed_blocks(
    *, tile: BlockStream, format: str, depth: int, beside: Beside, activation: str,
    x: Argument, w: Argument, y: Argument, **operands: Argument,
) -> None:  # fmt: skip
    kind = FORMATS[format]
    lang.ptx.resident(1)
    planes = [operands.pop(symbol) for symbol in SYMBOLS[1 : len(kind.planes)]]
    shared = Weights(tile, kind, depth, beside, x.dtype, w, planes, bringers=2)
    rows = Rows(x, depth, tile.stages, tile.eights, tile.columns)
    sums = Sums(tile.across, EIGHT * tile.eights, tile.teams * tile.lines + PAD)
    with lang.ptx.role(0, WARP), lang.if_(lang.local_id() == 0):
        shared.bring()
    with lang.ptx.role(WARP, WARP), lang.if_(lang.local_id() == WARP):
        _bring_rows(shared, rows)
    with lang.ptx.role(WARPGROUP, CONSUMERS):
        _consume(shared, rows, sums, activation, y, operands)


def _bring_rows(shared: Weights, rows: Rows) -> None:
    """The same of rows of x, once they are there."""
    ring = Ring(shared.tile.stages)
    lang.ptx.await_launches()
    for _ in shared.blocks():
        for step in lang.range(lang.const(shared.steps, u32)):
            stage = ring.stage.get()
            shared.empty.wait(stage, ring.parity ^ 1)
            shared.full.expect(stage, lang.const(rows.nbytes, u32))
            rows.bring(step, stage, shared.full)
            ring.advance()


class _Consumer:
    """A warp: its share of a stage's columns and rows, and where it is in both rings."""

    def __init__(self, shared: Weights, rows: Rows) -> None:
        self.shared, self.rows, tile = shared, rows, shared.tile
        me = lang.local_id() - WARPGROUP
        self.lane, warp = me % WARP, me // WARP
        self.part, self.first = warp % tile.across, warp // tile.across * tile.lines
        self.halves = tile.lines // EIGHT
        self.ring, self.beside = Ring(tile.stages), Ring(tile.slots)
        dtype = shared.ring.dtype
        row = lang.minimum(self.first + self.lane % tile.lines, tile.rows - 1)
        self.start: Any = shared.start(row, self.part, self.lane)
        self.of_x = [
            rows.ring.chunk(
                self.lane // QUAD + e * EIGHT,
                self.part * (RUN // EIGHT) + self.lane % QUAD // 2,
            )
            for e in range(tile.eights)
        ]
        self.stored = shared.fragment()
        high = shared.high
        self.high = high.start(row, self.part, self.lane) if high else None
        self.height = lang.ptx.Fragment(dtype, (16, 16))
        self.ones = lang.ptx.Fragment(dtype, (16, 16))
        for register in range(4):
            self.ones[register] = lang.const(ONES[dtype], u32)
        self.widths = [[lang.ptx.Fragment(dtype, (16, 8)) for _ in range(tile.eights)]
                       for _ in range(2)]  # fmt: skip
        self.products, self.of_ones, self.kept = (
            [lang.ptx.Fragment(f32, (16, 8)) for _ in range(tile.eights)] for _ in range(3)
        )

    def block(self, block: Any) -> None:
        """The sums of a block."""
        shared = self.shared
        for fragment in self.kept:
            fragment.fill(0.0)
        slot = self.beside.stage.get()
        shared.told.wait(slot, self.beside.parity)
        rows = [
            shared.rows(slot, 0, shared.row(block, 0), self.first + (self.lane // QUAD + h * EIGHT))
            for h in range(self.halves)
        ]
        for step in lang.range(lang.const(shared.steps, u32)):
            stage = self.ring.stage.get()
            shared.full.wait(stage, self.ring.parity)
            self._run(rows, step * shared.tile.across + self.part, stage)
            with lang.if_(self.lane == 0):
                shared.empty.arrive(stage)
            self.ring.advance()
        with lang.if_(self.lane == 0):
            shared.read.arrive(slot)
        self.beside.advance()

    def _run(self, rows: list[list[Row]], number: Any, stage: Any) -> None:
        """RUN columns, of which so many come before; past the last ones x is 0."""
        shared = self.shared
        factors = [shared.cores.factors(shared.run(number, row)) for row in rows]
        share = GROUP // shared.cores.shared
        groups = shared.groups(stage, self.start, self.stored, self.high)
        for group, words in enumerate(groups):
            self._take_x(stage, group)
            own = slice(group * share, (group + 1) * share)
            self._multiply(words, [line[own] for line in factors])

    def _take_x(self, stage: Any, group: int) -> None:
        """Rows of x, of a group's columns: the words that go with four neighbouring numbers."""
        rows = self.rows.ring
        for e, start in enumerate(self.of_x):
            for half in range(2):
                chunk = rows.right(start, group * (GROUP // EIGHT) + 2 * half)
                at = (chunk + rows.at_stage(stage)) * 4 + self.lane % 2 * 2
                for register in range(2):
                    self.widths[half][e][register] = rows.memory[at + register]

    def _multiply(self, words: list[tuple[Any, Any]], factors: list[list[Factor]]) -> None:
        """A group: products, times their factors."""
        if len(factors[0]) == 1:
            self._multiply_part(range(2), words, [line[0] for line in factors])
            return
        for sixteen in range(2):
            part = [line[sixteen] for line in factors]
            self._multiply_part(range(sixteen, sixteen + 1), words, part)

    def _multiply_part(
        self, sixteens: range, words: list[tuple[Any, Any]], factors: list[Factor]
    ) -> None:
        """The sixteens of a group that share factors."""
        every = range(self.shared.tile.eights)
        if factors[0][1] is not None:
            for e in every:
                self.of_ones[e].fill(0.0)
                for sixteen in sixteens:
                    lang.ptx.mma_sync(self.of_ones[e], self.ones, self.widths[sixteen][e])
        for fragment in self.products:
            fragment.fill(0.0)
        for sixteen in sixteens:
            pairs = [self._widened(half[sixteen]) for half in words]
            for half in range(2):  # of eight rows both
                self.height[half], self.height[half + 2] = pairs[half % len(pairs)]
            for fragment, width in zip(self.products, self.widths[sixteen], strict=True):
                lang.ptx.mma_sync(fragment, self.height, width)
        for e in every:
            for register in range(2 * self.halves):
                factor, low = factors[register // 2]
                total = lang.fma(self.products[e][register], factor, self.kept[e][register])
                if low is not None:
                    total = lang.fma(self.of_ones[e][register], low, total)
                self.kept[e][register] = total

    def _widened(self, word: Any) -> tuple[Any, Any]:
        """Four numbers in the dtype of x."""
        dtype, zero = self.shared.ring.dtype, self.shared.cores.zero
        if zero is None:
            return lang.ptx.widen_i8(word, dtype)
        return lang.ptx.widen_u7(word, dtype, zero)


def _consume(
    shared: Weights, rows: Rows, sums: Sums, activation: str, y: Any, extra: dict[str, Any]
) -> None:  # fmt: skip
    warp = _Consumer(shared, rows)
    me, turn = lang.local_id() - WARPGROUP, lang.var(0, u32)
    lang.ptx.await_launches()

    for block in shared.blocks():
        warp.block(block)
        lines = [[[fragment] for fragment in warp.kept]]
        sums.leave(lines, warp.part, warp.lane, warp.first, warp.halves == 1)
        meet(shared.met, turn)
        store(shared, sums, block, me, False, activation, y, extra, CONSUMERS)
        meet(shared.met, turn)  # sums are written anew


kernel: Kernel = Kernel(_streamed_blocks, workgroup=WARPGROUP + CONSUMERS, name="streamed_blocks")


# -- how it is launched ---------------------------------------------------------------------------


def _tile(product: Product, caps: Caps) -> BlockStream | None:
    """How a group works where few rows of 16 bits meet whole runs; None where they do not."""
    kind, problem, x, planes = product.format, product.problem, product.x, product.planes
    whole = aligned(rows_of(x), problem.lda * (problem.m > 1), 0)
    few = 0 < problem.m <= THIN
    if not (whole and few and comes_in_blocks(kind, problem.k, x.dtype, planes, caps)):
        return None
    rows, eights = outputs_of(problem, product.y.dtype, 1, MOST_ROWS), -(-problem.m // EIGHT)
    tile = BlockStream(rows, 0, eights)
    beside = 8 * sum(words_of(rows, *layout) for layout in parts_of(kind, planes)[0])
    sums = 4 * tile.across * EIGHT * eights * (tile.teams * tile.lines + PAD)
    columns = tile.columns
    stage = tile.height * bytes_of(kind, columns) + 2 * EIGHT * eights * columns
    room, steps = min(SHARED, caps.max_shared) - beside - sums - REST, tile.rounds(problem.k)
    tile = replace(tile, stages=min(room // stage, steps * blocks_of(problem, tile.rows)))
    fits = tile.stages >= min(LEAST, steps) and kernel.workgroup <= caps.max_workgroup
    return tile if fits else None


def _preferred(form: Form[LinearAttrs], caps: Caps) -> bool:
    """One row has digits; where they do not fit, `linear_blocks` is as fast and joins others."""
    return caps.fast_tensor_cores and of_linear(form).problem.m >= FEWEST


STREAMED_BLOCKS: Variant[Form[LinearAttrs], BlockStream] = Variant(
    "streamed_blocks",
    lambda form, caps: _tile(of_linear(form), caps),
    lambda form, tile, caps: launched(kernel, of_linear(form), tile),
    _preferred,
)
