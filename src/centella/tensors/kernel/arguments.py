"""The arguments of a launch, checked against what the kernel declares."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import bf16
from centella.emit.program import Constants, Kernel, raw_word
from centella.errors import DeviceError, DTypeError, LimitError, ShapeError, TraceError
from centella.lang.kernel_params import REQUIRED, TensorParam
from centella.specs import MAX_GROUPS
from centella.tensors.state import State
from centella.tensors.tensor import Tensor
from centella.tensors.views import reshaped

# What other libraries call the size of a launch.
LAUNCH = {"thread": "threads", "n_threads": "threads", "num_threads": "threads"}
LAUNCH |= dict.fromkeys(("group", "blocks", "grid", "num_groups", "workgroups"), "groups")
MOST_THREADS = (1 << 32) - 1024  # whole groups of them have u32 ids


class Arguments(Struct, frozen=True):
    """Tensors in the order of the declaration; scalars and constants by name."""

    tensors: tuple[tuple[Tensor, TensorParam], ...]
    scalars: tuple[tuple[str, int | float], ...]
    constants: Constants


def bind(
    kernel: Kernel, positions: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]
) -> Arguments:
    """The arguments by their parameters; `positions` are the names that `args` may fill.

    Raises:
        TraceError, ShapeError, DTypeError, DeviceError: naming the kernel and what does not fit.
    """
    signature = kernel.signature
    values, constants = _by_name(kernel, positions, args, named)
    tensors = tuple((_tensor(kernel, n, values[n], param), param) for n, param in signature.tensors)
    _check_together(kernel, tensors)
    scalars = tuple((n, _scalar(kernel, n, values[n], kind)) for n, kind in signature.scalars)
    for name, value in constants.items():
        try:
            hash(value)
        except TypeError as error:
            raise TraceError(
                f"{kernel.name}: constant {name!r} chooses the program and must be hashable, "
                f"got {value!r}"
            ) from error
    return Arguments(tensors, scalars, tuple(constants.items()))


def _by_name(
    kernel: Kernel, positions: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and scalars by name, and constants by name: each given once, none missing."""
    if len(args) > len(positions):
        raise TraceError(
            f"{kernel.name}: expected at most {len(positions)} arguments, got {len(args)}"
        )
    values = dict(zip(positions, args, strict=False))
    twice = set(values) & set(named)
    values.update(named)
    constants = {n: values.pop(n, default) for n, default in kernel.signature.constants}
    missing = [n for n in kernel.signature.operands if n not in values]
    missing += [n for n, v in constants.items() if v is REQUIRED]
    extra = [n for n in values if n not in kernel.signature.operands]
    if missing or extra or twice:
        wrong = {"missing": missing, "unknown": extra, "given twice": sorted(twice)}
        said = ", ".join(f"{what} {names}" for what, names in wrong.items() if names)
        meant = [f"{LAUNCH[n]}=" for n in extra if n in LAUNCH]
        raise TraceError(f"{kernel.name}: {said}{f'; write {meant[0]}' if meant else ''}")
    return values, constants


def _check_together(kernel: Kernel, tensors: tuple[tuple[Tensor, TensorParam], ...]) -> None:
    """There are tensors, on one device, and each output has a handle of its own."""
    if not tensors:
        raise TraceError(f"{kernel.name}: a kernel needs a tensor argument")
    where = dict.fromkeys(t.device for t, _ in tensors)
    if len(where) > 1:
        names = " and ".join(d.name for d in where)
        raise DeviceError(f"{kernel.name}: operands on {names}; move one with .to(device)")
    handles = [id(t) for t, param in tensors if param.mode == "out"]
    if len(set(handles)) < len(handles):
        raise TraceError(f"{kernel.name}: one tensor is given for two Out arguments")


