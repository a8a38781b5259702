"""`Tensor`: an immutable array on a device, computed when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct, field

import centella.ops  # noqa: F401  # every op is registered there
from centella.dtypes import Array, dtype_of, from_host_array
from centella.errors import DTypeError, ShapeError
from centella.record.history import Event, history, launched
from centella.record.recording import Recording
from centella.record.values import READY, Value
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.runtime.pending import Pending
from centella.runtime.readback import read_back
from centella.runtime.recorder import Seen
from centella.specs import Shape, Spec, view_spec
from centella.tensors import interop, views
from centella.tensors.display import as_html, as_text, shown
from centella.tensors.hints import numpy_ufunc, tensor_getattr
from centella.tensors.operands import (
    Scalar,
    Viewed,
    apply,
    apply_all,
    apply_preferred,
    apply_with,
    binary,
    compared,
    no_equality,
    no_item_assignment,
    not_a_tensor,
    operators,
    power,
)

__all__ = ["Tensor", "apply", "apply_all", "apply_preferred", "apply_with", "binary", "compared",
           "fetch", "not_a_tensor", "upload"]  # fmt: skip


def _refused() -> Any:
    """What stands for a missing field: a call by a user, who has data and no Value."""
    raise DTypeError("Tensor: the class is not to be called; ct.asarray(data) makes one")


class Tensor(Viewed, Struct, eq=False, weakref=True):
    """An immutable array on a device: shape, dtype, operators, `.numpy()`.

    Arithmetic records operations; they run together when a value is needed. `x += y` rebinds x.
    Make one with `ct.asarray`, `ct.empty`, or an operation.

    Attributes:
        spec: shape, dtype and strides.
    """

    _value: Value = field(default_factory=_refused)
    spec: Spec = field(default_factory=_refused)
    _offset: int = 0
    __rich_repr__: ClassVar[Any] = None  # a Struct's would show the fields: printers take `repr`

    @classmethod
    def from_buffer(
        cls, native: Any, shape: int | Sequence[int], dtype: Any, *, offset: int = 0,
        device: str | Device | None = None,
    ) -> Tensor:  # fmt: skip
        """A tensor over memory that the application owns: neither copied nor freed.

        The memory lives (`native` is referred to) until the last submission that reads it is done;
        the application leaves it unchanged until then.

        Args:
            native: a wgpu buffer with usage STORAGE and COPY_SRC; for CUDA an object with
                `__cuda_array_interface__`, or (address, bytes) of memory that the application
                keeps; for the CPU a C-contiguous NumPy array.
            shape: rows follow one another without padding.
            offset: bytes to the first element.
            device: default: the open device that it belongs to; the CPU for a NumPy array.

        Raises:
            DeviceError: it belongs to no open device, or cannot be bound and read.
            DTypeError: an array of another type; bytes (uint8) may hold any.
            ShapeError: it has fewer bytes than the shape needs.
            LimitError: on a GPU, more than 2^32 elements from the memory's begin to its end.
        """
        value = interop.imported(native, shape, dtype_of(dtype), offset, device)
        return cls(value, value.spec)

    @property
    def device(self) -> Device:
        """The device it lives on."""
        return self._value.device  # type: ignore[no-any-return]  # a Value is below Device

    @property
    def size_bytes(self) -> int:
        """Another name of `nbytes`."""
        return self.spec.nbytes

    @property
    def is_resident(self) -> bool:
        """True once its data is in device memory, or submitted work will put it there."""
        return self._value.state == READY

    @property
    def native(self) -> tuple[Any, int]:
        """The driver's buffer (or address) and the byte offset of the first element.

        Memory stays valid while the tensor lives; it is not to be written. On the CPU it is a
        read-only array, complete when this returns; on CUDA it is complete for what is put on
        `device.native.stream`.
        """
        shown = self.device.native_of(self._value)
        return shown, (self._value.offset + self._offset) * self.dtype.itemsize

    @property
    def history(self) -> tuple[Event, ...]:
        """How its data came to be, and each line that has read it back since, with its times.

        Views of the same data share it. What reads the data on the device is not part of it.
        """
        return history(self._value)

    @property
    def h2d_transfers(self) -> int:
        """Uploads that brought its data to the device: 1, or 0 for what was made there."""
        return sum(event.times for event in self.history if event.kind == "uploaded")

    @property
    def d2h_transfers(self) -> int:
        """Read-backs of its data; peeks are not counted."""
        return sum(event.times for event in self.history if event.kind == "downloaded")

    @property
    def kernel_launches(self) -> int:
        """Launches that computed it, and those of `record_launch`."""
        return sum(event.launches for event in self.history)

    def record_launch(self, name: str) -> None:
        """Note in its history that a kernel of the application's was launched on `native`.

        Raises:
            ContractError: it is not in device memory, or the kernel has no name.
        """
        launched(self._value, name)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor of rank 0")
        return self.shape[0]

    def __repr__(self) -> str:
        return as_text(*shown(type(self).__name__, *self._seen))

    def _repr_html_(self) -> str:
        return as_html(*shown(type(self).__name__, *self._seen))

    @property
    def _seen(self) -> Seen:
        """Its value, as it is seen."""
        return self._value, self.spec, self._offset

    def numpy(self) -> Array:
        """The data on the host: a copy that the caller owns (bf16 comes as float32)."""
        return read_back([self._seen]).result()[0]

    def to_host(self) -> Array:
        """Another name of `numpy`."""
        return self.numpy()

    def peek(self) -> Array:
        """`numpy` for debugging: counted apart, permitted inside `ct.forbid("transfer")`."""
        return read_back([self._seen], peek=True).result()[0]

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
        raise no_equality("==", "eq", "is")

    def __ne__(self, other: object) -> bool:
        raise no_equality("!=", "ne", "is not")

    def __hash__(self) -> int:
        return object.__hash__(self)

    def _view(self, shape: Shape, strides: Shape, offset: int) -> Tensor:
        value, kind = self._value, self.spec.dtype
        whole = (value.offset + offset) * kind.itemsize % 16 == 0
        if value.buffer is not None and value.buffer.nbytes % 16:  # imported: its end is no chunk
            whole = False
        return type(self)(value, view_spec(shape, kind, strides, whole), offset)

    def permute(self, *axes: int | Sequence[int]) -> Tensor:
        """Dimensions in another order: a view.

        Raises:
            ShapeError: not each axis once.
        """
        order = views.integers("permute", "axes", axes)
        return self._view(*views.permuted(self.spec, order), self._offset)

    @property
    def T(self) -> Tensor:  # noqa: N802  # as NumPy calls it
        """The last two dimensions swapped: a view."""
        return self if self.ndim < 2 else self.permute(*range(self.ndim - 2), -1, -2)

    def __getitem__(self, key: Any) -> Tensor:
        """Basic indexing (integers, slices with positive step, None, ...): a view."""
        shape, strides, offset = views.indexed(self.spec, key)
        return self._view(shape, strides, self._offset + offset)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return numpy_ufunc(ufunc, method, inputs, options)

    def to(self, where: str | Device) -> Tensor:
        """This tensor on another device: a counted copy through the host."""
        target = open_device(where)
        return self if target is self.device else upload("to", self.numpy(), self.dtype, target)

    def copy(self) -> Tensor:
        """A copy in memory of its own."""
        return apply("copy", self)

    def contiguous(self) -> Tensor:
        """This tensor in its device's own layout; itself where it already is."""
        if self._offset == 0 and self.spec == self.device.storage.spec(self.shape, self.dtype):
            return self
        return apply("copy", self)

    def astype(self, dtype: Any) -> Tensor:
        """Converted to another dtype: floats to integers truncate and saturate, NaN gives 0."""
        target = dtype_of(dtype)
        return self if target is self.dtype else apply("cast", self, dtype=target.name)

    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        """The same elements in another shape; one extent may be -1. A view where possible.

        Raises:
            ShapeError: when the sizes differ.
        """
        asked = views.integers("reshape", "extents", shape)
        wanted = views.completed("reshape", asked, self.size)
        if wanted == self.shape:
            return self
        strides = views.reshaped(self.spec, wanted)
        if strides is not None:
            return self._view(wanted, strides, self._offset)
        return apply("reshape", self, shape=wanted)

    if TYPE_CHECKING:

        def __add__(self, other: Tensor | Scalar) -> Tensor: ...
        def __radd__(self, other: Scalar) -> Tensor: ...
        def __sub__(self, other: Tensor | Scalar) -> Tensor: ...
        def __rsub__(self, other: Scalar) -> Tensor: ...
        def __mul__(self, other: Tensor | Scalar) -> Tensor: ...
        def __rmul__(self, other: Scalar) -> Tensor: ...
        def __truediv__(self, other: Tensor | Scalar) -> Tensor: ...
        def __rtruediv__(self, other: Scalar) -> Tensor: ...
        def __floordiv__(self, other: Tensor | Scalar) -> Tensor: ...
        def __rfloordiv__(self, other: Scalar) -> Tensor: ...
        def __mod__(self, other: Tensor | Scalar) -> Tensor: ...
        def __rmod__(self, other: Scalar) -> Tensor: ...
        def __and__(self, other: Tensor | bool) -> Tensor: ...
        def __or__(self, other: Tensor | bool) -> Tensor: ...
        def __lt__(self, other: Tensor | Scalar) -> Tensor: ...
        def __le__(self, other: Tensor | Scalar) -> Tensor: ...
        def __gt__(self, other: Tensor | Scalar) -> Tensor: ...
        def __ge__(self, other: Tensor | Scalar) -> Tensor: ...
        def __rpow__(self, other: Scalar) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
    else:
        vars().update(operators())

    def __pos__(self) -> Tensor:
        return self

    def __pow__(self, exponent: Tensor | Scalar) -> Tensor:
        return power(self, exponent)

    def __matmul__(self, other: Tensor) -> Tensor:
        return apply("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        raise not_a_tensor("matmul", other)

    if not TYPE_CHECKING:  # which is to say itself what a Tensor has not
        __getattr__ = tensor_getattr
        __setitem__ = no_item_assignment

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(
                f"format {spec!r} is of a number, got a Tensor: float(x) reads one, x.numpy() all"
            )
        return str(self)

    def __copy__(self) -> Tensor:
        return Tensor(self._value, self.spec, self._offset)

    def __deepcopy__(self, _: Any) -> Tensor:
        return self.copy()

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("the data of a Tensor is on a device: pickle x.numpy()")

    def __dlpack_device__(self) -> tuple[int, int]:
        where = self.device.backend.dlpack
        if where is None:
            raise BufferError(f"DLPack: {self.device.name} does not export memory; use .numpy()")
        return where

    def __dlpack__(
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None, copy: bool | None = None,
    ) -> Any:  # fmt: skip
        """The memory itself, where the consumer can be told that it is read-only; else a copy.

        Args:
            stream: where a consumer on CUDA works, which is made to wait for what is computed;
                -1: it has seen to that itself.

        Raises:
            BufferError: memory that is not exported, on another device, or without the copy that
                it needs: `copy=False` below version 1.0, or of a State.
        """
        where = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != where:
            raise BufferError(f"DLPack: expected device {where}, got {dl_device}; use .numpy()")
        version = max_version or (0, 0)
        return interop.exported(self._seen, lambda: self.copy()._seen, where, stream, version, copy)


def upload(
    op: str, data: Any, dtype: Any, device: Device, target: Recording | None = None,
    stays: bool = False,
) -> Tensor:  # fmt: skip
    """Host data as a tensor of a device, or of a recording on it; `stays`: it changes no more."""
    array, kind = from_host_array(op, data, dtype)
    spec = device.storage.spec(array.shape, kind)
    return Tensor(device.recorder.upload(array, spec, target, stays), spec)


def fetch(*tensors: Tensor) -> Pending[list[Array]]:
    """Several results on the host, in one submission a device.

    Returns:
        A Pending of NumPy arrays, in order; `.result()` waits, or await it.

    Raises:
        ContractError: for a tensor of a batch that has not been executed.
        TransferForbidden: inside `ct.forbid("transfer")`.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise not_a_tensor("fetch", tensor)
    return read_back([t._seen for t in tensors])
