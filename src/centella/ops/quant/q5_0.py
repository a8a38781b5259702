"""Q5_0 of GGUF: blocks of 32 5-bit numbers with a factor.

The low four bits lie as those of Q4_0; bit i of a word is the fifth bit of number i of its block.
Numbers are 16 more than they stand for.
"""

from __future__ import annotations

import numpy as np

from centella.dtypes import Array, u8, u32
from centella.ops.quant.format import Format, Plane
from centella.ops.quant.host import (
    bit_words,
    bits_of,
    fields,
    furthest,
    in_blocks,
    inverse,
    matrix,
    packed,
    rounded,
    scaled,
    unpacked,
)  # fmt: skip
from centella.ops.quant.numbers import few_fives, fives

BLOCK = 32


def encode(op: str, weight: Array) -> tuple[Array, Array, Array]:
    """factor = w / -16 of the element that is largest by amount, numbers from -16 to 15."""
    blocks = in_blocks(matrix(op, weight, BLOCK), BLOCK)
    factor = furthest(blocks) / np.float32(-16)
    scale = rounded(op, factor)
    steps = np.floor(blocks * inverse(factor) + np.float32(16.5))
    numbers = np.clip(steps, 0, 31).astype(np.uint8)
    return packed(numbers & 15), bit_words(numbers >> 4), scale


def decode(stored: Array, high: Array, scale: Array) -> Array:
    """(number - 16) x factor."""
    fifth = bits_of(high) << 4
    return scaled(unpacked(stored, BLOCK) + fifth - np.int8(16), scale)


def from_blocks(raw: Array) -> tuple[Array, Array, Array]:
    """Blocks of a factor, the word of fifth bits and 16 bytes."""
    scale, high, stored = fields(raw, "<f2", "<u4", "16u1")
    return stored, high, scale


Q5_0: Format = Format(
    "q5_0", BLOCK,
    (Plane("stored", "numbers", u8, 16), Plane("high", "fifth bits", u32, 1),
     Plane("scale", "factors", None, 1)),
    lambda words, at: fives(words, at.value(1), 16), decode, encode, from_blocks,
    few=lambda values, half, at: few_fives(values, half, at.value(1), at.column, 16.0),
)  # fmt: skip
