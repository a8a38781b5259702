"""Batches and recordings: what survives, what is run, what a failure leaves behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import force_setattr

import centella as ct
from centella.backends.base import Submission
from centella.ledger.call_sites import line_of
from centella.op.op import get
from centella.record.recording import Recording, innermost
from centella.runtime import plans, recorder
from centella.tensors.batch import CommandBatch
from tests.support.devices import own
from tests.support.threads import elsewhere

Array = np.ndarray[Any, Any]
HERE = Path(__file__).name
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2
RELU = np.maximum(X, 0)


def refuse(error: Exception) -> Callable[..., Any]:
    """A function that raises, whatever it is called with."""

    def raises(*args: Any, **named: Any) -> Any:
        raise error

    return raises


# -- the floor's words ----------------------------------------------------------------------------


def test_the_words_of_the_floor(device: ct.Device) -> None:
    batch = device.batch()
    x, y = batch.upload(X), batch.upload(X[::-1])
    w = batch.upload(X.T)
    results = {
        "relu": batch.relu(x),
        "scale": batch.scale(x, 2.5),
        "add": batch.add(x, y),
        "sub": batch.sub(x, 1.0),
        "mul": batch.mul(x, y),
        "sigmoid": batch.sigmoid(x),
        "tanh": batch.tanh(x),
        "swish": batch.swish(x),
        "gelu": batch.gelu(x, "tanh"),
        "matmul": batch.matmul(x, w),
        "dot": batch.dot(x.reshape(-1), y.reshape(-1)),
    }
    assert (batch.num_operations, batch.num_buffers) == (len(results), 3 + len(results))
    batch.execute().result()
    sigmoid = 1 / (1 + np.exp(-X))
    inner = np.sqrt(2 / np.pi) * (X + 0.044715 * X**3)
    expected = {
        "relu": RELU,
        "scale": X * 2.5,
        "add": X + X[::-1],
        "sub": X - 1,
        "mul": X * X[::-1],
        "sigmoid": sigmoid,
        "tanh": np.tanh(X),
        "swish": X * sigmoid,
        "gelu": X * 0.5 * (1 + np.tanh(inner)),
        "matmul": X @ X.T,
        "dot": (X * X[::-1]).sum(),
    }
    assert set(expected) == set(results)
    for name, want in expected.items():
        np.testing.assert_allclose(batch.read(results[name]), want, rtol=1e-5, atol=1e-5)


def test_counts_are_of_operations_not_launches(device: ct.Device) -> None:
    batch = device.batch()
    assert (batch.num_operations, batch.num_buffers) == (0, 0)
    x = batch.upload(X)
    assert (batch.num_operations, batch.num_buffers) == (0, 1)
    y = batch.relu(x)
    assert (batch.num_operations, batch.num_buffers) == (1, 2)
    batch.execute()
    assert (batch.num_operations, batch.num_buffers) == (1, 2)
    batch.tanh(y)
    assert (batch.num_operations, batch.num_buffers) == (2, 3)


def test_a_batch_opens_its_device_by_name() -> None:
    assert CommandBatch("cpu").device is ct.device("cpu")
    assert CommandBatch("cpu").native is None
    assert repr(CommandBatch("cpu")) == "<CommandBatch on cpu, 0 operations to execute>"


# -- what survives --------------------------------------------------------------------------------


def test_outputs_discard_the_rest(device: ct.Device) -> None:
    batch = device.batch()
    x = batch.upload(X)
    hidden = batch.relu(x)
    kept = batch.keep(batch.add(hidden, 1.0))
    y = batch.add(kept, 1.0)
    batch.execute(outputs=[y])
    np.testing.assert_array_equal(y.numpy(), RELU + 2)
    np.testing.assert_array_equal(kept.numpy(), RELU + 1)
    np.testing.assert_array_equal(x.numpy(), X)
    with pytest.raises(ct.DiscardedError, match=rf"relu \(recorded at .*{HERE}:\d+\) was not kept"):
        hidden.numpy()
    with pytest.raises(ct.DiscardedError, match="was not kept"):
        batch.relu(hidden)
    with pytest.raises(ct.DiscardedError, match="was not kept"):
        batch.keep(hidden)
    assert batch.num_operations == 3


def test_keep_serves_one_execution(device: ct.Device) -> None:
    batch = device.batch()
    first = batch.keep(batch.relu(batch.upload(X)))
    batch.execute(outputs=[])
    np.testing.assert_array_equal(first.numpy(), RELU)
    second = batch.add(first, 1.0)
    batch.execute(outputs=())
    with pytest.raises(ct.DiscardedError):
        second.numpy()


def test_outputs_of_others_are_refused(device: ct.Device) -> None:
    """Else the batch's own results would be discarded for a tensor that needs no keeping."""
    foreign = ct.asarray(X, device=device) * 2.0
    foreign.numpy()
    lazy = ct.asarray(X, device=device) + 1.0
    batch = device.batch()
    y = batch.relu(foreign)
    before = batch.keep(batch.add(y, 1.0))
    for wrong in ([foreign], [y, foreign], [lazy], foreign.T[1:]):
        with pytest.raises(
            ct.ContractError, match=rf"^outputs: .* got \w+ \(recorded at .*{HERE}:"
        ):
            batch.execute(outputs=wrong)
        with pytest.raises(ct.ContractError, match=r"^outputs: "):
            batch.explain(outputs=wrong)
    assert not y.is_resident
    batch.execute(outputs=[y])
    np.testing.assert_array_equal(y.numpy(), 2 * RELU)
    np.testing.assert_array_equal(before.numpy(), 2 * RELU + 1)
    z = batch.add(y, 1.0)
    with pytest.raises(ct.ContractError, match=r"^outputs: .* is ready and stays readable unnamed"):
        batch.execute(outputs=[y])
    batch.execute(outputs=[z])
    with pytest.raises(ct.DiscardedError):
        discarded = batch.add(z, 1.0)
        batch.execute(outputs=[batch.add(z, 2.0)])
        batch.execute(outputs=[discarded])


