"""Sound of any length, as loud as speech, and as a file."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

RATE = 16000


def noise(seconds: float) -> Any:
    """Noise in bursts of a third of a second, f32 [samples] at 16 kHz."""
    count = round(seconds * RATE)
    loud = 0.02 + 0.2 * (np.sin(2 * np.pi * 3 * np.arange(count) / RATE) > -0.5)
    every = np.random.default_rng(1).standard_normal(min(count, 30 * RATE), np.float32)
    return (np.resize(every, count) * loud * 0.5).astype(np.float32)


def write_wav(file: Path, seconds: float) -> None:
    """That noise as 16-bit samples."""
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        samples = np.clip(noise(seconds), -1, 1) * 32767
        out.writeframes(samples.astype("<i2").tobytes())
