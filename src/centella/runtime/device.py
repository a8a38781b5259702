"""A device as applications call it, and how one is opened: once for each name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import ref

from centella.backends.base import Array, Backend
from centella.backends.opening import (
    GPUS,
    byte_count,
    choose,
    kind_of,
    listed,
    names_of,
    open_backend,
    spelled,
)
from centella.errors import DeviceError
from centella.host.interrupts import guard, uninterrupted
from centella.host.log import logger
from centella.ledger.counts import Ledger, on_flush
from centella.plan.plan import Plan
from centella.record.recording import innermost
from centella.record.values import READY, Value
from centella.runtime.executor import Executor
from centella.runtime.forks import watch_forks
from centella.runtime.memory import Memory, Pool
from centella.runtime.pipelines import PipelineCache
from centella.runtime.process_end import watch_end
from centella.runtime.recorder import Recorder
from centella.runtime.storage import Storage
from centella.specs import Caps, Spec


class Device:
    """One open device; `ct.device(...)` gives it.

    Attributes:
        name: "cpu", "simulator", "webgpu:<adapter>" or "cuda:<index>".
        cache: its PipelineCache.
        pool: its memory; `pool.trim()` gives what is kept for reuse back to the driver.
        fault: what its self-check found wrong, "" for nothing; see `ct.device`.
        constants: tensors that functions keep on it, by the function's name and arguments.
    """

    fault: str = ""

    def __init__(self, backend: Backend, **options: Any) -> None:
        if not hasattr(backend, "caps"):  # a user's name of one
            raise DeviceError(
                f"Device: the class is not to be called; ct.device({backend!r}) opens one"
            )
        self.executor: Executor = Executor(backend, device=self, **options)
        self.storage: Storage = Storage(self.executor)
        self.recorder: Recorder = Recorder(self.executor, self.storage)
        self.name: str = backend.name
        self.backend: Backend = backend
        self.cache: PipelineCache = self.executor.cache
        self.pool: Pool = self.executor.pool
        self.lock: threading.RLock = self.executor.lock
        self.state_events: int = 0
        self.constants: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"<centella.Device {self.name}>"

    def __copy__(self) -> Device:
        return self  # there is one, whoever copies what refers to it

    def __deepcopy__(self, _: Any) -> Device:
        return self

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError(f"{self.name}: a device stays in its process; pickle its name")

    @property
    def native(self) -> Any:
        """The driver's own device, or None on the CPU.

        On WebGPU a wgpu device; on CUDA `ordinal`, `context` and `stream` (where work of this
        thread goes now), which also is a stream to libraries that know `__cuda_stream__`.
        """
        return self.backend.native

    @property
    def caps(self) -> Caps:
        """What it can do."""
        return self.backend.caps

    @property
    def lost(self) -> bool:
        """True when it was lost or closed."""
        return self.executor.lost

    @property
    def last_plan(self) -> Plan:
        """What ran last: `print(device.last_plan.explain())`."""
        return self.executor.last_plan

    @property
    def memory(self) -> Memory:
        """Bytes in use, kept for reuse, allowed and there, now: print it."""
        with self.lock, self.executor.border:
            free, total = (self.backend.memory() if not self.lost else None) or (None, None)
            pool = self.pool
            pool.drain()
            return Memory(pool.live, pool.held, pool.peak, pool.budget, free, total)

    def reset_peak(self) -> None:
        """Count `memory.peak` anew, from what is in use now."""
        self.pool.reset_peak()

    def close(self) -> None:
        """Release the device; its tensors cannot be used any more."""
        self.executor.close()

    def synchronize(self) -> None:
        """Run what this thread recorded lazily and wait until the device has done everything."""
        self.recorder.flush()
        self.executor.synchronize()

    def describe(self) -> dict[str, Any]:
        """Name, driver and limits, as `centella info` prints them.

        On WebGPU `type` is "DiscreteGPU", "IntegratedGPU" or "CPU", which is a software adapter.
        """
        return self.backend.describe()

    def native_of(self, value: Value) -> Any:
        """The driver's buffer or address of a value; on the CPU a read-only array, computed."""
        buffer = self.recorder.materialise(value)
        with self.executor.border:
            return self.backend.shown(buffer)

    def glance(self, value: Value, spec: Spec, offset: int) -> Array | None:
        """What a ready value in the host's memory holds, to be printed; None for any other.

        Nothing is computed, copied or counted.
        """
        if value.state != READY or value.stale is not None or value.buffer is None:
            return None
        return self.backend.glance(value.buffer, spec, value.offset + offset)

    def lend(self, value: Value, stream: Any) -> tuple[int, Any]:
        """The address of a value for a library that works on a stream, and what that holds.

        Raises:
            BufferError: there is no such stream.
            ContractError: it waits for a batch that has not been executed.
        """
        buffer = self.recorder.materialise(value)
        with self.executor.border:
            return self.backend.lend(buffer, stream)

    def compile(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function captured for arguments like these, to be replayed: see `ct.jit`.

        Args:
            fn: takes and returns tensors; runs once, with placeholders.
            args, kwargs: examples: tensors and NumPy arrays become inputs, the rest is fixed.

        Raises:
            ContractError: it reads a value, or gives no tensors and changes no State.
        """
        from centella.tensors.jit import Compiled

        return Compiled(fn, args, kwargs, self)

    def batch(self) -> Any:
        """A CommandBatch on this device."""
        from centella.tensors.batch import CommandBatch

        return CommandBatch(self)

    @contextmanager
    def stream(self, stream: Any = None) -> Iterator[Any]:
        """Inside `with device.stream(s):`, what this thread submits goes to a CUDA stream.

        What was recorded lazily is submitted at either end. All work of a device stays in one
        order, whatever streams it goes to; what the application puts on `s` inside the block
        comes after what was submitted before, and before what is submitted later.

        Args:
            stream: a handle, or a stream of torch, CuPy, cuda.core or whatever knows
                `__cuda_stream__`; default: a new one, for this block.

        Returns:
            `device.native` with that stream.

        Raises:
            DeviceError: the device has no streams, or this is none of its streams.
        """
        self.recorder.flush()
        with self.backend.on_stream(stream) as native:
            yield native
            self.recorder.flush()


_opened: dict[str, Device] = {}
_opened_lock = threading.Lock()
_devices: tuple[ref[Device], ...] = ()  # replaced, never changed: read without a lock
_default: Device | None = None


@uninterrupted
def device(name: str | Device | None = None, *, native: Any = None, **options: Any) -> Device:
    """Open a device, or give the one that is open under this name.

    A GPU computes a few cases at the first use of its adapter and driver with this version of the
    library, and what they gave is remembered (`CENTELLA_SELF_CHECK`: 0 leaves that out, `always`
    repeats it). Wrong numbers, or a device that is lost, are logged as one warning. Where no device
    was named, the next choice is taken, at last the CPU; one that was named is given all the same.

    Args:
        name: "cpu", "simulator", "webgpu", "webgpu:<index or word>", "cuda", "cuda:<index>", or
            None: `CENTELLA_DEVICE`, else cuda, else a hardware WebGPU adapter, else the CPU.
        native: a device that the application already has, which stays its own: a wgpu device; an
            ordinal or a device of torch, CuPy or cuda.core; a CUcontext. The same one gives the
            same Device.
        options: `pool=` "clear" (memory is zeroed before it is handed out), "exact" (nothing is
            reused) or "poison" (it is filled with NaN), `cache=PipelineCache()`, `memory_limit=`
            bytes or a text ("1.5 GB", "512 MiB"), `minimum=True` (WebGPU's guaranteed limits):
            these open a device of their own.

    Raises:
        DeviceError: unknown name or option, no adapter, or a device that cannot be opened; says
            what is missing.
    """
    if isinstance(name, Device):
        return name
    if name is None and native is None:
        if options:
            raise DeviceError(f"device: name the device that {', '.join(options)} is meant for")
        return default_device()
    if not isinstance(name, str | None):
        raise DeviceError(f"device: expected a name or a Device, got {name!r}")
    with _opened_lock:
        if native is not None:
            name = name or kind_of(native)
            return _of_native(name, native, options) or _open_native(name, native, options)
        assert name is not None
        name = spelled(name)
        if options:
            return _create(name, None, options)
        known = _opened.get(name)
        if known is None or known.lost:
            known = _opened[name] = _create(name, None, {})
        return known


def _of_native(name: str, native: Any, options: dict[str, Any]) -> Device | None:
    if not options:
        for opened in open_devices():
            if opened.backend.runs_on(native) and opened.name.startswith(name):
                return opened
    return None


def _open_native(name: str, native: Any, options: dict[str, Any]) -> Device:
    plain = not options
    opened = _create(name, native, options)
    # An ordinal, or an object that stands for one, is another spelling of a name.
    if plain and opened.name.startswith("cuda:") and opened.backend.runs_on(int(opened.name[5:])):
        _opened[opened.name] = opened
    return opened


def _create(name: str, native: Any, options: dict[str, Any]) -> Device:
    global _devices
    own = {n: options.pop(n) for n in ("cache", "memory_limit") if n in options}
    if own.get("memory_limit") is not None:
        own["memory_limit"] = byte_count(own["memory_limit"])
    if not isinstance(own.get("cache"), PipelineCache | None):
        raise DeviceError(f"device: expected a PipelineCache as cache=, got {own['cache']!r:.80}")
    pool = options.pop("pool", os.environ.get("CENTELLA_POOL", "reuse"))
    backend = open_backend(name, native, options)
    try:
        opened = Device(backend, pool=pool, **own)
        if name.partition(":")[0] in GPUS:  # NumPy is what a device is compared with
            opened.fault = _first_use(opened)
    except BaseException:
        backend.close()
        raise
    guard()
    _watch_process()
    _devices = (*[r for r in _devices if r() is not None], ref(opened))
    return opened


def _first_use(opened: Device) -> str:
    from centella.runtime.self_check import check_first_use

    return check_first_use(opened.executor)


def open_devices() -> list[Device]:
    """The devices of this process that are neither closed, lost nor collected."""
    return [d for r in _devices if (d := r()) is not None and not d.lost]


@uninterrupted
def _flush_all(scope: Ledger | None) -> None:
    for opened in open_devices():
        opened.recorder.flush(scope)


on_flush(_flush_all)


def trusted(name: str) -> Device:
    """The device of a name, for a choice that is nobody's own.

    Raises:
        DeviceError: it cannot be opened, or its self-check failed.
    """
    known = device(name)
    if known.fault:
        raise DeviceError(f"{known.name} failed its self-check: {known.fault}")
    return known


def current_device() -> Device:
    """The device of the innermost open batch of this thread and task, else the default device."""
    inside = innermost()
    return default_device() if inside is None else inside.device


def every_device() -> list[Device]:
    """The devices of the kind that the default device has: each NVIDIA GPU, or each adapter.

    One that cannot be opened, or whose self-check failed, is left out with a warning in the log.

    Raises:
        DeviceError: none is left.
    """
    opened, errors = [], []
    for name in names_of(default_device().name.partition(":")[0]):
        try:
            opened.append(trusted(name))
        except DeviceError as error:
            errors.append(str(error))
            logger("device").warning("%s is left out: %s", name, error)
    if not opened:
        raise DeviceError(f"expected a device that works: {'; '.join(errors)}")
    return opened


def devices() -> list[str]:
    """The names of this machine's devices, as `device` takes them; none is opened.

    CUDA devices come first, then WebGPU adapters, then "cpu". `device(name).describe()` says what
    a device is; `centella info` says why a kind has none.
    """
    names: list[str] = []
    for kind in reversed(GPUS):
        with suppress(Exception):  # drivers and their bindings raise what they like
            names += [row["open_with"] for row in listed(kind)]
    return [*names, "cpu"]


def default_device() -> Device:
    """The device used when none is named: chosen once, logged with the reason."""
    global _default
    name = os.environ.get("CENTELLA_DEVICE")
    if name:
        try:
            return device(name)
        except DeviceError as error:
            raise DeviceError(f"CENTELLA_DEVICE={name}: {error}") from error
    if _default is not None and not _default.lost:
        return _default
    known, why = choose(trusted)
    logger("device").info("default device %s: %s", known.name, why)
    _default = known
    return known


_watched = False


def _watch_process() -> None:
    """Register what the end of the process and a fork need: with the first device, once."""
    global _watched
    if not _watched:
        _watched = True
        watch_end(_executors)
        watch_forks(_executors, _opened_lock)


def _executors() -> list[Executor]:
    return [opened.executor for opened in open_devices()]
