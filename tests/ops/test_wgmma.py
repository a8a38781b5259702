"""The product by warpgroups: its tiles in the simulator, roles and all, and through `ptxas`."""

from __future__ import annotations

import itertools
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, f16, f32
from centella.emit.program import parameter_words
from centella.emit.ptx import emit_ptx, shared_layout
from centella.errors import LimitError, SimulationError
from centella.lang import KernelIR
from centella.lang.ir import BARRIERS, HOPPER
from centella.ops.matmul import wgmma, wgmma_tiles
from centella.ops.matmul.problem import Problem
from centella.ops.matmul.wgmma_tiles import WGMMA_TILES, WgmmaTile, wgmma_tile_of, widths_of
from centella.runtime.plans import Plans
from centella.simulator.run import simulate
from centella.specs import Spec, make_spec
from centella.tensors.tensor import apply
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.ops.test_mma import BEYOND, CAPS, LAYOUTS, Launch, lies, operands, ran
from tests.support.launched import laid_out, one_launch, parameters, result, rounded
from tests.support.mutations import mutations

Array = np.ndarray[Any, Any]
SMALL = WgmmaTile(64, 64, 32, 3, turns=True, staged=64)
TALL = WgmmaTile(128, 64, 32, 3, turns=True, staged=32)
NARROWER = WgmmaTile(64, 64, 32, 3, turns=True, staged=32, last=32)
WHOLE = WgmmaTile(64, 64, 32, 3, turns=True, staged=32, whole=True)  # residuals are brought
# What the shipped tiles have not: consumers that share a tile, stores from registers.
TILES = (
    *WGMMA_TILES,
    SMALL,
    NARROWER,
    WHOLE,
    WgmmaTile(64, 64, 32, 2),
    WgmmaTile(128, 64, 64, 2, staged=64),
)
WIDE = WgmmaTile(128, 256, 64, 4, staged=128)  # which the sweep on a card tries beside them


def name(tile: WgmmaTile) -> str:
    whole = "xwhole" if tile.whole else ""
    sizes = f"{tile.bm}x{tile.bn}x{tile.bk}x{tile.stages}"
    return f"{sizes}x{tile.turns:d}x{tile.staged}x{tile.last}{whole}"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_tiles, "WGMMA_TILES", {SMALL: 1})
    monkeypatch.setattr(wgmma_tiles, "_alone", lambda *_: False)


def lowered(
    m: int, n: int, k: int, dtype: DType = f16, layout: str = "NT", epilogue: bool = False,
    out: DType | None = None, activation: str = "gelu",
) -> tuple[Launch, KernelIR]:  # fmt: skip
    """The launch of alpha A B and its kernel; with an epilogue `linear`, else `matmul`."""
    y = make_spec((m, n), out or dtype, 16)
    inputs: tuple[Spec, ...]
    attrs: dict[str, Any] = {"alpha": 0.5, "variant": "wgmma"}
    if epilogue:
        inputs = (lies((m, k), dtype, False), lies((n, k), dtype, False),
                  make_spec((n,), dtype, 16), make_spec((m, n), dtype, 16))  # fmt: skip
        attrs |= {"extras": ("bias", "residual"), "activation": activation}
    else:
        inputs = lies((m, k), dtype, layout[0] == "T"), lies((k, n), dtype, layout[1] == "T")
    call, ir = one_launch("linear" if epilogue else "matmul", inputs, y, CAPS, **attrs)
    assert call.kernel.name == "wgmma"
    return Launch(call, inputs[0], inputs[1]), ir


