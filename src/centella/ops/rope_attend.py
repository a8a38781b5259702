"""rope_attend: what a decoder's attention does with the product of q, k and v, in one op.

`rope_cache_write`, then `attention` of the queries over the cache, causally. With clusters that is
one launch, else of few queries two, elsewhere the launches of both (`attention/rope_choice.py`).

What a query gets whose own key has no place in the cache (block 0) is undefined.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array
from centella.emit.program import HostProgram
from centella.op.op import Form, Op, Out, unit_rows
from centella.ops.attention.op import ATTENTION
from centella.ops.attention.op import reference as attended
from centella.ops.attention.problem import AttentionAttrs
from centella.ops.cache import write_reference
from centella.ops.rope_cache import ROPE_CACHE, RopeCacheAttrs, axes_of, check_step, divided
from centella.specs import Spec, make_spec

VARIANTS = ("ring", "ring_split", "cluster", "split_mma", "split", "apart")


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
    keys: Array, values: Array, x: Array, cos: Array, sin: Array, starts: Any, *norms: Array,
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
    inner = AttentionAttrs(tuple(named), attrs.scale, window=attrs.window, softcap=attrs.softcap)
    return Form(ATTENTION, (q, keys, values, *named.values()), (y,), inner)


def cache_form(form: Form[RopeAttendAttrs], q: Spec) -> Form[RopeCacheAttrs]:
    """What its rotation and cache are asked to do."""
    attrs = RopeCacheAttrs(form.attrs.interleaved, form.attrs.eps)
    return Form(ROPE_CACHE, form.inputs, (*form.outputs[:2], q), attrs)


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


def unread(
    form: Form[RopeAttendAttrs], outputs: frozenset[int]
) -> Form[RopeCacheAttrs] | None:  # fmt: skip
    """Keys and values alone, where nobody reads what the queries get: a prompt's last layer."""
    if 2 not in outputs:
        return None
    (batch, tokens, heads, dim), dtype = form.outputs[2].shape, form.outputs[2].dtype
    return cache_form(form, make_spec((batch, heads, tokens, dim), dtype, 16))


ROPE_ATTEND = Op(
    "rope_attend", rule, reference, "centella.ops.attention.rope_choice:lower", unit_rows,
    VARIANTS, attrs=RopeAttendAttrs, mutates=(0, 1), host=host, axes=axes_of,
    preferred=Form.within_binding, unread=unread,
    doc="q, k and v of a step: rotated, k and v into a KV cache, and attention over it",
)  # fmt: skip
