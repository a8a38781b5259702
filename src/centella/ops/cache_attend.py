"""cache_attend: a decoder's step of one token in a short cache, in one launch.

    K[b, h, s_b] = k[b, h]    V[b, h, s_b] = v[b, h]
    y[b, h] = softmax(scale q[b, h] K[b, h, :s_b + 1]^T) V[b, h, :s_b + 1]

It stands for `cache_write` and `attention`, which splits keys among groups and takes two launches.
Here a group has a head: so caches are short, and each head of queries has keys of its own. Nothing
is written past the capacity, as in `cache_write`.

A thread has a key at a time for the scores, which it keeps; then a chunk of the head and every so
many values.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, f32, i32, narrow, u32, widen
from centella.emit.program import Call, HostProgram, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
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
    query = lang.shared(f32, dim)
    with lang.if_(me < dim // per):
        factor = lang.parameter("scale", f32)
        scaled = [x * factor for x in q.load(rows["q"] + me * per)]
        for e in range(0, per, 4):
            query.store(me * per + e, scaled[e : e + 4])
        with lang.if_(position < capacity):
            keys.store(rows["kc"] + position * key_pitch + me * per, k.load(rows["k"] + me * per))
            values.store(
                rows["vc"] + position * value_pitch + me * per, v.load(rows["v"] + me * per)
            )
    lang.barrier()

    length = lang.minimum(position + 1, capacity)
    row = Row(team, 1, length, lang.const(1, u32))

    def score(item: Item) -> Any:
        chains = [lang.const(0.0, f32)] * 4
        for first in range(0, dim, per):
            loaded = keys.load(rows["kc"] + item.column * key_pitch + first)
            for e in range(0, per, 4):
                pairs = zip(loaded[e : e + 4], query.load(first + e), chains, strict=True)
                chains = [lang.fma(x, y, total) for x, y, total in pairs]
        return fold(chains, operator.add)

    scores = row.kept(score)
    top = row.total(lambda item: [scores(item)], LOWEST, "max")
    weigh = row.kept(lambda item: item.masked([lang.exp2(scores(item) - top)], 0.0)[0])
    whole = row.total(lambda item: [weigh(item)], 0.0, "add")
    weights = lang.shared(f32, team.items * THREADS)
    for item in row.items():
        weights[me + item.index * THREADS] = weigh(item)
    lang.barrier()
    to = _place("y", b, head), y
    _sum(dim, rows["vc"], value_pitch, length, weights, values, to, whole)


def _sum(
    dim: int, line: Any, pitch: Any, length: Any, weights: Any, values: Any, to: tuple[Any, Any],
    whole: Any,
) -> None:  # fmt: skip
    """The weighed values, which teams add up for every so many keys, over their weights' sum."""
    me, per = lang.local_id(), values.dtype.per_chunk
    lanes = dim // per
    teams = THREADS // lanes
    team, lane = me // lanes, me % lanes
    parts = lang.shared(f32, teams * dim)
    with lang.if_(team < teams):
        sums = lang.vars(f32, per, init=0.0)
        for first in lang.range(team, length, teams * TOGETHER):
            ahead = [first + n * teams for n in range(TOGETHER)]
            inside = [lang.minimum(key, length - 1) for key in ahead]
            loaded = [values.load(line + key * pitch + lane * per) for key in inside]
            for key, at, row in zip(ahead, inside, loaded, strict=True):
                weight = lang.select(key < length, weights[at], 0.0)
                for total, value in zip(sums, row, strict=True):
                    total.set(lang.fma(weight, value, total))
        for e in range(0, per, 4):
            parts.store(team * dim + lane * per + e, [s.get() for s in sums[e : e + 4]])
    lang.barrier()
    start, y = to
    word = y.dtype.per_word
    with lang.if_(me < dim // word):
        out = []
        for e in range(word):
            each = [parts[n * dim + me * word + e] for n in range(teams)]
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
