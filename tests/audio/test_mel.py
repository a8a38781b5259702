"""Log-mel on the host and on devices, compared with transformers' extractor."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.audio import open_audio, windows
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
    """The mel of transformers, without padding unless asked for."""
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=num_mels)
    if pad:
        features = extractor(samples, sampling_rate=16000, return_tensors="np")["input_features"]
        return np.asarray(features[0])
    return np.asarray(extractor._np_extract_fbank_features(samples[None], "cpu")[0])


@pytest.mark.parametrize("num_mels", [80, 128])
def test_filters_are_slaneys(num_mels: int) -> None:
    audio_utils = pytest.importorskip("transformers.audio_utils")
    theirs = audio_utils.mel_filter_bank(201, num_mels, 0.0, 8000.0, 16000, "slaney", "slaney")
    np.testing.assert_allclose(mel_filters(num_mels), theirs.T, atol=1e-12)


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [160, 201, 479, 16001, 81919])
def test_mel_on_the_host_equals_transformers(kind: str, n: int, num_mels: int) -> None:
    samples = signal(kind, n)
    np.testing.assert_allclose(
        host_log_mel(samples, num_mels), expected(samples, num_mels), atol=1e-5
    )


@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
@pytest.mark.parametrize("num_mels", [80, 128])
def test_mel_equals_the_stored_reference(num_mels: int, device: ct.Device) -> None:
    """The reference is what tests/reference/whisper.py stored."""
    stored = np.load(Path(__file__).parents[1] / "data" / "whisper" / "mel.npz")[f"mel{num_mels}"]
    noise = 0.01 * np.random.default_rng(3).standard_normal(24000)
    samples = (signal("chirp", 24000).astype(np.float64) + noise).astype(np.float32)
    np.testing.assert_allclose(host_log_mel(samples, num_mels), stored, atol=1e-4)
    np.testing.assert_allclose(on_device(samples, num_mels, device), stored, atol=1e-4)


def test_a_window_padded_to_30_s_equals_transformers() -> None:
    samples = signal("chirp", 50001)
    window = np.pad(samples, (0, 480000 - 50001))
    np.testing.assert_allclose(host_log_mel(window), expected(samples, 80, pad=True), atol=1e-4)


def test_rows_are_independent_and_short_ones_have_no_frame() -> None:
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


def on_device(samples: Array, num_mels: int, device: ct.Device) -> Array:
    return ct.log_mel(ct.asarray(samples, device=device), num_mels).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_mel_on_a_device_equals_transformers(kind: str, device: ct.Device) -> None:
    sizes = [160, 200, 201] if device.name == "simulator" else [160, 200, 479, 16001]
    for n, num_mels in zip(sizes, [128, 80, 80, 128], strict=False):
        samples = signal(kind, n)
        spectrogram = on_device(samples, num_mels, device)
        np.testing.assert_allclose(spectrogram, expected(samples, num_mels), atol=1e-4)


@pytest.mark.devices("cpu", "webgpu", "cuda")
@pytest.mark.parametrize("hertz", [21.8, 80.425, 240.8, 320.028, 997.3, 7321.1])
def test_quiet_bands_beside_a_loud_tone(device: ct.Device, hertz: float) -> None:
    """The window leaves bands 80 dB below the tone nearly empty."""
    samples = (0.5 * np.sin(2 * np.pi * hertz * np.arange(16000) / 16000)).astype(np.float32)
    for num_mels in (80, 128):
        spectrogram = on_device(samples, num_mels, device)
        np.testing.assert_allclose(spectrogram, host_log_mel(samples, num_mels), atol=1e-5)


@pytest.mark.devices("cpu", "webgpu", "cuda")
def test_a_padded_window_on_a_device_equals_transformers(device: ct.Device) -> None:
    """A chirp 50 dB below a constant offset, and noise: two independent rows."""
    rows = np.zeros((2, 480000), np.float32)
    rows[0, :50001] = 0.3 + 1e-3 * signal("chirp", 50001)
    rows[1] = signal("noise", 480000)
    spectrograms = on_device(rows, 80, device)
    for row, one in zip(rows, spectrograms, strict=True):
        np.testing.assert_allclose(one, expected(row, 80, pad=True), atol=1e-4)


@pytest.mark.devices("cpu", "webgpu", "cuda")
def test_a_replay_uploads_its_samples_alone(device: ct.Device) -> None:
    compute = device.compile(ct.log_mel, np.zeros((2, 3333), np.float32))
    rows = np.stack([signal("tone", 3333), signal("noise", 3333)])
    compute(rows)
    with ct.ledger() as led:
        spectrograms = compute(rows).numpy()
    led.expect(uploads=1, downloads=1, submissions=1, compiles=0)
    assert led.upload_bytes < rows.nbytes + 512
    np.testing.assert_allclose(spectrograms, host_log_mel(rows), atol=1e-4)
    again = on_device(rows, 80, device)  # its constants are not of the capture alone
    np.testing.assert_array_equal(again, spectrograms)


@pytest.mark.devices("cpu", "webgpu")
def test_bad_samples_on_a_device(device: ct.Device) -> None:
    assert on_device(np.zeros((3, 159), np.float32), 80, device).shape == (3, 80, 0)
    assert np.isnan(on_device(np.full(400, np.nan, np.float32), 80, device)).all()
    with pytest.raises(ShapeError, match="log_mel: num_mels: expected 1 to 201, got 202"):
        on_device(np.zeros(400, np.float32), 202, device)
    with pytest.raises(DTypeError, match="log_mel: samples: expected f32, got f16"):
        on_device(np.zeros(400, np.float16), 80, device)
    with pytest.raises(DTypeError, match="log_mel"):
        ct.log_mel(np.zeros(400))  # type: ignore[arg-type]  # what a user tries first


def test_a_long_recording_in_windows(tmp_path: Path) -> None:
    """The mel of each is the extractor's for that window: its range is its own."""
    path = tmp_path / "long.wav"
    samples = np.concatenate([signal("noise", 16000 * 20), 0.01 * signal("noise", 16000 * 13 + 7)])
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    rows = list(windows(open_audio(path), 160000))
    assert [(begin, row.size) for begin, row in rows] == [(10.0 * i, 160000) for i in range(4)]
    whole = np.concatenate([row for _, row in rows])
    np.testing.assert_allclose(whole[: samples.size], samples, atol=1e-4)
    assert not whole[samples.size :].any()
    for _, row in rows[1:3]:
        np.testing.assert_allclose(host_log_mel(row), expected(row, 80), atol=1e-4)
    assert [begin for begin, _ in windows(iter([samples[:5], samples[5:]]))] == [0.0, 30.0]
