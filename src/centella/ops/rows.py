"""What kernels over rows share: who has which elements of a row, and how they meet.

A thread takes an item (a chunk or a word) of a row at a time. A team of threads has a row; rows up
to a length are held in registers or shared memory, so that each is read once, and longer ones are
walked anew in each pass. A kernel says what it does with an item; `Row` gives it the items.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import DType, u32
from centella.emit.program import Call, Constants, Kernel, Ref
from centella.lang.kernel_params import Signature
from centella.lang.values import Expr, Operand
from centella.specs import Caps, Spec

Values = list[Any]

WARP = 32  # threads that shuffle
QUAD = 4  # of which have a row of what tensor cores add up
LEAST = 2  # of a team: a driver that sees a whole row in one thread takes x / x for 1, NaN or not
MOST = 32  # elements of a row that a thread holds
ENOUGH = 16  # of a row that is shared by more than a warp: as many as hide the way to memory
THREADS = 128  # of a group, at least
WALKERS = 256  # of a group whose row is walked; of others, unless more are needed
RESIDENT = 1024  # threads of a multiprocessor with the registers that rows need
# Of long rows: threads of a group, groups of a multiprocessor, items a thread has registers for.
LONG: tuple[tuple[int, int, int], ...] = ((512, 3, 15), (512, 2, 23), (1024, 1, 22))
RESERVED = 1024  # bytes of shared memory of a group that are the driver's
BESIDE = RESERVED + 1024  # and what is not the row
RADIX = 32  # values of other threads that one adds up at a time

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "max": lang.maximum, "min": lang.minimum, "fmax": lang.fmax,
}  # fmt: skip


def chunked(*specs: Spec) -> bool:
    """True when all of these can be read and written in 16-byte chunks of one item size."""
    return all(s.aligned and s.unit_rows for s in specs) and (
        len({s.dtype.itemsize for s in specs}) == 1
    )


def width_of(y: Any, chunk: bool) -> int:
    """Elements of y (an argument or a Spec) that a thread handles at a time."""
    return int(y.dtype.per_chunk if chunk else y.dtype.per_word)


def rows_call(
    kernel: Kernel, refs: tuple[Ref, ...], rows: int, columns: int, width: int,
    scalars: Mapping[str, int | float], constants: Constants, signature: Signature | None = None,
) -> Call:  # fmt: skip
    """The launch of a kernel whose threads have an item of `width` columns each (`place_of`)."""
    items = -(-columns // width)
    launch_scalars = {"items": items, "threads": rows * items, **scalars}
    groups = -(-rows * items // kernel.workgroup)
    return Call(kernel, refs, tuple(launch_scalars.items()), constants, groups, signature=signature)


def strides_of(**specs: Spec) -> dict[str, int]:
    """The strides of all dimensions but the last, as `elements.offset_of` reads them."""
    return {
        f"{n}{axis}": s for n, spec in specs.items() for axis, s in enumerate(spec.strides[:-1])
    }


def place_of(width: int) -> tuple[Expr, Expr]:
    """Row and first column of this thread's item, where a row has `items` of `width` elements."""
    thread, items = lang.global_id(), lang.parameter("items", u32)
    row = thread // items
    return row, (thread - row * items) * width


def walk(columns: Operand, width: int) -> Iterator[Expr]:
    """The columns at which this thread's items start."""
    items = (columns + (width - 1)) // width
    for item in lang.range(lang.local_id(), items, lang.workgroup_size()):
        yield item * width


def load(x: Any, row: Any, column: Any, columns: Operand, width: int, chunk: bool) -> Values:
    """`width` elements from a column; those past the row's end are some element of it."""
    if chunk:
        return x.load(row, column)  # type: ignore[no-any-return]  # traced values
    if width == 1:
        return [x[row, column]]
    return [x[row, lang.minimum(column + j, columns - 1)] for j in range(width)]


