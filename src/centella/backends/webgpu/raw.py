"""wgpu-native's own calls, as submissions and read-backs make them.

Through wgpu-py each costs several times as much: structures filled by name, an object for each
encoder and pass, a frame for errors around every call. What lives longer than a submission is made
by wgpu-py; its handles are used here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from centella.backends.base import Array
from centella.backends.webgpu.declarations import import_native, quicken
from centella.errors import DeviceError
from centella.host.interrupts import called_back

SLOT = 256  # bytes of a launch's parameters

native: Any = import_native()
lib: Any = native.lib  # its calls are made by cffi: checkers do not see them
ffi: Any = native.ffi
quicken(ffi)


class Gate:
    """`with gate:` where a device may call back, without its lock.

    Attributes:
        lock: what it holds.
        ending: the process ends: from now on the main thread alone passes.
    """

    def __init__(self) -> None:
        self.lock: threading.RLock = threading.RLock()
        self.ending: bool = False

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.ending and threading.current_thread() is not threading.main_thread():
            self.lock.release()
            raise SystemExit  # ends the thread without a word, so that who joins it goes on

    def __exit__(self, *_: object) -> None:
        self.lock.release()


gate: Gate = Gate()
_errors: Any = native._api.error_handler
_NO_ENCODER: Any = ffi.new("WGPUCommandEncoderDescriptor *")
_NO_BUFFER: Any = ffi.new("WGPUCommandBufferDescriptor *")
_NO_PASS: Any = ffi.new("WGPUComputePassDescriptor *")


class Checked:
    """Raises at its end what wgpu reported of the calls inside."""

    def __enter__(self) -> None:
        _errors.capture("centella")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reported = _errors.release("centella")
        if reported is not None and kind is None:
            raise DeviceError(reported[1])


# One launch: the driver's handles of pipeline and bind group, a pointer to the offset of its
# parameters, and the grid. A handle does not keep its object alive.
Dispatch = tuple[Any, Any, Any, int, int]


# A compiled program: wgpu-py's pipeline, its layout, and the driver's handle of the pipeline.
Pipeline = tuple[Any, Any, Any]


class Offsets:
    """Where the parameters of each launch begin in their buffer, as the driver reads it.

    Attributes:
        at: a pointer for each launch.
    """

    def __init__(self, launches: int, first: int = 0) -> None:
        self._words = ffi.new("uint32_t[]", [(first + i) * SLOT for i in range(launches)])
        self.at: list[Any] = [self._words + i for i in range(launches)]


class Encoder:
    """The commands of one submission."""

    def __init__(self, device: Any) -> None:
        self._handle = lib.wgpuDeviceCreateCommandEncoder(device._internal, _NO_ENCODER)

    def copy(self, source: Any, first: int, target: Any, start: int, nbytes: int) -> None:
        """Bytes of one buffer to another."""
        lib.wgpuCommandEncoderCopyBufferToBuffer(
            self._handle, source._internal, first, target._internal, start, nbytes
        )

    def resolve(self, queries: Any, target: Any, start: int) -> None:
        """All of a query set into a buffer."""
        lib.wgpuCommandEncoderResolveQuerySet(
            self._handle, queries._internal, 0, queries.count, target._internal, start
        )

    def launch(self, dispatches: Iterable[Dispatch], stamps: Any = None) -> None:
        """Launches in a compute pass.

        Args:
            stamps: (query set, index) of the stamp at its begin; that at its end comes next.
        """
        described = _NO_PASS
        if stamps is not None:
            queries, first = stamps
            around = ffi.new(
                "WGPUPassTimestampWrites *",
                {"querySet": queries._internal, "beginningOfPassWriteIndex": first,
                 "endOfPassWriteIndex": first + 1},
            )  # fmt: skip
            described = ffi.new("WGPUComputePassDescriptor *", {"timestampWrites": around})
        run = lib.wgpuCommandEncoderBeginComputePass(self._handle, described)
        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        last = None
        for pipeline, group, offset, across, down in dispatches:
            if pipeline is not last:
                set_pipeline(run, pipeline)
                last = pipeline
            set_group(run, 0, group, 1, offset)
            dispatch(run, across, down, 1)
        lib.wgpuComputePassEncoderEnd(run)
        lib.wgpuComputePassEncoderRelease(run)

    def finish(self) -> Commands:
        """End the commands."""
        return Commands(lib.wgpuCommandEncoderFinish(self._handle, _NO_BUFFER))

    def __del__(self) -> None:
        if lib is not None:  # modules are empty when the interpreter ends
            lib.wgpuCommandEncoderRelease(self._handle)


class Commands:
    """Encoded commands, which are submitted once or never."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle: Any = handle

    def __del__(self) -> None:
        if lib is not None:
            lib.wgpuCommandBufferRelease(self.handle)


