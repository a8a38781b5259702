"""`Transcriber`: windows, seeks, fallbacks, batches, options and bad input."""

from __future__ import annotations

import functools
import gc
import json
import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.audio import (
    AudioStream,
    Segment,
    SileroModel,
    SpeechDetector,
    speech_regions,
)  # fmt: skip
from centella.audio.source import Source
from centella.errors import AudioError, DTypeError, ShapeError, WeightsError
from centella.runtime.pending import Pending
from centella.tasks.transcribe.options import Options, SpeechConfig
from centella.tasks.transcribe.recording import Recording, Window, joined
from centella.tasks.transcribe.session import SpeechSession
from centella.tasks.transcribe.transcriber import Transcriber
from centella.tasks.transcribe.transcription import Decoding, Transcription
from centella.tasks.transcribe.windows import Attempt, Thresholds, cut, cut_all, repeats
from tests.audio.sounds import babble
from tests.support.onnx_files import silero, written
from tests.support.whisper_common import FOLDER, NAMES, Array, expected, long_mel

RATE = 16000


def sound(seconds: float, seed: int = 0) -> Array:
    """A tone whose pitch moves, and noise."""
    t = np.arange(round(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).standard_normal(t.size) * 0.05
    samples: Array = 0.3 * np.sin(800 * t + 60 * np.sin(3 * t)) + noise
    return samples.astype(np.float32)


@functools.cache
def transcriber(device: str, name: str = "tiny") -> Transcriber:
    return ct.load(FOLDER / name, device, task="transcribe")


QUIET: dict[str, Any] = {"temperature": 0.0, "no_speech_threshold": None, "vad": "off"}


class Spectrogram(Recording):
    """A recording whose samples are a spectrogram [mels, frames]."""

    def __init__(self, mel: Array) -> None:
        self.mel, self.frames, self.everything = mel, 300, True
        stream = {"close": lambda self: None, "duration": 1.0, "live": True}
        self.stream: Any = type("Stream", (), stream)()

    def window(self, start: int, frames: int | None = None) -> Window | None:
        part = self.mel[:, start : start + 300]
        return Window(start, part.shape[1], part) if part.size else None

    def row(self, window: Window) -> Array:
        return np.pad(window.samples, [(0, 0), (0, 300 - window.frames)])[None]


@pytest.mark.devices("cpu", "webgpu")
@pytest.mark.parametrize("name", NAMES)
def test_windows_in_sequence_equal_transformers(device: ct.Device, name: str) -> None:
    """Seeks, segments and what each window is told, by its own `generate` on the same mel."""
    model, stored = transcriber(device.name, name), expected(name)
    v = model.config.vocabulary
    decoding = Decoding(SpeechSession(model.model, v, 1, lambda mel: mel))
    model._idle.give(model._idle.use(decoding))
    german = {"language": "de"} if v.languages else {}
    options = Options.of("", {**german, "temperature": 0.0, "max_new_tokens": 24,
                              "no_speech_threshold": None}, v)  # fmt: skip
    recording = Spectrogram(long_mel(model.model.config.num_mel_bins)[0])
    segments = list(Transcription(model, recording, options))
    model._idle.clear()
    text = stored["long"][stored["long"] < v.end]
    assert [t for s in segments for t in s.tokens] == text.tolist()
    bounds = [(s.start, s.end) for s in segments]
    ends = np.minimum(stored["bounds"], 11.1)  # times stay in the recording here
    np.testing.assert_allclose(bounds, ends, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 8])
def test_another_thread_closes_a_stream(batch: int) -> None:
    """Whoever waits for a segment gets no more, the file is closed, the model goes on."""
    model, sound = transcriber("cpu"), np.random.default_rng(2).standard_normal(60 * RATE)
    options: Any = {"vad": "off", "temperature": 0.0, "batch": batch}
    stream, segments = model.stream(sound.astype(np.float32) * 0.1, **options), list[Any]()
    some = threading.Event()

    def read() -> None:
        for segment in stream:
            segments.append(segment)
            some.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert some.wait(60)
    stream.close()
    reader.join(20)
    assert not reader.is_alive()
    assert 0 < segments[-1].end < 60 and "done" in repr(stream)
    again = model.transcribe(sound[: 3 * RATE].astype(np.float32) * 0.1, **options)
    assert again.segments


