"""`centella embed`: texts from the command line, a file or stdin to vectors."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from centella.cli.options import Device, Json, Model
from centella.cli.timing import Stages
from centella.errors import CentellaError

Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts to embed.")]
File = Annotated[
    str | None,
    typer.Option(metavar="F", help="One text a line, blank lines left out; - for stdin."),
]
Dtype = Annotated[str, typer.Option(metavar="T", help="auto, f32, f16 or bf16.")]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="Texts in one batch.")]
Output = Annotated[str | None, typer.Option(metavar="F.npy", help="Save the array [texts, dim].")]
ShowLedger = Annotated[bool, typer.Option("--ledger", help="Show what moved and ran (on stderr).")]
Timing = Annotated[
    bool, typer.Option("--timing", help="Show where the time went (on stderr; within --json).")
]

MANY = 4  # batches; from here on a terminal gets a progress bar, on stderr
WIDE = 28  # characters of a text in the table
SHOWN = 4  # first values of a vector in the table


def run(
    texts: Texts = None,
    file: File = None,
    model: Model = "minilm",
    device: Device = None,
    dtype: Dtype = "auto",
    batch_size: BatchSize = 32,
    as_json: Json = False,
    output: Output = None,
    show_ledger: ShowLedger = False,
    timing: Timing = False,
) -> None:
    """Embed and print, or save.

    Raises:
        CentellaError: no text, both kinds of text, an output that cannot be, or what loading and
            encoding raise.
        OSError: for a file that cannot be read or written.
    """
    from centella.ledger.counts import ledger
    from centella.tasks.load import load

    if output is not None:
        _check_output(output)
    lines = _texts(texts or [], file)
    stages = Stages(timing)
    with stages:
        with stages.stage("make the model"):
            embedder = load(model, device, dtype)
        bar = sys.stderr.isatty() and len(lines) > MANY * batch_size
        with stages.stage("run and fetch"), ledger() as led:
            vectors = embedder.encode(lines, batch_size=batch_size, progress=bar)
    _put(lines, vectors, output, as_json, stages.found)
    if show_ledger:
        print(f"ledger: {led}", file=sys.stderr)
    if timing and not as_json:
        print(stages.table(), file=sys.stderr)


def _put(
    texts: list[str], vectors: Any, output: str | None, as_json: bool, timing: dict[str, float]
) -> None:
    """Save where an output is named; print JSON, the table, or what was saved."""
    if output is not None:
        import numpy as np

        np.save(output, vectors)
    if as_json:
        pairs = zip(texts, vectors.tolist(), strict=True)
        made: dict[str, Any] = {"embeddings": [{"text": t, "embedding": v} for t, v in pairs]}
        if timing:
            made["timing_ms"] = timing
        print(json.dumps(made, ensure_ascii=False))
    elif output is None:
        _show(texts, vectors)
    else:
        print(f"{output}: {vectors.shape[0]} x {vectors.shape[1]} {vectors.dtype}")


def _check_output(output: str) -> None:
    """Refuse, before a model is loaded, a file that `np.save` would rename or cannot open."""
    if not output.endswith(".npy"):
        raise CentellaError(f"embed: --output writes a .npy file; {output} does not end in .npy")
    folder = Path(output).parent
    if not folder.is_dir():
        raise CentellaError(f"embed: --output {output}: there is no folder {folder}")


def _texts(texts: list[str], file: str | None) -> list[str]:
    if texts and file is not None:
        raise CentellaError("embed: give texts or --file, not both")
    if file is not None:
        texts = _lines(file)
    for number, text in enumerate(texts if file is None else (), 1):
        if not text.strip():
            raise CentellaError(f"embed: expected texts, got an empty one (number {number})")
    if not texts:
        raise CentellaError("embed: no text; try: centella embed 'a sentence'")
    return texts


def _lines(file: str) -> list[str]:
    """The lines of a file or of stdin; says which were left out."""
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        whole = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise CentellaError(f"embed: {file}: line {line} is no UTF-8 text") from error
    lines = [line.rstrip("\n") for line in io.StringIO(whole, newline=None)]
    blank = [number for number, line in enumerate(lines, 1) if not line.strip()]
    if blank:
        which = ", ".join(map(str, blank[:MANY])) + (" ..." if len(blank) > MANY else "")
        print(
            f"{file}: blank lines have no vector: {len(blank)} left out ({which})", file=sys.stderr
        )
    return [line for line in lines if line.strip()]


def _show(texts: list[str], vectors: Any) -> None:
    """A line a text; without rich, whose import takes longer than a short text's embedding."""
    import numpy as np

    wide = max(4, *(min(len(_line(t)), WIDE) for t in texts))
    print(f"{'text':<{wide}}  dim    norm  first values")
    for text, vector in zip(texts, vectors, strict=True):
        line = _line(text)
        shown = line if len(line) <= wide else f"{line[: wide - 1]}…"
        first = " ".join(f"{v:+.4f}" for v in vector[:SHOWN])
        norm = float(np.linalg.norm(vector))
        print(f"{shown:<{wide}}  {vector.shape[0]:>3}  {norm:.4f}  {first} ...")


def _line(text: str) -> str:
    """A text in one line, without what a terminal would act on."""
    return "".join(c if c.isprintable() else " " for c in text)