def trusted_module(device: Any, source: str, name: str) -> Any:
    """A shader module without the driver's bounds and loop checks.

    They cost most in the tiled product (benchmarks/LOG.md); only for kernels that the simulator has
    passed.
    """
    api = native._api
    text = api.new_struct_p("WGPUShaderSourceWGSL *", code=api.to_c_string_view(source))
    text[0].chain.next = ffi.NULL
    text[0].chain.sType = lib.WGPUSType_ShaderSourceWGSL
    descriptor = api.new_struct_p(
        "WGPUShaderModuleDescriptor *",
        nextInChain=ffi.cast("WGPUChainedStruct *", text),
        label=api.to_c_string_view(name),
    )
    module = api.libf.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, 0)
    return api.GPUShaderModule(name, module, device)


def submit(queue: Any, commands: Sequence[Commands]) -> None:
    """Start encoded commands, in order."""
    handles = ffi.new("WGPUCommandBuffer[]", [one.handle for one in commands])
    lib.wgpuQueueSubmit(queue._internal, len(commands), handles)


def write(queue: Any, buffer: Any, data: Array, start: int = 0) -> None:
    """Copy host bytes to a buffer from byte `start` on, in order with submissions."""
    lib.wgpuQueueWriteBuffer(
        queue._internal, buffer._internal, start, ffi.from_buffer(data), data.nbytes
    )


def timestamp_period(queue: Any) -> float:
    """Nanoseconds of a tick."""
    period: float = lib.wgpuQueueGetTimestampPeriod(queue._internal)
    return period


def poll(device: Any) -> None:
    """Call back for what has finished on a device; waits for nothing.

    A poll that waits would keep every thread from submitting until it is over (gfx-rs/wgpu 9470).
    """
    with gate:
        lib.wgpuDevicePoll(device._internal, 0, ffi.NULL)


def on_done(queue: Any, then: Callable[[str], None]) -> None:
    """Ask for the end of all that was submitted so far.

    Args:
        then: called with what went wrong, or "", inside a `poll` or a submission on any thread.
    """
    info = _call_back_info("WGPUQueueWorkDoneCallbackInfo *", _over, then)
    lib.wgpuQueueOnSubmittedWorkDone(queue._internal, info[0])


def map_read(buffer: Any, nbytes: int, then: Callable[[str], None]) -> None:
    """Ask for the first bytes of a buffer, once what was submitted to it is done; as `on_done`."""
    info = _call_back_info("WGPUBufferMapCallbackInfo *", _mapped, then)
    with gate:
        lib.wgpuBufferMapAsync(buffer._internal, lib.WGPUMapMode_Read, 0, nbytes, info[0])


def _call_back_info(kind: str, callback: Any, then: Callable[[str], None]) -> Any:
    key = ffi.new_handle(then)
    _waiting[key] = then
    mode = lib.WGPUCallbackMode_AllowProcessEvents
    return ffi.new(kind, {"mode": mode, "callback": callback, "userdata1": key})


_waiting: dict[Any, Callable[[str], None]] = {}  # by handle: what wgpu will call back


@called_back
def _call_back(
    status: int, message: Any, key: Any, _: Any,
    ending: Callable[[], bool] = sys.is_finalizing,
) -> None:  # fmt: skip
    if ending():  # a device that goes with the interpreter calls back; modules are empty then
        return
    then = _waiting.pop(key)
    failed = status != 1  # both kinds of status call success so
    then(native._api.from_c_string_view(message) or f"status {status}" if failed else "")


_mapped: Any = ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", _call_back)
_over: Any = ffi.callback(
    "void(WGPUQueueWorkDoneStatus, WGPUStringView, void *, void *)", _call_back
)


def mapped(buffer: Any, nbytes: int) -> Any:
    """The first bytes of a mapped buffer, until it is unmapped."""
    return ffi.buffer(lib.wgpuBufferGetConstMappedRange(buffer._internal, 0, nbytes), nbytes)


def unmap(buffer: Any) -> None:
    """Give a mapped buffer back to the device."""
    lib.wgpuBufferUnmap(buffer._internal)