@pytest.mark.devices("cpu", "webgpu")
def test_any_length(device: ct.Device) -> None:
    """Times lie in the recording and in order, whatever its length: the CPU has them all."""
    model = transcriber(device.name)
    lengths = (1 / RATE, 0.011, 2.99, 3.01, 7.4)
    for seconds in lengths if device.name == "cpu" else lengths[::3]:
        done: list[tuple[float, float]] = []
        transcript = model.transcribe(
            sound(seconds), **QUIET, timestamps="word",
            progress=lambda at, total, done=done: done.append((at, total)),
        )  # fmt: skip
        assert transcript.duration == pytest.approx(seconds)
        assert transcript.language in model.languages
        times = [t for s in transcript.segments for t in (s.start, s.end)]
        assert times == sorted(times)
        assert all(0 <= t <= max(seconds, 0.01) for t in times)
        assert done[-1][0] == pytest.approx(seconds, abs=0.02)
        for segment in transcript.segments:
            assert "".join(w.text for w in segment.words) == segment.text
            assert all(0 <= w.start <= w.end <= seconds + 0.02 for w in segment.words)
            assert all(0 < w.probability <= 1 for w in segment.words)
        assert transcript.text == "".join(s.text for s in transcript.segments).strip()
        assert transcript.words == tuple(w for s in transcript.segments for w in s.words)


def test_an_iterable_of_pieces_is_the_whole() -> None:
    model, samples = transcriber("cpu"), sound(7)
    whole = model.transcribe(samples, **QUIET).segments
    assert whole
    pieces = model.stream(np.array_split(samples, 23), **QUIET)
    assert tuple(pieces) == whole
    first = next(model.stream(samples, **QUIET))
    assert first == whole[0]


def test_windows_together_are_those_alone() -> None:
    """Batches of any size give the same texts, at the times of the file."""
    model, samples = transcriber("cpu"), sound(10)
    regions = [(0.5, 1.2), (2.0, 3.1), (6.0, 9.5)]
    how: dict[str, Any] = {**QUIET, "language": "de"}
    by_batch = [
        model.transcribe(samples, regions=regions, batch=n, **how).segments for n in (2, 3, 5)
    ]
    texts = [[(s.start, s.end, s.tokens) for s in segments] for segments in by_batch]
    assert texts[0] == texts[1] == texts[2] != []
    assert {int(s.start >= start) for s in by_batch[0] for start, _ in regions[:1]} == {1}
    assert all(s.end <= 3.1 or 6.0 <= s.start <= s.end <= 9.5 for s in by_batch[0])
    alone = model.transcribe(samples[6 * RATE : 9 * RATE], batch=2, **how).segments
    later = [s for s in by_batch[0] if 6 <= s.start < 9]
    assert [s.tokens for s in alone] == [s.tokens for s in later]
    np.testing.assert_allclose([s.start + 6 for s in alone], [s.start for s in later], atol=1e-6)
    assert model.transcribe(samples, regions=[]).segments == ()
    one_by_one = model.transcribe(samples, regions=regions, batch=1, **how).segments
    assert one_by_one
    assert min(s.start for s in one_by_one) >= 0.5


def long_file(seconds: float, broken: bool = False) -> AudioStream:
    """A file of known length, which may break at its end."""

    def blocks() -> Iterator[Array]:
        yield from np.split(sound(seconds)[:, None], round(seconds))
        if broken:
            raise AudioError("a.wav: broken")

    return AudioStream(Source("a.wav", RATE, 1, blocks(), round(seconds) * RATE))


BATCHES: dict[str, Any] = {
    **QUIET, "vad": "energy", "regions": [(0, 6), (7, 13), (14, 20)], "batch": 2,
    "language": "de", "timestamps": "none",
}  # fmt: skip


def logged(monkeypatch: pytest.MonkeyPatch, *calls: tuple[type, str]) -> list[str]:
    """The names of methods, in the order that they are called in from now on."""
    events = list[str]()
    for owner, name in calls:

        def call(self: Any, *args: Any, _: tuple[Any, str] = (getattr(owner, name), name)) -> Any:
            method, called = _
            events.append(called)
            return method(self, *args)

        monkeypatch.setattr(owner, name, call)
    return events


