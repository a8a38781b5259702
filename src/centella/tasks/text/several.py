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

from centella.errors import CompileError, DeviceError, DeviceLostError, LimitError, OutOfMemoryError
from centella.host.log import logger
from centella.runtime.pending import Pending
from centella.tasks.text.batches import IN_FLIGHT, Batch, Progress, told

R = TypeVar("R")
Submit = Callable[[Batch], Pending[R]]
# What goes wrong on one device, and might not on another.
FAILURES = (DeviceError, OutOfMemoryError, LimitError, CompileError)


def run_on_several(
    op: str, batches: Iterable[Batch], total: int, submits: Mapping[str, Submit[R]],
    take: Callable[[Batch, R], None], progress: Progress,
    lost: dict[str, DeviceLostError], few: bool,
) -> None:  # fmt: skip
    """As `run_batches`, on several devices; `take` and `progress` are called in this thread.

    A device that fails is named in the log, and the others run its batches.

    Args:
        op: what errors and the log begin with.
        submits: by the name of a device, what starts a batch there.
        lost: devices that were lost before, which get no batch; those that are lost now are added.
        few: one device runs all in this thread; the next one runs what it failed to.

    Raises:
        CentellaError: no device is left: of the type of all their errors, else a DeviceError, which
            names each device with its error; or an error that is no device's.
    """
    shared: _Shared[R] = _Shared(op, batches, lost)
    done = 0
    with told(total, progress) as tell:
        try:
            active = shared.working(submits)
            while done < total:
                for batch, result in shared.results(active, few):
                    take(batch, result)
                    done += len(batch.texts)
                    tell(done, total)
                active = shared.working(submits)
        finally:
            shared.over = True
            lost |= shared.lost


def run_on_each(
    op: str, batch: Batch, submits: Mapping[str, Submit[R]], lost: dict[str, DeviceLostError]
) -> None:
    """Run one batch on every device that was not lost, one after the other; as `run_on_several`."""
    shared: _Shared[R] = _Shared(op, (), lost)
    try:
        for name, submit in shared.working(submits).items():
            try:
                submit(batch).result()
            except FAILURES as error:
                shared.failed[name] = error
        shared.working(submits)
    finally:
        lost |= shared.lost


class _Shared(Generic[R]):
    """The batches that no device has, and why devices failed.

    Attributes:
        failed: errors by the name of the device; over: no further batch is to be run.
    """

    def __init__(
        self, op: str, batches: Iterable[Batch], lost: Mapping[str, DeviceLostError]
    ) -> None:
        self._op = op
        self.failed: dict[str, BaseException] = dict(lost)
        self.over = False
        self._batches = iter(batches)
        self._again: list[Batch] = []  # of devices that failed
        self._lock = threading.Lock()
        self._told = set(lost)
        self._done: SimpleQueue[tuple[Batch, R] | None] = SimpleQueue()

    @property
    def lost(self) -> dict[str, DeviceLostError]:
        """Devices that were lost, without the frames that their errors were raised in."""
        return {
            name: DeviceLostError(str(error))
            for name, error in self.failed.items()
            if isinstance(error, DeviceLostError)
        }

    def results(self, submits: Mapping[str, Submit[R]], few: bool) -> Iterator[tuple[Batch, R]]:
        """Batches with their results as they come, until every thread has ended.

        Args:
            few: the first device runs all, in this thread.
        """
        for name, submit in submits.items():
            if few:
                self._work(name, submit)
                break
            threading.Thread(
                target=copy_context().run, args=(self._work, name, submit), daemon=True,
                name=f"centella-{self._op}-{name}",
            ).start()  # fmt: skip
        running = 1 if few else len(submits)
        while running:
            result = self._done.get()
            if result is None:
                running -= 1
            else:
                yield result

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

    def working(self, submits: Mapping[str, Submit[R]]) -> dict[str, Submit[R]]:
        """Devices that did not fail; the log tells of those that did.

        Raises:
            CentellaError: none is left; whatever failed otherwise raises its own error.
        """
        active = {name: submit for name, submit in submits.items() if name not in self.failed}
        for name, error in self.failed.items():
            if not isinstance(error, FAILURES):
                raise error
            if active and name not in self._told:
                logger("embed").error(
                    "%s: %s failed, and its texts go to %s: %s", self._op, name, ", ".join(active),
                    error,
                )  # fmt: skip
                self._told.add(name)
        if not active:
            raise _joined(self._op, self.failed) from next(iter(self.failed.values()))
        return active


def _joined(op: str, failed: Mapping[str, BaseException]) -> BaseException:
    """The errors of all devices as one, of their type where they have one type."""
    first, *others = failed.values()
    alike = all(type(error) is type(first) for error in others)
    if alike and isinstance(first, CompileError):
        return CompileError(first.name, first.source, f"every device failed: {_named(failed)}")
    kind = type(first) if alike else DeviceError
    return kind(f"{op}: every device failed: {_named(failed)}")


def _named(failed: Mapping[str, BaseException]) -> str:
    return "; ".join(
        f"{name}: {error.log if isinstance(error, CompileError) else error}"
        for name, error in failed.items()
    )
