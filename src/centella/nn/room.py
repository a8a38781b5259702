"""Whether weights have room on a device, before any of them is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from centella.dtypes import DType, f16
from centella.errors import LimitError, OutOfMemoryError
from centella.ops.quant.table import FORMATS
from centella.runtime.device import Device
from centella.specs import Shape
from centella.tensors.quantizers import PART, QUANTIZERS


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
    `memory_limit`. Where neither is known, nothing is refused.

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
    free = _free(device)
    needed = _needed(weights, device, quantize)
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


def _free(device: Device) -> int | None:
    """Bytes that the device may still give; None: nobody says."""
    memory = device.memory
    rest = [] if memory.free is None else [memory.free + memory.held - memory.live]
    if memory.budget is not None:
        rest.append(memory.budget - memory.live)
    return min(rest, default=None)
