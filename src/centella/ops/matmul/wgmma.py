"""The tiled product by warpgroups, for f16 and bf16 on Hopper (PTX for sm_90a alone).

A group stays on its multiprocessor and takes tiles of C in turn. Its first warpgroup is the
producer: one thread has tiles of A and B copied into a ring of `stages` in shared memory, as far
ahead as there is room. The others are consumers, each with 64 rows of the tile of C as sums in
its registers; they multiply what has arrived and release the stage. Two barriers a stage tell
that it is full, and that all consumers have read it; nobody else waits for anybody.

Copies write zeros past the edges of A and B, so tails of k, m and n are exact. Either operand may
lie along k or across it: the descriptor of its tile says so. Rows start on 16 bytes, which copies
need; products of other operands are those of `mma`.

A residual is brought where the results of its tile will lie, while products are under way: loaded
behind them it is a microsecond away, for every part that there are registers for.

With a gate the columns of a tile come from both halves of B, as two boxes beside each other, so
that a thread has the sums of a gate and of what it multiplies, and half as many results leave.

Tiles of one width seldom are as many as the multiprocessors, or twice, or three times as many, and
those without one in the last round wait for the others. So the last columns of C may have narrower
tiles, of the width and the number that make the longest round shortest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Lowered
from centella.op.variant import Variant
from centella.ops.matmul.mma import MMA, preferred
from centella.ops.matmul.problem import aligned
from centella.ops.matmul.product import Constants, Product, Scalars, tiles_launch
from centella.ops.matmul.results import Finish, K, M, Staged, Stored
from centella.ops.matmul.tiled import tile_place
from centella.ops.matmul.wgmma_tiles import WARPGROUP, WgmmaTile, wgmma_tile_of, widths_of
from centella.ops.ring import Ring
from centella.specs import Caps

REGISTERS = {1: (24, 240), 2: (40, 232)}  # producer, consumer; by consumers (one: in tests)
SIZES = ("m", "n", "k", "lda", "ldb", "ldy", "sa", "sb", "sy", "tiles_m", "tiles_n")
LAST = ("wide", "tiles_last")  # tiles of the first width; across the last columns


class OperandRing:
    """One operand's ring of tiles, the maps that fill it, and where products find their factor.

    Of B with a gate a tile is two boxes, one below the other. Narrower tiles have boxes of fewer
    rows.
    """

    def __init__(
        self, source: Any, name: str, rows: int, tile: WgmmaTile, along_k: bool, p: dict[str, Expr]
    ) -> None:
        self.along_k: bool = along_k
        # From box to box, in memory.
        self.apart: Expr | None = p["n"] if tile.gated and name == "b" else None
        self.boxes: int = 1 if self.apart is None else 2
        shape = (rows, tile.bk) if along_k else (tile.bk, rows)
        self.ring: Any = lang.ptx.SharedTile(source.dtype, (tile.stages, *shape))
        across = p["m" if name == "a" else "n"]
        if self.apart is not None:
            across = lang.parameter("both", u32)
        self.batches: Any = lang.parameter(f"batches_{name}", u32)
        extents = (p["k"], across, self.batches) if along_k else (across, p["k"], self.batches)
        pitches = p[f"ld{name}"], p[f"s{name}"]
        narrower = [t.bn for t in tile.widths[1:]] if name == "b" else []
        boxes = [n // self.boxes for n in (rows, *narrower)] if along_k else [None]
        self.maps: list[Any] = [
            lang.ptx.TensorMap(source, self.ring, extents, pitches, box) for box in boxes
        ]

    def load(
        self, row: Any, k: Any, batch: Operand, stage: Any, full: Any, width: int = 0
    ) -> None:  # fmt: skip
        """Have the tile from a row and a k on copied to a stage; `width`: the number of its map."""
        source = self.maps[width]
        for box in range(self.boxes):
            at = (k, row) if self.along_k else (row, k)
            corner = (*at, lang.minimum(batch, self.batches - 1))
            lang.ptx.tma_load(source, corner, stage, full, stage, row=box * source.rows)
            row = row if self.apart is None else row + self.apart

    def start(self, row: Any, k: int, stage: Any) -> Any:
        """Where a factor begins: a row, a k."""
        return self.ring.start(row, k, stage) if self.along_k else self.ring.start(k, row, stage)


class _Shared:
    """What both roles see: operands, barriers, sizes. `order` has the consumers take turns.

    At `come` residuals count that are brought.
    """

    def __init__(
        self, tile: WgmmaTile, a: Any, b: Any, a_along_k: bool, b_along_k: bool, brought: bool
    ) -> None:
        self.tile = tile
        names = (*SIZES, *LAST) if tile.last else SIZES
        self.p: dict[str, Any] = {n: lang.parameter(n, u32) for n in names}
        self.left = OperandRing(a, "a", tile.bm, tile, a_along_k, self.p)
        self.right = OperandRing(b, "b", tile.bn, tile, b_along_k, self.p)
        self.full, self.empty = lang.ptx.Barriers(tile.stages), lang.ptx.Barriers(tile.stages)
        self.order: Any = lang.ptx.Barriers(2) if tile.turns else None
        self.come: Any = lang.ptx.Barriers(tile.consumers) if brought else None
        self.steps = (self.p["k"] + (tile.bk - 1)) // tile.bk
        with lang.if_(lang.local_id() == 0):
            for stage in range(tile.stages):
                self.full.init(stage, 1)
                self.empty.init(stage, 1 if tile.turns else tile.consumers)
            if self.order is not None:
                for consumer in range(2):
                    self.order.init(consumer, 1)
            if self.come is not None:
                for consumer in range(tile.consumers):
                    self.come.init(consumer, 1)
            lang.ptx.init_fence()
        lang.barrier()

    def tiles(self, first: Any, every: Any, width: int) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Batch, first row and first column of the tiles of a width, of every so many from one on.

        Tiles of all widths are numbered through, the wide ones first.
        """
        tile, p = self.tile.widths[width], self.p
        wide = p["wide"] if self.tile.last else lang.num_groups()
        if width == 0:
            for number in lang.range(first, wide, every):
                yield tile_place(p, number, tile.bm, tile.across)
            return
        before = (lang.maximum(wide, first) - first + (every - 1)) // every
        begin, sizes = p["tiles_n"] * self.tile.across, {**p, "tiles_n": p["tiles_last"]}
        for number in lang.range(first + before * every, lang.num_groups(), every):
            batch, row, column = tile_place(sizes, number - wide, tile.bm, tile.across)
            yield batch, row, column + begin


