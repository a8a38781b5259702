"""Special tokens that stand in texts of users: plain text, and no tokens.

Whoever writes `<|im_end|>` in a message must not end it. Special tokens of messages, tools and
documents are marked before the chat template writes the prompt. Between the template's own special
tokens, what has a mark is encoded by a tokenizer that knows none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from centella.errors import DTypeError, ShapeError

if TYPE_CHECKING:
    import tokenizers

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # which Unicode keeps for such a use


class Special:
    """The special tokens of a tokenizer, and how to write them as text.

    Args:
        native: the tokenizer; tokens that are added but not special, such as `<think>` of most
            models, stay tokens.
    """

    def __init__(self, native: tokenizers.Tokenizer) -> None:
        self._native = native
        added = native.get_added_tokens_decoder().values()
        names = {token.content for token in added if token.special and token.content}
        self._names: str = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        # How a text may end and the next one begin, so that both are a special token together.
        self._begins = {n[:i] for n in names if not n[0].isspace() for i in range(1, len(n))}
        self._ends = {name[n:] for name in names for n in range(1, len(name) - 1)}
        self._longest = max(map(len, names), default=0)

    @cached_property
    def plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer, for which no text is a special token."""
        native = type(self._native).from_str(self._native.to_str())
        native.encode_special_tokens = True
        return native

    def stands_in(self, text: str) -> bool:
        """Whether a special token is written in a text."""
        return bool(self._names) and re.search(self._names, text) is not None

    def _split(self, text: str) -> tuple[str, int]:
        """A text's begin that ends a special token, "" for none, and where its end begins one."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        end = next((text[:n] for n in sizes if text[:n] in self._ends), "")
        return end, next((len(text) - n for n in sizes if text[-n:] in self._begins), len(text))

    def marked(self, parts: Sequence[Any]) -> tuple[Sequence[Any], str]:
        """The same with a mark within each special token, and the mark; "" where there is none.

        Raises:
            DTypeError: too many levels; ShapeError: every mark is in some text.
        """
        try:
            texts = list(_texts(parts))
            if not any(self.stands_in(t) or self._split(t) != ("", len(t)) for t in texts):
                return parts, ""
            mark = next((m for m in MARKS if not any(map(_written(m).search, texts))), None)
            if mark is None:
                raise ShapeError("chat: messages: expected text without U+FDD0 to U+FDEF")
            return [self._changed(part, mark) for part in parts], mark
        except RecursionError as error:
            raise DTypeError("chat: messages: expected fewer levels, got too many") from error

    def _changed(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            end, begin = self._split(value)
            if begin < len(value):
                value = value[: begin + 1] + mark + value[begin + 1 :]
            if end:
                value = value[0] + mark + value[1:]
            return re.sub(self._names, lambda m: m[0][0] + mark + m[0][1:], value)
        if isinstance(value, Mapping):
            return {
                self._changed(key, mark): self._changed(part, mark) for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            parts = [self._changed(part, mark) for part in value]
            return tuple(parts) if isinstance(value, tuple) else parts
        return value

    def encode(self, prompt: str, mark: str) -> list[int]:
        """Token ids of what a template made of marked messages."""
        ids: list[int] = []
        before: list[str] = []

        def flush() -> None:
            ids.extend(self._native.encode("".join(before), add_special_tokens=False).ids)
            before.clear()

        prompt = _written(mark).sub(mark, prompt)
        for part in re.split(f"((?:{self._names})(?!{mark}))", prompt):
            if mark in part:
                flush()
                text = part.replace(mark, "")
                ids += self.plain.encode(text, add_special_tokens=False).ids
            else:
                before.append(part)
        flush()
        return ids


def _written(mark: str) -> re.Pattern[str]:
    r"""A mark as a template may write it: itself, `\ufdd0` of JSON and of Python, `%EF%B7%90`.

    A string that JSON writes twice has two backslashes there.
    """
    return re.compile(rf"{mark}|(?<!\\)\\++u{ord(mark):x}|{quote(mark)}", re.IGNORECASE)


def _texts(value: Any) -> Iterator[str]:
    """All strings of some messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _texts(pair)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
