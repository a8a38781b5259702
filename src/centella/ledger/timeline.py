"""What happened when: spans on the host, launches on devices, and both as a trace file.

A timeline exists only for `ct.ledger(timing=True)`; nothing here is called where none is open.

Device clocks have zeros of their own: the launches of a device are shifted, all by the same amount,
so that none begins before it was submitted. The file has the Trace Event Format, which
ui.perfetto.dev and chrome://tracing open. Source: the Trace Event Format document of Chromium.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, deque
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Protocol

from msgspec import Struct

from centella.errors import CentellaError
from centella.host.files import replaced

Stamps = Sequence[tuple[int, int]]
Args = dict[str, str | int]  # what is said of an event
Event = dict[str, object]  # as the file has it
HOST = 1  # process ids of the file; devices follow


class TimedLaunch(Struct, frozen=True):
    """One launch: the program that ran, the op it belongs to and the line that recorded that."""

    kernel: str
    op: str
    line: str


class Timed(Protocol):
    """A submission whose launches were timed."""

    def done(self) -> bool:
        """True once the device has finished it."""
        ...

    def times(self) -> Stamps | None:
        """Begin and end of each launch in ns; waits. None where they were not timed."""
        ...


class Span(Struct, frozen=True):
    """Something that a thread of the host did, in ns of `perf_counter`.

    Attributes:
        device: for what belongs to a device rather than to the thread: transfers, recordings.
    """

    name: str
    thread: int
    begin: int
    end: int
    args: Args
    device: str = ""


class Work(Struct, eq=False):
    """The launches of one submission.

    Attributes:
        begin: when the host handed them over, in ns.
        missing: why they could not be timed, or "".
        host_clock: the device is timed by the host's own clock.
        stamps: begin and end of each, once they are known; `ticket` gives them.
    """

    device: str
    begin: int
    launches: tuple[TimedLaunch, ...]
    ticket: Timed | None
    missing: str = ""
    host_clock: bool = False
    stamps: Stamps | None = None

    def done(self) -> bool:
        """True where nothing is to be waited for."""
        return self.ticket is None or self.ticket.done()

    def resolve(self) -> None:
        """Wait for the time stamps; work that failed has none, and says so itself when awaited."""
        ticket, self.ticket = self.ticket, None
        if ticket is None:
            return
        try:
            self.stamps = ticket.times()
        except CentellaError as error:
            self.missing = str(error)


class KernelTime(Struct, frozen=True):
    """All launches of one kernel on one device: a row of `Ledger.kernels()`.

    Attributes:
        device, kernel: their names; launches: how many.
        milliseconds: of device time, or None where launches could not be timed.
        share: of the device's measured time, 0 to 1.
        missing: why there is no time, or "".
    """

    device: str
    kernel: str
    launches: int
    milliseconds: float | None
    share: float | None
    missing: str = ""


class Timeline:
    """What one timed scope saw; filled from any thread."""

    def __init__(self) -> None:
        self.begin: int = perf_counter_ns()
        self._lock = threading.Lock()
        self._threads: dict[int, str] = {}
        self._spans: list[Span] = []
        self._works: list[Work] = []
        self._open: deque[Work] = deque()

    def add(self, name: str, begin: int, end: int, args: Args, device: str = "") -> None:
        """Note what this thread did."""
        thread = threading.current_thread()
        with self._lock:
            self._threads.setdefault(threading.get_ident(), thread.name)
            self._spans.append(Span(name, threading.get_ident(), begin, end, args, device))

    def add_work(self, work: Work) -> None:
        """Note a submission; takes the stamps of those that are done, so that few are waiting."""
        with self._lock:
            self._works.append(work)
            self._open.append(work)
            while self._open and self._open[0].done():
                self._open.popleft().resolve()

    def _resolved(self) -> list[Work]:
        with self._lock:
            while self._open:
                self._open[0].resolve()
                self._open.popleft()
            return list(self._works)

    def kernels(self) -> list[KernelTime]:
        """The kernels that ran, longest first; waits for what was submitted."""
        counts: Counter[tuple[str, str]] = Counter()
        spent: Counter[tuple[str, str]] = Counter()
        totals: Counter[str] = Counter()
        missing: dict[str, str] = {}
        for work in self._resolved():
            for index, launch in enumerate(work.launches):
                key = (work.device, launch.kernel)
                counts[key] += 1
                if work.stamps is not None:
                    begin, end = work.stamps[index]
                    spent[key] += end - begin
                    totals[work.device] += end - begin
            if work.missing:
                missing[work.device] = work.missing
        rows = [
            _row(key, number, spent.get(key), totals[key[0]], missing.get(key[0], ""))
            for key, number in counts.items()
        ]
        return sorted(rows, key=lambda r: (-(r.milliseconds or 0.0), -r.launches, r.kernel))

    def spans(self) -> dict[str, float]:
        """Milliseconds that the host spent in each kind of step, in order of the first of each."""
        with self._lock:
            spans = sorted(self._spans, key=lambda span: span.begin)
        spent: dict[str, float] = {}
        for span in spans:
            spent[span.name] = spent.get(span.name, 0.0) + (span.end - span.begin) / 1e6
        return spent

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a trace file; waits for what was submitted."""
        works = self._resolved()
        with self._lock:
            spans, threads = list(self._spans), dict(self._threads)
        zero = min([self.begin, *(s.begin for s in spans)])
        names = dict.fromkeys([w.device for w in works] + [s.device for s in spans if s.device])
        processes = {name: HOST + index for index, name in enumerate(names, 1)}
        events = [_named("process_name", HOST, 0, "host")]
        events += [_named("process_name", number, 0, name) for name, number in processes.items()]
        events += _host_events([s for s in spans if not s.device], threads, zero)
        events += _device_events([s for s in spans if s.device], works, processes, zero)
        document = {"displayTimeUnit": "ms", "traceEvents": events}
        with replaced(path) as file:
            # Not by msgspec, which refuses names of files that are no text.
            file.write(json.dumps(document).encode())


