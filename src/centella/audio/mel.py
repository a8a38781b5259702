"""Log-mel spectrograms as Whisper reads them (Radford et al. 2022), on the host in float64.

    frames   t = 0 .. n // 160 - 1: 400 samples around sample 160 t; ends are reflected
    power    |DFT(hann x frame)|^2 of 201 frequencies, 0 to 8 kHz
    mel      filters @ power: triangles on the Slaney mel scale, each of area 2 / its width in Hz
    result   (max(l, max(l) - 8) + 4) / 4 with l = log10(max(mel, 1e-10))

max(l) is that of one row of samples. The reference's extractor pads or cuts a row to 30 s first, so
whoever gives rows of 30 s (`WINDOW` samples) gets its numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from centella.dtypes import host_numbers
from centella.errors import DTypeError, ShapeError

Array = np.ndarray[Any, Any]

RATE = 16000  # samples a second
FRAME = 400  # samples of a transform
HOP = 160  # samples between frames
EDGE = FRAME // 2  # samples that are reflected
BINS = FRAME // 2 + 1
WINDOW = 30 * RATE  # samples of a window of Whisper
FLOOR = 1e-10  # the least power of a mel band
RANGE = 8.0  # powers of 10 below the maximum that are kept

_BLOCK = 512  # frames transformed at once: their spectra stay in a core's cache
_LINEAR = 200.0 / 3.0  # Hz a mel below 1 kHz
_BREAK = 15.0  # mels at 1 kHz
_STEP = np.log(6.4) / 27.0  # log Hz a mel above 1 kHz


def _mel(hertz: float) -> float:
    """Slaney's scale: linear to 1 kHz, logarithmic above."""
    return hertz / _LINEAR if hertz < 1000.0 else _BREAK + float(np.log(hertz / 1000.0)) / _STEP


def _hertz(mels: Array) -> Array:
    return np.where(mels < _BREAK, mels * _LINEAR, 1000.0 * np.exp(_STEP * (mels - _BREAK)))


@lru_cache(maxsize=8)
def mel_filters(num_mels: int) -> Array:
    """Weights of the frequencies in each mel band, float64 [num_mels, 201], read-only.

    Source: M. Slaney, Auditory Toolbox, 1998: triangles whose corners are equally far apart in
    mels from 0 Hz to 8 kHz, divided by half their width in Hz.
    """
    corners = _hertz(np.linspace(0.0, _mel(RATE / 2), num_mels + 2))
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    bins = np.linspace(0.0, RATE / 2, BINS)
    sides = np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle))
    filters: Array = np.maximum(sides, 0.0) * 2.0 / (high - low)
    filters.setflags(write=False)
    return filters


def hann() -> Array:
    """The periodic Hann window of a frame, float64 [400]."""
    phase: Array = 2.0 * np.pi * np.arange(FRAME) / FRAME
    return 0.5 - 0.5 * np.cos(phase)


def check_mel(op: str, shape: tuple[int, ...], num_mels: object) -> None:
    """Refuse samples that are no row or rows, and a number of bands that frequencies cannot fill.

    Raises:
        ShapeError: samples of no dimension or more than 2, num_mels not in 1 to 201.
    """
    if len(shape) not in (1, 2):
        raise ShapeError(f"{op}: samples: expected [n] or [batch, n], got {list(shape)}")
    if not isinstance(num_mels, int) or not 1 <= num_mels <= BINS:
        raise ShapeError(f"{op}: num_mels: expected 1 to {BINS}, got {num_mels!r}")


def host_log_mel(samples: Array, num_mels: int = 80) -> Array:
    """`log_mel` in NumPy, on the host.

    Args:
        samples: floats, [n] or [batch, n], at 16 kHz.
        num_mels: bands; Whisper has 80 or 128.

    Returns:
        f32 [num_mels, n // 160], or [batch, num_mels, n // 160].

    Raises:
        ShapeError, DTypeError: samples of another shape or dtype.
    """
    array = host_numbers("host_log_mel", samples)
    check_mel("host_log_mel", array.shape, num_mels)
    if array.dtype.kind != "f":
        raise DTypeError(f"host_log_mel: samples: expected floats, got {array.dtype}")
    rows = np.atleast_2d(array)
    out = np.empty((len(rows), num_mels, array.shape[-1] // HOP), np.float32)
    for row, target in zip(rows, out, strict=True):
        _fill_row(row, target)
    return out.reshape(*array.shape[:-1], *out.shape[1:])


def _fill_row(row: Array, out: Array) -> None:
    """The log-mel of one row, into [mels, frames]."""
    num_mels, count = out.shape
    if not count:
        return
    padded = np.pad(row, EDGE, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP]
    filters, window = mel_filters(num_mels), hann()
    logs = np.empty((num_mels, count))
    for first in range(0, count, _BLOCK):
        spectrum = np.fft.rfft(frames[first : min(first + _BLOCK, count)] * window)
        power = spectrum.real**2 + spectrum.imag**2
        logs[:, first : first + _BLOCK] = filters @ power.T
    np.log10(np.maximum(logs, FLOOR, out=logs), out=logs)
    out[...] = (np.maximum(logs, logs.max() - RANGE) + 4.0) / 4.0
