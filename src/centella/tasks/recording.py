"""A recording as windows of samples: one after the other from a stream, or those with speech."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from centella.audio.mel import HOP, RATE, Array
from centella.audio.stream import AudioStream


class Window(Struct, frozen=True, eq=False):
    """A part of a recording.

    Attributes:
        start: frames of 10 ms before it; frames: of it that have sound.
        samples: f32 [n], up to the length of a window, without the zeros behind it.
    """

    start: int
    frames: int
    samples: Array


class Recording:
    """Samples of a stream from some position on; what lies before it is forgotten.

    Args:
        frames: of a window, 10 ms each.
    """

    def __init__(self, stream: AudioStream, frames: int) -> None:
        self.stream: AudioStream = stream
        self.frames: int = frames
        self._first = 0  # sample that the kept ones begin with
        self._kept = np.empty(0, np.float32)

    @property
    def duration(self) -> float:
        """Seconds: as the file says, or as far as it was read."""
        return self.stream.duration or self.stream.position / RATE

    def window(self, start: int, frames: int | None = None) -> Window | None:
        """The window that begins at a frame, not before that of the last call; None at the end."""
        first, count = start * HOP, (frames or self.frames) * HOP
        while self._first < first:  # forget
            gone = self._kept[: first - self._first]
            if not gone.size:
                self._kept = self.stream.read(min(first - self._first, RATE))
                if not self._kept.size:
                    return None
                continue
            self._first += gone.size
            self._kept = self._kept[gone.size :]
        if self._kept.size < count:
            more = self.stream.read(count - self._kept.size)
            self._kept = np.concatenate([self._kept, more])
        samples = self._kept[:count]
        if not samples.size:
            return None
        return Window(start, max(samples.size // HOP, 1), samples)

    def rows(self, windows: Sequence[Window], batch: int) -> Array:
        """Samples of windows f32 [batch, n], with zeros behind them and in rows without one."""
        rows = np.zeros((batch, self.frames * HOP), np.float32)
        for row, window in zip(rows, windows, strict=False):
            row[: window.samples.size] = window.samples
        return rows

    def parts(self, regions: Sequence[tuple[float, float]]) -> Iterator[Window]:
        """A window for each region of speech in seconds; long ones are several."""
        for start, end in joined(regions, self.frames / 100):
            first, last = round(start * 100), max(round(end * 100), round(start * 100) + 1)
            for at in range(first, last, self.frames):
                window = self.window(at, min(self.frames, last - at))
                if window is None:
                    return
                yield window


def joined(regions: Sequence[tuple[float, float]], longest: float) -> list[tuple[float, float]]:
    """Regions that follow one another made one while that is no longer than a window."""
    made: list[tuple[float, float]] = []
    for start, end in regions:
        if made and end - made[-1][0] <= longest:
            made[-1] = (made[-1][0], end)
        else:
            made.append((start, end))
    return made
