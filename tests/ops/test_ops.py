"""Every op of the table, on every device, against its NumPy formula in float64."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from msgspec.structs import replace

import centella as ct
from centella.check.cases.case import Array, Case, rng_of
from centella.check.cases.compare import TOLERANCE, difference, differences
from centella.check.cases.fits import variant_fits
from centella.check.cases.table import TABLE, cases_of
from centella.dtypes import dtype_of, narrow, widen
from centella.op import op
from centella.ops.elementwise import EXPRESSIONS
from centella.ops.operands import NUMPY
from centella.specs import Caps
from centella.tensors import functional as f
from centella.tensors.tensor import apply_all

OPS = {n: o for n, o in op.registry().items() if ":" not in n}  # a user's kernel has a colon


def check(got: ct.Tensor, value: Array, wanted: Array, limit: float, what: object) -> None:
    """Equal infinities and NaN; whole numbers and moves exact (limit 0), the rest within limit."""
    assert value.shape == got.shape, what
    worst = difference(value, np.broadcast_to(wanted, got.shape), got.dtype, limit)
    assert worst is None, f"{what}: {worst}"


def rows() -> list[tuple[str, str]]:
    return [(name, dtype) for name, row in TABLE.items() for dtype in row.dtypes]


def is_left(n: int, case: Case, name: str, dtype: str, caps: Caps) -> bool:
    """Whether only `-m sweep` runs the nth case of a variant of a row, or of its sweep.

    A sweep runs in the first dtype that its variant takes, one of two of it in the simulator. Where
    a driver compiles each program, one of three of a sweep does and, past the first six, one of two
    of the other cases; one of nine in a further dtype, and one of six under minimum limits.
    """
    dtypes = [d for d in case.dtypes or TABLE[name].dtypes if variant_fits(case, d, caps)]
    further = dtype != dtypes[0]
    if case.sweep and (further or caps.target == "ir"):
        return further or n % 2 > 0
    if caps.target != "wgsl":
        return False
    if further:
        return n % 9 > 0
    if caps.max_shared == Caps("wgsl").max_shared:
        return n % 6 > 0
    return n % 3 > 0 if case.sweep else n > 5 and n % 2 > 0


def in_rows(pairs: list[tuple[str, str]]) -> pytest.MarkDecorator:
    params = [pytest.param(*pair, id="-".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("name", "dtype"), params)


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_row_and_a_docstring(name: str) -> None:
    assert name in TABLE, f"give {name} a row in centella/check/cases/table.py"
    assert OPS[name].doc.strip(), f"{name} has no docstring"
    if name in EXPRESSIONS and name != "copy":
        assert name in f.__all__, f"give {name} a line in tensors/functional/elementwise.py"


def check_cases(device: ct.Device, name: str, dtype: str, left: bool) -> None:
    caps = device.caps
    numbers = defaultdict[tuple[object, bool], Iterator[int]](count)
    every = cases_of(name, dtype, caps)
    numbered = [(next(numbers[c.attrs.get("variant"), c.sweep]), c) for c in every]
    cases = [c for n, c in numbered if is_left(n, c, name, dtype, caps) is left]
    wrong = list(differences(device, name, dtype, cases, TABLE[name]))
    assert not wrong, "\n".join(f"{name} {dtype} {case}: {worst}" for case, worst in wrong)


@pytest.mark.first("dtype", "simulator")
@in_rows(rows())
def test_op(device: ct.Device, name: str, dtype: str) -> None:
    check_cases(device, name, dtype, left=False)


def check_repeated(device: ct.Device, name: str, left: bool) -> None:
    """Up to eight cases; where a driver compiles each program one of three, the others are left."""
    row, dtype, mutated = TABLE[name], TABLE[name].dtypes[0], OPS[name].mutates
    every = [
        replace(c, inputs=(*c.inputs[:k], replace(i, layout="repeated"), *c.inputs[k + 1 :]))
        for c in cases_of(name, dtype, device.caps) if not c.sweep and not c.laid_out
        for k, i in enumerate(c.inputs)
        if k not in mutated and math.prod(i.shape) > 1 and i.shape[0] > 1 and len(i.shape) > 1
    ]  # fmt: skip
    some = every[:: len(every) // 8 + 1]
    step = 3 if device.caps.target == "wgsl" else 1
    cases = [c for n, c in enumerate(some) if (n % step > 0) is left]
    wrong = list(differences(device, name, dtype, cases, row))
    assert not wrong, "\n".join(f"{name} {dtype} {case}: {worst}" for case, worst in wrong)


@pytest.mark.devices("cpu", "simulator", "webgpu", "cuda")
@pytest.mark.parametrize("name", TABLE)
def test_operands_of_repeated_rows(device: ct.Device, name: str) -> None:
    check_repeated(device, name, left=False)


@pytest.mark.sweep
@pytest.mark.devices("webgpu")
@pytest.mark.parametrize("name", TABLE)
def test_operands_of_repeated_rows_in_the_sweep(device: ct.Device, name: str) -> None:
    check_repeated(device, name, left=True)


@pytest.mark.sweep
@in_rows(rows())
def test_op_in_the_sweep(device: ct.Device, name: str, dtype: str) -> None:
    check_cases(device, name, dtype, left=True)


@pytest.mark.parametrize("name", [n for n, o in OPS.items() if o.variants])
def test_every_variant_is_forced_somewhere(name: str) -> None:
    forced = {c.attrs.get("variant") for c in TABLE[name].cases}
    if name == "normed_linear":  # other ops are recorded in its place: see test_normed.py
        forced.add("apart")
    assert set(OPS[name].variants) <= forced


@pytest.mark.devices("simulator", "webgpu-minimum")
def test_a_variant_too_large_for_the_device(device: ct.Device) -> None:
    """Heads of 256 everywhere; in products two tiles, which where loops stay loops are one."""
    q = ct.zeros((1, 1, 40, 256), "f32", device)
    y = ct.attention(q, q, q, variant="tiled")
    with pytest.raises(ct.LimitError, match=r"attention: .*'tiled' has no tile for head_dim 256"):
        y.numpy()
    x = ct.asarray(np.arange(15, dtype=np.float16).reshape(3, 5), device=device)
    product = ct.matmul(x, x.T, variant="large")
    if device.caps.family == "software":
        assert np.array_equal(product.numpy(), x.numpy() @ x.numpy().T)
        return
    with pytest.raises(ct.LimitError, match=r"matmul: .*'large' does not fit"):
        product.numpy()


@pytest.mark.devices("webgpu", "cuda", "webgpu-hardware")
def test_more_groups_than_one_side_of_a_grid(device: ct.Device) -> None:
    side = 4100  # a word a thread (the second operand is off every boundary): 65 665 groups
    column = np.arange(side, dtype=np.int32)[:, None] * 5000
    row = np.arange(side + 1, dtype=np.int32)
    got = ct.asarray(column, device=device) + ct.asarray(row, device=device)[1:]
    assert np.array_equal(got.numpy(), column + row[1:])
    tall = np.arange(65_600 * 3, dtype=np.float32).reshape(-1, 3)
    y = f.argmax(ct.asarray(tall, device=device), axis=1)
    assert np.array_equal(y.numpy(), tall.argmax(1))


# -- contract 6: the choice never changes the mathematics -----------------------------------------


@pytest.mark.first("dtype", "webgpu")
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", ["matmul", "transposed", "linear", "int8"])
def test_one_row_equals_the_first_of_many(device: ct.Device, name: str, dtype: str) -> None:
    k, n = 73, 71
    rng = rng_of(name, dtype, "rows")
    a = widen(narrow(rng.standard_normal((65, k)), dtype_of(dtype)), dtype_of(dtype))
    b = widen(narrow(rng.standard_normal((n, k)), dtype_of(dtype)), dtype_of(dtype))
    right, across = ct.asarray(b, dtype, device), ct.asarray(b.T, dtype, device)
    products: dict[str, Any] = {
        "matmul": lambda x: x @ across,
        "transposed": lambda x: x @ right.T,
        "linear": lambda x: ct.linear(x, right),
    }
    if name == "int8":
        stored, scale = ct.quantize_int8(b)
        b = stored * scale[:, None]
        w, s = ct.asarray(stored, device=device), ct.asarray(scale, device=device)
        products["int8"] = lambda x: ct.linear(x, w, scale=s)
    outs = [products[name](ct.asarray(a[:m], dtype, device))[0] for m in (1, 2, 3, 4, 5, 16, 65)]
    one, *many = ct.fetch(*outs).result()
    epsilon = dtype_of("f32").epsilon * k + (dtype_of(dtype).epsilon if dtype != "f32" else 0)
    bound = 4 * epsilon * (np.abs(a[0]) @ np.abs(b).T)
    for m, row in zip((2, 3, 4, 5, 16, 65), many, strict=True):
        assert (np.abs(one - row) <= bound).all(), m


@pytest.mark.devices("webgpu", "webgpu-minimum", "cuda", "webgpu-hardware")
@pytest.mark.parametrize("k", [1, 5])
def test_thin_products_of_more_groups_than_one_side_of_a_grid(device: ct.Device, k: int) -> None:
    n = 65_600 * 32 + 1  # a group of the thinnest product has 32 outputs
    weight = (np.arange(n * k, dtype=np.uint32) % 251).astype(np.float16).reshape(n, k)
    x = np.arange(1, k + 1, dtype=np.float32)
    got = ct.linear(ct.asarray(x, device=device), ct.asarray(weight, device=device)).numpy()
    np.testing.assert_array_equal(got, weight.astype(np.float32) @ x)


def test_quantised_weights_are_near_what_they_stand_for() -> None:
    rng = rng_of("quantise")
    weight = rng.standard_normal((7, 33)) * np.array([1e-6, 1, 800, 6e4, 1, 1e-30, 1])[:, None]
    weight[4], weight[6] = 0, 5
    stored, scale = ct.quantize_int8(weight)
    assert stored.dtype == np.int8
    assert (scale.dtype, scale.shape) == (np.dtype(np.float32), (7,))
    assert stored.min() >= -127 and np.isfinite(scale).all() and not stored[4].any()
    assert (np.abs(stored).max(1) == [127, 127, 127, 127, 0, 127, 127]).all()
    error = np.abs(stored * scale[:, None].astype(np.float64) - weight).max(1)
    assert (error <= np.abs(weight).max(1) / 127 * 0.50001).all()
    for wrong, kind in (((weight[0],), ct.ShapeError), ((weight > 0,), ct.DTypeError)):
        with pytest.raises(kind, match="quantize_int8: expected"):
            ct.quantize_int8(*wrong)
    with pytest.raises(ct.DTypeError, match="finite"):
        ct.quantize_int8(np.full((2, 3), np.nan))


def test_erf_on_the_cpu_has_the_bound_of_its_formula() -> None:
    """3 ulp; bits that pass through a choice are not rounded as numbers."""
    x = np.linspace(-5, 5, 20001).astype(np.float32)
    exact = np.array([math.erf(float(v)) for v in x])
    got = NUMPY.erf(x)
    assert got.dtype == np.float32
    assert (np.abs(got - exact) <= 3 * np.spacing(np.abs(exact).astype(np.float32))).all()


# -- outliers -------------------------------------------------------------------------------------


def test_softmax_of_rows_below_every_mask(device: ct.Device) -> None:
    """-3.0e38 bounds masks; a maximum starts at the least number, so lower rows count too."""
    low = np.finfo(np.float32).min
    rows = [[low, low], [-3.2e38, -3.2e38], [-np.inf, low], [-np.inf, -np.inf], [np.nan, low]]
    x = ct.asarray(np.array(rows, np.float32), device=device)
    wanted = np.array([[0.5, 0.5], [0.5, 0.5], [0, 1], [np.nan] * 2, [np.nan] * 2], np.float32)
    got, logs = ct.fetch(ct.softmax(x), ct.log_softmax(x)).result()
    np.testing.assert_array_equal(got, wanted)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(logs, np.log(wanted), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_norms_and_softmax_of_rows_far_from_zero(device: ct.Device, dtype: str) -> None:
    rng = rng_of("far", dtype)
    centres = np.array([[800], [-800], [0], [6e4]])
    x = (centres + rng.standard_normal((4, 96))).astype(np.float16).astype(np.float32)
    x[:, -1] = 6e4
    t, x = ct.asarray(x, dtype, device)[:, :-1], x[:, :-1]  # a pad above everything
    wide = x.astype(np.float64)
    e = np.exp(wide - wide.max(-1, keepdims=True))
    centred = wide - wide.mean(-1, keepdims=True)
    wanted = [
        e / e.sum(-1, keepdims=True),
        wide - wide.max(-1, keepdims=True) - np.log(e.sum(-1, keepdims=True)),
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5),
        wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6),
        wide / np.sqrt((wide**2).sum(-1, keepdims=True)),
    ]
    outs = [ct.softmax(t), ct.log_softmax(t), ct.layer_norm(t), ct.rms_norm(t), ct.l2_normalize(t)]
    # A mean near 800 is rounded to 800 eps; deviations of 1 from it are off by as much.
    limits = [TOLERANCE[dtype][1]] * 5
    limits[2] = max(limits[2], (2 * 800 * dtype_of("f32").epsilon) ** 2)
    for got, value, right, limit in zip(
        outs, ct.fetch(*outs).result(), wanted, limits, strict=True
    ):
        check(got, value, right, limit, "far")


TINY = float(np.finfo(np.float32).tiny)  # what is smaller may be flushed to 0
ODD = np.array(
    [math.nan, math.inf, -math.inf, -0.0, 0.0, -0.5, 0.5, 1.5, 2.5, -1.5, -1], np.float32
)
SPECIAL: dict[str, Any] = {
    **{e.name: e.exact for e in EXPRESSIONS.values() if e.exact and len(e.operands) == 1},
    "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt,
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_nan_infinities_and_zeros_of_both_signs(device: ct.Device, name: str) -> None:
    got = getattr(f, name)(ct.asarray(ODD, device=device)).numpy()
    with np.errstate(all="ignore"):
        wanted = SPECIAL[name](ODD.astype(np.float64))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(wanted)[numbers])


def test_powers_of_odd_values(device: ct.Device) -> None:
    """Every pair as C has it: 0, 1, infinities, NaN, negative bases, exponents odd and even."""
    values = np.append(ODD, [1, 2, -2, 3, -3, 1e30, 8388607, -8388607]).astype(np.float32)
    x, y = values[:, None], values
    got = ct.pow(*(ct.asarray(v, device=device) for v in (x, y))).numpy()
    with np.errstate(all="ignore"):
        wanted = np.power(x, y)
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=TINY)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(wanted)[numbers])


def test_powers_are_exact_to_a_few_ulp(device: ct.Device) -> None:
    rng = rng_of("powers")
    x = np.exp(rng.uniform(-20, 20, 4000)).astype(np.float32)
    y = rng.uniform(-4, 4, 4000).astype(np.float32)
    got = ct.pow(ct.asarray(x, device=device), ct.asarray(y, device=device)).numpy()
    wanted = np.power(x.astype(np.float64), y.astype(np.float64))
    ulp = np.abs(got - wanted) / np.spacing(wanted.astype(np.float32))
    assert (ulp <= 4 + np.abs(y)).all()


# -- the public functions: axes, numbers, defaults ------------------------------------------------

X = rng_of("functions").standard_normal((3, 5, 4)).astype(np.float32)
N = rng_of("numbers").integers(-9, 9, (3, 5, 4)).astype(np.int8)


def _softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(e / e.sum(axis, keepdims=True))


def _by_rank(x: Array, n: Array) -> Array:
    """Element j of a row of x, at the place of the j-th smallest of n."""
    order = np.argsort(n, 1, kind="stable")
    return np.take_along_axis(x, np.argsort(order, 1), 1)


def _conv1d(x: Array) -> Array:
    """x with itself as weights: stride 2, padding 1."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1)))
    return np.stack([np.einsum("bck,ock->bo", padded[..., t : t + 4], x) for t in (0, 2)], -1)


