"""Folders with a vocabulary and merges in place of tokenizer.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import centella as ct
from centella.errors import WeightsError
from centella.tasks.text.tokenizer import Tokenizer
from tests.support.model_common import DATA

tokenizers = pytest.importorskip("tokenizers")
TEXTS: list[str] = [
    *json.loads((DATA / "minilm_texts.json").read_text())[:40],
    " two  spaces\tand a tab", "ÀÉ naïve café", "漢字 and kana かな", "[MASK] of [CLS]",
    "a<mask>b <mask>", "", "<|endoftext|> in a text<|en|>",
]  # fmt: skip
WHISPER, BERT = DATA / "whisper" / "tiny", DATA / "tiny-bert"


def stated(folder: Path) -> dict[str, Any]:
    """What tokenizer.json says."""
    values: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return values


def byte_pairs(folder: Path, where: Path) -> Path:
    """A folder with the vocabulary, merges and added tokens of another's tokenizer.json."""
    values = stated(folder)
    (where / "vocab.json").write_text(json.dumps(values["model"]["vocab"]))
    merges = (m if isinstance(m, str) else " ".join(m) for m in values["model"]["merges"])
    (where / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    added = values["added_tokens"]
    (where / "added_tokens.json").write_text(json.dumps({t["content"]: t["id"] for t in added}))
    special = [t["content"] for t in added if t["special"]]
    map_ = {"additional_special_tokens": special, "eos_token": "<|endoftext|>"}
    (where / "special_tokens_map.json").write_text(json.dumps(map_))
    return where


def word_pieces(folder: Path, where: Path) -> Path:
    """A folder with the vocabulary of another's tokenizer.json, a token a line."""
    vocab = stated(folder)["model"]["vocab"]
    (where / "vocab.txt").write_text(
        "".join(f"{token}\n" for token in sorted(vocab, key=vocab.get))
    )
    shutil.copy(folder / "config.json", where)
    return where


def test_a_whisper_of_vocabulary_and_merges(tmp_path: Path) -> None:
    shutil.copytree(WHISPER, tmp_path, dirs_exist_ok=True)
    byte_pairs(WHISPER, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    ours, theirs = (Tokenizer.from_folder(f) for f in (tmp_path, WHISPER))
    assert ours.encode(TEXTS) == theirs.encode(TEXTS)
    assert ours.special_ids == theirs.special_ids
    assert ours.native.get_vocab() == theirs.native.get_vocab()
    model = ct.load(tmp_path, "cpu", task="transcribe")
    assert model.languages == ct.load(WHISPER, "cpu", task="transcribe").languages
    assert model.tokenizer.origin == str(tmp_path / "vocab.json")


def test_a_bert_of_a_vocabulary(tmp_path: Path) -> None:
    shutil.copy(BERT / "model.safetensors", tmp_path)
    ours, theirs = (Tokenizer.from_folder(f) for f in (word_pieces(BERT, tmp_path), BERT))
    assert ours.encode(TEXTS) == theirs.encode(TEXTS)
    pair = [t.native.encode("one two", "three") for t in (ours, theirs)]
    assert (pair[0].ids, pair[0].type_ids) == (pair[1].ids, pair[1].type_ids)
    model = ct.load(tmp_path, "cpu", task="embed")
    assert model.encode("three of them").shape == (48,)


CASED = {"do_lower_case": False, "tokenizer_class": "BertTokenizer"}
ROBERTA = {"tokenizer_class": "RobertaTokenizer"}


def roberta(where: Path, **more: Any) -> Path:
    """A folder of RoBERTa's files, of as many words as Whisper's."""
    byte_pairs(WHISPER, where)
    (where / "added_tokens.json").unlink()
    (where / "special_tokens_map.json").unlink()
    vocab = json.loads((where / "vocab.json").read_text())
    moved = {token: number + 4 for token, number in vocab.items()}
    every = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **moved, "<mask>": 4 + len(moved)}
    (where / "vocab.json").write_text(json.dumps(every))
    (where / "tokenizer_config.json").write_text(json.dumps({**ROBERTA, **more}))
    return where


def cased(where: Path, **more: Any) -> Path:
    """A folder of BERT's files, cased."""
    word_pieces(BERT, where)
    (where / "tokenizer_config.json").write_text(json.dumps({**CASED, **more}))
    return where


@pytest.mark.parametrize(
    ("write", "more"),
    [(roberta, {}), (roberta, {"add_prefix_space": True}), (cased, {}),
     (cased, {"do_lower_case": True}), (cased, {"strip_accents": True}),
     (cased, {"tokenize_chinese_chars": False})],
)  # fmt: skip
def test_ids_are_those_of_transformers(
    write: Callable[..., Path], more: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path, **more)
    name = {**(ROBERTA if write is roberta else CASED), **more}["tokenizer_class"]
    theirs = getattr(transformers, name).from_pretrained(folder)
    # As published, `<mask>` takes the space before it; transformers 5 leaves that out here.
    texts = [text for text in TEXTS if " <mask>" not in text or write is cased]
    assert Tokenizer.from_folder(folder).encode(texts) == theirs(texts)["input_ids"]


def test_a_mask_takes_the_space_before_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(roberta(tmp_path))
    first, *middle, last = tokenizer.encode(["a <mask>"])[0]
    assert (first, last) == (0, 2) and len(middle) == 2
    assert middle[1] == tokenizer.native.token_to_id("<mask>")


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [("merges.txt", "#version: 0.2\nĠ nothing", "line 2: expected two tokens of vocab.json"),
     ("vocab.json", "[1]", "expected tokens and their ids"),
     ("vocab.json", "{", "bad JSON"),
     ("tokenizer_config.json", '{"tokenizer_class": "Qwen2Tokenizer"}', "save_pretrained"),
     ("merges.txt", "\udcff", "expected UTF-8"),
     ("added_tokens.json", '{"<new>": 5}', "'<new>': expected id")],
)  # fmt: skip
def test_what_is_wrong_is_named(file: str, text: str, expected: str, tmp_path: Path) -> None:
    folder = roberta(tmp_path)
    (folder / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(WeightsError, match=expected) as caught:
        Tokenizer.from_folder(folder, 300)
    assert str(folder) in str(caught.value)


def test_a_vocabulary_without_its_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\na\n")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(WeightsError, match=r"vocab.txt: expected the special token '\[CLS\]'"):
        Tokenizer.from_folder(tmp_path)