def _tensor(kernel: Kernel, name: str, tensor: Any, param: TensorParam) -> Tensor:
    if isinstance(tensor, State) and param.mode != "out":
        tensor = tensor.value
    elif param.mode == "inout":
        raise TraceError(
            f"{kernel.name}: expected a State for {name!r}, which is InOut, got "
            f"{type(tensor).__name__}; ct.State(x) makes one, or write to an Out argument"
        )
    if not isinstance(tensor, Tensor):
        raise DTypeError(
            f"{kernel.name}: expected a Tensor for {name!r}, got {type(tensor).__name__}"
        )
    if param.dtype is not None and tensor.dtype is not param.dtype:
        raise DTypeError(
            f"{kernel.name}: expected {param.dtype.name} for {name!r}, got {tensor.dtype.name}"
        )
    if param.rank == 2 and tensor.ndim != 2:
        raise ShapeError(f"{kernel.name}: expected rank 2 for {name!r}, got {list(tensor.shape)}")
    if param.mode == "inout" and param.rank == 1 and reshaped(tensor.spec, (tensor.size,)) is None:
        raise ShapeError(
            f"{kernel.name}: expected InOut[..., 2] for {name!r}: rows of {list(tensor.shape)} are "
            f"padded in memory"
        )
    if param.mode == "scalar" and tensor.size != 1:
        raise ShapeError(
            f"{kernel.name}: expected one element for {name!r}, got {list(tensor.shape)}"
        )
    return tensor


def _scalar(kernel: Kernel, name: str, value: Any, kind: str) -> int | float:
    """A launch parameter as a Python number, when it fits."""
    if isinstance(value, Tensor):
        raise DTypeError(
            f"{kernel.name}: expected a number for {name!r}, got a Tensor; declare it "
            f"Scalar[{kind}] to pass a value in device memory"
        )
    plain = value.item() if isinstance(value, np.generic) else value
    if not isinstance(plain, (int, float) if kind == "f32" else int):
        raise DTypeError(f"{kernel.name}: expected {kind} for {name!r}, got {value!r}")
    try:
        raw_word(plain, kind)
    except (LimitError, OverflowError) as error:
        raise DTypeError(f"{kernel.name}: {name!r}: {error}") from error
    return plain


def check_written(kernel: Kernel, bound: Arguments, groups: int) -> None:
    """Refuse a launch without threads whose outputs would stay undefined.

    Raises:
        TraceError: naming an output that has elements.
    """
    for (name, param), (tensor, _) in zip(kernel.signature.tensors, bound.tensors, strict=True):
        if not groups and param.mode == "out" and tensor.size:
            raise TraceError(
                f"{kernel.name}: expected threads to write {name!r} of {list(tensor.shape)}, got 0"
            )


def host_array(kernel: Kernel, name: str, value: Any, param: TensorParam) -> np.ndarray[Any, Any]:
    """A host array for a tensor argument; one with a dtype has the declared one.

    Raises:
        DTypeError: it has another, which a launch would not take either.
    """
    array = np.asarray(value)
    wanted = param.dtype
    if wanted is None or wanted is bf16 or param.mode == "out" or not hasattr(value, "dtype"):
        return array
    if array.dtype != wanted.numpy:
        raise DTypeError(
            f"{kernel.name}: expected {wanted.name} for {name!r}, got an array of {array.dtype}"
        )
    return array


def group_count(kernel: Kernel, threads: int | None, groups: int | None) -> int:
    """Groups of a launch that asks for threads or groups.

    Raises:
        TraceError: for none of them, both, or no number; LimitError: for too many.
    """
    if threads is not None and groups is not None:
        raise TraceError(
            f"{kernel.name}: give threads= or groups=, not both (a group has {kernel.workgroup} "
            f"threads)"
        )
    asked = groups if threads is None else threads
    if asked is None:
        raise TraceError(f"{kernel.name}: give threads= or groups=")
    if type(asked) is bool or not hasattr(asked, "__index__") or asked < 0:
        raise TraceError(f"{kernel.name}: expected a number of threads or groups, got {asked!r}")
    if threads is not None and asked > MOST_THREADS:
        raise LimitError(
            f"{kernel.name}: expected at most {MOST_THREADS:,} threads, as lang.global_id() counts "
            f"them, got {asked:,}"
        )
    count = int(asked) if threads is None else -(-int(asked) // kernel.workgroup)
    if count >= MAX_GROUPS:
        raise LimitError(f"{kernel.name}: expected fewer than {MAX_GROUPS:,} groups, got {count:,}")
    return count
