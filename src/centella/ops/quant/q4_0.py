"""Q4_0 of GGUF: blocks of 32 4-bit numbers with a factor.

Of a block the first 16 numbers are in the low halves of bytes, the others in the high ones, each 8
more than it stands for.
"""

from __future__ import annotations

import numpy as np

from centella.dtypes import Array, u8
from centella.ops.quant.format import Format, Plane
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
from centella.ops.quant.numbers import halves, less, nibbles

BLOCK = 32


def encode(op: str, weight: Array) -> tuple[Array, Array]:
    """factor = w / -8 of the element that is largest by amount, numbers from -8 to 7."""
    blocks = in_blocks(matrix(op, weight, BLOCK), BLOCK)
    factor = furthest(blocks) / np.float32(-8)
    scale = rounded(op, factor)
    numbers = np.floor(blocks * inverse(factor) + np.float32(8.5))
    return packed(np.clip(numbers, 0, 15).astype(np.uint8)), scale


def decode(stored: Array, scale: Array) -> Array:
    """(number - 8) x factor."""
    return scaled(unpacked(stored, BLOCK) - np.int8(8), scale)


def from_blocks(raw: Array) -> tuple[Array, Array]:
    """Blocks of a factor and 16 bytes."""
    scale, stored = fields(raw, "<f2", "16u1")
    return stored, scale


Q4_0: Format = Format(
    "q4_0", BLOCK, (Plane("stored", "numbers", u8, 16), Plane("scale", "factors", None, 1)),
    lambda words, at: nibbles(words, 8), decode, encode, from_blocks,
    few=lambda values, half, at: less(halves(values, half), 8.0),
)  # fmt: skip
