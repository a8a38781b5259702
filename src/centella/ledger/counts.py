"""The ledger: what happened, counted where it happens, scoped by a context variable.

Every backend counts the same things at the same border: an upload is one host-to-device write, a
download one read-back, a submission one plan run. `totals()` are the counts of the process. What
happened when is kept by a scope with `timing=True`, and by nothing else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import wraps
from time import perf_counter_ns
from typing import ParamSpec, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from centella.errors import ContractError, TransferForbidden
from centella.host.interrupts import uninterrupted
from centella.ledger.call_sites import call_site, line_of
from centella.ledger.timeline import KernelTime, Timeline, Work, table

P = ParamSpec("P")
R = TypeVar("R")


class Counts(Struct):
    """Counts since the scope began. Bytes are physical: padding included.

    Attributes:
        uploads, upload_bytes: host-to-device writes of data.
        downloads, download_bytes: read-backs.
        parameter_bytes: bytes of launch parameters sent, as the driver takes them; 0 on the CPU.
        copies, copy_bytes: device-to-device copies by the driver (inputs of a replay); an op that
            copies is a launch.
        peeks, peek_bytes: values looked at through `peek`, counted apart from downloads.
        submissions: plan runs handed to the device; neither a write nor a read-back alone is one.
        launches: programs run.
        compiles, cache_hits: programs compiled, launches that found theirs compiled.
        plans: plans built (not found in the cache).
        allocations, peak_bytes: buffers of values that the pool did not have; most bytes in use on
            a device.
        syncs: times a thread waited for the device.
        timing_bytes: time stamps that came back, in a scope with `timing=True`.
    """

    uploads: int = 0
    upload_bytes: int = 0
    downloads: int = 0
    download_bytes: int = 0
    parameter_bytes: int = 0
    copies: int = 0
    copy_bytes: int = 0
    peeks: int = 0
    peek_bytes: int = 0
    submissions: int = 0
    launches: int = 0
    compiles: int = 0
    cache_hits: int = 0
    plans: int = 0
    allocations: int = 0
    peak_bytes: int = 0
    syncs: int = 0
    timing_bytes: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    def __sub__(self, other: Counts) -> Counts:
        values = {k: v - getattr(other, k) for k, v in self.as_dict().items()}
        return Counts(**{**values, "peak_bytes": self.peak_bytes})

    def __str__(self) -> str:
        return "  ".join(f"{k} {v:,}" for k, v in self.as_dict().items() if v) or "nothing"


_KNOWN = f"expected some of {', '.join(Counts.__struct_fields__)}"
KINDS: dict[str, tuple[str, ...]] = {
    "transfer": ("uploads", "downloads"),
    "compile": ("compiles",),
    "allocation": ("allocations",),
}


class Ledger:
    """The counts of one `with ct.ledger() as led:` scope; reads flush what is still recorded."""

    def __init__(self, *, timing: bool = False) -> None:
        self.counts: Counts = Counts()
        self._timeline = Timeline() if timing else None
        self._open = True

    def _flush(self) -> None:
        if self._open:
            flush_implicit(self)

    def __getattr__(self, name: str) -> int:
        if name in Counts.__struct_fields__:
            self._flush()
            return int(getattr(self.counts, name))
        raise AttributeError(f"a ledger has no count {name!r}; {_KNOWN}")

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        self._flush()
        return self.counts.as_dict()

    def expect(self, **expected: int) -> None:
        """Raise unless the named counts are exactly these.

        Raises:
            ContractError: with each difference, and the line of the call.
        """
        self._flush()
        unknown = set(expected) - set(Counts.__struct_fields__)
        if unknown:
            raise ContractError(
                f"expect: no such count: {', '.join(sorted(unknown))}; {_KNOWN}, at "
                f"{line_of(call_site())}"
            )
        wrong = [
            f"{name}: expected {want!r}, got {got}"
            for name, want in expected.items()
            if (got := getattr(self.counts, name)) != want
        ]
        if wrong:
            raise ContractError(
                f"ledger: {'; '.join(wrong)}, at {line_of(call_site())}  (all: {self.counts})"
            )

    def bind(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn` counting into this scope when another thread runs it.

        What that thread recorded lazily before and during the call is flushed at either end.
        """
        context = copy_context()

        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            if self not in _scopes.get():
                _scopes.set((*_scopes.get(), self))
            result = fn(*args, **kwargs)
            flush_implicit()
            return result

        @wraps(fn)
        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            flush_implicit()
            return context.copy().run(counted, *args, **kwargs)

        return bound

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        self._flush()
        if self._timeline is None:
            return str(self.counts)
        return f"{self.counts}\n{table(self._timeline.kernels())}"

    # -- with timing=True -------------------------------------------------------------------------

    def kernels(self) -> list[KernelTime]:
        """Each kernel with its launches and device time, longest first; waits for the device.

        This, `spans` and `trace` raise ContractError where the scope has no `timing=True`.
        """
        return self._timed("kernels").kernels()

    def spans(self) -> dict[str, float]:
        """Milliseconds that the host spent in each kind of step, in order of the first of each.

        A step may lie within another: uploads are part of "load weights".
        """
        return self._timed("spans").spans()

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what happened when as a trace that ui.perfetto.dev opens; waits for the device."""
        self._timed("trace").write(path)

    def _timed(self, what: str) -> Timeline:
        if self._timeline is None:
            raise ContractError(f"{what}: this scope has no times; open it as ledger(timing=True)")
        self._flush()
        return self._timeline


_lock = threading.Lock()
_totals = Counts()
_scopes: ContextVar[tuple[Ledger, ...]] = ContextVar("centella_ledgers", default=())
_forbidden: ContextVar[frozenset[str]] = ContextVar("centella_forbidden", default=frozenset())
_flush: list[Callable[[Ledger | None], None]] = []


def permit(what: str, *names: str) -> None:
    """Ask before doing what `count` will count: nothing is half done when it is forbidden.

    Raises:
        TransferForbidden: one of `names` is forbidden in this scope; names the line that asked.
    """
    for kind in _forbidden.get():
        if any(name in KINDS[kind] for name in names):
            raise TransferForbidden(
                f"{what}: {kind} inside ct.forbid({kind!r}), at {line_of(call_site())}"
            )


@uninterrupted
def count(**amounts: int) -> None:
    """Add to the totals and to every open scope; `peak_bytes` is a maximum."""
    with _lock:
        for counts in (_totals, *[led.counts for led in _scopes.get()]):
            for name, amount in amounts.items():
                if name == "peak_bytes":
                    counts.peak_bytes = max(counts.peak_bytes, amount)
                else:
                    setattr(counts, name, getattr(counts, name) + amount)


# How many timed scopes are open in the process: what is not timed asks nothing more.
_timed = 0


def began() -> int:
    """The time in ns if a timed scope is open in the process, else 0."""
    return perf_counter_ns() if _timed else 0


def noted(name: str, begin: int, device: str = "", **args: str | int) -> None:
    """Note in the timed scopes what took from `begin` until now; nothing where `begin` is 0.

    Args:
        device: for what moved to or from a device, or was recorded on it.
    """
    if begin:
        end = perf_counter_ns()
        for timeline in timelines():
            timeline.add(name, begin, end, args, device)


def noted_work(work: Work) -> None:
    """Note a submission in the timed scopes."""
    for timeline in timelines():
        timeline.add_work(work)


def timelines() -> list[Timeline]:
    """Those of the timed scopes that count what happens here."""
    if not _timed:
        return []
    return [led._timeline for led in _scopes.get() if led._timeline is not None and led._open]


@uninterrupted
def totals() -> Counts:
    """The counts of the whole process, as a copy."""
    with _lock:
        return replace(_totals)


def open_scopes() -> tuple[Ledger, ...]:
    """The scopes that count what happens here, outermost first."""
    return _scopes.get()


def on_flush(callback: Callable[[Ledger | None], None]) -> None:
    """Register what submits implicit recordings: this thread's, and those made in a scope."""
    _flush.append(callback)


