"""What an op is tested with: inputs, their values and layouts in memory, attributes.

A case is inputs (shape, values, layout) and attributes; it runs in each dtype of its op's row.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from centella.dtypes import dtype_of, narrow, widen
from centella.runtime.device import Device
from centella.tensors.creation import asarray
from centella.tensors.functional import broadcast_to
from centella.tensors.state import State
from centella.tensors.tensor import Tensor

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

FLOATS: tuple[str, ...] = ("f32", "f16", "bf16")
INTEGERS: tuple[str, ...] = ("i32", "u32", "i8", "u8")
NUMBERS: tuple[str, ...] = (*FLOATS, *INTEGERS)
ALL: tuple[str, ...] = (*NUMBERS, "bool")
OWN = "own"  # as an attribute: the dtype of the case
LAYOUTS: tuple[str, ...] = ("plain", "pads", "offset", "strided", "transposed", "rows")
EXTREMES: tuple[float, ...] = (
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 800.0, -800.0, 6e4, -6e4, 1e-3),
    *(-1e-3, 20.0, -20.0, 0.5, -0.5, 4.0, -4.0, 1e-8, -1e-8),
)


class In(Struct, frozen=True):
    """One input: how it is shaped, filled and laid out.

    Attributes:
        dtype: "" for the case's own.
        values: normal, positive, extremes, large (800 among normal values), ties, bools, hidden
            (0 and -inf), apart (whole numbers from 0, in any order), or `(low, high)` for whole
            numbers.
        layout: plain; pads (NaN after each row); offset (a slice that starts off every boundary);
            strided (every second element); transposed (a view of the last two axes swapped);
            rows (every second row, from the second); state (a State's memory); repeated (a view
            whose rows along the first axis are one in memory).
    """

    shape: Shape
    values: Any = "normal"
    dtype: str = ""
    layout: str = "plain"


class Case(Struct, frozen=True):
    """Inputs and attributes of one call.

    Attributes:
        dtypes: those it runs in, of its row's; () for all.
        small: False where the simulator would take too long.
        sweep: True for one of many that are alike but have programs of their own: for tests, not
            for a check of a user's device.
    """

    inputs: tuple[In, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    small: bool = True
    sweep: bool = False

    @property
    def laid_out(self) -> bool:
        """Whether an input lies otherwise than an array of its own does."""
        return any(i.layout not in ("plain", "state") for i in self.inputs)

    def __str__(self) -> str:
        operands = " ".join(f"{list(i.shape)}:{i.values}:{i.layout}" for i in self.inputs)
        return f"{operands} {self.attrs}"


class Row(Struct, frozen=True):
    """An op's dtypes and cases; `sums` for the wider tolerance, `exact` for moves."""

    dtypes: tuple[str, ...]
    cases: tuple[Case, ...]
    sums: bool = False
    exact: bool = False


# -- values ---------------------------------------------------------------------------------------


def values_of(spec: In, dtype: str, rng: np.random.Generator) -> Array:
    """Host values of an input, as its dtype stores them and computed with (bf16 as float32)."""
    kind = dtype_of(spec.dtype or dtype)
    values = _values(spec, kind.kind, rng)
    if not kind.is_float and kind.kind != "bool" and spec.values == "normal":
        info = np.iinfo(kind.numpy)
        values = rng.integers(info.min, info.max, spec.shape, np.int64, endpoint=True)
    if spec.layout == "repeated":
        values = np.repeat(values[:1], spec.shape[0], 0)
    with np.errstate(over="ignore"):
        return widen(narrow(np.asarray(values), kind), kind)


def _values(spec: In, kind: str, rng: np.random.Generator) -> Any:
    if isinstance(spec.values, tuple):
        low, high = spec.values
        return rng.integers(low, high, spec.shape)
    if spec.values == "apart":
        return rng.permutation(math.prod(spec.shape)).reshape(spec.shape)
    if kind == "bool" or spec.values == "bools":
        return rng.random(spec.shape) < 0.6
    normal = np.asarray(rng.standard_normal(spec.shape) * 2, np.float32)
    if spec.values == "positive":
        return np.abs(normal) + np.float32(1e-3)
    if spec.values == "extremes":
        return np.array(EXTREMES[: math.prod(spec.shape)], np.float32).reshape(spec.shape)
    if spec.values == "large":
        return np.where(rng.random(spec.shape) < 0.3, np.float32(800), normal)
    if spec.values == "ties":
        return np.round(normal)
    if spec.values == "hidden":
        return np.where(rng.random(spec.shape) < 0.4, np.float32(-np.inf), normal)
    return normal


