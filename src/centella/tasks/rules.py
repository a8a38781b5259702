"""Decoding rules on the device: which tokens may come next in each row of a window's text.

One text a window takes `speech_token`, which has suppression and times; these are for beams, and
`NoRepeat` for both. A rule keeps what it knows of each row in States. `masked` takes the logits of
a step, and gives them with those of forbidden tokens at `NEVER`; `taken` is told the tokens that
were chosen. Both are captured with the step, so that other settings, in States too, need no new
capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
from msgspec import Struct

from centella.dtypes import f32, i32
from centella.ops.speech import NEVER
from centella.runtime.device import Device
from centella.tensors import functional as fn
from centella.tensors.creation import arange, full
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

    @property
    def latest_first(self) -> int:
        """The largest token that a first segment may start at."""
        return self.size if self.latest is None else self.first_time + self.latest


class Rule(Protocol):
    """What forbids tokens."""

    def begin(self) -> None:
        """Forget the last text; recorded with what begins a window."""
        ...

    def masked(self, logits: Tensor, first: Tensor) -> Tensor:
        """Logits f32 [batch, vocab], forbidden ones at NEVER.

        Args:
            first: bool [batch, 1], whether the row's first token comes now.
        """
        ...

    def taken(self, tokens: Tensor, first: Tensor) -> None:
        """Note tokens i32 [batch, 1] that were chosen; first: as for `masked`."""
        ...

    def moved(self, rows: Tensor) -> None:
        """Each row goes on from another: rows i32 [batch], of before."""
        ...


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

    def begin(self) -> None:
        """Nothing is kept of a text."""

    def masked(self, logits: Tensor, first: Tensor) -> Tensor:
        """As `Rule` says."""
        return fn.where((self.levels > 1) | ((self.levels > 0) & first), NEVER, logits)

    def taken(self, tokens: Tensor, first: Tensor) -> None:
        """Nothing is kept of a text."""

    def moved(self, rows: Tensor) -> None:
        """Nothing is kept of a text."""


class Timestamps:
    """Times begin the text, come in pairs but before the end, and never decrease.

    Where the times together are more likely than every other token, a time comes.
    """

    def __init__(self, vocabulary: Vocabulary, batch: int, device: Device) -> None:
        self._vocabulary = vocabulary
        names = ("last time", "last was a time", "the one before was")
        self._states = tuple(
            State(np.zeros((batch, 1), np.int32), device=device, name=name) for name in names
        )

    def begin(self) -> None:
        """As `Rule` says."""
        before_first = self._vocabulary.first_time - 1
        for state, value in zip(self._states, (before_first, 0, 0), strict=True):
            state.assign(full((), value, i32, state.device))

    def masked(self, logits: Tensor, first: Tensor) -> Tensor:
        """As `Rule` says."""
        v, zero = self._vocabulary, self._vocabulary.first_time
        last, was, before = (state.value for state in self._states)
        was_time, paired = was > 0, before > 0
        opened = was_time & ~paired  # a segment's end or the next one's start has to follow
        text_from = fn.where(first, zero, opened.astype(i32) * v.end)
        time_from = fn.where(opened, last, last + 1)
        time_to = fn.where(first, v.latest_first, (1 - (was_time & paired).astype(i32)) * v.size)
        ids = arange(v.size, device=logits.device)
        timed = (ids >= time_from) & (ids <= time_to)
        text = (ids >= text_from) & fn.ne(ids, v.no_timestamps)
        is_time = ids >= zero
        scores = fn.where((is_time & timed) | (~is_time & text), logits, NEVER)
        weights = fn.exp(scores - fn.max(scores, -1, keepdims=True))
        of_times = fn.sum(weights[:, zero:], -1, keepdims=True)
        likelier = of_times > fn.max(weights[:, :zero], -1, keepdims=True)
        return fn.where(likelier & ~is_time, NEVER, scores)

    def taken(self, tokens: Tensor, first: Tensor) -> None:
        """As `Rule` says."""
        last, was, before = self._states
        is_time = tokens >= self._vocabulary.first_time
        paired = fn.where(first, 1, was.value)
        before.assign(paired)
        last.assign(fn.where(is_time, tokens, last.value))
        was.assign(is_time.astype(i32))

    def moved(self, rows: Tensor) -> None:
        """As `Rule` says."""
        for state in self._states:
            state.assign(fn.gather(state.value, rows))


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
        """As `Rule` says."""
        self._text.assign(full((), -1, i32, self._text.device))
        self._count.assign(full((), 0, i32, self._text.device))

    def masked(self, logits: Tensor, first: Tensor) -> Tensor:
        """As `Rule` says."""
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

    def taken(self, tokens: Tensor, first: Tensor) -> None:
        """As `Rule` says."""
        places = arange(self._text.shape[1], device=self._text.device)
        self._text.assign(fn.where(fn.eq(places, self._count.value), tokens, self._text.value))
        self._count.assign(self._count.value + 1)

    def moved(self, rows: Tensor) -> None:
        """As `Rule` says."""
        self._text.assign(fn.gather(self._text.value, rows))
