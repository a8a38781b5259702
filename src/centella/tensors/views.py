"""Views: shape, strides and offset of a reshape, a permutation or a slice; no data moves.

A reshape that would merge dimensions across padding has none and is a copy.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np

from centella.errors import ShapeError
from centella.specs import Shape, Spec


def integers(op: str, what: str, values: tuple[Any, ...]) -> Shape:
    """Extents or axes (`what`), given one by one or as one sequence.

    Raises:
        ShapeError: for what is no integer.
    """
    numbers: Any = values
    if len(values) == 1 and not isinstance(values[0], (int, np.integer)):
        numbers = values[0]
    try:
        return tuple([index(n) for n in numbers])
    except TypeError as error:
        raise ShapeError(f"{op}: expected {what}, got {values}") from error


def extents(op: str, shape: Any) -> Shape:
    """The shape that a caller gives: one extent, or several.

    Raises:
        ShapeError: for what is no extent.
    """
    extents = integers(op, "extents of 0 or more", (shape,))
    if min(extents, default=0) < 0:
        raise ShapeError(f"{op}: expected extents of 0 or more, got {list(extents)}")
    return extents


def completed(op: str, shape: Shape, size: int) -> Shape:
    """A shape of `size` elements, of which one extent may be -1: what is left.

    Raises:
        ShapeError: another number of elements.
    """
    known = math.prod([n for n in shape if n != -1])
    if shape.count(-1) == 1 and known > 0 and size % known == 0:
        return tuple([size // known if n == -1 else n for n in shape])
    if min(shape, default=0) < 0 or known != size:
        raise ShapeError(f"{op}: expected {size} elements, got shape {list(shape)}")
    return shape


def axis_of(op: str, shape: Shape, axis: int) -> int:
    """An axis counted from 0; a scalar has one, as a vector does.

    Raises:
        ShapeError: there is no such axis.
    """
    axis_index = counted(axis, max(len(shape), 1))
    if axis_index is None:
        raise ShapeError(f"{op}: expected an axis of {list(shape)}, got {axis}")
    return axis_index


def counted(axis: Any, rank: int) -> int | None:
    """An axis of so many, counted from 0; None where there is no such axis."""
    try:
        axis_index = index(axis)
    except TypeError:
        return None
    return axis_index % rank if -rank <= axis_index < rank else None


@lru_cache(maxsize=8192)
def permuted(spec: Spec, axes: tuple[int, ...]) -> tuple[Shape, Shape]:
    """Shape and strides of the dimensions in another order; axes below 0 count from the end.

    Raises:
        ShapeError: not each axis once.
    """
    rank = len(spec.shape)
    order = [a + rank if a < 0 else a for a in axes]
    if sorted(order) != list(range(rank)):
        raise ShapeError(f"permute: expected each of {rank} axes once, got {list(axes)}")
    return tuple([spec.shape[a] for a in order]), tuple([spec.strides[a] for a in order])


@lru_cache(maxsize=8192)
def reshaped(spec: Spec, shape: Shape) -> Shape | None:
    """Strides of a reshape that moves nothing, or None where there are none.

    Dimensions are matched in groups of equal size; the old ones of a group must follow one
    another in memory.
    """
    if spec.size == 0:
        return (0,) * len(shape)
    old = [(n, s) for n, s in zip(spec.shape, spec.strides, strict=True) if n != 1]
    new = [n for n in shape if n != 1]
    new_strides: list[int] = []
    i = j = 0
    while j < len(new):
        group, parts = [old[i]], [new[j]]
        i, j = i + 1, j + 1
        have, want = group[0][0], parts[0]
        while have != want:
            if have < want:
                group.append(old[i])
                have, i = have * old[i][0], i + 1
            else:
                parts.append(new[j])
                want, j = want * new[j], j + 1
        if any(s0 != n1 * s1 for (_, s0), (n1, s1) in pairwise(group)):
            return None
        step, steps = group[-1][1], []
        for n in reversed(parts):
            steps.append(step)
            step *= n
        new_strides += reversed(steps)
    strides = iter(new_strides)
    return tuple(0 if n == 1 else next(strides) for n in shape)


def indexed(spec: Spec, key: Any) -> tuple[Shape, Shape, int]:
    """Shape, strides and offset of basic indexing.

    Raises:
        IndexError: out of range, or more indices than dimensions.
        ShapeError: a slice with a step below 1.
        TypeError: an index that is no integer, slice, None or Ellipsis.
    """
    items = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index has one Ellipsis at most")
    if dots:
        used = sum(item is not None for item in items) - 1
        items[dots[0] : dots[0] + 1] = [slice(None)] * (len(spec.shape) - used)
    shape: list[int] = []
    strides: list[int] = []
    offset = axis = 0
    for item in items:
        if item is None:
            shape.append(1)
            strides.append(0)
            continue
        if axis >= len(spec.shape):
            raise IndexError(f"too many indices for shape {list(spec.shape)}")
        extent, stride = spec.shape[axis], spec.strides[axis]
        axis += 1
        if isinstance(item, slice):
            start, length, step = _slice(item, extent)
            shape.append(length)
            strides.append(stride * step)
            offset += start * stride if length else 0
        else:
            offset += _position(item, extent) * stride
    return (*shape, *spec.shape[axis:]), (*strides, *spec.strides[axis:]), offset


def _slice(item: slice, extent: int) -> tuple[int, int, int]:
    start, stop, step = item.indices(extent)
    if step < 1:
        raise ShapeError(f"slice: expected a step of 1 or more, got {step}")
    return start, max(0, -(-(stop - start) // step)), step


def _position(item: Any, extent: int) -> int:
    if isinstance(item, (bool, np.bool_)) or not isinstance(item, (int, np.integer)):
        raise TypeError(
            f"a tensor is indexed by integers, slices, None and Ellipsis; got {item!r:.80}; "
            f"ct.gather takes rows by index, ct.where chooses by a mask"
        )
    position = int(item) + (extent if item < 0 else 0)
    if not 0 <= position < extent:
        raise IndexError(f"index {item} is out of range for extent {extent}")
    return position
