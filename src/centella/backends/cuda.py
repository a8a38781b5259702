"""CUDA: PTX handed to the driver's own compiler; nothing of the toolkit is needed.

All work of a device runs on one stream, in submission order. A launch passes one parameter struct
(addresses, number of groups, scalars), so that its host cost does not grow with the arguments.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any

import numpy as np

from centella.errors import (
    CompileError,
    DeviceError,
    DeviceLostError,
    LimitError,
    MissingExtraError,
    OutOfMemoryError,
)
from centella.lang.ptx import entry_name, param_layout, shared_layout
from centella.ledger import count
from centella.program import HostProgram, Program
from centella.specs import Caps
from centella.submission import Array, Bound, Submission

try:
    from cuda.bindings import driver
except ImportError as error:
    raise MissingExtraError("cuda-bindings", "cuda") from error

KNOWN = {
    50: "sm_50", 52: "sm_52", 60: "sm_60", 61: "sm_61", 70: "sm_70", 75: "sm_75", 80: "sm_80",
    86: "sm_86", 87: "sm_87", 89: "sm_89", 90: "sm_90a", 100: "sm_100", 103: "sm_103",
    120: "sm_120", 121: "sm_121",
}  # fmt: skip
LOG_BYTES = 16384
OUT_OF_MEMORY = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
A = driver.CUdevice_attribute


def explain(status: Any) -> str:
    """Name and description of a driver status."""
    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    return f"{(name or b'?').decode()}: {(text or b'').decode()}"


def check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call.

    Raises:
        OutOfMemoryError, DeviceLostError, DeviceError: by status.
    """
    status, *values = result
    if status == driver.CUresult.CUDA_SUCCESS:
        return values[0] if len(values) == 1 else tuple(values)
    if status == OUT_OF_MEMORY:
        raise OutOfMemoryError(explain(status))
    sticky = (
        driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
        driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,
        driver.CUresult.CUDA_ERROR_MISALIGNED_ADDRESS,
        driver.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT,
    )
    raise (DeviceLostError if status in sticky else DeviceError)(explain(status))


def device_count() -> int:
    """CUDA devices of this machine.

    Raises:
        DeviceError: when there is no driver.
    """
    try:
        check(driver.cuInit(0))
        return int(check(driver.cuDeviceGetCount()))
    except DeviceError as error:
        raise DeviceError(f"no CUDA device: {error}") from error
    except RuntimeError as error:
        raise DeviceError(f"no CUDA device: the NVIDIA driver was not found ({error})") from error


def arch_of(major: int, minor: int) -> str:
    """The PTX target of a compute capability; an unknown newer one gets plain sm_90."""
    known = KNOWN.get(10 * major + minor)
    if known is not None:
        return known
    older = [c for c in KNOWN if c <= 10 * major + minor and c <= 90]
    return f"sm_{max(older)}" if older else "sm_50"


