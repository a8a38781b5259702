"""What quantising in NumPy shares."""

from __future__ import annotations

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
    rows = len(raw)
    return [np.ascontiguousarray(records[n]).reshape(rows, -1) if raw.size else
            np.empty((rows, 0), kind[n].base) for n in kind.names or ()]  # fmt: skip


def inverse(factor: Array) -> Array:
    """1 / factor; 0 where that may be infinite."""
    normal = np.abs(factor) >= np.finfo(np.float32).tiny
    found: Array = np.zeros_like(factor)
    np.divide(np.float32(1), factor, where=normal, out=found)
    return found


def packed(numbers: Array) -> Array:
    """Numbers [n, blocks, 32] of 4 bits, two a byte, [n, blocks * 16]: the first 16 lie low."""
    n, blocks, length = numbers.shape
    half = length // 2
    return (numbers[..., :half] | numbers[..., half:] << 4).reshape(n, blocks * half)


def unpacked(stored: Array, block: int) -> Array:
    """The numbers [n, blocks, block] that `packed` packed, as int8."""
    bytes_ = in_blocks(stored, block // 2)
    return np.concatenate([bytes_ & 15, bytes_ >> 4], -1).astype(np.int8)


def scaled(numbers: Array, scale: Array, low: Array | None = None) -> Array:
    """number x factor + low of blocks [n, blocks, block], as [n, k]."""
    blocks = numbers.astype(scale.dtype) * scale[..., None]
    if low is not None:
        blocks = blocks + low[..., None]
    return blocks.reshape(len(numbers), numbers.shape[1] * numbers.shape[2])
