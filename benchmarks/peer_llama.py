"""llama.cpp beside ours: its own `llama-bench` and `llama-batched-bench` on random weights.

`--llama` names a folder with these programs, llama.cpp's source (a folder or an archive, as the
sdist of llama-cpp-python has it in `vendor/llama.cpp`), or nothing: then those on the path are
used. A source is built here once, for CUDA where `nvcc` is; of it CMakeLists.txt, cmake, common,
ggml, include, src, tools without tools/ui, and vendor are enough, 10 MB packed. Where that fails
there are no figures, and a row says why.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from generate import TOKENS, behind, prompts_of, values_of
from measure import Row

BENCH, BATCHED = "llama-bench", "llama-batched-bench"
FORMATS = {"bf16": "BF16", "f16": "F16", "q8_0": "Q8_0", "q4_k": "Q4_K", "q4_0": "Q4_0"}
BUILD_SECONDS, RUN_SECONDS = 900, 300
TABLE = 1024  # rows of random numbers, of which a weight's rows are repetitions
ROUNDS = 3


class NotHereError(Exception):
    """Why there are no figures of llama.cpp."""


def llama(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of prefill and decode, named as those of `generate`; else one row with the reason."""
    sizes = args.shapes.split(",") if args.shapes else ["mini"] if args.small else ["4b", "0.6b"]
    batches, tokens = [int(n) for n in args.rows.split(",")], 8 if args.small else TOKENS
    for size, dtype in product(sizes, (args.dtypes or "bf16").split(",")):
        who = f"llama.cpp {dtype}"
        try:
            folder = programs(args.llama)
            with tempfile.TemporaryDirectory(prefix="benchmark") as temporary:
                file = Path(temporary) / "model.gguf"
                write(file, values_of(size), dtype)
                for batch, row in measured(folder, file, batches, prompts_of(args), tokens):
                    yield {"who": who, "shape": (size, batch), **row}
        except NotHereError as error:
            yield {"bench": "decode", "who": who, "shape": (size, 1), "skipped": str(error)}


# -- the programs ----------------------------------------------------------------------------------


def programs(source: str) -> Path:
    """The folder of llama.cpp's programs, built first where `source` is its source."""
    if not source:
        there = shutil.which(BENCH)
        if there is None:
            raise NotHereError(f"no {BENCH} is on the path, and --llama names no source")
        return Path(there).parent
    path = Path(source).expanduser().resolve()
    if (path / BENCH).exists():
        return path
    if path.is_dir():
        return build(path)
    if not path.is_file():
        raise NotHereError(f"nothing is at {path}")
    unpacked = path.with_name(path.name.split(".tar")[0] + "-source")
    if not unpacked.exists():
        with tarfile.open(path) as archive:
            archive.extractall(unpacked, filter="data")
    return build(unpacked)


def build(folder: Path) -> Path:
    """Build the programs of a source folder, or find them built."""
    lists = [f for f in folder.rglob("CMakeLists.txt") if (f.parent / "ggml").is_dir()
             and (f.parent / "tools").is_dir()]  # fmt: skip
    if not lists:
        raise NotHereError(f"no source of llama.cpp is in {folder}")
    source = min(lists, key=lambda f: len(f.parts)).parent
    out = source / "build-benchmark"
    cuda = "ON" if shutil.which("nvcc") else "OFF"
    options = ("CMAKE_BUILD_TYPE=Release", f"GGML_CUDA={cuda}", "CMAKE_CUDA_ARCHITECTURES=native",
               "LLAMA_CURL=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_SERVER=OFF",
               "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF",
               "LLAMA_BUILD_TOOLS=ON")  # fmt: skip
    if not (out / "bin" / BATCHED).exists():
        run(["cmake", "-S", str(source), "-B", str(out), *(f"-D{o}" for o in options)],
            BUILD_SECONDS)  # fmt: skip
        run(["cmake", "--build", str(out), "--parallel", "--target", BENCH, BATCHED],
            BUILD_SECONDS)  # fmt: skip
    return out / "bin"


