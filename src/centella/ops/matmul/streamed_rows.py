"""The product of 2 to 16 rows by tiles of weights that the copy engine brings (sm_90a).

    y[m, n] = f(alpha (x[m, :] . W[n, :]) + bias[n]) + residual[m, n]
    y[m, n] = act(alpha (x[m, :] . W[n, :]) + bias[n]) * (...[half + n])       with a gate

    x[m, :] = x[m, :] / rms(x[m, :]) * norm                                     with a norm, bf16

As `streamed_kernel.py`, but rows of x do not stay: their columns come with those of the weights,
stage by stage, eight rows a second factor of `mma.sync`. Weights of the first stages are asked for
before the launches before this one are over, x once they are. With a norm a warp multiplies its
columns of x by their weights in registers, where the f32 products become two bf16 numbers each, and
adds up their squares: a row's factor is known when its sums are added up, and multiplies them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from centella import lang
from centella.dtypes import bf16, f16, f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.op.variant import Variant
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.normed import JOINED_ROWS, NormedAttrs
from centella.ops.matmul.normed_kernel import product_of
from centella.ops.matmul.problem import THIN
from centella.ops.matmul.product import Product, Scalars, launch
from centella.ops.matmul.streamed import FEWEST, blocks_of, groups_of, outputs_of, ring_of
from centella.ops.matmul.streamed_kernel import (
    CONSUMERS,
    DEPTH,
    EIGHT,
    HIGH,
    WARPGROUP,
    WARPS,
    Shares,
    Stream,
    bring_both,
    chunk_of,
    meet,
)
from centella.ops.ring import Ring
from centella.ops.rows import QUAD, WARP, over_lanes
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


class RowNorm:
    """The RMS norm of rows of x: the weights of its columns, and the squares of each row.

    Args:
        columns: of all stages; eights: of rows.
    """

    def __init__(self, columns: int, eights: int) -> None:
        self._columns, self._rows = columns, EIGHT * eights
        self._weights = lang.shared(f32, columns)  # of sixteen columns those of a thread in a row
        self._squares = lang.shared(f32, WARPS * self._rows)
        self._mine = lang.vars(f32, eights, init=0.0)

    def load(self, me: Any, norm: Any, k: Any) -> None:
        """Write the weights, which no launch before this one writes; 0 past the last."""
        for base in range(0, self._columns, CONSUMERS):
            column = me + base
            weight = lang.select(column < k, norm[lang.minimum(column, k - 1)], 0.0)
            near = column % DEPTH
            at = column - near + near % EIGHT // 2 * QUAD + near % 2 + near // EIGHT * 2
            with lang.if_(column < self._columns):
                self._weights[at] = weight

    def begin(self) -> None:
        """Nothing has been added up."""
        for total in self._mine:
            total.set(0.0)

    def take(self, widths: list[Any], rests: list[Any], column: Any, lane: Any) -> None:
        """Multiply sixteen columns of x, as second factors have them, by their weights.

        The products are f32: `widths` then have their upper halves, `rests` what is left.
        """
        weights = self._weights.load(column + lane % QUAD * QUAD)
        for width, rest, total in zip(widths, rests, self._mine, strict=True):
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
        """Write the squares that a warp has added up."""
        for eight, total in enumerate(self._mine):
            squares = over_lanes(total.get(), QUAD)
            with lang.if_(lane % QUAD == 0):
                self._squares[warp * self._rows + (lane // QUAD + eight * EIGHT)] = squares

    def factor(self, row: Any) -> Any:
        """1 / sqrt(mean of squares + eps) of a row."""
        total = self._squares[row]
        for warp in range(1, WARPS):
            total = total + self._squares[row + warp * self._rows]
        mean = total / lang.cast(lang.parameter("k", u32), f32)
        return 1.0 / lang.sqrt(mean + lang.parameter("eps", f32))


def _streamed_rows(
    *, tile: Stream, depth: int, gated: bool, activation: str, x: Argument, w: Argument,
    y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    lang.ptx.resident(2)
    halves = 2 if gated else 1
    shared = Shares(tile, w, halves, depth)
    rows = Rows(x, tile.stages, tile.eights, tile.columns)
    sums = Sums(WARPS, EIGHT * tile.eights, DEPTH * tile.sixteens(halves) + PAD)
    norm = RowNorm(shared.steps * tile.columns, tile.eights) if "norm" in extra else None
    with lang.ptx.role(0, WARPGROUP), lang.if_(lang.local_id() == 0):
        _produce(shared, rows)
    with lang.ptx.role(WARPGROUP, CONSUMERS):
        _consume(shared, rows, sums, norm, gated, activation, y, extra)


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
    shared: Shares, rows: Rows, sums: Sums, norm: RowNorm | None, gated: bool, activation: str,
    y: Any, extra: dict[str, Any],
) -> None:  # fmt: skip
    tile = shared.tile
    me = lang.local_id() - WARPGROUP
    warp, lane = me // WARP, me % WARP
    turn = lang.var(0, u32)
    if norm is not None:
        norm.load(me, extra["norm"], shared.p["k"])
        meet(shared.met, turn)
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
    rests = [] if norm is None else [lang.ptx.Fragment(dtype, (16, 8)) for _ in widths]
    ring = Ring(tile.stages)
    for block in shared.blocks():
        for fragment in (f for line in kept for chain in line for f in chain):
            fragment.fill(0.0)
        if norm is not None:
            norm.begin()
        for step in lang.range(lang.const(shared.steps, u32)):
            stage = ring.stage.get()
            shared.full.wait(stage, ring.parity)
            slot = shared.ring.at_stage(stage * shared.halves)
            at_x = of_x + rows.ring.at_stage(stage)
            for k in range(share // DEPTH):
                lang.ptx.ldmatrix(rows.ring, rows.ring.right(at_x, 2 * k), *widths)
                if norm is not None:
                    column = step * tile.columns + warp * share + k * DEPTH
                    norm.take(widths, rests, column, lane)
                for line, start in zip(kept, starts, strict=True):
                    lang.ptx.ldmatrix(shared.ring, shared.ring.right(start + slot, 2 * k), height)
                    for parts in (widths, rests) if rests else (widths,):
                        for chain, width in zip(line, parts, strict=True):
                            lang.ptx.mma_sync(chain[k % chains], height, width)
            with lang.if_(lane == 0):
                shared.empty.arrive(stage)
            ring.advance()
        sums.leave(kept, warp, lane)
        if norm is not None:
            norm.leave(warp, lane)
        factor = None if norm is None else norm.factor
        meet(shared.met, turn)
        store(shared, sums, block, me, gated, activation, y, extra, factor=factor)
        meet(shared.met, turn)  # sums are written anew


def store(
    shared: Any, sums: Sums, block: Any, me: Any, gated: bool, activation: str, y: Any,
    extra: dict[str, Any], threads: int = CONSUMERS, factor: Callable[[Any], Any] | None = None,
) -> None:  # fmt: skip
    """Add up the warps' sums, times the factor of a row, and store a word of outputs a thread."""
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
            if factor is not None:
                times = factor(row)
                out = [v * times for v in out]
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
    sums = 4 * WARPS * EIGHT * eights * (DEPTH * Stream(rows, 0, 0).sixteens(halves) + PAD)

    def kept(tile: Stream) -> int:
        """Bytes of sums, of a norm's weights and squares."""
        columns = -(-problem.k // tile.columns) * tile.columns
        return sums + (4 * (columns + WARPS * EIGHT * eights) if "norm" in product.names else 0)

    return ring_of(Stream(rows, 0, 0, eights), problem, halves, kept, caps)


def _launches(product: Product, tile: Stream, caps: Caps, scalars: Scalars = ()) -> Lowered:
    problem = product.problem
    constants = (
        ("activation", product.activation), ("depth", problem.k), ("gated", product.gated),
        ("tile", tile),
    )  # fmt: skip
    own: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("ldx", problem.lda),
        ("ldw", problem.ldb), ("ldy", problem.ldy), ("half", problem.n),
        ("rows", product.columns), ("blocks", blocks_of(problem, tile.rows)),
        ("alpha", product.alpha), ("ldr", product.residual_pitch), *scalars,
    )  # fmt: skip
    names, groups = ("x", "w", *product.names), groups_of(problem, tile.rows)
    return Lowered((launch(kernel, product, names, own, constants, groups, kernel.workgroup),))


