"""cumsum: y_j = x_0 + ... + x_j along the last dimension.

Sums are f32 (integers: modulo 2^32) and stored as `sum` stores them. A group walks a row: each
thread adds up neighbouring elements, and a scan through shared memory (Hillis and Steele 1986) adds
what comes before them. Long rows are split among groups, each of which begins with the sum of the
parts before its own. The order of additions depends on a row's length and layout alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, dtype_of, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered, NoAttrs, Op, Out, along_rows
from centella.ops.layout import rows_of, takes_rows
from centella.ops.reduce import SPLIT, sum_dtype
from centella.ops.rows import chunked, load, width_of
from centella.specs import Caps, Spec, make_spec

THREADS = 256


def _part(rows: Operand) -> tuple[Expr, Expr, Expr, Expr]:
    """Row and part of a group, where the part begins and where it ends."""
    parts, part = lang.parameter("parts", u32), lang.parameter("part", u32)
    row, number = rows // parts, rows % parts
    end = lang.minimum((number + 1) * part, lang.parameter("columns", u32))
    return row, number, number * part, end


def _totals(*, x: Argument, totals: Argument) -> None:
    """A group adds up one part of a row."""
    row, number, first, end = _part(lang.group_id())
    total = lang.var(lang.const(0, x.dtype))
    for column in lang.range(first + lang.local_id(), end, lang.workgroup_size()):
        total += x[row, column]
    whole = lang.workgroup_reduce(total.get(), "add")
    with lang.if_(lang.local_id() == 0):
        totals[row, number] = whole


def _cumsum(*, chunk: bool, x: Argument, y: Argument, totals: Argument | None = None) -> None:
    """A group walks one part of a row, after the sum of the parts before it."""
    row, number, first, end = _part(lang.group_id())
    me, width, zero = lang.local_id(), width_of(y, chunk), lang.const(0, x.dtype)
    before = lang.var(zero)
    if totals is not None:
        for part in lang.range(me, number, lang.workgroup_size()):
            before += totals[row, part]
        before.set(lang.workgroup_reduce(before.get(), "add"))
    pair = [lang.shared(dtype_of(x.dtype.value), lang.workgroup_size()) for _ in range(2)]
    for start in lang.range(first, end, lang.workgroup_size() * width):
        column = start + me * width
        inside = column < end
        values = load(x, row, lang.select(inside, column, first), end, width, chunk)
        sums = [values[0]]
        for value in values[1:]:
            sums.append(sums[-1] + value)
        scanned = _scan(pair, lang.select(inside, sums[-1], zero))
        earlier = lang.select(me > 0, scanned[lang.maximum(me, 1) - 1], zero) + before.get()
        with lang.if_(inside):
            y.store(row, column, [earlier + s for s in sums])
        before += scanned[lang.workgroup_size() - 1]
        lang.barrier()


def _scan(pair: list[Any], value: Any) -> Any:
    """The sums of the values of threads up to each, in one of two arrays by turns."""
    me, apart, (here, there) = lang.local_id(), 1, pair
    here[me] = value
    lang.barrier()
    while apart < lang.workgroup_size():
        other = here[lang.select(me >= apart, me - apart, 0)]
        there[me] = lang.select(me >= apart, here[me] + other, here[me])
        lang.barrier()
        here, there, apart = there, here, apart * 2
    return here


totals_kernel: Kernel = Kernel(
    _totals, workgroup=THREADS, name="cumsum_totals", signature=signature({"x": 2}, {"totals": 2})
)
cumsum_kernel: Kernel = Kernel(_cumsum, workgroup=THREADS, name="cumsum")


def rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """[..., n] to [..., n], in the dtype of a sum."""
    x = specs[0]
    if not x.shape:
        raise ShapeError("cumsum: expected rank 1 or more, got a scalar")
    if x.dtype.kind == "bool":
        raise DTypeError("cumsum: expected a numeric dtype, got bool")
    return ((x.shape, sum_dtype(x.dtype)),)


def reference(x: Array) -> Array:
    """The NumPy formula, floats in float64."""
    wide = np.float64 if x.dtype.kind == "f" else np.dtype(f"{x.dtype.kind}4")
    sums: Array = np.cumsum(x, -1, dtype=wide)
    return sums


def lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """One launch, or two for rows longer than SPLIT elements."""
    x, y = rows_of(form.inputs[0]), rows_of(form.outputs[0])
    rows, columns = x.shape
    parts = max(-(-columns // SPLIT), 1)
    part = columns if parts == 1 else SPLIT
    threads = min(THREADS, caps.max_workgroup)
    scalars = (("columns", columns), ("part", part), ("parts", parts))
    constants = (("chunk", chunked(x, y)),)
    if parts == 1:
        call = Call(cumsum_kernel, (Ref(0, x), Ref(1, y)), scalars, constants, rows, threads,
                    signature({"x": 2}, {"y": 2}))  # fmt: skip
        return Lowered((call,))
    between = make_spec((rows, parts), dtype_of(x.dtype.value), 4)
    totals = Ref(2, between)
    calls = (
        Call(totals_kernel, (Ref(0, x), totals), scalars, (), rows * parts, threads),
        Call(cumsum_kernel, (Ref(0, x), totals, Ref(1, y)), scalars, constants, rows * parts,
             threads, signature({"x": 2, "totals": 2}, {"y": 2})),
    )  # fmt: skip
    return Lowered(calls, (between,))


CUMSUM: Op[NoAttrs] = Op(
    "cumsum", rule, reference, lower, takes_rows, axes=along_rows, doc=__doc__ or ""
)
