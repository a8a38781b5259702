"""Q4_0, Q4_1, Q5_0 and Q5_1 of GGUF: blocks of 32 numbers of 4 or 5 bits.

Of a block the low four bits of the first 16 numbers are in the low halves of bytes, those of the
others in the high ones. Fifth bits are a word a block, the first number's in bit 0. The formats
`_0` have a factor, and numbers that are half of their range more than what they stand for; `_1`
have a factor and a least value.
"""

from __future__ import annotations

import numpy as np

from centella.dtypes import Array, u8, u32
from centella.lang.values import Expr
from centella.ops.quant.format import Cores, Elements, Format, Plane, factors_of_blocks
from centella.ops.quant.host import (
    above_least,
    bit_words,
    bits_of,
    fields,
    furthest,
    in_blocks,
    inverse,
    matrix,
    packed,
    rounded,
    scaled,
    unpacked,
)  # fmt: skip
from centella.ops.quant.numbers import few_fives, fives, halves, halves_of_bytes, less, nibbles

BLOCK = 32


def _format(bits: int, least: bool) -> Format:
    count, zero, fifth = 1 << bits, 0 if least else 1 << bits - 1, bits == 5

    def encode(op: str, weight: Array) -> tuple[Array, ...]:
        """Factor (max - min) / most; or w / -zero of the element that is largest by amount."""
        if least:
            numbers, *factors = above_least(op, weight, BLOCK, count - 1)
        else:
            blocks = in_blocks(matrix(op, weight, BLOCK), BLOCK)
            factor = furthest(blocks) / np.float32(-zero)
            factors = [rounded(op, factor)]
            steps = np.floor(blocks * inverse(factor) + np.float32(zero + 0.5))
            numbers = np.clip(steps, 0, count - 1).astype(np.uint8)
        high = [bit_words(numbers >> 4)] if fifth else []
        return (packed(numbers & 15), *high, *factors)

    def decode(stored: Array, *more: Array) -> Array:
        """(number - zero) x factor, + least."""
        numbers = unpacked(stored, BLOCK)
        if fifth:
            numbers = numbers + (bits_of(more[0]) << 4)
        return scaled(numbers - np.int8(zero), *more[fifth:])

    def from_blocks(raw: Array) -> tuple[Array, ...]:
        """Blocks of a factor, the least value, the word of fifth bits and 16 bytes."""
        kinds = ["<f2"] * (1 + least) + ["<u4"] * fifth
        *more, stored = fields(raw, *kinds, "16u1")
        return (stored, *more[1 + least :], *more[: 1 + least])

    def numbers_of(words: list[Expr], at: Elements) -> list[Expr]:
        return fives(words, at.value(1), zero) if fifth else nibbles(words, zero)

    def few(values: list[Expr], half: int, at: Elements) -> list[Expr]:
        if fifth:
            return few_fives(values, half, at.value(1), at.column, float(zero))
        return less(halves(values, half), float(zero))

    planes = [Plane("stored", "numbers", u8, 16), Plane("scale", "factors", None, 1)]
    if fifth:
        planes.insert(1, Plane("high", "fifth bits", u32, 1))
    if least:
        planes.append(Plane("low", "least values", None, 1))
    cores = Cores(halves_of_bytes, lambda run: factors_of_blocks(run, low=least), zero)
    return Format(
        f"q{bits}_{int(least)}", BLOCK, tuple(planes), numbers_of, decode, encode, from_blocks,
        few=few, outs=2 if fifth and least else 0, cores=None if fifth else cores,
    )  # fmt: skip


Q4_0: Format = _format(4, least=False)
Q4_1: Format = _format(4, least=True)
Q5_0: Format = _format(5, least=False)
Q5_1: Format = _format(5, least=True)
