"""`PipelineCache`: compiled programs by content, compiled once whatever the number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from centella.host.interrupts import checkpoint, uninterrupted
from centella.host.workers import new_future
from centella.ledger.counts import began, count, noted, permit

if TYPE_CHECKING:
    from concurrent.futures import Future


class CachedPipeline(Struct, frozen=True):
    """A compiled program.

    Attributes:
        name: of its kernel.
        key: its content's: one of the same target, text and constants has the same.
        native: the driver's object.
    """

    name: str
    key: str
    native: Any


class PipelineCache:
    """Compiled programs of one or more devices.

    The key is the device and the program's content (target, text, constants), never an address.
    Threads that ask for one program at the same time wait for one compile.

    Attributes:
        hits: launches that found their program compiled; misses: programs compiled.
        generation: how often it was cleared; plans that remember pipelines ask again after that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[int, str], Future[CachedPipeline]] = {}
        self.hits: int = 0
        self.misses: int = 0
        self.generation: int = 0

    @uninterrupted
    def get(self, device: int, key: str, name: str, compile_: Callable[[], Any]) -> CachedPipeline:
        """The pipeline of `key` on a device, compiled by `compile_` when it is new.

        Raises:
            CompileError: what the compile raised, in every thread that waited; nothing is kept.
            TransferForbidden: it is new, inside `forbid("compile")`.
        """
        checkpoint()  # each new program takes a while
        entry = (device, key)
        mine: Future[CachedPipeline] = new_future()
        with self._lock:
            known = self._entries.get(entry)
            if known is None:
                permit(f"kernel {name!r}", "compiles")
                self._entries[entry] = mine
                self.misses += 1
        if known is not None:
            pipeline = known.result()
            self.hit(1)
            return pipeline
        begin = began()
        try:
            pipeline = CachedPipeline(name, key, compile_())
        except BaseException as error:
            with self._lock:
                self._entries.pop(entry, None)
            mine.set_exception(error)
            del mine  # its frame is in the traceback: a circle would keep what failed alive
            raise
        finally:
            count(compiles=1)
            noted("compile", begin, kernel=name)
        mine.set_result(pipeline)
        return pipeline

    @uninterrupted
    def hit(self, launches: int) -> None:
        """Count launches that found their program compiled."""
        with self._lock:
            self.hits += launches
        count(cache_hits=launches)

    def names(self) -> list[str]:
        """Names of the kernels compiled, one for each program."""
        with self._lock:
            done = [f for f in self._entries.values() if f.done() and f.exception() is None]
        return sorted(f.result().name for f in done)

    def __len__(self) -> int:
        return len(self._entries)

    @uninterrupted
    def clear(self) -> None:
        """Forget every program; the next use compiles again."""
        with self._lock:
            self._entries = {k: f for k, f in self._entries.items() if not f.done()}
            self.generation += 1

    def reset(self) -> None:
        """Set hits and misses to zero."""
        with self._lock:
            self.hits = self.misses = 0
