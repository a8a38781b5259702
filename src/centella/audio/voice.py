"""Where somebody speaks, from energy and spectrum alone, without a model.

Every 20 ms a frame of 32 ms gives the power of 20 bands and a whitened log spectrum.

    floor      of a band: the larger of the minima of its smoothed power 1.5 s back and ahead
    excess     mean over bands of log(power / floor), where above 0
    steadiness cosine of two whitened log spectra 40 ms apart, averaged with the excess as weight

Noise has no excess, because its power stays near its floor. Music has, but its partials stay where
they are, so it is steady; those of speech glide, and hisses come between. A frame is speech
where the excess is high and the steadiness low: its level is the excess, and 0 where the steadiness
is high. `regions.py` makes regions of levels.

Sources: Martin 2001 (noise floors as minima); Scheirer and Slaney 1997 (what changes in speech and
not in music); the rest is ours, and tests/audio/test_voice.py has how well it does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from centella.audio.mel import RATE

Array = np.ndarray[Any, Any]

FRAME, STEP = 512, 320  # samples of a frame, and from one to the next
BANDS = 20  # equally wide in mels
LOWEST, HIGHEST = 100.0, 7000.0  # Hz: below is hum, above little of speech
QUIET = 1e-7  # mean square of the samples that counts as silence: -70 dB of full scale

_SMOOTH = 2  # frames on either side that a band's power is averaged over before its minimum
_REACH = 75  # frames on either side that a floor is the minimum of
_BIAS = 1.5  # mean over minimum of the smoothed power of noise
_NEAR = 5  # frames on either side that the excess is averaged over
_ENOUGH = 0.8  # excess of a frame that counts: three of a loud click stay below a threshold of 0.28
LAG = 2  # frames between two spectra that are compared: the next that shares no sample
_STEADY = 20  # frames on either side that their likeness is averaged over
_LINES = slice(3, 160)  # of the transform: 94 Hz to 5 kHz, where partials are
_ENVELOPE = 9  # lines that the spectrum's envelope is averaged over: sums of 8, and one
_ALIKE = 0.72  # likeness of spectra from which sound is music
CONTEXT = _REACH + _SMOOTH + max(_NEAR, _STEADY)  # frames that an evidence depends on
_SECOND = RATE // STEP  # frames
_LOOKED = 80  # frames transformed at once: so few that what comes in between is 1 MB
_PART = 50  # frames of a product: so small that BLAS starts no threads for it, which may wait


class EnergyLevels:
    """The excess over the noise of each frame, 0 where the sound is steady; frames are 20 ms apart.

    Attributes:
        per_second: frames a second.
        threshold: the excess at which speech begins, unless the rules name one; noise alone has
            0.11 +- 0.02.
    """

    per_second: float = _SECOND
    threshold: float = 0.28

    def __init__(self) -> None:
        self._samples = np.zeros(FRAME // 2, np.float32)  # the first frame is around sample 0
        self._fine = np.zeros((LAG, 0), np.float32)
        self._bands = np.zeros((0, BANDS), np.float32)
        self._alike = np.zeros(0, np.float32)
        self._judged = 0  # rows of these that have been judged, and stay as context

    def push(self, samples: Array) -> list[float]:
        """Levels of frames whose context is complete with these samples [n]; a second or more."""
        self._take(samples)
        ready = len(self._bands) - CONTEXT - self._judged
        return self._judge(ready) if ready >= _SECOND else []

    def finish(self) -> list[float]:
        """Levels of the remaining frames, at the end of the sound."""
        self._take(np.zeros(FRAME // 2, np.float32))
        return self._judge(len(self._bands) - self._judged)

    def _take(self, samples: Array) -> None:
        """Frames of what is there, and what of the samples the next one needs."""
        self._samples = np.concatenate([self._samples, samples])
        count = (len(self._samples) - FRAME) // STEP + 1
        if count > 0:
            frames = np.lib.stride_tricks.sliding_window_view(self._samples, FRAME)[::STEP]
            for first in range(0, count, _LOOKED):
                self._look(frames[first : first + _LOOKED])
        self._samples = self._samples[max(count, 0) * STEP :]

    def _look(self, frames: Array) -> None:
        bands, fine = spectra(frames)
        if not self._fine.size:
            self._fine = np.zeros((LAG, fine.shape[1]), np.float32)
        fine = np.concatenate([self._fine, fine])
        self._bands = np.concatenate([self._bands, bands])
        self._alike = np.concatenate([self._alike, likeness(fine)])
        self._fine = fine[-LAG:]

    def _judge(self, count: int) -> list[float]:
        """Levels of the next frames, whose context is there or does not exist."""
        excess, steadiness = evidence(self._bands, self._alike)
        chosen = slice(self._judged, self._judged + count)
        levels: list[float] = np.where(steadiness < _ALIKE, excess, 0.0)[chosen].tolist()
        dropped = max(chosen.stop - CONTEXT, 0)
        self._bands, self._alike = self._bands[dropped:], self._alike[dropped:]
        self._judged = chosen.stop - dropped
        return levels


@lru_cache(maxsize=1)
def _bands() -> Array:
    """Triangles on the mel scale, f32 [257, bands]."""
    low, high = (2595.0 * np.log10(1.0 + f / 700.0) for f in (LOWEST, HIGHEST))
    corners = 700.0 * (10.0 ** (np.linspace(low, high, BANDS + 2) / 2595.0) - 1.0)
    left, middle, right = corners[:-2], corners[1:-1], corners[2:]
    lines = (np.arange(FRAME // 2 + 1) * RATE / FRAME)[:, None]
    sides: Array = np.minimum((lines - left) / (middle - left), (right - lines) / (right - middle))
    weights: Array = np.maximum(sides, 0.0).astype(np.float32)
    return weights


@lru_cache(maxsize=1)
def _window() -> Array:
    """The periodic Hann window, scaled so that a power spectrum sums to a mean square."""
    window = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(FRAME) / FRAME)
    scaled: Array = (window / np.sqrt(FRAME * np.sum(window**2) / 2)).astype(np.float32)
    return scaled


def spectra(frames: Array) -> tuple[Array, Array]:
    """Band powers [n, bands] and whitened log spectra [n, lines], of frames [n, 512]."""
    transform = np.fft.rfft(frames * _window())
    power = transform.real**2 + transform.imag**2
    fine = np.log(power[:, _LINES] + np.float32(QUIET / FRAME))
    fine -= _envelope(fine)
    length = np.sqrt(np.sum(fine**2, axis=1, keepdims=True))
    parts = range(0, len(power), _PART)
    bands = np.concatenate([banded(power[first : first + _PART]) for first in parts])
    return bands + np.float32(QUIET / BANDS), fine / np.maximum(length, 1e-3)


def banded(power: Array) -> Array:
    """Powers [n, bands] of power spectra [n, 257]."""
    bands: Array = power @ _bands()
    return bands


def _envelope(fine: Array) -> Array:
    """The mean of each line and four on either side, fewer at the ends."""
    wide = np.zeros((fine.shape[0], fine.shape[1] + _ENVELOPE - 1))  # f64: the sums are exact
    wide[:, 4:-4] = fine
    sums = wide[:, :-1] + wide[:, 1:]
    sums = sums[:, :-2] + sums[:, 2:]
    sums = sums[:, :-4] + sums[:, 4:]
    means: Array = ((sums[:, :-1] + wide[:, 8:]) / _neighbours(fine.shape[1])).astype(np.float32)
    return means


@lru_cache(maxsize=1)
def _neighbours(lines: int) -> Array:
    """How many lines the mean of each is of."""
    at = np.arange(lines)
    count: Array = np.minimum(at, 4) + 1 + np.minimum(at[::-1], 4)
    return count


def likeness(fine: Array) -> Array:
    """The cosine of each whitened spectrum but the first two with the one 40 ms before it."""
    cosines: Array = np.sum(fine[LAG:] * fine[:-LAG], axis=1)
    return cosines


def evidence(bands: Array, alike: Array) -> tuple[Array, Array]:
    """How much more than the noise there is, and how steady it is: [n] each, of [n, bands], [n]."""
    smooth = _average(bands, _SMOOTH)
    excess = np.log(bands / (_BIAS * _floor(smooth)))
    weight = np.maximum(excess, 0.0).mean(axis=1)
    shares = _average(np.stack([weight * alike, weight], axis=1), _STEADY)
    steadiness = shares[:, 0] / np.maximum(shares[:, 1], 1e-6)
    return _average(np.minimum(weight, _ENOUGH)[:, None], _NEAR)[:, 0], steadiness


def _average(rows: Array, reach: int) -> Array:
    """The mean of rows and as many on either side, fewer at the ends."""
    sums = np.zeros((len(rows) + 1, rows.shape[1]))
    np.cumsum(rows, axis=0, dtype=np.float64, out=sums[1:])
    at = np.arange(len(rows))
    first, last = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(rows))
    means: Array = ((sums[last] - sums[first]) / (last - first)[:, None]).astype(np.float32)
    return means


def _floor(rows: Array) -> Array:
    """The larger of the minima before and after each row: a noise that begins or ends is one."""
    padded = np.pad(rows, ((_REACH, _REACH), (0, 0)), constant_values=np.inf)
    length, wanted = 1, _REACH + 1
    while length < wanted:  # minima over windows, whose lengths double
        step = min(length, wanted - length)
        padded, length = np.minimum(padded[:-step], padded[step:]), length + step
    floor: Array = np.maximum(padded[: len(rows)], padded[_REACH : _REACH + len(rows)])
    return floor
