"""Buffers that read-backs are copied into, kept for the next ones of their size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import wgpu

from centella.errors import LimitError

STAGING: int = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST


class Staging:
    """Buffers that are free, by their size.

    Args:
        new: a buffer of so many bytes for a usage.
        most: bytes of a buffer.
        name: of the device, for errors.
    """

    def __init__(self, new: Callable[[int, int], Any], most: int, name: str) -> None:
        self._new, self._most, self._name = new, most, name
        self._free: dict[int, list[Any]] = {}

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._free.values())

    def take(self, nbytes: int) -> Any:
        """A buffer of at least so many bytes.

        Raises:
            LimitError: the device has none as large.
        """
        if nbytes > self._most:
            raise LimitError(
                f"read-backs of {nbytes:,} bytes at once; {self._name} allows {self._most:,}: "
                f"fetch fewer at a time"
            )
        size = min(1 << max(8, (nbytes - 1).bit_length()), self._most)
        free = self._free.get(size)
        return free.pop() if free else self._new(size, STAGING)

    def give_back(self, buffer: Any) -> None:
        """Take a buffer for the next read-back of its size; safe in a finalizer."""
        self._free.setdefault(buffer.size, []).append(buffer)

    def clear(self) -> None:
        """Forget all."""
        self._free.clear()
