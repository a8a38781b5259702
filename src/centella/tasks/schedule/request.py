"""`Request`: a continuation that a `Scheduler` computes among others, as its user holds it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any, ClassVar, Self

from centella.errors import ShapeError
from centella.host.event_loop import Waiter, in_thread
from centella.tasks.generate.logprobs import TokenLogprobs
from centella.tasks.generate.pieces import Generation, Tally, Text
from centella.tensors.arguments import real
from centella.tensors.hints import OF_REQUEST, Hinted

Ready = Callable[[], bool]
Drive = Callable[[Ready], None]


class Answer:
    """What a request has got so far: the Scheduler's thread fills it, the user's threads read it.

    Args:
        text: of its tokens, up to where it ends.
        prompt_tokens: tokens of the prompt.

    Attributes:
        tally: of guesses.
    """

    def __init__(self, text: Text, prompt_tokens: int) -> None:
        self.prompt_tokens: int = prompt_tokens
        self.ended: bool = False
        self.error: Exception | None = None
        self.pieces: deque[str] = deque()
        self.changed: threading.Condition = threading.Condition()
        self.tally: Tally = text.tally
        self._text = text
        self._waiters: list[Waiter] = []

    def add(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """A token more; whether it was the last."""
        with self.changed:
            if not self.ended:
                self._publish(self._text.add(token, logprobs), bool(self._text.finish))
            return self.ended

    def end(self, finish: str) -> None:
        """No token more, unless it has ended."""
        with self.changed:
            if not self.ended:
                self._finish(finish)

    def fail(self, error: Exception) -> None:
        """An error in place of what is missing, unless it has ended."""
        with self.changed:
            if not self.ended:
                self.error = error
                self._finish("closed")

    def _finish(self, finish: str) -> None:
        """Give what is left of the text; where that cannot be decoded, end with its error."""
        piece = ""
        try:
            piece = self._text.end(finish)
        except Exception as error:
            self.error = self.error or error
        self._publish(piece, True)

    def _publish(self, piece: str, ended: bool) -> None:
        if piece:
            self.pieces.append(piece)
        self.ended = ended
        if not piece and not ended:
            return
        self.changed.notify_all()
        for waiter in self._waiters:
            waiter.wake()
        self._waiters.clear()

    @property
    def generation(self) -> Generation:
        """All of it, once it has ended.

        Raises:
            CentellaError: what it failed with.
        """
        if self.error is not None:
            raise self.error
        return self._text.generation(self.prompt_tokens)

    def next(self) -> str | None:
        """The next piece; None at the end."""
        with self.changed:
            return self.pieces.popleft() if self.pieces else None

    async def news(self, ready: Ready) -> None:
        """Wait in an event loop."""
        waiter = Waiter()
        with self.changed:
            if ready():
                return
            self._waiters.append(waiter)
        await waiter.future


class Request(Hinted):
    """A prompt that a `Scheduler` continues, beside others.

    An iterator over pieces of text, as they come; `async for` takes them, too. `result()` waits for
    all of it, and so does `await`. A task that is cancelled while it waits cancels the request, and
    so does the end of `with scheduler.submit(...) as request:`.
    """

    _hints: ClassVar[dict[str, str]] = OF_REQUEST
    _instead: ClassVar[str] = "request.result() may leave it"

    def __init__(self, answer: Answer, drive: Drive | None) -> None:
        self._answer = answer
        self._drive = drive  # a step, unless it is ready; None: a thread computes

    def __repr__(self) -> str:
        return f"<Request of {self.prompt_tokens} tokens, {'done' if self.done() else 'under way'}>"

    @property
    def prompt_tokens(self) -> int:
        """How many tokens its prompt has."""
        return self._answer.prompt_tokens

    def done(self) -> bool:
        """Whether it has ended, failed or was cancelled; never blocks."""
        return self._answer.ended

    def cancel(self) -> None:
        """End it here: nothing more is computed, `finish` is "closed". Later nothing happens."""
        self._answer.end("closed")

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for its end; all of it.

        Raises:
            TimeoutError: after `timeout` seconds; it can be asked again.
            DTypeError, ShapeError: `timeout` is no number of seconds.
            CentellaError: what it failed with: logits that are NaN, a device that was lost, a
                Scheduler that was closed.
        """
        self._wait(self.done, _seconds(timeout))
        return self._answer.generation

    def _ready(self) -> bool:
        return bool(self._answer.pieces) or self._answer.ended

    def _wait(self, ready: Ready, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not ready():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"not done after {timeout} s")
            if self._drive is None:
                with self._answer.changed:
                    self._answer.changed.wait_for(ready, left)
            else:
                self._drive(ready)

    async def _waited(self, ready: Ready) -> None:
        try:
            while not ready():
                if self._drive is None:
                    await self._answer.news(ready)
                else:
                    await in_thread(partial(self._drive, ready))
        except BaseException as error:
            if not isinstance(error, Exception):  # the task was cancelled
                self.cancel()
            raise

    # -- its pieces -------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        self._wait(self._ready)
        piece = self._answer.next()
        if piece is None:
            self._answer.generation  # noqa: B018  # raises what it failed with
            raise StopIteration
        return piece

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        await self._waited(self._ready)
        piece = self._answer.next()
        if piece is None:
            self._answer.generation  # noqa: B018  # as above
            raise StopAsyncIteration
        return piece

    def __await__(self) -> Generator[Any, None, Generation]:
        return self._ended().__await__()

    async def _ended(self) -> Generation:
        await self._waited(self.done)
        return self._answer.generation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()


def _seconds(timeout: object) -> float | None:
    """A timeout, checked; None for one that is too long for a lock, of centuries."""
    if timeout is None:
        return None
    seconds = real("result", "timeout", timeout)
    if math.isnan(seconds):
        raise ShapeError("result: expected a number of seconds for timeout, got nan")
    return seconds if seconds < threading.TIMEOUT_MAX else None
