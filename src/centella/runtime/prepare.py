"""From a recording and its plan to a Submission: buffers, one packed write, launches, read-backs.

Everything here can fail (no memory, a forbidden transfer) and nothing here reaches the device's
queue, so that a failure leaves the recording as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field

from centella.backends.base import Array, Buffer, Launch, Read, Submission
from centella.errors import CentellaError
from centella.ledger.call_sites import Site, blame
from centella.ledger.counts import permit
from centella.plan.plan import Plan
from centella.record.recording import Recorded, Upload
from centella.record.values import DISCARDED, Origin, Value
from centella.runtime.bind_window import bound
from centella.runtime.memory import Pool
from centella.specs import Caps

if TYPE_CHECKING:
    from centella.runtime.plans import Planned

ARENA = 64 << 20
UNIT = 256

Span = tuple[Value, int, int]


class Boundary(Struct, eq=False):
    """What a recording reads but does not compute, and what it leaves behind.

    Attributes:
        slots: of each outside value: uploads, then others in order of first use.
        offsets: elements from each one's buffer to its start, once it has a buffer.
        results: the values that something still refers to, by origin.
        wanted: for each node, which of its values outlive the submission.
    """

    slots: dict[Value, int] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=list)
    results: dict[Origin, Value] = field(default_factory=dict)
    wanted: list[tuple[bool, ...]] = field(default_factory=list)

    def add(self, value: Value) -> None:
        """Give an outside value its slot."""
        if value not in self.slots:
            self.slots[value] = len(self.offsets)
            self.offsets.append(value.offset)

    def origin_of(self, value: Value) -> Origin | None:
        """Where a value is computed, if it is computed here."""
        return value.origin if self.results.get(value.origin) is value else None

    def settle(self, buffers: Sequence[Buffer], plan: Plan) -> None:
        """What is kept is ready, made by a plan; the rest is discarded."""
        for origin, value in self.results.items():
            slot = plan.results.get(origin)
            if slot is None:
                value.drop(DISCARDED)
            else:
                value.ready(buffers[slot])
                value.computed_by = plan


def boundary_of(
    taken: Recorded, outputs: Iterable[Value] | None = None, reads: Sequence[Span] = ()
) -> Boundary:
    """What a recording reads, and which values it must leave behind.

    Args:
        outputs: those to leave, with those of `reads`; default: all that are in use.
    """
    kept = None if outputs is None else {*outputs, *(value for value, _, _ in reads)}
    boundary = Boundary()
    for upload in taken.uploads:
        boundary.add(upload.value)
    slots, results, wanted = boundary.slots, boundary.results, boundary.wanted
    for node in taken.nodes:
        for operand, _, _ in node.inputs:
            if operand is not None and operand not in slots:
                boundary.add(operand)
        each: tuple[bool, ...] = ()
        for reference in node.values:
            value = reference()
            if value is None:
                each += (False,)
                continue
            results[value.origin] = value
            # What is stale nobody may use.
            stays = kept is None or value in kept or value.is_version
            each += (stays and value.stale is None,)
        wanted.append(each)
    return boundary


def launches_of(
    planned: Planned, offsets: Sequence[int], slots: Sequence[Buffer], taken: Recorded, caps: Caps
) -> list[Launch]:
    """The launches of a plan on the buffers that it runs with; its own list where none changes.

    Args:
        offsets: elements from each external buffer to its first.

    Raises:
        LimitError: one would see more of a buffer than the device can bind.
    """
    most = caps.max_binding
    large = most < caps.max_buffer and any([buffer.nbytes > most for buffer in slots])
    if not (planned.narrowed or large or any(offsets)):
        return planned.launches
    launches: list[Launch] = []
    for launch, compiled in zip(planned.plan.launches, planned.launches, strict=True):
        try:
            launches.append(bound(launch, compiled, offsets, slots, caps))
        except CentellaError as error:
            taken.nodes[launch.node].refuse(error)
            raise
    same = all([a is b for a, b in zip(launches, planned.launches, strict=True)])
    return planned.launches if same else launches


def allocate(
    plan: Plan, taken: Recorded, pool: Pool, temporaries: Callable[[int], Buffer] | None = None
) -> list[Buffer]:
    """The buffers of a plan.

    Args:
        temporaries: gives those that do not outlive the plan; default: the pool.

    Raises:
        OutOfMemoryError, LimitError, TransferForbidden: names the op and line it was for.
    """
    inside = temporaries or pool.allocate
    kept = set(plan.results.values())
    buffers: list[Buffer] = []
    for nbytes, maker in zip(plan.buffers, plan.makers, strict=True):
        stays = plan.externals + len(buffers) in kept
        try:
            buffers.append((pool.allocate if stays else inside)(nbytes))
        except CentellaError as error:
            blame(error, taken.nodes[maker].op.name, taken.nodes[maker].site)
            raise
    return buffers


class Packed(Struct, eq=False):
    """A recording's uploads in the buffers that they share.

    Attributes:
        buffers: by the slot of each upload's value.
        uploads: each with its buffer and the element it begins at.
        writes: (slot, host bytes), as a Submission has them.
    """

    buffers: dict[int, Buffer] = field(default_factory=dict)
    uploads: list[tuple[Upload, Buffer, int]] = field(default_factory=list)
    writes: list[tuple[int, Array]] = field(default_factory=list)


def pack(uploads: Sequence[Upload], boundary: Boundary, pool: Pool, most: int) -> Packed:
    """Uploads packed into arenas of at most ARENA bytes: one write each, in most cases one.

    Raises:
        TransferForbidden: inside `forbid("transfer")`.
        OutOfMemoryError: there is no room.
    """
    packed = Packed()
    if uploads:
        permit("upload", "uploads")
    for group in _arenas(uploads, min(ARENA, most)):
        total = sum(_rounded(u.data.nbytes) for u in group)
        try:
            arena = pool.allocate(total)
        except CentellaError as error:
            blame(error, "upload", group[0].value.site)
            raise
        whole = group[0].data if len(group) == 1 else np.zeros(total, np.uint8)
        start = 0
        for upload in group:
            if whole is not upload.data:
                whole[start : start + upload.data.nbytes] = upload.data
            slot = boundary.slots[upload.value]
            boundary.offsets[slot] = start // upload.value.spec.dtype.itemsize
            packed.buffers[slot] = arena
            packed.uploads.append((upload, arena, boundary.offsets[slot]))
            start += _rounded(upload.data.nbytes)
        packed.writes.append((boundary.slots[group[0].value], whole))
    return packed


def _rounded(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT


def _arenas(uploads: Sequence[Upload], most: int) -> list[list[Upload]]:
    groups: list[list[Upload]] = []
    room = 0
    for upload in uploads:
        nbytes = _rounded(upload.data.nbytes)
        if not groups or nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(upload)
        room -= nbytes
    return groups


class Executable(Struct, eq=False):
    """A plan with its buffers and launches: a recording uses one once, a replay keeps one.

    Attributes:
        uploads: what is written with the first submission.
        call_sites: the line that recorded each node.
        work: its buffers and launches, as the backend gets them.
        plan: None where nothing is computed.
    """

    uploads: Packed
    call_sites: list[Site]
    work: Submission
    plan: Plan | None = None

    @property
    def allocated(self) -> list[Buffer]:
        """The buffers that the plan asked for: results and temporaries."""
        return [] if self.plan is None else self.work.slots[self.plan.externals :]

    def slot_of(self, value: Value, boundary: Boundary) -> tuple[int, int] | None:
        """The slot of a value that it computes or reads, and its first element there."""
        origin = boundary.origin_of(value)
        if origin is not None and self.plan is not None:
            return self.plan.results[origin], 0
        slot = boundary.slots.get(value)
        return None if slot is None else (slot, boundary.offsets[slot])

    def add_reads(
        self, reads: Sequence[Span], boundary: Boundary, unit: int
    ) -> list[tuple[int, int]]:
        """Add read-backs.

        Args:
            reads: (value, first byte, bytes), the byte counted from the value's own start.
            unit: bytes that a read-back starts and ends on a multiple of.

        Returns:
            For each, which of the bytes that come back are meant: first and number.
        """
        meant: list[tuple[int, int]] = []
        slots = self.work.slots
        for value, first, nbytes in reads:
            known = self.slot_of(value, boundary)
            if known is None:
                known = len(slots), value.offset
                slots.append(value.require())
            slot, offset = known
            first += offset * value.spec.dtype.itemsize
            start = first // unit * unit
            end = -(-(first + nbytes) // unit) * unit
            self.work.reads.append(Read(slot, start, end - start))
            meant.append((first - start, nbytes))
        return meant
