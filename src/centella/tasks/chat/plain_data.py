"""What a template is given: text, numbers, True, False, None, and lists and mappings of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from centella.errors import DTypeError
from centella.weights.model_files import show

_PLAIN = (str, int, float, bool, type(None))
_NUMBERS = ((bool, np.bool_), (int, int | np.integer), (float, float | np.floating))


def plain_data(name: str, value: Any) -> Any:
    """A copy, of Python's own types: all that it could print is in its strings.

    Args:
        name: of the value, for errors.
        value: what is to be copied; numbers, strings and arrays of NumPy become Python's.

    Raises:
        DTypeError: a part of another type, such as a set or a function; or too many levels.
    """
    try:
        return _plain(name, value)
    except RecursionError as error:
        raise DTypeError(f"{name}: expected fewer levels, got too many") from error


def _plain(name: str, value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    for own, kinds in _NUMBERS:
        if isinstance(value, kinds):
            return own(value)
    if isinstance(value, np.ndarray):
        return _plain(name, value.tolist())
    if isinstance(value, Mapping):
        return {_key(name, k): _part(name, k, v) for k, v in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):  # a named tuple's
        parts = [_part(name, i, v) for i, v in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    raise DTypeError(
        f"{name}: expected text, a number, True, False, None, or lists and mappings of these, got "
        f"{show(value)}"
    )


def _part(name: str, at: object, value: Any) -> Any:
    return value if type(value) in _PLAIN else _plain(f"{name}[{show(at)}]", value)


def _key(name: str, key: Any) -> Any:
    if isinstance(key, (*_PLAIN, np.bool_, np.integer, np.floating)):
        return _plain(name, key)
    raise DTypeError(f"{name}: expected keys that are text or numbers, got {show(key)}")
