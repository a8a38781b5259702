"""The NumPy half of `speech_token` (`ops/speech.py`): the notes of a row, the rules, the choice."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array
from centella.emit.program import HostProgram
from centella.op.op import Form, named
from centella.ops.sample import noise

NEVER = -3.0e38  # the logit of a token that may not come
LEAST = -3.4e38  # below it: the largest of no tokens
NOTES = ("ended", "steps", "last time", "last was a time", "the one before was", "seed")
ENDED, STEPS, LAST, WAS, BEFORE, SEED = range(len(NOTES))


class SpeechAttrs(Struct, frozen=True):
    """Special tokens, whether times come, whether tokens are drawn.

    Attributes:
        end: of a text; zero: the token of the time 0; no_timestamps: never comes with times.
        latest: the largest token of a text's first time.
    """

    end: int
    zero: int
    no_timestamps: int
    latest: int
    timed: bool
    random: bool

    @property
    def tokens(self) -> tuple[tuple[str, int], ...]:
        """The tokens as launches are told them."""
        names = ("end", "zero", "no_timestamps", "latest")
        return tuple((name, getattr(self, name)) for name in names)


def allowed(levels: Array, notes: Array, attrs: SpeechAttrs) -> Array:
    """bool [vocab]: the tokens that may come in a row."""
    _, steps, last, was, before, _ = notes.tolist()
    may: Array = (levels == 0) | ((levels == 1) & (steps != 0))
    if not attrs.timed:
        return may
    zero, opened = attrs.zero, bool(was and not before)
    text, times = may[:zero].copy(), may[zero:].copy()
    text[: zero if not steps else attrs.end if opened else 0] = False
    text[attrs.no_timestamps :][:1] = False
    times[: max(last + (not opened) - zero, 0)] = False
    if not steps:
        times[max(attrs.latest + 1 - zero, 0) :] = False
    elif was and before:
        times[:] = False
    return np.concatenate([text, times])


def choose(scores: Array, steps: int, seed: int, heat: float, attrs: SpeechAttrs) -> Any:
    """Token, and its log-probability, of a row whose forbidden tokens are at `NEVER`."""
    top = scores.max()
    if not scores.dtype.type(NEVER) < top < np.inf:
        return -1, np.nan
    keys = scores
    if attrs.random:
        keys = scores * (1 / np.float32(heat)) - noise(len(scores), steps, seed)
        keys = np.maximum(keys, np.float32(LEAST))
    weights = np.exp(scores - top)
    of_times, of_text = weights[attrs.zero :].sum(), weights[: attrs.zero].max(initial=0.0)
    first = attrs.zero if attrs.timed and of_times > of_text else 0
    scores = scores[first:]
    at = int(keys[first:].argmax())
    return first + at, scores[at] - scores.max() - np.log(np.exp(scores - scores.max()).sum())


def reference(notes: Any, sums: Any, token: Any, logits: Any, levels: Any, **named: Any) -> Any:
    """The NumPy formula: changes `notes`, `sums` and `token`."""
    attrs = SpeechAttrs(**named)
    y = np.empty(len(logits), np.int32)
    for row, values in enumerate(logits):
        ended, steps, _, was, _, seed = notes[row].tolist()
        with np.errstate(all="ignore"):
            scores = np.where(allowed(levels, notes[row], attrs), values, values.dtype.type(NEVER))
            chosen, gained = choose(scores, steps, seed, float(sums[row, 1]), attrs)
        if ended:
            chosen, gained = attrs.end, 0.0
        is_time = chosen >= attrs.zero
        sums[row, 0] += gained
        notes[row, BEFORE] = 1 if not steps else was
        notes[row, LAST] = chosen if is_time else notes[row, LAST]
        notes[row, WAS], notes[row, STEPS] = is_time, steps + 1
        notes[row, ENDED] = bool(ended) or chosen == attrs.end
        token[row], y[row] = chosen, chosen
    return notes, sums, token, y


def host(form: Form[SpeechAttrs]) -> HostProgram:
    """On the CPU."""

    def call(arrays: list[Array], outs: list[Array]) -> None:
        outs[3][...] = reference(*arrays, **named(form.attrs))[3]

    return HostProgram("numpy:speech_token", "speech_token", call)
