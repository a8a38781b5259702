"""State: memory that changes in place, one version after the other, on every device."""

from __future__ import annotations

import copy
import re
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.tensors import functional
from centella.tensors.tensor import apply
from tests.support.devices import own
from tests.support.threads import THREADS, elsewhere, together


def counted(device: ct.Device) -> ct.State:
    return ct.State(np.arange(12, dtype=np.float32).reshape(3, 4), device=device)


def test_a_reader_recorded_before_a_change_sees_the_version_before(device: ct.Device) -> None:
    state = counted(device)
    before = state.value * 2
    state.assign(7)
    after = state.value + 1
    assert np.array_equal(before.numpy(), np.arange(12).reshape(3, 4) * 2)
    assert np.array_equal(after.numpy(), np.full((3, 4), 8))
    assert np.array_equal(state.numpy(), np.full((3, 4), 7))


def test_a_stale_version_is_refused_with_the_lines(device: ct.Device) -> None:
    state = counted(device)
    old = state.value
    state.assign(1)
    for use in (old.numpy, lambda: old + 1, lambda: old.native, lambda: ct.fetch(old)):
        with pytest.raises(
            ct.ContractError,
            match=r"State \[3, 4\] f32: a stale version .*test_state.*: take \.value again$",
        ):
            use()
    assert np.array_equal(state.numpy(), np.ones((3, 4)))


def test_a_deep_copy_is_another_state(device: ct.Device) -> None:
    state = counted(device)
    state.assign(3)
    state.mark(lambda _: "noted")
    copied = copy.deepcopy(state)
    assert copy.copy(state) is state
    state.assign(4)
    assert np.array_equal(copied.numpy(), np.full((3, 4), 3))
    assert copied.note == "noted"
    copied.assign(5)
    assert np.array_equal(state.numpy(), np.full((3, 4), 4))


