"""argsort: the indices that put each row in order, along the last dimension, as i32.

    y_j  the index of the j-th smallest element, or largest with `descending`

Equal elements keep their order, 0 and -0 are equal, and NaN come last in either direction. A group
sorts blocks of a row in shared memory by a bitonic network (Batcher 1968) over pairs of key and
column, several short rows together. Blocks of longer rows are merged two by two: an element's place
is its own, and how many of the other block come before it, which a binary search finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from centella.op.op import Form, Lowered, Op, Out, along_rows
from centella.ops.argmax import order
from centella.ops.layout import rows_of, takes_rows
from centella.ops.rows import power_above
from centella.specs import Caps, Spec, make_spec

NONE = 0xFFFFFFFF
LEAST, MOST = 64, 4096  # elements of a block
THREADS = 256
PAIR = 8  # bytes of key and column


class SortAttrs(Struct, frozen=True):
    """Whether the largest come first."""

    descending: bool = False


def _blocks(*, size: int, descending: bool, x: Argument, **out: Argument) -> None:
    """A group sorts `size` elements: spans of rows, each a power of two."""
    columns, rows = lang.parameter("columns", u32), lang.parameter("rows", u32)
    span, stages, parts = (lang.parameter(n, u32) for n in ("span", "stages", "parts"))
    keys, places = lang.shared(u32, size), lang.shared(u32, size)
    whole = "y" in out

    def slots() -> Iterator[tuple[Expr, ...]]:
        """Place in the block, row, column, and whether there is such an element."""
        for slot in lang.range(lang.local_id(), lang.const(size, u32), lang.workgroup_size()):
            number = lang.group_id() * (size // span) + slot // span
            row, column = number // parts, number % parts * span + slot % span
            yield slot, row, column, (row < rows) & (column < columns)

    for slot, row, column, inside in slots():
        at = lang.select(inside, row, 0), lang.select(inside, column, 0)
        key = order(x[at])
        if descending:
            key = lang.select(key == NONE, NONE, ~key) if x.dtype.is_float else ~key
        keys[slot] = lang.select(inside, key, NONE)
        places[slot] = column
    lang.barrier()
    for stage in lang.range(stages):
        for step in lang.range(stage + 1):
            _exchange(keys, places, lang.const(2, u32) << stage, stage - step, span, size)
            lang.barrier()
    for slot, row, column, inside in slots():
        with lang.if_(inside):
            if whole:
                out["y"][row, column] = lang.bitcast(places[slot], i32)
            else:
                out["keys"][row, column] = keys[slot]
                out["places"][row, column] = places[slot]


def _exchange(
    keys: Any, places: Any, run: Operand, shift: Operand, span: Operand, size: int
) -> None:
    """One step of the network: pairs 2^shift apart, rising or falling by runs of `run`."""
    apart = lang.const(1, u32) << shift
    for pair in lang.range(lang.local_id(), lang.const(size // 2, u32), lang.workgroup_size()):
        low = pair * 2 - (pair & (apart - 1))
        high = low + apart
        a, b, i, j = keys[low], keys[high], places[low], places[high]
        falls = (low & (span - 1) & run) != 0
        after = (a > b) | ((a == b) & (i > j))
        with lang.if_(after ^ falls):
            keys[low], keys[high], places[low], places[high] = b, a, j, i


def _merge(*, keys: Argument, places: Argument, **out: Argument) -> None:
    """A thread an element: its place among those of its run of `run` elements and of the next."""
    columns, run = lang.parameter("columns", u32), lang.parameter("run", u32)
    thread = lang.global_id()
    with lang.if_(thread < lang.parameter("threads", u32)):
        row, column = thread // columns, thread % columns
        mine, start = column // run, column // run * run
        second = mine % 2 == 1
        other = lang.select(second, start - run, lang.minimum(start + run, columns))
        end = lang.minimum(other + run, columns)
        key = keys[row, column]
        low, high = lang.var(other), lang.var(end)  # those before `low` come first
        for _ in lang.range(lang.parameter("halvings", u32)):
            with lang.if_(low.get() < high.get()):
                middle = (low.get() + high.get()) // 2
                there = keys[row, middle]
                before = (there < key) | (second & (there == key))
                low.set(lang.select(before, middle + 1, low.get()))
                high.set(lang.select(before, high.get(), middle))
        rank = lang.minimum(start, other) + (column - start) + (low.get() - other)
        if "y" in out:
            out["y"][row, rank] = lang.bitcast(places[row, column], i32)
        else:
            out["to_keys"][row, rank] = key
            out["to_places"][row, rank] = places[row, column]


block_kernel: Kernel = Kernel(_blocks, workgroup=THREADS, name="sort")
merge_kernel: Kernel = Kernel(_merge, workgroup=THREADS, name="sort_merge")


def rule(specs: tuple[Spec, ...], attrs: SortAttrs) -> tuple[Out, ...]:
    """[..., n] to [..., n] of i32."""
    x = specs[0]
    if not x.shape:
        raise ShapeError("argsort: expected rank 1 or more, got a scalar")
    if x.dtype.kind == "bool":
        raise DTypeError("argsort: expected a numeric dtype, got bool")
    return ((x.shape, i32),)


def reference(x: Array, descending: bool = False) -> Array:
    """The NumPy formula."""
    if descending:
        x = -x if x.dtype.kind == "f" else ~x
    return np.argsort(x, -1, kind="stable").astype(np.int32)


def lower(form: Form[SortAttrs], caps: Caps) -> Lowered:
    """One launch, and for rows of several blocks one for each doubling."""
    x, y = rows_of(form.inputs[0]), rows_of(form.outputs[0])
    rows, columns = x.shape
    size = _size(columns, caps)
    span = min(power_above(max(columns, 2)), size)
    parts = -(-columns // span)
    threads = min(THREADS, caps.max_workgroup, size // 2)
    scalars = (
        ("columns", columns), ("rows", rows), ("span", span), ("stages", span.bit_length() - 1),
        ("parts", parts),
    )  # fmt: skip
    constants = (("descending", form.attrs.descending), ("size", size))
    groups = -(-rows * parts // (size // span))
    if parts == 1:
        call = Call(block_kernel, (Ref(0, x), Ref(1, y)), scalars, constants, groups, threads,
                    signature({"x": 2}, {"y": 2}))  # fmt: skip
        return Lowered((call,))
    between = make_spec((rows, columns), u32, 4)
    pairs = [tuple(Ref(2 + 2 * k + j, between) for j in range(2)) for k in range(2)]
    shape = signature({"x": 2}, {"keys": 2, "places": 2})
    calls = [Call(block_kernel, (Ref(0, x), *pairs[0]), scalars, constants, groups, threads, shape)]
    run = span
    while run < columns:
        source, target = pairs if len(calls) % 2 else pairs[::-1]
        calls.append(_merged(source, target, y, run))
        run *= 2
    return Lowered(tuple(calls), (between,) * (4 if len(calls) > 2 else 2))


def _size(columns: int, caps: Caps) -> int:
    """Elements of a block: a row, if shared memory has room for it, or as much as there is for."""
    room = min(MOST, power_above(caps.max_shared // PAIR + 1) // 2)
    return max(min(power_above(max(columns, 2)), room), min(LEAST, room))


def _merged(source: tuple[Ref, ...], target: tuple[Ref, ...], y: Spec, run: int) -> Call:
    """The launch that makes runs of twice as many elements; the last one gives the result."""
    rows, columns = source[0].spec.shape
    last = 2 * run >= columns
    outs = {"y": 2} if last else {"to_keys": 2, "to_places": 2}
    scalars = (
        ("columns", columns), ("run", run), ("threads", rows * columns),
        ("halvings", run.bit_length()),
    )  # fmt: skip
    refs = (*source, Ref(1, y)) if last else (*source, *target)
    groups = -(-rows * columns // THREADS)
    return Call(merge_kernel, refs, scalars, (), groups, THREADS,
                signature({"keys": 2, "places": 2}, outs))  # fmt: skip


def flops(form: Form[SortAttrs]) -> int:
    """Comparisons of the network."""
    x = form.inputs[0]
    return x.size * math.ceil(math.log2(max(x.shape[-1], 2))) ** 2


ARGSORT: Op[SortAttrs] = Op(
    "argsort", rule, reference, lower, takes_rows, attrs=SortAttrs, axes=along_rows, flops=flops,
    doc=__doc__ or "",
)  # fmt: skip
