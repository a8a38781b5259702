"""The ops that write a KV cache in i8: each key and value is quantised as a row of its own.

cache_write_i8       as `cache_write`, of k and v of any float dtype
rope_cache_write_i8  as `rope_cache_write`: rotated first, then quantised; q stays as wide as x

`rows_i8` says what is stored. A team of threads has a row, whose largest element they find
together; nothing is written but numbers, scales and q.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from centella import lang
from centella.dtypes import Array, f32, i8, narrow, u32, widen
from centella.emit.program import Call, HostProgram, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, NoAttrs, Op, Out, unit_rows
from centella.ops import cache, rope_cache
from centella.ops.cache import cache_scalars, place_in
from centella.ops.elements import offset_of
from centella.ops.layout import flat
from centella.ops.rope import Turn, layout_of
from centella.ops.rope_cache import Head, RopeCacheAttrs
from centella.ops.rows import WALKERS, Item, Row, Team, chunked, strides_of, team_of, width_of
from centella.ops.rows_i8 import PLANE, WORD, encode, largest, numbers_of, scale_of, store_words
from centella.specs import Caps, Spec

CACHE = 3  # operands that a cache is: keys, values, scales


def _row_of(team: Team, width: int) -> Row:
    return Row(team, width, lang.parameter("dim", u32), lang.parameter("rows", u32))


def _lanes(item: Item, width: int) -> list[Expr]:
    """The columns of an item; those past the row are its last."""
    last = lang.parameter("dim", u32) - 1
    return [item.column] + [lang.minimum(item.column + e, last) for e in range(1, width)]


def _keep(
    row: Row, values_of: Any, top: Any, target: Any, start: Any, scales: Any, scale_at: Any
) -> None:
    """Store a row's numbers, and its scale by one thread."""
    for item in row.items():
        numbers = numbers_of(values_of(item), top)
        with row.storing(item):
            store_words(target, start, item.column, numbers, lang.parameter("dim", u32))
    with lang.if_(row.first()):
        scales[scale_at] = scale_of(top)


def _keep_queries(row: Row, values_of: Any, y: Argument, start: Operand, chunk: bool) -> None:
    """Store a row in its own dtype."""
    for item in row.items():
        with row.storing(item):
            if chunk:
                y.store(start + item.column, values_of(item))
            else:
                store_words(y, start, item.column, values_of(item), lang.parameter("dim", u32))


def _write(
    *, chunk: bool, team: Team, keys: Argument, values: Argument, scales: Argument, k: Argument,
    v: Argument, starts: Argument,
) -> None:  # fmt: skip
    """A team has a row of k, then the same of v."""
    width = k.dtype.per_chunk if chunk else WORD
    row = _row_of(team, width)
    tokens, heads = (lang.parameter(n, u32) for n in ("tokens", "heads"))
    token, rest = row.number % tokens, row.number // tokens
    head, b = rest % heads, rest // heads
    scale_at, _ = place_in(starts, b, head, token, "sc")
    for n, (source, target, name) in enumerate(((k, keys, "k"), (v, values, "v"))):
        to, inside = place_in(starts, b, head, token, f"{name}c")
        at = offset_of([b, head, token], name)

        def load(item: Item, source: Any = source, at: Any = at) -> list[Expr]:
            if chunk:
                return source.load(at + item.column)  # type: ignore[no-any-return]  # traced
            return [source[at + lane] for lane in _lanes(item, width)]

        values_of = row.kept(load)
        top = largest(row, values_of)
        with lang.if_(inside):
            _keep(row, values_of, top, target, to, scales, scale_at + n)


write_kernel: Kernel = Kernel(_write, workgroup=WALKERS, name="cache_write_i8")


