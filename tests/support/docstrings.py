"""Docstrings in Google's form, as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from keyword import iskeyword

CODE = "    "  # what begins with it is code
HEAD = re.compile(r"(Args|Attributes|Returns|Raises):(.*)")
ENTRY = re.compile(r"(\w+(?:, \w+)*): ")
ERROR = re.compile(r"(?<!`)\b([A-Z]\w*Error|TransferForbidden)\b(?!`)")


@dataclass
class Doc:
    """A docstring: its paragraphs, and the entries of each of its sections."""

    prose: list[str] = field(default_factory=list)
    sections: dict[str, list[str]] = field(default_factory=dict)


def parsed(text: str) -> Doc:
    """A docstring in Google's form."""
    doc = Doc()
    entries: list[str] | None = None  # of the section that the line stands in
    lists = False
    for block in text.split("\n\n"):
        if entries is None and block.startswith(CODE):
            both = doc.prose[-1].startswith(CODE)
            doc.prose[-1:] = [f"{doc.prose[-1]}\n\n{block}"] if both else [doc.prose[-1], block]
            continue
        lines = []
        for line in block.splitlines():
            if head := HEAD.fullmatch(line):
                rest, lists = head[2].strip(), head[1] in ("Args", "Attributes")
                entries = doc.sections[head[1]] = [rest] if rest else []
            elif entries is None or not line.startswith(" "):
                entries = None
                lines.append(line)
            elif not entries or (lists and not line.startswith(" " * 8)):
                entries.append(line.strip())
            else:
                entries[-1] += " " + line.strip()
        if lines:
            doc.prose.append(escaped(" ".join(lines)))
    fenced = "```py\n{}\n```".format
    doc.prose = [fenced(textwrap.dedent(p)) if p.startswith(CODE) else p for p in doc.prose]
    return doc


def escaped(text: str) -> str:
    """Text that Markdown shows as it stands; what is between backticks it does already."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"<(?=\w)|__|\*(?=\S)|(?<=\S)\*", r"\\\g<0>", p) for p in parts[::2]]
    return "`".join(parts)


def is_name(word: str) -> bool:
    """Whether an argument may be called so; "0: all" and "None: ..." tell what a value means."""
    return word.isidentifier() and not iskeyword(word)


def listed(doc: Doc, kind: str, params: set[str] | None = None, mark: str = "") -> Iterator[str]:
    """The arguments or attributes of a docstring, an entry each, with their names as code."""
    for entry in doc.sections.get(kind, ()):
        cuts = [
            cut.start()
            for cut in re.finditer(r"(?<=; )(?=(\w+(?:, \w+)*): )", entry)  # "x: ...; y: ..."
            if all(map(is_name, cut[1].split(", ")))
            if params is None or set(cut[1].split(", ")) <= params
        ]
        for start, end in zip([0, *cuts], [*cuts, None], strict=True):
            text = entry[start:end] if end is None else entry[start : end - 2] + "."
            head = ENTRY.match(text)
            names = ", ".join(f"`{mark}{name}`" for name in head[1].split(", ")) if head else ""
            yield f"{names}: {escaped(text[head.end() :])}" if head else escaped(text)


def outcome(doc: Doc) -> Iterator[str]:
    """What a docstring says of the result, and of errors."""
    if returns := doc.sections.get("Returns"):
        yield "**Returns** " + escaped(" ".join(returns))
    if raises := doc.sections.get("Raises"):
        yield "**Raises** " + ERROR.sub(r"`\1`", escaped(" ".join(raises)))
