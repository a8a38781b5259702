"""A million texts from a file to a file of vectors, and where the time goes.

Lines of 40 words of this project's pages and sources, MiniLM in f16, batches of 512. Each part
alone: reading, tokenising, batches of ids to vectors, writing; then all of it, as `centella embed`
does it in a new process. Peer: transformers, texts sorted by length, on a twentieth of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import peer_encode
from measure import Row, torch_or_none
from passages import BATCH, paragraphs

import centella as ct
from centella.cli.reading import lines_of
from centella.tasks.embed.forward import Forward
from centella.tasks.text.batches import TOGETHER, batches_of, run_batches
from centella.weights.vectors import write_vectors

COUNT, WORDS, PEER = 1_000_000, 40, 20


def million(args: argparse.Namespace) -> Iterator[Row]:
    """Texts a second of each part, and of the whole."""
    count = 200 if args.small else int(float(args.shapes or COUNT))
    with tempfile.TemporaryDirectory() as temporary:
        file, out = Path(temporary) / "texts.txt", Path(temporary) / "vectors.npy"
        write_lines(file, count)
        for name in args.devices:
            yield from parts(args, name, file, out, count)
            out.unlink()
            yield command(args, name, file, out, count)
            out.unlink()
        if (torch := torch_or_none()) is not None:
            some = lines_of("embed", str(file))[: count // PEER]
            encode = peer_encode(torch, args.model)
            encode(some[:BATCH])
            yield row_of("file to vectors", "transformers", len(some), lambda: encode(some))[0]


def write_lines(file: Path, count: int) -> None:
    """Lines of 40 words drawn from the paragraphs, each as often as it stands there."""
    parts = (part.split() for part in paragraphs(10**6))
    every = np.array([word for part in parts for word in part if word.isalpha()], object)
    random = np.random.default_rng(5)
    with file.open("w", encoding="utf-8") as out:
        for at in range(0, count, 1 << 14):
            rows = every[random.integers(0, len(every), (min(1 << 14, count - at), WORDS))]
            out.writelines(" ".join(row) + "\n" for row in rows)


def row_of(bench: str, who: str, count: int, call: Callable[[], Any]) -> tuple[Row, Any]:
    """The row of one call, and what it gives."""
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    rate = count / seconds
    return {"bench": f"million: {bench}", "shape": (count,), "who": who, "unit": "texts/s",
            "rate": rate, "worst_decile": rate, "seconds": seconds}, result  # fmt: skip


def parts(
    args: argparse.Namespace, name: str, file: Path, out: Path, count: int
) -> Iterator[Row]:  # fmt: skip
    """Each part alone, and all of them in this process."""
    model = ct.load(args.model, device=name, dtype=args.dtypes or "f16", task="embed")
    row, texts = row_of("read", name, count, partial(lines_of, "embed", str(file)))
    yield row
    model.encode(texts[: 4 * BATCH], batch_size=BATCH)  # plans
    row, tokens = row_of("tokenise", name, count, partial(_tokens, model, texts))
    yield row
    row, vectors = row_of("ids to vectors", name, count, partial(_vectors, model, tokens))
    yield {**row, "tokens": float(np.mean([part.lengths.mean() for part in tokens]))}
    yield row_of("write", name, count, partial(write_vectors, out, vectors))[0]
    call = partial(_whole, model, file, out)
    yield row_of("file to file", name, count, call)[0]


def _tokens(model: Any, texts: list[str]) -> list[Any]:
    """Tokens of the texts, as many at a time as `encode` takes."""
    most = model.config.max_length
    return [model.tokenizer.tokens(texts[at : at + TOGETHER], most)
            for at in range(0, len(texts), TOGETHER)]  # fmt: skip


def _vectors(model: Any, tokens: list[Any]) -> Any:
    """What `encode` does with them."""
    most, forward = model.config.max_length, Forward(model)
    count = sum(map(len, tokens))
    vectors = np.empty((count, model.dim), np.float32)

    def submit(batch: Any) -> Any:
        return forward.captured.fetch(*batch.grid(BATCH, most, 0), True, None)

    def take(batch: Any, result: Any) -> None:
        vectors[batch.texts] = result["dense"][: len(batch.texts)]

    parts = [partial(tokens.__getitem__, i) for i in range(len(tokens))]
    run_batches(batches_of(parts, BATCH, most, 0), count, submit, take, False)
    return vectors


def _whole(model: Any, file: Path, out: Path) -> None:
    write_vectors(out, model.encode(lines_of("embed", str(file)), batch_size=BATCH))


def command(args: argparse.Namespace, name: str, file: Path, out: Path, count: int) -> Row:
    """The same by `centella embed`, from the start of its process to its end."""
    words = [sys.executable, "-m", "centella", "embed", "--file", str(file), "--output", str(out),
             "--model", args.model, "--device", name, "--dtype", args.dtypes or "f16",
             "--batch-size", str(BATCH)]  # fmt: skip
    run = partial(subprocess.run, words, check=True, capture_output=True, env=dict(os.environ))
    return row_of("centella embed, file to file", name, count, run)[0]
