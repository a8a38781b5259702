"""`QTensor`: a quantised weight, its planes on a device; `Stacked`: several weights as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from centella.dtypes import Array, DType, dtype_of
from centella.errors import DTypeError, ShapeError
from centella.ops.quant.table import FORMATS, encoded, format_of
from centella.runtime.device import Device, current_device
from centella.runtime.device import device as open_device
from centella.specs import Shape
from centella.tensors.arguments import check_tensors
from centella.tensors.creation import asarray
from centella.tensors.tensor import Tensor, apply

if TYPE_CHECKING:
    from centella.ops.quant.format import Format


class QTensor:
    """A weight [n, k] in a quantised format: what `ct.linear` and `ct.embedding` take as it is.

    Args:
        planes: its tensors, in the order of the format.
        format: "int8"; as in GGUF files "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k",
            "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"; or "mxfp4".
        shape: (n, k); default: what the planes say.

    Attributes:
        planes, format: as given; `format.name` is the name.
        shape: (n, k).

    Raises:
        ShapeError, DTypeError: planes that do not belong together, or are no weight of the shape.
    """

    __slots__ = ("format", "planes", "shape")

    def __init__(
        self, planes: tuple[Tensor, ...], format: str | Format, shape: Shape | None = None
    ) -> None:
        check_tensors("QTensor", *planes)
        self.planes: tuple[Tensor, ...] = tuple(planes)
        self.format: Format = format_of("QTensor", format)
        self.shape: Shape = self.format.check("QTensor", [p.spec for p in planes])
        if shape is not None and tuple(shape) != self.shape:
            raise ShapeError(f"QTensor: expected planes of {list(shape)}, got {list(self.shape)}")

    def __repr__(self) -> str:
        return f"<QTensor {list(self.shape)} {self.format.name} on {self.device.name}>"

    @property
    def device(self) -> Device:
        """Where its planes are."""
        return self.planes[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the planes' elements."""
        return sum(plane.nbytes for plane in self.planes)

    @property
    def storage_bytes(self) -> int:
        """Bytes on the device, pads of rows included."""
        return sum(plane.spec.storage_bytes for plane in self.planes)

    def to(self, device: str | Device) -> QTensor:
        """The same on another device; itself where it is there already."""
        where = open_device(device)
        if where is self.device:
            return self
        return QTensor(tuple(plane.to(where) for plane in self.planes), self.format)

    def dequantize(self, dtype: Any = "f32") -> Tensor:
        """The weight as floats [n, k], in one launch.

        Raises:
            DTypeError: for a dtype that is no float one.
        """
        kind = float_dtype("dequantize", dtype)
        return apply("dequantize", *self.planes, dtype=kind.name, format=self.format.name)


class Stacked:
    """Weights [n_i, k] of formats of their own, one below the other: a product for each.

    Args:
        parts: from the first row on; Tensors or QTensors of one device.

    Attributes:
        parts: as given.
        shape: (sum of n_i, k).

    Raises:
        ShapeError: parts of other ranks, or of more than one k.
    """

    __slots__ = ("parts", "shape")

    def __init__(self, parts: tuple[Tensor | QTensor, ...]) -> None:
        shapes = [part.shape for part in parts]
        if len({s[1:] for s in shapes}) != 1 or any(len(s) != 2 for s in shapes):
            raise ShapeError(f"Stacked: expected weights [n, k] of one k, got {shapes}")
        self.parts: tuple[Tensor | QTensor, ...] = tuple(parts)
        self.shape: Shape = (sum(n for n, _ in shapes), shapes[0][1])

    def __repr__(self) -> str:
        return f"<Stacked {list(self.shape)} of {', '.join(map(repr, self.parts))}>"

    @property
    def device(self) -> Device:
        """Where its parts are."""
        return self.parts[0].device

    @property
    def ndim(self) -> int:
        """Dimensions of the weight: always 2."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return sum(part.nbytes for part in self.parts)


def float_dtype(op: str, dtype: Any) -> DType:
    """The float dtype of a name.

    Raises:
        DTypeError: it is none.
    """
    kind = dtype_of(dtype)
    if not kind.is_float:
        raise DTypeError(f"{op}: expected a float dtype, got {kind.name}")
    return kind


def of_pair(op: str, stored: Tensor, scale: Tensor) -> QTensor:
    """Numbers and factors of blocks, as `ct.quantize_blocks` gives them, as one weight.

    Raises:
        ShapeError, DTypeError: planes of no such format, or that do not belong together.
    """
    check_tensors(op, stored, scale)
    specs = [stored.spec, scale.spec]
    for name in ("q8_0", "q4_0"):
        if all(p.fits(s) for p, s in zip(FORMATS[name].planes, specs, strict=True)):
            FORMATS[name].check(op, specs)
            return QTensor((stored, scale), name)
    raise DTypeError(
        f"{op}: expected i8 or u8 numbers and float factors, got {stored.dtype.name} and "
        f"{scale.dtype.name}"
    )


def quantize(weight: Any, format: str | Format, *, device: str | Device | None = None) -> QTensor:
    """A weight in a quantised format, on a device; the numbers are computed on the host.

    Those of q8_0, q4_0, q4_1, q5_0 and q5_1 are GGUF's (ggml's reference quantisation), in blocks
    of 32 along rows; int8 has a factor for each row (`ct.quantize_int8`). The other formats come
    from files alone.

    Args:
        weight: [out_features, in_features] of floats, a host array or a Tensor, which is read back.
        format: its name.
        device: where to; default: that of the Tensor, else the current device.

    Raises:
        ShapeError, DTypeError: no matrix of whole blocks; not floats, or not finite; a format that
            there is none of, or that has no quantiser.
    """
    planes = host_planes("quantize", weight, format)
    if device is None:
        device = weight.device if isinstance(weight, Tensor) else current_device()
    return QTensor(tuple(asarray(plane, device=device) for plane in planes), format)


def host_planes(op: str, weight: Any, format: str | Format) -> tuple[Array, ...]:
    """The planes of a weight on the host; `op` asks, for errors."""
    if isinstance(weight, Tensor):
        weight = (weight.astype("f32") if weight.dtype == "bf16" else weight).numpy()
    return encoded(op, format, weight)
