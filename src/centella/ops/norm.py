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
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, dtype_of, f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Operand
from centella.op.op import Form, Lowered, Op, Out, along_rows
from centella.ops.elements import load_elements
from centella.ops.hopper import MULTIPROCESSORS
from centella.ops.host import on_blocks
from centella.ops.layout import flat, rows_of, takes_rows
from centella.ops.operands import NUMPY
from centella.ops.rows import WALKERS, Item, Row, Team, Values, chunked, team_of, width_of
from centella.ops.steps import (
    Chain,
    Elements,
    row_space,
    single,
    starts_of,
    traced_numbers,
)
from centella.ops.tables import LOOKUPS, chosen
from centella.specs import Caps, Spec


def _normalise(
    *, kind: str, chunk: bool, ahead: bool, early: bool, team: Team, steps: Any, at: int,
    modes: Any, rank: int, types: Any, y: Argument, **inputs: Any,
) -> None:  # fmt: skip
    """A team a row: statistics, the variance after the mean, then the result.

    What is normalised is a value of a chain; the result goes on through the rest of the chain.

    Args:
        ahead: vectors are loaded beside x, not behind its statistics.
        early: they are loaded before earlier launches are over, and the next launch may begin at
            once, since this one leaves most of the GPU free.
    """
    if early:
        lang.ptx.launch_dependents()
    step, count = steps[at], len(modes)
    dtype = dtype_of(step.dtype)
    width = dtype.per_chunk if chunk else dtype.per_word
    numbers = traced_numbers(types)
    columns = lang.parameter("columns", u32)
    row = Row(team, width, columns, lang.parameter("rows", u32))
    starts, numbers = chosen(steps, inputs, starts_of(row.number, rank, count + 1), numbers)
    x, *vectors = step.operands

    def elements(item: Item) -> Elements:
        def read(k: int) -> Values:
            return load_elements(inputs[f"x{k}"], modes[k], starts[k], item.column, width, k)

        return Elements(steps, numbers, count, read)

    def loaded(item: Item) -> Elements:
        have = elements(item)
        for k in vectors if ahead else (x,):
            have[k]
        return have

    values = row.kept(loaded)
    if early:
        lang.ptx.await_launches()
    if ahead:
        for item in row.items():
            values(item)[x]

    def squares(of: Any) -> Any:
        return row.total(lambda item: [(d := of(v)) * d for v in values(item)[x]], 0.0, "add")

    eps, length = numbers[f"{at}.eps"], lang.cast(columns, f32)
    mean: Any = 0.0
    first: Any = 0.0
    if kind == "layer":
        first = Elements(steps, numbers, count, lambda k: [inputs[f"x{k}"][starts[k]]])[x][0]
        mean = row.total(lambda item: [v - first for v in values(item)[x]], 0.0, "add") / length
        factor = 1.0 / lang.sqrt(squares(lambda v: (v - first) - mean) / length + eps)
    elif kind == "rms":
        factor = 1.0 / lang.sqrt(squares(lambda v: v) / length + eps)
    else:
        factor = 1.0 / lang.maximum(lang.sqrt(squares(lambda v: v)), eps)
    for item in row.items():
        have = values(item)
        out = [((v - first) - mean) * factor if kind == "layer" else v * factor for v in have[x]]
        for name, k in zip(step.attrs.vectors, vectors, strict=True):
            pairs = zip(out, have[k], strict=True)
            out = [v * w if name == "weight" else v + w for v, w in pairs]
        if at < len(steps) - 1:
            have.put(at, out)
            out = have[count + len(steps) - 1]
        with row.storing(item):
            _store(y, starts[count] + item.column, out, chunk)


def _store(y: Argument, start: Operand, values: Values, chunk: bool) -> None:
    """Whole chunks or words; past the row's end is pad."""
    part = y.dtype.per_chunk if chunk and len(values) >= y.dtype.per_chunk else y.dtype.per_word
    for first in range(0, len(values), part):
        y.store(start + first, values[first : first + part])


HELD = 40  # elements that a thread holds of a row narrower than its vectors: a warp has 1280
FEW = MULTIPROCESSORS * 1024  # threads of a launch, all of which a large GPU has at a time
PASSES = 3  # over a row that is walked: mean, variance, result
NAMES: dict[str, str] = {"layer": "layer_norm", "rms": "rms_norm", "l2": "l2_normalize"}  # by kind
norm_kernel: Kernel = Kernel(_normalise, workgroup=WALKERS, name="normalise")


class NormAttrs(Struct, frozen=True):
    """Which norm (see `NAMES`), its eps, and which vectors come after x."""

    kind: str
    eps: float
    vectors: tuple[str, ...]


