"""The host's and the device's half of a beam search, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.ops.beam import OUT
from centella.tasks.generate.beam import BeamStates, Hypothesis, Search, best_of
from centella.tasks.generate.beam_settings import BeamSettings
from centella.tasks.generate.logprobs import TokenLogprobs
from centella.tasks.generate.pieces import Stops, Text

EVERY = ("cpu", "simulator", "webgpu", "webgpu-hardware", "cuda")
VOCAB, END = 10, 9
Array = np.ndarray[Any, Any]
Candidates = list[tuple[float, int, int]]  # score, beam, token


def added(search: Search, *candidates: tuple[float, int, int]) -> bool:
    best = np.array([score for score, _, _ in candidates], np.float32)
    which = np.array([beam * VOCAB + token for _, beam, token in candidates], np.int32)
    return search.add(best, which)


def texts(search: Search) -> list[list[int]]:
    return [one.ids for one in search.running]


def test_texts_go_on_from_their_beams() -> None:
    search = Search(BeamSettings(2), VOCAB, (END,), 9)
    added(search, (-1.0, 0, 3), (-2.0, 0, 4), (-3.0, 0, 5), (-4.0, 0, 6))
    assert texts(search) == [[3], [4]] and search.parents == [0, 0]
    added(search, (-2.0, 1, 7), (-2.5, 0, END), (-3.0, 0, 8), (-4.0, 0, 6))
    assert texts(search) == [[4, 7], [3, 8]] and search.parents == [1, 0]
    assert search.scores.tolist() == [-2.0, -3.0]
    assert [(score, one.ids) for score, one in search.ended] == [(-1.25, [3, END])]


def test_only_the_best_candidates_end() -> None:
    search = Search(BeamSettings(2), VOCAB, (END,), 9)
    added(search, (-1.0, 0, 3), (-2.0, 0, 4), (-3.0, 0, END), (-4.0, 0, 6))
    assert not search.ended and texts(search) == [[3], [4]]


def test_with_the_last_token_all_end() -> None:
    search = Search(BeamSettings(2), VOCAB, (END,), 1)
    added(search, (-1.0, 0, 3), (-2.0, 0, END), (-3.0, 0, 5), (-4.0, 0, 6))
    assert search.done
    assert [one.ids for _, one in search.best(2)] == [[3], [END]]


@pytest.mark.parametrize(
    ("early", "penalty", "score", "done"),
    [
        (True, 1.0, -0.1, True),  # two have ended
        (False, 1.0, -4.0, False),  # -4 / 3 is better than -1.5
        (False, 1.0, -5.0, True),
        ("never", 1.0, -5.0, False),  # of nine tokens it may become -5 / 9
        ("never", 1.0, -14.0, True),
        ("never", 0.0, -5.0, True),
        (False, 0.0, -2.5, False),
    ],
)
def test_when_a_search_ends(early: Any, penalty: float, score: float, done: bool) -> None:
    search = Search(BeamSettings(2, penalty, early), VOCAB, (END,), 9)
    added(search, (-1.0, 0, 3), (-2.0, 0, 4), (-3.0, 0, 5), (-4.0, 0, 6))
    added(search, (-1.0, 0, 7), (-1.5, 1, 7), (-2.0, 0, 5), (-4.0, 0, 6))
    assert not search.done
    second = -4.5 if penalty else -3.0
    added(search, (-2.8, 0, END), (second, 1, END), (score, 0, 5), (score - 1.0, 0, 6))
    assert [one.ids[-1] for _, one in search.ended] == [END, END]
    assert search.done is done


def test_length_penalty() -> None:
    for penalty, wanted in ((0.0, -6.0), (1.0, -3.0), (2.0, -1.5), (-1.0, -12.0)):
        assert BeamSettings(2, penalty).score(-6.0, 2) == wanted


def test_a_search_ends_with_its_last_beam() -> None:
    search = Search(BeamSettings(2), VOCAB, (7, 8, 9), 9)
    added(search, (-1.0, 0, 7), (-2.0, 0, 8), (-3.0, 0, 9))
    assert search.done and [one.ids for _, one in search.ended] == [[7], [8]]
    assert search.scores.tolist() == [np.float32(-1) + np.float32(OUT)] * 2


def decoded(ids: list[int]) -> str:
    return "".join(chr(ord("a") + i) for i in ids)


def test_strings_end_texts() -> None:
    empty = Text(decoded, Stops(frozenset({END}), ("de",), 9))
    search = Search(BeamSettings(2), VOCAB, (END,), 9, empty)
    assert not added(search, (-1.0, 0, 3), (-2.0, 0, 4), (-3.0, 0, 5), (-4.0, 0, 6))
    turned = added(search, (-2.0, 0, 4), (-2.5, 1, 5), (-3.0, 1, END), (-4.0, 0, 6))
    assert turned  # "de" has come, which no device sees
    assert texts(search) == [[4, 5], [3, 6]] and search.parents == [1, 0]
    assert [one.ids for _, one in search.ended] == [[3, 4]]
    (one,) = search.generations(1, empty, "context", 3)
    assert (one.ids, one.text, one.finish, one.prompt_tokens) == ([3, 4], "", "stop", 3)
    assert one.score == -1.0


def test_generations_of_a_search() -> None:
    search = Search(BeamSettings(2), VOCAB, (END,), 9)
    logprobs = [TokenLogprobs(i, -float(i), {}) for i in range(4)]
    best, which = np.array([-1, -2, -3, -4], np.float32), np.array([3, 4, 5, 6], np.int32)
    search.add(best, which, logprobs)
    added(search, (-2.0, 1, END), (-3.0, 0, 8), (-4.0, 0, 7), (-5.0, 0, 6))
    ended, runs = search.generations(
        2, Text(None, Stops(frozenset({END}), (), 9), True), "closed", 1
    )
    assert (ended.ids, ended.finish, ended.score) == ([4], "stop", -1.0)
    assert ended.logprobs == [logprobs[1]]
    assert (runs.ids, runs.finish, runs.score) == ([3, 8], "closed", -1.5)


def test_a_long_text_is_no_deep_one() -> None:
    one = Hypothesis()
    for token in range(100_000):
        one = one.then(token, 0.0, None)
    assert one.ids == list(range(100_000))
    del one


# -- on devices -----------------------------------------------------------------------------------


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize(("prompts", "beam", "ends"), [(1, 2, [9]), (3, 5, [2, 9]), (2, 4, [])])
def test_device_and_host_follow_the_same_texts(
    device: ct.Device, prompts: int, beam: int, ends: list[int]
) -> None:
    """Scores of random log-probabilities, step after step; equal ones, too."""
    settings = BeamSettings(beam, early_stopping="never")
    states = BeamStates(prompts, beam, VOCAB, device)
    states.begin([7] * prompts, ends)
    assert states.tokens.numpy().tolist() == [7] * (prompts * beam)
    searches = [Search(settings, VOCAB, ends, 99) for _ in range(prompts)]
    rng, count = np.random.default_rng(beam), min(settings.candidates(len(ends)), beam * VOCAB)
    totals: dict[tuple[int, ...], float] = {}
    for step in range(4):
        rows = np.round(rng.normal(size=(prompts * beam, VOCAB)) * 4).astype(np.float32) / 4 - 3
        with device.batch():
            best, which = states.go_on(ct.asarray(rows, device=device), count)
        best_scores, codes = ct.fetch(best, which).result()
        tokens, parents, scores = (
            s.numpy().reshape(prompts, beam) for s in (states.tokens, states.parents, states.scores)
        )
        for p, search in enumerate(searches):
            before = [one.ids for one in search.running]
            if not step:
                before = before[:1]  # they are alike
            each = {
                (*ids, token): totals.get((p, *ids), 0.0) + rows[p * beam + b, token]
                for b, ids in enumerate(before) for token in range(VOCAB)
            }  # fmt: skip
            values = sorted(each.values(), reverse=True)[:count]
            np.testing.assert_array_equal(best_scores[p][: len(values)], values)
            search.add(best_scores[p], codes[p])
            assert tokens[p].tolist() == [one.token for one in search.running]
            assert (parents[p] - p * beam).tolist() == search.parents
            np.testing.assert_array_equal(scores[p], search.scores)
            for one in search.running:
                totals[p, *one.ids] = each[tuple(one.ids)]


@pytest.mark.devices("cpu", "webgpu")
def test_the_device_takes_over_the_hosts_choice(device: ct.Device) -> None:
    states = BeamStates(2, 2, VOCAB, device)
    states.begin([1, 2], [END])
    searches = [Search(BeamSettings(2), VOCAB, (END,), 9) for _ in range(2)]
    added(searches[0], (-1.0, 0, 3), (-2.0, 0, 4), (-3.0, 0, 5), (-4.0, 0, 6))
    added(searches[1], (-1.0, 0, 5), (-2.5, 1, END), (-3.0, 1, 6), (-4.0, 0, 7))
    states.turn(searches)
    assert states.tokens.numpy().tolist() == [3, 4, 5, 6]
    assert states.parents.numpy().tolist() == [0, 0, 2, 3]
    assert states.scores.numpy().tolist() == [-1.0, -2.0, -1.0, -3.0]


@pytest.mark.devices("cpu", "webgpu")
def test_end_tokens_are_uploaded_only_when_they_change(device: ct.Device) -> None:
    states, ids, sent = BeamStates(1, 2, 5000, device), frozenset({END}), list[int]()
    for ends in (ids, ids, frozenset({3, 9999})):
        device.synchronize()
        with ct.ledger() as led:
            states.begin([1], ends)
            device.synchronize()
        sent.append(led.upload_bytes)
    assert sent[0] == sent[2] > 4 * 5000 > sent[1]
    assert np.flatnonzero(states._ends.numpy()).tolist() == [3]


@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
def test_the_best_of_a_wide_vocabulary(device: ct.Device) -> None:
    scores = np.random.default_rng(1).standard_normal((2 * 3, 70_001)).astype(np.float32)
    scores[1, 70_000], scores[5, 0] = 9.0, 8.0
    best, codes = ct.fetch(*best_of(ct.asarray(scores, device=device), 2, 6)).result()
    flat = scores.reshape(2, -1)
    wanted = np.argsort(-flat, axis=1)[:, :6]
    assert codes.tolist() == wanted.tolist()
    np.testing.assert_array_equal(best, np.take_along_axis(flat, wanted, 1))
