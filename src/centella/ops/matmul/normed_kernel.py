"""The kernel of `normed_linear`: the teams of the thin product (`thin.py`), with norm and gate.

The factor of an RMS norm is one a row, so it multiplies sums: each team adds up the squares of x
beside its products, from the values that it reads anyway. A layer norm also subtracts the mean,
which would cost sums digits: so each group first computes mean and variance of the rows of x, as
`layer_norm` does. With a gate the rows of a team are pairs, one of each half of W.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from centella import lang
from centella.dtypes import DType, f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.op.variant import Variant
from centella.ops.layout import rows_of
from centella.ops.matmul.epilogue import Epilogue, Word
from centella.ops.matmul.normed import NormedAttrs, takes_few
from centella.ops.matmul.problem import Problem, aligned
from centella.ops.matmul.product import Product, Scalars, launch
from centella.ops.matmul.sums import (
    SHARED_WORDS,
    SUBGROUP,
    Added,
    TeamSums,
    Thin,
    power_of_two,
    slots_of,
    words_of,
)
from centella.ops.matmul.thin import (
    PARTIAL,
    Rows,
    add_products,
    depth_of,
    let_next_in,
    reserve,
    thin_of,
    together_of,
)
from centella.ops.rows import Row, Team, fold, power_above
from centella.specs import Caps

MOST_KEPT = 32  # elements of x that a thread keeps while it computes moments
# Threads of a team, and its rows of W: twice as many of 16 bits, where x is f32 and rows are short.
LANES, OUTS = 64, 4
MOST_LANES = (
    256  # of a team that has all of such a row at once; two rows of x are too much for that
)


class _Normed(Rows, frozen=True):
    """Rows of x times the norm's weight; what is read adds its squares up."""

    norm: Rows
    squares: list[Any]

    def read(self, row: int, column: Any, width: int, masked: bool) -> list[Expr]:
        """As of `Rows`."""
        values = super().read(row, column, width, masked)
        total = values[0] * values[0]
        for v in values[1:]:
            total = lang.fma(v, v, total)
        self.squares[row].set(self.squares[row] + total)
        weights = self.norm.read(0, column, width, masked)
        return [v * w for v, w in zip(values, weights, strict=True)]


class _Layered(Rows, frozen=True):
    """Rows of x less their mean, times a factor, times the norm's weight, and its shift added."""

    vectors: list[Rows]
    moments: list[tuple[Any, Any, Any]]

    def read(self, row: int, column: Any, width: int, masked: bool) -> list[Expr]:
        """As of `Rows`."""
        first, mean, factor = self.moments[row]
        values = [((v - first) - mean) * factor for v in super().read(row, column, width, masked)]
        weights, *shifts = (v.read(0, column, width, masked) for v in self.vectors)
        values = [v * w for v, w in zip(values, weights, strict=True)]
        for shift in shifts:
            values = [v + s for v, s in zip(values, shift, strict=True)]
        return values


def _moments(
    inputs: Rows, tile: Thin, add: TeamSums | None, kept: int
) -> list[tuple[Expr, Expr, Expr]]:
    """Of each row of x its first element, mean of the rest's distance to it, and 1 / deviation.

    Args:
        add: adds up a value of each row over the group; None: that is done by shuffles.
        kept: steps of a row that a thread keeps; 0: it reads them again.
    """
    k, width, threads = inputs.k, inputs.source.dtype.per_chunk, tile.threads
    everyone = Row(Team(threads, threads, 0, 0, False, add is None), 1, k, lang.const(1, u32))
    firsts = [inputs.source[start] for start in inputs.starts]

    def read(row: int, column: Operand) -> tuple[list[Any], Any]:
        inside = lang.select(column < k, column, 0)
        return inputs.read(row, inside, width, True), column

    steps = [(lang.local_id() + j * threads) * width for j in range(kept)]
    in_registers = [[read(row, column) for column in steps] for row in range(tile.m)]

    def each(row: int) -> Iterator[tuple[list[Expr], Expr]]:
        yield from in_registers[row]
        if not kept:
            for column in lang.range(lang.local_id() * width, k, threads * width):
                yield read(row, column)

    def means(of: Callable[[int, Any], Any]) -> list[Expr]:
        sums = lang.vars(f32, tile.m, init=0.0)
        for row in range(tile.m):
            for values, column in each(row):
                parts = [lang.select(column + j < k, of(row, v), 0.0) for j, v in enumerate(values)]
                sums[row].set(sums[row] + fold(parts, operator.add))
        return [total / lang.cast(k, f32) for total in added([s.get() for s in sums])]

    def added(values: list[Expr]) -> list[Expr]:
        if add is None:
            return [everyone.across(v, "add") for v in values]
        sums = add(values)
        return [sums(lang.const(row, u32), lang.const(0, u32)) for row in range(tile.m)]

    mean = means(lambda row, v: v - firsts[row])
    if add is not None:
        lang.barrier()  # its memory is written anew

    def square(row: int, v: Operand) -> Any:
        off = (v - firsts[row]) - mean[row]
        return off * off

    eps = lang.parameter("eps", f32)
    factors = [1.0 / lang.sqrt(variance + eps) for variance in means(square)]
    return list(zip(firsts, mean, factors, strict=True))


