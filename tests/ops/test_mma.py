"""The product on tensor cores: every tile in the simulator, its PTX as text and through `ptxas`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16, f32
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx, shared_layout
from centella.lang import KernelIR
from centella.ops.matmul import mma
from centella.ops.matmul.mma import MMA_TILES, MmaTile
from centella.simulator.run import simulate
from centella.specs import Caps, Spec, make_spec
from tests.emit.test_lang_ptx import assemble, execute, needs_ptxas, resources
from tests.support.lang_common import ORDERS
from tests.support.launched import laid_out, one_launch, parameters, result, rounded

Array = np.ndarray[Any, Any]
CAPS = Caps("ptx", max_storage_buffers=64, max_workgroup=1024, max_shared=227 << 10,
            subgroups=True, arch="sm_90a")  # fmt: skip
# What the sweep on a card may try beside the shipped ones.
OTHERS = (
    MmaTile(128, 128, 64, 64, 64, 3),
    MmaTile(128, 256, 32, 64, 64, 4),
    MmaTile(256, 128, 32, 64, 64, 3),
    MmaTile(128, 128, 16, 64, 32, 4),
    MmaTile(64, 128, 64, 32, 64, 2),
)
BEYOND = 16  # bytes: a chunk of an operand off every boundary ends past it
LAYOUTS = ("NT", "NN", "TN", "TT")  # of A and B: N as the formula has it, T transposed in memory
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def size(tile: MmaTile) -> str:
    return f"{tile.bm}x{tile.bn}x{tile.bk}x{tile.stages}"


TILES = pytest.mark.parametrize("tile", [*MMA_TILES, *OTHERS], ids=size)


class Launch(NamedTuple):
    """A launch, and its factors as matrices."""

    call: Call
    a: Spec
    b: Spec

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of the launch."""
        return dict(self.call.constants)


def lies(shape: tuple[int, int], dtype: DType, turned: bool, odd: bool = False) -> Spec:
    """A matrix as a device stores it, or the transpose of one; `odd`: rows off every boundary."""
    rows, columns = shape[::-1] if turned else shape
    stored = make_spec((rows, columns), dtype, 16)
    if odd:
        stored = Spec((rows, columns), dtype, (columns + 1 - columns % 2, 1), False)
    return replace(stored, shape=shape, strides=stored.strides[::-1]) if turned else stored


def lowered(
    m: int, n: int, k: int, dtype: DType = f16, layout: str = "NT", odd: bool = False,
    epilogue: bool = False, out: DType | None = None,
) -> tuple[Launch, KernelIR]:  # fmt: skip
    """The launch of alpha A B and its kernel; with an epilogue `linear`, else `matmul`."""
    y = make_spec((m, n), out or dtype, 16)
    inputs: tuple[Spec, ...]
    attrs: dict[str, Any] = {"alpha": 0.5, "variant": "mma"}
    if epilogue:
        inputs = (lies((m, k), dtype, False, odd), lies((n, k), dtype, False, odd),
                  make_spec((n,), dtype, 16), make_spec((m, n), dtype, 16))  # fmt: skip
        attrs |= {"extras": ("bias", "residual"), "activation": "gelu"}
    else:
        inputs = (lies((m, k), dtype, layout[0] == "T", odd),
                  lies((k, n), dtype, layout[1] == "T", odd))  # fmt: skip
    call, ir = one_launch("linear" if epilogue else "matmul", inputs, y, CAPS, **attrs)
    return Launch(call, inputs[0], inputs[1]), ir


def operands(launch: Launch) -> tuple[list[Array], Array]:
    """The words of A, B and C, and the product in float64."""
    rng = np.random.default_rng(5)
    words, wide = [], []
    for spec in (launch.a, launch.b):
        value = rng.standard_normal(spec.shape)
        words.append(laid_out(value, spec, BEYOND))
        wide.append(rounded(value, spec.dtype))
    y = launch.call.tensors[-1].spec
    words.append(np.full(y.storage_bytes // 4, 0x7FC07FC0, np.uint32))
    return words, wide[0] @ wide[1] * 0.5


def ran(launch: Launch, ir: KernelIR, **options: Any) -> tuple[Array, Array]:
    """C from the simulator, and in float64."""
    words, wanted = operands(launch)
    simulate(ir, words, parameters(launch.call, ir), launch.call.groups, **options)
    return result(launch.call, words), wanted


@TILES
@EVERY_LAYOUT
def test_every_tile_in_every_layout(
    tile: MmaTile, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mma, "MMA_TILES", (tile,))
    m, n, k = tile.bm + 3, tile.bn // 2 + 5, tile.bk * (tile.stages + 1) + 7
    launch, ir = lowered(m, n, k, f16, layout)
    assert launch.constants["tile"] == tile
    assert ir.shared_bytes == tile.shared_bytes and ir.workgroup == tile.threads
    got, wanted = ran(launch, ir)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "odd"])
