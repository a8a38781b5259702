"""`ct.Index`: queries a second over random unit vectors of 384 numbers, all of which are compared.

From queries on the host to scores and rows on the host. The first result is compared with NumPy's.
Peer: torch's product and topk on vectors that are on the card.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from measure import Call, Row, alternate, summary, torch_or_none

import centella as ct

DIM, BEST = 384, 10
READ = 4.39e12  # bytes a second of an H200


def search(args: argparse.Namespace) -> Iterator[Row]:
    """Queries a second for each device, dtype, number of vectors and of queries at once."""
    counts = args.shapes or ("5e3" if args.small else "1e6,1e7")
    for count in (int(float(n)) for n in counts.split(",")):
        vectors = _vectors(count)
        for dtype in (args.dtypes or "f16").split(","):
            for queries in (1, 16, 64):
                asked = _vectors(queries, seed=1)
                results: dict[str, Any] = {}
                contestants: dict[str, Call] = {}
                for name in args.devices:
                    index = ct.Index(vectors, device=name, dtype=dtype)
                    contestants[name] = _ours(index, asked, name, results)
                if (torch := torch_or_none()) is not None:
                    contestants["torch"] = _peer(torch, vectors, asked, dtype, results)
                rounds = 3 if args.small else args.rounds
                for name, times in alternate(contestants, rounds).items():
                    _check(results[name], vectors, asked)
                    row = {"bench": f"search, {dtype}", "shape": [count, queries], "who": name,
                           "unit": "queries/s", **summary(times, queries)}  # fmt: skip
                    nbytes = count * DIM * (2 if dtype != "f32" else 4)
                    if name.startswith("cuda"):
                        row |= {"share": nbytes * row["rate"] / queries / READ,
                                "of": "the card's reads"}  # fmt: skip
                    yield row


def _vectors(count: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    vectors = np.empty((count, DIM), np.float32)
    for start in range(0, count, 1 << 18):
        some = random.standard_normal((min(1 << 18, count - start), DIM), np.float32)
        vectors[start : start + len(some)] = some / np.linalg.norm(some, axis=1, keepdims=True)
    return vectors


def _ours(index: ct.Index, asked: Any, name: str, results: dict[str, Any]) -> Call:
    def call() -> None:
        results[name] = index.search(asked, BEST).scores

    return call


def _peer(torch: Any, vectors: Any, asked: Any, dtype: str, results: dict[str, Any]) -> Call:
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    there = torch.from_numpy(vectors).to("cuda", kind)

    def call() -> None:
        queries = torch.from_numpy(asked).to("cuda", kind)
        scores, _ = torch.topk(queries @ there.T, BEST)
        results["torch"] = scores.float().cpu().numpy()

    return call


def _check(scores: Any, vectors: Any, asked: Any) -> None:
    """The first query's scores, over some of the vectors at a time."""
    best = np.sort(np.concatenate([
        vectors[start : start + (1 << 20)] @ asked[0] for start in range(0, len(vectors), 1 << 20)
    ]))[::-1][:BEST]  # fmt: skip
    assert np.abs(scores[0] - best).max() < 5e-3, (scores[0], best)
