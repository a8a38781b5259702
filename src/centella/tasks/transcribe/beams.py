"""Beam search in windows of sound: see `beam`.

The beams of a window are so many query rows over one memory: its sound's keys and values are read
once for all. Their own keys and values lie behind each other in one cache, a slot a beam and step;
a table says which slots each beam sees. When beams go on from others, rows of the table move, and
no key is copied. The end of a step (`speech_move`) leaves all that the next one begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from centella.errors import ContractError
from centella.op.op import get
from centella.ops.speech_host import ENDED, LAST, NEVER, NOTES
from centella.tasks.generate.beam import BeamStates, Search
from centella.tasks.generate.beam_settings import BeamSettings
from centella.tasks.generate.run_ahead import run_ahead
from centella.tasks.transcribe.rules import NoRepeat, end
from centella.tasks.transcribe.session import SpeechSession
from centella.tensors import functional as fn
from centella.tensors.jit import Jitted, method_of
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply_all

Array = np.ndarray[Any, Any]
Ids = list[int]


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

        def state(name: str, shape: tuple[int, ...], kind: type = np.int32) -> State:
            return State(np.zeros(shape, kind), device=device, name=name)

        self._beams = BeamStates(batch, beam, v.size, device)
        self._seen = state("slots that beams see", (batch * beam, session.cache.capacity), bool)
        self._at = state("position, first slot", (batch, 2))
        self._notes = state("notes of beams", (batch * beam, len(NOTES)))
        self._captured: dict[tuple[bool, bool], Jitted[..., tuple[Tensor, Tensor]]] = {}

    # -- what is captured -------------------------------------------------------------------------

    def _stepped(self, timed: bool, no_repeat: bool) -> tuple[Tensor, Tensor]:
        """Continue all beams; [batch, 2 beam]: the best scores, beam * vocab + token of each."""
        session = self._session
        batch, beam = session.batch, session.beam
        session.cache.begin(beam)
        seen = self._seen.value.reshape(batch, 1, beam, -1)
        at = fn.broadcast_to(self._at.value[:, :1], (batch, beam))
        tokens = self._beams.tokens.value.reshape(batch, beam)
        ended = self._notes.value.reshape(batch, beam, -1)[:, 0, ENDED]
        x = session.model.decoder(
            tokens, session.memory(), session.cache, at, seen, session.heard_by(ended)
        )
        best, which = self._best(session.model.head(x), timed, no_repeat)
        self._move(best, which, no_repeat)
        return best, which

    def _best(self, logits: Tensor, timed: bool, no_repeat: bool) -> tuple[Tensor, Tensor]:
        """The best texts by logits [batch, beam, vocab]: scores, codes, each [batch, 2 beam]."""
        rules, levels = self._session.vocabulary.rules(timed), self._session.suppress.levels
        so_far, (batch, beam, vocab) = self._beams.scores.value, logits.shape
        if not no_repeat:
            known = (self._notes.value.reshape(batch, beam, -1), so_far.reshape(batch, beam))
            best, which = apply_all(get("speech_beams"), (logits, levels, *known), rules)
            return best, which
        own = self._no_repeat.masked(fn.log_softmax(logits.reshape(batch * beam, vocab), -1))
        allowed = apply_all(get("speech_scores"), (own, levels, self._notes.value), rules)[0]
        return fn.topk((allowed + so_far.reshape(-1, 1)).reshape(batch, -1), 2 * beam)

    def _move(self, best: Tensor, which: Tensor, no_repeat: bool) -> None:
        """Beams go on with the best of the candidates, [batch, 2 beam], that have not ended."""
        v, beams = self._session.vocabulary, self._beams
        states = (self._seen, self._notes, self._at, beams.tokens, beams.parents, beams.scores)
        how = {"beam": self._session.beam, "vocab": v.size, "end": v.end, "zero": v.first_time}
        apply_all(get("speech_move"), (*(s.value for s in states), best, which), how)
        if no_repeat:
            self._no_repeat.moved(beams.parents.value)
            self._no_repeat.taken(beams.tokens.value.reshape(-1, 1))

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
        v, settings = self._session.vocabulary, BeamSettings(self._session.beam)
        searches = {
            row: Search(settings, v.size, (v.end,), steps) for row, on in enumerate(active) if on
        }
        step = self._step(timed, no_repeat > 0)
        under_way = run_ahead(step.fetch, steps, meanwhile=meanwhile)
        for count, (best, which) in enumerate(under_way):
            running = {row: search for row, search in searches.items() if not search.done}
            for row, search in running.items():
                stuck = not (search.ended or best[row, 0] > NEVER)  # no token that may come
                if stuck or np.isnan(best[row]).any():
                    raise ContractError(
                        f"transcribe: window {row}, token {count}: the scores of what may come are "
                        f"NaN or infinite; dtype='bf16' or 'f32' has a wider range"
                    )
                search.add(best[row], which[row])
            over = [row for row, search in running.items() if search.done]
            if len(over) == len(running):
                break
            if over:
                beam = self._session.beam
                end(self._notes, [row * beam + i for row in over for i in range(beam)])
        bests = {row: search.best(1)[0] for row, search in searches.items()}
        return {row: ([i for i in one.ids if i != v.end], score)
                for row, (score, one) in bests.items()}  # fmt: skip

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
        seen = np.zeros(self._seen.shape, bool)
        seen[:, :before] = True
        each = np.arange(len(seen))
        seen[each, before + each % session.beam] = True  # its own slot of the first step
        self._seen.assign(seen)
        self._beams.begin([prompt[-1]] * session.batch, (session.vocabulary.end,))
        self._at.assign(np.full(self._at.shape, before, np.int32))

    def _step(self, timed: bool, no_repeat: bool) -> Jitted[..., tuple[Tensor, Tensor]]:
        how = timed, no_repeat
        if how not in self._captured:
            stepped = method_of(self._stepped)

            def step() -> tuple[Tensor, Tensor]:
                return stepped(*how)

            self._captured[how] = Jitted(step, self._session.model.device)
        return self._captured[how]
