"""What moves elements: tensors joined and cut, rows of a table read and replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Never

import numpy as np

from centella.errors import DTypeError, ShapeError
from centella.ops.concat import most
from centella.ops.elementwise import check_numbers
from centella.ops.layout import broadcast_strides
from centella.tensors.arguments import check_tensors, number, refuse_names, whole
from centella.tensors.creation import arange, full
from centella.tensors.qtensor import QTensor, float_dtype
from centella.tensors.tensor import Tensor, apply, binary, compared
from centella.tensors.views import axis_of, counted, extents, integers

__all__ = [
    "broadcast_to", "chunk", "concat", "embedding", "gather", "interleaved_to_head_first", "pad",
    "repeat", "scatter", "split", "stack", "take_along_axis", "tril",
]  # fmt: skip


def concat(tensors: Sequence[Tensor], axis: int = 0, **other: Never) -> Tensor:
    """Tensors of one dtype joined along an axis; their other extents are equal.

    Raises:
        ShapeError: for no tensors, a bad axis, or shapes that differ elsewhere.
    """
    parts = _listed("concat", tensors, other)
    along = axis_of("concat", parts[0].shape, axis)
    width = most(parts[0].ndim)
    while len(parts) > 1:
        joined = [parts[i : i + width] for i in range(0, len(parts), width)]
        parts = [
            apply("concat", *some, axis=along) if len(some) > 1 else some[0] for some in joined
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
    position = counted(axis, rank + 1)
    if position is None:
        raise ShapeError(f"stack: expected an axis of a result of rank {rank + 1}, got {axis}")
    key = (slice(None),) * position + (None,)
    joined = concat([t[key] for t in parts], position)
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
    along = axis_of("split", x.shape, axis)
    extent = x.shape[along] if x.ndim else 0
    if isinstance(sizes, (int, np.integer)):
        most = whole("split", "parts", sizes, 1)
        each = tuple(min(most, extent - at) for at in range(0, max(extent, 1), most))
    else:
        each = integers("split", "parts", (sizes,))
    if not x.ndim or sum(each) != extent or min(each, default=0) < 0:
        raise ShapeError(f"split: expected parts of {list(x.shape)}, got {list(each)}")
    parts, start = [], 0
    for size in each:
        parts.append(x[(slice(None),) * along + (slice(start, start + size),)])
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


def broadcast_to(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    """x in a shape that it broadcasts to: a view, whose elements lie in memory once.

    Raises:
        ShapeError: it does not broadcast to this shape.
    """
    check_tensors("broadcast_to", x)
    wanted = extents("broadcast_to", shape)
    pairs = zip(reversed(x.shape), reversed(wanted), strict=False)
    if x.ndim > len(wanted) or any(n not in (1, m) for n, m in pairs):
        raise ShapeError(
            f"broadcast_to: expected a shape that {list(x.shape)} broadcasts to, got {list(wanted)}"
        )
    return x._view(wanted, broadcast_strides(x.spec, wanted), x._offset)


def repeat(x: Tensor, repeats: int, axis: int | None = None, **other: Never) -> Tensor:
    """Each element of x so many times along an axis, one beside the other; None: of x as a vector.

    Raises:
        ShapeError: there is no such axis, or fewer than 0 repeats.
    """
    refuse_names("repeat", other)
    check_tensors("repeat", x)
    times = whole("repeat", "repeats", repeats)
    if axis is None or not x.ndim:
        x = x.reshape(x.size)
    along = axis_of("repeat", x.shape, 0 if axis is None else axis)
    lead, extent, rest = x.shape[:along], x.shape[along], x.shape[along + 1 :]
    apart = x[(slice(None),) * (along + 1) + (None,)]
    return broadcast_to(apart, (*lead, extent, times, *rest)).reshape(*lead, extent * times, *rest)


def pad(
    x: Tensor, pad_width: int | Sequence[int] | Sequence[Sequence[int]], value: int | float = 0
) -> Tensor:
    """x with a number around it.

    Args:
        pad_width: elements before and after, a pair for each axis; one pair, or one number, is for
            all axes, as in NumPy.
        value: of the elements around, which fits the dtype.

    Raises:
        ShapeError: for other widths, or below 0; DTypeError: for a value that does not fit.
    """
    check_tensors("pad", x)
    fill = number("pad", "value", value)
    check_numbers("pad", (fill,), x.dtype)
    for axis, pair in enumerate(_widths(pad_width, x.ndim)):
        sides = [(*x.shape[:axis], n, *x.shape[axis + 1 :]) for n in pair]
        before, after = ([full(s, fill, x.dtype, x.device)] if s[axis] else [] for s in sides)
        x = concat([*before, x, *after], axis) if before or after else x
    return x


def _widths(widths: Any, rank: int) -> list[list[int]]:
    """Elements before and after, for each axis."""
    text = f"pad: expected widths of 0 or more, a pair for each axis, got {widths!r:.80}"
    try:
        pairs = np.broadcast_to(np.asarray(widths), (rank, 2))
    except ValueError as error:
        raise ShapeError(text) from error
    if pairs.dtype.kind not in "iu" or (pairs < 0).any():
        raise ShapeError(text)
    return pairs.tolist()  # type: ignore[no-any-return]  # NumPy's type is Any


def tril(x: Tensor, k: int = 0) -> Tensor:
    """x [..., n, m] with 0 above a diagonal: y[.., i, j] = x[.., i, j] where j <= i + k.

    Raises:
        ShapeError: for a rank below 2.
    """
    check_tensors("tril", x)
    if x.ndim < 2:
        raise ShapeError(f"tril: expected rank 2 or more, got {list(x.shape)}")
    rows, columns = x.shape[-2:]
    above = min(max(whole("tril", "k", k, -(1 << 31)), -rows), columns)
    row = arange(above, rows + above, device=x.device)[:, None]
    return binary("where", x, 0, compared("ge", row, arange(columns, device=x.device)))


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


def take_along_axis(x: Tensor, indices: Tensor, axis: int = -1, **other: Never) -> Tensor:
    """Elements of x by their index along an axis: y[.., j, ..] = x[.., indices[.., j, ..], ..].

    Args:
        x: of any dtype; indices: i32 of its rank; the other extents broadcast. A negative index
            counts from the end, as in NumPy; one outside of -n to n - 1 gives NaN, in integers 0,
            in bools False.

    Raises:
        ShapeError: for a bad axis, shapes that do not fit these, or indices into no elements.
        DTypeError: for indices that are not i32.
    """
    refuse_names("take_along_axis", other)
    check_tensors("take_along_axis", x)
    return apply("take_along_axis", x, indices, axis=axis_of("take_along_axis", x.shape, axis))


def scatter(
    x: Tensor, indices: Tensor, values: Tensor, axis: int = 0, *,
    reduce: Literal["set", "add", "mul", "max", "min"] = "set", **other: Never,
) -> Tensor:  # fmt: skip
    """x with values put in by their index along an axis: y[i] = values[j] where indices[j] = i.

    With "set" the last of equal indices counts. The others combine x[i] with its values in the
    order of j, in f32 (integers: modulo 2^32), and round once, so equal inputs give equal bits. A
    negative index counts from the end, as in NumPy; one outside of -n to n - 1 is dropped.

    Args:
        x: [a.., n, b..]; values: [a.., k, b..] of x's dtype.
        indices: i32 [k], one for each slice of values; or of their shape, one for each element.

    Raises:
        ShapeError: for shapes, an axis or `reduce` that do not fit these.
        DTypeError: for indices that are not i32, or bools that are not set.
    """
    refuse_names("scatter", other)
    check_tensors("scatter", x, indices, values)
    along = axis_of("scatter", x.shape, axis) if x.ndim else 0
    if reduce == "set" and along == 0 and indices.ndim <= 1:
        return apply("scatter", x, indices, values)
    return apply("scatter_reduce", x, indices, values, axis=along, reduce=reduce)
