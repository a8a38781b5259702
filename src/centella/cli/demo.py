"""`centella demo`: search a folder of text by meaning, and show what it took."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from centella.cli.options import Device, Json, Model
from centella.cli.passages import Passage, documentation, read_passages
from centella.errors import CentellaError

QUESTION = "How do I write my own kernel?"
BEST = 3  # passages shown
LINES = 7  # lines of each


Question = Annotated[str, typer.Argument(metavar="QUESTION", help="What to look for.")]
Over = Annotated[
    str | None, typer.Option(metavar="PATH", help="A folder or file (.txt .md .rst .py).")
]


def run(
    question: Question = QUESTION,
    over: Over = None,
    model: Model = "minilm",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Embed the passages and the question; print the nearest passages.

    Raises:
        CentellaError: no question, no weights, no such device, or no text below the path.
    """
    from centella.device import device as open_device
    from centella.ledger import ledger
    from centella.load import load

    if not question.strip():
        raise CentellaError("demo: the question is empty; try: centella demo 'your question'")
    folder = documentation() if over is None else Path(over)
    passages = read_passages(folder)
    start = time.perf_counter()
    where = open_device(device)
    embedder = load(model, where)
    asked = embedder.encode([question])[0]
    first = time.perf_counter() - start
    with ledger() as led:
        start = time.perf_counter()
        vectors = embedder.encode([p.text for p in passages], progress=sys.stderr.isatty())
        rate = len(passages) / (time.perf_counter() - start)
    scores = vectors @ asked
    best = [(float(scores[i]), passages[i]) for i in scores.argsort()[::-1][:BEST]]
    if as_json:
        found = {
            "question": question,
            "device": where.name,
            "seconds_to_first": first,
            "folder": str(folder),
            "passages": len(passages),
            "passages_a_second": rate,
            "ledger": str(led),
            "nearest": [{"score": score, **asdict(passage)} for score, passage in best],
        }
        print(json.dumps(found, indent=2))
        return
    called = str(where.describe().get("name", ""))
    facts = {
        "device": where.name if called in where.name else f"{where.name} ({called})",
        "first embedding": f"after {first:.2f} s (device opened, weights loaded)",
        "passages": f"{len(passages)} of {folder}, {rate:,.0f} a second",
        "question": question,
    }
    _show(facts, best)
    print(f"ledger of the passages: {led}\n")
    print(_next(over, model, device))


def _show(facts: dict[str, str], best: list[tuple[float, Passage]]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for name, value in facts.items():
        console.print(f"{name:<16} {value}", markup=False, soft_wrap=True)
    for score, passage in best:
        console.print()
        console.print(Text(f"{score:.3f}  {passage.file}:{passage.line}", style="bold"))
        text = passage.text if passage.file.endswith(".py") else _reflowed(passage.text)
        lines = Text(text).wrap(console, console.width - 7)
        shown = [*lines[:LINES], Text("...")] if len(lines) > LINES else lines
        console.print(Padding(Text("\n").join(shown), (0, 0, 0, 7)))
    console.print()


def _reflowed(text: str) -> str:
    """Lines of prose joined; headings, lists, tables and fenced code as they are."""
    lines: list[str] = []
    fenced = joins = False
    for line in text.splitlines():
        fence = line.startswith("```")
        fenced ^= fence
        prose = bool(line) and not fenced and not fence and (line[0].isalnum() or line[0] in "*`('")
        if prose and joins:
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        joins = prose
    return "\n".join(lines)


def _next(over: str | None, model: str, device: str | None) -> str:
    """Three commands to try, with the options that were given."""
    given = {"--model": None if model == "minilm" else model, "--device": device}
    options = "".join(f" {k} {v}" for k, v in given.items() if v)
    return "\n".join(
        [
            "try next:",
            f"  centella demo 'your question' --over {over or 'FOLDER'}{options}",
            f"  centella embed 'a sentence' 'another one' --json{options}",
            "  centella kernels softmax --target ptx",
        ]
    )
