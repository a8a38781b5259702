"""Quantising on the device: the numbers of `ct.quantize`, by element-wise operations over rows.

Equal to it bit for bit where the device divides and multiplies as IEEE 754 says; where a driver's
quotient is off in its last place, a number at a tie may be the neighbour's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from centella.errors import DTypeError, WeightsError
from centella.tensors.creation import arange
from centella.tensors.functional import abs as absolute
from centella.tensors.functional import argmax, clip, concat, eq, logical_not, remainder, where
from centella.tensors.functional import max as largest_of
from centella.tensors.functional import sum as sum_of
from centella.tensors.qtensor import QTensor, Stacked, quantize
from centella.tensors.tensor import Tensor

BLOCK = 32
PART = 1 << 25  # bytes of rows in f32 that are worked on at a time
TINY = float(np.finfo(np.float32).tiny)


def all_quantized(
    weight: Tensor | QTensor | Stacked, format: str, name: str
) -> tuple[QTensor | Stacked, list[Tensor]]:
    """A weight whose parts are quantised, those in this format that are not yet.

    Args:
        name: of the weight, for errors.

    Returns:
        the weight, and for each part that was quantised on a device what `quantized` counts.

    Raises:
        WeightsError: on the CPU, factors that float16 does not hold.
    """
    if isinstance(weight, Tensor) and weight.ndim > 2:  # of several experts: their rows
        weight = weight.reshape(-1, weight.shape[-1])
    if isinstance(weight, Tensor) and weight.device.caps.on_host:
        try:
            return quantize(weight, format), []  # which passes over memory less often
        except DTypeError as error:
            raise WeightsError(f"{name}: {error}") from error
    if isinstance(weight, Tensor):
        tensor, bad = quantized(weight, format)
        return tensor, [bad]
    if isinstance(weight, QTensor):
        return weight, []
    parts, counts = zip(*(all_quantized(part, format, name) for part in weight.parts), strict=True)
    return Stacked(parts), [count for several in counts for count in several]


def quantized(weight: Tensor, format: str) -> tuple[QTensor, Tensor]:
    """A weight in a format of `QUANTIZERS`, rows of a multiple of 32; and what is wrong with it.

    Returns:
        the weight, and how many of its factors float16 does not hold, a scalar f32.
    """
    n, k = weight.shape
    rows = max(1, PART // (4 * max(k, 1)))
    parts = []
    for first in range(0, max(n, 1), rows):
        wide = weight[first : first + rows].astype("f32")
        parts.append(QUANTIZERS[format](wide.reshape(wide.shape[0], k // BLOCK, BLOCK)))
    planes = parts[0] if len(parts) == 1 else tuple(map(concat, zip(*parts, strict=True)))
    finite = absolute(planes[1].astype("f32")) <= float(np.finfo(np.float16).max)
    bad = sum_of(logical_not(finite).astype("f32"))
    return QTensor(planes, format), bad


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """factor = max |w| / 127; numbers are rounded to nearest even."""
    n, count, _ = blocks.shape
    factor = largest_of(absolute(blocks), -1, keepdims=True) / 127.0
    steps = blocks * _inverse(factor)
    amounts = absolute(steps)
    down = amounts.astype("i32")
    rest = amounts - down.astype("f32")
    odd = eq(remainder(down, 2), 1)
    near = where((rest > 0.5) | (eq(rest, 0.5) & odd), down + 1, down)
    numbers = where(steps < 0.0, -near, near).astype("i8")
    return numbers.reshape(n, count * BLOCK), factor.reshape(n, count).astype("f16")


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """factor = w / -8 of the first element that is largest by amount; numbers from 0 to 15."""
    n, count, _ = blocks.shape
    furthest = argmax(absolute(blocks), -1, keepdims=True)
    chosen = eq(arange(BLOCK, device=blocks.device), furthest)
    factor = sum_of(where(chosen, blocks, 0.0), -1, keepdims=True) / -8.0
    numbers = clip(blocks * _inverse(factor) + 8.5, 0.0, 15.5).astype("i32")
    half = BLOCK // 2
    stored = (numbers[..., :half] + numbers[..., half:] * 16).astype("u8")
    return stored.reshape(n, count * half), factor.reshape(n, count).astype("f16")


def _inverse(factor: Tensor) -> Tensor:
    """1 / factor; 0 where that may be infinite."""
    normal = absolute(factor) >= TINY
    return where(normal, 1.0 / where(normal, factor, 1.0), 0.0)


QUANTIZERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"q8_0": _q8_0, "q4_0": _q4_0}
