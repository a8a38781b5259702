"""Steps, rules and sums on devices against what transformers computed in float64."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.audio.transcript import Word
from centella.errors import ContractError
from centella.ops.speech_host import ENDED
from centella.runtime.pending import Pending
from centella.tasks.generate.beam import Search
from centella.tasks.transcribe import session as module
from centella.tasks.transcribe.align import median, token_ends, warped, words
from centella.tasks.transcribe.beams import Beams
from centella.tasks.transcribe.options import SpeechConfig
from centella.tasks.transcribe.session import SpeechSession
from centella.tasks.transcribe.windows import Attempt, Thresholds
from tests.ops.test_mma import CAPS
from tests.plan.test_join import kernels, planned
from tests.support.whisper_common import (
    EVERY,
    FOLDER,
    FRAMES,
    NAMES,
    Array,
    expected,
    mel,
    model_of,
)  # fmt: skip


@functools.cache
def config_of(name: str) -> SpeechConfig:
    return SpeechConfig.from_folder(
        FOLDER / name, model_of(name, ct.device("cpu")).config.vocab_size, {}
    )


@functools.cache
def session_of(name: str, device: ct.Device) -> SpeechSession:
    """A session that has heard the two windows."""
    model = model_of(name, device)
    session = SpeechSession(model, config_of(name).vocabulary, 2, lambda sound: sound)
    session.listen(mel(model.config.num_mel_bins))
    return session


PROMPT = [5, 30, 77, 64, 258]  # as tests/reference/whisper.py has them, and these
SILENCES = (0.9, 0.0)


def begin_of(name: str) -> list[int]:
    v = config_of(name).vocabulary
    german = [v.languages["de"], v.tasks["transcribe"]] if v.languages else []
    return [v.start, *german]


def written(session: SpeechSession, prompt: list[int], steps: int, **how: Any) -> Array:
    session.start([prompt] * 2, 0, **{"timed": False, **how})
    return np.stack(list(session.run(steps)), 1)


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_those_of_transformers(device: ct.Device, name: str) -> None:
    stored, session, begin = expected(name), session_of(name, device), begin_of(name)
    v = session.vocabulary
    if v.languages:
        chosen = np.array(list(v.languages.values()))[session.languages().argmax(1)]
        assert chosen.tolist() == stored["language"].tolist()
    timed = written(session, begin, 40, timed=True)
    assert timed.tolist() == stored["timed"].tolist()
    counted = np.minimum((timed != v.end).sum(1) + 1, 40)
    heard = session.heard()
    np.testing.assert_allclose(heard.log_probability / counted, stored["means"], atol=1e-4)
    np.testing.assert_allclose(heard.no_speech, stored["speech"], rtol=1e-3)
    plain = [*begin, v.no_timestamps]
    assert written(session, plain, 40).tolist() == stored["plain"].tolist()
    assert written(session, plain, 40, no_repeat=3).tolist() == stored["grams"].tolist()
    before = [v.previous, *PROMPT]
    session.start([[*before, *begin]] * 2, len(before), timed=True)
    assert np.stack(list(session.run(40)), 1).tolist() == stored["told"].tolist()
    session.suppress.choose((), ())
    assert written(session, begin, 30).tolist() == stored["greedy"].tolist()
    session.suppress.choose(v.suppressed, v.at_begin)
    device.synchronize()  # what is pending at the end of a test is dropped


@pytest.mark.first("name", "webgpu")
@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_beams_equal_those_of_transformers(device: ct.Device, name: str) -> None:
    """And a step brings down the best scores and their codes alone, and uploads nothing."""
    model, v = model_of(name, device), config_of(name).vocabulary
    session = SpeechSession(model, v, 2, lambda sound: sound, beam=5)
    session.listen(mel(model.config.num_mel_bins))
    beams = Beams(session)
    prompt = [*begin_of(name), v.no_timestamps]
    texts = beams.write(prompt, 0, 40, timed=False, no_repeat=0, active=[True, True])
    for row, wanted in enumerate(expected(name)["beams"]):
        assert texts[row][0] == wanted[wanted != v.end].tolist()
    with ct.ledger() as led:
        beams._step(False, False).fetch().result()
    led.expect(uploads=0, downloads=1, submissions=1, compiles=0, allocations=0)
    assert led.counts.download_bytes <= 2 * 12 * 8  # rows of 10, padded
    timed = beams.write(begin_of(name), 0, 40, timed=True, no_repeat=0, active=[True, True])
    for row, wanted in enumerate(expected(name)["timed_beams"]):
        assert timed[row][0] == wanted[wanted != v.end].tolist()
    timed = beams.write(begin_of(name), 0, 20, timed=True, no_repeat=3, active=[False, True])
    assert list(timed) == [1]
    assert timed[1][0][0] >= v.first_time


@pytest.mark.parametrize("name", NAMES)
def test_fallbacks_equal_those_of_transformers(name: str) -> None:
    """Which windows are tried at another temperature, and which are taken to be silent."""
    stored, session, begin = expected(name), session_of(name, ct.device("cpu")), begin_of(name)
    means, heats = np.zeros((2, 2)), (0.0, 1e-3)
    for i, heat in enumerate(heats):
        tokens = written(session, begin, 40, timed=True, temperature=heat)
        assert tokens.tolist() == stored["timed"].tolist()
        counted = np.minimum((tokens != session.vocabulary.end).sum(1) + 1, 40)
        means[i] = session.heard().log_probability / counted
    np.testing.assert_allclose(means[1], means[0], atol=1e-4)  # of the logits, not of those scaled
    for limit, of_limit in zip(stored["limits"], stored["tried"], strict=True):
        for silence, of_rows in zip(SILENCES, of_limit, strict=True):
            rules = Thresholds(None, float(limit), silence)
            for row, wanted in enumerate(of_rows):
                no_speech = float(session.heard().no_speech[row])
                every = [Attempt((), "", mean, 1.0, no_speech, heat)
                         for mean, heat in zip(means[:, row], heats, strict=True)]  # fmt: skip
                tried = 1 + rules.failed(every[0])
                assert [tried, rules.silent(every[tried - 1])] == wanted.tolist()


@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
def test_a_step_is_one_replay(device: ct.Device) -> None:
    """4 bytes a row down, nothing up, compiled or allocated; other settings capture nothing."""
    session, begin = session_of("tiny", device), begin_of("tiny")
    hot = written(session, begin, 8, timed=True, temperature=0.9, seed=4)
    session.start([begin] * 2, 0, timed=True, temperature=0.3, seed=4)
    with ct.ledger() as led:
        tokens = list(session.run(8))
    led.expect(uploads=0, downloads=8, download_bytes=64, submissions=8, compiles=0, allocations=0)
    assert not np.array_equal(hot, np.stack(tokens, 1))
    again = written(session, begin, 8, timed=True, temperature=0.9, seed=4)
    assert hot.tolist() == again.tolist()


@pytest.mark.devices("webgpu")
def test_the_rules_of_a_step_are_two_launches(device: ct.Device) -> None:
    session, begin = session_of("tiny", device), begin_of("tiny")
    counts = []
    for timed, heat in ((False, 0.0), (True, 0.0), (True, 0.7)):
        written(session, begin, 2, timed=timed, temperature=heat)
        with ct.ledger(timing=True) as led:
            list(session.run(3))
        ran = {k.kernel: k.launches for k in led.kernels()}
        assert (ran["speech_survey"], ran["speech_token"]) == (3, 3)
        counts.append(led.launches)
    assert len(set(counts)) == 1


@pytest.mark.devices("webgpu")
@pytest.mark.usefixtures("costly_launches")
@pytest.mark.parametrize("name", ["tiny", "distil-en"])
def test_launches_of_a_step_on_a_gpu(device: ct.Device, name: str) -> None:
    """Where launches cost something: norms are in the products, and tokens stay the same."""
    model = model_of(name, device)
    session = SpeechSession(model, config_of(name).vocabulary, 2, lambda sound: sound)
    session.listen(mel(model.config.num_mel_bins))
    timed = written(session, begin_of(name), 40, timed=True)
    assert timed.tolist() == expected(name)["timed"].tolist()
    with ct.ledger() as led:
        list(session.run(1))
    assert led.launches <= 9 * model.config.decoder_layers + 6


@pytest.mark.devices("cpu", "webgpu")
def test_sound_goes_up_once(device: ct.Device) -> None:
    session, sound = session_of("tiny", device), mel(80)
    with ct.ledger() as led:
        session.listen(sound)
    row = 256  # bytes that tell which row
    led.expect(uploads=1, upload_bytes=sound.nbytes + row, downloads=0, submissions=1, compiles=0)


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", ["tiny", "turbo"])
def test_windows_heard_one_by_one_are_those_heard_together(device: ct.Device, name: str) -> None:
    """In any order, with one capture; a window takes the place of the one that was there."""
    model, begin = model_of(name, device), begin_of(name)
    two = mel(model.config.num_mel_bins)
    three = np.concatenate([two, two[:1] * 0.5])
    session = SpeechSession(model, config_of(name).vocabulary, 3, lambda sound: sound)
    session.listen(three)
    kept = [plane.numpy() for pair in session.memory() for plane in pair]
    session.start([begin] * 3, 0, timed=True)
    tokens, heard = np.stack(list(session.run(12)), 1), session.heard()
    session.listen(three * 0.75)
    for row in (2, 0, 1):
        session.listen(three[row : row + 1], row)
    with ct.ledger() as led:
        session.listen(three[1:2], 1)
    led.expect(submissions=1, compiles=0, allocations=0)
    assert session._listen.signatures == 2
    again = [plane.numpy() for pair in session.memory() for plane in pair]
    positions, heads = model.config.max_source_positions, model.config.decoder_attention_heads
    assert {plane.shape[:3] for plane in again} == {(3, heads, positions)}
    for a, b in zip(kept, again, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    session.start([begin] * 3, 0, timed=True)
    assert np.stack(list(session.run(12)), 1).tolist() == tokens.tolist()
    np.testing.assert_allclose(session.heard().log_probability, heard.log_probability, rtol=1e-4)


@pytest.mark.devices(*EVERY)
def test_the_sound_of_a_row_that_has_ended_is_not_read(device: ct.Device) -> None:
    """So it costs nothing: what is there in place of sound reaches no key of the next layer."""
    model, v = model_of("tiny", device), config_of("tiny").vocabulary
    session = SpeechSession(model, v, 3, lambda sound: sound)
    session.listen(mel(80), 1)

    def keys_are_finite() -> bool:
        keys = session.cache._layers[1].keys.numpy()[:, :, : session.cache.length]
        return bool(np.isfinite(keys).all())

    none = np.full_like(mel(80)[:1], np.nan)
    session.start([begin_of("tiny")] * 3, 0, timed=True, active=[False, True, True])
    session.listen(none)  # the row that has no window
    tokens = np.stack(list(session.run(4)), 1)
    assert tokens[1:].tolist() == expected("tiny")["timed"][:, :4].tolist()
    assert keys_are_finite()
    session.suppress.choose([token for token in range(v.size) if token != v.end], ())
    session.listen(mel(80)[:1])
    session.start([begin_of("tiny")] * 3, 0, timed=False)
    assert next(session.run(1)).tolist() == [v.end] * 3
    session.listen(none, 2)
    list(session.run(2))
    assert keys_are_finite()


@pytest.mark.devices("cpu", "webgpu")
def test_beams_read_the_sound_of_their_windows(device: ct.Device) -> None:
    session = SpeechSession(
        model_of("tiny", device), config_of("tiny").vocabulary, 3, lambda sound: sound, beam=2
    )
    read, of_rows = ct.State(np.zeros(3, np.int32), device=device), session.heard_by

    def noted(ended: ct.Tensor) -> ct.Tensor | None:
        lengths = of_rows(ended)
        read.assign(lengths)
        return lengths

    session.heard_by = noted  # type: ignore[method-assign]
    session.listen(mel(80)[:1], 1)
    Beams(session).write(
        begin_of("tiny"), 0, 6, timed=True, no_repeat=0, active=[False, True, False]
    )
    assert read.numpy().tolist() == [0, session.model.config.max_source_positions, 0]


@pytest.mark.devices("webgpu")
def test_numbers_of_beams_are_constants_of_a_step(device: ct.Device) -> None:
    model, v = model_of("tiny", device), config_of("tiny").vocabulary
    session = SpeechSession(model, v, 2, lambda sound: sound, beam=2)
    session.listen(mel(80))
    beams = Beams(session)
    beams.write(begin_of("tiny"), 0, 2, timed=True, no_repeat=0, active=[True, True])
    with ct.ledger(timing=True) as led:
        beams._step(True, False).fetch().result()
    assert not {"arange", "eq"} & {k.kernel for k in led.kernels()}


@pytest.mark.devices("simulator")
def test_a_step_of_beams_is_two_launches_more_than_one_of_tokens(device: ct.Device) -> None:
    """As a GPU with tensor cores would run it: all that beams need is in the last launches."""
    model, v = model_of("tiny", device), config_of("tiny").vocabulary
    one, several = (SpeechSession(model, v, 2, lambda sound: sound, beam=n) for n in (1, 3))
    beams, caps = Beams(several), replace(CAPS, family="nvidia")
    device.synchronize()
    tokens = kernels(planned(device, [one._stepped(True, False, False)], caps))
    texts = kernels(planned(device, [*beams._stepped(True, False)], caps))
    assert texts[-4:] == ["speech_survey", "speech_beams", "topk", "speech_move"]
    assert Counter(texts[:-4]) == Counter(tokens[:-2])


@pytest.mark.parametrize("beam", [1, 2])
def test_something_is_done_while_the_device_works(
    beam: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each wait for the first of two steps, if it is one; so the device never waits."""
    model, v, calls = model_of("tiny", ct.device("cpu")), config_of("tiny").vocabulary, list[int]()
    session = SpeechSession(model, v, 2, lambda sound: sound, beam=beam)
    session.listen(mel(80))
    session.suppress.choose([v.end], ())
    prompt, on = begin_of("tiny"), [True, True]
    for waits, expected_calls in ((False, 0), (True, 5)):
        calls.clear()
        monkeypatch.setattr(Pending, "done", lambda _, waits=waits: not waits)
        if beam > 1:
            Beams(session).write(
                prompt, 0, 6, timed=False, no_repeat=0, active=on,
                meanwhile=lambda: calls.append(0),
            )  # fmt: skip
        else:
            session.start([prompt] * 2, 0, timed=False)
            assert len(list(session.run(6, lambda: calls.append(0)))) == 6
        assert len(calls) == expected_calls


