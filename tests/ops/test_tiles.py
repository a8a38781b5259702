"""Register tiles of the tables, where a device's own limits would hide them: each on the simulator
against float64, as WGSL within the bound on statements, and through `ptxas` without spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, f16, f32
from centella.emit.ptx import emit_ptx
from centella.emit.wgsl import count_statements
from centella.lang import KernelIR
from centella.op import op
from centella.ops.attention import table, tiled
from centella.ops.attention.tiles import Tile
from centella.ops.attention.weights import HIDDEN, power
from centella.ops.matmul import table as products
from centella.simulator.run import simulate
from centella.specs import Caps, make_spec
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.support.launched import one_launch, op_form

Array = np.ndarray[Any, Any]
CAPS = Caps("ptx", max_storage_buffers=64, max_workgroup=1024, max_shared=227 << 10,
            subgroups=True, arch="sm_90a", family="nvidia")  # fmt: skip
EVERY = sorted(
    {
        (tile, dim)
        for row in table.ROWS.values()
        for dim, tiles in row.tiles.items()
        for tile in tiles
    },
    key=str,
)
TILES = pytest.mark.parametrize(
    ("tile", "dim"), EVERY,
    ids=[f"{t.bq}x{t.bk}x{t.depth}x{t.unroll}-{dim}" for t, dim in EVERY],
)  # fmt: skip


def roomy(family: str = "cpu") -> ct.Device:
    """A simulator with the memory of a large GPU."""
    device = ct.device("simulator", pool="exact")
    device.backend.caps = replace(device.caps, max_shared=48 << 10, family=family)
    return device


def kernel_of(tile: Tile, dim: int, dtype: DType = f32, causal: bool = False) -> KernelIR:
    """The kernel of a tile."""
    q, y = make_spec((1, 2, 256, dim), dtype, 16), make_spec((1, 256, 2, dim), dtype, 16)
    attrs = {"masks": (), "causal": causal, "scale": 1.0, "variant": "tiled"}
    with mock.patch.object(tiled, "tile_of", return_value=tile.of(dim)):
        (call,) = op_form(op.get("attention"), (q, q, q), (y,), attrs).lower(CAPS).calls
    dtypes = tuple(r.spec.dtype for r in call.tensors)
    return call.kernel.specialise(dtypes, (), call.constants, call.workgroup, call.signature)


@TILES
def test_attention_of_every_tile(tile: Tile, dim: int) -> None:
    """Causal over more than a tile of queries and of keys; then every key, in 16 bits."""
    rng, device = np.random.default_rng(dim), roomy()
    for dtype, lq, width, near in (("f32", tile.bq + 3, dim - 3, 2e-6), ("f16", 5, dim, 2e-3)):
        lk = max(lq, tile.bk + 5)
        shapes = ((1, 1, lq, width), (1, 1, lk, width), (1, 1, lk, width))
        tensors = [ct.asarray(rng.standard_normal(s), dtype, device) for s in shapes]
        causal = dtype == "f32"
        with mock.patch.object(tiled, "tile_of", return_value=tile.of(dim)):
            got = ct.attention(*tensors, causal=causal, variant="tiled").numpy()
        wide = [t.numpy().astype(np.float64) for t in tensors]
        reference = op.get("attention").reference
        assert reference is not None
        wanted = reference(*wide, masks=(), causal=causal, scale=width**-0.5)
        np.testing.assert_allclose(got, wanted.transpose(0, 2, 1, 3), rtol=near, atol=near)


@TILES
def test_a_tile_keeps_to_the_bound_on_statements(tile: Tile, dim: int) -> None:
    assert count_statements(kernel_of(tile, dim, f16, causal=True)) <= 6000


@needs_ptxas
@TILES
def test_a_tile_stays_in_registers(tile: Tile, dim: int, tmp_path: Path) -> None:
    report, _ = assemble(emit_ptx(kernel_of(tile, dim), "sm_90a"), "sm_90a", tmp_path)
    registers, spilled = resources(report)
    assert spilled == 0 and registers * tile.threads <= 1 << 16


@pytest.mark.parametrize("dim", [5, 32])
def test_streaming_many_keys_at_a_time(dim: int) -> None:
    """As on NVIDIA by Vulkan: tiles of keys that end within, one query and more than a group."""
    rng, device = np.random.default_rng(dim), roomy("nvidia")
    for lq, lk in ((1, 33), (130, 70)):
        shapes = ((1, 2, lq, dim), (1, 1, lk, dim), (1, 1, lk, dim))
        tensors = [ct.asarray(rng.standard_normal(s), "f32", device) for s in shapes]
        got = ct.attention(*tensors, variant="stream").numpy()
        wide = [t.numpy().astype(np.float64) for t in tensors]
        reference = op.get("attention").reference
        assert reference is not None
        wanted = reference(*wide, masks=(), causal=False, scale=dim**-0.5)
        np.testing.assert_allclose(got, wanted.transpose(0, 2, 1, 3), rtol=2e-6, atol=2e-6)


@needs_ptxas
def test_an_unrolled_product_stays_in_registers(tmp_path: Path) -> None:
    (tile,) = products.ROWS["nvidia"].first["large"]
    x = make_spec((256, 256), f32, 16)
    attrs = {"extras": (), "activation": "", "variant": "large"}
    with mock.patch.dict(products.TILES, {"large": (tile,)}):
        call, ir = one_launch("linear", (x, x), x, CAPS, **attrs)
    report, _ = assemble(emit_ptx(ir, "sm_90a"), "sm_90a", tmp_path)
    registers, spilled = resources(report)
    assert dict(call.constants)["tile"] == tile
    assert spilled == 0 and registers <= 128
    assert count_statements(ir) <= 6000


@pytest.mark.parametrize("shape", [(40, 70, 32), (65, 130, 37), (1, 1, 1), (3, 20, 7)], ids=str)
def test_an_unrolled_product_masks_its_last_step(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    rng, device = np.random.default_rng(k), roomy("nvidia")
    x, w = rng.standard_normal((m, k)), rng.standard_normal((n, k))
    tensors = [ct.asarray(a, "f32", device) for a in (x, w)]
    got = ct.linear(*tensors, variant="large").numpy()
    np.testing.assert_allclose(got, x @ w.T, rtol=1e-4, atol=1e-5)
    turned = [ct.asarray(np.ascontiguousarray(a.T), "f32", device) for a in (x, w)]
    got = ct.matmul(turned[0].T, turned[1], variant="large").numpy()
    np.testing.assert_allclose(got, x @ w.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a_product_of_a_split_depth_ends_as_any_other(dtype: str) -> None:
    """Two launches; alpha, bias, GELU and residual act once, on the whole sum."""
    rng, device = np.random.default_rng(4), roomy("nvidia")
    m, n, k = 34, 30, 1024
    x, w, b, r = (rng.standard_normal(s) * 0.3 for s in ((m, k), (n, k), (n,), (m, n)))
    tensors = [ct.asarray(a, dtype, device) for a in (x, w, b, r)]
    given: dict[str, Any] = {"activation": "gelu", "alpha": 0.5}
    with ct.ledger() as led:
        got = ct.linear(*tensors[:2], bias=tensors[2], residual=tensors[3], **given).numpy()
    led.expect(launches=2)
    wide = [ct.asarray(t.numpy().astype(np.float32)) for t in tensors]
    wanted = ct.linear(*wide[:2], bias=wide[2], residual=wide[3], **given).numpy()
    near = 1e-4 if dtype == "f32" else 1e-2
    np.testing.assert_allclose(got, wanted, rtol=near, atol=near)
    turned = [ct.asarray(np.ascontiguousarray(a.T), dtype, device) for a in (x, w)]
    with ct.ledger() as led:
        got = ct.matmul(turned[0].T, turned[1], alpha=0.25).numpy()
    led.expect(launches=2)
    wide = [t.numpy().astype(np.float64) for t in turned]
    np.testing.assert_allclose(got, 0.25 * wide[0].T @ wide[1], rtol=10 * near, atol=10 * near)


def test_a_power_is_exact_enough_and_ends_in_zero() -> None:
    """4 ulp; 0 of a hidden key whatever the maximum; NaN of NaN."""

    def powers(*, x: Any, y: Any) -> None:
        at = ct.lang.global_id()
        y[at] = power(x[at])

    from centella.lang import trace
    from centella.lang.kernel_params import signature

    values = np.concatenate([np.linspace(-125, 0, 4000), [HIDDEN, -np.inf, -127.0, np.nan]])
    values = np.resize(values, 64 * 64).astype(np.float32)
    ir = trace(
        powers, signature({"x": 1}, {"y": 1}), workgroup=64, dtypes={"x": f32, "y": f32},
        unit={"x": True, "y": True}, constants={}, name="powers",
    )  # fmt: skip
    words = [values.view(np.uint32).copy(), np.zeros(values.size, np.uint32)]
    simulate(ir, words, np.zeros(len(ir.params), np.uint32), 64)
    got = words[1].view(np.float32)
    exact = np.exp2(values[:4000].astype(np.float64))
    assert (np.abs(got[:4000] - exact) <= 4 * np.spacing(exact.astype(np.float32))).all()
    assert not got[4000:4003].any() and np.isnan(got[4003])
