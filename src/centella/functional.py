"""The public functions over tensors: names, order and defaults of the array API and PyTorch."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from centella import ops
from centella.device import Device, current_device
from centella.device import device as open_device
from centella.dtypes import dtype_of, f32, promote
from centella.errors import DTypeError, ShapeError
from centella.op import get
from centella.ops.concat import MOST
from centella.tensor import Tensor, apply, apply_all, binary, extents_of

Number = int | float
assert ops.__all__  # importing the package registers every op


def add(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a + b, broadcasting."""
    return binary("add", a, b)


def sub(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a - b, broadcasting."""
    return binary("sub", a, b)


def mul(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a * b, broadcasting."""
    return binary("mul", a, b)


def div(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a / b for floats, broadcasting."""
    return binary("div", a, b)


def maximum(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """The larger of each pair; NaN where either is NaN."""
    return binary("maximum", a, b)


def minimum(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """The smaller of each pair; NaN where either is NaN."""
    return binary("minimum", a, b)


def neg(x: Tensor) -> Tensor:
    """-x."""
    return apply("neg", x)


def abs(x: Tensor) -> Tensor:
    """|x|."""
    return apply("abs", x)


def sqrt(x: Tensor) -> Tensor:
    """Square root; NaN below zero."""
    return apply("sqrt", x)


def exp(x: Tensor) -> Tensor:
    """e^x."""
    return apply("exp", x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return apply("log", x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN."""
    return apply("relu", x)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x above 0, `negative_slope * x` below."""
    return apply("leaky_relu", x, slope=float(negative_slope))


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x above 0, `alpha * (exp(x) - 1)` below (Clevert et al. 2016)."""
    return apply("elu", x, alpha=float(alpha))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return apply("sigmoid", x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return apply("tanh", x)


def swish(x: Tensor) -> Tensor:
    """x sigmoid(x), also called SiLU."""
    return apply("swish", x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU (Hendrycks and Gimpel 2016).

    Args:
        approximate: "none" x Phi(x) by erf, "tanh" its tanh form, "quick" x sigmoid(1.702 x).

    Raises:
        ShapeError: for another kind.
    """
    if approximate not in ("none", "tanh", "quick"):
        raise ShapeError(f"gelu: expected none, tanh or quick, got {approximate!r}")
    return apply("gelu", x, kind=approximate)


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor."""
    return apply("scale", x, factor=float(factor))


def clip(x: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    """min(max(x, min), max), either side left out by None; NaN stays NaN."""
    if x.dtype.is_float:
        low = -math.inf if min is None else float(min)
        return apply("clip", x, low=low, high=math.inf if max is None else float(max))
    if x.dtype.kind == "bool":
        raise DTypeError("clip: expected a numeric dtype, got bool")
    info = np.iinfo(x.dtype.numpy)
    low, high = (
        end if v is None else builtins.min(builtins.max(v, info.min), info.max)
        for v, end in ((min, info.min), (max, info.max))
    )
    return apply("clip", x, low=low, high=high)


def where(condition: Tensor, x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """x where the bool condition holds, else y, broadcasting; x or y may be a number.

    Raises:
        DTypeError: for a condition that is not bool, or two numbers.
    """
    given = {"first": x, "second": y}
    tensors = [t for t in given.values() if isinstance(t, Tensor)]
    numbers = {n: v for n, v in given.items() if isinstance(v, (bool, int, float))}
    if not tensors or len(tensors) + len(numbers) < 2:
        names = " and ".join(type(v).__name__ for v in given.values())
        raise DTypeError(f"where: expected two Tensors, or one and a number, got {names}")
    common = promote("where", tensors[0].dtype, tensors[-1].dtype)
    return apply("where", condition, *(t.astype(common) for t in tensors), **numbers)


def full(
    shape: int | Sequence[int], fill: Number, dtype: Any = f32, device: str | Device | None = None
) -> Tensor:
    """A tensor with one value everywhere, made on the device: nothing is uploaded."""
    target = current_device() if device is None else open_device(device)
    extents = extents_of("full", shape)
    attrs = {"shape": extents, "dtype": dtype_of(dtype).name, "value": fill}
    (value,) = target.record(get("fill"), [], attrs)
    return Tensor(value, value.spec)


def zeros(
    shape: int | Sequence[int], dtype: Any = f32, device: str | Device | None = None
) -> Tensor:
    """A tensor of zeros, made on the device."""
    return full(shape, 0, dtype, device)


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors of one dtype joined along an axis; their other extents are equal.

    Raises:
        ShapeError: for no tensors, a bad axis, or shapes that differ elsewhere.
    """
    if not tensors:
        raise ShapeError("concat: expected at least one tensor, got none")
    place = _axis(tensors[0], axis)
    parts = list(tensors)
    most = MOST if tensors[0].ndim < 6 else 3  # what the strides leave room for
    while len(parts) > 1:
        joined = [parts[i : i + most] for i in range(0, len(parts), most)]
        parts = [
            apply("concat", *some, axis=place) if len(some) > 1 else some[0] for some in joined
        ]
    return parts[0]


def matmul(a: Tensor, b: Tensor, *, alpha: float = 1.0, variant: str | None = None) -> Tensor:
    """alpha A B: a [..., m, k], b [..., k, n]; leading dimensions broadcast.

    Transposes are views (`.T`) and cost nothing.

    Args:
        variant: force a kernel ("large", "medium", "small"), for tests and benchmarks.
    """
    attrs: dict[str, Any] = {"alpha": float(alpha)}
    return apply("matmul", a, b, **_variant("matmul", attrs, variant))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    variant: str | None = None,
) -> Tensor:
    """f(alpha x W^T + bias) + residual, in one launch; the epilogue acts on the f32 accumulator.

    Args:
        x: [..., in_features]; weight: [out_features, in_features]; bias: [out_features].
        activation: relu, gelu, gelu_tanh, gelu_quick, silu, sigmoid or tanh.
        residual: [..., out_features], added last.
    """
    extras = {"bias": bias, "residual": residual}
    given = {n: t for n, t in extras.items() if t is not None}
    attrs: dict[str, Any] = {
        "activation": activation or "", "alpha": float(alpha), "extras": tuple(given),
    }  # fmt: skip
    attrs = _variant("linear", attrs, variant)
    return apply_all(get("linear"), (x, weight, *given.values()), attrs)[0]


def _variant(op: str, attrs: dict[str, Any], variant: str | None) -> dict[str, Any]:
    if variant is None:
        return attrs
    known = get(op).variants
    if variant not in known:
        raise ShapeError(f"{op}: expected variant of {', '.join(known)}, got {variant!r}")
    return {**attrs, "variant": variant}


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products of two vectors, a scalar."""
    return apply("dot", a, b)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of a table: ids [...] i32, table [n, d], result [..., d]."""
    return apply("embedding", ids, table)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) over its sum along an axis."""
    return _along(x, axis, lambda t: apply("softmax", t))


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Logarithm of softmax along an axis."""
    return _along(x, axis, lambda t: apply("softmax", t, log=True))


def _along(x: Tensor, axis: int, fn: Any) -> Tensor:
    place = _axis(x, axis)
    if place == x.ndim - 1 or not x.ndim:
        return fn(x)  # type: ignore[no-any-return]  # fn maps Tensor to Tensor
    order = [a for a in range(x.ndim) if a != place] + [place]
    back = [order.index(a) for a in range(x.ndim)]
    return fn(x.permute(*order)).permute(*back)  # type: ignore[no-any-return]


def _axis(x: Tensor, axis: int) -> int:
    if not -x.ndim <= axis < builtins.max(x.ndim, 1):
        raise ShapeError(f"expected an axis of {list(x.shape)}, got {axis}")
    return axis % x.ndim if x.ndim else 0


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer normalisation over the last dimension (Ba et al. 2016)."""
    return _norm("layer", x, {"weight": weight, "bias": bias}, eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """RMS normalisation over the last dimension (Zhang and Sennrich 2019)."""
    return _norm("rms", x, {"weight": weight}, eps)


def l2_normalize(x: Tensor, axis: int = -1, eps: float = 1e-12) -> Tensor:
    """x / max(||x||, eps) along an axis."""
    return _along(x, axis, lambda t: _norm("l2", t, {}, eps))


def _norm(kind: str, x: Tensor, vectors: dict[str, Tensor | None], eps: float) -> Tensor:
    given = {n: t for n, t in vectors.items() if t is not None}
    attrs = {"kind": kind, "eps": float(eps), "vectors": tuple(given)}
    return apply_all(get("norm"), (x, *given.values()), attrs)[0]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention in one launch, without a score matrix in memory.

    Args:
        q: [batch, heads, q_len, head_dim]; k, v: [batch, kv_heads, kv_len, head_dim].
        lengths: [batch] i32, keys of each sequence that count.
        key_mask: [batch, kv_len] bool or integer, nonzero where a key counts.
        mask: additive, [batch or 1, heads or 1, q_len or 1, kv_len or 1].
        causal: query i sees keys up to i + kv_len - q_len.
        scale: default 1 / sqrt(head_dim).

    Returns:
        [batch, heads, q_len, head_dim]; a view of memory in [batch, q_len, heads, head_dim]. A
        query with no key gives zeros.
    """
    masks = {"lengths": lengths, "key_mask": key_mask, "mask": mask}
    given = {n: t for n, t in masks.items() if t is not None}
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ShapeError(
            f"attention: expected rank 4, got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    attrs = {
        "causal": bool(causal),
        "masks": tuple(given),
        "scale": 1.0 / math.sqrt(builtins.max(q.shape[-1], 1)) if scale is None else float(scale),
    }
    return apply_all(get("attention"), (q, k, v, *given.values()), attrs)[0].permute(0, 2, 1, 3)


def mean_pool(x: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the first `lengths[b]` positions: x [b, l, d], lengths [b] i32, result [b, d]."""
    return apply("mean_pool", x, lengths)


def sum(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Sum over one axis, several, or all."""
    return _reduced("sum", x, axis, keepdims)


def mean(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Mean over one axis, several, or all."""
    return _reduced("mean", x, axis, keepdims)


def max(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Maximum over one axis, several, or all; NaN where any is NaN."""
    return _reduced("max", x, axis, keepdims)


def min(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Minimum over one axis, several, or all; NaN where any is NaN."""
    return _reduced("min", x, axis, keepdims)


def argmax(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Index (i32) of the largest element along an axis, or of all in row-major order.

    The first of equals; a NaN is larger than every number.
    """
    if axis is None:
        found = apply("argmax", x.reshape(-1))
        return found.reshape(*(1,) * x.ndim) if keepdims else found
    place = _axis(x, axis)
    if place == x.ndim - 1 or not x.ndim:
        found = apply("argmax", x)
    else:
        found = apply("argmax", x.permute(*(a for a in range(x.ndim) if a != place), place))
    kept = (1 if a == place else n for a, n in enumerate(x.shape))
    return found.reshape(*kept) if keepdims else found


def _reduced(op: str, x: Tensor, axis: int | tuple[int, ...] | None, keepdims: bool) -> Tensor:
    if x.dtype.kind == "bool":
        raise DTypeError(f"{op}: expected a numeric dtype, got bool")
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    gone = sorted({_axis(x, a) for a in axes}) if x.ndim else []
    if x.ndim and len(gone) < len(axes):
        raise ShapeError(f"{op}: expected different axes, got {list(axes)}")
    kept = [a for a in range(x.ndim) if a not in gone]
    outer = tuple(x.shape[a] for a in kept)
    moved = x if gone == list(range(len(kept), x.ndim)) else x.permute(*kept, *gone)
    flat = moved.reshape(*outer, math.prod(x.shape[a] for a in gone))
    result = apply("reduce", flat, op=op)
    if keepdims:
        return result.reshape(*(1 if a in gone else n for a, n in enumerate(x.shape)))
    return result


def cast(x: Tensor, dtype: Any) -> Tensor:
    """x in another dtype; floats to integers truncate and saturate, NaN gives 0."""
    return x.astype(dtype)
