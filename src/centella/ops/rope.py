"""rope: rotary position embedding (Su et al. 2021).

Each pair (a, b) of the first `rotary_dim` columns turns by its position's angle, the rest passes:

    (a cos - b sin, b cos + a sin)        cos, sin = tables[position, pair]

Pair j is columns (j, j + rotary_dim / 2), as in Llama and GPT-NeoX, or (2 j, 2 j + 1), as in GPT-J
(`interleaved`). Tables are made on the host; a position outside them gives NaN in the pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import f32, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.op.axes import WHOLE, Axes, axes
from centella.op.form import Form
from centella.op.op import Lowered, Op, Out
from centella.ops.elements import offset_of
from centella.ops.kernel_params import face
from centella.ops.layout import flat
from centella.ops.rows import place_of, width_of
from centella.specs import Caps, Spec

WORKGROUP = 256
NAN = float("nan")


def _rope(
    *, interleaved: bool, partial: bool, chunk: bool, table_chunk: bool, starts: str, x: Any,
    cos: Any, sin: Any, y: Any, **positions: Any,
) -> None:  # fmt: skip
    """A thread a chunk (or word) of the output.

    Constants: `starts` is "none", "first" (a position a sequence) or "each" (one a token);
    `partial`: some columns pass; `table_chunk`: the tables are read in chunks.
    """
    width = width_of(y, chunk)
    heads, length, rotary, dim, height = (
        lang.parameter(n, u32) for n in ("heads", "length", "rotary", "dim", "height")
    )
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        group, i = row // length, row % length
        batch, head = group // heads, group % heads
        place = offset_of([batch, head, i], "x")
        position = _position(starts, positions, batch, i)
        inside = position < height
        at = lang.minimum(position, height - 1)
        lanes = [column] + [lang.minimum(column + j, dim - 1) for j in range(1, width)]
        own = x.load(place + column) if chunk else [x[place + c] for c in lanes]
        made = turned(x, cos, sin, own, place, at, lanes, rotary // 2, chunk, table_chunk,
                      interleaved)  # fmt: skip
        out = [lang.select(inside, v, NAN) for v in made]
        if partial:
            out = [lang.select(c < rotary, v, o) for c, v, o in zip(lanes, out, own, strict=True)]
        y.store(offset_of([batch, head, i], "y") + column, out)


def turned(
    x: Any, cos: Any, sin: Any, own: Any, place: Any, at: Any, lanes: Any, half: Any, chunk: bool,
    table_chunk: bool, interleaved: bool,
) -> list[Any]:  # fmt: skip
    """A thread's columns (`lanes`, which hold `own`) of the row of x from `place`, turned."""
    turn = _neighbours if interleaved else _halves
    return turn(x, cos, sin, own, place, at, lanes, half, chunk, table_chunk)


def _position(starts: str, positions: dict[str, Any], batch: Any, i: Any) -> Any:
    """The position of a token; one below 0 is far above every table."""
    if starts == "none":
        return i
    pitch = lang.parameter("p0", u32)
    if starts == "first":
        return lang.bitcast(positions["positions"][batch * pitch], u32) + i
    at = batch * pitch + i * lang.parameter("p1", u32)
    return lang.bitcast(positions["positions"][at], u32)


def _halves(
    x: Any, cos: Any, sin: Any, own: Any, place: Any, at: Any, lanes: Any, half: Any, chunk: bool,
    table_chunk: bool,
) -> list[Any]:  # fmt: skip
    """Columns j and j + half are a pair; of columns that pass, some pair is computed."""
    low = [c < half for c in lanes]
    other = [lang.select(b, c + half, c - half) for b, c in zip(low, lanes, strict=True)]
    pair = [lang.minimum(lang.minimum(c, o), half - 1) for c, o in zip(lanes, other, strict=True)]
    if chunk:
        first = lang.minimum(lang.minimum(lanes[0], other[0]), half - len(lanes))
        theirs = x.load(place + other[0])
        low = [low[0]] * len(lanes)
        pair = [first + j for j in range(len(lanes))]
    else:
        theirs = [x[place + o] for o in other]
    c, s = (_entries(t, at, pair, table_chunk) for t in (cos, sin))
    return [
        a * cj + lang.select(b, -sj, sj) * o
        for a, o, b, cj, sj in zip(own, theirs, low, c, s, strict=True)
    ]


