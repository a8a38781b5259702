"""expert_linear: products of each row with the weights of the experts that were chosen for it.

    y[r, p] = act(W[e] x[r]) * (V[e] x[r])                  with a gate; e = ids[r, p]
    y[r]    = sum over p of shares[r, p] W[e] x[r, p]  + residual[r]          without

The two are the halves of a gated network of a mixture of experts (Shazeer et al. 2017). Each row
reads the weights of its own experts, of which a large model has many and chooses few, and nothing
of the size of a weight is written. `expert_kernel.py` has the kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import i32
from centella.errors import DTypeError, ShapeError
from centella.op.axes import Axes, axes
from centella.op.form import Form
from centella.op.op import Op, Out
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.layout import takes_rows
from centella.ops.operands import NUMPY
from centella.specs import Spec


class ExpertAttrs(Struct, frozen=True):
    """Operands after the ids ("up"; or "shares", "residual"), and the gate's activation or ""."""

    extras: tuple[str, ...]
    gate: str


def rule(specs: tuple[Spec, ...], attrs: ExpertAttrs) -> tuple[Out, ...]:
    """x [rows, k] with a gate, else [rows, picks, k]; weight and up [experts, n, k].

    ids [rows, picks] i32; shares [rows, picks]; residual [rows, n].
    """
    x, weight, ids, *more = specs
    if ids.dtype is not i32:
        raise DTypeError(f"expert_linear: expected i32 ids, got {ids.dtype.name}")
    if any(not s.dtype.is_float for s in (x, weight, *more)):
        names = [s.dtype.name for s in (x, weight, *more)]
        raise DTypeError(f"expert_linear: expected float dtypes, got {names}")
    if len(weight.shape) != 3 or len(ids.shape) != 2 or 0 in (*weight.shape, *ids.shape[1:]):
        raise ShapeError(
            f"expert_linear: expected weight [experts, n, k] and ids [rows, picks], none of them 0 "
            f"but rows, got {list(weight.shape)} and {list(ids.shape)}"
        )
    if attrs.extras not in ((("up",),) if attrs.gate else (("shares",), ("shares", "residual"))):
        raise ShapeError(
            "expert_linear: expected up with a gate, else shares and maybe a residual, got "
            f"{list(attrs.extras)} and gate {attrs.gate!r}"
        )
    (rows, picks), (_, n, k) = ids.shape, weight.shape
    wanted = {"x": (rows, k) if attrs.gate else (rows, picks, k), "up": weight.shape,
              "shares": ids.shape, "residual": (rows, n)}  # fmt: skip
    for name, spec in zip(("x", *attrs.extras), (x, *more), strict=True):
        if spec.shape != wanted[name]:
            raise ShapeError(
                f"expert_linear: expected {name} {list(wanted[name])}, got {list(spec.shape)}"
            )
    if attrs.gate and more[0].dtype is not weight.dtype:
        raise DTypeError(
            f"expert_linear: expected up of {weight.dtype.name}, got {more[0].dtype.name}"
        )
    return (((rows, picks, n) if attrs.gate else (rows, n), x.dtype),)


def reference(x: Any, weight: Any, ids: Any, *more: Any, extras: tuple[str, ...], gate: str) -> Any:
    """The NumPy formula: a product an expert, of the rows that chose it; NaN where none is."""
    named = dict(zip(extras, more, strict=True))
    each = np.full((*ids.shape, weight.shape[1]), np.nan, x.dtype)
    for expert in np.unique(ids):
        if not 0 <= expert < len(weight):
            continue
        at, pick = np.nonzero(ids == expert)
        if gate:
            rows = x[at]
            opened = ACTIVATIONS[gate](NUMPY, rows @ weight[expert].T)
            each[at, pick] = opened * (rows @ named["up"][expert].T)
        else:
            each[at, pick] = x[at, pick] @ weight[expert].T
    if gate:
        return each
    y = (each * named["shares"][..., None]).sum(1)
    return y + named["residual"] if "residual" in named else y


def axes_of(form: Form[ExpertAttrs]) -> Axes:
    """Rows: the outputs of an expert lie between those of others, so a part of them spans all."""
    more = ["..." if name == "up" else "r." for name in form.attrs.extras]
    x, y = ("r.", "r..") if form.attrs.gate else ("r..", "r.")
    return axes([x, "...", "r.", *more], [y])


EXPERTS: Op[ExpertAttrs] = Op(
    "expert_linear", rule, reference, "centella.ops.matmul.expert_kernel:lower", takes_rows,
    attrs=ExpertAttrs, axes=axes_of, doc=__doc__ or "",
)  # fmt: skip
