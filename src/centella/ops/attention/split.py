"""The decoding variant: few queries, whose keys are split among groups.

A group reads one part of the keys and values of one head, once for all queries that share them:
every position of every head of the group of heads. Its threads form teams; see `teams`.

How many parts there are follows from shapes; where each begins, from the lengths on the device. So
one plan serves every length, and a short sequence in a long buffer is spread over the groups.
"""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.errors import LimitError
from centella.op import Lowered
from centella.ops.attention.combine import MOST_SPLITS, combine
from centella.ops.attention.launch import extents, out_steps
from centella.ops.attention.masks import added, counting, reach, sees, shows
from centella.ops.attention.teams import (
    EACH,
    THREADS,
    Layout,
    accumulate,
    add_up,
    gather,
    load,
    multiply,
    soften,
    thread,
    weigh,
)
from centella.ops.face import face
from centella.ops.layout import flat
from centella.program import Call, Kernel, Ref
from centella.specs import Caps, Spec

MOST_DIM = THREADS * EACH
MOST_ROWS = 8
ENOUGH_GROUPS = 512
FEWEST_KEYS = 64


def split_count(groups: int, lk: int) -> int:
    """Parts of the keys, for `groups` groups a part: enough for a large GPU, none of them tiny."""
    wanted = min(-(-ENOUGH_GROUPS // max(groups, 1)), -(-lk // FEWEST_KEYS), MOST_SPLITS)
    return max(wanted, 1)


def rows_of_group(queries: int) -> int:
    """Queries that a group has at once: a power of two, so that few programs serve all."""
    return min(1 << max(queries - 1, 0).bit_length(), MOST_ROWS)


def _split(
    *, dim: int, rows: int, causal: bool, vector: bool, q: Any, k: Any, v: Any, partial: Any,
    **masks: Any,
) -> None:  # fmt: skip
    p = {n: lang.parameter(n, u32) for n in (
        "heads", "share", "lq", "lk", "qb", "qh", "ql", "kb", "kh", "kl", "vb", "vh", "vl",
        "blocks", "splits")}  # fmt: skip
    group = lang.group_id()
    split, group = group % p["splits"], group // p["splits"]
    block, group = group % p["blocks"], group // p["blocks"]
    kv_heads, queries = p["heads"] // p["share"], p["share"] * p["lq"]
    kv_head, b = group % kv_heads, group // kv_heads
    my = thread(Layout(dim, rows, k.dtype.per_chunk if vector else 1))
    count, start = reach(masks, causal, b, p["lq"], p["lk"])
    begin, end = _part(split, p["splits"], count, my.lay.teams)
    counts = counting(masks, b, end)

    def place(row: Any) -> tuple[Any, Any]:
        """Head and position of a row; those past the last are the last again."""
        at = lang.minimum(block * rows + row, queries - 1)
        return kv_head * p["share"] + at % p["share"], at // p["share"]

    def visible(key: Any, scores: list[Any], j: int) -> Any:
        """Whether a leader's query sees a key, whose score gets the additive mask."""
        head, i = place(my.me % rows)
        shown = counts(key)
        if start is not None:
            shown = shown & sees(start, i, key)
        if "mask" in masks:
            value = added(masks, b, head, i, lang.minimum(key, p["lk"] - 1))
            scores[j] = scores[j] + value
            shown = shown & shows(value)
        return shown

    query, scale = [], lang.parameter("scale", f32)
    for row in range(rows):
        head, i = place(lang.const(row, u32))
        found = load(my, q, b * p["qb"] + head * p["qh"] + i * p["ql"], True)
        query.append([x * scale for x in found])
    key_place, value_place = b * p["kb"] + kv_head * p["kh"], b * p["vb"] + kv_head * p["vh"]
    for base in lang.range(begin, end, my.lay.teams * my.lay.keys):
        ahead = [base + j * my.lay.teams for j in range(my.lay.keys)]
        mine = [at + my.team for at in ahead]
        safe = [lang.minimum(key, end - 1) for key in mine]
        keys = [load(my, k, key_place + key * p["kl"], True) for key in safe]
        values = [load(my, v, value_place + key * p["vl"], False) for key in safe]
        kept = [counts(key) for key in mine]  # what hides a key hides any NaN in its value
        values = [[lang.select(c, x, 0.0) for x in xs] for c, xs in zip(kept, values, strict=True)]
        multiply(my, query, keys)
        lang.barrier()
        with lang.if_(my.leads):
            scores = gather(my)
            seen = [visible(at + my.me // rows, scores, j) for j, at in enumerate(ahead)]
            soften(my, scores, seen)
        lang.barrier()
        accumulate(my, values)
    first = ((b * kv_heads + kv_head) * queries + block * rows) * p["splits"] + split
    left = queries - block * rows
    highest, whole = weigh(my)
    with lang.if_((my.me < rows) & (my.me < left)):
        at = (first + my.me * p["splits"]) * (dim + 2) + dim
        partial[at] = highest
        partial[at + 1] = whole
    for row in range(rows):
        if row:
            lang.barrier()
        add_up(my, row, partial, (first + row * p["splits"]) * (dim + 2), left > row)


def _part(split: Any, splits: Any, count: Any, teams: int) -> tuple[Any, Any]:
    """Where a part of `count` keys begins and ends: a key for each team, and again."""
    part = (count + (splits - 1)) // splits
    part = (part + (teams - 1)) // teams * teams
    begin = lang.minimum(split * part, count)
    return begin, lang.minimum(begin + part, count)


split: Kernel = Kernel(_split, workgroup=THREADS, name="attention_split")


def lower_split(inputs: tuple[Spec, ...], y: Spec, attrs: dict[str, Any], caps: Caps) -> Lowered:
    """Two launches: a group for each part of the keys of a head; one for each query.

    Raises:
        LimitError: for a head that has more elements than the threads of a group hold.
    """
    batch, lq, heads, dim = y.shape
    if not 0 < dim <= MOST_DIM:
        raise LimitError(f"attention: variant 'split' takes head_dim 1 to {MOST_DIM}, got {dim}")
    kv_heads, lk = inputs[1].shape[1:3]
    queries = heads // kv_heads * lq
    rows = rows_of_group(queries)
    groups = batch * kv_heads * -(-queries // rows)
    splits = split_count(groups, lk)
    partial = Spec((batch * heads * lq * splits * (dim + 2),), f32, (1,))
    place = len(inputs) + 1
    constants = (
        ("causal", attrs["causal"]),
        ("dim", dim),
        ("rows", rows),
        ("vector", all(s.aligned for s in inputs[:3])),
    )
    given = {"blocks": -(-queries // rows), "splits": splits, "dim": dim}
    scalars = tuple({**extents(inputs, attrs), **given, **out_steps(y)}.items())
    read = (*(Ref(i, flat(s)) for i, s in enumerate(inputs)), Ref(place, partial))
    form = face(dict.fromkeys(("q", "k", "v", *attrs["masks"]), 1), {"partial": 1})
    parts = Call(split, read, scalars, constants, groups * splits, face=form)
    written = (Ref(place, partial), Ref(len(inputs), y))
    whole = Call(combine, written, scalars, (), batch * heads * lq)
    return Lowered((parts, whole), (partial,))
