"""Where rows of keys and values begin, in a row of their sequence or in blocks; how they are read.

A table names the blocks of each sequence: key j is row j % 64 of block `blocks[b, j // 64]`. A
kernel takes keys of one block at a time, so it looks up once for a tile, and counts on from there
as if the whole sequence lay in a row. What a table may hold is not known when a plan is made: an
entry that is no block of the pool counts as the last one.

Rows of i8 have a scale each, which lies in a plane of its own as the rows do (`rows_i8`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella import lang
from centella.dtypes import i8, u32
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.ops.attention.group_queries import GroupQueries
from centella.ops.quant.numbers import number

BLOCK = 64  # keys


def piece_of(source: Argument, vector: bool) -> int:
    """Elements of a row that a load of keys or values has: a chunk, a word of i8, or one."""
    if not vector:
        return 1
    return int(source.dtype.per_word if source.dtype is i8 else source.dtype.per_chunk)


def load_piece(source: Any, start: Any, width: int, scale: Any = None) -> list[Operand]:
    """`width` elements of a row as f32, from a multiple of the width on.

    Args:
        scale: of a row of i8.
    """
    per = source.dtype.per_word
    if width == 1:
        values = [source[start]]
    elif width == source.dtype.per_chunk:
        values = source.load(start)
    else:
        values = [v for j in range(0, width, per) for v in source.load_word(start + j)]
    return values if scale is None else [number(value) * scale for value in values]


class Lines:
    """Keys and values of a head of sequence `b`: `places(key) + key * pitch` is where a row begins.

    Args:
        masks: "blocks" among them where there are blocks.
        head: of keys and values.
        group: its queries, if its sequence may be one of many texts end to end.
    """

    def __init__(
        self, masks: dict[str, Any], b: Operand, head: Operand, group: GroupQueries | None = None
    ) -> None:
        self._table: Any = masks.get("blocks")
        self._scales: Any = masks.get("scales")
        self._b, self._head = b, head
        self._heads = [head * lang.parameter(f"{name}h", u32) for name in "kv"]
        if self._table is None:
            pairs = zip("kv", self._heads, strict=True)
            self._heads = [b * lang.parameter(f"{name}b", u32) + at for name, at in pairs]
            if group is not None:
                pairs = zip("kv", self._heads, strict=True)
                self._heads = [group.row(at, lang.parameter(f"{n}l", u32)) for n, at in pairs]

    def last(self, key: Operand, last: Operand) -> Any:
        """The last key up to `last` that has its row where `places(key)` says."""
        return last if self._table is None else lang.minimum(last, key | (BLOCK - 1))

    def places(self, key: Any) -> list[Expr]:
        """Where key 0 and its value would begin if all keys lay as those of this key's block do."""
        if self._table is None:
            return self._heads
        which, entry = self.block(key)
        return [
            at + entry * lang.parameter(f"{name}t", u32)
            - which * BLOCK * lang.parameter(f"{name}l", u32)
            for name, at in zip("kv", self._heads, strict=True)
        ]  # fmt: skip

    def block(self, key: Operand) -> tuple[Expr, Expr]:
        """Which block of its sequence a key is in, and which of the pool that is."""
        which = lang.minimum(key, lang.parameter("lk", u32) - 1) // BLOCK
        entry = self._table[self._b * lang.parameter("tb", u32) + which]
        return which, lang.minimum(lang.bitcast(entry, u32), lang.parameter("pool", u32) - 1)

    def scales(self, first: Any) -> list[Callable[[Any], Any]]:
        """What gives the scale of a key, and of a value, in the block of key `first`; else None."""
        scales = self._scales
        if scales is None:
            return [lambda _: None] * 2
        pitch, start = lang.parameter("sl", u32), self._head * lang.parameter("sh", u32)
        if self._table is None:
            start = start + self._b * lang.parameter("sb", u32)
        else:
            which, entry = self.block(first)
            start = start + entry * lang.parameter("st", u32) - which * BLOCK * pitch
        values = start + lang.parameter("se", u32)
        return [lambda key, at=at: scales[at + key * pitch] for at in (start, values)]
