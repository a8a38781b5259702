"""The contracts that hold on every backend, each as a test.

Contract 5 is tested with replay (test_jit.py), contract 6 with the products (test_ops.py).
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.runtime.pipelines import PipelineCache
from tests.support.devices import own
from tests.support.foreign import foreign
from tests.support.threads import THREADS, together

Array = np.ndarray[Any, Any]
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2


def network(x: ct.Tensor, w: ct.Tensor) -> ct.Tensor:
    return ct.softmax(ct.gelu(x @ w, "tanh") + x)


def float64(x: Array, w: Array) -> Array:
    """`network` on the host."""
    y = x.astype(np.float64) @ w
    grown = np.exp(0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) + x)
    return np.asarray(grown / grown.sum(-1, keepdims=True))


# -- 1: a distinct kernel compiles once -----------------------------------------------------------


@pytest.mark.devices("simulator", "webgpu", "webgpu-minimum", "cuda", "webgpu-hardware")
def test_each_program_is_compiled_once_whatever_the_threads(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = own(device)
    compiled: Counter[str] = Counter()
    raw = where.backend.compile

    def counted(program: Any) -> Any:
        compiled[program.key] += 1
        return raw(program)

    monkeypatch.setattr(where.backend, "compile", counted)
    pipelines = Counter[str]()
    if device.name.startswith("webgpu"):
        make = where.native.create_compute_pipeline

        def driver(**named: Any) -> Any:
            pipelines["made"] += 1
            return make(**named)

        monkeypatch.setattr(where.native, "create_compute_pipeline", driver)
    if device.name.startswith("cuda"):
        from centella.backends.cuda.driver import driver as cuda

        load = cuda.cuModuleLoadDataEx

        def module(*given: Any) -> Any:
            pipelines["made"] += 1
            return load(*given)

        monkeypatch.setattr(cuda, "cuModuleLoadDataEx", module)
    rng = np.random.default_rng(0)
    data = rng.standard_normal((16, 16), np.float32)

    def work(index: int) -> Array:
        rows = data[: 4 + index]
        for _ in range(3):
            x, w = ct.asarray(rows, device=where), ct.asarray(data, device=where)
            result = network(x, w).numpy()
            with where.batch() as batch:
                network(batch.upload(rows), batch.upload(data))
        return result

    results = together(work)
    assert compiled
    assert set(compiled.values()) == {1}
    assert len(compiled) == len(where.cache) == where.cache.misses
    if where.name != "simulator":
        assert pipelines["made"] == len(compiled)
    for index, result in enumerate(results):
        np.testing.assert_array_equal(result, results[-1][: 4 + index])
    np.testing.assert_allclose(results[-1], float64(data[:11], data), rtol=1e-5, atol=1e-7)


def test_a_cache_compiles_once_for_threads_that_ask_together() -> None:
    cache = PipelineCache()
    started = threading.Event()
    calls: list[str] = []

    def compile_(key: str) -> Callable[[], str]:
        def run() -> str:
            calls.append(key)
            started.wait(0.05)
            return f"native {key}"

        return run

    def work(index: int) -> list[str]:
        keys = [str((index + i) % 5) for i in range(5)]
        return sorted(cache.get(1, k, f"name {k}", compile_(k)).native for k in keys)

    results = together(work)
    assert sorted(calls) == ["0", "1", "2", "3", "4"]
    assert all(r == [f"native {k}" for k in range(5)] for r in results)
    assert (cache.misses, cache.hits, len(cache)) == (5, 35, 5)
    assert cache.names() == [f"name {k}" for k in range(5)]
    cache.get(2, "0", "name 0", compile_("0"))  # another device
    assert len(calls) == 6


def test_a_failed_compile_fails_for_all_who_wait_and_is_not_kept() -> None:
    cache = PipelineCache()
    gate = threading.Event()
    attempts: list[int] = []

    def bad() -> Any:
        attempts.append(1)
        gate.wait(0.05)
        raise ct.CompileError("k", "source", "log")

    def work(index: int) -> str:
        try:
            cache.get(1, "key", "k", bad)
        except ct.CompileError as error:
            return error.log
        return ""

    assert set(together(work)) == {"log"}
    assert len(cache) == 0
    assert cache.names() == []
    assert cache.get(1, "key", "k", lambda: "good").native == "good"


@pytest.mark.devices("simulator", "webgpu", "cuda", "webgpu-hardware")
def test_keys_are_content(device: ct.Device) -> None:
    """Two kernels of one text are one program; another constant is another."""

    def make(factor: float) -> ct.UserKernel:
        @ct.kernel(workgroup=64)
        def twin(x: ct.In[ct.f32], y: ct.Out[ct.f32], n: ct.u32) -> None:
            i = ct.lang.global_id()
            with ct.lang.if_(i < n):
                y[i] = x[i] * factor

        return twin

    where = own(device)
    x = ct.asarray(X.reshape(-1), device=where)
    with ct.ledger() as led:
        for factor, compiles in ((2.0, 1), (2.0, 1), (3.0, 2)):
            y = ct.empty(12, device=where)
            make(factor)(x, y, n=12, threads=12)
            np.testing.assert_array_equal(y.numpy(), X.reshape(-1) * np.float32(factor))
            led.expect(compiles=compiles)


# -- 2: one batch, one submission -----------------------------------------------------------------


def test_one_batch_is_one_submission(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    where = own(device)
    submits: list[Any] = []
    raw = where.backend.submit

    def counted(work: Any) -> Any:
        submits.append(work)
        return raw(work)

    monkeypatch.setattr(where.backend, "submit", counted)
    calls = Counter[str]()
    if device.name.startswith("webgpu"):
        from centella.backends.webgpu import raw as driver

        class Counted:
            """wgpu-native, each call counted."""

            def __getattr__(self, name: str, native: Any = driver.lib) -> Any:
                calls[name] += 1
                return getattr(native, name)

        monkeypatch.setattr(driver, "lib", Counted())
    with ct.ledger() as led:
        batch = where.batch()
        x, same = batch.upload(X), batch.upload(np.eye(X.shape[1], dtype=np.float32))
        for _ in range(40):
            x = batch.add(batch.matmul(x, same), 1.0)
        batch.execute().result()
    led.expect(submissions=1, launches=80, uploads=1, downloads=0)
    assert len(submits) == 1
    assert calls["wgpuQueueSubmit"] == (1 if device.name.startswith("webgpu") else 0)


# -- 3: imported memory ---------------------------------------------------------------------------


def test_imported_memory_is_shared_by_batches_and_threads(device: ct.Device) -> None:
    where = own(device)
    data = np.arange(1 << 12, dtype=np.float32)

    def share(native: Any) -> weakref.ref[Any]:
        def work(index: int) -> Array:
            for _ in range(5):
                batch = where.batch()
                x = batch.import_buffer(native, (64, 64), "f32")
                y = batch.add(x, float(index))
                batch.execute(outputs=[y])
            result: Array = batch.read(y)
            return result

        before = ct.totals()
        results = together(work)
        assert (ct.totals() - before).uploads == 0
        for index, result in enumerate(results):
            np.testing.assert_array_equal(result.reshape(-1), data + np.float32(index))
        again = ct.Tensor.from_buffer(native, data.shape, "f32", device=where)
        np.testing.assert_array_equal(again.numpy(), data)
        return weakref.ref(native)

    watch = share(foreign(where, data))
    for _ in range(2):
        where.synchronize()
        gc.collect()
    assert watch() is None


# -- 4: a resident chain --------------------------------------------------------------------------


def test_a_resident_chain_moves_its_inputs_and_its_result(device: ct.Device) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((8, 16), np.float32), rng.standard_normal((16, 16), np.float32)
    with ct.ledger() as led:
        state, weight = ct.asarray(x, device=device), ct.asarray(w, device=device)
        for _ in range(4):
            state = network(state, weight)
        result = state.numpy()
    led.expect(uploads=1, downloads=1, submissions=1)
    for _ in range(4):
        x = float64(x, w)
    np.testing.assert_allclose(result, x, rtol=1e-5)


# -- 7: equal inputs, equal bits ------------------------------------------------------------------


def test_equal_inputs_give_equal_bits(device: ct.Device) -> None:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((33, 65), np.float32), rng.standard_normal((65, 65), np.float32)

    def run(where: ct.Device) -> bytes:
        a, b = ct.asarray(x, device=where), ct.asarray(w, device=where)
        y = network(a, b)
        return ct.sum(y * y, axis=0).numpy().tobytes() + y.numpy().tobytes()

    first = run(device)
    assert run(device) == first
    where = own(device)
    assert {run(where) for _ in range(3)} == {first}
    turns = 1 if device.name == "simulator" else 5
    assert together(lambda _: {run(where) for _ in range(turns)}) == [{first}] * THREADS


# -- 8: every intermediate ------------------------------------------------------------------------


def test_every_intermediate_reads_right(device: ct.Device) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, 7), np.float32)
    batch = device.batch()
    pairs: list[tuple[ct.Tensor, Array]] = [(batch.upload(x), x)]
    for step in range(6):
        tensor, want = pairs[-1]
        if step % 3 == 0:
            pairs.append((batch.scale(tensor, 1.5), want * np.float32(1.5)))
        elif step % 3 == 1:
            pairs.append((batch.relu(tensor), np.maximum(want, 0)))
        else:
            pairs.append((batch.sub(tensor, pairs[0][0]), want - x))
    batch.execute()
    for tensor, want in reversed(pairs):
        np.testing.assert_allclose(batch.read(tensor), want, rtol=1e-6, atol=1e-6)


# -- hammering ------------------------------------------------------------------------------------


@pytest.mark.devices("cpu", "webgpu", "cuda", "webgpu-hardware")
def test_eight_threads_on_one_device(device: ct.Device) -> None:
    """Lazy chains, batches, shared tensors, failures and read-backs at the same time."""
    where = own(device, pool="poison" if device.name != "cpu" else "reuse")
    shared = ct.asarray(X, device=where) + 1.0

    def work(seed: int) -> int:
        rng = np.random.default_rng(seed)
        done = 0
        for turn in range(25):
            data = rng.standard_normal((int(rng.integers(1, 9)), 4)).astype(np.float32)
            lazy = ct.asarray(data, device=where) * 2.0
            with where.batch() as batch:
                kept = ct.relu(batch.upload(data)) + lazy
            got = ct.fetch(kept, lazy, shared).result()
            np.testing.assert_array_equal(got[0], np.maximum(data, 0) + 2 * data)
            np.testing.assert_array_equal(got[1], 2 * data)
            np.testing.assert_array_equal(got[2], X + 1)
            if turn % 5 == 0:
                with pytest.raises(KeyError), where.batch() as batch:
                    lost = batch.relu(batch.upload(data))
                    raise KeyError
                with pytest.raises(ct.ContractError):
                    lost.numpy()
            done += 1
        return done

    assert together(work) == [25] * THREADS