# Calls with tensors x of floats and n of whole numbers, and the same by NumPy.
FUNCTIONS = {
    "f.sum(x)": "x.sum()",
    "f.sum(x, 0)": "x.sum(0)",
    "f.sum(x, (0, -1))": "x.sum((0, 2))",
    "f.sum(x, (1, 2), True)": "x.sum((1, 2), keepdims=True)",
    "f.sum(x, ())": "x",
    "f.sum(n, 1)": "n.sum(1, dtype=np.int32)",
    "f.mean(x, 1)": "x.mean(1)",
    "f.max(n, 0, True)": "n.max(0, keepdims=True)",
    "f.min(x)": "x.min()",
    "f.argmax(n)": "n.argmax()",
    "f.argmax(n, 1, True)": "n.argmax(1, keepdims=True)",
    "f.sort(x, 1)": "np.sort(x, 1)",
    "f.sort(n, 0, descending=True)": "-np.sort(-n.astype('i4'), 0)",
    "f.argsort(n, 1)": "np.argsort(n, 1, kind='stable')",
    "f.argsort(x, descending=True)": "np.argsort(-x)",
    "f.cumsum(n, 1)": "np.cumsum(n, 1, dtype=np.int32)",
    "f.cumsum(n > 0)": "np.cumsum(n > 0, -1, dtype=np.int32)",
    "f.take_along_axis(x, f.argsort(n, 0), 0)":
        "np.take_along_axis(x, np.argsort(n, 0, kind='stable'), 0)",
    "f.scatter(x[0], f.argsort(n[0], 1), x[1], axis=1, reduce='max')":
        "np.maximum(x[0], _by_rank(x[1], n[0]))",
    "f.scatter(x[0], f.argsort(n[0], -1), x[1], -1)": "_by_rank(x[1], n[0])",
    "f.softmax(x, 0)": "_softmax(x, 0)",
    "f.log_softmax(x, 1)": "np.log(_softmax(x, 1))",
    "f.l2_normalize(x, axis=0)": "x / np.sqrt((x * x).sum(0, keepdims=True))",
    "f.concat([x, x[:, :2], x], axis=-2)": "np.concatenate([x, x[:, :2], x], 1)",
    "f.concat([n[i % 3] for i in range(17)], axis=1)":
        "np.concatenate([n[i % 3] for i in range(17)], 1)",
    "f.clip(x, min=0.25)": "x.clip(0.25)",
    "f.clip(x, max=0)": "x.clip(max=0)",
    "f.clip(n, -1000, 3)": "n.clip(max=3)",
    "f.where(n.astype('bool'), x, -1)": "np.where(n != 0, x, np.float32(-1))",
    "f.where(n.astype('bool'), x, x.astype('f16')[0])":
        "np.where(n != 0, x, x.astype(np.float16).astype(np.float32)[0])",
    "f.elu(x)": "np.where(x > 0, x, np.expm1(x))",
    "f.leaky_relu(x)": "np.where(x > 0, x, x / 100)",
    "1 - x": "1 - x",
    "x + True": "x + 1",
    "f.full((2, 3), 4, 'u8', x.device)": "np.full((2, 3), 4)",
    "x[:, None] @ x.T": "x[:, None] @ x.swapaxes(1, 2)",
    "x > 0": "x > 0",
    "f.le(0.5, x)": "x >= 0.5",
    "(x > 0) & ~(n < 3) | (n >= 5)": "(x > 0) & (n >= 3) | (n >= 5)",
    "f.sum(x > 0, 0)": "(x > 0).sum(0)",
    "f.eq(n, n[0])": "n == n[0]",
    "f.eq(f.full((2,), 0.1, 'f16', x.device), 0.1)": "np.array([True, True])",
    "f.full((2,), np.inf, 'f16', x.device) > 1e6": "np.array([True, True])",
    "x <= x.astype('f16')[0]": "x <= x.astype(np.float16).astype(np.float32)[0]",
    "n // -3 + n % -3": "n // -3 + n % -3",
    "100 // (n * n + 1) + 100 % (n * n + 1)": "100 // (n * n + 1) + 100 % (n * n + 1)",
    "f.silu_gate(x[..., :2], x[..., 2:])": "x[..., :2] / (1 + np.exp(-x[..., :2])) * x[..., 2:]",
    "f.arange(7, device=x.device)": "np.arange(7)",
    "f.arange(9, 1, -3, device=x.device)": "np.arange(9, 1, -3)",
    "f.arange(0, 1, 0.125, device=x.device)": "np.arange(0, 1, 0.125)",
    "f.arange(3.0, device=x.device)": "np.arange(3.0)",
    "f.arange(5, 1, dtype='f32', device=x.device)": "np.zeros(0)",
    "f.stack([x, x + 1])": "np.stack([x, x + 1])",
    "f.stack([n[0], n[1], n[2]], -1)": "np.stack([*n], -1)",
    "f.stack([n > 2], 1)": "(n > 2)[:, None]",
    "f.concat(f.split(x, [1, 0, 3], -1)[::-1], -1)": "np.concatenate([x[..., 1:], x[..., :1]], -1)",
    "f.split(n, 2, 1)[2]": "n[:, 4:]",
    "f.chunk(n, 3, 1)[1]": "n[:, 2:4]",
    "f.stack(f.chunk(n, 7))": "n[:, None]",
    "f.gather(x, f.argmax(x, 1)[0], -2)": "x[:, x.argmax(1)[0]]",
    "f.scatter(n, f.argmax(n[:, 0] * 0, 1), n + 1)": "np.stack([n[2] + 1, n[1], n[2]])",
    "f.interleaved_to_head_first(x, 2, 2)": "x.reshape(3, 5, 2, 2).transpose(0, 2, 1, 3)",
    "f.conv1d(x, x, stride=2, padding=1, activation='relu')": "_conv1d(x).clip(0)",
    "f.var(x)": "x.var()",
    "f.var(x, (0, -1), True, 1)": "x.var((0, 2), keepdims=True, ddof=1)",
    "f.var(1000 + x.astype('f16'), 1).astype('f32')":
        "(1000 + x.astype(np.float16)).astype(np.float64).var(1).astype(np.float16)",
    "f.var(x[:1], 0, correction=1)": "x[0] * np.nan",
    "f.broadcast_to(x[:, 2:3], (2, 3, 5, 4)) + x": "np.broadcast_to(x[:, 2:3], (2, 3, 5, 4)) + x",
    "f.broadcast_to(n[0, 0, 0], 3)": "np.broadcast_to(n[0, 0, 0], 3)",
    "f.broadcast_to(n[:, :1], (3, 5, 4)).reshape(5, 12)":
        "np.broadcast_to(n[:, :1], (3, 5, 4)).reshape(5, 12)",
    "f.repeat(x, 3, -2)": "x.repeat(3, 1)",
    "f.repeat(n, 2)": "n.repeat(2)",
    "f.repeat(n > 0, 0, 0)": "n[:0] > 0",
    "f.tril(x, -1)": "np.tril(x, -1)",
    "f.tril(n > 0)": "np.tril(n > 0)",
    "f.tril(x.permute(1, 2, 0) / 0, 9)": "x.transpose(1, 2, 0) / 0",
    "f.pad(x, 1)": "np.pad(x, 1)",
    "f.pad(n, ((0, 0), (2, 1), (0, 3)), -7)":
        "np.pad(n, ((0, 0), (2, 1), (0, 3)), constant_values=-7)",
    "f.pad(n > 0, (1, 2), True)": "np.pad(n > 0, (1, 2), constant_values=True)",
    "f.pow(x, n.astype('f32') / 2)": "x ** (n / 2)",
    "x ** 1.5": "x ** 1.5",
    "2 ** x": "2**x",
    "f.pow(x, -3)": "x**-3.0",
    "(x * 1e3) ** n.astype('f32')": "(x * 1e3) ** n",
}  # fmt: skip


