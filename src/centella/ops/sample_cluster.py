"""sample of few long rows: the groups of a cluster have a sequence (sm_90 on).

Each group reads every eighth chunk of the logits once, and holds the distances in shared memory.
It counts them in histograms of its own and sends those to every group, so that all eight add up the
same numbers and go on alike. No group reads what another one changes: the first reads the step, and
sends it; a token is counted by the group that has its column.

What is sent is whole numbers, maxima and the first of equal columns: no result depends on how a row
is divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.op.variant import Variant
from centella.ops.hopper import MULTIPROCESSORS
from centella.ops.sample_row import BINS, LEVELS, NONE, Row, SampleAttrs, draw, launch, threads_of
from centella.specs import Caps

GROUPS = 8  # of a cluster: as many as any GPU with clusters runs
WIDTH = 4  # logits of a chunk
LONG = 16_384  # logits of a row that is worth a cluster
MANY = MULTIPROCESSORS // GROUPS  # sequences whose clusters a large GPU has room for
FIRST, LAST = 0, 1 + 2 * LEVELS  # barriers: for maxima, for each histogram, for what is chosen
REDUCTIONS = 3  # words of a thread
BESIDE = (2 * GROUPS + 2) * 2 * BINS + 256  # words of a group: histograms, and little else
ABSENT = -1.0  # the distance of what lies past the row's end


class Held(Struct, frozen=True):
    """What a group holds: chunks a thread."""

    chunks: int


class Share(Row):
    """A group's part of a sequence; the histograms and maxima are those of all of it.

    Two histograms that follow each other arrive in different memory: a group sends one only when it
    has all of the last, and so when all groups have added up the one before that.
    """

    def __init__(self, held: Held, *operands: Any) -> None:
        self._rank = lang.ptx.cluster_rank()
        self._chunks, self._threads = held.chunks, lang.workgroup_size()
        self._held = lang.shared(f32, self._chunks * self._threads * WIDTH)
        self._tops, self._scores = lang.shared(f32, GROUPS), lang.shared(f32, GROUPS)
        self._columns, self._sent_step = lang.shared(u32, GROUPS), lang.shared(u32, 1)
        self._arrived = lang.shared(u32, 2 * GROUPS * 2 * BINS)  # by level, group and part
        self._totals = lang.shared(u32, 2 * BINS)
        self._there = lang.ptx.Barriers(LAST + 1)
        with lang.if_(lang.local_id() == 0):
            words = (1, *(BINS,) * LEVELS, *(2 * BINS,) * LEVELS, 2)  # of each group
            for number in range(len(words)):
                self._there.init(number, 1)
            lang.ptx.init_fence()
            for number, each in enumerate(words):
                self._there.expect(number, 4 * (each * GROUPS + (number == FIRST)))
        lang.ptx.cluster_arrive(relaxed=True)
        lang.ptx.launch_dependents()
        lang.ptx.await_launches()
        super().__init__(lang.group_id() // GROUPS, *operands)

    def find_top(self) -> None:
        """Read this group's logits and hold their distances from the largest of all."""
        me, step = lang.local_id(), lang.var(0, u32)
        with lang.if_(self._rank == 0):
            step.set(self.read_step())
        firsts = [self._first(n) for n in range(self._chunks)]
        most = lang.var(-math.inf)
        for n, (first, values) in enumerate(zip(firsts, self.read(firsts, WIDTH), strict=True)):
            self._held.store(self._place(n), values)
            for e, value in enumerate(values):
                inside = lang.select(first + e < self.columns, value, -math.inf)
                most.set(lang.maximum(most.get(), inside))
        with lang.if_(self.penalised):
            most.set(self._penalise())
        own = lang.workgroup_reduce(most.get(), "max")
        lang.ptx.cluster_wait()  # all barriers are initialised
        with lang.if_(me < GROUPS):
            self._there.send(FIRST, self._tops, self._rank, [own], me)
            with lang.if_(self._rank == 0):
                self._there.send(FIRST, self._sent_step, 0, [step.get()], me)
        self._there.wait(FIRST, 0)
        self.step: Any = self._sent_step[0]
        self.top: Any = reduce(lang.maximum, [self._tops[n] for n in range(GROUPS)])
        for chunk in lang.range(lang.const(self._chunks, u32)):
            first, place = self._first(chunk), self._place(chunk)
            self._held.store(place, [
                lang.select(first + e < self.columns, self.below(logit), ABSENT)
                for e, logit in enumerate(self._held.load(place))
            ])  # fmt: skip

    def _penalise(self) -> Expr:
        """Take penalties off what is held; the largest that a thread has then."""
        most = lang.var(-math.inf)
        for n in lang.range(lang.const(self._chunks, u32)):
            first, place = self._first(n), self._place(n)
            logits = [lang.var(value) for value in self._held.load(place)]
            for e, logit in enumerate(logits):
                with lang.if_(first + e < self.columns):
                    logit.set(self.after_penalties(first + e, logit.get()))
                    most.set(lang.maximum(most.get(), logit.get()))
            self._held.store(place, [logit.get() for logit in logits])
        return most.get()

    def tokens(self) -> Iterator[tuple[Expr, Expr]]:
        """Column and distance of what this thread holds."""
        for n in lang.range(lang.const(self._chunks, u32)):
            first = self._first(n)
            for e, below in enumerate(self._held.load(self._place(n))):
                yield first + e, below

    def _place(self, n: Any) -> Any:
        """Where a thread holds its chunk n."""
        return (lang.local_id() + n * self._threads) * WIDTH

    def _first(self, n: Any) -> Any:
        """The first column of a thread's chunk n."""
        return (lang.local_id() + (self._rank + n * GROUPS) * self._threads) * WIDTH

    def gathered(self, parts: int, level: Operand) -> Any:
        """The histograms of all groups, added up."""
        number = level + (FIRST + 1 if parts == 1 else FIRST + 1 + LEVELS)
        memory = (level + parts) % 2 * (GROUPS * 2 * BINS)
        me, chunks = lang.local_id(), BINS // WIDTH
        lang.barrier()
        for n in lang.range(me, lang.const(parts * GROUPS * chunks, u32), self._threads):
            part = n // (GROUPS * chunks)
            first, rank = part * BINS + n % chunks * WIDTH, n // chunks % GROUPS
            words = [self.bins[first + e] for e in range(WIDTH)]
            to = memory + self._rank * (2 * BINS) + first
            self._there.send(number, self._arrived, to, words, rank)
        self._there.wait(number, 0)
        for n in lang.range(me, lang.const(parts * BINS, u32), self._threads):
            words = [self._arrived[memory + rank * (2 * BINS) + n] for rank in range(GROUPS)]
            self._totals[n] = reduce(lambda a, b: a + b, words)
        lang.barrier()
        return self._totals

    def first(self, best: Operand, column: Operand) -> tuple[Expr, Expr]:
        """As of a row."""
        highest, at = super().first(best, column)
        with lang.if_(lang.local_id() < GROUPS):
            for array, value in ((self._scores, highest), (self._columns, at)):
                self._there.send(LAST, array, self._rank, [value], lang.local_id())
        self._there.wait(LAST, 0)
        scores = [self._scores[n] for n in range(GROUPS)]
        highest = reduce(lang.maximum, scores)
        columns = [lang.select(score == highest, self._columns[n], NONE)
                   for n, score in enumerate(scores)]  # fmt: skip
        return highest, reduce(lang.minimum, columns)

    def leads(self) -> Expr:
        """A thread of the first group does."""
        return super().leads() & (self._rank == 0)

    def counts_of(self, column: Operand) -> Expr:
        """A thread of the group that has the column."""
        return super().leads() & (column // (WIDTH * self._threads) % GROUPS == self._rank)


def _sample_cluster(
    *, chunk: bool, held: Held, logits: Argument, settings: Argument, seeds: Argument,
    counts: Argument, steps: Argument, y: Argument, slots: Argument | None = None,
) -> None:  # fmt: skip
    """A cluster has a sequence."""
    lang.ptx.cluster(GROUPS)
    draw(Share(held, logits, settings, counts, steps, slots, chunk), seeds, y)


kernel: Kernel = Kernel(_sample_cluster, workgroup=256, name="sample_cluster")


def held_of(form: Form[SampleAttrs], caps: Caps) -> Held | None:
    """What a group holds of a row; None without clusters, or where it has no room for that."""
    if not caps.clusters:
        return None
    threads = threads_of(caps)
    chunks = -(-form.inputs[2].shape[1] // (GROUPS * threads * WIDTH))
    words = (chunks * WIDTH + REDUCTIONS) * threads + BESIDE
    return Held(chunks) if 4 * words <= caps.max_shared else None


def _launches(form: Form[SampleAttrs], held: Held, caps: Caps) -> Lowered:
    return launch(kernel, form, caps, GROUPS, (("held", held),))


def _preferred(form: Form[SampleAttrs], caps: Caps) -> bool:
    rows, columns = form.inputs[2].shape
    return caps.target == "ptx" and columns >= LONG and rows <= MANY


CLUSTER = Variant("cluster_rows", held_of, _launches, _preferred)
