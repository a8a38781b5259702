"""What is assigned to a State is computed in its memory, where nothing can tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

import centella as ct
from centella import lang
from centella.tensors import functional as f

ROWS, COLUMNS = 3, 8
Array = NDArray[np.float32]


def values(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def x(device: ct.Device) -> ct.Tensor:
    return ct.asarray(values(0, ROWS, COLUMNS), device=device)


@pytest.fixture
def w(device: ct.Device) -> ct.Tensor:
    return ct.asarray(values(1, COLUMNS, COLUMNS), device=device)


@pytest.fixture
def state(device: ct.Device) -> ct.State:
    made = ct.State(values(2, ROWS, COLUMNS), device=device)
    device.synchronize()
    return made


@contextmanager
def launches(device: ct.Device, count: int) -> Iterator[None]:
    """What is recorded in it takes so many launches."""
    with ct.ledger() as led:
        yield
        device.synchronize()
    led.expect(launches=count)


def near(a: ct.Tensor | ct.State, b: Array) -> None:
    np.testing.assert_allclose(a.numpy(), b, rtol=1e-5, atol=1e-5)


def product(x: ct.Tensor, w: ct.Tensor) -> Array:
    out: Array = x.numpy() @ w.numpy()
    return out


def test_what_is_assigned_needs_no_launch_of_its_own(
    device: ct.Device, x: ct.Tensor, w: ct.Tensor, state: ct.State
) -> None:
    with launches(device, 1):
        state.assign(x @ w)
    near(state, product(x, w))


def test_a_captured_step_that_returns_the_state(
    device: ct.Device, x: ct.Tensor, w: ct.Tensor, state: ct.State
) -> None:
    @ct.jit(device=device)
    def step() -> ct.Tensor:
        state.assign(f.tanh(x @ w))
        return state.value

    kept = step.fetch().result()
    with launches(device, 2):
        near(step(), np.tanh(product(x, w)))
    near(state, kept)


def test_a_result_that_is_kept_has_memory_of_its_own(
    device: ct.Device, x: ct.Tensor, w: ct.Tensor, state: ct.State
) -> None:
    with launches(device, 2):
        kept = x @ w
        state.assign(kept)
    state.assign(0.0)
    near(kept, product(x, w))


def test_who_reads_the_state_in_between_sees_what_it_held(
    device: ct.Device, x: ct.Tensor, w: ct.Tensor, state: ct.State
) -> None:
    before, result = values(2, ROWS, COLUMNS), x @ w
    seen = state.value @ w  # recorded behind the result
    state.assign(result)
    del result
    near(seen, before @ w.numpy())
    near(state, product(x, w))


def test_a_product_of_the_state_is_assigned_by_a_launch(
    device: ct.Device, w: ct.Tensor, state: ct.State
) -> None:
    with launches(device, 2):
        state.assign(state.value @ w)
    near(state, values(2, ROWS, COLUMNS) @ w.numpy())


def test_readers_of_the_result_see_it_although_the_state_changes_later(
    device: ct.Device, x: ct.Tensor, w: ct.Tensor, state: ct.State
) -> None:
    result = x @ w
    state.assign(result)
    state.assign(1.0)
    seen = result @ w
    del result
    near(seen, product(x, w) @ w.numpy())
    near(state, np.ones((ROWS, COLUMNS), np.float32))


def test_the_last_of_several_assignments_counts(
    device: ct.Device, x: ct.Tensor, w: ct.Tensor, state: ct.State
) -> None:
    first, second = x @ w, w[:ROWS] @ w
    state.assign(second)
    state.assign(first)
    del first, second
    near(state, product(x, w))


def test_two_states_of_one_result(
    device: ct.Device, x: ct.Tensor, w: ct.Tensor, state: ct.State
) -> None:
    other = ct.State(values(3, ROWS, COLUMNS), device=device)
    device.synchronize()
    with launches(device, 2):
        result = x @ w
        state.assign(result)
        other.assign(result)
        del result
    near(state, product(x, w))
    near(other, product(x, w))
    state.assign(other.value @ w)
    other.assign(state.value @ w)
    near(other, product(x, w) @ w.numpy() @ w.numpy())


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("view", ["transposed", "part", "reshaped", "spread", "column"])
def test_views_are_assigned_element_by_element(device: ct.Device, view: str, dtype: str) -> None:
    a, b = (ct.asarray(values(s, 5, 5), dtype, device) for s in (4, 5))
    result = f.maximum(a, b)
    whole = result.numpy().copy()
    result = f.maximum(a, b)  # computed anew
    seen, expected = {
        "transposed": (result.T, whole.T),
        "part": (result[1:4], whole[1:4]),
        "reshaped": (result.reshape(25), whole.reshape(25)),
        "spread": (result[0], np.broadcast_to(whole[0], (5, 5))),
        "column": (result.reshape(5, 5, 1), whole.reshape(5, 5, 1)),
    }[view]
    state = ct.State(np.zeros(expected.shape), dtype, device)
    device.synchronize()
    state.assign(seen)
    del seen, result
    assert np.array_equal(state.numpy(), expected)


def test_any_order_of_changes_and_readers(device: ct.Device) -> None:
    """Against NumPy: products and copies among four States, results kept or not."""
    rng = np.random.default_rng(7)
    w = values(8, COLUMNS, COLUMNS) / 4
    weight = ct.asarray(w, device=device)
    for _ in range(10 if device.caps.on_host else 3):
        held = [values(s, COLUMNS, COLUMNS) for s in range(4)]
        states = [ct.State(h, device=device) for h in held]
        device.synchronize()
        results: list[tuple[ct.Tensor, Array]] = []
        for _ in range(12):
            i, j = rng.integers(0, 4, 2)
            kind = rng.integers(0, 4)
            if kind == 0:
                results.append((states[i].value @ weight, held[i] @ w))
            elif kind == 1 and results:
                tensor, array = results[rng.integers(len(results))]
                states[j].assign(tensor)
                held[j] = array
            elif kind == 2 and results:
                tensor, array = results.pop(rng.integers(len(results)))
                states[j].assign(tensor.T if i % 2 else tensor)
                held[j] = array.T if i % 2 else array
            else:
                states[j].assign(states[i].value @ weight)
                held[j] = held[i] @ w
        for state, expected in zip(states, held, strict=True):
            near(state, expected)
        for tensor, array in results:
            near(tensor, array)


def test_a_failed_change_leaves_what_was_there(device: ct.Device, state: ct.State) -> None:
    before, w = state.numpy(), ct.asarray(values(1, COLUMNS, COLUMNS), device=device)
    with pytest.raises(ct.DTypeError):
        state.assign((state.value @ w).astype("f16"))
    assert np.array_equal(state.numpy(), before)


def test_what_happened_names_the_launch(device: ct.Device, x: ct.Tensor, state: ct.State) -> None:
    state.assign(f.softmax(x))
    device.synchronize()
    first = state.value.history[0]
    assert (first.kind, first.what, first.launches) == ("computed", "softmax", 1)
    assert "2 nodes (0 dropped, 0 fused, 1 stored), 1 launches" in device.last_plan.explain()

    @ct.jit(device=device)
    def step() -> None:
        state.assign(f.softmax(x))

    step()
    first = state.value.history[0]
    assert (first.kind, first.what, first.launches) == ("replayed", "step: softmax", 1)


@ct.kernel(workgroup=64)
def evens(x: ct.In[ct.f32], y: ct.Out[ct.f32], n: ct.u32) -> None:
    """y[i] = x[i] for even i; the others are not written."""
    i = lang.global_id()
    with lang.if_((i < n) & (i % 2 == 0)):
        y[i] = x[i]


@pytest.mark.devices("webgpu")
def test_a_kernel_that_leaves_elements_does_not_show_what_the_state_held() -> None:
    device = ct.device("webgpu", pool="clear")
    x, state = ct.full(8, 3.0, device=device), ct.State(np.full(8, 7.0, np.float32), device=device)
    device.synchronize()
    y = ct.empty(8, device=device)
    evens(x, y, n=8, threads=8)
    state.assign(y)
    del y
    assert state.numpy().tolist() == [3, 0] * 4
