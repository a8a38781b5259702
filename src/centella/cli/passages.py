"""Text files to passages: what the demo searches."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct

from centella.errors import CentellaError

SUFFIXES = (".txt", ".md", ".rst", ".py")
TABLES = (
    "api.md",
    "comparison.md",
    "features.md",
    "from-trueno.md",
)  # to look things up in, not to read
LONG = 560  # characters: of prose some 140 tokens, of dense tables the 256 that MiniLM reads


class Passage(Struct, frozen=True):
    """A piece of a file: where it starts (line, from 1) and its text."""

    file: str
    line: int
    text: str


def documentation() -> Path:
    """The folder of centella's own documentation: in the wheel, or beside a source tree."""
    package = Path(__file__).parents[1]
    shipped, source = package / "_docs", package.parents[1] / "docs"
    return shipped if shipped.is_dir() else source


def read_passages(path: Path, skip: Collection[str] = ()) -> list[Passage]:
    """The passages of a file, or of every text file below a folder; hidden folders are skipped.

    What is not UTF-8 text is skipped as well, and files that have a name in `skip`.

    Raises:
        CentellaError: nothing there, or no text.
    """
    if not path.exists():
        raise CentellaError(f"{path}: no such file or folder")
    root = path if path.is_dir() else path.parent
    found: list[Passage] = []
    for file in _files(path):
        if file.name in skip:
            continue
        text = _text_of(file)
        name = file.relative_to(root).as_posix()
        pieces = split(text, headings=file.suffix == ".md")
        found += [Passage(name, line, piece) for line, piece in pieces if _visible(piece)]
    if not found and path.is_file():
        raise CentellaError(f"{path}: no UTF-8 text")
    if not found:
        raise CentellaError(f"{path}: no text in files that end in {' '.join(SUFFIXES)}")
    return found


def _text_of(file: Path) -> str:
    """The text of a file; nothing where it is not UTF-8 text."""
    raw = file.read_bytes()
    if b"\0" in raw:
        return ""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return ""


def _visible(text: str) -> bool:
    return any(c.isprintable() and not c.isspace() for c in text)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, below, names in os.walk(path):
        below[:] = sorted(b for b in below if not b.startswith((".", "__pycache__")))
        yield from (Path(folder, n) for n in sorted(names) if n.endswith(SUFFIXES))


def split(text: str, headings: bool = False) -> Iterator[tuple[int, str]]:
    """Pieces of a text with the line each starts at: paragraphs, joined and cut to `LONG`.

    Args:
        text: the whole text.
        headings: whether `#` starts a heading (Markdown): a heading begins a piece, and the pieces
            that follow below it repeat it.
    """
    start, held, heading = 1, "", ""
    for line, paragraph in _paragraphs(text):
        new = headings and paragraph.startswith("#")
        if held and (new or len(held) + len(paragraph) > LONG):
            yield start, held
            held = ""
        if new:
            heading = paragraph.split("\n", 1)[0]
        if not held:
            start = line
            held = paragraph if new or not heading else f"{heading}\n\n{paragraph}"
        else:
            held = f"{held}\n\n{paragraph}"
    if held:
        yield start, held


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Blocks between blank lines; a block longer than `LONG` is cut at line ends."""
    start, held = 1, ""
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line = raw.rstrip()
        if held and (not line or len(held) + len(line) > LONG):
            yield start, held
            held = ""
        if line:
            start = start if held else number
            held = f"{held}\n{line}" if held else line
