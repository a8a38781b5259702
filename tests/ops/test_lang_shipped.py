"""Every kernel that the library ships: simulated in all orders, broken, parsed and assembled.

Ops run at small shapes on a simulator device, as users call them; what it launches is kept, with
the words before and after. Memory is poisoned, pads too. An op without a case fails the first test.
"""

from __future__ import annotations

import itertools
import linecache
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

import centella as ct
from centella.backends.base import Submission
from centella.check.cases.case import rng_of, tensor_of, values_of
from centella.check.cases.compare import attrs_of, record
from centella.check.cases.table import cases_of
from centella.emit.ptx import emit_ptx
from centella.emit.wgsl import count_statements, emit_wgsl
from centella.errors import LimitError, SimulationError
from centella.lang import KernelIR
from centella.op.op import Op, get, registry
from centella.ops import MODULES, topk
from centella.ops.elementwise import ACTIVATIONS, BOOLS, EXPRESSIONS, Expression
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.norm import NormAttrs
from centella.ops.rope_attend import RopeAttendAttrs
from centella.simulator.run import simulate
from centella.specs import Caps, Spec
from centella.tensors import functional as F  # noqa: N812  # as users of PyTorch spell it
from centella.tensors.tensor import apply, apply_all, apply_with, fetch
from tests.support.lang_common import ORDERS, Tensor, assembled, ptxas, tint, webgpu
from tests.support.mutations import Mutation, mistakes

MOST_STATEMENTS = 6_000
MINIMUM = Caps(target="ir")  # WebGPU's guaranteed limits
ROOMY = 48 << 10  # bytes of workgroup memory, where a device has more than the minimum
TOLERANCE = {"f32": 1e-4, "f16": 4e-3, "bf16": 3e-2}

Words = NDArray[np.uint32]

# -- the cases -------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Makes the operands of a case on one device."""

    device: ct.Device
    dtype: str
    seed: int = 0

    def __call__(self, *shape: int, low: float = -2.0, high: float = 2.0) -> ct.Tensor:
        """Random values; no two tensors of a case are alike."""
        self.seed += 1
        values = np.random.default_rng(self.seed).uniform(low, high, shape).astype(np.float32)
        return self.of(values, self.dtype)

    def of(self, values: Any, dtype: str = "i32") -> ct.Tensor:
        """These values."""
        return ct.asarray(np.asarray(values), dtype=dtype, device=self.device)

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes."""
        return ct.dtypes.ALL[self.dtype].per_chunk

    def peaks(self, columns: int, width: int, more: int = 0) -> ct.Tensor:
        """Rows with one element far above the rest: of each thread of a team, and of a tree's last.

        Args:
            width: elements a thread has; more: columns to cut off on the left.
        """
        self.seed += 1
        threads = [t for t in (*range(129), *range(144, 257, 16)) if t * width < columns]
        at = np.repeat(threads, 2) * width + more
        values = np.random.default_rng(self.seed).uniform(-2, 2, (at.size, columns + more))
        values[np.arange(at.size), at] += 300
        return self.of(values.astype("i4" if self.dtype == "i32" else "f4"), self.dtype)[:, more:]

    def ties(self, rows: int, columns: int) -> ct.Tensor:
        """Random rows; half as many of equal elements but for a larger one more in each row."""
        self.seed += 1
        rng = np.random.default_rng(self.seed)
        equal = rng.integers(0, 2, (rows, columns))
        for row in range(rows):  # in parts that have other threads than the first of the equal
            equal[row, 256 * np.arange(5, 5 + row)] = 2
        values = np.concatenate([rng.uniform(-2, 2, (2 * rows, columns)), equal])
        return self.of(values.astype(np.float32), self.dtype)

    def ints(self, *shape: int, low: int = -50, high: int = 50) -> ct.Tensor:
        """Random integers of the case's dtype."""
        self.seed += 1
        return self.of(np.random.default_rng(self.seed).integers(low, high, shape), self.dtype)

    def bools(self, *shape: int) -> ct.Tensor:
        """Random bools."""
        self.seed += 1
        return self.of(np.random.default_rng(self.seed).random(shape) < 0.5, "bool")


Build = Callable[[Inputs], ct.Tensor]


@dataclass(frozen=True)
class Case:
    """An op at one shape and dtype; `roomy` asks for more workgroup memory than the minimum."""

    op: str
    name: str
    build: Build
    dtype: str = "f32"
    roomy: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{self.dtype}{'-roomy' * self.roomy}"


@dataclass
class Launch:
    """One launch: the kernel, the words of its operands before and after, its parameters."""

    ir: KernelIR
    before: list[Words]
    params: Words
    groups: int
    views: tuple[tuple[Spec, int], ...]
    after: list[Words] = field(default_factory=list)

    def run(self, ir: KernelIR | None = None, **options: Any) -> list[Words]:
        """The words after a checked run."""
        words = [w.copy() for w in self.before]
        simulate(ir or self.ir, words, self.params, self.groups, **options)
        return words

    def outputs(self, words: list[Words]) -> list[NDArray[Any]]:
        """The elements of what the kernel writes, as values."""
        values = []
        for arg, (spec, offset), raw in zip(self.ir.args, self.views, words, strict=True):
            if arg.writable and spec.size:
                values.append(Tensor(raw, spec.dtype, spec.shape, spec.strides, offset).numpy())
        return values

    def agrees(self, words: list[Words], near: float = 0.0) -> bool:
        """True where every element of the outputs is what it was."""
        pairs = zip(self.outputs(words), self.outputs(self.after), strict=True)
        with np.errstate(all="ignore"):
            return all(np.allclose(a, b, near, near, equal_nan=True) for a, b in pairs)


def operands_of(i: Inputs, e: Expression) -> list[ct.Tensor]:
    """Rows that an expression takes, the last of two repeated along them; bools for conditions."""
    shapes = [(3, 70), (70,)] if len(e.operands) == 2 else [(3, 70)] * len(e.operands)
    bools = e.conditions if "float" in e.kinds else len(e.operands) * (e.kinds == BOOLS)
    operands = [i.bools(*shape) for shape in shapes[:bools]]
    for shape in shapes[bools:]:
        if e.compares or i.dtype in ("i32", "u32", "i8"):
            operands.append(i.ints(*shape, low=0, high=5))
        else:
            operands.append(i(*shape, low=0.1 if e.domain == "positive" and not operands else -2.0))
    return operands


def elementwise() -> list[Case]:
    """Each expression in f32 and f16, or integers or bools."""
    usual = {"float": ("f32", "f16"), "int": ("i32", "u32", "i8"), "bool": ("bool",)}
    cases = []
    for e in EXPRESSIONS.values():
        example = {"low": -1.0, "high": 0.5} if e.name == "clip" else e.example

        def build(i: Inputs, e: Expression = e, example: Any = example) -> ct.Tensor:
            return apply(e.name, *operands_of(i, e), **example)

        cases += [Case(e.name, "rows", build, dtype) for dtype in usual[e.kinds[0]]]
    return cases


