"""Replay: a function captured once; each call writes its inputs, launches, and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, assert_type

import numpy as np
import pytest

import centella as ct
from centella.tensors import functional
from centella.tensors.jit import method_of

RNG = np.random.default_rng(3)
W = RNG.standard_normal((5, 7)).astype(np.float32)


HOW = pytest.mark.parametrize("how", ["__call__", "fetch"])


def layer(device: ct.Device) -> Callable[[ct.Tensor], ct.Tensor]:
    w = ct.asarray(W, device=device)
    return lambda x: functional.relu(functional.linear(x, w) + 1.0)


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.maximum(x @ W.T + 1, 0)


def test_contract_5_a_replay_writes_its_inputs_and_nothing_else(device: ct.Device) -> None:
    fn = device.compile(layer(device), np.zeros((3, 7), np.float32))
    for _ in range(3):
        x = RNG.standard_normal((3, 7)).astype(np.float32)
        with ct.ledger() as led, ct.forbid("compile", "allocation"):
            y = fn(x)
            led.expect(
                uploads=1, submissions=1, launches=fn.launches, compiles=0, allocations=0,
                parameter_bytes=0, downloads=0, plans=0, copies=0,
            )  # fmt: skip
        assert np.allclose(y.numpy(), expected(x), atol=1e-5)


def test_inputs_on_the_device_are_copied_there(device: ct.Device) -> None:
    fn = device.compile(layer(device), np.zeros((3, 7), np.float32))
    x = RNG.standard_normal((3, 7)).astype(np.float32)
    on_device = ct.asarray(x, device=device)
    ct.fetch(on_device).result()
    with ct.ledger() as led, ct.forbid("transfer", "compile", "allocation"):
        y = fn(on_device)
        led.expect(uploads=0, copies=1, submissions=1)
    assert np.allclose(y.numpy(), expected(x), atol=1e-5)
    with ct.ledger() as led:
        z = fn(on_device)
        led.expect(copies=0, submissions=1)
    assert np.allclose(z.numpy(), expected(x), atol=1e-5)
    turned = ct.asarray(np.ascontiguousarray(x.T), device=device).T
    assert np.allclose(fn(turned).numpy(), expected(x), atol=1e-5)


def test_a_tensor_made_for_the_call_costs_a_copy_and_its_upload(device: ct.Device) -> None:
    fn = ct.jit(layer(device))
    fn(ct.asarray(np.zeros((3, 7), np.float32), device=device))
    with ct.ledger() as led:
        fn(ct.asarray(np.ones((3, 7), np.float32), device=device))
    led.expect(uploads=1, copies=1, compiles=0)


def test_outputs_are_valid_until_the_next_call(device: ct.Device) -> None:
    fn = device.compile(layer(device), np.zeros((3, 7), np.float32))
    a, b = (RNG.standard_normal((3, 7)).astype(np.float32) for _ in range(2))
    first = fn(a)
    kept = first.copy()
    second = fn(b)
    with pytest.raises(ct.ContractError, match=r"of <lambda>: a stale .* by \.copy\(\); of"):
        first.numpy()
    with pytest.raises(ct.ContractError, match="a stale version"):
        _ = first + 1
    assert np.allclose(kept.numpy(), expected(a), atol=1e-5)
    assert np.allclose(second.numpy(), expected(b), atol=1e-5)


@HOW
def test_lazy_readers_of_an_output_run_before_it_is_overwritten(
    device: ct.Device, how: str
) -> None:
    fn = device.compile(layer(device), np.zeros((3, 7), np.float32))
    run = getattr(fn, how)
    a = RNG.standard_normal((3, 7)).astype(np.float32)
    y = fn(a)
    doubled = y * 2
    run(np.zeros((3, 7), np.float32))
    with pytest.raises(ct.ContractError, match="a stale version"):
        y.numpy()
    assert np.allclose(doubled.numpy(), expected(a) * 2, atol=1e-5)
    batch = device.batch()
    waiting = batch.relu(fn(a))
    with pytest.raises(ct.ContractError, match="a batch that has not been executed reads it"):
        run(a)
    batch.execute()
    assert np.allclose(batch.read(waiting), expected(a), atol=1e-5)
    run(a)


def test_out_keeps_a_copy_in_a_state(device: ct.Device) -> None:
    fn = device.compile(layer(device), np.zeros((3, 7), np.float32))
    a = RNG.standard_normal((3, 7)).astype(np.float32)
    state = ct.State.empty((3, 5), device=device)
    fn(a, out=state)
    fn(a * 0)
    assert np.allclose(state.numpy(), expected(a), atol=1e-5)


def test_an_out_that_does_not_fit_is_refused_before_anything_runs(device: ct.Device) -> None:
    total = ct.State(np.zeros(3, np.float32), device=device)

    def add(x: ct.Tensor) -> tuple[ct.Tensor, ct.Tensor]:
        total.assign(total.value + x)
        return x * 2, x[:2] * 3

    fn = device.compile(add, np.ones(3, np.float32))
    first, _ = fn(np.ones(3, np.float32))

    def state(*shape: int, dtype: str = "f32", where: ct.Device = device) -> ct.State:
        return ct.State(np.ones(shape, np.float32), dtype, where)

    three, other = state(3), ct.device("cpu", cache=ct.PipelineCache())
    mistakes: tuple[tuple[type[Exception], str, Any], ...] = (
        (ct.ShapeError, "expected 2 States for out=, got 1", three),
        (ct.ShapeError, "expected 2 States for out=, got 1", ct.zeros(3, device=device)),
        (ct.ShapeError, "expected 2 States for out=, got 3", [three, state(2), state(2)]),
        (ct.DTypeError, "expected a State as out, got Tensor", [three, ct.zeros(2, device=device)]),
        (ct.DTypeError, "expected a State as out, got NoneType", [None, state(2)]),
        (ct.ShapeError, r"expected out \[2\], got \[4, 2\]", (three, state(4, 2))),
        (ct.DTypeError, "expected out of f32, got f16", (three, state(2, dtype="f16"))),
        (ct.DeviceError, "expected out on .*, got one on cpu", (three, state(2, where=other))),
    )
    for error, text, out in mistakes:
        with pytest.raises(error, match=f"^add: {text}"), ct.ledger() as led:
            fn(np.ones(3, np.float32), out=out)
        led.expect(submissions=0, uploads=0)
    assert np.array_equal(first.numpy(), np.full(3, 2))
    assert np.array_equal(total.numpy(), three.numpy())
    two = state(2)
    fn(np.ones(3, np.float32), out=[three, two])
    assert np.array_equal(three.numpy(), [2, 2, 2]) and np.array_equal(two.numpy(), [3, 3])


def test_states_change_with_every_replay(device: ct.Device) -> None:
    total = ct.State(np.zeros(4, np.float32), device=device)

    def add(x: ct.Tensor) -> ct.Tensor:
        total.assign(total.value + x)
        return total.value * 10

    fn = device.compile(add, np.zeros(4, np.float32))
    assert np.array_equal(total.numpy(), np.zeros(4))
    before = total.value * 1
    y = fn(np.arange(4, dtype=np.float32))
    assert np.array_equal(before.numpy(), np.zeros(4))
    assert np.array_equal(y.numpy(), np.arange(4) * 10)
    fn(np.arange(4, dtype=np.float32))
    assert np.array_equal(total.numpy(), np.arange(4) * 2)
    total.assign(1)
    assert np.array_equal(fn(np.ones(4, np.float32)).numpy(), np.full(4, 20))
    with device.batch(), pytest.raises(ct.ContractError, match="not been executed changes"):
        total.assign(3)
        fn(np.ones(4, np.float32))


def test_a_value_that_is_returned_is_valid_until_its_state_changes(device: ct.Device) -> None:
    total, x = ct.State(np.zeros(3, np.float32), device=device), np.ones(3, np.float32)

    def add(x: ct.Tensor, *, out: ct.Tensor) -> ct.Tensor:
        total.assign(total.value + x * out)
        return total.value

    fn = ct.jit(add, device=device)
    value = fn(x, out=x * 2)
    assert np.array_equal(value.numpy(), x * 2)
    total.assign(5)
    with pytest.raises(ct.ContractError, match="a stale version"):
        value.numpy()


def test_nested_arguments_and_results(device: ct.Device) -> None:
    @ct.jit(device=device)
    def fn(pair: tuple[Any, Any], *, named: dict[str, Any], scale: float) -> dict[str, Any]:
        a, b = pair
        return {"sum": a + b, "parts": [a * scale, named["c"]], "note": "as it was"}

    a, b, c = (RNG.standard_normal(6).astype(np.float32) for _ in range(3))
    for scale in (2.0, 3.0, 2.0):
        got = fn((a, ct.asarray(b, device=device)), named={"c": c}, scale=scale)
        total, part, same = ct.fetch(got["sum"], *got["parts"]).result()
        assert np.allclose(total, a + b)
        assert np.allclose(part, a * np.float32(scale))
        assert np.array_equal(same, c)
        assert got["note"] == "as it was"
    assert fn.signatures == 2


def test_jit_captures_once_for_each_signature(device: ct.Device) -> None:
    runs: list[int] = []

    @ct.jit
    def fn(x: ct.Tensor) -> ct.Tensor:
        runs.append(1)
        return functional.softmax(x * 2)

    for n in (4, 4, 9, 4, 9):
        x = ct.asarray(np.arange(n, dtype=np.float32), device=device)
        y = fn(x).numpy()
        assert np.allclose(y.sum(), 1, atol=1e-6)
    assert len(runs) == fn.signatures == 2
    assert fn(ct.asarray(np.ones(4, np.float16), device=device)).dtype is ct.f16


@pytest.mark.devices("simulator", "webgpu")
def test_arrays_go_to_the_device_that_is_named(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CENTELLA_DEVICE", "cpu")
    x: Any = RNG.standard_normal((3, 7)).astype(np.float32)
    with pytest.raises(ct.DeviceError, match=r"on cpu and .*\. No argument of") as error:
        ct.jit(layer(device))(x)
    assert str(error.value).endswith("name its own: @ct.jit(device=...)")
    assert np.allclose(ct.jit(layer(device), device=device)(x).numpy(), expected(x), atol=1e-5)
    on_device = ct.asarray(x, device=device)
    assert np.allclose(ct.jit(layer(device))(on_device).numpy(), expected(x), atol=1e-5)
    with pytest.raises(ct.DeviceError) as plain:
        ct.jit(layer(device))(ct.asarray(x, device="cpu"))
    assert "default device" not in str(plain.value)


def test_a_captured_function_may_call_another(device: ct.Device) -> None:
    inner = ct.jit(lambda x: x * 2)
    outer = ct.jit(lambda x: inner(x) + 1)
    x = ct.asarray(np.arange(3, dtype=np.float32), device=device)
    assert np.array_equal(outer(x).numpy(), np.arange(3) * 2 + 1)
    assert inner.signatures == 0


def test_a_fetch_inside_a_capture_is_refused_and_captures_nothing(device: ct.Device) -> None:
    x, runs = np.arange(3, dtype=np.float32), []

    def double(x: ct.Tensor) -> ct.Tensor:
        runs.append(1)
        return x * 2

    inner = ct.jit(double, device=device)
    for fetch in (inner.fetch, device.compile(double, x).fetch):
        runs.clear()
        with pytest.raises(ct.ContractError, match=r"^double: read while a function is captured"):
            device.compile(lambda t, fetch=fetch: t + fetch(x).result(), x)
        assert inner.signatures == len(runs) == 0


def test_constants_made_inside_are_captured(device: ct.Device) -> None:
    table = np.arange(3, dtype=np.float32)

    @ct.jit
    def fn(x: ct.Tensor) -> tuple[ct.Tensor, ct.Tensor]:
        c = ct.asarray(table, device=x.device)
        return x + c, c

    x = ct.asarray(np.ones(3, np.float32), device=device)
    for _ in range(2):
        y, c = fn(x)
        assert np.array_equal(y.numpy(), table + 1)
        assert np.array_equal(c.numpy(), table)


def test_what_is_made_of_arrays_inside_is_fixed_and_a_state_is_not(device: ct.Device) -> None:
    bias = np.zeros(3, np.float32)
    state = ct.State(bias, device=device)
    fixed = ct.jit(lambda x: x + ct.asarray(bias, device=device) + bias[0])
    moving = ct.jit(lambda x: x + state.value)
    given = ct.jit(lambda x, b: x + b, device=device)
    x = ct.asarray(np.ones(3, np.float32), device=device)
    for value, numbers in ((0, 1), (5, 6)):
        bias[:] = value
        state.assign(bias)
        assert np.array_equal(fixed(x).numpy(), np.ones(3))
        assert np.array_equal(moving(x).numpy(), np.full(3, numbers))
        assert np.array_equal(given(x, bias).numpy(), np.full(3, numbers))


def test_user_kernels_are_replayed(device: ct.Device) -> None:
    @ct.kernel(workgroup=64)
    def halve(x: ct.In[ct.f32], y: ct.Out[ct.f32], n: ct.u32) -> None:
        i = ct.lang.global_id()
        with ct.lang.if_(i < n):
            y[i] = x[i] * 0.5

    def fn(x: ct.Tensor) -> ct.Tensor:
        y = ct.empty(x.shape, device=x.device)
        halve(x, y, n=x.size, threads=x.size)
        return y + 1.0

    compiled = device.compile(fn, np.zeros(100, np.float32))
    x = RNG.standard_normal(100).astype(np.float32)
    assert np.allclose(compiled(x).numpy(), x / 2 + 1)
    assert np.allclose(compiled(-x).numpy(), -x / 2 + 1)


@HOW
def test_a_failed_note_runs_nothing(device: ct.Device, how: str) -> None:
    cache = ct.KVCache(1, 2, 4, 3, device=device)

    def step(k: ct.Tensor) -> None:
        cache.append(k, k)

    fn = getattr(device.compile(step, np.zeros((1, 2, 1, 4), np.float32)), how)
    assert cache.lengths == (0,)
    for i in range(3):
        fn(np.full((1, 2, 1, 4), i, np.float32))
        assert cache.lengths == (i + 1,)
    with ct.ledger() as led:
        with pytest.raises(ct.KVCacheFullError, match="3 of 3 positions are filled"):
            fn(np.ones((1, 2, 1, 4), np.float32))
        led.expect(submissions=0, uploads=0, downloads=0)
    assert cache.lengths == (3,)
    assert np.array_equal(cache.states()[0].numpy()[0, 0, :, 0], [0, 1, 2])
    cache.truncate(1)
    fn(np.full((1, 2, 1, 4), 9, np.float32))
    assert np.array_equal(cache.states()[0].numpy()[0, 0, :2, 0], [0, 9])


def test_mistakes(device: ct.Device) -> None:
    x = np.ones(3, np.float32)

    def reads(t: ct.Tensor) -> ct.Tensor:
        return t * float(t.numpy()[0])

    with pytest.raises(ct.ContractError, match=r"read while a function is captured, .* ct\.where"):
        device.compile(reads, x)
    with pytest.raises(ct.ContractError, match=r"gt: read .*, decide outside the function, or ret"):
        device.compile(lambda t: t * 2 if t[0] > 0 else t, x)
    with pytest.raises(ct.ContractError, match="expected tensors to be returned or States changed"):
        device.compile(lambda t: 3, x)
    with pytest.raises(ct.ShapeError, match="add: expected shapes that broadcast"):
        device.compile(lambda t: t + ct.zeros((2,), device=device), x)
    with pytest.raises(ct.DTypeError, match="pass dtype="):
        device.compile(lambda t: t, np.ones(3))
    with pytest.raises(ct.DTypeError, match="expected tensors, arrays, numbers"):
        device.compile(lambda t, s: t, x, {1, 2})
    fn = device.compile(lambda t: t * 2, x)
    with pytest.raises(ct.ContractError, match=r"captured for \(f32 \[3\]\), got \(f32 \[4\]\)"):
        fn(np.ones(4, np.float32))
    with pytest.raises(ct.ContractError, match=r"got \(i32 \[3\]\)"):
        fn(np.ones(3, np.int32))
    other = ct.device("cpu", cache=ct.PipelineCache())
    with pytest.raises(ct.DeviceError, match="expected tensors on"):
        fn(ct.asarray(x, device=other))
    escaped: list[ct.Tensor] = []

    def leaks(t: ct.Tensor) -> ct.Tensor:
        escaped.append(t * 3)
        return t * 2

    device.compile(leaks, x)
    with pytest.raises(ct.ContractError, match="recorded while a function was captured"):
        escaped[0].numpy()
    assert np.array_equal(fn(x).numpy(), x * 2)


def test_an_exception_leaves_states_as_they_were(device: ct.Device) -> None:
    state = ct.State(np.ones(3, np.float32), device=device)

    def fails(t: ct.Tensor) -> ct.Tensor:
        state.assign(t)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        device.compile(fails, np.zeros(3, np.float32))
    assert np.array_equal(state.numpy(), np.ones(3))


@pytest.mark.parametrize("what", ["device", "copy", "replay"])
def test_a_capture_that_is_refused_leaves_states_as_they_were(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    n = 1 << 16
    elsewhere = ct.zeros(3, device=ct.device("cpu", cache=ct.PipelineCache()))
    state = ct.State(np.ones(n, np.float32), device=device)
    cache, row = ct.KVCache(1, 1, 4, 3, device=device), ct.zeros((1, 1, 1, 4), device=device)

    def fn(t: ct.Tensor) -> ct.Tensor:
        old = state.value[:: n // 4]
        cache.append(row, row)
        state.assign(t)
        return {"device": elsewhere, "copy": old, "replay": t}[what]

    def no_memory(*_: Any) -> None:
        raise ct.OutOfMemoryError("no memory")

    x = np.zeros(n, np.float32)
    with monkeypatch.context() as patched, pytest.raises(ct.CentellaError):
        if what == "replay":
            patched.setattr("centella.tensors.jit.Replay", no_memory)
        device.compile(fn, x)
    assert np.array_equal(state.numpy(), np.ones(n)) and cache.lengths == (0,)
    what = "replay"
    device.compile(fn, x)(x + 2)
    assert np.array_equal(state.numpy(), np.full(n, 2)) and cache.lengths == (1,)


def test_empty_inputs_and_results(device: ct.Device) -> None:
    fn = device.compile(lambda t: t * 2, np.zeros((0, 4), np.float32))
    assert fn(np.zeros((0, 4), np.float32)).numpy().shape == (0, 4)


def test_equal_inputs_give_equal_bits(device: ct.Device) -> None:
    fn = device.compile(layer(device), np.zeros((3, 7), np.float32))
    x = RNG.standard_normal((3, 7)).astype(np.float32)
    results = {fn(x).numpy().tobytes() for _ in range(5)}
    assert len(results) == 1


# -- what is passed round and round ---------------------------------------------------------------


def test_inputs_that_are_returned_are_copies(device: ct.Device) -> None:
    swap = ct.jit(lambda a, b: (b, a + b), device=device)
    a, b = (np.full(2, n, np.float32) for n in (1, 1))
    for one, two in ((1, 2), (2, 3), (3, 5)):
        a, b = swap(a, b)
        assert np.array_equal(ct.fetch(a, b).result(), [[one] * 2, [two] * 2])
    same = ct.jit(lambda a, b: (b, a), device=device)
    x, y = same(np.ones(2, np.float32), np.full(2, 2, np.float32))
    x, y = same(x, y)
    assert np.array_equal(ct.fetch(x, y).result(), [[1, 1], [2, 2]])


def test_a_call_that_failed_leaves_no_input_behind(device: ct.Device) -> None:
    cache = ct.KVCache(1, 1, 4, 1, device=device)

    def step(k: ct.Tensor) -> ct.Tensor:
        cache.append(k, k)
        return k * 1.0

    one, two = (ct.full((1, 1, 1, 4), n, device=device) for n in (1, 2))
    fn = device.compile(step, one)
    assert np.array_equal(fn(one).numpy().reshape(-1), np.ones(4))
    with pytest.raises(ct.KVCacheFullError):
        fn(two)
    cache.reset()
    assert np.array_equal(fn(two).numpy().reshape(-1), np.full(4, 2))


def test_a_result_that_was_captured_does_not_change_unseen(device: ct.Device) -> None:
    x = np.ones(3, np.float32)
    first = device.compile(lambda t: t * 2.0, x)
    kept = first(x)
    second = device.compile(lambda t: t + kept, x)
    assert np.array_equal(second(x).numpy(), x * 3)
    first(x * 5)
    with pytest.raises(ct.ContractError, match="a stale version"):
        second(x)


def test_a_stale_version_is_not_returned(device: ct.Device) -> None:
    state = ct.State(np.zeros(3, np.float32), device=device)

    def fn() -> ct.Tensor:
        old = state.value
        state.assign(old + 1.0)
        return old

    with pytest.raises(ct.ContractError, match="a stale version"):
        device.compile(fn)
    assert np.array_equal(state.numpy(), np.zeros(3))


@pytest.mark.devices("cpu", "simulator")
def test_imported_memory_is_read_anew(device: ct.Device) -> None:
    array = np.ones(4, np.float32)
    x = ct.Tensor.from_buffer(array, 4, "f32", device=device)
    fn = device.compile(lambda t: t + 1.0, x)
    assert np.array_equal(fn(x).numpy(), np.full(4, 2))
    array[:] = 5
    assert np.array_equal(fn(x).numpy(), np.full(4, 6))


def test_a_placeholder_is_of_no_use_afterwards(device: ct.Device) -> None:
    saved: list[ct.Tensor] = []

    def fn(t: ct.Tensor) -> ct.Tensor:
        saved.append(t)
        return t + 1.0

    compiled = device.compile(fn, np.zeros(3, np.float32))
    compiled(np.ones(3, np.float32))
    with pytest.raises(ct.ContractError, match="recorded while a function was captured"):
        saved[0].numpy()


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_zeros_of_either_sign_and_nan_are_constants(device: ct.Device, kind: type[Any]) -> None:
    fn = ct.jit(lambda t, s: t * s)
    x = ct.asarray(np.ones(2, np.float32), device=device)
    assert not np.signbit(fn(x, kind(0.0)).numpy()).any()
    assert np.signbit(fn(x, kind(-0.0)).numpy()).all()
    for _ in range(3):
        assert np.isnan(fn(x, kind("nan")).numpy()).all()
    assert fn.signatures == 3


@pytest.mark.devices("cpu")
def test_an_input_that_failed_fails_the_replay(device: ct.Device) -> None:
    @ct.kernel(workgroup=1)
    def outside(x: ct.In[ct.f32], y: ct.Out[ct.f32]) -> None:
        y[0] = x[ct.lang.global_id() + 4096]

    fn = device.compile(lambda t: t * 2.0, np.ones(1, np.float32))
    fn(np.ones(1, np.float32))
    x, bad = ct.asarray(np.ones(1, np.float32), device=device), ct.empty(1, device=device)
    outside(x, bad, threads=1)
    with pytest.raises(ct.SimulationError):
        fn(bad).numpy()
    assert np.array_equal(fn(x).numpy(), [2])


def test_a_write_says_nothing_of_the_work_before_it(device: ct.Device) -> None:
    batch = device.batch()
    batch.upload(np.ones(3, np.float32))
    before = device.executor.in_flight.finished
    batch.execute().result()
    assert device.executor.in_flight.finished == before


def test_arrays_stand_for_tensors_in_typed_code(device: ct.Device) -> None:
    """mypy reads this test, too."""

    @ct.jit(device=device)
    def scaled(x: ct.Tensor, by: float, *, plus: ct.Tensor | None = None) -> ct.Tensor:
        return x * by if plus is None else x * by + plus

    x = np.ones((2, 4), np.float32)
    assert_type(scaled(ct.asarray(x, device=device), 2.0), ct.Tensor)
    y = assert_type(scaled(x, 2.0, plus=x), ct.Tensor)
    np.testing.assert_array_equal(y.numpy(), 3 * x)
    np.testing.assert_array_equal(scaled.fetch(x, by=3.0).result(), 3 * x)
    with pytest.raises(ct.DTypeError, match="jit: expected tensors, arrays, numbers"):
        scaled({1, 2}, 2.0)  # type: ignore[call-overload]  # no tensor, number or container


def test_what_a_jitted_function_is_shown_as() -> None:
    step = ct.jit(lambda x: x + 1.0, device="cpu")
    assert repr(step) == "<Jitted <lambda>, 0 captured>"
    step(ct.asarray([1.0], device="cpu"))
    assert repr(step) == "<Jitted <lambda>, 1 captured>"


def test_many_captures_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    louder = ct.jit(lambda x, volume: x * volume, device="cpu")
    bounded = ct.jit(lambda x, volume: x * volume, device="cpu", maxsize=2)
    x = np.ones(4, np.float32)
    for volume in range(70):
        louder(x, volume / 70)
        bounded(x, volume / 70)
    (record,) = caplog.records
    assert "64 signatures are captured, each with buffers of its own" in record.getMessage()


def test_a_captured_method_leaves_its_object(uncollected: None) -> None:
    """It is called while the object lives, and says what is missing after."""

    class Doubled:
        def __init__(self) -> None:
            self.step = ct.jit(method_of(self.twice), device="cpu")

        def twice(self, x: ct.Tensor) -> ct.Tensor:
            return x * 2.0

    owner = Doubled()
    x, step, gone = ct.asarray([3.0], device="cpu"), owner.step, weakref.ref(owner)
    assert step(x).numpy().tolist() == [6.0]
    del owner
    assert gone() is None
    assert step(x).numpy().tolist() == [6.0]  # captured before
    with pytest.raises(ReferenceError, match=r"Doubled\.twice: its object no longer exists"):
        step(ct.asarray([3.0, 4.0], device="cpu"))
