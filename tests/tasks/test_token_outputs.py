"""Sparse and multi-vector outputs, as of bge-m3, against float64."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.tasks.embed.embedder import Embedder
from centella.weights.torch_zip import read_torch
from tests.support.model_common import DATA
from tests.tasks.test_classify import DOCUMENTS, WORDS, with_tokenizer

pytest.importorskip("tokenizers")
HEADS = DATA / "heads"
OUTPUTS = ("dense", "sparse", "multi")
LONG = " ".join(WORDS * 3)
Array = np.ndarray[Any, Any]


def folder_of(where: Path, end: str = ".pt") -> Path:
    """A small XLM-R with a tokenizer and the products of bge-m3."""
    folder = with_tokenizer("xlm-roberta", where)
    for name in ("sparse_linear", "colbert_linear"):
        if end == ".pt":
            shutil.copy(HEADS / f"{name}.pt", folder)
            continue
        tensors = {key: tensor.array for key, tensor in read_torch(HEADS / f"{name}.pt").items()}
        pytest.importorskip("safetensors.numpy").save_file(tensors, folder / f"{name}{end}")
    return folder


def expected(model: Embedder, text: str) -> tuple[dict[int, float], Array]:
    """Of one text, from its states, in float64."""
    ids = model.tokenizer.encode([text], model.config.max_length)[0]
    grid = ct.asarray(np.array([ids], np.int32), device=model.model.device)
    lengths = ct.asarray(np.array([len(ids)], np.int32), device=model.model.device)
    states = model(grid, lengths).numpy()[0].astype(np.float64)
    heads = [
        {key: tensor.array.astype(np.float64) for key, tensor in read_torch(HEADS / name).items()}
        for name in ("sparse_linear.pt", "colbert_linear.pt")
    ]
    weights = np.maximum(states @ heads[0]["weight"].T + heads[0]["bias"], 0)[:, 0]
    sparse: dict[int, float] = {}
    for token, weight in zip(ids, weights, strict=True):
        if token >= 4 and weight > 0:  # <s>, </s>, <unk> and <pad> are the first four
            sparse[token] = max(weight, sparse.get(token, 0.0))
    vectors = (states @ heads[1]["weight"].T + heads[1]["bias"])[1:]
    return sparse, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def alike(weights: dict[int, float], wanted: dict[int, float]) -> None:
    assert weights.keys() == wanted.keys()
    np.testing.assert_allclose(list(weights.values()), [wanted[i] for i in weights], atol=2e-5)


@pytest.mark.parametrize("end", [".pt", ".safetensors"])
def test_outputs_of_tokens(device: ct.Device, tmp_path: Path, end: str) -> None:
    model = ct.load(folder_of(tmp_path, end), device, task="embed")
    assert model.outputs == OUTPUTS
    texts = [*DOCUMENTS, "rain rain nothing rain", ""]
    outputs = model.embed(texts, OUTPUTS, batch_size=3)
    np.testing.assert_array_equal(outputs.dense, model.encode(texts, batch_size=3))
    assert any(outputs.sparse)
    for text, sparse, multi in zip(texts, outputs.sparse, outputs.multi, strict=True):
        wanted, vectors = expected(model, text)
        alike(sparse, wanted)
        np.testing.assert_allclose(multi, vectors, atol=2e-5)
    model.embed(texts[:2], OUTPUTS)
    with ct.ledger() as led:
        some = model.embed(texts[:2], OUTPUTS)
    led.expect(uploads=1, downloads=1, submissions=1, compiles=0)
    assert [len(v) for v in some.multi] == [len(t.split()) + 1 for t in texts[:2]]


def test_outputs_alone_and_of_long_texts(tmp_path: Path) -> None:
    model = ct.load(folder_of(tmp_path), "cpu", task="embed")
    sparse = model.embed(DOCUMENTS, ("sparse",))
    assert (sparse.dense.shape, sparse.multi) == ((len(DOCUMENTS), 0), [])
    assert sparse.sparse == model.embed(DOCUMENTS, OUTPUTS).sparse
    nothing = model.embed([], OUTPUTS)
    assert (nothing.dense.shape, nothing.sparse, nothing.multi) == ((0, 30), [], [])
    pieces = [p.text for p in model.chunks(LONG, 8)]
    apart = model.embed(pieces, OUTPUTS)
    whole = model.embed(["rain", LONG], OUTPUTS, chunk=8)
    union: dict[int, float] = {}
    for part in apart.sparse:
        union |= {token: max(weight, union.get(token, 0)) for token, weight in part.items()}
    alike(whole.sparse[1], union)
    np.testing.assert_allclose(whole.multi[1], np.concatenate(apart.multi), atol=1e-6)
    assert len(whole.multi[0]) == 2
    packed = model.embed(DOCUMENTS, OUTPUTS, dtype="f16", dim=8)
    assert packed.dense.dtype == np.float16
    assert packed.dense.shape == (len(DOCUMENTS), 8)
    assert packed.multi[0].shape[1] == 20


def test_how_alike_texts_are(tmp_path: Path) -> None:
    model = ct.load(folder_of(tmp_path), "cpu", task="embed")
    outputs = model.embed(DOCUMENTS, OUTPUTS)
    queries = model.embed(["the lake", "rain"], OUTPUTS)
    sparse = model.similarity(queries.sparse, outputs.sparse)
    multi = model.similarity(queries.multi, outputs.multi)
    assert sparse.shape == multi.shape == (2, len(DOCUMENTS))
    for i, j in ((0, 0), (1, 3), (0, 5)):
        q, d = queries.sparse[i], outputs.sparse[j]
        assert sparse[i, j] == pytest.approx(sum(q[t] * d[t] for t in q.keys() & d.keys()))
        products = queries.multi[i] @ outputs.multi[j].T
        assert multi[i, j] == pytest.approx(products.max(1).mean(), abs=1e-6)
    assert multi[0, 0] == pytest.approx(1, abs=1e-5)  # the text itself
    one = model.similarity(queries.sparse[0], outputs.sparse)
    np.testing.assert_array_equal(one, sparse[:1])
    with pytest.raises(ShapeError, match="expected outputs of one kind"):
        model.similarity(queries.sparse, outputs.dense)
    with pytest.raises(ShapeError, match="expected outputs of one kind"):
        model.similarity(queries.sparse, outputs.multi)
    with pytest.raises(ShapeError, match=r"got dense and multi; .* multi as a list of one"):
        model.similarity(outputs.multi[0], outputs.multi)
    for some in (queries.dense, queries.sparse, queries.multi, np.zeros((2, 20), np.float32)):
        assert model.similarity(some, []).shape == (2, 0)
        assert model.similarity([], some).shape == (0, 2)
    assert model.similarity({1: 1.0}, []).shape == model.similarity(np.ones(20), []).shape == (1, 0)
    assert model.similarity([], []).shape == (0, 0)
    assert model.similarity(np.zeros(0, np.float32), ()).shape == (0, 0)
    with pytest.raises(ShapeError, match="of one dim, got"):
        model.similarity(queries.multi, [np.ones((2, 7), np.float32)])


def test_outputs_that_a_model_does_not_give(tmp_path: Path) -> None:
    plain = ct.load(with_tokenizer("xlm-roberta", tmp_path), "cpu", task="embed")
    with pytest.raises(ShapeError, match="embed: expected outputs of dense, got 'sparse'"):
        plain.embed(["rain"], ("dense", "sparse"))
    with pytest.raises(ShapeError, match="expected one or more outputs, got none"):
        plain.embed(["rain"], ())
    assert plain.embed(["rain", "sea"], "dense").dense.shape == (2, plain.dim)
    with pytest.raises(DTypeError, match=r"encode: unknown argument outputs=; embed\("):
        plain.encode(["rain"], outputs=("dense",))  # type: ignore[arg-type]
    folder = folder_of(tmp_path / "b")
    shutil.copy(HEADS / "views.pt", folder / "sparse_linear.pt")
    with pytest.raises(WeightsError, match=r"sparse_linear\.pt"):
        ct.load(folder, "cpu", task="embed")