def _wgmma(
    *, tile: WgmmaTile, a_along_k: bool, b_along_k: bool, staged: bool, brought: bool,
    words: tuple[str, ...], activation: str, a: Argument, b: Argument, y: Argument,
    **extra: Argument,
) -> None:  # fmt: skip
    shared = _Shared(tile, a, b, a_along_k, b_along_k, brought)
    stored: Stored | Staged = Stored(y, shared.p)
    if staged:
        residual = extra["residual"] if brought else None
        stored = Staged(y, tile.staging, tile.places, shared.p, residual, shared.come)
    fewer, more = REGISTERS[tile.consumers]
    with lang.ptx.role(0, WARPGROUP, registers=fewer), lang.if_(lang.local_id() == 0):
        _produce(shared)
    with lang.ptx.role(WARPGROUP, tile.consumers * WARPGROUP, registers=more):
        _consume(shared, stored, activation, extra, words)


def _produce(shared: _Shared) -> None:
    """Have the tiles of all steps copied, one after the other, as stages become free."""
    tile, ring = shared.tile, Ring(shared.tile.stages)
    for width, own in enumerate(tile.widths):
        for batch, row, column in shared.tiles(lang.group_id(), lang.ptx.grid(), width):
            for step in lang.range(shared.steps):
                stage, k = ring.stage.get(), step * tile.bk
                shared.empty.wait(stage, ring.parity ^ 1)
                shared.full.expect(stage, own.stage_bytes)
                shared.left.load(row, k, batch, stage, shared.full)
                shared.right.load(column, k, batch, stage, shared.full, width)
                ring.advance()


AHEAD = 128  # columns of a tile whose residual a thread has registers for beside the sums