def test_functions(device: ct.Device) -> None:
    ours = {**globals(), "x": ct.asarray(X, device=device), "n": ct.asarray(N, device=device)}
    theirs = {**globals(), "x": X.astype(np.float64), "n": N}
    outs = [eval(text, ours) for text in FUNCTIONS]
    values = ct.fetch(*outs).result()
    for (text, numpy), got, value in zip(FUNCTIONS.items(), outs, values, strict=True):
        with np.errstate(all="ignore"):
            wanted = np.asarray(eval(numpy, theirs))
        assert value.shape == wanted.shape, text
        check(got, value, wanted, 1e-11, text)


# -- mistakes are raised where they are made, in the same words everywhere ------------------------


def _written(k: ct.Tensor, v: ct.Tensor, starts: ct.Tensor) -> Any:
    """Keys and values written into a cache [1, 1, 4, 5]."""
    caches = [ct.State.empty((1, 1, 4, 5), device=k.device).value for _ in range(2)]
    return apply_all(op.get("cache_write"), (*caches, k[None, None], v[None, None], starts), {})


def _selected(best: ct.Tensor, which: ct.Tensor, ends: ct.Tensor, rows: int) -> Any:
    """Candidates that go on, in States [rows]."""
    states = [ct.State.empty(rows, t, best.device).value for t in ("i32", "i32", "f32")]
    return apply_all(op.get("beam_select"), (*states, best, which, ends), {})


