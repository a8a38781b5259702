"""Answers of a language model: written as they come, with what they took."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from msgspec import Struct

from centella.cli.output import err, out, piece
from centella.errors import WeightsError
from centella.ledger.counts import Ledger
from centella.tasks.generate import Generation, Generator
from centella.tasks.pieces import Stops, Text

LEAST = 3  # tokens that a rate is told for


class How(Struct, frozen=True):
    """What every answer of a command has."""

    tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    sampling: dict[str, Any]
    as_json: bool
    show_ledger: bool


class Answers(Struct):
    """Continuations of one prompt, and what they took.

    Attributes:
        all: the continuations.
        seconds: of all of it.
        first_s: seconds to the first token; None where the tokens came together.
        rate: tokens a second after the first; None of fewer than `LEAST`.
    """

    all: list[Generation]
    prompt_tokens: int
    seconds: float
    first_s: float | None = None
    rate: float | None = None

    @property
    def tokens(self) -> int:
        """Of all continuations, without those that ended them."""
        return sum(len(one.ids) for one in self.all)

    def line(self) -> str:
        """One line of numbers."""
        first = (
            f" in {self.seconds:.2f} s" if self.first_s is None
            else f", first after {self.first_s:.2f} s"
        )  # fmt: skip
        then = "" if self.rate is None else f", then {self.rate:,.1f} tokens/s"
        return f"{self.prompt_tokens:,} prompt tokens, {self.tokens:,} tokens{first}{then}"


def answered(
    generator: Generator, row: list[int], how: How, *, n: int = 1, interruptible: bool = False
) -> Answers:
    """Continue a prompt; one text is written as it comes, but not for JSON."""
    try:
        generator.tokenizer  # noqa: B018  # which a folder may lack
    except WeightsError:
        return _together(generator, row, how, n)
    if n > 1:
        return _together(generator, row, how, n)
    return _streamed(generator, row, how, interruptible)


def _together(generator: Generator, row: list[int], how: How, n: int) -> Answers:
    begin = time.perf_counter()
    made = generator.generate(
        [row], max_new_tokens=how.tokens, stop=how.stop, ignore_eos=how.ignore_eos, n=n,
        **how.sampling,
    )  # fmt: skip
    done = Answers(made, len(row), time.perf_counter() - begin)
    if not how.as_json:
        for i, one in enumerate(made, 1):
            if n > 1:
                out(f"--- {i} of {n}")
            piece(",".join(map(str, one.ids)) if one.text is None else one.text)
            if i < n:
                out()
    return done


def _streamed(generator: Generator, row: list[int], how: How, interruptible: bool) -> Answers:
    ends = frozenset[int]() if how.ignore_eos else generator.config.stop_ids
    decode = partial(generator.tokenizer.native.decode, skip_special_tokens=True)
    read = Text(decode, Stops(ends, how.stop, how.tokens))  # which says how it ended
    times: list[float] = []
    text, finish = "", "context"

    def count(token: int) -> None:
        times.append(time.perf_counter())
        read.add(token)

    begin = time.perf_counter()
    pieces = generator.stream(
        row, max_new_tokens=how.tokens, stop=how.stop, ignore_eos=how.ignore_eos, on_token=count,
        **how.sampling,
    )  # fmt: skip
    try:
        for some in pieces:
            text += some
            if not how.as_json:
                piece(some)
    except KeyboardInterrupt:
        if not interruptible:
            raise
        finish = "interrupted"
    one = Generation(read.ids, text, read.finish or finish, len(row))
    done = Answers([one], len(row), time.perf_counter() - begin)
    if times:
        done.first_s = times[0] - begin
    if len(times) >= LEAST:
        done.rate = (len(times) - 1) / max(times[-1] - times[0], sys.float_info.epsilon)
    return done


def as_json_object(done: Answers, led: Ledger | None) -> dict[str, Any]:
    """What is printed as JSON: of one answer its text, ids and finish; of several a list."""
    each = [{"text": one.text, "finish": one.finish, "ids": one.ids} for one in done.all]
    return {
        **(each[0] if len(each) == 1 else {"answers": each}),
        "prompt_tokens": done.prompt_tokens, "tokens": done.tokens, "seconds": done.seconds,
        "seconds_to_first_token": done.first_s, "tokens_per_second": done.rate,
        **({} if led is None else {"ledger": str(led)}),
    }  # fmt: skip


def show(done: Answers, led: Ledger | None) -> None:
    """End the text that was written; the numbers go to standard error."""
    out()
    err(done.line())
    if led is not None:
        err(f"ledger: {led}")
