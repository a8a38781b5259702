"""`MatmulCache`: named weights that stay on the device, and products with them.

    cache = ct.MatmulCache()
    cache.upload_weight("up", up, dtype="f16")             # [out, in], sent once
    y = cache.matmul("up", x, activation="gelu")           # x W^T, as often as you like

On resident tensors a product is one recorded launch like any other. NumPy arrays are sent, computed
with and read back: small ones by a replay that is captured at the first call of a shape, so that a
call is one write and one submission. After that call nothing is allocated or compiled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from msgspec import Struct

from centella.dtypes import DType, dtype_of, from_host_array, i8
from centella.errors import DTypeError, LimitError, ShapeError, WeightsError
from centella.ops.quant.table import FORMATS
from centella.runtime.device import Device, current_device
from centella.runtime.device import device as open_device
from centella.specs import Shape
from centella.tensors.creation import asarray
from centella.tensors.functional import linear
from centella.tensors.jit import Jitted
from centella.tensors.qtensor import QTensor, host_planes
from centella.tensors.state import State, checked_out
from centella.tensors.tensor import Tensor

if TYPE_CHECKING:
    from centella.ops.quant.format import Format

Array = np.ndarray[Any, Any]
REPLAYED = 256 << 10  # bytes of operands up to which a call replays: to move more takes its time
SHAPES = 8  # captures that are kept for each weight
LATELY = 16  # calls of a weight in which a shape has to come again to take an older one's place


class CachedWeight(Struct, frozen=True):
    """A row of `MatmulCache.weights()`.

    Attributes:
        name: of the weight; shape: [out_features, in_features]; dtype: storage type, of a weight
            in blocks its format.
        nbytes: of device memory, pads and scales included.
    """

    name: str
    shape: Shape
    dtype: DType | Format
    nbytes: int


class _Weight:
    """A weight on the device.

    Attributes:
        product: (x, bias, residual, activation, alpha) to f(alpha x W^T + bias) + residual.
        replayed: the same, captured for each shape.
    """

    __slots__ = ("_lately", "product", "replayed", "stored")

    def __init__(self, stored: Tensor | QTensor) -> None:
        def matmul(
            x: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None,
            alpha: float,
        ) -> Tensor:  # fmt: skip
            return linear(x, stored, bias, activation=activation, residual=residual, alpha=alpha)

        self.stored = stored
        self.product: Callable[..., Tensor] = matmul
        self.replayed: Jitted[..., Tensor] = Jitted(matmul, stored.device, SHAPES)
        self._lately: deque[list[Shape | None]] = deque(maxlen=LATELY)

    def replays(self, operands: Sequence[Tensor | Array | None]) -> bool:
        """Whether a call is worth a capture: few bytes from the host, of a shape that recurs."""
        nbytes = 0
        for value in operands:
            if isinstance(value, Tensor):
                return False
            nbytes += 0 if value is None else value.nbytes
        shapes = [None if value is None else value.shape for value in operands]
        again = shapes in self._lately
        self._lately.append(shapes)
        return nbytes <= REPLAYED and (again or self.replayed.signatures < SHAPES)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, pads included."""
        stored = self.stored
        return stored.storage_bytes if isinstance(stored, QTensor) else stored.spec.storage_bytes

    @property
    def dtype(self) -> DType | Format:
        """How it is stored."""
        stored = self.stored
        if not isinstance(stored, QTensor):
            return stored.dtype
        return stored.planes[0].dtype if stored.format.by_row else stored.format


