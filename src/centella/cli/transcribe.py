"""`centella transcribe`: audio files, or standard input, to text with times as it is heard."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from enum import StrEnum
from glob import glob
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Struct

from centella.audio.mel import RATE
from centella.audio.stream import open_audio
from centella.audio.subtitles import FORMATS
from centella.audio.transcript import Segment, by_word
from centella.cli.escape import in_line, printable
from centella.cli.options import Device, Dtype, Json, Quantize, ShowLedger, Trace
from centella.cli.output import STDIN, STDOUT, err, err_ledger, out, piece, progress
from centella.cli.process import reason
from centella.errors import AudioError, CentellaError
from centella.host.files import expect_writable, replaced
from centella.ledger.counts import ledger
from centella.tasks.load import load
from centella.tasks.transcribe.options import MOST_WINDOWS, Options, vad_network
from centella.tasks.transcribe.transcriber import Transcriber
from centella.tasks.transcribe.transcription import Transcription


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
    list[str] | None, typer.Argument(metavar="FILE...", help="Audio files; - for standard input.")
]
Speech = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="DIR",
        help="A Whisper folder or repository (openai/whisper-tiny); required.",
    ),
]
Language = Annotated[
    str | None,
    typer.Option(metavar="L", help="A code or a name, de or German (default: the model finds it)."),
]
Task = Annotated[str, typer.Option(metavar="T", help="transcribe, or translate (to English).")]
Timed = Annotated[Times, typer.Option(help="Give times of segments, of their words too, or none.")]
As = Annotated[Format, typer.Option("--format", help="How the transcript is written.")]
Output = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Write NAME.FORMAT into this folder for each file."),
]
Beam = Annotated[
    int, typer.Option(min=1, metavar="N", help="Follow the N likeliest texts at once.")
]
Batch = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_WINDOWS,
        metavar="N",
        help="Transcribe N windows at once, none with the text of the one before as its context "
        "(1: one by one, with it).",
    ),
]
Vad = Annotated[
    str,
    typer.Option(
        metavar="V", help="How speech is found: auto, silero or energy; off transcribes everything."
    ),
]
VadModel = Annotated[
    str | None,
    typer.Option(metavar="F", help="Your silero_vad.onnx, which --vad auto then uses."),
]
Prompt = Annotated[str | None, typer.Option(metavar="S", help="Text that counts as said before.")]
Hotwords = Annotated[str | None, typer.Option(metavar="S", help="Words to expect.")]
Raw = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="Standard input is raw samples: int16, float32, ..."),
]
Rate = Annotated[
    int | None,
    typer.Option(min=1, metavar="HZ", help="With --raw: samples a second (default: 16000)."),
]


class How(Struct, frozen=True):
    """How files are transcribed.

    Attributes:
        options: arguments of `Transcriber.stream`.
        format: one of `FORMATS`; output: a folder, or None.
        raw: dtype of the samples of standard input, None for a file's bytes; rate: of those.
        several: whether several files go to standard output.
    """

    options: dict[str, Any]
    format: str
    output: str | None
    raw: str | None
    rate: int
    several: bool


def run(
    files: Files = None,
    model: Speech = "",
    language: Language = None,
    task: Task = "transcribe",
    timestamps: Timed = Times.segment,
    form: As = Format.text,
    output: Output = None,
    beam: Beam = 1,
    batch: Batch = None,
    vad: Vad = "auto",
    vad_model: VadModel = None,
    prompt: Prompt = None,
    hotwords: Hotwords = None,
    raw: Raw = None,
    rate: Rate = None,
    device: Device = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    as_json: Json = False,
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
        raise CentellaError(
            "transcribe: --model DIR: expected a folder or a repository, as openai/whisper-tiny"
        )
    if as_json and form not in (Format.text, Format.json):
        raise CentellaError(f"transcribe: --json: expected no other --format, got {form.value}")
    form = Format.json if as_json else form
    files = [file for pattern in files for file in _matching(pattern)]
    _expect_together(files, form.value, output, raw, rate)
    if trace is not None:
        expect_writable(trace)  # before the work is done
    network = vad_network("transcribe", vad, vad_model)
    transcriber = load(model, device, dtype, task="transcribe", quantize=quantize)
    options = {
        "language": language, "task": task, "timestamps": timestamps.value, "beam": beam,
        "batch": batch, "vad": vad, "vad_model": network, "prompt": prompt, "hotwords": hotwords,
    }  # fmt: skip
    Options.of("transcribe", options, transcriber.config.vocabulary)
    several = len(files) > 1 and output is None
    how = How(options, form.value, output, raw, rate or RATE, several)
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
    with ledger(timing=True) if trace else ledger() if show_ledger else nullcontext() as led:
        done = _transcribe_all(transcriber, files, how)
    if show_ledger:
        err_ledger(led)
    if trace and led is not None:
        led.trace(trace)
    if not done:
        raise typer.Exit(1)


def _matching(pattern: str) -> list[str]:
    """Files of a pattern that the shell left as it is, as those of Windows do; else the name."""
    if not set("*?[").intersection(pattern) or Path(pattern).exists():
        return [pattern]
    return sorted(glob(pattern)) or [pattern]


def _expect_together(
    files: list[str], form: str, output: str | None, raw: str | None, rate: int | None
) -> None:
    """Refuse options without a use, and files whose transcripts would have one name."""
    if raw is not None and "-" not in files:
        raise CentellaError("transcribe: --raw: expected - among the files, got none")
    if rate is not None and raw is None:
        raise CentellaError("transcribe: --rate: expected --raw DTYPE with it, got none")
    if output is None:
        if len(files) > 1 and form in ("srt", "vtt", "tsv"):
            raise CentellaError(
                f"transcribe: --format {form}: expected --output DIR with {len(files)} files: one "
                f"after the other on standard output they would be no {form} file"
            )
        return
    if Path(output).exists() and not Path(output).is_dir():
        raise CentellaError(
            f"transcribe: --output {in_line(output)}: expected a folder, got a file"
        )
    written: dict[str, str] = {}
    for file in files:
        path = _path(Path(output), file, form)
        key = str(path).casefold()  # some systems tell no case of letters apart
        if key in written:
            raise CentellaError(
                f"transcribe: --output: expected files of different names, got "
                f"{in_line(written[key])} and {in_line(file)}: both would be {in_line(str(path))}"
            )
        written[key] = file


def _transcribe_all(transcriber: Transcriber, files: list[str], how: How) -> bool:
    """Transcribe files, of several as JSON to one document; whether all were done."""
    document = how.several and how.format == "json"
    failed = False
    for index, file in enumerate(files):
        if document:
            piece(("," if index else '{"files":[') + "\n")
        elif how.several:
            out(f"{_called(file)}:")
        error, told = _failure(transcriber, file, how)
        if error is not None:
            failed = True
            err(f"centella: {error}")
            if document and not told:
                piece(json.dumps({"file": file, "error": error}))
    if document:
        piece("\n]}\n")
    return not failed


def _failure(transcriber: Transcriber, file: str, how: How) -> tuple[str | None, bool]:
    """Transcribe a file; where that fails, why, in a line that names it.

    Also whether what was read before is written.
    """
    try:
        fault = _transcribe(transcriber, file, how)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename == STDOUT:  # which the next file would not get either
            raise
        to = f"{in_line(str(error.filename))}: " if error.filename else ""
        return f"{_called(file)}: {to}{reason(error)}", False
    except CentellaError as error:
        return _named(file, error), False
    return None if fault is None else _named(file, fault), fault is not None


def _named(file: str, error: CentellaError) -> str:
    """What an error says, with the file's name."""
    said = str(error).replace(file, _called(file)) if file else str(error)
    return said if _called(file) in said else f"{_called(file)}: {said.removeprefix(': ')}"


