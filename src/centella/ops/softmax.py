"""softmax and log_softmax over the last dimension.

softmax      y_i = exp(x_i - m) / s       m = max_j x_j, s = sum_j exp(x_j - m)
log_softmax  y_i = x_i - m - log s

Statistics are f32 whatever the storage. A NaN in a row makes the row NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered, Op, Out, along_rows
from centella.ops.attention.weights import LOG2E, power, whole_power
from centella.ops.host import on_blocks
from centella.ops.layout import rows_of, takes_rows
from centella.ops.operands import NUMPY
from centella.ops.rows import (
    WALKERS,
    Item,
    Row,
    Team,
    Values,
    chunked,
    fold,
    load,
    long_team,
    team_of,
    top_pair,
    width_of,
)
from centella.specs import Caps, Spec

# The least finite f32, where a maximum starts: a higher start (such as -3.0e38, which only bounds
# the values of masks) would stand above a row of lower numbers, whose exponentials are then all 0.
LOWEST = -3.4028234e38

LEAST = -88.0  # whose power of e is 0, as 2^-127 is
LN2_UPPER, LN2_REST = 0.693145751953125, 1.42860677e-06  # few bits of ln 2, and the rest
HUGE: float = 2.0**20


def _softmax(*, log: bool, chunk: bool, native: bool, team: Team, x: Argument, y: Argument) -> None:
    """A team a row: maximum, sum, result; a row that is walked is read twice."""
    width = width_of(y, chunk)
    columns = lang.parameter("columns", u32)
    row = Row(team, width, columns, lang.parameter("rows", u32))

    def loaded(item: Item) -> Values:
        return load(x, row.number, item.column, columns, width, chunk)

    values: Callable[[Item], Values] = loaded
    if row.unrolled:
        if team.stored:
            values, m = _stored(row, x)
            powers = _powers(values, m, x.dtype.itemsize, native, log)  # computed twice
        else:
            values = row.kept(loaded)
            m = row.total(values, LOWEST, "fmax")
            powers = row.kept(_powers(values, m, x.dtype.itemsize, native, log))
        s = row.total(powers, 0.0, "add")
    else:
        power_of_e = _power_of(x.dtype.itemsize, native)
        m, s = _walked(row, values, power_of_e)
        powers = _each(values, m, power_of_e)
    scale = lang.log(s) if log else 1.0 / s
    for item in row.items():
        with row.storing(item):
            out = (
                [v - m - scale for v in values(item)] if log else [p * scale for p in powers(item)]
            )
            y.store(row.number, item.column, out)  # past the row's end is pad


def _stored(row: Row, x: Argument) -> tuple[Callable[[Item], Values], Operand]:
    """The values of a row's items, from shared memory, and the row's maximum."""
    loaded = row.kept(lambda item: x.load_bits(row.number, item.column))
    words = row.stored(loaded)

    def top(item: Item) -> Any:
        if x.dtype.itemsize == 2 and item.inside is None:
            return fold(x.unpack([top_pair(loaded(item), x.dtype)]), lang.maximum)
        return fold(item.masked(x.unpack(loaded(item)), LOWEST), lang.maximum)

    return lambda item: x.unpack(words(item)), row.across(row.own(top, LOWEST, "max"), "max")


def _walked(
    row: Row, values: Callable[[Item], Values], power_of_e: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Maximum and sum of a row in one pass (Milakov and Gimelshein 2018).

    A sum is relative to the maximum so far, and becomes smaller where that grows.
    """
    high, total = lang.var(LOWEST), lang.var(0.0)
    for item in row.items():
        scores = values(item)
        top = lang.fmax(high, fold(item.masked(scores, LOWEST), lang.fmax))
        powers = item.masked([power_of_e(v - top) for v in scores], 0.0)
        total.set(lang.fma(total, power_of_e(high - top), fold(powers, operator.add)))
        high.set(top)
    m = row.across(high.get(), "fmax")
    return m, row.across(total * power_of_e(high - m), "add")


def _each(
    values: Callable[[Item], Values], m: Operand, power_of_e: Callable[[Any], Any]
) -> Callable[[Item], Values]:
    """e^(x - m) of the values of an item."""
    return lambda item: [power_of_e(v - m) for v in values(item)]


