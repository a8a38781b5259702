"""`PipelineCache`: compiled programs by content, compiled once whatever the number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from centella.ledger import count


@dataclass(frozen=True, slots=True)
class CachedPipeline:
    """A compiled program: its kernel's name, its content key, and the driver's object."""

    name: str
    key: str
    native: Any


class PipelineCache:
    """Compiled programs of one or more devices.

    The key is the device and the program's content (target, text, constants), never an address.
    Threads that ask for one program at the same time wait for one compile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[int, str], Future[CachedPipeline]] = {}
        self.hits = 0
        self.misses = 0

    def get(self, device: int, key: str, name: str, compile_: Callable[[], Any]) -> CachedPipeline:
        """The pipeline of `key` on a device, compiled by `compile_` when it is new.

        Raises:
            CompileError: what the compile raised, in every thread that waited; nothing is kept.
        """
        place = (device, key)
        with self._lock:
            found = self._entries.get(place)
            if found is None:
                mine: Future[CachedPipeline] = Future()
                self._entries[place] = mine
                self.misses += 1
            else:
                self.hits += 1
        if found is not None:
            count(cache_hits=1)
            return found.result()
        try:
            count(compiles=1)
            made = CachedPipeline(name, key, compile_())
        except BaseException as error:
            with self._lock:
                del self._entries[place]
            mine.set_exception(error)
            raise
        mine.set_result(made)
        return made

    def names(self) -> list[str]:
        """Names of the kernels compiled, one for each program."""
        with self._lock:
            return sorted(f.result().name for f in self._entries.values() if f.done())

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget every program; the next use compiles again."""
        with self._lock:
            self._entries = {k: f for k, f in self._entries.items() if not f.done()}

    def reset(self) -> None:
        """Set hits and misses to zero."""
        with self._lock:
            self.hits = self.misses = 0
