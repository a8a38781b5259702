"""Texts from elsewhere as a terminal may get them.

Names of files, tensors and devices, passages and error texts come from elsewhere, and a terminal
acts on control characters in them. They leave as escapes (backslash, x1b), in JSON as JSON's own.
"""

from __future__ import annotations

import json
import re

# Control characters but tab and newline, line separators, surrogates, and the characters of
# Unicode's category Cf that reorder or hide text; joiners, which scripts and emoji need, are none.
_ACTED_ON = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_BEYOND_ASCII = re.compile("[^\x00-\x7f]")


def printable(text: str) -> str:
    """A text in which what a terminal would act on is escaped; tabs and newlines stay."""
    return _ACTED_ON.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def in_line(text: str) -> str:
    """A name as a part of a line: tabs and newlines are escaped too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def in_json(text: str, ascii_alone: bool = False) -> str:
    """JSON in which what a terminal would act on is escaped as JSON does.

    Halves of surrogate pairs, as in names that are no UTF-8, become U+FFFD: strict readers refuse
    all of a document that has one, escaped or not.
    """
    text = _ACTED_ON.sub(_escaped, text)
    return _BEYOND_ASCII.sub(_escaped, text) if ascii_alone else text


def _escaped(match: re.Match[str]) -> str:
    lone = "\ud800" <= match[0] <= "\udfff"
    return "\ufffd" if lone else json.dumps(match[0])[1:-1]
