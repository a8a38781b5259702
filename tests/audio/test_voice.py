"""Regions of speech: recall and false alarms at stated ratios of signal to noise, and the rules.

`detector` is energy and spectrum, and then a stand-in for Silero's network: a window's energy alone
tells its probability, so it runs where that suffices.
"""

from __future__ import annotations

import wave
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from centella.audio import SpeechDetector, SpeechRules, speech_pieces, speech_regions, voice
from centella.audio.voice import banded
from centella.errors import AudioError
from tests.audio.sounds import (
    RATE,
    SENTENCES,
    Regions,
    babble,
    chords,
    melody,
    noise,
    score,
    spoken,
    with_pauses,
)  # fmt: skip
from tests.support.onnx_files import silero, written

Array = np.ndarray[Any, Any]


@pytest.fixture(params=["energy", "silero"])
def detector(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """The `vad_model` that levels come from."""
    if request.param == "energy":
        return None
    pytest.importorskip("onnxruntime")
    return written(tmp_path / "silero_vad.onnx", silero())


@cache
def speech(kind: str) -> tuple[Array, Regions]:
    """Speech between pauses, and where it is."""
    if kind == "syllables":
        return with_pauses([babble(s, i) for i, s in enumerate((2.0, 3.0, 0.6, 1.0, 5.0))], 1)
    said = [sound for s in SENTENCES if (sound := spoken(*s)) is not None]
    if not said:
        pytest.skip("espeak-ng is not installed")
    return with_pauses(said, 2)


BEHIND: dict[str, Callable[[float], Array]] = {
    "white": noise,
    "pink": lambda seconds: noise(seconds, pink=True),
    "chords": chords,
}


@pytest.mark.parametrize("kind", ["syllables", "espeak-ng"])
@pytest.mark.parametrize(
    ("behind", "snr", "alarms"),
    [
        ("white", 20, 0.0), ("white", 5, 0.0), ("white", 0, 0.0), ("pink", 10, 0.0),
        ("pink", 0, 0.0), ("chords", 20, 0.05), ("chords", 10, 0.05), ("chords", 0, 0.05),
    ],
)  # fmt: skip
def test_recall_and_false_alarms(
    kind: str, behind: str, snr: int, alarms: float, record_property: Callable[[str, object], None]
) -> None:
    sound, expected = speech(kind)
    seconds = sound.size / RATE
    mixed = sound + BEHIND[behind](seconds)[: sound.size] * np.float32(10 ** (-snr / 20))
    recall, false = score(speech_regions(mixed), expected, seconds)
    record_property("shown", f"{kind} {behind} {snr} dB: recall {recall:.3f}, false {false:.3f}")
    assert recall >= 0.98
    assert false <= alarms


@pytest.mark.parametrize("kind", ["syllables", "espeak-ng"])
@pytest.mark.parametrize("behind", ["white", "pink", "chords"])
def test_sounds_20_db_below_speech(kind: str, behind: str, detector: Path | None) -> None:
    """Either detector tells them from speech; no region ends behind the recording."""
    sound, expected = speech(kind)
    seconds = sound.size / RATE
    regions = speech_regions(sound + BEHIND[behind](seconds)[: sound.size] / 10, vad_model=detector)
    recall, false = score(regions, expected, seconds)
    assert recall >= 0.98
    assert false <= 0.05
    assert regions[-1][1] <= seconds


@pytest.mark.parametrize("kind", ["syllables", "espeak-ng"])
@pytest.mark.parametrize("gain", [1.0, 0.01, 5.0])
def test_the_level_does_not_matter(kind: str, gain: float) -> None:
    sound, expected = speech(kind)
    regions = speech_regions(sound * np.float32(gain))
    recall, false = score(regions, expected, sound.size / RATE)
    assert recall >= 0.98
    assert false == 0.0
    assert len(regions) == len(expected)
    for (start, end), (first, last) in zip(regions, expected, strict=True):
        assert first - 0.35 <= start <= first
        assert last <= end <= last + 0.35


@pytest.mark.parametrize(
    ("make", "alarms"),
    [
        (lambda: np.zeros(10 * RATE, np.float32), 0.0),
        (lambda: noise(60), 0.0),
        (lambda: noise(60, pink=True) * 0.01, 0.0),
        (lambda: noise(30) * np.repeat([0.1, 1.0, 0.1], 10 * RATE), 0.0),
        (lambda: np.where(np.arange(20 * RATE) % 9000 < 40, 0.5, 0.0), 0.0),
        (lambda: chords(60, 0), 0.03), (lambda: chords(60, 1), 0.03),
        (lambda: chords(60, 2, 0.01), 0.03), (lambda: chords(60, 3, 8.0), 0.03),
        (lambda: melody(30, 0.3), 0.05), (lambda: melody(30, 1.0), 0.03),
    ],
    ids="silence white pink steps clicks chords chords2 still vibrato melody slow".split(),
)  # fmt: skip
def test_sounds_without_speech(make: Callable[[], Array], alarms: float) -> None:
    sound = make()
    regions = speech_regions(sound.astype(np.float32))
    assert score(regions, [(0.0, 0.01)], sound.size / RATE)[1] <= alarms


@pytest.mark.parametrize(
    "rules", [SpeechRules(), SpeechRules(min_silence=0.1, pad=0.4)], ids=["usual", "padded"]
)
def test_pieces_of_any_size_give_the_regions_of_the_whole(
    detector: Path | None, rules: SpeechRules
) -> None:
    sound, expected = speech("syllables")
    sound = sound + noise(sound.size / RATE)[: sound.size] * 0.05
    sound = sound[: int((expected[-1][1] + 0.3) * RATE)]  # it ends soon after somebody spoke
    whole = speech_regions(sound, rules, detector)
    assert len(whole) >= 5
    assert whole[-1][1] <= sound.size / RATE
    for size in (1000, 77777):
        running, regions = SpeechDetector(rules, detector), Regions()
        for first in range(0, sound.size, size):
            regions += running.push(sound[first : first + size])
            seen = min(first + size, sound.size) / RATE
            assert all(end <= seen for _, end in regions)
            assert seen - 4.5 <= running.settled <= seen or regions[-1:] != whole[-1:]
        assert regions + running.finish() == whole
    cut = list(speech_pieces(iter(np.array_split(sound, 50)), rules, detector))
    assert [start for start, _ in cut] == [start for start, _ in whole]
    for (start, piece), (_, end) in zip(cut, whole, strict=True):
        np.testing.assert_array_equal(piece, sound[round(start * RATE) : round(end * RATE)])


@pytest.mark.parametrize("seconds", [0.3, 1.0, 8.0, 30.0])
def test_levels_do_not_depend_on_the_pieces(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products stay small, or BLAS starts threads for them that take longer than the products."""
    sizes: list[int] = []

    def counted(power: Array) -> Array:
        sizes.append(len(power))
        return banded(power)

    monkeypatch.setattr(voice, "banded", counted)
    sound, size = speech("syllables")[0].astype(np.float32), round(seconds * RATE)
    whole, pieces = voice.EnergyLevels(), voice.EnergyLevels()
    expected = whole.push(sound) + whole.finish()
    levels = [x for i in range(0, len(sound), size) for x in pieces.push(sound[i : i + size])]
    np.testing.assert_allclose(levels + pieces.finish(), expected, atol=1e-6)
    assert max(sizes) <= 50


def test_the_envelope_is_the_mean_of_nine_lines() -> None:
    lines = np.random.default_rng(0).standard_normal((7, 157)).astype(np.float32) * 9
    exact = np.array([[row[max(i - 4, 0) : i + 5].astype(float).mean() for i in range(157)]
                      for row in lines])  # fmt: skip
    np.testing.assert_array_equal(voice._envelope(lines), exact.astype(np.float32))


def test_a_long_region_is_cut_at_its_quietest_point(detector: Path | None) -> None:
    sound = babble(75.0, 3)
    quiet = (25.3, 53.9)
    for second in quiet:
        sound[int(second * RATE) : int((second + 0.3) * RATE)] *= 0.001
    regions = speech_regions(sound, vad_model=detector)
    assert len(regions) == 3
    assert all(end - start <= 30.0 for start, end in regions)
    for (_, end), (start, _), second in zip(regions, regions[1:], quiet, strict=False):
        assert end == start == pytest.approx(second + 0.15, abs=0.15)
    assert regions[0][0] == 0.0
    assert regions[-1][1] == pytest.approx(75.0, abs=0.1)


def test_rules(detector: Path | None) -> None:
    parts = [babble(1.0, 0), np.zeros(RATE // 2, np.float32), babble(1.0, 1)]
    sound = np.concatenate([np.zeros(2 * RATE, np.float32), *parts, np.zeros(2 * RATE, np.float32)])
    assert len(speech_regions(sound, SpeechRules(min_silence=0.7), detector)) == 1
    apart = speech_regions(sound, SpeechRules(min_silence=0.2, pad=0.0), detector)
    assert len(apart) == 2
    assert speech_regions(sound, SpeechRules(min_speech=1.5, min_silence=0.2), detector) == []
    padded = speech_regions(sound, SpeechRules(min_silence=0.2, pad=0.4), detector)
    assert padded[0][1] == padded[1][0]  # they may touch, and do not overlap
    assert padded[0][0] == pytest.approx(apart[0][0] - 0.4)


@pytest.mark.parametrize("size", [1, 100, 512, 5000])
def test_sound_that_is_shorter_than_speech(size: int) -> None:
    assert speech_regions(np.ones(size, np.float32)) == []


@pytest.mark.parametrize(
    ("samples", "rules", "text"),
    [
        (np.zeros((2, 100), np.float32), None, "expected 1 to 64 channels, got 100"),
        (np.zeros(0, np.float32), None, "expected samples, got none"),
        (np.zeros(100, np.complex64), None, "expected samples of .*, got complex64"),
        (np.full(100, np.nan), None, "expected finite samples, got nan"),
        (
            None,
            None,
            "expected a path, a binary file, samples or an iterable of them, got NoneType",
        ),
        (np.zeros(100), SpeechRules(pad=-1.0), "expected numbers of 0 or more"),
        (np.zeros(100), SpeechRules(longest=0.5), "expected a longest of 1 s"),
    ],
)
def test_what_is_refused(samples: Any, rules: SpeechRules | None, text: str) -> None:
    with pytest.raises(AudioError, match=text):
        speech_regions(samples, rules)


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        (np.zeros((2, 100), np.float32), r"expected samples \[n\], got \[2, 100\]"),
        (np.zeros(100, np.complex64), "expected samples of .*, got complex64"),
        (np.full(100, np.inf), r"expected finite samples, got inf at 0\.010 s"),
    ],
)
def test_pieces_that_are_refused(samples: Array, text: str, detector: Path | None) -> None:
    running = SpeechDetector(None, detector)
    running.push(np.zeros(160, np.float32))
    with pytest.raises(AudioError, match=text):
        running.push(samples)


def test_integers_and_files_are_sound_too(tmp_path: Path, detector: Path | None) -> None:
    """As `open_audio` reads them: integers by their full scale."""
    sound = np.round(with_pauses([babble(4.0)])[0] * 32767).astype(np.int16)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(sound.tobytes())
    regions = speech_regions(sound / np.float32(32768), vad_model=detector)
    for same in (sound, tmp_path / "a.wav"):
        assert regions and regions == speech_regions(same, vad_model=detector)


@pytest.mark.parametrize("after", [True, False])
def test_a_word_beside_a_slam_is_speech(after: bool) -> None:
    """One loud event is no reason to leave out the word next to it."""
    rng = np.random.default_rng(5)
    word = babble(0.6, 3)
    count = int(0.4 * RATE)
    slam = rng.standard_normal(count) * np.exp(-np.arange(count) / (0.08 * RATE))
    slam *= 3.0 * np.abs(word).max() / np.abs(slam).max()
    between = np.zeros(int(0.15 * RATE))
    parts = [word, between, slam] if after else [slam, between, word]
    quiet = np.zeros(2 * RATE)
    sound = np.concatenate([quiet, *parts, quiet])
    sound = (sound + 1e-4 * rng.standard_normal(len(sound))).astype(np.float32)
    begin = 2.0 if after else 2.55
    heard = sum(max(0.0, min(b, begin + 0.6) - max(a, begin)) for a, b in speech_regions(sound))
    assert heard > 0.57
