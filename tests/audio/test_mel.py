"""Log-mel on the host and on devices, compared with transformers' extractor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from centella.audio.mel import host_log_mel, mel_filters
from centella.errors import DTypeError, ShapeError

Array = np.ndarray[Any, Any]


def signal(kind: str, n: int) -> Array:
    """Samples of a kind, f32 [n]."""
    rng, t = np.random.default_rng(n), np.arange(n) / 16000
    kinds: dict[str, Callable[[], Array]] = {
        "noise": lambda: 0.1 * rng.standard_normal(n),
        "silence": lambda: np.zeros(n),
        "tone": lambda: 0.9 * np.sin(2 * np.pi * 997.3 * t),
        "click": lambda: np.where(np.arange(n) == n // 2, 30.0, 0.0),
        "offset": lambda: 0.5 + 1e-3 * rng.standard_normal(n),
        "chirp": lambda: np.sin(2 * np.pi * (50 + 1500 * t) * t) * np.exp(-t),
    }
    return np.asarray(kinds[kind](), np.float32)


KINDS = ["noise", "silence", "tone", "click", "offset", "chirp"]


def expected(samples: Array, num_mels: int, *, pad: bool = False) -> Array:
    """transformers' own, without padding unless asked for."""
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=num_mels)
    if pad:
        made = extractor(samples, sampling_rate=16000, return_tensors="np")["input_features"]
        return np.asarray(made[0])
    return np.asarray(extractor._np_extract_fbank_features(samples[None], "cpu")[0])


@pytest.mark.parametrize("num_mels", [80, 128])
def test_filters_are_slaneys(num_mels: int) -> None:
    audio_utils = pytest.importorskip("transformers.audio_utils")
    theirs = audio_utils.mel_filter_bank(201, num_mels, 0.0, 8000.0, 16000, "slaney", "slaney")
    np.testing.assert_allclose(mel_filters(num_mels), theirs.T, atol=1e-12)


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [160, 201, 479, 16001, 81919])
def test_the_hosts_is_that_of_transformers(kind: str, n: int, num_mels: int) -> None:
    samples = signal(kind, n)
    np.testing.assert_allclose(
        host_log_mel(samples, num_mels), expected(samples, num_mels), atol=1e-5
    )


def test_a_window_padded_to_30_s_is_the_extractors() -> None:
    samples = signal("chirp", 50001)
    window = np.pad(samples, (0, 480000 - 50001))
    np.testing.assert_allclose(host_log_mel(window), expected(samples, 80, pad=True), atol=1e-4)


def test_rows_are_apart_and_short_ones_have_no_frame() -> None:
    rows = np.stack([signal("tone", 4000), signal("noise", 4000)])
    np.testing.assert_array_equal(host_log_mel(rows)[1], host_log_mel(rows[1]))
    assert host_log_mel(rows[:, :159]).shape == (2, 80, 0)
    assert host_log_mel(rows[:0]).shape == (0, 80, 25)


@pytest.mark.parametrize(
    ("samples", "num_mels", "error", "text"),
    [
        (np.float32(1), 80, ShapeError, r"expected \[n\] or \[batch, n\], got \[\]"),
        (np.zeros((1, 2, 3)), 80, ShapeError, r"got \[1, 2, 3\]"),
        (np.zeros(400), 0, ShapeError, "expected 1 to 201, got 0"),
        (np.zeros(400, np.int16), 80, DTypeError, "expected floats, got int16"),
    ],
)
def test_what_is_refused(samples: Array, num_mels: int, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        host_log_mel(samples, num_mels)
