"""The threads of NumPy's BLAS, where that is an OpenBLAS with threads of its own.

Two sets of threads are in each other's way: after a product OpenBLAS's threads ask for more work
over and over for a tenth of a second, on cores that ours were to have. So work that has products
in it is better done by one set alone: each of our threads takes rows and does its products by
itself. NumPy has no way to ask for that; OpenBLAS has one, for the whole process, which is found
among the symbols that NumPy is linked with. Where there is none, products are OpenBLAS's to share.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

SMALL = 1 << 27  # multiplications: 2 ms of one core, less than to wait for one that is busy
MANY = 4  # threads of which the last soon has a core, even where others are busy
PTHREADS = 1  # of openblas_get_parallel: neither without threads nor with OpenMP's
NAMES = (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", ""))  # of builds, around a symbol


class Threads:
    """How many threads a product takes: `alone` makes that one while any of our threads needs it.

    Args:
        read: how many it is now.
        write: make it so many.
    """

    def __init__(self, read: Callable[[], int], write: Callable[[int], object]) -> None:
        self._read, self._write = read, write
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = 0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def count(self) -> int:
        """Threads of a product, but for `alone`."""
        return self._usual if self._inside else self._read()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Products are done by the thread that asks, in this thread and all others."""
        with self._lock:
            if not self._inside:
                self._usual = self._read()
                self._write(1)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._read() == 1:  # else somebody has set another
                    self._write(self._usual)

    def _forked(self) -> None:
        """A child has none of the threads that were inside."""
        self._lock = threading.Lock()
        if self._inside:
            self._inside = 0
            self._write(self._usual)


def _find() -> Threads | None:
    """What NumPy is linked with, if its threads can be told."""
    try:
        library = ctypes.CDLL(str(import_module("numpy._core._multiarray_umath").__file__))
    except (ImportError, OSError):
        return None
    for before, after in NAMES:
        functions: list[Any] = [
            getattr(library, f"{before}openblas_{name}{after}", None)
            for name in ("get_parallel", "get_num_threads", "set_num_threads")
        ]
        if all(functions):
            kind, read, write = functions
            return Threads(read, write) if kind() == PTHREADS else None
    return None


BLAS: Threads | None = _find()


def around(multiplications: int) -> AbstractContextManager[None]:
    """Around a product of so many: of few cores, a small one is done by the thread that asks.

    A product is over when the last of OpenBLAS's threads has been given a core. Who shares follows
    from sizes and the threads that OpenBLAS has: another number of threads gives other bits.
    """
    if BLAS is None or multiplications >= SMALL or BLAS.count() >= MANY:
        return nullcontext()
    return BLAS.alone()


def taken_over(threads: int) -> Threads | None:
    """The BLAS, where so many threads of ours may take the place of as many of its own."""
    return BLAS if BLAS is not None and 1 < threads == BLAS.count() else None
