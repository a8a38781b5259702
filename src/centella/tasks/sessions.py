"""The sessions that a Generator keeps: which of them goes on with a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from centella.dtypes import DType
from centella.host.forks import lock_of
from centella.nn.tree import Tree
from centella.tasks import speculation
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
        model, most = self._model, self._model.config.max_position_embeddings
        capacity = min(most, -(-(tokens + LEAST) // ROOM) * ROOM)
        with self._lock:
            if self._tree.changed:
                self.idle, self._tree = [], Tree(model)
            fits = [
                s for s in reversed(self.idle)
                if s.batch == len(rows) and s.capacity >= capacity and s.cache is cache
            ]  # fmt: skip
            session = max(fits, key=lambda s: s.shared(rows), default=None)
            full = len(self.idle) >= IDLE
            if session is not None and (full or session.lost(rows) <= LOST):
                self.idle.remove(session)
                return session
        return Session(model, len(rows), capacity, cache)

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

    def alike(self, rows: Sequence[Ids], tokens: int) -> list[list[int]]:
        """Numbers of the rows, by those that are continued together.

        They have the same rotary frequencies, and change them at the same token.

        Args:
            tokens: most of a continuation.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for number, row in enumerate(rows):
            reach, length = self._model.config.reach(len(row)), len(row)
            last = min(length + tokens - 1, self._model.config.max_position_embeddings - 1)
            groups.setdefault((reach, length if last > reach else 0), []).append(number)
        return list(groups.values())
