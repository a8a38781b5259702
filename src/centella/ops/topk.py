"""topk: the k largest elements along the last dimension, the largest first, and their indices.

A NaN is larger than every number, and of equal elements the one with the lower index comes first,
as `argmax` has it.

A group has a part of a row. Each thread finds the best of its items (a chunk, or an element). The
k-th best of these is a bound: k threads have an item that reaches it, so the k largest elements are
among those of these k threads. The elements that reach the bound are listed, and the place of each
is the number of those that come before it. A row of one part takes one launch. The k largest of the
parts of a longer row are a row of a next launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import LETTERS, WHOLE, Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.ops.argmax import order
from centella.ops.layout import rows_of, takes_rows
from centella.ops.rows import WARP, Values, chunked, fold, load, walk
from centella.specs import Caps, Spec, make_spec

ABSENT = 0x80000000  # past every item: of a thread that has none
TOGETHER = 4  # items that a thread loads before it uses the first, if it has so many
UNROLLED = 8  # comparisons of a round
MOST = 128  # elements that are chosen of a row
SORTED = 4096  # elements of a row that the NumPy formula sorts


class Group(Struct, frozen=True):
    """Who looks through a part of a row.

    Attributes:
        threads: at least as many as elements are chosen.
        most: elements that are chosen.
        listed: elements that there is shared memory to list.
        each: elements of a thread, at most.
    """

    threads: int
    most: int
    listed: int
    each: int

    def width(self, x: Spec, k: int) -> int:
        """Elements of an item."""
        return x.dtype.per_chunk if chunked(x) and x.dtype.per_chunk * k <= self.listed else 1

    def part(self, columns: int, width: int, k: int) -> int:
        """Elements of a part of a row, of which k threads may have to list all of theirs."""
        longest = self.threads * width * (min(self.each, self.listed // k) // width)
        parts = max(-(-columns // longest), 1)
        line = WARP * width
        return -(-columns // (parts * line)) * line


GROUPS = (Group(64, 16, 1024, 64), Group(256, MOST, 1536, 32))


class TopkAttrs(Struct, frozen=True):
    """How many are chosen."""

    k: int


class Part:
    """A part of a row: from column `first`, `part` or fewer up to `last`, in items of `width`.

    Args:
        x: an argument, or what gives x[row, column] where items are single elements.
        together: items that a thread loads before it uses the first.
    """

    def __init__(
        self, x: Any, row: Any, first: Operand, last: Operand, part: Any, width: int, together: int
    ) -> None:
        self.x: Any = x
        self.row: Any = row
        self.first: Operand = first
        self.last: Operand = last
        self.width: int = width
        self.together: int = together
        least, most = ((n + (width - 1)) // width for n in (last - first, part))
        self.items: Any = lang.minimum(least, most)  # of which the host knows the second

    def values(self, item: Any) -> Values:
        """The elements of an item; those past the end may be anything."""
        column = self.first + item * self.width
        return load(self.x, self.row, column, self.last, self.width, self.width > 1)

    def best(self, whole: bool) -> tuple[Expr, Expr]:
        """The largest key of this thread's elements, and the first item that has it.

        Args:
            whole: no row ends within an item.
        """
        stride = lang.workgroup_size()
        best, at = lang.var(0, u32), lang.var(lang.local_id() + ABSENT, u32)
        for start in lang.range(lang.local_id(), self.items, stride * self.together):
            items = [start + n * stride for n in range(self.together)]
            loaded = [self.values(lang.minimum(item, self.items - 1)) for item in items]
            for item, values in zip(items, loaded, strict=True):
                key = order(fold(values if whole else self._inside(item, values), lang.maximum))
                better = (item < self.items) & ((key > best.get()) | (at.get() >= ABSENT))
                best.set(lang.select(better, key, best.get()))
                at.set(lang.select(better, item, at.get()))
        return best.get(), at.get()

    def _inside(self, item: Operand, values: Values) -> Values:
        """Values, of which those past the end are replaced by the first."""
        column = self.first + item * self.width
        rest = enumerate(values[1:], 1)
        return values[:1] + [
            lang.select(column + j < self.last, value, values[0]) for j, value in rest
        ]

    def reaching(self, bound: Operand, last: Operand) -> Iterator[tuple[Expr, Expr]]:
        """Key and column of elements of a larger key, or of this one up to item `last`."""
        for item in lang.range(lang.local_id(), self.items, lang.workgroup_size()):
            for j, value in enumerate(self.values(item)):
                key, column = order(value), self.first + item * self.width + j
                reaches = (key > bound) | ((key == bound) & (item <= last))
                with lang.if_(reaches & (column < self.last)):
                    yield key, column


def _topk(
    *, listed: int, width: int, together: int, whole: bool, x: Argument | None = None,
    codes: Argument | None = None, keys: Argument | None = None, places: Argument | None = None,
    **out: Argument,
) -> None:  # fmt: skip
    """Of x, or of the keys that the launch before has stored, whose places are columns of x."""
    columns, k, part, parts = (lang.parameter(n, u32) for n in ("columns", "k", "part", "parts"))
    row, number = lang.group_id() // parts, lang.group_id() % parts
    last = lang.minimum((number + 1) * part, columns)
    mine = Part(x if keys is None else keys, row, number * part, last, part, width, together)
    listing = lang.shared(u32, listed), lang.shared(u32, listed)
    picks = lang.shared(u32, MOST) if "values" in out else None
    count = list_best(mine, whole, k, listing, listed)
    for rank, key, column in ranked(listing, count, k):
        source = column if places is None else places[row, column]
        if picks is None:
            out["to_keys"][row, number * k + rank] = key
            out["to_places"][row, number * k + rank] = source
        else:
            picks[rank] = source
    if picks is not None:
        lang.barrier()
        _store(x, codes, row, k, picks, **out)
        return
    # Only the last part may have fewer than k: the lowest of keys, past all that there are.
    for rank in lang.range(lang.local_id() + count, k, lang.workgroup_size()):
        for name in ("to_keys", "to_places"):
            out[name][row, number * k + rank] = lang.const(0, u32)


def list_best(part: Part, whole: bool, k: Operand, listing: tuple[Any, Any], listed: int) -> Expr:
    """List keys and columns of elements of a part, its k best among them; returns how many.

    Args:
        whole: no row ends within an item.
        listing: shared memory, for `listed` each: as many as k threads have elements.
    """
    return lang.minimum(_list(part, part.best(whole), k, listing), listed)  # the host knows it


def ranked(
    listing: tuple[Any, Any], count: Expr, k: Operand
) -> Iterator[tuple[Expr, Expr, Expr]]:  # fmt: skip
    """The k best of what is listed, some in each thread: rank, key, column."""
    for candidate in lang.range(lang.local_id(), count, lang.workgroup_size()):
        key, column = own = listing[0][candidate], listing[1][candidate]
        before = lang.var(0, u32)
        for other in lang.range(lang.const(0, u32), count):
            before.set(before.get() + _precedes(listing[0][other], listing[1][other], *own))
        rank = before.get()
        with lang.if_(rank < k):
            yield rank, key, column


def _list(
    part: Part, best: tuple[Operand, Operand], k: Operand, candidates: tuple[Any, Any]
) -> Expr:
    """List the elements that reach the k-th best of the threads' items; returns how many."""
    me, threads = lang.local_id(), lang.workgroup_size()
    tops, items = (lang.shared(u32, threads) for _ in range(2))
    bound, count = lang.shared(u32, 2), lang.shared(u32, 1)
    tops[me], items[me] = best
    lang.barrier()
    before = lang.var(0, u32)
    for first in lang.range(lang.const(0, u32), lang.const(threads, u32), UNROLLED):
        for j in range(0, UNROLLED, 4):
            for top, item in zip(tops.load(first + j), items.load(first + j), strict=True):
                before.set(before.get() + _precedes(top, item, *best))
    with lang.if_(before.get() == k - 1):
        bound[0], bound[1] = best
    with lang.if_(me == 0):
        count[0] = lang.const(0, u32)
    lang.barrier()
    least, last = bound[0], bound[1]
    with lang.if_((best[0] > least) | ((best[0] == least) & (best[1] <= last))):
        for key, column in part.reaching(least, last):
            slot = lang.atomic_add(count, 0, 1)
            candidates[0][slot], candidates[1][slot] = key, column
    lang.barrier()
    return count[0]


