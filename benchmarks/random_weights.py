"""Random weights in the shapes of released models, made on the device from a small table.

A weight's rows are those of a random table of at most 1 024 rows, in a random order: little is
sent, and a model of 8 billion parameters is there in seconds. Norms are ones, biases small.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import centella as ct
from centella.dtypes import DType, f32
from centella.nn.module import Module, Parameter
from centella.tensors.quantizers import QUANTIZERS, all_quantized

ROWS = 1024
SPREAD = 0.02


class Weights:
    """Random tensors of a device, the same ones for the same seed."""

    def __init__(self, device: ct.Device, seed: int = 0) -> None:
        self.device = device
        self.random = np.random.default_rng(seed)
        self._tables: dict[tuple[Any, ...], ct.Tensor] = {}
        self._block = (SPREAD * self.random.standard_normal(1 << 22)).astype(np.float32)

    def numbers(self, count: int) -> Any:
        """f32 [count], from somewhere in the block, again and again."""
        return np.resize(np.roll(self._block, int(self.random.integers(1 << 20))), count)

    def rows(self, table: ct.Tensor, count: int) -> ct.Tensor:
        """[count, ...]: rows of a table, drawn at random."""
        at = self.random.integers(0, table.shape[0], count, dtype=np.int32)
        return ct.gather(table, ct.asarray(at, device=self.device))

    def matrix(self, shape: tuple[int, ...], dtype: DType) -> ct.Tensor:
        """A weight of normal numbers, 0.02 wide; those of one width have their table in common."""
        count, k = math.prod(shape[:-1]), shape[-1]
        rows = min(count, ROWS)
        key = (rows, k, dtype.name)
        if key not in self._tables:
            self._tables[key] = ct.asarray(self.numbers(rows * k).reshape(rows, k), dtype,
                                           self.device)  # fmt: skip
        return self.rows(self._tables[key], count).reshape(shape)

    def vector(self, shape: tuple[int, ...], is_norm: bool) -> ct.Tensor:
        """Ones of a norm, small numbers of a bias; f32."""
        data = np.ones(shape, np.float32) if is_norm else self.numbers(shape[0])
        return ct.asarray(data, f32, self.device)

    def quantized(self, shape: tuple[int, ...], format: str) -> Any:
        """A weight in a format: what its quantiser makes of one, or for "q4_k" random planes."""
        if format in QUANTIZERS:
            return all_quantized(self.matrix(shape, f32), format, "random")[0]
        n, k = shape
        rows = min(n, ROWS)
        levels = self.random.integers(0, 64, (rows, k // 16), np.uint8)
        numbers = self.random.integers(0, 256, (rows, k // 2), np.uint8)
        # of a block of 256: the factor of the numbers 0 to 15, and of what is taken off
        factors = np.tile(np.array([1e-4, 7.5e-4], np.float16), (rows, k // 256))
        tables = (ct.asarray(p, device=self.device) for p in (numbers, levels, factors))
        return ct.QTensor(tuple(self.rows(table, n) for table in tables), format)


def fill(model: Module, device: ct.Device, dtype: DType, format: str = "", own: int = 0) -> None:
    """Give every parameter of a model random data on a device.

    Args:
        dtype: of weights; format: "q8_0", "q4_0" or "q4_k" of those that may be quantised.
        own: layers with weights of their own, which the others share in turn; 0: all.
    """
    weights = Weights(device)
    kept: dict[tuple[str, int], Any] = {}
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if not isinstance(value, Parameter):
                continue
            parts = path.split(".")
            layer = int(parts[1]) % own if own and parts[0] == "layers" else -1
            key = ".".join(parts[2:] if layer >= 0 else parts) + "." + name, layer
            if key not in kept:
                kept[key] = _parameter(weights, module, path, name, value.shape, dtype, format)
            setattr(module, name, kept[key])
    device.synchronize()


def _parameter(
    weights: Weights, module: Module, path: str, name: str, shape: tuple[int, ...], dtype: DType,
    format: str,
) -> Any:  # fmt: skip
    if len(shape) == 1 or "norms" in path:
        return weights.vector(shape, name != "bias")
    if format and module.takes_planes(name):
        return weights.quantized((math.prod(shape[:-1]), shape[-1]), format)
    return weights.matrix(shape, dtype)


def kind_of(dtype: str) -> tuple[DType, str]:
    """What "bf16", "f16", "q8_0" ... asks for: the dtype of weights, and a format or ""."""
    if dtype in ("f32", "f16", "bf16"):
        return ct.dtypes.dtype_of(dtype), ""
    return ct.bf16, dtype


def activations_of(device: ct.Device, dtype: DType) -> DType:
    """What is computed in: the dtype of weights on CUDA, f32 elsewhere."""
    return dtype if device.caps.target == "ptx" else f32
