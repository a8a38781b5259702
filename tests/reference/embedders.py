"""A small random decoder that embeds, and what transformers computes of texts in float64.

    python tests/reference/embedders.py

Writes `tests/data/embedders/qwen3/`, a folder as sentence-transformers has it, and expected.npz:
a vector of length 1 for each text of `TEXTS`, the normalised state of its last token.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1] / "data"
FOLDER = ROOT / "embedders" / "qwen3"
TEXTS = (
    "a storm", "", "The keeper of the lighthouse counted 42 ships before the storm came up.",
    "What is the capital of a small island?", "x",
    "Instruct: find passages\nQuery: " + "rain and thunder " * 4,
)  # fmt: skip
PROMPTS = {"query": "Instruct: find passages that answer\nQuery: ", "document": ""}
END = "<|endoftext|>"


def main() -> None:
    config = transformers.Qwen3Config(
        vocab_size=320, hidden_size=48, intermediate_size=56, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(11)
    model = transformers.Qwen3Model(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p.ndim == 1) + 0.2 * torch.randn_like(p))
    FOLDER.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    tokenizer = json.loads((ROOT / "decoders" / "qwen3" / "tokenizer.json").read_text())
    special = {"SpecialToken": {"id": END, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}, special],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
    }  # fmt: skip
    (FOLDER / "1_Pooling").mkdir(exist_ok=True)
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    texts = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"eos_token": END, "pad_token": END, "model_max_length": 131072},
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": 48, "pooling_mode_cls_token": False, "include_prompt": True,
            "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True,
        },
        "config_sentence_transformers.json": {
            "prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine",
        },
    }  # fmt: skip
    for name, content in texts.items():
        (FOLDER / name).write_text(json.dumps(content, indent=1) + "\n")
    reader = transformers.PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))
    model = transformers.AutoModel.from_pretrained(FOLDER, dtype=torch.float64).eval()
    vectors = []
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor([reader(text)["input_ids"]])
            vectors.append(
                torch.nn.functional.normalize(model(ids).last_hidden_state[0, -1], dim=0)
            )
    np.savez_compressed(FOLDER / "expected.npz", vectors=torch.stack(vectors).numpy())
    print(sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file()), "bytes")


if __name__ == "__main__":
    main()
