"""Decoders that embed: Qwen3-Embedding's kind of folder, and every family asked for to embed."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.check import check_model
from centella.tasks.embed.embedder import Embedder
from tests.support.model_common import DATA, pack

pytest.importorskip("tokenizers")
FOLDER = DATA / "embedders" / "qwen3"
DECODERS = DATA / "decoders"
TEXTS = (
    "a storm", "", "The keeper of the lighthouse counted 42 ships before the storm came up.",
    "What is the capital of a small island?", "x",
    "Instruct: find passages\nQuery: " + "rain and thunder " * 4,
)  # fmt: skip
EVERY = ("cpu", "simulator", "webgpu", "webgpu-hardware", "cuda")


@functools.cache
def embedder(device: ct.Device) -> Embedder:
    return ct.load(FOLDER, device, "f32", task="embed")


@pytest.mark.devices(*EVERY)
def test_vectors_are_those_of_transformers(device: ct.Device) -> None:
    expected = np.load(FOLDER / "expected.npz")["vectors"]
    together = embedder(device).encode(TEXTS)
    np.testing.assert_allclose(together, expected, atol=2e-6)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(embedder(device).encode(text), vector, atol=2e-6)


@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
def test_a_batch_of_a_known_size_is_a_replay(device: ct.Device) -> None:
    model = embedder(device)
    model.encode(TEXTS[:2])
    with ct.ledger() as led:
        model.encode(["another", "of those"])
    led.expect(uploads=1, downloads=1, submissions=1, compiles=0)


def test_prompts_of_the_folder() -> None:
    model = embedder(ct.device("cpu"))
    asked = model.encode_query("rain")
    prompt = "Instruct: find passages that answer\nQuery: "
    np.testing.assert_array_equal(asked, model.encode("rain", prompt=prompt))
    assert np.abs(asked - model.encode_document("rain")).max() > 1e-3


FIXED = {p.name for p in DECODERS.iterdir()} - {"phi4-mini"}  # whose frequencies follow the length


@pytest.mark.first("family", "simulator")
@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("family", sorted(FIXED))
def test_states_are_those_that_logits_are_made_of(device: ct.Device, family: str) -> None:
    """Windows, soft caps, layers without rotary embedding, experts; padding behind a text."""
    ids = np.random.default_rng(0).integers(3, 300, (2, 37)).astype(np.int32)
    decoder = ct.load(DECODERS / family, "cpu", "f32", task="generate").model
    past = decoder.past(2, 37)
    wanted = decoder.norm(decoder.states(ct.asarray(ids, device="cpu"), past)).numpy()
    model: Any = ct.load(DECODERS / family, device, "f32", task="embed")
    assert model.config.pooling == "lasttoken"
    padded = np.concatenate([ids, np.full((2, 11), 5, np.int32)], 1)
    lengths = ct.asarray(np.full(2, 37, np.int32), device=device)
    got = model(ct.asarray(padded, device=device), lengths).numpy()[:, :37]
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())
    # The second text, its first 20 tokens and the first text end to end, with tokens behind them.
    flat = np.concatenate([ids[1], ids[1, :20], ids[0], [5, 5]]).astype(np.int32)
    positions = np.concatenate([np.arange(37), np.arange(20), np.arange(37), [0, 0]]).astype(
        np.int32
    )
    offsets = np.array([0, 37, 57, 94, 94], np.int32)
    states = model.model.end_to_end(
        *(ct.asarray(x, device=device) for x in (flat, offsets, positions))
    ).numpy()  # fmt: skip
    for begin, of_text in ((0, wanted[1]), (57, wanted[0])):
        ours = states[begin : begin + 37]
        np.testing.assert_allclose(ours, of_text, atol=1e-4 * np.abs(wanted).max())
    if not model.model.config.both_ways:
        np.testing.assert_allclose(states[37:57], wanted[1, :20], atol=1e-4 * np.abs(wanted).max())


@pytest.mark.devices("webgpu", "simulator", "cuda", "webgpu-hardware")
def test_unequal_texts_lie_end_to_end(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the vectors that each has alone; others of the same sizes compile and plan nothing."""
    pack(monkeypatch)
    model = ct.load(FOLDER, device, "f32", task="embed")
    texts = [t for t in TEXTS if t] if device.name != "simulator" else list(TEXTS[3:])
    alone = np.array([model.encode(text) for text in texts])
    np.testing.assert_allclose(model.encode(texts), alone, atol=2e-6)
    with ct.ledger() as led:
        again = model.encode(texts[::-1])
    led.expect(uploads=1, submissions=1, downloads=1, compiles=0, plans=0)
    np.testing.assert_allclose(again[::-1], alone, atol=2e-6)
    assert model._forward is not None and model._forward.packed is not None
    assert model._forward.packed.signatures == 1  # the batch was no grid


def test_frequencies_that_follow_the_length_do_not_embed() -> None:
    with pytest.raises(ct.WeightsError, match=r"rope_type: expected default, .*, got 'longrope'"):
        ct.load(DECODERS / "phi4-mini", "cpu", task="embed")


def test_a_folder_says_what_it_is_for(tmp_path: Path) -> None:
    folder = shutil.copytree(DECODERS / "qwen3", tmp_path / "model")
    assert type(ct.load(folder, "cpu")).__name__ == "Generator"
    shutil.copy(FOLDER / "modules.json", folder)
    shutil.copytree(FOLDER / "1_Pooling", folder / "1_Pooling")
    model: Any = ct.load(folder, "cpu")
    assert isinstance(model, Embedder) and model.config.normalize
    assert ct.load(folder, "cpu", task="generate").generate([3, 4], max_new_tokens=1)
    with pytest.raises(ct.WeightsError, match=r"missing: lm_head\.weight"):
        ct.load(FOLDER, "cpu", task="generate")
    with pytest.raises(ct.ShapeError, match=r"expected ids \[batch, up to 128\], got \[1, 129\]"):
        model(ct.zeros((1, 129), "i32", "cpu"), ct.zeros((1,), "i32", "cpu"))


def test_a_decoder_that_embeds_beside_transformers() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    report = check_model(FOLDER, "cpu")
    assert report.ok, report.card()
    paths = ["layers.0", "layers.1", "layers.2", "norm", ""]
    assert [layer.path for layer in report.layers] == paths


def test_pieces_where_a_character_is_several_tokens() -> None:
    model = embedder(ct.device("cpu"))
    text = "\U0001f329 rain \u4eca\u65e5\u306f " * 20
    for size, overlap in ((40, 0), (9, 3), (6, 0)):
        pieces = model.chunks(text, size, overlap)
        assert all(text[p.start : p.end] == p.text for p in pieces)
        read = [len(ids) for ids in model.tokenizer.encode([p.text for p in pieces])]
        assert max(read) <= size
        if not overlap:
            assert "".join("".join(p.text for p in pieces).split()) == "".join(text.split())
    (one, *_) = model.chunks("\U0001f329" * 2, 2)  # a character is never cut
    assert (one.text, one.tokens > 1) == ("\U0001f329", True)
