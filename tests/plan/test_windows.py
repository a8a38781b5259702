"""Tensors above a binding: divided launches, bound by windows, give what whole ones would.

The devices here bind 4 KB at once, so that tensors of few KB are above it. A weight above the
128 MB that WebGPU guarantees is in `test_floor_faults.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.check.cases.case import Array, rng_of, tensor_of, values_of
from centella.check.cases.compare import TOLERANCE, attrs_of, limit_of, record, reference_of
from centella.check.cases.fits import variant_fits
from centella.check.cases.table import TABLE
from centella.dtypes import dtype_of, narrow, widen
from tests.ops.test_ops import OPS, check
from tests.support.devices import WINDOWED
from tests.support.seed_surface import attended
from tests.support.windowed import BINDING, windowed

FLOATS = ("f32", "f16", "bf16")
LARGER = {
    **dict.fromkeys(("attention", "conv1d", "rope", "cache_write", "mean_pool"), 512),
    **dict.fromkeys(("matmul", "linear", "dequantize"), 1024),
}
EVERYWHERE = pytest.mark.devices(*WINDOWED)
AT_ONCE = r"{}: .* has [\d,]+ bytes, of which this device binds [\d,]+ at once; "


def random(*shape: int, dtype: str = "f32") -> Array:
    """Values as a dtype stores them, computed with in float64 (or as whole numbers)."""
    kind, rng = dtype_of(dtype), rng_of(dtype, shape)
    if kind.is_float:
        wide = widen(narrow(rng.standard_normal(shape).astype(np.float32), kind), kind)
        return wide.astype(np.float64)
    return rng.integers(0 if kind.name == "bool" else -100, 2, shape).astype(kind.numpy)


def on(device: ct.Device, value: Array, dtype: str = "f32") -> ct.Tensor:
    return ct.asarray(narrow(np.asarray(value, np.float32), dtype_of(dtype)), dtype, device)


def agree(
    wanted: Array, got: ct.Tensor, *, least: int = 2, sums: bool = False, exact: bool = False
) -> int:
    """Fail unless a result is right, and computed by `least` launches or more; how many."""
    limit = 0.0 if exact else TOLERANCE.get(got.dtype.name, (0.0, 0.0))[sums]
    check(got, got.numpy(), np.asarray(wanted), limit, got)
    assert got.kernel_launches >= least
    return got.kernel_launches


# -- every op -------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", OPS)
def test_op(name: str, left: bool) -> None:
    """The table of ops where next to nothing fits: right, or refused by name, limit and size.

    In a dtype past the first that a case takes, two of three are left to the sweep.
    """
    binding = LARGER.get(name, 128)
    device = windowed("simulator", "exact", binding=binding, alignment=16)
    row = TABLE[name]
    dtypes = [d for d in row.dtypes if d in ("f32", "f16", "i8", "bool")]
    for dtype in dtypes:
        for n, case in enumerate(row.cases):
            further = dtype != next((d for d in dtypes if d in (case.dtypes or dtypes)), dtype)
            if (further and n % 3 > 0) is not left:
                continue
            values = [values_of(i, dtype, rng_of(name, case, n)) for n, i in enumerate(case.inputs)]
            quick = case.small and case.attrs.get("variant") not in ("medium", "large")
            few = quick and sum(v.nbytes for v in values) <= min(8 * binding, 4096)
            listed = not case.dtypes or dtype in case.dtypes
            if not (few and listed and variant_fits(case, dtype, device.caps)):
                continue
            wanted = reference_of(name, case, dtype, values)
            pairs = zip(case.inputs, values, strict=True)
            tensors = [tensor_of(i, v, dtype, device) for i, v in pairs]
            try:
                outs = record(OPS[name], tensors, attrs_of(case, dtype), device)
                read = ct.fetch(*outs).result()
            except ct.LimitError as error:
                assert re.search(AT_ONCE.format(r"\w+"), str(error)), case
                device.recorder.implicit().fail()
                continue
            for got, value, right in zip(outs, read, wanted, strict=True):
                limit = limit_of(row, got.dtype.name)
                check(got, value, right, limit, f"{name} {dtype} {case}")


def test_every_op_can_be_divided() -> None:
    whole = {name for name, op in OPS.items() if op.axes is None}
    # 8 bytes a sequence; the table of a step's blocks; candidates, and 4 bytes a token; a byte a
    # slot that a beam may see. The planner makes `attend_linear` only where everything fits.
    assert whole == {"cache_step", "beam_blocks", "beam_select", "speech_move", "attend_linear"}


# -- moving ---------------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("dtype", ["f32", "f16", "i8", "bool"])
def test_moves(device: ct.Device, dtype: str) -> None:
    x = random(71, 133, dtype=dtype)
    t = on(device, x, dtype)
    check(t, t.numpy(), x, 0.0, "there and back")
    agree(x, t.copy(), exact=True)
    agree(x.T, t.T.copy(), exact=True)
    agree(x[3:69:2, 5:], t[3:69:2, 5:].copy(), exact=True)
    agree(x.reshape(-1), t.reshape(-1), exact=True)
    agree(x.reshape(7, 19, 71), t.reshape(7, 19, 71), exact=True)
    agree(x.reshape(1, -1, 71), t.reshape(1, -1, 71), exact=True)
    agree(x.reshape(-1)[3:].reshape(2, 2, -1), t.reshape(-1)[3:].reshape(2, 2, -1), exact=True)
    agree(x.T.reshape(71, 7, 19), t.T.reshape(71, 7, 19), exact=True)
    small = t[64:66, 7:12]  # the last KB of a buffer larger than a binding: one launch, one window
    assert agree(x[64:66, 7:12], small.copy(), least=1, exact=True) == 1
    agree(np.concatenate([x, x[:5], x]), ct.concat([t, t[:5], t]), exact=True)
    agree(np.concatenate([x, x[:, :5]], 1), ct.concat([t, t[:, :5]], 1), exact=True)
    agree(np.stack([x, x], 2), ct.stack([t, t], 2), exact=True)
    long = np.concatenate([x[0], x.reshape(-1), x[1]])
    agree(long, ct.concat([t[0], t.reshape(-1), t[1]]), exact=True)
    agree(np.full((71, 133), 1), ct.full((71, 133), 1, dtype, device), least=3, exact=True)


def test_windows_that_may_begin_on_any_word() -> None:
    """Room is counted in whole chunks, as storage is: 16 rows of 32 bytes are 4 too many."""
    device = windowed("simulator", "exact", binding=512, alignment=4)
    assert device.caps.safe_binding % 16 == 0
    x = random(32, 5)
    agree(x * 2, on(device, x) * 2.0)


@EVERYWHERE
def test_casts(device: ct.Device) -> None:
    x = random(61, 50)
    for dtype in ("f16", "i8", "bool", "u32"):
        kind = dtype_of(dtype)
        wanted = x != 0 if kind.name == "bool" else np.trunc(x) if not kind.is_float else x
        if dtype == "u32":
            wanted = np.maximum(wanted, 0)
        agree(wanted, on(device, x).astype(dtype), exact=not kind.is_float)
    agree(np.arange(5, 9005, 3), ct.arange(5, 9005, 3, "i32", device), exact=True)


# -- element by element ---------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("dtype", FLOATS)
def test_chains(device: ct.Device, dtype: str) -> None:
    x, y, row, column = (random(*s, dtype=dtype) for s in ((57, 91), (57, 91), (91,), (57, 1)))
    a, b, c, d = (on(device, v, dtype) for v in (x, y, row, column))
    agree(x + y.T.T * 1.0, a + b)
    agree(x * row, a * c)
    agree(row * column, c * d)
    turned = on(device, y.T, dtype)
    agree(x - y, a - turned.T)
    with device.batch() as batch:
        z = ct.relu(a * c + d) - b * 0.5
    assert batch.explain().count("launches") and z.kernel_launches >= 2
    if dtype == "f32":  # intermediates of a narrow chain are rounded
        check(z, z.numpy(), np.maximum(x * row + column, 0) - y * 0.5, 1e-12, "a chain")
    vector = random(12_001, dtype=dtype)
    agree(-vector, -on(device, vector, dtype))


@EVERYWHERE
def test_a_divided_chain_has_the_bits_of_its_ops(device: ct.Device) -> None:
    x, row = on(device, random(60, 40), "f16"), on(device, random(40), "f16")
    one = (x + row).numpy()
    two = (on(device, one, "f16") * 3.0).numpy()
    with device.batch() as batch:
        chain = ct.softmax((x + row) * 3.0)
    plain = ct.softmax(on(device, two, "f16")).numpy()
    np.testing.assert_array_equal(batch.read(chain), plain)


# -- rows -----------------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows(device: ct.Device, dtype: str) -> None:
    x, w, b = (random(*s, dtype=dtype) for s in ((3, 29, 67), (67,), (67,)))
    t, weight, bias = (on(device, v, dtype) for v in (x, w, b))
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    agree(normal * w + b, ct.layer_norm(t, weight, bias), sums=True)
    agree(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w, ct.rms_norm(t, weight), sums=True)
    e = np.exp(x - x.max(-1, keepdims=True))
    agree(e / e.sum(-1, keepdims=True), ct.softmax(t), sums=True)
    agree(x - x.max(-1, keepdims=True) - np.log(e.sum(-1, keepdims=True)), ct.log_softmax(t),
          sums=True)  # fmt: skip
    agree(x.sum(-1), ct.sum(t, -1), sums=True)
    agree(x.sum(1), ct.sum(t, 1), sums=True)
    agree(x.max(-1), ct.max(t, -1), exact=True)
    agree(x.argmax(-1), ct.argmax(t, -1), exact=True)
    with device.batch():
        y = ct.layer_norm(t + bias) * 2.0
        s = ct.sum(t * weight, -1)
    if dtype == "f32":
        shifted = x + b
        centred = shifted - shifted.mean(-1, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        check(y, y.numpy(), normal * 2, 1e-11, "a norm in a chain")
        check(s, s.numpy(), (x * w).sum(-1), 1e-11, "a sum in a chain")


@EVERYWHERE
@pytest.mark.parametrize("dtype", ["f32", "f16", "i8"])
def test_one_long_row(device: ct.Device, dtype: str) -> None:
    """What the parts of a row give is put together."""
    x = random(15_013, dtype=dtype)
    t = on(device, x, dtype)
    agree(x.sum(dtype=None if dtype != "i8" else np.int32), ct.sum(t), sums=True)
    agree(x.max(), ct.max(t), exact=True)
    agree(x.min(), ct.min(t), exact=True)
    wide: Any = x.astype(np.float64 if dtype != "i8" else np.int32)
    agree((wide * wide).sum(), ct.dot(t, t), sums=True)
    if dtype != "i8":
        agree(x.mean(), ct.mean(t), sums=True)
        rows = random(9, 901, dtype=dtype)
        agree(rows.sum(-1), ct.sum(on(device, rows, dtype), -1), sums=True)
    with device.batch():
        whole = ct.sum(t * 2)  # not fused: one by one they are divided
    check(whole, whole.numpy(), wide.sum() * 2 if dtype != "i8" else (x * np.int8(2)).sum(
        dtype=np.int32), TOLERANCE.get(dtype, (0.0, 0.0))[1] * 4, "a long chain")  # fmt: skip


@EVERYWHERE
def test_rows_that_what_follows_them_would_cut_across(device: ct.Device) -> None:
    """Not fused: parts of an operand that lies the other way leave no rows one pitch apart."""
    x, across = random(64, 64, 2), random(64, 64)
    t, turned = on(device, x), on(device, across).T
    with device.batch():
        total, largest = ct.sum(t, -1) + turned, ct.max(t, -1) * turned
        unit = ct.l2_normalize(t) + turned[:, :, None]
    agree(x.sum(-1) + across.T, total, sums=True)
    agree(x.max(-1) * across.T, largest)
    lengths = np.sqrt((x**2).sum(-1, keepdims=True))
    agree(x / lengths + across.T[:, :, None], unit, sums=True)


# -- products -------------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("m", "variant"), [(1, "gemv"), (5, "skinny"), (20, "small"), (20, "medium"), (17, None)]
)
def test_a_weight(device: ct.Device, dtype: str, m: int, variant: str | None) -> None:
    x, w, b = (random(*s, dtype=dtype) for s in ((m, 41), (75, 41), (75,)))
    r = random(m, 75, dtype=dtype)
    left, weight, bias, residual = (on(device, v, dtype) for v in (x, w, b, r))
    agree(x @ w.T, ct.linear(left, weight, variant=variant), sums=True)
    got = ct.linear(left, weight, bias, residual=residual, activation="relu", alpha=0.5,
                    variant=variant)  # fmt: skip
    agree(np.maximum(0.5 * (x @ w.T) + b, 0) + r, got, sums=True)


@EVERYWHERE
@pytest.mark.parametrize("m", [1, 3, 33])
def test_a_weight_of_int8(device: ct.Device, m: int) -> None:
    x, w = random(m, 45), random(201, 45)
    quants, scale = ct.quantize_int8(w.astype(np.float32))
    weight = ct.asarray(quants, device=device)
    got = ct.linear(on(device, x), weight, scale=ct.asarray(scale, device=device))
    agree(x @ (quants.astype(np.float64) * scale[:, None]).T, got, sums=True)


@EVERYWHERE
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("m", [1, 7, 40])
def test_a_matrix_that_is_contiguous_along_n(device: ct.Device, dtype: str, m: int) -> None:
    """Divided along k: parts of the sums are added."""
    a, b = random(m, 203, dtype=dtype), random(203, 31, dtype=dtype)
    agree(a @ b, ct.matmul(on(device, a, dtype), on(device, b, dtype)), least=5, sums=True)
    turned = on(device, b.T, dtype).T
    agree(a @ b, ct.matmul(on(device, a, dtype), turned), sums=True)


@EVERYWHERE
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_rows_and_batches_of_products(device: ct.Device, dtype: str) -> None:
    x, w = random(2, 61, 21, dtype=dtype), random(19, 21, dtype=dtype)
    agree(x @ w.T, ct.linear(on(device, x, dtype), on(device, w, dtype)), sums=True)
    wide = random(90, 21, dtype=dtype)  # x, the weight and y
    agree(x @ wide.T, ct.linear(on(device, x, dtype), on(device, wide, dtype)), sums=True)
    a, b = random(9, 17, 23, dtype=dtype), random(9, 23, 18, dtype=dtype)
    agree(a @ b, on(device, a, dtype) @ on(device, b, dtype), sums=True)
    one = random(23, 18, dtype=dtype)
    agree(a @ one, on(device, a, dtype) @ on(device, one, dtype), sums=True)
    agree(x.swapaxes(1, 2) @ x, on(device, x, dtype).permute(0, 2, 1) @ on(device, x, dtype),
          sums=True)  # fmt: skip
    cache = ct.MatmulCache(device)
    cache.upload_weight("w", narrow(wide.astype(np.float32), dtype_of(dtype)), dtype)
    y = cache.matmul("w", on(device, x[0], dtype))
    agree(x[0] @ wide.T, y, sums=True)


# -- tables ---------------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_embedding(device: ct.Device, dtype: str) -> None:
    table = random(251, 43, dtype=dtype)
    ids = np.array([[0, 250, 7, 99], [-1, 251, 100, 7]], np.int32)
    inside = (ids >= 0) & (ids < 251)
    wanted = np.where(inside[..., None], table[np.where(inside, ids, 0)], np.nan)
    agree(wanted, ct.embedding(ct.asarray(ids, device=device), on(device, table, dtype)))
    many = rng_of("ids").integers(0, 251, 333).astype(np.int32)
    got = ct.embedding(ct.asarray(many, device=device), on(device, table, dtype))
    agree(table[many], got, least=8, exact=True)


@EVERYWHERE
@pytest.mark.parametrize("dtype", ["f32", "f16", "i8", "bool"])
def test_gather_and_scatter(device: ct.Device, dtype: str) -> None:
    x = random(203, 47, dtype=dtype)
    t = on(device, x, dtype)
    indices = np.array([202, 0, 7, 7, -103, -172], np.int32)
    at = ct.asarray(indices, device=device)
    agree(x[indices], ct.gather(t, at), exact=True)
    agree(x.T[:, indices], ct.gather(on(device, x.T, dtype), at, axis=1), exact=True)
    long = x.reshape(-1)
    many = rng_of("many").integers(-long.size, long.size, 3001).astype(np.int32)
    picked = ct.gather(t.reshape(-1), ct.asarray(many, device=device))
    agree(long[many], picked, exact=True)
    values = random(6, 47, dtype=dtype)
    y = x.copy()
    y[indices] = values
    agree(y, ct.scatter(t, at, on(device, values, dtype)), exact=True)
    rows = rng_of("rows").permutation(203).astype(np.int32)
    rows[5], rows[9], rows[12] = -204, 203, -1
    wide = random(203, 47, dtype=dtype)[::-1].copy()
    y = x.copy()
    kept = (rows >= -203) & (rows < 203)
    for row, value in zip(rows[kept], wide[kept], strict=True):  # of equal ones the last
        y[row] = value
    agree(y, ct.scatter(t, ct.asarray(rows, device=device), on(device, wide, dtype)), exact=True)


@EVERYWHERE
@pytest.mark.parametrize("dtype", ["f32", "f16", "i8"])
def test_order_sums_and_elements_along_an_axis(device: ct.Device, dtype: str) -> None:
    x = random(203, 47, dtype=dtype)
    t, rng = on(device, x, dtype), rng_of("along")
    order = np.argsort(x, 1, kind="stable")
    agree(order, ct.argsort(t), exact=True)
    turned = ct.asarray(order[::-1].astype(np.int32), device=device)
    agree(np.take_along_axis(x, order[::-1], 1), ct.take_along_axis(t, turned), exact=True)
    agree(np.cumsum(x, 1, np.int32 if dtype == "i8" else np.float64), ct.cumsum(t))
    at, values = rng.integers(-203, 203, 60).astype(np.int32), random(60, 47, dtype=dtype)
    y = x.astype(np.float32)
    np.maximum.at(y, at, values.astype(np.float32))
    given = ct.asarray(at, device=device), on(device, values, dtype)
    agree(y, ct.scatter(t, *given, reduce="max"), exact=True)
    if dtype == "f32":
        np.add.at(y := x.astype(np.float32), at, values.astype(np.float32))
        agree(y, ct.scatter(t, *given, reduce="add"), exact=True)


# -- sequences ------------------------------------------------------------------------------------


@EVERYWHERE
def test_attention_and_its_cache(device: ct.Device) -> None:
    q, k, v = random(2, 8, 9, 16), random(2, 4, 31, 16), random(2, 4, 31, 16)
    wanted = attended(q, k, v)
    tensors = [on(device, x) for x in (q, k, v)]
    for variant in ("stream", "split"):
        agree(wanted, ct.attention(*tensors, variant=variant), least=4, sums=True)
    causal = attended(q, k[:, :, :9], v[:, :, :9], causal=True)
    short = [tensors[0], tensors[1][:, :, :9], tensors[2][:, :, :9]]
    agree(causal, ct.attention(*short, causal=True), sums=True)
    lengths = ct.asarray(np.array([31, 20], np.int32), device=device)
    some = np.concatenate([wanted[:1], attended(q[1:], k[1:, :, :20], v[1:, :, :20])])
    agree(some, ct.attention(*tensors, lengths=lengths), sums=True)
    none = ct.attention(tensors[0][:, :0], *tensors[1:])
    assert none.numpy().shape == (2, 0, 9, 16)
    q, *pools, table = (
        random(2, 8, 3, 4),
        random(4, 3, 64, 4),
        random(4, 3, 64, 4),
        [[2, 0], [1, 2]],
    )
    k, v = (x[:, np.array(table)].swapaxes(0, 1).reshape(2, 4, 128, 4) for x in pools)
    blocks = ct.asarray(np.array(table, np.int32), device=device)
    sinks = ct.asarray(np.full(8, -np.inf, np.float32), device=device)
    got = ct.attention(*(on(device, x) for x in (q, *pools)), blocks=blocks, sinks=sinks)
    agree(attended(q, k, v), got, sums=True)  # by heads, each of which fits
    cache = ct.KVCache(2, 4, 16, 40, device=device)
    for i in range(0, 9, 3):
        cache.append(tensors[1][:, :, i : i + 3], tensors[2][:, :, i : i + 3])
        got = cache.attend(tensors[0][:, :, i : i + 3])
        agree(causal[:, :, i : i + 3], got, sums=True)


@EVERYWHERE
@pytest.mark.parametrize("norm", [False, True])
def test_a_product_of_q_k_and_v_is_appended_by_heads(device: ct.Device, norm: bool) -> None:
    """One sequence whose layer is above the binding: as on a device where nothing is."""
    x, weights = random(1, 3, 8 * 16), random(2, 16)
    given = [device, ct.device("cpu")]
    results = []
    for where in given:
        cache = ct.KVCache(1, 2, 16, 40, device=where)
        cos, sin = (ct.asarray(t, device=where) for t in ct.rope_tables(16, 40))
        qk_norm = on(where, weights) if norm else None
        q = cache.append_qkv(on(where, x), cos, sin, qk_norm=qk_norm)
        results.append((q.numpy(), cache.attend(q).numpy(), cache.lengths))
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


@EVERYWHERE
def test_convolutions_positions_and_pools(device: ct.Device) -> None:
    x, w, b = random(5, 6, 40), random(20, 6, 3), random(20)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=2)
    wanted = np.einsum("bctj,ocj->bot", windows, w) + b[:, None]
    got = ct.conv1d(*(on(device, v) for v in (x, w, b)), padding=1)
    agree(wanted, got, least=3, sums=True)
    cos, sin = ct.rope_tables(16, 40)
    heads = random(3, 4, 20, 16)
    first, second = heads[..., :8], heads[..., 8:]
    c, s = cos[:20].astype(np.float64), sin[:20].astype(np.float64)
    turned = np.concatenate([first * c - second * s, second * c + first * s], -1)
    tables = [ct.asarray(t, device=device) for t in (cos, sin)]
    agree(turned, ct.rope(on(device, heads), *tables))
    lengths = np.array([4, 20, 0], np.int32)
    rows = random(3, 20, 40)
    means = np.stack([r[:n].sum(0) / max(n, 1) for r, n in zip(rows, lengths, strict=True)])
    agree(means, ct.mean_pool(on(device, rows), ct.asarray(lengths, device=device)), sums=True)


# -- states and replay ----------------------------------------------------------------------------


@EVERYWHERE
def test_a_replay_binds_its_windows(device: ct.Device) -> None:
    w, start = random(75, 41), random(30, 41)
    weight, state = on(device, w), ct.State(start.astype(np.float32), device=device)

    def step(x: ct.Tensor) -> ct.Tensor:
        state.assign(state.value + x)
        return ct.softmax(ct.linear(x * 2.0, weight))

    compiled = device.compile(step, np.zeros((30, 41), np.float32))
    total = start
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((30, 41)).astype(np.float32)
        with ct.ledger() as led, ct.forbid("compile", "allocation"):
            y = compiled(x)
            led.expect(
                uploads=1, submissions=1, launches=compiled.launches, parameter_bytes=0, plans=0
            )
        total = total + x
        e = np.exp(2 * x.astype(np.float64) @ w.T)
        check(y, y.numpy(), e / e.sum(-1, keepdims=True), 1e-11, "a replay")
        check(state.value, state.value.numpy(), total, 1e-12, "its State")
    assert compiled.launches > 12
    with ct.ledger() as led:
        again = compiled(on(device, x))
        led.expect(copies=1, submissions=1)
    check(again, again.numpy(), e / e.sum(-1, keepdims=True), 1e-11, "from the device")


@EVERYWHERE
def test_a_function_that_is_captured(device: ct.Device) -> None:
    table = on(device, random(251, 43))

    @ct.jit
    def rows(ids: ct.Tensor) -> ct.Tensor:
        return ct.embedding(ids, table) * 2.0

    for seed in range(2):
        ids = np.random.default_rng(seed).integers(0, 251, 99).astype(np.int32)
        got = rows(ct.asarray(ids, device=device))
        check(got, got.numpy(), random(251, 43)[ids] * 2, 1e-12, seed)


# -- what is refused ------------------------------------------------------------------------------


@ct.kernel
def double(x: ct.In[ct.f32], y: ct.Out[ct.f32], n: ct.u32) -> None:
    i = ct.lang.global_id()
    with ct.lang.if_(i < n):
        y[i] = x[i] * 2.0


@EVERYWHERE
def test_a_kernel_of_the_users_is_not_divided(device: ct.Device) -> None:
    x = random(3000)
    t = on(device, x)
    for operands in ((t, ct.empty((9,), device=device)), (t[:9], ct.empty((3000,), device=device))):
        with pytest.raises(
            ct.LimitError, match=r"double.* 12,000 bytes, .* 4,096 at once; .*slices"
        ):
            double(*operands, n=9, threads=9)
    for first in (0, 1000, 2100):
        y = ct.empty((900,), device=device)
        double(t[first : first + 900], y, n=900, threads=900)
        assert agree(x[first : first + 900] * 2, y, least=1) == 1


@EVERYWHERE
def test_what_cannot_be_divided(device: ct.Device) -> None:
    """Refused where it is recorded; the device and what was recorded before are as they were."""
    row, small = on(device, random(2, 1201)), on(device, random(3, 5))
    before = small + 1.0
    rows = ct.zeros((7, 1201), device=device)
    calls: dict[str, Callable[[], ct.Tensor]] = {
        "softmax": lambda: ct.softmax(row),
        "norm": lambda: ct.rms_norm(row),
        "argmax": lambda: ct.argmax(row, -1),
        "linear": lambda: ct.linear(row, rows),
    }
    for name, call in calls.items():
        with pytest.raises(ct.LimitError, match=AT_ONCE.format(name) + "no axis"):
            call()
    agree(random(3, 5) + 1.0, before, least=1)


@pytest.mark.devices("simulator-windows", "webgpu-windows", "webgpu-minimum")
def test_a_buffer_is_the_most_that_a_tensor_can_be(device: ct.Device) -> None:
    most = device.caps.max_buffer
    if most > 1 << 33:
        pytest.skip("this device has no such limit")
    with pytest.raises(ct.LimitError, match=rf"a buffer of .* this device allows {most:,}"):
        ct.empty((most // 4 + 4,), device=device)


@pytest.mark.devices("webgpu-windows")
def test_an_imported_buffer_above_a_binding(device: ct.Device) -> None:
    import wgpu

    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
    x = random(40, 77).astype(np.float32)
    native: Any = device.native.create_buffer(size=x.nbytes + 20, usage=usage)
    device.native.queue.write_buffer(native, 20, x)
    t = ct.Tensor.from_buffer(native, x.shape, "f32", device=device, offset=20)
    assert native.size > BINDING
    agree(x * 3.0, t * 3.0)
    agree(x.sum(-1, dtype=np.float64), ct.sum(t, -1), sums=True)
    agree(x[30:32] + 1.0, t[30:32] + 1.0, least=1)


@pytest.mark.devices("cpu", "simulator", "webgpu", "cuda")
def test_nothing_else_is_divided(device: ct.Device) -> None:
    agree(random(203, 41) + 1.0, on(device, random(203, 41)) + 1.0, least=1)
    x, w = random(3, 41), random(203, 41)
    assert agree(x @ w.T, ct.linear(on(device, x), on(device, w)), least=1, sums=True) == 1
