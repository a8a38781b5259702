"""Texts to vectors from end to end: sentences of one length, and passages of unequal lengths.

Passages are the paragraphs of this project's pages and sources, in a random order. Each row of
texts has a row of ids beside it: the same texts, tokenised and put into batches before the clock
starts, so that the difference is what the host costs; and two of ids in the order of the texts:
each batch padded to its longest, which is what mixed lengths would cost otherwise, and end to end.
The ids of the first are sorted, and end to end where `encode` has them so. Peer:
transformers with its own fast tokenizer, texts sorted by length, each batch padded to its longest.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import peer_encode
from measure import Call, Row, alternate, summary, torch_or_none
from texts import WORDS

import centella as ct
from centella.tasks.embed.embedder import Forward
from centella.tasks.text.batches import Batch, batches_of

ROOT = Path(__file__).parents[1]
BATCH = 512
TOKENS = 1 << 20  # more than a batch has
KINDS = ("docs/**/*.md", "*.md", "src/**/*.py")


def sentences(count: int) -> list[str]:
    """Sentences of 40 words."""
    words = np.random.default_rng(3).integers(0, len(WORDS), (count, 40))
    return [" ".join(WORDS[w] for w in row) for row in words]


def paragraphs(most: int) -> list[str]:
    """Paragraphs of pages and sources, in a random order."""
    files = [file for kind in KINDS for file in sorted(ROOT.glob(kind))]
    parts = [part.strip() for file in files for part in re.split(r"\n\s*\n", file.read_text())]
    filled = [part for part in parts if part]
    return [filled[i] for i in np.random.default_rng(4).permutation(len(filled))[:most]]


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
                grids = list(batches_of([lambda t=tokens: t], BATCH, model.config.max_length, 0))
                who = f"{device}, ids"
                packs = [batch.packs(BATCH, model.config.max_length, TOKENS) for batch in grids]
                calls[who] = _ids(model, grids, who, results, packs)
                for who, packed in ((f"{device}, ids, padded", False),
                                    (f"{device}, ids, end to end", True)):  # fmt: skip
                    mixed = _mixed(tokens)
                    calls[who] = _ids(model, mixed, who, results, [packed] * len(mixed))
            if torch is not None:
                kind = torch.float16 if dtype == "f16" else torch.float32
                encode = peer_encode(torch, args.model, kind)
                calls["transformers"] = partial(_peer, encode, some, results)
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


def _mixed(tokens: Any) -> list[Batch]:
    """Batches of texts as they come."""
    count = len(tokens)
    every = [np.arange(at, min(at + BATCH, count)) for at in range(0, count, BATCH)]
    return [Batch(tokens, rows, rows) for rows in every]


def _ids(
    model: Any, batches: list[Batch], who: str, results: dict[str, Any], packs: list[bool]
) -> Call:
    """Batches to vectors, two of them in flight; some end to end, the others padded."""
    most, forward = model.config.max_length, Forward(model)
    assert forward.packed is not None
    inputs = [
        partial(forward.packed.fetch, *batch.end_to_end(BATCH, 0), True, None) if packed
        else partial(forward.captured.fetch, *batch.grid(BATCH, most, 0), True, None)
        for batch, packed in zip(batches, packs, strict=True)
    ]  # fmt: skip
    count = sum(len(batch.texts) for batch in batches)
    vectors = np.empty((count, model.dim), np.float32)

    def call() -> None:
        running: list[Any] = []
        for number, start in enumerate([*inputs, None]):
            if start is not None:
                running.append(start())
            if number:
                texts = batches[number - 1].texts
                vectors[texts] = running.pop(0).result()["dense"][: len(texts)]
        results[who] = vectors

    return call


def _peer(encode: Any, some: list[str], results: dict[str, Any]) -> None:
    results["transformers"] = encode(some, BATCH)
