"""The streaming kernel: a thread has whole queries, keys and values pass through shared memory.

A group has `64 * queries` queries of one head. Scores, the running maximum and sum, and the output
row stay in registers. Heads wider than 64 are computed by several groups, each with a part of the
output and all of the scores.
"""

from __future__ import annotations

import operator
from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.op.form import Form
from centella.op.op import Lowered
from centella.ops.attention.masks import LOWEST, added, counting, reach, sees, shows, upto
from centella.ops.attention.problem import (
    BY_HEAD,
    AttentionAttrs,
    AttentionVariant,
    launch_by_head,
    parameters,
)
from centella.ops.attention.table import row_of
from centella.ops.attention.weights import HIDDEN, LOG2E, power
from centella.ops.rows import fold
from centella.specs import Caps

THREADS = 64


def _rows(
    source: Any, place: Any, key: Any, stride: Any, valid: Any, tile: Any, keys: int,
    words: int, first: int | Any, dim: int, vector: bool,
) -> None:  # fmt: skip
    """Copy `keys` rows of `words` elements, from element `first`, into a shared tile.

    Rows whose key does not count, and elements past the head, become zeros.
    """
    width = source.dtype.per_chunk if vector else 4  # a shared chunk is written by one thread
    pieces = keys * words // width
    for piece in lang.range(lang.local_id(), pieces, THREADS):
        row = piece // (words // width)
        element = piece % (words // width) * width
        counts = valid(key + row)
        at = first + element
        start = place + lang.select(counts, key + row, 0) * stride
        if vector:
            safe = at if dim % words == 0 else lang.minimum(at, (dim - 1) // width * width)
            loaded = source.load(start + safe)
        else:
            loaded = [source[start + lang.minimum(at + j, dim - 1)] for j in range(width)]
        if dim % words:
            loaded = [lang.select(counts & (at + j < dim), v, 0.0) for j, v in enumerate(loaded)]
        else:
            loaded = [lang.select(counts, v, 0.0) for v in loaded]
        for j in range(0, width, 4):
            tile.store(row * words + element + j, loaded[j : j + 4])


def _attention(
    *, dim: int, part: int, queries: int, keys: int, together: int, causal: bool, native: bool,
    vector: bool, vector_y: bool, q: Any, k: Any, v: Any, y: Any, **masks: Any,
) -> None:  # fmt: skip
    p = parameters(BY_HEAD)
    words = -(-dim // 8) * 8
    parts = -(-dim // part)
    group = lang.group_id()
    piece, group = group % parts, group // parts
    block, group = group % p["blocks"], group // p["blocks"]
    head, b = group % p["heads"], group // p["heads"]
    shared_head = head // p["share"]
    end, start = reach(masks, causal, b, p["lq"], p["lk"])
    counts = counting(masks, b, end)
    first = block * (THREADS * queries)
    mine = [first + lang.local_id() + i * THREADS for i in range(queries)]
    scale = lang.parameter("scale", f32)
    scale = scale if "mask" in masks else scale * LOG2E  # scores are to base 2 but for a mask
    place, last = b * p["qb"] + head * p["qh"], p["lq"] - 1
    starts = (place + lang.minimum(row, last) * p["ql"] for row in mine)
    query = [_query(q, at, dim, vector, scale) for at in starts]
    top = lang.vars(f32, queries, init=LOWEST)
    total = lang.vars(f32, queries, init=0.0)
    out = lang.vars(f32, queries, part, init=0.0)
    key_tile, value_tile = lang.shared(f32, keys * words), lang.shared(f32, keys * part)
    if start is not None:
        end = lang.minimum(end, upto(start, first + THREADS * queries))
    for key0 in lang.range(lang.const(0, u32), end, keys):
        _rows(k, b * p["kb"] + shared_head * p["kh"], key0, p["kl"], counts, key_tile, keys,
              words, 0, dim, vector)  # fmt: skip
        _rows(v, b * p["vb"] + shared_head * p["vh"], key0, p["vl"], counts, value_tile, keys,
              part, piece * part, dim, vector)  # fmt: skip
        lang.barrier()
        for j0 in lang.range(0, keys, together):
            _some_keys(j0, together, key0, mine, query, key_tile, value_tile, words, part, dim, top,
                       total, out, counts, start, p, b, head, masks, native)  # fmt: skip
        lang.barrier()
    for i, row in enumerate(mine):
        with lang.if_(row < p["lq"]):
            factor = lang.select(total[i] > 0.0, 1.0 / total[i], 0.0)
            place = b * p["yb"] + head * p["yh"] + row * p["yl"]
            _store(y, place, piece * part, [v * factor for v in out[i]], dim, vector_y)


def _store(y: Any, place: Any, first: Any, values: list[Any], dim: int, vector: bool) -> None:
    """A query's results from element `first` of the head; nothing past the head's last word."""
    width, part = y.dtype.per_chunk if vector else y.dtype.per_word, len(values)
    for d in range(0, part, width):
        lanes = [values[d + e] if d + e < part else 0.0 for e in range(width)]
        if dim <= part and d >= dim:
            return
        if dim % part == 0 or dim <= part:
            y.store(place + first + d, lanes)
        else:
            with lang.if_(first + d < dim):
                y.store(place + first + d, lanes)


def _query(q: Any, start: Any, dim: int, vector: bool, scale: Any) -> list[Any]:
    """One query row, scaled, in registers."""
    width = q.dtype.per_chunk if vector else 1
    values: list[Any] = []
    for d in range(0, dim, width):
        loaded = q.load(start + d) if width > 1 else [q[start + d]]
        values += [v * scale for v in loaded]
    return values[:dim]


def _some_keys(
    j0: Any, count: int, key0: Any, mine: Any, query: Any, key_tile: Any, value_tile: Any,
    words: int, part: int, dim: int, top: Any, total: Any, out: Any, counts: Any, start: Any,
    p: dict[str, Any], b: Any, head: Any, masks: dict[str, Any], native: bool,
) -> None:  # fmt: skip
    """A few keys: scores, the new maximum, and one rescaling of what was summed."""
    of_keys = [_dots(query, key_tile, (j0 + j) * words, dim) for j in range(count)]
    scores = [list(of_query) for of_query in zip(*of_keys, strict=True)]
    weights: list[list[Any]] = []
    base = LOG2E if "mask" in masks else 1.0
    for i, row in enumerate(mine):
        valid = [counts(key0 + j0 + j) for j in range(count)]
        if start is not None:
            valid = [c & sees(start, row, key0 + j0 + j) for j, c in enumerate(valid)]
        if "mask" in masks:
            place = lang.minimum(row, p["lq"] - 1)
            for j in range(count):
                key = lang.minimum(key0 + j0 + j, p["lk"] - 1)
                value = added(masks, b, head, place, key)
                scores[i][j] = scores[i][j] + value
                valid[j] = valid[j] & shows(value)
        found = [lang.select(c, s, HIDDEN) for c, s in zip(valid, scores[i], strict=True)]
        high = lang.fmax(top[i], fold(found, lang.fmax))
        shrink, *weight = (power((s - high) * base, native) for s in (top[i], *found))
        total[i].set(total[i] * shrink + fold(weight, operator.add))
        top[i].set(high)
        weights.append([*weight, shrink])
    for d in range(0, part, 4):
        rows = [value_tile.load((j0 + j) * part + d) for j in range(count)]
        for i in range(len(mine)):
            *weight, shrink = weights[i]
            for e in range(4):
                value = out[i][d + e] * shrink
                for j in range(count):
                    value = lang.fma(weight[j], rows[j][e], value)
                out[i][d + e].set(value)


def _dots(queries: list[list[Any]], tile: Any, at: Any, dim: int) -> list[Any]:
    """The products of every query with a key, which is loaded once."""
    sums: list[list[Any]] = [[None, None] for _ in queries]
    for d in range(0, dim, 4):
        loaded = tile.load(at + d)
        for query, parts in zip(queries, sums, strict=True):
            for e in range(min(4, dim - d)):
                lane, a, b = e % 2, query[d + e], loaded[e]
                parts[lane] = a * b if parts[lane] is None else lang.fma(a, b, parts[lane])
    return [a if b is None else a + b for a, b in sums]


kernel: Kernel = Kernel(_attention, workgroup=THREADS, name="attention", rewritable=True)


def _launches(form: Form[AttentionAttrs], part: int, caps: Caps) -> Lowered:
    """One launch: a group has 64 (or 128) queries of one head."""
    lq, dim = form.inputs[0].shape[2:]
    queries = 2 if dim <= 32 and lq > THREADS else 1
    row = row_of(caps)
    keys, together = row.stream if dim <= 32 else (16 if dim <= 128 else 8 if dim <= 384 else 4, 4)
    constants = (
        ("keys", keys),  # what fits 16 KB
        ("native", caps.native_exp2),
        ("part", part),
        ("queries", queries),
        ("together", 1 if row.rolled else together),
        ("vector", all(s.aligned for s in form.inputs[:3])),
        ("vector_y", form.outputs[0].aligned),
    )
    return Lowered(
        (launch_by_head(kernel, form, THREADS * queries, constants, pieces=-(-dim // part)),)
    )


def _part_of(form: Form[AttentionAttrs], caps: Caps) -> int:
    """Elements of the head that a group computes."""
    return min(-(-form.inputs[0].shape[3] // 8) * 8, 64)


STREAM = AttentionVariant("stream", _part_of, _launches)
