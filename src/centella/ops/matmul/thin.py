"""The thin product: few rows of x, weights contiguous along k (`gemv` and `skinny`).

    y[m, n] = f(alpha (x[m, :] . W[n, :]) scale[n] + bias[n]) + residual[m, n]        m <= 16

A team of `lanes` threads computes `outs` neighbouring outputs for all rows of x. Each thread walks
k in steps of at least 16 bytes, `lanes` steps apart, holding `outs x m` sums; several steps are
loaded before the first is used, so that enough bytes are on their way. The sums of a team are
combined in a fixed order, by shuffles where lanes of a subgroup are sure to be neighbours, then
through shared memory; that and the epilogue are spread over the threads of the group.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import DType, f32, i8, u32
from centella.emit.program import Kernel
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.rows import fold

SHARED_WORDS = 4096  # 16 KB: what every device has
SUBGROUP = 32  # lanes that shuffle: a warp
PARTIAL = 2  # up to so many rows of x a step has sums of its own: shorter chains of additions
STAGE = 16  # parts that a thread adds up at a time, at least
MAGIC = 0x4B000000  # the bits of 2^23, whose last bits a small number may take
MAGIC_VALUE = 8388608.0
REGISTERS, MOST_THREADS = 65_536, 2048  # of a multiprocessor
BESIDE = 28  # registers for addresses, the loop, and what is under way
FLIP = 0x80808080  # makes four i8 into u8 that are 128 more


class Thin(Struct, frozen=True):
    """How a group works: rows of x held, threads of a team, outputs of a team, steps at once.

    `rolled` is for a CPU (`Row.rolled`): one walk along k, whose steps are all masked alike, and
    sums that are added up in a loop.
    """

    m: int
    lanes: int
    outs: int
    unroll: int
    threads: int = 128
    rolled: bool = False

    @property
    def teams(self) -> int:
        """Teams of a group; neighbouring threads are of different teams and share x."""
        return self.threads // self.lanes

    @property
    def outputs(self) -> int:
        """Neighbouring outputs of a group."""
        return self.teams * self.outs


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


def number(value: Any) -> Any:
    """A stored element as f32. An i8 goes by its bits, which is exact and quicker."""
    return field(lang.bitcast(value, u32) + 128, 0, 255, 128) if value.type == "i32" else value


def field(word: Any, start: int, mask: int, zero: int) -> Any:
    """The bits of a word from `start` on that a mask keeps, up to 255, less `zero`, as f32."""
    shifted = word >> start if start else word
    kept = shifted if start + mask.bit_length() == 32 else shifted & mask
    return lang.bitcast(kept | MAGIC, f32) - (MAGIC_VALUE + zero)


def bytes_of(words: list[Any]) -> list[Any]:
    """The i8 of stored words as f32."""
    flipped = [word ^ FLIP for word in words]
    return [field(word, 8 * j, 255, 128) for word in flipped for j in range(4)]


class Rows:
    """Rows of one operand: where each starts, and how elements along k follow one another."""

    def __init__(self, source: Any, starts: list[Any], vector: bool, pace: Any, k: Any) -> None:
        self.source: Any = source
        self.starts: list[Any] = starts
        self.vector: bool = vector
        self.pace: Any = pace
        self.k: Any = k

    def read(self, row: int, column: Any, width: int, masked: bool) -> list[Any]:
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
    *, tile: Thin, activation: str, depth: str, shuffle: bool, together: int, vector_x: bool,
    vector_w: bool, dense_x: bool, x: Any, w: Any, y: Any, **extra: Any,
) -> None:  # fmt: skip
    reserve(together)
    p = {n: lang.parameter(n, u32) for n in (
        "m", "n", "k", "rowx", "stepx", "ldw", "ldy", "sx", "sw", "sy", "groups")}  # fmt: skip
    batch = lang.group_id() // p["groups"]
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
    sums = lang.vars(f32, tile.outs, tile.m, init=0.0)
    _walk(sums, tile, weights, inputs, lane, p["k"], depth)
    finish(sums, tile, shuffle, batch, first, p, y, activation, extra)


def _walk(
    sums: Any, tile: Thin, weights: Rows, inputs: Rows, lane: Any, k: Any, depth: str
) -> None:
    """Add up this thread's share of k: blocks of whole steps, then what is left, masked."""
    width = max(weights.source.dtype.per_chunk, inputs.source.dtype.per_chunk)
    block = tile.lanes * tile.unroll
    done = lang.const(0, u32)
    if depth != "masked":
        blocks = k // (block * width)
        done = blocks * block
        for index in lang.range(blocks):
            at = (index * block + lane) * width
            columns = [at + u * (tile.lanes * width) for u in range(tile.unroll)]
            ws = [[weights.read(r, c, width, False) for r in range(tile.outs)] for c in columns]
            xs = [[inputs.read(i, c, width, False) for i in range(tile.m)] for c in columns]
            for u in range(tile.unroll):
                _add(sums, ws[u], xs[u])
    if depth == "whole":
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


