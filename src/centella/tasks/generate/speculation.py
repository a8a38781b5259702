"""Speculation: tokens are guessed, and one pass of the model verifies several at once.

A step reads all weights for one token; a pass over eight tokens costs little more. The pass gives,
for each guess, the token that the model itself chooses there. Guesses count up to the first that
differs, and that token comes with them: so the tokens are those of single steps, whoever guessed
(Leviathan et al. 2023). What a token is drawn with depends on its number alone, so that drawn
tokens are the same, too. Both hold up to the rounding of logits: a pass sums in another order.

`Lookup` guesses what followed the same tokens before (prompt lookup, Saxena 2023), `Draft` asks a
smaller model. Where guesses fail, single steps go on, and guessing is tried again later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from centella.tasks.generate.pieces import Tally
from centella.tasks.generate.session import Array, Ids, Session
from centella.tensors.functional import concat, maximum, minimum
from centella.tensors.jit import Jitted, method_of
from centella.tensors.tensor import Tensor

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel
    from centella.runtime.pending import Pending

LOOKUP = "lookup"  # as users ask for it
GUESSES = 7  # tokens; with the last one a pass has eight
LONGEST, SHORTEST = 4, 2  # of the last tokens, that stood in the sequence before
PAUSE, LONGEST_PAUSE = 4, 64  # single steps after a pass without a right guess; doubled each time


class Pace:
    """When to guess: after a pass without a right guess single steps follow, more each time."""

    def __init__(self) -> None:
        self._pause = self._wait = 0

    @property
    def ready(self) -> bool:
        """Whether enough single steps have been."""
        return self._wait <= 0

    def stepped(self) -> None:
        """A single step was."""
        self._wait -= 1

    def verified(self, right: int) -> None:
        """A pass was, with so many right guesses."""
        self._pause = 0 if right else min(LONGEST_PAUSE, max(PAUSE, 2 * self._pause))
        self._wait = self._pause


class Guesser(Protocol):
    """Who guesses how a sequence goes on."""

    def ready(self, row: Ids) -> bool:
        """Whether there is a guess for this sequence; quick."""
        ...

    def guess(self, row: Ids) -> Array | Tensor:
        """`GUESSES` tokens [1, `GUESSES`] i32 that may follow."""
        ...

    def verified(self, right: Ids) -> None:
        """Learn which of the last guesses were right: the first ones, up to a wrong one."""
        ...


class Lookup:
    """Guesses that a sequence goes on as it did where the same tokens stood before."""

    def __init__(self) -> None:
        self._row: Ids = []
        self._behind: dict[tuple[int, ...], int] = {}  # tokens, and the place behind the last such

    def ready(self, row: Ids) -> bool:
        """Whether the last tokens stood in the row before."""
        return self._follower(row) is not None

    def guess(self, row: Ids) -> Array:
        """What followed the longest of the last tokens that stood in the row before."""
        start, follow = self._follower(row), list[int]()
        if start is not None:
            follow = row[start : start + GUESSES]  # where it ends with the row, it repeats
        return np.resize(np.array(follow or [0], np.int32), (1, GUESSES))

    def verified(self, right: Ids) -> None:
        """Nothing is kept of guesses."""

    def _follower(self, row: Ids) -> int | None:
        known = len(self._row)
        if row[:known] != self._row:
            self._row, self._behind, known = [], {}, 0
        for end in range(known, len(row)):  # those at the end itself are looked up, not noted
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self._behind[tuple(row[end - n : end])] = end
        self._row = list(row)
        longest = min(LONGEST, len(row) - 1)
        places = (self._behind.get(tuple(row[-n:])) for n in range(longest, SHORTEST - 1, -1))
        return next((start for start in places if start is not None), None)


class Draft:
    """Guesses what a smaller model would write, one likeliest token after the other.

    Args:
        model: the smaller one, on the device of the other, with about the same tokens.
        capacity: tokens that the sequence may have.
        vocab: tokens of the other model.
    """

    def __init__(self, model: LlamaModel, capacity: int, vocab: int) -> None:
        self.model: LlamaModel = model
        self._room: int = min(capacity, model.config.max_position_embeddings)
        self._session: Session = Session(model, 1, self._room)
        self._vocab: int = vocab
        self._write: Jitted[..., Tensor] = Jitted(method_of(self._written), model.device)

    def ready(self, row: Ids) -> bool:
        """Whether the smaller model has room for the row, and knows its tokens."""
        known = self._session.model.config.vocab_size
        return len(row) + GUESSES < self._room and max(row) < known

    def guess(self, row: Ids) -> Tensor:
        """The tokens, which stay on the device."""
        self._session.start([row])
        return self._write()

    def verified(self, right: Ids) -> None:
        """Keep what was read of the right guesses, so that no token is read twice."""
        self._session.rows[0] += right

    def _written(self) -> Tensor:
        """The tokens; one step more reads the last of them, which may be right."""
        steps = [self._session.likeliest() for _ in range(GUESSES + 1)]
        tokens = concat([step.reshape(1, 1) for step in steps[:GUESSES]], 1)
        return maximum(minimum(tokens, self._vocab - 1), 0)


def run(session: Session, guesser: Guesser, steps: int, tally: Tally) -> Iterator[Array]:
    """As `Session.run` of one sequence, and the same tokens: each [1] i32.

    `Session.add` has to be called with each before the next is asked for.

    Args:
        session: started, without penalties and log-probabilities.
        guesser: who guesses; steps: tokens wanted; tally: counts the guesses.
    """
    pace, done = Pace(), 0
    step: Pending[Array] | None = None
    while done < steps:
        (row,) = session.rows
        room = len(row) + GUESSES < min(session.capacity, session.reach + 1)
        ready = pace.ready and room and guesser.ready(row)
        if ready and step is None:
            tokens = session.verify(guesser.guess(row))
            guesser.verified(tokens[:-1].tolist())
            tally.guessed += GUESSES
            tally.accepted += len(tokens) - 1
            pace.verified(len(tokens) - 1)
            for token in tokens[: steps - done]:
                yield token[None]
            done += len(tokens)
            continue
        if step is None:
            step = session.step()
        # What is guessed has to follow the last token: no step may be under way then.
        following = session.step() if not ready and done + 1 < steps else None
        yield step.result()
        pace.stepped()
        step, done = following, done + 1
