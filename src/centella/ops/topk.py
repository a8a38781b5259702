"""topk: the k largest elements along the last dimension, the largest first, and their indices.

A NaN is larger than every number, and of equal elements the one with the lower index comes first,
as `argmax` has it. A group has a row: in each of k rounds it finds the first element after the last
one that was chosen, so that nothing is kept but k indices.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.op.axes import LETTERS, WHOLE, Axes, axes
from centella.op.form import Form
from centella.op.op import Lowered, Op, Out
from centella.ops.argmax import order
from centella.ops.kernel_params import face
from centella.ops.layout import rows_of, takes_rows
from centella.ops.rows import walk
from centella.specs import Caps, Spec

NONE = 0xFFFFFFFF
MOST = 64  # elements that are chosen of a row
COLUMNS = 1 << 15  # of a row: MOST rounds over so many stay below what a driver runs of a loop
THREADS, FEW = 128, 32  # of a group; of one whose rows are short
SHORT = 512  # a barrier of a warp costs little


class TopkAttrs(Struct, frozen=True):
    """How many are chosen."""

    k: int


def _topk(*, x: Any, values: Any, indices: Any) -> None:
    columns, k = lang.parameter("columns", u32), lang.parameter("k", u32)
    row, picks = lang.group_id(), lang.shared(u32, MOST)
    keys, candidates = (lang.shared(u32, lang.workgroup_size()) for _ in range(2))
    last, after = lang.var(NONE, u32), lang.var(0, u32)  # the last pick's key, and past its index
    for pick in lang.range(k):
        best, index = lang.var(0, u32), lang.var(NONE, u32)
        for column in walk(columns, 1):
            key = order(x[row, column])
            left = (key < last.get()) | ((key == last.get()) & (column >= after.get()))
            with lang.if_(left & ((key > best.get()) | (index.get() == NONE))):
                best.set(key)
                index.set(column)
        key, at = _first(best.get(), index.get(), keys, candidates)
        last.set(key)
        after.set(at + 1)
        with lang.if_(lang.local_id() == 0):
            picks[pick] = at
        lang.barrier()
    for column in walk(k, 1):
        indices[row, column] = lang.bitcast(picks[column], i32)
    per = values.dtype.per_word
    for column in walk(k, per):
        chosen = [picks[lang.minimum(column + j, k - 1)] for j in range(per)]
        values.store(row, column, [x[row, index] for index in chosen])


def _first(key: Any, index: Any, keys: Any, indices: Any) -> tuple[Any, Any]:
    """The largest key of the group and the lowest index that has it; a barrier has to follow."""
    me, width = lang.local_id(), lang.workgroup_size()
    keys[me], indices[me] = key, index
    lang.barrier()
    while width > 1:
        width //= 2
        with lang.if_(me < width):
            key, index, other, far = keys[me], indices[me], keys[me + width], indices[me + width]
            better = (other > key) | ((other == key) & (far < index))
            keys[me] = lang.select(better, other, key)
            indices[me] = lang.select(better, far, index)
        lang.barrier()
    return keys[0], indices[0]


kernel: Kernel = Kernel(
    _topk, workgroup=THREADS, name="topk", face=face({"x": 2}, {"values": 2, "indices": 2})
)


def rule(specs: tuple[Spec, ...], attrs: TopkAttrs) -> tuple[Out, ...]:
    """[..., n] to [..., k] and [..., k] of i32; k from 1 to n and `MOST`, n to `COLUMNS`."""
    x, k = specs[0], attrs.k
    if not x.shape:
        raise ShapeError("topk: expected rank 1 or more, got a scalar")
    if x.dtype.kind == "bool":
        raise DTypeError("topk: expected a numeric dtype, got bool")
    n = x.shape[-1]
    if n > COLUMNS:
        raise ShapeError(f"topk: expected rows of at most {COLUMNS:,} elements, got {n:,}")
    if not 0 < k <= min(n, MOST):
        raise ShapeError(
            f"topk: expected k from 1 to {min(n, MOST)}, for rows of {n} elements and at most "
            f"{MOST}, got {k}"
        )
    shape = (*x.shape[:-1], k)
    return (shape, x.dtype), (shape, i32)


def reference(x: Any, k: int) -> tuple[Array, Array]:
    """The NumPy formula."""
    # From the other end, since a stable order has the lower index first and NaN last.
    back = x[..., ::-1]
    at = x.shape[-1] - 1 - np.argsort(back, -1, kind="stable")[..., ::-1][..., :k]
    return np.take_along_axis(x, at, -1), at.astype(np.int32)


def lower(form: Form[TopkAttrs], caps: Caps) -> Lowered:
    """One launch, a group a row."""
    x, *results = (rows_of(s) for s in (*form.inputs, *form.outputs))
    rows = math.prod(form.inputs[0].shape[:-1])
    threads = min(FEW if x.shape[1] <= SHORT else THREADS, caps.max_workgroup)
    refs = (Ref(0, x), *(Ref(i + 1, y) for i, y in enumerate(results)))
    scalars = (("columns", x.shape[1]), ("k", form.attrs.k))
    return Lowered((Call(kernel, refs, scalars, (), rows, threads),))


def axes_of(form: Form[TopkAttrs]) -> Axes:
    """Rows."""
    rows = LETTERS[: len(form.outputs[0].shape) - 1] + WHOLE
    return axes([rows], [rows, rows])


TOPK: Op[TopkAttrs] = Op(
    "topk", rule, reference, lower, takes_rows, attrs=TopkAttrs, axes=axes_of, doc=__doc__ or ""
)
