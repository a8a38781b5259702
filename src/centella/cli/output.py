"""What the command line prints: the one way to standard output, standard error and a terminal.

Texts are escaped (`escape.py`); rich draws tables and bars, and loads with the first of them.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from centella.cli.escape import in_json, printable
from centella.cli.parts import Excerpt, Table

if TYPE_CHECKING:
    from centella.ledger.counts import Ledger

STDIN, STDOUT = "standard input", "standard output"  # as errors name them
SECONDS = 5.0  # between lines on how far it is, where there is no terminal to draw a bar on


def out(text: str = "") -> None:
    """A line, or several, on standard output, at once: what follows may take long.

    Raises:
        OSError: standard output takes no more; BrokenPipeError: its reader has left.
    """
    write(f"{printable(text)}\n")


def piece(text: str) -> None:
    """A part of a line on standard output, at once, escaped for a terminal; raises as `out`."""
    write(printable(text) if sys.stdout.isatty() else text)


def err(text: str) -> None:
    """A line on standard error; nothing where that cannot be written."""
    with suppress(OSError):
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()


def err_ledger(counts: Ledger | None) -> None:
    """What moved and ran, in a line on standard error."""
    err(f"ledger: {counts}")


def show_cursor() -> None:
    """Give a terminal on standard error its cursor back, which a progress bar hides."""
    with suppress(OSError):
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()


def out_json(value: Any, indent: int | None = 2) -> None:
    """A value as JSON on standard output; what a terminal would act on as JSON's escapes.

    NaN and infinity are null, halves of surrogate pairs U+FFFD.

    Raises:
        OSError: as `out`.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=indent, ensure_ascii=False)
    write(in_json(text, ascii_alone=not encoding.lower().startswith("utf")) + "\n")


def _finite(value: Any) -> Any:
    """Plain data with None for NaN and infinity, which JSON has not."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(text: str) -> None:
    """A text on standard output, at once.

    Raises:
        OSError: as `out`.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        error.filename = error.filename or STDOUT
        raise


def draw(*parts: Table | Excerpt) -> None:
    """Tables and texts on standard output, in colour where that is a terminal.

    Raises:
        OSError: as `out`.
    """
    from centella.cli.drawing import drawn  # rich takes longer to load than a text to embed

    write(drawn(parts, sys.stdout.isatty()))


@contextmanager
def progress(text: str, bar: bool) -> Iterator[Callable[..., None]]:
    """Gives `tell(done, total, what)`: a bar on standard error, or a line there now and then.

    Args:
        text: of a line, with {} for each of the two.
        bar: whether to draw one, as a terminal can.
    """
    if not bar:
        yield every(SECONDS, lambda done, total: err(text.format(done, total)))
        return
    from centella.cli.drawing import progress_bar

    with progress_bar() as tell:
        yield tell


def every(seconds: float, tell: Callable[[int, int], None]) -> Callable[..., None]:
    """A `tell` that is called once in so many seconds at most; not before the first have passed."""
    last = time.monotonic()

    def told(done: int, total: int, *_: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            tell(done, total)

    return told
