"""Every kernel that the library ships: simulated in all orders, broken, parsed and assembled.

Ops run at small shapes on a simulator device, as users call them; what it launches is kept, with
the words before and after. Memory is poisoned, pads too. An op without a case fails the first test.
"""

from __future__ import annotations

import itertools
import linecache
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

import centella as ct
from centella.backends.base import Submission
from centella.emit.ptx import emit_ptx
from centella.emit.wgsl import count_statements, emit_wgsl
from centella.errors import LimitError, SimulationError
from centella.lang import KernelIR
from centella.op.op import get, registry
from centella.ops.elementwise import BOOLS, EXPRESSIONS, Expression
from centella.simulator.run import Mutation, mistakes, simulate
from centella.specs import Caps, Spec
from centella.tensors import functional as F  # noqa: N812  # as users of PyTorch spell it
from centella.tensors.tensor import apply, apply_all
from tests.support.lang_common import ORDERS, Tensor, assembler, tint, webgpu

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
        found = []
        for arg, (spec, offset), raw in zip(self.ir.args, self.views, words, strict=True):
            if arg.writable and spec.size:
                found.append(Tensor(raw, spec.dtype, spec.shape, spec.strides, offset).numpy())
        return found

    def agrees(self, words: list[Words], near: float = 0.0) -> bool:
        """True where every element of the outputs is what it was."""
        pairs = zip(self.outputs(words), self.outputs(self.after), strict=True)
        with np.errstate(all="ignore"):
            return all(np.allclose(a, b, near, near, equal_nan=True) for a, b in pairs)


def operands_of(i: Inputs, e: Expression) -> list[ct.Tensor]:
    """Rows that an expression takes, the last of two repeated along them; bools for conditions."""
    shapes = [(3, 70), (70,)] if len(e.operands) == 2 else [(3, 70)] * len(e.operands)
    bools = e.conditions if "float" in e.kinds else len(e.operands) * (e.kinds == BOOLS)
    made = [i.bools(*shape) for shape in shapes[:bools]]
    for shape in shapes[bools:]:
        if e.compares or i.dtype in ("i32", "u32", "i8"):
            made.append(i.ints(*shape, low=0, high=5))
        else:
            made.append(i(*shape, low=0.1 if e.domain == "positive" and not made else -2.0))
    return made


def elementwise() -> list[Case]:
    """Each expression in f32 and f16, or integers or bools; layouts and dtypes on a few."""
    cases = []
    for e in EXPRESSIONS.values():
        example = {"low": -1.0, "high": 0.5} if e.name == "clip" else e.example
        dtypes = {"float": ("f32", "f16"), "int": ("i32", "u32", "i8"), "bool": ("bool",)}
        cases += [
            Case(
                e.name, "rows", lambda i, e=e, a=example: apply(e.name, *operands_of(i, e), **a), d
            )
            for d in dtypes[e.kinds[0]]
        ]
    builds: dict[tuple[str, str], tuple[Build, str]] = {
        ("gelu", "tanh"): (lambda i: F.gelu(i(3, 70), "tanh"), "f32 f16"),
        ("gelu", "quick"): (lambda i: F.gelu(i(3, 70), "quick"), "f32 f16"),
        ("copy", "turned"): (lambda i: i(5, 7).permute(1, 0).contiguous(), "f32 f16"),
        ("silu_gate", "packed"): (lambda i: F.silu_gate(*F.split(i(3, 80), 40, -1)), "f32 f16"),
        ("maximum", "number"): (lambda i: F.maximum(i(3, 70), 0.3), "f32 f16"),
        ("mul", "column"): (lambda i: F.mul(i(3, 70), i(3, 1)), "f32 f16"),
        ("add", "vector"): (lambda i: F.add(i(1030), i(1030)), "f32 f16 bf16"),
        ("add", "strided"): (lambda i: F.add(i(6, 5).permute(1, 0), i(5, 6)), "f32 f16 bf16"),
        ("add", "sliced"): (lambda i: F.add(i(4, 9)[:, 1:8], i(7)), "f32 f16 bf16"),
        ("add", "batched"): (lambda i: F.add(i(2, 3, 4, 10), i(3, 1, 10)), "f32 f16 bf16"),
        ("add", "number"): (lambda i: F.add(i(3, 5), 2.5), "f32 f16 bf16"),
        ("add", "integers"): (lambda i: F.add(i.ints(3, 70, low=0), i.ints(3, 70, low=0)),
                              "i32 u32 i8"),
        ("maximum", "integers"): (lambda i: F.maximum(i.ints(3, 70, low=0), i.ints(70, low=0)),
                                  "i32 u32 i8"),
        ("sign", "integers"): (lambda i: F.sign(i.ints(3, 70, low=0, high=3)), "i32 u32 i8"),
        ("sign", "signed"): (lambda i: F.sign(i.ints(3, 70)), "i32 i8"),
        ("floor_divide", "signed"): (
            lambda i: F.floor_divide(i.ints(3, 70), i.ints(3, 70, low=-5, high=5)), "i32 i8"),
        ("remainder", "signed"): (
            lambda i: F.remainder(i.ints(3, 70), i.ints(70, low=-5, high=5)), "i32 i8"),
        ("lt", "integers"): (lambda i: F.lt(i.ints(3, 70, low=0), 20), "i32 u32 i8"),
        ("eq", "bools"): (lambda i: F.eq(i.bools(3, 70), i.bools(70)), "bool"),
    }  # fmt: skip  # a table
    cases += [Case(op, n, b, d) for (op, n), (b, ds) in builds.items() for d in ds.split()]
    return cases


