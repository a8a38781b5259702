"""The CPU's formulas on blocks: what a list of calls computes and allocates."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.host import blockwise
from centella.host.blockwise import BLOCK, MOST_THREADS, SHARED, blocks_of, cores, share
from centella.host.call_list import CallList
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.operands import NUMPY, SYMBOLS

RNG = np.random.default_rng(4)
SHAPES = (
    (1,), (7,), (BLOCK + 3,), (3, 5), (5, BLOCK), (2, 3, BLOCK // 2 + 1), (4, 1, 9), (40, 1000),
    (5, SHARED - 1),
)  # fmt: skip


def test_busy_helpers_are_not_waited_for() -> None:
    """All helpers are busy elsewhere: the thread that asks does the work and goes on."""
    busy, free = threading.Barrier(MOST_THREADS + 1), threading.Event()

    def long(part: int) -> None:
        busy.wait(10)
        free.wait(60)

    parts = list(range(MOST_THREADS))
    other = threading.Thread(target=share, args=(long, parts, MOST_THREADS))
    other.start()
    busy.wait(10)
    done: list[int] = []
    mine = threading.Thread(target=share, args=(done.append, parts, MOST_THREADS))
    mine.start()
    mine.join(5)
    waited = mine.is_alive()
    free.set()
    mine.join()
    other.join()
    assert not waited
    assert sorted(done) == parts


@pytest.mark.parametrize("whole_rows", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_cut_an_array_into_parts_of_at_most_a_block(
    shape: tuple[int, ...], whole_rows: bool
) -> None:
    seen = np.zeros(shape, np.int32)
    for index in blocks_of(shape, whole_rows):
        assert seen[index].size <= SHARED or (whole_rows and seen[index].shape[-1:] == shape[-1:])
        seen[index] += 1
    assert (seen == 1).all()
    if whole_rows and len(shape) > 1:
        assert all(seen[index].shape[-1] == shape[-1] for index in blocks_of(shape, True))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_part_is_worked_on_once_by_whichever_thread(threads: int) -> None:
    done: list[int] = []
    share(done.append, list(range(100)), threads)
    assert sorted(done) == list(range(100))
    share(done.append, [], threads)
    assert len(done) == 100


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_part_raises_reaches_the_caller_and_later_work_goes_on(threads: int) -> None:
    def fail(part: int) -> None:
        if part == 7:
            raise ValueError("part 7")

    for _ in range(2 * blockwise.MOST_THREADS):
        with pytest.raises(ValueError, match="part 7"):
            share(fail, list(range(10)), threads)
    done: list[int] = []
    share(done.append, [1, 2, 3], threads)
    assert sorted(done) == [1, 2, 3]


@pytest.mark.parametrize("started", [0, 1])
def test_without_a_thread_the_caller_does_the_work(
    monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    """As at the end of the process; of helpers that are there none is left working."""
    submit, calls, done = ThreadPoolExecutor.submit, [0], list[int]()

    def scarce(self: Any, call: Any) -> Any:
        calls[0] += 1
        if calls[0] > started:
            raise RuntimeError("can't start new thread")
        return submit(self, call)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", scarce)
        share(done.append, list(range(50)), 4)
    assert sorted(done) == list(range(50)) and calls[0] == started + 1
    share(done.append, [50, 51], 2)
    assert sorted(done) == list(range(52))


def test_threads_follow_the_cores_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cores() == 1 == blockwise.threads_for(1 << 30)
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    assert cores() == blockwise.MOST_THREADS
    assert blockwise.threads_for(SHARED) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert 1 <= cores() <= blockwise.MOST_THREADS


def test_any_number_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = RNG.standard_normal((5, 12, 300, 32), np.float32)
    y = RNG.standard_normal((2048, 640), np.float32)
    results = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        device = ct.device("cpu", pool="reuse")
        a, b = ct.asarray(x, device=device), ct.asarray(y, device=device)
        heads = ct.attention(a, a, a)
        results.append((heads.numpy(), ct.gelu(b).numpy(), ct.layer_norm(b).numpy()))
    (attended, *exact), (again, *same) = results
    assert all((e == s).all() for e, s in zip(exact, same, strict=True))
    assert np.abs(attended - again).max() < 1e-6  # blocks of other sizes: other sums in products


def test_an_array_without_elements_has_no_blocks() -> None:
    assert blocks_of((0, 4)) == blocks_of((3, 0), whole_rows=True) == []


def calls_of(formula: Callable[..., Any], *operands: Any, out: Any = None) -> Any:
    calls = CallList([x.dtype for x in operands], operands[0].shape[-1])
    run = calls.finish(formula(SYMBOLS, *calls.operands))
    result = np.empty_like(operands[0]) if out is None else out
    with np.errstate(all="ignore"):
        run(operands, result)
    return result


FORMULAS: dict[str, Callable[..., Any]] = {
    **ACTIVATIONS,
    "operand": lambda o, x: x,
    "numbers on the left": lambda o, x: 1.0 - 2.0 / (3.0 + 4.0 * x),
    "unused": lambda o, x: (o.exp(x), x + 1.0)[1],
    "read again": lambda o, x: (x * 2.0 + 1.0) * x - (x * 2.0),
    "choice": lambda o, x: o.where(o.less(x, 0.0), 1.0, x * x),
    "choice of numbers": lambda o, x: o.where(~(x < 0.5) & (x >= 0.0), 1.0, -1.0) * x,
    "rows": lambda o, x: (x - o.row_max(x)) / o.row_sum(x * x) + o.row_first(x),
    "a column": lambda o, x: o.row_sum(x),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_tape_computes_what_its_formula_says(name: str) -> None:
    x = np.array([[0.0, -0.0, 0.3, -1.5, 9.0, -9.0, 60.0], [1, 2, 3, -4, -5, 1e-30, -1e-30]], "f4")
    with np.errstate(all="ignore"):
        exact = np.broadcast_to(FORMULAS[name](NUMPY, x.astype(np.float64)), x.shape)
    np.testing.assert_allclose(calls_of(FORMULAS[name], x), exact, rtol=2e-6, atol=1e-6)
    inside = x.copy()
    np.testing.assert_array_equal(
        calls_of(FORMULAS[name], inside, out=inside), calls_of(FORMULAS[name], x)
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_of_nan_and_infinity(name: str) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0], np.float32)
    with np.errstate(all="ignore"):
        expected = FORMULAS[name](NUMPY, x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(calls_of(FORMULAS[name], x), expected)


def test_gelu_is_within_its_bound() -> None:
    x = np.linspace(-12, 12, 400_001, dtype=np.float32)
    y = NUMPY.gelu(x)
    assert (np.abs(y - NUMPY.gelu(x.astype(np.float64))) <= 2.5e-7 * np.abs(x)).all()
    np.testing.assert_array_equal(y, calls_of(FORMULAS["gelu"], x))
    assert (y[x > 6.1] == x[x > 6.1]).all()
    far = NUMPY.gelu(np.array([-8.5, -30, -1e30], np.float32))
    assert ((far <= 0) & (far > -1e-20)).all()


def test_a_layer_allocates_nothing_once_it_has_run() -> None:
    device = ct.device("cpu", pool="reuse")
    rows, width, heads = 512, 64, 4

    def array(*shape: int) -> ct.Tensor:
        return ct.asarray(RNG.standard_normal(shape, dtype=np.float32), device=device)

    qkv, wide, narrow = array(3 * width, width), array(4 * width, width), array(width, 4 * width)
    bias, weight, lengths = array(4 * width), array(width), ct.asarray([64] * 8, device=device)

    def layers(x: ct.Tensor) -> ct.Tensor:
        for _ in range(3):
            y = ct.linear(x, qkv).reshape(8, rows // 8, 3, heads, width // heads)
            y = y.permute(2, 0, 3, 1, 4)
            y = ct.attention(y[0], y[1], y[2], lengths=lengths).permute(0, 2, 1, 3)
            x = ct.layer_norm(y.reshape(rows, width) * 0.5 + x, weight, weight)
            y = ct.linear(x, wide, bias, activation="gelu")
            x = ct.rms_norm(ct.linear(y, narrow, residual=x), weight)
        return x

    replay = device.compile(layers, array(rows, width))
    x = array(rows, width)
    expected = replay(x).numpy()
    for _ in range(3):
        replay(x)
    device.synchronize()
    peaks = []  # a thread that has had no work so far takes its memory in one of these
    for _ in range(4):
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            with ct.ledger() as led:
                replay(x)
                device.synchronize()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()
        assert led.allocations == 0
    assert min(peaks) < rows * width * 4 // 2, peaks  # bytes; a single value has twice as many
    np.testing.assert_array_equal(replay(x).numpy(), expected)


@pytest.mark.devices("cpu")
def test_a_row_has_the_same_bits_in_every_block(device: ct.Device) -> None:
    rows = RNG.standard_normal((300, 384), dtype=np.float32)
    weight = RNG.standard_normal(384, dtype=np.float32)

    def run(x: Any) -> Any:
        given = ct.asarray(x, device=device)
        scale = ct.asarray(weight, device=device)
        return ct.softmax(ct.gelu(ct.layer_norm(given, scale, scale) * 2.0)).numpy()

    whole = run(rows)
    for first in (0, 84, 85, 170, 299):
        np.testing.assert_array_equal(run(rows[first : first + 1]), whole[first : first + 1])


def test_a_product_takes_operands_of_any_layout() -> None:
    device = ct.device("cpu")
    x = RNG.standard_normal((6, 4, 5), dtype=np.float32)
    weight = RNG.standard_normal((5, 3), dtype=np.float32)
    other = RNG.standard_normal((3, 9, 4), dtype=np.float32)
    bias = RNG.standard_normal(6, dtype=np.float32)

    def given(data: Any) -> ct.Tensor:
        return ct.asarray(data, device=device)

    rows = given(x).permute(1, 0, 2)[:, 1:4]  # [4, 3, 5], rows of no one pitch
    residual = given(other).permute(2, 1, 0)[:, 2:5]  # [4, 3, 3], columns apart
    y = ct.linear(rows, given(weight).T, given(bias)[::2], activation="relu", residual=residual)
    exact = np.maximum(x.transpose(1, 0, 2)[:, 1:4].astype("f8") @ weight + bias[::2], 0)
    exact += other.transpose(2, 1, 0)[:, 2:5]
    np.testing.assert_allclose(y.numpy(), exact, rtol=1e-5, atol=1e-5)
    q, k, v = (given(RNG.standard_normal((2, 7, 5, 3, 8), dtype=np.float32)) for _ in range(3))
    seen = [t.permute(4, 0, 2, 3, 1)[0] for t in (q, k, v)]  # [2, 5, 3, 7]: no stride of 1
    copies = [t.contiguous() for t in seen]
    lengths = given(np.array([3, 0], np.int32))
    for mask in (None, lengths):
        got = ct.attention(seen[0], seen[1], seen[2], lengths=mask).numpy()
        expected = ct.attention(copies[0], copies[1], copies[2], lengths=mask).numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_array_equal(got[1], 0)
