"""Texts a second of `encode` on each device alone and on all of them together.

Each device has the model. `tokenise` is what the tokenizer alone takes, which all devices share:
where it is the slowest, more devices gain nothing. `--shapes bge-m3` takes random weights of that
shape in place of `--model`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
from checkpoints import words, written
from measure import Call, Row, alternate, summary
from texts import texts_of

import centella as ct

TEXTS, BATCH = 40_000, 512
FEWER = 4  # of a larger model's texts
TOGETHER = 4  # texts of `texts.py` that make one here, of some 100 words


def several(args: argparse.Namespace) -> Iterator[Row]:
    """Rows for each device, for all of them, and for the tokenizer."""
    count, batch = (200, 16) if args.small else (TEXTS, BATCH)
    if not args.shapes:
        short = texts_of(count * TOGETHER)
        some = [" ".join(short[i::count]) for i in range(count)]
        yield from _compared(args, args.model, "MiniLM", some, batch)
        return
    for kind in args.shapes.split(","):
        some = [" ".join(words(100, seed)) for seed in range(count // FEWER)]
        with written(kind, "f16", args.small) as folder:
            yield from _compared(args, str(folder), kind, some, batch)


def _compared(
    args: argparse.Namespace, folder: str, kind: str, some: list[str], batch: int
) -> Iterator[Row]:  # fmt: skip
    for dtype in (args.dtypes or "auto").split(","):
        alone = {d: ct.load(folder, device=d, dtype=dtype, task="embed") for d in args.devices}
        models = dict(alone)
        if len(alone) > 1:
            every = ct.load(folder, devices=args.devices, dtype=dtype, task="embed")
            models[f"all {len(alone)}"] = every
        results: dict[str, np.ndarray] = {}
        contestants = {name: _call(m, some, batch, name, results) for name, m in models.items()}
        for name, times in alternate(contestants, min(args.rounds, 5)).items():
            first, own = (_unit(results[who]) for who in (args.devices[0], name))
            cosine = float(np.min(np.sum(first * own, -1)))
            assert cosine > 0.999, (name, cosine)
            yield {"bench": f"encode on several, {kind} {dtype}", "shape": [len(some)], "who": name,
                   "unit": "texts/s", **summary(times, len(some)), "cosine": cosine}  # fmt: skip
        model = next(iter(models.values()))
        begin = time.perf_counter()
        model.tokenizer.tokens(some, model.config.max_length)
        rate = len(some) / (time.perf_counter() - begin)
        yield {"bench": f"tokenise, {kind}", "shape": [len(some)], "who": "host",
               "unit": "texts/s", "rate": rate, "worst_decile": rate}  # fmt: skip


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _call(
    model: ct.Embedder, texts: list[str], batch: int, name: str, results: dict[str, np.ndarray]
) -> Call:
    def call() -> None:
        results[name] = model.encode(texts, batch)

    return call
