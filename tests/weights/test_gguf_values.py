"""GGUF files: values of another type, scalings of the rotary embedding, how text is cut."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from centella.errors import WeightsError
from centella.models.llama_config import LlamaConfig
from centella.models.llama_gguf import config_values, tensors_of
from centella.tasks.text_gguf import begin_id, read_template, read_tokenizer, stop_ids
from centella.weights.gguf import GGUF, KINDS, GGUFTensor, open_gguf

pytest.importorskip("gguf")
from tests.support.gguf_files import write  # needs the package
from tests.weights.test_gguf import FOLDER, folder_of, header, text, with_tokenizer


@pytest.mark.parametrize(
    ("pre", "first", "pieces"),
    [
        ("default", False, ["it", "'s", "Ġ2345"]),
        ("refact", False, ["it", "'s", "Ġ", "2", "3", "4", "5"]),
        ("qwen2", False, ["it", "'s", "Ġ", "2", "3", "4", "5"]),
        ("deepseek-r1-qwen", False, ["it", "'s", "Ġ", "2", "3", "4", "5"]),
        ("llama-bpe", True, ["it", "'s", "Ġ", "234", "5"]),
        ("tekken", True, ["it", "'s", "Ġ", "2", "3", "4", "5"]),
        ("gpt-4o", False, ["it's", "Ġ", "234", "5"]),
    ],
)
def test_how_text_is_cut(pre: str, first: bool, pieces: list[str], tmp_path: Path) -> None:
    """By the name of the cut; and a first token where llama.cpp adds one of itself."""
    pytest.importorskip("tokenizers")
    file = open_gguf(with_tokenizer(tmp_path, tokenizer_pre=pre))
    native: Any = read_tokenizer(file).native  # type: ignore[union-attr]
    cut = native.pre_tokenizer.pre_tokenize_str("it's 2345")
    assert [piece for piece, _ in cut] == pieces
    assert (native.encode("a").ids[0] == begin_id(file)) is first


def test_pieces_that_are_tokens_are_not_merged(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("gpt-4o", False)):
        (tmp_path / pre).mkdir()
        tokens = ["<s>", "a", "b", "c", "abc", *(f"<{i}>" for i in range(315))]
        file = with_tokenizer(tmp_path / pre, tokenizer_pre=pre, token_list=tokens,
                              token_types=[3] + [1] * 319, token_merges=["a b"],
                              bos_token_id=0, eos_token_id=0)  # fmt: skip
        without_merges = changed(open_gguf(file), {"tokenizer.ggml.merges": []})
        native: Any = read_tokenizer(without_merges).native  # type: ignore[union-attr]
        assert (native.encode("abc").tokens[-1] == "abc") is whole


def rope_tensor(name: str, numbers: list[float], path: Path) -> GGUFTensor:
    """A tensor of a file of its own."""
    data = np.array(numbers, np.float32).tobytes()
    entry = text(name) + struct.pack("<IQIQ", 1, len(numbers), 0, 0)
    raw = header(tensors=1) + entry
    file = path / f"{name}.gguf"
    file.write_bytes(raw + bytes(-len(raw) % 32) + data)
    return open_gguf(file).tensors[name]


def changed(file: GGUF, values: dict[str, Any], *tensors: GGUFTensor) -> GGUF:
    return GGUF(
        file.file, {**file.values, **values}, {**file.tensors, **{t.name: t for t in tensors}}
    )


def test_tensors_of_factors_mean_longrope(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(folder_of("phi3", tmp_path), path)
    short, long = ([1.0 + i * by for i in range(3)] for by in (0.0, 0.5))
    both = [rope_tensor(f"rope_factors_{n}.weight", x, tmp_path)
            for n, x in (("long", long), ("short", short))]  # fmt: skip
    scaling = {"phi3.rope.scaling.original_context_length": 32,
               "phi3.rope.scaling.attn_factor": 1.25}  # fmt: skip
    for kind in ({}, {"phi3.rope.scaling.type": "none"}, {"phi3.rope.scaling.type": "longrope"}):
        file = changed(open_gguf(path), {**scaling, **kind}, *both)
        (rope,) = LlamaConfig.from_dict(config_values(file)).ropes
        plain = 10000.0 ** (-np.arange(0, 6, 2) / 6)
        for capacity, divisors in ((32, short), (33, long)):
            wanted = 1.25 * np.cos(31 * plain / np.array(divisors))
            np.testing.assert_allclose(rope.tables(capacity)[0][31], wanted, atol=1e-6)
    with pytest.raises(WeightsError, match="short_factor: expected 3 positive numbers"):
        LlamaConfig.from_dict(config_values(changed(open_gguf(path), scaling, both[0])))
    with pytest.raises(WeightsError, match=r"rope_freqs\.weight: expected none beside"):
        config_values(changed(file, {}, rope_tensor("rope_freqs.weight", short, tmp_path)))
    with pytest.raises(WeightsError, match=r"attn_factor: expected 1 for the scaling none"):
        config_values(changed(open_gguf(path), scaling))
    other = rope_tensor("rope_factors_other.weight", short, tmp_path)
    assert other.name in tensors_of(changed(open_gguf(path), {}, other), 12)  # is left over


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("qwen3.attention.head_count", "8", "head_count: expected a whole number over 0, got '8'"),
        ("qwen3.rope.dimension_count", "8", "dimension_count: expected a whole number over 0"),
        ("qwen3.attention.key_length", [], "key_length: expected a whole number over 0"),
        ("qwen3.block_count", 2**32 - 1, "num_hidden_layers: expected at most 10000"),
        ("qwen3.rope.scaling.type", np.zeros(3), r"rope\.scaling\.type: expected none, linear"),
        ("qwen3.rope.scaling.attn_factor", "x", "attn_factor: expected a number over 0"),
        ("general.architecture", np.zeros(3), r"general\.architecture: expected bert, llama"),
        ("tokenizer.ggml.tokens", np.zeros(3), r"tokenizer\.ggml\.tokens: expected strings"),
        ("tokenizer.ggml.tokens", "text", r"tokenizer\.ggml\.tokens: expected strings"),
        ("tokenizer.ggml.model", np.zeros(3), r"tokenizer\.ggml\.model: expected gpt2, llama"),
        ("tokenizer.ggml.pre", ["a"], r"tokenizer\.ggml\.pre: expected default"),
        ("tokenizer.ggml.token_type", ["a"] * 320, r"tokenizer\.ggml\.token_type: expected 320"),
        ("tokenizer.ggml.add_bos_token", "no", "add_bos_token: expected true or false"),
        ("tokenizer.ggml.eos_token_id", np.zeros(2), "eos_token_id: expected an id below 320"),
        ("tokenizer.chat_template", 3, r"tokenizer\.chat_template: expected a string"),
    ],
)
def test_values_of_another_type(name: str, value: Any, message: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    file = changed(open_gguf(with_tokenizer(tmp_path)), {name: value})
    with pytest.raises(WeightsError, match=message):
        config = LlamaConfig.from_dict(config_values(file))
        tensors_of(file, config.head_dim)
        read_template(file), stop_ids(file), read_tokenizer(file)


def test_rows_that_are_no_heads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(FOLDER / "llama", path)
    file = open_gguf(path)
    query = GGUFTensor("blk.0.attn_q.weight", KINDS[0], (95, 48), None, 0)  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match=r"attn_q\.weight: expected heads of 16 rows"):
        tensors_of(changed(file, {}, query), 16)
    path.write_bytes(header(tensors=1) + text("t") + struct.pack("<IQQIQ", 2, 0, 2**40, 0, 0))
    with pytest.raises(WeightsError, match="expected extents over 0, got"):
        open_gguf(path)


def test_a_token_of_sentencepiece_that_is_too_long(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    more = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.tokens": ["a" * 1001],
        "tokenizer.ggml.scores": np.zeros(1),
        "tokenizer.ggml.token_type": np.ones(1, int),
    }
    file = changed(open_gguf(with_tokenizer(tmp_path)), more)
    with pytest.raises(WeightsError, match=r"tokens: expected up to 1000 bytes each, got 'aaa"):
        read_tokenizer(file)
