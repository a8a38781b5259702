"""`centella transcribe`: files and standard input, formats, and files that fail."""

from __future__ import annotations

import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.audio import format_transcript
from centella.tasks.transcribe.options import Options

pytest.importorskip("typer")
pytest.importorskip("tokenizers")

from tests.cli.test_cli import call, failed
from tests.support.onnx_files import silero, written

MODEL = Path(__file__).parents[1] / "data" / "whisper" / "turbo"
ON = ("transcribe", "--model", MODEL, "--device", "cpu", "--vad", "off")
DONE = re.compile(
    r"\S+: ([\d.]+) s(, \w\w)? in [\d.]+ s, [\d.]+ x real time(; no speech was found)?\n"
)


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random weights no text is believed: each window would be written at six temperatures."""
    of = Options.of

    def options(op: str, values: dict[str, Any], vocabulary: Any) -> Options:
        return of(op, {"temperature": 0.0, **values}, vocabulary)

    monkeypatch.setattr(Options, "of", options)


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """Two seconds of sound, a window, as WAV."""
    t = np.arange(2 * 16000) / 16000
    noise = np.random.default_rng(0).standard_normal(t.size) * 0.02
    x = 0.3 * np.sin(800 * t + 60 * np.sin(3 * t)) * (np.sin(5 * t) > -0.3) + noise
    return write_wav(tmp_path / "talk.wav", (x * 32767).astype("<i2").tobytes())


def test_several_files_go_on_when_one_fails(talk: Path, tmp_path: Path) -> None:
    other = tmp_path / "none.wav"
    result = call(*ON, talk, other, talk, "--language", "de", "--ledger")
    assert result.exit_code == 1
    transcript = ct.load(MODEL, "cpu", task="transcribe").transcribe(talk, language="de", vad="off")
    assert transcript.segments
    first, _, rest = result.stdout.partition(f"{other}:\n")
    assert first == rest
    assert first.startswith(f"{talk}:\n[00:{transcript.segments[0].start:05.2f} - 00:")
    assert first.count("\n") == 1 + len(transcript.segments)
    errors = result.stderr.splitlines(keepends=True)
    assert DONE.fullmatch(errors[0])
    assert "none.wav: expected audio, the file cannot be read" in errors[1]
    assert errors[3].startswith("ledger: ")


@pytest.mark.parametrize("kind", ["text", "json", "srt"])
def test_formats(talk: Path, tmp_path: Path, kind: str) -> None:
    """What the library writes, into a file of that name; by word where words are timed."""
    model = ct.load(MODEL, "cpu", task="transcribe")
    segments = model.transcribe(talk, vad="off").segments
    call(*ON, talk, "--format", kind, "--output", tmp_path / "made")
    (path,) = (tmp_path / "made").iterdir()
    assert path.name == f"talk.{'txt' if kind == 'text' else kind}"
    text, expected = path.read_text(encoding="utf-8"), "".join(format_transcript(segments, kind))
    if kind == "json":
        about = {"file": str(talk), "language": "en", "duration": 2.0}
        assert json.loads(text) == {**about, **json.loads(expected)}
    else:
        assert text == expected
    if kind == "srt":
        result = call(*ON, talk, "--format", kind, "--timestamps", "word")
        words = model.transcribe(talk, vad="off", timestamps="word").words
        assert result.stdout.count("-->") == sum(bool(w.text.strip()) for w in words)


def test_words_are_lines_of_text(talk: Path) -> None:
    result = call(*ON, talk, "--timestamps", "word")
    heard = ct.load(MODEL, "cpu", task="transcribe").transcribe(talk, vad="off", timestamps="word")
    lines = [f"[00:{w.start:05.2f} - 00:{w.end:05.2f}] {w.text.strip()}" for w in heard.words]
    assert lines and result.stdout.splitlines() == lines


def test_standard_input(talk: Path) -> None:
    """A WAV and raw samples from a pipe have the transcript of the file."""
    data = talk.read_bytes()
    transcript = ct.load(MODEL, "cpu", task="transcribe").transcribe(talk, vad="off")
    wanted = {"file": "-", "language": transcript.language, "duration": 2.0}
    wanted |= json.loads("".join(format_transcript(transcript.segments, "json")))
    piped = call(*ON, "-", "--format", "json", stdin=data)
    assert json.loads(piped.stdout) == wanted
    raw = call(*ON, "-", "--raw", "int16", "--format", "json", stdin=data[44:])
    assert json.loads(raw.stdout) == wanted


def broken_flac(path: Path) -> Path:
    """Twelve seconds of noise as FLAC, of which a part at the end is missing."""
    soundfile = pytest.importorskip("soundfile")
    noise = np.random.default_rng(1).standard_normal(12 * 16000) * 0.1
    soundfile.write(path, noise, 16000, format="FLAC")
    path.write_bytes(path.read_bytes()[:-90_000])
    return path


def test_a_file_that_breaks_off_keeps_what_was_read(talk: Path, tmp_path: Path) -> None:
    """In a file, in an object and in a document of several; the exit code says that it broke."""
    file, folder = broken_flac(tmp_path / "cut.flac"), tmp_path / "made"
    saved = call(*ON, file, "--format", "srt", "--output", folder)
    assert saved.exit_code == 1 and "cut.flac: broken after" in saved.stderr
    assert (folder / "cut.srt").read_text(encoding="utf-8").count("-->") >= 2
    alone = call(*ON, file, "--json")
    assert alone.exit_code == 1
    whole = json.loads(alone.stdout)
    assert len(whole["segments"]) >= 2 and whole["error"] in alone.stderr
    several = json.loads(call(*ON, file, talk, "--json").stdout)["files"]
    assert several[0] == whole and "error" not in several[1]


def test_subtitles_of_several_files_have_a_file_each(talk: Path, tmp_path: Path) -> None:
    other = write_wav(tmp_path / "other.wav", talk.read_bytes()[44:])
    said = failed(*ON, talk, other, "--format", "vtt")
    assert "--format vtt: expected --output DIR with 2 files" in said
    folder = tmp_path / "made"
    call(*ON, tmp_path / "*.wav", "--format", "vtt", "--output", folder)  # no shell expands it
    assert sorted(path.name for path in folder.iterdir()) == ["other.vtt", "talk.vtt"]


def write_wav(path: Path, samples: bytes) -> Path:
    """A WAV of 16-bit samples at 16 kHz."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(samples)
    return path


