"""Kernels of software adapters: their loops stay loops, and compute what the others do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import In, Out, f32, lang
from centella.check.cases.compare import differences
from centella.check.cases.table import TABLE, cases_of
from centella.dtypes import f16, i8, i32, u32
from centella.emit.program import program_of
from centella.lang import KernelIR
from centella.op import op
from centella.specs import Caps, Spec, make_spec
from tests.ops.test_tiles import roomy
from tests.support.lang_common import empty, record, tensor
from tests.support.launched import op_form

SOFTWARE = Caps("wgsl", max_shared=32 << 10, max_workgroup=1024, family="software")
OTHER = Caps("wgsl", max_shared=32 << 10, max_workgroup=1024, family="intel")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("matmul", "f32"),
        ("linear", "f16"),
        *(pytest.param(name, "f32", marks=pytest.mark.sweep) for name in ("linear", "attention")),
    ],
)
def test_every_case_in_the_simulator(name: str, dtype: str) -> None:
    """Which reports reads out of bounds and races; lavapipe runs the same kernels."""
    device = roomy("software")
    cases = cases_of(name, dtype, device.caps)
    wrong = list(differences(device, name, dtype, cases, TABLE[name]))
    assert not wrong, "\n".join(f"{case}: {difference}" for case, difference in wrong)


def accesses(calls: Any) -> int:
    """Loads and stores that launches have written down: what a software adapter compiles."""
    count = 0
    for call in calls:
        dtypes = tuple(r.spec.dtype for r in call.tensors)
        ir: KernelIR = call.kernel.specialise(
            dtypes, (), call.constants, call.workgroup, call.signature
        )
        count += sum("load" in s[0] or "store" in s[0] for s in ir.body)
    return count


def product(
    m: int, dtype: Any, caps: Caps, across: bool = False, n: int = 512, variant: str | None = None
) -> int:
    """Of a product of m rows."""
    x, y = make_spec((m, n), dtype, 16), make_spec((m, n), dtype, 16)
    w = make_spec((n, n), dtype, 16)
    w = w if across else Spec((n, n), dtype, (1, w.strides[0]))
    attrs = {"variant": variant, "alpha": 1.0}
    return accesses(op_form(op.get("matmul"), (x, w), (y,), attrs).lower(caps).calls)


def planes(m: int, caps: Caps) -> int:
    """Of a product of m rows with weights in blocks."""
    x, y = make_spec((m, 512), f32, 16), make_spec((m, 512), f32, 16)
    stored, scale = make_spec((512, 512), i8, 16), make_spec((512, 16), f32, 16)
    attrs = {"extras": (), "activation": "", "format": "q8_0"}
    return accesses(op_form(op.get("linear"), (x, stored, scale), (y,), attrs).lower(caps).calls)


def attention(variant: str, queries: int, caps: Caps) -> int:
    """Of a variant of attention."""
    q, k = make_spec((1, 2, queries, 64), f32, 16), make_spec((1, 2, 512, 64), f32, 16)
    attrs = {"masks": (), "causal": False, "scale": 1.0, "variant": variant}
    y = make_spec((1, queries, 2, 64), f32, 16)
    return accesses(op_form(op.get("attention"), (q, k, k), (y,), attrs).lower(caps).calls)


@pytest.mark.parametrize(
    ("count", "share"),
    [
        (lambda caps: product(2048, f32, caps, variant="medium"), 0.7),
        (lambda caps: product(33, f16, caps, variant="small"), 0.5),
        (lambda caps: product(16, f16, caps, n=256), 0.7),  # of larger ones a thread has more
        (lambda caps: product(16, f16, caps, across=True), 0.5),
        (lambda caps: planes(16, caps), 0.5),
        (lambda caps: attention("stream", 64, caps), 0.5),
        (lambda caps: attention("split", 8, caps), 0.5),
    ],
    ids=["tiles", "small", "thin", "columns", "blocks", "stream", "split"],
)
def test_kernels_of_software_adapters_are_shorter(
    count: Callable[[Caps], int], share: float
) -> None:
    assert count(SOFTWARE) <= share * count(OTHER)


@ct.kernel(workgroup=64)
def turns(x: In[f32], y: Out[f32]) -> None:
    """x[0] + 2 x[1] + .. + 5 x[4], and -9 - 6 - 3."""
    i = lang.global_id()
    total, signed = lang.var(0.0), lang.var(0, i32)
    for n in lang.range(lang.const(0, u32), 5):
        total += x[n] * lang.cast(n + 1, f32)
    for m in lang.range(lang.const(-9, i32), -2, 3):
        signed += m
    with lang.if_(i < y.shape(0)):
        y[i] = total + lang.cast(signed, f32)


def test_a_loop_whose_end_is_hidden_ends_where_it_did(device: ct.Device) -> None:
    x = ct.asarray(np.arange(5, dtype=np.float32), device=device)
    y = ct.zeros((200,), "f32", device)
    turns(x, y, threads=200)
    np.testing.assert_array_equal(y.numpy(), np.full(200, 40.0 - 18.0, np.float32))


def test_the_end_of_a_loop_is_hidden_from_a_driver_for_a_cpu() -> None:
    tensors = {"x": tensor(np.ones(5, np.float32)), "y": empty((70,), f32)}
    ir = record(turns.__wrapped__, tensors, 64)
    kept, other = (program_of(ir, caps) for caps in (SOFTWARE, OTHER))
    assert kept.key != other.key
    assert kept.source.count("wid.x) | ") == 2 and "min(5u, u32(wid.x) | 5u)" in kept.source
    assert "wid.x) | " not in other.source
