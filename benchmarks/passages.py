"""Texts to vectors from end to end: sentences of one length, and passages of unequal lengths.

Passages are the paragraphs of this project's pages and sources, in a random order. Each row of
texts has a row of ids beside it: the same texts, tokenised and put into batches before the clock
starts, so that the difference is what the host costs. Peer: transformers with its own fast
tokenizer, the texts sorted by length and padded to the longest of each batch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import Call, Row, alternate, bert, summary, torch_or_none
from texts import WORDS

import centella as ct
from centella.tasks.batches import batches_of
from centella.tasks.embed import Forward

ROOT = Path(__file__).parents[1]
BATCH = 512
KINDS = ("docs/**/*.md", "*.md", "src/**/*.py")


def sentences(count: int) -> list[str]:
    """Sentences of 40 words."""
    words = np.random.default_rng(3).integers(0, len(WORDS), (count, 40))
    return [" ".join(WORDS[w] for w in row) for row in words]


def paragraphs(most: int) -> list[str]:
    """Paragraphs of pages and sources, in a random order."""
    files = [file for kind in KINDS for file in sorted(ROOT.glob(kind))]
    parts = [part.strip() for file in files for part in re.split(r"\n\s*\n", file.read_text())]
    found = [part for part in parts if part]
    return [found[i] for i in np.random.default_rng(4).permutation(len(found))[:most]]


def passages(args: argparse.Namespace) -> Iterator[Row]:
    """Texts a second, and from ids, of each device and dtype; tokens a text beside it."""
    many = 40 if args.small else 20_000
    torch = torch_or_none()
    for name, some in (("40 words", sentences(many)), ("paragraphs", paragraphs(many))):
        for dtype in (args.dtypes or "f16").split(","):
            calls: dict[str, Call] = {}
            results: dict[str, Any] = {}
            for device in args.devices:
                model = ct.load(args.model, device=device, dtype=dtype)
                tokens = model.tokenizer.tokens(some, model.config.max_length)
                calls[device] = partial(_texts, model, some, device, results)
                calls[f"{device}, ids"] = _ids(model, tokens, f"{device}, ids", results)
            if torch is not None:
                calls["transformers"] = _peer(torch, args.model, some, dtype, results)
            if not calls:
                continue
            first = next(iter(calls))
            for who, times in alternate(calls, min(args.rounds, 3 if args.small else 10)).items():
                cosine = float(np.min(np.sum(results[first] * results[who], -1)))
                assert cosine > 0.999, (who, cosine)
                yield {"bench": f"encode {dtype}, {name}", "shape": [len(some)], "who": who,
                       "unit": "texts/s", "cosine": cosine, "tokens": float(tokens.lengths.mean()),
                       **summary(times, len(some))}  # fmt: skip


def _texts(model: Any, some: list[str], who: str, results: dict[str, Any]) -> None:
    results[who] = model.encode(some, batch_size=BATCH)


def _ids(model: Any, tokens: Any, who: str, results: dict[str, Any]) -> Call:
    """The batches of `encode`, two of them in flight."""
    most, forward = model.config.max_length, Forward(model)
    batches = list(batches_of([lambda: tokens], BATCH, most, 0))
    grids = [batch.grid(BATCH, most, 0) for batch in batches]
    vectors = np.empty((len(tokens), model.dim), np.float32)

    def call() -> None:
        running: list[Any] = []
        for number, grid in enumerate([*grids, None]):
            if grid is not None:
                running.append(forward.captured.fetch(*grid, True, None))
            if number:
                texts = batches[number - 1].texts
                vectors[texts] = running.pop(0).result()["dense"][: len(texts)]
        results[who] = vectors

    return call


def _peer(
    torch: Any, folder: str, some: list[str], dtype: str, results: dict[str, Any]
) -> Call:  # fmt: skip
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = bert(folder, torch.float16 if dtype == "f16" else torch.float32).to("cuda")
    vectors = np.empty((len(some), model.config.hidden_size), np.float32)

    def call() -> None:
        ids = tokenizer(some, truncation=True, max_length=256)["input_ids"]
        order = sorted(range(len(some)), key=lambda i: -len(ids[i]))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            batch = tokenizer.pad({"input_ids": [ids[i] for i in rows]}, return_tensors="pt")
            batch = batch.to("cuda")
            with torch.inference_mode():
                states = model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
                real = batch["attention_mask"][..., None]
                mean = (states.float() * real).sum(1) / real.sum(1)
                vectors[rows] = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        results["transformers"] = vectors

    return call