def test_a_row_that_is_not_wanted_ends_at_once() -> None:
    session, begin = session_of("tiny", ct.device("cpu")), begin_of("tiny")
    tokens = written(session, begin, 6, timed=True, active=[False, True])
    assert set(tokens[0]) == {session.vocabulary.end}
    assert tokens[1].tolist() == expected("tiny")["timed"][1, :6].tolist()
    assert session.heard().log_probability[0] == 0.0


def test_nan_names_the_window() -> None:
    session = session_of("tiny", ct.device("cpu"))
    sound = mel(80)
    sound[1, 3, 7] = np.nan
    session.listen(sound)
    with pytest.raises(
        ContractError, match="window 1, token 0: the logits of what may come are NaN or infinite"
    ):
        written(session, begin_of("tiny"), 4, timed=True)
    session.listen(mel(80))
    assert written(session, begin_of("tiny"), 4, timed=True).tolist() == (
        expected("tiny")["timed"][:, :4].tolist()
    )


@pytest.mark.devices("cpu", "webgpu")
def test_what_a_finished_row_says_ends_no_other(device: ct.Device) -> None:
    """The host may end a text that has no end token; then NaN in it is no error."""
    model, v, prompt = model_of("tiny", device), config_of("tiny").vocabulary, begin_of("tiny")
    session, none = (
        SpeechSession(model, v, 2, lambda sound: sound),
        np.full_like(mel(80)[:1], np.nan),
    )
    session.listen(mel(80))
    session.start([prompt] * 2, 0, timed=True)
    wanted, first = {0, 1}, list[int]()
    for count, tokens in enumerate(session.run(6, wanted=wanted)):
        first.append(int(tokens[0]))
        if count == 0:
            wanted.remove(1)
            session.listen(none, 1)
        elif count == 2:
            assert tokens[1] < 0
            session.end(1)
    assert first == expected("tiny")["timed"][0, :6].tolist()
    assert tokens[1] == v.end


