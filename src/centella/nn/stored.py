"""Tensors of a checkpoint: what one is, which fit a parameter, and their data for a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, DType, f32, from_numpy, narrow, widen
from centella.errors import WeightsError
from centella.ops.quant.format import Format
from centella.ops.quant.table import FORMATS
from centella.runtime.device import Device
from centella.specs import Shape
from centella.tensors.qtensor import QTensor, Stacked
from centella.tensors.tensor import Tensor, upload

# Of a parameter: data, and the dtype that it is stored in; None: it is quantised and stays so.
Part = tuple["Stored | Tensor", DType | None]
LISTED = 20  # names that an error shows
LONG = 200  # characters of one that it shows


class Stored(Protocol):
    """A tensor of a checkpoint: its storage type (None: one that no device stores) and bytes."""

    @property
    def dtype(self) -> DType | None:
        """What the bytes mean."""
        ...

    @property
    def shape(self) -> Shape:
        """Extents."""
        ...

    @property
    def array(self) -> Array:
        """The data on the host (bf16 as uint16)."""
        ...


@runtime_checkable
class InRows(Protocol):
    """A tensor of a checkpoint that can be read in parts."""

    def read_rows(self, first: int, out: Array) -> None:
        """Read elements along axis 0, from `first` on, into memory that is whole."""
        ...


class Plain(Struct, frozen=True):
    """A NumPy array as a checkpoint's tensor."""

    array: Array

    @property
    def dtype(self) -> DType:
        """What the bytes mean."""
        return from_numpy(self.array.dtype)

    @property
    def shape(self) -> Shape:
        """Extents."""
        shape: Shape = self.array.shape
        return shape


class Blocks(Protocol):
    """A quantised tensor of a checkpoint."""

    @property
    def shape(self) -> Shape:
        """Extents of the weight."""
        ...

    @property
    def blocks(self) -> Array:
        """Its bytes, uint8 [rows, blocks of a row, bytes of a block]."""
        ...


def format_of_stored(tensor: Any) -> Format | None:
    """The format of a checkpoint's tensor; None: it is not quantised, or in no format of ours."""
    format = FORMATS.get(getattr(tensor, "format", ""))
    return format if format is not None and format.from_blocks is not None else None


def _planes(tensor: Blocks, format: Format) -> tuple[Array, ...]:
    assert format.from_blocks is not None
    return format.from_blocks(tensor.blocks)


class Decoded(Struct, frozen=True, eq=False):
    """A quantised tensor of a checkpoint as f32, for a parameter that is not kept in planes."""

    stored: Blocks
    format: Format

    @property
    def dtype(self) -> DType:
        """f32."""
        return f32

    @property
    def shape(self) -> Shape:
        """Extents."""
        shape: Shape = self.stored.shape
        return shape

    @property
    def array(self) -> Array:
        """The data on the host."""
        planes = _planes(self.stored, self.format)
        wide = (p.astype(np.float32) if p.dtype.kind == "f" else p for p in planes)
        return self.format.decode(*wide).reshape(self.shape)


def from_blocks(parts: Sequence[Part], dtype: DType, device: Device) -> Tensor | QTensor | Stacked:
    """A weight of a checkpoint's tensors, of which at least one is quantised, as they are.

    Neighbours of one format are one weight; of several formats each keeps its own.

    Args:
        dtype: of parts that are not quantised.
    """
    weights: list[Tensor | QTensor] = []
    for format, group in groupby(parts, lambda part: format_of_stored(part[0])):
        if format is None:
            data = host_data([*group], dtype)
            weights.append(upload("load_parameters", data, dtype, device, stays=True))
            continue
        several = [_planes(cast("Blocks", tensor), format) for tensor, _ in group]
        alone = len(several) == 1
        arrays = several[0] if alone else map(np.concatenate, zip(*several, strict=True))
        kinds = ((a, from_numpy(a.dtype)) for a in arrays)
        planes = (upload("load_parameters", a, kind, device, stays=True) for a, kind in kinds)
        weights.append(QTensor(tuple(planes), format))
    return weights[0] if len(weights) == 1 else Stacked(tuple(weights))


def checked(
    origin: str, name: str, tensor: Stored | Tensor, shape: Shape, takes_planes: bool
) -> Part:
    """The data of a float or quantised tensor of this shape, and its dtype."""
    if tensor.shape != shape:
        raise WeightsError(
            f"{origin}: tensor {shown(name)}: expected shape {list(shape)}, "
            f"got {list(tensor.shape)}"
        )
    format = None if isinstance(tensor, Tensor) else format_of_stored(tensor)
    if format is not None:
        return (tensor, None) if takes_planes else (Decoded(cast("Blocks", tensor), format), f32)
    if tensor.dtype is None or not tensor.dtype.is_float:
        got = tensor.dtype.name if isinstance(tensor, Tensor) else _kind(tensor)
        raise WeightsError(f"{origin}: tensor {shown(name)}: expected f32, f16 or bf16, got {got}")
    return tensor, tensor.dtype


def _kind(tensor: Stored) -> str:
    format = getattr(tensor, "format", "")
    if format:
        return f"{format}, which this version does not have"
    return str(tensor.array.dtype) if tensor.dtype is None else tensor.dtype.name


def zeros(shape: Shape) -> tuple[Stored, DType]:
    """What stands for a tensor that a checkpoint's layer does not have."""
    return Plain(np.zeros(shape, np.float32)), f32


def host_data(parts: list[Part], kind: DType) -> Array:
    """The parts stacked, as host bytes of `kind`; one part of that dtype is not copied."""
    arrays = [_host(part, own, kind) for part, own in parts if own is not None]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def reader(parts: list[Part], kind: DType) -> Callable[[int, Array], None] | None:
    """What reads rows of the parts stacked, as host bytes of `kind`: `read(first, out)`.

    Returns:
        None where a part can only be read whole.
    """
    if not all(isinstance(part, InRows) and own is not None for part, own in parts):
        return None

    def read(first: int, out: Array) -> None:
        last, before = first + len(out), 0
        for part, own in parts:
            begin, end = max(first, before), min(last, before + part.shape[0])
            if begin < end:
                _read_rows(part, own or f32, begin - before, out[begin - first : end - first], kind)
            before += part.shape[0]

    return read


def _read_rows(part: Any, own: DType, first: int, out: Array, kind: DType) -> None:
    if own is kind and out.flags.c_contiguous:
        part.read_rows(first, out)
        return
    rows = np.empty(out.shape, own.numpy)
    part.read_rows(first, rows)
    out[...] = narrow(widen(rows, own), kind)


def _host(part: Stored | Tensor, own: DType, kind: DType) -> Array:
    if isinstance(part, Tensor):
        return narrow(part.astype(f32).numpy(), kind)
    return part.array if own is kind else narrow(widen(part.array, own), kind)


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(map(shown, every[:LISTED])) + more or "none"


def shown(name: str) -> str:
    """A name of a file, which may be of any length and of characters that no terminal takes."""
    return name if name.isprintable() and len(name) <= LONG else ascii(name[:LONG])
