"""Normalisation over the last dimension: layer_norm, rms_norm, l2_normalize.

layer_norm    y = (x - mean) / sqrt(var + eps) * weight + bias     (Ba et al. 2016)
rms_norm      y = x / sqrt(mean(x^2) + eps) * weight               (Zhang and Sennrich 2019)
l2_normalize  y = x / max(sqrt(sum(x^2)), eps)

layer_norm works on x minus the row's first element, so that rows far from zero lose nothing: a
constant row is exactly 0. The variance is that of the deviations from the mean, in a pass of its
own; statistics are f32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import f32, u32
from centella.errors import DTypeError, ShapeError
from centella.lang.face import Face, TensorParam
from centella.op import Lowered, Op, Out
from centella.ops.layout import rows_of, takes_rows
from centella.ops.rows import (
    chunked,
    fold,
    load,
    load_vector,
    masked,
    store,
    walk,
    width_of,
    workgroup_for,
)
from centella.program import Call, Kernel, Ref
from centella.specs import Caps, Spec


def _squared(v: Any) -> Any:
    return v * v


def _normalise(*, kind: str, chunk: bool, x: Any, y: Any, **affine: Any) -> None:
    """A group a row: statistics in one or two passes, then the result."""
    columns, eps = lang.parameter("columns", u32), lang.parameter("eps", f32)
    row = lang.group_id()
    width = width_of(y, chunk)

    def statistic(of: Any) -> Any:
        total = lang.var(0.0, f32)
        for column in walk(columns, width):
            values = [of(v) for v in load(x, row, column, columns, width, chunk)]
            total += fold(masked(values, column, columns, 0.0), lambda a, b: a + b)
        return lang.workgroup_reduce(total, "add")

    count = lang.cast(columns, f32)
    mean: Any = 0.0
    first: Any = 0.0
    if kind == "layer":
        first = x[row, 0]
        mean = statistic(lambda v: v - first) / count
        factor = 1.0 / lang.sqrt(statistic(lambda v: _squared((v - first) - mean)) / count + eps)
    elif kind == "rms":
        factor = 1.0 / lang.sqrt(statistic(lambda v: v * v) / count + eps)
    else:
        factor = 1.0 / lang.maximum(lang.sqrt(statistic(lambda v: v * v)), eps)
    for column in walk(columns, width):
        out = [
            ((v - first) - mean) * factor if kind == "layer" else v * factor
            for v in load(x, row, column, columns, width, chunk)
        ]
        for name, vector in affine.items():
            values = load_vector(vector, column, columns, width, chunk)
            pairs = zip(out, values, strict=True)
            out = [v * w if name == "weight" else v + w for v, w in pairs]
        store(y, row, column, out)


norm_kernel = Kernel(_normalise, workgroup=256, name="normalise", face=Face((), (), ()))


def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """[..., n] with vectors of n to [..., n]."""
    x, *vectors = specs
    name = {"layer": "layer_norm", "rms": "rms_norm"}.get(attrs["kind"], "l2_normalize")
    if not x.shape:
        raise ShapeError(f"{name}: expected rank 1 or more, got a scalar")
    if any(not s.dtype.is_float for s in specs):
        raise DTypeError(f"{name}: expected float dtypes, got {[s.dtype.name for s in specs]}")
    for vector in vectors:
        if vector.shape != x.shape[-1:]:
            raise ShapeError(
                f"{name}: expected a vector of {x.shape[-1]}, got {list(vector.shape)}"
            )
    return ((x.shape, x.dtype),)


def reference(x: Any, *affine: Any, kind: str, eps: float, vectors: tuple[str, ...]) -> Any:
    """The NumPy formula."""
    n = max(x.shape[-1], 1)
    if kind == "layer":
        shifted = x - x[..., :1]
        centred = shifted - shifted.sum(-1, keepdims=True) / n
        y = centred / np.sqrt((centred * centred).sum(-1, keepdims=True) / n + eps)
    elif kind == "rms":
        y = x / np.sqrt((x * x).sum(-1, keepdims=True) / n + eps)
    else:
        y = x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), eps)
    named = dict(zip(vectors, affine, strict=True))
    if "weight" in named:
        y = y * named["weight"]
    return y + named["bias"] if "bias" in named else y


def lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch; a group a row."""
    x, y = rows_of(inputs[0]), rows_of(outputs[0])
    vectors = inputs[1:]
    chunk = chunked(x, y, *vectors)
    rows, columns = y.shape
    width = y.dtype.per_chunk if chunk else y.dtype.per_word
    names = attrs["vectors"]
    face = Face(
        (
            ("x", TensorParam("in", None, 2)),
            *((n, TensorParam("in", None, 1)) for n in names),
            ("y", TensorParam("out", None, 2)),
        ),
        (),
        (),
    )
    call = Call(
        norm_kernel,
        (Ref(0, x), *(Ref(1 + i, v) for i, v in enumerate(vectors)), Ref(len(inputs), y)),
        (("columns", columns), ("eps", attrs["eps"])),
        (("chunk", chunk), ("kind", attrs["kind"])),
        rows,
        workgroup=workgroup_for(columns, width),
        face=face,
    )
    return Lowered((call,))


NORM = Op("norm", rule, reference, lower, takes_rows, doc=__doc__ or "")
