"""embedding: y[..., :] = table[ids[...], :]; an id outside the table gives a row of NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import i32, u32
from centella.errors import DTypeError, ShapeError
from centella.lang import In, Out, storage
from centella.op import Lowered, Op
from centella.op import Out as Result
from centella.ops.layout import rows_of, takes_rows
from centella.ops.rows import chunked, load
from centella.program import Call, Ref, kernel
from centella.specs import Caps, Spec

WORKGROUP = 256
NAN = float("nan")


@kernel(workgroup=WORKGROUP)
def embedding_rows(
    ids: In[i32, 2], table: In[storage, 2], y: Out[storage, 2], threads: u32, items: u32,
    columns: u32, height: u32, per_row: u32, *, chunk: bool,
) -> None:  # fmt: skip
    """A thread a chunk (or word) of the output."""
    thread = lang.global_id()
    width = y.dtype.per_chunk if chunk else y.dtype.per_word
    with lang.if_(thread < threads):
        row = thread // items
        column = (thread - row * items) * width
        outer = row // per_row
        index = lang.bitcast(ids[outer, row - outer * per_row], u32)
        inside = index < height
        values = load(table, lang.select(inside, index, 0), column, columns, width, chunk)
        y.store(row, column, [lang.select(inside, v, NAN) for v in values])


def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Result, ...]:
    """ids [...], table [n, d] to [..., d]."""
    ids, table = specs
    if ids.dtype is not i32:
        raise DTypeError(f"embedding: expected i32 ids, got {ids.dtype.name}")
    if not table.dtype.is_float:
        raise DTypeError(f"embedding: expected a float table, got {table.dtype.name}")
    if len(table.shape) != 2:
        raise ShapeError(f"embedding: expected a table [n, d], got {list(table.shape)}")
    if not table.shape[0] and ids.size:
        raise ShapeError(f"embedding: expected a table with rows, got {list(table.shape)}")
    return (((*ids.shape, table.shape[1]), table.dtype),)


def reference(ids: Any, table: Any) -> Any:
    """The NumPy formula."""
    inside = (ids >= 0) & (ids < table.shape[0])
    rows = table[np.where(inside, ids, 0)]
    return rows if inside.all() else np.where(inside[..., None], rows, table.dtype.type(NAN))


def lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch."""
    ids, table, y = rows_of(inputs[0]), rows_of(inputs[1]), rows_of(outputs[0])
    chunk = chunked(table, y)
    rows, columns = math.prod(outputs[0].shape[:-1]), outputs[0].shape[-1]
    items = -(-columns // (y.dtype.per_chunk if chunk else y.dtype.per_word))
    call = Call(
        embedding_rows,
        (Ref(0, ids), Ref(1, table), Ref(2, y)),
        (
            ("threads", rows * items), ("items", items), ("columns", columns),
            ("height", table.shape[0]), ("per_row", ids.shape[1]),
        ),
        (("chunk", chunk),),
        -(-rows * items // WORKGROUP),
    )  # fmt: skip
    return Lowered((call,))


EMBEDDING = Op("embedding", rule, reference, lower, takes_rows, doc=__doc__ or "")
