"""Every op of the table, on every device, against its NumPy formula in float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import centella as ct
from centella import functional, op
from centella.dtypes import dtype_of, narrow, widen
from centella.ops.matmul.op import tile_of
from centella.specs import Caps
from centella.tensor import apply_all
from tests.ops_table import (
    MANY,
    OWN,
    TABLE,
    TOLERANCE,
    Array,
    Case,
    rng_of,
    tensor_of,
    values_of,
)

OPS = {o.name: o for o in op.ops() if ":" not in o.name}  # a user's kernel has a colon


def attrs_of(case: Case, dtype: str) -> dict[str, Any]:
    return {k: dtype if v == OWN else v for k, v in case.attrs.items()}


def reference_of(name: str, case: Case, dtype: str, values: list[Array]) -> Array:
    """The op's formula on float64 of the rounded inputs (whole numbers as they are stored)."""
    wide = [v.astype(np.float64) if v.dtype.kind == "f" else v for v in values]
    attrs = {k: v for k, v in attrs_of(case, dtype).items() if k != "variant"}
    with np.errstate(all="ignore"):
        return np.asarray(op.get(name).reference(*wide, **attrs))


def check(got: ct.Tensor, value: Array, wanted: Array, limit: float, what: object) -> None:
    """Equal infinities and NaN; whole numbers and moves exact (limit 0), the rest within limit."""
    wanted = np.broadcast_to(wanted, got.shape)
    stored = widen(narrow(wanted, got.dtype), got.dtype)
    assert value.shape == got.shape, what
    if limit == 0 or not got.dtype.is_float:
        np.testing.assert_array_equal(value, stored, err_msg=str(what))
        return
    number = np.isfinite(stored)
    np.testing.assert_array_equal(value[~number], stored[~number], err_msg=str(what))
    left, right = value[number].astype(np.float64), wanted[number].astype(np.float64)
    error = np.square(left - right).sum()
    if number.sum() < MANY and got.dtype.itemsize == 2:
        limit = max(limit, 1.1 * got.dtype.epsilon**2)
    assert error <= limit * np.square(right).sum(), (
        f"{what}: error {error / max(np.square(right).sum(), 1e-300):.2e} > {limit:.0e}"
    )


def rows() -> list[Any]:
    return [
        pytest.param(name, dtype, id=f"{name}-{dtype}")
        for name, row in TABLE.items()
        for dtype in row.dtypes
    ]


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_row_and_a_docstring(name: str) -> None:
    assert name in TABLE, f"give {name} a row in tests/ops_table.py"
    assert OPS[name].doc.strip(), f"{name} has no docstring"


@pytest.mark.parametrize(("name", "dtype"), rows())
def test_op(device: ct.Device, name: str, dtype: str) -> None:
    row, declared = TABLE[name], op.get(name)
    simulated = device.caps.target == "ir"
    cases = [
        c
        for c in row.cases
        if (not c.dtypes or dtype in c.dtypes)
        and (c.small or not simulated)
        and variant_fits(c, dtype, device.caps)
    ]
    results: list[tuple[ct.Tensor, Array]] = []
    for case in cases:
        values = [values_of(i, dtype, rng_of(name, case, n)) for n, i in enumerate(case.inputs)]
        wanted = reference_of(name, case, dtype, values)
        tensors = [tensor_of(i, v, dtype, device) for i, v in zip(case.inputs, values, strict=True)]
        results.append((run(declared, tensors, attrs_of(case, dtype), device), wanted))
    limit = 0.0 if row.exact else TOLERANCE.get(dtype, (0.0, 0.0))[row.sums]
    read = ct.fetch(*(t for t, _ in results)).result()
    for case, (got, wanted), value in zip(cases, results, read, strict=True):
        check(got, value, wanted, limit, f"{name} {dtype} {case}")


def variant_fits(case: Case, dtype: str, caps: Caps) -> bool:
    variant = case.attrs.get("variant")
    return variant is None or tile_of(variant, dtype_of(dtype).itemsize, caps) is not None


def run(
    declared: op.Op, tensors: list[ct.Tensor], attrs: dict[str, Any], device: ct.Device
) -> ct.Tensor:
    """Record an op; those without an input are recorded on the device."""
    if tensors:
        return apply_all(declared, tensors, attrs)[0]
    value = device.record(declared, [], attrs)[0]
    return ct.Tensor(value, value.spec)


@pytest.mark.parametrize("name", [n for n, o in OPS.items() if o.variants])
def test_every_variant_is_forced_somewhere(name: str) -> None:
    forced = {c.attrs.get("variant") for c in TABLE[name].cases}
    assert set(OPS[name].variants) <= forced


