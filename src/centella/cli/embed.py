"""`centella embed`: texts from the command line, a file or stdin to vectors."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from msgspec import Struct
from msgspec.structs import replace

from centella.cli.escape import in_line
from centella.cli.loading import device_kind, load_shown
from centella.cli.options import BatchSize, Device, Devices, Dtype, Json, Model, ShowLedger
from centella.cli.output import err, err_ledger, out, out_json, progress
from centella.cli.reading import texts_of
from centella.cli.timing import Stages
from centella.errors import CentellaError
from centella.host.files import expect_writable
from centella.ledger.counts import ledger
from centella.tasks.embed.embedder import Embedder
from centella.tasks.embed.embeddings import Cut, in_pieces
from centella.tasks.text.chunks import Chunker
from centella.tensors.arguments import expect_finite
from centella.weights.fingerprint import fingerprint
from centella.weights.folder import find_model
from centella.weights.vectors import SUFFIXES, VectorFile, open_vectors, write_vectors

Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT...", help="Texts to embed.")]
File = Annotated[
    str | None,
    typer.Option(metavar="F", help="Embed the lines of a file, blank ones too; - for stdin."),
]
Output = Annotated[
    str | None,
    typer.Option(
        metavar="F", help="Save the vectors as .npy, or with the texts as .parquet or .arrow."
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Discard the rows that an interrupted run saved.")
]
PromptName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Put this prompt of the model's folder before each text."),
]
Dim = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Keep the first N numbers of each vector.")
]
Chunk = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Embed longer texts in pieces of N tokens."),
]
Pieces = Annotated[
    bool, typer.Option("--pieces", help="A row for each piece of a text, not for the text.")
]
Overlap = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="M",
        help="With --chunk or --pieces: begin a piece with the last M tokens of the one before.",
    ),
]
Exact = Annotated[
    bool, typer.Option("--exact", help="The same bits for a text in every batch; takes longer.")
]
Timing = Annotated[
    bool, typer.Option("--timing", help="Show where the time went (on stderr; within --json).")
]

AT_ONCE = 8  # batches of which rows are shown together: lengths are sorted among them
SAVED = 32  # batches whose rows are saved together, at first
AT_MOST, SECONDS = 1 << 16, 5.0  # texts; more of them while they take less than this
MANY = 4  # batches; from here on a terminal gets a progress bar, on stderr
WIDE = 28  # characters of a text in the table
SHOWN = 4  # first values of a vector in the table


class Work(Struct, eq=False):
    """The texts of a command on their way to vectors.

    Attributes:
        options: of `Embedder.embed`; tell: is called with texts done and of all.
        lines: where texts are pieces, of each the line that it is from.
        cut: the texts so far of which the model has not read all.
        cut_before: how many more there were in an interrupted run that this one goes on with.
    """

    embedder: Embedder
    texts: list[str]
    batch_size: int
    options: Mapping[str, Any]
    tell: Callable[[int, int], None]
    lines: list[int] | None = None
    cut: list[Cut] = []
    cut_before: int = 0

    def vectors(self, begin: int, end: int) -> Any:
        """Vectors of the texts `begin` to `end`."""
        some, total = self.texts[begin:end], len(self.texts)

        def told(done: int, pieces: int) -> None:
            self.tell(begin + done * len(some) // pieces, total)

        embeddings = self.embedder.embed(
            some, batch_size=self.batch_size, progress=told, **self.options
        )  # fmt: skip
        expect_finite("embed", "the vector of text", embeddings.dense, begin)
        self.cut += [replace(cut, index=begin + cut.index) for cut in embeddings.cut]
        return embeddings.dense


def run(
    texts: Texts = None, file: File = None, model: Model = "minilm", device: Device = None,
    dtype: Dtype = "auto", batch_size: BatchSize = 32, as_json: Json = False,
    output: Output = None, restart: Restart = False, prompt_name: PromptName = None,
    dim: Dim = None, chunk: Chunk = None, overlap: Overlap = 0, pieces: Pieces = False,
    devices: Devices = None, exact: Exact = False, show_ledger: ShowLedger = False,
    timing: Timing = False,
) -> None:  # fmt: skip
    """Embed and print, or save.

    Raises:
        CentellaError: no text, both kinds of text, options that do not go together, an output that
            cannot be, or what loading and encoding raise.
        OSError: for a file that cannot be read or written.
    """
    if output is not None:
        _expect_vectors(output)
        if pieces and Path(output).suffix == ".npy":
            raise CentellaError(
                f"embed: --pieces: expected .parquet or .arrow, which keep the texts of pieces, "
                f"got {in_line(output)}"
            )
    if overlap and chunk is None and not pieces:
        raise CentellaError("embed: --overlap: expected --chunk or --pieces with it, got neither")
    lines = texts_of("embed", texts or [], file, "centella embed 'a sentence'")
    settings: dict[str, Any] = {
        "prompt_name": prompt_name,
        "dim": dim,
        "chunk": chunk,
        "overlap": overlap,
        "exact": exact,
    }
    options = {name: value for name, value in settings.items() if value}
    with ledger(timing=True) if timing else nullcontext() as timed:
        stages = Stages(timed)
        with stages.stage("make the model"):
            continued = output is not None and file is not None and Path(file).is_file()
            root = find_model(model) if continued else model
            files = fingerprint(root) if continued else None  # before weights are read
            embedder = load_shown(str(root), device, dtype, task="embed", devices=devices)
        about = _about(model, embedder, dtype, file, {**options, "pieces": pieces}, files)
        numbers: list[int] | None = None
        if pieces:
            with stages.stage("cut into pieces"):
                lines, numbers = _pieces(embedder, lines, options)
        rows = output is None and not as_json
        vectors: Any = None
        bar = sys.stderr.isatty() and len(lines) > MANY * batch_size
        bar = bar and not (rows and sys.stdout.isatty())  # where the rows say how far it is
        with (
            stages.stage("run and fetch"),
            ledger() as led,
            progress("embedded {} of {} texts", bar) as tell,
        ):
            work = Work(embedder, lines, batch_size, options, tell, numbers)
            if rows:
                _show(work)
            elif output is not None:
                vectors = _save(output, work, model, about, restart)
            else:
                vectors = work.vectors(0, len(lines))
    if as_json:
        embeddings = [
            {"text": t, "embedding": v} for t, v in zip(lines, vectors.tolist(), strict=True)
        ]
        for row, number in zip(embeddings, numbers or (), strict=numbers is not None):
            row["line"] = number
        summary: dict[str, Any] = {
            "embeddings": embeddings,
            "cut": [{"row": cut.index, "tokens": cut.tokens, "read": cut.read} for cut in work.cut],
        }
        out_json({**summary, "timing_ms": stages.millis} if timing else summary, indent=None)
    elif output is not None:
        out(f"{in_line(output)}: {vectors.shape[0]} x {vectors.shape[1]} {vectors.dtype}")
    cuts = work.cut_before + len(work.cut)
    if cuts:
        most = embedder.config.max_length
        err(
            f"embed: {cuts:,} of {len(lines):,} texts were cut at {most} tokens, which is "
            f"what the model reads; --chunk {most} embeds all of a text"
        )
    if show_ledger:
        err_ledger(led)
    if timing and not as_json:
        err(stages.table())


def _expect_vectors(output: str) -> None:
    """Refuse, before a model is loaded, a file of another kind or that cannot be written."""
    if Path(output).suffix not in SUFFIXES:
        raise CentellaError(f"embed: --output: expected {', '.join(SUFFIXES)}, got {output}")
    expect_writable(output)


def _pieces(
    embedder: Embedder, lines: list[str], options: dict[str, Any]
) -> tuple[list[str], list[int]]:
    """The pieces of lines, and the line of each, from 0; the options of cutting are taken."""
    c = embedder.config
    prompt = c.prompt("embed", options.get("prompt_name"), None)
    size, overlap = options.pop("chunk", c.max_length), options.pop("overlap", 0)
    chunker = Chunker(
        "embed", embedder.tokenizer, c.lower_case, prompt, c.max_length, size, overlap
    )
    pieces = in_pieces(lines, chunker)
    return pieces.texts, pieces.owners


def _about(
    model: str, embedder: Embedder, dtype: str, file: str | None,
    options: Mapping[str, Any], files: Mapping[str, str] | None,
) -> dict[str, Any] | None:  # fmt: skip
    """Of what run vectors are, with the files of its model; None: of one that cannot go on."""
    if file is None or files is None:
        return None
    seen = os.stat(file)
    source = {
        "file": os.path.realpath(file),
        "bytes": seen.st_size,
        "changed": _date(seen.st_mtime_ns),
    }
    kinds = {device_kind(each.model.device) for each in (embedder, *embedder.replicas)}
    on = {"dtype": dtype, "device": ", ".join(sorted(kinds))}
    return {"model": model, **on, **options, **source, **files}


def _date(ns: int) -> str:
    """A time since 1970 as date and time, with all its digits: equal texts are equal times."""
    seconds, rest = divmod(ns, 10**9)
    return f"{str(np.datetime64(seconds, 's')).replace('T', ' ')}.{rest:09} UTC"


def _save(
    output: str, work: Work, model: str, about: dict[str, Any] | None, restart: bool
) -> Any:  # fmt: skip
    """Embed into a file, some batches at a time; what an interrupted run has saved is kept."""
    total = len(work.texts)
    if about is None or (os.path.exists(output) and not os.path.isfile(output)):
        vectors = work.vectors(0, total)
        write_vectors(output, vectors, work.texts, model, work.lines)
        return vectors
    name, dim = in_line(output), work.options.get("dim", work.embedder.dim)
    with VectorFile(output, dim, about, restart=restart) as file:
        work.cut_before = file.cut
        if file.rows:
            err(f"{name}: continues after {file.rows:,} of {total:,} texts")
        size = min(SAVED * work.batch_size, AT_MOST)
        try:
            while file.rows < total:
                begin = time.monotonic()
                vectors = work.vectors(file.rows, file.rows + size)
                file.append(vectors, work.cut_before + len(work.cut) - file.cut)
                if 2 * (time.monotonic() - begin) < SECONDS:  # a device idles between two calls
                    size = min(2 * size, AT_MOST)
        except BaseException:
            if file.rows:
                err(f"{name}: {file.rows:,} of {total:,} texts are saved; the same command goes on")
            else:
                file.discard()
            raise
        file.finish(work.texts, model, work.lines)
    return open_vectors(output).vectors


def _show(work: Work) -> None:
    """A line a text, of some batches as soon as they are done.

    Without rich, whose import takes longer than a short text's embedding.
    """
    wide = max(4, *(min(len(_line(t)), WIDE) for t in work.texts))
    heading = f"{'text':<{wide}}  dim    norm  first values\n"
    step = AT_ONCE * work.batch_size
    for start in range(0, len(work.texts), step):
        rows = zip(work.texts[start : start + step], work.vectors(start, start + step), strict=True)
        out(heading + "\n".join(_row(text, vector, wide) for text, vector in rows))
        heading = ""


def _row(text: str, vector: Any, wide: int) -> str:
    line = _line(text)
    shown = line if len(line) <= wide else f"{line[: wide - 1]}…"
    first = " ".join(f"{v:+.4f}" for v in vector[:SHOWN])
    norm = float(np.linalg.norm(vector))
    return f"{shown:<{wide}}  {vector.shape[0]:>3}  {norm:.4f}  {first} ..."


def _line(text: str) -> str:
    """A text in one line, without what a terminal would act on."""
    return "".join(c if c.isprintable() else " " for c in text)
