"""The streaming kernel: a thread has whole queries, keys and values pass through shared memory.

A group has `64 * queries` queries of one head. Scores, the running maximum and sum, and the output
row stay in registers. Heads wider than 64 are computed by several groups, each with a part of the
output and all of the scores.
"""

from __future__ import annotations

import operator
from typing import Any

from centella import lang
from centella.dtypes import f32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.ops.attention.group_queries import GroupQueries, in_turn
from centella.ops.attention.lines import Lines, load_piece, piece_of
from centella.ops.attention.masks import Scoring, Sight, bounded, product_scale, share_of, sink_of
from centella.ops.attention.problem import (
    BY_HEAD,
    AttentionAttrs,
    AttentionVariant,
    launch_by_head,
    parameters,
    queries_of,
)
from centella.ops.attention.table import row_of
from centella.ops.attention.weights import HIDDEN, LOG2E, power
from centella.ops.rows import fold
from centella.specs import Caps

THREADS = 64


def _rows(
    source: Any, origin: Any, key: Any, stride: Any, scale_of: Any, valid: Any, tile: Any,
    keys: int, words: int, first: int | Any, dim: int, vector: bool,
) -> None:  # fmt: skip
    """Copy `keys` rows of `words` elements, from element `first`, into a shared tile.

    Rows whose key does not count, and elements past the head, become zeros. The first key is there.
    """
    width = piece_of(source, vector) if vector else 4  # a shared chunk is written by one thread
    pieces = keys * words // width
    for piece in lang.range(lang.local_id(), pieces, THREADS):
        row = piece // (words // width)
        element = piece % (words // width) * width
        counts = valid(key + row)
        at = first + element
        there = lang.select(counts, key + row, key)
        start, scale = origin + there * stride, scale_of(there)
        if vector:
            safe = at if dim % words == 0 else lang.minimum(at, (dim - 1) // width * width)
            loaded = load_piece(source, start + safe, width, scale)
        else:
            places = (start + lang.minimum(at + j, dim - 1) for j in range(width))
            loaded = [value for p in places for value in load_piece(source, p, 1, scale)]
        if dim % words:
            loaded = [lang.select(counts & (at + j < dim), v, 0.0) for j, v in enumerate(loaded)]
        else:
            loaded = [lang.select(counts, v, 0.0) for v in loaded]
        for j in range(0, width, 4):
            tile.store(row * words + element + j, loaded[j : j + 4])


def _attention(
    *, dim: int, part: int, queries: int, keys: int, together: int, scoring: Scoring, native: bool,
    vector: bool, vector_y: bool, q: Argument, k: Argument, v: Argument, y: Argument,
    **masks: Argument,
) -> None:  # fmt: skip
    p = parameters(BY_HEAD)
    words = -(-dim // 8) * 8
    parts = -(-dim // part)
    piece = lang.group_id() % parts
    at = GroupQueries(masks, in_turn(lang.group_id() // parts), THREADS * queries)
    head, b = at.head, at.b
    lines = Lines(masks, b, head // p["share"], at)
    sight = Sight(masks, scoring, b, at.lq, at.lk)
    first = at.block * (THREADS * queries)
    mine = [first + lang.local_id() + i * THREADS for i in range(queries)]
    unit = 1.0 if "mask" in masks else LOG2E  # scores are to base 2 but for a mask
    scale = product_scale(scoring, unit)
    first_row, last = at.row(b * p["qb"] + head * p["qh"], p["ql"]), at.last(at.lq)
    starts = (first_row + lang.minimum(row, last) * p["ql"] for row in mine)
    query = [_query(q, start, dim, vector, scale) for start in starts]
    begins = sink_of(masks, head, unit)
    top, total = (lang.vars(f32, queries, init=value) for value in begins)
    out = lang.vars(f32, queries, part, init=0.0)
    key_tile, value_tile = lang.shared(f32, keys * words), lang.shared(f32, keys * part)
    begin, end = sight.since(first) // keys * keys, sight.until(first + THREADS * queries)
    for key0 in lang.range(begin, end, keys):
        of_k, of_v = lines.places(key0)
        of_key, of_value = lines.scales(key0)
        _rows(k, of_k, key0, p["kl"], of_key, sight.counts, key_tile, keys, words, 0, dim, vector)
        _rows(v, of_v, key0, p["vl"], of_value, sight.counts, value_tile, keys, part, piece * part,
              dim, vector)  # fmt: skip
        lang.barrier()
        for j0 in lang.range(0, keys, together):
            _some_keys(j0, together, key0, mine, query, key_tile, value_tile, words, part, dim, top,
                       total, out, sight, scoring, head, unit, native)  # fmt: skip
        lang.barrier()
    for i, row in enumerate(mine):
        with lang.if_(row < at.lq):
            factor = share_of(total[i])
            start = at.row(b * p["yb"] + head * p["yh"], p["yl"]) + row * p["yl"]
            _store(y, start, piece * part, [v * factor for v in out[i]], dim, vector_y)


def _store(
    y: Argument, start: Operand, first: Operand, values: list[Expr], dim: int, vector: bool
) -> None:
    """A query's results from element `first` of the head; nothing past the head's last word."""
    width, part = y.dtype.per_chunk if vector else y.dtype.per_word, len(values)
    for d in range(0, part, width):
        lanes = [values[d + e] if d + e < part else 0.0 for e in range(width)]
        if dim <= part and d >= dim:
            return
        if dim % part == 0 or dim <= part:
            y.store(start + first + d, lanes)
        else:
            with lang.if_(first + d < dim):
                y.store(start + first + d, lanes)


def _query(q: Argument, start: Operand, dim: int, vector: bool, scale: Operand) -> list[Expr]:
    """One query row, scaled, in registers."""
    width = q.dtype.per_chunk if vector else 1
    values: list[Expr] = []
    for d in range(0, dim, width):
        loaded = q.load(start + d) if width > 1 else [q[start + d]]
        values += [v * scale for v in loaded]
    return values[:dim]


def _some_keys(
    j0: Operand, count: int, key0: Operand, mine: Any, query: Any, key_tile: Any, value_tile: Any,
    words: int, part: int, dim: int, top: Any, total: Any, out: Any, sight: Sight,
    scoring: Scoring, head: Any, unit: float, native: bool,
) -> None:  # fmt: skip
    """A few keys: scores, the new maximum, and one rescaling of what was summed."""
    of_keys = [_dots(query, key_tile, (j0 + j) * words, dim) for j in range(count)]
    scores = [list(of_query) for of_query in zip(*of_keys, strict=True)]
    weights: list[list[Expr]] = []
    for i, row in enumerate(mine):
        seen = []
        for j, score in enumerate(scores[i]):
            key = key0 + j0 + j
            score = bounded(score, scoring, unit)
            score, shown = sight.seen(score, sight.counts(key), head, row, key, unit)
            seen.append(lang.select(shown, score, HIDDEN))
        high = lang.fmax(top[i], fold(seen, lang.fmax))
        shrink, *weight = (power((s - high) * (LOG2E / unit), native) for s in (top[i], *seen))
        total[i].set(total[i] * shrink + fold(weight, operator.add))
        top[i].set(high)
        weights.append([*weight, shrink])
    for d in range(0, min(part, dim), 4):
        rows = [value_tile.load((j0 + j) * part + d) for j in range(count)]
        for i in range(len(mine)):
            *weight, shrink = weights[i]
            for e in range(4):
                value = out[i][d + e] * shrink
                for j in range(count):
                    value = lang.fma(weight[j], rows[j][e], value)
                out[i][d + e].set(value)


def _dots(queries: list[list[Any]], tile: Any, at: Any, dim: int) -> list[Operand]:
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
    dim = form.inputs[0].shape[3]
    queries = 2 if dim <= 32 and queries_of(form) > THREADS else 1
    row = row_of(caps)
    keys, together = row.stream if dim <= 32 else (16 if dim <= 128 else 8 if dim <= 384 else 4, 4)
    keys = min(keys, _most_keys(dim, part, caps))
    together = min(together, keys)
    constants = (
        ("keys", keys),
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


def _most_keys(dim: int, part: int, caps: Caps) -> int:
    """Keys whose rows, and parts of values, workgroup memory holds: a power of two, or 0."""
    most: int = caps.max_shared // (4 * max(-(-dim // 8) * 8 + part, 1))
    return 1 << (most.bit_length() - 1) if most else 0


def _part_of(form: Form[AttentionAttrs], caps: Caps) -> int | None:
    """Elements of the head that a group computes; None where too few keys fit."""
    dim = form.inputs[0].shape[3]
    part = min(-(-dim // 8) * 8, 64)
    keys = _most_keys(dim, part, caps)
    # The head is unrolled: a wider one compiles for a minute and more on a CPU.
    return part if keys >= 4 or (keys and dim <= 1280) else None


STREAM = AttentionVariant("stream", _part_of, _launches)
