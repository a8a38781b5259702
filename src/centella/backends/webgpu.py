"""WebGPU through wgpu: WGSL on Vulkan, Metal and DX12.

One submission is one encoder, one compute pass, one `queue.submit`. Launch parameters lie in one
uniform buffer, 256 bytes a launch, bound once with dynamic offsets; writes to it are ordered with
submissions by the queue, so it is reused at once. Bind groups are cached by layout and buffers.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import OrderedDict
from itertools import count as counter
from typing import Any

import numpy as np
import wgpu

from centella.errors import (
    CompileError,
    DeviceError,
    DeviceLostError,
    LimitError,
    OutOfMemoryError,
)
from centella.ledger import count
from centella.program import HostProgram, Program
from centella.specs import Caps
from centella.submission import Array, Bound, Submission

log: logging.Logger = logging.getLogger("centella.webgpu")

SLOT = 256
_serials = counter(1)  # of buffers and pipelines: one wgpu device may have two backends
STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
STAGING = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
BIND_GROUPS = 8192
NO_ADAPTER = (
    "no WebGPU adapter found. On Linux a Vulkan driver and loader are needed: "
    "apt-get install libvulkan1 mesa-vulkan-drivers (the latter also brings lavapipe, a software "
    "adapter); NVIDIA's own driver brings its Vulkan part. In a container, expose the GPU with its "
    "graphics capability."
)
GUARANTEED = {
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
        found = wgpu.gpu.enumerate_adapters_sync()
    except Exception as error:
        log.info("no adapter: %s", error)
        return []
    usable = [a for a in found if a.info["backend_type"] in ("Vulkan", "Metal", "D3D12")]
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
    found = adapters()
    if not found:
        raise DeviceError(NO_ADAPTER)
    if not which:
        return found[0]
    if which.isdigit() and int(which) < len(found):
        return found[int(which)]
    for adapter in found:
        if which.lower() in f"{adapter.info['device']} {adapter.info['description']}".lower():
            return adapter
    names = ", ".join(f"webgpu:{i} ({a.info['device']})" for i, a in enumerate(found))
    raise DeviceError(f"expected one of {names}, got webgpu:{which}")


def checked_module(device: Any, source: str, name: str) -> Any:
    """A shader module with the bounds and loop checks that WebGPU demands."""
    return device.create_shader_module(code=source, label=name)


def trusted_module(device: Any, source: str, name: str) -> Any:
    """A shader module without them, by wgpu-native's own call; else a checked one.

    Bounds checks cost most in the tiled product (benchmarks/LOG.md); only for kernels that the
    simulator has passed.
    """
    try:
        from wgpu.backends.wgpu_native import _api, ffi, lib
    except ImportError:
        return checked_module(device, source, name)
    text = _api.new_struct_p("WGPUShaderSourceWGSL *", code=_api.to_c_string_view(source))
    text[0].chain.next = ffi.NULL
    text[0].chain.sType = lib.WGPUSType_ShaderSourceWGSL
    descriptor = _api.new_struct_p(
        "WGPUShaderModuleDescriptor *",
        nextInChain=ffi.cast("WGPUChainedStruct *", text),
        label=_api.to_c_string_view(name),
    )
    module = _api.libf.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, 0)
    return _api.GPUShaderModule(name, module, device)


class WebGpuTicket:
    """A submission under way; `staging` holds its read-backs, or 4 bytes that mark its end."""

    def __init__(self, backend: WebGpuBackend, staging: Any, places: list[tuple[int, int]]) -> None:
        self._backend = backend
        self._staging = staging
        self._places = places
        self._promise: Any = None
        self._lock = threading.Lock()
        self._results: list[Array] | None = None
        if places:
            self._map()

    def _map(self) -> None:
        if self._promise is None:
            # A promise made under a running event loop would resolve itself there as well.
            hooks = sys.get_asyncgen_hooks()
            sys.set_asyncgen_hooks(None, None)
            try:
                with self._backend.lock:
                    self._promise = self._staging.map_async("READ_NOSYNC")
            finally:
                sys.set_asyncgen_hooks(*hooks)

    def done(self) -> bool:
        """True once the device has finished it."""
        if self._results is not None:
            return True
        if self._promise is None:
            with self._lock:
                self._map()
        return bool(self._promise._thread_event.is_set())

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished."""
        with self._lock:
            if self._results is not None:
                return
            self._map()
        # Outside the lock: others may ask `done`, or wait less long.
        if not self._promise._thread_event.wait(timeout):
            raise TimeoutError(f"not done after {timeout} s")
        with self._lock:
            if self._results is not None:
                return
            try:
                self._promise.sync_wait()
                mapped = self._staging.read_mapped(copy=False)
            except Exception as error:
                raise DeviceLostError(f"the device was lost while running: {error}") from error
            whole = np.frombuffer(mapped, np.uint8)
            self._results = [whole[s : s + n].copy() for s, n in self._places]
            del whole, mapped
            self._staging.unmap()
            self._backend.return_staging(self._staging)

    def data(self, index: int) -> Array:
        """Bytes of one read-back; a copy that the caller owns."""
        self.wait()
        assert self._results is not None
        return self._results[index]


