"""The second launch of the decoding variant: the parts of each query, weighed and added up.

A part is head_dim sums, the maximum of its scores, and the sum of its weights, all f32. They are
added in order, so equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.ops.attention.masks import LOWEST
from centella.ops.face import face
from centella.program import Kernel

MOST_SPLITS = 128
TOGETHER = 8  # parts loaded at once


def _combine(*, partial: Any, y: Any) -> None:
    """A group has one query; each of its threads weighs a part, then adds up words of the head."""
    p = {n: lang.parameter(n, u32) for n in (
        "heads", "share", "lq", "dim", "splits", "yb", "yl", "yh")}  # fmt: skip
    group, me, pitch = lang.group_id(), lang.local_id(), p["dim"] + 2
    head, group = group % p["heads"], group // p["heads"]
    i, b = group % p["lq"], group // p["lq"]
    kv_heads, kv_head = p["heads"] // p["share"], head // p["share"]
    row = (b * kv_heads + kv_head) * (p["share"] * p["lq"]) + i * p["share"] + head % p["share"]
    first = row * p["splits"] * pitch
    mine = first + lang.minimum(me, p["splits"] - 1) * pitch + p["dim"]
    top = lang.select(me < p["splits"], partial[mine], LOWEST)
    weight = lang.exp(top - lang.workgroup_reduce(top, "fmax"))
    weight = lang.select(me < p["splits"], weight, 0.0)
    weights = lang.shared(f32, MOST_SPLITS)
    weights[me] = weight
    total = lang.workgroup_reduce(weight * partial[mine + 1], "add")
    factor = lang.select(total > 0.0, 1.0 / total, 0.0)
    place, per = b * p["yb"] + i * p["yl"] + head * p["yh"], y.dtype.per_word
    for word in lang.range(me, (p["dim"] + (per - 1)) // per, MOST_SPLITS):
        sums = lang.vars(f32, per, init=0.0)
        spots = [first + lang.minimum(word * per + e, p["dim"] - 1) for e in range(per)]
        for split in lang.range(lang.const(0, u32), p["splits"], TOGETHER):
            for n in range(TOGETHER):
                at = lang.minimum(split + n, p["splits"] - 1) * pitch
                there = split + n < p["splits"]  # else nothing: a weight of 0 leaves no infinity
                for into, spot in zip(sums, spots, strict=True):
                    value = lang.select(there, partial[spot + at], 0.0)
                    into.set(lang.fma(weights[split + n], value, into))
        y.store(place + word * per, [value * factor for value in sums])


combine: Kernel = Kernel(
    _combine, workgroup=MOST_SPLITS, name="attention_combine", face=face({"partial": 1}, {"y": 1})
)
