"""Devices, streams and memory of CUDA shared with other libraries, without a GPU.

The driver is one that only keeps the order of things; tests/tensors/test_interop.py has a GPU's.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.dtypes import ALL
from centella.runtime.device import Device
from centella.specs import Spec
from centella.tensors import dlpack
from tests.support.fake_cuda import PRIMARY, FakeCuda, Op, installed
from tests.support.foreign import Exporter, Owner
from tests.support.threads import elsewhere

Array = np.ndarray[Any, Any]
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    yield from installed(monkeypatch, FakeCuda)


def opened(native: Any = 0, **options: Any) -> Device:
    return ct.device("cuda", native=native, pool="reuse", **options)


def computed(tensor: ct.Tensor) -> ct.Tensor:
    """A tensor, once what computes it is submitted."""
    _ = tensor.native
    return tensor


def in_order(ops: list[Op]) -> bool:
    """Whether each thing waits for the one before, so all are in one order."""
    return all(a.before(b) for a, b in itertools.pairwise(ops))


class TestDevicesOfCuda:
    """Which device, which context, and who releases it."""

    def test_names_of_one_device(self, fake: FakeCuda) -> None:
        a = ct.device("cuda:1")
        assert ct.device("cuda:1") is a
        torch_like = type("device", (), {"type": "cuda", "index": 1})()
        core_like = SimpleNamespace(device_id=1)
        for native in (1, torch_like, core_like, fake.driver.CUdevice(1), a.native):
            assert ct.device("cuda", native=native) is a
        assert ct.device(native=1) is a
        assert (a.native.ordinal, a.native.context) == (1, PRIMARY + 1)
        assert a.native.__cuda_stream__() == (0, a.native.stream)
        first = ct.device("cuda", native=0)
        assert first.native.context == PRIMARY
        assert ct.device("cuda") is ct.device("cuda:0") is first
        assert fake.retained == 2

    def test_more_groups_than_a_grid_barrier_can_hold(self, fake: FakeCuda) -> None:
        """They are refused before anything is on a stream: the device stays usable."""
        device, most = ct.device("cuda"), 2 * (1 << 16)

        def meet(y: ct.Out[ct.u32]) -> None:
            ct.lang.ptx.grid_barrier()
            y[ct.lang.global_id()] = 1

        kernel, count = ct.kernel(workgroup=64)(meet), len(fake.ops)
        y, z = (ct.empty((n,), "u32", device=device) for n in (64 * (most + 1), 64))
        with pytest.raises(ct.LimitError, match=f"at most {most:,} groups, .* got {most + 1:,}"):
            kernel(y, groups=most + 1)
            y.numpy()
        assert len(fake.ops) == count
        kernel(z, groups=1)
        z.numpy()

    def test_a_primary_context_is_given_back(self, fake: FakeCuda) -> None:
        device = opened()
        assert fake.retained == 1
        x = ct.asarray(X, device=device)
        x.numpy()
        assert fake.memory
        device.close()
        assert (fake.retained, fake.memory, fake.streams) == (0, {}, {})

    @pytest.mark.parametrize("form", ["object", "handle", "core"])
    def test_a_context_of_the_application(self, fake: FakeCuda, form: str) -> None:
        theirs = 0x70001000
        fake.devices[theirs] = 1
        handle = fake.driver.CUcontext(theirs)
        native = {"object": handle, "handle": theirs, "core": type("Context", (), {})()}[form]
        if form == "core":
            native.handle = handle
        device = ct.device("cuda", native=native)
        assert device.name == "cuda:1"
        assert ct.device("cuda", native=native) is device
        assert ct.device("cuda:1", native=theirs) is device
        assert ct.device("cuda", native=1) is not device
        assert device.native.context == theirs
        np.testing.assert_array_equal(ct.asarray(X, device=device).numpy(), X)
        assert {context for _, _, context in fake.memory.values()} <= {theirs, 0}
        assert fake.streams[device.native.stream] == theirs
        assert fake.retained == 1  # that of device 1, opened above
        device.close()
        assert fake.retained == 1
        assert fake._current == []

    def test_what_is_no_device(self, fake: FakeCuda) -> None:
        cpu_like = type("device", (), {"type": "cpu", "index": 0})()
        for native in ("x", -1, True, 1.5, object(), cpu_like):
            with pytest.raises(ct.DeviceError, match="expected an ordinal, a CUDA device or a CU"):
                ct.device("cuda", native=native)
        with pytest.raises(ct.DeviceError, match="cuda:7: this machine has 2 CUDA devices"):
            ct.device("cuda", native=7)
        with pytest.raises(ct.DeviceError, match=r"got a null one"):
            ct.device("cuda", native=fake.driver.CUcontext(0))
        with pytest.raises(ct.DeviceError, match="expected a CUcontext as native=, got 1193046"):
            ct.device("cuda", native=0x123456)
        with pytest.raises(ct.DeviceError, match=r"cuda:1: expected a native= of it, got .*cuda:0"):
            ct.device("cuda:1", native=0)
        with pytest.raises(ct.DeviceError, match="got cuda:x"):
            ct.device("cuda:x")
        assert fake.retained == 0


def test_a_function_is_loaded_before_it_is_timed(fake: FakeCuda) -> None:
    """The driver may leave that to the first launch, between whose events it would lie."""
    device = opened()
    x = ct.asarray(X, device=device)
    fake.loaded = False
    with ct.ledger(timing=True) as led:
        computed(x + 1.0)
        computed(x + 1.0)
    whats = [op.what for op in fake.ops]
    assert whats.count("load") == 1
    assert whats.index("load") < whats.index("launch")
    assert led.spans()["compile"] > 0
    fake.loaded = False
    computed(x + 1.0)  # not timed: left to the driver
    assert not fake.loaded


class TestSubmissionsOfCudaThatFindNoMemory:
    """What comes before the launches can be tried again; after them the device is lost."""

    def refuse(self, fake: FakeCuda, patch: pytest.MonkeyPatch, name: str, after: int) -> None:
        """From the call after so many on, a function of the driver finds no memory."""
        calls, real = itertools.count(), getattr(fake, name)

        def call(*args: Any) -> Any:
            if next(calls) < after:
                return real(*args)
            return (fake.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)

        patch.setattr(fake.driver, name, call)

    @pytest.mark.parametrize("after", [0, 1, 2])
    def test_no_memory_among_the_launches(
        self, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, after: int
    ) -> None:
        """Nothing is run twice: a State would be changed twice."""
        device = opened()
        state = ct.State(X, device=device)
        with ct.ledger(timing=True):
            state.assign(state.value + 1.0)
            self.refuse(fake, monkeypatch, "cuEventRecord", after)
            with pytest.raises(ct.DeviceLostError, match="OUT_OF_MEMORY"):
                _ = state.value.native
        assert device.lost

    @pytest.mark.parametrize("name", ["cuEventCreate", "cuMemHostAlloc"])
    def test_no_memory_before_the_launches(
        self, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """What was taken is given back, and it can be tried again."""
        device = opened()
        backend: Any = device.backend
        x = ct.zeros((1 << 16,), device=device)
        x[:9].numpy()  # an event and pinned memory, but not enough of that for all of x

        def idle() -> tuple[int, int]:
            kept = [*backend._idle_pinned, *(p for free in backend._pinned.values() for p in free)]
            kept += [pinned for pinned, _ in backend._unread]  # once the device is past them
            return len(backend._events) + len(backend._unread), sum(p.nbytes for p in kept)

        before = idle()
        with ct.ledger(timing=name == "cuEventCreate"):
            y = (x + 1.0)[:9] if name == "cuEventCreate" else x + 1.0
            with monkeypatch.context() as patch:
                self.refuse(fake, patch, name, 0)
                with pytest.raises(ct.OutOfMemoryError):
                    y.numpy()
            assert before == idle()
            y.numpy()


class TestStreamsOfCuda:
    """All work of a device stays in one order."""

    def test_work_goes_to_the_stream_and_waits_for_what_came_before(self, fake: FakeCuda) -> None:
        device = opened()
        own, theirs = device.native.stream, fake.new_stream()
        a = ct.asarray(X, device=device)
        np.testing.assert_array_equal(a.numpy(), X)
        with device.stream(theirs) as inside:
            assert inside.stream == device.native.stream == theirs
            app = fake.put("application", theirs)  # sees what was submitted before
            b = a + 1.0
            with device.stream() as inner:
                assert inner.stream not in (own, theirs)
                _ = (b * 2.0).native
            _ = (b * 3.0).native
            assert device.native.stream == theirs
            c = a + 2.0  # goes there at the end
        assert device.native.stream == own
        _ = (c * 2.0).native
        assert in_order(fake.ops)
        kinds = [(op.what, op.stream) for op in fake.ops if op is not app]
        assert kinds[:2] == [("copy", own)] * 2
        launches = [stream for what, stream in kinds if what == "launch"]
        assert launches == [theirs, inner.stream, theirs, theirs, own]
        assert inner.stream not in fake.streams
        assert theirs in fake.streams

    def test_a_batch_is_one_unbroken_run_of_launches(self, fake: FakeCuda) -> None:
        """Contract 2: one stream, no copy between them, and nobody waits."""
        device = opened()
        batch = device.batch()
        x, same = batch.upload(X), batch.upload(np.eye(4, dtype=np.float32))
        for _ in range(20):
            x = batch.add(batch.matmul(x, same), 1.0)
        batch.execute()
        own = device.native.stream
        assert [(op.what, op.stream) for op in fake.ops] == [("copy", own), *[("launch", own)] * 40]
        assert (fake.waits, fake.syncs) == (0, 0)

    def test_no_stream_is_made_for_an_op(self, fake: FakeCuda) -> None:
        device = opened()
        x = ct.asarray(X, device=device)
        x.numpy()
        before = fake.stream_calls
        for _ in range(5):
            ct.softmax(ct.relu(x @ x.T)).numpy()
        assert fake.stream_calls == before
        assert len({op.stream for op in fake.ops}) == 1

    def test_what_was_recorded_before_goes_to_the_stream_before(self, fake: FakeCuda) -> None:
        device = opened()
        x = ct.asarray(X, device=device)
        early = x + 1.0
        batch = device.batch()
        waits = batch.relu(x)
        with device.stream(fake.new_stream()) as inside:
            assert early.is_resident
            assert not waits.is_resident  # a batch runs where it is executed
            batch.execute()
            assert waits.is_resident
        launches = [op.stream for op in fake.ops if op.what == "launch"]
        assert launches == [device.native.stream, inside.stream]
        assert in_order(fake.ops)

    def test_replays_go_to_the_stream(self, fake: FakeCuda, monkeypatch: Any) -> None:
        device = opened()
        launched: list[int] = []
        monkeypatch.setattr(
            "centella.backends.cuda.backend.Graph",
            lambda own, record, give_up: SimpleNamespace(launch=lambda s: launched.append(int(s))),
        )
        step = ct.jit(lambda x: x * 2.0)
        x = ct.asarray(X, device=device)
        step(x)
        theirs = fake.new_stream()
        with device.stream(theirs):
            step(x)
        assert launched == [device.native.stream, theirs]

    def test_threads_have_their_own_stream_in_one_order(self, fake: FakeCuda) -> None:
        device = opened()
        x = ct.asarray(X, device=device)
        _ = x.native
        handles = [fake.new_stream() for _ in range(3)]
        turns = threading.Barrier(4)

        def work(handle: int | None) -> None:
            for _ in range(5):
                turns.wait(20)
                if handle is None:
                    _ = (x + 1.0).native
                    continue
                with device.stream(handle):
                    assert device.native.stream == handle
                    for _ in range(3):
                        _ = (x * 2.0).native
                    ct.asarray(X, device=device).numpy()

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, h) for h in (*handles, None)]:
                done.result(60)
        assert len({op.stream for op in fake.ops}) == 4
        assert in_order(fake.ops)

    def test_scopes_of_tasks_do_not_mix(self, fake: FakeCuda) -> None:
        device = opened()
        handles = [fake.new_stream() for _ in range(3)]

        async def work(handle: int) -> None:
            with device.stream(handle):
                for _ in range(3):
                    await asyncio.sleep(0)
                    assert device.native.stream == handle
            assert device.native.stream not in handles

        async def main() -> None:
            await asyncio.gather(*map(work, handles))
            with device.stream(handles[0]):
                late = asyncio.ensure_future(outlives())
                await asyncio.sleep(0)
                assert elsewhere(lambda: device.native.stream) not in handles
            await late

        async def outlives() -> None:
            assert device.native.stream == handles[0]
            await asyncio.sleep(0.01)
            assert device.native.stream not in handles

        asyncio.run(main())

    def test_what_other_threads_submitted_comes_before(self, fake: FakeCuda) -> None:
        device = opened()
        x = ct.asarray(X, device=device) + 1.0
        _ = x.native
        address = fake.alloc(16, PRIMARY)
        theirs, producer = fake.new_stream(), fake.new_stream()
        with device.stream(theirs):
            y = elsewhere(lambda: computed(x * 2.0))  # on the device's own stream
            _ = y.native
            app = fake.put("application", theirs)
            assert fake.ops[-2].before(app)
            elsewhere(lambda: (x * 3.0).native)
            producer_op = fake.put("producer", producer)
            interface = {"shape": (4,), "typestr": "<f4", "data": (address, True), "version": 3}
            native = SimpleNamespace(__cuda_array_interface__={**interface, "stream": producer})
            z = ct.Tensor.from_buffer(native, 4, "f32", device=device)
            elsewhere(lambda: (z * 2.0).native)
            assert producer_op.before(fake.ops[-1])
            assert contextvars.copy_context().run(lambda: device.native.stream) == theirs
            inherited = contextvars.copy_context()  # as asyncio.to_thread has it
            assert elsewhere(lambda: inherited.run(lambda: device.native.stream)) != theirs

    def test_streams_by_every_name(self, fake: FakeCuda) -> None:
        device = opened()
        theirs = fake.new_stream()
        for stream, want in (
            (theirs, theirs),
            (fake.driver.CUstream(theirs), theirs),
            (SimpleNamespace(cuda_stream=theirs), theirs),
            (SimpleNamespace(ptr=theirs), theirs),
            (SimpleNamespace(__cuda_stream__=lambda: (0, theirs)), theirs),
            (SimpleNamespace(__cuda_stream__=(0, theirs)), theirs),
            (SimpleNamespace(cuda_stream=0), 1),  # the default stream, by its handle
            (0, 1),
            (1, 1),
        ):
            with device.stream(stream) as inside:
                assert inside.stream == want

    def test_what_is_no_stream(self, fake: FakeCuda) -> None:
        device = opened()
        for stream in (-1, True, "x", 1.5, object(), SimpleNamespace(ptr="x")):
            with (
                pytest.raises(ct.DeviceError, match="expected a CUDA stream or its handle, got"),
                device.stream(stream),
            ):
                raise AssertionError
        with pytest.raises(ct.DeviceError, match="that every thread can name"), device.stream(2):
            raise AssertionError
        text = "expected a stream of this device, got 0x999"
        with pytest.raises(ct.DeviceError, match=text), device.stream(0x999):
            raise AssertionError
        other = fake.new_stream(PRIMARY + 1)
        text = "expected a stream of context 0x1000, got one of 0x1001"
        with pytest.raises(ct.DeviceError, match=text), device.stream(other):
            raise AssertionError
        assert device.native.stream not in (other, 0x999, 2)

    def test_an_exception_inside_goes_back_to_the_stream_before(self, fake: FakeCuda) -> None:
        device = opened()
        own = device.native.stream
        with pytest.raises(ZeroDivisionError), device.stream(fake.new_stream()):
            _ = ct.asarray(X, device=device).native
            raise ZeroDivisionError
        assert device.native.stream == own
        with device.stream(fake.new_stream()):
            device.close()


class TestMemoryOfCuda:
    """Memory that comes in, and memory that goes out."""

    @staticmethod
    def filled(fake: FakeCuda, data: Array, context: int = PRIMARY) -> int:
        address = fake.alloc(max(data.nbytes, 16), context)
        array, _, _ = fake.memory[address]
        start = address - array.ctypes.data
        array[start : start + data.nbytes] = data.reshape(-1).view(np.uint8)
        return address

    @staticmethod
    def interface(address: int, shape: Any, **more: Any) -> Owner:
        interface = {
            "shape": shape,
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
            **more,
        }
        owner = Owner()
        owner.__cuda_array_interface__ = interface  # type: ignore[attr-defined]  # as arrays have it
        return owner

    def test_addresses_and_array_interfaces(self, fake: FakeCuda) -> None:
        device = opened()
        address = self.filled(fake, X)
        batch = device.batch()
        for native in (
            (address, X.nbytes),
            self.interface(address, X.shape),
            self.interface(address, X.shape, strides=(16, 4), stream=None),
        ):
            x = ct.Tensor.from_buffer(native, X.shape, "f32", device=device)
            y = batch.import_buffer(native, 4, "f32", offset=16)
            assert x.native == (address, 0)
            np.testing.assert_array_equal(x.numpy(), X)
            np.testing.assert_array_equal(y.numpy(), X[1])

    def test_the_producers_stream_is_waited_for(self, fake: FakeCuda) -> None:
        device = opened()
        address, theirs = self.filled(fake, X), fake.new_stream()
        for stream, syncs in ((theirs, 0), (1, 0), (2, 0), (None, 0), ("none named", 1)):
            before = fake.syncs
            producer = theirs if isinstance(stream, str | None) else stream
            app = fake.put("application", producer)
            named = {} if stream == "none named" else {"stream": stream}
            native = self.interface(address, X.shape, **named)
            x = ct.Tensor.from_buffer(native, X.shape, "f32", device=device)
            _ = (x + 1.0).native
            assert app.before(fake.ops[-1]) == (stream is not None)
            assert fake.syncs - before == syncs
        old = self.interface(address, X.shape, version=2, stream=theirs)
        ct.Tensor.from_buffer(old, X.shape, "f32", device=device)
        assert fake.syncs == 2
        ct.Tensor.from_buffer((address, X.nbytes), X.shape, "f32", device=device)
        assert fake.syncs == 3

    def test_what_cannot_be_imported(self, fake: FakeCuda) -> None:
        device = opened()
        address = self.filled(fake, X)
        far = self.filled(fake, X, PRIMARY + 1)
        fake.devices[0x70001000] = 0
        other = self.filled(fake, X, 0x70001000)
        cases: list[tuple[Any, str]] = [
            (X, r"expected \(address, bytes\) or an object with __cuda_array_interface__"),
            ((address,), r"expected \(address, bytes\) to import, got"),
            ((address, 1.5), r"expected \(address, bytes\) to import, got"),
            ((address + 4, 16), "16-byte boundary on to import, got 16 at 0x.*from_dlpack"),
            ((0, 16), "got 16 at 0x0"),
            ((address, 0), "got 0 at"),
            ((address, 1 << 40), "expected 1 to 17,179,869,184 bytes"),
            ((0x10, 16), "expected device memory, got 0x10"),
            ((address, 1 << 20), "expected device memory, got"),
            ((far, 16), "expected memory of it, got memory of cuda:1"),
            ((other, 16), "expected memory of context 0x1000, got memory of 0x70001000; open"),
            (self.interface(address, (2, 2), strides=(16, 4)), r"got strides \(16, 4\) for shape"),
            (self.interface(address, (4,), mask=1), "without a mask"),
            (self.interface(address, (4,), stream=0), "None or a handle above 0 .* got 0"),
        ]
        for native, text in cases:
            with pytest.raises(ct.DeviceError, match=text):
                ct.Tensor.from_buffer(native, 4, "f32", device=device)
        with pytest.raises(ct.ShapeError, match="the buffer has 16"):
            ct.Tensor.from_buffer((address, 16), 5, "f32", device=device)
        wide = self.interface(address, (4,), typestr="<f8")
        with pytest.raises(ct.DTypeError, match=r"expected an array of f32 .*, got float64"):
            ct.Tensor.from_buffer(wide, 4, "f32", device=device)

    def test_an_import_lives_until_the_last_submission_is_done(self, fake: FakeCuda) -> None:
        device = opened()
        native = self.interface(self.filled(fake, X), X.shape)
        watch = weakref.ref(native)
        x = ct.Tensor.from_buffer(native, X.shape, "f32", device=device)
        del native
        batches = [device.batch(), device.batch()]
        results = [batch.relu(x) for batch in batches]
        del x
        for batch in batches:
            gc.collect()
            assert watch() is not None
            elsewhere(batch.execute)
        device.synchronize()
        gc.collect()
        assert watch() is None
        assert all(y.is_resident for y in results)

    def exporter(self, fake: FakeCuda, data: Array, ordinal: int = 0) -> Exporter:
        """A library whose stream still writes what it hands out."""
        address = self.filled(fake, data, PRIMARY + ordinal)
        theirs = fake.new_stream(PRIMARY + ordinal)
        taken = dlpack.take(data.__dlpack__())
        spec = Spec(taken.shape, taken.dtype, taken.strides)

        def capsule(stream: int, version: Any) -> Any:
            fake.put("producer", theirs)
            fake.cuEventRecord(1, theirs)
            fake.cuStreamWaitEvent(stream, 1, 0)
            owner, kind = Owner(), version is not None
            self.watch = weakref.ref(owner)
            return dlpack.export(address, spec, (2, ordinal), owner, versioned=kind, flags=0)

        return Exporter((2, ordinal), capsule)

    def test_import_by_dlpack(self, fake: FakeCuda) -> None:
        device = opened()
        data = np.arange(40, dtype=np.float16).reshape(5, 8)
        array = self.exporter(fake, data)
        x = ct.from_dlpack(array)
        assert x.device is device
        assert array.asked == [device.native.stream]
        np.testing.assert_array_equal(x.numpy(), data)
        assert in_order([op for op in fake.ops if op.what in ("producer", "copy")])
        assert fake.syncs == 0
        with device.stream(fake.new_stream()) as inside:
            y = ct.from_dlpack(self.exporter(fake, data))
            produced = fake.ops[-1]
            elsewhere(lambda: (y * 2.0).native)
        assert produced.before(fake.ops[-1])  # on another thread's stream, too
        assert fake.ops[-1].stream != inside.stream
        x = y = ct.asarray(X, device=device)
        device.synchronize()
        gc.collect()
        assert self.watch() is None
        other = ct.from_dlpack(self.exporter(fake, data, 1))
        assert other.device.name == "cuda:1"
        with pytest.raises(ct.DeviceError, match="expected memory of cuda:0, got memory of cuda:1"):
            ct.from_dlpack(self.exporter(fake, data, 1), device=device)
        assert ct.from_dlpack(self.exporter(fake, data[:0])).shape == (0, 8)

    def test_slices_are_imported_in_place(self, fake: FakeCuda) -> None:
        opened()
        data = np.arange(48, dtype=np.float32).reshape(6, 8)
        address = self.filled(fake, data)
        for first, shape, strides in ((1, (5,), (1,)), (9, (4, 3), (8, 2)), (3, (3, 5), (1, 8))):
            spec = Spec(shape, ALL["f32"], strides)
            x = ct.from_dlpack(Exporter((2, 0), lambda *_, f=first, s=spec: dlpack.export(
                address + 4 * f, s, (2, 0), None, versioned=True, flags=0)))  # fmt: skip
            steps = tuple(4 * s for s in strides)
            want = np.lib.stride_tricks.as_strided(data.reshape(-1)[first:], shape, steps)
            np.testing.assert_array_equal(x.numpy(), want)
            native, start = x.native
            assert native % 16 == 0
            assert native + start == address + 4 * first

    def test_export_by_dlpack(self, fake: FakeCuda) -> None:
        device = opened()
        data = np.arange(15, dtype=np.float32).reshape(3, 5)
        x = ct.asarray(data, device=device)
        theirs = fake.new_stream()
        assert x.__dlpack_device__() == (2, 0)
        capsule = x[1:].__dlpack__(stream=theirs, max_version=(1, 0), dl_device=(2, 0), copy=None)
        taken = dlpack.take(capsule)
        address, start = x.native
        assert (taken.address, taken.strides) == (address + 32, (8, 1))  # padded rows
        assert taken.device == (2, 0)
        reader = fake.put("reader", theirs)
        assert fake.ops[0].before(reader)
        x.__dlpack__(stream=-1, max_version=(1, 0))
        default = x.__dlpack__(max_version=(1, 0))
        assert fake.ops[0].before(fake.put("reader", 1))
        del default
        for stream in (0, -2, "x", 1.5, True):
            with pytest.raises(BufferError, match="expected stream None, -1 or a CUDA stream's"):
                x.__dlpack__(stream=stream, max_version=(1, 0))
        with pytest.raises(
            BufferError, match=r"expected device \(2, 0\), got \(1, 0\); use .numpy"
        ):
            x.__dlpack__(dl_device=(1, 0))
        assert start == 0

    def test_exports_that_are_copied(self, fake: FakeCuda) -> None:
        device = opened()
        x = ct.asarray(X, device=device)
        for copy, version in ((None, None), (True, (1, 0))):
            with ct.ledger() as led:
                copied = dlpack.take(x.__dlpack__(stream=1, max_version=version, copy=copy))
            led.expect(launches=1, downloads=0)
            assert copied.address != x.native[0]
        with pytest.raises(BufferError, match="immutable"):
            x.__dlpack__(stream=1, copy=False)
        state = ct.State(X, device=device)
        assert dlpack.take(
            state.value.__dlpack__(stream=1, max_version=(1, 0))
        ).address != state.value.native[0]  # fmt: skip

    def test_a_reader_on_the_current_stream_costs_no_wait(self, fake: FakeCuda) -> None:
        device = opened()
        theirs = fake.new_stream()
        with device.stream(theirs):
            for _ in range(3):
                x = ct.asarray(X, device=device)
                taken = dlpack.take(x.__dlpack__(stream=theirs, max_version=(1, 0)))
                del x
                reader = fake.put("reader", theirs)
                del taken
                gc.collect()
        _ = ct.asarray(X, device=device).native
        assert reader.before(fake.ops[-1])
        assert in_order(fake.ops)
        assert fake.syncs == 0

    @pytest.mark.parametrize("stream", [1, 2, "theirs"])
    def test_lent_memory_is_reused_after_its_reader(self, fake: FakeCuda, stream: Any) -> None:
        device = opened()
        x = ct.asarray(X, device=device)
        address, _ = x.native
        handle = fake.new_stream() if stream == "theirs" else stream
        taken = dlpack.take(x.__dlpack__(stream=handle, max_version=(1, 0)))
        del x
        gc.collect()
        assert ct.asarray(X, device=device).native[0] != address  # it is in use
        reader = fake.put("reader", handle)
        del taken
        gc.collect()
        again = ct.asarray(X, device=device)
        assert again.native[0] == address
        assert reader.before(fake.ops[-1])
        assert fake.ops[-1].what == "copy"
        assert fake.syncs == (0 if stream == 1 else 1)
