"""Running the cases of an operation on a device and comparing them with float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from centella.check.cases.case import OWN, Array, Case, Row, rng_of, tensor_of, values_of
from centella.dtypes import DType, narrow, widen
from centella.op import op
from centella.runtime.device import Device
from centella.tensors.tensor import Tensor, apply_all, fetch

# sum((got - ref)^2) / sum(ref^2) at most: elementwise, then products, sums and attention.
TOLERANCE: dict[str, tuple[float, float]] = {
    "f32": (1e-12, 1e-11),
    "f16": (2e-7, 2e-7),
    "bf16": (5e-6, 5e-6),
}
# Fewer values than this do not average the rounding of a 16-bit store: each may be half a step off.
MANY = 64


class Difference(Struct, frozen=True):
    """Where a result is not what it should be.

    Attributes:
        index: of the element that is furthest off; expected, got: its values.
        error: sum((got - expected)^2) / sum(expected^2) of the finite elements, where they may
            differ by `limit`; None where they must be equal.
    """

    index: tuple[int, ...]
    expected: float
    got: float
    error: float | None = None
    limit: float = 0.0

    def __str__(self) -> str:
        at = f"at {list(self.index)}: expected {self.expected:.9g}, got {self.got:.9g}"
        if self.error is None:
            return at
        return f"{at} (squared error {self.error:.2g} of the squares, at most {self.limit:g})"


def limit_of(row: Row, dtype: str) -> float:
    """How far results of a row that are stored in a dtype may be off; 0: not at all."""
    return 0.0 if row.exact else TOLERANCE.get(dtype, (0.0, 0.0))[row.sums]


def attrs_of(case: Case, dtype: str) -> dict[str, Any]:
    """The attributes of a call in a dtype."""
    return {k: dtype if v == OWN else v for k, v in case.attrs.items()}


def reference_of(name: str, case: Case, dtype: str, values: Sequence[Array]) -> tuple[Array, ...]:
    """The op's formula on float64 of the rounded inputs (whole numbers as they are stored).

    On copies: the formula of an op that changes a State changes its operands.
    """
    wide = [v.astype(np.float64 if v.dtype.kind == "f" else v.dtype) for v in values]
    attrs = {k: v for k, v in attrs_of(case, dtype).items() if k != "variant"}
    formula = op.get(name).reference
    assert formula is not None, f"{name} has no formula"
    with np.errstate(all="ignore"):
        result = formula(*wide, **attrs)
    return result if isinstance(result, tuple) else (np.asarray(result),)


def record(
    declared: op.Op[Any], tensors: Sequence[Tensor], attrs: dict[str, Any], device: Device
) -> tuple[Tensor, ...]:
    """Record an op; those without an input are recorded on the device."""
    if tensors:
        return apply_all(declared, list(tensors), attrs)
    return tuple(Tensor(v, v.spec) for v in device.recorder.record(declared, [], attrs))


def differences(
    device: Device, name: str, dtype: str, cases: Sequence[Case], row: Row
) -> Iterator[tuple[Case, Difference]]:
    """The cases of an op whose results are wrong; all run before the first is looked at.

    Raises:
        CentellaError: a case cannot be run.
    """
    results: list[tuple[Case, Tensor, Array]] = []
    for case in cases:
        values = [values_of(i, dtype, rng_of(name, case, n)) for n, i in enumerate(case.inputs)]
        wanted = reference_of(name, case, dtype, values)
        tensors = [tensor_of(i, v, dtype, device) for i, v in zip(case.inputs, values, strict=True)]
        outs = record(op.get(name), tensors, attrs_of(case, dtype), device)
        results += [(case, *pair) for pair in zip(outs, wanted, strict=True)]
    read = fetch(*(t for _, t, _ in results)).result() if results else ()
    for (case, got, right), value in zip(results, read, strict=True):
        limit = limit_of(row, got.dtype.name)
        off = difference(value, np.broadcast_to(right, got.shape), got.dtype, limit)
        if off is not None:
            yield case, off


def difference(value: Array, wanted: Array, dtype: DType, limit: float) -> Difference | None:
    """Where a result differs: infinities and NaN must be equal, the rest within the limit.

    Args:
        value: what was read; wanted: what it should be, in float64, of the same shape.
        dtype: that it was stored in: whole numbers, and everything where limit is 0, must be equal.
        limit: of the squared error over the squares.
    """
    assert value.shape == wanted.shape, f"expected {list(wanted.shape)}, got {list(value.shape)}"
    with np.errstate(over="ignore"):  # beyond the dtype is infinite
        stored = widen(narrow(wanted, dtype), dtype)
    unequal = (value != stored) & ~((value != value) & (stored != stored))
    if limit == 0 or not dtype.is_float:
        return _at(unequal, stored, value)
    number = np.isfinite(stored)
    if (unequal & ~number).any():
        return _at(unequal & ~number, stored, value)
    with np.errstate(all="ignore"):
        off = np.where(number, np.square(value.astype(np.float64) - np.where(number, wanted, 0)), 0)
    squares = float(np.square(np.where(number, wanted, 0), dtype=np.float64).sum())
    if number.sum() < MANY and dtype.itemsize == 2:
        limit = max(limit, 1.1 * dtype.epsilon**2)
    if off.sum() <= limit * squares:
        return None
    error = float(off.sum() / max(squares, 1e-300))
    off = np.where(np.isnan(off), np.inf, off)
    return _at(off == off.max(), wanted, value, error, limit)


def _at(
    where: Array, wanted: Array, value: Array, error: float | None = None, limit: float = 0.0
) -> Difference | None:
    """The first of these elements, if there is one."""
    if not where.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(where)), where.shape))
    return Difference(index, float(wanted[index]), float(value[index]), error, limit)
