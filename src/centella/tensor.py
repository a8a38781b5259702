"""`Tensor`: an immutable array on a device, computed when it is needed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from centella.ledger import count
from centella.device import Device, device
from centella.device import device as open_device
from centella.dtypes import DType, dtype_of, f32, from_numpy, narrow, promote, widen
from centella.errors import ContractError, DeviceError, DTypeError, ShapeError
from centella.op import Op, get
from centella.recording import PENDING, Value
from centella.specs import Shape, Spec, rows_aligned
from centella.submission import Ticket

Array = np.ndarray[Any, Any]
T = TypeVar("T")
Scalar = int | float | bool


class Pending(Generic[T]):
    """A result under way: `result(timeout=None)`, `done()`, or `await` it."""

    def __init__(self, tickets: Sequence[Ticket], finish: Callable[[], T]) -> None:
        self._tickets = tuple(tickets)
        self._finish = finish

    def done(self) -> bool:
        """True once the device has finished."""
        return all(t.done() for t in self._tickets)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the device and return the result.

        Raises:
            TimeoutError: after `timeout` seconds.
        """
        if not self.done():
            count(syncs=1)
        for ticket in self._tickets:
            ticket.wait(timeout)
        return self._finish()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.to_thread(self.result).__await__()


class Tensor:
    """An immutable array on a device: shape, dtype, operators, `.numpy()`.

    Arithmetic records operations; they run together when a value is needed. `x += y` rebinds x.
    Make one with `ct.asarray`, `ct.empty`, or an operation.
    """

    __slots__ = ("__weakref__", "_offset", "_value", "spec")
    __array_priority__ = 1000
    __hash__ = object.__hash__

    def __init__(self, value: Value, spec: Spec, offset: int = 0) -> None:
        self._value = value
        self._offset = offset
        self.spec = spec

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
    def native(self) -> tuple[Any, int]:
        """The driver's buffer (or address) and the byte offset of the first element."""
        self._materialise()
        start = (self._value.offset + self._offset) * self.dtype.itemsize
        return self._value.require().native, start

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor of rank 0")
        return self.shape[0]

    def __repr__(self) -> str:
        where = "pending" if self._value.state == PENDING else self._value.state
        return f"<Tensor {list(self.shape)} {self.dtype.name} on {self.device.name}, {where}>"

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    # -- values -----------------------------------------------------------------------------------

    def _materialise(self) -> None:
        if self._value.state == PENDING:
            recording = self._value.recording
            assert recording is not None
            if recording.explicit:
                self._value.require()
            self.device.flush(recording)

    def numpy(self) -> Array:
        """The data on the host: a copy that the caller owns (bf16 comes as float32)."""
        return fetch(self).result()[0]

    def tolist(self) -> Any:
        """The data as nested Python lists."""
        return self.numpy().tolist()

    def item(self) -> Any:
        """The only element as a Python number.

        Raises:
            ShapeError: for more than one element.
        """
        if self.size != 1:
            raise ShapeError(f"item: expected one element, got shape {list(self.shape)}")
        return self.numpy().reshape(-1)[0].item()

    def to(self, where: str | Device) -> Tensor:
        """This tensor on another device: a counted copy through the host."""
        target = device(where)
        if target is self.device:
            return self
        value = self.numpy()
        return asarray(value, dtype=self.dtype, device=target)

    def copy(self) -> Tensor:
        """A copy in memory of its own."""
        return apply("copy", self)

    def contiguous(self) -> Tensor:
        """This tensor in its device's own layout; itself where it already is."""
        plain = self.device.spec(self.shape, self.dtype)
        if self._offset == 0 and plain.strides == self.spec.strides and self.spec.aligned:
            return self
        return apply("copy", self)

    def astype(self, dtype: Any) -> Tensor:
        """Converted to another dtype: floats to integers truncate, NaN gives 0."""
        target = dtype_of(dtype)
        return self if target is self.dtype else apply("cast", self, dtype=target.name)

    # -- views ------------------------------------------------------------------------------------

    def _view(self, shape: Shape, strides: Shape, offset: int) -> Tensor:
        start = self._value.offset + offset
        spec = Spec(
            shape, self.dtype, strides, rows_aligned(shape, strides, self.dtype.itemsize, start)
        )
        return Tensor(self._value, spec, offset)

    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        """The same elements in another shape; one extent may be -1. A view where possible.

        Raises:
            ShapeError: when the sizes differ.
        """
        wanted = _shape_of(shape)
        if -1 in wanted:
            known = math.prod(n for n in wanted if n != -1)
            if wanted.count(-1) > 1 or known == 0 or self.size % known:
                raise ShapeError(f"reshape: {list(self.shape)} does not fit {list(wanted)}")
            wanted = tuple(self.size // known if n == -1 else n for n in wanted)
        if math.prod(wanted) != self.size:
            raise ShapeError(
                f"reshape: expected {self.size} elements, got shape {list(wanted)}"
            )
        if wanted == self.shape:
            return self
        strides = _reshaped_strides(self.spec, wanted)
        if strides is not None:
            return self._view(wanted, strides, self._offset)
        return apply("reshape", self, shape=wanted)

    def permute(self, *axes: int) -> Tensor:
        """Dimensions in another order: a view."""
        order = tuple(range(self.ndim))
        wanted = tuple(order[a] for a in _shape_of(axes))
        if sorted(wanted) != list(order):
            raise ShapeError(f"permute: expected an order of {self.ndim} axes, got {list(axes)}")
        return self._view(
            tuple(self.shape[a] for a in wanted),
            tuple(self.spec.strides[a] for a in wanted),
            self._offset,
        )

    @property
    def T(self) -> Tensor:
        """The last two dimensions swapped: a view."""
        if self.ndim < 2:
            return self
        order = list(range(self.ndim))
        order[-2:] = order[-1], order[-2]
        return self.permute(*order)

    def __getitem__(self, key: Any) -> Tensor:
        """Basic slicing (integers, slices with positive step, None, ...): a view."""
        items = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in items:
            at = items.index(Ellipsis)
            used = sum(1 for i in items if i is not None and i is not Ellipsis)
            items[at : at + 1] = [slice(None)] * (self.ndim - used)
        shape: list[int] = []
        strides: list[int] = []
        offset = self._offset
        axis = 0
        for item in items:
            if item is None:
                shape.append(1)
                strides.append(0)
                continue
            if axis >= self.ndim:
                raise IndexError(f"too many indices for shape {list(self.shape)}")
            extent, stride = self.shape[axis], self.spec.strides[axis]
            if isinstance(item, slice):
                start, stop, step = item.indices(extent)
                if step < 1:
                    raise ShapeError(f"slice: expected a positive step, got {step}")
                length = max(0, -(-(stop - start) // step))
                shape.append(length)
                strides.append(stride * step)
                offset += start * stride if length else 0
            elif isinstance(item, (int, np.integer)):
                place = int(item) + (extent if item < 0 else 0)
                if not 0 <= place < extent:
                    raise IndexError(f"index {item} is out of range for extent {extent}")
                offset += place * stride
            else:
                raise TypeError(f"expected integers and slices, got {item!r}")
            axis += 1
        shape += self.shape[axis:]
        strides += self.spec.strides[axis:]
        return self._view(tuple(shape), tuple(strides), offset)

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


def _shape_of(args: Sequence[Any]) -> Shape:
    first = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    return tuple(int(n) for n in first)


def _reshaped_strides(spec: Spec, shape: Shape) -> Shape | None:
    """Strides of a reshape without moving data, or None."""
    if spec.size == 0:
        return tuple(0 for _ in shape)
    old = [(n, s) for n, s in zip(spec.shape, spec.strides, strict=True) if n != 1]
    strides: list[int] = []
    at = 0
    pending = [n for n in shape]
    i = 0
    while i < len(pending):
        if pending[i] == 1:
            strides.append(0)
            i += 1
            continue
        j, product = i, 1
        group_old = 0
        extent = 1
        while extent != product or group_old == 0:
            if product < extent or group_old == 0 and product == 1 and j == i:
                product *= pending[j]
                j += 1
            if extent < product:
                extent *= old[at + group_old][0]
                group_old += 1
        block = old[at : at + group_old]
        for (_, s0), (n1, s1) in zip(block, block[1:], strict=False):
            if s0 != n1 * s1:
                return None
        step = block[-1][1]
        inner: list[int] = []
        for n in reversed(pending[i:j]):
            inner.append(step)
            step *= n
        strides += reversed(inner)
        at += group_old
        i = j
    return tuple(strides)


def apply(name: str, *tensors: Tensor, **attrs: Any) -> Tensor:
    """Record an op of one output."""
    return apply_all(get(name), tensors, attrs)[0]


def apply_all(op: Op, tensors: Sequence[Tensor], attrs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Record an op; a copy is recorded first for an operand whose layout it does not take."""
    where = tensors[0].device
    host = where.caps.target == "numpy"
    fitting = [
        t if host or op.takes(i, t.spec) or t.device is not where else t.contiguous()
        for i, t in enumerate(tensors)
    ]
    values = where.record(op, [(t._value, t.spec, t._offset) for t in fitting], attrs)
    return tuple(Tensor(v, v.spec) for v in values)


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
    raise DTypeError(
        f"{name}: expected a Tensor or a Python number that fits {dtype.name}, got {value!r}"
    )


def asarray(data: Any, dtype: Any = None, device: str | Device | None = None) -> Tensor:
    """A tensor on a device from an array, list or number; a snapshot is taken now.

    Args:
        data: NumPy array (any strides), nested list, number, or Tensor.
        dtype: storage dtype; needed where the data is float64 or int64 (Python lists become f32
            or i32). For bf16, pass float data with `dtype="bf16"`.
        device: where; default: the default device.

    Raises:
        DTypeError: for float64 or int64 arrays without `dtype=`.
    """
    target = open_device(device)
    if isinstance(data, Tensor):
        moved = data.to(target) if data.device is not target else data
        return moved if dtype is None else moved.astype(dtype)
    array = np.asarray(data)
    if dtype is None:
        if not isinstance(data, (np.ndarray, np.generic)):
            kinds = {"f": np.float32, "i": np.int32}
            array = array.astype(kinds.get(array.dtype.kind, array.dtype))
        kind = from_numpy(array.dtype)
    else:
        kind = dtype_of(dtype)
        same = kind.name == "bf16" and array.dtype == np.uint16
        array = array if same else narrow(array, kind)
    spec = target.spec(array.shape, kind)
    return Tensor(target.upload(array, spec), spec)


def from_host(data: Any, dtype: Any = None, device: str | Device | None = None) -> Tensor:
    """Another name of `asarray`, as the floor systems spell it."""
    return asarray(data, dtype, device)


def empty(shape: int | Sequence[int], dtype: Any = f32, device: str | Device | None = None
          ) -> Tensor:
    """A tensor whose content is undefined: memory is reserved, nothing is copied."""
    target = open_device(device)
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    spec = target.spec(extents, dtype_of(dtype))
    return Tensor(target.reserve(spec), spec)


def full(
    shape: int | Sequence[int], fill: Scalar, dtype: Any = f32, device: str | Device | None = None
) -> Tensor:
    """A tensor with one value everywhere."""
    kind = dtype_of(dtype)
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    plain = narrow(np.full(extents, fill, np.float32 if kind.is_float else kind.numpy), kind)
    return asarray(plain, dtype=kind, device=device)


def zeros(shape: int | Sequence[int], dtype: Any = f32, device: str | Device | None = None
          ) -> Tensor:
    """A tensor of zeros."""
    return full(shape, 0, dtype, device)


def _byte_range(spec: Spec, offset: int) -> tuple[int, int]:
    item = spec.dtype.itemsize
    return offset * item, spec.span * item


def _decode(raw: Array, spec: Spec) -> Array:
    item = spec.dtype.itemsize
    if spec.size == 0:
        return widen(np.empty(spec.shape, spec.dtype.numpy), spec.dtype)
    strides = tuple(s * item for s in spec.strides)
    array: Array = np.ndarray(spec.shape, spec.dtype.numpy, raw.data, 0, strides)
    if spec.dtype.name == "bf16":
        return widen(array, spec.dtype)
    return array if array.flags.c_contiguous else array.copy()


def fetch(*tensors: Tensor) -> Pending[list[Array]]:
    """Several results on the host, in one submission a device.

    Returns:
        A Pending of NumPy arrays, in order; `.result()` waits, or await it.

    Raises:
        ContractError: for a tensor of a batch that has not been executed.
    """
    compact = [
        t.contiguous() if t.spec.span > 2 * max(t.size, 1) and not _in_batch(t) else t
        for t in tensors
    ]
    places: list[tuple[int, int]] = [(-1, -1)] * len(tensors)
    tickets: list[Ticket] = []
    devices = dict.fromkeys(t.device for t in compact)
    for where in devices:
        mine = [(i, t) for i, t in enumerate(compact) if t.device is where and t.size]
        reads = [(t._value, *_byte_range(t.spec, t._offset)) for _, t in mine]
        recordings = dict.fromkeys(
            t._value.recording for _, t in mine if t._value.state == PENDING
        )
        pending = [r for r in recordings if r is not None]
        for _, t in mine:
            if _in_batch(t):
                t._value.require()
        for other in pending[:-1]:
            where.flush(other)
        if not reads:
            continue
        for position, (index, _) in enumerate(mine):
            places[index] = (len(tickets), position)
        tickets.append(
            where.run(pending[-1], reads=reads) if pending else where.read(reads)
        )

    def finish() -> list[Array]:
        out: list[Array] = []
        for (ticket, position), t in zip(places, compact, strict=True):
            raw = np.empty(0, np.uint8) if ticket < 0 else tickets[ticket].data(position)
            out.append(_decode(raw, t.spec))
        return out

    return Pending(tickets, finish)


def _in_batch(t: Tensor) -> bool:
    recording = t._value.recording
    return t._value.state == PENDING and recording is not None and recording.explicit


__all__ = [
    "ContractError", "DeviceError", "Pending", "Tensor", "apply", "apply_all", "asarray", "binary",
    "empty", "fetch", "from_host", "full", "zeros",
]  # fmt: skip
