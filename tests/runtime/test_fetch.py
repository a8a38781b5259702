"""`fetch` of a captured function: inputs, launches and read-back in one submission."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.runtime.workspace import Workspace
from centella.tensors import functional
from tests.runtime.test_device import ends
from tests.tensors.test_jit import expected, layer

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)
THREADS = 8


def random(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def own(device: ct.Device) -> ct.Device:
    """A device of the same kind whose pool reuses memory; the simulator's of the tests does not."""
    return ct.device("simulator") if device.name == "simulator" else device


# -- one submission -------------------------------------------------------------------------------


def test_a_fetch_is_one_write_one_submission_one_read(device: ct.Device) -> None:
    fn = device.compile(layer(device), random(3, 7))
    for _ in range(3):
        x = random(3, 7)
        with ct.ledger() as led, ct.forbid("compile", "allocation"):
            y = fn.fetch(x).result()
            led.expect(
                uploads=1, submissions=1, downloads=1, launches=fn.launches, copies=0, plans=0,
                compiles=0, allocations=0, parameter_bytes=0,
            )  # fmt: skip
        assert (type(y), y.dtype, y.shape) == (np.ndarray, np.dtype(np.float32), (3, 5))
        assert np.allclose(y, expected(x), atol=1e-5)
        assert np.array_equal(fn(x).numpy(), y)


def test_tensors_are_inputs_too(device: ct.Device) -> None:
    fn = device.compile(layer(device), random(3, 7))
    x = random(3, 7)
    on_device = ct.asarray(x, device=device)
    on_device.numpy()
    with ct.ledger() as led:
        y = fn.fetch(on_device).result()
        led.expect(uploads=0, copies=1, submissions=1, downloads=1)
    assert np.allclose(y, expected(x), atol=1e-5)
    waiting = on_device * 2.0  # recorded, not run yet
    assert np.allclose(fn.fetch(waiting).result(), expected(2 * x), atol=1e-5)


def test_views_numbers_and_dtypes_come_back_as_they_are(device: ct.Device) -> None:
    @ct.jit(device=device)
    def fn(x: Any) -> dict[str, Any]:
        wide = functional.concat([x] * 40, axis=-1)  # [4, 200 x 40]
        return {
            "turned": x.T, "row": x[1:2, 3:], "few": wide[:, ::4000], "none": x[:0],
            "half": x.astype("f16"), "brain": [x.astype("bf16"), x], "note": 7,
        }  # fmt: skip

    for _ in range(2):
        x = np.round(random(4, 200) * 4) / 4
        with ct.ledger() as led:
            got = fn.fetch(x).result()
        led.expect(downloads=1)
        assert led.download_bytes < 8 * x.nbytes
        assert np.array_equal(got["turned"], x.T)
        assert np.array_equal(got["row"], x[1:2, 3:])
        assert np.array_equal(got["few"], np.concatenate([x] * 40, -1)[:, ::4000])
        assert got["none"].shape == (0, 200)
        assert got["half"].dtype == np.float16
        assert np.array_equal(got["half"], x)
        assert got["brain"][0].dtype == np.float32
        assert np.array_equal(got["brain"][0], x)
        assert np.array_equal(got["brain"][1], x)
        assert got["note"] == 7


def test_what_comes_back_is_the_callers(device: ct.Device) -> None:
    fn = device.compile(layer(device), random(3, 7))
    a, b = random(3, 7), random(3, 7)
    first = fn.fetch(a).result()
    before = first.copy()
    first += 1
    assert np.array_equal(fn.fetch(a).result(), before)
    fn.fetch(b).result()
    assert np.array_equal(first, before + 1)


