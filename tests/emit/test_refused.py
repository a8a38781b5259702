"""A node that cannot be planned or compiled: it and what depends on it fails, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.plan import build as plan
from tests.support.devices import own
from tests.support.threads import elsewhere

X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2
HERE = "test_refused.py:"
Refuse = Callable[..., None]


@ct.kernel(workgroup=32)
def broken(z: ct.InOut[ct.f32, 2]) -> None:
    """Adds 1; the driver is made to refuse it."""
    i = lang.global_id()
    with lang.if_(i < z.shape(0) * z.shape(1)):
        z[i // z.shape(1), i % z.shape(1)] += 1.0


@pytest.fixture
def where(device: ct.Device) -> ct.Device:
    """A device with nothing compiled or planned."""
    return own(device)


@pytest.fixture
def refuse(where: ct.Device, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Have a device refuse kernels of a name; on the CPU, which compiles none, to plan them."""
    refused: list[str] = []

    def checked(raw: Callable[..., Any], name_of: Callable[[Any], str]) -> Callable[..., Any]:
        def call(what: Any, *rest: Any) -> Any:
            if name_of(what) in refused:
                raise ct.CompileError(name_of(what), "source", "bad line")
            return raw(what, *rest)

        return call

    if where.name == "cpu":
        lower = checked(plan._lower, lambda form: form.op.name.split(":")[-2:][0])
        monkeypatch.setattr(plan, "_lower", lower)
    else:
        compile_program = checked(where.backend.compile, lambda program: program.name)
        monkeypatch.setattr(where.backend, "compile", compile_program)

    def change(*names: str) -> None:
        refused[:] = names

    return change


def fails(use: Callable[[], Any], name: str = "exp") -> None:
    """It raises the compile error of a kernel, which names the line that recorded it."""
    label = rf"^\S*{name}\S* \(recorded at .*{HERE}\d+\): kernel"
    with pytest.raises(ct.CompileError, match=label):
        use()


def test_a_value_that_fails_raises_and_nothing_else_does(where: ct.Device, refuse: Refuse) -> None:
    x = ct.asarray(X, device=where)
    refuse("exp")
    before, bad = x * 2.0, ct.exp(x)
    dependent, other = bad + 1.0, before + 1.0
    np.testing.assert_array_equal(other.numpy(), 2 * X + 1)
    assert before.is_resident
    later = x + 3.0
    for _ in range(2):
        for use in (bad.numpy, dependent.numpy, lambda: bad * 2.0, lambda: ct.fetch(later, bad)):
            fails(use)
    np.testing.assert_array_equal(later.numpy(), X + 3)
    np.testing.assert_array_equal(before.numpy(), 2 * X)
    refuse()
    np.testing.assert_allclose(dependent.numpy(), np.exp(X) + 1, rtol=1e-6)
    np.testing.assert_allclose(bad.numpy(), np.exp(X), rtol=1e-6)


def test_a_retried_node_still_has_its_operands(where: ct.Device, refuse: Refuse) -> None:
    """Computed in the recording that it was taken out of, run or not, or set aside as well."""
    x = ct.asarray(X, device=where)
    refuse("exp", "tanh")
    half = ct.asarray(np.eye(4, dtype=np.float32) / 2, device=where)
    first, second = ct.exp(x @ half), ct.tanh(x)  # held, so that neither is fused
    both, other = ct.where(x > 0, first, second), x + 1.0
    fails(first.numpy)
    fails(both.numpy, "tanh")
    refuse("tanh")
    np.testing.assert_allclose(first.numpy(), np.exp(X / 2), rtol=1e-6)
    fails(both.numpy, "tanh")
    refuse()
    wanted = np.where(X > 0, np.exp(X / 2), np.tanh(X))
    np.testing.assert_allclose(both.numpy(), wanted, rtol=1e-6)
    np.testing.assert_array_equal(other.numpy(), X + 1)


def test_what_was_asked_for_raises_and_the_rest_waits(where: ct.Device, refuse: Refuse) -> None:
    x = ct.asarray(X, device=where)
    refuse("exp", "tanh")
    good, bad, worse = x * 2.0, ct.exp(x), ct.tanh(x)
    fails(bad.numpy)
    assert not good.is_resident
    fails(worse.numpy, "tanh")
    np.testing.assert_array_equal(good.numpy(), 2 * X)
    bad, worse, good = ct.exp(x), ct.tanh(x), x * 4.0
    np.testing.assert_array_equal(good.numpy(), 4 * X)
    fails(bad.numpy)
    fails(worse.numpy, "tanh")


def test_a_flush_for_nothing_in_particular_raises_once(where: ct.Device, refuse: Refuse) -> None:
    x = ct.asarray(X, device=where)
    refuse("exp")
    good, bad = x * 2.0, ct.exp(x)
    fails(where.synchronize)
    where.synchronize()
    assert good.is_resident
    fails(bad.numpy)


