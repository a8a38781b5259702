"""Tokenizers of folders without tokenizer.json: a vocabulary, merges and added tokens as files.

Transformers wrote these before 2020, and its slow tokenizers still do. What such files leave to the
tokenizer's class is known here for BERT's and GPT-2's: `read_vocabulary` builds the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from centella.errors import WeightsError
from centella.tasks.text.words import library
from centella.weights.model_files import is_file, parse_json, read_bytes, read_json, show

if TYPE_CHECKING:
    import tokenizers

VOCAB, PAIRS, MERGES = "vocab.txt", "vocab.json", "merges.txt"
_MAX_BYTES = 30_000_000  # of each; the largest published has 10 MB
_VALUES = 160_000, 4  # of their JSON, and more for each token

Named = Mapping[str, str]  # special tokens by what they stand for: "cls_token"
BERT: Named = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}  # fmt: skip
GPT2: Named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
ROBERTA: Named = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>",
    "pad_token": "<pad>", "cls_token": "<s>", "mask_token": "<mask>",
}  # fmt: skip

# Special tokens by the name of the tokenizer's class, or the model's type.
_WORD_PIECES: dict[str, Named] = dict.fromkeys(("bert", "distilbert", "electra"), BERT)
_BYTE_PAIRS: dict[str, Named] = {"whisper": GPT2, "gpt2": GPT2, "roberta": ROBERTA}


def read_vocabulary(folder: Path, vocab_size: int) -> tuple[Path, tokenizers.Tokenizer] | None:
    """The tokenizer that the files of a folder describe, and the first file; None without them.

    Args:
        vocab_size: tokens of the model, by which the sizes of files are judged.

    Raises:
        WeightsError: a file that is malformed; `tokenizer_config.json` and `config.json` name no
            class whose rules are known.
        MissingExtraError: there is one, and the `tokenizers` package is not installed.
    """
    pairs = is_file(folder / PAIRS) and is_file(folder / MERGES)
    file = folder / (PAIRS if pairs else VOCAB)
    if not is_file(file):
        return None
    config = read_json(folder / "tokenizer_config.json")
    stated = config.get("tokenizer_class")
    name = (
        stated if isinstance(stated, str) else read_json(folder / "config.json").get("model_type")
    )
    key = str(name).lower().removesuffix("fast").removesuffix("tokenizer")
    rules = _BYTE_PAIRS if pairs else _WORD_PIECES
    if key not in rules:
        raise WeightsError(
            f"{folder}: expected tokenizer.json, or {file.name} of {', '.join(rules)}, got "
            f"{file.name} of {show(name)}; `AutoTokenizer.from_pretrained(folder)"
            f".save_pretrained(folder)` of transformers writes tokenizer.json"
        )
    special = _special_tokens(folder, config, rules[key])
    read = _byte_pairs if pairs else _word_pieces
    native = read(library(), folder, vocab_size, config, special)
    _add(folder, vocab_size, native, config, special)
    return file, native


def _special_tokens(folder: Path, config: Mapping[str, Any], usual: Named) -> dict[str, Any]:
    """What each special token is, a text or an object with its "content"."""
    saved = {**config, **read_json(folder / "special_tokens_map.json")}
    named = {n: v for n, v in saved.items() if n.endswith("_token") and _content(v) is not None}
    return {**usual, **named}


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _word_pieces(
    package: Any, folder: Path, vocab_size: int, config: Mapping[str, Any],
    special: Mapping[str, Any],
) -> tokenizers.Tokenizer:  # fmt: skip
    lines = _lines(folder / VOCAB)
    vocab = {token.rstrip("\r"): number for number, token in enumerate(lines)}
    unknown, first, last = (str(_content(special[f"{n}_token"])) for n in ("unk", "cls", "sep"))
    _expect(folder / VOCAB, vocab, vocab_size, (unknown, first, last))
    native = package.Tokenizer(
        package.models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100)
    )
    strip = config.get("strip_accents")
    native.normalizer = package.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars") is not False,
        strip_accents=strip if isinstance(strip, bool) else None,
        lowercase=config.get("do_lower_case") is not False,
    )
    native.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    native.post_processor = package.processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0", pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, vocab[first]), (last, vocab[last])],
    )  # fmt: skip
    native.decoder = package.decoders.WordPiece(prefix="##")
    return native  # type: ignore[no-any-return]


def _byte_pairs(
    package: Any, folder: Path, vocab_size: int, config: Mapping[str, Any],
    special: Mapping[str, Any],
) -> tokenizers.Tokenizer:  # fmt: skip
    raw = read_bytes(folder / PAIRS, _MAX_BYTES)
    vocab = parse_json(folder / PAIRS, raw, _VALUES[0] + _VALUES[1] * vocab_size)
    if not isinstance(vocab, dict) or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise WeightsError(f"{folder / PAIRS}: expected tokens and their ids, got {show(vocab)}")
    merges = list[tuple[str, str]]()
    for number, line in enumerate(_lines(folder / MERGES), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise WeightsError(
                f"{folder / MERGES}: line {number}: expected two tokens of {PAIRS} that are one "
                f"together, got {show(line)}"
            )
        merges.append((left, right))
    native = package.Tokenizer(package.models.BPE(vocab, merges))
    space = config.get("add_prefix_space") is True
    native.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=space)
    native.decoder = package.decoders.ByteLevel()
    if "cls_token" in special:  # of RoBERTa; the others add nothing
        ends = [str(_content(special[f"{n}_token"])) for n in ("sep", "cls")]
        _expect(folder / PAIRS, vocab, vocab_size, ends)
        (last, at_last), (first, at_first) = ((token, vocab[token]) for token in ends)
        native.post_processor = package.processors.RobertaProcessing(
            (last, at_last), (first, at_first), trim_offsets=True, add_prefix_space=space
        )
    return native  # type: ignore[no-any-return]


def _lines(file: Path) -> list[str]:
    try:
        return read_bytes(file, _MAX_BYTES).decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise WeightsError(f"{file}: expected UTF-8, got {error.reason}") from error


def _expect(file: Path, vocab: Mapping[str, int], most: int, tokens: Any) -> None:
    for token in tokens:
        if token not in vocab:
            raise WeightsError(f"{file}: expected the special token {token!r}, got none")
    if len(vocab) > most:
        raise WeightsError(f"{file}: expected at most {most} tokens, got {len(vocab)}")


def _add(
    folder: Path, vocab_size: int, native: tokenizers.Tokenizer, config: Mapping[str, Any],
    special: Mapping[str, Any],
) -> None:  # fmt: skip
    """The tokens of added_tokens.json at their ids, and the special ones."""
    package, file = library(), folder / "added_tokens.json"
    added = read_json(file)
    if not all(type(i) is int and 0 <= i < vocab_size for i in added.values()):
        raise WeightsError(f"{file}: expected tokens and ids below {vocab_size}, got {show(added)}")
    saved = read_json(folder / "special_tokens_map.json")
    several = saved.get("additional_special_tokens", config.get("additional_special_tokens"))
    others = several if isinstance(several, list) else []
    options = {text: t for t in (*special.values(), *others) if (text := _content(t)) is not None}

    def token(text: str) -> Any:
        known = options.get(text)
        flags = {n: v for n, v in known.items() if n in ("lstrip", "rstrip", "single_word")
                 and isinstance(v, bool)} if isinstance(known, dict) else {}  # fmt: skip
        if text == "<mask>":  # RoBERTa's takes the space before it
            flags = {"lstrip": True, **flags}
        is_special = text in options
        return package.AddedToken(text, special=is_special, normalized=not is_special, **flags)

    for text, number in sorted(added.items(), key=lambda item: int(item[1])):
        native.add_tokens([token(text)])
        if native.token_to_id(text) != number:
            raise WeightsError(
                f"{file}: {show(text)}: expected id {native.token_to_id(text)}, got {number}"
            )
    native.add_tokens([token(t) for t in options if native.token_to_id(t) is not None])
