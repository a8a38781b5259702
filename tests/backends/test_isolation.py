"""What a kernel and a new tensor show of other tensors: nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from tests.support.devices import own

Array = np.ndarray[Any, Any]
f32, u32 = ct.f32, ct.u32
SECRET, OWN = 7777.0, 1.0
N = 4096  # elements that the kernel asks for, of a tensor that has fewer
BOUNDED = ("cpu", "simulator", "webgpu", "webgpu-minimum", "webgpu-hardware")  # not CUDA


@ct.kernel(workgroup=64)
def look(x: ct.In[f32], y: ct.Out[f32], first: u32) -> None:
    """y = x from `first` on, which may be below 0, without asking how long x is."""
    i = lang.global_id()
    y[i] = x[first + i]


@ct.kernel(workgroup=64)
def write_every(changed: ct.InOut[f32], first: u32) -> None:
    changed[first + lang.global_id()] = -5.0


def seen(x: ct.Tensor, first: int) -> Array:
    """What `look` finds from an element on; an empty array where the device refuses."""
    y = ct.empty(N, device=x.device)
    with contextlib.suppress(ct.SimulationError):
        look(x, y, first=first % 2**32, threads=N)
        return y.numpy()
    x.device.recorder.implicit().fail()
    return np.empty(0, np.float32)


@pytest.mark.devices(*BOUNDED)
@pytest.mark.parametrize("first", [0, 5, -64, -1024, 300])
@pytest.mark.parametrize("size", [1, 5, 64, 300])
def test_a_kernel_sees_no_other_tensor_of_an_upload(
    device: ct.Device, first: int, size: int
) -> None:
    with device.batch() as batch:
        tensors = [
            batch.upload(np.full(n, value, np.float32))
            for n, value in ((700, SECRET), (size, OWN), (700, SECRET))
        ]
        kept = [batch.keep(t) for t in tensors]
    assert SECRET not in seen(tensors[1], first)
    assert SECRET not in seen(tensors[1][size // 2 :], first)
    assert SECRET not in seen(tensors[1][size:], first)
    np.testing.assert_array_equal(tensors[2].numpy(), np.full(700, SECRET, np.float32))
    del kept


@pytest.mark.devices(*BOUNDED)
def test_a_kernel_sees_no_other_input_of_a_replay(device: ct.Device) -> None:
    def both(x: ct.Tensor, other: ct.Tensor) -> tuple[ct.Tensor, ct.Tensor]:
        y = ct.empty(N, device=device)
        look(x[3:], y, first=0, threads=N)
        return y, other * 2.0

    x, other = np.full(40, OWN, np.float32), np.full(700, SECRET, np.float32)
    with contextlib.suppress(ct.SimulationError):
        fn = device.compile(both, x, other)
        for _ in range(3):
            y, doubled = fn(x, other)
            got = y.numpy()
            np.testing.assert_array_equal(got[:37], x[3:])
            assert SECRET not in got
            np.testing.assert_array_equal(doubled.numpy(), 2 * other)
        return
    assert device.name in ("cpu", "simulator")


@pytest.mark.devices(*BOUNDED)
def test_a_kernel_sees_nothing_that_was_freed(device: ct.Device) -> None:
    """A buffer is larger than its tensor; what was there before is behind the end."""
    where = own(device)
    secret = ct.full(1000, SECRET, device=where)
    secret.numpy()
    del secret
    x = ct.full(900, OWN, device=where)
    assert x.numpy().shape == (900,)
    assert SECRET not in seen(x, 0)


@pytest.mark.devices(*BOUNDED)
def test_a_kernel_writes_into_no_other_tensor(device: ct.Device) -> None:
    state = ct.State(np.zeros(5, np.float32), device=device)
    secret = ct.State(np.full(500, SECRET, np.float32), device=device)
    ct.fetch(state.value, secret.value).result()
    with contextlib.suppress(ct.SimulationError):
        write_every(state, first=0, threads=4096)
        state.numpy()
    np.testing.assert_array_equal(secret.numpy(), np.full(500, SECRET, np.float32))


@pytest.mark.devices(*BOUNDED)
def test_views_with_their_windows_are_right(device: ct.Device) -> None:
    data = np.arange(1000, dtype=np.float32)
    x = ct.asarray(data, device=device)
    for start, stop in ((0, 1000), (1, 999), (64, 128), (63, 700), (900, 1000)):
        n = stop - start
        y = ct.empty(n, device=device)
        copied(x[start:stop], y, n=n, threads=n)
        np.testing.assert_array_equal(y.numpy(), data[start:stop])
        y = ct.empty(n, device=device)
        copied((x + 1.0)[start:stop], y, n=n, threads=n)
        np.testing.assert_array_equal(y.numpy(), data[start:stop] + 1)


@ct.kernel(workgroup=64)
def copied(x: ct.In[f32], y: ct.Out[f32], n: u32) -> None:
    i = lang.global_id()
    with lang.if_(i < n):
        y[i] = x[i]


@pytest.mark.devices("cpu", "webgpu", "webgpu-minimum", "webgpu-hardware", "cuda")
def test_a_pool_that_clears_shows_nothing_that_was_freed(device: ct.Device) -> None:
    where = own(device, pool="clear")
    for n in (5, 300, 5000):
        secret = ct.full(n, SECRET, device=where)
        total = float(ct.sum(secret).numpy())
        assert total == SECRET * n
        del secret
        np.testing.assert_array_equal(ct.empty(n, device=where).numpy(), np.zeros(n, np.float32))
        x = ct.asarray(np.full(3 * n, SECRET, np.float32), device=where)
        assert (x * 2.0).numpy().min() == 2 * SECRET
        del x
        y = ct.empty((3, n), device=where)
        np.testing.assert_array_equal(y.numpy(), np.zeros((3, n), np.float32))


@pytest.mark.devices("cpu", "webgpu", "cuda")
def test_a_pool_that_clears_does_so_for_replays(device: ct.Device) -> None:
    """An output that its kernel writes in part holds zeros elsewhere, also as a temporary."""
    where = own(device, pool="clear")

    def secret(x: ct.Tensor) -> ct.Tensor:
        return ct.softmax(ct.softmax(x) + SECRET) * SECRET

    def partly(x: ct.Tensor) -> ct.Tensor:
        y = ct.empty(x.shape, device=where)
        copied(x, y, n=10, threads=10)
        return ct.softmax(y.reshape(8, -1))

    x = np.full((8, 600), SECRET, np.float32)
    first = where.compile(secret, x)
    first(x).numpy()
    second = where.compile(partly, x.reshape(-1))
    first(x).numpy()
    got = second(np.full(4800, 3.0, np.float32)).numpy()
    assert (got[1:] == np.float32(1 / 600)).all()


@pytest.mark.devices("cpu", "simulator", "webgpu")
def test_clearing_is_counted_nowhere(device: ct.Device) -> None:
    where = own(device, pool="clear")
    with ct.ledger() as led:
        (ct.asarray(np.ones(10, np.float32), device=where) + 1.0).numpy()
    led.expect(uploads=1, downloads=1, submissions=1)


@ct.kernel(workgroup=64)
def scaled(x: ct.In[f32], s: ct.Scalar[f32], y: ct.Out[f32], n: u32) -> None:
    i = lang.global_id()
    with lang.if_(i < n):
        y[i] = x[i] * s.value


@pytest.mark.devices("simulator", "webgpu")
def test_imported_memory_may_end_within_a_chunk(device: ct.Device) -> None:
    def imported(data: Array) -> Any:
        if device.name == "simulator":
            return data
        import wgpu

        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
        return device.native.create_buffer_with_data(data=data, usage=usage)

    with device.batch() as batch:
        s = batch.import_buffer(imported(np.array([3.0], np.float32)), (1,), f32)
        x = batch.import_buffer(imported(np.arange(5, dtype=np.float32)), (5,), f32)
        y = ct.empty(5, device=device)
        scaled(x, s, y, n=5, threads=5)
    np.testing.assert_array_equal(batch.read(y), 3 * np.arange(5, dtype=np.float32))
