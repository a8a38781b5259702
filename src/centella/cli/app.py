"""The subcommands and their help; each module beside this one has the options of its own.

The module of a command is imported when the command runs, or its help is shown.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from centella import __version__
from centella.cli.escape import in_line, printable
from centella.cli.output import err, out
from centella.cli.process import READER_LEFT, reason
from centella.errors import CentellaError, DeviceError, DeviceLostError

SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def build() -> typer.Typer:
    """The Typer application."""
    app = typer.Typer(
        cls=Commands,
        help="Transformers on the GPU you have. Try: centella demo",
        no_args_is_help=True,
        **SETTINGS,
    )
    app.callback()(options)
    return app


# Each command, by the name of its module: its line in the list, its help, examples.
COMMANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "info": (
        "Show devices, versions and extras.",
        "Show versions, devices, the default device and why, and the installed extras.",
        ("centella info", "centella info --json", "centella info --device webgpu:0"),
    ),
    "embed": (
        "Embed texts as vectors.", "Embed texts as vectors.",
        ("centella embed 'data stays on the device' 'a cat on a mat'",
         "centella embed --file lines.txt --output vectors.npy",
         "centella embed --file lines.txt --output vectors.parquet",
         "sort names.txt | centella embed --file - --json",
         "centella embed hello --device webgpu --ledger"),
    ),
    "search": (
        "Search a file of vectors by meaning.",
        "Find the rows of a file of vectors, as embed saves them, that are nearest to a question.",
        ("centella search vectors.parquet 'how is memory freed?'",
         "centella search vectors.npy 'a cat on a mat' --file lines.txt --top 3",
         "centella search vectors.npy 'one' 'two' --json"),
    ),
    "rank": (
        "Sort texts by how well they answer a question.",
        "Sort texts by how well they answer a question, the best first.",
        ("centella rank --model models/reranker 'cats' 'they sleep' 'taxes'",
         "centella rank --model models/reranker 'a cat' --file lines.txt --top 3",
         "sort lines.txt | centella rank --model models/reranker 'cats' --file -"),
    ),
    "generate": (
        "Continue a prompt, or chat.",
        "Continue a prompt with a language model, text as it comes; or chat with it.",
        ("centella generate --model models/qwen3 'Once upon a time'",
         "centella generate --model models/qwen3 --chat",
         "centella generate --model models/qwen3 --chat --system 'Be brief.' 'Why?'",
         "centella generate --model models/qwen3 --file prompt.txt --json"),
    ),
    "transcribe": (
        "Write down what is said in audio.",
        "Write down what is said in audio files, with times, as text, subtitles or JSON.",
        ("centella transcribe talk.mp3 --model models/whisper",
         "centella transcribe *.wav --model models/whisper --format srt --output .",
         "centella transcribe a.m4a --model models/whisper --timestamps word",
         "centella transcribe a.wav --model models/whisper --vad-model silero.onnx",
         "arecord -f S16_LE -r 16000 | centella transcribe - --model models/whisper"),
    ),
    "kernels": (
        "List kernels, or print the source of one.",
        "List the library's kernels, or print the source of one (f32, a usual shape).",
        ("centella kernels", "centella kernels softmax",
         "centella kernels linear --target ptx --arch sm_90a", "centella kernels --json"),
    ),
    "check": (
        "Check what this device computes.",
        "Run test cases of every operation on a device and compare the results with float64; then "
        "measure the device's speed. Exits with 1 if a result is wrong.",
        ("centella check", "centella check --device webgpu:0 --json report.json",
         "centella check --model minilm --device webgpu",
         "centella check --model models/whisper --audio talk.wav"),
    ),
    "bench": (
        "Measure this device beside figures that trueno states.",
        "Measure on this device, in counts and times, what the Rust crates trueno and trueno-gpu "
        "claim.",
        ("centella bench floor", "centella bench floor --device webgpu --json",
         "centella bench floor --device cpu --small"),
    ),
    "demo": (
        "Search text files by meaning.",
        "Search text files by meaning: yours, or centella's own documentation.",
        ("centella demo", "centella demo 'how is memory freed?'",
         "centella demo 'where do we parse dates?' --over src/",
         "centella demo 'how is memory freed?' --json"),
    ),
}  # fmt: skip


WORDS = "centella.words"  # of the command line, in its context


class _Loaded(dict[str, Any]):
    """Commands by their names, each built of its module when it is looked up first."""

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        if name in self and super().get(name) is None:
            self[name] = _command(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.get(name)


def _command(name: str) -> Any:
    short, what, examples = COMMANDS[name]
    # The backspace tells click to keep the lines that follow.
    lines = [what, "", "\b", "Examples:", *(f"  {line}" for line in examples)]
    alone = typer.Typer(add_completion=False, **SETTINGS)
    run = import_module(f"centella.cli.{name}").run
    alone.command(name, short_help=short, help="\n".join(lines))(run)
    return typer.main.get_command(alone)


class Commands(TyperGroup):
    """Prints an error of the library, of a file or of a text in one line; --debug raises it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = _Loaded(dict.fromkeys(COMMANDS))

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the options before a subcommand."""
        with _printable_errors():
            return super().make_context(*args, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`centella info --debug` is `centella --debug info`."""
        end = args.index("--") if "--" in args else len(args)
        if "--debug" in args[:end]:
            args = ["--debug", *(a for a in args[:end] if a != "--debug"), *args[end:]]
        ctx.meta[WORDS] = [word for arg in args for word in (arg, _value(arg))]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            with _printable_errors():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(READER_LEFT) from None
        except (CentellaError, OSError, UnicodeError) as error:
            if ctx.params.get("debug"):
                raise
            err(f"centella: {_said(error, ctx.meta[WORDS])}")
            raise typer.Exit(1) from None


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Typer prints its own errors, which quote the command line."""
    try:
        yield
    except Exception as error:
        message, context = getattr(error, "message", None), getattr(error, "ctx", None)
        if isinstance(message, str) and (context is None or message != context.get_help()):
            hint = _hint(message, context)
            vars(error)["message"] = in_line(message) + hint
            if hint:
                vars(error)["possibilities"] = None  # names that only look like it
        raise


# What to write for commands and options that other tools have.
_OTHERS = {
    "chat": "write centella generate --chat --model DIR",
    "devices": "write centella info",
    "--prompt": "write the text alone: centella generate --model DIR 'Once upon'",
    "--input": "write --file",
    "--cuda": "write --device cuda",
    "--gpu": "write --device cuda or --device webgpu",
    "--cpu": "write --device cpu",
    "--device": "the text of a kernel is for any device: write --target wgsl, ptx or ir",
    "--devices": "one device runs it: write --device",
}


def _hint(message: str, context: Any) -> str:
    """What to add to an error of Typer's."""
    if missing := re.match(r"No such (?:command|option):? '?([-\w]+)", message):
        name, command = missing[1], getattr(context, "command", None)
        options = {option for p in getattr(command, "params", ()) for option in p.opts}
        elsewhere = (name == "--input" and "--file" not in options) or (
            name == "--prompt" and getattr(command, "name", None) != "generate"
        )
        return f" ({_OTHERS[name]})" if name in _OTHERS and not elsewhere else ""
    others = re.search(r"unexpected extra argument\S* \((.*)\)", message, re.DOTALL)
    params = {} if context is None else context.params
    first = params.get("question", params.get("prompt"))
    if others is None or first is None:  # words without quotes are an argument each
        return ""
    return f"; quote a text of several words: {in_line(shlex.quote(f'{first} {others[1]}'))}"


