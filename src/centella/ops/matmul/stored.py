"""Products on the CPU with weights that are stored as less than f32: 16 bits, integers, planes.

A block of the weight's rows is widened and then multiplied, so nothing of the weight's size is
written. Threads share the blocks; where there are many rows and more cores than our threads, they
share the widening of each block, and the BLAS multiplies it by all of its threads. Blocks are
large, since a thread waits for the interpreter's lock behind each call of NumPy: with blocks of
128 K elements two threads are slower than one, with 1 M almost twice as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from centella.dtypes import Array, DType, bf16, f16, f32, widen
from centella.host.blas import BLAS, SMALL, taken_over
from centella.host.blockwise import cores, scratch, share
from centella.ops.quant.table import FORMATS

ELEMENTS = 1 << 20  # of a block, at most
FEW = 1 << 19  # elements of a weight that one thread widens sooner than two
MANY = 32  # rows from which on a product takes longer than to widen its weight
SIGN_AND_NUMBER = np.int32(-0x70002000)  # of f16 that is sign-extended and shifted by 13
REBIASED = np.float32(2.0**112)  # between the exponents of f16 and f32
INFINITE = np.float32(2.0**16)  # what f16's infinity and NaN are at least, before they are mended


def product(
    x: Array, planes: Sequence[Array], dtypes: Sequence[DType], format: str, y: Array
) -> None:
    """y = x W^T.

    Args:
        x: f32 [rows, k].
        planes: of the weight [n, k], as they are stored, and their dtypes; one tensor where
            `format` is "".
        y: f32 [rows, n], written.
    """
    (rows, k), n = x.shape, y.shape[1]
    threads = cores() if n * k >= FEW or rows * n * k >= SMALL else 1
    count = threads * max(1, -(-n * k // (threads * ELEMENTS)))  # as many for each
    decode = FORMATS[format].decode if format else None

    def f32_of(part: slice) -> Array:
        stored = [plane[part] for plane in planes]
        if decode is not None:
            return decode(*map(widen, stored, dtypes))
        return wide(stored[0], dtypes[0])

    def multiply(part: slice) -> None:
        with np.errstate(all="ignore"):
            np.matmul(x, f32_of(part).T, out=y[:, part])

    if rows < MANY or threads == 1 or taken_over(threads) is not None:
        with nullcontext() if BLAS is None else BLAS.alone():
            share(multiply, ranges_of(0, n, count), threads)
        return
    block = np.empty((-(-n // count), k), np.float32)
    for part in ranges_of(0, n, count):

        def fill(some: slice, first: int = part.start) -> None:
            with np.errstate(all="ignore"):
                block[some.start - first : some.stop - first] = f32_of(some)

        share(fill, ranges_of(part.start, part.stop, threads), threads)
        with np.errstate(all="ignore"):
            np.matmul(x, block[: part.stop - part.start].T, out=y[:, part])


def ranges_of(begin: int, end: int, count: int) -> list[slice]:
    """So many parts of a range, as long as each other but for the last."""
    step = max(1, -(-(end - begin) // count))
    return [slice(i, min(i + step, end)) for i in range(begin, end, step)]


def wide(weight: Array, dtype: DType) -> Array:
    """Rows of a weight as f32: as they are, or in memory of the thread."""
    if dtype is f32:
        return weight
    (wide,) = scratch(((weight.shape, np.float32),))
    if dtype is bf16:
        bits = wide.view(np.uint32)
        np.copyto(bits, weight)
        np.left_shift(bits, np.uint32(16), out=bits)
    elif dtype is f16:
        _from_f16(weight, wide)
    else:
        np.copyto(wide, weight)
    return wide


def _from_f16(half: Array, wide: Array) -> None:
    """As NumPy does it, whose own loop takes five times as long."""
    bits = wide.view(np.int32)
    np.copyto(bits, half.view(np.int16))
    np.left_shift(bits, np.int32(13), out=bits)
    np.bitwise_and(bits, SIGN_AND_NUMBER, out=bits)
    np.multiply(wide, REBIASED, out=wide)
    if wide.size and max(wide.max(), -wide.min()) >= INFINITE:
        np.copyto(wide, half)
