"""Sums of products: matmul, linear, conv1d, dot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from centella.dtypes import dtype_of
from centella.errors import DTypeError, ShapeError
from centella.op.op import get
from centella.op.variant import APART
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.matmul.problem import DIGITS
from centella.tensors.arguments import (
    check_tensors,
    epsilon,
    one_of,
    real,
    variant_attrs,
    whole,
)
from centella.tensors.functional.axes import layer_norm, rms_norm
from centella.tensors.functional.elementwise import gelu, relu, sigmoid, silu_gate, tanh
from centella.tensors.functional.move import concat
from centella.tensors.qtensor import QTensor, Stacked, float_dtype, of_pair
from centella.tensors.tensor import Tensor, apply, apply_all, apply_preferred, apply_with

__all__ = [
    "conv1d", "dequantize", "dot", "linear", "matmul", "normed_linear",
]  # fmt: skip


def matmul(
    a: Tensor, b: Tensor, *, alpha: float = 1.0, dtype: Any = None, variant: str | None = None
) -> Tensor:
    """alpha A B: a [..., m, k], b [..., k, n]; leading dimensions broadcast.

    Transposes are views (`.T`) and cost nothing.

    Args:
        a, b: of one float dtype.
        dtype: of the result, a float one; default: that of a and b. Sums are f32 and are rounded
            to it once.
        variant: force a kernel ("gemv", "skinny", "skinny_mma", "columns", "small", "medium",
            "large", "mma", "wgmma"), for tests and benchmarks.

    Raises:
        ShapeError, DTypeError: for shapes or dtypes that do not fit these.
        LimitError: when it runs, for a forced kernel that the device or the shape does not have.
    """
    numbers = {"alpha": real("matmul", "alpha", alpha)}
    return apply(
        "matmul", a, b, **variant_attrs("matmul", variant, **numbers, **_rounded("matmul", dtype))
    )


def linear(
    x: Tensor,
    weight: Tensor | QTensor | Stacked,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    dtype: Any = None,
    variant: str | None = None,
) -> Tensor:
    """f(alpha (x W^T) scale + bias) + residual in one launch, the epilogue on the f32 sums.

    Args:
        x: [..., in_features]; weight: [out_features, in_features], of any float dtype, or a
            QTensor, or i8 with `scale`, or u8 with `scale` of blocks; bias: [out_features].
        scale: [out_features], a factor of each output: those of `ct.quantize_int8`; or
            [out_features, in_features / 32], a factor of each block of 32: those of
            `ct.quantize_blocks`, whose weight is i8, or u8 [out_features, in_features / 2].
        activation: relu, gelu, gelu_tanh, gelu_quick, silu, sigmoid or tanh.
        residual: [..., out_features], added last.
        dtype: of the result, a float one; default: that of x. The f32 sums are rounded to it once,
            so that logits of 16-bit weights can be f32.
        variant: force a kernel, as for `matmul`.

    Returns:
        [..., out_features].

    Raises:
        ShapeError, DTypeError: for shapes, names or dtypes that do not fit these.
        LimitError: as for `matmul`.
    """
    extras = {"scale": scale, "bias": bias, "residual": residual}
    if scale is not None:
        if isinstance(weight, QTensor | Stacked):
            raise DTypeError("linear: expected no scale= with a QTensor, which has its own")
        check_tensors("linear", x, weight, scale)
        if scale.ndim == 2:
            weight, extras["scale"] = of_pair("linear", weight, scale), None
    if isinstance(weight, Stacked):
        options = {"activation": activation, "alpha": alpha, "dtype": dtype, "variant": variant}
        return _stacked(x, weight, bias, residual, options)
    numbers = {"alpha": real("linear", "alpha", alpha), **_rounded("linear", dtype)}
    attrs = variant_attrs(
        "linear", variant, activation=_activation("linear", activation), **numbers
    )
    if not isinstance(weight, QTensor):
        return apply_with("linear", (x, weight), "extras", extras, attrs)
    if weight.format.by_row:
        stored, extras["scale"] = weight.planes
        return apply_with("linear", (x, stored), "extras", extras, attrs)
    attrs["format"] = weight.format.name
    return apply_with("linear", (x, *weight.planes), "extras", extras, attrs)


def _stacked(
    x: Tensor, weight: Stacked, bias: Tensor | None, residual: Tensor | None,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The products of the parts beside each other."""
    for name, extra in (("bias", bias), ("residual", residual)):
        if extra is not None and extra.shape[-1:] != weight.shape[:1]:
            raise ShapeError(
                f"linear: expected {name} [..., {weight.shape[0]}], got {list(extra.shape)}"
            )
    products, first = [], 0
    for part in weight.parts:
        columns = slice(first, first + part.shape[0])
        own = [None if t is None else t[..., columns] for t in (bias, residual)]
        products.append(linear(x, part, own[0], residual=own[1], **options))
        first = columns.stop
    return concat(products, -1)


