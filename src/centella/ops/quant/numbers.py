"""Small integers in words, as f32: in a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.lang.values import Expr, Operand

MAGIC = 0x4B000000  # the bits of 2^23, whose last bits a small number may take
MAGIC_VALUE = 8388608.0
LOW = 0x0F0F0F0F  # the low halves of bytes
FLIP = 0x80808080  # makes four i8 into u8 that are 128 more


def small(bits: Operand, zero: int) -> Expr:
    """A number below 2^23 less `zero`, as f32."""
    return lang.bitcast(bits | MAGIC, f32) - (MAGIC_VALUE + zero)


def field(word: Operand, start: int, mask: int, zero: int) -> Expr:
    """The bits of a word from `start` on that a mask keeps, up to 255, less `zero`, as f32."""
    shifted = word >> start if start else word
    return small(shifted if start + mask.bit_length() == 32 else shifted & mask, zero)


def times_bytes(word: Operand, scale: Operand) -> list[Expr]:
    """Each of the four bytes of a word times a number of 16 bits, exactly; on NVIDIA GPUs.

    A byte is put into the last bits of 2^23 (PRMT); of that product in f32, not rounded, 2^23 times
    the number, which is below 2^104, is taken away.
    """
    offset = scale * -MAGIC_VALUE
    bits = (lang.ptx.permute_bytes(word, MAGIC, (byte, 5, 6, 7)) for byte in range(4))
    return [lang.fma(lang.bitcast(b, f32), scale, offset) for b in bits]


def number(value: Operand) -> Any:
    """A stored element as f32. An i8 goes by its bits, which is exact and quicker."""
    return field(lang.bitcast(value, u32) + 128, 0, 255, 128) if value.type == "i32" else value


def bytes_of(words: list[Expr]) -> list[Expr]:
    """The i8 of stored words as f32."""
    flipped = [word ^ FLIP for word in words]
    return [field(word, 8 * j, 255, 128) for word in flipped for j in range(4)]


def nibbles(words: list[Expr], zero: int) -> list[Expr]:
    """The low halves of bytes, then the high ones, less `zero`, as f32."""
    return [field(w, 8 * j + half, 15, zero) for half in (0, 4) for w in words for j in range(4)]


def halves_of_bytes(word: Operand, *_: object) -> list[Expr]:
    """The low halves of bytes, then the high ones, in bytes of a word each: `Cores.numbers`."""
    return [word & LOW, word >> 4 & LOW]


def looked_up(word: Operand, table: Sequence[int]) -> list[Expr]:
    """What an i8 table has for the halves of bytes, as `halves_of_bytes`; on NVIDIA GPUs.

    Args:
        table: of 16 bytes, as four words.
    """
    order = lang.ptx.permute_bytes
    upper = word >> 1 & 0x44444444 | 0x32103210  # which of two bytes: the fourth bit of a code
    pairs = []
    for shift in (0, 16):
        codes = (word >> shift if shift else word) & 0x77777777
        first, last = (order(table[i], table[i + 1], codes) for i in (0, 2))
        pairs.append(order(first, last, upper >> shift if shift else upper))
    return [order(pairs[0], pairs[1], each) for each in ((0, 2, 4, 6), (1, 3, 5, 7))]


def fives(words: list[Expr], high: Operand, zero: int) -> list[Expr]:
    """Nibbles with the fifth bits that a word has in their order, less `zero`, as f32."""
    low = [w >> 8 * j + half & 15 for half in (0, 4) for w in words for j in range(4)]
    return [small(v | (high >> i & 1) << 4, zero) for i, v in enumerate(low)]


def few_fives(
    values: list[Expr], half: int, high: Operand, column: Operand, zero: float
) -> list[Expr]:
    """The same of neighbouring bytes, of which the first has column `column`."""
    bits = high >> column % 32 + 16 * half
    return less([v | (bits >> i & 1) << 4 for i, v in enumerate(halves(values, half))], zero)


def with_high(word: Operand, high: Operand, bits: int, field: int = 0) -> list[Any]:
    """`halves_of_bytes` with what bytes of `high` have above them, in fields of so many bits.

    Args:
        field: that of the low halves; that of the high ones follows.
    """
    mask, numbers = ((1 << bits) - 1) * 0x01010101, []
    for half, low in enumerate(halves_of_bytes(word)):
        up = 4 - bits * (field + half)
        moved = high << up if up > 0 else high >> -up if up else high
        numbers.append(moved & mask << 4 | low)
    return numbers


def numbers_with_high(words: list[Expr], at: Any, bits: int, zero: int) -> list[Expr]:
    """A step's nibbles with what the second plane has above them, less `zero`, as f32."""
    highs = _highs(at, bits, 0, len(words))
    pairs = [with_high(w, h, bits) for w, h in zip(words, highs, strict=True)]
    return [field(pair[i], 8 * j, 255, zero) for i in (0, 1) for pair in pairs for j in range(4)]


def few_with_high(values: list[Expr], half: int, at: Any, bits: int, zero: float) -> list[Expr]:
    """The same of neighbouring bytes, of which the first has the column `at`."""
    highs = _highs(at, bits, at.column % 16 // 4, len(values) // 4)
    each = [h >> 8 * j + bits * half & (1 << bits) - 1 for h in highs for j in range(4)]
    low = halves(values, half)
    return less([v | above << 4 for v, above in zip(low, each, strict=True)], zero)


def _highs(at: Any, bits: int, first: Any, count: int) -> list[Any]:
    """Words of the second plane, the fields of the 32 numbers at a column lowest."""
    groups = 4 // bits  # in a chunk of four words
    group = at.column // 32
    start = group % (at.format.block // 32) // groups * 4 + first
    return [at.value(1, start + i) >> group % groups * (2 * bits) for i in range(count)]


def halves(values: list[Expr], half: int) -> list[Expr]:
    """The low (0) or high (1) halves of bytes, which are integers."""
    return [v >> 4 if half else v & 15 for v in values]


def less(values: list[Expr], zero: float) -> list[Expr]:
    """Integers as f32, less `zero`."""
    return [lang.cast(v, f32) - zero for v in values]
