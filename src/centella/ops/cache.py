"""The ops of a KV cache: rows written at positions that live on the device, and the positions.

cache_write  K[b, h, s_b + i] = k[b, h, i]    V[b, h, s_b + i] = v[b, h, i]
    blocks   K[h, T[b, 1 + p // n], p % n] = k[b, h, i] with p = T[b, 0] + i, and V the same
cache_step   begin: (start, end) = (end, end + tokens)    set: (start, end) = (length, length)

A cache is `[batch, kv_heads, capacity, head_dim]`; steps are i32 `[2, batch]`: for each sequence
the position of the current step's first token, and the position after its last. Nothing is written
past the capacity: the host, which knows the lengths, refuses that before.

With a table T, i32 `[batch, 1 + width]`, in place of starts s, i32 `[batch]`, keys and values are
pools of blocks of n keys, `[kv_heads, blocks, n, head_dim]`. Nothing is written to block 0, nor
outside the table, so entries of 0 drop what pads a prompt or a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, NoAttrs, Op, Out, unit_rows
from centella.ops.elements import offset_of
from centella.ops.layout import flat
from centella.ops.rows import chunked, place_of, rows_call, strides_of, width_of
from centella.specs import Caps, Shape, Spec

WORKGROUP = 256


def place_in(starts: Argument, b: Any, head: Any, token: Operand, name: str) -> tuple[Expr, Expr]:
    """Where a token's key lies in a cache, and whether it has such a place."""
    capacity = lang.parameter("capacity", u32)
    if starts.rank == 1:
        position = lang.bitcast(starts[b], u32) + token
        return offset_of([b, head, position], name), position < capacity
    position = lang.bitcast(starts[b, 0], u32) + token
    inside, size = position < capacity, lang.parameter("block", u32)
    entry = lang.select(inside, position // size, lang.const(0, u32))
    block = lang.bitcast(starts[b, entry + 1], u32)
    inside = inside & (block - 1 < lang.parameter("pool", u32) - 1)  # neither 0 nor outside
    return offset_of([head, block, position % size], name), inside


def _write(
    *, chunk: bool, keys: Argument, values: Argument, k: Argument, v: Argument, starts: Argument
) -> None:
    """A thread has one chunk (or word) of a row of k, and the same of v."""
    tokens, heads = (lang.parameter(n, u32) for n in ("tokens", "heads"))
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width_of(keys, chunk))
        token, rest = row % tokens, row // tokens
        head, b = rest % heads, rest // heads
        for source, target, name in ((k, keys, "k"), (v, values, "v")):
            to, inside = place_in(starts, b, head, token, f"{name}c")
            with lang.if_(inside):
                move(source, offset_of([b, head, token], name), target, to, column, chunk)


def move(
    source: Argument, at: Operand, target: Argument, to: Operand, column: Operand, chunk: bool
) -> None:
    """Store one chunk (or word) of a row, from a column on, in another row."""
    if chunk:
        target.store(to + column, source.load(at + column))
        return
    last = lang.parameter("dim", u32) - 1
    lanes = [lang.minimum(column + j, last) for j in range(target.dtype.per_word)]
    target.store(to + column, [source[at + lane] for lane in lanes])


write_kernel: Kernel = Kernel(_write, workgroup=WORKGROUP, name="cache_write")


def cache_shape(op: str, keys: Spec, starts: Spec) -> Shape:
    """Batch, heads, capacity and head_dim of a cache, or of what a table makes of blocks.

    Raises:
        ShapeError: for starts that fit neither.
    """
    blocks = len(starts.shape) == 2
    if starts.dtype is not i32 or not (blocks or starts.shape == keys.shape[:1]):
        raise ShapeError(
            f"{op}: expected i32 starts [{keys.shape[0]}] or a table [batch, 1 + width], got "
            f"{starts.dtype.name} {list(starts.shape)}"
        )
    if not blocks:
        return keys.shape
    batch, width = starts.shape
    return batch, keys.shape[0], (width - 1) * keys.shape[2], keys.shape[3]