def _copied(copies: ct.Tensor, *pools: ct.Tensor) -> Any:
    """Blocks copied in pools [1, 2, 4, 5]."""
    pool = ct.State.empty((1, 2, 4, 5), device=copies.device).value
    return apply_all(op.get("cache_copy"), (pool, *(pools or (pool,)), copies), {})


def _op(x: ct.Tensor, name: str, *operands: str, **attrs: Any) -> Any:
    """An op over States, each a dtype and extents, with the attributes of its first case."""
    states = []
    for dtype, *extents in map(str.split, operands):
        states.append(ct.State.empty(tuple(map(int, extents)), dtype, x.device).value)
    return apply_all(op.get(name), states, {**TABLE[name].cases[0].attrs, **attrs})


ARRAY: Any = np.ones((3, 3), np.float32)
# Of `speech_move`: notes, positions, tokens, parents, scores, candidates of two windows of 2 beams.
MOVED = ("i32 4 6", "i32 2 2", "i32 4", "i32 4", "f32 4", "f32 2 4", "i32 2 4")
# Calls with tensors x [3, 5] of f32, h of f16 and i of i32, and what they say.
SHAPE_MISTAKES = {
    "f.var(x, 2)": "var: expected an axis of [3, 5], got 2",
    "f.broadcast_to(x, (3, 4))":
        "broadcast_to: expected a shape that [3, 5] broadcasts to, got [3, 4]",
    "f.broadcast_to(x, 5)": "broadcast_to: expected a shape that [3, 5] broadcasts to, got [5]",
    "f.broadcast_to(x, -1)": "broadcast_to: expected extents of 0 or more, got [-1]",
    "f.repeat(x, -1)": "repeat: expected repeats of 0 or more, got -1",
    "f.repeat(x, 2, 2)": "repeat: expected an axis of [3, 5], got 2",
    "f.tril(x[0])": "tril: expected rank 2 or more, got [5]",
    "f.pad(x, -1)": "pad: expected widths of 0 or more, a pair for each axis, got -1",
    "f.pad(x, (1, 2, 3))":
        "pad: expected widths of 0 or more, a pair for each axis, got (1, 2, 3)",
    "f.pad(x, 0.5)": "pad: expected widths of 0 or more, a pair for each axis, got 0.5",
    "x ** x[:, :2]": "pow: expected shapes that broadcast, got [3, 5], [3, 2]",
    "x + x[:, :2]": "add: expected shapes that broadcast, got [3, 5], [3, 2]",
    "x @ x": "matmul: expected [..., m, k] and [..., k, n], got [3, 5] and [3, 5]",
    "x[0] @ x[0]":
        "matmul: expected [..., m, k] and [..., k, n], got [5] and [5]; ct.dot takes vectors",
    "x.reshape(3, 1, 5) @ f.zeros((2, 5, 1), device=x.device)":
        "matmul: expected shapes that broadcast, got [3], [2]",
    "ct.linear(x, i.astype('i8'), scale=x[0])": "linear: expected scale [3], got [5]",
    "ct.linear(x, x, variant='columns')":
        "linear: expected variant of gemv, skinny, skinny_mma, large, medium, small, mma, wgmma, "
        "streamed, streamed_rows, streamed_many, got 'columns'",
    "f.matmul(x, x.T, variant='huge')":
        "matmul: expected variant of gemv, skinny, skinny_mma, columns, large, medium, small, "
        "mma, wgmma, streamed, streamed_rows, streamed_many, got 'huge'",
    "f.linear(x, x.T)": "linear: expected x [..., k] and weight [n, k], got [3, 5] and [5, 3]",
    "f.linear(x, x, x[0])": "linear: expected bias [3], got [5]",
    "f.linear(x, x, activation='swoosh')":
        "linear: expected activation of relu, gelu, gelu_tanh, gelu_quick, silu, sigmoid, tanh, "
        "got 'swoosh'",
    "f.gelu(x, 'fast')": "gelu: expected approximate of none, tanh, quick, got 'fast'",
    "f.softmax(x, 2)": "softmax: expected an axis of [3, 5], got 2",
    "f.softmax(x, -1.0)": "softmax: expected an axis of [3, 5], got -1.0",
    "f.sum(x, -3)": "sum: expected an axis of [3, 5], got -3",
    "f.sum(x, (1, -1))": "sum: expected different axes, got [1, -1]",
    "f.max(x[:, :0], 1)": "max: expected at least one element along axis 1, got [3, 0]",
    "f.max(x.reshape(3, 5, 1)[:, :0], 1)":
        "max: expected at least one element along axis 1, got [3, 0, 1]",
    "f.argmax(x[:0])": "argmax: expected at least one element, got [0, 5]",
    "f.dot(x[0], x[0, :2])": "dot: expected two vectors of one length, got [5] and [2]",
    "f.layer_norm(x, x[:, 0])": "layer_norm: expected a vector of 5, got [3]",
    "f.embedding(i, x[0])": "embedding: expected a table [n, d], got [5]",
    "f.embedding(i, x[:0])": "embedding: expected a table with rows, got [0, 5]",
    "f.attention(x.reshape(1, 1, 3, 5), x.reshape(1, 1, 3, 5), x[:2].reshape(1, 1, 2, 5))":
        "attention: expected q [b, h, lq, d], k and v [b, h', lk, d], got [[1, 1, 3, 5], [1, 1, "
        "3, 5], [1, 1, 2, 5]]",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, lengths=i[0])":
        "attention: expected lengths [1], got [5]",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, mask=x.reshape(1, 1, 3, 5))":
        "attention: expected mask [1, 1, 3 or 1, 3 or 1], or with leading extents left "
        "out, got [1, 1, 3, 5]",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, mask=x)":
        "attention: expected mask [1, 1, 3 or 1, 3 or 1], or with leading extents left "
        "out, got [3, 5]",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, mask=x[None, None, None, :, :3])":
        "attention: expected mask [1, 1, 3 or 1, 3 or 1], or with leading extents left "
        "out, got [1, 1, 1, 3, 3]",
    "f.mean_pool(x[None], i[0])":
        "mean_pool: expected x [b, l, d] and lengths [b], got [1, 3, 5] and [5]",
    "f.attention(x, x, x)": "attention: expected rank 4, got [3, 5], [3, 5], [3, 5]",
    "f.attention(x.reshape(1, 3, 1, 5), x[:2].reshape(1, 2, 1, 5), x[:2].reshape(1, 2, 1, 5))":
        "attention: expected k and v [1, a divisor of 3, lk, 5], got [1, 2, 1, 5]",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, starts=i[0])":
        "attention: expected starts [1], got [5]",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, starts=i[0, :1], causal=True)":
        "attention: expected causal or starts, got both",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, window=0)":
        "attention: expected window of 1 or more, got 0",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, softcap=-2)":
        "attention: expected a finite softcap above 0, got -2",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, sinks=x[0])":
        "attention: expected sinks [1], got [5]",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, blocks=i)":
        "attention: expected k and v in blocks [a divisor of 1, blocks, 64, 5], got [1, 1, 3, 5]",
    "f.attention(x[None, None], *[f.broadcast_to(x[0], (1, 2, 64, 5))] * 2, blocks=i)":
        "attention: expected blocks [1, 1 or more], got [3, 5]",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, variant='small')":
        "attention: expected variant of tiled, stream, split, mma, wgmma, split_mma, cluster_mma, "
        "ring, got 'small'",
    "f.concat([x, x[:2]], axis=1)":
        "concat: expected shapes that differ only along axis 1, got [3, 5], [2, 5]",
    "f.concat([])": "concat: expected at least one tensor, got none",
    "f.arange(0, 1, 0, device=x.device)": "arange: expected an end and a step, got 0, 1, 0",
    "f.arange(math.inf, dtype='f32', device=x.device)":
        "arange: expected an end and a step, got 0, inf, 1",
    "f.stack([x, x[:2]])": "stack: expected tensors of one shape, got [3, 5], [2, 5]",
    "f.stack([])": "stack: expected at least one tensor, got none",
    "f.stack([x], 3)": "stack: expected an axis of a result of rank 3, got 3",
    "f.split(x, [1, 1])": "split: expected parts of [3, 5], got [1, 1]",
    "f.split(x, 0)": "split: expected parts of 1 or more, got 0",
    "f.chunk(x, 0)": "chunk: expected chunks of 1 or more, got 0",
    "f.gather(x, i, 2)": "gather: expected an axis of [3, 5], got 2",
    "f.gather(x[:, :0], i, 1)": "gather: expected rows along axis 1, got [3, 0]",
    "f.scatter(x, i[0], x)": "scatter: expected values [5, 5], got [3, 5]",
    "f.scatter(x, i[:, :2], x)":
        "scatter: expected values of [3, 5] with any extent along axis 0, and indices along it or "
        "of the shape of values, got [3, 5] and [3, 2]",
    "f.scatter(x, i[0], x, axis=1, reduce='mean')":
        "scatter: expected reduce from set, add, mul, max, min, got 'mean'",
    "f.scatter(x, i[0], x, axis=2)": "scatter: expected an axis of [3, 5], got 2",
    "f.sort(x, 2)": "sort: expected an axis of [3, 5], got 2",
    "f.argsort(f.sum(x))": "argsort: expected rank 1 or more, got a scalar",
    "f.cumsum(x, -3)": "cumsum: expected an axis of [3, 5], got -3",
    "f.take_along_axis(x, i[0])":
        "take_along_axis: expected indices of the rank of x and an axis of both, got [5], [3, 5] "
        "and axis 1",
    "f.take_along_axis(x, i[:2], 1)":
        "take_along_axis: expected shapes that broadcast, got [3, 1], [2, 1]",
    "f.take_along_axis(x[:, :0], i, 1)":
        "take_along_axis: expected elements along axis 1, got [3, 0]",
    "f.interleaved_to_head_first(x, 2, 2)":
        "interleaved_to_head_first: expected [..., seq, 2 * 2], got [3, 5]",
    "f.rope(x, x, x)": "rope: expected x [batch, heads, seq_len, head_dim], got [3, 5]",
    "f.rope(x[None, None], x, x)":
        "rope: expected cos and sin [positions, 1 to 2], got [3, 5] and [3, 5]",
    "f.rope(x[None, None], x[:2, :2], x[:2, :2])":
        "rope: expected tables of 3 positions or more, got 2",
    "f.rope(x[None, None], x[:, :2], x[:, :2], i)":
        "rope: expected positions [1] or [1, 3], got [3, 5]",
    "f.conv1d(x[None], x[None, :2])":
        "conv1d: expected x [batch, in, length] and weight [out, in, kernel], got [1, 3, 5] and "
        "[1, 2, 5]",
    "f.conv1d(x[None], x[None], stride=0, padding=1)":
        "conv1d: expected stride of 1 or more, got 0",
    "f.conv1d(x[None], x[None], padding=-1)": "conv1d: expected padding of 0 or more, got -1",
    "f.conv1d(x[None, :, :2], x[None], padding=1)":
        "conv1d: expected a kernel of 1 to 4 (padded length), got 5",
    "f.conv1d(x[None], x[None], x[0])": "conv1d: expected bias [1], got [5]",
    "f.conv1d(x[None], x[None], activation='swoosh')":
        "conv1d: expected activation of relu, gelu, gelu_tanh, gelu_quick, silu, sigmoid, tanh, "
        "got 'swoosh'",
    "x.reshape(4, 4)": "reshape: expected 15 elements, got shape [4, 4]",
    "_written(x[:, :4], x[:, :4], i[0, :1])":
        "cache_write: expected k and v [1, 1, up to 4, 5], got [1, 1, 3, 4] and [1, 1, 3, 4]",
    "_written(x, x[:2], i[0, :1])":
        "cache_write: expected k and v [1, 1, up to 4, 5], got [1, 1, 3, 5] and [1, 1, 2, 5]",
    "_written(x, x, x[0, :1])":
        "cache_write: expected i32 starts [1] or a table [batch, 1 + width], got f32 [1]",
    "apply_all(op.get('cache_step'), (ct.State(i[:2]).value, i[0, :3]), {'tokens': 0})":
        "cache_step: expected i32 lengths [5], got i32 [3]",
    "_selected(x, i, i[0], 18)":
        "beam_select: expected tokens, parents and scores [3 * beam] of up to 5 beams, and up to "
        "128 candidates, got [18], [18], [18]",
    "_selected(x, i, i[0], 4)":
        "beam_select: expected tokens, parents and scores [3 * beam] of up to 5 beams, and up to "
        "128 candidates, got [4], [4], [4]",
    "_selected(x, i[:2], i[0], 3)":
        "beam_select: expected scores and codes [prompts, candidates] and ends [vocab], got "
        "[3, 5], [2, 5], [5]",
    "apply_all(op.get('beam_blocks'), (ct.State(i).value, i[:, 0]), {'beam': 2, 'size': 4})":
        "beam_blocks: expected a table [prompts * 2, 1 + width] and parents of its rows, up to 128 "
        "of a prompt, got [3, 5] and [3]",
    "_copied(i)": "cache_copy: expected i32 copies [rows, 3], got i32 [3, 5]",
    "_copied(i[:, :3], x)":
        "cache_copy: expected keys and values [kv_heads, blocks, n, head_dim], got [1, 2, 4, 5] "
        "and [3, 5]",
    "_op(x, 'linear_norm', 'f32 3 5', 'f32 4 6', 'f32 4', 'f32 3 4', 'f32 4', 'f32 4')":
        "linear: expected x [..., k] and weight [n, k], got [3, 5] and [4, 6]",
    "_op(x, 'linear_norm', 'f32 3 5', 'f32 4 5', 'f32 4', 'f32 3 4', 'f32 5', 'f32 4')":
        "layer_norm: expected a vector of 4, got [5]",
    "_op(x, 'linear_norm', 'f32 3 5', 'f32 4 5', 'f32 4', 'f32 4', 'f32 4', 'f32 4')":
        "linear: expected residual [3, 4], got [4]",
    "_op(x, 'cache_copy_i8', 'i8 1 2 4 5', 'i8 1 2 4 5', 'f32 1 2 4', 'i32 3 3')":
        "cache_copy_i8: expected values [1, 2, 4, 5] and scales [1, 2, 4, 2], got [1, 2, 4, 5] "
        "and [1, 2, 4]",
    "_op(x, 'cache_copy_i8', 'i8 1 2 4 5', 'i8 1 2 4', 'f32 1 2 4 2', 'i32 3 3')":
        "cache_copy_i8: expected keys and values [kv_heads, blocks, n, head_dim], got [1, 2, 4, "
        "5] and [1, 2, 4]",
    "_op(x, 'cache_copy_i8', 'i8 1 2 4 5', 'i8 1 2 4 5', 'f32 1 2 4 2', 'i32 3 2')":
        "cache_copy_i8: expected i32 copies [rows, 3], got i32 [3, 2]",
    "_op(x, 'cache_write_i8', 'i8 1 1 4 5', 'i8 1 1 4 5', 'f32 1 1 4', 'f32 1 1 3 5', 'f32 1 1 3 "
    "5', 'i32 1')":
        "cache_write_i8: expected values [1, 1, 4, 5] and scales [1, 1, 4, 2], got [1, 1, 4, 5] "
        "and [1, 1, 4]",
    "_op(x, 'cache_write_i8', 'i8 1 1 4 5', 'i8 1 1 4 5', 'f32 1 1 4 2', 'f32 1 1 3 4', 'f32 1 1 "
    "3 4', 'i32 1')":
        "cache_write: expected k and v [1, 1, up to 4, 5], got [1, 1, 3, 4] and [1, 1, 3, 4]",
    "_op(x, 'cache_attend', 'f32 1 2 4 8', 'f32 1 2 4 8', 'f32 1 2 1 8', 'f32 1 2 3 8', 'f32 1 2 "
    "1 8', 'i32 1')":
        "cache_attend: expected q, k and v [1, 2, 1, 8], got [[1, 2, 1, 8], [1, 2, 3, 8], [1, 2, "
        "1, 8]]",
    "_op(x, 'cache_attend', 'f32 1 2 4 8', 'f32 1 2 4 8', 'f32 1 2 1 8', 'f32 1 2 1 8', 'f32 1 2 "
    "1 8', 'i32 2')":
        "cache_attend: expected i32 starts [1], got i32 [2]",
    "_op(x, 'cache_attend', 'f32 1 2 4 7', 'f32 1 2 4 7', 'f32 1 2 1 7', 'f32 1 2 1 7', 'f32 1 2 "
    "1 7', 'i32 1')":
        "cache_attend: expected a cache [b, h, up to 1024, d], rows of whole chunks, d up to 128, "
        "got [1, 2, 4, 7]",
    "_op(x, 'expert_linear', 'f32 2 5', 'f32 3 5', 'i32 2 2', 'f32 3 4 5', extras=('up',), "
    "gate='silu')":
        "expert_linear: expected weight [experts, n, k] and ids [rows, picks], none of them 0 but "
        "rows, got [3, 5] and [2, 2]",
    "_op(x, 'expert_linear', 'f32 2 5', 'f32 3 4 5', 'i32 2 2', 'f32 2 2', extras=('shares',), "
    "gate='silu')":
        "expert_linear: expected up with a gate, else shares and maybe a residual, got ['shares'] "
        "and gate 'silu'",
    "_op(x, 'expert_linear', 'f32 2 6', 'f32 3 4 5', 'i32 2 2', 'f32 3 4 5', extras=('up',), "
    "gate='silu')":
        "expert_linear: expected x [2, 5], got [2, 6]",
    "_op(x, 'sample', 'i32 1 5', 'i32 1', 'f32 5', 'f32 1 7', 'i32 1')":
        "sample: expected logits [batch, vocab], got [5]",
    "_op(x, 'sample', 'i32 1 5', 'i32 1', 'f32 1 5', 'f32 1 3', 'i32 1')":
        "sample: expected settings [1, 7], got [1, 3]",
    "_op(x, 'speech_token', 'i32 1 6', 'f32 1 2', 'i32 1 1', 'f32 5', 'i32 5')":
        "speech_token: expected logits [batch, vocab], got [5]",
    "_op(x, 'speech_token', 'i32 1 6', 'f32 1 2', 'i32 1 1', 'f32 1 5', 'i32 4')":
        "speech_token: expected levels [5], got [4]",
    "_op(x, 'speech_move', 'bool 4 9', *MOVED, beam=3)":
        "speech_move: expected seen [windows * 3, slots], of up to 21 beams, got [4, 9]",
    "_op(x, 'speech_move', 'bool 6 9', *MOVED, beam=2)":
        "speech_move: expected notes [6, 6], got [4, 6]",
    "_op(x, 'speech_move', 'bool 4 9', *MOVED[:-1], 'i32 2 3', beam=2)":
        "speech_move: expected codes [2, 4], got [2, 3]",
    "_op(x, 'speech_move', 'bool 20 9', *MOVED, beam=5)":
        "speech_move: expected 5 to 128 candidates, got 4",
    "_op(x, 'speech_beams', 'f32 1 5', 'i32 5', 'i32 1 1 6', 'f32 1 1')":
        "speech_beams: expected logits [windows, beam, vocab] of 2 tokens or more, got [1, 5]",
    "_op(x, 'speech_beams', 'f32 2 3 1', 'i32 1', 'i32 2 3 6', 'f32 2 3')":
        "speech_beams: expected logits [windows, beam, vocab] of 2 tokens or more, got [2, 3, 1]",
    "_op(x, 'speech_beams', 'f32 1 65 5', 'i32 5', 'i32 1 65 6', 'f32 1 65')":
        "speech_beams: expected 1 to 64 beams, got 65",
    "_op(x, 'speech_beams', 'f32 2 3 5', 'i32 5', 'i32 6 6', 'f32 2 3')":
        "speech_beams: expected levels, notes and scores so far [[5], [2, 3, 6], [2, 3]], got "
        "[[5], [6, 6], [2, 3]]",
    "_op(x, 'speech_scores', 'f32 5', 'i32 5', 'i32 1 6')":
        "speech_scores: expected scores [rows, vocab], got [5]",
    "_op(x, 'speech_scores', 'f32 1 5', 'i32 4', 'i32 1 6')":
        "speech_scores: expected levels [5] and notes [1, 6], got [4] and [1, 6]",
}  # fmt: skip
DTYPE_MISTAKES = {
    "_selected(x, x, i[0], 3)":
        "beam_select: expected i32, i32, f32, f32, i32 and i32, got ['i32', 'i32', 'f32', 'f32', "
        "'f32', 'i32']",
    "apply_all(op.get('beam_blocks'), (ct.State(i).value, x[:, 0]), {'beam': 3, 'size': 4})":
        "beam_blocks: expected i32 and i32, got ['i32', 'f32']",
    "_copied(i[:, :3], ct.zeros((1, 2, 4, 5), 'f16', device=i.device))":
        "cache_copy: expected values of f32, got f16",
    "f.conv1d(x[None], x[None], stride=1.5)": "conv1d: expected a whole number for stride, got 1.5",
    "f.attention(x[None, None], *[f.broadcast_to(x[0], (1, 2, 64, 5))] * 2, blocks=x)":
        "attention: expected i32 blocks, got f32",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, sinks=i[0, :1])":
        "attention: expected float sinks, got i32",
    "f.var(i)": "var: expected a float dtype, got i32",
    "f.var(x, correction='1')": "var: expected a number for correction, got str",
    "f.pad(i, 1, 0.5)": "pad: expected a number that fits i32, got 0.5",
    "f.pad(x, 1, x)": "pad: expected a number for value, got Tensor",
    "f.repeat(x, [1, 2, 3])": "repeat: expected a whole number for repeats, got [1, 2, 3]",
    "f.repeat(x, 2, dim=0)": "repeat: unknown argument dim=; write axis=",
    "f.tril(x, '1')": "tril: expected a whole number for k, got '1'",
    "f.floor(i)": "floor: expected a dtype of kind float, got i32: .astype('f32') makes one",
    "f.sign(i > 0)": "sign: expected a dtype of kind float or int or uint, got bool",
    "f.pow(i, i)": "pow: expected a dtype of kind float, got i32: .astype('f32') makes one",
    "x ** '2'":
        "pow: expected an exponent of 0.5 or a whole number to 64, of integers 0 or more, got "
        "'2'; floats take any number and a Tensor",
    "i ** 65":
        "pow: expected an exponent of 0.5 or a whole number to 64, of integers 0 or more, got "
        "65; floats take any number and a Tensor",
    "x + i": "add: cannot mix f32 and i32; cast one with .astype()",
    "h * h.astype('bf16')": "mul: cannot mix f16 and bf16; cast one with .astype()",
    "f.exp(i)": "exp: expected a dtype of kind float, got i32: .astype('f32') makes one",
    "i / 2":
        "div: expected a dtype of kind float, got i32: .astype('f32') makes one, and // divides "
        "integers",
    "f.concat(x, x)": "concat: expected a list of Tensors, got a Tensor; ct.concat([x, y])",
    "f.stack(x)": "stack: expected a list of Tensors, got a Tensor; ct.stack([x, y])",
    "f.concat([x, np.ones(3)])": "concat: expected a Tensor, got ndarray; ct.asarray makes one",
    "f.sum([x, x])": "sum: expected a Tensor, got list; ct.stack and ct.concat join several",
    "f.relu(ct.State(x))": "relu: expected a Tensor, got State; its .value is one",
    "i + 0.5": "add: expected a Tensor or a Python number that fits i32, got 0.5",
    "i.astype('i8') + 300": "add: expected a number that fits i8, got 300",
    "x * 10 ** 400": "mul: expected a number that fits f32, got one of 1329 bits",
    "ct.scale(x, -10 ** 400)": "scale: expected factor within the range of floats",
    "f.maximum(i.astype('u32'), -1)": "maximum: expected a number that fits u32, got -1",
    "f.where(x.astype('bool'), 1, 2)":
        "where: expected two Tensors, or one and a number, got int and int",
    "f.where(x, x, 0)": "where: expected a bool condition, got f32",
    "ct.linear(x, i.astype('i8'))":
        "linear: expected scale= with an i8 weight; ct.quantize_int8 makes both",
    "ct.linear(x, i.astype('i8'), scale=i[:, 0])":
        "linear: expected float dtypes, got ['f32', 'i32']",
    "ct.linear(x, i, scale=x[:, 0])": "linear: expected float dtypes, got ['f32', 'i32', 'f32']",
    "f.matmul(x, h.T)": "matmul: expected one dtype, got f32 and f16",
    "f.matmul(i, i.T)": "matmul: expected float dtypes, got ['i32', 'i32']",
    "f.mean(i)": "mean: expected a float dtype, got i32",
    "f.dot(x[0], h[0])": "dot: expected one numeric dtype, got f32 and f16",
    "f.softmax(i)": "softmax: expected a float dtype, got i32",
    "f.rms_norm(i)": "rms_norm: expected float dtypes, got ['i32']",
    "f.max(i.astype('bool'), 0)": "max: expected a numeric dtype, got bool",
    "f.argmax(i.astype('bool'))": "argmax: expected a numeric dtype, got bool",
    "f.embedding(i, i)": "embedding: expected a float table, got i32",
    "f.mean_pool(i[None], i[0, :1])": "mean_pool: expected floats and i32, got i32 and i32",
    "f.attention(h.reshape(1, 1, 3, 5), *[x.reshape(1, 1, 3, 5)] * 2)":
        "attention: expected one float dtype, got ['f16', 'f32', 'f32']",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, lengths=x[0, :1])":
        "attention: expected i32 lengths, got f32",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, key_mask=x[:1, :3])":
        "attention: expected a bool or integer key_mask, got f32",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, mask=ARRAY)":
        "attention: expected a Tensor, got ndarray; ct.asarray makes one",
    "f.embedding(x, x)": "embedding: expected i32 ids, got f32",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, mask=i[:, :3])":
        "attention: expected a float mask, which is added to the scores, or a bool one, True "
        "where a query sees a key, got i32; mask.astype('bool') is one",
    "f.attention(*[x.reshape(1, 1, 3, 5)] * 3, starts=x[0, :1])":
        "attention: expected i32 starts, got f32",
    "f.concat([x, h])": "concat: expected operands of one dtype, got f32, f16",
    "f.full((2,), 1.5, 'i32', x.device)": "fill: expected a number that fits i32, got 1.5",
    "x > i": "gt: cannot mix f32 and i32; cast one with .astype()",
    "i > 0.5": "gt: expected a Tensor or a Python number that fits i32, got 0.5",
    "(x > 0) > (x < 0)": "gt: expected a dtype of kind float or int or uint, got bool",
    "i & i": "logical_and: expected a dtype of kind bool, got i32",
    "x // 2": "floor_divide: expected a dtype of kind int or uint, got f32",
    "f.silu_gate(x, 2.0)": "silu_gate: expected a Tensor, got float; ct.asarray makes one",
    "f.arange(2, dtype='bool', device=x.device)": "arange: expected a numeric dtype, got bool",
    "f.arange(300, dtype='u8', device=x.device)": "arange: expected a number that fits u8, got 299",
    "f.arange(0, 1, 0.25, 'i32', device=x.device)":
        "arange: expected a number that fits i32, got 0.75",
    "f.gather(x, x)": "gather: expected i32 indices, got f32",
    "f.argsort(x > 0)": "argsort: expected a numeric dtype, got bool",
    "f.scatter(x > 0, i[:, 0], x > 0, reduce='add')":
        "scatter: expected a numeric dtype to add, got bool",
    "f.take_along_axis(x, x)": "take_along_axis: expected i32 indices, got f32",
    "f.scatter(x, i[:, 0], h)": "scatter: expected one dtype, got f32 and f16",
    "f.rope(x[None, None], h[:, :2], h[:, :2])":
        "rope: expected a float x and f32 tables, got f32, f16, f16",
    "f.rope(x[None, None], x[:, :2], x[:, :2], x[0, :1])": "rope: expected i32 positions, got f32",
    "f.conv1d(i[None], i[None])": "conv1d: expected float dtypes, got ['i32', 'i32']",
    "_written(x, h, i[0, :1])": "cache_write: expected k and v of f32, got f32 and f16",
    "_op(x, 'linear_norm', 'f32 3 5', 'i32 4 5', 'f32 4', 'f32 3 4', 'f32 4', 'f32 4')":
        "linear: expected float dtypes, got ['f32', 'i32', 'f32', 'f32']",
    "_op(x, 'linear_norm', 'f32 3 5', 'f32 4 5', 'f32 4', 'f32 3 4', 'f32 4', 'i32 4')":
        "layer_norm: expected float dtypes, got ['f32', 'f32', 'i32']",
    "_op(x, 'cache_copy_i8', 'i8 1 2 4 5', 'i8 1 2 4 5', 'f16 1 2 4 2', 'i32 3 3')":
        "cache_copy_i8: expected i8 keys and values and f32 scales, got i8, i8, f16",
    "_op(x, 'cache_copy_i8', 'f16 1 2 4 5', 'f16 1 2 4 5', 'f32 1 2 4 2', 'i32 3 3')":
        "cache_copy_i8: expected i8 keys and values and f32 scales, got f16, f16, f32",
    "_op(x, 'cache_write_i8', 'i8 1 1 4 5', 'i8 1 1 4 5', 'f32 1 1 4 2', 'i8 1 1 3 5', 'i8 1 1 3 "
    "5', 'i32 1')":
        "cache_write_i8: expected float k, got i8",
    "_op(x, 'cache_write_i8', 'i8 1 1 4 5', 'u8 1 1 4 5', 'f32 1 1 4 2', 'f32 1 1 3 5', 'f32 1 1 "
    "3 5', 'i32 1')":
        "cache_write_i8: expected i8 keys and values and f32 scales, got i8, u8, f32",
    "_op(x, 'cache_attend', 'f32 1 2 4 8', 'f32 1 2 4 8', 'f16 1 2 1 8', 'f32 1 2 1 8', 'f32 1 2 "
    "1 8', 'i32 1')":
        "cache_attend: expected one float dtype, got ['f32', 'f32', 'f16', 'f32', 'f32']",
    "_op(x, 'expert_linear', 'f32 2 5', 'f32 3 4 5', 'f32 2 2', 'f32 3 4 5', extras=('up',), "
    "gate='silu')":
        "expert_linear: expected i32 ids, got f32",
    "_op(x, 'expert_linear', 'i32 2 5', 'f32 3 4 5', 'i32 2 2', 'f32 3 4 5', extras=('up',), "
    "gate='silu')":
        "expert_linear: expected float dtypes, got ['i32', 'f32', 'f32']",
    "_op(x, 'expert_linear', 'f32 2 5', 'f32 3 4 5', 'i32 2 2', 'f16 3 4 5', extras=('up',), "
    "gate='silu')":
        "expert_linear: expected up of f32, got f16",
    "_op(x, 'sample', 'f32 1 5', 'i32 1', 'f32 1 5', 'f32 1 7', 'i32 1')":
        "sample: expected counts of i32, got f32",
    "_op(x, 'speech_token', 'i32 1 6', 'f32 1 2', 'i32 1 1', 'f32 1 5', 'f32 5')":
        "speech_token: expected levels of i32, got f32",
    "_op(x, 'speech_move', 'i32 4 9', *MOVED, beam=2)":
        "speech_move: expected seen of bool, got i32",
    "_op(x, 'speech_beams', 'f32 2 3 5', 'i32 5', 'f32 2 3 6', 'f32 2 3')":
        "speech_beams: expected f32, i32, i32 and f32, got ['f32', 'i32', 'f32', 'f32']",
    "_op(x, 'speech_scores', 'f16 1 5', 'i32 5', 'i32 1 6')":
        "speech_scores: expected f32, i32 and i32, got ['f16', 'i32', 'i32']",
}  # fmt: skip


