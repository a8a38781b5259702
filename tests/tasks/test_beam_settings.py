"""How texts are searched for: arguments that cannot be, and what does not go with beams."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella.errors import DTypeError, ShapeError
from tests.tasks.test_generate import host


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"beam": 0}, ShapeError, "expected beam of 1 or more, got 0"),
        ({"beam": 17}, ShapeError, "^generate: beam: expected 1 to 16, got 17$"),
        ({"beam": 2.5}, DTypeError, "a whole number for beam, got 2.5"),
        ({"beam": 2, "length_penalty": "1"}, DTypeError, "a number for length_penalty, got str"),
        ({"beam": 2, "length_penalty": math.nan}, ShapeError, "expected -50 to 50, got nan"),
        ({"beam": 2, "length_penalty": 51}, ShapeError, "length_penalty: expected -50 to 50"),
        ({"beam": 2, "early_stopping": "yes"}, DTypeError,
         """^generate: early_stopping: expected True, False or "never", got 'yes'$"""),
        ({"beam": 2, "early_stopping": np.array([1, 2])}, DTypeError, r'"never", got array\('),
        ({"beam": 2, "early_stopping": 1}, DTypeError, "early_stopping: expected True, False or"),
        ({"length_penalty": 2.0}, ShapeError,
         "^generate: length_penalty: expected beam of 2 or more with it, got beam=1$"),
        ({"early_stopping": True}, ShapeError, "early_stopping: expected beam of 2 or more"),
        ({"beam": 2, "n": 3}, ShapeError,
         "^generate: n: expected up to 2 texts, one for each of beam=2, got 3$"),
        ({"beam": 2, "temperature": 0.7}, ShapeError,
         "^generate: temperature: expected 0.0 with beams, got 0.7; beam=2 follows the likeliest"),
        ({"beam": 2, "top_k": 5}, ShapeError, "^generate: top_k: expected 0 with beams, got 5"),
        ({"beam": 2, "repetition_penalty": 1.1}, ShapeError, "expected 1.0 with beams, got 1.1"),
        ({"beam": 2, "seed": 3}, ShapeError, "seed: expected None with beams, got 3"),
        ({"beam": 2, "temperature": -1}, ShapeError, "temperature: expected 0 to 10,000"),
        ({"beam": 2, "draft": "lookup"}, ShapeError, "draft: expected None with beams, got one"),
        ({"beam": 2, "logprobs": 21}, ShapeError, "logprobs: expected 0 to 20"),
        ({"num_beams": 2}, DTypeError, "num_beams=; write beam=, of generate$"),
        ({"num_return_sequences": 2}, DTypeError, "write n=, of generate$"),
    ],
)  # fmt: skip
def test_bad_calls(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        host().generate("x", **options)


def test_more_candidates_than_are_chosen_at_once() -> None:
    model = host()
    model.config, kept = replace(model.config, stop_ids=frozenset(range(3, 23))), model.config
    try:
        with pytest.raises(ShapeError, match="up to 6 with 20 tokens that end a text, got 7"):
            model.generate("x", beam=7)
        assert model.generate("x", beam=6, max_new_tokens=2).score is not None
        assert model.generate("x", beam=7, max_new_tokens=2, ignore_eos=True).score is not None
    finally:
        model.config = kept


def test_what_changes_nothing_is_taken() -> None:
    model = host()
    wanted = model.generate("x", max_new_tokens=4, beam=2)
    plain = {"temperature": 0, "top_p": 1.0, "seed": None}
    assert model.generate("x", max_new_tokens=4, beam=2, **plain) == wanted  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["beam", "length_penalty", "early_stopping"])
def test_what_streams_has_no_beams(name: str) -> None:
    options: dict[str, Any] = {name: 2}
    text = f"unknown argument {name}=; beams are of generate: their texts are known when the"
    with pytest.raises(DTypeError, match=f"^stream: {text} search ends$"):
        host().stream("x", **options)
    with pytest.raises(DTypeError, match=f"^chat: {text}"):
        host().chat([{"role": "user", "content": "x"}], **options)
