"""Q4_K of GGUF: blocks of 256 4-bit numbers, of which each 32 have a factor and a least value.

Those are 6-bit numbers, times a factor of the block for each of the two kinds. A file has them in
12 bytes; the plane has a byte for each: the 8 factors, then the 8 least values. Of 32 numbers the
first 16 are in the low halves of bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, u8
from centella.lang.values import Expr
from centella.ops.quant import regroup
from centella.ops.quant.format import Cores, Elements, Format, Levels, Plane, Run
from centella.ops.quant.host import fields, in_blocks, scaled, unpacked
from centella.ops.quant.numbers import halves, halves_of_bytes, less, nibbles, times_bytes

BLOCK, GROUP = 256, 32


def levels_of(packed_levels: Array) -> Array:
    """The 8 factors and 8 least values of blocks, uint8 [rows, blocks * 16], of their 12 bytes."""
    first, second, both = np.moveaxis(in_blocks(packed_levels, 12).reshape(-1, 3, 4), 1, 0)
    high = np.stack([first, second]) >> 2 & 0x30
    low = np.stack([both & 15, both >> 4])
    levels = np.concatenate([np.stack([first, second]) & 63, low | high], -1)
    rows, size = packed_levels.shape
    return np.moveaxis(levels, 0, 1).reshape(rows, size // 12 * 16)


def decode_levels(numbers: Array, levels: Array, factors: Array) -> Array:
    """number x factor - least, of numbers [n, groups, 32]."""
    wide = in_blocks(levels, 16).astype(factors.dtype)
    pairs = in_blocks(factors, 2)
    scale, low = pairs[..., :1] * wide[..., :8], pairs[..., 1:] * wide[..., 8:]
    shape = numbers.shape[:2]
    return scaled(numbers, scale.reshape(shape), -low.reshape(shape))


def factors_of(at: Elements) -> tuple[Expr, Expr]:
    """In a kernel: the factor of 32 numbers, and what is added."""
    names = [plane.name for plane in at.format.planes]
    levels, factors = names.index("levels"), names.index("factors")
    group = at.column // GROUP % 8
    scale = at.value(factors, 0) * lang.cast(at.value(levels, group), f32)
    return scale, -(at.value(factors, 1) * lang.cast(at.value(levels, group + 8), f32))


def factors_of_run(run: Run, plane: int = 1) -> list[tuple[Any, Any | None]]:
    """For tensor cores: those of four groups, half of a block; `plane`: has the levels."""
    block, half = run.number // 2, run.number % 2
    scale, least = run.values(plane + 1, block)
    levels, lows = (run.word(plane, block * 4 + half + at) for at in (0, 2))
    return list(zip(times_bytes(levels, scale), times_bytes(lows, -least), strict=True))


def levels_of_block(run: Run, plane: int = 1) -> Levels:
    """The same of a whole block."""
    block = run.number // 2
    scale, least = run.values(plane + 1, block)
    words = run.chunk(plane, block * 4)
    return Levels(words[:2], scale, lows=words[2:], least=least)


def decode(stored: Array, levels: Array, factors: Array) -> Array:
    """number x factor - least."""
    return decode_levels(unpacked(stored, GROUP), levels, factors)


def from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of two factors, 12 bytes of levels, and runs of 32 bytes with 64 numbers."""
    factors, levels, numbers = fields(raw, "2<f2", "12u1", "128u1")
    return regroup.nibbles(numbers, 32), levels_of(levels), factors


Q4_K: Format = Format(
    "q4_k", BLOCK,
    (Plane("stored", "numbers", u8, 128), Plane("levels", "factors and least values of 32", u8, 16),
     Plane("factors", "their factors", None, 2)),
    lambda words, at: nibbles(words, 0), decode, None, from_blocks,
    few=lambda values, half, at: less(halves(values, half), 0.0), factors=factors_of, outs=2,
    cores=Cores(halves_of_bytes, factors_of_run, 0, levels=levels_of_block),
)  # fmt: skip
