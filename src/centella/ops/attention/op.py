"""`attention` as an op: rule, NumPy formula, how it is divided."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from centella.dtypes import Array, bool_, f32, i8, i32
from centella.errors import DTypeError, ShapeError
from centella.op.axes import Along, Axes, Dims
from centella.op.op import Form, Op, Out
from centella.ops.attention.host import host
from centella.ops.attention.lines import BLOCK
from centella.ops.attention.masks import HIDES, LOWEST, misshapen
from centella.ops.attention.problem import (
    VARIANTS,
    AttentionAttrs,
    extents,
    keys_seen,
    queries_of,
    texts_of,
)
from centella.ops.rows_i8 import PLANE, decode
from centella.specs import Spec


def rule(specs: tuple[Spec, ...], attrs: AttentionAttrs) -> tuple[Out, ...]:
    """q [b, h, lq, d], k and v [b, h', lk, d], h a multiple of h'; result [b, lq, h, d].

    With blocks [b, n] k and v are pools [h', blocks, 64, d], and lk is 64 n. With scales k and v
    are i8, and scales have their shape with 2 in the place of d.
    """
    q, k, v, *more = specs
    if any(len(s.shape) != 4 for s in (q, k, v)) or k.shape != v.shape:
        raise ShapeError(
            f"attention: expected q [b, h, lq, d], k and v [b, h', lk, d], got "
            f"{[list(s.shape) for s in (q, k, v)]}"
        )
    b, heads, lq, dim = q.shape
    named = dict(zip(attrs.masks, more, strict=True))
    if "blocks" in named:
        kv_heads, lk = _check_blocks(named["blocks"], k, q)
    else:
        _, kv_heads, lk, _ = k.shape
        if (k.shape[0], k.shape[3]) != (b, dim) or kv_heads == 0 or heads % kv_heads:
            raise ShapeError(
                f"attention: expected k and v [{b}, a divisor of {heads}, lk, {dim}], got "
                f"{list(k.shape)}"
            )
    rows = {k.dtype, v.dtype}
    if not q.dtype.is_float or rows != ({i8} if "scales" in named else {q.dtype}):
        wanted = "a float q and i8 k and v" if "scales" in named else "one float dtype"
        raise DTypeError(f"attention: expected {wanted}, got {[s.dtype.name for s in (q, k, v)]}")
    if attrs.causal and "starts" in attrs.masks:
        raise ShapeError("attention: expected causal or starts, got both")
    if "scales" in named:
        _check_scales(named["scales"], k)
    if "offsets" in named:
        _check_offsets(named, q, lk)
    for name, spec in named.items():
        _check_mask(name, spec, b, heads, lq, lk)
    return (((b, lq, heads, dim), q.dtype),)


def _check_blocks(table: Spec, k: Spec, q: Spec) -> tuple[int, int]:
    """Heads of keys, and keys that a row of the table has room for."""
    (b, heads, _, dim), (kv_heads, blocks, size, own) = q.shape, k.shape
    if (size, own) != (BLOCK, dim) or 0 in (kv_heads, blocks) or heads % kv_heads:
        raise ShapeError(
            f"attention: expected k and v in blocks [a divisor of {heads}, blocks, {BLOCK}, {dim}],"
            f" got {list(k.shape)}"
        )
    if table.dtype is not i32:
        raise DTypeError(f"attention: expected i32 blocks, got {table.dtype.name}")
    if len(table.shape) != 2 or table.shape[0] != b or not table.shape[1]:
        raise ShapeError(f"attention: expected blocks [{b}, 1 or more], got {list(table.shape)}")
    return kv_heads, table.shape[1] * size


def _check_scales(scales: Spec, k: Spec) -> None:
    wanted = (*k.shape[:3], PLANE)
    if scales.shape != wanted or scales.dtype is not f32:
        raise ShapeError(
            f"attention: expected f32 scales {list(wanted)}, got {scales.dtype.name} "
            f"{list(scales.shape)}"
        )


def _check_offsets(named: dict[str, Spec], q: Spec, lk: int) -> None:
    if not {*named} <= {"offsets", "bias", "sinks"}:
        raise ShapeError(f"attention: expected offsets with bias or sinks, got {', '.join(named)}")
    offsets = named["offsets"]
    if len(offsets.shape) != 1 or not offsets.shape[0] or (q.shape[0], q.shape[2]) != (1, lk):
        raise ShapeError(
            f"attention: expected offsets [texts + 1], one batch, and as many queries as keys, got "
            f"{list(offsets.shape)}, q {list(q.shape)}, {lk} keys"
        )


def _check_mask(name: str, spec: Spec, b: int, heads: int, lq: int, lk: int) -> None:
    wanted = {"lengths": (b,), "starts": (b,), "key_mask": (b, lk), "sinks": (heads,)}.get(name)
    if wanted is not None and spec.shape != wanted:
        raise ShapeError(f"attention: expected {name} {list(wanted)}, got {list(spec.shape)}")
    if name == "bias":
        sizes = spec.shape
        if len(sizes) != 2 or sizes[0] not in (1, heads) or sizes[1] % 2 == 0:
            raise ShapeError(
                f"attention: expected bias [{heads} or 1, an odd number], got {list(sizes)}"
            )
    if name == "mask":
        pairs = zip(spec.shape, (b, heads, lq, lk), strict=False)
        if len(spec.shape) != 4 or any(n not in (1, m) for n, m in pairs):
            raise misshapen((b, heads, lq, lk), spec.shape)
    if name in ("lengths", "starts", "offsets") and spec.dtype is not i32:
        raise DTypeError(f"attention: expected i32 {name}, got {spec.dtype.name}")
    if name == "mask" and not (spec.dtype.is_float or spec.dtype is bool_):
        raise DTypeError(
            f"attention: expected a float mask, which is added to the scores, or a bool one, True "
            f"where a query sees a key, got {spec.dtype.name}; mask.astype('bool') is one"
        )
    if name in ("sinks", "bias") and not spec.dtype.is_float:
        raise DTypeError(f"attention: expected float {name}, got {spec.dtype.name}")
    if name == "key_mask" and spec.dtype.is_float:
        raise DTypeError(f"attention: expected a bool or integer key_mask, got {spec.dtype.name}")


def reference(
    q: Array, k: Array, v: Any, *more: Array, masks: tuple[str, ...], causal: bool, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> Any:  # fmt: skip
    """The NumPy formula, over the keys that some query may see."""
    b, heads, lq, dim = q.shape
    named = dict(zip(masks, more, strict=True))
    if "offsets" in named:
        offsets = named.pop("offsets")
        attrs = {"causal": causal, "scale": scale, "window": window, "softcap": softcap}
        return _end_to_end(q, k, v, offsets, named, attrs)
    kv_heads, lk = k.shape[1:3]
    if "blocks" in named:
        kv_heads, lk = k.shape[0], named["blocks"].shape[1] * k.shape[2]
    if "mask" in named and named["mask"].dtype == bool:
        named["mask"] = np.where(named["mask"], q.dtype.type(0), q.dtype.type(LOWEST))
    some = _some(named, window, lq, lk)
    rows = (k, v, named["scales"]) if "scales" in named else (k, v)
    if "blocks" in named:
        k, v, *scales = (_gathered(x, named["blocks"], some) for x in rows)
    else:
        k, v, *scales = (x[:, :, some] for x in rows)
    for plane in scales:
        k, v = (decode(x, plane[..., n].astype(q.dtype)) for n, x in enumerate((k, v)))
    grouped = (q * q.dtype.type(scale)).reshape(b, kv_heads, heads // kv_heads * lq, dim)
    scores = np.matmul(grouped, k.swapaxes(-1, -2)).reshape(b, heads, lq, k.shape[2])
    if softcap is not None:
        cap = q.dtype.type(softcap)
        scores = np.tanh(scores / cap) * cap
    counts = _counts(named, causal, window, lq, lk)[..., some]
    if "bias" in named:
        starts = named.get("starts", np.array([lk - lq]))
        spread = [_bias_of(named["bias"], int(start), lq, lk)[..., some] for start in starts]
        scores = scores + np.stack(spread)
    if "mask" in named:
        whole = np.broadcast_to(named["mask"], (*named["mask"].shape[:3], lk))
        scores = scores + whole[..., some]
    if not counts.all():
        np.copyto(scores, -np.inf, where=~counts)
        v = np.where(_any_head(counts, kv_heads), v, v.dtype.type(0))
    top = scores.max(-1, keepdims=True, initial=LOWEST)
    sink: Any = 0
    if "sinks" in named:
        top = np.maximum(top, named["sinks"][:, None, None])
        sink = np.exp(named["sinks"][:, None, None] - top)
    scores -= top
    e = np.exp(scores, out=scores)
    total = e.sum(-1, keepdims=True) + sink
    y = np.matmul(e.reshape(*grouped.shape[:-1], k.shape[2]), v).reshape(q.shape)
    return np.divide(y, total, out=np.zeros_like(y), where=total != 0).transpose(0, 2, 1, 3)


def _gathered(pool: Array, blocks: Array, some: slice) -> Array:
    """Keys of each sequence from its blocks, [b, kv_heads, keys, d]."""
    kv_heads, count, size, dim = pool.shape
    first, last = some.start // size, -(-some.stop // size)
    table = np.minimum(blocks[:, first:last].astype(np.uint32), count - 1)
    rows = pool[:, table].swapaxes(0, 1).reshape(len(table), kv_heads, -1, dim)
    return rows[:, :, some.start - first * size : some.stop - first * size]


def _end_to_end(
    q: Any, k: Any, v: Any, offsets: Any, named: dict[str, Any], attrs: dict[str, Any]
) -> Any:
    """Each text alone; zeros for what is in none."""
    y = np.zeros_like(q.transpose(0, 2, 1, 3))
    inside = np.clip(offsets, 0, q.shape[2])
    for begin, end in pairwise([0, *inside[1:].tolist()]):
        rows = (x[:, :, begin:end] for x in (q, k, v))
        if begin < end:
            y[:, begin:end] = reference(*rows, *named.values(), masks=tuple(named), **attrs)
    return y


def _bias_of(table: Any, start: int, lq: int, lk: int) -> Any:
    """What a table adds for queries that stand from `start` on: a view [heads or 1, lq, lk]."""
    count = table.shape[1]
    away = np.arange(-lq, lk) - start
    row = table[:, np.clip(away + count // 2, 0, count - 1)]
    return np.lib.stride_tricks.sliding_window_view(row, lk, 1)[:, :0:-1]


def _some(named: dict[str, Any], window: int | None, lq: int, lk: int) -> slice:
    """Keys from the first that a window shows to the last of the longest sequence."""
    least, most = 0, lk
    if "lengths" in named:
        most = min(most, int(named["lengths"].max(initial=0)))
    if "starts" in named:
        most = min(most, int(named["starts"].max(initial=-lq)) + lq)
    if window is not None:
        first = int(named["starts"].min(initial=lk)) if "starts" in named else lk - lq
        least = first - window + 1
    most = max(most, 0)
    return slice(min(max(least, 0), most), most)


def _counts(named: dict[str, Any], causal: bool, window: int | None, lq: int, lk: int) -> Array:
    """Which keys each query sees, [b or 1, heads or 1, lq or 1, lk]."""
    key = np.arange(lk)
    counts: Array = np.ones((1, 1, 1, lk), bool)
    if "lengths" in named:
        counts = counts & (key < named["lengths"][:, None])[:, None, None, :]
    if "key_mask" in named:
        counts = counts & (named["key_mask"] != 0)[:, None, None, :]
    if causal or window is not None or "starts" in named:
        starts = np.asarray(named.get("starts", np.array([lk - lq])), np.int64)
        behind = (starts[:, None] + np.arange(lq))[..., None] - key  # [b or 1, lq, lk]
        seen = behind >= 0 if causal or "starts" in named else behind > -(window or 0)
        seen = seen if window is None else seen & (behind < window)
        counts = counts & seen[:, None]
    return counts & ~(named["mask"] <= HIDES) if "mask" in named else counts


def _any_head(counts: Any, kv_heads: int) -> Any:
    """Whether any query of any head that shares a key sees it, [b or 1, kv_heads or 1, lk, 1]."""
    seen = counts.any(axis=2)
    b, heads, lk = seen.shape
    if heads > 1:
        seen = seen.reshape(b, kv_heads, heads // kv_heads, lk).any(axis=2)
    return seen[..., None]


def takes(index: int, spec: Spec) -> bool:
    """q, k, v, key_mask: rows of neighbouring elements; other masks and numbers as they lie."""
    return spec.unit_rows or (index > 2 and len(spec.shape) in (1, 4))


def axes_of(form: Form[AttentionAttrs]) -> Axes:
    """Sequences, queries, and the heads of keys with the heads of queries that share each."""
    heads, (kv_heads, _) = form.inputs[0].shape[1], extents(form)
    share = max(heads // kv_heads, 1)  # there may be no heads of queries
    b, h, shared = Along("b"), Along("h"), Along("h", share)
    q = None if "offsets" in form.attrs.masks else Along("q")  # queries see keys of their own text
    rows: Dims = (h, None, None, None) if "blocks" in form.attrs.masks else (b, h, None, None)
    dims: list[Dims] = [(b, shared, q, None), rows, rows]
    of_name: dict[str, Dims] = {
        "mask": (b, shared, q),  # it broadcasts
        "sinks": (shared,), "bias": (shared,), "scales": rows, "offsets": (None,),
    }  # fmt: skip
    for name, spec in zip(form.attrs.masks, form.inputs[3:], strict=True):
        own = of_name.get(name, (b,))
        kept = (a if n > 1 else None for a, n in zip(own, spec.shape, strict=False))
        dims.append((*kept, *(None for _ in spec.shape[len(own) :])))
    return Axes(tuple(dims), ((b, q, shared, None),), told="q")


def flops_of(form: Form[AttentionAttrs]) -> int:
    """Scores and what they weigh: a multiplication and an addition each, for every key.

    Of texts end to end as if all were equally long: of lengths the host knows the sum alone.
    """
    keys = keys_seen(form, 1)
    if texts_of(form) is not None:
        keys = min(keys, queries_of(form))
    return 4 * form.outputs[0].size * keys


ATTENTION = Op("attention", rule, reference, "centella.ops.attention.choice:attention",
               takes, VARIANTS, attrs=AttentionAttrs, host=host, axes=axes_of, flops=flops_of,
               doc="scaled dot-product attention")  # fmt: skip