# Operation, name, dtypes, and a call with operands of `i`; a call may go on in a line below.
CALLS = """
gelu | table | f32 f16 | drawn(i, "gelu")
copy | table | f32 f16 | drawn(i, "copy")
silu_gate | table | f32 f16 | drawn(i, "silu_gate")
maximum | number | f32 f16 | F.maximum(i(3, 70), 0.3)
mul | column | f32 f16 | F.mul(i(3, 70), i(3, 1))
add | vector | f32 f16 bf16 | F.add(i(1030), i(1030))
add | strided | f32 f16 bf16 | F.add(i(6, 5).permute(1, 0), i(5, 6))
add | sliced | f32 f16 bf16 | F.add(i(4, 9)[:, 1:8], i(7))
add | batched | f32 f16 bf16 | F.add(i(2, 3, 4, 10), i(3, 1, 10))
add | number | f32 f16 bf16 | F.add(i(3, 5), 2.5)
add | integers | i32 u32 i8 | F.add(i.ints(3, 70, low=0), i.ints(3, 70, low=0))
maximum | integers | i32 u32 i8 | F.maximum(i.ints(3, 70, low=0), i.ints(70, low=0))
sign | integers | i32 u32 i8 | F.sign(i.ints(3, 70, low=0, high=3))
sign | signed | i32 i8 | F.sign(i.ints(3, 70))
floor_divide | signed | i32 i8 | F.floor_divide(i.ints(3, 70), i.ints(3, 70, low=-5, high=5))
remainder | signed | i32 i8 | F.remainder(i.ints(3, 70), i.ints(70, low=-5, high=5))
lt | integers | i32 u32 i8 | F.lt(i.ints(3, 70, low=0), 20)
eq | bools | bool | F.eq(i.bools(3, 70), i.bools(70))
reshape | rows | f32 f16 i8 | i.ints(6, 5).reshape(5, 6)
reshape | vector | f32 f16 i8 | i.ints(3, 2, 7).reshape(-1)
concat | rows | f32 f16 i8 | F.concat([i.ints(2, 5), i.ints(3, 5)])
concat | columns | f32 f16 i8 | F.concat([i.ints(3, 5), i.ints(3, 6), i.ints(3, 7)], 1)
fill | table | f32 f16 i8 | drawn(i, "fill")
reduce | sum | f32 f16 | F.sum(i(6, 257 * i.chunk), -1)
reduce | sum sliced | f32 f16 | F.sum(i(6, 300)[:, 1:], -1)
reduce | sum all | f32 f16 | F.sum(i(50, 77))
reduce | sum first | f32 f16 | F.sum(i(530, 3), 0)
reduce | sum integers | i32 | F.sum(i.ints(6, 1030), -1)
reduce | mean | f32 f16 | F.mean(i(5, 77), -1)
reduce | max | f32 f16 i32 | F.max(i.peaks(257 * i.chunk, i.chunk), -1)
reduce | min | f32 f16 | F.min(F.neg(i.peaks(257 * i.chunk, i.chunk)), -1)
reduce | long | f32 f16 | F.sum(i(2, 16500), -1)
argmax | rows | f32 f16 i32 | F.argmax(i.peaks(257 * i.chunk, i.chunk), -1)
argmax | sliced | f32 f16 | F.argmax(i.peaks(260, 1, 1), -1)
dot | vectors | f32 f16 | F.dot(i(260 * i.chunk), i(260 * i.chunk))
softmax | rows | f32 f16 | F.softmax(i.peaks(257 * i.chunk, i.chunk))
softmax | short | f32 f16 bf16 | F.softmax(i.peaks(64 * i.chunk - 3, i.chunk))
softmax | log | f32 f16 | F.log_softmax(i.peaks(64 * i.chunk - 3, i.chunk))
softmax | sliced | f32 f16 | F.softmax(i.peaks(127, 4 // i.chunk or 2, 1))
softmax | first | f32 f16 | F.softmax(i(5, 6), 0)
norm | layer | f32 f16 | F.layer_norm(i(3, 300), i(300), i(300))
norm | layer odd | f32 f16 | F.layer_norm(i(3, 511), i(511), i(511))
norm | layer bare | f32 f16 | F.layer_norm(i(3, 511))
norm | rms | f32 f16 | F.rms_norm(i(3, 511), i(511))
norm | l2 | f32 f16 | F.l2_normalize(i(3, 511))
norm | sliced | f32 f16 | F.layer_norm(i(3, 131)[:, 1:], i(130), i(130))
mean_pool | table | f32 f16 | drawn(i, "mean_pool")
embedding | rows | f32 f16 | F.embedding(i.of([[3, 0, 5], [9, 2, -1]]), i(9, 40))
embedding | odd | f32 f16 | F.embedding(i.of([3, 0, 5, 8]), i(9, 7))
matmul | batched | f32 f16 bf16 | F.matmul(i(2, 33, 35), i(2, 35, 36))
matmul | sliced | f32 f16 bf16 | F.matmul(i(33, 40)[:, 1:36], i(35, 41))
linear | residual | f32 f16 bf16 | F.linear(i(33, 35), i(36, 35), residual=i(33, 36))
linear | mma rows | f16 bf16 | F.linear(i(35, 100), i(70, 100), i(70), residual=i(35, 70),
    activation="silu", variant="mma")
matmul | mma across | f16 bf16 | F.matmul(i(72, 35).T, i(72, 37), alpha=0.5, variant="mma")
matmul | mma odd | f16 bf16 | F.matmul(i(2, 40, 70)[:, :, 1:], i(3, 70, 50)[1:, :69, 1:],
    variant="mma")
linear | thin 3 | f32 f16 | F.linear(i(3, 67), i(9, 67))
linear | thin 4 | f32 f16 | F.linear(i(4, 67), i(9, 67))
linear | gemv long | f32 f16 | deep(i, 1, 530 * i.chunk + 3)
linear | gemv bf16 | bf16 | F.linear(i(1, 2048), i(5, 2048))
linear | int8 tile | f32 f16 | quantised(i, 18, 35, 33)
linear | int8 medium | f32 f16 | F.linear(i(70, 35),
    i.of(np.arange(67 * 35).reshape(67, 35) % 99, "i8"), scale=i(67), variant="medium")
linear | thin sliced | f32 f16 | F.linear(i(4, 34 * i.chunk)[:, 1:],
    i(9, 34 * i.chunk + 1)[:, 2:])
matmul | thin batched | f32 f16 | F.matmul(i(2, 4, 300), i(2, 6, 300).permute(0, 2, 1))
matmul | thin turned | f32 f16 | F.matmul(i(34 * i.chunk - 1, 4).T, i(9, 34 * i.chunk - 1).T,
    alpha=0.5)
matmul | columns 1 | f32 f16 | F.matmul(i(1, 67), i(67, 133))
matmul | columns 4 | f32 f16 | F.matmul(i(2, 4, 64), i(2, 64, 30), alpha=0.5)
matmul | columns 16 | f32 f16 | F.matmul(i(16, 69), i(69, 35))
matmul | columns split | f32 f16 | F.matmul(i(2, 600), i(600, 29), alpha=0.5)
matmul | columns sliced | f32 f16 | F.matmul(i(80, 4)[1:].T, i(79, 42)[:, 1:])
attention | plain | f32 f16 | attend(i, 2, 2, 5, 21, 16)
attention | i8, few | f32 f16 | attend_i8(i, 2, 70, 124, variant="split")
attention | i8, many | f32 f16 | attend_i8(i, 35, 40, 16, causal=True, variant="tiled")
attention | i8, stream | f32 f16 | attend_i8(i, 9, 33, 20, variant="stream")
attention | causal | f32 f16 | attend(i, 2, 2, 19, 21, 16, causal=True)
attention | lengths | f32 f16 | attend(i, 2, 2, 5, 21, 16, lengths=i.of([13, 20]))
attention | key_mask | f32 f16 | attend(i, 2, 2, 5, 21, 16, key_mask=i.of(KEYS, "bool"))
attention | mask | f32 f16 | attend(i, 2, 2, 5, 21, 16, mask=i(2, 1, 5, 21))
attention | all | f32 f16 | attend(i, 2, 1, 7, 21, 8, causal=True, lengths=i.of([13, 21]),
    key_mask=i.of(KEYS, "bool"), mask=i(1, 2, 1, 21))
attention | grouped | f32 f16 | attend(i, 4, 2, 3, 18, 16)
attention | odd head | f32 f16 | attend(i, 1, 1, 3, 18, 13)
attention | head 64 | f32 | attend(i, 1, 1, 3, 18, 64)
attention | head 80 | f16 | attend(i, 1, 1, 3, 18, 80)
attention | head 160 | f32 | attend(i, 1, 1, 3, 9, 160)
attention | two queries a thread | f32 | attend(i, 1, 1, 70, 17, 8)
attention | starts | f32 | attend(i, 2, 1, 5, 21, 16, starts=i.of([-2, 17]))
attention | tiled | f32 f16 | attend(i, 2, 1, 37, 41, 16, variant="tiled", lengths=i.of([34, 41]))
attention | tiled, causal | f32 | attend(i, 1, 1, 35, 44, 60, variant="tiled", causal=True)
attention | tiled, odd head | f32 f16 | attend(i, 2, 2, 9, 40, 13, variant="tiled",
    starts=i.of([-2, 30]))
attention | tiled, all | f32 f16 | attend(i, 2, 1, 9, 40, 8, variant="tiled",
    starts=i.of([25, 33]), lengths=i.of([26, 40]), mask=i(2, 1, 9, 40),
    key_mask=i.of(np.arange(80).reshape(2, 40) % 3 > 0, "bool"))
attention | split | f32 f16 | attend(i, 2, 2, 1, 150, 128, variant="split")
attention | split into many | f32 f16 | many_parts(i)
attention | split of lengths | f32 f16 | attend(i, 2, 2, 1, 192, 128, variant="split",
    lengths=i.of([190, 1]))
attention | split of causal | f32 | attend(i, 4, 2, 2, 128, 128, variant="split", causal=True)
attention | split, all | f32 f16 | attend(i, 8, 2, 2, 130, 13, variant="split",
    starts=i.of([125, 60]), lengths=i.of([126, 140]), mask=i(2, 1, 2, 130),
    key_mask=i.of(np.arange(260).reshape(2, 130) % 3 > 0, "bool"))
arange | table | f32 f16 i32 u32 u8 | drawn(i, "arange")
gather | rows | f32 f16 i8 | F.gather(i.ints(9, 80, low=0), i.of([[3, 0, 5], [8, 9, -1]]))
gather | odd | f32 f16 i8 | F.gather(i.ints(9, 7, low=0), i.of([3, 0, 5, 8]))
gather | middle | f32 f16 i8 | F.gather(i.ints(2, 9, 16, low=0), i.of([8, 0, 5]), 1)
gather | columns | f32 f16 i8 | F.gather(i.ints(3, 33, low=0), i.of(PICKS), 1)
scatter | rows | f32 f16 i8 | F.scatter(i.ints(9, 80, low=0), i.of([3, 8, 3, -1]),
    i.ints(4, 80, low=0))
scatter | odd | f32 f16 i8 | F.scatter(i.ints(9, 7, low=0), i.of([3, 0, 3]), i.ints(3, 7, low=0))
scatter | elements | f32 f16 i8 | F.scatter(i.ints(33, low=0), i.of(PICKS), i.ints(21, low=0))
rope | table | f32 f16 | drawn(i, "rope")
conv1d | first | f32 f16 | F.conv1d(i(2, 7, 39), i(37, 7, 3), i(37), padding=1, activation="gelu")
conv1d | last | f32 f16 | F.conv1d(i(2, 39, 16).permute(0, 2, 1), i(37, 16, 3), i(37), stride=2,
    padding=1)
conv1d | no copy of x | f32 f16 | F.conv1d(i(2, 39, 16).permute(0, 2, 1), i(37, 16, 3), i(37))
assign | table | f32 f16 i8 | drawn(i, "assign")
cache_write | table | f32 f16 | drawn(i, "cache_write", 8)
rope_cache_write | table | f32 f16 | drawn(i, "rope_cache_write")
rope_attend | norm | f32 f16 | attended(i, 128, True)
rope_attend | blocks | f32 f16 | attended(i, 128, False, [[120, 1, 3], [50, 2, 0]])
attend_linear | all parts | f32 f16 | attended_by(i, 4, 64, 19, 256, 255)
attend_linear | odd parts | f32 f16 | attended_by(i, 2, 128, 9, 192, 191)
attend_linear | some parts | f32 f16 | attended_by(i, 4, 64, 8, 256, 70)
attend_linear | one part | f32 f16 | attended_by(i, 2, 128, 8, 192, 5)
cache_write_i8 | table | f32 f16 | drawn(i, "cache_write_i8")
rope_cache_write_i8 | 16 | f32 f16 | rotated(i, 16, False, False)
rope_cache_write_i8 | 16, norm, pairs | f32 f16 | rotated(i, 16, True, True)
rope_cache_write_i8 | 6, norm | f32 f16 | rotated(i, 6, True, False)
cache_step | table | i32 | drawn(i, "cache_step")
cache_copy | table | f32 f16 | drawn(i, "cache_copy", 8)
cache_copy_i8 | table | f32 | drawn(i, "cache_copy_i8", 8)
beam_select | table | f32 | drawn(i, "beam_select")
beam_blocks | table | i32 | drawn(i, "beam_blocks")
topk | short | f32 f16 | picked(i(6, 40), 5)
topk | each thread | f32 f16 i32 | picked(i.peaks(257 * i.chunk + 2, i.chunk), 3)
topk | each thread, whole | f32 f16 | picked(i.peaks(257 * i.chunk, i.chunk), 3)
topk | many | f32 f16 i8 | picked(i.ints(12, 8140, low=-128, high=128), 37)
topk | parts | f32 f16 | picked(i.ties(8, 16102), 19)
topk | parts, few | f32 f16 | picked(i.ties(8, 8202), 15)
topk | many parts | f32 f16 | picked(i.ties(4, 16906), 47, part=256)
topk | many parts, few | f32 f16 | picked(i.ties(8, 17418), 15, part=256)
argsort | short | f32 f16 i8 | F.argsort(i(6, 40)).astype("f32")
argsort | falling | f32 bf16 | F.argsort(i(3, 130), descending=True).astype("f32")
argsort | merged | f32 i32 | F.argsort(i.ints(2, 4100)).astype("f32")
cumsum | rounds | f32 f16 i8 | F.cumsum(i.ints(2, 2305))
cumsum | split | f32 i32 | F.cumsum(i.ints(2, 16500, low=0, high=3))
cumsum | split into many | f32 i32 | split_sums(i.ints(2, 16500, low=0, high=3))
take_along_axis | table | f32 f16 i8 | drawn(i, "take_along_axis", 8)
scatter_reduce | rows | f32 f16 i8 | F.scatter(i.ints(33, 5), i.of(PICKS), i.ints(21, 5),
    reduce="add")
scatter_reduce | set | f32 f16 | F.scatter(i(3, 33), i.of([PICKS] * 3), i(3, 21), axis=1)
scatter_reduce | max | f32 | F.scatter(i(3, 33), i.of([PICKS] * 3), i(3, 21), axis=1,
    reduce="max")
sample | short | f32 | sampled(i, i(6, 5), 0.7, 2, 0.9)
sample | more than there are | f32 | sampled(i, i(6, 6), 0.7, 9, 0.9)
sample | long | f32 | sampled(i, i(6, 1003), 1.0, 40, 0.95)
sample | two chunks | f32 | sampled(i, i(6, 5003), 1.0, 40, 0.95)
sample | each thread | f32 | sampled(i, i.peaks(1030, 4), 0.0, 0, 1.0)
sample | greedy | f32 | sampled(i, i(6, 1030), 0.0, 0, 1.0)
sample | slices | f32 | sampled(i, i(6, 1030), 0.7, 5, 0.9, variant="slices")
sample | slices at most | f32 | sampled(i, i.peaks(1030, 4), 0.0, 0, 1.0, variant="slices")
cache_attend | short | f32 f16 | stepped_on(i, 40, 32, [3, 39])
cache_attend | long | f32 | stepped_on(i, 300, 64, [0, 290])
speech_move | table | f32 | drawn(i, "speech_move")
speech_beams | text | f32 | texts(i, 301, False)
speech_beams | times | f32 | texts(i, 5004, True)
speech_scores | text | f32 | masked(i(6, 301), i, False)
speech_scores | times | f32 | masked(i(6, 5004), i, True)
speech_token | short | f32 | spoken(i, i(6, 37), False, True)
speech_token | odd | f32 | spoken(i, i(6, 301), True, False)
speech_token | two parts | f32 | spoken(i, i(6, 5004), True, True)
speech_token | each thread | f32 | spoken(i, i.peaks(1032, 4), False, False)
linear_norm | layer | f32 f16 | followed(i, 19, 33, 35, "layer")
linear_norm | rms | f32 f16 | followed(i, 2, 66, 9 * i.chunk - 1, "rms")
normed_linear | odd | f32 f16 | normed(i, 2, 9, 67)
normed_linear | gate | f32 f16 | normed(i, 1, 18, 264, "silu")
normed_linear | gate, many | f32 f16 | normed(i, 8, 18, 64, "gelu")
normed_linear | residual | f32 f16 | normed(i, 1, 9, 515, residual=i(1, 9))
normed_linear | whole | f32 f16 | normed(i, 1, 9, 128 * i.chunk)
normed_linear | layer | f32 f16 | layered(i, 1, 9, 141 * i.chunk + 3)
normed_linear | layer, two rows | f32 f16 | layered(i, 2, 9, 129 * i.chunk)
normed_linear | layer, walked | f32 f16 | layered(i, 2, 9, 1024 * i.chunk + 3)
expert_linear | gate | f32 f16 | chosen(i, 3, 2, 9, 67)
expert_linear | gate, both | f32 f16 | chosen(i, 2, 3, 18, 130 * i.chunk + 1)
expert_linear | gate, whole | f32 f16 | chosen(i, 1, 2, 9, 64 * i.chunk)
expert_linear | down | f32 f16 | summed(i, 3, 2, 9, 67)
expert_linear | down, both | f32 f16 | summed(i, 2, 3, 18, 130 * i.chunk + 1, True)
expert_linear | down, whole | f32 f16 | summed(i, 2, 3, 9, 64 * i.chunk, True)
fused | rows | f32 f16 | compared(i(3, 80), i(3, 80))
fused | odd | f32 bf16 | compared(i(3, 7), i(7))
fused | integers | i32 i8 | wrapped(i.ints(3, 70))
fused | chain | f32 f16 | F.gelu(i(3, 75) * 0.5 + i(75)) - i(3, 1)
fused | norm | f32 f16 | F.layer_norm(added(i, 3, 4, 300), i(300), i(300)) * i(3, 4, 1)
fused | norm odd | f32 f16 | F.rms_norm(i(3, 140)[:, 1:] * i(3, 1), i(139)) + i(3, 139)
fused | reduce | f32 f16 | F.mean(added(i, 2, 3, 257 * i.chunk), -1) * 0.5 + i(2, 3)
fused | reduce odd | f32 f16 | F.sum(i(6, 266 * i.chunk)[:, 1:] * i(6, 1), -1) + i(6)
fused | reduce long | f32 f16 | F.sum(i(2, 16500) * 0.25, -1) + i(2)
attention | bias | f32 f16 | attend(i, 2, 1, 5, 21, 16, lengths=i.of([13, 20]), bias=i(2, 7))
attention | tiled, bias | f32 | attend(i, 2, 1, 9, 40, 8, variant="tiled", bias=i(1, 7))
attention | split, bias | f32 f16 | attend(i, 4, 2, 2, 190, 128, variant="split", causal=True,
    bias=i(4, 7))
attention | offsets | f32 f16 | end_to_end(i, 16, window=4)
attention | tiled, offsets | f32 f16 | end_to_end(i, 8, variant="tiled", bias=i(1, 7))
attention | window | f32 f16 | attend(i, 2, 1, 5, 21, 16, starts=i.of([3, 17]), window=4,
    sinks=i(2), softcap=1.5)
attention | tiled, window | f32 | attend(i, 2, 1, 9, 40, 8, variant="tiled", window=7,
    sinks=i(2), softcap=1.5)
attention | split, window | f32 f16 | attend(i, 4, 2, 2, 190, 128, variant="split", causal=True,
    window=70, sinks=i(4), softcap=1.5)
attention | blocks | f32 f16 | F.attention(i(2, 2, 5, 16), i(1, 3, 64, 16), i(1, 3, 64, 16),
    starts=i.of([80, 70]), blocks=i.of([[2, 0], [1, 2]]))
attention | tiled, blocks | f32 | F.attention(i(2, 2, 5, 16), i(1, 3, 64, 16), i(1, 3, 64, 16),
    starts=i.of([80, 70]), blocks=i.of([[2, 0], [1, 2]]), variant="tiled")
attention | split, blocks | f32 f16 | F.attention(i(2, 2, 1, 128), i(1, 3, 64, 128),
    i(1, 3, 64, 128), starts=i.of([100, 127]), blocks=i.of([[2, 0], [1, 2]]), variant="split")
"""
KEYS = np.random.default_rng(3).random((2, 21)) < 0.6
PICKS = np.append(
    np.random.default_rng(5).integers(0, 33, 19), [-1, -34]
)  # some equal, one outside


