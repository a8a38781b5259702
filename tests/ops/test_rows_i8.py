"""Rows of keys and values in i8: how far they, and attention over them, are from what was given.

With rows of scale s an element is off by s / 2 (and s / 2^14 in arithmetic). So a score is off by
at most e = scale |q|_1 s_k / 2, a weight by a factor within e^(2e) of 1, and a result by

    (e^(2e) - 1) max |v| + s_v / 2
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.check.cases.case import rng_of
from centella.dtypes import DType, bf16, dtype_of, f16, f32, i8, i32, narrow, widen
from centella.emit.ptx import emit_ptx
from centella.op.op import get
from centella.ops.attention.mma import LEAST_TILE
from centella.ops.attention.op import ATTENTION, reference
from centella.ops.attention.warp_sums import SplitTile
from centella.ops.attention.wgmma_tile import WgmmaTile
from centella.ops.rows_i8 import decode, encode
from centella.specs import make_spec
from centella.tensors.tensor import apply_all
from tests.emit.test_lang_ptx import assemble, execute, needs_ptxas, resources
from tests.support.attention import CAPS, Plan, Shape, error, planned
from tests.support.launched import op_form

Array = np.ndarray[Any, Any]
HALF = 0.5 + 2.0**-14
EXACT = {"f32": 1e-10, "f16": 4e-7, "bf16": 4e-5}  # squared error against the rows as they are kept
IN_REGISTERS = pytest.mark.parametrize("variant", ["stream", "split", "tiled"])
MASKS: dict[str, dict[str, Any]] = {
    "starts": {"starts": [-9, 0, 60]},
    "lengths": {"lengths": [0, 33, 70]},
    "window": {"starts": [3, 40, 60], "window": 17},
    "softcap": {"causal": True, "softcap": 3.0},
    "sinks": {"starts": [3, 40, 60], "sinks": np.linspace(-1, 2, 4)},
    "mask": {"mask": np.where(np.arange(70) % 5 == 2, -np.inf, np.linspace(-3, 3, 70))[None]},
}


def stored(x: Array, dtype: str) -> Array:
    """The values of an array as a dtype keeps them."""
    return widen(narrow(x.astype(np.float32), dtype_of(dtype)), dtype_of(dtype))


def attended(
    device: ct.Device, q: Array, rows: tuple[Array, ...], dtype: str, **options: Any
) -> Array:
    """What a device computes over rows in i8, [batch, query, head, element]."""
    kinds = {"mask": "f4", "sinks": "f4", "starts": "i4", "lengths": "i4", "blocks": "i4"}
    given: dict[str, Any] = {
        n: ct.asarray(np.asarray(x, kinds[n]), device=device) if n in kinds else x
        for n, x in options.items()
    }
    k, v, scales = (ct.asarray(x, device=device) for x in rows)
    y = ct.attention(ct.asarray(q, dtype, device), k, v, scales=scales, **given)
    return y.astype("f32").numpy().transpose(0, 2, 1, 3).astype(np.float64)


def wanted(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Attention in float64."""
    causal, named = options.pop("causal", False), dict(options)
    numbers = {n: named.pop(n) for n in ("window", "softcap") if n in named}
    masks = {n: np.asarray(x, np.int32 if n in ("starts", "lengths", "blocks") else np.float64)
             for n, x in named.items()}  # fmt: skip
    if "mask" in masks:
        masks["mask"] = masks["mask"][None, None]
    wide = (x.astype(np.float64) for x in (q, k, v))
    return np.asarray(
        reference(*wide, *masks.values(), masks=tuple(masks), causal=causal,
                  scale=q.shape[-1] ** -0.5, **numbers)
    )  # fmt: skip