def _called(file: str) -> str:
    """A file as lines name it."""
    return STDIN if file == "-" else in_line(file) or "''"


def _transcribe(transcriber: Transcriber, file: str, how: How) -> AudioError | None:
    """Transcribe a file and write the text; what it breaks off with, once that is written."""
    began = time.monotonic()
    raw = how.raw if file == "-" else None
    bar = sys.stderr.isatty() and not (how.output is None and sys.stdout.isatty())
    with (
        open_audio(file, rate=how.rate, dtype=raw) as stream,
        progress("transcribed {:.0f} of {:.0f} s", bar) as tell,
    ):
        running = transcriber.stream(stream, progress=tell, **how.options)
        heard = _Counted(running)
        if how.format == "json":
            parts = _as_object(file, running, heard, how)
        elif how.format == "text" and how.options["timestamps"] != "none" and how.output is None:
            by_words = how.options["timestamps"] == "word"
            parts = _lines(by_word(heard) if by_words else heard)
        else:
            parts = _written(heard, how)
        if how.output is None:
            for part in parts:
                piece(part)
        else:
            _save(parts, _path(Path(how.output), file, how.format))
        if heard.fault is not None:
            return heard.fault
    seconds, took = running.duration, time.monotonic() - began
    language = f", {running.language}" if running.language else ""
    sought = "text" if how.options["vad"] == "off" else "speech"
    nothing = "" if heard.count else f"; no {sought} was found"
    err(f"{_called(file)}: {seconds:.1f} s{language} in {took:.1f} s, "
        f"{seconds / max(took, 1e-9):.1f} x real time{nothing}")  # fmt: skip
    return None


