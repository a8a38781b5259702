"""Running recordings on a backend: plan, compile, allocate, submit, count, read back.

What can fail comes first and leaves the recording as it was; the submission itself comes last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from centella.backends.base import Backend, Buffer, DoneTicket, Submission, Ticket
from centella.errors import (
    CentellaError,
    ContractError,
    DeviceError,
    DeviceLostError,
    LimitError,
    OutOfMemoryError,
    SimulationError,
)
from centella.host.interrupts import guard, uninterrupted
from centella.host.log import logger
from centella.ledger.counts import began, count, noted, permit, timelines
from centella.plan.plan import EMPTY, Plan
from centella.record.recording import Recorded, Recording, innermost
from centella.record.values import PENDING, Value
from centella.runtime import prepare
from centella.runtime.counting import count_work, note_work
from centella.runtime.in_flight import Border, InFlight, Watched, imported_of
from centella.runtime.memory import Pool
from centella.runtime.pipelines import PipelineCache
from centella.runtime.prepare import Boundary, Executable, Span
from centella.runtime.suspects import Suspects
from centella.runtime.workspace import Workspace

if TYPE_CHECKING:
    from centella.runtime.plans import Plans


class Executor:
    """One backend with its memory, its plans and its compiled programs.

    Attributes:
        name: "cpu", "simulator", "webgpu:<adapter>" or "cuda:<index>".
        cache: its PipelineCache; plans: what is planned and compiled.
        workspace: where its replays compute.
        lock: held while anything is recorded or run on it; never while somebody waits for it.
        last_plan: what ran last.
        border: what calls of the backend stand in, unless they say themselves what is lost.
        in_flight: submissions that are not known to be done.
        suspects: its values that a stopped loop may have left wrong.
        lost: it was lost or closed.
        device: what values in its memory say they are on.
        state_events: how often a State of its values was read or changed by other than replays.

    Args:
        device: has a `name`, a `lock` and `state_events` as well; default: itself.
    """

    def __init__(
        self, backend: Backend, *, pool: str = "reuse", cache: PipelineCache | None = None,
        memory_limit: int | None = None, device: Any = None,
    ) -> None:  # fmt: skip
        from centella.runtime.plans import Plans

        self.device: Any = self if device is None else device
        self.backend: Backend = backend
        self.name: str = backend.name
        self.cache: PipelineCache = PipelineCache() if cache is None else cache
        self.pool: Pool = Pool(backend, pool, memory_limit)
        self.workspace: Workspace = Workspace(self.pool, backend.caps.max_binding)
        self.lock: threading.RLock = threading.RLock()
        self.plans: Plans = Plans(backend)
        self.border: Border = Border(self.lose)
        self.suspects: Suspects = Suspects(self.lock)
        self.in_flight: InFlight = InFlight(self.lose, self.let_go, self.suspects)
        self.lost: bool = False
        self.barred: bool = False
        self._ending: bool = False
        self._why_lost: str = ""
        self.state_events: int = 0
        self._remedy: str = "open it again"
        self.last_plan: Plan = EMPTY

    def lose(self, reason: str, remedy: str = "open it again") -> None:
        """The device cannot be used any more."""
        if not self.lost:
            self.lost, self._why_lost, self._remedy = True, reason, remedy
            self.barred = True
            logger("device").info("%s was lost: %s", self.name, reason)

    def check_lost(self) -> None:
        """Raise unless the device can be used.

        Raises:
            DeviceLostError: it was lost or closed.
        """
        if self.lost:
            raise self._lost_error()
        if self._ending and threading.current_thread() is not threading.main_thread():
            raise SystemExit  # ends the thread without a word, so that who joins it goes on

    def end(self) -> None:
        """The process ends: from now on the main thread alone computes."""
        self.barred = self._ending = True

    def _lost_error(self) -> DeviceLostError:
        return DeviceLostError(f"{self.name} was lost: {self._why_lost}; {self._remedy}")

    @uninterrupted
    def run(
        self, recording: Recording, *, outputs: Iterable[Value] | None = None,
        reads: Sequence[Span] = (), cache: PipelineCache | None = None, peek: bool = False,
        asked: Sequence[Value] | None = None,
    ) -> Ticket:  # fmt: skip
        """Plan, compile, allocate, then submit what a recording holds.

        Args:
            outputs: the values to keep (default: every value that something refers to).
            reads: values that come back, each with a byte range relative to the value.
            cache: where to compile into, instead of the device's own.
            peek: count the read-backs as peeks.
            asked: what it is run for (default: all of it).

        Raises:
            CentellaError: before submission; the recording is as it was, but what cannot be planned
                or compiled is set aside from an implicit one. Raised if that was asked for, or was
                to change a State; else the rest is run.
            DeviceLostError: after it; the device cannot be used any more.
        """
        guard()
        with self.lock, self.border:
            while True:
                try:
                    if recording.aside:
                        self._run_operands(recording)
                    return self._run(recording, outputs, reads, cache, peek)
                except CentellaError as error:
                    abandoned = [] if recording.explicit else recording.give_up(error)
                    mine = asked is None or any(v is w for v in asked for w in abandoned)
                    if mine or not abandoned or any(value.is_version for value in abandoned):
                        raise

    def _run_operands(self, recording: Recording) -> None:
        """Run what a recording waits for; a node whose operand cannot be run is refused."""
        for node in recording.nodes:
            for value, _, _ in node.inputs:
                if value is None or value.state != PENDING or value.recording is recording:
                    continue
                try:
                    self.run(value.recording, asked=(value,))
                except CentellaError:
                    node.refused = True
                    raise

    def _run(
        self, recording: Recording, outputs: Iterable[Value] | None, reads: Sequence[Span],
        cache: PipelineCache | None, peek: bool,
    ) -> Ticket:  # fmt: skip
        self.check_lost()
        if reads and not peek:
            permit(f"read of {reads[0][0].what}", "downloads")
        taken = recording.take()
        try:
            boundary = prepare.boundary_of(taken, outputs, reads)
            executable = self.executable(taken, boundary, cache)
            work = executable.work
            work.whole = recording.explicit
            meant = executable.add_reads(reads, boundary, self.backend.unit)
        except BaseException:
            recording.restore(taken)
            raise
        begin = began()
        if begin:
            noted("record", recording.begun, self.name, operations=len(taken.nodes),
                  uploads=len(taken.uploads))  # fmt: skip
        ticket = self.hand_over(
            executable, work, meant, lambda: recording.restore(taken), taken.lose, begin, peek=peek
        )
        for upload, arena, offset in executable.uploads.uploads:
            upload.value.ready(arena, offset)
        if executable.plan is not None:
            boundary.settle(work.slots, executable.plan)
            self.suspects.note(work, ticket.serial, boundary.results.values())
            recording.last_plan = self.last_plan = executable.plan
        recording.scopes.clear()
        return ticket

    def executable(
        self, taken: Recorded, boundary: Boundary, cache: PipelineCache | None = None,
        temporaries: Callable[[int], Buffer] | None = None,
    ) -> Executable:  # fmt: skip
        """A recording planned, compiled and with its buffers; nothing is submitted.

        Args:
            cache: where to compile into, instead of the device's own.
            temporaries: gives buffers to compute in, if it is to run more than once.
        """
        caps, planned = self.backend.caps, None
        if taken.nodes:
            cache = self.cache if cache is None else cache
            planned = self.plans.compiled(taken, boundary.slots, boundary.wanted, cache)
        packed = prepare.pack(taken.uploads, boundary, self.pool, caps.max_buffer)
        slots = [
            packed.buffers[i] if i in packed.buffers else v.require()
            for i, v in enumerate(boundary.slots)
        ]
        work = Submission(slots, packed.writes)
        call_sites = [node.site for node in taken.nodes]
        if planned is None:
            return Executable(packed, call_sites, work)
        slots += prepare.allocate(planned.plan, taken, self.pool, temporaries)
        work.launches = prepare.launches_of(planned, boundary.offsets, slots, taken, caps)
        work.loads, work.total = planned.loads, planned.total
        work.reports = planned.reports
        if temporaries is None and work.launches is planned.launches:
            work.again = planned.again
        return Executable(packed, call_sites, work, planned.plan)

    def hand_over(
        self, executable: Executable, work: Submission, meant: Sequence[tuple[int, int]],
        undo: Callable[[], None], lose: Callable[[str], None], begin: int, *, peek: bool = False,
        imported: tuple[Buffer, ...] | None = None,
    ) -> Watched:  # fmt: skip
        """Hand work to the backend, and count it.

        Args:
            executable: what it is a submission of.
            meant: which of the bytes that come back were asked for: first and number.
            undo: called when nothing was submitted and it may be tried again.
            lose: called with the reason when it cannot: some of it may have run.
            begin: when, in ns, if anybody times; else 0.
            peek: count the read-backs as peeks.
            imported: the application's memory among its slots, if that is known.
        """
        work.timed = bool(begin and timelines())
        try:
            ticket: Ticket = DoneTicket()
            if work.timed:
                self.backend.warm(work)
                work.begun = began()
            if work.launches or work.reads or work.copies:
                ticket = self.backend.submit(work)
            else:
                for slot, data in work.uploads:
                    self.backend.write(work.slots[slot], data)
        except (OutOfMemoryError, LimitError):
            undo()
            raise
        except SimulationError as error:
            lose(str(error))
            raise
        except Exception as error:
            lose("the device was lost")
            self.lose(str(error))
            raise self._lost_error() from error
        except BaseException:
            lose("its submission was interrupted")
            raise
        if imported is None:
            imported = imported_of(work.slots)
        watched = self.in_flight.watch(ticket, meant, imported)
        if begin:
            note_work(self.backend, work, watched, begin, executable, peek=peek)
        count_work(work, peek=peek)
        return watched

    def write_uploads(self, taken: Recorded) -> None:
        """Write what a recording would upload now, each in memory of its own.

        Raises:
            TransferForbidden: inside `forbid("transfer")`.
        """
        if taken.uploads:
            permit("upload", "uploads")
        for upload in taken.uploads:
            buffer = self.pool.allocate(upload.data.nbytes)
            self.backend.write(buffer, upload.data)
            upload.value.ready(buffer)
            count(uploads=1, upload_bytes=upload.data.nbytes)
        taken.uploads = []

    @uninterrupted
    def let_go(self) -> None:
        """Let go of imported memory whose submissions are done, unless the device is busy."""
        if self.lock.acquire(blocking=False):
            try:
                with self.border:
                    self.in_flight.sweep()
                    self.pool.drain()
            finally:
                self.lock.release()

    @uninterrupted
    def read(self, reads: Sequence[Span], *, peek: bool = False) -> Ticket:
        """Read values back in one copy: (value, first byte, bytes) each; runs what they wait for.

        Raises:
            ContractError: one waits for a batch that has not been executed, or was not kept; or a
                function is being captured.
            TransferForbidden: inside `forbid("transfer")`, before anything is run.
        """
        guard()
        inside = innermost(self.device)
        if inside is not None and inside.host_updates is not None:
            raise ContractError(
                f"{reads[0][0].what}: read while a function is captured, when there are no values "
                f"yet: choose by ct.where, decide outside the function, or return it"
            )
        with self.lock:
            self.check_lost()
            for value, _, _ in reads:
                value.check_current()
                if value.state != PENDING or value.recording is None or value.recording.explicit:
                    value.require()
            if not peek:
                permit(f"read of {reads[0][0].what}", "downloads")
            recordings = dict.fromkeys(v.recording for v, _, _ in reads if v.recording is not None)
            *others, last = recordings or (Recording(self.device, explicit=False),)
            asked = [value for value, _, _ in reads]
            for other in others:
                self.run(other, asked=asked)
            return self.run(last, reads=reads, peek=peek, asked=asked)

    def synchronize(self) -> None:
        """Wait until the device has done everything that was submitted."""
        ticket = self._at_end()
        count(syncs=1)
        begin = began()
        ticket.wait()
        noted("wait", begin)

    @uninterrupted
    def _at_end(self) -> Ticket:
        """A ticket that is done when everything is that was submitted."""
        with self.lock:
            self.check_lost()
            try:
                return self.in_flight.watch(self.backend.submit(Submission([])), (), ())
            except DeviceError as error:
                self.lose(str(error))
                raise self._lost_error() from error

    @uninterrupted
    def close(self) -> None:
        """Release the device; its tensors cannot be used any more."""
        with self.lock:
            if not self.lost:
                self.lost, self._why_lost = True, "it was closed"
                self.barred = True
                self.pool.close()
                self.backend.close()
            self.in_flight.clear()
