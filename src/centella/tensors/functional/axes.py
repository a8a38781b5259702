"""Along axes: softmax, norms, sums and other reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Never

from centella.errors import DTypeError, ShapeError
from centella.ops.norm import NAMES as NORMS
from centella.tensors.arguments import check_tensors, epsilon, flag, real, refuse_names
from centella.tensors.tensor import Tensor, apply, apply_with, binary
from centella.tensors.views import axis_of, integers

__all__ = [
    "argmax", "argsort", "cumsum", "l2_normalize", "layer_norm", "log_softmax", "max", "mean",
    "mean_pool", "min", "rms_norm", "softmax", "sort", "sum", "var",
]  # fmt: skip

Axes = int | tuple[int, ...] | None
CHOICES = ("max", "min", "argmax")  # one of the elements, of which there has to be one


def softmax(x: Tensor, axis: int = -1, **other: Never) -> Tensor:
    """exp(x) over its sum along an axis.

    The result has the shape and dtype of x.

    Raises:
        ShapeError: there is no such axis; DTypeError: x is no tensor of floats.
    """
    if type(axis) is int and axis == -1 and not other:
        return apply("softmax", x)
    return _along("softmax", x, axis, lambda rows: apply("softmax", rows), other)


def log_softmax(x: Tensor, axis: int = -1, **other: Never) -> Tensor:
    """Logarithm of softmax along an axis; raises as `softmax` does."""
    return _along("log_softmax", x, axis, lambda rows: apply("softmax", rows, log=True), other)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016).

    Args:
        x: [..., n], of floats; weight, bias: [n], either left out by None.
        eps: added to the variance.

    Raises:
        ShapeError: a scalar, or vectors of another length; DTypeError: no floats.
    """
    return _norm("layer", x, {"weight": weight, "bias": bias}, eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    Args:
        x: [..., n], of floats; weight: [n], left out by None.
        eps: added to the mean of squares.

    Raises:
        ShapeError: a scalar, or a vector of another length; DTypeError: no floats.
    """
    return _norm("rms", x, {"weight": weight}, eps)


def l2_normalize(x: Tensor, axis: int = -1, eps: float = 1e-12, **other: Never) -> Tensor:
    """x / max(||x||, eps) along an axis, in the shape and dtype of x.

    Raises:
        ShapeError: there is no such axis; DTypeError: x is no tensor of floats.
    """
    return _along("l2_normalize", x, axis, lambda rows: _norm("l2", rows, {}, eps), other)


def mean_pool(x: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the first `lengths[b]` positions: x [b, l, d], lengths [b] i32, result [b, d].

    A length below 0 counts as 0, which gives zeros; one above l as l. Of x [n, d] `lengths` are
    offsets [b + 1] i32: the means of rows offsets[b] to offsets[b + 1].

    Raises:
        ShapeError, DTypeError: for shapes or dtypes that do not fit these.
    """
    return apply("mean_pool", x, lengths)


def sum(x: Tensor, axis: Axes = None, keepdims: bool = False, **other: Never) -> Tensor:
    """Sum over one axis, several, or all.

    Floats are added in f32 and stored in their dtype; integers modulo 2^32, as i32 or u32; of bools
    those that are true are counted, as i32.

    Raises:
        ShapeError: there is no such axis, or one twice.
    """
    check_tensors("sum", x)
    counted = x.astype("i32") if x.dtype.kind == "bool" else x
    return _reduced("sum", counted, axis, keepdims, other)


def mean(x: Tensor, axis: Axes = None, keepdims: bool = False, **other: Never) -> Tensor:
    """Mean of floats over one axis, several, or all; of no elements NaN. Raises as `sum` does."""
    return _reduced("mean", x, axis, keepdims, other)


def var(
    x: Tensor, axis: Axes = None, keepdims: bool = False, correction: float = 0.0, **other: Never
) -> Tensor:
    """Variance of floats over one axis, several, or all: sum((x - mean)^2) / (n - correction).

    It is computed in f32, the mean first. `correction=1` estimates that of a population, and gives
    NaN for one element.

    Raises:
        ShapeError: there is no such axis, or one twice; DTypeError: x is no tensor of floats.
    """
    check_tensors("var", x)
    less = real("var", "correction", correction)
    if not x.dtype.is_float:
        raise DTypeError(f"var: expected a float dtype, got {x.dtype.name}")

    def of_rows(rows: Tensor) -> Tensor:
        wide, count = rows.astype("f32"), rows.shape[-1] - less
        apart = wide - apply("reduce", wide, op="mean")[..., None]
        total = apply("reduce", apply("square", apart), op="sum")
        return binary("div", total, count if count > 0 else 0.0).astype(x.dtype)

    return _over("var", x, axis, keepdims, of_rows, other)


def max(x: Tensor, axis: Axes = None, keepdims: bool = False, **other: Never) -> Tensor:
    """Maximum over one axis, several, or all; NaN where any is NaN.

    Raises:
        ShapeError: there is no such axis, one twice, or no element; DTypeError: for bools.
    """
    return _reduced("max", x, axis, keepdims, other)


def min(x: Tensor, axis: Axes = None, keepdims: bool = False, **other: Never) -> Tensor:
    """Minimum over one axis, several, or all; NaN where any is NaN. Raises as `max` does."""
    return _reduced("min", x, axis, keepdims, other)


def argmax(x: Tensor, axis: int | None = None, keepdims: bool = False, **other: Never) -> Tensor:
    """Index (i32) of the largest element along an axis, or of all in row-major order.

    The first of equals; a NaN is larger than every number. Raises as `max` does.
    """
    return _over("argmax", x, axis, keepdims, lambda rows: apply("argmax", rows), other)


def argsort(
    x: Tensor, axis: int = -1, *, descending: bool = False, **other: Never
) -> Tensor:  # fmt: skip
    """Indices (i32) that put x in order along an axis, in the shape of x.

    Equal elements keep their order, with `descending` too; 0 and -0 are equal; NaN come last.

    Raises:
        ShapeError: a scalar, or there is no such axis; DTypeError: for bools.
    """
    attrs = {"descending": flag("argsort", "descending", descending)}
    return _along("argsort", x, axis, lambda rows: apply("argsort", rows, **attrs), other)


def sort(x: Tensor, axis: int = -1, *, descending: bool = False, **other: Never) -> Tensor:
    """x in order along an axis: its elements by `argsort`, which raises the same."""
    attrs = {"descending": flag("sort", "descending", descending)}

    def of_rows(rows: Tensor) -> Tensor:
        order = apply("argsort", rows, **attrs)
        return apply("take_along_axis", rows, order, axis=rows.ndim - 1)

    return _along("sort", x, axis, of_rows, other)


def cumsum(x: Tensor, axis: int = -1, **other: Never) -> Tensor:
    """Sums of the elements up to each along an axis: y_j = x_0 + ... + x_j.

    Floats are added in f32 and stored in their dtype; integers modulo 2^32, as i32 or u32; of bools
    those that are true are counted, as i32.

    Raises:
        ShapeError: a scalar, or there is no such axis.
    """
    check_tensors("cumsum", x)
    counted = x.astype("i32") if x.dtype.kind == "bool" else x
    return _along("cumsum", counted, axis, lambda rows: apply("cumsum", rows), other)


def _reduced(op: str, x: Tensor, axis: Axes, keepdims: bool, other: Mapping[str, object]) -> Tensor:
    check_tensors(op, x)
    if x.dtype.kind == "bool":
        raise DTypeError(f"{op}: expected a numeric dtype, got bool")
    return _over(op, x, axis, keepdims, lambda rows: apply("reduce", rows, op=op), other)


def _norm(kind: str, x: Tensor, vectors: dict[str, Tensor | None], eps: float) -> Tensor:
    op = NORMS[kind]
    check_tensors(op, x, *(v for v in vectors.values() if v is not None))
    attrs = {"kind": kind, "eps": epsilon(op, eps)}
    return apply_with("norm", (x,), "vectors", vectors, attrs)


def _along(
    op: str, x: Tensor, axis: int, fn: Callable[[Tensor], Tensor], other: Mapping[str, object]
) -> Tensor:
    """What `fn` makes of rows along an axis, in the shape of x."""
    refuse_names(op, other)
    check_tensors(op, x)
    along, last = axis_of(op, x.shape, axis), x.ndim - 1
    if along >= last:
        return fn(x)
    rest = range(x.ndim)
    rows = x.permute(*(a for a in rest if a != along), along)
    return fn(rows).permute(*rest[:along], last, *rest[along:last])


def _over(
    op: str, x: Tensor, axis: Axes, keepdims: bool, fn: Callable[[Tensor], Tensor],
    other: Mapping[str, object],
) -> Tensor:  # fmt: skip
    """What `fn` makes of rows that run along the axes together: an element a row."""
    refuse_names(op, other)
    check_tensors(op, x)
    axes = tuple(range(x.ndim)) if axis is None else integers(op, "axes", (axis,))
    gone = {axis_of(op, x.shape, a) for a in axes}
    if len(gone) < len(axes):
        raise ShapeError(f"{op}: expected different axes, got {list(axes)}")
    kept = [a for a in range(x.ndim) if a not in gone]
    merged = [a for a in range(x.ndim) if a in gone]
    length = math.prod([x.shape[a] for a in merged])
    if not length and op in CHOICES:
        along = "" if axis is None else f" along axis {axis}"
        raise ShapeError(f"{op}: expected at least one element{along}, got {list(x.shape)}")
    rows = x.permute(*kept, *merged).reshape(*(x.shape[a] for a in kept), length)
    result = fn(rows)
    if keepdims is not False and flag(op, "keepdims", keepdims):
        return result.reshape([1 if a in gone else n for a, n in enumerate(x.shape)])
    return result
