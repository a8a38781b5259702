"""Answers of a language model: written as they come, with what they took."""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from centella.cli import limit
from centella.cli.output import err, err_ledger, out, out_json, piece
from centella.errors import WeightsError
from centella.ledger.counts import Ledger
from centella.tasks.generate.generator import Generation, Generator

LEAST = 3  # tokens after the first step that a rate is told for
CTRL_C = "interrupted"  # `finish` of what it ended
INSTANT = 1e-7  # seconds: a clock may not have moved between two readings


class How(Struct, frozen=True):
    """What every answer of a command has."""

    tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    sampling: dict[str, Any]
    as_json: bool
    show_ledger: bool
    logprobs: int | None = None
    pieces: bool = False  # as JSON, too
    lines: bool = False  # of JSON
    draft: Generator | str | None = None
    cache: str | None = None
    beam: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Of `generate` and `stream`."""
        return {
            "max_new_tokens": self.tokens, "stop": self.stop, "ignore_eos": self.ignore_eos,
            "logprobs": self.logprobs, "draft": self.draft, "cache": self.cache,
            **self.sampling, **({"beam": self.beam} if self.beam > 1 else {}),
        }  # fmt: skip


class Answers(Struct):
    """Continuations of one prompt, and what they took.

    Attributes:
        all: the continuations.
        seconds: of all of it.
        first_s: seconds to the first token; None where the tokens came together.
        rate: tokens a second after those of the first step, or pass over guesses; None of fewer
            than `LEAST`.
        memory: what that rate reads of the device's memory; None without a rate.
    """

    all: list[Generation]
    prompt_tokens: int
    seconds: float
    first_s: float | None = None
    rate: float | None = None
    memory: limit.Memory | None = None

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended them."""
        return any(one.finish == CTRL_C for one in self.all)

    @property
    def tokens(self) -> int:
        """Of all continuations, without those that ended them."""
        return sum(len(one.ids) for one in self.all)

    def line(self) -> str:
        """One line of numbers."""
        rate = self.tokens / max(self.seconds, INSTANT)
        first = (
            f" in {self.seconds:.2f} s ({rate:,.1f} a second with the prompt)"
            if self.first_s is None
            else f", first after {self.first_s:.2f} s"
        )
        then = "" if self.rate is None else f", then {self.rate:,.1f} tokens/s"
        if self.memory is not None:
            then += f" ({self.memory.share:.1%} of the memory's rate)"
        guessed = sum(one.guessed for one in self.all)
        right = sum(one.accepted for one in self.all)
        guesses = f", {right:,} of {guessed:,} guesses right" if guessed else ""
        read, written = _counted(self.prompt_tokens, "prompt token"), _counted(self.tokens, "token")
        return f"{read}, {written}{first}{then}{guesses}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def answered(generator: Generator, row: list[int], how: How, *, n: int = 1) -> Answers:
    """Continue a prompt; one text is written as it comes, but not for JSON.

    Ctrl-C ends the answers: of one text there is what has come, of several nothing.
    """
    try:
        generator.tokenizer  # noqa: B018  # which a folder may lack
    except WeightsError:
        return _together(generator, row, how, n)
    if n > 1 or how.beam > 1:
        return _together(generator, row, how, n)
    return _streamed(generator, row, how)


def _together(generator: Generator, row: list[int], how: How, n: int) -> Answers:
    begin = time.perf_counter()
    try:
        generations = generator.generate([row], n=n, **how.options)
    except KeyboardInterrupt:
        generations = [Generation([], None, CTRL_C, len(row))] * n
    done = Answers(generations, len(row), time.perf_counter() - begin)
    if not (how.as_json or done.interrupted):
        for i, one in enumerate(generations, 1):
            if n > 1:
                out(f"--- {i} of {n}")
            piece(",".join(map(str, one.ids)) if one.text is None else one.text)
            if i < n:
                out()
    return done


def _streamed(generator: Generator, row: list[int], how: How) -> Answers:
    times: list[float] = []
    counts: list[tuple[int, int]] = []  # of guesses, and of those accepted, at each token

    def note(_: int) -> None:
        times.append(time.perf_counter())
        counts.append((pieces.guessed, pieces.accepted))

    begin = time.perf_counter()
    pieces = generator.stream(row, on_token=note, **how.options)
    interrupted = False
    try:
        for some in pieces:
            if how.pieces:
                out_json({"piece": some}, indent=None)
            elif not how.as_json:
                piece(some)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - begin
    pieces.close()
    one = pieces.result
    assert one is not None  # it was closed
    one = replace(one, finish=CTRL_C) if interrupted else one
    done = Answers([one], len(row), seconds)
    if times:
        done.first_s = times[0] - begin
    times, first = times[: len(one.ids)], first_tokens(counts)
    if len(times) >= first + LEAST:
        done.rate = (len(times) - first) / max(times[-1] - times[0], INSTANT)
        rest = replace(
            one, ids=one.ids[first:], guessed=one.guessed - counts[0][0],
            accepted=one.accepted - counts[first - 1][1],
        )  # fmt: skip
        past = len(row) + len(one.ids) / 2
        nbytes = limit.token_bytes(generator, past, how.cache, how.draft, rest)
        done.memory = limit.memory(generator, nbytes, done.rate)
    return done


def first_tokens(counts: list[tuple[int, int]]) -> int:
    """Tokens of the first step, or of a pass: its accepted guesses, and the token behind them."""
    right = 0
    while right < len(counts) and counts[right][1] > right:
        right += 1
    return min(right + 1, len(counts))


def report(generator: Generator, done: Answers, how: How, led: Ledger | None) -> None:
    """End the answers: what they are as JSON, else the numbers, which go to standard error."""
    if how.as_json:
        out_json(_as_object(generator, done, led), None if how.lines else 2)
        return
    out()
    err(done.line())
    if led is None:
        return
    err_ledger(led)
    if done.memory is not None:
        err(done.memory.line())


def _as_object(generator: Generator, done: Answers, led: Ledger | None) -> dict[str, Any]:
    """Of one answer its text, ids and finish; of several a list."""
    each = [_one(generator, one) for one in done.all]
    return {
        **(each[0] if len(each) == 1 else {"answers": each}),
        "prompt_tokens": done.prompt_tokens, "tokens": done.tokens, "seconds": done.seconds,
        "seconds_to_first_token": done.first_s, "tokens_per_second": done.rate,
        "memory": None if done.memory is None else asdict(done.memory),
        **({} if led is None else {"ledger": led.as_dict()}),
    }  # fmt: skip


def _one(generator: Generator, one: Generation) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": one.text, "finish": one.finish, "ids": one.ids}
    if one.score is not None:
        answer["score"] = one.score
    if one.guessed:
        answer |= {"guessed": one.guessed, "accepted": one.accepted}
    if one.logprobs is None:
        return answer

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = None
        if one.text is not None:
            text = generator.tokenizer.decode([token], skip_special_tokens=False)
        return {"id": token, "text": text, "logprob": logprob}

    logprobs = [
        {**entry(t.id, t.logprob), "top": [entry(*pair) for pair in t.top.items()]}
        for t in one.logprobs
    ]
    return {**answer, "logprobs": logprobs}
