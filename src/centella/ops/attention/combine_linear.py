"""A product that adds up its row of x as it loads it: parts that attention left (`attend_linear`).

    y[n] = f(alpha (h . W[n, :]) + bias[n]) + residual[n]
    h = what `combine.py` makes of the parts of each head

That launch is left out; instead every group adds up all heads, out of the L2 cache. So a group has
all of the depth and many outputs, which are few groups: for the product of 2048 by 1024 after 16
heads, one a multiprocessor of an H200.

A thread has eight elements of the depth. It asks for everything at once: the weights of each
output, and of its head maxima, sums and elements of all parts, as many as there is room for. Those
without keys weigh nothing, and the launch before wrote them, too. So nothing here depends on how
many keys there are.
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
from centella.ops.attention.masks import LOWEST, share_of
from centella.ops.attention.parts import Parts, Results
from centella.ops.attention.rope_choice import SPLIT_STEP, first_in_f32
from centella.ops.attention.table import row_of
from centella.ops.attention.weights import power
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.epilogue import Word
from centella.ops.matmul.problem import aligned
from centella.ops.matmul.sums import SHARED_WORDS, TeamSums
from centella.ops.matmul.thin import let_next_in
from centella.ops.rope_attend import RopeAttendAttrs
from centella.ops.rows import fold, power_above
from centella.specs import Caps

EACH = 8  # elements of the depth that a thread has
OUTS = (8, 16)  # outputs of a group: of fewer, registers are left for more parts on their way
LEAST_THREADS = 64  # of a group
# A group takes the registers of most of a multiprocessor: one for each of an H200. Bytes of parts
# that it reads, which take it little more than a microsecond, where a launch takes three.
MOST_GROUPS, MOST_BYTES = 132, 160 << 10


class _Weights:
    """A thread's weights of each output, in registers from when they are asked for."""

    def __init__(self, source: Argument, outs: int) -> None:
        self._source, self._per = source, source.dtype.per_chunk
        self._words: Any = lang.vars(u32, outs, EACH // self._per * 4, init=0)

    def ask(self, starts: list[Any]) -> None:
        """Load them, under a condition.

        Without one a driver puts loads off until something waits for them.
        """
        for words, start in zip(self._words, starts, strict=True):
            chunks = [self._source.load_bits(start + e) for e in range(0, EACH, self._per)]
            for var, word in zip(words, (w for c in chunks for w in c), strict=True):
                var.set(word)

    def times(self, x: list[Any]) -> list[Any]:
        """A thread's part of each output."""
        totals = []
        for words in self._words:
            row = self._source.unpack([w.get() for w in words])
            total = row[0] * x[0]
            for a, b in zip(row[1:], x[1:], strict=True):
                total = lang.fma(a, b, total)
            totals.append(total)
        return totals


def _combined(
    *, activation: str, dim: int, early: bool, idle: bool, native: bool, outs: int, splits: int,
    threads: int, partial: Argument, w: Argument, y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    """A group has so many outputs; of a head there are so many parts.

    Args:
        idle: whether some threads have nothing of the depth: they add zeros, whatever the head has.
    """
    n, k, pitch = (lang.parameter(name, u32) for name in ("n", "k", "ldw"))
    column, first = lang.local_id() * EACH, lang.group_id() * outs
    weights = _Weights(w, outs)
    has = column < k
    with lang.if_(has):
        outputs = [lang.minimum(first + r, n - 1) for r in range(outs)]
        weights.ask([output * pitch + column for output in outputs])
    word = Word(activation, extra, outs, first, n, y)
    column = lang.minimum(column, k - EACH)
    x = _added_up(partial, column // dim, column % dim, dim, splits, native)
    totals = weights.times([lang.select(has, v, 0.0) for v in x] if idle else x)
    let_next_in(early)
    added = TeamSums(threads, 1, threads, outs)(totals)
    word.store(lambda output: [added(output, lang.const(0, u32))])


def _added_up(
    partial: Argument, head: Any, column: Any, dim: int, splits: int, native: bool
) -> list[Any]:
    """Elements of a head from a column on. Parts without keys have the lowest maximum, and zeros.

    Args:
        native: as of `power`.
    """
    part, four = Results(head, lang.const(0, u32)), f32.per_chunk
    stats = [part.stats + n for n in range(2 * splits)]
    by_chunk = [v for at in stats[::four] for v in partial.load(at)] if splits % 2 == 0 else None
    tops_and_wholes = by_chunk or [partial[at] for at in stats]
    rows = [
        [v for e in range(0, EACH, four) for v in partial.load(part.sums + (column + n * dim + e))]
        for n in range(splits)
    ]
    tops, wholes = tops_and_wholes[::2], tops_and_wholes[1::2]
    highest = reduce(lang.fmax, tops, lang.const(LOWEST, f32))
    weights = [power(top - highest, native) for top in tops]
    total = fold([w * whole for w, whole in zip(weights, wholes, strict=True)], operator.add)
    factor = share_of(total)
    x = [lang.const(0.0, f32)] * EACH
    for weight, row in zip(weights, rows, strict=True):
        x = [lang.fma(weight * factor, v, into) for v, into in zip(row, x, strict=True)]
    return x


kernel: Kernel = Kernel(_combined, workgroup=256, name="combined_linear", rewritable=True)


# -- how it is launched ---------------------------------------------------------------------------

Joined = Form[AttendLinearAttrs]


class Tile(Struct, frozen=True):
    """The parts that attention leaves, and how the product's groups work.

    Attributes:
        kept: words that a thread asks for at once.
    """

    parts: Parts
    threads: int
    outs: int
    kept: int


def tile_of(form: Joined, caps: Caps) -> Tile | None:
    """How groups work, where one token of one sequence in f32 leaves few parts of whole chunks."""
    linear, attend = form.attrs.linear, attend_form(form)
    batch, tokens, heads, dim = attend.outputs[2].shape
    weight = form.inputs[len(attend.inputs)]
    plain = not linear.format and {"bias", "residual"}.issuperset(linear.extras)
    if not (plain and weight.dtype.is_float and weight.size and batch * tokens == 1):
        return None
    parts = SPLIT_STEP.tile(attend, caps)
    if parts is None or dim % EACH:
        return None
    threads = max(power_above(heads * dim // EACH), LEAST_THREADS)
    few, many = OUTS
    outs = few if weight.shape[0] <= few * MOST_GROUPS else many
    words = max(threads * outs, SHARED_WORDS)  # at most those that `TeamSums` takes
    fits = threads <= caps.max_workgroup and words * f32.itemsize <= caps.max_shared
    if not (fits and aligned(weight, weight.strides[0], 0)):
        return None
    kept = outs * EACH // weight.dtype.per_word + parts.splits * (EACH + 2)
    return Tile(parts, threads, outs, kept)


def preferred(form: Joined, caps: Caps) -> bool:
    """Where attention is better in parts, and groups are few that read few of them."""
    attend, tile = attend_form(form), tile_of(form, caps)
    if tile is None or not SPLIT_STEP.takes(attend, caps, attend.attrs.variant):
        return False
    if form.attrs.linear.variant is not None or tile.kept > row_of(caps).joined:
        return False
    n, k = form.inputs[len(attend.inputs)].shape
    return n <= tile.outs * MOST_GROUPS and tile.parts.splits * k * f32.itemsize <= MOST_BYTES


def _launches(form: Joined, tile: Tile, caps: Caps) -> Lowered:
    attend, total = attend_form(form), len(form.inputs)
    call = first_in_f32(attend, tile.parts, caps, whole=True)
    operands = (*range(len(attend.inputs)), total, total + 1, total + 2)
    first = Lowered((call,), (tile.parts.spec,)).within(operands, total + 3)
    return first + Lowered((_product(form, attend, tile, caps),))


def _product(form: Joined, attend: Form[RopeAttendAttrs], tile: Tile, caps: Caps) -> Call:
    """The second launch."""
    linear, count, total = form.attrs.linear, len(attend.inputs), len(form.inputs)
    weight, *more = form.inputs[count:]
    extras, (n, k) = dict(zip(linear.extras, more, strict=True)), weight.shape
    residual, parts = extras.get("residual"), tile.parts
    scalars: dict[str, int | float] = {
        **parts.scalars, "n": n, "k": k, "ldw": weight.strides[0], "alpha": linear.alpha,
        "ldr": 0 if residual is None else rows_of(residual).strides[0],
    }  # fmt: skip
    constants = (
        ("activation", linear.activation), ("dim", parts.width), ("early", caps.early_launch),
        ("idle", tile.threads * EACH > k), ("native", caps.native_exp2), ("outs", tile.outs),
        ("splits", parts.splits), ("threads", tile.threads),
    )  # fmt: skip
    refs = (
        Ref(total + 3, parts.spec), Ref(count, flat(weight)),
        *(Ref(count + 1 + i, flat(s)) for i, s in enumerate(more)), Ref(total + 2, form.outputs[2]),
    )  # fmt: skip
    params = signature(dict.fromkeys(("partial", "w", *extras), 1), {"y": 1})
    return Call(kernel, refs, tuple(scalars.items()), constants, -(-n // tile.outs),
                workgroup=tile.threads, signature=params)  # fmt: skip


COMBINED: Variant[Joined, Tile] = Variant("combined", tile_of, _launches, preferred)


def lower(form: Joined, caps: Caps) -> Lowered:
    """Two launches.

    Raises:
        LimitError: attention leaves no parts, or a product cannot read them.
    """
    what = f"attend_linear: x {list(form.inputs[2].shape)}"
    return choose((COMBINED,), form, caps, COMBINED.name, what).lower(form, caps)
