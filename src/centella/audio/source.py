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
    """

    name: str
    rate: int
    channels: int
    blocks: Iterator[Array]
    frames: int | None = None
    close: Callable[[], None] = _nothing


def check_layout(name: str, rate: int, channels: int) -> None:
    """Refuse what no recording has.

    Raises:
        AudioError: a rate or a number of channels beyond the bounds above.
    """
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise AudioError(f"{name}: expected {LEAST_RATE} to {MOST_RATE} samples/s, got {rate}")
    if not 1 <= channels <= MOST_CHANNELS:
        raise AudioError(f"{name}: expected 1 to {MOST_CHANNELS} channels, got {channels}")


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
    raise AudioError(f"{name}: expected samples of uint8, int16, int32 or floats, got {kind}")