def fold(values: Values, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine a list as a balanced tree."""
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]


def over_lanes(value: Any, lanes: int, op: str = "add", *, falling: bool = False) -> Any:
    """Combine a value of each of so many neighbouring lanes, a power of two: all get the result.

    Args:
        falling: those that are furthest apart come first, not neighbours.
    """
    masks = [1 << step for step in range(lanes.bit_length() - 1)]
    for mask in reversed(masks) if falling else masks:
        value = COMBINE[op](value, lang.shuffle_xor(value, mask))
    return value


def chunk_of(tile: Any, slot: Any) -> Any:
    """Where `stmatrix` of four matrices wants this thread's chunk of 64 rows, a warpgroup's."""
    thread = lang.local_id()
    line = thread // 32 % 4 * 16 + thread % 16
    return tile.chunk(line, thread // 16 % 2, slot)


def top_pair(words: Values, dtype: DType) -> Any:
    """The largest of the lower and of the upper 16-bit values of words, as a word of two."""
    return fold(words, lambda a, b: lang.ptx.max_pairs(a, b, dtype))


# -- who has a row ---------------------------------------------------------------------------------


class Team(Struct, frozen=True):
    """The threads that share a row, and what each has of it.

    Attributes:
        lanes: threads of a team, a power of two.
        threads: of a group, which has `teams` rows.
        items: of a thread; 0: the row is walked.
        sure: of these the first that no row ends before.
        parted: True where a row may end within an item.
        shuffle: True where the lanes of a warp are neighbouring threads.
        resident: groups that a multiprocessor shall have registers for; 0: as many as it likes.
        stored: whether the row lies in shared memory, as it is stored, and not in registers.
    """

    lanes: int
    threads: int
    items: int
    sure: int
    parted: bool
    shuffle: bool
    resident: int = 0
    stored: bool = False

    @property
    def teams(self) -> int:
        """Rows of a group."""
        return self.threads // self.lanes

    def groups(self, rows: int) -> int:
        """Groups for so many rows."""
        return -(-rows // self.teams)


def team_of(
    columns: int, width: int, caps: Caps, least: int | None = None, held: int = MOST
) -> Team:  # fmt: skip
    """Who has a row of `columns`, or from `least` to `columns`, in items of `width` elements.

    A thread holds up to `held` elements.

    Of the teams that can hold the row the one that leaves the fewest places empty, then the
    largest: a warp or a part of one as long as that holds the row, then as many as need not hold
    much, then as many as can.
    """
    least = columns if least is None else least
    items, parted = max(-(-columns // width), 1), columns % width + least % width > 0
    masks = width if parted else 0  # which take registers too
    most, enough = (held - masks) // width, ENOUGH // width
    if items <= WARP * most:
        largest = max(min(WARP, power_above(items)), LEAST)
    else:
        few = power_above(-(-items // most))
        largest = min(max(few, min(WALKERS, power_above(-(-items // enough)))), caps.max_workgroup)
    sizes = [n for n in (largest, largest // 2, largest // 4) if n >= LEAST]
    fitting = [n for n in sizes if -(-items // n) <= most and columns]
    if not fitting:
        walkers = min(WALKERS, caps.max_workgroup)
        return Team(walkers, walkers, 0, 0, parted, caps.shuffles)
    lanes = min(fitting, key=lambda n: (-(-items // n) * n, -n))
    sure = least // (lanes * width)
    threads = max(THREADS, lanes)
    resident = RESIDENT // threads if caps.shuffles and WALKERS < threads < RESIDENT else 0
    return Team(lanes, threads, -(-items // lanes), sure, parted, caps.shuffles, resident)


def long_team(
    team: Team, columns: int, width: int, caps: Caps, least: int | None = None, *,
    stored: bool = False,
) -> Team:  # fmt: skip
    """On CUDA, in place of a team that walks its row or whose group has a multiprocessor alone.

    Groups that share a multiprocessor load, compute and store at different times.

    Args:
        team: as `team_of` has it, of the same `columns`, `width`, `caps` and `least`.
        stored: the row lies in shared memory; else a thread keeps one number of each item.
    """
    if not (team.shuffle and columns) or (team.items and team.threads < RESIDENT):
        return team
    for lanes, groups, most in LONG:
        if team.items and groups == 1:
            break
        stays = -(-columns // (width * lanes))
        memory = groups * (16 * lanes * stays + BESIDE)
        if memory <= caps.max_shared + RESERVED if stored else stays + team.parted <= most:
            # The last stored item is guarded in every row: else ptxas computes its powers beside
            # those of the item before, and lacks a register.
            sure = min((columns if least is None else least) // (width * lanes), stays - stored)
            return Team(lanes, lanes, stays, sure, team.parted, True, groups, stored)
    return team


def power_above(least: int) -> int:
    """The smallest power of two from a number on."""
    return 1 << (least - 1).bit_length()


# -- in a kernel -----------------------------------------------------------------------------------


class Item(Struct, frozen=True, eq=False):
    """Neighbouring elements of a row that a thread has.

    Attributes:
        column: of the first; where that lies past the row's end, 0.
        inside: of each element whether the row has it; None: it has.
        index: among those that the thread holds; -1: it is walked.
    """

    column: Any
    inside: tuple[Any, ...] | None
    index: int

    def masked(self, values: Values, neutral: Any) -> Values:
        """Values with those past the row's end replaced."""
        if self.inside is None:
            return values
        return [lang.select(i, v, neutral) for i, v in zip(self.inside, values, strict=True)]


Columns = Operand | Callable[[Expr], Operand]  # of a row


class Row:
    """The row of this thread's team.

    Args:
        columns: of the row, or what they are of the row of a number.
        width: elements of an item.
        rows: of the launch.

    Attributes:
        number: of the row; teams past the last row have the last, and store nothing.
    """

    def __init__(self, team: Team, width: int, columns: Columns, rows: Operand) -> None:
        self._team, self._width = team, width
        self._there: Expr | None = None
        self.number: Expr = lang.group_id()
        self.lane: Expr = lang.local_id()
        if team.teams > 1:
            number = self.number * team.teams + self.lane // team.lanes
            self.lane = self.lane % team.lanes
            self._there, self.number = number < rows, lang.minimum(number, rows - 1)
        self._columns: Operand = columns(self.number) if callable(columns) else columns
        if team.resident:
            lang.ptx.resident(team.resident)
        self._items = [self._item(index) for index in range(team.items)]

    def _item(self, index: int) -> Item:
        column = (self.lane + index * self._team.lanes) * self._width
        if index < self._team.sure:
            return Item(column, None, index)
        inside = self._inside(column)
        return Item(lang.select(inside[0], column, 0), inside, index)

    def _inside(self, column: Operand) -> tuple[Expr, ...]:
        first = column < self._columns
        rest = range(1, self._width)
        return (first, *(column + j < self._columns if self._team.parted else first for j in rest))

    @property
    def unrolled(self) -> bool:
        """Whether this thread's items are not walked."""
        return bool(self._items)

    def items(self) -> Iterator[Item]:
        """This thread's items; a loop on the device where the row is walked."""
        yield from self._items
        if not self._items:
            for column in walk(self._columns, self._width):
                inside = self._inside(column) if self._team.parted and self._width > 1 else None
                yield Item(column, inside, -1)

    def kept(self, make: Callable[[Item], Any]) -> Callable[[Item], Any]:
        """What `make` gives, computed once for an item that is not walked."""
        have: dict[int, Any] = {}

        def get(item: Item) -> Any:
            if item.index < 0:
                return make(item)
            if item.index not in have:
                have[item.index] = make(item)
            return have[item.index]

        for item in self._items:  # all loads are on their way before the first is used
            get(item)
        return get

    def stored(self, loaded: Callable[[Item], Values]) -> Callable[[Item], Values]:
        """The words of this thread's items, from shared memory."""
        threads, me = self._team.threads, lang.local_id()
        memory = lang.shared(u32, 4 * threads * self._team.items)
        for item in self._items:
            memory.store_chunk(me + item.index * threads, loaded(item))
        return lambda item: memory.load_chunk(me + item.index * threads)

    def total(self, of: Callable[[Item], Values], neutral: Any, op: str) -> Any:
        """Combine what `of` gives for all elements of the row, in every thread of the team."""
        combine = COMBINE[op]
        return self.across(
            self.own(lambda item: fold(item.masked(of(item), neutral), combine), neutral, op), op
        )

    def own(self, of: Callable[[Item], Any], neutral: Any, op: str) -> Any:
        """Combine what `of` gives for each of this thread's items."""
        combine = COMBINE[op]
        if self._items:
            return fold([of(item) for item in self._items], combine)
        total = lang.var(neutral)
        for item in self.items():
            total.set(combine(total, of(item)))
        return total.get()

    def first(self) -> Any:
        """Where this thread is the first of a team that has a row."""
        first = self.lane == 0
        return first if self._there is None else first & self._there

    @contextmanager
    def storing(self, item: Item) -> Iterator[None]:
        """Where this thread has an item of a row that there is."""
        conditions = [] if self._there is None else [self._there]
        if item.index >= 0 and item.inside is not None:
            conditions.append(item.inside[0])
        if not conditions:
            yield
            return
        with lang.if_(fold(conditions, operator.and_)):
            yield

    def across(self, value: Operand, op: str) -> Any:
        """Combine a value of each thread of the team, in a fixed order."""
        team, me, combine = self._team, lang.local_id(), COMBINE[op]
        lanes = team.lanes  # that have a value each
        if team.shuffle:
            value = over_lanes(value, min(team.lanes, WARP), op)
            lanes = -(-lanes // WARP)
        if lanes == 1:
            return value
        per = team.lanes // lanes
        scratch = lang.shared(value.dtype, team.threads // per)
        if per == 1:
            scratch[me] = value
        else:
            with lang.if_(me % per == 0):
                scratch[me // per] = value
        lang.barrier()
        if lanes > RADIX:
            few = lanes // RADIX
            parts, scratch = scratch, lang.shared(value.dtype, team.threads // RADIX)
            with lang.if_(me < team.threads // RADIX):
                first = me // few * lanes + me % few
                scratch[me] = fold([parts[first + j * few] for j in range(RADIX)], combine)
            lang.barrier()
            lanes = few
        first = me // team.lanes * lanes if team.teams > 1 else lang.const(0, u32)
        if lanes % 4:
            return fold([scratch[first + j] for j in range(lanes)], combine)
        chunks = [scratch.load(first + j) for j in range(0, lanes, 4)]
        return fold([v for chunk in chunks for v in chunk], combine)
