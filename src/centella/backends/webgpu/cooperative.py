"""Cooperative matrices: whether an adapter has them, and whether wgpu lets a device use them.

They are tensor cores, as WGSL sees them. To wgpu they are an experiment, and wgpu-native opens no
device with an experimental feature (gfx-rs/wgpu-native 516). So no kernel here uses them; what is
said of them tells when one could.
"""

from __future__ import annotations

from typing import Any

FEATURE: str = "cooperative-matrix"


def offered(adapter: Any) -> bool:
    """Whether the adapter's driver has them."""
    return FEATURE in adapter.features


def matrices(adapter: Any) -> str:
    """Whether a device of this adapter could use them, in words; opens one where the driver has."""
    if not offered(adapter):
        return "none"
    try:
        device = adapter.request_device_sync(required_features=[FEATURE])
    except Exception as error:  # of wgpu, of the driver
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"refused by wgpu: {said[-1] if said else type(error).__name__}"
    device.destroy()
    return "granted, used by no kernel"
