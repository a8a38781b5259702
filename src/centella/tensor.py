"""`Tensor`: an immutable array on a device, computed when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from centella import views
from centella.device import Device, current_device, devices
from centella.device import device as open_device
from centella.dtypes import DType, dtype_of, f32, from_host_array, promote, widen
from centella.errors import CentellaError, DeviceError, DTypeError, ShapeError
from centella.op import Op, get
from centella.pending import Pending
from centella.recording import READY, Recording, Value
from centella.specs import Shape, Spec, rows_aligned
from centella.submission import Array, Ticket

Scalar = int | float | bool
COMPACT = 64 << 10


class Tensor:
    """An immutable array on a device: shape, dtype, operators, `.numpy()`.

    Arithmetic records operations; they run together when a value is needed. `x += y` rebinds x.
    Make one with `ct.asarray`, `ct.empty`, or an operation.

    Attributes:
        spec: shape, dtype and strides.
    """

    __slots__ = ("__weakref__", "_offset", "_value", "spec")
    __array_ufunc__ = None  # `array + tensor` comes to our operator, which says what to do

    def __init__(self, value: Value, spec: Spec, offset: int = 0) -> None:
        self._value = value
        self._offset = offset
        self.spec = spec

    @classmethod
    def from_buffer(
        cls, native: Any, shape: int | Sequence[int], dtype: Any, *, offset: int = 0,
        device: str | Device | None = None,
    ) -> Tensor:  # fmt: skip
        """A tensor over memory that the application owns: neither copied nor freed.

        The memory lives (`native` is referred to) until the last submission that reads it is done;
        the application leaves it unchanged until then.

        Args:
            native: a wgpu buffer with usage STORAGE and COPY_SRC, a CUDA array or pointer, or for
                the CPU a C-contiguous NumPy array.
            shape: rows follow one another without padding.
            offset: bytes to the first element.
            device: default: the open device that it belongs to; the CPU for a NumPy array.

        Raises:
            DeviceError: it belongs to no open device, or cannot be bound and read.
            ShapeError: it has fewer bytes than the shape needs.
        """
        kind = dtype_of(dtype)
        extents = extents_of("from_buffer", shape)
        if device is not None:
            where = [open_device(device)]
        else:
            where = [open_device("cpu")] if isinstance(native, np.ndarray) else devices()
        failed: CentellaError = DeviceError("from_buffer: no device is open")
        for one in where:
            try:
                value = one.import_buffer(native, extents, kind, offset)
            except DeviceError as error:
                failed = error
            else:
                return cls(value, value.spec)
        raise failed

    # -- what it is -------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        """Extents of each dimension."""
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        """Storage type of the elements."""
        return self.spec.dtype

    @property
    def device(self) -> Device:
        """The device it lives on."""
        return self._value.device  # type: ignore[no-any-return]  # a Value is below Device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.spec.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    @property
    def nbytes(self) -> int:
        """Logical bytes, without padding."""
        return self.spec.nbytes

    @property
    def size_bytes(self) -> int:
        """`nbytes`, as the floor systems spell it."""
        return self.spec.nbytes

    @property
    def is_resident(self) -> bool:
        """True once its data is in device memory, or submitted work will put it there."""
        return self._value.state == READY

    @property
    def native(self) -> tuple[Any, int]:
        """The driver's buffer (or address) and the byte offset of the first element.

        Memory stays valid while the tensor lives; it is not to be written. On the CPU it is a
        read-only array, complete when this returns.
        """
        shown = self.device.native_of(self._value)
        return shown, (self._value.offset + self._offset) * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor of rank 0")
        return self.shape[0]

    def __repr__(self) -> str:
        state = self._value.state
        return f"<Tensor {list(self.shape)} {self.dtype.name} on {self.device.name}, {state}>"

    # -- values -----------------------------------------------------------------------------------

    def numpy(self) -> Array:
        """The data on the host: a copy that the caller owns (bf16 comes as float32)."""
        return fetch(self).result()[0]

    def to_host(self) -> Array:
        """`numpy`, as the floor systems spell it."""
        return self.numpy()

    def peek(self) -> Array:
        """`numpy` for debugging: counted apart, permitted inside `ct.forbid("transfer")`."""
        return _fetch((self,), peek=True).result()[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """What `np.asarray(tensor)` gives: a copy, counted like `numpy`."""
        if copy is False:
            raise ValueError("a tensor's data is on a device: NumPy gets a copy or nothing")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        """The data as nested Python lists."""
        return self.numpy().tolist()

    def item(self) -> Any:
        """The only element as a Python number.

        Raises:
            ShapeError: for more than one element, or none.
        """
        if self.size != 1:
            raise ShapeError(f"item: expected one element, got shape {list(self.shape)}")
        return self.numpy().reshape(-1)[0].item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __iter__(self) -> Iterator[Tensor]:
        if not self.shape:
            raise TypeError("iteration over a tensor of rank 0")
        return (self[i] for i in range(self.shape[0]))

    def __eq__(self, other: object) -> bool:
        raise TypeError(
            "== between tensors is not defined: compare x.numpy(), or the objects with `is`"
        )

    def __ne__(self, other: object) -> bool:
        raise TypeError(
            "!= between tensors is not defined: compare x.numpy(), or the objects with `is not`"
        )

    __hash__ = object.__hash__

    def to(self, where: str | Device) -> Tensor:
        """This tensor on another device: a counted copy through the host."""
        target = open_device(where)
        if target is self.device:
            return self
        return asarray(self.numpy(), dtype=self.dtype, device=target)

    def copy(self) -> Tensor:
        """A copy in memory of its own."""
        return apply("copy", self)

    def contiguous(self) -> Tensor:
        """This tensor in its device's own layout; itself where it already is."""
        if self._offset == 0 and self.spec == self.device.spec(self.shape, self.dtype):
            return self
        return apply("copy", self)

    def astype(self, dtype: Any) -> Tensor:
        """Converted to another dtype: floats to integers truncate, NaN gives 0."""
        target = dtype_of(dtype)
        return self if target is self.dtype else apply("cast", self, dtype=target.name)

    # -- views ------------------------------------------------------------------------------------

    def _view(self, shape: Shape, strides: Shape, offset: int) -> Tensor:
        start = self._value.offset + offset
        aligned = rows_aligned(shape, strides, self.dtype.itemsize, start)
        buffer = self._value.buffer
        if buffer is not None and buffer.nbytes % 16:  # imported: its last chunk is not whole
            aligned = False
        return Tensor(self._value, Spec(shape, self.dtype, strides, aligned), offset)

    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        """The same elements in another shape; one extent may be -1. A view where possible.

        Raises:
            ShapeError: when the sizes differ.
        """
        wanted = views.extents("reshape", shape, self.size)
        if wanted == self.shape:
            return self
        strides = views.reshaped(self.spec, wanted)
        if strides is not None:
            return self._view(wanted, strides, self._offset)
        return apply("reshape", self, shape=wanted)

    def permute(self, *axes: int | Sequence[int]) -> Tensor:
        """Dimensions in another order: a view.

        Raises:
            ShapeError: not each axis once.
        """
        order = views.order_of(axes, self.ndim)
        return self._view(
            tuple(self.shape[a] for a in order),
            tuple(self.spec.strides[a] for a in order),
            self._offset,
        )

    @property
    def T(self) -> Tensor:  # noqa: N802  # as NumPy calls it
        """The last two dimensions swapped: a view."""
        if self.ndim < 2:
            return self
        order = list(range(self.ndim))
        order[-2:] = order[-1], order[-2]
        return self.permute(*order)

    def __getitem__(self, key: Any) -> Tensor:
        """Basic indexing (integers, slices with positive step, None, ...): a view."""
        shape, strides, offset = views.indexed(self.spec, key)
        return self._view(shape, strides, self._offset + offset)

    # -- arithmetic -------------------------------------------------------------------------------

    def __add__(self, other: Tensor | Scalar) -> Tensor:
        return binary("add", self, other)

    def __radd__(self, other: Scalar) -> Tensor:
        return binary("add", other, self)

    def __sub__(self, other: Tensor | Scalar) -> Tensor:
        return binary("sub", self, other)

    def __rsub__(self, other: Scalar) -> Tensor:
        return binary("sub", other, self)

    def __mul__(self, other: Tensor | Scalar) -> Tensor:
        return binary("mul", self, other)

    def __rmul__(self, other: Scalar) -> Tensor:
        return binary("mul", other, self)

    def __truediv__(self, other: Tensor | Scalar) -> Tensor:
        return binary("div", self, other)

    def __rtruediv__(self, other: Scalar) -> Tensor:
        return binary("div", other, self)

    def __neg__(self) -> Tensor:
        return apply("neg", self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return apply("matmul", self, other)

    # -- DLPack: the CPU's memory, read-only ------------------------------------------------------

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.device.caps.target != "numpy":
            raise BufferError(f"DLPack: {self.device.name} does not export memory; use .numpy()")
        return 1, 0

    def __dlpack__(
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None, copy: bool | None = None,
    ) -> Any:  # fmt: skip
        """The CPU's memory itself where the consumer can be told that it is read-only."""
        self.__dlpack_device__()
        if self.dtype.name == "bf16":
            raise BufferError("DLPack: bf16 has no NumPy type; use .numpy()")
        shared = not copy and max_version is not None and max_version >= (1, 0)
        if not shared and copy is False:
            raise BufferError("DLPack: values are immutable; ask for version 1.0 or a copy")
        array = self._shared() if shared else self.numpy()
        return array.__dlpack__(max_version=max_version, dl_device=dl_device)

    def _shared(self) -> Array:
        flat, start = self.native
        if not self.size:
            return np.empty(self.shape, self.dtype.numpy)
        strides = tuple(s * self.dtype.itemsize for s in self.spec.strides)
        array: Array = np.ndarray(self.shape, self.dtype.numpy, flat.data, start, strides)
        return array


def extents_of(op: str, shape: int | Sequence[int]) -> Shape:
    """The extents that a caller gives: one number, or several.

    Raises:
        ShapeError: for what is no extent.
    """
    found = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if any(not isinstance(n, (int, np.integer)) for n in found) or min(found, default=0) < 0:
        raise ShapeError(f"{op}: expected extents of 0 or more, got {list(found)}")
    return tuple(int(n) for n in found)


# -- recording ------------------------------------------------------------------------------------


def apply(name: str, *tensors: Tensor, **attrs: Any) -> Tensor:
    """Record an op of one output."""
    return apply_all(get(name), tensors, attrs)[0]


def apply_all(
    op: Op, tensors: Sequence[Tensor], attrs: dict[str, Any], target: Recording | None = None
) -> tuple[Tensor, ...]:
    """Record an op; a copy is recorded first for an operand whose layout it does not take."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            _ = getattr(tensor, "spec", None)  # a Parameter without data says so itself
            raise DTypeError(
                f"{op.name}: expected a Tensor, got {type(tensor).__name__}; ct.asarray makes one"
            )
    where: Device = tensors[0]._value.device
    form = where.form(op, tuple([t.spec for t in tensors]), attrs)
    if form.copies:
        tensors = [
            t.copy() if i in form.copies and t._value.device is where else t
            for i, t in enumerate(tensors)
        ]
        form = where.form(op, tuple([t.spec for t in tensors]), attrs)
    made = where.add(form, [(t._value, t._offset) for t in tensors], target)
    return tuple([Tensor(v, v.spec) for v in made])


def binary(name: str, a: Any, b: Any) -> Tensor:
    """An element-wise op of two operands, of which one may be a Python number."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        common = promote(name, a.dtype, b.dtype)
        return apply(name, a.astype(common), b.astype(common))
    if isinstance(a, Tensor):
        return apply(name, a, second=_number(name, b, a.dtype))
    if isinstance(b, Tensor):
        return apply(name, b, first=_number(name, a, b.dtype))
    raise DTypeError(f"{name}: expected a Tensor, got {type(a).__name__} and {type(b).__name__}")


def _number(name: str, value: Any, dtype: DType) -> Scalar:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int)) or (isinstance(value, float) and dtype.is_float):
        return value
    if isinstance(value, np.ndarray):
        raise DTypeError(f"{name}: expected a Tensor, got a NumPy array; ct.asarray makes one")
    raise DTypeError(
        f"{name}: expected a Tensor or a Python number that fits {dtype.name}, got {value!r}"
    )