def test_a_state_stays_at_the_version_before(where: ct.Device, refuse: Refuse) -> None:
    state, x = ct.State(X, device=where), ct.asarray(X, device=where)
    state.numpy()
    refuse("broken")
    before, independent = state.value * 2.0, x + 1.0
    state.assign(state.value + 1.0)
    state.mark(lambda _: "good")
    between = state.value * 1.0
    broken(state, threads=12)
    state.mark(lambda _: "bad")
    lost = state.value * 3.0
    state.assign(state.value * 5.0)
    fails(state.numpy, "broken")
    assert state.note == "good"
    np.testing.assert_array_equal(state.numpy(), X + 1)
    fails(lost.numpy, "broken")
    np.testing.assert_array_equal(before.numpy(), 2 * X)
    np.testing.assert_array_equal(between.numpy(), X + 1)
    np.testing.assert_array_equal(independent.numpy(), X + 1)
    state.assign(state.value * 2.0)
    refuse()
    fails(lost.numpy, "broken")
    broken(state, threads=12)
    np.testing.assert_array_equal(state.numpy(), 2 * (X + 1) + 1)


def test_a_change_that_fails_is_told_once(where: ct.Device, refuse: Refuse) -> None:
    """Also to who asked for something else: nobody may ask for that version again."""
    state, x = ct.State(X, device=where), ct.asarray(X, device=where)
    refuse("broken")
    y = x + 1.0
    broken(state, threads=12)
    fails(y.numpy, "broken")
    np.testing.assert_array_equal(y.numpy(), X + 1)
    np.testing.assert_array_equal(state.numpy(), X)


def test_a_reader_that_fails_holds_up_no_change(where: ct.Device, refuse: Refuse) -> None:
    state = ct.State(X, device=where)
    state.numpy()
    refuse("exp")
    bad = elsewhere(lambda: ct.exp(state.value))
    state.assign(5.0)
    np.testing.assert_array_equal(state.numpy(), np.full_like(X, 5))
    refuse()
    fails(bad.numpy)  # for good: what it was to read is gone


def test_readers_of_a_version_that_is_back_still_come_first(
    where: ct.Device, refuse: Refuse
) -> None:
    state = ct.State(X, device=where)
    state.numpy()
    refuse("broken")
    before = state.value * 2.0
    broken(state, threads=12)
    elsewhere(lambda: fails(state.numpy, "broken"))
    elsewhere(lambda: state.assign(9.0))
    np.testing.assert_array_equal(before.numpy(), 2 * X)
    np.testing.assert_array_equal(state.numpy(), np.full_like(X, 9))


def test_a_cache_goes_on_with_its_step(where: ct.Device, refuse: Refuse) -> None:
    cache = ct.KVCache(1, 2, 4, 6, device=where)
    one, two = (ct.full((1, 2, 1, 4), n, device=where) for n in (1, 2))
    q = ct.zeros((1, 2, 1, 4), device=where)  # the mean of the past
    cache.append(one, one)
    np.testing.assert_allclose(cache.attend(q).numpy(), 1, rtol=1e-6)
    refuse("cache_write")
    where.cache.clear()
    cache.append(two, two)
    fails(cache.attend(q).numpy, "cache_write")
    with pytest.raises(ct.ContractError, match="no keys and values of this step"):
        cache.attend(q)
    refuse()
    cache.append(two, two)
    assert cache.lengths == (2,)
    np.testing.assert_allclose(cache.attend(q).numpy(), 1.5, rtol=1e-6)


@pytest.mark.devices("simulator", "webgpu", "cuda")
def test_a_forbidden_compile_leaves_the_recording_as_it_was(where: ct.Device) -> None:
    x = ct.asarray(X, device=where)
    (x + 1.0).numpy()
    pending: list[ct.Tensor] = []
    with pytest.raises(ct.TransferForbidden, match="tanh"), ct.forbid("compile"):
        pending += [ct.tanh(x), x + 2.0]
        pending[0].numpy()
    np.testing.assert_array_equal(pending[1].numpy(), X + 2)
    np.testing.assert_allclose(pending[0].numpy(), np.tanh(X), rtol=1e-6)


def test_what_failed_holds_no_memory(where: ct.Device, refuse: Refuse) -> None:
    x = ct.asarray(X, device=where)
    (x + 1.0).numpy()
    refuse("exp", "broken")
    gc.collect()
    gc.disable()
    try:
        where.pool.drain()
        live = where.memory.live
        large = ct.zeros((64, 64), device=where)
        state, bad = ct.State(large), ct.exp(large)
        broken(state, threads=12)
        for name in ("exp", "broken"):
            fails(bad.numpy if name == "exp" else state.numpy, name)
        del large, state, bad
        where.synchronize()
        where.pool.drain()
        assert where.memory.live == live
    finally:
        gc.enable()