def _rope(
    *, team: Team, x: Argument, cos: Argument, sin: Argument, starts: Argument,
    norms: Argument | None = None, y: Argument | None = None, keys: Argument | None = None,
    values: Argument | None = None, scales: Argument | None = None, **layout: bool,
) -> None:  # fmt: skip
    """A team has a head of a token: of queries where there is y, of a cache where that is."""
    turn = Turn(cos, sin, **layout)
    width = x.dtype.per_chunk if turn.chunk else WORD
    heads, kv_heads, tokens, height = (
        lang.parameter(n, u32) for n in ("heads", "kv_heads", "tokens", "height")
    )
    row = _row_of(team, width)
    i, rest = row.number % tokens, row.number // tokens
    count = (0 if y is None else heads) + (0 if keys is None else kv_heads * 2)
    head, b = rest % count, rest // count
    head = head if y is not None else head + heads
    first = starts[b] if starts.rank == 1 else starts[b, 0]
    position = lang.bitcast(first, u32) + i
    start, none = offset_of([b, head, i], "x"), lang.const(0, u32)
    which = lang.select(head < heads, 0, lang.const(1, u32))
    source = Head(x, start, width_of(x, turn.chunk), turn.chunk, norms, which)
    at, inside = lang.minimum(position, height - 1), position < height

    def turned(item: Item) -> list[Expr]:
        lanes = _lanes(item, width)
        own = source.load(item.column) if turn.chunk else [source[c] for c in lanes]
        turned = turn.turned(source, none, own, turn.entries(at, lanes), lanes)
        rotated = turn.passed(turned, own, lanes, inside)
        if keys is None:  # no head of values
            return rotated
        plain = turn.read(x, start, lanes)
        turns = head < heads + kv_heads
        return [lang.select(turns, m, p) for m, p in zip(rotated, plain, strict=True)]

    values_of = row.kept(turned)
    if y is not None:
        with lang.if_(head < heads):
            _keep_queries(row, values_of, y, offset_of([b, head, i], "y"), turn.chunk)
    if keys is None:
        return
    top = largest(row, values_of)
    is_key = head < heads + kv_heads
    kept_head = head - heads - lang.select(is_key, 0, kv_heads)
    kinds = ((keys, "kc", is_key), (values, "vc", ~is_key))
    for n, (target, name, mine) in enumerate(kinds):
        to, fits = place_in(starts, b, kept_head, i, name)
        scale_at, _ = place_in(starts, b, kept_head, i, "sc")
        with lang.if_((head >= heads) & mine & fits):
            _keep(row, values_of, top, target, to, scales, scale_at + n)


rope_kernel: Kernel = Kernel(_rope, workgroup=WALKERS, name="rope_cache_write_i8")


# -- as ops ---------------------------------------------------------------------------------------


def check_stored(op: str, keys: Spec, values: Spec, scales: Spec) -> None:
    """Raise unless these are rows of i8 and their plane of scales."""
    if keys.dtype is not i8 or values.dtype is not i8 or scales.dtype is not f32:
        names = ", ".join(s.dtype.name for s in (keys, values, scales))
        raise DTypeError(f"{op}: expected i8 keys and values and f32 scales, got {names}")
    wanted = (*keys.shape[:-1], PLANE)
    if values.shape != keys.shape or scales.shape != wanted:
        raise ShapeError(
            f"{op}: expected values {list(keys.shape)} and scales {list(wanted)}, got "
            f"{list(values.shape)} and {list(scales.shape)}"
        )


def _plain(specs: Sequence[Spec]) -> tuple[Spec, ...]:
    """The operands of the same op with a cache of the dtype of what is written."""
    keys, values, scales, *rest = specs
    check_stored("cache_write_i8", keys, values, scales)
    return (*(replace(s, dtype=rest[0].dtype) for s in (keys, values)), *rest)


def _outs(specs: Sequence[Spec]) -> tuple[Out, ...]:
    return tuple((s.shape, s.dtype) for s in specs[:CACHE])