def test_outputs_may_be_one_tensor_or_views(device: ct.Device) -> None:
    batch = device.batch()
    y = batch.relu(batch.upload(X))
    batch.execute(outputs=y)
    np.testing.assert_array_equal(y.numpy(), RELU)
    z = batch.add(y, 1.0)
    batch.execute(outputs=[z.T[1:]])
    np.testing.assert_array_equal(z.numpy(), RELU + 1)
    with pytest.raises(ct.DTypeError, match="outputs: expected a Tensor, got ndarray"):
        batch.execute(outputs=[X])


def test_a_tensor_nobody_holds_is_not_computed(device: ct.Device) -> None:
    batch = device.batch()
    x = batch.upload(X)
    batch.tanh(x)
    y = batch.relu(x)
    assert "2 nodes (1 dropped, 0 fused, 0 stored), 1 launches" in batch.explain()
    batch.execute()
    np.testing.assert_array_equal(y.numpy(), RELU)


def test_calling_execute_twice_does_not_redo_the_past(device: ct.Device) -> None:
    batch = device.batch()
    y = batch.relu(batch.upload(X))
    with ct.ledger() as led:
        batch.execute()
        batch.execute()
    led.expect(submissions=1, launches=1, uploads=1)
    with ct.ledger() as led:
        z = batch.add(y, 1.0)
        batch.execute()
    led.expect(submissions=1, launches=1, uploads=0)
    np.testing.assert_array_equal(z.numpy(), RELU + 1)


def test_an_empty_batch_submits_nothing(device: ct.Device) -> None:
    with ct.ledger() as led:
        pending = device.batch().execute()
        assert pending.done()
        assert pending.result() is None
        with device.batch():
            pass
    led.expect(submissions=0, launches=0, plans=0)


# -- order of things ------------------------------------------------------------------------------


def test_read_before_execute(device: ct.Device) -> None:
    batch = device.batch()
    x = batch.upload(X)
    y = batch.relu(x)
    for tensor, name in ((x, "upload"), (y, "relu")):
        with pytest.raises(ct.ContractError, match=rf"{name} \(recorded at .*{HERE}:\d+\) is not"):
            batch.read(tensor)
        with pytest.raises(ct.ContractError, match=r"call execute\(\) on its batch first"):
            tensor.numpy()
    batch.execute()
    np.testing.assert_array_equal(batch.read(y), RELU)


def test_an_exception_inside_submits_nothing(device: ct.Device) -> None:
    before = ct.asarray(X, device=device) + 1.0
    batch = device.batch()
    with ct.ledger() as led, pytest.raises(ZeroDivisionError), batch:
        lost = ct.relu(before)
        sent = ct.asarray(X, device=device)
        raise ZeroDivisionError
    led.expect(submissions=0, launches=0, uploads=0)
    for tensor in (lost, sent):
        with pytest.raises(ct.ContractError, match="its batch ended with ZeroDivisionError"):
            tensor.numpy()
        with pytest.raises(ct.ContractError, match="was never computed"):
            ct.relu(tensor)
    np.testing.assert_array_equal(before.numpy(), X + 1)
    with batch:
        again = ct.relu(before)
    np.testing.assert_array_equal(again.numpy(), np.maximum(X + 1, 0))


