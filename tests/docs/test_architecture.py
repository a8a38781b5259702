"""docs/rooms/ownership.md: each sentence names the tests that hold it.

Those that no other file has stand here.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.plan import build as plan
from centella.runtime.device import Device
from tests.support.devices import own
from tests.support.sentences import assert_shown, sentences
from tests.support.threads import elsewhere

Array = np.ndarray[Any, Any]
PAGE = Path(__file__).parents[2] / "docs" / "rooms" / "ownership.md"
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2


def is_held(lock: Any) -> bool:
    """Whether this thread holds a lock: no other can take it."""

    def take() -> bool:
        if taken := lock.acquire(blocking=False):
            lock.release()
        return not taken

    return elsewhere(take)


# -- where an op is recorded ----------------------------------------------------------------------


def test_an_open_batch_is_of_its_device(device: ct.Device) -> None:
    other = ct.device("cpu") if device.name != "cpu" else ct.device("simulator")
    x, y = ct.asarray(X, device=device), ct.asarray(X, device=other)
    with device.batch() as batch:
        a, b = x + 1.0, y + 2.0
        assert batch.num_operations == 1
        np.testing.assert_array_equal(b.numpy(), X + 2)
        assert not a.is_resident
    np.testing.assert_array_equal(a.numpy(), X + 1)


def test_an_implicit_recording_is_of_its_device_and_thread(device: ct.Device) -> None:
    other = ct.device("cpu") if device.name != "cpu" else ct.device("simulator")
    mine = device.recorder.implicit()
    assert device.recorder.implicit() is mine
    assert other.recorder.implicit() is not mine
    assert elsewhere(device.recorder.implicit) is not mine
    a, b = ct.asarray(X, device=device) + 1.0, ct.asarray(X, device=other) + 1.0
    b.numpy()
    assert not a.is_resident
    assert mine.nodes


# -- when an implicit recording is flushed --------------------------------------------------------


@pytest.mark.parametrize(
    ("largest", "limit"), [(128 << 20, 64 << 20), (4 << 30, 256 << 20), (1 << 40, 1 << 30)]
)
def test_results_are_limited_by_the_largest_buffer(largest: int, limit: int) -> None:
    caps = replace(ct.device("simulator").caps, max_buffer=largest)
    backend: Any = SimpleNamespace(name="sized", caps=caps)
    assert Device(backend).recorder._temporary_limit == limit


def test_many_bytes_of_results_flush(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = ct.asarray(X, device=device)
    x.numpy()
    monkeypatch.setattr(device.recorder, "_temporary_limit", 4 * x.spec.storage_bytes)
    kept = [x + float(i) for i in range(5)]
    assert not any(t.is_resident for t in kept)
    after = x + 5.0
    assert all(t.is_resident for t in kept)
    assert not after.is_resident
    with device.batch():
        inside = [x + float(i) for i in range(6)]
        assert not any(t.is_resident for t in inside)


@pytest.mark.parametrize("error", [ct.OutOfMemoryError, ct.LimitError])
@pytest.mark.parametrize("call", ["submit", "allocate"])
def test_a_full_recording_that_fails_leaves_the_next_op_unrecorded(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch, call: str, error: type[Exception]
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise error("no")

    where = own(device)
    state = ct.State(np.zeros(3, np.float32), device=where)
    cache = ct.KVCache(1, 1, 1, 1024, device=where)
    one = ct.asarray(np.ones(3, np.float32), device=where)
    where.synchronize()
    for _ in range(64):
        state.assign(state.value + one)
        key = ct.zeros((1, 1, 1, 1), device=where)
        cache.append(key, key)
        cache.truncate(cache.length)
    steps: list[Callable[[], Any]] = [
        lambda: state.assign(one),
        lambda: cache.begin(2),
        lambda: cache.truncate(7),
        lambda: ct.asarray(X, device=where),
        lambda: one + 1.0,
    ]
    recorded = len(where.recorder.implicit().nodes)
    before, length = state.value._value, cache.length
    with monkeypatch.context() as patch:
        patch.setattr(where.recorder, "_temporary_limit", 0)
        patch.setattr(where.backend if call == "submit" else where.pool, call, refused)
        for step in steps:
            with pytest.raises(error, match="no"):
                step()
            assert state.value._value is before
            assert cache.length == length
            assert len(where.recorder.implicit().nodes) == recorded
    state.assign(state.value + one)
    assert np.array_equal(state.numpy(), np.full(3, 65))
    assert np.array_equal(cache.begin(2).numpy(), [64])
    assert cache.lengths == (66,)


def test_scopes_and_synchronize_flush_a_recording_and_no_batch(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    batch = device.batch()
    waits = batch.relu(x)
    before = x + 1.0
    with ct.forbid("compile"):
        assert before.is_resident
    with ct.forbid("transfer"):
        inside = before + 2.0
        assert not inside.is_resident
    assert inside.is_resident
    lazy = x + 3.0
    assert not lazy.is_resident
    device.synchronize()
    assert lazy.is_resident
    with ct.ledger() as led:
        led.expect(submissions=0)
    assert not waits.is_resident
    batch.execute()
    assert waits.is_resident


# -- what survives, who owns memory ---------------------------------------------------------------


def gone(watch: weakref.ref[Any]) -> bool:
    """Whether nothing refers to an object any more."""
    gc.collect()
    return watch() is None


def test_operands_are_held_until_the_recording_has_run(device: ct.Device) -> None:
    where = own(device)
    x = ct.asarray(X, device=where)
    x.numpy()
    batch = where.batch()
    y, z = batch.relu(x), x + 1.0
    watch = weakref.ref(x._value)
    del x
    z.numpy()
    assert not gone(watch)  # the batch has not run
    batch.execute()
    assert gone(watch)
    np.testing.assert_array_equal(y.numpy(), np.maximum(X, 0))


def test_a_view_refers_to_the_value_which_owns_the_buffer(device: ct.Device) -> None:
    where = own(device)
    x = ct.asarray(X, device=where)
    x.numpy()
    view = x.T[1:]
    assert view._value is x._value
    buffer = weakref.ref(x._value.require())
    del x
    assert not gone(buffer)
    np.testing.assert_array_equal(view.numpy(), X.T[1:])
    del view
    where.synchronize()
    assert gone(buffer)


def test_uploads_of_a_batch_share_a_buffer_that_each_keeps(device: ct.Device) -> None:
    where = own(device)
    batch = where.batch()
    x, y = batch.upload(X), batch.upload(X + 1)
    batch.execute()
    assert x._value.require() is y._value.require()
    buffer = weakref.ref(x._value.require())
    del x
    assert not gone(buffer)
    np.testing.assert_array_equal(y.numpy(), X + 1)
    del y, batch
    where.synchronize()
    assert gone(buffer)


def test_the_finalizer_only_appends_to_a_queue(device: ct.Device) -> None:
    where = own(device)
    kept = [ct.empty(1 << 12, device=where)]
    where.pool.drain()
    live = where.pool.live
    assert live

    def let_go() -> int:
        kept.clear()  # while another thread holds both locks
        return len(where.pool._returned)

    with where.lock, where.pool._lock:
        assert elsewhere(let_go) == 1
    assert where.pool.live == live
    again = ct.empty(1 << 12, device=where)
    assert where.pool.live == live
    assert not where.pool._returned
    del again


@pytest.mark.devices("simulator", "webgpu", "cuda")
def test_memory_is_reused_before_the_device_has_finished(device: ct.Device) -> None:
    """Nobody waits between the launches that write and the ones that write the same bytes again."""
    where, side = own(device), 32 if device.name == "simulator" else 256
    x = ct.asarray(np.ones((side, side), np.float32), device=where)
    x.numpy()
    results = []
    with ct.ledger() as led:
        for turn in range(12):
            with where.batch() as batch:
                t = (x @ x) * float(turn)
                y = ct.sum(t)
            results.append(y)
            del t, y, batch
        assert led.counts.syncs == 0
        assert led.counts.allocations <= 4 + len(results)
    for turn, y in enumerate(results):
        assert y.item() == side**3 * turn


@pytest.mark.devices("cpu")
def test_a_buffer_of_the_cpu_is_set_by_its_program(device: ct.Device) -> None:
    where = own(device)
    x = ct.asarray(X, device=where)
    gate = threading.Event()
    where.backend._worker.submit(gate.wait, 20)  # type: ignore[attr-defined]
    batch = where.batch()
    y = batch.relu(x)
    batch.execute()
    buffer = y._value.require()
    assert isinstance(buffer.memory, np.ndarray) and buffer.native is buffer.memory
    buffer.memory.fill(0xAA)
    assert (buffer.native == 0xAA).all()
    gate.set()
    where.synchronize()
    assert np.shares_memory(buffer.native, buffer.memory)
    np.testing.assert_array_equal(buffer.native.view(np.float32), np.maximum(X, 0).reshape(-1))
    batch = where.batch()
    batch.add(y, 1.0)
    shown = y.native[0]
    expected = shown.view(np.float32).copy()
    batch.execute()
    del y, batch, buffer
    later = [ct.relu(x) for _ in range(4)]
    where.synchronize()
    np.testing.assert_array_equal(shown.view(np.float32), expected)  # who has it keeps it
    del later


# -- failure and threads --------------------------------------------------------------------------


@ct.kernel(workgroup=32)
def beyond(x: ct.In[ct.f32], y: ct.Out[ct.f32]) -> None:
    y[ct.lang.global_id()] = x[ct.lang.global_id() + 1000]


def watched(where: ct.Device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a device does, in order, each under its lock."""
    steps: list[str] = []

    def watch(owner: Any, name: str, step: str) -> None:
        raw = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            assert is_held(where.lock), step
            steps.append(step)
            return raw(*args, **named)

        monkeypatch.setattr(owner, name, call)

    watch(where.recorder.implicit(), "add", "record")
    watch(plan, "build", "plan")
    watch(where.backend, "compile", "compile")
    watch(where.pool, "allocate", "allocate")
    watch(where.backend, "submit", "submit")
    return steps


