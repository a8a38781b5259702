"""Which kernel computes a product: a pure function of its sizes, layouts, dtypes and the device.

gemv, skinny           m = 1, m <= 16, B contiguous along k      `thin.py`
skinny_mma             m <= 32 of f16, bf16, i8, on tensor cores `skinny.py`
columns                m <= 16, B contiguous along n             `columns.py`
small, medium, large   the rest, by the tile that fits           `tiled.py`
mma                    f16 and bf16 on tensor cores, sm_80 on    `mma.py`
wgmma                  the same on Hopper                        `wgmma.py`
"""

from __future__ import annotations

from centella.dtypes import DType, f32, i8
from centella.ops.matmul import skinny
from centella.ops.matmul.columns import Columns
from centella.ops.matmul.mma import MmaTile, takes
from centella.ops.matmul.problem import THIN, Problem
from centella.ops.matmul.skinny import EIGHT, OUTPUTS, QUAD, Skinny
from centella.ops.matmul.table import SHORT, SKINNY, SKINNY_FROM, TILES, row_of
from centella.ops.matmul.thin import Thin
from centella.ops.matmul.tiled import Tile
from centella.ops.matmul.wgmma import WgmmaTile
from centella.ops.rows import power_above
from centella.specs import Caps

MMA_TILES = (MmaTile(128, 128, 32, 64, 64, 4), MmaTile(64, 64, 32, 32, 32, 2))
MULTIPROCESSORS = 132  # of an H100 or H200
# What a tile takes, measured, in columns of the first; the first of the cheapest is chosen.
WGMMA_TILES = {
    WgmmaTile(128, 128, 64, 5, turns=True, staged=128): 128,
    WgmmaTile(128, 96, 64, 7, turns=True, staged=32): 98,
    WgmmaTile(128, 160, 64, 5, turns=True, staged=32): 162,
    WgmmaTile(128, 64, 64, 7, turns=True, staged=64): 80,
    WgmmaTile(128, 80, 64, 8, turns=True, staged=16): 86,
}
BUSY = 256  # groups that keep the memory of a large GPU busy
SPLITS = (2, 4, 8)
PART = 16  # a part of the depth is a multiple: whole chunks of 16-bit elements, whole steps
DEEP = 512  # least depth of a part
# Threads of a team of a thin product, its outputs, steps at once, by rows held.
THIN_SHAPES = {1: (128, 2, 4), 2: (128, 2, 4), 4: (32, 2, 2), 8: (32, 4, 1), THIN: (32, 4, 1)}
FEW = 2048  # outputs that leave much of a large GPU idle
# Weights that are worth compiling twice as much, where threads are a CPU's; not bytes, which take
# three times as much, as each is widened.
WORTH = 1 << 17
ROWS = (1, 2, 4, 8, THIN)  # rows that a thin kernel holds in registers


def tile_of(variant: str, itemsize: int, caps: Caps) -> Tile | None:
    """The tile of a variant on a device: the first that fits.

    Its threads share the 16-byte chunks of either operand's tile evenly; of 1-byte elements, half
    chunks.
    """
    for tile in (*row_of(caps).first.get(variant, ()), *TILES[variant]):
        share = 16 // max(itemsize, 2) * tile.threads
        if tile.bm * tile.bk % share or tile.bn * tile.bk % share:
            continue
        if tile.shared_bytes <= caps.max_shared and tile.threads <= caps.max_workgroup:
            return tile
    return None


def mma_tile_of(dtypes: tuple[DType, DType], caps: Caps, whole: bool = True) -> MmaTile | None:
    """The tile of a product on tensor cores: the first that fits; the simulator has them too.

    Args:
        whole: False where an operand's rows do not start on 16 bytes: what goes through registers
            needs them, so that the tile is the smallest.
    """
    if not takes(dtypes) or not caps.tensor_cores:
        return None
    for tile in MMA_TILES if whole else MMA_TILES[-1:]:
        if tile.shared_bytes <= caps.max_shared and tile.threads <= caps.max_workgroup:
            return tile
    return None