def _neighbours(
    x: Any, cos: Any, sin: Any, own: Any, place: Any, at: Any, lanes: Any, half: Any, chunk: bool,
    table_chunk: bool,
) -> list[Any]:  # fmt: skip
    """Columns 2 j and 2 j + 1 are a pair."""
    pair = [lang.minimum(c // 2, half - 1) for c in lanes[::2]]
    c, s = (_entries(t, at, pair, False) for t in (cos, sin))
    if len(own) == 1:
        odd, last = (lanes[0] & 1) == 1, lang.parameter("dim", u32) - 1
        theirs = x[place + lang.minimum(lanes[0] ^ 1, last)]
        return [own[0] * c[0] + lang.select(odd, s[0], -s[0]) * theirs]
    out: list[Any] = []
    for j, (a, b) in enumerate(zip(own[::2], own[1::2], strict=True)):
        out += [a * c[j] - b * s[j], b * c[j] + a * s[j]]
    return out


def _entries(table: Any, at: Any, pair: list[Any], chunk: bool) -> list[Any]:
    """Entries of a position's row."""
    if not chunk:
        return [table[at, p] for p in pair]
    width = table.dtype.per_chunk
    return [v for j in range(0, len(pair), width) for v in table.load(at, pair[0] + j)]


kernel: Kernel = Kernel(_rope, workgroup=WORKGROUP, name="rope")


class RopeAttrs(Struct, frozen=True):
    """Whether a pair is neighbours, instead of half a head apart."""

    interleaved: bool


def rule(specs: tuple[Spec, ...], attrs: RopeAttrs) -> tuple[Out, ...]:
    """x [b, h, s, d], tables [n, r / 2] with r <= d, positions [b] or [b, s] to [b, h, s, d]."""
    x, cos, sin, *positions = specs
    if len(x.shape) != 4:
        raise ShapeError(f"rope: expected x [batch, heads, seq_len, head_dim], got {list(x.shape)}")
    tables = len(cos.shape) == 2 and cos.shape == sin.shape
    if not tables or not 1 <= cos.shape[1] <= x.shape[3] // 2:
        raise ShapeError(
            f"rope: expected cos and sin [positions, 1 to {x.shape[3] // 2}], got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    if not x.dtype.is_float or cos.dtype is not f32 or sin.dtype is not f32:
        names = ", ".join(s.dtype.name for s in (x, cos, sin))
        raise DTypeError(f"rope: expected a float x and f32 tables, got {names}")
    batch, _, length, _ = x.shape
    if not positions:
        if length > cos.shape[0]:
            raise ShapeError(
                f"rope: expected tables of {length} positions or more, got {cos.shape[0]}"
            )
    elif positions[0].shape not in ((batch,), (batch, length)):
        raise ShapeError(
            f"rope: expected positions [{batch}] or [{batch}, {length}], got "
            f"{list(positions[0].shape)}"
        )
    elif positions[0].dtype is not i32:
        raise DTypeError(f"rope: expected i32 positions, got {positions[0].dtype.name}")
    if not cos.shape[0] and length:
        raise ShapeError(f"rope: expected tables with rows, got {list(cos.shape)}")
    return ((x.shape, x.dtype),)


def reference(x: Any, cos: Any, sin: Any, *positions: Any, interleaved: bool) -> Any:
    """The NumPy formula."""
    steps = np.arange(x.shape[2])
    at = steps[None, None] if not positions else np.asarray(positions[0], np.int64)[:, None]
    if positions and positions[0].ndim == 1:
        at = at[..., None] + steps
    inside = ((at >= 0) & (at < cos.shape[0]))[..., None]
    c, s = (t[np.where(inside[..., 0], at, 0)] for t in (cos, sin))
    half = cos.shape[1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    y, a, b = x.copy(), x[..., first], x[..., second]
    y[..., first], y[..., second] = a * c - b * s, b * c + a * s
    if not inside.all():
        np.copyto(y[..., : 2 * half], NAN, where=~inside)
    return y


def takes(index: int, spec: Spec) -> bool:
    """x and the tables: rows of neighbouring elements."""
    return index > 2 or spec.unit_rows


def lower(form: Form[RopeAttrs], caps: Caps) -> Lowered:
    """One launch; before it nothing, whatever the strides of batch, head and position."""
    (x, cos, sin, *positions), y = form.inputs, form.outputs[0]
    _, heads, length, dim = y.shape
    half, interleaved = cos.shape[1], form.attrs.interleaved
    chunk = x.aligned and y.aligned and (interleaved or half % y.dtype.per_chunk == 0)
    items = -(-dim // width_of(y, chunk))
    threads = y.size // max(dim, 1) * items
    scalars = {
        "items": items, "threads": threads, "heads": heads, "length": length, "dim": dim,
        "rotary": 2 * half, "height": cos.shape[0],
    }  # fmt: skip
    for name, spec in (("x", x), ("y", y)):
        scalars.update({f"{name}{axis}": s for axis, s in enumerate(spec.strides[:-1])})
    for spec in positions:
        scalars.update({f"p{axis}": s for axis, s in enumerate(spec.strides)})
    constants = (
        ("chunk", chunk),
        ("interleaved", interleaved),
        ("partial", 2 * half < dim),
        ("starts", ("each" if len(positions[0].shape) == 2 else "first") if positions else "none"),
        ("table_chunk", chunk and not interleaved and cos.aligned and sin.aligned),
    )
    reads = {"x": 1, "cos": 2, "sin": 2, **({"positions": 1} if positions else {})}
    refs = (
        Ref(0, flat(x)), Ref(1, cos), Ref(2, sin), *(Ref(3, flat(s)) for s in positions),
        Ref(len(form.inputs), y),
    )  # fmt: skip
    groups = -(-threads // WORKGROUP)
    params = face(reads, {"y": 1})
    call = Call(kernel, refs, tuple(scalars.items()), constants, groups, face=params)
    return Lowered((call,))


def axes_of(form: Form[RopeAttrs]) -> Axes:
    """Sequences and heads."""
    positions = ("b" + WHOLE * (len(s.shape) - 1) for s in form.inputs[3:])
    return axes(["bh..", "..", "..", *positions], ["bh.."])


ROPE = Op("rope", rule, reference, lower, takes, attrs=RopeAttrs, axes=axes_of, doc=__doc__ or "")
