"""Decoding on tensor cores in one launch: the groups of a head's keys are a cluster (sm_90 on).

The groups work as those of `split_mma`. Each sends every other group a share of the head's sums,
to its shared memory; it adds up its own share over the parts, in order, once all is there, and
writes it. Where a GPU is full without dividing the keys, there is one part, and no cluster. Keys
and values are asked for before the launches before are over: most often they are a cache, which
none of those writes.

One launch fewer saves its latency, some 2.5 us of an H200. A cluster has eight groups at most, so
that few sequences of many keys leave multiprocessors idle: those go to `split_mma`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from centella.ops.attention.masks import Scoring, product_scale, sink_of
from centella.ops.attention.parts import Parts, Work
from centella.ops.attention.problem import (
    NONE,
    AttentionAttrs,
    AttentionVariant,
    keys_seen,
    launch,
    operands,
)
from centella.ops.attention.split import few_queries
from centella.ops.attention.split_warp import CHUNK, MOST_DIM, CachedRows
from centella.ops.attention.split_warp_i8 import tile_of, warp_of
from centella.ops.attention.warp_sums import SplitTile, WarpSums
from centella.ops.attention.weights import LOG2E
from centella.specs import Caps

MOST_KEYS = 384  # of a part, where there are fewer groups than multiprocessors


class Sums:
    """A group's share of the head: what all parts have of it, in its shared memory.

    Each group of the cluster sends every other one its share, and counts the bytes of its own. So
    no group reads what is far away, and none waits for the cluster to meet once it has its sums.

    Args:
        splits: parts, the groups of a cluster; rows: queries; dim: elements of a head.
    """

    def __init__(self, splits: int, rows: int, dim: int) -> None:
        self._splits, self._rows, self._dim = splits, rows, dim
        self._chunks = rows * dim // 4
        self._share = -(-self._chunks // splits)
        self._stats = lang.shared(f32, 2 * rows * splits)  # maxima by query and part, then sums
        self._memory = lang.shared(f32, 4 * self._share * splits)
        if splits == 1:
            return
        self._rank = lang.ptx.cluster_rank()
        self._there = lang.ptx.Barriers(1)
        with lang.if_(lang.local_id() == 0):
            self._there.init(0, 1)
            lang.ptx.init_fence()
            own = lang.minimum(self._chunks - self._rank * self._share, self._share)
            if self._share * (splits - 1) >= self._chunks:  # the last groups have no share
                own = lang.select(self._rank * self._share < self._chunks, own, 0)
            self._there.expect(0, (own * 16 + 8 * rows) * splits)
        lang.ptx.cluster_arrive(relaxed=True)

    def gather(self, warp: WarpSums, tile: SplitTile) -> None:
        """Add up what the warps of this group have, and send each group its share."""
        splits, rows = self._splits, self._rows
        half = rows * splits
        if splits > 1:
            lang.ptx.cluster_wait()  # all barriers are initialised

        def put_stats(query: Any, high: Any, whole: Any, copy: Any) -> None:
            at = query * splits
            if splits == 1:
                self._stats[at], self._stats[at + half] = high, whole
                return
            for n, value in enumerate((high, whole)):
                self._there.send(0, self._stats, at + self._rank + n * half, [value], copy)

        def put_sums(query: Operand, element: Any, sums: list[Expr]) -> None:
            item = (query * self._dim + element) // 4
            if splits == 1:
                self._memory.store(item * 4, sums)
                return
            at = (self._rank * self._share + item % self._share) * 4
            self._there.send(0, self._memory, at, sums, item // self._share)

        warp.add_up(tile, rows, put_stats, put_sums, splits)

    def write(self, work: Work, masks: dict[str, Any], tile: SplitTile, y: Argument) -> None:
        """Write this group's share of the results, once all parts of it are there."""
        splits, per = self._splits, y.dtype.per_word
        rank = self._rank if splits > 1 else lang.const(0, u32)
        words = []
        for base in range(0, 4 * self._share // per, tile.threads):
            own = (lang.local_id() + base) * per
            at = rank * (4 * self._share) + own
            query, element = at // self._dim, at % self._dim
            there = (own < 4 * self._share) & (at < 4 * self._chunks)
            words.append((own, query, work.result(query) + element, there & work.has(query)))
        if splits > 1:
            self._there.wait(0, 0)
        else:
            lang.barrier()
        for own, query, to, there in words:
            with lang.if_(there):
                high, whole = sink_of(masks, work.head_and_query(query)[0], LOG2E)
                each = query * splits
                tops = [self._stats[each + n] for n in range(splits)]
                highest = reduce(lang.fmax, tops, high)
                total = whole * lang.exp2_native(high - highest)
                weights = [lang.exp2_native(top - highest) for top in tops]
                for n, weight in enumerate(weights):
                    part = self._stats[each + (n + self._rows * splits)]
                    total = lang.fma(weight, part, total)
                factor = lang.select(total == 0.0, 0.0, lang.ptx.reciprocal(total))
                values = []
                for e in range(per):
                    value = lang.const(0.0, f32)
                    for n, weight in enumerate(weights):
                        part = self._memory[own + (n * 4 * self._share + e)]
                        value = lang.fma(weight, part, value)
                    values.append(value * factor)
                y.store(to, values)


def _cluster_mma(
    *, tile: SplitTile, splits: int, dim: int, rows: int, single: bool, early: bool,
    scoring: Scoring, q: Argument, k: Argument, v: Argument, y: Argument, **masks: Argument,
) -> None:  # fmt: skip
    if splits > 1:
        lang.ptx.cluster(splits)
    lang.ptx.resident(tile.together)
    sums = Sums(splits, rows, dim)
    work, scale = Work(masks, scoring, rows, single), product_scale(scoring, LOG2E)
    warp, cached = warp_of(work, dim, q, k), CachedRows(work, k, v)
    with lang.if_(work.begin < work.end):
        warp.load_keys(work.begin, cached)
        warp.load_values(work.begin, cached)
    if early:
        lang.ptx.launch_dependents()
        lang.ptx.await_launches()
    with lang.if_(work.begin < work.end):
        warp.load_queries(lambda row, element: q.load_bits(work.query(row) + element))
        warp.walk(work.begin, work.end, tile.step, scale, cached)
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
    return alone(kernel, form, tile.parts, tile.split, tile.split.threads, caps)


def alone(
    kernel: Kernel, form: Form[AttentionAttrs], parts: Parts, tile: Struct, threads: int,
    caps: Caps, scalars: Mapping[str, int | float] = NONE,
) -> Lowered:  # fmt: skip
    """One launch, whose groups add up the parts of a head as clusters.

    Args:
        tile: how a group works; threads: of it; scalars: beside those of the form and its parts.
    """
    queries, dim = form.inputs[0].shape[2:]
    constants = (
        ("scoring", form.attrs.scoring), ("dim", dim), ("rows", parts.rows),
        ("single", queries == 1), ("splits", parts.splits), ("tile", tile),
        ("early", caps.early_launch),
    )  # fmt: skip
    call = launch(
        kernel, form, parts.groups, constants, operands(form),
        {"y": Ref(len(form.inputs), form.outputs[0])}, scalars={**parts.scalars, **scalars},
        threads=threads,
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
