"""Tables and bars, drawn by rich: loaded by a command that draws, since rich takes long to load."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from centella.cli.output import printable, write


class Escaping(Console):
    """A console that writes control characters of texts as escapes."""

    def render(self, *args: Any, **options: Any) -> Any:
        """The pieces of what is shown."""
        for piece in super().render(*args, **options):
            text = piece.text if piece.control else printable(piece.text)
            yield Segment(text, piece.style, piece.control)

    def draw(self, *parts: RenderableType) -> None:
        """Each part, into the console's file."""
        for part in parts:
            self.print(part)


def show(*parts: RenderableType) -> None:
    """Tables and texts on standard output, in colour where that is a terminal.

    Raises:
        OSError: as `output.out`.
    """
    text = io.StringIO()  # rich's own writing would not say which stream failed
    console = Escaping(file=text, force_terminal=sys.stdout.isatty(), highlight=False, markup=False)
    console.draw(*parts)
    write(text.getvalue())


def new_table() -> Table:
    """A table without lines, two spaces between its columns."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


def passage(heading: str, text: str, most: int) -> tuple[Text, Padding]:
    """A bold heading, and at most so many lines of a text below it."""
    console = Console()
    lines = Text(printable(text)).wrap(console, console.width - 7)
    shown = [*lines[:most], Text("...")] if len(lines) > most else lines
    body = Padding(Text("\n").join(shown), (0, 0, 0, 7))
    return Text(f"\n{heading}", style="bold"), body


@contextmanager
def progress_bar() -> Iterator[Callable[..., None]]:
    """A bar on standard error; gives `tell(done, total, what)`."""
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int, what: str = "") -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield tell