def normed_linear(
    x: Tensor, weight: Tensor | QTensor | Stacked, norm: Tensor | None = None, *, eps: float = 1e-6,
    kind: str = "rms", shift: Tensor | None = None, gate: str | None = None,
    activation: str | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    alpha: float = 1.0, dtype: Any = None, variant: str | None = None,
) -> Tensor:  # fmt: skip
    """f(alpha (norm(x) W^T) + bias) + residual, or with a gate act(h W[:n]^T) * (h W[n:]^T).

    For one or two rows, as a decoder's step has, all of it is one launch of a GPU, with a QTensor
    for one on Hopper, where up to 16 rows of bf16 with an RMS norm are one launch, too; else the
    norm is a launch of its own, and so is the gate where tensor cores do not multiply many rows.

    Args:
        x: [..., k]; weight: [n, k], with a gate [2 n, k]; norm: [k], or None for no norm.
        kind: of the norm: "rms", or "layer", which `shift` [k] may follow.
        eps: added to the mean of squares, or to the variance.
        gate: the activation of the first half, a name that `linear` takes.
        activation, bias, residual, alpha, dtype: as for `linear`; with a gate neither activation
            nor residual.
        variant: force a launch of one row ("streamed"), with a QTensor ("streamed_digits"), of few
            ("joined"), of several with a norm or a gate ("streamed_rows"), of a gate
            ("streamed_many", "wgmma", "mma"), or "apart".

    Returns:
        [..., n].

    Raises:
        ShapeError, DTypeError: for shapes, names or dtypes that do not fit these.
    """
    check_tensors("normed_linear", x)
    opened = _activation("normed_linear", gate)
    layer = one_of("normed_linear", "kind", kind, ("rms", "layer")) == "layer"
    if opened and (residual is not None or activation is not None):
        raise ShapeError("normed_linear: expected a gate, or an activation and a residual")
    if (layer and norm is None) or (shift is not None and not layer):
        raise ShapeError("normed_linear: expected norm= with kind='layer', which shift= goes with")
    numbers = {"alpha": real("normed_linear", "alpha", alpha), **_rounded("normed_linear", dtype)}
    attrs = variant_attrs(
        "normed_linear", variant, gate=opened, kind=kind, eps=epsilon("normed_linear", eps),
        activation=_activation("normed_linear", activation), **numbers,
    )  # fmt: skip
    extras = {"norm": norm, "shift": shift, "bias": bias, "residual": residual}
    joined = None
    if isinstance(weight, Tensor):
        joined = _joined((x, weight), extras, attrs)
    elif variant not in (None, DIGITS, APART):
        raise DTypeError(f"normed_linear: expected a weight of floats with variant={variant!r}")
    elif isinstance(weight, QTensor) and not weight.format.by_row:
        joined = _joined((x, *weight.planes), extras, {**attrs, "format": weight.format.name})
    if joined is not None:
        return joined
    h = x
    if norm is not None:
        h = layer_norm(x, norm, shift, eps) if layer else rms_norm(x, norm, eps)
        if opened:
            more: dict[str, Any] = {"alpha": alpha, "dtype": dtype, "variant": variant}
            return normed_linear(h, weight, gate=gate, bias=bias, **more)
    if not opened:
        return linear(
            h, weight, bias, activation=activation, residual=residual, alpha=alpha, dtype=dtype
        )
    both = linear(h, weight, bias, alpha=alpha, dtype=dtype)
    if both.shape[-1] % 2:
        raise ShapeError(f"normed_linear: expected an even n with a gate, got {both.shape[-1]}")
    first, second = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
    return silu_gate(first, second) if opened == "silu" else GATES[opened](first) * second


