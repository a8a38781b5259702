"""Which products of one row have digits (`digits_kernel.py`), and how a group works then."""

from __future__ import annotations

from msgspec.structs import replace

from centella.op.op import Form, Lowered
from centella.op.variant import Variant, choose
from centella.ops.hopper import ALONE
from centella.ops.layout import rows_of
from centella.ops.matmul.normed import NormedAttrs
from centella.ops.matmul.one_row import EIGHT, LAYER, SUMS
from centella.ops.matmul.problem import DIGITS, LinearAttrs, aligned
from centella.ops.matmul.streamed import LEAST, blocks_of, groups_of, outputs_of
from centella.ops.quant.beside import words_of
from centella.ops.quant.digits_kernel import (
    MOST_WARPS,
    RUNS,
    kernel,
    pitch_of,
    words_of_row,
)
from centella.ops.quant.product import Product, launched, of_linear, product_of
from centella.ops.quant.stream import (
    MOST_ROWS,
    REST,
    BlockStream,
    bytes_of,
    comes_in_blocks,
    parts_of,
)
from centella.ops.rows import WARP
from centella.specs import Caps

LONGEST = 16384  # of h, which is in shared memory whole
ROOM = 208 << 10  # bytes of shared memory of a group; the rest is for one of attention beside it
STAGE = 0.5  # what a warp does for a stage beside its products, in runs of eight rows
FEW_WARPS = 14  # of a multiprocessor: fewer take as long, as they wait for their own results


def _of_normed(form: Form[NormedAttrs]) -> Product:
    attrs, layer = form.attrs, form.attrs.kind == LAYER
    kind = (LAYER if layer else SUMS) if "norm" in attrs.extras else ""
    return product_of(
        form, activation=attrs.gate or attrs.activation, gated=attrs.gate != "", kind=kind,
        scalars=(("eps", attrs.eps),),
    )  # fmt: skip


def _tile(product: Product, caps: Caps) -> BlockStream | None:
    """How a group works where one row of 16 bits meets whole runs; None where it does not."""
    kind, problem = product.format, product.problem
    vectors = [product.extras[name] for name in ("norm", "shift") if name in product.extras]
    whole = all(aligned(s, 0, 0) for s in (rows_of(product.x), *vectors))
    if not (whole and problem.m == 1 and problem.n and problem.k <= LONGEST):
        return None
    if not comes_in_blocks(kind, problem.k, product.x.dtype, product.planes, caps):
        return None
    halves = 2 if product.gated else 1
    rows = outputs_of(problem, product.y.dtype, halves, MOST_ROWS)
    turns = -(-blocks_of(problem, rows) // groups_of(problem, rows))  # blocks of a group
    one = BlockStream(rows, 0, halves=halves, slots=min(turns, 2), across=1)
    one = replace(one, teams=halves * one.height // EIGHT)
    beside = sum(words_of(rows, *plane) for plane in parts_of(kind, product.planes)[0])
    beside *= 4 * one.slots * halves
    tiles = [
        tile for crews in range(1, MOST_WARPS // one.teams + 1) for runs in (RUNS, 2 * RUNS)
        if crews * one.teams % 4 == 0  # whole warpgroups
        and (tile := _with_stages(
            replace(one, runs=runs, crews=crews), product, turns, beside, caps
        ))
    ]  # fmt: skip
    return min(tiles, key=lambda tile: _cost(tile, problem.k), default=None)


def _with_stages(
    tile: BlockStream, product: Product, turns: int, beside: int, caps: Caps
) -> BlockStream | None:
    """With as many stages as have room; None where they are too few, or threads too many.

    Args:
        turns: blocks of a group; beside: bytes of the planes that lie beside.
    """
    steps = tile.rounds(product.problem.k) * tile.crews
    digits, levels = words_of_row(steps * tile.columns)
    kept = beside + 4 * (digits + levels) + 8 * tile.crews * pitch_of(tile)
    stage = tile.halves * tile.height * bytes_of(product.format, tile.columns)
    stages = min((min(ROOM, caps.max_shared) - kept - REST) // stage, steps * turns)
    stages = stages // tile.crews * tile.crews
    spare = min(ALONE, caps.max_shared - REST) - (kept + stages * stage)
    tile = replace(tile, stages=stages, spare=max(spare // 4, 0))
    few = min(LEAST * tile.crews, steps * turns)
    fits = tile.stages >= max(few, LEAST) and tile.threads + WARP <= caps.max_workgroup
    return tile if fits else None


def _cost(tile: BlockStream, k: int) -> tuple[float, int]:
    """What a block takes, in runs times warps; of equal tiles the one with fewer crews."""
    of_crew = tile.rounds(k) * (tile.runs + STAGE)
    return of_crew * max(tile.crews * tile.teams, FEW_WARPS), tile.crews


def _launches(product: Product, tile: BlockStream) -> Lowered:
    return launched(kernel, product, tile, (("kind", product.kind),), tile.threads + WARP)


def _preferred(form: object, caps: Caps) -> bool:
    return caps.fast_tensor_cores


STREAMED_DIGITS: Variant[Form[LinearAttrs], BlockStream] = Variant(
    DIGITS,
    lambda form, caps: _tile(of_linear(form), caps),
    lambda form, tile, caps: _launches(of_linear(form), tile),
    _preferred,
)
NORMED_DIGITS: Variant[Form[NormedAttrs], BlockStream] = Variant(
    DIGITS,
    lambda form, caps: _tile(_of_normed(form), caps),
    lambda form, tile, caps: _launches(_of_normed(form), tile),
    _preferred,
)


def preferred(form: Form[NormedAttrs], caps: Caps) -> bool:
    """Whether a norm or a gate joins a product with a weight in planes."""
    return NORMED_DIGITS.takes(form, caps, form.attrs.variant)


def normed(form: Form[NormedAttrs], caps: Caps) -> Lowered:
    """One launch."""
    what = f"normed_linear: {list(form.inputs[0].shape)}, {form.attrs.format}"
    return choose((NORMED_DIGITS,), form, caps, form.attrs.variant, what).lower(form, caps)
