"""Where a text may be cut into words, by the tokenizer's parts: each word's ids are its own.

BERT's parts look at one character at a time and split at white space. ByteLevel BPE and Unigram
with Metaspace keep the space before a word: a text may be cut before a single space if neither
character beside it is white, or becomes something else beside a space in the normaliser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from centella.dtypes import Array
from centella.tasks.text.word_table import LONG, bounds

if TYPE_CHECKING:
    import tokenizers

Bounds = Callable[[str, bytes], tuple[Array, Array]]
Split = Callable[[str], list[str] | None]
MARK = "\x01"  # a word between texts
BEHIND = " " * LONG  # behind the last word, so that its key can be read
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Of Qwen and of Llama 3: no match of theirs has a space behind what is not white.
PATTERNS = (_CONTRACTED + r"\p{N}" + _REST, _CONTRACTED + r"\p{N}{1,3}" + _REST)
META = "\u2581"  # stands for a space


class Cuts:
    """How texts become words.

    Attributes:
        between: what is put between texts, and between words that are tokenised together.
        bounds: the first bytes of the words of such a text, and their lengths.
        split: the words of one text, if they are soon found in Python; else None.
    """

    def __init__(self, between: str, bounds: Bounds, split: Split) -> None:
        self.between: str = between
        self.bounds: Bounds = bounds
        self.split: Split = split

    @classmethod
    def of(cls, native: tokenizers.Tokenizer) -> Cuts | None:
        """Those of a tokenizer; None where its words may depend on one another."""
        kind, added = type(native.model).__name__, native.get_added_tokens_decoder().values()
        before, normal = _steps(native.pre_tokenizer), _steps(native.normalizer)
        if kind == "WordPiece" and [step["type"] for step in before] == ["BertPreTokenizer"]:
            alone = all(step["type"] == "BertNormalizer" for step in normal)
            alone = alone and all(t.content.split() == [t.content] for t in added)
            plain = not any(t.normalized for t in added)
            words = cls(" ", lambda text, data: bounds(data), _at_white_space)
            return words if alone and plain else None
        model: Any = native.model
        own = _is_byte_level(before, normal) if kind == "BPE" and not model.dropout else False
        if not own and not (kind == "Unigram" and _is_metaspace(before, normal)):
            return None
        normalizer = native.normalizer
        edges = Edges(normalizer.normalize_str if normalizer is not None else str)
        if any(t.rstrip or t.single_word or edges.cuts(t.content) for t in added):
            return None
        return cls("", edges.bounds, edges.split) if edges.of_ascii else None


class Edges:
    """Which spaces words begin at, by the characters beside them.

    Args:
        normalize: what the tokenizer does with a text first.
    """

    def __init__(self, normalize: Callable[[str], str]) -> None:
        self._normalize = normalize
        self._met: set[str] = set()
        self._first: set[str] = set()  # that are no first character of a word
        self._last: set[str] = set()
        self._meet({chr(c) for c in range(33, 127)})
        self.of_ascii: bool = not self._first and not self._last

    def cuts(self, content: str) -> bool:
        """Whether an added token could be cut in two."""
        return any(
            c == " " and not before.isspace()
            for text in (content, self._normalize(content))
            for before, c in pairwise(text)
        )

    def split(self, text: str) -> list[str] | None:
        """As that of `Cuts`: where all white space is single spaces, and each begins a word."""
        words = text.split(" ")
        if "" in words or not text.isprintable():
            return None
        if not text.isascii():
            self._meet(set(text) - self._met)
            if any(a[-1] in self._last or b[0] in self._first for a, b in pairwise(words)):
                return None
        return [words[0], *[f" {word}" for word in words[1:]]]

    def bounds(self, text: str, data: bytes) -> tuple[Array, Array]:
        """As those of `Cuts`."""
        array = np.frombuffer(data, np.uint8)
        white = (array <= 32) | (array == 127)
        cut = array == 32
        cut[1:-1] &= ~(white[:-2] | white[2:])
        if not text.isascii():
            cut[self._kept(text, data)] = False
        mark = array == ord(MARK)
        cut |= mark
        cut[1:] |= mark[:-1]
        edges = np.flatnonzero(cut)
        return edges[:-1], np.diff(edges)

    def _kept(self, text: str, data: bytes) -> list[int]:
        """Spaces that words do not begin at."""
        there = set(text)
        self._meet(there - self._met)
        starts: list[int] = []
        for bad, pattern in ((self._first, b" (?=%s)"), (self._last, b"(?<=%s) ")):
            # Of one length each, as what is looked at before a match has to be.
            by_size: dict[int, list[bytes]] = {}
            for c in bad & there:
                by_size.setdefault(len(c.encode()), []).append(re.escape(c.encode()))
            for some in by_size.values():
                matches = re.finditer(pattern % (b"(?:" + b"|".join(sorted(some)) + b")"), data)
                starts += [match.start() for match in matches]
        return starts

    def _meet(self, characters: set[str]) -> None:
        for c in characters:
            own = self._normalize(c)
            odd = not own or META in own
            if odd or own[0].isspace() or self._normalize(f"a {c}") != f"a {own}":
                self._first.add(c)
            if odd or own[-1].isspace() or self._normalize(f"{c} a") != f"{own} a":
                self._last.add(c)
            self._met.add(c)


def _at_white_space(text: str) -> list[str] | None:
    """The `split` of BERT's parts; empty words are among them."""
    if MARK in text:
        return None
    for space in "\n\t\r":
        text = text.replace(space, " ")
    return text.split(" ")


def _steps(part: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer: of each step of a sequence."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = state.get("normalizers", state.get("pretokenizers", [state]))
    return steps


def _is_byte_level(before: list[dict[str, Any]], normal: list[dict[str, Any]]) -> bool:
    if not before or before[-1]["type"] != "ByteLevel" or before[-1]["add_prefix_space"]:
        return False
    own = before[-1].get("use_regex", True)
    first = before[-1] if own else before[0]
    split = own or (
        first["type"] == "Split" and first["pattern"].get("Regex") in PATTERNS
        and first["behavior"] == "Isolated" and not first["invert"]
    )  # fmt: skip
    others = {step["type"] for step in before[:-1] if step is not first}
    return split and others <= {"Digits"} and all(step["type"] == "NFC" for step in normal)


def _is_metaspace(before: list[dict[str, Any]], normal: list[dict[str, Any]]) -> bool:
    kinds = [step["type"] for step in before]
    if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        return False
    meta = before[-1]
    if (meta["replacement"], meta["prepend_scheme"], meta["split"]) != (META, "always", True):
        return False
    return all(
        step["type"] in ("Precompiled", "NFC", "NFKC")
        or (step["type"] == "Strip" and not step["strip_left"])
        or (step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"})
        for step in normal
    )
