"""What a measurement gives, and what each begins with: numbers compared with float64."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, to_builtins

from centella.backends.base import About
from centella.errors import DeviceError
from centella.runtime.device import Device

Array = np.ndarray[Any, Any]
BOUND = 1e-11  # of the squared error, over the squares: products in f32
FEW, LONG = 5, 2.0  # rounds that are always run; seconds after which no more are
Progress = Callable[[str], None]


class Figure(Struct, frozen=True):
    """One number beside the floor's.

    Attributes:
        part: "ffn", "cached" or "encoder"; what: what was counted or timed.
        ours, theirs: in `unit`; None: they state none.
        shape: what it was measured on.
        worst: the worst decile of what was timed; rounds: how often.
    """

    part: str
    what: str
    ours: float
    unit: str
    shape: tuple[int, ...]
    theirs: float | None = None
    worst: float | None = None
    rounds: int = 1


class Report(Struct, frozen=True):
    """What `floor` found on one device.

    Attributes:
        device: its name; details: as `device.describe()` says.
        small: whether the shapes were small ones of the same structure.
        notes: what a reader of the figures must know.
    """

    device: str
    details: About
    small: bool
    notes: tuple[str, ...]
    figures: tuple[Figure, ...]

    def find(self, part: str, what: str) -> Figure:
        """The figure of a name."""
        return next(f for f in self.figures if (f.part, f.what) == (part, what))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain: dict[str, Any] = to_builtins(self)
        return plain


def verify(what: str, device: Device, got: Array, wanted: Array) -> None:
    """Compare a result with its float64.

    Raises:
        DeviceError: another shape, or further off than BOUND; NaN is.
    """
    if got.shape != wanted.shape:
        raise DeviceError(
            f"{what} on {device.name}: expected {list(wanted.shape)}, got {list(got.shape)}"
        )
    error = float(np.square(got.astype(np.float64) - wanted).sum() / np.square(wanted).sum())
    if not error <= BOUND:
        raise DeviceError(
            f"{what} on {device.name}: expected a squared error of at most {BOUND:g} of float64, "
            f"got {error:.2g}"
        )


def seconds(call: Callable[[int], object], rounds: int) -> list[float]:
    """How long each round took, fewer where they take long; the call gets the round's number."""
    times: list[float] = []
    while len(times) < rounds and (len(times) < FEW or sum(times) < LONG):
        start = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - start)
    return times


def median(times: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(times)


def timed(
    part: str, what: str, times: Sequence[float], unit: str, shape: tuple[int, ...],
    theirs: float | None = None, less: float = 0.0,
) -> Figure:  # fmt: skip
    """The figure of rounds that took so many seconds, each `less` so many.

    Args:
        unit: "ms" or "us".
    """
    scale = {"ms": 1e3, "us": 1e6}[unit]
    ordered = sorted(times)
    worst = ordered[min(len(ordered) - 1, round(0.9 * len(ordered)))]
    return Figure(
        part, what, scale * (median(times) - less), unit, shape, theirs,
        scale * (worst - less) if len(times) > 1 else None, len(times),
    )  # fmt: skip
