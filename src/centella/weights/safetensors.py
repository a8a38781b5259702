"""safetensors files: opening reads the header, a tensor is read when it is wanted.

    | u64 little-endian N | N bytes of JSON | data |
    {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {}}

Offsets count from the end of the header. Data is little-endian, C order, and the tensors tile it
without hole or overlap. A large model is several such files and an index that says which file
holds which tensor. Files are taken as hostile: each number is checked before it is used, and a
header may have no more bytes and values than its file's size lets expect.

Source: the format section of https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import math
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, DType, bf16, bool_, f16, f32, i8, i32, u8, u32
from centella.errors import WeightsError
from centella.weights.contents import Contents
from centella.weights.model_files import (
    MAX_VALUES,
    check_pointer,
    is_file,
    kind,
    parse_json,
    show,
)

_PREFIX = 8  # bytes of the header length
POINTER_BYTES = 64  # that tell what Git LFS leaves in a file's place
MAX_HEADER = 100_000_000  # bytes: the reference reader's limit
MAX_TENSORS = 50_000  # of a file; a mixture of 128 experts in 48 layers has 18 867
_MAX_RANK = 64  # NumPy's

# Name in the file -> storage type (None: no device stores it), NumPy type of the bytes.
DTYPES: dict[str, tuple[DType | None, np.dtype[Any]]] = {
    "F32": (f32, np.dtype("<f4")),
    "F16": (f16, np.dtype("<f2")),
    "BF16": (bf16, np.dtype("<u2")),
    "I32": (i32, np.dtype("<i4")),
    "U32": (u32, np.dtype("<u4")),
    "I8": (i8, np.dtype("i1")),
    "U8": (u8, np.dtype("u1")),
    "BOOL": (bool_, np.dtype("?")),
    "F64": (None, np.dtype("<f8")),
    "I64": (None, np.dtype("<i8")),
    "U64": (None, np.dtype("<u8")),
    "I16": (None, np.dtype("<i2")),
    "U16": (None, np.dtype("<u2")),
}


class StoredTensor(Struct, frozen=True, eq=False):
    """One tensor of a model file.

    Attributes:
        name: its name in the file.
        file: the file that holds it.
        dtype: its storage type; None for a type that tensors cannot have (float64, int64,
            uint64, int16, uint16), whose conversion is the caller's decision.
        shape: its shape, outermost axis first.
    """

    name: str
    file: Path
    dtype: DType | None
    shape: tuple[int, ...]
    _contents: Contents
    _begin: int
    _end: int
    _numpy: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self._end - self._begin

    @property
    def array(self) -> Array:
        """Its data (bf16 as uint16), read from the file now: memory of the caller's.

        Raises:
            WeightsError: the file cannot be read, or was written since it was opened; a bool that
                is neither 0 nor 1.
        """
        data = self._contents.read(self._begin, self._end)
        if self.dtype is bool_ and (largest := data.max(initial=0)) > 1:
            raise WeightsError(
                f"{self.file}: tensor {show(self.name)}: expected bytes of 0 or 1 for BOOL, "
                f"got {largest}"
            )
        return data.view(self._numpy).reshape(self.shape)

    def read_rows(self, first: int, out: Array) -> None:
        """Read elements along axis 0, from `first` on, into memory that is whole; not bools.

        Raises:
            WeightsError: as `array`.
        """
        begin = self._begin + first * math.prod(self.shape[1:]) * self._numpy.itemsize
        self._contents.read_into(begin, out.reshape(-1).view(np.uint8))


def read_file(path: str | PathLike[str]) -> dict[str, StoredTensor]:
    """Open one safetensors file; reads only its header.

    Args:
        path: the file.

    Returns:
        Its tensors by name, in the order of their data.

    Raises:
        WeightsError: no such file, or a malformed one; names file, tensor, expected, got.
    """
    file = Path(path)
    contents = _open(file)
    start = _data_start(contents)
    raw = contents.read(_PREFIX, start).tobytes()
    if (count := raw.count(b'"data_offsets"')) > MAX_TENSORS:  # before each is looked at
        raise WeightsError(f"{file}: expected {MAX_TENSORS:,} tensors at most, got {count:,}")
    header = parse_object(file, raw, contents.size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise WeightsError(f"{file}: __metadata__: expected an object, got {show(metadata)}")
    tensors = [_tensor(contents, start, name, entry) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t._begin, t._end))
    _check_tiling(file, tensors, start, contents.size)
    return {t.name: t for t in tensors}


def _open(file: Path) -> Contents:
    if not is_file(file):
        raise WeightsError(f"{file}: expected a safetensors file, got {kind(file)}")
    contents = Contents(file)
    if not contents.size:
        raise WeightsError(f"{file}: expected a safetensors file, got an empty one")
    if contents.size < _PREFIX:
        raise WeightsError(
            f"{file}: expected a header length of 8 bytes, got {contents.size} bytes"
        )
    return contents


def _data_start(contents: Contents) -> int:
    """Where the data begins: 8 + the checked header length."""
    file = contents.file
    check_pointer(file, contents.read(0, min(POINTER_BYTES, contents.size)).tobytes())
    length = int.from_bytes(contents.read(0, _PREFIX).tobytes(), "little")
    most = min(MAX_HEADER, 2**22 + contents.size // 16)
    if length > most:
        raise WeightsError(
            f"{file}: expected a header up to {most} bytes in a file of {contents.size}, "
            f"got {length}: this is no safetensors file"
        )
    if _PREFIX + length > contents.size:
        raise WeightsError(
            f"{file}: truncated: expected a header of {length} bytes, got {contents.size - _PREFIX}"
        )
    return _PREFIX + length


def parse_object(file: Path, raw: bytes, size: int) -> dict[str, Any]:
    """A JSON object about so many bytes of tensors."""
    parsed = parse_json(file, raw, 2 * MAX_VALUES + size // 64, _unique)
    if not isinstance(parsed, dict):
        raise WeightsError(f"{file}: expected a JSON object, got {show(parsed)}")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON text; the format forbids a name that comes twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {show(twice)} comes twice")
    return values


def _tensor(contents: Contents, start: int, name: str, entry: Any) -> StoredTensor:
    """A tensor as an entry of the header says, in a file whose data begins at `start`."""

    def wrong(text: str) -> WeightsError:
        return WeightsError(f"{contents.file}: tensor {show(name)}: {text}")

    if not isinstance(entry, dict):
        raise wrong(f"expected an object, got {show(entry)}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        names = ", ".join(DTYPES)
        raise wrong(f"dtype: expected one of {names}, got {show(dtype)}")
    if not _is_sizes(shape):
        raise wrong(f"shape: expected a list of sizes, got {show(shape)}")
    if len(shape) > _MAX_RANK:  # before they are multiplied
        raise wrong(
            f"shape: expected one that NumPy can hold, of {_MAX_RANK} sizes at most, "
            f"got {len(shape)}"
        )
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise wrong(f"data_offsets: expected [begin, end], got {show(offsets)}")
    begin, end = offsets
    stored, numpy_dtype = DTYPES[dtype]
    expected = math.prod(shape) * numpy_dtype.itemsize
    if end - begin != expected:
        raise wrong(
            f"expected {expected} bytes for {dtype} {show(shape)}, "
            f"got {end - begin} from data_offsets [{begin}, {end}]"
        )
    if expected > contents.size or not expected:  # else NumPy holds what the file does
        some = math.prod([n for n in shape if n]) * numpy_dtype.itemsize
        if some >= 2**63:
            raise wrong(f"shape: expected one that NumPy can hold, got {show(shape)}")
    return StoredTensor(
        name, contents.file, stored, tuple(shape), contents, start + begin, start + end,
        numpy_dtype,
    )  # fmt: skip


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    """A list of whole numbers that a u64 holds (bool is no number in JSON)."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**64 for v in value)


def _check_tiling(file: Path, tensors: list[StoredTensor], start: int, size: int) -> None:
    """The tensors, in order, cover the data exactly: no hole, no overlap, nothing beyond."""
    at = start
    for t in tensors:
        end = t._end
        if end > size:
            raise WeightsError(
                f"{file}: tensor {show(t.name)}: truncated or out of range: "
                f"expected data up to byte {end - start}, got {size - start} bytes of data"
            )
        if t._begin != at:
            fault = "overlaps the tensor before it" if t._begin < at else "leaves a hole"
            raise WeightsError(
                f"{file}: tensor {show(t.name)} {fault}: expected begin {at - start}, "
                f"got {t._begin - start}"
            )
        at = end
    if at != size:
        raise WeightsError(
            f"{file}: expected {at - start} bytes of data after the header, got {size - start}"
        )