def _consume(
    shared: _Shared, stored: Stored | Staged, activation: str, extra: dict[str, Any],
    words: tuple[str, ...],
) -> None:  # fmt: skip
    """Multiply what has arrived, tile by tile, and finish each."""
    tile, steps = shared.tile, shared.steps
    ring = Ring(tile.stages)
    mine = lang.ptx.warpgroup() - 1
    first, every = lang.group_id(), lang.ptx.grid()
    turn = lang.var(1 - mine)  # the first one's turn is at once
    down: Any = mine * M
    if tile.turns:
        first, every, down = first + mine * every, every * 2, 0
        ring.move(mine * steps)
    leader = lang.local_id() % WARPGROUP == 0
    ahead = "residual" in words and isinstance(stored, Staged) and not tile.turns
    for width, own in enumerate(tile.widths):
        sums = [lang.ptx.Fragment(f32, (M, own.bn)) for _ in range(tile.rows // M)]
        together = tile.staged or own.across  # columns
        for batch, row, column in shared.tiles(first, every, width):
            stored.bring(row, column, own.across, mine, leader)
            if tile.turns:  # parities tell one round from the next, not which: nobody is two ahead
                shared.order.wait(mine, turn)
                turn.set(turn ^ 1)
            parts = []
            for first_column in range(0, own.across, together):
                columns = range(first_column, first_column + together, 8)
                at = (batch, row + down, column)
                gated = tile.gated
                parts.append(Finish(*at, sums, columns, shared.p, activation, extra, words, gated))
            if ahead and own.across <= AHEAD:
                for part in parts:
                    part.ask()
            last = multiply(shared, ring, sums, down, leader)
            if tile.turns:
                with lang.if_(leader):
                    shared.order.arrive(1 - mine)
                ring.move(steps)
            stored.begin(parts)
            lang.ptx.wgmma_wait(0)
            with lang.if_(leader):
                shared.empty.arrive(last)
            for number, part in enumerate(parts):
                stored.take(number, part, mine, leader)
    stored.close(leader)


def multiply(shared: Any, ring: Ring, sums: list[Any], down: Any, leader: Any) -> Any:
    """The steps of a tile; the stage of the last one, whose products are still under way."""
    left, right = shared.left, shared.right
    before = lang.var(0, u32)  # the stage that is being read
    for step in lang.range(shared.steps):
        stage = ring.stage.get()
        shared.full.wait(stage, ring.parity)
        lang.ptx.wgmma_fence()
        for k in range(0, shared.tile.bk, K):
            for i, fragment in enumerate(sums):
                lang.ptx.wgmma(
                    fragment, left.ring, left.start(down + i * M, k, stage),
                    right.ring, right.start(0, k, stage),
                    a_along_k=left.along_k, b_along_k=right.along_k,
                    accumulate=step > 0 if k == 0 else True,
                )  # fmt: skip
        lang.ptx.wgmma_commit()
        lang.ptx.wgmma_wait(1)
        with lang.if_(leader & (step > 0)):
            shared.empty.arrive(before)
        before.set(stage)
        ring.advance()
    return before


wgmma: Kernel = Kernel(_wgmma, workgroup=384, name="wgmma")


# -- how it is launched ---------------------------------------------------------------------------


def _in_words(product: Product) -> tuple[str, ...]:
    """The operands of the epilogue whose columns may be loaded two at a time."""
    if product.problem.n % 2:
        return ()
    extras = zip(product.names, product.specs[2:-1], strict=True)
    pitches = {"residual": product.residual_pitch}
    return tuple(n for n, s in extras if aligned(s, pitches.get(n, 0), 0))


def _stageable(product: Product) -> bool:
    """Whether results may leave through shared memory: 16-bit ones, whose rows copies reach.

    With an activation and a residual, addresses there are what the registers have no room for.
    """
    problem, y = product.problem, product.specs[-1]
    light = not (product.activation and "residual" in product.names)
    return light and y.dtype.itemsize == 2 and aligned(y, problem.ldy, problem.sy)


def _copied(product: Product) -> bool:
    """Whether a residual may be brought there: one that copies reach, as wide as the results."""
    if "residual" not in product.names or not _stageable(product):
        return False
    residual = product.specs[2 + product.names.index("residual")]
    same = residual.dtype is product.specs[-1].dtype
    return same and aligned(residual, product.residual_pitch, 0)


def _launches(product: Product, tile: WgmmaTile, caps: Caps) -> Lowered:
    """Of rows that are off 16 bytes, or of none, those of `mma`."""
    if not product.whole or not product.problem.k:
        return MMA.lower(product, caps)
    problem, staged = product.problem, tile.staged > 0 and _stageable(product)
    constants: Constants = (
        ("a_along_k", problem.a_along_k),
        ("activation", product.activation),
        ("b_along_k", problem.b_along_k),
        ("brought", staged and tile.whole and tile.turns and _copied(product)),
        ("staged", staged),
        ("tile", tile),
        ("words", _in_words(product)),
    )
    more: Scalars = (  # of what is repeated there is one
        ("batches", problem.batch),
        ("batches_a", problem.batch if problem.sa else 1),
        ("batches_b", problem.batch if problem.sb else 1),
    )
    if tile.gated:
        more += (("both", 2 * problem.n),)
    size = (tile.bm, tile.across)
    _, wide, narrower = widths_of(tile, problem)
    if tile.last:
        more += ("wide", -(-problem.m // tile.bm) * wide), ("tiles_last", narrower)
    threads, across = tile.threads, (wide, narrower)
    return Lowered((tiles_launch(wgmma, product, size, threads, constants, more, across),))


def _tile(product: Product, caps: Caps) -> WgmmaTile | None:
    return wgmma_tile_of(product.problem, product.dtypes, caps, product.gated, _copied(product))


WGMMA: Variant[Product, WgmmaTile] = Variant("wgmma", _tile, _launches, preferred)
