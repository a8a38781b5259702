"""Ctrl-C: KeyboardInterrupt is raised between the library's steps, never inside one.

Python raises it between any two instructions of the main thread: in the middle of a submission, in
a callback of the driver's, whose caller drops it, or before a lock is given back. So Python's
handler is replaced (one of the application's never is): ours looks at the stack. With a function
on it that is `uninterrupted`, the signal comes again when there is none; else it raises as Python's
does. That costs a call nothing. Long work inside such a function asks at its `checkpoint`s.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps
import _thread
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import repeat
from types import CodeType, FrameType
from typing import Any, TypeVar
from weakref import WeakMethod

F = TypeVar("F", bound=Callable[..., Any])

AGAIN = 0.001  # seconds until the stack is looked at again
RESENT = 0.02  # seconds until a signal that no handler has answered is sent again
GRACE = 0.5  # seconds in which a computation that is under way may end
LONGEST = 10.0  # a section that is still not over then is interrupted all the same
SIGINT = int(signal.SIGINT)
WEAK = ("weakref", "_weakrefset")  # modules, whose functions are called as objects go
# By module: what Python calls before and after a fork, and drops what it raises.
HOOKS: dict[str, tuple[str, ...]] = {
    "logging": (
        "_acquireLock", "_releaseLock", "_prepareFork", "_afterFork",
        "_after_at_fork_child_reinit_locks",
    ),
    "random": ("seed",),
    "threading": ("_after_fork",),
}  # fmt: skip
DEFAULT: Callable[..., Any] = signal.default_int_handler
getsignal: Callable[[int], Any] = _signal.getsignal  # which makes no enumeration of it: 0.05 us

_shut: dict[CodeType, bool] = {}  # by code: whether an interrupt waits until it has returned
_dropping: set[CodeType] = set()  # of functions whose callers drop what they raise
_told: tuple[WeakMethod[Callable[[], None]], ...] = ()  # replaced, never changed
_telling: threading.Lock = threading.Lock()
_main: int = threading.main_thread().ident or 0
waiting: list[float] = []  # when the interrupt came that waits, if one does
_overdue: set[int] = set()  # signals that have waited long enough: raised whatever the stack
_sent: dict[int, list[int]] = {SIGINT: []}  # by signal: itself, until its handler has answered


def uninterrupted(fn: F) -> F:
    """A function that Ctrl-C does not end: KeyboardInterrupt is raised soon after it."""
    _shut[fn.__code__] = True
    return fn


def interruptible(fn: F) -> F:
    """A function that may be ended by Ctrl-C, whoever calls it: it waits, or calls a user's."""
    _shut[fn.__code__] = False
    return fn


def called_back(fn: F) -> F:
    """A function whose caller drops what it raises: an interrupt waits for its end, however long.

    Python's finalizers and callbacks of weak references are known without it.
    """
    _dropping.add(fn.__code__)
    return fn


def guard() -> None:
    """Before anything begins: raise an interrupt that waits, have our handler in Python's place.

    The outermost section of a call has to ask, since there may be too little time between two of
    them for a thread to see: one that is under way around the caller goes on.
    """
    if waiting and not _is_shut(sys._getframe(2)):
        checkpoint()
    if getsignal(SIGINT) is not DEFAULT or threading.get_ident() != _main:
        return
    try:
        signal.signal(SIGINT, _interrupt)
    except ValueError:  # not the main interpreter
        return
    # asyncio and others put a handler of theirs only where Python's is, which they know by name.
    signal.default_int_handler = _interrupt  # type: ignore[assignment]  # the same to a caller


def tell(method: Callable[[], None]) -> None:
    """Call a method before each KeyboardInterrupt that we raise, while its object is there.

    It runs between any two instructions of the main thread, so it takes no lock.
    """
    global _told
    with _telling:
        _told = (*[told for told in _told if told() is not None], WeakMethod(method))


class _Duty(threading.local):
    stop: Callable[[], None] | None = None


duty: _Duty = _Duty()  # `stop`: raises where the work that this thread does is to end


