"""How the keys of a few queries are split, and where the parts leave what they computed.

How many parts there are follows from shapes; where each begins, from the lengths on the device. So
one plan serves every length: a part has `step` keys at least, and the groups of those that have
none leave at once.

Of each query and part there are `width` sums (the head, up to a chunk), after all of them the
maximum of its scores (of their base 2 logarithms) and the sum of its weights; f32.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Constants, Kernel, Ref
from centella.op.form import Form
from centella.ops.attention.masks import added, counting, reach, sees, shows
from centella.ops.attention.problem import AttentionAttrs, launch, operands
from centella.ops.rows import power_above
from centella.specs import Spec

MOST_SPLITS = 128
MOST_ROWS = 8
ENOUGH_GROUPS = 512


class Parts(Struct, frozen=True):
    """Of `queries` that share their keys, `rows` at a time, in so many blocks; keys in `splits`."""

    batch: int
    heads: int  # of keys and values
    queries: int
    rows: int
    splits: int
    step: int
    width: int

    @classmethod
    def of(
        cls, q: Spec, k: Spec, step: int, enough: int = ENOUGH_GROUPS, most: int = MOST_ROWS
    ) -> Parts:
        """Enough groups for a large GPU, none of a few keys; at most so many rows."""
        batch, heads, lq, dim = q.shape
        kv_heads, lk = k.shape[1:3]
        queries = heads // kv_heads * lq
        rows = min(power_above(max(queries, 1)), most)  # few programs serve all
        groups = max(batch * kv_heads * -(-queries // rows), 1)
        splits = max(min(max(enough // groups, 1), -(-lk // step), MOST_SPLITS), 1)
        return cls(batch, kv_heads, queries, rows, splits, step, -(-dim // 4) * 4)

    @property
    def blocks(self) -> int:
        """Blocks of queries."""
        return -(-self.queries // self.rows)

    @property
    def groups(self) -> int:
        """Groups of the first launch."""
        return self.batch * self.heads * self.blocks * self.splits

    @property
    def all_queries(self) -> int:
        """Queries of every sequence and head."""
        return self.batch * self.heads * self.queries

    @property
    def spec(self) -> Spec:
        """The memory between the launches."""
        return Spec((self.all_queries * self.splits * (self.width + 2),), f32, (1,))

    @property
    def scalars(self) -> dict[str, int | float]:
        """What both launches are told."""
        stats = self.all_queries * self.splits * self.width
        return {"blocks": self.blocks, "splits": self.splits, "step": self.step,
                "width": self.width, "stats": stats}  # fmt: skip


def part_of(count: Any, splits: Any) -> tuple[Any, Any]:
    """Keys of a part, where `count` of them are there, and the parts that have any."""
    step = lang.parameter("step", u32)
    part = lang.maximum(((count + (splits - 1)) // splits + (step - 1)) // step, 1) * step
    return part, (count + (part - 1)) // part


class Place:
    """Where a part of a query leaves its results: `query` counts all of them, heads outermost."""

    def __init__(self, query: Any, split: Any) -> None:
        at = query * lang.parameter("splits", u32) + split
        self.sums: Any = at * lang.parameter("width", u32)
        self.stats: Any = lang.parameter("stats", u32) + at * 2


class Work:
    """What a group of the first launch has: a part of the keys of a head, and `rows` queries.

    Attributes:
        begin, end: its keys; nothing to do unless one is before the other.
        counts: whether a key counts for any query.
    """

    def __init__(self, masks: dict[str, Any], causal: bool, rows: int) -> None:
        p = {n: lang.parameter(n, u32) for n in (
            "heads", "share", "lq", "lk", "blocks", "splits", "qb", "qh", "ql", "kb", "kh", "vb",
            "vh")}  # fmt: skip
        group = lang.group_id()
        self.split: Any
        self.kv_head: Any
        self.b: Any
        self.queries: Any
        self.start: Any
        self.split, group = group % p["splits"], group // p["splits"]
        block, group = group % p["blocks"], group // p["blocks"]
        heads, self.queries = p["heads"] // p["share"], p["share"] * p["lq"]
        self.kv_head, self.b = group % heads, group // heads
        count, self.start = reach(masks, causal, self.b, p["lq"], p["lk"])
        part, _ = part_of(count, p["splits"])
        self.begin: Any = lang.minimum(self.split * part, count)
        self.end: Any = lang.minimum(self.begin + part, count)
        self.counts: Any = counting(masks, self.b, self.end)
        self.keys: Any = self.b * p["kb"] + self.kv_head * p["kh"]
        self.values: Any = self.b * p["vb"] + self.kv_head * p["vh"]
        self._first = block * rows
        self._all = (self.b * heads + self.kv_head) * self.queries
        self._p, self._masks = p, masks

    def place(self, row: Any) -> tuple[Any, Any]:
        """Head and position of a row; those past the last are the last again."""
        at = lang.minimum(self._first + row, self.queries - 1)
        return self.kv_head * self._p["share"] + at % self._p["share"], at // self._p["share"]

    def query(self, row: Any) -> Any:
        """Where a row of q begins."""
        p, (head, i) = self._p, self.place(row)
        return self.b * p["qb"] + head * p["qh"] + i * p["ql"]

    def has(self, row: Any) -> Any:
        """Whether there is such a row."""
        return row < self.queries - self._first

    def results(self, row: Any) -> Place:
        """Where a row's results go."""
        return Place(self._all + self._first + row, self.split)

    def seen(self, row: Any, key: Any, counted: Any, score: Any) -> tuple[Any, Any]:
        """The score of a row and a key with the additive mask, and whether the row sees the key.

        Args:
            counted: whether the key counts for any.
        """
        if self.start is None and "mask" not in self._masks:
            return score, counted
        head, i = self.place(row)
        if self.start is not None:
            counted = counted & sees(self.start, i, key)
        if "mask" in self._masks:
            inside = lang.minimum(key, self._p["lk"] - 1)
            value = added(self._masks, self.b, head, i, inside)
            score = lang.fma(value, math.log2(math.e), score)
            counted = counted & shows(value)
        return score, counted


def first_call(
    kernel: Kernel, parts: Parts, form: Form[AttentionAttrs], constants: Constants,
    threads: int | None = None,
) -> Call:  # fmt: skip
    """The launch that computes the parts: a group for each.

    What it writes counts as changed in place: of parts without keys nobody writes anything.
    """
    return launch(
        kernel, form, parts.groups,
        (("causal", form.attrs.causal), ("dim", form.inputs[0].shape[3]), ("rows", parts.rows),
         *constants),
        operands(form), {}, changes={"partial": Ref(len(form.inputs) + 1, parts.spec)},
        scalars=parts.scalars, threads=threads,
    )  # fmt: skip
