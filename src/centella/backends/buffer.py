"""Memory of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

Array = np.ndarray[Any, Any]


class Buffer:
    """Device memory that a value owns; returned to the pool when nothing refers to it.

    The finalizer only appends to a queue: it may run on any thread, at any time.

    Attributes:
        memory: what the pool gave and gets back.
        native: what launches bind: the memory, or on the CPU the host array that was put there.
        owner: what keeps imported memory alive; imported memory is never freed.
        mutable: it is a State's and changes in place, so no other value may share it.
    """

    __slots__ = ("__weakref__", "memory", "mutable", "native", "nbytes", "owner", "release")

    def __init__(
        self, memory: Any, nbytes: int, release: Callable[[Any, int], None], owner: Any = None
    ) -> None:
        self.memory: Any = memory
        self.native: Any = memory
        self.nbytes: int = nbytes
        self.release: Callable[[Any, int], None] = release
        self.owner: Any = owner
        self.mutable: bool = False

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError("memory of a device is not pickled, and copied by its Tensor or State")

    def __del__(self) -> None:
        self.release(self.memory, self.nbytes)