class _Counted(Iterator[Segment]):
    """Segments, how many there were, and what ended a file that breaks off behind some."""

    def __init__(self, segments: Iterator[Segment]) -> None:
        self._segments, self.count = segments, 0
        self.fault: AudioError | None = None

    def __next__(self) -> Segment:
        try:
            segment = next(self._segments)
        except AudioError as error:
            if not self.count:
                raise
            self.fault = error
            raise StopIteration from None
        self.count += 1
        return segment


def _written(segments: Iterator[Segment], how: How) -> Iterator[str]:
    """Segments in their format, by word where subtitles have words' times."""
    by_words = how.options["timestamps"] == "word" and how.format in ("srt", "vtt", "tsv")
    return FORMATS[how.format](by_word(segments) if by_words else segments)


def _as_object(file: str, running: Transcription, segments: _Counted, how: How) -> Iterator[str]:
    """A transcript as JSON, in one part; of a file that breaks off what was read, and the error."""
    transcript = "".join(FORMATS["json"](segments)).strip()
    about: dict[str, object] = {"file": file, "language": running.language}
    about["duration"] = round(running.duration, 3)
    if segments.fault is not None:
        about["error"] = _named(file, segments.fault)
    end = "" if how.several else "\n"  # of several files the document has it
    yield f"{json.dumps(about)[:-1]}, {transcript.removeprefix('{')}{end}"


def _lines(segments: Iterable[Segment]) -> Iterator[str]:
    """A line for each segment or word, with its times."""
    for segment in segments:
        text = " ".join(printable(segment.text).split())
        yield f"[{_clock(segment.start)} - {_clock(segment.end)}] {text}\n"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes):02}:{rest:05.2f}"


def _path(folder: Path, file: str, form: str) -> Path:
    """DIR/NAME.FORMAT."""
    name = "stdin" if file == "-" else Path(file).stem
    return folder / f"{name}.{'txt' if form == 'text' else form}"


def _save(parts: Iterable[str], path: Path) -> None:
    """Write a transcript, whole or not at all."""
    with replaced(str(path)) as target:
        for part in parts:
            target.write(part.encode())
    out(in_line(str(path)))
