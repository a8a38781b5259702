"""From a recording and its plan to a Submission: buffers, one packed write, launches, read-backs.

Everything here can fail (no memory, a forbidden transfer) and nothing here reaches the device's
queue, so that a failure leaves the recording as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field

from centella.backends.base import Array, Buffer, Launch, Load, Read, Submission
from centella.errors import CentellaError
from centella.ledger.call_sites import Site, blame
from centella.ledger.counts import permit
from centella.plan.build import Plan
from centella.record.recording import Recorded, Upload
from centella.record.values import DISCARDED, Place, Value
from centella.runtime.bind_window import bound
from centella.runtime.memory import Pool
from centella.runtime.pipelines import PipelineCache
from centella.runtime.workspace import Share
from centella.specs import Caps, Spec, strided

ARENA = 64 << 20
UNIT = 256

Span = tuple[Value, int, int]


class Outside(Struct, eq=False):
    """Values that a recording reads but does not compute, each with a slot.

    Attributes:
        index: id of each value to its slot.
        offsets: elements from each one's buffer to its start, once it has a buffer.
    """

    values: list[Value] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=list)

    def add(self, value: Value) -> None:
        """Give a value its slot."""
        if id(value) not in self.index:
            self.index[id(value)] = len(self.values)
            self.values.append(value)
            self.offsets.append(value.offset)


def outside_of(taken: Recorded) -> Outside:
    """What a recording reads: its uploads, then other values in order of first use."""
    found = Outside()
    for upload in taken.uploads:
        found.add(upload.value)
    index = found.index
    for node in taken.nodes:
        for value, _, _ in node.inputs:
            if value is not None and id(value) not in index:
                found.add(value)
    return found


class Results(Struct, eq=False):
    """The values that a recording makes and that something still refers to.

    Attributes:
        values: each of them, by its place.
        wanted: for each node, which of its values outlive the submission.
    """

    values: dict[Place, Value] = field(default_factory=dict)
    wanted: list[tuple[bool, ...]] = field(default_factory=list)

    def settle(self, slots: Sequence[Buffer], plan: Plan) -> None:
        """What is kept is ready, made by a plan; the rest is discarded."""
        for place, value in self.values.items():
            slot = plan.results.get(place)
            if slot is None:
                value.drop(DISCARDED)
            else:
                value.ready(slots[slot])
                value.made = plan

    def place_of(self, value: Value) -> Place | None:
        """Where a value is made, if it is made here."""
        return value.place if self.values.get(value.place) is value else None


def results_of(taken: Recorded, outputs: Iterable[Value] | None, reads: Sequence[Span]) -> Results:
    """Which values a recording must leave behind: those declared, else all that are in use."""
    kept = None if outputs is None else {id(v) for v in (*outputs, *(v for v, _, _ in reads))}
    found = Results()
    values, wanted = found.values, found.wanted
    for node in taken.nodes:
        each: tuple[bool, ...] = ()
        for reference in node.values:
            value = reference()
            if value is None:
                each += (False,)
                continue
            values[value.place] = value
            # What is stale nobody may use.
            stays = kept is None or id(value) in kept or value.is_version
            each += (stays and value.stale is None,)
        wanted.append(each)
    return found


class Planned(Struct, eq=False):
    """A plan with the pipelines of one cache, as it was then.

    Attributes:
        launches: the plan's, with their pipelines and those windows that users' kernels need.
        again: what the backend keeps for the next run of the launches.
        compiled: how many of the launches run a program that a driver compiled.
        narrowed: some are a user's kernels, with windows.
        loads, total: what each launch asks of the device, and all of them.
    """

    plan: Plan
    launches: list[Launch]
    again: dict[Any, Any] = field(default_factory=dict)
    compiled: int = 0
    narrowed: bool = False
    cache: PipelineCache | None = None
    generation: int = 0
    loads: Sequence[Load] = ()
    total: Load = Load()


def loads_of(made: Plan) -> list[Load]:
    """What each launch asks of a device: all that it sees once, and its share of the arithmetic."""
    flops: dict[int, float] = {}
    for node, launches in Counter(launch.node for launch in made.launches).items():
        form = made.nodes[node].form
        count = form.op.flops
        if count is not None:
            flops[node] = count(form) / launches
    return [
        Load(flops.get(launch.node, 0), sum(spec.storage_bytes for spec, _ in launch.views))
        for launch in made.launches
    ]


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
    made: Plan, taken: Recorded, pool: Pool, temporaries: Share | None = None
) -> list[Buffer]:
    """The buffers of a plan.

    Args:
        temporaries: where those come from that do not outlive the plan; default: the pool.

    Raises:
        OutOfMemoryError, LimitError, TransferForbidden: names the op and line it was for.
    """
    inside: Pool | Share = pool if temporaries is None else temporaries
    kept = set(made.results.values())
    buffers: list[Buffer] = []
    for nbytes, maker in zip(made.buffers, made.makers, strict=True):
        stays = made.externals + len(buffers) in kept
        try:
            buffers.append((pool if stays else inside).allocate(nbytes))
        except CentellaError as error:
            blame(error, taken.nodes[maker].op.name, taken.nodes[maker].site)
            raise
    return buffers


class Packed(Struct, eq=False):
    """A recording's uploads in the buffers that they share.

    Attributes:
        where: slot of each upload's value to its buffer.
        places: each upload with its buffer and the element it begins at.
        writes: (slot, host bytes), as a Submission has them.
    """

    where: dict[int, Buffer] = field(default_factory=dict)
    places: list[tuple[Upload, Buffer, int]] = field(default_factory=list)
    writes: list[tuple[int, Array]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes written, padding included."""
        return sum(data.nbytes for _, data in self.writes)


