"""A long text in pieces that a model reads whole, cut after a line, a sentence or a word."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from centella.errors import ShapeError
from centella.tensors.arguments import whole

if TYPE_CHECKING:
    from centella.tasks.text.tokenizer import Tokenizer

# Where a text may be cut, the best first: after a line, after a sentence, after a word.
ENDS = [re.compile(end) for end in (r"\n", r"[.!?]['\")\]]*\s|[\u3002\uff01\uff1f]", r"\s")]
WORD = re.compile(r"(?<=\s)\S")
VISIBLE = re.compile(r"\S")


class Chunk(Struct, frozen=True):
    """A piece of a text.

    Attributes:
        text: the piece.
        start, end: its characters are whole[start:end].
        tokens: tokens of the piece, without special tokens and prompt.
    """

    text: str
    start: int
    end: int
    tokens: int


def cut_at(text: str, begin: int, end: int) -> int:
    """The best place from `begin` to `end` to cut a text; `end` where no line or word ends."""
    places = (max((m.end() for m in e.finditer(text, begin, end)), default=0) for e in ENDS)
    return next((cut for cut in places if cut), end)


def prepared(texts: list[Any], prompt: str, lower_case: bool) -> list[Any]:
    """Texts as they are tokenised: after a prompt, in lower case; what is no text, as it is."""
    read = [prompt + t if isinstance(t, str) else t for t in texts] if prompt else texts
    return [t.lower() if isinstance(t, str) else t for t in read] if lower_case else read


class Chunker:
    """Cuts texts into pieces of at most `size` tokens; a single character may have more.

    Args:
        op: begins the text of errors.
        tokenizer: of the model; lower_case: whether texts are lower-cased before it.
        prompt: what will stand before each piece.
        most: tokens that the model reads.
        size: most tokens of a piece, special ones and the prompt's counted.
        overlap: tokens of a piece that begin the next one.

    Raises:
        ShapeError: a size above `most`, or without room for a token; an overlap that is no part of
            a piece.
    """

    def __init__(
        self, op: str, tokenizer: Tokenizer, lower_case: bool, prompt: str, most: int, size: int,
        overlap: int,
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self._lower = lower_case
        self._prompt = prompt
        self._fixed = tokenizer.num_special  # tokens beside those of a piece
        self._fixed += self.counts([""])[0] if prompt else 0
        self._overlap = whole(op, "overlap", overlap)
        self.room: int = whole(op, "chunk", size, 1) - self._fixed
        if size > most:
            raise ShapeError(f"{op}: expected chunk of {most} tokens at most, got {size}")
        if self.room < 1:
            raise ShapeError(
                f"{op}: expected chunk of {self._fixed + 1} tokens or more, which leaves room "
                f"beside the special ones and the prompt, got {size}"
            )
        if self._overlap >= self.room:
            raise ShapeError(f"{op}: expected overlap below {self.room} tokens, got {overlap}")

    def counts(self, texts: list[str]) -> list[int]:
        """Tokens of each text; special ones and those of the prompt are not counted."""
        tokens = self._tokenizer.tokens(prepared(texts, self._prompt, self._lower))
        counts: list[int] = (tokens.counts - self._fixed).tolist()
        return counts

    def chunks(self, text: str, tokens: int) -> Iterator[Chunk]:
        """The pieces of a text of so many tokens.

        Each but the last has half of its room at least, and ends after a line, else after a
        sentence, else after a word.
        """
        if tokens <= self.room or text.isspace():
            yield Chunk(text, 0, len(text), tokens)
            return
        starts, end = self._starts(text), 0
        begin = _visible(text, 0)
        while begin < len(text):
            last, (end, tokens) = end, self._piece(text, starts, begin)
            if end <= last:  # what begins it is all of it
                begin = _visible(text, last)
                end, tokens = self._piece(text, starts, begin)
            piece = text[begin:end].rstrip()
            yield Chunk(piece, begin, begin + len(piece), tokens)
            if _visible(text, end) == len(text):
                return
            begin = _visible(text, max(begin + 1, _back(text, starts, end, self._overlap)))

    def _piece(self, text: str, starts: list[int], begin: int) -> tuple[int, int]:
        """Where the piece ends that begins at `begin`, and its tokens."""
        first = bisect_left(starts, begin)
        end = max(begin + 1, _end(text, starts, first, first + self.room))
        while True:
            (tokens,) = self.counts([text[begin:end].rstrip()])
            if tokens <= self.room or end - begin == 1:
                return end, tokens
            # By itself a part of a word may have more tokens than within it.
            fewer = bisect_left(starts, end) - (tokens - self.room)
            shorter = _end(text, starts, first, fewer) if fewer > first else begin
            end = shorter if shorter > begin else begin + (end - begin) // 2

    def _starts(self, text: str) -> list[int]:
        """The first character of each token; several tokens of one character begin together."""
        if self._lower:  # a few characters are two in lower case: these stay, for the places
            text = "".join(low if len(low := c.lower()) == 1 else c for c in text)
        return list(accumulate(self._tokenizer.starts(text), max))


def _end(text: str, starts: Sequence[int], first: int, last: int) -> int:
    """Where to cut among the tokens `first` to `last`, in their second half."""
    if last >= len(starts):
        return len(text)
    return cut_at(text, starts[(first + last) // 2], starts[last])


def _visible(text: str, begin: int) -> int:
    """The first character from `begin` on that is no space."""
    match = VISIBLE.search(text, begin)
    return match.start() if match else len(text)


def _back(text: str, starts: Sequence[int], end: int, overlap: int) -> int:
    """Where the piece after one that ends at `end` begins: at a word, if one is near."""
    if not overlap:
        return end
    back = starts[max(0, bisect_left(starts, end) - overlap)]
    word = WORD.search(text, back, (back + end) // 2 + 1)
    return word.start() if word else min(back, end)
