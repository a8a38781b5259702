"""What the command line prints: the one way to standard output, standard error and a terminal.

Names of files, tensors and devices, passages and error texts come from elsewhere, and a terminal
acts on control characters in them. They leave as escapes (backslash, x1b), in JSON as JSON's own.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from centella.ledger.counts import Ledger

STDOUT = "standard output"  # as an error names it
SECONDS = 5.0  # between lines on how far it is, where there is no terminal to draw a bar on

# Control characters but tab and newline, line separators, surrogates, and the characters of
# Unicode's category Cf that reorder or hide text; joiners, which scripts and emoji need, are none.
_ACTED_ON = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """A text in which what a terminal would act on is escaped; tabs and newlines stay."""
    return _ACTED_ON.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def in_line(text: str) -> str:
    """A name as a part of a line: tabs and newlines are escaped too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


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

    Raises:
        OSError: as `out`.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    ascii_alone = not encoding.lower().startswith("utf")
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_alone)
    write(_ACTED_ON.sub(lambda match: json.dumps(match[0])[1:-1], text) + "\n")


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
