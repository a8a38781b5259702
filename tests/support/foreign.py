"""What another library owns: memory that a driver made, arrays as DLPack and CUDA show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import centella as ct

Array = np.ndarray[Any, Any]


class Owner:
    """Something that a weak reference can watch."""


class Watched(np.ndarray[Any, Any]):
    """An array that a weak reference can watch."""


class Exporter:
    """An array of another library, as DLPack sees it.

    Args:
        capsule: makes one for (stream, max_version).
    """

    def __init__(self, device: tuple[int, int], capsule: Callable[..., Any]) -> None:
        self.device = device
        self.capsule = capsule
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.asked.append(stream)
        return self.capsule(stream, max_version)


class CudaArray:
    """Memory of the application's, as CUDA libraries show it."""

    def __init__(self, tensor: ct.Tensor) -> None:
        self.tensor = tensor
        address, offset = tensor.native
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3, "shape": tensor.shape, "typestr": "<f4", "strides": None,
            "data": (address + offset, False),
        }  # fmt: skip


def wgpu_buffer(native: Any, data: Array, usage: str = "STORAGE COPY_SRC") -> Any:
    """A buffer of a wgpu device, with data in it."""
    import wgpu

    flags = 0
    for name in usage.split():
        flags |= getattr(wgpu.BufferUsage, name)
    return native.create_buffer_with_data(data=data, usage=flags)


def foreign(device: ct.Device, data: Array) -> Any:
    """Memory that centella did not make, of any device, with data in it."""
    kind = device.name.partition(":")[0]
    if kind == "webgpu":
        return wgpu_buffer(device.native, data)
    if kind == "cuda":
        return CudaArray(ct.asarray(data, device=device))
    return data.copy().view(Watched)