def quantised(k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Rows and their scales."""
    (keys, of_keys), (values, of_values) = encode(k), encode(v)
    return keys, values, np.stack([of_keys, of_values], -1)


def check(
    device: ct.Device, dtype: str, variant: str | None, sizes: tuple[int, int, int, int],
    **options: Any,
) -> None:  # fmt: skip
    """Attention over i8 rows is that over what they stand for, and within the bound of the rows.

    Args:
        sizes: heads, heads of keys, queries, head_dim.
    """
    heads, kv_heads, queries, dim = sizes
    rng = rng_of("rows", sizes, str(options))
    q = stored(rng.standard_normal((3, heads, queries, dim)), dtype)
    k, v = (stored(rng.standard_normal((3, kv_heads, 70, dim)), dtype) for _ in "kv")
    v[:, :, ::7] *= 5  # rows of several sizes
    rows = quantised(k, v)
    keys, values = (decode(x.astype(np.float64), rows[2][..., n]) for n, x in enumerate(rows[:2]))
    got = attended(device, q, rows, dtype, variant=variant, **options)
    right = wanted(q, keys, values, **options)
    assert error(got, right) < EXACT[dtype]
    scores = dim**-0.5 * np.abs(q).sum(-1).max() * rows[2][..., 0].max() * HALF
    bound = np.expm1(2 * scores) * np.abs(v).max() + rows[2][..., 1].max() * HALF
    rounding = 8 * dtype_of(dtype).epsilon * np.abs(v).max()
    assert np.abs(got - wanted(q, k, v, **options)).max() <= bound + rounding


# -- the rows themselves --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("dim", [1, 6, 20, 64, 80, 128, 200])
def test_an_element_is_off_by_half_a_scale(device: ct.Device, dim: int, dtype: str) -> None:
    rng = rng_of("off", dim)
    new = [stored(rng.standard_normal((1, 2, 3, dim)) * 10.0 ** rng.integers(-3, 3), dtype)
           for _ in "kv"]  # fmt: skip
    shapes = [((1, 2, 3, dim), "i8")] * 2 + [((1, 2, 3, 2), "f32")]
    states = [ct.State(np.zeros(s, np.int8), dtype=d, device=device) for s, d in shapes]
    given = [ct.asarray(x, dtype, device) for x in new]
    starts = ct.asarray(np.zeros(1, np.int32), device=device)
    apply_all(get("cache_write_i8"), (*(s.value for s in states), *given, starts), {})
    *rows, scales = (s.value.numpy() for s in states)
    for n, (row, x) in enumerate(zip(rows, new, strict=True)):
        scale = scales[..., n]
        np.testing.assert_allclose(scale, np.abs(x).max(-1) / 127, rtol=1e-6)
        off = np.abs(decode(row.astype(np.float64), scale) - x)
        assert (off <= scale[..., None] * HALF).all()


def test_zeros_stay_zeros_and_what_is_not_finite_is_nan(device: ct.Device) -> None:
    x = np.ones((1, 1, 4, 16), np.float32)
    x[0, 0, 0], x[0, 0, 1, 3], x[0, 0, 2, 5] = 0, np.nan, -np.inf
    cache = ct.KVCache(1, 1, 16, 4, dtype="i8", device=device)
    cache.append(ct.asarray(x, device=device), ct.asarray(x[..., ::-1].copy(), device=device))
    planes, scales = [t.numpy()[0, 0] for t in cache.states()[:2]], cache.states()[2].numpy()
    keys, values = (decode(x.astype("f4"), scales[0, 0, :, n]) for n, x in enumerate(planes))
    for rows in (keys, values):
        assert not rows[0].any()
        assert np.isnan(rows[1:3]).all()
        np.testing.assert_allclose(rows[3], 1, rtol=1e-6)


# -- attention over them --------------------------------------------------------------------------


@IN_REGISTERS
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((4, 4, 2, 64), "f32"), ((4, 1, 3, 80), "f16"), ((6, 2, 1, 128), "f32"),
     ((4, 2, 20, 20), "f16"), ((2, 1, 2, 6), "f32")],
)  # fmt: skip
def test_heads(
    device: ct.Device, sizes: tuple[int, int, int, int], dtype: str, variant: str
) -> None:
    check(device, dtype, variant, sizes, starts=[3, 40, 60])


@IN_REGISTERS
@pytest.mark.parametrize("name", MASKS)
def test_masks(device: ct.Device, name: str, variant: str) -> None:
    check(device, "f32", variant, (4, 2, 5, 16), **MASKS[name])


@IN_REGISTERS
def test_what_no_query_sees_may_be_anything(device: ct.Device, variant: str) -> None:
    rng = rng_of("anything")
    q, k, v = (rng.standard_normal((1, h, n, 16)).astype(np.float32) for h, n in
               ((2, 2), (1, 70), (1, 70)))  # fmt: skip
    rows = quantised(k, v)
    rows[2][:, :, 11:] = np.nan
    got = attended(device, q, rows, "f32", variant=variant, starts=[9])
    keys, values = (decode(x.astype(np.float64), rows[2][..., n])[:, :, :11]
                    for n, x in enumerate(rows[:2]))  # fmt: skip
    assert error(got, wanted(q, keys, values, starts=[9])) < EXACT["f32"]


@IN_REGISTERS
def test_blocks(device: ct.Device, variant: str) -> None:
    """Rows and scales in blocks of a pool, in any order."""
    rng = rng_of("blocks")
    k, v = (rng.standard_normal((2, 7, 64, 20)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((2, 4, 3, 20)).astype(np.float32)
    rows, options = quantised(k, v), {"blocks": [[5, 2, 6], [1, 3, 4]], "starts": [130, 67]}
    keys, values = (decode(x.astype(np.float64), rows[2][..., n]) for n, x in enumerate(rows[:2]))
    got = attended(device, q, rows, "f32", variant=variant, **options)
    assert error(got, wanted(q, keys, values, **options)) < EXACT["f32"]


# -- on tensor cores ------------------------------------------------------------------------------

DECODING = pytest.mark.parametrize("variant", ["split_mma", "cluster_mma"])
CORE_BOUND = {f16: 4e-7, bf16: 1.6e-5}
SEEN: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": [0, 33, 70]},
    "window": {"starts": [3, 40, 60], "window": 17},
    "all": {"starts": [3, 40, 60], "softcap": 4.0, "sinks": np.linspace(-1, 2, 4),
            "mask": np.linspace(-3, 3, 280).reshape(1, 4, 1, 70)},
}  # fmt: skip


def on_cores(
    variant: str, shape: Shape, dtype: DType, *, tile: Any = None, blocks: Any = None, **masks: Any
) -> tuple[Plan, list[Array]]:
    """The launches over rows of i8 with scales of all sizes, and what they read."""
    b, heads, kv, lq, lk, dim = shape
    rng = rng_of("cores", shape, variant)
    rows = (b, kv, lk, dim) if blocks is None else (kv, lk, 64, dim)
    k, v = (rng.standard_normal(rows) for _ in "kv")
    v *= 10.0 ** rng.integers(-6, 3, (*rows[:3], 1))
    keys, values, scales = quantised(k.astype(np.float32), v.astype(np.float32))
    table = {} if blocks is None else {"blocks": blocks}
    plan = planned(variant, shape, dtype, tile, scales=scales, **table, **masks)
    return plan, [rng.standard_normal((b, heads, lq, dim)).astype(np.float32), keys, values]


@DECODING
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_decoding_on_tensor_cores(dim: int, dtype: DType, variant: str) -> None:
    plan, arrays = on_cores(variant, (2, 6, 2, 2, 150, dim), dtype, starts=[20, 148])
    assert error(plan.run(*arrays), plan.exact(*arrays)) < CORE_BOUND[dtype]


@DECODING
def test_groups_take_several_steps_of_keys(variant: str) -> None:
    """Each key's score has its own scale, not that of the keys that are loaded meanwhile."""
    tile = SplitTile(groups=1) if variant == "split_mma" else None
    plan, arrays = on_cores(variant, (1, 2, 1, 1, 1100, 32), f16, tile=tile)
    assert error(plan.run(*arrays), plan.exact(*arrays)) < CORE_BOUND[f16]


@pytest.mark.parametrize("name", SEEN)
def test_masks_on_tensor_cores(name: str) -> None:
    plan, arrays = on_cores("cluster_mma", (3, 4, 2, 1, 70, 64), f16, **SEEN[name])
    assert error(plan.run(*arrays), plan.exact(*arrays)) < CORE_BOUND[f16]


def test_blocks_on_tensor_cores() -> None:
    blocks, starts = [[5, 2, 6], [1, 3, 4]], [130, 67]
    shape = (2, 4, 2, 1, 7, 64)
    plan, arrays = on_cores("split_mma", shape, f16, blocks=blocks, starts=starts)
    assert error(plan.run(*arrays), plan.exact(*arrays)) < CORE_BOUND[f16]


def test_scales_that_no_query_sees_may_be_anything_on_tensor_cores() -> None:
    plan, arrays = on_cores("split_mma", (1, 2, 1, 1, 70, 64), f16, starts=[9])
    wanted_ = plan.exact(*arrays)
    plan.masks["scales"][:, :, 11:] = np.nan
    assert error(plan.run(*arrays), wanted_) < CORE_BOUND[f16]


# Of values that are rounded once more, as they are widened.
WIDENED = {f16: 4e-7, bf16: 3e-5}
PREFILLS: tuple[tuple[str, Any, DType], ...] = (
    ("mma", LEAST_TILE, f16), ("mma", LEAST_TILE, bf16), ("wgmma", WgmmaTile(32, late=True), f16),
    ("wgmma", WgmmaTile(32), bf16), ("wgmma", WgmmaTile(32, parts=2), bf16),
)  # fmt: skip


@pytest.mark.parametrize(("variant", "tile", "dtype"), PREFILLS, ids=str)
@pytest.mark.parametrize("name", ["starts", "window", "blocks"])
def test_many_queries_read_plain_rows(variant: str, tile: Any, dtype: DType, name: str) -> None:
    """A launch widens rows and orders blocks; those past the last key are never written."""
    named: dict[str, dict[str, Any]] = {
        "starts": {"starts": [-9, 20]}, "window": {"starts": [3, 21], "window": 17},
        "blocks": {"blocks": [[4, 2], [1, 3]], "starts": [60, 5]},
    }  # fmt: skip
    shape = (2, 4, 2, 40, 5 if name == "blocks" else 61, 64)
    plan, arrays = on_cores(variant, shape, dtype, tile=tile, **named[name])
    assert plan.calls[0].kernel.name == "attention_plain_rows"
    assert error(plan.run(*arrays), plan.exact(*arrays)) < WIDENED[dtype]


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_blocks_of_16_bits_are_put_in_order_for_warpgroups(dtype: DType) -> None:
    blocks, starts = [[4, 2], [1, 3]], [60, 5]
    plan = planned("wgmma", (2, 4, 2, 40, 5, 64), dtype, WgmmaTile(32), blocks=blocks,
                   starts=starts)  # fmt: skip
    plan.check()


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("variant", "queries", "dim"),
    [("split_mma", 2, 128), ("split_mma", 1, 80), ("cluster_mma", 1, 64), ("mma", 20, 128),
     ("wgmma", 70, 128), (None, 70, 64), (None, 1, 128)],
)  # fmt: skip
def test_on_a_card(
    device: ct.Device, variant: str | None, queries: int, dim: int, dtype: str
) -> None:
    if variant in ("cluster_mma", "wgmma") and not device.caps.warpgroups:
        pytest.skip("of Hopper")
    check(device, dtype, variant, (8, 2, queries, dim), starts=[3, 40, 60])


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("variant", ["split_mma", "mma"])
def test_ptx_equals_the_simulator(variant: str, dtype: DType) -> None:
    """Of the launch that reads rows of i8: with starts, and through a table."""
    lq, masks = (1, {"starts": [50]}) if variant == "split_mma" else (20, {"blocks": [[2, 0]]})
    lk = 3 if "blocks" in masks else 64
    plan, arrays = on_cores(variant, (1, 2, 1, lq, lk, 48), dtype, tile=None, **masks)
    words = plan.words(*arrays)
    again = [w.copy() for w in words]
    plan.simulated(words, 0)
    memory = [again[r.index] for r in plan.calls[0].tensors]
    execute(plan.ir(0), "sm_80", memory, plan.params(0), plan.calls[0].groups)
    for ref, got in zip(plan.calls[0].tensors, memory, strict=True):
        np.testing.assert_array_equal(got, words[ref.index])


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_plain_rows_assemble(arch: str, tmp_path: Path) -> None:
    for dtype, masks in ((f16, {"starts": [60, 5]}),
                         (bf16, {"blocks": [[4, 2], [1, 3]], "starts": [60, 5]})):  # fmt: skip
        plan, _ = on_cores("mma", (2, 4, 2, 40, 61, 64), dtype, **masks)
        report, _ = assemble(emit_ptx(plan.ir(0), arch), arch, tmp_path)
        assert resources(report)[1] == 0, report