def test_a_replay_takes_notes_without_a_version(device: ct.Device) -> None:
    state = counted(device)
    state.mark(lambda _: 0)

    def step() -> ct.Tensor:
        state.assign(state.value + 1)
        state.mark(lambda n: n + 1)
        return state.value * 2.0

    captured = device.compile(step)
    assert state.note == 0
    version = state._cell._current
    assert np.array_equal(captured.fetch().result(), 2 * (np.arange(12).reshape(3, 4) + 1.0))
    captured.fetch().result()
    assert state.note == 2 and state._cell._current is version
    with pytest.raises(ZeroDivisionError), device.batch():
        state.assign(7)
        state.mark(lambda n: n // 0)
    with pytest.raises(RuntimeError), device.batch():
        state.assign(7)
        state.mark(lambda _: "lost")
        raise RuntimeError
    assert state.note == 2
    assert np.array_equal(state.numpy(), np.arange(12).reshape(3, 4) + 2)


def test_numpy_sees_the_content(device: ct.Device) -> None:
    state = counted(device)
    state.assign(state.value + 1)
    with ct.ledger() as led:
        array = np.asarray(state)
    led.expect(downloads=1)
    assert array.dtype == np.float32
    assert np.array_equal(array, np.arange(12).reshape(3, 4) + 1)
    assert np.asarray(state, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="NumPy gets a copy or nothing"):
        np.asarray(state, copy=False)


def test_one_buffer_for_all_versions(device: ct.Device) -> None:
    state = counted(device)
    _ = state.value.native
    with ct.ledger() as led:
        for i in range(5):
            state.assign(state.value + i)
        state.numpy()
    assert led.uploads == 0
    assert np.array_equal(state.numpy(), np.arange(12).reshape(3, 4) + 10)


def test_changes_inside_a_batch_are_one_submission(device: ct.Device) -> None:
    state = counted(device)
    _ = state.value.native
    with ct.ledger() as led:
        with device.batch():
            first = state.value + 0
            state.assign(state.value * 2)
            second = state.value + 0
            state.assign(state.value * 2)
        led.expect(submissions=1)
    base = np.arange(12).reshape(3, 4)
    assert np.array_equal(first.numpy(), base)
    assert np.array_equal(second.numpy(), base * 2)
    assert np.array_equal(state.numpy(), base * 4)


def test_a_change_is_never_dropped(device: ct.Device) -> None:
    state = counted(device)
    batch = device.batch()
    x = batch.upload(np.ones(3, np.float32))
    with batch._recording:
        state.assign(5)  # not among the outputs
        y = x + 1
    batch.execute(outputs=[y])
    assert np.array_equal(state.numpy(), np.full((3, 4), 5))


def test_a_failed_batch_takes_the_change_back(device: ct.Device) -> None:
    state = counted(device)
    with pytest.raises(ZeroDivisionError), device.batch():
        state.assign(9)
        state.assign(state.value + 1)
        _ = 1 / 0
    assert np.array_equal(state.numpy(), np.arange(12).reshape(3, 4))
    state.assign(2)
    assert np.array_equal(state.numpy(), np.full((3, 4), 2))


def test_a_batch_that_is_dropped_takes_the_change_back(device: ct.Device) -> None:
    state, other = counted(device), counted(device)
    base = np.arange(12).reshape(3, 4)
    state.mark(lambda _: "before")
    old = state.value

    def give_up() -> None:
        batch = device.batch()
        state.assign(batch.relu(batch.upload(np.ones((3, 4), np.float32))))
        state.assign(state.value + 1)
        state.mark(lambda _: "lost")
        with pytest.raises(ct.ContractError, match="is not computed yet"):
            state.numpy()

    uses: list[Callable[[], Any]] = [
        lambda: np.testing.assert_array_equal(state.numpy(), base),
        lambda: np.testing.assert_array_equal(elsewhere(state.numpy), base),
        lambda: np.testing.assert_array_equal(old.numpy(), base),
        lambda: np.testing.assert_array_equal((state.value + 1).numpy(), base + 1),
        lambda: np.testing.assert_array_equal(ct.fetch(state.value).result()[0], base),
        lambda: other.assign(state),
        lambda: np.testing.assert_equal(state.note, "before"),
        lambda: state.mark(lambda note: note),
    ]
    for use in uses:
        give_up()
        use()
        assert state.note == "before"
        assert np.array_equal(state.numpy(), base)
    assert np.array_equal(other.numpy(), base)
    give_up()
    state.assign(5)
    assert np.array_equal(state.numpy(), np.full((3, 4), 5))


def test_a_version_of_a_batch_that_is_dropped_has_failed(device: ct.Device) -> None:
    state = counted(device)
    batch = device.batch()
    with batch._recording:
        state.assign(5)
        made = ct.State(np.ones(3, np.float32))
    version = state.value
    del batch
    with pytest.raises(ct.ContractError, match=r"dropped before execute\(\)$"):
        version.numpy()
    with pytest.raises(ct.ContractError, match=r"dropped .*; State \[3\] f32 has no content"):
        made.numpy()
    made.assign(2)
    assert np.array_equal(made.numpy(), np.full(3, 2))
    assert np.array_equal(state.numpy(), np.arange(12).reshape(3, 4))


def test_a_reader_in_a_batch_that_is_dropped_holds_up_no_change(device: ct.Device) -> None:
    state = counted(device)
    step = device.compile(lambda: state.assign(state.value + 1))
    for change in (lambda: state.assign(1), step):
        batch = device.batch()
        y = batch.relu(state.value)
        with pytest.raises(ct.ContractError, match="a batch that has not been executed reads it"):
            change()
        del batch
        change()
        with pytest.raises(ct.ContractError, match="its batch was dropped"):
            y.numpy()
    assert np.array_equal(state.numpy(), np.full((3, 4), 2))


def test_a_replay_goes_on_from_before_a_batch_that_is_dropped(device: ct.Device) -> None:
    state = counted(device)
    state.mark(lambda _: 0)

    def count() -> ct.Tensor:
        state.assign(state.value + 1)
        state.mark(lambda n: n + 1)
        return state.value * 1.0

    step = device.compile(count)
    step()
    batch = device.batch()
    with batch._recording:
        count()
    with pytest.raises(ct.ContractError, match="a batch that has not been executed changes"):
        step()
    del batch
    assert np.array_equal(step().numpy(), np.arange(12).reshape(3, 4) + 2)
    assert state.note == 2


def test_a_capture_that_fails_takes_the_change_back(device: ct.Device) -> None:
    state, other = counted(device), own(device)

    def elsewhere() -> ct.Tensor:
        state.assign(1)
        return ct.zeros(3, device=other)

    def late() -> ct.Tensor:
        old = state.value
        state.assign(1)
        return old

    for fn, kind in ((elsewhere, ct.DeviceError), (late, ct.ContractError)):
        with pytest.raises(kind):
            device.compile(fn)
        assert np.array_equal(state.numpy(), np.arange(12).reshape(3, 4))
    state.assign(2)
    assert np.array_equal(state.numpy(), np.full((3, 4), 2))


def test_a_batch_that_has_yet_to_read_refuses_the_change(device: ct.Device) -> None:
    state = counted(device)
    batch = device.batch()
    y = batch.relu(state.value)
    with pytest.raises(ct.ContractError, match="a batch that has not been executed reads it"):
        state.assign(1)
    batch.execute()
    state.assign(1)
    assert np.array_equal(batch.read(y), np.arange(12).reshape(3, 4))


def test_a_change_that_waits_in_a_batch_is_not_read_outside(device: ct.Device) -> None:
    state = counted(device)
    batch = device.batch()
    with batch:
        state.assign(3)
        with pytest.raises(ct.ContractError, match=r"call execute\(\) on its batch first"):
            state.numpy()
    assert np.array_equal(state.numpy(), np.full((3, 4), 3))


def test_readers_on_another_thread_run_first(device: ct.Device) -> None:
    state = counted(device)
    tripled = elsewhere(lambda: state.value * 3)
    state.assign(0)
    assert np.array_equal(state.numpy(), np.zeros((3, 4)))
    assert np.array_equal(tripled.numpy(), np.arange(12).reshape(3, 4) * 3)


def test_threads_assign_and_mark_one_state(device: ct.Device) -> None:
    state, other = counted(device), counted(device)
    state.mark(lambda _: 0)

    def count(notes: int) -> int:
        time.sleep(1e-5)  # others come in between, if they can
        return notes + 1

    def change(thread: int) -> None:
        for turn in range(8):
            state.assign(float(thread))
            other.assign(turn)
            state.assign(other)
            state.mark(count)

    together(change)
    assert state.note == 8 * THREADS
    state.assign(5)
    assert np.array_equal(state.numpy(), np.full((3, 4), 5))


def test_results_share_no_memory_with_a_state(device: ct.Device) -> None:
    source = ct.asarray(np.ones((2, 4), np.float32), device=device)
    state = ct.State(source)
    kept = state.value.reshape(8).copy()
    moved = functional.scale(state.value, 1.0)
    ct.fetch(kept, moved).result()
    state.assign(5)
    ct.fetch(state.value).result()
    assert np.array_equal(source.numpy(), np.ones((2, 4)))
    assert np.array_equal(kept.numpy(), np.ones(8))
    assert np.array_equal(moved.numpy(), np.ones((2, 4)))


# -- what a failure leaves ------------------------------------------------------------------------


@ct.kernel(workgroup=32)
def picked(x: ct.In[ct.f32], at: ct.In[ct.u32], y: ct.Out[ct.f32]) -> None:
    """Reads where it is told to: a fault where that is out of bounds."""
    y[lang.global_id()] = x[at[lang.global_id()]]


NO_CONTENT = (
    r"^\w+ \(recorded at .*test_state\.py:\d+\) was never computed: .*"
    r"State \[3, 4\] f32 has no content until it is assigned$"
)


def pick(device: ct.Device, x: ct.Tensor, at: int) -> ct.Tensor:
    y = ct.empty(32, device=device)
    picked(x, ct.asarray(np.full(32, at, np.uint32), device=device), y, threads=32)
    return y


def uses(state: ct.State) -> list[Any]:
    """All that needs what a State holds."""
    other = ct.State.empty((3, 4), device=state.device)
    return [
        state.numpy, lambda: state.value + 1, lambda: state.value.native,
        lambda: other.assign(state), lambda: state.assign(state.value * 2),
        lambda: ct.fetch(state.value),
    ]  # fmt: skip


@pytest.mark.devices("simulator")
def test_a_fault_leaves_what_was_changed_without_content(device: ct.Device) -> None:
    state, other, x = counted(device), counted(device), ct.zeros(32, device=device)
    device.synchronize()
    before = state.value
    state.assign(5)  # the memory changes before the fault
    bad = pick(device, x, 1 << 20)
    with pytest.raises(ct.SimulationError):
        bad.numpy()
    with pytest.raises(ct.ContractError, match="a stale version"):
        before.numpy()
    for use in uses(state):
        with pytest.raises(ct.ContractError, match=NO_CONTENT):
            use()
    assert np.array_equal(other.numpy(), np.arange(12).reshape(3, 4))
    with pytest.raises(ZeroDivisionError), device.batch():
        state.assign(6)
        _ = 1 / 0
    with pytest.raises(ct.ContractError, match=NO_CONTENT):
        state.numpy()
    state.assign(np.arange(4, dtype=np.float32))
    state.assign(state.value + 1)
    assert np.array_equal(state.numpy(), np.tile(np.arange(1, 5), (3, 1)))


@pytest.mark.devices("simulator")
def test_a_fault_in_a_replay_leaves_what_it_changes_without_content(device: ct.Device) -> None:
    state, x = counted(device), ct.zeros(32, device=device)

    def step(at: ct.Tensor) -> ct.Tensor:
        state.assign(state.value + 1)
        y = ct.empty(32, device=device)
        picked(x, at, y, threads=32)
        return y

    def anew(at: ct.Tensor) -> ct.Tensor:
        state.assign(0)
        return step(at)

    fine, bad = np.zeros(32, np.uint32), np.full(32, 1 << 20, np.uint32)
    compiled = device.compile(step, fine)
    restarted = device.compile(anew, fine)
    last = compiled(fine)
    assert np.array_equal(state.numpy(), np.arange(12).reshape(3, 4) + 1)
    with pytest.raises(ct.SimulationError):
        compiled(bad)
    with pytest.raises(ct.ContractError, match="a result of step: a stale version"):
        last.numpy()
    for use in (*uses(state), lambda: compiled(fine)):
        with pytest.raises(ct.ContractError, match=NO_CONTENT):
            use()
    restarted(fine)
    assert np.array_equal(state.numpy(), np.ones((3, 4)))
    compiled(fine)
    assert np.array_equal(state.numpy(), np.full((3, 4), 2))


@pytest.mark.devices("cpu")
def test_a_formula_that_fails_leaves_no_content_on_the_cpu(device: ct.Device) -> None:
    state, x = ct.State(np.zeros(32, np.float32), device=device), ct.zeros(32, device=device)
    for _ in range(2):
        state.assign(pick(device, x, 1 << 20))
        for _ in range(2):
            with pytest.raises(ct.SimulationError):
                state.numpy()
            with pytest.raises(ct.SimulationError):
                (state.value + 1).numpy()
        state.assign(3)
        state.assign(state.value + 1)
        assert np.array_equal(state.numpy(), np.full(32, 4))


def test_a_state_of_a_batch_that_failed_is_assigned(device: ct.Device) -> None:
    states: list[ct.State] = []
    with pytest.raises(ZeroDivisionError), device.batch():
        states.append(counted(device))
        _ = 1 / 0
    for use in uses(states[0]):
        with pytest.raises(ct.ContractError, match=NO_CONTENT):
            use()
    states[0].assign(2)
    assert np.array_equal(states[0].numpy(), np.full((3, 4), 2))


DTYPES = ("f32", "f16", "bf16", "i32", "u32", "i8", "u8", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 17)])
def test_assign(device: ct.Device, dtype: str, shape: tuple[int, ...]) -> None:
    state = ct.State.empty(shape, dtype, device)
    state.assign(functional.full((), 1, dtype, device))
    assert np.array_equal(state.numpy(), np.ones(shape))
    values = (np.arange(state.value.size).reshape(shape) % 2).astype(np.float32)
    state.assign(ct.asarray(values, device=device).astype(dtype))
    assert np.array_equal(state.numpy().astype(np.float32), values)