def test_a_function_that_only_changes_a_state(device: ct.Device) -> None:
    total = ct.State(np.zeros(4, np.float32), device=device)

    def add(x: ct.Tensor) -> ct.Tensor | None:
        total.assign(total.value + x)
        return total.value if shown else None

    shown = False
    fn = device.compile(add, np.ones(4, np.float32))
    with ct.ledger() as led:
        assert fn.fetch(np.ones(4, np.float32)).result() is None
        led.expect(submissions=1, downloads=0)
    shown = True
    fn = device.compile(add, np.ones(4, np.float32))
    assert np.array_equal(fn.fetch(np.full(4, 2, np.float32)).result(), np.full(4, 3))
    assert np.array_equal(total.numpy(), np.full(4, 3))


def test_launches_are_timed(device: ct.Device) -> None:
    fn = device.compile(layer(device), random(3, 7))
    if device.backend.clock.missing:
        pytest.skip(device.backend.clock.missing)
    with ct.ledger(timing=True) as led:
        y = fn.fetch(x := random(3, 7)).result()
    led.expect(uploads=1, submissions=1, downloads=1)
    assert sum(k.launches for k in led.kernels()) == fn.launches
    assert np.allclose(y, expected(x), atol=1e-5)


# -- ownership ------------------------------------------------------------------------------------


def test_several_are_under_way_at_once(device: ct.Device) -> None:
    fn = device.compile(layer(device), random(3, 7))
    xs = [random(3, 7) for _ in range(5)]
    pending = [fn.fetch(x) for x in xs]
    for x, one in reversed(list(zip(xs, pending, strict=True))):
        assert np.allclose(one.result(10), expected(x), atol=1e-5)
        assert one.done()
        assert one.result() is one.result()
    del pending
    fn.fetch(xs[0])  # nobody asks for it
    assert np.allclose(fn.fetch(xs[1]).result(), expected(xs[1]), atol=1e-5)


def test_fetches_are_awaited(device: ct.Device) -> None:
    fn = device.compile(layer(device), random(3, 7))
    xs = [random(3, 7) for _ in range(4)]

    async def one(x: Array) -> Array:
        got: Array = await fn.fetch(x)
        return got

    async def every() -> list[Array]:
        return await asyncio.gather(*map(one, xs))

    for x, y in zip(xs, asyncio.run(every()), strict=True):
        assert np.allclose(y, expected(x), atol=1e-5)


def test_threads_share_one_capture(device: ct.Device) -> None:
    fn = ct.jit(layer(device), device=device)
    inputs = [random(3, 7) for _ in range(40)]
    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(lambda x: fn.fetch(x).result(), inputs))
    for x, y in zip(inputs, results, strict=True):
        assert np.allclose(y, expected(x), atol=1e-5)
    assert fn.signatures == 1


# -- refusals -------------------------------------------------------------------------------------


def test_a_fetch_that_is_forbidden_runs_nothing(device: ct.Device) -> None:
    total = ct.State(np.zeros(4, np.float32), device=device)

    def add(x: ct.Tensor) -> ct.Tensor:
        total.assign(total.value + x)
        return x * 2.0

    x = ct.asarray(np.ones(4, np.float32), device=device)
    fn = device.compile(add, x)
    fn(x)
    with ct.ledger() as led:
        with ct.forbid("transfer"), pytest.raises(ct.TransferForbidden, match="read of add"):
            fn.fetch(x)
        led.expect(submissions=0, uploads=0, copies=0, downloads=0)
    assert np.array_equal(total.numpy(), np.ones(4))


def test_a_fetch_is_no_part_of_a_capture(device: ct.Device) -> None:
    x = random(3, 7)
    inner = ct.jit(layer(device), device=device)
    compiled = device.compile(layer(device), x)
    for fetch in (inner.fetch, compiled.fetch):
        with pytest.raises(ct.ContractError, match="read while a function is captured; return it"):
            device.compile(lambda t, read=fetch: t + read(x).result(), x)
    assert np.allclose(inner.fetch(x).result(), expected(x), atol=1e-5)


