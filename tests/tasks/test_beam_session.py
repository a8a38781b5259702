"""Beam search of decoders against transformers (tests/reference/beams.py); what a step costs."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.tasks.generate import beam_session
from centella.tasks.generate.beam_settings import BeamSettings
from centella.tasks.generate.generator import Generator
from centella.tasks.generate.pooled_past import PooledPast
from centella.tasks.load import load
from tests.support.model_common import DATA
from tests.tasks.test_generate import EVERY, FOLDER, TEXT, generator, host
from tests.tasks.test_logprobs import log_softmax

CASES: list[dict[str, Any]] = json.loads((DATA / "beams.json").read_text())
# Windows, experts, several ends, many beams, a batch, strings that end texts; frequencies that
# change with the length, of one prompt and of two whose first search ends before.
FEW = [1, 12, 28, 52, 53, 58, 59, 60, 64]
QUICK = [27, 57, 61]  # of few steps, for the simulator


def named(i: int) -> str:
    case = CASES[i]
    return f"{i} {case['family']}"


def check_case(device: ct.Device, case: dict[str, Any]) -> None:
    """Tokens, scores and log-probabilities of each text of each prompt."""
    model, ends = generator(device, case["family"]), frozenset(case["eos"])
    kept, model.config = model.config, replace(model.config, stop_ids=ends)
    try:
        generations = model.generate(case["prompts"], logprobs=0, **case["options"])
    finally:
        model.config = kept
    wanted = [
        one for rows in zip(*(case[n] for n in ("texts", "scores", "logprobs")), strict=True)
        for one in zip(*rows, strict=True)
    ]  # fmt: skip
    n = case["options"].get("n", 1)
    for i, (one, (text, score, logprobs)) in enumerate(zip(generations, wanted, strict=True)):
        ids = text[:-1] if text[-1] in ends else text
        assert one.ids == ids, f"text {i % n} of prompt {i // n}"
        assert one.score == pytest.approx(score, rel=1e-4, abs=1e-4)
        assert one.prompt_tokens == len(case["prompts"][i // n])
        assert [p.id for p in one.logprobs] == ids
        told = [p.logprob for p in one.logprobs]
        np.testing.assert_allclose(told, logprobs[: len(ids)], atol=2e-4)
        if text[-1] in ends:
            assert one.finish == "stop"
        elif len(text) == case["options"]["max_new_tokens"]:
            assert one.finish == "length"


@pytest.mark.parametrize("number", range(len(CASES)), ids=named)
def test_texts_equal_those_of_transformers(number: int) -> None:
    check_case(ct.device("cpu"), CASES[number])


@pytest.mark.devices("webgpu", "webgpu-hardware", "cuda")
@pytest.mark.parametrize("number", FEW, ids=named)
def test_texts_of_devices_equal_those_of_transformers(device: ct.Device, number: int) -> None:
    check_case(device, CASES[number])


@pytest.mark.parametrize("number", QUICK, ids=named)
def test_texts_of_the_simulator_equal_those_of_transformers(number: int) -> None:
    """Where reads of what another thread writes, and of what nobody wrote, are errors."""
    check_case(ct.device("simulator"), CASES[number])


# -- against a search that is written out ---------------------------------------------------------


def searched(model: Generator, prompt: list[int], steps: int, beam: int) -> list[list[int]]:
    """The texts that a search without a cache finds in a model's own logits."""
    texts: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(steps):
        each = []
        for total, text in texts:
            ids = ct.asarray(np.array([[*prompt, *text]], np.int32), device=model.model.device)
            row = log_softmax(model(ids).numpy())[0, -1]
            each += [(total + row[i], [*text, i]) for i in np.argsort(-row)[:beam].tolist()]
        texts = sorted(each, key=lambda one: -one[0])[:beam]
    return [text for _, text in texts]


