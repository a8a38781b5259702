"""Small random decoders of each family, with what transformers computes of them in float64.

    python tests/reference/decoders.py [FAMILY ...]

Writes `tests/data/decoders/FAMILY/`: config.json, model.safetensors (bf16), and expected.npz:

    ids     i32 [2, 37]        random tokens
    logits  f32 [2, 37, vocab] of each position
    greedy  i32 [40]           the most likely token, forty times, after ids[0]
    short   f32 [2, 24, vocab] of the first 24 tokens alone; where frequencies depend on the length
    across  i32 [40]           as greedy, after the first 24 tokens of ids[0]; there, too
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).resolve().parents[1] / "data" / "decoders"
TOKENS, GREEDY, SHORT = 37, 40, 24
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# By folder: the config's class and what differs from SIZES.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama-bias": ("LlamaConfig", {"num_attention_heads": 3, "num_key_value_heads": 3,
                   "attention_bias": True, "mlp_bias": True,
                   "rope_parameters": {"rope_type": "linear", "factor": 2.0,
                                       "rope_theta": 10000.0}}),
    "llama-dynamic": ("LlamaConfig", {"num_attention_heads": 4, "num_hidden_layers": 2,
                      "vocab_size": 160,
                      "rope_parameters": {"rope_type": "dynamic", "factor": 2.0,
                                          "rope_theta": 10000.0,
                                          "original_max_position_embeddings": 16}}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 12}),
    "qwen2": ("Qwen2Config", {"num_attention_heads": 4, "use_sliding_window": True,
              "sliding_window": 9, "max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "rope_parameters": YARN}),
    "phi3": ("Phi3Config", {"num_attention_heads": 4, "partial_rotary_factor": 0.5,
             "sliding_window": 20}),
    "phi4-mini": ("Phi3Config", {"num_hidden_layers": 2, "num_attention_heads": 3,
                  "num_key_value_heads": 1, "tie_word_embeddings": True,
                  "partial_rotary_factor": 0.75, "sliding_window": 200,
                  "original_max_position_embeddings": 32, "full_attn_mod": 1,
                  "interpolate_factor": 1,
                  "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0,
                                      "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
                                      "long_factor": [1.0, 1.2, 1.7, 2.9, 5.3, 9.1]}}),
    "smollm3": ("SmolLM3Config", {"num_attention_heads": 4, "no_rope_layers": [1, 1, 0]}),
    "granite": ("GraniteConfig", {"num_attention_heads": 4, "embedding_multiplier": 6.0,
                "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 3.0}),
    "olmo2": ("Olmo2Config", {"num_attention_heads": 4}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24,
               "tie_word_embeddings": True, "attn_logit_softcapping": 20.0,
               "final_logit_softcapping": 10.0}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4,
               "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
               "layer_types": ["sliding_attention", "sliding_attention", "full_attention",
                               "sliding_attention"]}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 16, "num_experts": 7, "num_experts_per_tok": 3,
                  "moe_intermediate_size": 24, "norm_topk_prob": True}),
}  # fmt: skip


def make(family: str) -> None:
    """One folder."""
    kind, more = FAMILIES[family]
    config = getattr(transformers, kind)(**{**SIZES, **more})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(sum(map(ord, family)))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            gemma = "gemma" in family
            spread = 0.2 if p.ndim == 1 else 0.05 if gemma and "embed" in name else 0.3
            centre = 1.0 if p.ndim == 1 and name.endswith("weight") and not gemma else 0.0
            p.copy_(centre + spread * torch.randn_like(p))
    model = model.to(torch.bfloat16)
    folder = FOLDER / family
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # Read again: a conversion would have rounded the rotary frequencies to bf16 as well.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    ids = torch.randint(3, config.vocab_size, (2, TOKENS))
    with torch.no_grad():
        logits = model(ids).logits
        row = ids[:1]
        gaps = []
        for _ in range(GREEDY):
            last = model(row).logits[:, -1]
            top = last.topk(2).values[0]
            gaps.append(float(top[0] - top[1]))
            row = torch.cat([row, last.argmax(-1, keepdim=True)], 1)
        short = {}
        if config.rope_parameters.get("rope_type") == "longrope":
            short["short"] = model(ids[:, :SHORT]).logits.float().numpy()
            told = model.generate(ids[:1, :SHORT], max_new_tokens=GREEDY, do_sample=False,
                                  eos_token_id=None)  # fmt: skip
            short["across"] = told[0, SHORT:].int().numpy()
    np.savez_compressed(
        folder / "expected.npz", ids=ids.int().numpy(), logits=logits.float().numpy(),
        greedy=row[0, TOKENS:].int().numpy(), **short,
    )  # fmt: skip
    size = sum(f.stat().st_size for f in folder.iterdir())
    values = json.loads((folder / "config.json").read_text())
    print(
        f"{family}: {values['model_type']}, {size:,} bytes, least gap {min(gaps):.4f}, "
        f"logits up to {float(logits.abs().max()):.2f}"
    )


if __name__ == "__main__":
    for wanted in sys.argv[1:] or FAMILIES:
        make(wanted)
