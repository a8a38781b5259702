"""The streams of one CUDA device: where work goes, and that all of it stays in one order.

Work goes to the device's own stream, inside `device.stream(...)` to that one. A stream that gets
work after another waits for it first, by an event: so memory that one submission has freed can be
given to the next, whatever their streams.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from contextvars import ContextVar
from typing import Any, NamedTuple

from centella.backends.base import Buffer
from centella.backends.cuda.driver import check, driver
from centella.backends.cuda.interop import LEGACY


class Stream(NamedTuple):
    """A stream as an integer, and as the driver's bindings take it."""

    handle: int
    native: Any

    @classmethod
    def of(cls, handle: int) -> Stream:
        """The stream of a handle."""
        return cls(handle, driver.CUstream(handle))


class Scope:
    """A `with device.stream(...)` block; a task that it started may outlive it."""

    __slots__ = ("open", "stream", "streams", "thread")

    def __init__(self, streams: Streams, stream: Stream) -> None:
        self.streams: Streams = streams
        self.stream: Stream = stream
        self.thread: int = threading.get_ident()
        self.open: bool = True


class Lent:
    """Memory that another library reads on a stream of its own.

    When it is given back, work that reads it may still be under way there; so the stream is
    noted before the memory is free.
    """

    __slots__ = ("buffer", "handle", "returned")

    def __init__(self, buffer: Buffer, handle: int, returned: deque[int]) -> None:
        self.buffer: Buffer = buffer
        self.handle: int = handle
        self.returned: deque[int] = returned

    def __del__(self) -> None:
        self.returned.append(self.handle)


class Streams:
    """The order of one device's work. Every call holds the backend's lock, in its context.

    Args:
        own: the stream that the device made.

    Attributes:
        returned: streams of libraries that have given back memory; finalizers append to it.
    """

    def __init__(self, own: int) -> None:
        self.own: Stream = Stream.of(own)
        self.returned: deque[int] = deque()
        self._last = self.own
        self._alive = Counter((LEGACY, self.own.handle))  # streams that nobody can have destroyed
        self._event = check(
            driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
        )

    def current(self) -> Stream:
        """The stream that work of this thread goes to."""
        thread = threading.get_ident()
        for scope in reversed(_scopes.get()):
            if scope.streams is self and scope.open and scope.thread == thread:
                return scope.stream
        return self.own

    def turn(self) -> Stream:
        """The stream for work of this thread now, after all that was put on any before."""
        stream = self.current()
        if stream.handle != self._last.handle:
            self.after(self._last, stream)
            self._last = stream
        self._wait_for_readers(stream)
        return stream

    def after(self, first: Stream, then: Stream) -> None:
        """What `then` gets from now on waits for what `first` has got."""
        if first.handle != then.handle:
            # A wait is for what was recorded when it was asked for, so one event serves them all.
            check(driver.cuEventRecord(self._event, first.native))
            check(driver.cuStreamWaitEvent(then.native, self._event, 0))

    def _wait_for_readers(self, stream: Stream) -> None:
        """What `stream` gets from now on waits for work that reads memory given back."""
        while self.returned:
            handle = self.returned.popleft()
            if self._alive[handle]:
                self.after(Stream.of(handle), stream)
            else:
                check(driver.cuCtxSynchronize())

    def enter(self, handle: int) -> Scope:
        """Send work of this thread to a stream."""
        scope = Scope(self, Stream.of(handle))
        _scopes.set((*_scopes.get(), scope))
        self._alive[handle] += 1
        try:
            self.turn()
        except BaseException:
            self._forget(scope)
            raise
        return scope

    def leave(self, scope: Scope) -> None:
        """Undo `enter`; what the application put on the stream comes before what follows."""
        self._wait_for_readers(scope.stream)
        self._forget(scope)
        outer = self.current()
        self.after(scope.stream, outer)
        if self._last.handle == scope.stream.handle:
            self._last = outer

    def _forget(self, scope: Scope) -> None:
        self._alive[scope.stream.handle] -= 1
        scope.open = False
        _scopes.set(tuple([s for s in _scopes.get() if s is not scope]))

    def close(self) -> None:
        """Destroy what this made."""
        driver.cuEventDestroy(self._event)
        driver.cuStreamDestroy(self.own.native)


class Current:
    """`with` it, a context is current on this thread; afterwards the application's own is again."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        check(driver.cuCtxPushCurrent(self._handle))

    def __exit__(self, *_: object) -> None:
        driver.cuCtxPopCurrent()


# The blocks that are open on this thread and task, innermost last. A task inherits its parent's.
_scopes: ContextVar[tuple[Scope, ...]] = ContextVar("centella_streams", default=())
