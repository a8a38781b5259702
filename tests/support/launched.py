"""Launches of an operation on words that a test lays out: what tests of single kernels share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from centella.dtypes import DType, narrow, widen
from centella.emit.program import Call, parameter_words
from centella.lang import KernelIR
from centella.op import op
from centella.op.op import Form
from centella.specs import Caps, Spec
from tests.support.lang_common import Tensor

Array = np.ndarray[Any, Any]
A = TypeVar("A", bound=Struct)


def traced(call: Call) -> KernelIR:
    """The kernel of a launch."""
    dtypes = tuple(r.spec.dtype for r in call.tensors)
    unit = tuple(r.spec.unit_rows for r in call.tensors)
    return call.kernel.specialise(dtypes, unit, call.constants, call.workgroup, call.signature)


def op_form(
    declared: op.Op[A], inputs: tuple[Spec, ...], outputs: tuple[Spec, ...],
    attrs: Mapping[str, Any] = MappingProxyType({}),
) -> Form[A]:  # fmt: skip
    """What an operation is asked to do, its attributes by name."""
    return Form(declared, inputs, outputs, declared.attrs(**attrs))


def one_launch(
    name: str, inputs: tuple[Spec, ...], y: Spec, caps: Caps, **attrs: Any
) -> tuple[Call, KernelIR]:
    """The only launch of an operation, and its kernel."""
    (call,) = op_form(op.get(name), inputs, (y,), attrs).lower(caps).calls
    return call, traced(call)


def parameters(call: Call, ir: KernelIR) -> Array:
    """The words of a launch's parameters."""
    return np.array(parameter_words(call, ir)[0], np.uint32)


def laid_out(value: Array | None, spec: Spec, beyond: int = 0) -> Array:
    """Words of an array as a device stores it; NaN in pads, `beyond` more bytes, and for None."""
    raw = np.full(spec.storage_bytes + beyond, 0xFF, np.uint8).view(spec.dtype.numpy)
    if value is not None:
        step = [s * spec.dtype.itemsize for s in spec.strides]
        np.ndarray(spec.shape, raw.dtype, raw.data, 0, step)[...] = narrow(value, spec.dtype)
    return raw.view(np.uint32)


def result(call: Call, words: list[Array]) -> Array:
    """What a launch's last operand holds."""
    y: Spec = call.tensors[-1].spec
    return Tensor(words[-1], y.dtype, y.shape, y.strides, 0).numpy()


def rounded(value: Array, dtype: DType) -> Array:
    """Values as a dtype stores them, in float64."""
    return np.asarray(widen(narrow(value, dtype), dtype), np.float64)