def test_assign_broadcasts_and_takes_views(device: ct.Device) -> None:
    state = ct.State.empty((3, 4), device=device)
    row = np.arange(4, dtype=np.float32)
    state.assign(row)
    assert np.array_equal(state.numpy(), np.broadcast_to(row, (3, 4)))
    turned = np.arange(12, dtype=np.float32).reshape(4, 3)
    state.assign(ct.asarray(turned, device=device).T)
    assert np.array_equal(state.numpy(), turned.T)


def test_assign_narrows_nothing(device: ct.Device) -> None:
    state = ct.State(np.arange(3, dtype=np.int32), device=device)
    wide = ct.State(np.arange(3, dtype=np.float32), device=device)
    refused: list[tuple[ct.State, Any, str]] = [
        (state, 1.5, "whole numbers for a State of i32, got 1.5"),
        (state, [1, 2.5, 3], "expected whole numbers"),
        (state, np.arange(3), "assign: int64 has no storage type"),
        (state, np.ones(3, np.float32), "assign: expected i32, got f32"),
        (wide, np.array([1e300, 1, 2]), "assign: float64 has no storage type"),
        (wide, np.ones(3, np.float16), "assign: expected f32, got f16"),
    ]
    for target, data, text in refused:
        with pytest.raises(ct.DTypeError, match=re.escape(text)):
            target.assign(data)
    assert np.array_equal(state.numpy(), [0, 1, 2]) and np.array_equal(wide.numpy(), [0, 1, 2])
    state.assign([4, 5, 6])
    wide.assign(np.float64(0.5))
    assert np.array_equal(state.numpy(), [4, 5, 6]) and np.array_equal(wide.numpy(), [0.5] * 3)


