"""The tokenizer and chat template that a GGUF file carries.

Three kinds of vocabulary: "gpt2" (byte-level BPE with merges), "llama" (SentencePiece's BPE with
scores and bytes) and "bert" (WordPiece). How text is cut before BPE is named by
`tokenizer.ggml.pre`; llama.cpp has a pattern for each name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array
from centella.errors import WeightsError
from centella.tasks.chat.messages import ChatTemplate
from centella.tasks.text.tokenizer import Tokenizer
from centella.tasks.text.words import library
from centella.weights.gguf import GGUF
from centella.weights.model_files import known, show

if TYPE_CHECKING:
    import tokenizers

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_THREE, _ONE = rf"{_WORDS}\p{{N}}{{1,3}}{_REST}", rf"{_WORDS}\p{{N}}{_REST}"


def _by_case(end: str, digits: str) -> str:
    """Words begin at an upper-case letter after a lower-case one."""
    first = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{first}[{_UPPER}]*[{_LOWER}]+{end}|{first}[{_UPPER}]+[{_LOWER}]*{end}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Cut(Struct, frozen=True):
    """How text is cut before BPE, and what llama.cpp does of itself with such a vocabulary.

    Attributes:
        pattern: of pieces; None: GPT-2's own, which the library has.
        then_own: whether GPT-2's cuts the pieces further.
        whole: whether a piece that is a token is not merged from its bytes.
        begins: whether a text begins with the first token where the file does not say.
        composed: whether text is normalised to NFC.
    """

    pattern: str | None = None
    then_own: bool = False
    whole: bool = False
    begins: bool = False
    composed: bool = False


DIGITS = Cut(r"\p{N}", then_own=True)
# By `tokenizer.ggml.pre`.
CUTS: dict[str, Cut] = {
    "default": Cut(),
    "gpt-2": Cut(),
    "smollm": DIGITS,
    "refact": DIGITS,
    "llama-bpe": Cut(_THREE, whole=True, begins=True),
    "smaug-bpe": Cut(_THREE),
    "dbrx": Cut(_THREE),
    "qwen2": Cut(_ONE, composed=True),
    "deepseek-r1-qwen": Cut(_ONE),
    "tekken": Cut(_by_case("", r"\p{N}"), whole=True, begins=True),
    "gpt-4o": Cut(_by_case(_END, r"\p{N}{1,3}")),
}
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # kinds of tokens
# Control tokens that end a text or a turn, whether the file names them or not.
ENDS = frozenset(["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>"])
LONGEST = 1000  # bytes of a token of SentencePiece's: each of its cuts is looked up


def read_tokenizer(file: GGUF) -> Tokenizer | None:
    """The tokenizer of a file; None where it has no vocabulary.

    Raises:
        WeightsError: one of a kind that this library does not have, or a malformed one.
        MissingExtraError: the `tokenizers` package is not installed.
    """
    if file.values.get("tokenizer.ggml.tokens") is None:
        return None
    package, origin = library(), str(file.file)
    tokens = _tokens(file)
    model = file.values.get("tokenizer.ggml.model")
    builds = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _wordpiece}
    build = known(origin, "tokenizer.ggml.model", model, builds)
    kinds = _kinds(file, tokens)
    try:
        native = build(package, file, tokens)
        special = [t for t, k in zip(tokens, kinds, strict=True) if k == CONTROL]
        native.add_special_tokens([package.AddedToken(t, normalized=False) for t in special])
        added = [t for t, k in zip(tokens, kinds, strict=True) if k == USER]
        native.add_tokens([package.AddedToken(t, normalized=False) for t in added])
        _ends(package, native, file, tokens)
    except WeightsError:
        raise
    except BaseException as error:  # the library raises bare Exception, and Rust's panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise WeightsError(f"{origin}: expected a tokenizer, got: {show(str(error))}") from error
    return Tokenizer(native, pad_id=_id(file, "padding", len(tokens)), origin=origin)


def read_template(file: GGUF) -> ChatTemplate | None:
    """The chat template of a file; None where it has none."""
    source = file.values.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise WeightsError(
            f"{file.file}: tokenizer.chat_template: expected a string, got {show(source)}"
        )
    tokens = _tokens(file)
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {n: _id(file, key, len(tokens)) for n, key in names.items()}
    return ChatTemplate(
        source, {n: tokens[i] for n, i in ids.items() if i is not None}, str(file.file)
    )


def stop_ids(file: GGUF) -> frozenset[int]:
    """The tokens that end a text."""
    tokens = _tokens(file)
    named = [_id(file, name, len(tokens)) for name in ("eos", "eot", "eom")]
    ends = [i for i in np.flatnonzero(_kinds(file, tokens) == CONTROL) if tokens[i] in ENDS]
    return frozenset(int(i) for i in [*named, *ends] if i is not None)


def begin_id(file: GGUF) -> int | None:
    """The token that a text begins with."""
    return _id(file, "bos", len(_tokens(file)))


def _tokens(file: GGUF) -> list[str]:
    """The vocabulary; empty where there is none."""
    tokens = file.values.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise WeightsError(
            f"{file.file}: tokenizer.ggml.tokens: expected strings, got {show(tokens)}"
        )
    return tokens


def _kinds(file: GGUF, tokens: list[str]) -> Array:
    """The kind of each token."""
    kinds = file.values.get("tokenizer.ggml.token_type")
    if kinds is None:
        return np.full(len(tokens), NORMAL)
    if (
        not isinstance(kinds, np.ndarray)
        or kinds.shape != (len(tokens),)
        or kinds.dtype.kind == "f"
    ):
        raise WeightsError(
            f"{file.file}: tokenizer.ggml.token_type: expected {len(tokens)} whole numbers, got "
            f"{show(kinds)}"
        )
    return kinds


def _flag(file: GGUF, name: str, default: bool) -> bool:
    flag = file.values.get(f"tokenizer.ggml.{name}", default)
    if type(flag) is not bool:
        raise WeightsError(
            f"{file.file}: tokenizer.ggml.{name}: expected true or false, got {show(flag)}"
        )
    return flag


def _cut(file: GGUF) -> Cut:
    name = file.values.get("tokenizer.ggml.pre", "default")
    return known(str(file.file), "tokenizer.ggml.pre", name, CUTS)


def _id(file: GGUF, name: str, tokens: int) -> int | None:
    number = file.values.get(f"tokenizer.ggml.{name}_token_id")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < tokens:
        raise WeightsError(
            f"{file.file}: tokenizer.ggml.{name}_token_id: expected an id below {tokens}, got "
            f"{show(number)}"
        )
    return number


def _byte_level(library: Any, file: GGUF, tokens: list[str]) -> tokenizers.Tokenizer:
    """BPE over bytes, whose merges the file lists."""
    merges = file.values.get("tokenizer.ggml.merges")
    pairs = [tuple(m.split(" ", 1)) for m in merges] if isinstance(merges, list) else None
    if pairs is None or any(len(p) != 2 for p in pairs):
        raise WeightsError(f"{file.file}: tokenizer.ggml.merges: expected pairs of tokens")
    how = _cut(file)
    tokenizer: tokenizers.Tokenizer = library.Tokenizer(
        library.models.BPE({t: i for i, t in enumerate(tokens)}, pairs, ignore_merges=how.whole)
    )
    cut = library.pre_tokenizers
    own = how.pattern is None or how.then_own
    steps = [] if how.pattern is None else [cut.Split(library.Regex(how.pattern), "isolated")]
    steps.append(cut.ByteLevel(add_prefix_space=False, use_regex=own))
    tokenizer.pre_tokenizer = cut.Sequence(steps)
    tokenizer.decoder = library.decoders.ByteLevel()
    if how.composed:
        tokenizer.normalizer = library.normalizers.NFC()
    return tokenizer


def _sentencepiece(library: Any, file: GGUF, tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the pair whose token has the highest score is merged first."""
    scores = file.values.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or scores.shape != (len(tokens),):
        raise WeightsError(f"{file.file}: tokenizer.ggml.scores: expected {len(tokens)} numbers")
    longest = max(tokens, key=len, default="")
    if len(longest.encode()) > LONGEST:
        raise WeightsError(
            f"{file.file}: tokenizer.ggml.tokens: expected up to {LONGEST} bytes each, got "
            f"{show(longest)}"
        )
    ids = {t: i for i, t in enumerate(tokens)}
    ranked = sorted(_pairs(ids), key=lambda pair: (-scores[pair[2]], ids[pair[0]], ids[pair[1]]))
    unknown = _id(file, "unknown", len(tokens))
    tokenizer: tokenizers.Tokenizer = library.Tokenizer(
        library.models.BPE(
            ids, [(a, b) for a, b, _ in ranked], fuse_unk=True, byte_fallback=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )  # fmt: skip
    first = _flag(file, "add_space_prefix", True)
    change, undo = library.normalizers, library.decoders
    steps = [change.Prepend("▁")] if first else []
    tokenizer.normalizer = change.Sequence([*steps, change.Replace(" ", "▁")])
    back = [undo.Replace("▁", " "), undo.ByteFallback(), undo.Fuse()]
    tokenizer.decoder = undo.Sequence([*back, *([undo.Strip(" ", 1, 0)] if first else [])])
    return tokenizer


def _wordpiece(library: Any, file: GGUF, tokens: list[str]) -> tokenizers.Tokenizer:
    """A vocabulary of words, which files write with a "▁", and of their parts, without their "##".

    Text is lower-cased, and loses its accents, as llama.cpp has it with every such vocabulary.
    """
    unknown = _id(file, "unknown", len(tokens))
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        marked = token.startswith("[") and token.endswith("]")
        vocab.setdefault(token if marked else _word(token), i)
    tokenizer: tokenizers.Tokenizer = library.Tokenizer(
        library.models.WordPiece(vocab, unk_token="[UNK]" if unknown is None else tokens[unknown])
    )
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    return tokenizer


def _word(token: str) -> str:
    return token[1:] if token.startswith("▁") else f"##{token}"


def _pairs(ids: dict[str, int]) -> Iterator[tuple[str, str, int]]:
    """Every way to merge two tokens into a third, and which."""
    for token, number in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                yield left, right, number


def _ends(library: Any, native: Any, file: GGUF, tokens: list[str]) -> None:
    """Tokens that are added before and after a text."""
    model = file.values.get("tokenizer.ggml.model")
    words = model == "bert"
    default = words or model == "llama" or _cut(file).begins
    ids = {}
    for name, own, wanted in (("bos", "cls", default), ("eos", "seperator", words)):
        number = _id(file, own, len(tokens)) if words else None
        number = _id(file, name, len(tokens)) if number is None else number
        if number is not None and _flag(file, f"add_{name}_token", wanted):
            ids[name] = (tokens[number], number)
    if not ids:
        return
    begin, end = ids.get("bos"), ids.get("eos")
    template = [*([begin[0]] if begin else []), "$A", *([end[0]] if end else [])]
    native.post_processor = library.processors.TemplateProcessing(
        single=template, special_tokens=list(dict.fromkeys(ids.values()))
    )
