"""What classifiers give: labels, ranked documents, labelled parts of a text; logits as scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

Array = np.ndarray[Any, Any]
ACTIVATIONS = ("identity", "sigmoid", "softmax")


class Label(Struct, frozen=True):
    """A label of a text.

    Attributes:
        label: its name; score: the model's score of it.
    """

    label: str
    score: float


class Ranked(Struct, frozen=True):
    """A document in the order of a question.

    Attributes:
        index: its position in the input; score: the model's score; text: the document.
    """

    index: int
    score: float
    text: str


class Span(Struct, frozen=True):
    """A labelled part of a text.

    Attributes:
        label: its name; score: the model's score of it.
        start, end: positions of its characters, text[start:end]; text: these characters.
    """

    label: str
    score: float
    start: int
    end: int
    text: str


def activated(logits: Array, kind: str) -> Array:
    """Logits f32 [..., labels] as scores."""
    if kind == "identity":
        return logits
    if kind == "sigmoid":
        e = np.exp(-np.abs(logits))
        return np.where(logits >= 0, 1 / (1 + e), e / (1 + e)).astype(np.float32)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    shares: Array = e / e.sum(-1, keepdims=True)
    return shares
