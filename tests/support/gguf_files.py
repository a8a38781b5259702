"""GGUF files of the small decoders, written with the gguf package as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from centella.dtypes import bf16, widen
from centella.models import bert_gguf
from centella.models.llama_gguf import FAMILIES, FIELDS, OF_LAYER, OWN, PERMUTED, WHOLE
from centella.weights import open_checkpoint

ARCHITECTURES = {v: k for k, v in FAMILIES.items()} | {"mistral": "llama"}
# Of kinds that the package does not write: where a block has f16 factors, and of what size the
# first one is such that elements are below 0.1.
FACTORS = {"Q2_K": ((80, 82), 45), "Q3_K": ((108,), 128), "Q4_K": ((0, 2), 945),
           "Q5_K": ((0, 2), 1953), "Q6_K": ((208,), 4096), "IQ4_NL": ((0,), 127),
           "IQ4_XS": ((0,), 4064)}  # fmt: skip
Array = np.ndarray[Any, Any]


def quantized(data: Array, kind: str) -> Array:
    """The bytes of a matrix in a kind, uint8 [rows, bytes]; random ones where nothing writes it."""
    form = GGMLQuantizationType[kind]
    if data.ndim > 2:
        return quantized(data.reshape(-1, data.shape[-1]), kind).reshape(*data.shape[:-1], -1)
    if kind not in FACTORS:
        try:
            return quantize(np.ascontiguousarray(data), form)
        except NotImplementedError:
            pytest.fail(f"the gguf package writes no {kind}: FACTORS needs a line for it")
    block, size = GGML_QUANT_SIZES[form]
    random = np.random.default_rng(data.size)
    raw = random.integers(0, 256, (len(data), data.shape[1] // block, size), np.uint8)
    offsets, largest = FACTORS[kind]
    for at in offsets:
        factors = random.uniform(0.02, 0.1, raw.shape[:2]) / largest
        raw[..., at : at + 2] = factors.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(len(data), -1)


def random_tensors(config: dict[str, Any]) -> dict[str, Array]:
    """The tensors of a Llama-like decoder, by the names of a safetensors folder."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv, d = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    table = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (heads * d, hidden), "self_attn.k_proj": (kv * d, hidden),
            "self_attn.v_proj": (kv * d, hidden), "self_attn.o_proj": (hidden, heads * d),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        experts, narrow = config.get("num_experts"), config.get("moe_intermediate_size", 0)
        if experts:
            for part in ("gate", "up", "down"):
                del layer[f"mlp.{part}_proj"]
            layer["mlp.gate"] = (experts, hidden)
            both = {"gate_proj": (narrow, hidden), "up_proj": (narrow, hidden),
                    "down_proj": (hidden, narrow)}  # fmt: skip
            layer |= {f"mlp.experts.{e}.{n}": s for e in range(experts) for n, s in both.items()}
        if config["model_type"].startswith("qwen3"):
            layer |= {"self_attn.q_norm": (d,), "self_attn.k_norm": (d,)}
        shapes |= {f"model.layers.{i}.{n}.weight": shape for n, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = table
    random = np.random.default_rng(7)
    return {n: (random.uniform(-0.1, 0.1, s) + (len(s) == 1)).astype(np.float32)
            for n, s in shapes.items()}  # fmt: skip


def with_stacked_experts(tensors: dict[str, Array]) -> dict[str, Array]:
    """Each expert's tensors as one of all experts, "mlp.experts.gate_proj.weight"."""
    several: dict[str, list[Array]] = {}
    for name, data in tensors.items():
        several.setdefault(re.sub(r"(mlp\.experts)\.\d+\.", r"\1.", name), []).append(data)
    return {n: np.stack(d) if ".experts." in n else d[0] for n, d in several.items()}


def own_name(architecture: str, name: str) -> str:
    """A tensor's name in a GGUF file."""
    back = {v: k for k, v in OWN.items()}
    if name in back:
        return back[name]
    _, _, number, rest = name.split(".", 3)
    path, what = rest.rsplit(".", 1)
    part = {v: k for k, v in OF_LAYER.items() if k not in ("post_attention_norm",)}.get(path)
    if architecture in (*WHOLE, "olmo2") and path == "post_attention_layernorm":
        part = "post_attention_norm"
    if path == "pre_feedforward_layernorm":
        part = "ffn_norm"
    if path == "mlp.gate_up_proj":
        part = "ffn_up"
    assert part is not None, name
    return f"blk.{number}.{part}.{what}"


def write(
    folder: Path, file: Path, kind: str | dict[str, str] = "F32", *, widened: bool = False,
    numbers: dict[str, Any] | None = None, each: int = 0, **more: Any,
) -> None:  # fmt: skip
    """A GGUF file of a model folder; matrices in one kind, the rest in F32.

    Args:
        kind: of all matrices; or by a part of their names, where others are of the kind of "".
        widened: write what the kinds stand for, as F32.
        numbers: a config in place of the folder's; the weights are then random.
        each: the most tensors of a file, where the model is split into several; 0: it is not.
    """
    config: dict[str, Any] = dict(numbers or json.loads((folder / "config.json").read_text()))
    if numbers is None:
        tensors = {n: widen(t.array, bf16) for n, t in open_checkpoint(folder).items()}
    else:
        tensors = random_tensors(numbers)
    tensors = with_stacked_experts(tensors)
    config.setdefault("num_experts", config.get("num_local_experts"))
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(file, architecture, split_max_tensors=each)
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    config["rope_theta"] = rope.get("rope_theta", 10000.0)
    if config["model_type"] == "qwen2":  # whose windows the format does not have
        del config["sliding_window"]
    for key, field in FIELDS.items():
        value = config.get(field)
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32}.get(type(value), writer.add_float32)
        add(f"{architecture}.{key}", value)
    if rope.get("rope_type") in ("linear", "yarn", "longrope"):
        if "factor" in rope:
            writer.add_string(f"{architecture}.rope.scaling.type", rope["rope_type"])
            writer.add_float32(f"{architecture}.rope.scaling.factor", rope["factor"])
        trained = rope.get("original_max_position_embeddings")
        if trained:
            writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", trained)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    part = config.get("partial_rotary_factor") or 1.0
    writer.add_uint32(f"{architecture}.rope.dimension_count", int(head_dim * part))
    for name, value in more.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    kinds = kind if isinstance(kind, dict) else {"": kind}
    for name, data in tensors.items():
        if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            shape = (-1, 2, head_dim // 2, *data.shape[1:])
            data = data.reshape(shape).swapaxes(1, 2).reshape(data.shape)
        if architecture in WHOLE and name.endswith("norm.weight"):
            data = data + 1
        form = GGMLQuantizationType[next(k for part, k in kinds.items() if part in name)]
        if data.ndim < 2 or ".mlp.gate." in name or data.shape[-1] % GGML_QUANT_SIZES[form][0]:
            form = GGMLQuantizationType.F32
        stored = quantized(data, form.name)
        if widened:
            stored, form = dequantize(stored, form), GGMLQuantizationType.F32
        writer.add_tensor(own_name(architecture, name), stored, raw_dtype=form)
    for name in ("long", "short") if "long_factor" in rope else ():
        factors = np.array(rope[f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_bert(folder: Path, file: Path, kind: str = "F32", **more: Any) -> None:
    """A GGUF file of a folder of a BERT, with its tokenizer; matrices in one kind, the rest in F32.

    Args:
        kind: of matrices whose rows are whole blocks.
        more: beside it, as `write` takes it.
    """
    config = json.loads((folder / "config.json").read_text())
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(vocab, key=vocab.__getitem__)
    writer = GGUFWriter(file, bert_gguf.ARCHITECTURE)
    for key, field in bert_gguf.FIELDS.items():
        value = config[field]
        write_value = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        write_value(f"{bert_gguf.ARCHITECTURE}.{key}", value)
    marked = [w.startswith("[") and w.endswith("]") for w in words]
    written = [w if m else w[2:] if w.startswith("##") else f"▁{w}"
               for w, m in zip(words, marked, strict=True)]  # fmt: skip
    values = {
        "causal_attention": False, "tokenizer_model": "bert", "token_list": written,
        "token_types": [3 if m else 1 for m in marked], "unk_token_id": vocab["[UNK]"],
        "bos_token_id": vocab["[CLS]"], "sep_token_id": vocab["[SEP]"],
        "pad_token_id": vocab["[PAD]"],
    }  # fmt: skip
    for name, value in {**values, **more}.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    tables = {v: k for k, v in bert_gguf.TABLES.items()}
    parts = {v: k for k, v in bert_gguf.OF_LAYER.items()}
    for name, tensor in open_checkpoint(folder).items():
        own = tables.get(name)
        if match := re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name):
            own = f"blk.{match[1]}.{parts[match[2]]}.{match[3]}"
        if own is None:
            continue  # the pooler
        data, form = tensor.array.astype(np.float32), GGMLQuantizationType[kind]
        rows = data.ndim < 2 or data.shape[-1] % GGML_QUANT_SIZES[form][0]
        if rows or own in ("position_embd.weight", "token_types.weight"):
            form = GGMLQuantizationType.F32
        writer.add_tensor(own, quantized(data, form.name), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_divisors(rope: dict[str, Any], dim: int) -> np.ndarray[Any, Any]:
    """What the converter writes for Llama 3's scaling."""
    f = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    length, low, high = (
        rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wave = 2 * np.pi / f
    smooth = (length / wave - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    long, short = wave > length / low, wave < length / high
    return np.where(long, rope["factor"], np.where(short, 1.0, between)).astype(np.float32)