def run(command: list[str], seconds: float) -> str:
    """What a command prints; its last lines are the reason where it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotHereError(f"{Path(command[0]).name}: {error}"[:300]) from None
    if ran.returncode:
        last = " ".join((ran.stderr or ran.stdout).split())[-300:]
        raise NotHereError(f"{Path(command[0]).name}: rc {ran.returncode}: {last}")
    return ran.stdout


# -- what they say ---------------------------------------------------------------------------------


def measured(
    folder: Path, file: Path, batches: list[int], prompts: list[int], tokens: int
) -> Iterator[tuple[int, Row]]:
    """Batch and row: of one sequence by llama-bench, of several by llama-batched-bench."""
    common, words = ["-m", str(file), "-ngl", "99", "-fa", "1"], ["-r", str(ROUNDS), "-o", "json"]
    for prompt in prompts:
        if 1 in batches:
            lengths = ["-p", str(prompt), "-n", "0"]
            told = json.loads(run([str(folder / BENCH), *common, *words, *lengths], RUN_SECONDS))
            took = sorted(told[0]["samples_ns"])
            yield 1, {"bench": f"prefill {prompt}", "unit": "ms", **middle(took, 1e-6)}
            lengths = ["-p", "0", "-n", str(tokens), "-d", str(prompt)]
            told = json.loads(run([str(folder / BENCH), *common, *words, *lengths], RUN_SECONDS))
            rates = sorted(told[0]["samples_ts"], reverse=True)
            yield 1, {"bench": f"decode{behind(prompt)}", "unit": "tokens/s", **middle(rates, 1.0)}
        several = [batch for batch in batches if batch > 1]
        if several:
            words_ = ["-c", str(max(several) * (prompt + tokens)), "-b", "2048", "-npp",
                      str(prompt), "-ntg", str(tokens), "-npl", ",".join(map(str, several)),
                      "--output-format", "jsonl"]  # fmt: skip
            for row in batched([str(folder / BATCHED), *common, *words_]):
                yield row["pl"], {"bench": f"decode{behind(prompt)}", "unit": "tokens/s",
                                  **middle([row["speed_tg"]], 1.0)}  # fmt: skip


def batched(command: list[str]) -> list[dict[str, Any]]:
    """What llama-batched-bench says; its log is written by a thread, which may lose the end."""
    for _ in range(3):
        lines = run(command, RUN_SECONDS).splitlines()
        told = [json.loads(line[line.index("{") :]) for line in lines if line.endswith("}")]
        if told:
            return told
    raise NotHereError(f"{BATCHED}: expected lines of JSON, got none")


def middle(ordered: list[float], scale: float) -> Row:
    """The median, and the last, which is the worst."""
    return {"rate": scale * ordered[len(ordered) // 2], "worst_decile": scale * ordered[-1],
            "rounds": len(ordered)}  # fmt: skip


# -- the file --------------------------------------------------------------------------------------


def write(file: Path, values: dict[str, Any], dtype: str) -> None:
    """A GGUF file of a Qwen3 with random weights and no tokenizer."""
    try:
        from gguf import GGMLQuantizationType, GGUFWriter
    except ImportError:
        raise NotHereError("expected the package gguf, got none") from None
    writer = GGUFWriter(file, "qwen3")
    heads, kv, inner = (values[n] for n in ("num_attention_heads", "num_key_value_heads",
                                            "intermediate_size"))  # fmt: skip
    hidden, dim, layers = (values[n] for n in ("hidden_size", "head_dim", "num_hidden_layers"))
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_vocab_size(values["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    table = (values["vocab_size"], hidden)
    shapes = {"token_embd": table, "output_norm": (hidden,)}
    if not values["tie_word_embeddings"]:
        shapes["output"] = table
    of_layer = {
        "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q_norm": (dim,), "attn_k_norm": (dim,),
        "attn_q": (heads * dim, hidden), "attn_k": (kv * dim, hidden), "attn_v": (kv * dim, hidden),
        "attn_output": (hidden, heads * dim), "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    kind, random = GGMLQuantizationType[FORMATS[dtype]], np.random.default_rng(0)
    rows: dict[int, Any] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        n, k = shape
        if k not in rows:
            rows[k] = bytes_of(random, k, dtype)
        data = np.resize(rows[k], (n, rows[k].shape[1]))
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bytes_of(random: np.random.Generator, k: int, dtype: str) -> Any:
    """uint8 [TABLE, bytes]: rows of k numbers, 0.02 wide, as the format has them."""
    if dtype in ("bf16", "f16"):
        numbers = (0.02 * random.standard_normal((TABLE, k))).astype(np.float32)
        if dtype == "f16":
            return numbers.astype(np.float16).view(np.uint8)
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block, size, factors = {"q8_0": (32, 34, (0,)), "q4_0": (32, 18, (0,)),
                            "q4_k": (256, 144, (0, 2))}[dtype]  # fmt: skip
    raw = random.integers(0, 256, (TABLE, k // block, size), np.uint8)
    largest = {"q8_0": 6000, "q4_0": 400, "q4_k": 10000}[dtype]  # for numbers of that size
    for at in factors:
        raw[..., at : at + 2] = np.array([1 / largest], np.float16).view(np.uint8)
    return raw.reshape(TABLE, -1)
