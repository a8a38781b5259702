"""The memory of one CUDA device, its context and its streams."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from centella.backends.base import Array, Backend, Buffer
from centella.backends.cuda.driver import arch_of, check, device_count, driver
from centella.backends.cuda.interop import (
    LEGACY,
    NO_WAIT,
    WAIT_FOR_ALL,
    CudaNative,
    memory_of,
    ordinal_or_context,
    stream_of,
)
from centella.backends.cuda.stream import Current, Lent, Stream, Streams
from centella.errors import DeviceError, OutOfMemoryError
from centella.ledger.counts import count
from centella.specs import Caps

CUDA = 2  # as DLPack counts devices
STAGED = 64 << 10  # bytes of a copy that the driver takes a copy of before it returns
PINNED = 8 << 20  # bytes of a copy that goes by way of pinned memory; a larger one is waited for
A: Any = driver.CUdevice_attribute
NOT_READY: Any = driver.CUresult.CUDA_ERROR_NOT_READY


class Pinned(NamedTuple):
    """Memory of the host that the driver copies from and to by itself."""

    data: Array
    address: int
    nbytes: int


class CudaMemory(Backend):
    """The memory of one CUDA device, in its primary context, which other libraries share.

    Args:
        native: an ordinal, a device of cuda.core, CuPy or torch, or a CUcontext of the
            application's, which is used as it is and never released.
    """

    least_parts: int = STAGED  # a file is read straight into pinned memory

    def __init__(self, which: str = "", *, native: Any = None) -> None:
        ordinal, handle = _ordinal_and_context(which, native)
        self.ordinal: int = ordinal
        self.name: str = f"cuda:{ordinal}"
        self.dlpack: tuple[int, int] | None = (CUDA, ordinal)
        self._device = check(driver.cuDeviceGet(ordinal))
        self.processors: int = self._attribute(A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.caps: Caps = self._capabilities()
        self._lock = threading.RLock()  # addresses are given out without the device's
        self._pinned: dict[int, list[Pinned]] = {}
        self._idle_pinned: deque[Pinned] = deque()
        self._events: list[Any] = []
        self._sent: deque[tuple[Pinned, Any]] = deque()  # on their way, and until when
        self._unread: deque[tuple[Pinned, Any]] = deque()  # that the device may still use
        self._primary = handle is None
        self._context = (
            check(driver.cuDevicePrimaryCtxRetain(self._device))
            if handle is None
            else driver.CUcontext(handle)
        )
        self._current = Current(self._context)
        self._closed = False
        try:
            with self.current():
                self._streams = Streams(_new_stream())
        except BaseException:
            if self._primary:
                driver.cuDevicePrimaryCtxRelease(self._device)
            raise

    @property
    def native(self) -> CudaNative:
        """Ordinal, context, and the stream that work of this thread goes to."""
        return CudaNative(self.ordinal, int(self._context), self._streams.current().handle)

    def runs_on(self, native: object) -> bool:
        """Whether this is what an application calls so."""
        try:
            ordinal, handle = ordinal_or_context(native)
        except DeviceError:
            return False
        if handle is not None:
            return handle == int(self._context)
        return self._primary and ordinal == self.ordinal

    def _attribute(self, which: Any) -> int:
        return int(check(driver.cuDeviceGetAttribute(which, self._device)))

    def _capabilities(self) -> Caps:
        major = self._attribute(A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
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
            native_exp2=True,
            arch=arch_of(major, minor),
            family="nvidia",
        )

    def current(self) -> Current:
        """The context, current on this thread; afterwards the application's own is again."""
        return self._current

    @contextmanager
    def on_stream(self, stream: object) -> Iterator[CudaNative]:
        """Send what this thread submits to a stream; None: to a new one.

        Raises:
            DeviceError: no stream, or one of another context.
        """
        handle = None if stream is None else stream_of(stream)
        with self._lock, self.current():
            if handle is None:
                chosen = _new_stream()
            else:
                chosen = handle
                self._check_stream(chosen)
            scope = self._streams.enter(chosen)
        try:
            yield self.native
        finally:
            if not self._closed:
                with self._lock, self.current():
                    self._streams.leave(scope)
                    if handle is None:  # the driver lets it finish first
                        driver.cuStreamDestroy(scope.stream.native)

    def _check_stream(self, handle: int) -> None:
        try:
            current = int(check(driver.cuStreamGetCtx(driver.CUstream(handle))))
        except DeviceError as error:
            raise DeviceError(
                f"{self.name}: expected a stream of this device, got {handle:#x}: {error}"
            ) from error
        if current != int(self._context):
            raise DeviceError(
                f"{self.name}: expected a stream of context {int(self._context):#x}, got one of "
                f"{current:#x}"
            )

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Device memory of `nbytes`."""
        try:
            with self.current():
                return int(check(driver.cuMemAlloc(nbytes)))
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"{self.name}: no room for {nbytes:,} bytes") from error

    def free(self, native: int) -> None:
        """Give memory back to the driver."""
        with self._lock, self.current():
            check(driver.cuStreamSynchronize(self._streams.turn().native))
            count(syncs=1)
            check(driver.cuMemFree(native))

    def memory(self) -> tuple[int, int]:
        """Bytes free and bytes there, of all processes."""
        with self.current():
            free, total = check(driver.cuMemGetInfo())
        return int(free), int(total)

    def write(self, buffer: Buffer, data: Array) -> None:
        """Copy host bytes into device memory, in order with submissions."""
        with self._lock, self.current():
            self._send(buffer, data, self._streams.turn().native)

    def _send(self, buffer: Buffer, data: Array, stream: Any) -> None:
        """Put a copy of host bytes on this thread's stream; their owner may change them at once."""
        if STAGED < data.nbytes <= PINNED:
            with self._sending(buffer.native, data.nbytes) as part:
                part[:] = data.reshape(-1).view(np.uint8)
            return
        check(driver.cuMemcpyHtoDAsync(buffer.native, host_address(data), data.nbytes, stream))
        if data.nbytes > STAGED:
            check(driver.cuStreamSynchronize(stream))
            count(syncs=1)

    def write_parts(self, buffer: Buffer, nbytes: int, step: int) -> Iterator[Array]:
        """Copy host bytes part after part: one is read as the one before it is on its way."""
        for start in range(0, nbytes, step):
            with self._sending(int(buffer.native) + start, min(step, nbytes - start)) as part:
                yield part

    @contextmanager
    def _sending(self, address: int, nbytes: int) -> Iterator[Array]:
        """Pinned memory to be filled; then it is copied to an address of the device.

        It waits for the first of two on their way, for no others.
        """
        with self._lock, self.current():
            pinned, event = self._next_sent(nbytes)
        try:
            yield pinned.data[:nbytes]
            with self._lock, self.current():
                stream = self._streams.turn().native
                check(driver.cuMemcpyHtoDAsync(address, pinned.address, nbytes, stream))
                check(driver.cuEventRecord(event, stream))
        finally:
            self._sent.append((pinned, event))

    def _next_sent(self, nbytes: int) -> tuple[Pinned, Any]:
        """Pinned memory for a part, and its event: of two or more, what was sent first."""
        if len(self._sent) < 2:
            return self._take_pinned(nbytes), self._take_event()
        pinned, event = self._sent.popleft()
        check(driver.cuEventSynchronize(event))
        count(syncs=1)
        if pinned.nbytes < nbytes:
            self.return_pinned(pinned)
            pinned = self._take_pinned(nbytes)
        return pinned, event

    def shown(self, buffer: Buffer) -> int:
        """The address; what this thread puts on its stream finds the memory computed."""
        with self._lock, self.current():
            self._streams.turn()
        address: int = buffer.native
        return address

    def adopt(self, native: object) -> tuple[int, int]:
        """Memory of a CuPy array, a torch tensor or the like, or at an address; and its bytes.

        What its library has still to do to it is waited for: on the device where it names a
        stream, else here. Source: the CUDA array interface, version 3.
        """
        address, nbytes, producer = memory_of(native)
        if not address or address % 16 or not 0 < nbytes <= self.caps.max_buffer:
            raise DeviceError(
                f"{self.name}: expected 1 to {self.caps.max_buffer:,} bytes from a 16-byte "
                f"boundary on to import, got {nbytes:,} at {address:#x}; from_dlpack takes other "
                f"boundaries"
            )
        with self._lock, self.current():
            for end in (address, address + nbytes - 1):
                self._check_address(end)
            stream = self._streams.turn()
            if producer == WAIT_FOR_ALL:
                check(driver.cuCtxSynchronize())
            elif producer != NO_WAIT:
                self._streams.after(Stream.of(producer), stream)
        return address, nbytes

    def _check_address(self, address: int) -> None:
        """Raise unless kernels of this context may read there."""
        which = driver.CUpointer_attribute
        status, ordinal = driver.cuPointerGetAttribute(
            which.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{self.name}: expected device memory, got {address:#x}")
        if int(ordinal) != self.ordinal:
            raise DeviceError(f"{self.name}: expected memory of it, got memory of cuda:{ordinal}")
        status, owner = driver.cuPointerGetAttribute(which.CU_POINTER_ATTRIBUTE_CONTEXT, address)
        # Memory of a stream-ordered pool has no context and belongs to the device.
        known = 0 if status != driver.CUresult.CUDA_SUCCESS or owner is None else int(owner)
        if known not in (0, int(self._context)):
            raise DeviceError(
                f"{self.name}: expected memory of context {int(self._context):#x}, got memory of "
                f"{known:#x}; open that context by ct.device('cuda', native=...)"
            )

    def lend(self, buffer: Buffer, stream: object) -> tuple[int, Any]:
        """The address for a library that works on its own stream, and what it has to hold."""
        handle = LEGACY if stream is None else stream
        if type(handle) is not int or handle == 0 or handle < -1:
            raise BufferError(
                f"DLPack: expected stream None, -1 or a CUDA stream's handle, got {stream!r}"
            )
        with self._lock, self.current():
            mine = self._streams.turn()
            if handle != -1:
                self._streams.after(mine, Stream.of(handle))
        return buffer.native, Lent(buffer, handle, self._streams.returned)

    def _take_pinned(self, nbytes: int) -> Pinned:
        size = 1 << max(12, (nbytes - 1).bit_length())
        while self._unread and driver.cuEventQuery(self._unread[0][1])[0] != NOT_READY:
            pinned, event = self._unread.popleft()
            self._idle_pinned.append(pinned)
            self._events.append(event)
        while self._idle_pinned:
            idle = self._idle_pinned.popleft()
            self._pinned.setdefault(idle.nbytes, []).append(idle)
        free = self._pinned.get(size)
        if free:
            return free.pop()
        address = int(check(driver.cuMemHostAlloc(size, 0)))
        data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        return Pinned(data, address, size)

    def return_pinned(self, pinned: Pinned) -> None:
        """Take pinned memory for the next read-back of its size; safe in a finalizer."""
        self._idle_pinned.append(pinned)

    def return_later(self, pinned: Pinned, event: Any) -> None:
        """Take pinned memory back once an event has happened; safe in a finalizer."""
        self._unread.append((pinned, event))

    def _take_event(self) -> Any:
        if self._events:
            return self._events.pop()
        return check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))

    def return_event(self, event: Any) -> None:
        """Take an event for the next submission; safe in a finalizer."""
        self._events.append(event)


