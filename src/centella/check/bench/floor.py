"""`floor`: three headline claims of two other systems, reproduced on a device."""

from __future__ import annotations

from centella.check.bench import cached, encoder, ffn
from centella.check.bench.figures import Figure, Progress, Report
from centella.runtime.device import Device, current_device
from centella.runtime.device import device as open_device

PARTS = (cached, ffn, encoder)  # the product first: so that its first call is a first one


def floor(
    device: str | Device | None = None, *, small: bool = False, progress: Progress | None = None
) -> Report:
    """Feed-forward layers, the cached product and Whisper's encoder, beside the floor's figures.

    Numbers are first compared with float64; counts are the ledger's.

    Args:
        device: default: the current device.
        small: small shapes of the same structure, for the counts: the times mean little.
        progress: is told what begins.

    Raises:
        DeviceError: no such device, or wrong numbers.
        ContractError: a product of the cache allocated or compiled once it was warm.
    """
    where = current_device() if device is None else open_device(device)
    tell: Progress = progress or (lambda _: None)
    figures: list[Figure] = []
    notes = ["small shapes of the same structure: the times mean little"] if small else []
    if where.caps.on_host:
        notes.append("the CPU compiles nothing: its operations are NumPy's")
    for part in PARTS:
        measured, note = part.measure(where, small, tell)
        figures += measured
        notes.append(note)
    return Report(where.name, where.describe(), small, tuple(notes), tuple(figures))