def _normed(
    *, tile: Thin, gated: bool, activation: str, kind: str, kept: int, depth: str, early: bool,
    shuffle: bool, together: int, vector_x: bool, vector_w: bool, vector_norm: bool, x: Argument,
    w: Argument, y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    reserve(together)
    names = ("m", "n", "k", "rowx", "ldw", "ldy", "half")
    p = {n: lang.parameter(n, u32) for n in names}
    each = tile.outs // 2 if gated else tile.outs  # outputs of a team
    first = lang.group_id() * (tile.teams * each)
    lane, team = lang.local_id() // tile.teams, lang.local_id() % tile.teams
    starts = []
    for r in range(tile.outs):
        out = r // 2 if gated else r
        row = lang.minimum(first + team * each + out, p["n"] - 1)
        starts.append((row + p["half"] if gated and r % 2 else row) * p["ldw"])
    weights = Rows(w, starts, vector_w, None, p["k"])
    rows_of_x = [lang.minimum(lang.const(i, u32), p["m"] - 1) for i in range(tile.m)]
    inputs = Rows(x, [row * p["rowx"] for row in rows_of_x], vector_x, None, p["k"])
    sums = lang.vars(f32, tile.outs, tile.m, init=0.0)
    vectors = [
        Rows(extra[name], [lang.const(0, u32)], vector_norm, None, p["k"])
        for name in ("norm", "shift") if name in extra
    ]  # fmt: skip
    room = SHARED_WORDS
    if kind == "layer":
        alone = (tile.threads, 1, tile.threads, tile.m, tile.rolled)
        of_rows = None if shuffle else TeamSums(*alone)
        room -= 0 if of_rows is None else of_rows.words
        moments = _moments(inputs, tile, of_rows, kept)
        inputs = _Layered(x, inputs.starts, vector_x, None, p["k"], vectors, moments)
    elif vectors:
        squares = lang.vars(f32, tile.m, init=0.0)
        inputs = _Normed(x, inputs.starts, vector_x, None, p["k"], vectors[0], squares)
    outputs = tile.teams * each
    word = Word(activation, extra, outputs, first, p["n"], y, gated) if tile.m == 1 else None
    add_products(sums, tile, weights, inputs, lane, p["k"], depth)
    if isinstance(inputs, _Normed):
        sums = [*sums, inputs.squares]
    let_next_in(early)
    _finish(sums, tile, gated, activation, shuffle, first, p, y, extra, word, room)


def _finish(
    sums: Any, tile: Thin, gated: bool, activation: str, shuffle: bool, first: Any,
    p: dict[str, Any], y: Any, extra: dict[str, Argument], word: Word | None, room: int,
) -> None:  # fmt: skip
    """Combine the sums of each team; then norm, gate or epilogue, and the store.

    Args:
        word: what each thread stores, where there is one row of x.
        room: words of workgroup memory.
    """
    count, slots = len(sums), slots_of(tile, shuffle)
    rows = min(tile.m, power_of_two(max(room // (slots * count), 1)))
    add = TeamSums(tile.threads, tile.teams, slots, count * rows, tile.rolled, room)
    each, per = tile.outs // 2 if gated else tile.outs, y.dtype.per_word
    halves = 2 if gated else 1
    for row in range(0, tile.m, rows):
        if row:
            lang.barrier()
        added = add([sums[r][row + i] for i in range(rows) for r in range(count)])

        def totals(i: Any, output: Any, added: Added = added) -> list[Any]:
            team, at = output // each, i * count
            own = [added(at + (output % each * halves + half), team) for half in range(halves)]
            if count > tile.outs:  # the squares of an RMS norm come last
                k = lang.cast(p["k"], f32)
                squares = added(at + tile.outs, team) + k * lang.parameter("eps", f32)
                factor = lang.sqrt(k) / lang.sqrt(squares)
                own = [v * factor for v in own]
            return own

        if word is not None:
            word.store(partial(totals, lang.const(0, u32)))
            continue
        for i, offset in words_of(tile.threads, rows, tile.teams * each, per, row, first, p):
            out = [totals(i, offset + j) for j in range(per)]
            finish = Epilogue(activation, extra, first + offset, per, p["n"], gated=gated)
            values = finish([v for half in zip(*out, strict=True) for v in half], row + i)
            y.store((row + i) * p["ldy"] + (first + offset), values)


kernel: Kernel = Kernel(_normed, workgroup=128, name="normed_linear", rewritable=True)


def normed_of(problem: Problem, dtypes: tuple[DType, DType], caps: Caps) -> Thin:
    """The shape of a group: where a norm is read as well, more outputs share what is read of x."""
    thin = thin_of(problem, dtypes, caps)
    steps = problem.k // max(d.per_chunk for d in dtypes)
    if thin.rolled or thin.m > PARTIAL or steps < LANES:
        return thin
    lanes, most = (power_above(steps), MOST_LANES) if thin.m == 1 else (LANES, 2 * LANES)
    threads = max(lanes, thin.threads)
    wider = dtypes[0].itemsize > dtypes[1].itemsize
    if wider and steps <= most and threads <= caps.max_workgroup:
        return replace(thin, lanes=lanes, outs=2 * OUTS, unroll=1, threads=threads)
    return replace(thin, lanes=LANES, outs=OUTS, unroll=2 if steps % (2 * LANES) == 0 else 1)


def product_of(form: Form[NormedAttrs]) -> Product:
    """The product; with a gate its n is that of the result."""
    x, weight, *more = form.inputs
    attrs, extras = form.attrs, dict(zip(form.attrs.extras, more, strict=True))
    problem = Problem.of_rows(rows_of(x), weight, rows_of(form.outputs[0]))
    residual = rows_of(extras["residual"]).strides[0] if "residual" in extras else 0
    return Product(
        problem, (*form.inputs, form.outputs[0]), attrs.extras, residual,
        attrs.gate or attrs.activation, attrs.alpha, gated=attrs.gate != "",
    )  # fmt: skip


def _launches(form: Form[NormedAttrs], fits: bool, caps: Caps) -> Lowered:
    x, w, *more = form.inputs
    y, product = rows_of(form.outputs[0]), product_of(form)
    flat_x, extras = rows_of(x), dict(zip(form.attrs.extras, more, strict=True))
    (m, k), problem, gated = flat_x.shape, product.problem, product.gated
    tile = normed_of(replace(problem, n=w.shape[0]), (x.dtype, w.dtype), caps)
    width = max(x.dtype.per_chunk, w.dtype.per_chunk)
    if gated and tile.outputs < 2 * y.dtype.per_word:  # a thread stores a word
        tile = replace(tile, outs=2 * tile.outs)
    outputs = tile.outputs // (2 if gated else 1)
    layered = form.attrs.kind == "layer"
    steps = -(-k // (x.dtype.per_chunk * tile.threads))
    kept = steps if layered and steps * x.dtype.per_chunk * tile.m <= MOST_KEPT else 0
    vectors = [extras[name] for name in ("norm", "shift") if name in extras]
    scalars: Scalars = (
        ("m", m), ("n", y.shape[1]), ("k", k), ("rowx", flat_x.strides[0]), ("ldw", w.strides[0]),
        ("ldy", y.strides[0]), ("half", y.shape[1]), ("ldr", product.residual_pitch),
        ("alpha", product.alpha), ("eps", form.attrs.eps),
    )  # fmt: skip
    constants = (
        ("activation", product.activation), ("depth", depth_of(tile, k, width)),
        ("early", caps.early_launch), ("gated", gated), ("kept", kept),
        ("kind", form.attrs.kind),
        ("shuffle", caps.shuffles and tile.threads % SUBGROUP == 0 and tile.m <= 2),
        ("tile", tile),
        ("together", together_of(tile, x.dtype, w.dtype) if caps.reserves_registers else 0),
        ("vector_norm", bool(vectors) and all(aligned(v, 0, 0) for v in vectors)),
        ("vector_w", aligned(w, w.strides[0], 0)),
        ("vector_x", aligned(x, flat_x.strides[0] * (m > 1), 0)),
    )  # fmt: skip
    groups = -(-y.shape[1] // outputs)
    names = ("x", "w", *extras)
    return Lowered((launch(kernel, product, names, scalars, constants, groups, tile.threads),))


JOINED: Variant[Form[NormedAttrs], bool] = Variant(
    "joined", lambda form, caps: takes_few(form) or None, _launches
)
