"""Decoders that rank: equal to transformers' logits of yes and no after the prompt."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest

import centella as ct
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.tasks.classify.classifier import Classifier
from centella.tasks.classify.rank_prompt import BEGIN, END
from tests.support.model_common import DATA, pack, shapes_of

pytest.importorskip("tokenizers")
FOLDER = DATA / "rerankers" / "qwen3"
QUERY, OTHER, STYLE = "Where does it rain?", "the keeper", "Judge the style"
DOCUMENTS = ["It rains at sea.", "", "The keeper of the lighthouse counted ships.", "rain " * 20]
EVERY = ("cpu", "webgpu", "webgpu-hardware", "cuda")


@functools.cache
def ranker(device: ct.Device) -> Classifier:
    return ct.load(FOLDER, device, "f32", task="classify")


def shares() -> np.ndarray:
    logits = np.load(FOLDER / "expected.npz")["logits"]
    probabilities: np.ndarray = 1 / (1 + np.exp(logits[:, 1] - logits[:, 0]))
    return probabilities


@pytest.mark.devices(*EVERY)
def test_scores_are_those_of_transformers(device: ct.Device) -> None:
    model = ranker(device)
    expected = shares()
    scores = model.predict([(QUERY, d) for d in DOCUMENTS], batch_size=3)
    np.testing.assert_allclose(scores, expected[:4], atol=1e-5)
    styled = model.predict([(OTHER, d) for d in DOCUMENTS], instruction=STYLE)
    np.testing.assert_allclose(styled, expected[4:], atol=1e-5)
    ranked = model.rank(OTHER, DOCUMENTS, top_k=3, instruction=STYLE)
    assert [r.index for r in ranked] == np.argsort(-expected[4:])[:3].tolist()
    model.predict([(QUERY, d) for d in DOCUMENTS[:3]])
    with ct.ledger() as led:
        model.predict([(QUERY, d) for d in DOCUMENTS[:3]])
    led.expect(uploads=1, downloads=1, submissions=1)
    assert led.download_bytes <= 16


@pytest.mark.devices("webgpu", "simulator", "cuda", "webgpu-hardware")
def test_prompts_of_unequal_lengths_lie_end_to_end(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the scores that each has alone; others of the same sizes compile and plan nothing."""
    pack(monkeypatch)
    model = ct.load(FOLDER, device, "f32", task="classify")
    pairs = [(QUERY, d) for d in (*DOCUMENTS[:2], *DOCUMENTS[3:])]
    alone = [model.predict(pair, activation="identity") for pair in pairs]
    shapes = shapes_of(model)
    together = model.predict(pairs, activation="identity")
    np.testing.assert_allclose(together, alone, atol=1e-5)
    (ids, offsets, positions) = shapes[0]
    assert ids == positions and len(ids) == 1 and offsets == (5,)
    with ct.ledger() as led:
        again = model.predict(pairs[::-1], activation="identity")
    led.expect(uploads=1, submissions=1, downloads=1, compiles=0, plans=0)
    np.testing.assert_allclose(again, together[::-1], atol=1e-5)


def test_special_tokens_of_a_document_are_text() -> None:
    model = ranker(ct.device("cpu"))
    prompt = model._prompt
    assert prompt is not None
    texts = ["a <|im_end|> b", "a storm"]
    marked, plain = prompt.tokens([QUERY] * 2, texts, None, 512).lists()
    frame = [model.tokenizer.native.encode(text).ids for text in (BEGIN, END)]
    for encoded in (marked, plain):
        assert encoded[: len(frame[0])] == frame[0]
        assert encoded[-len(frame[1]) :] == frame[1]
    end = model.tokenizer.native.token_to_id("<|im_end|>")
    assert end not in marked[len(frame[0]) : -len(frame[1])]
    (alone,) = prompt.tokens([QUERY], texts[1:], None, 512).lists()
    assert alone == plain


def test_a_long_document_is_cut_at_its_end() -> None:
    model = ranker(ct.device("cpu"))
    prompt = model._prompt
    assert prompt is not None
    (cut,) = prompt.tokens([QUERY], ["storm " * 500], None, 512).lists()
    end = model.tokenizer.native.encode(END).ids
    assert (len(cut), cut[-len(end) :]) == (512, end)
    assert 0 < model.predict((QUERY, "storm " * 500)) < 1
    with pytest.raises(ShapeError, match=r"max_length: expected over \d+ tokens, those of the pro"):
        prompt.tokens([QUERY], ["a"], None, 20)


def test_what_a_decoder_that_ranks_refuses(tmp_path: Path) -> None:
    model = ranker(ct.device("cpu"))
    with pytest.raises(ShapeError, match="expected a model that labels texts, got a decoder"):
        model.classify("a storm")
    wrong: object = 3
    with pytest.raises(DTypeError, match="instruction: expected str, got int"):
        model.rank(QUERY, DOCUMENTS, instruction=wrong)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"instruction: expected valid Unicode, got .*'\\ud800'"):
        model.predict((QUERY, "a"), instruction="\ud800")
    with pytest.raises(DTypeError, match=r"^rank: documents\[1\]: expected str, got int"):
        model.rank(QUERY, ["a", 7])  # type: ignore[list-item]
    folder = tmp_path / "other"
    shutil.copytree(DATA / "decoders" / "qwen3", folder)
    with pytest.raises(WeightsError, match="expected a token 'yes', which a decoder"):
        ct.load(folder, "cpu", task="classify")
    assert repr(model) == "Classifier(1 label, <centella.Device cpu>)"


def test_weights_may_be_quantised() -> None:
    pairs = [(QUERY, d) for d in DOCUMENTS]
    exact = ranker(ct.device("cpu")).predict(pairs, activation="identity")
    quantised = ct.load(FOLDER, "cpu", task="classify", quantize="q8_0", warm=True)
    scores = quantised.predict(pairs, activation="identity")
    assert 0 < np.abs(scores - exact).max() < 0.05
