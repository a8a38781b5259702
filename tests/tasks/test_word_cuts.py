"""Words of ByteLevel BPE and Unigram have the ids that the library gives to whole texts."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from centella.errors import WeightsError
from centella.tasks.text import words
from centella.tasks.text.tokenizer import Tokenizer
from centella.tasks.text.word_cuts import PATTERNS, Cuts

tokenizers = pytest.importorskip("tokenizers")
# A map of sentencepiece's: white space to a space, some characters to none, a ligature and a
# composition, and others to a space with marks behind it.
CHARACTERS = (
    "eNoV0wdsTVEcx/HfvZU0FSIREhKRF3vWpiL23pvahFZr7z3uU+PRUqXlWX2t2dKaxUNRKuazV59NE2K2Zooa33uTT373"
    "/k/OPefec46KSCojBRaXfVkGfDLlDJKSSksleQ6AFWHKKmcqvbJUtDmFplJKWSmonhTVXXLSvwTlQCTTN5E2SpYn1FR0"
    "pOQuRn9vgPIKTXlDTMXSyOut8gyalmXKQVZEBTCEKqEqqqA6qqEmaqA2aqEOgpFZylRdsgHqoxEaogkag6kqBM2Q8lJi"
    "+jqUY6ol2QKt0Qpt0Qbt0Q4d0QGd0Qld0QV8rrqhJ3qgN3qhL/qgP/phIAZgEEIxBIMxDEMxAsMxCiMxGmFppsLIMRiL"
    "cPD7FIHxGIeJmIDJmISpmILpmIaZmIHZmIW5mIP5mIeFWIDFWASnvfCIwhIsw1KswHKshAvRWIXViEEs1iAOa7Ee65CA"
    "eGzEBmyCG1uwGduwFR4kIhlJ2IHt2IWd2IPdSLXXDfuwF+n2nsEB7LfXEgdxBIdxFBk4jmM4AS9O4SRO23sGZ3EG55CF"
    "bJy3uQxdIC/hIq7gMq7hKq7Dh5u4gdu4hbu4g/u4h4d4AD9y8BiP8BRP8BzPwJbUC+TilS3DUG6moTfcv8Zb5MUbek++"
    "w0d8sGv4hM/Ix1d8wXd8s2sFhn6QP1GA3/iFPyjEP/y1T71DDp9LDn+MP47DEB6p7FTle9yW/gPzD6T8"
)
PARTS = [
    *(" ", " ", " ", "  ", "\n", "\t", "\r\n", "\x07", "\x01", "\x1c", "\x7f", "\x85", "\xa0"),
    *("\u2003", "\u2028", "\u3000", "\u200b", "\u200d", "\ufeff", "\xad", "\u2581", "\u0600"),
    *("\xa8", "\ufb01", "\u0301", "e\u0301", "\xe9", "\ufc5e", "\u0e33", "\uff9e", "\u093e"),
    *("\uff21", "\U0001f600", "\U0001f600\ufe0f", "\u4f60\u597d", "\ud55c", "\u1100", "\u1161"),
    *("storm", "lake", "number", "the", "don't", "I'LL", "12", "345", "\u0664", "\xbd", "-", "..."),
    *("<s>", "</s>", "<mask>", "<pad", "x" * 70, "_", "'", "\U000e0001", "\u180e", "\U0001f1e6"),
]
PLAIN = [part for part in PARTS if part.isprintable() and " " not in part]
CORPUS = [f"the storm number {i} came over lake {7 * i}, don't go!\n" for i in range(60)]
CORPUS += ["".join(PARTS), " ".join(PARTS)]


def byte_level(pattern: str = "", *, digits: bool = False, normal: Any = None) -> Any:
    pre = tokenizers.pre_tokenizers
    native = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps = [pre.ByteLevel(add_prefix_space=False, use_regex=not pattern)]
    if pattern:
        steps.insert(0, pre.Split(tokenizers.Regex(pattern), "isolated"))
    if digits:
        steps.insert(0, pre.Digits(individual_digits=True))
    native.pre_tokenizer = pre.Sequence(steps) if len(steps) > 1 else steps[0]
    native.normalizer = normal
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<s>", "</s>", "<unk>"],
    )  # fmt: skip
    native.train_from_iterator(CORPUS, trainer)
    return native


def unigram(*, white: bool, normal: Any = None) -> Any:
    pre = tokenizers.pre_tokenizers
    native = tokenizers.Tokenizer(tokenizers.models.Unigram())
    meta = pre.Metaspace(prepend_scheme="always")
    native.pre_tokenizer = pre.Sequence([pre.WhitespaceSplit(), meta]) if white else meta
    native.normalizer = normal
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=150, unk_token="<unk>", special_tokens=["<s>", "</s>", "<unk>"],
        show_progress=False,
    )  # fmt: skip
    native.train_from_iterator(CORPUS, trainer)
    return native


def precompiled() -> Any:
    return tokenizers.normalizers.Precompiled(zlib.decompress(base64.b64decode(CHARACTERS)))


def as_bge_m3() -> Any:
    norms = tokenizers.normalizers
    spaces = norms.Replace(tokenizers.Regex(" {2,}"), "\u2581")
    return norms.Sequence([precompiled(), norms.Strip(left=False, right=True), spaces])


KINDS: dict[str, Callable[[], Any]] = {
    "gpt2": byte_level,
    "qwen": lambda: byte_level(PATTERNS[0], normal=tokenizers.normalizers.NFC()),
    "llama3": lambda: byte_level(PATTERNS[1]),
    "digits": lambda: byte_level(digits=True),
    "xlm-roberta": lambda: unigram(white=True, normal=precompiled()),
    "bge-m3": lambda: unigram(white=False, normal=as_bge_m3()),
    "unigram": lambda: unigram(white=False),
    "nfkc": lambda: unigram(white=True, normal=tokenizers.normalizers.NFKC()),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    natives = {}
    for kind, make in KINDS.items():
        native = make()
        mask = tokenizers.AddedToken("<mask>", lstrip=True, normalized=kind == "xlm-roberta")
        native.add_special_tokens([mask])
        ids = [(name, native.token_to_id(name)) for name in ("<s>", "</s>")]
        native.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=ids
        )
        natives[kind] = native
    return natives


def by_the_library(native: Any, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in native.encode_batch(texts)]


@pytest.mark.parametrize("kind", KINDS)
def test_words_have_the_ids_of_whole_texts(
    trained: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "REST", 0)  # also where most words are new
    tokenizer, random = Tokenizer(trained[kind]), Random(kind)
    for _ in range(150):
        texts = ["".join(random.choices(PARTS, k=random.randrange(30))) for _ in range(12)]
        assert tokenizer.encode(texts) == by_the_library(tokenizer.native, texts)
        line = [" ".join(random.choices(PLAIN, k=random.randrange(1, 20)))]
        assert tokenizer.encode(line) == by_the_library(tokenizer.native, line)
    assert tokenizer._words is not None and tokenizer._words._memory.known > 100


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=4), st.just(" ")), max_size=30),
        max_size=5,
    )
)
def test_words_of_any_characters(
    trained: dict[str, Any], kind: str, parts: list[list[str]]
) -> None:
    texts = ["".join(part) for part in parts]
    assert Tokenizer(trained[kind]).encode(texts) == by_the_library(trained[kind], texts)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_every_character_beside_a_space(
    trained: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "REST", 0)
    tokenizer = Tokenizer(trained[kind])
    every = [chr(c) for c in range(2, 0x110000) if not 0xD800 <= c < 0xE000]
    for first in range(0, len(every), 1 << 14):
        texts = [f"a {c}b c{c} d {c} e {c}\u0301 x" for c in every[first : first + (1 << 14)]]
        assert tokenizer.encode(texts) == by_the_library(tokenizer.native, texts)


def test_most_spaces_begin_words(trained: dict[str, Any]) -> None:
    text = "the storm \u0434\u043e\u043c came  over\xa0 it"
    for kind, native in trained.items():
        cuts = Cuts.of(native)
        assert cuts is not None
        data = f"\x01{text}\x01{' ' * 64}".encode()
        starts, lengths = cuts.bounds(data.decode(), data)
        pieces = [data[s : s + n].decode() for s, n in zip(starts, lengths, strict=True)]
        whole = ["\x01", "the", " storm", " \u0434\u043e\u043c", " came  over\xa0 it", "\x01"]
        assert pieces == whole, kind
        simple = "the storm \u0434\u043e\u043c came, it's 12"
        words_of = ["the", " storm", " \u0434\u043e\u043c", " came,", " it's", " 12"]
        assert cuts.split(simple) == words_of, kind
        for other in (text, "", "a  b", " a", "a ", "a\tb", "a\x01b", "a\x7f b"):
            assert cuts.split(other) is None, (kind, other)


def changed(native: Any, **parts: Any) -> Any:
    other = tokenizers.Tokenizer.from_str(native.to_str())
    for name, part in parts.items():
        setattr(other, name, part)
    return other


def test_tokenizers_whose_words_may_depend_on_others(trained: dict[str, Any]) -> None:
    pre, norms = tokenizers.pre_tokenizers, tokenizers.normalizers
    gpt2, plain = trained["gpt2"], trained["unigram"]
    two_words = pre.Split(tokenizers.Regex(r"\w+ \w+"), "isolated")
    others = [
        changed(gpt2, pre_tokenizer=pre.ByteLevel(add_prefix_space=True)),
        changed(gpt2, pre_tokenizer=None),
        changed(gpt2, pre_tokenizer=pre.ByteLevel(False, use_regex=False)),
        changed(
            gpt2,
            pre_tokenizer=pre.Sequence([two_words, pre.ByteLevel(False, use_regex=False)]),
        ),
        changed(gpt2, normalizer=norms.Lowercase()),
        changed(gpt2, normalizer=norms.Prepend("x")),
        changed(plain, pre_tokenizer=pre.Metaspace(prepend_scheme="first")),
        changed(plain, pre_tokenizer=pre.Metaspace(prepend_scheme="always", split=False)),
        changed(plain, normalizer=norms.Replace("a", "b")),
        changed(plain, normalizer=norms.Strip(left=True, right=True)),
    ]
    for token in (
        tokenizers.AddedToken("two words"),
        tokenizers.AddedToken("x", single_word=True),
        tokenizers.AddedToken("y", rstrip=True),
        tokenizers.AddedToken("z "),
    ):
        others.append(changed(gpt2))
        others[-1].add_tokens([token])
    dropped = json.loads(gpt2.to_str())
    dropped["model"]["dropout"] = 0.5
    others.append(tokenizers.Tokenizer.from_str(json.dumps(dropped)))
    assert [words.Words.of(native, [0], [1]) is None for native in others] == [True] * len(others)
    for content in ("   ", " ab", "ab"):  # no word is cut in two by them
        native = changed(gpt2)
        native.add_tokens([tokenizers.AddedToken(content, normalized=True)])
        texts = ["x   y    z", "an ab cab  ab", "ab", "   ", "x ab"] * 2
        assert words.Words.of(native, [0], [1]) is not None
        assert Tokenizer(native).encode(texts) == by_the_library(native, texts)


def test_a_text_that_the_library_refuses_is_no_end_to_others() -> None:
    native = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"[CLS]": 0, "a": 1, "b": 2}, unk_token="[UNK]")
    )
    native.normalizer = tokenizers.normalizers.BertNormalizer()
    native.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    native.add_special_tokens(["[CLS]"])
    tokenizer = Tokenizer(native)
    assert tokenizer.encode(["a"]) == [[1]] and tokenizer._words is not None
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"Missing \[UNK\] token"):
            tokenizer.encode(["b z"])
        assert tokenizer.encode(["a", "b a"]) == [[1], [2, 1]]
