"""What is no text is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from centella.errors import DTypeError, ShapeError


def checked_texts(texts: Sequence[str], name: str = "encode: texts[{}]") -> list[str]:
    """The texts as a list of str that UTF-8 can hold; `name` is that of one, for errors."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
        raise DTypeError(f"encode: expected a sequence of str, got {type(texts).__name__}")
    every = list(texts)
    try:
        plain = all(map(str.isascii, every))  # many at once, since others wait
    except TypeError:
        plain = False
    for i, text in enumerate(() if plain else every):
        if type(text) is not str or not text.isascii():
            check_text(name.format(i), text)
    return every


def check_text(name: str, text: Any) -> None:
    """Refuse what is no text that UTF-8 can hold; `name` is the argument's, for errors.

    Raises:
        DTypeError: what is no `str`; ShapeError: a text with a lone surrogate.
    """
    if not isinstance(text, str):
        raise DTypeError(f"{name}: expected str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ShapeError(
            f"{name}: expected valid Unicode, got a lone surrogate "
            f"{error.object[error.start]!r} at {error.start}"
        ) from error
