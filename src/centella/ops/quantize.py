"""Weights as small integers with factors, made on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.dtypes import Array, bf16, widen
from centella.errors import DTypeError, ShapeError

BLOCK = 32


def quantize_blocks(weight: Any, bits: int = 8) -> tuple[Array, Array]:
    """A weight in blocks of 32 along its rows: small integers, and a factor for each block.

    The numbers are those of GGUF's Q8_0 and Q4_0 (ggml's reference quantisation). 8 bits:
    factor = max |w| / 127, numbers from -127 to 127. 4 bits: factor = w / -8 of the element that is
    largest by amount, numbers from -8 to 7, stored 8 higher, two a byte: of a block the first 16 in
    the low halves, the others in the high ones.

    Args:
        weight: [out_features, in_features], a host array of any float dtype; in_features is a
            multiple of 32.
        bits: 8 or 4.

    Returns:
        int8 [out_features, in_features] or uint8 [out_features, in_features / 2], and float16
        [out_features, in_features / 32], as `ct.linear` takes them with `scale=`.

    Raises:
        ShapeError, DTypeError: other shapes; not floats, or not finite, or a factor above
            what f16 holds; one below 6e-8 is 0, and its block with it.
    """
    array = np.asarray(weight)
    if array.dtype.name == "bfloat16":
        array = widen(array.view(np.uint16), bf16)
    if array.ndim != 2 or array.shape[1] % BLOCK:
        raise ShapeError(
            f"quantize_blocks: expected [out, in] with a multiple of {BLOCK} in each row, got "
            f"{list(array.shape)}"
        )
    if array.dtype.kind != "f":
        raise DTypeError(f"quantize_blocks: expected floats, got {array.dtype}")
    if bits not in (4, 8):
        raise DTypeError(f"quantize_blocks: expected 4 or 8 bits, got {bits!r}")
    rows, columns = array.shape
    with np.errstate(over="ignore"):
        blocks = array.astype(np.float32).reshape(rows, columns // BLOCK, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    factor = np.abs(largest) / np.float32(127) if bits == 8 else largest / np.float32(-8)
    with np.errstate(over="ignore"):
        scale = factor[..., 0].astype(np.float16)
    if not np.isfinite(scale).all():
        raise DTypeError("quantize_blocks: expected values whose factors are finite in float16")
    normal = np.abs(factor) >= np.finfo(np.float32).tiny  # of less the inverse may be infinite
    inverse = np.divide(np.float32(1), factor, where=normal, out=np.zeros_like(factor))
    steps = blocks * inverse
    if bits == 8:
        return np.rint(steps).astype(np.int8).reshape(rows, columns), scale
    nibbles = np.clip(np.floor(steps + np.float32(8.5)), 0, 15).astype(np.uint8)
    packed = nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] << 4
    return packed.reshape(rows, columns // 2), scale
