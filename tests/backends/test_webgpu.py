"""What submissions and read-backs call of wgpu-native: how often, and how its errors are raised."""

from __future__ import annotations

import gc
import logging
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

import centella as ct
from tests.support.devices import own

Array = np.ndarray[Any, Any]
X = np.arange(12, dtype=np.float32).reshape(3, 4)
pytestmark = pytest.mark.devices("webgpu", "webgpu-minimum", "webgpu-hardware")


class Driver:
    """wgpu-native; each use of a function is counted, with its arguments."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.calls: Counter[str] = Counter()
        self.submitted: int = 0  # command buffers
        self.waits: list[int] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._library, name)
        if name.startswith("wgpu"):
            self.calls[name] += 1
        if name == "wgpuDevicePoll":
            return self._poll
        return self._submit if name == "wgpuQueueSubmit" else attribute

    def _submit(self, queue: Any, number: int, commands: Any) -> None:
        self.submitted += number
        self._library.wgpuQueueSubmit(queue, number, commands)

    def _poll(self, device: Any, wait: int, index: Any) -> int:
        self.waits.append(wait)
        polled: int = self._library.wgpuDevicePoll(device, wait, index)
        return polled


@pytest.fixture
def driver(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> Driver:
    raw = pytest.importorskip("centella.backends.webgpu.raw")
    counted = Driver(raw.lib)
    monkeypatch.setattr(raw, "lib", counted)
    return counted


def test_subgroups_are_used_where_the_probe_is_right(device: ct.Device) -> None:
    probe = pytest.importorskip("centella.backends.webgpu.subgroups")
    native = device.backend.native
    assert device.caps.subgroups == ("subgroup" in native.features) == probe.agree(native)
    if device.caps.subgroups:
        fields = probe._fields(native).T
        assert probe.right(fields)
        for row in range(probe.FIELDS):
            other = fields.copy()
            other[row, 77] ^= 1
            assert not probe.right(other)
        assert not probe.right(np.roll(fields, 1, 1))


def test_no_subgroups_where_the_probe_fails(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = pytest.importorskip("centella.backends.webgpu.subgroups")
    monkeypatch.setattr(probe, "SOURCE", "no shader of {threads} and {fields}")
    assert not probe.agree(device.backend.native)
    assert (ct.asarray(X, device=device) + 1).numpy()[0, 0] == 1


def test_a_product_of_arrays_is_few_calls(device: ct.Device, driver: Driver) -> None:
    cache = ct.MatmulCache(own(device))
    cache.upload_weight("w", np.eye(4, dtype=np.float32))
    for _ in range(2):
        cache.matmul("w", X)
    driver.calls.clear()
    np.testing.assert_array_equal(cache.matmul("w", X), X)
    del driver.calls["wgpuDevicePoll"]
    assert set(driver.calls.values()) == {1}
    assert sorted(name.removeprefix("wgpu") for name in driver.calls) == [
        "BufferGetConstMappedRange", "BufferMapAsync", "BufferUnmap", "CommandBufferRelease",
        "CommandEncoderBeginComputePass", "CommandEncoderCopyBufferToBuffer",
        "CommandEncoderFinish", "CommandEncoderRelease", "ComputePassEncoderDispatchWorkgroups",
        "ComputePassEncoderEnd", "ComputePassEncoderRelease", "ComputePassEncoderSetBindGroup",
        "ComputePassEncoderSetPipeline", "DeviceCreateCommandEncoder", "QueueSubmit",
        "QueueWriteBuffer",
    ]  # fmt: skip


def test_nobody_waits_inside_the_driver(device: ct.Device, driver: Driver) -> None:
    """There a wait keeps other threads from submitting."""
    x = ct.asarray(X, device=own(device))
    pending = [ct.fetch(x + float(i)) for i in range(3)]
    x.device.batch().execute().result()
    x.device.synchronize()
    for i, one in enumerate(pending):
        np.testing.assert_array_equal(one.result()[0], X + i)
    assert driver.waits
    assert not any(driver.waits)


def test_a_thread_that_waits_keeps_no_other_from_submitting(device: ct.Device) -> None:
    where = own(device)
    x = ct.asarray(np.ones((128, 128), np.float32), device=where)
    y = x
    for _ in range(40):
        y = y @ x * (1 / 128)
    long = ct.fetch(y)
    waiting = threading.Thread(target=long.result)
    waiting.start()
    np.testing.assert_array_equal((x + 1.0).numpy(), np.full((128, 128), 2))
    waiting.join()
    np.testing.assert_allclose(long.result()[0], 1, rtol=1e-5)


def test_read_backs_use_two_buffers_by_turns(device: ct.Device) -> None:
    where = own(device)
    backend: Any = where.backend
    fn = where.compile(lambda x: x * 2.0, X)
    before = fn.fetch(X)
    for turn in range(6):
        now = fn.fetch(X + turn)
        np.testing.assert_array_equal(before.result(), 2 * (X + max(turn - 1, 0)))
        before = now
    before.result()
    assert len(list(backend._staging)) == 2
    for _ in range(3):  # nobody asks for these
        fn.fetch(X)
    gc.collect()
    assert len(list(backend._staging)) == 2


def test_fetches_that_nobody_waits_for(device: ct.Device) -> None:
    where = own(device)
    fn = where.compile(lambda x: x * 2.0, X)
    for _ in range(3):
        fn.fetch(X).done()
    gc.collect()
    np.testing.assert_array_equal(fn.fetch(X).result(), 2 * X)


def test_a_pending_fetch_outlives_the_close_of_its_device(device: ct.Device) -> None:
    where = own(device)
    fn = where.compile(lambda x: x * 2.0, X)
    pending = fn.fetch(X), ct.fetch(ct.asarray(X, device=where) + 1.0)
    where.close()
    np.testing.assert_array_equal(pending[0].result(), 2 * X)
    np.testing.assert_array_equal(pending[1].result()[0], X + 1)
    with pytest.raises(ct.DeviceLostError):
        fn(X)


def test_groups_live_until_they_are_encoded(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from centella.backends.webgpu import groups

    monkeypatch.setattr(groups, "MOST", 2)
    where = own(device)
    with where.batch() as batch:
        x = batch.upload(X)
        kept = []
        for i in range(12):
            x = ct.softmax(x + float(i))
            kept.append(x)
    gc.collect()
    for y in ct.fetch(*kept).result():
        np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-5)


def chain(x: ct.Tensor, launches: int = 20) -> ct.Tensor:
    for _ in range(launches):
        x = ct.softmax(x)
    return x


def softmaxed(x: Array, launches: int = 20) -> Array:
    x = x.astype(np.float64)
    for _ in range(launches):
        e = np.exp(x - x.max(-1, keepdims=True))
        x = e / e.sum(-1, keepdims=True)
    return x


@pytest.mark.parametrize("fetch", [False, True], ids=["run", "fetch"])
def test_a_replay_is_encoded_ahead_while_a_thread_waits(
    device: ct.Device, driver: Driver, fetch: bool
) -> None:
    where = own(device)
    backend: Any = where.backend
    fn = where.compile(chain, X)
    for turn in range(5):
        driver.calls.clear()
        x = X + turn if turn < 3 else ct.asarray(X + turn, device=where)  # written, then copied
        result = fn.fetch(x) if fetch else fn(x)
        passes = driver.calls["wgpuCommandEncoderBeginComputePass"]
        assert driver.calls["wgpuQueueSubmit"] <= 1 + (turn >= 3)  # an upload of its own
        assert passes == (turn <= 1)  # what ran once may never run again
        y = result.result() if isinstance(result, ct.Pending) else result.numpy()
        np.testing.assert_allclose(y, softmaxed(X + turn), rtol=1e-5)
        backend.ahead.encode()  # as who waits does, if the device is not done at once


def test_a_recorded_plan_on_its_buffers_is_encoded_ahead(device: ct.Device, driver: Driver) -> None:
    where = own(device)
    backend: Any = where.backend
    x = ct.asarray(X, device=where)
    y = x
    for turn in range(8):  # its memory takes turns
        driver.calls.clear()
        with ct.ledger() as led, where.batch():
            y = chain(x)
        led.expect(launches=20, submissions=1)
        if turn >= 5:
            assert led.parameter_bytes == 0  # they are there from the first time
            assert driver.calls["wgpuCommandEncoderBeginComputePass"] == 0
        np.testing.assert_allclose(y.numpy(), softmaxed(X), rtol=1e-5)
        backend.ahead.encode()


def test_few_plans_are_encoded_ahead(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from centella.backends.webgpu import prepared
    from centella.backends.webgpu.raw import Commands, Encoder

    monkeypatch.setattr(prepared, "MOST", 2)
    where = own(device)
    backend: Any = where.backend
    lengths = (16, 17, 18, 19, 20, 15)
    plans = [where.compile(lambda x, n=n: chain(x, n), X) for n in lengths]
    for _ in range(4):
        for plan, n in zip(plans, lengths, strict=True):
            np.testing.assert_allclose(plan(X).numpy(), softmaxed(X, n), rtol=1e-5)
            backend.ahead.encode()
    ahead = [type(fn._replay._executable.work.prepared.spare) for fn in plans]
    none = type(None)  # a short one is encoded when it runs
    assert ahead == [Commands, Commands, none, Encoder, Encoder, none]
    del plans[3], plan
    gc.collect()
    backend.ahead.encode()  # a plan that has gone is not encoded
    where.close()
    backend.ahead.encode()


def test_finished_commands_are_submitted_but_for_a_few(device: ct.Device, driver: Driver) -> None:
    """wgpu-native never frees the others."""
    from centella.backends.webgpu.prepared import MOST

    where = own(device)
    backend: Any = where.backend
    fn = ct.jit(chain, maxsize=4)  # of 8 signatures: captures come and go
    for turn in range(40):
        for _ in range(3):
            fn(ct.asarray(X, device=where), 16 + turn % 8).numpy()
            backend.ahead.encode()
    assert driver.calls["wgpuCommandEncoderFinish"] - driver.submitted <= MOST


def test_parameters_take_their_slots_by_turns(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from centella.backends.webgpu import slots

    monkeypatch.setattr(slots, "SLOTS", (8, 32))
    where = own(device)
    x = ct.asarray(X, device=where)
    for turn in range(12):  # 40 launches do not fit 32 slots
        launches = (5, 13, 20, 40)[turn % 4]
        view = x[turn % 3 :]
        y = chain(view, launches).numpy()
        np.testing.assert_allclose(y, softmaxed(X[turn % 3 :], launches), rtol=1e-5)
    chosen: Any = where.backend
    assert chosen._slots.buffer.size == 40 * 256


def test_what_wgpu_reports_is_raised(device: ct.Device, caplog: pytest.LogCaptureFixture) -> None:
    from centella.backends.webgpu import raw

    where = own(device)
    small = where.pool.allocate(16).native
    data = np.zeros(small.size + 16, np.uint8)
    with caplog.at_level(logging.DEBUG, "wgpu"):
        with pytest.raises(ct.DeviceError, match=r"(?i)overrun|bounds"), raw.Checked():
            raw.write(where.native.queue, small, data)
        with pytest.raises(ZeroDivisionError), raw.Checked():
            raise ZeroDivisionError
        assert not caplog.messages
    np.testing.assert_array_equal((ct.asarray(X, device=where) + 1.0).numpy(), X + 1)


def test_a_mapping_that_fails_is_a_lost_device(device: ct.Device) -> None:
    from centella.backends.webgpu.ticket import WebGpuTicket

    where = own(device)
    pending = ct.fetch(ct.asarray(X, device=where) + 1.0)
    watched: Any = pending._tickets[0]
    ticket: WebGpuTicket = watched._ticket
    ticket._staging.destroy()
    with pytest.raises(ct.DeviceLostError, match="lost while running"):
        pending.result()
    assert where.lost