@pytest.mark.devices("cpu", "webgpu")
def test_the_sound_of_a_search_that_is_done_is_not_read(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, v = model_of("tiny", device), config_of("tiny").vocabulary
    session, steps = SpeechSession(model, v, 2, lambda sound: sound, beam=3), list[int]()

    def add(search: Search, best: Array, which: Array) -> bool:
        steps.append(len(steps))
        if len(steps) == 2:  # the second window
            session.listen(np.full_like(mel(80)[:1], np.nan), 1)
            search.done = True
        return added(search, best, which) if len(steps) != 2 else False

    added = Search.add
    monkeypatch.setattr(Search, "add", add)
    session.listen(mel(80))
    beams, on = Beams(session), [True, True]
    (text, _), _ = beams.write(begin_of("tiny"), 0, 8, timed=True, no_repeat=0, active=on).values()
    assert len(steps) == 9
    assert text
    assert beams._notes.numpy()[:, ENDED].tolist() == [0] * 3 + [1] * 3


@pytest.mark.devices("cpu", "webgpu")
@pytest.mark.parametrize("how", [{}, {"temperature": 0.9}, {"beam": 3}])
def test_no_token_is_chosen_where_none_may_come(device: ct.Device, how: dict[str, Any]) -> None:
    beam, text = how.pop("beam", 1), "window 0, token 0: the .* are NaN or infinite"
    model, v = model_of("tiny", device), config_of("tiny").vocabulary
    session = SpeechSession(model, v, 2, lambda sound: sound, beam=beam)
    session.listen(mel(80))
    session.suppress.choose(range(v.size), ())
    with pytest.raises(ContractError, match=text):
        if beam > 1:
            active = [True, True]
            Beams(session).write(begin_of("tiny"), 0, 4, timed=True, no_repeat=0, active=active)
        else:
            written(session, begin_of("tiny"), 4, timed=True, **how)
    device.synchronize()


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_token_times(device: ct.Device, name: str) -> None:
    """Equal to those of transformers within a step of 20 ms."""
    stored, session, begin = expected(name), session_of(name, device), begin_of(name)
    texts = texts_of(stored, session.vocabulary.end)
    aligned = list(session.aligned(begin, texts, config_of(name).alignment_heads))
    assert [row for row, _, _ in aligned] == [0, 1]
    for row, weights, sure in aligned:
        tokens = texts[row]
        assert sure.shape == (len(tokens),)
        assert (sure > 0).all() and (sure <= 1).all()
        ends = token_ends(weights[..., : FRAMES[row] // 2], 7) * 0.02
        np.testing.assert_allclose(ends, stored["times"][row, : len(tokens)], atol=0.0201)


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", ["tiny", "turbo"])
def test_texts_of_several_windows_are_aligned_together(
    device: ct.Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one submission, as each alone; in several where their attention takes too much memory."""
    model, heads, begin = model_of(name, device), config_of(name).alignment_heads, begin_of(name)
    session = SpeechSession(model, config_of(name).vocabulary, 5, lambda sound: sound)
    two = mel(model.config.num_mel_bins)
    session.listen(np.concatenate([two, two[::-1] * 0.5, two[:1] * 0.25]))
    written = texts_of(expected(name), session.vocabulary.end)
    texts = {4: written[0], 0: written[1][:9], 2: written[0][:20]}
    alone = {row: [*session.aligned(begin, {row: text}, heads)] for row, text in texts.items()}
    for most, submissions in ((module.ALIGNED, 1), (1, 3)):
        monkeypatch.setattr(module, "ALIGNED", most)
        for _ in range(2):  # the second replays
            with ct.ledger() as led:
                together = [*session.aligned(begin, texts, heads)]
        assert led.submissions == submissions
        assert [row for row, _, _ in together] == [4, 0, 2]
        for row, weights, sure in together:
            ((_, other, certain),) = alone[row]
            np.testing.assert_allclose(weights, other, atol=2e-5)
            np.testing.assert_allclose(sure, certain, rtol=1e-4)
    assert list(session.aligned(begin, {}, heads)) == []


def texts_of(stored: dict[str, Array], end: int) -> dict[int, list[int]]:
    """Tokens of the texts with times, by row, without the end."""
    texts = [text.tolist() for text in stored["timed"][:2]]
    return {row: text[: text.index(end) if end in text else 39] for row, text in enumerate(texts)}


@pytest.mark.parametrize("name", NAMES)
def test_word_times(name: str) -> None:
    """The words of transformers, within 20 ms of its times; a letter stands for a byte."""
    stored, session, begin = expected(name), session_of(name, ct.device("cpu")), begin_of(name)
    end = session.vocabulary.end
    vocab = json.loads((FOLDER / name / "tokenizer.json").read_text())["model"]["vocab"]
    letters = {i: text.replace("\u0120", " ") for text, i in vocab.items()}
    heard: list[tuple[int, Word]] = []
    texts = texts_of(stored, end)
    for row, weights, sure in session.aligned(begin, texts, config_of(name).alignment_heads):
        tokens = texts[row]
        ends = token_ends(weights[..., : FRAMES[row] // 2], 7) * 0.02
        for is_text, run in itertools.groupby(enumerate(tokens), lambda pair: pair[1] < end):
            if is_text:
                at = [i for i, _ in run]
                spoken = words([tokens[i] for i in at], ends[at].tolist(), sure[at].tolist(),
                               float(ends[at[0] - 1]), spelled(letters), "de")  # fmt: skip
                heard += [(row, word) for word in spoken]
    assert [word.text for _, word in heard] == stored["words"].tolist()
    times = [(row, word.start, word.end) for row, word in heard]
    np.testing.assert_allclose(times, stored["spoken"], atol=0.0201)


def spelled(letters: dict[int, str]) -> Callable[[Sequence[int]], str]:
    return lambda ids: "".join(letters[i] for i in ids)


BYTES = {0: b" Hall", 1: b"o", 2: b",", 3: b' "', 4: b"Welt", 5: b'"', 6: b"!", 7: b" \xe2",
         8: b"\x82",
         9: b"\xac", 10: b"5", 11: "\u4f60".encode(), 12: b"\xe5", 13: b"\xa5\xbd",
         14: "\u3002".encode(), 15: b"\xff"}  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "language", "expected"),
    [
        ([0, 1, 2, 0], "de", [(" Hallo,", 0, 3), (" Hall", 3, 4)]),
        ([0, 1, 2, 4], "de", [(" Hallo", 0, 2), (",Welt", 2, 4)]),
        ([0, 1, 3, 4, 5, 6], "de", [(" Hallo", 0, 2), (' "Welt"!', 2, 6)]),
        ([0, 7, 8, 9, 10], "de", [(" Hall", 0, 1), (" \u20ac5", 1, 5)]),
        ([11, 12, 13, 14], "zh", [("\u4f60", 0, 1), ("\u597d\u3002", 1, 4)]),
        ([11, 12, 13, 14], "de", [("\u4f60\u597d\u3002", 0, 4)]),
        ([0, 15, 1, 3, 4], "de", [(" Hall\ufffdo", 0, 3), (' "Welt', 3, 5)]),
        ([0, 7, 8, 0, 1], "de", [(" Hall", 0, 1), (" \ufffd", 1, 3), (" Hallo", 3, 5)]),
        ([0, 12], "ja", [(" Hall", 0, 1), ("\ufffd", 1, 2)]),
        ([2, 0], "de", [(",", 0, 1), (" Hall", 1, 2)]),
        ([], "de", []),
    ],
)
def test_words_of_tokens(
    ids: list[int], language: str, expected: list[tuple[str, int, int]]
) -> None:
    """Characters of several tokens, marks, scripts without spaces; bytes that are no character."""

    def decode(given: Sequence[int]) -> str:
        return b"".join(BYTES[i] for i in given).decode(errors="replace")

    ends = [float(i + 1) for i in range(len(ids))]
    heard = words(ids, ends, [0.5] * len(ids), 0.0, decode, language)
    assert [(w.text, w.start, w.end) for w in heard] == expected
    assert "".join(w.text for w in heard) == decode(ids)
    assert {w.probability for w in heard} <= {0.5}


def test_warping_takes_the_cheapest_path() -> None:
    """Against every path through small matrices."""
    rng = np.random.default_rng(2)
    for n, m in [(1, 1), (1, 5), (4, 1), (3, 5), (5, 4)]:
        costs = rng.integers(-50, 50, (n, m)).astype(np.float64)

        @functools.cache
        def least(i: int, j: int, costs: Array = costs) -> float:
            before = [least(a, b) for a, b in ((i - 1, j - 1), (i - 1, j), (i, j - 1))
                      if a >= 0 and b >= 0]  # fmt: skip
            return float(costs[i, j]) + min(before, default=0.0)

        rows, columns = warped(costs)
        assert (rows[0], columns[0], rows[-1], columns[-1]) == (0, 0, n - 1, m - 1)
        assert np.diff(rows).max(initial=0) <= 1 and np.diff(columns).max(initial=0) <= 1
        assert costs[rows, columns].sum() == least(n - 1, m - 1)


@pytest.mark.parametrize("width", [1, 3, 7])
def test_median_filter(width: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 11))
    padded = np.pad(x, [(0, 0), (0, 0), (width // 2, width // 2)], mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, -1)
    assert np.array_equal(median(x, width), np.median(windows, -1))
