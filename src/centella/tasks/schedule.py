"""`Scheduler`: many requests share one model; they come and go between the steps of a batch.

A step reads at most one part of one prompt, and decodes a token of every request that is read. The
next step is submitted before the host has read the last one's tokens (Yu et al. 2022, "Orca", for
batches that change at each step; Kwon et al. 2023 for keys and values in blocks).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from msgspec import Struct

from centella.backends.opening import byte_count
from centella.errors import ContractError, DeviceLostError, DTypeError, ShapeError
from centella.host.forks import lock_of
from centella.host.interrupts import uninterrupted
from centella.nn.block_table import BLOCK, BlockTable
from centella.nn.tree import Tree
from centella.runtime.pending import Pending
from centella.tasks.generate import Generator, Prompt
from centella.tasks.pieces import Text
from centella.tasks.request import Answer, Request
from centella.tasks.sampling import Sampling, SamplingArgs
from centella.tasks.session import CHUNK, Array, Ids, next_part, origin_of_nan
from centella.tensors.arguments import flag, whole

if TYPE_CHECKING:
    from centella.tasks.slots import Slots

TOKENS = 1024  # of a request, for the pool that is the default


class Job(Struct, eq=False):
    """A request, as the Scheduler has it.

    Attributes:
        order: of its arrival.
        ids: the prompt and the tokens that have come; prompt: tokens of the former.
        seed: of its draws; steps: most tokens; submitted: those that steps have been submitted for.
        leader: the request of the same prompt whose keys and values it takes over.
        table: where its keys and values are; slot: where it is decoded; None and -1 while it waits.
    """

    order: int
    answer: Answer
    ids: Ids
    prompt: int
    sampling: Sampling
    seed: int
    steps: int
    leader: Job | None = None
    submitted: int = 0
    table: BlockTable | None = None
    slot: int = -1

    @property
    def own(self) -> BlockTable:
        """Its table, which it has while it is read or decoded."""
        assert self.table is not None, "a job that waits is neither read nor decoded"
        return self.table

    @property
    def position(self) -> int:
        """Where the token stands that its next step reads."""
        return self.prompt - 1 + self.submitted


class Ahead(Struct, frozen=True, eq=False):
    """A step under way: its tokens, and whose they are."""

    tokens: Pending[Array]
    jobs: list[Job]


class Scheduler:
    """Continues many prompts at once, which come at any time: continuous batching.

        with ct.Scheduler(model) as scheduler:
            for piece in scheduler.submit("Once upon a time", max_new_tokens=50):
                print(piece, end="")

    Each request gets the tokens that `Generator.generate` gives for it alone, with the same seed.
    Requests that begin with the same tokens, in blocks of 64, share what was computed for them,
    also with requests that have ended. When memory is short, the request that came last waits, and
    is read anew. Steps count in the ledgers, and obey the `forbid` scopes, that were open where the
    Scheduler was constructed.

    Args:
        model: the Generator; others may use it at the same time.
        max_batch: requests that are decoded at once; more wait.
        tokens: that keys and values have memory for, of all requests together; default: 1 024 for
            each of `max_batch`, or the context of the model where that is less.
        memory: instead of `tokens`: bytes of keys and values, or text such as "2 GB".
        background: whether a thread of the Scheduler's own computes; it ends when nothing is left.
            Else whoever waits for a request does, or calls `step` or `run`.

    Attributes:
        context: most tokens of a request, its prompt included: what the model has positions for,
            or the memory. Where rotary frequencies depend on the length of a text ("dynamic",
            "longrope"), those of short texts.
        steps: of decoding, so far.
        reused_tokens: of prompts whose keys and values were there already.
        preemptions: how often a request had to wait for memory after it had begun.

    Raises:
        DTypeError: for what is no Generator.
        ShapeError: for numbers below 1, tokens and memory, or a memory without room for a block.
        OutOfMemoryError, LimitError: the device has no room for the pool.
    """

    def __init__(
        self, model: Generator, *, max_batch: int = 16, tokens: int | None = None,
        memory: int | str | None = None, background: bool = True,
    ) -> None:  # fmt: skip
        if not isinstance(model, Generator):
            raise DTypeError(f"Scheduler: expected a Generator, got {type(model).__name__}")
        self.background: bool = flag("Scheduler", "background", background)
        self.max_batch: int = whole("Scheduler", "max_batch", max_batch, 1)
        self.steps: int = 0
        self.reused_tokens: int = 0
        self.preemptions: int = 0
        self._model = model
        self._blocks = _blocks_of(model, self.max_batch, tokens, memory)
        self.context: int = _context_of(model, self._blocks * BLOCK)
        self._tree = Tree(model.model)
        self._slots: Slots | None = self._made()
        self._free: list[int] = list(range(self.max_batch))
        # A request's own scopes are not to count, or to forbid, the work of others.
        self._scopes = copy_context()
        self._lock = lock_of(self)  # of the next three: what threads that submit touch
        self._new: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._driving = threading.RLock()  # of the rest: whoever computes a step
        self._arrived = 0
        self._waiting: deque[Job] = deque()
        self._reading: Job | None = None
        self._running: list[Job] = []
        self._ahead: Ahead | None = None
        self._stuck = False  # there was no room for the first that waits, and nothing has ended

    def __repr__(self) -> str:
        return f"<Scheduler of {self._model!r}, {self.running} running, {self.waiting} waiting>"

    @property
    def running(self) -> int:
        """Requests that are decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait or are read."""
        return len(self._new) + len(self._waiting) + (self._reading is not None)

    # -- requests ---------------------------------------------------------------------------------

    @overload
    def submit(
        self, prompt: Prompt, *, max_new_tokens: int = 256, stop: str | Sequence[str] = (),
        ignore_eos: bool = False, n: Literal[1] = 1, **sampling: Unpack[SamplingArgs],
    ) -> Request: ...  # fmt: skip
    @overload
    def submit(
        self, prompt: Prompt, *, max_new_tokens: int = 256, stop: str | Sequence[str] = (),
        ignore_eos: bool = False, n: int, **sampling: Unpack[SamplingArgs],
    ) -> Any: ...  # fmt: skip
    def submit(
        self, prompt: Prompt, *, max_new_tokens: int = 256, stop: str | Sequence[str] = (),
        ignore_eos: bool = False, n: int = 1, **sampling: Unpack[SamplingArgs],
    ) -> Any:  # fmt: skip
        """Continue a prompt as soon as there is room; any thread may call it.

        Args:
            prompt, max_new_tokens, stop, ignore_eos, sampling: as for `Generator.generate`.
            n: continuations, which share the prompt; number i has `seed + i`.

        Returns:
            A `Request`; a list of them for n > 1.

        Raises:
            ShapeError, DTypeError, WeightsError: as `Generator.generate`, here, at the call;
                ShapeError also for a prompt of `context` tokens or more.
            ContractError: the Scheduler is closed.
        """
        model = self._model
        ids = model._ids("submit", prompt)
        stops = model._stops("submit", max_new_tokens, stop, ignore_eos)
        chosen = model.config.sampling.with_("submit", sampling)
        if len(ids) >= self.context:
            raise ShapeError(
                f"submit: expected a prompt of fewer than {self.context:,} tokens, the context of "
                f"the Scheduler, got {len(ids):,}"
            )
        steps, seed = min(stops.tokens, self.context - len(ids)), chosen.first_seed()
        jobs: list[Job] = []
        with self._lock:
            if self._closed:
                raise ContractError("submit: expected an open Scheduler, got one that is closed")
            for i in range(whole("submit", "n", n, 1)):
                answer = Answer(Text(model._decode, stops), len(ids))
                leader, own = (jobs[0] if jobs else None), (seed + i) & 0x7FFFFFFF
                jobs.append(
                    Job(self._arrived + i, answer, list(ids), len(ids), chosen, own, steps, leader)
                )
            self._arrived += n
            self._new.extend(jobs)
            if self.background and self._thread is None:
                run = self._scopes.copy().run
                self._thread = threading.Thread(
                    target=run, args=(self._work,), name="centella scheduler", daemon=True
                )
                self._thread.start()
        requests = [Request(self, job.answer) for job in jobs]
        return requests[0] if n == 1 else requests

    def close(self, drain: bool = True) -> None:
        """Take no further requests, and release the memory when all are done.

        Args:
            drain: whether requests are computed to their end; False: they end as they are, their
                `finish` is "closed".
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        if not drain:
            with self._driving:
                self._take_new()
                for job in self._all():
                    job.answer.end("closed")
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.run()
        with self._driving:
            self._slots = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close it: requests are computed to their end, unless an exception leaves the block."""
        self.close(drain=kind is None)

    # -- whoever computes -------------------------------------------------------------------------

    def step(self) -> bool:
        """Compute a step; whether there is more to do."""
        with self._driving:
            return self._step()

    def run(self) -> None:
        """Compute steps until nothing is left."""
        while self.step():
            pass

    def drive(self, ready: Callable[[], bool]) -> None:
        """Compute a step, unless that is so already: for who waits."""
        with self._driving:
            if not ready():
                self._step()

    def _work(self) -> None:
        """What the thread does: it ends when nothing is left, so that it keeps nothing alive."""
        while True:
            more = self.step()
            with self._lock:
                if not more and not self._new:
                    self._thread = None
                    return

    @uninterrupted
    def _step(self) -> bool:
        """A part of a prompt, a token of each; then the tokens of the step before."""
        self._take_new()
        ahead = None
        try:
            self._admit()
            self._read()
        except Exception as error:
            self._fail(error, [] if self._reading is None else [self._reading])
        try:
            ahead = self._submitted()
        except Exception as error:
            self._fail(error, self._running)
        self._collect()
        self._ahead = ahead
        return bool(ahead or self._new or self._all())

    def _all(self) -> list[Job]:
        reading = [] if self._reading is None else [self._reading]
        return [*self._running, *reading, *self._waiting]

    def _take_new(self) -> None:
        """Take what was submitted; leave what was cancelled."""
        with self._lock:
            self._waiting.extend(self._new)
            self._new.clear()
        for job in self._all():
            if job.answer.ended:
                self._retire(job)

    def _admit(self) -> None:
        """The first that waits is read next, if there is room for it."""
        at_work = bool(self._running or self._reading)
        if not at_work and self._ahead is None and self._tree.changed:
            self._slots, self._tree = self._made(), Tree(self._model.model)
        while self._waiting and self._reading is None and len(self._running) < self.max_batch:
            if (self._stuck and at_work) or not self._begin(self._waiting[0]):
                self._stuck = True
                return
            self._reading = self._waiting.popleft()
            if not self._left:
                self._join(self._reading)

    def _begin(self, job: Job) -> bool:
        """Give it blocks, those of others that begin so among them; whether there is room."""
        cache, leader = self._device.cache, job.leader
        past = None if leader is None else leader.table
        if past is not None and len(past.tokens) >= len(job.ids) - 1 and job.submitted == 0:
            table = past.fork()
            table.truncate(len(job.ids) - 1)
        else:
            table = cache.sequence()
            table.reuse(job.ids[:-1])
        start, end = len(table.tokens), len(job.ids)
        if table.missing(start, end) > cache.blocks.free:
            table.release()
            return False
        cache.copy(table.reserve(start, end))
        job.table = table
        self.reused_tokens += start
        return True

    @property
    def _left(self) -> Ids:
        """What is still to be read of the prompt that is read."""
        job = self._reading
        return [] if job is None else job.ids[len(job.own.tokens) : -1]

    def _read(self) -> None:
        """Submit the next part of a prompt; the last makes it one that is decoded."""
        job, left = self._reading, self._left
        if job is None:
            return
        padded = next_part(len(left), CHUNK, CHUNK)
        part = left[:padded]
        self._device.read(part, padded, len(job.own.tokens), job.own)
        job.own.add(part)
        if len(part) == len(left):
            self._join(job)

    def _join(self, job: Job) -> None:
        slot = min(self._free)
        self._device.occupy(slot, job.ids, job.prompt, job.sampling, job.seed)
        self._free.remove(slot)
        job.slot = slot
        self._reading = None
        self._running.append(job)

    def _submitted(self) -> Ahead | None:
        """Submit a token of each that goes on, with room for it; None: there is none."""
        device, free = self._device, self._device.cache.blocks
        while True:
            jobs = [job for job in self._running if job.submitted < job.steps]
            if not jobs:
                return None
            if sum(job.own.missing(job.position, job.position + 1) for job in jobs) <= free.free:
                break
            if self._ahead is not None:
                self._collect()  # some may have ended
            else:
                self._preempt()
        for job in jobs:
            device.cache.copy(job.own.reserve(job.position, job.position + 1))
        rows = [(job.slot, job.position, job.own) for job in jobs]
        tokens = device.step(rows, all(job.sampling.greedy for job in jobs))
        for job in jobs:
            job.submitted += 1
        self.steps += 1
        return Ahead(tokens, jobs)

    def _preempt(self) -> None:
        """The latest waits, and is read anew: no step of it is under way."""
        job = max(self._all()[: len(self._running) + bool(self._reading)], key=lambda j: j.order)
        self._leave(job)
        self._waiting.appendleft(job)
        self._stuck = True
        self.preemptions += 1

    def _collect(self) -> None:
        """The tokens of the step that is under way."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        try:
            tokens = ahead.tokens.result()
        except Exception as error:
            self._fail(error, ahead.jobs)
            return
        for job, token in zip(ahead.jobs, tokens.tolist(), strict=False):
            if job.table is not None and not job.answer.ended:
                self._add(job, token)

    def _add(self, job: Job, token: int) -> None:
        if token < 0:
            self._fail(self._nan(job), [job])
            return
        job.own.add(job.ids[-1:])
        job.ids.append(token)
        if job.answer.add(token):
            self._retire(job)
        elif len(job.ids) - job.prompt == job.steps:
            job.answer.end("context")
            self._retire(job)

    def _nan(self, job: Job) -> Exception:
        try:
            where = origin_of_nan(self._model.model, job.ids)
        except Exception as error:
            return error
        return ContractError(f"submit: token {len(job.ids)}: the logits are NaN, {where}")

    def _fail(self, error: Exception, jobs: Sequence[Job]) -> None:
        """These end with an error; all do, where the device was lost."""
        for job in self._all() if isinstance(error, DeviceLostError) else [*jobs]:
            job.answer.fail(error)
            self._retire(job)

    def _retire(self, job: Job) -> None:
        self._leave(job)
        if job in self._waiting:
            self._waiting.remove(job)
        self._stuck = False

    def _leave(self, job: Job) -> None:
        """Give back its slot and its blocks."""
        if job.table is not None:
            job.table.release()
            job.table = None
        if job.slot >= 0:
            self._free.append(job.slot)
            self._running.remove(job)
            job.slot = -1
        if job is self._reading:
            self._reading = None

    # -- memory -----------------------------------------------------------------------------------

    def _made(self) -> Slots:
        from centella.tasks.slots import Slots

        return Slots(self._model.model, self.max_batch, self._blocks, self.context)

    @property
    def _device(self) -> Slots:
        if self._slots is None:
            raise ContractError("Scheduler: expected an open Scheduler, got one that is closed")
        return self._slots


def _blocks_of(model: Generator, batch: int, tokens: Any, memory: Any) -> int:
    """Blocks of the pool."""
    config = model.model.config
    if memory is None:
        default = batch * min(TOKENS, model.context)
        asked = default if tokens is None else whole("Scheduler", "tokens", tokens, 1)
        return -(-asked // BLOCK)
    if tokens is not None:
        raise ShapeError("Scheduler: expected tokens= or memory=, got both")
    row = config.num_key_value_heads * config.head_dim * model.model.dtype.itemsize
    each = 2 * config.num_hidden_layers * BLOCK * row
    room = byte_count(memory)
    if room < 2 * each:
        raise ShapeError(
            f"Scheduler: expected memory for two blocks of {BLOCK} tokens or more, {2 * each:,} "
            f"bytes, got {room:,}"
        )
    return room // each - 1  # one is for what is dropped


def _context_of(model: Generator, tokens: int) -> int:
    """Most tokens of a request: in memory, and with the rotary frequencies of short texts."""

    def regime(length: int) -> list[int]:
        return [rope.regime(length) for rope in model.model.config.ropes]

    lengths = range(1, min(model.context, tokens) + 1)
    return bisect_right(lengths, regime(1), key=regime)