def _tile(product: Product, caps: Caps) -> Stream | None:
    return tile_of(product, caps) if not {"scale", "norm"} & {*product.names} else None


def _normed_tile(form: Form[NormedAttrs], caps: Caps) -> Stream | None:
    """With an RMS norm, of bf16: before their factor products need the range of f32."""
    product, attrs = product_of(form), form.attrs
    rms = "norm" in attrs.extras and attrs.kind == "rms" and product.dtypes[0] is bf16
    return tile_of(product, caps) if rms else None


def _normed_preferred(form: Form[NormedAttrs], caps: Caps) -> bool:
    """Of more rows than "joined" takes."""
    return caps.fast_tensor_cores and math.prod(form.inputs[0].shape[:-1]) > JOINED_ROWS


def _normed_launches(form: Form[NormedAttrs], tile: Stream, caps: Caps) -> Lowered:
    return _launches(product_of(form), tile, caps, (("eps", form.attrs.eps),))


STREAMED_ROWS: Variant[Product, Stream] = Variant(
    "streamed_rows", _tile, _launches, lambda product, caps: caps.fast_tensor_cores
)
NORMED_ROWS: Variant[Form[NormedAttrs], Stream] = Variant(
    "streamed_rows", _normed_tile, _normed_launches, _normed_preferred
)