def test_windows_are_encoded_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 s of a file, and the speech in them is found, while texts before are written.

    A second of a microphone at a time, once the texts of the windows before it are told.
    """
    model = transcriber("cpu")
    monkeypatch.setattr(Pending, "done", lambda _: False)
    events = logged(
        monkeypatch, (SpeechSession, "listen"), (SpeechSession, "step"), (AudioStream, "read")
    )
    whole = model.transcribe(long_file(20), **BATCHES)
    order = [name for name, _ in groupby(events)]
    assert order[:5] == ["read", "listen", "step", "read", "step"]  # 8 s, then 8 s more
    assert order[-2:] == ["listen", "step"] and order.count("listen") == 3
    assert events.count("listen") == 6 and events.count("read") == 21  # and the end
    events.clear()
    pieces = model.transcribe(iter(np.split(sound(20), 20)), **BATCHES)
    order = [name for name, _ in groupby(events)]
    assert order == 3 * ["read", "listen", "read", "listen", "step"]
    assert pieces.segments == whole.segments != ()
    events.clear()
    speech = np.concatenate([babble(2.6), np.zeros(3 * RATE // 2)] * 12)
    model.transcribe(speech, batch=6, max_new_tokens=40, vad="energy", language="de")
    order = [name for name, _ in groupby(events)]
    assert order[:5] == ["read", "listen", "read", "listen", "step"]  # the first ends in 16 s
    begun = order.index("step")
    assert "read" in order[begun : begun + 3] and order[-1] == "step"


def test_what_is_read_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the windows of a batch and one more have; nothing after the last region."""
    model, most = transcriber("cpu"), list[float]()
    monkeypatch.setattr(Pending, "done", lambda _: False)
    read = Recording.read_ahead

    def noted(recording: Recording, windows: int) -> None:
        read(recording, windows)
        most.append((recording._end - recording._first) / RATE)

    monkeypatch.setattr(Recording, "read_ahead", noted)
    how: dict[str, Any] = {**QUIET, "language": "de", "timestamps": "none", "max_new_tokens": 30}
    model.transcribe(long_file(60), batch=2, **how)
    assert max(most) < 3 * 3 + 8
    stream = long_file(60)
    model.transcribe(stream, batch=2, regions=[(0, 6), (7, 9)], **how)
    assert stream.position == 16 * RATE


def test_texts_before_a_fault_of_the_file_are_told() -> None:
    """All that was read before it; then it is raised, and the session serves others."""
    model = ct.load(FOLDER / "tiny", "cpu", task="transcribe")
    speech: dict[str, Any] = {**BATCHES, "regions": [(0, 6), (7, 20)]}
    for how in (speech, {**speech, "batch": 1}, {**speech, "batch": 16}, {**speech, "beam": 2}):
        whole = model.transcribe(long_file(13), **how).segments
        told, kept = list[Segment](), set(map(id, model._idle.waiting))
        with pytest.raises(AudioError, match="broken"):
            told.extend(model.stream(long_file(13, broken=True), **how))
        assert tuple(told) == whole != ()
        assert set(map(id, model._idle.waiting)) == kept


def test_speech_before_a_fault_is_told() -> None:
    """Also that of a region whose end nobody has heard, and where the detector fails."""
    model = transcriber("cpu")
    how: dict[str, Any] = {"batch": 4, "language": "de", "timestamps": "none", "vad": "energy",
                           "no_speech_threshold": None, "temperature": 0.0}  # fmt: skip
    speech = babble(11.0)

    def blocks() -> Iterator[Array]:
        yield from np.split(speech[:, None], 11)
        raise AudioError("a.wav: broken")

    told = list[Segment]()
    with pytest.raises(AudioError, match="broken"):
        told.extend(model.stream(AudioStream(Source("a.wav", RATE, 1, blocks(), None)), **how))
    assert tuple(told) == model.transcribe(speech, **how).segments != ()
    told.clear()
    recording = Recording(long_file(20), 300, None, Failing())
    with pytest.raises(WeightsError, match="fails"):
        told.extend(Transcription(model, recording, Options.of("", how, model.config.vocabulary)))
    del how["vad"]
    regions = [(0.0, 2.0), (3.0, 5.5)]
    assert tuple(told) == model.transcribe(long_file(20), regions=regions, **how).segments != ()


def test_an_interrupt_is_no_fault() -> None:
    """It is raised where it comes, between two steps; the model goes on."""
    model = transcriber("cpu")
    whole = model.transcribe(long_file(13), **BATCHES)

    def blocks() -> Iterator[Array]:
        yield from np.split(sound(9)[:, None], 9)
        raise KeyboardInterrupt

    told = list[Segment]()
    with pytest.raises(KeyboardInterrupt):
        stream = AudioStream(Source("a.wav", RATE, 1, blocks(), 13 * RATE))
        told.extend(model.stream(stream, **BATCHES))
    assert tuple(told) == whole.segments[: len(told)]
    assert model.transcribe(long_file(13), **BATCHES) == whole


class Failing(SpeechDetector):
    """It hears speech in 8 s, and fails after them."""

    def push(self, samples: Array) -> list[tuple[float, float]]:
        if self._total:
            raise WeightsError("the network fails")
        self._total += len(samples)
        return [(0.0, 2.0), (3.0, 5.5)]


