"""The adapters as plain data, for users to read."""

from __future__ import annotations

from typing import Any

from centella.backends.webgpu.adapter import adapters, is_software
from centella.backends.webgpu.cooperative import matrices
from centella.errors import DeviceError

LIMITS: dict[str, str] = {
    "max_tensor_bytes": "max-buffer-size",
    "max_binding_bytes": "max-storage-buffer-binding-size",
    "max_workgroup": "max-compute-invocations-per-workgroup",
    "max_shared_bytes": "max-compute-workgroup-storage-size",
    "max_storage_buffers": "max-storage-buffers-per-shader-stage",
}


def listed() -> list[dict[str, Any]]:
    """WebGPU adapters, as `webgpu:N` counts them; none stays open."""
    rows = [
        {
            "open_with": f"webgpu:{index}",
            "name": adapter.info["device"],
            "type": "software adapter" if is_software(adapter) else adapter.info["adapter_type"],
            "driver": f"{adapter.info['backend_type']}, {adapter.info['description']}",
            "memory_bytes": None,  # WebGPU drivers do not report it
            "limits": {ours: adapter.limits[theirs] for ours, theirs in LIMITS.items()},
            "cooperative_matrix": matrices(adapter),
        }
        for index, adapter in enumerate(adapters())
    ]
    if not rows:
        raise DeviceError("no Vulkan, Metal or DX12 adapter (docs: troubleshooting)")
    return rows
