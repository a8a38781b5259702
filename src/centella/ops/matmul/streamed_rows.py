"""The product of 2 to 16 rows by tiles of weights that the copy engine brings (sm_90a).

    y[m, n] = f(alpha (x[m, :] . W[n, :]) + bias[n]) + residual[m, n]
    y[m, n] = act(alpha (x[m, :] . W[n, :]) + bias[n]) * (...[half + n])       with a gate

    x[m, :] = x[m, :] / rms(x[m, :]) * norm                                     with a norm, bf16
    x[m, :] = (x[m, :] - mean) / deviation * norm + shift

As `streamed_kernel.py`, but rows of x do not stay: their columns come with those of the weights,
stage by stage, eight rows a second factor of `mma.sync`. Weights of the first stages are asked for
before the launches before this one are over, x once they are. Where a ring has room for all weights
of a group, x counts at barriers of its own, and the next launch is let in once all weights are on
their way. `streamed_norms.py` has the norms.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from centella import lang
from centella.dtypes import bf16, f16, f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.op.variant import Variant
from centella.ops.matmul.epilogue import ask_for_vectors
from centella.ops.matmul.normed import JOINED_ROWS, NormedAttrs
from centella.ops.matmul.normed_kernel import product_of
from centella.ops.matmul.one_row import CONSUMERS, DEPTH, EIGHT, LAYER, RMS
from centella.ops.matmul.problem import THIN
from centella.ops.matmul.product import Product, Scalars, launch
from centella.ops.matmul.several_rows import PAD, Rows, Sums, store
from centella.ops.matmul.streamed import (
    FEWEST,
    MOST_ROWS,
    blocks_of,
    groups_of,
    outputs_of,
    ring_of,
)
from centella.ops.matmul.streamed_kernel import (
    WARPGROUP,
    WARPS,
    Shares,
    Stream,
    bring_both,
    chunk_of,
    meet,
    produce,
)
from centella.ops.matmul.streamed_norms import (
    LONGEST,
    REST,
    RowNorm,
    fragments_of,
    kept_bytes,
    norm_of,
    spare_rows,
)
from centella.ops.ring import Ring
from centella.ops.rows import WARP
from centella.specs import Caps

FEW_OUTPUTS = 4096  # of a layer norm's product of more than one eight


def _streamed_rows(
    *, tile: Stream, depth: int, kind: str, gated: bool, activation: str, x: Argument, w: Argument,
    y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    lang.ptx.resident(2)
    halves = 2 if gated else 1
    shared = Shares(tile, w, halves, depth)
    rows = Rows(x, depth, tile.stages, tile.eights, tile.columns, tile.flight > 0)
    sums = Sums(WARPS, EIGHT * tile.eights, DEPTH * tile.sixteens(halves) + PAD)
    norm = norm_of(kind, tile, shared.steps, depth, x.dtype, "shift" in extra)
    with lang.ptx.role(0, WARPGROUP), lang.if_(lang.local_id() == 0):
        if tile.flight:
            produce(shared)
        else:
            _produce(shared, rows)
    with lang.ptx.role(WARPGROUP, CONSUMERS):
        _consume(shared, rows, sums, norm, gated, activation, x, y, extra)


def _produce(shared: Shares, rows: Rows) -> None:
    """Have all tiles copied; those of weights that there is room for before the wait."""
    tile, p = shared.tile, shared.p
    nbytes = 2 * shared.halves * tile.rows * tile.columns + rows.nbytes

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
        rows.bring(number % shared.steps, stage, shared.full)

    bring_both(shared.full.count, shared.empty, shared.tiles(), bring_weights, bring_rows)


def _consume(
    shared: Shares, rows: Rows, sums: Sums, norm: RowNorm | None, gated: bool, activation: str,
    x: Any, y: Any, extra: dict[str, Any],
) -> None:  # fmt: skip
    tile = shared.tile
    me = lang.local_id() - WARPGROUP
    warp, lane = me // WARP, me % WARP
    turn = lang.var(0, u32)
    if norm is not None:
        norm.load(me, extra, shared.p["k"], partial(meet, shared.met, turn))
        meet(shared.met, turn)
    ask_for_vectors(extra, tile.rows, shared.p["n"], gated, me)
    lang.ptx.await_launches()
    with lang.if_(me == 0):
        rows.bring_all(shared.tiles(), shared.steps)
    if norm is not None:
        norm.start(x, lane)
    share = tile.columns // WARPS  # of a stage's columns, of a warp
    sixteens = tile.sixteens(shared.halves)
    starts = [chunk_of(shared, warp * share, lane, i) for i in range(sixteens)]
    of_x = rows.starts(lane, warp * share)
    kinds = 2 if norm is not None and norm.apart else 1  # of sums
    chains = max(1, min(4 // (sixteens * tile.eights * kinds), share // DEPTH))
    kept = [
        [
            [[lang.ptx.Fragment(f32, (16, 8)) for _ in range(chains)] for _ in range(kinds)]
            for _ in range(tile.eights)
        ]
        for _ in range(sixteens)
    ]
    dtype = shared.ring.dtype
    height = lang.ptx.Fragment(dtype, (16, 16))
    widths = [lang.ptx.Fragment(dtype, (16, 8)) for _ in range(tile.eights)]
    rests = [] if norm is None else [lang.ptx.Fragment(dtype, (16, 8)) for _ in widths]
    ring = Ring(tile.stages)
    for block in shared.blocks():
        for fragment in (f for line in kept for eight in line for chain in eight for f in chain):
            fragment.fill(0.0)
        if norm is not None:
            norm.begin()
        for step in lang.range(lang.const(shared.steps, u32)):
            stage = ring.stage.get()
            shared.full.wait(stage, ring.parity)
            rows.wait(stage, ring.parity)
            slot = shared.ring.at_stage(stage * shared.halves)
            at_x = [start + rows.ring.at_stage(stage) for start in of_x]
            for k in range(share // DEPTH):
                rows.load(at_x, k, widths)
                if norm is not None:
                    column = step * tile.columns + warp * share + k * DEPTH
                    norm.take(widths, rests, column, lane)
                for line, start in zip(kept, starts, strict=True):
                    lang.ptx.ldmatrix(shared.ring, shared.ring.right(start + slot, 2 * k), height)
                    for i, parts in enumerate((widths, rests) if rests else (widths,)):
                        for eight, width in zip(line, parts, strict=True):
                            lang.ptx.mma_sync(eight[i % kinds][k % chains], height, width)
            with lang.if_(lane == 0):
                shared.empty.arrive(stage)
            ring.advance()
        sums.leave([[_joined(eight) for eight in line] for line in kept], warp, lane)
        if norm is not None:
            norm.leave(warp, lane)
        meet(shared.met, turn)
        store(shared, sums, block, me, gated, activation, y, extra, norm=norm)
        meet(shared.met, turn)  # sums are written anew


def _joined(kinds: list[list[Any]]) -> list[Any]:
    """The chains of sums of upper parts, to the first of which those of lower ones are added."""
    upper, *lower = kinds
    for register in range(4) if lower else ():
        total = lower[0][0][register]
        for fragment in lower[0][1:]:
            total = total + fragment[register]
        upper[0][register] = lang.fma(total, 1 / REST, upper[0][register])
    return upper


kernel: Kernel = Kernel(_streamed_rows, workgroup=WARPGROUP + CONSUMERS, name="streamed_rows")


def tile_of(product: Product, caps: Caps, kind: str = "") -> Stream | None:
    """How a group works where a few rows meet weights of whole chunks, both of 16 bits."""
    problem, (x, w) = product.problem, product.dtypes
    along = problem.a_along_k and problem.b_along_k
    few = problem.batch == 1 and 1 < problem.m <= THIN and problem.k >= FEWEST
    if not (few and along and product.whole and caps.warpgroups and x is w and w in (bf16, f16)):
        return None
    shifted, halves = "shift" in product.names, 2 if product.gated else 1
    eights = -(-(problem.m + spare_rows(kind, shifted)) // EIGHT)
    most = min(MOST_ROWS, DEPTH * (fragments_of(kind, eights, x) // eights))
    rows = outputs_of(problem, product.specs[-1].dtype, halves, most)
    sums = 4 * WARPS * EIGHT * eights * (DEPTH * Stream(rows, 0, 0).sixteens(halves) + PAD)

    def kept(tile: Stream) -> int:
        """Bytes of sums, and of a norm."""
        columns = -(-problem.k // tile.columns) * tile.columns
        return sums + kept_bytes(kind, columns, eights, shifted)

    return ring_of(Stream(rows, 0, 0, eights), problem, halves, kept, caps)


def _launches(
    product: Product, tile: Stream, caps: Caps, kind: str = "", scalars: Scalars = ()
) -> Lowered:
    problem = product.problem
    constants = (
        ("activation", product.activation), ("depth", problem.k), ("gated", product.gated),
        ("kind", kind), ("tile", tile),
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


def _kind(form: Form[NormedAttrs], product: Product) -> str:
    """Of a norm that is taken along, or "": before their factor f16 rows have no range for RMS."""
    if "norm" not in form.attrs.extras:
        return ""
    if form.attrs.kind == LAYER:
        return LAYER if product.problem.k <= LONGEST else ""
    return RMS if product.dtypes[0] is bf16 else ""


def _normed_tile(form: Form[NormedAttrs], caps: Caps) -> Stream | None:
    product = product_of(form)
    kind = _kind(form, product)
    return tile_of(product, caps, kind) if kind else None


def _normed_preferred(form: Form[NormedAttrs], caps: Caps) -> bool:
    """Of more rows than "joined" takes.

    With a layer norm where its vectors have room in one eight beside the rows, or in two and
    outputs are few: then a further eight costs less than a launch.
    """
    rows, attrs = math.prod(form.inputs[0].shape[:-1]), form.attrs
    most = THIN
    if attrs.kind == LAYER:
        few = form.inputs[1].shape[0] <= FEW_OUTPUTS
        most = EIGHT * (2 if few else 1) - spare_rows(LAYER, "shift" in attrs.extras)
    return caps.fast_tensor_cores and JOINED_ROWS < rows <= most


def _normed_launches(form: Form[NormedAttrs], tile: Stream, caps: Caps) -> Lowered:
    product = product_of(form)
    return _launches(product, tile, caps, _kind(form, product), (("eps", form.attrs.eps),))


STREAMED_ROWS: Variant[Product, Stream] = Variant(
    "streamed_rows", _tile, _launches, lambda product, caps: caps.fast_tensor_cores
)
NORMED_ROWS: Variant[Form[NormedAttrs], Stream] = Variant(
    "streamed_rows", _normed_tile, _normed_launches, _normed_preferred
)
