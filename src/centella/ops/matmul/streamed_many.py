"""The product of 17 to 64 rows by tiles of weights that the copy engine brings (sm_90a).

    y[m, n] = f(alpha (x[m, :] . W[n, :]) + bias[n]) + residual[m, n]
    y[m, n] = act(alpha (x[m, :] . W[n, :]) + bias[n]) * (...[n + columns])     with a gate

Reading W takes most of the time, as it does for one row, so all multiprocessors have to read at
once. Where W has few outputs, a cluster takes a tile of them and each of its groups a part of the
depth. One thread of a group has tiles of W and of x copied to a ring; what the ring holds of W is
asked for before the launches before this one are over. A warpgroup multiplies what has arrived.
Then each group sends to every group of the cluster the sums that this one stores, adds up over the
parts, in order, what was sent to it, and stores the results. Where W has many outputs, the depth is
whole: a group takes tiles in turn, and results leave from its registers.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.op.op import Lowered
from centella.op.variant import Variant
from centella.ops.hopper import AT_ONCE, SPARE
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.mma import takes
from centella.ops.matmul.problem import THIN, Problem
from centella.ops.matmul.product import Constants, Product, launch
from centella.ops.matmul.results import Finish, M, Stored
from centella.ops.matmul.skinny import SKINNY_MMA
from centella.ops.matmul.streamed import FEWEST, SHARED
from centella.ops.matmul.streamed_kernel import bring_both
from centella.ops.matmul.tiled import store_words
from centella.ops.matmul.wgmma import OperandRing, multiply
from centella.ops.matmul.wgmma_tiles import WARPGROUP, WgmmaTile
from centella.ops.operands import NATIVE
from centella.ops.ring import Ring
from centella.ops.rows import QUAD, WARP
from centella.specs import Caps

DEPTH = 64  # of a stage
WARPS = WARPGROUP // WARP
NAMES = ("m", "n", "k", "lda", "ldb", "ldy", "sa", "sb", "sy", "tiles")


class ManyTile(Struct, frozen=True):
    """How a cluster works.

    Attributes:
        columns: rows of W that a tile has, of both halves where there is a gate.
        parts: of the depth; as many groups are a cluster.
        stages: of the ring.
        gated: whether half of the columns are gates of the others.
    """

    columns: int
    parts: int = 1
    stages: int = 0
    gated: bool = False

    @property
    def group(self) -> WgmmaTile:
        """What a group multiplies."""
        return WgmmaTile(M, self.columns, DEPTH, self.stages, gated=self.gated)

    @property
    def halves(self) -> int:
        """Sums that an output is made of."""
        return 2 if self.gated else 1

    @property
    def eights(self) -> int:
        """How many times eight outputs a tile has."""
        return self.columns // self.halves // 8

    @property
    def share(self) -> int:
        """Pieces of a tile, of sixteen rows by eight outputs, that a group stores."""
        return WARPS * self.eights // self.parts

    @property
    def sum_bytes(self) -> int:
        """Bytes of shared memory for what all parts have of the outputs that a group stores."""
        return 4 * M * self.columns if self.parts > 1 else 0

    @property
    def shared_bytes(self) -> int:
        """Workgroup memory."""
        return self.group.shared_bytes + self.sum_bytes + 16


class _Sums:
    """A group's share of the outputs: what all parts have of it, in its shared memory.

    A piece is what a warp has of eight columns: four sums a thread, of two rows.
    """

    def __init__(self, tile: ManyTile) -> None:
        self._tile = tile
        self._memory = lang.shared(f32, M * tile.columns)
        self._there = lang.ptx.Barriers(1)
        self.rank: Any = lang.ptx.cluster_rank()
        with lang.if_(lang.local_id() == 0):
            self._there.init(0, 1)
            lang.ptx.init_fence()
            self._there.expect(0, tile.sum_bytes)
        lang.ptx.cluster_arrive(relaxed=True)
        lang.ptx.cluster_wait()

    def _at(self, part: Any, piece: Any, half: int) -> Any:
        """Where a thread's sums of a piece are."""
        tile = self._tile
        number = (part * tile.share + piece) * tile.halves + half
        return (number * WARP + lang.local_id() % WARP) * 4

    def send(self, sums: Any) -> None:
        """Send each piece to the group that stores it."""
        tile = self._tile
        warp = lang.local_id() // WARP % WARPS
        for j in range(tile.eights):
            number = warp * tile.eights + j
            rank, piece = number // tile.share, number % tile.share
            for half in range(tile.halves):
                first = 4 * (half * tile.eights + j)
                values = [sums[first + i] for i in range(4)]
                at = self._at(self.rank, piece, half)
                self._there.send(0, self._memory, at, values, rank)

    def store(self, column: Any, activation: str, extra: dict[str, Any], y: Any) -> None:
        """Add up and store this group's share, once it is there."""
        tile, n = self._tile, lang.parameter("n", u32)
        self._there.wait(0, 0)
        lane, warp = lang.local_id() % WARP, lang.local_id() // WARP % WARPS
        for base in range(0, tile.share, WARPS):
            piece = warp + base
            number = self.rank * tile.share + piece
            row = number // tile.eights * 16 + lane // QUAD
            at = column + number % tile.eights * 8 + lane % QUAD * 2
            inside = at < n
            with lang.if_(inside & (piece < tile.share) if base + WARPS > tile.share else inside):
                finish = Epilogue(activation, extra, at, 2, n, (), tile.gated, NATIVE)
                whole = [self._total(piece, half) for half in range(tile.halves)]
                for below in range(2):
                    line = row + 8 * below
                    with lang.if_(line < lang.parameter("m", u32)):
                        out = finish([four[2 * below + e] for four in whole for e in range(2)],
                                     line)  # fmt: skip
                        start = line * lang.parameter("ldy", u32) + at
                        store_words(y, start, out, at, n)

    def _total(self, piece: Any, half: int) -> list[Any]:
        """Four sums of a piece, over the parts in order."""
        parts = [self._memory.load(self._at(part, piece, half))
                 for part in range(self._tile.parts)]  # fmt: skip
        whole = parts[0]
        for part in parts[1:]:
            whole = [v + w for v, w in zip(whole, part, strict=True)]
        return whole


