"""Memory of a process of its own while a model of several shards is loaded.

    python -m tests.support.load_peak --device webgpu --model DIR|FILE.gguf

A small model is loaded first, so that what is imported and opened once is there. Of a device whose
memory is the host's (the CPU, a software driver) what the weights need there is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from msgspec import Struct

import centella as ct

SMALL = Path(__file__).parents[1] / "data" / "decoders" / "llama"
CONFIG = {
    "hidden_size": 256, "intermediate_size": 24_576, "vocab_size": 110_000, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "max_position_embeddings": 256, "head_dim": 64,
}  # fmt: skip


class Peak(Struct, frozen=True):
    """Bytes of the process at most, above what it had before and what the weights need there.

    Attributes:
        weights: bytes on the device; largest: of them, the largest tensor's.
        calls: how often `progress` was called; last: with what at last.
    """

    host: int
    weights: int
    largest: int
    uploads: int
    calls: int
    last: tuple[int, int]


def write_model(folder: Path, dtype: str = "BF16", **changes: int) -> Path:
    """A decoder in three shards, its layers whole in one; random weights."""
    c = {**CONFIG, **changes}
    config = {**json.loads((SMALL / "config.json").read_text()), **c}
    (folder / "config.json").write_text(json.dumps(config))
    layers = int(c["num_hidden_layers"])
    hidden, inner, heads = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    shapes = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    of_layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (c["num_attention_heads"] * heads, hidden),
        "self_attn.k_proj": (c["num_key_value_heads"] * heads, hidden),
        "self_attn.v_proj": (c["num_key_value_heads"] * heads, hidden),
        "self_attn.o_proj": (hidden, c["num_attention_heads"] * heads),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{n}.weight": s for n, s in of_layer.items()}
    names, rng = list(shapes), np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for number in range(layers):
        shard = f"model-{number + 1:05}-of-{layers:05}.safetensors"
        own = [n for n in names if f"layers.{number}." in n or (not number and "layers" not in n)]
        header, at = {}, 0
        for name in own:
            nbytes = 2 * int(np.prod(shapes[name]))
            header[name] = {
                "dtype": dtype,
                "shape": shapes[name],
                "data_offsets": [at, at + nbytes],
            }
            at += nbytes
            weight_map[name] = shard
        text = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in own:
                values = rng.standard_normal(int(np.prod(shapes[name])), np.float32) * 0.02
                file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_gguf(file: Path, kind: str) -> Path:
    """A Llama of one layer in a GGUF file, its matrices in one kind; blocks of random bytes."""
    form = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[form]
    c = {**CONFIG, "vocab_size": 200_000}
    hidden, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(1e-5)
    kv = hidden * c["num_key_value_heads"] // heads
    matrices = {
        "token_embd": (c["vocab_size"], hidden), "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (kv, hidden), "blk.0.attn_v": (kv, hidden),
        "blk.0.attn_output": (hidden, hidden), "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden), "blk.0.ffn_down": (hidden, inner),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    for name, (rows, columns) in matrices.items():
        raw = rng.integers(0, 64, (rows, columns // block * size), np.uint8)  # factors are finite
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=form)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _status(name: str) -> int:
    """Bytes, as Linux counts them: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def measure(device: ct.Device, path: Path) -> Peak:
    """Load a model, and say what the process had at most."""
    ct.load(SMALL, device)
    told: list[tuple[int, int]] = []
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is what there is now
    before, pool_bytes = _status("VmRSS"), device.memory.held
    with ct.ledger() as led:
        model = ct.load(path, device, progress=lambda *each: told.append(each)).model
    sizes = [p.spec.storage_bytes for _, p in model.named_parameters()]
    largest = model.embed_tokens.weight
    largest = largest.storage_bytes if isinstance(largest, ct.QTensor) else max(sizes)
    there = sum(sizes) if device.caps.target == "numpy" else device.memory.held - pool_bytes
    return Peak(_status("VmHWM") - before - there, sum(sizes), largest, led.uploads,
                len(told), told[-1])  # fmt: skip


def measure_alone(device: str, path: Path) -> Peak:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "tests.support.load_peak", "--device", device]
    ran = subprocess.run([*command, "--model", str(path)], capture_output=True, text=True,
                         check=False, timeout=600)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return msgspec.json.decode(ran.stdout.splitlines()[-1], type=Peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="webgpu")
    parser.add_argument("--model", type=Path, required=True)
    asked = parser.parse_args()
    print(msgspec.json.encode(measure(ct.device(asked.device), asked.model)).decode())


if __name__ == "__main__":
    main()
