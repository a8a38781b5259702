"""Tiles of the product by warpgroups, what they take, and which suit a product."""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from centella.dtypes import DType
from centella.ops.hopper import MULTIPROCESSORS
from centella.ops.matmul.mma import takes
from centella.ops.matmul.problem import Problem
from centella.ops.matmul.results import M
from centella.specs import Caps

WARPGROUP = 128  # threads


class WgmmaTile(Struct, frozen=True):
    """Tile sizes of a group: C is bm x bn, of depth bk a stage; stages of the ring.

    Attributes:
        turns: two consumers take tiles in turn, so that one multiplies while the other finishes;
            else each takes 64 rows of every tile, as where no group has a second one.
        staged: columns that lie in shared memory before they are stored, a multiple of 16; 0: none.
        gated: half of the bn columns are gates of the others; `staged` are of the results.
        last: columns of the tiles of C's last columns, fewer than bn; 0: all have bn.
        whole: all columns of a tile that is taken in turn lie there, and a residual before.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    turns: bool = False
    staged: int = 0
    gated: bool = False
    last: int = 0
    whole: bool = False

    @property
    def widths(self) -> tuple[WgmmaTile, ...]:
        """The tile of the first columns, and that of the last ones where it is another."""
        return (self, replace(self, bn=self.last, last=0)) if self.last else (self,)

    @property
    def across(self) -> int:
        """Columns of results."""
        return self.bn // 2 if self.gated else self.bn

    @property
    def places(self) -> int:
        """Parts of a consumer's results that lie in shared memory at once."""
        return self.across // self.staged if self.whole else 1

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return 2 if self.turns else self.bm // M

    @property
    def rows(self) -> int:
        """Rows of a tile that one consumer has."""
        return self.bm if self.turns else M

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return (1 + self.consumers) * WARPGROUP

    def takes(self, a_along_k: bool, b_along_k: bool) -> bool:
        """Whether operands may lie so: across k, rows of the ring are whole panels."""
        whole = self.bn % M == 0 and not self.last
        return (a_along_k or self.bm % M == 0) and (b_along_k or whole)

    @property
    def stage_bytes(self) -> int:
        """Bytes of both operands in one stage."""
        return 2 * self.bk * (self.bm + self.bn)

    @property
    def staging(self) -> tuple[int, int, int]:
        """Results in shared memory: parts of all consumers, rows, columns."""
        return self.consumers * self.places, self.rows, self.staged

    @property
    def shared_bytes(self) -> int:
        """Workgroup memory: the ring, its barriers, what is to be stored; but for `ALIGNED`."""
        staged = 2 * math.prod(self.staging)
        return self.stages * (self.stage_bytes + 16) + 16 + staged


# What a wide tile takes, as the width of a tile of 128 columns that would take as long: measured on
# an H200 (`benchmarks/tensor_cores.py`). The first of the cheapest is chosen.
WGMMA_TILES = {
    WgmmaTile(128, 128, 64, 5, turns=True, staged=128, whole=True): 129,
    WgmmaTile(128, 128, 64, 6, turns=True, staged=32): 126,
    WgmmaTile(128, 96, 64, 7, turns=True, staged=32): 98,
    WgmmaTile(128, 160, 64, 5, turns=True, staged=32): 154,
    WgmmaTile(128, 160, 64, 4, turns=True, staged=32, whole=True): 157,
    WgmmaTile(128, 64, 64, 7, turns=True, staged=64): 80,
    WgmmaTile(128, 80, 64, 8, turns=True, staged=16): 86,
    WgmmaTile(128, 128, 64, 6, turns=True, staged=32, last=96): 127,
}
GATED_TILES = {
    WgmmaTile(128, 128, 64, 5, turns=True, staged=64, gated=True): 128,
    WgmmaTile(128, 96, 64, 7, turns=True, staged=16, gated=True): 98,
    WgmmaTile(128, 160, 64, 5, turns=True, staged=16, gated=True): 161,
    WgmmaTile(128, 64, 64, 7, turns=True, staged=32, gated=True): 80,
    WgmmaTile(128, 160, 64, 5, turns=True, staged=16, gated=True, last=128): 162,
}
LAST_COSTS = {96: 106, 128: 128}  # of a narrower one
ALIGNED = 1024  # bytes that places in shared memory begin at: barriers lie between two of them
SHALLOW, PARTS = 512, 1.08  # depth to which results in parts cost more: so many times as much
# Steps of products that the end of a tile with a residual takes: loaded then, or brought before.
LOADED, BROUGHT = 52, 14


