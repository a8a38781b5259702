"""The ops of a KV cache: rows written at positions that live on the device, and the positions.

cache_write  K[b, h, s_b + i] = k[b, h, i]    V[b, h, s_b + i] = v[b, h, i]
cache_step   begin: (start, end) = (end, end + tokens)    set: (start, end) = (length, length)

A cache is `[batch, kv_heads, capacity, head_dim]`; steps are i32 `[2, batch]`: for each sequence
the position of the current step's first token, and the position after its last. Nothing is written
past the capacity: the host, which knows the lengths, refuses that before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.op.axes import Axes, axes
from centella.op.form import Form
from centella.op.op import Lowered, NoAttrs, Op, Out, unit_rows
from centella.ops.elements import offset_of
from centella.ops.kernel_params import face
from centella.ops.layout import flat
from centella.ops.rows import chunked, place_of, rows_call, strides_of, width_of
from centella.specs import Caps, Spec

WORKGROUP = 256


def _write(*, chunk: bool, keys: Any, values: Any, k: Any, v: Any, starts: Any) -> None:
    """A thread has one chunk (or word) of a row of k, and the same of v."""
    tokens, heads, capacity = (lang.parameter(n, u32) for n in ("tokens", "heads", "capacity"))
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width_of(keys, chunk))
        token, rest = row % tokens, row // tokens
        head, b = rest % heads, rest // heads
        position = lang.bitcast(starts[b], u32) + token
        with lang.if_(position < capacity):
            for source, target, name in ((k, keys, "k"), (v, values, "v")):
                at, to = (
                    offset_of([b, head, place], of)
                    for place, of in ((token, name), (position, f"{name}c"))
                )
                _move(source, at, target, to, column, chunk)


def _move(source: Any, at: Any, target: Any, to: Any, column: Any, chunk: bool) -> None:
    if chunk:
        target.store(to + column, source.load(at + column))
        return
    last = lang.parameter("dim", u32) - 1
    lanes = [lang.minimum(column + j, last) for j in range(target.dtype.per_word)]
    target.store(to + column, [source[at + lane] for lane in lanes])


write_kernel: Kernel = Kernel(
    _write, workgroup=WORKGROUP, name="cache_write",
    face=face({"k": 1, "v": 1, "starts": 1}, {}, {"keys": 1, "values": 1}),
)  # fmt: skip


def write_rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """Caches [b, h, capacity, d] twice, k and v [b, h, t, d], starts [b] i32."""
    keys, values, k, v, starts = specs
    b, h, capacity, d = keys.shape
    fits = k.shape == v.shape and len(k.shape) == 4 and k.shape[2] <= capacity
    if not fits or (k.shape[0], k.shape[1], k.shape[3]) != (b, h, d):
        raise ShapeError(
            f"cache_write: expected k and v [{b}, {h}, up to {capacity}, {d}], got "
            f"{list(k.shape)} and {list(v.shape)}"
        )
    if starts.shape != (b,) or starts.dtype is not i32:
        raise ShapeError(
            f"cache_write: expected i32 starts [{b}], got {starts.dtype.name} {list(starts.shape)}"
        )
    if any(s.dtype is not keys.dtype for s in (values, k, v)):
        raise DTypeError(
            f"cache_write: expected k and v of {keys.dtype.name}, got {k.dtype.name} and "
            f"{v.dtype.name}"
        )
    return ((keys.shape, keys.dtype), (values.shape, values.dtype))


def write_reference(keys: Any, values: Any, k: Any, v: Any, starts: Any) -> Any:
    """The NumPy formula: changes `keys` and `values`."""
    for b, start in enumerate(starts.tolist()):
        room = max(0, min(k.shape[2], keys.shape[2] - start))
        keys[b, :, start : start + room] = k[b, :, :room]
        values[b, :, start : start + room] = v[b, :, :room]
    return keys, values


def write_lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """One launch."""
    keys, values, k, v, _ = form.inputs
    batch, heads, tokens, dim = k.shape
    chunk = chunked(*form.inputs[:4])
    scalars = {
        "tokens": tokens, "heads": heads, "capacity": keys.shape[2], "dim": dim,
        **strides_of(kc=keys, vc=values, k=k, v=v),
    }  # fmt: skip
    refs = tuple(Ref(i, flat(form.inputs[i])) for i in (2, 3, 4, 0, 1))
    rows, width = batch * heads * tokens, width_of(keys, chunk)
    return Lowered((rows_call(write_kernel, refs, rows, dim, width, scalars, (("chunk", chunk),)),))


def _step(*, steps: Any, **given: Any) -> None:
    """A thread has one sequence."""
    b, count = lang.global_id(), lang.parameter("count", u32)
    with lang.if_(b < count):
        if given:
            length = given["lengths"][b]
            steps[0, b], steps[1, b] = length, length
        else:
            end = steps[1, b]
            steps[0, b], steps[1, b] = end, end + lang.parameter("tokens", i32)


step_kernel: Kernel = Kernel(_step, workgroup=64, name="cache_step")


class StepAttrs(Struct, frozen=True):
    """Tokens of the next step."""

    tokens: int


def step_rule(specs: tuple[Spec, ...], attrs: StepAttrs) -> tuple[Out, ...]:
    """Steps [2, b], and to set them lengths [b], all i32."""
    steps, *lengths = specs
    for spec in lengths:
        if spec.shape != steps.shape[1:] or spec.dtype is not i32:
            raise ShapeError(
                f"cache_step: expected i32 lengths {list(steps.shape[1:])}, got "
                f"{spec.dtype.name} {list(spec.shape)}"
            )
    return ((steps.shape, steps.dtype),)


def step_reference(steps: Any, *lengths: Any, tokens: int) -> Any:
    """The NumPy formula: changes `steps`."""
    if lengths:
        steps[:] = lengths[0]
    else:
        steps[0] = steps[1]
        steps[1] += np.asarray(tokens, steps.dtype)
    return steps


def step_lower(form: Form[StepAttrs], caps: Caps) -> Lowered:
    """One launch."""
    steps, *lengths = form.inputs
    count = steps.shape[1]
    params = face({"lengths": 1} if lengths else {}, {}, {"steps": 2})
    refs = (*(Ref(1, s) for s in lengths), Ref(0, steps))
    scalars = (("count", count), ("tokens", form.attrs.tokens))
    return Lowered((Call(step_kernel, refs, scalars, (), -(-count // 64), face=params),))


def write_axes(form: Form[NoAttrs]) -> Axes:
    """Sequences and heads."""
    return axes(["bh.."] * 4 + ["b"], ["bh.."] * 2)


WRITE = Op("cache_write", write_rule, write_reference, write_lower, unit_rows,
           mutates=(0, 1), axes=write_axes, doc="rows of k and v into a KV cache")  # fmt: skip
STEP = Op("cache_step", step_rule, step_reference, step_lower, attrs=StepAttrs, mutates=(0,),
          doc="the positions of a KV cache's next step")  # fmt: skip
