"""sample of long rows in two launches: the largest logit of each slice, then slices that matter.

One group a sequence would read all logits for each histogram, and a multiprocessor reads slowly. So
first many groups find the largest logit of each slice of a row. Of the top k tokens none is smaller
than the k-th largest of these maxima, and with top_p none counts whose weight rounds to 0: the
second launch, a group a sequence, never reads the other slices. Its thresholds are those of
`sample_row.py`, over the tokens of the slices that are left, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr
from centella.op.op import Form, Lowered
from centella.op.variant import Variant
from centella.ops.rows import chunked
from centella.ops.sample_row import (
    MOST,
    SCALE,
    TOGETHER,
    Logits,
    Row,
    SampleAttrs,
    distance,
    draw,
    launch,
    steps_of,
    within,
)
from centella.specs import Caps, Spec

LONG = 16_384  # logits of a row that is worth a second launch
WIDTH = 4  # logits that a thread of the first launch has
LANES = 32  # its threads for a slice, at least
THREADS = 256  # of its groups
MOST_SLICES = 2048  # of a row: their numbers are in workgroup memory
COARSE = 2  # levels of the distance by which slices are chosen: a few more of them are cheaper
WEIGHTLESS = 16.0  # a distance at which exp(-distance) rounds to no step of a weight


class Slices(Struct, frozen=True):
    """How a row is cut: threads of the first launch that have a slice, and slices of a row."""

    lanes: int
    count: int

    @property
    def groups(self) -> int:
        """Groups of the first launch that have a row."""
        return -(-self.count * self.lanes // THREADS)


def _slice_tops(
    *, chunk: bool, slices: Slices, logits: Argument, settings: Argument, counts: Argument,
    tops: Argument, slots: Argument | None = None,
) -> None:  # fmt: skip
    """The largest logit of each slice, after penalties."""
    group, me, lanes = lang.group_id(), lang.local_id(), slices.lanes
    number = group % slices.groups
    row = Logits(group // slices.groups, logits, settings, counts, slots, chunk)
    most = lang.var(-math.inf)
    for _, logit in row.each_from((number * THREADS + me) * WIDTH, WIDTH):
        most.set(lang.maximum(most.get(), logit))
    each = lang.shared(f32, THREADS)
    each[me] = most.get()
    lang.barrier()
    at = number * (THREADS // lanes) + me
    with lang.if_((me < THREADS // lanes) & (at < slices.count)):
        chunks = [each.load(me * lanes + n) for n in range(0, lanes, WIDTH)]
        largest = reduce(lang.maximum, [v for chunk in chunks for v in chunk])
        tops[row.row * slices.count + at] = largest


class Sliced(Row):
    """A sequence, of which the slices that matter are read."""

    def __init__(self, slices: Slices, tops: Argument, *operands: Any) -> None:
        super().__init__(*operands)
        self._slices, self._tops = slices, tops
        self._left = lang.shared(u32, slices.count)  # numbers of slices, in any order
        self._size = lang.shared(u32, 1)

    def find_top(self) -> None:
        """Find the largest logit, the step, and the slices that matter.

        The reduction's barriers are before the list, that of `workgroup_uniform`, with which `draw`
        goes on, is behind it.
        """
        self.step: Any = self.read_step()
        with lang.if_(lang.local_id() == 0):
            self._size[0] = lang.const(0, u32)
        most = lang.var(-math.inf)
        for _, top in self._maxima():
            most.set(lang.maximum(most.get(), top))
        self.top: Any = lang.workgroup_reduce(most.get(), "max")
        end = distance(self._last() + 1)
        for number, top in self._maxima():
            with lang.if_(within(self.below(top), 0.0, end)):
                self._left[lang.atomic_add(self._size, 0, 1)] = number

    def _last(self) -> Expr:
        """The largest distance of a slice that may have the token, in steps."""
        most = lang.var(lang.select(self.random, lang.const(MOST, u32), lang.const(0, u32)))
        with lang.if_(lang.workgroup_uniform(lang.select(self.counted, 1, 0)) != 0):
            most.set(self.limit(most.get(), self.top_k, 1, COARSE, self._distances))
        apart = lang.select(
            self.weighed, lang.const(int(WEIGHTLESS * SCALE), u32), steps_of(self.gap)
        )
        return lang.minimum(most.get(), apart)

    def _maxima(self) -> Iterator[tuple[Expr, Expr]]:
        """Number and largest logit of the slices that a thread has."""
        count, me = self._slices.count, lang.local_id()
        for number in lang.range(me, lang.const(count, u32), lang.workgroup_size()):
            yield number, self._tops[self.row * count + number]

    def _distances(self) -> Iterator[tuple[Expr, Expr]]:
        """Number and distance of the maxima that a thread has."""
        for number, top in self._maxima():
            yield number, self.below(top)

    def _each(self) -> Iterator[tuple[Expr, Expr]]:
        """Column and logit, after its penalties, of what a thread has of slices that are left."""
        width = WIDTH if self.chunk else 1
        pieces, stride = self._slices.lanes * WIDTH // width, lang.workgroup_size()
        total, most = self._size[0] * pieces, lang.const(self._slices.count * pieces, u32)
        for start in lang.range(lang.local_id(), most, stride * TOGETHER):
            lang.break_if(start >= total)  # the host knows how often a loop goes round at most
            firsts = []
            for item in (start + n * stride for n in range(TOGETHER)):
                number = self._left[lang.minimum(item, total - 1) // pieces]
                first = (number * pieces + item % pieces) * width
                firsts.append(lang.select(item < total, first, self.columns))
            for first, values in zip(firsts, self.read(firsts, width), strict=True):
                yield from self.each_of(first, values)


def _sample_slices(
    *, chunk: bool, slices: Slices, logits: Argument, settings: Argument, seeds: Argument,
    tops: Argument, counts: Argument, steps: Argument, y: Argument, slots: Argument | None = None,
) -> None:  # fmt: skip
    """A group has a sequence."""
    draw(Sliced(slices, tops, lang.group_id(), logits, settings, counts, steps, slots, chunk),
         seeds, y)  # fmt: skip


first_kernel: Kernel = Kernel(_slice_tops, workgroup=THREADS, name="slice_tops")
kernel: Kernel = Kernel(_sample_slices, workgroup=THREADS, name="sample_slices")


def _slices_of(form: Form[SampleAttrs], caps: Caps) -> Slices | None:
    """How a row is cut; None where it is too long, or a device has not what `fits` says."""
    columns, lanes = form.inputs[2].shape[1], LANES
    while lanes < THREADS and -(-columns // (lanes * WIDTH)) > MOST_SLICES:
        lanes *= 2
    count = -(-columns // (lanes * WIDTH))
    whole = count <= MOST_SLICES and fits(len(form.inputs), caps)
    return Slices(lanes, count) if whole else None


def fits(inputs: int, caps: Caps) -> bool:
    """Whether groups have enough threads, and launches buffers for inputs, maxima and tokens."""
    return caps.max_workgroup >= THREADS and inputs + 2 <= caps.max_storage_buffers


def _launches(form: Form[SampleAttrs], slices: Slices, caps: Caps) -> Lowered:
    counts, _, logits, settings, _, *slots = form.inputs
    rows, columns = logits.shape
    tops = Ref(len(form.inputs) + 3, Spec((rows * slices.count,), f32, (1,)))
    reads = {"logits": 2, "settings": 2, "counts": 2, **({"slots": 1} if slots else {})}
    refs = (Ref(2, logits), Ref(3, settings), Ref(0, counts), *(Ref(5, s) for s in slots), tops)
    constants = (("chunk", chunked(logits)), ("slices", slices))
    first = Call(
        first_kernel, refs, (("columns", columns),), constants, rows * slices.groups, THREADS,
        signature(reads, {"tops": 1}),
    )  # fmt: skip
    second = launch(kernel, form, caps, more=(("slices", slices),), read={"tops": tops})
    return Lowered((first,), (tops.spec,)) + second


def _preferred(form: Form[SampleAttrs], caps: Caps) -> bool:
    return form.inputs[2].shape[1] >= LONG


SLICES = Variant("slices", _slices_of, _launches, _preferred)
