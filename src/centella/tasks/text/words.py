"""Token ids of words, remembered: for tokenizers to which a word is all there is (`word_cuts.py`).

A text's ids are those of its words, and words that were met before are looked up in a table
(`word_table.py`), by several threads at once; the words of a short text in a dictionary, without a
call of NumPy. New words are tokenised by the library, many together. That takes longer than whole
texts take it, and pays where words come again: while most are new, the library has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from centella.dtypes import Array
from centella.errors import MissingExtraError
from centella.host.forks import lock_of
from centella.tasks.text.tokens import Tokens
from centella.tasks.text.word_cuts import BEHIND, MARK, Cuts
from centella.tasks.text.word_table import LONG, NO_WORD, WordTable

if TYPE_CHECKING:
    import tokenizers

TOGETHER = 64  # new words that are tokenised as one text
SPAN = 1 << 19  # characters that are looked at together: between calls of NumPy threads wait
FEW = 1 << 11  # characters whose words a dictionary has sooner: calls of NumPy take a while
MOST_WORDS, MOST_IDS, MOST_CHARACTERS = 1 << 17, 1 << 20, 1 << 23  # that are remembered
MOST_LISTS = 1 << 15  # words whose ids are lists, too: 200 bytes each
WINDOW = 1 << 13  # words, of which half have to be known
REST = 1 << 20  # characters that the library has where they are not


class _Numbers(dict[str, int]):
    """Words by number, in the order in which they were met."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


class _Memory:
    """The words that were met, and their ids: those of word n begin at `starts[n]`.

    Word 0 is none; word 1 is the mark between texts, whose ids end one text and begin the next.

    The numbers may be ahead of the ids, of which `add` gives the next: whoever is interrupted
    between the two leaves nothing that is wrong. What was added does not change: threads read it
    without a lock, of the words that are in the table.

    Attributes:
        lists: of some words that have ids, these as a list.
    """

    def __init__(self, mark: Array) -> None:
        self.numbers = _Numbers()
        self.lists: dict[str, list[int]] = {}
        self.starts: Array = np.zeros(0, np.int64)
        self.sizes: Array = np.zeros(0, np.int64)
        self.ids: Array = np.zeros(0, np.uint32)
        self.known = self.used = self.characters = self.missed = 0
        for word, ids in (("", mark[:0]), (MARK, mark)):
            self.numbers[word]
            self.add([word], ids, np.array([len(ids)]))
        self.table = WordTable([b"", MARK.encode()])

    def unknown(self) -> list[str]:
        """Words that have no ids yet."""
        return list(islice(self.numbers, self.known, None))

    def forget(self) -> None:
        """Leave out the words that have no ids."""
        while len(self.numbers) > self.known:
            self.numbers.popitem()

    def add(self, words: Sequence[str], ids: Array, sizes: Array) -> None:
        """The next words, with their ids."""
        known, used = self.known + len(sizes), self.used + len(ids)
        self.starts, self.sizes = _roomy(self.starts, known), _roomy(self.sizes, known)
        self.ids = _roomy(self.ids, used)
        self.ids[self.used : used] = ids
        self.sizes[self.known : known] = sizes
        self.starts[self.known : known] = self.used + np.cumsum(sizes) - sizes
        characters = self.characters + sum(map(len, words))
        self.known, self.used, self.characters = known, used, characters

    def list_words(self, words: Sequence[str], numbers: Array) -> None:
        """Keep the ids of words that have some as lists."""
        starts = self.starts[numbers]
        if len(self.lists) + len(words) > MOST_LISTS:
            self.lists.clear()
        for word, start, end in zip(words, starts, starts + self.sizes[numbers], strict=True):
            self.lists[word] = self.ids[start:end].tolist()

    def miss(self, words: int) -> None:
        """So many words were not in the table: make another one where they could have been."""
        self.missed += words
        if self.missed > self.known // 4:
            known = [word.encode() for word in islice(self.numbers, self.known)]
            self.table, self.missed = WordTable(known), 0

    @property
    def full(self) -> bool:
        """Whether it is to be begun anew."""
        return self.known > MOST_WORDS or self.used > MOST_IDS or self.characters > MOST_CHARACTERS


