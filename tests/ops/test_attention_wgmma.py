"""Attention by warpgroups: its tiles in the simulator, roles and all, and through `ptxas`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, f16, i32, narrow, widen
from centella.emit.ptx import emit_ptx, shared_layout
from centella.errors import SimulationError
from centella.lang.ir import BARRIERS, HOPPER
from centella.op.op import Form
from centella.ops.attention import choice, wgmma
from centella.ops.attention.op import ATTENTION
from centella.ops.attention.problem import AttentionAttrs
from centella.ops.attention.wgmma import TALL, WGMMA, WGMMA_TILES
from centella.ops.attention.wgmma_tile import WgmmaTile
from centella.ops.attention.wgmma_work import CROSSING, heads_together
from centella.ops.hopper import MULTIPROCESSORS
from centella.simulator.run import simulate
from centella.specs import make_spec
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.support.attention import CAPS, Plan, Shape, error, exact, on_device, planned
from tests.support.lang_common import ORDERS, Tensor
from tests.support.mutations import MEETS, mistakes

SMALL = WgmmaTile(32, late=True)
ORDER = 10  # the shared array: behind Q, K, V, Y and six of barriers
TILES = [(most, tile) for most, *tiles, _ in WGMMA_TILES for tile in tiles] + [*TALL.items()]


def name_of(x: Any) -> str:
    return f"{x.queries}x{x.keys}x{x.stages}x{x.parts}" if isinstance(x, WgmmaTile) else str(x)


SHIPPED = pytest.mark.parametrize(("dim", "tile"), TILES, ids=name_of)


def kind_of(tile: WgmmaTile) -> DType:
    return bf16 if tile.parts == 2 else f16


@SHIPPED
def test_shipped_tiles(dim: int, tile: WgmmaTile) -> None:
    """Past the last group's queries, once around the rings and into a tile's first keys."""
    shape = (1, 1, 1, tile.queries + 3, tile.keys * (tile.stages + 1) + 5, dim)
    plan = planned("wgmma", shape, kind_of(tile), tile, causal=True)
    laid = shared_layout(plan.ir()).size
    assert laid <= tile.shared_bytes(dim) <= laid + 64
    assert plan.ir().workgroup == tile.threads and plan.calls[0].groups == 2
    plan.check()


CASES: dict[str, tuple[Shape, WgmmaTile, dict[str, Any]]] = {
    "one key": ((1, 1, 1, 1, 1, 16), SMALL, {}),
    "padded head, cross": ((1, 2, 1, 5, 70, 40), SMALL, {}),
    "two panels": ((1, 1, 1, 70, 64, 72), SMALL, {}),
    "lengths": ((4, 1, 1, 9, 70, 64), SMALL, {"lengths": [0, 33, 64, 70]}),
    "starts": ((3, 2, 2, 70, 90, 16), SMALL, {"starts": [-30, 0, 49]}),
    "causal, fewer keys": ((1, 4, 2, 140, 90, 16), SMALL, {"causal": True}),
    "lengths, causal": ((2, 2, 1, 70, 150, 16), SMALL, {"causal": True, "lengths": [70, 150]}),
    "window": ((3, 2, 2, 140, 290, 16), SMALL, {"starts": [-30, 0, 400], "window": 50}),
    "window of both sides": ((1, 2, 1, 140, 140, 16), SMALL, {"window": 20}),
    "softcap, sinks": (
        (2, 2, 1, 70, 150, 16),
        SMALL,
        {"lengths": [70, 150], "softcap": 1.5, "sinks": [2.0, -np.inf]},
    ),
    "one consumer": ((1, 1, 1, 70, 100, 16), WgmmaTile(48, 1), {}),
    "keys kept": ((1, 1, 1, 130, 200, 16), replace(SMALL, late=False, kept=True), {}),
    "three consumers": ((1, 1, 1, 200, 100, 16), WgmmaTile(32, 3, 3), {"causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_and_sizes(name: str) -> None:
    shape, tile, masks = CASES[name]
    planned("wgmma", shape, f16, tile, **masks).check()


@pytest.mark.parametrize(("batch", "queries"), [(1, 128), (8, 192)])
def test_tall_tiles_where_rounds_are_many(batch: int, queries: int) -> None:
    """Whisper's encoder: of one window 240 tiles take as many rounds as 160 taller ones."""
    q, y = (make_spec(shape, f16, 16) for shape in ((batch, 20, 1500, 64), (batch, 1500, 20, 64)))
    form = Form(ATTENTION, (q, q, q), (y,), AttentionAttrs((), 0.125, False))
    tile = wgmma.tile_of(form, CAPS)
    assert tile is not None and tile.queries == queries


