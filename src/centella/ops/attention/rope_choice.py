"""The launches of `rope_attend`: one with clusters, two of few queries, else those of both."""

from __future__ import annotations

from collections.abc import Callable

from centella.dtypes import f32
from centella.emit.program import Call, Constants, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.op.op import Form, Lowered
from centella.op.variant import Variant, choose
from centella.ops.attention.cluster_mma import ClusterTile, cluster_of, fills
from centella.ops.attention.combine import added_up
from centella.ops.attention.parts import Parts
from centella.ops.attention.problem import AttentionAttrs, scalars_of
from centella.ops.attention.ring_choice import RingParts, apart, clustered
from centella.ops.attention.ring_choice import fills as ring_fills
from centella.ops.attention.rope_cluster import RopeTile, kernel
from centella.ops.attention.rope_ring import RopeRing
from centella.ops.attention.rope_ring import kernel as rope_ring
from centella.ops.attention.rope_ring import split_kernel as rope_ring_split
from centella.ops.attention.rope_split import kernel as rope_split
from centella.ops.attention.rope_split_mma import kernel as rope_split_mma
from centella.ops.attention.rope_split_tile import MOST_DIM, THREADS, Tile, rows_for
from centella.ops.attention.split import few_queries, parts_of
from centella.ops.attention.split_mma import SPLIT_MMA
from centella.ops.attention.split_warp import tile_of
from centella.ops.attention.table import row_of
from centella.ops.attention.warp_sums import SplitTile
from centella.ops.cache import cache_scalars
from centella.ops.layout import flat
from centella.ops.rope import layout_of
from centella.ops.rope_attend import RopeAttendAttrs, attention_form, cache_form
from centella.ops.rows import strides_of
from centella.specs import Caps

FEW_GROUPS = 264  # two for each multiprocessor of an H200
MANY_GROUPS = 1024  # of parts in f32: one step of keys each, if that takes no more groups
WARPS = 6  # of a group of a cluster, whose keys lie in a row: as many as registers allow


def _cluster(form: Form[RopeAttendAttrs], caps: Caps) -> ClusterTile | None:
    """Groups and parts where a cluster has all queries of its keys, and rows are whole chunks."""
    inner = attention_form(form)
    tile = cluster_of(inner, caps, 4 if "blocks" in inner.attrs.masks else WARPS)
    if tile is None or tile.parts.blocks > 1 or not _chunks(form):
        return None
    return tile


def _chunks(form: Form[RopeAttendAttrs]) -> bool:
    """Whether rows of 16 bits are whole chunks, those of norms too."""
    keys, values, x, cos, sin, _, *norms = form.inputs
    q = attention_form(form).inputs[0]
    layout = layout_of(cos, sin, form.attrs.interleaved, q, keys, values, x)
    return x.aligned and layout["chunk"] and all(s.aligned for s in norms)


def met(split: SplitTile, caps: Caps) -> RopeTile:
    """How groups work, and when launches before and after overlap with theirs."""
    return RopeTile(split, caps.early_launch)


def _preferred(form: Form[RopeAttendAttrs], caps: Caps) -> bool:
    inner = attention_form(form)
    if not (few_queries(inner, caps) and caps.fast_tensor_cores):
        return False
    tile = _cluster(form, caps)
    return tile is not None and fills(inner, tile)


def _first(
    kernel: Kernel, form: Form[RopeAttendAttrs], parts: Parts, constants: Constants,
    writes: dict[str, Ref], changes: dict[str, Ref], threads: int | None = None,
) -> Call:  # fmt: skip
    """A launch that rotates, writes the cache and attends; what it leaves is named."""
    keys, values, x, cos, sin, starts, *norms = form.inputs
    inner = attention_form(form)
    layout = layout_of(cos, sin, form.attrs.interleaved, inner.inputs[0], keys, values, x)
    scalars: dict[str, int | float] = {
        **scalars_of(inner), **parts.scalars, **cache_scalars(keys, starts),
        **strides_of(x=x, kc=keys, vc=values), "rotary": 2 * cos.shape[1],
        "height": cos.shape[0], "eps": form.attrs.eps,
    }  # fmt: skip
    reads = {"x": 1, "cos": 2, "sin": 2, "starts": 1} | ({"norms": 2} if norms else {})
    changes = {"keys": Ref(0, flat(keys)), "values": Ref(1, flat(values)), **changes}
    refs = (
        Ref(2, flat(x)), Ref(3, cos), Ref(4, sin), Ref(5, flat(starts)),
        *(Ref(6, s) for s in norms), *writes.values(), *changes.values(),
    )  # fmt: skip
    known = (
        ("blocks", len(starts.shape) == 2), ("dim", inner.inputs[0].shape[3]),
        ("layout", tuple(layout.items())), ("rows", parts.rows), ("scoring", inner.attrs.scoring),
    )  # fmt: skip
    params = signature(reads, dict.fromkeys(writes, 1), dict.fromkeys(changes, 1))
    return Call(kernel, refs, tuple(scalars.items()), (*known, *constants), parts.groups,
                workgroup=threads, signature=params)  # fmt: skip


