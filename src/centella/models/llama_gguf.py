"""Llama-like decoders in GGUF files: config and tensors under the names of safetensors folders.

Source: the GGUF specification, and what llama.cpp's converter changes: rows of q and k of some
families change places (their pairs lie beside each other), Gemma's norms are stored whole, Llama
3's frequencies are divided by a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, DType, widen
from centella.errors import WeightsError
from centella.models.llama_config import COLUMNS
from centella.weights.gguf import GGUF, GGUFTensor
from centella.weights.model_files import show

# By `general.architecture`: the `model_type` that transformers gives it.
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3",
            "smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "gemma2": "gemma2",
            "gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}  # fmt: skip
PERMUTED = frozenset(["llama", "smollm3", "granite"])  # rows of q and k
WHOLE = frozenset(["gemma2", "gemma3"])  # norms with the 1 that folders leave out
LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose scores have another scale
EXPERTS = "_exps"  # what ends the names of tensors of all experts of a layer
OWN = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
       "output.weight": "lm_head.weight"}  # fmt: skip
OF_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj", "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
FREQUENCIES = "rope_freqs.weight"
FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
PAIRS = 65_536  # at most in a tensor of the rotary embedding
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
    "final_logit_softcapping": "final_logit_softcapping", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob", "rope.freq_base_swa": "rope_local_base_freq",
}  # fmt: skip
WINDOWED = frozenset(["llama", "phi3", "gemma2", "gemma3"])  # have layers with a sliding window
# Other values that are read, and those that change nothing here: layouts, labels, training.
OTHER = frozenset(
    """rope.dimension_count rope.scaling.type rope.scaling.factor rope.scaling.attn_factor
    rope.scaling.original_context_length rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    pooling_type vocab_size tensor_data_layout classifier.output_labels rope.scaling.finetuned
    attention.layer_norm_epsilon""".split()
)
# Values that change nothing if they say this; of others, those that are 0, false or empty do not.
ALLOWED: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,), "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,), "rope.scale_linear": (1,),
    "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1), "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1), "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
}  # fmt: skip
# Extents that are those of another value.
SAME = {
    "attention.value_length": "attention.key_length",
    "embedding_length_out": "embedding_length",
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.key_length",
    "rope.dimension_count_swa": "rope.dimension_count",
}


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

    def read_rows(self, first: int, out: Array) -> None:
        """Read elements of `array` or `blocks` along axis 0, from `first` on."""
        order = np.arange(self.shape[0]) if self.rows is None else self.rows
        rows = order[first : first + len(out)]
        begin = int(rows.min())
        data = np.empty((int(rows.max()) + 1 - begin, *out.shape[1:]), out.dtype)
        self.stored.read_rows(begin, data)
        data = data[rows - begin]
        out[...] = data if self.change is None else self.change(data)


Named = Mapping[str, GGUFTensor | Changed]


def config_values(file: GGUF) -> dict[str, Any]:
    """What config.json would say.

    Raises:
        WeightsError: an architecture that this library does not have, a missing or malformed value.
    """
    name = _architecture(file)
    stated = {f: plain(file.values.get(f"{name}.{key}")) for key, f in FIELDS.items()}
    values: dict[str, Any] = {k: v for k, v in stated.items() if v is not None}
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
    if FAMILIES[name] == "qwen3_moe":
        values.setdefault("norm_topk_prob", True)  # as every released one has it
    if values.get("sliding_window") and name not in WINDOWED:
        raise WeightsError(
            f"{file.file}: {name}.attention.sliding_window: expected none, got "
            f"{show(values['sliding_window'])}"
        )
    if name == "llama" and values.get("sliding_window"):
        values["model_type"] = "mistral"
    width, heads = (_whole(file, f"{name}.{k}") for k in ("embedding_length",
                                                          "attention.head_count"))  # fmt: skip
    head_dim = _whole(file, f"{name}.attention.key_length")
    each = width // heads if width and heads else None
    if name in WHOLE:  # scores are divided by the root of this, which the file does not say
        largest = values.get("num_hidden_layers") == LARGEST[name]
        values["query_pre_attn_scalar"] = each if largest else head_dim
    columns, head_dim = _whole(file, f"{name}.rope.dimension_count"), head_dim or each
    _expect_known(file, name, {
        "attention.key_length": head_dim, "embedding_length": width,
        "rope.dimension_count": columns or head_dim,
    })  # fmt: skip
    if columns and head_dim and columns < head_dim:  # their readers turn so many in every family
        values[COLUMNS] = columns
    values["rope_scaling"] = _scaling(file, name)
    return values


def _expect_known(file: GGUF, name: str, sizes: Mapping[str, int | None]) -> None:
    """Refuse a value of the architecture that is not read and that may change the model.

    Args:
        sizes: extents that values of `SAME` are compared with.
    """
    for key, stored in file.values.items():
        own = key.removeprefix(f"{name}.")
        if own == key or own in FIELDS or own in OTHER:
            continue
        value = plain(stored)
        known = (sizes[SAME[own]],) if own in SAME else ALLOWED.get(own)
        if (value not in known) if known else value:
            raise WeightsError(
                f"{file.file}: {show(key)}: this library does not read this value, which is "
                f"{show(value)}; without it the model might be another"
            )


def _scaling(file: GGUF, name: str) -> dict[str, Any] | None:
    """The scaling of the rotary embedding; tensors of factors mean longrope, whatever its type."""
    key = f"{name}.rope.scaling"
    kind = file.values.get(f"{key}.type", "linear" if f"{key}.factor" in file.values else "none")
    if not isinstance(kind, str) or kind not in ("none", "linear", "yarn", "longrope"):
        raise WeightsError(
            f"{file.file}: {key}.type: expected none, linear, yarn or longrope, got {show(kind)}"
        )
    lists: dict[str, Any] = {f: _floats(file, t) for f, t in FACTORS.items() if t in file.tensors}
    kind = "longrope" if lists else kind
    if FREQUENCIES in file.tensors and kind == "none":
        kind, lists = "divided", {"divisors": _floats(file, FREQUENCIES)}
    elif FREQUENCIES in file.tensors:
        raise WeightsError(
            f"{file.file}: tensor {FREQUENCIES}: expected none beside the scaling {kind}, got one"
        )
    growth = _number(file, f"{key}.attn_factor")
    if growth not in (None, 1.0) and kind not in ("yarn", "longrope"):
        raise WeightsError(
            f"{file.file}: {key}.attn_factor: expected 1 for the scaling {kind}, got {growth}"
        )
    if kind in ("none", "divided"):
        return {"rope_type": kind, **lists} if lists else None
    factor = _number(file, f"{key}.factor")
    if growth and kind == "yarn":  # is on top of what the scaling has
        growth *= 1 + 0.1 * math.log(max(factor or 1.0, 1.0))
    if kind == "yarn":
        lists = {f"beta_{n}": _number(file, f"{key}.yarn_beta_{n}") for n in ("fast", "slow")}
    return {
        "rope_type": kind, "factor": factor, "attention_factor": growth, **lists,
        "original_max_position_embeddings": _whole(file, f"{key}.original_context_length"),
    }  # fmt: skip


def _floats(file: GGUF, name: str) -> list[float]:
    """The numbers of a tensor of the rotary embedding."""
    tensor = file.tensors[name]
    if tensor.dtype is None or math.prod(tensor.shape) > PAIRS:
        raise WeightsError(
            f"{file.file}: tensor {name}: expected up to {PAIRS} numbers, got "
            f"{list(tensor.shape)} of {tensor.kind.name}"
        )
    return [float(x) for x in widen(tensor.array, tensor.dtype).ravel()]


def _whole(file: GGUF, name: str) -> int | None:
    """A whole number over 0; None where it is missing."""
    value = plain(file.values.get(name))
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise WeightsError(
            f"{file.file}: {name}: expected a whole number over 0, got {show(value)}"
        )
    return int(value)


def _number(file: GGUF, name: str) -> float | None:
    """A number over 0; None where it is missing."""
    value = plain(file.values.get(name))
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise WeightsError(f"{file.file}: {name}: expected a number over 0, got {show(value)}")
    return float(value)


def tensors_of(file: GGUF, head_dim: int) -> Named:
    """The tensors by the names of a safetensors folder, as the model wants them."""
    name = _architecture(file)
    return dict(_named(file, name, head_dim))


def _named(file: GGUF, family: str, head_dim: int) -> Iterator[tuple[str, GGUFTensor | Changed]]:
    for name, tensor in file.tensors.items():
        if name in (FREQUENCIES, *FACTORS.values()):
            continue
        own, match = OWN.get(name), LAYER.fullmatch(name)
        if own is None and match is not None:
            number, part, what = match.groups()
            path = _part(family, part)
            own = path and f"model.layers.{number}.{path}.{what}"
            own = own and own.removesuffix(".weight") if part.endswith(EXPERTS) else own
        if own is None:  # is left over, and so named in an error
            yield name, tensor
        elif family in PERMUTED and match and match[2] in ("attn_q", "attn_k"):
            yield own, Changed(tensor, tensor.shape, rows=_halves(file, tensor, head_dim))
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


def _halves(file: GGUF, tensor: GGUFTensor, head_dim: int) -> Array:
    """Where each row of the model's is in the file, whose pairs lie beside each other."""
    if head_dim % 2 or not tensor.shape or tensor.shape[0] % head_dim:
        raise WeightsError(
            f"{file.file}: tensor {tensor.name}: expected heads of {head_dim} rows, an even "
            f"number, got {list(tensor.shape)}"
        )
    order: Array = np.arange(tensor.shape[0]).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()
    return order


def _architecture(file: GGUF) -> str:
    name = file.values.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise WeightsError(
            f"{file.file}: general.architecture: expected bert, {', '.join(FAMILIES)}, got "
            f"{show(name)}"
        )
    return name


def plain(value: Any) -> Any:
    """A value as JSON has it; of one for each layer that are equal, the one."""
    if isinstance(value, np.ndarray):
        several = set(value.tolist())
        return several.pop() if len(several) == 1 else value.tolist()
    return value
