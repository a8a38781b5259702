"""Token ids of words, remembered: for tokenizers to which a word between spaces is all there is.

BERT's normaliser and pre-tokeniser look at one character at a time, and split at spaces; WordPiece
looks at one word. So a text's ids are those of its words, and a word that was met before costs one
look-up in a dictionary. New words are tokenised by the library, many together. That takes longer
than whole texts take it, and pays where words come again: while most are new, the library has them.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from centella.dtypes import Array
from centella.host.forks import lock_of
from centella.tasks.tokens import Tokens

if TYPE_CHECKING:
    import tokenizers

MARK = "\ud800"  # between texts: a lone surrogate, which no text has
TOGETHER = 64  # new words that are tokenised as one text
SPAN = 1 << 16  # characters that are split at once, while other threads wait
MOST_WORDS, MOST_IDS, MOST_CHARACTERS = 1 << 17, 1 << 20, 1 << 23  # that are remembered
WINDOW = 1 << 13  # words, of which half have to be known
REST = 1 << 20  # characters that the library has where they are not


class _Numbers(dict[str, int]):
    """Words by number, in the order in which they were met."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


class _Memory:
    """The words that were met, and their ids: those of word n begin at `starts[n]`.

    Word 0 is the mark between texts, whose ids end one text and begin the next.

    The numbers may be ahead of the ids, of which `add` gives the next: whoever is interrupted
    between the two leaves nothing that is wrong.
    """

    def __init__(self, mark: Array) -> None:
        self.numbers = _Numbers({MARK: 0})
        self.starts: Array = np.zeros(1, np.int64)
        self.sizes: Array = np.full(1, len(mark), np.int64)
        self.ids: Array = mark
        self.known, self.used, self.characters = 1, len(mark), 0

    def unknown(self) -> list[str]:
        """Words that have no ids yet."""
        return list(islice(self.numbers, self.known, None))

    def add(self, ids: Array, sizes: Array, characters: int) -> None:
        """The ids of the next words."""
        known, used = self.known + len(sizes), self.used + len(ids)
        self.starts, self.sizes = _roomy(self.starts, known), _roomy(self.sizes, known)
        self.ids = _roomy(self.ids, used)
        self.ids[self.used : used] = ids
        self.sizes[self.known : known] = sizes
        self.starts[self.known : known] = self.used + np.cumsum(sizes) - sizes
        self.known, self.used, self.characters = known, used, self.characters + characters

    @property
    def full(self) -> bool:
        """Whether it is to be begun anew."""
        return self.known > MOST_WORDS or self.used > MOST_IDS or self.characters > MOST_CHARACTERS


class Words:
    """Tokenises texts by their words; threads may share it.

    Args:
        native: a tokenizer to which words are independent.
        before, after: the special tokens of a text.
        between: an added token that separates new words.
    """

    def __init__(
        self, native: tokenizers.Tokenizer, before: Sequence[int], after: Sequence[int],
        between: str, between_id: int,
    ) -> None:  # fmt: skip
        self._native = native
        self._before, self._after = len(before), len(after)
        self._mark = np.array([*after, *before], np.uint32)
        self._between, self._between_id = between, between_id
        self._memory = _Memory(self._mark)
        self._lock = lock_of(self)
        self._met, self._new = 0, 0  # words of a window
        self._rest = 0  # characters that are still left to the library

    @classmethod
    def of(
        cls, native: tokenizers.Tokenizer, before: Sequence[int], after: Sequence[int]
    ) -> Words | None:  # fmt: skip
        """For a tokenizer, if words are independent to it."""
        import tokenizers

        parts = (
            (native.normalizer, (tokenizers.normalizers.BertNormalizer, type(None))),
            (native.pre_tokenizer, (tokenizers.pre_tokenizers.BertPreTokenizer,)),
            (native.model, (tokenizers.models.WordPiece,)),
        )
        added: dict[int, Any] = native.get_added_tokens_decoder()
        if not all(type(part) in kinds for part, kinds in parts):
            return None
        if any(t.content.split() != [t.content] or t.normalized for t in added.values()):
            return None
        model: Any = native.model
        unknown = native.token_to_id(model.unk_token)
        for id_, token in added.items():
            if id_ != unknown and not token.single_word:
                return cls(native, before, after, token.content, id_)
        return None

    def __call__(self, texts: Sequence[str]) -> Tokens | None:
        """The ids of texts that UTF-8 can hold; None where the library is to look at them whole.

        Args:
            texts: of few characters (`spans`), since other threads wait.
        """
        joined = f" {MARK} ".join(("", *texts, ""))
        if len(joined) > 2 * SPAN or self._between in joined:
            return None
        with self._lock:
            if self._rest > 0:
                self._rest -= len(joined)
                return None
        for space in "\n\t\r":
            joined = joined.replace(space, " ")
        words = joined[1:-1].split(" ")
        with self._lock:
            return self._tokens(words)

    def _tokens(self, words: list[str]) -> Tokens:
        memory = self._memory
        numbers = np.fromiter(map(memory.numbers.__getitem__, words), np.int64, len(words))
        new = len(memory.numbers) - memory.known
        if new:
            self._learn(memory)
        self._judge(len(words), new)
        sizes = memory.sizes[numbers]
        ends = sizes.cumsum()
        away = (memory.starts[numbers] - ends + sizes).repeat(sizes)
        ids = memory.ids[away + np.arange(len(away))]
        marks = (numbers == 0).nonzero()[0]
        starts = ends[marks[:-1]] - self._before
        counts = ends[marks[1:]] - sizes[0] + self._after - starts
        if memory.full:
            self._memory = _Memory(self._mark)
        return Tokens(ids, starts, counts, counts)

    def _judge(self, words: int, new: int) -> None:
        """Leave texts to the library for a while where most words were new."""
        self._met, self._new = self._met + words, self._new + new
        if self._met >= WINDOW:
            self._rest = REST if 2 * self._new > self._met else 0
            self._met, self._new = 0, 0

    def _learn(self, memory: _Memory) -> None:
        """Have the library tokenise the words that have no ids."""
        new = memory.unknown()
        between = f" {self._between} "
        runs = [between.join((*new[i : i + TOGETHER], "")) for i in range(0, len(new), TOGETHER)]
        ids = array.array("I")
        for encoding in self._native.encode_batch_fast(runs, add_special_tokens=False):
            ids.fromlist(encoding.ids)
        flat = np.frombuffer(ids, np.uint32)
        ends = np.flatnonzero(flat == self._between_id)
        sizes = np.diff(ends, prepend=-1) - 1
        memory.add(flat[flat != self._between_id], sizes, sum(map(len, runs)))


def spans(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Neighbouring texts of at most `SPAN` characters together; a longer one is by itself."""
    first = characters = 0
    for i, text in enumerate(texts):
        characters += len(text)
        if characters > SPAN and i > first:
            yield texts[first:i]
            first, characters = i, len(text)
    if len(texts) > first:
        yield texts[first:]


def _roomy(array: Array, least: int) -> Array:
    """An array with room for so many, twice as large as before where it has not."""
    if len(array) >= least:
        return array
    grown = np.zeros(max(least, 2 * len(array)), array.dtype)
    grown[: len(array)] = array
    return grown