def _joined(
    operands: tuple[Tensor, ...], extras: dict[str, Tensor | None], attrs: dict[str, Any]
) -> Tensor | None:
    """All of it as one op, where that is preferred."""
    present = {n: t for n, t in extras.items() if t is not None}
    attrs = {**attrs, "extras": tuple(present)}
    results = apply_preferred(get("normed_linear"), (*operands, *present.values()), attrs)
    return None if results is None else results[0]


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu, "sigmoid": sigmoid, "tanh": tanh, "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu_quick": partial(gelu, approximate="quick"),
}  # fmt: skip


def dequantize(stored: Tensor, scale: Tensor, dtype: Any = "f32") -> Tensor:
    """Dequantise weights in blocks of 32: number times factor, in one launch.

    Args:
        stored: i8 [n, k], or u8 [n, k / 2] with two 4-bit numbers a byte.
        scale: [n, k / 32], of any float dtype.
        dtype: of the result, a float one.

    Returns:
        [n, k].

    Raises:
        ShapeError, DTypeError: for planes that `ct.quantize_blocks` would not make.
    """
    kind = float_dtype("dequantize", dtype)
    return of_pair("dequantize", stored, scale).dequantize(kind)


def conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int = 1, padding: int = 0,
    activation: str | None = None, variant: str | None = None,
) -> Tensor:  # fmt: skip
    """f(conv(x, weight) + bias): y[b, o, t] sums x[b, c, t stride + j - padding] weight[o, c, j].

    Args:
        x: [batch, channels_in, length]; read fastest with channels last, as results lie.
        weight: [channels_out, channels_in, kernel]; read fastest where it lies [out, kernel, in].
        bias: [channels_out].
        stride: positions of x between two results; padding: zeros before and after x.
        activation: as in `linear`; it acts on the f32 accumulator.
        variant: force a kernel of the product, for tests and benchmarks.

    Returns:
        [batch, channels_out, (length + 2 padding - kernel) // stride + 1]; a view of memory in
        [batch, length_out, channels_out].

    Raises:
        ShapeError, DTypeError: for shapes, numbers or dtypes that do not fit these.
    """
    numbers = {
        "stride": whole("conv1d", "stride", stride, 1),
        "padding": whole("conv1d", "padding", padding),
    }
    attrs = variant_attrs(
        "conv1d", variant, activation=_activation("conv1d", activation), **numbers
    )
    operands = (x, weight) if bias is None else (x, weight, bias)
    return apply_all(get("conv1d"), operands, attrs)[0].permute(0, 2, 1)


def _rounded(op: str, dtype: Any) -> dict[str, Any]:
    """The attribute that names the dtype of a result; none where it is the operands'."""
    if dtype is None:
        return {}
    kind = dtype_of(dtype)
    if not kind.is_float:
        raise DTypeError(f"{op}: dtype: expected a float one, got {kind.name}")
    return {"dtype": kind.name}


def _activation(op: str, name: str | None) -> str:
    """The attribute that names what follows a product: "" for nothing."""
    return "" if name is None else one_of(op, "activation", name, ACTIVATIONS)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products of two vectors of one length and dtype, a scalar; sums as in `sum`.

    Raises:
        ShapeError, DTypeError: for other shapes, two dtypes, or bools.
    """
    return apply("dot", a, b)
