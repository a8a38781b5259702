"""Files of torch.save: opening one reads its list of tensors, a tensor is read when it is wanted.

    NAME/data.pkl     a dict: names to tensors, as a pickle
    NAME/data/KEY     the bytes of a storage, which tensors are parts of; not compressed
    NAME/byteorder    "little"

A pickle is a program, so it is not run here: the few instructions that write a dict of tensors are
read as a list, and whatever else there is, above all a class or function to call, is refused.

Source: the documentation of PyTorch ("Serialization semantics") and of Python's `pickletools`.
"""

from __future__ import annotations

import math
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from centella.errors import WeightsError
from centella.weights.contents import Contents
from centella.weights.model_files import MAX_JSON, check_pointer, is_file, kind, show
from centella.weights.safetensors import DTYPES, POINTER_BYTES, StoredTensor

LIST = "/data.pkl"
LARGEST = 2**63
MOST = 2**19  # instructions; a tensor takes some 40
RANK = 64  # of a tensor, NumPy's
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, ValueError, OSError, EOFError,
               RuntimeError)  # fmt: skip
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # that the list may have
LOCAL, SIGNATURE = 30, b"PK\x03\x04"  # bytes before the name of an entry, and how they begin
# By the class of a storage.
STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL",
}  # fmt: skip
DICT, TENSOR, PARAMETER = (
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
)  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
VALUES = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8".split()
)
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name(Struct, frozen=True):
    """A class or function that the pickle names."""

    name: str


class _Storage(Struct, frozen=True):
    """Numbers in an entry of the file: how they are stored, and how many."""

    key: str
    dtype: str
    count: int


