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

A group has a sequence, or where there are few and long ones a cluster of groups. Other long ones
have two launches (`sample_slices.py`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, i32
from centella.emit.program import HostProgram, Kernel
from centella.errors import DTypeError, ShapeError
from centella.lang.memory import Argument
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.op.variant import Variant
from centella.op.variant import choose as choose_variant
from centella.ops.sample_cluster import CLUSTER
from centella.ops.sample_row import (
    BINS,
    MOST,
    NONE,
    PROMPT,
    SCALE,
    SETTINGS,
    SMALL,
    THREADS,
    WEIGHT,
    Row,
    SampleAttrs,
    draw,
    launch,
    threads_of,
)
from centella.ops.sample_slices import SLICES
from centella.specs import Caps, Spec


def _sample(
    *, chunk: bool, logits: Argument, settings: Argument, seeds: Argument, counts: Argument,
    steps: Argument, y: Argument, slots: Argument | None = None,
) -> None:  # fmt: skip
    """A group has a sequence."""
    draw(Row(lang.group_id(), logits, settings, counts, steps, slots, chunk), seeds, y)


kernel: Kernel = Kernel(_sample, workgroup=THREADS, name="sample")


def _threads(form: Form[SampleAttrs], caps: Caps) -> int | None:
    """Threads of a group; None where each cannot have a bin of a histogram."""
    threads = threads_of(caps)
    return threads if threads >= BINS else None


def _launches(form: Form[SampleAttrs], threads: int, caps: Caps) -> Lowered:
    return launch(kernel, form, caps)


VARIANTS = (CLUSTER, SLICES, Variant("group", _threads, _launches))


def rule(specs: tuple[Spec, ...], attrs: SampleAttrs) -> tuple[Out, ...]:
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


def host(form: Form[SampleAttrs]) -> HostProgram:
    """On the CPU."""

    def call(arrays: list[Array], outs: list[Array]) -> None:
        outs[2][...] = reference(*arrays)[2]

    return HostProgram("numpy:sample", "sample", call)


def lower(form: Form[SampleAttrs], caps: Caps) -> Lowered:
    """One launch, or two."""
    what = f"sample of {list(form.inputs[2].shape)}"
    return choose_variant(VARIANTS, form, caps, form.attrs.variant, what).lower(form, caps)


def takes(index: int, spec: Spec) -> bool:
    """Logits and settings: rows of neighbouring elements."""
    return spec.unit_rows


def axes_of(form: Form[SampleAttrs]) -> Axes:
    """Sequences; where they have slots, those that a part has are not known."""
    if len(form.inputs) > 5:
        return axes(["..", ".", "..", "..", ".", "."], ["..", ".", "."])
    return axes(["b.", "b", "b.", "b.", "b"], ["b.", "b", "b"])


SAMPLE = Op("sample", rule, reference, lower, takes, tuple(v.name for v in VARIANTS),
            attrs=SampleAttrs, mutates=(0, 1), host=host, axes=axes_of,
            doc=__doc__ or "")  # fmt: skip
