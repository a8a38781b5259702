"""Tiles of attention by warpgroups: their sizes, what a group has room for."""

from __future__ import annotations

from msgspec import Struct

from centella.ops.attention.rows import M
from centella.ops.hopper import PANEL

WARPGROUP = 128  # threads
SLOTS = 2  # tiles of queries: of the present one and of the next
REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}  # by consumers; two but in tests


class WgmmaTile(Struct, frozen=True):
    """Keys of a tile, consumers of 64 queries each, stages of the rings.

    `parts`: 16-bit numbers that a weight is the sum of.

    The assembler moves the powers of two behind the wait for products, beside which they should be,
    unless something between needs them or cannot be passed. `late`: a consumer waits for its turn
    there. `kept`: it gives the keys' stage back there, which has a number that needs their sum.
    """

    keys: int
    consumers: int = 2
    stages: int = 2
    parts: int = 1
    late: bool = False
    kept: bool = False

    @property
    def queries(self) -> int:
        """Queries of a group at a time."""
        return self.consumers * M

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return (1 + self.consumers) * WARPGROUP

    def width(self, dim: int) -> int:
        """Elements of a row in shared memory: whole panels."""
        return -(-dim // PANEL) * PANEL

    def shared_bytes(self, dim: int) -> int:
        """Workgroup memory: queries, results, keys and values in every stage, barriers."""
        rows = (SLOTS + 1) * self.queries + 2 * self.stages * self.keys
        return 2 * self.width(dim) * rows + 8 * (4 * self.stages + 2 * SLOTS + 4) + 64
