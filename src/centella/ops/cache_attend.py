"""cache_attend: a decoder's step of one token in a short cache, in one launch.

    K[b, h, s_b] = k[b, h]    V[b, h, s_b] = v[b, h]
    y[b, h] = softmax(scale q[b, h] K[b, h, :s_b + 1]^T) V[b, h, :s_b + 1]

It stands for `cache_write` and `attention`, which splits keys among groups and takes two launches.
Here a group has a head: so caches are short, and each head of queries has keys of its own. Nothing
is written past the capacity, as in `cache_write`.

A thread has a key at a time for the scores, which it keeps; then a chunk of the head and every so
many values. What earlier steps have written is loaded first, on Hopper before the launches before
this one are over; the step's own key and value are read in workgroup memory. So nothing that a
launch writes is read in it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, f32, i32, narrow, u32, widen
from centella.emit.program import Call, HostProgram, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument, Shared
from centella.lang.values import Expr, Operand
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.ops.attention.masks import LOWEST
from centella.ops.attention.weights import LOG2E
from centella.ops.cache import write_reference
from centella.ops.layout import flat
from centella.ops.rows import Item, Row, Team, fold, strides_of
from centella.specs import Caps, Spec

THREADS = 256
MOST_DIM = 128  # elements of a head
MOST_KEYS = 1024  # positions of a sequence
TOGETHER = 4  # values that a thread loads at once
MOST_WORDS = 64  # of keys that a thread has registers for


def fits(dim: int, capacity: int, itemsize: int) -> bool:
    """Whether a head of so many elements, and so many positions, are computed at once."""
    return 0 < dim <= MOST_DIM and capacity <= MOST_KEYS and dim * itemsize % 16 == 0


def _attend(
    *, dim: int, early: bool, team: Team, q: Argument, k: Argument, v: Argument, starts: Argument,
    y: Argument, keys: Argument, values: Argument,
) -> None:  # fmt: skip
    """A group has a head of a sequence.

    Args:
        early: the next launch may begin at once: few groups leave most of a GPU free.
    """
    if early:
        lang.ptx.launch_dependents()
    me, per = lang.local_id(), keys.dtype.per_chunk
    heads, capacity = lang.parameter("heads", u32), lang.parameter("capacity", u32)
    head, b = lang.group_id() % heads, lang.group_id() // heads
    rows = {n: _place(n, b, head) for n in ("q", "k", "v", "kc", "vc")}
    key_pitch, value_pitch = lang.parameter("kc2", u32), lang.parameter("vc2", u32)
    position = lang.bitcast(starts[b], u32)
    past = lang.minimum(position, capacity)  # keys of earlier steps
    length = lang.minimum(position + 1, capacity)
    cached_keys = _Keys(keys, rows["kc"], key_pitch, dim, team.items, past)
    cached_values = _Values(values, rows["vc"], value_pitch, dim, past)
    if early:
        lang.ptx.await_launches()
    query, key, value = (lang.shared(f32, dim) for _ in range(3))
    with lang.if_(me < dim // per):
        at, factor = me * per, lang.parameter("scale", f32)
        new_key, new_value = k.load(rows["k"] + at), v.load(rows["v"] + at)
        _put(query, at, [x * factor for x in q.load(rows["q"] + at)])
        _put(key, at, new_key)
        _put(value, at, new_value)
        with lang.if_(position < capacity):
            keys.store(rows["kc"] + position * key_pitch + at, new_key)
            values.store(rows["vc"] + position * value_pitch + at, new_value)
    lang.barrier()

    row = Row(team, 1, length, lang.const(1, u32))

    def score(item: Item) -> Any:
        total = lang.var(0.0)
        with lang.if_(item.column == position):
            total.set(_dot(query, key.load, range(0, dim, 4)))
        with lang.else_():
            total.set(cached_keys.score(query, item))
        return total.get()

    scores = row.kept(score)
    top = row.total(lambda item: [scores(item)], LOWEST, "max")
    weigh = row.kept(lambda item: item.masked([lang.exp2(scores(item) - top)], 0.0)[0])
    whole = row.total(lambda item: [weigh(item)], 0.0, "add")
    weights = lang.shared(f32, team.items * THREADS)
    for item in row.items():
        weights[me + item.index * THREADS] = weigh(item)
    lang.barrier()
    own = value, position, position < capacity
    cached_values.store(weights, own, (_place("y", b, head), y), whole)


def _put(memory: Shared, at: Operand, values: list[Any]) -> None:
    """Write a chunk of a row to workgroup memory."""
    for e in range(0, len(values), 4):
        memory.store(at + e, values[e : e + 4])


def _dot(query: Shared, load: Callable[[Any], list[Any]], columns: range) -> Any:
    """The product of the query with a row, of which `load` gives what is at a column."""
    chains: list[Any] = [lang.const(0.0, f32)] * 4
    for first in columns:
        loaded = load(first)
        for e in range(0, len(loaded), 4):
            pairs = zip(loaded[e : e + 4], query.load(first + e), chains, strict=True)
            chains = [lang.fma(x, y, total) for x, y, total in pairs]
    return fold(chains, operator.add)


class _Keys:
    """Cached keys of a thread: those that it has registers for are loaded at once."""

    def __init__(
        self, source: Argument, start: Any, pitch: Any, dim: int, items: int, past: Any
    ) -> None:  # fmt: skip
        self._source, self._start, self._pitch = source, start, pitch
        self._columns = range(0, dim, source.dtype.per_chunk)
        words = 4 * len(self._columns)
        self._ahead: list[list[Any]] = []
        for index in range(min(items, MOST_WORDS // words)):
            column = lang.local_id() + index * THREADS
            kept = lang.vars(u32, words)
            with lang.if_(column < past):
                for n, first in enumerate(self._columns):
                    loaded = source.load_bits(self._at(column) + first)
                    for var, word in zip(kept[4 * n : 4 * n + 4], loaded, strict=True):
                        var.set(word)
            self._ahead.append(kept)

    def _at(self, column: Any) -> Any:
        return self._start + column * self._pitch

    def score(self, query: Shared, item: Item) -> Any:
        """The product with the query of the key that an item is."""
        per = self._source.dtype.per_chunk

        def load(first: int) -> list[Any]:
            if item.index >= len(self._ahead):
                return self._source.load(self._at(item.column) + first)
            n = 4 * (first // per)
            words = self._ahead[item.index][n : n + 4]
            return self._source.unpack([w.get() for w in words])

        return _dot(query, load, self._columns)


class _Values:
    """Cached values: a team of threads has a row at a time, the first TOGETHER loaded at once."""

    def __init__(self, source: Argument, start: Any, pitch: Any, dim: int, past: Any) -> None:
        self._source, self._start, self._pitch = source, start, pitch
        self._dim, self._past, self._per = dim, past, source.dtype.per_chunk
        lanes = dim // self._per
        self._teams = THREADS // lanes
        self._team, self._lane = lang.local_id() // lanes, lang.local_id() % lanes
        self._ahead = [lang.vars(u32, 4) for _ in range(TOGETHER)]
        for key, kept in zip(self._next(self._team), self._ahead, strict=True):
            with lang.if_((key < past) & (self._team < self._teams)):
                for var, word in zip(kept, self._bits(key), strict=True):
                    var.set(word)

    def _next(self, first: Any) -> list[Any]:
        return [first + n * self._teams for n in range(TOGETHER)]

    def _bits(self, key: Any) -> list[Any]:
        return self._source.load_bits(self._start + key * self._pitch + self._lane * self._per)

    def _bits_or_zeros(self, key: Any) -> list[Any]:
        """A weight of 0 does not hide an infinite value, so rows that there are not are zeros."""
        bits = self._bits(lang.minimum(key, self._past - 1))
        return [lang.select(key < self._past, word, 0) for word in bits]

    def store(
        self, weights: Shared, own: tuple[Shared, Any, Any], to: tuple[Any, Any], whole: Any
    ) -> None:  # fmt: skip
        """Write the weighed values, which teams add up for every so many keys, over their weights.

        Threads of a team have a chunk of the head each.

        Args:
            own: the step's value, its position, and whether that is in the cache.
            to: where the result begins, and of what.
        """
        me, per, dim = lang.local_id(), self._per, self._dim
        parts = lang.shared(f32, self._teams * dim)
        sums = lang.vars(f32, per, init=0.0)

        def add(keys: list[Any], rows: list[list[Any]]) -> None:
            for key, row in zip(keys, rows, strict=True):
                at = lang.minimum(key, weights.words - 1)
                weight = lang.select(key < self._past, weights[at], 0.0)
                for total, value in zip(sums, self._source.unpack(row), strict=True):
                    total.set(lang.fma(weight, value, total))

        with lang.if_(self._team < self._teams):
            add(self._next(self._team), [[w.get() for w in kept] for kept in self._ahead])
            step = self._teams * TOGETHER
            for first in lang.range(self._team + step, self._past, step):
                keys = self._next(first)
                add(keys, [self._bits_or_zeros(key) for key in keys])
            value, position, inside = own
            with lang.if_(inside & (position % self._teams == self._team)):
                for e in range(per):
                    column = self._lane * per + e
                    sums[e].set(lang.fma(weights[position], value[column], sums[e]))
            _put(parts, self._team * dim + self._lane * per, [s.get() for s in sums])
        lang.barrier()
        start, y = to
        word = y.dtype.per_word
        with lang.if_(me < dim // word):
            out = []
            for e in range(word):
                each = [parts[n * dim + me * word + e] for n in range(self._teams)]
                out.append(fold(each, operator.add) / whole)
            y.store(start + me * word, out)


def _place(name: str, b: Operand, head: Operand) -> Expr:
    """Where a head of a sequence begins in an operand."""
    return b * lang.parameter(f"{name}0", u32) + head * lang.parameter(f"{name}1", u32)


kernel: Kernel = Kernel(_attend, workgroup=THREADS, name="cache_attend")


class CacheAttendAttrs(Struct, frozen=True):
    """The factor of scores."""

    scale: float


def rule(specs: tuple[Spec, ...], attrs: CacheAttendAttrs) -> tuple[Out, ...]:
    """Caches [b, h, capacity, d] twice, q, k and v [b, h, 1, d], starts [b]; y is [b, 1, h, d]."""
    keys, values, *rows, starts = specs
    if len(keys.shape) != 4 or not fits(keys.shape[3], keys.shape[2], keys.dtype.itemsize):
        raise ShapeError(
            f"cache_attend: expected a cache [b, h, up to {MOST_KEYS}, d], rows of whole chunks, "
            f"d up to {MOST_DIM}, got {list(keys.shape)}"
        )
    b, h, _, d = keys.shape
    if values.shape != keys.shape or any(s.shape != (b, h, 1, d) for s in rows):
        raise ShapeError(
            f"cache_attend: expected q, k and v [{b}, {h}, 1, {d}], got "
            f"{[list(s.shape) for s in rows]}"
        )
    if starts.shape != (b,) or starts.dtype is not i32:
        raise ShapeError(
            f"cache_attend: expected i32 starts [{b}], got {starts.dtype.name} {list(starts.shape)}"
        )
    if not keys.dtype.is_float or any(s.dtype is not keys.dtype for s in (values, *rows)):
        names = [s.dtype.name for s in (keys, values, *rows)]
        raise DTypeError(f"cache_attend: expected one float dtype, got {names}")
    same = keys.shape, keys.dtype
    return same, same, ((b, 1, h, d), keys.dtype)


def reference(
    keys: Array, values: Array, q: Array, k: Array, v: Array, starts: Array, scale: float = 1.0
) -> Any:
    """The NumPy formula: changes `keys` and `values`."""
    write_reference(keys, values, k, v, starts)
    return keys, values, attended(keys, values, q, starts, scale)


def attended(keys: Array, values: Array, q: Array, starts: Array, scale: float) -> Array:
    """What the queries see of caches that are written."""
    b, h, capacity, d = keys.shape
    y = np.empty((b, 1, h, d), q.dtype)
    for row, start in enumerate(starts.tolist()):
        end = min(start + 1, capacity)
        scores = np.matmul(q[row] * q.dtype.type(scale), keys[row, :, :end].swapaxes(-1, -2))
        e = np.exp(scores - scores.max(-1, keepdims=True))
        y[row] = (np.matmul(e, values[row, :, :end]) / e.sum(-1, keepdims=True)).swapaxes(0, 1)
    return y


def host(form: Form[CacheAttendAttrs]) -> HostProgram:
    """On the CPU: computed in f32, rounded once."""
    dtype = form.inputs[0].dtype

    def call(arrays: list[Array], outs: list[Array]) -> None:
        keys, values, q, k, v, starts = arrays
        write_reference(keys, values, k, v, starts)
        all_keys, all_values, queries = (widen(a, dtype) for a in (keys, values, q))
        with np.errstate(all="ignore"):
            y = attended(all_keys, all_values, queries, starts, form.attrs.scale)
        np.copyto(outs[2], narrow(y, dtype))

    return HostProgram("numpy:cache_attend", "cache_attend", call)


def lower(form: Form[CacheAttendAttrs], caps: Caps) -> Lowered:
    """One launch."""
    keys, values, *rows, starts = form.inputs
    y = form.outputs[2]
    b, h, capacity, d = keys.shape
    q, k, v = rows
    steps = Spec((b, h, d), y.dtype, (y.strides[0], y.strides[2], 1))
    scalars: dict[str, int | float] = {
        "heads": h, "capacity": capacity, "scale": form.attrs.scale * LOG2E,
        **strides_of(q=q, k=k, v=v, kc=keys, vc=values, y=steps),
    }  # fmt: skip
    items = max(-(-capacity // THREADS), 1)
    team = Team(THREADS, THREADS, items, 0, False, caps.shuffles)
    refs = (*(Ref(2 + i, flat(s)) for i, s in enumerate(rows)), Ref(5, starts), Ref(8, y),
            Ref(0, flat(keys)), Ref(1, flat(values)))  # fmt: skip
    reads = {"q": 1, "k": 1, "v": 1, "starts": 1}
    params = signature(reads, {"y": 1}, {"keys": 1, "values": 1})
    constants = (("dim", d), ("early", caps.early_launch), ("team", team))
    return Lowered(
        (Call(kernel, refs, tuple(scalars.items()), constants, b * h, signature=params),)
    )


def takes(index: int, spec: Spec) -> bool:
    """Rows on 16 bytes."""
    return len(spec.shape) != 4 or (spec.unit_rows and spec.aligned)


def axes_of(form: Form[CacheAttendAttrs]) -> Axes:
    """Sequences and heads."""
    return axes(["bh.."] * 5 + ["b"], ["bh..", "bh..", "b.h."])


def flops_of(form: Form[CacheAttendAttrs]) -> int:
    """Scores and what they weigh, at most."""
    return 4 * math.prod(form.inputs[0].shape)


def preferred(form: Form[CacheAttendAttrs], caps: Caps) -> bool:
    """Where launches cost something."""
    return not caps.launches_are_free and form.within_binding(caps)


CACHE_ATTEND = Op(
    "cache_attend", rule, reference, lower, takes, attrs=CacheAttendAttrs, mutates=(0, 1),
    host=host, axes=axes_of, flops=flops_of, preferred=preferred,
    narrower=True, doc=__doc__ or "",
)  # fmt: skip
