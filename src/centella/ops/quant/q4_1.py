"""Q4_1 of GGUF: blocks of 32 4-bit numbers with a factor and a least value."""

from __future__ import annotations

from centella.dtypes import Array, u8
from centella.ops.quant.format import Format, Plane
from centella.ops.quant.host import above_least, fields, packed, scaled, unpacked
from centella.ops.quant.numbers import halves, less, nibbles

BLOCK = 32


def encode(op: str, weight: Array) -> tuple[Array, ...]:
    """factor = (max - min) / 15, numbers from 0 to 15 above the least."""
    numbers, scale, low = above_least(op, weight, BLOCK, 15)
    return packed(numbers), scale, low


def decode(stored: Array, scale: Array, low: Array) -> Array:
    """number x factor + least."""
    return scaled(unpacked(stored, BLOCK), scale, low)


def from_blocks(raw: Array) -> tuple[Array, Array, Array]:
    """Blocks of a factor, the least value and 16 bytes."""
    scale, low, stored = fields(raw, "<f2", "<f2", "16u1")
    return stored, scale, low


Q4_1: Format = Format(
    "q4_1", BLOCK,
    (Plane("stored", "numbers", u8, 16), Plane("scale", "factors", None, 1),
     Plane("low", "least values", None, 1)),
    lambda words, at: nibbles(words, 0), decode, encode, from_blocks,
    few=lambda values, half, at: less(halves(values, half), 0.0),
)  # fmt: skip
