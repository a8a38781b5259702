"""How the sums of a group's teams are added up, through shuffles and shared memory, and stored."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.rows import fold

SHARED_WORDS = 4096  # 16 KB: what every device has
SUBGROUP = 32  # lanes that shuffle: a warp
STAGE = 16  # parts that a thread adds up at a time, at least


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


def finish(
    sums: Any, tile: Thin, shuffle: bool, batch: Any, first: Any, p: dict[str, Expr], y: Argument,
    activation: str, extra: dict[str, Argument],
) -> None:  # fmt: skip
    """Combine the sums of each team, as many rows of x at a time as shared memory holds."""
    slots = slots_of(tile, shuffle)
    rows = min(tile.m, power_of_two(SHARED_WORDS // (slots * tile.outs)))
    scratch = lang.shared(f32, slots * tile.outs * rows)
    for row in range(0, tile.m, rows):
        if row:
            lang.barrier()
        values = [sums[r][row + i] for i in range(rows) for r in range(tile.outs)]
        own = tile.teams == 1 and y.dtype.per_word == 1
        pitch = totals(scratch, values, tile, slots, own)
        _store(scratch, pitch, tile, row, rows, batch, first, p, y, activation, extra)


def slots_of(tile: Thin, shuffle: bool) -> int:
    """Parts of a value that the threads of a group write, once a subgroup has added up its own."""
    return tile.threads // (max(SUBGROUP // tile.teams, 1) if shuffle else 1)


def totals(scratch: Any, values: list[Expr], tile: Thin, slots: int, own: bool = False) -> int:
    """Add up values over the threads of each team: value v of team i is at `v * pitch + i`.

    Args:
        scratch: shared memory of `slots` words for each value.
        own: each thread then reads its own totals only.

    Returns:
        The pitch.
    """
    t, together = lang.local_id(), tile.threads // slots
    step = together // 2
    while step:
        values = [v + lang.shuffle_xor(v, step * tile.teams) for v in values]
        step //= 2
    with when(t % SUBGROUP < tile.teams, together > 1):
        slot = t // SUBGROUP * tile.teams + t % SUBGROUP if together > 1 else t
        for v, value in enumerate(values):
            scratch[v * slots + slot] = value
    lang.barrier()
    return combine(scratch, len(values), slots, tile.teams, own, tile.rolled)


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
    scratch: Any, pitch: int, tile: Thin, row: int, count: int, batch: Operand, first: Operand,
    p: dict[str, Expr], y: Argument, activation: str, extra: dict[str, Argument],
) -> None:  # fmt: skip
    """The epilogue and the store: a word of the output a thread."""
    per = y.dtype.per_word
    for i, offset in words_of(tile.threads, count, tile.outputs, per, row, first, p):
        out = []
        for j in range(per):
            team, r = (offset + j) // tile.outs, (offset + j) % tile.outs
            out.append(scratch[(i * tile.outs + r) * pitch + team])
        finish = Epilogue(activation, extra, first + offset, per, p["n"])
        y.store(batch * p["sy"] + (row + i) * p["ldy"] + (first + offset), finish(out, row + i))


def words_of(
    threads: int, rows: int, outputs: int, per: int, row: int, first: Any, p: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Row and first output of each word that a thread stores of a group's, where there is one.

    Args:
        rows, outputs: of the group, whose first ones are `row` and `first`; per: outputs of a word.
        p: parameters; m and n are rows and outputs of the launch.
    """
    across = outputs // per
    items = rows * across
    for base in range(0, items, threads):
        item = lang.local_id() + base
        i, offset = item // across, item % across * per
        inside = (row + i < p["m"]) & (first + offset < p["n"])
        if base + threads > items:
            inside = inside & (item < items)
        with lang.if_(inside):
            yield i, offset
