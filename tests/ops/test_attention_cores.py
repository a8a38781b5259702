"""Attention on tensor cores: in the simulator, as PTX, through `ptxas` and on a card.

What is about `wgmma` alone is in `test_attention_wgmma.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, f16
from centella.emit.ptx import emit_ptx, shared_layout
from centella.errors import LimitError
from centella.ops.attention.mma import LEAST_TILE, MMA_TILES, MmaTile
from centella.ops.attention.warp_sums import SplitTile
from centella.ops.attention.wgmma_tile import WgmmaTile
from tests.emit.test_lang_ptx import assemble, execute, needs_ptxas, resources
from tests.support.attention import CAPS, Plan, error, exact, on_device, planned, steep
from tests.support.lang_common import ORDERS

# Head sizes and tiles that the sweep on a card may try, beside the shipped ones.
OTHERS = (
    (32, MmaTile(128, 64, 4, 2)),
    (32, MmaTile(128, 128, 4, 2)),
    (64, MmaTile(64, 64, 4, 3, together=3)),
    (64, MmaTile(128, 64, 8, 2, together=1)),
    (128, MmaTile(64, 64, 4, 2)),
    (128, MmaTile(128, 64, 8, 2, together=1)),
)
SMALLER = [(most, tile) for most, _, tile in MMA_TILES] + [(64, LEAST_TILE)]
SHIPPED = [(most, tile) for most, tile, _ in MMA_TILES]
SMALL = {
    "mma": LEAST_TILE,
    "wgmma": WgmmaTile(32, late=True),
    "split_mma": SplitTile(),
    "cluster_mma": None,
    "ring": None,
}
SPLIT_BOUND = {f16: 2.5e-7, bf16: 1.6e-5}  # of `split_mma`
ON_CORES = pytest.mark.parametrize("variant", ["mma", "split_mma", "cluster_mma"])
DECODING = pytest.mark.parametrize("variant", ["split_mma", "cluster_mma"])
SIXTEEN = pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
ARCHS = pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
with_cores = pytest.mark.devices("simulator", "cuda")


def name_of(x: Any) -> str:
    return f"{x.queries}x{x.keys}x{x.warps}x{x.stages}" if isinstance(x, MmaTile) else str(x)


TILES = pytest.mark.parametrize(("dim", "tile"), [*SHIPPED, *OTHERS, *SMALLER], ids=name_of)

# -- sizes and masks ------------------------------------------------------------------------------


@TILES
def test_every_tile(dim: int, tile: MmaTile) -> None:
    """Past the last group's queries, once around the rings and into a tile's first keys."""
    shape = (1, 1, 1, tile.queries + 3, tile.keys * (tile.stages + 1) + 5, dim)
    plan = planned("mma", shape, f16, tile, causal=True)
    assert plan.ir().shared_bytes == tile.shared_bytes(dim)
    assert plan.ir().workgroup == tile.threads
    plan.check()


@SIXTEEN
@pytest.mark.parametrize("dim", [16, 20, 32, 40, 64, 72, 96, 128, 160, 256])
def test_head_sizes(dim: int, dtype: DType) -> None:
    planned("mma", (1, 2, 1, 21, 70, dim), dtype).check()


MASKS: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": [0, 33, 70]},
    "starts": {"starts": [-9, 0, 49]},
    "causal": {"causal": True},
    "key_mask": {"key_mask": np.arange(210).reshape(3, 70) % 3 > 0},
    "mask": {"mask": np.where(np.arange(70) % 5 == 2, -np.inf, np.linspace(-3, 3, 70))[None] *
             np.ones((3, 1, 37, 1))},
    "all": {"lengths": [70, 33, 1], "key_mask": np.arange(210).reshape(3, 70) % 3 > 0,
            "mask": np.linspace(-3, 3, 280).reshape(1, 4, 1, 70), "causal": True},
    "window": {"starts": [-9, 0, 60], "window": 17},
    "both sides": {"window": 9},
    "softcap": {"softcap": 1.5, "causal": True, "sinks": [0.5, -np.inf, 9.0, -1.0]},
    "bias": {"lengths": [70, 33, 1], "bias": np.sin(np.arange(4 * 21)).reshape(4, 21) * 3},
    "bias and starts": {"starts": [0, 33, 2**30], "bias": np.linspace(-3, 3, 33)[None],
                        "softcap": 1.5},
    "bias and window": {"window": 9, "bias": np.linspace(-3, 3, 165)[None]},
    "large scale": {"scale": 2.0},
    "negative scale": {"scale": -0.5, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_scales(name: str) -> None:
    planned("mma", (3, 4, 2, 37, 70, 32), f16, LEAST_TILE, **MASKS[name]).check()


@pytest.mark.parametrize("variant", SMALL)
def test_a_sink_that_is_nan_gives_nan(variant: str) -> None:
    """For its head alone; also where no key is seen."""
    lq = 2 if variant in ("split_mma", "cluster_mma", "ring") else 37
    tile, sinks = SMALL[variant], [0.5, -np.inf, np.nan, -1.0]
    plan = planned(variant, (2, 4, 2, lq, 70, 32), f16, tile, lengths=[0, 70], sinks=sinks)
    arrays = plan.random()
    got, wanted = plan.run(*arrays), plan.exact(*arrays)
    assert np.isnan(got[:, :, 2]).all() and np.isnan(wanted[:, :, 2]).all()
    assert error(*(np.delete(x, 2, 2) for x in (got, wanted))) < SPLIT_BOUND[f16]


@ON_CORES
def test_blocks(variant: str) -> None:
    """Keys past the first block of 5, some of them in blocks that two sequences share."""
    blocks = np.array([[4, 1, 3], [4, 2, 0], [9, -1, 0]])  # the last one has none of the pool
    plan = planned(variant, (3, 4, 2, 2, 5, 40), bf16, starts=[180, 64, -9], blocks=blocks)
    q, k, v = plan.random()
    wanted = plan.exact(q, k, v)
    assert error(plan.run(q, k, v), wanted) < SPLIT_BOUND[bf16]


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: str) -> None:
    shape = (2, 2, 1, 35, 53, 24)
    planned("mma", shape, bf16, LEAST_TILE, lengths=[50, 17], causal=True).check(order=order)


@with_cores
def test_views_of_one_product(device: ct.Device) -> None:
    """q, k and v beside each other in a row, as a linear layer leaves them."""
    rng, heads, dim = np.random.default_rng(3), 2, 16
    qkv = ct.asarray(rng.standard_normal((2, 40, 3 * heads * dim)), "f16", device)
    whole = qkv.reshape(2, 40, 3, heads, dim).permute(2, 0, 3, 1, 4)
    got = ct.attention(*(whole[i] for i in range(3)), causal=True, variant="mma")
    wanted = exact([whole[i].astype("f32").numpy() for i in range(3)], f16, {}, causal=True)
    assert error(got.astype("f32").numpy(), wanted.transpose(0, 2, 1, 3)) < 2e-7


@with_cores
@DECODING
def test_one_plan_serves_every_length(device: ct.Device, variant: str) -> None:
    """A replay at another length compiles, plans and launches nothing new."""
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal(s) for s in ((1, 4, 1, 16), (1, 2, 300, 16), (1, 2, 300, 16)))
    tensors = [ct.asarray(x.astype(np.float16), "f16", device) for x in (q, k, v)]
    lengths = ct.State(ct.zeros((1,), "i32", device), name="lengths")
    plan = device.compile(lambda: ct.attention(*tensors, lengths=lengths.value, variant=variant))
    for count in (1, 64, 65, 300):
        lengths.assign(ct.full((1,), count, "i32", device))
        device.synchronize()
        with ct.ledger() as led:
            y = plan()
            device.synchronize()
        led.expect(launches=1 if variant == "cluster_mma" else 2, plans=0, compiles=0)
        wanted = exact((q, k[:, :, :count], v[:, :, :count]), f16, {}).transpose(0, 2, 1, 3)
        assert error(y.astype("f32").numpy(), wanted) < SPLIT_BOUND[f16]


def test_groups_past_the_end_leave_at_once() -> None:
    """What parts without keys would have left is not written, and not read either."""
    plan = planned("split_mma", (2, 4, 2, 1, 1000, 16), lengths=[65, 0])
    splits = int(dict(plan.calls[0].scalars)["splits"])
    assert splits == 16 and plan.calls[0].groups == 2 * 2 * splits
    report = plan.simulated(plan.words(*plan.random()), 0)
    written = report.written[-1][: 8 * splits * 16].reshape(8, splits, 16).all(-1)
    assert (written == (np.arange(splits) < 2) & (np.arange(8) < 4)[:, None]).all()


@pytest.mark.devices("simulator", "webgpu", "cuda")
@pytest.mark.parametrize(
    ("variant", "shape", "dtype", "text"),
    [
        ("mma", (1, 1, 20, 16), "f32", "f16 or bf16 with rows on 16 bytes"),
        ("mma", (1, 1, 20, 17), "f16", ".*rows on 16 bytes"),  # less the first column
        ("wgmma", (1, 1, 20, 16), "f32", "f16 or bf16 with rows on 16 bytes"),
        ("wgmma", (1, 1, 20, 136), "f16", ".*heads of at most 128"),
        ("split_mma", (1, 1, 70, 16), "f32", "f16 or bf16 with rows on"),
        ("split_mma", (1, 1, 70, 20), "f16", "f16 or bf16 with rows on"),
        ("split_mma", (1, 1, 70, 136), "f16", "f16 or bf16 with rows on"),
        ("cluster_mma", (1, 1, 70, 20), "f16", "f16 or bf16 with rows on"),
    ],
)
def test_it_is_refused_where_it_does_not_fit(
    device: ct.Device, variant: str, shape: tuple[int, ...], dtype: str, text: str
) -> None:
    x = ct.zeros(shape, dtype, device)[..., shape[-1] % 2 :]
    with pytest.raises(LimitError, match=f"variant '{variant}' takes {text}"):
        ct.attention(x, x, x, variant=variant).numpy()


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["mma", "wgmma"])
def test_a_maximum_that_moves(variant: str) -> None:
    """By more than the slack and by less: f16 weights up to 2^8."""
    plan = planned(variant, (1, 4, 4, 32, 256, 16), f16, SMALL[variant], scale=0.5)
    q, k, v = plan.random()
    q[:] = 0
    q[..., 0], k[0, ..., 0] = 2, steep(256)
    got, wanted = plan.run(q, k, v), plan.exact(q, k, v)
    for head in range(4):
        assert error(got[:, :, head], wanted[:, :, head]) < 2e-7


@with_cores
@SIXTEEN
@DECODING
def test_a_maximum_that_moves_from_part_to_part(
    device: ct.Device, dtype: DType, variant: str
) -> None:
    """As in the register kernels; many small weights before a large one."""
    n, rng = 400, np.random.default_rng(4)
    q = np.zeros((1, 4, 1, 16))
    q[..., 0] = 4
    k, v = rng.standard_normal((2, 1, 4, n, 16))
    k[..., 0] = 0
    k[0, :2, :, 0] = steep(n)[:2]
    k[0, 3, -1, 0] = 17  # e^17 of them would weigh as much
    got, wanted = on_device(device, (q, k, v), dtype, variant), exact((q, k, v), dtype, {})
    for head in range(4):
        assert error(got[:, :, head], wanted[:, :, head]) < SPLIT_BOUND[dtype], head


@pytest.mark.parametrize("variant", ["mma", "wgmma", "split_mma", "cluster_mma"])
@pytest.mark.parametrize("mask", ["lengths", "key_mask"])
def test_what_does_not_count_may_hold_anything(variant: str, mask: str) -> None:
    """NaN past the lengths and where key_mask is False; a NaN and an infinity among the rest."""
    if (variant, mask) == ("wgmma", "key_mask"):
        return  # which it does not take
    lengths, seen = np.array([19, 0]), np.arange(80).reshape(2, 40) % 4 > 0
    hidden = ~seen if mask == "key_mask" else np.arange(40) >= lengths[:, None]
    masks: dict[str, Any] = {mask: seen if mask == "key_mask" else lengths}
    plan = planned(variant, (2, 1, 1, 18, 40, 16), f16, SMALL[variant], **masks)
    q, k, v = plan.random()
    wanted = plan.exact(q, k, v)
    k[:, 0][hidden] = v[:, 0][hidden] = np.nan
    got = plan.run(q, k, v)
    assert error(got, wanted) < 2.5e-7 and (mask == "key_mask" or not got[1].any())
    plan = planned(variant, (1, 1, 1, 18, 40, 16), f16, SMALL[variant])
    q, k, v = plan.random()
    k[0, 0, 7, 3] = np.nan
    assert np.isnan(plan.run(q, k, v)).all()
    q, k, v = plan.random()
    v[0, 0, 7, 3] = np.inf
    got = plan.run(q, k, v)[0, :, 0]
    assert (got[:, 3] == np.inf).all() and np.isfinite(got[:, :3]).all()


@with_cores
@ON_CORES
def test_what_is_past_the_lengths_on_a_card(device: ct.Device, variant: str) -> None:
    """NaN there; an infinity among the rest stays where it is."""
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal(s) for s in ((2, 4, 1, 24), (2, 2, 150, 24), (2, 2, 150, 24)))
    lengths = np.array([67, 0], np.int32)
    v[0, 0, 66, 3] = np.inf
    wanted = exact((q, k, v), f16, {"lengths": lengths})
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = np.nan
    got = on_device(device, (q, k, v), f16, variant, lengths=lengths)
    assert (got[0, :, :2, 3] == np.inf).all() and not got[1].any()
    rest = np.isfinite(wanted)
    assert error(got[rest], wanted[rest]) < 2.5e-7 and np.isfinite(got).sum() == rest.sum()


def infinite(rng: np.random.Generator, queries: int) -> list[Any]:
    """q, k and v of 70 keys; two values are infinite."""
    q, k, v = (rng.standard_normal((1, 1, n, 16)) for n in (queries, 70, 70))
    v[0, 0, 20, 3], v[0, 0, 40, 5] = np.inf, -np.inf
    return [q, k, v]


def shows_infinities(got: np.ndarray[Any, Any]) -> bool:
    right = (got[..., 3] == np.inf).all() and (got[..., 5] == -np.inf).all()
    return bool(right and np.isfinite(np.delete(got, (3, 5), -1)).all())


@with_cores
@ON_CORES
def test_an_infinite_value_is_no_nan(device: ct.Device, variant: str) -> None:
    """A weight of bf16 is the sum of two numbers, both of which meet the infinity."""
    arrays = infinite(np.random.default_rng(8), 3)
    assert shows_infinities(on_device(device, arrays, bf16, variant))


def test_an_infinite_value_is_no_nan_with_warpgroups() -> None:
    plan = planned("wgmma", (1, 1, 1, 5, 70, 16), bf16, WgmmaTile(32, parts=2, late=True))
    assert shows_infinities(plan.run(*infinite(np.random.default_rng(8), 5)))


def rounded_down(first: int, last: int) -> tuple[Any, Any, Any]:
    """q, k and v = 1.5: nearly all weights are one number that is rounded down."""
    q, k = np.zeros((1, 1, 3, 16), np.float32), np.zeros((1, 1, 400, 16), np.float32)
    q[..., 0], k[..., first:last, 0] = 1.0, 0.0038  # the maximum comes last
    return q, k, np.full_like(k, 1.5)


@with_cores
@ON_CORES
@SIXTEEN
def test_the_weights_that_are_used_add_up_to_one(
    device: ct.Device, dtype: DType, variant: str
) -> None:
    """Whatever their rounding: equal values come back as they are."""
    rng, (q, k, v) = np.random.default_rng(7), rounded_down(0, 300)
    assert (on_device(device, (q, k, v), dtype, variant, scale=0.125) == 1.5).all()
    q, k = rng.standard_normal((1, 2, 20, 16)), rng.standard_normal((1, 1, 200, 16))
    assert (on_device(device, (q, k, v[:, :, :200]), dtype, variant) == 1.5).all()


@pytest.mark.parametrize("parts", [1, 2])
def test_the_weights_of_warpgroups_add_up_to_one(parts: int) -> None:
    tile = WgmmaTile(32, parts=parts, late=True)
    plan = planned("wgmma", (1, 1, 1, 3, 400, 16), bf16 if parts == 2 else f16, tile, scale=0.125)
    assert (plan.run(*rounded_down(100, 400)) == 1.5).all()  # from the last key to the first


# -- PTX ------------------------------------------------------------------------------------------


@SIXTEEN
@pytest.mark.parametrize("variant", ["mma", "split_mma"])
def test_ptx_equals_the_simulator(dtype: DType, variant: str) -> None:
    plan = planned("mma", (1, 2, 1, 19, 37, 24), dtype, MmaTile(32, 16, 1, 2), causal=True)
    if variant == "split_mma":
        blocks = [[2, 0, 1]]
        plan = planned("split_mma", (1, 3, 1, 1, 3, 40), dtype, lengths=[140], blocks=blocks)
    words = plan.words(*plan.random())
    again = [w.copy() for w in words]
    orders: tuple[Any, ...] = tuple(ORDERS)
    for order in orders:
        plan.simulated(words, 0, order=order)
    memory = [again[r.index] for r in plan.calls[0].tensors]
    execute(plan.ir(0), "sm_80", memory, plan.params(0), plan.calls[0].groups)
    np.testing.assert_array_equal(memory[-1], words[plan.calls[0].tensors[-1].index])


def assembled(plan: Plan, n: int, arch: str, folder: Path) -> int:
    """Registers of a thread; there are no spills, no stack, no warning."""
    report, _ = assemble(emit_ptx(plan.ir(n), arch), arch, folder)
    registers, stack = resources(report)
    assert stack == 0 and "C75" not in report, report
    return registers


SIGHT: dict[str, Any] = {"starts": [1], "sinks": [0.0] * 4, "window": 128}
BIAS = np.ones((4, 257))
CAPPED: dict[str, Any] = {**SIGHT, "softcap": 50.0}


@needs_ptxas
@pytest.mark.turns("arch")
@TILES
@ARCHS
def test_tiles_stay_in_registers(dim: int, tile: MmaTile, arch: str, tmp_path: Path) -> None:
    """As many groups a multiprocessor as the tile says."""
    lengths, keys = {"lengths": [4096]}, np.ones((1, 4096))
    given: list[tuple[DType, dict[str, Any]]] = [(f16, {})]
    if (dim, tile) in SHIPPED:
        both = [(dtype, {"causal": True, **lengths}) for dtype in (f16, bf16)]
        given += [(bf16, {}), *both, (bf16, {"starts": [1]}), (bf16, SIGHT)]
        given += [(bf16, {"starts": [1], "blocks": [[1] * 64]})]
    if (dim, tile) in SMALLER:
        every = {"mask": keys[None, None], "key_mask": keys, "starts": [0], **lengths}
        given = [(bf16, {}), (f16, every), (bf16, CAPPED)]
        given += [(dtype, {**lengths, "bias": BIAS}) for dtype in (f16, bf16)]
    for dtype, masks in given:
        plan = planned("mma", (1, 4, 2, 4096, 4096, dim), dtype, tile, **masks)
        registers = assembled(plan, 0, arch, tmp_path)
        assert registers * tile.threads * tile.together <= 65_536, (dtype, masks)


@needs_ptxas
@ARCHS
def test_decoding_stays_in_registers(arch: str, tmp_path: Path) -> None:
    keys, tile = np.ones((1, 4096)), SplitTile()
    every = {"lengths": [1], "key_mask": keys, "mask": np.ones((1, 32, 1, 4096)), "starts": [1]}
    capped = {**CAPPED, "sinks": [0.0] * 32}
    for dim, dtype, masks in ((128, f16, {}), (128, bf16, capped), (128, f16, every),
                              (64, f16, {"lengths": [1]}), (80, bf16, every),
                              (64, bf16, {"lengths": [1], "bias": np.ones((1, 257))}),
                              (128, bf16, {**capped, "blocks": [[1] * 64]})):  # fmt: skip
        shape, caps = (1, 32, 8, 1, 4096, dim), replace(CAPS, arch=arch)
        plan = planned("split_mma", shape, dtype, caps=caps, **masks)
        assembled(plan, 1, arch, tmp_path)
        assert assembled(plan, 0, arch, tmp_path) * tile.threads * tile.together <= 65_536
        if caps.clusters:
            plan = planned("cluster_mma", shape, dtype, caps=caps, **masks)
            assert assembled(plan, 0, arch, tmp_path) * tile.threads * tile.together <= 65_536


def test_a_cluster_adds_up_its_parts() -> None:
    """As many groups as parts, which reach each other; one part has no cluster."""
    for batch, splits in ((1, 8), (4, 8), (16, 2), (40, 1)):
        plan = planned("cluster_mma", (batch, 32, 8, 1, 2048, 128), lengths=[700] * batch)
        assert len(plan.calls) == 1 and plan.ir().cluster == splits
        assert plan.calls[0].groups == batch * 8 * splits


@ARCHS
def test_the_second_launch_lets_the_next_one_in(arch: str) -> None:
    plan = planned("split_mma", (1, 32, 8, 1, 4096, 128), caps=replace(CAPS, arch=arch))
    said = ["griddepcontrol.launch_dependents" in emit_ptx(plan.ir(n), arch) for n in range(2)]
    assert said == [False, arch == "sm_90a"]


def inner_loop(plan: Plan) -> list[str]:
    """The instructions from the first launch's loop on."""
    text = emit_ptx(plan.ir(0), "sm_90a")
    return [x.split()[0] for x in text[text.index("// for") :].splitlines() if x.strip()]


