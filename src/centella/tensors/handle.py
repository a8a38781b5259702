"""`Handle`: a tensor without operations: data on a device, its views, its way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from msgspec import Struct, field

from centella.dtypes import Array, dtype_of
from centella.errors import ContractError, DeviceError, DTypeError, ShapeError
from centella.record.history import Event, happened, history
from centella.record.values import READY, Value
from centella.runtime.device import Device, devices
from centella.runtime.device import device as open_device
from centella.runtime.readback import Seen, read_back
from centella.specs import Described, Shape, Spec, view_spec
from centella.tensors import views
from centella.tensors.display import as_html, values_of


def _refused() -> Any:
    """What stands for a missing field: a call by a user, who has data and no Value."""
    raise DTypeError("Tensor: the class is not to be called; ct.asarray(data) makes one")


class Handle(Described, Struct, eq=False, weakref=True):
    """What refers to a value: what and where it is, what has happened to it, views of it.

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
    ) -> Self:  # fmt: skip
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
        kind = dtype_of(dtype)
        extents = views.extents("from_buffer", shape)
        if device is not None:
            where = [open_device(device)]
        else:
            where = [open_device("cpu")] if isinstance(native, np.ndarray) else devices()
        refusals: list[DeviceError] = []
        for one in where:
            try:
                value = one.storage.import_buffer(native, extents, kind, offset)
            except DeviceError as error:
                refusals.append(error)
            else:
                return cls(value, value.spec)
        if len(refusals) == 1:
            raise refusals[0]
        raise DeviceError("; ".join(map(str, refusals)) or "from_buffer: no device is open")

    # -- what it is -------------------------------------------------------------------------------

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
        if not name or not isinstance(name, str):
            raise ContractError(f"record_launch: expected the name of a kernel, got {name!r}")
        if not self.is_resident:
            raise ContractError(
                f"record_launch: {name} cannot have run on a tensor that is {self._value.state}; "
                f".native computes it"
            )
        happened([(self._value, 0)], "launched", name)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor of rank 0")
        return self.shape[0]

    def __repr__(self) -> str:
        values = self._shown()
        lead = ":\n " if "\n" in values else ": " if values else ""
        return f"<{self._heading()}{lead}{values}>"

    def _repr_html_(self) -> str:
        return as_html(self._heading(), self._shown())

    def _heading(self) -> str:
        what = f"{type(self).__name__} {list(self.shape)} {self.dtype.name}"
        return f"{what} on {self.device.name}, {self._value.state}"

    def _shown(self) -> str:
        """Its values, where they lie in the host's memory; "" for what would have to be copied."""
        array = self.device.glance(*self._seen)
        return "" if array is None else values_of(array, self.dtype)

    # -- values -----------------------------------------------------------------------------------

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

    def __iter__(self) -> Iterator[Self]:
        if not self.shape:
            raise TypeError("iteration over a tensor of rank 0")
        return (self[i] for i in range(self.shape[0]))

    def __eq__(self, other: object) -> bool:
        raise TypeError(
            "== between tensors is not defined, as containers would call it: use ct.eq(x, y), or "
            "`is` for the objects"
        )

    def __ne__(self, other: object) -> bool:
        raise TypeError(
            "!= between tensors is not defined, as containers would call it: use ct.ne(x, y), or "
            "`is not` for the objects"
        )

    def __hash__(self) -> int:
        return object.__hash__(self)

    # -- views ------------------------------------------------------------------------------------

    def _view(self, shape: Shape, strides: Shape, offset: int) -> Self:
        value, kind = self._value, self.spec.dtype
        whole = (value.offset + offset) * kind.itemsize % 16 == 0
        if value.buffer is not None and value.buffer.nbytes % 16:  # imported: its end is no chunk
            whole = False
        return type(self)(value, view_spec(shape, kind, strides, whole), offset)

    def permute(self, *axes: int | Sequence[int]) -> Self:
        """Dimensions in another order: a view.

        Raises:
            ShapeError: not each axis once.
        """
        order = views.integers("permute", "axes", axes)
        return self._view(*views.permuted(self.spec, order), self._offset)

    @property
    def T(self) -> Self:  # noqa: N802  # as NumPy calls it
        """The last two dimensions swapped: a view."""
        if self.ndim < 2:
            return self
        return self.permute(*range(self.ndim - 2), -1, -2)

    def __getitem__(self, key: Any) -> Self:
        """Basic indexing (integers, slices with positive step, None, ...): a view."""
        shape, strides, offset = views.indexed(self.spec, key)
        return self._view(shape, strides, self._offset + offset)
