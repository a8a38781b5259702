"""`centella transcribe`: audio files, or standard input, to text with times as it is heard."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Struct

from centella.audio.mel import RATE
from centella.audio.stream import open_audio
from centella.audio.subtitles import FORMATS
from centella.audio.transcript import Segment, by_word
from centella.cli.embed import Dtype, ShowLedger, WeightDtype
from centella.cli.generate import Quantize
from centella.cli.options import Device
from centella.cli.output import err, in_line, out, piece, printable, progress
from centella.cli.process import reason
from centella.errors import CentellaError
from centella.host.files import replaced
from centella.ledger.counts import ledger
from centella.tasks.load import load
from centella.tasks.speech_options import Options
from centella.tasks.transcribe import Transcriber


class Times(StrEnum):
    """What has times."""

    none = "none"
    segment = "segment"
    word = "word"


class Format(StrEnum):
    """How a transcript is written."""

    text = "text"
    json = "json"
    srt = "srt"
    vtt = "vtt"
    tsv = "tsv"


Files = Annotated[
    list[str] | None, typer.Argument(metavar="FILE", help="Audio; - for standard input.")
]
Model = Annotated[
    str, typer.Option(metavar="DIR", help="A model folder, or a repository of huggingface.co.")
]
Language = Annotated[
    str | None, typer.Option(metavar="L", help="As a code: de. By default the model finds it.")
]
Task = Annotated[str, typer.Option(metavar="T", help="transcribe, or translate (to English).")]
Timed = Annotated[Times, typer.Option(help="What has times: segments, or their words too.")]
As = Annotated[Format, typer.Option("--format", help="Of what is written.")]
Output = Annotated[
    str | None, typer.Option(metavar="DIR", help="Write DIR/NAME.FORMAT for each file.")
]
Beam = Annotated[int, typer.Option(min=1, metavar="N", help="Texts that are followed at once.")]
Batch = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Windows at once, which then know no text before them."),
]
Vad = Annotated[
    str, typer.Option(metavar="V", help="What finds speech: auto, energy; off: all is heard.")
]
Prompt = Annotated[str | None, typer.Option(metavar="S", help="Text taken to come before.")]
Hotwords = Annotated[str | None, typer.Option(metavar="S", help="Words to expect.")]
Raw = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="- is raw samples: int16, float32, ...")
]
Rate = Annotated[int, typer.Option(min=1, metavar="HZ", help="Samples a second, with --raw.")]
Trace = Annotated[str | None, typer.Option(metavar="F", help="Write what ran, for Perfetto.")]


class How(Struct, frozen=True):
    """How files are transcribed.

    Attributes:
        options: arguments of `Transcriber.stream`.
        format: one of `FORMATS`; output: a folder, or None.
        raw: dtype of the samples of standard input, None for a WAV; rate: of those.
        several: whether there are several files.
    """

    options: dict[str, Any]
    format: str
    output: str | None
    raw: str | None
    rate: int
    several: bool


def run(
    files: Files = None,
    model: Model = "",
    language: Language = None,
    task: Task = "transcribe",
    timestamps: Timed = Times.segment,
    form: As = Format.text,
    output: Output = None,
    beam: Beam = 1,
    batch: Batch = None,
    vad: Vad = "auto",
    prompt: Prompt = None,
    hotwords: Hotwords = None,
    raw: Raw = None,
    rate: Rate = RATE,
    device: Device = None,
    dtype: Dtype = WeightDtype.auto,
    quantize: Quantize = None,
    show_ledger: ShowLedger = False,
    trace: Trace = None,
) -> None:
    """Transcribe files.

    Raises:
        CentellaError: no file, a model that does not transcribe, or options that it has not.
        typer.Exit: 1 where a file failed; the others are done.
    """
    if not files:
        raise CentellaError("transcribe: no file; try: centella transcribe talk.wav --model DIR")
    if not model:
        raise CentellaError("transcribe: --model DIR: expected a model folder or a repository")
    transcriber = load(model, device, dtype.value, quantize=quantize)
    if not isinstance(transcriber, Transcriber):
        raise CentellaError(
            f"transcribe: {in_line(model)}: expected a model that transcribes, got a "
            f"{type(transcriber).__name__}"
        )
    options = {
        "language": language, "task": task, "timestamps": timestamps.value, "beam": beam,
        "batch": batch, "vad": vad, "prompt": prompt, "hotwords": hotwords,
    }  # fmt: skip
    Options.of("transcribe", options, transcriber.config.vocabulary)
    how = How(options, form.value, output, raw, rate, len(files) > 1)
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
    with ledger(timing=True) if trace else ledger() if show_ledger else nullcontext() as led:
        failed = [file for file in files if not _done(transcriber, file, how)]
    if show_ledger:
        err(f"ledger: {led}")
    if trace and led is not None:
        led.trace(trace)
    if failed:
        raise typer.Exit(1)


def _done(transcriber: Transcriber, file: str, how: How) -> bool:
    """Transcribe a file; False where it failed, which a line on standard error tells."""
    if how.several and how.output is None:
        out(f"{in_line(file)}:")
    try:
        _transcribe(transcriber, file, how)
    except BrokenPipeError:
        raise
    except (CentellaError, OSError) as error:
        said = reason(error) if isinstance(error, OSError) else str(error)
        name = in_line(file)
        err(f"centella: {said if name in said else f'{name}: {said}'}")
        return False
    return True


def _transcribe(transcriber: Transcriber, file: str, how: How) -> None:
    began = time.monotonic()
    raw = how.raw if file == "-" else None
    bar = sys.stderr.isatty() and not (how.output is None and sys.stdout.isatty())
    with (
        open_audio(file, rate=how.rate, dtype=raw) as stream,
        progress("transcribed {:.0f} of {:.0f} s", bar) as tell,
    ):
        segments = transcriber.stream(stream, progress=tell, **how.options)  # type: ignore[arg-type]  # checked when it begins
        shown: Iterable[Segment] = segments
        if how.options["timestamps"] == "word" and how.format in ("srt", "vtt", "tsv"):
            shown = by_word(segments)
        written = FORMATS[how.format](shown)
        if how.output is None:
            timed = how.format == "text" and how.options["timestamps"] != "none"
            for part in _lines(shown) if timed else written:
                piece(part)
        else:
            _save(written, Path(how.output), file, how.format)
    seconds, took = segments.duration, time.monotonic() - began
    language = f", {segments.language}" if segments.language else ""
    err(f"{in_line(file)}: {seconds:.1f} s{language} in {took:.1f} s, "
        f"{seconds / max(took, 1e-9):.1f} x real time")  # fmt: skip


def _lines(segments: Iterable[Segment]) -> Iterator[str]:
    """A line for each segment, with its times."""
    for segment in segments:
        text = " ".join(printable(segment.text).split())
        yield f"[{_clock(segment.start)} - {_clock(segment.end)}] {text}\n"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes):02}:{rest:05.2f}"


def _save(parts: Iterable[str], folder: Path, file: str, kind: str) -> None:
    """Write DIR/NAME.FORMAT, whole or not at all."""
    name = "stdin" if file == "-" else Path(file).stem
    path = folder / f"{name}.{'txt' if kind == 'text' else kind}"
    with replaced(str(path)) as target:
        for part in parts:
            target.write(part.encode())
    out(in_line(str(path)))
