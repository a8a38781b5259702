"""Work on other threads: on one of its own, or on eight at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
THREADS = 8


def elsewhere(work: Callable[[], T]) -> T:
    """What `work` returns on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(120)


def together(work: Callable[[int], T]) -> list[T]:
    """What `work(0) ... work(7)` return on eight threads that start at once."""
    barrier = threading.Barrier(THREADS)

    def run(index: int) -> T:
        barrier.wait(20)
        return work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))
