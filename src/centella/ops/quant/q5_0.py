"""Q5_0 of GGUF: blocks of 32 5-bit numbers with a factor.

The low four bits lie as those of Q4_0; bit i of a word is the fifth bit of number i of its block.
Numbers are 16 more than they stand for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.dtypes import Array, u8, u32
from centella.ops.quant.format import Format, Place, Plane
from centella.ops.quant.host import (
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
from centella.ops.quant.numbers import halves, less, small

BLOCK = 32


def encode(op: str, weight: Any) -> tuple[Array, Array, Array]:
    """factor = w / -16 of the element that is largest by amount, numbers from -16 to 15."""
    blocks = in_blocks(matrix(op, weight, BLOCK), BLOCK)
    factor = furthest(blocks) / np.float32(-16)
    scale = rounded(op, factor)
    steps = np.floor(blocks * inverse(factor) + np.float32(16.5))
    numbers = np.clip(steps, 0, 31).astype(np.uint8)
    high = np.packbits(numbers >> 4, axis=-1, bitorder="little").view("<u4")[..., 0]
    return packed(numbers & 15), high.astype(np.uint32), scale


def decode(stored: Array, high: Array, scale: Array) -> Array:
    """(number - 16) x factor."""
    fifth = high[..., None] >> np.arange(BLOCK, dtype=np.uint32) & 1
    return scaled(unpacked(stored, BLOCK) + (fifth << 4).astype(np.int8) - np.int8(16), scale)


def numbers(words: list[Any], at: Place) -> list[Any]:
    """Nibbles with their fifth bits."""
    high = at.value(1)
    low = [w >> 8 * j + half & 15 for half in (0, 4) for w in words for j in range(4)]
    return [small(v | (high >> i & 1) << 4, 16) for i, v in enumerate(low)]


def few(values: list[Any], half: int, at: Place) -> list[Any]:
    """The same of neighbouring bytes."""
    high = at.value(1) >> at.column % BLOCK + 16 * half
    return less([v | (high >> i & 1) << 4 for i, v in enumerate(halves(values, half))], 16.0)


def from_blocks(raw: Array) -> tuple[Array, Array, Array]:
    """Blocks of a factor, the word of fifth bits and 16 bytes."""
    scale, high, stored = fields(raw, "<f2", "<u4", "16u1")
    return stored, high, scale


Q5_0: Format = Format(
    "q5_0", BLOCK,
    (Plane("stored", "numbers", u8, 16), Plane("high", "fifth bits", u32, 1),
     Plane("scale", "factors", None, 1)),
    numbers, decode, encode, from_blocks, few,
)  # fmt: skip
