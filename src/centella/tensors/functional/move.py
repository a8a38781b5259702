"""What moves elements: tensors joined and cut, rows of a table read and replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Never

import numpy as np

from centella.errors import DTypeError, ShapeError
from centella.ops.concat import most
from centella.tensors.arguments import check_tensors, refuse_names, whole
from centella.tensors.qtensor import QTensor, float_dtype
from centella.tensors.tensor import Tensor, apply
from centella.tensors.views import axis_of, counted, integers


def concat(tensors: Sequence[Tensor], axis: int = 0, **other: Never) -> Tensor:
    """Tensors of one dtype joined along an axis; their other extents are equal.

    Raises:
        ShapeError: for no tensors, a bad axis, or shapes that differ elsewhere.
    """
    parts = _listed("concat", tensors, other)
    place = axis_of("concat", parts[0].shape, axis)
    width = most(parts[0].ndim)
    while len(parts) > 1:
        joined = [parts[i : i + width] for i in range(0, len(parts), width)]
        parts = [
            apply("concat", *some, axis=place) if len(some) > 1 else some[0] for some in joined
        ]
    return parts[0]


def stack(tensors: Sequence[Tensor], axis: int = 0, **other: Never) -> Tensor:
    """Tensors of one shape and dtype joined along a new axis.

    Raises:
        ShapeError: for no tensors, a bad axis, or shapes that differ.
    """
    parts = _listed("stack", tensors, other)
    rank, shapes = parts[0].ndim, [list(t.shape) for t in parts]
    if any(s != shapes[0] for s in shapes):
        raise ShapeError(f"stack: expected tensors of one shape, got {str(shapes)[1:-1]}")
    place = counted(axis, rank + 1)
    if place is None:
        raise ShapeError(f"stack: expected an axis of a result of rank {rank + 1}, got {axis}")
    key = (slice(None),) * place + (None,)
    joined = concat([t[key] for t in parts], place)
    return joined if len(parts) > 1 else joined.copy()


def _listed(op: str, tensors: Any, other: Mapping[str, object]) -> list[Tensor]:
    """The tensors to join, one at least."""
    refuse_names(op, other)
    if isinstance(tensors, Tensor):
        raise DTypeError(f"{op}: expected a list of Tensors, got a Tensor; ct.{op}([x, y])")
    parts: list[Tensor] = list(tensors) if isinstance(tensors, Iterable) else [tensors]
    if not parts:
        raise ShapeError(f"{op}: expected at least one tensor, got none")
    check_tensors(op, *parts)
    return parts


def split(
    x: Tensor, sizes: int | Sequence[int], axis: int = 0, **other: Never
) -> tuple[Tensor, ...]:
    """x cut along an axis, as views; one slice alone is `x[a:b]`.

    Args:
        sizes: extent of each part, or one number for them all (the last may be shorter).

    Raises:
        ShapeError: for parts that are not x.
    """
    refuse_names("split", other)
    check_tensors("split", x)
    place = axis_of("split", x.shape, axis)
    extent = x.shape[place] if x.ndim else 0
    if isinstance(sizes, (int, np.integer)):
        most = whole("split", "parts", sizes, 1)
        each = tuple(min(most, extent - at) for at in range(0, max(extent, 1), most))
    else:
        each = integers("split", "parts", (sizes,))
    if not x.ndim or sum(each) != extent or min(each, default=0) < 0:
        raise ShapeError(f"split: expected parts of {list(x.shape)}, got {list(each)}")
    parts, start = [], 0
    for size in each:
        parts.append(x[(slice(None),) * place + (slice(start, start + size),)])
        start += size
    return tuple(parts)


def chunk(x: Tensor, chunks: int, axis: int = 0, **other: Never) -> tuple[Tensor, ...]:
    """x cut along an axis into at most `chunks` parts of one size, as views.

    The last part may be shorter, and there are fewer where the size leaves nothing for them.

    Raises:
        ShapeError: for less than one part.
    """
    refuse_names("chunk", other)
    check_tensors("chunk", x)
    count = whole("chunk", "chunks", chunks, 1)
    extent = x.shape[axis_of("chunk", x.shape, axis)] if x.ndim else 0
    return split(x, max(-(-extent // count), 1), axis)


def interleaved_to_head_first(x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """[..., seq, num_heads * head_dim] as [..., num_heads, seq, head_dim]: a view.

    Raises:
        ShapeError: when the last extent is not num_heads * head_dim.
    """
    op = "interleaved_to_head_first"
    check_tensors(op, x)
    heads, size = whole(op, "num_heads", num_heads), whole(op, "head_dim", head_dim)
    if x.ndim < 2 or x.shape[-1] != heads * size:
        raise ShapeError(f"{op}: expected [..., seq, {heads} * {size}], got {list(x.shape)}")
    split_heads = x.reshape(*x.shape[:-1], heads, size)
    rank = x.ndim + 1
    return split_heads.permute(*range(rank - 3), rank - 2, rank - 3, rank - 1)


def embedding(ids: Tensor, table: Tensor | QTensor, dtype: Any = None) -> Tensor:
    """Rows of a table: ids [...] i32, table [n, d] of floats or a QTensor, result [..., d].

    An id outside the table, and a negative one is, gives a row of NaN.

    Args:
        dtype: of the result, a float one; default: the table's, of a QTensor f32.

    Raises:
        ShapeError, DTypeError: for shapes or dtypes that do not fit these.
    """
    kind = None if dtype is None else float_dtype("embedding", dtype)
    if isinstance(table, QTensor):
        name, out = table.format.name, kind.name if kind else "f32"
        return apply("embedding", ids, *table.planes, format=name, dtype=out)
    rows = apply("embedding", ids, table)
    return rows if kind is None else rows.astype(kind)


def gather(x: Tensor, indices: Tensor, axis: int = 0, **other: Never) -> Tensor:
    """Rows of x along an axis: y[a.., j.., b..] = x[a.., indices[j..], b..].

    Args:
        x: of any dtype; indices: i32 of any shape, which takes the place of the axis. A negative
            one counts from the end, as in NumPy; one outside of -n to n - 1 gives NaN, in integers
            0, in bools False.

    Raises:
        ShapeError: for a bad axis, or indices into no rows.
        DTypeError: for indices that are not i32.
    """
    refuse_names("gather", other)
    check_tensors("gather", x)
    return apply("gather", x, indices, axis=axis_of("gather", x.shape, axis))


def scatter(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """x with rows replaced: y[i] = values[j] for the last j with indices[j] = i, else x[i].

    Of equal indices the last one counts, always; a negative one counts from the end, as in NumPy,
    and one outside of -n to n - 1 is dropped. Each row looks through all the indices.

    Args:
        x: [n, ...]; indices: [k] i32; values: [k, ...] of x's dtype.

    Raises:
        ShapeError, DTypeError: for shapes or dtypes that do not fit these.
    """
    return apply("scatter", x, indices, values)
