"""Nodes recorded on a device, and the values they make.

A `Value` is immutable data on a device: pending until its recording is run, then ready. A tensor
views a value; a recording refers to its values weakly, so that what no tensor refers to any more
need not be kept.
"""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from centella.submission import Buffer
from centella.errors import ContractError, DiscardedError
from centella.op import Attrs, Op
from centella.specs import Spec

PENDING, READY, DISCARDED, FAILED = "pending", "ready", "discarded", "failed"
_OURS = __name__.rsplit(".", 1)[0] + "."


class Value:
    """Data on a device, or data that a recorded node will make."""

    __slots__ = (
        "__weakref__", "buffer", "device", "history", "offset", "place", "recording", "site", "spec",
        "state", "what",
    )  # fmt: skip

    def __init__(self, spec: Spec, device: Any, what: str) -> None:
        self.spec = spec
        self.device = device
        self.what = what
        self.site = ""
        self.state = PENDING
        self.recording: Recording | None = None
        self.place = (0, 0)
        self.buffer: Buffer | None = None
        self.offset = 0
        self.history: list[str] = []

    def ready(self, buffer: Buffer, offset: int = 0) -> None:
        """The data is (or, in submission order, will be) in this buffer."""
        self.buffer = buffer
        self.offset = offset
        self.state = READY
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
        where = f"{self.what} (recorded at {self.site})" if self.site else self.what
        if self.state == DISCARDED:
            raise DiscardedError(
                f"{where} was not kept: declare it in execute(outputs=[...]) or batch.keep(t)"
            )
        if self.state == FAILED:
            raise ContractError(f"{where} was never computed: its batch ended with an exception")
        raise ContractError(f"{where} is not computed yet: call execute() on its batch first")


@dataclass(frozen=True, slots=True)
class Operand:
    """A value as a node reads it: seen as `spec`, from element `offset` of the value.

    A value of the same recording is named by its `place` (node, output), so that a recording does
    not keep its own values alive; any other value is held.
    """

    value: Value | None
    place: tuple[int, int]
    spec: Spec
    offset: int


@dataclass(slots=True)
class Node:
    """One recorded operation."""

    op: Op
    inputs: tuple[Operand, ...]
    attrs: Attrs
    outputs: tuple[Spec, ...]
    values: tuple[weakref.ref[Value], ...]
    site: str


@dataclass(slots=True)
class Upload:
    """Host data recorded for the next submission's one write: bytes in the value's layout."""

    value: Value
    data: np.ndarray[Any, Any]


class Recording:
    """Operations and uploads in order, on one device and one thread."""

    def __init__(self, device: Any, explicit: bool) -> None:
        self.device = device
        self.explicit = explicit
        self.thread = threading.get_ident()
        self.nodes: list[Node] = []
        self.uploads: list[Upload] = []
        self.temporary_bytes = 0

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def empty(self) -> bool:
        """True when there is nothing to submit."""
        return not self.nodes and not self.uploads

    def operand(self, value: Value, spec: Spec, offset: int) -> Operand:
        """`value` as a node of this recording reads it."""
        if value.state == PENDING and value.recording is self and value.site:
            return Operand(None, value.place, spec, offset)
        if value.state != PENDING or value.recording is not self:
            value.require()
        return Operand(value, (-1, 0), spec, offset)

    def add(
        self, op: Op, inputs: tuple[Operand, ...], attrs: Attrs, outs: tuple[Spec, ...]
    ) -> tuple[Value, ...]:
        """Record a node; returns its values."""
        site = call_site()
        values = []
        for position, spec in enumerate(outs):
            value = Value(spec, self.device, op.name)
            value.site = site
            value.recording = self
            value.place = (len(self.nodes), position)
            values.append(value)
            self.temporary_bytes += spec.storage_bytes
        made = tuple(values)
        self.nodes.append(Node(op, inputs, attrs, outs, tuple(map(weakref.ref, made)), site))
        return made

    def take(self) -> Recorded:
        """Everything recorded so far; the recording starts anew."""
        taken = Recorded(self.nodes, self.uploads)
        self.nodes, self.uploads = [], []
        self.temporary_bytes = 0
        return taken

    def restore(self, taken: Recorded) -> None:
        """Put back what `take` gave, after a failure before submission."""
        self.nodes = taken.nodes + self.nodes
        self.uploads = taken.uploads + self.uploads

    def fail(self) -> None:
        """Drop everything recorded: values of it raise when used."""
        taken = self.take()
        for node in taken.nodes:
            for ref in node.values:
                value = ref()
                if value is not None:
                    value.state = FAILED
        for upload in taken.uploads:
            upload.value.state = FAILED


@dataclass(slots=True)
class Recorded:
    """What a recording held."""

    nodes: list[Node]
    uploads: list[Upload]


def call_site() -> str:
    """File and line of the nearest frame outside the library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
