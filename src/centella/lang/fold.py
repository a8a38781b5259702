"""Constant folding, and the few identities that address arithmetic needs.

Every pure operation on constants alone is folded: WGSL refuses constant expressions that overflow,
divide by zero or make a NaN, so none may reach it. Integers, which are most of them, are folded
here; the rest by the tables of the simulator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from centella.lang.arithmetic import NUMPY, PLAIN, TYPED, UNFUSED
from centella.lang.ir import INTEGERS, Number

TABLE: dict[str, Callable[..., Any]] = PLAIN | UNFUSED


def fold(
    op: str, type_: str, attr: Any, types: Sequence[str], values: Sequence[Number]
) -> Number | None:
    """The value of a pure operation on constants of `types`, or None: it is no constant.

    No bits that make a NaN are folded to one, as a Python float would not keep them.
    """
    if types[0] in INTEGERS and type_ in INTEGERS and len(values) in (1, 2):
        integer = _INTEGER.get(op)
        if integer is not None:
            return _wrap(integer(int(values[0]), int(values[-1])), type_)
    operands = [NUMPY[t](v) for t, v in zip(types, values, strict=True)]
    with np.errstate(all="ignore"):
        if op in TABLE:
            result = TABLE[op](*operands)
        elif op in TYPED:
            result = TYPED[op](type_, attr, *operands)
        else:
            return None
    value: Number = result.item()
    if type_ == "f32" and math.isnan(value):
        return None if op == "bitcast" else math.nan
    return value


def _truncated_div(a: int, b: int) -> int:
    return a if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def _wrap(value: int, type_: str) -> int:
    value &= 0xFFFFFFFF
    return value - 2**32 if type_ == "i32" and value >= 2**31 else value


_INTEGER: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _truncated_div,
    "rem": lambda a, b: 0 if b == 0 else a - _truncated_div(a, b) * b, "and": operator.and_,
    "shl": lambda a, b: a << (b & 31), "shr": lambda a, b: a >> (b & 31),
    "cast": lambda a, _: a, "bitcast": lambda a, _: a,
}  # fmt: skip  # a table


def identity(op: str, type_: str, consts: tuple[Number | None, ...]) -> int | str | None:
    """Which operand an integer operation returns unchanged (0, 1), "zero", or None.

    What divides by zero is settled here: WGSL refuses it as a constant.
    """
    if type_ not in INTEGERS or len(consts) != 2:
        return None
    a, b = consts
    if b == 0:
        if op in ("add", "sub", "or", "xor", "shl", "shr", "div"):
            return 0
        if op in ("mul", "and", "rem"):
            return "zero"
    elif b == 1:
        if op in ("mul", "div"):
            return 0
        if op == "rem":
            return "zero"
    if a == 0 and op in ("add", "or", "xor"):
        return 1
    if a == 0 and op in ("mul", "and"):
        return "zero"
    if a == 1 and op == "mul":
        return 1
    return None