def wgmma_tile_of(
    problem: Problem, dtypes: tuple[DType, DType], caps: Caps, gated: bool = False,
    residual: bool = False,
) -> WgmmaTile | None:  # fmt: skip
    """The tile of a product by warpgroups, by what all take on the busiest multiprocessor.

    The simulator has them too.
    """
    if not takes(dtypes) or not caps.warpgroups:
        return None
    fitting = [
        tile for tile in (GATED_TILES if gated else WGMMA_TILES)
        if tile.shared_bytes + ALIGNED <= caps.max_shared and tile.threads <= caps.max_workgroup
        and tile.takes(problem.a_along_k, problem.b_along_k)
        and not (tile.last and problem.batch > 1)
    ]  # fmt: skip

    def cost(tile: WgmmaTile) -> float:
        return widths_of(tile, problem)[0] * (_slower(tile, problem) if residual else 1.0)

    tile = min(fitting, key=cost, default=None)
    return replace(tile, turns=False) if tile and _alone(tile, problem) else tile


def _slower(tile: WgmmaTile, problem: Problem) -> float:
    """How much longer tiles take that a residual is added to: one consumer ends, one multiplies."""
    steps = max(-(-problem.k // tile.bk), 1)
    end = 0 if _alone(tile, problem) else BROUGHT if tile.whole else LOADED
    return max(1.0, (1 + end / steps) / 2)


def _alone(tile: WgmmaTile, problem: Problem) -> bool:
    """Whether no group has a second tile, whose products would hide how the first one ends."""
    tiles = -(-problem.m // tile.bm) * -(-problem.n // tile.across) * problem.batch
    return not (tile.last or tile.gated) and tiles <= MULTIPROCESSORS


def widths_of(tile: WgmmaTile, problem: Problem) -> tuple[float, int, int]:
    """What all tiles take on the busiest multiprocessor, and across C how many wide and narrower.

    What they take is measured for tiles of the tables, else as for their columns.
    """
    down = -(-problem.m // tile.bm) * problem.batch
    cost: float = (GATED_TILES if tile.gated else WGMMA_TILES).get(tile, tile.bn)
    if problem.k <= SHALLOW and tile.staged < tile.across:
        cost *= PARTS
    if not tile.last:
        across = -(-problem.n // tile.across)
        return _longest(down * across, 0, cost, 0), across, 0
    narrower = tile.widths[1].across
    least = LAST_COSTS.get(tile.last, tile.last)

    def parted(wide: int) -> tuple[float, int, int]:
        rest = -(-(problem.n - wide * tile.across) // narrower)
        return _longest(down * wide, down * rest, cost, least), wide, rest

    return min(parted(wide) for wide in range(problem.n // tile.across + 1))


def _longest(wide: int, narrower: int, cost: float, least: int) -> float:
    """What the busiest of all multiprocessors has, which take tiles in turn, the wide ones first.

    That is the first: no other has more tiles, or more wide ones.

    Args:
        wide, narrower: numbers of tiles; cost, least: of either, a narrower one of no more.
    """
    turns = -(-wide // MULTIPROCESSORS)
    return turns * cost + (-(-(wide + narrower) // MULTIPROCESSORS) - turns) * least