@pytest.mark.devices("simulator", "webgpu-minimum")
def test_a_variant_too_large_for_the_device(device: ct.Device) -> None:
    x = ct.zeros((3, 5), "f16", device)
    y = ct.matmul(x, x.T, variant="large")
    with pytest.raises(ct.LimitError, match=r"matmul: .*'large' does not fit"):
        y.numpy()


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


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_one_row_equals_the_first_of_many(device: ct.Device, name: str, dtype: str) -> None:
    k, n = 72, 70
    rng = rng_of(name, dtype, "rows")
    a = widen(narrow(rng.standard_normal((65, k)), dtype_of(dtype)), dtype_of(dtype))
    b = widen(narrow(rng.standard_normal((n, k)), dtype_of(dtype)), dtype_of(dtype))
    right = ct.asarray(b, dtype, device)
    outs = []
    for m in (1, 2, 3, 4, 5, 16, 65):
        left = ct.asarray(a[:m], dtype, device)
        outs.append((ct.linear(left, right) if name == "linear" else left @ right.T)[0])
    one, *many = ct.fetch(*outs).result()
    epsilon = dtype_of("f32").epsilon * k + (dtype_of(dtype).epsilon if dtype != "f32" else 0)
    bound = 4 * epsilon * (np.abs(a[0]) @ np.abs(b).T)
    for m, row in zip((2, 3, 4, 5, 16, 65), many, strict=True):
        assert (np.abs(one - row) <= bound).all(), m


# -- outliers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", ["lengths", "key_mask", "mask", "causal"])
def test_a_query_without_keys_gives_zeros(device: ct.Device, masks: str) -> None:
    rng = rng_of("zeros", masks)
    q = ct.asarray(rng.standard_normal((2, 2, 3, 8)), "f32", device)
    k = ct.asarray(rng.standard_normal((2, 2, 2, 8)), "f32", device)
    v = rng.standard_normal((2, 2, 2, 8)).astype(np.float32)
    choices: dict[str, dict[str, Any]] = {
        "lengths": {"lengths": ct.zeros((2,), "i32", device)},
        "key_mask": {"key_mask": ct.zeros((2, 2), "bool", device)},
        "mask": {"mask": ct.full((1, 1, 3, 2), -np.inf, device=device)},
        "causal": {"causal": True},  # query 0 is before the first key
    }
    if masks in ("lengths", "key_mask"):
        v[:] = np.nan  # what does not count may hold anything
    got = ct.attention(q, k, ct.asarray(v, device=device), **choices[masks]).numpy()
    assert not got[:, :, :1].any()
    assert masks == "causal" or not got.any()


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
        _error("exp: expected a dtype of kind float, got i32", ct.DTypeError)),
    "a fraction": (
        lambda x, h, i: i + 0.5,
        _error("add: expected a Tensor or a Python number that fits i32, got 0.5",
               ct.DTypeError)),
    "a number out of range": (
        lambda x, h, i: i.astype("i8") + 300,
        _error("add: expected a number that fits i8, got 300", ct.DTypeError)),
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
    "matmul of two dtypes": (
        lambda x, h, i: functional.matmul(x, h.T),
        _error("matmul: expected one dtype, got f32 and f16", ct.DTypeError)),
    "matmul of integers": (
        lambda x, h, i: functional.matmul(i, i.T),
        _error("matmul: expected float dtypes, got ['i32', 'i32']", ct.DTypeError)),
    "variant": (
        lambda x, h, i: functional.matmul(x, x.T, variant="huge"),
        _error("matmul: expected variant of large, medium, small, got 'huge'")),
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
        _error("gelu: expected none, tanh or quick, got 'fast'")),
    "axis": (
        lambda x, h, i: functional.softmax(x, 2), _error("expected an axis of [3, 5], got 2")),
    "axis of a sum": (
        lambda x, h, i: functional.sum(x, -3), _error("expected an axis of [3, 5], got -3")),
    "one axis twice": (
        lambda x, h, i: functional.sum(x, (1, -1)),
        _error("sum: expected different axes, got [1, -1]")),
    "nothing to choose from": (
        lambda x, h, i: functional.max(x[:, :0], 1),
        _error("max: expected at least one element, got [3, 0]")),
    "argmax of nothing": (
        lambda x, h, i: functional.argmax(x[:0]),
        _error("argmax: expected at least one element, got [0]")),
    "mean of integers": (
        lambda x, h, i: functional.mean(i),
        _error("mean: expected a float dtype, got i32", ct.DTypeError)),
    "dot": (
        lambda x, h, i: functional.dot(x[0], x[0, :2]),
        _error("dot: expected two vectors of one length, got [5] and [2]")),
    "norm": (
        lambda x, h, i: functional.layer_norm(x, x[:, 0]),
        _error("layer_norm: expected a vector of 5, got [3]")),
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
    "a mask of bools": (
        lambda x, h, i: functional.attention(
            *[x.reshape(1, 1, 3, 5)] * 3, mask=i[:, :3].astype("bool").reshape(1, 1, 3, 3)),
        _error("attention: expected a float mask, got bool", ct.DTypeError)),
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
    "reshape": (
        lambda x, h, i: x.reshape(4, 4),
        _error("reshape: expected 15 elements, got shape [4, 4]")),
}  # fmt: skip


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