class MatmulCache:
    """Weights by name on one device, each sent once: y = f(alpha x W^T + bias) + residual.

    Args:
        device: where they live; default: the current device.
    """

    def __init__(self, device: str | Device | None = None) -> None:
        self.device: Device = current_device() if device is None else open_device(device)
        self._weights: dict[str, _Weight] = {}

    def __repr__(self) -> str:
        return (
            f"<MatmulCache of {self.weight_count} weights, {self.weight_bytes:,} bytes on "
            f"{self.device.name}>"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def upload_weight(self, name: str, array: Any, dtype: Any = None) -> None:
        """Keep a weight under a name; another of that name is replaced, the rest stay.

        Args:
            array: [out_features, in_features], floats on the host or a Tensor; or a QTensor.
            dtype: f32, f16 or bf16; or i8, which quantises each row (`ct.quantize_int8`); or the
                name of a quantised format, as for `ct.quantize`. Default: the array's own.

        Raises:
            ShapeError: not a matrix.
            DTypeError: not floats; float64 without `dtype=`.
            LimitError: larger than the device allows; the cache is as it was.
        """
        if isinstance(dtype, str) and dtype in FORMATS:
            self._weights[name] = self._quantised("upload_weight", name, array, dtype)
            return
        kind = None if dtype is None else dtype_of(dtype)
        if isinstance(array, QTensor):
            if kind is not None:
                raise DTypeError(f"upload_weight: expected no dtype= with the QTensor {name!r}")
            weight = _Weight(array.to(self.device))
        elif kind is i8:
            weight = self._quantised("quantize_int8", name, array, "int8")
        elif isinstance(array, Tensor):
            self._check(name, array.shape, kind or array.dtype)
            weight = _Weight(asarray(array, kind, self.device).contiguous())
        else:
            data, own = from_host_array("upload_weight", array, kind)
            self._check(name, data.shape, own)
            weight = _Weight(asarray(data, own, self.device))
        self._weights[name] = weight

    def _quantised(self, op: str, name: str, array: Any, format: str) -> _Weight:
        """The weight in a format, if its planes fit the device."""
        planes = host_planes(op, array, format)
        for plane in planes:
            self._check_fits(name, plane.shape, dtype_of(plane.dtype))
        return _Weight(QTensor(tuple(asarray(p, device=self.device) for p in planes), format))

    def _check(self, name: str, shape: Shape, dtype: DType) -> None:
        if len(shape) != 2:
            raise ShapeError(f"upload_weight: expected {name!r} [out, in], got {list(shape)}")
        if not dtype.is_float:
            raise DTypeError(f"upload_weight: expected {name!r} of floats, got {dtype.name}")
        self._check_fits(name, shape, dtype)

    def _check_fits(self, name: str, shape: Shape, dtype: DType) -> None:
        needed, most = (
            self.device.storage.spec(shape, dtype).storage_bytes,
            self.device.caps.max_buffer,
        )
        if needed > most:
            raise LimitError(
                f"upload_weight: {name!r} {list(shape)} of {dtype.name} needs {needed:,} bytes; "
                f"{self.device.name} allows {most:,} in a buffer"
            )

    def remove(self, name: str) -> None:
        """Forget a weight; its memory is free once no recorded work uses it.

        Raises:
            WeightsError: no weight of that name.
        """
        self._find(name)
        del self._weights[name]

    @property
    def weight_count(self) -> int:
        """Number of weights."""
        return len(self._weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of device memory that the weights take, pads and scales included."""
        return sum(w.nbytes for w in self._weights.values())

    def weights(self) -> tuple[CachedWeight, ...]:
        """Name, shape, storage type and bytes of each weight, in order of upload."""
        return tuple(
            CachedWeight(name, w.stored.shape, w.dtype, w.nbytes)
            for name, w in self._weights.items()
        )

    @overload
    def matmul(
        self, name: str, x: Tensor | Array, out: State, *, bias: Any = None,
        activation: str | None = None, residual: Any = None, alpha: float = 1.0,
    ) -> State: ...  # fmt: skip

    @overload
    def matmul(
        self, name: str, x: Tensor, out: None = None, *, bias: Any = None,
        activation: str | None = None, residual: Any = None, alpha: float = 1.0,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def matmul(
        self, name: str, x: Array, out: None = None, *, bias: Any = None,
        activation: str | None = None, residual: Any = None, alpha: float = 1.0,
    ) -> Array: ...  # fmt: skip

    def matmul(
        self, name: str, x: Any, out: State | None = None, *, bias: Any = None,
        activation: str | None = None, residual: Any = None, alpha: float = 1.0,
    ) -> Any:  # fmt: skip
        """f(alpha x W^T + bias) + residual with a weight of the cache.

        Args:
            x: [..., in_features], a Tensor of this device or a NumPy array.
            out: a State of the result's shape and dtype, which is assigned the result.
            bias: [out_features]; residual: [..., out_features]: Tensors or arrays.
            activation: as `ct.linear` takes it.

        Returns:
            [..., out_features] in the dtype of x: `out` where it is given, else a Tensor for a
            Tensor and an array for an array.

        Raises:
            WeightsError: no weight of that name; names those there are.
            ShapeError, DTypeError: as `ct.linear`; an `out` of another shape or dtype.
            DeviceError: an operand or `out` on another device.
        """
        weight = self._find(name)
        operands = [_data(x), _data(bias), _data(residual)]
        if out is None and weight.replays(operands):
            replayed: Array = weight.replayed.fetch(*operands, activation, alpha).result()
            return replayed
        y = weight.product(*map(self._resident, operands), activation, alpha)
        if out is not None:
            checked_out("MatmulCache", out, y.spec, self.device).assign(y)
            return out
        return y if isinstance(x, Tensor) else y.numpy()

    def _resident(self, value: Tensor | Array | None) -> Tensor | None:
        return asarray(value, device=self.device) if isinstance(value, np.ndarray) else value

    def _find(self, name: str) -> _Weight:
        weight = self._weights.get(name)
        if weight is None:
            known = ", ".join(map(repr, self._weights)) or "none"
            raise WeightsError(f"MatmulCache: no weight {name!r}; there are {known}")
        return weight


def _data(value: Any) -> Tensor | Array | None:
    """An operand: what is no tensor is host data."""
    if value is None or isinstance(value, (np.ndarray, Tensor)):
        return value
    return from_host_array("MatmulCache", value, None)[0]
