"""Devices whose largest binding is artificially small, so that small tensors are above it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

import centella as ct
from centella.backends.opening import open_backend
from centella.runtime.device import Device

BINDING = 4096  # bytes, of the devices of the `device` fixture
ALIGNMENT = 256  # what WebGPU guarantees


def windowed(
    kind: str, pool: str = "poison", *, binding: int = BINDING, alignment: int = ALIGNMENT
) -> ct.Device:
    """A device of a kind that binds so many bytes at once, from a multiple of `alignment` on."""
    backend: Any = open_backend(kind, None, {})
    backend.caps = replace(backend.caps, max_binding=binding, binding_alignment=alignment)
    return Device(backend, pool=pool)
