"""Nodes recorded on a device, and the values they make.

A `Value` is immutable data on a device: pending until its recording is run, then ready. A tensor
views a value; a recording refers to its values weakly, so that what no tensor refers to any more
need not be kept. Everything here happens under the device's lock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from msgspec import Struct

from centella.dtypes import Array
from centella.errors import CentellaError, ContractError, DiscardedError
from centella.ledger import Ledger, began
from centella.op import Attrs, Op
from centella.specs import Spec
from centella.submission import Buffer

PENDING, READY, DISCARDED, FAILED = "pending", "ready", "discarded", "failed"
Place = tuple[int, int]
Site = tuple[str, int]
NOWHERE: Site = ("", 0)
OUTSIDE: Place = (-1, 0)


class Cell:
    """Memory that changes in place, and the Value that stands for what it holds now.

    Every change gives a new version; using an older one raises. Readers of a version that have not
    run yet come before the change: their recordings are run first, or are the changer's own. A cell
    belongs to who can change it: a State, or a replay. Versions refer to it weakly, so that memory
    is free as soon as nobody has a handle; the newest then stays as it is.

    Attributes:
        what: how errors call it.
        memory: a value in the memory where every version lies, its content undefined; None for a
            replay's result, whose versions have nothing in common but the memory.
        current: the newest version, recorded or computed.
        settled: the newest version that was submitted, which a failed recording goes back to; None
            when nothing is there to go back to.
    """

    __slots__ = ("__weakref__", "_readers", "_self", "current", "memory", "settled", "what")

    def __init__(self, what: str, memory: Value | None = None) -> None:
        self.memory: Value | None = memory
        self.what: str = what
        self.current: Value | None = None
        self.settled: Value | None = None
        self._readers: WeakKeyDictionary[Recording, int] = WeakKeyDictionary()
        self._self: ref[Cell] = ref(self)

    def read_by(self, recording: Recording) -> None:
        """Note that a recording reads the current version."""
        self._readers[recording] = recording.generation

    def unread(self, changer: Recording | None) -> list[Recording]:
        """Recordings other than `changer` that have yet to read the current version.

        Raises:
            ContractError: one of them is a batch, which runs when its owner says so.
        """
        if not self._readers:
            return []
        waiting: list[Recording] = []
        for found, generation in list(self._readers.items()):
            if found is changer or found.generation != generation:
                continue  # it has run since
            if found.explicit:
                raise ContractError(
                    f"{self.what}: a batch that has not been executed reads it; execute that first"
                )
            waiting.append(found)
        return waiting

    def advance(self, value: Value) -> None:
        """`value` is the next version."""
        before = self.current
        if before is not None:
            before.stale = Stale(self.what, value.site, self.memory is None)
            value.note = before.note
        value._cell = self._self
        self.current = value
        if self._readers:
            self._readers.clear()

    def roll_back(self) -> None:
        """A recorded change will not happen: the version before is there again, if one is."""
        if self.settled is not None:
            self.settled.stale = None
            self.current = self.settled
        self._readers.clear()


class Stale(NamedTuple):
    """Why a version may not be used any more: what changed, and the line that changed it."""

    what: str
    site: Site
    result: bool


class Value:
    """Data on a device, or data that a recorded node will make.

    Attributes:
        what: the op that makes it, or how it came here.
        place: (node, output) in its recording; `OUTSIDE` for what no node makes.
        offset: elements from the buffer's start.
        reason: why it will never be computed, when it has failed.
        stale: what has changed since, of what it is a version of.
        note: what its owner on the host knows about this version.
        made: the plan that computed it, or what a replay says in its place; else None.
        events: what has happened to it since; see `history`.
    """

    __slots__ = (
        "__weakref__", "_cell", "buffer", "device", "events", "made", "note", "offset", "place",
        "reason", "recording", "site", "spec", "stale", "state", "what",
    )  # fmt: skip

    def __init__(
        self, spec: Spec, device: Any, what: str, recording: Recording | None = None,
        place: Place = OUTSIDE, site: Site = NOWHERE,
    ) -> None:  # fmt: skip
        self.spec: Spec = spec
        self.device: Any = device
        self.what: str = what
        self.recording: Recording | None = recording
        self.place: Place = place
        self.site: Site = site
        self.state: str = PENDING
        self.buffer: Buffer | None = None
        self.offset: int = 0
        self.reason: str = ""
        self.stale: Stale | None = None
        self._cell: ref[Cell] | None = None
        self.note: Any = None
        self.made: Any = None
        self.events: Any = None

    @property
    def cell(self) -> Cell | None:
        """The memory that it is one version of, while that can change in place."""
        return None if self._cell is None else self._cell()

    @property
    def is_version(self) -> bool:
        """Whether it is one of memory that changes in place, or did."""
        return self._cell is not None

    def ready(self, buffer: Buffer, offset: int = 0) -> None:
        """The data is (or, in submission order, will be) in this buffer."""
        self.buffer = buffer
        self.offset = offset
        self.state = READY
        self.recording = None
        cell = self.cell
        if cell is not None:
            cell.settled = self

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
        cell = self.cell
        if cell is not None:
            cell.settled = None
        self.drop(FAILED, reason)

    def check_current(self) -> None:
        """Raise unless it is the newest version of what it is a version of.

        Raises:
            ContractError: its memory has changed since.
        """
        if self.stale is not None:
            what, site, result = self.stale
            keep = "keep a result by .copy()" if result else "take .value again"
            raise ContractError(
                f"{what}: a stale version (of {line_of(self.site)}); it was changed at "
                f"{line_of(site)}: {keep}"
            )

    def require(self) -> Buffer:
        """The buffer of a ready value.

        Raises:
            DiscardedError: the batch was told not to keep it.
            ContractError: it was recorded in a batch that failed or has not been executed.
        """
        if self.state == READY:
            assert self.buffer is not None
            return self.buffer
        label = f"{self.what} (recorded at {line_of(self.site)})"
        if self.state == DISCARDED:
            raise DiscardedError(
                f"{label} was not kept: declare it in execute(outputs=[...]) or batch.keep(t)"
            )
        if self.state == FAILED:
            cell, until = self.cell, ""
            if cell is not None and cell.memory is not None:
                until = f"; {cell.what} has no content until it is assigned"
            raise ContractError(f"{label} was never computed: {self.reason}{until}")
        raise ContractError(f"{label} is not computed yet: call execute() on its batch first")


class Form(Struct, eq=False):
    """What an op is asked to do, apart from the data: equal requests share one Form.

    Attributes:
        inputs: how each operand is seen.
        outputs: how each result will lie in memory; `nbytes` of them all.
        copies: operands whose layout the op does not take.
        lowered: the launches that it becomes, once planned.
    """

    op: Op
    inputs: tuple[Spec, ...]
    attrs: Attrs
    outputs: tuple[Spec, ...]
    nbytes: int
    copies: tuple[int, ...]
    lowered: Any = None


# A value as a node reads it, seen as its form says: (value, place, element that it begins at). What
# the same recording makes is named by its `place`, so that a recording does not keep its own values
# alive; any other value is held, and its place is OUTSIDE.
Operand = tuple["Value | None", Place, int]


class Node(Struct, eq=False):
    """One recorded operation."""

    form: Form
    inputs: list[Operand]
    values: list[ref[Value]]
    site: Site

    @property
    def op(self) -> Op:
        """The operation."""
        return self.form.op


class Upload(Struct, eq=False):
    """Host data recorded for the next submission's one write: bytes in the value's layout."""

    value: Value
    data: Array


class Recording:
    """Operations and uploads in order, on one device and one thread.

    Attributes:
        explicit: it belongs to a batch and is run by its `execute` alone.
        open: how many of its `with` blocks have begun and not ended.
        scopes: the ledgers inside which something was recorded lazily.
        generation: how often it was taken to be run.
        marks: what a captured function notes of States, for its replays; None elsewhere.
        last_plan: what ran last, if anything did.
        begun: when the first node or upload was recorded, in ns, if anybody times; else 0.
    """

    def __init__(self, device: Any, explicit: bool) -> None:
        self.device: Any = device
        self.explicit: bool = explicit
        self.thread: int = get_ident()
        self.open: int = 0
        self.generation: int = 0
        self.marks: list[tuple[Cell, Callable[[Any], Any]]] | None = None
        self.scopes: set[Ledger] = set()
        self.last_plan: Any = None
        self.begun: int = 0
        self.nodes: list[Node] = []
        self.uploads: list[Upload] = []
        self.result_bytes: int = 0

    @property
    def empty(self) -> bool:
        """True when there is nothing to submit."""
        return not self.nodes and not self.uploads

    def __enter__(self) -> None:
        """Make it the current recording of this thread and task."""
        self.open += 1
        _current.set((*_current.get(), (self, get_ident())))

    def __exit__(self, *_: object) -> None:
        """Undo the last `__enter__`."""
        self.open -= 1
        stack = list(_current.get())
        for index in range(len(stack) - 1, -1, -1):
            if stack[index][0] is self:
                del stack[index]
                break
        _current.set(tuple(stack))

    def add(self, form: Form, inputs: list[Operand], site: Site) -> list[Value]:
        """Record a node; returns its values."""
        nodes, device, name = self.nodes, self.device, form.op.name
        index = len(nodes)
        if not index:
            self.begun = began()
        made: list[Value] = []
        refs: list[ref[Value]] = []
        for spec in form.outputs:
            value = Value(spec, device, name, self, (index, len(made)), site)
            made.append(value)
            refs.append(ref(value))
        nodes.append(Node(form, inputs, refs, site))
        self.result_bytes += form.nbytes
        return made

    def add_upload(self, spec: Spec, data: Array, site: Site) -> Value:
        """Record host data; returns its value."""
        value = Value(spec, self.device, "upload", self, OUTSIDE, site)
        if self.empty:
            self.begun = began()
        self.uploads.append(Upload(value, data))
        return value

    def take(self) -> Recorded:
        """Everything recorded so far; the recording starts anew."""
        taken = Recorded(self.nodes, self.uploads, self.result_bytes)
        self.nodes, self.uploads = [], []
        self.result_bytes = 0
        self.generation += 1
        return taken

    def restore(self, taken: Recorded) -> None:
        """Put back what `take` gave, after a failure before submission."""
        assert self.empty
        self.generation -= 1
        self.nodes, self.uploads = taken.nodes, taken.uploads
        self.result_bytes = taken.result_bytes

    def fail(self, reason: str = "its recording was dropped") -> None:
        """Drop everything recorded: values of it raise when used, States are as before it."""
        self.take().fail(reason)


class Recorded(Struct, eq=False):
    """What a recording held."""

    nodes: list[Node]
    uploads: list[Upload]
    result_bytes: int = 0

    def _values(self) -> list[Value]:
        made = [ref() for node in self.nodes for ref in node.values]
        return [v for v in (*made, *(u.value for u in self.uploads)) if v is not None]

    def fail(self, reason: str) -> None:
        """Give it up before any of it has run: its values raise when used."""
        for value in self._values():
            value.drop(FAILED, reason)

    def lose(self, reason: str) -> None:
        """Give it up after some of it may have run: what it changes has no content any more."""
        for value in self._values():
            value.lose(reason)


# The current recordings of this thread and task, innermost last. A task inherits its parent's;
# one that has been closed since, or was opened by another thread, is passed over.
_current: ContextVar[tuple[tuple[Recording, int], ...]] = ContextVar("centella_batches", default=())


def innermost(device: Any = None) -> Recording | None:
    """The current recording on a device, or on any."""
    for recording, owner in reversed(_current.get()):
        here = device is None or recording.device is device
        if here and recording.open and owner == get_ident():
            return recording
    return None


def call_site(depth: int = 1) -> Site:
    """File and line of the nearest frame outside the library.

    Args:
        depth: callers that are known to be inside, and not looked at.
    """
    frame = sys._getframe(depth)
    while True:
        name = frame.f_code.co_filename
        inside = _inside.get(name)
        if inside is None:
            inside = _inside[name] = name.startswith(_OURS)
        if not inside or frame.f_back is None:
            return name, frame.f_lineno
        frame = frame.f_back


_OURS = call_site.__code__.co_filename.removesuffix("recording.py")  # the library's folder
_inside: dict[str, bool] = {}  # whether a source file lies in it


def line_of(site: Site) -> str:
    """A site as editors know it: file:line."""
    return f"{site[0]}:{site[1]}"


def blame(error: CentellaError, what: str, site: Site) -> None:
    """Put the op and the line that recorded it before an error's text."""
    label = f"{what} (recorded at {line_of(site)}): "
    if error.args and not str(error.args[0]).startswith(label):
        error.args = (label + str(error.args[0]), *error.args[1:])
