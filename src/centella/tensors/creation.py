"""Making tensors: from host data, from other libraries' arrays, without data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from centella.dtypes import DType, dtype_of, f32, i32
from centella.errors import DeviceError, DTypeError, ShapeError
from centella.op.op import get
from centella.runtime.device import Device, current_device, open_devices
from centella.runtime.device import device as open_device
from centella.tensors import dlpack, views
from centella.tensors.arguments import number
from centella.tensors.tensor import Tensor, upload

Number = int | float


def _chosen(device: str | Device | None) -> Device:
    """The device a caller names, else the innermost open batch's, else the default one."""
    return current_device() if device is None else open_device(device)


def asarray(data: Any, dtype: Any = None, device: str | Device | None = None) -> Tensor:
    """A tensor on a device from an array, list or number; a snapshot is taken now.

    Args:
        data: NumPy array (any strides), nested list, number, or Tensor.
        dtype: storage dtype; needed where the data is float64 or int64 (Python lists become f32
            or i32). Floats to integers, as `astype` and on every device: truncated towards 0, what
            is beyond the range becomes its nearest end (300.7 as u8 is 255, -1.0 is 0), infinities
            too, and NaN becomes 0, without an error. Integers that do not fit raise. Floats
            beyond f16 or f32 become infinite. For bf16, pass float data (or its bits as uint16).
        device: where; default: a Tensor's own, the innermost open batch's, else the default one.

    Raises:
        DTypeError: float64 or int64 arrays without `dtype=`; integers that do not fit.
        ShapeError: a nested list with rows of unequal length.
    """
    if isinstance(data, Tensor):
        moved = data if device is None else data.to(device)
        return moved if dtype is None else moved.astype(dtype)
    return upload("asarray", data, dtype, _chosen(device))


def from_host(data: Any, dtype: Any = None, device: str | Device | None = None) -> Tensor:
    """Another name of `asarray`."""
    return asarray(data, dtype, device)


def from_dlpack(data: Any, *, device: str | Device | None = None) -> Tensor:
    """A tensor over another library's array, by DLPack: neither copied nor freed.

    Its elements stay where they are, strides included. The array lives until the last submission
    that reads it is done; its library leaves it unchanged until then. On CUDA, work that it has
    under way on the array is waited for on the device.

    Args:
        data: an array of NumPy, torch, CuPy ... on the CPU or CUDA, with `__dlpack__`.
        device: which of the devices that can read this memory; default: the CPU, or the one that
            is open on that GPU.

    Raises:
        DeviceError: no such array, or its memory is elsewhere.
        DTypeError: its dtype has no storage type here.
        ShapeError: elements that overlap or run backwards.
    """
    if not hasattr(data, "__dlpack__") or not hasattr(data, "__dlpack_device__"):
        raise DeviceError(f"from_dlpack: expected an array with __dlpack__, got {data!r}")
    kind, index = data.__dlpack_device__()
    where = _reader(int(kind), int(index), device)
    native = where.native
    foreign = dlpack.take(_capsule(data, None if native is None else native.stream))
    if 0 in foreign.shape:
        return empty(foreign.shape, foreign.dtype, where)
    memory, lead = foreign.bytes(1 if native is None else 16)
    owned = np.asarray(memory) if native is None else memory
    flat = Tensor.from_buffer(owned, foreign.span, foreign.dtype, offset=lead, device=where)
    return flat._view(foreign.shape, foreign.strides, 0)