@pytest.mark.turns("resident")
@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize("name", ["lengths, causal", "window", "softcap, sinks", "two panels"])
def test_groups_take_tiles_in_turn(name: str, resident: int) -> None:
    """Of few groups each has many tiles, forwards and backwards; heads come one at a time."""
    shape, tile, masks = CASES[name]
    with mock.patch.object(wgmma, "CACHED", 1):
        plan = planned("wgmma", (*shape[:3], 270, *shape[4:]), f16, tile, **masks)
    plan.check(resident=resident)


@pytest.mark.parametrize(
    ("pairs", "blocks", "past", "most", "uneven"),
    [(32, 64, 0, 32, 1.01), (32, 64, 0, 20, 1.01), (32, 64, 16, 20, 1.02), (64, 16, 48, 40, 1.04)],
)
def test_groups_have_as_much_to_do(
    pairs: int, blocks: int, past: int, most: int, uneven: float
) -> None:
    """The busiest has so many times the mean; 16 x 32 tiles are not whole rounds."""
    together = heads_together(pairs, blocks, most, past=past)
    assert 1 <= together <= most
    order = [
        (pair, block)
        for first in range(0, pairs, together)
        for block in reversed(range(blocks))
        for pair in range(first, min(first + together, pairs))
    ]
    assert len({*order}) == pairs * blocks
    groups = [0.0] * MULTIPROCESSORS
    for number, (_, block) in enumerate(order):
        turn, within = divmod(number, MULTIPROCESSORS)
        groups[-1 - within if turn % 2 else within] += past + block + 1 + CROSSING
    assert max(groups) < uneven * sum(groups) / len(groups)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "lq", "how", "expected"),
    [
        (1, 8, 8192, {"causal": True}, 32), (1, 32, 8192, {"causal": True}, 3),
        (1, 32, 8192, {}, 10), (4, 8, 8192, {"causal": True}, 12),
        (2, 8, 2048, {"causal": True}, 16), (2, 8, 2048, {"masks": ("starts",)}, 32),
        (2, 8, 2048, {"causal": True, "window": 512}, 40),
    ],
)  # fmt: skip
def test_heads_at_a_time_stay_in_the_cache(
    batch: int, kv_heads: int, lq: int, how: dict[str, Any], expected: int
) -> None:
    """Of 32 heads behind 8 192 keys in all: those of ten heads of values at most.

    A cache counts as half full; within a window all tiles of queries have as many keys.
    """
    shapes = ((32, lq), (kv_heads, 8192), (kv_heads, 8192))
    inputs = [make_spec((batch, n, length, 128), f16, 16) for n, length in shapes]
    attrs = AttentionAttrs(scale=128**-0.5, **{"masks": (), **how})
    inputs += [make_spec((batch,), i32, 16) for _ in attrs.masks]
    y = make_spec((batch, lq, 32, 128), f16, 16)
    form = Form(ATTENTION, tuple(inputs), (y,), attrs)
    assert dict(form.lower(CAPS).calls[-1].scalars)["together"] == expected


@pytest.mark.parametrize("ahead", [0.3, 4.02, 6.996, 7.999])
def test_weights_add_up_to_one(ahead: float) -> None:
    """Though their sum is of those before rounding: a key decides that passes the maximum."""
    tile = WgmmaTile(32, 3, 3, kept=True)
    plan = planned("wgmma", (1, 1, 1, 64, 64, 16), f16, tile, scale=math.log(2))
    q, k, v = (np.zeros(s.shape, np.float32) for s in plan.inputs[:3])
    q[..., 0], v[...] = 1, 1
    k[..., 0] = -9.0
    k[0, 0, 40, 0], k[0, 0, 3, 0] = 0, ahead  # the later keys come first
    assert np.abs(plan.run(q, k, v) - 1).max() <= 2**-10


def test_results_are_in_rows_of_any_width() -> None:
    """Of a head that fills no chunks, and of texts end to end, they leave word by word."""
    for dim in (16, 20):
        plan = planned("wgmma", (2, 2, 1, 70, 40, dim), f16, SMALL)
        stores = [s[0] for s in plan.ir().body if s[0] in ("store", "tma_store")]
        assert set(stores) == {"store" if dim % 8 else "tma_store"}
        plan.check(resident=2)


