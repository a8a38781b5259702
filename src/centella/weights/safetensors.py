"""safetensors files by memory map: opening reads the header, tensors are views of the file.

    | u64 little-endian N | N bytes of JSON | data |
    {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {}}

Offsets count from the end of the header. Data is little-endian, C order, and the tensors tile it
without hole or overlap. A large model is several such files and an index that says which file
holds which tensor. Files are taken as hostile: each number is checked before it is used.

Source: the format section of https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, DType, bf16, bool_, f16, f32, i8, i32, u8, u32
from centella.errors import WeightsError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PREFIX = 8  # bytes of the header length
_MAX_HEADER = 100_000_000  # the reference reader's limit

# Name in the file -> storage type (None: no device stores it), NumPy type of the bytes.
_DTYPES: dict[str, tuple[DType | None, np.dtype[Any]]] = {
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
        array: a read-only view of the mapped file (bf16 as uint16). Reading it reads the disk;
            it may be unaligned, and it keeps the map alive.
    """

    name: str
    file: Path
    dtype: DType | None
    shape: tuple[int, ...]
    array: Array

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.array.nbytes


class Checkpoint(Mapping[str, StoredTensor]):
    """The tensors of a model folder by name, in file order.

    Attributes:
        folder: the model folder.
        files: the files that hold the tensors.
    """

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.folder = folder
        self.files: tuple[Path, ...] = tuple(dict.fromkeys(t.file for t in tensors.values()))
        self._tensors = tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return (
            f"Checkpoint({str(self.folder)!r}, tensors={len(self)}, "
            f"files={len(self.files)}, nbytes={self.nbytes})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self._tensors.values())


def open_checkpoint(folder: str | PathLike[str]) -> Checkpoint:
    """Open the weights of a model folder; maps the files, reads only their headers.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards.
            With both, the single file is taken. The index says which file a tensor comes from;
            a tensor of a shard that the index does not list is left out.

    Returns:
        The tensors by name.

    Raises:
        WeightsError: no such file, or a malformed one; names file, tensor, expected, got.

    Source: the safetensors format; the index as transformers' `save_pretrained` writes it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise WeightsError(f"{root}: expected a model folder, got {_kind(root)}")
    if (root / SINGLE).is_file():
        return Checkpoint(root, read_file(root / SINGLE))
    if (root / INDEX).is_file():
        return Checkpoint(root, _read_shards(root))
    found = ", ".join(sorted(p.name for p in root.iterdir())) or "an empty folder"
    raise WeightsError(f"{root}: expected {SINGLE} or {INDEX}, got {found}")


def read_file(path: str | PathLike[str]) -> dict[str, StoredTensor]:
    """Map one safetensors file.

    Args:
        path: the file.

    Returns:
        Its tensors by name, in the order of their data.

    Raises:
        WeightsError: no such file, or a malformed one; names file, tensor, expected, got.
    """
    file = Path(path)
    mapped = _map(file)
    start = _data_start(file, mapped)
    header = _read_header(file, mapped[_PREFIX:start].tobytes())
    data = mapped[start:]
    entries = [_parse_entry(file, name, entry) for name, entry in header.items()]
    entries.sort(key=lambda e: (e.begin, e.end))
    _check_tiling(file, entries, data.size)
    return {e.name: _view(file, e, data) for e in entries}


class _Entry(Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _kind(path: Path) -> str:
    return "a file" if path.is_file() else "nothing at that path"


def _map(file: Path) -> Array:
    """The file's bytes, mapped read-only."""
    if not file.is_file():
        got = "a folder" if file.is_dir() else "nothing at that path"
        raise WeightsError(f"{file}: expected a safetensors file, got {got}")
    try:
        size = file.stat().st_size
        if size < _PREFIX:  # an empty file cannot be mapped
            raise WeightsError(f"{file}: expected a header length of 8 bytes, got {size} bytes")
        return np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error}") from error


def _data_start(file: Path, mapped: Array) -> int:
    """Where the data begins: 8 + the checked header length."""
    length = int.from_bytes(mapped[:_PREFIX].tobytes(), "little")
    if length > _MAX_HEADER:
        raise WeightsError(f"{file}: expected a header up to {_MAX_HEADER} bytes, got {length}")
    if _PREFIX + length > mapped.size:
        raise WeightsError(
            f"{file}: truncated: expected a header of {length} bytes, got {mapped.size - _PREFIX}"
        )
    return _PREFIX + length


