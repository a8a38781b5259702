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
from centella.axes import along_rows
from centella.dtypes import dtype_of, f32, u32
from centella.errors import DTypeError, ShapeError
from centella.op import Lowered, Op, Out
from centella.ops.elements import load_elements
from centella.ops.face import face
from centella.ops.host import on_blocks
from centella.ops.layout import flat, rows_of, takes_rows
from centella.ops.operands import NUMPY
from centella.ops.rows import Values, chunked, fold, masked, walk, width_of, workgroup_for
from centella.ops.steps import (
    Chain,
    Elements,
    row_space,
    single,
    starts_of,
    traced_numbers,
)
from centella.program import Call, Kernel, Ref
from centella.specs import Caps, Spec


def _normalise(
    *, kind: str, chunk: bool, steps: Any, at: int, modes: Any, rank: int, types: Any, y: Any,
    **inputs: Any,
) -> None:  # fmt: skip
    """A group a row: statistics in one or two passes, then the result.

    What is normalised is a value of a chain, computed anew in each pass; the result goes on through
    the rest of the chain.
    """
    columns = lang.parameter("columns", u32)
    row = lang.group_id()
    step, count = steps[at], len(modes)
    made = dtype_of(step.dtype)
    width = made.per_chunk if chunk else made.per_word
    numbers = traced_numbers(types)
    starts = starts_of(row, rank, count + 1)
    x, *vectors = step.operands

    def elements(column: Any) -> Elements:
        def read(k: int) -> Values:
            return load_elements(inputs[f"x{k}"], modes[k], starts[k], column, width, k)

        return Elements(steps, numbers, count, read)

    def statistic(of: Any) -> Any:
        total = lang.var(0.0, f32)
        for column in walk(columns, width):
            values = [of(v) for v in elements(column)[x]]
            total += fold(masked(values, column, columns, 0.0), lambda a, b: a + b)
        return lang.workgroup_reduce(total, "add")

    def squares(of: Any) -> Any:
        return statistic(lambda v: (d := of(v)) * d)

    eps, length = numbers[f"{at}.eps"], lang.cast(columns, f32)
    mean: Any = 0.0
    first: Any = 0.0
    if kind == "layer":
        first = Elements(steps, numbers, count, lambda k: [inputs[f"x{k}"][starts[k]]])[x][0]
        mean = statistic(lambda v: v - first) / length
        factor = 1.0 / lang.sqrt(squares(lambda v: (v - first) - mean) / length + eps)
    elif kind == "rms":
        factor = 1.0 / lang.sqrt(squares(lambda v: v) / length + eps)
    else:
        factor = 1.0 / lang.maximum(lang.sqrt(squares(lambda v: v)), eps)
    for column in walk(columns, width):
        have = elements(column)
        out = [((v - first) - mean) * factor if kind == "layer" else v * factor for v in have[x]]
        for name, k in zip(dict(step.attrs)["vectors"], vectors, strict=True):
            pairs = zip(out, have[k], strict=True)
            out = [v * w if name == "weight" else v + w for v, w in pairs]
        if at < len(steps) - 1:
            have.put(at, out)
            out = have[count + len(steps) - 1]
        _store(y, starts[count] + column, out, chunk)


def _store(y: Any, place: Any, values: Values, chunk: bool) -> None:
    """Whole chunks or words; past the row's end is pad."""
    part = y.dtype.per_chunk if chunk and len(values) >= y.dtype.per_chunk else y.dtype.per_word
    for first in range(0, len(values), part):
        y.store(place + first, values[first : first + part])


NAMES: dict[str, str] = {"layer": "layer_norm", "rms": "rms_norm", "l2": "l2_normalize"}  # by kind
norm_kernel: Kernel = Kernel(_normalise, workgroup=256, name="normalise")


def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """[..., n] with vectors of n to [..., n]."""
    x, *vectors = specs
    name = NAMES[attrs["kind"]]
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


def formula(o: Any, values: list[Any], attrs: dict[str, Any]) -> Any:
    """The formula on rows of neighbouring elements."""
    x, *affine = values
    kind, eps, n = attrs["kind"], attrs["eps"], max(o.columns(x), 1)
    if kind == "layer":
        shifted = x - o.row_first(x)
        centred = shifted - o.row_sum(shifted) / n
        y = centred / o.sqrt(o.row_sum(centred * centred) / n + eps)
    elif kind == "rms":
        y = x / o.sqrt(o.row_sum(x * x) / n + eps)
    else:
        y = x / o.maximum(o.sqrt(o.row_sum(x * x)), eps)
    named = dict(zip(attrs["vectors"], affine, strict=True))
    if "weight" in named:
        y = y * named["weight"]
    return y + named["bias"] if "bias" in named else y


def reference(x: Any, *affine: Any, **attrs: Any) -> Any:
    """The NumPy formula; NumPy adds neighbouring elements pairwise."""
    return formula(NUMPY, [np.ascontiguousarray(x), *affine], attrs)


def lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch; a group a row."""
    choice = {"kind": attrs["kind"], "vectors": attrs["vectors"]}
    chain = single("norm", choice, (("eps", attrs["eps"]),), (*inputs, outputs[0]))
    return lower_chain(chain, outputs[0])


def lower_chain(chain: Chain, out: Spec) -> Lowered:
    """A norm with the steps before and after it: the launch of the norm alone, so its sums."""
    x, made = chain.sources[0], chain.made
    chunk, width = _access(chain.sources, made)
    inputs = chain.inputs
    space = row_space(x.shape, inputs, (True,) * len(inputs), width, out)
    rows, columns = rows_of(x).shape
    call = Call(
        norm_kernel,
        (*(Ref(k, flat(s)) for k, s in enumerate(inputs)), Ref(len(inputs), out)),
        (("columns", columns), *space.scalars, *chain.scalars),
        (
            ("at", chain.at), ("chunk", chunk), ("kind", dict(chain.steps[chain.at].attrs)["kind"]),
            ("modes", space.modes), ("rank", space.rank), ("steps", chain.steps),
            ("types", chain.types),
        ),
        rows,
        workgroup=workgroup_for(columns, width),
        face=face({f"x{k}": 1 for k in range(len(inputs))}, {"y": 1}),
    )  # fmt: skip
    return Lowered((call,))


def _access(sources: tuple[Spec, ...], made: Spec) -> tuple[bool, int]:
    """Whether a thread takes a chunk at a time, and the elements that it takes."""
    chunk = chunked(*(rows_of(s) for s in (*sources, made)))
    return chunk, width_of(made, chunk)


def stores(sources: tuple[Spec, ...], made: Spec, out: Spec) -> bool:
    """Whether what a thread takes of a norm fills words of `out`, a result of another dtype."""
    if out.dtype.itemsize == made.dtype.itemsize:
        return True
    chunk, width = _access(sources, made)
    return chunk and out.aligned and width % out.dtype.per_word == 0 == made.shape[-1] % width


NORM = Op("norm", rule, reference, lower, takes_rows, axes=along_rows, formula=formula,
          host=on_blocks("norm", formula), doc=__doc__ or "")  # fmt: skip
