"""What follows the transformer, against float64: poolings, products, prompts, fewer bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.tasks.embed.embedder import Embedder, EmbedderConfig
from centella.tasks.embed.pooling import POOLINGS
from centella.tasks.embed.vectors import packed
from centella.tasks.load import load
from tests.support.model_common import DATA, copy_of
from tests.tasks.test_classify import with_tokenizer

pytest.importorskip("tokenizers")

TEXTS = ["one storm", "two storms and a river by the old bridge", "rain", ""]
Array = np.ndarray[Any, Any]


def exact(mode: str, states: Array) -> Array:
    """Of one text's states [tokens, hidden], in float64."""
    x = states.astype(np.float64)
    at = np.arange(1, len(x) + 1)[:, None]
    pooled: dict[str, Array] = {
        "cls": x[0], "max": x.max(0), "mean": x.mean(0), "lasttoken": x[-1],
        "mean_sqrt_len": x.sum(0) / np.sqrt(len(x)), "weightedmean": (x * at).sum(0) / at.sum(),
    }  # fmt: skip
    return pooled[mode]


@pytest.mark.first("pooling", "simulator")
@pytest.mark.parametrize("pooling", [*POOLINGS, "mean+cls+max"])
def test_poolings(device: ct.Device, pooling: str) -> None:
    embedder = load(DATA / "tiny-bert", device=device, task="embed")
    embedder.config = EmbedderConfig(48, pooling)
    vectors = embedder.encode(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = np.array(embedder.tokenizer.encode([text]), np.int32)
        lengths = ct.asarray(np.array([ids.shape[1]], np.int32), device=device)
        states = embedder(ct.asarray(ids, device=device), lengths).numpy()[0]
        wanted = np.concatenate([exact(mode, states) for mode in pooling.split("+")])
        np.testing.assert_allclose(vector, wanted, atol=2e-5)
    assert embedder.dim == vectors.shape[1]


def with_head(where: Path, **settings: Any) -> Path:
    """The tiny checkpoint with two products after its pooling, and prompts."""
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = copy_of("tiny-bert", where, lambda tensors: tensors)
    kinds = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
    paths = ("", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize")
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": path}
              for kind, path in zip(kinds, paths, strict=True)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(listed))
    rng = np.random.default_rng(5)
    for path, rows, columns, activation in (("2_Dense", 70, 48, "Tanh"), ("3_Dense", 20, 70, "")):
        (folder / path).mkdir()
        name = f"torch.nn.modules.activation.{activation}" if activation else "a.Identity"
        config = {"in_features": columns, "out_features": rows, "bias": bool(activation),
                  "activation_function": name}  # fmt: skip
        (folder / path / "config.json").write_text(json.dumps({**config, **settings}))
        tensors = {"linear.weight": rng.standard_normal((rows, columns), np.float32)}
        if activation:
            tensors["linear.bias"] = rng.standard_normal(rows, np.float32)
        safetensors.save_file(tensors, folder / path / "model.safetensors")
    prompts = {"query": "find the ", "passage": "text: "}
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "similarity_fn_name": "cosine"})
    )
    return folder


def test_products_after_the_pooling(device: ct.Device, tmp_path: Path) -> None:
    folder = with_head(tmp_path)
    embedder = load(folder, device=device, task="embed")
    plain = load(DATA / "tiny-bert", device=device).encode(TEXTS, normalize=False)
    load_file = pytest.importorskip("safetensors.numpy").load_file
    first, second = (load_file(folder / p / "model.safetensors") for p in ("2_Dense", "3_Dense"))
    x = np.tanh(plain.astype(np.float64) @ first["linear.weight"].T + first["linear.bias"])
    x = x @ second["linear.weight"].T
    vectors = embedder.encode(TEXTS)
    assert (embedder.dim, vectors.shape) == (20, (4, 20))
    wanted = x / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, wanted, atol=2e-5)
    cut = embedder.encode(TEXTS, dim=8)
    head = wanted[:, :8] / np.linalg.norm(wanted[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, head, atol=2e-5)
    with ct.ledger() as led:
        embedder.encode(TEXTS, dim=8)
    led.expect(uploads=1, submissions=1, downloads=1, compiles=0, plans=0)
    assert led.download_bytes == 4 * 8 * 4


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"prompts": {"query": 3}}, "prompts: expected texts by name"),
        ({"prompts": {"a": ""}, "default_prompt_name": ["a"]}, "default_prompt_name: expected one"),
        (
            {"default_prompt_name": "a"},
            "name: expected none, as the folder has no prompts, got 'a'",
        ),
        ({"similarity_fn_name": "likeness"}, "similarity_fn_name: expected one of cosine, dot"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    folder = with_head(tmp_path)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(values))
    with pytest.raises(WeightsError, match=text):
        load(folder, device="cpu")


