"""Audio from files, streams and arrays: each as mono samples at 16 kHz, or a typed error."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import sys
import threading
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from centella.audio.source import BLOCK
from centella.audio.stream import open_audio, read_audio, windows
from centella.errors import AudioError, MissingExtraError

Array = np.ndarray[Any, Any]

needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not there")


def tone(seconds: float, rate: int = 16000, hertz: float = 440.0) -> Array:
    """A sine of amplitude 0.5, f32 [seconds x rate]."""
    t = np.arange(round(seconds * rate)) / rate
    return np.asarray(0.5 * np.sin(2 * np.pi * hertz * t), np.float32)


def wav_bytes(samples: Array, rate: int, bits: int = 16, length: int | None = None) -> bytes:
    """A WAV file of [n, channels], floats in -1 to 1; `length` is what the header says."""
    whole = np.round((samples if samples.ndim == 2 else samples[:, None]) * (2.0 ** (bits - 1) - 1))
    channels = whole.shape[1]
    raw = (whole + 128).astype("u1").tobytes() if bits == 8 else whole.astype("<i4").tobytes()
    if bits in (16, 24):
        raw = np.frombuffer(raw, "u1").reshape(-1, 4)[:, : bits // 8].tobytes()
    frame = channels * bits // 8
    fmt = struct.pack("<HHIIHH", 1, channels, rate, rate * frame, frame, bits)
    data = b"data" + struct.pack("<I", len(raw) if length is None else length) + raw
    body = b"WAVE" + b"abcd" + struct.pack("<I", 3) + b"efg\0" + b"fmt " + struct.pack("<I", 16)
    return b"RIFF" + struct.pack("<I", len(body + fmt + data)) + body + fmt + data


def similar(samples: Array, expected: Array, tolerance: float) -> None:
    """The middle agrees; ends ring where a filter or a coder meets silence."""
    size = min(len(samples), len(expected))
    inside = slice(800, size - 2000)
    np.testing.assert_allclose(samples[inside], expected[inside], atol=tolerance)


class ReadAlone:
    """What has `read` and no more, as a microphone's wrapper."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, count: int = -1) -> bytes:
        some, self._data = self._data[:count], self._data[count:]
        return some


