"""The ledger: what happened, counted where it happens, scoped by a context variable.

Every backend counts the same things at the same border: an upload is one host-to-device write, a
download one read-back, a submission one plan run. `totals()` are the counts of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from centella.errors import ContractError, TransferForbidden

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Counts:
    """Counts since the scope began. Bytes are physical: padding included.

    Attributes:
        uploads, upload_bytes: host-to-device writes of data.
        downloads, download_bytes: read-backs.
        parameter_bytes: bytes of launch parameters sent.
        copies, copy_bytes: device-to-device copies.
        peeks: values looked at through `peek`, counted apart from downloads.
        submissions: plan runs handed to the device.
        launches: programs run.
        compiles, cache_hits: programs compiled, found compiled.
        plans: plans built (not found in the cache).
        allocations, peak_bytes: buffers asked from the driver; most bytes held at once.
        syncs: times a thread waited for the device.
    """

    uploads: int = 0
    upload_bytes: int = 0
    downloads: int = 0
    download_bytes: int = 0
    parameter_bytes: int = 0
    copies: int = 0
    copy_bytes: int = 0
    peeks: int = 0
    submissions: int = 0
    launches: int = 0
    compiles: int = 0
    cache_hits: int = 0
    plans: int = 0
    allocations: int = 0
    peak_bytes: int = 0
    syncs: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __sub__(self, other: Counts) -> Counts:
        values = {k: v - getattr(other, k) for k, v in self.as_dict().items()}
        return Counts(**{**values, "peak_bytes": self.peak_bytes})

    def __str__(self) -> str:
        return "  ".join(f"{k} {v:,}" for k, v in self.as_dict().items() if v) or "nothing"


_lock = threading.Lock()
_totals = Counts()
_scopes: ContextVar[tuple[Ledger, ...]] = ContextVar("centella_ledgers", default=())
_forbidden: ContextVar[frozenset[str]] = ContextVar("centella_forbidden", default=frozenset())
_flush: list[Callable[[], None]] = []

KINDS = {
    "transfer": ("uploads", "downloads"),
    "compile": ("compiles",),
    "allocation": ("allocations",),
}


def count(**amounts: int) -> None:
    """Add to the totals and to every open scope; `peak_bytes` is a maximum."""
    forbidden = _forbidden.get()
    for kind in forbidden:
        broken = [name for name in KINDS[kind] if amounts.get(name)]
        if broken:
            raise TransferForbidden(f"{kind} inside ct.forbid({kind!r}): {', '.join(broken)}")
    with _lock:
        for counts in (_totals, *(led.counts for led in _scopes.get())):
            for name, amount in amounts.items():
                if name == "peak_bytes":
                    counts.peak_bytes = max(counts.peak_bytes, amount)
                else:
                    setattr(counts, name, getattr(counts, name) + amount)


def totals() -> Counts:
    """The counts of the whole process, as a copy."""
    with _lock:
        return replace(_totals)


def on_flush(callback: Callable[[], None]) -> None:
    """Register what submits the implicit recordings of this thread."""
    _flush.append(callback)


def flush_implicit() -> None:
    """Submit the implicit recordings of this thread."""
    for callback in _flush:
        callback()


class Ledger:
    """The counts of one `with ct.ledger() as led:` scope; reads flush what is still recorded."""

    def __init__(self) -> None:
        self.counts = Counts()

    def __getattr__(self, name: str) -> int:
        if name in Counts.__slots__:
            flush_implicit()
            return int(getattr(self.counts, name))
        raise AttributeError(name)

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        flush_implicit()
        return self.counts.as_dict()

    def expect(self, **expected: int) -> None:
        """Raise unless the named counts are exactly these.

        Raises:
            ContractError: with each difference.
        """
        flush_implicit()
        unknown = set(expected) - set(Counts.__slots__)
        if unknown:
            raise ContractError(f"expect: no such count: {', '.join(sorted(unknown))}")
        wrong = [
            f"{name}: expected {want}, got {got}"
            for name, want in expected.items()
            if (got := getattr(self.counts, name)) != want
        ]
        if wrong:
            raise ContractError("ledger: " + "; ".join(wrong) + f"  (all: {self.counts})")

    def bind(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn` counting into this scope when another thread runs it."""
        context = copy_context()

        @wraps(fn)
        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            return context.copy().run(fn, *args, **kwargs)

        return bound

    def __str__(self) -> str:
        flush_implicit()
        return str(self.counts)


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Count what happens inside: `with ct.ledger() as led: ...; led.expect(uploads=1)`.

    The scope follows `await`, tasks and `asyncio.to_thread`; other threads join by `led.bind(fn)`.
    """
    flush_implicit()
    led = Ledger()
    token = _scopes.set((*_scopes.get(), led))
    try:
        yield led
        flush_implicit()
    finally:
        _scopes.reset(token)


@contextmanager
def forbid(*kinds: str) -> Iterator[None]:
    """Raise TransferForbidden at the line that does one of "transfer", "compile", "allocation".

    Raises:
        ContractError: for an unknown kind.
    """
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise ContractError(f"forbid: expected {', '.join(KINDS)}, got {', '.join(unknown)}")
    flush_implicit()
    token = _forbidden.set(_forbidden.get() | frozenset(kinds))
    try:
        yield
        flush_implicit()
    finally:
        _forbidden.reset(token)


def current_context() -> Any:
    """The context that a worker thread must run in, so that its counts reach these scopes."""
    return copy_context()
