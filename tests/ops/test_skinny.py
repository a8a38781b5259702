"""Skinny products on tensor cores: shapes of a group in the simulator, PTX run and assembled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from centella.dtypes import DType, bf16, f16, f32, i8
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx
from centella.lang import KernelIR
from centella.ops.matmul import skinny
from centella.ops.matmul.skinny import Skinny
from centella.ops.matmul.table import SKINNY
from centella.simulator.run import simulate
from centella.specs import Caps, make_spec
from tests.emit.test_lang_ptx import assemble, execute, needs_ptxas, resources
from tests.support.lang_common import ORDERS
from tests.support.launched import laid_out, one_launch, parameters, result, rounded

Array = np.ndarray[Any, Any]
HOPPER = Caps("ptx", max_storage_buffers=64, max_workgroup=1024, max_shared=227 << 10,
              subgroups=True, arch="sm_90a")  # fmt: skip
EXTRAS = ("scale", "bias", "residual")
PAIRS = [(f16, f16), (bf16, bf16), (f16, i8), (bf16, i8), (f32, i8)]
EVERY_PAIR = pytest.mark.parametrize("dtypes", PAIRS, ids=lambda d: f"{d[0].name}-{d[1].name}")


def lowered(
    m: int, n: int, k: int, dtypes: tuple[DType, DType], activation: str = "silu"
) -> tuple[Call, KernelIR]:
    """The launch of a product with its epilogue, and its kernel."""
    x, w = make_spec((m, k), dtypes[0], 16), make_spec((n, k), dtypes[1], 16)
    y = make_spec((m, n), dtypes[0], 16)
    of = {"scale": make_spec((n,), f32, 16), "bias": make_spec((n,), dtypes[0], 16), "residual": y}
    attrs = {"extras": EXTRAS, "activation": activation, "alpha": 0.01, "variant": "skinny_mma"}
    inputs = (x, w, *(of[name] for name in EXTRAS))
    return one_launch("linear", inputs, y, HOPPER, **attrs)


def operands(call: Call, outlier: float = 0.0) -> tuple[list[Array], Array]:
    """The words of a launch, pads NaN, and the result in float64."""
    p = dict(call.scalars)
    m, n, k = (int(p[name]) for name in "mnk")
    rng = np.random.default_rng(k)
    values: list[Array] = []
    words: list[Array] = []
    for shape, ref in zip(((m, k), (n, k), (n,), (n,), (m, n)), call.tensors, strict=False):
        dtype = ref.spec.dtype
        value: Array = rng.standard_normal(shape).astype(np.float32)
        if dtype is i8:
            value = rng.integers(-128, 128, shape)
        if outlier and len(values) == 0:
            value[0, :: k // 3] = outlier
        spec = make_spec(shape, dtype, 16)
        words.append(laid_out(value, spec))
        values.append(rounded(value, dtype))
    x, w, scale, bias, residual = values
    words.append(laid_out(np.zeros((m, n)), call.tensors[-1].spec))
    with np.errstate(all="ignore"):
        sums = x @ w.T * 0.01 * scale + bias
        silu = dict(call.constants)["activation"] == "silu"
        return words, (sums / (1 + np.exp(-sums)) if silu else sums) + residual


def run(call: Call, ir: KernelIR, words: list[Array], **how: Any) -> Array:
    """What the simulator makes of them."""
    words = [w.copy() for w in words]
    simulate(ir, words, parameters(call, ir), call.groups, subgroup=32, **how)
    return result(call, words)


def near(got: Array, wanted: Array, dtype: DType) -> None:
    bound = max(2 * dtype.epsilon, 2e-6)
    np.testing.assert_allclose(got, wanted, rtol=bound, atol=bound * np.abs(wanted).max())


@EVERY_PAIR
@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 17), (3, 33, 67), (9, 17, 640), (14, 16, 1096)])
def test_the_chosen_shape(m: int, n: int, k: int, dtypes: tuple[DType, DType]) -> None:
    """Depths of less than a step, off every boundary, whole blocks, and blocks with a tail."""
    call, ir = lowered(m, n, k, dtypes)
    assert ir.name == "skinny"
    words, wanted = operands(call)
    near(run(call, ir, words), wanted, dtypes[0])


TILES = [Skinny(1, 2, 2, 2), Skinny(2, 2, 1, 3), Skinny(4, 1, 3, 1), Skinny(1, 1, 5, 4)]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_shape_of_a_group(tile: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "skinny_tile_of", lambda *_: tile)
    for dtypes in ((f16, f16), (bf16, i8)):
        block = tile.block(dtypes[1])
        for k in (block, 2 * block + 8, block - 3):
            call, ir = lowered(8 * tile.eights - 1, 37, k, dtypes)
            words, wanted = operands(call)
            near(run(call, ir, words), wanted, dtypes[0])


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_threads(order: Any) -> None:
    call, ir = lowered(5, 35, 200, (f16, f16))
    words, wanted = operands(call)
    near(run(call, ir, words, order=order), wanted, f16)


def test_outliers_and_infinities() -> None:
    """f32 is split without a limit; what is infinite is so in its row alone."""
    for dtypes, outlier in (((f32, i8), 1e30), ((f32, i8), 1e-30), ((f16, i8), 3e3)):
        call, ir = lowered(3, 9, 70, dtypes, activation="")
        words, wanted = operands(call, outlier)
        near(run(call, ir, words), wanted, dtypes[0])
        words, _ = operands(call, np.inf)
        got = run(call, ir, words)
        assert not np.isfinite(got[0]).any() and np.isfinite(got[1:]).all()


def test_one_row_equals_the_first_of_many() -> None:
    """Whatever the shape of the group, within the rounding of sums in f32, and of the store."""
    for dtypes in ((f16, f16), (f16, i8), (f32, i8)):
        rows = []
        for m in (1, 2, 9, 16):
            call, ir = lowered(m, 18, 330, dtypes, activation="")
            specs = [make_spec(s, r.spec.dtype, 16) for s, r in zip(
                ((m, 330), (18, 330), (18,), (18,), (m, 18), (m, 18)), call.tensors, strict=True
            )]  # fmt: skip
            rng = np.random.default_rng(1)
            weights = rng.integers(-128, 128, (18, 330))
            x = rng.standard_normal((16, 330))[:m]
            ones = [np.ones(s.shape) for s in specs[2:]]
            words = [laid_out(v, s) for v, s in zip((x, weights, *ones), specs, strict=True)]
            rows.append(run(call, ir, words)[0])
        for row in rows[1:]:
            np.testing.assert_allclose(row, rows[0], rtol=2 * dtypes[0].epsilon, atol=1e-5)


@EVERY_PAIR
def test_ptx_equals_the_simulator(
    dtypes: tuple[DType, DType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny, "skinny_tile_of", lambda *_: Skinny(1, 1, 2, 1))
    call, ir = lowered(3, 18, 150, dtypes)
    words, _ = operands(call)
    again = [w.copy() for w in words]
    execute(ir, "sm_90a", again, parameters(call, ir), call.groups)
    np.testing.assert_array_equal(result(call, again), run(call, ir, words))


@needs_ptxas
@EVERY_PAIR
def test_shapes_of_the_table_stay_in_registers(
    dtypes: tuple[DType, DType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No spill; so many groups fit as were asked for."""
    kind = "16-bit" if dtypes[1] is not i8 else "i8 by f32" if dtypes[0] is f32 else "i8"
    tiles = {Skinny(eights, *shape) for eights, both in SKINNY[kind].items() for shape in both}
    for tile in sorted(tiles, key=str):
        monkeypatch.setattr(skinny, "skinny_tile_of", lambda *_, tile=tile: tile)
        _, ir = lowered(8 * tile.eights, 4096, 4104, dtypes)
        report, _ = assemble(emit_ptx(ir, "sm_90a"), "sm_90a", tmp_path)
        registers, spilled = resources(report)
        print(f"{tile}: {registers} registers")
        assert spilled == 0, (tile, report)
        assert tile.together(*dtypes) * tile.threads * registers <= 65_536