class WebGpuBackend:
    """One wgpu device."""

    def __init__(self, which: str = "", *, minimum: bool = False, native: Any = None) -> None:
        adapter = native.adapter if native is not None else find_adapter(which)
        self.adapter = adapter
        self.name = f"webgpu:{adapter.info['device']}"
        self.software = is_software(adapter)
        self.lock = threading.RLock()
        self._owned = native is None
        self.native = native if native is not None else self._open(adapter, minimum)
        limits = self.native.limits
        self.caps = Caps(
            target="wgsl",
            row_alignment=16,
            max_storage_buffers=limits["max-storage-buffers-per-shader-stage"],
            max_binding=limits["max-storage-buffer-binding-size"] // 16 * 16,
            max_buffer=min(limits["max-buffer-size"], limits["max-storage-buffer-binding-size"])
            // 16
            * 16,
            max_workgroup=min(
                limits["max-compute-invocations-per-workgroup"],
                limits["max-compute-workgroup-size-x"],
            ),
            max_shared=limits["max-compute-workgroup-storage-size"],
            max_groups=limits["max-compute-workgroups-per-dimension"],
            subgroups=False,
            family=family_of(adapter),
        )
        self._queue = self.native.queue
        self._layouts: dict[tuple[bool, ...], tuple[Any, Any, int]] = {}
        self._groups: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._staging: dict[int, list[Any]] = {}
        self._params: Any = None
        self._params_slots = 0
        self._grow_params(256)

    @staticmethod
    def _open(adapter: Any, minimum: bool) -> Any:
        names = tuple(GUARANTEED)
        wanted = dict(GUARANTEED) if minimum else {n: adapter.limits[n] for n in names}
        features = [] if minimum else [f for f in ("timestamp-query",) if f in adapter.features]
        try:
            return adapter.request_device_sync(required_features=features, required_limits=wanted)
        except Exception as error:
            raise DeviceError(f"the adapter {adapter.info['device']} refused: {error}") from error

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Any:
        """Device memory of `nbytes`."""
        if nbytes > self.caps.max_buffer:
            raise LimitError(
                f"a buffer of {nbytes:,} bytes; {self.name} binds at most {self.caps.max_buffer:,}"
            )
        try:
            buffer = self.native.create_buffer(size=nbytes, usage=STORAGE)
        except Exception as error:
            raise OutOfMemoryError(f"{self.name}: no room for {nbytes:,} bytes: {error}") from error
        buffer.centella_serial = next(_serials)
        return buffer

    def free(self, native: Any) -> None:
        """Give memory back to the driver."""
        self._forget(native.centella_serial)
        native.destroy()

    def adopt(self, native: Any) -> tuple[Any, int]:
        """A buffer of the application's that launches may bind, and its bytes."""
        if not isinstance(native, wgpu.GPUBuffer) or native._device is not self.native:
            raise DeviceError(f"{self.name}: expected a buffer of this wgpu device, got {native!r}")
        needed = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
        if native.usage & needed != needed:
            raise DeviceError(f"{self.name}: an imported buffer needs usage STORAGE and COPY_SRC")
        if native.map_state != "unmapped":
            raise DeviceError(f"{self.name}: an imported buffer must not be mapped")
        if native.size % 4 or not 0 < native.size <= self.caps.max_buffer:
            raise DeviceError(
                f"{self.name}: an imported buffer has a multiple of 4 bytes, at most "
                f"{self.caps.max_buffer:,}; this one has {native.size:,}"
            )
        if not hasattr(native, "centella_serial"):
            native.centella_serial = next(_serials)
        return native, native.size

    def disown(self, native: Any) -> None:
        """Forget the bind groups of an imported buffer."""
        self._forget(native.centella_serial)

    def _forget(self, serial: int) -> None:
        with self.lock:
            for key in [k for k in self._groups if serial in k[1:]]:
                del self._groups[key]

    def write(self, native: Any, offset: int, data: Array) -> None:
        """Copy host bytes into device memory, in order with submissions."""
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        if raw.size % 4:
            raw = np.concatenate([raw, np.zeros(-raw.size % 4, np.uint8)])
        if raw.size:
            with self.lock:
                self._queue.write_buffer(native, offset, raw)

    def return_staging(self, staging: Any) -> None:
        """Take a read-back buffer for the next one of its size."""
        with self.lock:
            self._staging.setdefault(staging.size, []).append(staging)

    def _take_staging(self, nbytes: int) -> Any:
        size = 1 << max(8, (nbytes - 1).bit_length())
        free = self._staging.get(size)
        if free:
            return free.pop()
        return self.native.create_buffer(size=size, usage=STAGING)

    def _grow_params(self, launches: int) -> None:
        self._params_slots = max(launches, 2 * self._params_slots)
        self._params = self.native.create_buffer(
            size=self._params_slots * SLOT,
            usage=wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.COPY_SRC,
        )
        self._params_serial = next(_serials)
        self._groups.clear()

    # -- programs ---------------------------------------------------------------------------------

    def _layout(self, writable: tuple[bool, ...]) -> tuple[Any, Any, int]:
        found = self._layouts.get(writable)
        if found is None:
            entries: list[dict[str, Any]] = [
                {
                    "binding": i,
                    "visibility": wgpu.ShaderStage.COMPUTE,
                    "buffer": {"type": "storage" if w else "read-only-storage"},
                }
                for i, w in enumerate(writable)
            ]
            entries.append(
                {
                    "binding": len(writable),
                    "visibility": wgpu.ShaderStage.COMPUTE,
                    "buffer": {
                        "type": "uniform",
                        "has_dynamic_offset": True,
                        "min_binding_size": 0,
                    },
                }
            )
            group = self.native.create_bind_group_layout(entries=entries)
            whole = self.native.create_pipeline_layout(bind_group_layouts=[group])
            found = (group, whole, next(_serials))
            self._layouts[writable] = found
        return found

    def compile(self, program: Program | HostProgram) -> Any:
        """The driver's form of a program."""
        assert isinstance(program, Program)
        if 4 * (1 + len(program.ir.params)) > SLOT:
            raise LimitError(
                f"kernel {program.name!r}: {len(program.ir.params)} launch parameters; at most "
                f"{SLOT // 4 - 1} fit"
            )
        layout = self._layout(tuple(a.writable for a in program.ir.args))
        create = trusted_module if program.trusted and not self.software else checked_module
        try:
            module = create(self.native, program.source, program.name)
            pipeline = self.native.create_compute_pipeline(
                layout=layout[1], compute={"module": module, "entry_point": "main"}
            )
        except Exception as error:
            raise CompileError(program.name, program.source, str(error)) from error
        return layout[2], pipeline, layout[0]

    # -- submission -------------------------------------------------------------------------------

    def submit(self, work: Submission) -> WebGpuTicket:
        """Start a submission."""
        with self.lock:
            for slot, offset, data in work.uploads:
                self.write(work.slots[slot].native, offset, data)
            launches = [b for b in work.launches if b.groups > 0]
            encoder = self.native.create_command_encoder()
            if launches:
                self._write_params(launches)
                self._encode(encoder, work, launches)
            places, staging = self._encode_reads(encoder, work)
            try:
                self._queue.submit([encoder.finish()])
            except Exception as error:
                raise DeviceError(f"{self.name} refused a submission: {error}") from error
        return WebGpuTicket(self, staging, places)

    def _write_params(self, launches: list[Bound]) -> None:
        if len(launches) > self._params_slots:
            self._grow_params(len(launches))
        words = np.zeros((len(launches), SLOT // 4), np.uint32)
        for row, bound in zip(words, launches, strict=True):
            row[0] = bound.groups
            row[1 : 1 + len(bound.words)] = bound.words
        self._queue.write_buffer(self._params, 0, words)
        count(parameter_bytes=words.nbytes)

    def _encode(self, encoder: Any, work: Submission, launches: list[Bound]) -> None:
        most = self.caps.max_groups
        run = encoder.begin_compute_pass()
        for position, bound in enumerate(launches):
            key, pipeline, layout = bound.pipeline
            natives = [work.slots[s].native for s in bound.slots]
            group = self._bind_group(key, layout, natives)
            run.set_pipeline(pipeline)
            run.set_bind_group(0, group, [position * SLOT])
            if bound.groups <= most:
                run.dispatch_workgroups(bound.groups, 1, 1)
            else:
                rows = -(-bound.groups // most)
                run.dispatch_workgroups(-(-bound.groups // rows), rows, 1)
        run.end()

    def _bind_group(self, key: int, layout: Any, natives: list[Any]) -> Any:
        identity = (key, self._params_serial, *(n.centella_serial for n in natives))
        found = self._groups.get(identity)
        if found is not None:
            self._groups.move_to_end(identity)
            return found
        entries = [
            {"binding": i, "resource": {"buffer": n, "offset": 0, "size": n.size}}
            for i, n in enumerate(natives)
        ]
        entries.append(
            {
                "binding": len(natives),
                "resource": {"buffer": self._params, "offset": 0, "size": SLOT},
            }
        )
        group = self.native.create_bind_group(layout=layout, entries=entries)
        self._groups[identity] = group
        if len(self._groups) > BIND_GROUPS:
            self._groups.popitem(last=False)
        return group

    def _encode_reads(self, encoder: Any, work: Submission) -> tuple[list[tuple[int, int]], Any]:
        places: list[tuple[int, int]] = []
        copies: list[tuple[Any, int, int, int]] = []
        end = 0
        for read in work.reads:
            first = read.start // 4 * 4
            nbytes = -(-(read.start + read.nbytes - first) // 4) * 4
            if nbytes:
                copies.append((work.slots[read.slot].native, first, end, nbytes))
            places.append((end + read.start - first, read.nbytes))
            end += -(-nbytes // 16) * 16
        staging = self._take_staging(max(end, 4))
        for native, first, place, nbytes in copies:
            encoder.copy_buffer_to_buffer(native, first, staging, place, nbytes)
        if not copies:
            encoder.copy_buffer_to_buffer(self._params, 0, staging, 0, 4)
        return places, staging

    def describe(self) -> dict[str, Any]:
        """Name, driver and limits."""
        info = self.adapter.info
        return {
            "device": "webgpu",
            "name": info["device"],
            "driver": info["description"],
            "api": info["backend_type"],
            "type": info["adapter_type"],
            "wgpu": wgpu.__version__,
            "max_binding": self.caps.max_binding,
            "max_shared": self.caps.max_shared,
        }

    def close(self) -> None:
        """Release the device; one that the application brought stays open."""
        if self._owned:
            self.native.destroy()
