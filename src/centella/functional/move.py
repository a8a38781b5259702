"""What moves elements: tensors joined and cut, rows of a table read and replaced."""

from __future__ import annotations

from collections.abc import Sequence

from centella.errors import ShapeError
from centella.ops.concat import MOST
from centella.tensor import Tensor, apply, checked, checked_all
from centella.views import axis_of


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors of one dtype joined along an axis; their other extents are equal.

    Raises:
        ShapeError: for no tensors, a bad axis, or shapes that differ elsewhere.
    """
    parts = checked_all("concat", tensors)
    place = axis_of("concat", parts[0].shape, axis)
    most = MOST if parts[0].ndim < 6 else 3  # what the strides leave room for
    while len(parts) > 1:
        joined = [parts[i : i + most] for i in range(0, len(parts), most)]
        parts = [
            apply("concat", *some, axis=place) if len(some) > 1 else some[0] for some in joined
        ]
    return parts[0]


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors of one shape and dtype joined along a new axis.

    Raises:
        ShapeError: for no tensors, a bad axis, or shapes that differ.
    """
    tensors = checked_all("stack", tensors)
    rank, shapes = tensors[0].ndim, [list(t.shape) for t in tensors]
    if any(s != shapes[0] for s in shapes):
        raise ShapeError(f"stack: expected tensors of one shape, got {str(shapes)[1:-1]}")
    if not -rank - 1 <= axis <= rank:
        raise ShapeError(f"stack: expected an axis of a result of rank {rank + 1}, got {axis}")
    place = axis % (rank + 1)
    key = (slice(None),) * place + (None,)
    joined = concat([t[key] for t in tensors], place)
    return joined if len(tensors) > 1 else joined.copy()


def split(x: Tensor, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """x cut along an axis, as views; one slice alone is `x[a:b]`.

    Args:
        sizes: extent of each part, or one number for them all (the last may be shorter).

    Raises:
        ShapeError: for parts that are not x.
    """
    place = axis_of("split", checked("split", x).shape, axis)
    extent = x.shape[place] if x.ndim else 0
    if isinstance(sizes, int):
        if sizes < 1:
            raise ShapeError(f"split: expected parts of 1 or more, got {sizes}")
        starts = range(0, max(extent, 1), sizes)
        sizes = [min(sizes, extent - start) for start in starts]
    if not x.ndim or sum(sizes) != extent or min(sizes, default=0) < 0:
        raise ShapeError(f"split: expected parts of {list(x.shape)}, got {list(sizes)}")
    parts, start = [], 0
    for size in sizes:
        parts.append(x[(slice(None),) * place + (slice(start, start + size),)])
        start += size
    return tuple(parts)


def chunk(x: Tensor, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """x cut along an axis into at most `chunks` parts of one size, as views.

    The last part may be shorter, and there are fewer where the size leaves nothing for them.

    Raises:
        ShapeError: for less than one part.
    """
    checked("chunk", x)
    if chunks < 1:
        raise ShapeError(f"chunk: expected 1 part or more, got {chunks}")
    extent = x.shape[axis_of("chunk", x.shape, axis)] if x.ndim else 0
    return split(x, max(-(-extent // chunks), 1), axis)


def interleaved_to_head_first(x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """[..., seq, num_heads * head_dim] as [..., num_heads, seq, head_dim]: a view.

    Raises:
        ShapeError: when the last extent is not num_heads * head_dim.
    """
    checked("interleaved_to_head_first", x)
    if x.ndim < 2 or x.shape[-1] != num_heads * head_dim:
        raise ShapeError(
            f"interleaved_to_head_first: expected [..., seq, {num_heads} * {head_dim}], got "
            f"{list(x.shape)}"
        )
    split_heads = x.reshape(*x.shape[:-1], num_heads, head_dim)
    rank = x.ndim + 1
    return split_heads.permute(*range(rank - 3), rank - 2, rank - 3, rank - 1)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of a table: ids [...] i32, table [n, d], result [..., d]."""
    return apply("embedding", ids, table)


def gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """Rows of x along an axis: y[a.., j.., b..] = x[a.., indices[j..], b..].

    Args:
        x: of any dtype; indices: i32 of any shape, which takes the place of the axis. An index
            outside (a negative one is) gives NaN, as an id of `embedding` does; in integers 0, in
            bools False.

    Raises:
        ShapeError: for a bad axis, or indices into no rows.
        DTypeError: for indices that are not i32.
    """
    return apply("gather", x, indices, axis=axis_of("gather", checked("gather", x).shape, axis))


def scatter(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """x with rows replaced: y[i] = values[j] for the last j with indices[j] = i, else x[i].

    Of equal indices the last one counts, always; an index outside (a negative one is) is dropped.
    Each row looks through all the indices.

    Args:
        x: [n, ...]; indices: [k] i32; values: [k, ...] of x's dtype.

    Raises:
        ShapeError, DTypeError: for shapes or dtypes that do not fit these.
    """
    return apply("scatter", x, indices, values)
