"""The arithmetic of the kernel language in NumPy: one row an operation, all threads at once.

Operands are arrays (or NumPy scalars) of the four value types. `docs/kernel-language.md` defines
the results; callers ignore floating-point warnings, since wrapping and NaN are meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from centella.dtypes import bf16, narrow

Array = np.ndarray[Any, np.dtype[Any]]

NUMPY: dict[str, type[Any]] = {
    "f32": np.float32,
    "i32": np.int32,
    "u32": np.uint32,
    "bool": np.bool_,
}


def _int_div(a: Array, b: Array) -> Array:
    if a.dtype.kind == "u":
        quotient = a // np.maximum(b, 1)
    else:
        size = abs(a.astype(np.int64)) // np.maximum(abs(b.astype(np.int64)), 1)
        quotient = np.where((a < 0) == (b < 0), size, -size)
    result: Array = np.where(b == 0, a, quotient).astype(a.dtype)
    return result


def _div(a: Array, b: Array) -> Array:
    result: Array = a / b if a.dtype.kind == "f" else _int_div(a, b)
    return result


def _rem(a: Array, b: Array) -> Array:
    result: Array = np.where(b == 0, a.dtype.type(0), a - _int_div(a, b) * b)
    return result


def _shift(op: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    return op(a, (b & 31).astype(a.dtype))


def _nearly_fused(a: Array, b: Array, c: Array) -> Array:
    # the product is exact in float64; only its sum with c is rounded twice
    result: Array = (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)
    return result


def _unfused(a: Array, b: Array, c: Array) -> Array:
    result: Array = a * b + c
    return result


def _pack_f16(low: Array, high: Array) -> Array:
    bits = [x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (low, high)]
    return bits[0] | (bits[1] << 16)


def _pack_bf16(low: Array, high: Array) -> Array:
    bits = [narrow(x, bf16).astype(np.uint32).reshape(np.shape(x)) for x in (low, high)]
    return bits[0] | (bits[1] << 16)


def _unpack_f16(type_: str, half: int, word: Array) -> Array:
    result: Array = (word >> (16 * half)).astype(np.uint16).view(np.float16).astype(np.float32)
    return result


def _widen_i8(type_: str, attr: tuple[str, int], word: Array) -> Array:
    name, half = attr
    pair = [(word >> (16 * half + 8 * i)).astype(np.uint8).view(np.int8) for i in range(2)]
    low, high = (x.astype(np.float32) for x in pair)
    return (_pack_f16 if name == "f16" else _pack_bf16)(low, high)


def _widen_u7(type_: str, attr: tuple[str, int, int], word: Array) -> Array:
    name, half, zero = attr
    pair = [(word >> (16 * half + 8 * i)).astype(np.uint8).astype(np.float32) for i in range(2)]
    low, high = (x - np.float32(zero) for x in pair)
    return (_pack_f16 if name == "f16" else _pack_bf16)(low, high)


def _permute_bytes(
    type_: str, order: Sequence[int] | None, a: Array, b: Array, *given: Array
) -> Array:
    eight = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result: Array = np.zeros((), np.uint32)
    for at in range(4):
        number = np.asarray(order[at] if order else given[0] >> 4 * at & 15, np.uint64)
        byte = (eight >> 8 * (number & 7) & 255).astype(np.uint32)
        byte = np.where(number > 7, (byte >> 7) * np.uint32(255), byte)
        result = result | byte << np.uint32(8 * at)
    return result


def _halves(kind: str, word: Array) -> list[Array]:
    """The two values of a word of f16 or bf16."""
    if kind == "f16":
        return [_unpack_f16("f32", half, word) for half in range(2)]
    return [(word << 16).view(np.float32), (word & 0xFFFF0000).view(np.float32)]


def _max_pairs(kind: str, a: Array, b: Array) -> Array:
    low, high = (np.maximum(x, y) for x, y in zip(_halves(kind, a), _halves(kind, b), strict=True))
    return (_pack_f16 if kind == "f16" else _pack_bf16)(low, high)


def _reciprocal(x: Array) -> Array:
    return np.float32(1.0) / x


def _rsqrt(x: Array) -> Array:
    return _reciprocal(np.sqrt(x))


def _cast(type_: str, attr: None, x: Array) -> Array:
    if type_ == "bool":
        return np.not_equal(x, 0)
    if x.dtype.kind != "f":
        return x.astype(NUMPY[type_])
    low, high = (0, 2**32 - 1) if type_ == "u32" else (-(2**31), 2**31 - 1)
    inside = np.clip(x.astype(np.float64), low, high)
    return np.where(np.isnan(x), 0.0, inside).astype(NUMPY[type_])


PLAIN: dict[str, Callable[..., Any]] = {
    "neg": np.negative, "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc,
    "sqrt": np.sqrt, "ex2": np.exp2, "rsqrt": _rsqrt, "rcp": _reciprocal,
    "not": np.invert, "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "div": _div, "rem": _rem, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": partial(_shift, np.left_shift), "shr": partial(_shift, np.right_shift),
    "min": np.fmin, "max": np.fmax, "minn": np.minimum, "maxn": np.maximum,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "select": np.where,
    "pack_f16": _pack_f16, "pack_bf16": _pack_bf16,
    "max_f16": partial(_max_pairs, "f16"), "max_bf16": partial(_max_pairs, "bf16"),
}  # fmt: skip  # a table
FUSED: dict[str, Callable[..., Any]] = {"fma": _nearly_fused}
UNFUSED: dict[str, Callable[..., Any]] = {"fma": _unfused}
TYPED: dict[str, Callable[..., Any]] = {
    "cast": _cast,
    "bitcast": lambda type_, attr, x: x.view(NUMPY[type_]),
    "unpack_f16": _unpack_f16,
    "widen_i8": _widen_i8,
    "widen_u7": _widen_u7,
    "permute_bytes": _permute_bytes,
    "extract": lambda type_, lane, chunk: chunk[lane],
}
REDUCE: dict[str, tuple[np.ufunc, Callable[[np.dtype[Any]], Any]]] = {
    "subgroup_add": (np.add, lambda t: -0.0 if t.kind == "f" else 0),
    "subgroup_min": (np.fmin, lambda t: np.inf if t.kind == "f" else np.iinfo(t).max),
    "subgroup_max": (np.fmax, lambda t: -np.inf if t.kind == "f" else np.iinfo(t).min),
}
