"""`centella search`: the rows of a file of vectors that are nearest to a question."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from centella.cli.escape import in_line
from centella.cli.options import Device, Json, ShowLedger
from centella.cli.output import err, err_ledger, out, out_json
from centella.cli.reading import lines_of
from centella.dtypes import f32
from centella.errors import CentellaError, ContractError
from centella.ledger.counts import ledger
from centella.tasks.load import load
from centella.tasks.search import Index
from centella.weights.vectors import SUFFIXES, open_vectors

Vectors = Annotated[str, typer.Argument(metavar="INDEX", help="A .npy, .parquet or .arrow file.")]
Questions = Annotated[list[str], typer.Argument(metavar="QUESTION...", help="What to look for.")]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="The model that embedded the file (default: the one it names, else minilm).",
    ),
]
Lines = Annotated[
    str | None,
    typer.Option("--file", metavar="F", help="The texts of a .npy file: row i is line i."),
]
Top = Annotated[int, typer.Option(min=1, metavar="K", help="Rows to show.")]
Half = Annotated[bool, typer.Option("--f16", help="Keep the vectors in f16: half the memory.")]


def run(
    index: Vectors, questions: Questions, model: Model = None, device: Device = None,
    file: Lines = None, top: Top = 5, half: Half = False, as_json: Json = False,
    show_ledger: ShowLedger = False,
) -> None:  # fmt: skip
    """Embed the questions and print the nearest rows, with their texts where these are known.

    Rows of blank texts are in none. Of pieces their line is printed in place of the row.

    Raises:
        CentellaError: no vectors, of another size than the model's, or texts of another number.
        OSError: for a file that cannot be read.
    """
    if not all(question.strip() for question in questions):
        raise CentellaError("search: expected questions that are not empty, got one that is")
    if not index:
        raise CentellaError("search: INDEX: expected a file of vectors, got an empty text")
    if len(questions) > 1 and not any(" " in question for question in questions):
        quoted = in_line(shlex.quote(" ".join(questions)))
        err(
            f"search: {len(questions)} questions of one word each; if it is one, quote it: {quoted}"
        )
    if Path(index).is_dir():
        raise CentellaError(
            f"{index}: expected a file of vectors, got a folder; centella demo --over FOLDER "
            f"searches text files, centella embed --file F --output V.npy embeds lines"
        )
    if Path(index).suffix not in SUFFIXES:
        raise CentellaError(
            f"{in_line(index)}: expected a file of {', '.join(SUFFIXES)}; centella embed "
            f"--file {in_line(shlex.quote(index))} --output vectors.npy makes one of lines of text"
        )
    stored = open_vectors(index)
    rows, dim = stored.vectors.shape
    if not rows:
        raise CentellaError(f"{index}: expected one vector or more, got none")
    texts = stored.texts if file is None else lines_of("search", file)
    if texts is not None and len(texts) != rows:
        raise CentellaError(
            f"search: --file: expected a line for each of the {rows:,} rows of {in_line(index)}, "
            f"got {len(texts):,}"
        )
    stated = in_line(stored.model or "")
    called = model or stated or "minilm"
    embedder = load(called, device, task="embed")
    cut = dim < embedder.dim and called == stated  # by embed --dim
    if embedder.dim != dim and not cut:
        raise CentellaError(
            f"search: {in_line(index)} has vectors of {dim} numbers, {in_line(called)} gives "
            f"{embedder.dim}; name with --model what embedded it"
        )
    where = embedder.model.device
    kept = None if texts is None else np.flatnonzero([bool(text.strip()) for text in texts])
    if kept is not None and len(kept) in (0, rows):
        kept = None
    some = stored.vectors if kept is None else stored.vectors[kept]
    wide = some.dtype.itemsize > f32.itemsize  # floats of Python, as other tools write them
    try:
        vectors = Index(some, device=where, dtype="f16" if half else "f32" if wide else None)
    except ContractError as error:
        raise CentellaError(f"{index}: {str(error).removeprefix('Index: ')}") from error
    with ledger() as led:
        matches = vectors.search(embedder.encode_query(questions, dim=dim), top)
    nearest = [
        [
            _match(float(s), int(r), texts, stored.lines)
            for s, r in zip(scores, matched if kept is None else kept[matched], strict=True)
        ]
        for scores, matched in zip(matches.scores, matches.rows, strict=True)
    ]
    if as_json:
        pairs = zip(questions, nearest, strict=True)
        out_json({"results": [{"question": q, "nearest": n} for q, n in pairs]})
    else:
        _show(questions, nearest)
    if show_ledger:
        err_ledger(led)


def _match(
    score: float, row: int, texts: Sequence[str] | None, lines: Sequence[int] | None
) -> dict[str, Any]:
    line = {} if lines is None else {"line": lines[row]}
    return {"score": score, "row": row, **line, **({} if texts is None else {"text": texts[row]})}


def _show(questions: list[str], nearest: list[list[dict[str, Any]]]) -> None:
    for question, matches in zip(questions, nearest, strict=True):
        if len(questions) > 1:
            out(in_line(question))
        numbers = [match.get("line", match["row"]) for match in matches]
        wide = len(str(max(numbers)))
        for match, number in zip(matches, numbers, strict=True):
            text = in_line(match.get("text", ""))
            out(f"{match['score']:.3f}  {number:>{wide}}  {text}".rstrip())
