"""The config.json of published decoders, as files of `tests/data/configs` have their values."""

from __future__ import annotations

import json

import numpy as np
import pytest

from centella.models.llama_config import FAMILIES, LlamaConfig
from tests.support.model_common import DATA

FOLDER = DATA / "configs"
# By file: layers, heads, key and value heads, head_dim, windows, rotary type and columns and theta
# of each embedding, and whether the head is tied.
PUBLISHED = {
    "deepseek-r1-distill-qwen-1.5b": (28, 12, 2, 128, {0}, [("default", 128, 1e4)], False),
    "gemma-2-27b": (46, 32, 16, 128, {0, 4096}, [("default", 128, 1e4)] * 2, True),
    "gemma-2-2b-it": (26, 8, 4, 256, {0, 4096}, [("default", 256, 1e4)] * 2, True),
    "gemma-3-1b-it": (26, 4, 1, 256, {0, 512},
                      [("default", 256, 1e4), ("default", 256, 1e6)], True),
    "gemma-3-270m-it": (18, 4, 1, 256, {0, 512},
                        [("default", 256, 1e4), ("default", 256, 1e6)], True),
    "granite-3.0-2b-instruct": (40, 32, 8, 64, {0}, [("default", 64, 1e4)], True),
    "granite-3.3-2b-instruct": (40, 32, 8, 64, {0}, [("default", 64, 1e7)], True),
    "llama-3-8b-instruct": (32, 32, 8, 128, {0}, [("default", 128, 5e5)], False),
    "llama-3.1-8b-instruct": (32, 32, 8, 128, {0}, [("llama3", 128, 5e5)], False),
    "llama-3.2-1b-instruct": (16, 32, 8, 64, {0}, [("llama3", 64, 5e5)], True),
    "mistral-7b-instruct-v0.3": (32, 32, 8, 128, {0}, [("default", 128, 1e6)], False),
    "mistral-7b-v0.1": (32, 32, 8, 128, {4096}, [("default", 128, 1e4)], False),
    "mistral-nemo-instruct-2407": (40, 32, 8, 128, {0}, [("default", 128, 1e6)], False),
    "olmo-2-0425-1b": (16, 16, 16, 128, {0}, [("default", 128, 5e5)], False),
    "phi-3-mini-4k-instruct": (32, 32, 32, 96, {2047}, [("default", 96, 1e4)], False),
    "phi-4": (40, 40, 10, 128, {0}, [("default", 128, 2.5e5)], False),
    "phi-4-mini-instruct": (32, 24, 8, 128, {262_144}, [("longrope", 96, 1e4)], True),
    "qwen2.5-0.5b-instruct": (24, 14, 2, 64, {0}, [("default", 64, 1e6)], True),
    "qwen2.5-7b-instruct": (28, 28, 4, 128, {0}, [("default", 128, 1e6)], False),
    "qwen3-0.6b": (28, 16, 8, 128, {0}, [("default", 128, 1e6)], True),
    "qwen3-30b-a3b": (48, 32, 4, 128, {0}, [("default", 128, 1e6)], False),
    "qwen3-4b": (36, 32, 8, 128, {0}, [("default", 128, 1e6)], True),
    "smollm3-3b": (36, 16, 4, 128, {0}, [("default", 128, 5e6)], True),
}  # fmt: skip


def config_of(name: str) -> LlamaConfig:
    values = json.loads((FOLDER / f"{name}.json").read_text())
    return LlamaConfig.from_dict(values, name)


def test_each_family_has_a_published_config() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(PUBLISHED)
    assert {config_of(name).model_type for name in PUBLISHED} == set(FAMILIES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name: str) -> None:
    config = config_of(name)
    ropes = [(rope.kind, rope.dim) for rope in config.ropes]
    thetas = [theta for _, _, theta in PUBLISHED[name][5]]
    got = (
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
        config.head_dim, {*config.windows}, [(*r, t) for r, t in zip(ropes, thetas, strict=True)],
        config.tie_word_embeddings,
    )  # fmt: skip
    assert got == PUBLISHED[name]
    for rope, theta in zip(config.ropes, thetas, strict=True):
        slowest = theta ** (2 / rope.dim - 1)  # of the last pair, before its scaling
        sine = rope.tables(2)[1][1, -1]
        scaled = {"llama3": {64: 32, 128: 8}.get(rope.dim, 1)}.get(rope.kind, 1)
        growth = np.sqrt(1 + np.log(32) / np.log(4096)) if rope.kind == "longrope" else 1.0
        np.testing.assert_allclose(sine, growth * np.sin(slowest / scaled), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("gemma-2-27b", 144**-0.5), ("granite-3.3-2b-instruct", 1 / 64), ("qwen3-4b", 128**-0.5)],
)
def test_scales_of_published_configs(name: str, scale: float) -> None:
    assert config_of(name).attention_scale == scale


def test_what_else_published_configs_have() -> None:
    experts, granite, gemma = map(config_of, ("qwen3-30b-a3b", "granite-3.3-2b-instruct",
                                              "gemma-2-2b-it"))  # fmt: skip
    assert (experts.num_experts, experts.num_experts_per_tok, experts.norm_topk_prob) == (
        128, 8, True,
    )  # fmt: skip
    assert (granite.embedding_multiplier, granite.residual_multiplier) == (12.0, 0.22)
    assert granite.logits_divisor == 8.0
    assert (gemma.attention_softcap, gemma.logits_softcap) == (50.0, 30.0)
    assert gemma.embedding_multiplier == 48.0
    assert config_of("qwen2.5-7b-instruct").qkv_bias and not config_of("qwen3-4b").qkv_bias
    assert config_of("smollm3-3b").rope_of == (0, 0, 0, -1) * 9
