"""Work on the host in blocks that stay in a core's cache, and memory for what comes in between.

Large work is shared among the process's cores. Each call of NumPy ends with a wait for the
interpreter's lock, so that blocks which are shared are larger, and more than a few threads gain
nothing.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from centella.host.interrupts import GRACE, checkpoint, duty
from centella.host.workers import pool

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Array = np.ndarray[Any, Any]
Index = tuple[int | slice, ...]

BLOCK = 1 << 16  # elements of a block: 256 KB of f32
ROWS = 1 << 15  # of a block of whole rows, over which sums go several times
SHARED = 1 << 17  # of a block that a thread takes among others
PART = 1024  # rows of a product that a thread takes: its weight is arranged anew for each part
MOST_THREADS = 4


def threads_for(elements: int) -> int:
    """How many threads work on so many elements: one where each would get less than two blocks."""
    most = elements // (2 * SHARED)
    return min(cores(), most) if most > 1 else 1


def cores() -> int:
    """Threads that large work is shared among: the process's cores, or `OMP_NUM_THREADS`."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted):
        return min(int(wanted), MOST_THREADS)
    try:
        return min(len(os.sched_getaffinity(0)), MOST_THREADS)
    except AttributeError:  # not on Windows and macOS
        return min(os.cpu_count() or 1, MOST_THREADS)


_helpers: list[ThreadPoolExecutor] = []  # one pool, whose threads take parts of the work
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.clear)  # a forked child has none of its threads


def share(work: Callable[[Any], None], parts: Sequence[Any], threads: int) -> None:
    """Call `work` with each part, on this thread and on others; raises what a call raises."""
    stop = duty.stop or partial(checkpoint, GRACE)
    left = iter(parts)  # of a list or tuple: threads may take from it

    def some() -> None:
        for part in left:
            stop()
            work(part)

    if threads <= 1 or len(parts) <= 1:
        some()
        return
    others: list[Future[None]] = []
    helpers = _helpers[:]
    try:
        if not helpers:
            helpers.append(pool(MOST_THREADS - 1, "centella-blocks"))
            _helpers[:] = helpers
        for _ in range(min(threads, len(parts)) - 1):
            others.append(helpers[0].submit(some))
    except RuntimeError:  # the process ends, or may start no thread: the rest is done here
        for helper in helpers:
            helper.shutdown()
        _helpers.clear()
    try:
        some()
    finally:
        others = [other for other in others if not other.cancel()]  # who has not begun
        for other in others:
            other.exception()
    for other in others:
        other.result()


def blocks_of(shape: Sequence[int], whole_rows: bool = False) -> list[Index]:
    """Indices that cut an array into blocks of neighbouring elements.

    Args:
        whole_rows: whether the last dimension stays whole, however long.
    """
    alone = threads_for(math.prod(shape)) == 1
    most = (ROWS if whole_rows else BLOCK) if alone else SHARED
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


def parts_of(shape: tuple[int, ...], threads: int) -> list[tuple[slice, list[slice]]]:
    """Rows of a product's result that a thread takes at a time, and the blocks that they make.

    The first part is half as long as the others, so that two threads are not both between products,
    where they would wait for the interpreter's lock.
    """
    rows, columns = shape
    most = max(1, min(PART, -(-rows // (2 * threads))))
    step = max(1, 2 * SHARED // max(columns, 1))
    starts = [0, *range(-(-most // 2), rows, most)]
    parts: list[tuple[slice, list[slice]]] = []
    for first, end in zip(starts, [*starts[1:], rows], strict=True):
        blocks = [slice(i, min(i + step, end)) for i in range(first, end, step)]
        parts.append((slice(first, end), blocks))
    return parts


class _Scratch(threading.local):
    """What a thread computes in between, kept from one block to the next."""

    def __init__(self) -> None:
        self.memory: dict[int, Array] = {}
        self.shaped: dict[Any, list[Array]] = {}


_scratch = _Scratch()
SHAPES = 256  # of blocks, whose views a thread keeps


def scratch(layout: tuple[tuple[tuple[int, ...], Any], ...]) -> list[Array]:
    """Arrays of this thread's, one of each (shape, dtype); what they hold is anything."""
    arrays = _scratch.shaped.get(layout)
    if arrays is None:
        if len(_scratch.shaped) >= SHAPES:
            _scratch.shaped.clear()
        arrays = _scratch.shaped[layout] = [
            _piece(number, shape, np.dtype(dtype)) for number, (shape, dtype) in enumerate(layout)
        ]
    return arrays


def _piece(number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    nbytes = math.prod(shape) * dtype.itemsize
    memory = _scratch.memory.get(number)
    if memory is None or memory.nbytes < nbytes:
        memory = _scratch.memory[number] = np.empty(max(nbytes, 4 * BLOCK), np.uint8)
    return memory[:nbytes].view(dtype).reshape(shape)
