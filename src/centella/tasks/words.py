"""Token ids of words, remembered: for tokenizers to which a word between spaces is all there is.

BERT's normaliser and pre-tokeniser look at one character at a time, and split at spaces; WordPiece
looks at one word. So a text's ids are those of its words, and words that were met before are looked
up in a table (`word_table.py`), by several threads at once. New words are tokenised by the library,
many together. That takes longer than whole texts take it, and pays where words come again: while
most are new, the library has them.
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
from centella.tasks.word_table import NO_WORD, WIDTH, WordTable, bounds, keys_of, keys_of_words

if TYPE_CHECKING:
    import tokenizers

MARK = "\x01"  # a word between texts
BEHIND = " " * WIDTH  # the last word, so that its key can be read
TOGETHER = 64  # new words that are tokenised as one text
SPAN = 1 << 16  # characters that are looked at together: what of them a core's cache holds
FEW = 64  # words that the dictionary has as fast
MOST_WORDS, MOST_IDS, MOST_BYTES = 1 << 17, 1 << 20, 1 << 23  # that are remembered
WINDOW = 1 << 13  # words, of which half have to be known
REST = 1 << 20  # characters that the library has where they are not


class _Numbers(dict[bytes, int]):
    """Words by number, in the order in which they were met."""

    def __missing__(self, word: bytes) -> int:
        number = self[word] = len(self)
        return number


class _Memory:
    """The words that were met, and their ids: those of word n begin at `starts[n]`.

    Word 0 is none; word 1 is the mark between texts, whose ids end one text and begin the next.

    The numbers may be ahead of the ids, of which `add` gives the next: whoever is interrupted
    between the two leaves nothing that is wrong. What was added does not change: threads read it
    without a lock, of the words that are in the table.
    """

    def __init__(self, mark: Array) -> None:
        self.numbers = _Numbers()
        self.starts: Array = np.zeros(0, np.int64)
        self.sizes: Array = np.zeros(0, np.int64)
        self.ids: Array = np.zeros(0, np.uint32)
        self.keys: Array = np.zeros((0, 2), np.uint64)
        self.known = self.used = self.bytes = self.missed = 0
        for word, ids in ((b"", mark[:0]), (MARK.encode(), mark)):
            self.numbers[word]
            self.add([word], ids, np.array([len(ids)]))
        self.table = WordTable(self.keys[: self.known])

    def unknown(self) -> list[bytes]:
        """Words that have no ids yet."""
        return list(islice(self.numbers, self.known, None))

    def add(self, words: Sequence[bytes], ids: Array, sizes: Array) -> None:
        """The next words, with their ids."""
        known, used = self.known + len(sizes), self.used + len(ids)
        self.starts, self.sizes = _roomy(self.starts, known), _roomy(self.sizes, known)
        self.ids, self.keys = _roomy(self.ids, used), _roomy(self.keys, known)
        self.ids[self.used : used] = ids
        self.sizes[self.known : known] = sizes
        self.starts[self.known : known] = self.used + np.cumsum(sizes) - sizes
        self.keys[self.known : known] = keys_of_words(words)
        self.known, self.used, self.bytes = known, used, self.bytes + sum(map(len, words))

    def miss(self, words: int) -> None:
        """So many words were not in the table: make another one where they could have been."""
        self.missed += words
        if self.missed > self.known // 4:
            self.table, self.missed = WordTable(self.keys[: self.known]), 0

    @property
    def full(self) -> bool:
        """Whether it is to be begun anew."""
        return self.known > MOST_WORDS or self.used > MOST_IDS or self.bytes > MOST_BYTES


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
            texts: of few characters (`spans`).
        """
        joined = f" {MARK} ".join(("", *texts, BEHIND))
        if len(joined) > 2 * SPAN or self._between in joined or NO_WORD in joined:
            return None
        if self._rest > 0:
            self._rest -= len(joined)  # which another thread may undo: the ids are the same
            return None
        text = joined.encode()
        memory = self._memory
        numbers = self._numbers(memory, text, *bounds(text))
        marks = (numbers == 1).nonzero()[0]
        return self._tokens(memory, numbers, marks) if len(marks) == len(texts) + 1 else None

    def _numbers(self, memory: _Memory, text: bytes, starts: Array, lengths: Array) -> Array:
        """The numbers of words, which have ids then."""
        many = len(starts) >= FEW
        if many:
            numbers = memory.table.numbers(keys_of(text, starts, lengths))
        else:
            numbers = np.zeros(len(starts), np.int32)
        left = (numbers == 0).nonzero()[0]
        new = 0
        if len(left):
            ends = starts[left] + lengths[left]
            some = zip(starts[left].tolist(), ends.tolist(), strict=True)
            words = [text[start:end] for start, end in some]
            with self._lock:
                numbers[left] = [memory.numbers[word] for word in words]
                new = len(memory.numbers) - memory.known
                if new:
                    self._learn(memory)
                if many:
                    memory.miss(int((lengths[left] <= WIDTH).sum()))
                if memory.full:
                    self._memory = _Memory(self._mark)
        self._judge(len(starts), new)
        return numbers

    def _tokens(self, memory: _Memory, numbers: Array, marks: Array) -> Tokens:
        """The ids of words, end to end."""
        sizes = memory.sizes.take(numbers)
        ends = sizes.cumsum()
        away = memory.starts.take(numbers)
        away += sizes
        away -= ends
        places = away.repeat(sizes)
        places += np.arange(len(places))
        ids = memory.ids.take(places)
        starts = ends[marks[:-1]] - self._before
        counts = ends[marks[1:]] - sizes[0] + self._after - starts
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
        words = [word.decode() for word in new]
        runs = [between.join((*words[i : i + TOGETHER], "")) for i in range(0, len(new), TOGETHER)]
        ids = array.array("I")
        for encoding in self._native.encode_batch_fast(runs, add_special_tokens=False):
            ids.fromlist(encoding.ids)
        flat = np.frombuffer(ids, np.uint32)
        ends = np.flatnonzero(flat == self._between_id)
        sizes = np.diff(ends, prepend=-1) - 1
        memory.add(new, flat[flat != self._between_id], sizes)


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
    """An array with room for so many rows, twice as large as before where it has not."""
    if len(array) >= least:
        return array
    grown = np.zeros((max(least, 2 * len(array)), *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
