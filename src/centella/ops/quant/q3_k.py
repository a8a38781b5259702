"""Q3_K of GGUF: blocks of 256 3-bit numbers, of which each 16 have a 6-bit factor.

A byte has the low two bits of four numbers, of 64 the first 16 lowest; bit i of a word is the third
bit of number i of its 32. Numbers are 4 more than they stand for. The plane of factors has i8
numbers, which a file packs into 12 bytes, 32 more. The block has a factor, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, i8, u8, u32
from centella.lang.values import Expr
from centella.ops.quant import regroup
from centella.ops.quant.format import Elements, Format, Plane
from centella.ops.quant.host import (
    bits_of,
    fields,
    in_blocks,
    scaled_twice,
    slices,
)  # fmt: skip
from centella.ops.quant.numbers import less, small

BLOCK, GROUP = 256, 64


def decode(stored: Array, high: Array, levels: Array, scale: Array) -> Array:
    """(number - 4) x factor of 16 x factor of the block."""
    low = slices(in_blocks(stored, 16), 16, 2).astype(np.int8)
    third = bits_of(high) << 2
    return scaled_twice(low + third.reshape(low.shape) - np.int8(4), levels, scale)


def from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of 32 bytes of third bits, runs of 32 bytes of low ones, 12 of factors, and theirs."""
    high, low, levels, scale = fields(raw, "32u1", "64u1", "12u1", "<f2")
    packed_levels = in_blocks(levels, 12)
    first = slices(packed_levels[..., :8], 8, 4)
    last = slices(packed_levels[..., 8:], 4, 2)
    whole = (first | last << 4).astype(np.int8) - np.int8(32)
    rows, blocks, _ = whole.shape
    levels = whole.reshape(rows, blocks * 16)
    return regroup.quarters(low), regroup.bit_words(high), levels, scale


def numbers(words: list[Expr], at: Elements) -> list[Expr]:
    """Low bits with their third ones, each 16 times their factor."""
    values, highs = [], [_high(at, part) for part in (0, 2)]
    for part in range(4):
        high, level = highs[part // 2] >> 16 * (part % 2), _level(at, part)
        low = [w >> 8 * j + 2 * part & 3 for w in words for j in range(4)]
        values += [small(v | (high >> i & 1) << 2, 4) * level for i, v in enumerate(low)]
    return values


def few(values: list[Expr], part: int, at: Elements) -> list[Expr]:
    """The same of neighbouring bytes."""
    high, level = _high(at, part) >> at.column % 16 + 16 * (part % 2), _level(at, part)
    whole = [v >> 2 * part & 3 | (high >> i & 1) << 2 for i, v in enumerate(values)]
    return [v * level for v in less(whole, 4.0)]


def _high(at: Elements, part: int) -> Any:
    return at.value(1, at.column // GROUP % 4 * 2 + part // 2)


def _level(at: Elements, part: int) -> Expr:
    return lang.cast(at.value(2, at.column // 16 % 16 + part), f32)


Q3_K: Format = Format(
    "q3_k", BLOCK,
    (Plane("stored", "numbers", u8, 64), Plane("high", "third bits", u32, 8),
     Plane("levels", "factors of 16", i8, 16), Plane("scale", "factors", None, 1)),
    numbers, decode, None, from_blocks, few, outs=2,
)  # fmt: skip
