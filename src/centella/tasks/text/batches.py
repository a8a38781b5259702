"""What tasks over texts share: batches by length, a few in flight."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from msgspec import Struct

from centella.errors import DTypeError, WeightsError
from centella.host.blockwise import cores
from centella.host.log import logger
from centella.host.workers import pool
from centella.runtime.pending import Pending
from centella.tasks.text.tokens import FIRST, Tokens

if TYPE_CHECKING:
    from concurrent.futures import Future

    from centella.runtime.device import Device
    from centella.tasks.text.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]
Grid = tuple[Array, Array]
T = TypeVar("T")
R = TypeVar("R")
SLOW = ("software", "simulator")  # adapters whose threads are those of a CPU
Progress = bool | Callable[[int, int], None]
STEP = 16  # lengths are rounded up to multiples of this, so that few plans are built
PART, SAVED = 16, 512  # texts lie end to end where that saves a part, and so many tokens, of a grid
FINE = ((32, 4), (64, 8))  # and up to a length to multiples of less
EXACT = 2048  # tokens of each batch where bits are not to depend on it: enough work for a GPU
TOGETHER = 2048  # texts that are tokenised while others are embedded
IN_FLIGHT = 2  # batches that the device holds while the host prepares the next


def by_length(lengths: Array, batch_size: int) -> list[Array]:
    """The texts of each batch, the longest first."""
    if len(lengths) == 1:
        return [FIRST]
    order = (-lengths).argsort(kind="stable")
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def by_columns(lengths: Array, most: int, tokens: int) -> list[Array]:
    """The texts of each batch, of which none is wider than a text of it needs alone."""
    batches: list[Array] = []
    for columns, rows in widths(lengths, most, exact=True):
        size = rows_of(columns, tokens)
        batches += [rows[start : start + size] for start in range(0, len(rows), size)]
    return batches


def widths(lengths: Array, most: int, exact: bool) -> Iterator[tuple[int, Array]]:
    """Texts whose rows have so many columns, the longest first."""
    of_length = np.bincount(lengths)
    for length in np.flatnonzero(of_length).tolist():
        of_length[length] = columns_of(length, most, exact)
    columns = of_length[lengths]
    order = np.argsort(-lengths, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(columns[order])) + 1):
        if len(rows):
            yield int(columns[rows[0]]), rows


@lru_cache(1 << 14)
def columns_of(length: int, most: int, exact: bool = False) -> int:
    """Tokens that a row has for a text of so many; `exact`: of few widths, as batches are full."""
    fine = next((step for up_to, step in FINE if length <= up_to), STEP)
    step = STEP if exact else fine
    return max(1, min(-(-length // step) * step, most))


def capacity(tokens: int) -> int:
    """So many tokens end to end, rounded up by a sixteenth at most, or to a multiple of 16."""
    step = max(STEP, 1 << max((tokens - 1).bit_length() - 5, 0))
    return -(-tokens // step) * step


def rows_of(columns: int, tokens: int) -> int:
    """Rows of a batch of so many tokens."""
    return max(1, tokens // columns)


def exact_tokens(device: Device) -> int:
    """Tokens of a batch whose size is not to depend on the texts: of a CPU those of one text."""
    return 1 if on_cores(device) else EXACT


def on_cores(device: Device) -> bool:
    """Whether it computes on the cores of the host."""
    return device.caps.on_host or device.caps.adapter_class in SLOW


class Batch(Struct, frozen=True, eq=False):
    """Texts that run together.

    Attributes:
        tokens: of these texts and others; rows: the numbers of these among them.
        texts: the numbers of these among all texts.
    """

    tokens: Tokens
    rows: Array
    texts: Array

    def rounded_rows(self, batch_size: int) -> int:
        """A power of two of texts, up to the size of a batch: so that sizes are few."""
        return min(batch_size, 1 << (len(self.rows) - 1).bit_length())

    def packs(self, batch_size: int, most: int, room: int) -> bool:
        """Whether texts end to end have so many fewer tokens than a grid that it pays.

        Args:
            room: tokens that there may be end to end.
        """
        if len(self.rows) == 1:
            return False
        lengths = self.tokens.lengths[self.rows]
        tokens = capacity(int(lengths.sum()))
        padded = self.rounded_rows(batch_size) * self.columns(most)
        pays = padded - tokens >= max(SAVED, padded / PART)
        return bool(pays and tokens <= room and lengths.min() > 0)

    def end_to_end(self, batch_size: int, fill: int) -> tuple[Array, Array, Array]:
        """Ids as i32 [tokens], offsets i32 [texts + 1], and positions i32 [tokens].

        Tokens and texts are rounded up, so that sizes are few; texts that are added are empty.

        Args:
            fill: the id of what lies behind the last text.
        """
        some = self.tokens.taken(self.rows)
        count = len(some.ids)
        ids = np.full(capacity(count), fill, np.int32)
        ids[:count] = some.ids
        positions = np.zeros(len(ids), np.int32)
        positions[:count] = np.arange(count) - np.repeat(some.starts, some.lengths)
        offsets = np.full(self.rounded_rows(batch_size) + 1, count, np.int32)
        offsets[: len(some)] = some.starts
        return ids, offsets, positions

    def grid(self, batch_size: int, most: int, fill: int, exact: bool = False) -> Grid:
        """Ids as i32 [rows, columns], and their lengths i32 [rows].

        Rows and columns are rounded up, so that sizes are few; what is added has length 0.

        Args:
            most: tokens of the longest text that there may be; fill: the id of padding.
            exact: there are `batch_size` rows, however many texts there are.
        """
        rows = batch_size if exact else self.rounded_rows(batch_size)
        return self.tokens.grid(self.rows, (rows, self.columns(most, exact)), fill)

    def columns(self, most: int, exact: bool = False) -> int:
        """Tokens that a row has for the longest of these texts."""
        lengths = self.tokens.lengths[self.rows]
        return columns_of(int(lengths[0] if len(lengths) == 1 else lengths.max()), most, exact)


def batches_of(
    parts: Sequence[Callable[[], Tokens]], batch_size: int, most: int, room: int, threads: int = 1
) -> Iterator[Batch]:  # fmt: skip
    """Batches of all texts.

    Full batches of texts of one width run while the next part is tokenised. Texts that are too few
    for that wait for those of the parts that follow; in the end they are sorted by length.

    Args:
        parts: each tokenises some of the texts, in their order.
        most: tokens of the longest text that there may be.
        room: tokens of a batch, where none is to be wider than a text of it needs alone; else 0.
        threads: how many call `parts`.
    """
    if len(parts) == 1:
        tokens = parts[0]()
        yield from _last(tokens, None, batch_size, most, room)
        return
    waiting: list[tuple[Tokens, Array]] = []
    count = 0
    for number, tokens in enumerate(ahead(parts, threads), 1):
        waiting.append((tokens, np.arange(count, count + len(tokens))))
        count += len(tokens)
        rest = Tokens.joined([each for each, _ in waiting])
        texts = np.concatenate([numbers for _, numbers in waiting])
        waiting = [(rest, texts)]
        if number == len(parts):
            break
        few = [np.zeros(0, np.int64)]
        for columns, rows in widths(rest.lengths, most, bool(room)):
            size = rows_of(columns, room) if room else batch_size
            full = len(rows) // size * size
            for start in range(0, full, size):
                some = rows[start : start + size]
                yield Batch(rest, some, texts[some])
            few.append(rows[full:])
        left = np.concatenate(few)
        waiting = [(rest.taken(left), texts[left])]
    for rest, texts in waiting if count else ():
        yield from _last(rest, texts, batch_size, most, room)


def _last(
    tokens: Tokens, texts: Array | None, batch_size: int, most: int, room: int
) -> Iterator[Batch]:
    """As `batches_of`, of texts behind which no others come; None: they are all texts."""
    lengths = tokens.lengths
    for rows in by_columns(lengths, most, room) if room else by_length(lengths, batch_size):
        yield Batch(tokens, rows, rows if texts is None else texts[rows])


def ahead(calls: Sequence[Callable[[], T]], threads: int = 1) -> Iterator[T]:
    """What calls give, in their order; threads make the next ones while one is used."""
    if len(calls) < 2:
        yield from (call() for call in calls)
        return
    workers = pool(threads, "centella-ahead")
    try:
        running: deque[Future[T]] = deque()
        for call in calls:
            running.append(workers.submit(copy_context().run, call))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        workers.shutdown(cancel_futures=True)


def threads_ahead(devices: Iterable[Device]) -> int:
    """How many threads may tokenise: one where a device computes on the same cores."""
    return 1 if any(map(on_cores, devices)) else max(1, cores() - 1)


def portions(count: int) -> Iterator[slice]:
    """Texts that are tokenised together: fewer at first, so that a device begins soon."""
    first, size = 0, TOGETHER // 4
    while first < count:
        yield slice(first, first + size)
        first, size = first + size, min(2 * size, TOGETHER)


def run_batches(
    batches: Iterable[Batch], total: int, submit: Callable[[Batch], Pending[R]],
    take: Callable[[Batch, R], None], progress: Progress,
) -> None:  # fmt: skip
    """Run all texts.

    Args:
        total: texts of all batches.
        submit: starts a batch; take: gets it and its result, in the order of batches.
        progress: as `Embedder.encode` takes it.
    """
    running: deque[tuple[Batch, Pending[R]]] = deque()
    done = 0
    with told(total, progress) as tell:

        def finish() -> None:
            nonlocal done
            batch, pending = running.popleft()
            take(batch, pending.result())
            done += len(batch.texts)
            tell(done, total)

        for batch in batches:
            running.append((batch, submit(batch)))
            if len(running) == IN_FLIGHT:
                finish()
        while running:
            finish()


def expect_tokenizer(tokenizer: Tokenizer | Path, instead: str = "") -> Tokenizer:
    """What `text.read_tokenizer` gave, where a tokenizer is needed.

    Args:
        instead: what may be given in place of text, behind the message.

    Raises:
        WeightsError: it is the path of a file that the model's folder lacks, or of a GGUF file
            that has none.
    """
    if isinstance(tokenizer, Path):
        is_gguf = tokenizer.suffix.lower() == ".gguf"
        got = "a file without tokenizer.ggml.tokens" if is_gguf else "no such file"
        raise WeightsError(f"{tokenizer}: expected a tokenizer, got {got}{instead}")
    return tokenizer


def listed(op: str, texts: Any) -> list[Any]:
    """Texts, one or several, as a list; what each of them is, is not looked at.

    Raises:
        DTypeError: bytes, a mapping, a set, which has no order, or what is not iterable.
    """
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | Mapping | Set) or not isinstance(texts, Iterable):
        raise DTypeError(f"{op}: expected str or an iterable of str, got {type(texts).__name__}")
    return list(texts)


def progress_of(op: str, progress: Any) -> Progress:
    """What a caller gave.

    Raises:
        DTypeError: no function, True or False.
    """
    if callable(progress):
        return cast("Callable[[int, int], None]", progress)
    if not isinstance(progress, (bool, np.bool_)):
        raise DTypeError(
            f"{op}: expected True, False or a function for progress, got {type(progress).__name__}"
        )
    return bool(progress)


def told(total: int, show: Progress) -> AbstractContextManager[Callable[[int, int], object]]:
    """What is called with texts done and of all: the caller's own, a bar of rich, or log lines."""
    if callable(show):
        return nullcontext(show)
    return _drawn(total) if show else nullcontext(_silent)


def _silent(done: int, total: int) -> None:
    """Nobody asked."""


@contextmanager
def _drawn(total: int) -> Iterator[Callable[[int, int], None]]:
    try:
        from rich import console, progress
    except ImportError:
        yield partial(logger("embed").info, "encoded %d of %d texts")
        return
    # What rich draws with in a notebook.
    drawn = None if importlib.util.find_spec("ipywidgets") else False
    with progress.Progress(console=console.Console(stderr=True, force_jupyter=drawn)) as bar:
        task = bar.add_task("encode", total=total)
        yield lambda done, total: bar.update(task, completed=done)
