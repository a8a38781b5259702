"""Tiles of the register-tiled kernel (`tiled.py`): their sizes, and where things lie."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from centella.specs import Caps


class Tile(Struct, frozen=True):
    """Sizes of a group's step: `bq` queries by `bk` keys, of which a thread has `tq` by `tk`.

    Elements of the head, then keys, come in slabs of `depth`. A thread has `tq` by `td` of the
    result, in fours `4 * across` apart. With `unroll` 2 a turn of a loop has two slabs, so that the
    place of each in shared memory is a constant.
    """

    bq: int
    bk: int
    depth: int
    tq: int
    tk: int
    unroll: int = 1
    td: int = 4

    def of(self, dim: int) -> Tile:
        """The tile for a head of `dim` elements: fours enough for all."""
        return replace(self, td=4 * -(-dim // (4 * self.across)))

    @property
    def across(self) -> int:
        """Threads side by side: along keys, later along elements of the head."""
        return self.bk // self.tk

    @property
    def threads(self) -> int:
        """Threads of a group; at least one for each query."""
        return self.bq // self.tq * self.across

    @property
    def columns(self) -> int:
        """Elements of the head that a group has room for."""
        return self.across * self.td

    @property
    def pad(self) -> int:
        """Words after four rows of a slab, so that what a warp turns falls on all banks."""
        return 128 // self.depth

    def turned(self, rows: int) -> int:
        """Words of a slab that lies with the elements of the head outermost."""
        return self.depth * rows + self.depth // 4 * self.pad

    @property
    def slab(self) -> int:
        """Words of a stage: slabs of queries and keys, later one of values."""
        return max(self.turned(self.bq) + self.turned(self.bk), self.depth * self.columns)

    @property
    def pitch(self) -> int:
        """Words from one key's weights to the next's."""
        return self.bq + 4

    @property
    def shared_bytes(self) -> int:
        """Workgroup memory: two stages, the weights, and two numbers a query."""
        return 4 * (2 * self.slab + self.bk * self.pitch + 2 * self.bq)

    def fits(self, caps: Caps) -> bool:
        """Whether a device has the threads and the memory."""
        return self.shared_bytes <= caps.max_shared and self.threads <= caps.max_workgroup
