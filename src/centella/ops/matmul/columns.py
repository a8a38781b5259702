"""The thin product with B contiguous along n: C [m, n] = alpha A [m, k] B [k, n], m <= 16.

A thread owns the columns of one 16-byte chunk of B, for all rows of A; the depth is dealt to
`slices` threads of a group, eight neighbouring k at a time, and their sums are combined through
shared memory in a fixed order. Where the columns alone give too few groups, the depth is split
among groups as well: each writes partial sums, which a second launch adds in order.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Lowered
from centella.op.variant import Variant
from centella.ops.matmul.parts import added
from centella.ops.matmul.problem import THIN, Problem, aligned
from centella.ops.matmul.product import Product, Scalars, batch_of_b, launch, rows_of_a
from centella.ops.matmul.sums import SHARED_WORDS, Added, TeamSums, power_of_two
from centella.ops.matmul.table import row_of
from centella.ops.matmul.thin import rows_at_once
from centella.specs import Caps, make_spec

BUSY = 256  # groups that keep the memory of a large GPU busy
AHEAD = 8  # neighbouring k of a thread: their loads of B are independent


class Columns(Struct, frozen=True):
    """How a group works: rows of A held, threads along n, threads along k.

    `rolled` is for a CPU (`Row.rolled`): results are stored in a loop.
    """

    m: int
    across: int
    slices: int
    rolled: bool = False

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return self.across * self.slices

    @property
    def depth(self) -> int:
        """The k that a group reads at a time."""
        return self.slices * AHEAD

    @property
    def least(self) -> int:
        """The k of a part, where the depth is split among groups, at least."""
        return 256 if self.rolled else 4 * self.depth


def _columns(
    *, tile: Columns, exact_k: bool, vector_a: bool, vector_b: bool, a: Argument, b: Argument,
    y: Argument,
) -> None:  # fmt: skip
    p = {n: lang.parameter(n, u32) for n in (
        "m", "n", "k", "rowa", "stepa", "ldb", "ldy", "sa", "sb", "sy", "groups", "splits",
        "part")}  # fmt: skip
    width = b.dtype.per_chunk
    group = lang.group_id()
    item = group // p["groups"]
    batch, split = item // p["splits"], item % p["splits"]
    t = lang.local_id()
    first = (group % p["groups"]) * (tile.across * width)
    column = lang.minimum(first + t % tile.across * width, (p["n"] - 1) // width * width)
    start, end = split * p["part"], lang.minimum((split + 1) * p["part"], p["k"])
    rows = [lang.minimum(lang.const(i, u32), p["m"] - 1) for i in range(tile.m)]
    starts = [batch * p["sa"] + row * p["rowa"] for row in rows]
    sums = lang.vars(f32, tile.m, width, init=0.0)
    for k in lang.range(start + t // tile.across * AHEAD, end, tile.depth):
        ks = [k + j if exact_k else lang.minimum(k + j, p["k"] - 1) for j in range(AHEAD)]
        bs = [_row_of_b(b, batch * p["sb"] + at * p["ldb"], column, p["n"], vector_b) for at in ks]
        left = [_row_of_a(a, of_row, k, ks, p, vector_a) for of_row in starts]
        if not exact_k:
            bs = [[_kept(k + j < end, v) for v in row] for j, row in enumerate(bs)]
            left = [[_kept(k + j < end, v) for j, v in enumerate(row)] for row in left]
        for i in range(tile.m):
            for c in range(width):
                total = sums[i][c]
                for j in range(AHEAD):
                    total = lang.fma(left[i][j], bs[j][c], total)
                sums[i][c].set(total)
    _finish(sums, tile, width, item, first, p, y)


def _kept(condition: Operand, value: Operand) -> Expr:
    return lang.select(condition, value, 0.0)


def _row_of_b(b: Any, start: Any, column: Any, n: Operand, vector: bool) -> list[Expr]:
    """The thread's columns of one row of B."""
    if vector:
        return b.load(start + column)  # type: ignore[no-any-return]  # traced values
    return [b[start + lang.minimum(column + j, n - 1)] for j in range(b.dtype.per_chunk)]