@pytest.mark.devices("cpu", "webgpu")
def test_what_a_transcription_asks_of_the_device(device: ct.Device) -> None:
    """Of a window its sound goes up; of a batch prompt and notes; a token a row comes down a step.

    And the sums of a batch. Windows that do not fill it are encoded alone.
    """
    model, steps, batches, windows = transcriber(device.name), 5, 2, 6
    how: dict[str, Any] = {**BATCHES, "max_new_tokens": steps, "batch": 4}
    first = model.transcribe(long_file(20), **how)
    (decoding,) = [kept for kept in model._idle.waiting if kept.session.batch == 4]
    session = decoding.session
    captures = [session._listen.signatures, session._read.signatures]
    with ct.ledger() as led:
        assert model.transcribe(long_file(20), **how) == first
    led.expect(
        compiles=0, allocations=0, uploads=windows + 2 * batches, downloads=(steps + 1) * batches,
        submissions=windows + (steps + 3) * batches,
    )  # fmt: skip
    assert [session._listen.signatures, session._read.signatures] == captures == [1, 1]


def test_fallback_stops_at_the_first_text_believed() -> None:
    model, samples = transcriber("cpu"), sound(2.5)
    sure = model.transcribe(samples, vad="off", no_speech_threshold=None, logprob_threshold=None,
                            compression_ratio_threshold=None)  # fmt: skip
    assert {s.temperature for s in sure.segments} == {0.0}
    never = model.transcribe(samples, temperature=(0.0, 0.5), vad="off", no_speech_threshold=None,
                             logprob_threshold=-1e-9)  # fmt: skip
    assert {s.temperature for s in never.segments} == {0.5}
    silent = model.transcribe(samples, vad="off", no_speech_threshold=0.0, logprob_threshold=-1e-9)
    assert silent.segments == () and silent.text == ""


@pytest.mark.parametrize(
    ("logprob", "ratio", "no_speech", "failed", "silent"),
    [
        (-0.5, 1.0, 0.1, False, False),
        (-1.5, 1.0, 0.1, True, False),
        (-0.5, 2.5, 0.1, True, False),
        (-1.5, 2.5, 0.7, False, True),
        (-0.5, 2.5, 0.7, True, False),
    ],
)
def test_thresholds(
    logprob: float, ratio: float, no_speech: float, failed: bool, silent: bool
) -> None:
    attempt = Attempt((), "", logprob, ratio, no_speech, 0.0)
    assert (Thresholds().failed(attempt), Thresholds().silent(attempt)) == (failed, silent)


@pytest.mark.parametrize(
    ("tokens", "bounds", "step"),
    [
        ([], [(0, 150)], 300),
        ([5, 6], [(0, 150)], 300),
        ([100, 5, 140], [(0, 40)], 300),
        ([110, 5, 140, 140, 6, 150], [(10, 40), (40, 50)], 300),
        ([110, 5, 140, 140, 6, 7], [(10, 40)], 80),
        ([110, 5, 140, 150, 6, 160, 160], [(10, 40), (50, 60)], 120),
        ([110, 5, 140, 145], [(10, 40)], 80),
    ],
)
def test_segments_and_the_next_window(
    tokens: list[int], bounds: list[tuple[int, int]], step: int
) -> None:
    """100 is the token of the time 0."""
    cuts, further = cut(tokens, 100, 300)
    assert ([(c.start, c.end) for c in cuts], further) == (bounds, step)
    every = cut_all(tokens, 100, 300)
    assert sum(len([t for t in c.tokens if t < 100]) for c in every) == sum(t < 100 for t in tokens)


