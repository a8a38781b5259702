"""IQ4_NL and IQ4_XS of GGUF: 4-bit codes of 16 levels, which lie closer together near zero.

IQ4_NL has blocks of 32 codes with a factor. IQ4_XS has blocks of 256, of which each 32 have a 6-bit
factor, 32 more than what it stands for, times the factor of the block; the plane has it as i8. Of
32 codes the first 16 are in the low halves of bytes.

Source: the levels are a table of ggml (`kvalues_iq4nl`), and in the `gguf` package.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, i8, u8, u32
from centella.lang.values import Expr, Operand
from centella.ops.quant.format import (
    Cores,
    Elements,
    Format,
    Levels,
    Plane,
    Run,
    factors_of_blocks,
    scale_of_block,
)
from centella.ops.quant.host import fields, in_blocks, scaled, unpacked
from centella.ops.quant.numbers import FLIP, field, halves, looked_up, small

BLOCK, GROUP = 256, 32
LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
ZERO = 128  # what a byte of WORDS is more than its level
TABLE = [int(w) for w in LEVELS.view("<u4")]
WORDS = [int(w) for w in (LEVELS.astype(np.int16) + ZERO).astype(np.uint8).view("<u4")]


def decode_nl(stored: Array, scale: Array) -> Array:
    """level x factor."""
    return scaled(LEVELS[unpacked(stored, GROUP)], scale)


def decode_xs(stored: Array, factors: Array, scale: Array) -> Array:
    """level x factor of 32 x factor of the block."""
    near = LEVELS[unpacked(stored, GROUP)].astype(np.int32) * factors[..., None]
    return scaled(near.reshape(*scale.shape, BLOCK), scale)


def nl_from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of a factor and 16 bytes."""
    scale, stored = fields(raw, "<f2", "16u1")
    return stored, scale


def xs_from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of a factor, two high bits of 8 factors, four low ones of each, and 128 bytes."""
    scale, high, low, stored = fields(raw, "<f2", "<u2", "4u1", "128u1")
    low = in_blocks(low, 4)
    below = np.stack([low & 15, low >> 4], -1).reshape(*high.shape, 8)
    above = high[..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    factors = (below | above << 4).astype(np.int8) - np.int8(32)
    return stored, factors.reshape(len(raw), high.shape[1] * 8), scale


def numbers(words: list[Expr], at: Elements) -> list[Expr]:
    """The levels of a step."""
    return [_level(w >> 8 * j + half & 15) for half in (0, 4) for w in words for j in range(4)]


def few(values: list[Expr], half: int, at: Elements) -> list[Expr]:
    """The same of neighbouring bytes."""
    return [_level(lang.bitcast(v, u32)) for v in halves(values, half)]


def _level(code: Operand) -> Expr:
    low, high = (lang.select((code & 4) == 0, WORDS[first], WORDS[first + 1]) for first in (0, 2))
    word = lang.select(code < 8, low, high)
    return small(word >> (code & 3) * 8 & 255, ZERO)


def factors_of_xs(at: Elements) -> tuple[Expr, None]:
    """In a kernel: the product of both factors."""
    factor: Expr = at.value(2) * lang.cast(at.value(1, at.column // GROUP % 8), f32)
    return factor, None


def levels_of_block(run: Run) -> Levels:
    """For tensor cores: the factors of a block."""
    first = run.number // 2 * 2
    words = [run.word(1, first + i) for i in range(2)]
    return Levels(words, scale_of_block(run, 2), signed=True)


def factors_of_run(run: Run) -> list[tuple[Any, Any | None]]:
    """For tensor cores: those of four groups, half of a block."""
    word, scale = run.word(1, run.number) ^ FLIP, scale_of_block(run, 2)
    return [(field(word, 8 * j, 255, 128) * scale, None) for j in range(4)]


IQ4_NL: Format = Format(
    "iq4_nl", GROUP, (Plane("stored", "codes", u8, 16), Plane("scale", "factors", None, 1)),
    numbers, decode_nl, None, nl_from_blocks, few, outs=2,
    cores=Cores(lambda word, *_: looked_up(word, TABLE),
                lambda run: factors_of_blocks(run, low=False), None),
)  # fmt: skip
IQ4_XS: Format = Format(
    "iq4_xs", BLOCK,
    (Plane("stored", "codes", u8, 128), Plane("factors", "factors of 32", i8, 8),
     Plane("scale", "their factors", None, 1)),
    numbers, decode_xs, None, xs_from_blocks, few, factors_of_xs, outs=2,
    cores=Cores(lambda word, *_: looked_up(word, TABLE), factors_of_run, None,
                levels=levels_of_block),
)  # fmt: skip