def _one_launch(form: Form[RopeAttendAttrs], tile: ClusterTile, caps: Caps) -> Lowered:
    return _alone(kernel, form, tile.parts, met(tile.split, caps))


def _alone(
    kernel: Kernel, form: Form[RopeAttendAttrs], parts: Parts, tile: RopeTile | RopeRing
) -> Lowered:
    """A launch that leaves nothing to another one."""
    y = form.outputs[2]
    constants = (("splits", parts.splits), ("tile", tile), ("tokens", y.shape[1]))
    writes = {"y": Ref(len(form.inputs) + 2, flat(y))}
    return Lowered((_first(kernel, form, parts, constants, writes, {}, tile.split.threads),))


def _rings(
    form: Form[RopeAttendAttrs], caps: Caps,
    parts_of: Callable[[Form[AttentionAttrs], int, Caps], RingParts | None],
) -> RingParts | None:  # fmt: skip
    """Groups, parts and rings where rows are whole chunks, and the copy engine is there."""
    inner = attention_form(form)
    if not (caps.warpgroups and _chunks(form)) or tile_of(inner, caps) is None:
        return None
    return parts_of(inner, form.outputs[2].shape[1], caps)


def _ring(form: Form[RopeAttendAttrs], caps: Caps) -> RingParts | None:
    return _rings(form, caps, clustered)


def _ring_split(form: Form[RopeAttendAttrs], caps: Caps) -> RingParts | None:
    return _rings(form, caps, apart)


def _ring_preferred(form: Form[RopeAttendAttrs], caps: Caps) -> bool:
    inner, tile = attention_form(form), _ring(form, caps)
    return _preferred_mma(form, caps) and tile is not None and ring_fills(inner, tile)


def _ring_launch(form: Form[RopeAttendAttrs], tile: RingParts, caps: Caps) -> Lowered:
    return _alone(rope_ring, form, tile.parts, RopeRing(tile.ring, caps.early_launch))


def _ring_launches(form: Form[RopeAttendAttrs], tile: RingParts, caps: Caps) -> Lowered:
    ring = RopeRing(tile.ring, caps.early_launch)
    constants = (("tile", ring), ("tokens", form.outputs[2].shape[1]))
    first = _left(rope_ring_split, form, tile.parts, constants, tile.split.threads)
    return _two_launches(form, tile.parts, caps, first)


