"""Ops whose operands are larger than a launch may see: launches on parts of them.

An op states how its work is divided (`Op.axes`); here the sizes of the parts are chosen, the op is
asked for the launches of each part, and these get the operands' parts as views. Nothing here knows
what an op computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from centella.dtypes import dtype_of
from centella.emit.program import Call, Ref
from centella.errors import LimitError
from centella.op.axes import Along, Axes, Dims, Fold, Part
from centella.op.op import Form, Lowered
from centella.ops.fused import FUSED
from centella.ops.steps import FusedAttrs, step_of
from centella.specs import INDEX_LIMIT, Caps, Spec, make_spec

CHUNK, WORD = 16, 4  # bytes
Range = tuple[int, int]
View = tuple[Spec, int]  # an operand's part, and the element of the operand that it begins at


def divided(form: Form[Any], caps: Caps) -> Lowered:
    """The launches of an op, each of which sees no more of a buffer than the device can bind.

    Raises:
        LimitError: an operand or a temporary is too large, and no axis of it can be divided.
    """
    parts = division(form, caps)
    lowered = parts.lower() if parts else form.lower(caps)
    while too := [t for t in lowered.temporaries if not caps.has_room(t)]:
        parts = parts or Division(form, caps)
        if not parts.halve():
            raise parts.refusal(too[0], "a temporary ")
        lowered = parts.lower()
    return lowered


def divisible(form: Form[Any], caps: Caps) -> bool:
    """Whether an op's operands can be made to fit the device's bindings, and it takes the parts."""
    try:
        if division(form, caps) is not None:
            divided(form, caps)
    except LimitError:
        return False
    return True


def division(form: Form[Any], caps: Caps) -> Division | None:
    """How an op is divided so that its operands fit; None where they do as they are.

    Raises:
        LimitError: no axis of an operand that is too large can be divided.
    """
    most = max((spec.storage_bytes for spec in (*form.inputs, *form.outputs)), default=0)
    if most <= caps.safe_binding:
        return None
    parts = Division(form, caps)
    left = parts.fit()
    if left is not None and most > caps.max_binding:
        parts = Division(form, caps, WORD)
        left = parts.fit()
    if left is None:
        return parts
    if most <= caps.max_binding:
        return None  # each fits where it has a buffer of its own
    raise parts.refusal(left)


class Division:
    """The parts of an op: of each letter, its extent, what its parts are a multiple of, their size.

    Args:
        boundary: where parts of operands begin. On a CHUNK, kernels read and write chunks as they
            do of the whole; on a WORD (results alone), no two parts write one word.
    """

    def __init__(self, form: Form[Any], caps: Caps, boundary: int = CHUNK) -> None:
        self._form, self._caps = form, caps
        axes = form.op.axes
        if axes is None:
            self._axes: Axes = Axes(_whole(form.inputs), _whole(form.outputs))
        else:
            self._axes = axes(form)
        self._operands: list[tuple[Spec, Dims]] = [
            *zip(form.inputs, self._axes.inputs, strict=True),
            *zip(form.outputs, self._axes.outputs, strict=True),
        ]
        self._extents: dict[str, int] = {}
        self._units: dict[str, int] = {}
        for index, (spec, dims) in enumerate(self._operands):
            chunks = spec.aligned and boundary == CHUNK
            self._note(spec, dims, CHUNK if chunks else WORD if index >= len(form.inputs) else 1)
        self._sizes = dict(self._extents)
        self._calls: list[Call] = []
        self._scratch: list[Spec] = []

    def _note(self, spec: Spec, dims: Dims, boundary: int) -> None:
        """Extents of letters, and what their parts are a multiple of to begin on a boundary."""
        for extent, stride, along in zip(spec.shape, spec.strides, dims, strict=True):
            if along is not None:
                letter, step, start = along
                least = (start + extent) // step
                self._extents[letter] = max(self._extents.get(letter, 1), least)
                apart = boundary // math.gcd(boundary, step * stride * spec.dtype.itemsize)
                unit = 1 if start else apart
                self._units[letter] = math.lcm(self._units.get(letter, 1), unit)

    # -- sizes ------------------------------------------------------------------------------------

    def fit(self) -> Spec | None:
        """Make the parts so small that every operand's fits a binding; an operand that cannot."""
        for spec, dims in self._operands:
            while self._bytes(spec, dims) > self._caps.safe_binding:
                axis = self._outermost(spec, dims)
                if axis is None:
                    return spec
                self._shrink(spec, dims, axis)
        return None

    def halve(self) -> bool:
        """Make the parts of the results smaller; False where that cannot be."""
        letter = self._axes.scratch
        if letter and self._sizes[letter] > self._units[letter]:
            self._set(letter, self._sizes[letter] // 2)
            return True
        for spec, dims in self._operands[len(self._form.inputs) :]:
            axis = self._outermost(spec, dims)
            along = None if axis is None else dims[axis]
            if along is not None:
                self._set(along.letter, self._sizes[along.letter] // 2)
                return True
        return False

    def _lengths(self, spec: Spec, dims: Dims) -> list[int]:
        return [
            n if along is None else min(n, self._sizes[along.letter] * along.step)
            for n, along in zip(spec.shape, dims, strict=True)
        ]

    def _bytes(self, spec: Spec, dims: Dims) -> int:
        return replace(spec, shape=tuple(self._lengths(spec, dims))).storage_bytes

    def _outermost(self, spec: Spec, dims: Dims) -> int | None:
        """The axis with the largest stride whose parts can be smaller."""
        able = [
            axis
            for axis, (along, n) in enumerate(zip(dims, self._lengths(spec, dims), strict=True))
            if n > 1
            and spec.strides[axis] > 0
            and along is not None
            and self._sizes[along.letter] > self._units[along.letter]
        ]
        return max(able, key=lambda axis: spec.strides[axis], default=None)

    def _shrink(self, spec: Spec, dims: Dims, axis: int) -> None:
        """The largest parts along an axis that let an operand fit, else the smallest there are."""
        along, stride = dims[axis], spec.strides[axis]
        assert along is not None, "an axis that can be divided has a letter"
        lengths = self._lengths(spec, dims)
        lengths[axis] = 1
        rest = replace(spec, shape=tuple(lengths)).span
        room = self._caps.safe_binding // spec.dtype.itemsize - rest
        self._set(along.letter, (room // stride + 1) // along.step if room >= 0 else 0)

    def _set(self, letter: str, most: int) -> None:
        """Parts of at most so many elements of a letter, or of its unit; all of about one size."""
        extent, unit = self._extents[letter], self._units[letter]
        largest = max(most // unit, 1) * unit
        parts = -(-extent // largest)
        self._sizes[letter] = -(-extent // (parts * unit)) * unit

    # -- launches ---------------------------------------------------------------------------------

    def lower(self) -> Lowered:
        """The launches of all parts."""
        self._calls, self._scratch = [], []
        fold, chosen = self._axes.fold, self._axes.chosen
        last = chosen + (fold.letter if fold is not None else "")
        for ranges in self._ranges([c for c in self._extents if c not in last]):
            if fold is not None and self._sizes[fold.letter] < self._extents[fold.letter]:
                self._fold(fold, ranges)
                continue
            for more in self._ranges([c for c in self._extents if c in chosen]):
                self._part({**ranges, **more})
        return Lowered(tuple(self._calls), tuple(self._scratch))

    def _ranges(self, letters: Sequence[str]) -> Iterator[dict[str, Range]]:
        """Every combination of parts of some letters."""
        cuts = []
        for letter in letters:
            size, extent = self._sizes[letter], self._extents[letter]
            starts = range(0, extent, size) if size < extent else (0,)
            cuts.append([(first, min(first + size, extent)) for first in starts])
        for each in product(*cuts):
            yield dict(zip(letters, each, strict=True))

    def _part(
        self, ranges: Mapping[str, Range], target: tuple[int, Spec] | None = None,
        attrs: Struct | None = None,
    ) -> None:  # fmt: skip
        """The launches of one part.

        Args:
            target: the temporary that gets its result, instead of the op's own.
            attrs: of the part; None: those of the whole.
        """
        views = [_view(spec, dims, ranges) for spec, dims in self._operands]
        inputs = tuple(spec for spec, _ in views[: len(self._form.inputs)])
        outputs = tuple(spec for spec, _ in views[len(self._form.inputs) :])
        reserved = 0
        if target is not None:
            outputs, reserved = (target[1],), 3
        for index, spec in enumerate(inputs):
            if not self._form.op.takes(index, spec):
                raise self.refusal(self._form.inputs[index])
        parts = {
            c: Part(ranges[c][0], ranges[c][1] - ranges[c][0], self._extents[c])
            for c in self._axes.told + self._axes.chosen
            if c in ranges
        }
        form = Form(self._form.op, inputs, outputs, attrs or self._form.attrs, parts=parts)
        lowered = form.lower(self._caps)
        count = len(views)
        for number, spec in enumerate(lowered.temporaries):
            self._reserve(reserved + number, spec)

        def bound(ref: Ref) -> Ref:
            if ref.index >= count:
                return replace(ref, index=ref.index + reserved)
            if target is not None and ref.index >= len(inputs):
                return replace(ref, index=count + target[0])
            return replace(ref, offset=ref.offset + views[ref.index][1])

        for call in lowered.calls:
            self._calls.append(replace(call, tensors=tuple(map(bound, call.tensors))))

    def _reserve(self, number: int, spec: Spec) -> None:
        """Room for temporary `number`, which every part uses anew."""
        while len(self._scratch) <= number:
            self._scratch.append(spec)
        if spec.storage_bytes > self._scratch[number].storage_bytes:
            self._scratch[number] = spec

    def _fold(self, fold: Fold, ranges: Mapping[str, Range]) -> None:
        """The parts along a letter that no result has, each put together with those before."""
        (out, start), count = self._out(ranges), len(self._operands)
        wide = dtype_of(out.dtype.value)
        partial = make_spec(out.shape, wide, self._caps.row_alignment)
        for number in range(3):
            self._reserve(number, partial)
        total, fresh, free = 0, 1, 2
        parts = list(self._ranges([fold.letter]))
        for number, part in enumerate(parts):
            into = fresh if number else total
            self._part({**ranges, **part}, (into, partial), fold.attrs)
            if not number:
                continue
            last = number == len(parts) - 1
            result = Ref(count - 1, out, start) if last else Ref(count + free, partial)
            refs = (Ref(count + total, partial), Ref(count + fresh, partial), result)
            self._combine(fold, refs, last)
            total, fresh, free = free, total, fresh

    def _out(self, ranges: Mapping[str, Range]) -> View:
        spec, dims = self._operands[-1]
        return _view(spec, dims, ranges)

    def _combine(self, fold: Fold, refs: tuple[Ref, Ref, Ref], last: bool) -> None:
        """One launch: two results together; the last is what the op gives."""
        wide, out = refs[0].spec.dtype, refs[2].spec
        steps = [step_of(fold.by, (0, 1), wide.name)]
        if last and fold.factor is not None:
            steps.append(step_of("scale", (2,), wide.name, factor=fold.factor))
        if out.dtype is not wide:
            name = out.dtype.name
            steps.append(step_of("cast", (len(steps) + 1,), name, dtype=name))
        operands = (refs[0].spec, refs[1].spec)
        form = Form(FUSED, operands, (out,), FusedAttrs(tuple(steps)))
        (call,) = form.lower(self._caps).calls
        tensors = (replace(refs[r.index], spec=r.spec) for r in call.tensors)
        self._calls.append(replace(call, tensors=tuple(tensors)))

    def refusal(self, spec: Spec, what: str = "") -> LimitError:
        """The error for an operand or temporary that cannot be divided."""
        why = "no axis of it can be divided further"
        if self._form.op.axes is None:
            why = "a kernel of your own is not divided: pass slices to it"
        nbytes, bound = spec.storage_bytes, self._caps.max_binding
        most = f"{nbytes:,} bytes, of which this device binds {bound:,}"
        if spec.span >= INDEX_LIMIT:
            most = f"{spec.span:,} elements, of which a kernel counts fewer than {INDEX_LIMIT:,}"
        return LimitError(
            f"{self._form.op.name}: {what}{list(spec.shape)} of {spec.dtype.name} has {most} "
            f"at once; {why}"
        )


def _whole(specs: Sequence[Spec]) -> tuple[Dims, ...]:
    """The axes of operands that cannot be divided."""
    return tuple((None,) * len(spec.shape) for spec in specs)


def _view(spec: Spec, dims: Dims, ranges: Mapping[str, Range]) -> View:
    """The part of an operand that parts of letters need."""
    shape, first = list(spec.shape), 0
    for axis, along in enumerate(dims):
        if along is not None and along.letter in ranges:
            low, high = _along(along, ranges[along.letter], shape[axis])
            shape[axis] = high - low
            first += low * spec.strides[axis]
    if 0 in shape:
        first = 0
    aligned = spec.aligned and first * spec.dtype.itemsize % 16 == 0
    return Spec(tuple(shape), spec.dtype, spec.strides, aligned), first


def _along(along: Along, part: Range, extent: int) -> Range:
    """The elements of an axis that a part of its letter has."""
    low, high = (min(max(i * along.step - along.start, 0), extent) for i in part)
    return low, high
