"""Whether weights, and keys and values, have room on a device, before any memory is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from centella.dtypes import DType, f16
from centella.errors import LimitError, OutOfMemoryError
from centella.host.memory import available
from centella.ops.quant.table import FORMATS
from centella.runtime.device import Device
from centella.specs import Shape
from centella.tensors.quantizers import PART, QUANTIZERS

SMALL = 16 << 20  # bytes: to ask what is free takes longer than to allocate so few


class Weight(Struct, frozen=True):
    """A parameter to send.

    Attributes:
        nbytes: in a file, of one that is quantised there and stays so; else 0.
        dtype: that it is sent in; takes: whether it may be quantised once it is there.
    """

    path: str
    shape: Shape
    dtype: DType
    nbytes: int
    takes: bool

    def sent(self, device: Device) -> int:
        """Bytes on the device as it is sent."""
        return self.nbytes or device.storage.spec(self.shape, self.dtype).storage_bytes

    def kept(self, device: Device, quantize: str | None) -> int:
        """Bytes on the device in the end."""
        if quantize is None or not self.takes or self.nbytes:
            return self.sent(device)
        format, blocks = FORMATS[quantize], math.prod(self.shape) // FORMATS[quantize].block
        return sum(blocks * p.length * (p.dtype or f16).itemsize for p in format.planes)


def check_room(
    weights: Sequence[Weight], device: Device, quantize: str | None, origin: str
) -> None:  # fmt: skip
    """Refuse weights for which a device has no room.

    What is free is what the driver says, with what the pool keeps for reuse, and the device's
    `memory_limit`. On the CPU and on software adapters it is the machine's memory, and what the
    limits of the process leave of it. Where none of these is known, nothing is refused.

    Raises:
        OutOfMemoryError: they need more than is free; says which `quantize=` would fit.
        LimitError: one of them is larger than a buffer may be.
    """
    for weight in weights:
        most = device.caps.max_buffer
        if weight.sent(device) > most:
            raise LimitError(
                f"{origin}: {weight.path} {list(weight.shape)} of {weight.dtype.name} has "
                f"{weight.sent(device):,} bytes; a buffer of {device.name} has at most {most:,}"
            )
    needed = _needed(weights, device, quantize)
    free = _free(device, needed)
    if free is None or needed <= free:
        return
    others = {name: _needed(weights, device, name) for name in QUANTIZERS if name != quantize}
    fitting = [f"quantize={name!r} needs {n:,}" for name, n in others.items() if n <= free]
    advice = " or ".join(fitting) or "no quantize= makes them fit"
    raise OutOfMemoryError(
        f"{origin}: expected room for {needed:,} bytes of weights on {device.name}, got {free:,} "
        f"free; {advice}"
    )


def _needed(weights: Sequence[Weight], device: Device, quantize: str | None) -> int:
    """Bytes that have to be there at a time: a weight to quantise is whole first."""
    total, most = 0, 0
    for weight in weights:
        kept, sent = weight.kept(device, quantize), weight.sent(device)
        total += kept
        most = max(most, sent + PART if kept < sent else 0)
    return total + most


def check_cache(
    origin: str, planes: Iterable[tuple[Shape, DType]], layers: int, device: Device, fewer: str
) -> None:
    """Refuse keys and values for which a device has no room.

    What is free is as for weights.

    Args:
        origin: who needs them; planes: shape and dtype of each State of a layer.
        fewer: what to ask less of, for the error.

    Raises:
        OutOfMemoryError: they need more than is free.
    """
    specs = (device.storage.spec(*plane) for plane in planes)
    needed = layers * sum(device.pool.size_of(spec.storage_bytes) for spec in specs)
    free = _free(device, needed)
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"{origin}: expected room for {needed:,} bytes of keys and values on {device.name}, "
            f"got {free:,} free; ask for {fewer}"
        )


def _free(device: Device, needed: int) -> int | None:
    """Bytes that the device may still give; None: nobody says, or little is needed."""
    device.pool.drain()
    pool, rest = device.pool, list[int]()
    if pool.budget is not None:
        rest.append(pool.budget - pool.live)
    if needed >= SMALL:
        free = available() if device.caps.uses_host_memory else device.memory.free
        rest += [] if free is None else [free + pool.held - pool.live]
    return min(rest, default=None)
