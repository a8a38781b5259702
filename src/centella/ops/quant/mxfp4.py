"""MXFP4: blocks of 32 4-bit floats (E2M1) with an exponent.

Source: the OCP Microscaling Formats (MX) specification 1.0. Numbers here are twice those of E2M1,
so they are whole, and factors half those of E8M0. Of a block the first 16 are in the low halves of
bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, u8, u32
from centella.lang.values import Expr, Operand
from centella.ops.quant.format import Cores, Elements, Format, Plane, Run
from centella.ops.quant.host import fields, scaled, unpacked
from centella.ops.quant.numbers import halves, looked_up, small

BLOCK = 32
TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
TABLE = [int(w) for w in TWICE.view("<u4")]
FIRST, LAST = 0x03020100, 0x0C080604  # amounts of 0 to 3, and of 4 to 7
HALF = 0x00200000  # the bits of 2^-128


def decode(stored: Array, exponents: Array) -> Array:
    """Twice the float x 2^(exponent - 128)."""
    wide = exponents.astype(np.uint32)
    bits = np.where(wide < 2, (wide + 1) * HALF, (wide - 1) << 23)
    return scaled(TWICE[unpacked(stored, BLOCK)], bits.astype(np.uint32).view(np.float32))


def from_blocks(raw: Array) -> tuple[Array, ...]:
    """Blocks of an exponent and 16 bytes."""
    exponents, stored = fields(raw, "u1", "16u1")
    return stored, exponents


def numbers(words: list[Expr], at: Elements) -> list[Expr]:
    """Twice the floats."""
    return [_twice(w >> 8 * j + half & 15) for half in (0, 4) for w in words for j in range(4)]


def few(values: list[Expr], half: int, at: Elements) -> list[Expr]:
    """The same of neighbouring bytes."""
    return [_twice(lang.bitcast(v, u32)) for v in halves(values, half)]


def _twice(bits: Operand) -> Expr:
    amounts = lang.select((bits & 4) == 0, FIRST, LAST)
    value = small(amounts >> (bits & 3) * 8 & 255, 0)
    return lang.select(bits < 8, value, -value)


def factors_of(at: Elements) -> tuple[Expr, None]:
    """In a kernel: 2^(exponent - 128)."""
    return _power(lang.bitcast(at.value(1), u32)), None


def factors_of_run(run: Run) -> list[tuple[Any, Any | None]]:
    """For tensor cores: those of four blocks."""
    word = run.word(1, run.number)
    return [(_power(word >> 8 * j & 255), None) for j in range(4)]


def _power(exponent: Any) -> Any:
    """2^(exponent - 128)."""
    bits = lang.select(exponent < 2, (exponent + 1) * HALF, (exponent - 1) << 23)
    return lang.bitcast(bits, f32)


MXFP4: Format = Format(
    "mxfp4", BLOCK,
    (Plane("stored", "numbers", u8, 16), Plane("exponents", "exponents", u8, 1)),
    numbers, decode, None, from_blocks, few, factors_of, outs=2,
    cores=Cores(lambda word, *_: looked_up(word, TABLE), factors_of_run, None),
)  # fmt: skip
