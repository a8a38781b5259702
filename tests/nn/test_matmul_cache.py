"""`MatmulCache`: weights sent once, products that allocate and compile nothing after the first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.dtypes import dtype_of, narrow, widen
from tests.support.devices import own

Array = np.ndarray[Any, Any]
OUT, IN = 37, 45
STORED = ("f32", "f16", "bf16", "i8")


def random(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def weight_of(dtype: str) -> Array:
    """What the device multiplies by: the weight as its storage type holds it."""
    if dtype == "i8":
        stored, scale = ct.quantize_int8(random(OUT, IN))
        return np.asarray(stored * scale[:, None].astype(np.float64))
    kind = dtype_of(dtype)
    return widen(narrow(random(OUT, IN), kind), kind).astype(np.float64)


def cache_of(device: ct.Device, *dtypes: str) -> ct.MatmulCache:
    cache = ct.MatmulCache(device)
    for dtype in dtypes:
        cache.upload_weight(dtype, random(OUT, IN), dtype)
    return cache


@pytest.mark.parametrize("m", [1, 3, 20])
def test_products_of_arrays_and_of_tensors(device: ct.Device, m: int) -> None:
    cache, x = cache_of(device, *STORED), random(m, IN)
    for dtype in STORED:
        wanted = x @ weight_of(dtype).T
        got = cache.matmul(dtype, x)
        assert (type(got), got.dtype) == (np.ndarray, np.dtype(np.float32))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
        resident = cache.matmul(dtype, ct.asarray(x, device=device))
        assert type(resident) is ct.Tensor
        assert resident.device is device
        np.testing.assert_array_equal(resident.numpy(), got)


@pytest.mark.parametrize("dtype", STORED)
def test_the_epilogue(device: ct.Device, dtype: str) -> None:
    cache = cache_of(device, dtype)
    x, bias, residual = random(2, 3, IN), random(OUT), random(2, 3, OUT)
    inner = 0.5 * (x @ weight_of(dtype).T) + bias
    wanted = inner / (1 + np.exp(-inner)) + residual
    more: dict[str, Any] = {"bias": bias, "residual": residual}
    got = cache.matmul(dtype, x, activation="silu", alpha=0.5, **more)
    assert got.shape == (2, 3, OUT)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
    tensors: dict[str, Any] = {n: ct.asarray(v, device=device) for n, v in more.items()}
    again = cache.matmul(dtype, x, activation="silu", alpha=0.5, **tensors)
    np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize("dtype", ["f16", "i8"])
def test_nothing_is_allocated_or_compiled_after_the_first(device: ct.Device, dtype: str) -> None:
    where = own(device) if device.name == "simulator" else device
    cache, x, other = cache_of(where, dtype), random(1, IN), random(1, IN) + 1
    cache.matmul(dtype, x)
    cache.matmul(dtype, other)
    with ct.ledger() as led:
        for _ in range(3):
            cache.matmul(dtype, other)
    led.expect(allocations=0, compiles=0, uploads=3, downloads=3, submissions=3)
    assert led.upload_bytes < 3 * 4096  # x, and never the weight
    resident = ct.asarray(x, device=where)
    cache.matmul(dtype, resident).numpy()
    with ct.ledger() as led:
        for _ in range(3):
            cache.matmul(dtype, resident).numpy()
    led.expect(allocations=0, compiles=0, uploads=0, downloads=3)


@pytest.mark.parametrize("dtype", ["f32", "i8"])
def test_a_product_into_a_state(device: ct.Device, dtype: str) -> None:
    where = own(device) if device.name == "simulator" else device
    cache, out = cache_of(where, dtype), ct.State(np.zeros((1, OUT), np.float32), device=where)
    first, second = random(1, IN), ct.asarray(2 * random(1, IN), device=where)
    wanted = random(1, IN) @ weight_of(dtype).T + 1
    bias = ct.full(OUT, 1.0, device=where)
    for _ in range(2):
        before = cache.matmul(dtype, first, out, bias=bias).value
        np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-5, atol=1e-4)
    assert cache.matmul(dtype, second, out=out) is out
    np.testing.assert_allclose(out.numpy(), 2 * (wanted - 1), rtol=1e-5, atol=1e-4)
    with pytest.raises(ct.ContractError):
        before.numpy()
    with ct.ledger() as led:
        for _ in range(3):
            cache.matmul(dtype, second, out)
    led.expect(allocations=0, compiles=0, uploads=0, downloads=0)


def test_a_product_into_a_state_in_a_capture(device: ct.Device) -> None:
    cache, out = cache_of(device, "f16"), ct.State.empty((2, OUT), device=device)
    x = ct.asarray(random(2, IN), device=device)

    def step(x: ct.Tensor) -> None:
        cache.matmul("f16", x, out)

    replay = device.compile(step, x)
    for factor in (1, 3):
        replay(ct.asarray(factor * random(2, IN), device=device))
        wanted = factor * random(2, IN) @ weight_of("f16").T
        np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-5, atol=1e-3)


def test_a_call_is_one_write_one_submission_one_read(device: ct.Device) -> None:
    cache, x, bias = cache_of(device, "f16"), random(2, IN), random(OUT)
    wanted = x @ weight_of("f16").T + bias
    cache.matmul("f16", x, bias=bias)
    with ct.ledger() as led, ct.forbid("compile", "allocation"):
        got = cache.matmul("f16", x, bias=bias)
        led.expect(
            uploads=1, submissions=1, downloads=1, launches=1, copies=0, plans=0,
            parameter_bytes=0,
        )  # fmt: skip
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


def test_threads_share_a_cache(device: ct.Device) -> None:
    cache = cache_of(device, "f32", "f16")
    inputs = [(dtype, i * random(1 + i % 2, IN)) for i in range(24) for dtype in ("f32", "f16")]

    def product(call: tuple[str, Array]) -> Array:
        return cache.matmul(*call)

    with ThreadPoolExecutor(8) as pool:
        for (dtype, x), got in zip(inputs, pool.map(product, inputs), strict=True):
            np.testing.assert_allclose(got, x @ weight_of(dtype).T, rtol=1e-5, atol=1e-3)


def test_weights_are_replaced_while_threads_use_them(device: ct.Device) -> None:
    cache, x = cache_of(device, "f32"), random(1, IN)
    one = x @ weight_of("f32").T
    seen: set[int] = set()

    def use(turn: int) -> None:
        if turn % 8 == 0:
            cache.upload_weight("f32", (1 + turn // 8) * random(OUT, IN))
        got = cache.matmul("f32", x)
        factor = round(float((got / one).mean()))
        np.testing.assert_allclose(got, factor * one, rtol=1e-5, atol=1e-3)
        seen.add(factor)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(32)))
    assert seen <= {1, 2, 3, 4}


def test_captures_are_few_however_many_shapes_there_are(device: ct.Device) -> None:
    where = ct.device(device.name.partition(":")[0]) if device.name == "simulator" else device
    cache = cache_of(where, "f32")
    captures = cache._weights["f32"].replayed
    for m in range(1, 13):
        np.testing.assert_allclose(
            cache.matmul("f32", random(m, IN)), random(m, IN) @ weight_of("f32").T, 1e-5, 1e-4
        )
    assert captures.signatures == 8
    first = set(captures._captured)
    cache.matmul("f32", random(3, IN))
    assert set(captures._captured) == first
    for _ in range(2):  # once is no reason to let another go
        cache.matmul("f32", random(40, IN))
    assert captures.signatures == 8
    assert len(first & set(captures._captured)) == 7
    large = np.ones((2000, IN), np.float32)
    for _ in range(2):
        np.testing.assert_allclose(
            cache.matmul("f32", large)[:1], large[:1] @ weight_of("f32").T, 1e-5, 1e-4
        )
    assert len(first & set(captures._captured)) == 7


def test_the_memory_of_a_weight_comes_back(device: ct.Device) -> None:
    where = ct.device(device.name.partition(":")[0]) if device.name == "simulator" else device
    cache = cache_of(where, "f32")
    cache.matmul("f32", random(1, IN))
    where.pool.drain()
    live = where.memory.live
    for turn in range(3):
        cache.upload_weight("other", random(OUT, IN))
        cache.matmul("other", random(1 + turn, IN))
        cache.remove("other")
    where.pool.drain()
    assert where.memory.live == live  # without help of the garbage collector


def test_a_product_of_arrays_is_no_part_of_a_capture(device: ct.Device) -> None:
    cache, x = cache_of(device, "f32"), random(1, IN)
    with pytest.raises(ct.ContractError, match="read while a function is captured; return it"):
        device.compile(lambda t: t + cache.matmul("f32", x), random(1, OUT))
    with device.batch():  # a batch goes on: the product has its own submission
        got = cache.matmul("f32", x)
    np.testing.assert_allclose(got, x @ weight_of("f32").T, 1e-5, 1e-4)


def test_other_lengths_of_one_kind_compile_nothing(device: ct.Device) -> None:
    cache = cache_of(device, "f16")
    for m in (5, 40):
        cache.matmul("f16", random(m, IN))
    with ct.ledger() as led:
        for m in (6, 7, 8, 41, 90):
            cache.matmul("f16", random(m, IN))
    led.expect(compiles=0)


def test_the_table_of_weights(device: ct.Device) -> None:
    cache = ct.MatmulCache(device)
    assert (cache.weight_count, cache.weight_bytes, cache.weights()) == (0, 0, ())
    for dtype, item in (("f32", 4), ("f16", 2), ("i8", 1)):
        cache.upload_weight(dtype, random(8, 32), dtype)
        last = cache.weights()[-1]
        assert (last.name, last.shape, last.dtype.name) == (dtype, (8, 32), dtype)
        assert last.nbytes == 8 * 32 * item + (32 if dtype == "i8" else 0)
    assert cache.weight_count == 3 and "f16" in cache and "other" not in cache
    assert cache.weight_bytes == sum(w.nbytes for w in cache.weights())
    assert repr(cache) == (
        f"<MatmulCache of 3 weights, {cache.weight_bytes:,} bytes on {device.name}>"
    )


def test_weights_are_replaced_and_removed(device: ct.Device) -> None:
    cache, x = cache_of(device, "f32", "f16"), random(2, IN)
    before = cache.matmul("f16", x)
    waiting = cache.matmul("f32", ct.asarray(x, device=device))
    cache.upload_weight("f32", 2 * random(5, IN))
    np.testing.assert_allclose(cache.matmul("f32", x), 2 * x @ random(5, IN).T, 1e-5, 1e-4)
    np.testing.assert_array_equal(cache.matmul("f16", x), before)
    np.testing.assert_allclose(waiting.numpy(), x @ weight_of("f32").T, 1e-5, 1e-4)
    assert [w.name for w in cache.weights()] == ["f32", "f16"]
    cache.remove("f32")
    assert [w.name for w in cache.weights()] == ["f16"]
    np.testing.assert_array_equal(cache.matmul("f16", x), before)


def test_weights_that_are_tensors(device: ct.Device) -> None:
    cache, x = ct.MatmulCache(device), random(3, IN)
    whole = ct.asarray(random(IN, OUT), device=device)
    cache.upload_weight("turned", whole.T)
    cache.upload_weight("narrow", whole.T, "f16")
    cache.upload_weight("whole", whole.T, "i8")
    wanted = x @ random(IN, OUT)
    for name, near in (("turned", 1e-4), ("narrow", 3e-2), ("whole", 0.3)):
        np.testing.assert_allclose(cache.matmul(name, x), wanted, atol=near)


def test_batches_record_products(device: ct.Device) -> None:
    cache, x = cache_of(device, "f32"), random(3, IN)
    with ct.ledger() as led, device.batch() as batch:
        y = cache.matmul("f32", batch.upload(x), activation="relu")
    led.expect(submissions=1, uploads=1)
    wanted = np.maximum(x @ weight_of("f32").T, 0)
    np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.devices("webgpu-minimum", "webgpu")
def test_a_weight_larger_than_the_device_allows(device: ct.Device) -> None:
    cache = cache_of(device, "f32")
    most = device.caps.max_buffer
    rows = most // 4096 + 1
    wide = np.broadcast_to(np.float16(1), (rows, 2048))
    with pytest.raises(ct.LimitError, match=rf"'big' .* needs .* allows {most:,} in a buffer"):
        cache.upload_weight("big", wide)
    assert [w.name for w in cache.weights()] == ["f32"]


def test_mistakes(device: ct.Device) -> None:
    cache, x = cache_of(device, "f32", "i8"), random(2, IN)
    with pytest.raises(ct.WeightsError, match=r"no weight 'f16'; there are 'f32', 'i8'"):
        cache.matmul("f16", x)
    with pytest.raises(ct.WeightsError, match=r"no weight 'f16'; there are none"):
        ct.MatmulCache(device).remove("f16")
    with pytest.raises(ct.ShapeError, match=r"upload_weight: expected 'v' \[out, in\], got \[45\]"):
        cache.upload_weight("v", x[0])
    with pytest.raises(ct.DTypeError, match=r"upload_weight: float64 .* pass dtype="):
        cache.upload_weight("v", x.astype(np.float64))
    with pytest.raises(ct.DTypeError, match="upload_weight: expected 'v' of floats, got i32"):
        cache.upload_weight("v", x.astype(np.int32))
    with pytest.raises(ct.DTypeError, match="upload_weight: expected 'v' of floats, got i8"):
        cache.upload_weight("v", x.astype(np.int8))
    with pytest.raises(ct.DTypeError, match="quantize_int8: expected floats, got int32"):
        cache.upload_weight("v", x.astype(np.int32), "i8")
    with pytest.raises(ct.ShapeError, match=r"linear: expected x \[..., k\]"):
        cache.matmul("f32", x[:, 1:])
    assert cache.weight_count == 2
    wrong: Any = ct.zeros((2, OUT), device=device)
    with pytest.raises(ct.DTypeError, match="expected a State as out, got Tensor"):
        cache.matmul("f32", x, wrong)
    with pytest.raises(ct.ShapeError, match=r"expected out \[2, 37\], got \[5, 2, 37\]"):
        cache.matmul("f32", x, ct.State.empty((5, 2, OUT), device=device))
    out = ct.State(np.ones((2, OUT), np.float16), device=device)
    with pytest.raises(ct.DTypeError, match="MatmulCache: expected out of f32, got f16"):
        cache.matmul("f32", x, out)
    other = ct.device("cpu", cache=ct.PipelineCache())
    with pytest.raises(ct.DeviceError, match=r"MatmulCache: expected out on .*, got one on cpu"):
        cache.matmul("f32", x, ct.State.empty((2, OUT), device=other))
    assert np.array_equal(out.numpy(), np.ones((2, OUT)))
