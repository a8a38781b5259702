"""sample: the next token of each sequence, chosen on the device from its logits.

    l_i   the logit; with penalties: of a token seen before l / r (l r below 0), less
          frequency * times - presence
    keep  top_k, then top_p of what is left, then min_p, over softmax(l / t)
    y     argmax over keep of l_i / t - log(-log(u_i)), or of l_i at temperature 0

The last line draws from the softmax (Gumbel 1954). u_i is a hash of index, step and seed (pcg3d:
Jarzynski and Olano 2020), so that a token depends on logits, settings, seed and step alone. How far
a logit is below the largest counts in steps of 2^-18, up to 64, and weights in steps of 2^-22:
sums are whole numbers, equal on every device. Equal logits are kept or dropped together, infinite
ones too. A row with a NaN gives -1. With slots, row i has the counts, step, settings and seed of
slot slots[i]; no two rows have one slot.

One group a sequence; thresholds by radix: three histograms of 256 bins for top_k, three for top_p.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, i32, u32
from centella.emit.program import Call, HostProgram, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, NoAttrs, Op, Out
from centella.ops.rows import chunked
from centella.specs import Caps, Spec

THREADS = 256
MANY = 1024  # on CUDA: one multiprocessor reads a sequence's logits, and waits for each
TOGETHER = 2  # chunks that a thread has under way
SETTINGS = ("temperature", "top_k", "top_p", "gap", "repetition", "frequency", "presence")
BINS = 256
SCALE = float(1 << 18)  # steps of a distance
MOST = (1 << 24) - 1  # of a distance: 64
WEIGHT = float(1 << 22)  # steps of a weight
PART = 1024  # of a weight's step: sums are kept in two words
PROMPT = 1 << 31  # the bit of a count that says: the token is in the prompt
NONE = 0xFFFFFFFF
SMALL = 2.0**-10  # below it -log(1 - u) is summed up from its series


class _Row:
    """What the threads of a group know of their sequence."""

    def __init__(self, logits: Any, settings: Any, counts: Any, slots: Any, chunk: bool) -> None:
        self.logits, self.counts, self.row = logits, counts, lang.group_id()
        self.slot = (
            self.row
            if slots is None
            else lang.workgroup_uniform(lang.bitcast(slots[self.row], u32))
        )
        self.columns, self.chunk = lang.parameter("columns", u32), chunk
        numbers = [lang.workgroup_uniform(settings[self.slot, j]) for j in range(len(SETTINGS))]
        (self.temperature, self.top_k, self.top_p, self.gap, self.repetition, self.frequency,
         self.presence) = numbers  # fmt: skip
        self.penalised = (self.repetition != 1.0) | (self.frequency != 0.0) | (self.presence != 0.0)
        self.random = self.temperature > 0.0
        warm = lang.select(self.random, self.temperature, 1.0)
        self.cold = 1.0 / warm
        self.top: Any = None

    def each(self) -> Iterator[tuple[Expr, Expr]]:
        """Column and logit, after its penalties, of what a thread has; the body is traced often."""
        width = 4 if self.chunk else 1
        stride = lang.workgroup_size() * width
        last = (self.columns - 1) // width * width
        for start in lang.range(lang.local_id() * width, self.columns, stride * TOGETHER):
            firsts = [start + n * stride for n in range(TOGETHER)]
            loaded = [self._load(lang.minimum(first, last)) for first in firsts]
            for first, values in zip(firsts, loaded, strict=True):
                for e, value in enumerate(values):
                    with lang.if_(first + e < self.columns):
                        yield first + e, self._penalised(first + e, value)

    def _load(self, first: Any) -> list[Expr]:
        if self.chunk:
            return self.logits.load(self.row, first)  # type: ignore[no-any-return]  # traced
        return [self.logits[self.row, first]]

    def _penalised(self, i: Any, logit: Operand) -> Expr:
        value = lang.var(logit)
        with lang.if_(self.penalised):
            count = lang.bitcast(self.counts[self.slot, i], u32)
            times = lang.cast(count & (PROMPT - 1), f32)
            less = lang.select(logit > 0.0, logit / self.repetition, logit * self.repetition)
            less = lang.select(count != 0, less, logit) - self.frequency * times
            value.set(less - lang.select(times > 0.0, self.presence, 0.0))
        return value.get()

    def below(self, logit: Operand) -> Expr:
        """How far a logit is below the largest, in temperatures."""
        return lang.select(logit == self.top, 0.0, (self.top - logit) * self.cold)

    def steps(self, below: Operand) -> Expr:
        """A distance as a whole number."""
        return lang.cast(lang.minimum(below * SCALE, float(MOST)), u32)


def _limit(row: _Row, limit: Any, share: Any, bins: list[Any], chosen: Any) -> Any:
    """The largest distance that is kept, at most `limit`: until the share is reached.

    Args:
        share: a number of tokens; with two histograms, a part of the weight of all in the limit.
        bins: histograms: of tokens; or of the lower and of the upper parts of weights.
        chosen: shared words that the thread with the bin writes: which, and the sums before it.
    """
    weighed, me = len(bins) == 2, lang.local_id()
    prefix, *sums = (lang.var(0, u32, uniform=True) for _ in range(1 + len(bins)))
    target = lang.var(share, uniform=True)
    for level in range(3):
        shift = 16 - 8 * level
        for j in lang.range(me, lang.const(BINS, u32), lang.workgroup_size()):
            for each in bins:
                each[j] = lang.const(0, u32)
        lang.barrier()
        for _, logit in row.each():
            below = row.below(logit)
            steps = row.steps(below)
            mine = steps <= limit
            if level:
                mine = mine & ((steps >> (shift + 8)) == prefix.get())
            with lang.if_(mine):
                at = (steps >> shift) & (BINS - 1)
                weight = lang.cast(lang.exp(-below) * WEIGHT + 0.5, u32) if weighed else None
                parts = [lang.const(1, u32)] if weight is None else [weight % PART, weight // PART]
                for each, part in zip(bins, parts, strict=True):
                    lang.atomic_add(each, at, part)
        if not level and weighed:
            lang.barrier()
            total = _number(_before(bins, lang.const(BINS, u32)))
            target.set(lang.workgroup_uniform(lang.maximum(total * share, 1.0)))
        with lang.if_(me == 0):  # where rounding leaves none: the last
            for n, last in enumerate([lang.const(BINS - 1, u32), *(v.get() for v in sums)]):
                chosen[n] = last
        lang.barrier()
        for j in lang.range(me, lang.const(BINS, u32), lang.workgroup_size()):
            start = [v.get() + b for v, b in zip(sums, _before(bins, j), strict=True)]
            end = _number([v + each[j] for v, each in zip(start, bins, strict=True)])
            with lang.if_((_number(start) < target.get()) & (end >= target.get())):
                for n, value in enumerate([j, *start]):
                    chosen[n] = value
        lang.barrier()
        prefix.set((prefix.get() << 8) | lang.workgroup_uniform(chosen[0]))
        for n, v in enumerate(sums):
            v.set(lang.workgroup_uniform(chosen[1 + n]))
    return lang.minimum(prefix.get(), limit)


def _before(bins: list[Expr], end: Operand) -> list[Expr]:
    """The sum of each histogram before a bin."""
    sums = lang.vars(u32, len(bins), init=0)
    for j in lang.range(lang.const(0, u32), end):
        for v, each in zip(sums, bins, strict=True):
            v.set(v.get() + each[j])
    return [v.get() for v in sums]


def _number(words: list[Expr]) -> Expr:
    """A sum as f32."""
    low, *high = (lang.cast(w, f32) for w in words)
    return high[0] * float(PART) + low if high else low


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


def _sample(
    *, chunk: bool, logits: Argument, settings: Argument, seeds: Argument, counts: Argument,
    steps: Argument, y: Argument, slots: Argument | None = None,
) -> None:  # fmt: skip
    """A group has a sequence: the largest logit, thresholds where there are some, the choice."""
    row = _Row(logits, settings, counts, slots, chunk)
    seed = lang.workgroup_uniform(lang.bitcast(seeds[row.slot], u32))
    step = lang.workgroup_uniform(lang.bitcast(steps[row.slot], u32))
    most = lang.var(-math.inf)
    for _, logit in row.each():
        most.set(lang.maximum(most.get(), logit))
    row.top = lang.workgroup_uniform(lang.workgroup_reduce(most.get(), "max"))

    limit = lang.var(MOST, u32, uniform=True)
    bins, more, chosen = (lang.shared(u32, n) for n in (BINS, BINS, 4))
    with lang.if_(row.random & (row.top_k > 0.0)):
        limit.set(_limit(row, limit.get(), row.top_k, [bins], chosen))
    with lang.if_(row.random & (row.top_p < 1.0)):
        limit.set(_limit(row, limit.get(), row.top_p, [bins, more], chosen))
    with lang.if_(row.random):
        limit.set(lang.minimum(limit.get(), row.steps(row.gap)))

    best, column = lang.var(-math.inf), lang.var(NONE, u32)
    for i, logit in row.each():
        below = row.below(logit)
        with lang.if_(row.steps(below) <= limit.get()):
            score = lang.var(-below)
            with lang.if_(row.random):
                score.set(score.get() - traced_noise(i, step, seed))
            with lang.if_((score.get() > best.get()) | (column.get() == NONE)):
                best.set(score.get())
                column.set(i)
    first = lang.workgroup_reduce(best.get(), "max")
    at = lang.workgroup_reduce(lang.select(best.get() == first, column.get(), NONE), "min")
    at = lang.select(lang.isnan(row.top), NONE, at)
    with lang.if_(lang.local_id() == 0):
        y[row.row] = lang.bitcast(at, i32)
        steps[row.slot] = lang.bitcast(step + 1, i32)
        with lang.if_(at != NONE):
            counts[row.slot, at] = counts[row.slot, at] + 1


kernel: Kernel = Kernel(_sample, workgroup=THREADS, name="sample")


def rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """Counts [n, v], steps [n], logits f32 [b, v], settings f32 [n, 7], seeds [n], slots [b]."""
    counts, steps, logits, settings, seeds, *slots = specs
    if len(logits.shape) != 2 or not logits.shape[1]:
        raise ShapeError(f"sample: expected logits [batch, vocab], got {list(logits.shape)}")
    b, v = logits.shape
    n = steps.size if slots else b
    wanted = ((counts, (n, v), i32), (steps, (n,), i32), (logits, (b, v), f32),
              (settings, (n, len(SETTINGS)), f32), (seeds, (n,), i32),
              *((each, (b,), i32) for each in slots))  # fmt: skip
    names = ("counts", "steps", "logits", "settings", "seeds", "slots")
    for name, (spec, shape, dtype) in zip(names, wanted, strict=False):
        if spec.shape != shape:
            raise ShapeError(f"sample: expected {name} {list(shape)}, got {list(spec.shape)}")
        if spec.dtype is not dtype:
            raise DTypeError(f"sample: expected {name} of {dtype.name}, got {spec.dtype.name}")
    return ((n, v), i32), ((n,), i32), ((b,), i32)


# -- the NumPy formula ----------------------------------------------------------------------------


def penalised(logits: Array, counts: Array, settings: Array) -> Array:
    """The logits of a sequence after its penalties."""
    repetition, frequency, presence = settings[4:]
    words = counts.astype(np.uint32)
    times = (words & np.uint32(PROMPT - 1)).astype(np.float32)
    less = np.where(logits > 0, logits / repetition, logits * repetition)
    less = np.where(words != 0, less, logits) - frequency * times
    result: Array = less - np.where(times > 0, presence, np.float32(0))
    return result


def choose(logits: Array, settings: Array, step: int, seed: int) -> int:
    """The token of a sequence whose penalties are done; -1 where a logit is NaN."""
    temperature, top_k, top_p, gap = settings[:4]
    top = logits.max()
    if np.isnan(top):
        return -1
    if not temperature > 0:
        return int(logits.argmax())
    with np.errstate(invalid="ignore"):
        distances = (top - logits) * (np.float32(1) / temperature)
    below = np.where(logits == top, np.float32(0), distances)
    steps = np.minimum(below * np.float32(SCALE), np.float32(MOST)).astype(np.int64)
    limit = MOST
    if top_k > 0:
        k = min(math.ceil(top_k), len(steps))
        limit = int(np.partition(steps, k - 1)[k - 1])
    if top_p < 1:
        kept = np.sort(steps[steps <= limit])
        order = np.argsort(steps, kind="stable")[: len(kept)]
        weights = (np.exp(-below) * np.float32(WEIGHT) + np.float32(0.5)).astype(np.int64)[order]
        sums = np.cumsum(weights)
        target = max(np.float32(top_p) * np.float32(sums[-1]), np.float32(1))
        at = int(np.searchsorted(sums, target))
        limit = int(kept[min(at, len(kept) - 1)])
    limit = min(limit, int(min(gap * np.float32(SCALE), np.float32(MOST))))
    score = np.where(steps <= limit, -below - noise(len(logits), step, seed), -np.inf)
    return int(score.argmax())


def noise(columns: int, step: int, seed: int) -> Array:
    """What `traced_noise` is for every column."""
    with np.errstate(over="ignore"):
        i = np.arange(columns, dtype=np.uint32)
        x, y, z = (
            v * np.uint32(1664525) + np.uint32(1013904223)
            for v in (i, np.full_like(i, step & NONE), np.full_like(i, seed & NONE))
        )
        x = x + y * z
        y = y + z * x
        z = z + x * y
        x, y, z = (v ^ (v >> np.uint32(16)) for v in (x, y, z))
        x = x + y * z
    u = x.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    series = u * (1 + u * (np.float32(0.5) + u * np.float32(1 / 3)))
    with np.errstate(divide="ignore"):
        result: Array = np.log(np.where(u < np.float32(SMALL), series, -np.log(1 - u)))
    return result


def reference(
    counts: Any, steps: Any, logits: Any, settings: Any, seeds: Any, slots: Any = None
) -> Any:
    """The NumPy formula, in float32 whatever the arrays: changes `counts` and `steps`."""
    logits, settings = logits.astype(np.float32), settings.astype(np.float32)
    tokens = np.empty(len(logits), np.int32)
    for row, values in enumerate(logits):
        slot = row if slots is None else slots[row]
        with np.errstate(all="ignore"):
            if (settings[slot, 4:] != (1, 0, 0)).any():
                values = penalised(values, counts[slot], settings[slot])
            token = choose(values, settings[slot], int(steps[slot]), int(seeds[slot]))
        tokens[row] = token
        steps[slot] += 1
        if token >= 0:
            counts[slot, token] += 1
    return counts, steps, tokens


def host(form: Form[NoAttrs]) -> HostProgram:
    """On the CPU."""

    def call(arrays: list[Array], outs: list[Array]) -> None:
        outs[2][...] = reference(*arrays)[2]

    return HostProgram("numpy:sample", "sample", call)


def lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """One launch."""
    counts, steps, logits, settings, seeds, *slots = form.inputs
    refs = (Ref(2, logits), Ref(3, settings), Ref(4, seeds), *(Ref(5, s) for s in slots),
            Ref(len(form.inputs) + 2, form.outputs[2]), Ref(0, counts), Ref(1, steps))  # fmt: skip
    reads = {"logits": 2, "settings": 2, "seeds": 1, **({"slots": 1} if slots else {})}
    params = signature(reads, {"y": 1}, {"counts": 2, "steps": 1})
    scalars = (("columns", logits.shape[1]),)
    threads = min(MANY if caps.shuffles else THREADS, caps.max_workgroup)
    constants = (("chunk", chunked(logits)),)
    call = Call(kernel, refs, scalars, constants, logits.shape[0], threads, signature=params)
    return Lowered((call,))


def takes(index: int, spec: Spec) -> bool:
    """Logits and settings: rows of neighbouring elements."""
    return spec.unit_rows


def axes_of(form: Form[NoAttrs]) -> Axes:
    """Sequences; where they have slots, those that a part has are not known."""
    if len(form.inputs) > 5:
        return axes(["..", ".", "..", "..", ".", "."], ["..", ".", "."])
    return axes(["b.", "b", "b.", "b.", "b"], ["b.", "b", "b"])


SAMPLE = Op("sample", rule, reference, lower, takes, mutates=(0, 1), host=host, axes=axes_of,
            doc=__doc__ or "")  # fmt: skip
