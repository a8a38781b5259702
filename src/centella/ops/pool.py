"""mean_pool: y[b, :] = sum over l < lengths[b] of x[b, l, :] / lengths[b]; no rows give zeros.

Of x [n, d] the second operand is offsets [b + 1]: y[b, :] is the mean of rows offsets[b] to
offsets[b + 1], which are those of texts that lie end to end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, i32, u32
from centella.emit.program import Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, NoAttrs, Op, Out
from centella.ops.layout import rows_of, takes_rows
from centella.ops.rows import chunked, load, place_of, rows_call, width_of
from centella.specs import Caps, Spec

WORKGROUP = 64


def _mean_pool(*, chunk: bool, ends: bool, x: Argument, lengths: Argument, y: Argument) -> None:
    """A thread a chunk (or word) of the output, walking the sequence."""
    columns, seq_len = lang.parameter("columns", u32), lang.parameter("seq_len", u32)
    width = width_of(y, chunk)
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        b, column = place_of(width)
        count = lang.minimum(lang.bitcast(lang.maximum(lengths[b], 0), u32), seq_len)
        first = count if ends else b * seq_len
        if ends:
            end = lang.minimum(lang.bitcast(lang.maximum(lengths[b + 1], 0), u32), seq_len)
            count = lang.minimum(lang.maximum(end, first) - first, seq_len)  # a bound of the loop
        sums = [lang.var(0.0, f32) for _ in range(width)]
        for step in lang.range(count):
            values = load(x, first + step, column, columns, width, chunk)
            for total, v in zip(sums, values, strict=True):
                total += v
        factor = 1.0 / lang.fmax(lang.cast(count, f32), 1.0)
        y.store(b, column, [total * factor for total in sums])


mean_pool_rows: Kernel = Kernel(
    _mean_pool, workgroup=WORKGROUP, name="mean_pool_rows",
    signature=signature({"x": 2, "lengths": 1}, {"y": 2}),
)  # fmt: skip


def rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """x [b, l, d], lengths [b] to [b, d]; or x [n, d], offsets [b + 1]."""
    x, lengths = specs
    ends = len(x.shape) == 2 and len(lengths.shape) == 1 and lengths.size > 0
    if not ends and (len(x.shape) != 3 or lengths.shape != x.shape[:1]):
        raise ShapeError(
            f"mean_pool: expected x [b, l, d] and lengths [b], got {list(x.shape)} and "
            f"{list(lengths.shape)}"
        )
    if not x.dtype.is_float or lengths.dtype is not i32:
        raise DTypeError(
            f"mean_pool: expected floats and i32, got {x.dtype.name} and {lengths.dtype.name}"
        )
    batch = lengths.shape[0] - 1 if ends else x.shape[0]
    return (((batch, x.shape[-1]), x.dtype),)


def reference(x: Array, lengths: Array) -> Any:
    """The NumPy formula."""
    if x.ndim == 2:
        begins = np.clip(lengths, 0, len(x))
        pairs = zip(begins[:-1], np.maximum(begins[1:], begins[:-1]), strict=True)
        means = [x[i:j].sum(0, dtype=x.dtype) / x.dtype.type(max(j - i, 1)) for i, j in pairs]
        return np.array(means, x.dtype).reshape(len(means), x.shape[1])
    count = np.clip(lengths, 0, x.shape[1])
    mask = np.arange(x.shape[1]) < count[:, None]
    total = np.where(mask[..., None], x, 0).sum(1, dtype=x.dtype)
    return total / np.maximum(count, 1).astype(x.dtype)[:, None]


def lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """One launch."""
    x, y = rows_of(form.inputs[0]), rows_of(form.outputs[0])
    chunk = chunked(x, y)
    batch, columns = y.shape
    refs = (Ref(0, x), Ref(1, form.inputs[1]), Ref(2, y))
    scalars = {"columns": columns, "seq_len": form.inputs[0].shape[-2]}
    width, constants = width_of(y, chunk), (("chunk", chunk), ("ends", _ends(form)))
    return Lowered((rows_call(mean_pool_rows, refs, batch, columns, width, scalars, constants),))


def axes_of(form: Form[NoAttrs]) -> Axes:
    """Sequences."""
    return axes(["..", "."], [".."]) if _ends(form) else axes(["b..", "b"], ["b."])


def _ends(form: Form[NoAttrs]) -> bool:
    return len(form.inputs[0].shape) == 2


MEAN_POOL = Op("mean_pool", rule, reference, lower, takes_rows, axes=axes_of, doc=__doc__ or "")