def ended(launch: Launch) -> tuple[list[Array], Array, Array]:
    """The words of a product with an epilogue; its sums with their bias, what is added, exact."""
    rng, y = np.random.default_rng(3), launch.call.tensors[-1].spec
    specs = (launch.a, launch.b, make_spec(y.shape[1:], f16, 16), y)
    values = [rng.standard_normal(s.shape) for s in specs]
    words = [laid_out(v, s, BEYOND) for v, s in zip(values, specs, strict=True)]
    words.append(np.full(y.storage_bytes // 4, 0x7FC07FC0, np.uint32))
    a, b, bias, residual = (rounded(v, f16) for v in values)
    return words, a @ b.T * 0.5 + bias, residual


@pytest.mark.parametrize("tile", TILES, ids=name)
def test_every_tile_in_every_layout(tile: WgmmaTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles past both edges, each group with several; once around the ring and a tail of k."""
    monkeypatch.setattr(wgmma_tiles, "WGMMA_TILES", {tile: 1})
    monkeypatch.setattr(wgmma_tiles, "_alone", lambda *_: False)
    m, n, k = tile.bm + 3, tile.bn + 5, tile.bk * (tile.stages + 1) + 8
    layouts = LAYOUTS if tile.bm == 64 else ("NT", "TN")
    for layout in (x for x in layouts if tile.takes(x[0] == "N", x[1] == "T")):
        launch, ir = lowered(m, n, k, layout=layout)
        assert dict(launch.call.constants)["tile"] == tile and ir.workgroup == tile.threads
        got, wanted = ran(launch, ir)
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 8), (17, 9, 40), (130, 70, 31), (64, 64, 32)], ids=str)
def test_sizes_off_every_boundary(size: tuple[int, int, int], dtype: DType, small: None) -> None:
    launch, ir = lowered(*size, dtype)
    got, wanted = ran(launch, ir)
    near = 2 * dtype.epsilon
    np.testing.assert_allclose(got, wanted, rtol=near, atol=near * np.abs(wanted).max())


@pytest.mark.parametrize("resident", [1, 2, 5])
def test_groups_take_what_there_is(resident: int, small: None) -> None:
    """One group alone, several with a tile more or less, one for each tile."""
    launch, ir = lowered(300, 60, 100)
    assert launch.call.groups == 5
    got, wanted = ran(launch, ir, resident=resident)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("resident", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("n", "across"), [(148, (1, 3)), (84, (0, 3)), (212, (2, 3)), (180, (2, 2))], ids=str
)
def test_the_last_columns_have_narrower_tiles(
    n: int, across: tuple[int, int], resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many groups take them in turn, wide or narrow ones first."""
    monkeypatch.setattr(wgmma_tiles, "WGMMA_TILES", {NARROWER: 64})
    monkeypatch.setattr(wgmma, "widths_of", lambda *_: (0, *across))
    launch, ir = lowered(130, n, 136, epilogue=n == 148, activation="")
    assert launch.call.groups == 3 * sum(across)
    if n == 148:
        y = launch.call.tensors[-1].spec
        specs = (launch.a, launch.b, make_spec((n,), f16, 16), y)
        values = [np.random.default_rng(3).standard_normal(s.shape) for s in specs]
        words = [laid_out(v, s, BEYOND) for v, s in zip(values, specs, strict=True)]
        words.append(np.full(y.storage_bytes // 4, 0x7FC07FC0, np.uint32))
        simulate(ir, words, parameters(launch.call, ir), launch.call.groups, resident=resident)
        a, b, bias, residual = (rounded(v, f16) for v in values)
        got, wanted = result(launch.call, words), a @ b.T * 0.5 + bias + residual
    else:
        got, wanted = ran(launch, ir, resident=resident)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())


def test_widths_make_the_busiest_multiprocessor_least_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a count of every tile says; where widths cost alike, tiles are as many as rounds hold."""
    monkeypatch.setattr(wgmma_tiles, "MULTIPROCESSORS", 7)
    monkeypatch.setattr(wgmma_tiles, "WGMMA_TILES", {NARROWER: 64})
    for m, n in itertools.product((60, 200, 449), (20, 64, 333, 900)):
        problem = Problem(1, m, n, 64, 64, 64, n, 0, 0, 0, a_along_k=True, b_along_k=True)
        costs = {}
        for wide in range(n // 64 + 1):
            rest = -(-(n - 64 * wide) // 32)
            tiles = [64] * (-(-m // 64) * wide) + [32] * (-(-m // 64) * rest)
            costs[wide] = max(sum(tiles[place::7]) for place in range(7)), wide, rest
        assert widths_of(NARROWER, problem) == min(costs.values())


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "turns"])
@pytest.mark.parametrize(
    ("activation", "tile"), [("", SMALL), ("", TALL), ("", WHOLE), ("gelu", WHOLE)]
)
def test_an_epilogue_sees_f32_sums(
    activation: str, tile: WgmmaTile, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through shared memory, and with both an activation and a residual from registers.

    Where a group has one tile both consumers have it, and residuals are loaded before its products;
    where it has several they are brought where the results will lie, if those all have room.
    """
    monkeypatch.setattr(wgmma_tiles, "WGMMA_TILES", {tile: 1})
    if not alone:
        monkeypatch.setattr(wgmma_tiles, "_alone", lambda *_: False)
    m = tile.bm + 6
    launch, ir = lowered(m, 72, 40, epilogue=True, activation=activation)
    assert dict(launch.call.constants)["staged"] is not bool(activation)
    used = dict(launch.call.constants)["tile"]
    assert used == replace(tile, turns=not alone)
    brought = tile.whole and not (alone or activation)
    assert dict(launch.call.constants)["brought"] is brought
    words, sums, residual = ended(launch)
    simulate(ir, words, parameters(launch.call, ir), launch.call.groups)
    if activation:
        sums = sums * (1 + np.vectorize(erf)(sums / np.sqrt(2))) / 2
    wanted = sums + residual
    np.testing.assert_allclose(result(launch.call, words), wanted, rtol=2e-3, atol=4e-3)


def test_parts_of_a_divided_depth_are_f32(small: None) -> None:
    launch, ir = lowered(19, 21, 72, out=f32)
    got, wanted = ran(launch, ir)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("out", "activation", "whole"), [
    (f16, "", True), (f32, "", False), (f16, "gelu", False)])  # fmt: skip
def test_tiles_have_room_for_a_residual_that_is_brought(
    out: DType, activation: str, whole: bool
) -> None:
    """One that is loaded leaves that room to a stage more."""
    x, weight, y = (12000, 1280), (1280, 1280), make_spec((12000, 1280), out, 16)
    inputs = make_spec(x, f16, 16), make_spec(weight, f16, 16), y
    more = {"extras": ("residual",), "activation": activation, "dtype": out.name}
    chosen = dict(one_launch("linear", inputs, y, CAPS, **more)[0].constants)
    assert (chosen["tile"].whole, chosen["brought"]) == (whole, whole)


@pytest.mark.parametrize("tile", WGMMA_TILES, ids=name)
def test_a_tile_is_chosen_where_its_memory_suffices(
    tile: WgmmaTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgmma_tiles, "WGMMA_TILES", {tile: 1})
    needed = shared_layout(lowered(4096, 4096, 1280, epilogue=True, activation="")[1]).size
    problem = lowered(4096, 4096, 1280)[0].call
    sizes = {n: int(v) for n, v in problem.scalars if n in Problem.__struct_fields__}
    asked = Problem(**sizes, batch=1, a_along_k=True, b_along_k=True)
    for room in range(needed - 1024, needed, 128):
        assert wgmma_tile_of(asked, (f16, f16), replace(CAPS, max_shared=room)) is None
    assert wgmma_tile_of(asked, (f16, f16), CAPS) == tile


@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize("n", [9, 59, 97])
def test_results_may_lie_where_the_residual_does(
    n: int, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile's is brought before its results leave; columns past the edge in either part."""
    monkeypatch.setattr(wgmma_tiles, "WGMMA_TILES", {WHOLE: 1})
    monkeypatch.setattr(wgmma_tiles, "_alone", lambda *_: False)
    launch, ir = lowered(130, n, 72, epilogue=True, activation="")
    assert dict(launch.call.constants)["brought"]
    words, sums, residual = ended(launch)
    words[-1] = words[-2]
    simulate(ir, words, parameters(launch.call, ir), launch.call.groups, resident=resident)
    wanted = sums + residual
    got = result(launch.call, words)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())


def test_nothing_is_written_outside(small: None) -> None:
    """Rows past the last and the pads of each row keep what they held."""
    launch, ir = lowered(65, 9, 16)
    words, _ = operands(launch)
    simulate(ir, words, parameters(launch.call, ir), launch.call.groups)
    spec = launch.call.tensors[-1].spec
    rows = words[-1].view(np.uint16)[: 65 * spec.strides[0]].reshape(65, -1)
    assert rows.shape[1] == 16 and (rows[:, 9:] == 0x7FC0).all()
    assert (words[-1].view(np.uint16)[65 * spec.strides[0] :] == 0x7FC0).all()


@pytest.mark.parametrize("tile", [SMALL, NARROWER, WHOLE], ids=name)
def test_every_wait_and_fence_is_needed(tile: WgmmaTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the simulator reports, or the result is wrong; the same one place further."""
    monkeypatch.setattr(wgmma_tiles, "WGMMA_TILES", {tile: 1})
    monkeypatch.setattr(wgmma_tiles, "_alone", lambda *_: False)
    if tile.last:
        monkeypatch.setattr(wgmma, "widths_of", lambda *_: (0, 1, 1))
    n = 90 if tile.last else 60
    launch, ir = lowered(300, n, 136, epilogue=tile.whole, activation="")
    seen: set[str] = set()
    for what, broken in mutations(ir):
        kind = what.split()[0] if what[:2] != "no" else what.split()[1]
        if kind not in HOPPER | BARRIERS:
            continue
        if tile.whole:
            words, *terms = ended(launch)
            wanted = sum(terms)
        else:
            words, wanted = operands(launch)
        try:
            simulate(broken, words, parameters(launch.call, ir), launch.call.groups, resident=1)
        except SimulationError:
            seen.add(kind)
            continue
        wrong = ~np.isclose(result(launch.call, words), wanted, rtol=2e-2, atol=2e-2)
        assert wrong.any(), what
        seen.add(kind)
    assert seen >= {"mbar_wait", "wgmma_wait", "warpgroup_barrier", "async_fence", "tma_load"}


@needs_ptxas
@pytest.mark.first("tile")
@pytest.mark.parametrize("tile", [*TILES, WIDE], ids=name)
def test_tiles_stay_in_registers(
    tile: WgmmaTile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No spills, no stack, no warning, with an epilogue or without."""
    monkeypatch.setattr(wgmma_tiles, "WGMMA_TILES", {tile: 1})
    layouts = [x for x in ("NT", "TN") if tile.takes(True, x == "NT")]
    cases = [lowered(4096, 4096, 4096, layout=x)[1] for x in layouts]
    if tile.whole:
        whole, ir = lowered(4096, 4096, 1280, epilogue=True, activation="")
        assert dict(whole.call.constants)["brought"]
        cases.append(ir)
    if tile in WGMMA_TILES:
        cases.append(lowered(4097, 4093, 4099, bf16, epilogue=True)[1])
        for activation in ("gelu", ""):  # of one tile for each group
            call, ir = lowered(300, 400, 4096, epilogue=True, activation=activation)
            assert tile.last or not dict(call.call.constants)["tile"].turns
            cases.append(ir)
        inputs = make_spec((4097, 384), f16, 16), make_spec((4096, 384), f16, 16)
        more = {"extras": ("bias",), "activation": "gelu_tanh", "variant": "wgmma"}
        y, bias = make_spec((4097, 4096), f16, 16), make_spec((4096,), f32, 16)
        cases.append(one_launch("linear", (*inputs, bias), y, CAPS, **more)[1])
    for ir in cases:
        report, _ = assemble(emit_ptx(ir, "sm_90a"), "sm_90a", tmp_path)
        registers, stack = resources(report)
        assert stack == 0 and "C75" not in report, report
        assert registers * tile.threads <= 65_536
        assert shared_layout(ir).size <= CAPS.max_shared


def test_descriptors_address_the_groups_own_memory(small: None) -> None:
    """Addresses of a cluster have bits above it, which would change the distance of panels."""
    text = emit_ptx(lowered(64, 65, 72, layout="NN")[1], "sm_90a")
    for number in (0, 1):
        first = f"and.b32 %low{number}, %smem, 0x3ffff;\n  shr.u32 %low{number}, %low{number}, 4;"
        assert first in text


def halves(tile: WgmmaTile, problem: Problem) -> tuple[float, int, int]:
    """Half of the columns for wide tiles, the rest for narrower ones, where there are some."""
    wide = -(-problem.n // tile.across)
    if not tile.last:
        return 0, wide, 0
    wide //= 2
    return 0, wide, -(-(problem.n - wide * tile.across) // tile.widths[1].across)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("tile", [WIDE, *(t for t in WGMMA_TILES if t.last)], ids=name)
def test_tiles_on_a_device(
    device: ct.Device, tile: WgmmaTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past every edge, B along k and across, at once and replayed in a graph; of two widths."""
    monkeypatch.setattr(wgmma, "wgmma_tile_of", lambda *_: tile)
    monkeypatch.setattr(wgmma, "widths_of", halves)
    executor = device.executor  # without the plans of other tiles
    monkeypatch.setattr(executor, "plans", Plans(executor.backend))
    rng = np.random.default_rng(8)

    def along(x: ct.Tensor, w: ct.Tensor) -> ct.Tensor:
        return apply("matmul", x, w.T, alpha=1.0, variant="wgmma")

    def across(x: ct.Tensor, w: ct.Tensor) -> ct.Tensor:
        return apply("matmul", x, w, alpha=1.0, variant="wgmma")

    sizes = (3, 5, 8), (1000, 700, 520), (257, 129, 72)
    for m, n, k in sizes:
        a, b = (rng.standard_normal(s).astype(np.float16) for s in ((m, k), (n, k)))
        wanted = a.astype(np.float64) @ b.T.astype(np.float64)
        for product, right in ((along, b), (across, b.T.copy())):
            if not tile.takes(True, product is along):
                continue
            given = ct.asarray(a, device=device), ct.asarray(right, device=device)
            for got in (product(*given), device.compile(product, *given)(*given)):
                near = 2e-3 * np.abs(wanted).max()
                np.testing.assert_allclose(got.numpy(), wanted, rtol=2e-3, atol=near)


def test_a_launch_has_what_its_maps_need(small: None) -> None:
    """Extents and strides ride with the launch: another size is the same program."""
    one, ir = lowered(300, 200, 136)
    other, again = lowered(17, 9, 40)
    assert ir is again and ir.resident and len(ir.maps) == 3
    words = parameters(one.call, ir)
    a, b, y = ir.maps
    assert [int(words[p]) for p in (*a.extents, *b.extents, *y.extents)] == [
        136, 300, 1, 136, 200, 1, 200, 300, 1]  # fmt: skip
    assert int(words[a.strides[0]]) == 136 and a.box == (32, 64, 1) and a.swizzle == 64
    assert one.call.groups == 20 and other.call.groups == 1


def test_a_map_that_cannot_be_made_is_refused_before_it_is_launched(small: None) -> None:
    launch, ir = lowered(17, 9, 40)
    scalars = tuple((n, 41 if n == "lda" else v) for n, v in launch.call.scalars)
    with pytest.raises(LimitError, match=r"kernel 'wgmma': a tensor map .*16 bytes, got \[40, 17"):
        parameter_words(replace(launch.call, scalars=scalars), ir)