def test_a_fetch_of_another_signature(device: ct.Device) -> None:
    fn = device.compile(layer(device), random(3, 7))
    with pytest.raises(ct.ContractError, match=r"for \(f32 \[3, 7\]\), got \(f32 \[2, 7\]\)"):
        fn.fetch(random(2, 7))
    with pytest.raises(ct.DTypeError, match="pass dtype="):
        fn.fetch(np.ones((3, 7)))
    assert fn.fetch(random(3, 7)).result().shape == (3, 5)


def test_an_input_is_not_kept_by_the_capture(device: ct.Device) -> None:
    where = own(device)
    fn = where.compile(lambda x: x + 1.0, random(5))
    x = ct.asarray(random(5), device=where)
    fn.fetch(x).result()
    watch = weakref.ref(x._value)
    with ct.ledger() as led:
        fn.fetch(x).result()
    led.expect(copies=0)  # it is there from the last time
    del x
    where.synchronize()
    gc.collect()
    assert watch() is None
    y = random(5)
    assert np.array_equal(fn.fetch(ct.asarray(y, device=where)).result(), y + 1)


def test_a_version_that_was_overtaken_is_no_input(device: ct.Device) -> None:
    state = ct.State(random(5), device=device)
    fn = device.compile(lambda x: x + 1.0, random(5))
    old = state.value
    assert np.array_equal(fn.fetch(old).result(), old.numpy() + 1)
    state.assign(2)
    with pytest.raises(ct.ContractError, match="a stale version"):
        fn.fetch(old)
    with pytest.raises(ct.ContractError, match="a stale version"):
        fn._replay.fetch([old._value], ("here", 1))  # overtaken on the way, by another thread
    assert np.array_equal(fn.fetch(state.value).result(), np.full(5, 3))


END = """
import numpy as np, centella as ct
fn = ct.jit(lambda x: x * 2.0, device={name!r})
y = fn(np.ones(3, np.float32))
print(fn.fetch(np.ones(3, np.float32)).result())
waiting = fn.fetch(np.ones(3, np.float32))
asked = fn.fetch(np.ones(3, np.float32))
asked.done()
"""


@pytest.mark.devices("cpu", "simulator", "webgpu")
def test_the_process_ends_while_captures_live(device: ct.Device) -> None:
    ends(END.format(name=device.name.partition(":")[0]), "[2. 2. 2.]\n")


# -- few captures ---------------------------------------------------------------------------------


def test_the_least_recently_used_capture_goes(device: ct.Device) -> None:
    where = own(device)
    runs: list[int] = []

    def count(x: Any) -> Any:
        runs.append(x.shape[0])
        return x + 1.0

    fn = ct.jit(count, device=where, maxsize=2)
    for n in (3, 4, 3, 5, 3, 4):
        x = random(n)
        assert np.array_equal(fn.fetch(x).result(), x + 1)
    assert runs == [3, 4, 5, 4]
    assert fn.signatures == 2
    kept = fn(random(3))  # its capture goes, the result stays
    before = kept.numpy()
    for n in (6, 7):
        fn(random(n))
    assert np.array_equal(kept.numpy(), before)
    fn.clear()
    assert fn.signatures == 0
    with pytest.raises(ct.ShapeError, match="maxsize: expected 1 or more, or None, got 0"):
        ct.jit(count, maxsize=0)
    nothing: Any = 5
    with pytest.raises(TypeError, match=r"^jit: expected a function, got int$"):
        ct.jit(nothing)


def test_the_memory_of_a_capture_that_went_is_used_again(device: ct.Device) -> None:
    where = own(device)
    fn = ct.jit(lambda x: functional.softmax(x + 1.0), device=where, maxsize=1)
    for n in (1000, 1001, 1000):
        fn.fetch(random(n)).result()
    pool_bytes = where.memory.held
    for n in (1001, 1000, 1002):
        x = random(n)
        assert np.allclose(fn.fetch(x).result().sum(), 1, atol=1e-5)
    assert where.memory.held == pool_bytes


