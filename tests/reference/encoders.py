"""Small random encoders of each family, with what transformers computes of them in float64.

    python tests/reference/encoders.py [FOLDER ...]

Writes `tests/data/encoders/FOLDER/`: config.json, model.safetensors, and expected.npz:

    ids, types  i32 [4, 29]          random tokens, padded at the end; of pairs, the part
    lengths     i32 [4]              tokens of each text
    states      f32 [4, 29, hidden]  last hidden states
    logits0 ... of a classifier f32 [labels], of tokens f32 [length, labels], for each text
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).resolve().parents[1] / "data" / "encoders"
LENGTHS = (29, 1, 17, 8)
VOCAB = 120
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 30, "intermediate_size": 44, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 40,
}  # fmt: skip
DISTIL = {
    "vocab_size": VOCAB, "dim": 30, "hidden_dim": 44, "n_layers": 2, "n_heads": 3,
    "max_position_embeddings": 40,
}  # fmt: skip
LABELS: dict[str, Any] = {
    "id2label": {0: "bad", 1: "fair", 2: "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2},
}  # fmt: skip
TAGS: dict[str, Any] = {
    "id2label": {0: "O", 1: "B-LAKE", 2: "I-LAKE"},
    "label2id": {"O": 0, "B-LAKE": 1, "I-LAKE": 2},
}  # fmt: skip
MODERN: dict[str, Any] = {
    "local_attention": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
ONE: dict[str, Any] = {"id2label": {0: "score"}, "label2id": {"score": 0}}
SMALL: dict[str, Any] = {"vocab_size": 60, "hidden_size": 18, "intermediate_size": 26}
DECODER: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
POOLED = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
CLASSIFIER, TAGGER = "ForSequenceClassification", "ForTokenClassification"
# By folder: the family's name in transformers, its class after that, and what differs from SIZES.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "roberta": ("Roberta", "Model", {"pad_token_id": 1, "type_vocab_size": 1}),
    "electra": ("Electra", "Model", {"embedding_size": 22}),
    "albert": ("Albert", "Model", {"embedding_size": 22, "num_hidden_layers": 5,
               "num_hidden_groups": 2}),
    "distilbert": ("DistilBert", "Model", {}),
    "mpnet": ("MPNet", "Model", {"pad_token_id": 1, "max_position_embeddings": 200}),
    "nomic": ("NomicBert", "Model", {}),
    "gte": ("Gte", "Model", {"pad_token_id": 1, "type_vocab_size": 2}),
    "gte-untyped": ("Gte", "Model", {"type_vocab_size": 0, "hidden_act": "relu"}),
    "modernbert": ("ModernBert", "Model", {"num_hidden_layers": 4, "local_attention": 10,
                   "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
                   "sep_token_id": 2}),
    "modernbert-bias": ("ModernBert", "Model", {"num_hidden_layers": 2, "local_attention": 4,
                        "norm_bias": True, "attention_bias": True, "mlp_bias": True,
                        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
                        "layer_types": ["sliding_attention", "full_attention"],
                        "sep_token_id": 2}),
    "xlm-roberta": ("XLMRoberta", "Model", {"pad_token_id": 3, "type_vocab_size": 2}),
    "qwen3-embed": ("Qwen3", "Model", DECODER),
    "gemma3-embed": ("Gemma3Text", "Model", {**DECODER, "num_attention_heads": 6,
                     "use_bidirectional_attention": True,
                     "sliding_window": 12, "query_pre_attn_scalar": 10, "layer_types":
                     ["sliding_attention", "full_attention"]}),
    "bert-labels": ("Bert", CLASSIFIER, {**SMALL, **LABELS}),
    "bert-tags": ("Bert", TAGGER, {**SMALL, **TAGS}),
    "xlm-roberta-rank": ("XLMRoberta", CLASSIFIER, {**SMALL, **ONE, "pad_token_id": 1,
                         "type_vocab_size": 1}),
    "electra-labels": ("Electra", CLASSIFIER, {**SMALL, **LABELS, "embedding_size": 18}),
    "albert-labels": ("Albert", CLASSIFIER, {**SMALL, **LABELS, "embedding_size": 10}),
    "distilbert-labels": ("DistilBert", CLASSIFIER, {**LABELS, "vocab_size": 60, "dim": 18,
                          "hidden_dim": 26}),
    "mpnet-labels": ("MPNet", CLASSIFIER, {**SMALL, **LABELS, "pad_token_id": 1}),
    "roberta-tags": ("Roberta", TAGGER, {**SMALL, **TAGS, "pad_token_id": 1, "type_vocab_size": 1}),
    "gte-rank": ("Gte", CLASSIFIER, {**SMALL, **ONE, "type_vocab_size": 1, "pad_token_id": 1}),
    "nomic-labels": ("NomicBert", CLASSIFIER, {**SMALL, **LABELS}),
    "modernbert-labels": ("ModernBert", CLASSIFIER, {**SMALL, **LABELS, **MODERN,
                          "classifier_pooling": "mean", "classifier_activation": "relu"}),
    "modernbert-tags": ("ModernBert", TAGGER, {**SMALL, **TAGS, **MODERN, "norm_bias": True,
                        "classifier_bias": True}),
}  # fmt: skip


def make(name: str) -> None:
    """One folder."""
    family, head, more = FAMILIES[name]
    sizes = DISTIL if family == "DistilBert" else SIZES
    config = getattr(transformers, f"{family}Config")(**{**sizes, **more})
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, family + head)(config).eval()
    with torch.no_grad():
        for path, p in model.named_parameters():
            norm = p.ndim == 1 and path.endswith("weight")
            centre = 1.0 if norm and family != "Gemma3Text" else 0.0  # whose norms add 1
            p.copy_(centre + 0.25 * torch.randn_like(p))
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if more.get("head_dim"):  # a decoder embeds where its folder has modules
        (folder / "modules.json").write_text(json.dumps(POOLED))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    model = model.double()
    pad = config.pad_token_id or 0
    rng = np.random.default_rng(7)
    real = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    ids = np.where(real, rng.integers(5, config.vocab_size, real.shape), pad)
    types = np.where(real & (np.arange(max(LENGTHS)) > 6), min(1, max(0, types_of(config) - 1)), 0)
    states = np.zeros((*ids.shape, config.hidden_size), np.float32)
    logits: dict[int, np.ndarray] = {}
    for row, length in enumerate(LENGTHS):  # each alone: transformers' ModernBERT pads with NaN
        batch = {"input_ids": torch.tensor(ids[row : row + 1, :length])}
        if types_of(config) > 1:
            batch["token_type_ids"] = torch.tensor(types[row : row + 1, :length])
        with torch.inference_mode():
            out = model(**batch, output_hidden_states=True)
        last = out.last_hidden_state if "last_hidden_state" in out else out.hidden_states[-1]
        states[row, :length] = last[0].numpy()
        if "logits" in out:
            logits[row] = out.logits[0].numpy()
    assert np.isfinite(states).all(), name
    arrays = {"ids": ids.astype(np.int32), "types": types.astype(np.int32),
              "lengths": np.array(LENGTHS, np.int32), "states": states}  # fmt: skip
    arrays |= {f"logits{row}": values.astype(np.float32) for row, values in logits.items()}
    np.savez_compressed(folder / "expected.npz", **arrays)  # type: ignore[arg-type]
    size = sum(f.stat().st_size for f in folder.iterdir())
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    print(f"{name}: {kind}, {size:,} bytes, states up to {np.abs(states).max():.2f}")


def types_of(config: Any) -> int:
    """Token types of a family."""
    return int(getattr(config, "type_vocab_size", 0) or 0)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or FAMILIES:
        make(wanted)
