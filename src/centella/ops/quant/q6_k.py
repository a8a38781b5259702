"""Q6_K of GGUF: blocks of 256 6-bit numbers, of which each 16 have an i8 factor.

Of 32 numbers the low four bits of the first 16 are in the low halves of bytes; words have the high
two bits of 16 numbers each. Numbers are 32 more than they stand for. The block has a factor, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, i8, u8, u32
from centella.lang.values import Expr
from centella.ops.quant import regroup
from centella.ops.quant.format import Format, Place, Plane
from centella.ops.quant.host import (
    fields,
    scaled_twice,
    unpacked,
)  # fmt: skip
from centella.ops.quant.numbers import halves, less, small

BLOCK, GROUP = 256, 32


def decode(stored: Array, high: Array, levels: Array, scale: Array) -> Array:
    """(number - 32) x factor of 16 x factor of the block."""
    two = high[..., None] >> np.arange(0, 32, 2, dtype=np.uint32) & 3
    low = unpacked(stored, GROUP)
    numbers = low + (two.reshape(low.shape) << 4).astype(np.int8) - np.int8(32)
    return scaled_twice(numbers, levels, scale)


def from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of runs of 64 bytes (low bits) and 32 (high ones), 16 factors, and theirs."""
    low, high, levels, scale = fields(raw, "128u1", "64u1", "16i1", "<f2")
    return regroup.nibbles(low, 64), regroup.pair_words(high), levels, scale


def numbers(words: list[Expr], at: Place) -> list[Expr]:
    """Nibbles with their high bits, each 16 times their factor."""
    values = []
    for half in (0, 1):
        high, level = _high(at, half), _level(at, half)
        low = [w >> 8 * j + 4 * half & 15 for w in words for j in range(4)]
        values += [small(v | (high >> 2 * i & 3) << 4, 32) * level for i, v in enumerate(low)]
    return values


def few(values: list[Expr], half: int, at: Place) -> list[Expr]:
    """The same of neighbouring bytes."""
    high, level = _high(at, half) >> at.column % 16 * 2, _level(at, half)
    low = halves(values, half)
    whole = less([v | (high >> 2 * i & 3) << 4 for i, v in enumerate(low)], 32.0)
    return [v * level for v in whole]


def _high(at: Place, half: int) -> Any:
    return at.value(1, at.column // 16 % 16 + half)


def _level(at: Place, half: int) -> Expr:
    return lang.cast(at.value(2, at.column // 16 % 16 + half), f32)


Q6_K: Format = Format(
    "q6_k", BLOCK,
    (Plane("stored", "numbers", u8, 128), Plane("high", "high bits", u32, 16),
     Plane("levels", "factors of 16", i8, 16), Plane("scale", "factors", None, 1)),
    numbers, decode, None, from_blocks, few, outs=2,
)  # fmt: skip
