"""`check_model` of speech models: spectrogram, layers, logits by step, tokens, the command."""

from __future__ import annotations

import json
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.check import check_model
from centella.errors import AudioError
from centella.tasks.load import load
from centella.tasks.transcribe.transcriber import Transcriber
from tests.support.devices import open_device
from tests.support.model_common import DATA

pytest.importorskip("tokenizers")

MODEL = sys.modules["centella.check.model"]
FOLDER = DATA / "whisper"
PATHS = [
    "log_mel", "encoder.frontend", "encoder.layers.0", "encoder", "decoder.embed_tokens",
    "decoder.layers.0", "decoder.layers.1", "logits, by step", "",
]  # fmt: skip


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers."""
    monkeypatch.setattr(MODEL, "REFERENCE", ("no_such_package",))


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """Four seconds of sound at 8 kHz: more than a window, at another rate."""
    pytest.importorskip("soxr")
    noise = np.random.default_rng(0).standard_normal(4 * 8000) * 3000
    with wave.open(str(tmp_path / "talk.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(noise.astype("<i2").tobytes())
    return tmp_path / "talk.wav"


@pytest.mark.parametrize("name", ["tiny", "turbo", "distil-en"])
def test_a_speech_model_beside_transformers(name: str, talk: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    report = check_model(FOLDER / name, "cpu", audio=talk)
    assert report.ok and report.against.startswith("transformers "), report.card()
    assert report.tokens is not None and report.tokens.equal == report.tokens.of > 20
    if name == "tiny":
        assert [layer.path for layer in report.layers] == PATHS
    assert all(layer.error is not None and layer.error < 1e-10 for layer in report.layers)


@pytest.mark.devices("webgpu", "webgpu-hardware", "cuda")
@pytest.mark.usefixtures("alone")
def test_a_speech_model_beside_the_cpu(device: ct.Device) -> None:
    """Of the sound that is there without a file."""
    report = check_model(FOLDER / "tiny", device, "f32")
    assert report.ok and report.against == "the CPU, f32", report.card()
    assert [layer.path for layer in report.layers] == PATHS
    assert report.tokens is not None and report.tokens.equal == report.tokens.of


@pytest.mark.usefixtures("alone")
def test_the_first_layer_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(folder: Path, where: Any, dtype: str) -> Transcriber:
        task = load(folder, where, dtype, task="transcribe")
        if where != "cpu":
            layer: Any = task.model.decoder.layers[0]
            layer.fc2.weight = layer.fc2.weight * 1.01
        return task

    monkeypatch.setattr(MODEL, "load", loaded)
    adapter = not isinstance(open_device("webgpu"), str)
    report = check_model(FOLDER / "tiny", "webgpu" if adapter else "simulator", "f32")
    assert report.first is not None and report.first.path == "decoder.layers.0"
    assert [layer.path for layer in report.layers if layer.why] == PATHS[-4:]
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.usefixtures("alone")
def test_the_command_for_a_speech_model(talk: Path, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from tests.cli.test_cli import failed

    model = ("check", "--model", FOLDER / "tiny", "--device", "cpu")
    assert "transformers" in failed(*model, "--audio", talk)
    assert f"{tmp_path}: expected a file, got a folder" in failed(*model, "--audio", tmp_path)
    assert "expected --model DIR" in failed("check", "--audio", talk)
    embeds = ("check", "--model", DATA / "tiny-bert", "--device", "cpu", "--audio", talk)
    assert "audio: expected a speech model, got Embedder" in failed(*embeds)
    with pytest.raises(AudioError, match=r"no-file\.wav"):
        check_model(FOLDER / "tiny", "cpu", audio="no-file.wav")
