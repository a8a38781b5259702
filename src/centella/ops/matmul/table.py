"""Tiles of products by class of adapter: what `choose` reads.

A row is measured, and says where; a class without a measurement has the conservative row.
`benchmarks/run.py sweep` checks every candidate before it times it (`results/h200-sweep.json`).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from centella.specs import Caps

STAGES = 2  # tiles of an operand in shared memory: one is multiplied, the next on its way


class Tile(Struct, frozen=True):
    """Tile sizes of the product: group, depth, thread; `pad` words after each shared row.

    With `unroll` 2 a turn of the loop has two steps, so that the place of each in shared memory is
    a constant: drivers that compile WGSL do not keep it apart from the rest of the address.

    `rolled` is for a CPU, where a load waits for nothing and each that is written down is compiled
    for milliseconds: one tile at a time lies in shared memory, and its k are a loop.
    """

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    pad: int = 0
    unroll: int = 1
    rolled: bool = False

    @property
    def stages(self) -> int:
        """Tiles of an operand in shared memory."""
        return 1 if self.rolled else STAGES

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return self.bm // self.tm * (self.bn // self.tn)

    @property
    def shared_bytes(self) -> int:
        """Workgroup memory: the stages of both operands."""
        return self.stages * 4 * self.bk * (self.bm + self.bn + 2 * self.pad)


TILES: dict[str, tuple[Tile, ...]] = {
    "large": (Tile(128, 128, 8, 8, 8, 4), Tile(128, 128, 8, 8, 8), Tile(128, 128, 16, 8, 8, 4)),
    "medium": (Tile(64, 64, 16, 4, 4), Tile(64, 64, 16, 8, 4)),
    "small": (Tile(32, 32, 16, 4, 4),),
}


TeamShape = tuple[int, int, int]


class Row(Struct, frozen=True):
    """What suits one class of adapter.

    Attributes:
        measured: on what; "" where nothing was.
        first: tiles by variant that come before those of `TILES`.
        even: groups that keep a GPU of this class evenly busy: a product of fewer tiles has its
            depth split, where that gives as many. 0: never.
        enough: groups that a product needs of a tile larger than the smallest.
        thin: of thin products by rows of x, of f32 and of 16 bits: threads of a team, its outputs,
            steps at once. Rows without have those of every class; so do bytes.
        thin_few: instead, where outputs are few: more threads and groups for each.
        rolled: kernels of few rows keep their loops, for threads that are a CPU's: what is written
            down is compiled, a load for milliseconds, and more threads are no more cores.
    """

    measured: str = ""
    first: dict[str, tuple[Tile, ...]] = {}
    even: int = 0
    enough: int = 96
    thin: dict[int, tuple[TeamShape, TeamShape]] = {}
    thin_few: dict[int, TeamShape] = {}
    rolled: bool = False


SHORT = 6  # steps of a warp whose loads may be on their way at once: a row of so few is one block
# Shapes of skinny groups on tensor cores: (sixteens of outputs, warps, steps at once) by eights of
# rows of x, where groups are several a multiprocessor, and where they are few. On an H200.
SKINNY: dict[str, dict[int, tuple[tuple[int, int, int], tuple[int, int, int]]]] = {
    "16-bit": {1: ((1, 8, 2), (1, 8, 4)), 2: ((1, 4, 2), (1, 8, 4)), 4: ((1, 4, 1), (1, 8, 3))},
    "i8": {1: ((1, 4, 2), (1, 8, 4)), 2: ((1, 4, 1), (1, 16, 1)), 4: ((1, 4, 1), (1, 8, 1))},
    "i8 by f32": {1: ((2, 8, 1), (2, 8, 1)), 2: ((2, 8, 1), (2, 8, 1))},
}
# Rows of x from which on they are the better thin kernel; most rows.
SKINNY_FROM = {"16-bit": 3, "i8": 1, "i8 by f32": 8}

# Of a load lavapipe makes a loop over lanes, which takes 30 times what an fma does, to compile and
# to run: k is a loop, and where a product is large a thread has as much of it as pays.
ROLLED: dict[str, tuple[Tile, ...]] = {
    "large": (Tile(128, 128, 8, 8, 16, 4, rolled=True),),
    "medium": (Tile(64, 64, 8, 8, 8, rolled=True),),
    "small": tuple(replace(tile, rolled=True) for tile in TILES["small"]),
}

CONSERVATIVE = Row()
ROWS: dict[str, Row] = {
    "cuda": Row(
        "H200, PTX",
        even=480,
        thin={
            4: ((64, 4, 1), (64, 4, 1)),
            8: ((128, 2, 2), (128, 2, 2)),
            16: ((64, 4, 1), (64, 4, 1)),
        },
        thin_few={4: (128, 2, 2)},
    ),
    "nvidia": Row(
        "H200, Vulkan",
        {"large": (Tile(128, 128, 8, 8, 8, 4, 2),)},
        even=480,
        thin={
            4: ((64, 4, 1), (64, 4, 2)),
            8: ((64, 4, 2), (64, 4, 2)),
            16: ((32, 4, 2), (32, 4, 1)),
        },
        thin_few={8: (64, 2, 1), 16: (64, 2, 1)},
    ),
    "amd": CONSERVATIVE,
    "intel": CONSERVATIVE,
    "apple": CONSERVATIVE,
    "software": Row("lavapipe, to compile and to run", ROLLED, enough=1, rolled=True),
    "simulator": CONSERVATIVE,
}


def row_of(caps: Caps) -> Row:
    """The row of a device; the conservative one for a class that has none."""
    return ROWS.get(caps.adapter_class, CONSERVATIVE)
