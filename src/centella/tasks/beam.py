"""Beam search: the likeliest texts of each window, followed side by side.

The beams of a window are so many query rows over one memory: its sound's keys and values are read
once for all. Their own keys and values lie behind each other in one cache, a slot a beam and step;
a table says which slots each beam sees. When beams go on from others, rows of the table move, and
no key is copied. The device keeps what runs; the host notes which texts have ended, a step behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from centella.dtypes import i32
from centella.errors import ContractError
from centella.op.op import get
from centella.ops.speech_host import ENDED, LAST, NEVER, NOTES
from centella.runtime.pending import Pending
from centella.tasks.rules import NoRepeat, noted
from centella.tasks.speech_session import SpeechSession
from centella.tensors import functional as fn
from centella.tensors.creation import arange
from centella.tensors.jit import Jitted
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply_all

Array = np.ndarray[Any, Any]
Ids = list[int]
OUT = -1.0e9  # added to the score of what may not be taken


class Beams:
    """Beam search in the windows that a session has heard.

    Args:
        session: with a cache for `session.beam` beams a window.
    """

    def __init__(self, session: SpeechSession) -> None:
        self._session = session
        batch, beam, device = session.batch, session.beam, session.model.device
        v, targets = session.vocabulary, session.model.config.max_target_positions
        self._no_repeat = NoRepeat(v, batch * beam, targets, device)

        def state(name: str, shape: tuple[int, ...], dtype: type = np.int32) -> State:
            return State(np.zeros(shape, dtype), device=device, name=name)

        self._tokens = state("tokens of beams", (batch, beam))
        self._scores = state("scores of beams", (batch * beam, 1), np.float32)
        self._seen = state("slots that beams see", (batch * beam, session.cache.capacity))
        self._at = state("position of the beams", (1, 1))
        self._notes = state("notes of beams", (batch * beam, len(NOTES)))
        self._captured: dict[tuple[bool, bool], Jitted[..., tuple[Tensor, Tensor]]] = {}

    # -- what is captured -------------------------------------------------------------------------

    def _stepped(self, timed: bool, no_repeat: bool) -> tuple[Tensor, Tensor]:
        """Continue all beams; [batch, 2 beam]: the best scores, beam * vocab + token of each."""
        session = self._session
        batch, beam, vocab = session.batch, session.beam, session.vocabulary.size
        each = arange(beam, device=session.model.device)
        slots = session.cache.begin(beam).reshape(batch, 1, 1) + each.reshape(1, beam, 1)
        every = arange(session.cache.capacity, device=session.model.device)
        seen = (self._seen.value.reshape(batch, beam, -1) > 0) | fn.eq(every, slots)
        at = fn.broadcast_to(self._at.value, (batch, beam))
        ended = self._notes.value.reshape(batch, beam, -1)[:, 0, ENDED]
        x = session.model.decoder(
            self._tokens.value, session.memory(), session.cache, at, seen[:, None],
            session.heard_by(ended),
        )  # fmt: skip
        scores = fn.log_softmax(session.model.head(x).reshape(batch * beam, vocab), -1)
        if no_repeat:
            scores = self._no_repeat.masked(scores)
        rules = session.vocabulary.rules(timed)
        operands = (scores, session.suppress.levels, self._notes.value)
        scores = apply_all(get("speech_scores"), operands, rules)[0]
        best, which = best_of(scores + self._scores.value, batch, 2 * beam)
        self._go_on(best, which, seen, no_repeat)
        return best, which

    def _go_on(self, best: Tensor, which: Tensor, seen: Tensor, no_repeat: bool) -> None:
        """The best that have not ended are the beams of the next step."""
        session = self._session
        batch, beam, vocab = session.batch, session.beam, session.vocabulary.size
        ended = fn.eq(which % vocab, session.vocabulary.end)
        running, picks = fn.topk(fn.where(ended, best + OUT, best), beam)
        candidates = arange(2 * beam, device=best.device)
        chosen = fn.eq(candidates, picks.reshape(batch, beam, 1))
        which = fn.sum(fn.where(chosen, which.reshape(batch, 1, -1), 0), -1)
        tokens = which % vocab
        window = arange(batch, device=best.device).reshape(batch, 1) * beam
        parents = (which // vocab + window).reshape(batch * beam)
        self._seen.assign(fn.gather(seen.astype(i32).reshape(batch * beam, -1), parents))
        chosen, notes = tokens.reshape(batch * beam, 1), fn.gather(self._notes.value, parents)
        self._notes.assign(noted(notes, chosen, session.vocabulary.first_time))
        if no_repeat:
            self._no_repeat.moved(parents)
            self._no_repeat.taken(chosen)
        self._tokens.assign(tokens)
        self._scores.assign(running.reshape(batch * beam, 1))
        self._at.assign(self._at.value + 1)

    # -- what the host calls ----------------------------------------------------------------------

    def write(
        self, prompt: Ids, begin: int, steps: int, *, timed: bool, no_repeat: int,
        active: Sequence[bool], meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, tuple[Ids, float]]:  # fmt: skip
        """The likeliest text of each active window, without the end, and its mean log-probability.

        Args:
            prompt: of every window; begin: where the transcript begins in it.
            steps: most tokens; timed, no_repeat: as for `SpeechSession.start`.
            meanwhile: called before a wait, as by `SpeechSession.run`.

        Raises:
            ContractError: scores were NaN or infinite; names the window.
        """
        self._start(prompt, begin, no_repeat, active)
        v, beam = self._session.vocabulary, self._session.beam
        texts = {row: _Texts(beam, v.end, v.size) for row, on in enumerate(active) if on}
        under_way: deque[Pending[Any]] = deque()
        step = self._step(timed, no_repeat > 0)
        for count in range(1, steps + 1):
            while len(under_way) < min(2, steps - count + 1):
                under_way.append(step.fetch())
            if meanwhile is not None and len(under_way) > 1 and not under_way[0].done():
                meanwhile()
            best, which = under_way.popleft().result()
            for row, text in texts.items():
                stuck = not (text.ended or best[row, 0] > NEVER)  # no token that may come
                if stuck or np.isnan(best[row]).any():
                    raise ContractError(
                        f"transcribe: window {row}, token {count - 1}: the scores of what "
                        f"may come are NaN or infinite; dtype='bf16' or 'f32' has a wider range"
                    )
                text.add(best[row], which[row], count == steps)
            if not any(text.improving for text in texts.values()):
                break
        return {row: text.best for row, text in texts.items()}

    def _start(self, prompt: Ids, begin: int, no_repeat: int, active: Sequence[bool]) -> None:
        session, before = self._session, len(prompt) - 1
        session.read([prompt] * session.batch, begin)
        session.cache.truncate(before)  # the first step feeds the last one, to every beam
        notes = np.zeros(self._notes.shape, np.int32)
        notes[:, ENDED] = np.repeat([not on for on in active], session.beam)
        notes[:, LAST] = session.vocabulary.first_time - 1
        self._notes.assign(notes)
        self._no_repeat.begin()
        if no_repeat:
            self._no_repeat.choose(no_repeat)
        seen = np.zeros(self._seen.shape, np.int32)
        seen[:, :before] = 1
        scores = np.full((session.batch, session.beam), OUT, np.float32)
        scores[:, 0] = 0.0  # all beams are the same yet
        self._seen.assign(seen)
        self._scores.assign(scores.reshape(-1, 1))
        self._tokens.assign(np.full(self._tokens.shape, prompt[-1], np.int32))
        self._at.assign(np.array([[before]], np.int32))

    def _step(self, timed: bool, no_repeat: bool) -> Jitted[..., tuple[Tensor, Tensor]]:
        how = timed, no_repeat
        if how not in self._captured:

            def step() -> tuple[Tensor, Tensor]:
                return self._stepped(*how)

            self._captured[how] = Jitted(step, self._session.model.device)
        return self._captured[how]


class _Texts:
    """The texts of a window: those that run, and the best that have ended.

    A text's score is the mean of its log-probabilities, the end's included. It stops when no text
    that runs could better the worst that is kept, if it ended now.
    """

    def __init__(self, beam: int, end: int, vocab: int) -> None:
        self._beam, self._end, self._vocab = beam, end, vocab
        self._running: list[Ids] = [[] for _ in range(beam)]
        self._ended: list[tuple[float, Ids]] = []
        self._tokens = 0
        self.improving = True

    def add(self, best: Array, which: Array, last: bool) -> None:
        """Candidates of a step, the best first; with the last one all texts end."""
        if not self.improving:
            return
        self._tokens += 1
        runs: list[tuple[float, Ids]] = []
        for rank, (score, code) in enumerate(zip(best.tolist(), which.tolist(), strict=True)):
            parent, token = divmod(code, self._vocab)
            text = [*self._running[parent], token]
            if token != self._end:
                runs.append((score, text))
            if (last or token == self._end) and rank < self._beam:
                self._ended.append((score / self._tokens, text))
        self._ended = sorted(self._ended, key=lambda kept: -kept[0])[: self._beam]
        self._running = [text for _, text in runs[: self._beam]]
        full = len(self._ended) == self._beam
        self.improving = not last and not (full and runs[0][0] / self._tokens <= self._ended[-1][0])

    @property
    def ended(self) -> bool:
        """Whether a text has."""
        return bool(self._ended)

    @property
    def best(self) -> tuple[Ids, float]:
        """The best text that has ended, without its end, and its score."""
        score, text = self._ended[0]
        return [token for token in text if token != self._end], score


def best_of(scores: Tensor, batch: int, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each window: f32, i32 [batch, count]; scores f32 [batch * beam, vocab].

    Indices are beam * vocab + token.
    """
    return fn.topk(scores.reshape(batch, -1), count)
