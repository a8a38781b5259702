"""GGUF files of the small decoders, written with the gguf package as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from centella.dtypes import bf16, widen
from centella.models.llama_gguf import FAMILIES, FIELDS, OF_LAYER, OWN, PERMUTED, WHOLE
from centella.weights import open_checkpoint

ARCHITECTURES = {v: k for k, v in FAMILIES.items()} | {"mistral": "llama"}
TYPES = {"F32": GGMLQuantizationType.F32, "F16": GGMLQuantizationType.F16,
         "BF16": GGMLQuantizationType.BF16, "Q8_0": GGMLQuantizationType.Q8_0,
         "Q4_0": GGMLQuantizationType.Q4_0, "Q4_1": GGMLQuantizationType.Q4_1,
         "Q5_0": GGMLQuantizationType.Q5_0, "Q5_1": GGMLQuantizationType.Q5_1}  # fmt: skip


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


def write(folder: Path, file: Path, kind: str = "F32", **more: Any) -> None:
    """A GGUF file of a model folder; matrices in one kind, the rest in F32."""
    config = {**json.loads((folder / "config.json").read_text())}
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(file, architecture)
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    config["rope_theta"] = rope.get("rope_theta", 10000.0)
    if config["model_type"] == "qwen2":  # whose windows the format does not have
        del config["sliding_window"]
    for key, field in FIELDS.items():
        value = config.get(field)
        if value is None:
            continue
        write_value = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        write_value(f"{architecture}.{key}", value)
    if rope.get("rope_type") in ("linear", "yarn"):
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
    for name, tensor in open_checkpoint(folder).items():
        data = widen(tensor.array, bf16)
        if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            shape = (-1, 2, head_dim // 2, *data.shape[1:])
            data = data.reshape(shape).swapaxes(1, 2).reshape(data.shape)
        if architecture in WHOLE and name.endswith("norm.weight"):
            data = data + 1
        form = TYPES[kind if data.ndim == 2 and data.shape[1] % 32 == 0 else "F32"]
        stored = quantize(np.ascontiguousarray(data), form)
        writer.add_tensor(own_name(architecture, name), stored, raw_dtype=form)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
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
