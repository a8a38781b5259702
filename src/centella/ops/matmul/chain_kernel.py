"""The kernel of `linear_chain`: one launch whose groups meet between the links.

Each multiprocessor has one group, which stays. A link's outputs are spread over the groups, those
of a group over its warps: `split` warps share a row of the weight, each thread of them has the same
columns of every row, and keeps x there in registers. Sums of a row are added up by shuffles, then
over its warps in shared memory; then the group's threads store outputs, and all groups meet.

Weights never wait for that. Copies of them (`cp.async`) run ahead of the products by a ring in
shared memory, across links: while the groups meet, the next link's weights arrive. A thread reads
what it copied itself, so the ring needs no barrier. What is under way hides the meeting as long as
memory takes less than the ring's bytes for it: 132 rings of 200 KB are 6 us of an H200's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.matmul.chain import GIVEN, Link
from centella.ops.operands import KERNEL

WARP = 32
CHUNK = 8  # weights of a copy
WARPS = 16  # of a group
NEVER = 0xFFFFFFFF


class LinkTile(Struct, frozen=True):
    """How a group computes a link.

    Attributes:
        split: warps that share a row; chunks: of a row, a thread.
        whole: whether all threads have so many.
    """

    split: int
    chunks: int
    whole: bool


class ChainTile(Struct, frozen=True):
    """Groups of a launch, warps of a group, rows in the ring of each thread, and the links.

    Attributes:
        parts: sums of a group that lie in shared memory at a time.
    """

    groups: int
    warps: int
    ring: int
    links: tuple[LinkTile, ...]
    parts: int

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return self.warps * WARP

    @property
    def chunks(self) -> int:
        """Of a row of the ring, a thread."""
        return max(link.chunks for link in self.links)


class _Share:
    """A group's part of a link: whole words of outputs, the rows of the weight that they need."""

    def __init__(self, number: int, link: Link, tile: LinkTile, warps: int, per_word: int) -> None:
        self.number, self.link, self.tile, self.per_word = number, link, tile, per_word
        self.k = lang.parameter(f"k{number}", u32)
        self.pitch = lang.parameter(f"ldw{number}", u32)
        self.outputs = lang.parameter(f"n{number}", u32)
        words, groups = self.outputs // per_word, lang.num_groups()
        self.first = words * lang.group_id() // groups * per_word
        self.count = words * (lang.group_id() + 1) // groups * per_word - self.first
        self.rows = self.count * (2 if link.gate else 1)
        self.across = warps // tile.split  # rows at a time
        self.steps = (self.rows + (self.across - 1)) // self.across
        warp = lang.local_id() // WARP
        self.part, self.own = warp % tile.split, warp // tile.split

    def row(self, step: Any) -> Any:
        """Which of the group's rows this warp has, of those at a time."""
        return step * self.across + self.own

    def column(self, chunk: int) -> Any:
        """The first column of a chunk of this thread."""
        lane = lang.local_id() % WARP
        return ((self.part + chunk * self.tile.split) * WARP + lane) * CHUNK

    def start(self, row: Any) -> Any:
        """Where a row of the group begins in the weight."""
        inside = lang.minimum(row, self.rows - 1)
        if not self.link.gate:
            return (self.first + inside) * self.pitch
        return (self.first + inside // 2 + inside % 2 * self.outputs) * self.pitch


class _Ring:
    """Rows of the weights of all links, one after the other, on their way to shared memory."""

    def __init__(self, tile: ChainTile, shares: Sequence[_Share], weights: Sequence[Any]) -> None:
        self._tile, self._shares, self._weights = tile, shares, weights
        shape = (tile.ring * tile.chunks, tile.threads, CHUNK)
        self._memory = lang.ptx.SharedTile(weights[0].dtype, shape, 0)
        self._link, self._step = (lang.var(lang.const(0, u32), uniform=True) for _ in "ls")
        self._in, self._out = (lang.var(lang.const(0, u32), uniform=True) for _ in "io")
        self._left = lang.var(shares[0].steps, uniform=True)  # of the link
        self._go_on()
        for _ in lang.range(lang.const(tile.ring, u32)):
            self.send()

    def send(self) -> None:
        """Start the copies of the next row; none where there is no more."""
        link, step, slot = self._link.get(), self._step.get(), self._in.get()
        for share, weight in zip(self._shares, self._weights, strict=True):
            with lang.if_(link == share.number):
                row = share.row(step)
                start, inside = share.start(row), row < share.rows
                for c in range(share.tile.chunks):
                    column, wanted = share.column(c), inside
                    if not share.tile.whole:
                        wanted = wanted & (column < share.k)
                        column = lang.minimum(column, share.k - CHUNK)
                    size = lang.select(wanted, lang.const(16, u32), lang.const(0, u32))
                    lang.ptx.cp_async(
                        self._memory, self._chunk(slot, c), weight, start + column, size=size
                    )
        lang.ptx.cp_async_commit()
        self._step.set(step + 1)
        self._left.set(self._left.get() - 1)
        self._go_on()
        self._in.set(self._next(slot))

    def _go_on(self) -> None:
        """At the end of a link go on to the next one that has rows for this group."""
        with lang.if_(self._left.get() == 0):
            for number, after in enumerate((*self._shares[1:], None), 1):
                with lang.if_((self._link.get() == number - 1) & (self._left.get() == 0)):
                    self._link.set(lang.const(number, u32))
                    self._step.set(lang.const(0, u32))
                    self._left.set(lang.const(NEVER, u32) if after is None else after.steps)

    def _next(self, slot: Any) -> Any:
        return lang.select(slot + 1 == self._tile.ring, lang.const(0, u32), slot + 1)

    def _chunk(self, slot: Any, c: int) -> Any:
        return self._memory.chunk(lang.local_id(), 0, slot * self._tile.chunks + c)

    def receive(self, weight: Any, chunks: int) -> list[list[Any]]:
        """This thread's values of the next row."""
        lang.ptx.cp_async_wait(self._tile.ring - 1)
        slot = self._out.get()
        words = [self._memory.memory.load_chunk(self._chunk(slot, c)) for c in range(chunks)]
        self._out.set(self._next(slot))
        return [weight.unpack(w) for w in words]


def _resident(*, tile: ChainTile, links: tuple[Link, ...], x: Argument, **named: Argument) -> None:
    lang.ptx.resident(1)
    weights = [named[f"w{i}"] for i in range(len(links))]
    shares = [
        _Share(
            i, link, at, tile.warps, named[f"out{i}"].dtype.per_word if f"out{i}" in named else 1
        )
        for i, (link, at) in enumerate(zip(links, tile.links, strict=True))
    ]
    parts, squares = lang.shared(f32, tile.parts), lang.shared(f32, tile.warps)
    ring = _Ring(tile, shares, weights)
    for i, share in enumerate(shares):
        norms = _columns(named[f"norm{i}"], share) if f"norm{i}" in named else None
        if i:
            lang.ptx.grid_barrier()
        values = _columns(named[f"y{i - 1}"] if i else x, share)
        if norms is not None:
            _add_squares(values, squares)
            values = [[v * n for v, n in zip(*own, strict=True)]
                      for own in zip(values, norms, strict=True)]  # fmt: skip
        for step in lang.range(share.steps):
            rows = ring.receive(weights[i], share.tile.chunks)
            total = _dot(rows, values)
            ring.send()
            total = _across(total)
            row = share.row(step)
            with lang.if_((lang.local_id() % WARP == 0) & (row < share.rows)):
                parts[row * share.tile.split + share.part] = total
        lang.barrier()
        _store(parts, squares, share, named)


def _columns(source: Any, share: _Share) -> list[list[Any]]:
    """This thread's columns of a vector, by chunks; those past the end are 0."""
    values = []
    for c in range(share.tile.chunks):
        column = share.column(c)
        at = column if share.tile.whole else lang.minimum(column, share.k - CHUNK)
        own = [v for j in range(0, CHUNK, source.dtype.per_chunk) for v in source.load(at + j)]
        if not share.tile.whole:
            own = [lang.select(column < share.k, v, 0.0) for v in own]
        values.append(own)
    return values


def _add_squares(values: list[list[Any]], squares: Any) -> None:
    """The sum of squares of each warp's columns, in shared memory."""
    total = _across(_dot(values, values))
    with lang.if_(lang.local_id() % WARP == 0):
        squares[lang.local_id() // WARP] = total


def _across(value: Any) -> Any:
    """The sum over a warp, in each of its threads."""
    for distance in (16, 8, 4, 2, 1):
        value = value + lang.shuffle_xor(value, distance)
    return value


def _dot(rows: list[list[Any]], values: list[list[Any]]) -> Any:
    """The products of a thread's columns; chunks have sums of their own."""
    sums = []
    for weights, xs in zip(rows, values, strict=True):
        total = weights[0] * xs[0]
        for w, v in zip(weights[1:], xs[1:], strict=True):
            total = lang.fma(w, v, total)
        sums.append(total)
    total = sums[0]
    for one in sums[1:]:
        total = total + one
    return total


def _store(parts: Any, squares: Any, share: _Share, named: dict[str, Any]) -> None:
    """The group's outputs of a link, as the next link takes them and as a result: words."""
    link, split, factor = share.link, share.tile.split, lang.const(share.link.alpha, f32)
    y, out = (named.get(f"{name}{share.number}") for name in ("y", "out"))
    per = share.per_word
    if link.norm:
        mean = _sum(squares, lang.const(0, u32), split) / lang.cast(share.k, f32)
        factor = 1.0 / lang.sqrt(mean + link.eps)
        factor = factor if link.alpha == 1.0 else factor * link.alpha
    for item in lang.range(lang.local_id(), share.count // per, lang.workgroup_size()):
        values = []
        for j in range(per):
            unit = item * per + j
            if link.gate:
                gate = _sum(parts, unit * 2 * split, split) * factor
                up = _sum(parts, (unit * 2 + 1) * split, split) * factor
                values.append(ACTIVATIONS[link.gate](KERNEL, gate) * up)
                continue
            value = _sum(parts, unit * split, split) * factor
            at = share.first + unit
            if link.bias:
                value = value + named[f"bias{share.number}"][at]
            if link.residual is not None:
                added = named["residual"] if link.residual == GIVEN else named[f"y{link.residual}"]
                value = value + added[at]
            values.append(value)
        if y is not None:
            for j, value in enumerate(values):
                y[share.first + item * per + j] = value
        if out is not None:
            out.store(share.first + item * per, values)


def _sum(array: Any, first: Any, count: int) -> Any:
    """So many neighbouring words, in their order."""
    total = array[first]
    for i in range(1, count):
        total = total + array[first + i]
    return total


kernel: Kernel = Kernel(_resident, workgroup=WARPS * WARP, name="linear_chain")
