"""The sessions that a Generator keeps: which of them goes on with a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from centella.dtypes import DType
from centella.host.forks import lock_of
from centella.nn.tree import Tree
from centella.tasks import speculation
from centella.tasks.beam_session import BeamSession
from centella.tasks.session import LEAST, Ids, Session

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel

ROOM = 256  # capacities are multiples of it
IDLE = 2  # sessions that are kept
LOST = 32  # tokens that a session forgets for another prompt where a new one could be made


class Sessions:
    """Sessions of a model; one that is taken is its taker's alone until it is given back.

    Args:
        model: the decoder. Where its weights are others, nothing that was read holds.

    Attributes:
        idle: those that wait, the last one first.
    """

    def __init__(self, model: LlamaModel) -> None:
        self.idle: list[Session] = []
        self._beams: BeamSession | None = None
        self._model = model
        self._tree = Tree(model)
        self._drafts: WeakKeyDictionary[Session, speculation.Draft] = WeakKeyDictionary()
        self._lock = lock_of(self)

    def keep(self, session: Session) -> None:
        """Give a session back."""
        with self._lock:
            self.idle = [session, *self.idle][:IDLE]

    def take(self, rows: Sequence[Ids], tokens: int, cache: DType | None = None) -> Session:
        """The idle session of that size that has read most of the rows, or a new one.

        Args:
            cache: storage of its keys and values; None: that of activations.
        """
        model, capacity = self._model, self._capacity(tokens)
        with self._lock:
            self._drop_others()
            fits = [
                s for s in reversed(self.idle)
                if s.batch == len(rows) and s.cache is cache and self._serves(s.capacity, capacity)
            ]  # fmt: skip
            session = max(fits, key=lambda s: s.shared(rows), default=None)
            full = len(self.idle) >= IDLE
            if session is not None and (full or session.lost(rows) <= LOST):
                self.idle.remove(session)
                return session
        return Session(model, len(rows), capacity, cache)

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
            and kept.steps >= steps and kept.cache is cache
            and self._serves(kept.capacity, capacity)
        ):  # fmt: skip
            return kept
        kept = None  # its memory is free before the other's is taken
        return BeamSession(self._model, prompts, beam, capacity, steps, cache)

    def _drop_others(self) -> None:
        """What was read with other weights holds no more."""
        if self._tree.changed:
            self.idle, self._beams, self._tree = [], None, Tree(self._model)

    def _capacity(self, tokens: int) -> int:
        """Tokens that a session for so many has room for."""
        regime = self._regime(tokens)
        most = self._model.config.max_position_embeddings
        capacity = min(most, -(-(tokens + LEAST) // ROOM) * ROOM)
        while self._regime(capacity) != regime:
            capacity -= 1
        return capacity

    def _serves(self, capacity: int, wanted: int) -> bool:
        """Whether a session of one capacity does for another: rotary frequencies are the same."""
        return capacity >= wanted and self._regime(capacity) == self._regime(wanted)

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

    def _regime(self, tokens: int) -> list[int]:
        """What rotary frequencies a text of so many tokens has."""
        return [rope.regime(tokens) for rope in self._model.config.ropes]
