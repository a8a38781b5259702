"""GGUF files: opening one reads its header, a tensor is read when it is wanted.

Everything is little-endian: "GGUF", version u32, tensors u64, values u64; then the values (name,
type, value) and the tensors (name, extents innermost first, type, offset); then, aligned, the data.
Strings are a length u64 and UTF-8. Counts are compared with the bytes that are left before anything
of that size is made. A large model may be split into files `NAME-00001-of-00003.gguf`: each has
tensors of its own, and the first one has the values of the model.

Source: the GGUF specification of ggml, versions 2 and 3, and its `gguf-split` for the parts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, DType, bf16, f16, f32
from centella.errors import WeightsError
from centella.weights.contents import Contents
from centella.weights.folder import PARTS, split_files
from centella.weights.model_files import is_file, kind, show

MAGIC, VERSIONS = b"GGUF", (2, 3)
PART = 1 << 20  # bytes of the header that are read at once
LONGEST = 1 << 26  # bytes of a string; templates and merges are shorter
STRINGS = 1 << 22  # strings of all arrays
RANK = 4
ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


class Kind(Struct, frozen=True):
    """How a tensor of a file is stored.

    Attributes:
        name: as the specification has it.
        block: elements of a block; size: its bytes.
        dtype: of elements that are stored as they are; None: a quantised format.
    """

    name: str
    block: int
    size: int
    dtype: DType | None = None


KINDS = {
    0: Kind("F32", 1, 4, f32),
    1: Kind("F16", 1, 2, f16),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    20: Kind("IQ4_NL", 32, 18),
    23: Kind("IQ4_XS", 256, 136),
    30: Kind("BF16", 1, 2, bf16),
    39: Kind("MXFP4", 32, 17),
}
STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class GGUFTensor(Struct, frozen=True, eq=False):
    """One tensor of a GGUF file.

    Attributes:
        name: its name in the file.
        kind: how it is stored.
        shape: its shape, outermost axis first.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    _contents: Contents
    _begin: int

    @property
    def dtype(self) -> DType | None:
        """Its storage type; None for a quantised format."""
        return self.kind.dtype

    @property
    def format(self) -> str:
        """The name of its quantised format, such as "q8_0"; "" where elements are stored."""
        return "" if self.kind.dtype else self.kind.name.lower()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.kind.block * self.kind.size

    @property
    def array(self) -> Array:
        """Its data (bf16 as uint16), read from the file now: memory of the caller's.

        Raises:
            WeightsError: a quantised one; the file cannot be read, or was written since.
        """
        if self.kind.dtype is None:
            raise WeightsError(
                f"{self._contents.file}: tensor {show(self.name)}: expected F32, F16 or BF16, got "
                f"{self.kind.name}"
            )
        data = self._contents.read(self._begin, self._begin + self.nbytes)
        return data.view(STORED[self.kind.name]).reshape(self.shape)

    @property
    def blocks(self) -> Array:
        """The bytes of a quantised matrix, uint8 [rows, blocks of a row, bytes of a block]."""
        data = self._contents.read(self._begin, self._begin + self.nbytes)
        rows = math.prod(self.shape[:-1])
        return data.reshape(rows, self.shape[-1] // self.kind.block, self.kind.size)

    def read_rows(self, first: int, out: Array) -> None:
        """Read elements of `array` or `blocks` along axis 0, from `first` on, into whole memory.

        Raises:
            WeightsError: the file cannot be read, or was written since.
        """
        raw = out.reshape(-1).view(np.uint8)
        self._contents.read_into(self._begin + first * (raw.size // len(out)), raw)


class GGUF(Struct, frozen=True, eq=False):
    """A GGUF file, or the files that a model was split into.

    Attributes:
        file: its path; of several that of the first.
        values: metadata by name; arrays of numbers are NumPy's, those of strings lists.
        tensors: by name, in file order.
    """

    file: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def open_gguf(path: str | PathLike[str]) -> GGUF:
    """Open a GGUF file, with the other parts of its model if it is one; reads only headers.

    Args:
        path: a file; of a model in several files any one of them.

    Raises:
        WeightsError: no such file, a part that is missing, or a malformed one; names file, place,
            expected, got.
    """
    file = Path(path)
    one = _open(file)
    count = one.values.get("split.count", 0)
    if type(count) is not int or not 0 <= count <= PARTS:
        raise WeightsError(f"{file}: split.count: expected up to {PARTS}, got {show(count)}")
    if count < 2:  # `gguf-split --merge` writes 0
        return one
    files = split_files(file)
    if len(files) != count:
        raise WeightsError(
            f"{file}: expected a name that ends in -00001-of-{count:05}.gguf to "
            f"-{count:05}-of-{count:05}.gguf for one of the {count} files of a model, "
            f"got {file.name!r}"
        )
    return _joined(files, one)


def _joined(files: list[Path], opened: GGUF) -> GGUF:
    """The model of several files, of which one is open.

    Raises:
        WeightsError: as `open_gguf`; a part of another model, or in another's stead.
    """
    tensors: dict[str, GGUFTensor] = {}
    values: Mapping[str, Any] = {}
    for number, file in enumerate(files):
        part = opened if file == opened.file else _open(file)
        for key, wanted in (("split.no", number), ("split.count", len(files))):
            value = part.values.get(key)
            if type(value) is not int or value != wanted:
                raise WeightsError(f"{file}: {key}: expected {wanted}, got {show(value)}")
        both = tensors.keys() & part.tensors.keys()
        if both:
            raise WeightsError(
                f"{file}: tensor {show(min(both))}: expected it in one part, got it in two"
            )
        tensors |= part.tensors
        values = values if number else part.values
    total = values.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise WeightsError(
            f"{files[0]}: split.tensors.count: expected the {len(tensors)} tensors of the "
            f"{len(files)} parts, got {show(total)}"
        )
    return GGUF(files[0], values, tensors)


def _open(file: Path) -> GGUF:
    if not is_file(file):
        raise WeightsError(f"{file}: expected a GGUF file, got {kind(file)}")
    reader = _Header(Contents(file))
    if reader.bytes(4) != MAGIC:
        raise WeightsError(f"{file}: expected a GGUF file, which begins with {MAGIC!r}")
    version = reader.number("I")
    if version not in VERSIONS:
        raise WeightsError(f"{file}: version: expected 2 or 3, little-endian, got {version}")
    tensors = reader.count("tensors", reader.number("Q"), 24)
    count = reader.count("values", reader.number("Q"), 13)
    values: dict[str, Any] = {}
    for _ in range(count):
        name = reader.string()
        if name in values:
            raise WeightsError(f"{file}: value {show(name)}: expected it once, got it twice")
        values[name] = reader.value(name)
    entries = [reader.entry() for _ in range(tensors)]
    alignment = values.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise WeightsError(
            f"{file}: general.alignment: expected a power of two, got {show(alignment)}"
        )
    start = -(-reader.at // alignment) * alignment
    by_name: dict[str, GGUFTensor] = {}
    for name, shape, code, offset in entries:
        if name in by_name:
            raise WeightsError(f"{file}: tensor {show(name)}: expected it once, got it twice")
        by_name[name] = reader.tensor(name, shape, code, start + offset)
    return GGUF(file, values, by_name)


class _Header:
    """The header of a file as it is read: where, and how much is left."""

    def __init__(self, contents: Contents) -> None:
        self.at = 0
        self._contents = contents
        self._file = contents.file
        self._begin, self._part = 0, b""
        self._strings = STRINGS

    def bytes(self, count: int) -> bytes:
        """The next bytes."""
        end = self.at + count
        if not self._contents.size:
            raise WeightsError(f"{self._file}: expected a GGUF file, got an empty one")
        if end > self._contents.size:
            raise WeightsError(
                f"{self._file}: truncated: expected {count} bytes at {self.at}, got "
                f"{self._contents.size - self.at}"
            )
        if end > self._begin + len(self._part):
            self._begin = self.at
            last = min(self._contents.size, max(end, self.at + PART))
            self._part = self._contents.read(self.at, last).tobytes()
        first = self.at - self._begin
        self.at = end
        return self._part[first : first + count]

    def number(self, code: str) -> Any:
        """A number of struct's type."""
        return struct.unpack(f"<{code}", self.bytes(struct.calcsize(code)))[0]

    def count(self, what: str, number: int, least: int) -> int:
        """A number of things that take at least so many bytes each."""
        if number * least > self._contents.size - self.at:
            raise WeightsError(
                f"{self._file}: {what}: expected as many as fit into "
                f"{self._contents.size - self.at} bytes, got {number}"
            )
        return number

    def string(self) -> str:
        """Read a string: its length as u64, then UTF-8."""
        length = self.count("a string's bytes", self.number("Q"), 1)
        if length > LONGEST:
            raise WeightsError(f"{self._file}: a string: expected up to {LONGEST}, got {length}")
        return self.bytes(length).decode("utf-8", "replace")

    def value(self, name: str) -> Any:
        """A value of the type that comes before it."""
        code = self.number("I")
        if code != ARRAY:
            return self._one(name, code)
        inner, count = self.number("I"), self.number("Q")
        if inner == STRING:
            self.count(f"{show(name)}: strings", count, 8)
            self._strings -= count
            if self._strings < 0:
                raise WeightsError(f"{self._file}: expected up to {STRINGS} strings, got more")
            return [self.string() for _ in range(count)]
        if inner not in SCALARS:
            raise WeightsError(
                f"{self._file}: value {show(name)}: expected an array of numbers or strings, got "
                f"one of type {inner}"
            )
        dtype = np.dtype(f"<{SCALARS[inner]}")
        self.count(f"{show(name)}: numbers", count, dtype.itemsize)
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype)

    def _one(self, name: str, code: int) -> Any:
        if code == STRING:
            return self.string()
        if code not in SCALARS:
            raise WeightsError(
                f"{self._file}: value {show(name)}: expected a type of 0 to 12, got {code}"
            )
        return self.number(SCALARS[code])

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor."""
        name, rank = self.string(), self.number("I")
        if rank > RANK:
            raise WeightsError(
                f"{self._file}: tensor {show(name)}: expected up to {RANK} extents, got {rank}"
            )
        shape = tuple(self.number("Q") for _ in range(rank))[::-1]
        return name, shape, self.number("I"), self.number("Q")

    def tensor(self, name: str, shape: tuple[int, ...], code: int, begin: int) -> GGUFTensor:
        """A tensor whose data lie in the file."""
        origin = f"{self._file}: tensor {show(name)}"
        form = KINDS.get(code)
        if form is None:
            known = ", ".join(k.name for k in KINDS.values())
            raise WeightsError(f"{origin}: type: expected {known}, got type {code}")
        if 0 in shape:
            raise WeightsError(f"{origin}: expected extents over 0, got {list(shape)}")
        if shape and shape[-1] % form.block:
            raise WeightsError(
                f"{origin}: expected rows of whole blocks of {form.block}, got {list(shape)}"
            )
        tensor = GGUFTensor(name, form, shape, self._contents, begin)
        if begin + tensor.nbytes > self._contents.size:
            raise WeightsError(
                f"{origin}: truncated: expected {tensor.nbytes} bytes at {begin}, got "
                f"{max(0, self._contents.size - begin)}"
            )
        return tensor