def write_rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """Caches [b, h, capacity, d] twice, k and v [b, h, t, d], starts [b]; or blocks, a table."""
    keys, values, k, v, starts = specs
    b, h, capacity, d = cache_shape("cache_write", keys, starts)
    fits = k.shape == v.shape and len(k.shape) == 4 and k.shape[2] <= capacity
    if not fits or (k.shape[0], k.shape[1], k.shape[3]) != (b, h, d):
        raise ShapeError(
            f"cache_write: expected k and v [{b}, {h}, up to {capacity}, {d}], got "
            f"{list(k.shape)} and {list(v.shape)}"
        )
    if any(s.dtype is not keys.dtype for s in (values, k, v)):
        raise DTypeError(
            f"cache_write: expected k and v of {keys.dtype.name}, got {k.dtype.name} and "
            f"{v.dtype.name}"
        )
    return ((keys.shape, keys.dtype), (values.shape, values.dtype))


def write_reference(keys: Any, values: Any, k: Array, v: Array, starts: Array) -> Any:
    """The NumPy formula: changes `keys` and `values`."""
    if starts.ndim == 2:
        _, blocks, size, _ = keys.shape
        table: Array = starts.astype(np.int64)
        positions = table[:, :1] + np.arange(k.shape[2])
        inside = (positions >= 0) & (positions < size * (table.shape[1] - 1))
        block = np.take_along_axis(table, np.where(inside, positions // size + 1, 1), 1)
        rows, i = np.nonzero(inside & (block > 0) & (block < blocks))
        to = (slice(None), block[rows, i], positions[rows, i] % size)
        keys[to], values[to] = (x[rows, :, i].swapaxes(0, 1) for x in (k, v))
        return keys, values
    for b, start in enumerate(starts.tolist()):
        room = max(0, min(k.shape[2], keys.shape[2] - start))
        keys[b, :, start : start + room] = k[b, :, :room]
        values[b, :, start : start + room] = v[b, :, :room]
    return keys, values


def write_lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """One launch."""
    keys, values, k, v, starts = form.inputs
    batch, heads, tokens, dim = k.shape
    chunk = chunked(*form.inputs[:4])
    scalars = {
        "tokens": tokens, "heads": heads, "dim": dim, **cache_scalars(keys, starts),
        **strides_of(kc=keys, vc=values, k=k, v=v),
    }  # fmt: skip
    refs = (*(Ref(i, flat(form.inputs[i])) for i in (2, 3)), Ref(4, starts),
            *(Ref(i, flat(form.inputs[i])) for i in (0, 1)))  # fmt: skip
    reads = {"k": 1, "v": 1, "starts": len(starts.shape)}
    params = signature(reads, {}, {"keys": 1, "values": 1})
    rows, width = batch * heads * tokens, width_of(keys, chunk)
    constants, across = (("chunk", chunk),), whole_rows(keys, values)
    return Lowered(
        (rows_call(write_kernel, refs, rows, across, width, scalars, constants, params),)
    )


def whole_rows(*rows: Spec) -> int:
    """Elements of a row with what pads it, which is written as well: attention loads chunks."""
    dim, pitches = rows[0].shape[-1], {s.strides[-2] for s in rows}
    pads = max(pitches) - dim
    return max(pitches) if len(pitches) == 1 and 0 <= pads < rows[0].dtype.per_chunk else dim


def cache_scalars(keys: Spec, starts: Spec) -> dict[str, int]:
    """Launch parameters of `place_in`."""
    if len(starts.shape) == 1:
        return {"capacity": keys.shape[2]}
    _, blocks, size, _ = keys.shape
    return {"capacity": size * (starts.shape[1] - 1), "block": size, "pool": blocks}


def _step(*, steps: Argument, **given: Argument) -> None:
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


def step_reference(steps: Any, *lengths: Array, tokens: int) -> Any:
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
    params = signature({"lengths": 1} if lengths else {}, {}, {"steps": 2})
    refs = (*(Ref(1, s) for s in lengths), Ref(0, steps))
    scalars = (("count", count), ("tokens", form.attrs.tokens))
    return Lowered((Call(step_kernel, refs, scalars, (), -(-count // 64), signature=params),))


def write_axes(form: Form[NoAttrs]) -> Axes:
    """Sequences and heads; of blocks, which any sequence may have, heads."""
    if len(form.inputs[4].shape) == 2:
        return axes(["h...", "h...", ".h..", ".h..", ".."], ["h..."] * 2)
    return axes(["bh.."] * 4 + ["b"], ["bh.."] * 2)


WRITE = Op("cache_write", write_rule, write_reference, write_lower, unit_rows,
           mutates=(0, 1), axes=write_axes, doc="rows of k and v into a KV cache")  # fmt: skip
STEP = Op("cache_step", step_rule, step_reference, step_lower, attrs=StepAttrs, mutates=(0,),
          doc="the positions of a KV cache's next step")  # fmt: skip
