"""Fusion is invisible in the result: bit for bit on the CPU, CUDA and the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.plan import fuse
from centella.tensors import functional as f

Array = np.ndarray[Any, Any]
X = np.random.default_rng(7).standard_normal((37, 45)).astype(np.float32) * 3
W = np.random.default_rng(8).standard_normal(45).astype(np.float32)
FLOATS = ("f32", "f16", "bf16")


Kept = list[ct.Tensor]
Make = Callable[..., ct.Tensor]
Keep = Callable[[ct.Tensor], ct.Tensor]
Results = tuple[list[Array], int]


def as_it_is(t: ct.Tensor) -> ct.Tensor:
    """Keeps nothing: what reads it may be fused with it."""
    return t


def both_ways(
    build: Callable[[Make, Keep], Sequence[ct.Tensor]], given: Sequence[ct.Tensor] = ()
) -> tuple[Results, Results]:
    """Results and launches of one computation, fused, and with every intermediate kept.

    Args:
        build: takes a function that gives the next of `given`, and one for each intermediate.
    """
    kept: Kept = []

    def keep(t: ct.Tensor) -> ct.Tensor:
        kept.append(t)
        return t

    outcomes: list[Results] = []
    for each in (as_it_is, keep):
        left = iter(given)
        with ct.ledger() as led:
            values = ct.fetch(*build(lambda *shape, left=left: next(left), each)).result()
        led.expect(submissions=1)
        outcomes.append((values, led.launches))
    return outcomes[0], outcomes[1]


def chain(x: ct.Tensor, w: ct.Tensor, keep: Keep) -> ct.Tensor:
    """Nine ops, two of them casts."""
    a = keep(keep(x * w) + 1.5)
    b = keep(f.gelu(a))
    c = keep(keep(b * b) - a)
    d = keep(f.clip(keep(c.astype("f32")), -2, 2))
    return keep(d.astype(x.dtype)) * x


def tensors(device: ct.Device, dtype: str) -> tuple[ct.Tensor, ct.Tensor]:
    x, w = (ct.asarray(v, device=device).astype(dtype) for v in (X, W))
    ct.fetch(x, w).result()
    return x, w


def same(a: Array, b: Array, device: ct.Device, near: float = 0.0) -> None:
    """Bit for bit; within `near` on WebGPU, whose drivers may contract a product and a sum."""
    if near and device.caps.target == "wgsl":
        np.testing.assert_allclose(a.astype(np.float32), b, rtol=near, atol=near)
    else:
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_chain_is_one_launch_with_the_same_bits(device: ct.Device, dtype: str) -> None:
    x, w = tensors(device, dtype)
    (fused, few), (plain, many) = both_ways(lambda _, keep: [chain(x, w, keep)])
    assert (few, many) == (1, 7 if dtype == "f32" else 9)  # f32 is not cast
    same(fused[0], plain[0], device, {"f32": 1e-6, "f16": 2e-3, "bf16": 2e-2}[dtype])


def chosen(x: ct.Tensor, w: ct.Tensor, keep: Keep) -> ct.Tensor:
    """Floats to bools and back: comparisons with a number that rides, and with an operand."""
    scaled = keep(x * w)
    inside = keep(keep(scaled < 0.75) & ~keep(keep(f.square(x)) >= w))
    return f.where(keep(inside | keep(f.eq(x, 0))), scaled, -1.5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_comparisons_and_choices_are_one_launch_with_the_same_bits(
    device: ct.Device, dtype: str
) -> None:
    x, w = tensors(device, dtype)
    (fused, few), (plain, many) = both_ways(lambda _, keep: [chosen(x, w, keep)])
    assert (few, many) == (1, 8)
    same(fused[0], plain[0], device)
    assert (fused[0] == -1.5).any() and (fused[0] != -1.5).any()


def test_casts_of_comparisons_are_one_launch(device: ct.Device) -> None:
    x, _ = tensors(device, "f32")
    whole = np.arange(X.size, dtype=np.int32).reshape(X.shape) - 800
    n = ct.asarray(whole, device=device)
    ct.fetch(n).result()
    with ct.ledger() as led:
        got = ((x > 1).astype("f32") * x + f.eq(n // 5 % 3, 2).astype("f32")).numpy()
        led.expect(launches=1)
    assert np.array_equal(got, (X > 1) * X + (whole // 5 % 3 == 2).astype(np.float32))


def test_what_is_kept_is_computed(device: ct.Device) -> None:
    x, w = tensors(device, "f32")
    a = x * w
    y = a + 1.0
    got_a, got_y = ct.fetch(a, y).result()
    assert np.array_equal(got_a, X * W)
    assert np.allclose(got_y, X * W + 1, rtol=1e-6, atol=1e-6)


def test_integers_wrap_in_a_chain_as_in_memory(device: ct.Device) -> None:
    n = ct.asarray(np.arange(-128, 128, dtype=np.int8), device=device)
    ct.fetch(n).result()
    with ct.ledger() as led:
        got = ((n * 3 + 5) * n).numpy()
        led.expect(launches=1)
    values = np.arange(-128, 128, dtype=np.int8)
    with np.errstate(over="ignore"):
        want = (values * np.int8(3) + np.int8(5)) * values
    assert np.array_equal(got, want)


def test_a_diamond_is_one_launch(device: ct.Device) -> None:
    x, _ = tensors(device, "f32")
    with ct.ledger() as led:
        e = f.exp(x * 0.1)
        y = (e + 1.0) / (e + 2.0)
        del e
        got = y.numpy()
        led.expect(launches=1)
    e64 = np.exp(X.astype(np.float64) * 0.1)
    assert np.allclose(got, (e64 + 1) / (e64 + 2), rtol=1e-6)


def test_long_chains_are_cut(device: ct.Device) -> None:
    x = ct.asarray(np.zeros(5, np.float32), device=device)
    ct.fetch(x).result()
    with ct.ledger() as led:
        y = x
        for _ in range(130):
            y = y + 1.0
        assert np.array_equal(y.numpy(), np.full(5, 130))
    led.expect(launches=3)  # of 64, 64 and 2


def test_many_operands_are_cut_at_what_the_device_binds(device: ct.Device) -> None:
    parts = [ct.asarray(np.full(6, i, np.float32), device=device) for i in range(20)]
    ct.fetch(*parts).result()
    with ct.ledger() as led:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert np.array_equal(total.numpy(), np.full(6, 190))
    # Of 8 bindings one is the result's: six sums a launch. More is limited by parameters.
    led.expect(launches=4 if device.caps.max_storage_buffers == 8 else 2)


def test_a_chain_over_a_state_reads_it_before_it_changes(device: ct.Device) -> None:
    state = ct.State(np.ones(6, np.float32), device=device)
    y = state.value * 2
    z = y + 1.0
    del y
    state.assign(100)
    assert np.array_equal(z.numpy(), np.full(6, 3))


def test_broadcast_operands_and_views(device: ct.Device) -> None:
    x, w = tensors(device, "f32")
    column = ct.asarray(X[:, :1], device=device)
    square = ct.asarray(X[:37, :37].copy(), device=device)
    got = ((x - column) * w).numpy()
    assert np.allclose(got, (X - X[:, :1]) * W, rtol=1e-6, atol=1e-6)
    turned = (square.T * 2.0 + square).numpy()
    assert np.array_equal(turned, X[:37, :37].T * 2 + X[:37, :37])


def test_a_view_between_two_ops_ends_the_chain(device: ct.Device) -> None:
    x = ct.asarray(X[:5, :5].copy(), device=device)
    doubled = X[:5, :5] * 2
    turned = ((x * 2.0).T + x).numpy()
    assert np.array_equal(turned, doubled.T + X[:5, :5])
    rolled = ((x * 2.0)[1:] + (x * 2.0)[:-1]).numpy()
    assert np.array_equal(rolled, doubled[1:] + doubled[:-1])
    row = ((x[0] * 2.0) + x).numpy()
    assert np.array_equal(row, doubled[0] + X[:5, :5])


def test_explain_says_what_was_fused(device: ct.Device) -> None:
    x, w = tensors(device, "f32")
    batch = device.batch()
    with batch:
        y = chain(x, w, as_it_is)
    assert y.shape == X.shape
    assert "6 fused" in batch.explain()


def test_empty_and_scalar(device: ct.Device) -> None:
    e = ct.asarray(np.zeros((0, 3), np.float32), device=device)
    assert ((e + 1.0) * 2.0).numpy().shape == (0, 3)
    s = ct.asarray(np.float32(2), device=device)
    assert ((s + 1.0) * 2.0).item() == 6.0


# -- before and after norms and reductions ---------------------------------------------------------


def embeddings(t: Make, keep: Keep) -> ct.Tensor:
    """Word, type and position added, then normalised: operands of three shapes."""
    words, kind, positions = t(3, 5, 44), t(2, 44), t(7, 44)
    total = keep(keep(words + kind[0]) + positions[:5])
    return f.layer_norm(total, t(44), t(44))


def residual(t: Make, keep: Keep) -> ct.Tensor:
    """A residual before, a gate after, which reads the sum too."""
    total = keep(t(6, 40) * 0.5 + t(6, 40))
    normal = keep(f.rms_norm(total, t(40)))
    return keep(f.gelu(normal)) * total


def scaled_rows(t: Make, keep: Keep) -> ct.Tensor:
    """A value a row and a scalar before; another dtype between."""
    x = keep(keep(t(9, 37) - t(9, 1)) * t(1))
    return keep(f.l2_normalize(x)) + t(37)


def odd_rows(t: Make, keep: Keep) -> ct.Tensor:
    """Rows that begin off every boundary."""
    return keep(f.layer_norm(keep(t(5, 34)[:, 1:] + t(33)))) * t(5, 36)[:, 3:]


def squares(t: Make, keep: Keep) -> ct.Tensor:
    """A sum of products, and what follows from it."""
    total = keep(f.mean(keep(keep(t(2, 9, 50) * t(9, 50)) + 1.0), -1))
    return keep(keep(total + 0.25) * t(2, 9)) - t(9)


def largest(t: Make, keep: Keep) -> ct.Tensor:
    """A maximum of magnitudes, by column."""
    return keep(f.max(keep(f.abs(t(23, 6))), 0)) * 2.0


def long_rows(t: Make, keep: Keep) -> ct.Tensor:
    """Rows that are reduced in two launches."""
    return keep(f.sum(keep(t(2, 16500) * t(16500)), -1)) + t(2)


def casts(t: Make, keep: Keep) -> ct.Tensor:
    """Narrow storage, statistics of a wider value, narrow again."""
    x = t(4, 48)
    wide = keep(keep(x.astype("f32")) * 3.0)
    return keep(f.rms_norm(wide, t(48).astype("f32"))).astype(x.dtype)


def in_columns(t: Make, keep: Keep) -> ct.Tensor:
    """A turned operand: a norm does not walk across memory, a reduction does."""
    turned = keep(t(33, 5).T + t(5, 33))
    return f.layer_norm(turned)


def two_norms(t: Make, keep: Keep) -> ct.Tensor:
    """What stands between two norms belongs to one of them."""
    first = keep(f.rms_norm(keep(t(4, 32) + 1.0)))
    return f.layer_norm(keep(keep(first * 2.0) + t(32)))


def gated(t: Make, keep: Keep) -> ct.Tensor:
    """A long chain, of rows that leave fewer places empty where threads hold more of them."""
    return keep(f.rms_norm(t(2, 640), t(640))) * keep(f.swish(t(2, 640)))


PATTERNS = {
    "embeddings": (embeddings, 1), "residual": (residual, 1), "scaled rows": (scaled_rows, 1),
    "odd rows": (odd_rows, 1), "squares": (squares, 1), "largest": (largest, 2),
    "long rows": (long_rows, None), "casts": (casts, None), "in columns": (in_columns, None),
    "two norms": (two_norms, 2), "gated": (gated, 1),
}  # fmt: skip


@pytest.mark.first("dtype", "webgpu")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", PATTERNS)
def test_chains_join_norms_and_reductions(device: ct.Device, name: str, dtype: str) -> None:
    build, launches = PATTERNS[name]
    rng = np.random.default_rng(len(name))
    given: list[ct.Tensor] = []

    def make(*shape: int) -> ct.Tensor:
        values = rng.standard_normal(shape).astype(np.float32)
        given.append(ct.asarray(values, device=device).astype(dtype))
        return given[-1]

    build(make, as_it_is)
    ct.fetch(*given).result()
    (fused, few), (plain, many) = both_ways(lambda t, keep: [build(t, keep)], given)
    assert few == launches or launches is None
    assert many >= few + (name != "in columns")
    same(fused[0], plain[0], device, {"f32": 1e-5, "f16": 4e-3, "bf16": 4e-2}[dtype])


def test_a_sum_that_is_kept_is_stored_by_itself(device: ct.Device) -> None:
    x, w = tensors(device, "f32")
    with ct.ledger() as led:
        total = x + w
        normal = f.layer_norm(total)
        ct.fetch(total, normal).result()
        led.expect(launches=2)


def test_a_computed_weight_is_no_prologue(device: ct.Device) -> None:
    x = ct.asarray(X[0], device=device)
    got = f.rms_norm(x, x * 2.0).numpy()
    kept = [x * 2.0]
    same(got, f.rms_norm(x, kept[0]).numpy(), device)


def test_a_norm_of_a_state_reads_it_before_it_changes(device: ct.Device) -> None:
    state = ct.State(X, device=device)
    y = f.layer_norm(state.value) * 2.0
    z = f.sum(state.value * 1.0, -1) + 1.0
    state.assign(0)
    assert np.allclose(z.numpy(), X.sum(-1) + 1, rtol=1e-5, atol=1e-4)
    centred = X - X.mean(-1, keepdims=True)
    want = 2 * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    assert np.allclose(y.numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.devices("cpu", "simulator", "webgpu-minimum")
def test_a_kernel_holds_so_many_statements(device: ct.Device) -> None:
    x = ct.asarray(np.linspace(-2, 2, 48, dtype=np.float32), device=device).astype("bf16")
    ct.fetch(x).result()
    with ct.ledger() as led:
        y = x
        for _ in range(30):
            y = f.gelu(y) * 1.5
        result = f.layer_norm(y).astype("f32")
        del y
        fused = result.numpy()
    assert led.launches == 1 if device.name == "cpu" else 2 <= led.launches <= 12
    kept = [x]
    for _ in range(30):
        kept.append(f.gelu(kept[-1]))
        kept.append(kept[-1] * 1.5)
    plain = f.layer_norm(kept[-1]).astype("f32").numpy()
    assert np.allclose(fused, plain, rtol=2e-2, atol=2e-2)


@pytest.mark.devices("simulator", "webgpu")
def test_explain_names_what_is_fused_and_what_is_copied(device: ct.Device) -> None:
    x, w = tensors(device, "f32")
    square = ct.asarray(X[:33, :33].copy(), device=device)
    batch = device.batch()
    with batch:
        normal = f.rms_norm(x * 2.0 + w, w) - x
        largest = f.max(f.abs(x) + 1.0, -1)
        turned = f.softmax(square.T)
        flat = x.reshape(-1)
        outputs = [normal, largest, turned, flat]
        text = batch.explain(outputs=outputs)
    assert "norm <- mul add -> sub" in text
    assert "reduce <- abs add" in text
    assert "copy for softmax operand 0: rows are not contiguous" in text
    assert "reshape across padding" in text
    assert "largest live set" in text
    assert f"reads {x.nbytes + w.nbytes:,}, writes {x.nbytes:,} bytes" in text


# -- anything --------------------------------------------------------------------------------------

SHAPES = ((3, 5, 34), (5, 34), (34,), (3, 5, 1), (3, 5), (5,), (1,))


def anything(seed: int, make: Make, keep: Keep) -> list[ct.Tensor]:
    """Some forty ops over operands of many shapes; three results."""
    rng = np.random.default_rng(seed)
    have = [make(*shape) for shape in SHAPES]
    for _ in range(40):
        x = have[int(rng.integers(len(have)))]
        y = have[int(rng.integers(len(have)))]
        pick = int(rng.integers(8))
        if pick == 0:
            result = f.gelu(x)
        elif pick == 1:
            result = x * 0.5
        elif pick == 2:
            result = f.rms_norm(x)
        elif pick == 3 and x.ndim > 1:
            result = f.mean(x, -1)
        elif pick == 4 and x.ndim > 1:
            result = f.max(x, -1, keepdims=bool(rng.integers(2)))
        else:
            try:
                shape = np.broadcast_shapes(x.shape, y.shape)
            except ValueError:
                continue
            if shape not in SHAPES:
                continue
            result = f.maximum(x, y) if pick == 5 else x + y if pick == 6 else x - y
        have[int(rng.integers(len(have)))] = keep(result)
    return have[-3:]


@pytest.mark.devices("cpu", "simulator", "cuda")
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_fused_have_the_same_bits(device: ct.Device, seed: int) -> None:
    dtype = FLOATS[seed % 3]
    rng = np.random.default_rng(seed)
    given = [
        ct.asarray(rng.standard_normal(s).astype(np.float32), device=device).astype(dtype)
        for s in SHAPES
    ]
    ct.fetch(*given).result()
    (fused, few), (plain, many) = both_ways(lambda t, keep: anything(seed, t, keep), given)
    assert few < many
    for a, b in zip(fused, plain, strict=True):
        same(a, b, device)


@pytest.mark.devices("cpu", "simulator")
def test_attributes_of_a_form_are_read_once(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = ct.asarray(X, device=device), ct.asarray(W, device=device)
    kept = [chain(x, w, as_it_is)]
    device.synchronize()
    monkeypatch.setattr(fuse, "numbers_of", lambda *_: pytest.fail("read again"))
    kept += [chain(x, w, as_it_is) for _ in range(2)]  # another plan of known forms
    device.synchronize()
    same(kept[0].numpy(), kept[2].numpy(), device)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("dtype", FLOATS)
def test_blocks_of_rows_have_the_bits_of_all_rows(device: ct.Device, dtype: str) -> None:
    """Several blocks, the last of one row; an operand whose memory is in another order."""
    rng = np.random.default_rng(9)
    shapes = ((164, 7, 200), (200, 7, 164), (7, 200), (200,), (164, 7), (65, 1009))
    given = [
        ct.asarray(rng.standard_normal(s).astype(np.float32), device=device).astype(dtype)
        for s in shapes
    ]
    ct.fetch(*given).result()
    x, y, z, w, rows, long = given
    turned = y.permute(2, 1, 0)

    def results(keep: Keep) -> list[ct.Tensor]:
        return [
            f.layer_norm(keep(keep(x * 0.5) + z), w, w),
            keep(f.rms_norm(keep(turned + x), w)) * w,
            keep(f.layer_norm(turned)) + 1.0,
            f.mean(keep(x * turned), -1),
            keep(f.sum(keep(turned * 2.0), -1)) - rows,
            f.max(keep(f.abs(long)), -1),
            f.sum(keep(long - 0.5), -1),
        ]

    (fused, few), (plain, many) = both_ways(lambda _, keep: results(keep))
    assert few < many
    for a, b in zip(fused, plain, strict=True):
        same(a, b, device)
