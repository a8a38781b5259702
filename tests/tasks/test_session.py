"""Streams, the sessions that a Generator keeps, and text from tokens."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import DTypeError, ShapeError
from centella.tasks.generate.pieces import Stops, Text
from centella.tasks.load import load
from tests.tasks.test_generate import FOLDER, TEXT, host

NONE = Stops(frozenset(), (), 10**6)


def bytes_to_text(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def test_a_stream_is_of_one_prompt() -> None:
    with pytest.raises(ShapeError, match="stream: expected one prompt, got 2; generate takes sev"):
        host().stream(["a", "b"])  # type: ignore[list-item]


def test_a_stream_and_its_result() -> None:
    model = host()
    whole = model.generate(TEXT, max_new_tokens=12, ignore_eos=True)
    pieces = model.stream(TEXT, max_new_tokens=12, ignore_eos=True)
    assert pieces.result is None
    assert "".join(pieces) == whole.text
    assert pieces.result == whole
    with model.stream(TEXT, max_new_tokens=12, ignore_eos=True) as begun:
        first = next(begun)
    result = begun.result
    assert result is not None
    assert (result.finish, result.prompt_tokens) == ("closed", whole.prompt_tokens)
    assert 0 < len(result.ids) < 12
    assert result.ids == whole.ids[: len(result.ids)]
    assert (result.text or "").startswith(first)
    begun.close()
    assert list(begun) == []
    assert begun.result == result


def test_a_special_token_as_a_stop_string() -> None:
    model = load(FOLDER / "qwen3", "cpu", "f32")
    ids = model.generate(TEXT, max_new_tokens=9, ignore_eos=True).ids
    native = model.tokenizer.native
    end = native.token_to_id("<|im_end|>")
    asked = model._prompts.asked("generate", model.config, {}, tokens=9, stop="<|im_end|>",
                                 ignore_eos=True, logprobs=None)  # fmt: skip
    assert asked.stops.ids == {end}
    assert end not in ids


@pytest.mark.parametrize("finish", ["stop", "length", "context", "closed"])
def test_what_is_undecided_at_the_end_is_flushed(finish: str) -> None:
    ids = [*b"ab", 0xE2, 0x82]
    stops = Stops(frozenset([999]), (), 4 if finish == "length" else 9)
    text = Text(bytes_to_text, stops)
    given = "".join(text.add(i) for i in ids)
    given += text.add(999) if finish == "stop" else text.end(finish)
    assert (given, text.whole(), text.finish) == ("ab\ufffd", "ab\ufffd", finish)


@pytest.mark.parametrize("ids", [[0xFF] * 200, [0xFF, 0xFF, 0xFF, *"😀é€x".encode(), 0xFF] * 9])
def test_text_is_committed_steadily(ids: list[int]) -> None:
    longest = 0

    def decode(some: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(some))
        return bytes_to_text(some)

    text = Text(decode, NONE)
    for i, token in enumerate(ids):
        text.add(token)
        assert len(text.whole() or "") >= len(bytes_to_text(ids[: i + 1])) - 4
    text.end("context")
    assert text.whole() == bytes_to_text(ids)
    assert longest <= 12


def test_stop_strings_that_span_tokens() -> None:
    for stop in ("bcd", "d", "abcdef", "cdefg"):
        text = Text(bytes_to_text, Stops(frozenset(), (stop, "zzzz"), 99))
        given = "".join(text.add(i) for i in b"xxabcdefgh")
        assert text.finish == "stop"
        assert given == text.whole() == "xxabcdefgh"[: "xxabcdefgh".index(stop)]


def test_a_short_prompt_leaves_a_long_conversation_in_memory() -> None:
    model = load(FOLDER / "qwen3", "cpu", "f32")
    options: dict[str, Any] = {"max_new_tokens": 2, "ignore_eos": True}
    long = list(range(3, 83))
    model.generate(long, **options)
    model.generate([9, 8, 7], **options)
    with ct.ledger() as led:
        model.generate([*long, 5], **options)
    assert led.upload_bytes < 4 * len(long)
    assert len(model._sessions.idle.waiting) == 2


def test_frequencies_follow_the_tokens() -> None:
    """Those that there are, and neither the capacity nor the tokens that may come."""
    model = load(FOLDER / "phi4-mini", "cpu", "f32")
    (rope,) = model.model.config.ropes
    one = model._sessions.take([[5] * 20], 80)
    for length in (20, 32, 33, 70, 7):
        one.start([[5] * length])
        assert one.rows == [[5] * length]
        assert one.reach == (32 if length <= 32 else 128)
        cos, _ = one.past.tables[0]
        assert np.array_equal(rope.tables(length)[0], cos.numpy()[:length])
    assert (one.shared([[5] * 9]), one.shared([[5] * 40])) == (7, 0)


def across() -> tuple[list[int], list[int]]:
    """A prompt of 24 tokens, and the forty that transformers generates; 32 have been trained."""
    stored = np.load(FOLDER / "phi4-mini" / "expected.npz")
    return stored["ids"][0, :24].tolist(), stored["across"].tolist()


@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
@pytest.mark.parametrize("options", [{}, {"draft": "lookup"}, {"draft": "itself"}, {"logprobs": 1}],
                         ids=["plain", "lookup", "draft", "logprobs"])  # fmt: skip
def test_tokens_across_the_trained_length(device: ct.Device, options: dict[str, Any]) -> None:
    """The text so far is read again with the other frequencies, whatever else may come."""
    model, (prompt, tokens) = load(FOLDER / "phi4-mini", device, "f32"), across()
    if options.get("draft") == "itself":
        options = {"draft": model}
    for most in (40, 1, 8, 9, 10, 17):
        generation = model.generate(prompt, max_new_tokens=most, ignore_eos=True, **options)
        assert generation.ids == tokens[:most]
    more = model.generate([*prompt, *tokens[:5]], max_new_tokens=35, ignore_eos=True, **options)
    assert more.ids == tokens[5:]


def test_rows_turn_by_their_own_lengths() -> None:
    """Whatever the lengths and the number of the rows beside them."""
    model, (prompt, tokens) = load(FOLDER / "phi4-mini", "cpu", "f32"), across()
    rows = [prompt, [*prompt, *tokens[:9]], prompt[:3], [*prompt, *tokens[:5]], prompt]
    drawn = {"temperature": 1.0, "presence_penalty": 0.2, "repetition_penalty": 1.2}
    for sampling in ({}, drawn):
        options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, **sampling}
        several = model.generate(rows, n=2, seed=7, **options)
        for number, generation in enumerate(several):
            row = rows[number // 2]
            assert generation.ids == model.generate(row, seed=7 + number, **options).ids


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_generator_stays_in_its_process(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"call ct\.load where it is needed"):
        copied(host())


@pytest.mark.parametrize(
    ("prompt", "options", "error", "text"),
    [
        ([1, 2.5], {}, DTypeError, r"prompt\[1\]: expected a whole number, got 2.5"),
        ([[1], [1, "a"]], {}, DTypeError, r"prompts\[1\]\[1\]: expected a whole number, got 'a'"),
        (["a", 3], {}, DTypeError, r"prompts\[1\]: expected text or whole numbers, got int"),
        ("x", {"stop": None}, DTypeError, "stop: expected strings that are not empty, got None"),
        ("x", {"stop": 3}, DTypeError, "stop: expected strings"),
        ("x", {"stop": b"a"}, DTypeError, "stop: expected strings"),
        ("x", {"ignore_eos": "no"}, DTypeError, "expected True or False for ignore_eos, got str"),
        ("x", {"top_k": float("nan")}, DTypeError, "top_k: expected a whole number"),
        ("x", {"top_k": float("inf")}, DTypeError, "top_k: expected a whole number"),
        ("x", {"seed": float("inf")}, DTypeError, "seed: expected a whole number"),
        ("x", {"seed": -1}, ShapeError, "seed: expected 0 to 2,147,483,647"),
        ("x", {"seed": 1 << 31}, ShapeError, "seed: expected 0 to 2,147,483,647"),
        ("x", {"max_tokens": 3}, TypeError, "max_tokens=; write max_new_tokens="),
        ("x", {"max_length": 3}, TypeError, "max_length=; write max_new_tokens="),
        ("x", {"do_sample": True}, TypeError, "do_sample=; write temperature="),
    ],
)
def test_bad_calls(prompt: Any, options: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=rf"^generate: .*{text}"):
        host().generate(prompt, **options)


def test_no_prompt_at_all() -> None:
    with pytest.raises(ShapeError, match=r"or several prompts, got \[\]"):
        host().generate([])


def test_numbers_of_numpy() -> None:
    model = host()
    plain = model.generate(TEXT, max_new_tokens=4, temperature=0.5, top_k=9, seed=3)
    arrays: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(9),
        "seed": np.uint8(3),
    }
    assert model.generate(TEXT, max_new_tokens=4, **arrays) == plain
