"""What a step of a `Scheduler` does: with requests that wait, that are read, that are decoded.

One thread at a time is in here. The first that waits gets blocks for its prompt when there are
some; its prompt is read in parts, one a step; then it has a slot, and each step decodes a token of
it. It grows by a block at a time. When no block is left, the one that came last gives all of its
own back and waits again; its tokens stay, and are read with its prompt. So does one that has grown
to a length of other rotary frequencies. A step is of requests with the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field

from centella.errors import DeviceLostError
from centella.host.interrupts import guard, uninterrupted
from centella.nn.block_table import Blocks, BlockTable
from centella.runtime.pending import Pending
from centella.tasks.generate.logprobs import MOST, TokenLogprobs, logprobs_of, tokens_of
from centella.tasks.generate.prompts import Asked
from centella.tasks.generate.session import Array, Ids, nan_error
from centella.tasks.generate.speculation import GUESSES, Lookup, Pace
from centella.tasks.schedule.request import Answer

if TYPE_CHECKING:
    from centella.tasks.schedule.slots import Slots


class Job(Struct, eq=False):
    """A request, as the Scheduler has it.

    Attributes:
        order: of its arrival.
        ids: the prompt and the tokens that have come; prompt: tokens of the former.
        asked: how tokens are chosen, and what is told of them.
        seed: of its draws; steps: most tokens; submitted: those that steps have been submitted for.
        leader: the request of the same prompt whose keys and values it takes over.
        lookup: what guesses its tokens; None: nobody. pace: when.
        table: where its keys and values are; slot: where it is decoded; None and -1 while it waits.
    """

    order: int
    answer: Answer
    ids: Ids
    prompt: int
    asked: Asked
    seed: int
    steps: int
    leader: Job | None = None
    lookup: Lookup | None = None
    pace: Pace = field(default_factory=Pace)
    submitted: int = 0
    table: BlockTable | None = None
    slot: int = -1

    @property
    def own(self) -> BlockTable:
        """Its table, which it has while it is read or decoded."""
        assert self.table is not None, "a job that waits is neither read nor decoded"
        return self.table

    def told(self, logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
        """As many of the alternatives that a step told of as it asked for."""
        asked = self.asked.logprobs
        if asked is None or logprobs is None:
            return None
        top = dict(list(logprobs.top.items())[:asked])
        return TokenLogprobs(logprobs.id, logprobs.logprob, top)

    @property
    def guessing(self) -> bool:
        """Whether there is a guess of its next tokens, and it is time for it."""
        return self.lookup is not None and self.pace.ready and self.lookup.ready(self.ids)

    @property
    def position(self) -> int:
        """Where the token stands that its next step reads."""
        return self.prompt - 1 + self.submitted

    @property
    def outgrown(self) -> bool:
        """Whether its next step needs keys that turn otherwise than those it has."""
        return self.position >= self.own.kind


class Ahead(Struct, frozen=True, eq=False):
    """A step under way: its tokens, and whose they are; guesses [jobs, n] if it verifies them."""

    tokens: Pending[Array]
    jobs: list[Job]
    guesses: Array | None = None


class Jobs:
    """Requests between their arrival and their end.

    Args:
        device: where they are computed.

    Attributes:
        device: the same.
        running: those that are decoded; waiting: those that have not begun, or were stopped.
        reading: the one whose prompt is read.
        steps, reused_tokens, preemptions: as the Scheduler has them.
    """

    def __init__(self, device: Slots) -> None:
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.reading: Job | None = None
        self.steps: int = 0
        self.reused_tokens: int = 0
        self.preemptions: int = 0
        self.device: Slots = device
        self._free = list(range(device.count))
        self._ahead: list[Ahead] = []
        self._stuck = False  # there was no room for the first that waits, and nothing has ended

    def all(self) -> list[Job]:
        """All of them, those that are decoded first."""
        reading = [] if self.reading is None else [self.reading]
        return [*self.running, *reading, *self.waiting]

    @property
    def idle(self) -> bool:
        """Whether nothing is read or decoded."""
        return not self.running and self.reading is None and not self._ahead

    @uninterrupted
    def step(self) -> bool:
        """A part of a prompt, a token of each; then the tokens of the step before.

        Returns:
            Whether there is more to do.
        """
        guard()
        for job in self.all():
            if job.answer.ended:  # it was cancelled
                self._retire(job)
        ahead = list[Ahead]()
        self._reread()
        self._admit()
        try:
            self._read()
        except Exception as error:
            self._fail(error, [] if self.reading is None else [self.reading])
        guessing = self._guessing()
        # Guesses follow the last token, which a step under way still computes.
        awaited = any(job in guessing for some in self._ahead for job in some.jobs)
        verified = [] if awaited else self._verified(guessing)
        try:
            ahead += self._submitted(guessing)
        except Exception as error:
            self._fail(error, self.running)
        self._collect()
        self._ahead = self._verified(guessing) if awaited else verified
        self._collect()
        self._ahead = ahead
        return bool(ahead or self.all())

    def _reread(self) -> None:
        """Those that have outgrown their keys wait, and are read anew."""
        under_way = [job for ahead in self._ahead for job in ahead.jobs]
        for job in [j for j in self.running[::-1] if j.outgrown and j not in under_way]:
            self._leave(job)
            self.waiting.appendleft(job)
            self._stuck = False

    def _admit(self) -> None:
        """The first that waits is read next, if there is room for it."""
        while self.waiting and self.reading is None and len(self.running) < self.device.count:
            job = self.waiting[0]
            try:
                if (self._stuck and not self.idle) or not self._begin(job):
                    self._stuck = True
                    return
                self.reading = self.waiting.popleft()
                if not self._left:
                    self._join(job)
            except Exception as error:
                self._fail(error, [job])

    def _begin(self, job: Job) -> bool:
        """Give it blocks, those of others that begin so among them; whether there is room."""
        cache, leader, kind = self.device.cache, job.leader, self.device.past.kind(len(job.ids))
        past = leader.table if leader is not None and job.submitted == 0 else None
        if past is not None and past.kind == kind and len(past.tokens) >= len(job.ids) - 1:
            table = past.fork()
            table.truncate(len(job.ids) - 1)
        else:
            table = cache.sequence(kind)
            table.reuse(job.ids[:-1])
        start, end = len(table.tokens), len(job.ids)
        if table.missing(start, end) > cache.blocks.free:
            table.release()
            return False
        job.table = table  # which is given back where the request cannot begin
        cache.copy(table.reserve(start, end))
        self.reused_tokens += start
        return True

    @property
    def _left(self) -> Ids:
        """What is still to be read of the prompt that is read."""
        job = self.reading
        return [] if job is None else job.ids[len(job.own.tokens) : -1]

    def _read(self) -> None:
        """Submit the next part of a prompt; the last makes it one that is decoded."""
        job, left = self.reading, self._left
        if job is None:
            return
        if self.device.past.read(left, job.own) == len(left):
            self._join(job)

    def _join(self, job: Job) -> None:
        slot = min(self._free)
        self.device.occupy(slot, job.ids, job.prompt, job.asked.sampling, job.seed)
        self._free.remove(slot)
        job.slot = slot
        self.reading = None
        self.running.append(job)

    def _guessing(self) -> list[Job]:
        """Those whose next tokens are verified together: all that guess, if one has a guess now.

        None, where there is no room for all the guesses and for a token of each of the others.
        """
        most = self.device.context
        jobs, ends = self._going_on, GUESSES + 1
        some = [j for j in jobs if j.lookup and j.position + ends <= min(most, j.own.kind)]
        if not any(job.guessing for job in some):
            return []
        need = sum(_missing(job, 1 + GUESSES * (job in some)) for job in jobs)
        return some if need <= self.device.cache.blocks.free else []

    @property
    def _going_on(self) -> list[Job]:
        """Those that a step may be submitted of."""
        return [j for j in self.running if j.submitted < j.steps and not j.outgrown]

    def _verified(self, guessing: list[Job]) -> list[Ahead]:
        """Submit passes over guesses; where one fails, those that it is of end."""
        verified = list[Ahead]()
        for jobs in _alike(self._reserved(guessing, 1 + GUESSES)):
            try:
                guesses = np.concatenate([job.lookup.guess(job.ids) for job in jobs if job.lookup])
                rows = [(job.slot, job.position, job.own) for job in jobs]
                greedy = all(job.asked.sampling.greedy for job in jobs)
                self.steps += 1
                verified.append(Ahead(self.device.verify(rows, guesses, greedy), jobs, guesses))
            except Exception as error:
                self._fail(error, jobs)
        return verified

    def _submitted(self, guessing: Sequence[Job]) -> Iterator[Ahead]:
        """Submit a token of each other that goes on, with room for it."""
        device, free = self.device, self.device.cache.blocks
        while jobs := [job for job in self._going_on if job not in guessing]:
            if sum(_missing(job, 1) for job in jobs) <= free.free:
                break
            if self._ahead:
                self._collect()  # some may have ended
            else:
                self._preempt()
        for some in _alike(self._reserved(jobs, 1)):
            rows = [(job.slot, job.position, job.own) for job in some]
            told = max((job.asked.logprobs for job in some if job.asked.logprobs is not None),
                       default=None)  # fmt: skip
            greedy = all(job.asked.sampling.greedy for job in some)
            tokens = device.step(rows, greedy, MOST if told else told)
            for job in some:
                job.submitted += 1
            self.steps += 1
            yield Ahead(tokens, some)

    def _reserved(self, jobs: Sequence[Job], tokens: int) -> list[Job]:
        """Those that have places of their own for so many tokens; where that fails, one ends."""
        for job in jobs:
            try:
                if job.table is not None:
                    end = job.position + tokens
                    self.device.cache.copy(job.table.reserve(job.position, end))
            except Exception as error:
                self._fail(error, [job])
        return [job for job in jobs if job.table is not None]

    def _preempt(self) -> None:
        """The latest waits, and is read anew: no step of it is under way."""
        job = max(self.all()[: len(self.running) + bool(self.reading)], key=lambda j: j.order)
        self._leave(job)
        self.waiting.appendleft(job)
        self._stuck = True
        self.preemptions += 1

    def _collect(self) -> None:
        """The tokens of the steps that are under way."""
        under_way, self._ahead = self._ahead, []
        for ahead in under_way:
            self._take(ahead)

    def _take(self, ahead: Ahead) -> None:
        """The tokens of one of them."""
        try:
            step = ahead.tokens.result()
            tokens = tokens_of(step)
        except Exception as error:
            self._fail(error, ahead.jobs)
            return
        for i, job in enumerate(ahead.jobs):
            try:
                if ahead.guesses is not None:
                    self._add_verified(job, ahead.guesses[i], step[i])
                elif job.table is not None and not job.answer.ended:
                    self._add(job, int(tokens[i]), logprobs_of(step, i))
                    job.pace.stepped()
            except Exception as error:  # its text cannot be decoded, say
                self._fail(error, [job])

    def _add_verified(self, job: Job, guesses: Array, tokens: Array) -> None:
        """The tokens up to the first that was guessed otherwise; blocks behind it are given back.

        Args:
            guesses: [n]; tokens: [n + 1], what was chosen in their place and behind them.
        """
        right = int(np.argmax(np.append(guesses != tokens[:-1], True)))
        if job.lookup is not None and job.lookup.ready(job.ids):  # there was a guess
            job.answer.tally.guessed += len(guesses)
            job.answer.tally.accepted += right
            job.pace.verified(right)
        for token in tokens[: right + 1].tolist():
            if job.table is None or job.answer.ended:
                return
            job.submitted += 1
            self._add(job, token, None)
        if job.table is not None:
            job.table.truncate(len(job.table.tokens))

    def _add(self, job: Job, token: int, logprobs: TokenLogprobs | None) -> None:
        if token < 0:
            raise nan_error("submit: ", self.device.model, job.ids, self.device.cache.dtype)
        job.own.add(job.ids[-1:])
        job.ids.append(token)
        if job.answer.add(token, job.told(logprobs)):
            self._retire(job)
        elif len(job.ids) - job.prompt == job.steps:
            job.answer.end("context")
            self._retire(job)

    def _fail(self, error: Exception, jobs: Sequence[Job]) -> None:
        """These end with an error; all do, where the device was lost."""
        for job in self.all() if isinstance(error, DeviceLostError) else [*jobs]:
            job.answer.fail(error)
            self._retire(job)

    def abandon(self, error: Exception) -> None:
        """All end with an error that none of them is the cause of; no slot or block is taken."""
        jobs, cache = self.all(), self.device.cache
        self.running, self.waiting, self.reading = [], deque(), None
        self._free, self._ahead, self._stuck = list(range(self.device.count)), [], False
        cache.blocks = Blocks(cache.blocks.count)
        for job in jobs:
            job.table, job.slot = None, -1
            job.answer.fail(error)

    def _retire(self, job: Job) -> None:
        self._leave(job)
        if job in self.waiting:
            self.waiting.remove(job)
        self._stuck = False

    def _leave(self, job: Job) -> None:
        """Give back its slot and its blocks."""
        if job.table is not None:
            job.table.release()
            job.table = None
        if job.slot >= 0:
            self._free.append(job.slot)
            self.running.remove(job)
            job.slot = -1
        if job is self.reading:
            self.reading = None


def _missing(job: Job, tokens: int) -> int:
    """Blocks that it lacks for so many tokens more."""
    return job.own.missing(job.position, job.position + tokens)


def _alike(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs, by those whose keys turn alike."""
    kinds = sorted({job.own.kind for job in jobs})
    return [[job for job in jobs if job.own.kind == kind] for kind in kinds]