def three_columns(i: Inputs) -> ct.Tensor:
    """Three operands beside one another, none of whole words."""
    return F.concat([i.ints(3, 5), i.ints(3, 6), i.ints(3, 7)], 1)


def added(i: Inputs) -> ct.Tensor:
    """A product with a residual and nothing else."""
    return F.linear(i(33, 35), i(36, 35), residual=i(33, 36))


def moving() -> list[Case]:
    """Casts between sizes and kinds, reshapes that move, copies."""
    cases = []
    pairs = [("f32", "f16"), ("f16", "f32"), ("f32", "bf16"), ("f32", "i32"), ("i32", "f32"),
             ("f32", "i8"), ("i8", "f16"), ("u8", "f32"), ("f16", "u8"), ("f32", "bool"),
             ("i32", "u32")]  # fmt: skip
    for source, target in pairs:

        def build(i: Inputs, target: str = target) -> ct.Tensor:
            return F.cast(i.ints(3, 21, low=0, high=2 if target == "bool" else 50), target)

        cases.append(Case("cast", f"to {target}", build, source))
    for dtype in ("f32", "f16", "i8"):
        cases.append(Case("reshape", "rows", lambda i: i.ints(6, 5).reshape(5, 6), dtype))
        cases.append(Case("reshape", "vector", lambda i: i.ints(3, 2, 7).reshape(-1), dtype))
        cases.append(
            Case("concat", "rows", lambda i: F.concat([i.ints(2, 5), i.ints(3, 5)]), dtype)
        )
        cases.append(Case("concat", "columns", three_columns, dtype))
        cases.append(Case("fill", "rows", lambda i: F.full((3, 5), 2, i.dtype, i.device), dtype))
    return cases


