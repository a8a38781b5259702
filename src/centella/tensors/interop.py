"""Memory of other libraries as values, and values as memory for other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from centella.dtypes import DType
from centella.errors import DeviceError
from centella.record.values import Value
from centella.runtime.device import Device, open_devices
from centella.runtime.device import device as open_device
from centella.runtime.recorder import Seen
from centella.specs import Spec, dense_strides, strided
from centella.tensors import dlpack, views


def imported(
    native: Any, shape: int | Sequence[int], dtype: DType, offset: int,
    device: str | Device | None,
) -> Value:  # fmt: skip
    """Memory of the application's as a value of the device that it belongs to.

    Raises:
        DeviceError, DTypeError, ShapeError, LimitError: as `Tensor.from_buffer`.
    """
    extents = views.extents("from_buffer", shape)
    if device is not None:
        asked = [open_device(device)]
    else:
        asked = [open_device("cpu")] if isinstance(native, np.ndarray) else open_devices()
    refusals: list[DeviceError] = []
    for one in asked:
        try:
            return one.storage.import_buffer(native, extents, dtype, offset)
        except DeviceError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    raise DeviceError("; ".join(map(str, refusals)) or "from_buffer: no device is open")


def exported(
    seen: Seen, copied: Callable[[], Seen], where: tuple[int, int], stream: Any,
    version: tuple[int, int], copy: bool | None,
) -> Any:  # fmt: skip
    """A DLPack capsule over a value's memory, read-only, or over a copy.

    Args:
        copied: copies the value on its device.
        where: its device's type and number.
        stream, version, copy: as `Tensor.__dlpack__` takes them.

    Raises:
        BufferError: it needs a copy, which `copy` refuses.
    """
    versioned = version >= dlpack.VERSIONED
    shared = versioned and not copy and seen[0].cell is None
    if not shared and copy is False:
        raise BufferError("DLPack: values are immutable; ask for version 1.0 or a copy")
    # A copy on the CPU may be the value itself, so the array there is copied instead.
    on_host = where[0] == dlpack.CPU
    value, spec, offset = seen if shared or on_host else copied()
    address, owner = value.device.lend(value, stream)
    start = (value.offset + offset) * spec.dtype.itemsize
    if on_host and not shared:
        owner = strided(owner, spec, start).copy()
        address, start = owner.ctypes.data, 0
        spec = Spec(spec.shape, spec.dtype, dense_strides(spec.shape))
    flags = dlpack.READ_ONLY if shared else dlpack.COPIED
    return dlpack.export(address + start, spec, where, owner, versioned=versioned, flags=flags)