def _precedes(key: Operand, at: Operand, own_key: Operand, own_at: Operand) -> Expr:
    """1 where a key is larger than this thread's, or equal and at a lower index; else 0."""
    first = (key > own_key) | ((key == own_key) & (at < own_at))
    return lang.select(first, lang.const(1, u32), lang.const(0, u32))


def _store(
    x: Any, codes: Any, row: Any, k: Operand, picks: Any, values: Argument, indices: Any
) -> None:
    """The elements of x at the columns that were picked, and these, or the codes there."""
    for rank in walk(k, 1):
        code = picks[rank] if codes is None else codes[row, picks[rank]]
        indices[row, rank] = lang.bitcast(code, i32)
    per = values.dtype.per_word
    for rank in walk(k, per):
        chosen = [picks[lang.minimum(rank + j, k - 1)] for j in range(per)]
        values.store(row, rank, [x[row, column] for column in chosen])


kernel: Kernel = Kernel(_topk, workgroup=GROUPS[0].threads, name="topk")


def rule(specs: tuple[Spec, ...], attrs: TopkAttrs) -> tuple[Out, ...]:
    """[..., n] to [..., k] and [..., k] of i32; k from 1 to n and `MOST`."""
    x, k = specs[0], attrs.k
    if not x.shape:
        raise ShapeError("topk: expected rank 1 or more, got a scalar")
    if x.dtype.kind == "bool":
        raise DTypeError("topk: expected a numeric dtype, got bool")
    n = x.shape[-1]
    if not 0 < k <= min(n, MOST):
        raise ShapeError(
            f"topk: expected k from 1 to {min(n, MOST)}, for rows of {n} elements and at most "
            f"{MOST}, got {k}"
        )
    shape = (*x.shape[:-1], k)
    return (shape, x.dtype), (shape, i32)


