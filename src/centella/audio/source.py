"""What a reader of audio gives, and how samples of any dtype become floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from centella.errors import AudioError

Array = np.ndarray[Any, Any]

BLOCK = 1 << 14  # frames that are read at once, of one channel
LEAST_RATE, MOST_RATE = 1000, 1_000_000  # samples a second; beyond, a header is taken to be broken
MOST_CHANNELS = 64
DTYPES = "uint8, int16, int32 or floats"  # of samples, as errors name them


def _nothing() -> None:
    pass


class Source(Struct, frozen=True):
    """Audio as it is stored: a rate, channels and an iterator of blocks.

    Attributes:
        name: for errors.
        rate: frames a second.
        channels: samples of a frame.
        blocks: f32 [frames, channels], in order; an element of 1 is full scale.
        frames: how many there are, if that is known before they are read.
        close: releases what is open; it may be called twice.
        live: whether blocks come as they are recorded, as those of a pipe or a microphone may.
    """

    name: str
    rate: int
    channels: int
    blocks: Iterator[Array]
    frames: int | None = None
    close: Callable[[], None] = _nothing
    live: bool = False


def broken(name: str, seconds: float, error: object) -> AudioError:
    """An error for what can be read up to a time."""
    return AudioError(f"{name}: broken after {seconds:.2f} s: {error}")


def check_layout(name: str, rate: object, channels: object) -> None:
    """Refuse what no recording has.

    Raises:
        AudioError: a rate or a number of channels that is no whole number within the bounds above.
    """
    expect_whole(name, rate, LEAST_RATE, MOST_RATE, "samples/s")
    expect_whole(name, channels, 1, MOST_CHANNELS, "channels")


def expect_whole(name: str, value: object, least: int, most: int | None, unit: str) -> None:
    """Refuse what is no whole number within bounds; most: None, there is none.

    Raises:
        AudioError: for that; names the source.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise AudioError(f"{name}: expected a whole number of {unit}, got {value!r}")
    if value < least or (most is not None and value > most):
        bounds = f"{least} {unit} or more" if most is None else f"{least} to {most} {unit}"
        raise AudioError(f"{name}: expected {bounds}, got {value}")


def check_finite(name: str, samples: Array, at: int, rate: int) -> None:
    """Refuse NaN and infinity.

    Args:
        samples: [n]; at: index of the first in the whole; rate: samples a second.

    Raises:
        AudioError: one of them is not finite; says when.
    """
    if not np.isfinite(samples).all():
        first = int(np.argmin(np.isfinite(samples)))
        raise AudioError(
            f"{name}: expected finite samples, got {samples[first]} at {(at + first) / rate:.3f} s"
        )


def block_frames(channels: int) -> int:
    """Frames of a block, so that many channels take no more memory."""
    return max(BLOCK // channels, 256)


def floats(name: str, samples: Array) -> Array:
    """Samples as f32, integers divided by their full scale.

    Args:
        name: for errors.
        samples: uint8 (silence is 128), int16, int32 or floats.

    Raises:
        AudioError: another dtype.
    """
    kind = samples.dtype
    if kind == np.uint8:
        return (samples.astype(np.float32) - 128.0) / np.float32(128.0)
    if kind.kind == "i" and kind.itemsize in (2, 4):
        return samples.astype(np.float32) * np.float32(2.0 ** (1 - 8 * kind.itemsize))
    if kind.kind == "f":
        with np.errstate(over="ignore"):  # too large for f32: the infinity is refused later
            return samples.astype(np.float32)
    raise AudioError(f"{name}: expected samples of {DTYPES}, got {kind}")