def test_products_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"2_Dense: in_features: expected 48, .* got 50"):
        load(with_head(tmp_path / "a", in_features=50), device="cpu")
    with pytest.raises(
        WeightsError, match=r"activation_function: expected one of .*, got 'a.Swell'"
    ):
        load(with_head(tmp_path / "b", activation_function="a.Swell"), device="cpu")


@pytest.mark.parametrize(("name", "most"), [("xlm-roberta", 36), ("qwen3-embed", 40)])
def test_texts_of_other_families(device: ct.Device, tmp_path: Path, name: str, most: int) -> None:
    """Cut where the model has no more positions: XLM-R's begin behind those of padding."""
    folder = with_tokenizer(name, tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    embedder = load(folder, device=device)
    assert isinstance(embedder, Embedder)
    texts = ["lake", "river over the stone", "sun " * 100]
    vectors = embedder.encode(texts)
    for text, vector in zip(texts, vectors, strict=True):
        ids = np.array([embedder.tokenizer.encode([text], most)[0]], np.int32)
        lengths = ct.asarray(np.array([ids.shape[1]], np.int32), device=device)
        states = embedder(ct.asarray(ids, device=device), lengths).numpy()[0]
        wanted = exact("mean" if name == "xlm-roberta" else "lasttoken", states)
        np.testing.assert_allclose(vector, wanted, atol=2e-5)
    assert ids.shape[1] == most


@pytest.fixture
def on_cpu(tmp_path: Path) -> Embedder:
    return load(with_head(tmp_path), device="cpu", task="embed")


def test_prompts(on_cpu: Embedder) -> None:
    asked = [f"find the {text}" for text in TEXTS]
    wanted = on_cpu.encode(asked)
    np.testing.assert_array_equal(on_cpu.encode_query(TEXTS), wanted)
    np.testing.assert_array_equal(on_cpu.encode(TEXTS, prompt_name="query"), wanted)
    np.testing.assert_array_equal(on_cpu.encode(TEXTS, prompt="find the "), wanted)
    passage = on_cpu.encode_document(TEXTS[0], dim=5)
    np.testing.assert_array_equal(passage, on_cpu.encode(f"text: {TEXTS[0]}", dim=5))
    with pytest.raises(ShapeError, match="prompt_name: expected one of passage, query, got 'q'"):
        on_cpu.encode(TEXTS, prompt_name="q")
    with pytest.raises(ShapeError, match="expected prompt or prompt_name, got both"):
        on_cpu.encode_query(TEXTS, prompt_name="query", prompt="x")
    on_cpu.config = EmbedderConfig(48, prompts={"s": "find the "}, default_prompt="s")
    on_cpu.dense = ()
    np.testing.assert_array_equal(on_cpu.encode(TEXTS), on_cpu.encode(asked, prompt=""))


def test_fewer_bits(on_cpu: Embedder, caplog: pytest.LogCaptureFixture) -> None:
    vectors = on_cpu.encode(TEXTS)
    np.testing.assert_array_equal(on_cpu.encode(TEXTS, dtype="f16"), vectors.astype(np.float16))
    bits = on_cpu.encode(TEXTS, dtype="ubinary", dim=16)
    np.testing.assert_array_equal(bits, np.packbits(vectors[:, :16] > 0, axis=1))
    signed = on_cpu.encode(TEXTS, dtype="binary")
    assert signed.shape == (4, 3)
    np.testing.assert_array_equal(
        signed.astype(int), np.packbits(vectors > 0, axis=1).astype(int) - 128
    )
    ranges = np.stack([np.full(20, -0.5), np.full(20, 0.5)])
    levels = ((vectors + 0.5) / (1 / 255)).clip(0, 255)
    got = on_cpu.encode(TEXTS, dtype="int8", ranges=ranges)
    assert got.dtype == np.int8 and caplog.messages == []
    assert np.abs(got.astype(int) - (levels - 128)).max() <= 1.01
    own = on_cpu.encode(TEXTS, dtype="uint8")
    assert "those of 4 vectors" in caplog.messages[0]
    assert (own.min(0), own.max(0)) == (pytest.approx(0), pytest.approx(255, abs=1))
    single = on_cpu.encode(TEXTS[0], dtype="int8", ranges=ranges)
    np.testing.assert_array_equal(single, got[0])


def test_steps_are_those_of_sentence_transformers() -> None:
    rng = np.random.default_rng(2)
    vectors = rng.standard_normal((200, 24)).astype(np.float32)
    low, high = vectors.min(0), vectors.max(0)
    levels = np.floor((vectors - low) / ((high - low) / 255))
    np.testing.assert_array_equal(packed(vectors, "uint8"), levels.astype(np.uint8))
    np.testing.assert_array_equal(packed(vectors, "int8"), (levels - 128).astype(np.int8))
    empty = packed(vectors[:0], "int8", [low, high])
    assert empty.shape == (0, 24)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dim": 21}, ShapeError, "expected dim of 1 to 20, got 21"),
        ({"dim": 0}, ShapeError, "expected dim of 1 or more, got 0"),
        ({"dim": "7"}, DTypeError, "expected a whole number for dim"),
        ({"dtype": "int4"}, ShapeError, "expected dtype of f32, f16, int8, .*, got 'int4'"),
        ({"dtype": "int8", "ranges": [1, 2]}, ShapeError, r"expected ranges \[2, 20\], got \[2\]"),
        ({"dtype": "int8", "ranges": "x"}, DTypeError, "ranges: expected numbers"),
        ({"truncate_dim": 5}, DTypeError, "unknown argument truncate_dim=; write dim="),
        ({"precision": "int8"}, DTypeError, "unknown argument precision=; write dtype="),
        ({"convert_to_tensor": True}, DTypeError, r"torch.from_numpy\(vectors\) shares"),
    ],
)
def test_options_that_are_refused(
    on_cpu: Embedder, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        on_cpu.encode(TEXTS, **options)


def test_words_of_sentence_transformers(on_cpu: Embedder) -> None:
    vectors = on_cpu.encode(TEXTS)
    np.testing.assert_allclose(on_cpu.similarity(vectors, vectors), vectors @ vectors.T, atol=1e-6)
    assert on_cpu.similarity(2 * vectors[0], vectors[:2]).shape == (1, 2)
    on_cpu.config = EmbedderConfig(48, similarity="euclidean")
    apart = np.linalg.norm(vectors[:, None] - vectors, axis=-1)
    np.testing.assert_allclose(on_cpu.similarity(vectors, vectors), -apart, atol=1e-6)
    with pytest.raises(ShapeError, match=r"got \[4, 20\], \[4, 19\]"):
        on_cpu.similarity(vectors, vectors[:, :19])
    for ragged in ([[1.0, 2.0], [1.0]], [[[1.0, 2.0], [1.0]]]):
        with pytest.raises(
            ShapeError, match="similarity: expected rows of equal length, got 1 and"
        ):
            on_cpu.similarity(ragged, vectors)
    for dtype in ("int8", "uint8", "binary", "ubinary"):
        bits = packed(vectors, dtype, [[-1.0] * 20, [1.0] * 20])
        with pytest.raises(DTypeError, match=r"similarity: expected floats, got u?int8"):
            on_cpu.similarity(bits, bits)
    bits = packed(vectors, "ubinary")
    differing = (vectors[:, None] > 0) != (vectors > 0)
    counted = np.bitwise_count(bits[:, None] ^ bits).sum(-1)
    np.testing.assert_array_equal(counted, differing.sum(-1))
    with pytest.raises(DTypeError, match=r"similarity: expected numbers, .* got str"):
        on_cpu.similarity("a text", vectors)
    with pytest.raises(AttributeError, match=r"'max_seq_length': model\.config\.max_length"):
        on_cpu.max_seq_length  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"'rank': ct\.load\(\.\.\., task=\"classify\"\)"):
        on_cpu.rank  # type: ignore[attr-defined]  # noqa: B018
