"""Objects that are kept between uses, and may be given back by a finalizer."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Idle(Generic[T]):
    """At most so many objects that wait for their next use.

    What is in use stays referred to from here. A generator that uses it may be collected in a
    cycle: Python then clears weak references to all garbage before the generator is closed and
    gives it back.

    Args:
        most: objects that wait; of more, those that have waited longest go.
    """

    def __init__(self, most: int) -> None:
        self._waiting: deque[T] = deque(maxlen=most)
        self._used: dict[int, T] = {}

    @property
    def waiting(self) -> list[T]:
        """Those that wait, the last one first."""
        return list(self._waiting)

    def use(self, item: T) -> T:
        """The same object, in use: one that waited, or a new one."""
        with suppress(ValueError):  # it is new
            self._waiting.remove(item)
        self._used[id(item)] = item
        return item

    def give(self, item: T) -> None:
        """Let what was in use wait again; takes no lock, so that finalizers may call it."""
        if self._used.pop(id(item), None) is not None:
            self._waiting.appendleft(item)

    def drop(self, item: T) -> None:
        """Forget an object that was in use."""
        self._used.pop(id(item), None)

    def clear(self) -> None:
        """Forget all; those in use are not taken back."""
        self._used.clear()
        self._waiting.clear()
