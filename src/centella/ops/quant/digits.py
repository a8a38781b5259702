"""Which products of one row have digits (`digits_kernel.py`), and how a group works then."""

from __future__ import annotations

from msgspec.structs import replace

from centella.op.op import Form, Lowered
from centella.op.variant import Variant, choose
from centella.ops.layout import rows_of
from centella.ops.matmul.normed import DIGITS, NormedAttrs
from centella.ops.matmul.problem import LinearAttrs, aligned
from centella.ops.matmul.streamed import LEAST, SHARED, blocks_of, groups_of, outputs_of
from centella.ops.matmul.streamed_kernel import LAYER, SUMS
from centella.ops.quant.digits_kernel import CREWS, PAIR, PARTS, kernel, pitch_of
from centella.ops.quant.format import GROUP
from centella.ops.quant.product import Product, launched, of_linear, product_of
from centella.ops.quant.stream import (
    COLUMNS,
    MOST_ROWS,
    BlockStream,
    bytes_of,
    comes_in_blocks,
    parts_of,
    words_of,
)
from centella.specs import Caps

LONGEST = 16384  # of h, which is in shared memory whole


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
    groups = groups_of(problem, rows)
    slots = 1 if blocks_of(problem, rows) <= groups else 2
    tile = BlockStream(rows, 0, halves=halves, slots=slots)
    steps = -(-problem.k // COLUMNS)
    kept = 4 * steps * COLUMNS // (2 * GROUP) * (PAIR + 4)
    beside = sum(words_of(rows, *layout) for layout in parts_of(kind, product.planes)[0])
    kept += 4 * tile.slots * halves * beside
    kept += 8 * PARTS * pitch_of(tile)
    stage = halves * tile.height * bytes_of(kind)
    most = max(steps * -(-blocks_of(problem, rows) // groups), CREWS)
    room = min(SHARED, caps.max_shared) - kept - 2048
    tile = replace(tile, stages=min(room // stage, most))
    fits = tile.stages >= max(LEAST, CREWS) and kernel.workgroup <= caps.max_workgroup
    return tile if fits else None


def _launches(product: Product, tile: BlockStream) -> Lowered:
    return launched(kernel, product, tile, (("kind", product.kind),))


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
