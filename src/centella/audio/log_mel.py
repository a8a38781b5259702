"""Log-mel spectrograms on a device, of operations that exist; `mel.py` has the formula.

The transform is a product of frames, 400 samples that overlap, with windowed cosines and sines. The
frequencies at either end have no weight in any band, which leaves 199; with one column of zeros
rows are whole chunks.

A band may be 10^-4 as loud as a tone beside it, and f32 sums over the tone lose so much. So samples
and basis are each the sum of a coarse and a fine part. The coarse parts have so few digits that
their products and sums are exact; what the fine parts add is small, and so is its rounding.
"""

from __future__ import annotations

import math

import numpy as np

from centella.audio.mel import (
    BINS,
    EDGE,
    FLOOR,
    FRAME,
    HOP,
    RANGE,
    Array,
    check_mel,
    hann,
    mel_filters,
)  # fmt: skip
from centella.errors import DTypeError
from centella.runtime.device import Device
from centella.tensors.arguments import check_tensors
from centella.tensors.creation import arange, empty
from centella.tensors.functional.axes import max as max_along
from centella.tensors.functional.elementwise import abs, clip, log, maximum
from centella.tensors.functional.move import concat, gather
from centella.tensors.functional.products import linear
from centella.tensors.tensor import Tensor, upload

_COLUMNS = BINS - 1  # frequencies 1 to 199, and zeros
# A sample plus the loudest times 2^16, less that, has 8 digits left: products with steps of 2^-9,
# and sums of 400 of them, have 24.
_FAR, _STEPS = 65536.0, 512.0


def log_mel(samples: Tensor, num_mels: int = 80) -> Tensor:
    """The log-mel spectrogram that Whisper reads (Radford et al. 2022).

    Frame t is centred on sample 160 t, 400 samples long under a Hann window; the ends of a row are
    reflected. A power of a band below 1e-10, or 10^-8 of the row's largest, becomes that; the
    result is (log10(power) + 4) / 4. Rows of 480000 samples (30 s, padded with zeros) give what
    transformers' `WhisperFeatureExtractor` does, within 1e-5.

    Args:
        samples: f32 [n] or [batch, n], mono at 16 kHz.
        num_mels: bands from 0 to 8 kHz on Slaney's mel scale; Whisper has 80 or 128.

    Returns:
        f32 [num_mels, n // 160] or [batch, num_mels, n // 160], a view with bands last in memory.

    Raises:
        ShapeError: samples of another rank, num_mels not in 1 to 201; DTypeError: no f32.
    """
    check_tensors("log_mel", samples)
    check_mel("log_mel", samples.shape, num_mels)
    if samples.dtype.name != "f32":
        raise DTypeError(f"log_mel: samples: expected f32, got {samples.dtype.name}")
    batch, count = (1, *samples.shape)[-2:], samples.shape[-1] // HOP
    shape = (*samples.shape[:-1], num_mels, count)
    if not math.prod(shape):
        return empty(shape, "f32", samples.device)
    coarse_basis, fine_basis, filters = _constants(samples.device, num_mels)
    wave = _reflected(samples.reshape(*batch), count)
    far = max_along(abs(wave), axis=-1, keepdims=True) * _FAR
    coarse = (wave + far) - far
    spectrum = linear(_frames(wave, count), fine_basis)
    spectrum = linear(_frames(wave - coarse, count), coarse_basis, residual=spectrum)
    spectrum = linear(_frames(coarse, count), coarse_basis, residual=spectrum)
    real, imaginary = spectrum[..., :_COLUMNS], spectrum[..., _COLUMNS:]
    power = linear(real * real + imaginary * imaginary, filters)
    logs = log(clip(power, min=FLOOR)) * (1.0 / math.log(10.0))
    clamped = maximum(logs, max_along(logs, axis=(1, 2), keepdims=True) - RANGE)
    return ((clamped + 4.0) * 0.25).permute(0, 2, 1).reshape(*shape)


def _frames(wave: Tensor, count: int) -> Tensor:
    """A view [b, count, FRAME] of rows [b, n]: frames overlap."""
    strides = (wave.spec.strides[0], HOP, 1)
    return wave._view((wave.shape[0], count, FRAME), strides, wave._offset)


def _reflected(rows: Tensor, count: int) -> Tensor:
    """Rows [b, n] with what the first and last frames see beyond them, mirrored at the ends."""
    n, device = rows.shape[1], rows.device
    parts = [gather(rows, arange(EDGE, 0, -1, device=device), axis=1), rows]
    if n <= EDGE:  # the mirror image ends, and is mirrored itself
        back = arange(2 * (n - 1) - EDGE, n - 1, device=device)
        forth = arange(n - 1, 0, -1, device=device)
        parts[0] = gather(rows, concat([back, forth]), axis=1)
    missing = (count - 1) * HOP + FRAME - EDGE - n
    if missing > 0:
        parts.append(gather(rows, arange(n - 2, n - 2 - missing, -1, device=device), axis=1))
    return concat(parts, axis=1)


def _constants(device: Device, num_mels: int) -> tuple[Tensor, ...]:
    """Coarse and fine basis [400, 400] and filters [mels, 200], uploaded once a device."""
    kept = device.constants.get(("log_mel", num_mels))
    if kept is None:
        filters = np.zeros((num_mels, _COLUMNS))
        filters[:, :-1] = mel_filters(num_mels)[:, 1:-1]
        basis = _basis()
        coarse = np.round(basis * _STEPS) / _STEPS
        kept = tuple(_uploaded(device, data) for data in (coarse, basis - coarse, filters))
        device.constants["log_mel", num_mels] = kept
    return kept


def _basis() -> Array:
    """Windowed cosines and sines of frequencies 1 to 199, each with a row of zeros after it."""
    turns = np.outer(np.arange(1, BINS - 1), np.arange(FRAME)) % FRAME  # exact integers
    angles = 2.0 * np.pi * turns / FRAME
    waves = np.stack([np.cos(angles), np.sin(angles)]) * hann()
    return np.pad(waves, ((0, 0), (0, 1), (0, 0))).reshape(2 * _COLUMNS, FRAME)


def _uploaded(device: Device, data: Array) -> Tensor:
    """A tensor of no batch or capture that is open, ready for all of them."""
    target = device.recorder.implicit()
    tensor = upload("log_mel", data.astype(np.float32), None, device, target)
    device.recorder.materialise(tensor._value)
    return tensor