class CudaTicket:
    """A submission under way: an event, and pinned memory that receives its read-backs."""

    def __init__(
        self, backend: CudaBackend, event: Any, pinned: Array | None,
        places: list[tuple[int, int]], keep: Any,
    ) -> None:  # fmt: skip
        self._backend = backend
        self._event = event
        self._pinned = pinned
        self._places = places
        self._keep = keep
        self._lock = threading.Lock()
        self._results: list[Array] | None = None

    def done(self) -> bool:
        """True once the device has finished it."""
        if self._results is not None:
            return True
        self._backend.enter()
        status = driver.cuEventQuery(self._event)[0]
        if status == NOT_READY:
            return False
        check((status,))
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished."""
        with self._lock:
            if self._results is not None:
                return
            if timeout is not None:
                self._poll(timeout)
            self._backend.enter()
            check(driver.cuEventSynchronize(self._event))
            self._keep = None
            self._results = []
            if self._pinned is not None:
                self._results = [self._pinned[s : s + n].copy() for s, n in self._places]
                self._backend.return_pinned(self._pinned)
                self._pinned = None
            self._backend.return_event(self._event)

    def __del__(self) -> None:
        if self._results is None:  # nobody waited: what it held is used in stream order
            self._backend.return_event(self._event)
            if self._pinned is not None:
                self._backend.return_pinned(self._pinned)

    def _poll(self, timeout: float) -> None:
        pause = threading.Event()
        waited = 0.0
        while not self.done():
            if waited >= timeout:
                raise TimeoutError(f"not done after {timeout} s")
            pause.wait(0.0005)
            waited += 0.0005

    def data(self, index: int) -> Array:
        """Bytes of one read-back; a copy that the caller owns."""
        self.wait()
        assert self._results is not None
        return self._results[index]


class CudaBackend:
    """One CUDA device, in its primary context (which other libraries of the process share)."""

    def __init__(self, which: str = "", *, native: Any = None) -> None:
        ordinal = int(which) if which.isdigit() else 0
        if native is not None:
            ordinal = native if isinstance(native, int) else getattr(native, "device_id", -1)
            if not 0 <= ordinal < 64:
                raise DeviceError(f"cuda: expected a device ordinal or object, got {native!r}")
        elif which and not which.isdigit():
            raise DeviceError(f"cuda: expected cuda or cuda:<index>, got cuda:{which}")
        available = device_count()
        if ordinal >= available:
            raise DeviceError(f"cuda:{ordinal}: this machine has {available} CUDA devices")
        self.native = ordinal
        self.name = f"cuda:{ordinal}"
        self._device = check(driver.cuDeviceGet(ordinal))
        self._context = check(driver.cuDevicePrimaryCtxRetain(self._device))
        self.enter()
        self._stream = check(
            driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        )
        self._stream_handle = int(self._stream)
        self._lock = threading.Lock()
        self._pinned: dict[int, list[Array]] = {}
        self._idle_pinned: deque[Array] = deque()
        self._events: list[Any] = []
        self.caps = self._capabilities()

    def _attribute(self, which: Any) -> int:
        return int(check(driver.cuDeviceGetAttribute(which, self._device)))

    def _capabilities(self) -> Caps:
        major = self._attribute(A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.processors = self._attribute(A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        total = int(check(driver.cuDeviceTotalMem(self._device)))
        return Caps(
            target="ptx",
            row_alignment=16,
            max_storage_buffers=64,
            max_binding=1 << 34,
            max_buffer=min(total, 1 << 34),
            max_workgroup=1024,
            max_shared=self._attribute(A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            max_groups=(1 << 31) - 1,
            subgroups=True,
            native_f16_pack=True,
            arch=arch_of(major, minor),
            family="nvidia",
        )

    def enter(self) -> None:
        """Make the context current on this thread."""
        check(driver.cuCtxSetCurrent(self._context))

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Device memory of `nbytes`."""
        self.enter()
        try:
            return int(check(driver.cuMemAlloc(nbytes)))
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"{self.name}: no room for {nbytes:,} bytes") from error

    def free(self, native: int) -> None:
        """Give memory back to the driver."""
        self.enter()
        check(driver.cuStreamSynchronize(self._stream))
        check(driver.cuMemFree(native))

    def write(self, native: int, offset: int, data: Array) -> None:
        """Copy host bytes into device memory, in order with submissions."""
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        if raw.size:
            self.enter()
            check(driver.cuMemcpyHtoDAsync(
                native + offset, raw.ctypes.data, raw.size, self._stream))  # fmt: skip
            if raw.size > 65536:
                check(driver.cuStreamSynchronize(self._stream))

    def adopt(self, native: Any) -> tuple[int, int]:
        """Memory of a CuPy array, a torch tensor or the like, and its bytes.

        What its library has still to do to it is waited for. Source: the CUDA array interface.
        """
        face = getattr(native, "__cuda_array_interface__", None)
        if face is None:
            raise DeviceError(
                f"{self.name}: expected an object with __cuda_array_interface__, got {native!r}"
            )
        if face.get("strides") is not None:
            raise DeviceError(f"{self.name}: an imported array must be C-contiguous")
        address = int(face["data"][0])
        nbytes = int(np.prod(face["shape"], dtype=np.int64)) * np.dtype(face["typestr"]).itemsize
        if not address or address % 16 or not 0 < nbytes <= self.caps.max_buffer:
            raise DeviceError(
                f"{self.name}: an imported array starts on a 16-byte boundary and has 1 to "
                f"{self.caps.max_buffer:,} bytes; this one has {nbytes:,} at {address:#x}"
            )
        self.enter()
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        if int(check(driver.cuPointerGetAttribute(attribute, address))) != self.native:
            raise DeviceError(f"{self.name}: the array lives on another device")
        check(driver.cuCtxSynchronize())
        return address, nbytes

    def disown(self, native: Any) -> None:
        """Wait until nothing here reads an imported array any more."""
        self.enter()
        check(driver.cuStreamSynchronize(self._stream))

    def _take_pinned(self, nbytes: int) -> Array:
        size = 1 << max(12, (nbytes - 1).bit_length())
        with self._lock:
            while self._idle_pinned:
                idle = self._idle_pinned.popleft()
                self._pinned.setdefault(idle.size, []).append(idle)
            free = self._pinned.get(size)
            if free:
                return free.pop()
        address = int(check(driver.cuMemHostAlloc(size, 0)))
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def return_pinned(self, pinned: Array) -> None:
        """Take pinned memory for the next read-back of its size; safe in a finalizer."""
        self._idle_pinned.append(pinned)

    def _take_event(self) -> Any:
        try:
            return self._events.pop()
        except IndexError:
            pass
        return check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))

    def return_event(self, event: Any) -> None:
        """Take an event for the next submission; safe in a finalizer."""
        self._events.append(event)

    # -- programs ---------------------------------------------------------------------------------

    def compile(self, program: Program | HostProgram) -> Any:
        """The driver's form of a program."""
        assert isinstance(program, Program)
        self.enter()
        log = bytes(LOG_BYTES)
        option = driver.CUjit_option
        status, module = driver.cuModuleLoadDataEx(
            program.source.encode() + b"\0",
            2,
            [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES],
            [log, LOG_BYTES],
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            text = log.split(b"\0")[0].decode(errors="replace") or explain(status)
            raise CompileError(program.name, program.source, text)
        function = check(driver.cuModuleGetFunction(module, entry_name(program.ir).encode()))
        dynamic = shared_layout(program.ir).dynamic
        if dynamic:
            check(driver.cuFuncSetAttribute(
                function,
                driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                dynamic,
            ))  # fmt: skip
        layout = param_layout(program.ir)
        return function, program.ir.workgroup, dynamic, layout.size, module

    def occupancy(self, pipeline: Any) -> dict[str, int]:
        """Registers, spilled bytes and shared bytes of a compiled program."""
        self.enter()
        f = driver.CUfunction_attribute
        wanted = {
            "registers": f.CU_FUNC_ATTRIBUTE_NUM_REGS,
            "local_bytes": f.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
            "shared_bytes": f.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        }
        return {n: int(check(driver.cuFuncGetAttribute(a, pipeline[0])))
                for n, a in wanted.items()}  # fmt: skip

    # -- submission -------------------------------------------------------------------------------

    def submit(self, work: Submission) -> CudaTicket:
        """Start a submission."""
        self.enter()
        for slot, offset, data in work.uploads:
            self.write(work.slots[slot].native, offset, data)
        launches = [b for b in work.launches if b.groups > 0]
        for bound in launches:
            if bound.groups > self.caps.max_groups:
                raise LimitError(f"{bound.program.name}: {bound.groups:,} groups")
        keep = self._launch(work, launches) if launches else None
        places: list[tuple[int, int]] = []
        pinned: Array | None = None
        if work.reads:
            end = 0
            for read in work.reads:
                places.append((end, read.nbytes))
                end += -(-read.nbytes // 16) * 16
            pinned = self._take_pinned(max(end, 1))
            for read, (place, nbytes) in zip(work.reads, places, strict=True):
                if nbytes:
                    check(driver.cuMemcpyDtoHAsync(
                        pinned.ctypes.data + place, work.slots[read.slot].native + read.start,
                        nbytes, self._stream))  # fmt: skip
        event = self._take_event()
        check(driver.cuEventRecord(event, self._stream))
        return CudaTicket(self, event, pinned, places, keep)

    def _launch(self, work: Submission, launches: list[Bound]) -> Any:
        slots = work.slots
        words: list[int] = []
        places: list[int] = []
        for bound in launches:
            places.append(len(words) * 4)
            for slot in bound.slots:
                address = slots[slot].native
                words.append(address & 0xFFFFFFFF)
                words.append(address >> 32)
            words.append(bound.groups)
            words += bound.words
            if len(words) & 1:
                words.append(0)
        blob = np.array(words, np.uint32)
        pointers = np.array(places, np.uint64) + np.uint64(blob.ctypes.data)
        first = pointers.ctypes.data
        launch = driver.cuLaunchKernel
        ok = driver.CUresult.CUDA_SUCCESS
        for position, bound in enumerate(launches):
            function, threads, dynamic, _, _ = bound.pipeline
            status = launch(
                function, bound.groups, 1, 1, threads, 1, 1, dynamic, self._stream,
                first + 8 * position, 0,
            )[0]  # fmt: skip
            if status != ok:
                raise DeviceError(f"{bound.program.name}: {explain(status)}")
        count(parameter_bytes=blob.nbytes)
        return blob, pointers

    def describe(self) -> dict[str, Any]:
        """Name, driver and limits."""
        self.enter()
        name = check(driver.cuDeviceGetName(256, self._device))
        free, total = check(driver.cuMemGetInfo())
        return {
            "device": "cuda",
            "name": name.split(b"\0")[0].decode(),
            "driver": int(check(driver.cuDriverGetVersion())),
            "arch": self.caps.arch,
            "processors": self.processors,
            "memory_total": int(total),
            "memory_free": int(free),
            "max_shared": self.caps.max_shared,
        }

    def close(self) -> None:
        """Release what this backend made; the primary context may live on in other libraries."""
        self.enter()
        check(driver.cuStreamSynchronize(self._stream))
        for event in self._events:
            driver.cuEventDestroy(event)
        for pinned in (*self._idle_pinned, *(p for free in self._pinned.values() for p in free)):
            driver.cuMemFreeHost(pinned.ctypes.data)
        self._events, self._pinned = [], {}
        self._idle_pinned.clear()
        driver.cuStreamDestroy(self._stream)
        driver.cuDevicePrimaryCtxRelease(self._device)