def _read_header(file: Path, raw: bytes) -> dict[str, Any]:
    """The header without its `__metadata__`."""
    header = _parse_json(file, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise WeightsError(f"{file}: __metadata__: expected an object, got {_show(metadata)}")
    return header


def _parse_json(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: expected a JSON object, got bad JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise WeightsError(f"{file}: expected a JSON object, got {_show(parsed)}")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON text; the format forbids a name that comes twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the name {_show(key)} comes twice")
        found[key] = value
    return found


def _parse_entry(file: Path, name: str, entry: Any) -> _Entry:
    where = f"{file}: tensor {_show(name)}"
    if not isinstance(entry, dict):
        raise WeightsError(f"{where}: expected an object, got {_show(entry)}")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        names = ", ".join(_DTYPES)
        raise WeightsError(f"{where}: dtype: expected one of {names}, got {_show(dtype)}")
    shape = entry.get("shape")
    if not _is_sizes(shape):
        raise WeightsError(f"{where}: shape: expected a list of sizes, got {_show(shape)}")
    offsets = entry.get("data_offsets")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise WeightsError(f"{where}: data_offsets: expected [begin, end], got {_show(offsets)}")
    begin, end = offsets
    expected = math.prod(shape) * _DTYPES[dtype][1].itemsize
    if end - begin != expected:
        raise WeightsError(
            f"{where}: expected {expected} bytes for {dtype} {_show(shape)}, "
            f"got {end - begin} from data_offsets [{begin}, {end}]"
        )
    return _Entry(name, dtype, tuple(shape), begin, end)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    """A list of whole numbers that a u64 holds (bool is no number in JSON)."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**64 for v in value)


def _check_tiling(file: Path, entries: list[_Entry], size: int) -> None:
    """The tensors, in order, cover the data exactly: no hole, no overlap, nothing beyond."""
    at = 0
    for e in entries:
        if e.end > size:
            raise WeightsError(
                f"{file}: tensor {_show(e.name)}: truncated or out of range: "
                f"expected data up to byte {e.end}, got {size} bytes of data"
            )
        if e.begin != at:
            fault = "overlaps the tensor before it" if e.begin < at else "leaves a hole"
            raise WeightsError(
                f"{file}: tensor {_show(e.name)} {fault}: expected begin {at}, got {e.begin}"
            )
        at = e.end
    if at != size:
        raise WeightsError(f"{file}: expected {at} bytes of data after the header, got {size}")


def _view(file: Path, e: _Entry, data: Array) -> StoredTensor:
    dtype, numpy_dtype = _DTYPES[e.dtype]
    try:
        array: Array = data[e.begin : e.end].view(numpy_dtype).reshape(e.shape)
    except (ValueError, OverflowError) as error:  # beyond NumPy: rank over 64, sizes over 2^63
        raise WeightsError(
            f"{file}: tensor {_show(e.name)}: shape: expected one that NumPy can hold, "
            f"got {_show(list(e.shape))}: {error}"
        ) from error
    return StoredTensor(e.name, file, dtype, e.shape, array)


def _read_shards(root: Path) -> dict[str, StoredTensor]:
    """The tensors that the folder's index lists, each from its file."""
    index = root / INDEX
    try:
        raw = index.read_bytes()
    except OSError as error:
        raise WeightsError(f"{index}: cannot be read: {error}") from error
    places = _parse_json(index, raw).get("weight_map")
    if not isinstance(places, dict):
        raise WeightsError(f"{index}: weight_map: expected an object, got {_show(places)}")
    for name, shard in places.items():
        if not isinstance(shard, str) or shard in {"", ".", ".."} or set(shard) & set("/\\:\0"):
            raise WeightsError(
                f"{index}: tensor {_show(name)}: expected the name of a file in the folder, "
                f"got {_show(shard)}"
            )
    shards = {shard: read_file(root / shard) for shard in dict.fromkeys(places.values())}
    for name, shard in places.items():
        if name not in shards[shard]:
            raise WeightsError(
                f"{root / shard}: tensor {_show(name)}: expected here by {INDEX}, "
                f"got a file without it ({len(shards[shard])} tensors)"
            )
    return {name: shards[shard][name] for name, shard in places.items()}


def _show(value: Any) -> str:
    """A value of the file, cut short in size and depth: a hostile one floods no message."""
    brief = reprlib.Repr()
    brief.maxstring, brief.maxlist = 120, 12
    return brief.repr(value)
