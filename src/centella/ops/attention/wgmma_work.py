"""What a group of attention by warpgroups does in turn: tiles of queries, each with its keys."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import u32
from centella.ops.attention.group_queries import GroupQueries, Same, in_turn, longest_first
from centella.ops.attention.masks import Scoring, Sight
from centella.ops.attention.problem import parameters
from centella.ops.attention.wgmma_tile import WgmmaTile
from centella.ops.hopper import MULTIPROCESSORS

CROSSING = 1.5  # going on to the next tile of queries takes as long as so many tiles of keys
TRIED = 32  # numbers of heads that `heads_together` compares at most
COUNTED = 1 << 17  # tiles of queries up to which it does: among more a section counts little


@lru_cache(maxsize=256)
def heads_together(
    pairs: int, blocks: int, most: int, *, past: int = 0, reach: float = math.inf
) -> int:
    """How many heads `longest_first` takes at a time so that the busiest group has least to do.

    Args:
        pairs: heads of all sequences; blocks: tiles of queries of each.
        most: heads that may be taken at a time.
        past, reach: keys before the first query, and those that a query sees at most, by as many
            as a tile has queries.
    """
    if pairs * blocks > COUNTED:
        return most
    number = np.arange(pairs * blocks)
    busiest = {}
    for together in range(most, max(most - TRIED, 0), -1):
        section, rest = np.divmod(number, together * blocks)
        rank = rest // np.minimum(together, pairs - section * together)
        steps = np.minimum(past + blocks - rank, reach) + CROSSING
        rounds = np.resize(steps, (-(-len(steps) // MULTIPROCESSORS), MULTIPROCESSORS))
        rounds.reshape(-1)[len(steps) :] = 0
        rounds[1::2] = rounds[1::2, ::-1]
        busiest[together] = rounds.sum(axis=0).max()
    return min(busiest, key=busiest.__getitem__)


class Turns:
    """The numbers of the tiles that a group takes; its `count` is the same in all its threads.

    Groups take every so manieth. Where tiles differ by what their queries see, the longest come
    first and every other round goes backwards, so that all groups end at about the same time.
    """

    def __init__(self, masks: dict[str, Any], scoring: Scoring) -> None:
        self.longest: bool = (scoring.causal or "starts" in masks) and "offsets" not in masks
        self._groups, self._mine = lang.ptx.grid(), lang.group_id()
        rounds = lang.num_groups() // self._groups
        left = lang.num_groups() - rounds * self._groups
        self.count: Any = rounds + lang.cast(self._within(rounds) < left, u32)

    def _within(self, turn: Any) -> Any:
        """Which tile of a round."""
        if not self.longest:
            return self._mine
        return lang.select(turn % 2 == 1, self._groups - 1 - self._mine, self._mine)

    def block(self, turn: Any) -> tuple[Any, Any]:
        """The block of queries, and the pair of sequence and head; behind the last, the last's."""
        turn = lang.minimum(turn, self.count - 1)
        number = turn * self._groups + self._within(turn)
        return longest_first(number) if self.longest else in_turn(number)


class Work:
    """One tile of queries: where it is, what it sees, its tiles of keys from `base` on.

    Attributes:
        first: the first query.
        seen: where the keys end that any of its queries sees.
        last: the last tile of keys, which is taken first.
    """

    def __init__(
        self, masks: dict[str, Any], scoring: Scoring, tile: WgmmaTile, block: tuple[Any, Any],
        same: Same,
    ) -> None:  # fmt: skip
        self.tile: WgmmaTile = tile
        self.windowed: bool = scoring.windowed
        self.at: GroupQueries = GroupQueries(masks, block, tile.queries, same)
        self.sight: Sight = Sight(masks, scoring, self.at.b, self.at.lq, self.at.lk, same)
        self.first: Any = self.at.block * tile.queries
        self.seen: Any = self.sight.until(self.first + tile.queries)
        end = lang.maximum(self.seen, 1) - 1
        self.base: Any = lang.const(0, u32)
        if scoring.windowed:
            self.base = lang.minimum(self.sight.since(self.first), end)
        self.last: Any = (end - self.base) // tile.keys
        self.head: Any = self.at.head
        self.kv_head: Any = self.head // lang.parameter("share", u32)

    def key(self, tile: Any) -> Any:
        """The first key of a tile."""
        return self.base + tile * self.tile.keys

    @property
    def partly(self) -> Any:
        """Whether the last tile has keys past those that count for any query."""
        return self.seen < self.key(self.last + 1)

    def dirty(self, masks: dict[str, Any]) -> Any:
        """Whether it has rows of values there, which may be anything; None: it never has."""
        if self.at.begin is not None:  # behind the text there is another
            return self.partly
        if "lengths" in masks or "starts" in masks:
            return self.seen < lang.minimum(lang.parameter("lk", u32), self.key(self.last + 1))
        return None

    def whole(self, first: Any, queries: int) -> tuple[Any, Any]:
        """Of these queries: below which tile, down to which one, they see all keys of tiles.

        None for the first: of all but the last tile; for the second: from tile 0 on.
        """
        sight, tile = self.sight, self.tile
        if not sight.ordered:
            return None, None
        most = lang.minimum(self.last, self._ahead(sight.until(first + 1)) // tile.keys)
        if not self.windowed:
            return most, None
        hidden = self._ahead(sight.since(first + (queries - 1)))
        return most, lang.minimum((hidden + (tile.keys - 1)) // tile.keys, most)

    def _ahead(self, key: Any) -> Any:
        """How many keys of tiles are before one."""
        return lang.maximum(key, self.base) - self.base if self.windowed else key

    def queries_at(self) -> tuple[Any, Any, Any]:
        """Coordinates of its queries for a tensor map."""
        row = self.at.row(lang.const(0, u32), 1)
        return row + self.first, self.head, self.at.b

    def keys_at(self, tile: Any) -> tuple[Any, Any, Any]:
        """Coordinates of a tile of keys, or of values."""
        row = self.at.row(lang.const(0, u32), 1)
        return row + self.key(tile), self.kv_head, self.at.b

    def scale_slab(self, slabs: int) -> Any:
        """The first of the scales of its values (`scaled.py`), of so many a head."""
        p = parameters("kv_heads")
        return (self.at.b * p["kv_heads"] + self.kv_head) * slabs
