"""NumPy meets traced values: its numbers leave operators to us, its functions are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from centella.errors import TraceError

# NumPy's operators, by the method that answers them when our value stands on the right.
REFLECTED = {
    "add": "__radd__", "subtract": "__rsub__", "multiply": "__rmul__", "divide": "__rtruediv__",
    "floor_divide": "__rfloordiv__", "remainder": "__rmod__", "bitwise_and": "__rand__",
    "bitwise_or": "__ror__", "bitwise_xor": "__rxor__", "left_shift": "__rlshift__",
    "right_shift": "__rrshift__", "less": "__gt__", "less_equal": "__ge__", "greater": "__lt__",
    "greater_equal": "__le__", "equal": "__eq__", "not_equal": "__ne__",
}  # fmt: skip
# NumPy's functions that the language has.
_SAME = "sqrt exp exp2 log log2 sin cos tanh floor ceil trunc isnan maximum minimum fmax fmin"
LANG_NAMES = {n: f"lang.{n}" for n in _SAME.split()} | {
    "absolute": "lang.abs", "fabs": "lang.abs",
}  # fmt: skip


def reflected(
    ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any],
    table: Mapping[str, str],
) -> Any:  # fmt: skip
    """Our operator, where NumPy's stands between a value of its own and one of ours.

    Returns:
        What the operator gives, or NotImplemented where `table` has none.
    """
    name = table.get(ufunc.__name__) if method == "__call__" and not options else None
    operator = None if name is None else getattr(inputs[-1], name, None)
    if operator is None or not isinstance(inputs[0], (np.generic, np.ndarray)):
        return NotImplemented
    return operator(np.asarray(inputs[0])[()])  # a number comes as rank 0


def answer(ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What `ufunc` is for traced inputs: our operator, or a TraceError that names what to use."""
    result = reflected(ufunc, method, inputs, options, REFLECTED)
    if result is not NotImplemented:
        return result
    name = ufunc.__name__
    if name in REFLECTED:
        hint = "an operator of Python"
    else:
        hint = LANG_NAMES.get(name, "a function of centella.lang, such as lang.sqrt")
    raise TraceError(f"NumPy functions act on arrays, not on traced values: np.{name}; use {hint}")
