"""Which queries a group has: of a sequence of a batch, or of one of many texts that lie end to end.

`offsets` says where each text begins. A group has a slot, which is a tile of `queries` of a text:
those of text i begin at slot offsets[i] // queries + i. They are at least as many as its tiles, and
no two texts share one, so tokens / queries + texts slots are enough for any lengths. A group finds
its text by bisection. If its slot has no tile, the text has neither queries nor keys for it. What
lies behind the last text is one more, without keys, so its rows get zeros.

A text's tiles begin where the text does, so its result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella import lang
from centella.dtypes import u32
from centella.ops.attention.problem import parameters

Same = Callable[[Any], Any]


def in_turn(number: Any) -> tuple[Any, Any]:
    """A block of queries, and which head of which sequence: the blocks of a head in turn."""
    blocks = lang.parameter("blocks", u32)
    pair = number // blocks
    return number - pair * blocks, pair


def longest_first(number: Any) -> tuple[Any, Any]:
    """The same, for queries that see more keys the later they stand: the last blocks first.

    So many heads at a time as `together` says: their keys and values are to stay in the L2 cache.
    """
    p = parameters("blocks together pairs")
    each = p["together"] * p["blocks"]
    section = number // each
    rest, first = number - section * each, section * p["together"]
    size = lang.minimum(p["together"], p["pairs"] - first)
    rank = rest // size
    return p["blocks"] - 1 - rank, first + (rest - rank * size)


class GroupQueries:
    """The queries of a head that a group of a kernel has, so many at a time.

    Args:
        group: its block, and its pair of sequence and head; queries: of a block.
        same: makes uniform what all threads that ask have in common.

    Attributes:
        b, head, block: the sequence, the head, which queries of the sequence.
        lq, lk: queries and keys of the sequence or text.
        begin: of texts end to end, the row where this one begins; else None.
    """

    def __init__(
        self, masks: dict[str, Any], group: tuple[Any, Any], queries: int,
        same: Same = lang.workgroup_uniform,
    ) -> None:  # fmt: skip
        p = parameters("heads lq lk")
        self._same = same
        block, pair = group
        self.block: Any = block
        self.b: Any = pair // p["heads"]
        self.head: Any = pair - self.b * p["heads"]
        self.lq: Any = p["lq"]
        self.lk: Any = p["lk"]
        self.begin: Any = None
        if "offsets" in masks:
            self._find(masks["offsets"], queries)

    def _find(self, offsets: Any, queries: int) -> None:
        p = parameters("texts rounds")

        def offset(text: Any) -> Any:
            at = lang.maximum(offsets[lang.minimum(text, p["texts"])], 0)
            inside = lang.minimum(lang.bitcast(at, u32), self.lk)
            inside = lang.select(text == 0, 0, inside)  # every row is of some text
            return lang.select(text > p["texts"], self.lk, inside)

        low, high = lang.var(lang.const(0, u32)), lang.var(p["texts"] + 1)
        for _ in lang.range(p["rounds"]):
            middle = (low + high) // 2
            before = offset(middle) // queries + middle <= self.block
            low.set(lang.select(before, middle, low))
            high.set(lang.select(before, high, middle))
        text = self._same(low.get())
        begin = self._same(offset(text))
        count = lang.maximum(self._same(offset(text + 1)), begin) - begin
        self.block = self.block - (begin // queries + text)
        some = self.block * queries < count
        self.lq = lang.select(some, count, 0)
        self.lk = lang.select(text < p["texts"], self.lq, 0)
        self.begin = lang.select(some, begin, 0)

    def last(self, count: Any) -> Any:
        """The last of so many rows; row 0 of a text that has none."""
        return (count if self.begin is None else lang.maximum(count, 1)) - 1

    def row(self, start: Any, pitch: Any) -> Any:
        """Where rows of the sequence or text begin, of a tensor whose rows begin at `start`."""
        return start if self.begin is None else start + self.begin * pitch
