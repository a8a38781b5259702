"""Which products of one row have digits (`digits_kernel.py`), and how a group works then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from centella.emit.program import Call, Ref
from centella.op.op import Form, Lowered
from centella.op.variant import Variant, choose
from centella.ops.kernel_params import signature
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.normed import DIGITS, NormedAttrs
from centella.ops.matmul.op import OfFormat, parted
from centella.ops.matmul.problem import LinearAttrs, Problem, aligned
from centella.ops.matmul.streamed import LEAST, SHARED, blocks_of, groups_of, outputs_of
from centella.ops.matmul.streamed_kernel import LAYER, SUMS
from centella.ops.quant.digits_kernel import CREWS, PAIR, PARTS, kernel, pitch_of
from centella.ops.quant.format import GROUP, SYMBOLS, Format
from centella.ops.quant.stream import (
    COLUMNS,
    MOST_ROWS,
    BlockStream,
    bytes_of,
    comes_in_blocks,
    parts_of,
    problem_of,
    words_of,
)
from centella.ops.quant.table import FORMATS
from centella.specs import Caps, Spec

LONGEST = 16384  # of h, which is in shared memory whole


class Product(Struct, frozen=True):
    """A product with a weight in planes, whichever op it is of.

    Attributes:
        problem: its n is that of the result; planes: of the weight; extras: operands behind, by
            name.
        kind: of the norm, of `streamed_kernel.py`, or "".
        scalars: of that norm.
    """

    format: Format
    problem: Problem
    x: Spec
    planes: tuple[Spec, ...]
    extras: dict[str, Spec]
    y: Spec
    activation: str
    alpha: float
    gated: bool = False
    kind: str = ""
    scalars: tuple[tuple[str, float], ...] = ()


def _product(form: Form[Any], attrs: OfFormat, extras: Sequence[str], **more: Any) -> Product:
    x, planes, rest = parted(form.inputs, attrs)
    problem = problem_of(x, form.outputs[0], planes[0])
    named = dict(zip(extras, rest, strict=True))
    return Product(FORMATS[attrs.format], problem, x, tuple(planes), named, form.outputs[0], **more)


def _of_linear(form: Form[LinearAttrs]) -> Product:
    attrs = form.attrs
    return _product(form, attrs, attrs.extras, activation=attrs.activation, alpha=attrs.alpha)


def _of_normed(form: Form[NormedAttrs]) -> Product:
    attrs, layer = form.attrs, form.attrs.kind == LAYER
    kind = (LAYER if layer else SUMS) if "norm" in attrs.extras else ""
    return _product(
        form, attrs, attrs.extras, activation=attrs.gate or attrs.activation, alpha=attrs.alpha,
        gated=attrs.gate != "", kind=kind, scalars=(("eps", attrs.eps),),
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
    """The launch."""
    problem, extras = product.problem, product.extras
    beside, layout = parts_of(product.format, product.planes)
    pitch = rows_of(extras["residual"]).strides[0] if "residual" in extras else 0
    specs = (product.x, *product.planes, *extras.values())
    refs = (*(Ref(i, flat(s)) for i, s in enumerate(specs)), Ref(len(specs), product.y))
    names = ("x", *SYMBOLS[: len(product.planes)], *extras)
    scalars = (
        ("n", problem.n), ("k", problem.k), *layout, ("half", problem.n),
        ("rows", product.planes[0].shape[0]), ("blocks", blocks_of(problem, tile.rows)),
        ("alpha", product.alpha), ("ldr", pitch), *product.scalars,
    )  # fmt: skip
    constants: tuple[tuple[str, Any], ...] = (
        ("activation", product.activation), ("beside", beside),
        ("depth", problem.k), ("format", product.format.name), ("kind", product.kind),
        ("tile", tile),
    )  # fmt: skip
    call = Call(
        kernel, refs, scalars, constants, groups_of(problem, tile.rows),
        workgroup=kernel.workgroup, signature=signature(dict.fromkeys(names, 1), {"y": 1}),
    )  # fmt: skip
    return Lowered((call,))


def _preferred(form: object, caps: Caps) -> bool:
    return caps.fast_tensor_cores


STREAMED_DIGITS: Variant[Form[LinearAttrs], BlockStream] = Variant(
    DIGITS,
    lambda form, caps: _tile(_of_linear(form), caps),
    lambda form, tile, caps: _launches(_of_linear(form), tile),
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
