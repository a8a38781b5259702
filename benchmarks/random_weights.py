"""Random weights in the shapes of released models, made on the device from a small table.

A weight's rows are those of a random table of at most 1 024 rows, in a random order: little is
sent, and a model of 8 billion parameters is there in seconds. Norms are ones, biases small.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import centella as ct
from centella.dtypes import DType, f32, i8
from centella.nn.module import Module, Parameter
from centella.ops.quant.table import FORMATS
from centella.tensors.qtensor import Stacked
from centella.tensors.quantizers import QUANTIZERS, all_quantized

ROWS = 1024
MIXED = "q4_k_m"  # a mix of formats
# Of a block its factor, or that of its levels, and of the levels that are taken off.
FACTORS = {"q4_k": (1e-4, 7.5e-4), "q5_k": (5e-5, 7.75e-4), "q6_k": (1.1e-4,), "iq4_nl": (2.9e-4,),
           "iq4_xs": (1.6e-5,)}  # fmt: skip
EXPONENT = 120  # of blocks of MXFP4
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
        """A weight in a format: what its quantiser makes of one, or of FACTORS random planes."""
        if format in QUANTIZERS:
            return all_quantized(self.matrix(shape, f32), format, "random")[0]
        n, k = shape
        rows, planes = min(n, ROWS), list[Any]()
        for plane in FORMATS[format].planes:
            blocks = k // FORMATS[format].block
            size = plane.shape(rows, blocks)
            if plane.dtype is None:
                planes.append(np.tile(np.array(FACTORS[format], np.float16), (rows, blocks)))
            elif plane.name in ("levels", "factors"):
                first, last, kind = (-16, 16, np.int8) if plane.dtype is i8 else (0, 64, np.uint8)
                planes.append(self.random.integers(first, last, size, kind))
            elif plane.name == "exponents":
                planes.append(np.full(size, EXPONENT, np.uint8))
            else:
                bits = 8 * plane.dtype.itemsize
                planes.append(self.random.integers(0, 1 << bits, size, f"u{bits // 8}"))
        tables = (ct.asarray(p, device=self.device) for p in planes)
        return ct.QTensor(tuple(self.rows(table, n) for table in tables), format)

    def mixed(self, shape: tuple[int, ...], path: str, layers: int, values: int) -> Any:
        """A weight as llama.cpp's mix "Q4_K_M" has it: some are in Q6_K; `values`: rows of them.

        Those are the table, and values and the way down of the first and last eighth of the layers
        and of each third one between.
        """
        n, k, parts = math.prod(shape[:-1]), shape[-1], path.split(".")
        layer = int(parts[1]) if parts[0] == "layers" else 0
        finer = not layers // 8 <= layer < 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        if parts[0] != "layers" or (parts[-1] == "down_proj" and finer):
            return self.quantized((n, k), "q6_k")
        if parts[-1] != "qkv" or not finer:
            return self.quantized((n, k), "q4_k")
        rest = self.quantized((n - values, k), "q4_k")
        return Stacked((rest, self.quantized((values, k), "q6_k")))


def fill(model: Module, device: ct.Device, dtype: DType, format: str = "", own: int = 0) -> None:
    """Give every parameter of a model random data on a device.

    Args:
        dtype: of weights; format: of those that may be quantised, as `quantized` has it, or MIXED.
        own: layers with weights of their own, which the others share in turn; 0: all.
    """
    weights = Weights(device)
    kept: dict[tuple[str, int], Any] = {}
    paths = [path.split(".") for path, _ in model.named_modules()]
    layers = max((int(p[1]) + 1 for p in paths if p[0] == "layers" and len(p) > 1), default=0)
    own *= format != MIXED
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if not isinstance(value, Parameter):
                continue
            parts = path.split(".")
            layer = int(parts[1]) % own if own and parts[0] == "layers" else -1
            key = ".".join(parts[2:] if layer >= 0 else parts) + "." + name, layer
            if key not in kept:
                kept[key] = _parameter(
                    weights, module, path, name, value.shape, dtype, format, layers
                )
            setattr(module, name, kept[key])
    device.synchronize()


def _parameter(
    weights: Weights, module: Module, path: str, name: str, shape: tuple[int, ...], dtype: DType,
    format: str, layers: int,
) -> Any:  # fmt: skip
    if len(shape) == 1 or "norms" in path:
        return weights.vector(shape, name != "bias")
    if format == MIXED and module.takes_planes(name):
        values = getattr(module, "stacks", {}).get("v_proj", 0)
        return weights.mixed(shape, path, layers, values)
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