NUMBERLESS = {"arange", "full", "rope_tables", "zeros"}  # public functions that take no tensor


@pytest.mark.parametrize("name", sorted(set(f.__all__) - NUMBERLESS))
def test_what_is_no_tensor(name: str) -> None:
    """An array in place of the first operand; a number beside it makes no pair either."""
    function = getattr(f, name)
    required = [p for p in inspect.signature(function).parameters.values()
                if p.default is p.empty and p.kind is not p.VAR_KEYWORD]  # fmt: skip
    array, x = np.ones((2, 3), np.float32), ct.full((2, 3), 1)
    given: list[Any] = [x > 0] * (name == "where")
    given += [array, *[2] * (len(required) - len(given) - 1)]
    with pytest.raises(ct.DTypeError, match=rf"^{name}: expected .*Tensor.*, got ndarray"):
        function(*given)


@pytest.mark.devices("cpu", "simulator", "webgpu-minimum")
@pytest.mark.parametrize("value", [10**39, 1e300, -1e39])
def test_numbers_beyond_f32_are_infinite(device: ct.Device, value: float) -> None:
    """On their way to the device as on the CPU, and with no warning."""
    x = ct.full((3,), 1, device=device)
    outs = [x + value, ct.scale(x, value), ct.full((3,), value, device=device)]
    outs += [ct.linear(x, x[None], alpha=value), ct.clip(x, min=value, max=value)]
    for got in ct.fetch(*outs).result():
        assert (got == math.copysign(math.inf, value)).all()


