"""Layouts as kernels want them: broadcast operands, merged dimensions, rows."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

from centella.errors import ShapeError
from centella.specs import Shape, Spec


def broadcast(op: str, *shapes: Shape) -> Shape:
    """The shape that operands broadcast to, by NumPy's rule.

    Raises:
        ShapeError: naming the op and the shapes.
    """
    rank = max((len(s) for s in shapes), default=0)
    out: list[int] = []
    for axis in range(rank):
        extents = {s[axis - rank + len(s)] for s in shapes if axis - rank + len(s) >= 0} - {1}
        if len(extents) > 1:
            listed = ", ".join(str(list(s)) for s in shapes)
            raise ShapeError(f"{op}: expected shapes that broadcast, got {listed}")
        out.append(extents.pop() if extents else 1)
    return tuple(out)


def broadcast_strides(spec: Spec, shape: Shape) -> Shape:
    """Strides of an operand seen in a broadcast shape: 0 where it repeats."""
    lead = len(shape) - len(spec.shape)
    return (0,) * lead + tuple(
        0 if n == 1 else s for n, s in zip(spec.shape, spec.strides, strict=True)
    )


def flat(spec: Spec) -> Spec:
    """A tensor's memory as one row of elements, from its first, for kernels that count strides."""
    return Spec((spec.storage_bytes // spec.dtype.itemsize,), spec.dtype, (1,), spec.aligned)


@lru_cache(maxsize=4096)
def merge(shape: Shape, strides: tuple[Shape, ...]) -> tuple[Shape, tuple[Shape, ...]]:
    """Join neighbouring dimensions that every operand walks as one; at least one remains."""
    dims = [(n, tuple(s[i] for s in strides)) for i, n in enumerate(shape) if n != 1]
    if not dims:
        return (1,), tuple((0,) for _ in strides)
    merged = [dims[0]]
    for extent, steps in dims[1:]:
        last, last_steps = merged[-1]
        if all(a == b * extent for a, b in zip(last_steps, steps, strict=True)):
            merged[-1] = (last * extent, steps)
        else:
            merged.append((extent, steps))
    sizes = tuple(n for n, _ in merged)
    return sizes, tuple(tuple(s[i] for _, s in merged) for i in range(len(strides)))


def as_rows(spec: Spec) -> Spec | None:
    """A tensor as (rows, last dimension) without moving data, or None.

    Rank 0 and 1 become one row.
    """
    if len(spec.shape) <= 1:
        size = spec.shape[0] if spec.shape else 1
        step = spec.strides[0] if spec.shape else 1
        return Spec((1, size), spec.dtype, (max(size * step, 1), step), spec.aligned)
    rows, pitch = math.prod(spec.shape[:-1]), one_stride(spec.shape[:-1], spec.strides[:-1])
    if rows <= 1 or spec.shape[-1] == 0:
        pitch = spec.strides[-2]
    if pitch is None:
        return None
    return Spec((rows, spec.shape[-1]), spec.dtype, (pitch, spec.strides[-1]), spec.aligned)


def one_stride(shape: Shape, strides: Shape) -> int | None:
    """The one stride that visits these dimensions in row-major order (0 for one place), or None."""
    kept = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    if any(outer != n * inner for (_, outer), (n, inner) in pairwise(kept)):
        return None
    return kept[-1][1] if kept else 0


def repeats(spec: Spec, last: int = 0) -> bool:
    """Whether one of the last dimensions (0: of all) repeats: a tensor map needs a stride."""
    pairs = zip(spec.shape[-last:], spec.strides[-last:], strict=True)
    return spec.size > 0 and any(n > 1 and s == 0 for n, s in pairs)


def takes_rows(index: int, spec: Spec) -> bool:
    """Takes tensors that are rows of neighbouring elements, one pitch apart."""
    rows = as_rows(spec) if spec.unit_rows else None
    return rows is not None and not repeats(rows)


def rows_of(spec: Spec) -> Spec:
    """`as_rows` of a layout that `takes_rows` accepted."""
    rows = as_rows(spec)
    assert rows is not None, "the op's `takes` lets only row layouts through"
    return rows
