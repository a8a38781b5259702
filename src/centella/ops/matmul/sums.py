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
from centella.ops.matmul.epilogue import Epilogue, Word
from centella.ops.rows import fold

SHARED_WORDS = 4096  # 16 KB: what every device has
SUBGROUP = 32  # lanes that shuffle: a warp
READ = 8  # parts of a sum that are left to who reads it
TOGETHER = 8  # parts that a thread adds up for others, at least


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
    activation: str, extra: dict[str, Argument], word: Word | None = None,
) -> None:  # fmt: skip
    """Combine the sums of each team, as many rows of x at a time as workgroup memory holds.

    Args:
        word: what each thread stores, where there is one row of x.
    """
    slots = slots_of(tile, shuffle)
    rows = min(tile.m, power_of_two(SHARED_WORDS // (slots * tile.outs)))
    add = TeamSums(tile.threads, tile.teams, slots, tile.outs * rows, tile.rolled)
    for row in range(0, tile.m, rows):
        if row:
            lang.barrier()
        added = add([sums[r][row + i] for i in range(rows) for r in range(tile.outs)])
        if word is None:
            _store(added, tile, row, rows, batch, first, p, y, activation, extra)
            continue

        def total(output: Any, added: Added = added) -> list[Any]:
            return [added(output % tile.outs, output // tile.outs)]

        word.store(total, batch * p["sy"])


def slots_of(tile: Thin, shuffle: bool) -> int:
    """Parts of a value that the threads of a group write, once a subgroup has added up its own."""
    together = max(SUBGROUP // tile.teams, 1) if shuffle and not tile.rolled else 1
    return tile.threads // together


class Added(Struct, frozen=True, eq=False):
    """Sums of each team, of which workgroup memory has some parts: who reads one adds them up.

    Part n of value v of team i is at `start + v * pitch + i * across + n * step`.
    """

    scratch: Any
    parts: int
    start: int
    pitch: int
    across: int
    step: int

    def __call__(self, value: Operand, team: Operand) -> Any:
        """The sum of a value of a team."""
        at, four = value * self.pitch + team * self.across + self.start, f32.per_chunk
        if self.step == 1 and self.parts % four == 0:
            chunks = [self.scratch.load(at + n) for n in range(0, self.parts, four)]
            return fold([v for chunk in chunks for v in chunk], operator.add)
        parts = [self.scratch[at + n * self.step] for n in range(self.parts)]
        return fold(parts, operator.add)


class TeamSums:
    """Workgroup memory in which values of each thread are added up over its team.

    Neighbouring threads are of different teams. The order is fixed. Where a value has many parts,
    the threads of the group share them, each adds up several, and who reads a sum adds up the rest:
    two barriers, or three where there is no room for what they leave.

    Args:
        slots: parts of a value that all teams write (`slots_of`).
        count: values of a thread.
        rolled: the threads are a CPU's, which add up all parts, in loops; each has a slot.
        room: words that are free.

    Attributes:
        words: those that are taken.
    """

    def __init__(
        self, threads: int, teams: int, slots: int, count: int, rolled: bool = False,
        room: int = SHARED_WORDS,
    ) -> None:  # fmt: skip
        self._threads, self._teams, self._slots = threads, teams, slots
        self._count, self._rolled = count, rolled
        self._together = 1 if rolled else _parts_together(threads, slots // teams, count * slots)
        words = count * slots
        rest = words // self._together if self._together > 1 else 0
        # Apart from what others still read, if there is room.
        self._apart = words if words + rest <= room else 0
        self.words: int = words + (rest if self._apart else 0)
        self._scratch: Any = lang.shared(f32, self.words)

    def __call__(self, values: list[Expr]) -> Added:
        """The sums; other values may follow behind a barrier."""
        if self._rolled:
            return self._in_loops(values)
        t, slots, teams = lang.local_id(), self._slots, self._teams
        lanes = self._threads // slots
        step = lanes // 2
        while step:
            values = [v + lang.shuffle_xor(v, step * teams) for v in values]
            step //= 2
        with when(t % SUBGROUP < teams, lanes > 1):
            slot = t // SUBGROUP * teams + t % SUBGROUP if lanes > 1 else t
            for v, value in enumerate(values):
                self._scratch[v * slots + slot] = value
        lang.barrier()
        if self._together > 1:
            return self._shared_out()
        return Added(self._scratch, slots // teams, 0, slots, 1, teams)

    def _shared_out(self) -> Added:
        """Have each thread add up some parts of a value, and leave them side by side."""
        t, threads, slots, teams = lang.local_id(), self._threads, self._slots, self._teams
        short = slots // self._together
        items, totals = self._count * short, []
        for base in range(0, items, threads):
            item = t + base if base + threads <= items else lang.minimum(t + base, items - 1)
            at = item // short * slots + item % short
            parts = [self._scratch[at + n * short] for n in range(self._together)]
            totals.append(fold(parts, operator.add))
        if not self._apart:
            lang.barrier()
        left = short // teams
        for i, total in enumerate(totals):
            item = t + i * threads
            with when(item < items, (i + 1) * threads > items):
                part, team = item % short // teams, item % teams
                self._scratch[item // short * short + team * left + part + self._apart] = total
        lang.barrier()
        return Added(self._scratch, left, self._apart, short, left, 1)

    def _in_loops(self, values: list[Expr]) -> Added:
        """Write the values of a thread side by side; have each thread add up all parts of some."""
        scratch, count, teams = self._scratch, self._count, self._teams
        start = lang.local_id() * count
        if count % f32.per_chunk == 0:
            for v in range(0, count, f32.per_chunk):
                scratch.store(start + v, values[v : v + f32.per_chunk])
        else:
            for v, value in enumerate(values):
                scratch[start + v] = value
        lang.barrier()
        items = count * teams
        if self._threads > teams:
            for item in lang.range(lang.local_id(), items, self._threads):
                total = lang.var(scratch[item])
                for part in lang.range(lang.const(1, u32), self._threads // teams):
                    total += scratch[item + part * items]
                scratch[item] = total
            lang.barrier()
        return Added(scratch, 1, 0, 1, count, 1)


def _parts_together(threads: int, parts: int, words: int) -> int:
    """Parts that a thread adds up, so that all of the group's have some; 1: who reads has all."""
    if parts <= READ:
        return 1
    least = max(TOGETHER, -(-words // threads))
    return next(n for n in range(min(least, parts), parts + 1) if parts % n == 0)


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
    added: Added, tile: Thin, row: int, count: int, batch: Operand, first: Operand,
    p: dict[str, Expr], y: Argument, activation: str, extra: dict[str, Argument],
) -> None:  # fmt: skip
    """The epilogue and the store: a word of the output a thread."""
    per = y.dtype.per_word
    for i, offset in words_of(tile.threads, count, tile.outputs, per, row, first, p):
        out = []
        for j in range(per):
            team, r = (offset + j) // tile.outs, (offset + j) % tile.outs
            out.append(added(i * tile.outs + r, team))
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
