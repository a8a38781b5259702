"""How the keys of a few queries are split, and where the parts leave what they computed.

How many parts there are follows from shapes; where each begins, from the lengths on the device. So
one plan serves every length: a part has `step` keys at least, and the groups of those that have
none leave at once.

Of each query and part there are `width` sums (the head, up to a chunk), after all of them the
maximum of its scores (of their base 2 logarithms) and the sum of its weights; f32. A second launch
adds them up (`combine.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.op.op import Form
from centella.ops.attention.lines import Lines
from centella.ops.attention.masks import Scoring, Sight, bounded
from centella.ops.attention.problem import (
    AttentionAttrs,
    extents,
    keys_seen,
    parameters,
)
from centella.ops.attention.table import MOST_ROWS
from centella.ops.attention.weights import LOG2E
from centella.ops.rows import power_above
from centella.specs import Spec

MOST_SPLITS = 128
ENOUGH_GROUPS = 512


class Known(Struct, frozen=True):
    """Numbers that a program is written for: a division by another one takes 25 instructions.

    Attributes:
        step: keys that every part has at most; 0: parts have several steps, or begin anywhere.
        heads, share, lq, blocks: as the launch parameters; 0: it is a parameter.
    """

    step: int = 0
    heads: int = 0
    share: int = 0
    lq: int = 0
    blocks: int = 0

    def among(self, names: str) -> dict[str, Any]:
        """Launch parameters by name; those that are known are constants."""
        return {
            name: lang.const(value, u32) if (value := getattr(self, name, 0)) else parameter
            for name, parameter in parameters(names).items()
        }


UNKNOWN = Known()


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
        cls, form: Form[AttentionAttrs], step: int, enough: int = ENOUGH_GROUPS,
        most: int = MOST_ROWS, splits: int = MOST_SPLITS,
    ) -> Parts:  # fmt: skip
        """Enough groups for a large GPU, none of a few keys; at most so many rows and splits."""
        batch, heads, lq, dim = form.inputs[0].shape
        (kv_heads, _), lk = extents(form), keys_seen(form, lq)
        queries = heads // kv_heads * lq
        rows = min(power_above(max(queries, 1)), most)  # few programs serve all
        groups = max(batch * kv_heads * -(-queries // rows), 1)
        splits = max(min(max(enough // groups, 1), -(-lk // step), splits), 1)
        return cls(batch, kv_heads, queries, rows, splits, step, -(-dim // 4) * 4)

    @property
    def blocks(self) -> int:
        """Blocks of queries."""
        return -(-self.queries // self.rows)

    @property
    def groups(self) -> int:
        """Groups of the first launch."""
        return self.batch * self.heads * self.blocks * self.splits

    def known(self, form: Form[AttentionAttrs], heads: bool = False) -> Known:
        """What kernels may divide by as constants; `heads`: those of the form, too."""
        windowed, (kv_heads, lk) = form.attrs.window is not None, extents(form)
        step = self.step if not windowed and self.splits * self.step >= lk else 0
        if not heads:
            return Known(step)
        _, all_heads, lq, _ = form.inputs[0].shape
        return Known(step, all_heads, all_heads // kv_heads, lq, self.blocks)

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


def part_of(sight: Sight, splits: Any, windowed: bool, known: Known) -> tuple[Any, Any, Any]:
    """Where the first part begins, a multiple of the step; keys of a part; parts that have any.

    Args:
        known: what the program is written for.
    """
    if known.step:
        parts = (sight.end + (known.step - 1)) // known.step
        return lang.const(0, u32), lang.const(known.step, u32), parts
    step, begin = lang.parameter("step", u32), sight.begin
    begin = begin // step * step if windowed else begin
    count = sight.end - begin
    part = lang.maximum(((count + (splits - 1)) // splits + (step - 1)) // step, 1) * step
    parts = (count + (part - 1)) // part
    # Never more than `splits`, which is not seen where keys begin late; loops' rounds are counted.
    return begin, part, lang.minimum(parts, splits) if windowed else parts


class Results:
    """Where a part of a query leaves its results: `query` counts all of them, heads outermost."""

    def __init__(self, query: Any, split: Any) -> None:
        at = query * lang.parameter("splits", u32) + split
        self.sums: Any = at * lang.parameter("width", u32)
        self.stats: Any = lang.parameter("stats", u32) + at * 2


class Work:
    """What a group of the first launch has: a part of the keys of a head, and `rows` queries.

    Attributes:
        b, kv_head: the sequence, and the head of its keys; split: which part of these.
        begin, end: its keys; nothing to do unless one is before the other.
        all_begin, all_end: where the keys of all parts begin and end.
        windowed: whether there is a window, without which they begin at 0.
        block: which block of the queries it has.
        counts: whether a key counts for any query.

    Args:
        rows: of the group; single: each head has one query, so that rows are heads.
        same: as of `Sight`; known: as of `part_of`.
    """

    split: Any
    block: Any
    kv_head: Any
    b: Any

    def __init__(
        self, masks: dict[str, Any], scoring: Scoring, rows: int, single: bool = False,
        same: Callable[[Any], Any] = lang.workgroup_uniform, known: Known = UNKNOWN,
    ) -> None:  # fmt: skip
        p = known.among("heads share lq lk blocks splits qb qh ql")
        group = lang.group_id()
        self.split, group = group % p["splits"], group // p["splits"]
        self.block, group = group % p["blocks"], group // p["blocks"]
        heads, self._queries = p["heads"] // p["share"], p["share"] * p["lq"]
        self.kv_head, self.b = group % heads, group // heads
        sight = Sight(masks, scoring, self.b, p["lq"], p["lk"], same)
        self._sight, self._scoring = sight, scoring
        first, part, _ = part_of(self._sight, p["splits"], scoring.windowed, known)
        self.begin: Any = lang.minimum(first + self.split * part, self._sight.end)
        self.end: Any = lang.minimum(self.begin + part, self._sight.end)
        self.all_begin: Any = self._sight.begin
        self.all_end: Any = self._sight.end
        self.windowed: bool = scoring.windowed
        self.lines: Lines = Lines(masks, self.b, self.kv_head)
        self._first = self.block * rows
        self._all = (self.b * heads + self.kv_head) * self._queries
        self._p = p
        self._single = single

    def counts(self, key: Any, end: Any = None) -> Any:
        """Whether a key counts for any query, of those before `end`; None: of the part."""
        return self._sight.counts(key, self.end if end is None else end)

    def head_and_query(self, row: Any) -> tuple[Any, Any]:
        """Head and position of a row; those past the last are the last again."""
        at = lang.minimum(self._first + row, self._queries - 1)
        if self._single:
            return self.kv_head * self._p["share"] + at, lang.const(0, u32)
        return self.kv_head * self._p["share"] + at % self._p["share"], at // self._p["share"]

    def query(self, row: Any) -> Any:
        """Where a row of q begins."""
        p, (head, i) = self._p, self.head_and_query(row)
        return self.b * p["qb"] + head * p["qh"] + i * p["ql"]

    def has(self, row: Any) -> Any:
        """Whether there is such a row."""
        return row < self._queries - self._first

    def results(self, row: Any) -> Results:
        """Where a row's part of the results goes."""
        return Results(self._all + self._first + row, self.split)

    def result(self, row: Any) -> Any:
        """Where a row of y begins."""
        p, (head, i) = parameters("yb yh yl"), self.head_and_query(row)
        return self.b * p["yb"] + head * p["yh"] + i * p["yl"]

    def seen(self, row: Any, key: Any, counted: Any, score: Any) -> tuple[Any, Any]:
        """The score of a row and a key, capped, with the mask; whether the row sees the key.

        Args:
            counted: whether the key counts for any.
            score: the product times its factor, as a logarithm to base 2.
        """
        head, i = self.head_and_query(row)
        score = bounded(score, self._scoring, LOG2E)
        return self._sight.seen(score, counted, head, i, key, LOG2E)
