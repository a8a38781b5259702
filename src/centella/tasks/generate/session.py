"""A batch of sequences on the device, and the steps that continue them, one token ahead.

The last token of each sequence lives in a State: a step reads it, computes the next one, writes it
there and sends it to the host, 4 bytes a sequence. The next step is submitted before the host has
read that token. A step that turns out to be after the end is forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from centella.dtypes import DType, f16, f32
from centella.errors import ContractError, OutOfMemoryError
from centella.nn.kv_cache import KVCache
from centella.nn.past import Past
from centella.op.op import get
from centella.ops.sample_row import PROMPT, SETTINGS
from centella.runtime.pending import Pending
from centella.tasks.generate.logprobs import Scores, tokens_of
from centella.tasks.generate.run_ahead import run_ahead
from centella.tasks.generate.sampling import Sampling
from centella.tensors.creation import arange, asarray, full
from centella.tensors.functional import concat, gather, ne
from centella.tensors.jit import Jitted, method_of
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply, apply_all

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel

Array = np.ndarray[Any, Any]
Ids = list[int]
CHUNK = 512  # tokens of a prompt that are read at once
FAST_CHUNKS = 8192, 4096, 2048  # the same where tensor cores want products of many rows
SHARE = 64  # activations of a larger chunk than the smallest take one of so many parts of memory
LEAST = 16  # a last part is padded to a power of two from here on: few captures


class Session:
    """A batch of sequences on the device: their past, their last tokens, and what steps them.

    Args:
        model: the decoder.
        batch: sequences; capacity: tokens that each may have.
        cache: storage of keys and values; None: that of activations.

    Attributes:
        reach: tokens of the longest text whose rotary frequencies are those of what was read.
    """

    def __init__(
        self, model: LlamaModel, batch: int, capacity: int, cache: DType | None = None
    ) -> None:
        self.model: LlamaModel = model
        self.batch: int = batch
        self.capacity: int = capacity
        self.cache: DType | None = cache
        self._past: Past[KVCache] = model.past(batch, capacity, dtype=cache)
        self.reach: int = model.config.reach(capacity)
        self._tables: list[State] = []  # of the rotary embedding, where they change with the length
        if model.config.reach(1) < capacity:
            self._tables = [State(table) for pair in self._past.tables for table in pair]
        self.rows: list[Ids] = [[] for _ in range(batch)]  # read and written, of each sequence
        self._chunk: int | None = None  # tokens that are read at once; None: not known yet
        self._first: Session | None = None  # reads prompts that several sequences begin with
        device = model.device
        vocab = model.config.vocab_size

        def state(name: str, shape: tuple[int, ...], dtype: type = np.int32) -> State:
            return State(np.zeros(shape, dtype), device=device, name=name)

        self._token = state("last tokens", (batch,))
        self._counts = state("counts of tokens", (batch, vocab))
        self._drawn = state("tokens drawn", (batch,))
        self._seeds = state("seeds", (batch,))
        self._settings = state("sampling", (batch, len(SETTINGS)), np.float32)
        self._greedy: Jitted[..., Tensor] = Jitted(method_of(self._likeliest), device)
        self._random: Jitted[..., Tensor] = Jitted(method_of(self._sampled), device)
        self._step: Jitted[..., Tensor] = self._greedy
        self._logprobs: int | None = None  # alternatives that a step tells of
        self._scores: Scores | None = None
        self._fill: Jitted[..., None] = Jitted(method_of(self._read), device)
        self._guessed: dict[int, tuple[State, State]] = {}  # what `sample` changes in a pass
        self._verify: Jitted[..., Tensor] = Jitted(method_of(self._verified), device)

    @property
    def past(self) -> Past[KVCache]:
        """Keys and values, and the rotary tables as they are now."""
        values = iter([state.value for state in self._tables])
        tables = tuple(zip(values, values, strict=True)) or self._past.tables
        return Past(self._past.cache, tables, self._past.still)

    def _turn(self, rows: Sequence[Ids]) -> None:
        """Turn as texts of such lengths do; what was read in another way is forgotten."""
        reach = self.model.config.reach(max(map(len, rows)))
        if reach == self.reach:
            return
        self.reach, self.rows = 0, [[] for _ in rows]
        self.past.cache.truncate(0)
        ropes = self.model.config.ropes
        tables = [table for rope in ropes for table in rope.tables(self.capacity, reach)]
        for state, table in zip(self._tables, tables, strict=False):  # all lengths may be alike
            state.assign(table)
        self.reach = reach

    def _likeliest(self, logprobs: int | None) -> Tensor:
        """The most likely token after each sequence's last one; -1 for NaN: see `_told`."""
        logits = self._logits()
        return self._told(logits, apply("argmax", logits, marked=True), logprobs)

    def _sampled(self, logprobs: int | None) -> Tensor:
        """A token drawn after each sequence's last one; -1 for NaN: see `_told`."""
        logits = self._logits()
        operands = (self._counts.value, self._drawn.value, logits, self._settings.value,
                    self._seeds.value)  # fmt: skip
        return self._told(logits, apply_all(get("sample"), operands, {})[2], logprobs)

    def _logits(self) -> Tensor:
        return self.model(self._token.value.reshape(self.batch, 1), self.past)[:, 0]

    def _told(self, logits: Tensor, chosen: Tensor, logprobs: int | None) -> Tensor:
        """What a step sends: the tokens [batch] i32, or `Scores`; they become the last ones."""
        self._token.assign(chosen)
        tokens = self._token.value  # as nobody else reads `chosen`, it is computed there
        if logprobs is None or self._scores is None:
            return tokens
        return self._scores(logits, tokens, logprobs)

    def _verified(self, guess: Tensor, greedy: bool) -> Tensor:
        """See `verify`; the last token that is right becomes the last one of the sequence."""
        guesses = guess.shape[1]
        logits = self.model(concat([self._token.value.reshape(1, 1), guess], 1), self.past)[0]
        if greedy:
            chosen = apply("argmax", logits, marked=True)
        else:
            counts, numbers = self._guessed[guesses]
            tokens = arange(guesses + 1, device=guess.device)
            numbers.assign(self._drawn.value + tokens)
            settings, seeds = (gather(s.value, tokens * 0) for s in (self._settings, self._seeds))
            operands = (counts.value, numbers.value, logits, settings, seeds)
            chosen = apply_all(get("sample"), operands, {})[2]
        chosen = chosen.reshape(1, guesses + 1)
        differs = ne(guess, chosen[:, :guesses]).astype(f32)
        right = apply("argmax", concat([differs, full((1, 1), 1.0, f32, guess.device)], 1))
        self._token.assign(gather(chosen.reshape(guesses + 1), right).reshape(1))
        self._drawn.assign(self._drawn.value + right + 1)
        return concat([guess, chosen], 1)

    def verify(self, guess: Array | Tensor) -> Array:
        """Tokens that follow the last one, [1 to guesses + 1] i32: those of so many steps.

        They are the guesses that the model chooses itself, and the first that it chooses otherwise.
        Penalties and log-probabilities are not known here.

        Args:
            guess: [1, guesses] i32: what may follow the last token of the one sequence.

        Raises:
            KVCacheFullError: there is no room for all of them.
        """
        guesses, cache = guess.shape[1], self.past.cache
        if guesses not in self._guessed and self._step is not self._greedy:
            device, vocab = self.model.device, self.model.config.vocab_size
            self._guessed[guesses] = (
                State(np.zeros((guesses + 1, vocab), np.int32), device=device, name="guesses"),
                State(np.zeros(guesses + 1, np.int32), device=device, name="numbers of guesses"),
            )
        before = cache.length
        row = self._verify.fetch(guess, self._step is self._greedy).result()[0]
        wrong = row[:guesses] != row[guesses:-1]
        right = int(np.argmax(wrong)) if wrong.any() else guesses
        cache.truncate(before + right + 1)
        chosen: Array = row[guesses : guesses + right + 1]
        return chosen

    def choose_by(
        self, sampling: Sampling, rows: Sequence[Ids], logprobs: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Set how tokens are chosen: numbers in States, so that no value needs a capture.

        Args:
            sampling: the numbers.
            rows: the prompts, whose tokens penalties count.
            logprobs: alternatives that a step tells the log-probabilities of; None: none at all.
            numbers: of the rows, which are added to the seed; None: 0, 1, ...
        """
        self._logprobs = logprobs
        if logprobs is not None and self._scores is None:
            vocab = self.model.config.vocab_size
            self._scores = Scores(self.batch, vocab, self.model.device)
        self._step = self._greedy if sampling.greedy else self._random
        if sampling.greedy:
            return
        each = range(self.batch) if numbers is None else numbers
        seeds = sampling.first_seed() + np.array(each, np.int64)
        self._seeds.assign((seeds & 0x7FFFFFFF).astype(np.int32))
        self._settings.assign(np.tile(np.array(sampling.numbers(), np.float32), (self.batch, 1)))
        self._drawn.assign(0)
        if sampling.penalised:
            counts = np.zeros(self._counts.shape, np.uint32)
            for count, row in zip(counts, rows, strict=True):
                count[row] = PROMPT
            self._counts.assign(counts.view(np.int32))

    def _read(self, ids: Tensor) -> None:
        self.model.states(ids, self.past)

    def start(
        self,
        rows: Sequence[Ids],
        chunk: int | None = None,
        ending: threading.Event | None = None,
    ) -> bool:
        """Read all but the last token of each prompt; what was read before is kept.

        Args:
            rows: the prompts; the longest one says how all turn.
            chunk: tokens that are read at once; None: as many as the device is fastest with.
            ending: reading stops where it is set.

        Returns:
            Whether all was read; else the session only knows what it has read.

        Raises:
            KVCacheFullError: there is no room.
        """
        self._turn(rows)
        if chunk is None:
            self._chunk = self._chunk or fastest_chunk(self.model, self.batch)
            chunk = self._chunk
        cache = self.past.cache
        pairs = zip(self.rows, rows, cache.lengths, strict=True)
        kept = [min(_common(old, new[:-1]), length) for old, new, length in pairs]
        behind = max(len(row) - k for row, k in zip(rows, kept, strict=True))
        if max(kept) + behind > self.capacity:  # all rows go on by the tokens of the longest part
            kept = [0] * self.batch
        cache.truncate(kept)
        self.rows = [[] for _ in rows]  # until all is read
        rest = [row[k:-1] for row, k in zip(rows, kept, strict=True)]
        left = max(map(len, rest))
        at = 0
        while left and not (ending and ending.is_set()):
            room = self.capacity - max(cache.lengths)
            tokens = next_part(left, min(chunk, room), room)
            part = np.zeros((self.batch, tokens), np.int32)
            for row, ids in enumerate(rest):
                some = ids[at : at + tokens]
                part[row, : len(some)] = some
            self._fill(part)
            at, left = at + tokens, max(0, left - tokens)
        ends = [min(k + at, len(row) - 1) for row, k in zip(rows, kept, strict=True)]
        cache.truncate(ends)
        self.rows = [list(row[:end]) for row, end in zip(rows, ends, strict=True)]
        if left:
            return False
        self.rows = [list(row) for row in rows]
        self._token.assign(np.array([row[-1] for row in rows], np.int32))
        return True

    def start_several(
        self, rows: Sequence[Ids], times: int, ending: threading.Event | None = None
    ) -> bool:
        """Read prompts that are continued so many times each, once; as `start`."""
        each = [row for row in rows for _ in range(times)]
        self._turn(each)
        unread = max(len(new) - _common(old, new) for old, new in zip(self.rows, each, strict=True))
        if times > 1 and unread > LEAST:
            if self._first is None or self._first.batch != len(rows):
                self._first = Session(self.model, len(rows), self.capacity, self.cache)
            if not self._first.start(rows, ending=ending):
                return False
            self._take(self._first, times)
        return self.start(each, ending=ending)

    def _take(self, other: Session, times: int) -> None:
        """Take over what another session has read, each of its sequences so many times."""
        self.rows = [[] for _ in self.rows]
        at = asarray(np.repeat(np.arange(other.batch, dtype=np.int32), times),
                     device=self.model.device)  # fmt: skip
        self.past.cache.take(other.past.cache, at)
        self.rows = [list(row) for row in other.rows for _ in range(times)]

    def shared(self, rows: Sequence[Ids]) -> int:
        """Tokens of the rows that it has read, and that turn as those of the rows do."""
        if self.model.config.reach(max(map(len, rows))) != self.reach:
            return 0
        return sum(_common(old, new) for old, new in zip(self.rows, rows, strict=True))

    def lost(self, rows: Sequence[Ids]) -> int:
        """Tokens that it forgets for the rows, beyond those that they share."""
        shared = self.shared(rows)
        return sum(map(len, self.rows)) - 2 * shared

    def add(self, step: Array) -> None:
        """Note the tokens of what a step sent.

        Raises:
            ContractError: logits were NaN; names the sequence, and the layer that they come from.
        """
        tokens = tokens_of(step)
        if (tokens < 0).any():
            at = int(np.argmin(tokens))
            raise nan_error(f"generate: sequence {at}, ", self.model, self.rows[at], self.cache)
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(int(token))

    def likeliest(self) -> Tensor:
        """A step as a part of what is captured: the likeliest token of each sequence, [batch]."""
        chosen = apply("argmax", self._logits(), marked=True)
        self._token.assign(chosen)
        return chosen  # not the State, which the next step changes

    def step(self) -> Pending[Array]:
        """Submit a step; what it sends when it is done, as `tokens_of` reads it."""
        return self._step.fetch(self._logprobs)

    def run(self, steps: int) -> Iterator[Array]:
        """What each step sent, one step ahead of the device."""
        return run_ahead(self.step, steps)


def nan_error(what: str, model: LlamaModel, row: Ids, cache: DType | None) -> ContractError:
    """The error for logits that are NaN after a row's last token; says where that comes from.

    Args:
        what: the call, and of several sequences which; cache: as `Session` takes it.
    """
    origin = _origin_of_nan(model, row, cache)
    return ContractError(f"{what}token {len(row)}: the logits are NaN, {origin}")


def _origin_of_nan(model: LlamaModel, row: Ids, cache: DType | None) -> str:
    """Where a sequence's first NaN comes from: its states, layer by layer, anew."""
    wider = "; dtype='bf16' or 'f32' has a wider range" if model.dtype is f16 else ""
    try:
        past = model.past(1, len(row), dtype=cache)
        for start in range(0, len(row), CHUNK):
            part = np.array([row[start : start + CHUNK]], np.int32)
            states = model.layer_states(asarray(part, device=model.device), past)
            for layer, x in enumerate(states):
                if np.isnan(x.astype(f32).numpy()).any():
                    which = "the embedding" if not layer else f"layer {layer - 1}"
                    return f"first in the result of {which}{wider}"
    except OutOfMemoryError:
        return "and there is no memory to find the layer that they come from"
    return f"first in the product with the head{wider}"


def _common(old: Ids, new: Ids) -> int:
    """Tokens that both begin with."""
    most = min(len(old), len(new))
    return next((i for i in range(most) if old[i] != new[i]), most)


def fastest_chunk(model: LlamaModel, batch: int) -> int:
    """Tokens of each prompt of a batch to read at once, by the device and its memory."""
    if not model.device.caps.fast_tensor_cores:
        return CHUNK
    memory = model.device.memory
    known = [n for n in (memory.total, memory.budget) if n is not None]
    token = batch * model.config.activations_per_token * model.dtype.itemsize
    most = min(known, default=0) // SHARE // token
    return next((n for n in FAST_CHUNKS if n <= most), FAST_CHUNKS[-1])


def next_part(left: int, chunk: int, room: int) -> int:
    """Tokens to read next: whole chunks, then parts of a power of two, the last one padded to it.

    A part is padded if there is room, and if that adds little or it is short.
    """
    if left >= chunk:
        return chunk
    padded = max(LEAST, 1 << (left - 1).bit_length())
    padding_costs_little = padded <= CHUNK or padded - left <= left // 8
    return padded if padded <= room and padding_costs_little else 1 << (left.bit_length() - 1)
