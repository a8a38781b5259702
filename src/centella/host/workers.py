"""Threads: pools, whose module loads with the first since it loads `logging`, and a `Worker`."""

from __future__ import annotations

import _thread
import threading
import time
from _queue import SimpleQueue  # `queue` brings heapq, and `import centella` waits for it
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from centella.host.interrupts import GRACE, duty, tell

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")


def pool(threads: int, name: str) -> ThreadPoolExecutor:
    """At most so many threads, whose names begin with one.

    Raises:
        RuntimeError: the process ends: the module would have to be told of its end before. Of a
            pool that there is `submit` raises the same.
    """
    threaded: ThreadPoolExecutor = _pools().ThreadPoolExecutor(threads, name)
    return threaded


def new_future() -> Future[Any]:
    """What threads wait for; whoever has it sets its result."""
    from concurrent.futures import Future  # at the end of the process too

    return Future()


def register_pools() -> bool:
    """Let pools register what they do before a fork; False where the process ends and has none."""
    try:
        _pools()
    except RuntimeError:
        return False
    return True


def _pools() -> ModuleType:
    import concurrent.futures.thread

    return concurrent.futures.thread


class Dropped(Exception):  # noqa: N818  # it is no error of the work
    """Raised in work that is to end: it was interrupted, or the process ends."""


class Job(Generic[T]):
    """One call of a worker's, and what it gave or raised.

    Each thread that waits does so with a lock of its own: an interrupt, which may come between any
    two instructions of it, leaves nothing behind that others wait for.

    Args:
        number: its place among the worker's jobs.
    """

    def __init__(self, call: Callable[..., T], args: tuple[Any, ...], number: int = 0) -> None:
        self.number: int = number
        self.of_main: bool = threading.current_thread() is threading.main_thread()
        self._work: tuple[Callable[..., T], tuple[Any, ...]] | None = (call, args)
        self._waiting: list[_thread.LockType] = []
        self._over = False
        self._value: T | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Do it."""
        assert self._work is not None
        call, args = self._work
        self._work = None
        try:
            self._value = call(*args)
        except Exception as error:
            self._error = error
        self._over = True
        while self._waiting:
            self._waiting.pop().release()

    def done(self) -> bool:
        """True once it is over."""
        return self._over

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over; False where it was not after `timeout` seconds."""
        if self._over:
            return True
        mine = _thread.allocate_lock()
        mine.acquire()
        self._waiting.append(mine)
        if not self._over:  # else nobody may look at the list any more
            mine.acquire(True, -1 if timeout is None else timeout)
        return self._over

    def result(self) -> T:
        """What the call gave, or raises what it raised; waits."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # what `call` gave


class Worker:
    """One thread that does its jobs in order.

    What the main thread has given it is dropped half a second after an interrupt, at the next
    checkpoint. It is a daemon, so that the end of the process waits no longer than it wants to.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._submitted = 0
        self._ended = False
        self._limit = _Limit()
        tell(self._interrupted)

    def __del__(self) -> None:
        self._jobs.put(None)

    def submit(self, call: Callable[..., T], *args: Any) -> Job[T]:
        """A job, done after those before it.

        Raises:
            RuntimeError: it was shut down, or no thread can be started.
        """
        if self._ended:
            raise RuntimeError(f"{self._name} was shut down")
        self._submitted += 1
        job = Job(call, args, self._submitted)
        if self._thread is None:
            thread = threading.Thread(
                target=_work, args=(self._jobs, self._limit), name=self._name, daemon=True
            )
            thread.start()
            self._thread = thread
        self._jobs.put(job)
        return job

    def shutdown(self, patience: float | None = None) -> bool:
        """Let it finish its jobs, for `patience` seconds, and end; then drop what is left.

        Returns:
            False where it is still busy.
        """
        self._ended = True
        self._jobs.put(None)
        if self._thread is None:
            return True
        self._thread.join(patience)
        if self._thread.is_alive():
            self._limit.every = True
            self._thread.join(GRACE)
        return not self._thread.is_alive()

    def _interrupted(self) -> None:
        self._limit.when = time.monotonic() + GRACE  # first: the worker reads `last` before it
        self._limit.last = self._submitted


class _Limit:
    """Which jobs are to end: the main thread's up to `last`, from `when` on; or `every` one."""

    last: int = 0
    when: float = 0.0
    every: bool = False

    def reaches(self, job: Job[Any]) -> bool:
        """Whether a job is to end now."""
        mine = job.of_main and job.number <= self.last and time.monotonic() >= self.when
        return mine or self.every


def _work(jobs: SimpleQueue[Job[Any] | None], limit: _Limit) -> None:
    """Do jobs until there is None; the worker itself may go meanwhile."""
    current: Job[Any] | None = None

    def stop() -> None:
        if current is not None and limit.reaches(current):
            raise Dropped

    duty.stop = stop
    while (current := jobs.get()) is not None:
        current.run()
        current = None  # which would keep what it gave
