"""Read-back: views of values, on the host; one submission a device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from centella.backends.base import Ticket
from centella.dtypes import Array, bf16, widen
from centella.op.op import get
from centella.record.history import happened
from centella.record.values import Value
from centella.runtime.device import Device
from centella.runtime.pending import Pending
from centella.runtime.prepare import Span
from centella.runtime.recorder import Seen
from centella.specs import Spec, strided

COMPACT = 64 << 10


def read_back(seen: Iterable[Seen], *, peek: bool = False) -> Pending[list[Array]]:
    """Values on the host, each seen as a Spec from one of its elements on.

    Args:
        peek: count the copies apart, and permit them where transfers are forbidden.

    Raises:
        ContractError: for a value of a batch that has not been executed.
        TransferForbidden: inside `ct.forbid("transfer")`.
    """
    wanted = list(seen)
    parts = [_compact(*one) for one in wanted]
    where: dict[Device, list[int]] = {}
    for index, (value, spec, _) in enumerate(parts):
        if spec.size:
            where.setdefault(value.device, []).append(index)
        else:
            value.device.recorder.materialise(value)
    tickets: list[Ticket] = []
    places: dict[int, tuple[Ticket, int]] = {}
    for device, indices in where.items():
        spans = [bytes_of(*parts[i]) for i in indices]
        tickets.append(device.executor.read(spans, peek=peek))
        moved = zip((wanted[i][0] for i in indices), (n for _, _, n in spans), strict=True)
        happened(moved, "peeked" if peek else "downloaded")
        places.update({i: (tickets[-1], n) for n, i in enumerate(indices)})

    def finish() -> list[Array]:
        out: list[Array] = []
        for index, (_, spec, _) in enumerate(parts):
            ticket, position = places.get(index, (None, 0))
            raw = np.empty(0, np.uint8) if ticket is None else ticket.data(position)
            out.append(decode(raw, spec))
        return out

    return Pending(tickets, finish)


def sparse(spec: Spec) -> bool:
    """Whether a view is better copied together on the device before it is read."""
    return spec.span > max(2 * spec.size, COMPACT // spec.dtype.itemsize)


def _compact(value: Value, spec: Spec, offset: int) -> Seen:
    waits = value.recording is not None and value.recording.explicit
    if waits or not sparse(spec):
        return value, spec, offset
    recorder = value.device.recorder
    (copy,) = recorder.record(get("copy"), [(value, spec, offset)], {}, recorder.implicit())
    return copy, copy.spec, 0


def bytes_of(value: Value, spec: Spec, offset: int) -> Span:
    """The bytes of a value that a view of it spans."""
    item = spec.dtype.itemsize
    return value, offset * item, spec.span * item


def decode(raw: Array, spec: Spec) -> Array:
    """Bytes that came back as the array that they are; a copy where they have gaps."""
    array = strided(raw, spec)
    if spec.dtype is bf16:
        return widen(array, bf16)
    return array if array.flags.c_contiguous else array.copy()