def test_what_a_dropped_batch_has_not_executed_has_failed(device: ct.Device) -> None:
    """Also of an exception between recording and `execute`, once it has been handled."""

    def give_up() -> tuple[ct.Tensor, ct.Tensor]:
        batch = device.batch()
        x = batch.upload(X)
        results.append((x, batch.relu(x)))
        raise RuntimeError

    results: list[tuple[ct.Tensor, ct.Tensor]] = []
    other, state = device.batch(), ct.State(X, device=device)
    uses: list[Callable[[ct.Tensor], Any]] = [
        lambda y: y.numpy(), lambda y: y + 1, lambda y: y.native, lambda y: ct.fetch(y, y),
        other.relu, other.keep, other.read, lambda y: other.execute(outputs=[y]), state.assign,
        lambda y: y[:, ::2].copy(), lambda y: elsewhere(y.numpy),
    ]  # fmt: skip
    for use in uses:
        with contextlib.suppress(RuntimeError):
            give_up()
        for tensor in results.pop():
            with pytest.raises(
                ct.ContractError, match=r"its batch was dropped before execute\(\)$"
            ):
                use(tensor)
    assert np.array_equal(state.numpy(), X)
    batch = device.batch()
    y, execute = batch.relu(batch.upload(X)), batch.execute
    del batch
    execute()
    assert np.array_equal(y.numpy(), RELU)


def test_what_was_executed_inside_survives_the_exception(device: ct.Device) -> None:
    with pytest.raises(KeyError), device.batch() as batch:
        x = batch.upload(X)
        y = ct.relu(x)
        batch.execute()
        raise KeyError
    np.testing.assert_array_equal(y.numpy(), RELU)


def test_operators_record_on_the_innermost_batch(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    with device.batch() as outer:
        a = x + 1.0
        with device.batch() as inner:
            b = x + 2.0
            c = a + 3.0  # waits for the outer batch, so it is recorded there
        assert (outer.num_operations, inner.num_operations) == (2, 1)
        np.testing.assert_array_equal(b.numpy(), X + 2)
        with pytest.raises(ct.ContractError):
            c.numpy()
    np.testing.assert_array_equal(c.numpy(), X + 4)


def test_operands_in_two_open_batches(device: ct.Device) -> None:
    first, second = device.batch(), device.batch()
    a, b = first.relu(first.upload(X)), second.relu(second.upload(X))
    with pytest.raises(ct.ContractError, match="add: operands wait for two open batches"):
        a + b
    with pytest.raises(ct.ContractError, match="belongs to another batch"):
        first.add(a, b)
    second.execute()
    c = first.add(a, b)
    first.execute()
    np.testing.assert_array_equal(c.numpy(), 2 * RELU)


def test_a_lazy_operand_is_run_before_the_batch(device: ct.Device) -> None:
    with ct.ledger() as led:
        lazy = ct.asarray(X, device=device) * 2.0
        with device.batch() as batch:
            y = lazy + 1.0
            assert (lazy.is_resident, batch.num_operations) == (True, 1)
        np.testing.assert_array_equal(y.numpy(), 2 * X + 1)
    led.expect(submissions=2, uploads=1, downloads=1)  # of the operand, and of the batch


def test_two_devices(device: ct.Device) -> None:
    other = ct.device("cpu") if device.name != "cpu" else ct.device("simulator")
    x, y = ct.asarray(X, device=device), ct.asarray(X, device=other)
    with pytest.raises(ct.DeviceError) as raised:
        x + y
    assert str(raised.value) == (
        f"add: operands on {device.name} and {other.name}; move one with .to(device)"
    )
    with pytest.raises(ct.DeviceError) as raised:
        device.batch().relu(y)
    assert str(raised.value) == (f"relu: the batch is on {device.name}, the tensor on {other.name}")
    np.testing.assert_array_equal((x + y.to(device)).numpy(), 2 * X)


def test_views_of_values_of_a_batch(device: ct.Device) -> None:
    batch = device.batch()
    x = batch.upload(X)
    y = batch.relu(x)
    z = batch.add(y.T, y.T)[1:3]
    batch.execute(outputs=[z])
    np.testing.assert_array_equal(z.numpy(), (2 * RELU.T)[1:3])


def test_the_snapshot_is_taken_at_upload(device: ct.Device) -> None:
    for large in (False, True):
        data = np.arange(1 << 15 if large else 8, dtype=np.float32)
        want = data.copy()
        batch = device.batch()
        x, lazy = batch.upload(data), ct.asarray(data, device=device)
        data[:] = -1
        batch.execute()
        np.testing.assert_array_equal(x.numpy(), want)
        np.testing.assert_array_equal(lazy.numpy(), want)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "i32", "u32", "i8", "u8", "bool"])
def test_upload_of_every_dtype_and_layout(device: ct.Device, kind: str) -> None:
    batch = device.batch()
    values = np.arange(60).reshape(3, 4, 5) % 2
    pieces = {
        "dense": values,
        "strided": values[::2, :, ::-2],
        "broadcast": np.broadcast_to(values[:1], (2, 4, 5)),
        "rank 0": values[0, 0, 1],
        "empty": values[:0],
    }
    sent = {n: batch.upload(v.astype(np.float32), dtype=kind) for n, v in pieces.items()}
    batch.execute()
    for name, piece in pieces.items():
        got = batch.read(sent[name])
        assert got.shape == piece.shape
        np.testing.assert_array_equal(got.astype(np.int64), piece)


