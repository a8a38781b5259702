"""What quantising in NumPy shares."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from centella.dtypes import Array, bf16, widen
from centella.errors import DTypeError, ShapeError


def matrix(op: str, weight: Any, block: int = 1) -> Array:
    """A weight as float32 [n, k].

    Raises:
        ShapeError, DTypeError: no matrix of whole blocks, or not of floats.
    """
    array = np.asarray(weight)
    if array.dtype.name == "bfloat16":
        array = widen(array.view(np.uint16), bf16)
    if array.ndim != 2 or array.shape[1] % block:
        rows = f" with a multiple of {block} in each row" if block > 1 else ""
        raise ShapeError(f"{op}: expected [out, in]{rows}, got {list(array.shape)}")
    if array.dtype.kind != "f":
        raise DTypeError(f"{op}: expected floats, got {array.dtype}")
    with np.errstate(over="ignore"):
        wide: Array = array.astype(np.float32)
    return wide


def in_blocks(weight: Array, block: int) -> Array:
    """Rows of blocks: [n, k / block, block]."""
    return weight.reshape(len(weight), weight.shape[1] // block, block)


def furthest(blocks: Array) -> Array:
    """Of each block the element that is largest by amount."""
    largest: Array = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    return largest


def rounded(op: str, factor: Array) -> Array:
    """Factors [n, blocks, 1] as they are stored, float16 [n, blocks].

    Raises:
        DTypeError: one is not finite.
    """
    with np.errstate(over="ignore"):
        scale = factor[..., 0].astype(np.float16)
    if not np.isfinite(scale).all():
        raise DTypeError(f"{op}: expected values whose factors are finite in float16")
    return scale


def fields(raw: Array, *dtypes: str) -> list[Array]:
    """The fields of blocks [rows, blocks, bytes], in their order there, each [rows, elements].

    A dtype is NumPy's, such as "<f2" for one element of a block or "16u1" for 16.
    """
    kind = np.dtype([(f"f{i}", name) for i, name in enumerate(dtypes)])
    records = np.ascontiguousarray(raw).view(kind)[..., 0]
    rows, blocks = records.shape
    planes = [np.ascontiguousarray(records[name]) for name in kind.names or ()]
    return [f.reshape(rows, blocks * math.prod(f.shape[2:])) for f in planes]


def inverse(factor: Array) -> Array:
    """1 / factor; 0 where that may be infinite."""
    normal = np.abs(factor) >= np.finfo(np.float32).tiny
    result: Array = np.zeros_like(factor)
    np.divide(np.float32(1), factor, where=normal, out=result)
    return result


def above_least(op: str, weight: Any, block: int, most: int) -> tuple[Array, Array, Array]:
    """Numbers 0 to `most` above the least value of a block, uint8 [n, blocks, block].

    Returns:
        the numbers, the factors (max - min) / most, and the least values, float16 [n, blocks].
    """
    blocks = in_blocks(matrix(op, weight, block), block)
    least = blocks.min(-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        factor = (blocks.max(-1, keepdims=True) - least) / np.float32(most)
    scale, low = rounded(op, factor), rounded(op, least)
    numbers = np.floor((blocks - least) * inverse(factor) + np.float32(0.5))
    return np.clip(numbers, 0, most).astype(np.uint8), scale, low


def packed(numbers: Array) -> Array:
    """Numbers [n, blocks, 32] of 4 bits, two a byte, [n, blocks * 16]: the first 16 lie low."""
    n, blocks, length = numbers.shape
    half = length // 2
    bytes_: Array = numbers[..., :half] | numbers[..., half:] << 4
    return bytes_.reshape(n, blocks * half)


def unpacked(stored: Array, block: int) -> Array:
    """The numbers [n, blocks, block] that `packed` packed, as int8."""
    bytes_, half = in_blocks(stored, block // 2), block // 2
    numbers = np.empty((*bytes_.shape[:2], block), np.uint8)
    np.bitwise_and(bytes_, np.uint8(15), out=numbers[..., :half])
    np.right_shift(bytes_, np.uint8(4), out=numbers[..., half:])
    return numbers.view(np.int8)


def bit_words(bits: Array) -> Array:
    """Numbers 0 and 1 of groups [n, groups, 32], as words [n, groups], the first in bit 0."""
    words: Array = np.packbits(bits, axis=-1, bitorder="little").view("<u4")[..., 0]
    return words.astype(np.uint32, copy=False)


def bits_of(words: Array) -> Array:
    """The bits of words [n, groups] as int8 [n, groups, 32]."""
    return (words[..., None] >> np.arange(32, dtype=np.uint32) & 1).astype(np.int8)


def high_bits(words: Array, bits: int) -> Array:
    """What numbers have above their low four bits, int8 [n, numbers], of chunks of four words.

    Byte m of a chunk has those of numbers m, 16 + m, 32 + m and so on, the first lowest.
    """
    n, count = words.shape
    bytes_ = np.ascontiguousarray(words, "<u4").view(np.uint8)  # planes may have any layout
    chunks = bytes_.reshape(n, count // 4, 1, 16)
    fields = chunks >> np.arange(0, 8, bits, dtype=np.uint8)[:, None] & (1 << bits) - 1
    return fields.reshape(n, count * 32 // bits).astype(np.int8)


def slices(bytes_: Array, width: int, bits: int) -> Array:
    """The numbers of `bits` bits in bytes, runs of `width` bytes: all lowest ones of a run first.

    uint8 [rows, blocks, bytes] to [rows, blocks, numbers]: as files have those of K formats.
    """
    rows, blocks, count = bytes_.shape
    runs = bytes_.reshape(rows, blocks, count // width, 1, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    numbers: Array = runs >> shifts & (1 << bits) - 1
    return numbers.reshape(rows, blocks, count * 8 // bits)


def scaled_twice(numbers: Array, levels: Array, scale: Array) -> Array:
    """number x factor of 16 neighbours x factor of 256, of i8 numbers of whole rows, as [n, k]."""
    exact = np.int32 if scale.dtype == np.float16 else scale.dtype
    near = numbers.reshape(*levels.shape, 16).astype(exact)
    near *= levels[..., None].astype(exact)
    return scaled(near.reshape(*scale.shape, 256), scale)


def scaled(numbers: Array, scale: Array, low: Array | None = None) -> Array:
    """number x factor + low of blocks [n, blocks, block], as [n, k]."""
    blocks = numbers.astype(scale.dtype)
    blocks *= scale[..., None]
    if low is not None:
        blocks += low[..., None]
    return blocks.reshape(len(numbers), numbers.shape[1] * numbers.shape[2])