def _numbers(x: ct.Tensor, value: Any) -> dict[str, Any]:
    """Calls that take a number, by what their errors call it."""
    q = x[None, None]
    return {
        "scale: expected a number for factor": lambda: ct.scale(x, value),
        "elu: expected a number for alpha": lambda: f.elu(x, value),
        "leaky_relu: expected a number for negative_slope":
            lambda: f.leaky_relu(x, value),
        "clip: expected a number for min": lambda: ct.clip(x, min=value),
        "clip: expected a number for max": lambda: ct.clip(x.astype("i32"), max=value),
        "matmul: expected a number for alpha": lambda: ct.matmul(x, x.T, alpha=value),
        "linear: expected a number for alpha": lambda: ct.linear(x, x, alpha=value),
        "layer_norm: expected a number for eps": lambda: ct.layer_norm(x, eps=value),
        "rms_norm: expected a number for eps": lambda: ct.rms_norm(x, eps=value),
        "l2_normalize: expected a number for eps": lambda: ct.l2_normalize(x, eps=value),
        "attention: expected a number for scale": lambda: ct.attention(q, q, q, scale=value),
        "full: expected a number for fill": lambda: ct.full((2,), value, device=x.device),
        "arange: expected a number for step": lambda: ct.arange(1, 2, value, device=x.device),
    }  # fmt: skip


