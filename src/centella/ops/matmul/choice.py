"""Which kernel computes a product: a pure function of its sizes, layouts, dtypes and the device.

The first of the list that is preferred and fits:

streamed               m = 1 of f16 and bf16 on Hopper           `streamed.py`
streamed_rows          m <= 16 of them                           `streamed_rows.py`
streamed_many          m <= 64 of them, m > 32 of small weights  `streamed_many.py`
skinny_mma             m <= 32 of f16, bf16, i8, on tensor cores `skinny.py`
gemv, skinny           m = 1, m <= 16, B contiguous along k      `thin.py`
columns                m <= 16, B contiguous along n             `columns.py`
wgmma                  f16 and bf16 on Hopper                    `wgmma.py`
mma                    the same from sm_80 on                    `mma.py`
large, medium, small   the rest, by the tile that fits           `tiled.py`
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from centella.op.op import Lowered
from centella.op.variant import Variant, choose
from centella.ops.matmul import repack
from centella.ops.matmul.columns import COLUMNS
from centella.ops.matmul.mma import MMA
from centella.ops.matmul.product import Product
from centella.ops.matmul.skinny import SKINNY_MMA
from centella.ops.matmul.streamed import STREAMED
from centella.ops.matmul.streamed_many import STREAMED_MANY
from centella.ops.matmul.streamed_rows import STREAMED_ROWS
from centella.ops.matmul.thin import GEMV, SKINNY
from centella.ops.matmul.tiled import TILED
from centella.ops.matmul.wgmma import WGMMA
from centella.specs import Caps

ORDER: tuple[Variant[Product, Any], ...] = (
    STREAMED, STREAMED_ROWS, STREAMED_MANY, SKINNY_MMA, GEMV, SKINNY, COLUMNS, WGMMA, MMA, *TILED,
)  # fmt: skip


def product_calls(op: str, product: Product, variant: str | None, caps: Caps) -> Lowered:
    """The launches that compute a product: one, or two where the depth is split.

    Where operands' rows do not start on 16 bytes, "wgmma" has them copied first, and what is chosen
    for tensor cores where that pays.

    Raises:
        LimitError: a forced variant cannot compute it on this device.
    """
    problem = product.problem
    if problem.k == 0:  # nothing is summed; every read is of the first element
        problem = replace(problem, lda=0, ldb=0, sa=0, sb=0, a_along_k=True, b_along_k=True)
        product = replace(product, problem=problem)
    what = f"{op}: [{problem.m}, {problem.k}] by [{problem.k}, {problem.n}]"
    chosen = choose(ORDER, product, caps, variant, what)
    if chosen in (MMA, WGMMA) and not product.whole and product.specs[-1].size:
        matrices = repack.matrices(problem, *product.specs[:2])
        copied = {i: m for i, m in enumerate(matrices) if not product.rows[i]}
        if variant == "wgmma" or (variant is None and repack.pays(problem, [*copied.values()])):
            return _repacked(op, product, copied, variant, caps)
    return chosen.lower(product, caps)


def _repacked(
    op: str, product: Product, copied: dict[int, repack.Matrix], variant: str | None, caps: Caps
) -> Lowered:
    """Copies of operands to rows on 16 bytes, then the product of those."""
    own = len(product.specs)
    problem, copies, whole = repack.repacked(op, product.problem, copied, own, caps)
    specs = tuple(whole.get(i, spec) for i, spec in enumerate(product.specs))
    inner = product_calls(op, replace(product, problem=problem, specs=specs), variant, caps)
    copied_to = {operand: own + i for i, operand in enumerate(whole)}
    operands = [copied_to.get(i, i) for i in range(own)]
    return Lowered(copies, tuple(whole.values())) + inner.within(operands, own + len(whole))
