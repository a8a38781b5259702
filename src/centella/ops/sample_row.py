"""What the kernels of `sample` share: a sequence's tokens, thresholds among them, the choice.

Thresholds by radix: three histograms of 256 bins for top_k, three for top_p. A `Row` says who has
which tokens, and how those who have some meet; `draw` is the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, i32, u32
from centella.emit.program import Call, Constants, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.ops.rows import chunked, load
from centella.specs import Caps

THREADS = 256
MANY = 1024  # on WIDE: a multiprocessor reads logits, and waits for each
WIDE = ("cuda", "nvidia")  # classes of adapters
DRAWN = ("temperature", "top_k", "top_p", "gap")
SETTINGS = (*DRAWN, "repetition", "frequency", "presence")
TOGETHER = 2  # chunks that a thread has under way
LEVELS = 3
BINS = 256  # of a histogram; a group has as many threads at least
BLOCK = 16  # bins that are added up first, and so many of these sums
SCALE = float(1 << 18)  # steps of a distance
MOST = (1 << 24) - 1  # of a distance: 64
FURTHEST = MOST / SCALE  # a distance that counts as what is further away, too
WEIGHT = float(1 << 22)  # steps of a weight
PART = 1024  # of a weight's step: sums are kept in two words
PROMPT = 1 << 31  # the bit of a count that says: the token is in the prompt
NONE = 0xFFFFFFFF
SMALL = 2.0**-10  # below it -log(1 - u) is summed up from its series


class Logits:
    """A row of logits, less what its settings and counts take off.

    Args:
        row: of the logits; chunk: they are read in chunks.
    """

    def __init__(
        self, row: Operand, logits: Argument, settings: Argument, counts: Argument,
        slots: Argument | None, chunk: bool,
    ) -> None:  # fmt: skip
        self.logits: Argument = logits
        self.counts: Argument = counts
        self.row: Operand = row
        self.chunk: bool = chunk
        self.slot: Any = row if slots is None else lang.bitcast(slots[row], u32)
        self.columns: Any = lang.parameter("columns", u32)
        penalties = (settings[self.slot, j] for j in range(len(DRAWN), len(SETTINGS)))
        self.repetition: Expr = next(penalties)
        self.frequency: Expr = next(penalties)
        self.presence: Expr = next(penalties)
        rate = (self.frequency != 0.0) | (self.presence != 0.0)
        self.penalised: Any = (self.repetition != 1.0) | rate

    def read(self, columns: list[Expr], width: int) -> list[list[Expr]]:
        """Logits of chunks that begin at columns; those past the row's end are some of its own."""
        last = (self.columns - 1) // width * width
        firsts = [lang.minimum(column, last) for column in columns]
        return [load(self.logits, self.row, n, self.columns, width, self.chunk) for n in firsts]

    def each_from(self, first: Any, count: int) -> Iterator[tuple[Expr, Expr]]:
        """Column and logit, after penalties, of `count` columns, as far as the row has them."""
        width = count if self.chunk else 1
        firsts = [first + n for n in range(0, count, width)]
        for column, values in zip(firsts, self.read(firsts, width), strict=True):
            yield from self.each_of(column, values)

    def each_of(self, first: Any, values: list[Expr]) -> Iterator[tuple[Expr, Expr]]:
        """Column and logit, after penalties, of logits that were read from a column on."""
        for e, value in enumerate(values):
            with lang.if_(first + e < self.columns):
                logit = lang.var(value)
                with lang.if_(self.penalised):
                    logit.set(self.after_penalties(first + e, value))
                yield first + e, logit.get()

    def after_penalties(self, i: Operand, logit: Operand) -> Expr:
        """The logit of a column less its penalties."""
        count = lang.bitcast(self.counts[self.slot, i], u32)
        times = lang.cast(count & (PROMPT - 1), f32)
        less = lang.select(logit > 0.0, logit / self.repetition, logit * self.repetition)
        less = lang.select(count != 0, less, logit) - self.frequency * times
        return less - lang.select(times > 0.0, self.presence, 0.0)