def test_several_files_as_json_are_one_document(talk: Path, tmp_path: Path) -> None:
    """Each file has an object, one that fails its error; of one file it is the object alone."""
    whole = json.loads(call(*ON, talk, "--format", "json").stdout)
    assert json.loads(call(*ON, talk, "--json").stdout) == whole
    said = call(*ON, talk, "--json", "--format", "srt").output
    assert "--json: expected no other --format, got srt" in said
    assert list(whole) == ["file", "language", "duration", "segments", "text"]
    odd = write_wav(tmp_path / 'a "b".wav', talk.read_bytes()[44:])
    none = tmp_path / "none.wav"
    result = call(*ON, odd, none, talk, "--format", "json")
    assert result.exit_code == 1
    first, second, third = json.loads(result.stdout)["files"]
    assert first == {**whole, "file": str(odd)}
    assert third == whole
    assert second["file"] == str(none)
    assert second["error"].startswith(f"{none}: expected audio, the file cannot be read")


def test_json_of_a_stream_that_breaks_is_whole(tmp_path: Path) -> None:
    """Its first windows are read before the samples that are not finite; the object says so."""
    samples = np.zeros(16000 * 9, np.float32)
    samples[-1] = np.nan
    result = call(*ON, "-", "--raw", "float32", "--format", "json", stdin=samples.tobytes())
    expected = "standard input: expected finite samples, got nan at 9.000 s"
    assert (result.exit_code, result.stderr) == (1, f"centella: {expected}\n")
    assert json.loads(result.stdout)["error"] == expected
    empty = call(*ON, "-", "--raw", "float32", "--format", "json", stdin=samples[-1:].tobytes())
    assert (empty.exit_code, empty.stdout) == (1, "")


