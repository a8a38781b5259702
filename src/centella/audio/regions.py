"""Regions of speech: levels of frames joined, padded, and cut where they grow too long.

Levels are those of `voice.py`, by energy and spectrum, or of `silero.py`, by a network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from msgspec import Struct

from centella.audio.mel import RATE, Array
from centella.audio.silero import SileroLevels, SileroModel
from centella.audio.source import check_finite, floats
from centella.audio.stream import Given, open_audio
from centella.audio.voice import EnergyLevels
from centella.errors import AudioError

Region = tuple[float, float]
VadModel = str | os.PathLike[str] | SileroModel


class Levels(Protocol):
    """How much consecutive frames resemble speech.

    Attributes:
        per_second: frames a second.
        threshold: the level at which speech begins, unless the rules name one.
    """

    per_second: float
    threshold: float

    def push(self, samples: Array) -> list[float]:
        """Levels of the frames that are complete with these samples, f32 [n] at 16 kHz."""
        ...

    def finish(self) -> list[float]:
        """Levels of the remaining frames, at the end of the sound."""
        ...


class SpeechRules(Struct, frozen=True):
    """How frames become regions; times in seconds.

    Attributes:
        threshold: the level at which speech begins; None: 0.28 of the excess over the noise, or a
            probability of 0.5 where a network gives it.
        keep: share of the threshold above which it goes on.
        min_speech: a region of less than this is dropped.
        min_silence: a pause of less than this does not end a region.
        pad: added at either end, as onsets and ends of words are faint.
        longest: a region that grows longer is cut at its quietest point in the second half.
    """

    threshold: float | None = None
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
        numbers = (self.threshold or 0.0, self.keep, self.min_speech, self.min_silence, self.pad)
        if min(numbers) < 0:
            raise AudioError(f"speech regions: expected numbers of 0 or more, got {self}")
        if not self.longest >= max(4 * self.pad, 1.0):
            raise AudioError(
                f"speech regions: expected a longest of 1 s and 4 pads or more, got {self}"
            )


class SpeechDetector:
    """Speech in sound that arrives in pieces: `push` them, then `finish`.

    A region is returned when its end is known: after the shortest pause, and up to 3 s later by
    energy and spectrum.

    Args:
        rules: how frames become regions; by default `SpeechRules()`.
        vad_model: Silero's network or the path of its file; None: energy and spectrum.

    Attributes:
        rules: as given.

    Raises:
        AudioError: rules that make no regions.
        WeightsError, DTypeError, MissingExtraError: as `SileroModel`, of a path.
    """

    def __init__(self, rules: SpeechRules | None = None, vad_model: VadModel | None = None) -> None:
        self.rules: SpeechRules = rules or SpeechRules()
        self.rules.check()
        self._levels = _levels(vad_model)
        self._joined = _Joined(self.rules, self._levels)
        self._total = 0

    def push(self, samples: Array) -> list[Region]:
        """More samples [n] at 16 kHz; the regions that they complete, (start, end) in s.

        Raises:
            AudioError: samples of another shape or dtype, or that are not finite.
            WeightsError: the network fails, or gives no probability.
        """
        name, array = "speech regions", np.asarray(samples)
        if array.ndim != 1:
            raise AudioError(f"{name}: expected samples [n], got {list(array.shape)}")
        mono = floats(name, array)
        check_finite(name, mono, self._total, RATE)
        self._total += len(mono)
        return self._joined.steps(self._levels.push(mono))

    @property
    def settled(self) -> float:
        """Seconds before which no region will begin that has not been given."""
        return self._joined.settled()

    def finish(self) -> list[Region]:
        """The regions that the end of the sound completes; nothing is pushed after it."""
        if not self._total:
            return []
        return self._joined.finish(self._levels.finish(), self._total / RATE)


def _levels(vad_model: VadModel | None) -> Levels:
    """The detector that computes levels."""
    if vad_model is None:
        return EnergyLevels()
    opened = vad_model if isinstance(vad_model, SileroModel) else SileroModel(vad_model)
    return SileroLevels(opened)


class _Joined:
    """Frames to regions, one after the other."""

    def __init__(self, rules: SpeechRules, levels: Levels) -> None:
        self.rules = rules
        self.second = levels.per_second
        self.threshold = levels.threshold if rules.threshold is None else rules.threshold
        self.at = 0  # of the next frame
        self.start: int | None = None  # of the region that is open
        self.levels: list[float] = []  # of its frames
        self.last = 0  # the last frame of it that was speech
        self.ended = 0.0  # where the region before it ends
        self.cut = False  # whether it goes on where that one was cut
        self.closed: list[Region] = []  # not returned yet: the sound may end within the padding

    def steps(self, levels: list[float]) -> list[Region]:
        """Add frames; the closed regions that end before the last of them."""
        self.closed += [region for level in levels for region in self._step(level)]
        count = sum(end * self.second <= self.at for _, end in self.closed)
        regions, self.closed = self.closed[:count], self.closed[count:]
        return regions

    def _step(self, level: float) -> list[Region]:
        """The region that this frame ends, if it does."""
        rules, at = self.rules, self.at
        self.at += 1
        least = self.threshold * (1.0 if self.start is None else rules.keep)
        if level >= least:
            self.start, self.last = at if self.start is None else self.start, at
        if self.start is None:
            return []
        self.levels.append(level)
        if at - self.last > rules.min_silence * self.second:
            return self._close(self.last + 1)
        if (at + 1 - self.start) / self.second + 2 * rules.pad >= rules.longest:
            half = len(self.levels) // 2
            quietest = half + int(np.argmin(self.levels[half:]))
            quiet = self.start + quietest > self.last  # what follows is a pause
            return self._close(self.last + 1) if quiet else self._split(quietest)
        return []

    def settled(self) -> float:
        """As `SpeechDetector.settled`."""
        if self.closed:
            return self.closed[0][0]
        if self.start is None:
            return max(self.at / self.second - self.rules.pad, self.ended)
        return self._begin()

    def finish(self, levels: list[float], total: float) -> list[Region]:
        """Add the last frames; the remaining regions of a sound of so many seconds."""
        regions = self.steps(levels) + self.closed
        if self.start is not None:
            regions += self._close(self.last + 1)
        return [(start, min(end, total)) for start, end in regions if start < total]

    def _begin(self) -> float:
        pad = 0.0 if self.cut else self.rules.pad
        return max((self.start or 0) / self.second - pad, self.ended)

    def _close(self, stop: int) -> list[Region]:
        assert self.start is not None
        begin, speech = self._begin(), (stop - self.start) / self.second
        end = stop / self.second + self.rules.pad
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
        self.ended = cut / self.second
        return [(begin, self.ended)]


def speech_regions(
    samples: Given, rules: SpeechRules | None = None, vad_model: VadModel | None = None
) -> list[Region]:
    """Where somebody speaks, by energy and spectrum, or by Silero's network.

    Args:
        samples: [n] at 16 kHz, pieces of it, or a file: as `open_audio` takes it.
        rules: how frames become regions; by default `SpeechRules()`.
        vad_model: Silero's network or the path of its file; None: energy and spectrum.

    Returns:
        (start, end) in seconds, in order, none overlapping, none longer than `rules.longest`.

    Raises:
        AudioError: rules that make no regions; what `open_audio` and reading raise.
        WeightsError, DTypeError, MissingExtraError: as `SileroModel`.
    """
    detector = SpeechDetector(rules, vad_model)
    regions = [region for piece in open_audio(samples) for region in detector.push(piece)]
    return regions + detector.finish()


def speech_pieces(
    samples: Given, rules: SpeechRules | None = None, vad_model: VadModel | None = None
) -> Iterator[tuple[float, Array]]:
    """The speech of a recording of any length, a region at a time; memory for one is enough.

    Args:
        samples, rules, vad_model: as `speech_regions` takes them.

    Returns:
        The second at which a region starts, and its samples, f32 [n].

    Raises:
        AudioError, WeightsError, DTypeError, MissingExtraError: as `speech_regions`.
    """
    detector = SpeechDetector(rules, vad_model)
    buffer, first = np.empty(0, np.float32), 0  # samples from the one with index `first` on

    def cut(region: Region) -> tuple[float, Array]:
        begin, end = (round(second * RATE) for second in region)
        return region[0], buffer[begin - first : end - first].copy()

    for piece in open_audio(samples):
        buffer = np.concatenate([buffer, piece])
        yield from map(cut, detector.push(piece))
        settled = min(int(detector.settled * RATE), first + len(buffer))
        buffer, first = buffer[settled - first :], settled
    yield from map(cut, detector.finish())