class Row(Logits):
    """What the threads of a group know of their sequence, all of which they have."""

    def __init__(
        self, row: Operand, logits: Argument, settings: Argument, counts: Argument,
        steps: Argument, slots: Argument | None, chunk: bool,
    ) -> None:  # fmt: skip
        super().__init__(row, logits, settings, counts, slots, chunk)
        self.steps: Argument = steps
        drawn = (settings[self.slot, j] for j in range(len(DRAWN)))
        temperature = next(drawn)
        self.top_k: Expr = next(drawn)
        self.top_p: Expr = next(drawn)
        self.gap: Expr = next(drawn)
        self.random: Any = temperature > 0.0
        self.counted: Any = self.random & (self.top_k > 0.0)
        self.weighed: Any = self.random & (self.top_p < 1.0)
        self.cold: Any = 1.0 / lang.select(self.random, temperature, 1.0)
        self.top: Any = None
        self.step: Any = None
        self.bins: Any = lang.shared(u32, 2 * BINS)  # empty between histograms
        self._blocks, self._chosen = lang.shared(u32, 2 * BINS // BLOCK), lang.shared(u32, 4)
        self.empty(2)

    # -- who has which tokens, and how they meet ---------------------------------------------------

    def find_top(self) -> None:
        """Find the largest logit, and the step; histograms are empty after."""
        self.step = self.read_step()
        most = lang.var(-math.inf)
        for _, logit in self._each():
            most.set(lang.maximum(most.get(), logit))
        self.top = lang.workgroup_reduce(most.get(), "max")

    def tokens(self) -> Iterator[tuple[Expr, Expr]]:
        """Column and distance of the tokens that a thread has; the body is traced often."""
        for column, logit in self._each():
            yield column, self.below(logit)

    def gathered(self, parts: int, level: Operand) -> Any:
        """The histograms of all of the sequence, once all threads have counted."""
        lang.barrier()
        return self.bins

    def first(self, best: Operand, column: Operand) -> tuple[Expr, Expr]:
        """Of the best scores of each thread the highest; of equal ones the first column."""
        highest = lang.workgroup_reduce(best, "max")
        at = lang.workgroup_reduce(lang.select(best == highest, column, NONE), "min")
        return highest, at

    def leads(self) -> Expr:
        """Whether this thread is the one that writes the token and the step."""
        return lang.local_id() == 0

    def counts_of(self, column: Operand) -> Expr:
        """Whether this thread is the one that writes the count of a column."""
        return lang.local_id() == 0

    # -- what a token is ---------------------------------------------------------------------------

    def read_step(self) -> Expr:
        """The step of the sequence, from memory."""
        return lang.bitcast(self.steps[self.slot], u32)

    def _each(self) -> Iterator[tuple[Expr, Expr]]:
        """Column and logit, after its penalties, of what a thread has, from memory."""
        width = 4 if self.chunk else 1
        stride = lang.workgroup_size() * width
        for start in lang.range(lang.local_id() * width, self.columns, stride * TOGETHER):
            firsts = [start + n * stride for n in range(TOGETHER)]
            for first, values in zip(firsts, self.read(firsts, width), strict=True):
                yield from self.each_of(first, values)

    def below(self, logit: Operand) -> Expr:
        """How far a logit is below the largest, in temperatures."""
        return lang.select(logit == self.top, 0.0, (self.top - logit) * self.cold)

    # -- thresholds --------------------------------------------------------------------------------

    def empty(self, parts: int) -> None:
        """Empty so many histograms."""
        for n in lang.range(lang.local_id(), lang.const(parts * BINS, u32), lang.workgroup_size()):
            self.bins[n] = lang.const(0, u32)

    def limit(
        self, most: Operand, share: Operand, parts: int, levels: int = LEVELS,
        tokens: Callable[[], Iterator[tuple[Expr, Expr]]] | None = None,
    ) -> Expr:  # fmt: skip
        """The largest distance that is kept, in steps and at most `most`: until a share is reached.

        Args:
            share: a number of tokens; with two parts, a part of the weight of all in the limit.
            parts: histograms: of tokens; or of the lower and of the upper parts of weights.
            levels: how many of a distance's three groups of eight bits are searched, from the
                highest on; the others are all ones in the result.
            tokens: numbers and distances that are counted; None: those of the row.
        """
        prefix, *sums = lang.vars(u32, 1 + parts)
        target = lang.var(share)
        for level in lang.range(lang.const(levels, u32)):
            shift = 16 - 8 * level
            begin = prefix.get() << (shift + 8)
            end = lang.minimum((prefix.get() + 1) << (shift + 8), most + 1)
            self._count(tokens or self.tokens, distance(begin), distance(end), shift, parts)
            totals = self.gathered(parts, level)
            self._choose(totals, level, sums, target, share)
            prefix.set((prefix.get() << 8) | self._chosen[0])
            for n, v in enumerate(sums):
                v.set(self._chosen[1 + n])
        lower = 8 * (LEVELS - levels)
        return lang.minimum((prefix.get() << lower) | ((1 << lower) - 1), most)

    def _count(
        self, tokens: Callable[[], Iterator[tuple[Expr, Expr]]], begin: Operand, end: Operand,
        shift: Any, parts: int,
    ) -> None:  # fmt: skip
        """Add tokens of some distances to the histograms, by eight bits of the distance."""
        for _, below in tokens():
            with lang.if_(within(below, begin, end)):
                at = (steps_of(below) >> shift) & (BINS - 1)
                if parts == 1:
                    lang.atomic_add(self.bins, at, 1)
                else:
                    weight = lang.cast(lang.exp(-below) * WEIGHT + 0.5, u32)
                    lang.atomic_add(self.bins, at, weight % PART)
                    lang.atomic_add(self.bins, BINS + at, weight // PART)

    def _choose(
        self, totals: Any, level: Operand, sums: list[Any], target: Any, share: Operand
    ) -> None:
        """Find the bin that reaches the target, and the sums before it; empty the histograms.

        A thread has a bin. It adds up those before it in its block, and the blocks before that.
        """
        me, parts, blocks = lang.local_id(), len(sums), BINS // BLOCK
        before, own = lang.vars(u32, 2, parts)
        with lang.if_(me < BINS):
            for part in range(parts):
                bin_before, block = _sums(totals, part * BINS + me // BLOCK * BLOCK, me % BLOCK)
                before[part].set(sums[part].get() + bin_before)
                own[part].set(totals[part * BINS + me])
                with lang.if_(me % BLOCK == 0):
                    self._blocks[part * blocks + me // BLOCK] = block
        with lang.if_(me == 0):  # where rounding leaves none: the last
            for n, last in enumerate([lang.const(BINS - 1, u32), *(v.get() for v in sums)]):
                self._chosen[n] = last
        lang.barrier()
        self.empty(parts)
        with lang.if_(me < BINS):
            pairs = [_sums(self._blocks, part * blocks, me // BLOCK) for part in range(parts)]
            if parts == 2:
                with lang.if_(level == 0):
                    target.set(lang.maximum(_number([whole for _, whole in pairs]) * share, 1.0))
            start = [v.get() + pair[0] for v, pair in zip(before, pairs, strict=True)]
            end = _number([v + n.get() for v, n in zip(start, own, strict=True)])
            with lang.if_((_number(start) < target.get()) & (end >= target.get())):
                for n, value in enumerate([me, *start]):
                    self._chosen[n] = value
        lang.barrier()


def _sums(words: Any, first: Operand | int, end: Operand) -> tuple[Expr, Expr]:
    """Of a block of words from one on: the sum of those before the word `end` of it, and of all."""
    before, whole = lang.vars(u32, 2)
    for n in lang.range(lang.const(BLOCK, u32)):
        word = words[n + first]
        before.set(before.get() + lang.select(n < end, word, 0))
        whole.set(whole.get() + word)
    return before.get(), whole.get()


def _number(words: list[Expr]) -> Expr:
    """A sum as f32."""
    low, *high = (lang.cast(w, f32) for w in words)
    return high[0] * float(PART) + low if high else low


def steps_of(below: Operand) -> Expr:
    """A distance as a whole number."""
    return lang.cast(lang.minimum(below, FURTHEST) * SCALE, u32)


def distance(steps: Operand) -> Expr:
    """What so many steps are."""
    return lang.cast(steps, f32) * (1.0 / SCALE)


def within(below: Operand, begin: Operand | float, end: Operand) -> Expr:
    """Whether the steps of a distance are those of `begin` or more, and less than those of `end`.

    Both are whole steps, so that the distance itself says it.
    """
    return (below >= begin) & (lang.minimum(below, FURTHEST) < end)


def traced_noise(i: Any, step: Any, seed: Any) -> Expr:
    """log(-log(1 - u)) of a hash u between 0 and 1."""
    x, y, z = (v * 1664525 + 1013904223 for v in (i, step, seed))
    x = x + y * z
    y = y + z * x
    z = z + x * y
    x, y, z = (v ^ (v >> 16) for v in (x, y, z))
    x = x + y * z
    u = lang.cast(x, f32) * 2.0**-32 + 2.0**-33
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return lang.log(lang.select(u < SMALL, series, -lang.log(1.0 - u)))


def draw(row: Row, seeds: Argument, y: Argument) -> None:
    """The largest logit, thresholds where there are some, the choice."""
    seed = lang.bitcast(seeds[row.slot], u32)
    row.find_top()

    modes = lang.workgroup_uniform(lang.select(row.counted, 1, 0) | lang.select(row.weighed, 2, 0))
    most = lang.var(MOST, u32)
    with lang.if_((modes & 1) != 0):
        most.set(row.limit(most.get(), row.top_k, 1))
    with lang.if_((modes & 2) != 0):
        most.set(row.limit(most.get(), row.top_p, 2))
    with lang.if_(row.random):
        most.set(lang.minimum(most.get(), steps_of(row.gap)))
    end = distance(most.get() + 1)

    best, column = lang.var(-math.inf), lang.var(NONE, u32)
    for i, below in row.tokens():
        with lang.if_(within(below, 0.0, end)):
            score = lang.var(-below)
            with lang.if_(row.random):
                score.set(score.get() - traced_noise(i, row.step, seed))
            equal = (score.get() == best.get()) & (i < column.get())
            with lang.if_((score.get() > best.get()) | equal):
                best.set(score.get())
                column.set(i)
    _, at = row.first(best.get(), column.get())
    at = lang.select(lang.isnan(row.top), NONE, at)
    with lang.if_(row.leads()):
        y[row.row] = lang.bitcast(at, i32)
        row.steps[row.slot] = lang.bitcast(row.step + 1, i32)
    with lang.if_((at != NONE) & row.counts_of(at)):
        row.counts[row.slot, at] = row.counts[row.slot, at] + 1


# -- the launch ------------------------------------------------------------------------------------


class SampleAttrs(Struct, frozen=True):
    """The kernel, where one is forced."""

    variant: str | None = None


def threads_of(caps: Caps) -> int:
    """Threads of a group."""
    return min(MANY if caps.adapter_class in WIDE else THREADS, caps.max_workgroup)


def launch(
    kernel: Kernel, form: Form[SampleAttrs], caps: Caps, groups: int = 1, more: Constants = (),
    read: Mapping[str, Ref] = MappingProxyType({}),
) -> Lowered:  # fmt: skip
    """One launch, in which so many groups have a sequence; `read`: rows that it reads beside."""
    counts, steps, logits, settings, seeds, *slots = form.inputs
    refs = (Ref(2, logits), Ref(3, settings), Ref(4, seeds), *(Ref(5, s) for s in slots),
            *read.values(), Ref(len(form.inputs) + 2, form.outputs[2]), Ref(0, counts),
            Ref(1, steps))  # fmt: skip
    reads = {"logits": 2, "settings": 2, "seeds": 1, **({"slots": 1} if slots else {}),
             **dict.fromkeys(read, 1)}  # fmt: skip
    params = signature(reads, {"y": 1}, {"counts": 2, "steps": 1})
    rows, columns = logits.shape
    call = Call(kernel, refs, (("columns", columns),), (("chunk", chunked(logits)), *more),
                rows * groups, threads_of(caps), params)  # fmt: skip
    return Lowered((call,))
