"""`normed_linear` over several rows: products whose tiles have columns of both halves of a gate.

A gate and what it multiplies are in the registers of one thread, so neither is written: a product
of 2 n columns that stores n, where a product, then a launch over 2 n columns, would be two. Up to
16 rows of bf16 take their RMS norm along (`streamed_rows.py`), with a gate or without.
"""

from __future__ import annotations

from typing import Any

from centella.op.op import Form, Lowered
from centella.op.variant import Variant, choose
from centella.ops.layout import as_rows
from centella.ops.matmul.mma import MMA
from centella.ops.matmul.normed import FEW, JOINED_ROWS, NormedAttrs
from centella.ops.matmul.normed_kernel import JOINED, product_of
from centella.ops.matmul.problem import THIN
from centella.ops.matmul.product import Product
from centella.ops.matmul.streamed import NORMED_STREAMED
from centella.ops.matmul.streamed_many import STREAMED_MANY
from centella.ops.matmul.streamed_rows import NORMED_ROWS, STREAMED_ROWS
from centella.ops.matmul.wgmma import WGMMA
from centella.ops.quant.digits import normed as digits
from centella.specs import Caps

Gated = Variant[Form[NormedAttrs], Product]


def _gated(variant: Variant[Product, Any], above: int = FEW) -> Gated:
    """A kernel of products as one of gates, of more rows than `above`."""

    def product(form: Form[NormedAttrs], caps: Caps) -> Product | None:
        if not form.attrs.gate or "norm" in form.attrs.extras:
            return None
        product = product_of(form)
        return product if product.whole and variant.fits(product, caps) else None

    def launches(form: Form[NormedAttrs], product: Product, caps: Caps) -> Lowered:
        return variant.lower(product, caps)

    def preferred(form: Form[NormedAttrs], caps: Caps) -> bool:
        product = product_of(form)
        return product.problem.m > above and variant.preferred(product, caps)

    return Variant(variant.name, product, launches, preferred)


SEVERAL: tuple[Variant[Form[NormedAttrs], Any], ...] = (
    NORMED_ROWS,
    _gated(STREAMED_ROWS, JOINED_ROWS), _gated(STREAMED_MANY, THIN), _gated(WGMMA), _gated(MMA),
)  # fmt: skip


def preferred(form: Form[NormedAttrs], caps: Caps) -> bool:
    """Whether a kernel of several rows takes a form, and is better than what the op stands for.

    Rows that are apart by no one stride are left to those: nothing has been copied yet.
    """
    rows = all(as_rows(spec) is not None for spec in form.inputs)
    return rows and any(v.takes(form, caps, form.attrs.variant) for v in SEVERAL)


def lower(form: Form[NormedAttrs], caps: Caps) -> Lowered:
    """One launch."""
    if form.attrs.format:
        return digits(form, caps)
    order: tuple[Variant[Form[NormedAttrs], Any], ...] = (NORMED_STREAMED, *SEVERAL, JOINED)
    what = f"normed_linear: {list(form.inputs[0].shape)} by {list(form.inputs[1].shape)}"
    return choose(order, form, caps, form.attrs.variant, what).lower(form, caps)
