"""Text to token ids and back, thin over the `tokenizers` library (loaded at first use)."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella.errors import ShapeError, WeightsError
from centella.tasks.text.check_texts import checked_texts
from centella.tasks.text.special import Special
from centella.tasks.text.tokens import Tokens, longest_first
from centella.tasks.text.typed_errors import TypedErrors
from centella.tasks.text.vocabulary_files import PAIRS, VOCAB, read_vocabulary
from centella.tasks.text.words import Words, library, spans
from centella.weights.folder import TOKENIZER
from centella.weights.model_files import check_values, is_file, kind, read_bytes, read_json, show

if TYPE_CHECKING:
    import tokenizers

_CONFIG = "tokenizer_config.json"
_MAX_BYTES = 100_000_000  # of that file; the largest published have 33 MB
_VALUES = 160_000, 8  # that its JSON may have, and more for each token; a merge has three
_UNKNOWN = 2**18  # tokens of a vocabulary whose size is not known


class Encoded(Struct, frozen=True):
    """A text, or a pair, as tokens.

    Attributes:
        ids: of the tokens; types: of each the part of a pair, 0 or 1.
        offsets: first and last character of each in its text; special: whether it is none of it.
    """

    ids: list[int]
    types: list[int]
    offsets: list[tuple[int, int]]
    special: list[bool]


class Tokenizer:
    """The tokenizer of a model folder. Threads share it: what it remembers changes no result.

    Attributes:
        native: the `tokenizers.Tokenizer`; its own truncation and padding are off. To be changed
            before the first text is encoded, since ids of words are remembered.
        pad_id: id of the padding token, None where the folder names none.
        num_special: special tokens that a text gets.
        origin: the file that it is from, for errors.
        pad_origin: the file that names the padding token, for errors.
    """

    def __init__(
        self, native: tokenizers.Tokenizer, *, pad_id: int | None = None,
        truncation_side: Literal["left", "right"] = "right", origin: str = "tokenizer",
        pad_origin: str = "tokenizer",
    ) -> None:  # fmt: skip
        native.no_truncation()
        native.no_padding()
        self.native = native
        self.pad_id = pad_id
        self.origin = origin
        self.pad_origin = pad_origin
        self.side: Literal["left", "right"] = truncation_side
        self._around: tuple[()] | tuple[list[int], list[int]] | None = None  # not looked for yet
        self._words: Words | None = None
        self.num_special: int = native.num_special_tokens_to_add(is_pair=False)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, pad_id={self.pad_id})"

    @classmethod
    def from_folder(cls, path: str | PathLike[str], vocab_size: int = _UNKNOWN) -> Tokenizer:
        """Read `tokenizer.json` of a model folder, or the files that stand for it.

        Args:
            path: the folder. Without tokenizer.json a tokenizer of BERT, DistilBERT or ELECTRA is
                read from vocab.txt, one of RoBERTa, GPT-2 or Whisper from vocab.json and
                merges.txt. The padding token and the side that truncation cuts come from
                `tokenizer_config.json`, `special_tokens_map.json` or `config.json`.
            vocab_size: tokens of the model, by which the size of the file is judged.

        Raises:
            MissingExtraError: the `tokenizers` package is not installed.
            WeightsError: no tokenizer, one that the library cannot read, or one that is too large
                for the vocabulary.
        """
        folder = Path(path)
        file, native = _native(folder, vocab_size)
        config = read_json(folder / _CONFIG)
        side = config.get("truncation_side", "right")
        if side not in ("left", "right"):
            raise WeightsError(
                f"{folder / _CONFIG}: truncation_side: expected 'left' or 'right', got {show(side)}"
            )
        pad_origin, pad_id = _pad_id(folder, config, native)
        with TypedErrors(f"{file}: expected a tokenizer"):
            return cls(
                native, pad_id=pad_id, truncation_side=side,
                origin=str(file), pad_origin=str(pad_origin),
            )  # fmt: skip

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included."""
        return self.native.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        added = self.native.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def written(self) -> Special:
        """Special tokens that stand in texts."""
        return Special(self.native)

    @cached_property
    def plain(self) -> Tokenizer:
        """The same, for which no text is a special token."""
        return Tokenizer(self.written.plain, pad_id=self.pad_id, origin=self.origin)

    def encode(self, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Token ids of each text, special tokens included, no padding.

        Args:
            texts: the texts, any length, any characters.
            max_length: most ids a text may have, special tokens counted; the text's own tokens
                are cut, the special ones stay. None: never cut.

        Returns:
            One list of ids a text.

        Raises:
            DTypeError: a text that is no `str`, or one `str` in place of a sequence.
            ShapeError: no room for the special tokens; a text that is not valid Unicode.
            WeightsError: the tokenizer's file has no way to encode the texts.

        Source: `truncation=True` of transformers' `PreTrainedTokenizerFast`.
        """
        return self.tokens(texts, max_length).lists()

    def tokens(self, texts: Sequence[str], max_length: int | None = None) -> Tokens:
        """As `encode`, end to end, and beside it the ids that each text has when it is not cut."""
        return self.tokens_of(checked_texts(texts), max_length)

    def tokens_of(self, checked: list[str], max_length: int | None = None) -> Tokens:
        """As `tokens`, of texts that `checked_texts` gave."""
        if max_length is not None and max_length < self.num_special:
            raise ShapeError(
                f"encode: max_length: expected at least {self.num_special} "
                f"(the special tokens), got {max_length}"
            )
        most = sys.maxsize if max_length is None else max_length
        with TypedErrors(f"{self.origin}: expected to encode texts"):
            if self._around is None:
                self._around = _around(self.native) or ()
                self._words = Words.of(self.native, *self._around) if self._around else None
            if not self._around:
                return self._processed(checked, most)
            tokens = self._whole(checked, *self._around)
        return tokens.cut(most, self.side, *self._around)

    def _whole(self, texts: Sequence[str], before: list[int], after: list[int]) -> Tokens:
        """Ids of texts between special ones, not cut."""
        if self._words is None:
            return self._surrounded(texts, before, after)
        parts = []
        for some in spans(texts):
            tokens = self._words(some)
            parts.append(self._surrounded(some, before, after) if tokens is None else tokens)
        return Tokens.joined(parts)

    def _surrounded(self, texts: Sequence[str], before: list[int], after: list[int]) -> Tokens:
        """As `_whole`, by the library alone."""
        ids, ends = array.array("I"), []
        for encoding in self.native.encode_batch_fast(texts, add_special_tokens=False):
            ids.fromlist(before)
            ids.fromlist(encoding.ids)
            ids.fromlist(after)
            ends.append(len(ids))
        counts = np.diff(np.array(ends, np.int64), prepend=0)
        return Tokens(np.frombuffer(ids, np.uint32), np.cumsum(counts) - counts, counts, counts)

    def _processed(self, texts: Sequence[str], most: int) -> Tokens:
        """Ids of texts, cut, to which the library adds special ones."""
        # Cut here and add special tokens after: the library's own truncation is shared state.
        encodings = self.native.encode_batch_fast(texts, add_special_tokens=False)
        counts = [len(encoding) + self.num_special for encoding in encodings]
        for encoding in encodings:
            encoding.truncate(most - self.num_special, direction=self.side)
        tokens = Tokens.of([self.native.post_process(encoding).ids for encoding in encodings])
        return replace(tokens, counts=np.array(counts, np.int64))

    def starts(self, text: str) -> list[int]:
        """The first character of each token of a text, without special tokens.

        Raises:
            DTypeError, ShapeError, WeightsError: as `encode`.
        """
        (checked,) = checked_texts([text])
        with TypedErrors(f"{self.origin}: expected to encode texts"):
            return [
                start for start, _ in self.native.encode(checked, add_special_tokens=False).offsets
            ]

    def encode_whole(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        max_length: int | None = None,
    ) -> list[Encoded]:
        """Tokens of each text, or of each text and its pair, with special tokens and offsets.

        Args:
            texts: the texts; pairs: of each the other, as many.
            max_length: as for `encode`; of a pair the longer text is cut, then both.

        Raises:
            DTypeError, ShapeError, WeightsError: as `encode`.

        Source: `truncation="longest_first"` of transformers.
        """
        both = pairs is not None
        room = self.room(max_length, pair=both)
        first, second = checked_texts(texts), checked_texts(pairs or [])
        with TypedErrors(f"{self.origin}: expected to encode texts"):
            lefts: Sequence[Any] = self.native.encode_batch(first, add_special_tokens=False)
            rights: Sequence[Any] = self.native.encode_batch(second, add_special_tokens=False)
            encodings = []
            counts = [np.array([len(e) for e in side], np.int64) for side in (lefts, rights)]
            kept = longest_first(counts[0], counts[1] if both else 0 * counts[0], room)
            for i, left in enumerate(lefts):
                right = rights[i] if both else None
                for encoding, size in ((left, int(kept[0][i])), (right, int(kept[1][i]))):
                    if encoding is not None and len(encoding) > size:
                        encoding.truncate(size, direction=self.side)
                encodings.append(self.native.post_process(left, right))
        return [
            Encoded(e.ids, e.type_ids, e.offsets, [bool(s) for s in e.special_tokens_mask])
            for e in encodings
        ]

    def room(self, max_length: int | None, pair: bool) -> int:
        """Tokens that a text, or the two of a pair, may have beside the special ones.

        Raises:
            ShapeError: not even these fit.
        """
        special = self.native.num_special_tokens_to_add(is_pair=pair)
        if max_length is not None and max_length < special:
            raise ShapeError(
                f"encode: max_length: expected at least {special} (the special tokens), "
                f"got {max_length}"
            )
        return sys.maxsize if max_length is None else max_length - special

    def bare(self, texts: Sequence[str]) -> Tokens | None:
        """Ids without special tokens, not cut; None where these are not around a text.

        Raises:
            DTypeError, ShapeError, WeightsError: as `encode`.
        """
        tokens = self.tokens(texts)
        if not self._around:
            return None
        before, after = map(len, self._around)
        lengths = tokens.lengths - before - after
        return Tokens(tokens.ids, tokens.starts + before, lengths, lengths)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        Args:
            ids: the ids.
            skip_special_tokens: leave out [CLS], [SEP], end-of-text and the like.

        Raises:
            WeightsError: the tokenizer's file has no way to decode them.
        """
        with TypedErrors(f"{self.origin}: expected a tokenizer that decodes all tokens"):
            return self.native.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def check_pad_id(self, vocab_size: int) -> None:
        """Refuse a padding token that a model of so many tokens has no vector for.

        Raises:
            WeightsError: it has none.
        """
        if self.pad_id is not None and not 0 <= self.pad_id < vocab_size:
            raise WeightsError(
                f"{self.pad_origin}: padding token: expected an id from 0 to {vocab_size - 1}, "
                f"below the vocab_size of the model, got {self.pad_id}"
            )

    def check_ids(self, tokens: Tokens, vocab_size: int) -> None:
        """Refuse ids that a model of so many tokens has no vector for.

        Raises:
            WeightsError: there is one, with its token.
        """
        ids = tokens.ids
        if not len(ids) or ids[ids.argmax()] < vocab_size:
            return
        most = max(
            (max(ids) for ids in tokens.lists() if ids), default=-1
        )  # of those that are read
        if most >= vocab_size:
            token = self.native.id_to_token(most)
            raise WeightsError(
                f"{self.origin}: token {show(token)}: expected an id below {vocab_size}, the "
                f"vocab_size of the model, got {most}"
            )


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | Path:
    """The tokenizer of a folder; the path of the file, if the folder has none.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: there is one, and its library is not installed.
    """
    file = folder / TOKENIZER
    if kind(file) != "nothing at that path" or any(is_file(folder / n) for n in (VOCAB, PAIRS)):
        return Tokenizer.from_folder(folder, vocab_size)
    return file


def _native(folder: Path, vocab_size: int) -> tuple[Path, tokenizers.Tokenizer]:
    """The library's tokenizer of a folder, and the file that it is from."""
    package, file = library(), folder / TOKENIZER
    if is_file(file):
        raw = read_bytes(file, _MAX_BYTES)
        check_values(file, raw, _VALUES[0] + _VALUES[1] * vocab_size)
        with TypedErrors(f"{file}: expected a tokenizer"):
            return file, package.Tokenizer.from_buffer(raw)
    problem = kind(file).replace("nothing at that path", "no such file")
    if problem == "no such file":
        with TypedErrors(f"{folder}: expected a tokenizer"):
            parts = read_vocabulary(folder, vocab_size)
        if parts is not None:
            return parts
    raise WeightsError(f"{file}: expected a tokenizer, got {problem}")


def _around(native: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens before and after a text; None where others than these are added."""
    own = native.encode("a", add_special_tokens=False)
    ids = list(own.ids)
    whole = native.post_process(own).ids
    special = native.num_special_tokens_to_add(is_pair=False)
    if not ids or len(whole) != special + len(ids):
        return None
    matches = (n for n in range(special + 1) if whole[n : n + len(ids)] == ids)
    return next(((whole[:n], whole[n + len(ids) :]) for n in matches), None)


def _pad_id(
    folder: Path, config: dict[str, Any], native: tokenizers.Tokenizer
) -> tuple[Path, int | None]:
    """The padding token's id, and who names it: the tokenizer's files by name, else the model's."""
    special = folder / "special_tokens_map.json"
    for file, source in ((folder / _CONFIG, config), (special, read_json(special))):
        token = source.get("pad_token")
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str):
            continue
        try:
            pad = native.token_to_id(content)
        except UnicodeEncodeError as error:
            raise WeightsError(
                f"{file}: pad_token: expected valid Unicode, got {show(content)}"
            ) from error
        if pad is not None:
            return file, pad
    model = folder / "config.json"
    stored = read_json(model).get("pad_token_id")
    return model, stored if type(stored) is int else None