def rows() -> list[Case]:
    """Reductions, softmax, normalisation, pooling, embedding: what walks rows."""
    build: dict[tuple[str, str], Build] = {
        ("reduce", "sum"): lambda i: F.sum(i(6, 257 * i.chunk), -1),
        ("reduce", "sum sliced"): lambda i: F.sum(i(6, 300)[:, 1:], -1),
        ("reduce", "sum all"): lambda i: F.sum(i(50, 77)),
        ("reduce", "sum first"): lambda i: F.sum(i(530, 3), 0),
        ("reduce", "mean"): lambda i: F.mean(i(5, 77), -1),
        ("reduce", "max"): lambda i: F.max(i.peaks(257 * i.chunk, i.chunk), -1),
        ("reduce", "min"): lambda i: F.min(F.neg(i.peaks(257 * i.chunk, i.chunk)), -1),
        ("reduce", "long"): lambda i: F.sum(i(2, 16500), -1),
        ("argmax", "rows"): lambda i: F.argmax(i.peaks(257 * i.chunk, i.chunk), -1),
        ("argmax", "sliced"): lambda i: F.argmax(i.peaks(260, 1, 1), -1),
        ("dot", "vectors"): lambda i: F.dot(i(260 * i.chunk), i(260 * i.chunk)),
        ("softmax", "rows"): lambda i: F.softmax(i.peaks(257 * i.chunk, i.chunk)),
        ("softmax", "short"): lambda i: F.softmax(i.peaks(64 * i.chunk - 3, i.chunk)),
        ("softmax", "log"): lambda i: F.log_softmax(i.peaks(64 * i.chunk - 3, i.chunk)),
        ("softmax", "sliced"): lambda i: F.softmax(i.peaks(127, 4 // i.chunk or 2, 1)),
        ("softmax", "first"): lambda i: F.softmax(i(5, 6), 0),
        ("norm", "layer"): lambda i: F.layer_norm(i(3, 300), i(300), i(300)),
        ("norm", "layer odd"): lambda i: F.layer_norm(i(3, 511), i(511), i(511)),
        ("norm", "layer bare"): lambda i: F.layer_norm(i(3, 511)),
        ("norm", "rms"): lambda i: F.rms_norm(i(3, 511), i(511)),
        ("norm", "l2"): lambda i: F.l2_normalize(i(3, 511)),
        ("norm", "sliced"): lambda i: F.layer_norm(i(3, 131)[:, 1:], i(130), i(130)),
        ("mean_pool", "rows"): lambda i: F.mean_pool(i(3, 6, 40), i.of([4, 6, 0])),
        ("mean_pool", "odd"): lambda i: F.mean_pool(i(3, 5, 7), i.of([4, 5, 2])),
        ("embedding", "rows"): lambda i: F.embedding(i.of([[3, 0, 5], [9, 2, -1]]), i(9, 40)),
        ("embedding", "odd"): lambda i: F.embedding(i.of([3, 0, 5, 8]), i(9, 7)),
    }  # fmt: skip  # a table
    cases = [Case(op, n, b, d) for (op, n), b in build.items() for d in ("f32", "f16")]
    cases.append(Case("softmax", "short", build["softmax", "short"], "bf16"))
    cases += [Case(op, n, build[op, n], "i32") for op, n in (("reduce", "max"), ("argmax", "rows"))]
    cases.append(Case("reduce", "sum integers", lambda i: F.sum(i.ints(6, 1030), -1), "i32"))
    return cases


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh")


def products() -> list[Case]:
    """Each tile in each layout, depth and storage type; the epilogues."""
    cases = []
    for variant, (m, n) in {"small": (37, 41), "medium": (70, 67), "large": (130, 133)}.items():
        layouts: dict[str, Build] = {
            "nn": lambda i, v=variant, m=m, n=n: F.matmul(i(m, 40), i(40, n), variant=v),
            "nt": lambda i, v=variant, m=m, n=n: F.matmul(i(m, 35), i(n, 35).T, variant=v),
            "tn": lambda i, v=variant, m=m, n=n: F.matmul(i(35, m).T, i(35, n), alpha=0.5,
                                                           variant=v),
            "tt": lambda i, v=variant, m=m, n=n: F.matmul(i(32, m).T, i(n, 32).T, variant=v),
        }  # fmt: skip
        for name, build in layouts.items():
            for dtype in ("f32", "f16"):
                for roomy in (False, True):
                    cases.append(Case("matmul", f"{variant} {name}", build, dtype, roomy))

        def linear(i: Inputs, v: str = variant, m: int = m, n: int = n) -> ct.Tensor:
            return F.linear(i(m, 35), i(n, 35), i(n), activation="gelu", residual=i(m, n),
                             variant=v)  # fmt: skip

        cases += [Case("linear", variant, linear, d) for d in ("f32", "f16")]
    for name in ACTIVATIONS:
        cases.append(Case("linear", name, lambda i, a=name: F.linear(i(37, 35), i(41, 35), i(41),
                                                                      activation=a)))  # fmt: skip
    for dtype in ("f32", "f16", "bf16"):
        cases.append(
            Case("matmul", "batched", lambda i: F.matmul(i(2, 33, 35), i(2, 35, 36)), dtype)
        )
        cases.append(
            Case("matmul", "sliced", lambda i: F.matmul(i(33, 40)[:, 1:36], i(35, 41)), dtype)
        )
        cases.append(Case("linear", "residual", added, dtype))
    return cases


def thin_products() -> list[Case]:
    """Few rows: each number held, short and long depths, layouts, storage types, epilogues."""

    def case(name: str, build: Build, *dtypes: str, op: str = "linear") -> list[Case]:
        return [Case(op, name, build, d) for d in dtypes or ("f32", "f16")]

    def quantised(m: int, n: int, k: int) -> Build:
        def build(i: Inputs) -> ct.Tensor:
            i.seed += 1
            stored = np.random.default_rng(i.seed).integers(-127, 128, (n, k))
            scale = i.of(np.linspace(1, 2, n) / 127, "f32")
            return F.linear(i(m, k), i.of(stored, "i8"), i(n), scale=scale, residual=i(m, n))

        return build

    def steps(i: Inputs, many: int, more: int = 0) -> int:
        return many * i.chunk + more

    def plain(m: int, many: int, more: int) -> Build:
        return lambda i: F.linear(i(m, steps(i, many, more)), i(9, steps(i, many, more)), i(9))

    def in_blocks(m: int, n: int, k: int, four: bool) -> Build:
        def build(i: Inputs) -> ct.Tensor:
            i.seed += 1
            rng = np.random.default_rng(i.seed)
            stored = (
                i.of(rng.integers(0, 256, (n, k // 2)), "u8")
                if four
                else i.of(rng.integers(-127, 128, (n, k)), "i8")
            )
            return F.linear(i(m, k), stored, i(n), scale=i(n, k // 32, low=0.0, high=0.02),
                             residual=i(m, n))  # fmt: skip

        return build

    cases = []
    for four in (False, True):
        for m, k in ((1, 4224), (2, 2112), (4, 1184), (16, 1120)):
            cases += case(f"blocks {m} {four}", in_blocks(m, 9, k, four), op="linear_blocks")
        cases += case(
            f"whole {four}",
            lambda i, four=four: F.dequantize(
                i.of(np.arange(12 * 64).reshape(12, 64) % 99, "u8" if four else "i8"),
                i(12, 4 if four else 2),
                i.dtype,
            ),
            op="dequantize",
        )
    for m in (1, 2, 4, 8, 16):  # all threads of a team have work, in each way to walk k
        for name, many, more in (("masked", 8, -1), ("both", 33, 1), ("whole", 64, 0)):
            if name == "both" and m == 1:
                many = 130
            cases += case(f"thin {m} {name}", plain(m, many, more))
        cases += case(f"int8 {m}", quantised(m, 18, 16 * 35 + 3))
    for m in (3, 4):  # one kernel: of three rows, the fourth that it reads is dropped
        cases += case(f"thin {m}", lambda i, m=m: F.linear(i(m, 67), i(9, 67)))
    cases += case("gemv long", plain(1, 530, 3))
    cases += case("gemv bf16", lambda i: F.linear(i(1, 2048), i(5, 2048)), "bf16")
    cases += case("int8 tile", quantised(18, 35, 33))
    cases += case("int8 medium", lambda i: F.linear(
        i(70, 35), i.of(np.arange(67 * 35).reshape(67, 35) % 99, "i8"), scale=i(67),
        variant="medium"))  # fmt: skip
    cases += case(
        "thin sliced",
        lambda i: F.linear(i(4, steps(i, 34))[:, 1:], i(9, steps(i, 34, 1))[:, 2:]),
    )
    products: dict[str, Build] = {
        "thin batched": lambda i: F.matmul(i(2, 4, 300), i(2, 6, 300).permute(0, 2, 1)),
        "thin turned": lambda i: F.matmul(
            i(steps(i, 34, -1), 4).T, i(9, steps(i, 34, -1)).T, alpha=0.5
        ),
        "columns 1": lambda i: F.matmul(i(1, 67), i(67, 133)),
        "columns 4": lambda i: F.matmul(i(2, 4, 64), i(2, 64, 30), alpha=0.5),
        "columns 16": lambda i: F.matmul(i(16, 69), i(69, 35)),
        "columns split": lambda i: F.matmul(i(2, 600), i(600, 29), alpha=0.5),
        "columns sliced": lambda i: F.matmul(i(80, 4)[1:].T, i(79, 42)[:, 1:]),
    }
    for name, build in products.items():
        cases += case(name, build, op="matmul")
    return cases


def many_parts(i: Inputs) -> ct.Tensor:
    """128 parts of 64 keys: maxima in the parts that a tree reads last; then all parts matter."""
    i.seed += 1
    k, v = np.random.default_rng(i.seed).uniform(-1, 1, (2, 1, 1, 8192, 8))
    for n in range(8):
        k[..., (1 << n) // 2 * 64 + 5, n] = 300
    q = np.stack([np.eye(8), np.linspace(-0.01, 0.01, 64).reshape(8, 8)], 1)[None]
    operands = (i.of(x.astype(np.float32), i.dtype) for x in (q, k, v))
    return F.attention(*operands, scale=1.0, variant="split")


def attentions() -> list[Case]:
    """Each mask, head sizes on both sides of a tile, grouped queries."""

    def case(name: str, h: int, kv: int, lq: int, lk: int, d: int, dtypes: Any = ("f32", "f16"),
             **more: Any) -> list[Case]:  # fmt: skip
        def build(i: Inputs) -> ct.Tensor:
            q, k, v = i(2, h, lq, d), i(2, kv, lk, d), i(2, kv, lk, d)
            given = {n: f(i) if callable(f) else f for n, f in more.items()}
            return F.attention(q, k, v, **given)

        return [Case("attention", name, build, t) for t in dtypes]

    keys = np.random.default_rng(3).random((2, 21)) < 0.6
    return [
        *case("plain", 2, 2, 5, 21, 16),
        *case("causal", 2, 2, 19, 21, 16, causal=True),
        *case("lengths", 2, 2, 5, 21, 16, lengths=lambda i: i.of([13, 20])),
        *case("key_mask", 2, 2, 5, 21, 16, key_mask=lambda i: i.of(keys, "bool")),
        *case("mask", 2, 2, 5, 21, 16, mask=lambda i: i(2, 1, 5, 21)),
        *case("all", 2, 1, 7, 21, 8, causal=True, lengths=lambda i: i.of([13, 21]),
              key_mask=lambda i: i.of(keys, "bool"), mask=lambda i: i(1, 2, 1, 21)),
        *case("grouped", 4, 2, 3, 18, 16),
        *case("odd head", 1, 1, 3, 18, 13),
        *case("head 64", 1, 1, 3, 18, 64, ("f32",)),
        *case("head 80", 1, 1, 3, 18, 80, ("f16",)),
        *case("head 160", 1, 1, 3, 9, 160, ("f32",)),
        *case("two queries a thread", 1, 1, 70, 17, 8, ("f32",)),
        *case("starts", 2, 1, 5, 21, 16, ("f32",), starts=lambda i: i.of([-2, 17])),
        *case("tiled", 2, 1, 37, 41, 16, variant="tiled", lengths=lambda i: i.of([34, 41])),
        *case("tiled, causal", 1, 1, 35, 44, 60, ("f32",), variant="tiled", causal=True),
        *case("tiled, odd head", 2, 2, 9, 40, 13, variant="tiled", starts=lambda i: i.of([-2, 30])),
        *case("tiled, all", 2, 1, 9, 40, 8, variant="tiled", starts=lambda i: i.of([25, 33]),
              lengths=lambda i: i.of([26, 40]), mask=lambda i: i(2, 1, 9, 40),
              key_mask=lambda i: i.of(np.arange(80).reshape(2, 40) % 3 > 0, "bool")),
        *case("split", 2, 2, 1, 150, 128, variant="split"),
        *(Case("attention", "split into many", many_parts, t) for t in ("f32", "f16")),
        *case("split of lengths", 2, 2, 1, 192, 128, variant="split",
              lengths=lambda i: i.of([190, 1])),
        *case("split of causal", 4, 2, 2, 128, 128, ("f32",), variant="split", causal=True),
        *case("split, all", 8, 2, 2, 130, 13, variant="split", starts=lambda i: i.of([125, 60]),
              lengths=lambda i: i.of([126, 140]), mask=lambda i: i(2, 1, 2, 130),
              key_mask=lambda i: i.of(np.arange(260).reshape(2, 130) % 3 > 0, "bool")),
    ]  # fmt: skip


def picks(count: int) -> NDArray[np.int64]:
    """Indices of 33 rows, some equal, one from the end, one outside."""
    return np.append(np.random.default_rng(5).integers(0, 33, count - 2), [-1, -34])


def by_index() -> list[Case]:
    """arange, gather, scatter: chunks, words, indices along the last axis."""
    cases = [
        Case("arange", "down", lambda i: F.arange(90, 3, -2, i.dtype, i.device), d)
        for d in ("f32", "f16", "i32", "u32", "u8")
    ]
    build: dict[tuple[str, str], Build] = {
        ("gather", "rows"): lambda i: F.gather(i.ints(9, 80, low=0), i.of([[3, 0, 5], [8, 9, -1]])),
        ("gather", "odd"): lambda i: F.gather(i.ints(9, 7, low=0), i.of([3, 0, 5, 8])),
        ("gather", "middle"): lambda i: F.gather(i.ints(2, 9, 16, low=0), i.of([8, 0, 5]), 1),
        ("gather", "columns"): lambda i: F.gather(i.ints(3, 33, low=0), i.of(picks(21)), 1),
        ("scatter", "rows"): lambda i: F.scatter(i.ints(9, 80, low=0), i.of([3, 8, 3, -1]),
                                                 i.ints(4, 80, low=0)),
        ("scatter", "odd"): lambda i: F.scatter(i.ints(9, 7, low=0), i.of([3, 0, 3]),
                                                i.ints(3, 7, low=0)),
        ("scatter", "elements"): lambda i: F.scatter(i.ints(33, low=0), i.of(picks(21)),
                                                     i.ints(21, low=0)),
    }  # fmt: skip  # a table
    cases += [Case(op, n, b, d) for (op, n), b in build.items() for d in ("f32", "f16", "i8")]
    return cases


def ropes() -> list[Case]:
    """Both pairings; chunks and words; columns that pass; each kind of positions."""

    def case(name: str, dim: int, rotary: int, positions: Any = None, **more: Any) -> list[Case]:
        def build(i: Inputs) -> ct.Tensor:
            cos, sin = (i.of(t, "f32") for t in ct.rope_tables(dim, 31, rotary_dim=rotary))
            at = None if positions is None else i.of(positions)
            x = i(2, 5, 3, dim).permute(0, 2, 1, 3)
            return F.rope(x, cos, sin, at, **more)

        return [Case("rope", name, build, t) for t in ("f32", "f16")]

    each = [[3, 1, 30, 7, 2], [0, 29, 4, 11, 31]]
    return [
        *case("halves", 32, 32),
        *case("halves, first", 32, 32, [3, 20]),
        *case("halves, each", 32, 16, each),
        *case("halves, odd", 14, 10, [30, 2]),
        *case("neighbours", 32, 32, interleaved=True),
        *case("neighbours, each", 32, 16, each, interleaved=True),
        *case("neighbours, odd", 13, 10, [30, 2], interleaved=True),
    ]


def convolutions() -> list[Case]:
    """Channels first and last, narrow and wide; each with its copies."""

    def case(name: str, channels: int, last: bool, **more: Any) -> list[Case]:
        def build(i: Inputs) -> ct.Tensor:
            shape = (2, 39, channels) if last else (2, channels, 39)
            x, weight, bias = i(*shape), i(37, channels, 3), i(37)
            x = x.permute(0, 2, 1) if last else x
            return F.conv1d(x, weight, bias, **more)

        return [Case("conv1d", name, build, t) for t in ("f32", "f16")]

    return [
        *case("first", 7, False, padding=1, activation="gelu"),
        *case("last", 16, True, stride=2, padding=1),
        *case("no copy of x", 16, True),
    ]


def states() -> list[Case]:
    """What changes in place: whole, and where a position on the device says."""

    def assigned(state: tuple[int, ...], x: tuple[int, ...]) -> Build:
        def build(i: Inputs) -> ct.Tensor:
            made = ct.State(i.ints(*state, low=0))
            made.assign(i.ints(*x, low=0))
            return made.value

        return build

    def written(dim: int, last: bool) -> Build:
        def build(i: Inputs) -> ct.Tensor:
            caches = [ct.State(i(2, 3, 7, dim)) for _ in "kv"]
            new = [i(2, 4, 3, dim).permute(0, 2, 1, 3) for _ in "kv"]
            starts = i.of([2, 5] if last else [0, 3])
            apply_all(get("cache_write"), (*(c.value for c in caches), *new, starts), {})
            return F.stack([c.value for c in caches])

        return build

    def rotated(dim: int, norm: bool, interleaved: bool) -> Build:
        def build(i: Inputs) -> ct.Tensor:
            caches = [ct.State(i(2, 2, 7, dim)) for _ in "kv"]
            x, norms = i(2, 3, 6, dim).permute(0, 2, 1, 3), (i(2, dim),) if norm else ()
            angles = np.arange(9 * (dim // 2), dtype=np.float32).reshape(9, -1)
            tables = [i.of(f(angles), "f32") for f in (np.cos, np.sin)]
            given = (*(c.value for c in caches), x, *tables, i.of([2, 5]), *norms)
            attrs = {"interleaved": interleaved, "eps": 1e-6}
            *_, q = apply_all(get("rope_cache_write"), given, attrs)
            return F.concat([q, *(c.value for c in caches)], 2)

        return build

    def stepped(lengths: bool) -> Build:
        def build(i: Inputs) -> ct.Tensor:
            steps = ct.State(i.ints(2, 70, low=0))
            more = (i.ints(70, low=0),) if lengths else ()
            apply_all(get("cache_step"), (steps.value, *more), {"tokens": 3})
            return steps.value

        return build

    shapes = {"rows": ((5, 80), (5, 80)), "a row": ((5, 7), (7,)), "a column": ((5, 16), (5, 1))}
    cases = [Case("assign", n, assigned(*s), d) for n, s in shapes.items()
             for d in ("f32", "f16", "i8")]  # fmt: skip
    cases += [Case("cache_write", f"{dim}{', past the end' * last}", written(dim, last), d)
              for dim in (16, 7) for last in (False, True) for d in ("f32", "f16")]  # fmt: skip
    cases += [Case("rope_cache_write", f"{dim}{', norm' * norm}{', pairs' * pairs}",
                   rotated(dim, norm, pairs), d)
              for dim, norm, pairs in ((16, False, False), (16, True, True), (7, True, False))
              for d in ("f32", "f16")]  # fmt: skip
    return cases + [Case("cache_step", n, stepped(n == "set"), "i32") for n in ("begin", "set")]


def chains() -> list[Case]:
    """Fused chains: chunks, words, a comparison, numbers of several types."""

    def chain(x: ct.Tensor, w: ct.Tensor) -> ct.Tensor:
        return F.where(F.gelu(x * w) < 0.4, x + 1.5, -2.0)

    def whole(i: Inputs) -> ct.Tensor:
        x = i.ints(3, 70)
        return F.where((x * 5 + 3) % 7 > x, x, 4)

    cases = [Case("fused", "rows", lambda i: chain(i(3, 80), i(3, 80)), d) for d in ("f32", "f16")]
    cases += [Case("fused", "odd", lambda i: chain(i(3, 7), i(7)), d) for d in ("f32", "bf16")]
    return cases + [Case("fused", "integers", whole, d) for d in ("i32", "i8")]


def added_rows(i: Inputs, *shape: int) -> ct.Tensor:
    """Rows, and what repeats along all but the last two and the last dimension, added."""
    return i(*shape) + i(shape[-1]) + i(*shape[1:])


def around_rows() -> list[Case]:
    """Element-wise ops as one kernel, alone and around a norm or a reduction."""
    build: dict[str, Build] = {
        "chain": lambda i: F.gelu(i(3, 75) * 0.5 + i(75)) - i(3, 1),
        "norm": lambda i: F.layer_norm(added_rows(i, 3, 4, 300), i(300), i(300)) * i(3, 4, 1),
        "norm odd": lambda i: F.rms_norm(i(3, 140)[:, 1:] * i(3, 1), i(139)) + i(3, 139),
        "reduce": lambda i: F.mean(added_rows(i, 2, 3, 257 * i.chunk), -1) * 0.5 + i(2, 3),
        "reduce odd": lambda i: F.sum(i(6, 266 * i.chunk)[:, 1:] * i(6, 1), -1) + i(6),
        "reduce long": lambda i: F.sum(i(2, 16500) * 0.25, -1) + i(2),
    }
    return [Case("fused", n, b, d) for n, b in build.items() for d in ("f32", "f16")]


def tensor_cores() -> list[Case]:
    """Products on tensor cores: both ways an operand lies, past the ring, off 16 bytes."""
    build: dict[str, Build] = {
        "rows": lambda i: F.linear(i(35, 100), i(70, 100), i(70), residual=i(35, 70),
                                   activation="silu", variant="mma"),
        "across": lambda i: F.matmul(i(72, 35).T, i(72, 37), alpha=0.5, variant="mma"),
        "odd": lambda i: F.matmul(i(2, 40, 70)[:, :, 1:], i(3, 70, 50)[1:, :69, 1:],
                                  variant="mma"),
    }  # fmt: skip
    return [Case("linear" if n == "rows" else "matmul", f"mma {n}", b, d)
            for n, b in build.items() for d in ("f16", "bf16")]  # fmt: skip


CASES = [*elementwise(), *moving(), *rows(), *products(), *thin_products(), *tensor_cores(),
         *attentions(),
         *by_index(), *ropes(), *convolutions(), *states(), *chains(),
         *around_rows()]  # fmt: skip


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


def kernels() -> dict[str, KernelIR]:
    """Every distinct kernel, by its name and digest."""
    found: dict[str, KernelIR] = {}
    for case in CASES:
        try:
            for launch in run(case).launches:
                found.setdefault(launch.ir.digest, launch.ir)
        except Unfit:
            continue
    return {f"{ir.name} {digest[:8]}": ir for digest, ir in found.items()}


def portable() -> dict[str, KernelIR]:
    """Those that run on every target."""
    found = {name: ir for name, ir in kernels().items() if not ir.ptx_only}
    assert {ir.name for ir in kernels().values()} - {ir.name for ir in found.values()} == {"mma"}
    return found


EVERY = pytest.mark.parametrize("case", CASES, ids=str)


def test_every_op_has_a_case() -> None:
    recorded = set[str]()
    for case in CASES:
        try:
            done = run(case)
        except Unfit:
            continue
        assert case.op in done.ops and done.launches, case
        recorded |= done.ops
    assert {n for n in registry() if not n.startswith("kernel:")} <= recorded


@EVERY
def test_results_are_right(case: Case) -> None:
    done = seen(case)
    near = TOLERANCE.get(case.dtype, 0.0)
    np.testing.assert_allclose(done.result, done.expected, rtol=near, atol=near)


@EVERY
def test_every_order_and_subgroup_gives_the_same(case: Case) -> None:
    for launch in seen(case).launches:
        for order in ORDERS:
            for words, right in zip(launch.run(order=order), launch.after, strict=True):
                np.testing.assert_array_equal(words, right)
        if launch.ir.uses_subgroups:
            for subgroup in (1, 8, 64):
                assert launch.agrees(launch.run(subgroup=subgroup), 1e-3)
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
        ("dot-vectors-f16", "reduce-sum all-f16"),
        "one result fills half a word: the other half is computed and is pad",
    ),
}
# What a line has, why it is idle, and the cases where it is not.
IDLE_LINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "first = Elements(": ("a shift of the whole row: any element of it serves", ()),
    "for place in places]": (
        "eight parts are loaded at once: of fewer the last again, which is left out",
        ("split into many",),
    ),
    **dict.fromkeys(
        ("stats[n", "sums[word"),
        ("two or three parts for 8 or 16 teams: the others weigh nothing", ("split into many",)),
    ),
}


def by_kernel() -> dict[str, list[tuple[Case, Launch]]]:
    """The launches of each distinct kernel."""
    found: dict[str, list[tuple[Case, Launch]]] = {}
    for case in CASES:
        try:
            for launch in run(case).launches:
                found.setdefault(launch.ir.digest, []).append((case, launch))
        except Unfit:
            continue
    return found


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


def tried() -> Iterator[tuple[list[tuple[Case, Launch]], Mistakes, Mistakes]]:
    """For each kernel its launches, all mistakes of a barrier or wait, some of the others."""
    barriers = 0
    for launches in by_kernel().values():
        found = list(mistakes(launches[0][1].ir))
        gone = [m for m in found if m.label.startswith("no ")]
        moved = [m for m in found if not m.label.startswith("no ")]
        step = max(1, len(moved) // SHIFTS)
        yield launches, gone, moved[barriers % step :: step]
        barriers += len(gone)


def test_mutants_are_many() -> None:
    counts = [(len(gone), len(moved)) for _, gone, moved in tried()]
    barriers, shifts = map(sum, zip(*counts, strict=True))
    assert barriers > 300 and shifts > 1000


def assert_caught(launches: list[tuple[Case, Launch]], made: Mistakes, faults_only: bool) -> None:
    for mistake in made:
        assert caught(launches, mistake, faults_only) or (
            not faults_only and is_idle(launches, mistake.label)
        ), f"{launches[0][0]}: {mistake.label}"


def test_removed_barriers_and_shifted_indices_are_caught() -> None:
    """Barriers of every kernel, indices of one of each name; the test below has those of all."""
    names = set[str]()
    for launches, gone, moved in tried():
        assert_caught(launches, gone, faults_only=True)
        name = launches[0][1].ir.name
        if name not in names:
            names.add(name)
            assert_caught(launches, moved, faults_only=False)


PARTS = 4  # so that processes can share them


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_shifted_indices_of_every_kernel_are_caught(part: int) -> None:
    for launches, _, moved in itertools.islice(tried(), part, None, PARTS):
        assert_caught(launches, moved, faults_only=False)


# -- text ------------------------------------------------------------------------------------------


def test_statements_are_few() -> None:
    """naga's time grows with the square of their number."""
    counts = {name: count_statements(ir) for name, ir in portable().items()}
    assert max(counts.values()) <= MOST_STATEMENTS, max(counts, key=lambda n: counts[n])


def test_every_op_keeps_to_the_minimum() -> None:
    """With WebGPU's guaranteed limits each op has a kernel."""
    fitting = set[str]()
    for case in CASES:
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


def test_naga_accepts_every_kernel() -> None:
    device = webgpu()
    for ir in portable().values():
        device.create_shader_module(code=emit_wgsl(ir))


def test_tint_accepts_every_kernel() -> None:
    found = portable()
    faults = tint([emit_wgsl(ir) for ir in found.values()])
    assert {n: f for n, f in zip(found, faults, strict=True) if f} == {}


def test_ptxas_accepts_every_kernel(tmp_path: Path) -> None:
    tool = assembler()

    def assemble(item: tuple[str, KernelIR]) -> tuple[str, str]:
        source = tmp_path / f"{item[1].digest}.ptx"
        source.write_text(emit_ptx(item[1], "sm_80"))
        command = [tool, "-arch=sm_80", "-O1", str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return item[0], "" if done.returncode == 0 else done.stderr

    with ThreadPoolExecutor(2) as pool:
        faults = dict(pool.map(assemble, kernels().items()))
    assert {n: f for n, f in faults.items() if f} == {}


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
    for ir in kernels().values():
        if ir.name.startswith("attention") or ir.name == "softmax_rows":
            numbers = np.array([s[3] for s in ir.body if s[:2] == ("const", "f32")], np.float32)
            assert np.isfinite(numbers).all() and numbers.min() <= -3.0e38
            names.add(ir.name)
    assert len(names) == 5