def _value(argument: str) -> str:
    """What an option is given in one word, as in --model=DIR."""
    return argument.partition("=")[2] if argument.startswith("--") else ""


def _said(error: CentellaError | OSError | UnicodeError, words: Iterable[str]) -> str:
    """An error in a line; Python's own `[Errno 2] ...: 'file'` as file and reason.

    Args:
        words: of the command line, whose names may have several lines.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return f"{in_line(str(error.filename))}: {reason(error)}"
    text = str(error) or type(error).__name__
    for word in words:
        if "\n" in word:
            text = text.replace(word, in_line(word))
    first, *more = text.split("\n")
    opening = isinstance(error, DeviceError) and not isinstance(error, DeviceLostError)
    if opening and not first.startswith("load: "):
        first += "; centella info lists the devices of this machine"
    return f"{first} (all of it: --debug)" if more else first


class _Printable(logging.Formatter):
    """Lines of the log, which name files and devices."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as text."""
        return printable(super().format(record))


def _show_version(wanted: bool) -> None:
    if wanted:
        out(f"centella {__version__}")
        raise typer.Exit


def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the library's log, and tracebacks.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """What stands before a subcommand."""
    if debug:
        logging.basicConfig(level=logging.WARNING)
        for handler in logging.getLogger().handlers:
            handler.setFormatter(_Printable(logging.BASIC_FORMAT))
        logging.getLogger("centella").setLevel(logging.DEBUG)