class _Shared:
    """What both roles see: the ring, its barriers, this group's part of the depth."""

    def __init__(self, tile: ManyTile, a: Any, b: Any, rank: Any) -> None:
        self.tile: WgmmaTile = tile.group
        self.p: dict[str, Any] = {n: lang.parameter(n, u32) for n in NAMES}
        self.left = OperandRing(a, "a", M, self.tile, True, self.p)
        self.right = OperandRing(b, "b", tile.columns, self.tile, True, self.p)
        self.full, self.empty = (lang.ptx.Barriers(tile.stages) for _ in range(2))
        with lang.if_(lang.local_id() == 0):
            for stage in range(tile.stages):
                self.full.init(stage, 1)
                self.empty.init(stage, 1)
            lang.ptx.init_fence()
        lang.barrier()
        whole = (self.p["k"] + (DEPTH - 1)) // DEPTH
        self.first: Any = rank * whole // tile.parts  # step of this group
        self.steps: Any = (rank + 1) * whole // tile.parts - self.first
        self.cluster: Any = lang.group_id() // tile.parts
        self.clusters: Any = lang.num_groups() // tile.parts


def _streamed_many(
    *, tile: ManyTile, activation: str, a: Argument, b: Argument, y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    sums, rank = None, lang.const(0, u32)
    if tile.parts > 1:
        lang.ptx.cluster(tile.parts)
        sums = _Sums(tile)
        rank = sums.rank
    shared = _Shared(tile, a, b, rank)
    with lang.ptx.role(0, WARPGROUP), lang.if_(lang.local_id() == 0):
        _produce(shared)
    with lang.ptx.role(WARPGROUP, WARPGROUP):
        _consume(shared, tile, sums, activation, y, extra)


def _produce(shared: _Shared) -> None:
    """Have all tiles copied; those of W that there is room for before the wait."""
    tile, p = shared.tile, shared.p
    turns = (p["tiles"] - shared.cluster + (shared.clusters - 1)) // shared.clusters

    def bring_weights(number: Any, stage: Any) -> None:
        turn = number // shared.steps
        column = (shared.cluster + turn * shared.clusters) * tile.across
        k = (number - turn * shared.steps + shared.first) * DEPTH
        shared.full.expect(stage, tile.stage_bytes)
        shared.right.load(column, k, lang.const(0, u32), stage, shared.full)

    def bring_rows(number: Any, stage: Any) -> None:
        k = (number % shared.steps + shared.first) * DEPTH
        zero = lang.const(0, u32)
        shared.left.load(zero, k, zero, stage, shared.full)

    bring_both(shared.full.count, shared.empty, turns * shared.steps, bring_weights, bring_rows)


def _consume(
    shared: _Shared, tile: ManyTile, sums: _Sums | None, activation: str, y: Any,
    extra: dict[str, Any],
) -> None:  # fmt: skip
    """Multiply what has arrived, tile by tile, and finish each."""
    ring, p = Ring(tile.stages), shared.p
    leader = lang.local_id() % WARPGROUP == 0
    fragment, zero = lang.ptx.Fragment(f32, (M, tile.columns)), lang.const(0, u32)
    lang.ptx.await_launches()
    for number in lang.range(shared.cluster, p["tiles"], shared.clusters):
        column = number * tile.group.across
        last = multiply(shared, ring, [fragment], 0, leader)
        lang.ptx.wgmma_wait(0)
        with lang.if_(leader):
            shared.empty.arrive(last)
        if sums is not None:  # one tile a cluster
            sums.send(fragment)
            sums.store(column, activation, extra, y)
        else:
            columns = range(0, tile.group.across, 8)
            Stored(y, p).take(
                0, Finish(zero, zero, column, [fragment], columns, p, activation, extra, (),
                          tile.gated), zero, leader,
            )  # fmt: skip


kernel: Kernel = Kernel(_streamed_many, workgroup=2 * WARPGROUP, name="streamed_many")


# -- how it is launched ---------------------------------------------------------------------------

MOST = M  # rows
COLUMNS = range(32, 257, 16)
LEAST = 4  # stages, where a group has so many steps
SMALL = 3 << 19  # bytes of weights up to which `skinny_mma` is faster, where it takes the rows


def tile_of(product: Product, caps: Caps) -> ManyTile | None:
    """How a cluster works, where x has 2 to 64 rows, and rows of x and W start on 16 bytes."""
    problem = product.problem
    along = problem.a_along_k and problem.b_along_k
    few = problem.batch == 1 and 1 < problem.m <= MOST and problem.k >= FEWEST and problem.n > 0
    if not (few and along and product.whole and takes(product.dtypes) and caps.warpgroups):
        return None
    if "scale" in product.names or caps.max_workgroup < kernel.workgroup:
        return None
    tiles = tiles_of(problem, product.gated, caps)
    return min(tiles, key=lambda tile: _microseconds(tile, problem), default=None)


def tiles_of(problem: Problem, gated: bool, caps: Caps) -> list[ManyTile]:
    """The tiles that there is room for, with as many stages as there is room for."""
    every = (ManyTile(c, parts, gated=gated) for parts in AT_ONCE for c in COLUMNS)
    return [tile for t in every if (tile := _with_stages(t, problem, caps)) is not None]


def _turns(tile: ManyTile, problem: Problem) -> int:
    """Tiles of a cluster."""
    return -(-_tiles(tile, problem) * tile.parts // AT_ONCE[tile.parts])


def _tiles(tile: ManyTile, problem: Problem) -> int:
    """Tiles of all outputs."""
    return -(-problem.n // tile.group.across)


def _steps(tile: ManyTile, problem: Problem) -> int:
    """Stages that a group reads of a tile, at most."""
    whole = -(-problem.k // DEPTH)
    return -(-whole // tile.parts)


def _with_stages(tile: ManyTile, problem: Problem, caps: Caps) -> ManyTile | None:
    """A tile with as many stages as there is room for; None where it does not suit."""
    steps, turns = _steps(tile, problem), _turns(tile, problem)
    even = WARPS * tile.eights % tile.parts == 0  # shares of pieces
    if tile.parts > 1 and not (caps.clusters and even and turns == 1 and steps > 1):
        return None
    room = min(SHARED, caps.max_shared) - tile.shared_bytes - SPARE // 2
    stages = min(room // (tile.group.stage_bytes + 16), steps * turns)
    return replace(tile, stages=stages) if stages >= min(LEAST, steps * turns) else None


def _microseconds(tile: ManyTile, problem: Problem) -> float:
    """What a product takes, fitted to 12 shapes of 64 rows by 219 tiles on an H200.

    A group reads 40 KB a microsecond, or what its ring holds in 1.23 of them. Of x, which is in the
    L2 cache, 0.3 of the bytes count. A turn takes 1.7 us beside that, and to send the sums of a
    column to another group 0.0075 us.
    """
    rate = min(40_000.0, tile.stages * tile.group.stage_bytes / 1.23)
    turns, nbytes = _turns(tile, problem), 2 * DEPTH * (tile.columns + 0.3 * M)
    sending = 0.0075 * tile.columns if tile.parts > 1 else 0.0
    return turns * (1.7 + _steps(tile, problem) * nbytes / rate) + sending


def _launches(product: Product, tile: ManyTile, caps: Caps) -> Lowered:
    problem = product.problem
    tiles = _tiles(tile, problem)
    constants: Constants = (("activation", product.activation), ("tile", tile))
    scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("lda", problem.lda),
        ("ldb", problem.ldb), ("ldy", problem.ldy), ("sa", 0), ("sb", 0), ("sy", 0),
        ("tiles", tiles), ("alpha", product.alpha), ("ldr", product.residual_pitch),
        ("batches_a", 1), ("batches_b", 1), ("both", product.columns),
    )  # fmt: skip
    groups = -(-tiles // _turns(tile, problem)) * tile.parts
    names = ("a", "b", *product.names)
    return Lowered((launch(kernel, product, names, scalars, constants, groups, kernel.workgroup),))


def _preferred(product: Product, caps: Caps) -> bool:
    """Not of weights so small that nothing is gained by asking for them early."""
    problem = product.problem
    small = 2 * problem.n * problem.k <= SMALL and not product.gated
    if small and SKINNY_MMA.fits(product, caps):
        return False
    return caps.fast_tensor_cores and problem.m > THIN


STREAMED_MANY: Variant[Product, ManyTile] = Variant("streamed_many", tile_of, _launches, _preferred)