@pytest.mark.parametrize(("causal", "first"), [(False, 109), (True, 109)])
def test_no_key_before_a_window_is_copied(causal: bool, first: int) -> None:
    """Tiles of keys begin where the window of a group's first query does: NaN before it is not met.

    Keys 109 on are the first that the second group's queries, 128 on, see.
    """
    plan = planned("wgmma", (1, 1, 1, 200, 200, 16), f16, SMALL, causal=causal, window=20)
    q, k, v = plan.random()
    v[0, 0, :first] = np.nan
    assert np.isfinite(plan.run(q, k, v)[:, 128:]).all()


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: str) -> None:
    shape, tile = (2, 2, 1, 66, 53, 24), replace(SMALL, parts=2)
    planned("wgmma", shape, bf16, tile, lengths=[50, 17], causal=True).check(order=order)


def scaled(**masks: Any) -> tuple[Plan, Any, Any, Any]:
    """A plan with bf16 values that are made f16 first; of values, six decades in a column."""
    plan = planned("wgmma", (2, 2, 1, 66, 70, 32), bf16, SMALL, **masks)
    assert [c.kernel.name for c in plan.calls] == ["attention_values", "attention_wgmma"]
    q, k, v = plan.random()
    return plan, q, k, v * np.logspace(-6, 0, 70)[:, None]


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30], ids=str)
def test_values_made_f16(size: float) -> None:
    """Of any exponent; NaN past the last key that counts."""
    plan, q, k, v = scaled(causal=True, lengths=[70, 60])
    v *= size
    v[1, 0, 60:] = np.nan
    assert error(plan.run(q, k, v) / size, plan.exact(q, k, v) / size) < 4e-6


