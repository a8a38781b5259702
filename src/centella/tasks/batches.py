"""What tasks over texts share: the folder's tokenizer, batches by length, a few in flight."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from centella.errors import DTypeError, WeightsError
from centella.host.log import logger
from centella.runtime.pending import Pending
from centella.weights.folder import TOKENIZER
from centella.weights.model_files import kind

if TYPE_CHECKING:
    from centella.runtime.device import Device
    from centella.tasks.text import Tokenizer

Array = np.ndarray[Any, Any]
R = TypeVar("R")
SLOW = ("software", "simulator")  # adapters whose threads are those of a CPU
Progress = bool | Callable[[int, int], None]
STEP = 16  # lengths are rounded up to multiples of this, so that few plans are built
EXACT = 2048  # tokens of each batch where bits are not to depend on it: enough work for a GPU
IN_FLIGHT = 2  # batches that the device holds while the host prepares the next


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """The texts of each batch, the longest first."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def by_columns(lengths: Sequence[int], most: int, tokens: int) -> list[list[int]]:
    """The texts of each batch, of which none is wider than a text of it needs alone."""
    batches: list[list[int]] = []
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    for columns, some in groupby(order, lambda i: columns_of(lengths[i], most)):
        rows, size = list(some), rows_of(columns, tokens)
        batches += [rows[start : start + size] for start in range(0, len(rows), size)]
    return batches


def columns_of(length: int, most: int) -> int:
    """Tokens that a row has for a text of so many."""
    return max(1, min(-(-length // STEP) * STEP, most))


def rows_of(columns: int, tokens: int) -> int:
    """Rows of a batch of so many tokens."""
    return max(1, tokens // columns)


def exact_tokens(device: Device) -> int:
    """Tokens of a batch whose size is not to depend on the texts: of a CPU those of one text."""
    caps = device.caps
    return 1 if caps.target == "numpy" or caps.adapter_class in SLOW else EXACT


def run_batches(
    batches: Sequence[list[int]], submit: Callable[[list[int]], Pending[R]],
    take: Callable[[list[int], R], None], progress: Progress,
) -> None:  # fmt: skip
    """Run all texts.

    Args:
        batches: the texts of each, by their numbers.
        submit: starts the batch of these texts; take: gets its result, in the order of batches.
        progress: as `Embedder.encode` takes it.
    """
    running: deque[tuple[list[int], Pending[R]]] = deque()
    done, total = 0, sum(map(len, batches))
    with _told(total, progress) as tell:

        def finish() -> None:
            nonlocal done
            rows, pending = running.popleft()
            take(rows, pending.result())
            done += len(rows)
            tell(done, total)

        for rows in batches:
            running.append((rows, submit(rows)))
            if len(running) == IN_FLIGHT:
                finish()
        while running:
            finish()


def grid(
    ids: Sequence[Sequence[int]], batch_size: int, most: int, fill: int, exact: bool = False
) -> tuple[Array, Array]:
    """Ids of texts as i32 [rows, columns], and their lengths i32 [rows].

    Rows and columns are rounded up, so that sizes are few; what is added has length 0.

    Args:
        most: tokens of the longest text that there may be; fill: the id of padding.
        exact: there are `batch_size` rows, however many texts there are.
    """
    rows = batch_size if exact else min(batch_size, 1 << (len(ids) - 1).bit_length())
    columns = columns_of(max(map(len, ids)), most)
    padded = np.full((rows, columns), fill, np.int32)
    lengths = np.zeros(rows, np.int32)
    for row, tokens in enumerate(ids):
        padded[row, : len(tokens)] = tokens
        lengths[row] = len(tokens)
    return padded, lengths


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | Path:
    """The tokenizer of a folder; the path of the file, if the folder has none.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: there is one, and its library is not installed.
    """
    from centella.tasks.text import Tokenizer

    file = folder / TOKENIZER
    absent = kind(file) == "nothing at that path"
    return file if absent else Tokenizer.from_folder(folder, vocab_size)


def expect_tokenizer(tokenizer: Tokenizer | Path, instead: str = "") -> Tokenizer:
    """What `read_tokenizer` gave, where a tokenizer is needed.

    Args:
        instead: what may be given in place of text, behind the message.

    Raises:
        WeightsError: it is the path of a file that the model's folder lacks.
    """
    if isinstance(tokenizer, Path):
        raise WeightsError(f"{tokenizer}: expected a tokenizer, got no such file{instead}")
    return tokenizer


def listed(op: str, texts: Any) -> list[Any]:
    """Texts, one or several, as a list; what each of them is, is not looked at.

    Raises:
        DTypeError: bytes, a mapping, or what is not iterable.
    """
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise DTypeError(f"{op}: expected str or an iterable of str, got {type(texts).__name__}")
    return list(texts)


@contextmanager
def _told(total: int, show: Progress) -> Iterator[Callable[[int, int], None]]:
    """What is called with texts done and of all: the caller's own, a bar of rich, or log lines."""
    if not show:
        yield lambda done, total: None
        return
    if callable(show):
        yield show
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield partial(logger("embed").info, "encoded %d of %d texts")
        return
    # What rich draws with in a notebook.
    drawn = None if importlib.util.find_spec("ipywidgets") else False
    with Progress(console=Console(stderr=True, force_jupyter=drawn)) as bar:
        task = bar.add_task("encode", total=total)
        yield lambda done, total: bar.update(task, completed=done)
