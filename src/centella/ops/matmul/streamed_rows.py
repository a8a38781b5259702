"""The product of 2 to 16 rows by tiles of weights that the copy engine brings (sm_90a).

    y[m, n] = f(alpha (x[m, :] . W[n, :]) + bias[n]) + residual[m, n]
    y[m, n] = act(alpha (x[m, :] . W[n, :]) + bias[n]) * (...[half + n])       with a gate

As `streamed_kernel.py`, but rows of x do not stay: their columns come with those of the weights,
stage by stage, eight rows a second factor of `mma.sync`. Weights of the first stages are asked for
before the launches before this one are over, x once they are.
"""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import bf16, f16, f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.op.op import Lowered
from centella.op.variant import Variant
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.problem import THIN
from centella.ops.matmul.product import Product, launch
from centella.ops.matmul.streamed import FEWEST, blocks_of, groups_of, outputs_of, ring_of
from centella.ops.matmul.streamed_kernel import (
    CONSUMERS,
    DEPTH,
    EIGHT,
    WARPGROUP,
    WARPS,
    Shares,
    Stream,
    bring_both,
    chunk_of,
    meet,
)
from centella.ops.ring import Ring
from centella.ops.rows import QUAD, WARP
from centella.specs import Caps

PAD = 4  # elements between lines of sums, for banks of their own


class Rows:
    """Rows of x in a ring beside that of weights, and how they come there."""

    def __init__(self, x: Any, stages: int, eights: int, columns: int) -> None:
        m, k, pitch = (lang.parameter(n, u32) for n in ("m", "k", "ldx"))
        self.ring: Any = lang.ptx.SharedTile(x.dtype, (stages, EIGHT * eights, columns))
        self.map: Any = lang.ptx.TensorMap(x, self.ring, (k, m), (pitch,))


