"""A small random decoder that ranks, and what transformers computes of pairs in float64.

    python tests/reference/rerankers.py

Writes `tests/data/rerankers/qwen3/`, a folder as transformers has it, and expected.npz: for each
pair of `PAIRS` the logits of "yes" and "no" after its prompt, as the model card of Qwen3-Reranker
writes it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1] / "data"
FOLDER = ROOT / "rerankers" / "qwen3"
QUERY, OTHER = "Where does it rain?", "the keeper"
INSTRUCTIONS = (
    "Given a web search query, retrieve relevant passages that answer the query", "Judge the style",
)  # fmt: skip
DOCUMENTS = ("It rains at sea.", "", "The keeper of the lighthouse counted ships.", "rain " * 20)
PAIRS = [(INSTRUCTIONS[0], QUERY, d) for d in DOCUMENTS] + [
    (INSTRUCTIONS[1], OTHER, d) for d in DOCUMENTS
]
BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def main() -> None:
    config = transformers.Qwen3Config(
        vocab_size=324, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=2,
        pad_token_id=0, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(12)
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p.ndim == 1) + 0.2 * torch.randn_like(p))
    FOLDER.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    tokenizer = json.loads((ROOT / "decoders" / "qwen3" / "tokenizer.json").read_text())
    for token, pair in (("yes", ["y", "es"]), ("no", ["n", "o"])):
        tokenizer["model"]["vocab"][token] = len(tokenizer["model"]["vocab"])
        tokenizer["model"]["merges"].append(pair)
    texts = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 131072,
        },
    }  # fmt: skip
    for name, content in texts.items():
        (FOLDER / name).write_text(json.dumps(content, indent=1) + "\n")
    reader = transformers.PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64).eval()
    answers = [reader.convert_tokens_to_ids(answer) for answer in ("yes", "no")]
    rows = []
    with torch.no_grad():
        for instruction, query, document in PAIRS:
            body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            ids = [i for part in (BEGIN, body, END) for i in reader(part)["input_ids"]]
            rows.append(model(torch.tensor([ids])).logits[0, -1, answers])
    np.savez_compressed(FOLDER / "expected.npz", logits=torch.stack(rows).numpy())
    print(torch.stack(rows).softmax(-1)[:, 0])
    print(sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file()), "bytes")


if __name__ == "__main__":
    main()
