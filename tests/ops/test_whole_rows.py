"""The product whose tiles are whole rows, and their norm: in the simulator and by `ptxas`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16, f32, i8
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx, shared_layout
from centella.errors import SimulationError
from centella.lang import KernelIR
from centella.lang.ir import BARRIERS, CLUSTER, HOPPER
from centella.op.op import Form
from centella.ops.matmul import linear_norm, whole_rows
from centella.ops.matmul.linear_norm import LINEAR_NORM, LinearNormAttrs
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.norm import NormAttrs
from centella.simulator.run import simulate
from centella.specs import Spec, make_spec
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.ops.test_mma import BEYOND, CAPS
from tests.support.launched import laid_out, parameters, result, rounded, traced
from tests.support.mutations import mutations

Array = np.ndarray[Any, Any]
BOTH = ("bias", "residual")
AFFINE = ("weight", "bias")


def form(
    m: int, n: int, k: int, dtype: DType = f16, *, kind: str = "layer",
    extras: Sequence[str] = BOTH, vectors: Sequence[str] = AFFINE, of: DType | None = None,
) -> Form[LinearNormAttrs]:  # fmt: skip
    """The op; `of`: the dtype of bias and of the norm's vectors."""
    vector, y = make_spec((n,), of or dtype, 16), make_spec((m, n), dtype, 16)
    more = [vector if name == "bias" else y for name in extras]
    inputs = (make_spec((m, k), dtype, 16), make_spec((n, k), dtype, 16), *more)
    attrs = LinearNormAttrs(
        LinearAttrs(tuple(extras), ""), NormAttrs(kind, 1e-12, tuple(vectors)), "whole_rows"
    )
    return Form(LINEAR_NORM, (*inputs, *(vector for _ in vectors)), (y,), attrs)


def launched(asked: Form[LinearNormAttrs]) -> tuple[Call, KernelIR]:
    (call,) = asked.lower(CAPS).calls
    assert call.kernel.name == "whole_rows"
    return call, traced(call)


def operands(asked: Form[LinearNormAttrs], far: float = 0.0) -> tuple[list[Array], Array]:
    """Words of all operands, results poisoned; what is wanted, in float64.

    Some rows of x are large, and some have one large element; `far`: the residual's distance from
    zero, of some rows.
    """
    rng = np.random.default_rng(4)
    values = [rng.standard_normal(spec.shape) for spec in asked.inputs]
    values[0][::7] *= 20
    values[0][3::11, 0] = 900
    if "residual" in asked.attrs.linear.extras:
        values[len(asked.attrs.linear.extras) + 1][::3] += far
    words = [laid_out(v, s, BEYOND) for v, s in zip(values, asked.inputs, strict=True)]
    words.append(np.full(asked.outputs[0].storage_bytes // 4, 0x7FC07FC0, np.uint32))
    exact = [rounded(v, s.dtype) for v, s in zip(values, asked.inputs, strict=True)]
    assert LINEAR_NORM.reference is not None
    attrs = {"linear": asked.attrs.linear, "norm": asked.attrs.norm}
    return words, LINEAR_NORM.reference(*exact, **attrs)


def ran(asked: Form[LinearNormAttrs], far: float = 0.0, **options: Any) -> tuple[Array, Array]:
    """Results from the simulator, and what is wanted."""
    call, ir = launched(asked)
    words, wanted = operands(asked, far)
    simulate(ir, words, parameters(call, ir), call.groups, **options)
    return result(call, words), wanted


def close(got: Array, wanted: Array, dtype: DType) -> None:
    """Within the store's rounding, and what f32 sums are off."""
    np.testing.assert_allclose(got, wanted, rtol=dtype.epsilon, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "size", [(1, 64, 8), (67, 128, 40), (129, 384, 72), (300, 320, 168)], ids=str
)
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_sizes_off_every_boundary(size: tuple[int, int, int], dtype: DType) -> None:
    close(*ran(form(*size, dtype)), dtype)


@pytest.mark.parametrize("extras", [(), ("bias",), ("residual",)], ids=str)
@pytest.mark.parametrize("vectors", [(), ("weight",), AFFINE], ids=str)
def test_with_and_without_operands(extras: tuple[str, ...], vectors: tuple[str, ...]) -> None:
    close(*ran(form(70, 64, 40, extras=extras, vectors=vectors)), f16)


def test_rms_norm() -> None:
    close(*ran(form(70, 64, 40, kind="rms", extras=("bias",), vectors=("weight",))), f16)


def test_rows_far_from_zero_lose_nothing() -> None:
    """Deviations of 20 at 2000, which f16 stores in steps of 1; a constant row is the shift."""
    close(*ran(form(70, 128, 40), far=2000.0), f16)
    asked = form(2, 64, 8, extras=("bias",), vectors=())
    call, ir = launched(asked)
    words, _ = operands(asked)
    words[0][:] = 0
    words[2] = laid_out(np.full(64, 0.1), asked.inputs[2], BEYOND)
    simulate(ir, words, parameters(call, ir), call.groups)
    assert not result(call, words).any()


@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize("k", [8, 40, 72, 264])
def test_groups_take_what_there_is(resident: int, k: int) -> None:
    """Depths of one step, of less than the ring has, of more than twice; one tile or three."""
    close(*ran(form(300, 64, k), resident=resident), f16)


def test_nothing_is_written_outside() -> None:
    asked = form(65, 64, 16)
    call, ir = launched(asked)
    words, _ = operands(asked)
    words[-1] = np.full(words[-1].size + 64 * 32, 0x7FC07FC0, np.uint32)
    simulate(ir, words, parameters(call, ir), call.groups)
    assert (words[-1][65 * 32 :] == 0x7FC07FC0).all()


def test_every_wait_and_fence_is_needed() -> None:
    """Without one the simulator reports, or the result is wrong, of one depth or the other."""
    needed: dict[str, bool] = {}
    for size in ((300, 64, 136), (300, 64, 40)):
        asked = form(*size)
        call, ir = launched(asked)
        for what, broken in mutations(ir):
            kind = what.split()[0] if what[:2] != "no" else what.split()[1]
            if kind not in HOPPER | BARRIERS | CLUSTER or needed.get(what):
                continue
            words, wanted = operands(asked)
            try:
                simulate(broken, words, parameters(call, ir), call.groups, resident=1)
            except SimulationError:
                needed[what] = True
            else:
                near = np.isclose(result(call, words), wanted, rtol=2e-2, atol=2e-2)
                needed[what] = not near.all()
    assert all(needed.values()), [what for what, is_needed in needed.items() if not is_needed]
    kinds = {word for what in needed for word in what.split()[:2]}
    assert kinds >= {"mbar_wait", "wgmma_wait", "warpgroup_barrier", "async_fence", "tma_load",
                     "tma_multicast", "cluster_wait"}  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        form(70, 72, 40), form(70, 448, 40), form(70, 64, 40, f32),
        form(70, 64, 40, kind="l2", vectors=()), form(70, 64, 40, kind="rms", vectors=()),
        form(70, 64, 40, of=f32),
    ],
    ids=["columns", "too many", "f32", "l2", "rms and residual", "f32 vectors"],
)  # fmt: skip
def test_what_it_does_not_take(asked: Form[LinearNormAttrs]) -> None:
    assert not whole_rows.WHOLE_ROWS.fits(asked, CAPS)