def _row_of_a(
    a: Argument, start: Operand, k: Operand, ks: list[Expr], p: dict[str, Expr], vector: bool
) -> list[Expr]:
    """One row of A at neighbouring k."""
    if not vector:
        return [a[start + at * p["stepa"]] for at in ks]
    values: list[Expr] = []
    per = a.dtype.per_chunk
    for j in range(0, AHEAD, per):
        at = lang.minimum(k + j, (p["k"] - 1) // per * per) if j else k
        values += a.load(start + at)
    return values


def _finish(
    sums: Any, tile: Columns, width: int, item: Operand, first: Operand, p: dict[str, Any],
    y: Argument,
) -> None:  # fmt: skip
    """Combine the slices of each column, then store whole words; alpha on the way."""
    t, per = lang.local_id(), y.dtype.per_word
    rows = min(tile.m, power_of_two(SHARED_WORDS // (tile.threads * width)))
    add = TeamSums(tile.threads, tile.across, tile.threads, width * rows, tile.rolled)
    alpha = lang.parameter("alpha", f32)
    for row in range(0, tile.m, rows):
        if row:
            lang.barrier()
        summed = add([sums[row + i][c] for i in range(rows) for c in range(width)])
        words = tile.across * width // per

        def store(one: Operand, row: int = row, summed: Added = summed, words: int = words) -> None:
            i, column = one // words, one % words * per
            inside = (one < rows * words) & (row + i < p["m"]) & (first + column < p["n"])
            with lang.if_(inside):
                out = []
                for j in range(per):
                    thread, lane = (column + j) // width, (column + j) % width
                    out.append(summed(i * width + lane, thread) * alpha)
                y.store(item * p["sy"] + (row + i) * p["ldy"] + (first + column), out)

        if tile.rolled:
            for one in lang.range(t, rows * words, tile.threads):
                store(one)
        else:
            for base in range(0, rows * words, tile.threads):
                store(t + base)


columns: Kernel = Kernel(_columns, workgroup=256, name="columns", rewritable=True)


# -- how it is launched ---------------------------------------------------------------------------


def columns_of(problem: Problem, caps: Caps) -> Columns:
    """The shape of a columns kernel's group."""
    if row_of(caps).rolled:
        return Columns(rows_at_once(problem.m), 32, 1, rolled=True)
    threads = min(256, caps.max_workgroup)
    return Columns(rows_at_once(problem.m), 32, threads // 32)


def _launches(product: Product, tile: Columns, caps: Caps) -> Lowered:
    """One launch; with few columns a second, which adds the parts of a split depth."""
    problem, (a, b, y) = product.problem, product.specs
    across = -(-problem.n // (tile.across * b.dtype.per_chunk))
    few = max(across * problem.batch, 1)
    part = -(-problem.k // max(1, min(BUSY // few, problem.k // tile.least)))
    part = max(-(-part // tile.depth), 1) * tile.depth
    splits = max(-(-problem.k // part), 1)
    if splits == 1 or not y.size:
        return Lowered((_launch(product, tile, 1, part),))
    parts = make_spec((problem.batch * splits, problem.m, problem.n), f32, 16)
    inner = replace(
        product, specs=(a, b, parts), alpha=1.0,
        problem=replace(problem, ldy=parts.strides[1], sy=parts.strides[0]),
    )  # fmt: skip
    first = _launch(inner, tile, splits, part)
    return added(product, first, parts, splits)


def _launch(product: Product, tile: Columns, splits: int, part: int) -> Call:
    problem, (a, b, _) = product.problem, product.specs
    row, step, batch = rows_of_a(problem)
    groups = -(-problem.n // (tile.across * b.dtype.per_chunk))
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("rowa", row), ("stepa", step),
        ("ldb", problem.ldb), ("ldy", problem.ldy), ("sa", batch), ("sb", problem.sb),
        ("sy", problem.sy), ("groups", max(groups, 1)), ("splits", splits), ("part", part),
        ("alpha", product.alpha),
    )  # fmt: skip
    constants = (
        ("exact_k", problem.k % AHEAD == 0 and problem.k > 0),
        ("tile", tile),
        ("vector_a", step == 1 and problem.a_along_k and aligned(a, row, batch)),
        ("vector_b", aligned(b, problem.ldb * (problem.k > 1), batch_of_b(problem))),
    )
    many = groups * splits * problem.batch if problem.m else 0
    return launch(columns, product, ("a", "b"), scalars, constants, many, tile.threads)


def _tile(product: Product, caps: Caps) -> Columns | None:
    problem = product.problem
    few = problem.m <= THIN and not problem.b_along_k
    return columns_of(problem, caps) if few else None


COLUMNS: Variant[Product, Columns] = Variant("columns", _tile, _launches)
