"""concat: y = the operands x_0, x_1, ... joined along one axis, in order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import LETTERS, Along, Axes, dims
from centella.op.op import Form, Lowered, Op, Out
from centella.ops.elements import index_of, numbered, offset_of
from centella.ops.layout import flat
from centella.ops.rows import place_of
from centella.specs import Caps, Spec

WORKGROUP = 256
MOST = 7  # operands of one launch: a device need bind no more than 8 buffers, one is the result
PARAMETERS = 63  # of one launch, on every device


def most(rank: int) -> int:
    """Operands that one launch can join: their strides are parameters."""
    return max(2, min(MOST, (PARAMETERS - (2 * rank + 1)) // (rank + 2)))


def _concat(*, rank: int, axis: int, y: Argument, **inputs: Any) -> None:
    """A thread a word of the output; each of its elements comes from one operand."""
    width, columns = y.dtype.per_word, lang.parameter("columns", u32)
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        index = index_of(row, "n", rank - 1)
        lanes = [lang.minimum(column + j, columns - 1) for j in range(width)]
        out = [_gather([*index, lane], axis, list(inputs.values())) for lane in lanes]
        y.store(offset_of(index, "s") + column, out)


def _gather(index: list[Operand], axis: int, xs: list[Expr]) -> Any:
    """The element of the joined operands at an index."""
    value: Any = None
    start = lang.const(0, u32)
    for k, x in enumerate(xs):
        extent = lang.parameter(f"extent{k}", u32)
        inside = [*index]
        inside[axis] = lang.minimum(index[axis] - start, extent - 1)
        element = x[offset_of(inside, f"t{k}.")]
        value = element if value is None else lang.select(index[axis] < start, value, element)
        start = start + extent
    return value


kernel: Kernel = Kernel(_concat, workgroup=WORKGROUP, name="concat")


class ConcatAttrs(Struct, frozen=True):
    """The axis that joins, from 0."""

    axis: int


def rule(specs: tuple[Spec, ...], attrs: ConcatAttrs) -> tuple[Out, ...]:
    """Operands that differ only along `axis` (0 or more); the extents there add up."""
    first, axis = specs[0], attrs.axis
    shapes = [s.shape for s in specs]
    rest = {(*s[:axis], *s[axis + 1 :]) for s in shapes}
    if len(rest) > 1 or len({len(s) for s in shapes}) > 1 or not 0 <= axis < len(first.shape):
        raise ShapeError(
            f"concat: expected shapes that differ only along axis {axis}, got "
            f"{', '.join(str(list(s)) for s in shapes)}"
        )
    if len({s.dtype for s in specs}) > 1:
        got = ", ".join(s.dtype.name for s in specs)
        raise DTypeError(f"concat: expected operands of one dtype, got {got}")
    total = sum(s[axis] for s in shapes)
    return (((*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype),)


def lower(form: Form[ConcatAttrs], caps: Caps) -> Lowered:
    """One launch; operands without elements are left out."""
    y, axis = form.outputs[0], form.attrs.axis
    used = [(i, s) for i, s in enumerate(form.inputs) if s.size]
    columns = y.shape[-1]
    items = -(-columns // y.dtype.per_word)
    threads = items * math.prod(y.shape[:-1])
    values = {"items": items, "threads": threads, "columns": columns}
    values.update({f"extent{k}": spec.shape[axis] for k, (_, spec) in enumerate(used)})
    strides = {f"t{k}.": spec.strides for k, (_, spec) in enumerate(used)}
    values.update(numbered({"n": y.shape, "s": y.strides, **strides}))
    call = Call(
        kernel,
        (*(Ref(i, flat(s)) for i, s in used), Ref(len(form.inputs), y)),
        tuple(values.items()),
        (("axis", axis), ("rank", len(y.shape))),
        -(-threads // WORKGROUP),
        signature=signature({f"x{k}": 1 for k in range(len(used))}, {"y": 1}),
    )
    return Lowered((call,))


def axes_of(form: Form[ConcatAttrs]) -> Axes:
    """Every axis; along the one that joins them, each operand from where it begins."""
    letters, axis = dims(LETTERS[: len(form.outputs[0].shape)]), form.attrs.axis
    joined, start = [], 0
    for spec in form.inputs:
        own = Along(LETTERS[axis], start=start)
        joined.append((*letters[:axis], own, *letters[axis + 1 :]))
        start += spec.shape[axis]
    return Axes(tuple(joined), (letters,))


CONCAT = Op("concat", rule, lambda *xs, axis: np.concatenate(xs, axis), lower, attrs=ConcatAttrs,
            axes=axes_of, doc=__doc__ or "")  # fmt: skip
