"""Nodes recorded on a device, in order; everything here happens under the device's lock."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from threading import get_ident
from typing import Any
from weakref import ref

from msgspec import Struct

from centella.dtypes import Array
from centella.errors import CentellaError, DeviceError, OutOfMemoryError, TransferForbidden
from centella.host.interrupts import guard, uninterrupted
from centella.ledger.call_sites import Site, blame
from centella.ledger.counts import Ledger, began
from centella.op.op import Form, Op
from centella.record.values import FAILED, OUTSIDE, Cell, Origin, Value
from centella.specs import Spec

# A value as a node reads it, seen as its form says: (value, origin, first element). What the same
# recording computes is named by its `origin`, so that a recording does not keep its own values
# alive; any other value is referred to, with OUTSIDE as its origin.
Operand = tuple["Value | None", Origin, int]


class Node(Struct, eq=False):
    """One recorded operation.

    Attributes:
        refused: it was found that it cannot be run.
    """

    form: Form[Any]
    inputs: list[Operand]
    values: list[ref[Value]]
    site: Site
    refused: bool = False

    @property
    def op(self) -> Op[Any]:
        """The operation."""
        return self.form.op

    @property
    def alive(self) -> list[Value]:
        """The values that something refers to."""
        return [value for reference in self.values if (value := reference()) is not None]

    def refuse(self, error: CentellaError) -> None:
        """It cannot be run, because of an error, which gets its name and line."""
        blame(error, self.op.name, self.site)
        self.refused = True


PASSING = (DeviceError, OutOfMemoryError, TransferForbidden)


class Upload(Struct, eq=False):
    """Host data recorded for the next submission's one write: bytes in the value's layout."""

    value: Value
    data: Array


class Recording:
    """Operations and uploads in order, on one device and one thread.

    Attributes:
        explicit: it belongs to a batch and is run by its `execute` alone, or to a capture.
        batch: refers to that batch, weakly; None where it belongs to none.
        aside: it has been taken out of another, as it could not be run; operands may be pending.
        open: how many of its `with` blocks have begun and not ended.
        scopes: the ledgers inside which something was recorded lazily.
        generation: how often it was taken to be run.
        host_updates: what a captured function notes of States, for its replays; None elsewhere.
        last_plan: what ran last, if anything did.
        begun: when the first node or upload was recorded, in ns, if anybody times; else 0.
    """

    def __init__(self, device: Any, explicit: bool) -> None:
        self.device: Any = device
        self.explicit: bool = explicit
        self.batch: ref[Any] | None = None
        self.aside: bool = False
        self.thread: int = get_ident()
        self.open: int = 0
        self.generation: int = 0
        self.host_updates: list[tuple[Cell, Callable[[Any], Any]]] | None = None
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

    @uninterrupted
    def __enter__(self) -> None:
        """Make it the current recording of this thread and task."""
        guard()
        self.open += 1
        _current.set((*_current.get(), (self, get_ident())))

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        """Undo the last `__enter__`."""
        self.open -= 1
        stack = list(_current.get())
        for index in range(len(stack) - 1, -1, -1):
            if stack[index][0] is self:
                del stack[index]
                break
        _current.set(tuple(stack))

    def add(self, form: Form[Any], inputs: list[Operand], site: Site) -> list[Value]:
        """Record a node; returns its values."""
        nodes, device, name = self.nodes, self.device, form.op.name
        index = len(nodes)
        if not index:
            guard()
            self.begun = began()
        values: list[Value] = []
        for spec in form.outputs:
            values.append(Value(spec, device, name, self, (index, len(values)), site))
        nodes.append(Node(form, inputs, list(map(ref, values)), site))
        self.result_bytes += form.nbytes
        return values

    def add_upload(self, spec: Spec, data: Array, site: Site) -> Value:
        """Record host data; returns its value."""
        value = Value(spec, self.device, "upload", self, OUTSIDE, site)
        if self.empty:
            guard()
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

    def give_up(self, error: CentellaError) -> list[Value]:
        """Take out the nodes that were refused, and what depends on them.

        They become a recording of their own, which runs when one of them is asked for. But what
        reads or changes a State has failed for good: later changes do not wait for it.

        Returns:
            Their values. States that they were to change are at the versions before.
        """
        if isinstance(error, PASSING):  # it may be another next time
            for node in self.nodes:
                node.refused = False
            return []
        aside = Recording(self.device, explicit=False)
        aside.aside = True
        nodes, self.nodes = self.nodes, []
        where: list[Recording | None] = []  # each node is now
        numbers: list[int] = []
        abandoned: list[Value] = []
        for node in nodes:
            sources = [origin[0] for value, origin, _ in node.inputs if value is None]
            target: Recording | None = self
            if node.refused or any(where[i] is not self for i in sources):
                operands = [value for value, _, _ in node.inputs if value is not None]
                lost = node.op.mutates or any(value.is_version for value in operands)
                lost = lost or any(nodes[i].op.mutates or where[i] is None for i in sources)
                target = None if lost else aside
                abandoned += node.alive
            where.append(target)
            numbers.append(0 if target is None else len(target.nodes))
            if target is None:
                continue
            node.refused = False
            inputs: list[Operand] = []
            for value, origin, offset in node.inputs:
                moved = (numbers[origin[0]], origin[1])
                if value is not None:
                    inputs.append((value, origin, offset))
                elif where[origin[0]] is target:
                    inputs.append((None, moved, offset))
                else:
                    inputs.append((self._value_of(nodes[origin[0]], moved), OUTSIDE, offset))
            node.inputs = inputs
            for value in node.alive:
                value.recording, value.origin = target, (numbers[-1], value.origin[1])
            target.nodes.append(node)
        self.result_bytes = sum(node.form.nbytes for node in self.nodes)
        for node, target in zip(nodes, where, strict=True):
            for value in node.alive if target is None else ():
                value.refuse(error)
                if value.cell is not None:
                    value.cell.read_by(self)  # what stays may read the version that is back
        return abandoned

    def _value_of(self, node: Node, origin: Origin) -> Value:
        """What a node makes, for an operand in another recording."""
        value = node.values[origin[1]]()
        if value is None:
            spec = node.form.outputs[origin[1]]
            value = Value(spec, self.device, node.op.name, self, origin, node.site)
            node.values[origin[1]] = ref(value)
        return value

    @uninterrupted
    def lapse(self) -> bool:
        """Fail if the batch is gone that alone would run it; whether that is so."""
        if self.batch is None or self.batch() is not None:
            return False
        with self.device.lock:
            self.fail("its batch was dropped before execute()")
        return True

    @uninterrupted
    def fail(self, reason: str = "its recording was dropped") -> None:
        """Drop everything recorded: values of it raise when used, States are as before it."""
        self.take().fail(reason)


class Recorded(Struct, eq=False):
    """What a recording held."""

    nodes: list[Node]
    uploads: list[Upload]
    result_bytes: int = 0

    def _values(self) -> list[Value]:
        values = [value for node in self.nodes for value in node.alive]
        return [*values, *(u.value for u in self.uploads)]

    @uninterrupted
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
