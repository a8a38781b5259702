"""Q4_1 of GGUF: blocks of 32 4-bit numbers with a factor and a least value."""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.dtypes import Array, u8
from centella.ops.quant.format import Format, Plane
from centella.ops.quant.host import (
    fields,
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


def encode(op: str, weight: Any) -> tuple[Array, Array, Array]:
    """factor = (max - min) / 15, numbers from 0 to 15 above the least."""
    blocks = in_blocks(matrix(op, weight, BLOCK), BLOCK)
    least = blocks.min(-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        factor = (blocks.max(-1, keepdims=True) - least) / np.float32(15)
    planes = rounded(op, factor), rounded(op, least)
    numbers = np.floor((blocks - least) * inverse(factor) + np.float32(0.5))
    return packed(np.clip(numbers, 0, 15).astype(np.uint8)), *planes


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
