"""Shader modules, with the bounds and loop checks of the driver or without."""

from __future__ import annotations

from typing import Any


def checked_module(device: Any, source: str, name: str) -> Any:
    """A shader module with the bounds and loop checks that WebGPU demands."""
    return device.create_shader_module(code=source, label=name)


def trusted_module(device: Any, source: str, name: str) -> Any:
    """A shader module without them, by wgpu-native's own call; else a checked one.

    Bounds checks cost most in the tiled product (benchmarks/LOG.md); only for kernels that the
    simulator has passed.
    """
    try:
        from wgpu.backends import wgpu_native
    except ImportError:
        return checked_module(device, source, name)
    private: Any = wgpu_native  # what it has is read from its C header when it is loaded
    api, ffi = private._api, private.ffi
    text = api.new_struct_p("WGPUShaderSourceWGSL *", code=api.to_c_string_view(source))
    text[0].chain.next = ffi.NULL
    text[0].chain.sType = private.lib.WGPUSType_ShaderSourceWGSL
    descriptor = api.new_struct_p(
        "WGPUShaderModuleDescriptor *",
        nextInChain=ffi.cast("WGPUChainedStruct *", text),
        label=api.to_c_string_view(name),
    )
    module = api.libf.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, 0)
    return api.GPUShaderModule(name, module, device)
