"""Sounds made by code: tones, speech-like syllables, chords, noise; and scores of regions."""

from __future__ import annotations

import io
import shutil
import subprocess
import wave
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Regions = list[tuple[float, float]]

RATE = 16000
LOUD = 0.1  # root mean square of speech and of music
VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480))
SENTENCES = (
    ("en", "The quick brown fox jumps over the lazy dog near the river bank."),
    ("en-us+f3", "In the beginning there was silence, and then somebody spoke."),
    ("de", "Yes."),
    ("es", "Please call me back tomorrow at half past nine."),
    ("en+m3", "She sells sea shells by the sea shore."),
)


def scaled(sound: Array, level: float = LOUD) -> Array:
    return np.asarray(sound * (level / np.sqrt(np.mean(sound**2))), np.float32)


def syllable(rng: np.random.Generator) -> Array:
    """A hiss, then glottal pulses of gliding pitch through three formants."""
    t = np.arange(int(RATE * rng.uniform(0.12, 0.26))) / RATE
    pitch = rng.uniform(90, 220) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(1, 3) * t))
    voice = np.diff(np.floor(np.cumsum(pitch) / RATE), prepend=0.0)
    ring = np.arange(400) / RATE
    for formant, width in zip(VOWELS[rng.integers(len(VOWELS))], (80, 100, 140), strict=True):
        reply = np.exp(-np.pi * width * ring) * np.sin(2 * np.pi * formant * ring)
        voice = np.convolve(voice, reply)[: t.size]
    voice = scaled(voice * np.sqrt(np.sin(np.pi * np.arange(t.size) / t.size)), 1.0)
    hiss = np.diff(rng.standard_normal(int(RATE * rng.uniform(0.04, 0.1))))
    return np.concatenate([scaled(hiss * np.hanning(hiss.size), rng.uniform(0.2, 0.5)), voice])


def babble(seconds: float, seed: int = 0) -> Array:
    """Syllables, one after the other."""
    rng, parts, size = np.random.default_rng(seed), list[Array](), 0
    while size < seconds * RATE:
        parts.append(syllable(rng))
        size += parts[-1].size
    return scaled(np.concatenate(parts)[: int(seconds * RATE)])


def spoken(voice: str, sentence: str) -> Array | None:
    """A sentence by espeak-ng, without the silence around it; None where it is not installed."""
    program = shutil.which("espeak-ng")
    if program is None:
        return None
    command = [program, "-v", voice, "--stdout", sentence]
    file = io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)
    with wave.open(file) as said:
        rate, raw = said.getframerate(), said.readframes(1 << 24)
    sound = np.frombuffer(raw, "<i2") / 32768
    at = np.arange(int(sound.size * RATE / rate)) * (rate / RATE)
    loud = np.flatnonzero(np.abs(np.interp(at, np.arange(sound.size), sound)) > 1e-3)
    return scaled(np.interp(at, np.arange(sound.size), sound)[loud[0] : loud[-1] + 1])


def with_pauses(sounds: list[Array], seed: int = 0) -> tuple[Array, Regions]:
    """Sounds between pauses of 1 to 4 s, and where they are."""
    rng = np.random.default_rng(seed)
    parts, where, size = list[Array](), Regions(), 0
    for sound in [*sounds, None]:
        parts.append(np.zeros(int(RATE * rng.uniform(1, 4)), np.float32))
        size += parts[-1].size
        if sound is not None:
            where.append((size / RATE, (size + sound.size) / RATE))
            parts.append(sound)
            size += sound.size
    return np.concatenate(parts), where


def chords(seconds: float, seed: int = 0, vibrato: float = 5.5) -> Array:
    """Chords of harmonic notes with vibrato, 0.8 to 2.5 s each."""
    rng, parts, size = np.random.default_rng(seed), list[Array](), 0
    while size < seconds * RATE:
        t = np.arange(int(RATE * rng.uniform(0.8, 2.5))) / RATE
        root, chord = 110 * 2 ** (rng.integers(12) / 12), np.zeros(t.size)
        for note in (0, 4, 7, 12):
            pitch = root * 2 ** (note / 12)
            sway = 0.006 / (2 * np.pi * vibrato) * np.sin(2 * np.pi * vibrato * t)
            for h in range(1, 9):
                phase = 2 * np.pi * h * pitch * (t + sway) + rng.uniform(0, 6)
                chord += np.sin(phase) / h**1.2
        parts.append(chord * np.clip(np.minimum(t, t[-1] - t) / 0.05, 0.2, 1))
        size += t.size
    return scaled(np.concatenate(parts)[: int(seconds * RATE)])


def melody(seconds: float, length: float, seed: int = 0) -> Array:
    """Plucked notes of one length, one after the other."""
    rng, t = np.random.default_rng(seed), np.arange(int(RATE * length)) / RATE
    pitches = 220 * 2 ** (rng.integers(0, 24, int(seconds / length)) / 12)
    partials = np.arange(1, 8)[:, None]
    notes = [(np.sin(2 * np.pi * partials * p * t) / partials).sum(0) for p in pitches]
    return scaled(np.concatenate([note * np.exp(-3 * t) for note in notes]))


def noise(seconds: float, seed: int = 0, *, pink: bool = False) -> Array:
    white = np.random.default_rng(seed).standard_normal(int(seconds * RATE))
    if not pink:
        return scaled(white)
    spectrum = np.fft.rfft(white)
    spectrum[1:] /= np.sqrt(np.arange(1, spectrum.size))
    return scaled(np.fft.irfft(spectrum, white.size))


def score(regions: Regions, expected: Regions, seconds: float) -> tuple[float, float]:
    """The recall of speech, and the rate of false alarms 0.5 s or more away from speech."""
    speech, near, taken = (np.zeros(int(100 * seconds), bool) for _ in range(3))
    for start, end in expected:
        speech[int(100 * start) : int(100 * end)] = True
        near[max(int(100 * start) - 50, 0) : int(100 * end) + 50] = True
    for start, end in regions:
        taken[int(100 * start) : int(100 * end)] = True
    return float(taken[speech].mean()), float(taken[~near].mean())
