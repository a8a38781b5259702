"""Beam search: the likeliest texts of a prompt, followed side by side.

The device scores what may follow each text that runs, takes the best candidates of each prompt and
goes on from those that have not ended (`BeamStates`). The host notes which texts have ended, a step
behind (`Search`). Where the keys of beams are is their session's: `speech_beams`, `beam_session`.
The rules are those of transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella.op.op import get
from centella.ops.beam import OUT, chosen
from centella.runtime.device import Device
from centella.tasks.generate.beam_settings import BeamSettings
from centella.tasks.generate.logprobs import TokenLogprobs
from centella.tasks.generate.pieces import Generation, Ids, Text
from centella.tensors import functional as fn
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply_all

Array = np.ndarray[Any, Any]


class Hypothesis(Struct, frozen=True, eq=False):
    """A text of a search: what it goes on from, and its last token.

    Attributes:
        total: log-probabilities of its tokens, added up.
        logprobs: of its last token; None: they are not told.
        text: the same, in which strings that end it are looked for; None: there are none.
    """

    before: Hypothesis | None = None
    token: int = -1
    total: float = 0.0
    logprobs: TokenLogprobs | None = None
    text: Text | None = None

    def then(self, token: int, total: float, logprobs: TokenLogprobs | None) -> Hypothesis:
        """It with one token more."""
        text = None
        if self.text is not None:
            text = self.text.fork()
            text.add(token)
        return Hypothesis(self, token, total, logprobs, text)

    @property
    def steps(self) -> list[Hypothesis]:
        """It with each number of tokens from 1 on."""
        steps: list[Hypothesis] = []
        at = self
        while at.before is not None:
            steps.append(at)
            at = at.before
        return steps[::-1]

    @property
    def ids(self) -> Ids:
        """Its tokens, the end included."""
        return [step.token for step in self.steps]


class Search:
    """The texts of a prompt: those that run, and the best that have ended.

    Args:
        vocab: tokens that a code counts for a beam; ends: those that end a text.
        steps: most tokens; with the last one all texts end.
        text: empty, with strings that end a text, too.

    Attributes:
        running: of each beam; parents: the beams that they went on from.
        scores: f32 [beam], their log-probabilities, added up.
        ended: scores and texts, the best first.
        done: nothing is added any more.
    """

    def __init__(
        self, settings: BeamSettings, vocab: int, ends: Collection[int], steps: int,
        text: Text | None = None,
    ) -> None:  # fmt: skip
        self.running: list[Hypothesis] = [Hypothesis(text=text)] * settings.beam
        self.ended: list[tuple[float, Hypothesis]] = []
        self.done: bool = False
        self.parents: list[int] = [0] * settings.beam
        self.scores: Array = np.zeros(settings.beam, np.float32)
        self._settings = settings
        self._vocab, self._ends, self._steps = vocab, frozenset(ends), steps
        self._tokens = 0

    def add(self, best: Array, which: Array, logprobs: Sequence[TokenLogprobs | None] = ()) -> bool:
        """Note the candidates of a step; whether a string has ended one.

        Then beams go on from `running`, and not from what the device has chosen.

        Args:
            best: scores [candidates], the best first; which: beam * vocab + token of each.
            logprobs: of their tokens, where they are told.
        """
        how, beam = self._settings, self._settings.beam
        self._tokens += 1
        last = self._tokens == self._steps
        told = logprobs or [None] * len(best)
        codes = zip(best.tolist(), which.tolist(), told, strict=True)
        each = [
            self.running[code // self._vocab].then(code % self._vocab, total, own)
            for total, code, own in codes
        ]
        by_token = [one.token in self._ends for one in each]
        by_text = [one.text is not None and one.text.finish == "stop" for one in each]
        ended = [a or b for a, b in zip(by_token, by_text, strict=True)]
        ending = [one for one, end in zip(each[:beam], ended, strict=False) if end or last]
        scored = [(how.score(one.total, self._tokens), one) for one in ending]
        self.ended = sorted([*self.ended, *scored], key=lambda kept: -kept[0])[:beam]
        self.scores, order = best[:beam], list(range(beam))
        if any(ended):
            self.scores, places = chosen(best, np.array(ended), beam)
            order = places.tolist()
        self.running = [each[i] for i in order]
        self.parents = [int(which[i]) // self._vocab for i in order]
        self.done = last or all(ended) or not self._improving(float(self.scores[0]))
        return by_text != by_token and any(by_text)

    def _improving(self, total: float) -> bool:
        """Whether the best text that runs may come among those that are kept.

        Args:
            total: its log-probabilities, added up.
        """
        how = self._settings
        if len(self.ended) < how.beam:
            return True
        if how.early_stopping is True:
            return False
        longest = how.early_stopping == "never" and how.length_penalty > 0
        tokens = self._steps if longest else self._tokens
        return how.score(total, tokens) > self.ended[-1][0]

    def best(self, n: int) -> list[tuple[float, Hypothesis]]:
        """The best texts, with their scores; those that run where fewer have ended."""
        tokens = max(self._tokens, 1)
        rest = [(self._settings.score(one.total, tokens), one) for one in self.running]
        return [*self.ended, *rest][:n]

    def generations(self, n: int, empty: Text, end: str, prompt_tokens: int) -> list[Generation]:
        """The best texts, as users get them.

        Args:
            empty: a text that begins; end: `Generation.finish` of one that nothing has ended.
            prompt_tokens: tokens of the prompt.
        """
        each = []
        for score, one in self.best(n):
            text = empty.fork()
            for step in one.steps:
                text.add(step.token, step.logprobs)
            text.end(end)
            each.append(replace(text.generation(prompt_tokens), score=score))
        return each


class BeamStates:
    """What the device keeps of the beams of some prompts.

    Args:
        vocab: tokens of a row of scores.

    Attributes:
        prompts, beam: the same.
        tokens, parents: i32 [prompts * beam]: the last token of each beam, and the row of the beam
            that it went on from.
        scores: f32 [prompts * beam], log-probabilities, added up.
    """

    def __init__(self, prompts: int, beam: int, vocab: int, device: Device) -> None:
        self.prompts: int = prompts
        self.beam: int = beam
        rows = prompts * beam

        def state(name: str, size: int, dtype: type = np.int32) -> State:
            return State(np.zeros(size, dtype), device=device, name=name)

        self.tokens: State = state("tokens of beams", rows)
        self.parents: State = state("parents of beams", rows)
        self.scores: State = state("scores of beams", rows, np.float32)
        self._ends = state("tokens that end a text", vocab)
        self._ids: frozenset[int] = frozenset()

    def begin(self, tokens: Sequence[int], ends: Collection[int]) -> None:
        """Beams that are all alike yet: the first of each prompt stands for all.

        Args:
            tokens: the last one of each prompt; ends: those that end a text.
        """
        rows = np.arange(self.prompts * self.beam, dtype=np.int32)
        self.tokens.assign(np.repeat(np.array(tokens, np.int32), self.beam))
        self.parents.assign(rows // self.beam * self.beam)
        self.scores.assign(np.where(rows % self.beam == 0, 0.0, OUT).astype(np.float32))
        ids = frozenset(ends)
        if ids != self._ids:
            flags = np.zeros(self._ends.shape, np.int32)
            flags[[i for i in ids if i < len(flags)]] = 1
            self._ends.assign(flags)
            self._ids = ids

    def go_on(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Go on with the best candidates that have not ended, as a part of what is captured.

        Args:
            scores: f32 [prompts * beam, vocab], log-probabilities of what may follow.

        Returns:
            The `count` best candidates of each prompt, [prompts, count]: their log-probabilities,
            added up, the best first, and beam * vocab + token of each.
        """
        so_far = self.scores.value.reshape(-1, 1)
        best, which = best_of(scores + so_far, self.prompts, count)
        states = (self.tokens.value, self.parents.value, self.scores.value)
        apply_all(get("beam_select"), (*states, best, which, self._ends.value), {})
        return best, which

    def turn(self, searches: Sequence[Search], moved: bool = True) -> None:
        """Go on from what searches say, and not from what the device has chosen.

        Args:
            moved: whether the keys of a beam are still those of its parent; else its own.
        """
        rows = self.prompts * self.beam
        tokens, parents, scores = (np.zeros(rows, t) for t in (np.int32, np.int32, np.float32))
        for i, search in enumerate(searches):
            own = slice(i * self.beam, (i + 1) * self.beam)
            tokens[own] = [one.token for one in search.running]
            parents[own] = i * self.beam + np.array(search.parents if moved else range(self.beam))
            scores[own] = search.scores
        self.tokens.assign(tokens)
        self.parents.assign(parents)
        self.scores.assign(scores)


def best_of(scores: Tensor, prompts: int, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each prompt: f32, i32 [prompts, count].

    Args:
        scores: f32 [prompts * beam, vocab].

    Returns:
        Scores, the best first, and beam * vocab + token of each.
    """
    return fn.topk(scores.reshape(prompts, -1), count)