def test_empty_state(device: ct.Device) -> None:
    state = ct.State.empty((0, 4), device=device)
    state.assign(1)
    assert state.numpy().shape == (0, 4)


def _mistakes(state: ct.State) -> dict[str, tuple[Any, type[Exception], str]]:
    return {
        "shape": (lambda: state.assign(np.ones(5, np.float32)), ct.ShapeError,
                  r"assign: expected a shape that broadcasts to \[3, 4\], got \[5\]"),
        "rank": (lambda: state.assign(np.ones((1, 3, 4), np.float32)), ct.ShapeError,
                 r"broadcasts to \[3, 4\], got \[1, 3, 4\]"),
        "dtype": (lambda: state.assign(state.value.astype("f16")), ct.DTypeError,
                  "assign: expected f32, got f16"),
        "truth": (lambda: bool(state), ct.DTypeError, "no truth value"),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["shape", "rank", "dtype", "truth"])
def test_mistakes_leave_the_state_as_it_was(device: ct.Device, name: str) -> None:
    state = counted(device)
    mistake, kind, text = _mistakes(state)[name]
    with pytest.raises(kind, match=text):
        mistake()
    assert np.array_equal(state.numpy(), np.arange(12).reshape(3, 4))


# -- how long its memory lives --------------------------------------------------------------------


