"""Locks that are free in a forked child, which lacks the threads that may have held them.

A device's lock is held by whoever forks (`device.py`). These are held while a user's function runs,
which may take long and use devices, so a child gets new ones instead. What they guard is complete
at any time: entries of dictionaries, put there when they are made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_owners: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()


def lock_of(owner: Any, make: Callable[[], Any] = threading.Lock) -> Any:
    """A lock for `owner._lock`, where a child finds a new one."""
    _owners[owner] = make
    return make()


def _after_fork() -> None:
    for owner, make in list(_owners.items()):
        owner._lock = make()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
