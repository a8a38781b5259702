"""Who has what in the launch that attends to the parts of a head's keys (`rope_split.py`).

A team of LANES threads has a key at a time; of values a thread has a chunk of the head, and every
so many rows.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32
from centella.specs import Caps

THREADS = 256
WIDTH = f32.per_chunk
LANES = 8  # threads that share a key, at most
MOST_KEYS = 64  # of a tile
MOST_CHUNKS = 16  # of keys that a thread loads at once, and of values
MOST_PRODUCTS = 2048  # words of workgroup memory
MOST_DIM = 256


def rows_for(dim: int) -> int:
    """Queries whose sums of two teams fit in workgroup memory, a power of two."""
    return max(1 << (MOST_PRODUCTS // (2 * dim)).bit_length() - 1, 1)


class Tile(Struct, frozen=True):
    """Who has what of heads of `dim` elements, for `rows` queries, among so many threads."""

    dim: int
    rows: int
    threads: int = THREADS

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.dim // WIDTH

    @property
    def lanes(self) -> int:
        """Threads that share a key: a power of two that divides its chunks."""
        return min(LANES, self.chunks & -self.chunks)

    @property
    def slots(self) -> int:
        """Teams of those threads, a power of two; those left over repeat the last one's loads."""
        most = MOST_CHUNKS << (self.teams.bit_length() - 1)  # keys whose values are loaded at once
        return min(self.threads // self.lanes, MOST_KEYS, most)

    @property
    def keys(self) -> int:
        """Keys of a tile, the same number for each team."""
        held = self.slots * MOST_CHUNKS * self.lanes // self.chunks
        most = min(
            MOST_KEYS, held, self.teams * MOST_CHUNKS, MOST_PRODUCTS // (self.rows * self.lanes)
        )
        return max(most // self.slots, 1) * self.slots

    @property
    def teams(self) -> int:
        """Rows of values that the group reads side by side."""
        return min(self.threads // self.chunks, max(MOST_PRODUCTS // (self.rows * self.dim), 1))

    @property
    def scratch(self) -> int:
        """Words for the products of a tile and of the step's key, later for sums of values."""
        return max(self.rows * (self.keys + 1) * self.lanes, self.teams * self.rows * self.dim)

    @property
    def words(self) -> int:
        """Words of workgroup memory."""
        own = (self.rows + 2) * self.dim + (self.rows + 1) * self.chunks
        return self.scratch + 2 * self.rows * self.keys + own + (2 + self.teams) * self.rows + 1

    def fits(self, caps: Caps) -> bool:
        """Whether registers and workgroup memory suffice."""
        of_keys = self.keys // self.slots * (self.chunks // self.lanes)
        of_values = -(-self.keys // self.teams)
        # A chunk of a key counts twice: one of a query, which it meets, is in registers, too.
        few = 2 * of_keys + of_values <= 3 * MOST_CHUNKS
        return few and 4 * self.words <= caps.max_shared


def slot_of(tile: Tile) -> Any:
    """Which key a thread has of those side by side."""
    return lang.minimum(lang.local_id() // tile.lanes, tile.slots - 1)


def team_of(tile: Tile) -> Any:
    """Which row of values a thread has of those side by side; those left over have the last."""
    return lang.minimum(lang.local_id() // tile.chunks, tile.teams - 1)
