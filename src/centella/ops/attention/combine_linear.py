"""A product that adds up its row of x as it loads it: parts that attention left (`attend_linear`).

    y[n] = f(alpha (h . W[n, :]) + bias[n]) + residual[n]
    h = what `combine.py` makes of the parts of each head

That launch is left out; instead every group adds up all heads, out of the L2 cache. So a group is
wide and has many outputs, which are few groups: for the product of 2048 by 1024 after 16 heads, one
a multiprocessor of an H200. A thread has a chunk of the depth of each of its outputs, and of a head
the same elements. It asks for the weights, then for several parts at once; how many there are follows
from the step's position.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.op.variant import Variant, choose
from centella.ops.attend_linear import AttendLinearAttrs, step_operands
from centella.ops.attention.masks import LOWEST, Scoring, Sight, share_of
from centella.ops.attention.parts import Known, Parts, Results, part_of
from centella.ops.attention.problem import scalars_of
from centella.ops.attention.rope_choice import SPLIT_STEP, first_in_f32
from centella.ops.attention.table import row_of
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.problem import aligned
from centella.ops.matmul.sums import SUBGROUP, Thin, finish
from centella.ops.matmul.thin import Rows, add_products, depth_of, let_next_in
from centella.ops.rope_attend import ROPE_ATTEND, RopeAttendAttrs, attention_form
from centella.ops.rows import power_above
from centella.specs import Caps, make_spec

THREADS, FEW_THREADS = 256, 64  # at most, of a GPU and of a CPU
OUTS = 8  # outputs of a group
TOGETHER = 8  # parts that a thread asks for at once, at most
# Bytes of parts that all groups read, if there are as many as the plan has room for: 128 KB for
# each multiprocessor of an H200, which take it a microsecond, where a launch takes three.
MOST_BYTES = 16 << 20


class _Parts(Rows, frozen=True):
    """The row of x, added up as it is read.

    Attributes:
        dim: elements of a head; used: parts of each; splits: those that there is room for.
        together: parts that are asked for at once.
    """

    dim: int
    used: Any
    splits: int
    together: int

    def read(self, row: int, column: Any, width: int, masked: bool) -> list[Expr]:
        """As of `Rows`; columns are of the row, which is whole chunks."""
        head = Results(column // self.dim, lang.const(0, u32))
        at = head.sums + column % self.dim, head.stats
        sums = self._taken(at, lang.const(0, u32), width, None)
        if self.splits > self.together:
            so_far = [lang.var(v) for v in sums]
            for first in lang.range(lang.const(self.together, u32), self.used, self.together):
                for into, v in zip(so_far, self._taken(at, first, width, so_far), strict=True):
                    into.set(v)
            sums = [v.get() for v in so_far]
        factor = share_of(sums[1])
        return [v * factor for v in sums[2:]]

    def _taken(self, at: tuple[Any, Any], first: Any, width: int, before: Any) -> list[Any]:
        """Some parts, and those before: the maximum, the sum of weights, the weighed values."""
        (sums, stats), per = at, f32.per_chunk
        ahead = [first + n for n in range(self.together)]
        safe = [lang.minimum(n, lang.maximum(self.used, 1) - 1) for n in ahead]
        tops = [self.source[stats + n * 2] for n in safe]
        wholes = [self.source[stats + n * 2 + 1] for n in safe]
        chunks = [
            [v for e in range(0, width, per) for v in self.source.load(sums + n * self.dim + e)]
            for n in safe
        ]
        # One that is not there is the last again.
        highest = reduce(lang.fmax, tops, lang.const(LOWEST, f32) if before is None else before[0])
        total = [lang.const(0.0, f32)] * (1 + width)
        if before is not None:
            shrink = lang.exp2(before[0] - highest)
            total = [v * shrink for v in before[1:]]
        for n, top, whole, chunk in zip(ahead, tops, wholes, chunks, strict=True):
            there, weight = n < self.used, lang.exp2(top - highest)
            total = [lang.fma(weight, lang.select(there, v, 0.0), into)
                     for v, into in zip([whole, *chunk], total, strict=True)]  # fmt: skip
        return [highest, *total]


def _combined(
    *, tile: Thin, activation: str, depth: str, dim: int, early: bool, known: Known,
    scoring: Scoring, shuffle: bool, splits: int, together: int, vector_w: bool, partial: Argument,
    starts: Argument, w: Argument, y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    """A group has OUTS outputs.

    Args:
        known: as of `part_of`; splits, together: as of `_Parts`.
    """
    p: dict[str, Any] = {name: lang.parameter(name, u32) for name in ("n", "k", "ldw")}
    none, one = lang.const(0, u32), lang.const(1, u32)
    p |= {"m": one, "ldy": none, "sy": none}
    sight = Sight({"starts": starts}, scoring, none, one, lang.parameter("lk", u32), _as_it_is)
    _, _, used = part_of(sight, lang.const(splits, u32), scoring.windowed, known)
    first, lane = lang.group_id() * tile.outs, lang.local_id()
    places = [lang.minimum(first + r, p["n"] - 1) * p["ldw"] for r in range(tile.outs)]
    weights = Rows(w, places, vector_w, None, p["k"])
    inputs = _Parts(partial, [none], True, None, p["k"], dim, used, splits, together)
    sums = lang.vars(f32, tile.outs, 1, init=0.0)
    add_products(sums, tile, weights, inputs, lane, p["k"], depth)
    let_next_in(early)
    finish(sums, tile, shuffle, none, first, p, y, activation, extra)


def _as_it_is(value: Operand) -> Operand:
    return value


kernel: Kernel = Kernel(_combined, workgroup=THREADS, name="combined_linear", rewritable=True)


# -- how it is launched ---------------------------------------------------------------------------

Joined = Form[AttendLinearAttrs]


def attend_form(form: Joined) -> Form[RopeAttendAttrs]:
    """What its attention is asked to do."""
    count = step_operands(form.attrs, len(form.inputs))
    keys, values, x, *_ = inputs = form.inputs[:count]
    starts = inputs[5]
    kv_heads = keys.shape[0 if len(starts.shape) == 2 else 1]
    batch, heads, tokens, dim = x.shape
    y = make_spec((batch, tokens, heads - 2 * kv_heads, dim), x.dtype, 16)
    return Form(ROPE_ATTEND, inputs, (*form.outputs[:2], y), form.attrs.attend)


def tile_of(form: Joined, caps: Caps) -> Parts | None:
    """The parts, where one token of one sequence in f32 leaves them, whose head is whole chunks."""
    linear, attend = form.attrs.linear, attend_form(form)
    weight = form.inputs[len(attend.inputs)]
    plain = not linear.format and weight.dtype.is_float and linear.variant is None
    if not (plain and attend.inputs[2].shape[0] == 1):
        return None
    if not {"bias", "residual"}.issuperset(linear.extras) or not weight.size:
        return None
    if attend.outputs[2].shape[3] % max(weight.dtype.per_chunk, f32.per_chunk):
        return None
    return SPLIT_STEP.tile(attend, caps)


def preferred(form: Joined, caps: Caps) -> bool:
    """Where attention is better in parts, and there are not too many for every group to read."""
    attend, parts = attend_form(form), tile_of(form, caps)
    if parts is None or not SPLIT_STEP.takes(attend, caps, attend.attrs.variant):
        return False
    n, k = form.inputs[len(attend.inputs)].shape
    return -(-n // OUTS) * parts.splits * k * f32.itemsize <= MOST_BYTES


def _launches(form: Joined, parts: Parts, caps: Caps) -> Lowered:
    attend = attend_form(form)
    first = Lowered((first_in_f32(attend, parts, caps),), (parts.spec,))
    count, total = len(attend.inputs), len(form.inputs)
    left = total + len(form.outputs)
    first = first.within((*range(count), total, total + 1, total + 2), left)
    return first + Lowered((_product(form, attend, parts, left, caps),))


def _product(
    form: Joined, attend: Form[RopeAttendAttrs], parts: Parts, left: int, caps: Caps
) -> Call:  # fmt: skip
    """The second launch; `left` is the number of the memory between the two."""
    inner, linear, count = attention_form(attend), form.attrs.linear, len(attend.inputs)
    weight, *more = form.inputs[count:]
    extras, y = dict(zip(linear.extras, more, strict=True)), form.outputs[2]
    (n, k), width = weight.shape, max(weight.dtype.per_chunk, f32.per_chunk)
    rolled = row_of(caps).rolled
    most = min(FEW_THREADS if rolled else THREADS, caps.max_workgroup)
    lanes = max(min(most, power_above(-(-k // width))), SUBGROUP)
    tile = Thin(1, lanes, OUTS, 1, lanes, rolled)
    residual = extras.get("residual")
    scalars: dict[str, int | float] = {
        **scalars_of(inner), **parts.scalars, "n": n, "k": k, "ldw": weight.strides[0],
        "alpha": linear.alpha, "ldr": 0 if residual is None else rows_of(residual).strides[0],
    }  # fmt: skip
    windowed = inner.attrs.scoring.windowed
    constants = (
        ("activation", linear.activation), ("depth", depth_of(tile, k, width)),
        ("dim", inner.inputs[0].shape[3]), ("early", caps.early_launch),
        ("known", parts.known(inner)), ("scoring", Scoring(windowed=windowed)),
        ("shuffle", caps.shuffles), ("splits", parts.splits), ("tile", tile),
        ("together", 1 if rolled else together_of(parts.splits)),
        ("vector_w", aligned(weight, weight.strides[0] * (n > 1), 0)),
    )  # fmt: skip
    refs = (
        Ref(left, parts.spec), Ref(5, flat(attend.inputs[5])), Ref(count, flat(weight)),
        *(Ref(count + 1 + i, flat(s)) for i, s in enumerate(more)), Ref(left - 1, y),
    )  # fmt: skip
    params = signature(dict.fromkeys(("partial", "starts", "w", *extras), 1), {"y": 1})
    return Call(kernel, refs, tuple(scalars.items()), constants, -(-n // OUTS),
                workgroup=lanes, signature=params)  # fmt: skip


def together_of(splits: int) -> int:
    """Parts at once, so that all are taken in as few turns as can be, of as many each."""
    turns = -(-splits // TOGETHER)
    return -(-splits // turns)


COMBINED: Variant[Joined, Parts] = Variant("combined", tile_of, _launches, preferred)


def lower(form: Joined, caps: Caps) -> Lowered:
    """Two launches.

    Raises:
        LimitError: attention leaves no parts, or a product cannot read them.
    """
    what = f"attend_linear: x {list(form.inputs[2].shape)}"
    return choose((COMBINED,), form, caps, COMBINED.name, what).lower(form, caps)


