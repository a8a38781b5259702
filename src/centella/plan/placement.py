"""Which values of a plan share a buffer.

A temporary is a whole buffer, free again after its last reader, so no launch reads and writes one
buffer. Temporaries are placed from the largest to the smallest, each in the smallest buffer that is
free all its life: a buffer never grows, and what is small fits between what is large (best fit by
decreasing size, as in Pisarchyk and Lee 2020). A result takes over a temporary's buffer of its own
size class that nothing needs any more, so that nothing larger than it outlives the plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

FOREVER = 1 << 62


def size_class(nbytes: int) -> int:
    """Bytes actually allocated: multiples of 256 up to 4 KB, then quarters of powers of two."""
    if nbytes <= 4096:
        return max(256, -(-nbytes // 256) * 256)
    unit = 1 << (nbytes.bit_length() - 3)
    return -(-nbytes // unit) * unit


class Lifetime(NamedTuple):
    """A value that needs memory, from the node that makes it to the last that reads it.

    Attributes:
        node, output: which value; output -1 and below are memory that the node itself needs.
        kept: it outlives the plan.
    """

    node: int
    output: int
    nbytes: int
    last: int
    kept: bool


class _Buffer:
    """Memory in the making: its bytes, and the times at which it is taken, in order."""

    __slots__ = ("firsts", "lasts", "nbytes", "users")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.firsts: list[int] = []
        self.lasts: list[int] = []
        self.users: list[int] = []

    def take(self, user: int, first: int, last: int) -> bool:
        """Use it from `first` to `last`, if it is free all that time."""
        position = bisect_right(self.firsts, first)
        if position and self.lasts[position - 1] >= first:
            return False
        if position < len(self.firsts) and self.firsts[position] <= last:
            return False
        self.firsts.insert(position, first)
        self.lasts.insert(position, last)
        self.users.append(user)
        return True


def place(values: Sequence[Lifetime]) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """Buffers for values.

    Returns:
        The buffer of each value; bytes of each buffer; the node that first uses each.
    """
    buffers: list[_Buffer] = []  # from the largest to the smallest
    temporary = [i for i, v in enumerate(values) if not v.kept]
    temporary.sort(key=lambda i: (-values[i].nbytes, values[i].node, i))
    for index in temporary:
        value = values[index]
        if not any(b.take(index, value.node, value.last) for b in reversed(buffers)):
            buffers.append(_Buffer(value.nbytes))
            buffers[-1].take(index, value.node, value.last)
    _results(values, buffers)
    buffers.sort(key=lambda b: (b.firsts[0], min(b.users)))
    slots = [0] * len(values)
    for slot, buffer in enumerate(buffers):
        for user in buffer.users:
            slots[user] = slot
    sizes = tuple(b.nbytes for b in buffers)
    return slots, sizes, tuple(b.firsts[0] for b in buffers)


def _results(values: Sequence[Lifetime], buffers: list[_Buffer]) -> None:
    """Give each value that is kept a buffer that is over with, or one of its own."""
    over: dict[int, list[_Buffer]] = {}
    for buffer in buffers:
        over.setdefault(size_class(buffer.nbytes), []).append(buffer)
    for index, value in enumerate(values):
        if not value.kept:
            continue
        room = over.get(size_class(value.nbytes), [])
        free = next((b for b in room if b.lasts[-1] < value.node), None)
        if free is None:
            buffers.append(free := _Buffer(0))
        else:
            room.remove(free)
        free.nbytes = max(free.nbytes, value.nbytes)
        free.take(index, value.node, FOREVER)


def largest_live(values: Sequence[Lifetime]) -> tuple[int, list[Lifetime]]:
    """The most bytes that are alive at once, and the values that they are."""
    ends: dict[int, int] = {}
    peak = live = 0
    at, now = -1, -1
    for value in sorted(values, key=lambda v: v.node):
        if value.node != now:
            now = value.node
            for time in [t for t in ends if t < now]:
                live -= ends.pop(time)
        live += value.nbytes
        if not value.kept:
            ends[value.last] = ends.get(value.last, 0) + value.nbytes
        if live > peak:
            peak, at = live, now
    alive = [v for v in values if v.node <= at and (v.kept or v.last >= at)]
    return peak, alive