@pytest.mark.parametrize("second", ["b/talk.mp3", "a/talk.wav", "b/TALK.wav"])
def test_files_whose_transcripts_have_one_name_are_refused(tmp_path: Path, second: str) -> None:
    """Before the model is loaded, and before anything is written."""
    folder = tmp_path / "made"
    line = failed("transcribe", "a/talk.wav", second, "--model", "none", "--output", folder)
    assert f"expected files of different names, got a/talk.wav and {second}: both would be" in line
    assert not folder.exists()


def test_silence_has_no_text(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "silence.wav", bytes(2 * 16000 * 7))
    result = call("transcribe", path, "--model", MODEL, "--device", "cpu")
    assert result.stdout == ""
    assert DONE.fullmatch(result.stderr)
    assert "no speech was found" in result.stderr


def test_regions_by_silero(talk: Path, tmp_path: Path) -> None:
    """Also from a pipe; `auto` uses the file that an option or the environment names."""
    pytest.importorskip("onnxruntime")
    network = written(tmp_path / "silero_vad.onnx", silero())
    on = (*ON[:-2], "--format", "json", "--timestamps", "word")
    samples = bytes(2 * 16000 * 4) + talk.read_bytes()[44:] + bytes(2 * 16000 * 4)
    path = write_wav(tmp_path / "late.wav", samples)
    model = ct.load(MODEL, "cpu", task="transcribe")
    regions = ct.audio.speech_regions(path, vad_model=network)
    assert [round(t) for region in regions for t in region] == [4, 6]
    expected = model.transcribe(path, regions=regions, timestamps="word").segments
    wanted = json.loads("".join(format_transcript(expected, "json")))
    named = {"CENTELLA_VAD_MODEL": str(network)}
    for arguments, env in (
        ((path, "--vad-model", network), {}), ((path,), named), ((path, "--vad", "silero"), named),
        ((path, "--vad", "silero", "--vad-model", network), {"CENTELLA_VAD_MODEL": "none.onnx"}),
        (("-", "--vad-model", network), {}),
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            result = call(*on, *arguments, stdin=path.read_bytes())
        printed = json.loads(result.stdout)
        assert printed["segments"] == wanted["segments"]
        assert printed["segments"][0]["start"] >= 3.7


def test_a_damaged_silero_file_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path = written(tmp_path / "a.onnx", silero()[:500])
    line = failed("transcribe", "a.wav", "--model", "none", "--vad-model", path)
    assert line.startswith(f"centella: {path}: expected Silero's ONNX file; onnxruntime: ")


def test_a_wav_without_samples_is_named(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "empty.wav", b"")
    assert failed(*ON, path, "--format", "json") == f"centella: {path}: expected samples, got none"


def test_a_language_by_its_name(talk: Path) -> None:
    for name in ("German", "german", "DE", "<|de|>"):
        assert ": 2.0 s, de in " in call(*ON, talk, "--language", name).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no file; try: centella transcribe talk.wav --model DIR"),
        (
            ("a.wav", "--language", "klingon"),
            "language: expected an English name or a code of en, de, fr, es; got 'klingon'",
        ),
        (("a.wav", "--language", "thai"), "a code of en, de, fr, es; got 'thai'"),
        (("a.wav", "--vad", "loud"), "expected vad of auto, silero, energy, off, got 'loud'"),
        (
            ("a.wav", "--vad", "silero"),
            "expected vad_model=PATH, --vad-model PATH or CENTELLA_VAD_M",
        ),
        (("a.wav", "--vad-model", "a.onnx"), "expected vad of auto or silero with it, got off"),
        (("a.wav", "--model", MODEL.parents[1] / "decoders" / "qwen3"), "or centella generate"),
        (("a.wav", "--raw", "int16"), "--raw: expected - among the files, got none"),
        (("a.wav", "--rate", "8000"), "--rate: expected --raw DTYPE with it, got none"),
        (("-", "--rate", "8000"), "--rate: expected --raw DTYPE with it, got none"),
    ],
)
def test_errors_in_one_line(arguments: tuple[object, ...], message: str) -> None:
    assert message in failed(*ON, *arguments)
