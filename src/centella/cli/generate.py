"""`centella generate`: a prompt to text as it comes, or a chat."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from centella.cli.answers import How, answered, report
from centella.cli.chat import Talk
from centella.cli.escape import in_line
from centella.cli.loading import load_shown
from centella.cli.options import Device, Dtype, Folder, Json, Quantize, ShowLedger, Trace
from centella.cli.output import err
from centella.cli.process import INTERRUPTED
from centella.cli.reading import NotTextError, decode, read_text
from centella.errors import CentellaError
from centella.host.files import expect_writable
from centella.ledger.counts import ledger
from centella.tasks.generate.beam_settings import BeamSettings, refuse_beside_beams
from centella.tasks.generate.generator import Generator
from centella.tasks.generate.logprobs import checked
from centella.tasks.generate.prompts import check_variables, continuations
from centella.tasks.generate.sampling import Sampling
from centella.tasks.generate.speculation import LOOKUP

DRAWING = ("seed", "top_k", "top_p", "min_p")  # settings that only a temperature gives a meaning


class CacheType(StrEnum):
    """Storage of keys and values."""

    i8 = "i8"


Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The text to continue; - for stdin.")
]
File = Annotated[
    str | None, typer.Option(metavar="F", help="Read the prompt from a file; - for stdin.")
]
TokenIds = Annotated[
    str | None, typer.Option("--ids", metavar="N,N,..", help="Token ids as the prompt.")
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Use the chat template; without PROMPT: start a chat.")
]
System = Annotated[str | None, typer.Option(metavar="S", help="The system message.")]
MaxTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens of the answer.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="S", help="End before this text.")]
Temperature = Annotated[
    float | None,
    typer.Option(metavar="T", help="How freely tokens are drawn; 0: the most likely one is taken."),
]
TopK = Annotated[
    int | None,
    typer.Option(metavar="K", help="With --temperature: draw from the K most likely tokens."),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="With --temperature: from the likeliest that make up probability P."
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="With --temperature: from tokens at least P times as likely as the top one.",
    ),
]
Penalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="R",
        help="Above 1: makes tokens of the text so far less likely.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", help="With --temperature: equal seeds give equal texts."),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="K", help="With --json: log-probabilities of tokens and of K alternatives."
    ),
]
DraftBy = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="D",
        help="Guess tokens ahead, with equal results: lookup, or a smaller model.",
    ),
]
CacheIn = Annotated[
    CacheType | None,
    typer.Option("--cache", metavar="i8", help="Keys and values in 8 bits: half the memory."),
]
AsPieces = Annotated[bool, typer.Option("--stream", help="With --json: a line for each piece.")]
Template = Annotated[
    str | None, typer.Option(metavar="JSON", help="With --chat: variables of the chat template.")
]
Frequency = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty",
        metavar="R",
        help="Taken from a token's logit for each use in the answer.",
    ),
]
Presence = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty",
        metavar="R",
        help="Taken once from the logits of tokens in the answer.",
    ),
]
Several = Annotated[
    int,
    typer.Option("--n", min=1, metavar="N", help="Answers; equal without --temperature or --beam."),
]
Beam = Annotated[int, typer.Option(min=1, metavar="N", help="Beam search: N texts side by side.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Continue after end tokens.")]


def run(
    prompt: Prompt = None,
    model: Folder = "",
    file: File = None,
    ids: TokenIds = None,
    chat: Chat = False,
    system: System = None,
    max_tokens: MaxTokens = 256,
    stop: Stop = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    frequency_penalty: Frequency = None,
    presence_penalty: Presence = None,
    n: Several = 1,
    beam: Beam = 1,
    ignore_eos: IgnoreEos = False,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    draft: DraftBy = None,
    cache: CacheIn = None,
    logprobs: Logprobs = None,
    template: Template = None,
    as_json: Json = False,
    stream: AsPieces = False,
    show_ledger: ShowLedger = False,
    trace: Trace = None,
) -> None:
    """Continue a prompt, or chat.

    Raises:
        CentellaError: no prompt, two of them, a model that does not generate, or what loading and
            generating raise.
        OSError: for a file that cannot be read.
    """
    if not model:
        raise CentellaError(
            "generate: --model DIR: expected a model folder, a .gguf file or a repository, as "
            "Qwen/Qwen3-0.6B"
        )
    _check_together(
        sum(source is not None for source in (prompt, file, ids)),
        ids is not None,
        chat,
        as_json,
        {"logprobs": logprobs, "stream": stream or None, "template": template, "system": system},
    )
    file = "-" if prompt == "-" else file
    text = prompt if file is None else _read(file)
    if file is not None and not text:
        raise CentellaError(f"generate: --file {in_line(file)}: expected a prompt, got no text")
    if trace is not None:
        expect_writable(trace)  # before the work is done
    talk = chat and text is None
    alone = "in a chat without PROMPT" if talk else "with --stream" if stream else ""
    for name, value in (("n", n), ("beam", beam)):
        if alone and value > 1:
            raise CentellaError(f"generate: --{name}: expected 1 {alone}, got {value}")
    sampling = _checked({
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty, "seed": seed,
    })  # fmt: skip
    continuations("generate", n)
    _check_beams(beam, n, sampling, draft)
    alternatives, variables = _alternatives(logprobs), _variables(template)
    if "" in (stop or ()):
        raise CentellaError("generate: --stop: expected a text that is not empty, got none")
    if text is None and ids is None and not chat:
        text = _piped()
    generator = _loaded(model, device, dtype, quantize)
    guesser = draft if draft in (None, LOOKUP) else _draft(draft, device, dtype, quantize)
    if beam == 1 and not generator.config.sampling.with_("generate", sampling).temperature:
        _tell_unused([name for name in DRAWING if name in sampling], n)
    how = How(max_tokens, tuple(stop or ()), ignore_eos, sampling, as_json, show_ledger,
              alternatives, stream, stream or talk, guesser,
              cache and cache.value, beam)  # fmt: skip
    first = [] if system is None else [{"role": "system", "content": system}]
    with ledger(timing=True) if trace is not None else nullcontext() as timed:
        if talk:
            Talk(generator, first, how, variables).run()
            interrupted = False
        else:
            interrupted = _once(generator, how, n, text, ids, first if chat else None, variables)
    if timed is not None and trace is not None:
        timed.trace(trace)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _tell_unused(names: list[str], n: int) -> None:
    """Say which options change nothing without a temperature, and that several texts are equal."""
    options = [f"--{name.replace('_', '-')}" for name in names]
    listed = " and ".join(filter(None, [", ".join(options[:-1]), *options[-1:]]))
    unused = f"{listed} {'changes' if len(options) == 1 else 'change'} nothing" if options else ""
    equal = "--n gives equal texts" if n > 1 else ""
    if told := " and ".join(filter(None, [unused, equal])):
        err(f"generate: {told} while the likeliest token is taken: add --temperature T")


def _check_together(
    prompts: int, ids: bool, chat: bool, as_json: bool, options: Mapping[str, object]
) -> None:
    """Refuse options that do not go together."""
    if prompts > 1:
        raise CentellaError("generate: give one of PROMPT, --file and --ids")
    if ids and (chat or options["system"] is not None):
        raise CentellaError(
            "generate: --ids is a whole prompt: give it without --chat and --system"
        )
    for name, value in options.items():
        other = "json" if name in ("logprobs", "stream") else "chat"
        if value is not None and not (as_json if other == "json" else chat):
            raise CentellaError(f"generate: --{name}: expected --{other} with it, got none")


def _check_beams(beam: int, n: int, sampling: Mapping[str, Any], draft: str | None) -> None:
    """Refuse what does not go with beams, by the names of options."""
    try:
        beams = BeamSettings.of("generate", beam, 1.0, False, n)
        if beams is not None:
            refuse_beside_beams("generate", beams, sampling, draft, 0)
    except CentellaError as error:
        name, why = str(error).removeprefix("generate: ").split(": ", 1)
        option = f"--{name.replace('_', '-')}"
        if why.startswith("expected None"):
            raise CentellaError(f"generate: expected no {option} with --beam") from error
        raise CentellaError(f"generate: {option}: {why}") from error


def _loaded(model: str, device: str | None, dtype: str, quantize: str | None) -> Generator:
    """A model that generates; another is refused before its weights are read."""
    generator: Generator = load_shown(model, device, dtype, quantize, task="generate")
    return generator


def _draft(model: str, device: str | None, dtype: str, quantize: str | None) -> Generator:
    """The model that guesses; errors name its option."""
    try:
        return _loaded(model, device, dtype, quantize)
    except CentellaError as error:
        raise CentellaError(f"generate: --draft: {error}") from error


def _once(
    generator: Generator, how: How, n: int, text: str | None, ids: str | None,
    first: list[dict[str, str]] | None, variables: Mapping[str, Any],
) -> bool:  # fmt: skip
    """Continue one prompt; one with messages before it in the chat format.

    Returns:
        Whether Ctrl-C ended it.
    """
    with ledger() as led:
        if first is not None:
            messages = [*first, {"role": "user", "content": text or ""}]
            row = generator.encode_chat(messages, **variables)
        else:
            row = _row(generator, text, ids)
        done = answered(generator, row, how, n=n)
    report(generator, done, how, led if how.show_ledger else None)
    if not how.as_json and any(one.finish == "context" for one in done.all):
        err(f"generate: the context of {generator.context:,} tokens is full: the text ends here")
    return done.interrupted


def _variables(template: str | None) -> dict[str, Any]:
    """What --template gives."""
    try:
        variables = json.loads(template or "{}")
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise CentellaError(
            f"generate: --template: expected an object of JSON, got {in_line(template or '')}"
        )
    check_variables("generate: --template", variables)
    return variables


def _alternatives(logprobs: int | None) -> int | None:
    try:
        return checked("generate", logprobs)
    except CentellaError as error:
        why = str(error).removeprefix("generate: logprobs: ")
        raise CentellaError(f"generate: --logprobs: {why}") from error


def _checked(asked: Mapping[str, float | None]) -> dict[str, Any]:
    """The settings that were given, of which none is out of its range."""
    settings = {name: value for name, value in asked.items() if value is not None}
    for name, value in settings.items():
        try:
            Sampling().with_("generate", {name: value})
        except CentellaError as error:
            option = name.replace("_", "-")
            why = str(error).removeprefix(f"generate: {name}: ")
            raise CentellaError(f"generate: --{option}: {why}") from error
    return settings


def _row(generator: Generator, text: str | None, ids: str | None) -> list[int]:
    """The tokens of the prompt."""
    try:
        row = (text or "") if ids is None else json.loads(f"[{ids}]")
    except ValueError as error:
        raise CentellaError(
            f"generate: --ids: expected N,N,.., got {in_line(ids or '')}"
        ) from error
    try:
        return generator.encode(row)
    except CentellaError as error:
        origin = "PROMPT" if ids is None else "--ids"
        why = str(error).removeprefix("encode: ")
        raise CentellaError(f"generate: {origin}: {why}") from error


def _piped() -> str:
    """The prompt that standard input brings where it is no terminal."""
    text = ""
    if not sys.stdin.isatty():
        with suppress(OSError):  # closed
            text = _read("-")
    if not text:
        raise CentellaError("generate: no prompt; try: centella generate --model DIR 'Once upon'")
    return text


def _read(file: str) -> str:
    try:
        if file == "-":
            return decode(sys.stdin.buffer.read())
        return read_text(Path(file), pipes=True)
    except NotTextError as error:
        raise CentellaError(f"generate: --file {in_line(file)}: {error}") from error
