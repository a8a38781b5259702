"""The devices as plain data, for users to read."""

from __future__ import annotations

from typing import Any

from centella.backends.cuda.driver import arch_of, check, device_count, driver


def listed() -> list[dict[str, Any]]:
    """CUDA devices, from the driver; no context is made."""
    return [_device(index) for index in range(device_count())]


def _device(index: int) -> dict[str, Any]:
    device = check(driver.cuDeviceGet(index))

    def number(name: str) -> int:
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver.cuDeviceGetAttribute(which, device)))

    version = check(driver.cuDriverGetVersion())
    arch = arch_of(number("COMPUTE_CAPABILITY_MAJOR"), number("COMPUTE_CAPABILITY_MINOR"))
    return {
        "open_with": f"cuda:{index}",
        "name": check(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode(),
        "type": f"NVIDIA GPU, {arch}",
        "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
        "memory_bytes": int(check(driver.cuDeviceTotalMem(device))),
        "limits": {
            "max_workgroup": number("MAX_THREADS_PER_BLOCK"),
            "max_shared_bytes": number("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        },
    }
