"""The tiled product on tensor cores, for f16 and bf16 on NVIDIA GPUs from sm_80 on (PTX alone).

A group computes a `bm x bn` tile of C, a warp `wm x wn` of it in fragments of f32 sums. Tiles of A
and B of depth `bk` are in a ring of `stages` in shared memory: while one is multiplied, the others
are on their way by `cp_async`, one group a stage. One barrier a step: it shows everybody what has
arrived, and says that the stage which is filled next has been read by all.

Either operand may lie along k or across it; `ldmatrix` transposes what lies across. Past the depth
both are zeros, whatever memory holds there; rows past the last are the last one's, and of them
nothing is stored. Operands whose rows do not start on 16 bytes go through registers, element by
element: right, not quick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import DType, bf16, f16, f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Lowered
from centella.op.variant import Variant
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.product import Constants, Product, tiles_launch
from centella.ops.matmul.tiled import store_words, tile_of_group
from centella.specs import Caps

DTYPES = (f16, bf16)
WARP = 32
PER_CHUNK = 8  # elements of 16 bytes
M, N, K = 16, 8, 16  # of a product of fragments


class MmaTile(Struct, frozen=True):
    """Tile sizes: of the group, its depth, of a warp; stages of the ring."""

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return self.bm // self.wm * (self.bn // self.wn) * WARP

    @property
    def shared_bytes(self) -> int:
        """Workgroup memory: both operands, in every stage."""
        return 2 * self.stages * self.bk * (self.bm + self.bn)


MMA_TILES = (MmaTile(128, 128, 32, 64, 64, 4), MmaTile(64, 64, 32, 32, 32, 2))


class Factor:
    """One operand's way from global memory through the ring into fragments.

    A line is a row of A or a column of B, with all of its k.

    Args:
        rows: lines of the tile.
        along_k: k is the contiguous dimension in memory and in the tile; else the lines are.
        vector: whether what is contiguous starts on 16 bytes each time.
        start: the operand's first element; pitch: elements from one contiguous run to the next.
        depth: the extent of k.
        first, extent: the tile's first line, and how many there are: past them comes the last one.
        lines: which line in memory a row of the tile is, in place of the one after `first`.
        gated: eight rows of the tile are of the first half in memory, which has `extent` lines,
            eight of the second, in turn.
        other: the second half, where it is an operand by itself, which lies as this one does.
    """

    def __init__(
        self, source: Any, rows: int, tile: MmaTile, *, along_k: bool, vector: bool,
        start: Operand, pitch: Operand, depth: Operand, first: Any = 0, extent: Any = 0,
        lines: Callable[[Operand], Operand] | None = None, gated: bool = False, other: Any = None,
    ) -> None:  # fmt: skip
        self.source: Any = source
        self.along_k: bool = along_k
        self.vector: bool = vector
        self.depth: Operand = depth
        self.bk: int = tile.bk
        self.last: Any = lang.maximum(depth, 1) - 1  # of an empty product, the first is read
        self.pitch: Operand = pitch
        self.extent: Any = extent
        shape = (rows, tile.bk) if along_k else (tile.bk, rows)
        self.ring: Any = lang.ptx.SharedTile(source.dtype, (tile.stages, *shape))
        across = shape[1] // PER_CHUNK
        down, left = divmod(tile.threads, across)
        assert left == 0 and down % 8 == 0 and shape[0] % down == 0, "threads share the chunks"
        thread = lang.local_id()
        row, column = thread // across, thread % across
        self.chunk: Any = self.ring.chunk(row, column)
        self.other: Any = other
        self.of_other: Any = None if other is None else row // N % 2 == 1
        assert other is None or down % (2 * N) == 0, "a thread copies from one of the two"
        self.pieces: list[tuple[int, Any, Any]] = []  # chunks below the first; k; fixed address
        for i in range(shape[0] // down):
            at, below = row + i * down, self.ring.down(i * down)
            if along_k:
                inner = at // (2 * N) * N + at % N if gated else at
                line = lines(at) if lines else lang.minimum(first + inner, extent - 1)
                line = line + at // N % 2 * extent if gated and other is None else line
                fixed = start + line * pitch
                self.pieces.append((below, column * PER_CHUNK, fixed))
            else:
                self.pieces.append((below, at, first + column * PER_CHUNK))
        self.start: Operand = start

    def fetch(self, step: Any, stage: Any) -> None:
        """Start this thread's copies of the tile of a step; past the depth they are zeros."""
        if self.other is None:
            self._fetch(self.source, step, stage)
            return
        with lang.if_(self.of_other):
            self._fetch(self.other, step, stage)
        with lang.else_():
            self._fetch(self.source, step, stage)

    def _fetch(self, source: Any, step: Any, stage: Any) -> None:
        chunk = self.chunk + self.ring.at_stage(stage)
        for below, k, fixed in self.pieces:
            at = step * self.bk + k
            if not self.vector:
                self.ring.store(chunk + below, self._elements(source, at, fixed))
                continue
            left = lang.select(at < self.depth, self.depth - at, 0)
            if self.along_k:
                size = lang.minimum(left, PER_CHUNK) * 2
                where = fixed + lang.minimum(at, self.last // PER_CHUNK * PER_CHUNK)
            else:
                size = lang.minimum(left, 1) * 16
                row = lang.minimum(fixed, (self.extent - 1) // PER_CHUNK * PER_CHUNK)
                where = self.start + lang.minimum(at, self.last) * self.pitch + row
            lang.ptx.cp_async(self.ring, chunk + below, source, where, size=size)

    def _elements(self, source: Any, at: Any, fixed: Any) -> list[Any]:
        """The 8 values of a chunk, one by one."""
        values = []
        for j in range(PER_CHUNK):
            k = at + j if self.along_k else at
            inside = lang.minimum(k, self.last)
            if self.along_k:
                where = fixed + inside
            else:
                row = lang.minimum(fixed + j, self.extent - 1)
                where = self.start + inside * self.pitch + row
            values.append(lang.select(k < self.depth, source[where], 0.0))
        return values

    def places(self, first: Operand, count: int, swapped: bool) -> list[list[tuple[Expr, int]]]:
        """Where `ldmatrix` finds 16 rows by 16 of k, from row `first` on: for each k, each sixteen.

        Lanes 8 j to 8 j + 7 point at matrix j of four. In A's registers the next eight rows come
        before the next eight of k; in those of two fragments of B it is the other way round
        (`swapped`).

        Returns:
            Pairs: a chunk, and what to add to it (a number, so that addresses share a register).
        """
        lane = lang.local_id() % WARP
        low, high = lane // 8 % 2, lane // 16
        eight_rows, eight_k = (high, low) if swapped else (low, high)
        starts: list[list[tuple[Expr, int]]] = []
        for kk in range(self.bk // K):
            line: list[tuple[Expr, int]] = []
            for i in range(count):
                if self.along_k:
                    row = first + eight_rows * 8 + lane % 8
                    chunk = self.ring.chunk(row, eight_k + 2 * kk)
                    line.append((chunk, self.ring.down(16 * i)))
                else:
                    column = first // PER_CHUNK + eight_rows + 2 * i
                    chunk = self.ring.chunk(eight_k * 8 + lane % 8, column)
                    line.append((chunk, self.ring.down(K * kk)))
            starts.append(line)
        return starts

    def load(self, start: tuple[Expr, int], stage: Any, *fragments: Any) -> None:
        """One fragment of A or two of B."""
        chunk, below = start
        at = chunk + below + self.ring.at_stage(stage)
        lang.ptx.ldmatrix(self.ring, at, *fragments, trans=not self.along_k)


def multiplied(
    left: Factor, right: Factor, tile: MmaTile, depth: Operand, copies: bool
) -> tuple[list[list[Any]], Expr, Expr]:
    """A tile's sums, in fragments; and the first row and column of this warp's.

    Args:
        copies: whether an operand comes by `cp_async`.
    """
    warp = lang.local_id() // WARP
    down = warp % (tile.bm // tile.wm) * tile.wm
    across = warp // (tile.bm // tile.wm) * tile.wn
    rows, columns = tile.wm // M, tile.wn // N
    places_a = left.places(down, rows, swapped=False)
    places_b = right.places(across, columns // 2, swapped=True)
    sums = [[lang.ptx.Fragment(f32, (M, N)) for _ in range(columns)] for _ in range(rows)]
    for fragment in (f for line in sums for f in line):
        fragment.fill(0.0)
    heights = [lang.ptx.Fragment(left.source.dtype, (M, K)) for _ in range(rows)]
    widths = [lang.ptx.Fragment(right.source.dtype, (K, N)) for _ in range(columns)]
    ahead = tile.stages - 1
    for first in range(ahead):
        left.fetch(lang.const(first, u32), lang.const(first, u32))
        right.fetch(lang.const(first, u32), lang.const(first, u32))
        if copies:
            lang.ptx.cp_async_commit()
    for step in lang.range((depth + (tile.bk - 1)) // tile.bk):
        if copies:
            lang.ptx.cp_async_wait(ahead - 1)
        lang.barrier()
        left.fetch(step + ahead, (step + ahead) % tile.stages)
        right.fetch(step + ahead, (step + ahead) % tile.stages)
        if copies:
            lang.ptx.cp_async_commit()
        stage = step % tile.stages
        for line_a, line_b in zip(places_a, places_b, strict=True):
            for start, fragment in zip(line_a, heights, strict=True):
                left.load(start, stage, fragment)
            for n, start in enumerate(line_b):
                right.load(start, stage, *widths[2 * n : 2 * n + 2])
            for line, height in zip(sums, heights, strict=True):
                for fragment, width in zip(line, widths, strict=True):
                    lang.ptx.mma_sync(fragment, height, width)
    return sums, down, across


def _mma(
    *, tile: MmaTile, a_along_k: bool, b_along_k: bool, vector_a: bool, vector_b: bool,
    activation: str, a: Argument, b: Argument, y: Argument, gated: bool = False, **extra: Argument,
) -> None:  # fmt: skip
    halves = 1 + gated
    p, batch, row0, column0 = tile_of_group(tile.bm, tile.bn // halves)
    left = Factor(
        a, tile.bm, tile, along_k=a_along_k, vector=vector_a, start=batch * p["sa"],
        pitch=p["lda"], depth=p["k"], first=row0, extent=p["m"],
    )  # fmt: skip
    right = Factor(
        b, tile.bn, tile, along_k=b_along_k, vector=vector_b, start=batch * p["sb"],
        pitch=p["ldb"], depth=p["k"], first=column0, extent=p["n"], gated=gated,
    )  # fmt: skip
    sums, down, across = multiplied(left, right, tile, p["k"], vector_a or vector_b)
    columns0 = column0 + across // halves
    _finish(sums, row0 + down, columns0, batch, p, y, activation, extra, gated)


def _finish(
    sums: list[list[Any]], row0: Any, column0: Any, batch: Operand, p: dict[str, Any], y: Any,
    activation: str, extra: dict[str, Argument], gated: bool,
) -> None:  # fmt: skip
    """The epilogue and the store: of a fragment a thread has two neighbours in two rows."""
    halves = 1 + gated
    for j in range(0, len(sums[0]), halves):
        column = column0 + (sums[0][j].place(0)[1] + j // halves * N)
        with lang.if_(column < p["n"]):
            finish = Epilogue(activation, extra, column, 2, p["n"], gated=gated)
            for i, line in enumerate(sums):
                for pair in (0, 2):
                    row = row0 + (line[j].place(pair)[0] + i * M)
                    with lang.if_(row < p["m"]):
                        own = [f[pair + e] for f in line[j : j + halves] for e in range(2)]
                        out = finish(own, row)
                        start = batch * p["sy"] + row * p["ldy"] + column
                        store_words(y, start, out, column, p["n"])


def takes(dtypes: tuple[DType, DType]) -> bool:
    """Whether the tensor cores multiply these."""
    return dtypes[0] is dtypes[1] and dtypes[0] in DTYPES


mma: Kernel = Kernel(_mma, workgroup=128, name="mma")


# -- how it is launched ---------------------------------------------------------------------------


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


def _launches(product: Product, tile: MmaTile, caps: Caps) -> Lowered:
    problem, (vector_a, vector_b) = product.problem, product.rows
    constants: Constants = (
        ("a_along_k", problem.a_along_k),
        ("activation", product.activation),
        ("b_along_k", problem.b_along_k),
        ("tile", tile),
        ("vector_a", vector_a),
        ("vector_b", vector_b),
        *((("gated", True),) if product.gated else ()),
    )
    size = tile.bm, tile.bn // (1 + product.gated)
    return Lowered((tiles_launch(mma, product, size, tile.threads, constants),))


def _tile(product: Product, caps: Caps) -> MmaTile | None:
    return mma_tile_of(product.dtypes, caps, product.whole)


def preferred(product: Product, caps: Caps) -> bool:
    """Wherever tensor cores are worth it."""
    return caps.fast_tensor_cores


MMA: Variant[Product, MmaTile] = Variant("mma", _tile, _launches, preferred)
