"""Where an op is recorded, what has to run before it, and when lazy recordings run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

from centella.backends.base import Array, Buffer
from centella.emit.program import exact
from centella.errors import ContractError, DeviceError, DTypeError, LimitError, ShapeError
from centella.host.interrupts import guard, uninterrupted, waiting
from centella.ledger.call_sites import call_site
from centella.ledger.counts import Ledger, open_scopes, permit
from centella.op.op import Form, Op, get
from centella.plan.divide import division
from centella.plan.plan import EMPTY, Plan
from centella.record.recording import Operand, Recorded, Recording, innermost
from centella.record.values import FAILED, OUTSIDE, PENDING, READY, Cell, Value
from centella.runtime.executor import Executor
from centella.runtime.prepare import boundary_of
from centella.runtime.storage import Storage
from centella.specs import INDEX_LIMIT, Spec

IMPLICIT_NODES = 256
DIRECT = 64 << 10
FORMS = 8192
Seen = tuple[Value, Spec, int]  # a value, seen as a Spec from one of its elements on


class Recorder:
    """Records on batches, and lazily on a recording for each thread, which it runs when needed."""

    def __init__(self, executor: Executor, storage: Storage) -> None:
        self._executor = executor
        self._storage = storage
        self._device = executor.device
        self._lock = executor.lock
        self._forms: dict[Any, Form[Any]] = {}
        self._preferred: dict[Any, Form[Any] | None] = {}
        self._local = threading.local()
        self._implicit: WeakSet[Recording] = WeakSet()
        self._temporary_limit = max(64 << 20, min(executor.backend.caps.max_buffer, 16 << 30) // 16)

    @uninterrupted
    def implicit(self) -> Recording:
        """The recording of lazily used operators on this thread."""
        mine = getattr(self._local, "implicit", None)
        if mine is None:
            mine = self._local.implicit = Recording(self._device, explicit=False)
            with self._lock:
                self._implicit.add(mine)
        return mine

    # -- what an op is asked to do ----------------------------------------------------------------

    def form(self, op: Op[Any], specs: tuple[Spec, ...], attrs: dict[str, Any]) -> Form[Any]:
        """What `op` makes of operands that lie so.

        Raises:
            ShapeError, DTypeError: from the op's rule.
            LimitError: a result would be larger than the device allows, or an operand is larger
                than a binding and cannot be divided.
        """
        key: Any = (op, specs)
        if attrs:
            key = (op, specs, *attrs, *map(exact, attrs.values()))
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= FORMS:
                self._forms.clear()
            form = self._forms[key] = self._new_form(op, specs, attrs)
        return form

    def preferred(
        self, op: Op[Any], specs: tuple[Spec, ...], attrs: dict[str, Any]
    ) -> Form[Any] | None:
        """What `op` is asked to do, where a kernel of its own is preferred to what it stands for.

        Raises:
            As `form`; not for what the op's rule refuses, where the ops that it stands for take it.
        """
        assert op.preferred is not None, f"{op.name} stands for no other ops"
        key: Any = (op, specs, *attrs, *map(exact, attrs.values()))
        try:
            return self._preferred[key]
        except KeyError:
            pass
        typed, known = op.attrs(**attrs), None
        try:
            outputs = tuple(self._storage.spec(*out) for out in op.rule(specs, typed))
        except (ShapeError, DTypeError):
            if not op.narrower:
                raise
        else:  # what is too large for the op may not be for those that it stands for
            asked = Form(op, specs, outputs, typed)
            if op.preferred(asked, self._executor.backend.caps):
                known = self.form(op, specs, attrs)
        if len(self._preferred) >= FORMS:
            self._preferred.clear()
        self._preferred[key] = known
        return known

    def _new_form(self, op: Op[Any], specs: tuple[Spec, ...], attrs: dict[str, Any]) -> Form[Any]:
        typed = op.attrs(**attrs)
        outputs = tuple(self._storage.spec(shape, dtype) for shape, dtype in op.rule(specs, typed))
        caps = self._executor.backend.caps
        for spec in outputs:
            self._check_fits(spec, f"{op.name}: a result of")
        for spec in (*specs, *outputs):
            if spec.span >= INDEX_LIMIT:
                raise LimitError(
                    f"{op.name}: expected tensors of fewer than {INDEX_LIMIT:,} elements, got "
                    f"{list(spec.shape)}"
                )
        copies = () if caps.on_host else tuple(
            i for i, s in enumerate(specs) if not op.takes(i, s)
        )  # fmt: skip
        nbytes = sum(spec.storage_bytes for spec in outputs)
        form = Form(op, specs, outputs, typed, nbytes, copies)
        if not copies:
            division(form, caps)  # or it cannot be launched
        return form

    def _check_fits(self, spec: Spec, what: str) -> None:
        most = self._executor.backend.caps.max_buffer
        if spec.storage_bytes > most:
            raise LimitError(
                f"{what} {spec.storage_bytes:,} bytes; {self._device.name} allows {most:,}"
            )

    # -- recording --------------------------------------------------------------------------------

    @uninterrupted
    def record(
        self, op: Op[Any], operands: Sequence[Seen], attrs: dict[str, Any],
        target: Recording | None = None, form: Form[Any] | None = None,
    ) -> list[Value]:  # fmt: skip
        """Record one op, after a copy of each operand whose layout it does not take.

        Args:
            operands: (value, seen as, element offset) each.
            target: where; default: the batch that an operand waits for, else the innermost open
                batch of this thread and task, else this thread's implicit recording.
            form: what the op is asked to do, where that is known.

        Raises:
            ShapeError, DTypeError, LimitError: as `form`.
            ContractError: operands wait for two open batches, or were not kept.
            DeviceError: an operand lives on another device.
            CentellaError: what had to run first failed; the op is not recorded.
        """
        if waiting:  # a call for nothing would be 4 % of it
            guard()
        if form is None:
            specs: tuple[Spec, ...] = ()
            for seen in operands:
                specs += (seen[1],)
            form = self.form(op, specs, attrs)
        if form.copies:
            operands = self._copied(form, operands)
            form = self.form(op, tuple([spec for _, spec, _ in operands]), attrs)
        site = call_site(3)  # who called is the library's own as well
        with self._lock:
            if self._executor.barred:
                self._executor.check_lost()
            target = self._target(form, operands, target)
            if not target.explicit:
                self._make_room(target)
            inputs: list[Operand] = []
            read: list[Cell] = []
            for value, _, offset in operands:
                if value.version_of is not None:
                    value.check_current()
                    cell = value.cell
                    if cell is not None:
                        read.append(cell)
                if value.recording is target:
                    if value.origin is not OUTSIDE:
                        inputs.append((None, value.origin, offset))
                        continue
                elif value.state != READY:
                    value = self._there(value, form.op, len(inputs))
                inputs.append((value, OUTSIDE, offset))
            changed = self._changed(form, operands, target) if form.op.mutates else ()
            # From here on nothing fails: an op that raises is not recorded.
            values = target.add(form, inputs, site)
            if read:
                for cell in read:
                    cell.read_by(target)
                for cell, value in zip(changed, values, strict=False):
                    cell.advance(value)
        return values

    def _copied(self, form: Form[Any], operands: Sequence[Seen]) -> list[Seen]:
        """The operands, with copies of those whose layout the op does not take."""
        self._target(form, operands, None)  # raises where one is on another device
        taken = list(operands)
        for index in form.copies:
            (copy,) = self.record(get("copy"), [taken[index]], {})
            taken[index] = copy, copy.spec, 0
        return taken

    def _target(
        self, form: Form[Any], operands: Sequence[Seen], chosen: Recording | None
    ) -> Recording:
        """Where an op is recorded: as `chosen`, or where its operands and this thread say."""
        explicit: Recording | None = None
        for value, _, _ in operands:
            if value.device is not self._device:
                raise DeviceError(
                    f"{form.op.name}: operands on {self._device.name} and {value.device.name}; "
                    f"move one with .to(device)"
                )
            mine = value.recording
            if mine is None or mine is explicit or chosen is not None or not mine.explicit:
                continue
            if mine.lapse():  # its values have failed: who needs one finds that
                continue
            if explicit is not None:
                raise ContractError(
                    f"{form.op.name}: operands wait for two open batches; execute one of them first"
                )
            explicit = mine
        return chosen or explicit or innermost(self._device) or self.implicit()

    def _there(self, value: Value, op: Op[Any], index: int) -> Value:
        """An operand that waits for another recording, once that has run.

        Where it has failed and will be overwritten whole, its memory as it is.

        Raises:
            ContractError: it has failed, was discarded, or waits for another batch.
        """
        if value.state == PENDING:
            self._flush_value(value)
        elif value.state == FAILED and index in op.overwrites:
            cell = value.cell
            value = (None if cell is None else cell.memory) or value
        value.require()
        return value

    def _changed(self, form: Form[Any], operands: Sequence[Seen], target: Recording) -> list[Cell]:
        """The cells that an op changes, once everything else that reads them has run."""
        cells: list[Cell] = []
        for index in form.op.mutates:
            value = operands[index][0]
            cell = value.cell
            if cell is None:
                gone = "'s State is gone: keep it" if value.is_version else " is no State"
                raise ContractError(f"{form.op.name}: operand {index}{gone}")
            if sum(other is value for other, _, _ in operands) > 1:
                raise ContractError(f"{form.op.name}: {cell.what} is read and changed at once")
            for reader in cell.unread(target):
                self._executor.run(reader, asked=())
            cells.append(cell)
        return cells

    @uninterrupted
    def upload(
        self, data: Array, spec: Spec, target: Recording | None = None, stays: bool = False
    ) -> Value:
        """Host data as a value: a snapshot is taken now.

        What is recorded on a batch is written when that is executed. Otherwise small data rides
        in the next submission's one write; large data is written at once.

        Args:
            stays: the data changes no more: large data need not be copied where it can be read.

        Raises:
            TransferForbidden: inside `forbid("transfer")`.
            LimitError: it is larger than the device allows.
            CentellaError: what had to run first failed; nothing is recorded.
        """
        guard()
        if spec.size == 0:
            return self._storage.reserve(spec)
        permit(f"upload of {spec.nbytes:,} bytes", "uploads")
        self._check_fits(spec, "upload:")
        site = call_site(2)
        target = target or innermost(self._device)
        if target is None and spec.storage_bytes > DIRECT:
            return self._storage.write(data, spec, site, stays)
        raw = self._storage.bytes_of(data, spec)
        with self._lock:
            self._executor.check_lost()
            if target is None:
                target = self.implicit()
                self._make_room(target)
            return target.add_upload(spec, raw, site)

    def fill(self, specs: Sequence[Spec], read: Callable[..., None]) -> list[Value] | None:
        """Large host data that is read part after part as values, as `Storage.fill` takes it.

        Returns:
            None for small data, and where it is to be written later: that is for `upload`.

        Raises:
            As `upload`.
        """
        total = sum(spec.storage_bytes for spec in specs)
        if total <= self._executor.backend.least_parts or innermost(self._device) is not None:
            return None
        permit(f"upload of {total:,} bytes", "uploads")
        for spec in specs:
            self._check_fits(spec, "upload:")
        return self._storage.fill(specs, read, call_site(2))

    # -- when a lazy recording runs ---------------------------------------------------------------

    def _make_room(self, target: Recording) -> None:
        """Run an implicit recording that is full, before it gets one more op or upload."""
        if (
            len(target.nodes) >= IMPLICIT_NODES
            or target.result_bytes > self._temporary_limit
            or len(target.uploads) >= IMPLICIT_NODES
        ):
            self._executor.run(target, asked=())
        target.scopes.update(open_scopes())

    def _flush_value(self, value: Value) -> None:
        """Make a pending value ready: run the recording it waits for, whole."""
        recording = value.recording
        assert recording is not None
        if recording.explicit:
            value.require()
        self._executor.run(recording, asked=(value,))

    @uninterrupted
    def materialise(self, value: Value) -> Buffer:
        """The buffer of a value, once its recording has been submitted.

        Raises:
            ContractError: it waits for a batch that has not been executed.
        """
        with self._lock:
            value.check_current()
            if value.state == PENDING:
                self._flush_value(value)
            return value.require()

    @uninterrupted
    def flush(self, scope: Ledger | None = None) -> None:
        """Run what this thread recorded lazily, and what any thread did inside a ledger's scope."""
        thread = threading.get_ident()
        with self._lock:
            for recording in list(self._implicit):
                if not recording.empty and (
                    recording.thread == thread or scope in recording.scopes
                ):
                    self._executor.run(recording)

    @uninterrupted
    def explain(self, recording: Recording, outputs: Iterable[Value] | None = None) -> str:
        """The plan of what a recording holds, or of what it ran last."""
        with self._lock:
            if not recording.nodes:
                last: Plan = recording.last_plan or EMPTY
                return last.explain()
            taken = Recorded(recording.nodes, recording.uploads)
            boundary = boundary_of(taken, outputs)
            plans = self._executor.plans
            return plans.find(taken, boundary.slots, boundary.wanted).plan.explain()