def test_the_inner_loop_is_matrix_work() -> None:
    """Of a step, a warp of 32 queries: products of Q and K, of P and V, and the sums of P."""
    plan = planned("mma", (1, 1, 1, 4096, 4096, 64), f16, MmaTile(128, 64, 4, 2))
    inner = inner_loop(plan)
    inner = inner[: len(inner) - inner[::-1].index("setp.lt.u32") - 1]
    counts = {"mma.sync": 64 + 64 + 8, "ldmatrix": 16 + 16, "cp.async.cg": 8, "ex2": 64 + 4,
              "shfl": 8}  # fmt: skip
    assert {s: sum(x.startswith(s) for x in inner) for s in counts} == counts
    assert shared_layout(plan.ir()).size == 48 << 10


def test_the_inner_loop_of_decoding_is_loads_and_products() -> None:
    """Of 16 keys, a head of 128: 8 chunks each of both, 16 products for scores, 8 for sums, 2."""
    inner = inner_loop(planned("split_mma", (1, 32, 8, 1, 4096, 128)))
    assert sum(s.startswith("ld.global") and ".v4" in s for s in inner) == 16
    assert sum(s.startswith("mma.sync") for s in inner) == 16 + 8 + 2
    assert not any(s.startswith("ld.shared") for s in inner[: inner.index("bar.sync")])


@pytest.mark.parametrize("variant", ["mma", "split_mma", "cluster_mma"])  # wgmma has none
def test_how_low_a_mask_hides_a_key(variant: str) -> None:
    """As in the portable kernels: -2^119 does; of keys that all have a bit more none is hidden."""
    queries = 3 if variant in ("split_mma", "cluster_mma") else 70
    for low, hidden in ((-(2.0**119), True), (-2.1e38, True), (-(2.0**118), False)):
        mask = np.full((1, 1, queries, 200), low, np.float32)
        plan = planned(variant, (1, 4, 2, queries, 200, 64), mask=mask)
        q, k, v = plan.random()
        got = plan.run(q, k, v)
        mean = v.astype(np.float16).astype(np.float64).mean(2).repeat(2, 1)
        wanted = np.zeros_like(got) if hidden else np.broadcast_to(mean[:, None], got.shape)
        np.testing.assert_allclose(got, wanted, atol=2e-4)
