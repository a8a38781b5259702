"""`centella demo`: search a folder of text by meaning, and show what it took."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct, to_builtins

from centella.cli.demo_vectors import PassageVectors
from centella.cli.escape import in_line
from centella.cli.options import Device, Json, Model
from centella.cli.output import draw, err, out, out_json, progress
from centella.cli.parts import Excerpt
from centella.cli.passages import LEFT_OUT, Passage, documentation, read_passages, summary
from centella.dtypes import Array
from centella.errors import CentellaError
from centella.ledger.counts import Ledger, ledger
from centella.runtime.device import device as open_device
from centella.tasks.embed.embedder import Embedder
from centella.tasks.load import load
from centella.tensors.arguments import expect_finite
from centella.weights.folder import find_model

QUESTION = "How do I write my own kernel?"
BEST = 3  # passages shown
LINES = 7  # lines of each
ITEM = re.compile(r"(-|\d+\.) ")  # of a list
BATCH = 16  # passages: on a CPU each takes seconds, and how far it is should be seen


Question = Annotated[str, typer.Argument(metavar="QUESTION", help="What to look for.")]
Over = Annotated[
    str | None, typer.Option(metavar="PATH", help="Search this folder or file (.txt .md .rst .py).")
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Embed the passages anew, and keep no vectors.")
]


class Embedded(Struct, frozen=True):
    """Vectors of the passages, f32 [number of passages, dim], and what they took.

    Attributes:
        rate: passages a second; None, with an empty ledger, where the cache had them.
    """

    vectors: Array
    rate: float | None
    counts: Ledger


def run(
    question: Question = QUESTION, over: Over = None, model: Model = "minilm",
    device: Device = None, no_cache: NoCache = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Embed the passages and the question; print the nearest passages.

    Raises:
        CentellaError: no question, no weights, no such device, or no text below the path.
    """
    if not question.strip():
        raise CentellaError("demo: the question is empty; try: centella demo 'your question'")
    folder = documentation() if over is None else Path(over)
    passages, skipped = read_passages(folder, skip=LEFT_OUT if over is None else ())
    say = (lambda *_: None) if as_json else _fact  # stdout then has the object alone
    start = time.perf_counter()
    where = open_device(device)
    called = str(where.describe().get("name", ""))
    say("device", where.name if called in where.name else f"{where.name} ({called})")
    root = find_model(model)
    embedder = load(root, where, task="embed")
    asked = embedder.encode([question])[0]
    expect_finite("demo", "the vector of question", asked[None])
    first = time.perf_counter() - start
    say("first embedding", f"after {first:.2f} s (device opened, weights loaded)")
    passages = [Passage(p.file, p.line, c.text) for p in passages for c in embedder.chunks(p.text)]
    texts = [p.text for p in passages]
    cache = None if no_cache else PassageVectors.of(embedder, root, folder, texts)
    done = _embedded(embedder, texts, cache)
    say("passages", f"{len(passages)} of {folder}, {_origin(done.rate)}")
    if skipped:
        say("files", summary(skipped))
    say("question", question)
    scores = done.vectors @ asked
    best = [(float(scores[i]), passages[i]) for i in scores.argsort()[::-1][:BEST]]
    if as_json:
        report = {
            "question": question,
            "device": where.name,
            "seconds_to_first": first,
            "folder": str(folder),
            "passages": len(passages),
            "passages_a_second": done.rate,
            "from_cache": done.rate is None,
            "skipped": to_builtins(skipped),
            "ledger": done.counts.as_dict(),
            "nearest": [{"score": score, **to_builtins(passage)} for score, passage in best],
        }
        out_json(report)
        return
    _show(best)
    if done.rate is not None:
        out(f"ledger of the passages: {done.counts}\n")
    out(_next(over, model, device))


def _embedded(embedder: Embedder, texts: list[str], cache: PassageVectors | None) -> Embedded:
    """Vectors of the passages: those that the cache has, else of the model."""
    with ledger() as counts:
        vectors = None if cache is None else cache.read()
        if vectors is not None:
            return Embedded(vectors, None, counts)
        if embedder.model.device.name == "cpu" and (hint := _busy()):
            err(hint)
        with progress("embedded {} of {} passages", sys.stderr.isatty()) as tell:
            start = time.perf_counter()
            vectors = embedder.encode(texts, BATCH, progress=tell)
            rate = len(texts) / (time.perf_counter() - start)
    expect_finite("demo", "the vector of passage", vectors)
    if cache is not None:
        cache.write(vectors)
    return Embedded(vectors, rate, counts)


def _origin(rate: float | None) -> str:
    """Where the vectors come from, for the line of the passages."""
    if rate is None:
        return "vectors from the cache (--no-cache embeds anew)"
    return f"{rate:,.{0 if rate >= 10 else 1}f} a second"


def _fact(name: str, value: str) -> None:
    out(f"{name:<16} {in_line(value)}")


def _busy() -> str:
    """What to type where other work keeps the cores busy: threads of BLAS then wait in loops."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has none
    if load <= cores or "OPENBLAS_NUM_THREADS" in os.environ:
        return ""
    return f"busy cores (load {load:.0f} on {cores}): OPENBLAS_NUM_THREADS=1 makes this faster"


def _show(best: list[tuple[float, Passage]]) -> None:
    for score, passage in best:
        text = passage.text if passage.file.endswith(".py") else _reflowed(passage.text)
        draw(Excerpt(f"{score:.3f}  {in_line(passage.file)}:{passage.line}", text, LINES))
    out()


def _reflowed(text: str) -> str:
    """Lines of prose joined, those of an item of a list too; tables and fenced code as they are."""
    lines: list[str] = []
    fenced = joins = item = False
    for line in text.splitlines():
        body = line.lstrip() if item else line  # an item goes on after spaces
        fence, first = body.startswith("```"), ITEM.match(body) is not None
        fenced ^= fence
        prose = body[:1].isalnum() or body[:1] in tuple("*`('") or first
        prose = prose and not fenced and not fence
        if prose and joins and not first:
            lines[-1] += f" {body}"
        else:
            lines.append(line)
        joins, item = prose, prose and (first or item)
    return "\n".join(lines)


def _next(over: str | None, model: str, device: str | None) -> str:
    """Three commands to try, with the options that were given."""
    values = {"--model": None if model == "minilm" else model, "--device": device}
    options = "".join(f" {k} {v}" for k, v in values.items() if v)
    return "\n".join(
        [
            "try next:",
            f"  centella demo 'your question' --over {over or 'FOLDER'}{options}",
            f"  centella embed 'a sentence' 'another one' --json{options}",
            "  centella kernels softmax --target ptx",
        ]
    )