@pytest.mark.devices("cpu", "webgpu")
def test_quantised_weights(device: ct.Device, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.support.gguf_files import write  # needs the package
    from tests.weights.test_gguf import numbers_of

    file = tmp_path / "model.gguf"
    write(FOLDER / "llama", file, "Q4_K", numbers=numbers_of("llama", tie_word_embeddings=True))
    model = load(file, device, "f32", task="generate")
    prompt = [5, 17, 4, 90, 33]
    generations = model.generate(prompt, beam=3, n=3, max_new_tokens=7, ignore_eos=True)
    assert [one.ids for one in generations] == searched(model, prompt, 7, 3)


def test_a_cache_in_i8_follows_near_texts() -> None:
    model = host()
    options: dict[str, Any] = {"beam": 4, "n": 2, "max_new_tokens": 20, "ignore_eos": True}
    wide, narrow = (model.generate([*range(5, 75)], cache=c, **options) for c in (None, "i8"))
    again = model.generate([*range(5, 75)], cache="i8", **options)
    assert [one.ids for one in again] == [one.ids for one in narrow]
    for one, other in zip(again, narrow, strict=True):  # the prompt's blocks are not computed anew
        assert one.score == pytest.approx(other.score, rel=1e-5)
    assert narrow[0].ids[:3] == wide[0].ids[:3]
    assert narrow[0].score == pytest.approx(wide[0].score, abs=0.1)


# -- prompts, ends, the loop ----------------------------------------------------------------------


@pytest.mark.devices(*EVERY)
def test_unequal_prompts_get_what_each_gets_alone(device: ct.Device) -> None:
    model = generator(device)
    prompts = [[9, 8], list(range(3, 67)), list(range(90, 155)), [7]]  # around a block's end
    options: dict[str, Any] = {"beam": 3, "n": 2, "max_new_tokens": 8, "ignore_eos": True}
    together = model.generate(prompts, **options)
    alone = [one for prompt in prompts for one in model.generate(prompt, **options)]
    assert [one.ids for one in together] == [one.ids for one in alone]
    scores, own = ([one.score for one in ones] for ones in (together, alone))
    np.testing.assert_allclose(scores, own, rtol=1e-5)


@pytest.mark.parametrize("cache", [None, "i8"])
def test_prompts_turn_by_their_own_lengths(cache: Any) -> None:
    """Whatever the lengths beside them: before, across and beyond the trained length, of 32."""
    model = load(FOLDER / "phi4-mini", "cpu", "f32", task="generate")
    whole = np.load(FOLDER / "phi4-mini" / "expected.npz")["ids"].ravel().tolist()
    prompts = [whole[:20], whole[5:25], whole[:70], whole[:9], whole[:3], whole[:33], whole[:64]]
    for tokens in (12, 13, 25, 58):
        options: dict[str, Any] = {"beam": 3, "n": 2, "max_new_tokens": tokens,
                                   "ignore_eos": True, "cache": cache}  # fmt: skip
        together = model.generate(prompts, **options)
        alone = [one for prompt in prompts for one in model.generate(prompt, **options)]
        assert [one.ids for one in together] == [one.ids for one in alone]
        assert {len(one.ids) for one in together} == {tokens}


def test_texts_beyond_the_trained_length_are_read_again_by_whole_blocks() -> None:
    """What all beams begin with is read once; the pool has room for every length."""
    whole = np.load(FOLDER / "phi4-mini" / "expected.npz")["ids"].ravel().tolist()
    for trained in (63, 64, 65, 70):
        model = load(FOLDER / "phi4-mini", "cpu", "f32", task="generate")
        (turn,) = model.model.config.ropes
        turn._values["original_max_position_embeddings"] = trained
        for length in (trained - 1, trained, 40):
            prompt = (whole * 2)[:length]
            options: dict[str, Any] = {"beam": 3, "max_new_tokens": trained + 9 - length}
            generations = model.generate([prompt, prompt[::-1]], n=3, ignore_eos=True, **options)
            wanted = [
                searched(model, ids, trained + 9 - length, 3) for ids in (prompt, prompt[::-1])
            ]
            assert [one.ids for one in generations] == [ids for each in wanted for ids in each]


def test_one_beam_is_the_likeliest_token() -> None:
    model = host()
    options: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
    assert model.generate(TEXT, beam=1, **options) == model.generate(TEXT, **options)
    assert model.generate(TEXT, **options).score is None


def test_what_is_returned() -> None:
    model = host()
    options: dict[str, Any] = {"beam": 3, "max_new_tokens": 5, "ignore_eos": True}
    one = model.generate(TEXT, **options)
    assert isinstance(one, ct.Generation) and one.text is not None
    assert model.generate([TEXT], **options) == [one]
    several = model.generate(TEXT, n=3, **options)
    assert several[0] == one and len({tuple(g.ids) for g in several}) == 3
    assert [g.score for g in several] == sorted((g.score for g in several), reverse=True)
    assert asyncio.run(model.generate_async(TEXT, n=3, **options)) == several


def test_the_folder_may_say_how_to_sample() -> None:
    """Beams draw nothing."""
    model = host()
    options: dict[str, Any] = {"beam": 3, "max_new_tokens": 5}
    wanted, kept = model.generate(TEXT, **options), model.config
    model.config = replace(kept, sampling=kept.sampling.with_("", {"temperature": 0.6, "top_k": 3}))
    try:
        assert model.generate(TEXT, **options) == wanted
    finally:
        model.config = kept


def test_context_is_the_end() -> None:
    model = host()
    generations = model.generate([[5] * 100, [5, 6]], beam=3, max_new_tokens=100, ignore_eos=True)
    assert [(len(one.ids), one.finish) for one in generations] == [(28, "context")] * 2


def test_alternatives() -> None:
    model = host()
    for one in model.generate(TEXT, beam=3, n=3, max_new_tokens=4, ignore_eos=True, logprobs=4):
        ids, told = model.encode(TEXT), one.logprobs or []
        for i, token in enumerate(told):
            given = ct.asarray(np.array([[*ids, *one.ids[:i]]], np.int32), device="cpu")
            row = log_softmax(model(given).numpy())[0, -1]
            assert token.id == one.ids[i] and abs(token.logprob - row[token.id]) < 1e-4
            assert list(token.top) == np.argsort(-row)[:4].tolist()
            np.testing.assert_allclose([*token.top.values()], np.sort(row)[:-5:-1], atol=1e-4)
        assert one.score == pytest.approx(sum(t.logprob for t in told) / 4, abs=1e-4)


def test_a_cancelled_search_leaves_the_next_one_alone() -> None:
    model = host()
    options: dict[str, Any] = {"beam": 3, "max_new_tokens": 60, "ignore_eos": True}
    wanted = model.generate(TEXT, **options)
    ending = threading.Event()
    ending.set()
    cut = model._generated("generate", TEXT, ending, 2, **options)
    assert [(one.ids, one.finish) for one in cut] == [([], "closed")] * 2
    assert model.generate(TEXT, **options) == wanted


def test_logits_that_are_nan_are_an_error_with_the_layer() -> None:
    model = load(FOLDER / "qwen3", "cpu", "f32", task="generate")
    attention = model.model.layers[1].self_attn
    attention.o_proj.weight = attention.o_proj.weight * float("nan")
    text = r"^generate: sequence 1, token 3: the logits are NaN, first in the result of layer 1$"
    fine = model.generate
    with pytest.raises(ct.ContractError, match=text.replace("sequence 1", "sequence 0")):
        fine([[5, 6, 7], [5, 6]], beam=2, max_new_tokens=3)


# -- what it costs --------------------------------------------------------------------------------


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("cache", [None, "i8"])
def test_a_step_is_one_submission_and_eight_bytes_a_candidate(
    device: ct.Device, cache: Any
) -> None:
    model, tokens, ids = generator(device), 20, list(range(5, 60))  # over a block's end
    options: dict[str, Any] = {"beam": 4, "max_new_tokens": tokens, "ignore_eos": True,
                               "cache": cache}  # fmt: skip
    wanted = model.generate(ids, **options)
    with ct.ledger() as led:
        again = model.generate(ids, **options)
    assert again == wanted
    led.expect(downloads=tokens, download_bytes=2 * 8 * 4 * tokens, compiles=0)
    assert led.submissions <= tokens + 3 and led.uploads <= 4 and led.plans <= 1
    session = model._sessions._beams
    assert session is not None
    with ct.ledger() as led:
        session._step.fetch(8, None, model.context).result()
    led.expect(uploads=0, submissions=1, allocations=0, compiles=0, plans=0, downloads=1)


@pytest.mark.devices("cpu", "webgpu")
def test_what_is_known_of_a_prompt_is_not_read_again(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks of earlier prompts, also of the one before in a batch."""
    model = load(FOLDER / "qwen3", device, "f32", task="generate")
    read = list[int]()
    past = PooledPast.read

    def counted(self: Any, left: list[int], table: Any) -> int:
        read.append(len(left))
        return past(self, left, table)

    monkeypatch.setattr(PooledPast, "read", counted)
    ids = list(range(5, 85))
    options: dict[str, Any] = {"beam": 2, "max_new_tokens": 3, "ignore_eos": True}
    first = model.generate([ids, [*ids[:70], 9]], **options)
    assert read == [79, 6]  # of the second what comes after a block of 64
    again = model.generate([ids, [*ids[:70], 9]], **options)
    assert [one.ids for one in again] == [one.ids for one in first]
    assert read[2:] == [15, 6]


def test_sessions_are_kept_where_they_fit() -> None:
    model = load(FOLDER / "qwen3", "cpu", "f32", task="generate")
    options: dict[str, Any] = {"beam": 2, "max_new_tokens": 3, "ignore_eos": True}

    def session_after(prompts: Any, **more: Any) -> Any:
        model.generate(prompts, **{**options, **more})
        return model._sessions._beams

    first = session_after([5, 6])
    assert session_after([9] * 30) is first
    assert session_after([9], max_new_tokens=50) is first
    more: dict[str, Any] = {}
    for prompts, another in (([5, 6], {"beam": 3}), ([[5], [6]], {}), ([[5], [6]], {"cache": "i8"}),
                             ([[5], [6]], {"max_new_tokens": 100})):  # fmt: skip
        more |= another
        other = session_after(prompts, **more)
        assert other is not first
        first = other
    product = model.model.layers[0].self_attn.o_proj
    weight, wanted = product.weight, model.generate([5, 6], beam=2, max_new_tokens=4)
    product.weight = weight * 0.5
    changed = model.generate([5, 6], beam=2, max_new_tokens=4)
    product.weight = weight
    assert model.generate([5, 6], beam=2, max_new_tokens=4) == wanted != changed


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 128])
def test_the_pool_has_room_for_every_length(length: int) -> None:
    """Of prompts that end before, at and after a block's end, up to the last block there is."""
    model = host()
    for steps in {1, 2, 63, 64, 65, 126, model.context - length}:
        if not 0 < steps <= model.context - length:
            continue
        session = beam_session.BeamSession(model.model, 2, 3, length + steps, steps)
        blocks = session._past.cache.blocks
        ids = [3 + i % 300 for i in range(length)]
        asked = model._prompts.asked(
            "generate", model.config, {}, tokens=steps, stop=(), ignore_eos=True, logprobs=None,
            beams=BeamSettings(3),
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session._step, "fetch", None)  # is never called
            assert session._start([ids, [9, *ids[1:]]], steps, asked.stops.ids, threading.Event())
        assert blocks.free >= 0
        session._release()
        assert blocks.free == blocks.count - 1