def test_rows_off_16_bytes_are_not_taken() -> None:
    asked = form(70, 64, 40)
    off = Spec((70, 40), f16, (42, 1), False)
    assert whole_rows.WHOLE_ROWS.fits(asked, CAPS)
    assert not whole_rows.WHOLE_ROWS.fits(replace(asked, inputs=(off, *asked.inputs[1:])), CAPS)


@pytest.mark.parametrize(
    ("m", "preferred"), [(65_536, True), (132 * 128, True), (133 * 128, False), (512, False)]
)
def test_it_is_for_rows_that_fill_the_device(m: int, preferred: bool) -> None:
    assert whole_rows.WHOLE_ROWS.preferred(form(m, 384, 1536), CAPS) is preferred


def test_a_quantised_product_keeps_its_norm_apart() -> None:
    """Its weight is planes: nothing of the walk over kernels takes them for one tensor."""
    x = form(65_536, 384, 1536).inputs[0]
    planes = (make_spec((384, 1536), i8, 16), make_spec((384, 48), f16, 16))
    linear, norm = LinearAttrs((), "", format="q8_0"), NormAttrs("rms", 1e-5, ("weight",))
    vector, y = make_spec((384,), f16, 16), make_spec((65_536, 384), f16, 16)
    asked = Form(LINEAR_NORM, (x, *planes, vector), (y,), LinearNormAttrs(linear, norm))
    assert not linear_norm.preferred(asked, CAPS)


@needs_ptxas
@pytest.mark.parametrize(
    "asked",
    [
        form(65536, 384, 1536), form(65536, 384, 384, bf16),
        form(65536, 384, 384, extras=("residual",), vectors=()), form(65536, 256, 384, extras=()),
        form(65536, 384, 384, kind="rms", extras=("bias",), vectors=("weight",)),
    ],
    ids=["f16", "bf16", "bare", "256", "rms"],
)  # fmt: skip
def test_it_stays_in_registers(asked: Form[LinearNormAttrs], tmp_path: Path) -> None:
    """No spills, no stack, no warning."""
    _, ir = launched(asked)
    report, _ = assemble(emit_ptx(ir, "sm_90a"), "sm_90a", tmp_path)
    registers, stack = resources(report)
    assert stack == 0 and "C75" not in report, report
    assert registers * ir.workgroup <= 65_536
    assert shared_layout(ir).size <= CAPS.max_shared
