"""Tensors of a checkpoint: what one is, which fit a parameter, and their data for a device."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, DType, f16, f32, from_numpy, narrow, widen
from centella.errors import WeightsError
from centella.ops.quant.format import Format
from centella.ops.quant.table import FORMATS
from centella.runtime.device import Device
from centella.specs import Shape
from centella.tensors.qtensor import QTensor, Stacked
from centella.tensors.tensor import Tensor, upload

# Of a parameter: data, and the dtype that it is stored in; None: it is quantised and stays so.
Part = tuple["Stored | Tensor", DType | None]
PIECE = 2 << 20  # bytes of blocks that become planes at a time
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
        """Read elements of its data along axis 0, from `first` on, into memory that is whole."""
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


class Blocks(InRows, Protocol):
    """A quantised tensor of a checkpoint, whose data are its blocks."""

    @property
    def shape(self) -> Shape:
        """Extents of the weight."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks."""
        ...

    @property
    def blocks(self) -> Array:
        """Its bytes, uint8 [rows, blocks of a row, bytes of a block]."""
        ...


def format_of_stored(tensor: Any) -> Format | None:
    """The format of a checkpoint's tensor; None: it is not quantised, or in no format of ours."""
    format = FORMATS.get(getattr(tensor, "format", ""))
    return format if format is not None and format.from_blocks is not None else None


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
        assert self.format.from_blocks is not None
        planes = self.format.from_blocks(self.stored.blocks)
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
        if format is not None:
            weights.append(_packed([cast("Blocks", tensor) for tensor, _ in group], format, device))
            continue
        several = [*group]
        weight = filled(several, dtype, device)
        if weight is None:
            data = host_data(several, dtype)
            weight = upload("load_parameters", data, dtype, device, stays=True)
        weights.append(weight)
    return weights[0] if len(weights) == 1 else Stacked(tuple(weights))


def _packed(tensors: list[Blocks], format: Format, device: Device) -> QTensor:
    """Quantised tensors of one format, one below the other, as planes."""
    convert = format.from_blocks
    assert convert is not None
    rows = [math.prod(tensor.shape[:-1]) for tensor in tensors]
    blocks = tensors[0].shape[-1] // format.block
    size = tensors[0].nbytes // (rows[0] * blocks)
    most = max(PIECE // (blocks * size), 1)

    def read(first: int, *outs: Array) -> None:
        for number, begin, target in _within(rows, first, len(outs[0]), most):
            raw = np.empty((target.stop - target.start, blocks, size), np.uint8)
            tensors[number].read_rows(begin, raw)
            for out, plane in zip(outs, convert(raw), strict=True):
                out[target] = plane

    kinds = [(plane.shape(sum(rows), blocks), plane.dtype or f16) for plane in format.planes]
    specs = [device.storage.spec(*kind) for kind in kinds]
    values = device.recorder.fill(specs, read)
    if values is not None:
        planes = [Tensor(value, spec) for value, spec in zip(values, specs, strict=True)]
        return QTensor(tuple(planes), format)
    arrays = [np.empty(shape, dtype.numpy) for shape, dtype in kinds]
    read(0, *arrays)
    whole = zip(arrays, kinds, strict=True)
    return QTensor(
        tuple(upload("load_parameters", a, kind[1], device, stays=True) for a, kind in whole),
        format,
    )


def _within(
    counts: Sequence[int], first: int, rows: int, most: int = sys.maxsize
) -> Iterator[tuple[int, int, slice]]:
    """Where rows of tensors of so many rows each lie, which stand one below the other.

    Yields:
        The tensor's number, its row, and the slice of the `rows` from `first` on, up to `most`.
    """
    start = 0
    for number, count in enumerate(counts):
        for row in range(max(first - start, 0), min(first + rows - start, count), most):
            end = min(row + most, first + rows - start, count)
            yield number, row, slice(start + row - first, start + end - first)
        start += count


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


def filled(parts: Sequence[Part], kind: DType, device: Device) -> Tensor | None:
    """Large parts, one below the other, read from their files piece after piece.

    Returns:
        None where they are small, or one can only be read whole.
    """
    if not all(isinstance(part, InRows) and own is not None for part, own in parts):
        return None
    counts = [part.shape[0] for part, _ in parts]

    def read(first: int, out: Array) -> None:
        for number, row, target in _within(counts, first, len(out)):
            part, own = parts[number]
            _read_rows(part, own or f32, row, out[target], kind)

    spec = device.storage.spec((sum(counts), *parts[0][0].shape[1:]), kind)
    values = device.recorder.fill([spec], read)
    return None if values is None else Tensor(values[0], spec)


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