def write_rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """As `cache_write`, with scales [..., 2] after the caches."""
    cache.write_rule(_plain(specs), attrs)
    if not specs[CACHE].dtype.is_float:
        raise DTypeError(f"cache_write_i8: expected float k, got {specs[CACHE].dtype.name}")
    return _outs(specs)


def rope_rule(specs: tuple[Spec, ...], attrs: RopeCacheAttrs) -> tuple[Out, ...]:
    """As `rope_cache_write`, with scales [..., 2] after the caches."""
    *_, q = rope_cache.rule(_plain(specs), attrs)
    return (*_outs(specs), q)


def write_reference(
    keys: Array, values: Array, scales: Array, k: Array, v: Array, starts: Array
) -> tuple[Array, Array, Array]:
    """The NumPy formula: changes `keys`, `values` and `scales`."""
    (k, k_scales), (v, v_scales) = encode(np.asarray(k)), encode(np.asarray(v))
    cache.write_reference(keys, values, k, v, starts)
    k, v = k_scales[..., None], v_scales[..., None]
    cache.write_reference(scales[..., :1], scales[..., 1:], k, v, starts)
    return keys, values, scales


def rope_reference(
    keys: Array, values: Array, scales: Array, x: Array, cos: Array, sin: Array, starts: Array,
    *norms: Array, interleaved: bool, eps: float,
) -> Any:  # fmt: skip
    """The NumPy formula: changes `keys`, `values` and `scales`."""
    q, k, v = rope_cache.divided(x, keys, cos, sin, starts, norms, interleaved, eps)
    return (*write_reference(keys, values, scales, k, v, starts), q)


def write_host(form: Form[NoAttrs]) -> HostProgram:
    """On the CPU: quantised from f32."""
    dtypes = [s.dtype for s in form.inputs[CACHE:]]

    def call(arrays: list[Array], outs: list[Array]) -> None:
        wide = (widen(a, d) for a, d in zip(arrays[CACHE:], dtypes, strict=True))
        write_reference(*arrays[:CACHE], *wide)

    return HostProgram("numpy:cache_write_i8", "cache_write_i8", call)


def rope_host(form: Form[RopeCacheAttrs]) -> HostProgram:
    """On the CPU: computed in f32, rounded or quantised once."""
    dtypes = [s.dtype for s in form.inputs[CACHE:]]
    interleaved, eps = form.attrs.interleaved, form.attrs.eps

    def call(arrays: list[Array], outs: list[Array]) -> None:
        wide = (widen(a, d) for a, d in zip(arrays[CACHE:], dtypes, strict=True))
        with np.errstate(all="ignore"):
            *_, q = rope_reference(*arrays[:CACHE], *wide, interleaved=interleaved, eps=eps)
        np.copyto(outs[CACHE], narrow(q, dtypes[0]))

    return HostProgram("numpy:rope_cache_write_i8", "rope_cache_write_i8", call)


def _call(
    kernel: Kernel, form: Form[Any], names: str, rows: int, width: int, caps: Caps,
    constants: dict[str, Any], scalars: dict[str, int | float], *, parts: str = "cache",
) -> Call:  # fmt: skip
    """A launch with a team a row.

    Args:
        names: of the operands after the cache, in order.
        parts: what it writes: "y", "cache" or both.
    """
    keys, values, scales = form.inputs[:CACHE]
    team = team_of(keys.shape[-1], width, caps)
    named = dict(zip(names.split(), form.inputs[CACHE:], strict=False))
    ranks = {n: 1 if n in ("k", "v", "x") else len(s.shape) for n, s in named.items()}
    refs = [Ref(CACHE + i, flat(s) if ranks[n] == 1 else s)
            for i, (n, s) in enumerate(named.items())]  # fmt: skip
    if "y" in parts:
        refs.append(Ref(len(form.inputs) + CACHE, form.outputs[CACHE]))
    if "cache" in parts:
        refs += [Ref(i, flat(s)) for i, s in enumerate(form.inputs[:CACHE])]
    changed = ("keys", "values", "scales") if "cache" in parts else ()
    changes: dict[str, int] = dict.fromkeys(changed, 1)
    params = signature(ranks, {"y": 1} if "y" in parts else {}, changes)
    told = {
        "rows": rows, "dim": keys.shape[-1], **cache_scalars(keys, named["starts"]),
        **strides_of(kc=keys, vc=values, sc=scales), **scalars,
    }  # fmt: skip
    return Call(
        kernel, tuple(refs), tuple(told.items()), (*constants.items(), ("team", team)),
        team.groups(rows), workgroup=team.threads, signature=params,
    )  # fmt: skip


