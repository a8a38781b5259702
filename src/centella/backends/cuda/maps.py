"""Tensor maps: what the copy engine must know of a launch's operands, made by the driver.

A launch's parameters say where an operand lies and how far it reaches, so that a map follows from
them and the address. A graph keeps those that it was captured with; other submissions find theirs
again, for as long as their operands lie where they did.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from centella.backends.base import Launch
from centella.backends.cuda.driver import check, driver
from centella.emit.ptx.layout import MAP_BYTES
from centella.lang.ir import HALF, MapParam, Sizes

MOST_KEPT = 4096
ALONE = 16  # bytes: a stride that nobody takes, of a dimension of one element
KINDS: dict[str, Any] = {
    "f16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    "bf16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
}
SWIZZLES: dict[int, Any] = {
    32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}


class TensorMaps:
    """The tensor maps of a device's launches."""

    def __init__(self) -> None:
        self._kept: dict[Any, bytes] = {}

    def of(self, bound: Launch, address_of: Callable[[int], int]) -> bytes:
        """The maps of a launch, as they lie in its parameters."""
        ir = bound.program.ir  # type: ignore[union-attr]  # not of the host
        words = np.frombuffer(bound.parameters, np.uint32)[1:]  # the first is the number of groups
        maps = b""
        for param in ir.maps:
            dtype = ir.args[param.argument].dtype
            start = address_of(bound.slots[param.argument])
            start += int(words[param.offset]) * dtype.itemsize
            extents, strides, box = param.layout(words)
            key = (param.kind, start, extents, strides, box, param.swizzle)
            encoded = self._kept.get(key)
            if encoded is None:
                if len(self._kept) == MOST_KEPT:
                    self._kept.clear()
                encoded = self._kept[key] = _encode(start, extents, strides, box, param)
            maps += encoded
        return maps


def _encode(start: int, extents: Sizes, strides: Sizes, box: Sizes, param: MapParam) -> bytes:
    """One map (CUDA driver API, cuTensorMapEncodeTiled)."""
    pairs = zip(extents[1:], strides[1:], strict=True)
    steps = [s * HALF if n > 1 else ALONE for n, s in pairs]
    encoded = check(driver.cuTensorMapEncodeTiled(
        KINDS[param.kind],
        len(extents),
        start,
        [driver.cuuint64_t(n) for n in extents],
        [driver.cuuint64_t(s) for s in steps],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * len(extents),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        SWIZZLES[param.swizzle],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    ))  # fmt: skip
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)
