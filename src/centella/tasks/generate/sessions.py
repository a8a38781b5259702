"""The sessions that a Generator keeps: which of them goes on with a prompt, and its steps."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from centella.dtypes import DType
from centella.host.forks import lock_of
from centella.host.idle import Idle
from centella.nn.tree import Tree
from centella.op.op import loaded
from centella.tasks.generate import speculation
from centella.tasks.generate.pieces import Tally, Text
from centella.tasks.generate.prompts import Asked
from centella.tasks.generate.session import LEAST, Array, Ids, Session

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel
    from centella.tasks.generate.beam import Search
    from centella.tasks.generate.beam_session import BeamSession

ROOM = 256  # capacities are multiples of it
IDLE = 2  # sessions that are kept
LOST = 32  # tokens that a session forgets for another prompt where a new one could be made


class Sessions:
    """Sessions of a model; one that is taken is its taker's alone until it is given back.

    Args:
        model: the decoder. Where its weights are others, nothing that was read holds.

    Attributes:
        idle: those that wait, and those that are taken.
    """

    def __init__(self, model: LlamaModel) -> None:
        self.idle: Idle[Session] = Idle(IDLE)
        self._beams: BeamSession | None = None
        self._model = model
        self._context: int = model.config.max_position_embeddings
        self._tree = Tree(model)
        self._drafts: WeakKeyDictionary[Session, speculation.Draft] = WeakKeyDictionary()
        self._lock = lock_of(self)

    def take(self, rows: Sequence[Ids], tokens: int, cache: DType | None = None) -> Session:
        """The idle session of that size that has read most of the rows, or a new one.

        Args:
            cache: storage of its keys and values; None: that of activations.
        """
        model, capacity = self._model, self._capacity(tokens)
        with self._lock:
            self._drop_others()
            fits = [
                s for s in reversed(self.idle.waiting)
                if s.batch == len(rows) and s.capacity >= capacity and s.cache is cache
            ]  # fmt: skip
            session = max(fits, key=lambda s: s.shared(rows), default=None)
            full = len(self.idle.waiting) >= IDLE
            if session is not None and (full or session.lost(rows) <= LOST):
                return self.idle.use(session)
        session = Session(model, len(rows), capacity, cache)
        with self._lock:
            return self.idle.use(session)

    def keep_beams(self, session: BeamSession) -> None:
        """Give a session of beams back; one is kept."""
        with self._lock:
            self._beams = session

    def take_beams(
        self, prompts: int, beam: int, longest: int, steps: int, cache: DType | None = None
    ) -> BeamSession:
        """The idle session for so many prompts and beams, or a new one.

        Args:
            longest: tokens of a prompt, at most; steps: tokens of a text, at most.
            cache: as for `take`.
        """
        capacity = self._capacity(longest + steps)
        with self._lock:
            self._drop_others()
            kept, self._beams = self._beams, None
        if (
            kept is not None and (kept.prompts, kept.beam) == (prompts, beam)
            and kept.steps >= steps and kept.cache is cache and kept.capacity >= capacity
        ):  # fmt: skip
            return kept
        kept = None  # its memory is free before the other's is taken
        kind: type[BeamSession] = loaded("centella.tasks.generate.beam_session:BeamSession")
        return kind(self._model, prompts, beam, capacity, steps, cache)

    def _drop_others(self) -> None:
        """What was read with other weights holds no more."""
        if self._tree.changed:
            self.idle.clear()
            self._beams, self._tree = None, Tree(self._model)

    def _capacity(self, tokens: int) -> int:
        """Tokens that a session for so many has room for."""
        return min(self._context, -(-(tokens + LEAST) // ROOM) * ROOM)

    def guesser(
        self, draft: LlamaModel | str | None, session: Session
    ) -> speculation.Guesser | None:
        """Who guesses for a session; a smaller model keeps what it has read of it."""
        if draft is None or isinstance(draft, str):
            return speculation.Lookup() if draft else None
        kept = self._drafts.get(session)
        if kept is None or kept.model is not draft:
            vocab = self._model.config.vocab_size
            kept = self._drafts[session] = speculation.Draft(draft, session.capacity, vocab)
        return kept

    # -- what is continued ------------------------------------------------------------------------

    def alike(self, rows: Sequence[Ids], tokens: int) -> list[list[int]]:
        """Numbers of the rows, by those that are continued together.

        They have the same rotary frequencies, and change them at the same token.

        Args:
            tokens: most of a continuation.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for number, row in enumerate(rows):
            reach, length = self._model.config.reach(len(row)), len(row)
            last = min(length + tokens, self._context) - 1
            groups.setdefault((reach, length if last > reach else 0), []).append(number)
        return list(groups.values())

    def steps(
        self, rows: list[Ids], n: int, asked: Asked, ending: threading.Event, tally: Tally,
        numbers: Sequence[int],
    ) -> Generator[Array]:  # fmt: skip
        """What step after step sends, as long as it is asked for and there is room.

        Where rotary frequencies change with the length, the text so far is read again.

        Args:
            rows: prompts that are `alike`; n: continuations of each.
            ending: reading stops where it is set.
            numbers: of the continuations, which are added to the seed.
        """
        longest = max(map(len, rows))
        steps = min(asked.stops.tokens, self._context - longest)
        each = [row for row in rows for _ in range(n)]
        session = self.take(each, longest + steps, asked.cache)
        try:
            session.choose_by(asked.sampling, each, asked.logprobs, numbers)
            if not session.start_several(rows, n, ending):
                steps = 0
            alone = len(each) == 1 and asked.logprobs is None and not asked.sampling.penalised
            guesser = self.guesser(asked.draft, session) if alone else None
            while steps:
                some = min(steps, session.reach + 1 - max(map(len, session.rows)))
                told = session.run(some)
                if guesser is not None:
                    told = speculation.run(session, guesser, some, tally)
                for step in told:
                    session.add(step)
                    yield step
                steps -= some
                if steps and not session.start(session.rows, ending=ending):
                    break
        except GeneratorExit:  # the caller has what it wants
            self.idle.give(session)
            raise
        except BaseException:
            self.idle.drop(session)
            raise
        self.idle.give(session)

    def search(
        self, rows: list[Ids], asked: Asked, ending: threading.Event, empty: Text
    ) -> list[Search]:
        """The likeliest texts of each prompt, by beams; as `BeamSession.search`.

        Args:
            rows: prompts that are `alike`.
        """
        assert asked.beams is not None, "a search"
        longest = max(map(len, rows))
        steps = min(asked.stops.tokens, self._context - longest)
        session = self.take_beams(len(rows), asked.beams.beam, longest, steps, asked.cache)
        searches = session.search(rows, asked, steps, ending, empty)
        self.keep_beams(session)
        return searches