def _parts(form: Form[RopeAttendAttrs], caps: Caps) -> Parts | None:
    """The parts where a step has one token in f32, rows are whole chunks and memory suffices."""
    inner = attention_form(form)
    keys, values, x, cos, sin, _, *norms = form.inputs
    q = inner.inputs[0]
    dim = q.shape[3]
    layout = layout_of(cos, sin, form.attrs.interleaved, q, keys, values, x)
    one = q.shape[2] == 1 and x.dtype is f32 and dim <= MOST_DIM
    if not (one and layout["chunk"] and all(s.aligned for s in norms)):
        return None
    for most in (rows_for(dim), rows_for(dim) // 2):
        parts = parts_of(inner, caps, MANY_GROUPS, most)
        if parts is not None and Tile(dim, parts.rows, _threads(parts, caps)).fits(caps):
            return parts
    return None


def _threads(parts: Parts, caps: Caps) -> int:
    """Threads of a group in f32: more where groups are few, so that each has less to do."""
    more = parts.groups <= FEW_GROUPS and not row_of(caps).rolled
    return min(THREADS if more else THREADS // 2, caps.max_workgroup)


def _two_launches(form: Form[RopeAttendAttrs], parts: Parts, caps: Caps, first: Call) -> Lowered:
    inner, count = attention_form(form), len(form.inputs)
    operands = (0, 0, 1, *(5 for _ in inner.attrs.masks), count + 2)
    second = Lowered((added_up(parts, inner, caps, own=True),), (parts.spec,))
    return Lowered((first,)) + second.within(operands, count + 3)


def _left(
    kernel: Kernel, form: Form[RopeAttendAttrs], parts: Parts, constants: Constants, threads: int
) -> Call:  # fmt: skip
    """A launch that leaves parts in the form's first temporary."""
    partial = {"partial": Ref(len(form.inputs) + 3, parts.spec)}
    return _first(kernel, form, parts, constants, {}, partial, threads)


def first_in_f32(
    form: Form[RopeAttendAttrs], parts: Parts, caps: Caps, whole: bool = False
) -> Call:  # fmt: skip
    """The launch that leaves parts in f32, in the form's first temporary.

    Args:
        whole: it leaves parts without keys, too, which weigh nothing.
    """
    threads, known = _threads(parts, caps), parts.known(attention_form(form), heads=True)
    constants = (
        ("known", known), ("native", caps.native_exp2), ("threads", threads), ("whole", whole),
    )  # fmt: skip
    return _left(rope_split, form, parts, constants, threads)


def _two_launches_f32(form: Form[RopeAttendAttrs], parts: Parts, caps: Caps) -> Lowered:
    return _two_launches(form, parts, caps, first_in_f32(form, parts, caps))


def _parts_mma(form: Form[RopeAttendAttrs], caps: Caps) -> SplitTile | None:
    """How a group works where 16-bit rows are whole chunks on tensor cores."""
    tile = SPLIT_MMA.tile(attention_form(form), caps)
    return tile if isinstance(tile, SplitTile) and _chunks(form) else None


def _two_launches_mma(form: Form[RopeAttendAttrs], tile: SplitTile, caps: Caps) -> Lowered:
    parts = Parts.of(attention_form(form), tile.step, tile.groups)
    constants = (("tile", met(tile, caps)), ("tokens", form.outputs[2].shape[1]))
    return _two_launches(
        form, parts, caps, _left(rope_split_mma, form, parts, constants, tile.threads)
    )


def _preferred_mma(form: Form[RopeAttendAttrs], caps: Caps) -> bool:
    return few_queries(attention_form(form), caps) and caps.fast_tensor_cores


def _both(form: Form[RopeAttendAttrs], tile: bool, caps: Caps) -> Lowered:
    """The launches of `rope_cache_write` and `attention`; q lies between them."""
    inner = attention_form(form)
    q, count = inner.inputs[0], len(form.inputs)
    write, attend = cache_form(form, q).lower(caps), inner.lower(caps)
    between = count + 3
    first = Lowered((), (q,)) + write.within((*range(count + 2), between), between + 1)
    operands = (between, 0, 1, *(5 for _ in inner.attrs.masks), count + 2)
    after = {4: 1} if "blocks" in inner.attrs.masks else {}  # blocks begin behind the start
    return first + attend.within(operands, between + len(first.temporaries), after)


CLUSTER: Variant[Form[RopeAttendAttrs], ClusterTile] = Variant(
    "cluster", _cluster, _one_launch, _preferred
)
RING: Variant[Form[RopeAttendAttrs], RingParts] = Variant(
    "ring", _ring, _ring_launch, _ring_preferred
)
RING_SPLIT: Variant[Form[RopeAttendAttrs], RingParts] = Variant(
    "ring_split", _ring_split, _ring_launches, _preferred_mma
)
SPLIT_STEP: Variant[Form[RopeAttendAttrs], Parts] = Variant(
    "split", _parts, _two_launches_f32, lambda form, caps: few_queries(attention_form(form), caps)
)
SPLIT_STEP_MMA: Variant[Form[RopeAttendAttrs], SplitTile] = Variant(
    "split_mma", _parts_mma, _two_launches_mma, _preferred_mma
)
APART: Variant[Form[RopeAttendAttrs], bool] = Variant("apart", lambda form, caps: True, _both)


def lower(form: Form[RopeAttendAttrs], caps: Caps) -> Lowered:
    """The launches of the variant that is forced or chosen."""
    order = (RING, CLUSTER, RING_SPLIT, SPLIT_STEP_MMA, SPLIT_STEP, APART)
    return choose(order, form, caps, form.attrs.variant, "rope_attend").lower(form, caps)