def live(device: ct.Device) -> int:
    """Bytes in use, once everything has run."""
    device.synchronize()
    device.pool.drain()
    return device.memory.live


def fresh(device: ct.Device) -> tuple[ct.Device, ct.Tensor, int]:
    """A device of its own, a tensor on it, and the bytes in use."""
    where = own(device)
    one = ct.asarray(np.ones((32, 32), np.float32), device=where)
    (one + 1.0).numpy()
    return where, one, live(where)


@pytest.mark.usefixtures("uncollected")
def test_memory_is_free_when_the_last_handle_goes(device: ct.Device) -> None:
    where, one, before = fresh(device)
    state = ct.State(one)
    state.assign(state.value + one)
    assert state.numpy()[0, 0] == 2
    size = live(where) - before
    assert size >= one.nbytes
    state.assign(state.value + one)  # pending
    del state
    assert live(where) == before
    versions = [ct.State(one).value]
    assert versions[0].numpy().all()
    assert live(where) == before + size
    versions.clear()
    assert live(where) == before
    cache = ct.KVCache(2, 2, 8, 16, num_layers=2, device=where)
    cache.append(*(one.reshape(2, 2, 32, 8)[:, :, :4],) * 2)
    assert live(where) > before
    cache.append(*(one.reshape(2, 2, 32, 8)[:, :, :4],) * 2, layer=1)
    del cache
    assert live(where) == before