class Sums:
    """What the warps of a group leave of a block, for each row of x a line of outputs.

    Args:
        parts: warps that add up the same outputs; rows: of x; pitch: from line to line.
    """

    def __init__(self, parts: int, rows: int, pitch: int) -> None:
        self.parts: int = parts
        self.rows: int = rows
        self.pitch: int = pitch
        self._memory = lang.shared(f32, parts * rows * pitch)

    def leave(
        self, sums: list[list[list[Any]]], part: Any, lane: Any, first: Any = 0,
        narrow: bool = False,
    ) -> None:  # fmt: skip
        """Write a warp's fragments, [sixteen][eight][chain], of outputs from `first` on.

        `narrow`: the last sixteen has eight outputs.
        """
        start = (part * self.rows + lane % QUAD * 2) * self.pitch + (lane // QUAD + first)
        for i, line in enumerate(sums):
            for e, chains in enumerate(line):
                for register in range(2 if narrow and i == len(sums) - 1 else 4):
                    total = chains[0][register]
                    for fragment in chains[1:]:
                        total = total + fragment[register]
                    column = e * EIGHT + register % 2
                    at = column * self.pitch + (i * DEPTH + register // 2 * EIGHT)
                    self._memory[start + at] = total

    def put(self, part: Any, row: Any, output: Any, total: Any) -> None:
        """Write what a part has of an output."""
        self._memory[(part * self.rows + row) * self.pitch + output] = total

    def total(self, row: Any, output: Any) -> Any:
        """What all parts have of an output."""
        at = row * self.pitch + output
        whole = self._memory[at]
        for i in range(1, self.parts):
            whole = whole + self._memory[at + i * (self.rows * self.pitch)]
        return whole


def _streamed_rows(
    *, tile: Stream, depth: int, gated: bool, activation: str, x: Argument, w: Argument,
    y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    lang.ptx.resident(2)
    halves = 2 if gated else 1
    shared = Shares(tile, w, halves, depth)
    rows = Rows(x, tile.stages, tile.eights, tile.columns)
    sums = Sums(WARPS, EIGHT * tile.eights, DEPTH * tile.sixteens(halves) + PAD)
    with lang.ptx.role(0, WARPGROUP), lang.if_(lang.local_id() == 0):
        _produce(shared, rows)
    with lang.ptx.role(WARPGROUP, CONSUMERS):
        _consume(shared, rows, sums, gated, activation, y, extra)


def _produce(shared: Shares, rows: Rows) -> None:
    """Have all tiles copied; those of weights that there is room for before the wait."""
    tile, p = shared.tile, shared.p
    nbytes = 2 * (shared.halves * tile.rows + EIGHT * tile.eights) * tile.columns
    blocks = (p["blocks"] - lang.group_id() + (lang.num_groups() - 1)) // lang.num_groups()

    def bring_weights(number: Any, stage: Any) -> None:
        turn = number // shared.steps
        block = lang.group_id() + turn * lang.num_groups()
        column = (number - turn * shared.steps) * tile.columns
        shared.full.expect(stage, lang.const(nbytes, u32))
        for half in range(shared.halves):
            row = block * tile.rows + (p["half"] if half else 0)
            slot = stage * shared.halves + half
            lang.ptx.tma_load(shared.map, (column, row), slot, shared.full, stage)

    def bring_rows(number: Any, stage: Any) -> None:
        column = number % shared.steps * tile.columns
        lang.ptx.tma_load(rows.map, (column, 0), stage, shared.full, stage)

    bring_both(shared.full.count, shared.empty, blocks * shared.steps, bring_weights, bring_rows)


def _consume(
    shared: Shares, rows: Rows, sums: Sums, gated: bool, activation: str, y: Any,
    extra: dict[str, Any],
) -> None:  # fmt: skip
    tile = shared.tile
    me = lang.local_id() - WARPGROUP
    warp, lane = me // WARP, me % WARP
    turn = lang.var(0, u32)
    lang.ptx.await_launches()
    share = tile.columns // WARPS  # of a stage's columns, of a warp
    sixteens = tile.sixteens(shared.halves)
    starts = [chunk_of(shared, warp * share, lane, i) for i in range(sixteens)]
    of_x = rows.ring.chunk(
        lane // DEPTH % tile.eights * EIGHT + lane % EIGHT,
        warp * (share // EIGHT) + lane // EIGHT % 2,
    )
    chains = max(1, min(4 // (sixteens * tile.eights), share // DEPTH))
    kept = [
        [[lang.ptx.Fragment(f32, (16, 8)) for _ in range(chains)] for _ in range(tile.eights)]
        for _ in range(sixteens)
    ]
    dtype = shared.ring.dtype
    height = lang.ptx.Fragment(dtype, (16, 16))
    widths = [lang.ptx.Fragment(dtype, (16, 8)) for _ in range(tile.eights)]
    ring = Ring(tile.stages)
    for block in shared.blocks():
        for fragment in (f for line in kept for chain in line for f in chain):
            fragment.fill(0.0)
        for _ in lang.range(lang.const(shared.steps, u32)):
            stage = ring.stage.get()
            shared.full.wait(stage, ring.parity)
            slot = shared.ring.at_stage(stage * shared.halves)
            at_x = of_x + rows.ring.at_stage(stage)
            for k in range(share // DEPTH):
                lang.ptx.ldmatrix(rows.ring, rows.ring.right(at_x, 2 * k), *widths)
                for line, start in zip(kept, starts, strict=True):
                    lang.ptx.ldmatrix(shared.ring, shared.ring.right(start + slot, 2 * k), height)
                    for chain, width in zip(line, widths, strict=True):
                        lang.ptx.mma_sync(chain[k % chains], height, width)
            with lang.if_(lane == 0):
                shared.empty.arrive(stage)
            ring.advance()
        sums.leave(kept, warp, lane)
        meet(shared.met, turn)
        store(shared, sums, block, me, gated, activation, y, extra)
        meet(shared.met, turn)  # sums are written anew


def store(
    shared: Any, sums: Sums, block: Any, me: Any, gated: bool, activation: str, y: Any,
    extra: dict[str, Any], threads: int = CONSUMERS,
) -> None:  # fmt: skip
    """Add up the warps' sums, and store a word of outputs a thread."""
    tile, p, per = shared.tile, shared.p, y.dtype.per_word
    first, across = block * tile.rows, tile.rows // per
    items = sums.rows * across
    for base in range(0, items, threads):
        item = me + base
        row, offset = item // across, item % across * per
        inside = (row < lang.parameter("m", u32)) & (first + offset < p["n"])
        with lang.if_(inside & (item < items) if base + threads > items else inside):
            finish = Epilogue(activation, extra, first + offset, per, p["n"], gated=gated)
            out = [
                sums.total(row, offset + j + half * tile.height)
                for half in range(shared.halves) for j in range(per)
            ]  # fmt: skip
            y.store(row * lang.parameter("ldy", u32) + (first + offset), finish(out, row))


kernel: Kernel = Kernel(_streamed_rows, workgroup=WARPGROUP + CONSUMERS, name="streamed_rows")


def tile_of(product: Product, caps: Caps) -> Stream | None:
    """How a group works where a few rows meet weights of whole chunks, both of 16 bits."""
    problem, (x, w) = product.problem, product.dtypes
    along = problem.a_along_k and problem.b_along_k
    few = problem.batch == 1 and 1 < problem.m <= THIN and problem.k >= FEWEST
    if not (few and along and product.whole and caps.warpgroups and x is w and w in (bf16, f16)):
        return None
    eights, halves = -(-problem.m // EIGHT), 2 if product.gated else 1
    rows = outputs_of(problem, product.specs[-1].dtype, halves)
    kept = 4 * WARPS * EIGHT * eights * (DEPTH * Stream(rows, 0, 0).sixteens(halves) + PAD)
    return ring_of(Stream(rows, 0, 0, eights), problem, halves, lambda tile: kept, caps)


def _launches(product: Product, tile: Stream, caps: Caps) -> Lowered:
    problem = product.problem
    constants = (
        ("activation", product.activation), ("depth", problem.k), ("gated", product.gated),
        ("tile", tile),
    )  # fmt: skip
    scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("ldx", problem.lda),
        ("ldw", problem.ldb), ("ldy", problem.ldy), ("half", problem.n),
        ("rows", product.columns), ("blocks", blocks_of(problem, tile.rows)),
        ("alpha", product.alpha), ("ldr", product.residual_pitch),
    )  # fmt: skip
    names, groups = ("x", "w", *product.names), groups_of(problem, tile.rows)
    return Lowered((launch(kernel, product, names, scalars, constants, groups, kernel.workgroup),))


def _tile(product: Product, caps: Caps) -> Stream | None:
    return None if "scale" in product.names else tile_of(product, caps)


STREAMED_ROWS: Variant[Product, Stream] = Variant(
    "streamed_rows", _tile, _launches, lambda product, caps: caps.fast_tensor_cores
)