def flush_implicit(scope: Ledger | None = None) -> None:
    """Submit the implicit recordings of this thread, and any that were made in `scope`."""
    for callback in _flush:
        callback(scope)


@contextmanager
@uninterrupted
def ledger(*, timing: bool = False) -> Iterator[Ledger]:
    """Count what happens inside: `with ct.ledger() as led: ...; led.expect(uploads=1)`.

    The scope follows `await`, tasks and `asyncio.to_thread`; other threads join by `led.bind(fn)`.

    Args:
        timing: keep what happened when, and how long each launch took on its device: for
            `led.kernels()`, `led.trace(path)` and `print(led)`. Launches are then separated by
            time stamps, and a CUDA replay launches its kernels one by one.
    """
    global _timed
    flush_implicit()
    led = Ledger(timing=bool(timing))
    token = _scopes.set((*_scopes.get(), led))
    with _lock:
        _timed += bool(timing)
    try:
        yield led
        flush_implicit(led)
    finally:
        with _lock:
            _timed -= bool(timing)
        led._open = False
        _scopes.reset(token)


@contextmanager
@uninterrupted
def forbid(*kinds: str) -> Iterator[None]:
    """Raise TransferForbidden at the line that does one of "transfer", "compile", "allocation".

    What the line would have done is not done, and the device stays usable. `peek` is permitted.

    Raises:
        ContractError: for an unknown kind, or none.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        got = ", ".join(unknown) or "nothing"
        raise ContractError(f"forbid: expected some of {', '.join(KINDS)}, got {got}")
    flush_implicit()
    token = _forbidden.set(_forbidden.get() | frozenset(kinds))
    try:
        yield
        flush_implicit()
    finally:
        _forbidden.reset(token)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
