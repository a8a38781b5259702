"""Every op of the table, on every device, against its NumPy formula in float64."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import centella as ct
from centella.check.cases.case import Array, Case, rng_of
from centella.check.cases.compare import TOLERANCE, difference, differences
from centella.check.cases.products import variant_fits
from centella.check.cases.table import TABLE, cases_of
from centella.dtypes import dtype_of, narrow, widen
from centella.op import op
from centella.ops.operands import NUMPY
from centella.specs import Caps
from centella.tensors import functional
from centella.tensors.tensor import apply_all

OPS = {n: o for n, o in op.registry().items() if ":" not in n}  # a user's kernel has a colon


def check(got: ct.Tensor, value: Array, wanted: Array, limit: float, what: object) -> None:
    """Equal infinities and NaN; whole numbers and moves exact (limit 0), the rest within limit."""
    assert value.shape == got.shape, what
    found = difference(value, np.broadcast_to(wanted, got.shape), got.dtype, limit)
    assert found is None, f"{what}: {found}"


def rows() -> list[tuple[str, str]]:
    return [(name, dtype) for name, row in TABLE.items() for dtype in row.dtypes]


def repeats(case: Case, name: str, dtype: str, caps: Caps) -> bool:
    """Whether it is one of a sweep, and its variant runs here in an earlier dtype, too."""
    dtypes = case.dtypes or TABLE[name].dtypes
    return case.sweep and dtype != next(d for d in dtypes if variant_fits(case, d, caps))


def in_rows(pairs: list[tuple[str, str]]) -> pytest.MarkDecorator:
    made = [pytest.param(*pair, id="-".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("name", "dtype"), made)


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_row_and_a_docstring(name: str) -> None:
    assert name in TABLE, f"give {name} a row in centella/conformance/table.py"
    assert OPS[name].doc.strip(), f"{name} has no docstring"


def check_cases(device: ct.Device, name: str, dtype: str, repeated: bool) -> None:
    caps = device.caps
    cases = [c for c in cases_of(name, dtype, caps) if repeats(c, name, dtype, caps) is repeated]
    wrong = list(differences(device, name, dtype, cases, TABLE[name]))
    assert not wrong, "\n".join(f"{name} {dtype} {case}: {found}" for case, found in wrong)


@in_rows(rows())
def test_op(device: ct.Device, name: str, dtype: str) -> None:
    check_cases(device, name, dtype, repeated=False)


@pytest.mark.sweep
@in_rows([(n, d) for n, d in rows() if any(c.sweep for c in TABLE[n].cases)])
def test_op_in_the_other_dtypes_of_sweeps(device: ct.Device, name: str, dtype: str) -> None:
    check_cases(device, name, dtype, repeated=True)


@pytest.mark.parametrize("name", [n for n, o in OPS.items() if o.variants])
def test_every_variant_is_forced_somewhere(name: str) -> None:
    forced = {c.attrs.get("variant") for c in TABLE[name].cases}
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
    y = functional.argmax(ct.asarray(tall, device=device), axis=1)
    assert np.array_equal(y.numpy(), tall.argmax(1))


# -- contract 6: the choice never changes the mathematics -----------------------------------------


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


# -- the public functions: axes, numbers, defaults ------------------------------------------------

X = rng_of("functions").standard_normal((3, 5, 4)).astype(np.float32)
N = rng_of("numbers").integers(-9, 9, (3, 5, 4)).astype(np.int8)


def _softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(e / e.sum(axis, keepdims=True))


def _conv1d(x: Array) -> Array:
    """x with itself as weights: stride 2, padding 1."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1)))
    return np.stack([np.einsum("bck,ock->bo", padded[..., t : t + 4], x) for t in (0, 2)], -1)


FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "sum": (lambda x, n: functional.sum(x), lambda x, n: x.sum()),
    "sum of an axis": (lambda x, n: functional.sum(x, 0), lambda x, n: x.sum(0)),
    "sum of two axes": (lambda x, n: functional.sum(x, (0, -1)), lambda x, n: x.sum((0, 2))),
    "sum, dimensions kept": (
        lambda x, n: functional.sum(x, (1, 2), True), lambda x, n: x.sum((1, 2), keepdims=True)),
    "sum of no axis": (lambda x, n: functional.sum(x, ()), lambda x, n: x),
    "sum of integers": (lambda x, n: functional.sum(n, 1), lambda x, n: n.sum(1, dtype=np.int32)),
    "mean": (lambda x, n: functional.mean(x, 1), lambda x, n: x.mean(1)),
    "max": (lambda x, n: functional.max(n, 0, True), lambda x, n: n.max(0, keepdims=True)),
    "min": (lambda x, n: functional.min(x), lambda x, n: x.min()),
    "argmax": (lambda x, n: functional.argmax(n), lambda x, n: n.argmax()),
    "argmax of an axis": (
        lambda x, n: functional.argmax(n, 1, True), lambda x, n: n.argmax(1, keepdims=True)),
    "softmax": (lambda x, n: functional.softmax(x, 0), lambda x, n: _softmax(x, 0)),
    "log_softmax": (
        lambda x, n: functional.log_softmax(x, 1), lambda x, n: np.log(_softmax(x, 1))),
    "l2_normalize": (
        lambda x, n: functional.l2_normalize(x, axis=0),
        lambda x, n: x / np.sqrt((x * x).sum(0, keepdims=True))),
    "concat": (
        lambda x, n: functional.concat([x, x[:, :2], x], axis=-2),
        lambda x, n: np.concatenate([x, x[:, :2], x], 1)),
    "concat of many": (
        lambda x, n: functional.concat([n[i % 3] for i in range(17)], axis=1),
        lambda x, n: np.concatenate([n[i % 3] for i in range(17)], 1)),
    "clip below": (lambda x, n: functional.clip(x, min=0.25), lambda x, n: x.clip(0.25)),
    "clip above": (lambda x, n: functional.clip(x, max=0), lambda x, n: x.clip(max=0)),
    "clip beyond the dtype": (
        lambda x, n: functional.clip(n, -1000, 3), lambda x, n: n.clip(max=3)),
    "where": (
        lambda x, n: functional.where(n.astype("bool"), x, -1),
        lambda x, n: np.where(n != 0, x, np.float32(-1))),
    "where of two widths": (
        lambda x, n: functional.where(n.astype("bool"), x, x.astype("f16")[0]),
        lambda x, n: np.where(n != 0, x, x.astype(np.float16).astype(np.float32)[0])),
    "elu": (lambda x, n: functional.elu(x), lambda x, n: np.where(x > 0, x, np.expm1(x))),
    "leaky_relu": (lambda x, n: functional.leaky_relu(x), lambda x, n: np.where(x > 0, x, x / 100)),
    "number first": (lambda x, n: 1 - x, lambda x, n: 1 - x),
    "a bool as a number": (lambda x, n: x + True, lambda x, n: x + 1),
    "full": (
        lambda x, n: functional.full((2, 3), 4, "u8", x.device), lambda x, n: np.full((2, 3), 4)),
    "matmul of batches": (
        lambda x, n: x[:, None] @ x.T, lambda x, n: x[:, None] @ x.swapaxes(1, 2)),
    "x > 0": (lambda x, n: x > 0, lambda x, n: x > 0),
    "a number first": (lambda x, n: functional.le(0.5, x), lambda x, n: x >= 0.5),
    "bools": (
        lambda x, n: (x > 0) & ~(n < 3) | (n >= 5), lambda x, n: (x > 0) & (n >= 3) | (n >= 5)),
    "bools that are true": (
        lambda x, n: functional.sum(x > 0, 0), lambda x, n: (x > 0).sum(0)),
    "eq": (lambda x, n: functional.eq(n, n[0]), lambda x, n: n == n[0]),
    "a number rounded to the dtype": (
        lambda x, n: functional.eq(functional.full((2,), 0.1, "f16", x.device), 0.1),
        lambda x, n: np.array([True, True])),
    "a number beyond the dtype": (
        lambda x, n: functional.full((2,), np.inf, "f16", x.device) > 1e6,
        lambda x, n: np.array([True, True])),
    "comparison of two widths": (
        lambda x, n: x <= x.astype("f16")[0],
        lambda x, n: x <= x.astype(np.float16).astype(np.float32)[0]),
    "// and %": (lambda x, n: n // -3 + n % -3, lambda x, n: n // -3 + n % -3),
    "numbers // and %": (
        lambda x, n: 100 // (n * n + 1) + 100 % (n * n + 1),
        lambda x, n: 100 // (n * n + 1) + 100 % (n * n + 1)),
    "silu_gate": (
        lambda x, n: functional.silu_gate(x[..., :2], x[..., 2:]),
        lambda x, n: x[..., :2] / (1 + np.exp(-x[..., :2])) * x[..., 2:]),
    "arange": (lambda x, n: functional.arange(7, device=x.device), lambda x, n: np.arange(7)),
    "arange down": (
        lambda x, n: functional.arange(9, 1, -3, device=x.device),
        lambda x, n: np.arange(9, 1, -3)),
    "arange of nothing": (
        lambda x, n: functional.arange(5, 1, dtype="f32", device=x.device),
        lambda x, n: np.zeros(0)),
    "stack": (lambda x, n: functional.stack([x, x + 1]), lambda x, n: np.stack([x, x + 1])),
    "stack last": (
        lambda x, n: functional.stack([n[0], n[1], n[2]], -1), lambda x, n: np.stack([*n], -1)),
    "stack of one": (lambda x, n: functional.stack([n > 2], 1), lambda x, n: (n > 2)[:, None]),
    "split": (
        lambda x, n: functional.concat(functional.split(x, [1, 0, 3], -1)[::-1], -1),
        lambda x, n: np.concatenate([x[..., 1:], x[..., :1]], -1)),
    "split evenly": (lambda x, n: functional.split(n, 2, 1)[2], lambda x, n: n[:, 4:]),
    "chunk": (lambda x, n: functional.chunk(n, 3, 1)[1], lambda x, n: n[:, 2:4]),
    "chunks that are not there": (
        lambda x, n: functional.stack(functional.chunk(n, 7)), lambda x, n: n[:, None]),
    "gather": (
        lambda x, n: functional.gather(x, functional.argmax(x, 1)[0], -2),
        lambda x, n: x[:, x.argmax(1)[0]]),
    "scatter": (
        lambda x, n: functional.scatter(n, functional.argmax(n[:, 0] * 0, 1), n + 1),
        lambda x, n: np.stack([n[2] + 1, n[1], n[2]])),
    "interleaved_to_head_first": (
        lambda x, n: functional.interleaved_to_head_first(x, 2, 2),
        lambda x, n: x.reshape(3, 5, 2, 2).transpose(0, 2, 1, 3)),
    "conv1d": (
        lambda x, n: functional.conv1d(x, x, stride=2, padding=1, activation="relu"),
        lambda x, n: _conv1d(x).clip(0)),
}  # fmt: skip


def test_functions(device: ct.Device) -> None:
    x, n = ct.asarray(X, device=device), ct.asarray(N, device=device)
    outs = [ours(x, n) for ours, _ in FUNCTIONS.values()]
    for (name, (_, theirs)), got, value in zip(
        FUNCTIONS.items(), outs, ct.fetch(*outs).result(), strict=True
    ):
        wanted = np.asarray(theirs(X.astype(np.float64), N))
        assert value.shape == wanted.shape, name
        check(got, value, wanted, 1e-11, name)


# -- mistakes are raised where they are made, in the same words everywhere ------------------------


def _error(text: str, kind: type[Exception] = ct.ShapeError) -> tuple[type[Exception], str]:
    return kind, text


def _written(k: ct.Tensor, v: ct.Tensor, starts: ct.Tensor) -> Any:
    """Keys and values written into a cache [1, 1, 4, 5]."""
    caches = [ct.State.empty((1, 1, 4, 5), device=k.device).value for _ in range(2)]
    return apply_all(op.get("cache_write"), (*caches, k[None, None], v[None, None], starts), {})


ARRAY: Any = np.ones((3, 3), np.float32)
MISTAKES: dict[str, tuple[Any, tuple[type[Exception], str]]] = {
    "shapes": (
        lambda x, h, i: x + x[:, :2],
        _error("add: expected shapes that broadcast, got [3, 5], [3, 2]")),
    "mixed dtypes": (
        lambda x, h, i: x + i,
        _error("add: cannot mix f32 and i32; cast one with .astype()", ct.DTypeError)),
    "two 16-bit floats": (
        lambda x, h, i: h * h.astype("bf16"),
        _error("mul: cannot mix f16 and bf16; cast one with .astype()", ct.DTypeError)),
    "wrong dtype": (
        lambda x, h, i: functional.exp(i),
        _error("exp: expected a dtype of kind float, got i32: .astype('f32') makes one",
               ct.DTypeError)),
    "a quotient of integers": (
        lambda x, h, i: i / 2,
        _error("div: expected a dtype of kind float, got i32: .astype('f32') makes one, and // "
               "divides integers", ct.DTypeError)),
    "tensors beside each other": (
        lambda x, h, i: functional.concat(x, x),
        _error("concat: expected a list of Tensors, got a Tensor; ct.concat([x, y])",
               ct.DTypeError)),
    "a tensor to stack": (
        lambda x, h, i: functional.stack(x),
        _error("stack: expected a list of Tensors, got a Tensor; ct.stack([x, y])",
               ct.DTypeError)),
    "arrays to join": (
        lambda x, h, i: functional.concat([x, np.ones(3)]),  # type: ignore[list-item]
        _error("concat: expected a Tensor, got ndarray; ct.asarray makes one", ct.DTypeError)),
    "a list to reduce": (
        lambda x, h, i: functional.sum([x, x]),  # type: ignore[arg-type]
        _error("sum: expected a Tensor, got list; ct.stack and ct.concat join several",
               ct.DTypeError)),
    "a State": (
        lambda x, h, i: functional.relu(ct.State(x)),  # type: ignore[arg-type]
        _error("relu: expected a Tensor, got State; its .value is one", ct.DTypeError)),
    "a fraction": (
        lambda x, h, i: i + 0.5,
        _error("add: expected a Tensor or a Python number that fits i32, got 0.5",
               ct.DTypeError)),
    "a number out of range": (
        lambda x, h, i: i.astype("i8") + 300,
        _error("add: expected a number that fits i8, got 300", ct.DTypeError)),
    "a number that no float holds": (
        lambda x, h, i: x * 10**400,
        _error("mul: expected a number that fits f32, got one of 1329 bits", ct.DTypeError)),
    "a factor that no float holds": (
        lambda x, h, i: ct.scale(x, -(10**400)),
        _error("scale: expected factor within the range of floats", ct.DTypeError)),
    "a negative unsigned number": (
        lambda x, h, i: functional.maximum(i.astype("u32"), -1),
        _error("maximum: expected a number that fits u32, got -1", ct.DTypeError)),
    "no tensor": (
        lambda x, h, i: functional.where(x.astype("bool"), 1, 2),
        _error("where: expected two Tensors, or one and a number, got int and int",
               ct.DTypeError)),
    "a condition of floats": (
        lambda x, h, i: functional.where(x, x, 0),
        _error("where: expected a bool condition, got f32", ct.DTypeError)),
    "matmul": (
        lambda x, h, i: x @ x,
        _error("matmul: expected [..., m, k] and [..., k, n], got [3, 5] and [3, 5]")),
    "batches": (
        lambda x, h, i: x.reshape(3, 1, 5) @ functional.zeros((2, 5, 1), device=x.device),
        _error("matmul: expected shapes that broadcast, got [3], [2]")),
    "int8 without scale": (
        lambda x, h, i: ct.linear(x, i.astype("i8")),
        _error("linear: expected scale= with an i8 weight; ct.quantize_int8 makes both",
               ct.DTypeError)),
    "a scale for another weight": (
        lambda x, h, i: ct.linear(x, i.astype("i8"), scale=x[0]),
        _error("linear: expected scale [3], got [5]")),
    "a scale of integers": (
        lambda x, h, i: ct.linear(x, i.astype("i8"), scale=i[:, 0]),
        _error("linear: expected float dtypes, got ['f32', 'i32']", ct.DTypeError)),
    "weights of integers": (
        lambda x, h, i: ct.linear(x, i, scale=x[:, 0]),
        _error("linear: expected float dtypes, got ['f32', 'i32', 'f32']", ct.DTypeError)),
    "columns for linear": (
        lambda x, h, i: ct.linear(x, x, variant="columns"),
        _error("linear: expected variant of gemv, skinny, skinny_mma, large, medium, small, "
               "mma, wgmma, got 'columns'")),
    "matmul of two dtypes": (
        lambda x, h, i: functional.matmul(x, h.T),
        _error("matmul: expected one dtype, got f32 and f16", ct.DTypeError)),
    "matmul of integers": (
        lambda x, h, i: functional.matmul(i, i.T),
        _error("matmul: expected float dtypes, got ['i32', 'i32']", ct.DTypeError)),
    "variant": (
        lambda x, h, i: functional.matmul(x, x.T, variant="huge"),
        _error("matmul: expected variant of gemv, skinny, skinny_mma, columns, large, medium, "
               "small, mma, wgmma, got 'huge'")),
    "linear": (
        lambda x, h, i: functional.linear(x, x.T),
        _error("linear: expected x [..., k] and weight [n, k], got [3, 5] and [5, 3]")),
    "bias": (
        lambda x, h, i: functional.linear(x, x, x[0]),
        _error("linear: expected bias [3], got [5]")),
    "activation": (
        lambda x, h, i: functional.linear(x, x, activation="swoosh"),
        _error("linear: expected activation of relu, gelu, gelu_tanh, gelu_quick, silu, sigmoid, "
               "tanh, got 'swoosh'")),
    "gelu": (
        lambda x, h, i: functional.gelu(x, "fast"),
        _error("gelu: expected approximate of none, tanh, quick, got 'fast'")),
    "axis": (
        lambda x, h, i: functional.softmax(x, 2),
        _error("softmax: expected an axis of [3, 5], got 2")),
    "axis that is no whole number": (
        lambda x, h, i: functional.softmax(x, cast(int, -1.0)),
        _error("softmax: expected an axis of [3, 5], got -1.0")),
    "axis of a sum": (
        lambda x, h, i: functional.sum(x, -3), _error("sum: expected an axis of [3, 5], got -3")),
    "one axis twice": (
        lambda x, h, i: functional.sum(x, (1, -1)),
        _error("sum: expected different axes, got [1, -1]")),
    "nothing to choose from": (
        lambda x, h, i: functional.max(x[:, :0], 1),
        _error("max: expected at least one element along axis 1, got [3, 0]")),
    "argmax of nothing": (
        lambda x, h, i: functional.argmax(x[:0]),
        _error("argmax: expected at least one element, got [0, 5]")),
    "mean of integers": (
        lambda x, h, i: functional.mean(i),
        _error("mean: expected a float dtype, got i32", ct.DTypeError)),
    "dot": (
        lambda x, h, i: functional.dot(x[0], x[0, :2]),
        _error("dot: expected two vectors of one length, got [5] and [2]")),
    "norm": (
        lambda x, h, i: functional.layer_norm(x, x[:, 0]),
        _error("layer_norm: expected a vector of 5, got [3]")),
    "dot of two dtypes": (
        lambda x, h, i: functional.dot(x[0], h[0]),
        _error("dot: expected one numeric dtype, got f32 and f16", ct.DTypeError)),
    "softmax of integers": (
        lambda x, h, i: functional.softmax(i),
        _error("softmax: expected a float dtype, got i32", ct.DTypeError)),
    "norm of integers": (
        lambda x, h, i: functional.rms_norm(i),
        _error("rms_norm: expected float dtypes, got ['i32']", ct.DTypeError)),
    "maximum of bools": (
        lambda x, h, i: functional.max(i.astype("bool"), 0),
        _error("max: expected a numeric dtype, got bool", ct.DTypeError)),
    "argmax of bools": (
        lambda x, h, i: functional.argmax(i.astype("bool")),
        _error("argmax: expected a numeric dtype, got bool", ct.DTypeError)),
    "a table of integers": (
        lambda x, h, i: functional.embedding(i, i),
        _error("embedding: expected a float table, got i32", ct.DTypeError)),
    "a table of one dimension": (
        lambda x, h, i: functional.embedding(i, x[0]),
        _error("embedding: expected a table [n, d], got [5]")),
    "a table without rows": (
        lambda x, h, i: functional.embedding(i, x[:0]),
        _error("embedding: expected a table with rows, got [0, 5]")),
    "pooling of integers": (
        lambda x, h, i: functional.mean_pool(i[None], i[0, :1]),
        _error("mean_pool: expected floats and i32, got i32 and i32", ct.DTypeError)),
    "keys and values": (
        lambda x, h, i: functional.attention(
            x.reshape(1, 1, 3, 5), x.reshape(1, 1, 3, 5), x[:2].reshape(1, 1, 2, 5)),
        _error("attention: expected q [b, h, lq, d], k and v [b, h', lk, d], got "
               "[[1, 1, 3, 5], [1, 1, 3, 5], [1, 1, 2, 5]]")),
    "attention of two dtypes": (
        lambda x, h, i: functional.attention(
            h.reshape(1, 1, 3, 5), *[x.reshape(1, 1, 3, 5)] * 2),
        _error("attention: expected one float dtype, got ['f16', 'f32', 'f32']", ct.DTypeError)),
    "lengths of another number": (
        lambda x, h, i: functional.attention(*[x.reshape(1, 1, 3, 5)] * 3, lengths=i[0]),
        _error("attention: expected lengths [1], got [5]")),
    "lengths of floats": (
        lambda x, h, i: functional.attention(*[x.reshape(1, 1, 3, 5)] * 3, lengths=x[0, :1]),
        _error("attention: expected i32 lengths, got f32", ct.DTypeError)),
    "a key_mask of floats": (
        lambda x, h, i: functional.attention(*[x.reshape(1, 1, 3, 5)] * 3, key_mask=x[:1, :3]),
        _error("attention: expected a bool or integer key_mask, got f32", ct.DTypeError)),
    "a mask of another shape": (
        lambda x, h, i: functional.attention(
            *[x.reshape(1, 1, 3, 5)] * 3, mask=x.reshape(1, 1, 3, 5)),
        _error("attention: expected mask [1 or 1, 1 or 1, 3 or 1, 3 or 1], or with leading extents "
               "left out, got [1, 1, 3, 5]")),
    "a mask of rank 2 of another shape": (
        lambda x, h, i: functional.attention(*[x.reshape(1, 1, 3, 5)] * 3, mask=x),
        _error("attention: expected mask [1 or 1, 1 or 1, 3 or 1, 3 or 1], or with leading extents "
               "left out, got [3, 5]")),
    "a mask of rank 5": (
        lambda x, h, i: functional.attention(
            *[x.reshape(1, 1, 3, 5)] * 3, mask=x[None, None, None, :, :3]),
        _error("attention: expected mask [1 or 1, 1 or 1, 3 or 1, 3 or 1], or with leading extents "
               "left out, got [1, 1, 1, 3, 3]")),
    "a mask that is an array": (
        lambda x, h, i: functional.attention(*[x.reshape(1, 1, 3, 5)] * 3, mask=ARRAY),
        _error("attention: expected a Tensor, got ndarray; ct.asarray makes one", ct.DTypeError)),
    "ids": (
        lambda x, h, i: functional.embedding(x, x),
        _error("embedding: expected i32 ids, got f32", ct.DTypeError)),
    "lengths": (
        lambda x, h, i: functional.mean_pool(x[None], i[0]),
        _error("mean_pool: expected x [b, l, d] and lengths [b], got [1, 3, 5] and [5]")),
    "attention": (
        lambda x, h, i: functional.attention(x, x, x),
        _error("attention: expected rank 4, got [3, 5], [3, 5], [3, 5]")),
    "heads": (
        lambda x, h, i: functional.attention(
            x.reshape(1, 3, 1, 5), x[:2].reshape(1, 2, 1, 5), x[:2].reshape(1, 2, 1, 5)),
        _error("attention: expected k and v [1, a divisor of 3, lk, 5], got [1, 2, 1, 5]")),
    "a mask of integers": (
        lambda x, h, i: functional.attention(*[x.reshape(1, 1, 3, 5)] * 3, mask=i[:, :3]),
        _error("attention: expected a float mask, which is added to the scores, or a bool one, "
               "True where a query sees a key, got i32; mask.astype('bool') is one",
               ct.DTypeError)),
    "starts": (
        lambda x, h, i: functional.attention(*[x.reshape(1, 1, 3, 5)] * 3, starts=x[0, :1]),
        _error("attention: expected i32 starts, got f32", ct.DTypeError)),
    "starts of another batch": (
        lambda x, h, i: functional.attention(*[x.reshape(1, 1, 3, 5)] * 3, starts=i[0]),
        _error("attention: expected starts [1], got [5]")),
    "causal and starts": (
        lambda x, h, i: functional.attention(
            *[x.reshape(1, 1, 3, 5)] * 3, starts=i[0, :1], causal=True),
        _error("attention: expected causal or starts, got both")),
    "variant of attention": (
        lambda x, h, i: functional.attention(*[x.reshape(1, 1, 3, 5)] * 3, variant="small"),
        _error("attention: expected variant of tiled, stream, split, mma, wgmma, split_mma, got "
               "'small'")),
    "concat": (
        lambda x, h, i: functional.concat([x, x[:2]], axis=1),
        _error("concat: expected shapes that differ only along axis 1, got [3, 5], [2, 5]")),
    "concat of two dtypes": (
        lambda x, h, i: functional.concat([x, h]),
        _error("concat: expected operands of one dtype, got f32, f16", ct.DTypeError)),
    "concat of nothing": (
        lambda x, h, i: functional.concat([]),
        _error("concat: expected at least one tensor, got none")),
    "full": (
        lambda x, h, i: functional.full((2,), 1.5, "i32", x.device),
        _error("fill: expected a number that fits i32, got 1.5", ct.DTypeError)),
    "comparison": (
        lambda x, h, i: x > i,
        _error("gt: cannot mix f32 and i32; cast one with .astype()", ct.DTypeError)),
    "comparison with a fraction": (
        lambda x, h, i: i > 0.5,
        _error("gt: expected a Tensor or a Python number that fits i32, got 0.5", ct.DTypeError)),
    "bools have no order": (
        lambda x, h, i: (x > 0) > (x < 0),
        _error("gt: expected a dtype of kind float or int or uint, got bool", ct.DTypeError)),
    "logic of numbers": (
        lambda x, h, i: i & i,
        _error("logical_and: expected a dtype of kind bool, got i32", ct.DTypeError)),
    "// of floats": (
        lambda x, h, i: x // 2,
        _error("floor_divide: expected a dtype of kind int or uint, got f32", ct.DTypeError)),
    "a gate of no tensor": (
        lambda x, h, i: functional.silu_gate(x, 2.0),  # type: ignore[arg-type]  # that is the point
        _error("silu_gate: expected a Tensor, got float; ct.asarray makes one", ct.DTypeError)),
    "arange of bools": (
        lambda x, h, i: functional.arange(2, dtype="bool", device=x.device),
        _error("arange: expected a numeric dtype, got bool", ct.DTypeError)),
    "arange beyond the dtype": (
        lambda x, h, i: functional.arange(300, dtype="u8", device=x.device),
        _error("arange: expected a number that fits u8, got 299", ct.DTypeError)),
    "arange of fractions": (
        lambda x, h, i: functional.arange(0, 1, 0.25, device=x.device),
        _error("arange: expected a number that fits i32, got 0.75", ct.DTypeError)),
    "arange without a step": (
        lambda x, h, i: functional.arange(0, 1, 0, device=x.device),
        _error("arange: expected an end and a step, got 0, 1, 0")),
    "arange without an end": (
        lambda x, h, i: functional.arange(math.inf, dtype="f32", device=x.device),
        _error("arange: expected an end and a step, got 0, inf, 1")),
    "stack": (
        lambda x, h, i: functional.stack([x, x[:2]]),
        _error("stack: expected tensors of one shape, got [3, 5], [2, 5]")),
    "stack of nothing": (
        lambda x, h, i: functional.stack([]),
        _error("stack: expected at least one tensor, got none")),
    "axis of a stack": (
        lambda x, h, i: functional.stack([x], 3),
        _error("stack: expected an axis of a result of rank 3, got 3")),
    "split": (
        lambda x, h, i: functional.split(x, [1, 1]),
        _error("split: expected parts of [3, 5], got [1, 1]")),
    "split into nothing": (
        lambda x, h, i: functional.split(x, 0),
        _error("split: expected parts of 1 or more, got 0")),
    "chunk": (
        lambda x, h, i: functional.chunk(x, 0),
        _error("chunk: expected chunks of 1 or more, got 0")),
    "gather": (
        lambda x, h, i: functional.gather(x, x),
        _error("gather: expected i32 indices, got f32", ct.DTypeError)),
    "gather along no axis": (
        lambda x, h, i: functional.gather(x, i, 2),
        _error("gather: expected an axis of [3, 5], got 2")),
    "gather from nothing": (
        lambda x, h, i: functional.gather(x[:, :0], i, 1),
        _error("gather: expected rows along axis 1, got [3, 0]")),
    "scatter": (
        lambda x, h, i: functional.scatter(x, i[0], x),
        _error("scatter: expected values [5, 5], got [3, 5]")),
    "scatter of two dtypes": (
        lambda x, h, i: functional.scatter(x, i[:, 0], h),
        _error("scatter: expected one dtype, got f32 and f16", ct.DTypeError)),
    "indices of two dimensions": (
        lambda x, h, i: functional.scatter(x, i, x),
        _error("scatter: expected x [n, ...] and indices [k], got [3, 5] and [3, 5]")),
    "heads of another size": (
        lambda x, h, i: functional.interleaved_to_head_first(x, 2, 2),
        _error("interleaved_to_head_first: expected [..., seq, 2 * 2], got [3, 5]")),
    "rope": (
        lambda x, h, i: functional.rope(x, x, x),
        _error("rope: expected x [batch, heads, seq_len, head_dim], got [3, 5]")),
    "tables": (
        lambda x, h, i: functional.rope(x[None, None], x, x),
        _error("rope: expected cos and sin [positions, 1 to 2], got [3, 5] and [3, 5]")),
    "tables of another dtype": (
        lambda x, h, i: functional.rope(x[None, None], h[:, :2], h[:, :2]),
        _error("rope: expected a float x and f32 tables, got f32, f16, f16", ct.DTypeError)),
    "more positions than the tables have": (
        lambda x, h, i: functional.rope(x[None, None], x[:2, :2], x[:2, :2]),
        _error("rope: expected tables of 3 positions or more, got 2")),
    "positions": (
        lambda x, h, i: functional.rope(x[None, None], x[:, :2], x[:, :2], i),
        _error("rope: expected positions [1] or [1, 3], got [3, 5]")),
    "positions of floats": (
        lambda x, h, i: functional.rope(x[None, None], x[:, :2], x[:, :2], x[0, :1]),
        _error("rope: expected i32 positions, got f32", ct.DTypeError)),
    "conv1d": (
        lambda x, h, i: functional.conv1d(x[None], x[None, :2]),
        _error("conv1d: expected x [batch, in, length] and weight [out, in, kernel], got "
               "[1, 3, 5] and [1, 2, 5]")),
    "stride": (
        lambda x, h, i: functional.conv1d(x[None], x[None], stride=0, padding=1),
        _error("conv1d: expected stride of 1 or more, got 0")),
    "padding": (
        lambda x, h, i: functional.conv1d(x[None], x[None], padding=-1),
        _error("conv1d: expected padding of 0 or more, got -1")),
    "a stride of a fraction": (
        lambda x, h, i: functional.conv1d(x[None], x[None], stride=1.5),  # type: ignore[arg-type]
        _error("conv1d: expected stride of 1 or more, got 1.5")),
    "kernel": (
        lambda x, h, i: functional.conv1d(x[None, :, :2], x[None], padding=1),
        _error("conv1d: expected a kernel of 1 to 4 (padded length), got 5")),
    "bias of a convolution": (
        lambda x, h, i: functional.conv1d(x[None], x[None], x[0]),
        _error("conv1d: expected bias [1], got [5]")),
    "convolution of integers": (
        lambda x, h, i: functional.conv1d(i[None], i[None]),
        _error("conv1d: expected float dtypes, got ['i32', 'i32']", ct.DTypeError)),
    "activation of a convolution": (
        lambda x, h, i: functional.conv1d(x[None], x[None], activation="swoosh"),
        _error("conv1d: expected activation of relu, gelu, gelu_tanh, gelu_quick, silu, sigmoid, "
               "tanh, got 'swoosh'")),
    "reshape": (
        lambda x, h, i: x.reshape(4, 4),
        _error("reshape: expected 15 elements, got shape [4, 4]")),
    "keys of another size": (
        lambda x, h, i: _written(x[:, :4], x[:, :4], i[0, :1]),
        _error("cache_write: expected k and v [1, 1, up to 4, 5], got [1, 1, 3, 4] and "
               "[1, 1, 3, 4]")),
    "keys without values": (
        lambda x, h, i: _written(x, x[:2], i[0, :1]),
        _error("cache_write: expected k and v [1, 1, up to 4, 5], got [1, 1, 3, 5] and "
               "[1, 1, 2, 5]")),
    "starts of floats": (
        lambda x, h, i: _written(x, x, x[0, :1]),
        _error("cache_write: expected i32 starts [1], got f32 [1]")),
    "values of another dtype": (
        lambda x, h, i: _written(x, h, i[0, :1]),
        _error("cache_write: expected k and v of f32, got f32 and f16", ct.DTypeError)),
    "positions of another number": (
        lambda x, h, i: apply_all(
            op.get("cache_step"), (ct.State(i[:2]).value, i[0, :3]), {"tokens": 0}),
        _error("cache_step: expected i32 lengths [5], got i32 [3]")),
}  # fmt: skip


NUMBERLESS = {"arange", "full", "rope_tables", "zeros"}  # public functions that take no tensor


@pytest.mark.parametrize("name", sorted(set(functional.__all__) - NUMBERLESS))
def test_what_is_no_tensor(name: str) -> None:
    """An array in place of the first operand; a number beside it makes no pair either."""
    function = getattr(functional, name)
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
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
        "elu: expected a number for alpha": lambda: functional.elu(x, value),
        "leaky_relu: expected a number for negative_slope":
            lambda: functional.leaky_relu(x, value),
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


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(device: ct.Device, name: str) -> None:
    mistake, (kind, text) = MISTAKES[name]
    x = ct.full((3, 5), 2, device=device)
    h, i = ct.full((3, 5), 2, "f16", device), ct.full((3, 5), 2, "i32", device)
    with pytest.raises(kind) as caught:
        mistake(x, h, i)
    assert type(caught.value) is kind
    assert str(caught.value) == text


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
    larger = functional.maximum(ct.asarray(b, device=device).T, 7)
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
    got = getattr(functional, name)(ct.asarray(x, device=device), axis, keepdims=keepdims)
    wanted = getattr(np, name)(x, axis=axis, keepdims=keepdims)
    assert got.shape == wanted.shape
    assert np.array_equal(got.numpy(), wanted.astype(got.numpy().dtype))
