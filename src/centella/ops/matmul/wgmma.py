"""The tiled product by warpgroups, for f16 and bf16 on Hopper (PTX for sm_90a alone).

A group stays on its multiprocessor and takes tiles of C in turn. Its first warpgroup is the
producer: one thread has tiles of A and B copied into a ring of `stages` in shared memory, as far
ahead as there is room. The others are consumers, each with 64 rows of the tile of C as sums in
its registers; they multiply what has arrived and give the stage back. Two barriers a stage tell
that it is full, and that all consumers have read it; nobody else waits for anybody.

Copies write zeros past the edges of A and B, so tails of k, m and n are exact. Either operand may
lie along k or across it: the descriptor of its tile says so. Rows start on 16 bytes, which copies
need; products of other operands are those of `mma`.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.tiled import store_words, tile_place
from centella.ops.ring import Ring
from centella.program import Kernel

WARPGROUP = 128  # threads
M, K = 64, 16  # of one product
REGISTERS = {1: (24, 240), 2: (40, 232), 3: (32, 160)}  # producer, consumer; by consumers


SIZES = ("m", "n", "k", "lda", "ldb", "ldy", "sa", "sb", "sy", "tiles_m", "tiles_n")


class WgmmaTile(Struct, frozen=True):
    """Tile sizes of a group: C is bm x bn, of depth bk a stage; stages of the ring.

    Attributes:
        turns: two consumers take tiles in turn, so that one multiplies while the other finishes;
            else each takes 64 rows of every tile.
        staged: columns that lie in shared memory before they are stored; 0: stored as they are.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    turns: bool = False
    staged: int = 0

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
        return (a_along_k or self.bm % M == 0) and (b_along_k or self.bn % M == 0)

    @property
    def stage_bytes(self) -> int:
        """Bytes of both operands in one stage."""
        return 2 * self.bk * (self.bm + self.bn)

    @property
    def shared_bytes(self) -> int:
        """Workgroup memory: the ring, its barriers, what is to be stored."""
        staged = 2 * self.consumers * self.rows * self.staged
        return self.stages * (self.stage_bytes + 16) + 16 + staged


class _Operand:
    """One operand's ring of tiles, the map that fills it, and where products find their factor."""

    def __init__(
        self, source: Any, name: str, rows: int, tile: WgmmaTile, along_k: bool, p: dict[str, Any]
    ) -> None:
        from centella.lang import ptx

        self.along_k = along_k
        shape = (rows, tile.bk) if along_k else (tile.bk, rows)
        self.ring = ptx.SharedTile(source.dtype, (tile.stages, *shape))
        across = p["m" if name == "a" else "n"]
        self.batches = lang.parameter(f"batches_{name}", u32)
        extents = (p["k"], across, self.batches) if along_k else (across, p["k"], self.batches)
        self.map = ptx.TensorMap(source, self.ring, extents, (p[f"ld{name}"], p[f"s{name}"]))

    def load(self, row: Any, k: Any, batch: Any, stage: Any, full: Any) -> None:
        """Have the tile from a row and a k on copied to a stage."""
        from centella.lang import ptx

        at = (k, row) if self.along_k else (row, k)
        ptx.tma_load(self.map, (*at, lang.minimum(batch, self.batches - 1)), stage, full, stage)

    def start(self, row: Any, k: int, stage: Any) -> Any:
        """Where a factor begins: a row, a k."""
        return self.ring.start(row, k, stage) if self.along_k else self.ring.start(k, row, stage)


class _Shared:
    """What both roles see: operands, barriers, sizes. `order` has the consumers take turns."""

    def __init__(self, tile: WgmmaTile, a: Any, b: Any, a_along_k: bool, b_along_k: bool) -> None:
        from centella.lang import ptx

        self.tile = tile
        self.p: dict[str, Any] = {n: lang.parameter(n, u32) for n in SIZES}
        self.left = _Operand(a, "a", tile.bm, tile, a_along_k, self.p)
        self.right = _Operand(b, "b", tile.bn, tile, b_along_k, self.p)
        self.full, self.empty = ptx.Barriers(tile.stages), ptx.Barriers(tile.stages)
        self.order = ptx.Barriers(2)
        self.steps = (self.p["k"] + (tile.bk - 1)) // tile.bk
        with lang.if_(lang.local_id() == 0):
            for stage in range(tile.stages):
                self.full.init(stage, 1)
                self.empty.init(stage, 1 if tile.turns else tile.consumers)
            for consumer in range(2):
                self.order.init(consumer, 1)
            ptx.init_fence()
        lang.barrier()

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """Batch, first row and first column of a tile."""
        return tile_place(self.p, number, self.tile.bm, self.tile.bn)


