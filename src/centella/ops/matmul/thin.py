"""The thin product: few rows of x, weights contiguous along k (`gemv` and `skinny`).

    y[m, n] = f(alpha (x[m, :] . W[n, :]) scale[n] + bias[n]) + residual[m, n]        m <= 16

A team of `lanes` threads computes `outs` neighbouring outputs for all rows of x. Each thread walks
k in steps of at least 16 bytes, `lanes` steps apart, holding `outs x m` sums; several steps are
loaded before the first is used, so that enough bytes are on their way. The sums of a team are
combined in a fixed order, by shuffles where lanes of a subgroup are sure to be neighbours, then
through shared memory; that and the epilogue are spread over the threads of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import DType, f32, i8, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Lowered
from centella.op.variant import Variant
from centella.ops.matmul.epilogue import Word
from centella.ops.matmul.problem import THIN, Problem, aligned
from centella.ops.matmul.product import Product, Scalars, batch_of_b, launch, rows_of_a
from centella.ops.matmul.sums import SUBGROUP, Thin, finish
from centella.ops.matmul.table import row_of
from centella.ops.quant.numbers import bytes_of, number
from centella.specs import Caps

PARTIAL = 2  # up to so many rows of x a step has sums of its own: shorter chains of additions
REGISTERS, MOST_THREADS = 65_536, 2048  # of a multiprocessor
BESIDE = 28  # registers for addresses, the loop, and what is under way
# Threads of a team of a thin product, its outputs, steps at once, by rows held.
THIN_SHAPES = {1: (128, 2, 4), 2: (128, 2, 4), 4: (32, 2, 2), 8: (32, 4, 1), THIN: (32, 4, 1)}
LONG = 8  # steps of a row for each thread of a group
FEW = 2048  # outputs that leave much of a large GPU idle
# Weights that are worth compiling twice as much, where threads are a CPU's; not bytes, which take
# three times as much, as each is widened.
WORTH = 1 << 17
ROWS = (1, 2, 4, 8, THIN)  # rows that a thin kernel holds in registers


def together_of(tile: Thin, x: DType, w: DType) -> int:
    """Groups that an NVIDIA multiprocessor shall have registers for; 0: as the assembler likes.

    Left alone, it takes fewer registers and has one load of a step wait for another.
    """
    if tile.m > PARTIAL:
        return 0
    width = max(x.per_chunk, w.per_chunk)
    chunks = tile.outs * width // w.per_chunk + tile.m * width // x.per_chunk
    registers = -(-(4 * chunks * tile.unroll + tile.outs * tile.m + BESIDE) // 8) * 8
    return max(1, min(REGISTERS // registers, MOST_THREADS) // tile.threads)


def reserve(together: int) -> None:
    """Ask for registers such that so many groups fit on a multiprocessor; 0: of PTX alone, not."""
    if together:
        lang.ptx.resident(together)


def let_next_in(early: bool) -> None:
    """Let the next launch take its places where nothing but sums is left to do."""
    if early:
        lang.ptx.launch_dependents()


class Rows(Struct, frozen=True, eq=False):
    """Rows of one operand: where each starts, and how far apart elements along k are (None: 1)."""

    source: Any
    starts: list[Any]
    vector: bool
    pace: Any
    k: Any

    def read(self, row: int, column: Operand, width: int, masked: bool) -> list[Expr]:
        """`width` values from a column on; those past k are zeros, whatever memory holds."""
        start, values = self.starts[row], []
        if self.vector:
            per = self.source.dtype.per_chunk
            for j in range(0, width, per):
                at = column + j
                if masked and j:
                    at = lang.minimum(at, (self.k - 1) // per * per)
                if self.source.dtype is i8:
                    values += bytes_of(self.source.load_bits(start + at))
                else:
                    values += self.source.load(start + at)
        else:
            for j in range(width):
                at = column + j
                at = lang.minimum(at, self.k - 1) if masked and j else at
                at = at if self.pace is None else at * self.pace
                values.append(number(self.source[start + at]))
        if masked:
            values = [lang.select(column + j < self.k, v, 0.0) for j, v in enumerate(values)]
        return values


def _thin(
    *, tile: Thin, activation: str, alone: bool, depth: str, early: bool, shuffle: bool,
    together: int, vector_x: bool, vector_w: bool, dense_x: bool, x: Argument, w: Argument,
    y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    """A group has some outputs of all rows.

    Args:
        alone: whether the batch is one product.
    """
    reserve(together)
    p = {n: lang.parameter(n, u32) for n in (
        "m", "n", "k", "rowx", "stepx", "ldw", "ldy", "sx", "sw", "sy", "groups")}  # fmt: skip
    batch = lang.const(0, u32) if alone else lang.group_id() // p["groups"]
    first = (lang.group_id() - batch * p["groups"]) * tile.outputs
    lane, team = lang.local_id() // tile.teams, lang.local_id() % tile.teams
    places = [
        batch * p["sw"] + lang.minimum(first + team * tile.outs + r, p["n"] - 1) * p["ldw"]
        for r in range(tile.outs)
    ]
    weights = Rows(w, places, vector_w, None, p["k"])
    rows = [lang.minimum(lang.const(i, u32), p["m"] - 1) for i in range(tile.m)]
    starts = [batch * p["sx"] + row * p["rowx"] for row in rows]
    inputs = Rows(x, starts, vector_x, None if dense_x else p["stepx"], p["k"])
    word = Word(activation, extra, tile.outputs, first, p["n"], y) if tile.m == 1 else None
    sums = lang.vars(f32, tile.outs, tile.m, init=0.0)
    add_products(sums, tile, weights, inputs, lane, p["k"], depth)
    let_next_in(early)
    finish(sums, tile, shuffle, batch, first, p, y, activation, extra, word)


def add_products(
    sums: Any, tile: Thin, weights: Rows, inputs: Rows, lane: Operand, k: Operand, depth: str
) -> None:
    """Add up this thread's share of k: blocks of whole steps, then what is left, masked."""
    width = max(weights.source.dtype.per_chunk, inputs.source.dtype.per_chunk)
    block = tile.lanes * tile.unroll
    done = lang.const(0, u32)

    def add_block(index: Operand) -> None:
        at = (index * block + lane) * width
        columns = [at + u * (tile.lanes * width) for u in range(tile.unroll)]
        ws = [[weights.read(r, c, width, False) for r in range(tile.outs)] for c in columns]
        xs = [[inputs.read(i, c, width, False) for i in range(tile.m)] for c in columns]
        for w, x in zip(ws, xs, strict=True):
            _add(sums, w, x)

    if depth == "once":
        add_block(lang.const(0, u32))
    elif depth != "masked":
        blocks = k // (block * width)
        done = blocks * block
        for index in lang.range(blocks):
            add_block(index)
    if depth in ("once", "whole"):
        return
    for step in lang.range(done + lane, (k + (width - 1)) // width, tile.lanes):
        column = step * width
        _add(
            sums,
            [weights.read(r, column, width, True) for r in range(tile.outs)],
            [inputs.read(i, column, width, True) for i in range(tile.m)],
        )


def _add(sums: Any, ws: list[list[Any]], xs: list[list[Any]]) -> None:
    """The products of one step."""
    for r, w in enumerate(ws):
        for i, x in enumerate(xs):
            own = len(xs) <= PARTIAL
            total = w[0] * x[0] if own else lang.fma(w[0], x[0], sums[r][i])
            for a, b in zip(w[1:], x[1:], strict=True):
                total = lang.fma(a, b, total)
            sums[r][i].set(sums[r][i] + total if own else total)


thin: Kernel = Kernel(_thin, workgroup=128, name="thin", rewritable=True)


# -- how it is launched ---------------------------------------------------------------------------


def rows_at_once(m: int) -> int:
    """Rows of x that a kernel for m of them holds."""
    return next(rows for rows in ROWS if m <= rows)


def thin_of(problem: Problem, dtypes: tuple[DType, DType], caps: Caps) -> Thin:
    """The shape of a thin kernel's group: many threads a row for few rows.

    A team has no more threads than steps. Where it may take several steps at once, it has so many
    threads, and takes so many, that all of its steps are whole, if that can be.
    """
    m, row = rows_at_once(problem.m), row_of(caps)
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
            if lanes < 32 or steps % (lanes * unroll):
                continue
            if lanes == 32 and unroll == 2 and m == 1 and threads >= 64:
                # As much under way, by threads that wait for less. Of a long row the last step of
                # twice as many may be masked.
                lanes, unroll = threads if steps >= LONG * threads else 64, 1
            return Thin(m, lanes, outs, unroll, threads, row.rolled)
    return Thin(m, teams[0], outs, max(1, min(most, steps // teams[0])), threads, row.rolled)


def depth_of(tile: Thin, k: int, width: int) -> str:
    """How a thin kernel walks k: one block, whole ones, masked steps behind those, or masked alone.

    With many rows, and on a CPU, masks cost little, and one walk is half the code of two.
    """
    block = tile.lanes * tile.unroll * width
    if k and k % block == 0:
        return "once" if k == block else "whole"
    return "masked" if k < block or tile.m > 4 or tile.rolled else "both"


def _launches(product: Product, tile: Thin, caps: Caps) -> Lowered:
    problem, (x, w, *_) = product.problem, product.specs
    row, step, batch = rows_of_a(problem)
    groups = -(-problem.n // tile.outputs)
    width = max(x.dtype.per_chunk, w.dtype.per_chunk)
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("rowx", row), ("stepx", step),
        ("ldw", problem.ldb), ("ldy", problem.ldy), ("sx", batch), ("sw", problem.sb),
        ("sy", problem.sy), ("groups", groups), ("alpha", product.alpha),
        ("ldr", product.residual_pitch),
    )  # fmt: skip
    # For more rows shared memory is quicker: it adds up each value once.
    shuffle = caps.shuffles and tile.threads % SUBGROUP == 0 and tile.m <= 2
    constants = (
        ("activation", product.activation),
        ("alone", problem.batch == 1),
        ("dense_x", step == 1),
        ("depth", depth_of(tile, problem.k, width)),
        ("early", caps.early_launch),
        ("shuffle", shuffle),
        ("tile", tile),
        ("together", together_of(tile, x.dtype, w.dtype) if caps.reserves_registers else 0),
        ("vector_w", aligned(w, problem.ldb * (problem.n > 1), batch_of_b(problem))),
        ("vector_x", step == 1 and problem.a_along_k and aligned(x, row, batch)),
    )
    names = ("x", "w", *product.names)
    many = groups * problem.batch if problem.m else 0
    return Lowered((launch(thin, product, names, scalars, constants, many, tile.threads),))


def _tile_up_to(most: int) -> Callable[[Product, Caps], Thin | None]:
    """The shape of a group, for up to so many rows of x."""

    def tile(product: Product, caps: Caps) -> Thin | None:
        few = product.problem.m <= most and product.problem.b_along_k
        return thin_of(product.problem, product.dtypes, caps) if few else None

    return tile


GEMV: Variant[Product, Thin] = Variant("gemv", _tile_up_to(1), _launches)
SKINNY: Variant[Product, Thin] = Variant("skinny", _tile_up_to(THIN), _launches)