def test_a_source_that_has_only_read() -> None:
    samples = np.arange(100, dtype=np.int16)
    with open_audio(ReadAlone(samples.tobytes()), rate=16000, dtype="int16") as stream:  # type: ignore[arg-type]  # it has `read`
        assert stream.live
        np.testing.assert_array_equal(stream.read(200), samples / np.float32(32768))


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_wav_needs_no_package(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("soundfile", "soxr", "av"):
        monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / "a.wav"
    path.write_bytes(wav_bytes(tone(1.5), 16000, bits))
    with open_audio(path) as stream:
        assert (stream.rate, stream.channels, stream.duration) == (16000, 1, 1.5)
        np.testing.assert_allclose(stream.read(), tone(1.5), atol=2.0 ** (2 - bits) + 1e-6)
    path.write_bytes(wav_bytes(tone(1.5, 8000), 8000, bits))
    with pytest.raises(MissingExtraError, match=r"'soxr'.*pip install 'centella\[audio\]'"):
        open_audio(path)


def test_float_and_extensible_wav_of_soundfile(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    stereo = np.stack([tone(1.0), np.zeros(16000, np.float32)], axis=1)
    for subtype, kind in [("FLOAT", "WAV"), ("DOUBLE", "WAV"), ("PCM_24", "WAVEX")]:
        soundfile.write(tmp_path / "a.wav", stereo, 16000, subtype=subtype, format=kind)
        np.testing.assert_allclose(read_audio(tmp_path / "a.wav"), tone(1.0) / 2, atol=1e-6)
    soundfile.write(tmp_path / "b.wav", tone(1.0), 16000, subtype="ULAW")  # coded: soundfile's
    np.testing.assert_allclose(read_audio(tmp_path / "b.wav"), tone(1.0), atol=0.02)


@pytest.mark.parametrize("kind", ["flac", "ogg", "mp3", "aiff"])
def test_stereo_at_44100_of_soundfile(kind: str, tmp_path: Path) -> None:
    soundfile, _ = pytest.importorskip("soundfile"), pytest.importorskip("soxr")
    left, right = tone(3.0, 44100), tone(3.0, 44100, 700.0)
    path = tmp_path / f"a.{kind}"
    soundfile.write(path, np.stack([left, right], axis=1), 44100)
    with open_audio(path) as stream:
        assert (stream.rate, stream.channels) == (44100, 2)
        assert stream.duration == pytest.approx(3.0, abs=0.06)
        similar(stream.read(), (tone(3.0) + tone(3.0, 16000, 700.0)) / 2, 0.02)
    again = read_audio(io.BytesIO(path.read_bytes()))
    np.testing.assert_array_equal(again, read_audio(path))


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_pieces_join_to_the_resampled_whole(rate: int) -> None:
    soxr = pytest.importorskip("soxr")
    given = np.random.default_rng(rate).standard_normal(3 * rate + 17).astype(np.float32)
    stream = open_audio(given, rate=rate)
    sizes = [1, 400, 16000, 3]
    pieces = [stream.read(n) for n in sizes]
    assert [p.size for p in pieces] == sizes
    assert stream.position == sum(sizes)
    for piece in stream:
        pieces.append(piece)
    whole = np.concatenate(pieces)
    assert stream.position == len(whole) == round(len(given) * 16000 / rate)
    np.testing.assert_allclose(whole, soxr.resample(given, rate, 16000, quality="HQ"), atol=1e-5)
    assert stream.read(5).size == 0


def test_a_long_file_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((2, 2, 16000, 0, "NONE", ""))
        for _ in range(600):
            file.writeframes(bytes(4 * 16000))
    largest = 0
    with open_audio(path) as stream:
        assert stream.duration == 600.0 and not stream.live
        for piece in stream:
            largest = max(largest, piece.size)
        assert stream.position == 600 * 16000
    assert largest <= BLOCK


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        (np.array([0, 16384, -32768], np.int16), {}, [0.0, 0.5, -1.0]),
        (np.array([128, 255, 0], np.uint8), {}, [0.0, 127 / 128, -1.0]),
        (np.array([2**30], np.int32), {}, [0.5]),
        (np.array([0.25, 3.0]), {}, [0.25, 3.0]),
        (np.array([[1.0, 0.0], [0.5, 0.5]]), {}, [0.5, 0.5]),
        (np.array([[1.0, 0.0, 0.2], [0.5, 0.5, 0.2]]), {"channel_axis": 0}, [0.75, 0.25, 0.2]),
        (np.eye(8), {}, [0.125] * 8),
        (
            [np.array([1, 2], np.int16), np.array([3], np.int16)],
            {},
            [1 / 32768, 2 / 32768, 3 / 32768],
        ),
    ],
)
def test_arrays(given: Any, options: dict[str, Any], expected: list[float]) -> None:
    np.testing.assert_allclose(read_audio(given, **options), expected, rtol=1e-6)


