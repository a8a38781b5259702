"""Values, and memory that changes in place, of which they are versions.

A `Value` is immutable data on a device: pending until its recording is run, then ready. A tensor
views a value; a recording refers to its values weakly, so that what no tensor refers to any more
need not be kept. Everything here happens under the device's lock.
"""

from __future__ import annotations

from copy import copy
from itertools import count as counter
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, ref

from msgspec import Struct

from centella.backends.base import Buffer
from centella.errors import CentellaError, ContractError, DiscardedError
from centella.host.interrupts import uninterrupted
from centella.ledger.call_sites import NOWHERE, Site, line_of
from centella.specs import Spec

PENDING, READY, DISCARDED, FAILED = "pending", "ready", "discarded", "failed"
Origin = tuple[int, int]
OUTSIDE: Origin = (-1, 0)


class Runs:
    """The runs of one replay: counted once, however many States they change.

    Attributes:
        what: how errors call the replay.
        last: the number of its last run among all runs of all replays; 0 before the first.
        site: the line that asked for that run.
        alive: whether the replay is still there.
    """

    __slots__ = ("alive", "last", "site", "what")
    _numbers = counter(1)
    newest: ClassVar[int] = 0  # of all runs

    def __init__(self, what: str) -> None:
        self.what: str = what
        self.last: int = 0
        self.site: Site = NOWHERE
        self.alive: bool = True

    def ran(self, site: Site) -> None:
        """Note a run: every State that it changes has a new version."""
        self.site = site
        self.last = next(Runs._numbers)
        Runs.newest = self.last


class Cell:
    """Memory that changes in place, and the Value that stands for what it holds now.

    Every change gives a new version; using an older one raises. Readers of a version that have not
    run yet come before the change: their recordings are run first, or are the changer's own. A cell
    belongs to who can change it: a State, or a replay. Versions refer to it weakly, so that memory
    is free as soon as nobody has a handle; the newest then stays as it is.

    A replay notes a run once for all its States: the version that stands for it is created when
    somebody looks, so that a replay costs the host the same at any number of States.

    Attributes:
        what: how errors call it.
        memory: a value in the memory where every version lies, its content undefined; None for a
            replay's result, whose versions have nothing in common but the memory.
        note: what its owner on the host knows of what it holds now; where a change fails, what it
            was before that is recorded.
    """

    __slots__ = ("__weakref__", "_current", "_looked", "_readers", "_replays", "_seen", "_self",
                 "memory", "note", "what")  # fmt: skip

    def __init__(self, what: str, memory: Value | None = None) -> None:
        self.memory: Value | None = memory
        self.what: str = what
        self.note: Any = None
        self._current: Value | None = None
        self._readers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._replays: list[tuple[Runs, Any]] = []
        self._seen: int = 0  # the run that the newest version stands for
        self._looked: int = 0  # the newest run of all when nothing was left to see
        self._self: ref[Cell] = ref(self)

    @property
    def current(self) -> Value | None:
        """The newest version, recorded or computed."""
        if self._replays and self._looked != Runs.newest:
            self._catch_up()
        current = self._current
        if current is not None and current.recording is not None:
            self.settle()
        return self._current

    def settle(self) -> None:
        """Take back the changes of a batch that is gone."""
        current = self._current
        recording = None if current is None else current.recording
        if recording is not None:
            recording.lapse()

    def changed_by(self, runs: Runs, computed_by: Any) -> None:
        """Every run of a replay changes it from now on, as long as that is there.

        Args:
            computed_by: what the history of a version says of it.
        """
        self._catch_up()
        self._replays = [pair for pair in self._replays if pair[0].alive]
        self._replays.append((runs, computed_by))

    def _newest_run(self) -> tuple[Runs, Any] | None:
        """The replay that has changed it since somebody looked, if one has."""
        newest, last = None, self._seen
        for pair in self._replays:
            if pair[0].last > last:
                newest, last = pair, pair[0].last
        return newest

    @uninterrupted
    def _catch_up(self) -> None:
        """Give the last run of a replay its version, unless it has one."""
        newest = Runs.newest
        if self.memory is None or self._newest_run() is None:
            self._looked = newest
            return
        with self.memory.device.lock:
            run = self._newest_run()
            if run is not None:  # no other thread was quicker
                runs, computed_by = run
                self.advance(self.version(runs.what, runs.site, computed_by))
                self._seen = runs.last
                self._looked = newest
                self._replays = [p for p in self._replays if p[0].alive or p[0].last > self._seen]

    def version(self, what: str, site: Site, computed_by: Any) -> Value:
        """A value that stands for what the memory holds, computed by a replay."""
        memory = self.memory
        assert memory is not None, "a State has memory"
        value = Value(memory.spec, memory.device, what, site=site)
        value.ready(memory.require(), memory.offset)
        value.computed_by = computed_by
        return value

    def __del__(self) -> None:
        """Who has an older version finds that it is stale, also when the State is gone."""
        run = self._newest_run()
        if run is not None and self._current is not None:
            self._current.stale = Stale(self.what, run[0].site, False)

    def _touched(self) -> None:
        """Replays of this device look at their States again before they run."""
        if self.memory is not None:
            self.memory.device.state_events += 1

    def read_by(self, recording: Any) -> None:
        """Note that a recording reads the current version."""
        self._readers[recording] = recording.generation
        self._touched()

    def unread(self, changer: Any) -> list[Any]:
        """Recordings other than `changer` that have yet to read the current version.

        Raises:
            ContractError: one of them is a batch, which runs when its owner says so.
        """
        if not self._readers:
            return []
        waiting: list[Any] = []
        for reader, generation in list(self._readers.items()):
            if reader is changer or reader.generation != generation:
                continue  # it has run since
            if reader.lapse():
                continue
            if reader.explicit:
                raise ContractError(
                    f"{self.what}: a batch that has not been executed reads it; execute that first"
                )
            waiting.append(reader)
        return waiting

    def advance(self, value: Value) -> None:
        """`value` is the next version."""
        before = self._current
        if before is not None:
            before.stale = Stale(self.what, value.site, self.memory is None)
            if value.state == PENDING:
                before.note, value.before = self.note, before
            else:
                value.before = None
        value.version_of = self._self
        self._current = value
        if value.state != READY:
            self._touched()
        if self._readers:
            self._readers.clear()

    def end(self, site: Site) -> None:
        """The memory has changed, and no value stands for what it holds now."""
        if self._current is not None:
            self._current.stale = Stale(self.what, site, self.memory is None)
            self._current = None
            self._readers.clear()

    def roll_back(self) -> None:
        """Changes that failed will not happen: the version before is there again, if one is."""
        current = self._current
        while current is not None and current.state == FAILED and current.before is not None:
            current = current.before
            current.stale, self.note = None, current.note
        self._current = current
        self._readers.clear()
        self._touched()


