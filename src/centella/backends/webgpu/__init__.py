"""WebGPU through wgpu: WGSL on Vulkan, Metal and DX12.

adapter.py       the adapters there are, one of them by name, a device of one
cooperative.py   whether tensor cores can be used
declarations.py  wgpu-native's C header, parsed once on a machine; types found by name
listing.py       the adapters as plain data
backend.py       memory, programs, submissions
ticket.py        a submission under way
warm.py          first use of pipelines, before they are timed
"""

from centella.backends.webgpu.adapter import NO_ADAPTER, adapters, is_software
from centella.backends.webgpu.backend import WebGpuBackend
from centella.backends.webgpu.listing import listed

__all__ = ["NO_ADAPTER", "WebGpuBackend", "adapters", "is_software", "listed"]
