"""`Stream`: a continuation as it comes, to a `for` loop, to an `async for` loop, or awaited."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any, Self

from centella.errors import ContractError
from centella.host.event_loop import in_thread
from centella.tasks.generate.logprobs import TokenLogprobs
from centella.tasks.generate.pieces import Generation, Text
from centella.tensors.hints import OF_STREAM, Hinted


class Stream(Hinted):
    """A continuation while it is generated: an iterator over pieces of whole characters.

    `for piece in stream` computes each piece in the calling thread. In a coroutine, `async for
    piece in stream` computes it in a thread of asyncio's, and `await stream` returns the whole
    `Generation`. Cancelling the task ends the stream.

    `with` and `async with` close it at the end of the block. Threads may share it, and may close it
    while another one waits for a piece; so may `on_token`.
    """

    _hints = OF_STREAM
    _instead = "stream.result may leave it"

    def __init__(
        self, pieces: Generator[str], text: Text, prompt_tokens: int, ending: threading.Event
    ) -> None:
        self._pieces = pieces
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._ending = ending  # which `pieces` heeds after each token
        self._ended = False
        self._running = False
        self._lock = threading.RLock()  # a generator runs in one thread at a time

    def __repr__(self) -> str:
        state = "done" if self._ended else "under way"
        return f"<Stream of {self._prompt_tokens} tokens, {state}>"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        with self._lock:
            if self._running:
                raise ContractError("stream: expected on_token to take no piece of its own stream")
            self._running = True
            try:
                return next(self._pieces)
            except BaseException:
                self._ended = True
                raise
            finally:
                self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the stream: no further token is computed. A second call does nothing."""
        self._ending.set()
        with self._lock:
            if not self._running:  # else `on_token` has called: it ends after this token
                self._pieces.close()
                self._ended = True

    # -- in a coroutine ---------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        piece = await in_thread(lambda: next(self, None), self._ending)
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __await__(self) -> Generator[Any, None, Generation]:
        return in_thread(self._finished, self._ending).__await__()

    def _finished(self) -> Generation:
        for _ in self:
            pass
        return self._generation()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await in_thread(self.close, self._ending)

    # -- what came --------------------------------------------------------------------------------

    @property
    def result(self) -> Generation | None:
        """The whole result once the stream has ended or was closed; None before."""
        return self._generation() if self._ended else None

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens so far, if `logprobs=` was given."""
        return list(self._text.logprobs or ())

    @property
    def guessed(self) -> int:
        """Number of tokens that `draft=` has guessed so far; see `Generation`."""
        return self._text.tally.guessed

    @property
    def accepted(self) -> int:
        """How many of the tokens so far were guessed right."""
        return self._text.accepted

    def _generation(self) -> Generation:
        self._text.end("closed")
        return self._text.generation(self._prompt_tokens)
