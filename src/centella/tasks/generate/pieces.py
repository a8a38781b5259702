"""Tokens to text as they come: whole characters, up to a stop token or string."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from msgspec import Struct

from centella.tasks.generate.logprobs import TokenLogprobs

Ids = list[int]
PARTS = 4  # tokens of one character at most: a byte each


class Generation(Struct, frozen=True):
    """The continuation of a prompt.

    Attributes:
        ids: the tokens, without the end token; those of a stop string, which `text` does not have,
            are among them.
        text: the tokens as text; None for a model without a tokenizer.
        finish: "stop" (a stop token or string), "length" (`max_new_tokens`), "context" (the
            longest sequence of the batch has no more positions), or "closed" (a stream that was
            closed, or failed, before its end).
        prompt_tokens: tokens of the prompt.
        logprobs: the log-probabilities of each of `ids`; None unless `logprobs=` was given.
        guessed: number of tokens that `draft=` guessed, all 7 of each pass: also those behind a
            wrong one, or behind the end of the text.
        accepted: how many of `ids` were guessed right.
        score: of beam search: log-probabilities, the end token's included, added up, over the
            number of tokens to the power of `length_penalty`; None without beams.
    """

    ids: Ids
    text: str | None
    finish: str
    prompt_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    guessed: int = 0
    accepted: int = 0
    score: float | None = None


class Tally(Struct):
    """Tokens that were guessed, and those of them that the model chose itself.

    A pass is counted before its tokens come: its right guesses, then one that was not guessed.
    """

    guessed: int = 0
    accepted: int = 0


class Stops(Struct, frozen=True):
    """When a sequence ends.

    Attributes:
        ids: tokens that end it, and are not part of it.
        texts: strings that end it, and are not part of it.
        tokens: most tokens.
    """

    ids: frozenset[int]
    texts: tuple[str, ...]
    tokens: int


class Text:
    """The tokens of a sequence as they come, and their text, whole characters at a time.

    Args:
        decode: ids to text; None: there is no text.
        stops: when it ends.
        logprobs: whether `add` is given those of the tokens.

    Attributes:
        ids: the tokens, without the one that ended it.
        logprobs: of each of `ids`; None: they are not given.
        finish: "stop", "length" or what `end` was told, once it has ended.
        tally: of guesses.
        accepted: how many of `ids` were guessed right.
    """

    def __init__(
        self, decode: Callable[[Ids], str] | None, stops: Stops, logprobs: bool = False
    ) -> None:
        self.ids: Ids = []
        self.logprobs: list[TokenLogprobs] | None = [] if logprobs else None
        self.finish: str = ""
        self.tally: Tally = Tally()
        self.accepted: int = 0
        self._stops = stops
        self._text = ""
        self._told = 0  # characters that were given
        self._decode = decode
        self._longest = max(map(len, stops.texts), default=1)
        # A token's text can depend on the one before it: both are decoded, from `_from` on.
        self._from: int = 0
        self._read: int = 0
        self._before: str = ""

    def fork(self) -> Text:
        """Another that goes on from here."""
        other = copy(self)
        other.ids = list(self.ids)
        other.logprobs = None if self.logprobs is None else list(self.logprobs)
        return other

    def add(self, token: int, logprobs: TokenLogprobs | None = None) -> str:
        """The characters that one token more completes."""
        if self.finish:
            return ""
        if token in self._stops.ids:
            return self.end("stop")
        self.ids.append(token)
        self.accepted = min(self.accepted + 1, self.tally.accepted)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        if len(self.ids) >= self._stops.tokens:
            return self.end("length")
        if self._commit(last=False):
            self.finish = "stop"
            return self._release(len(self._text))
        return self._release(self._certain())

    def end(self, finish: str) -> str:
        """What has not been given yet: the sequence ends, unless it has."""
        if not self.finish:
            self.finish = "stop" if self._commit(last=True) else finish
        return self._release(len(self._text))

    def _commit(self, last: bool) -> bool:
        """Add the text of tokens that later ones do not change; whether a stop string has come."""
        read = len(self.ids)
        if self._decode is None or read == self._read:
            return False
        both = self._decode(self.ids[self._from :])
        if both.endswith("\ufffd") and not last:  # perhaps a part of a character
            if read - self._read < PARTS:
                return False
            read = self._read + 1  # more than a character has: the first is no part of one
            first = self._decode(self.ids[self._from : read])
            if both.startswith(first):
                both = first
            else:
                read = len(self.ids)
        begin = max(0, len(self._text) - self._longest + 1)
        self._text += both[len(self._before) :]
        self._from, self._read = self._read, read
        self._before = self._decode(self.ids[self._from : read])
        places = [i for s in self._stops.texts if (i := self._text.find(s, begin)) >= 0]
        if places:
            self._text = self._text[: min(places)]
        return bool(places)

    def _certain(self) -> int:
        """Characters that cannot be the begin of a stop string."""
        text, end = self._text, len(self._text)
        for stop in self._stops.texts:
            begun = [n for n in range(1, len(stop)) if text.endswith(stop[:n])]
            end = min(end, len(text) - max(begun, default=0))
        return end

    def _release(self, end: int) -> str:
        piece = self._text[self._told : end]
        self._told = max(self._told, end)
        return piece

    def whole(self) -> str | None:
        """All of it; None without a tokenizer."""
        return None if self._decode is None else self._text

    def generation(self, prompt_tokens: int) -> Generation:
        """It, as users get it."""
        return Generation(self.ids, self.whole(), self.finish, prompt_tokens, self.logprobs,
                          self.tally.guessed, self.accepted)  # fmt: skip
