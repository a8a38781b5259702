"""Batches on several devices: a thread for each, which takes the next batch when it has room.

What a device had when it failed goes to the others, so that no text is lost.
"""

from __future__ import annotations

import threading
from _queue import SimpleQueue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import copy_context
from typing import Generic, TypeVar

from centella.errors import CompileError, DeviceError, LimitError, OutOfMemoryError
from centella.host.log import logger
from centella.runtime.pending import Pending
from centella.tasks.batches import IN_FLIGHT, Batch, Progress, told

R = TypeVar("R")
Submit = Callable[[Batch], Pending[R]]
# What goes wrong on one device, and might not on another.
FAILURES = (DeviceError, OutOfMemoryError, LimitError, CompileError)


def run_on_several(
    batches: Iterable[Batch], total: int, submits: Mapping[str, Submit[R]],
    take: Callable[[Batch, R], None], progress: Progress,
) -> None:  # fmt: skip
    """As `run_batches`, on several devices; `take` and `progress` are called in this thread.

    A device that fails is named in the log, and the others run its batches.

    Args:
        submits: by the name of a device, what starts a batch there.

    Raises:
        DeviceError: no device is left; names each with its error.
        CentellaError: an error that is no device's.
    """
    shared: _Shared[R] = _Shared(batches)
    done, active = 0, dict(submits)
    with told(total, progress) as tell:
        try:
            while done < total:
                for batch, result in shared.results(active):
                    take(batch, result)
                    done += len(batch.texts)
                    tell(done, total)
                active = {name: run for name, run in active.items() if name not in shared.failed}
                shared.check(active)
        finally:
            shared.over = True


class _Shared(Generic[R]):
    """The batches that no device has, and why devices failed.

    Attributes:
        failed: errors by the name of the device; over: no further batch is to be run.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.failed: dict[str, BaseException] = {}
        self.over = False
        self._batches = iter(batches)
        self._again: list[Batch] = []  # of devices that failed
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._done: SimpleQueue[tuple[Batch, R] | None] = SimpleQueue()

    def results(self, submits: Mapping[str, Submit[R]]) -> Iterator[tuple[Batch, R]]:
        """Batches with their results as they come, until every thread has ended."""
        for name, submit in submits.items():
            threading.Thread(
                target=copy_context().run, args=(self._work, name, submit), daemon=True,
                name=f"centella-embed-{name}",
            ).start()  # fmt: skip
        running = len(submits)
        while running:
            found = self._done.get()
            if found is None:
                running -= 1
            else:
                yield found

    def _work(self, name: str, submit: Submit[R]) -> None:
        """Run batches on one device, a few in flight."""
        running: deque[tuple[Batch, Pending[R]]] = deque()
        batch: Batch | None = None
        try:
            while True:
                batch = self._next()
                if batch is not None:
                    running.append((batch, submit(batch)))
                    batch = None
                    if len(running) < IN_FLIGHT:
                        continue
                if not running:
                    return
                result = running[0][1].result()
                self._done.put((running.popleft()[0], result))
        except BaseException as error:
            self.failed[name] = error
            with self._lock:
                self._again += [some for some, _ in running]
                self._again += [batch] if batch is not None else []
        finally:
            self._done.put(None)

    def _next(self) -> Batch | None:
        with self._lock:
            if self.over:
                return None
            return self._again.pop() if self._again else next(self._batches, None)

    def check(self, active: Mapping[str, Submit[R]]) -> None:
        """Tell of devices that failed.

        Raises:
            DeviceError: no other is left; whatever failed otherwise raises its own error.
        """
        for name, error in self.failed.items():
            if not isinstance(error, FAILURES):
                raise error
            if active and name not in self._told:
                logger("embed").error(
                    "encode: %s failed, and its texts go to %s: %s", name, ", ".join(active), error
                )
                self._told.add(name)
        if not active:
            errors = "; ".join(f"{name}: {error}" for name, error in self.failed.items())
            raise DeviceError(f"encode: every device failed: {errors}") from next(
                iter(self.failed.values())
            )