# -- from the host --------------------------------------------------------------------------------


def asarray(data: Any, dtype: Any = None, device: str | Device | None = None) -> Tensor:
    """A tensor on a device from an array, list or number; a snapshot is taken now.

    Args:
        data: NumPy array (any strides), nested list, number, or Tensor.
        dtype: storage dtype; needed where the data is float64 or int64 (Python lists become f32
            or i32). For bf16, pass float data (or its bits as uint16) with `dtype="bf16"`.
        device: where; default: a Tensor's own, the innermost open batch's, else the default one.

    Raises:
        DTypeError: float64 or int64 arrays without `dtype=`; integers that do not fit.
        ShapeError: a nested list with rows of unequal length.
    """
    if isinstance(data, Tensor):
        moved = data if device is None else data.to(device)
        return moved if dtype is None else moved.astype(dtype)
    array, kind = from_host_array("asarray", data, dtype)
    target = current_device() if device is None else open_device(device)
    spec = target.spec(array.shape, kind)
    return Tensor(target.upload(array, spec), spec)


def from_host(data: Any, dtype: Any = None, device: str | Device | None = None) -> Tensor:
    """Another name of `asarray`, as the floor systems spell it."""
    return asarray(data, dtype, device)


def from_dlpack(data: Any) -> Tensor:
    """A tensor over another library's array on the CPU, by DLPack: neither copied nor freed.

    Raises:
        DeviceError: the array is not on the CPU.
        DTypeError: its dtype has no storage type here.
    """
    try:
        array = np.from_dlpack(data)
    except (BufferError, RuntimeError, AttributeError, TypeError) as error:
        raise DeviceError(f"from_dlpack: expected an array on the CPU: {error}") from error
    _, kind = from_host_array("from_dlpack", array[:0] if array.ndim else array, None)
    return Tensor.from_buffer(np.ascontiguousarray(array), array.shape, kind, device="cpu")


