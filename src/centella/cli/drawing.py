"""Tables and bars, drawn by rich."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import table
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.segment import Segment
from rich.text import Text

from centella.cli.escape import printable
from centella.cli.parts import Excerpt, Table


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


def drawn(parts: Sequence[Table | Excerpt], colours: bool) -> str:
    """Tables and texts as lines for a terminal."""
    text = io.StringIO()  # rich's own writing would not say which stream failed
    console = Escaping(file=text, force_terminal=colours, highlight=False, markup=False)
    for part in parts:
        console.draw(*((_table(part),) if isinstance(part, Table) else _excerpt(part)))
    return text.getvalue()


def _table(what: Table) -> table.Table:
    """Without lines, two spaces between columns."""
    shown = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for c in what.columns:
        shown.add_column(
            c.name, justify="right" if c.right else "left", min_width=c.least,
            no_wrap=not c.wraps, overflow="fold",
        )  # fmt: skip
    for row in what.rows:
        shown.add_row(*row)
    return shown


def _excerpt(what: Excerpt) -> tuple[RenderableType, ...]:
    """A bold heading, and the text indented."""
    console = Console()
    lines = Text(printable(what.text)).wrap(console, console.width - 7)
    shown = [*lines[: what.lines], Text("...")] if len(lines) > what.lines else lines
    body = Padding(Text("\n").join(shown), (0, 0, 0, 7))
    return Text(f"\n{what.heading}", style="bold"), body


@contextmanager
def progress_bar() -> Iterator[Callable[..., None]]:
    """A bar on standard error; gives `tell(done, total, what)`."""
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int, what: str = "") -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield tell
