"""WebGPU adapters: which there are, one of them by name, and a device of one."""

from __future__ import annotations

import logging
import os
from typing import Any

import wgpu

from centella.errors import DeviceError

log: logging.Logger = logging.getLogger("centella.webgpu")

NO_ADAPTER: str = (
    "no WebGPU adapter found. On Linux a Vulkan driver and loader are needed: "
    "apt-get install libvulkan1 mesa-vulkan-drivers (the latter also brings lavapipe, a software "
    "adapter); NVIDIA's own driver brings its Vulkan part. In a container, expose the GPU with its "
    "graphics capability."
)
TIMER: str = "timestamp-query"
SUBGROUPS: str = "subgroup"
GUARANTEED: dict[str, int] = {
    "max-storage-buffer-binding-size": 134217728,
    "max-buffer-size": 268435456,
    "max-storage-buffers-per-shader-stage": 8,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroups-per-dimension": 65535,
}


def adapters() -> list[Any]:
    """Vulkan, Metal and DX12 adapters, hardware first."""
    os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # or the loader of EGL complains on stderr
    try:
        every = wgpu.gpu.enumerate_adapters_sync()
    except Exception as error:
        log.info("no adapter: %s", error)
        return []
    usable = [a for a in every if a.info["backend_type"] in ("Vulkan", "Metal", "D3D12")]
    order = {"DiscreteGPU": 0, "IntegratedGPU": 1, "CPU": 3}
    return sorted(usable, key=lambda a: order.get(a.info["adapter_type"], 2))


def is_software(adapter: Any) -> bool:
    """True for lavapipe, WARP, SwiftShader."""
    return str(adapter.info["adapter_type"]) == "CPU"


def family_of(adapter: Any) -> str:
    """The class of an adapter, as far as a choice of kernels may depend on it."""
    if is_software(adapter):
        return "software"
    text = f"{adapter.info['vendor']} {adapter.info['device']}".lower()
    for name in ("nvidia", "amd", "radeon", "intel", "apple"):
        if name in text:
            return "amd" if name == "radeon" else name
    by_id = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel", 0x106B: "apple"}
    return by_id.get(int(adapter.info["vendor_id"]), "other")


def find_adapter(which: str) -> Any:
    """The first adapter, the n-th, or the first whose description contains a word.

    Raises:
        DeviceError: says what to install, or which adapters there are.
    """
    every = adapters()
    if not every:
        raise DeviceError(NO_ADAPTER)
    if not which:
        return every[0]
    if which.isdecimal():
        fitting = every[int(which) : int(which) + 1]
    else:
        fitting = [a for a in every if which.lower() in _described(a)]
    if fitting:
        return fitting[0]
    names = ", ".join(f"webgpu:{i} ({a.info['device']})" for i, a in enumerate(every))
    raise DeviceError(f"expected one of {names}, got webgpu:{which}")


def _described(adapter: Any) -> str:
    return f"{adapter.info['device']} {adapter.info['description']}".lower()


def open_device(adapter: Any, minimum: bool) -> Any:
    """A wgpu device with an adapter's limits, timer and subgroups, or with the guaranteed alone.

    Raises:
        DeviceError: the adapter refused.
    """
    wanted = GUARANTEED if minimum else {name: adapter.limits[name] for name in GUARANTEED}
    features = [] if minimum else [f for f in (TIMER, SUBGROUPS) if f in adapter.features]
    try:
        return adapter.request_device_sync(required_limits=wanted, required_features=features)
    except Exception as error:
        raise DeviceError(f"the adapter {adapter.info['device']} refused: {error}") from error


def check_native(which: str, minimum: bool, native: object) -> None:
    """Refuse what is no wgpu device, and anything else that is said about one.

    Raises:
        DeviceError: for either.
    """
    if not isinstance(native, wgpu.GPUDevice):
        raise DeviceError(f"webgpu: expected a wgpu device as native=, got {native!r}")
    if which or minimum:
        got = f"webgpu:{which}" if which else "minimum=True"
        raise DeviceError(f"webgpu: a device given as native= is used as it is, got {got}")
