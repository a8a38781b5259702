"""Q5_1 of GGUF: blocks of 32 5-bit numbers with a factor and a least value.

Numbers lie as those of Q5_0.
"""

from __future__ import annotations

from centella.dtypes import Array, u8, u32
from centella.ops.quant.format import Format, Plane
from centella.ops.quant.host import (
    above_least,
    bit_words,
    bits_of,
    fields,
    packed,
    scaled,
    unpacked,
)  # fmt: skip
from centella.ops.quant.numbers import few_fives, fives

BLOCK = 32


def encode(op: str, weight: Array) -> tuple[Array, ...]:
    """factor = (max - min) / 31, numbers from 0 to 31 above the least."""
    numbers, scale, low = above_least(op, weight, BLOCK, 31)
    return packed(numbers & 15), bit_words(numbers >> 4), scale, low


def decode(stored: Array, high: Array, scale: Array, low: Array) -> Array:
    """number x factor + least."""
    return scaled(unpacked(stored, BLOCK) + (bits_of(high) << 4), scale, low)


def from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of a factor, the least value, the word of fifth bits and 16 bytes."""
    scale, low, high, stored = fields(raw, "<f2", "<f2", "<u4", "16u1")
    return stored, high, scale, low


Q5_1: Format = Format(
    "q5_1", BLOCK,
    (Plane("stored", "numbers", u8, 16), Plane("high", "fifth bits", u32, 1),
     Plane("scale", "factors", None, 1), Plane("low", "least values", None, 1)),
    lambda words, at: fives(words, at.value(1), 0), decode, encode, from_blocks,
    few=lambda values, half, at: few_fives(values, half, at.value(1), at.column, 0.0), outs=2,
)  # fmt: skip
