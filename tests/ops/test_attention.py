"""What the table of ops does not show of attention in registers: masks, outliers, launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.check.cases.case import rng_of
from centella.dtypes import f32
from tests.support.attention import Array, error, exact, on_device, steep

IN_REGISTERS = pytest.mark.parametrize("variant", ["stream", "split", "tiled"])


def normal(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[Array]:
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


@IN_REGISTERS
@pytest.mark.parametrize("name", ["lengths", "key_mask", "mask", "causal", "starts"])
def test_a_query_without_keys_gives_zeros(device: ct.Device, name: str, variant: str) -> None:
    q, k, v = normal(rng_of("zeros", name), (2, 2, 3, 8), (2, 2, 2, 8), (2, 2, 2, 8))
    masks: dict[str, Any] = {
        "lengths": np.zeros(2, np.int32),
        "key_mask": np.zeros((2, 2), bool),
        "mask": np.full((1, 1, 3, 2), -np.inf, np.float32),
        "causal": True,  # query 0 is before the first key
        "starts": np.full(2, -1, np.int32),  # so is this one
    }
    if name in ("lengths", "key_mask"):
        v[:] = np.nan  # what does not count may hold anything
    got = on_device(device, (q, k, v), f32, variant, **{name: masks[name]})
    assert not got[:, :1].any()
    if name in ("causal", "starts"):
        assert got[:, 1:].all()
    else:
        assert not got.any()


@pytest.mark.parametrize("variant", ["stream", "split", "tiled", None])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (2, 1, 3, 5), (1, 2, 1, 5), (5,)])
def test_a_mask_of_bools_hides_what_a_mask_of_floats_does(
    device: ct.Device, shape: tuple[int, ...], variant: str | None
) -> None:
    """Leading extents may be left out, as everywhere; True is a key that a query sees."""
    rng = rng_of("bools", *shape)
    arrays = normal(rng, (2, 2, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8))
    seen = rng.random(shape) < 0.6
    seen[..., 0] = seen.size > 5  # where it is a row for all, some query sees no key
    added = np.where(seen, np.float32(0), np.float32(-np.inf))
    full = added.reshape((1,) * (4 - len(shape)) + shape)
    expected = on_device(device, arrays, f32, mask=full)
    for mask in (seen, added):
        got = on_device(device, arrays, f32, variant, mask=mask)
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)
    assert not on_device(device, arrays, f32, variant, mask=np.zeros((3, 5), bool)).any()


@pytest.mark.parametrize("variant", ["stream", "split", "tiled", None])
def test_how_low_a_mask_hides_a_key(device: ct.Device, variant: str | None) -> None:
    """-2^119 and less do, in every kernel; of keys that all have one a bit higher none is."""
    arrays = normal(rng_of("low"), (1, 2, 3, 16), (1, 2, 40, 16), (1, 2, 40, 16))
    for low in (-(2.0**119), -1e36, -2.1e38, -3e38):
        mask = np.full((3, 40), low, np.float32)
        assert not on_device(device, arrays, f32, variant, mask=mask).any()
    mask = np.full((3, 40), -(2.0**118), np.float32)
    got = on_device(device, arrays, f32, variant, mask=mask)
    wanted = np.broadcast_to(arrays[2].mean(2)[:, None], got.shape)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.devices("simulator", "webgpu")
def test_heads_that_16_kb_hold_a_few_keys_of(device: ct.Device) -> None:
    if device.caps.max_shared > 16_384 and device.caps.target == "wgsl":
        pytest.skip("the device with the least memory has the case")
    arrays = normal(rng_of("wide"), (1, 1, 40, 1024), (1, 1, 7, 1024), (1, 1, 7, 1024))
    got = on_device(device, arrays, f32, None)
    np.testing.assert_allclose(got, on_device(device, arrays, f32, "split"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["stream", "split", "tiled", None])
@pytest.mark.parametrize("alignment", ["start", "end", "starts"])
def test_a_bias_by_distance_is_a_mask_of_it(
    device: ct.Device, alignment: str, variant: str | None
) -> None:
    """Of [heads, n] and of one row for all; keys further away than the table has the last bias."""
    rng, lq, lk = rng_of("bias", alignment), 5, 40
    arrays = normal(rng, (2, 4, lq, 8), (2, 2, lk, 8), (2, 2, lk, 8))
    options: dict[str, Any] = (
        {"lengths": np.array([33, 7], np.int32)} if alignment == "start" else {}
    )
    starts = {"starts": [9, 38], "start": [lk - lq] * 2, "end": [lk - lq] * 2}[alignment]
    if alignment == "starts":
        options["starts"] = np.array(starts, np.int32)
    for heads in (4, 1):
        table = rng.standard_normal((heads, 21)).astype(np.float32) * 3
        table[:, 3], table[:, 12] = 40.0, -np.inf  # an outlier, and a distance that none sees
        away = np.arange(lk) - (np.array(starts)[:, None, None] + np.arange(lq)[:, None])
        mask = np.ascontiguousarray(table[:, np.clip(away, -10, 10) + 10].swapaxes(0, 1))
        wanted = exact(arrays, f32, {**options, "mask": mask})
        got = on_device(device, arrays, f32, variant, bias=table, **options)
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_a_bias_of_other_shapes_or_integers_is_refused() -> None:
    q, k, v = (ct.zeros((1, 4, 3, 8), device="cpu") for _ in range(3))
    for shape in ((4, 6), (2, 5), (5,), (4, 0)):
        with pytest.raises(ct.ShapeError, match=r"bias \[4 or 1, an odd number\], got"):
            ct.attention(q, k, v, bias=ct.zeros(shape, device="cpu"))
    with pytest.raises(ct.DTypeError, match="float bias, got i32"):
        ct.attention(q, k, v, bias=ct.zeros((4, 5), "i32", device="cpu"))


@pytest.mark.parametrize("variant", ["stream", "split", "tiled", None])
@pytest.mark.parametrize("both_sides", [False, True])
def test_a_window_a_cap_and_sinks_are_what_they_say(
    device: ct.Device, both_sides: bool, variant: str | None
) -> None:
    """Every score written down, in float64; NaN where no query looks."""
    rng, lq, lk, w = rng_of("windows", both_sides), 4, 40, 6
    q, k, v = normal(rng, (1, 4, lq, 8), (1, 2, lk, 8), (1, 2, lk, 8))
    sinks = np.array([0.3, -np.inf, 40.0, -1.0], np.float32)
    scores = np.einsum("hid,hjd->hij", q[0], k[0].repeat(2, 0)).astype(np.float64) / 2
    at, key = np.arange(lq)[:, None] + lk - lq, np.arange(lk)
    seen = (at - key < w) & (key - at < (w if both_sides else 1))
    e = np.where(seen, np.exp(1.5 * np.tanh(scores / 1.5)), 0)
    e /= e.sum(-1, keepdims=True) + np.exp(sinks.astype(np.float64))[:, None, None]
    wanted = np.einsum("hij,hjd->ihd", e, v[0].repeat(2, 0))[None]
    k[..., : lk - lq - w + 1, :] = v[..., : lk - lq - w + 1, :] = np.nan
    options: dict[str, Any] = {} if both_sides else {"causal": True}
    got = on_device(device, (q, k, v), f32, variant, sinks=sinks, window=w, softcap=1.5, scale=0.5,
                    **options)  # fmt: skip
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["stream", "split", "tiled", None])
def test_a_sink_that_is_nan_gives_nan(device: ct.Device, variant: str | None) -> None:
    """For all queries of its head, and no others; for those, too, that see no key."""
    arrays = normal(rng_of("nan sinks"), (2, 4, 3, 8), (2, 2, 70, 8), (2, 2, 70, 8))
    sinks = np.array([0.3, -np.inf, 1.0, -1.0], np.float32)
    options = {"lengths": np.array([70, 0], np.int32)}
    wanted = on_device(device, arrays, f32, variant, sinks=sinks, **options)
    sinks[2] = np.nan
    got = on_device(device, arrays, f32, variant, sinks=sinks, **options)
    assert np.isnan(got[:, :, 2]).all()
    np.testing.assert_array_equal(np.delete(got, 2, 2), np.delete(wanted, 2, 2))


@IN_REGISTERS
def test_blocks_are_the_rows_that_they_name(device: ct.Device, variant: str) -> None:
    """Another table compiles and plans nothing; no other block is read, nor rows past the last."""
    rng = rng_of("blocks")
    q, k, v = normal(rng, (2, 4, 2, 16), (2, 6, 64, 16), (2, 6, 64, 16))
    k[:, 3] = v[:, 3] = k[:, 2, 40:] = v[:, 2, 40:] = np.nan
    tensors = [ct.asarray(x, device=device) for x in (q, k, v)]
    for n, rows in enumerate(([[5, 2], [0, 1]], [[4, 2], [2, 3]])):
        starts, table = np.array([102, 30], np.int32), np.array(rows, np.int32)
        whole = [x[:, table].swapaxes(0, 1).reshape(2, 2, 128, 16) for x in (k, v)]
        given = [ct.asarray(x, device=device) for x in (starts, np.pad(table, ((0, 0), (1, 0))))]
        with ct.ledger() as led:
            y = ct.attention(*tensors, starts=given[0], blocks=given[1][:, 1:], variant=variant)
            got = y.numpy().transpose(0, 2, 1, 3)
        led.expect(**({"compiles": 0, "plans": 0} if n else {}))
        wanted = exact((q, *whole), f32, {"starts": starts})
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(8, 5), (5, 8)])
def test_values_have_a_size_of_their_own(device: ct.Device, sizes: tuple[int, int]) -> None:
    d, own = sizes
    q, k, v = normal(rng_of("sizes", *sizes), (2, 2, 3, d), (2, 1, 9, d), (2, 1, 9, own))
    got = on_device(device, (q, k, v), f32, causal=True)
    wide = [np.pad(x, [(0, 0)] * 3 + [(0, 8 - x.shape[-1])]) for x in (q, k, v)]
    wanted = exact(wide, f32, {}, causal=True, scale=d**-0.5)[..., :own]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@IN_REGISTERS
@pytest.mark.parametrize("name", ["lengths", "starts"])
def test_keys_past_the_last_may_hold_anything(device: ct.Device, name: str, variant: str) -> None:
    """A buffer with room for 200 keys holds 1, 65 and 150; a NaN among those shows."""
    counts = np.array((1, 65, 150), np.int32)
    q, k, v = normal(rng_of("room", name), (3, 4, 2, 16), (3, 2, 200, 16), (3, 2, 200, 16))
    for b, n in enumerate(counts):
        k[b, :, n:] = v[b, :, n:] = np.nan
    k[2, 1, 100, 3] = np.nan
    masks = {name: counts - np.int32(2 if name == "starts" else 0)}
    got = on_device(device, (q, k, v), f32, variant, **masks)
    cut = [
        exact((q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n]), f32, {}, name == "starts")
        for b, n in enumerate(counts)
    ]
    wanted = np.concatenate(cut)
    assert np.isnan(wanted[2, :, 2:]).all() and np.isfinite(wanted[2, :, :2]).all()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.devices("cpu", "simulator")
@pytest.mark.parametrize("dim", [256, 384, 385, 512, 960])
def test_attention_of_large_heads_fits_the_least_device(device: ct.Device, dim: int) -> None:
    arrays = normal(rng_of("large heads", dim), (1, 1, 9, dim), (1, 1, 6, dim), (1, 1, 6, dim))
    got = on_device(device, arrays, f32, "stream", causal=True)
    assert error(got, exact(arrays, f32, {}, causal=True)) < 1e-11
    assert not got[:, :3].any()  # queries before the first key


@IN_REGISTERS
@pytest.mark.parametrize("n", [3, 130, 600])
def test_an_infinite_value_stays_infinite(device: ct.Device, n: int, variant: str) -> None:
    """Where a key counts; its number of parts is no multiple of what is added at a time."""
    v = np.ones((1, 1, n, 8), np.float32)
    v[0, 0, -1, 0], v[0, 0, 0, 1] = np.inf, -np.inf
    got = on_device(device, (np.zeros((1, 1, 2, 8)), np.zeros_like(v), v), f32, variant)
    wanted = np.array([np.inf, -np.inf, *[1.0] * 6])
    np.testing.assert_allclose(got[0, :, 0], [wanted, wanted], rtol=1e-5)


@pytest.mark.devices("webgpu", "cuda", "webgpu-hardware")
def test_every_length_runs_the_same_launches(device: ct.Device) -> None:
    launches = set[int]()
    arrays = normal(rng_of("lengths"), (1, 4, 1, 16), (1, 2, 400, 16), (1, 2, 400, 16))
    tensors = [ct.asarray(x, device=device) for x in arrays]
    for n in (1, 64, 399, 400):
        lengths = ct.asarray(np.array([n], np.int32), device=device)
        with ct.ledger() as led:
            ct.attention(*tensors, lengths=lengths).numpy()
        launches.add(led.launches)
        if n > 1:
            led.expect(compiles=0, plans=0)
    assert launches == {2}
    for window in (7, 8, 300):  # a number of the launch, as a cap is
        with ct.ledger() as led:
            ct.attention(*tensors, causal=True, window=window, softcap=window / 7).numpy()
        led.expect(launches=2, **({} if window == 7 else {"compiles": 0}))


@IN_REGISTERS
def test_a_maximum_that_moves_from_part_to_part(device: ct.Device, variant: str) -> None:
    """Scores rise to 800, fall to -800, and stay equal for a while; one key stands out."""
    n, rng = 600, rng_of("moves")
    q = np.zeros((1, 3, 1, 8), np.float32)
    q[..., 0] = 1
    k, v = normal(rng, (1, 3, n, 8), (1, 3, n, 8))
    k *= 0.01
    k[0, :2, :, 0], k[0, 2, 333, 0] = steep(n)[:2], 90
    got = on_device(device, (q, k, v), f32, variant, scale=1.0)
    wanted = exact((q, k, v), f32, {}, scale=1.0)
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)
