"""Q2_K of GGUF: blocks of 256 2-bit numbers, of which each 16 have a factor and a least value.

Those are 4-bit numbers, in a byte, times a factor of the block for each of the two kinds. A byte
has four numbers, of 64 the first 16 lowest.
"""

from __future__ import annotations

from centella import lang
from centella.dtypes import Array, f32, u8
from centella.lang.values import Expr
from centella.ops.quant import regroup
from centella.ops.quant.format import Elements, Format, Plane
from centella.ops.quant.host import fields, in_blocks, scaled, slices
from centella.ops.quant.numbers import field, less

BLOCK, GROUP = 256, 64


def decode(stored: Array, levels: Array, factors: Array) -> Array:
    """number x factor - least."""
    pairs, both = in_blocks(factors, 2), in_blocks(levels, 16)
    scale = pairs[..., :1] * (both & 15).astype(factors.dtype)
    low = pairs[..., 1:] * (both >> 4).astype(factors.dtype)
    numbers = slices(in_blocks(stored, 16), 16, 2).reshape(*levels.shape, 16)
    return scaled(numbers, scale.reshape(levels.shape), -low.reshape(levels.shape))


def from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of 16 levels, runs of 32 bytes with 128 numbers, and two factors."""
    levels, numbers, factors = fields(raw, "16u1", "64u1", "2<f2")
    return regroup.quarters(numbers), levels, factors


def numbers(words: list[Expr], at: Elements) -> list[Expr]:
    """The elements themselves: numbers of a step have several factors."""
    values = []
    for part in range(4):
        scale, low = _levels(at, part)
        own = [field(w, 8 * j + 2 * part, 3, 0) for w in words for j in range(4)]
        values += [lang.fma(v, scale, low) for v in own]
    return values


def few(values: list[Expr], part: int, at: Elements) -> list[Expr]:
    """The same of neighbouring bytes."""
    scale, low = _levels(at, part)
    return [lang.fma(v, scale, low) for v in less([v >> 2 * part & 3 for v in values], 0.0)]


def _levels(at: Elements, part: int) -> tuple[Expr, Expr]:
    """The factor of 16 numbers, and what is added."""
    both = at.value(1, at.column // 16 % 16 + part)
    scale = at.value(2, 0) * lang.cast(both & 15, f32)
    return scale, -(at.value(2, 1) * lang.cast(both >> 4, f32))


Q2_K: Format = Format(
    "q2_k", BLOCK,
    (Plane("stored", "numbers", u8, 64), Plane("levels", "factors and least values of 16", u8, 16),
     Plane("factors", "their factors", None, 2)),
    numbers, decode, None, from_blocks, few,
    factors=lambda at: (lang.const(1.0, f32), None), outs=2,
)  # fmt: skip
