"""Attention by warpgroups: its tiles in the simulator, roles and all, and through `ptxas`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, f16, widen
from centella.emit.program import parameter_words
from centella.emit.ptx import emit_ptx, shared_layout
from centella.errors import LimitError, SimulationError
from centella.lang.ir import HOPPER
from centella.op import op
from centella.ops.attention import lower as attention_lower
from centella.ops.attention.choice import WGMMA_TILES
from centella.ops.attention.wgmma import WgmmaTile
from centella.simulator.run import simulate
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.ops.test_attention_mma import (
    CAPS,
    Launch,
    check,
    error,
    lowered,
    lowered_in_steps,
    operands,
    result,
    run,
    shows_nan_and_infinity,
    specialised,
    stored,
)
from tests.support.lang_common import ORDERS
from tests.support.mutations import mutations

SMALL = WgmmaTile(32, late=True)
ORDER = 8  # the shared array: behind Q, K, V and five of barriers
TILES = [(most, tile) for most, *tiles, _ in WGMMA_TILES for tile in tiles]


def name_of(x: Any) -> str:
    return f"{x.queries}x{x.keys}x{x.stages}x{x.parts}" if isinstance(x, WgmmaTile) else str(x)


SHIPPED = pytest.mark.parametrize(("dim", "tile"), TILES, ids=name_of)


def kind_of(tile: WgmmaTile) -> DType:
    return bf16 if tile.parts == 2 else f16


@SHIPPED
def test_shipped_tiles(dim: int, tile: WgmmaTile) -> None:
    """Past the last group's queries, once around the rings and into a tile's first keys."""
    shape = (1, 1, 1, tile.queries + 3, tile.keys * (tile.stages + 1) + 5, dim)
    launch = lowered(shape, kind_of(tile), tile, causal=True)
    laid = shared_layout(launch.ir).size
    assert laid <= tile.shared_bytes(dim) <= laid + 64
    assert launch.ir.workgroup == tile.threads and launch.call.groups == 2
    check(launch)


CASES: dict[str, tuple[tuple[int, int, int, int, int, int], WgmmaTile, dict[str, Any]]] = {
    "one key": ((1, 1, 1, 1, 1, 16), SMALL, {}),
    "padded head, cross": ((1, 2, 1, 5, 70, 40), SMALL, {}),
    "two panels": ((1, 1, 1, 70, 64, 72), SMALL, {}),
    "lengths": ((4, 1, 1, 9, 70, 64), SMALL, {"lengths": [0, 33, 64, 70]}),
    "starts": ((3, 2, 2, 70, 90, 16), SMALL, {"starts": [-30, 0, 49]}),
    "causal, fewer keys": ((1, 4, 2, 140, 90, 16), SMALL, {"causal": True}),
    "lengths, causal": ((2, 2, 1, 70, 150, 16), SMALL, {"causal": True, "lengths": [70, 150]}),
    "one consumer": ((1, 1, 1, 70, 100, 16), WgmmaTile(48, 1), {}),
    "three consumers": ((1, 1, 1, 200, 100, 16), WgmmaTile(32, 3, 3), {"causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_and_sizes(name: str) -> None:
    shape, tile, masks = CASES[name]
    check(lowered(shape, f16, tile, **masks))


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: str) -> None:
    shape, tile = (2, 2, 1, 66, 53, 24), replace(SMALL, parts=2)
    check(lowered(shape, bf16, tile, lengths=[50, 17], causal=True), order=order)


def made_f16(values: Any, **masks: Any) -> tuple[Any, Any]:
    """The result with bf16 values that are made f16 first, and in float64."""
    launch, calls, kept = lowered_in_steps((2, 2, 1, 66, 70, 32), bf16, SMALL, **masks)
    assert [c.kernel.name for c in calls] == ["attention_values", "attention_wgmma"]
    words, _ = operands(launch)
    words[2] = stored(values, launch.inputs[2])
    words += [np.full(s.storage_bytes // 4, 0x7FC07FC0, np.uint32) for s in kept]
    for call in calls:
        ir = specialised(call)
        params = np.array(parameter_words(call, ir)[0], np.uint32)
        simulate(ir, [words[r.index] for r in call.tensors], params, call.groups)
    wide = [widen(words[n].view(np.uint16), bf16).astype(np.float64).reshape(s.shape)
            for n, s in enumerate(launch.inputs[:3])]  # fmt: skip
    formula = op.get("attention").reference
    assert formula is not None
    attrs = {n: launch.attrs[n] for n in ("masks", "causal", "scale")}
    words[-1] = words[len(launch.inputs)]
    return result(launch, words).astype(np.float64), formula(*wide, *launch.masks.values(), **attrs)


def random_values(size: float) -> Any:
    """Six decades in a column."""
    values = np.random.default_rng(4).standard_normal((2, 1, 70, 32))
    return values * size * np.logspace(-6, 0, 70)[:, None]


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30], ids=str)
def test_values_made_f16(size: float) -> None:
    """Of any exponent; NaN past the last key that counts."""
    values = random_values(size)
    values[1, 0, 60:] = np.nan
    got, wanted = made_f16(values, causal=True, lengths=[70, 60])
    assert error(got / size, wanted / size) < 4e-6


def test_values_made_f16_keep_infinities() -> None:
    values = random_values(1.0)
    values[0, 0, 7, 3], values[0, 0, 9, 4] = np.inf, np.nan
    got, wanted = made_f16(values)
    assert (got[0, :, :, 3] == np.inf).all() and np.isnan(got[0, :, :, 4]).all()
    others = np.arange(32)[~np.isin(np.arange(32), (3, 4))]
    assert error(got[..., others], wanted[..., others]) < 4e-6


def test_what_does_not_count_may_hold_anything() -> None:
    """NaN past the lengths; a NaN and an infinity among the rest."""
    launch = lowered((2, 1, 1, 18, 40, 16), f16, SMALL, lengths=[19, 0])
    words, wanted = operands(launch)
    for n in (1, 2):
        held = words[n].view(np.float16).reshape(2, 40, 16)
        held[np.arange(40) >= np.array([[19], [0]])] = np.nan
    got = run(launch, words)
    assert error(got, wanted) < 2e-7 and not got[1].any()
    shows_nan_and_infinity(SMALL)


def test_a_maximum_that_moves() -> None:
    """By more than the slack and by less, up and down the keys, in scores far apart."""
    launch = lowered((1, 3, 3, 18, 96, 16), f16, SMALL, scale=0.5)
    words, _ = operands(launch)
    q, k = (words[n].view(np.float16).reshape(3, -1, 16) for n in (0, 1))
    q[:] = 0
    q[..., 0] = 2
    steep = np.linspace(-800, 800, 96)
    k[..., 0] = np.stack([steep, steep[::-1], np.arange(96) // 16 * 4.0])
    v = words[2].view(np.float16).reshape(3, 96, 16).astype(np.float64)
    weights = np.exp(k[..., 0].astype(np.float64) - k[..., 0].max(1, keepdims=True))
    wanted = (weights[..., None] * v).sum(1) / weights.sum(1, keepdims=True)
    got = run(launch, words)
    for head in range(3):
        assert error(got[0, :, head], np.broadcast_to(wanted[head], (18, 16))) < 2e-7


def faulty(launch: Launch, broken: Any, words: list[Any], wanted: Any) -> bool:
    """Whether a kernel is reported, or wrong."""
    params = np.array(parameter_words(launch.call, launch.ir)[0], np.uint32)
    try:
        simulate(broken, words, params, launch.call.groups)
    except SimulationError:
        return True
    return not error(result(launch, words).astype(np.float64), wanted) < 1e-6


def test_every_wait_of_a_consumer_is_needed() -> None:
    """Without one the simulator reports, or the result is wrong. Turns are for speed alone."""
    launch = lowered((1, 1, 1, 66, 78, 16), f16, WgmmaTile(16), lengths=[76])
    words, wanted = operands(launch)
    ir, seen = launch.ir, []
    _, consumers = (i for i, s in enumerate(ir.body) if s[0] == "if" and s[3] is not None)
    waits = [i for i, s in enumerate(ir.body) if s[0] == "mbar_wait"]
    others = {ir.line_of(i) for i in waits if i < consumers or ir.body[i][3] == ORDER}
    for what, broken in mutations(ir):
        no, kind, _, line = what.split()
        if no == "no" and kind in HOPPER and line not in others:
            assert faulty(launch, broken, [w.copy() for w in words], wanted), what
            seen.append(kind)
    assert {k: seen.count(k) for k in seen} == {"mbar_wait": 7, "wgmma_wait": 4, "async_fence": 1}


def test_an_infinite_value_is_no_nan() -> None:
    """A weight of bf16 is the sum of two numbers, both of which meet the infinity."""
    launch = lowered((1, 1, 1, 5, 70, 16), bf16, replace(SMALL, parts=2))
    words, _ = operands(launch)
    values = np.random.default_rng(8).standard_normal((1, 1, 70, 16)).astype(np.float32)
    values[0, 0, 20, 3], values[0, 0, 40, 5] = np.inf, -np.inf
    words[2] = stored(values, launch.inputs[2])
    got = run(launch, words)
    assert (got[..., 3] == np.inf).all() and (got[..., 5] == -np.inf).all()
    assert np.isfinite(np.delete(got, (3, 5), -1)).all()


@pytest.mark.parametrize("parts", [1, 2])
def test_the_weights_that_are_used_add_up_to_one(parts: int) -> None:
    """Nearly all weights are one number that is rounded down, as the maximum comes last."""
    tile = replace(SMALL, parts=parts)
    launch = lowered((1, 1, 1, 3, 400, 16), kind_of(tile), tile, scale=0.125)
    words, _ = operands(launch)
    q, k = np.zeros((1, 1, 3, 16), np.float32), np.zeros((1, 1, 400, 16), np.float32)
    q[..., 0], k[..., 100:, 0] = 1.0, 0.0038  # keys are taken from the last to the first
    every = (q, k, np.ones_like(k))
    words[:3] = [stored(x, spec) for x, spec in zip(every, launch.inputs, strict=True)]
    np.testing.assert_array_equal(run(launch, words), 1.0)


@pytest.mark.devices("simulator", "webgpu", "cuda")
def test_it_is_refused_where_it_does_not_fit(device: ct.Device) -> None:
    with pytest.raises(LimitError, match="variant 'wgmma' takes f16 or bf16 with rows on 16 bytes"):
        ct.attention(*[ct.zeros((1, 1, 20, 16), device=device)] * 3, variant="wgmma").numpy()
    wide = ct.zeros((1, 1, 20, 136), "f16", device)
    with pytest.raises(LimitError, match="heads of at most 128"):
        ct.attention(wide, wide, wide, variant="wgmma").numpy()


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("tile", [WgmmaTile(128), WgmmaTile(128, parts=2)], ids=name_of)
def test_on_a_device(device: ct.Device, tile: WgmmaTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 with weights in two parts and with values made f16, which small problems do not take."""
    monkeypatch.setattr(attention_lower, "wgmma_tile_of", lambda form, caps: tile)
    rng, shape = np.random.default_rng(6), (2, 2, 300, 128)
    q, k, v = (ct.asarray(rng.standard_normal(shape), "bf16", device) for _ in range(3))
    lengths = ct.asarray(np.array([300, 170], np.int32), device=device)
    got = ct.attention(q, k, v, lengths=lengths, causal=True, variant="wgmma")
    wide = [x.astype("f32").numpy().astype(np.float64) for x in (q, k, v)]
    formula = op.get("attention").reference
    assert formula is not None
    wanted = formula(*wide, lengths.numpy(), masks=("lengths",), causal=True, scale=128**-0.5)
    result = got.astype("f32").numpy().astype(np.float64)
    assert error(result, wanted.transpose(0, 2, 1, 3)) < 4e-6


@needs_ptxas
@SHIPPED
def test_tiles_stay_in_registers(dim: int, tile: WgmmaTile, tmp_path: Path) -> None:
    """No spills, no stack, no warning, and as many registers as roles divide."""
    every: tuple[dict[str, Any], ...] = ({}, {"causal": True, "lengths": [4096]}, {"starts": [1]})
    cases = [(kind_of(tile), masks) for masks in every]
    if tile.parts == 1:  # values of bf16 that are made f16
        cases.append((bf16, every[1]))
    for dtype, masks in cases:
        launch = lowered((1, 4, 2, 4096, 4096, dim), dtype, tile, **masks)
        report, _ = assemble(emit_ptx(launch.ir, "sm_90a"), "sm_90a", tmp_path)
        registers, stack = resources(report)
        assert stack == 0 and "C75" not in report, report
        assert registers * tile.threads <= 65_536
        assert shared_layout(launch.ir).size <= CAPS.max_shared
