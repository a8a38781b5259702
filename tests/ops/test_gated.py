"""Products with a gate: tiles with columns of both halves of W, in the simulator and `ptxas`."""

from __future__ import annotations

from math import erf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, f16, f32
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx, shared_layout
from centella.lang import KernelIR
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.matmul import mma, wgmma, wgmma_tiles
from centella.ops.matmul.mma import MMA_TILES, MmaTile
from centella.ops.matmul.normed import NORMED
from centella.ops.matmul.wgmma_tiles import GATED_TILES, WgmmaTile
from centella.ops.operands import NUMPY
from centella.runtime.plans import Plans
from centella.simulator.run import simulate
from centella.specs import Spec, make_spec
from centella.tensors import functional
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.ops.test_mma import BEYOND, CAPS
from tests.ops.test_wgmma import halves
from tests.support.launched import laid_out, one_launch, op_form, parameters, result, rounded

Array = np.ndarray[Any, Any]
SMALL = WgmmaTile(64, 64, 32, 3, turns=True, staged=32, gated=True)
TILES = (
    *GATED_TILES,
    SMALL,
    WgmmaTile(64, 64, 32, 2, gated=True),
    WgmmaTile(128, 64, 64, 2, staged=32, gated=True),
    WgmmaTile(128, 256, 64, 4, staged=64, gated=True),
)
POISON = 0x7FC07FC0  # NaN of either half


def name(tile: WgmmaTile | MmaTile) -> str:
    return "x".join(str(int(n)) for n in tile.__reduce__()[1])


@pytest.fixture(params=["wgmma", "mma"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kernel on a small tile."""
    monkeypatch.setattr(wgmma_tiles, "GATED_TILES", {SMALL: 1})
    monkeypatch.setattr(mma, "MMA_TILES", MMA_TILES[-1:])
    return str(request.param)


class Gated(NamedTuple):
    """A launch, its kernel, the operands before the result, and the gate."""

    call: Call
    ir: KernelIR
    inputs: tuple[Spec, ...]
    gate: str

    def operands(self, outliers: bool = False) -> tuple[list[Array], list[Array]]:
        """Words of x, W, perhaps bias, and a poisoned result; the first ones in float64."""
        rng = np.random.default_rng(7)
        values = [rng.standard_normal(s.shape) for s in self.inputs]
        if outliers:
            values[0][::5] *= 300
            values[0][3, :2] = 5000.0
        words = [laid_out(v, s, BEYOND) for v, s in zip(values, self.inputs, strict=True)]
        nbytes = self.call.tensors[-1].spec.storage_bytes
        words.append(np.full(nbytes // 4, POISON, np.uint32))
        return words, [rounded(v, s.dtype) for v, s in zip(values, self.inputs, strict=True)]

    def run(self, words: list[Array], **options: Any) -> Array:
        """The result of the simulator."""
        params = parameters(self.call, self.ir)
        simulate(self.ir, words, params, self.call.groups, **options)
        return result(self.call, words)

    def check(self, *, outliers: bool = False, **options: Any) -> None:
        """Against float64; pads past a word keep what they held."""
        words, wide = self.operands(outliers)
        got, want = self.run(words, **options), expected(self.gate, *wide)
        y = self.call.tensors[-1].spec
        near = 1e-5 if y.dtype is f32 else 2 * y.dtype.epsilon
        np.testing.assert_allclose(got, want, rtol=near, atol=near * np.abs(want).max() / 8)
        if y.dtype is not f32:
            rows = words[-1].view(np.uint16)[: y.shape[0] * y.strides[0]].reshape(y.shape[0], -1)
            after = y.shape[1] + y.shape[1] % 2  # words are stored whole
            assert (rows[:, after:] == POISON & 0xFFFF).all()


def lowered(
    m: int, n: int, k: int, dtype: DType = f16, *, variant: str = "wgmma", bias: bool = False,
    gate: str = "silu", out: DType | None = None,
) -> Gated:  # fmt: skip
    """The launch of a gate over n columns."""
    inputs: tuple[Spec, ...] = make_spec((m, k), dtype, 16), make_spec((2 * n, k), dtype, 16)
    inputs += (make_spec((2 * n,), dtype, 16),) if bias else ()
    call, ir = one_launch(
        "normed_linear", inputs, make_spec((m, n), out or dtype, 16), CAPS, alpha=0.5, eps=1e-6,
        extras=("bias",) if bias else (), gate=gate, variant=variant,
    )  # fmt: skip
    assert call.kernel.name == variant
    return Gated(call, ir, inputs, gate)


def expected(gate: str, x: Array, w: Array, bias: Array | float = 0.0) -> Array:
    """In float64."""
    sums = 0.5 * (x @ w.T) + bias
    n = len(w) // 2
    if gate == "gelu":
        opened = sums[:, :n] * (1 + np.vectorize(erf)(sums[:, :n] / np.sqrt(2))) / 2
    else:
        opened = ACTIVATIONS[gate](NUMPY, sums[:, :n])
    return np.asarray(opened * sums[:, n:])


@pytest.mark.parametrize("tile", TILES, ids=name)
def test_every_tile(tile: WgmmaTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles past both edges, each group with several; once around the ring and a tail of k."""
    monkeypatch.setattr(wgmma_tiles, "GATED_TILES", {tile: 1})
    m, n, k = tile.bm + 3, tile.across + 6, tile.bk * (tile.stages + 1) + 8
    gated = lowered(m, n, k, bias=True)
    assert dict(gated.call.constants)["tile"] == tile
    assert gated.ir.workgroup == tile.threads and gated.call.groups == 4
    gated.check(resident=2)


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 8), (17, 9, 40), (130, 70, 31), (64, 32, 32)], ids=str)
def test_sizes_off_every_boundary(size: tuple[int, int, int], dtype: DType, variant: str) -> None:
    lowered(*size, dtype, variant=variant, bias=size[0] == 17).check()


