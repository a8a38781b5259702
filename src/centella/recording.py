"""Nodes recorded on a device, and the values they make.

A `Value` is immutable data on a device: pending until its recording is run, then ready. A tensor
views a value; a recording refers to its values weakly, so that what no tensor refers to any more
need not be kept. Everything here happens under the device's lock.
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from centella.errors import CentellaError, ContractError, DiscardedError
from centella.ledger import Ledger
from centella.op import Attrs, Op
from centella.specs import Spec
from centella.submission import Buffer

PENDING, READY, DISCARDED, FAILED = "pending", "ready", "discarded", "failed"
Place = tuple[int, int]
Site = tuple[str, int]
NOWHERE: Site = ("", 0)
OUTSIDE: Place = (-1, 0)
_OURS = __name__.rsplit(".", 1)[0] + "."


class Value:
    """Data on a device, or data that a recorded node will make.

    Attributes:
        place: (node, output) in its recording; `OUTSIDE` for what no node makes.
        offset: elements from the buffer's start.
        reason: why it will never be computed, when it has failed.
    """

    __slots__ = (
        "__weakref__", "buffer", "device", "offset", "place", "reason", "recording", "site", "spec",
        "state", "what",
    )  # fmt: skip

    def __init__(
        self, spec: Spec, device: Any, what: str, recording: Recording | None = None,
        place: Place = OUTSIDE, site: Site = NOWHERE,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.device = device
        self.what = what
        self.recording = recording
        self.place = place
        self.site = site
        self.state = PENDING
        self.buffer: Buffer | None = None
        self.offset = 0
        self.reason = ""

    def ready(self, buffer: Buffer, offset: int = 0) -> None:
        """The data is (or, in submission order, will be) in this buffer."""
        self.buffer = buffer
        self.offset = offset
        self.state = READY
        self.recording = None

    def drop(self, state: str, reason: str = "") -> None:
        """It will not be computed: DISCARDED or FAILED."""
        self.state = state
        self.reason = reason
        self.recording = None

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
            raise ContractError(f"{label} was never computed: {self.reason}")
        raise ContractError(f"{label} is not computed yet: call execute() on its batch first")


@dataclass(slots=True, eq=False)
class Form:
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


class Operand(NamedTuple):
    """A value as a node reads it: seen as `spec`, from element `offset` of the value.

    A value of the same recording is named by its `place`, so that a recording does not keep its
    own values alive; any other value is held.
    """

    value: Value | None
    place: Place
    offset: int
    spec: Spec


@dataclass(slots=True)
class Node:
    """One recorded operation."""

    form: Form
    inputs: tuple[Operand, ...]
    values: tuple[weakref.ref[Value], ...]
    site: Site

    @property
    def op(self) -> Op:
        """The operation."""
        return self.form.op

    @property
    def attrs(self) -> Attrs:
        """Its attributes, by name."""
        return self.form.attrs

    @property
    def outputs(self) -> tuple[Spec, ...]:
        """How its results lie in memory."""
        return self.form.outputs


@dataclass(slots=True)
class Upload:
    """Host data recorded for the next submission's one write: bytes in the value's layout."""

    value: Value
    data: np.ndarray[Any, Any]


class Recording:
    """Operations and uploads in order, on one device and one thread.

    Attributes:
        explicit: it belongs to a batch and is run by its `execute` alone.
        open: how many `with` blocks it is the current recording of.
        scopes: the ledgers inside which something was recorded lazily.
        last_plan: what ran last, if anything did.
    """

    def __init__(self, device: Any, explicit: bool) -> None:
        self.device = device
        self.explicit = explicit
        self.thread = threading.get_ident()
        self.open = 0
        self.scopes: set[Ledger] = set()
        self.last_plan: Any = None
        self.nodes: list[Node] = []
        self.uploads: list[Upload] = []
        self.result_bytes = 0
        self.upload_bytes = 0

    @property
    def empty(self) -> bool:
        """True when there is nothing to submit."""
        return not self.nodes and not self.uploads

    def operand(self, value: Value, spec: Spec, offset: int) -> Operand:
        """`value` as a node of this recording reads it.

        Raises:
            ContractError: the value has failed, was discarded, or waits for another batch.
        """
        if value.state == PENDING and value.recording is self:
            if value.place is OUTSIDE:
                return Operand(value, OUTSIDE, offset, spec)
            return Operand(None, value.place, offset, spec)
        value.require()
        return Operand(value, OUTSIDE, offset, spec)

    def add(self, form: Form, inputs: tuple[Operand, ...], site: Site) -> tuple[Value, ...]:
        """Record a node; returns its values."""
        index = len(self.nodes)
        made = tuple([
            Value(spec, self.device, form.op.name, self, (index, position), site)
            for position, spec in enumerate(form.outputs)
        ])  # fmt: skip
        self.nodes.append(Node(form, inputs, tuple([weakref.ref(v) for v in made]), site))
        self.result_bytes += form.nbytes
        return made

    def add_upload(self, spec: Spec, data: np.ndarray[Any, Any], site: Site) -> Value:
        """Record host data; returns its value."""
        value = Value(spec, self.device, "upload", self, OUTSIDE, site)
        self.uploads.append(Upload(value, data))
        self.upload_bytes += data.nbytes
        return value

    def take(self) -> Recorded:
        """Everything recorded so far; the recording starts anew."""
        taken = Recorded(self.nodes, self.uploads, self.result_bytes, self.upload_bytes)
        self.nodes, self.uploads = [], []
        self.result_bytes = self.upload_bytes = 0
        return taken

    def restore(self, taken: Recorded) -> None:
        """Put back what `take` gave, after a failure before submission."""
        assert self.empty
        self.nodes, self.uploads = taken.nodes, taken.uploads
        self.result_bytes, self.upload_bytes = taken.result_bytes, taken.upload_bytes

    def fail(self, reason: str = "its recording was dropped") -> None:
        """Drop everything recorded: values of it raise when used."""
        self.take().fail(reason)


@dataclass(slots=True)
class Recorded:
    """What a recording held."""

    nodes: list[Node]
    uploads: list[Upload]
    result_bytes: int = 0
    upload_bytes: int = 0

    def fail(self, reason: str) -> None:
        """Give it up: its values raise when used."""
        values = [ref() for node in self.nodes for ref in node.values]
        for value in (*values, *(u.value for u in self.uploads)):
            if value is not None:
                value.drop(FAILED, reason)


# The current recordings of this thread and task, innermost last. A task inherits its parent's;
# one that has been closed since, or was opened by another thread, is passed over.
_current: ContextVar[tuple[tuple[Recording, int], ...]] = ContextVar("centella_batches", default=())


class OpenRecordings:
    """The recordings that `with` blocks of this thread and task have opened on a device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def innermost(self) -> Recording | None:
        """The one that operations are recorded on."""
        stack = _current.get()
        if stack:
            thread = threading.get_ident()
            for recording, owner in reversed(stack):
                if recording.device is self._device and owner == thread and recording.open:
                    return recording
        return None

    def append(self, recording: Recording) -> None:
        """Make a recording the current one."""
        recording.open += 1
        _current.set((*_current.get(), (recording, threading.get_ident())))

    def remove(self, recording: Recording) -> None:
        """Undo the last `append` of a recording."""
        recording.open -= 1
        stack = list(_current.get())
        for index in range(len(stack) - 1, -1, -1):
            if stack[index][0] is recording:
                del stack[index]
                break
        _current.set(tuple(stack))


def innermost() -> Recording | None:
    """The current recording on any device."""
    thread = threading.get_ident()
    for recording, owner in reversed(_current.get()):
        if owner == thread and recording.open:
            return recording
    return None


def call_site() -> Site:
    """File and line of the nearest frame outside the library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def line_of(site: Site) -> str:
    """A site as editors know it: file:line."""
    return f"{site[0]}:{site[1]}"


def blame(error: CentellaError, what: str, site: Site) -> None:
    """Put the op and the line that recorded it before an error's text."""
    label = f"{what} (recorded at {line_of(site)}): "
    if error.args and not str(error.args[0]).startswith(label):
        error.args = (label + str(error.args[0]), *error.args[1:])
