"""Llama-like decoders in GGUF files: config and tensors under the names of safetensors folders.

Source: the GGUF specification, and what llama.cpp's converter changes: rows of q and k of some
families change places (their pairs lie beside each other), Gemma's norms are stored whole, Llama
3's frequencies are divided by a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, DType
from centella.errors import WeightsError
from centella.weights.gguf import GGUF, GGUFTensor
from centella.weights.model_files import show

# By `general.architecture`: the `model_type` that transformers gives it.
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3",
            "smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "gemma2": "gemma2",
            "gemma3": "gemma3_text"}  # fmt: skip
PERMUTED = frozenset(["llama", "smollm3", "granite"])  # rows of q and k
WHOLE = frozenset(["gemma2", "gemma3"])  # norms with the 1 that folders leave out
LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose scores have another scale
OWN = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
       "output.weight": "lm_head.weight"}  # fmt: skip
OF_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
FREQUENCIES = "rope_freqs.weight"
# Fields of config.json, by what follows the architecture's name in a value of the file.
FIELDS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


class Changed(Struct, frozen=True, eq=False):
    """A tensor of a file whose data are other ones than the model's.

    Attributes:
        stored: the tensor.
        shape: of the model's.
        change: from the stored array to the model's; None: rows alone change places.
        rows: their order, or None.
    """

    stored: GGUFTensor
    shape: tuple[int, ...]
    change: Callable[[Array], Array] | None = None
    rows: Array | None = None

    @property
    def dtype(self) -> DType | None:
        """Its storage type; None for a quantised format."""
        return self.stored.dtype

    @property
    def format(self) -> str:
        """The name of its quantised format; "" where elements are stored."""
        return self.stored.format

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stored.nbytes

    @property
    def array(self) -> Array:
        """The data."""
        data = self.stored.array
        data = data if self.rows is None else data[self.rows]
        return data if self.change is None else self.change(data)

    @property
    def blocks(self) -> Array:
        """The bytes of a quantised matrix, its rows in the model's order."""
        return self.stored.blocks if self.rows is None else self.stored.blocks[self.rows]


Named = Mapping[str, GGUFTensor | Changed]


def config_values(file: GGUF) -> dict[str, Any]:
    """What config.json would say.

    Raises:
        WeightsError: an architecture that this library does not have, a missing or malformed value.
    """
    name = _architecture(file)
    stated = {f: file.values.get(f"{name}.{key}") for key, f in FIELDS.items()}
    values: dict[str, Any] = {k: _plain(v) for k, v in stated.items() if v is not None}
    tokens, table = file.values.get("tokenizer.ggml.tokens"), file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise WeightsError(f"{file.file}: expected a tensor token_embd.weight [vocab, hidden]")
    values |= {
        "model_type": FAMILIES[name], "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }  # fmt: skip
    if isinstance(tokens, list) and len(tokens) > table.shape[0]:
        raise WeightsError(
            f"{file.file}: tokenizer.ggml.tokens: expected up to {table.shape[0]}, the rows of "
            f"token_embd.weight, got {len(tokens)}"
        )
    if name == "llama" and values.get("sliding_window"):
        values["model_type"] = "mistral"
    if name in WHOLE:  # scores are divided by the root of this, which the file does not say
        width, heads = values.get("hidden_size", 0), values.get("num_attention_heads", 1)
        largest = values.get("num_hidden_layers") == LARGEST[name]
        values["query_pre_attn_scalar"] = width // heads if largest else values.get("head_dim")
    _scaling(file, name, values)
    return values


def _scaling(file: GGUF, name: str, values: dict[str, Any]) -> None:
    """The rotary embedding: its scaling, its columns, its divisors."""
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    head_dim = values.get("head_dim") or (width // heads if heads and width else None)
    columns = file.values.get(f"{name}.rope.dimension_count")
    if columns and head_dim and columns < head_dim:
        values["partial_rotary_factor"] = columns / head_dim
    kind = file.values.get(f"{name}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise WeightsError(
            f"{file.file}: {name}.rope.scaling.type: expected none, linear, yarn or longrope, got "
            f"{show(kind)}"
        )
    if kind != "none":
        scaling = {"rope_type": kind, "factor": file.values.get(f"{name}.rope.scaling.factor")}
        trained = file.values.get(f"{name}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = trained
        for which in ("long", "short"):
            tensor = file.tensors.get(f"rope_factors_{which}.weight")
            if tensor is not None:
                scaling[f"{which}_factor"] = [float(x) for x in tensor.array.ravel()]
        values["rope_scaling"] = scaling
    elif FREQUENCIES in file.tensors:
        divisors = [float(x) for x in file.tensors[FREQUENCIES].array.ravel()]
        values["rope_scaling"] = {"rope_type": "divided", "divisors": divisors}


def tensors_of(file: GGUF, head_dim: int) -> Named:
    """The tensors by the names of a safetensors folder, as the model wants them."""
    name = _architecture(file)
    return dict(_named(file, name, head_dim))


def _named(file: GGUF, family: str, head_dim: int) -> Iterator[tuple[str, GGUFTensor | Changed]]:
    for name, tensor in file.tensors.items():
        if name == FREQUENCIES or name.startswith("rope_factors_"):
            continue
        own, match = OWN.get(name), LAYER.fullmatch(name)
        if own is None and match is not None:
            number, part, what = match.groups()
            path = _part(family, part)
            own = path and f"model.layers.{number}.{path}.{what}"
        if own is None:  # is left over, and so named in an error
            yield name, tensor
        elif family in PERMUTED and match and match[2] in ("attn_q", "attn_k"):
            yield own, Changed(tensor, tensor.shape, rows=_halves(tensor.shape[0], head_dim))
        elif family in WHOLE and own.endswith("norm.weight"):
            yield own, Changed(tensor, tensor.shape, change=lambda data: data - np.float32(1))
        else:
            yield own, tensor


def _part(family: str, part: str) -> str | None:
    if part == "ffn_norm" and family in WHOLE:
        return "pre_feedforward_layernorm"
    if part == "ffn_up" and family == "phi3":
        return "mlp.gate_up_proj"
    return OF_LAYER.get(part)


def _halves(rows: int, head_dim: int) -> Array:
    """Where each row of the model's is in the file, whose pairs lie beside each other."""
    order: Array = np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()
    return order


def _architecture(file: GGUF) -> str:
    name = file.values.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise WeightsError(
            f"{file.file}: general.architecture: expected {', '.join(FAMILIES)}, got {show(name)}"
        )
    return name


def _plain(value: Any) -> Any:
    """A value as JSON has it; of one for each layer that are equal, the one."""
    if isinstance(value, np.ndarray):
        several = set(value.tolist())
        return several.pop() if len(several) == 1 else value.tolist()
    return value