def finish(
    sums: Any, tile: Thin, shuffle: bool, batch: Any, first: Any, p: dict[str, Any], y: Any,
    activation: str, extra: dict[str, Any],
) -> None:  # fmt: skip
    """Combine the sums of each team, as many rows of x at a time as shared memory holds."""
    t = lang.local_id()
    together = max(SUBGROUP // tile.teams, 1) if shuffle else 1
    slots = tile.threads // together
    rows = min(tile.m, power_of_two(SHARED_WORDS // (slots * tile.outs)))
    scratch = lang.shared(f32, slots * tile.outs * rows)
    for row in range(0, tile.m, rows):
        if row:
            lang.barrier()
        values = [sums[r][row + i] for i in range(rows) for r in range(tile.outs)]
        step = together // 2
        while step:
            values = [v + lang.shuffle_xor(v, step * tile.teams) for v in values]
            step //= 2
        with when(t % SUBGROUP < tile.teams, together > 1):
            slot = t // SUBGROUP * tile.teams + t % SUBGROUP if together > 1 else t
            for v, value in enumerate(values):
                scratch[v * slots + slot] = value
        lang.barrier()
        own = tile.teams == 1 and y.dtype.per_word == 1
        pitch = combine(scratch, len(values), slots, tile.teams, own, tile.rolled)
        _store(scratch, pitch, tile, row, rows, batch, first, p, y, activation, extra)


def combine(
    scratch: Any, count: int, slots: int, teams: int, own: bool = False, rolled: bool = False
) -> int:
    """Add up `count` values of each team: value v of team i is then at `scratch[v * pitch + i]`.

    Before, its parts are at `v * slots + i`, and on by `teams`. Each stage adds several parts in a
    fixed order, spread over the threads. No barrier follows the last where each thread then reads
    its `own` totals only. Where it is `rolled` there is one stage, in loops.

    Returns:
        The pitch.
    """
    t, threads = lang.local_id(), lang.workgroup_size()
    if rolled:
        if slots > teams:
            for item in lang.range(t, count * teams, threads):
                at = item // teams * slots + item % teams
                total = lang.var(scratch[at])
                for part in lang.range(lang.const(1, u32), slots // teams):
                    total += scratch[at + part * teams]
                scratch[at] = total
            lang.barrier()
        return slots
    while slots > teams:
        parts = slots // teams
        at_once = min(parts, max(STAGE, count * slots // threads))
        short = slots // at_once
        items = count * short
        totals = []
        for base in range(0, items, threads):
            item = t % items if items < threads else t + base
            start = item // short * slots + item % short
            totals.append(fold([scratch[start + j * short] for j in range(at_once)], operator.add))
        lang.barrier()
        with when(t < items, items < threads):
            for i, total in enumerate(totals):
                scratch[t + i * threads] = total
        slots = short
        if slots > teams or not own:
            lang.barrier()
    return slots


def power_of_two(most: int) -> int:
    """The largest power of two up to a number, at least 1."""
    return 1 << max(most.bit_length() - 1, 0)


@contextmanager
def when(condition: Any, needed: bool) -> Iterator[None]:
    """`lang.if_` where it is needed."""
    if not needed:
        yield
        return
    with lang.if_(condition):
        yield


def _store(
    scratch: Any, pitch: int, tile: Thin, row: int, count: int, batch: Any, first: Any,
    p: dict[str, Any], y: Any, activation: str, extra: dict[str, Any],
) -> None:  # fmt: skip
    """The epilogue and the store: a word of the output a thread."""
    per, across = y.dtype.per_word, tile.outputs // y.dtype.per_word
    items = count * across
    for base in range(0, items, tile.threads):
        item = lang.local_id() + base
        i, place = item // across, item % across * per
        inside = (row + i < p["m"]) & (first + place < p["n"])
        if base + tile.threads > items:
            inside = inside & (item < items)
        with lang.if_(inside):
            out = []
            for j in range(per):
                team, r = (place + j) // tile.outs, (place + j) % tile.outs
                out.append(scratch[(i * tile.outs + r) * pitch + team])
            finish = Epilogue(activation, extra, first + place, per, p["n"])
            y.store(batch * p["sy"] + (row + i) * p["ldy"] + (first + place), finish(out, row + i))


thin: Kernel = Kernel(_thin, workgroup=128, name="thin", rewritable=True)
