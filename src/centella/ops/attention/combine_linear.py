"""A product that adds up its row of x as it loads it: parts that attention left (`attend_linear`).

    y[n] = f(alpha (h . W[n, :]) + bias[n]) + residual[n]
    h = what `combine.py` makes of the parts of each head

That launch is left out; instead every group adds up all heads, out of the L2 cache. So a group has
all of the depth and many outputs, which are few groups: for the product of 2048 by 1024 after 16
heads, one a multiprocessor of an H200.

A thread has eight elements of the depth. It asks for the weights of each output, then for its
elements of several parts at once. While they are on their way, the group's threads weigh the parts
of all heads, one each. Parts that are not there weigh nothing; in their place the last one is read
again.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.op.variant import Variant, choose
from centella.ops.attend_linear import AttendLinearAttrs, attend_form
from centella.ops.attention.masks import LOWEST, Scoring, Sight, share_of
from centella.ops.attention.parts import Known, Parts, Results, part_of
from centella.ops.attention.problem import scalars_of
from centella.ops.attention.rope_choice import SPLIT_STEP, first_in_f32
from centella.ops.attention.table import row_of
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.problem import aligned
from centella.ops.matmul.sums import SUBGROUP, Thin, finish
from centella.ops.matmul.thin import let_next_in
from centella.ops.rope_attend import RopeAttendAttrs, attention_form
from centella.ops.rows import power_above
from centella.specs import Caps

EACH = 8  # elements of the depth that a thread has
OUTS = 8  # outputs of a group
TOGETHER = 16  # parts that a thread asks for at once, at most
FOUR = f32.per_chunk
# Bytes of parts that all groups read, if there are as many as the plan has room for: 128 KB for
# each multiprocessor of an H200, which take it a microsecond, where a launch takes three.
MOST_BYTES = 16 << 20


class Heads(Struct, frozen=True):
    """The row of x: `count` heads of `dim` elements, in `splits` parts at most."""

    count: int
    dim: int
    splits: int

    @property
    def turns(self) -> int:
        """How often a thread asks for parts, if all are there."""
        return -(-self.splits // TOGETHER)

    @property
    def together(self) -> int:
        """Parts that it asks for at once, whole chunks of weights."""
        return -(-self.splits // (self.turns * FOUR)) * FOUR

    @property
    def pitch(self) -> int:
        """Words from the weights of a head's parts to the next head's: nothing to divide by."""
        return power_above(self.turns * self.together)

    @property
    def words(self) -> int:
        """Weights of all heads."""
        return self.count * self.pitch


class _Kept:
    """A thread's elements of some rows, in registers from when they are asked for."""

    def __init__(self, source: Argument, rows: int) -> None:
        self._source, self._per = source, source.dtype.per_chunk
        self._words: Any = lang.vars(u32, rows, EACH // self._per * 4, init=0)

    def ask(self, starts: list[Any], wanted: Any) -> None:
        """Load all rows, where they are wanted.

        One condition for all: without, a driver puts off loads until something waits for them.
        """
        with lang.if_(wanted):
            for words, start in zip(self._words, starts, strict=True):
                chunks = [self._source.load_bits(start + e) for e in range(0, EACH, self._per)]
                for var, word in zip(words, (w for c in chunks for w in c), strict=True):
                    var.set(word)

    def rows(self) -> list[list[Any]]:
        """The elements of each."""
        return [self._source.unpack([w.get() for w in words]) for words in self._words]


class _Weights:
    """What the parts of each head weigh, in workgroup memory.

    Attributes:
        last: the last part that there is.
    """

    def __init__(self, heads: Heads, used: Any) -> None:
        self._heads, self._used = heads, used
        self.last: Any = lang.maximum(used, 1) - 1
        self._weights, self._shares = (lang.shared(f32, heads.words) for _ in range(2))

    def ask(self, partial: Argument, threads: int) -> list[tuple[Any, ...]]:
        """Load what the launch before knows of all parts, a part for each thread."""
        asked, pitch, words = list[tuple[Any, ...]](), self._heads.pitch, self._heads.words
        for base in range(0, words, threads):
            item = lang.local_id() + base
            safe = item if base + threads <= words else lang.minimum(item, words - 1)
            head, part = safe // pitch, safe % pitch
            at = Results(head, lang.minimum(part, self.last)).stats
            there = part < self._used
            asked.append((item, head * pitch, there, partial[at], partial[at + 1]))
        return asked

    def fill(self, asked: list[tuple[Any, ...]]) -> None:
        """Weigh the parts; the group's threads see it."""
        words = self._heads.words
        tops = lang.shared(f32, words)
        for item, _, there, top, _ in asked:
            with lang.if_(item < words):
                tops[item] = lang.select(there, top, LOWEST)
        lang.barrier()
        for item, first, there, top, whole in asked:
            every = [v for n in range(0, self._heads.splits, FOUR) for v in tops.load(first + n)]
            highest = reduce(lang.fmax, every, lang.const(LOWEST, f32))
            weight = lang.select(there, lang.exp2(top - highest), 0.0)
            with lang.if_(item < words):
                self._weights[item] = weight
                self._shares[item] = weight * whole
        lang.barrier()

    def of(self, head: Any, first: Any) -> list[Any]:
        """What the parts of a turn weigh."""
        at = head * self._heads.pitch + first
        return [v for n in range(0, self._heads.together, FOUR) for v in self._weights.load(at + n)]

    def factor(self, head: Any) -> Any:
        """What a head's weighed sums are multiplied by."""
        at, total = head * self._heads.pitch, lang.const(0.0, f32)
        for n in range(0, self._heads.splits, FOUR):
            total = reduce(operator.add, self._shares.load(at + n), total)
        return share_of(total)


def _combined(
    *, activation: str, early: bool, heads: Heads, known: Known, scoring: Scoring, shuffle: bool,
    tile: Thin, partial: Argument, starts: Argument, w: Argument, y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    """A group has OUTS outputs.

    Args:
        known: as of `part_of`.
    """
    p: dict[str, Any] = {name: lang.parameter(name, u32) for name in ("n", "k", "ldw")}
    none, one = lang.const(0, u32), lang.const(1, u32)
    p |= {"m": one, "ldy": none, "sy": none}
    sight = Sight({"starts": starts}, scoring, none, one, lang.parameter("lk", u32), lambda v: v)
    _, _, used = part_of(sight, lang.const(heads.splits, u32), scoring.windowed, known)
    column, first = lang.local_id() * EACH, lang.group_id() * tile.outs
    outputs = [lang.minimum(first + r, p["n"] - 1) for r in range(tile.outs)]
    weights = _Kept(w, tile.outs)
    weights.ask([output * p["ldw"] + column for output in outputs], column < p["k"])
    x = _added_up(heads, used, partial, column, column < p["k"], tile.threads)
    totals = [_dot(row, x) for row in weights.rows()]
    let_next_in(early)
    finish([[total] for total in totals], tile, shuffle, none, first, p, y, activation, extra)


def _added_up(
    heads: Heads, used: Any, partial: Argument, column: Any, inside: Any, threads: int
) -> list[Any]:  # fmt: skip
    """A thread's elements of x; zeros where it is not inside."""
    head = lang.minimum(column // heads.dim, heads.count - 1)
    start = Results(head, lang.const(0, u32)).sums + column % heads.dim
    weights, parts = _Weights(heads, used), _Kept(partial, heads.together)

    def ask(first: Any) -> None:
        ahead = [lang.minimum(first + n, weights.last) for n in range(heads.together)]
        parts.ask([start + part * heads.dim for part in ahead], inside)

    def add(first: Any, sums: list[Any]) -> list[Any]:
        for weight, row in zip(weights.of(head, first), parts.rows(), strict=True):
            sums = [lang.fma(weight, v, total) for v, total in zip(row, sums, strict=True)]
        return sums

    begin, asked = lang.const(0, u32), weights.ask(partial, threads)
    ask(begin)
    weights.fill(asked)
    sums = add(begin, [lang.const(0.0, f32)] * EACH)
    if heads.turns > 1:
        so_far = [lang.var(v) for v in sums]
        for first in lang.range(lang.const(heads.together, u32), used, heads.together):
            ask(first)
            for into, v in zip(so_far, add(first, list(so_far)), strict=True):
                into.set(v)
        sums = [v.get() for v in so_far]
    factor = weights.factor(head)
    return [v * factor for v in sums]


def _dot(a: list[Any], b: list[Any]) -> Any:
    total = a[0] * b[0]
    for v, w in zip(a[1:], b[1:], strict=True):
        total = lang.fma(v, w, total)
    return total


kernel: Kernel = Kernel(_combined, workgroup=256, name="combined_linear", rewritable=True)


# -- how it is launched ---------------------------------------------------------------------------

Joined = Form[AttendLinearAttrs]


class Tile(Struct, frozen=True):
    """The parts that attention leaves, and how the product's groups work."""

    parts: Parts
    heads: Heads
    group: Thin


def tile_of(form: Joined, caps: Caps) -> Tile | None:
    """How groups work, where one token of one sequence in f32 leaves parts of whole chunks."""
    linear, attend = form.attrs.linear, attend_form(form)
    batch, tokens, heads, dim = attend.outputs[2].shape
    weight = form.inputs[len(attend.inputs)]
    plain = not linear.format and {"bias", "residual"}.issuperset(linear.extras)
    if not (plain and weight.dtype.is_float and weight.size and batch * tokens == 1):
        return None
    parts = SPLIT_STEP.tile(attend, caps)
    if parts is None or dim % EACH or not aligned(weight, weight.strides[0], 0):
        return None
    threads = max(power_above(heads * dim // EACH), SUBGROUP)
    group = Thin(1, threads, OUTS, 1, threads, row_of(caps).rolled)
    tile = Tile(parts, Heads(heads, dim, parts.splits), group)
    words = threads * OUTS + 3 * tile.heads.words
    return tile if threads <= caps.max_workgroup and 4 * words <= caps.max_shared else None


def preferred(form: Joined, caps: Caps) -> bool:
    """Where attention is better in parts, and there are not too many for every group to read."""
    attend, tile = attend_form(form), tile_of(form, caps)
    if tile is None or not SPLIT_STEP.takes(attend, caps, attend.attrs.variant):
        return False
    n, k = form.inputs[len(attend.inputs)].shape
    nbytes = -(-n // OUTS) * tile.parts.splits * k * f32.itemsize
    return form.attrs.linear.variant is None and nbytes <= MOST_BYTES


def _launches(form: Joined, tile: Tile, caps: Caps) -> Lowered:
    attend, total = attend_form(form), len(form.inputs)
    first = Lowered((first_in_f32(attend, tile.parts, caps),), (tile.parts.spec,))
    operands = (*range(len(attend.inputs)), total, total + 1, total + 2)
    return first.within(operands, total + 3) + Lowered((_product(form, attend, tile, caps),))


def _product(form: Joined, attend: Form[RopeAttendAttrs], tile: Tile, caps: Caps) -> Call:
    """The second launch."""
    inner, linear, count = attention_form(attend), form.attrs.linear, len(attend.inputs)
    weight, *more = form.inputs[count:]
    extras, (n, k) = dict(zip(linear.extras, more, strict=True)), weight.shape
    residual = extras.get("residual")
    scalars: dict[str, int | float] = {
        **scalars_of(inner), **tile.parts.scalars, "n": n, "k": k, "ldw": weight.strides[0],
        "alpha": linear.alpha, "ldr": 0 if residual is None else rows_of(residual).strides[0],
    }  # fmt: skip
    constants = (
        ("activation", linear.activation), ("early", caps.early_launch), ("heads", tile.heads),
        ("known", tile.parts.known(inner)),
        ("scoring", Scoring(windowed=inner.attrs.scoring.windowed)),
        ("shuffle", caps.shuffles), ("tile", tile.group),
    )  # fmt: skip
    total = len(form.inputs)
    refs = (
        Ref(total + 3, tile.parts.spec), Ref(5, flat(attend.inputs[5])), Ref(count, flat(weight)),
        *(Ref(count + 1 + i, flat(s)) for i, s in enumerate(more)), Ref(total + 2, form.outputs[2]),
    )  # fmt: skip
    params = signature(dict.fromkeys(("partial", "starts", "w", *extras), 1), {"y": 1})
    return Call(kernel, refs, tuple(scalars.items()), constants, -(-n // OUTS),
                workgroup=tile.group.threads, signature=params)  # fmt: skip


COMBINED: Variant[Joined, Tile] = Variant("combined", tile_of, _launches, preferred)


def lower(form: Joined, caps: Caps) -> Lowered:
    """Two launches.

    Raises:
        LimitError: attention leaves no parts, or a product cannot read them.
    """
    what = f"attend_linear: x {list(form.inputs[2].shape)}"
    return choose((COMBINED,), form, caps, COMBINED.name, what).lower(form, caps)