def test_who_takes_rows_of_i8() -> None:
    """On Hopper products on tensor cores, of few queries at once, of many behind plain rows."""

    def chosen(
        lq: int, dim: int, dtype: DType = f16, arch: str = "sm_90a", lk: int = 4096
    ) -> list[str]:
        k = make_spec((1, 8, lk, dim), i8, 16)
        q, y = (make_spec(s, dtype, 16) for s in ((1, 32, lq, dim), (1, lq, 32, dim)))
        specs = (q, k, k, make_spec((1,), i32, 16), make_spec((1, 8, lk, 2), f32, 16))
        attrs = {"masks": ("starts", "scales"), "causal": False, "scale": dim**-0.5}
        caps = replace(CAPS, arch=arch)
        return [c.kernel.name for c in op_form(ATTENTION, specs, (y,), attrs).lower(caps).calls]

    assert chosen(1, 128) == ["attention_split_mma", "attention_combine"]
    assert chosen(1, 128, lk=2048) == ["attention_cluster_mma"]
    assert chosen(1, 40) == chosen(1, 128, f32) == ["attention_split", "attention_combine"]
    assert chosen(32, 128, lk=512) == ["attention_plain_rows", "attention_mma"]
    assert chosen(32, 128) == ["attention_plain_rows", "attention_wgmma"]
    assert chosen(512, 128) == ["attention_plain_rows", "attention_wgmma"]
    assert chosen(512, 128, arch="sm_80") == ["attention_plain_rows", "attention_mma"]
    assert chosen(512, 128, f32) == ["attention_tiled"]