def write_lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """One launch."""
    k, v = form.inputs[CACHE : CACHE + 2]
    batch, heads, tokens, _ = k.shape
    chunk = chunked(k, v)
    scalars: dict[str, int | float] = {
        "tokens": tokens, "heads": heads, **strides_of(k=k, v=v),
    }  # fmt: skip
    width = k.dtype.per_chunk if chunk else WORD
    rows = batch * heads * tokens
    return Lowered(
        (_call(write_kernel, form, "k v starts", rows, width, caps, {"chunk": chunk}, scalars),)
    )


def rope_lower(form: Form[RopeCacheAttrs], caps: Caps) -> Lowered:
    """One launch; two where a launch may not have so many operands: queries, then the rest."""
    x, cos, sin = form.inputs[CACHE : CACHE + 3]
    y = form.outputs[CACHE]
    batch, heads, tokens, _ = y.shape
    kv_heads = (x.shape[1] - heads) // 2
    layout = layout_of(cos, sin, form.attrs.interleaved, y, x)
    scalars: dict[str, int | float] = {
        "heads": heads, "kv_heads": kv_heads, "tokens": tokens, "rotary": 2 * cos.shape[1],
        "height": cos.shape[0], "eps": form.attrs.eps, **strides_of(x=x, y=y),
    }  # fmt: skip
    width = x.dtype.per_chunk if layout["chunk"] else WORD
    shares = {"y": heads, "cache": 2 * kv_heads}
    if len(form.inputs) < caps.max_storage_buffers:  # and y
        shares = {"y cache": x.shape[1]}
    return Lowered(
        tuple(
            _call(rope_kernel, form, "x cos sin starts norms", batch * share * tokens, width, caps,
                  layout, scalars, parts=parts)
            for parts, share in shares.items()
        )
    )  # fmt: skip


def write_axes(form: Form[NoAttrs]) -> Axes:
    """As of `cache_write`."""
    if len(form.inputs[-1].shape) == 2:
        return axes(["h..."] * 3 + [".h..", ".h..", ".."], ["h..."] * 3)
    return axes(["bh.."] * 5 + ["b"], ["bh.."] * 3)


def rope_axes(form: Form[RopeCacheAttrs]) -> Axes:
    """As of `rope_cache_write`."""
    tables = [".." for _ in form.inputs[7:]]
    if len(form.inputs[6].shape) == 2:
        return axes(["...."] * 4 + ["..", "..", "..", *tables], ["...."] * 4)
    return axes(["b..."] * 4 + ["..", "..", "b", *tables], ["b..."] * 4)


WRITE = Op("cache_write_i8", write_rule, write_reference, write_lower, unit_rows,
           mutates=(0, 1, 2), host=write_host, axes=write_axes,
           doc="rows of k and v into a KV cache in i8")  # fmt: skip
ROPE = Op(
    "rope_cache_write_i8", rope_rule, rope_reference, rope_lower, unit_rows, attrs=RopeCacheAttrs,
    mutates=(0, 1, 2), host=rope_host, axes=rope_axes, preferred=Form.within_binding,
    doc="q, k and v of a step: rotated, k and v into a KV cache in i8",
)  # fmt: skip
