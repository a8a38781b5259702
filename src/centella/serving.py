"""Texts of concurrent requests, embedded together: one `encode` a batch, in a worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from inspect import signature
from itertools import repeat
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from centella.errors import ContractError, DeviceError, DTypeError, ShapeError
from centella.tasks.embed.embedder import Embedder

__all__ = ["Batcher"]

Array = np.ndarray[Any, Any]
Answer = asyncio.Future[Array]


class Request(NamedTuple):
    """A text that waits for its batch, since when (the event loop's clock), and its answer."""

    text: str
    arrived: float
    answer: Answer


class Batcher:
    """Gathers the texts of concurrent requests and embeds them together, on one event loop.

        async with Batcher(model) as batcher:
            vector = await batcher.encode("a cat on a mat")

    A batch starts when it is full, or when its first text has waited `max_wait` seconds; texts that
    arrive while a batch runs are the next. Leaving the block closes the Batcher: texts that wait
    are embedded first, unless an exception leaves the block. A batch counts in the ledgers, and
    obeys the `forbid` scopes, that were open where the Batcher was constructed.

    Args:
        model: the Embedder; others may use it at the same time.
        batch_size: most texts in a batch.
        max_wait: seconds that a text waits for others before its batch starts.
        queue_size: most texts that wait or run; a further `encode` waits for room.
        normalize, prompt_name, dim, exact: as for `Embedder.encode`.

    Attributes:
        batches: batches that have run.

    Raises:
        DTypeError: a TypeError: for a model whose `encode` does not take texts, a max_wait that is
            no number.
        ShapeError: for a batch_size or queue_size below 1, or a max_wait below 0.
    """

    def __init__(
        self, model: Embedder, *, batch_size: int = 32, max_wait: float = 0.002,
        queue_size: int = 1024, normalize: bool | None = None, prompt_name: str | None = None,
        dim: int | None = None, exact: bool = False,
    ) -> None:  # fmt: skip
        if not _embeds(model):
            raise DTypeError(f"Batcher: expected an Embedder, got {type(model).__name__}")
        for name, value in (("batch_size", batch_size), ("queue_size", queue_size)):
            if type(value) is not int or value < 1:
                raise ShapeError(f"Batcher: {name}: expected 1 or more, got {value!r}")
        if isinstance(max_wait, bool) or not isinstance(max_wait, (int, float)):
            raise DTypeError(f"Batcher: max_wait: expected seconds, got {type(max_wait).__name__}")
        if not 0 <= max_wait < float("inf"):
            raise ShapeError(f"Batcher: max_wait: expected seconds, 0 or more, got {max_wait!r}")
        self.batches: int = 0
        self._model = model
        self._batch_size = min(batch_size, queue_size)
        self._max_wait = max_wait
        self._normalize = normalize
        options = {"prompt_name": prompt_name, "dim": dim, "exact": exact or None}
        self._options: dict[str, Any] = {name: v for name, v in options.items() if v is not None}
        # A request's own scopes are not to count, or to forbid, the work of others.
        self._context = copy_context()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None  # which ends when no text waits
        self._waiting: dict[Answer, Request] = {}  # in the order of their arrival
        self._calls = 0
        self._closed = False
        self._refusing = False
        self._room = asyncio.Semaphore(queue_size)
        self._full = asyncio.Event()  # a batch is full, or nothing is gained by waiting
        self._idle = asyncio.Event()  # no call is under way

    async def encode(self, text: str) -> Array:
        """The vector of a text, float32 [dim].

        Cancelling it withdraws the text and leaves the others of its batch alone.

        Raises:
            DTypeError: for what is no `str`.
            ContractError: the Batcher is closed, or belongs to another event loop, or its loop can
                start no threads any more.
            CentellaError: what `Embedder.encode` raises for this text.
        """
        if not isinstance(text, str):
            raise DTypeError(f"Batcher.encode: expected str, got {type(text).__name__}")
        self._enter_loop()
        if self._closed:
            raise _closed_error()
        self._calls += 1
        self._idle.clear()
        try:
            async with self._room:
                return await self._answered(text)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def close(self, drain: bool = True) -> None:
        """Take no further texts, and return when all that were taken are answered.

        Args:
            drain: whether texts that wait are embedded; False: their requests get a
                `ContractError`. A batch that runs is finished in either case.
        """
        self._enter_loop()
        self._closed = True
        self._full.set()
        if not drain:
            self._refusing = True
            _answer(self._waiting, repeat(_closed_error()))
            self._waiting.clear()
        if self._calls:
            await self._idle.wait()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def __aenter__(self) -> Batcher:
        """The Batcher itself."""
        self._enter_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Close it: what waits is embedded, unless an exception leaves the block."""
        await self.close(drain=kind is None)

    def _enter_loop(self) -> None:
        """Note the event loop of the first call; refuse any other."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise ContractError(
                "Batcher: expected the event loop of its first call, got another: "
                "construct a Batcher in each, they may share the model"
            )

    async def _answered(self, text: str) -> Array:
        if self._refusing:
            raise _closed_error()
        loop = asyncio.get_running_loop()
        answer: Answer = loop.create_future()
        self._waiting[answer] = Request(text, loop.time(), answer)
        if len(self._waiting) >= self._batch_size:
            self._full.set()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._serve(), context=self._context)
        try:
            return await answer
        finally:
            self._waiting.pop(answer, None)

    async def _serve(self) -> None:
        """Run batches until no text waits."""
        batch: list[Request] = []
        error = ContractError("Batcher.encode: the task that runs batches was cancelled")
        try:
            while self._waiting:
                batch = await self._gathered()
                if not batch:  # all were withdrawn
                    continue
                texts = [request.text for request in batch]
                results = await asyncio.to_thread(self._encoded, texts)
                self.batches += 1
                _answer((request.answer for request in batch), results)
        except RuntimeError as refused:  # by to_thread: what `_encoded` raises it returns
            error = ContractError(
                f"Batcher.encode: expected an event loop that can start threads, got one whose "
                f"executor was shut down ({refused}); close the Batcher before"
            )
        finally:  # nobody is left waiting
            _answer((*(request.answer for request in batch), *self._waiting), repeat(error))
            self._waiting.clear()

    async def _gathered(self) -> list[Request]:
        """The texts of the next batch."""
        oldest = next(iter(self._waiting.values()))
        if len(self._waiting) < self._batch_size and not self._closed:
            self._full.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(oldest.arrived + self._max_wait):
                    await self._full.wait()
        batch = list(self._waiting.values())[: self._batch_size]
        for request in batch:
            del self._waiting[request.answer]
        return [request for request in batch if not request.answer.done()]

    def _encoded(self, texts: Sequence[str]) -> list[Array | Exception]:
        """The vector of each text, or its error: what fails together is tried again in halves."""
        try:
            vectors = self._model.encode(texts, self._batch_size, self._normalize, **self._options)
            return [vector.copy() for vector in vectors]
        except DeviceError as error:  # which no text is the cause of
            return [error] * len(texts)
        except Exception as error:
            if len(texts) == 1:
                return [error]
        half = len(texts) // 2
        return self._encoded(texts[:half]) + self._encoded(texts[half:])


def _embeds(model: object) -> bool:
    """Whether it has the `encode` of an Embedder; a Generator's takes one prompt alone."""
    encode = getattr(model, "encode", None)
    try:
        return bool(signature(encode).bind(["text"], 32, None)) if callable(encode) else False
    except TypeError:
        return False


def _answer(answers: Iterable[Answer], results: Iterable[Array | Exception]) -> None:
    for answer, result in zip(answers, results, strict=False):
        if answer.done():  # its request was cancelled
            continue
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


def _closed_error() -> ContractError:
    return ContractError(
        "Batcher.encode: expected an open Batcher, got one that is closed: construct another"
    )