@needs_ptxas
@pytest.mark.parametrize(
    ("variant", "arch"),
    [("split_mma", "sm_80"), ("split_mma", "sm_90a"), ("cluster_mma", "sm_90a")],
)
def test_decoding_stays_in_registers(variant: str, arch: str, tmp_path: Path) -> None:
    """And reads 16 bytes at a time: of 16 keys of 128 elements four loads of either."""
    tile = SplitTile()
    capped = {"starts": [1], "sinks": [0.0] * 32, "window": 128, "softcap": 50.0}
    masks: list[tuple[int, DType, dict[str, Any]]] = [
        (128, f16, {"starts": [1]}), (128, bf16, capped), (64, f16, {"starts": [1]}),
        (80, bf16, {"starts": [1]}), (128, bf16, {**capped, "blocks": [[1] * 64]}),
    ]  # fmt: skip
    for dim, dtype, given in masks:
        rows = (8, 64, 64, 2) if "blocks" in given else (1, 8, 4096, 2)
        lk = 64 if "blocks" in given else 4096
        plan = planned(variant, (1, 32, 8, 1, lk, dim), dtype, scales=np.ones(rows),
                       caps=replace(CAPS, arch=arch), **given)  # fmt: skip
        text = emit_ptx(plan.ir(0), arch)
        report, _ = assemble(text, arch, tmp_path)
        registers, stack = resources(report)
        assert stack == 0, report
        assert registers * tile.threads * tile.together <= 65_536
        assert text[text.index("// for") :].count("ld.global.nc.v4") == 2 * -(-dim // 64) + 4


def test_mistakes(device: ct.Device) -> None:
    q, k = (ct.full((1, 2, 3, 16), 1, t, device) for t in ("f32", "i8"))
    scales = ct.full((1, 2, 3, 2), 1.0, device=device)
    with pytest.raises(ct.ShapeError, match=r"expected f32 scales \[1, 2, 3, 2\], got f32"):
        ct.attention(q, k, k, scales=scales[..., :1])
    with pytest.raises(ct.DTypeError, match="expected a float q and i8 k and v"):
        ct.attention(q, q, q, scales=scales)
    with pytest.raises(ct.DTypeError, match="expected one float dtype"):
        ct.attention(q, k, k)
