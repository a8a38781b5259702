"""Products on the CPU with weights that are stored as less than f32: 16 bits, integers, planes.

A block of the weight's rows is widened in memory that stays in the cache, and multiplied there;
threads share the blocks. So a product writes nothing of the weight's size, and reads it as it is
stored. Blocks are large, since a thread waits for the interpreter's lock behind each call of NumPy:
with blocks of 128 K elements two threads are slower than one, with 1 M almost twice as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from centella.dtypes import Array, DType, bf16, f16, widen
from centella.host.blas import single
from centella.host.blockwise import cores, scratch, share
from centella.ops.quant.table import FORMATS

ELEMENTS = 1 << 20  # of a block, at most
FEW = 1 << 19  # elements of a weight that one thread widens sooner than two
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
    n, k = y.shape[1], x.shape[1]
    threads = cores() if n * k >= FEW else 1
    count = threads * max(1, -(-n * k // (threads * ELEMENTS)))  # as many for each
    step = max(1, -(-n // count))
    parts = [slice(i, min(i + step, n)) for i in range(0, n, step)]

    def compute(part: slice) -> None:
        stored = [plane[part] for plane in planes]
        with np.errstate(all="ignore"):
            if format:
                weight = FORMATS[format].decode(*map(widen, stored, dtypes))
            else:
                weight = wide(stored[0], dtypes[0])
            np.matmul(x, weight.T, out=y[:, part])

    with single():
        share(compute, parts, threads)


def wide(weight: Array, dtype: DType) -> Array:
    """Rows of a weight as f32, in memory of the thread."""
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
