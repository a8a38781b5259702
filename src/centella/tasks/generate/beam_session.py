"""Beam search of a decoder: see `beam`.

Each beam is a row of a step. Its keys and values are in blocks of a pool, which a table in a State
names: full blocks are shared with the beam that it goes on from, and only the keys of the block
that is being filled are copied, where two beams go on from one. All blocks of a search are reserved
before its first step, so the device moves beams by itself, and the host reads 8 bytes a candidate.
Where rotary frequencies change with the length of the texts, the texts so far are read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from centella.dtypes import DType
from centella.nn.block_table import BLOCK, BlockTable
from centella.op.op import get
from centella.runtime.pending import Pending
from centella.tasks.generate.beam import BeamStates, Search
from centella.tasks.generate.logprobs import TokenLogprobs
from centella.tasks.generate.pieces import Text
from centella.tasks.generate.pooled_past import PooledPast
from centella.tasks.generate.prompts import Asked
from centella.tasks.generate.run_ahead import run_ahead
from centella.tasks.generate.session import nan_error
from centella.tensors import functional as fn
from centella.tensors.creation import asarray
from centella.tensors.jit import Jitted, method_of
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply_all

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel

Array = np.ndarray[Any, Any]
Ids = list[int]


class BeamSession:
    """Beams of several prompts on a device, and what steps them.

    Args:
        model: the decoder.
        prompts, beam: the rows of a step are `beam` for each prompt.
        capacity: tokens of a row, its prompt included; steps: those after the prompt, at most.
        cache: storage of keys and values; None: that of activations.

    Attributes:
        prompts, beam, capacity, cache: the same; steps: those that there is room for.
    """

    def __init__(
        self, model: LlamaModel, prompts: int, beam: int, capacity: int, steps: int,
        cache: DType | None = None,
    ) -> None:  # fmt: skip
        self.prompts: int = prompts
        self.beam: int = beam
        self.capacity: int = capacity
        width, own = -(-capacity // BLOCK), -(-steps // BLOCK)
        self.steps: int = own * BLOCK
        self.cache: DType | None = cache
        # The first beam has its prompt's blocks; the others may begin within one, and end in one.
        blocks = prompts * (width + (beam - 1) * (own + 1))
        self._past = PooledPast(model, blocks, capacity, cache or model.dtype)
        self._tables: list[BlockTable] = []
        device, vocab = model.device, model.config.vocab_size
        self._beams = BeamStates(prompts, beam, vocab, device)
        table = np.zeros((prompts * beam, 1 + width), np.int32)
        self._table = State(table, device=device, name="blocks of beams")
        self._step: Jitted[..., tuple[Tensor, ...]] = Jitted(method_of(self._stepped), device)

    # -- what is captured -------------------------------------------------------------------------

    def _stepped(self, count: int, logprobs: int | None, kind: int) -> tuple[Tensor, ...]:
        """Continue all beams, of one kind; the best candidates of each prompt: scores and codes.

        With `logprobs` also the log-probabilities of their tokens, [prompts, count], and of each
        row those of its likeliest tokens, and these, [rows, logprobs].
        """
        model, beams = self._past.model, self._beams
        moved = (self._table.value, beams.parents.value)
        table, copies = apply_all(get("beam_blocks"), moved, {"beam": self.beam, "size": BLOCK})
        self._past.cache.copied(copies)
        logits = model(beams.tokens.value.reshape(-1, 1), self._past.view(table, kind))[:, 0]
        own = fn.log_softmax(logits, -1)
        best, which = beams.go_on(own, count)
        if logprobs is None:
            return best, which
        first = np.arange(self.prompts, dtype=np.int32).reshape(-1, 1) * (self.beam * own.shape[1])
        told = fn.gather(own.reshape(-1), which + asarray(first, device=model.device))
        return best, which, told, *(fn.topk(own, min(logprobs, own.shape[1])) if logprobs else ())

    # -- what the host calls ----------------------------------------------------------------------

    def search(
        self, prompts: Sequence[Ids], asked: Asked, steps: int, ending: threading.Event,
        empty: Text,
    ) -> list[Search]:  # fmt: skip
        """The likeliest texts of each prompt, until `ending` is set.

        Args:
            prompts: of rotary frequencies that are alike, and that change at the same token.
            asked: with beams.
            steps: most tokens of a text.
            empty: a text that begins.

        Raises:
            ContractError: logits were NaN; names the prompt, and the layer that they come from.
        """
        assert asked.beams is not None, "a search"
        vocab, ends = self._past.model.config.vocab_size, asked.stops.ids
        text = empty if asked.stops.texts else None
        searches = [Search(asked.beams, vocab, ends, steps, text) for _ in prompts]
        if not self._start(prompts, steps, ends, ending):
            return searches
        count = min(asked.beams.candidates(len(ends)), self.beam * vocab)
        step = partial(self._step.fetch, count, asked.logprobs)
        for best, which, *told in self._sent(step, prompts, searches, steps, ending):
            turned = False
            for i, search in enumerate(searches):
                if not search.done:
                    if np.isnan(best[i]).any():
                        ids = [*prompts[i], *search.running[which[i, 0] // vocab].ids]
                        raise nan_error(
                            f"generate: sequence {i}, ", self._past.model, ids, self.cache
                        )
                    turned |= search.add(best[i], which[i], self._told(i, which, told))
            if ending.is_set() or all(search.done for search in searches):
                break
            if turned:
                self._beams.turn(searches)
        self._release()
        return searches

    def _sent(
        self, step: Callable[[int], Pending[tuple[Array, ...]]], prompts: Sequence[Ids],
        searches: Sequence[Search], steps: int, ending: threading.Event,
    ) -> Iterator[tuple[Array, ...]]:  # fmt: skip
        """What each step sends; `step` submits one of a kind, and `searches` are what it led to."""
        # The host alone sees strings, and then says what the beams go on from.
        ahead = int(searches[0].running[0].text is None)
        length = max(map(len, prompts))
        while steps:
            kind = self._past.kind(length)
            some = min(steps, kind + 1 - length)
            yield from run_ahead(partial(step, kind), some, ahead)
            length, steps = length + some, steps - some
            if steps and not self._start_again(prompts, searches, steps, ending):
                return

    def _start(
        self, prompts: Sequence[Ids], steps: int, ends: frozenset[int], ending: threading.Event
    ) -> bool:
        """Read all but the last token of each prompt, and set its beams; whether all was read."""
        self._release()
        for ids in prompts:
            if not self._read(ids, ending):
                return False
        tables = []
        for ids, table in zip(prompts, [*self._tables], strict=True):
            first, end = len(ids) - 1, len(ids) - 1 + steps
            forks = [table.fork() for _ in range(self.beam - 1)]
            self._tables += forks
            for one in (*forks, table):
                one.reserve(first, end)  # the first step copies the keys of the last block
            tables += [(first - 1, one) for one in (table, *forks)]
        rows, columns = self._table.shape
        self._table.assign(self._past.cache.rows(tables, rows, columns - 1))
        self._beams.begin([ids[-1] for ids in prompts], ends)
        return True

    def _start_again(
        self, prompts: Sequence[Ids], searches: Sequence[Search], steps: int,
        ending: threading.Event,
    ) -> bool:  # fmt: skip
        """Read all but the last token of each text that runs; whether all was read.

        Their whole blocks are shared where they begin alike. Searches that are done write nothing.
        """
        self._release()
        tables = []
        for ids, search in zip(prompts, searches, strict=True):
            for one in search.running:
                text = [*ids, *one.ids]
                if search.done:
                    tables.append((0, self._past.cache.sequence()))
                elif self._read(text, ending):
                    first, table = len(text) - 1, self._tables[-1]
                    table.reserve(first, first + steps)
                    tables.append((first - 1, table))
                else:
                    return False
        rows, columns = self._table.shape
        self._table.assign(self._past.cache.rows(tables, rows, columns - 1))
        self._beams.turn(searches, moved=False)
        return True

    def _read(self, ids: Ids, ending: threading.Event) -> bool:
        """Read a text but for its last token; blocks that are known are not read again."""
        table = self._past.cache.sequence(self._past.kind(len(ids)))
        self._tables.append(table)
        left = ids[table.reuse(ids[:-1]) : -1]
        table.reserve(len(table.tokens), len(ids) - 1)
        while left and not ending.is_set():
            left = left[self._past.read(left, table) :]
        return not left

    def _release(self) -> None:
        """Give all blocks back; those of prompts may be found again."""
        for table in self._tables:
            table.release()
        self._tables = []

    def _told(
        self, prompt: int, which: Array, told: Sequence[Array]
    ) -> list[TokenLogprobs | None]:  # fmt: skip
        """The log-probabilities that a step told of a prompt's candidates."""
        if not told:
            return []
        vocab, (own, *top) = self._past.model.config.vocab_size, told
        each: list[TokenLogprobs | None] = []
        for code, logprob in zip(which[prompt].tolist(), own[prompt].tolist(), strict=True):
            row, likeliest = prompt * self.beam + code // vocab, dict[int, float]()
            if top:
                likeliest = dict(zip(top[1][row].tolist(), top[0][row].tolist(), strict=True))
            each.append(TokenLogprobs(code % vocab, logprob, likeliest))
        return each
