"""Every kernel that the library ships: simulated in all orders, broken on purpose, parsed, assembled.

Ops run at small shapes on a simulator device, as users call them; what it launches is kept, with the
words before and after. Memory is poisoned, pads too. An op without a case fails the first test.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import centella as ct
from centella import functional as F  # noqa: N812  # as users of PyTorch spell it
from centella.errors import LimitError, SimulationError
from centella.lang import KernelIR
from centella.lang.ptx import emit_ptx
from centella.lang.simulate import mutations, simulate
from centella.lang.wgsl import count_statements, emit_wgsl
from centella.op import registry
from centella.specs import Caps, Spec
from centella.submission import Submission
from tests.lang_common import ORDERS, Tensor, tint, webgpu

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

    def peaks(self, rows: int, columns: int, apart: int = 1) -> ct.Tensor:
        """Rows whose largest element is far above the rest, and stands elsewhere in each."""
        self.seed += 1
        values = np.random.default_rng(self.seed).uniform(-2, 2, (rows, columns))
        values[np.arange(rows), np.arange(rows) * apart % columns] += 300
        return self.of(values.astype("i4" if self.dtype == "i32" else "f4"), self.dtype)

    def ints(self, *shape: int, low: int = -50, high: int = 50) -> ct.Tensor:
        """Random integers of the case's dtype."""
        self.seed += 1
        return self.of(np.random.default_rng(self.seed).integers(low, high, shape), self.dtype)


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


def elementwise() -> list[Case]:
    """Each expression in f32 and f16; layouts and dtypes on a few."""
    unary: dict[str, Build] = {
        "neg": lambda i: F.neg(i(3, 70)), "abs": lambda i: F.abs(i(3, 70)),
        "sqrt": lambda i: F.sqrt(i(3, 70, low=0.1)), "exp": lambda i: F.exp(i(3, 70)),
        "log": lambda i: F.log(i(3, 70, low=0.1)), "tanh": lambda i: F.tanh(i(3, 70)),
        "sigmoid": lambda i: F.sigmoid(i(3, 70)), "relu": lambda i: F.relu(i(3, 70)),
        "swish": lambda i: F.swish(i(3, 70)), "elu": lambda i: F.elu(i(3, 70)),
        "scale": lambda i: F.scale(i(3, 70), 1.7), "clip": lambda i: F.clip(i(3, 70), -1.0, 0.5),
        "leaky_relu": lambda i: F.leaky_relu(i(3, 70), 0.2),
        "copy": lambda i: i(5, 7).permute(1, 0).contiguous(),
        "add": lambda i: F.add(i(3, 70), i(3, 70)), "sub": lambda i: F.sub(i(3, 70), i(70)),
        "mul": lambda i: F.mul(i(3, 70), i(3, 1)), "div": lambda i: F.div(i(3, 70), i(3, 70)),
        "maximum": lambda i: F.maximum(i(3, 70), 0.3),
        "minimum": lambda i: F.minimum(i(70), i(3, 70)),
        "where": lambda i: F.where(i.of(np.arange(210).reshape(3, 70) % 3 == 0, "bool"),
                                    i(3, 70), i(3, 70)),
    }  # fmt: skip  # a table
    cases = [Case(n, "rows", b, d) for n, b in unary.items() for d in ("f32", "f16")]
    for kind in ("none", "tanh", "quick"):
        cases += [Case("gelu", kind, lambda i, k=kind: F.gelu(i(3, 70), k), d)
                  for d in ("f32", "f16")]  # fmt: skip
    add: dict[str, Build] = {
        "vector": lambda i: F.add(i(1030), i(1030)),
        "strided": lambda i: F.add(i(6, 5).permute(1, 0), i(5, 6)),
        "sliced": lambda i: F.add(i(4, 9)[:, 1:8], i(7)),
        "batched": lambda i: F.add(i(2, 3, 4, 10), i(3, 1, 10)),
        "number": lambda i: F.add(i(3, 5), 2.5),
    }
    cases += [Case("add", n, b, d) for n, b in add.items() for d in ("f32", "f16", "bf16")]
    integers: dict[str, Build] = {
        "add": lambda i: F.add(i.ints(3, 70, low=0), i.ints(3, 70, low=0)),
        "maximum": lambda i: F.maximum(i.ints(3, 70, low=0), i.ints(70, low=0)),
    }
    cases += [Case(n, "integers", b, d) for n, b in integers.items() for d in ("i32", "u32", "i8")]
    return cases


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
        cases.append(Case("concat", "rows", lambda i: F.concat([i.ints(2, 5), i.ints(3, 5)]), dtype))
        cases.append(Case("concat", "columns",
                          lambda i: F.concat([i.ints(3, 5), i.ints(3, 4), i.ints(3, 1)], 1), dtype))  # fmt: skip
        cases.append(Case("fill", "rows", lambda i: F.full((3, 5), 2, i.dtype, i.device), dtype))
    return cases


