"""What has happened to a value: how it came to be, and every time since that it left the device.

How it came to be is worked out when somebody asks, from what the value refers to anyway. What
happens later is counted by kind, name and line: a loop is one event with a number of times, so a
history stays short and its totals stay true.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from centella.errors import ContractError
from centella.ledger.call_sites import call_site, line_of
from centella.record.values import DISCARDED, FAILED, PENDING, READY, Value

LINES = 64  # events that are told apart; further lines are counted together
CAME = {"upload": "uploaded", "import_buffer": "imported", "empty": "reserved"}
COPIES = ("copy", "reshape")


class Event(Struct, frozen=True):
    """One thing that happened to a tensor's data, perhaps several times.

    Attributes:
        kind: how it came to be: "uploaded", "imported", "reserved" (content undefined), "computed",
            "copied" (on the device), "replayed"; or "recorded" (not run yet), "discarded" (not
            kept, or part of a fused launch), "failed". What happened since: "downloaded", "peeked",
            "launched" (a kernel of the application's).
        what: the op, kernel or replayed function, where there is one.
        line: file:line that asked for it, or "" where lines are counted together.
        launches: of kernels; nbytes: that crossed between host and device; both in all.
        times: how often it happened.
    """

    kind: str
    what: str
    line: str
    launches: int = 0
    nbytes: int = 0
    times: int = 1

    def __str__(self) -> str:
        extra = [f"{self.nbytes:,} bytes"] if self.nbytes else []
        extra += [f"{self.launches} launch{'es' * (self.launches > 1)}"] if self.launches else []
        extra += [f"{self.times} times"] if self.times > 1 else []
        what = f" {self.what}" if self.what else ""
        at = f" at {self.line}" if self.line else ""
        return f"{self.kind}{what}{at}" + (f" ({', '.join(extra)})" if extra else "")


class Replayed(Struct, frozen=True):
    """In place of a plan: what a replay of `name` says of what it makes."""

    name: str
    op: str
    launches: int


Key = tuple[str, str, str]  # kind, what, line
Tally = dict[Key, tuple[int, int]]  # times, bytes in all


def happened(values: Iterable[tuple[Value, int]], kind: str, what: str = "") -> None:
    """Note that something happened to values now.

    Args:
        values: with the bytes of each that moved.
    """
    line = line_of(call_site())
    for value, nbytes in values:
        with value.device.lock:
            if value.events is None:
                value.events = {}
            events: Tally = value.events
            key = (kind, what, line)
            if key not in events and len(events) >= LINES:
                key = (kind, "", "")
            times, total = events.get(key, (0, 0))
            events[key] = (times + 1, total + nbytes)


def launched(value: Value, name: str) -> None:
    """Note that a kernel of the application's was launched on a value.

    Raises:
        ContractError: it is not in device memory, or the kernel has no name.
    """
    if not name or not isinstance(name, str):
        raise ContractError(f"record_launch: expected the name of a kernel, got {name!r}")
    if value.state != READY:
        raise ContractError(
            f"record_launch: {name} cannot have run on a tensor that is {value.state}; "
            f".native computes it"
        )
    happened([(value, 0)], "launched", name)


def history(value: Value) -> tuple[Event, ...]:
    """What has happened to a value, in the order in which each first happened."""
    with value.device.lock:
        later = list((value.events or {}).items())
    return (_beginning(value), *(_event(key, *tally) for key, tally in later))


def _event(key: Key, times: int, nbytes: int) -> Event:
    kind, what, line = key
    return Event(kind, what, line, times if kind == "launched" else 0, nbytes, times)


def _beginning(value: Value) -> Event:
    line, plan = line_of(value.site), value.computed_by
    if value.state in (DISCARDED, FAILED):
        return Event(value.state, value.what, line)
    if value.state == PENDING:
        return Event("recorded", value.what, line)
    if isinstance(plan, Replayed):
        return Event("replayed", f"{plan.name}: {plan.op}", line, plan.launches)
    if plan is not None:
        op = plan.label(value.origin[0])
        kind = "copied" if op in COPIES else "computed"
        return Event(kind, op, line, plan.launches_of(value.origin[0]))
    nbytes = value.spec.storage_bytes if value.what == "upload" else 0
    return Event(CAME.get(value.what, "reserved"), "", line, 0, nbytes)
