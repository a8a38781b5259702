"""Text to token ids and back, thin over the `tokenizers` library (loaded at first use)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from centella.errors import DTypeError, MissingExtraError, ShapeError, WeightsError

if TYPE_CHECKING:
    import tokenizers

T = TypeVar("T", dict[str, Any], list[Any])

_FILE = "tokenizer.json"


class Tokenizer:
    """The tokenizer of a model folder. It has no state that encoding changes: threads share it.

    Attributes:
        native: the `tokenizers.Tokenizer`; its own truncation and padding are off.
        pad_id: id of the padding token, None where the folder names none.
    """

    def __init__(
        self,
        native: tokenizers.Tokenizer,
        *,
        pad_id: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
    ) -> None:
        native.no_truncation()
        native.no_padding()
        self.native = native
        self.pad_id = pad_id
        self._side = truncation_side
        self._num_special = native.num_special_tokens_to_add(is_pair=False)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, pad_id={self.pad_id})"

    @classmethod
    def from_folder(cls, path: str | PathLike[str]) -> Tokenizer:
        """Read `tokenizer.json` of a model folder.

        Args:
            path: the folder. The padding token and the side that truncation cuts come from
                `tokenizer_config.json`, `special_tokens_map.json` or `config.json`.

        Raises:
            MissingExtraError: the `tokenizers` package is not installed.
            WeightsError: no `tokenizer.json`, or one that the library cannot read.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtraError("tokenizers", "models") from error
        folder = Path(path)
        file = folder / _FILE
        if not file.is_file():
            raise WeightsError(f"{file}: expected a tokenizer, got no such file")
        try:
            native = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise WeightsError(f"{file}: expected a tokenizer, got: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        side = config.get("truncation_side", "right")
        if side not in ("left", "right"):
            raise WeightsError(
                f"{folder / 'tokenizer_config.json'}: truncation_side: "
                f"expected 'left' or 'right', got {side!r}"
            )
        return cls(native, pad_id=_pad_id(folder, config, native), truncation_side=side)

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included."""
        return self.native.get_vocab_size(with_added_tokens=True)

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
            ShapeError: no room for the special tokens.
            UnicodeError: a text that is not valid Unicode.

        Source: `truncation=True` of transformers' `PreTrainedTokenizerFast`.
        """
        batch = _checked(texts)
        if max_length is not None and max_length < self._num_special:
            raise ShapeError(
                f"encode: max_length: expected at least {self._num_special} "
                f"(the special tokens), got {max_length}"
            )
        # Cut here and add special tokens after: the library's own truncation is shared state.
        encodings = self.native.encode_batch_fast(batch, add_special_tokens=False)
        if max_length is not None:
            room = max_length - self._num_special
            for encoding in encodings:
                if len(encoding) > room:
                    encoding.truncate(room, direction=self._side)
        return [self.native.post_process(encoding).ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        Args:
            ids: the ids.
            skip_special_tokens: leave out [CLS], [SEP], end-of-text and the like.
        """
        return self.native.decode(list(ids), skip_special_tokens=skip_special_tokens)


def max_length(folder: str | PathLike[str]) -> int:
    """The most tokens a text of a model folder may have, special tokens counted.

    `max_seq_length` of `sentence_bert_config.json`, else `model_max_length` of
    `tokenizer_config.json`, else `max_position_embeddings` of `config.json`; never above the
    last, which is the number of positions that the model has.

    Args:
        folder: the model folder.

    Raises:
        WeightsError: none of the three says it, or one is no positive whole number.

    Source: sentence-transformers' `Transformer` module.
    """
    root = Path(folder)
    places = (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
        ("config.json", "max_position_embeddings"),
    )
    lengths = [_positive(root / file, key) for file, key in places]
    said = [n for n in lengths if n is not None]
    if not said:
        wanted = ", ".join(f"{key} in {file}" for file, key in places)
        raise WeightsError(f"{root}: maximum length: expected one of {wanted}, got none of them")
    positions = lengths[-1]
    return said[0] if positions is None else min(said[0], positions)


def _checked(texts: Sequence[str]) -> list[str]:
    """The texts as a list of str that UTF-8 can hold."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
        raise DTypeError(f"encode: expected a sequence of str, got {type(texts).__name__}")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise DTypeError(f"encode: texts[{i}]: expected str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UnicodeError(
                f"encode: texts[{i}]: expected valid Unicode, got a lone surrogate "
                f"{error.object[error.start]!r} at {error.start}"
            ) from error
    return list(texts)


def _pad_id(folder: Path, config: dict[str, Any], native: tokenizers.Tokenizer) -> int | None:
    """The padding token's id: by name from the tokenizer's files, else from the model's."""
    for source in (config, read_json(folder / "special_tokens_map.json")):
        token = source.get("pad_token")
        content = token.get("content") if isinstance(token, dict) else token
        found = native.token_to_id(content) if isinstance(content, str) else None
        if found is not None:
            return found
    stored = read_json(folder / "config.json").get("pad_token_id")
    return stored if isinstance(stored, int) else None


def _positive(file: Path, key: str) -> int | None:
    """A whole number over 0 of a JSON file; transformers writes 1e30 for "no limit"."""
    value = read_json(file).get(key)
    if value is None:
        return None
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not whole or value < 1:
        raise WeightsError(f"{file}: {key}: expected a whole number over 0, got {value!r}")
    return int(value)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a model folder; {} where the file is missing.

    Raises:
        WeightsError: for a file that holds none.
    """
    return _read(file, dict)


def read_json_list(file: Path) -> list[Any]:
    """A JSON list of a model folder; [] where the file is missing.

    Raises:
        WeightsError: for a file that holds none.
    """
    return _read(file, list)


def _read(file: Path, kind: type[T]) -> T:
    """A JSON value of one kind; an empty one where the file is missing."""
    if not file.is_file():
        return kind()
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: expected JSON, got: {error}") from error
    if not isinstance(value, kind):
        wanted = "object" if kind is dict else kind.__name__
        raise WeightsError(f"{file}: expected a JSON {wanted}, got {type(value).__name__}")
    return value