@pytest.mark.parametrize("gate", ACTIVATIONS)
def test_every_activation(gate: str, variant: str) -> None:
    lowered(70, 40, 72, gate=gate, bias=True, variant=variant).check()


def test_rows_with_outliers_and_f32_results(variant: str) -> None:
    """Gates that are shut, and sums past what f16 holds: they are not rounded on the way."""
    lowered(70, 21, 136, bf16, variant=variant, out=f32).check(outliers=True)


@pytest.mark.parametrize("resident", [1, 2, 5])
def test_groups_take_what_there_is(resident: int, variant: str) -> None:
    lowered(300, 60, 100, variant=variant).check(resident=resident)


@pytest.mark.parametrize("resident", [1, 2, 5])
def test_the_last_columns_have_narrower_tiles(
    resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = WgmmaTile(64, 64, 32, 3, turns=True, staged=16, gated=True, last=32)
    monkeypatch.setattr(wgmma_tiles, "GATED_TILES", {tile: 1})
    monkeypatch.setattr(wgmma, "widths_of", lambda *_: (0, 2, 3))
    gated = lowered(130, 108, 136, bf16, bias=True)
    assert gated.call.groups == 15
    gated.check(resident=resident, outliers=resident == 2)


@pytest.mark.parametrize(
    ("rows", "gate", "extras", "dtype", "taken"),
    [
        (512, "silu", (), bf16, True), (33, "gelu", ("bias",), f16, True),
        (32, "silu", (), bf16, False), (512, "", (), bf16, False), (512, "silu", (), f32, False),
        (512, "silu", ("norm",), bf16, False),
    ],
)  # fmt: skip
def test_where_it_is_chosen(
    rows: int, gate: str, extras: tuple[str, ...], dtype: DType, taken: bool
) -> None:
    """Rows that tensor cores take in tiles; a norm is a launch of its own."""
    shapes = {"norm": (64,), "bias": (160,)}
    inputs = [
        make_spec(s, dtype, 16) for s in ((rows, 64), (160, 64), *(shapes[e] for e in extras))
    ]
    y = make_spec((rows, 80 if gate else 160), dtype, 16)
    attrs = {"extras": extras, "gate": gate, "eps": 1e-6, "alpha": 1.0}
    form = op_form(NORMED, tuple(inputs), (y,), attrs)
    assert NORMED.preferred is not None
    for caps, kernel in (
        (CAPS, "wgmma"),
        (replace(CAPS, arch="sm_89", max_shared=99 << 10), "mma"),
    ):
        assert NORMED.preferred(form, caps) is taken
        if taken:
            assert [call.kernel.name for call in form.lower(caps).calls] == [kernel]


@needs_ptxas
@pytest.mark.first("tile")
@pytest.mark.parametrize("tile", TILES, ids=name)
def test_tiles_stay_in_registers(
    tile: WgmmaTile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No spills, no stack, no warning, of the activations with most work."""
    monkeypatch.setattr(wgmma_tiles, "GATED_TILES", {tile: 1})
    for gate, bias in (("gelu", False), ("silu", True), ("gelu_tanh", True)):
        ir = lowered(4097, 4090, 4099, bf16, gate=gate, bias=bias).ir
        report, _ = assemble(emit_ptx(ir, "sm_90a"), "sm_90a", tmp_path)
        registers, stack = resources(report)
        assert stack == 0 and "C75" not in report, report
        assert registers * tile.threads <= 65_536
        assert shared_layout(ir).size <= CAPS.max_shared


@needs_ptxas
def test_mma_stays_in_registers(tmp_path: Path) -> None:
    for gate, bias in (("gelu", False), ("silu", True)):
        ir = lowered(4097, 4090, 4099, bf16, gate=gate, bias=bias, variant="mma").ir
        report, _ = assemble(emit_ptx(ir, "sm_80"), "sm_80", tmp_path)
        registers, stack = resources(report)
        assert stack == 0 and registers * 128 <= 65_536, report


@pytest.mark.devices("cpu", "simulator", "cuda")
@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("normed", [False, True])
def test_the_function_is_what_it_stands_for(device: ct.Device, gate: str, normed: bool) -> None:
    """Many rows with norm, bias and gate, as chosen and with launches of their own."""
    random = np.random.default_rng(3)
    shapes = ((2, 30, 48), (80, 48), (80,), (48,))
    x, w, bias, norm = (ct.asarray(random.standard_normal(s), "f16", device) for s in shapes)
    given = norm if normed else None
    chosen, apart = (
        functional.normed_linear(x, w, given, bias=bias, gate=gate, variant=variant)
        .astype("f32").numpy() for variant in (None, "apart")
    )  # fmt: skip
    np.testing.assert_allclose(chosen, apart, rtol=4e-3, atol=4e-3 * np.abs(apart).max())


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("tile", [t for t in GATED_TILES if t.last], ids=name)
def test_tiles_of_two_widths_on_a_device(
    device: ct.Device, tile: WgmmaTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past every edge, rows with outliers among them."""
    monkeypatch.setattr(wgmma, "wgmma_tile_of", lambda *_: tile)
    monkeypatch.setattr(wgmma, "widths_of", halves)
    monkeypatch.setattr(device.executor, "plans", Plans(device.executor.backend))
    random = np.random.default_rng(8)
    for m, n, k in ((40, 6, 8), (515, 302, 136), (257, 81, 520)):
        x, w = (random.standard_normal(s) for s in ((m, k), (2 * n, k)))
        x[::5] *= 300
        given = [ct.asarray(v, "bf16", device) for v in (x, w)]
        got = functional.normed_linear(*given, gate="silu", alpha=0.5, variant="wgmma")
        want = expected("silu", rounded(x, bf16), rounded(w, bf16))
        near = 2 * bf16.epsilon
        np.testing.assert_allclose(
            got.astype("f32").numpy(), want, rtol=near, atol=near * np.abs(want).max() / 8
        )


@pytest.mark.devices("cpu", "simulator", "webgpu", "cuda")
@pytest.mark.parametrize("gate", ["silu", None])
@pytest.mark.parametrize("normed", [False, True])
def test_rows_that_no_one_stride_visits(device: ct.Device, gate: str | None, normed: bool) -> None:
    """Parts of each sequence, and sequences in another order, are as their copies."""
    random = np.random.default_rng(4)
    shapes = ((3, 20, 128), (80, 128), (128,))
    x, w, norm = (ct.asarray(random.standard_normal(s), "f16", device) for s in shapes)
    for view in (x[:, :14], x.permute(1, 0, 2)):
        copied = ct.asarray(view.numpy(), device=device)
        got, wanted = (
            functional.normed_linear(rows, w, norm if normed else None, gate=gate)
            .astype("f32").numpy() for rows in (view, copied)
        )  # fmt: skip
        np.testing.assert_allclose(got, wanted, rtol=4e-3, atol=4e-3 * np.abs(wanted).max())
