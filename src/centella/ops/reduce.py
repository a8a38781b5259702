"""Reductions over the last dimension, and `dot`.

sum  y = sum_j x_j      mean  y = sum_j x_j / n      max, min  NaN when any element is NaN
dot  y = sum_j a_j b_j

Accumulation is f32 (integers: modulo 2^32); sums of i8 and u8 are i32 and u32. A long row is split
among groups; their partial results are reduced by a second launch in a fixed order, so equal inputs
give equal bits. Another axis is moved to the end first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import DType, dtype_of, f32, u32
from centella.errors import DTypeError, ShapeError
from centella.lang.face import Face, TensorParam
from centella.op import Lowered, Op, Out
from centella.ops.layout import rows_of, takes_rows
from centella.ops.rows import chunked, fold, load, masked, walk
from centella.program import Call, Kernel, Ref
from centella.specs import Caps, Spec, make_spec

WORKGROUP = 256
SPLIT = 16384
COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "max": lang.maximum,
    "min": lang.minimum,
}
TREE = {"sum": "add", "max": "max", "min": "min"}
LIMITS = {"f32": (-float("inf"), float("inf")), "i32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1)}


def _neutral(op: str, type_: str) -> float | int:
    if op == "sum":
        return 0.0 if type_ == "f32" else 0
    return LIMITS[type_][0 if op == "max" else 1]


def _reduce(*, op: str, chunk: bool, y: Any, **inputs: Any) -> None:
    """Each group reduces one part of as many rows as fill a word of the output."""
    xs = [inputs[name] for name in sorted(inputs)]
    columns, part = lang.parameter("columns", u32), lang.parameter("part", u32)
    parts = lang.parameter("parts", u32)
    across, pitch = lang.parameter("across", u32), lang.parameter("pitch", u32)
    factor = lang.parameter("factor", f32) if y.dtype.is_float else None
    type_ = xs[0].dtype.value
    width = xs[0].dtype.per_chunk if chunk else 1
    words = y.dtype.per_word
    group = lang.group_id()
    block, piece = group // parts, group % parts
    items = (across + (words - 1)) // words
    outer, inner = block // items, block % items * words
    first = piece * part
    last = lang.minimum(first + part, columns)
    results = []
    for lane in range(words):
        row = outer * across + lang.minimum(inner + lane, across - 1)
        total = lang.var(_neutral(op, type_), xs[0].dtype)
        for offset in walk(last - first, width):
            column = first + offset
            loaded = [load(x, row, column, last, width, chunk) for x in xs]
            values = loaded[0]
            if len(xs) == 2:
                values = [a * b for a, b in zip(*loaded, strict=True)]
            total.set(
                COMBINE[op](
                    total, fold(masked(values, column, last, _neutral(op, type_)), COMBINE[op])
                )
            )
        value = lang.workgroup_reduce(total, TREE[op])
        results.append(value * factor if factor is not None and op == "sum" else value)
    with lang.if_(lang.local_id() == 0):
        y.store(outer * pitch + inner * parts + piece, results)


reduce_kernel = Kernel(_reduce, workgroup=WORKGROUP, name="reduce", face=Face((), (), ()))


def _calls(op: str, inputs: tuple[Spec, ...], out: Spec, factor: float) -> Lowered:
    rows_in = [rows_of(s) for s in inputs]
    rows, columns = rows_in[0].shape
    parts = max(1, -(-columns // SPLIT))
    if parts == 1:
        return Lowered((_call(op, rows_in, range(len(inputs)), out, len(inputs), factor, 1),))
    partial = make_spec((rows, parts), dtype_of(out.dtype.value), 4)
    temp = len(inputs) + 1
    return Lowered(
        (
            _call(op, rows_in, range(len(inputs)), partial, temp, 1.0, parts),
            _call(op, [partial], (temp,), out, len(inputs), factor, 1),
        ),
        (partial,),
    )


def _call(
    op: str, inputs: list[Spec], refs: Any, out: Spec, place: int, factor: float, parts: int
) -> Call:
    rows, columns = inputs[0].shape
    chunk = chunked(*inputs)
    part = -(-columns // parts)
    part = -(-part // 16) * 16 if parts > 1 else max(columns, 1)
    names = [f"x{i}" for i in range(len(inputs))]
    face = Face(
        (*((n, TensorParam("in", None, 2)) for n in names), ("y", TensorParam("out", None, 1))),
        (), (),
    )  # fmt: skip
    across, pitch = rows, rows
    if parts == 1 and len(out.shape) >= 2:
        across, pitch = out.shape[-1], out.strides[-2]
    scalars = (
        ("columns", columns), ("part", part), ("parts", parts), ("across", max(across, 1)),
        ("pitch", pitch), ("factor", factor),
    )  # fmt: skip
    blocks = -(-across // out.dtype.per_word) * (rows // across if across else 0)
    return Call(
        reduce_kernel,
        (*(Ref(i, s) for i, s in zip(refs, inputs, strict=True)), Ref(place, out)),
        scalars,
        (("chunk", chunk), ("op", op)),
        blocks * parts,
        face=face,
    )


def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """[..., n] to [...]; max and min need n > 0."""
    x = specs[0]
    if not x.shape:
        raise ShapeError(f"{attrs['op']}: expected rank 1 or more, got a scalar")
    if attrs["op"] in ("max", "min") and x.shape[-1] == 0:
        raise ShapeError(f"{attrs['op']}: expected at least one element, got {list(x.shape)}")
    kinds = "float" if attrs["op"] == "mean" else "numeric"
    if x.dtype.kind == "bool" or (kinds == "float" and not x.dtype.is_float):
        raise DTypeError(f"{attrs['op']}: expected a {kinds} dtype, got {x.dtype.name}")
    return ((x.shape[:-1], sum_dtype(x.dtype) if attrs["op"] == "sum" else x.dtype),)


def sum_dtype(dtype: DType) -> DType:
    """What a sum is stored as: floats as they are, integers in 32 bits."""
    return dtype if dtype.is_float else dtype_of(dtype.value)


def _wide(x: Any) -> Any:
    return x.dtype if x.dtype.kind == "f" else np.dtype(f"{x.dtype.kind}4")


def reference(x: Any, op: str) -> Any:
    """The NumPy formula."""
    if op == "sum":
        return x.sum(-1, dtype=_wide(x))
    if op == "mean":
        with np.errstate(all="ignore"):
            return x.sum(-1, dtype=x.dtype) / x.dtype.type(x.shape[-1])
    return x.max(-1) if op == "max" else x.min(-1)


def lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch, or two for rows longer than SPLIT elements."""
    op, factor = attrs["op"], 1.0
    if op == "mean":
        columns = inputs[0].shape[-1]
        op, factor = "sum", 1.0 / columns if columns else float("nan")
    return _calls(op, inputs, outputs[0], factor)


def dot_rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """Two vectors of one length to a scalar."""
    a, b = specs
    if len(a.shape) != 1 or a.shape != b.shape:
        raise ShapeError(
            f"dot: expected two vectors of one length, got {list(a.shape)} and {list(b.shape)}"
        )
    if a.dtype is not b.dtype or a.dtype.kind == "bool":
        raise DTypeError(f"dot: expected one numeric dtype, got {a.dtype.name} and {b.dtype.name}")
    return (((), sum_dtype(a.dtype)),)


def dot_reference(a: Any, b: Any) -> Any:
    """The NumPy formula."""
    wide = _wide(a)
    return (a.astype(wide) * b.astype(wide)).sum(dtype=wide)


def dot_lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """As `sum` of products."""
    return _calls("sum", inputs, outputs[0], 1.0)


REDUCE = Op("reduce", rule, reference, lower, takes_rows, doc="sum, mean, max, min over the end")
DOT = Op("dot", dot_rule, dot_reference, dot_lower, takes_rows,
         doc="sum of products")  # fmt: skip
