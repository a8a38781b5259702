"""What tasks over many texts share: batches by length, a few in flight; the folder's tokenizer."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from centella.host.log import logger
from centella.runtime.pending import Pending
from centella.weights.folder import TOKENIZER
from centella.weights.model_files import kind

if TYPE_CHECKING:
    from centella.tasks.text import Tokenizer

Array = np.ndarray[Any, Any]
Progress = bool | Callable[[int, int], None]
STEP = 16  # lengths are rounded up to multiples of this, so that few plans are built
IN_FLIGHT = 2  # batches that the device holds while the host prepares the next


def run_batches(
    lengths: Sequence[int], batch_size: int, submit: Callable[[list[int]], Pending[Array]],
    take: Callable[[list[int], Array], None], progress: Progress,
) -> None:  # fmt: skip
    """Run all texts, the longest first.

    Args:
        lengths: tokens of each text.
        submit: starts the batch of these texts; take: gets its result, in the order of batches.
        progress: as `Embedder.encode` takes it.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    running: deque[tuple[list[int], Pending[Array]]] = deque()
    done = 0
    with _told(len(lengths), progress) as tell:

        def finish() -> None:
            nonlocal done
            rows, pending = running.popleft()
            take(rows, pending.result())
            done += len(rows)
            tell(done, len(lengths))

        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            running.append((rows, submit(rows)))
            if len(running) == IN_FLIGHT:
                finish()
        while running:
            finish()


def grid(
    ids: Sequence[Sequence[int]], batch_size: int, most: int, fill: int
) -> tuple[Array, Array]:
    """Ids of texts as i32 [rows, columns], and their lengths i32 [rows].

    Rows and columns are rounded up, so that sizes are few; what is added has length 0.

    Args:
        most: tokens of the longest text that there may be; fill: the id of padding.
    """
    rows = min(batch_size, 1 << (len(ids) - 1).bit_length())
    longest = max(map(len, ids))
    columns = max(1, min(-(-longest // STEP) * STEP, most))
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