def reference(x: Array, k: int) -> tuple[Array, Array]:
    """The NumPy formula."""
    n = x.shape[-1]
    if n <= SORTED:
        at = _sorted(x)[..., :k]
    else:
        at = np.empty((*x.shape[:-1], k), np.int64)
        for columns, row in zip(at.reshape(-1, k), x.reshape(-1, n), strict=True):
            columns[:] = _of_long(row, k)
    return np.take_along_axis(x, at, -1), at.astype(np.int32)


def _sorted(x: Array) -> Array:
    """Columns, those of the largest elements first."""
    # From the other end, since a stable order has the lower index first and NaN last.
    order: Array = x.shape[-1] - 1 - np.argsort(x[..., ::-1], -1, kind="stable")[..., ::-1]
    return order


def _of_long(row: Array, k: int) -> Array:
    """Columns of the k largest elements of a row: those that reach the k-th are sorted."""
    least = np.partition(row, -k)[-k]
    reaching = np.flatnonzero(~(row < least) if least == least else np.isnan(row))
    columns: Array = reaching[_sorted(row[reaching])[:k]]
    return columns


def lower(form: Form[TopkAttrs], caps: Caps) -> Lowered:
    """A group a part of a row: one launch, then others while there are several parts."""
    x, *results = (rows_of(s) for s in (*form.inputs, *form.outputs))
    chosen = {"values": Ref(1, results[0]), "indices": Ref(2, results[1])}
    return Lowered(*launches({"x": Ref(0, x)}, chosen, form.attrs.k, 3))


def launches(
    data: Mapping[str, Ref], chosen: Mapping[str, Ref], k: int, first: int
) -> tuple[tuple[Call, ...], tuple[Spec, ...]]:
    """The launches that choose k of each row, and the memory that lies between them.

    Args:
        data: x, and with codes, u32, what the columns of x are called.
        chosen: values and indices.
        first: number of the first temporary among what an op has.
    """
    rows, group = data["x"].spec.shape[0], next(g for g in GROUPS if k <= g.most)
    calls: list[Call] = []
    temporaries: list[Spec] = []
    source: Mapping[str, Ref] = {"x": data["x"]}
    parts = 0
    while parts != 1:
        looked_at = next(iter(source.values())).spec
        columns, width = looked_at.shape[1], group.width(looked_at, k)
        part = group.part(columns, width, k)
        parts = -(-columns // part)
        between = [Ref(first + len(temporaries) + i, make_spec((rows, parts * k), u32, 16))
                   for i in range(2)]  # fmt: skip
        reads: Mapping[str, Ref] = {**source, **data}
        writes = chosen
        if parts > 1:
            reads, writes = source, dict(zip(("to_keys", "to_places"), between, strict=True))
            temporaries += [ref.spec for ref in between]
        constants = (("listed", group.listed), ("width", width), ("whole", columns % width == 0),
                     ("together", min(TOGETHER, group.each // width)))  # fmt: skip
        scalars = (("columns", columns), ("k", k), ("part", part), ("parts", parts))
        names = signature(dict.fromkeys(reads, 2), dict.fromkeys(writes, 2))
        calls.append(Call(kernel, (*reads.values(), *writes.values()), scalars, constants,
                          rows * parts, group.threads, names))  # fmt: skip
        source = dict(zip(("keys", "places"), between, strict=True))
    return tuple(calls), tuple(temporaries)


def axes_of(form: Form[TopkAttrs]) -> Axes:
    """Rows."""
    rows = LETTERS[: len(form.outputs[0].shape) - 1] + WHOLE
    return axes([rows], [rows, rows])


TOPK: Op[TopkAttrs] = Op(
    "topk", rule, reference, lower, takes_rows, attrs=TopkAttrs, axes=axes_of, doc=__doc__ or ""
)
