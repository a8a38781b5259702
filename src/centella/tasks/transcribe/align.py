"""Times of words: which part of the sound the decoder attends to, token by token.

The attention of a few heads follows the speech. It is computed once more for the whole text of a
window, made comparable over tokens, smoothed, and a monotone path through it found by dynamic time
warping (Sakoe and Chiba 1978). The attention of the input token i, which predicts the one after it,
says where token i ends.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from centella.audio.transcript import Word

Array = np.ndarray[Any, Any]
Ids = Sequence[int]
SPACELESS = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # languages that write no spaces
OPENING = "\"'\u201c\u00bf([{-"
CLOSING = "\"'.\u3002,\uff0c!\uff01?\uff1f:\uff1a\u201d)]}\u3001"  # also of Chinese, Japanese


def token_ends(weights: Array, median_width: int) -> Array:
    """Where each token ends, in steps of 20 ms.

    Args:
        weights: f32 [heads, tokens, places], softmax of the alignment heads, cut to the sound.
        median_width: of the filter over places; odd.
    """
    if not weights.shape[1]:
        return np.zeros(0, np.int64)
    mean = weights.mean(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = (weights - mean) / weights.std(1, keepdims=True)
    rows, places = warped(-median(np.nan_to_num(scaled), median_width).mean(0))
    return places[np.diff(rows, prepend=-1) > 0]


def median(x: Array, width: int) -> Array:
    """The median of `width` neighbours along the last axis; ends are reflected."""
    side = width // 2
    if not side or x.shape[-1] <= side:
        return x
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(side, side)], mode="reflect")
    around = [padded[..., i : i + x.shape[-1]] for i in range(width)]
    for done in range(side + 1):  # a selection sort, that stops at the middle
        for i in range(done + 1, width):
            low, high = np.minimum(around[done], around[i]), np.maximum(around[done], around[i])
            around[done], around[i] = low, high
    return around[side]


def warped(costs: Array) -> tuple[Array, Array]:
    """The cheapest path from the first corner to the last: rows and columns of its places.

    A step is down, right, or both. All places of an antidiagonal are computed at once.
    """
    n, m = costs.shape
    wide = m + 1
    total = np.full((n + 1) * wide, np.inf, np.float32)
    step = np.zeros((n + 1) * wide, np.int8)  # 0 both, 1 down, 2 right
    total[0] = 0.0
    padded = np.zeros((n + 1, wide), np.float64)
    padded[1:, 1:] = costs
    flat = padded.ravel()
    for diagonal in range(2, n + m + 1):
        top, bottom = max(1, diagonal - m), min(n, diagonal - 1)
        first = top * wide + diagonal - top
        here = slice(first, first + (bottom - top) * (wide - 1) + 1, wide - 1)

        def back(places: int, here: slice = here) -> Array:
            return total[here.start - places : here.stop - places : here.step]

        both, down, right = back(wide + 1), back(wide), back(1)
        chosen = np.where((both < down) & (both < right), 0,
                          np.where((down < both) & (down < right), 1, 2))  # fmt: skip
        total[here] = flat[here] + np.choose(chosen, (both, down, right))
        step[here] = chosen
    step[:wide], step[wide::wide] = 2, 1
    rows, columns, i, j = [], [], n, m
    while i or j:
        rows.append(i - 1)
        columns.append(j - 1)
        taken = step[i * wide + j]
        i, j = i - (taken != 2), j - (taken != 1)
    return np.array(rows[::-1]), np.array(columns[::-1])


def words(
    ids: Ids, ends: Sequence[float], probabilities: Sequence[float], start: float,
    decode: Callable[[Ids], str], language: str | None,
) -> tuple[Word, ...]:  # fmt: skip
    """Words of a segment's text tokens.

    Args:
        ids: without times; ends, probabilities: of each, seconds and 0 to 1.
        start: where the first token begins.
        decode: tokens to text; language: a code, or None.
    """
    begins = [start, *ends[:-1]]
    groups: list[tuple[list[int], str]] = []
    for group, text in _pieces(ids, decode):
        spaced = text.startswith(" ") or text.strip() in string.punctuation
        if groups and (not text or (language not in SPACELESS and not spaced)):
            groups[-1] = (groups[-1][0] + group, groups[-1][1] + text)
        else:
            groups.append((group, text))
    return tuple(
        Word(begins[group[0]], ends[group[-1]], text,
             float(np.mean([probabilities[i] for i in group])))
        for group, text in _punctuated(groups)
    )  # fmt: skip


def _pieces(ids: Ids, decode: Callable[[Ids], str]) -> list[tuple[list[int], str]]:
    """Groups of tokens, by index, that are whole characters or no text, each with its text."""
    pieces: list[tuple[list[int], str]] = []
    group: list[int] = []
    whole, at = decode(ids), 0
    for i in range(len(ids)):
        group = [*group, i]
        text = decode(ids[: i + 1])  # ends with a replacement character within a character
        if whole.startswith(text) or i == len(ids) - 1:
            pieces.append((group, text[at:]))
            group, at = [], len(text)
    return pieces


def _punctuated(groups: list[tuple[list[int], str]]) -> list[tuple[list[int], str]]:
    """Opening marks joined to the word after them, closing ones to the word before."""
    joined: list[tuple[list[int], str]] = []
    for group, text in groups:
        last = joined[-1] if joined else None
        mark = text.strip()
        if last and ((mark and mark in CLOSING and not last[1].endswith(" "))
                     or (last[1].startswith(" ") and last[1].strip() in OPENING
                         and last[1].strip())):  # fmt: skip
            joined[-1] = (last[0] + group, last[1] + text)
        else:
            joined.append((group, text))
    return joined
