"""One table of storage types: size, NumPy view, value type inside kernels, tolerance.

A *storage* type is what a tensor's bytes mean. Inside a kernel every element is one of four
*value* types (f32, i32, u32, bool); `DType.value` names it. bf16 has no NumPy type: on the host
its bytes are `uint16` and `widen`/`narrow` convert (narrowing rounds to nearest even).
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
from msgspec import Struct

from centella.errors import DTypeError, ShapeError

Array = np.ndarray[Any, np.dtype[Any]]


class DType(Struct, frozen=True, eq=False):
    """A storage type. There is one object of each; `x.dtype == "f32"` and NumPy's types work too.

    Attributes:
        name: short name, as in the kernel language ("f32").
        itemsize: bytes an element.
        kind: "float", "int", "uint" or "bool".
        value: name of the type its elements have inside a kernel.
        numpy: dtype of the host array that holds its bytes.
        epsilon: unit round-off of one store (0 for integers).
    """

    name: str
    itemsize: int
    kind: str
    value: str
    numpy: np.dtype[Any]
    epsilon: float

    def __repr__(self) -> str:
        return f"centella.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (dtype_of, (self.name,))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (str, np.dtype)) or (
            isinstance(other, type) and issubclass(other, (np.generic, bool))
        ):
            try:
                return dtype_of(other) is self
            except DTypeError:
                return False
        return self is other

    def __ne__(self, other: object) -> bool:
        return not self == other  # a Struct's own would compare objects

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_float(self) -> bool:
        """True for f32, f16 and bf16."""
        return self.kind == "float"

    @property
    def per_word(self) -> int:
        """Elements in a 32-bit word."""
        return 4 // self.itemsize

    @property
    def per_chunk(self) -> int:
        """Elements in a 16-byte chunk."""
        return 16 // self.itemsize


f32: DType = DType("f32", 4, "float", "f32", np.dtype(np.float32), 2.0**-24)
f16: DType = DType("f16", 2, "float", "f32", np.dtype(np.float16), 2.0**-11)
bf16: DType = DType("bf16", 2, "float", "f32", np.dtype(np.uint16), 2.0**-8)
i32: DType = DType("i32", 4, "int", "i32", np.dtype(np.int32), 0.0)
u32: DType = DType("u32", 4, "uint", "u32", np.dtype(np.uint32), 0.0)
i8: DType = DType("i8", 1, "int", "i32", np.dtype(np.int8), 0.0)
u8: DType = DType("u8", 1, "uint", "u32", np.dtype(np.uint8), 0.0)
bool_: DType = DType("bool", 1, "bool", "bool", np.dtype(np.bool_), 0.0)

ALL: dict[str, DType] = {d.name: d for d in (f32, f16, bf16, i32, u32, i8, u8, bool_)}
_BY_NUMPY: dict[np.dtype[Any], DType] = {d.numpy: d for d in ALL.values() if d is not bf16}


# Names of other libraries and of checkpoints that NumPy does not know.
SAME: dict[str, str] = {"bfloat16": "bf16", "BF16": "bf16", "fp16": "f16", "fp32": "f32"}


def dtype_of(spec: Any) -> DType:
    """The DType that a name, NumPy dtype or DType stands for.

    Raises:
        DTypeError: for a type that tensors cannot store (float64, int64, strings ...).
    """
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, str) and (name := SAME.get(spec, spec)) in ALL:
        return ALL[name]
    try:
        dtype = _BY_NUMPY.get(np.dtype(spec))
    except (TypeError, ValueError):  # NumPy's words for what is no dtype
        dtype = None
    if dtype is None:
        names = ", ".join(ALL)
        device = isinstance(spec, str) and spec.partition(":")[0] in ("cpu", "cuda", "webgpu")
        hint = f"; write device={spec!r}" if device else ""
        raise DTypeError(f"{spec!r:.80} is not a storage type; expected one of {names}{hint}")
    return dtype


def from_numpy(dtype: np.dtype[Any], op: str = "asarray") -> DType:
    """The storage type of a host array's dtype; float64 and int64 are refused, never narrowed.

    Raises:
        DTypeError: names `dtype=` as the way to say which narrower type is meant.
    """
    storage = _BY_NUMPY.get(dtype)
    if storage is None:
        hint = {"i": "int32", "u": "uint32"}.get(dtype.kind, "float32")
        raise DTypeError(
            f"{op}: {dtype} has no storage type on a device; pass dtype= (for example "
            f"dtype={hint!r}) where it is taken, else convert it by x.astype(np.{hint})"
        )
    return storage


def check_elements(op: str, native: Any, dtype: DType) -> None:
    """Refuse an array over whose memory a tensor of `dtype` would read something else.

    Memory that names no type (an address, a driver's buffer) and plain bytes (uint8, void) may
    hold any.

    Raises:
        DTypeError: its elements are of another type.
    """
    if isinstance(native, np.ndarray):
        stored = native.dtype
    else:
        interface = getattr(native, "__cuda_array_interface__", None)
        if interface is None:
            return
        stored = np.dtype(interface["typestr"])
    if stored != dtype.numpy and stored != np.uint8 and stored.kind != "V":
        raise DTypeError(
            f"{op}: expected an array of {dtype.name} (NumPy's {dtype.numpy}), got {stored}; "
            f"convert it, or pass its bytes: .view('uint8')"
        )


def from_host_array(op: str, data: Any, dtype: Any) -> tuple[Array, DType]:
    """Host data as an array of a storage type's bytes, and that type.

    Args:
        op: who asks, for error texts.
        data: array, nested list or number; Python floats are f32 and integers i32.
        dtype: the type to convert to, or None: the data's own.

    Raises:
        DTypeError: no such type, float64 or int64 data with none given, values that do not fit.
        ShapeError: a nested list with rows of unequal length.
    """
    if dtype is None and type(data) is np.ndarray:
        known = _BY_NUMPY.get(data.dtype)
        if known is not None:
            return data, known
    array = host_numbers(op, data)
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
        if dtype is None or dtype_of(dtype) is bf16:
            return array, bf16
        array = widen(array, bf16)
    if dtype is not None:
        kind = dtype_of(dtype)
    elif hasattr(data, "dtype"):
        kind = from_numpy(array.dtype, op)
    else:
        kind = {"f": f32, "i": i32}.get(array.dtype.kind) or from_numpy(array.dtype, op)
    return _converted(op, array, kind), kind


def host_numbers(op: str, data: Any) -> Array:
    """Host data as NumPy has it: an array of numbers or bools, or of bfloat16.

    Raises:
        DTypeError: data that are no numbers.
        ShapeError: a nested list with rows of unequal length.
    """
    try:
        array = np.asarray(data)
    except ValueError as error:
        rows = data if isinstance(data, (list, tuple)) else ()
        lengths = sorted({len(row) for row in rows if isinstance(row, Sized)})
        got = f"{lengths[0]} and {lengths[-1]}" if len(lengths) > 1 else f"others ({error})"
        raise ShapeError(f"{op}: expected rows of equal length, got {got}") from error
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise _no_numbers(op, data, array.dtype)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _no_numbers(op: str, data: Any, dtype: np.dtype[Any]) -> DTypeError:
    """The error of host data that no dtype= makes storable."""
    if dtype.kind == "c":
        return DTypeError(
            f"{op}: {dtype} has no storage type on a device; store its .real and its .imag"
        )
    if dtype.kind == "O" and (large := _beyond_int64(data)) is not None:
        return DTypeError(f"{op}: {large!r:.40} does not fit any integer dtype")
    container = isinstance(data, (np.ndarray, list, tuple))
    got = f"{type(data).__name__} of {dtype}" if container else type(data).__name__
    hint = "; list(...) makes one" if hasattr(data, "__next__") else ""
    return DTypeError(f"{op}: expected numbers, an array or a nested list of them, got {got}{hint}")


def _beyond_int64(data: Any) -> int | None:
    """An integer that no NumPy type holds, where host data has one."""
    values = np.asarray(data, object).flat
    return next((v for v in values if type(v) is int and not -(2**63) <= v < 2**64), None)


def _converted(op: str, array: Array, kind: DType) -> Array:
    """The bytes of `kind`: floats to integers truncate and saturate; integers must fit."""
    if array.dtype == kind.numpy:
        return array
    if kind.kind in ("int", "uint") and array.size and array.dtype.kind != "b":
        if array.dtype.kind == "f":
            return to_integers(array, kind)
        info = np.iinfo(kind.numpy)
        low, high = int(array.min()), int(array.max())
        if low < info.min or high > info.max:
            wrong = low if low < info.min else high
            raise DTypeError(f"{op}: {wrong} does not fit {kind.name}")
    return narrow(array, kind)


def to_integers(array: Array, dtype: DType) -> Array:
    """Floats as integers of `dtype`: truncated, saturated, NaN gives 0."""
    info = np.iinfo(dtype.numpy)
    whole = np.nan_to_num(np.trunc(array.astype(np.float64)), nan=0.0)
    return np.asarray(np.clip(whole, info.min, info.max)).astype(dtype.numpy)


def widen(array: Array, dtype: DType) -> Array:
    """Host bytes of `dtype` as an array to compute with: 16-bit floats become float32."""
    if dtype is bf16:
        wide = np.asarray(array.astype(np.uint32) << np.uint32(16))
        return wide.view(np.float32)
    if dtype is f16:
        return array.astype(np.float32)
    return array


def narrow(array: Array, dtype: DType) -> Array:
    """A computed array as the host bytes of `dtype`; floats round to nearest even."""
    if dtype is bf16:
        bits = np.asarray(array, np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        quiet = bits | np.uint32(0x00400000)
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.asarray(np.where(nan, quiet, rounded) >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype.numpy, copy=False)


def promote(op: str, a: DType, b: DType) -> DType:
    """The dtype of `a op b`: equal types stay, a 16-bit float with f32 is f32.

    Raises:
        DTypeError: for any other mix; cast one side by `.astype(...)`.
    """
    if a is b:
        return a
    if a.is_float and b.is_float and f32 in (a, b):
        return f32
    raise DTypeError(f"{op}: cannot mix {a.name} and {b.name}; cast one with .astype()")
