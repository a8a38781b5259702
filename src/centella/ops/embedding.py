"""embedding: y[..., :] = table[ids[...], :]; an id outside the table gives a row of NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, dtype_of, i32, narrow, u32, widen
from centella.emit.program import Call, HostProgram, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.axes import LETTERS, WHOLE, Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.ops.layout import rows_of, takes_rows
from centella.ops.quant.dequantize import plane_axes
from centella.ops.quant.table import FORMATS
from centella.ops.rows import chunked, load, place_of, width_of
from centella.specs import Caps, Spec

WORKGROUP = 256
NAN = float("nan")


def _embedding(*, chunk: bool, keep: bool, ids: Argument, table: Argument, y: Argument) -> None:
    """A thread a chunk (or word) of the output.

    `keep`: a row whose id is not in this part of the table stays as it is.
    """
    columns, per_row = lang.parameter("columns", u32), lang.parameter("per_row", u32)
    width = width_of(y, chunk)
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        outer = row // per_row
        index = lang.bitcast(ids[outer, row - outer * per_row], u32) - lang.parameter("first", u32)
        inside = index < lang.parameter("height", u32)
        values = load(table, lang.select(inside, index, 0), column, columns, width, chunk)
        if keep:
            with lang.if_(inside):
                y.store(row, column, values)
        else:
            y.store(row, column, [lang.select(inside, v, NAN) for v in values])


embedding_rows: Kernel = Kernel(_embedding, workgroup=WORKGROUP, name="embedding_rows")


class EmbeddingAttrs(Struct, frozen=True):
    """Of a table in planes their format and the dtype of the result; "": it is one tensor."""

    format: str = ""
    dtype: str = ""


def rule(specs: tuple[Spec, ...], attrs: EmbeddingAttrs) -> tuple[Out, ...]:
    """ids [...], table [n, d] or planes to [..., d]."""
    ids, table, *_ = specs
    if ids.dtype is not i32:
        raise DTypeError(f"embedding: expected i32 ids, got {ids.dtype.name}")
    if attrs.format:
        n, d = FORMATS[attrs.format].check("embedding", specs[1:])
        if not n and ids.size:
            raise ShapeError(f"embedding: expected a table with rows, got {[n, d]}")
        return (((*ids.shape, d), dtype_of(attrs.dtype)),)
    if not table.dtype.is_float:
        raise DTypeError(f"embedding: expected a float table, got {table.dtype.name}")
    if len(table.shape) != 2:
        raise ShapeError(f"embedding: expected a table [n, d], got {list(table.shape)}")
    if not table.shape[0] and ids.size:
        raise ShapeError(f"embedding: expected a table with rows, got {list(table.shape)}")
    return (((*ids.shape, table.shape[1]), table.dtype),)


def reference(ids: Array, *table: Array, format: str = "", **attrs: Any) -> Array:
    """The NumPy formula."""
    inside = (ids >= 0) & (ids < len(table[0]))
    chosen = np.where(inside, ids, 0)
    if format:
        planes = (plane[chosen.ravel()] for plane in table)
        decoded = FORMATS[format].decode(*planes)
        rows: Array = decoded.reshape(*ids.shape, decoded.shape[1])
    else:
        rows = table[0][chosen]
    return rows if inside.all() else np.where(inside[..., None], rows, rows.dtype.type(NAN))


def host(form: Form[EmbeddingAttrs]) -> HostProgram:
    """The formula on the rows that are asked for, the rest of the table is not touched."""
    attrs, (y,) = form.attrs, form.outputs
    dtypes = [spec.dtype for spec in form.inputs[1:]]

    def call(ins: list[Any], outs: list[Any]) -> None:
        ids, *table = ins
        inside = (ids >= 0) & (ids < len(table[0]))
        chosen = [plane[np.where(inside, ids, 0).ravel()] for plane in table]
        if attrs.format:
            rows = FORMATS[attrs.format].decode(*map(widen, chosen, dtypes))
            np.copyto(outs[0], narrow(rows, y.dtype).reshape(y.shape))
        else:
            np.copyto(outs[0], chosen[0].reshape(y.shape))
        if not inside.all():
            outs[0][~inside] = narrow(np.array([NAN], np.float32), y.dtype)

    return HostProgram("numpy:embedding", "embedding", call)


def lower(form: Form[EmbeddingAttrs], caps: Caps) -> Lowered:
    """One launch, of a table that is one tensor."""
    ids, table, y = rows_of(form.inputs[0]), rows_of(form.inputs[1]), rows_of(form.outputs[0])
    chunk = chunked(table, y)
    rows, columns = math.prod(form.outputs[0].shape[:-1]), form.outputs[0].shape[-1]
    items = -(-columns // width_of(y, chunk))
    first = form.part("r", table.shape[0]).first
    reads, result = {"ids": 2, "table": 2}, {"y": 2}
    call = Call(
        embedding_rows,
        (Ref(0, ids), Ref(1, table), Ref(2, y)),
        (
            ("threads", rows * items), ("items", items), ("columns", columns),
            ("height", table.shape[0]), ("per_row", ids.shape[1]), ("first", first),
        ),
        (("chunk", chunk), ("keep", first > 0)),
        -(-rows * items // WORKGROUP),
        signature=signature(reads, {}, result) if first else signature(reads, result),
    )  # fmt: skip
    return Lowered((call,))


def axes_of(form: Form[EmbeddingAttrs]) -> Axes:
    """Ids; and the rows of the table, among which they choose."""
    ids, format = LETTERS[: len(form.inputs[0].shape)], form.attrs.format
    table = plane_axes(FORMATS[format], "r") if format else ["r."]
    return axes([ids, *table], [ids + WHOLE], chosen="r")


EMBEDDING = Op("embedding", rule, reference, "centella.ops.quant.kernels:embedding", takes_rows,
               attrs=EmbeddingAttrs, host=host, axes=axes_of, doc=__doc__ or "")  # fmt: skip