def _reader(kind: int, index: int, device: str | Device | None) -> Device:
    """The device that reads memory which DLPack says is there.

    Raises:
        DeviceError: none does, or not the one named.
    """
    if kind not in (dlpack.CPU, dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise DeviceError(f"from_dlpack: expected memory of the CPU or CUDA, got DLPack's {kind}")
    home = "cpu" if kind == dlpack.CPU else f"cuda:{index}"
    if device is None:
        there = [] if home == "cpu" else [d for d in open_devices() if d.name == home]
        return there[0] if there else open_device(home)
    chosen = open_device(device)
    if chosen.name != home:
        raise DeviceError(f"from_dlpack: expected memory of {chosen.name}, got memory of {home}")
    return chosen


def _capsule(data: Any, stream: int | None) -> Any:
    """The capsule of an array, of the newest version that its library makes."""
    try:
        try:
            return data.__dlpack__(stream=stream, max_version=dlpack.VERSIONED)
        except TypeError:  # from before 1.0
            return data.__dlpack__(stream=stream)
    except (BufferError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        raise DeviceError(f"from_dlpack: {error}") from error


def empty(
    shape: int | Sequence[int], dtype: Any = f32, device: str | Device | None = None
) -> Tensor:
    """A tensor whose content is undefined: memory is reserved, nothing is copied."""
    kind = _stored("empty", shape, dtype)
    extents = views.extents("empty", shape)
    target = _chosen(device)
    spec = target.storage.spec(extents, kind)
    return Tensor(target.storage.reserve(spec), spec)


def full(
    shape: int | Sequence[int], fill: Number, dtype: Any = f32, device: str | Device | None = None
) -> Tensor:
    """A tensor with one value everywhere, made on the device: nothing is uploaded."""
    return _filled("full", shape, fill, dtype, device)


def _filled(
    op: str, shape: int | Sequence[int], fill: Number, dtype: Any, device: str | Device | None
) -> Tensor:
    kind = _stored(op, shape, dtype)
    target = _chosen(device)
    extents = views.extents(op, shape)
    attrs = {"shape": extents, "dtype": kind.name, "value": number(op, "fill", fill)}
    (value,) = target.recorder.record(get("fill"), [], attrs)
    return Tensor(value, value.spec)


def _stored(op: str, shape: Any, dtype: Any) -> DType:
    """The dtype that a caller gives behind a shape, which takes one argument."""
    if isinstance(dtype, int) and isinstance(shape, int):
        raise DTypeError(
            f"{op}: expected a dtype, got {dtype}; a shape is one argument, as in "
            f"({shape}, {dtype})"
        )
    return dtype_of(dtype)


def zeros(
    shape: int | Sequence[int], dtype: Any = f32, device: str | Device | None = None
) -> Tensor:
    """A tensor of zeros, made on the device."""
    return _filled("zeros", shape, 0, dtype, device)


def ones(
    shape: int | Sequence[int], dtype: Any = f32, device: str | Device | None = None
) -> Tensor:
    """A tensor of ones, made on the device."""
    return _filled("ones", shape, 1, dtype, device)


def arange(
    start: Number, stop: Number | None = None, step: Number = 1, dtype: Any = None,
    device: str | Device | None = None,
) -> Tensor:  # fmt: skip
    """start, start + step, ... before stop, made on the device: nothing is uploaded.

    Args:
        start: where it begins; with no `stop`, where it ends, from 0 on.
        dtype: any but bool; its range must hold every value. Floats are counted in f32. None: i32,
            or f32 where one of the three is a float.

    Raises:
        ShapeError: for a step of 0, or a number of values that is not finite.
        DTypeError: for bool, or numbers that the dtype cannot hold.
    """
    low, high = (0, start) if stop is None else (start, stop)
    first, end, by = (
        number("arange", name, value)
        for name, value in (("start", low), ("stop", high), ("step", step))
    )
    if by == 0 or not math.isfinite((end - first) / by):
        raise ShapeError(f"arange: expected an end and a step, got {first}, {end}, {by}")
    size = max(math.ceil((end - first) / by), 0)
    if dtype is None:
        dtype = f32 if any(isinstance(x, float) for x in (first, end, by)) else i32
    target = _chosen(device)
    attrs = {"start": first, "step": by, "size": size, "dtype": dtype_of(dtype).name}
    (value,) = target.recorder.record(get("arange"), [], attrs)
    return Tensor(value, value.spec)
