"""`State`: data on a device that kernels change in place.

A tensor never changes; a State does, one version after the other. What reads a version is run
before the next one is made, and using an older version raises, so no reader sees a later write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from centella.backends.base import Array
from centella.dtypes import DType, bf16, dtype_of, f32
from centella.errors import DeviceError, DTypeError, ShapeError
from centella.host.interrupts import uninterrupted
from centella.op.op import get
from centella.record.recording import innermost
from centella.record.values import Cell, Value
from centella.runtime.device import Device, current_device
from centella.runtime.device import device as open_device
from centella.specs import Described, Spec
from centella.tensors import views
from centella.tensors.creation import asarray
from centella.tensors.tensor import Tensor, apply_all, upload


class State(Described):
    """Data on a device that changes in place: for `InOut` arguments, caches, counters.

    Args:
        data: the first content, a Tensor or what `ct.asarray` takes; it is copied.
        dtype, device: as for `ct.asarray`.

    Raises:
        DTypeError: float64 or int64 arrays without `dtype=`.
    """

    __slots__ = ("_cell", "spec")

    def __init__(
        self, data: Any, dtype: Any = None, device: str | Device | None = None, *, name: str = ""
    ) -> None:
        first = asarray(data, dtype, device)
        self.spec: Spec = first.device.storage.spec(first.shape, first.dtype)
        self._cell = _cell(self.spec, first.device, name)
        self.assign(first)
        self._current.before = None  # a batch that fails leaves nothing to go back to

    @classmethod
    def empty(
        cls, shape: int | Sequence[int], dtype: Any = f32, device: str | Device | None = None, *,
        name: str = "",
    ) -> State:  # fmt: skip
        """A State whose content is undefined: memory is reserved, nothing is copied."""
        state = cls.__new__(cls)
        target = current_device() if device is None else open_device(device)
        state.spec = target.storage.spec(views.extents("State.empty", shape), dtype_of(dtype))
        state._cell = _cell(state.spec, target, name)
        return state

    @property
    def _current(self) -> Value:
        current = self._cell.current
        assert current is not None, "a cell is made with its first version"
        return current

    @property
    def value(self) -> Tensor:
        """What it holds now, as a tensor; using that after the next change raises ContractError."""
        return Tensor(self._current, self.spec)

    @property
    def device(self) -> Device:
        """The device it lives on."""
        memory = self._cell.memory
        assert memory is not None, "a State has memory"
        return memory.device  # type: ignore[no-any-return]  # a Value is below Device

    @uninterrupted
    def assign(self, data: Any) -> None:
        """Replace the content, in place: a tensor, array or number that broadcasts to the shape.

        Tensors and arrays have its dtype; numbers, and lists of them, take it.
        Where a change that failed has left no content, this gives it one.

        Raises:
            DTypeError, ShapeError: another dtype, or a shape that does not broadcast to this one.
        """
        device = self.device
        if isinstance(data, State) and data.device is not device:  # whose lock is not to be taken
            both = f"{device.name} and {data.device.name}"
            raise DeviceError(f"assign: operands on {both}; move one with .to(device)")
        if not isinstance(data, (State, Tensor)):
            data = upload("assign", data, self._taken(data), device)
        with device.lock:  # the newest versions are so until this is recorded
            source = data.value if isinstance(data, State) else data
            apply_all(get("assign"), (self.value, source), {})

    def _taken(self, data: Any) -> DType | None:
        """What host data is converted to: this dtype, or None for an array, which has its own.

        Raises:
            DTypeError: numbers that are not whole, for whole ones.
        """
        dtype = None if isinstance(data, np.generic) else getattr(data, "dtype", None)
        if dtype is not None and not (self.dtype is bf16 and dtype == np.uint16):
            return None
        if self.dtype.kind in ("int", "uint") and np.asarray(data).dtype.kind == "f":
            raise DTypeError(
                f"assign: expected whole numbers for a State of {self.dtype.name}, got {data!r}; "
                f"ct.asarray(x, {self.dtype.name!r}) truncates"
            )
        return self.dtype

    @property
    def note(self) -> Any:
        """What the owner knows of this version on the host; a failed change takes it back too."""
        self._cell.settle()
        return self._cell.note

    @uninterrupted
    def mark(self, note: Callable[[Any], Any]) -> None:
        """Give this version a note, `note(the one it has)`; a replay calls it again, each time."""
        recording = innermost(self.device)
        with self.device.lock:
            self._cell.settle()
            self._cell.note = note(self._cell.note)
            if recording is not None and recording.host_updates is not None:
                recording.host_updates.append((self._cell, note))

    def numpy(self) -> Array:
        """The content on the host: a copy that the caller owns."""
        return self.value.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """What `np.asarray(state)` gives: a copy of the content, counted like `numpy`."""
        return self.value.__array__(dtype, copy)

    def __copy__(self) -> State:
        return self  # a second handle would be the same memory

    def __deepcopy__(self, _: Any) -> State:
        state = State(self.value, name=self._cell.what)
        state._cell.note = self.note
        return state

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("the content of a State is on a device: pickle state.numpy()")

    def __repr__(self) -> str:
        return f"<State {list(self.shape)} {self.dtype.name} on {self.device.name}>"

    def __bool__(self) -> bool:
        raise DTypeError("a State is no truth value: compare state.numpy()")

    def _no_operand(self, *_: Any) -> Any:
        raise DTypeError(
            "a State is no operand, and `state += x` would not change it: state.value is a Tensor, "
            "state.assign(x) changes the State"
        )

    if not TYPE_CHECKING:  # which knows that a State has none of these
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _no_operand
        __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __pow__ = __neg__ = _no_operand
        __lt__ = __le__ = __gt__ = __ge__ = __len__ = __getitem__ = __setitem__ = _no_operand


def checked_out(name: str, out: Any, spec: Spec, device: Device) -> State:
    """What a caller gave as `out`, a State that such a tensor fills; `assign` would broadcast.

    Raises:
        DTypeError: it is no State, or has another dtype.
        ShapeError, DeviceError: it has another shape, or is on another device.
    """
    if not isinstance(out, State):
        raise DTypeError(f"{name}: expected a State as out, got {type(out).__name__}")
    if out.shape != spec.shape:
        raise ShapeError(f"{name}: expected out {list(spec.shape)}, got {list(out.shape)}")
    if out.dtype is not spec.dtype:
        raise DTypeError(f"{name}: expected out of {spec.dtype.name}, got {out.dtype.name}")
    if out.device is not device:
        raise DeviceError(f"{name}: expected out on {device.name}, got one on {out.device.name}")
    return out


def _cell(spec: Spec, device: Device, name: str) -> Cell:
    """Memory of its own with its first version, whose content is undefined."""
    first = device.storage.reserve(spec)
    buffer = first.require()
    buffer.mutable = True
    cell = Cell(name or f"State {list(spec.shape)} {spec.dtype.name}", first)
    cell.advance(first)
    return cell