@pytest.mark.parametrize("value", ["2", [2.0], np.ones(2), object(), 2j])
def test_what_is_no_number(value: Any) -> None:
    x = ct.full((3, 5), 2)
    for text, call in {**_numbers(x, value), **_numbers(x, x[0, 0])}.items():
        with pytest.raises(ct.DTypeError, match=f"^{text}, got "):
            call()
    numbers: list[Any] = [np.float32(0.5), np.int64(3)]  # of NumPy: as Python's
    assert ct.scale(x, numbers[0]).numpy().max() == 1
    assert ct.full((2,), numbers[1], "i32").tolist() == [3, 3]
    assert ct.arange(numbers[1]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", ["no", 1, None, np.ones(1)])
def test_what_is_neither_true_nor_false(value: Any) -> None:
    x = ct.full((3, 5), 2)
    q = x[None, None]
    calls: dict[str, Any] = {
        "attention: expected True or False for causal": lambda: ct.attention(q, q, q, causal=value),
        "sum: expected True or False for keepdims": lambda: ct.sum(x, 1, keepdims=value),
        "argmax: expected True or False for keepdims": lambda: ct.argmax(x, 1, keepdims=value),
    }
    for text, call in calls.items():
        with pytest.raises(ct.DTypeError, match=f"^{text}, got {type(value).__name__}$"):
            call()
    yes: Any = np.bool_(True)
    assert ct.sum(x, 1, keepdims=yes).shape == (3, 1)


@pytest.mark.parametrize("call", [*SHAPE_MISTAKES, *DTYPE_MISTAKES])
def test_mistakes(device: ct.Device, call: str) -> None:
    tensors = {
        n: ct.full((3, 5), 2, d, device) for n, d in (("x", "f32"), ("h", "f16"), ("i", "i32"))
    }
    kind = ct.ShapeError if call in SHAPE_MISTAKES else ct.DTypeError
    with pytest.raises(kind) as caught:
        eval(call, {**globals(), **tensors})
    assert type(caught.value) is kind
    assert str(caught.value) == {**SHAPE_MISTAKES, **DTYPE_MISTAKES}[call]


def test_tensors_of_two_devices(device: ct.Device) -> None:
    other = ct.device("cpu", cache=ct.PipelineCache())
    with pytest.raises(ct.DeviceError, match=r"add: operands on .* and cpu"):
        ct.full((3,), 1, device=device) + ct.full((3,), 1, device=other)


@pytest.mark.devices("cpu", "webgpu-minimum")
@pytest.mark.parametrize("rank", [4, 5, 6, 8, 12, 14])
def test_many_tensors_of_a_high_rank_are_joined(device: ct.Device, rank: int) -> None:
    """As many at once as the parameters of a launch leave room for."""
    shape = (2,) * 4 + (1,) * (rank - 4)
    arrays = [np.arange(16, dtype=np.float32).reshape(shape) + i for i in range(9)]
    parts = [ct.asarray(a, device=device) for a in arrays]
    got = ct.concat(parts, axis=1).numpy()
    np.testing.assert_array_equal(got, np.concatenate(arrays, 1))


# -- random shapes --------------------------------------------------------------------------------

BOUNDED = settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
DTYPES = st.sampled_from(("f32", "f16", "i32", "u8"))
SIDES = st.integers(0, 9)


def whole(shape: tuple[int, ...], dtype: str) -> Array:
    """Small whole numbers: exact in every dtype."""
    return np.asarray(np.arange(math.prod(shape)).reshape(shape) % 61, dtype_of(dtype).numpy)


@pytest.mark.devices("cpu", "webgpu")
@BOUNDED
@given(
    arrays.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, min_side=0, max_side=9), DTYPES
)
def test_broadcasting(device: ct.Device, shapes: Any, dtype: str) -> None:
    a, b = (whole(s, dtype) for s in shapes.input_shapes)
    total = ct.asarray(a, device=device) + ct.asarray(b, device=device)
    larger = f.maximum(ct.asarray(b, device=device).T, 7)
    got, high = ct.fetch(total, larger).result()
    assert got.shape == shapes.result_shape
    assert np.array_equal(got, a + b)
    turned = b.swapaxes(-1, -2) if b.ndim > 1 else b
    assert np.array_equal(high, np.maximum(turned, 7))


