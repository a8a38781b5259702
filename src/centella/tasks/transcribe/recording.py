"""A recording as windows of samples: one after the other from a stream, or those with speech."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

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

    A file is read in blocks of `BLOCK` seconds, what is live a second at a time. Blocks of a file
    may be read, and speech found in them, before they are needed: `read_ahead`.

    Args:
        frames: of a window, 10 ms each.
        regions: (start, end) of speech in seconds, in order; None: all of it, or what is detected.
        detector: finds the regions as the stream is read.

    Attributes:
        fault: what was raised when it was read, which ends it there; None: nothing yet.
    """

    fault: Exception | None = None

    def __init__(
        self, stream: AudioStream, frames: int, regions: Sequence[Region] | None = None,
        detector: SpeechDetector | None = None,
    ) -> None:  # fmt: skip
        self.stream: AudioStream = stream
        self.frames: int = frames
        self.everything: bool = regions is None and detector is None
        self._detector = None if regions is not None else detector
        self._regions: list[Region] = list(regions or ())
        self._needed = np.inf if regions is None else max((b for _, b in regions), default=0) * RATE
        self._first = self._end = 0  # of the kept samples
        self._kept: deque[Array] = deque()
        self._block = 1 if stream.live else BLOCK
        self._row = np.zeros((1, frames * HOP), np.float32)
        self._ended = False

    @property
    def duration(self) -> float:
        """Seconds: as the file says, until its end is read; or as far as it was read."""
        known = None if self._ended else self.stream.duration
        return known or self.stream.position / RATE

    @property
    def by_region(self) -> bool:
        """Whether a window has one region: the text of what is live waits for no other speech."""
        return self.stream.live and not self.everything

    def next_window(self, frame: int) -> Window | None:
        """The window that begins where somebody speaks, at a frame or later; None: nobody does."""
        if self.everything:
            return self.window(frame)
        for start, end in self._ended_regions():
            if start < end and end * 100 > frame:
                first = max(frame, int(start * 100))
                rest = int(np.ceil(end * 100)) - first if self.by_region else self.frames
                return self.window(first, min(self.frames, rest))
        return None

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

    def row(self, window: Window) -> Array:
        """Samples of a window with zeros behind them, f32 [1, n]; valid until the next call."""
        size = window.samples.size
        self._row[0, :size], self._row[0, size:] = window.samples, 0.0
        return self._row

    def read_ahead(self, windows: int) -> None:
        """Read a block that will be needed, unless as many samples are kept as windows have.

        What is live is read when it is needed.
        """
        if self.stream.live:
            return
        if self._end < min(self._first + windows * self.frames * HOP, self._needed):
            self._more()

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
        """Each region, once its end is known; an empty one: those to come begin there or later.

        What lies a window or more before an empty one is forgotten: silence needs no memory.
        """
        index, quiet = 0, 0.0
        while True:
            if index < len(self._regions):
                yield self._regions[index]
                index += 1
                continue
            self._forget(round(quiet * RATE) - self.frames * HOP)
            if self._detector is None or not self._more():
                return
            if index == len(self._regions):
                quiet = self._detector.settled
                yield quiet, quiet

    def _more(self) -> bool:
        """Read a block; False at the end, which a fault is too."""
        if self._ended:
            return False
        seconds = [np.empty(0, np.float32)]
        with self._ended_by_a_fault():
            while len(seconds) <= self._block and not self._ended:
                seconds.append(self.stream.read(RATE))
                self._ended = not seconds[-1].size
        piece = np.concatenate(seconds)
        self._kept.append(piece)
        self._end += piece.size
        if self._detector is not None:
            with self._ended_by_a_fault():
                self._regions += self._detector.push(piece) if piece.size else []
                self._regions += self._detector.finish() if self._ended else []
        return True

    @contextmanager
    def _ended_by_a_fault(self) -> Iterator[None]:
        """What is raised ends the recording: the texts of what was read before it come first."""
        try:
            yield
        except Exception as fault:
            self.fault, self._ended = fault, True

    def _forget(self, first: int) -> None:
        """Drop pieces that end before a sample."""
        while self._kept and self._first + self._kept[0].size <= first:
            self._first += self._kept.popleft().size


def joined(regions: Iterable[Region], longest: float) -> Iterator[Region]:
    """Regions that follow one another made one while that is no longer than a window.

    Args:
        regions: in order; an empty one says that those after it begin there or later.
    """
    last: Region | None = None
    for start, end in regions:
        if last and end - last[0] <= longest:
            last = (last[0], end) if start < end else last
            continue
        if last:
            yield last
        last = (start, end) if start < end else None
    if last:
        yield last
