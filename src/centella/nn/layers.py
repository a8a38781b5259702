"""Layers: products, norms, tables, convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from centella.dtypes import Array
from centella.nn.module import Module, parameter
from centella.specs import Shape
from centella.tensors import functional
from centella.tensors.arguments import epsilon
from centella.tensors.qtensor import QTensor
from centella.tensors.tensor import Tensor


class _Weighted(Module):
    """A layer whose weight may be quantised: read as the Tensor that it is else."""

    if TYPE_CHECKING:

        @property
        def weight(self) -> Tensor: ...

        @weight.setter
        def weight(self, value: Tensor | QTensor) -> None: ...

    def takes_planes(self, name: str) -> bool:
        """The weight."""
        return name == "weight"


class Linear(_Weighted):
    """y = x W^T + b, with an activation and a residual in the same launch.

    Args:
        stacks: checkpoint layers beside this one and their rows, stacked to make it.
        unbiased: those of them that have no bias in the checkpoint.

    Attributes:
        weight: [out_features, in_features]; a QTensor where it is set to one, or loaded as one;
            several where what it stacks is in several formats.
        bias: [out_features] or None.
    """

    bias: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *,
        stacks: Mapping[str, int] | None = None, unbiased: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self.stacks: dict[str, int] = dict(stacks or {})
        self.unbiased: frozenset[str] = frozenset(unbiased)

    def sources(self, path: str, name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """Its own tensor, or those of the layers that it stacks."""
        if not self.stacks:
            return super().sources(path, name, shape)
        lead = "".join(path.rstrip(".").rpartition(".")[:2])
        zeros = self.unbiased if name == "bias" else frozenset()
        return tuple(
            ("" if s in zeros else f"{lead}{s}.{name}", (rows, *shape[1:]))
            for s, rows in self.stacks.items()
        )

    def forward(
        self, x: Tensor, activation: str | None = None, residual: Tensor | None = None, *,
        norm: LayerNorm | None = None,
    ) -> Tensor:  # fmt: skip
        """f(norm(x) W^T + b) + residual: x [..., in_features] to [..., out_features].

        Args:
            norm: of x, in the product's launch where x has few rows.
        """
        if norm is None:
            return functional.linear(
                x, self.weight, self.bias, activation=activation, residual=residual
            )
        return functional.normed_linear(
            x, self.weight, norm.weight, kind="layer", shift=norm.bias, eps=norm.eps,
            bias=self.bias, activation=activation, residual=residual,
        )  # fmt: skip


class LayerNorm(Module):
    """Layer normalisation over the last dimension (Ba et al. 2016).

    Attributes:
        weight: [features]; bias: [features] or None.
        eps: added to the variance.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, features: int, eps: float = 1e-5, bias: bool = True) -> None:
        self.weight = parameter(features)
        self.bias = parameter(features) if bias else None
        self.eps: float = epsilon("LayerNorm", eps)

    def forward(self, x: Tensor) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias: [..., features] to the same."""
        return functional.layer_norm(x, self.weight, self.bias, self.eps)


class Embedding(_Weighted):
    """A table of vectors.

    Attributes:
        weight: [rows, features]; a QTensor where it is set to one, or loaded as one.
    """

    def __init__(self, rows: int, features: int) -> None:
        self.weight = parameter(rows, features)

    def forward(self, ids: Tensor, dtype: Any = None) -> Tensor:
        """Rows of the table: ids [...] i32 to [..., features].

        Args:
            dtype: of the result; default: the table's, of a QTensor f32.
        """
        return functional.embedding(ids, self.weight, dtype)


class RMSNorm(Module):
    """RMS normalisation over the last dimension (Zhang and Sennrich 2019).

    Attributes:
        weight: [features].
        eps: added to the mean of squares.
    """

    weight: Tensor

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        self.weight = parameter(features)
        self.eps: float = epsilon("RMSNorm", eps)

    def forward(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight: [..., features] to the same."""
        return functional.rms_norm(x, self.weight, self.eps)


class Conv1d(Module):
    """A convolution over time, with an activation in the same launch as the product.

    Attributes:
        weight: [out_channels, kernel_size * in_channels], as the product reads it; a checkpoint's
            is [out_channels, in_channels, kernel_size].
        bias: [out_channels] or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, stride: int = 1,
        padding: int = 0, bias: bool = True,
    ) -> None:  # fmt: skip
        self.weight = parameter(out_channels, kernel_size * in_channels)
        self.in_channels = in_channels
        self.kernel_size = kernel_size
        self.bias = parameter(out_channels) if bias else None
        self.stride = stride
        self.padding = padding

    def sources(self, path: str, name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """The weight comes with its channels before its positions."""
        stored = (shape[0], self.in_channels, self.kernel_size) if name == "weight" else shape
        return super().sources(path, name, stored)

    def arranged(self, name: str, data: Array) -> Array:
        """The weight with its positions before its channels."""
        return data.transpose(0, 2, 1).reshape(len(data), -1) if name == "weight" else data

    def forward(self, x: Tensor, activation: str | None = None) -> Tensor:
        """f(conv(x) + b): [batch, in_channels, length] to [batch, out_channels, length_out]."""
        weight = self.weight.reshape(-1, self.kernel_size, self.in_channels)
        return functional.conv1d(
            x, weight.permute(0, 2, 1), self.bias, stride=self.stride, padding=self.padding,
            activation=activation,
        )  # fmt: skip