def test_upload_refuses(device: ct.Device) -> None:
    batch = device.batch()
    with pytest.raises(ct.DTypeError, match=r"upload: float64 has no storage type.*dtype="):
        batch.upload(np.zeros(3))
    with pytest.raises(ct.DTypeError, match="upload: expected host data, got a Tensor"):
        batch.upload(batch.upload(X))
    assert batch.num_buffers == 1


@pytest.mark.devices("cpu", "webgpu-minimum")
def test_uploads_above_an_arena_are_several_writes(device: ct.Device) -> None:
    sizes = (100, 40 << 18, 100, 40 << 18, 80 << 18)  # 40, 40 and 80 MB among small ones
    with ct.ledger() as led:
        batch = device.batch()
        sent = [batch.upload(np.full(n, i, np.float32)) for i, n in enumerate(sizes)]
        ends = [batch.add(t[-3:], 1.0) for t in sent]
        led.expect(uploads=0)  # an exception now would send nothing
        batch.execute(outputs=ends)
    led.expect(uploads=3, submissions=1)
    for index, end in enumerate(ends):
        np.testing.assert_array_equal(end.numpy(), [index + 1] * 3)
    del sent, ends
    gc.collect()
    device.pool.trim()


def test_a_batch_of_several_uploads_is_one_upload(device: ct.Device) -> None:
    rng = np.random.default_rng(0)
    sizes = (3, 1000, 70_000, 1)
    arrays = [rng.standard_normal(n, np.float32) for n in sizes]
    with ct.ledger() as led:
        batch = device.batch()
        sent = [batch.upload(a) for a in arrays]
        total = [batch.add(t, 1.0) for t in sent]
        batch.execute()
    led.expect(uploads=1, submissions=1)
    for array, tensor in zip(arrays, total, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array + 1)


# -- failures before submission -------------------------------------------------------------------


@pytest.mark.devices("simulator", "webgpu")
@pytest.mark.parametrize("lazily", [False, True])
def test_a_kernel_that_does_not_compile(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch, lazily: bool
) -> None:
    device.cache.clear()
    batch = device.batch()
    x = ct.asarray(X, device=device) if lazily else batch.upload(X)
    y = ct.exp(x) if lazily else batch.relu(x)
    run: Callable[[], Any] = y.numpy if lazily else batch.execute
    name = "exp" if lazily else "relu"
    with monkeypatch.context() as patch:
        patch.setattr(device.backend, "compile", refuse(ct.CompileError(name, "a\nb", "bad line")))
        for _ in range(2):
            with pytest.raises(ct.CompileError) as raised:
                run()
            assert f"{name} (recorded at" in str(raised.value)
            assert HERE in str(raised.value)
            assert "bad line" in str(raised.value)
            assert "2 | b" in str(raised.value)
    assert len(device.cache) == 0
    run()
    np.testing.assert_allclose(y.numpy(), np.exp(X) if lazily else RELU, rtol=1e-5)