class Stale(NamedTuple):
    """Why a version may not be used any more: what changed, and the line that changed it."""

    what: str
    site: Site
    result: bool


class Value(Struct, eq=False, weakref=True):
    """Data on a device, or data that a recorded node will make.

    Attributes:
        what: the op that makes it, or how it came here.
        origin: (node, output) in its recording; `OUTSIDE` for what no node makes.
        offset: elements from the buffer's start.
        reason: why it will never be computed, when it has failed; `error`: what it failed with.
        stale: what has changed since, of what it is a version of.
        version_of: the memory that it is one version of, which may have gone: see `cell`.
        before: the version before, until it is known that this one will be computed.
        note: the note of its memory when the version after it was recorded.
        computed_by: the plan, or what a replay says instead; else None.
        events: what has happened to it since; see `history`.
    """

    spec: Spec
    device: Any
    what: str
    recording: Any = None
    origin: Origin = OUTSIDE
    site: Site = NOWHERE
    state: str = PENDING
    buffer: Buffer | None = None
    offset: int = 0
    reason: str = ""
    error: CentellaError | None = None
    stale: Stale | None = None
    before: Value | None = None
    version_of: ref[Cell] | None = None
    note: Any = None
    computed_by: Any = None
    events: Any = None

    @property
    def cell(self) -> Cell | None:
        """The memory that it is one version of, while that can change in place."""
        return None if self.version_of is None else self.version_of()

    @property
    def is_version(self) -> bool:
        """Whether it is one of memory that changes in place, or did."""
        return self.version_of is not None

    def ready(self, buffer: Buffer, offset: int = 0) -> None:
        """The data is (or, in submission order, will be) in this buffer."""
        self.buffer = buffer
        self.offset = offset
        self.state = READY
        self.recording = None
        self.before = None

    def drop(self, state: str, reason: str = "") -> None:
        """It will not be computed: DISCARDED or FAILED."""
        self.state = state
        self.reason = reason
        self.recording = None
        cell = self.cell
        if cell is not None and state == FAILED:
            cell.roll_back()

    def lose(self, reason: str) -> None:
        """It has failed half way: of what it is a version of, no content is left."""
        self.before = None
        self.drop(FAILED, reason)

    def refuse(self, error: CentellaError) -> None:
        """It cannot be computed: who uses it gets this error."""
        self.error = copy(error)  # the original's traceback refers to what failed
        self.drop(FAILED, str(error))

    def check_current(self) -> None:
        """Raise unless it is the newest version of what it is a version of.

        Raises:
            ContractError: its memory has changed since.
        """
        cell = self.cell
        if cell is not None:
            cell.current  # noqa: B018  # a replay may have changed it since somebody looked
        if self.stale is not None:
            what, site, result = self.stale
            keep = (
                "keep a result by .copy(); of several threads each calls .fetch"
                if result
                else "take .value again"
            )
            raise ContractError(
                f"{what}: a stale version (of {line_of(self.site)}); it was changed at "
                f"{line_of(site)}: {keep}"
            )

    def require(self) -> Buffer:
        """The buffer of a ready value.

        Raises:
            DiscardedError: the batch was told not to keep it.
            ContractError: it was recorded in a batch that failed, is gone or was not executed.
            CentellaError: what it, or an operand of it, could not be planned or compiled for.
        """
        if self.state == READY:
            assert self.buffer is not None
            return self.buffer
        if self.state == PENDING and self.recording is not None:
            self.recording.lapse()
        if self.error is not None:
            raise copy(self.error)
        label = f"{self.what} (recorded at {line_of(self.site)})"
        if self.state == DISCARDED:
            raise DiscardedError(
                f"{label} was not kept: declare it in execute(outputs=[...]) or batch.keep(t)"
            )
        if self.state == FAILED:
            cell, until = self.cell, ""
            if cell is not None and cell.memory is not None and cell.current is self:
                until = f"; {cell.what} has no content until it is assigned"
            raise ContractError(f"{label} was never computed: {self.reason}{until}")
        raise ContractError(f"{label} is not computed yet: call execute() on its batch first")
