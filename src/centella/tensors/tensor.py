"""`Tensor`: an immutable array on a device, computed when it is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import centella.ops  # noqa: F401  # every op is registered there
from centella import lang
from centella.dtypes import Array, DType, dtype_of, from_host_array, narrow, promote, widen
from centella.errors import DTypeError
from centella.lang.values import Operand
from centella.op.op import Op, get
from centella.record.recording import Recording
from centella.record.values import Value
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.runtime.pending import Pending
from centella.runtime.readback import read_back
from centella.specs import Spec, dense_strides, strided
from centella.tensors import dlpack, views
from centella.tensors.handle import Handle
from centella.tensors.hints import numpy_ufunc, tensor_getattr

Scalar = int | float | bool


class Tensor(Handle):
    """An immutable array on a device: shape, dtype, operators, `.numpy()`.

    Arithmetic records operations; they run together when a value is needed. `x += y` rebinds x.
    Make one with `ct.asarray`, `ct.empty`, or an operation.

    Attributes:
        spec: shape, dtype and strides.
    """

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return numpy_ufunc(ufunc, method, inputs, options)

    # -- in other memory --------------------------------------------------------------------------

    def to(self, where: str | Device) -> Tensor:
        """This tensor on another device: a counted copy through the host."""
        target = open_device(where)
        if target is self.device:
            return self
        return upload("to", self.numpy(), self.dtype, target)

    def copy(self) -> Tensor:
        """A copy in memory of its own."""
        return apply("copy", self)

    def contiguous(self) -> Tensor:
        """This tensor in its device's own layout; itself where it already is."""
        if self._offset == 0 and self.spec == self.device.storage.spec(self.shape, self.dtype):
            return self
        return apply("copy", self)

    def astype(self, dtype: Any) -> Tensor:
        """Converted to another dtype: floats to integers truncate, NaN gives 0."""
        target = dtype_of(dtype)
        return self if target is self.dtype else apply("cast", self, dtype=target.name)

    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        """The same elements in another shape; one extent may be -1. A view where possible.

        Raises:
            ShapeError: when the sizes differ.
        """
        given = views.integers("reshape", "extents", shape)
        wanted = views.completed("reshape", given, self.size)
        if wanted == self.shape:
            return self
        strides = views.reshaped(self.spec, wanted)
        if strides is not None:
            return self._view(wanted, strides, self._offset)
        return apply("reshape", self, shape=wanted)

    # -- arithmetic -------------------------------------------------------------------------------

    def __add__(self, other: Tensor | Scalar) -> Tensor:
        return binary("add", self, other)

    def __radd__(self, other: Scalar) -> Tensor:
        return binary("add", other, self)

    def __sub__(self, other: Tensor | Scalar) -> Tensor:
        return binary("sub", self, other)

    def __rsub__(self, other: Scalar) -> Tensor:
        return binary("sub", other, self)

    def __mul__(self, other: Tensor | Scalar) -> Tensor:
        return binary("mul", self, other)

    def __rmul__(self, other: Scalar) -> Tensor:
        return binary("mul", other, self)

    def __truediv__(self, other: Tensor | Scalar) -> Tensor:
        return binary("div", self, other)

    def __rtruediv__(self, other: Scalar) -> Tensor:
        return binary("div", other, self)

    def __neg__(self) -> Tensor:
        return apply("neg", self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return apply("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        raise not_a_tensor("matmul", other)

    def __pow__(self, exponent: Tensor | Scalar) -> Tensor:
        return power(self, exponent)

    def __rpow__(self, base: Scalar) -> Tensor:
        return binary("pow", base, self)

    def __abs__(self) -> Tensor:
        return apply("abs", self)

    def __pos__(self) -> Tensor:
        return self

    def __floordiv__(self, other: Tensor | Scalar) -> Tensor:
        return binary("floor_divide", self, other)

    def __rfloordiv__(self, other: Scalar) -> Tensor:
        return binary("floor_divide", other, self)

    def __mod__(self, other: Tensor | Scalar) -> Tensor:
        return binary("remainder", self, other)

    def __rmod__(self, other: Scalar) -> Tensor:
        return binary("remainder", other, self)

    def __lt__(self, other: Tensor | Scalar) -> Tensor:
        return compared("lt", self, other)

    def __le__(self, other: Tensor | Scalar) -> Tensor:
        return compared("le", self, other)

    def __gt__(self, other: Tensor | Scalar) -> Tensor:
        return compared("gt", self, other)

    def __ge__(self, other: Tensor | Scalar) -> Tensor:
        return compared("ge", self, other)

    def __and__(self, other: Tensor | bool) -> Tensor:
        return binary("logical_and", self, other)

    def __or__(self, other: Tensor | bool) -> Tensor:
        return binary("logical_or", self, other)

    def __invert__(self) -> Tensor:
        return apply("logical_not", self)

    if not TYPE_CHECKING:  # which is to say itself what a Tensor has not

        def __getattr__(self, name: str) -> Any:
            return tensor_getattr(self, name)

        def __setitem__(self, key: Any, value: Any) -> None:
            raise TypeError(
                "a Tensor has no item assignment: ct.where and ct.scatter make another, a ct.State "
                "changes"
            )

    # -- copies: the data is on a device, so there is nothing to pickle ----------------------------

    def __copy__(self) -> Tensor:
        return Tensor(self._value, self.spec, self._offset)

    def __deepcopy__(self, _: Any) -> Tensor:
        return self.copy()

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("the data of a Tensor is on a device: pickle x.numpy()")

    # -- DLPack: memory of the CPU and of CUDA, read-only ------------------------------------------

    def __dlpack_device__(self) -> tuple[int, int]:
        where = self.device.backend.dlpack
        if where is None:
            raise BufferError(f"DLPack: {self.device.name} does not export memory; use .numpy()")
        return where

    def __dlpack__(
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None, copy: bool | None = None,
    ) -> Any:  # fmt: skip
        """The memory itself, where the consumer can be told that it is read-only; else a copy.

        Args:
            stream: where a consumer on CUDA works, which is made to wait for what is computed;
                -1: it has seen to that itself.

        Raises:
            BufferError: memory that is not exported, on another device, or without the copy that
                it needs: `copy=False` below version 1.0, or of a State.
        """
        where = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != where:
            raise BufferError(f"DLPack: expected device {where}, got {dl_device}; use .numpy()")
        versioned = max_version is not None and max_version >= dlpack.VERSIONED
        shared = versioned and not copy and self._value.cell is None
        if not shared and copy is False:
            raise BufferError("DLPack: values are immutable; ask for version 1.0 or a copy")
        flags = dlpack.READ_ONLY if shared else dlpack.COPIED
        # A copy on the CPU may be the value itself, so the array there is copied instead.
        source = self if shared or where[0] == dlpack.CPU else self.copy()
        address, owner = source.device.lend(source._value, stream)
        start, spec = (source._value.offset + source._offset) * self.dtype.itemsize, source.spec
        if source is self and not shared:
            owner = strided(owner, spec, start).copy()
            address, start = owner.ctypes.data, 0
            spec = Spec(self.shape, self.dtype, dense_strides(self.shape))
        return dlpack.export(address + start, spec, where, owner, versioned=versioned, flags=flags)


# -- recording ------------------------------------------------------------------------------------


def apply(name: str, *tensors: Tensor, **attrs: Any) -> Tensor:
    """Record an op of one output."""
    return apply_all(get(name), tensors, attrs)[0]


def apply_all(
    op: Op[Any], tensors: Sequence[Tensor], attrs: dict[str, Any], target: Recording | None = None
) -> tuple[Tensor, ...]:
    """Record an op; a copy is recorded first for an operand whose layout it does not take."""
    specs: list[Spec] = []
    operands: list[tuple[Value, int]] = []
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise not_a_tensor(op.name, tensor)
        specs.append(tensor.spec)
        operands.append((tensor._value, tensor._offset))
    where: Device = operands[0][0].device
    recorder = where.recorder
    form = recorder.form(op, tuple(specs), attrs)
    if form.copies:
        for index in form.copies:
            if operands[index][0].device is where:
                copied = tensors[index].copy()
                specs[index], operands[index] = copied.spec, (copied._value, 0)
        form = recorder.form(op, tuple(specs), attrs)
    made = recorder.add(form, operands, target)
    return tuple(map(Tensor, made, form.outputs))


def apply_with(
    name: str, tensors: Sequence[Tensor], listed: str, optional: Mapping[str, Tensor | None],
    attrs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Record an op of one output with those optional operands that are given.

    Args:
        listed: the attribute that names them, in order.
    """
    given = {n: t for n, t in optional.items() if t is not None}
    return apply_all(get(name), (*tensors, *given.values()), {**attrs, listed: tuple(given)})[0]


def not_a_tensor(op: str, got: Any) -> DTypeError:
    """The error of an op that is given something else."""
    _ = getattr(got, "spec", None)  # a Parameter without data says so itself
    hint = "ct.asarray makes one"
    if isinstance(got, (list, tuple)) and any(isinstance(x, Tensor) for x in got):
        hint = "ct.stack and ct.concat join several"
    elif isinstance(getattr(got, "value", None), Tensor):  # a State
        hint = "its .value is one"
    elif isinstance(got, Operand):  # inside a kernel
        hint = f"lang.{op} takes a traced value" if hasattr(lang, op) else "see centella.lang"
    return DTypeError(f"{op}: expected a Tensor, got {type(got).__name__}; {hint}")


def binary(name: str, a: Any, b: Any, *before: Tensor) -> Tensor:
    """An element-wise op of two operands, of which one may be a Python number, after others."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.spec.dtype is not b.spec.dtype:
            common = promote(name, a.dtype, b.dtype)
            a, b = a.astype(common), b.astype(common)
        return apply(name, *before, a, b)
    if isinstance(a, Tensor):
        return apply(name, *before, a, second=_number(name, b, a.dtype))
    if isinstance(b, Tensor):
        return apply(name, *before, b, first=_number(name, a, b.dtype))
    got = f"{type(a).__name__} and {type(b).__name__}"
    raise DTypeError(f"{name}: expected two Tensors, or one and a number, got {got}")


def power(x: Tensor, exponent: Any) -> Tensor:
    """x to the power of a Tensor or a number.

    A whole number up to 64 takes products, which round each, and 0.5 the square root; below 0 it
    is 1 / x^-n. Any other number, and a Tensor, is for floats.

    Raises:
        DTypeError: another exponent.
    """
    n = exponent.item() if isinstance(exponent, np.generic) else exponent
    if isinstance(n, float) and n == 0.5:
        return apply("sqrt", x)
    if isinstance(n, float) and n.is_integer():
        n = int(n)
    if isinstance(n, Tensor) or (x.dtype.is_float and (type(n) is float or _is_large(n))):
        return binary("pow", x, n)
    if type(n) is not int or _is_large(n) or (n < 0 and not x.dtype.is_float):
        raise DTypeError(
            f"pow: expected an exponent of 0.5 or a whole number to 64, of integers 0 or more, got "
            f"{exponent!r}; floats take any number and a Tensor"
        )
    if n == 0:
        ones = {"shape": x.shape, "dtype": x.dtype.name, "value": 1}
        (value,) = x.device.recorder.record(get("fill"), [], ones)
        return Tensor(value, value.spec)
    made, square, rest = None, x, abs(n)
    while rest:
        if rest & 1:
            made = square if made is None else apply("mul", made, square)
        rest >>= 1
        square = apply("square", square) if rest else square
    assert made is not None, "an exponent that is not 0 has a bit"
    return made if n > 0 else binary("div", 1.0, made)


def _is_large(n: Any) -> bool:
    return type(n) is int and abs(n) > 64


def compared(name: str, a: Any, b: Any) -> Tensor:
    """A comparison of two operands; a number is rounded to the dtype of the tensor it meets."""
    if isinstance(a, Tensor) and isinstance(b, (float, np.floating)):
        b = _rounded(float(b), a.dtype)
    elif isinstance(b, Tensor) and isinstance(a, (float, np.floating)):
        a = _rounded(float(a), b.dtype)
    return binary(name, a, b)


def _rounded(value: float, dtype: DType) -> float:
    """A number as a float dtype stores it; one beyond its range stays beyond its numbers."""
    if not dtype.is_float:
        return value
    with np.errstate(over="ignore"):
        near = float(widen(narrow(np.array([value], np.float32), dtype), dtype)[0])
    return value if math.isinf(near) else near


def _number(name: str, value: Any, dtype: DType) -> Scalar:
    if type(value) is float and dtype.is_float:
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int)) or (isinstance(value, float) and dtype.is_float):
        return value
    if isinstance(value, np.ndarray):
        raise DTypeError(f"{name}: expected a Tensor, got a NumPy array; ct.asarray makes one")
    if not isinstance(value, (float, str)):
        raise not_a_tensor(name, value)
    raise DTypeError(
        f"{name}: expected a Tensor or a Python number that fits {dtype.name}, got {value!r}"
    )


# -- to and from the host --------------------------------------------------------------------------


def upload(
    op: str, data: Any, dtype: Any, device: Device, target: Recording | None = None,
    stays: bool = False,
) -> Tensor:  # fmt: skip
    """Host data as a tensor of a device, or of a recording on it; a snapshot is taken now.

    Args:
        stays: the data changes no more, so it need not be copied where it can be read.
    """
    array, kind = from_host_array(op, data, dtype)
    spec = device.storage.spec(array.shape, kind)
    return Tensor(device.recorder.upload(array, spec, target, stays), spec)


def fetch(*tensors: Tensor) -> Pending[list[Array]]:
    """Several results on the host, in one submission a device.

    Returns:
        A Pending of NumPy arrays, in order; `.result()` waits, or await it.

    Raises:
        ContractError: for a tensor of a batch that has not been executed.
        TransferForbidden: inside `ct.forbid("transfer")`.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise not_a_tensor("fetch", tensor)
    return read_back([t._seen for t in tensors])