@pytest.mark.parametrize("batch", [1, 3])
def test_silero_finds_the_regions_at_the_times_of_the_file(batch: int, tmp_path: Path) -> None:
    """In pieces of any size, by windows or in batches; its file is opened once or by each call.

    A window of pieces ends with its region, as what is live does not wait for what follows.
    """
    pytest.importorskip("onnxruntime")
    model = transcriber("cpu")
    path = written(tmp_path / "silero_vad.onnx", silero())
    silence = np.zeros(3 * RATE + 100, np.float32)
    samples = np.concatenate([silence, sound(2), silence, sound(4, 1), silence])
    regions = speech_regions(samples, vad_model=path)
    assert [round(t) for region in regions for t in region] == [3, 5, 8, 12]
    how: dict[str, Any] = {**QUIET, "language": "de", "batch": batch, "timestamps": "word"}
    del how["vad"]
    sources: list[Any] = [samples, np.array_split(samples, 29)]  # whole, and as it is recorded
    expected = [model.transcribe(x, regions=regions, **how).segments for x in sources]
    assert (expected[0] == expected[1]) == (batch > 1)
    assert all({w.start // 4 for s in each for w in s.words} >= {0, 2} for each in expected)
    network = SileroModel(path)
    for named, vad in (
        (path, "silero"),
        (str(path), "auto"),
        (network, "auto"),
        (network, "silero"),
    ):
        for given, segments in zip(sources, expected, strict=True):
            transcript = model.transcribe(given, vad=vad, vad_model=named, **how)
            assert transcript.segments == segments


@pytest.mark.parametrize("beam", [1, 3])
def test_words_of_a_batch_are_timed_together(beam: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = transcriber("cpu"), sound(11)
    how: dict[str, Any] = {**QUIET, "language": "de", "batch": 3, "timestamps": "word",
                           "beam": beam}  # fmt: skip
    aligned, texts = SpeechSession.aligned, list[int]()

    def counted(session: SpeechSession, prompt: Any, some: Any, heads: Any) -> Any:
        texts.append(len(some))
        return aligned(session, prompt, some, heads)

    monkeypatch.setattr(SpeechSession, "aligned", counted)
    together = model.transcribe(samples, **how)
    assert texts == [3, 1] and {int(w.start) // 3 for w in together.words} == {0, 1, 2, 3}
    monkeypatch.setattr("centella.tasks.transcribe.session.ALIGNED", 1)
    alone = model.transcribe(samples, **how)
    assert [w.text for w in together.words] == [w.text for w in alone.words]
    for a, b in zip(together.words, alone.words, strict=True):
        np.testing.assert_allclose(
            (a.start, a.end, a.probability), (b.start, b.end, b.probability), atol=1e-5
        )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("timestamps", ["segment", "none"])
def test_the_last_segment_ends_with_the_sound(
    batch: int, timestamps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that begins behind the last sample is dropped; one that ends there ends with it."""
    model = transcriber("cpu")
    first = model.config.vocabulary.first_time
    tokens = [first, 5, first + 40, first + 60, 6, first + 140, first + 145, 7, first + 149]

    def written(*_: Any) -> dict[int, tuple[list[int], int]]:
        return {0: (tokens, len(tokens))}

    monkeypatch.setattr("centella.tasks.transcribe.transcription._Work._written", written)
    for seconds, ends in ((1.61, [0.8, 1.61]), (0.5, [0.5]), (1 / RATE, [0.01])):
        how: dict[str, Any] = {**QUIET, "batch": batch, "timestamps": timestamps}
        segments = model.transcribe(sound(seconds), **how).segments
        assert all(s.start < s.end for s in segments)
        assert [s.end for s in segments] == (ends if timestamps == "segment" else ends[-1:])


def test_the_duration_is_that_of_the_samples_once_they_are_read(tmp_path: Path) -> None:
    """A header may state more, as that of a file that was cut off does."""
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "a.mp3", sound(27), RATE)
    content = (tmp_path / "a.mp3").read_bytes()
    (tmp_path / "a.mp3").write_bytes(content[: len(content) // 2])
    told: list[tuple[float, float]] = []
    heard = transcriber("cpu").transcribe(
        tmp_path / "a.mp3", **QUIET, max_new_tokens=4,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert heard.duration == pytest.approx(13.5, abs=0.2)
    assert told[0][1] == pytest.approx(27, abs=0.2)
    assert told[-1][0] == pytest.approx(heard.duration, abs=0.011)
    assert told[-1][1] == heard.duration


def test_joined_regions_and_repeats() -> None:
    assert list(joined([(0, 1), (2, 3), (4, 9), (9, 10)], 5)) == [(0, 3), (4, 9), (9, 10)]
    assert repeats([1, 2, 3, 2, 3, 2, 3], 3)
    assert not repeats([1, 2, 3, 2, 3], 3)


def test_max_repeats_ends_a_window() -> None:
    model, samples = transcriber("cpu"), sound(2.5)
    how: dict[str, Any] = {**QUIET, "language": "de", "timestamps": "none"}
    (free,) = model.transcribe(samples, **how).segments
    (ended,) = model.transcribe(samples, **how, max_repeats=2).segments
    assert len(ended.tokens) < len(free.tokens)
    assert ended.tokens == free.tokens[: len(ended.tokens)]


def test_beams() -> None:
    """Texts of windows together, which a second call repeats; fallbacks leave the beams."""
    model, samples = transcriber("cpu"), sound(6)
    how: dict[str, Any] = {**QUIET, "timestamps": "none", "batch": 2, "language": "de", "beam": 4}
    segments = model.transcribe(samples, **how).segments
    assert [(s.start, s.end) for s in segments] == [(0, 3), (3, 6)]
    assert segments == model.transcribe(samples, **how).segments
    words: dict[str, Any] = {**how, "timestamps": "word"}
    assert model.transcribe(samples, **words).words
    hot: dict[str, Any] = {**how, "temperature": (0.0, 0.8), "logprob_threshold": -1e-9}
    assert {s.temperature for s in model.transcribe(samples, **hot).segments} == {0.8}


def test_prompts_change_the_text() -> None:
    model, samples = transcriber("cpu"), sound(2.5)
    how = QUIET
    told: list[dict[str, Any]] = [{}, {"prompt": "the hat"}, {"hotwords": "water"}]
    texts = {
        tuple(s.tokens for s in model.transcribe(samples, **how, **more).segments) for more in told
    }
    assert len(texts) == 3
    long = model.transcribe(samples, **how, prompt="water " * 99, hotwords="heather " * 3)
    assert long.segments


@pytest.mark.devices("cpu", "webgpu")
def test_after_warm_nothing_is_compiled(device: ct.Device) -> None:
    """The first recording finds each program of the defaults, with prompts and fallbacks."""
    model = ct.load(FOLDER / "tiny", device, task="transcribe", warm=True)
    with ct.ledger() as led:
        heard = model.transcribe(
            sound(4), vad="off", prompt="the hat", temperature=(0.0, 0.4), max_new_tokens=12
        )
    led.expect(compiles=0)
    assert {s.temperature for s in heard.segments} == {0.4}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"language": "xx"}, ShapeError, "a code of en, de, fr, es; got 'xx'"),
        ({"language": 3}, DTypeError, "language: expected text, got 3"),
        ({"task": "sing"}, ShapeError, "expected task of transcribe, translate, got 'sing'"),
        ({"timestamps": "frame"}, ShapeError, "expected timestamps of none, segment, word"),
        ({"temperature": ()}, ShapeError, "temperature: expected numbers of 0 to 100"),
        ({"temperature": "hot"}, DTypeError, "temperature: expected a number"),
        ({"batch": 0}, ShapeError, "batch: expected 1 to 256, got 0"),
        ({"batch": 2.5}, DTypeError, "batch: expected a whole number, got 2.5"),
        ({"batch": 257}, ShapeError, "batch: expected 1 to 256, got 257"),
        ({"regions": [(2, 1)]}, ShapeError, "regions: expected times in order"),
        (
            {"vad": "silero"},
            ShapeError,
            "vad: silero needs its ONNX file, .* expected vad_model=PATH",
        ),
        (
            {"vad": "energy", "vad_model": "a.onnx"},
            ShapeError,
            "vad_model: expected vad of auto or",
        ),
        ({"vad": "off", "vad_model": "a.onnx"}, ShapeError, "of auto or silero with it, got off"),
        ({"vad_model": 3}, DTypeError, "expected the path of an ONNX file, got int"),
        ({"regions": [1]}, DTypeError, "regions: expected pairs of seconds"),
        ({"no_repeat_ngram": 9}, ShapeError, "no_repeat_ngram: expected 0, or 2 to 8, got 9"),
        ({"condition_on_previous_text": 1}, DTypeError, "expected True or False for condition_on"),
        ({"logprob_threshold": "x"}, DTypeError, "logprob_threshold: expected a number or None"),
        ({"beam": 5.5}, DTypeError, "beam: expected a whole number, got 5.5"),
        ({"beam": 0}, ShapeError, "beam: expected 1 to 16, got 0"),
        ({"max_new_tokens": 2.5}, DTypeError, "whole number for max_new_tokens, got 2.5"),
        ({"loud": 1}, TypeError, "unknown argument loud="),
        ({"loud": 1}, DTypeError, "loud=; expected batch, beam, .* vad, vad_model$"),
        ({"sample_rate": 8000}, DTypeError, "sample_rate=; write rate=, in samples"),
        ({"word_timestamps": True}, DTypeError, """word_timestamps=; write timestamps="word"""),
        ({"beam_size": 5}, DTypeError, "beam_size=; write beam=$"),
        ({"model": "small"}, DTypeError, r"model=; ct\.load\(path\) opens a model"),
        ({"timestamps": True}, DTypeError, "expected none, segment, word, got True"),
    ],
)
def test_options_that_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        transcriber("cpu").transcribe(sound(1), **options)


def test_bad_input_names_the_file(tmp_path: Path) -> None:
    model = transcriber("cpu")
    (tmp_path / "talk.wav").write_bytes(b"no audio at all" * 9)
    with pytest.raises(AudioError, match=r"talk\.wav"):
        model.transcribe(tmp_path / "talk.wav")
    with pytest.raises(AudioError, match="got none"):
        model.transcribe(np.zeros(0, np.float32))
    with pytest.raises(AudioError, match="expected finite samples"):
        model.transcribe(np.array([0.0, np.nan] * 900, np.float32))
    assert model.transcribe(sound(1, 5), temperature=0.0).duration == 1.0  # it goes on


def test_nobody_speaks() -> None:
    """Silence and noise are not heard, so that no text is invented."""
    model, noise = transcriber("cpu"), np.random.default_rng(3).standard_normal(9 * RATE) * 0.1
    for quiet in (np.zeros(5 * RATE, np.float32), noise.astype(np.float32)):
        transcript = model.transcribe(quiet)
        assert (transcript.segments, transcript.text, transcript.language) == ((), "", None)
        assert transcript.duration == quiet.size / RATE


def test_english_alone() -> None:
    model = transcriber("cpu", "distil-en")
    assert model.languages == ("en",)
    transcript = model.transcribe(sound(4), language="en", **QUIET)
    assert transcript.language is None and transcript.segments
    wrongs: list[dict[str, Any]] = [{"language": "de"}, {"task": "translate"}]
    for wrong in wrongs:
        with pytest.raises(ShapeError, match="the model has English alone"):
            model.transcribe(sound(1), **wrong)


@pytest.mark.parametrize(("size", "codes"), [(51864, []), (51865, ["en", "de"])])
def test_a_model_whose_folder_does_not_say_its_languages(
    size: int, codes: list[str], tmp_path: Path
) -> None:
    """Tokenizers of English alone name the tokens of languages too: the size tells them apart."""
    names = ["endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startofprev"]
    named = {f"<|{name}|>": 50256 + i for i, name in enumerate([*names, "notimestamps"])}
    (tmp_path / "config.json").write_text("{}")
    vocabulary = SpeechConfig.from_folder(tmp_path, size, named).vocabulary
    assert list(vocabulary.languages) == codes
    assert list(vocabulary.tasks) == (["transcribe", "translate"] if codes else [])


def test_a_transcript_is_no_mapping() -> None:
    model: Any = transcriber("cpu")
    with pytest.raises(DTypeError, match=r"expected \.text, .*, got \['text'\]"):
        model.transcribe(sound(1), vad="off", max_new_tokens=2)["text"]
    mel = ct.asarray(np.zeros((1, 80, 300), np.float32), device="cpu")
    with pytest.raises(DTypeError, match="Transcriber: expected mel and ids, got mel"):
        model(mel)


def test_folders(tmp_path: Path) -> None:
    """Without a tokenizer there are logits and no text; malformed settings name their field."""
    shutil.copytree(FOLDER / "tiny", tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    model = ct.load(tmp_path / "m", "cpu", task="transcribe")
    mel = ct.asarray(np.zeros((1, 80, 300), np.float32), device="cpu")
    assert model(mel, ct.asarray([[264, 5]], device="cpu")).shape == (1, 2, 426)
    assert model.encode(mel).shape == (1, 150, 72)
    with pytest.raises(WeightsError, match=r"tokenizer\.json: expected a tokenizer"):
        model.transcribe(sound(1))
    with pytest.raises(WeightsError, match="is to transcribe with"):
        ct.load(FOLDER / "tiny", "cpu", task="generate")
    (tmp_path / "m" / "generation_config.json").write_text('{"alignment_heads": [[7, 0]]}')
    with pytest.raises(WeightsError, match="no_timestamps_token_id: expected a token id"):
        ct.load(tmp_path / "m", "cpu")


def test_a_folder_of_ctranslate2_is_named(tmp_path: Path) -> None:
    for name, content in (("model.bin", "x"), ("vocabulary.json", "[]"), ("config.json", "{}")):
        (tmp_path / name).write_text(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors; got model\.bin .* CTranslate2"):
        ct.load(tmp_path, "cpu", task="transcribe")


def test_quantised_rows_have_whole_blocks() -> None:
    """Rows of 72 are no multiple of 32: the error names the parameter."""
    with pytest.raises(WeightsError, match="multiple of 32"):
        ct.load(FOLDER / "tiny", "cpu", task="transcribe", quantize="q8_0")


@pytest.mark.devices("cpu", "webgpu")
@pytest.mark.parametrize(("quantize", "bound"), [("q8_0", 0.02), ("q4_0", 0.3)])
def test_quantised(device: ct.Device, quantize: str, bound: float, tmp_path: Path) -> None:
    """Logits of weights in blocks of 32, beside those in f32; and a text."""
    numpy = pytest.importorskip("safetensors.numpy")
    shutil.copytree(FOLDER / "tiny", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config.update(d_model=96, encoder_ffn_dim=64, decoder_ffn_dim=64)
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    rng, sizes = np.random.default_rng(7), {72: 96, 60: 64}
    tensors = {
        name: (rng.standard_normal([sizes.get(n, n) for n in tensor.shape]) * 0.15).astype("f4")
        for name, tensor in numpy.load_file(FOLDER / "tiny" / "model.safetensors").items()
    }
    numpy.save_file(tensors, tmp_path / "m" / "model.safetensors")
    exact = ct.load(tmp_path / "m", "cpu", task="transcribe")
    model = ct.load(tmp_path / "m", device, task="transcribe", quantize=quantize)
    mel, ids = rng.standard_normal((1, 80, 300)).astype(np.float32), np.array([[264, 5, 77, 31]])
    logits, expected = (
        m(ct.asarray(mel, device=d), ct.asarray(ids.astype(np.int32), device=d)).numpy()
        for m, d in ((model, device), (exact, ct.device("cpu")))
    )
    error, size = (np.sqrt(np.mean(np.square(x))) for x in (logits - expected, expected))
    assert 0 < error < bound * size, error / size
    transcript = model.transcribe(
        sound(2), language="de", timestamps="word", max_new_tokens=6, **QUIET
    )
    assert transcript.duration == 2.0


@pytest.mark.parametrize("options", [{"batch": 1}, {"batch": 2}, {"beam": 2}])
def test_a_loop_that_is_left_leaves_the_model_usable(options: dict[str, Any]) -> None:
    """Its session is used again, and what it read is closed or can be read on."""
    model, samples = ct.load(FOLDER / "tiny", "cpu", task="transcribe"), sound(13.0)
    whole = transcriber("cpu").transcribe(samples, **QUIET, **options)
    assert len(whole.segments) > 2
    chunks = iter(np.array_split(samples, 40))
    for segment in model.stream(chunks, **QUIET, **options):
        assert segment == whole.segments[0]
        break
    assert 0 < len(list(chunks)) < 40  # a microphone goes on
    (session,) = model._idle.waiting
    for _ in range(2):
        with model.stream(samples, **QUIET, **options) as running:
            next(running)
        assert list(running) == [] and model._idle.waiting == [session]
    cycle: list[Any] = [model.stream(samples, **QUIET, **options)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert model.transcribe(samples, **QUIET, **options) == whole
    assert model._idle.waiting == [session]


@pytest.fixture(scope="module")
def five_minutes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An mp3 at 32 kHz: six seconds of syllables at the end of every twenty."""
    soundfile = pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    path = tmp_path_factory.mktemp("long") / "five.mp3"
    part = np.concatenate([np.zeros(14 * RATE), babble(6.0)])
    doubled = np.interp(np.arange(2 * part.size) / 2, np.arange(part.size), part)
    with soundfile.SoundFile(path, "w", 2 * RATE, 1) as file:
        for _ in range(15):
            file.write(doubled)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.sweep), 8])
def test_five_minutes_of_mp3(five_minutes: Path, batch: int) -> None:
    """Memory does not grow with what was read, and times are those of the file to its end."""
    model, told = transcriber("cpu"), list[tuple[float, float]]()
    running = model.stream(
        five_minutes, temperature=0.0, no_speech_threshold=None, timestamps="none",
        max_new_tokens=8, language="en", batch=batch,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    segments, peaks = [next(running)], list[int]()
    tracemalloc.start()
    try:
        for until in (150.0, 300.0):
            tracemalloc.reset_peak()
            while (segment := next(running, None)) is not None:
                segments.append(segment)
                if segment.end > until:
                    break
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2e6, f"{peaks}; the samples of 150 s are 9.6 MB"
    assert running.duration == pytest.approx(300.0, abs=0.1)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] > 299.0 and {total for _, total in told} == {running.duration}
    starts = [segment.start for segment in segments]
    assert starts == sorted(starts)
    assert len({int(start // 20) for start in starts}) > 12
    for start in starts:  # windows of 3 s, the first 0.2 s before the speech
        into = start % 20 - 13.8
        assert into > -0.1 and (into + 0.1) % 3 < 0.2, start


def test_config_and_weights_alone_are_called(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / "tiny" / name, tmp_path)
    model, whole = ct.load(tmp_path, "cpu", task="transcribe"), transcriber("cpu")
    samples = ct.asarray(sound(3), device="cpu")
    mel = ct.log_mel(samples, num_mels=model.model.config.num_mel_bins)
    mel = mel.reshape(1, *mel.shape)
    ids = ct.asarray(np.array([[3, 5]], np.int32), device="cpu")
    np.testing.assert_array_equal(model.encode(mel).numpy(), whole.encode(mel).numpy())
    np.testing.assert_array_equal(model(mel, ids).numpy(), whole(mel, ids).numpy())
    for asked in (lambda: model.transcribe(sound(1)), lambda: model.tokenizer):
        with pytest.raises(WeightsError, match=r"tokenizer\.json: expected a tokenizer"):
            asked()
    with pytest.raises(WeightsError, match=r"generation_config\.json: no_timestamps_token_id"):
        model.languages  # noqa: B018


def test_progress_that_cannot_be_called() -> None:
    wrong: Any = 5
    with pytest.raises(DTypeError, match="transcribe: expected None or a function of two numbers"):
        transcriber("cpu").transcribe(sound(1), progress=wrong)


def test_repr_of_a_transcription() -> None:
    stream = transcriber("cpu").stream(sound(1.5), language="de", **QUIET)
    assert repr(stream) == "<Transcription of 1.5 s, under way>"
    list(stream)
    assert repr(stream) == "<Transcription of 1.5 s, done>"
