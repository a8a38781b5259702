"""Files of espeak-ng, sox and ffmpeg through the whole of `Transcriber`, in windows of 30 s.

Weights are random, so words cannot be right: lengths, times, windows and formats are checked.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import AudioError
from centella.tasks.transcribe.transcriber import Transcriber, Transcript
from tests.support.whisper_common import FOLDER

TOOLS = ("espeak-ng", "sox", "ffmpeg")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
POSITIONS, TARGETS = 1500, 448
SENTENCE = "The quick brown fox jumps over the lazy dog, and nobody has seen it since."


def run(*command: str | Path) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transcriber:
    """The tiny checkpoint with a released model's positions; it writes few times and no end."""
    numpy = pytest.importorskip("safetensors.numpy")
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    folder = tmp_path_factory.mktemp("whisper") / "tiny"
    shutil.copytree(FOLDER / "tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    added = POSITIONS - config["max_source_positions"]
    config.update(max_source_positions=POSITIONS, max_target_positions=TARGETS,
                  vocab_size=config["vocab_size"] + added)  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["suppress_tokens"] += [settings["eos_token_id"]]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [
        {**last, "id": last["id"] + i + 1, "content": f"<|{0.02 * time:.2f}|>"}
        for i, time in enumerate(range(POSITIONS - added + 1, POSITIONS + 1))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tensors, rng = numpy.load_file(folder / "model.safetensors"), np.random.default_rng(0)
    for name, tensor in tensors.items():
        rows = {"encoder.embed_positions": POSITIONS, "decoder.embed_positions": TARGETS}
        count = rows.get(name.removeprefix("model.").removesuffix(".weight"), 0)
        if "embed_tokens" in name or "proj_out" in name:
            times = rng.standard_normal((POSITIONS + 1, tensor.shape[1])) * 0.01
            words = tensor[: len(tensor) + added - len(times)]
            tensors[name] = np.concatenate([words, times.astype(tensor.dtype)])
        elif count:
            drawn = rng.standard_normal((count, tensor.shape[1])) * 0.25
            tensors[name] = drawn.astype(tensor.dtype)
    numpy.save_file(tensors, folder / "model.safetensors")
    return ct.load(folder, "cpu", task="transcribe")


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten minutes at 44.1 kHz in stereo: a sentence at the begin of every ten seconds."""
    folder = tmp_path_factory.mktemp("talk")
    run("espeak-ng", "-w", folder / "said.wav", SENTENCE)
    effects = ("gain", "-n", "-6", "pad", "0", "10", "trim", "0", "10")
    run("sox", folder / "said.wav", "-r", "44100", "-c", "2", folder / "ten.wav", *effects)
    run("sox", folder / "ten.wav", folder / "talk.wav", "repeat", "59")
    return folder / "talk.wav"


def part(talk: Path, seconds: float, path: Path, *options: str) -> Path:
    run("ffmpeg", "-v", "error", "-y", "-t", str(seconds), "-i", talk, *options, path)
    return path


def heard(model: Transcriber, path: Path, **options: Any) -> tuple[Transcript, list[Any]]:
    """A transcript whose segments lie in the file, in order; what progress was told."""
    told: list[tuple[float, float]] = []
    how: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 8, "no_speech_threshold": None}
    transcript = model.transcribe(
        path, progress=lambda at, total: told.append((at, total)), **{**how, **options}
    )
    assert all(0 <= s.start < s.end <= transcript.duration + 0.01 for s in transcript.segments)
    starts = [s.start for s in transcript.segments]
    assert starts == sorted(starts)
    assert [at for at, _ in told] == sorted(at for at, _ in told)
    return transcript, told


@pytest.mark.parametrize(("seconds", "windows"), [(1.0, 1), (29.9, 1), (30.1, 2)])
def test_about_a_window(
    model: Transcriber, talk: Path, tmp_path: Path, seconds: float, windows: int
) -> None:
    path = part(talk, seconds, tmp_path / "a.wav")
    transcript, told = heard(model, path, vad="off", timestamps="none")
    assert transcript.duration == pytest.approx(seconds, abs=0.01)
    assert len(transcript.segments) == len(told) == windows
    assert transcript.segments[-1].end == pytest.approx(seconds, abs=0.02)
    timed, _ = heard(model, path)
    assert timed.segments and timed.language in model.languages


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "ogg", "m4a"])
def test_formats(model: Transcriber, talk: Path, tmp_path: Path, kind: str) -> None:
    """Stereo at 44.1 kHz: the same length, and speech at the same times."""
    codec = ["-c:a", "libvorbis"] if kind == "ogg" else []
    transcript, told = heard(model, part(talk, 25, tmp_path / f"a.{kind}", *codec), batch=2,
                             timestamps="none", condition_on_previous_text=False)  # fmt: skip
    assert transcript.duration == pytest.approx(25, abs=0.1)
    assert {round(total) for _, total in told} == {25}
    (segment,) = transcript.segments  # the regions of three sentences fit into a window
    assert segment.start < 0.5 and 21 < segment.end <= 25.1


@pytest.mark.parametrize("hidden", ["ffmpeg", "av"])
def test_a_long_m4a_is_read_in_batches(
    model: Transcriber, talk: Path, tmp_path: Path, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its length is known from the container, by PyAV and by ffmpeg."""
    path = part(talk, 45, tmp_path / "a.m4a")
    if hidden == "ffmpeg":
        pytest.importorskip("av")
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setitem(sys.modules, "av", None)
    transcript, told = heard(model, path, timestamps="none")
    assert transcript.duration == pytest.approx(45, abs=0.1)
    assert {round(total, 1) for _, total in told} == {45.0}
    assert model._idle.waiting[0].session.batch == 8
    assert len(transcript.segments) == 2


@pytest.mark.sweep
@pytest.mark.parametrize("batch", [1, 8])
def test_ten_minutes(model: Transcriber, talk: Path, tmp_path: Path, batch: int) -> None:
    transcript, told = heard(model, part(talk, 600, tmp_path / "a.mp3"), batch=batch,
                             max_new_tokens=2, timestamps="none", language="en")  # fmt: skip
    assert transcript.duration == pytest.approx(600, abs=0.1)
    assert told[-1][0] > 590
    starts = {int((s.start + 0.3) // 30) for s in transcript.segments}  # a little before the speech
    assert starts == set(range(20))


@pytest.mark.parametrize("sound", ["silence", "music", "noise"])
def test_nobody_speaks(model: Transcriber, tmp_path: Path, sound: str) -> None:
    path = tmp_path / "a.wav"
    chord = [word for hertz in (262, 330, 392) for word in ("pluck", str(hertz))]
    effects = {
        "silence": ["trim", "0", "40"],
        "music": ["synth", "2", *chord, "remix", "1,2,3", "gain", "-n", "-6", "repeat", "9"],
        "noise": ["synth", "40", "pinknoise", "gain", "-n", "-12"],
    }
    channels = "3" if sound == "music" else "1"
    run("sox", "-n", "-r", "44100", "-c", channels, path, *effects[sound])
    transcript, _ = heard(model, path)
    assert transcript.segments == () and transcript.duration > 15


def test_eight_channels(model: Transcriber, talk: Path, tmp_path: Path) -> None:
    run("sox", talk, "-c", "8", tmp_path / "a.wav", "trim", "0", "6")
    transcript, _ = heard(model, tmp_path / "a.wav")
    assert transcript.duration == pytest.approx(6, abs=0.01) and transcript.segments


@pytest.mark.parametrize("kind", ["mp3", "wav", "webm", "m4a"])
def test_a_file_that_was_cut_off(model: Transcriber, talk: Path, tmp_path: Path, kind: str) -> None:
    """What is there is transcribed; an m4a has its index at the end."""
    path = part(talk, 20, tmp_path / f"a.{kind}")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    if kind == "m4a":
        with pytest.raises(AudioError, match=r"a\.m4a: expected audio"):
            model.transcribe(path)
        return
    transcript, told = heard(model, path, batch=1)
    assert transcript.segments and transcript.duration == pytest.approx(10, abs=1.5)
    assert told[-1][0] <= transcript.duration == told[-1][1]
