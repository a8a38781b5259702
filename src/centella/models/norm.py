"""The norms of a decoder."""

from __future__ import annotations

import numpy as np

from centella.dtypes import Array
from centella.errors import DTypeError
from centella.nn import Module
from centella.nn.module import parameter
from centella.specs import Shape
from centella.tensors.functional import rms_norm
from centella.tensors.tensor import Tensor


class Norm(Module):
    """RMS norm, whose weight a checkpoint stores less `offset`.

    Attributes:
        scale: [features], the whole weight: in a `state_dict` it is not what checkpoints have.
        eps: added to the mean of squares.
    """

    scale: Tensor

    def __init__(self, features: int, eps: float, offset: float = 0.0) -> None:
        self.scale = parameter(features)
        self.eps: float = eps
        self.offset: float = offset

    def sources(self, path: str, name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """The weight of the checkpoint's norm."""
        return ((f"{path}weight", shape),)

    def arranged(self, name: str, data: Array) -> Array:
        """The weight, whole."""
        return raised(data, self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * scale: [..., features] to the same."""
        return rms_norm(x, self.scale, self.eps)


class HeadNorms(Module):
    """Weights of the RMS norms of each head of q and of k.

    Attributes:
        weight: [2, head_dim].
    """

    weight: Tensor

    def __init__(self, head_dim: int, offset: float) -> None:
        self.weight = parameter(2, head_dim)
        self.offset: float = offset

    def sources(self, path: str, name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """The norms of q and of k stand beside this one in a checkpoint."""
        beside = path.rstrip(".").rpartition(".")[0]
        return tuple((f"{beside}.{which}_norm.weight", shape[1:]) for which in "qk")

    def arranged(self, name: str, data: Array) -> Array:
        """One after the other, whole."""
        return raised(data, self.offset).reshape(2, -1)


def raised(data: Array, offset: float) -> Array:
    """A norm's weight with what its checkpoint leaves out; near 1, bf16 would lose what it says."""
    if not offset:
        return data
    if data.dtype != np.float32:
        raise DTypeError("load_parameters: expected vector_dtype f32 for norms stored less 1")
    return data + np.float32(offset)
