"""Memory, devices and streams shared with other libraries: DLPack, array interfaces, natives.

What needs CUDA is tested twice: here with torch, CuPy and cuda.core, where there is a GPU, and in
tests/backends/test_cuda.py against a driver that only keeps the order of things.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.dtypes import ALL, DType
from centella.specs import Spec, dense_strides
from centella.tensors import dlpack
from tests.support.foreign import Exporter, Owner, wgpu_buffer

Array = np.ndarray[Any, Any]
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2
FAR = 0x7F0000000000  # an address that nobody may read


# -- capsules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", ALL.values(), ids=list(ALL))
def test_a_capsule_says_what_it_was_told(dtype: DType, versioned: bool) -> None:
    item = dtype.itemsize
    for shape, strides in (
        ((3, 5), (16, 1)), ((5, 3), (1, 16)), ((7,), (1,)), ((), ()), ((1, 4), (4, 1)),
    ):  # fmt: skip
        spec = Spec(shape, dtype, strides)
        capsule = dlpack.export(FAR + item, spec, (2, 3), None, versioned=versioned, flags=1)
        assert ("versioned" in repr(capsule)) == versioned
        got = dlpack.take(capsule)
        assert (got.address, got.shape, got.strides) == (FAR + item, shape, strides)
        assert (got.dtype, got.device, got.span) == (dtype, (2, 3), spec.span)


@pytest.mark.parametrize("versioned", [True, False])
def test_the_owner_lives_as_long_as_the_capsule_or_its_consumer(versioned: bool) -> None:
    def exported() -> tuple[Any, weakref.ref[Owner]]:
        owner = Owner()
        spec = Spec((3,), ALL["f32"], (1,))
        capsule = dlpack.export(FAR, spec, (1, 0), owner, versioned=versioned, flags=0)
        return capsule, weakref.ref(owner)

    unused, watch = exported()
    assert watch() is not None
    del unused
    gc.collect()
    assert watch() is None
    capsule, watch = exported()
    taken = dlpack.take(capsule)
    del capsule  # consumed: it lets nobody go
    gc.collect()
    assert watch() is not None
    memory, _ = taken.bytes(16)
    del taken
    gc.collect()
    assert watch() is not None
    del memory
    gc.collect()
    assert watch() is None


def test_the_owner_of_a_capsule_may_go_on_any_thread_and_in_an_exception() -> None:
    watches, threads = [], []
    for index in range(50):
        owner = Owner()
        watches.append(weakref.ref(owner))
        spec = Spec((3,), ALL["f32"], (1,))
        capsule = dlpack.export(FAR, spec, (1, 0), owner, versioned=True, flags=0)
        del owner
        if index % 2:
            threads.append(threading.Thread(target=lambda _: None, args=(capsule,)))
            threads[-1].start()
        with pytest.raises(ZeroDivisionError):
            _fail(capsule)
        del capsule
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert all(watch() is None for watch in watches)


def _fail(capsule: Any) -> None:
    capsules = [capsule]
    raise ZeroDivisionError(len(capsules))


def test_capsules_are_those_that_numpy_reads_and_writes() -> None:
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (data, data[:, ::2], data.T, data[1:, 2:], data[:0], data[2, 3]):
        array = np.asarray(view)
        taken = dlpack.take(array.__dlpack__(max_version=(1, 0)))
        assert taken.shape == array.shape
        if array.size:
            assert taken.address == array.ctypes.data
            said = [s * 4 for s, n in zip(taken.strides, taken.shape, strict=True) if n > 1]
            assert said == [s for s, n in zip(array.strides, array.shape, strict=True) if n > 1]
        spec = Spec(taken.shape, taken.dtype, taken.strides)
        ours = Exporter((1, 0), lambda stream, version, t=taken, s=spec: dlpack.export(
            t.address, s, (1, 0), t.owner, versioned=version is not None, flags=dlpack.READ_ONLY
        ))  # fmt: skip
        back = np.from_dlpack(ours)
        np.testing.assert_array_equal(back, array)
        assert not back.flags.writeable


@pytest.mark.parametrize(
    ("array", "kind", "text"),
    [
        (np.zeros(3), ct.DTypeError, "from_dlpack: float64 is not a storage type; expected f32"),
        (np.zeros(3, np.complex64), ct.DTypeError, "complex64 is not a storage type"),
        (np.zeros(3, np.int64), ct.DTypeError, "int64 is not a storage type"),
        (X[::-1], ct.ShapeError, r"elements apart and in order, got strides \[-4, 1\]"),
        (np.broadcast_to(np.float32(1), (3, 4)), ct.ShapeError, r"got strides \[0, 0\]"),
        (np.lib.stride_tricks.sliding_window_view(X[0], 2), ct.ShapeError, r"strides \[1, 1\]"),
        (np.zeros(9, np.uint8)[1:].view(np.float32)[:2], ct.ShapeError, "multiple of 4 bytes"),
    ],
    ids=["f64", "complex", "i64", "backwards", "repeated", "windows", "unaligned"],
)  # fmt: skip
def test_arrays_that_cannot_be_taken(array: Array, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        ct.from_dlpack(array)


def test_what_is_no_array_for_dlpack() -> None:
    for data in ([1, 2], 3, "x"):
        with pytest.raises(ct.DeviceError, match="expected an array with __dlpack__, got"):
            ct.from_dlpack(data)
    used = X.copy().__dlpack__()
    dlpack.take(used)
    for capsule in (used, object()):
        with pytest.raises(ct.DeviceError, match="a DLPack capsule not used yet, got <"):
            dlpack.take(capsule)
    with pytest.raises(ct.DeviceError, match="expected memory of the CPU or CUDA, got DLPack's 8"):
        ct.from_dlpack(Exporter((8, 0), lambda *_: None))
    with pytest.raises(ct.DeviceError, match="expected memory of simulator, got memory of cpu"):
        ct.from_dlpack(X, device="simulator")

    def refuse(*_: Any) -> Any:
        raise BufferError("not today")

    with pytest.raises(ct.DeviceError, match="from_dlpack: not today"):
        ct.from_dlpack(Exporter((1, 0), refuse))


def test_a_capsule_of_a_later_version_is_left_to_others() -> None:
    owner = Owner()
    watch = weakref.ref(owner)
    spec = Spec((3,), ALL["f32"], (1,))
    capsule = dlpack.export(FAR, spec, (1, 0), owner, versioned=True, flags=0)
    managed = dlpack._managed(capsule)
    assert managed is not None
    assert isinstance(managed[0], dlpack._Versioned)
    managed[0].major = 2
    with pytest.raises(ct.DeviceError, match=r"expected DLPack 1\.x, got 2"):
        dlpack.take(capsule)
    del owner, capsule, managed
    gc.collect()
    assert watch() is None


# -- the CPU --------------------------------------------------------------------------------------


def test_arrays_of_the_cpu_are_taken_as_they_lie() -> None:
    data = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    data.flags.writeable = False
    for view in (data, data[1:], data[:, ::2], data.transpose(2, 0, 1), data[..., 1], data[:0]):
        with ct.ledger() as led:
            x = ct.from_dlpack(view)
            assert x.shape == view.shape
            y = x + 1.0
        assert led.uploads == 0
        if view.size:
            assert np.shares_memory(x.native[0], data)
        np.testing.assert_array_equal(x.numpy(), view)
        np.testing.assert_array_equal(y.numpy(), view + 1)


def test_an_exporter_of_before_version_1() -> None:
    class Old:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, stream: Any = None) -> Any:
            assert stream is None
            return data.__dlpack__()

    data = X.copy()
    x = ct.from_dlpack(Old())
    assert np.shares_memory(x.native[0], data)
    np.testing.assert_array_equal(x.numpy(), X)


@pytest.mark.parametrize("how", ["dlpack", "buffer"])
def test_a_taken_array_lives_until_the_last_submission_is_done(how: str) -> None:
    device = ct.device("cpu")
    data = np.array(X)
    watch = weakref.ref(data)
    x = ct.from_dlpack(data) if how == "dlpack" else ct.Tensor.from_buffer(data, X.shape, "f32")
    y, batch = x * 2.0, device.batch()
    z = batch.relu(x)
    del x, data
    gc.collect()
    assert watch() is not None
    np.testing.assert_array_equal(y.numpy(), X * 2)
    batch.execute()
    np.testing.assert_array_equal(z.numpy(), np.maximum(X, 0))
    device.synchronize()
    gc.collect()
    assert watch() is None


def test_values_are_shared_only_with_whom_can_be_told() -> None:
    x = ct.asarray(X, device="cpu") * 1.0
    state = ct.State(X, device="cpu")
    for tensor, shared in ((x, True), (x.T[1:], True), (state.value, False)):
        array = np.from_dlpack(tensor)
        np.testing.assert_array_equal(array, tensor.numpy())
        assert np.shares_memory(array, tensor.native[0]) == shared
        assert array.flags.writeable != shared
    loose = np.from_dlpack(x, copy=True)
    loose[:] = 0
    np.testing.assert_array_equal(x.numpy(), X)
    with pytest.raises(RuntimeError, match="Unsupported dtype"):
        np.from_dlpack(x.astype("bf16"))
    private = dlpack.take(x.__dlpack__())
    assert private.address != x.native[0].ctypes.data
    assert private.strides == dense_strides(X.shape)
    with pytest.raises(BufferError, match=r"values are immutable; ask for version 1\.0 or a copy"):
        x.__dlpack__(copy=False)
    with pytest.raises(BufferError, match=r"ask for version 1\.0 or a copy"):
        state.value.__dlpack__(copy=False, max_version=(1, 0))


@pytest.mark.devices("cpu", "simulator", "webgpu")
def test_exports_that_are_refused(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    if device.name == "cpu":
        with pytest.raises(BufferError, match="expected no stream on the CPU, got 7"):
            x.__dlpack__(stream=7)
        with pytest.raises(BufferError, match=r"expected device \(1, 0\), got \(2, 0\)"):
            x.__dlpack__(dl_device=(2, 0))
    else:
        with pytest.raises(BufferError, match=r"does not export memory; use \.numpy\(\)"):
            x.__dlpack__(max_version=(1, 0))
        with pytest.raises(BufferError, match="not export memory"):
            device.lend(x._value, None)
    waiting = device.batch().relu(x)
    with pytest.raises(ct.ContractError if device.name == "cpu" else BufferError):
        waiting.__dlpack__(max_version=(1, 0))


def test_arrays_of_torch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    half = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    x = ct.from_dlpack(half[:, 1:].T)
    assert x.dtype is ct.bf16
    np.testing.assert_array_equal(x.numpy(), half[:, 1:].T.float().numpy())
    back = torch.from_dlpack(x * 2.0)
    assert back.dtype is torch.bfloat16
    np.testing.assert_array_equal(back.float().numpy(), 2 * x.numpy())
    for dtype in (torch.bool, torch.int8, torch.uint8, torch.int32, torch.float16):
        data = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype)
        taken = ct.from_dlpack(data)
        np.testing.assert_array_equal(taken.numpy(), data.numpy())
        assert torch.equal(torch.from_dlpack(taken), data)
    with pytest.raises(ct.DeviceError, match="gradient"):
        ct.from_dlpack(torch.zeros(2, requires_grad=True))


@pytest.mark.devices("cpu", "simulator", "webgpu")
def test_streams_are_those_of_cuda(device: ct.Device) -> None:
    with (
        pytest.raises(ct.DeviceError, match=r"stream: expected a CUDA device, got \w+"),
        device.stream(1),
    ):
        raise AssertionError


# -- devices of the application -------------------------------------------------------------------


def test_natives_that_are_none() -> None:
    for native in (object(), "webgpu", 1.5, True, np.zeros(2)):
        with pytest.raises(ct.DeviceError, match=r"expected a wgpu device, a CUDA .* got"):
            ct.device(native=native)
    for kind in ("cpu", "simulator"):
        with pytest.raises(ct.DeviceError, match=f"{kind}: expected no native=, it has no driver"):
            ct.device(kind, native=3)


@pytest.mark.devices("webgpu")
class TestWgpuDevices:
    """A wgpu device that the application made."""

    @staticmethod
    def new_native(device: ct.Device, **limits: int) -> Any:
        adapter: Any = device.native.adapter
        return adapter.request_device_sync(required_limits=limits)

    def test_its_limits_are_respected(self, device: ct.Device) -> None:
        native = self.new_native(device)  # WebGPU's defaults
        own = ct.device(native=native)
        assert own.native is native
        assert own.caps.max_storage_buffers == native.limits["max-storage-buffers-per-shader-stage"]
        assert own.caps.max_binding <= native.limits["max-storage-buffer-binding-size"]
        assert own.caps.max_shared == native.limits["max-compute-workgroup-storage-size"]
        x = ct.asarray(X, device=own)
        np.testing.assert_allclose(ct.softmax(x @ x.T).numpy().sum(-1), 1, rtol=1e-6)
        with pytest.raises(ct.LimitError):
            ct.empty(own.caps.max_buffer // 4 + 4, device=own)

    def test_one_wgpu_device_is_one_device(self, device: ct.Device) -> None:
        native = self.new_native(device)
        own = ct.device(native=native)
        assert ct.device(native=native) is own
        assert ct.device("webgpu", native=native) is own
        assert ct.device(native=self.new_native(device)) is not own
        assert ct.device("webgpu", native=native, pool="exact") is not own

    def test_closing_a_device_leaves_the_native_one_and_its_buffers(
        self, device: ct.Device
    ) -> None:
        native = self.new_native(device)
        theirs = wgpu_buffer(native, X)
        own = ct.device(native=native)
        x = ct.Tensor.from_buffer(theirs, X.shape, "f32", device=own)
        np.testing.assert_array_equal((x + 1.0).numpy(), X + 1)
        own.close()
        with pytest.raises(ct.DeviceLostError, match="it was closed"):
            (x + 1.0).numpy()
        data = native.queue.read_buffer(theirs)
        np.testing.assert_array_equal(np.frombuffer(data, np.float32), X.reshape(-1))
        again = ct.device(native=native)
        assert again is not own
        y = ct.Tensor.from_buffer(theirs, X.shape, "f32", device=again)
        np.testing.assert_array_equal((y + 2.0).numpy(), X + 2)

    def test_what_is_no_wgpu_device(self, device: ct.Device) -> None:
        for native in (object(), device.native.adapter, 3):
            with pytest.raises(ct.DeviceError, match="expected a wgpu device as native=, got"):
                ct.device("webgpu", native=native)
        for name, options in (("webgpu:0", {}), ("webgpu", {"minimum": True})):
            with pytest.raises(ct.DeviceError, match="is used as it is, got"):
                ct.device(name, native=self.new_native(device), **options)


# -- CUDA, on a GPU -------------------------------------------------------------------------------

WAIT = 100_000_000  # clock ticks, some 50 ms: long enough to be seen by whoever does not wait


def library(name: str) -> Any:
    """torch or CuPy with a GPU, or a skip."""
    module = pytest.importorskip(name)
    if name == "torch" and not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


def ordinal_of(device: ct.Device) -> int:
    return int(device.native.ordinal)


class Probe:
    """A tensor that notes how it is asked for."""

    def __init__(self, tensor: ct.Tensor) -> None:
        self.tensor = tensor
        self.asked: dict[str, Any] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **asked: Any) -> Any:
        self.asked = asked
        return self.tensor.__dlpack__(**asked)


@pytest.mark.devices("cuda")
class TestTorch:
    """Tensors of torch on the same GPU."""

    def test_tensors_come_in_as_they_lie(self, device: ct.Device) -> None:
        torch = library("torch")
        whole = torch.arange(60, dtype=torch.float32, device=device.name).reshape(3, 4, 5)
        for view in (whole, whole[1:], whole[:, 1:3], whole[..., 1:], whole.permute(2, 0, 1)):
            with ct.ledger() as led:
                x = ct.from_dlpack(view, device=device)
                y = x + 1.0
            led.expect(uploads=0, downloads=0, copies=0)
            native, start = x.native
            assert native + start == view.data_ptr()
            np.testing.assert_array_equal(x.numpy(), view.cpu().numpy())
            np.testing.assert_array_equal(y.numpy(), view.cpu().numpy() + 1)
        for dtype in (torch.bool, torch.int8, torch.uint8, torch.int32, torch.float16):
            data = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype, device=device.name)
            taken = ct.from_dlpack(data, device=device)
            np.testing.assert_array_equal(taken.numpy(), data.cpu().numpy())
        half = torch.randn(7, 9, device=device.name).bfloat16()
        taken = ct.from_dlpack(half, device=device)
        np.testing.assert_array_equal(taken.numpy(), half.float().cpu().numpy())
        np.testing.assert_allclose(
            ct.softmax(taken.astype("f32")).numpy(), half.float().softmax(-1).cpu(), atol=1e-6
        )
        with pytest.raises(ct.DTypeError, match="float64 is not a storage type"):
            ct.from_dlpack(torch.zeros(3, dtype=torch.float64, device=device.name), device=device)
        with pytest.raises(ct.ShapeError, match="contiguous copy"):
            ct.from_dlpack(torch.zeros(1, device=device.name).expand(3), device=device)

    def test_work_under_way_is_waited_for(self, device: ct.Device) -> None:
        torch = library("torch")
        takes: list[Callable[[Any], ct.Tensor]] = [
            lambda t: ct.from_dlpack(t, device=device),
            lambda t: ct.Tensor.from_buffer(t, tuple(t.shape), "f32", device=device),
            lambda t: ct.Tensor.from_buffer(
                (t.data_ptr(), 4 * t.numel()), tuple(t.shape), "f32", device=device
            ),
        ]
        for take in takes:
            for stream in (torch.cuda.Stream(device.name), torch.cuda.default_stream(device.name)):
                data = torch.zeros(1 << 16, device=device.name)
                torch.cuda.synchronize(device.name)
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(WAIT)
                    data.fill_(3)
                    x = take(data)
                assert ((x + 1.0).numpy() == 4).all()

    def test_tensors_go_out(self, device: ct.Device) -> None:
        torch = library("torch")
        for dtype in ("f32", "f16", "bf16", "i32", "i8", "u8"):
            data = np.arange(15, dtype=np.float32).reshape(3, 5)
            probe = Probe(ct.asarray(data, dtype=dtype, device=device))
            out = torch.from_dlpack(probe)
            assert out.device == torch.device(device.name)
            assert (out.float().cpu().numpy() == data).all()
            told = (probe.asked.get("max_version") or (0, 8)) >= (1, 0)
            assert (out.data_ptr() == sum(probe.tensor.native)) == told
        rows = torch.from_dlpack(ct.asarray(X[:, :3], device=device))
        np.testing.assert_array_equal(rows.cpu().numpy(), X[:, :3])
        flags = torch.from_dlpack(ct.asarray(X > 0, device=device))
        assert flags.dtype is torch.bool
        np.testing.assert_array_equal(flags.cpu().numpy(), X > 0)
        assert torch.from_dlpack(ct.zeros((0, 3), device=device)).shape == (0, 3)

    def test_a_consumer_waits_for_what_is_computed(self, device: ct.Device) -> None:
        torch = library("torch")
        x = ct.asarray(np.eye(2048, dtype=np.float32), device=device)
        for stream in (torch.cuda.Stream(device.name), torch.cuda.default_stream(device.name)):
            y = x * 2.0
            for _ in range(10):
                y = y @ x
            with torch.cuda.stream(stream):
                got = torch.from_dlpack(y).clone()
            stream.synchronize()
            assert torch.equal(got.cpu(), 2 * torch.eye(2048))

    def test_memory_is_reused_after_its_reader(self, device: ct.Device) -> None:
        torch = library("torch")
        own = ct.device("cuda", native=ordinal_of(device), pool="reuse")
        for stream in (torch.cuda.default_stream(device.name), torch.cuda.Stream(device.name)):
            x = ct.asarray(np.full(1 << 20, 5, np.float32), device=own)
            address = x.native[0]
            with torch.cuda.stream(stream):
                out = torch.from_dlpack(x)
                torch.cuda._sleep(WAIT)
                got = out + 1
            del out, x
            gc.collect()
            again = ct.zeros(1 << 20, device=own)
            assert again.native[0] == address
            own.synchronize()
            stream.synchronize()
            assert bool((got == 6).all())
            del again  # or its memory is what the next turn gets

    def test_one_stream_for_both(self, device: ct.Device) -> None:
        torch = library("torch")
        step = ct.jit(lambda x: x * 2.0, device=device)
        for stream in (torch.cuda.Stream(device.name), torch.cuda.default_stream(device.name)):
            before = ct.asarray(np.ones(1 << 16, np.float32), device=device) + 1.0
            with torch.cuda.stream(stream), device.stream(stream) as native:
                assert native.stream == (stream.cuda_stream or 1)
                torch.cuda._sleep(WAIT)
                data = torch.full((1 << 16,), 3.0, device=device.name)
                x = ct.from_dlpack(data, device=device) + before
                y = step(x)
                out = torch.from_dlpack(y) * 10
            after = x + 1.0
            assert (after.numpy() == 6).all()
            stream.synchronize()
            assert bool((out == 100).all())

    def test_torch_names_devices(self, device: ct.Device) -> None:
        torch = library("torch")
        first = ct.device("cuda", native=torch.device(device.name))
        assert ct.device("cuda", native=ordinal_of(device)) is first
        assert ct.device(native=torch.device(device.name)) is first
        with pytest.raises(ct.DeviceError, match="expected an ordinal"):
            ct.device("cuda", native=torch.device("cpu"))

    def test_the_owner_is_let_go(self, device: ct.Device) -> None:
        torch = library("torch")
        torch.cuda.synchronize(device.name)
        before = torch.cuda.memory_allocated(device.name)
        x = ct.from_dlpack(torch.ones(1 << 20, device=device.name), device=device)
        y = x + 1.0
        del x
        assert torch.cuda.memory_allocated(device.name) > before
        assert (y.numpy() == 2).all()
        device.synchronize()
        gc.collect()
        assert torch.cuda.memory_allocated(device.name) == before


@pytest.mark.devices("cuda")
class TestCupy:
    """Arrays of CuPy on the same GPU."""

    def test_arrays_are_imported_and_exported(self, device: ct.Device) -> None:
        cupy = library("cupy")
        with cupy.cuda.Device(ordinal_of(device)):
            data = cupy.arange(24, dtype=cupy.float32).reshape(4, 6)
            for view in (data, data[:, 1:4], data.T):
                x = ct.from_dlpack(view, device=device)
                assert sum(x.native) == view.data.ptr
                np.testing.assert_array_equal((x + 1.0).numpy(), cupy.asnumpy(view) + 1)
            y = ct.Tensor.from_buffer(data, (4, 6), "f32", device=device)
            np.testing.assert_array_equal(y.numpy(), cupy.asnumpy(data))
            out = cupy.from_dlpack(y * 2.0)
            np.testing.assert_array_equal(cupy.asnumpy(out + 1), 2 * cupy.asnumpy(data) + 1)
            with pytest.raises(ct.DeviceError, match="C-contiguous"):
                ct.Tensor.from_buffer(data.T, (6, 4), "f32", device=device)

    def test_one_stream_for_both(self, device: ct.Device) -> None:
        cupy = library("cupy")
        with cupy.cuda.Device(ordinal_of(device)):
            for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
                with stream, device.stream(stream):
                    data = cupy.full(1 << 20, 3, cupy.float32)
                    x = ct.Tensor.from_buffer(data, data.size, "f32", device=device)
                    out = cupy.from_dlpack(x + 1.0) * 2
                stream.synchronize()
                assert bool((out == 8).all())


@pytest.mark.devices("cuda")
class TestDriver:
    """Contexts and streams of the application's, by NVIDIA's own bindings."""

    @staticmethod
    def new_context(ordinal: int) -> tuple[Any, Any]:
        from cuda.bindings import driver

        rest = (0, check(driver.cuDeviceGet(ordinal)))
        if importlib.metadata.version("cuda-bindings").startswith("12."):
            context = check(driver.cuCtxCreate(*rest))
        else:
            context = check(driver.cuCtxCreate(None, *rest))
        check(driver.cuCtxPopCurrent())
        return driver, context

    def test_a_context_of_the_application(self, device: ct.Device) -> None:
        driver, context = self.new_context(ordinal_of(device))
        own = ct.device("cuda", native=context)
        assert ct.device("cuda", native=int(context)) is own
        assert own.native.context == int(context) != device.native.context
        x = ct.asarray(X, device=own)
        np.testing.assert_allclose(ct.softmax(x @ x.T).numpy().sum(-1), 1, rtol=1e-6)
        native = (x.native[0], 48)
        with pytest.raises(ct.DeviceError, match="expected memory of context"):
            ct.Tensor.from_buffer(native, X.shape, "f32", device=device)
        np.testing.assert_array_equal(
            ct.Tensor.from_buffer(native, X.shape, "f32", device=own).numpy(), X
        )
        with pytest.raises(ct.DeviceError, match="expected a stream of"):  # noqa: SIM117
            with own.stream(device.native.stream):
                raise AssertionError
        del x
        own.close()
        check(driver.cuCtxPushCurrent(context))
        check(driver.cuMemFree(check(driver.cuMemAlloc(256))))
        check(driver.cuCtxPopCurrent())
        check(driver.cuCtxDestroy(context))
        np.testing.assert_array_equal(ct.asarray(X, device=device).numpy(), X)

    def test_the_callers_context_is_left_current(self, device: ct.Device) -> None:
        driver, context = self.new_context(ordinal_of(device))
        check(driver.cuCtxPushCurrent(context))
        with device.stream():
            np.testing.assert_array_equal((ct.asarray(X, device=device) + 1.0).numpy(), X + 1)
            assert int(check(driver.cuCtxGetCurrent())) == int(context)
        assert int(check(driver.cuCtxGetCurrent())) == int(context)
        check(driver.cuCtxPopCurrent())
        check(driver.cuCtxDestroy(context))

    def test_cuda_core(self, device: ct.Device) -> None:
        core = pytest.importorskip("cuda.core")
        theirs = core.Device(ordinal_of(device))
        theirs.set_current()
        stream = theirs.create_stream()
        assert ct.device("cuda", native=theirs).name == device.name
        with device.stream(stream) as native:
            assert native.stream == int(stream.handle)
            np.testing.assert_array_equal((ct.asarray(X, device=device) + 1.0).numpy(), X + 1)
        ours = theirs.create_stream(device.native)
        assert int(ours.handle) == device.native.stream
        stream.sync()

    def test_many_streams_and_threads(self, device: ct.Device) -> None:
        x = ct.asarray(np.eye(256, dtype=np.float32), device=device)

        def work(seed: int) -> None:
            for _ in range(20):
                with device.stream() if seed % 2 else contextlib.nullcontext():
                    y = x * float(seed)
                    for _ in range(5):
                        y = y @ x
                    assert (y.numpy() == seed * np.eye(256)).all()

        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(work, seed) for seed in range(6)]:
                done.result(120)


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call."""
    assert result[0] == 0, result[0]
    return result[1] if len(result) > 1 else None