def host_address(data: Array) -> int:
    """Where host bytes lie; NumPy's own way takes four times as long."""
    writeable = data.flags.writeable and data.nbytes
    return ctypes.addressof(ctypes.c_char.from_buffer(data.data)) if writeable else data.ctypes.data


def _new_stream() -> int:
    return int(check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)))


def _ordinal_and_context(which: str, native: object) -> tuple[int, int | None]:
    """The ordinal of the device to open, and the application's context if it is to run there.

    Raises:
        DeviceError: there is no such device or context, or the name says another.
    """
    if which and not which.isdigit():
        raise DeviceError(f"cuda: expected cuda or cuda:<index>, got cuda:{which}")
    available = device_count()
    named, handle = (int(which or 0), None) if native is None else ordinal_or_context(native)
    if handle is not None:
        try:
            with Current(driver.CUcontext(handle)):
                named = int(check(driver.cuCtxGetDevice()))
        except DeviceError as error:
            raise DeviceError(
                f"cuda: expected a CUcontext as native=, got {native!r}: {error}"
            ) from error
    ordinal = named or 0
    if which and int(which) != ordinal:
        raise DeviceError(f"cuda:{which}: expected a native= of it, got one of cuda:{ordinal}")
    if ordinal >= available:
        raise DeviceError(f"cuda:{ordinal}: this machine has {available} CUDA devices")
    return ordinal, handle
