"""The largest elements of rows."""

from __future__ import annotations

from centella.errors import ShapeError
from centella.op.op import get
from centella.ops.topk import MOST
from centella.tensors.arguments import check_tensors, whole
from centella.tensors.creation import arange
from centella.tensors.functional.axes import argsort
from centella.tensors.functional.elementwise import eq
from centella.tensors.functional.move import concat, take_along_axis
from centella.tensors.tensor import Tensor, apply_all

__all__ = ["topk"]
CHUNK = 4096  # elements that are sorted at once, where more are wanted than are looked for


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest elements along the last dimension, the largest first, and their indices.

    Of equal elements the one with the lower index comes first; a NaN is larger than every number.

    Args:
        x: [..., n], not of bools; k: from 1 to n. Up to 128 are looked for in one pass over x; for
            more, rows are sorted in chunks.

    Returns:
        values [..., k] in the dtype of x, and indices [..., k] i32.

    Raises:
        ShapeError: a scalar, or another k; DTypeError: for bools.
    """
    check_tensors("topk", x)
    n, k = x.shape[-1] if x.ndim else 0, whole("topk", "k", k)
    if x.ndim and not 0 < k <= n:
        raise ShapeError(f"topk: expected k from 1 to {n}, for rows of {n} elements, got {k}")
    if k <= MOST or not x.ndim or x.dtype.kind == "bool":
        values, indices = apply_all(get("topk"), (x,), {"k": k})
        return values, indices
    return _sorted(x, k)


def _sorted(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest: those of each chunk of a row, then of what these leave."""
    n, chunk = x.shape[-1], max(CHUNK, 4 << (k - 1).bit_length())
    if n <= chunk:
        order = argsort(x, descending=True)
        if x.dtype.is_float:  # which has NaN last
            number = eq(x, x).astype("i32")
            order = take_along_axis(order, argsort(take_along_axis(number, order)))
        order = order[..., :k]
        return take_along_axis(x, order), order
    lead, chunks = x.shape[:-1], n // chunk
    full = chunks * chunk
    values, at = _sorted(x[..., :full].reshape(*lead, chunks, chunk), k)
    at = at + (arange(chunks, device=x.device) * chunk).reshape(chunks, 1)
    values, at = values.reshape(*lead, chunks * k), at.reshape(*lead, chunks * k)
    if full < n:
        rest, more = topk(x[..., full:], min(k, n - full))
        values, at = concat([values, rest], -1), concat([at, more + full], -1)
    values, picks = _sorted(values, k)
    return values, take_along_axis(at, picks)
