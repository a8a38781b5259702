"""Text files to passages: what the demo searches."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from centella.cli.escape import in_line
from centella.cli.process import reason
from centella.cli.reading import NotTextError, read_text
from centella.errors import CentellaError
from centella.tasks.text.chunks import cut_at

SUFFIXES = (".txt", ".md", ".rst", ".py")
LEFT_OUT = (  # of the documentation: tables to look things up in, folders for contributors
    "api.md", "comparison.md", "features.md", "from-trueno.md", "rooms", "howto",
)  # fmt: skip
NAMED = 3  # skipped files that a line names
LONG = 560  # characters: of prose some 140 tokens, of dense tables the 256 that MiniLM reads


class Passage(Struct, frozen=True):
    """A piece of a file: where it starts (line, from 1) and its text."""

    file: str
    line: int
    text: str


class Skipped(Struct, frozen=True):
    """A file, or a folder with a slash behind it, that has no passage, and why."""

    file: str
    why: str


def documentation() -> Path:
    """The folder of centella's own documentation: in the wheel, or beside a source tree."""
    package = Path(__file__).parents[1]
    shipped, source = package / "_docs", package.parents[1] / "docs"
    return shipped if shipped.is_dir() else source


def read_passages(path: Path, skip: Collection[str] = ()) -> tuple[list[Passage], list[Skipped]]:
    """The passages of a file, or of every text file below a folder, and what has none.

    Hidden folders, and files and folders that have a name in `skip`, are in neither.

    Raises:
        CentellaError: nothing there, or no text.
    """
    if not os.path.lexists(path):
        raise CentellaError(f"{path}: no such file or folder")
    root = path if path.is_dir() else path.parent
    passages: list[Passage] = []
    skipped: list[Skipped] = []
    for file in _files(path, skipped):
        below = file.relative_to(root)
        if not set(skip).isdisjoint(below.parts):
            continue
        name = below.as_posix()
        try:
            text = read_text(file)
        except NotTextError as error:
            skipped.append(Skipped(name, str(error)))
            continue
        pieces = split(text, headings=file.suffix.lower() == ".md")
        visible = [Passage(name, line, piece) for line, piece in pieces if _visible(piece)]
        passages += visible
        if not visible:
            skipped.append(Skipped(name, "no text in it"))
    if not passages and not path.is_dir():
        raise CentellaError(f"{path}: {skipped[0].why}")
    if not passages:
        behind = f"; {summary(skipped)}" if skipped else ""
        raise CentellaError(f"{path}: no text in files that end in {' '.join(SUFFIXES)}{behind}")
    return passages, skipped


def summary(skipped: Sequence[Skipped]) -> str:
    """What was skipped, in a line: how many, and the first of them."""
    named = ", ".join(f"{in_line(s.file)} ({s.why})" for s in skipped[:NAMED])
    return f"skipped {len(skipped)}: {named}{', ...' if len(skipped) > NAMED else ''}"


def _visible(text: str) -> bool:
    return any(c.isprintable() and not c.isspace() for c in text)


def _files(path: Path, skipped: list[Skipped]) -> Iterator[Path]:
    """The file, or those below a folder; folders that cannot be entered go to `skipped`."""
    if not path.is_dir():
        yield path
        return

    def refused(error: OSError) -> None:
        folder = Path(error.filename).relative_to(path).as_posix()
        skipped.append(Skipped(f"{folder}/", reason(error)))

    for folder, below, names in os.walk(path, onerror=refused):
        below[:] = sorted(b for b in below if not b.startswith((".", "__pycache__")))
        links = [Path(folder, b).relative_to(path) for b in below if Path(folder, b).is_symlink()]
        skipped += [Skipped(f"{link.as_posix()}/", "a link to a folder") for link in links]
        yield from (Path(folder, n) for n in sorted(names) if n.lower().endswith(SUFFIXES))


def cut(text: str, most: int) -> Iterator[str]:
    """Pieces of at most `most` characters: cut after a line, a sentence or a word, in this order.

    A piece has half of `most` at least, so that the order yields to the length.
    """
    while len(text) > most:
        end = cut_at(text, most // 2, most)
        if piece := text[:end].rstrip():
            yield piece
        text = text[end:].lstrip()
    if text:
        yield text


def split(text: str, headings: bool = False) -> Iterator[tuple[int, str]]:
    """Pieces of a text with the line each starts at: paragraphs, joined and cut to `LONG`.

    Args:
        text: the whole text.
        headings: whether `#` starts a heading (Markdown): a heading begins a piece, and the pieces
            that follow below it repeat it.
    """
    start, passage, heading = 1, "", ""
    for line, paragraph in _paragraphs(text):
        new = headings and paragraph.startswith("#")
        if passage and (new or len(passage) + len(paragraph) > LONG):
            yield start, passage
            passage = ""
        if new:
            heading = paragraph.split("\n", 1)[0]
        if not passage:
            start = line
            passage = paragraph if new or not heading else f"{heading}\n\n{paragraph}"
        else:
            passage = f"{passage}\n\n{paragraph}"
    if passage:
        yield start, passage


def _parts(line: str) -> list[str]:
    return [line] if len(line) <= LONG else list(cut(line, LONG))


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Blocks between blank lines; one longer than `LONG` is cut at line ends, a line by `cut`."""
    start, paragraph = 1, ""
    numbered = enumerate([*text.splitlines(), ""], 1)
    for number, line in ((n, part) for n, raw in numbered for part in _parts(raw.rstrip())):
        if paragraph and (not line or len(paragraph) + len(line) > LONG):
            yield start, paragraph
            paragraph = ""
        if line:
            start = start if paragraph else number
            paragraph = f"{paragraph}\n{line}" if paragraph else line
