"""`centella rank`: texts in the order in which they answer a question."""

from __future__ import annotations

from typing import Annotated

import typer

from centella.cli.escape import in_line
from centella.cli.loading import load_shown
from centella.cli.options import BatchSize, Device, Devices, Json, ShowLedger
from centella.cli.output import err_ledger, out, out_json
from centella.cli.reading import texts_of
from centella.errors import CentellaError
from centella.ledger.counts import ledger

Question = Annotated[str, typer.Argument(metavar="QUESTION", help="The question.")]
Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT...", help="Texts to rank.")]
CrossEncoder = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="DIR",
        help="A cross-encoder or Qwen3-Reranker: a folder or a repository.",
    ),
]
Instruction = Annotated[
    str | None, typer.Option(metavar="TEXT", help="What a Qwen3-Reranker judges the texts by.")
]
File = Annotated[
    str | None, typer.Option(metavar="F", help="Rank the lines of a file; - for stdin.")
]
Top = Annotated[int | None, typer.Option(min=1, metavar="K", help="Texts to show (default: all).")]


def run(
    question: Question, texts: Texts = None, model: CrossEncoder = None, file: File = None,
    top: Top = None, instruction: Instruction = None, device: Device = None,
    devices: Devices = None, batch_size: BatchSize = 32, as_json: Json = False,
    show_ledger: ShowLedger = False,
) -> None:  # fmt: skip
    """Print the texts, the best first, with their scores; blank ones are in no answer.

    Raises:
        CentellaError: no text, only blank ones, both kinds of text, no model, or what loading and
            ranking raise.
        OSError: for a file that cannot be read.
    """
    if not question.strip():
        raise CentellaError("rank: the question is empty")
    example = "centella rank --model DIR 'question' 'a text'"
    documents = texts_of("rank", texts or [], file, example)
    if not model:
        raise CentellaError(
            "rank: --model DIR: expected a folder or a repository, as BAAI/bge-reranker-v2-m3"
        )
    rows = [row for row, text in enumerate(documents) if text.strip()]
    if not rows:
        raise CentellaError(f"rank: expected a text that is not blank, got {len(documents)} blank")
    ranker = load_shown(model, device, "auto", task="classify", devices=devices)
    with ledger() as led:
        ranked = ranker.rank(
            question, [documents[row] for row in rows], top, instruction=instruction,
            batch_size=batch_size,
        )  # fmt: skip
    if as_json:
        answers = [{"row": rows[r.index], "score": r.score, "text": r.text} for r in ranked]
        out_json({"question": question, "ranked": answers})
    else:
        wide = len(str(len(documents) - 1))
        for r in ranked:
            out(f"{r.score:.4f}  {rows[r.index]:>{wide}}  {in_line(r.text)}".rstrip())
    if show_ledger:
        err_ledger(led)