def called() -> list[Case]:
    """The cases of `CALLS`."""
    cases = []
    for line in CALLS.strip().replace("\n    ", " ").splitlines():
        op, name, dtypes, call = line.split(" | ", 3)
        build = eval(f"lambda i: {call}", globals())
        cases += [Case(op, name, build, dtype) for dtype in dtypes.split()]
    return cases


def casts() -> list[Case]:
    """Between sizes and kinds."""
    pairs = ("f32 f16", "f16 f32", "f32 bf16", "f32 i32", "i32 f32", "f32 i8", "i8 f16", "u8 f32",
             "f16 u8", "f32 bool", "i32 u32")  # fmt: skip

    def build(i: Inputs, target: str) -> ct.Tensor:
        return F.cast(i.ints(3, 21, low=0, high=2 if target == "bool" else 50), target)

    return [
        Case("cast", f"to {target}", partial(build, target=target), source)
        for source, target in map(str.split, pairs)
    ]


def products() -> list[Case]:
    """Each tile in each layout, depth and storage type; the epilogues."""
    cases = []
    layouts: dict[str, Callable[..., ct.Tensor]] = {
        "nn": lambda i, m, n, v: F.matmul(i(m, 40), i(40, n), variant=v),
        "nt": lambda i, m, n, v: F.matmul(i(m, 35), i(n, 35).T, variant=v),
        "tn": lambda i, m, n, v: F.matmul(i(35, m).T, i(35, n), alpha=0.5, variant=v),
        "tt": lambda i, m, n, v: F.matmul(i(32, m).T, i(n, 32).T, variant=v),
    }

    def linear(i: Inputs, m: int, n: int, v: str) -> ct.Tensor:
        x, weight, bias, residual = i(m, 35), i(n, 35), i(n), i(m, n)
        return F.linear(x, weight, bias, activation="gelu", residual=residual, variant=v)

    for variant, (m, n) in {"small": (37, 41), "medium": (70, 67), "large": (130, 133)}.items():
        sizes: dict[str, Any] = {"m": m, "n": n, "v": variant}
        cases += [
            Case("matmul", f"{variant} {name}", partial(build, **sizes), dtype, roomy)
            for name, build in layouts.items()
            for dtype in ("f32", "f16")
            for roomy in (False, True)
        ]  # fmt: skip
        cases += [Case("linear", variant, partial(linear, **sizes), d) for d in ("f32", "f16")]
    for name in ACTIVATIONS:
        cases.append(Case("linear", name, lambda i, a=name: F.linear(i(37, 35), i(41, 35), i(41),
                                                                      activation=a)))  # fmt: skip
    return cases


