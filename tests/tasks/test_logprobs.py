"""Log-probabilities of tokens: their values, what they cost, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.errors import DTypeError, ShapeError
from centella.tasks.generate.logprobs import Scores
from tests.tasks.test_generate import EVERY, FOLDER, TEXT, generator, host


def log_softmax(logits: Any) -> Any:
    """In float64."""
    rows = np.asarray(logits, np.float64)
    rows = rows - rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


@pytest.mark.devices(*EVERY)
def test_values_equal_transformers(device: ct.Device) -> None:
    stored = np.load(FOLDER / "qwen3" / "expected.npz")
    ends = [1, 2, 9, 30, 37]
    prompts = [stored["ids"][0][:end].tolist() for end in ends]
    options: dict[str, Any] = {"max_new_tokens": 1, "ignore_eos": True, "logprobs": 20}
    random = {**options, "temperature": 2.0, "repetition_penalty": 1.5, "seed": 3, "top_k": 9}
    for each in (options, random):
        generations = generator(device).generate(prompts, **each)
        for one, row in zip(generations, log_softmax(stored["logits"][0])[np.array(ends) - 1],
                            strict=True):  # fmt: skip
            (token,) = one.logprobs or []
            assert token.id == one.ids[0]
            assert abs(token.logprob - row[token.id]) < 2e-5
            values = list(token.top.values())
            assert values == sorted(values, reverse=True)
            assert np.abs(values - row[list(token.top)]).max() < 2e-5
            assert np.abs(values - np.sort(row)[:-21:-1]).max() < 2e-5


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("vocab", [7, 8192, 9973])  # of one part, of two, of two that are padded
def test_large_vocabularies(device: ct.Device, vocab: int) -> None:
    x = np.random.default_rng(vocab).normal(0, 9, (3, vocab)).astype(np.float32)
    x[1] = -1e4
    x[1, vocab - 1] = x[1, 3] = 1e4  # equal: the first of them first
    x[2, -1] = 120.0
    chosen = np.array([5, vocab - 1, 0], np.int32)
    k = min(20, vocab)
    logits, tokens = (ct.asarray(array, device=device) for array in (x, chosen))
    scores = Scores(3, vocab, device)(logits, tokens, 20).numpy()
    expected, order = log_softmax(x), np.argsort(-x, kind="stable")[:, :k]
    assert scores[:, 0].tolist() == chosen.tolist()
    assert scores[:, 2 : 2 + k].tolist() == order.tolist()
    rows = np.arange(3)[:, None]
    np.testing.assert_allclose(scores[:, 1], expected[rows[:, 0], chosen], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(scores[:, 2 + k :], expected[rows, order], rtol=2e-6, atol=2e-6)


@pytest.mark.devices(*EVERY)
def test_logprobs_come_down_with_the_token(device: ct.Device) -> None:
    model, k = generator(device), 4
    options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": k}
    model.generate(TEXT, temperature=0.5, seed=1, **options)
    with ct.ledger() as led:
        model.generate(TEXT, temperature=1.5, seed=2, top_p=0.7, **options)
    led.expect(downloads=6, download_bytes=6 * 4 * (2 + 2 * k), compiles=0)
    assert led.submissions <= 7


def test_a_stream_tells_them_as_they_come() -> None:
    model = host()
    options: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
    whole = model.generate(TEXT, logprobs=0, **options)
    assert whole.logprobs is not None
    assert [t.id for t in whole.logprobs] == whole.ids
    assert all(t.logprob < 0 and t.top == {} for t in whole.logprobs)
    with model.stream(TEXT, logprobs=0, **options) as pieces:
        next(pieces)
        assert pieces.logprobs == whole.logprobs[: len(pieces.logprobs)] != []
        list(pieces)
    assert pieces.result == whole
    assert model.stream(TEXT, **options).logprobs == []
    end = whole.ids[4]  # the token that ends a text has none
    model.config, kept = replace(model.config, stop_ids=frozenset([end])), model.config
    try:
        ended = model.generate(TEXT, max_new_tokens=9, logprobs=0)
    finally:
        model.config = kept
    assert ended.logprobs == whole.logprobs[: whole.ids.index(end)]


@pytest.mark.parametrize(("value", "error"), [(-1, ShapeError), (21, ShapeError),
                         (True, DTypeError), (1.5, DTypeError), ("all", DTypeError)])  # fmt: skip
def test_bad_numbers_of_alternatives(value: Any, error: Any) -> None:
    with pytest.raises(error, match=r"^stream: logprobs: expected "):
        host().stream("x", logprobs=value)