@pytest.mark.usefixtures("uncollected")
def test_what_is_recorded_of_a_dropped_state_still_runs(device: ct.Device) -> None:
    where, one, before = fresh(device)
    state = ct.State(one)
    first = state.value * 3
    state.assign(state.value + one)
    second, newest = state.value * 3, state.value
    old = ct.State(one)
    stale = old.value
    old.assign(5)
    del state, old
    assert first.numpy()[0, 0] == 3 and second.numpy()[0, 0] == 6
    assert newest.numpy()[0, 0] == 2
    with pytest.raises(ct.ContractError, match=r"a stale version .* take \.value again"):
        stale.numpy()
    batch = where.batch()
    with batch._recording:
        kept = ct.State(one)
        kept.assign(kept.value + one)
        y = kept.value * 2
    del kept
    batch.execute(outputs=[y])
    assert batch.read(y)[0, 0] == 4
    del first, second, newest, stale, batch, y
    assert live(where) == before


@pytest.mark.usefixtures("uncollected")
def test_a_replay_holds_the_states_that_it_uses(device: ct.Device) -> None:
    where, one, before = fresh(device)

    def counting() -> tuple[Any, weakref.ref[Any]]:
        state = ct.State(one)

        def step(x: ct.Tensor) -> ct.Tensor:
            inner = ct.State(x)
            inner.assign(inner.value * 2)
            state.assign(state.value + inner.value)
            return state.value + 0.0

        return where.compile(step, one), weakref.ref(state._cell)

    step, cell = counting()
    for turn in range(3):
        y = step(one)
        assert cell() is not None
        assert y.numpy()[0, 0] == 3 + 2 * turn
    kept = y
    assert live(where) > before
    del step
    assert cell() is None
    assert kept.numpy()[0, 0] == 7
    del kept, y
    assert live(where) == before


def test_a_change_of_a_state_that_is_gone_says_so(device: ct.Device) -> None:
    version = ct.State.empty((4,), device=device).value
    with pytest.raises(ct.ContractError, match="assign: operand 0's State is gone: keep it"):
        apply("assign", version, ct.zeros((4,), device=device))


@pytest.mark.devices("simulator")
def test_a_state_of_another_device_is_refused_without_its_lock(device: ct.Device) -> None:
    """Else two threads that assign each to the other's would wait for one another."""
    state, other = counted(device), counted(ct.device("cpu"))

    def assign() -> str:
        with pytest.raises(ct.DeviceError) as error:
            state.assign(other)
        return str(error.value)

    with other.device.lock:
        assert (
            elsewhere(assign) == "assign: operands on simulator and cpu; move one with .to(device)"
        )