def _powers(
    values: Callable[[Item], Values], m: Operand, itemsize: int, native: bool, log: bool
) -> Callable[[Item], Values]:
    """e^(x - m) of the values of an item, as exact as the results are stored."""
    if not native or itemsize == 4 or log:
        return _each(values, m, _power_of(itemsize, native))
    # All take the same off, so m / ln 2 may be rounded, by at most 0.07 below HUGE. From there on
    # numbers of bf16 that differ do so by 2^12 at least: half of it is exact, and its power 0.
    factor = lang.select(lang.abs(m) < HUGE, LOG2E, 0.5)
    shift = -(m * factor)
    return lambda item: [lang.exp2_native(lang.fma(v, factor, shift)) for v in values(item)]


def _power_of(itemsize: int, native: bool) -> Callable[[Any], Any]:
    """e^x for x <= 0, as exact as the results are stored; `native` as in `Caps.native_exp2`."""
    if itemsize == 2:
        return lambda x: power(x * LOG2E, native)
    return _power if native else lang.exp


def _power(x: Operand) -> Expr:
    """e^x for x <= 0, within 2 ulp of `exp2_native`; 0 below -87.7.

    As in `lang.exp`, whole powers of 2 are taken off, so that it does not matter how `fma` rounds.
    (Two powers of 2 with a product between would not do: drivers make one of them.)
    """
    x = lang.maximum(x, LEAST)
    whole = lang.floor(lang.fma(x, LOG2E, 0.5))
    part = lang.fma(whole, -LN2_UPPER, x)
    apart = lang.bitcast(lang.bitcast(whole, u32) & 0xFFFFFF00, f32)  # see `lang.math`
    part = lang.fma(apart, -LN2_REST, part)
    return lang.exp2_native(part * LOG2E) * whole_power(whole)


softmax_rows: Kernel = Kernel(
    _softmax, workgroup=WALKERS, name="softmax_rows", signature=signature({"x": 2}, {"y": 2}),
    rewritable=True,
)  # fmt: skip


class SoftmaxAttrs(Struct, frozen=True):
    """Whether the result is the logarithm."""

    log: bool = False


def rule(specs: tuple[Spec, ...], attrs: SoftmaxAttrs) -> tuple[Out, ...]:
    """[..., n] to [..., n]."""
    x = specs[0]
    if not x.shape:
        raise ShapeError("softmax: expected rank 1 or more, got a scalar")
    if not x.dtype.is_float:
        raise DTypeError(f"softmax: expected a float dtype, got {x.dtype.name}")
    return ((x.shape, x.dtype),)


def formula(o: Any, values: list[Any], attrs: SoftmaxAttrs) -> Any:
    """The formula on rows of neighbouring elements."""
    (x,) = values
    shifted = x - o.row_max(x)
    e = o.exp(shifted)
    s = o.row_sum(e)
    return shifted - o.log(s) if attrs.log else e / s


def reference(x: Array, log: bool = False) -> Array:
    """The NumPy formula; NumPy adds neighbouring elements pairwise."""
    return formula(NUMPY, [np.ascontiguousarray(x)], SoftmaxAttrs(log)) if x.shape[-1] else x


def lower(form: Form[SoftmaxAttrs], caps: Caps) -> Lowered:
    """One launch; a team a row."""
    x, y = rows_of(form.inputs[0]), rows_of(form.outputs[0])
    chunk = chunked(x, y)
    rows, columns = y.shape
    width = width_of(y, chunk)
    team = team_of(columns, width, caps)
    if chunk and (y.dtype.itemsize == 2 or not team.items):  # alone, f32 has 97 % of a copy
        team = long_team(team, columns, width, caps, stored=True)
    call = Call(
        softmax_rows,
        (Ref(0, x), Ref(1, y)),
        (("columns", columns), ("rows", rows)),
        (
            ("chunk", chunk),
            ("log", form.attrs.log),
            ("native", caps.native_exp2),
            ("team", team),
        ),
        team.groups(rows),
        workgroup=team.threads,
    )
    return Lowered((call,))


SOFTMAX = Op("softmax", rule, reference, lower, takes_rows, attrs=SoftmaxAttrs,
             axes=along_rows, formula=formula, host=on_blocks("softmax", formula),
             doc=__doc__ or "")  # fmt: skip