def test_a_flush_plans_compiles_and_allocates_then_submits(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = own(device)
    x = ct.asarray(X, device=where)
    x.numpy()
    steps = watched(where, monkeypatch)
    y = ct.relu(x)
    assert steps == ["record"]
    np.testing.assert_array_equal(y.numpy(), np.maximum(X, 0))
    compiled = [] if where.name == "cpu" else ["compile"]
    assert steps == ["record", "plan", *compiled, "allocate", "submit"]


@pytest.mark.devices("simulator")
def test_a_fault_in_the_simulator_loses_the_recording_alone(device: ct.Device) -> None:
    where = own(device)
    x = ct.asarray(X.reshape(-1), device=where)
    other = ct.State(X, device=where)
    where.synchronize()
    out = ct.empty(12, device=where)
    beyond(x, out, threads=12)
    lost = out + 1.0
    with pytest.raises(ct.SimulationError):
        lost.numpy()
    with pytest.raises(ct.ContractError, match="never computed"):
        lost.numpy()
    assert not where.lost
    np.testing.assert_array_equal((x + 1.0).numpy(), X.reshape(-1) + 1)
    np.testing.assert_array_equal(other.numpy(), X)


class Late:
    """A submission under way, whose wait checks that the thread does not hold a lock."""

    def __init__(self, ticket: Any, lock: Any) -> None:
        self._ticket, self._lock = ticket, lock
        self.waits = 0

    def done(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> None:
        self.waits += 1
        assert not is_held(self._lock)
        self._ticket.wait(timeout)

    def data(self, index: int) -> Array:
        array: Array = self._ticket.data(index)
        return array


def test_nobody_waits_while_holding_the_lock(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = own(device)
    raw = where.backend.submit
    tickets: list[Late] = []

    def late(work: Any) -> Late:
        tickets.append(Late(raw(work), where.lock))
        return tickets[-1]

    monkeypatch.setattr(where.backend, "submit", late)
    y = ct.asarray(X, device=where) + 1.0
    np.testing.assert_array_equal(y.numpy(), X + 1)
    batch = where.batch()
    z = batch.relu(y)
    batch.execute().result()
    where.synchronize()
    _ = z.native
    assert [t.waits for t in tickets] == [1] * len(tickets)


def test_another_threads_recording_is_run_under_the_lock(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = own(device)
    x = ct.asarray(X, device=where)
    x.numpy()
    pending = elsewhere(lambda: x + 1.0)
    steps = watched(where, monkeypatch)
    y = pending * 2.0
    assert steps[-2:] == ["submit", "record"]
    assert pending.is_resident
    np.testing.assert_array_equal(y.numpy(), 2 * (X + 1))


def test_scopes_are_not_those_of_another_thread(device: ct.Device) -> None:
    def work() -> Array:
        return (ct.asarray(X, device=device) + 1.0).numpy()

    with ct.ledger() as led, device.batch() as batch, ct.forbid("transfer"):
        np.testing.assert_array_equal(elsewhere(work), X + 1)
        with pytest.raises(ct.TransferForbidden):
            work()
        assert batch.num_operations == 0
    led.expect(uploads=0, downloads=0, submissions=0)


# -- the page -------------------------------------------------------------------------------------

# The start of each sentence, and tests that hold it: tests/test_(file).(test).
SHOWN = {
    "A value never changes": "tensor.values_are_immutable user_kernel.an_out_argument_is_a_handle",
    "Imported memory is read in place": "tensor.import_of_an_array_is_no_copy",
    "A `State` is memory that changes": "state.one_buffer_for_all_versions inout.a_state_accumulates "
    "jit.a_failed_note_runs_nothing",
    "An op that changes a State": "state.changes_inside_a_batch_are_one_submission "
    "state.a_change_is_never_dropped",
    "Readers of the version before": "state.a_reader_recorded_before_a_change_sees_the_version_before "
    "state.readers_on_another_thread_run_first",
    "While a batch has yet": "state.a_batch_that_has_yet_to_read_refuses_the_change",
    "Using a version that is not": "state.a_stale_version_is_refused_with_the_lines",
    "A change that fails before": "state.a_failed_batch_takes_the_change_back "
    "refused.a_state_stays_at_the_version_before refused.a_reader_that_fails_holds_up_no_change "
    "refused.readers_of_a_version_that_is_back_still_come_first "
    "architecture.a_full_recording_that_fails_leaves_the_next_op_unrecorded",
    "When it fails after some of it": "state.a_fault_leaves_what_was_changed_without_content "
    "state.a_fault_in_a_replay_leaves_what_it_changes_without_content "
    "state.a_formula_that_fails_leaves_no_content_on_the_cpu "
    "state.a_state_of_a_batch_that_failed_is_assigned "
    "kv_cache.a_cache_is_reset_after_a_fault",
    # where
    "The op is recorded on the open batch": "batch.operands_in_two_open_batches "
    "batch.operators_record_on_the_innermost_batch batch.an_open_batch_belongs_to_its_thread "
    "architecture.an_open_batch_is_of_its_device "
    "architecture.an_implicit_recording_is_of_its_device_and_thread",
    "An operand that is pending in another": "architecture.another_threads_recording_is_run_under_the_lock "
    "batch.a_tensor_of_another_thread_flushes_its_recording_whole "
    "batch.a_lazy_operand_is_run_before_the_batch",
    # when
    "It is flushed when a value is needed": "batch.a_tensor_of_another_thread_flushes_its_recording_whole "
    "ledger.entering_and_leaving_flush_what_is_recorded "
    "architecture.scopes_and_synchronize_flush_a_recording_and_no_batch",
    "It is full with 256 nodes": "batch.the_implicit_recording_is_flushed_when_it_is_long "
    "batch.many_small_uploads_do_not_pile_up "
    "architecture.results_are_limited_by_the_largest_buffer architecture.many_bytes_of_results_flush",
    "A full recording runs before": "architecture.a_full_recording_that_fails_leaves_the_next_op_unrecorded "
    "architecture.many_bytes_of_results_flush",
    "A batch is never flushed": "batch.a_batch_is_never_flushed_by_itself batch.read_before_execute "
    "batch.operators_record_on_the_innermost_batch "
    "architecture.scopes_and_synchronize_flush_a_recording_and_no_batch",
    # what survives
    "A recording refers": "batch.a_tensor_nobody_holds_is_not_computed",
    "A result that some tensor refers to": "contracts.every_intermediate_reads_right "
    "batch.outputs_discard_the_rest batch.keep_serves_one_execution",
    "Every other result is a temporary": "batch.temporaries_are_reused_and_never_read_and_written_at_once",
    "Operands from outside are kept alive": "architecture.operands_are_held_until_the_recording_has_run "
    "batch.freed_memory_is_not_written_while_recorded_work_reads_it",
    # memory
    "A value owns": "architecture.a_view_refers_to_the_value_which_owns_the_buffer",
    "A State, or a replay that uses it": "state.memory_is_free_when_the_last_handle_goes "
    "state.what_is_recorded_of_a_dropped_state_still_runs "
    "state.a_replay_holds_the_states_that_it_uses",
    "The uploads of a batch are packed": "architecture.uploads_of_a_batch_share_a_buffer_that_each_keeps "
    "batch.a_batch_of_several_uploads_is_one_upload batch.uploads_above_an_arena_are_several_writes",
    "When the last reference to a buffer": "architecture.the_finalizer_only_appends_to_a_queue "
    "device.a_pool_serves_many_threads",
    "Memory is reused at once": "architecture.memory_is_reused_before_the_device_has_finished "
    "device.a_pool_reuses_by_class",
    "The pool keeps freed memory": "device.a_pool_reuses_by_class batch.memory_comes_back",
    "On the CPU memory is": "architecture.a_buffer_of_the_cpu_is_set_by_its_program",
    # failure
    "A flush plans": "architecture.a_flush_plans_compiles_and_allocates_then_submits",
    "What cannot be planned or compiled": "refused.a_value_that_fails_raises_and_nothing_else_does "
    "refused.what_was_asked_for_raises_and_the_rest_waits "
    "refused.a_retried_node_still_has_its_operands refused.what_failed_holds_no_memory",
    "Of these, an op that reads or changes": "refused.a_reader_that_fails_holds_up_no_change "
    "refused.a_state_stays_at_the_version_before",
    "The reader of another value sees": "refused.a_change_that_fails_is_told_once "
    "refused.a_flush_for_nothing_in_particular_raises_once",
    "Other failures before submission": "refused.a_forbidden_compile_leaves_the_recording_as_it_was "
    "batch.a_kernel_that_does_not_compile batch.no_room "
    "batch.a_submission_that_is_refused_for_memory_can_be_tried_again",
    "Any other failure while the driver": "batch.a_failed_submission_loses_the_device "
    "architecture.a_fault_in_the_simulator_loses_the_recording_alone",
    "A failure that appears during a wait": "batch.a_device_lost_while_running "
    "batch.a_formula_that_raises_on_the_cpu",
    "An exception inside `with batch`": "batch.an_exception_inside_submits_nothing",
    "So do those of a batch that is dropped": "batch.what_a_dropped_batch_has_not_executed_has_failed "
    "state.a_batch_that_is_dropped_takes_the_change_back "
    "state.a_reader_in_a_batch_that_is_dropped_holds_up_no_change",
    # other libraries
    "DLPack exports": "interop.values_are_shared_only_with_whom_can_be_told "
    "cuda.exports_that_are_copied cuda.export_by_dlpack",
    "Exported memory is reused": "cuda.lent_memory_is_reused_after_its_reader "
    "cuda.a_reader_on_the_current_stream_costs_no_wait",
    "Imported memory waits": "cuda.the_producers_stream_is_waited_for cuda.import_by_dlpack",
    "On CUDA all work of a device": "cuda.work_goes_to_the_stream_and_waits_for_what_came_before "
    "cuda.threads_have_their_own_stream_in_one_order",
    "A capsule is created by NumPy": "interop.the_owner_of_a_capsule_may_go_on_any_thread_and_in_an_exception",
    "A context of the application": "cuda.a_context_of_the_application "
    "interop.closing_a_device_leaves_the_native_one_and_its_buffers",
    # threads
    "One lock a device": "architecture.a_flush_plans_compiles_and_allocates_then_submits "
    "architecture.nobody_waits_while_holding_the_lock",
    "Each thread has its own implicit": "architecture.an_implicit_recording_is_of_its_device_and_thread "
    "architecture.another_threads_recording_is_run_under_the_lock",
    "So a pending tensor can be passed": "device.a_value_outlives_the_thread_that_recorded_it "
    "batch.one_thread_records_while_another_flushes",
    "A thread that needs a program": "contracts.each_program_is_compiled_once_whatever_the_threads "
    "contracts.a_cache_compiles_once_for_threads_that_ask_together",
    "Ledger, current batch, current stream": "architecture.scopes_are_not_those_of_another_thread "
    "cuda.scopes_of_tasks_do_not_mix cuda.what_other_threads_submitted_comes_before "
    "ledger.scopes_follow_tasks_and_to_thread ledger.batches_of_tasks_do_not_mix",
}


def test_every_sentence_has_a_test() -> None:
    section = PAGE.read_text("utf-8").partition("## Rules\n")[2]
    said = sentences(section.partition("\n## ")[0])
    assert len(said) > 25
    assert_shown(said, SHOWN)
