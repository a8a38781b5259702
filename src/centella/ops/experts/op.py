"""expert_linear: products of each row with the weights of the experts that were chosen for it.

    y[r, p] = act(W[e] x[r]) * (V[e] x[r])                  with a gate; e = ids[r, p]
    y[r]    = sum over p of shares[r, p] W[e] x[r, p]  + residual[r]          without

The two are the halves of a gated network of a mixture of experts (Shazeer et al. 2017). Each row
reads the weights of its own experts, of which a large model has many and chooses few, and nothing
of the size of a weight is written. W and V are tensors [experts, n, k], or planes of quantised
weights [experts n, k]. `rows.py` has the kernel of few rows, `mma.py` and `tiled.py` those of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, i32, narrow, widen
from centella.emit.program import HostProgram
from centella.errors import DTypeError, ShapeError
from centella.op.axes import Axes, axes
from centella.op.op import Form, Op, Out
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.layout import takes_rows
from centella.ops.matmul.stored import product
from centella.ops.operands import NUMPY
from centella.ops.quant.format import SYMBOLS
from centella.ops.quant.table import FORMATS
from centella.specs import Shape, Spec


class ExpertAttrs(Struct, frozen=True):
    """What is computed.

    Attributes:
        extras: operands after the ids: "up" with its further planes; or "shares", "residual".
        gate: its activation, or "".
        format: that both weights are quantised in; "": they are tensors of floats.
        experts: of quantised weights.
        variant: a kernel that is forced, for tests and benchmarks.
    """

    extras: tuple[str, ...]
    gate: str
    format: str = ""
    experts: int = 0
    variant: str | None = None

    @property
    def planes(self) -> int:
        """Operands that a weight is."""
        return len(FORMATS[self.format].planes) if self.format else 1


def names_of(attrs: ExpertAttrs) -> tuple[str, ...]:
    """The operands of a kernel: x, the planes of W by their symbols, ids, the others."""
    return ("x", *SYMBOLS[: attrs.planes], "ids", *attrs.extras)


def up_planes(count: int) -> tuple[str, ...]:
    """The names of V and its further planes."""
    return ("up", *(f"up_{symbol}" for symbol in SYMBOLS[1:count]))


def shape_of(specs: Sequence[Spec], attrs: ExpertAttrs) -> Shape:
    """(experts, n, k) of a weight, given its planes.

    Raises:
        ShapeError, DTypeError: planes that do not belong together, or are of other experts.
    """
    if not attrs.format:
        return specs[0].shape
    n, k = FORMATS[attrs.format].check("expert_linear", specs)
    if attrs.experts < 1 or n % attrs.experts:
        raise ShapeError(
            f"expert_linear: expected rows of {attrs.experts} experts, as many of each, got {n}"
        )
    return attrs.experts, n // attrs.experts, k


def rule(specs: tuple[Spec, ...], attrs: ExpertAttrs) -> tuple[Out, ...]:
    """x [rows, k] with a gate, else [rows, picks, k]; weight and up [experts, n, k].

    ids [rows, picks] i32; shares [rows, picks]; residual [rows, n].
    """
    x, *rest = specs
    planes, ids, more = rest[: attrs.planes], rest[attrs.planes], rest[attrs.planes + 1 :]
    shape = shape_of(planes, attrs)
    ups = more[: attrs.planes] if attrs.gate else []
    if attrs.format and FORMATS[attrs.format].by_row:
        raise DTypeError(f"expert_linear: expected a format of blocks, got {attrs.format}")
    if ids.dtype is not i32:
        raise DTypeError(f"expert_linear: expected i32 ids, got {ids.dtype.name}")
    floats = (x, *more[len(ups) :]) if attrs.format else (x, *planes, *more)
    if any(not s.dtype.is_float for s in floats):
        names = [s.dtype.name for s in floats]
        raise DTypeError(f"expert_linear: expected float dtypes, got {names}")
    if len(shape) != 3 or len(ids.shape) != 2 or 0 in (*shape, *ids.shape[1:]):
        raise ShapeError(
            f"expert_linear: expected weight [experts, n, k] and ids [rows, picks], none of them 0 "
            f"but rows, got {list(shape)} and {list(ids.shape)}"
        )
    every = [up_planes(attrs.planes)] if attrs.gate else [("shares",), ("shares", "residual")]
    if attrs.extras not in every:
        raise ShapeError(
            "expert_linear: expected up with a gate, else shares and maybe a residual, got "
            f"{list(attrs.extras)} and gate {attrs.gate!r}"
        )
    (rows, picks), (_, n, k) = ids.shape, shape
    wanted = {"x": (rows, k) if attrs.gate else (rows, picks, k), "shares": ids.shape,
              "residual": (rows, n)}  # fmt: skip
    wanted |= dict(zip(up_planes(attrs.planes), (p.shape for p in planes), strict=True))
    for name, spec in zip(("x", *attrs.extras), (x, *more), strict=True):
        if spec.shape != wanted[name]:
            raise ShapeError(
                f"expert_linear: expected {name} {list(wanted[name])}, got {list(spec.shape)}"
            )
    for up, plane in zip(ups, planes, strict=False):
        if up.dtype is not plane.dtype:
            raise DTypeError(
                f"expert_linear: expected up of {plane.dtype.name}, got {up.dtype.name}"
            )
    return (((rows, picks, n) if attrs.gate else (rows, n), x.dtype),)


def reference(
    x: Array, *rest: Array, extras: tuple[str, ...], gate: str, format: str = "", experts: int = 0
) -> Any:
    """The NumPy formula: a product an expert, of the rows that chose it; NaN where none is."""
    count = len(FORMATS[format].planes) if format else 1
    planes, ids, more = rest[:count], rest[count], rest[count + 1 :]

    def product_of(rows: Array, weight: Sequence[Array]) -> Array:
        whole = FORMATS[format].decode(*weight).astype(x.dtype) if format else weight[0]
        product: Array = rows @ whole.T
        return product

    attrs = ExpertAttrs(extras, gate, format, experts)
    return _mixed(x, planes, ids, more, attrs, product_of)


def _mixed(
    x: Array, planes: Sequence[Array], ids: Array, more: Sequence[Array], attrs: ExpertAttrs,
    product_of: Callable[[Array, Sequence[Array]], Array],
) -> Any:  # fmt: skip
    """What the experts give for the rows that chose them, one expert after the other.

    Args:
        product_of: of rows [rows, k] and the planes of one expert: [rows, n].
    """
    named = dict(zip(attrs.extras, more, strict=True))
    experts = attrs.experts or len(planes[0])
    n = len(planes[0]) // experts if attrs.format else planes[0].shape[1]
    each = np.full((*ids.shape, n), np.nan, x.dtype)

    def of(planes: Sequence[Array], expert: int) -> list[Array]:
        if not attrs.format:
            return [planes[0][expert]]
        return [plane[expert * n : (expert + 1) * n] for plane in planes[: attrs.planes]]

    for expert in np.unique(ids):
        if not 0 <= expert < experts:
            continue
        at, pick = np.nonzero(ids == expert)
        if attrs.gate:
            opened = ACTIVATIONS[attrs.gate](NUMPY, product_of(x[at], of(planes, expert)))
            each[at, pick] = opened * product_of(x[at], of(more, expert))
        else:
            each[at, pick] = product_of(x[at, pick], of(planes, expert))
    if attrs.gate:
        return each
    y = (each * named["shares"][..., None]).sum(1)
    return y + named["residual"] if "residual" in named else y


def host(form: Form[ExpertAttrs]) -> HostProgram:
    """The formula in f32, on the chosen experts' weights as they are stored."""
    attrs, (y,) = form.attrs, form.outputs
    x, *rest = form.inputs
    dtypes = [spec.dtype for spec in rest[: attrs.planes]]
    others = [spec.dtype for spec in rest[attrs.planes + 1 :]]

    def product_of(rows: Array, weight: Sequence[Array]) -> Array:
        n = len(weight[0])
        sums = np.empty((len(rows), n), np.float32)
        product(np.ascontiguousarray(rows), weight, dtypes, attrs.format, sums)
        return sums

    def call(ins: list[Any], outs: list[Any]) -> None:
        rows, *given = ins
        planes, ids, more = given[: attrs.planes], given[attrs.planes], given[attrs.planes + 1 :]
        if not attrs.gate:  # else they are weights, too
            more = [widen(a, d) for a, d in zip(more, others, strict=True)]
        with np.errstate(all="ignore"):
            result = _mixed(widen(rows, x.dtype), planes, ids, more, attrs, product_of)
        np.copyto(outs[0], narrow(result, y.dtype))

    return HostProgram("numpy:expert_linear", "expert_linear", call)


def axes_of(form: Form[ExpertAttrs]) -> Axes:
    """Rows: the outputs of an expert lie between those of others, so a part of them spans all."""
    attrs = form.attrs
    ranks = [len(spec.shape) * "." for spec in form.inputs[1 : 1 + attrs.planes]]
    more = ranks if attrs.gate else ["r." for _ in attrs.extras]
    x, y = ("r.", "r..") if attrs.gate else ("r..", "r.")
    return axes([x, *ranks, "r.", *more], [y])


EXPERTS: Op[ExpertAttrs] = Op(
    "expert_linear", rule, reference, "centella.ops.experts.choice:lower", takes_rows,
    ("grouped", "dequantized", "tiles", "rows"), attrs=ExpertAttrs, host=host, axes=axes_of,
    doc=__doc__ or "",
)  # fmt: skip