def test_one_sample_of_any_rate_is_at_least_one() -> None:
    pytest.importorskip("soxr")
    assert read_audio(np.ones(1, np.float32), rate=96000).size == 1
    assert read_audio(np.ones(1, np.float32)).tolist() == [1.0]


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF, 0x7FFFF000, None])
def test_wav_through_a_pipe(length: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    content = wav_bytes(tone(2.0), 16000, length=length)
    assert_piped(content, monkeypatch, tone(2.0), {})


def test_raw_samples_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    stereo = np.repeat((tone(2.0) * 32767).astype("<i2"), 2)
    raw = {"rate": 16000, "channels": 2, "dtype": "int16"}
    assert_piped(stereo.tobytes() + b"\1", monkeypatch, tone(2.0), raw)  # a torn frame at the end


def assert_piped(
    content: bytes, monkeypatch: pytest.MonkeyPatch, expected: Array, options: dict[str, Any]
) -> None:
    read, write = os.pipe()

    def send() -> None:
        with open(write, "wb") as file:
            file.write(content)

    sender = threading.Thread(target=send)
    sender.start()
    with open(read, "rb") as reader:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(reader))
        stream = open_audio("-", **options)
        assert stream.live
        np.testing.assert_allclose(stream.read(), expected, atol=1e-4)
    sender.join()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_a_fifo_is_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    for content, expected in [
        (wav_bytes(tone(1.0), 16000), None),
        (b"ID3" + bytes(99), "got bytes"),
    ]:
        os.mkfifo(path)
        sender = threading.Thread(target=path.write_bytes, args=(content,))
        sender.start()
        if expected is None:
            np.testing.assert_allclose(read_audio(path), tone(1.0), atol=1e-4)
        else:
            with pytest.raises(AudioError, match=f"fifo: expected WAV, {expected}"):
                read_audio(path)
        sender.join()
        path.unlink()


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected audio, got 0 bytes"),
    "text": (b"Once upon a time " * 99, "expected audio; soundfile: "),
    "mp3": (b"\xff\xfb\x90\x00" + bytes(60), "expected audio; soundfile: no whole frame; "),
    "header": (wav_bytes(tone(0.1), 16000)[:30], "ends in its header"),
    "no samples": (wav_bytes(tone(0.0), 16000), "expected samples, got none"),
    "rate": (wav_bytes(tone(0.1), 1), "expected 1000 to 1000000 samples/s, got 1"),
    "channels": (wav_bytes(np.zeros((9, 99)), 16000), "expected 1 to 64 channels, got 99"),
    "frame": (
        wav_bytes(tone(0.1), 16000).replace(struct.pack("<HH", 2, 16), struct.pack("<HH", 7, 16)),
        "expected frames of 2 bytes, got 7",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(case: str, tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    content, text = BROKEN[case]
    path = tmp_path / "broken.bin"
    path.write_bytes(content)
    with pytest.raises(AudioError, match=f"broken.bin: .*{text}"):
        read_audio(path)


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (np.array([0.0, np.nan]), {}, r"array: expected finite samples, got nan at 0\.000 s"),
        (np.full(1600, 1e300), {}, "got inf"),
        (np.array([[1.0, np.inf], [1.0, -np.inf]]).T, {}, "expected finite"),
        (np.zeros(0, np.float32), {}, "expected samples, got none"),
        ([], {}, "expected samples, got none"),
        (np.zeros(4, np.int64), {}, "expected samples of uint8, int16, int32 or floats, got int64"),
        (np.zeros((2, 2, 2)), {}, r"got \[2, 2, 2\]"),
        (np.zeros((2, 1000)), {}, "expected 1 to 64 channels, got 1000; write samples.T"),
        ([np.zeros(2), np.zeros((2, 2))], {}, "expected 1 channels, got 2"),
        (np.zeros(4), {"rate": 0}, "samples/s, got 0"),
        (np.zeros(4), {"rate": -8000}, "samples/s, got -8000"),
        (np.zeros(4), {"rate": 8000.5}, "a whole number of samples/s, got 8000.5"),
        (np.zeros(4), {"rate": "8000"}, "a whole number of samples/s, got '8000'"),
        (np.zeros(4), {"rate": None}, "a whole number of samples/s, got None"),
        (np.zeros(4, np.complex64), {}, "got complex64"),
        (np.array(["a"]), {}, "got <U1"),
        (None, {}, "a path, a binary file, samples or an iterable of them, got NoneType"),
        (b"RIFF", {}, "a path, a binary file, samples or an iterable of them, got bytes"),
        ([0.5, 0.5], {}, r"expected \[n\] or \[n, channels\] .*, got float; write np.asarray.sam"),
        ([np.zeros(2), None], {}, r"expected \[n\] or \[n, channels\] .*, got NoneType$"),
        ([[[0.5], [0.5, 0.5]]], {}, "array: expected samples: .*inhomogeneous"),
        (io.StringIO("RIFF"), {}, "a stream: expected a file opened in binary mode"),
        (io.BytesIO(b"ab"), {"dtype": "int64"}, "got int64"),
        (io.BytesIO(b"ab"), {"dtype": "int24"}, "a stream: expected samples of .*, got 'int24'"),
        (io.BytesIO(b"ab"), {"dtype": "int16", "channels": 1.5}, "of channels, got 1.5"),
        ("no/such/file", {}, "no/such/file: .*No such file"),
        ("", {}, "^'': .*No such file"),
        (".", {}, "expected a file, got a folder"),
        ("a\0b", {}, "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_refused(given: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(AudioError, match=text):
        read_audio(given, **options)


def test_open_audio_of_a_stream_and_bad_counts() -> None:
    """A stream is returned as it is; bad counts and closed files are refused."""
    with open_audio(np.arange(8, dtype=np.float32)) as stream:
        assert open_audio(stream) is stream
        for count in (-1, 1.5, "a"):
            with pytest.raises(AudioError, match=r"array: read: expected .* samples"):
                stream.read(count)  # type: ignore[arg-type]  # that is the point
        assert read_audio(stream).tolist() == [*range(8)]
    for rows in (0, -1, 1.5, None):
        with pytest.raises(AudioError, match=r"windows: expected .* samples"):
            next(windows(np.zeros(4, np.float32), rows))  # type: ignore[arg-type]  # as above
    closed = io.BytesIO(b"RIFF")
    closed.close()
    with pytest.raises(AudioError, match="expected an open file, got a closed one"):
        open_audio(closed)


def test_eight_channels_are_averaged() -> None:
    sound = np.repeat(tone(0.1)[:, None], 8, axis=1)
    sound[:, ::2] = 0.0
    np.testing.assert_allclose(read_audio(sound), tone(0.1) / 2, atol=1e-6)


def test_a_file_that_ends_early_gives_what_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soundfile, _ = pytest.importorskip("soundfile"), pytest.importorskip("soxr")
    soundfile.write(tmp_path / "a.mp3", tone(4.0, 44100), 44100)
    content = {
        "a.mp3": (tmp_path / "a.mp3").read_bytes(),
        "a.wav": wav_bytes(tone(4.0, 44100), 44100),
    }
    for name, whole in content.items():
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        caplog.clear()
        assert read_audio(tmp_path / name).size == pytest.approx(32000, abs=4000)
        assert f"{name}: ends early" in caplog.text
    soundfile.write(tmp_path / "a.flac", np.random.default_rng(0).uniform(-1, 1, 64000), 16000)
    whole = (tmp_path / "a.flac").read_bytes()
    (tmp_path / "a.flac").write_bytes(whole[: len(whole) // 2])
    with (
        open_audio(tmp_path / "a.flac") as stream,
        pytest.raises(AudioError, match=r"a\.flac: broken after [01]\.\d\d s"),
    ):
        stream.read()


def test_any_bytes_are_samples_or_an_audio_error() -> None:
    pytest.importorskip("soundfile")
    rng, read = np.random.default_rng(0), 0
    for bits in (8, 16, 24, 32) * 25:
        content = np.frombuffer(wav_bytes(tone(0.02), 16000, bits), "u1").copy()
        content[rng.integers(0, 64, 2)] = rng.choice([0, 1, 2, 128, 255], 2)
        given = io.BytesIO(content[: rng.integers(20, 2000)].tobytes())
        try:
            samples = read_audio(given)
        except AudioError:
            continue
        read += 1
        assert samples.size
        assert np.isfinite(samples).all()
    assert read > 5


def ffmpeg(*arguments: str | Path) -> None:
    """Run the ffmpeg that is on the PATH."""
    subprocess.run(["ffmpeg", "-v", "error", "-y", *map(str, arguments)], check=True)


def without(monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    """Hide PyAV or ffmpeg."""
    if reader == "ffmpeg":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setitem(sys.modules, "av", None)


@needs_ffmpeg
@pytest.mark.parametrize("hidden", ["ffmpeg", "av"])
@pytest.mark.parametrize("kind", ["m4a", "mp4", "webm"])
def test_containers_by_pyav_and_by_ffmpeg(
    kind: str, hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("soxr")
    if hidden == "ffmpeg":
        pytest.importorskip("av")
    (tmp_path / "a.wav").write_bytes(wav_bytes(tone(3.0, 48000), 48000))
    path = tmp_path / f"-a b%d.{kind}"
    late = ["-itsoffset", "0.75"] if kind == "mp4" else []
    video = ["-f", "lavfi", "-i", "testsrc=d=3:s=64x64"] if kind == "mp4" else []
    ffmpeg(*video, *late, "-i", tmp_path / "a.wav", f"file:{path}")
    without(monkeypatch, hidden)
    with open_audio(path) as stream:
        samples = stream.read()
        assert stream.duration == pytest.approx(samples.size / 16000, abs=0.05)
    if late:  # the positions are times of the file
        assert np.abs(samples[:11500]).max() < 0.01
        samples = samples[12000:]
    assert samples.size == pytest.approx(48000, abs=1500)
    similar(samples, tone(3.0), 0.05) if kind == "m4a" else None
    level = np.sqrt(np.mean(samples[8000:40000] ** 2))
    assert level == pytest.approx(0.5 / np.sqrt(2), rel=0.05)
    with open_audio(path) as stream:  # closed before its end
        assert stream.read(100).size == 100
    if kind == "webm":  # it is read as far as it goes
        return
    (tmp_path / "b.m4a").write_bytes(path.read_bytes()[:2000])  # its index was at the end
    with pytest.raises(AudioError, match=r"b\.m4a: expected audio; soundfile: .*; PyAV"):
        read_audio(tmp_path / "b.m4a")


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("soundfile")
    path = tmp_path / "a.m4a"
    path.write_bytes(b"\0\0\0\x20ftypM4A " + bytes(99))
    without(monkeypatch, "ffmpeg")
    without(monkeypatch, "av")
    with pytest.raises(AudioError, match=r"pip install 'centella\[av\]'\); ffmpeg"):
        read_audio(path)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtraError, match=r"'soundfile'.*'centella\[audio\]'"):
        read_audio(path)


def test_a_closed_stream_gives_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav_bytes(tone(5.0), 16000))
    stream = open_audio(path)
    assert next(stream).size == stream.position
    stream.close()
    assert stream.read().size == 0


@pytest.mark.skipif(sys.platform == "win32", reason="programs of POSIX")
@pytest.mark.parametrize(
    ("text", "reason"),
    [("\x7fno program", "Exec format error"),
     ("#!/bin/sh\nhead -c 300000 /dev/zero | tr '\\0' 'x' >&2\n"
      "echo >&2\necho '[error] the last words' >&2\nexit 1\n", "ffmpeg: the last words")],
)  # fmt: skip
def test_an_ffmpeg_that_fails_says_why_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    program, left = tmp_path / "bin" / "ffmpeg", tmp_path / "left"
    program.parent.mkdir()
    left.mkdir()
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr("tempfile.tempdir", str(left))
    without(monkeypatch, "av")
    (tmp_path / "a.webm").write_bytes(b"no sound")
    with pytest.raises(AudioError, match=reason):
        read_audio(tmp_path / "a.webm")
    assert not list(left.iterdir())
