"""The product by warpgroups of a shallow A: a group's rows of it stay, and B passes by: sm_90a.

What a tile of 128 x 128 reads a step, 32 KB for 512 clocks of its tensor cores, is all that a
multiprocessor is given from L2. Where rows of A are at most 384 deep, a group keeps 128 of them,
and reads B alone, in tiles of 192 columns: half of that. The two consumers take these in turn, as
in `wgmma.py`, so that one multiplies while the other finishes. The last tiles of some rows release
them piece by piece, and those of the next rows come in their place.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.op.op import Lowered
from centella.op.variant import Variant
from centella.ops.matmul.mma import preferred as suits_tensor_cores
from centella.ops.matmul.mma import takes
from centella.ops.matmul.problem import aligned
from centella.ops.matmul.product import Constants, Product, Scalars, launch
from centella.ops.matmul.results import Finish, K, M, Staged
from centella.ops.matmul.table import MULTIPROCESSORS
from centella.ops.ring import Ring
from centella.specs import Caps

WARPGROUP = 128  # threads
REGISTERS = (24, 240)  # of a producer's thread, of a consumer's
ROWS, DEEPEST = 128, 384  # of A that stay
SIZES = ("m", "n", "k", "lda", "ldb", "ldy", "sy", "tiles_n")


class ResidentTile(Struct, frozen=True):
    """How a group works: pieces of A that stay, each `bk` deep; columns; stages of B; staging.

    Attributes:
        staged: columns that lie in shared memory before they are stored.
    """

    pieces: int
    bn: int = 192
    bk: int = 64
    stages: int = 4
    staged: int = 64

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return 3 * WARPGROUP

    @property
    def shared_bytes(self) -> int:
        """Workgroup memory: rows of A, the ring of B, results, barriers."""
        staged = 2 * 2 * ROWS * self.staged
        ring = self.stages * (2 * self.bk * self.bn + 16)
        return self.pieces * (2 * self.bk * ROWS + 16) + ring + staged + 16


class _Shared:
    """What both roles see: sizes, rings, maps, results on their way, barriers."""

    def __init__(self, tile: ResidentTile, a: Any, b: Any, y: Any) -> None:
        self.tile = tile
        self.p: dict[str, Any] = {n: lang.parameter(n, u32) for n in SIZES}
        p = self.p
        self.left = lang.ptx.SharedTile(a.dtype, (tile.pieces, ROWS, tile.bk))
        self.right = lang.ptx.SharedTile(b.dtype, (tile.stages, tile.bn, tile.bk))
        self.map_a = lang.ptx.TensorMap(a, self.left, (p["k"], p["m"]), (p["lda"],))
        self.map_b = lang.ptx.TensorMap(b, self.right, (p["k"], p["n"]), (p["ldb"],))
        self.stored = Staged(y, (2, ROWS, tile.staged), p)
        self.come, self.gone = lang.ptx.Barriers(tile.pieces), lang.ptx.Barriers(tile.pieces)
        self.full, self.empty = lang.ptx.Barriers(tile.stages), lang.ptx.Barriers(tile.stages)
        self.order = lang.ptx.Barriers(2)
        with lang.if_(lang.local_id() == 0):
            for piece in range(tile.pieces):
                self.come.init(piece, 1)
                self.gone.init(piece, 2)
            for stage in range(tile.stages):
                self.full.init(stage, 1)
                self.empty.init(stage, 1)
            for consumer in range(2):
                self.order.init(consumer, 1)
            lang.ptx.init_fence()
        lang.barrier()


def _resident(
    *, tile: ResidentTile, words: tuple[str, ...], activation: str, a: Argument, b: Argument,
    y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    shared = _Shared(tile, a, b, y)
    fewer, more = REGISTERS
    with lang.ptx.role(0, WARPGROUP, registers=fewer), lang.if_(lang.local_id() == 0):
        _produce(shared)
    with lang.ptx.role(WARPGROUP, 2 * WARPGROUP, registers=more):
        _consume(shared, activation, extra, words)


def _produce(shared: _Shared) -> None:
    """Have B copied tile by tile, and with the first tile of some rows each piece of these."""
    tile, ring = shared.tile, Ring(shared.tile.stages)
    turn = lang.var(0, u32)
    for block in lang.range(lang.group_id(), lang.num_groups(), lang.ptx.grid()):
        for across in lang.range(shared.p["tiles_n"]):
            for piece in lang.range(tile.pieces):
                stage, k = ring.stage.get(), piece * tile.bk
                with lang.if_(across == 0):
                    shared.gone.wait(piece, turn ^ 1)
                    shared.come.expect(piece, 2 * ROWS * tile.bk)
                    lang.ptx.tma_load(shared.map_a, (k, block * ROWS), piece, shared.come, piece)
                shared.empty.wait(stage, ring.parity ^ 1)
                shared.full.expect(stage, 2 * tile.bn * tile.bk)
                lang.ptx.tma_load(shared.map_b, (k, across * tile.bn), stage, shared.full, stage)
                ring.advance()
        turn.set(turn ^ 1)


def _consume(
    shared: _Shared, activation: str, extra: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Every other tile: multiply what has arrived, and finish it."""
    tile, tiles_n = shared.tile, shared.p["tiles_n"]
    ring = Ring(tile.stages)
    mine = lang.ptx.warpgroup() - 1
    ring.move(mine * tile.pieces)
    next_turn = lang.var(1 - mine)  # the first one's turn is at once
    turn = lang.var(0, u32)
    sums = [lang.ptx.Fragment(f32, (M, tile.bn)) for _ in range(ROWS // M)]
    leader = lang.local_id() % WARPGROUP == 0
    for block in lang.range(lang.group_id(), lang.num_groups(), lang.ptx.grid()):
        before = (block - lang.group_id()) // lang.ptx.grid() * tiles_n  # tiles of rows before
        for across in lang.range((mine + before) & 1, tiles_n, 2):
            shared.order.wait(mine, next_turn)
            next_turn.set(next_turn ^ 1)
            last = leader & (across + 2 >= tiles_n)  # of this consumer's with these rows
            _multiply(shared, ring, sums, turn, leader, last)
            for first_column in range(0, tile.bn, tile.staged):
                columns = range(first_column, first_column + tile.staged, 8)
                at = (0, block * ROWS, across * tile.bn)
                done = Finish(*at, sums, columns, shared.p, activation, extra, words)
                shared.stored.take(done, mine, leader)
        turn.set(turn ^ 1)
    shared.stored.close(leader)


def _multiply(
    shared: _Shared, ring: Ring, sums: list[Any], turn: Any, leader: Any, last: Any
) -> None:
    """All pieces of a tile; then the other consumer's turn, and what was read is released."""
    tile, left, right = shared.tile, shared.left, shared.right
    mine = lang.ptx.warpgroup() - 1
    before = lang.var(0, u32)  # the stage that is being read
    for piece in lang.range(tile.pieces):
        stage = ring.stage.get()
        shared.come.wait(piece, turn)
        shared.full.wait(stage, ring.parity)
        lang.ptx.wgmma_fence()
        for k in range(0, tile.bk, K):
            for i, fragment in enumerate(sums):
                lang.ptx.wgmma(
                    fragment, left, left.start(i * M, k, piece), right, right.start(0, k, stage),
                    accumulate=piece > 0 if k == 0 else True,
                )  # fmt: skip
        lang.ptx.wgmma_commit()
        lang.ptx.wgmma_wait(1)
        with lang.if_(leader & (piece > 0)):
            shared.empty.arrive(before)
        with lang.if_(last & (piece > 0)):
            shared.gone.arrive(piece - 1)
        before.set(stage)
        ring.advance()
    with lang.if_(leader):
        shared.order.arrive(1 - mine)
    ring.move(tile.pieces)
    lang.ptx.wgmma_wait(0)
    with lang.if_(leader):
        shared.empty.arrive(before)
    with lang.if_(last):
        shared.gone.arrive(tile.pieces - 1)


resident: Kernel = Kernel(_resident, workgroup=384, name="resident")


# -- how it is launched ---------------------------------------------------------------------------


def tile_of(product: Product, caps: Caps) -> ResidentTile | None:
    """The tile, where rows of A stay in shared memory and each consumer has a tile of them."""
    p, y = product.problem, product.specs[-1]
    tile = ResidentTile(math.ceil(p.k / 64))
    fits = (
        caps.warpgroups and takes(product.dtypes) and product.whole
        and "residual" not in product.names  # for its addresses there are no registers
        and p.batch == 1 and p.a_along_k and p.b_along_k and 0 < p.k <= DEEPEST and p.m > 0
        and p.n > tile.bn and y.dtype.itemsize == 2 and aligned(y, p.ldy, 0)
        and tile.shared_bytes <= caps.max_shared and tile.threads <= caps.max_workgroup
    )  # fmt: skip
    return tile if fits else None


def preferred(product: Product, caps: Caps) -> bool:
    """Where rows fill the multiprocessors, and columns the tiles."""
    p = product.problem
    blocks, across = math.ceil(p.m / ROWS), math.ceil(p.n / ResidentTile(1).bn)
    rounds = math.ceil(blocks / MULTIPROCESSORS)
    full = p.m * p.n / (rounds * MULTIPROCESSORS * ROWS * across * ResidentTile(1).bn)
    return suits_tensor_cores(product, caps) and p.k > DEEPEST // 2 and full > 0.9


def _launches(product: Product, tile: ResidentTile, caps: Caps) -> Lowered:
    p = product.problem
    scalars: Scalars = (
        ("m", p.m), ("n", p.n), ("k", p.k), ("lda", p.lda), ("ldb", p.ldb), ("ldy", p.ldy),
        ("sy", p.sy), ("tiles_n", math.ceil(p.n / tile.bn)), ("alpha", product.alpha),
        ("batches", 1),
    )  # fmt: skip
    extras = zip(product.names, product.specs[2:-1], strict=True)
    words = tuple(n for n, s in extras if p.n % 2 == 0 and aligned(s, 0, 0))
    constants: Constants = (
        ("activation", product.activation), ("tile", tile), ("words", words),
    )  # fmt: skip
    groups, names = math.ceil(p.m / ROWS), ("a", "b", *product.names)
    return Lowered((launch(resident, product, names, scalars, constants, groups, tile.threads),))


RESIDENT: Variant[Product, ResidentTile] = Variant("resident", tile_of, _launches, preferred)
