"""BERT encoders in GGUF files: config and tensors under the names of safetensors folders.

Source: the GGUF specification, and the names that llama.cpp's converter gives.
"""

from __future__ import annotations

import re
from typing import Any

from centella.errors import WeightsError
from centella.models.llama_gguf import plain
from centella.weights.gguf import GGUF, GGUFTensor
from centella.weights.model_files import show

ARCHITECTURE = "bert"
TABLES = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "token_embd_norm.weight": "embeddings.LayerNorm.weight",
    "token_embd_norm.bias": "embeddings.LayerNorm.bias",
}
OF_LAYER = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key",
    "attn_v": "attention.self.value", "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm", "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
FIELDS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip


def config_values(file: GGUF) -> dict[str, Any]:
    """What config.json would say.

    Raises:
        WeightsError: a table of words, positions or token types is missing.
    """
    stated = {f: plain(file.values.get(f"{ARCHITECTURE}.{key}")) for key, f in FIELDS.items()}
    values: dict[str, Any] = {k: v for k, v in stated.items() if v is not None}
    if file.values.get(f"{ARCHITECTURE}.attention.causal") not in (None, False):
        got = show(file.values[f"{ARCHITECTURE}.attention.causal"])
        raise WeightsError(
            f"{file.file}: {ARCHITECTURE}.attention.causal: expected false, got {got}"
        )
    sizes = {
        "token_embd": "vocab_size", "position_embd": "max_position_embeddings",
        "token_types": "type_vocab_size",
    }  # fmt: skip
    for name, field in sizes.items():
        table = file.tensors.get(f"{name}.weight")
        if table is None or len(table.shape) != 2:
            raise WeightsError(f"{file.file}: expected a tensor {name}.weight [rows, hidden]")
        values[field] = table.shape[0]
    return {**values, "model_type": "bert"}


def tensors_of(file: GGUF) -> dict[str, GGUFTensor]:
    """The tensors by the names of a safetensors folder."""
    return {_own(name): tensor for name, tensor in file.tensors.items()}


def _own(name: str) -> str:
    match = LAYER.fullmatch(name)
    if match is None or match[2] not in OF_LAYER:
        return TABLES.get(name, name)  # others are left over, and so named in an error
    return f"encoder.layer.{match[1]}.{OF_LAYER[match[2]]}.{match[3]}"
