"""Waiting in a coroutine: asyncio loads with the first that does."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from threading import Event
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


def _asyncio() -> ModuleType:
    import asyncio

    return asyncio


class Waiter:
    """A future of the running loop, which any thread may wake.

    Attributes:
        future: to be awaited.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop = _asyncio().get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        """Let whoever waits go on; nothing where nobody does any more."""
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # the loop was closed
            return

    def _set(self) -> None:
        if not self.future.done():  # whoever waited was cancelled
            self.future.set_result(None)


async def in_thread(work: Callable[[], T], ending: Event | None = None) -> T:
    """What `work` returns, from a thread of asyncio's, in the context of the caller.

    Args:
        ending: set where the task is cancelled, which work heeds; the task then ends once work has,
            so that what work uses is free again. None: it ends at once.
    """
    tools = _asyncio()
    running = tools.get_running_loop().run_in_executor(None, partial(copy_context().run, work))
    if ending is None:
        return await running  # type: ignore[no-any-return]  # what `work` gave
    try:
        await tools.wait([running])  # from 3.14 on `shield` logs what work raises then
    except tools.CancelledError:
        ending.set()
        running.add_done_callback(_look_at)  # also where the task is cancelled again
        await tools.wait([running])
        raise
    return running.result()  # type: ignore[no-any-return]  # what `work` gave


def _look_at(done: asyncio.Future[T]) -> None:
    """Have asyncio not log an error that nobody waits for."""
    if not done.cancelled():
        done.exception()
