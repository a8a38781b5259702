"""The thin product with B contiguous along n: C [m, n] = alpha A [m, k] B [k, n], m <= 16.

A thread owns the columns of one 16-byte chunk of B, for all rows of A; the depth is dealt to
`slices` threads of a group, eight neighbouring k at a time, and their sums are combined through
shared memory in a fixed order. Where the columns alone give too few groups, the depth is split
among groups as well: each writes partial sums, which a second launch adds in order.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.thin import SHARED_WORDS, combine, power_of_two

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
    *, tile: Columns, exact_k: bool, vector_a: bool, vector_b: bool, a: Any, b: Any, y: Any
) -> None:
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
    places = [batch * p["sa"] + row * p["rowa"] for row in rows]
    sums = lang.vars(f32, tile.m, width, init=0.0)
    for k in lang.range(start + t // tile.across * AHEAD, end, tile.depth):
        ks = [k + j if exact_k else lang.minimum(k + j, p["k"] - 1) for j in range(AHEAD)]
        bs = [_row_of_b(b, batch * p["sb"] + at * p["ldb"], column, p["n"], vector_b) for at in ks]
        left = [_row_of_a(a, place, k, ks, p, vector_a) for place in places]
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


def _kept(condition: Any, value: Any) -> Any:
    return lang.select(condition, value, 0.0)


def _row_of_b(b: Any, start: Any, column: Any, n: Any, vector: bool) -> list[Any]:
    """The thread's columns of one row of B."""
    if vector:
        return b.load(start + column)  # type: ignore[no-any-return]  # traced values
    return [b[start + lang.minimum(column + j, n - 1)] for j in range(b.dtype.per_chunk)]


def _row_of_a(
    a: Any, place: Any, k: Any, ks: list[Any], p: dict[str, Any], vector: bool
) -> list[Any]:
    """One row of A at neighbouring k."""
    if not vector:
        return [a[place + at * p["stepa"]] for at in ks]
    values: list[Any] = []
    per = a.dtype.per_chunk
    for j in range(0, AHEAD, per):
        at = lang.minimum(k + j, (p["k"] - 1) // per * per) if j else k
        values += a.load(place + at)
    return values


def _finish(
    sums: Any, tile: Columns, width: int, item: Any, first: Any, p: dict[str, Any], y: Any
) -> None:
    """Combine the slices of each column, then store whole words; alpha on the way."""
    t, per = lang.local_id(), y.dtype.per_word
    rows = min(tile.m, power_of_two(SHARED_WORDS // (tile.threads * width)))
    scratch = lang.shared(f32, tile.threads * width * rows)
    alpha = lang.parameter("alpha", f32)
    for row in range(0, tile.m, rows):
        if row:
            lang.barrier()
        values = [sums[row + i][c] for i in range(rows) for c in range(width)]
        for v, value in enumerate(values):
            scratch[v * tile.threads + t] = value
        lang.barrier()
        pitch = combine(scratch, len(values), tile.threads, tile.across, False, tile.rolled)
        words = tile.across * width // per

        def store(one: Any, row: int = row, pitch: int = pitch, words: int = words) -> None:
            i, place = one // words, one % words * per
            inside = (one < rows * words) & (row + i < p["m"]) & (first + place < p["n"])
            with lang.if_(inside):
                out = []
                for j in range(per):
                    thread, lane = (place + j) // width, (place + j) % width
                    out.append(scratch[(i * width + lane) * pitch + thread] * alpha)
                y.store(item * p["sy"] + (row + i) * p["ldy"] + (first + place), out)

        if tile.rolled:
            for one in lang.range(t, rows * words, tile.threads):
                store(one)
        else:
            for base in range(0, rows * words, tile.threads):
                store(t + base)


def _add_parts(*, activation: str, parts: Any, y: Any, **extra: Any) -> None:
    """y = f(alpha sum_s parts[s]), as any product ends: a word a thread, the parts in order."""
    p = {n: lang.parameter(n, u32) for n in (
        "m", "n", "words", "splits", "ldp", "sp", "ldy", "sy", "items")}  # fmt: skip
    item, per = lang.global_id(), y.dtype.per_word
    with lang.if_(item < p["items"]):
        row, word = item // p["words"], item % p["words"]
        batch = row // p["m"]
        column, row = word * per, row - batch * p["m"]
        sums = lang.vars(f32, per, init=0.0)
        for split in lang.range(p["splits"]):
            start = (batch * p["splits"] + split) * p["sp"] + row * p["ldp"]
            for j, total in enumerate(sums):
                at = lang.minimum(column + j, p["n"] - 1) if j else column
                total.set(total + parts[start + at])
        finish = Epilogue(activation, extra, column, per, p["n"])
        y.store(batch * p["sy"] + row * p["ldy"] + column, finish(list(sums), row))


columns: Kernel = Kernel(_columns, workgroup=256, name="columns", rewritable=True)
add_parts: Kernel = Kernel(_add_parts, workgroup=256, name="add_parts", rewritable=True)
