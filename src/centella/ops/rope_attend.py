"""rope_attend: what a decoder's attention does with the product of q, k and v, in one op.

`rope_cache_write`, then `attention` of the queries over the cache, causally. With clusters that is
one launch (`attention/rope_cluster.py`), elsewhere the launches of both.

What a query gets whose own key has no place in the cache (block 0) is undefined.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella.dtypes import Array
from centella.emit.program import Call, HostProgram, Ref
from centella.op.axes import Axes, axes
from centella.op.form import Form
from centella.op.op import Lowered, Op, Out, unit_rows
from centella.op.variant import Variant, choose
from centella.ops.attention.cluster_mma import ClusterTile, cluster_of, fills
from centella.ops.attention.op import ATTENTION
from centella.ops.attention.op import reference as attended
from centella.ops.attention.problem import AttentionAttrs, scalars_of
from centella.ops.attention.rope_cluster import kernel
from centella.ops.attention.split import few_queries
from centella.ops.cache import cache_scalars, write_reference
from centella.ops.kernel_params import face
from centella.ops.layout import flat
from centella.ops.rope import layout_of
from centella.ops.rope_cache import ROPE_CACHE, RopeCacheAttrs, check_step, divided
from centella.ops.rows import strides_of
from centella.specs import Caps, Spec, make_spec

VARIANTS = ("cluster", "apart")


class RopeAttendAttrs(Struct, frozen=True):
    """As in `rope_cache_write` and `attention`."""

    interleaved: bool
    eps: float
    scale: float
    window: int | None = None
    softcap: float | None = None
    variant: str | None = None


def rule(specs: tuple[Spec, ...], attrs: RopeAttendAttrs) -> tuple[Out, ...]:
    """As of `rope_cache_write`; the third result is [b, t, h, d]."""
    keys, values, ((b, heads, tokens, d), dtype) = check_step("rope_attend", specs)
    return keys, values, ((b, tokens, heads, d), dtype)


def _masks(starts: Any) -> dict[str, Any]:
    """The masks of attention; in a table the blocks follow the start."""
    if len(starts.shape) == 1:
        return {"starts": starts}
    return {"starts": starts[:, 0], "blocks": starts[:, 1:]}


def reference(
    keys: Any, values: Any, x: Any, cos: Any, sin: Any, starts: Any, *norms: Any,
    interleaved: bool, eps: float, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> Any:  # fmt: skip
    """The NumPy formula: changes `keys` and `values`."""
    q, k, v = divided(x, keys, cos, sin, starts, norms, interleaved, eps)
    write_reference(keys, values, k, v, starts)
    masks = _masks(starts)
    y = attended(
        q, keys, values, *masks.values(), masks=tuple(masks), causal=False, scale=scale,
        window=window, softcap=softcap,
    )  # fmt: skip
    return keys, values, y


def attention_form(form: Form[RopeAttendAttrs]) -> Form[AttentionAttrs]:
    """What its attention is asked to do."""
    keys, values, x, _, _, starts, *_ = form.inputs
    y, attrs = form.outputs[2], form.attrs
    batch, tokens, heads, dim = y.shape
    q = make_spec((batch, heads, tokens, dim), x.dtype, 16)
    named = {"starts": starts}
    if len(starts.shape) == 2:
        (b, width), (down, across) = starts.shape, starts.strides
        named["starts"] = Spec((b,), starts.dtype, (down,))
        named["blocks"] = Spec((b, width - 1), starts.dtype, (down, across))
    inner = {"masks": tuple(named), "scale": attrs.scale, "window": attrs.window,
             "softcap": attrs.softcap}  # fmt: skip
    return ATTENTION.form((q, keys, values, *named.values()), (y,), inner)


def cache_form(form: Form[RopeAttendAttrs], q: Spec) -> Form[RopeCacheAttrs]:
    """What its rotation and cache are asked to do."""
    attrs = {"interleaved": form.attrs.interleaved, "eps": form.attrs.eps}
    return ROPE_CACHE.form(form.inputs, (*form.outputs[:2], q), attrs)


def host(form: Form[RopeAttendAttrs]) -> HostProgram:
    """On the CPU: the programs of both, one after the other."""
    inner = attention_form(form)
    q = inner.inputs[0]
    write, attend = ROPE_CACHE.host_program(cache_form(form, q)), ATTENTION.host_program(inner)

    def call(arrays: list[Array], outs: list[Array]) -> None:
        queries = np.empty(q.shape, outs[2].dtype)
        write.call(arrays, [*outs[:2], queries])
        attend.call([queries, *arrays[:2], *_masks(arrays[5]).values()], outs[2:])

    return HostProgram("numpy:rope_attend", "rope_attend", call)


# -- launches -------------------------------------------------------------------------------------


def _cluster(form: Form[RopeAttendAttrs], caps: Caps) -> ClusterTile | None:
    """Groups and parts where a cluster has all queries of its keys, and rows are whole chunks."""
    inner = attention_form(form)
    tile = cluster_of(inner, caps)
    keys, values, x, cos, sin, *_ = form.inputs
    if tile is None or tile.parts.blocks > 1 or not x.aligned:
        return None
    layout = layout_of(cos, sin, form.attrs.interleaved, inner.inputs[0], keys, values, x)
    return tile if layout["chunk"] else None


def _preferred(form: Form[RopeAttendAttrs], caps: Caps) -> bool:
    inner = attention_form(form)
    if not (few_queries(inner, caps) and caps.fast_tensor_cores):
        return False
    tile = _cluster(form, caps)
    return tile is not None and fills(inner, tile)


def _one_launch(form: Form[RopeAttendAttrs], tile: ClusterTile, caps: Caps) -> Lowered:
    keys, values, x, cos, sin, starts, *norms = form.inputs
    inner, parts, y = attention_form(form), tile.parts, form.outputs[2]
    layout = layout_of(cos, sin, form.attrs.interleaved, inner.inputs[0], keys, values, x)
    scalars: dict[str, int | float] = {
        **scalars_of(inner), **parts.scalars, **cache_scalars(keys, starts),
        **strides_of(x=x, kc=keys, vc=values), "rotary": 2 * cos.shape[1],
        "height": cos.shape[0], "eps": form.attrs.eps,
    }  # fmt: skip
    reads = {"x": 1, "cos": 2, "sin": 2, "starts": 1} | ({"norms": 2} if norms else {})
    refs = (
        Ref(2, flat(x)), Ref(3, cos), Ref(4, sin), Ref(5, flat(starts)),
        *(Ref(6, s) for s in norms), Ref(len(form.inputs) + 2, flat(y)), Ref(0, flat(keys)),
        Ref(1, flat(values)),
    )  # fmt: skip
    constants = (
        ("blocks", len(starts.shape) == 2), ("dim", y.shape[3]), ("layout", tuple(layout.items())),
        ("rows", parts.rows), ("scoring", inner.attrs.scoring), ("splits", parts.splits),
        ("tile", tile.split), ("tokens", y.shape[1]),
    )  # fmt: skip
    params = face(reads, {"y": 1}, {"keys": 1, "values": 1})
    call = Call(kernel, refs, tuple(scalars.items()), constants, parts.groups,
                workgroup=tile.split.threads, face=params)  # fmt: skip
    return Lowered((call,))


def _both(form: Form[RopeAttendAttrs], tile: bool, caps: Caps) -> Lowered:
    """The launches of `rope_cache_write` and `attention`; q lies between them."""
    inner = attention_form(form)
    q, count = inner.inputs[0], len(form.inputs)
    write, attend = cache_form(form, q).lower(caps), inner.lower(caps)
    outputs = count + 3
    in_write = [
        *range(count + 2),
        outputs,
        *range(outputs + 1, outputs + 1 + len(write.temporaries)),
    ]
    first = outputs + 1 + len(write.temporaries)
    in_attend = [outputs, 0, 1, *(5 for _ in inner.attrs.masks), count + 2,
                 *range(first, first + len(attend.temporaries))]  # fmt: skip
    after = {4: 1} if "blocks" in inner.attrs.masks else {}  # blocks begin behind the start
    calls = (*(_moved(c, in_write, {}) for c in write.calls),
             *(_moved(c, in_attend, after) for c in attend.calls))  # fmt: skip
    return Lowered(calls, (q, *write.temporaries, *attend.temporaries))


def _moved(call: Call, to: list[int], offsets: dict[int, int]) -> Call:
    """A launch of another op: its operand n is operand `to[n]`, from an element on."""
    tensors = (Ref(to[r.index], r.spec, r.offset + offsets.get(r.index, 0)) for r in call.tensors)
    return replace(call, tensors=tuple(tensors))


CLUSTER: Variant[Form[RopeAttendAttrs], ClusterTile] = Variant(
    "cluster", _cluster, _one_launch, _preferred
)
APART: Variant[Form[RopeAttendAttrs], bool] = Variant("apart", lambda form, caps: True, _both)


def lower(form: Form[RopeAttendAttrs], caps: Caps) -> Lowered:
    """The launches of the variant that is forced or chosen."""
    variant = choose((CLUSTER, APART), form, caps, form.attrs.variant, "rope_attend")
    return variant.lower(form, caps)


def axes_of(form: Form[RopeAttendAttrs]) -> Axes:
    """Sequences. Blocks belong to any of them."""
    rest = [".." for _ in form.inputs[6:]]
    if len(form.inputs[5].shape) == 2:
        return axes(["....", "....", "....", "..", "..", "..", *rest], ["...."] * 3)
    return axes(["b...", "b...", "b...", "..", "..", "b", *rest], ["b..."] * 3)


ROPE_ATTEND = Op(
    "rope_attend", rule, reference, lower, unit_rows, VARIANTS, attrs=RopeAttendAttrs,
    mutates=(0, 1), host=host, axes=axes_of,
    doc="q, k and v of a step: rotated, k and v into a KV cache, and attention over it",
)  # fmt: skip
