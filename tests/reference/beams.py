"""Beam searches of the small random decoders, as transformers does them in float64.

    python tests/reference/beams.py

Writes `tests/data/beams.json`: a list of cases, each of a folder of `tests/data/decoders`:

    family, prompts, options        what `Generator.generate` is given
    eos                             end tokens
    texts, scores                   the texts of each prompt, the best first: tokens with the end
                                    token, and `sequences_scores`
    logprobs                        of each token of the texts: `compute_transition_scores`

Each prompt is searched alone: in float64 the mask of a batch's padding is NaN. A case is written
if float32 finds the same texts of the prompts together.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

DATA = Path(__file__).resolve().parents[1] / "data"
FAMILIES = sorted(path.name for path in (DATA / "decoders").iterdir())
NAMES = {"beam": "num_beams", "n": "num_return_sequences", "stop": "stop_strings"}


@functools.cache
def model_of(family: str, dtype: torch.dtype) -> Any:
    """A folder's model."""
    return AutoModelForCausalLM.from_pretrained(
        DATA / "decoders" / family, dtype=dtype, attn_implementation="eager",
        experts_implementation="eager",
    ).eval()  # fmt: skip


def ids_of(family: str) -> list[int]:
    """Its first prompt of 37 tokens."""
    return np.load(DATA / "decoders" / family / "expected.npz")["ids"][0].tolist()  # type: ignore[no-any-return]


def search(
    family: str, prompts: list[list[int]], options: dict[str, Any], eos: list[int],
    dtype: torch.dtype = torch.float64,
) -> tuple[list[list[list[int]]], list[list[float]], list[list[list[float]]]]:  # fmt: skip
    """Texts, their scores and the log-probabilities of their tokens, of each prompt."""
    model = model_of(family, dtype)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    given: dict[str, Any] = {NAMES.get(name, name): value for name, value in options.items()}
    if "stop" in options:
        given["tokenizer"] = AutoTokenizer.from_pretrained(DATA / "decoders" / family)
    n = options.get("n", 1)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        output = model.generate(
            ids, attention_mask=mask, do_sample=False, eos_token_id=eos or None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, **given,
        )  # fmt: skip
    tokens = output.sequences.clamp(min=0)  # -1 pads what a stop string has ended
    parts = model.compute_transition_scores(tokens, output.scores, output.beam_indices)
    lengths = (output.beam_indices >= 0).sum(1).tolist()
    texts = [
        row[:k] for row, k in zip(output.sequences[:, longest:].tolist(), lengths, strict=True)
    ]
    scores = output.sequences_scores.tolist()
    each = [row[:k] for row, k in zip(parts.tolist(), lengths, strict=True)]
    rows = range(0, len(texts), n)
    return (
        [texts[i : i + n] for i in rows],
        [scores[i : i + n] for i in rows],
        [each[i : i + n] for i in rows],
    )


def asked() -> Iterator[tuple[str, list[list[int]], dict[str, Any], list[int]]]:
    """What is searched for; end tokens stand in the likeliest texts."""
    for family in FAMILIES:
        yield family, [ids_of(family)], {"beam": 4, "n": 3, "max_new_tokens": 40}, []
    for family, ends in (("olmo2", [142]), ("olmo2", [142, 195, 230, 283]),
                         ("qwen2", [69, 234, 292, 316])):  # fmt: skip
        for penalty in (1.0, 2.0, 0.0, -1.0):
            for early in (False, True, "never"):
                options = {"beam": 4, "n": 4, "max_new_tokens": 40, "length_penalty": penalty,
                           "early_stopping": early}  # fmt: skip
                yield family, [ids_of(family)], options, ends
    for beam in (2, 8, 16):
        options = {"beam": beam, "n": 2, "max_new_tokens": 32}
        yield "llama", [ids_of("llama")], options, [15, 63]
    for family, ends in (("qwen3", [83, 104, 176]), ("gemma3", []), ("mistral", [47])):
        whole = ids_of(family)
        several = [whole[4:5], whole[:9], whole, whole[:30][::-1]]
        yield family, several, {"beam": 3, "n": 2, "max_new_tokens": 30}, ends
    whole = ids_of("qwen3")
    yield "qwen3", [(whole * 3)[:100]], {"beam": 3, "max_new_tokens": 28}, []
    yield "qwen3", [whole], {"beam": 5, "n": 5, "max_new_tokens": 1}, [47]
    for stop, prompts, ends in (("M m", [whole], []), (" oq", [whole[:9], whole], [47])):
        stops: dict[str, Any] = {"stop": [stop, "Xlan"]}
        yield "qwen3", prompts, {"beam": 4, "n": 4, "max_new_tokens": 30, **stops}, ends
    whole = ids_of("phi4-mini")  # whose frequencies change after 32 tokens
    for length in (24, 31, 32, 33):
        options = {"beam": 4, "n": 3, "max_new_tokens": 30 if length == 24 else 6}
        yield "phi4-mini", [whole[:length]], options, []
    two = [whole[:20], whole[5:25]]
    for ends in ([226, 145, 265], [298, 222]):  # the first prompt's search ends before, and after
        options = {"beam": 3, "n": 2, "max_new_tokens": 25, "early_stopping": True}
        yield "phi4-mini", two, options, ends


def main() -> None:
    """Write them."""
    logging.set_verbosity_error()
    cases = []
    for family, prompts, options, eos in asked():
        alone = [search(family, [prompt], options, eos) for prompt in prompts]
        texts = [each[0] for each, _, _ in alone]
        scores = [each[0] for _, each, _ in alone]
        logprobs = [each[0] for _, _, each in alone]
        again, near, _ = search(family, prompts, options, eos, torch.float32)
        if texts != again:
            print(f"{family} {options} {eos}: float32 finds other texts")
            continue
        ended = sum(bool(eos) and text[-1] in eos for row in texts for text in row)
        off = max(abs(a - b) for x, y in zip(scores, near, strict=True)
                  for a, b in zip(x, y, strict=True))  # fmt: skip
        lengths = [len(text) for row in texts for text in row]
        print(f"{family} {options} {eos}: {ended} ended, lengths {lengths}, off {off:.1e}")
        cases.append({
            "family": family, "prompts": prompts, "options": options, "eos": eos, "texts": texts,
            "scores": [[round(s, 6) for s in row] for row in scores],
            "logprobs": [[[round(p, 5) for p in text] for text in row] for row in logprobs],
        })  # fmt: skip
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (DATA / "beams.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