def deep(i: Inputs, m: int, k: int) -> ct.Tensor:
    """A thin product with a bias."""
    return F.linear(i(m, k), i(9, k), i(9))


def quantised(i: Inputs, m: int, n: int, k: int) -> ct.Tensor:
    """A weight of int8 with a factor a row."""
    i.seed += 1
    stored = np.random.default_rng(i.seed).integers(-127, 128, (n, k))
    scale = i.of(np.linspace(1, 2, n) / 127, "f32")
    return F.linear(i(m, k), i.of(stored, "i8"), i(n), scale=scale, residual=i(m, n))


def in_blocks(i: Inputs, m: int, k: int, four: bool) -> ct.Tensor:
    """A weight of 9 rows in blocks of 8 or 4 bits."""
    i.seed += 1
    rng = np.random.default_rng(i.seed)
    low, high, width = (0, 256, k // 2) if four else (-127, 128, k)
    stored = i.of(rng.integers(low, high, (9, width)), "u8" if four else "i8")
    scale = i(9, k // 32, low=0.0, high=0.02)
    return F.linear(i(m, k), stored, i(9), scale=scale, residual=i(m, 9))


def whole(i: Inputs, four: bool) -> ct.Tensor:
    """A weight in blocks, dequantised."""
    stored = i.of(np.arange(12 * 64).reshape(12, 64) % 99, "u8" if four else "i8")
    return F.dequantize(stored, i(12, 4 if four else 2), i.dtype)


def thin_products() -> list[Case]:
    """Few rows, in each way to walk k so that all threads of a team have work; formats."""
    builds: list[tuple[str, str, Build]] = []
    for four in (False, True):
        for m, k in ((1, 4224), (2, 2112), (4, 1184), (16, 1120)):
            build = partial(in_blocks, m=m, k=k, four=four)
            builds.append(("linear", f"blocks {m} {four}", build))
        builds.append(("dequantize", f"whole {four}", partial(whole, four=four)))
    for m in (1, 2, 4, 8, 16):
        for name, many, more in (("masked", 8, -1), ("both", 130 if m == 1 else 33, 1),
                                 ("whole", 64, 0)):  # fmt: skip
            builds.append(("linear", f"thin {m} {name}", lambda i, m=m, many=many, more=more: deep(
                i, m, many * i.chunk + more)))  # fmt: skip
        builds.append(("linear", f"int8 {m}", partial(quantised, m=m, n=18, k=16 * 35 + 3)))
    return [Case(op, name, build, d) for op, name, build in builds for d in ("f32", "f16")]


def many_parts(i: Inputs) -> ct.Tensor:
    """128 parts of 64 keys: maxima in the parts that a tree reads last; then all parts matter."""
    i.seed += 1
    k, v = np.random.default_rng(i.seed).uniform(-1, 1, (2, 1, 1, 8192, 8))
    for n in range(8):
        k[..., (1 << n) // 2 * 64 + 5, n] = 300
    q = np.stack([np.eye(8), np.linspace(-0.01, 0.01, 64).reshape(8, 8)], 1)[None]
    operands = (i.of(x.astype(np.float32), i.dtype) for x in (q, k, v))
    return F.attention(*operands, scale=1.0, variant="split")


def attend(i: Inputs, h: int, kv: int, lq: int, lk: int, d: int, **more: Any) -> ct.Tensor:
    """Attention of a batch of 2."""
    return F.attention(i(2, h, lq, d), i(2, kv, lk, d), i(2, kv, lk, d), **more)


def end_to_end(i: Inputs, d: int, **more: Any) -> ct.Tensor:
    """Attention of four texts, one of them empty, and rows behind the last."""
    q, k, v = (i(1, 2, 90, d) for _ in "qkv")
    return F.attention(q, k, v, offsets=i.of([0, 1, 1, 70, 85]), **more)


def attend_i8(i: Inputs, lq: int, lk: int, d: int, **more: Any) -> ct.Tensor:
    """Attention over keys and values in i8."""
    i.seed += 1
    rng = np.random.default_rng(i.seed)
    k, v = (i.of(rng.integers(-127, 128, (2, 2, lk, d)), "i8") for _ in "kv")
    scales = i.of(rng.uniform(0.01, 0.02, (2, 2, lk, 2)), "f32")
    return F.attention(i(2, 4, lq, d), k, v, scales=scales, **more)


def drawn(i: Inputs, name: str, least: int = 0) -> ct.Tensor:
    """All elements of all results of an op's cases in `check/cases`, but for sweeps and extremes.

    Args:
        least: columns of an operand that a case has to have: fewer fill no word, and a shift within
            it changes nothing.
    """
    results: list[ct.Tensor] = []
    for case in cases_of(name, i.dtype, MINIMUM):
        specs = case.inputs
        wide = not specs or max(s.shape[-1] if s.shape else 0 for s in specs) >= least
        extreme = any(s.values == "extremes" or 0 in s.shape for s in specs)
        if case.sweep or extreme or not wide:
            continue
        values = (values_of(s, i.dtype, rng_of(name, case, n)) for n, s in enumerate(specs))
        pairs = zip(specs, values, strict=True)
        tensors = [tensor_of(s, v, i.dtype, i.device) for s, v in pairs]
        results += record(get(name), tensors, attrs_of(case, i.dtype), i.device)
    read = [value.ravel() for value in fetch(*results).result()]
    return i.of(np.concatenate(read).astype(np.float32), "f32")


def rotated(i: Inputs, dim: int, norm: bool, interleaved: bool) -> ct.Tensor:
    """q, k and v of a step, rotated, and what the cache of k and v in i8 stands for."""
    shapes = {"keys": (2, 2, 7, dim), "values": (2, 2, 7, dim), "scales": (2, 2, 7, 2)}
    caches = [ct.State(i.of(np.zeros(s), "f32" if n == "scales" else "i8"))
              for n, s in shapes.items()]  # fmt: skip
    x, norms = i(2, 3, 6, dim).permute(0, 2, 1, 3), (i(2, dim),) if norm else ()
    angles = np.arange(9 * (dim // 2), dtype=np.float32).reshape(9, -1)
    tables = [i.of(f(angles), "f32") for f in (np.cos, np.sin)]
    given = (*(c.value for c in caches), x, *tables, i.of([2, 5]), *norms)
    attrs = {"interleaved": interleaved, "eps": 1e-6}
    *_, q = apply_all(get("rope_cache_write_i8"), given, attrs)
    keys, values, scales = (c.value for c in caches)
    wide = (x.astype("f32") * scales[..., n : n + 1] for n, x in enumerate((keys, values)))
    return F.concat([q.astype("f32"), *wide], 2)


def stepped_on(i: Inputs, capacity: int, dim: int, starts: list[int]) -> ct.Tensor:
    """The attention of a token, whose key and value are cached."""
    caches = [ct.State(i(2, 3, capacity, dim)) for _ in "kv"]
    x = i(2, 1, 9, dim).permute(0, 2, 1, 3)
    given = (*(c.value for c in caches), x[:, :3], x[:, 3:6], x[:, 6:], i.of(starts))
    *_, y = apply_all(get("cache_attend"), given, {"scale": 0.5})
    return F.concat([y.permute(0, 2, 1, 3), *(c.value for c in caches)], 2)


def attended(i: Inputs, dim: int, norm: bool, starts: Any = (66, 69)) -> ct.Tensor:
    """q, k and v of a step, rotated, k and v cached, and what q attends to."""
    shape = (2, 4, 64, dim) if isinstance(starts[0], list) else (2, 2, 70, dim)
    caches = [ct.State(i(*shape)) for _ in "kv"]
    x, norms = i(2, 1, 6, dim).permute(0, 2, 1, 3), (i(2, dim),) if norm else ()
    angles = np.arange(130 * (dim // 2), dtype=np.float32).reshape(130, -1)
    tables = [i.of(f(angles), "f32") for f in (np.cos, np.sin)]
    given = (*(c.value for c in caches), x, *tables, i.of(list(starts)), *norms)
    attrs = {"interleaved": False, "eps": 1e-6, "scale": 0.1}
    *_, y = apply_all(get("rope_attend"), given, attrs)
    return F.concat([y.permute(0, 2, 1, 3)], 2)


def attended_by(i: Inputs, heads: int, dim: int, n: int, keys: int, at: int) -> ct.Tensor:
    """A step's attention, to a cache of so many keys, and the product that adds up its parts."""
    caches = [ct.State(Inputs(i.device, "f32", n)(1, 1, keys, dim)) for n in (91, 92)]
    wide = Inputs(i.device, "f32", 93)
    angles = np.arange(keys * (dim // 2), dtype=np.float32).reshape(keys, -1)
    tables = [i.of(f(angles), "f32") for f in (np.cos, np.sin)]
    given = (*(c.value for c in caches), wide(1, heads + 2, 1, dim), *tables, i.of([at]),
             i(n, heads * dim), wide(n), wide(1, 1, n))  # fmt: skip
    attrs = {"attend": RopeAttendAttrs(False, 1e-6, 0.1),
             "linear": LinearAttrs(("bias", "residual"), "")}  # fmt: skip
    return apply_all(get("attend_linear"), given, attrs)[2]


def sampled(
    i: Inputs, logits: ct.Tensor, *settings: float, variant: str | None = None
) -> ct.Tensor:
    """Tokens of sequences, half of them with penalties that decide."""
    batch = logits.shape[0]
    seen = np.random.default_rng(7).integers(0, 3, logits.shape).astype(np.int32)
    counts, steps = (ct.State(i.of(a)) for a in (seen, np.arange(batch, dtype=np.int32)))
    pair = [[*settings, 3.0, 1.0, 0.0, 0.0], [*settings, np.inf, 1.5, 2.0, 3.0]]
    rows = i.of(np.array(batch // 2 * pair, np.float32), "f32")
    seeds = i.of(np.arange(40, 40 + batch, dtype=np.int32))
    given = (counts.value, steps.value, logits, rows, seeds)
    return apply_all(get("sample"), given, {"variant": variant})[2]


def masked(scores: ct.Tensor, i: Inputs, timed: bool) -> ct.Tensor:
    """Scores of tokens that may come."""
    scores, levels, notes, attrs = ruled(scores, i, timed)
    return apply_all(get("speech_scores"), (scores, levels, notes), attrs)[0]


def texts(i: Inputs, vocab: int, timed: bool) -> ct.Tensor:
    """Scores and codes of the best texts of three beams of two windows."""
    logits, levels, notes, attrs = ruled(i(6, vocab), i, timed)
    known = (notes.reshape(2, 3, -1), i(2, 3))
    given = (logits.reshape(2, 3, vocab), levels, *known)
    best, which = apply_all(get("speech_beams"), given, attrs)
    return F.concat([F.maximum(best, -9999.0), which.astype("f32")], -1)


def ruled(scores: ct.Tensor, i: Inputs, timed: bool) -> tuple[ct.Tensor, ct.Tensor, ct.Tensor, Any]:
    """Scores, levels, notes and rules: at a text's begin, after one and two times, in text."""
    rows, vocab = scores.shape
    rng, zero = np.random.default_rng(7), vocab - vocab // 3
    before = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (1, 1), (0, 1)])
    row = np.arange(rows)
    notes = np.stack([0 * row, row, zero + row, *before[row % 6].T, row], 1).astype(np.int32)
    levels = rng.choice(3, vocab, p=[0.8, 0.1, 0.1])
    attrs = {"end": zero - 5, "zero": zero, "no_timestamps": zero - 1, "latest": zero + vocab // 5,
             "timed": timed, "random": False}  # fmt: skip
    louder = np.where((np.arange(vocab) < zero) & (row[:, None] % 2 == 1), 9.0, 0.0)
    scores = scores + i.of(louder, "f32")  # of every second row text is likelier
    return scores, i.of(levels), i.of(notes), attrs


def spoken(i: Inputs, logits: ct.Tensor, timed: bool, random: bool) -> ct.Tensor:
    """Tokens of windows at their begin, after one and two times, in text, and ended; their sums."""
    batch, vocab = logits.shape
    rng, zero = np.random.default_rng(7), vocab - vocab // 3
    before = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (1, 1), (0, 1)])
    row = np.arange(batch) % 6
    notes = np.stack([row == 5, row, zero + row, *before[row].T, 40 + row], 1).astype(np.int32)
    sums = np.stack([row, 0.5 + row % 2], 1).astype(np.float32)
    given = [ct.State(i.of(a)) for a in (notes, row[:, None])]
    given.insert(1, ct.State(i.of(sums, "f32")))
    levels = rng.choice(3, vocab, p=[0.8, 0.1, 0.1])
    levels[zero - 5] = 0
    ends = np.zeros(logits.shape, np.float32)
    ends[3, zero - 5] = 400
    attrs = {"end": zero - 5, "zero": zero, "no_timestamps": zero - 1, "latest": zero + vocab // 5,
             "timed": timed, "random": random}  # fmt: skip
    states = [s.value for s in given]
    logits = logits + i.of(ends, "f32")
    *_, y = apply_all(get("speech_token"), (*states, logits, i.of(levels)), attrs)
    after = [given[0].value, given[1].value, given[2].value, y.reshape(batch, 1)]
    return F.concat([x.astype("f32") for x in after], 1)


def followed(i: Inputs, m: int, n: int, k: int, kind: str) -> ct.Tensor:
    """A product and the norm of its rows as one op."""
    vectors = ("weight", "bias")[: 2 if kind == "layer" else 1]
    attrs = {
        "linear": LinearAttrs(("bias", "residual"), ""),
        "norm": NormAttrs(kind, 1e-5, vectors),
    }
    return apply("linear_norm", i(m, k), i(n, k), i(n), i(m, n), *(i(n) for _ in vectors), **attrs)


def normed(
    i: Inputs, m: int, n: int, k: int, gate: str = "", residual: ct.Tensor | None = None
) -> ct.Tensor:
    """A product with a norm before it in one launch."""
    attrs = {"gate": gate, "eps": 1e-5, "alpha": 0.5, "dtype": ""}
    extras = {"norm": i(k), "residual": residual}
    return apply_with("normed_linear", (i(m, k), i(n, k)), "extras", extras, attrs)


def layered(i: Inputs, m: int, n: int, k: int) -> ct.Tensor:
    """A product with a layer norm before it and an epilogue in one launch."""
    attrs = {"gate": "", "eps": 1e-5, "alpha": 1.0, "dtype": "", "kind": "layer",
             "activation": "gelu"}  # fmt: skip
    extras = {"norm": i(k), "shift": i(k), "bias": i(n), "residual": i(m, n)}
    return apply_with("normed_linear", (i(m, k), i(n, k)), "extras", extras, attrs)


def chosen(i: Inputs, rows: int, picks: int, n: int, k: int) -> ct.Tensor:
    """The gates of experts, one of which there is not."""
    ids = i.of(np.arange(rows * picks).reshape(rows, picks) * 3 % 5)
    extras, attrs = {"up": i(4, n, k)}, {"gate": "silu"}
    x = i(rows, k, low=-0.2, high=0.2)
    return apply_with("expert_linear", (x, i(4, n, k), ids), "extras", extras, attrs)


def summed(
    i: Inputs, rows: int, picks: int, n: int, k: int, residual: bool = False
) -> ct.Tensor:  # fmt: skip
    """The weighed sums of experts."""
    ids = i.of(np.arange(rows * picks).reshape(rows, picks) * 3 % 4)
    extras = {"shares": i(rows, picks, low=0.2), "residual": i(rows, n) if residual else None}
    x = i(rows, picks, k, low=-0.2, high=0.2)
    return apply_with("expert_linear", (x, i(4, n, k), ids), "extras", extras, {"gate": ""})


def picked(x: ct.Tensor, k: int, part: int | None = None) -> ct.Tensor:
    """The largest elements, and where they are.

    Args:
        part: elements that a group has; the last group has fewer than k, and what the groups choose
            is as much as a group of the next launch can load at once.
    """
    usual = topk.Group.part

    def parted(group: topk.Group, columns: int, width: int, k: int) -> int:
        return part if part and columns == x.shape[-1] else usual(group, columns, width, k)

    with patch.object(topk.Group, "part", parted):
        values, at = F.topk(x, k)
        y = F.concat([values.astype("f32"), at.astype("f32")], -1)
        y.numpy()
    return y


def split_sums(x: ct.Tensor) -> ct.Tensor:
    """Sums along rows, in so many parts that each thread has the sum of one."""
    with patch("centella.ops.cumsum.SPLIT", 64):
        y = F.cumsum(x)
        y.numpy()
    return y


def compared(x: ct.Tensor, w: ct.Tensor) -> ct.Tensor:
    """A chain with a comparison and numbers."""
    return F.where(F.gelu(x * w) < 0.4, x + 1.5, -2.0)


def wrapped(x: ct.Tensor) -> ct.Tensor:
    """A chain of integers."""
    return F.where((x * 5 + 3) % 7 > x, x, 4)


def added(i: Inputs, *shape: int) -> ct.Tensor:
    """Rows, and what repeats along all but the last two and the last dimension, added."""
    return i(*shape) + i(shape[-1]) + i(*shape[1:])


CASES = [*elementwise(), *called(), *casts(), *products(), *thin_products()]


def is_again(case: Case) -> bool:
    """Whether a case is one in f32 again: its threads meet as there."""
    narrow = case.dtype in ("f16", "bf16")
    return narrow and any(
        (c.op, c.name, c.dtype, c.roomy) == (case.op, case.name, "f32", case.roomy) for c in CASES
    )


FIRST = [case for case in CASES if not is_again(case)]  # `-m sweep` has the others


@dataclass
class Seen:
    """What a case did: the ops it recorded, what it launched, its result and the CPU's."""

    ops: set[str]
    launches: list[Launch]
    result: NDArray[Any]
    expected: NDArray[Any]


class Unfit(Exception):  # noqa: N818  # it says what is the matter
    """No variant of this name fits the device."""


@cache
def run(case: Case) -> Seen:
    """Run a case on a simulator device, and on the CPU."""
    device = ct.device("simulator", pool="poison", checked=True)
    if case.roomy:
        device.backend.caps = replace(device.caps, max_shared=ROOMY)
    ops: set[str] = set()
    launches: list[Launch] = []
    form, submit = device.recorder.form, device.backend.submit

    def forming(op: Any, *rest: Any) -> Any:
        ops.add(op.name)
        return form(op, *rest)

    def submitting(work: Submission) -> Any:
        for slot, data in work.uploads:
            device.backend.write(work.slots[slot], data)
        for bound in work.launches:
            natives = [work.slots[s].native for s in bound.slots]
            words = [n.copy() for n in natives]
            params = np.frombuffer(bound.parameters, np.uint32)[1:]
            launch = Launch(bound.pipeline, words, params, bound.groups, bound.views)
            submit(Submission(work.slots, [], [bound]))
            launch.after = [n.copy() for n in natives]
            launches.append(launch)
            ops.add(launch.ir.name)  # a fused chain is made by the planner
        return submit(Submission(work.slots, reads=work.reads))

    spied: Any = device
    spied.recorder.form, spied.backend.submit = forming, submitting
    try:
        result = case.build(Inputs(device, case.dtype)).numpy()
        ops |= {node.op.name for node in device.last_plan.nodes}
    except LimitError as error:
        raise Unfit(str(error)) from error
    finally:
        device.close()
    expected = case.build(Inputs(ct.device("cpu"), case.dtype)).numpy()
    return Seen(ops, launches, result, expected)


def seen(case: Case) -> Seen:
    """What a case did; skipped where its variant does not fit the minimum."""
    try:
        return run(case)
    except Unfit as error:
        assert not case.roomy and case.name.split()[0] in ("large", "medium"), str(error)
        pytest.skip(f"needs more than the minimum: {error}")


def kernels(cases: list[Case]) -> dict[str, KernelIR]:
    """Every distinct kernel of cases, by its name and digest."""
    by_digest: dict[str, KernelIR] = {}
    for case in cases:
        try:
            for launch in run(case).launches:
                by_digest.setdefault(launch.ir.digest, launch.ir)
        except Unfit:
            continue
    return {f"{ir.name} {digest[:8]}": ir for digest, ir in by_digest.items()}


def portable(cases: list[Case]) -> dict[str, KernelIR]:
    """Those that run on every target."""
    every = kernels(cases)
    by_name = {name: ir for name, ir in every.items() if not ir.ptx_only}
    assert {ir.name for ir in every.values()} - {ir.name for ir in by_name.values()} == {"mma"}
    return by_name


EVERY = pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.sweep] * (c not in FIRST), id=str(c)) for c in CASES],
)
ALL = pytest.mark.parametrize(
    "cases",
    [pytest.param(FIRST, id="f32 first"), pytest.param(CASES, marks=pytest.mark.sweep, id="all")],
)


def test_every_op_has_a_case() -> None:
    recorded = set[str]()
    for case in FIRST:
        try:
            done = run(case)
        except Unfit:
            continue
        assert case.op in done.ops and done.launches, case
        recorded |= done.ops
    assert {n for n in registry() if not n.startswith("kernel:")} <= recorded


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_the_ops_that_it_loads_for(module: str) -> None:
    ops = {op.name for op in vars(import_module(module)).values() if isinstance(op, Op)}
    assert set(MODULES[module].split()) <= ops


def test_every_op_is_in_the_table_of_modules() -> None:
    listed = [name for names in MODULES.values() for name in names.split()]
    known = {name for name in registry() if not name.startswith("kernel:")}
    assert sorted([*listed, *EXPRESSIONS]) == sorted(known)


def test_an_unknown_op_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no_such_op"):
        get("no_such_op")


@EVERY
def test_results_are_right(case: Case) -> None:
    done = seen(case)
    near = TOLERANCE.get(case.dtype, 0.0)
    np.testing.assert_allclose(done.result, done.expected, rtol=near, atol=near)


def check_orders(case: Case, orders: Sequence[str]) -> None:
    for launch in seen(case).launches:
        for order in orders:
            for words, right in zip(launch.run(order=order), launch.after, strict=True):
                np.testing.assert_array_equal(words, right)


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_order_gives_the_same(case: Case) -> None:
    check_orders(case, ORDERS[1:])  # it has run forward


@EVERY
def test_an_order_and_every_subgroup_give_the_same(case: Case) -> None:
    """The test above has all orders."""
    check_orders(case, [ORDERS[1 + CASES.index(case) % 2]])
    for launch in seen(case).launches:
        if launch.ir.uses_subgroups:
            for subgroup in (1, 8, 64):
                assert launch.agrees(launch.run(subgroup=subgroup), 1e-3)
        if launch.ir.first(frozenset({"fma"})):
            assert launch.agrees(launch.run(fused=False), 5e-3)


# -- mistakes --------------------------------------------------------------------------------------

SHIFTS = int(os.environ.get("CENTELLA_SHIFTS", "12"))  # of each kernel; 10 000 tries every access

# Accesses that no result can depend on, and why.
IDLE_CASES = {
    **dict.fromkeys(
        (
            f"{op}-{dtype}"
            for op in ("reduce-long", "fused-reduce long")
            for dtype in ("f32", "f16")
        ),
        "two partial results for 256 threads: most of the tree adds zeros",
    ),
    **dict.fromkeys(
        ("cache_attend-short-f32", "cache_attend-short-f16", "cache_attend-long-f32"),
        "of a softmax any maximum near the largest serves; 40 keys leave most threads without one",
    ),
    **dict.fromkeys(
        ("speech_beams-text-f32", "speech_beams-times-f32"),
        "six rows of few parts: most of the trees of a maximum and of a sum add nothing",
    ),
    "speech_scores-times-f32": "six rows: maxima and sums decide only which kind is likelier",
    "speech_token-two parts-f32": "six rows: most of the trees of a maximum decide nothing",
    **dict.fromkeys(
        ("dot-vectors-f16", "reduce-sum all-f16"),
        "one result fills half a word: the other half is computed and is pad",
    ),
}
# What a line has, why it is idle, and the cases where it is not.
IDLE_LINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "first = Elements(": ("a shift of the whole row: any element of it serves", ()),
    "firsts = [": ("a shift of the whole row: any element of it serves", ()),
    "squares = scratch[": ("every team has the same sum of squares", ()),
    "chosen[n] = last": ("what is kept where rounding leaves no bin", ()),
    "lang.atomic_add(self.bins, ": (
        "one token in the bin beside its own decides only at the threshold",
        (),
    ),
    "chosen[n] = value": ("as the line after the next: sums before the bin", ()),
    "v.set(self._chosen[1 + n])": (
        "a threshold that moves within its bin matters only where a token lies between",
        (),
    ),
    "self.step = lang.bitcast(notes": (
        "the token that was drawn may come, whatever the step says once more",
        ("odd", "each thread", "text", "times"),
    ),
    "count = lang.bitcast(self.counts": (
        "a token's penalty decides only where the token is among the first",
        (),
    ),
    "parts = memory.load(at) if lay.keys == 4": (
        "the step's key stands for all keys of all teams: a shift by a team gives its score too",
        ("window", "bias", "blocks"),
    ),
    "self.weights[self.me * self.lay.keys + j] = weight": (
        "of the step's four keys one counts, and the values of the others are 0",
        ("window", "bias", "blocks"),
    ),
    "chunks = [self._scores.load(": ("of a softmax any maximum near the largest serves", ()),
    "for result in results]": (
        "eight parts are loaded at once: of fewer the last again, which is left out",
        ("split into many",),
    ),
    **dict.fromkeys(
        ("stats[n", "sums[word"),
        ("two or three parts for 8 or 16 teams: the others weigh nothing", ("split into many",)),
    ),
}


def by_kernel(cases: list[Case]) -> dict[str, list[tuple[Case, Launch]]]:
    """The launches of each distinct kernel."""
    launches: dict[str, list[tuple[Case, Launch]]] = {}
    for case in cases:
        try:
            for launch in run(case).launches:
                launches.setdefault(launch.ir.digest, []).append((case, launch))
        except Unfit:
            continue
    return launches


def caught(launches: list[tuple[Case, Launch]], mistake: Mutation, faults_only: bool) -> bool:
    """True when a launch with it faults, or (unless only faults count) gives wrong words."""
    mutant = mistake.of(launches[0][1].ir)
    for _, launch in launches:
        try:
            words = launch.run(mutant)
        except SimulationError:
            return True
        if not faults_only and not launch.agrees(words):
            return True
    return False


def is_idle(launches: list[tuple[Case, Launch]], label: str) -> bool:
    """True for an access that no result depends on."""
    file, _, line = label.rpartition(" at ")[2].rpartition(":")
    text = linecache.getline(file, int(line)) if line.isdigit() else ""
    names = {c.name for c, _ in launches}
    lines = (t in text and not names.intersection(but) for t, (_, but) in IDLE_LINES.items())
    return any(lines) or all(str(c) in IDLE_CASES for c, _ in launches)


Mistakes = list[Mutation]


def tried(cases: list[Case]) -> Iterator[tuple[list[tuple[Case, Launch]], Mistakes, Mistakes]]:
    """For each kernel its launches, all mistakes of a barrier or wait, some of the others."""
    for launches in by_kernel(cases).values():
        every = list(mistakes(launches[0][1].ir))
        gone = [m for m in every if m.label.startswith("no ")]
        moved = [m for m in every if not m.label.startswith("no ")]
        yield launches, gone, moved[:: max(1, len(moved) // SHIFTS)]


def test_mutants_are_many() -> None:
    counts = [(len(gone), len(moved)) for _, gone, moved in tried(FIRST)]
    barriers, shifts = map(sum, zip(*counts, strict=True))
    assert barriers > 300 and shifts > 1000


def missed(launches: list[tuple[Case, Launch]], every: Mistakes, faults_only: bool) -> list[str]:
    """The mistakes that nothing shows."""
    return [
        f"{launches[0][0]}: {mistake.label}"
        for mistake in every
        if not caught(launches, mistake, faults_only)
        and (faults_only or not is_idle(launches, mistake.label))
    ]


def test_removed_barriers_and_shifted_indices_are_caught() -> None:
    """Barriers and some indices of one kernel of each name; the test below has all."""
    names, unseen = set[str](), list[str]()
    for launches, gone, moved in tried(FIRST):
        name = launches[0][1].ir.name
        if name not in names:
            names.add(name)
            unseen += missed(launches, gone, faults_only=True)
            unseen += missed(launches, moved[::8], faults_only=False)
    assert not unseen, "\n".join(unseen)


PARTS = 4  # so that processes can share them


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_mistakes_in_every_kernel_are_caught(part: int) -> None:
    unseen = list[str]()
    for launches, gone, moved in itertools.islice(tried(CASES), part, None, PARTS):
        unseen += missed(launches, gone, faults_only=True)
        unseen += missed(launches, moved, faults_only=False)
    assert not unseen, "\n".join(unseen)


# -- text ------------------------------------------------------------------------------------------


@ALL
def test_statements_are_few(cases: list[Case]) -> None:
    """naga's time grows with the square of their number."""
    counts = {name: count_statements(ir) for name, ir in portable(cases).items()}
    assert max(counts.values()) <= MOST_STATEMENTS, max(counts, key=lambda n: counts[n])


@ALL
def test_every_op_keeps_to_the_minimum(cases: list[Case]) -> None:
    """With WebGPU's guaranteed limits each op has a kernel."""
    fitting = set[str]()
    for case in cases:
        if case.roomy:
            continue
        try:
            done = run(case)
        except Unfit:
            continue
        fitting |= done.ops
        for launch in done.launches:
            ir = launch.ir
            assert ir.shared_bytes <= MINIMUM.max_shared, case
            assert len(ir.args) <= MINIMUM.max_storage_buffers, case
            assert ir.workgroup <= MINIMUM.max_workgroup, case
            assert not ir.uses_subgroups, case
    assert {n for n in registry() if not n.startswith("kernel:")} <= fitting


@ALL
def test_naga_accepts_every_kernel(cases: list[Case]) -> None:
    device = webgpu()
    for ir in portable(cases).values():
        device.create_shader_module(code=emit_wgsl(ir))


@ALL
def test_tint_accepts_every_kernel(cases: list[Case]) -> None:
    by_name = portable(cases)
    faults = tint([emit_wgsl(ir) for ir in by_name.values()])
    assert {n: f for n, f in zip(by_name, faults, strict=True) if f} == {}


@ALL
def test_ptxas_accepts_every_kernel(cases: list[Case], tmp_path: Path) -> None:
    """A file has many: ptxas takes longer to start than to assemble one."""
    every, parts = list(kernels(cases).values()), list[str]()
    for first in range(0, len(every), 32):
        texts = dict[str, str]()  # by what stands before the first kernel
        for number, ir in enumerate(every[first : first + 32]):
            head, comment, kernel = emit_ptx(ir, "sm_80").partition("//")
            kernel = comment + kernel.replace(f".entry {ir.name}(", f".entry {ir.name}_{number}(")
            texts[head] = texts.get(head, head) + kernel
        parts += texts.values()
    sources = [tmp_path / f"{number}.ptx" for number in range(len(parts))]
    ptxas("--version")  # it is skipped here where there is none
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(assembled, parts, repeat(("-arch=sm_80", "-O1")), sources))


# -- accumulation and masks ------------------------------------------------------------------------


def test_statistics_are_f32_whatever_the_storage() -> None:
    """2 049 ones have no sum in f16; 257 none in bf16."""
    for dtype, n, exact in (("f16", 4000, 4000), ("bf16", 512, 512)):
        i = Inputs(ct.device("simulator"), dtype)
        ones = i.of(np.ones((2, n), np.float32), dtype)
        assert F.sum(ones, -1).astype("f32").numpy().tolist() == [exact] * 2
        assert F.mean(ones, -1).astype("f32").numpy().tolist() == [1.0] * 2
        assert F.matmul(ones, ones.T).astype("f32").numpy().tolist() == [[exact] * 2] * 2
        softened = F.softmax(ones).astype("f32").numpy()
        np.testing.assert_allclose(softened, 1 / n, rtol=2e-2)
        same = F.rms_norm(ones).astype("f32").numpy()
        np.testing.assert_allclose(same, 1, rtol=2e-2)


def test_masks_are_finite() -> None:
    """Infinities appear where a NaN may be right (the maximum of a row), never as a mask."""
    names = set()
    for ir in kernels(FIRST).values():
        if ir.name.startswith("attention") or ir.name == "softmax_rows":
            numbers = np.array([s[3] for s in ir.body if s[:2] == ("const", "f32")], np.float32)
            assert np.isfinite(numbers).all() and numbers.min() <= -3.0e38
            names.add(ir.name)
    assert len(names) == 5
