"""The decoding variant on tensor cores, for f16 and bf16 on NVIDIA GPUs from sm_80 on (PTX alone).

As in `split` a group reads one part of the keys and values of one head, once for up to eight
queries that share them; its warps work as `split_warp` says, over rows of i8 as `split_warp_i8`
does. A second launch adds up the parts.
"""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import i8
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.ops.attention.combine import launches_of
from centella.ops.attention.masks import Scoring, product_scale
from centella.ops.attention.parts import Parts, Work
from centella.ops.attention.problem import AttentionAttrs, AttentionVariant
from centella.ops.attention.split import few_queries
from centella.ops.attention.split_warp import CHUNK, MOST_DIM, CachedRows
from centella.ops.attention.split_warp_i8 import tile_of, warp_of
from centella.ops.attention.warp_sums import SplitTile, WarpSums
from centella.ops.attention.weights import LOG2E
from centella.specs import Caps


def _split_mma(
    *, tile: SplitTile, dim: int, rows: int, scoring: Scoring, q: Argument, k: Argument,
    v: Argument, partial: Argument, **masks: Argument,
) -> None:  # fmt: skip
    lang.ptx.resident(tile.together)
    work, scale = Work(masks, scoring, rows), product_scale(scoring, LOG2E)
    with lang.if_(work.begin < work.end):
        warp, cached = warp_of(work, dim, q, k), CachedRows(work, k, v)
        warp.load_keys(work.begin, cached)
        warp.load_values(work.begin, cached)
        warp.load_queries(lambda row, element: q.load_bits(work.query(row) + element))
        warp.walk(work.begin, work.end, tile.step, scale, cached)
        leave(warp, work, tile, rows, partial)


def leave(warp: WarpSums, work: Work, tile: SplitTile, rows: int, partial: Argument) -> None:
    """Leave a part's results for the second launch."""

    def put_stats(query: Any, high: Any, whole: Any, copy: Any) -> None:
        at = work.results(query).stats
        with lang.if_(work.has(query)):
            partial[at] = high
            partial[at + 1] = whole

    def put_sums(query: Any, element: Operand, sums: list[Expr]) -> None:
        with lang.if_(work.has(query)):
            partial.store(work.results(query).sums + element, sums)

    warp.add_up(tile, rows, put_stats, put_sums)


kernel: Kernel = Kernel(_split_mma, workgroup=128, name="attention_split_mma")


def _launches(form: Form[AttentionAttrs], tile: SplitTile, caps: Caps) -> Lowered:
    parts = Parts.of(form, tile.step, tile.groups)
    return launches_of(kernel, parts, form, (("tile", tile),), caps, tile.threads)


def _preferred(form: Form[AttentionAttrs], caps: Caps) -> bool:
    return few_queries(form, caps) and caps.fast_tensor_cores


SPLIT_MMA = AttentionVariant(
    "split_mma", tile_of, _launches, _preferred,
    needs=f"takes f16 or bf16 with rows on 16 bytes, heads of multiples of {CHUNK} "
          f"({i8.per_chunk} in i8) up to {MOST_DIM}, and tensor cores",
)  # fmt: skip
