"""rope: rotary position embedding (Su et al. 2021).

Each pair (a, b) of the first `rotary_dim` columns turns by its position's angle, the rest passes:

    (a cos - b sin, b cos + a sin)        cos, sin = tables[position, pair]

Pair j is columns (j, j + rotary_dim / 2), as in Llama and GPT-NeoX, or (2 j, 2 j + 1), as in GPT-J
(`interleaved`). Tables are made on the host; a position outside them gives NaN in the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, f32, i32, u32
from centella.emit.program import Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import WHOLE, Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.ops.elements import offset_of
from centella.ops.layout import flat
from centella.ops.rows import chunked, place_of, rows_call, strides_of, width_of
from centella.specs import Caps, Spec

WORKGROUP = 256
NAN = float("nan")


class Turn(Struct, frozen=True):
    """How the columns of a thread turn.

    Attributes:
        partial: some columns pass.
        chunk: a thread has a chunk; else a word. table_chunk: the tables are read in chunks.
    """

    cos: Any
    sin: Any
    interleaved: bool
    partial: bool
    chunk: bool
    table_chunk: bool

    def read(self, x: Argument, start: Operand, lanes: list[Expr]) -> Any:
        """The thread's columns of the row of x that begins at `place`."""
        return x.load(start + lanes[0]) if self.chunk else [x[start + c] for c in lanes]

    def entries(self, at: Any, lanes: list[Expr]) -> tuple[list[Expr], list[Expr]]:
        """Cosines and sines of the columns `lanes`, or of the pairs among them, by a row."""
        half = lang.parameter("rotary", u32) // 2
        if self.interleaved:
            pair = [lang.minimum(c // 2, half - 1) for c in lanes[::2]]
            tables = self.cos, self.sin
            cos, sin = (table_entries(t, at, pair, False) for t in tables)
            return cos, sin
        both = [(c, self.partner(c)) for c in lanes]
        pair = [lang.minimum(lang.minimum(c, o), half - 1) for c, o in both]
        if self.chunk:
            first = lang.minimum(lang.minimum(*both[0]), half - len(lanes))
            pair = [first + j for j in range(len(lanes))]
        cos, sin = (table_entries(t, at, pair, self.table_chunk) for t in (self.cos, self.sin))
        return cos, sin

    def partner(self, column: Operand) -> Expr:
        """The column half a head away, of those that turn, where pairs are no neighbours."""
        half = lang.parameter("rotary", u32) // 2
        return lang.select(column < half, column + half, column - half)

    def turned(
        self, x: Any, start: Any, own: Any, entries: tuple[list[Expr], list[Expr]],
        lanes: list[Expr],
    ) -> list[Expr]:  # fmt: skip
        """The columns `lanes`, which hold `own`, by their entries of the tables."""
        turn = self._neighbours if self.interleaved else self._halves
        return turn(x, start, own, entries, lanes)

    def factors(
        self, entries: tuple[list[Expr], list[Expr]], lanes: list[Expr], inside: Operand,
        weights: Sequence[list[Expr]] = (),
    ) -> tuple[list[Expr], list[Expr]]:  # fmt: skip
        """Factors of the columns `lanes` of a chunk, and of their partners: products that add up.

        Args:
            inside: whether the position is inside the tables; pairs are NaN unless it is.
            weights: of a norm: those of the columns, and of their partners.
        """
        cos, sin = entries
        if self.interleaved:
            cos = [c for c in cos for _ in range(2)]
            sin = [signed for s in sin for signed in (-s, s)]
        else:
            low = lanes[0] < lang.parameter("rotary", u32) // 2
            sin = [lang.select(low, -s, s) for s in sin]
        cos = [lang.select(inside, c, NAN) for c in cos]
        own = [lang.const(1.0, f32)] * len(lanes)
        if weights:
            own, theirs = weights
            cos = [w * c for w, c in zip(own, cos, strict=True)]
            sin = [w * s for w, s in zip(theirs, sin, strict=True)]
        if self.partial:
            turns = self.turning(lanes)
            cos = [lang.select(t, c, w) for t, c, w in zip(turns, cos, own, strict=True)]
            sin = [lang.select(t, s, 0.0) for t, s in zip(turns, sin, strict=True)]
        return cos, sin

    def partners(self, own: list[Any], theirs: list[Any], lanes: list[Expr]) -> list[Any]:
        """What the columns `lanes` of a chunk turn with; -0, which adds nothing, where they pass.

        Args:
            own: neighbours; theirs: the chunk of partners, where pairs are no neighbours.
        """
        if self.interleaved:
            theirs = [v for pair in zip(own[::2], own[1::2], strict=True) for v in pair[::-1]]
        if not self.partial:
            return theirs
        return [lang.select(t, v, -0.0) for t, v in zip(self.turning(lanes), theirs, strict=True)]

    def turning(self, lanes: list[Expr]) -> list[Expr]:
        """Which columns turn."""
        return [c < lang.parameter("rotary", u32) for c in lanes]

    def passed(self, out: list[Expr], own: Any, lanes: list[Expr], inside: Operand) -> list[Expr]:
        """What was turned: NaN unless its position is inside the tables; what passes, as it was."""
        out = [lang.select(inside, v, NAN) for v in out]
        if self.partial:
            each = zip(self.turning(lanes), out, own, strict=True)
            out = [lang.select(turns, v, o) for turns, v, o in each]
        return out

    def _halves(
        self, x: Any, start: Any, own: Any, entries: Any, lanes: Any
    ) -> list[Expr]:  # fmt: skip
        """Columns j and j + half are a pair; of columns that pass, some pair is computed."""
        half = lang.parameter("rotary", u32) // 2
        low = [c < half for c in lanes]
        theirs = self.read(x, start, [self.partner(c) for c in lanes])
        if self.chunk:
            low = [low[0]] * len(lanes)
        return [
            a * cj + lang.select(b, -sj, sj) * o
            for a, o, b, cj, sj in zip(own, theirs, low, *entries, strict=True)
        ]

    def _neighbours(
        self, x: Any, start: Operand, own: Any, entries: Any, lanes: Any
    ) -> list[Expr]:  # fmt: skip
        """Columns 2 j and 2 j + 1 are a pair."""
        c, s = entries
        if len(own) == 1:
            odd, last = (lanes[0] & 1) == 1, lang.parameter("dim", u32) - 1
            theirs = x[start + lang.minimum(lanes[0] ^ 1, last)]
            return [own[0] * c[0] + lang.select(odd, s[0], -s[0]) * theirs]
        out: list[Expr] = []
        for j, (a, b) in enumerate(zip(own[::2], own[1::2], strict=True)):
            out += [a * c[j] - b * s[j], b * c[j] + a * s[j]]
        return out


def table_entries(table: Argument, at: Any, pair: list[Expr], chunk: bool) -> list[Expr]:
    """A row's elements in these columns; by chunks from the first one on where `chunk` is set."""
    if not chunk:
        return [table[at, p] for p in pair]
    width = table.dtype.per_chunk
    return [v for j in range(0, len(pair), width) for v in table.load(at, pair[0] + j)]


def _rope(
    *, starts: str, x: Argument, cos: Argument, sin: Argument, y: Argument,
    positions: Argument | None = None, **layout: bool,
) -> None:  # fmt: skip
    """A thread a chunk (or word) of the output.

    Constants: `starts` is "none", "first" (a position a sequence) or "each" (one a token).
    """
    turn = Turn(cos, sin, **layout)
    width = width_of(y, turn.chunk)
    heads, length, _, dim, height = (
        lang.parameter(n, u32) for n in ("heads", "length", "rotary", "dim", "height")
    )
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        group, i = row // length, row % length
        batch, head = group // heads, group % heads
        start = offset_of([batch, head, i], "x")
        position = _position(starts, positions, batch, i)
        inside, at = position < height, lang.minimum(position, height - 1)
        lanes = [column] + [lang.minimum(column + j, dim - 1) for j in range(1, width)]
        own = turn.read(x, start, lanes)
        entries = turn.entries(at, lanes)
        out = turn.passed(turn.turned(x, start, own, entries, lanes), own, lanes, inside)
        y.store(offset_of([batch, head, i], "y") + column, out)


def _position(starts: str, positions: Any, batch: Operand, i: Operand) -> Any:
    """The position of a token; one below 0 is far above every table."""
    if starts == "none":
        return i
    pitch = lang.parameter("p0", u32)
    if starts == "first":
        return lang.bitcast(positions[batch * pitch], u32) + i
    return lang.bitcast(positions[batch * pitch + i * lang.parameter("p1", u32)], u32)


kernel: Kernel = Kernel(_rope, workgroup=WORKGROUP, name="rope")


class RopeAttrs(Struct, frozen=True):
    """Whether a pair is neighbours, instead of half a head apart."""

    interleaved: bool


def rule(specs: tuple[Spec, ...], attrs: RopeAttrs) -> tuple[Out, ...]:
    """x [b, h, s, d], tables [n, r / 2] with r <= d, positions [b] or [b, s] to [b, h, s, d]."""
    x, cos, sin, *positions = specs
    if len(x.shape) != 4:
        raise ShapeError(f"rope: expected x [batch, heads, seq_len, head_dim], got {list(x.shape)}")
    check_tables("rope", cos, sin, x.shape[3], empty=not x.shape[2])
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
    return ((x.shape, x.dtype),)


def check_tables(name: str, cos: Spec, sin: Spec, dim: int, empty: bool = False) -> None:
    """Raise unless they are tables for heads of `dim` elements, with rows or `empty`."""
    if len(cos.shape) != 2 or cos.shape != sin.shape or not 1 <= cos.shape[1] <= dim // 2:
        raise ShapeError(
            f"{name}: expected cos and sin [positions, 1 to {dim // 2}], got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    if not (cos.shape[0] or empty):
        raise ShapeError(f"{name}: expected tables with rows, got {list(cos.shape)}")


def reference(x: Array, cos: Array, sin: Array, *positions: Array, interleaved: bool) -> Array:
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


def layout_of(cos: Spec, sin: Spec, interleaved: bool, *heads: Spec) -> dict[str, bool]:
    """The constants of `Turn`, for heads that are read and written so."""
    half, y = cos.shape[1], heads[0]
    chunk = chunked(*heads) and (interleaved or half % y.dtype.per_chunk == 0)
    return {
        "chunk": chunk, "interleaved": interleaved, "partial": 2 * half < y.shape[-1],
        "table_chunk": chunk and not interleaved and cos.aligned and sin.aligned,
    }  # fmt: skip


def lower(form: Form[RopeAttrs], caps: Caps) -> Lowered:
    """One launch; before it nothing, whatever the strides of batch, head and position."""
    (x, cos, sin, *positions), y = form.inputs, form.outputs[0]
    _, heads, length, dim = y.shape
    layout = layout_of(cos, sin, form.attrs.interleaved, y, x)
    scalars = {
        "heads": heads, "length": length, "dim": dim, "rotary": 2 * cos.shape[1],
        "height": cos.shape[0], **strides_of(x=x, y=y),
    }  # fmt: skip
    starts, reads = "none", {"x": 1, "cos": 2, "sin": 2}
    for spec in positions:
        scalars |= {f"p{axis}": s for axis, s in enumerate(spec.strides)}
        starts, reads["positions"] = "each" if len(spec.shape) == 2 else "first", 1
    refs = (
        Ref(0, flat(x)), Ref(1, cos), Ref(2, sin), *(Ref(3, flat(s)) for s in positions),
        Ref(len(form.inputs), y),
    )  # fmt: skip
    rows, width = y.size // max(dim, 1), width_of(y, layout["chunk"])
    constants = (*layout.items(), ("starts", starts))
    return Lowered(
        (rows_call(kernel, refs, rows, dim, width, scalars, constants, signature(reads, {"y": 1})),)
    )


def axes_of(form: Form[RopeAttrs]) -> Axes:
    """Sequences and heads."""
    positions = ("b" + WHOLE * (len(s.shape) - 1) for s in form.inputs[3:])
    return axes(["bh..", "..", "..", *positions], ["bh.."])


ROPE = Op("rope", rule, reference, lower, takes, attrs=RopeAttrs, axes=axes_of, doc=__doc__ or "")
