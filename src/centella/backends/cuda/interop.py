"""What other libraries call a CUDA device, a stream and memory, in the driver's own terms."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella.backends.cuda.driver import check, driver
from centella.errors import DeviceError
from centella.specs import dense_strides

ORDINALS = 64  # an integer below is a device's ordinal, any other a context's handle
LEGACY, PER_THREAD = 1, 2  # the driver's handles of its two default streams
NO_WAIT, WAIT_FOR_ALL = 0, -1  # in place of a producer's stream
Pair = tuple[int | None, int | None]


class CudaNative(Struct, frozen=True):
    """A CUDA device as other libraries may use it: `device.native`.

    Attributes:
        ordinal: the driver's number of the device.
        context: handle of the CUcontext.
        stream: handle of the CUstream that work of this thread goes to now; all that was
            submitted before comes before what is put on it.
    """

    ordinal: int
    context: int
    stream: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """The stream, as cuda.core and others ask for it: version and handle."""
        return 0, self.stream


def ordinal_or_context(native: Any) -> Pair:
    """A device's ordinal, or the handle of a context, as an application names either.

    Raises:
        DeviceError: it names neither.
    """
    if isinstance(native, CudaNative):
        return native.ordinal, native.context
    if isinstance(native, driver.CUcontext):
        return None, _handle(native)
    if type(native).__name__ == "Context":  # cuda.core's
        return None, _handle(getattr(native, "handle", None) or 0)
    ordinal = native
    if getattr(native, "type", None) == "cuda":  # torch.device
        ordinal = _current_ordinal() if native.index is None else native.index
    for name in ("device_id", "id"):  # cuda.core's Device; CuPy's
        ordinal = getattr(native, name, ordinal)
    if isinstance(ordinal, driver.CUdevice):
        ordinal = int(ordinal)
    if isinstance(ordinal, bool) or not isinstance(ordinal, int) or ordinal < 0:
        raise DeviceError(
            f"cuda: expected an ordinal, a CUDA device or a CUcontext as native=, got {native!r}"
        )
    return (ordinal, None) if ordinal < ORDINALS else (None, ordinal)


def _handle(context: Any) -> int:
    if not int(context):
        raise DeviceError("cuda: expected a CUcontext as native=, got a null one")
    return int(context)


def _current_ordinal() -> int:
    """The device of the context that is current on this thread, else the first."""
    check(driver.cuInit(0))
    if not int(check(driver.cuCtxGetCurrent()) or 0):
        return 0
    return int(check(driver.cuCtxGetDevice()))


def stream_of(stream: object) -> int:
    """The handle of a stream: an integer, or a stream object of another library.

    Raises:
        DeviceError: neither, or the per-thread default stream.
    """
    handle: Any = stream
    interface: Any = getattr(stream, "__cuda_stream__", None)
    if interface is not None:
        pair: Any = interface() if callable(interface) else interface
        handle = pair[1]
    elif not isinstance(stream, int):
        for name in ("cuda_stream", "ptr"):  # older torch; CuPy
            handle = getattr(stream, name, handle)
        if isinstance(handle, driver.CUstream):
            handle = int(handle)
    if isinstance(handle, bool) or not isinstance(handle, int) or handle < 0:
        raise DeviceError(f"stream: expected a CUDA stream or its handle, got {stream!r}")
    if handle == PER_THREAD:
        raise DeviceError(
            "stream: expected a stream that every thread can name, got the per-thread default one"
        )
    return handle or LEGACY


def memory_of(native: object) -> tuple[int, int, int]:
    """Address, bytes, and the stream that still writes them, or NO_WAIT or WAIT_FOR_ALL.

    Args:
        native: (address, bytes), or an object with the CUDA array interface.

    Raises:
        DeviceError: it is neither, or not contiguous.
    """
    if isinstance(native, tuple):
        if len(native) != 2 or not all(type(n) is int for n in native):
            raise DeviceError(f"cuda: expected (address, bytes) to import, got {native!r}")
        return native[0], native[1], WAIT_FOR_ALL
    interface = getattr(native, "__cuda_array_interface__", None)
    if interface is None:
        raise DeviceError(
            f"cuda: expected (address, bytes) or an object with __cuda_array_interface__ to "
            f"import, got {native!r}"
        )
    if interface.get("mask") is not None:
        raise DeviceError("cuda: expected an array without a mask to import")
    item = np.dtype(interface["typestr"]).itemsize
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    dense = tuple([item * step for step in dense_strides(shape)])
    if strides is not None and tuple(strides) != dense:
        raise DeviceError(
            f"cuda: expected a C-contiguous array to import, got strides {tuple(strides)} for "
            f"shape {shape}; pass .contiguous(), or use from_dlpack"
        )
    nbytes = item * int(np.prod(shape, dtype=np.int64))
    return int(interface["data"][0]), nbytes, _producer(interface)


def _producer(interface: dict[str, Any]) -> int:
    """The stream of a CUDA array interface; before version 3 it names none."""
    if interface.get("version", 0) < 3 or "stream" not in interface:
        return WAIT_FOR_ALL
    stream = interface["stream"]
    if stream is None:
        return NO_WAIT
    if not isinstance(stream, int) or stream <= 0:
        raise DeviceError(
            f"cuda: expected a stream of None or a handle above 0 in an array interface, got "
            f"{stream!r}"
        )
    return stream
