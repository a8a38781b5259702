"""The device's side of a `Scheduler`: requests in slots, and the steps that are captured.

A slot has what the device keeps of a request that is decoded: its last token, how its tokens are
chosen, how many were. A step takes a table of blocks and the slots of its rows: 1, 2, 4, ... rows
of 4, 8, 16, ... blocks, so few sizes are captured, and any requests may meet in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from centella.dtypes import DType, f32, i32
from centella.nn.block_cache import BlockCache
from centella.nn.block_table import BlockTable
from centella.op.op import get
from centella.ops.sample_row import PROMPT, SETTINGS
from centella.runtime.pending import Pending
from centella.tasks.generate.logprobs import Scores
from centella.tasks.generate.pooled_past import CAPTURES, PooledPast
from centella.tasks.generate.sampling import Sampling
from centella.tensors.creation import arange, full
from centella.tensors.functional import concat, gather, ne, scatter
from centella.tensors.jit import Jitted, method_of
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply, apply_all

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel

Array = np.ndarray[Any, Any]
Ids = list[int]
Row = tuple[int, int, BlockTable]  # a request's slot, the position of its last token, its table


class Slots:
    """Slots of a model's device, and the steps on them.

    Args:
        model: the decoder.
        slots: requests that are decoded at once.
        blocks: of the pool of keys and values.
        context: most tokens of a request, an attribute too.
        cache: storage of keys and values.

    Attributes:
        past: keys and values of all requests; cache: their pool.
    """

    def __init__(
        self, model: LlamaModel, slots: int, blocks: int, context: int, cache: DType
    ) -> None:
        device, vocab = model.device, model.config.vocab_size
        self.model: LlamaModel = model
        self.count: int = slots
        self.context: int = context
        self.past: PooledPast = PooledPast(model, blocks, context, cache)
        self.cache: BlockCache = self.past.cache

        def state(name: str, shape: tuple[int, ...], dtype: Any = i32) -> State:
            state = State.empty(shape, dtype, device, name=name)
            state.assign(full((), 0, state.dtype, device))
            return state

        rows = slots + slots // 2  # with those of rows that pad a step
        self._last = state("last tokens", (rows,))
        self._counts = state("counts of tokens", (rows, vocab))
        self._drawn = state("tokens drawn", (rows,))
        self._seeds = state("seeds", (rows,))
        self._settings = state("sampling", (rows, len(SETTINGS)), f32)
        self._scores: dict[int, Scores] = {}  # by rows
        self._greedy: Jitted[..., Tensor] = Jitted(method_of(self._likeliest), device, CAPTURES)
        self._random: Jitted[..., Tensor] = Jitted(method_of(self._sampled), device, CAPTURES)
        self._verify: Jitted[..., Tensor] = Jitted(method_of(self._verified), device, CAPTURES)
        self._occupy: Jitted[..., None] = Jitted(method_of(self._occupied), device)

    def forget(self) -> None:
        """Captures and contents of another model: its parameters were changed."""
        for step in (self._greedy, self._random, self._verify):
            step.clear()
        self.past.forget()

    # -- a prompt ---------------------------------------------------------------------------------

    def occupy(self, slot: int, ids: Ids, prompt: int, sampling: Sampling, seed: int) -> None:
        """Give a slot to a request whose tokens but the last have been read.

        Args:
            ids: the prompt and what it was continued with; prompt: tokens of the former.
            seed: of this request.
        """
        numbers = np.array([sampling.numbers()], np.float32)
        values = [np.array([n], np.int32) for n in (slot, ids[-1], len(ids) - prompt, seed)]
        if not sampling.penalised:
            self._occupy(*values, numbers)
            return
        counts = np.bincount(ids[prompt:], minlength=self._counts.shape[1]).astype(np.uint32)
        counts[ids[:prompt]] |= np.uint32(PROMPT)
        self._occupy(*values, numbers, counts.view(np.int32)[None])

    def _occupied(
        self, slot: Tensor, token: Tensor, drawn: Tensor, seed: Tensor, settings: Tensor,
        counts: Tensor | None = None,
    ) -> None:  # fmt: skip
        pairs = [(self._last, token), (self._drawn, drawn), (self._seeds, seed),
                 (self._settings, settings)]  # fmt: skip
        if counts is not None:
            pairs.append((self._counts, counts))
        for state, row in pairs:
            state.assign(scatter(state.value, slot, row))

    # -- a step -----------------------------------------------------------------------------------

    def step(self, rows: Sequence[Row], greedy: bool, logprobs: int | None) -> Pending[Array]:
        """Submit a step of some requests; what it sends, as `tokens_of` reads it: -1 for NaN.

        Args:
            rows: of each request, with tables of one kind; the position of its last token is
                reserved.
            greedy: whether all take the most likely token.
            logprobs: alternatives to tell of; None: no log-probabilities.
        """
        table, slots = self._padded(rows)
        step, batch = self._greedy if greedy else self._random, len(slots)
        if logprobs is not None and batch not in self._scores:
            self._scores[batch] = Scores(batch, self._counts.shape[1], self.model.device)
        return step.fetch(table, slots, rows[0][2].kind, logprobs)

    def _padded(self, rows: Sequence[Row]) -> tuple[Array, Array]:
        """Table and slots of a step of 1, 2, 4, ... rows; what pads it has slots of nobody."""
        batch = min(1 << (len(rows) - 1).bit_length(), self.count)
        width = self.past.width(max(len(table.blocks) for _, _, table in rows))
        table = self.cache.rows([(start, table) for _, start, table in rows], batch, width)
        slots = [slot for slot, _, _ in rows] + list(range(self.count, self.count + batch))
        return table, np.array(slots[:batch], np.int32)

    def verify(self, rows: Sequence[Row], guesses: Array, greedy: bool) -> Pending[Array]:
        """Submit a pass over the last token of some requests and guesses of what follows.

        Args:
            rows: as for `step`, without penalties; the positions of the guesses are reserved, too.
            guesses: [rows, n] i32.
            greedy: as for `step`.

        Returns:
            [rows or more, n + 1] i32: the token that the model chooses after each. Those up to the
            first that differs from its guess are the tokens of single steps.
        """
        table, slots = self._padded(rows)
        padded = np.zeros((len(slots), guesses.shape[1]), np.int32)
        padded[: len(rows)] = guesses
        return self._verify.fetch(table, slots, rows[0][2].kind, padded, greedy)

    def _verified(
        self, table: Tensor, slots: Tensor, kind: int, guess: Tensor, greedy: bool
    ) -> Tensor:
        """See `verify`; the first token that differs becomes the last one of its slot."""
        batch, guesses = guess.shape
        ids = concat([gather(self._last.value, slots).reshape(-1, 1), guess], 1)
        logits = self.model(ids, self.past.view(table, kind))
        begin = gather(self._drawn.value, slots)
        if greedy:
            chosen = apply("argmax", logits, marked=True)
        else:
            each = [self._chosen(logits[:, i], slots) for i in range(guesses + 1)]
            chosen = concat([tokens.reshape(-1, 1) for tokens in each], 1)
        differs = ne(guess, chosen[:, :guesses]).astype(f32)
        right = apply("argmax", concat([differs, full((batch, 1), 1.0, f32, guess.device)], 1))
        last = arange(batch, device=guess.device) * (guesses + 1) + right
        self._last.assign(scatter(self._last.value, slots, gather(chosen.reshape(-1), last)))
        self._drawn.assign(scatter(self._drawn.value, slots, begin + right + 1))
        return chosen

    def _likeliest(self, table: Tensor, slots: Tensor, kind: int, logprobs: int | None) -> Tensor:
        logits = self._logits(table, slots, kind)
        return self._told(slots, logits, apply("argmax", logits, marked=True), logprobs)

    def _sampled(self, table: Tensor, slots: Tensor, kind: int, logprobs: int | None) -> Tensor:
        logits = self._logits(table, slots, kind)
        return self._told(slots, logits, self._chosen(logits, slots), logprobs)

    def _chosen(self, logits: Tensor, slots: Tensor) -> Tensor:
        """A token drawn for each row; the next one is drawn with the next number."""
        operands = (self._counts.value, self._drawn.value, logits, self._settings.value,
                    self._seeds.value, slots)  # fmt: skip
        return apply_all(get("sample"), operands, {})[2]

    def _logits(self, table: Tensor, slots: Tensor, kind: int) -> Tensor:
        ids = gather(self._last.value, slots).reshape(-1, 1)
        return self.model(ids, self.past.view(table, kind))[:, 0]

    def _told(self, slots: Tensor, logits: Tensor, chosen: Tensor, k: int | None) -> Tensor:
        """What a step sends; each token becomes the last one of its slot."""
        self._last.assign(scatter(self._last.value, slots, chosen))
        return chosen if k is None else self._scores[slots.shape[0]](logits, chosen, k)