def _wgmma(
    *, tile: WgmmaTile, a_along_k: bool, b_along_k: bool, staged: bool, words: tuple[str, ...],
    activation: str, a: Any, b: Any, y: Any, **extra: Any,
) -> None:  # fmt: skip
    from centella.lang import ptx

    shared = _Shared(tile, a, b, a_along_k, b_along_k)
    stored = _Staged(y, tile, shared.p) if staged else _Stored(y, shared.p)
    fewer, more = REGISTERS[tile.consumers]
    with ptx.role(0, WARPGROUP, registers=fewer), lang.if_(lang.local_id() == 0):
        _produce(shared)
    with ptx.role(WARPGROUP, tile.consumers * WARPGROUP, registers=more):
        _consume(shared, stored, activation, extra, words)


def _produce(shared: _Shared) -> None:
    """Have the tiles of all steps copied, one after the other, as stages become free."""
    from centella.lang import ptx

    tile = shared.tile
    ring = Ring(tile.stages)
    for number in lang.range(lang.group_id(), lang.num_groups(), ptx.grid()):
        batch, row, column = shared.place(number)
        for step in lang.range(shared.steps):
            stage = ring.stage.get()
            shared.empty.wait(stage, ring.parity ^ 1)
            shared.full.expect(stage, tile.stage_bytes)
            shared.left.load(row, step * tile.bk, batch, stage, shared.full)
            shared.right.load(column, step * tile.bk, batch, stage, shared.full)
            ring.advance()


