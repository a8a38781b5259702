"""A recording that is planned, compiled, allocated and bound once, then submitted again and again.

A replay writes its inputs, runs its launches and nothing else. It owns the buffers of its inputs
and outputs: what it computed is valid until it runs again. Temporaries lie in memory that all
replays of the device share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any
from weakref import ref

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from centella.backends.base import Array, Buffer, Copy, Read, Ticket
from centella.errors import ContractError
from centella.host.interrupts import guard, uninterrupted
from centella.ledger.call_sites import Site
from centella.ledger.counts import began, permit
from centella.plan.plan import Plan
from centella.record.history import Replayed
from centella.record.recording import Recorded, Recording
from centella.record.values import FAILED, PENDING, Cell, Origin, Runs, Value
from centella.runtime.executor import Executor
from centella.runtime.in_flight import imported_of
from centella.runtime.prepare import Boundary, Span, boundary_of
from centella.specs import strided

UNIT = 256
DROPPED = "it was recorded while a function was captured; what a captured function returns is kept"
HostUpdate = tuple[Cell, Callable[[Any], Any]]


class Result(Struct, eq=False):
    """A value that a replay gives: where it lies, and the cell that ends its life at the next.

    Attributes:
        computed_by: what its history says.
    """

    value: Value
    slot: int
    offset: int
    cell: Cell
    computed_by: Replayed


class Touched(Struct, eq=False):
    """A State that the launches read or change, in the buffer that it always has.

    Attributes:
        slot: of its buffer; computed_by: what the history of each new version says.
        read: they need what it holds; else they overwrite it whole before they read it.
    """

    cell: Cell
    slot: int
    read: bool = False
    changed: bool = False
    computed_by: Replayed | None = None


class Inputs(Struct, eq=False):
    """The operands that a caller gives each time: one arena, one write.

    Attributes:
        values: as the launches see them; starts: the byte where each begins.
        slot: of the arena.
        last: what was copied from device memory the last time, if it is still there.
    """

    values: Sequence[Value]
    starts: list[int] = field(default_factory=list)
    nbytes: int = 0
    slot: int = -1
    last: list[ref[Value] | None] = field(default_factory=list)


class Replay:
    """What a recording does, ready to be done again.

    Args:
        executor: runs it.
        recording: what was captured; it is emptied.
        inputs: placeholders that the recording reads; `run` gives them data.
        outputs: values that each run gives.
        reads: what of them `fetch` brings back: bytes counted from each value's start.
        what: how errors call it.

    Raises:
        CentellaError: planning, compiling or allocating failed; nothing was run.
    """

    def __init__(
        self, executor: Executor, recording: Recording, inputs: Sequence[Value],
        outputs: Sequence[Value], reads: Sequence[Span], what: str,
    ) -> None:  # fmt: skip
        self._executor = executor
        self._what = what
        self._host_updates: list[HostUpdate] = list(recording.host_updates or ())
        self._inputs = Inputs(inputs)
        self._results: list[Result | Cell] = []
        taken = recording.take()
        with executor.lock, executor.border:
            try:
                self._build(taken, outputs, reads)
            finally:
                taken.fail(DROPPED)

    def _build(self, taken: Recorded, outputs: Sequence[Value], reads: Sequence[Span]) -> None:
        executor = self._executor
        for value in outputs:
            value.check_current()
        self._allocate_inputs()
        executor.write_uploads(taken)
        boundary = boundary_of(taken, outputs)
        for value in (*self._inputs.values, *outputs):
            if boundary.origin_of(value) is None:
                boundary.add(value)
        shared = executor.workspace.share()
        self._executable = executor.executable(taken, boundary, temporaries=shared)
        work = self._executable.work
        self._slots: list[Buffer] = work.slots
        self.plan: Plan | None = self._executable.plan
        if work.launches:
            work.prepared = executor.backend.prepare(work)
        if self._inputs.values:
            self._inputs.slot = boundary.slots[self._inputs.values[0]]
        self._touched = _touched(taken, boundary)
        self._runs = Runs(self._what)
        self._settled = -1  # the device's count of events when all States were last looked at
        self._imported = imported_of(self._slots)
        cells = [(value, value.cell) for value in boundary.slots]
        self._borrowed = [v for v, cell in cells if cell is not None and cell.memory is None]
        changed = [touched for touched in self._touched if touched.changed]
        for touched in changed:
            touched.computed_by = self._changed(touched.slot)
            touched.cell.changed_by(self._runs, touched.computed_by)
        for value in outputs:
            state = value.cell
            if state is not None:
                self._results.append(state)
                continue
            cell = Cell(f"a result of {self._what}")
            computed_by = self._replayed(value, boundary.origin_of(value))
            known = self._executable.slot_of(value, boundary)
            assert known is not None, "it is computed or has a slot"
            self._results.append(Result(value, *known, cell, computed_by))
        self._meant = self._executable.add_reads(reads, boundary, executor.backend.unit)
        self._reads: list[Read] = work.reads
        for value in self._inputs.values:  # the arena holds something else from now on
            value.drop(FAILED, DROPPED)

    def __del__(self) -> None:
        runs = getattr(self, "_runs", None)  # None where building it failed
        if runs is not None:
            runs.alive = False

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError(f"{self._what}: a capture is neither copied nor pickled: capture it again")

    def _changed(self, slot: int) -> Replayed | None:
        """What the history of a State says after each run, if the launches change it."""
        nodes = [] if self.plan is None else self.plan.changers(slot)
        if self.plan is None or not nodes:
            return None
        launches = sum(self.plan.launches_of(node) for node in nodes)
        return Replayed(self._what, self.plan.label(nodes[-1]), launches)

    def _replayed(self, value: Value, origin: Origin | None) -> Replayed:
        if origin is None or self.plan is None:
            return Replayed(self._what, value.what, 0)
        node = origin[0]
        return Replayed(self._what, self.plan.label(node), self.plan.launches_of(node))

    def _allocate_inputs(self) -> None:
        """Allocate one arena for the inputs."""
        inputs = self._inputs
        for value in inputs.values:
            inputs.starts.append(inputs.nbytes)
            inputs.nbytes += -(-value.spec.storage_bytes // UNIT) * UNIT
        inputs.last = [None] * len(inputs.values)
        if not inputs.values:
            return
        arena = self._executor.pool.allocate(inputs.nbytes)
        arena.mutable = True
        for value, start in zip(inputs.values, inputs.starts, strict=True):
            value.ready(arena, start // value.spec.dtype.itemsize)

    @property
    def launches(self) -> int:
        """Launches of a run."""
        return len(self._executable.work.launches)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that it uses."""
        return self._inputs.nbytes + sum(b.nbytes for b in self._executable.allocated)

    def run(self, data: Sequence[Array | Value], site: Site) -> list[Value]:
        """Run it once more.

        Args:
            data: for each input a host array of its shape, or a value on the device that lies so.
            site: the line that asks.

        Returns:
            The outputs, valid until the next run.

        Raises:
            ContractError: a batch that has not been executed reads what this run overwrites, or
                changes a State that it uses; or a State that it reads has no content.
        """
        return self._run(data, site, [], ())[1]

    def fetch(self, data: Sequence[Array | Value], site: Site) -> Ticket:
        """Run it once more and bring back what it was made to: all in one submission.

        Whoever else runs it meanwhile, this ticket has the data of this run.

        Raises:
            ContractError: as `run`.
            TransferForbidden: inside `forbid("transfer")`, before anything is run.
        """
        if self._reads:
            permit(f"read of {self._what}", "downloads")
        return self._run(data, site, self._reads, self._meant)[0]

    @uninterrupted
    def _run(
        self, data: Sequence[Array | Value], site: Site, reads: list[Read],
        meant: Sequence[tuple[int, int]],
    ) -> tuple[Ticket, list[Value]]:  # fmt: skip
        executor = self._executor
        guard()
        with executor.lock:
            executor.check_lost()
            self._settle()
            undo: list[tuple[Cell, Any]] = []
            begin = began()
            try:
                uploads, copies, slots = self._transfers(data)
                undo = self._mark()
                work = replace(
                    self._executable.work, slots=slots, uploads=uploads, reads=reads, copies=copies
                )
                borrowed = imported_of(slots[len(self._slots) :]) if copies else ()
                ticket = executor.hand_over(
                    self._executable, work, meant, lambda: None,
                    lambda why: self._lose(why, site), begin, imported=self._imported + borrowed,
                )  # fmt: skip
            except BaseException:
                _back(undo)
                self._inputs.last = [None] * len(data)  # what was to be copied was not
                raise
            self._runs.ran(site)
            values: list[Value] = []
            for result in self._results:
                if not reads:
                    values.append(self._output(result, site))
                elif isinstance(result, Result):  # nobody gets values: those of the last run end
                    result.cell.end(site)
            states = (t.cell.current for t in self._touched if t.changed)
            executor.suspects.note(work, ticket.serial, chain(values, states))
        return ticket, values

    def _settle(self) -> None:
        """Run what reads the last outputs and what the States wait for."""
        for value in self._borrowed:
            value.check_current()
        for result in self._results:
            if isinstance(result, Result):
                for reader in result.cell.unread(None):
                    self._executor.run(reader, asked=())
        events = self._executor.device.state_events
        if events == self._settled:
            return  # nobody but replays has used a State since
        for touched in self._touched:
            current = touched.cell.current
            if current is not None and current.state == PENDING and current.recording is not None:
                if current.recording.explicit:
                    raise ContractError(
                        f"{self._what}: a batch that has not been executed changes "
                        f"{touched.cell.what}; execute that first"
                    )
                self._executor.run(current.recording, asked=(current,))
            elif current is not None and touched.read:
                current.require()
            if touched.changed:
                for reader in touched.cell.unread(None):
                    self._executor.run(reader, asked=())
        self._settled = events

    def _transfers(
        self, data: Sequence[Array | Value]
    ) -> tuple[list[tuple[int, Array]], list[Copy], list[Buffer]]:
        """One write for what comes from the host, a copy for what is on the device already."""
        inputs = self._inputs
        slots, copies = self._slots, []
        from_host = any([not isinstance(x, Value) for x in data])
        packed = np.zeros(inputs.nbytes, np.uint8) if from_host else None
        for index, (x, start) in enumerate(zip(data, inputs.starts, strict=True)):
            if isinstance(x, Value):
                x.check_current()
                last = inputs.last[index]
                known = last is not None and last() is x and x.require().owner is None
                if known and not from_host:
                    continue  # values do not change: it is there from the last time
                if slots is self._slots:
                    slots = list(slots)
                first = x.offset * x.spec.dtype.itemsize
                buffer = x.require()
                room = (buffer.nbytes - first) // 4 * 4  # imported memory may end with the data
                nbytes = min(inputs.values[index].spec.storage_bytes, room)
                copies.append(Copy(len(slots), first, inputs.slot, start, nbytes))
                slots.append(buffer)
                inputs.last[index] = ref(x)
            elif packed is not None:
                strided(packed, inputs.values[index].spec, start)[...] = x
                inputs.last[index] = None
        if packed is None:
            return [], copies, slots
        permit("upload", "uploads")
        return [(inputs.slot, packed)], copies, slots

    def _mark(self) -> list[tuple[Cell, Any]]:
        """Bring the host's notes of States up to date; returns what they were."""
        before: list[tuple[Cell, Any]] = []
        try:
            for cell, note in self._host_updates:
                before.append((cell, cell.note))
                cell.note = note(cell.note)
        except BaseException:
            _back(before)
            raise
        return before

    def _lose(self, reason: str, site: Site) -> None:
        """Some of it may have run: what it changes has no content, the last outputs are gone."""
        states: list[Value] = []
        for touched in self._touched:
            if touched.changed:
                states.append(touched.cell.version(self._what, site, touched.computed_by))
                touched.cell.advance(states[-1])
        results = [self._output(r, site) for r in self._results if isinstance(r, Result)]
        for value in (*states, *results):
            value.lose(reason)

    def _output(self, result: Result | Cell, site: Site) -> Value:
        if isinstance(result, Cell):
            assert result.current is not None, "a cell is made with its first version"
            return result.current
        value = Value(result.value.spec, self._executor.device, self._what, site=site)
        value.ready(self._slots[result.slot], result.offset)
        value.computed_by = result.computed_by
        result.cell.advance(value)
        return value


def _back(before: list[tuple[Cell, Any]]) -> None:
    """Take notes back."""
    for cell, note in reversed(before):
        cell.note = note


def _touched(taken: Recorded, boundary: Boundary) -> list[Touched]:
    """The States that came from outside, and whether the launches change them."""
    states: dict[Cell | None, Touched] = {}
    for outer, slot in boundary.slots.items():
        cell = outer.cell
        if cell is not None and cell.memory is not None:
            states[cell] = Touched(cell, slot)
    for node in taken.nodes:
        for index, (operand, _, _) in enumerate(node.inputs):
            touched = states.get(None if operand is None else operand.cell)
            if touched is not None:
                touched.read |= index not in node.op.overwrites
        for value in node.alive if node.op.mutates else ():
            touched = states.get(value.cell)
            if touched is not None:
                touched.changed = True
    return list(states.values())
