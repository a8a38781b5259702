"""Q6_K of GGUF: blocks of 256 6-bit numbers, of which each 16 have an i8 factor.

Of 32 numbers the low four bits of the first 16 are in the low halves of bytes; the high two bits
are as `host.high_bits` reads them. Numbers are 32 more than they stand for. The block has a factor,
too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, i8, u8, u32
from centella.lang.values import Expr, Operand
from centella.ops.quant import regroup
from centella.ops.quant.format import Cores, Elements, Format, Levels, Plane, Run, scale_of_block
from centella.ops.quant.host import fields, high_bits, scaled_twice, unpacked
from centella.ops.quant.numbers import FLIP, few_with_high, field, numbers_with_high

BLOCK, GROUP = 256, 32


def decode(stored: Array, high: Array, levels: Array, scale: Array) -> Array:
    """(number - 32) x factor of 16 x factor of the block."""
    low = unpacked(stored, GROUP)
    numbers = low + (high_bits(high, 2) << 4).reshape(low.shape) - np.int8(32)
    return scaled_twice(numbers, levels, scale)


def from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of runs of 64 bytes (low bits) and 32 (high ones), 16 factors, and theirs."""
    low, high, levels, scale = fields(raw, "128u1", "64u1", "16i1", "<f2")
    return regroup.nibbles(low, 64), regroup.pairs_of_bits(high), levels, scale


def numbers(words: list[Expr], at: Elements) -> list[Expr]:
    """Numbers, each 16 times their factor."""
    levels = [_level(at, half) for half in (0, 1)]
    values = numbers_with_high(words, at, 2, 32)
    return [v * levels[i // 16] for i, v in enumerate(values)]


def few(values: list[Expr], half: int, at: Elements) -> list[Expr]:
    """The same of neighbouring bytes."""
    level = _level(at, half)
    return [v * level for v in few_with_high(values, half, at, 2, 32.0)]


def _level(at: Elements, half: int) -> Expr:
    return lang.cast(at.value(2, at.column // 16 % 16 + half), f32)


def numbers_of_bytes(word: Operand, high: Any, field: int) -> list[Any]:
    """For tensor cores: four times what numbers stand for, so that its sign is a byte's."""
    flipped = []
    for half, shifted in enumerate((word << 2, word >> 2)):
        above = high << 6 - 2 * (field + half) if field + half < 3 else high
        flipped.append(above & 0xC0C0C0C0 ^ (shifted & 0x3C3C3C3C ^ 0x80808080))
    return flipped


def levels_of_block(run: Run) -> Levels:
    """For tensor cores: the factors of a block, of four times the numbers."""
    return Levels(run.chunk(2, run.number // 2 * 4), scale_of_block(run, 3) * 0.25, signed=True)


def factors_of_run(run: Run) -> list[tuple[Any, Any | None]]:
    """For tensor cores: those of eight sixteens, half of a block."""
    scale = scale_of_block(run, 3) * 0.25
    words = [run.word(2, run.number * 2 + i) ^ FLIP for i in range(2)]
    return [(field(w, 8 * j, 255, 128) * scale, None) for w in words for j in range(4)]


Q6_K: Format = Format(
    "q6_k", BLOCK,
    (Plane("stored", "numbers", u8, 128), Plane("high", "high bits", u32, 16),
     Plane("levels", "factors of 16", i8, 16), Plane("scale", "factors", None, 1)),
    numbers, decode, None, from_blocks, few, outs=2,
    cores=Cores(numbers_of_bytes, factors_of_run, None, high=2, shared=16,
                levels=levels_of_block),
)  # fmt: skip