@st.composite
def views(draw: Any, shape: tuple[int, ...]) -> list[Any]:
    """A chain of views: functions of an array or a tensor."""
    steps: list[Any] = []
    value = np.empty(shape)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("permute", "slice", "reshape")))
        if kind == "permute":
            order = tuple(draw(st.permutations(range(value.ndim))))
            step = partial(_permuted, order=order)
        elif kind == "slice":
            step = partial(_item, key=draw(arrays.basic_indices(value.shape, allow_newaxis=True)))
        else:
            step = partial(_reshaped, shape=draw(_factors(value.size)))
        try:
            value = step(value)
        except IndexError:
            continue
        steps.append(step)
    return steps


def _permuted(x: Any, order: tuple[int, ...]) -> Any:
    return x.permute(*order) if isinstance(x, ct.Tensor) else x.transpose(order)


def _item(x: Any, key: Any) -> Any:
    parts = key if isinstance(key, tuple) else (key,)
    forward = tuple(
        slice(None, None, -p.step) if isinstance(p, slice) and (p.step or 1) < 0 else p
        for p in parts
    )
    return x[forward] if isinstance(x, ct.Tensor) else np.asarray(x[forward])


def _reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    return x.reshape(shape)


@st.composite
def _factors(draw: Any, size: int) -> tuple[int, ...]:
    """A shape of that many elements."""
    if size == 0:
        return tuple(draw(st.permutations([0, draw(st.integers(1, 4))])))
    shape: list[int] = []
    while size > 1 and len(shape) < 3:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        shape.append(draw(st.sampled_from(divisors)))
        size //= shape[-1]
    return (*shape, size)


@pytest.mark.devices("cpu", "webgpu")
@BOUNDED
@given(st.data(), st.lists(SIDES, min_size=0, max_size=4).map(tuple), DTYPES)
def test_chains_of_views(device: ct.Device, data: Any, shape: tuple[int, ...], dtype: str) -> None:
    wanted = whole(shape, dtype)
    view = ct.asarray(wanted, device=device)
    for step in data.draw(views(shape)):
        wanted, view = step(wanted), step(view)
    read, moved = ct.fetch(view, view.copy()).result()
    assert read.shape == wanted.shape
    assert np.array_equal(read, wanted)
    assert np.array_equal(moved, wanted)


@pytest.mark.devices("cpu", "webgpu")
@BOUNDED
@given(
    st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), DTYPES,
    st.sampled_from(("sum", "max", "min", "argmax")), st.booleans(),
)  # fmt: skip
def test_reductions(
    device: ct.Device, data: Any, shape: tuple[int, ...], dtype: str, name: str, keepdims: bool
) -> None:
    axes = data.draw(st.sets(st.integers(-len(shape), -1), max_size=len(shape)))
    axis: Any = tuple(axes) if name != "argmax" else min(axes, default=None)
    x = whole(shape, dtype)
    got = getattr(f, name)(ct.asarray(x, device=device), axis, keepdims=keepdims)
    wanted = getattr(np, name)(x, axis=axis, keepdims=keepdims)
    assert got.shape == wanted.shape
    assert np.array_equal(got.numpy(), wanted.astype(got.numpy().dtype))
