"""A recording as windows of samples: one after the other from a stream, or those with speech."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from centella.audio.mel import HOP, RATE, Array
from centella.audio.regions import Region, SpeechDetector
from centella.audio.stream import AudioStream

BLOCK = 8  # seconds: the detector takes half as long for them as a second at a time


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

    A file is read in blocks of `BLOCK` seconds, what is live a second at a time.

    Args:
        frames: of a window, 10 ms each.
        regions: (start, end) of speech in seconds, in order; None: all of it, or what is detected.
        detector: finds the regions as the stream is read.
    """

    def __init__(
        self, stream: AudioStream, frames: int, regions: Sequence[Region] | None = None,
        detector: SpeechDetector | None = None,
    ) -> None:  # fmt: skip
        self.stream: AudioStream = stream
        self.frames: int = frames
        self.everything: bool = regions is None and detector is None
        self._detector = None if regions is not None else detector
        self._regions: list[Region] = list(regions or ())
        self._first = self._end = 0  # of the kept samples
        self._kept: deque[Array] = deque()
        self._block = RATE * (1 if stream.live else BLOCK)
        self._rows = np.zeros((0, 0), np.float32)
        self._ended = False

    @property
    def duration(self) -> float:
        """Seconds: as the file says, until its end is read; or as far as it was read."""
        known = None if self._ended else self.stream.duration
        return known or self.stream.position / RATE

    def speech_from(self, frame: int) -> int:
        """The first frame from one on where somebody speaks; -1: nobody does."""
        if self.everything:
            return frame
        later = (max(frame, int(a * 100)) for a, b in self._ended_regions() if b * 100 > frame)
        return next(later, -1)

    def window(self, start: int, frames: int | None = None) -> Window | None:
        """The window that begins at a frame, not before that of the last call; None at the end."""
        first, count = start * HOP, (frames or self.frames) * HOP
        while self._end < first + count and self._more():
            self._forget(first)
        self._forget(first)
        begin = self._first
        parts: list[Array] = []
        for piece in self._kept:
            some = piece[max(first - begin, 0) : max(first + count - begin, 0)]
            parts += [some] * bool(some.size)
            begin += piece.size
        if not parts:
            return None
        samples = np.concatenate(parts)
        return Window(start, max(samples.size // HOP, 1), samples)

    def rows(self, windows: Sequence[Window], batch: int) -> Array:
        """Samples of windows f32 [batch, n], with zeros behind them and in rows without one.

        Valid until the next call.
        """
        if len(self._rows) != batch:
            self._rows = np.zeros((batch, self.frames * HOP), np.float32)
        for row, window in zip(self._rows, windows, strict=False):
            size = window.samples.size
            row[:size], row[size:] = window.samples, 0.0
        self._rows[len(windows) :] = 0.0
        return self._rows

    def parts(self) -> Iterator[Window]:
        """Windows that cover the speech, as few as can be."""
        if self.everything:
            yield from self._split((0.0, float("inf")))
            return
        for region in joined(self._ended_regions(), self.frames / 100):
            yield from self._split(region)

    def _split(self, region: Region) -> Iterator[Window]:
        start, end = region
        at, last = round(start * 100), max(end * 100, round(start * 100) + 1)
        while at < last:
            window = self.window(at, int(min(self.frames, np.ceil(last - at))))
            if window is None:
                return
            yield window
            at += self.frames

    def _ended_regions(self) -> Iterator[Region]:
        """Each region, once its end is known."""
        index = 0
        while index < len(self._regions) or (self._detector is not None and self._more()):
            if index < len(self._regions):
                yield self._regions[index]
                index += 1

    def _more(self) -> bool:
        """Read a block; False at the end."""
        if self._ended:
            return False
        piece = self.stream.read(self._block)
        self._ended = not piece.size
        if self._detector is not None:
            regions = self._detector.finish() if self._ended else self._detector.push(piece)
            self._regions += regions
        self._kept.append(piece)
        self._end += piece.size
        return True

    def _forget(self, first: int) -> None:
        """Drop pieces that end before a sample."""
        while self._kept and self._first + self._kept[0].size <= first:
            self._first += self._kept.popleft().size


def joined(regions: Iterable[Region], longest: float) -> Iterator[Region]:
    """Regions that follow one another made one while that is no longer than a window."""
    last: Region | None = None
    for start, end in regions:
        if last and end - last[0] <= longest:
            last = (last[0], end)
            continue
        if last:
            yield last
        last = (start, end)
    if last:
        yield last