def checkpoint(grace: float = 0.0) -> None:
    """Between two steps of long work: raises where the work is to end, or an interrupt waits.

    Args:
        grace: seconds that an interrupt waits for the rest, where half of it is lost.
    """
    if duty.stop is not None:
        duty.stop()
        return
    main = waiting and threading.get_ident() == _main
    if main and time.monotonic() - waiting[0] >= grace and _taken():
        _raise()


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Handle SIGINT: raise, or wait until the stack is another."""
    _sent[SIGINT].clear()
    overdue = SIGINT in _overdue
    _overdue.discard(SIGINT)
    if _is_shut(frame, overdue):
        if waiting:
            return
        waiting.append(time.monotonic() - (LONGEST if overdue else 0.0))
        if _started(_ask_again):
            return
    _taken()
    _raise()


def _is_shut(frame: FrameType | None, overdue: bool = False) -> bool:
    """Whether nothing is to be raised: it would be dropped, or is too early in a section.

    The innermost function that is marked says whether it is one.
    """
    shut: bool | None = None
    while frame is not None:
        code = frame.f_code
        module = frame.f_globals.get("__name__", "")
        dropped = code in _dropping or code.co_name == "__del__" or module in WEAK
        if dropped or code.co_name in HOOKS.get(module, ()):
            return True
        if shut is None:
            shut = _shut.get(code)
        frame = frame.f_back
    return bool(shut) and not overdue


def raise_later(number: int, frame: FrameType | None) -> bool:
    """Whether a signal whose handler raises has to wait: it then comes again when it may raise.

    Args:
        number, frame: as the handler has them.
    """
    _sent.setdefault(number, []).clear()
    overdue = number in _overdue
    _overdue.discard(number)
    if not _is_shut(frame, overdue):
        return False

    handler = getsignal(number)
    end = time.monotonic() + (0.0 if overdue else LONGEST)

    def ask_again() -> None:
        late = overdue
        while _is_shut(sys._current_frames().get(_main), late):
            time.sleep(AGAIN)
            late = time.monotonic() >= end
        if late and getsignal(number) is handler:
            _overdue.add(number)
        _send(number, handler)

    return _started(ask_again)


def _started(call: Callable[[], None]) -> bool:
    """Whether a thread could be started, which calls it."""
    try:
        _thread.start_new_thread(call, ())
    except RuntimeError:
        return False
    return True


def _taken() -> bool:
    """Whether the interrupt that waits is the caller's now, to be raised once."""
    try:
        waiting.pop()
    except IndexError:
        return False
    return True


def _raise() -> None:
    for told in _told:
        method = told()
        if method is not None:
            method()
    raise KeyboardInterrupt


def _ask_again() -> None:
    """Send SIGINT again, once, when the main thread may be interrupted."""
    while True:
        time.sleep(AGAIN)
        try:
            late = time.monotonic() - waiting[0] >= LONGEST
        except IndexError:
            return
        if not _is_shut(sys._current_frames().get(_main), late) and _taken():
            if late and getsignal(SIGINT) is _interrupt:  # another would leave it there
                _overdue.add(SIGINT)
            _send(SIGINT, _interrupt)


def _send(number: int, handler: object) -> None:
    """Send a signal to the main thread until its handler has answered.

    It ends the thread's wait in a system call, but one that comes just before the wait does not.
    """
    if not hasattr(signal, "pthread_kill"):  # on Windows
        signal.raise_signal(number)
        return
    sent = _sent[number]
    sent.append(number)
    signal.pthread_kill(_main, number)
    time.sleep(RESENT)
    while sent and getsignal(number) is handler:
        # In C, which gives the interpreter's lock away at neither step: no handler answers between.
        deque(map(signal.pthread_kill, repeat(_main), sent), maxlen=0)
        time.sleep(RESENT)


def _after_fork() -> None:
    """A child has no thread that asks again, and may have another main thread."""
    global _main
    _main = threading.get_ident()
    for sent in _sent.values():
        sent.clear()
    if waiting:
        _thread.start_new_thread(_ask_again, ())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
