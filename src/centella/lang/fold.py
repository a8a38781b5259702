"""Constant folding and the few identities that address arithmetic needs."""

from __future__ import annotations

from typing import Any

import numpy as np

Number = int | float | bool
_SCALAR: dict[str, Any] = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "bool": np.bool_}


def _truncated_div(a: int, b: int) -> int:
    return a if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def _wrap(value: int, type_: str) -> int:
    value &= 0xFFFFFFFF
    return value - 2**32 if type_ == "i32" and value >= 2**31 else value


def fold(op: str, type_: str, operand: str, values: tuple[Number, ...]) -> Number | None:
    """The value of a pure operation on constants, or None where it is left to the device.

    `operand` is the type of the first operand. f32 is folded only where rounding is defined
    (one rounding to nearest even), never through a transcendental.
    """
    if op in ("lt", "le", "gt", "ge", "eq", "ne"):
        a, b = values
        return {"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b, "ne": a != b}[
            op
        ]
    if type_ == "bool":
        if op == "not":
            return not values[0]
        if op in ("and", "or", "xor"):
            a, b = bool(values[0]), bool(values[1])
            return {"and": a and b, "or": a or b, "xor": a != b}[op]
        return None
    if type_ == "f32":
        return _fold_float(op, operand, values)
    if operand in ("i32", "u32") and type_ in ("i32", "u32"):
        return _fold_int(op, type_, values)
    return None


def _fold_float(op: str, operand: str, values: tuple[Number, ...]) -> Number | None:
    if op == "cast" and operand in ("i32", "u32"):
        return float(np.float32(values[0]))
    if op not in ("add", "sub", "mul", "neg") or operand != "f32":
        return None
    with np.errstate(all="ignore"):
        numbers = [np.float32(v) for v in values]
        if op == "neg":
            return float(-numbers[0])
        a, b = numbers
        result = float({"add": a + b, "sub": a - b, "mul": a * b}[op])
    return result if np.isfinite(result) else None


def _fold_int(op: str, type_: str, values: tuple[Number, ...]) -> Number | None:
    numbers = [int(v) for v in values]
    a = numbers[0]
    if op == "neg":
        return _wrap(-a, type_)
    if op == "not":
        return _wrap(~a, type_)
    if op in ("cast", "bitcast"):
        return _wrap(a, type_)
    if len(numbers) != 2:
        return None
    b = numbers[1]
    if op in ("shl", "shr"):
        shifted = a << (b & 31) if op == "shl" else a >> (b & 31)
        return _wrap(shifted, type_)
    if op == "div":
        return _wrap(_truncated_div(a, b), type_)
    if op == "rem":
        return 0 if b == 0 else _wrap(a - _truncated_div(a, b) * b, type_)
    table = {"add": a + b, "sub": a - b, "mul": a * b, "and": a & b, "or": a | b, "xor": a ^ b}
    if op in table:
        return _wrap(table[op], type_)
    if op in ("min", "max"):
        return min(a, b) if op == "min" else max(a, b)
    return None


def identity(op: str, type_: str, consts: tuple[Number | None, ...]) -> int | str | None:
    """Which operand an integer operation returns unchanged (0, 1), "zero", or None."""
    if type_ not in ("i32", "u32") or len(consts) != 2:
        return None
    a, b = consts
    if op in ("add", "or", "xor") and a == 0:
        return 1
    if op in ("add", "sub", "or", "xor", "shl", "shr") and b == 0:
        return 0
    if op == "mul":
        if a == 0 or b == 0:
            return "zero"
        if a == 1:
            return 1
        if b == 1:
            return 0
    if op == "div" and b == 1:
        return 0
    if op == "rem" and b == 1:
        return "zero"
    return None
