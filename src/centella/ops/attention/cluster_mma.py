"""Decoding on tensor cores in one launch: the groups of a head's keys are a cluster (sm_90 on).

The groups work as those of `split_mma`. What each has of its part stays in its shared memory; once
all have arrived, each group adds up a share of the head over the parts, in order, and writes it.
Where a GPU is full without dividing the keys, there is one part, and no cluster.

One launch fewer saves its latency, some 2.5 us of an H200. A cluster has eight groups at most, so
that few sequences of many keys leave multiprocessors idle: those go to `split_mma`.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from centella import lang
from centella.dtypes import f32, i8, u32
from centella.emit.program import Kernel, Ref
from centella.lang.memory import Argument
from centella.lang.ptx.clusters import MOST_GROUPS
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.ops.attention.masks import Scoring, product_scale, share_of, sink_of
from centella.ops.attention.parts import Parts, Work
from centella.ops.attention.problem import (
    AttentionAttrs,
    AttentionVariant,
    keys_seen,
    launch,
    operands,
)
from centella.ops.attention.split import few_queries
from centella.ops.attention.split_warp import (
    CHUNK,
    MOST_DIM,
    CachedRows,
    SplitTile,
    Warp,
)
from centella.ops.attention.split_warp_i8 import tile_of, warp_of
from centella.ops.attention.table import MOST_ROWS
from centella.ops.attention.weights import LOG2E
from centella.specs import Caps

MOST_KEYS = 384  # of a part, where there are fewer groups than multiprocessors


class Sums:
    """What a group has of its part, in its shared memory, and of all parts once they are there.

    Args:
        splits: parts, the groups of a cluster; rows: queries; dim: elements of a head.
    """

    def __init__(self, splits: int, rows: int, dim: int) -> None:
        self._splits, self._rows, self._dim = splits, rows, dim
        self._stats = lang.shared(f32, 2 * MOST_ROWS)
        self._memory = lang.shared(f32, rows * dim)

    def gather(self, warp: Warp, tile: SplitTile) -> None:
        """Add up what the warps of this group have; every group of the cluster is done with it."""

        def put_stats(query: Operand, high: Any, whole: Any) -> None:
            self._stats[query] = high
            self._stats[query + MOST_ROWS] = whole

        def put_sums(query: Operand, element: Operand, sums: list[Expr]) -> None:
            self._memory.store(query * self._dim + element, sums)

        warp.add_up(tile, self._rows, put_stats, put_sums)
        if self._splits > 1:
            lang.ptx.cluster_arrive()
            lang.ptx.cluster_wait()
        else:
            lang.barrier()

    def _load(self, array: Any, index: Any) -> list[Expr]:
        """A word of every part."""
        if self._splits == 1:
            return [array[index]]
        ranks = (lang.const(n, u32) for n in range(self._splits))
        return [lang.ptx.cluster_load(array, index, rank) for rank in ranks]

    def write(self, work: Work, masks: dict[str, Any], tile: SplitTile, y: Argument) -> None:
        """Write this group's share of the results; nobody's shared memory is read after."""
        per = y.dtype.per_word
        words = self._rows * self._dim // per
        share = -(-words // self._splits)
        rank = lang.ptx.cluster_rank() if self._splits > 1 else lang.const(0, u32)
        for base in range(0, share, tile.threads):
            own = lang.local_id() + base
            word = rank * share + own
            query, element = word * per // self._dim, word * per % self._dim
            with lang.if_((own < share) & (word < words) & work.has(query)):
                high, whole = sink_of(masks, work.head_and_query(query)[0], LOG2E)
                tops = self._load(self._stats, query)
                wholes = self._load(self._stats, query + MOST_ROWS)
                highest = reduce(lang.fmax, tops, high)
                total = whole * lang.exp2_native(high - highest)
                weights = [lang.exp2_native(top - highest) for top in tops]
                for weight, part in zip(weights, wholes, strict=True):
                    total = lang.fma(weight, part, total)
                factor = share_of(total)
                values = []
                for e in range(per):
                    value = lang.const(0.0, f32)
                    sums = self._load(self._memory, word * per + e)
                    for weight, part in zip(weights, sums, strict=True):
                        value = lang.fma(weight, part, value)
                    values.append(value * factor)
                y.store(work.result(query) + element, values)
        if self._splits > 1:
            lang.ptx.cluster_arrive()
            lang.ptx.cluster_wait()


def _cluster_mma(
    *, tile: SplitTile, splits: int, dim: int, rows: int, scoring: Scoring, q: Argument,
    k: Argument, v: Argument, y: Argument, **masks: Argument,
) -> None:  # fmt: skip
    if splits > 1:
        lang.ptx.cluster(splits)
    lang.ptx.resident(tile.together)
    work, scale = Work(masks, scoring, rows), product_scale(scoring, LOG2E)
    warp, cached = warp_of(work, dim, q, k), CachedRows(work, k, v)
    with lang.if_(work.begin < work.end):
        warp.load_keys(work.begin, cached)
        warp.load_values(work.begin, cached)
        warp.load_queries(lambda row, element: q.load_bits(work.query(row) + element))
        warp.walk(work.begin, work.end, tile.step, scale, cached)
    sums = Sums(splits, rows, dim)
    sums.gather(warp, tile)
    sums.write(work, masks, tile, y)


kernel: Kernel = Kernel(_cluster_mma, workgroup=128, name="attention_cluster_mma")


class ClusterTile(Struct, frozen=True):
    """How a group works, and the parts of the keys of a head."""

    split: SplitTile
    parts: Parts


def cluster_of(
    form: Form[AttentionAttrs], caps: Caps, warps: int | None = None
) -> ClusterTile | None:
    """Groups and parts for a form; None where it has no whole chunks, or there are no clusters."""
    split = tile_of(form, caps) if caps.clusters else None
    if split is None:
        return None
    split = replace(split, warps=warps or split.warps)
    return ClusterTile(split, Parts.of(form, split.step, split.groups, splits=MOST_GROUPS))


def fills(form: Form[AttentionAttrs], tile: ClusterTile) -> bool:
    """Whether parts of a cluster are short, or as many as a large GPU has multiprocessors."""
    parts, split = tile.parts, tile.split
    short = keys_seen(form, form.inputs[0].shape[2]) <= MOST_KEYS * parts.splits
    return short or parts.groups * split.together >= split.groups


def _launches(form: Form[AttentionAttrs], tile: ClusterTile, caps: Caps) -> Lowered:
    parts, split = tile.parts, tile.split
    constants = (
        ("scoring", form.attrs.scoring), ("dim", form.inputs[0].shape[3]), ("rows", parts.rows),
        ("splits", parts.splits), ("tile", split),
    )  # fmt: skip
    call = launch(
        kernel, form, parts.groups, constants, operands(form),
        {"y": Ref(len(form.inputs), form.outputs[0])}, scalars=parts.scalars, threads=split.threads,
    )  # fmt: skip
    return Lowered((call,))


def _preferred(form: Form[AttentionAttrs], caps: Caps) -> bool:
    if not (few_queries(form, caps) and caps.fast_tensor_cores):
        return False
    tile = cluster_of(form, caps)
    return tile is not None and fills(form, tile)


CLUSTER_MMA = AttentionVariant(
    "cluster_mma", cluster_of, _launches, _preferred,
    needs=f"takes f16 or bf16 with rows on 16 bytes, heads of multiples of {CHUNK} "
          f"({i8.per_chunk} in i8) up to {MOST_DIM}, and clusters of groups",
)  # fmt: skip