def test_outputs_outlive_their_capture_and_no_longer(device: ct.Device) -> None:
    where = own(device)
    fn = where.compile(lambda x: x + 1.0, random(9))
    y = fn(x := random(9))
    del fn
    assert np.array_equal(y.numpy(), x + 1)
    del y
    where.synchronize()
    where.pool.drain()
    live = where.memory.live
    again = where.compile(lambda x: x + 1.0, random(9))
    again.fetch(x).result()
    del again
    where.pool.drain()
    assert where.memory.live == live  # without help of the garbage collector


# -- temporaries are shared -----------------------------------------------------------------------


def chain(x: Any) -> Any:
    """Each step needs what the one before made, and nothing is fused with it."""
    return functional.softmax(functional.softmax(functional.softmax(x * 2.0)))


def test_captures_compute_in_the_same_memory(device: ct.Device) -> None:
    where = own(device)
    fn = ct.jit(chain, device=where)
    sizes = (1300, 900, 1200, 700)
    inputs = {n: random(4, n) for n in sizes}
    wanted = {n: chain(ct.asarray(x, device=where)).numpy() for n, x in inputs.items()}
    before = {id(b) for b in where.executor.workspace.buffers}
    for _ in range(2):
        for n, x in inputs.items():  # by turns, the largest first
            assert np.array_equal(fn.fetch(x).result(), wanted[n])
    new = [b for b in where.executor.workspace.buffers if id(b) not in before]
    replays = [compiled._replay for compiled in fn._captured.values()]
    used = [{id(b) for b in r._executable.allocated} & {id(b) for b in new} for r in replays]
    assert all(one <= used[0] for one in used)
    largest = max(wanted[n].nbytes for n in sizes)
    assert sum(b.nbytes for b in new) <= 4 * largest
    fetches = [(fn.fetch(x), wanted[n]) for n, x in inputs.items()]  # all under way at once
    for pending, right in fetches:
        assert np.array_equal(pending.result(), right)


def test_threads_compute_in_the_same_memory(device: ct.Device) -> None:
    where = own(device)
    fns = [ct.jit(chain, device=where), ct.jit(lambda x: chain(x) + 1.0, device=where)]
    inputs = [random(2, 50 + 13 * (i % 3)) for i in range(18)]
    wanted = [chain(ct.asarray(x, device=where)).numpy() for x in inputs]

    def work(index: int) -> None:
        i = index % len(inputs)
        for offset, fn in enumerate(fns):
            assert np.allclose(fn.fetch(inputs[i]).result(), wanted[i] + offset, atol=1e-6)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(3 * len(inputs))))


def test_shared_memory_goes_with_the_last_capture(device: ct.Device) -> None:
    where = own(device)
    one, two = (ct.jit(chain, device=where) for _ in range(2))
    buffers_before = len(where.executor.workspace.buffers)
    x = random(3, 77)
    results = [fn.fetch(x).result() for fn in (one, two)]
    shared = len(where.executor.workspace.buffers)
    assert shared > buffers_before or where.name == "cpu"
    one.clear()
    assert np.array_equal(two.fetch(x).result(), results[1])
    two.clear()
    assert len(where.executor.workspace.buffers) <= buffers_before
    assert np.array_equal(results[0], results[1])


def test_a_plan_takes_no_buffer_twice_and_none_that_is_too_large_to_bind() -> None:
    where = ct.device("simulator", pool="reuse")
    workspace = Workspace(where.pool, most=4096)
    first = workspace.share()
    buffers = [first(n) for n in (1000, 1000, 3000, 9000)]
    assert len(set(buffers)) == 4
    second = workspace.share()
    assert second(500) in buffers[:2]
    assert second(1000) in buffers[:2]
    assert second(1000) is buffers[2]
    assert second(1000) not in buffers  # 9000 cannot be bound whole
    assert second(8000) is buffers[3]
    assert len(workspace.buffers) == 5
    del buffers, first, second
    assert not workspace.buffers
