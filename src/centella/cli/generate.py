"""`centella generate`: a prompt to text as it comes, or a chat."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Struct

from centella.cli.embed import Dtype, ShowLedger, WeightDtype
from centella.cli.options import Device, Json
from centella.cli.output import err, in_line, out, out_json, piece
from centella.cli.reading import NotTextError, decode, read_text
from centella.errors import CentellaError
from centella.ledger.counts import Ledger, ledger
from centella.tasks.generate import Generator
from centella.tasks.load import load

Model = Annotated[
    str, typer.Option(metavar="DIR", help="A model folder, or a repository of huggingface.co.")
]
Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help="The text to continue.")]
File = Annotated[str | None, typer.Option(metavar="F", help="Read the prompt here; - for stdin.")]
TokenIds = Annotated[
    str | None, typer.Option("--ids", metavar="N,N,..", help="Token ids in place of a text.")
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Answer in the model's chat format; without PROMPT: a chat.")
]
System = Annotated[str | None, typer.Option(metavar="S", help="What the model is told first.")]
MaxTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens of the answer.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="S", help="End where this would come.")]
Temperature = Annotated[float | None, typer.Option(metavar="T", help="0: the most likely token.")]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Keep the K most likely tokens.")]
TopP = Annotated[float | None, typer.Option(metavar="P", help="Keep tokens up to probability P.")]
MinP = Annotated[
    float | None, typer.Option(metavar="P", help="Least part of the likeliest's probability.")
]
Penalty = Annotated[
    float | None, typer.Option("--repetition-penalty", metavar="R", help="Of tokens seen before.")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Equal seeds give equal texts.")]
Quantize = Annotated[
    str | None, typer.Option(metavar="Q", help="Quantise weights at load: q8_0 or q4_0.")
]
ASK = "> "
RESET, LEAVE = "/reset", "/exit"


class How(Struct, frozen=True):
    """What every answer of a command has."""

    tokens: int
    stop: tuple[str, ...]
    sampling: dict[str, Any]
    show_ledger: bool


class Run(Struct):
    """What one answer took."""

    text: str
    tokens: int
    prompt_tokens: int
    first_s: float
    rest_s: float

    @property
    def rate(self) -> float:
        """Tokens a second, after the first."""
        return (self.tokens - 1) / self.rest_s if self.tokens > 1 and self.rest_s > 0 else 0.0

    def line(self) -> str:
        """One line of numbers."""
        return (
            f"{self.prompt_tokens:,} prompt tokens, {self.tokens:,} tokens, first after "
            f"{self.first_s:.2f} s, then {self.rate:,.1f} tokens/s"
        )


def run(
    prompt: Prompt = None,
    model: Model = "",
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
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = WeightDtype.auto,
    quantize: Quantize = None,
    as_json: Json = False,
    show_ledger: ShowLedger = False,
) -> None:
    """Continue a prompt, or chat.

    Raises:
        CentellaError: no prompt, two of them, a model that does not generate, or what loading and
            generating raise.
        OSError: for a file that cannot be read.
    """
    if not model:
        raise CentellaError("generate: --model DIR: expected a model folder or a repository")
    if sum(given is not None for given in (prompt, file, ids)) > 1:
        raise CentellaError("generate: give one of PROMPT, --file and --ids")
    text = prompt if file is None else _read(file)
    if text is None and ids is None and not chat:
        raise CentellaError("generate: no prompt; try: centella generate --model DIR 'Once upon'")
    if ids is not None and (chat or system is not None):
        raise CentellaError(
            "generate: --ids is a whole prompt: give it without --chat and --system"
        )
    generator = load(model, device, dtype.value, quantize=quantize)
    if not isinstance(generator, Generator):
        raise CentellaError(
            f"generate: {in_line(model)}: expected a model that generates text, got one that "
            f"embeds it; centella embed --model {in_line(model)}"
        )
    asked = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    how = How(
        max_tokens, tuple(stop or ()), {k: v for k, v in asked.items() if v is not None},
        show_ledger,
    )  # fmt: skip
    first = [] if system is None else [{"role": "system", "content": system}]
    if chat and text is None:
        Talk(generator, first, how).run()
        return
    with ledger() as led:
        if chat or system is not None:
            row = generator.encode_chat([*first, {"role": "user", "content": text or ""}])
        else:
            row = _row(generator, text, ids)
        done = _answer(generator, row, how, quiet=as_json)
    if as_json:
        out_json({
            "text": done.text, "prompt_tokens": done.prompt_tokens, "tokens": done.tokens,
            "seconds_to_first_token": done.first_s, "tokens_per_second": done.rate,
            **({"ledger": str(led)} if show_ledger else {}),
        })  # fmt: skip
        return
    out()
    err(done.line())
    _show(led if show_ledger else None)


class Talk:
    """A conversation on a terminal; Ctrl-C ends the answer, and at the prompt the chat."""

    def __init__(self, generator: Generator, first: list[dict[str, str]], how: How) -> None:
        self._generator, self._first, self._how = generator, first, how

    def run(self) -> None:
        """Ask and answer until the input ends."""
        with suppress(ImportError):
            import readline  # noqa: F401  # lines are edited, and come back with the arrow
        err(f"chat: Ctrl-C stops an answer, {RESET} begins anew, {LEAVE} or Ctrl-D leaves")
        messages = list(self._first)
        for said in self._lines():
            if said == RESET:
                messages = list(self._first)
                continue
            messages.append({"role": "user", "content": said})
            row = self._generator.encode_chat(messages)
            with ledger() as led:
                done = _answer(self._generator, row, self._how, interruptible=True)
            out()
            err(done.line())
            _show(led if self._how.show_ledger else None)
            messages.append({"role": "assistant", "content": done.text})

    def _lines(self) -> Iterator[str]:
        """What the user says, until the end."""
        while True:
            try:
                said = input(ASK if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            if said == LEAVE:
                return
            if said:
                yield said


def _answer(
    generator: Generator, row: list[int], how: How, *, quiet: bool = False,
    interruptible: bool = False,
) -> Run:  # fmt: skip
    """Stream an answer to standard output; what it took."""
    generator.tokenizer  # noqa: B018  # raises now where there is none
    done = Run("", 0, len(row), 0.0, 0.0)
    begin = first = time.perf_counter()
    pieces = generator.stream(
        row, max_new_tokens=how.tokens, stop=how.stop, on_token=lambda _: count(), **how.sampling
    )

    def count() -> None:
        nonlocal first
        done.tokens += 1
        if done.tokens == 1:
            first = time.perf_counter()
            done.first_s = first - begin

    try:
        for some in pieces:
            done.text += some
            if not quiet:
                piece(some)
    except KeyboardInterrupt:
        if not interruptible:
            raise
    done.rest_s = time.perf_counter() - first
    return done


def _row(generator: Generator, text: str | None, ids: str | None) -> list[int]:
    """The tokens of the prompt."""
    if ids is None:
        return generator.encode(text or "")
    try:
        row = json.loads(f"[{ids}]")
    except ValueError as error:
        raise CentellaError(f"generate: --ids: expected N,N,.., got {in_line(ids)}") from error
    return generator.encode(row)


def _read(file: str) -> str:
    try:
        if file == "-":
            return decode(sys.stdin.buffer.read())
        return read_text(Path(file), pipes=True)
    except NotTextError as error:
        raise CentellaError(f"generate: --file {in_line(file)}: {error}") from error


def _show(led: Ledger | Any) -> None:
    if led is not None:
        err(f"ledger: {led}")
