"""A device: where recordings are run. Plans, pipelines and memory are kept here."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count as counter
from typing import Any

import numpy as np

from centella import plan
from centella.ledger import count, on_flush
from centella.submission import Backend, Bound, Buffer, Read, Submission, Ticket
from centella.errors import CentellaError, ContractError, DeviceError, DeviceLostError, LimitError
from centella.op import Op
from centella.pipelines import PipelineCache
from centella.pool import Pool
from centella.program import Program
from centella.recording import DISCARDED, PENDING, Operand, Recorded, Recording, Upload, Value
from centella.specs import Caps, Shape, Spec, make_spec

log = logging.getLogger("centella.device")
Array = np.ndarray[Any, Any]

IMPLICIT_NODES = 256
PLANS = 512
ARENA = 64 << 20
DIRECT = 64 << 10


class Device:
    """One open device; `ct.device(...)` gives it.

    Attributes:
        name: "cpu", "simulator", "webgpu:<adapter>" or "cuda:<index>".
        caps: what it can do.
        cache: its PipelineCache.
    """

    _ids = counter(1)

    def __init__(self, backend: Backend, *, pool: str = "reuse", cache: PipelineCache | None = None
                 ) -> None:
        self.backend = backend
        self.name = backend.name
        self.caps: Caps = backend.caps
        self.cache = cache or PipelineCache()
        self.pool = Pool(backend, pool)
        self.lock = threading.RLock()
        self._id = next(Device._ids)
        self._plans: OrderedDict[Any, tuple[plan.Plan, list[Any]]] = OrderedDict()
        self._local = threading.local()
        self._implicit: dict[int, Recording] = {}
        self._lost: str | None = None
        self.last_plan: plan.Plan | None = None

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
                self._implicit[mine.thread] = mine
        return mine  # type: ignore[no-any-return]  # a threading.local is untyped

    def batches(self) -> list[Recording]:
        """Open `with batch` recordings of this thread, innermost last."""
        stack = getattr(self._local, "batches", None)
        if stack is None:
            stack = self._local.batches = []
        return stack  # type: ignore[no-any-return]  # a threading.local is untyped

    def recording_for(self, values: Sequence[Value]) -> Recording:
        """Where an op on these values is recorded.

        Raises:
            ContractError: for values that are pending in two open batches.
        """
        explicit: Recording | None = None
        for value in values:
            mine = value.recording
            if value.state == PENDING and mine is not None and mine.explicit:
                if explicit is not None and explicit is not mine:
                    raise ContractError(
                        "operands are pending in two open batches: execute one of them first"
                    )
                explicit = mine
        stack = self.batches()
        target = explicit or (stack[-1] if stack else self.implicit())
        for value in values:
            other = value.recording
            if value.state == PENDING and other is not None and other is not target:
                self.flush(other)
        return target

    def record(
        self, op: Op, operands: Sequence[tuple[Value, Spec, int]], attrs: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Record one op; operands are (value, seen as, element offset).

        Raises:
            ShapeError, DTypeError: from the op's rule, before anything is recorded.
            DeviceError: for operands of another device.
        """
        for value, _, _ in operands:
            if value.device is not self:
                raise DeviceError(
                    f"{op.name}: operands on {self.name} and {value.device.name}; "
                    f"move one with .to(device)"
                )
        outs = op.rule(tuple(s for _, s, _ in operands), attrs)
        specs = tuple(self.spec(shape, dtype) for shape, dtype in outs)
        for spec in specs:
            if spec.storage_bytes > self.caps.max_buffer:
                raise LimitError(
                    f"{op.name}: a result of {spec.storage_bytes:,} bytes; {self.name} allows "
                    f"{self.caps.max_buffer:,}"
                )
        target = self.recording_for([v for v, _, _ in operands])
        inputs: tuple[Operand, ...] = tuple(target.operand(v, s, o) for v, s, o in operands)
        values = target.add(op, inputs, tuple(sorted(attrs.items())), specs)
        if not target.explicit and (
            len(target) >= IMPLICIT_NODES or target.temporary_bytes > self._temporary_limit
        ):
            self.flush(target)
        return values

    @property
    def _temporary_limit(self) -> int:
        return max(64 << 20, min(self.caps.max_buffer, 16 << 30) // 16)

    def upload(self, data: Array, spec: Spec) -> Value:
        """Host data as a value: a snapshot is taken now.

        Small data rides in the next submission's one write; large data is written at once.
        """
        value = Value(spec, self, "upload")
        stack = self.batches()
        target = stack[-1] if stack else self.implicit()
        return self.upload_to(target, value, data)

    def upload_to(self, target: Recording, value: Value, data: Array) -> Value:
        """`upload` into one recording."""
        raw = storage_of(data, value.spec)
        if raw.nbytes > (ARENA if target.explicit else DIRECT) and self.caps.target != "numpy":
            with self.lock:
                self._check_lost()
                buffer = self.pool.allocate(value.spec.storage_bytes)
                self.backend.write(buffer.native, 0, raw)
                count(uploads=1, upload_bytes=raw.nbytes)
            value.ready(buffer)
            return value
        value.recording = target
        target.uploads.append(Upload(value, raw))
        return value

    def reserve(self, spec: Spec) -> Value:
        """A value whose content is undefined; nothing is copied."""
        value = Value(spec, self, "empty")
        if self.caps.target == "numpy":
            data = np.empty(spec.storage_bytes // spec.dtype.itemsize, spec.dtype.numpy)
            value.ready(Buffer(data, data.nbytes, None))
        else:
            value.ready(self.pool.allocate(spec.storage_bytes))
        return value

    # -- running ----------------------------------------------------------------------------------

    def flush(self, recording: Recording) -> None:
        """Run an implicit recording."""
        if not recording.empty:
            self.run(recording)

    def flush_thread(self) -> None:
        """Run what this thread recorded lazily."""
        mine = getattr(self._local, "implicit", None)
        if mine is not None:
            self.flush(mine)

    def _check_lost(self) -> None:
        if self._lost is not None:
            raise DeviceLostError(f"{self.name} was lost: {self._lost}; open it again")

    def run(
        self,
        recording: Recording,
        *,
        outputs: Iterable[Value] | None = None,
        reads: Sequence[tuple[Value, int, int]] = (),
    ) -> Ticket:
        """Plan, compile, allocate, then submit what a recording holds.

        Args:
            outputs: the values to keep (default: every value that something refers to).
            reads: values that come back, each with a byte range relative to the value.

        A failure before submission leaves the recording as it was.
        """
        with self.lock:
            self._check_lost()
            taken = recording.take()
            try:
                work, finish = self._prepare(taken, outputs, reads)
            except BaseException:
                recording.restore(taken)
                raise
            ticket = self._submit(work, bool(taken.nodes or taken.uploads))
            finish()
            return ticket

    def _submit(self, work: Submission, counted: bool) -> Ticket:
        if counted:
            count(submissions=1, launches=sum(1 for b in work.launches if b.groups > 0))
        if work.reads:
            count(downloads=1, download_bytes=sum(r.nbytes for r in work.reads))
        try:
            return self.backend.submit(work)
        except CentellaError as error:
            self._lost = str(error)
            raise

    def _prepare(
        self,
        taken: Recorded,
        outputs: Iterable[Value] | None,
        reads: Sequence[tuple[Value, int, int]],
    ) -> tuple[Submission, Any]:
        values = [[ref() for ref in node.values] for node in taken.nodes]
        declared = None if outputs is None else {id(v) for v in outputs}
        read_ids = {id(v) for v, _, _ in reads}
        wanted = [
            tuple(
                v is not None
                and (declared is None or id(v) in declared or id(v) in read_ids)
                for v in row
            )
            for row in values
        ]
        outside = _externals(taken)
        made, pipelines = self._plan(taken, outside, wanted)
        buffers, uploads = self._place_uploads(taken, outside)
        slots = [*buffers, *(self.pool.allocate(n) for n in made.buffers)]
        launches = [
            _bound(step, pipeline, outside.offsets)
            for step, pipeline in zip(made.steps, pipelines, strict=True)
        ]
        results = {place: slots[slot] for place, slot in made.results}
        work = Submission(slots, uploads, launches)

        def finish() -> None:
            for upload, offset in outside.uploads:
                upload.value.ready(buffers[outside.index[id(upload.value)]], offset)
            for index, row in enumerate(values):
                for position, value in enumerate(row):
                    if value is None:
                        continue
                    if wanted[index][position]:
                        value.ready(results[(index, position)])
                        value.history.append("launch")
                    else:
                        value.state = DISCARDED
                        value.recording = None

        places = {id(v): (i, p) for i, row in enumerate(values) for p, v in enumerate(row) if v}
        for value, start, nbytes in reads:
            self._add_read(work, value, start, nbytes, made, places, outside)
        return work, finish

    def _add_read(
        self, work: Submission, value: Value, start: int, nbytes: int, made: plan.Plan,
        places: dict[int, plan.Place], outside: _Externals,
    ) -> None:  # fmt: skip
        base = value.offset * value.spec.dtype.itemsize
        if id(value) in places:
            slot = dict(made.results)[places[id(value)]]
        elif id(value) in outside.index:
            slot = outside.index[id(value)]
            base = outside.offsets[slot] * value.spec.dtype.itemsize
        else:
            work.slots.append(value.require())
            slot = len(work.slots) - 1
        work.reads.append(Read(slot, base + start, nbytes))

    def _plan(
        self, taken: Recorded, outside: _Externals, wanted: list[tuple[bool, ...]]
    ) -> tuple[plan.Plan, list[Any]]:
        key = plan.key_of(taken.nodes, outside.index, wanted)
        found = self._plans.get(key)
        if found is None:
            made = plan.build(taken.nodes, outside.index, wanted, self.caps)
            found = (made, [self.pipeline(s.program) for s in made.steps])
            self._plans[key] = found
            count(plans=1)
            if len(self._plans) > PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        self.last_plan = found[0]
        return found

    def pipeline(self, program: Any) -> Any:
        """The compiled form of a program."""
        if not isinstance(program, Program):
            return program
        return self.cache.get(
            self._id, program.key, program.name, lambda: self.backend.compile(program)
        ).native

    def _place_uploads(
        self, taken: Recorded, outside: _Externals
    ) -> tuple[list[Buffer], list[tuple[int, int, Array]]]:
        """Buffers of the outside values; the recording's uploads packed into one write."""
        outside.offsets = [v.offset for v in outside.values]
        if self.caps.target == "numpy":
            return self._place_host_uploads(taken, outside)
        where: dict[int, Buffer] = {}
        writes: list[tuple[int, int, Array]] = []
        for group in _arenas(taken.uploads):
            total = sum(-(-u.data.nbytes // 256) * 256 for u in group)
            arena = self.pool.allocate(total)
            packed = np.zeros(total, np.uint8)
            place = 0
            for upload in group:
                raw = upload.data
                packed[place : place + raw.nbytes] = raw
                index = outside.index[id(upload.value)]
                outside.offsets[index] = place // upload.value.spec.dtype.itemsize
                outside.uploads.append((upload, outside.offsets[index]))
                where[index] = arena
                place += -(-raw.nbytes // 256) * 256
            writes.append((outside.index[id(group[0].value)], 0, packed))
            count(uploads=1, upload_bytes=total)
        buffers = [
            where[i] if i in where else v.require() for i, v in enumerate(outside.values)
        ]
        return buffers, writes

    def _place_host_uploads(
        self, taken: Recorded, outside: _Externals
    ) -> tuple[list[Buffer], list[tuple[int, int, Array]]]:
        where: dict[int, Buffer] = {}
        writes: list[tuple[int, int, Array]] = []
        for upload in taken.uploads:
            index = outside.index[id(upload.value)]
            where[index] = Buffer(None, upload.data.nbytes, None)
            writes.append((index, 0, upload.data.view(upload.value.spec.dtype.numpy)))
            outside.uploads.append((upload, 0))
        if taken.uploads:
            count(uploads=1, upload_bytes=sum(u.data.nbytes for u in taken.uploads))
        return [
            where[i] if i in where else v.require() for i, v in enumerate(outside.values)
        ], writes

    def read(self, reads: Sequence[tuple[Value, int, int]]) -> Ticket:
        """Read ready values back: (value, first byte, bytes) each, in one copy."""
        with self.lock:
            self._check_lost()
            work = Submission([v.require() for v, _, _ in reads])
            for slot, (value, start, nbytes) in enumerate(reads):
                base = value.offset * value.spec.dtype.itemsize
                work.reads.append(Read(slot, base + start, nbytes))
            return self._submit(work, counted=False)

    def batch(self) -> Any:
        """A CommandBatch on this device."""
        from centella.batch import CommandBatch

        return CommandBatch(self)

    def synchronize(self) -> None:
        """Run what this thread recorded lazily and wait until the device has done everything."""
        self.flush_thread()
        count(syncs=1)
        self.backend.submit(Submission([])).wait()

    def close(self) -> None:
        """Release the device; its tensors cannot be used any more."""
        self._lost = "closed"
        self.backend.close()


class _Externals:
    """Values that a recording reads but does not compute, each with a slot."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.index: dict[int, int] = {}
        self.offsets: list[int] = []
        self.uploads: list[tuple[Upload, int]] = []

    def add(self, value: Value) -> None:
        if id(value) not in self.index:
            self.index[id(value)] = len(self.values)
            self.values.append(value)


def _externals(taken: Recorded) -> _Externals:
    found = _Externals()
    for upload in taken.uploads:
        found.add(upload.value)
    for node in taken.nodes:
        for operand in node.inputs:
            if operand.value is not None:
                found.add(operand.value)
    return found


def _arenas(uploads: Sequence[Upload]) -> list[list[Upload]]:
    groups: list[list[Upload]] = []
    room = 0
    for upload in uploads:
        nbytes = -(-upload.data.nbytes // 256) * 256
        if not groups or nbytes > room:
            groups.append([])
            room = ARENA
        groups[-1].append(upload)
        room -= nbytes
    return groups


def _bound(step: plan.Step, pipeline: Any, offsets: list[int]) -> Bound:
    if isinstance(step.program, Program):
        words = list(step.words)
        for position, slot in step.patches:
            if slot < len(offsets):
                words[position] += offsets[slot]
        return Bound(
            step.program, pipeline, step.slots, step.views, step.inputs, words, step.groups
        )
    views = list(step.views)
    for position, slot in step.patches:
        if slot < len(offsets) and offsets[slot]:
            spec, offset = views[position]
            views[position] = (spec, offset + offsets[slot])
    return Bound(step.program, pipeline, step.slots, tuple(views), step.inputs, [], 1)


def storage_of(data: Array, spec: Spec) -> Array:
    """Host data as the bytes of a device layout: rows padded, a copy."""
    item = spec.dtype.itemsize
    if spec.size == 0:
        return np.zeros(spec.storage_bytes, np.uint8)
    elements = spec.storage_bytes // item
    flat = np.zeros(elements, spec.dtype.numpy)
    strides = tuple(s * item for s in spec.strides)
    np.ndarray(spec.shape, spec.dtype.numpy, flat.data, 0, strides)[...] = data
    return flat.view(np.uint8)


_open: dict[str, Device] = {}
_open_lock = threading.Lock()
_default: Device | None = None


def device(name: str | Device | None = None, *, native: Any = None, **options: Any) -> Device:
    """Open a device, or give the one that is open under this name.

    Args:
        name: "cpu", "simulator", "webgpu", "webgpu:<index or word>", "cuda", "cuda:<index>", or
            None: `CENTELLA_DEVICE`, else cuda, else a hardware WebGPU adapter, else the CPU.
        native: a wgpu device (or CUDA device) that the application already has.
        options: `pool="exact"` or "poison", `cache=PipelineCache()`, `minimum=True` (WebGPU's
            guaranteed limits): these open a device of their own.

    Raises:
        DeviceError: unknown name, no adapter, or a device that cannot be opened; says what is
            missing.
    """
    if isinstance(name, Device):
        return name
    if native is not None:
        return _create(name or "webgpu", native, options)
    if name is None:
        return default_device()
    if not isinstance(name, str):
        raise DeviceError(f"device: expected a name or a Device, got {name!r}")
    if options:
        return _create(name, None, options)
    with _open_lock:
        found = _open.get(name)
        if found is None or found._lost is not None:
            found = _open[name] = _create(name, None, {})
        return found


def _create(name: str, native: Any, options: dict[str, Any]) -> Device:
    kind, _, which = name.partition(":")
    pool = options.pop("pool", os.environ.get("CENTELLA_POOL", "reuse"))
    cache = options.pop("cache", None)
    backend: Any
    if kind == "cpu":
        from centella.backends.cpu import CpuBackend

        backend = CpuBackend()
    elif kind == "simulator":
        from centella.backends.simulator import SimulatorBackend

        backend = SimulatorBackend(**options)
    elif kind == "webgpu":
        from centella.backends.webgpu import WebGpuBackend

        backend = WebGpuBackend(which, native=native, **options)
    elif kind == "cuda":
        from centella.backends.cuda import CudaBackend

        backend = CudaBackend(which, native=native, **options)
    else:
        raise DeviceError(
            f"unknown device {name!r}; expected cpu, webgpu, webgpu:<index or word>, cuda, "
            f"cuda:<index> or simulator"
        )
    made = Device(backend, pool=pool, cache=cache)
    _devices.append(made)
    return made


_devices: list[Device] = []


def _flush_all() -> None:
    for made in list(_devices):
        if made._lost is None:
            made.flush_thread()


on_flush(_flush_all)


def default_device() -> Device:
    """The device used when none is named: chosen once, logged with the reason."""
    global _default
    name = os.environ.get("CENTELLA_DEVICE")
    if name:
        return device(name)
    if _default is None or _default._lost is not None:
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
