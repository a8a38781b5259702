"""A device: where operations are recorded and run; and how one is opened."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

from centella.divide import division
from centella.errors import ContractError, DeviceError, LimitError
from centella.ledger import Ledger, on_flush, open_scopes, permit
from centella.op import Op
from centella.opening import GPUS, choose, forked, kind_of, open_backend, spelled
from centella.pipelines import PipelineCache
from centella.program import exact
from centella.recording import (
    PENDING,
    Cell,
    Form,
    Operand,
    Recording,
    Value,
    call_site,
    innermost,
)
from centella.specs import Spec
from centella.submission import Array, Backend, Buffer
from centella.values import Values

INDEX_LIMIT = (1 << 32) - 64  # kernels count elements in 32 bits
log: logging.Logger = logging.getLogger("centella.device")

IMPLICIT_NODES = 256
DIRECT = 64 << 10
FORMS = 8192


class Device(Values):
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
        self._forms: dict[Any, Form] = {}
        self._local = threading.local()
        self._implicit: WeakSet[Recording] = WeakSet()
        self._temporary_limit = max(64 << 20, min(self.caps.max_buffer, 16 << 30) // 16)

    def __repr__(self) -> str:
        return f"<centella.Device {self.name}>"

    @property
    def native(self) -> Any:
        """The driver's own device, or None on the CPU.

        On WebGPU a wgpu device; on CUDA `ordinal`, `context` and `stream` (where work of this
        thread goes now), which also is a stream to libraries that know `__cuda_stream__`.
        """
        return self.backend.native

    def describe(self) -> dict[str, Any]:
        """Name, driver and limits, as `centella info` prints them."""
        return self.backend.describe()

    # -- recording --------------------------------------------------------------------------------

    def implicit(self) -> Recording:
        """The recording of lazily used operators on this thread."""
        mine = getattr(self._local, "implicit", None)
        if mine is None:
            mine = self._local.implicit = Recording(self, explicit=False)
            with self.lock:
                self._implicit.add(mine)
        return mine

    def form(self, op: Op, specs: tuple[Spec, ...], attrs: dict[str, Any]) -> Form:
        """What `op` makes of operands that lie so.

        Raises:
            ShapeError, DTypeError: from the op's rule.
            LimitError: a result would be larger than the device allows, or an operand is larger
                than a binding and cannot be divided.
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
        copies = () if self.caps.target == "numpy" else tuple(
            i for i, s in enumerate(specs) if not op.takes(i, s)
        )  # fmt: skip
        if not copies:
            division(op, specs, outputs, attrs, self.caps)  # or it cannot be launched
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
            self.check_lost()
            if target is None:
                target = self._target(form, operands)
            inputs: list[Operand] = []
            for (value, offset), spec in zip(operands, form.inputs, strict=True):
                if value.state == PENDING and value.recording is not target:
                    self._flush_value(value)
                inputs.append(target.operand(value, spec, offset))
            changed = self._changed(form, operands, target) if form.op.mutates else ()
            made = target.add(form, tuple(inputs), site)
            for cell, value in zip(changed, made, strict=False):
                cell.advance(value)
            if not target.explicit:
                self._after_implicit(target)
            return made

    def _changed(
        self, form: Form, operands: Sequence[tuple[Value, int]], target: Recording
    ) -> list[Cell]:
        """The cells that an op changes, once everything else that reads them has run."""
        cells: list[Cell] = []
        for index in form.op.mutates:
            value, _ = operands[index]
            if value.cell is None:
                raise ContractError(f"{form.op.name}: operand {index} is no State")
            value.check_current()
            if sum(other is value for other, _ in operands) > 1:
                raise ContractError(
                    f"{form.op.name}: {value.cell.what} is read and changed at once"
                )
            for reader in value.cell.unread(target):
                self.run(reader)
            cells.append(value.cell)
        return cells

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
        return explicit or innermost(self) or self.implicit()

    def _after_implicit(self, target: Recording) -> None:
        target.scopes.update(open_scopes())
        if (
            len(target.nodes) >= IMPLICIT_NODES
            or target.result_bytes > self._temporary_limit
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
            value.check_current()
            if value.state == PENDING:
                self._flush_value(value)
            return value.require()

    def native_of(self, value: Value) -> Any:
        """The driver's buffer or address of a value; on the CPU a read-only array, computed."""
        return self.backend.shown(self.materialise(value))

    def lend(self, value: Value, stream: Any) -> tuple[int, Any]:
        """The address of a value for a library that works on a stream, and what that holds.

        Raises:
            BufferError: there is no such stream.
            ContractError: it waits for a batch that has not been executed.
        """
        return self.backend.lend(self.materialise(value), stream)

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
        target = target or innermost(self)
        if target is None and spec.storage_bytes > DIRECT:
            return self._write(data, spec, site)
        raw = self._storage_of(data, spec)
        with self.lock:
            self.check_lost()
            if target is not None:
                return target.add_upload(spec, raw, site)
            mine = self.implicit()
            value = mine.add_upload(spec, raw, site)
            self._after_implicit(mine)
            return value

    def compile(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function captured for arguments like these, to be replayed: see `ct.jit`.

        Args:
            fn: takes and returns tensors; runs once, with placeholders.
            args, kwargs: examples: tensors and NumPy arrays become inputs, the rest is fixed.

        Raises:
            ContractError: it reads a value, or gives no tensors and changes no State.
        """
        from centella.jit import Compiled

        return Compiled(fn, args, kwargs, self)

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
        enter = getattr(self.backend, "on_stream", None)
        if enter is None:
            raise DeviceError(f"stream: expected a CUDA device, got {self.name}")
        self.flush_thread()
        with enter(stream) as native:
            yield native
            self.flush_thread()

    def synchronize(self) -> None:
        """Run what this thread recorded lazily and wait until the device has done everything."""
        self.flush_thread()
        super().synchronize()


_opened: dict[str, Device] = {}
_opened_lock = threading.Lock()
_made: tuple[ref[Device], ...] = ()  # replaced, never changed: read without a lock
_default: Device | None = None


def device(name: str | Device | None = None, *, native: Any = None, **options: Any) -> Device:
    """Open a device, or give the one that is open under this name.

    Args:
        name: "cpu", "simulator", "webgpu", "webgpu:<index or word>", "cuda", "cuda:<index>", or
            None: `CENTELLA_DEVICE`, else cuda, else a hardware WebGPU adapter, else the CPU.
        native: a device that the application already has, which stays its own: a wgpu device; an
            ordinal or a device of torch, CuPy or cuda.core; a CUcontext. The same one gives the
            same Device.
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
            name = name or kind_of(native)
            return _of_native(name, native, options) or _open_native(name, native, options)
        assert name is not None
        name = spelled(name)
        if options:
            return _create(name, None, options)
        found = _opened.get(name)
        if found is None or found.lost:
            found = _opened[name] = _create(name, None, {})
        return found


def _of_native(name: str, native: Any, options: dict[str, Any]) -> Device | None:
    if not options:
        for made in devices():
            if made.backend.runs_on(native) and made.name.startswith(name):
                return made
    return None


def _open_native(name: str, native: Any, options: dict[str, Any]) -> Device:
    plain = not options
    made = _create(name, native, options)
    # An ordinal, or an object that stands for one, is another spelling of a name.
    if plain and made.name.startswith("cuda:") and made.backend.runs_on(int(made.name[5:])):
        _opened[made.name] = made
    return made


def _create(name: str, native: Any, options: dict[str, Any]) -> Device:
    global _made
    own = {n: options.pop(n) for n in ("cache", "memory_limit") if n in options}
    pool = options.pop("pool", os.environ.get("CENTELLA_POOL", "reuse"))
    backend = open_backend(name, native, options)
    try:
        made = Device(backend, pool=pool, **own)
    except BaseException:
        backend.close()
        raise
    _made = (*[r for r in _made if r() is not None], ref(made))
    return made


def devices() -> list[Device]:
    """The devices that are open."""
    return [d for r in _made if (d := r()) is not None and not d.lost]


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
    if _default is not None and not _default.lost:
        return _default
    found, why = choose(device)
    log.info("default device %s: %s", found.name, why)
    _default = found
    return found


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
        if kind in GPUS:
            forked.add(kind)
            made.lose("the process was forked")
    _opened_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
