"""Work on the host in blocks that stay in a core's cache, and memory for what comes in between."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Index = tuple[int | slice, ...]

BLOCK = 1 << 16  # elements of a block: 256 KB of f32
ROWS = 1 << 15  # of a block of whole rows, over which sums go several times


def blocks_of(shape: Sequence[int], whole_rows: bool = False) -> list[Index]:
    """Indices that cut an array into blocks of neighbouring elements.

    Args:
        whole_rows: whether the last dimension stays whole, however long.
    """
    most = ROWS if whole_rows else BLOCK
    axis, inner = 0, math.prod(shape[1:])
    last = len(shape) - (2 if whole_rows else 1)
    while inner > most and axis < last:
        axis += 1
        inner = math.prod(shape[axis + 1 :])
    if axis > last or not math.prod(shape):
        return [()] if math.prod(shape) else []
    step = max(1, most // max(inner, 1))
    parts = [slice(i, min(i + step, shape[axis])) for i in range(0, shape[axis], step)]
    return list(product(*(range(n) for n in shape[:axis]), parts))


class _Scratch(threading.local):
    """What a thread computes in between, kept from one block to the next."""

    def __init__(self) -> None:
        self.memory: dict[int, Array] = {}
        self.shaped: dict[Any, list[Array]] = {}


_scratch = _Scratch()
SHAPES = 256  # of blocks, whose views a thread keeps


def scratch(layout: tuple[tuple[tuple[int, ...], Any], ...]) -> list[Array]:
    """Arrays of this thread's, one of each (shape, dtype); what they hold is anything."""
    found = _scratch.shaped.get(layout)
    if found is None:
        if len(_scratch.shaped) >= SHAPES:
            _scratch.shaped.clear()
        found = _scratch.shaped[layout] = [
            _piece(place, shape, np.dtype(dtype)) for place, (shape, dtype) in enumerate(layout)
        ]
    return found


def _piece(place: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    nbytes = math.prod(shape) * dtype.itemsize
    memory = _scratch.memory.get(place)
    if memory is None or memory.nbytes < nbytes:
        memory = _scratch.memory[place] = np.empty(max(nbytes, 4 * BLOCK), np.uint8)
    return memory[:nbytes].view(dtype).reshape(shape)
