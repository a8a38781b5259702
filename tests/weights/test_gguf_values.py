"""GGUF files: values of another type, scalings of the rotary embedding, how text is cut."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella.errors import WeightsError
from centella.models.llama_config import LlamaConfig
from centella.models.llama_gguf import ALLOWED, FIELDS, OTHER, SAME, config_values, tensors_of
from centella.tasks.text.gguf import begin_id, read_template, read_tokenizer, stop_ids
from centella.weights.gguf import GGUF, KINDS, GGUFTensor, open_gguf

pytest.importorskip("gguf")
from gguf.constants import Keys

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


KEYS = sorted(
    {
        value.removeprefix("{arch}.")
        for group in (Keys.LLM, Keys.Attention, Keys.Rope)
        for value in vars(group).values()
        if isinstance(value, str) and value.startswith("{arch}.") and "{dense}" not in value
    }
    - FIELDS.keys()
    - OTHER
)


@pytest.mark.parametrize("key", [*KEYS, "rope.scale_linear", "rope.local.freq_base"])
def test_values_of_an_architecture_that_are_not_read(key: str, tmp_path: Path) -> None:
    """Of llama.cpp's keys those that may change the model are refused, unless they are neutral."""
    path = tmp_path / "model.gguf"
    write(FOLDER / "qwen3", path)
    file, name = open_gguf(path), f"qwen3.{key}"
    sizes = {"attention.key_length": 16, "embedding_length": 48, "rope.dimension_count": 16}
    neutral = [sizes[SAME[key]]] if key in SAME else ALLOWED.get(key, (0, False, 0.0))
    wanted = config_values(file)
    for value in neutral:
        assert config_values(changed(file, {name: value})) == wanted
    with pytest.raises(WeightsError, match=f"'{name}': this library does not read this value"):
        config_values(changed(file, {name: 7}))
    if key == "attention.causal":
        with pytest.raises(WeightsError, match="does not read this value, which is False"):
            config_values(changed(file, {name: False}))


# The values that llama.cpp's converter writes for an architecture beside those of `FIELDS`.
WRITTEN: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 320, "rope.dimension_count": 16, "attention.value_length": 16,
              "tensor_data_layout": "Meta AI original pth", "rope.scaling.finetuned": False},
    "phi3": {"rope.scaling.original_context_length": 4096},
    "gemma2": {"attention.value_length": 16},
    "gemma3": {"attention.value_length": 16, "rope.freq_base_swa": 10000.0},
    "granite": {"vocab_size": 320, "rope.dimension_count": 12},
    "qwen3": {"pooling_type": 3, "attention.value_length": 16, "attention.causal": True},
    "qwen3moe": {"expert_weights_norm": True, "expert_shared_feed_forward_length": 0,
                 "attention.value_length": 16, "expert_weights_scale": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_values_that_converters_write(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(folder_of("qwen3-moe" if name == "qwen3moe" else name, tmp_path), path)
    more = {f"{name}.{key}": value for key, value in WRITTEN[name].items()}
    file = open_gguf(path)
    one, two = (LlamaConfig.from_dict(config_values(f)) for f in (file, changed(file, more)))
    for rope, other in zip(one.ropes, two.ropes, strict=True):
        np.testing.assert_array_equal(rope.tables(20), other.tables(20))
    assert replace(two, ropes=one.ropes) == one


@pytest.mark.parametrize("name", ["granite", "qwen3", "phi3"])
def test_columns_that_turn_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    """Of every family, as llama.cpp has it."""
    path = tmp_path / "model.gguf"
    write(folder_of(name, tmp_path), path)
    config = config_values(changed(open_gguf(path), {f"{name}.rope.dimension_count": 6}))
    assert [rope.dim for rope in LlamaConfig.from_dict(config).ropes] == [6]


def test_windows_of_an_architecture_without_them(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(FOLDER / "olmo2", path)
    with pytest.raises(
        WeightsError, match=r"olmo2\.attention\.sliding_window: expected none, got 4"
    ):
        config_values(changed(open_gguf(path), {"olmo2.attention.sliding_window": 4}))


def test_scalings_as_llama_cpp_reads_them(tmp_path: Path) -> None:
    """A factor without a type is linear; yarn has its two bounds."""
    path = tmp_path / "model.gguf"
    write(FOLDER / "granite", path)
    file = open_gguf(path)

    def tables(**values: Any) -> Any:
        more = {f"granite.rope.scaling.{key}": value for key, value in values.items()}
        (rope,) = LlamaConfig.from_dict(config_values(changed(file, more))).ropes
        return rope.tables(20)

    np.testing.assert_array_equal(tables(factor=2.0), tables(type="linear", factor=2.0))
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    plain, bounds = tables(**yarn), tables(**yarn, yarn_beta_fast=32.0, yarn_beta_slow=1.0)
    np.testing.assert_array_equal(plain, bounds)
    other = tables(**yarn, yarn_beta_fast=4.0, yarn_beta_slow=0.05)
    assert np.abs(np.array(other) - plain).max() > 1e-3


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