_states: WeakKeyDictionary[Tensor, State] = WeakKeyDictionary()


def tensor_of(spec: In, value: Array, dtype: str, device: Device) -> Tensor:
    """The value on a device, lying as `spec` says; what surrounds it is NaN (or -1, or True)."""
    kind = dtype_of(spec.dtype or dtype)
    stored = narrow(value, kind)
    if spec.layout == "plain":
        return asarray(stored, dtype=kind, device=device)
    if spec.layout == "transposed":
        turned = np.ascontiguousarray(np.swapaxes(stored, -1, -2))
        return asarray(turned, dtype=kind, device=device).T
    if spec.layout == "repeated":
        return broadcast_to(asarray(stored[:1], dtype=kind, device=device), stored.shape)
    if spec.layout == "state":
        state = State(stored, kind, device)
        version = state.value
        _states[version] = state  # which lives as long as the tensor
        return version
    part, whole = _position(spec.layout, stored.shape, kind.per_chunk)
    around = np.full(math.prod(whole) * kind.itemsize, 0xFF, np.uint8)
    if kind.name == "bool":
        around[:] = 1
    base = around.view(kind.numpy).reshape(whole)
    base[part] = stored
    return asarray(base, dtype=kind, device=device)[part]


def _position(layout: str, shape: Shape, chunk: int) -> tuple[tuple[Any, ...], Shape]:
    """Where a layout puts a value inside a larger array, and that array's shape."""
    if layout == "pads":
        wide = -(-shape[-1] // chunk) * chunk + chunk
        return (..., slice(0, shape[-1])), (*shape[:-1], wide)
    if layout == "strided":
        return (..., slice(1, None, 2)), (*shape[:-1], 2 * shape[-1] + 1)
    if layout == "rows":
        places = (slice(None),) * (len(shape) - 2) + (slice(1, None, 2), slice(None))
        return places, (*shape[:-2], 2 * shape[-2] + 1, shape[-1])
    assert layout == "offset", layout
    return tuple(slice(1, 1 + n) for n in shape), tuple(n + 2 for n in shape)


def rng_of(*names: object) -> np.random.Generator:
    """Random numbers that depend on what is tested, not on what was tested before."""
    return np.random.default_rng(zlib.crc32(" ".join(map(str, names)).encode()))


# -- cases ----------------------------------------------------------------------------------------


# Rank 0 to 4; 0-size, size 1, odd, prime; rows that are no whole words or chunks.
SHAPES: tuple[Shape, ...] = (
    *((), (1,), (0,), (5,), (127,), (3, 0), (0, 3), (7, 1), (1, 7), (3, 5), (5, 8), (2, 3, 7)),
    (3, 1, 2, 9),
)
DEPTH: int = 70_001  # a driver may stop the loops of a thread after 65 535 rounds
BRIEF: tuple[Shape, ...] = ((), (0,), (33,), (3, 5))
BROADCASTS: tuple[tuple[Shape, Shape], ...] = (
    *(((3, 5), ()), ((), (4,)), ((3, 8), (8,)), ((3, 1), (1, 5)), ((3, 8), (3, 1))),
    *(((2, 3, 4), (3, 1)), ((2, 1, 3, 5), (4, 1, 5)), ((0, 3), (1, 3)), ((6, 1), (6, 1))),
)


def cases(
    shapes: Iterable[Shape], values: Any = "normal", attrs: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Case, ...]:  # fmt: skip
    """A case of one input for each shape."""
    return tuple(Case((In(s, values),), attrs or {}, **options) for s in shapes)


def laid_out(case: Case, *layouts: str) -> tuple[Case, ...]:
    """The case with its first input laid out otherwise."""
    first, *rest = case.inputs
    return tuple(replace(case, inputs=(replace(first, layout=x), *rest)) for x in layouts)
