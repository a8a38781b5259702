"""Tensors: conversion to and from the host, views, Python's protocols, imported memory."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import sys
import weakref
from collections.abc import Callable
from html import escape
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import centella as ct
from centella.dtypes import dtype_of
from centella.specs import make_spec
from centella.tensors.display import as_html
from centella.tensors.views import indexed, reshaped
from tests.support.foreign import wgpu_buffer

Array = np.ndarray[Any, Any]
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2


# -- from the host --------------------------------------------------------------------------------


def test_asarray_of_python_data(device: ct.Device) -> None:
    cases: list[tuple[Any, str, tuple[int, ...]]] = [
        (1.5, "f32", ()),
        (3, "i32", ()),
        (True, "bool", ()),
        ([1, 2], "i32", (2,)),
        ([[1.0], [2.0]], "f32", (2, 1)),
        ((True, False), "bool", (2,)),
        ([], "f32", (0,)),
        (np.float32(2), "f32", ()),
        (np.int8(2), "i8", ()),
        (range(3), "i32", (3,)),
    ]
    for data, kind, shape in cases:
        tensor = ct.asarray(data, device=device)
        assert (tensor.dtype.name, tensor.shape) == (kind, shape)
        np.testing.assert_array_equal(tensor.numpy(), np.asarray(data))


@pytest.mark.parametrize("kind", ["float64", "int64", "uint64", "uint16"])
def test_types_that_no_device_stores(device: ct.Device, kind: str) -> None:
    with pytest.raises(ct.DTypeError, match=r"asarray: \S+ has no storage type.*pass dtype="):
        ct.asarray(np.zeros(3, kind), device=device)


def test_dtype_says_which_is_meant(device: ct.Device) -> None:
    wide = np.array([1.25, -2.5, 3e38, np.inf, np.nan])
    np.testing.assert_array_equal(ct.asarray(wide, "f32", device).numpy(), wide.astype(np.float32))
    got = ct.asarray(wide, "i32", device).numpy()
    np.testing.assert_array_equal(got, [1, -2, 2**31 - 1, 2**31 - 1, 0])  # as `astype` does
    np.testing.assert_array_equal(ct.asarray(wide, ct.u8, device).numpy(), [1, 0, 255, 255, 0])
    np.testing.assert_array_equal(
        ct.asarray(np.array([0, 2, -1]), "bool", device).numpy(), [False, True, True]
    )
    half = ct.asarray([1.0, 3.140625], "bf16", device)
    assert half.numpy().dtype == np.float32
    np.testing.assert_array_equal(half.numpy(), [1.0, 3.140625])
    bits = ct.asarray(np.array([0x3F80, 0x4049], np.uint16), "bf16", device)
    np.testing.assert_array_equal(bits.numpy(), [1.0, 3.140625])


def test_dtypes_equal_their_names_and_numpys_types() -> None:
    kinds = [ct.f32, ct.f16, ct.i32, ct.u32, ct.i8, ct.u8, ct.bool_]
    for kind in kinds:
        names: list[Any] = [kind.name, kind.numpy.name, kind.numpy, kind.numpy.type]
        for name in names:
            assert [kind == name, kind != name, name == kind] == [True, False, True]
            assert all(other != name for other in (*kinds, ct.bf16) if other is not kind)
        assert hash(kind) == hash(kind.name) and kind in {kind.name: 1}
    assert ct.bf16 == "bf16" and ct.bf16 != np.uint16
    others: list[Any] = [None, float, int, "float64", np.float64, "no such", 32, (), object()]
    assert all(kind != other for kind in kinds for other in others)


def test_integers_must_fit(device: ct.Device) -> None:
    for data, kind, text in (
        ([2**31], None, "2147483648 does not fit i32"),
        (np.array([0, 2**40]), "i32", "1099511627776 does not fit i32"),
        ([-1], "u32", "-1 does not fit u32"),
        ([300], "u8", "300 does not fit u8"),
        ([[1, -(10**30)]], "u8", "-1000000000.* does not fit any integer dtype"),
        (10**30, None, "1000000000.* does not fit any integer dtype"),
    ):
        with pytest.raises(ct.DTypeError, match=f"asarray: {text}"):
            ct.asarray(data, kind, device)
    np.testing.assert_array_equal(ct.asarray([2**31], "u32", device).numpy(), [2**31])


@pytest.mark.parametrize("kind", ["i8", "u8", "i32", "u32"])
def test_floats_beyond_an_integer_dtype_saturate(device: ct.Device, kind: str) -> None:
    """From the host and on the device, of every float dtype: the nearest end; NaN is 0."""
    info = np.iinfo(dtype_of(kind).numpy)
    floats = [1e30, -1e30, np.inf, -np.inf, np.nan, 300.7, -300.7, -0.9, 2.0**31, -(2.0**31)]
    for stored in ("f32", "f16", "bf16"):
        x = ct.asarray(floats, stored, device)
        known = np.nan_to_num(np.trunc(x.numpy().astype(np.float64)), nan=0.0)
        wanted = np.clip(known, info.min, info.max).astype(np.int64)
        np.testing.assert_array_equal(x.astype(kind).numpy(), wanted)
        if stored == "f32":
            np.testing.assert_array_equal(ct.asarray(floats, kind, device).numpy(), wanted)
    beyond = ct.asarray([1e39, -70000.0], "f16", device).numpy()
    np.testing.assert_array_equal(beyond, [np.inf, -np.inf])


def test_data_that_is_no_array(device: ct.Device) -> None:
    with pytest.raises(ct.ShapeError, match=r"asarray: .* equal length, got 1 and 2"):
        ct.asarray([[1, 2], [3]], device=device)
    with pytest.raises(ct.ShapeError, match=r"asarray: .* equal length, got others .*inhomogen"):
        ct.asarray([[[1, 2], [3]]], device=device)
    cases: list[tuple[Any, str]] = [
        (object(), "expected numbers, an array or a nested list of them, got object$"),
        (None, "expected numbers, .* got NoneType$"),
        ("abc", "expected numbers, .* got str$"),
        (["1", "2"], "expected numbers, .* got list of <U1$"),
        (np.array([None]), "expected numbers, .* got ndarray of object$"),
        ((i for i in range(3)), r"expected numbers, .* got generator; list\(\.\.\.\) makes one$"),
        (1j, r"complex128 has no storage type .* store its \.real and its \.imag$"),
        (np.zeros(3, "complex64"), r"complex64 has no storage type"),
    ]
    for dtype in (None, "f32"):
        for data, text in cases:
            with pytest.raises(ct.DTypeError, match=f"^asarray: {text}"):
                ct.asarray(data, dtype, device)
    with pytest.raises(ct.DTypeError, match="'float64' is not a storage type; expected one of f32"):
        ct.asarray([1.0], "float64", device)


def test_byte_order_is_a_matter_of_the_host(device: ct.Device) -> None:
    swapped = np.arange(5, dtype=">f4")
    np.testing.assert_array_equal(ct.asarray(swapped, device=device).numpy(), np.arange(5))


def test_asarray_of_a_tensor_stays_where_it_is(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    assert ct.asarray(x) is x
    assert ct.asarray(x, device=device) is x
    assert ct.asarray(x, "f16").device is device


def test_the_device_of_an_open_batch_is_the_default() -> None:
    device = ct.device("simulator")
    with device.batch():
        assert ct.asarray(X).device is device
        assert ct.empty(3).device is device
        assert ct.zeros((2, 2)).device is device
        assert ct.zeros(3, device="cpu").device is ct.device("cpu")


def test_full_and_zeros_and_empty(device: ct.Device) -> None:
    np.testing.assert_array_equal(ct.zeros((2, 3), device=device).numpy(), np.zeros((2, 3)))
    np.testing.assert_array_equal(ct.full((), 7, "i32", device).numpy(), 7)
    np.testing.assert_array_equal(ct.full(3, 1.5, "bf16", device).numpy(), [1.5] * 3)
    empty = ct.empty((2, 3), "f16", device)
    assert (empty.shape, empty.dtype, empty.is_resident) == ((2, 3), ct.f16, True)
    for shape in ((-1,), (2, -3), (1.5,)):
        with pytest.raises(ct.ShapeError, match="empty: expected extents of 0 or more"):
            ct.empty(shape, device=device)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 1, 1), (7,), (5, 3), (2, 3, 5)])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "i8", "bool"])
def test_round_trip(device: ct.Device, shape: tuple[int, ...], kind: str) -> None:
    data = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(np.float32)
    tensor = ct.asarray(data, kind, device)
    assert (tensor.shape, tensor.ndim, tensor.size) == (shape, len(shape), data.size)
    np.testing.assert_array_equal(tensor.numpy().astype(np.float32), data)
    np.testing.assert_array_equal(tensor.copy().numpy().astype(np.float32), data)


# -- to the host ----------------------------------------------------------------------------------


def test_numpy_is_a_copy_that_the_caller_owns(device: ct.Device) -> None:
    data = X.copy()
    x = ct.asarray(data, device=device)
    for read in (x.numpy, x.to_host, x.peek, lambda: np.asarray(x), lambda: x.T.numpy().T,
                 lambda: x[1:].numpy(), lambda: x.reshape(-1).numpy()):  # fmt: skip
        array = read()
        assert array.flags.writeable
        array[...] = -99
    np.testing.assert_array_equal(x.numpy(), X)
    np.testing.assert_array_equal((x + 0.0).numpy(), X)
    y = x.reshape(4, 3)
    y.numpy()[:] = 5
    np.testing.assert_array_equal(y.copy().numpy(), X.reshape(4, 3))
    data[:] = 1
    np.testing.assert_array_equal(x.numpy(), X)


def test_results_do_not_share_memory(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    pending = ct.fetch(x, x, x.T)
    first, second, third = pending.result()
    first[:] = 0
    np.testing.assert_array_equal(second, X)
    np.testing.assert_array_equal(third, X.T)
    assert pending.result()[0] is first  # the result of a Pending is one object


def test_conversions(device: ct.Device) -> None:
    x = ct.asarray([[2.5]], device=device)
    assert (x.item(), float(x), int(x), bool(x), x.tolist()) == (2.5, 2.5, 2, True, [[2.5]])
    assert not ct.asarray(0, device=device)
    many = ct.asarray(X, device=device)
    for use in (many.item, lambda: bool(many), lambda: float(many), lambda: bool(many[:0])):
        with pytest.raises(ct.ShapeError, match="item: expected one element, got shape"):
            use()


def test_copies_of_what_is_on_a_device(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    again, moved = copy.copy(x), copy.deepcopy([x.T, x.T])
    assert again is not x and again._value is x._value
    np.testing.assert_array_equal(moved[1].numpy(), X.T)
    assert moved[0]._value is not x._value
    assert copy.copy(device) is copy.deepcopy(device) is device
    assert copy.deepcopy(x.dtype) is x.dtype


def test_what_is_on_a_device_is_not_pickled(device: ct.Device) -> None:
    x, state = ct.asarray(X, device=device), ct.State(X, device=device)
    captured, pending = device.compile(lambda t: t * 2.0, X), ct.fetch(x)
    cases: list[tuple[Any, Any, str]] = [
        (pickle.dumps, x, r"pickle x\.numpy\(\)"),
        (pickle.dumps, state, r"pickle state\.numpy\(\)"),
        (pickle.dumps, device, "a device stays in its process; pickle its name"),
        (pickle.dumps, pending, r"its \.result\(\) is"),
        (copy.deepcopy, pending, r"its \.result\(\) is"),
        (copy.deepcopy, captured, "a capture is neither copied nor pickled"),
    ]
    for use, thing, text in cases:
        with pytest.raises(TypeError, match=text):
            use(thing)
    gc.collect()  # a finalizer of something half made would be an error here


def test_numpy_protocols(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    assert np.asarray(x).dtype == np.float32
    np.testing.assert_array_equal(np.asarray(x, np.float64), X)
    np.testing.assert_array_equal(np.stack([x, x]), np.stack([X, X]))
    with pytest.raises(ValueError, match="NumPy gets a copy or nothing"):
        np.asarray(x, copy=False)
    mixed: list[Callable[[], Any]] = [lambda: X * x, lambda: x * X, lambda: X + x]
    for use in mixed:
        with pytest.raises(ct.DTypeError, match=r"got a NumPy array; ct.asarray makes one"):
            use()
    with pytest.raises(TypeError):
        np.exp(x)
    two: Any = np.float32(2)
    np.testing.assert_array_equal((two * x).numpy(), 2 * X)
    np.testing.assert_array_equal((x - two.astype(np.int64)).numpy(), X - 2)


def test_equality_is_refused_rather_than_guessed(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    y = ct.asarray(X, device=device)
    guesses: list[Callable[[], Any]] = [
        lambda: x == y, lambda: x == 1.0, lambda: x != y, lambda: y in [x],
    ]  # fmt: skip
    for use in guesses:
        with pytest.raises(TypeError, match=r"use ct\.(eq|ne)\(x, y\)"):
            use()
    assert x in [y, x][1:]
    assert {x: 1}[x] == 1
    assert len({x, y}) == 2


def test_iteration_and_len(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    assert len(x) == 3
    np.testing.assert_array_equal([row.numpy() for row in x], X)
    first, *_ = x
    assert first.shape == (4,)
    scalar = x[0, 0]
    for use in (lambda: len(scalar), lambda: iter(scalar), lambda: [*scalar]):
        with pytest.raises(TypeError, match="rank 0"):
            use()
    assert list(x[:0]) == []


def test_values_are_immutable(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    y = x
    x += 1.0
    np.testing.assert_array_equal(y.numpy(), X)
    np.testing.assert_array_equal(x.numpy(), X + 1)
    with pytest.raises(TypeError, match="item assignment"):
        x[0] = 1.0  # type: ignore[index]  # that is the point
    assert copy.copy(x).spec == x.spec


def test_other_printers_show_what_repr_does() -> None:
    pretty = pytest.importorskip("rich.pretty")
    x = ct.ones((2, 3), device="cpu")
    assert pretty.pretty_repr(x) == repr(x)


def test_repr_never_copies(device: ct.Device) -> None:
    x = ct.asarray(X, device=device) + 1.0
    with ct.ledger() as led, ct.forbid("transfer"):
        said, html = repr(x), x._repr_html_()
        y = x * 2.0
        assert repr(y) == f"<Tensor [3, 4] f32 on {device.name}, pending>"
        assert y._repr_html_() == f"<div><code>{escape(repr(y)[1:-1])}</code></div>"
    led.expect(downloads=0, syncs=0)
    head = f"Tensor [3, 4] f32 on {device.name}, ready"
    if device.name != "cpu":
        assert (said, html) == (f"<{head}>", f"<div><code>{escape(head)}</code></div>")
        return
    values = np.array2string(X + 1, separator=", ", prefix=" ")
    assert said == f"<{head}:\n {values}>"
    assert html == f"<div><code>{escape(head)}</code><pre>{values}</pre></div>"


def test_html_is_escaped() -> None:
    heading, values = 'Tensor on webgpu:<GPU> & "co"', "['<b>']"
    wanted = f"<div><code>{escape(heading)}</code><pre>{escape(values)}</pre></div>"
    assert as_html(heading, values) == wanted


ENDS = np.array2string(np.arange(2_000_001), separator=", ")


@pytest.mark.parametrize(
    ("data", "dtype", "values"),
    [
        (1.5, "f32", ": 1.5"),
        (True, "bool", ": True"),
        ([1, 2, 3], "i32", ": [1, 2, 3]"),
        ([0.5, -0.0, math.nan, math.inf], "f16", ": [ 0.5, -0. ,  nan,  inf]"),
        ([1.0, 2.5], "bf16", ": [1. , 2.5]"),
        ([], "f32", ": []"),
        (np.zeros((2, 0, 3)), "f32", ": []"),
        (np.arange(2_000_001), "i32", f": {ENDS}"),
        (np.zeros((2,) * 11), "u8", ""),  # 2048 elements and no dimension to shorten
    ],
)
def test_repr_shows_values_in_the_hosts_memory(data: Any, dtype: str, values: str) -> None:
    device = ct.device("cpu")
    x = ct.asarray(data, dtype, device)
    device.synchronize()
    shape = list(np.shape(data))
    assert repr(x) == f"<Tensor {shape} {dtype} on cpu, ready{values}>"


def test_repr_of_views_and_of_large_rows() -> None:
    device = ct.device("cpu")
    data = np.arange(6000, dtype=np.float32).reshape(40, 150)
    x = ct.asarray(data, device=device)
    device.synchronize()
    for view, array in ((x, data), (x.T[3:], data.T[3:]), (x[5, ::50], data[5, ::50])):
        text = np.array2string(array, separator=", ", prefix=" ")
        assert repr(view).endswith(f"{text}>")


def test_repr_of_what_has_failed_or_changed(device: ct.Device) -> None:
    state = ct.State(X, device=device)
    state.numpy()
    before = state.value
    state.assign(state.value + 1.0)
    state.numpy()
    assert repr(before) == f"<Tensor [3, 4] f32 on {device.name}, ready>"  # it holds others now
    failed = ct.asarray(X, device=device) + 1.0
    device.recorder.implicit().fail()
    assert repr(failed) == f"<Tensor [3, 4] f32 on {device.name}, failed>"


def test_sizes(device: ct.Device) -> None:
    x = ct.asarray(np.zeros((3, 5), np.float16), device=device)
    assert (x.nbytes, x.size_bytes, x.size, x.ndim) == (30, 30, 15, 2)
    y = x + x
    assert not y.is_resident
    y.numpy()
    assert y.is_resident


def test_to_another_device_is_a_counted_copy(device: ct.Device) -> None:
    target = ct.device("cpu", pool="reuse")
    for kind in ("f32", "bf16", "i8"):
        x = ct.asarray(X, kind, device)
        assert x.to(device) is x
        with ct.ledger() as led:
            y = x.to(target)
        led.expect(uploads=1, downloads=1)
        assert y.device is target
        assert y.dtype is x.dtype
        np.testing.assert_array_equal(y.numpy(), x.numpy())


def test_fetch_of_nothing_and_of_two_devices(device: ct.Device) -> None:
    assert ct.fetch().result() == []
    other = ct.device("cpu", pool="reuse")
    a, b = ct.asarray(X, device=device), ct.asarray(X.T, device=other)
    with ct.ledger() as led:
        results = ct.fetch(a + 1.0, b, a).result()
    led.expect(downloads=2)
    for got, want in zip(results, (X + 1, X.T, X), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ct.DTypeError, match="fetch: expected a Tensor, got ndarray"):
        ct.fetch(X)  # type: ignore[arg-type]  # that is the point


def test_a_sparse_view_is_packed_on_the_device(device: ct.Device) -> None:
    data = np.arange(1 << 17, dtype=np.float32).reshape(-1, 128)
    x = ct.asarray(data, device=device)
    x.numpy()
    with ct.ledger() as led:
        np.testing.assert_array_equal(x[::4, 3].numpy(), data[::4, 3])
    assert led.counts.download_bytes <= 2048
    with device.batch() as batch:  # reading does not record on an open batch
        np.testing.assert_array_equal(x[:, 5].numpy(), data[:, 5])
        assert batch.num_operations == 0


# -- views ----------------------------------------------------------------------------------------


def test_a_view_moves_nothing(device: ct.Device) -> None:
    x = ct.asarray(np.arange(32, dtype=np.float32).reshape(2, 4, 4), device=device)
    x.numpy()
    with ct.ledger() as led:
        for view in (x.T, x[1], x[:, 1:3], x[..., 0], x[None], x.permute(2, 0, 1), x[::, ::2],
                     x.reshape(2, 16), x.permute([1, 0, 2])):  # fmt: skip
            assert view.is_resident
    led.expect(launches=0)


INDICES = [
    np.s_[1], np.s_[-1], np.s_[0, 1], np.s_[..., 2], np.s_[:, None, 1:], np.s_[1:3, ::2],
    np.s_[None], np.s_[...], np.s_[2:1], np.s_[::3, -1, ...], np.s_[()], np.s_[:, 1:100],
    np.s_[0, 0, 0], np.s_[-2:, -3:-1, None],
]  # fmt: skip


@pytest.mark.devices("cpu", "simulator")
@pytest.mark.parametrize("key", INDICES, ids=str)
def test_indexing_is_numpys(device: ct.Device, key: Any) -> None:
    data = np.arange(4 * 5 * 3, dtype=np.float32).reshape(4, 5, 3)
    x = ct.asarray(data, device=device)
    np.testing.assert_array_equal(x[key].numpy(), data[key])
    np.testing.assert_array_equal((x[key] + 1.0).numpy(), data[key] + 1)


def test_indices_that_are_none() -> None:
    x = ct.asarray(X, device="cpu")
    cases: list[tuple[Any, type[Exception], str]] = [
        (3, IndexError, "index 3 is out of range for extent 3"),
        (-4, IndexError, "index -4 is out of range"),
        ((0, 0, 0), IndexError, r"too many indices for shape \[3, 4\]"),
        ((..., ...), IndexError, "one Ellipsis at most"),
        (np.s_[::-1], ct.ShapeError, "slice: expected a step of 1 or more, got -1"),
        (1.0, TypeError, "indexed by integers, slices, None and Ellipsis; got 1.0"),
        (True, TypeError, "got True"),
        ([0, 1], TypeError, "got"),
        (x, TypeError, "got"),
        (x > 0, TypeError, "ct.gather takes rows by index, ct.where chooses by a mask"),
    ]
    for key, kind, text in cases:
        with pytest.raises(kind, match=text):
            x[key]


def test_reshape_and_permute_refuse(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    for shape in ((5,), (-1, 5), (-1, -1), (-3, -4), (0, -1), (3, 4, 2), ()):
        with pytest.raises(ct.ShapeError, match="reshape: expected 12 elements, got shape"):
            x.reshape(*shape)
    for axes in ((0,), (0, 0), (0, 2), (0, 1, 2), ()):
        with pytest.raises(ct.ShapeError, match="permute: expected each of 2 axes once"):
            x.permute(*axes)
    np.testing.assert_array_equal(x.permute(-1, 0).numpy(), X.T)
    np.testing.assert_array_equal(x.reshape([2, -1]).numpy(), X.reshape(2, 6))
    assert x.reshape(3, 4) is x
    scalar = ct.asarray(1.0, device=device)
    assert scalar.reshape(1, 1).reshape(()).shape == ()


def test_extents_and_axes_are_integers(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    axis: Any = np.int64(1)
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (x.reshape, (3.5, 4), r"reshape: expected extents, got \(3.5, 4\)"),
        (x.reshape, ("ab",), "reshape: expected extents, got"),
        (x.permute, (None,), "permute: expected axes, got"),
        (ct.sum, (x, 0.5), "sum: expected axes, got"),
    ]
    for call, wrong, text in cases:
        with pytest.raises(ct.ShapeError, match=text):
            call(*wrong)
    assert x.permute(axis, 0).shape == x.reshape(4 * axis, 3).shape == (4, 3)
    np.testing.assert_array_equal(ct.sum(x, axis).numpy(), X.sum(1))
    scalar = ct.asarray(2.0, device=device)
    assert ct.sum(scalar, -1).item() == 2.0  # one axis, as PyTorch has it
    with pytest.raises(ct.ShapeError, match=r"expected an axis of \[\], got 1"):
        ct.sum(scalar, 1)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_views_agree_with_numpy(data: Any) -> None:
    """A random slice and a random reshape: the strides describe what NumPy's view does."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    size = int(np.prod(shape, dtype=int))
    flat = np.arange(64 * 5, dtype=np.float32)
    spec = make_spec(shape, ct.f32, 16)

    def shown(extents: Any, strides: Any, offset: int) -> Array:
        return np.lib.stride_tricks.as_strided(flat[offset:], extents, [4 * s for s in strides])

    array = shown(spec.shape, spec.strides, 0)
    key = tuple(
        data.draw(st.one_of(st.integers(-n, n - 1), st.slices(n).filter(
            lambda s: s.indices(4)[2] > 0)))
        for n in shape
    )  # fmt: skip
    extents, strides, offset = indexed(spec, key)
    np.testing.assert_array_equal(shown(extents, strides, offset), array[key])
    factors = [n for n in range(1, size + 1) if size % n == 0]
    head = data.draw(st.sampled_from(factors))
    wanted = data.draw(st.permutations([head, size // head, 1]))
    strides_or_none = reshaped(spec, tuple(wanted))
    if strides_or_none is None:
        assert not np.shares_memory(array.reshape(wanted), flat)
    else:
        np.testing.assert_array_equal(shown(wanted, strides_or_none, 0), array.reshape(wanted))


# -- imported memory ------------------------------------------------------------------------------


@pytest.mark.devices("cpu", "simulator")
def test_import_of_an_array_is_no_copy(device: ct.Device) -> None:
    data = X.copy()
    with ct.ledger() as led:
        x = ct.Tensor.from_buffer(data, (3, 4), "f32", device=device)
        y = device.batch().import_buffer(data, 12, ct.f32)
        assert x.is_resident
    led.expect(uploads=0, allocations=0)
    native, start = x.native
    assert np.shares_memory(native, data)
    assert start == 0
    data[0, 0] = 42
    np.testing.assert_array_equal(x.numpy(), data)
    np.testing.assert_array_equal((y + 1.0).numpy(), data.reshape(-1) + 1)
    copies = [x.copy(), x.reshape(4, 3).copy(), x.T.contiguous(), x.astype("f32").copy()]
    before = [c.numpy() for c in copies]
    data[:] = 0
    for tensor, want in zip(copies, before, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), want)


@pytest.mark.devices("cpu", "simulator")
def test_import_with_an_offset(device: ct.Device) -> None:
    data = np.arange(40, dtype=np.float32)
    x = ct.Tensor.from_buffer(data, (3, 5), "f32", offset=12, device=device)
    assert x.native[1] == 12
    np.testing.assert_array_equal(x.numpy(), data[3:18].reshape(3, 5))
    np.testing.assert_array_equal((x[1:].T + 1.0).numpy(), data[8:18].reshape(2, 5).T + 1)
    np.testing.assert_array_equal((x @ x.T).numpy(), (x.numpy() @ x.numpy().T))
    raw = data.view(np.uint8)
    half = ct.Tensor.from_buffer(raw, 10, "f16", offset=2, device=device)
    np.testing.assert_array_equal(half.numpy(), data.view(np.float16)[1:11])


@pytest.mark.devices("cpu", "simulator")
def test_import_refuses_arrays(device: ct.Device) -> None:
    data = np.zeros((4, 4), np.float32)
    cases: list[tuple[Any, Any, int, type[Exception], str]] = [
        (data, 17, 0, ct.ShapeError, r"shape \[17\] of f32 from byte 0 needs 68 bytes; .* has 64"),
        (data, 16, 4, ct.ShapeError, "from byte 4 needs 68"),
        (data, 2, 3, ct.ShapeError, "a multiple of 4 bytes, got 3"),
        (data, 2, -4, ct.ShapeError, "got -4"),
        (data, -2, 0, ct.ShapeError, "expected extents of 0 or more"),
        (data.T[1:], 4, 0, ct.DeviceError, "expected a C-contiguous NumPy array"),
        (b"bytes", 1, 0, ct.DeviceError, "expected a C-contiguous NumPy array"),
        (np.array([None]), 1, 0, ct.DeviceError, "object|words"),
    ]
    for native, shape, offset, kind, text in cases:
        with pytest.raises(kind, match=text):
            ct.Tensor.from_buffer(native, shape, "f32", offset=offset, device=device)
    with pytest.raises(ct.DTypeError, match="not a storage type"):
        ct.Tensor.from_buffer(data, 2, "float64", device=device)


@pytest.mark.devices("cpu", "simulator")
def test_import_from_beyond_what_kernels_count(device: ct.Device) -> None:
    start = 1 << 32
    data = np.zeros(start + 16, np.uint8)  # of which the system gives what is touched
    data[start:] = range(16)
    if device.name == "cpu":
        x = ct.Tensor.from_buffer(data, 16, "u8", offset=start, device=device)
        np.testing.assert_array_equal((x + 1).numpy(), data[start:] + 1)
        return
    with pytest.raises(ct.LimitError, match=r"within the first 4,294,967,232 elements .*7,296 to"):
        ct.Tensor.from_buffer(data, 16, "u8", offset=start, device=device)
    x = ct.Tensor.from_buffer(data, 4, "f32", offset=start, device=device)
    np.testing.assert_array_equal(x.numpy().view(np.uint8), data[start:])


@pytest.mark.devices("cpu", "simulator")
@pytest.mark.parametrize("dtype", ["f8", "i8", "i4", "u4", "c16", "?", ">f4", "f2"])
def test_import_refuses_arrays_of_another_dtype(device: ct.Device, dtype: str) -> None:
    data = np.ones(16, np.dtype(dtype))
    batch = device.batch()
    with pytest.raises(ct.DTypeError, match=rf"array of f32 .*, got {data.dtype}; convert"):
        ct.Tensor.from_buffer(data, 4, "f32", device=device)
    with pytest.raises(ct.DTypeError, match="expected an array of f32"):
        batch.import_buffer(data, 4, "f32")


@pytest.mark.devices("cpu", "simulator")
@pytest.mark.parametrize("dtype", ["u1", "V2", "u2"])
def test_import_takes_bytes_of_any_dtype_and_bf16_as_uint16(device: ct.Device, dtype: str) -> None:
    bits = (X.reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
    x = ct.Tensor.from_buffer(bits.view(dtype), 12, "bf16", device=device)
    np.testing.assert_array_equal(x.numpy(), (bits.astype(np.uint32) << 16).view(np.float32))


def test_the_device_of_an_imported_array_is_the_cpu() -> None:
    x = ct.Tensor.from_buffer(X, X.shape, "f32")
    assert x.device is ct.device("cpu")
    with pytest.raises(ct.DeviceError):
        ct.Tensor.from_buffer(object(), 3, "f32")


@pytest.mark.devices("webgpu")
class TestWgpuBuffers:
    """Buffers that the application made on the same wgpu device."""

    def test_it_is_read_in_place(self, device: ct.Device) -> None:
        buffer = wgpu_buffer(device.native, X)
        with ct.ledger() as led:
            x = ct.Tensor.from_buffer(buffer, (3, 4), "f32")
            batch = device.batch()
            y = batch.import_buffer(buffer, 12, "f32")
            z = batch.add(x.reshape(-1), y)
            batch.execute()
        led.expect(uploads=0, submissions=1)
        assert batch.num_buffers == 2
        assert x.device.native is device.native
        assert x.native == (buffer, 0)
        np.testing.assert_array_equal(z.numpy(), 2 * X.reshape(-1))
        np.testing.assert_array_equal(x.numpy(), X)

    def test_offsets_and_odd_shapes(self, device: ct.Device) -> None:
        data = np.arange(1, 42, dtype=np.float32)
        buffer = wgpu_buffer(device.native, data)
        x = ct.Tensor.from_buffer(buffer, (2, 19), "f32", offset=12, device=device)
        want = data[3:41].reshape(2, 19)
        np.testing.assert_array_equal(x.numpy(), want)
        np.testing.assert_array_equal(ct.relu(x).numpy(), want)
        np.testing.assert_allclose((x @ x.T).numpy(), want @ want.T)
        whole = ct.Tensor.from_buffer(buffer, 41, "f32", device=device)
        np.testing.assert_allclose(ct.sum(whole).numpy(), data.sum())
        np.testing.assert_array_equal((whole * 2.0).numpy(), 2 * data)
        half = np.arange(6, dtype=np.float16)
        y = ct.Tensor.from_buffer(
            wgpu_buffer(device.native, half), 5, "f16", offset=2, device=device
        )
        np.testing.assert_array_equal((y + y).numpy(), 2 * half[1:])

    def test_what_cannot_be_imported(self, device: ct.Device) -> None:
        other = ct.device("webgpu", pool="reuse")
        for native, text in (
            (wgpu_buffer(other.native, X), "expected a buffer of this wgpu device"),
            (X, "expected a buffer of this wgpu device"),
            (wgpu_buffer(device.native, X, "STORAGE COPY_DST"), "needs usage STORAGE and COPY_SRC"),
            (wgpu_buffer(device.native, X, "UNIFORM COPY_SRC"), "needs usage STORAGE and COPY_SRC"),
        ):
            with pytest.raises(ct.DeviceError, match=text):
                ct.Tensor.from_buffer(native, 4, "f32", device=device)
        mapped = wgpu_buffer(device.native, X)
        mapped = device.native.create_buffer(size=16, usage=mapped.usage, mapped_at_creation=True)
        with pytest.raises(ct.DeviceError, match="must not be mapped"):
            ct.Tensor.from_buffer(mapped, 4, "f32", device=device)
        mapped.unmap()
        destroyed = wgpu_buffer(device.native, X)
        destroyed.destroy()
        with pytest.raises(ct.DeviceError, match=r"(?s)cannot be bound: .*destroyed"):
            ct.Tensor.from_buffer(destroyed, 4, "f32", device=device)
        assert not device.lost
        with pytest.raises(ct.ShapeError, match="the buffer has 48"):
            ct.Tensor.from_buffer(wgpu_buffer(device.native, X), 13, "f32", device=device)

    def test_it_lives_until_the_last_submission_is_done(self, device: ct.Device) -> None:
        buffer = wgpu_buffer(device.native, X)
        watch = weakref.ref(buffer)
        x = ct.Tensor.from_buffer(buffer, (3, 4), "f32", device=device)
        y = x + 1.0
        batch = device.batch()
        z = batch.relu(x)
        del x, buffer
        gc.collect()
        assert watch() is not None
        np.testing.assert_array_equal(y.numpy(), X + 1)
        batch.execute()
        np.testing.assert_array_equal(z.numpy(), np.maximum(X, 0))
        device.synchronize()
        (z + 1.0).numpy()  # the pool hears that the buffer is free, its bind groups go
        gc.collect()
        assert watch() is None

    def test_it_is_never_destroyed(self, device: ct.Device) -> None:
        buffer = wgpu_buffer(device.native, X)
        for pool in ("reuse", "exact"):
            own = ct.device("webgpu", native=device.native, pool=pool)
            for _ in range(2):
                x = ct.Tensor.from_buffer(buffer, (3, 4), "f32", device=own)
                np.testing.assert_array_equal((x + 1.0).numpy(), X + 1)
                del x
                gc.collect()
            own.pool.trim()
        again = ct.Tensor.from_buffer(buffer, (3, 4), "f32", device=device)
        np.testing.assert_array_equal(again.numpy(), X)

    def test_two_devices_on_one_wgpu_device(self, device: ct.Device) -> None:
        assert ct.device(native=device.native) is ct.device(native=device.native)
        first = ct.device("webgpu", native=device.native, pool="reuse")
        second = ct.device("webgpu", native=device.native, pool="reuse")
        a, b = ct.asarray(X, device=first) + 1.0, ct.asarray(X, device=second) + 2.0
        np.testing.assert_array_equal(a.numpy(), X + 1)
        np.testing.assert_array_equal(b.numpy(), X + 2)
        native, start = a.native
        c = ct.Tensor.from_buffer(native, (3, 4), "f32", offset=start, device=second)
        np.testing.assert_array_equal((c + b).numpy(), 2 * X + 3)


def test_a_tensor_does_not_keep_more_than_its_value() -> None:
    device = ct.device("cpu", pool="reuse")
    x = ct.asarray(X, device=device)
    y = x + 1.0
    before = sys.getrefcount(x._value)
    y.numpy()
    assert sys.getrefcount(x._value) < before  # the node that read it is gone


def test_a_small_copy_does_not_keep_a_large_array() -> None:
    device = ct.device("cpu", pool="reuse")
    x = ct.asarray(np.arange(1 << 16, dtype=np.float32), device=device)
    for small in (x[:4].copy(), x[4:8].reshape(2, 2).contiguous()):
        assert not np.shares_memory(small.native[0], x.native[0])
        assert small.native[0].base.nbytes <= 64
    assert x.copy().numpy()[-1] == (1 << 16) - 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [("bfloat16", "bf16"), ("BF16", "bf16"), ("fp16", "f16"), ("half", "f16"), ("fp32", "f32")],
)
def test_names_of_types_that_others_use(name: str, meant: str) -> None:
    assert ct.zeros((2,), name, "cpu").dtype.name == meant


def test_a_format_of_numbers_says_what_to_write() -> None:
    x = ct.asarray([1.0, 2.0], device="cpu")
    assert f"{x}" == str(x)
    with pytest.raises(
        TypeError, match=r"^format '\.2f' is of a number, got a Tensor: float\(x\) "
    ):
        f"{ct.sum(x):.2f}"