@pytest.mark.parametrize(
    ("batch", "lk", "how"),
    [
        (1, 70, (512, 1, True)), (1, 300, (512, 2, True)), (1, 2100, (512, 8, False)),
        (80, 40, (64, 2, True)), (80, 300, (128, 8, True)),
    ],
)  # fmt: skip
def test_values_made_f16_in_groups_of_any_size(
    batch: int, lk: int, how: tuple[int, int, bool]
) -> None:
    """Of few heads all threads that there may be; rows stay in registers where they have room."""
    lengths = [lk - 1 - i % 3 * (lk // 3) for i in range(batch)]
    plan = planned("wgmma", (batch, 1, 2, 1, lk, 32), bf16, SMALL, lengths=lengths)
    call = plan.calls[0]
    assert tuple(dict(call.constants)[n] for n in ("threads", "together", "once")) == how
    assert call.workgroup == how[0]
    q, k, v = plan.random()
    v *= np.logspace(-2, 3, lk)[:, None]
    for row, length in zip(v, lengths, strict=True):
        row[:, length:] = np.nan
    words = plan.words(q, k, v)
    plan.simulated(words, 0)
    kept, scales = (
        Tensor(words[-2 + n], spec.dtype, spec.shape, spec.strides, 0).numpy().astype(np.float64)
        for n, spec in enumerate(plan.kept)
    )
    wanted = widen(narrow(v, bf16), bf16)
    factors = scales.reshape(batch, 2, 1, 2, 1).repeat(16, axis=-1).reshape(batch, 2, 1, 32)
    for got, row, factor, length in zip(kept, wanted, factors, lengths, strict=True):
        got, row = got[:, :length] * factor, row[:, :length]
        assert (np.isclose(got, row, 0, 2.0**-40 * abs(row).max())).all()
        assert (got == row)[abs(row) >= 2.0**-32 * abs(row).max()].all()


@pytest.mark.parametrize("length", [-3, 0, 1, 99])
def test_values_made_f16_of_any_length(length: int) -> None:
    """Nothing past the end is read, of a sequence without keys either; past 70 there are none."""
    plan, q, k, v = scaled(lengths=[70, length])
    v[1, 0, max(length, 0) :] = np.nan
    got, wanted = plan.run(q, k, v), plan.exact(q, k, v)
    assert error(got, wanted) < 4e-6
    assert length > 0 or not got[1].any()


def test_values_made_f16_keep_infinities() -> None:
    plan, q, k, v = scaled()
    v[0, 0, 7, 3], v[0, 0, 9, 4] = np.inf, np.nan
    got, wanted = plan.run(q, k, v), plan.exact(q, k, v)
    assert (got[0, :, :, 3] == np.inf).all() and np.isnan(got[0, :, :, 4]).all()
    others = np.arange(32)[~np.isin(np.arange(32), (3, 4))]
    assert error(got[..., others], wanted[..., others]) < 4e-6


def faulty(plan: Plan, broken: Any, words: list[Any], wanted: Any) -> bool:
    """Whether a kernel whose one group has all tiles is reported, or wrong."""
    memory = [words[r.index] for r in plan.calls[0].tensors]
    try:
        simulate(broken, memory, plan.params(), plan.calls[0].groups, resident=1)
    except SimulationError:
        return True
    return not error(plan.result(words), wanted) < 1e-6


def wrong(keys: int, stages: int, of_producer: range) -> list[str]:
    """Try each wait and fence of consumers, and these of the producer; what was told, by kind.

    Turns are for speed alone.
    """
    tile = WgmmaTile(32, stages=stages, late=True)
    plan = planned("wgmma", (1, 4, 1, 66, keys, 16), f16, tile, lengths=[keys - 2])
    arrays, ir, seen = plan.random(), plan.ir(), []
    words, wanted = plan.words(*arrays), plan.exact(*arrays)
    _, consumers = (i for i, s in enumerate(ir.body) if s[0] == "if" and s[3] is not None)
    waits = [i for i, s in enumerate(ir.body) if s[0] == "mbar_wait" and s[3] != ORDER]
    left_out = {i for n, i in enumerate(waits) if i < consumers and n not in of_producer}
    for mistake in mistakes(ir):
        kind, _, _, array = ir.body[mistake.at]
        counts = (
            kind in MEETS and kind in HOPPER | BARRIERS and (kind, array) != ("mbar_wait", ORDER)
        )
        if counts and mistake.at not in left_out:
            if faulty(plan, mistake.of(ir), [w.copy() for w in words], wanted):
                seen.append(kind)
            else:
                seen.append(mistake.label)
    return seen


def test_every_wait_is_needed() -> None:
    """Without one the simulator reports, or the result is wrong.

    The producer waits for room for queries, for keys and values, of the last tile and of the rest.
    """
    seen = wrong(70, 2, range(1, 5))
    assert {kind: seen.count(kind) for kind in seen} == {
        "mbar_wait": 15, "wgmma_wait": 5, "async_fence": 3, "warpgroup_barrier": 2,
        "tma_store_wait": 2,
    }  # fmt: skip
    assert wrong(20, 4, range(1))[0] == "mbar_wait"  # of queries, where there is room for keys


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("tile", [WgmmaTile(128), WgmmaTile(128, parts=2)], ids=name_of)
def test_on_a_device(device: ct.Device, tile: WgmmaTile) -> None:
    """bf16 with weights in two parts and with values made f16, which small problems do not take."""
    rng, shape = np.random.default_rng(6), (2, 2, 300, 128)
    arrays = [rng.standard_normal(shape) for _ in range(3)]
    masks = {"lengths": np.array([300, 170], np.int32)}
    with mock.patch.object(choice, "ORDER", (replace(WGMMA, tile=lambda form, caps: tile),)):
        got = on_device(device, arrays, bf16, "wgmma", **masks, causal=True)
    assert error(got, exact(arrays, bf16, masks, causal=True)) < 4e-6


@needs_ptxas
@pytest.mark.first("dim")
@pytest.mark.first("tile")
@SHIPPED
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_tiles_stay_in_registers(dim: int, tile: WgmmaTile, plain: bool, tmp_path: Path) -> None:
    """No spills, no stack, no warning, and as many registers as roles divide."""
    causal = {"causal": True, "lengths": [4096]}  # what plain has, and more
    sight = {"starts": [1], "sinks": [0.0] * 4, "window": 128, "softcap": 50.0}
    every: tuple[dict[str, Any], ...] = ({},) if plain else (causal, sight)
    cases = [(kind_of(tile), masks) for masks in every]
    if tile.parts == 1 and not plain:  # values of bf16 that are made f16
        cases.append((bf16, causal))
    for dtype, masks in cases:
        plan = planned("wgmma", (1, 4, 2, 4096, 4096, dim), dtype, tile, **masks)
        report, _ = assemble(emit_ptx(plan.ir(), "sm_90a"), "sm_90a", tmp_path)
        registers, stack = resources(report)
        assert stack == 0 and "C75" not in report, report
        assert registers * tile.threads <= 65_536
        assert shared_layout(plan.ir()).size <= CAPS.max_shared
