"""Memory, programs and submissions of one wgpu device.

One submission is one encoder, one compute pass, one `queue.submit`. Launch parameters lie in one
uniform buffer, 256 bytes a launch, bound once with dynamic offsets; writes to it are ordered with
submissions by the queue, so it is reused at once. Bind groups are cached by layout and buffers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import wgpu

from centella.backends.webgpu.adapter import (
    TIMER,
    family_of,
    find_adapter,
    is_software,
    open_device,
)
from centella.backends.webgpu.modules import checked_module, trusted_module
from centella.backends.webgpu.prepared import Prepared
from centella.backends.webgpu.stamps import Stamps
from centella.backends.webgpu.ticket import WebGpuTicket
from centella.errors import CompileError, DeviceError, LimitError, OutOfMemoryError
from centella.ledger import count
from centella.program import HostProgram, Program
from centella.specs import Caps
from centella.submission import Array, Bound, Buffer, Clock, Submission, Window

SLOT = 256
STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
STAGING = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
BIND_GROUPS = 8192
MOST = 1 << 34  # bytes of a buffer that is of use: kernels count elements in 32 bits
Windows = tuple[Window | None, ...]


class WebGpuBackend:
    """One wgpu device."""

    unit: int = 4
    dlpack: tuple[int, int] | None = None

    def __init__(self, which: str = "", *, minimum: bool = False, native: Any = None) -> None:
        if native is not None:
            _check_native(which, minimum, native)
        adapter = native.adapter if native is not None else find_adapter(which)
        self.adapter: Any = adapter
        self.name: str = f"webgpu:{adapter.info['device']}"
        self.software: bool = is_software(adapter)
        self.lock: threading.RLock = threading.RLock()
        self._owned = native is None
        self.native: Any = native if native is not None else open_device(adapter, minimum)
        self.clock: Clock = Clock()
        if TIMER not in self.native.features:
            self.clock = Clock(missing=f"this wgpu device was opened without {TIMER}")
        limits = self.native.limits
        self.caps: Caps = Caps(
            target="wgsl",
            row_alignment=16,
            max_storage_buffers=limits["max-storage-buffers-per-shader-stage"],
            max_binding=limits["max-storage-buffer-binding-size"] // 16 * 16,
            binding_alignment=limits["min-storage-buffer-offset-alignment"],
            max_buffer=min(limits["max-buffer-size"], MOST) // 16 * 16,
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
        self._layouts: dict[tuple[bool, ...], tuple[Any, Any]] = {}
        self._groups: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._staging: dict[int, list[Any]] = {}
        self._params: Any = None
        self._params_slots = 0
        self._grow_params(256)

    def runs_on(self, native: Any) -> bool:
        """Whether this is its wgpu device."""
        return native is self.native

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Any:
        """Device memory of `nbytes`."""
        try:
            return self.native.create_buffer(size=nbytes, usage=STORAGE)
        except Exception as error:
            raise OutOfMemoryError(f"{self.name}: no room for {nbytes:,} bytes: {error}") from error

    def free(self, native: Any) -> None:
        """Give memory back to the driver."""
        self.disown(native)
        native.destroy()

    def memory(self) -> None:
        """Unknown: WebGPU says nothing of it."""

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
        try:  # wgpu says nowhere whether a buffer was destroyed
            part = (0, min(native.size, self.caps.max_binding))
            self._new_group(self._layout((False,))[0], [native], (part,), self._params)
        except Exception as error:
            raise DeviceError(
                f"{self.name}: an imported buffer cannot be bound: {error}"
            ) from error
        return native, native.size

    def disown(self, native: Any) -> None:
        """Forget the bind groups of a buffer, whose id may soon be another's."""
        with self.lock:
            for key in [k for k in self._groups if id(native) in k]:
                del self._groups[key]

    def write(self, buffer: Buffer, data: Array) -> None:
        """Copy host bytes into device memory, in order with submissions."""
        with self.lock:
            self._queue.write_buffer(buffer.native, 0, data)

    def shown(self, buffer: Buffer) -> Any:
        """The wgpu buffer."""
        return buffer.native

    def lend(self, buffer: Buffer, stream: Any) -> tuple[int, Any]:
        """Its buffers have no address."""
        raise BufferError("DLPack: WebGPU does not export memory")

    def return_staging(self, staging: Any) -> None:
        """Take a read-back buffer for the next one of its size; safe in a finalizer."""
        self._staging.setdefault(staging.size, []).append(staging)

    def _take_staging(self, nbytes: int) -> Any:
        if nbytes > self.caps.max_buffer:
            raise LimitError(
                f"read-backs of {nbytes:,} bytes at once; {self.name} allows "
                f"{self.caps.max_buffer:,}: fetch fewer at a time"
            )
        size = min(1 << max(8, (nbytes - 1).bit_length()), self.caps.max_buffer)
        free = self._staging.get(size)
        if free:
            return free.pop()
        try:
            return self.native.create_buffer(size=size, usage=STAGING)
        except Exception as error:
            raise OutOfMemoryError(
                f"{self.name}: no room to read {nbytes:,} bytes: {error}"
            ) from error

    def _grow_params(self, launches: int) -> None:
        self._params_slots = max(launches, 2 * self._params_slots)
        self._params = self._params_buffer(self._params_slots)
        self._groups.clear()  # they bind the one before

    def _params_buffer(self, launches: int) -> Any:
        usage = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.COPY_SRC
        return self.native.create_buffer(size=launches * SLOT, usage=usage)

    # -- programs ---------------------------------------------------------------------------------

    def _layout(self, writable: tuple[bool, ...]) -> tuple[Any, Any]:
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
            found = self._layouts[writable] = (group, whole)
        return found

    def compile(self, program: Program | HostProgram) -> Any:
        """The driver's form of a program."""
        assert isinstance(program, Program)
        if 4 * (1 + len(program.ir.params)) > SLOT:
            raise LimitError(
                f"kernel {program.name!r}: {len(program.ir.params)} launch parameters; at most "
                f"{SLOT // 4 - 1} fit"
            )
        group, layout = self._layout(tuple(a.writable for a in program.ir.args))
        create = trusted_module if program.trusted and not self.software else checked_module
        try:
            module = create(self.native, program.source, program.name)
            pipeline = self.native.create_compute_pipeline(
                layout=layout, compute={"module": module, "entry_point": "main"}
            )
        except Exception as error:
            raise CompileError(program.name, program.source, str(error)) from error
        return pipeline, group

    # -- submission -------------------------------------------------------------------------------

    def submit(self, work: Submission) -> WebGpuTicket:
        """Start a submission."""
        with self.lock:
            for slot, data in work.uploads:
                self.write(work.slots[slot], data)
            encoder = self.native.create_command_encoder()
            for copy in work.copies:
                encoder.copy_buffer_to_buffer(
                    work.slots[copy.source].native, copy.first, work.slots[copy.target].native,
                    copy.start, copy.nbytes,
                )  # fmt: skip
            stamps = None
            if work.timed and work.launches and not self.clock.missing:
                stamps = Stamps(self.native, len(work.launches))
                count(timing_bytes=stamps.nbytes)
            if work.prepared is not None:
                work.prepared.encode(encoder, stamps)
            elif work.launches:
                self._write_params(work.launches)
                self._encode(encoder, work, stamps)
            places, staging = self._encode_reads(encoder, work, stamps)
            try:
                self._queue.submit([encoder.finish()])
            except Exception as error:
                raise DeviceError(f"{self.name} refused a submission: {error}") from error
        return WebGpuTicket(staging, places, self.lock, self.return_staging, stamps)

    def prepare(self, work: Submission) -> Prepared:
        """Parameters written, groups bound."""
        with self.lock:
            words = _parameters(work.launches)
            params = self._params_buffer(len(work.launches))
            self._queue.write_buffer(params, 0, words)
            count(parameter_bytes=words.nbytes)
            dispatches = []
            for position, bound in enumerate(work.launches):
                pipeline, layout = bound.pipeline
                natives = [work.slots[s].native for s in bound.slots]
                group = self._new_group(layout, natives, bound.windows, params)
                dispatches.append((pipeline, group, position * SLOT, self._grid(bound.groups)))
        return Prepared(dispatches, params)

    def _grid(self, groups: int) -> tuple[int, int]:
        """Groups along both sides: folded where one side is too long."""
        rows = -(-groups // self.caps.max_groups)
        return -(-groups // rows), rows

    def _write_params(self, launches: list[Bound]) -> None:
        if len(launches) > self._params_slots:
            self._grow_params(len(launches))
        words = _parameters(launches)
        self._queue.write_buffer(self._params, 0, words)
        count(parameter_bytes=words.nbytes)

    def _encode(self, encoder: Any, work: Submission, stamps: Stamps | None) -> None:
        everything = range(len(work.launches))
        if stamps is None:
            self._encode_pass(encoder.begin_compute_pass(), work, everything)
            return
        for position in everything:
            run = encoder.begin_compute_pass(timestamp_writes=stamps.around(position))
            self._encode_pass(run, work, (position,))

    def _encode_pass(self, run: Any, work: Submission, positions: Iterable[int]) -> None:
        for position in positions:
            bound = work.launches[position]
            pipeline, layout = bound.pipeline
            natives = [work.slots[s].native for s in bound.slots]
            group = self._bind_group(layout, natives, bound.windows)
            run.set_pipeline(pipeline)
            run.set_bind_group(0, group, [position * SLOT])
            run.dispatch_workgroups(*self._grid(bound.groups), 1)
        run.end()

    def _bind_group(self, layout: Any, natives: list[Any], windows: Windows) -> Any:
        identity = (id(layout), *map(id, natives), windows)
        found = self._groups.get(identity)
        if found is not None:
            self._groups.move_to_end(identity)
            return found
        group = self._new_group(layout, natives, windows, self._params)
        self._groups[identity] = group
        if len(self._groups) > BIND_GROUPS:
            self._groups.popitem(last=False)
        return group

    def _new_group(self, layout: Any, natives: list[Any], windows: Windows, params: Any) -> Any:
        places = [(0, n.size) for n in natives]
        for operand, window in enumerate(windows):
            places[operand] = window or places[operand]
        entries = [
            {"binding": i, "resource": {"buffer": n, "offset": start, "size": nbytes}}
            for i, (n, (start, nbytes)) in enumerate(zip(natives, places, strict=True))
        ]
        entries.append(
            {
                "binding": len(natives),
                "resource": {"buffer": params, "offset": 0, "size": SLOT},
            }
        )
        return self.native.create_bind_group(layout=layout, entries=entries)

    def _encode_reads(
        self, encoder: Any, work: Submission, stamps: Stamps | None
    ) -> tuple[list[tuple[int, int]], Any]:
        places: list[tuple[int, int]] = []
        end = 0
        for read in work.reads:
            places.append((end, read.nbytes))
            end += -(-read.nbytes // 16) * 16
        if stamps is not None:
            places.append((end, stamps.nbytes))
            end += stamps.nbytes
        staging = self._take_staging(max(end, 4))
        for read, (place, nbytes) in zip(work.reads, places, strict=False):
            native = work.slots[read.slot].native
            encoder.copy_buffer_to_buffer(native, read.start, staging, place, nbytes)
        if stamps is not None:
            stamps.copy_to(encoder, staging, places[-1][0])
        if not places:
            encoder.clear_buffer(staging, 0, 4)  # its end can be waited for; nothing is copied
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
        """Release the device; one that the application brought stays open, our buffers go."""
        if self._owned:
            self.native.destroy()
            return
        self._groups.clear()
        for buffer in (self._params, *(b for free in self._staging.values() for b in free)):
            buffer.destroy()
        self._staging.clear()


def _check_native(which: str, minimum: bool, native: Any) -> None:
    """Raise unless `native` is a wgpu device and nothing else is said about it."""
    if not isinstance(native, wgpu.GPUDevice):
        raise DeviceError(f"webgpu: expected a wgpu device as native=, got {native!r}")
    if which or minimum:
        got = f"webgpu:{which}" if which else "minimum=True"
        raise DeviceError(f"webgpu: a device given as native= is used as it is, got {got}")


def _parameters(launches: list[Bound]) -> Array:
    """The parameters of launches, a slot each: the number of groups, then their words."""
    words = np.zeros((len(launches), SLOT // 4), np.uint32)
    for row, bound in zip(words, launches, strict=True):
        row[0] = bound.groups
        row[1 : 1 + len(bound.words)] = bound.words
    return words
