"""The tiled product: one kernel source for every shape, layout, storage type and epilogue.

A group computes a `bm x bn` tile of C, a thread `tm x tn` of it in registers. Tiles of A and B of
depth `bk` lie in shared memory with k outermost, twice: while one is multiplied, the next is on its
way from global memory through registers. One barrier a step. (A `rolled` tile lies there once,
between two barriers.)

A thread's rows and columns come in fours, `bm / (tm / 4)` apart, so that the 16-byte shared loads
of a warp touch each bank once; a warp covers 4 x 8 threads of the tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Lowered
from centella.op.variant import Variant
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.parts import added
from centella.ops.matmul.problem import Problem, aligned
from centella.ops.matmul.product import Constants, Product, tiles_launch
from centella.ops.matmul.table import STAGES, TILES, Tile, row_of
from centella.ops.quant.numbers import number
from centella.specs import Caps, make_spec

SPLITS = (2, 4, 8)
PART = 16  # a part of the depth is a multiple: whole chunks of 16-bit elements, whole steps
DEEP = 512  # least depth of a part

HALF = 8  # elements a thread fetches at a time, at most: of bytes that is half a chunk


class Factor:
    """One operand's way from global memory to shared memory.

    `along_k`: k is the contiguous dimension in memory; else the tile's rows (m or n) are. `lines`:
    which line of memory a row of the tile is, where that is not the next one; only along k.
    """

    def __init__(
        self, source: Argument, rows: int, tile: Tile, along_k: bool, vector: bool, exact_k: bool,
        start: Any, pitch: Any, first: Any, extent: Any, depth: Any,
        lines: Callable[[Operand], Operand] | None = None,
    ) -> None:  # fmt: skip
        self._source, self._rows, self._tile = source, rows, tile
        self._along_k, self._exact_k = along_k, exact_k
        self._width = min(source.dtype.per_chunk, HALF) if vector else 1
        self._row_words = rows + tile.pad
        self._shared = lang.shared(f32, tile.stages * tile.bk * self._row_words)
        self.buffer_chunks: int = tile.bk * self._row_words // 4  # of shared memory, of a stage
        self._depth = depth
        count, left = divmod(rows * tile.bk, self._width * tile.threads)
        assert tile.rolled or left == 0, "the tile must divide among the threads"
        self._lines = lines
        self._window = (start, pitch, first, extent)
        mine = () if tile.rolled else range(count)
        self._pieces = [self._piece(lang.local_id() + i * tile.threads) for i in mine]

    def copy(self, k0: Any) -> None:
        """The tile that starts at k0 to shared memory, a piece at a time."""
        whole = self._rows * self._tile.bk // self._width
        for index in lang.range(lang.local_id(), whole, self._tile.threads):
            self._pieces = [self._piece(index)]
            self.put(self.fetch(k0), lang.const(0, u32))

    def _piece(self, index: Any) -> Any:
        """(row or k within the tile, k or row within the tile, fixed part of the address)."""
        bk, width = self._tile.bk, self._width
        start, pitch, first, extent = self._window
        if self._along_k:
            row, k = index // (bk // width), index % (bk // width) * width
            line = self._lines(row) if self._lines else lang.minimum(first + row, extent - 1)
            return row, k, start + line * pitch
        k, row = index // (self._rows // width), index % (self._rows // width) * width
        last = (extent - 1) // width * width
        return row, k, (start + lang.minimum(first + row, last), pitch)

    def fetch(self, k0: Any) -> list[Any]:
        """This thread's pieces of the tile that starts at k0; zeros past the depth."""
        fetched: list[Any] = []
        end = lang.maximum(self._depth, 1) - 1  # of an empty product, the first element is read
        for _, k, row in self._pieces:
            at = k0 + k
            if self._along_k:
                last = end // self._width * self._width
                where = row + (at if self._exact_k else lang.minimum(at, last))
            else:
                base, pitch = row
                where = base + (at if self._exact_k else lang.minimum(at, end)) * pitch
            values = self._load(where)
            if not self._exact_k:
                step = 1 if self._along_k else 0
                values = [
                    lang.select(at + j * step < self._depth, v, 0.0) for j, v in enumerate(values)
                ]
            fetched.append(values)
        return fetched

    def _load(self, where: Operand) -> list[Expr]:
        """`width` neighbouring elements as f32: a chunk, half a chunk of bytes, or one."""
        if self._width == 1:
            values = [self._source[where]]
        elif self._width == self._source.dtype.per_chunk:
            values = self._source.load(where)
        else:
            whole = self._source.load(where // (2 * HALF) * (2 * HALF))
            upper = (where & HALF) != 0
            values = [
                lang.select(upper, b, a) for a, b in zip(whole[:HALF], whole[HALF:], strict=True)
            ]
        return [number(v) for v in values]

    def put(self, fetched: list[Any], buffer: Any) -> None:
        """Store the pieces into one of the two shared tiles, k outermost.

        Where k is contiguous, threads write single words of one shared chunk. Vulkan and PTX count
        each word as a place of its own; WGSL alone would let a driver write the whole chunk. Chunks
        written whole need four rows of one k in a thread: 5 % slower as PTX, 15 % as WGSL.
        """
        words = buffer * (4 * self.buffer_chunks)
        for (row, k, _), values in zip(self._pieces, fetched, strict=True):
            if self._along_k or self._width == 1:
                for j, v in enumerate(values):
                    self._shared[words + (k + j) * self._row_words + row] = v
            else:
                for j in range(0, self._width, 4):
                    self._shared.store(words + k * self._row_words + row + j, values[j : j + 4])

    def fragment(self, kk: Operand, chunk: Operand, groups: int) -> list[Expr]:
        """This thread's values of one k: `groups` chunks, evenly spaced over the tile."""
        spacing = self._rows // groups // 4
        values: list[Expr] = []
        for g in range(groups):
            at = chunk + (kk * (self._row_words // 4) + g * spacing)
            values += self._shared.load_chunk(at)
        return values


def _gemm(
    *, tile: Tile, a_along_k: bool, b_along_k: bool, vector_a: bool, vector_b: bool, vector_y: bool,
    exact_k: bool, activation: str, a: Argument, b: Argument, y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    p, batch, row0, column0 = tile_of_group(tile.bm, tile.bn)
    left = Factor(a, tile.bm, tile, a_along_k, vector_a, exact_k,
                    batch * p["sa"], p["lda"], row0, p["m"], p["k"])  # fmt: skip
    right = Factor(b, tile.bn, tile, b_along_k, vector_b, exact_k,
                     batch * p["sb"], p["ldb"], column0, p["n"], p["k"])  # fmt: skip
    sums, ty, tx = multiplied(left, (right,), tile, p["k"])
    _finish(sums, tile, row0, column0, ty, tx, batch, p, y, vector_y, activation, extra)


def multiplied(
    left: Factor, rights: tuple[Factor, ...], tile: Tile, depth: Operand
) -> tuple[Any, Expr, Expr]:
    """A thread's sums [tile.tm][tile.tn], as many columns of each right operand; and its fours."""
    ty, tx = thread_in_tile(tile)
    sums = lang.vars(f32, tile.tm, tile.tn, init=0.0)
    zero, groups = lang.const(0, u32), tile.tn // 4 // len(rights)

    def multiply(kk: Any, at_a: Any, at_b: list[Any]) -> None:
        column = left.fragment(kk, at_a, tile.tm // 4)
        row = [v for r, at in zip(rights, at_b, strict=True) for v in r.fragment(kk, at, groups)]
        for i in range(tile.tm):
            for j in range(tile.tn):
                sums[i][j].set(lang.fma(column[i], row[j], sums[i][j]))

    if tile.rolled:
        for k0 in lang.range(zero, depth, tile.bk):
            for operand in (left, *rights):
                operand.copy(k0)
            lang.barrier()
            for at in lang.range(zero, tile.bk):
                multiply(at, ty, [tx for _ in rights])
            lang.barrier()
        return sums, ty, tx
    steps = (depth + (tile.bk * tile.unroll - 1)) // (tile.bk * tile.unroll) * tile.unroll
    for operand in (left, *rights):
        operand.put(operand.fetch(zero), zero)
    lang.barrier()
    for turn in lang.range(zero, steps, tile.unroll):
        for u in range(tile.unroll):
            step = turn + u
            current = lang.const(u, u32) if tile.unroll == STAGES else step & 1
            following = lang.minimum(step + 1, steps - 1) * tile.bk
            ahead = [operand.fetch(following) for operand in (left, *rights)]
            at_a = current * left.buffer_chunks + ty
            at_b = [current * right.buffer_chunks + tx for right in rights]
            for kk in range(tile.bk):
                multiply(kk, at_a, at_b)
            for operand, values in zip((left, *rights), ahead, strict=True):
                operand.put(values, 1 - current)
            lang.barrier()
    return sums, ty, tx


def tile_of_group(bm: int, bn: int) -> tuple[dict[str, Any], Expr, Expr, Expr]:
    """The parameters, and a group's tile: batch, first row and column."""
    p = {n: lang.parameter(n, u32) for n in (
        "m", "n", "k", "lda", "ldb", "ldy", "sa", "sb", "sy", "tiles_m", "tiles_n")}  # fmt: skip
    return p, *tile_place(p, lang.group_id(), bm, bn)


def tile_place(p: dict[str, Expr], number: Operand, bm: int, bn: int) -> tuple[Expr, Expr, Expr]:
    """Batch, first row and first column of a tile.

    Tiles are taken in bands of 8 tile rows, so that B stays in cache.
    """
    per_batch = p["tiles_m"] * p["tiles_n"]
    batch = number // per_batch
    group = number - batch * per_batch
    band = 8 * p["tiles_n"]
    first = group // band * 8
    height = lang.minimum(p["tiles_m"] - first, 8)
    within = group % band
    return batch, (first + within % height) * bm, within // height * bn


def thread_in_tile(tile: Tile) -> tuple[Expr, Expr]:
    """Which fours of rows and columns a thread has: warps of 4 x 8 threads."""
    t = lang.local_id()
    across, down = tile.bn // tile.tn, tile.bm // tile.tm
    if across % 8 or down % 4:
        return t // across, t % across
    warps = across // 8
    ty = (t // 8) % 4 + t // (32 * warps) * 4
    return ty, t % 8 + (t // 32) % warps * 8


def _finish(
    sums: Any, tile: Tile, row0: Operand, column0: Operand, ty: Operand, tx: Operand,
    batch: Operand, p: dict[str, Any], y: Any, vector: bool, activation: str,
    extra: dict[str, Argument],
) -> None:  # fmt: skip
    """The epilogue and the store."""
    groups_m, groups_n = tile.tm // 4, tile.tn // 4
    for g in range(groups_n):
        column = column0 + tx * 4 + g * (tile.bn // groups_n)
        with lang.if_(column < p["n"]):
            finish = Epilogue(activation, extra, column, 4, p["n"])
            for i in range(tile.tm):
                row = row0 + ty * 4 + (i // 4) * (tile.bm // groups_m) + i % 4
                with lang.if_(row < p["m"]):
                    out = finish([sums[i][4 * g + j] for j in range(4)], row)
                    start = batch * p["sy"] + row * p["ldy"] + column
                    _store(y, start, out, column, p["n"], vector)


def _store(y: Argument, start: Any, out: list[Expr], column: Any, n: Any, vector: bool) -> None:
    """Four neighbouring results: as a chunk where rows allow it, else word by word."""
    if vector and y.dtype.per_chunk == 4:
        y.store(start, out)
    else:
        store_words(y, start, out, column, n)


def store_words(y: Argument, start: Any, out: list[Expr], column: Any, n: Any) -> None:
    """Neighbouring results word by word, those past the last column left out."""
    words = y.dtype.per_word
    for j in range(0, len(out), words):
        if j == 0:
            y.store(start, out[:words])
        else:
            with lang.if_(column + j < n):
                y.store(start + j, out[j : j + words])


gemm: Kernel = Kernel(_gemm, workgroup=256, name="gemm", rewritable=True)


# -- how it is launched ---------------------------------------------------------------------------


def fits(tile: Tile, itemsize: int, caps: Caps) -> bool:
    """Whether a device has room for a tile, and its threads share the loads of it evenly.

    They load the 16-byte chunks of either operand's tile; of 1-byte elements, half chunks.
    """
    share = 16 // max(itemsize, 2) * tile.threads
    even = tile.bm * tile.bk % share == 0 and tile.bn * tile.bk % share == 0
    return even and tile.shared_bytes <= caps.max_shared and tile.threads <= caps.max_workgroup


def tile_of(variant: str, itemsize: int, caps: Caps) -> Tile | None:
    """The tile of a variant on a device: the first that fits."""
    tiles = (*row_of(caps).first.get(variant, ()), *TILES[variant])
    return next((tile for tile in tiles if fits(tile, itemsize, caps)), None)


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


def _launches(product: Product, tile: Tile, caps: Caps) -> Lowered:
    """One launch; with few tiles a second, which adds the parts of a split depth."""
    problem, (a, b, *_) = product.problem, product.specs
    splits = splits_of(problem, tile, caps)
    if splits == 1:
        return Lowered((_launch(product, tile),))
    parts = make_spec((splits, problem.m, problem.n), f32, 16)
    depth = problem.k // splits
    inner = Product(
        replace(
            problem, batch=splits, k=depth, ldy=parts.strides[1], sy=parts.strides[0],
            sa=depth * (1 if problem.a_along_k else problem.lda),
            sb=depth * (1 if problem.b_along_k else problem.ldb),
        ),
        (a, b, parts),
    )  # fmt: skip
    return added(product, _launch(inner, tile), parts, splits)


def _launch(product: Product, tile: Tile) -> Call:
    problem, (a, b, *_), y = product.problem, product.specs, product.specs[-1]
    constants: Constants = (
        ("a_along_k", problem.a_along_k),
        ("activation", product.activation),
        ("b_along_k", problem.b_along_k),
        ("exact_k", problem.k % (tile.bk * tile.unroll) == 0 and problem.k > 0),
        ("tile", tile),
        ("vector_a", aligned(a, problem.lda, problem.sa)),
        ("vector_b", aligned(b, problem.ldb, problem.sb)),
        ("vector_y", aligned(y, problem.ldy, problem.sy)),
    )
    return tiles_launch(gemm, product, (tile.bm, tile.bn), tile.threads, constants)


def _variant(name: str) -> Variant[Product, Tile]:
    """The largest tile with enough groups is preferred; the smallest takes what is left."""

    def tile(product: Product, caps: Caps) -> Tile | None:
        return tile_of(name, min(d.itemsize for d in product.dtypes), caps)

    def preferred(product: Product, caps: Caps) -> bool:
        problem, row, fitting = product.problem, row_of(caps), tile(product, caps)
        if fitting is None or name == "small":
            return fitting is not None
        tiles = tiles_of(problem, fitting) * splits_of(problem, fitting, caps)
        # To compile a tile for other lengths takes a CPU longer than to compute rows for nothing.
        small = problem.m <= fitting.bm // 2 and not row.rolled
        return tiles >= row.enough and not (small or problem.n <= fitting.bn // 2)

    return Variant(name, tile, _launches, preferred)


TILED: tuple[Variant[Product, Tile], ...] = tuple(map(_variant, TILES))