def _row(
    key: tuple[str, str], launches: int, spent: int | None, total: int, missing: str
) -> KernelTime:
    if spent is None:
        return KernelTime(*key, launches, None, None, missing)
    return KernelTime(*key, launches, spent / 1e6, spent / total if total else 0.0, missing)


def table(rows: list[KernelTime]) -> str:
    """The kernels as a text to read."""
    wide = max([6, *(len(row.kernel) for row in rows)])
    lines = [f"{'kernel':<{wide}}  launches          ms   share  device"]
    for row in rows:
        ms = "-" if row.milliseconds is None else f"{row.milliseconds:.4f}"
        share = "-" if row.share is None else f"{100 * row.share:.1f}%"
        lines.append(f"{row.kernel:<{wide}}  {row.launches:>8}  {ms:>10}  {share:>6}  {row.device}")
    reasons = {row.device: row.missing for row in rows if row.missing}
    lines += [f"no times on {device}: {why}" for device, why in reasons.items()]
    return "\n".join(lines)


# -- the file --------------------------------------------------------------------------------------


def _named(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    category: str, name: str, begin: int, end: int, where: tuple[int, int], args: Args
) -> Event:
    """One event that has a beginning, in ns since the trace's, and an end, in microseconds."""
    process, thread = where
    return {
        "ph": "X", "name": name, "cat": category, "pid": process, "tid": thread,
        "ts": begin / 1e3, "dur": max(0, end - begin) / 1e3, "args": args,
    }  # fmt: skip


def _host_events(spans: list[Span], threads: dict[int, str], zero: int) -> list[Event]:
    """What each thread did: its spans follow one another or lie within one another."""
    numbers = {ident: index for index, ident in enumerate(threads, 1)}
    events = [_named("thread_name", HOST, numbers[i], name) for i, name in threads.items()]
    for s in spans:
        where = (HOST, numbers[s.thread])
        events.append(_complete("host", s.name, s.begin - zero, s.end - zero, where, s.args))
    return events


def _device_events(
    spans: list[Span], works: list[Work], processes: dict[str, int], zero: int
) -> list[Event]:
    """What moved to and from each device, and its launches."""
    events = [_named("thread_name", n, 1, "kernels") for n in processes.values()]
    events += [_named("thread_name", n, 2, "transfers") for n in processes.values()]
    for index, s in enumerate(spans):
        number, begin, end = processes[s.device], s.begin - zero, s.end - zero
        if s.name == "record":  # those of several threads are under way at once
            event = {"name": s.name, "cat": "host", "id": index, "pid": number, "tid": 0}
            events.append({**event, "ph": "b", "ts": begin / 1e3, "args": s.args})
            events.append({**event, "ph": "e", "ts": end / 1e3})
        else:
            events.append(_complete("transfer", s.name, begin, end, (number, 2), s.args))
    shifts = {name: _shift([w for w in works if w.device == name]) for name in processes}
    free = dict.fromkeys(processes, 0)  # when each device's track ends: spans may not cross
    for work in works:
        shift, where = shifts[work.device], (processes[work.device], 1)
        for launch, (begin, end) in zip(work.launches, work.stamps or (), strict=False):
            first = max(begin + shift, free[work.device])
            last = free[work.device] = max(end + shift, first)
            args: Args = {"op": launch.op, "line": launch.line}
            events.append(
                _complete("kernel", launch.kernel, first - zero, last - zero, where, args)
            )
    return events


def _shift(works: list[Work]) -> int:
    """What makes a device's clock the host's: no launch begins before it was submitted."""
    if any(work.host_clock for work in works):
        return 0
    return max((work.begin - work.stamps[0][0] for work in works if work.stamps), default=0)