def library() -> ModuleType:
    """The `tokenizers` package, which loads with the first tokenizer.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "models") from error
    return tokenizers


class Words:
    """Tokenises texts by their words; threads may share it.

    Args:
        native: a tokenizer to which words are independent.
        cuts: where its words are.
        before, after: the special tokens of a text.
        between: an added token that separates new words.
    """

    def __init__(
        self, native: tokenizers.Tokenizer, cuts: Cuts, before: Sequence[int],
        after: Sequence[int], between: str, between_id: int,
    ) -> None:  # fmt: skip
        self._native, self._cuts = native, cuts
        self._before, self._after = list(before), list(after)
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
        cuts = Cuts.of(native)
        if cuts is None:
            return None
        model: Any = native.model
        name = getattr(model, "unk_token", None)
        unknown = None if name is None else native.token_to_id(name)
        for id_, token in native.get_added_tokens_decoder().items():
            alone = not (token.single_word or token.lstrip or token.rstrip or token.normalized)
            if id_ != unknown and alone and token.content.split() == [token.content]:
                return cls(native, cuts, before, after, token.content, id_)
        return None

    def __call__(self, texts: Sequence[str]) -> Tokens | None:
        """The ids of texts that UTF-8 can hold; None where the library is to look at them whole.

        Args:
            texts: of few characters (`spans`).
        """
        together = "".join(texts)
        if len(together) > 2 * SPAN or NO_WORD in together:
            return None
        if self._rest > 0:
            self._rest -= len(together)  # which another thread may undo: the ids are the same
            return None
        tokens = self._of_few(self._memory, texts) if len(together) < FEW else None
        return self._of_many(self._memory, texts) if tokens is None else tokens

    def _of_few(self, memory: _Memory, texts: Sequence[str]) -> Tokens | None:
        """By the dictionary."""
        before, after, new = self._before, self._after, 0
        rows: list[list[str]] = []
        for text in texts:
            row = self._cuts.split(text)
            if row is None:
                return None
            rows.append(row)
        while True:
            ids_of = memory.lists.__getitem__
            try:
                ids = [[*before, *chain.from_iterable(map(ids_of, row)), *after] for row in rows]
            except KeyError:
                words = list(dict.fromkeys(chain.from_iterable(rows)))
                numbers, new = self._numbers(memory, words)
                memory.list_words(words, numbers)
            else:
                self._judge(sum(map(len, rows)), new)
                return Tokens.of(ids)

    def _of_many(self, memory: _Memory, texts: Sequence[str]) -> Tokens | None:
        """By the table, and by the dictionary the words that are not there."""
        mark = f"{self._cuts.between}{MARK}{self._cuts.between}"
        text = mark.join(("", *texts, BEHIND))
        data = text.encode()
        starts, lengths = self._cuts.bounds(text, data)
        numbers = memory.table.numbers(data, starts, lengths)
        left = np.flatnonzero(numbers == 0)
        new = 0
        if len(left):
            ends = starts[left] + lengths[left]
            some = zip(starts[left].tolist(), ends.tolist(), strict=True)
            words = [data[start:end].decode() for start, end in some]
            missed = int((lengths[left] <= LONG).sum())
            numbers[left], new = self._numbers(memory, words, missed)
        self._judge(len(starts), new)
        marks = (numbers == 1).nonzero()[0]
        return self._tokens(memory, numbers, marks) if len(marks) == len(texts) + 1 else None

    def _numbers(
        self, memory: _Memory, words: list[str], missed: int = 0
    ) -> tuple[Array, int]:  # fmt: skip
        """The numbers of words, which have ids then; and how many are new.

        Args:
            missed: how many could have been in the table.
        """
        with self._lock:
            numbers = np.fromiter(map(memory.numbers.__getitem__, words), np.int32, len(words))
            new = len(memory.numbers) - memory.known
            if new:
                try:
                    self._learn(memory)
                except BaseException:  # one that the library refuses is not to meet other texts
                    memory.forget()
                    raise
            if missed:
                memory.miss(missed)
            if memory.full:
                self._memory = _Memory(self._mark)
        return numbers, new

    def _tokens(self, memory: _Memory, numbers: Array, marks: Array) -> Tokens:
        """The ids of words, end to end."""
        sizes = memory.sizes.take(numbers)
        ends = sizes.cumsum()
        starts = ends[marks[:-1]] - len(self._before)
        counts = ends[marks[1:]] - sizes[0] + len(self._after) - starts
        if not sizes.all():
            some = np.flatnonzero(sizes)
            numbers, sizes, ends = numbers[some], sizes[some], ends[some]
        # From one id to the next: 1 in a word. `repeat` would make others wait.
        first = memory.starts.take(numbers)
        steps = np.ones(int(sizes.sum()), np.int64)
        steps[:1] = first[:1]
        steps[ends[:-1]] = first[1:] - first[:-1] - sizes[:-1] + 1
        return Tokens(memory.ids.take(steps.cumsum()), starts, counts, counts)

    def _judge(self, words: int, new: int) -> None:
        """Leave texts to the library for a while where most words were new."""
        self._met, self._new = self._met + words, self._new + new
        if self._met >= WINDOW:
            self._rest = REST if 2 * self._new > self._met else 0
            self._met, self._new = 0, 0

    def _learn(self, memory: _Memory) -> None:
        """Have the library tokenise the words that have no ids."""
        new = memory.unknown()
        between = f"{self._cuts.between}{self._between}{self._cuts.between}"
        runs = [new[first : first + TOGETHER] for first in range(0, len(new), TOGETHER)]
        ids, sizes = [], []
        together = self._library([between.join((*run, "")) for run in runs])
        for run, ids_of_run in zip(runs, together, strict=True):
            ends = np.flatnonzero(ids_of_run == self._between_id)
            if len(ends) == len(run):
                ids.append(ids_of_run[ids_of_run != self._between_id])
                sizes.append(np.diff(ends, prepend=-1) - 1)
            else:  # one of them has that token itself
                alone = self._library(run)
                ids += alone
                sizes.append(np.array([len(each) for each in alone]))
        memory.add(new, np.concatenate(ids), np.concatenate(sizes))

    def _library(self, texts: Sequence[str]) -> list[Array]:
        """The ids of texts by themselves."""
        encodings = self._native.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


def spans(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Neighbouring texts of at most `SPAN` characters together; a longer one is by itself."""
    if len(texts) == 1:
        yield texts
        return
    ends = np.fromiter(map(len, texts), np.int64, len(texts)).cumsum()
    first = before = 0
    while first < len(ends):
        end = max(int(ends.searchsorted(before + SPAN, "right")), first + 1)
        yield texts[first:end]
        first, before = end, int(ends[end - 1])


def _roomy(array: Array, least: int) -> Array:
    """An array with room for so many, twice as large as before where it has not."""
    if len(array) >= least:
        return array
    grown = np.zeros(max(least, 2 * len(array)), array.dtype)
    grown[: len(array)] = array
    return grown
