"""Folders that sentence-transformers saved: vectors, similarities, scores and order are its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import WeightsError
from tests.support.model_common import DATA

pytest.importorskip("tokenizers")
FOLDER = DATA / "pipelines"
EXPECTED: dict[str, Any] = dict(np.load(FOLDER / "expected.npz"))
TEXTS: list[str] = json.loads((FOLDER / "texts.json").read_text(encoding="utf-8"))
NAMES = sorted({name.partition(".")[0] for name in EXPECTED} - {"ranges", "cross-encoder"})


def folder_of(name: str, where: Path) -> Path:
    """The folder, with the transformer that the reference had."""
    folder = where / name
    shutil.copytree(FOLDER / name, folder)
    for file in ("model.safetensors", "tokenizer.json"):
        if not (folder / file).exists():
            shutil.copy(DATA / "tiny-bert-cls" / file, folder)
    return folder


@pytest.mark.first("name", "simulator")
@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_a_pipeline(device: ct.Device, tmp_path: Path, name: str) -> None:
    model = ct.load(folder_of(name, tmp_path), device, task="embed")
    vectors = model.encode(TEXTS, batch_size=4)
    np.testing.assert_allclose(vectors, EXPECTED[name], rtol=0, atol=1e-5)
    alike = model.similarity(vectors, vectors)
    scale = max(1.0, float(np.abs(EXPECTED[f"{name}.similarity"]).max()))  # sums of 32 products
    wanted = EXPECTED[f"{name}.similarity"]
    apart = ~np.eye(len(TEXTS), dtype=bool)  # of equal vectors a distance is rounding's root
    np.testing.assert_allclose(alike[apart], wanted[apart], rtol=0, atol=1e-5 * scale)


def test_prompts_of_a_pipeline(device: ct.Device, tmp_path: Path) -> None:
    model = ct.load(folder_of("prompts", tmp_path), device, task="embed")
    by_prompt = {
        "query": model.encode_query(TEXTS),
        "document": model.encode_document(TEXTS),
        "prompt": model.encode(TEXTS, prompt="note: "),
    }
    for name, vectors in by_prompt.items():
        np.testing.assert_allclose(vectors, EXPECTED[f"prompts.{name}"], rtol=0, atol=1e-5)
    assert np.abs(by_prompt["query"] - by_prompt["document"]).max() > 0.01


def test_vectors_in_fewer_bits(device: ct.Device, tmp_path: Path) -> None:
    model = ct.load(folder_of("cls", tmp_path), device, task="embed")
    for dtype in ("int8", "uint8", "binary", "ubinary"):
        packed = model.encode(TEXTS, dtype=dtype, ranges=EXPECTED["ranges"])
        wanted = EXPECTED[f"cls.{dtype}"]
        assert packed.dtype == wanted.dtype and packed.shape == wanted.shape
        steps = np.abs(packed.astype(np.int16) - wanted)
        assert steps.max() <= (1 if "int8" in dtype else 0) and (steps > 0).mean() < 0.01
    short = model.encode(TEXTS, dim=20)
    np.testing.assert_allclose(short, EXPECTED["cls.dim"], rtol=0, atol=1e-5)


def test_scores_and_order_of_a_cross_encoder(device: ct.Device, tmp_path: Path) -> None:
    """Its folder has a modules.json too, and its activation is not in config.json."""
    folder = folder_of("cross-encoder", tmp_path)
    model = ct.load(folder, device, "f32")
    assert isinstance(model, ct.Classifier) and model.config.activation == "sigmoid"
    pairs = [(TEXTS[0], text) for text in TEXTS]
    logits = model.predict(pairs, activation="identity")
    np.testing.assert_allclose(logits, EXPECTED["cross-encoder.logits"], rtol=0, atol=1e-5)
    scores = model.predict(pairs)
    np.testing.assert_allclose(scores, EXPECTED["cross-encoder"], rtol=0, atol=1e-5)
    ranked = model.rank(TEXTS[0], TEXTS)
    assert [r.index for r in ranked] == EXPECTED["cross-encoder.order"].tolist()
    file = folder / "config_sentence_transformers.json"
    stated = {**json.loads(file.read_text()), "activation_fn": "torch.nn.modules.linear.Identity"}
    file.write_text(json.dumps(stated))
    assert ct.load(folder, device, task="classify").config.activation == "identity"


@pytest.mark.parametrize(
    ("name", "value"), [("use_residual", True), ("module_input_name", "token_embeddings")]
)
def test_dense_modules_that_do_something_else(tmp_path: Path, name: str, value: object) -> None:
    file = folder_of("dense", tmp_path) / "2_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(WeightsError, match=rf"2_Dense/config\.json: {name}: expected"):
        ct.load(tmp_path / "dense", "cpu", task="embed")
