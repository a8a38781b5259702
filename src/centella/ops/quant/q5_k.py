"""Q5_K of GGUF: Q4_K with a fifth bit: bit i of a word is that of number i of its 32."""

from __future__ import annotations

from typing import Any

from centella.dtypes import Array, u8, u32
from centella.ops.quant import regroup
from centella.ops.quant.format import Format, Place, Plane
from centella.ops.quant.host import (
    bits_of,
    fields,
    unpacked,
)  # fmt: skip
from centella.ops.quant.numbers import few_fives, fives
from centella.ops.quant.q4_k import BLOCK, GROUP, decode_levels, factors_of, levels_of


def decode(stored: Array, high: Array, levels: Array, factors: Array) -> Array:
    """number x factor - least."""
    return decode_levels(unpacked(stored, GROUP) + (bits_of(high) << 4), levels, factors)


def from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of two factors, 12 bytes of levels, 32 of fifth bits, and those of Q4_K."""
    factors, levels, high, numbers = fields(raw, "2<f2", "12u1", "32u1", "128u1")
    words = regroup.bit_words(high)
    return regroup.nibbles(numbers, 32), words, levels_of(levels), factors


def _high(at: Place) -> Any:
    return at.value(1, at.column // GROUP % 8)


Q5_K: Format = Format(
    "q5_k", BLOCK,
    (Plane("stored", "numbers", u8, 128), Plane("high", "fifth bits", u32, 8),
     Plane("levels", "factors and least values of 32", u8, 16),
     Plane("factors", "their factors", None, 2)),
    lambda words, at: fives(words, _high(at), 0), decode, None, from_blocks,
    few=lambda values, half, at: few_fives(values, half, _high(at), at.column, 0.0),
    factors=factors_of, outs=2,
)  # fmt: skip
