"""`ct.Index`: queries a second over random unit vectors of 384 numbers, all of which are compared.

From queries on the host to scores and rows on the host. The first result is compared with NumPy's.
Peer: torch's product and topk on vectors that are on the card.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from measure import READ, Call, Row, alternate, summary, torch_or_none

import centella as ct

DIM, BEST, BLOCK = 384, 10, 1 << 18
QUERIES, ROUNDS = (1, 16, 64), 12


def search(args: argparse.Namespace) -> Iterator[Row]:
    """Queries a second for each device, dtype, number of vectors and of queries at once."""
    counts = args.shapes or ("5e3" if args.small else "1e6,1e7")
    for count in (int(float(n)) for n in counts.split(",")):
        vectors = _vectors(count)
        best = _best(vectors, _vectors(1, seed=1))
        for dtype in (args.dtypes or "f16").split(","):
            indexes = {n: ct.Index(vectors, device=n, dtype=dtype) for n in args.devices}
            peer = _torch(vectors, dtype)
            for queries in QUERIES:
                yield from _searched(args, indexes, peer, best, dtype, (count, queries))


def _searched(
    args: argparse.Namespace, indexes: dict[str, ct.Index], peer: Any, best: Any, dtype: str,
    shape: tuple[int, int],
) -> Iterator[Row]:  # fmt: skip
    count, queries = shape
    asked = _vectors(queries, seed=1)
    results: dict[str, Any] = {}
    contestants = {name: _ours(index, asked, name, results) for name, index in indexes.items()}
    if peer is not None:
        contestants["torch"] = _peer(peer, asked, results)
    rounds = 3 if args.small else min(args.rounds, ROUNDS)
    for name, times in alternate(contestants, rounds).items():
        assert np.abs(results[name][0] - best).max() < 5e-3, (results[name][0], best)
        row = {"bench": f"search, {dtype}", "shape": [count, queries], "who": name,
               "unit": "queries/s", **summary(times, queries)}  # fmt: skip
        nbytes = count * DIM * (2 if dtype != "f32" else 4)
        if name.startswith("cuda"):
            row |= {"share": nbytes * row["rate"] / queries / READ, "of": "the card's reads"}
        yield row


def _vectors(count: int, seed: int = 0) -> Any:
    """Unit vectors f32 [count, DIM]: a block of random ones, then the same with numbers rotated."""
    block = np.random.default_rng(seed).standard_normal((min(BLOCK, count), DIM), np.float32)
    block /= np.linalg.norm(block, axis=1, keepdims=True)
    vectors = np.empty((count, DIM), np.float32)
    for number, start in enumerate(range(0, count, BLOCK)):
        part = vectors[start : start + BLOCK]
        part[:] = np.roll(block[: len(part)], number, axis=1)
    return vectors


def _ours(index: ct.Index, asked: Any, name: str, results: dict[str, Any]) -> Call:
    def call() -> None:
        results[name] = index.search(asked, BEST).scores

    return call


def _torch(vectors: Any, dtype: str) -> Any:
    """torch's vectors on the card; None without a card."""
    torch = torch_or_none()
    if torch is None:
        return None
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    there = torch.empty(vectors.shape, dtype=kind, device="cuda")
    for start in range(0, len(vectors), BLOCK):
        there[start : start + BLOCK] = torch.from_numpy(vectors[start : start + BLOCK]).cuda()
    return there


def _peer(there: Any, asked: Any, results: dict[str, Any]) -> Call:
    import torch

    def call() -> None:
        queries = torch.from_numpy(asked).to(there)
        scores, _ = torch.topk(queries @ there.T, BEST)
        results["torch"] = scores.float().cpu().numpy()

    return call


def _best(vectors: Any, asked: Any) -> Any:
    """The first query's scores, over some of the vectors at a time."""
    scores = [vectors[start : start + BLOCK] @ asked[0] for start in range(0, len(vectors), BLOCK)]
    return np.sort(np.concatenate(scores))[::-1][:BEST]