def empty(
    shape: int | Sequence[int], dtype: Any = f32, device: str | Device | None = None
) -> Tensor:
    """A tensor whose content is undefined: memory is reserved, nothing is copied."""
    kind = dtype_of(dtype)
    extents = extents_of("empty", shape)
    target = current_device() if device is None else open_device(device)
    spec = target.spec(extents, kind)
    return Tensor(target.reserve(spec), spec)


def fetch(*tensors: Tensor) -> Pending[list[Array]]:
    """Several results on the host, in one submission a device.

    Returns:
        A Pending of NumPy arrays, in order; `.result()` waits, or await it.

    Raises:
        ContractError: for a tensor of a batch that has not been executed.
        TransferForbidden: inside `ct.forbid("transfer")`.
    """
    return _fetch(tensors, peek=False)


def _fetch(tensors: Sequence[Tensor], *, peek: bool) -> Pending[list[Array]]:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"fetch: expected a Tensor, got {type(tensor).__name__}")
    compact = [_compact(t) for t in tensors]
    where: dict[Device, list[int]] = {}
    for index, tensor in enumerate(compact):
        if tensor.size:
            where.setdefault(tensor.device, []).append(index)
        elif not tensor.is_resident:
            tensor.device.materialise(tensor._value)
    tickets: list[Ticket] = []
    places: dict[int, tuple[Ticket, int]] = {}
    for device, indices in where.items():
        reads = [(compact[i]._value, *_byte_range(compact[i])) for i in indices]
        tickets.append(device.read(reads, peek=peek))
        places.update({i: (tickets[-1], n) for n, i in enumerate(indices)})

    def finish() -> list[Array]:
        out: list[Array] = []
        for index, tensor in enumerate(compact):
            ticket, position = places.get(index, (None, 0))
            raw = np.empty(0, np.uint8) if ticket is None else ticket.data(position)
            out.append(_decode(raw, tensor.spec))
        return out

    return Pending(tickets, finish)


def _compact(tensor: Tensor) -> Tensor:
    """A sparse view is copied together on the device before it is read."""
    spec = tensor.spec
    recording = tensor._value.recording
    waits = recording is not None and recording.explicit
    if waits or spec.span <= 2 * spec.size or spec.span * spec.dtype.itemsize <= COMPACT:
        return tensor
    return apply_all(get("copy"), (tensor,), {}, tensor.device.implicit())[0]


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    item = tensor.dtype.itemsize
    return tensor._offset * item, tensor.spec.span * item


def _decode(raw: Array, spec: Spec) -> Array:
    item = spec.dtype.itemsize
    if spec.size == 0:
        return widen(np.empty(spec.shape, spec.dtype.numpy), spec.dtype)
    strides = tuple(s * item for s in spec.strides)
    array: Array = np.ndarray(spec.shape, spec.dtype.numpy, raw.data, 0, strides)
    if spec.dtype.name == "bf16":
        return widen(array, spec.dtype)
    return array if array.flags.c_contiguous else array.copy()


__all__ = [
    "Pending", "Tensor", "apply", "apply_all", "asarray", "binary", "empty", "fetch", "from_dlpack",
    "from_host",
]  # fmt: skip