def wgmma_tile_of(problem: Problem, dtypes: tuple[DType, DType], caps: Caps) -> WgmmaTile | None:
    """The tile of a product by warpgroups, by what all take on the busiest multiprocessor.

    The simulator has them too.
    """
    if not takes(dtypes) or not caps.warpgroups:
        return None
    fitting = {
        tile: cost for tile, cost in WGMMA_TILES.items()
        if tile.shared_bytes <= caps.max_shared and tile.threads <= caps.max_workgroup
        and tile.takes(problem.a_along_k, problem.b_along_k)
    }  # fmt: skip

    def cost_of(tile: WgmmaTile) -> int:
        tiles = -(-problem.m // tile.bm) * -(-problem.n // tile.bn) * problem.batch
        return -(-tiles // MULTIPROCESSORS) * fitting[tile]

    return min(fitting, key=cost_of, default=None)


def skinny_tile_of(problem: Problem, dtypes: tuple[DType, DType], caps: Caps) -> Skinny | None:
    """The shape of a skinny group on tensor cores; the simulator has them, too.

    A short row is one block, of few warps, each with all its loads on their way at once.
    """
    along = problem.a_along_k and problem.b_along_k
    if not (along and problem.m > 0 < problem.k and skinny.takes(dtypes) and caps.tensor_cores):
        return None
    x, weight = dtypes
    eights = power_above(-(-problem.m // EIGHT))
    shapes = SKINNY[_kind(dtypes)].get(eights)
    if shapes is None:
        return None
    steps = -(-problem.k // (QUAD * weight.per_chunk))
    short = max(SHORT * weight.itemsize // x.itemsize, 1)
    groups = -(-problem.n // OUTPUTS) * problem.batch
    sixteens, deep, unroll = shapes[groups < 4 * MULTIPROCESSORS]
    if steps <= 8 * short:
        sixteens, deep = 1, 8 if steps > 2 * short else 4
        unroll = max(-(-steps // deep), 1)
    tile = Skinny(eights, sixteens, deep, unroll)
    fitting = tile.threads <= caps.max_workgroup and tile.shared_bytes <= caps.max_shared
    return tile if fitting else None


def _kind(dtypes: tuple[DType, DType]) -> str:
    """The row of `SKINNY` for x and weights."""
    x, weight = dtypes
    return "16-bit" if weight is not i8 else "i8 by f32" if x is f32 else "i8"


def fits(variant: str, problem: Problem, dtypes: tuple[DType, DType], caps: Caps) -> bool:
    """Whether a variant can compute a problem on a device."""
    if variant == "gemv":
        return problem.m <= 1 and problem.b_along_k
    if variant == "skinny":
        return problem.m <= THIN and problem.b_along_k
    if variant == "skinny_mma":
        return skinny_tile_of(problem, dtypes, caps) is not None
    if variant == "columns":
        return problem.m <= THIN and not problem.b_along_k
    if variant == "mma":
        return mma_tile_of(dtypes, caps) is not None
    if variant == "wgmma":
        return wgmma_tile_of(problem, dtypes, caps) is not None
    return tile_of(variant, _itemsize(dtypes), caps) is not None


def choose(problem: Problem, dtypes: tuple[DType, DType], caps: Caps, whole: bool = True) -> str:
    """The variant for a problem: thin for few rows, else tensor cores, where a GPU has them.

    Else it is the largest tile with enough groups.

    Args:
        whole: False where an operand's rows do not start on 16 bytes.
    """
    few = whole and caps.fast_tensor_cores and problem.m >= SKINNY_FROM[_kind(dtypes)]
    if few and fits("skinny_mma", problem, dtypes, caps):
        return "skinny_mma"
    if problem.m <= THIN:
        thin = "gemv" if problem.m <= 1 else "skinny"
        return thin if problem.b_along_k else "columns"
    if caps.fast_tensor_cores:
        for variant in ("wgmma", "mma"):
            if fits(variant, problem, dtypes, caps):
                return variant
    row = row_of(caps)
    for name in ("large", "medium"):
        tile = tile_of(name, _itemsize(dtypes), caps)
        if tile is None:
            continue
        tiles = tiles_of(problem, tile) * splits_of(problem, tile, caps)
        # To compile a tile for other lengths takes a CPU longer than to compute rows for nothing.
        small = problem.m <= tile.bm // 2 and not row.rolled
        if tiles >= row.enough and not (small or problem.n <= tile.bn // 2):
            return name
    return "small"


def tiles_of(problem: Problem, tile: Tile) -> int:
    """Tiles of a product: groups, where the depth is whole."""
    return -(-problem.m // tile.bm) * -(-problem.n // tile.bn) * problem.batch


def splits_of(problem: Problem, tile: Tile, caps: Caps) -> int:
    """Parts that the depth of a product of few tiles is split into: equal ones, of whole chunks.

    As few as keep a device of this class evenly busy, each deep enough to be worth its sums' way
    through memory.
    """
    tiles, even = tiles_of(problem, tile), row_of(caps).even
    if not 0 < 2 * tiles <= even or problem.batch > 1:
        return 1
    fitting = [n for n in SPLITS if problem.k % (n * PART) == 0 and problem.k // n >= DEEP]
    return next((n for n in fitting if tiles * n >= even), fitting[-1] if fitting else 1)


def thin_of(problem: Problem, dtypes: tuple[DType, DType], caps: Caps) -> Thin:
    """The shape of a thin kernel's group: many threads a row for few rows.

    A team has no more threads than steps. Where it may take several steps at once, it has so many
    threads, and takes so many, that all of its steps are whole, if that can be.
    """
    m, row = _rows(problem.m), row_of(caps)
    threads = min(64 if row.rolled else 128, caps.max_workgroup)
    steps = -(-problem.k // max(d.per_chunk for d in dtypes))
    smallest = min(d.itemsize for d in dtypes)
    if row.rolled and smallest > 1:
        wide = Thin(m, 8, 8, 1, threads, True)
        if problem.n >= 2 * wide.outputs and problem.n * problem.k >= WORTH:
            return wide
    lanes, outs, most = THIN_SHAPES[m]
    if smallest == 1 and m <= 2:  # numbers to widen: x is read less often
        lanes, outs, most = 64, 4, 1
    elif smallest > 1 and m in row.thin_few and problem.n * problem.batch <= FEW:
        lanes, outs, most = row.thin_few[m]
    elif smallest > 1 and m in row.thin:
        lanes, outs, most = row.thin[m][smallest == 2]
    most = 1 if row.rolled else most
    teams = [n for n in (min(lanes, threads), 64, 32, 8) if n <= min(lanes, max(steps, 8))]
    for lanes in teams:
        for unroll in range(most, 1, -1):
            if lanes >= 32 and steps % (lanes * unroll) == 0:
                return Thin(m, lanes, outs, unroll, threads, row.rolled)
    return Thin(m, teams[0], outs, max(1, min(most, steps // teams[0])), threads, row.rolled)


def depth_of(tile: Thin, k: int, width: int) -> str:
    """How a thin kernel walks k: whole blocks, both whole blocks and masked steps, or masked ones.

    With many rows, and on a CPU, masks cost little, and one walk is half the code of two.
    """
    block = tile.lanes * tile.unroll * width
    if k and k % block == 0:
        return "whole"
    return "masked" if k < block or tile.m > 4 or tile.rolled else "both"


def columns_of(problem: Problem, caps: Caps) -> Columns:
    """The shape of a columns kernel's group."""
    if row_of(caps).rolled:
        return Columns(_rows(problem.m), 32, 1, rolled=True)
    threads = min(256, caps.max_workgroup)
    return Columns(_rows(problem.m), 32, threads // 32)


def _rows(m: int) -> int:
    return next(rows for rows in ROWS if m <= rows)


def _itemsize(dtypes: tuple[DType, DType]) -> int:
    return min(d.itemsize for d in dtypes)
