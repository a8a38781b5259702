"""A device: where operations are recorded and run; and how one is opened."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from centella import prepare
from centella.errors import CentellaError, ContractError, DeviceError, LimitError, ShapeError
from centella.ledger import Ledger, count, on_flush, open_scopes, permit
from centella.op import Op
from centella.pipelines import PipelineCache
from centella.program import exact
from centella.recording import (
    PENDING,
    Form,
    OpenRecordings,
    Recording,
    Value,
    call_site,
    innermost,
)
from centella.running import Engine
from centella.specs import Shape, Spec, dense_strides, make_spec, rows_aligned
from centella.submission import Array, Backend, Buffer

INDEX_LIMIT = (1 << 32) - 64  # kernels count elements in 32 bits
log: logging.Logger = logging.getLogger("centella.device")

IMPLICIT_NODES = 256
IMPLICIT_UPLOADS = 16 << 20
DIRECT = 64 << 10
FORMS = 8192


class Device(Engine):
    """One open device; `ct.device(...)` gives it.

    Attributes:
        name: "cpu", "simulator", "webgpu:<adapter>" or "cuda:<index>".
        caps: what it can do.
        cache: its PipelineCache.
    """

    def __init__(
        self, backend: Backend, *, pool: str = "reuse", cache: PipelineCache | None = None,
        memory_limit: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(backend, pool=pool, cache=cache, memory_limit=memory_limit)
        self._open = OpenRecordings(self)
        self._forms: dict[Any, Form] = {}
        self._local = threading.local()
        self._implicit: WeakSet[Recording] = WeakSet()
        self._temporary_limit = max(64 << 20, min(self.caps.max_buffer, 16 << 30) // 16)

    def __repr__(self) -> str:
        return f"<centella.Device {self.name}>"

    @property
    def native(self) -> Any:
        """The driver's own device (a wgpu device, a CUDA device), or None on the CPU."""
        return self.backend.native

    def describe(self) -> dict[str, Any]:
        """Name, driver and limits, as `centella info` prints them."""
        return self.backend.describe()

    def spec(self, shape: Shape, dtype: Any) -> Spec:
        """How this device lays out a tensor that it allocates."""
        return make_spec(shape, dtype, self.caps.row_alignment)

    # -- recording --------------------------------------------------------------------------------

    def implicit(self) -> Recording:
        """The recording of lazily used operators on this thread."""
        mine = getattr(self._local, "implicit", None)
        if mine is None:
            mine = self._local.implicit = Recording(self, explicit=False)
            with self.lock:
                self._implicit.add(mine)
        return mine

    def batches(self) -> OpenRecordings:
        """The `with batch` recordings that this thread and task have open here."""
        return self._open

    def form(self, op: Op, specs: tuple[Spec, ...], attrs: dict[str, Any]) -> Form:
        """What `op` makes of operands that lie so.

        Raises:
            ShapeError, DTypeError: from the op's rule.
            LimitError: a result would be larger than the device allows.
        """
        key = (op, specs, *[(name, exact(value)) for name, value in attrs.items()])
        found = self._forms.get(key)
        if found is None:
            if len(self._forms) >= FORMS:
                self._forms.clear()
            found = self._forms[key] = self._new_form(op, specs, attrs)
        return found

    def _new_form(self, op: Op, specs: tuple[Spec, ...], attrs: dict[str, Any]) -> Form:
        outputs = tuple(self.spec(shape, dtype) for shape, dtype in op.rule(specs, attrs))
        for spec in outputs:
            if spec.storage_bytes > self.caps.max_buffer:
                raise LimitError(
                    f"{op.name}: a result of {spec.storage_bytes:,} bytes; {self.name} allows "
                    f"{self.caps.max_buffer:,}"
                )
        for spec in (*specs, *outputs):
            if spec.span >= INDEX_LIMIT:
                raise LimitError(
                    f"{op.name}: expected tensors of fewer than {INDEX_LIMIT:,} elements, got "
                    f"{list(spec.shape)}"
                )
        copies = tuple(i for i, s in enumerate(specs) if not self._host and not op.takes(i, s))
        nbytes = sum(spec.storage_bytes for spec in outputs)
        return Form(op, specs, tuple(sorted(attrs.items())), outputs, nbytes, copies)

    def record(
        self, op: Op, operands: Sequence[tuple[Value, Spec, int]], attrs: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Record one op; operands are (value, seen as, element offset)."""
        form = self.form(op, tuple([spec for _, spec, _ in operands]), attrs)
        return self.add(form, [(value, offset) for value, _, offset in operands])

    def add(
        self, form: Form, operands: Sequence[tuple[Value, int]], target: Recording | None = None
    ) -> tuple[Value, ...]:
        """Record one op; operands are (value, element offset), seen as the form's inputs say.

        Args:
            target: where; default: the batch that an operand waits for, else the innermost open
                batch of this thread and task, else this thread's implicit recording.

        Raises:
            ContractError: operands wait for two open batches, or were not kept.
            DeviceError: an operand lives on another device.
        """
        for value, _ in operands:
            if value.device is not self:
                raise DeviceError(
                    f"{form.op.name}: operands on {self.name} and {value.device.name}; "
                    f"move one with .to(device)"
                )
        site = call_site()
        with self.lock:
            self._check_lost()
            if target is None:
                target = self._target(form, operands)
            for value, _ in operands:
                if value.state == PENDING and value.recording is not target:
                    self._flush_value(value)
            inputs = tuple([
                target.operand(value, spec, offset)
                for (value, offset), spec in zip(operands, form.inputs, strict=True)
            ])  # fmt: skip
            made = target.add(form, inputs, site)
            if not target.explicit:
                self._after_implicit(target)
            return made

    def _target(self, form: Form, operands: Sequence[tuple[Value, int]]) -> Recording:
        explicit: Recording | None = None
        for value, _ in operands:
            mine = value.recording
            if mine is not None and mine.explicit:
                if explicit is not None and explicit is not mine:
                    raise ContractError(
                        f"{form.op.name}: operands wait for two open batches; execute one of them "
                        f"first"
                    )
                explicit = mine
        return explicit or self._open.innermost() or self.implicit()

    def _after_implicit(self, target: Recording) -> None:
        target.scopes.update(open_scopes())
        if (
            len(target.nodes) >= IMPLICIT_NODES
            or target.result_bytes > self._temporary_limit
            or target.upload_bytes > IMPLICIT_UPLOADS
            or len(target.uploads) >= IMPLICIT_NODES
        ):
            self.run(target)

    def _flush_value(self, value: Value) -> None:
        """Make a pending value ready: run the recording it waits for, whole."""
        recording = value.recording
        assert recording is not None
        if recording.explicit:
            value.require()
        self.run(recording)

    def materialise(self, value: Value) -> Buffer:
        """The buffer of a value, once its recording has been submitted.

        Raises:
            ContractError: it waits for a batch that has not been executed.
        """
        with self.lock:
            if value.state == PENDING:
                self._flush_value(value)
            return value.require()

    def native_of(self, value: Value) -> Any:
        """The driver's buffer or address of a value; on the CPU a read-only array, computed."""
        buffer = self.materialise(value)
        if not self._host:
            return buffer.native
        self.synchronize()
        if not isinstance(buffer.native, np.ndarray):
            raise buffer.native.error()
        shown = buffer.native.view()
        shown.flags.writeable = False
        return shown

    # -- values from outside ----------------------------------------------------------------------

    def upload(self, data: Array, spec: Spec, target: Recording | None = None) -> Value:
        """Host data as a value: a snapshot is taken now.

        What is recorded on a batch is written when that is executed. Otherwise small data rides
        in the next submission's one write; large data is written at once.

        Raises:
            TransferForbidden: inside `forbid("transfer")`.
        """
        if spec.size == 0:
            return self.reserve(spec)
        permit(f"upload of {spec.nbytes:,} bytes", "uploads")
        if spec.storage_bytes > self.caps.max_buffer:
            raise LimitError(
                f"upload: {spec.storage_bytes:,} bytes; {self.name} allows {self.caps.max_buffer:,}"
            )
        site = call_site()
        target = target or self._open.innermost()
        if target is None and spec.storage_bytes > DIRECT:
            return self._write(data, spec, site)
        raw = prepare.storage_of(data, spec, self._fill)
        with self.lock:
            self._check_lost()
            if target is not None:
                return target.add_upload(spec, raw, site)
            mine = self.implicit()
            value = mine.add_upload(spec, raw, site)
            self._after_implicit(mine)
            return value

    @property
    def _fill(self) -> int:
        return 0xFF if self.pool.mode == "poison" else 0

    def _write(self, data: Array, spec: Spec, site: tuple[str, int]) -> Value:
        as_is = data.nbytes == spec.storage_bytes and data.flags.c_contiguous and not self._host
        raw = data.reshape(-1).view(np.uint8) if as_is else prepare.storage_of(
            data, spec, self._fill)  # fmt: skip
        value = Value(spec, self, "upload", site=site)
        with self.lock:
            self._check_lost()
            buffer = self.pool.allocate(spec.storage_bytes)
            self._write_into(buffer, 0, raw)
        count(uploads=1, upload_bytes=raw.nbytes)
        value.ready(buffer)
        return value

    def reserve(self, spec: Spec) -> Value:
        """A value whose content is undefined; nothing is copied."""
        value = Value(spec, self, "empty", site=call_site())
        with self.lock:
            self._check_lost()
            buffer = self.pool.allocate(spec.storage_bytes)
        if self._host:
            buffer.native = np.full(spec.storage_bytes, self._fill, np.uint8)
        value.ready(buffer)
        return value

    def import_buffer(self, native: Any, shape: Shape, dtype: Any, offset: int) -> Value:
        """Memory of the application's as a value: neither copied nor freed.

        Args:
            native: a wgpu buffer, a CUDA array or pointer, a NumPy array; kept alive until the
                last submission that reads it is done.
            offset: bytes to the first element; rows follow one another without padding.

        Raises:
            DeviceError: not memory of this device, or it cannot be bound and read.
            ShapeError: it has fewer bytes than the shape needs.
        """
        strides = dense_strides(shape)
        if offset < 0 or offset % dtype.itemsize:
            raise ShapeError(
                f"import_buffer: expected an offset that is a multiple of {dtype.itemsize} bytes, "
                f"got {offset}"
            )
        with self.lock:
            self._check_lost()
            buffer = self.pool.adopt(native, native)
        first = offset // dtype.itemsize
        plain = Spec(shape, dtype, strides)
        if offset + plain.nbytes > buffer.nbytes:
            raise ShapeError(
                f"import_buffer: shape {list(shape)} of {dtype.name} from byte {offset} needs "
                f"{offset + plain.nbytes:,} bytes; the buffer has {buffer.nbytes:,}"
            )
        aligned = rows_aligned(shape, strides, dtype.itemsize, first)
        whole = offset + plain.storage_bytes <= buffer.nbytes
        value = Value(Spec(shape, dtype, strides, aligned and whole), self, "import_buffer",
                      site=call_site())  # fmt: skip
        value.ready(buffer, first)
        return value

    def batch(self) -> Any:
        """A CommandBatch on this device."""
        from centella.batch import CommandBatch

        return CommandBatch(self)

    def flush_thread(self, scope: Ledger | None = None) -> None:
        """Run what this thread recorded lazily, and what any thread did inside a ledger's scope."""
        thread = threading.get_ident()
        with self.lock:
            for recording in list(self._implicit):
                if not recording.empty and (
                    recording.thread == thread or scope in recording.scopes
                ):
                    self.run(recording)

    def synchronize(self) -> None:
        """Run what this thread recorded lazily and wait until the device has done everything."""
        self.flush_thread()
        super().synchronize()


_opened: dict[str, Device] = {}
_opened_lock = threading.Lock()
_devices: WeakSet[Device] = WeakSet()
_default: Device | None = None
_forked: set[str] = set()


def device(name: str | Device | None = None, *, native: Any = None, **options: Any) -> Device:
    """Open a device, or give the one that is open under this name.

    Args:
        name: "cpu", "simulator", "webgpu", "webgpu:<index or word>", "cuda", "cuda:<index>", or
            None: `CENTELLA_DEVICE`, else cuda, else a hardware WebGPU adapter, else the CPU.
        native: a wgpu device (or CUDA device) that the application already has; the same one
            gives the same Device.
        options: `pool="exact"` or "poison", `cache=PipelineCache()`, `memory_limit=` bytes,
            `minimum=True` (WebGPU's guaranteed limits): these open a device of their own.

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
            name = name or "webgpu"
            return _of_native(name, native, options) or _create(name, native, options)
        assert name is not None
        if options:
            return _create(name, None, options)
        found = _opened.get(name)
        if found is None or found.lost:
            found = _opened[name] = _create(name, None, {})
        return found


def _of_native(name: str, native: Any, options: dict[str, Any]) -> Device | None:
    if not options:
        for made in devices():
            if made.native is native and made.name.startswith(name):
                return made
    return None


def _create(name: str, native: Any, options: dict[str, Any]) -> Device:
    kind, _, which = name.partition(":")
    own = {n: options.pop(n) for n in ("cache", "memory_limit") if n in options}
    pool = options.pop("pool", os.environ.get("CENTELLA_POOL", "reuse"))
    if kind in _forked:
        raise DeviceError(
            f"{name}: the parent process had it open and GPU drivers do not survive a fork; start "
            f"processes by multiprocessing.get_context('spawn')"
        )
    try:
        backend = _backend(kind, which, native, options)
    except TypeError as error:
        if not options:
            raise
        raise DeviceError(f"{name}: unknown option among {', '.join(options)}") from error
    made = Device(backend, pool=pool, **own)
    _devices.add(made)
    return made


def _backend(kind: str, which: str, native: Any, options: dict[str, Any]) -> Any:
    if kind == "webgpu":
        from centella.backends.webgpu import WebGpuBackend

        return WebGpuBackend(which, native=native, **options)
    if kind == "cuda":
        from centella.backends.cuda import CudaBackend

        return CudaBackend(which, native=native, **options)
    if kind == "cpu" and not which:
        from centella.backends.cpu import CpuBackend

        return CpuBackend(**options)
    if kind == "simulator" and not which:
        from centella.backends.simulator import SimulatorBackend

        return SimulatorBackend(**options)
    raise DeviceError(
        f"unknown device {':'.join(filter(None, (kind, which)))!r}; expected cpu, webgpu, "
        f"webgpu:<index or word>, cuda, cuda:<index> or simulator"
    )


def devices() -> list[Device]:
    """The devices that are open."""
    return [made for made in list(_devices) if not made.lost]


def _flush_all(scope: Ledger | None) -> None:
    for made in devices():
        made.flush_thread(scope)


on_flush(_flush_all)


def current_device() -> Device:
    """The device of the innermost open batch of this thread and task, else the default device."""
    inside = innermost()
    return default_device() if inside is None else inside.device


def default_device() -> Device:
    """The device used when none is named: chosen once, logged with the reason."""
    global _default
    name = os.environ.get("CENTELLA_DEVICE")
    if name:
        return device(name)
    if _default is None or _default.lost:
        _default, why = _choose()
        log.info("default device %s: %s", _default.name, why)
    return _default


def _choose() -> tuple[Device, str]:
    try:
        return device("cuda"), "an NVIDIA driver is here"
    except CentellaError as error:
        cuda = str(error)
    try:
        from centella.backends.webgpu import adapters, is_software

        if any(not is_software(a) for a in adapters()):
            return device("webgpu"), "a hardware WebGPU adapter is here"
        why = "no hardware WebGPU adapter"
    except (CentellaError, ImportError, OSError) as error:
        why = f"WebGPU: {error}"
    return device("cpu"), f"cuda: {cuda}; {why}"


# -- fork: a GPU's driver does not survive it; the CPU backend looks after itself ------------------


def _before_fork() -> None:
    _opened_lock.acquire()
    for made in devices():
        made.lock.acquire()


def _after_fork_in_parent() -> None:
    for made in devices():
        made.lock.release()
    _opened_lock.release()


def _after_fork_in_child() -> None:
    for made in devices():
        made.lock.release()
        kind = made.name.partition(":")[0]
        if kind in ("webgpu", "cuda"):
            _forked.add(kind)
            made.lose("the process was forked")
    _opened_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
