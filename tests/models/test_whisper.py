"""Whisper against what transformers computed in float64 (tests/reference/whisper.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import ShapeError, WeightsError
from centella.models.whisper import WhisperConfig
from tests.support.whisper_common import EVERY, NAMES, config_of, expected, mel, model_of

TOLERANCE = 1e-4  # of logits of size 10, in f32


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_states_and_logits(device: ct.Device, name: str) -> None:
    stored, model = expected(name), model_of(name, device)
    sound = ct.asarray(mel(model.config.num_mel_bins), device=device)
    states = model.encode(sound)
    assert states.shape == (2, 150, 72)
    np.testing.assert_allclose(states.numpy()[:, ::5], stored["states"], atol=TOLERANCE, rtol=0)
    logits = model(sound, ct.asarray(stored["ids"], device=device))
    np.testing.assert_allclose(logits.numpy(), stored["logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
@pytest.mark.parametrize("name", ["tiny", "large"])
def test_f16_with_f32_statistics(device: ct.Device, name: str) -> None:
    """The error's root mean square is within 1 % of the size."""
    stored, model = expected(name), model_of(name, device, "f16")
    sound = ct.asarray(mel(model.config.num_mel_bins), device=device)
    logits = model(sound, ct.asarray(stored["ids"], device=device)).numpy()
    error, size = (np.sqrt(np.mean(a**2)) for a in (logits - stored["logits"], stored["logits"]))
    assert error < size * 0.01, (error, size)


@pytest.mark.devices("cpu", "webgpu")
def test_shorter_sound(device: ct.Device) -> None:
    """Fewer frames are fewer places, and the first ones' convolution is the same."""
    model = model_of("tiny", device)
    sound = mel(80)[:1, :, :77]
    assert model.encode(ct.asarray(sound, device=device)).shape == (1, 39, 72)
    assert model(ct.asarray(sound, device=device), ct.asarray([[5]], device=device)).shape[1] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": None}, "d_model: expected a whole number over 0"),
        ({"encoder_attention_heads": 5}, "encoder_attention_heads: expected a divisor of 72"),
        ({"activation_function": "tan"}, "activation_function: expected gelu"),
        ({"median_filter_width": 4}, "median_filter_width: expected an odd number"),
        ({"encoder_layers": 2**40}, "encoder_layers: expected at most"),
        ({"scale_embedding": 1}, "scale_embedding: expected true or false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: this library does not know"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        WhisperConfig.from_dict(config_of("tiny", **changes))


def test_bad_shapes_name_what_came() -> None:
    model = model_of("tiny", ct.device("cpu"))
    ids = ct.asarray([[5, 6]], device="cpu")
    with pytest.raises(ShapeError, match=r"spectrogram \[batch, 80, up to 300\], got \[1, 128"):
        model.encode(ct.asarray(mel(128)[:1], device="cpu"))
    with pytest.raises(ShapeError, match=r"expected ids \[2, up to 64\], got \[1, 2\]"):
        model(ct.asarray(mel(80), device="cpu"), ids)
    long = ct.asarray(np.zeros((1, 65), np.int32), device="cpu")
    with pytest.raises(ShapeError, match="up to 64"):
        model(ct.asarray(mel(80)[:1], device="cpu"), long)