class _View(Struct, frozen=True):
    """A tensor: a part of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]


def read_torch(path: Path) -> dict[str, StoredTensor]:
    """Open a file that torch.save has written of a dict of tensors; nothing in it is run.

    Returns:
        Its tensors by name.

    Raises:
        WeightsError: no such file, a malformed one, or one of other objects than tensors.
    """
    if not is_file(path):
        raise WeightsError(f"{path}: expected a file of torch.save, got {kind(path)}")
    contents = Contents(path)
    check_pointer(path, contents.read(0, min(POINTER_BYTES, contents.size)).tobytes())
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            lists = [name for name in entries if name.endswith(LIST)]
            if len(lists) != 1 or entries[lists[0]].file_size > MAX_JSON:
                raise WeightsError(f"{path}: expected one entry data.pkl of up to {MAX_JSON} bytes")
            root = lists[0].removesuffix(LIST)
            order = entries.get(f"{root}/byteorder")
            for entry in (entries[lists[0]], order):
                if entry is not None and entry.compress_type not in COMPRESSIONS:
                    raise WeightsError(f"{path}: {entry.filename}: expected it stored or deflated")
            if order is not None and order.file_size < RANK and archive.read(order) != b"little":
                raise WeightsError(f"{path}: expected little-endian numbers")
            views = _read(path, archive.read(lists[0]))
    except WeightsError:
        raise
    except _UNREADABLE as error:
        raise WeightsError(f"{path}: expected a zip file of torch.save: {error}") from error
    return {
        name: _tensor(contents, name, view, entries.get(f"{root}/data/{view.storage.key}"))
        for name, view in views.items()
    }


def _tensor(
    contents: Contents, name: str, view: _View, entry: zipfile.ZipInfo | None
) -> StoredTensor:
    """A tensor whose storage is an entry of the file."""
    dtype, stored = DTYPES[view.storage.dtype]
    size = stored.itemsize
    last = view.offset + math.prod(view.shape)
    fits = entry is not None and entry.compress_type == zipfile.ZIP_STORED
    if entry is None or not fits or entry.file_size < max(last, view.storage.count) * size:
        raise WeightsError(
            f"{contents.file}: tensor {show(name)}: expected {last} x {size} bytes that are not "
            f"compressed, got other ones"
        )
    end = min(contents.size, entry.header_offset + LOCAL)
    head = contents.read(entry.header_offset, max(end, entry.header_offset)).tobytes()
    begin = entry.header_offset + LOCAL
    begin += int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    if head[:4] != SIGNATURE or begin + last * size > contents.size:
        raise WeightsError(f"{contents.file}: tensor {show(name)}: truncated or out of range")
    begin += view.offset * size
    end = begin + math.prod(view.shape) * stored.itemsize
    return StoredTensor(name, contents.file, dtype, view.shape, contents, begin, end, stored)


def _read(file: Path, pickle: bytes) -> dict[str, _View]:
    """The tensors of a pickle, by name."""
    try:
        value = _Machine().run(pickle)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise WeightsError(f"{file}: expected a dict of tensors: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{file}: expected a dict of tensors, got a {type(value).__name__}")
    for name, view in value.items():
        if not isinstance(view, _View):
            raise WeightsError(f"{file}: {show(name)}: expected a tensor, got {show(view)}")
    return value


class _Machine:
    """Reads the instructions of a pickle. It makes dicts, tuples and the classes above, no more.

    Whatever is wrong is a ValueError, TypeError, IndexError, KeyError or OverflowError.
    """

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, pickle: bytes) -> Any:
        """What the pickle says."""
        for count, (code, argument) in enumerate(_instructions(pickle)):
            if count >= MOST:
                raise ValueError(f"more than {MOST} instructions")
            if code == "STOP":
                return self._stack.pop()
            self._step(code, argument)
        raise ValueError("it has no end")

    def _step(self, code: str, argument: Any) -> None:
        stack = self._stack
        if code in ("PROTO", "FRAME"):
            return
        if code in VALUES:
            stack.append(argument)
        elif code in CONSTANTS:
            stack.append(CONSTANTS[code])
        elif code in TUPLES:
            stack.append(tuple(self._last(len(stack) - TUPLES[code])))
        elif code == "TUPLE":
            stack.append(tuple(self._last(self._marks.pop())))
        elif code == "EMPTY_DICT":
            stack.append({})
        elif code == "MARK":
            self._marks.append(len(stack))
        elif code in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif code == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif code in ("SETITEM", "SETITEMS"):
            self._set(self._last(len(stack) - 2 if code == "SETITEM" else self._marks.pop()))
        elif code == "GLOBAL":
            stack.append(_Name(argument))
        elif code == "STACK_GLOBAL":
            module, name = self._last(len(stack) - 2)
            stack.append(_Name(f"{module!s:.200} {name!s:.200}"))
        elif code == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif code == "REDUCE":
            stack.append(_built(*self._last(len(stack) - 2)))
        elif code == "BUILD":
            self._last(len(stack) - 1)  # attributes of a state_dict, such as versions of modules
        else:
            raise ValueError(f"an instruction {code}, which no dict of tensors needs")

    def _last(self, begin: int) -> list[Any]:
        """Take what is on the stack from there on."""
        if not 0 <= begin <= len(self._stack):
            raise IndexError("it takes more than there is")
        values = self._stack[begin:]
        del self._stack[begin:]
        return values

    def _set(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise TypeError("items of what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, str):
                raise TypeError("a name that is no text")
            target[key] = value


def _instructions(pickle: bytes) -> Iterator[tuple[str, Any]]:
    """Name and argument of each instruction."""
    for code, argument, _ in pickletools.genops(pickle):
        yield code.name, argument


def _storage(value: Any) -> _Storage:
    """What ("storage", its class, key, device, count) means."""
    _, named, key, _, count = value
    dtype = STORAGES.get(named.name.removeprefix("torch ")) if isinstance(named, _Name) else None
    if value[0] != "storage" or dtype is None or not isinstance(key, str):
        raise ValueError(f"a storage of {show(named)}")
    return _Storage(key, dtype, _whole(count))


def _built(what: Any, arguments: Any) -> Any:
    """What a call of the few functions that tensors need gives."""
    makers: dict[str, Callable[..., Any]] = {
        DICT: lambda: {}, TENSOR: _view, PARAMETER: lambda tensor, *_: tensor,
    }  # fmt: skip
    if not isinstance(what, _Name) or what.name not in makers:
        raise ValueError(f"a call of {show(what)}")
    if not isinstance(arguments, tuple):
        raise TypeError("a call without a tuple of arguments")
    return makers[what.name](*arguments)


def _view(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any = None, hooks: Any = None,
    metadata: Any = None,
) -> _View:  # fmt: skip
    """A tensor whose elements lie one after the other and are as they are stored."""
    if metadata:
        raise ValueError(f"a tensor with metadata {show(metadata)}, which change its numbers")
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or len(shape) > RANK:
        raise ValueError("a tensor of another form")
    sizes, steps = tuple(map(_whole, shape)), tuple(map(_whole, strides))
    count = math.prod(sizes)
    if count > storage.count - _whole(offset):
        raise ValueError(f"a tensor {show(sizes)} of a storage of {storage.count}")
    step = 1
    for size, stride in zip(reversed(sizes), reversed(steps), strict=True):
        if count and size > 1 and stride != step:
            raise ValueError(f"a tensor {show(sizes)} with strides {show(steps)}")
        step *= size
    return _View(storage, offset, sizes)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"expected a whole number, got {show(value)}")
    return value