def rule(specs: tuple[Spec, ...], attrs: NormAttrs) -> tuple[Out, ...]:
    """[..., n] with vectors of n to [..., n]."""
    x, *vectors = specs
    name = NAMES[attrs.kind]
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


def formula(o: Any, values: list[Any], attrs: NormAttrs) -> Any:
    """The formula on rows of neighbouring elements."""
    x, *affine = values
    kind, eps, n = attrs.kind, attrs.eps, max(o.columns(x), 1)
    if kind == "layer":
        shifted = x - o.row_first(x)
        centred = shifted - o.row_sum(shifted) / n
        y = centred / o.sqrt(o.row_sum(centred * centred) / n + eps)
    elif kind == "rms":
        y = x / o.sqrt(o.row_sum(x * x) / n + eps)
    else:
        y = x / o.maximum(o.sqrt(o.row_sum(x * x)), eps)
    named = dict(zip(attrs.vectors, affine, strict=True))
    if "weight" in named:
        y = y * named["weight"]
    return y + named["bias"] if "bias" in named else y


def reference(x: Array, *affine: Array, **attrs: Any) -> Any:
    """The NumPy formula; NumPy adds neighbouring elements pairwise."""
    return formula(NUMPY, [np.ascontiguousarray(x), *affine], NormAttrs(**attrs))


def lower(form: Form[NormAttrs], caps: Caps) -> Lowered:
    """One launch; a team a row."""
    return lower_chain(single(form), form.outputs[0], caps)


def lower_chain(chain: Chain, out: Spec, caps: Caps) -> Lowered:
    """A norm with the steps before and after it: the launch of the norm alone, so its sums."""
    x, result = chain.sources[0], chain.row_result
    chunk, width = _item(chain.sources, result)
    inputs = chain.inputs
    space = row_space(x.shape, chain.seen, (True,) * len(inputs), width, out)
    rows, columns = rows_of(x).shape
    team = _team(chain.sources, result, width, caps)
    groups = team.groups(rows)
    ahead = team.items > 0 and team.threads <= WALKERS and groups * team.threads <= FEW
    early = ahead and caps.early_launch and groups <= MULTIPROCESSORS and _reads_vectors(chain)
    call = Call(
        norm_kernel,
        (*(Ref(k, flat(s)) for k, s in enumerate(inputs)), Ref(len(inputs), out)),
        (("columns", columns), ("rows", rows), *space.scalars, *chain.scalars),
        (
            ("ahead", ahead), ("at", chain.at), ("chunk", chunk), ("early", early),
            ("kind", chain.steps[chain.at].attrs.kind), ("modes", space.modes),
            ("rank", space.rank), ("steps", chain.steps), ("team", team), ("types", chain.types),
        ),
        groups,
        workgroup=team.threads,
        signature=signature({f"x{k}": 1 for k in range(len(inputs))}, {"y": 1}),
    )  # fmt: skip
    return Lowered((call,))


def _reads_vectors(chain: Chain) -> bool:
    """Whether it reads nothing before the wait but its vectors: no step makes one, or reads ids."""
    own = all(k < len(chain.inputs) for k in chain.steps[chain.at].operands[1:])
    return own and not any(step.name in LOOKUPS for step in chain.steps)


def _team(sources: tuple[Spec, ...], result: Spec, width: int, caps: Caps) -> Team:
    """Who has a row: threads of larger groups have no registers for `HELD` elements."""
    columns = result.shape[-1]
    if any(s.dtype.itemsize > result.dtype.itemsize for s in sources):
        team = team_of(columns, width, caps, held=HELD)
        if team.threads <= WALKERS:
            return team
    return team_of(columns, width, caps)


def _item(sources: tuple[Spec, ...], result: Spec) -> tuple[bool, int]:
    """Whether a thread takes a chunk at a time, and the elements that it takes."""
    chunk = chunked(rows_of(sources[0]), rows_of(result))  # vectors are read as they lie
    return chunk, width_of(result, chunk)


def elements_at_once(sources: tuple[Spec, ...], result: Spec, caps: Caps) -> tuple[int, int]:
    """Elements of a row that a thread's program computes at a time, and how often it does."""
    _, width = _item(sources, result)
    team = _team(sources, result, width, caps)
    return (team.items * width, 1) if team.items else (width, PASSES)


def stores(sources: tuple[Spec, ...], result: Spec, out: Spec) -> bool:
    """Whether what a thread takes of a norm fills words of `out`, a result of another dtype."""
    if out.dtype.itemsize == result.dtype.itemsize:
        return True
    chunk, width = _item(sources, result)
    return chunk and out.aligned and width % out.dtype.per_word == 0 == result.shape[-1] % width


NORM = Op("norm", rule, reference, lower, takes_rows, attrs=NormAttrs, axes=along_rows,
          formula=formula, host=on_blocks("norm", formula), doc=__doc__ or "")  # fmt: skip