def test_orders_and_rows_off_16_bytes(odd: bool, dtype: DType, order: str) -> None:
    for layout in LAYOUTS:
        launch, ir = lowered(35, 37, 71, dtype, layout, odd)
        assert launch.constants["vector_a"] is not odd
        got, wanted = ran(launch, ir, order=order)
        near = 2 * dtype.epsilon
        np.testing.assert_allclose(got, wanted, rtol=near, atol=near * np.abs(wanted).max())


@pytest.mark.parametrize("n", [21, 22])
def test_parts_of_a_divided_depth_are_f32(n: int) -> None:
    launch, ir = lowered(19, n, 71, f16, "NN", out=f32)
    got, wanted = ran(launch, ir)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "odd"])
@pytest.mark.parametrize("layout", ["NT", "TN"])
def test_ptx_equals_the_simulator(layout: str, odd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "MMA_TILES", (MmaTile(32, 32, 32, 16, 16, 2),))
    same(*lowered(19, 21, 71, bf16, layout, odd))


@pytest.mark.sweep
def test_ptx_of_the_large_tile_equals_the_simulator() -> None:
    launch, ir = lowered(130, 127, 200)  # two groups, once around the ring
    assert launch.constants["tile"] == MMA_TILES[0]
    same(launch, ir)


def same(launch: Launch, ir: KernelIR) -> None:
    """Fail unless the text, interpreted, gives what the simulator gives, bit for bit."""
    words, _ = operands(launch)
    again = [w.copy() for w in words]
    params = parameters(launch.call, ir)
    simulate(ir, words, params, launch.call.groups)
    execute(ir, "sm_80", again, params, launch.call.groups)
    np.testing.assert_array_equal(result(launch.call, again), result(launch.call, words))


@needs_ptxas
@pytest.mark.turns("arch")
@pytest.mark.parametrize(
    "tile",
    [*MMA_TILES, *(pytest.param(tile, marks=pytest.mark.sweep) for tile in OTHERS)],
    ids=size,
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_tiles_stay_in_registers(
    tile: MmaTile, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No spills, no stack, no warning; two groups of the first tile share a multiprocessor."""
    monkeypatch.setattr(mma, "MMA_TILES", (tile,))
    for layout in LAYOUTS:
        _, ir = lowered(4096, 4096, 4096, f16, layout)
        check(ir, tile, arch, tmp_path)
    _, ir = lowered(4097, 4093, 4099, bf16, epilogue=True)
    check(ir, tile, arch, tmp_path)


@needs_ptxas
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_off_16_bytes_stay_in_registers(layout: str, tmp_path: Path) -> None:
    _, ir = lowered(4097, 4093, 4099, f16, layout, odd=True)
    check(ir, MMA_TILES[-1], "sm_80", tmp_path)


def check(ir: KernelIR, tile: MmaTile, arch: str, folder: Path) -> None:
    report, _ = assemble(emit_ptx(ir, arch), arch, folder)
    registers, stack = resources(report)
    print(f"{tile} {arch}: {registers} registers")
    assert stack == 0 and "C75" not in report, report
    assert registers * tile.threads <= 65_536 // (2 if tile in MMA_TILES else 1), report


def test_the_inner_loop_is_matrix_work() -> None:
    """Of a step: 64 products and 16 loads of matrices, and few instructions beside them."""
    _, ir = lowered(4096, 4096, 4096, f16, "NT")
    text = emit_ptx(ir, "sm_90a")
    body = text[text.index("// for") : text.index("setp.lt", text.index("mma.sync"))]
    inner = [line.split()[0] for line in body.splitlines()[1:-1]]
    tile = MMA_TILES[0]
    assert sum(s.startswith("mma.sync") for s in inner) == 64
    assert sum(s.startswith("ldmatrix") for s in inner) == 16
    assert sum(s.startswith("cp.async.cg") for s in inner) == 8
    assert len(inner) <= 64 + 16 + 72
    assert not [s for s in inner if s.startswith("mov")]
    assert shared_layout(ir).dynamic == tile.shared_bytes == 64 << 10
    assert re.search(r"\.extern \.shared", text)


def test_sums_are_f32() -> None:
    """2 049 ones have no sum in f16."""
    launch, ir = lowered(16, 8, 4096, f16)
    ones = [np.full_like(w, 0x3C003C00) for w in operands(launch)[0]]
    simulate(ir, ones, parameters(launch.call, ir), launch.call.groups)
    assert (result(launch.call, ones) == 2048).all()
