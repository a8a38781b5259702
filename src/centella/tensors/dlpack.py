"""DLPack: memory handed to other libraries, and memory taken from them, without a copy.

A capsule that goes out is made by NumPy over memory that it never touches, and then told its true
device and dtype: NumPy's compiled deleter may run on any thread, while an exception is under way
and at the end of the process, where one written in Python may not. A capsule that comes in is read
here. Source: DLPack 1.0 (dlpack.h) and the array API's `__dlpack__`.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct

from centella.dtypes import ALL, DType, bf16
from centella.errors import DeviceError, DTypeError, ShapeError
from centella.specs import Shape, Spec, dense_strides

CPU, CUDA, CUDA_MANAGED = 1, 2, 13  # DLDeviceType
VERSIONED = (1, 0)
READ_ONLY, COPIED = 1, 2  # flags of version 1
_CODES: dict[str, int] = {"int": 0, "uint": 1, "float": 2, "bool": 6}
_BFLOAT = 4
_KNOWN: dict[tuple[int, int], DType] = {
    (_BFLOAT if d is bf16 else _CODES[d.kind], 8 * d.itemsize): d for d in ALL.values()
}
_SAID: dict[int, str] = {0: "int", 1: "uint", 2: "float", 3: "handle", 4: "bfloat", 5: "complex",
                         6: "bool"}  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_: ClassVar = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _Versioned(ctypes.Structure):
    _fields_: ClassVar = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


# A capsule keeps the pointer to its name, so the names live as long as the process.
_NAMES: dict[bytes, tuple[bytes, type[_Managed] | type[_Versioned]]] = {
    b"dltensor_versioned": (b"used_dltensor_versioned", _Versioned),
    b"dltensor": (b"used_dltensor", _Managed),
}
# Prototypes of our own: those on `ctypes.pythonapi` itself are shared with everybody.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Memory:
    """Bytes at an address, which `owner` keeps alive, as NumPy's and CUDA's array interfaces."""

    def __init__(
        self, address: int, shape: Shape, dtype: np.dtype[Any], strides: Shape, owner: Any
    ) -> None:
        self.owner: Any = owner
        self._interface: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "typestr": dtype.str,
            "strides": strides,
        }

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._interface

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._interface, "stream": None}  # whoever made this has waited


def _managed(capsule: Any) -> tuple[_Managed | _Versioned, int, bytes] | None:
    for name, (_, kind) in _NAMES.items():
        if _is_valid(capsule, name):
            pointer = _pointer_of(capsule, name)
            return kind.from_address(pointer), pointer, name
    return None


def export(
    address: int, spec: Spec, device: tuple[int, int], owner: Any, *, versioned: bool, flags: int
) -> Any:
    """A capsule over memory.

    Args:
        address: of the first element.
        device: its type and number, as DLPack counts them.
        owner: lives until the consumer is done with the memory.
        versioned: version 1.0, which has flags; else the form before it, which has none.
        flags: READ_ONLY and COPIED.
    """
    item = spec.dtype.itemsize
    strides = tuple(s * item for s in spec.strides)
    array = np.asarray(Memory(address, spec.shape, spec.dtype.numpy, strides, owner))
    capsule = array.__dlpack__(max_version=VERSIONED if versioned else None)
    managed = _managed(capsule)
    assert managed is not None, "NumPy made this capsule a moment ago"
    content = managed[0]
    content.tensor.device_type, content.tensor.device_id = device
    if spec.dtype is bf16:
        content.tensor.code = _BFLOAT
    if isinstance(content, _Versioned):
        content.flags = flags
    return capsule


class Borrowed:
    """A consumed capsule: its producer's deleter runs when nothing refers to this any more."""

    def __init__(self, pointer: int, deleter: int | None) -> None:
        self._pointer = pointer
        self._deleter = _Deleter(deleter) if deleter else None

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._pointer)


class Foreign(Struct, frozen=True):
    """Memory of another library's.

    Attributes:
        address: of the first element.
        strides: in elements.
        device: type and number, as DLPack counts them.
        owner: keeps the memory alive.
    """

    address: int
    shape: Shape
    strides: Shape
    dtype: DType
    device: tuple[int, int]
    owner: Borrowed

    @property
    def span(self) -> int:
        """Elements from the first to one past the last."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def bytes(self, alignment: int) -> tuple[Memory, int]:
        """Its memory, flat, from an address of this alignment on; bytes to the first element."""
        lead = self.address % alignment
        size = (lead + self.span * self.dtype.itemsize,)
        return Memory(self.address - lead, size, np.dtype(np.uint8), (1,), self.owner), lead


def take(capsule: Any) -> Foreign:
    """Consume a capsule.

    Raises:
        DeviceError: no capsule, a consumed one, or of a later version.
        DTypeError: its dtype has no storage type here.
        ShapeError: elements that overlap, run backwards, or lie between multiples of their size.
    """
    managed = _managed(capsule)
    if managed is None:
        raise DeviceError(f"from_dlpack: expected a DLPack capsule not used yet, got {capsule!r}")
    content, pointer, name = managed
    if isinstance(content, _Versioned) and content.major != VERSIONED[0]:
        raise DeviceError(f"from_dlpack: expected DLPack {VERSIONED[0]}.x, got {content.major}")
    _rename(capsule, _NAMES[name][0])
    owner = Borrowed(pointer, content.deleter)
    tensor = content.tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    dense = dense_strides(shape)
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else dense
    # The stride of an extent of 1 says nothing; libraries put anything there.
    strides = tuple(d if n == 1 else s for n, s, d in zip(shape, strides, dense, strict=True))
    address = (tensor.data or 0) + tensor.byte_offset
    dtype = _dtype(tensor)
    if 0 in shape:
        strides = dense
    _check_layout(shape, strides, address, dtype)
    return Foreign(address, shape, strides, dtype, (tensor.device_type, tensor.device_id), owner)


def _dtype(tensor: _Tensor) -> DType:
    kind = _KNOWN.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if kind is None:
        lanes = f"x{tensor.lanes}" if tensor.lanes != 1 else ""
        name = f"{_SAID.get(tensor.code, f'type {tensor.code} of ')}{tensor.bits}{lanes}"
        raise DTypeError(f"from_dlpack: {name} is not a storage type; expected {', '.join(ALL)}")
    return kind


def _check_layout(shape: Shape, strides: Shape, address: int, dtype: DType) -> None:
    # Sorted by stride, each dimension must step over all that the ones before it cover.
    covered = 1
    for stride, extent in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride < covered and 0 not in shape:
            raise ShapeError(
                f"from_dlpack: expected elements apart and in order, got strides {list(strides)} "
                f"for shape {list(shape)}; pass a contiguous copy"
            )
        covered += (extent - 1) * stride
    if address % dtype.itemsize:
        raise ShapeError(
            f"from_dlpack: expected {dtype.name} at a multiple of {dtype.itemsize} bytes, got "
            f"{address:#x}; pass a copy"
        )