def rows() -> list[Case]:
    """Reductions, softmax, normalisation, pooling, embedding: what walks rows."""
    build: dict[tuple[str, str], Build] = {
        ("reduce", "sum"): lambda i: F.sum(i(3, 300), -1),
        ("reduce", "sum all"): lambda i: F.sum(i(5, 7)),
        ("reduce", "sum first"): lambda i: F.sum(i(5, 7), 0),
        ("reduce", "mean"): lambda i: F.mean(i(5, 77), -1),
        ("reduce", "max"): lambda i: F.max(i.peaks(260, 262), -1),
        ("reduce", "min"): lambda i: F.min(F.neg(i.peaks(260, 262)), -1),
        ("reduce", "long"): lambda i: F.sum(i(2, 16500), -1),
        ("argmax", "rows"): lambda i: F.argmax(i.peaks(260, 262), -1),
        ("dot", "vectors"): lambda i: F.dot(i(600), i(600)),
        ("softmax", "rows"): lambda i: F.softmax(i.peaks(130, 522, 4)),
        ("softmax", "odd"): lambda i: F.softmax(i.peaks(70, 71)),
        ("softmax", "log"): lambda i: F.log_softmax(i.peaks(70, 71)),
        ("softmax", "first"): lambda i: F.softmax(i.peaks(70, 71), 0),
        ("norm", "layer"): lambda i: F.layer_norm(i(3, 300), i(300), i(300)),
        ("norm", "layer odd"): lambda i: F.layer_norm(i(3, 77), i(77), i(77)),
        ("norm", "layer bare"): lambda i: F.layer_norm(i(3, 77)),
        ("norm", "rms"): lambda i: F.rms_norm(i(3, 77), i(77)),
        ("norm", "l2"): lambda i: F.l2_normalize(i(3, 77)),
        ("mean_pool", "rows"): lambda i: F.mean_pool(i(3, 6, 40), i.of([4, 6, 0])),
        ("mean_pool", "odd"): lambda i: F.mean_pool(i(3, 5, 7), i.of([4, 5, 2])),
        ("embedding", "rows"): lambda i: F.embedding(i.of([[3, 0, 5], [9, 2, -1]]), i(9, 40)),
        ("embedding", "odd"): lambda i: F.embedding(i.of([3, 0, 5, 8]), i(9, 7)),
    }  # fmt: skip  # a table
    cases = [Case(op, n, b, d) for (op, n), b in build.items() for d in ("f32", "f16")]
    cases += [Case("softmax", "rows", lambda i: F.softmax(i.peaks(70, 71)), "bf16")]
    for op, fn in (("reduce", F.sum), ("reduce", F.max), ("argmax", F.argmax)):
        cases.append(Case(op, f"{fn.__name__} integers",
                          lambda i, f=fn: f(i.peaks(260, 262), -1), "i32"))  # fmt: skip
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
        cases.append(Case("matmul", "batched", lambda i: F.matmul(i(2, 33, 35), i(2, 35, 36)), dtype))
        cases.append(Case("matmul", "sliced", lambda i: F.matmul(i(33, 40)[:, 1:36], i(35, 41)), dtype))
        cases.append(Case("linear", "residual", lambda i: F.linear(i(33, 35), i(36, 35),
                                                                    residual=i(33, 36)), dtype))  # fmt: skip
    return cases


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
    ]  # fmt: skip


CASES = [*elementwise(), *moving(), *rows(), *products(), *attentions()]


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
        device.caps = device.backend.caps = replace(device.caps, max_shared=ROOMY)
    ops: set[str] = set()
    launches: list[Launch] = []
    add, submit = device.add, device.backend.submit

    def adding(form: Any, *rest: Any) -> Any:
        ops.add(form.op.name)
        return add(form, *rest)

    def submitting(work: Submission) -> Any:
        for slot, offset, data in work.uploads:
            device.backend.write(work.slots[slot].native, offset, data)
        for bound in work.launches:
            natives = [work.slots[s].native for s in bound.slots]
            words = [n.copy() for n in natives]
            params = np.array(bound.words, np.uint32)
            launch = Launch(bound.program.ir, words, params, bound.groups, bound.views)
            submit(Submission(work.slots, [], [bound]))
            launch.after = [n.copy() for n in natives]
            launches.append(launch)
        return submit(Submission(work.slots, reads=work.reads))

    device.add, device.backend.submit = adding, submitting
    try:
        result = case.build(Inputs(device, case.dtype)).numpy()
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