def pack(uploads: Sequence[Upload], outside: Outside, pool: Pool, most: int) -> Packed:
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
            index = outside.index[id(upload.value)]
            outside.offsets[index] = start // upload.value.spec.dtype.itemsize
            packed.where[index] = arena
            packed.places.append((upload, arena, outside.offsets[index]))
            start += _rounded(upload.data.nbytes)
        packed.writes.append((outside.index[id(group[0].value)], whole))
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
        slots: the buffers that launches refer to by index.
        sites: the line that recorded each node.
        plan: None where nothing is computed.
        loads, total: what each launch asks of the device, and all of them.
        again: what the backend keeps for the next run of the launches.
        prepared: what `Backend.prepare` made of the launches, if they are run again.
    """

    uploads: Packed
    slots: list[Buffer]
    sites: list[Site]
    plan: Plan | None = None
    launches: list[Launch] = field(default_factory=list)
    loads: Sequence[Load] = ()
    total: Load = Load()
    again: dict[Any, Any] = field(default_factory=dict)
    prepared: Any = None

    @property
    def allocated(self) -> list[Buffer]:
        """The buffers that the plan asked for: results and temporaries."""
        return [] if self.plan is None else self.slots[self.plan.externals :]

    def slots_of(
        self, values: Iterable[Value], results: Results, outside: Outside
    ) -> dict[int, tuple[int, int]]:
        """By id of each value that it computes or reads: its slot, and its first element there."""
        slots: dict[int, tuple[int, int]] = {}
        for value in values:
            place = results.place_of(value)
            if place is not None and self.plan is not None:
                slots[id(value)] = self.plan.results[place], 0
            elif id(value) in outside.index:
                slot = outside.index[id(value)]
                slots[id(value)] = slot, outside.offsets[slot]
        return slots

    def submission(self, uploads: list[tuple[int, Array]]) -> Submission:
        """Its launches after a write: (slot, bytes) each; on its buffers, and more if need be."""
        return Submission(
            self.slots, uploads, self.launches, prepared=self.prepared, again=self.again,
            loads=self.loads, total=self.total,
        )  # fmt: skip


def add_reads(
    work: Submission, reads: Sequence[Span], slots: dict[int, tuple[int, int]], unit: int
) -> list[tuple[int, int]]:
    """Add read-backs to a submission.

    Args:
        reads: (value, first byte, bytes), the byte counted from the value's own start.
        slots: id of each value that the submission makes or uploads to its slot and the element
            it begins at; other values are ready.
        unit: bytes that a read-back starts and ends on a multiple of.

    Returns:
        For each, which of the bytes that come back are meant: first and number.
    """
    meant: list[tuple[int, int]] = []
    for value, first, nbytes in reads:
        slot, offset = slots.get(id(value), (len(work.slots), value.offset))
        if slot == len(work.slots):
            work.slots.append(value.require())
        first += offset * value.spec.dtype.itemsize
        start = first // unit * unit
        end = -(-(first + nbytes) // unit) * unit
        work.reads.append(Read(slot, start, end - start))
        meant.append((first - start, nbytes))
    return meant


def storage_of(data: Array, spec: Spec, fill: int = 0) -> Array:
    """Host data as the bytes of a device layout: a copy, pads filled with a byte.

    Args:
        data: of the spec's shape, in the dtype that holds its bytes on the host.
    """
    total = spec.storage_bytes
    raw = np.full(total, fill, np.uint8) if total != spec.nbytes else np.empty(total, np.uint8)
    strided(raw, spec)[...] = data
    return raw
