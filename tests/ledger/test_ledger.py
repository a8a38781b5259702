"""The ledger: what is counted, what is forbidden, how scopes follow the work."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.ledger.counts import count
from tests.support.devices import own

Array = np.ndarray[Any, Any]
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2
LARGE = np.arange(1 << 15, dtype=np.float32)


def chain(device: ct.Device, data: Array = X) -> ct.Tensor:
    """Three launches: the sum and relu are one, softmax, the product."""
    with device.batch() as batch:
        return ct.softmax(ct.relu(batch.upload(data) + 1.0)) * 2.0


# -- counts ---------------------------------------------------------------------------------------


def test_counts_are_the_same_on_every_backend(device: ct.Device) -> None:
    """One sequence, one set of counts; only what has no counterpart on the CPU is left out."""
    where = own(device)
    with ct.ledger() as led:
        small = ct.asarray(X, device=where)
        large = ct.asarray(LARGE, device=where)  # above 64 KB: written at once
        assert led.counts.uploads == 1
        a = small + 1.0
        b = large * 2.0
        ct.fetch(a, b).result()
        a.numpy()
        with where.batch() as batch:
            c = ct.softmax(ct.softmax(batch.upload(X)) + batch.upload(X))
        c.peek()
        batch.execute()
    led.expect(
        uploads=3,
        downloads=2,
        peeks=1,
        submissions=2,
        launches=5,
        plans=2,
        copies=0,
        cache_hits=0 if where.name == "cpu" else 1,
        compiles=0 if where.name == "cpu" else 4,
        allocations=7,  # the last result has the place of the first temporary
    )
    assert led.counts.upload_bytes >= LARGE.nbytes + 3 * X.nbytes
    assert led.counts.download_bytes >= LARGE.nbytes + 2 * X.nbytes
    assert led.counts.peak_bytes >= 2 * LARGE.nbytes
    assert led.counts.peek_bytes >= X.nbytes
    assert (led.counts.parameter_bytes > 0) is (where.name != "cpu")


def test_an_upload_alone_is_no_submission(device: ct.Device) -> None:
    with ct.ledger() as led:
        x = ct.asarray(X, device=device)
    led.expect(uploads=1, submissions=0, plans=0, downloads=0)
    with ct.ledger() as led:
        x.numpy()
        ct.asarray(X, device=device).numpy()
    led.expect(uploads=1, submissions=0, downloads=2)


def test_what_needs_no_work_counts_nothing(device: ct.Device) -> None:
    with ct.ledger() as led:
        empty = ct.asarray(np.zeros((0, 4), np.float32), device=device)
        assert (ct.relu(empty) + 1.0).numpy().shape == (0, 4)
        assert repr(empty)
        _ = (empty.shape, empty.T, empty[:0], empty.reshape(4, 0))
    led.expect(uploads=0, submissions=0, launches=0, downloads=0)


def test_the_second_run_compiles_plans_and_allocates_nothing(device: ct.Device) -> None:
    where = own(device)
    first = chain(where).numpy()
    with ct.ledger() as led, ct.forbid("compile", "allocation"):
        second = chain(where).numpy()
    led.expect(uploads=1, downloads=1, submissions=1, launches=3, plans=0, compiles=0,
               allocations=0)  # fmt: skip
    np.testing.assert_array_equal(first, second)


def test_bytes_are_physical(device: ct.Device) -> None:
    odd = np.ones((3, 5), np.float16)
    with ct.ledger() as led:
        x = ct.asarray(odd, device=device)
        x.numpy()
    dense = device.name == "cpu"
    assert x.nbytes == x.size_bytes == 30
    assert led.counts.upload_bytes == (32 if dense else 36 + 12)
    assert led.counts.download_bytes == (30 if dense else 36)


def test_a_read_back_of_several_is_one_download(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    with ct.ledger() as led:
        results = ct.fetch(x, x + 1.0, x[1:].T, ct.relu(x)).result()
    led.expect(downloads=1, submissions=1, launches=2)
    for got, want in zip(results, (X, X + 1, X[1:].T, np.maximum(X, 0)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_peek_is_counted_apart(device: ct.Device) -> None:
    y = ct.asarray(X, device=device) + 1.0
    with ct.ledger() as led:
        np.testing.assert_array_equal(y.peek(), X + 1)
    led.expect(peeks=1, downloads=0, download_bytes=0)
    with ct.forbid("transfer"):
        np.testing.assert_array_equal(y.peek(), X + 1)


def test_totals_are_of_the_process(device: ct.Device) -> None:
    before = ct.totals()
    chain(device).numpy()
    delta = ct.totals() - before
    assert (delta.uploads, delta.downloads, delta.submissions, delta.launches) == (1, 1, 1, 3)
    assert "uploads 1" in str(delta)
    assert str(ct.Counts()) == "nothing"


# -- scopes ---------------------------------------------------------------------------------------


def test_entering_and_leaving_flush_what_is_recorded(device: ct.Device) -> None:
    a = ct.asarray(X, device=device) + 1.0
    with ct.ledger() as led:
        led.expect(submissions=0)
        assert a.is_resident
        b = a * 2.0
        assert led.submissions == 1
        c = b * 2.0
        assert led.as_dict()["submissions"] == 2
        d = c * 2.0
        assert "submissions 3" in str(led) == repr(led)
        _ = d * 3.0
        e = d * 2.0
    assert led.submissions == 4
    assert e.is_resident
    f = e + 1.0
    led.expect(submissions=4)  # a closed scope flushes nothing
    assert not f.is_resident


def test_scopes_nest(device: ct.Device) -> None:
    with ct.ledger() as outer:
        a = ct.asarray(X, device=device) + 1.0
        with ct.ledger() as inner:
            inner.expect(submissions=0, uploads=0)
            (a + 1.0).numpy()
        inner.expect(submissions=1, downloads=1)
        (a + 2.0).numpy()
    outer.expect(submissions=3, downloads=2, uploads=1)
    inner.expect(submissions=1)


def test_expect_says_the_difference(device: ct.Device) -> None:
    with ct.ledger() as led:
        chain(device)
        with pytest.raises(ct.ContractError) as raised:
            led.expect(uploads=1, submissions=2, downloads=1)
    text, here = str(raised.value), f"{__file__}:{raised.traceback[0].lineno + 1}"
    assert f"downloads: expected 1, got 0, at {here}  (all: uploads 1" in text
    assert text.startswith("ledger: submissions: expected 2, got 1; downloads: expected 1, got 0")
    assert "launches 3" in text
    with pytest.raises(ct.ContractError, match=r"no such count: typos; expected some of uploads, "):
        led.expect(typos=1)
    with pytest.raises(AttributeError, match=r"a ledger has no count 'typos'; expected .* syncs, "):
        _ = led.typos
    chain(device)


def test_the_scope_ends_with_an_exception(device: ct.Device) -> None:
    with pytest.raises(KeyError), ct.ledger() as led:
        raise KeyError
    chain(device)
    led.expect(submissions=0)


def test_scopes_follow_tasks_and_to_thread(device: ct.Device) -> None:
    async def work(value: float) -> None:
        with device.batch() as batch:
            y = batch.upload(X) + value
        await asyncio.sleep(0)
        np.testing.assert_array_equal((await ct.fetch(y))[0], X + np.float32(value))

    async def main() -> None:
        with ct.ledger() as outer:
            await asyncio.gather(*(work(float(i)) for i in range(4)))
            with ct.ledger() as led:
                await asyncio.to_thread(lambda: chain(device).numpy())
            led.expect(submissions=1, downloads=1, uploads=1)
            with ct.ledger() as led:
                lazy = await asyncio.to_thread(lambda: ct.asarray(X, device=device) + 9.0)
                led.expect(submissions=1, uploads=1)  # recorded in this scope, by another thread
                assert lazy.is_resident
        outer.expect(submissions=6, downloads=5, uploads=6)

    async def two_scopes() -> None:
        async def one(times: int) -> None:
            with ct.ledger() as led:
                for _ in range(times):
                    chain(device)
                    await asyncio.sleep(0)
            led.expect(submissions=times)

        await asyncio.gather(one(1), one(2), one(3))

    asyncio.run(main())
    asyncio.run(two_scopes())


def test_batches_of_tasks_do_not_mix(device: ct.Device) -> None:
    async def work(value: float) -> tuple[int, Array]:
        with device.batch() as batch:
            y = batch.upload(X)
            for _ in range(3):
                await asyncio.sleep(0)
                y = y + value
            recorded = batch.num_operations
        return recorded, (await ct.fetch(y))[0]

    async def main() -> list[tuple[int, Array]]:
        return await asyncio.gather(*(work(float(i)) for i in range(4)))

    for number, (recorded, result) in enumerate(asyncio.run(main())):
        assert recorded == 3
        np.testing.assert_array_equal(result, X + np.float32(3 * number))


def test_a_task_outlives_the_batch_it_was_started_in(device: ct.Device) -> None:
    async def late(gate: asyncio.Event) -> Array:
        await gate.wait()
        return (ct.asarray(X, device=device) + 1.0).numpy()

    async def main() -> Array:
        gate = asyncio.Event()
        with device.batch():
            task = asyncio.create_task(late(gate))
            await asyncio.sleep(0)
        gate.set()
        return await task

    np.testing.assert_array_equal(asyncio.run(main()), X + 1)


def test_bind_counts_what_another_thread_does(device: ct.Device) -> None:
    def lazy() -> ct.Tensor:
        return ct.asarray(X, device=device) + 1.0

    with ThreadPoolExecutor(1) as pool, ct.ledger() as led:
        pool.submit(lambda: chain(device).numpy()).result()
        led.expect(submissions=0)
        before = pool.submit(lazy).result()  # recorded by that thread, outside of the scope
        y = pool.submit(led.bind(lazy)).result()
        led.expect(submissions=1, uploads=1)
        assert before.is_resident
        assert y.is_resident
        with pytest.raises(ct.TransferForbidden), ct.forbid("transfer"):
            bound = led.bind(lazy)
            pool.submit(bound).result()
        named = led.bind(lazy)
    assert getattr(named, "__name__", "") == "lazy"


def test_bind_of_a_scope_that_the_caller_is_not_in(device: ct.Device) -> None:
    with ct.ledger() as led:
        pass
    led.bind(lambda: chain(device))()
    assert led.counts.submissions == 1


def test_counts_from_many_threads() -> None:
    before = ct.totals()

    def work() -> None:
        for _ in range(1000):
            count(copies=1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ct.totals() - before).copies == 8000


# -- forbid ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [X, LARGE], ids=["small", "large"])
def test_forbid_transfer_raises_at_the_line(device: ct.Device, data: Array) -> None:
    x = ct.asarray(data, device=device)
    with ct.ledger() as led, ct.forbid("transfer"):
        y = x + 1.0
        with pytest.raises(ct.TransferForbidden, match=r"upload of .* bytes: transfer inside"):
            ct.asarray(data, device=device)
        with pytest.raises(ct.TransferForbidden, match=r"read of add: transfer inside ct.forbid"):
            y.numpy()
        with pytest.raises(ct.TransferForbidden) as raised:
            y.numpy()
        here = f"{__file__}:{raised.traceback[0].lineno + 1}"
        assert str(raised.value).endswith(f"transfer inside ct.forbid('transfer'), at {here}")
        for use in (lambda: bool(y[0] if y.ndim == 1 else y[0, 0]), lambda: np.asarray(y)):
            with pytest.raises(ct.TransferForbidden):
                use()
        assert not y.is_resident  # nothing was done
        with pytest.raises(ct.TransferForbidden):
            device.batch().upload(data)
        _ = repr(y)
    led.expect(uploads=0, downloads=0, submissions=1)
    np.testing.assert_array_equal(y.numpy(), data + 1)


def test_forbid_transfer_at_execute(device: ct.Device) -> None:
    batch = device.batch()
    y = batch.relu(batch.upload(X))
    with ct.ledger() as led, ct.forbid("transfer"), pytest.raises(ct.TransferForbidden):
        batch.execute()
    led.expect(uploads=0, submissions=0)
    batch.execute()
    np.testing.assert_array_equal(y.numpy(), np.maximum(X, 0))


@pytest.mark.devices("simulator", "webgpu")
def test_forbid_compile(device: ct.Device) -> None:
    where = own(device)
    x = ct.asarray(X, device=where)
    y = ct.relu(x)
    y.numpy()
    batch = where.batch()
    kept = batch.relu(x)  # kept, so that tanh is a launch of its own
    z = batch.tanh(kept)
    with ct.ledger() as led, ct.forbid("compile"):
        ct.relu(x).numpy()
        with pytest.raises(ct.TransferForbidden) as raised:
            batch.execute()
        assert "tanh (recorded at" in str(raised.value)
        assert "kernel 'tanh': compile inside ct.forbid('compile')" in str(raised.value)
    led.expect(compiles=0, submissions=1)
    batch.execute()
    np.testing.assert_allclose(z.numpy(), np.tanh(np.maximum(X, 0)), rtol=1e-5)


def test_forbid_allocation(device: ct.Device) -> None:
    where = own(device)
    x = ct.asarray(X, device=where)
    x.numpy()
    batch = where.batch()
    y = batch.relu(x)
    with ct.ledger() as led, ct.forbid("allocation"):
        with pytest.raises(ct.TransferForbidden, match=r"relu \(recorded.*bytes of device memory"):
            batch.execute()
        with pytest.raises(ct.TransferForbidden, match="bytes of device memory: allocation inside"):
            ct.empty((100, 100), device=where)
    led.expect(allocations=0, submissions=0)
    batch.execute()
    np.testing.assert_array_equal(y.numpy(), np.maximum(X, 0))


def test_forbid_flushes_what_was_recorded_before_it(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    with ct.forbid("transfer"):
        y = x + 1.0
    np.testing.assert_array_equal(y.numpy(), X + 1)


def test_forbid_nests_and_ends() -> None:
    device = ct.device("cpu")
    with ct.forbid("compile"):
        with ct.forbid("transfer"), pytest.raises(ct.TransferForbidden):
            ct.asarray(X, device=device)
        ct.asarray(X, device=device)
    text = r"forbid: expected some of transfer.*, got copies"
    with pytest.raises(ct.ContractError, match=text), ct.forbid("copies"):
        pass
    with pytest.raises(ct.ContractError, match="got nothing"), ct.forbid():
        pass


# -- memory ---------------------------------------------------------------------------------------


def test_memory_tells_use_peak_and_budget(device: ct.Device) -> None:
    where = own(device, memory_limit=1 << 20)
    assert where.memory.budget == 1 << 20
    x = ct.asarray(LARGE, device=where)
    y = x + 1.0
    y.numpy()
    most = where.memory.peak
    assert most >= where.memory.live >= 2 * LARGE.nbytes
    del x, y
    small = ct.asarray(X, device=where) + 1.0
    small.numpy()
    assert where.memory.peak == most
    assert where.memory.held >= where.memory.live
    where.reset_peak()
    assert where.memory.peak == where.memory.live < most
    text = str(where.memory)
    assert text.startswith(f"live {where.memory.live:,}  held ")
    assert "budget 1,048,576" in text
    assert text.endswith(" bytes")


def test_memory_as_the_driver_tells_it(device: ct.Device) -> None:
    told = device.memory
    if not device.name.startswith("cuda"):
        assert (told.free, told.total) == (None, None)
        assert "free unknown  total unknown" in str(told)
        return
    assert told.free is not None
    assert told.total is not None
    assert 0 < told.free < told.total
    assert f"total {told.total:,}" in str(told)
