"""What the decoding rules of a window's text are told: special tokens, suppression, n-grams.

The rules themselves are operations (`ops/speech.py`, `ops/speech_beams.py`), which read levels of
tokens and notes of rows. `NoRepeat` is a mask over the logits before them. What they know lies in
States and is captured with the step, so that other settings need no new capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from centella.dtypes import f32, i32
from centella.ops.speech_host import ENDED, NEVER, NOTES
from centella.runtime.device import Device
from centella.tensors import functional as fn
from centella.tensors.creation import arange, asarray, full
from centella.tensors.state import State
from centella.tensors.tensor import Tensor

LONGEST = 8  # tokens of an n-gram that may be blocked


class Vocabulary(Struct, frozen=True):
    """The tokens with a meaning of their own.

    Attributes:
        size: tokens in all; end: of a text; start: of a transcript.
        no_timestamps: says that no times follow; the one after it is the time 0.
        previous: what was said before follows; no_speech: nobody speaks.
        languages, tasks: by name ("de", "translate"); empty for models of English alone.
        suppressed, at_begin: tokens that never come, and those that do not come first.
        latest: most 20 ms steps before the first segment's start; None: any.
    """

    size: int
    end: int
    start: int
    no_timestamps: int
    previous: int
    no_speech: int
    languages: Mapping[str, int] = {}
    tasks: Mapping[str, int] = {}
    suppressed: tuple[int, ...] = ()
    at_begin: tuple[int, ...] = ()
    latest: int | None = None

    @property
    def first_time(self) -> int:
        """The token of the time 0; those after it are 20 ms apart."""
        return self.no_timestamps + 1

    def rules(self, timed: bool, random: bool = False) -> dict[str, int | bool]:
        """The attributes of `speech_token`, `speech_beams` and `speech_scores`."""
        latest = self.size if self.latest is None else self.first_time + self.latest
        return {
            "end": self.end, "zero": self.first_time, "no_timestamps": self.no_timestamps,
            "latest": latest, "timed": timed, "random": random,
        }  # fmt: skip


class Suppress:
    """Tokens that never come, and tokens that do not come first."""

    def __init__(self, vocabulary: Vocabulary, device: Device) -> None:
        self._levels = State(np.zeros(vocabulary.size, np.int32), device=device, name="suppressed")
        self.choose(vocabulary.suppressed, vocabulary.at_begin)

    @property
    def levels(self) -> Tensor:
        """i32 [vocab]: 1 for a token that does not come first, 2 for one that never comes."""
        return self._levels.value

    def choose(self, always: Iterable[int], at_begin: Iterable[int]) -> None:
        """Other tokens; ids outside the vocabulary are left out."""
        levels = np.zeros(self._levels.shape, np.int32)
        for level, ids in ((1, at_begin), (2, always)):
            levels[[i for i in ids if 0 <= i < len(levels)]] = level
        self._levels.assign(levels)


def end(notes: State, rows: Sequence[int]) -> None:
    """Note that the texts of some rows have ended, whatever their tokens are."""
    ended = np.zeros((notes.shape[0], 1), np.int32)
    ended[rows] = 1
    over = asarray(ended * (np.arange(len(NOTES)) == ENDED) > 0, device=notes.device)
    notes.assign(fn.where(over, 1, notes.value))


class NoRepeat:
    """No n tokens come twice in a row's text; n is a State, 2 to `LONGEST`."""

    def __init__(self, vocabulary: Vocabulary, batch: int, tokens: int, device: Device) -> None:
        self._size, self._batch = vocabulary.size, batch
        self._n = State(np.array([LONGEST], np.int32), device=device, name="n")
        self._text = State(np.full((batch, tokens), -1, np.int32), device=device, name="text")
        self._count = State(np.zeros((batch, 1), np.int32), device=device, name="tokens")

    def choose(self, n: int) -> None:
        """Another length."""
        self._n.assign(np.array([n], np.int32))

    def begin(self) -> None:
        """Forget the last text; recorded with what begins a window."""
        self._text.assign(full((), -1, i32, self._text.device))
        self._count.assign(full((), 0, i32, self._text.device))

    def masked(self, logits: Tensor) -> Tensor:
        """Logits f32 [batch, vocab], those of tokens that may not come at NEVER."""
        text, count, n = self._text.value, self._count.value, self._n.value
        places = arange(text.shape[1], device=text.device)
        before, repeated = text, places < count
        for back in range(1, LONGEST):  # equal to the token so far back, at each place before
            none = full((self._batch, 1), -2, i32, text.device)
            before = fn.concat([none, before[:, :-1]], 1)
            own = fn.max(fn.where(fn.eq(places, count - back), text, -3), -1, keepdims=True)
            repeated = repeated & (fn.eq(before, own) | (n <= back))
        rows = []
        outside = self._size
        followers = fn.where(repeated & (places >= n - 1), text, outside)
        for row in range(self._batch):
            clear = full((self._size, 1), 0.0, f32, text.device)
            ones = full((text.shape[1], 1), 1.0, f32, text.device)
            rows.append(fn.scatter(clear, followers[row], ones)[:, 0])
        return fn.where(fn.stack(rows) > 0.0, NEVER, logits)

    def taken(self, tokens: Tensor) -> None:
        """Note tokens i32 [batch, 1] that were chosen."""
        places = arange(self._text.shape[1], device=self._text.device)
        self._text.assign(fn.where(fn.eq(places, self._count.value), tokens, self._text.value))
        self._count.assign(self._count.value + 1)

    def moved(self, rows: Tensor) -> None:
        """Each row goes on from another: rows i32 [batch], of before."""
        self._text.assign(fn.gather(self._text.value, rows))
