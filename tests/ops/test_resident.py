"""The product that keeps rows of A and has B pass by: in the simulator, and through `ptxas`."""

from __future__ import annotations

from math import erf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from centella.dtypes import DType, bf16, f16
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx, shared_layout
from centella.errors import LimitError, SimulationError
from centella.lang import KernelIR
from centella.lang.ir import HOPPER
from centella.simulator.run import simulate
from centella.specs import make_spec
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.ops.test_mma import BEYOND, CAPS
from tests.support.launched import laid_out, one_launch, parameters, result, rounded
from tests.support.mutations import mutations

Array = np.ndarray[Any, Any]


def launched(
    m: int, n: int, k: int, dtype: DType = f16, activation: str = "gelu",
    extras: tuple[str, ...] = ("bias",), variant: str | None = "resident",
) -> tuple[Call, KernelIR]:  # fmt: skip
    y = make_spec((m, n), dtype, 16)
    more = [make_spec((n,), dtype, 16) if name == "bias" else y for name in extras]
    inputs = (make_spec((m, k), dtype, 16), make_spec((n, k), dtype, 16), *more)
    attrs = {"extras": extras, "activation": activation, "variant": variant}
    return one_launch("linear", inputs, y, CAPS, **attrs)


def operands(call: Call) -> tuple[list[Array], Array]:
    """Words of all operands, results poisoned; what is wanted, in float64."""
    rng = np.random.default_rng(6)
    *specs, y = (ref.spec for ref in call.tensors)
    p = dict(call.scalars)
    shapes = ((p["m"], p["k"]), (p["n"], p["k"]), (p["n"],))
    values: list[Array] = []
    words: list[Array] = []
    for shape, flat in zip(shapes, specs, strict=False):
        spec = make_spec(tuple(map(int, shape)), flat.dtype, 16)
        value = rng.standard_normal(spec.shape) / (4 if len(values) == 1 else 1)
        values.append(rounded(value, spec.dtype))
        words.append(laid_out(value, spec, BEYOND))
    words.append(np.full(y.storage_bytes // 4, 0x7FC07FC0, np.uint32))
    sums = values[0] @ values[1].T + (values[2] if len(values) > 2 else 0.0)
    if dict(call.constants)["activation"]:
        sums = sums * (1 + np.vectorize(erf)(sums / np.sqrt(2))) / 2
    return words, sums


def ran(call: Call, ir: KernelIR, **options: Any) -> tuple[Array, Array]:
    words, wanted = operands(call)
    simulate(ir, words, parameters(call, ir), call.groups, **options)
    return result(call, words), wanted


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("resident", [1, 2, 5])
@pytest.mark.parametrize(
    "size",
    [(1, 200, 8), (130, 384, 64), (300, 392, 72), (300, 600, 384), (520, 1000, 136)],
    ids=str,
)
def test_sizes_off_every_boundary(size: tuple[int, int, int], resident: int, dtype: DType) -> None:
    """Two to six tiles of some rows, even and odd; groups with one block of rows, or all."""
    got, wanted = ran(*launched(*size, dtype), resident=resident)
    np.testing.assert_allclose(got, wanted, rtol=dtype.epsilon, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("extras", [(), ("bias",)], ids=str)
def test_without_activation(extras: tuple[str, ...]) -> None:
    got, wanted = ran(*launched(257, 400, 72, activation="", extras=extras), resident=1)
    np.testing.assert_allclose(got, wanted, rtol=f16.epsilon, atol=1e-5 * np.abs(wanted).max())


def test_what_it_does_not_take() -> None:
    for size in ((70, 192, 384), (70, 400, 392)):
        with pytest.raises(LimitError, match="'resident' does not fit"):
            launched(*size)
    with pytest.raises(LimitError, match="'resident' does not fit"):
        launched(70, 400, 384, extras=("bias", "residual"))


@pytest.mark.parametrize(
    ("size", "kernel"),
    [((65536, 1152, 384), "resident"), ((65536, 1536, 384), "resident"),
     ((65536, 1536, 64), "wgmma"), ((512, 1536, 384), "wgmma"), ((65536, 1536, 512), "wgmma"),
     ((65536, 200, 384), "wgmma")],
    ids=str,
)  # fmt: skip
def test_it_is_for_many_rows_of_a_shallow_product(size: tuple[int, int, int], kernel: str) -> None:
    assert launched(*size, variant=None)[0].kernel.name == kernel


def test_every_wait_and_fence_is_needed() -> None:
    """Without one the simulator reports, or the result is wrong, of one depth or the other."""
    needed: dict[str, bool] = {}
    for size in ((300, 600, 264), (300, 600, 136)):
        call, ir = launched(*size)
        for what, broken in mutations(ir):
            kind = what.split()[0] if what[:2] != "no" else what.split()[1]
            if kind not in HOPPER or needed.get(what):
                continue
            words, wanted = operands(call)
            try:
                simulate(broken, words, parameters(call, ir), call.groups, resident=1)
            except SimulationError:
                needed[what] = True
            else:
                near = np.isclose(result(call, words), wanted, rtol=2e-2, atol=2e-2)
                needed[what] = not near.all()
    assert all(needed.values()), [what for what, is_needed in needed.items() if not is_needed]
    kinds = {word for what in needed for word in what.split()[:2]}
    assert kinds >= {"mbar_wait", "wgmma_wait", "warpgroup_barrier", "async_fence", "tma_load"}


@needs_ptxas
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("activation", ["", "gelu", "gelu_tanh", "silu"])
def test_it_stays_in_registers(activation: str, dtype: DType, tmp_path: Path) -> None:
    """No spills, no stack, no warning."""
    _, ir = launched(65536, 1536, 384, dtype, activation)
    report, _ = assemble(emit_ptx(ir, "sm_90a"), "sm_90a", tmp_path)
    registers, stack = resources(report)
    assert stack == 0 and "C75" not in report, report
    assert registers * ir.workgroup <= 65_536
    assert shared_layout(ir).size <= CAPS.max_shared
