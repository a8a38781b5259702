"""`Recording`: what of a long or live recording is kept, and when its windows come."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.audio import AudioStream, Segment, SpeechDetector
from centella.audio.source import Source
from centella.tasks.transcribe.recording import Recording, Window, joined
from centella.tasks.transcribe.windows import Attempt
from tests.audio.sounds import babble
from tests.support.whisper_common import FOLDER, Array

RATE = 16000
WINDOW = 3000  # frames


def recording(pieces: list[Array], live: bool) -> Recording:
    """A file, or a microphone, in blocks of a tenth of a second, in which speech is detected."""
    sound = np.concatenate(pieces).astype(np.float32)
    blocks = (sound[at : at + RATE // 10, None] for at in range(0, sound.size, RATE // 10))
    frames = None if live else sound.size
    source = Source("a.wav", RATE, 1, blocks, frames, live=live)
    return Recording(AudioStream(source), WINDOW, detector=SpeechDetector())


def silence(seconds: float) -> Array:
    return np.zeros(round(seconds * RATE), np.float32)


def one_by_one(heard: Recording) -> Iterator[Window]:
    at = 0
    while (window := heard.next_window(at)) is not None:
        yield window
        at = window.start + window.frames


@pytest.mark.parametrize("windows", [Recording.parts, one_by_one])
@pytest.mark.parametrize("live", [False, True])
def test_silence_needs_no_memory(windows: Any, live: bool) -> None:
    """Between two sentences, and after them; they are those of a short recording."""
    speech = babble(4.0)
    short = list(windows(recording([silence(5), speech, silence(60), speech, silence(5)], live)))
    heard = recording([silence(5), speech, silence(600), speech, silence(400)], live)
    tracemalloc.start()
    try:
        long = list(windows(heard))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10e6, f"{peak:,}; the samples of 600 s are 38 MB"
    for later, a, b in zip((0, 54000), short, long, strict=True):
        assert abs(b.start - a.start - later) <= 1
        np.testing.assert_array_equal(np.trim_zeros(a.samples), np.trim_zeros(b.samples))
        assert np.trim_zeros(b.samples).size > 3.9 * RATE


def test_what_is_live_does_not_wait_for_a_window() -> None:
    """A sentence comes up to 4 s after its end, of a file with what follows it."""
    pieces = [silence(2), babble(4.0), silence(50), babble(2.0), silence(50)]
    heard = recording(pieces, live=True)
    for end, window in zip((6, 58), one_by_one(heard), strict=True):
        assert end * 100 <= window.start + window.frames <= end * 100 + 80
        assert window.samples.size == window.frames * 160
        assert heard.stream.position < (end + 4.5) * RATE
    (first, _) = one_by_one(recording(pieces, live=False))
    assert first.frames == WINDOW


def test_an_empty_region_ends_a_joined_one() -> None:
    given = iter([(0, 1), (2, 2), (2, 3), (6, 6), (7, 8)])
    regions = joined(given, 5)
    assert next(regions) == (0, 3)
    assert list(given) == [(7, 8)]


def test_a_rest_of_a_live_region_is_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was added to speech has none; the text behind the last pair of times is told."""
    model = ct.load(FOLDER / "tiny", "cpu", task="transcribe")
    first, calls = model.config.vocabulary.first_time, list[int]()

    def attempts(_: Any, decoding: Any, count: int) -> list[Attempt]:
        calls.append(count)
        end = first + (40 if len(calls) < 2 else 60)  # 0.8 s, and 1.2 s further on
        return [Attempt((first, 40, end, end, 41), "(", -0.1, 1.0, 0.0, 0.0)]

    monkeypatch.setattr("centella.tasks.transcribe.transcription._Work._attempts", attempts)
    sound = iter(np.split(np.random.default_rng(0).standard_normal(RATE * 6) * 0.1, 60))
    told: list[Segment] = list(model.stream(sound, regions=[(1.0, 3.2)], language="de"))
    assert len(calls) == 2
    assert [(s.start, s.end, s.tokens) for s in told] == [
        (1.0, 1.8, (40,)), (1.8, 3.0, (40,)), (3.0, 3.2, (41,)),
    ]  # fmt: skip
