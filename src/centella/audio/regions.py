"""Regions of speech: frames of `voice.py` joined, padded, and cut where they grow too long."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from centella.audio.mel import RATE
from centella.audio.source import check_finite, floats
from centella.audio.stream import Given, open_audio
from centella.audio.voice import (
    BANDS,
    CONTEXT,
    FRAME,
    LAG,
    STEP,
    Array,
    evidence,
    likeness,
    spectra,
)  # fmt: skip
from centella.errors import AudioError

Region = tuple[float, float]

_SECOND = RATE // STEP  # frames
_STEADY = 0.72  # likeness of spectra from which sound is music
_LEAST_NEW = _SECOND  # frames that are looked at once, so that their context costs little


class SpeechRules(Struct, frozen=True):
    """How frames become regions; times in seconds.

    Attributes:
        threshold: excess over the noise at which speech begins; noise alone has 0.11 +- 0.02.
        keep: share of the threshold above which it goes on.
        min_speech: a region of less than this is dropped.
        min_silence: a pause of less than this does not end a region.
        pad: added at either end, as onsets and ends of words are faint.
        longest: a region that grows longer is cut at its quietest point in the second half.
    """

    threshold: float = 0.28
    keep: float = 0.65
    min_speech: float = 0.25
    min_silence: float = 0.6
    pad: float = 0.2
    longest: float = 30.0

    def check(self) -> None:
        """Refuse what makes no regions.

        Raises:
            AudioError: a time below 0, or a longest that the padding would fill.
        """
        if min(self.threshold, self.keep, self.min_speech, self.min_silence, self.pad) < 0:
            raise AudioError(f"speech regions: expected numbers of 0 or more, got {self}")
        if not self.longest >= max(4 * self.pad, 1.0):
            raise AudioError(
                f"speech regions: expected a longest of 1 s and 4 pads or more, got {self}"
            )


class SpeechDetector:
    """Speech in sound that arrives in pieces: `push` them, then `finish`.

    A region is given when its end is known: up to 3 s of sound after it, plus the shortest pause.

    Attributes:
        rules: how frames become regions; by default `SpeechRules()`.
    """

    def __init__(self, rules: SpeechRules | None = None) -> None:
        self.rules: SpeechRules = rules or SpeechRules()
        self.rules.check()
        self._samples = np.zeros(FRAME // 2, np.float32)  # the first frame is around sample 0
        self._total = 0
        self._fine = np.zeros((LAG, 0), np.float32)
        self._bands = np.zeros((0, BANDS), np.float32)
        self._alike = np.zeros(0, np.float32)
        self._judged = 0  # rows of these that have been judged, and stay as context
        self._joined = _Joined(self.rules)

    def push(self, samples: Array) -> list[Region]:
        """More samples [n] at 16 kHz; the regions that they complete, (start, end) in s.

        Raises:
            AudioError: samples of another shape or dtype, or that are not finite.
        """
        name, given = "speech regions", np.asarray(samples)
        if given.ndim != 1:
            raise AudioError(f"{name}: expected samples [n], got {list(given.shape)}")
        mono = floats(name, given)
        check_finite(name, mono, self._total, RATE)
        self._total += len(mono)
        self._take(mono)
        ready = len(self._bands) - CONTEXT - self._judged
        return self._judge(ready) if ready >= _LEAST_NEW else []

    @property
    def settled(self) -> float:
        """Seconds before which no region will begin that has not been given."""
        return self._joined.settled()

    def finish(self) -> list[Region]:
        """The regions that the end of the sound completes; nothing is pushed after it."""
        if not self._total:
            return []
        self._take(np.zeros(FRAME // 2, np.float32))
        found = self._judge(len(self._bands) - self._judged)
        return [*found, *self._joined.finish(self._total / RATE)]

    def _take(self, samples: Array) -> None:
        """Frames of what is there, and what of the samples the next one needs."""
        self._samples = np.concatenate([self._samples, samples])
        count = (len(self._samples) - FRAME) // STEP + 1
        for first in range(0, max(count, 0), 8 * _SECOND):
            part = self._samples[
                first * STEP : min(first + 8 * _SECOND, count) * STEP + FRAME - STEP
            ]
            self._look(np.lib.stride_tricks.sliding_window_view(part, FRAME)[::STEP])
        self._samples = self._samples[max(count, 0) * STEP :]

    def _look(self, frames: Array) -> None:
        bands, fine = spectra(frames)
        if not self._fine.size:
            self._fine = np.zeros((LAG, fine.shape[1]), np.float32)
        fine = np.concatenate([self._fine, fine])
        self._bands = np.concatenate([self._bands, bands])
        self._alike = np.concatenate([self._alike, likeness(fine)])
        self._fine = fine[-LAG:]

    def _judge(self, count: int) -> list[Region]:
        """Regions of the next frames, whose context is there or does not exist."""
        excess, steadiness = evidence(self._bands, self._alike)
        chosen = slice(self._judged, self._judged + count)
        excess = np.where(steadiness < _STEADY, excess, 0.0)[chosen]
        dropped = max(chosen.stop - CONTEXT, 0)
        self._bands, self._alike = self._bands[dropped:], self._alike[dropped:]
        self._judged = chosen.stop - dropped
        return [region for level in excess.tolist() for region in self._joined.step(level)]


class _Joined:
    """Frames to regions, one after the other."""

    def __init__(self, rules: SpeechRules) -> None:
        self.rules = rules
        self.at = 0  # of the next frame
        self.start: int | None = None  # of the region that is open
        self.levels: list[float] = []  # of its frames
        self.last = 0  # the last frame of it that was speech
        self.ended = 0.0  # where the region before it ends
        self.cut = False  # whether it goes on where that one was cut

    def step(self, level: float) -> list[Region]:
        """The region that this frame ends, if it does."""
        rules, at = self.rules, self.at
        self.at += 1
        least = rules.threshold * (1.0 if self.start is None else rules.keep)
        if level >= least:
            self.start, self.last = at if self.start is None else self.start, at
        if self.start is None:
            return []
        self.levels.append(level)
        if at - self.last > rules.min_silence * _SECOND:
            return self._close(self.last + 1)
        if (at + 1 - self.start) / _SECOND + 2 * rules.pad >= rules.longest:
            half = len(self.levels) // 2
            quietest = half + int(np.argmin(self.levels[half:]))
            quiet = self.start + quietest > self.last  # what follows is a pause
            return self._close(self.last + 1) if quiet else self._split(quietest)
        return []

    def settled(self) -> float:
        """As `SpeechDetector.settled`."""
        if self.start is None:
            return max(self.at / _SECOND - self.rules.pad, self.ended)
        return self._begin()

    def finish(self, total: float) -> list[Region]:
        """The region that is open when the sound ends, after so many seconds."""
        if self.start is None:
            return []
        return [(a, min(b, total)) for a, b in self._close(self.last + 1) if a < total]

    def _begin(self) -> float:
        pad = 0.0 if self.cut else self.rules.pad
        return max((self.start or 0) / _SECOND - pad, self.ended)

    def _close(self, stop: int) -> list[Region]:
        assert self.start is not None
        begin, speech = self._begin(), (stop - self.start) / _SECOND
        end = stop / _SECOND + self.rules.pad
        kept = speech >= self.rules.min_speech or self.cut
        self.start, self.levels, self.cut = None, [], False
        if not kept:
            return []
        self.ended = end
        return [(begin, end)]

    def _split(self, index: int) -> list[Region]:
        """The region up to its frame `index`; the rest stays open, and begins there."""
        assert self.start is not None
        begin, cut = self._begin(), self.start + index
        self.start, self.levels, self.cut = cut, self.levels[index:], True
        self.ended = cut / _SECOND
        return [(begin, self.ended)]


def speech_regions(samples: Given, rules: SpeechRules | None = None) -> list[Region]:
    """Where somebody speaks, by energy and spectrum; no model is needed.

    Args:
        samples: [n] at 16 kHz, pieces of it, or a file: as `open_audio` takes it.
        rules: how frames become regions; by default `SpeechRules()`.

    Returns:
        (start, end) in seconds, in order, none overlapping, none longer than `rules.longest`.

    Raises:
        AudioError: rules that make no regions; what `open_audio` and reading raise.
    """
    detector = SpeechDetector(rules)
    found = [region for piece in open_audio(samples) for region in detector.push(piece)]
    return found + detector.finish()


def speech_pieces(
    samples: Given, rules: SpeechRules | None = None
) -> Iterator[tuple[float, Array]]:
    """The speech of a recording of any length, a region at a time; memory for one is enough.

    Args:
        samples, rules: as `speech_regions` takes them.

    Returns:
        The second at which a region starts, and its samples, f32 [n].

    Raises:
        AudioError: as `speech_regions`.
    """
    detector = SpeechDetector(rules)
    held, first = np.empty(0, np.float32), 0  # samples from the one with index `first` on

    def cut(region: Region) -> tuple[float, Array]:
        begin, end = (round(second * RATE) for second in region)
        return region[0], held[begin - first : end - first].copy()

    for piece in open_audio(samples):
        held = np.concatenate([held, piece])
        yield from map(cut, detector.push(piece))
        settled = min(int(detector.settled * RATE), first + len(held))
        held, first = held[settled - first :], settled
    yield from map(cut, detector.finish())
