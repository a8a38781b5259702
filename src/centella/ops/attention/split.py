"""The decoding variant: few queries, whose keys are split among groups.

A group reads one part of the keys and values of one head, once for all queries that share them:
every position of every head of the group of heads. Its threads form teams; see `teams`. Scores are
base 2 logarithms.
"""

from __future__ import annotations

import math
from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.op.form import Form
from centella.op.op import Lowered
from centella.ops.attention.combine import combine
from centella.ops.attention.parts import Parts, Work, first_call
from centella.ops.attention.problem import AttentionAttrs, AttentionVariant
from centella.ops.attention.table import FEW_QUERIES, row_of
from centella.ops.attention.teams import (
    EACH,
    THREADS,
    Layout,
    Thread,
    accumulate,
    add_up,
    gather,
    load,
    multiply,
    soften,
    thread,
    weigh,
)
from centella.specs import Caps

MOST_DIM = THREADS * EACH
FEWEST_KEYS = 64  # of a part
ENOUGH_KEYS = 64


def _split(
    *, dim: int, rows: int, causal: bool, vector: bool, q: Any, k: Any, v: Any, partial: Any,
    **masks: Any,
) -> None:  # fmt: skip
    work = Work(masks, causal, rows)
    my = thread(Layout(dim, rows, k.dtype.per_chunk if vector else 1))
    with lang.if_(work.begin < work.end):
        _read(work, my, q, k, v)
        highest, whole = weigh(my)
        with lang.if_((my.me < rows) & work.has(my.me)):
            at = work.results(my.me).stats
            partial[at] = highest
            partial[at + 1] = whole
        for row in range(rows):
            if row:
                lang.barrier()
            place = lang.const(row, u32)
            add_up(my, row, partial, work.results(place).sums, work.has(place))


def _read(work: Work, my: Thread, q: Any, k: Any, v: Any) -> None:
    """The keys and values of the part."""
    lay, scale = my.lay, lang.parameter("scale", f32) * math.log2(math.e)
    query = []
    for row in range(lay.rows):
        found = load(my, q, work.query(lang.const(row, u32)), True)
        query.append([x * scale for x in found])
    key_pitch, value_pitch = (lang.parameter(n, u32) for n in ("kl", "vl"))
    for base in lang.range(work.begin, work.end, lay.teams * lay.keys):
        ahead = [base + j * lay.teams for j in range(lay.keys)]
        mine = [at + my.team for at in ahead]
        safe = [lang.minimum(key, work.end - 1) for key in mine]
        keys = [load(my, k, work.keys + key * key_pitch, True) for key in safe]
        values = [load(my, v, work.values + key * value_pitch, False) for key in safe]
        kept = [work.counts(key) for key in mine]  # what hides a key hides any NaN in its value
        values = [[lang.select(c, x, 0.0) for x in xs] for c, xs in zip(kept, values, strict=True)]
        multiply(my, query, keys)
        lang.barrier()
        with lang.if_(my.leads):
            row = my.me % lay.rows
            theirs = [at + my.me // lay.rows for at in ahead]
            found = [
                work.seen(row, key, work.counts(key), score)
                for key, score in zip(theirs, gather(my), strict=True)
            ]
            soften(my, [score for score, _ in found], [shown for _, shown in found])
        lang.barrier()
        accumulate(my, values)


kernel: Kernel = Kernel(_split, workgroup=THREADS, name="attention_split", rewritable=True)


def _fits(form: Form[AttentionAttrs], caps: Caps) -> Parts | None:
    """The parts, where the threads of a group hold a head."""
    q, k = form.inputs[:2]
    if not 0 < q.shape[3] <= MOST_DIM:
        return None
    return Parts.of(q, k, FEWEST_KEYS, most=row_of(caps).rows)


def _launches(form: Form[AttentionAttrs], parts: Parts, caps: Caps) -> Lowered:
    """Two launches: a group for each part of the keys of a head; one for each query."""
    constants = (("vector", all(s.aligned for s in form.inputs[:3])),)
    first = first_call(kernel, parts, form, constants)
    return Lowered((first, combine(parts, form, caps)), (parts.spec,))


def few_queries(form: Form[AttentionAttrs], caps: Caps) -> bool:
    """Few queries of many keys, of a head that a group holds."""
    lq, dim = form.inputs[0].shape[2:]
    return lq <= FEW_QUERIES and form.inputs[1].shape[2] >= ENOUGH_KEYS and dim <= MOST_DIM


SPLIT = AttentionVariant(
    "split", _fits, _launches, few_queries, needs=f"takes head_dim 1 to {MOST_DIM}"
)
