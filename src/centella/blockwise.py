"""Work on the host in blocks that stay in a core's cache, shared by the cores where it is much.

NumPy lets other threads run while it works on a block, so helpers of the CPU's worker take blocks
by turns. Blocks and what is done with each are the same however many helpers there are: so are the
results. Helpers start with the first work that is worth one; a forked child starts its own.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Index = tuple[int | slice, ...]

BLOCK = 1 << 15  # elements of a block: 128 KB of f32, a few of which fit a core's own cache
SHARED = 1 << 20  # elements times steps that are worth waking a helper for
VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")  # the first that is set, as for the BLAS


def blocks_of(shape: Sequence[int], whole_rows: bool = False, most: int = BLOCK) -> list[Index]:
    """Indices that cut an array into blocks of neighbouring elements.

    Args:
        whole_rows: whether the last dimension stays whole, however long.
    """
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


def cores() -> int:
    """Threads that work is shared by: as many as the BLAS may have, or cores of this process."""
    for name in VARIABLES:
        first = os.environ.get(name, "").split(",")[0]
        if first.isdigit() and int(first):
            return int(first)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Team:
    """The helpers of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: Any = None
        self._size = -1
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._pool, self._size = None, -1

    def call(self, work: Callable[[], None]) -> list[Any]:
        """Start `work` on every helper; gives what waits for each."""
        with self._lock:
            if self._size < 0:
                self._size = cores() - 1
            if self._size > 0 and self._pool is None:
                from concurrent.futures import ThreadPoolExecutor

                self._pool = ThreadPoolExecutor(self._size, thread_name_prefix="centella-block")
            return [self._pool.submit(work) for _ in range(self._size)]


_team = _Team()


def share(run: Callable[[Index], None], blocks: Sequence[Index], cost: int) -> None:
    """Call `run` with each block.

    Args:
        cost: elements of all blocks, times what is done with each; little is not shared.

    Raises:
        Exception: what `run` raised, after every block that had begun is over.
    """
    if cost < SHARED or len(blocks) < 2:
        _drain(run, blocks)
        return
    left = iter(blocks)  # `next` of a list's iterator is one step under the interpreter's lock
    helpers = _team.call(lambda: _drain(run, left))
    try:
        _drain(run, left)
    finally:
        for helper in helpers:
            if not helper.cancel():
                helper.exception()
    for helper in helpers:
        if not helper.cancelled():
            helper.result()


def _drain(run: Callable[[Index], None], blocks: Iterable[Index] | Iterator[Index]) -> None:
    with np.errstate(all="ignore"):
        for block in blocks:
            run(block)


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
