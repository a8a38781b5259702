"""Tokens to text as they come: whole characters, up to a stop token or string."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

Ids = list[int]


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

    Attributes:
        ids: the tokens, without the one that ended it.
        finish: "stop" or "length" once it has ended.
    """

    def __init__(self, decode: Callable[[Ids], str] | None, stops: Stops) -> None:
        self.ids: Ids = []
        self.finish = ""
        self._stops = stops
        self._text = ""
        self._told = 0  # characters that were given
        self._decode = decode
        # A token's text can depend on the one before it: both are decoded, from `_from` on.
        self._from: int = 0
        self._read: int = 0
        self._before: str = ""

    def add(self, token: int) -> str:
        """The characters that one token more completes."""
        if self.finish:
            return ""
        if token in self._stops.ids:
            self.finish = "stop"
            return self.rest()
        self.ids.append(token)
        if len(self.ids) >= self._stops.tokens:
            self.finish = "length"
        if self._decode is not None and self._decoded(self._decode, bool(self.finish)):
            self.finish = "stop"
        return self.rest() if self.finish else self._given(self._certain())

    def _decoded(self, decode: Callable[[Ids], str], last: bool) -> bool:
        """Add what the tokens read so far complete; whether a stop string has come."""
        both = decode(self.ids[self._from :])
        if both.endswith("\ufffd") and not last:  # a character of several tokens
            return False
        self._text += both[len(self._before) :]
        self._from, self._read = self._read, len(self.ids)
        self._before = decode(self.ids[self._from :])
        places = [i for s in self._stops.texts if (i := self._text.find(s)) >= 0]
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

    def _given(self, end: int) -> str:
        piece = self._text[self._told : end]
        self._told = max(self._told, end)
        return piece

    def rest(self) -> str:
        """What has not been given yet."""
        return self._given(len(self._text))

    def whole(self) -> str | None:
        """All of it; None without a tokenizer."""
        return None if self._decode is None else self._text
