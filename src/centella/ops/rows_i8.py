"""Rows of a cache in i8: numbers of -127 to 127, and an f32 scale for each row.

    scale = max |x_d| / 127    n_d = floor(x_d / scale + 1/2)    x_d = n_d scale

So an element is off by at most scale (1/2 + 2^-14), the last for arithmetic in f32. A row whose
largest element is below 2^-100 becomes zeros; one with a NaN or an infinity is NaN in every
element.

Keys and values have one plane of scales, of the shape of either with 2 in the place of head_dim:
[..., 0] of the keys, [..., 1] of the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, i32, u32
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.ops.rows import Row

MOST = 127
LEAST = 2.0**-100  # the largest element of a row that is not zeros
FINITE = 3.4028235e38
PLANE = 2  # scales of a key and its value
WORD = 4  # numbers that are stored together
HIGH = 0xFFFFFF80  # of the bits of an f32: 17 of its significand


# -- in a kernel ----------------------------------------------------------------------------------


def largest(row: Row, values_of: Any) -> Any:
    """The largest magnitude of a row; NaN where one is. The same in every thread of its team.

    Args:
        values_of: `values_of(item)` gives the elements of an item.
    """
    return row.total(lambda item: [lang.abs(v) for v in values_of(item)], 0.0, "max")


def scale_of(top: Operand) -> Expr:
    """The scale of a row by its largest magnitude."""
    usable = lang.select(top <= FINITE, top * (1 / MOST), lang.const(float("nan"), f32))
    return lang.select(top < LEAST, 0.0, usable)


def numbers_of(values: list[Expr], top: Operand) -> list[Expr]:
    """The numbers of a row's elements, by its largest magnitude."""
    usable = (top >= LEAST) & (top <= FINITE)
    whole = lang.select(usable, top, 1.0) * (1 / 128)
    high = lang.bitcast(lang.bitcast(whole, u32) & HIGH, f32)
    low = whole - high

    def number_of(value: Operand) -> Expr:
        """Not every target divides exactly, and of bf16 many quotients end in a half."""
        scaled = value * (MOST / 128)
        near = lang.floor(scaled / whole + 0.5)
        left = (scaled - near * high) - near * low  # exact: a number has 7 bits, `high` has 17
        more = lang.select(left >= whole * 0.5, 1.0, 0.0)
        less = lang.select(left < whole * -0.5, 1.0, 0.0)
        return near + more - less

    return [lang.cast(lang.select(usable, number_of(value), 0.0), i32) for value in values]


def store_words(target: Argument, start: Any, column: Any, values: list[Expr], dim: Any) -> None:
    """Store neighbours of a row from a column on in whole words, those that begin within it."""
    per = target.dtype.per_word
    for first in range(0, len(values), per):
        with lang.if_(column + first < dim):
            target.store(start + column + first, values[first : first + per])


# -- the NumPy formulas ---------------------------------------------------------------------------


def encode(x: Array) -> tuple[Array, Array]:
    """Numbers i8 of the shape of x, and the f32 scale of each row."""
    with np.errstate(all="ignore"):
        top = np.abs(x).max(-1, initial=0)
        usable = (top >= LEAST) & (top <= FINITE)
        safe = np.where(usable, top, 1)[..., None]
        numbers = np.floor(x * (MOST / 128) / (safe / 128) + 0.5)
        scales = np.where(top < LEAST, 0, np.where(usable, top / MOST, np.nan))
    return np.where(usable[..., None], numbers, 0).astype(np.int8), scales.astype(np.float32)


def decode(numbers: Any, scales: Array) -> Any:
    """The elements of rows, in the dtype of the scales."""
    return numbers * scales[..., None]
