"""What the tests of Whisper share: checkpoints, two windows of sound, what transformers says."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

import centella as ct
from centella.models.whisper import WhisperConfig, WhisperModel
from centella.weights import open_checkpoint

FOLDER = Path(__file__).parents[1] / "data" / "whisper"
NAMES = ("tiny", "large", "turbo", "distil-en")
FRAMES = (300, 220)  # of each window that sound is in, for times
EVERY = ("cpu", "webgpu", "webgpu-hardware", "cuda")
Array = np.ndarray[Any, Any]


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The values of a checkpoint's config.json, some changed."""
    return {**json.loads((FOLDER / name / "config.json").read_text()), **changes}


@functools.cache
def expected(name: str) -> dict[str, Array]:
    """What transformers computes of `mel`."""
    return dict(np.load(FOLDER / name / "expected.npz"))


def mel(mels: int) -> Array:
    """Two windows f32 [2, mels, 300] of noise, as tests/reference/whisper.py makes them."""
    noise = np.random.default_rng(mels).standard_normal((2, mels, 300))
    return np.clip(noise.astype(np.float32), -1, 1.5)


def long_mel(mels: int) -> Array:
    """A recording f32 [1, mels, 1110] of the same kind."""
    noise = np.random.default_rng(mels + 1).standard_normal((1, mels, 1110))
    return np.clip(noise.astype(np.float32), -1, 1.5)


@functools.cache
def model_of(name: str, device: ct.Device, dtype: str = "f32") -> WhisperModel:
    """A checkpoint's model."""
    config = WhisperConfig.from_dict(config_of(name))
    model = WhisperModel(config, ct.f16 if dtype == "f16" else ct.f32)
    model.load_parameters(
        open_checkpoint(FOLDER / name), device=device, dtype=dtype, vector_dtype="f32"
    )
    return model
