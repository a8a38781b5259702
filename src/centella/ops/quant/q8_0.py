"""Q8_0 of GGUF: blocks of 32 i8 numbers with a factor."""

from __future__ import annotations

import numpy as np

from centella.dtypes import Array, i8
from centella.ops.quant.format import Cores, Format, Plane, factors_of_blocks
from centella.ops.quant.host import fields, furthest, in_blocks, inverse, matrix, rounded, scaled
from centella.ops.quant.numbers import bytes_of, less

BLOCK = 32


def encode(op: str, weight: Array) -> tuple[Array, Array]:
    """factor = max |w| / 127, numbers from -127 to 127."""
    wide = matrix(op, weight, BLOCK)
    blocks = in_blocks(wide, BLOCK)
    factor = np.abs(furthest(blocks)) / np.float32(127)
    scale = rounded(op, factor)
    numbers = np.rint(blocks * inverse(factor)).astype(np.int8)
    return numbers.reshape(wide.shape), scale


def decode(stored: Array, scale: Array) -> Array:
    """number x factor."""
    return scaled(in_blocks(stored, BLOCK), scale)


def from_blocks(raw: Array) -> tuple[Array, Array]:
    """Blocks of a factor and 32 numbers."""
    scale, stored = fields(raw, "<f2", "32i1")
    return stored, scale


Q8_0: Format = Format(
    "q8_0", BLOCK, (Plane("stored", "numbers", i8, 32), Plane("scale", "factors", None, 1)),
    lambda words, at: bytes_of(words), decode, encode, from_blocks,
    few=lambda values, half, at: less(values, 0.0),
    cores=Cores(lambda word, *_: [word], lambda run: factors_of_blocks(run, low=False), None),
)  # fmt: skip
