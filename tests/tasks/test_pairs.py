"""Pairs of texts end to end: the ids and types that the library gives to each pair."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

import centella as ct
from centella.tasks.classify import pairs as pairs_module
from centella.tasks.classify.pairs import Pairs, Typed
from centella.tasks.text.tokenizer import Tokenizer
from tests.support.model_common import DATA

tokenizers = pytest.importorskip("tokenizers")
SPECIAL = [("[CLS]", 2), ("[SEP]", 3)]
WORDS = ["storm", "rain", "the", "lake", "x", "...", "[SEP]", "keeper", "\xe9", "4", ""]


def template(pair: str, single: str = "[CLS] $A [SEP]") -> Any:
    return tokenizers.processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=SPECIAL
    )


LAYOUTS = {
    "bert": template("[CLS] $A [SEP] $B:1 [SEP]:1"),
    "roberta": template("[CLS] $A [SEP] [SEP] $B [SEP]"),
    "one type": template("[CLS] $A [SEP] $B:1 [SEP]"),
    "bare": template("$A $B:1", "$A"),
    "turned": template("[CLS] $B [SEP] $A:1 [SEP]:1"),
    "of two types": template("[CLS] $A [SEP] [SEP]:1 $B:1 [SEP]:1"),
    "typed alone": template("[CLS] $A [SEP] $B:1 [SEP]:1", "[CLS]:1 $A:1 [SEP]:1"),
    "bert's own": tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "roberta's own": tokenizers.processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
}


def listed(typed: Typed) -> list[tuple[list[int], list[int]]]:
    ids = typed.tokens.lists()
    types = [[0] * len(row) for row in ids] if typed.types is None else typed.types.lists()
    return list(zip(ids, types, strict=True))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_and_types_are_the_librarys(layout: str, side: Any) -> None:
    native = Tokenizer.from_folder(DATA / "tiny-bert").native
    native.post_processor = LAYOUTS[layout]
    tokenizer, random = Tokenizer(native, truncation_side=side), Random(layout)
    pairs = Pairs(tokenizer)
    assert (pairs._layout is None) == (layout in ("turned", "of two types"))
    for most in (4, 5, 6, 7, 9, 14, 64):
        some = [" ".join(random.choices(WORDS, k=random.randrange(9))) for _ in range(60)]
        firsts, seconds = some[:20] * 2, some[20:]
        expected = tokenizer.encode_whole(firsts, seconds, most)
        encoded = listed(pairs.pairs(firsts, seconds, most))
        assert encoded == [(e.ids, e.types) for e in expected]
        alone = tokenizer.encode_whole(some, None, most)
        assert listed(pairs.alone(some, most)) == [(e.ids, e.types) for e in alone]
    assert listed(pairs.pairs([], [], 9)) == []
    if layout != "bare":
        with pytest.raises(ct.ShapeError, match=r"max_length: expected at least \d \(the special"):
            pairs.pairs(["a"], ["b"], 2)


def test_a_question_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(DATA / "tiny-bert")
    calls: list[list[str]] = []
    bare = Tokenizer.bare

    def counted(self: Tokenizer, texts: list[str]) -> Any:
        calls.append(list(texts))
        return bare(self, texts)

    monkeypatch.setattr(Tokenizer, "bare", counted)
    Pairs(tokenizer).pairs(["the storm"] * 3, ["a", "b", "c"], 20)
    assert calls == [["the storm"], ["a", "b", "c"]]


@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
def test_scores_while_others_are_tokenised(
    device: ct.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portion by portion, with the scores of one call; of the types of each pair."""
    shutil.copytree(DATA / "pipelines" / "cross-encoder", tmp_path, dirs_exist_ok=True)
    shutil.copy(DATA / "tiny-bert-cls" / "tokenizer.json", tmp_path)
    model = ct.load(tmp_path, device, "f32", task="classify")
    random = Random(3)
    documents = [" ".join(random.choices(WORDS, k=random.randrange(6))) for _ in range(600)]
    read, sizes = Pairs.pairs, []

    def counted(self: Pairs, firsts: Any, seconds: Any, most: int) -> Typed:
        sizes.append(len(seconds))
        return read(self, firsts, seconds, most)

    monkeypatch.setattr(pairs_module.Pairs, "pairs", counted)
    ranked = model.rank("the storm", documents)
    assert sizes == [512, 88]
    for r in ranked[:3] + ranked[-3:]:
        alone = model.predict(("the storm", documents[r.index]))
        assert abs(alone - r.score) < 1e-6
    scores = [r.score for r in ranked]
    assert sorted(r.index for r in ranked) == list(range(600))
    assert scores == sorted(scores, reverse=True)
