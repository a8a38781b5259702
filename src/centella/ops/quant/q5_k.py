"""Q5_K of GGUF: Q4_K with a fifth bit, as `host.high_bits` reads those."""

from __future__ import annotations

from centella.dtypes import Array, u8, u32
from centella.ops.quant import regroup
from centella.ops.quant.format import Cores, Format, Plane
from centella.ops.quant.host import fields, high_bits, unpacked
from centella.ops.quant.numbers import few_with_high, numbers_with_high, with_high
from centella.ops.quant.q4_k import (
    BLOCK,
    GROUP,
    decode_levels,
    factors_of,
    factors_of_run,
    levels_of,
    levels_of_block,
)


def decode(stored: Array, high: Array, levels: Array, factors: Array) -> Array:
    """number x factor - least."""
    low = unpacked(stored, GROUP)
    return decode_levels(low + (high_bits(high, 1) << 4).reshape(low.shape), levels, factors)


def from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of two factors, 12 bytes of levels, 32 of fifth bits, and those of Q4_K."""
    factors, levels, high, numbers = fields(raw, "2<f2", "12u1", "32u1", "128u1")
    words = regroup.fifth_bits(high)
    return regroup.nibbles(numbers, 32), words, levels_of(levels), factors


Q5_K: Format = Format(
    "q5_k", BLOCK,
    (Plane("stored", "numbers", u8, 128), Plane("high", "fifth bits", u32, 8),
     Plane("levels", "factors and least values of 32", u8, 16),
     Plane("factors", "their factors", None, 2)),
    lambda words, at: numbers_with_high(words, at, 1, 0), decode, None, from_blocks,
    few=lambda values, half, at: few_with_high(values, half, at, 1, 0.0),
    factors=factors_of, outs=2,
    cores=Cores(
        lambda word, high, field: with_high(word, high, 1, field),
        lambda run: factors_of_run(run, 2), 0, high=1, levels=lambda run: levels_of_block(run, 2),
    ),
)  # fmt: skip
