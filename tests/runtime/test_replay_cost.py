"""What a replay costs the host does not grow with the States that it changes."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import centella as ct

X = np.ones(4, np.float32)


def stepping(device: ct.Device, number: int) -> tuple[Any, list[ct.State]]:
    states = [ct.State(ct.zeros(4, device=device)) for _ in range(number)]

    @ct.jit(device=device)
    def step(x: ct.Tensor) -> ct.Tensor:
        for state in states:
            state.assign(state.value + x)
        return x * 2.0

    return step, states


def calls_of(action: Callable[[], object]) -> int:
    """Python functions that an action calls in this thread."""
    called = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal called
        called += event == "call"

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.devices("cpu", "webgpu", "cuda")
def test_any_number_of_states_costs_the_same(device: ct.Device) -> None:
    counted = []
    for number in (1, 40):
        step, states = stepping(device, number)
        for _ in range(3):
            step(X)
        gc.collect()
        counted.append(calls_of(lambda step=step: step(X)))
        device.synchronize()
        for state in states:
            np.testing.assert_array_equal(state.value.numpy(), np.full(4, 4, np.float32))
    assert counted[1] <= counted[0] + 8  # launches of the CPU, parts of WebGPU: none a State


@pytest.mark.devices("cpu", "webgpu")
def test_versions_are_those_of_the_last_run(device: ct.Device) -> None:
    step, (state,) = stepping(device, 1)
    step(X)
    once = state.value
    np.testing.assert_array_equal(once.numpy(), X)
    step(X)
    with pytest.raises(ct.ContractError, match="stale version"):
        once.numpy()
    with pytest.raises(ct.ContractError, match="stale version"):
        ct.relu(once)
    assert state.value is not once
    np.testing.assert_array_equal(state.value.numpy(), 2 * X)


@pytest.mark.devices("cpu", "webgpu")
def test_two_replays_take_turns_and_one_goes(device: ct.Device) -> None:
    first, states = stepping(device, 2)
    state = states[0]

    @ct.jit(device=device)
    def double(x: ct.Tensor) -> None:
        state.assign(state.value * x)

    for _ in range(3):
        first(X)
        double(2 * X)
    np.testing.assert_array_equal(state.value.numpy(), np.full(4, 14, np.float32))
    double(2 * X)
    double.clear()
    gc.collect()
    np.testing.assert_array_equal(state.value.numpy(), np.full(4, 28, np.float32))
    state.assign(state.value + 1.0)  # an operation of its own, between replays
    first(X)
    np.testing.assert_array_equal(state.value.numpy(), np.full(4, 30, np.float32))


@pytest.mark.devices("cpu")
def test_a_version_is_stale_when_state_and_replay_are_gone(device: ct.Device) -> None:
    step, states = stepping(device, 1)
    before = states[0].value
    step(X)
    states.clear()
    del step
    gc.collect()
    with pytest.raises(ct.ContractError, match="stale version"):
        before.numpy()


@pytest.mark.devices("cpu")
def test_threads_that_look_at_once_see_one_version(device: ct.Device) -> None:
    step, (state,) = stepping(device, 1)
    for _ in range(50):
        step(X)
        start = threading.Barrier(4)
        seen: list[ct.Tensor] = []

        def look(start: threading.Barrier = start, seen: list[ct.Tensor] = seen) -> None:
            start.wait()
            seen.append(state.value)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for tensor in seen:
            assert tensor.numpy().shape == (4,)  # none is stale


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("op", "most"), [("add", 10), ("softmax", 9)])
def test_recording_an_op_calls_few_functions(device: ct.Device, op: str, most: int) -> None:
    x = ct.ones((4, 4), device=device)

    def record() -> ct.Tensor:
        return x + x if op == "add" else ct.softmax(x)

    with device.batch():
        kept = [record(), record()]
        assert calls_of(lambda: kept.append(record())) <= 2 + most


@pytest.mark.devices("cpu", "simulator")
def test_a_capture_keeps_buffers_and_no_values(device: ct.Device) -> None:
    factor = [ct.asarray(X, device=device) * 2.0]
    factor[0].numpy()
    fn = device.compile(lambda x: x * factor[0], X)
    value = weakref.ref(factor[0]._value)
    factor.clear()
    gc.collect()
    assert value() is None
    np.testing.assert_array_equal(fn(X).numpy(), 2 * X)
