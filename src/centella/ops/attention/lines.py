"""Where rows of keys and values begin: in a row of their sequence, or in blocks of a pool.

A table names the blocks of each sequence: key j is row j % 64 of block `blocks[b, j // 64]`. A
kernel takes keys of one block at a time, so it looks up once for a tile, and counts on from there
as if the whole sequence lay in a row. What a table may hold is not known when a plan is made: an
entry that is no block of the pool counts as the last one.
"""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import u32

BLOCK = 64  # keys


class Lines:
    """Keys and values of a head of sequence `b`: `places(key) + key * pitch` is where a row begins.

    Args:
        masks: "blocks" among them where there are blocks.
        head: of keys and values.
    """

    def __init__(self, masks: dict[str, Any], b: Any, head: Any) -> None:
        self._table = masks.get("blocks")
        self._b = b
        self._heads = [head * lang.parameter(f"{name}h", u32) for name in "kv"]
        if self._table is None:
            pairs = zip("kv", self._heads, strict=True)
            self._heads = [b * lang.parameter(f"{name}b", u32) + at for name, at in pairs]

    def last(self, key: Any, last: Any) -> Any:
        """The last key up to `last` that has its row where `places(key)` says."""
        return last if self._table is None else lang.minimum(last, key | (BLOCK - 1))

    def places(self, key: Any) -> list[Any]:
        """Where key 0 and its value would begin if all keys lay as those of this key's block do."""
        if self._table is None:
            return self._heads
        number = lang.minimum(key, lang.parameter("lk", u32) - 1) // BLOCK
        entry = self._table[self._b * lang.parameter("tb", u32) + number]
        entry = lang.minimum(lang.bitcast(entry, u32), lang.parameter("pool", u32) - 1)
        return [
            at + entry * lang.parameter(f"{name}t", u32)
            - number * BLOCK * lang.parameter(f"{name}l", u32)
            for name, at in zip("kv", self._heads, strict=True)
        ]  # fmt: skip
