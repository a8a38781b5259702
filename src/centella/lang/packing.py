"""Elements of storage types in 32-bit words: unpacked after a load, packed before a store."""

from __future__ import annotations

from centella.dtypes import DType
from centella.lang.tracer import Tracer
from centella.lang.values import Expr


def unpack(t: Tracer, word: Expr, dtype: DType, lane: int) -> Expr:
    """Element `lane` of a word as a value."""
    if dtype.per_word == 1:
        return word
    if dtype.name == "f16":
        return t.pure("unpack_f16", "f32", (word,), lane)
    if dtype.name == "bf16":
        bits = (word << 16) if lane == 0 else (word & 0xFFFF0000)
        return t.pure("bitcast", "f32", (bits,))
    if dtype.name == "i8":
        top = t.pure("bitcast", "i32", (word << (24 - 8 * lane),))
        return top >> 24
    byte = (word >> (8 * lane)) & 0xFF
    return byte if dtype.name == "u8" else byte != 0


def pack(t: Tracer, values: list[Expr], dtype: DType) -> Expr:
    """The word that stores one to four values of a dtype."""
    if dtype.per_word == 1:
        return values[0]
    if dtype.name in ("f16", "bf16"):
        return t.pure(f"pack_{dtype.name}", "u32", (values[0], values[1]))
    word = _byte(t, values[0])
    for lane in range(1, 4):
        word = word | (_byte(t, values[lane]) << (8 * lane))
    return word


def stored(t: Tracer, value: Expr, dtype: DType) -> Expr:
    """A value as it comes back from storage of a dtype."""
    if dtype.kind == "bool":
        return value
    return unpack(t, pack(t, [value] * dtype.per_word, dtype), dtype, 0)


def _byte(t: Tracer, value: Expr) -> Expr:
    """The low eight bits of an integer, 0 or 1 for a bool."""
    if value.type == "bool":
        return t.pure("cast", "u32", (value,))
    return (t.pure("bitcast", "u32", (value,)) if value.type == "i32" else value) & 0xFF
