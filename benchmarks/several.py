"""Texts a second of `encode` on each device alone and on all of them together.

Each device has the model. `tokenise` is what the tokenizer alone takes, which all devices share:
where it is the slowest, more devices gain nothing.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from measure import Call, Row, alternate, summary
from texts import texts_of

import centella as ct

TEXTS, BATCH = 40_000, 512
TOGETHER = 4  # texts of `texts.py` that make one here, of some 100 words


def several(args: argparse.Namespace) -> list[Row]:
    """Rows for each device, for all of them, and for the tokenizer."""
    rows: list[Row] = []
    count, batch = (200, 16) if args.small else (TEXTS, BATCH)
    short = texts_of(count * TOGETHER)
    some = [" ".join(short[i::count]) for i in range(count)]
    for dtype in (args.dtypes or "auto").split(","):
        alone = {d: ct.load(args.model, device=d, dtype=dtype, task="embed") for d in args.devices}
        models = dict(alone)
        if len(alone) > 1:
            every = ct.load(args.model, devices=args.devices, dtype=dtype, task="embed")
            models[f"all {len(alone)}"] = every
        results: dict[str, np.ndarray] = {}
        contestants = {name: _call(m, some, batch, name, results) for name, m in models.items()}
        for name, times in alternate(contestants, min(args.rounds, 5)).items():
            first = results[args.devices[0]]
            cosine = float(np.min(np.sum(first * results[name], -1)))
            assert cosine > 0.999, (name, cosine)
            row = {"bench": f"encode on several, {dtype}", "shape": [count], "who": name,
                   "unit": "texts/s"}  # fmt: skip
            rows.append({**row, **summary(times, count), "cosine": cosine})
        model = next(iter(models.values()))
        begin = time.perf_counter()
        model.tokenizer.tokens(some, model.config.max_length)
        rate = count / (time.perf_counter() - begin)
        rows.append({"bench": "tokenise", "shape": [count], "who": "host", "unit": "texts/s",
                     "rate": rate, "worst_decile": rate})  # fmt: skip
    return rows


def _call(
    model: ct.Embedder, texts: list[str], batch: int, name: str, results: dict[str, np.ndarray]
) -> Call:
    def call() -> None:
        results[name] = model.encode(texts, batch)

    return call
