"""A CUDA driver that runs nothing: memory of the host, and a clock for each stream.

Copies happen at once, launches not at all. What is put on a stream is noted with its vector clock,
so that a test can say which work is ordered before which.
"""

# ruff: noqa: N802  # the functions are called as the driver calls them

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest

from centella.runtime.device import open_devices

Clock = dict[int, int]
PRIMARY = 0x1000  # the primary context of device n is PRIMARY + n
SAID: dict[str, tuple[Any, ...]] = {  # what is answered whatever is asked
    **dict.fromkeys(("cuInit", "cuEventDestroy", "cuEventQuery", "cuModuleUnload"), ()),
    "cuFuncSetAttribute": (), "cuGetErrorString": (b"",), "cuDeviceGetCount": (2,),
    "cuDeviceTotalMem": (1 << 34,), "cuEventElapsedTime": (0.0,), "cuModuleLoadDataEx": (1,),
    "cuModuleGetFunction": (2,), "cuOccupancyMaxActiveBlocksPerMultiprocessor": (2,),
}  # fmt: skip


@dataclass
class Op:
    """One thing on a stream: what, where, and what comes before it."""

    what: str
    stream: int
    clock: Clock

    def before(self, other: Op) -> bool:
        """Whether `other` waits for this."""
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]


@dataclass
class FakeCuda:
    """Two devices."""

    driver: Any
    ops: list[Op] = field(default_factory=list)
    version: int = 12_080
    retained: int = 0
    syncs: int = 0  # waits for a whole context
    waits: int = 0  # waits for a stream or an event
    loaded: bool = True  # functions; else at their first launch
    stream_calls: int = 0  # streams that were created, or destroyed
    streams: dict[int, int] = field(default_factory=dict)  # handle to context
    devices: dict[int, int] = field(default_factory=lambda: {PRIMARY: 0, PRIMARY + 1: 1})
    memory: dict[int, tuple[Any, int, int]] = field(default_factory=dict)  # array, size, context
    _clocks: dict[int, Clock] = field(default_factory=dict)
    _events: dict[int, Clock] = field(default_factory=dict)
    _current: list[int] = field(default_factory=list)
    _next: int = 0x5000

    def install(self, patch: pytest.MonkeyPatch) -> FakeCuda:
        """Put it in the place of the driver's functions."""
        for name in dir(self):
            if name.startswith("cu") and hasattr(self.driver, name):
                patch.setattr(self.driver, name, getattr(self, name))
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in SAID:
            raise AttributeError(name)
        return lambda *_: self._ok(*SAID[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *SAID]

    def put(self, what: str, stream: Any) -> Op:
        """Put something on a stream, as an application does, too."""
        clock = self._clocks.setdefault(int(stream), {})
        clock[int(stream)] = clock.get(int(stream), 0) + 1
        self.ops.append(Op(what, int(stream), dict(clock)))
        return self.ops[-1]

    def alloc(self, nbytes: int, context: int) -> int:
        """Memory of a context, 256 bytes apart."""
        array = np.zeros(nbytes + 512, np.uint8)
        address = -(-array.ctypes.data // 256) * 256
        self.memory[address] = (array, nbytes, context)
        return address

    def new_stream(self, context: int = PRIMARY) -> int:
        """A stream of the application's."""
        self._next += 0x10
        self.streams[self._next] = context
        return self._next

    def _ok(self, *values: Any) -> tuple[Any, ...]:
        return (self.driver.CUresult.CUDA_SUCCESS, *values)

    def _bad(self, *values: Any) -> tuple[Any, ...]:
        return (self.driver.CUresult.CUDA_ERROR_INVALID_VALUE, *values)

    # -- devices and contexts ---------------------------------------------------------------------

    def cuDriverGetVersion(self) -> Any:
        return self._ok(self.version)

    def cuGetErrorName(self, status: Any) -> Any:
        return self._ok(status.name.encode())

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._ok(self.driver.CUdevice(ordinal))

    def cuDeviceGetAttribute(self, which: Any, device: Any) -> Any:
        names = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}
        return self._ok(next((v for k, v in names.items() if which.name.endswith(k)), 1 << 16))

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        self.retained += 1
        return self._ok(self.driver.CUcontext(PRIMARY + int(device)))

    def cuDevicePrimaryCtxRelease(self, device: Any) -> Any:
        self.retained -= 1
        return self._ok()

    def cuCtxPushCurrent(self, context: Any) -> Any:
        if int(context) not in self.devices:
            return (self.driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self._current.append(int(context))
        return self._ok()

    def cuCtxPopCurrent(self) -> Any:
        return self._ok(self.driver.CUcontext(self._current.pop()))

    def cuCtxGetCurrent(self) -> Any:
        return self._ok(self.driver.CUcontext(self._current[-1] if self._current else 0))

    def cuCtxGetDevice(self) -> Any:
        return self._ok(self.driver.CUdevice(self.devices[self._current[-1]]))

    def cuCtxSynchronize(self) -> Any:
        self.syncs += 1
        everything: Clock = {s: c[s] for s, c in self._clocks.items() if s in c}
        for clock in self._clocks.values():
            clock.update(everything)
        return self._ok()

    # -- streams and events -----------------------------------------------------------------------

    def cuStreamCreate(self, flags: int) -> Any:
        self.stream_calls += 1
        return self._ok(self.driver.CUstream(self.new_stream(self._current[-1])))

    def cuStreamDestroy(self, stream: Any) -> Any:
        self.stream_calls += 1
        del self.streams[int(stream)]
        return self._ok()

    def cuStreamGetCtx(self, stream: Any) -> Any:
        if int(stream) in (1, 2):
            return self._ok(self.driver.CUcontext(self._current[-1]))
        if int(stream) not in self.streams:
            return self._bad(None)
        return self._ok(self.driver.CUcontext(self.streams[int(stream)]))

    def cuStreamSynchronize(self, stream: Any) -> Any:
        self.waits += 1
        return self._ok()

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> Any:
        clock = self._clocks.setdefault(int(stream), {})
        for other, count in self._events[int(event)].items():
            clock[other] = max(clock.get(other, 0), count)
        return self._ok()

    def cuEventCreate(self, flags: int) -> Any:
        self._next += 1
        return self._ok(self.driver.CUevent(self._next))

    def cuEventRecord(self, event: Any, stream: Any) -> Any:
        assert int(stream) in (1, 2, *self.streams), "a stream that was destroyed"
        self._events[int(event)] = dict(self._clocks.get(int(stream), {}))
        return self._ok()

    def cuEventSynchronize(self, event: Any) -> Any:
        self.waits += 1
        return self._ok()

    # -- memory -----------------------------------------------------------------------------------

    def cuMemAlloc(self, nbytes: int) -> Any:
        return self._ok(self.driver.CUdeviceptr(self.alloc(nbytes, self._current[-1])))

    def cuMemFree(self, address: Any) -> Any:
        del self.memory[int(address)]
        return self._ok()

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        return self._ok(self.alloc(nbytes, 0))

    def cuMemFreeHost(self, address: int) -> Any:
        del self.memory[address]
        return self._ok()

    def _copy(self, target: Any, source: Any, nbytes: int, stream: Any) -> Any:
        ctypes.memmove(int(target), int(source), nbytes)
        self.put("copy", stream)
        return self._ok()

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = _copy  # noqa: N815

    def cuMemsetD2D8Async(
        self, target: Any, pitch: int, value: int, width: int, height: int, stream: Any
    ) -> Any:
        for row in range(height):
            ctypes.memset(int(target) + row * pitch, value, width)
        self.put("fill", stream)
        return self._ok()

    def cuPointerGetAttribute(self, which: Any, address: int) -> Any:
        for start, (_, nbytes, context) in self.memory.items():
            if start <= address < start + nbytes and context:
                if which.name.endswith("CONTEXT"):
                    return self._ok(self.driver.CUcontext(context))
                return self._ok(self.devices[context])
        return self._bad(None)

    # -- programs ---------------------------------------------------------------------------------

    def cuFuncIsLoaded(self, function: Any) -> Any:
        states = self.driver.CUfunctionLoadingState
        return self._ok(states(int(self.loaded)))

    def cuFuncLoad(self, function: Any) -> Any:
        assert not self.loaded
        self.loaded = True
        self.put("load", 0)
        return self._ok()

    def cuLaunchKernel(self, *args: Any) -> Any:
        self.put("launch", args[8])
        return self._ok()

    def cuLaunchKernelEx(self, config: Any, *args: Any) -> Any:
        self.put("launch", config.hStream)
        return self._ok()


Fake = TypeVar("Fake", bound=FakeCuda)


def installed(patch: pytest.MonkeyPatch, kind: type[Fake]) -> Iterator[Fake]:
    """The body of a fixture: a driver of a kind, and no device of a real one in sight."""
    driver = pytest.importorskip("cuda.bindings.driver")
    module = sys.modules["centella.runtime.device"]  # `centella.device` is the function
    patch.setattr(module, "_opened", {})
    patch.setattr(module, "_devices", ())
    fake = kind(driver)
    fake.install(patch)
    yield fake
    for device in open_devices():
        if device.name.startswith("cuda"):
            device.close()
