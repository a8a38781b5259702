"""GGUF files that embed or rank: equal to the models of their folders."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import WeightsError
from centella.tasks.classify.classifier import Classifier
from centella.tasks.embed.embedder import Embedder
from centella.tasks.generate.generator import Generator
from tests.support.model_common import DATA, texts_of

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
from tests.support.gguf_files import write_bert  # needs the package
from tests.weights.test_gguf import with_tokenizer

RANKER = DATA / "rerankers" / "qwen3"
TEXTS = ["a storm", "The keeper of the lighthouse counted 42 ships.", "naïve café", ""]
MEAN, CLS, LAST, RANK = (SimpleNamespace(value=number) for number in (1, 2, 3, 4))


def of_decoder(path: Path, pooling: Any, **more: Any) -> Path:
    return with_tokenizer(path, RANKER, pooling_type=pooling, **more)


@pytest.mark.parametrize(("number", "name"), [(MEAN, "mean"), (CLS, "cls"), (LAST, "lasttoken")])
def test_a_decoder_that_embeds(tmp_path: Path, number: Any, name: str) -> None:
    end = {"add_eos_token": True, "eos_token_id": 0}
    model = ct.load(of_decoder(tmp_path, number, **end), "cpu")
    assert isinstance(model, Embedder)
    assert (model.config.pooling, model.config.normalize, model.config.max_length) == (
        name, True, 512,
    )  # fmt: skip
    assert model.tokenizer.encode(["a"])[0][-1] == 0
    folder = ct.load(RANKER, "cpu", task="embed")
    folder.tokenizer, folder.config = model.tokenizer, model.config
    np.testing.assert_allclose(model.encode(TEXTS), folder.encode(TEXTS), atol=1e-6)


def test_a_decoder_is_used_as_asked(tmp_path: Path) -> None:
    plain = of_decoder(tmp_path, None)
    assert isinstance(ct.load(plain, "cpu"), Generator)
    assert ct.load(plain, "cpu", task="embed").config.pooling == "lasttoken"
    ranker = ct.load(of_decoder(tmp_path, RANK), "cpu", task="classify")
    assert isinstance(ranker, Classifier)
    scores = ranker.predict([("rain", text) for text in TEXTS])
    folder = ct.load(RANKER, "cpu", task="classify")
    np.testing.assert_allclose(scores, folder.predict([("rain", t) for t in TEXTS]), atol=1e-5)
    pooled = of_decoder(tmp_path, LAST)
    assert isinstance(ct.load(pooled, "cpu", task="generate"), Generator)


@pytest.mark.first("number", "simulator")
@pytest.mark.parametrize("number", [None, CLS])
def test_a_bert(device: ct.Device, tmp_path: Path, number: Any) -> None:
    file = tmp_path / "bert.gguf"
    write_bert(DATA / "tiny-bert", file, pooling_type=number)
    model = ct.load(file, device)
    assert isinstance(model, Embedder)
    folder = ct.load(DATA / "tiny-bert", device, task="embed")
    texts = [text for batch in texts_of("tiny-bert") for text in batch] + TEXTS
    assert model.tokenizer.encode(texts) == folder.tokenizer.encode(texts)
    assert model.config.pooling == ("cls" if number else "mean")
    folder.config = model.config
    np.testing.assert_allclose(model.encode(texts), folder.encode(texts), atol=1e-6)


def test_a_bert_of_16_bits_or_quantised(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(2)
    folder = tmp_path / "bert"
    transformers.BertModel(config).save_pretrained(folder)
    tiny = DATA / "tiny-bert" / "tokenizer.json"
    (folder / "tokenizer.json").write_text(tiny.read_text())
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values))
    vectors = {}
    for kind in ("F32", "F16", "Q8_0"):
        write_bert(folder, tmp_path / "bert.gguf", kind)
        model = ct.load(tmp_path / "bert.gguf", "cpu")
        vectors[kind] = model.encode(TEXTS)
    assert np.abs(vectors["F16"] - vectors["F32"]).max() < 1e-3
    assert 0 < np.abs(vectors["Q8_0"] - vectors["F32"]).max() < 2e-2


def test_what_is_malformed(tmp_path: Path) -> None:
    file = tmp_path / "bert.gguf"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"causal_attention": True}, r"bert\.attention\.causal: expected false, got True"),
        ({"pooling_type": SimpleNamespace(value=9)}, r"bert\.pooling_type: expected 0 to 4, got 9"),
        ({"unk_token_id": 5000}, r"unknown_token_id: expected an id below"),
    ]
    for values, text in wrong:
        write_bert(DATA / "tiny-bert", file, **values)
        with pytest.raises(WeightsError, match=text):
            ct.load(file, "cpu")
    write_bert(DATA / "tiny-bert", file)
    with pytest.raises(WeightsError, match="expected one to generate with"):
        ct.load(file, "cpu", task="generate")
