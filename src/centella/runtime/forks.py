"""Forks: a child lacks the threads that might hold a lock, so who forks holds every lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock

from centella.backends.opening import AFTER_FORK, forked
from centella.host.interrupts import called_back
from centella.host.workers import register_pools
from centella.runtime.executor import Executor


def watch_forks(executors: Callable[[], Iterable[Executor]], opening: Lock) -> None:
    """Hold the locks of the devices that are open, and the one of opening, while a process forks.

    Hooks run before a fork in the reverse order of their registration. The executor's own holds a
    lock that work under a device's needs, so it has to be registered first.
    """
    if not hasattr(os, "register_at_fork") or not register_pools():
        return
    locked: list[Executor] = []

    @called_back  # Python drops what a hook raises, and a lock would stay taken
    def before() -> None:
        opening.acquire()
        for executor in executors():
            executor.lock.acquire()
            locked.append(executor)
            executor.backend.before_fork()

    @called_back
    def after(*, child: bool) -> None:
        for executor in locked:
            if not executor.backend.after_fork(child=child):
                forked.add(executor.backend.name.partition(":")[0])
                executor.lose("the process was forked", AFTER_FORK)
            executor.lock.release()
        locked.clear()
        opening.release()

    os.register_at_fork(
        before=before,
        after_in_parent=partial(after, child=False),
        after_in_child=partial(after, child=True),
    )
