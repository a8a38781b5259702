"""Attention over texts that lie end to end."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.check.cases.case import rng_of
from centella.dtypes import bf16, f16, f32, i32
from centella.ops.attention.mma import LEAST_TILE, MMA_TILES
from centella.ops.attention.op import ATTENTION
from centella.ops.attention.tiles import Tile
from centella.ops.attention.wgmma_tile import WgmmaTile
from centella.specs import make_spec
from tests.emit.test_lang_ptx import needs_ptxas
from tests.ops.test_attention_cores import ARCHS, assembled
from tests.support.attention import Array, error, exact, on_device, planned
from tests.support.lang_common import ORDERS
from tests.support.launched import op_form

OFFSETS = np.array([0, 3, 3, 70, 71, 135, 199, 200], np.int32)  # of one token, of none, of tiles
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "causal": {"causal": True},
    "bias": {"bias": np.sin(np.arange(2 * 31, dtype=np.float32)).reshape(2, 31) * 3},
    "all": {"bias": np.linspace(-3, 3, 31, dtype=np.float32)[None], "window": 40, "softcap": 1.5,
            "sinks": np.array([0.5, -1.0], np.float32)},
}  # fmt: skip
IN_REGISTERS = pytest.mark.parametrize("variant", ["stream", "tiled", None])


def rows(name: str, count: int, heads: int = 2, dim: int = 16) -> list[Array]:
    rng, shape = rng_of("end to end", name), (1, heads, count, dim)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]


@IN_REGISTERS
@pytest.mark.parametrize("name", SCORES)
def test_each_text_is_a_sequence_of_its_own(
    device: ct.Device, name: str, variant: str | None
) -> None:
    """Also where keys of other texts, and rows behind the last text, are NaN."""
    options, arrays = SCORES[name], rows(name, 210)
    for x in arrays:
        x[:, :, 3:70] = x[:, :, 200:] = np.nan
    got = on_device(device, arrays, f32, variant, offsets=OFFSETS, **options)
    named = {n: x for n, x in options.items() if n in ("bias", "sinks")}
    attrs = {n: x for n, x in options.items() if n not in named}
    for begin, end in pairwise(OFFSETS):
        text = [x[:, :, begin:end] for x in arrays]
        if begin != end and begin != 3:
            wanted = exact(text, f32, named, **attrs)
            np.testing.assert_allclose(got[:, begin:end], wanted, rtol=2e-5, atol=2e-6)
    assert not got[:, 200:].any()


@IN_REGISTERS
def test_outliers_of_one_text_are_its_own(device: ct.Device, variant: str | None) -> None:
    arrays = rows("outliers", 210)
    q, k, v = arrays
    q[:, :, 71:135:9], k[:, :, 71:135:7], v[:, :, 71:135:5] = 50.0, -50.0, 1e30
    got = on_device(device, arrays, f32, variant, offsets=OFFSETS)
    for begin, end in pairwise(OFFSETS):
        if begin != end:
            wanted = exact([x[:, :, begin:end] for x in arrays], f32, {})
            np.testing.assert_allclose(got[:, begin:end], wanted, 2e-5, 2e-6 * np.abs(wanted).max())


@IN_REGISTERS
def test_rows_before_the_first_offset_are_of_the_first_text(
    device: ct.Device, variant: str | None
) -> None:
    arrays = rows("late", 90)
    late, first = (np.array([begin, 80], np.int32) for begin in (70, 0))
    wanted = on_device(device, arrays, f32, variant, offsets=first)
    np.testing.assert_array_equal(on_device(device, arrays, f32, variant, offsets=late), wanted)


@IN_REGISTERS
def test_a_text_has_the_same_bits_among_all_others(device: ct.Device, variant: str | None) -> None:
    q, k, v = rows("bits", 210)
    text = [x[:, :, 3:70].copy() for x in (q, k, v)]
    seen = []
    for offsets in ([0, 3, 70, 210, 210], [0, 100, 140, 207, 207], [0, 67, 67, 67, 210]):
        begin = next(a for a, b in pairwise(offsets) if b - a == 67)
        for whole, own in zip((q, k, v), text, strict=True):
            whole[:, :, begin : begin + 67] = own
        got = on_device(device, (q, k, v), f32, variant, offsets=np.array(offsets, np.int32))
        seen.append(got[:, begin : begin + 67])
    assert len({x.tobytes() for x in seen}) == 1


@pytest.mark.devices("webgpu", "cuda", "webgpu-hardware")
def test_lengths_compile_and_plan_nothing(device: ct.Device) -> None:
    tensors = [ct.asarray(x, device=device) for x in rows("lengths", 210)]
    every = (OFFSETS, np.linspace(0, 210, 8), np.array([0] * 7 + [210]))
    for n, offsets in enumerate(every):
        device_offsets = ct.asarray(np.asarray(offsets, np.int32), device=device)
        with ct.ledger() as led:
            ct.attention(*tensors, offsets=device_offsets).numpy()
        led.expect(launches=1, **({"compiles": 0, "plans": 0} if n else {}))


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dtype", [f16, bf16], ids=lambda d: d.name)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("variant", ["mma", "wgmma"])
def test_on_tensor_cores(variant: str, name: str, dtype: Any) -> None:
    """Infinite values of a neighbour reach no other text."""
    if (variant, name) in (("wgmma", "bias"), ("wgmma", "all")):
        pytest.skip("wgmma takes no bias")
    tile = LEAST_TILE if variant == "mma" else WgmmaTile(64, parts=2 if dtype is bf16 else 1)
    plan = planned(variant, (1, 2, 1, 200, 200, 32), dtype, tile, offsets=OFFSETS, **SCORES[name])
    q, k, v = plan.random()
    assert error(plan.run(q, k, v), plan.exact(q, k, v)) < (2e-7 if dtype is f16 else 5e-6)
    wanted = plan.exact(q, k, v)
    v[:, :, 3:70] = np.inf
    got = plan.run(q, k, v)
    others = np.r_[0:3, 70:200]
    assert error(got[:, others], wanted[:, others]) < (2e-7 if dtype is f16 else 5e-6)


@pytest.mark.parametrize(
    ("variant", "tile"),
    [("stream", None), ("tiled", Tile(32, 32, 8, 4, 4)), ("mma", LEAST_TILE)],
)
@pytest.mark.parametrize("order", ORDERS)
def test_orders(variant: str, tile: Any, order: str) -> None:
    dtype = f16 if variant == "mma" else f32
    tile = tile.of(24) if isinstance(tile, Tile) else tile
    plan = planned(variant, (1, 2, 2, 200, 200, 24), dtype, tile, offsets=OFFSETS)
    arrays = plan.random()
    assert error(plan.run(*arrays, order=order), plan.exact(*arrays)) < 2e-7


@needs_ptxas
@ARCHS
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_shipped_tiles_stay_in_registers(dim: int, arch: str, tmp_path: Path) -> None:
    tiles = next(tiles for most, *tiles in MMA_TILES if dim <= most)
    for tile in tiles:
        for window in (None, 65) if tile is tiles[-1] else (None,):
            shape = (1, 4, 4, 4096, 4096, dim)
            plan = planned("mma", shape, f16, tile, offsets=OFFSETS, window=window)
            registers = assembled(plan, 0, arch, tmp_path)
            assert registers * tile.threads * tile.together <= 65_536


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lengths": [1]}, "offsets with bias or sinks, got lengths, offsets"),
        ({"starts": [1]}, "offsets with bias or sinks, got starts, offsets"),
    ],
)
def test_what_does_not_go_with_offsets(more: dict[str, Any], words: str) -> None:
    q = ct.zeros((1, 2, 4, 8), device="cpu")
    offsets = ct.asarray(np.array([0, 4], np.int32), device="cpu")
    given: dict[str, Any] = {
        n: ct.asarray(np.array(x, np.int32), device="cpu") for n, x in more.items()
    }
    with pytest.raises(ct.ShapeError, match=words):
        ct.attention(q, q, q, offsets=offsets, **given)


def test_arithmetic_is_that_of_a_batch_as_long() -> None:
    """What a submission is cut by: a text's queries do not see the others' keys."""

    def operations(batch: int, length: int, *masks: str) -> int:
        kept = make_spec((batch, 2, length, 16), f32, 16)
        inputs = (kept, kept, kept, *(make_spec((9,), i32, 16) for _ in masks))
        y = make_spec((batch, length, 2, 16), f32, 16)
        form = op_form(ATTENTION, inputs, (y,), {"masks": masks, "scale": 1.0})
        assert ATTENTION.flops is not None
        return ATTENTION.flops(form)

    assert operations(1, 8 * 64, "offsets") == operations(8, 64)


def test_offsets_of_other_shapes_are_refused() -> None:
    q, two = (ct.zeros((n, 2, 4, 8), device="cpu") for n in (1, 2))
    valid = ct.asarray(np.array([0, 4], np.int32), device="cpu")
    for x, y, offsets in ((two, two, valid), (q, q[:, :, :3], valid), (q, q, valid[None])):
        with pytest.raises(ct.ShapeError, match=r"expected offsets \[texts \+ 1\], one batch"):
            ct.attention(x, y, y, offsets=offsets)
    with pytest.raises(ct.DTypeError, match="i32 offsets, got f32"):
        ct.attention(q, q, q, offsets=valid.astype("f32"))


@pytest.mark.devices("simulator")
def test_few_keys_are_not_split(device: ct.Device) -> None:
    q = ct.zeros((1, 2, 4, 8), device=device)
    offsets = ct.asarray(np.array([0, 4], np.int32), device=device)
    with pytest.raises(ct.LimitError, match="no offsets"):
        ct.attention(q, q, q, offsets=offsets, variant="split").numpy()
