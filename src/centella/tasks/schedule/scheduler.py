"""`Scheduler`: many requests share one model; they come and go between the steps of a batch.

Sources: Yu et al. 2022, "Orca", of batches that change at each step; Kwon et al. 2023,
"PagedAttention", of keys and values in blocks. What a step does is in `jobs`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextvars import copy_context
from math import prod
from typing import Any, ClassVar, Literal, Self, Unpack, overload

from centella.backends.opening import byte_count
from centella.dtypes import DType
from centella.errors import ContractError, DeviceError, DTypeError, ShapeError
from centella.host.forks import lock_of
from centella.nn.block_table import BLOCK
from centella.nn.cache_layer import planes_of
from centella.nn.tree import Tree
from centella.tasks.generate.generator import CacheBy, Generator, Prompt
from centella.tasks.generate.pieces import Text
from centella.tasks.generate.prompts import cache_dtype, continuations
from centella.tasks.generate.sampling import SamplingArgs
from centella.tasks.generate.speculation import LOOKUP, Lookup
from centella.tasks.schedule.jobs import Job, Jobs
from centella.tasks.schedule.request import Answer, Ready, Request
from centella.tasks.schedule.slots import Slots
from centella.tensors.arguments import flag, whole
from centella.tensors.hints import OF_SCHEDULER, Hinted
from centella.weights.model_files import show

TOKENS = 1024  # of a request, for the pool that is the default


class Scheduler(Hinted):
    """Serves many prompts at once, which may arrive at any time: continuous batching.

        with ct.Scheduler(model) as scheduler:
            for piece in scheduler.submit("Once upon a time", max_new_tokens=50):
                print(piece, end="")

    Each request gets the tokens that `Generator.generate` returns for it alone with the same seed.
    Requests with a common prefix share its keys and values in blocks of 64 tokens, also with
    requests that have ended. If memory runs out, the request that came last waits and its prompt is
    read again later. Steps count in the ledgers, and obey the `forbid` scopes, that were open where
    the Scheduler was constructed.

    Args:
        model: the Generator; others may use it at the same time.
        max_batch: requests that are decoded at once; further requests wait.
        tokens: number of tokens of all requests together that have memory for keys and values;
            default: for each of `max_batch` 1 024, or the model's context if that is less.
        memory: instead of `tokens`: bytes of keys and values, or text such as "2 GB".
        cache: "i8" for keys and values of 8 bits, as for `Generator.generate`.
        background: whether a thread of the Scheduler computes; it ends when no request is left.
            Otherwise steps run in the thread that waits for a request, or that calls `step` or
            `run`.

    Attributes:
        context: most tokens of a request, its prompt included: what the model has positions for,
            or the memory.

    Raises:
        DTypeError: `model` is not a Generator, or `memory` is not a number of bytes.
        ShapeError: a number below 1, both tokens and memory, or a memory smaller than a block.
        OutOfMemoryError, LimitError: the pool does not fit on the device.
    """

    _hints: ClassVar[dict[str, str]] = OF_SCHEDULER
    _instead: ClassVar[str] = "ct.Scheduler(model) makes one where it is needed"

    def __init__(
        self, model: Generator, *, max_batch: int = 16, tokens: int | None = None,
        memory: int | str | None = None, cache: CacheBy = None, background: bool = True,
    ) -> None:  # fmt: skip
        if not isinstance(model, Generator):
            raise DTypeError(f"Scheduler: expected a Generator, got {type(model).__name__}")
        self.background: bool = flag("Scheduler", "background", background)
        self.max_batch: int = whole("Scheduler", "max_batch", max_batch, 1)
        self._model = model
        stored = cache_dtype("Scheduler", cache) or model.model.dtype
        blocks = _blocks_of(model, self.max_batch, tokens, memory, stored)
        self.context: int = min(model.context, blocks * BLOCK)
        self._tree = Tree(model.model)
        self._jobs = Jobs(Slots(model.model, self.max_batch, blocks, self.context, stored))
        # A request's own scopes are not to count, or to forbid, the work of others.
        self._scopes = copy_context()
        self._driving = threading.RLock()  # who has it computes a step; taken before the next
        self._lock = lock_of(self)  # of what threads that submit touch
        self._new: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._arrived = 0

    def __repr__(self) -> str:
        return f"<Scheduler of {self._model!r}, {self.running} running, {self.waiting} waiting>"

    @property
    def running(self) -> int:
        """Number of requests that are being decoded."""
        return len(self._jobs.running)

    @property
    def waiting(self) -> int:
        """Number of requests that wait or whose prompt is being read."""
        jobs = self._jobs
        return len(self._new) + len(jobs.waiting) + (jobs.reading is not None)

    @property
    def steps(self) -> int:
        """Number of decoding steps so far."""
        return self._jobs.steps

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens whose keys and values were reused."""
        return self._jobs.reused_tokens

    @property
    def preemptions(self) -> int:
        """How often a running request was preempted because memory ran out."""
        return self._jobs.preemptions

    # -- requests ---------------------------------------------------------------------------------

    @overload
    def submit(
        self, prompt: Prompt, *, max_new_tokens: int = 256, stop: str | Sequence[str] = (),
        ignore_eos: bool = False, n: Literal[1] = 1, logprobs: int | None = None,
        draft: Literal["lookup"] | None = None, **sampling: Unpack[SamplingArgs],
    ) -> Request: ...  # fmt: skip
    @overload
    def submit(
        self, prompt: Prompt, *, max_new_tokens: int = 256, stop: str | Sequence[str] = (),
        ignore_eos: bool = False, n: int, logprobs: int | None = None,
        draft: Literal["lookup"] | None = None, **sampling: Unpack[SamplingArgs],
    ) -> Any: ...  # fmt: skip
    def submit(
        self, prompt: Prompt, *, max_new_tokens: int = 256, stop: str | Sequence[str] = (),
        ignore_eos: bool = False, n: int = 1, logprobs: int | None = None,
        draft: Literal["lookup"] | None = None, **sampling: Unpack[SamplingArgs],
    ) -> Any:  # fmt: skip
        """Submit a prompt, which is continued when there is room; any thread may call this.

        Args:
            prompt, max_new_tokens, stop, ignore_eos, logprobs, sampling: as for
                `Generator.generate`.
            n: continuations, which share the prompt; number i has `seed + i`.
            draft: "lookup" guesses the tokens that followed the last ones earlier in the text. One
                pass verifies the guesses of all such requests, each up to its first wrong one.
                Requests with penalties or log-probabilities are not guessed.

        Returns:
            A `Request`; a list of them for n > 1.

        Raises:
            ShapeError, DTypeError, WeightsError: as `Generator.generate`, here, at the call;
                ShapeError also for a prompt of `context` tokens or more.
            ContractError: the Scheduler is closed.
        """
        _check_draft(draft)
        prompts, config = self._model._prompts, self._model.config
        ids = prompts.ids("submit", prompt, config.begin_id)
        asked = prompts.asked("submit", config, sampling, tokens=max_new_tokens, stop=stop,
                              ignore_eos=ignore_eos, logprobs=logprobs)  # fmt: skip
        if len(ids) >= self.context:
            raise ShapeError(
                f"submit: expected a prompt of fewer than {self.context:,} tokens, the context of "
                f"the Scheduler, got {len(ids):,}"
            )
        steps = min(asked.stops.tokens, self.context - len(ids))
        seed = asked.sampling.first_seed()
        guessed = draft is not None and asked.logprobs is None and not asked.sampling.penalised
        jobs: list[Job] = []
        with self._lock:
            if self._closed:
                raise ContractError("submit: expected an open Scheduler, got one that is closed")
            for i in range(continuations("submit", n)):
                text = Text(prompts.decode, asked.stops, asked.logprobs is not None)
                leader, own = (jobs[0] if jobs else None), (seed + i) & 0x7FFFFFFF
                jobs.append(
                    Job(self._arrived + i, Answer(text, len(ids)), list(ids), len(ids), asked, own,
                        steps, leader, Lookup() if guessed else None)
                )  # fmt: skip
            if self.background and (self._thread is None or not self._thread.is_alive()):
                run = self._scopes.copy().run
                thread = threading.Thread(
                    target=run, args=(self._work,), name="centella scheduler", daemon=True
                )
                thread.start()  # it waits for the lock; where none can be started, nothing waits
                self._thread = thread
            self._arrived += n
            self._new.extend(jobs)
        drive = None if self.background else self._drive
        requests = [Request(job.answer, drive) for job in jobs]
        return requests[0] if n == 1 else requests

    def warm(self) -> None:
        """Continue 1, 2, 4, ... short prompts, so that steps of these numbers of rows are captured.

        Tokens are chosen as the model's folder says. Longer block tables, guesses and other
        sampling settings are captured at their first use.
        """
        rows = [1 << i for i in range((self.max_batch - 1).bit_length())]
        for count in (*rows, self.max_batch):
            requests = [self.submit([0], max_new_tokens=2, ignore_eos=True) for _ in range(count)]
            for request in requests:
                request.result()

    def close(self, drain: bool = True) -> None:
        """Take no further requests, and return when all are done. A second time does nothing.

        Args:
            drain: whether running requests are finished; False: they end immediately with `finish`
                "closed".
        """
        with self._driving, self._lock:
            self._closed = True
            thread = self._thread
            jobs = [] if drain else [*self._new, *self._jobs.all()]
        for job in jobs:
            job.answer.end("closed")
        if thread is not None:
            thread.join()
        self.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close it: requests are computed to their end, unless an exception leaves the block."""
        self.close(drain=kind is None)

    # -- whoever computes -------------------------------------------------------------------------

    def step(self) -> bool:
        """Compute one step. Returns whether requests are left."""
        with self._driving:
            return self._step()

    def run(self) -> None:
        """Compute steps until no request is left."""
        while self.step():
            pass

    def _drive(self, ready: Ready) -> None:
        """Compute a step, unless it is ready: for who waits."""
        with self._driving:
            if not ready():
                self._step()

    def _step(self) -> bool:
        with self._lock:
            self._jobs.waiting.extend(self._new)
            self._new.clear()
        try:
            if self._jobs.idle and self._tree.changed:
                self._jobs.device.forget()
                self._tree = Tree(self._model.model)
            return self._jobs.step()
        except Exception as error:  # of no request: nobody is to wait for what never comes
            self._jobs.abandon(error)
            return False

    def _work(self) -> None:
        """What the thread does: it ends when nothing is left, so that it keeps nothing alive."""
        while True:
            more = self.step()
            with self._lock:
                if not more and not self._new:
                    self._thread = None
                    return


def _check_draft(draft: object) -> None:
    if not (draft is None or (isinstance(draft, str) and draft == LOOKUP)):
        raise DTypeError(f'submit: draft: expected "lookup" or None, got {show(draft)}')


def _blocks_of(model: Generator, batch: int, tokens: Any, memory: Any, stored: DType) -> int:
    """Blocks of the pool, whose keys and values have a dtype."""
    config = model.model.config
    if memory is None:
        default = batch * min(TOKENS, model.context)
        asked = default if tokens is None else whole("Scheduler", "tokens", tokens, 1)
        return -(-asked // BLOCK)
    if tokens is not None:
        raise ShapeError("Scheduler: expected tokens= or memory=, got both")
    planes = planes_of((config.num_key_value_heads, BLOCK, config.head_dim), stored).values()
    each = config.num_hidden_layers * sum(prod(shape) * kind.itemsize for shape, kind in planes)
    try:
        room = memory if type(memory) is int else byte_count(memory)
    except DeviceError as error:
        raise DTypeError(
            f"Scheduler: memory: expected bytes, an integer or a text such as '2 GB', got "
            f"{show(memory)}"
        ) from error
    if room < 2 * each:
        raise ShapeError(
            f"Scheduler: expected memory for two blocks of {BLOCK} tokens or more, {2 * each:,} "
            f"bytes, got {room:,}"
        )
    return room // each - 1  # one is for what is dropped
