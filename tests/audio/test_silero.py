"""Silero's network from a user's file: what it is given, what its levels become, and bad files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from centella.audio import SileroModel, SpeechDetector, SpeechRules, speech_regions
from centella.audio.silero import WINDOW, SileroLevels
from centella.errors import DTypeError, MissingExtraError, WeightsError
from tests.audio.sounds import RATE, babble, noise
from tests.support.onnx_files import FLOAT, INT64, model, node, silero, value_info, written

Array = np.ndarray[Any, Any]

runtime = pytest.importorskip("onnxruntime")


def opened(tmp_path: Path, output: str = "energy", version: int = 5) -> SileroModel:
    return SileroModel(written(tmp_path / f"{output}{version}.onnx", silero(output, version)))


@pytest.mark.parametrize("version", [4, 5])
def test_each_window_gets_its_context_and_the_state_before_it(version: int, tmp_path: Path) -> None:
    """The stand-in counts windows, and gives 0 where a context is not the end of the last one."""
    network = opened(tmp_path, "count", version)
    sound, rng = noise(7.3), np.random.default_rng(0)
    levels, probabilities, first = SileroLevels(network), list[float](), 0
    while first < sound.size:
        piece = sound[first : first + int(rng.integers(1, 3000))]
        probabilities += levels.push(piece)
        first += piece.size
        assert len(probabilities) == first // WINDOW
    probabilities += levels.finish()
    counts = np.arange(1, -(-sound.size // WINDOW) + 1)
    np.testing.assert_allclose(probabilities, counts / 100000, rtol=1e-5)


def test_the_stand_in_knows_another_context(tmp_path: Path) -> None:
    """So the test above could fail."""
    network, sound = opened(tmp_path), noise(1.0)
    start = network.silence()
    level, after = network.step(np.pad(sound[:WINDOW], (64, 0)), start)
    assert level > 0.5
    assert network.step(sound[WINDOW - 64 : 2 * WINDOW], after)[0] > 0.5
    for samples, states in ((sound[WINDOW : 2 * WINDOW + 64], after), (sound[:576], start)):
        assert network.step(samples, states)[0] == 0.0


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("seconds", [0.001, 0.032, 0.5, 3.0])
def test_each_window_has_its_own_level(version: int, seconds: float, tmp_path: Path) -> None:
    """The last window has zeros behind the sound."""
    sound = noise(seconds) * np.linspace(0.01, 2.0, int(seconds * RATE), dtype=np.float32)
    levels = SileroLevels(opened(tmp_path, version=version))
    probabilities = levels.push(sound) + levels.finish()
    padded = np.pad(sound, (0, -sound.size % WINDOW)).reshape(-1, WINDOW)
    power = np.mean(padded.astype(np.float64) ** 2, axis=1)
    np.testing.assert_allclose(probabilities, power / (power + 1e-3), rtol=1e-4)


def windows(*levels: float) -> Array:
    """A second of windows for each level, of the probability that the stand-in gives."""
    parts = [np.sqrt(1e-3 * p / (1 - p)) * np.ones(31 * WINDOW, np.float32) for p in levels]
    return np.concatenate(parts).astype(np.float32)


SECOND = 31 * WINDOW / RATE  # of `windows`


@pytest.mark.parametrize(
    ("levels", "rules", "expected"),
    [
        ((0.0, 0.9, 0.0, 0.0), SpeechRules(), [(SECOND - 0.2, 2 * SECOND + 0.2)]),
        ((0.0, 0.9, 0.0, 0.0), SpeechRules(pad=0.0), [(SECOND, 2 * SECOND)]),
        ((0.0, 0.9, 0.4, 0.0, 0.0), SpeechRules(pad=0.0), [(SECOND, 3 * SECOND)]),  # it goes on
        ((0.0, 0.4, 0.0), SpeechRules(), []),  # and does not begin
        ((0.0, 0.4, 0.0), SpeechRules(threshold=0.3, pad=0.0), [(SECOND, 2 * SECOND)]),
        ((0.0, 0.9, 0.4, 0.0), SpeechRules(keep=0.9, pad=0.0), [(SECOND, 2 * SECOND)]),
        ((0.9, 0.0, 0.9), SpeechRules(min_silence=1.5), [(0.0, 3 * SECOND)]),
        ((0.0, 0.9, 0.0), SpeechRules(min_speech=1.5), []),
        ((0.9,), SpeechRules(), [(0.0, SECOND)]),  # the padding ends with the sound
    ],
)
def test_rules_have_their_meaning_for_probabilities(
    levels: tuple[float, ...],
    rules: SpeechRules,
    expected: list[tuple[float, float]],
    tmp_path: Path,
) -> None:
    regions = speech_regions(windows(*levels), rules, opened(tmp_path))
    assert regions == [pytest.approx(region) for region in expected]


def test_recordings_that_share_a_network_do_not_mix(tmp_path: Path) -> None:
    network = opened(tmp_path)
    sounds = [np.concatenate([np.zeros(RATE * s), babble(2.0, s)]) for s in (1, 2)]
    alone = [speech_regions(sound, vad_model=network) for sound in sounds]
    running = [SpeechDetector(vad_model=network) for _ in sounds]
    regions_by_sound = [list[tuple[float, float]]() for _ in sounds]
    for first in range(0, 4 * RATE, 700):
        for regions, detector, sound in zip(regions_by_sound, running, sounds, strict=True):
            regions += detector.push(sound[first : first + 700])
    assert [f + d.finish() for f, d in zip(regions_by_sound, running, strict=True)] == alone


def other(**changes: Any) -> bytes:
    """A file whose inputs have other names, types or shapes: state to its next, input to output."""
    given: dict[str, Any] = {
        "state": ("state", (2, 1, 128), FLOAT), "sr": ("sr", (), INT64),
        "input": ("input", (1, 576), FLOAT), "output": "output", **changes,
    }  # fmt: skip
    nodes = [
        node("Identity", given["state"][0], "stateN"),
        node("ReduceMean", given["input"][0], given["output"], keepdims=1),
    ]
    inputs = [value_info(*given[name]) for name in ("input", "state", "sr")]
    outputs = [value_info(given["output"], (1, 1)), value_info("stateN", (2, 1, 128))]
    return model(nodes, inputs, outputs, {})


WHOLE = silero()
BAD = {
    "empty": (b"", "Silero's ONNX file; onnxruntime: "),
    "text": (b"Once upon a time " * 99, "Silero's ONNX file; onnxruntime: "),
    "truncated": (WHOLE[: len(WHOLE) // 2], "Silero's ONNX file; onnxruntime: "),
    "cut": (WHOLE[:-40], "onnxruntime: "),
    "names": (
        other(input=("audio", (1, 576), FLOAT)),
        r"v5 and v6: inputs input float \[1, 576\], state float \[2, 1, 128\], sr int64 \[\]; "
        r"outputs output, stateN; or v4: inputs .*; got inputs audio float \[1, 576\], state "
        r"float \[2, 1, 128\], sr int64 \[\]; outputs output, stateN",
    ),
    "outputs": (other(output="speech"), "outputs speech, stateN"),
    "width": (other(state=("state", (2, 1, 64), FLOAT)), r"got inputs .*state float \[2, 1, 64\]"),
    "rank": (other(input=("input", (576,), FLOAT)), r"got inputs input float \[576\]"),
    "window": (other(input=("input", (1, 512), FLOAT)), r"got inputs input float \[1, 512\]"),
    "type": (other(sr=("sr", (), FLOAT)), r"sr float \[\]; outputs"),
}


@pytest.mark.parametrize("kind", BAD)
def test_files_of_another_kind(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error names the file, and nothing else is printed."""
    path = written(tmp_path / "a.onnx", BAD[kind][0])
    with pytest.raises(WeightsError, match=rf"a\.onnx: expected .*{BAD[kind][1]}") as raised:
        SileroModel(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_outputs_that_are_no_probability_are_refused(tmp_path: Path) -> None:
    """Also where the file has the interface, and the first window has a probability."""
    path = written(tmp_path / "a.onnx", other())  # the mean of samples
    network = SileroModel(path)
    for sound, got in ((np.full(WINDOW, 2.0), r"\[\[1\.7"), (np.full(WINDOW, -1.0), r"\[\[-0\.8")):
        with pytest.raises(WeightsError, match=rf"a\.onnx: expected output of one .*, got {got}"):
            speech_regions(sound, vad_model=network)


def test_a_network_that_fails_is_named(tmp_path: Path) -> None:
    network = opened(tmp_path)
    with pytest.raises(WeightsError, match=r"energy5\.onnx: onnxruntime: "):
        network.step(np.zeros(576, np.float32), {"state": np.zeros((1, 1, 128), np.float32)})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.onnx", tmp_path, "a\0b"):
        with pytest.raises(WeightsError, match="expected Silero's ONNX file, it cannot be read: "):
            SileroModel(path)
    wrong: Any = 3
    with pytest.raises(DTypeError, match="expected the path of an ONNX file, got int"):
        SpeechDetector(vad_model=wrong)


def test_paths_of_any_kind(tmp_path: Path) -> None:
    path = written(tmp_path / "sílero ü.onnx", silero())
    for given in (path, str(path)):
        assert repr(SileroModel(given)) == f"SileroModel({str(path)!r})"


def test_without_onnxruntime_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"'onnxruntime'.*'centella\[silero\]'"):
        SileroModel(tmp_path / "none.onnx")