@pytest.mark.devices("simulator", "webgpu")
def test_what_did_not_compile_is_gone_with_its_tensor(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else refers to it: the next value needs no garbage collection first."""
    device.cache.clear()
    x = ct.asarray(X, device=device)
    ct.relu(x).numpy()  # compiled from here on

    def fails(*_: Any) -> None:
        raise ct.CompileError("exp", "a", "bad")

    monkeypatch.setattr(device.backend, "compile", fails)
    gc.disable()
    try:
        try:
            ct.exp(x).numpy()
        except ct.CompileError as error:
            assert error.log == "bad"
        np.testing.assert_array_equal(ct.relu(x).numpy(), RELU)
    finally:
        gc.enable()


@pytest.mark.devices("simulator", "webgpu")
def test_no_room(device: ct.Device) -> None:
    small = own(device, memory_limit=1 << 20)
    batch = small.batch()
    x = batch.upload(np.ones(1 << 16, np.float32))
    y = batch.relu(x)
    big = [batch.add(y, float(i)) for i in range(4)]
    with pytest.raises(ct.OutOfMemoryError, match=rf"add \(recorded at .*{HERE}.*budget of 1,048"):
        batch.execute()
    with pytest.raises(MemoryError):
        batch.execute()
    assert batch.num_operations == 5
    with pytest.raises(ct.ContractError, match="not computed yet"):
        y.numpy()
    del big[1:]
    gc.collect()
    full = small.batch()
    full.upload(np.ones(1 << 20, np.float32))
    with pytest.raises(
        ct.OutOfMemoryError, match=rf"upload \(recorded at .*{HERE}:\d+\): 4,194,304"
    ):
        full.execute()
    batch.execute()
    np.testing.assert_array_equal(y.numpy(), np.ones(1 << 16, np.float32))
    assert small.memory.budget == 1 << 20
    assert 0 < small.memory.live <= small.memory.held <= 1 << 20


@pytest.mark.devices("webgpu-minimum")
def test_larger_than_the_device_allows(device: ct.Device) -> None:
    x, y = ct.zeros((1 << 13, 1), device=device), ct.zeros((1, (1 << 13) + 4), device=device)
    with pytest.raises(ct.LimitError, match=r"add: a result of .* bytes; webgpu.* allows"):
        x + y
    with pytest.raises(ct.LimitError, match=r"a buffer of .* bytes; this device allows"):
        ct.empty((1 << 15, 1 << 15), device=device)
    np.testing.assert_array_equal((x + 1.0).numpy(), np.ones((1 << 13, 1)))


@pytest.mark.devices("simulator", "webgpu")
def test_a_submission_that_is_refused_for_memory_can_be_tried_again(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = device.batch()
    y = batch.relu(batch.upload(X))
    with monkeypatch.context() as patch:
        patch.setattr(device.backend, "submit", refuse(ct.OutOfMemoryError("no staging")))
        with pytest.raises(ct.OutOfMemoryError):
            batch.execute()
    assert not device.lost
    batch.execute()
    np.testing.assert_array_equal(y.numpy(), RELU)


# -- failures after submission --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "simulator", "webgpu"])
def test_a_failed_submission_loses_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        device = ct.device(name, pool="reuse")
    except ct.DeviceError as error:
        pytest.skip(str(error))
    earlier = ct.asarray(X, device=device) + 1.0
    earlier.numpy()
    batch = device.batch()
    y = batch.relu(batch.upload(X))
    monkeypatch.setattr(device.backend, "submit", refuse(ct.DeviceError("fell off the bus")))
    with pytest.raises(ct.DeviceLostError, match=f"{name}.* was lost: fell off the bus; open it"):
        batch.execute()
    monkeypatch.undo()
    assert device.lost
    with pytest.raises(ct.ContractError, match="never computed: the device was lost"):
        y._value.require()
    for use in (y.numpy, earlier.numpy, device.synchronize, lambda: ct.relu(earlier)):
        with pytest.raises(ct.DeviceLostError, match="open it again"):
            use()
    with pytest.raises(ct.DeviceLostError):
        ct.asarray(X, device=device)


def test_waiting_that_is_refused_loses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ct.device("simulator", pool="reuse")
    monkeypatch.setattr(device.backend, "submit", refuse(ct.DeviceError("fell off the bus")))
    with pytest.raises(ct.DeviceLostError, match="simulator was lost: fell off the bus; open it"):
        device.synchronize()
    assert device.lost


@pytest.mark.parametrize("call", ["allocate", "write", "compile", "shown", "adopt", "prepare"])
def test_any_call_may_find_that_the_device_is_lost(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ct.device("simulator", pool="reuse")
    x = ct.asarray(X, device=device)
    uses: dict[str, Callable[[], Any]] = {
        "allocate": lambda: ct.empty(1 << 20, device=device),
        "write": lambda: ct.asarray(np.zeros(1 << 18, np.float32), device=device),
        "compile": lambda: ct.relu(x).numpy(),
        "shown": lambda: x.native,
        "adopt": lambda: ct.Tensor.from_buffer(np.zeros(4, np.float32), 4, "f32", device=device),
        "prepare": lambda: device.compile(ct.relu, x),
    }
    monkeypatch.setattr(device.backend, call, refuse(ct.DeviceLostError("fell off the bus")))
    with pytest.raises(ct.DeviceLostError, match="fell off the bus"):
        uses[call]()
    assert device.lost
    with pytest.raises(ct.DeviceLostError, match=r"was lost: .*fell off the bus; open it again"):
        x.numpy()


class LostTicket:
    """A submission that the device did not survive."""

    def done(self) -> bool:
        raise ct.DeviceLostError("reset while running")

    def wait(self, timeout: float | None = None) -> None:
        raise ct.DeviceLostError("reset while running")

    def data(self, index: int) -> Array:
        raise AssertionError


@pytest.mark.parametrize("ask", ["result", "done"])
def test_a_device_lost_while_running(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = ct.device("simulator", pool="reuse")
    y = ct.asarray(X, device=device) + 1.0
    with monkeypatch.context() as patch:
        patch.setattr(device.backend, "submit", lambda work: LostTicket())
        pending = ct.fetch(y)
    if ask == "done":
        assert pending.done()
        assert device.lost
    with pytest.raises(ct.DeviceLostError, match="reset while running"):
        pending.result()
    assert device.lost
    with pytest.raises(ct.DeviceLostError, match="simulator was lost: reset while running; open"):
        y.numpy()


def test_a_lost_device_is_opened_anew() -> None:
    first = ct.device("simulator")
    assert ct.device("simulator") is first
    first.close()
    first.close()
    second = ct.device("simulator")
    assert second is not first
    np.testing.assert_array_equal((ct.asarray(X, device=second) + 1.0).numpy(), X + 1)
    with pytest.raises(ct.DeviceLostError, match="it was closed"):
        ct.empty(3, device=first)


@contextmanager
def formula_raises(name: str, error: Exception) -> Iterator[None]:
    """An op whose formula raises an error."""
    op = get(name)
    original, host = op.reference, op.host
    force_setattr(op, "reference", refuse(error))
    force_setattr(op, "host", None)
    try:
        yield
    finally:
        force_setattr(op, "reference", original)
        force_setattr(op, "host", host)


def test_a_formula_that_raises_on_the_cpu() -> None:
    device = ct.device("cpu", pool="reuse")
    x = ct.asarray(X, device=device)
    with formula_raises("tanh", ValueError("a bad formula")):
        batch = device.batch()
        fine, bad = batch.relu(x), batch.tanh(x)
        after = batch.add(bad, 1.0)
        pending = batch.execute()
        with pytest.raises(ct.DeviceError, match="tanh failed on the CPU: a bad formula"):
            pending.result()
    for tensor in (bad, after, bad + 1.0):
        with pytest.raises(ct.DeviceError, match="tanh failed on the CPU: a bad formula") as raised:
            tensor.numpy()
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ct.DeviceError, match="tanh failed"):
        _ = bad.native
    assert not device.lost
    np.testing.assert_array_equal(fine.numpy(), RELU)
    np.testing.assert_allclose(ct.tanh(x.T).numpy(), np.tanh(X.T), rtol=1e-6)


def test_no_room_on_the_cpu() -> None:
    x = ct.asarray(X, device=ct.device("cpu", pool="exact"))
    with (
        formula_raises("exp", MemoryError()),
        pytest.raises(ct.OutOfMemoryError, match="exp failed on the CPU: MemoryError"),
    ):
        ct.exp(x).numpy()


# -- threads --------------------------------------------------------------------------------------


def test_a_tensor_of_another_thread_flushes_its_recording_whole(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    with ThreadPoolExecutor(1) as pool:
        a, b = pool.submit(lambda: (x + 1.0, x + 2.0)).result()
        assert not a.is_resident
        assert not b.is_resident
        c = a * 2.0
        assert b.is_resident
        np.testing.assert_array_equal(c.numpy(), 2 * (X + 1))
        np.testing.assert_array_equal(b.numpy(), X + 2)


@pytest.mark.devices("cpu", "webgpu")
def test_one_thread_records_while_another_flushes(device: ct.Device) -> None:
    """The owner appends nodes to its recording while others read what it has just recorded."""
    shared: list[ct.Tensor] = [ct.asarray(X, device=device)]
    stop = threading.Event()
    errors: list[BaseException] = []

    def reader() -> None:
        try:
            while not stop.is_set():
                number = len(shared) - 1
                got = (shared[number] + 0.0).numpy()
                np.testing.assert_array_equal(got, X + np.float32(number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reader) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 400):
            shared.append(ct.add(shared[-1], 1.0))
            if number % 3 == 0:
                shared.append(ct.asarray(X + np.float32(len(shared)), device=device))
            else:
                shared[-1] = ct.add(shared[-2], 1.0)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not errors, errors[0]
    np.testing.assert_array_equal(shared[-1].numpy(), X + np.float32(len(shared) - 1))


def test_a_batch_of_another_thread_is_not_flushed(device: ct.Device) -> None:
    batch = device.batch()
    y = batch.relu(batch.upload(X))
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ct.ContractError, match="not computed yet"):
            pool.submit(y.numpy).result()
        z = pool.submit(lambda: y + 1.0).result()  # recorded on the batch that it waits for
    assert batch.num_operations == 2
    batch.execute()
    np.testing.assert_array_equal(z.numpy(), RELU + 1)


def test_an_open_batch_belongs_to_its_thread(device: ct.Device) -> None:
    with device.batch() as batch, ThreadPoolExecutor(1) as pool:
        x = pool.submit(ct.asarray, X, None, device).result()
        y = pool.submit(lambda: (x + 1.0).numpy()).result()
        np.testing.assert_array_equal(y, X + 1)
        assert batch.num_operations == 0


def test_the_implicit_recording_is_flushed_when_it_is_long(device: ct.Device) -> None:
    x = ct.asarray(np.zeros(4, np.float32), device=device)
    with ct.ledger() as led:
        y = x
        for _ in range(300):
            y = ct.softmax(y)
        assert led.counts.submissions == 1
        assert led.counts.launches == 256
    np.testing.assert_array_equal(y.numpy(), np.full(4, 0.25, np.float32))


def test_a_batch_is_never_flushed_by_itself(device: ct.Device) -> None:
    with ct.ledger() as led:
        with device.batch() as batch:
            y = batch.upload(np.zeros(4, np.float32))
            for _ in range(300):
                y = ct.softmax(y)
        led.expect(submissions=1, launches=300)
    np.testing.assert_array_equal(y.numpy(), np.full(4, 0.25, np.float32))


def test_many_small_uploads_do_not_pile_up(device: ct.Device) -> None:
    with ct.ledger() as led:
        kept = [ct.asarray(np.full(4, i, np.float32), device=device) for i in range(600)]
        assert led.counts.uploads == 2
        led.expect(uploads=3, submissions=0)
    np.testing.assert_array_equal(kept[599].numpy(), np.full(4, 599, np.float32))


# -- memory ---------------------------------------------------------------------------------------


def test_freed_memory_is_not_written_while_recorded_work_reads_it(device: ct.Device) -> None:
    """`x` has no handle any more, its memory is read by a launch that is not submitted yet."""
    where = own(device)
    data = np.full(1 << 15, 7, np.float32)
    for explicit in (False, True):
        x = ct.asarray(data, device=where)  # large: written at once
        where.synchronize()
        batch = where.batch()
        y = batch.add(x, 1.0) if explicit else x + 1.0
        del x
        gc.collect()
        others = [ct.asarray(np.zeros(1 << 15, np.float32), device=where) for _ in range(3)]
        if explicit:
            batch.execute()
        np.testing.assert_array_equal(y.numpy(), data + 1)
        del others


@pytest.mark.devices("simulator", "webgpu")
def test_memory_comes_back(device: ct.Device) -> None:
    where = own(device)
    x = ct.asarray(X, device=where)
    for _ in range(3):
        pool_bytes = where.memory.held
        y = x
        for _ in range(5):
            y = ct.relu(y + 1.0)
        y.numpy()
        del y
        gc.collect()
    assert where.memory.held == pool_bytes
    where.pool.trim()
    assert (where.memory.held or 0) < (pool_bytes or 0)


@pytest.mark.devices("webgpu", "webgpu-hardware")
def test_bind_groups_are_kept_until_a_buffer_is_gone(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = own(device)
    backend: Any = where.backend
    x = ct.asarray(X, device=where)
    created: list[Any] = []
    raw = backend.groups.new

    def counted(*args: Any) -> Any:
        created.append(args)
        return raw(*args)

    def run() -> int:
        before = len(created)
        np.testing.assert_allclose((ct.softmax(x) @ x.T).numpy(), _softmax(X) @ X.T, rtol=1e-5)
        gc.collect()
        return len(created) - before

    def settled() -> bool:  # memory takes turns
        return any(run() == run() == 0 for _ in range(4))

    monkeypatch.setattr(backend.groups, "new", counted)
    assert settled()
    backend.disown(x.native[0])  # what the pool says before another buffer may have its id
    assert run() == 2
    assert settled()
    backend._slots.take(300)  # more than there are
    assert run() == 2
    assert settled()


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    y: Array = e / e.sum(-1, keepdims=True)
    return y


def test_temporaries_are_reused_and_never_read_and_written_at_once(device: ct.Device) -> None:
    batch = device.batch()
    x = batch.upload(X)
    y = x
    for _ in range(10):
        y = ct.softmax(y) + x
    batch.execute(outputs=[y])
    plan = device.last_plan
    assert len(plan.buffers) == 2  # they take turns; the last is the result's
    for step in plan.launches:
        outs = set(step.slots[step.inputs :]) if device.name == "cpu" else {step.slots[-1]}
        assert not outs & set(step.slots[: step.inputs])
    np.testing.assert_allclose(y.numpy(), _chain(X, 10), rtol=1e-6)


def _chain(x: Array, steps: int) -> Array:
    y = x
    for _ in range(steps):
        y = _softmax(y) + x
    return y


# -- plans ----------------------------------------------------------------------------------------


def test_explain(device: ct.Device) -> None:
    batch = device.batch()
    assert batch.explain().startswith("0 nodes (0 dropped, 0 fused, 0 stored), 0 launches")
    x = batch.upload(X)
    hidden = batch.relu(x)
    y = batch.add(hidden.T, 1.0)
    before = batch.explain(outputs=[y])
    batch.execute(outputs=[y])
    assert batch.explain() == before
    assert "2 nodes (0 dropped, 0 fused, 0 stored), 2 launches (0 copies), peak" in before
    assert "bytes in 2 buffers" in before
    assert "relu" in before
    assert "[3, 4] -> [3, 4]:f32" in before
    assert "[4, 3] -> [4, 3]:f32" in before


def test_the_second_identical_batch_builds_no_plan(device: ct.Device) -> None:
    def run(factor: float) -> ct.Tensor:
        with device.batch() as batch:
            x = batch.upload(X)
            y: ct.Tensor = ct.relu(x * factor) + x
        return y

    run(2.0)
    with ct.ledger() as led:
        y = run(2.0)
    led.expect(plans=0, compiles=0, submissions=1, uploads=1)
    np.testing.assert_allclose(y.numpy(), np.maximum(2 * X, 0) + X)


def test_a_plan_serves_only_its_own_structure(device: ct.Device) -> None:
    """Recordings that differ in one small thing, one after the other."""
    zero = ct.asarray(np.zeros(4, np.float32), device=device)
    one = ct.asarray(np.ones(4, np.float32), device=device)
    with device.batch() as batch:
        a = zero * 0.0
    with device.batch():
        b = zero * -0.0
    assert not np.signbit(a.numpy()).any()
    assert np.signbit(b.numpy()).all()
    with device.batch():
        c = one - zero
    with device.batch():
        d = zero - one
    with device.batch():
        e = one - one
    with device.batch() as batch:
        batch.upload(X)  # one more outside value, that nothing reads
        spare = batch.upload(X)
        f = one - zero
    np.testing.assert_array_equal(c.numpy(), np.ones(4))
    np.testing.assert_array_equal(d.numpy(), -np.ones(4))
    np.testing.assert_array_equal(e.numpy(), np.zeros(4))
    np.testing.assert_array_equal(f.numpy(), np.ones(4))
    np.testing.assert_array_equal(spare.numpy(), X)


def test_views_of_uploads_read_their_own_place(device: ct.Device) -> None:
    for shift in (0, 1, 2):
        batch = device.batch()
        for _ in range(shift):
            batch.upload(np.full(100, -1, np.float32))
        keep = [batch.upload(np.full(100, -1, np.float32)) for _ in range(shift)]
        x = batch.upload(X)
        y = batch.add(x[1:, 1:], x[:2, :3])
        batch.execute()
        np.testing.assert_array_equal(y.numpy(), X[1:, 1:] + X[:2, :3])
        assert all(k.numpy().max() == -1 for k in keep)


def test_a_plan_holds_no_tensors(device: ct.Device) -> None:
    where = own(device)
    x = ct.asarray(X, device=where)
    y = ct.relu(x)
    y.numpy()
    refs = [weakref.ref(t._value) for t in (x, y)]
    del x, y
    gc.collect()
    assert [r() for r in refs] == [None, None]


def test_plans_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PLANS", 4)
    device = ct.device("cpu", pool="reuse")
    for n in range(1, 10):
        (ct.zeros(n, device=device) + 1.0).numpy()
    assert len(device.executor.plans) == 4
    with ct.ledger() as led:
        (ct.zeros(9, device=device) + 1.0).numpy()
        (ct.zeros(1, device=device) + 1.0).numpy()
    led.expect(plans=1)


def test_forms_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FORMS", 4)
    device = ct.device("cpu", pool="reuse")
    for n in range(1, 10):
        np.testing.assert_array_equal((ct.zeros(n, device=device) + 1.0).numpy(), np.ones(n))
    assert len(device.recorder._forms) <= 4


# -- caches ---------------------------------------------------------------------------------------


@pytest.mark.devices("simulator", "webgpu")
def test_execute_with_cache(device: ct.Device) -> None:
    mine, other = ct.PipelineCache(), ct.PipelineCache()

    def run(cache: ct.PipelineCache) -> Array:
        batch = device.batch()
        y = batch.relu(batch.add(batch.upload(X), 1.0).T)
        batch.execute_with_cache(cache)
        result: Array = batch.read(y)
        return result

    for cache in (mine, mine, other, mine):
        np.testing.assert_array_equal(run(cache), np.maximum(X + 1, 0).T)
    assert mine.names() == other.names() == ["add", "relu"]
    assert (mine.misses, mine.hits, len(mine)) == (2, 4, 2)
    assert (other.misses, other.hits) == (2, 0)
    mine.reset()
    assert (mine.misses, mine.hits) == (0, 0)
    mine.clear()
    run(mine)
    assert mine.misses == 2


@pytest.mark.devices("simulator", "webgpu")
def test_a_device_takes_a_cache(device: ct.Device) -> None:
    cache = ct.PipelineCache()
    where = own(device, cache=cache)
    assert where.cache is cache
    (ct.zeros(4, device=where) + 1.0).numpy()
    assert cache.names() == ["add", "fill"]


def test_the_recording_says_where(device: ct.Device) -> None:
    recording = Recording(device, explicit=True)
    with recording:
        ct.asarray(X, device=device) + 1.0
    assert line_of(recording.nodes[0].site).startswith(f"{__file__}:")
    assert recording.nodes[0].op.name == "add"
    assert innermost(device) is None


def test_submissions_that_hold_nothing(device: ct.Device) -> None:
    ticket = device.backend.submit(Submission([]))
    ticket.wait(10)
    assert ticket.done() is True


def test_what_is_no_tensor_is_said(device: ct.Device) -> None:
    batch = device.batch()
    wrong: Any = "x"
    uses: list[tuple[str, Any]] = [
        ("read", lambda: batch.read(wrong)),
        ("keep", lambda: batch.keep(wrong)),
        ("outputs", lambda: batch.execute(outputs=[wrong])),
    ]
    for name, use in uses:
        with pytest.raises(ct.DTypeError, match=f"^{name}: expected a Tensor, got str"):
            use()
    with pytest.raises(ct.ContractError, match="expected a PipelineCache, got dict"):
        batch.execute_with_cache({})
