"""Pools of threads; their module loads with the first of them, since it loads `logging`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


def pool(threads: int, name: str) -> ThreadPoolExecutor:
    """At most so many threads, whose names begin with one.

    Raises:
        RuntimeError: the process ends: the module would have to be told of its end before. Of a
            pool that there is `submit` raises the same.
    """
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(threads, name)
