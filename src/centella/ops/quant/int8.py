"""int8: i8 numbers and a factor for each row."""

from __future__ import annotations

import numpy as np

from centella.dtypes import Array, i8
from centella.errors import DTypeError
from centella.ops.quant.format import Format, Plane
from centella.ops.quant.host import matrix
from centella.ops.quant.numbers import bytes_of, less


def encode(op: str, weight: Array) -> tuple[Array, Array]:
    """factor = max |w| of a row / 127; numbers are rounded to nearest even."""
    wide = matrix(op, weight)
    largest = np.abs(wide).max(1, initial=0)
    if not np.isfinite(largest).all():
        raise DTypeError(f"{op}: expected finite values, got inf or nan")
    scale = np.asarray(largest / np.float32(127), np.float32)
    steps = wide / np.where(scale > 0, scale, np.float32(1))[:, None]
    return np.clip(np.rint(steps), -127, 127).astype(np.int8), scale


def decode(stored: Array, scale: Array) -> Array:
    """number x factor."""
    return stored.astype(scale.dtype) * scale[:, None]


INT8: Format = Format(
    "int8", 1, (Plane("stored", "numbers", i8, 1), Plane("scale", "factors", None, 0)),
    lambda words, at: bytes_of(words), decode, encode,
    few=lambda values, half, at: less(values, 0.0),
)  # fmt: skip