def _consume(
    shared: _Shared, stored: _Stored | _Staged, activation: str, extra: dict[str, Any],
    words: tuple[str, ...],
) -> None:  # fmt: skip
    """Multiply what has arrived, tile by tile, and finish each."""
    from centella.lang import ptx

    tile, steps = shared.tile, shared.steps
    ring = Ring(tile.stages)
    mine = ptx.warpgroup() - 1
    first, every = lang.group_id(), ptx.grid()
    turn = lang.var(1 - mine)  # the first one's turn is at once
    down: Any = mine * M
    if tile.turns:
        first, every, down = first + mine * every, every * 2, 0
        ring.move(mine * steps)
    sums = [ptx.Fragment(f32, (M, tile.bn)) for _ in range(tile.rows // M)]
    leader = lang.local_id() % WARPGROUP == 0
    for number in lang.range(first, lang.num_groups(), every):
        batch, row, column = shared.place(number)
        if tile.turns:  # parities tell one round from the next, not which: nobody is two ahead
            shared.order.wait(mine, turn)
            turn.set(turn ^ 1)
        last = _multiply(shared, ring, sums, down, leader)
        if tile.turns:
            with lang.if_(leader):
                shared.order.arrive(1 - mine)
            ring.move(steps)
        ptx.wgmma_wait(0)
        with lang.if_(leader):
            shared.empty.arrive(last)
        for columns in range(0, tile.bn, tile.staged or tile.bn):
            at = (row + down, column, batch)
            done = _Finish(sums, at, columns, tile, shared.p, activation, extra, words)
            stored.take(done, mine, leader)
    stored.close(leader)


def _multiply(shared: _Shared, ring: Ring, sums: list[Any], down: Any, leader: Any) -> Any:
    """The steps of a tile; the stage of the last one, whose products are still under way."""
    from centella.lang import ptx

    left, right = shared.left, shared.right
    before = lang.var(0, u32)  # the stage that is being read
    for step in lang.range(shared.steps):
        stage = ring.stage.get()
        shared.full.wait(stage, ring.parity)
        ptx.wgmma_fence()
        for k in range(0, shared.tile.bk, K):
            for i, held in enumerate(sums):
                ptx.wgmma(
                    held, left.ring, left.start(down + i * M, k, stage),
                    right.ring, right.start(0, k, stage),
                    a_along_k=left.along_k, b_along_k=right.along_k,
                    accumulate=step > 0 if k == 0 else True,
                )  # fmt: skip
        ptx.wgmma_commit()
        ptx.wgmma_wait(1)
        with lang.if_(leader & (step > 0)):
            shared.empty.arrive(before)
        before.set(stage)
        ring.advance()
    return before


class _Finish:
    """The epilogue of a tile's columns: of eight a thread has two neighbours in two rows."""

    def __init__(
        self, sums: list[Any], at: tuple[Any, Any, Any], columns: int, tile: WgmmaTile,
        p: dict[str, Any], activation: str, extra: dict[str, Any], words: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.words = words
        self.row, self.column, self.batch = at
        self.sums, self.p, self.activation, self.extra = sums, p, activation, extra
        self.columns = range(columns, columns + (tile.staged or tile.bn), 8)

    def stage(self, ring: Any, slot: Any) -> None:
        """Write all to shared memory; past the edges are the last row's and column's operands."""
        p = self.p
        line, lane = self.sums[0].place(0)[0], lang.local_id() % 32
        for j in self.columns:
            across = self.sums[0].place(j // 2)[1]
            last = lang.maximum(p["n"], 2) - 2 if self.words else p["n"] - 1
            column = lang.minimum(self.column + across, last)
            finish = Epilogue(self.activation, self.extra, column, 2, p["n"], self.words)
            chunk = ring.chunk(line, (j - self.columns.start) // 8, slot)
            for i, held in enumerate(self.sums):
                for pair in (j // 2, j // 2 + 2):
                    below = i * M + pair // 2 % 2 * 8
                    row = lang.minimum(self.row + line + below, p["m"] - 1)
                    out = finish([held[pair], held[pair + 1]], row)
                    ring.store_pair(chunk + ring.down(below), lane % 4, out)


class _Stored:
    """Results that leave from the registers, word by word: what is inside of C."""

    def __init__(self, y: Any, p: dict[str, Any]) -> None:
        self.y, self.p = y, p

    def take(self, whole: _Finish, mine: Any, leader: Any) -> None:
        """Write columns of a tile."""
        p = self.p
        for j in whole.columns:
            column = whole.column + whole.sums[0].place(j // 2)[1]
            with lang.if_(column < p["n"]):
                finish = Epilogue(whole.activation, whole.extra, column, 2, p["n"])
                for i, held in enumerate(whole.sums):
                    for pair in (j // 2, j // 2 + 2):
                        row = whole.row + (i * M + held.place(pair)[0])
                        with lang.if_(row < p["m"]):
                            out = finish([held[pair], held[pair + 1]], row)
                            place = whole.batch * p["sy"] + row * p["ldy"] + column
                            store_words(self.y, place, out, column, p["n"])

    def close(self, leader: Any) -> None:
        """Nothing is under way."""


class _Staged:
    """Results on their way through shared memory: each consumer has a place of its own there."""

    def __init__(self, y: Any, tile: WgmmaTile, p: dict[str, Any]) -> None:
        from centella.lang import ptx

        self.ring = ptx.SharedTile(y.dtype, (tile.consumers, tile.rows, tile.staged))
        extents = (p["n"], p["m"], lang.parameter("batches", u32))
        self.map = ptx.TensorMap(y, self.ring, extents, (p["ldy"], p["sy"]))

    def close(self, leader: Any) -> None:
        """The last ones leave before the group ends."""
        from centella.lang import ptx

        with lang.if_(leader):
            ptx.tma_store_wait(0)

    def take(self, whole: _Finish, mine: Any, leader: Any) -> None:
        """Write columns of a tile there, once the last ones have left, and have them copied."""
        from centella.lang import ptx

        with lang.if_(leader):
            ptx.tma_store_wait(0)
        ptx.warpgroup_barrier()
        whole.stage(self.ring, mine)
        ptx.async_fence()
        ptx.warpgroup_barrier()
        with lang.if_(leader):
            at = (whole.column + whole.columns.start, whole.row, whole.batch)
            ptx.tma_store(self.map, at, mine)
            ptx.tma_store_commit()


wgmma: Kernel = Kernel(_wgmma, workgroup=384, name="wgmma")
