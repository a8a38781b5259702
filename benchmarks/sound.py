"""Sound of any length, as loud as speech, and as a file."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

RATE = 16000


def syllables(seconds: float) -> Any:
    """Four syllables a second, f32 [samples] at 16 kHz: voices that glide, then hisses.

    The detector of speech hears speech in all of it; 30 s repeat.
    """
    chance, parts = np.random.default_rng(1), []
    for _ in range(120):
        parts += [_voice(chance, 0.17), _hiss(chance, 0.05), np.zeros(RATE * 3 // 100)]
    return np.resize(np.concatenate(parts), round(seconds * RATE)).astype(np.float32)


def _voice(chance: np.random.Generator, seconds: float) -> Any:
    """Partials of a pitch that glides, with two formants of this syllable."""
    count = round(seconds * RATE)
    pitch = np.linspace(*chance.uniform(90, 220, 2), count)
    phase, formants = 2 * np.pi * np.cumsum(pitch) / RATE, chance.uniform([250, 900], [800, 2600])
    sound = np.zeros(count)
    for partial in range(1, 30):
        at = partial * pitch[:, None]
        sound += np.exp(-(((at - formants) / 150) ** 2)).sum(1) * np.sin(partial * phase)
    return 0.2 * sound * np.hanning(count)


def _hiss(chance: np.random.Generator, seconds: float) -> Any:
    """Noise without low frequencies."""
    count = round(seconds * RATE)
    return 0.05 * np.diff(chance.standard_normal(count + 1)) * np.hanning(count)


def write_wav(file: Path, seconds: float) -> None:
    """Those syllables as 16-bit samples."""
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        samples = np.clip(syllables(seconds), -1, 1) * 32767
        out.writeframes(samples.astype("<i2").tobytes())
