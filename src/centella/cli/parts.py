"""What `output.draw` draws."""

from __future__ import annotations

from msgspec import Struct


class Column(Struct, frozen=True):
    """A column of a table.

    Attributes:
        name: its heading; right: whether its texts end at one edge.
        least: its least width; wraps: whether long texts take several lines.
    """

    name: str
    right: bool = False
    least: int | None = None
    wraps: bool = True


class Table(Struct, frozen=True):
    """Rows of texts."""

    columns: tuple[Column, ...]
    rows: list[tuple[str, ...]]


class Excerpt(Struct, frozen=True):
    """A heading, and at most `lines` lines of a text below it."""

    heading: str
    text: str
    lines: int
